//! What NATS and its client report, as errors of ours.

use std::error::Error as StdError;
use std::io;

use async_nats::{ConnectError, ConnectErrorKind, RequestError, RequestErrorKind};
use coord_core::kit::Op;
use coord_core::{Error, ErrorKind};
use serde::Deserialize;

/// The write was conditional on a sequence that is not the last one of its subject.
pub(crate) const WRONG_SEQUENCE: u64 = 10071;
/// The same, where the last message is still on its way to the other servers.
pub(crate) const WRONG_SEQUENCE_SOON: u64 = 10164;
/// A message with the same id is still on its way to the other servers.
pub(crate) const DUPLICATE_SOON: u64 = 10158;
/// There is no message on the subject.
pub(crate) const NO_MESSAGE: u64 = 10037;
/// There is no such stream.
pub(crate) const NO_STREAM: u64 = 10059;
/// A stream of that name has another configuration.
pub(crate) const STREAM_DIFFERS: u64 = 10058;

pub(crate) fn denied(op: Op<'_>, what: &str) -> Error {
    let why = format!("the server denies it: {what}; see docs/backends/nats.md for what to permit");
    op.error(ErrorKind::Denied).message(why)
}

/// A refusal, as JetStream writes it.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Refusal {
    #[serde(default)]
    pub(crate) err_code: u64,
    #[serde(default)]
    pub(crate) description: String,
}

impl Refusal {
    /// As an error. Only what is known to be refused before anything was stored has no effect.
    pub(crate) fn error(&self, op: Op<'_>) -> Error {
        use ErrorKind::{Invalid, Misconfigured, Unavailable};
        let (kind, advice) = match self.err_code {
            NO_STREAM => {
                (Unavailable, "the bucket is gone; open the backend again, which makes it")
            }
            WRONG_SEQUENCE | WRONG_SEQUENCE_SOON | DUPLICATE_SOON => {
                (Unavailable, "others kept changing the record meanwhile")
            }
            10076 => (Misconfigured, "the server has no JetStream; start it with -js"),
            10039 => (Misconfigured, "the account has no JetStream; enable it for the account"),
            10120 => (Misconfigured, "the account has no JetStream limits of this kind; set them"),
            10054 => (Invalid, "the record is larger than the bucket or the server takes"),
            10109 => (Misconfigured, "the bucket is sealed; it takes no writes"),
            10165 => (Misconfigured, "the server does not take this TTL"),
            10166 => (Misconfigured, "the bucket does not allow TTLs (allow_msg_ttl)"),
            10074 => (Misconfigured, "a single server keeps one replica; set replicas=1"),
            10005 => (Misconfigured, "there are fewer servers than replicas; set replicas lower"),
            10113 => (Misconfigured, "the account wants buckets with max_bytes: make it by hand"),
            10023 | 10028 | 10047 => (Unavailable, "the server has no room left"),
            _ => return op.unclear(self.text("the server refuses it")),
        };
        op.error(kind).message(self.text(advice))
    }

    fn text(&self, advice: &str) -> String {
        format!("{advice}; said={:?} code={}", self.description, self.err_code)
    }
}

/// Maps a request that got no reply.
pub(crate) fn request_error(op: Op<'_>, error: RequestError) -> Error {
    let mapped = match error.kind() {
        RequestErrorKind::TimedOut => op.unclear("no answer in time"),
        RequestErrorKind::NoResponders => op.unclear(
            "nobody answers for the bucket: it has no leader just now, it is gone, or the server \
             has no JetStream",
        ),
        RequestErrorKind::MaxPayloadExceeded => op
            .error(ErrorKind::Invalid)
            .message("the record is larger than the server takes (max_payload)"),
        RequestErrorKind::InvalidSubject => {
            op.error(ErrorKind::Internal).message("the client refuses the subject")
        }
        RequestErrorKind::Other => op.unclear("the connection broke"),
    };
    mapped.with_source(error)
}

/// Whether the error says that there is nobody to answer such a request.
pub(crate) fn is_unanswerable(error: &Error) -> bool {
    let source = StdError::source(error).and_then(|source| source.downcast_ref::<RequestError>());
    source.is_some_and(|source| source.kind() == RequestErrorKind::NoResponders)
}

