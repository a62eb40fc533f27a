//! What etcd and its client report, as errors of ours: one function, table-tested.
//!
//! etcd's own failures come as a gRPC status whose message begins with `etcdserver: `; the codes
//! alone don't tell them apart.

use std::error::Error as StdError;
use std::{fmt, io};

use coord_core::kit::Op;
use coord_core::{Effect, Error, ErrorKind};
use tonic::{Code, Status};

/// Why a request failed.
#[derive(Debug)]
pub(crate) enum Problem {
    /// The revision that was asked for has been compacted away.
    Compacted,
    /// The etcd lease to attach a key to does not exist any more: nothing was written.
    LeaseGone,
    /// Anything else.
    Failed(Error),
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl From<Problem> for Error {
    fn from(problem: Problem) -> Self {
        match problem {
            Problem::Compacted => Self::new(ErrorKind::Unavailable, "read")
                .effect_none()
                .message("the revision was compacted meanwhile; read again"),
            Problem::LeaseGone => Self::new(ErrorKind::Unavailable, "write")
                .effect_none()
                .message("the etcd lease ran out before the record was written"),
            Problem::Failed(error) => error,
        }
    }
}

/// Maps an error of the client. `effect` is what a failure means that says nothing of whether the
/// request was applied: unknown for a write, none for a read.
pub(crate) fn problem(op: Op<'_>, effect: Effect, error: etcd_client::Error) -> Problem {
    let (kind, effect, message) = match classify(&error) {
        Class::Compacted => return Problem::Compacted,
        Class::LeaseGone => return Problem::LeaseGone,
        Class::Known(kind, message) => (kind, Effect::None, message),
        Class::Unclassified(message) => (ErrorKind::Unavailable, effect, message),
    };
    let mut mapped = op.error(kind).message(message).with_source(Cause(error));
    if effect == Effect::Unknown {
        mapped = mapped.effect_unknown();
    }
    Problem::Failed(mapped)
}

/// The client's error with the text of what caused it: its own spells out every layer between.
#[derive(Debug)]
struct Cause(etcd_client::Error);

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.0, causes(&self.0).last()) {
            (etcd_client::Error::GRpcStatus(status), Some(cause)) if cause.is::<Status>() => {
                f.write_str(status.message())
            }
            (_, Some(cause)) => write!(f, "{cause}"),
            (error, None) => write!(f, "{error}"),
        }
    }
}

impl StdError for Cause {}

/// Whether the request was certainly never sent, because there was no connection to send it on.
pub(crate) fn is_never_sent(error: &etcd_client::Error) -> bool {
    causes(error).any(|error| {
        error.is::<tonic::ConnectError>()
            || error
                .downcast_ref::<io::Error>()
                .is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    })
}

/// Whether another endpoint may answer where this one failed: it was not reached, the connection
/// broke, or its server is cut off from the others.
pub(crate) fn is_of_endpoint(error: &etcd_client::Error) -> bool {
    is_never_sent(error) || matches!(classify(error), Class::Unclassified(_))
}

/// Whether the token has run out that a stream was opened with; the client refreshes it by itself
/// for single requests only.
pub(crate) fn is_stale_token(error: &etcd_client::Error) -> bool {
    let etcd_client::Error::GRpcStatus(status) = error else { return false };
    status.code() == Code::Unauthenticated || status.message().ends_with("invalid auth token")
}

fn causes(error: &etcd_client::Error) -> impl Iterator<Item = &(dyn StdError + 'static)> {
    // The client's own error type does not name its source.
    let first: Option<&(dyn StdError + 'static)> = match error {
        etcd_client::Error::GRpcStatus(status) => Some(status),
        etcd_client::Error::TransportError(error) => Some(error),
        etcd_client::Error::IoError(error) => Some(error),
        _ => None,
    };
    std::iter::successors(first, |&error| error.source())
}

