//! What an API server and its client report, as errors of ours.

use std::borrow::Cow;

use coord_core::{Effect, Error, ErrorKind};
use http::StatusCode;
use serde::Deserialize;

/// What a request was for: stands in every error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op<'a> {
    /// The operation, one fixed word.
    pub(crate) name: &'static str,
    /// The lease, node, table or target it is about.
    pub(crate) resource: &'a str,
    /// What a failure means that does not say whether the request was applied.
    pub(crate) effect: Effect,
}

impl<'a> Op<'a> {
    /// Something that changes nothing.
    pub(crate) fn read(name: &'static str, resource: &'a str) -> Self {
        Self { name, resource, effect: Effect::None }
    }

    pub(crate) fn write(name: &'static str, resource: &'a str) -> Self {
        Self { name, resource, effect: Effect::Unknown }
    }

    /// The reading part of something that also writes.
    pub(crate) fn reading(self) -> Self {
        Self { effect: Effect::None, ..self }
    }

    pub(crate) fn error(self, kind: ErrorKind) -> Error {
        Error::new(kind, self.name).resource(self.resource)
    }

    /// No answer, or one that does not say whether the request was applied.
    pub(crate) fn unclear(self, why: impl Into<Cow<'static, str>>) -> Error {
        let error = self.error(ErrorKind::Unavailable).message(why);
        if self.effect == Effect::Unknown { error.effect_unknown() } else { error }
    }

    pub(crate) fn closed(self) -> Error {
        self.error(ErrorKind::Closed).message("the handle was closed; open the backend again")
    }

    /// For a method that gave up after it lost the same race again and again.
    pub(crate) fn contended(self) -> Error {
        self.error(ErrorKind::Unavailable).message("others kept changing the object meanwhile")
    }

    /// Names the operation and the resource in an error that was made by a decoder.
    pub(crate) fn corrupt(self, error: Error) -> Error {
        let why = error.message_text().to_owned();
        self.error(ErrorKind::Corrupt).message(why).with_source(error)
    }

    pub(crate) fn damaged(self, why: impl Into<Cow<'static, str>>) -> Error {
        self.error(ErrorKind::Corrupt).message(why)
    }
}

/// What was asked of the API server, as a Role names it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'a> {
    pub(crate) verb: &'static str,
    /// `configmaps`, `leases.coordination.k8s.io`.
    pub(crate) what: &'static str,
    pub(crate) namespace: &'a str,
}

/// The `Status` that a refusal carries; a proxy on the way may send anything else.
#[derive(Debug, Default, Deserialize)]
struct Said {
    #[serde(default)]
    message: String,
    #[serde(default)]
    reason: String,
}

/// How much of a refusal is shown.
const SAID_BYTES_MAX: usize = 512;

/// Maps an answer that is neither a success nor an outcome. Only what is known to be refused before
/// anything was stored has no effect.
pub(crate) fn refused(
    op: Op<'_>,
    asked: Asked<'_>,
    status: StatusCode,
    retry_after: Option<u64>,
    body: &[u8],
) -> Error {
    use ErrorKind::{Denied, Invalid, Misconfigured, Unavailable, Unsupported};
    let Asked { verb, what, namespace } = asked;
    let said = match serde_json::from_slice::<Said>(body) {
        Ok(said) if !said.message.is_empty() => said,
        _ => Said { message: shortened(&String::from_utf8_lossy(body)), reason: String::new() },
    };
    let (kind, why): (_, Cow<'static, str>) = match status.as_u16() {
        400 | 413 | 422 => (Invalid, "the API server does not take the object".into()),
        401 => (
            Denied,
            "the API server does not accept who this is; is the token or certificate valid?".into(),
        ),
        403 if said.reason == "Forbidden" && is_about_rights(&said.message) => (
            Denied,
            format!(
                "it may not {verb} {what} in namespace {namespace:?}; allow the verb in its Role, see \
                 deploy/kubernetes/role.yaml"
            )
            .into(),
        ),
        403 => (
            Denied,
            format!("the API server refuses to {verb} {what} in namespace {namespace:?}").into(),
        ),
        404 => (
            Misconfigured,
            format!(
                "the API server has no {what} in namespace {namespace:?}; is there such a namespace, and \
                 is this the API server?"
            )
            .into(),
        ),
        405 | 406 | 415 => (Unsupported, format!("the API server can't {verb} {what}").into()),
        409 | 410 => (Unavailable, "others changed the object meanwhile".into()),
        429 => (
            Unavailable,
            match retry_after {
                Some(seconds) => {
                    format!("the API server is busy and wants to be left alone for {seconds} s").into()
                }
                None => "the API server is busy".into(),
            },
        ),
        _ => {
            return op.unclear(with_said("the API server failed".into(), status, &said.message));
        }
    };
    op.error(kind).message(with_said(why, status, &said.message))
}

