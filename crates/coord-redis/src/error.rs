//! What Redis and its client report, as errors of ours: one function, table-tested.
//!
//! A server's answer begins with a code. Older servers put the code of what failed inside a script
//! into the text of an answer with the code `ERR`.

use std::error::Error as StdError;

use coord_core::ErrorKind::{
    Corrupt, Denied, Internal, Invalid, Misconfigured, Unavailable, Unsupported,
};
use coord_core::kit::Op;
use coord_core::{Effect, Error, ErrorKind};
use redis::RedisError;

/// For an answer that no server gives to what was asked.
pub(crate) fn strange(op: Op<'_>, what: &str) -> Error {
    op.error(Internal).message(format!("the server's answer makes no sense: {what}"))
}

/// What an answer says of the connection that it came on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// The connection is good.
    Good,
    /// Something is wrong with it, or with the server: the next request looks for a master anew.
    Lost,
    /// The server is not the one to ask, and has done nothing: ask the right one at once.
    Elsewhere,
}

/// Maps an error of the client. `effect` is what a failure means that says nothing of whether the
/// request was applied: unknown for a write, none for a read.
pub(crate) fn problem(op: Op<'_>, effect: Effect, error: RedisError) -> Error {
    let class = classify(&error);
    let said = error.detail().map(str::to_owned);
    let message = match said {
        // The server names the command or the key.
        Some(said) if class.quotes => format!("{}: {said}", class.message),
        _ => class.message.to_owned(),
    };
    let effect = if class.refused { Effect::None } else { effect };
    let mapped = op.error(class.kind).message(message).with_source(error);
    if effect == Effect::Unknown { mapped.effect_unknown() } else { mapped }
}

/// Whether the connection may be used again.
pub(crate) fn way(error: &RedisError) -> Way {
    classify(error).way
}

/// Whether the server has never seen the script, and did not run it.
pub(crate) fn is_unknown_script(error: &RedisError) -> bool {
    error.code() == Some("NOSCRIPT")
}