#[derive(Debug, PartialEq, Eq)]
enum Class {
    Compacted,
    LeaseGone,
    /// Certainly not applied.
    Known(ErrorKind, &'static str),
    /// It says nothing of whether the request was applied.
    Unclassified(&'static str),
}

fn classify(error: &etcd_client::Error) -> Class {
    use ErrorKind::{Denied, Internal, Invalid, Misconfigured, Unavailable};
    if causes(error).any(is_about_certificates) {
        let why = "the encrypted connection can't be set up; look at ca, cert, key and tls_name";
        return Class::Known(Misconfigured, why);
    }
    if is_never_sent(error) {
        return Class::Known(Unavailable, "no connection to any endpoint; is the server up there?");
    }
    if causes(error).any(<dyn StdError>::is::<tonic::transport::Error>) {
        return Class::Unclassified("the connection broke; is that an etcd server?");
    }
    match error {
        etcd_client::Error::GRpcStatus(status) => classify_status(status),
        etcd_client::Error::InvalidUri(_) => Class::Known(Invalid, "the endpoint is malformed"),
        etcd_client::Error::InvalidArgs(_) => {
            Class::Known(Invalid, "the client refuses the endpoint or its options")
        }
        etcd_client::Error::InvalidMetadataValue(_) => {
            Class::Known(Denied, "the server's token can't be sent back")
        }
        etcd_client::Error::EndpointError(_) | etcd_client::Error::EndpointsNotManaged => {
            Class::Known(Internal, "the client lost its endpoints")
        }
        _ => Class::Unclassified("the connection broke"),
    }
}

/// The TLS library's own error types are no part of the client's interface, only their texts are
/// seen.
fn is_about_certificates(error: &(dyn StdError + 'static)) -> bool {
    !error.is::<Status>() && error.to_string().to_ascii_lowercase().contains("certificate")
}

/// By the parts of etcd's messages that have been the same from 3.4 to 3.7, then by the code.
fn classify_status(status: &Status) -> Class {
    use ErrorKind::{Corrupt, Denied, Invalid, Misconfigured, Unavailable, Unsupported};
    let known = [
        ("required revision has been compacted", Class::Compacted),
        ("requested lease not found", Class::LeaseGone),
        ("authentication failed", Class::Known(Denied, "the user or the password is wrong")),
        (
            "user name is empty",
            Class::Known(Denied, "the server wants a user; give user:password@"),
        ),
        ("permission denied", Class::Known(Denied, "the user's roles don't permit it")),
        ("invalid auth token", Class::Known(Denied, "the token is not accepted")),
        (
            "authentication is not enabled",
            Class::Known(Misconfigured, "the URL names a user, and the server knows none"),
        ),
        ("request is too large", Class::Known(Invalid, "the server's --max-request-bytes")),
        ("too many operations", Class::Known(Invalid, "the server's --max-txn-ops")),
        (
            "database space exceeded",
            Class::Known(
                Unavailable,
                "the database is full (alarm NOSPACE): compact, defragment and disarm",
            ),
        ),
        ("corrupt cluster", Class::Known(Corrupt, "etcd found its members to differ (CORRUPT)")),
        ("too many requests", Class::Known(Unavailable, "the server is overloaded")),
        ("no leader", Class::Unclassified("the servers have no leader")),
    ];
    let message = status.message();
    if let Some((_, class)) = known.into_iter().find(|(part, _)| message.contains(part)) {
        return class;
    }
    match status.code() {
        Code::PermissionDenied => Class::Known(Denied, "the user's roles don't permit it"),
        Code::Unauthenticated => Class::Known(Denied, "the server does not accept who this is"),
        Code::InvalidArgument => Class::Known(Invalid, "the server refuses the request"),
        Code::Unimplemented => Class::Known(
            Unsupported,
            "the server does not know this request; 3.4 or newer is needed",
        ),
        Code::DataLoss => Class::Known(Corrupt, "the server lost data"),
        _ => Class::Unclassified("the request failed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(effect: Effect, error: etcd_client::Error) -> Error {
        problem(Op::write("renew", "scheduler"), effect, error).into()
    }

    #[test]
    fn every_known_answer_has_its_kind_and_effect() {
        use ErrorKind::*;
        for (code, message, kind, effect) in [
            (
                Code::InvalidArgument,
                "etcdserver: authentication failed, invalid user ID or password",
                Denied,
                Effect::None,
            ),
            (Code::InvalidArgument, "etcdserver: user name is empty", Denied, Effect::None),
            (Code::InvalidArgument, "etcdserver: request is too large", Invalid, Effect::None),
            (
                Code::InvalidArgument,
                "etcdserver: too many operations in txn request",
                Invalid,
                Effect::None,
            ),
            (Code::InvalidArgument, "etcdserver: key is not provided", Invalid, Effect::None),
            (Code::PermissionDenied, "etcdserver: permission denied", Denied, Effect::None),
            (Code::Unauthenticated, "etcdserver: invalid auth token", Denied, Effect::None),
            (Code::Unknown, "etcdserver: invalid auth token", Denied, Effect::None),
            (
                Code::FailedPrecondition,
                "etcdserver: authentication is not enabled",
                Misconfigured,
                Effect::None,
            ),
            (
                Code::ResourceExhausted,
                "etcdserver: mvcc: database space exceeded",
                Unavailable,
                Effect::None,
            ),
            (Code::ResourceExhausted, "etcdserver: too many requests", Unavailable, Effect::None),
            (Code::DataLoss, "etcdserver: corrupt cluster", Corrupt, Effect::None),
            (Code::Unimplemented, "unknown service", Unsupported, Effect::None),
            (Code::Unavailable, "etcdserver: no leader", Unavailable, Effect::Unknown),
            (Code::Unavailable, "etcdserver: request timed out", Unavailable, Effect::Unknown),
            (Code::Unavailable, "etcdserver: leader changed", Unavailable, Effect::Unknown),
            (Code::Unavailable, "etcdserver: server stopped", Unavailable, Effect::Unknown),
            (Code::DeadlineExceeded, "context deadline exceeded", Unavailable, Effect::Unknown),
            (Code::Cancelled, "context canceled", Unavailable, Effect::Unknown),
            (Code::Internal, "h2 protocol error", Unavailable, Effect::Unknown),
            (Code::Unknown, "transport error", Unavailable, Effect::Unknown),
            (Code::Aborted, "something nobody has seen before", Unavailable, Effect::Unknown),
        ] {
            let status = || etcd_client::Error::GRpcStatus(Status::new(code, message));
            let error = map(Effect::Unknown, status());
            assert_eq!((error.kind(), error.effect()), (kind, effect), "{code:?} {message}");
            assert_eq!(error.operation(), "renew");
            assert_eq!(error.resource_name(), Some("scheduler"));
            // A read has no effect, whatever came back.
            assert_eq!(map(Effect::None, status()).effect(), Effect::None, "{code:?} {message}");
        }
    }

    #[test]
    fn compaction_and_a_lost_lease_are_told_apart() {
        let status = |code, message: &str| {
            problem(
                Op::read("load", "orders"),
                Effect::None,
                etcd_client::Error::GRpcStatus(Status::new(code, message)),
            )
        };
        let compacted = "etcdserver: mvcc: required revision has been compacted";
        assert!(matches!(status(Code::OutOfRange, compacted), Problem::Compacted));
        let gone = "etcdserver: requested lease not found";
        assert!(matches!(status(Code::NotFound, gone), Problem::LeaseGone));
    }

    #[test]
    fn a_refused_connection_had_no_effect() {
        let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
        let error = map(Effect::Unknown, etcd_client::Error::IoError(refused));
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None));
        let cause = StdError::source(&error).expect("a cause").to_string();
        assert_eq!(cause, "connection refused");
        let reset = io::Error::from(io::ErrorKind::ConnectionReset);
        let error = map(Effect::Unknown, etcd_client::Error::IoError(reset));
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown));
    }
}