/// A 403 is said by the authorizer, and by admission as well: a namespace that is going away, a quota.
fn is_about_rights(message: &str) -> bool {
    message.contains(" cannot ") || message.is_empty()
}

fn with_said(why: Cow<'static, str>, status: StatusCode, said: &str) -> String {
    let said = shortened(said.trim());
    format!("{why}; said={said:?} status={}", status.as_u16())
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(SAID_BYTES_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Maps a request that got no answer.
pub(crate) fn request_error(op: Op<'_>, error: kube::Error) -> Error {
    use kube::Error::{Auth, HttpError, RustlsTls, TlsRequired};
    let mapped = match &error {
        // The request was not sent: there is nothing to send with it.
        Auth(_) => op
            .error(ErrorKind::Denied)
            .message("the credentials of the kubeconfig or the service account can't be read"),
        RustlsTls(_) | TlsRequired => op
            .error(ErrorKind::Misconfigured)
            .message("the encrypted connection can't be set up; are the certificates right?"),
        HttpError(_) => op.error(ErrorKind::Internal).message("the client refuses the request"),
        other => match cause_with(other, "certificate") {
            Some(failure) => {
                let why = format!(
                    "no encrypted connection to the API server; is its authority the one in the \
                     kubeconfig? said={failure:?}"
                );
                op.error(ErrorKind::Misconfigured).message(why)
            }
            // Perhaps in the middle of an answer, so that the effect stays unknown.
            None if cause_with(other, "corrupt message").is_some() => {
                op.unclear("what answers there does not encrypt; is that an API server?")
            }
            None => {
                op.unclear("no answer from the API server: the connection broke or there is none")
            }
        },
    };
    mapped.with_source(error)
}

/// What the chain of causes says with this word in it, if it does.
fn cause_with(error: &kube::Error, word: &str) -> Option<String> {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        let text = error.to_string();
        if text.contains(word) {
            return Some(shortened(&text));
        }
        cause = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: Asked<'static> =
        Asked { verb: "update", what: "leases.coordination.k8s.io", namespace: "prod" };

    fn mapped(status: u16, body: &str) -> Error {
        let status = StatusCode::from_u16(status).expect("a status");
        refused(Op::write("renew", "scheduler"), ASKED, status, Some(7), body.as_bytes())
    }

    #[test]
    fn only_what_is_known_to_be_refused_has_no_effect() {
        use ErrorKind::{Denied, Invalid, Misconfigured, Unavailable, Unsupported};
        for (status, kind, effect) in [
            (400, Invalid, Effect::None),
            (401, Denied, Effect::None),
            (403, Denied, Effect::None),
            (404, Misconfigured, Effect::None),
            (405, Unsupported, Effect::None),
            (409, Unavailable, Effect::None),
            (413, Invalid, Effect::None),
            (422, Invalid, Effect::None),
            (429, Unavailable, Effect::None),
            (500, Unavailable, Effect::Unknown),
            (502, Unavailable, Effect::Unknown),
            (503, Unavailable, Effect::Unknown),
            (504, Unavailable, Effect::Unknown),
        ] {
            let error = mapped(status, "not JSON");
            assert_eq!((error.kind(), error.effect()), (kind, effect), "{error}");
            assert_eq!((error.operation(), error.resource_name()), ("renew", Some("scheduler")));
            assert!(error.to_string().contains("not JSON"), "{error}");
        }
        assert!(mapped(429, "").to_string().contains("for 7 s"));
    }

    #[test]
    fn a_missing_right_is_told_from_another_refusal() {
        let missing = mapped(
            403,
            r#"{"kind":"Status","reason":"Forbidden","message":"leases \"a\" is forbidden: User \"u\" cannot update resource"}"#,
        );
        let text = missing.to_string();
        assert!(text.contains("may not update leases.coordination.k8s.io"), "{text}");
        assert!(text.contains("\"prod\"") && text.contains("role.yaml"), "{text}");
        let leaving = mapped(
            403,
            r#"{"kind":"Status","reason":"Forbidden","message":"forbidden: the namespace is being terminated"}"#,
        );
        let text = leaving.to_string();
        assert!(text.contains("being terminated") && !text.contains("role.yaml"), "{text}");
        let long = mapped(500, &"x".repeat(10_000)).to_string();
        assert!(long.len() < 1_000, "{} bytes", long.len());
    }
}