/// Maps a connection that could not be made.
pub(crate) fn connect_error(op: Op<'_>, error: ConnectError) -> Error {
    use ErrorKind::{Denied, Invalid, Misconfigured, Unavailable};
    let (kind, why) = match error.kind() {
        ConnectErrorKind::ServerParse => (Invalid, "the client refuses a host"),
        ConnectErrorKind::Dns => (Unavailable, "a host has no address; is its name right?"),
        ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => (
            Denied,
            "the server does not accept who this is; is the user, password or token right?",
        ),
        ConnectErrorKind::Tls => (Misconfigured, "the encrypted connection can't be set up"),
        ConnectErrorKind::TimedOut => (Unavailable, "no answer in time; is that a NATS server?"),
        ConnectErrorKind::Io if answered(&error) => {
            (Unavailable, "the connection broke; is that a NATS server?")
        }
        ConnectErrorKind::Io | ConnectErrorKind::MaxReconnects => {
            (Unavailable, "no connection to any server; is one up there?")
        }
    };
    op.error(kind).message(why).with_source(error)
}

/// Whether somebody took the connection, so that what broke is what was said on it.
fn answered(error: &ConnectError) -> bool {
    let first: &(dyn StdError + 'static) = error;
    let mut causes = std::iter::successors(Some(first), |&error| error.source());
    causes.any(|cause| {
        cause.downcast_ref::<io::Error>().is_some_and(|error| {
            matches!(
                error.kind(),
                io::ErrorKind::Other
                    | io::ErrorKind::InvalidData
                    | io::ErrorKind::InvalidInput
                    | io::ErrorKind::UnexpectedEof
                    | io::ErrorKind::ConnectionReset
                    | io::ErrorKind::BrokenPipe
            )
        })
    })
}

#[cfg(test)]
mod tests {
    use coord_core::Effect;

    use super::*;

    #[test]
    fn only_what_is_known_to_be_refused_has_no_effect() {
        use ErrorKind::{Invalid, Misconfigured, Unavailable};
        for (err_code, kind, effect) in [
            (10059, Unavailable, Effect::None),
            (10071, Unavailable, Effect::None),
            (10164, Unavailable, Effect::None),
            (10158, Unavailable, Effect::None),
            (10076, Misconfigured, Effect::None),
            (10039, Misconfigured, Effect::None),
            (10054, Invalid, Effect::None),
            (10166, Misconfigured, Effect::None),
            (10023, Unavailable, Effect::None),
            (10077, Unavailable, Effect::Unknown),
            (10008, Unavailable, Effect::Unknown),
            (99_999, Unavailable, Effect::Unknown),
        ] {
            let refusal = Refusal { err_code, description: "why".to_owned() };
            let error = refusal.error(Op::write("renew", "scheduler"));
            assert_eq!((error.kind(), error.effect()), (kind, effect), "{error}");
            assert_eq!((error.operation(), error.resource_name()), ("renew", Some("scheduler")));
            assert!(error.to_string().contains(&err_code.to_string()), "{error}");
            let read = refusal.error(Op::read("get", "scheduler"));
            assert_eq!(read.effect(), Effect::None, "{read}");
        }
    }

    #[test]
    fn a_request_without_reply_may_have_been_applied() {
        for (kind, mapped, effect) in [
            (RequestErrorKind::TimedOut, ErrorKind::Unavailable, Effect::Unknown),
            (RequestErrorKind::NoResponders, ErrorKind::Unavailable, Effect::Unknown),
            (RequestErrorKind::Other, ErrorKind::Unavailable, Effect::Unknown),
            (RequestErrorKind::MaxPayloadExceeded, ErrorKind::Invalid, Effect::None),
            (RequestErrorKind::InvalidSubject, ErrorKind::Internal, Effect::None),
        ] {
            let error = request_error(Op::write("renew", "scheduler"), RequestError::new(kind));
            assert_eq!((error.kind(), error.effect()), (mapped, effect), "{error}");
            assert_eq!(is_unanswerable(&error), kind == RequestErrorKind::NoResponders);
        }
    }

    #[test]
    fn a_connection_that_fails_says_what_to_look_at() {
        for (kind, mapped, part) in [
            (ConnectErrorKind::AuthorizationViolation, ErrorKind::Denied, "password"),
            (ConnectErrorKind::Io, ErrorKind::Unavailable, "is one up"),
            (ConnectErrorKind::Dns, ErrorKind::Unavailable, "name"),
            (ConnectErrorKind::Tls, ErrorKind::Misconfigured, "encrypted"),
        ] {
            let op = Op::read("connect", "nats://a/orders");
            let error = connect_error(op, ConnectError::new(kind));
            assert_eq!((error.kind(), error.effect()), (mapped, Effect::None), "{error}");
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
