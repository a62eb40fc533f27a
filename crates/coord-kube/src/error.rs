//! What an API server and its client report, as errors of ours.

use std::borrow::Cow;
use std::ops::Deref;
use std::time::Duration;

use coord_core::{Error, ErrorKind, Ttl, kit};
use http::StatusCode;
use serde::Deserialize;

/// What a request is for, and how long it may be held back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op<'a> {
    op: kit::Op<'a>,
    /// For how long from its refusal on a busy API server may hold a request back; as long as it
    /// asks for unless said.
    pub(crate) bears: Option<Duration>,
    /// How long the caller waits for it to be sent, where it is known to be impatient.
    pub(crate) patience: Option<Duration>,
}

impl<'a> From<kit::Op<'a>> for Op<'a> {
    fn from(op: kit::Op<'a>) -> Self {
        Self { op, bears: None, patience: None }
    }
}

impl<'a> Deref for Op<'a> {
    type Target = kit::Op<'a>;

    fn deref(&self) -> &kit::Op<'a> {
        &self.op
    }
}

impl<'a> Op<'a> {
    pub(crate) fn read(name: &'static str, resource: &'a str) -> Self {
        kit::Op::read(name, resource).into()
    }

    pub(crate) fn write(name: &'static str, resource: &'a str) -> Self {
        kit::Op::write(name, resource).into()
    }

    /// What keeps something alive that ends after this TTL: a tenth of it is the longest pause.
    pub(crate) fn within(self, ttl: Ttl) -> Self {
        Self { bears: Some(ttl.get() / 10), ..self.for_ttl(ttl) }
    }

    /// Whose caller thinks in terms of this TTL, and gives up after a fifth of it.
    pub(crate) fn for_ttl(self, ttl: Ttl) -> Self {
        Self { patience: Some(ttl.get() / 10), ..self }
    }

    /// The reading part of something that also writes.
    pub(crate) fn reading(self) -> Self {
        Self { op: self.op.reading(), ..self }
    }
}

/// What was asked of the API server, as a Role names it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked<'a> {
    pub(crate) verb: &'static str,
    /// `configmaps`, `leases.coordination.k8s.io`.
    pub(crate) what: &'static str,
    pub(crate) namespace: &'a str,
    /// It was permitted before, and is refused for a short while only.
    pub(crate) is_starting: bool,
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
    let Asked { verb, what, namespace, is_starting } = asked;
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
        403 if is_starting && is_about_rights(&said.message) => (
            Unavailable,
            format!(
                "it may not {verb} {what} in namespace {namespace:?} any more, as where the API server \
                 has just started; did its Role change?"
            )
            .into(),
        ),
        403 if said.reason == "Forbidden" && is_about_rights(&said.message) => (
            Denied,
            format!(
                "{MAY_NOT}{verb} {what} in namespace {namespace:?}; allow the verb in its Role, see \
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

/// Whether it is a 403 that speaks of rights. A credential that is not accepted is none.
pub(crate) fn is_forbidden(error: &Error) -> bool {
    error.message_text().starts_with(MAY_NOT)
}

/// How a message about a missing right begins.
const MAY_NOT: &str = "it may not ";

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
            None if cause_with(other, "client error (Connect)").is_some() => op
                .reading()
                .unclear("no answer from the API server: no connection, nothing was sent"),
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
    use coord_core::Effect;

    use super::*;

    const ASKED: Asked<'static> = Asked {
        verb: "update",
        what: "leases.coordination.k8s.io",
        namespace: "prod",
        is_starting: false,
    };

    fn mapped_as(asked: Asked<'_>, status: u16, body: &str) -> Error {
        let status = StatusCode::from_u16(status).expect("a status");
        refused(Op::write("renew", "scheduler"), asked, status, Some(7), body.as_bytes())
    }

    fn mapped(status: u16, body: &str) -> Error {
        mapped_as(ASKED, status, body)
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
        let starting = Asked { is_starting: true, ..ASKED };
        let refusal = r#"{"kind":"Status","reason":"Forbidden","message":"User \"u\" cannot update resource"}"#;
        let error = mapped_as(starting, 403, refusal);
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None));
        let leaving = r#"{"kind":"Status","reason":"Forbidden","message":"forbidden: the namespace is being terminated"}"#;
        assert_eq!(mapped_as(starting, 403, leaving).kind(), ErrorKind::Denied);
        let leaving = mapped(403, leaving);
        let text = leaving.to_string();
        assert!(text.contains("being terminated") && !text.contains("role.yaml"), "{text}");
        // Only the first may pass by itself, while an API server starts.
        let unknown = mapped(401, "");
        assert!(is_forbidden(&missing) && !is_forbidden(&leaving) && !is_forbidden(&unknown));
        let long = mapped(500, &"x".repeat(10_000)).to_string();
        assert!(long.len() < 1_000, "{} bytes", long.len());
    }
}