/// Whether the server does not know the command, or the user may not send it.
pub(crate) fn is_withheld(error: &RedisError) -> bool {
    let class = classify(error);
    matches!(class.kind, Denied | Unsupported)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Class {
    kind: ErrorKind,
    message: &'static str,
    /// Certainly not applied.
    refused: bool,
    /// What the server says belongs to the message.
    quotes: bool,
    way: Way,
}

const fn class(kind: ErrorKind, way: Way, message: &'static str) -> Class {
    Class { kind, message, refused: false, quotes: false, way }
}

impl Class {
    const fn refused(mut self) -> Self {
        self.refused = true;
        self
    }

    const fn quoting(mut self) -> Self {
        self.quotes = true;
        self
    }
}

/// By the code, or, where that is `ERR`, by what is in the text.
const ANSWERS: &[(&str, Class)] = &[
    (
        "READONLY",
        class(Unavailable, Way::Elsewhere, "the server is a replica: there was a failover"),
    ),
    ("MOVED", class(Unavailable, Way::Elsewhere, "the hash slot is at another server")),
    ("ASK", class(Unavailable, Way::Lost, "the hash slot is being moved to another server")),
    ("TRYAGAIN", class(Unavailable, Way::Good, "the hash slot is being moved to another server")),
    (
        "CLUSTERDOWN",
        class(Unavailable, Way::Lost, "the cluster is down, or does not serve the slot"),
    ),
    ("MASTERDOWN", class(Unavailable, Way::Lost, "the server is a replica without its master")),
    ("LOADING", class(Unavailable, Way::Lost, "the server is loading its data")),
    ("UNBLOCKED", class(Unavailable, Way::Lost, "the server is no master any more")),
    ("NOREPLICAS", class(Unavailable, Way::Good, "too few replicas for min-replicas-to-write")),
    (
        "MISCONF",
        class(Unavailable, Way::Good, "the server can't save its data and takes no writes"),
    ),
    ("BUSY", class(Unavailable, Way::Good, "the server is busy with a script that is not ours")),
    ("OOM", class(Unavailable, Way::Good, "the server is at its maxmemory")),
    (
        "NOAUTH",
        class(Denied, Way::Lost, "the server wants a password; give user:password@").refused(),
    ),
    ("WRONGPASS", class(Denied, Way::Lost, "the user or the password is wrong").refused()),
    ("NOPERM", class(Denied, Way::Good, "the user's ACL does not permit it").quoting().refused()),
    (
        "ACL failure",
        class(Denied, Way::Good, "the user's ACL does not permit it").quoting().refused(),
    ),
    (
        "executing the script can't",
        class(Denied, Way::Good, "the user's ACL does not permit it").quoting().refused(),
    ),
    (
        "without any password configured",
        class(Misconfigured, Way::Lost, "the URL has a password, and the server none").refused(),
    ),
    (
        "IDENTITY",
        class(
            Misconfigured,
            Way::Good,
            "the server was emptied and is another store now than when the backend was opened; open it \
             again",
        )
        .quoting()
        .refused(),
    ),
    ("CORRUPT", class(Corrupt, Way::Good, "the cluster's data is damaged").quoting().refused()),
    (
        "WRONGTYPE",
        class(Corrupt, Way::Good, "a key of the cluster's holds something else").refused(),
    ),
    ("CROSSSLOT", class(Internal, Way::Good, "the keys are not in one hash slot").refused()),
    (
        "max number of clients",
        class(Unavailable, Way::Lost, "the server has as many clients as it takes").refused(),
    ),
    (
        "DB index is out of range",
        class(Invalid, Way::Lost, "the server has no such database; look at db").refused(),
    ),
    (
        "SELECT is not allowed in cluster",
        class(Invalid, Way::Lost, "a Redis Cluster has one database only; leave db out").refused(),
    ),
    (
        "unknown command",
        class(Unsupported, Way::Good, "the server does not know a command").quoting().refused(),
    ),
    (
        "unknown subcommand",
        class(Unsupported, Way::Good, "the server does not know a command").quoting().refused(),
    ),
];

fn classify(error: &RedisError) -> Class {
    if causes(error).any(is_about_certificates) {
        let why = "the encrypted connection can't be set up; look at ca, cert, key and the host";
        return class(Misconfigured, Way::Lost, why).refused();
    }
    if error.is_connection_refusal() {
        let why = "no connection to the server; is one up there?";
        return class(Unavailable, Way::Lost, why).refused();
    }
    let code = error.code().unwrap_or_default();
    if let Some((_, class)) = ANSWERS.iter().find(|(known, _)| *known == code) {
        return *class;
    }
    let said = error.detail().unwrap_or_default();
    let is_answer = !code.is_empty() || error.kind() == redis::ErrorKind::AuthenticationFailed;
    let known = ANSWERS.iter().find(|(part, _)| said.contains(part));
    match known {
        Some((_, class)) if is_answer => *class,
        _ if error.kind() == redis::ErrorKind::AuthenticationFailed => {
            class(Denied, Way::Lost, "the server does not accept the user or the password")
                .refused()
        }
        _ if error.kind() == redis::ErrorKind::InvalidClientConfig => {
            class(Invalid, Way::Lost, "the client refuses the address or its options").refused()
        }
        _ if is_answer => class(Unavailable, Way::Good, "the request failed").quoting(),
        _ => class(Unavailable, Way::Lost, "the connection broke; is that a Redis server?"),
    }
}

fn causes(error: &RedisError) -> impl Iterator<Item = &(dyn StdError + 'static)> {
    std::iter::successors(error.source(), |&error| error.source())
}

/// The TLS library's own error types are no part of the client's interface, only their texts are
/// seen.
fn is_about_certificates(error: &(dyn StdError + 'static)) -> bool {
    let text = error.to_string().to_ascii_lowercase();
    ["certificate", "corrupt message", "unable to parse tls", "private key"]
        .iter()
        .any(|part| text.contains(part))
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    fn map(effect: Effect, error: RedisError) -> Error {
        problem(Op::write("renew", "scheduler"), effect, error)
    }

    /// As the parser makes it of what a server answers.
    fn answered(line: &str) -> RedisError {
        let answer = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).expect("parses");
        match answer {
            redis::Value::ServerError(error) => error.into(),
            other => panic!("no error: {other:?}"),
        }
    }

    #[test]
    fn every_known_answer_has_its_kind_and_effect() {
        for (line, kind, effect, way) in [
            (
                "READONLY You can't write against a read only replica.",
                Unavailable,
                Effect::Unknown,
                Way::Elsewhere,
            ),
            (
                "ERR Error running script (call to f_1): @user_script:27: @user_script: 27: \
                 -READONLY You can't write against a read only replica.",
                Unavailable,
                Effect::Unknown,
                Way::Elsewhere,
            ),
            ("MOVED 3999 127.0.0.1:6381", Unavailable, Effect::Unknown, Way::Elsewhere),
            ("ASK 3999 127.0.0.1:6381", Unavailable, Effect::Unknown, Way::Lost),
            ("TRYAGAIN Multiple keys request", Unavailable, Effect::Unknown, Way::Good),
            ("CLUSTERDOWN The cluster is down", Unavailable, Effect::Unknown, Way::Lost),
            ("MASTERDOWN Link with MASTER is down", Unavailable, Effect::Unknown, Way::Lost),
            ("LOADING Redis is loading the dataset", Unavailable, Effect::Unknown, Way::Lost),
            ("UNBLOCKED force unblock", Unavailable, Effect::Unknown, Way::Lost),
            ("NOREPLICAS Not enough good replicas", Unavailable, Effect::Unknown, Way::Good),
            ("MISCONF Redis is configured to save", Unavailable, Effect::Unknown, Way::Good),
            ("BUSY Redis is busy running a script", Unavailable, Effect::Unknown, Way::Good),
            ("OOM command not allowed", Unavailable, Effect::Unknown, Way::Good),
            ("ERR something nobody has seen before", Unavailable, Effect::Unknown, Way::Good),
            ("NOAUTH Authentication required.", Denied, Effect::None, Way::Lost),
            ("WRONGPASS invalid username-password pair", Denied, Effect::None, Way::Lost),
            ("NOPERM User u has no permissions to run 'zadd'", Denied, Effect::None, Way::Good),
            (
                "ERR ACL failure in script: User u has no permissions to run the 'zadd' command",
                Denied,
                Effect::None,
                Way::Good,
            ),
            ("IDENTITY it is b, not a", Misconfigured, Effect::None, Way::Good),
            ("CORRUPT the last term is not a number", Corrupt, Effect::None, Way::Good),
            ("WRONGTYPE Operation against a key", Corrupt, Effect::None, Way::Good),
            ("ERR unknown command 'EVALSHA'", Unsupported, Effect::None, Way::Good),
            ("ERR max number of clients reached", Unavailable, Effect::None, Way::Lost),
            ("ERR DB index is out of range", Invalid, Effect::None, Way::Lost),
        ] {
            let error = map(Effect::Unknown, answered(line));
            assert_eq!((error.kind(), error.effect()), (kind, effect), "{line}");
            assert_eq!(super::way(&answered(line)), way, "{line}");
            assert_eq!(error.resource_name(), Some("scheduler"));
            // A read has no effect, whatever came back.
            assert_eq!(map(Effect::None, answered(line)).effect(), Effect::None, "{line}");
        }
    }

    #[test]
    fn a_refusal_names_the_command() {
        let error =
            map(Effect::Unknown, answered("NOPERM no permissions to run the 'zadd' command"));
        assert!(error.to_string().contains("'zadd'"), "{error}");
    }

    #[test]
    fn a_refused_connection_had_no_effect() {
        let error = |kind: io::ErrorKind| map(Effect::Unknown, io::Error::from(kind).into());
        let refused = error(io::ErrorKind::ConnectionRefused);
        assert_eq!((refused.kind(), refused.effect()), (Unavailable, Effect::None));
        let reset = error(io::ErrorKind::ConnectionReset);
        assert_eq!((reset.kind(), reset.effect()), (Unavailable, Effect::Unknown));
    }
}
