//! The scripts: one for each atomic step. A server runs one at a time, and by its own clock.

use std::sync::OnceLock;

use crate::keys::Kind;

/// One atomic step.
pub(crate) struct Script {
    /// The keys that it touches, in its own order. That of the identity comes behind them.
    pub(crate) keys: &'static [Kind],
    /// Whether it writes something that its caller answers for.
    pub(crate) writes: bool,
    code: &'static str,
    hash: OnceLock<String>,
}

macro_rules! code {
    ($name:literal) => {
        concat!(
            include_str!("scripts/prelude.lua"),
            include_str!(concat!("scripts/", $name, ".lua"))
        )
    };
}

macro_rules! script {
    ($(#[$doc:meta])* $id:ident, $name:literal, $writes:literal, [$($key:ident),*]) => {
        $(#[$doc])*
        pub(crate) static $id: Script = Script {
            keys: &[$(Kind::$key),*],
            writes: $writes,
            code: code!($name),
            hash: OnceLock::new(),
        };
    };
}

script!(ACQUIRE, "acquire", true, [Leases, LeaseEnds, LeaseNames, Clock, Events]);
script!(RENEW, "renew", true, [Leases, LeaseEnds]);
script!(RELEASE, "release", true, [Leases, LeaseEnds, LeaseNames, Events]);
script!(LEASE, "get", false, [Leases, LeaseEnds]);
script!(LIST, "list", false, [Leases, LeaseEnds, LeaseNames]);
script!(REGISTER, "register", true, [Nodes, NodeEnds, Clock, Events]);
script!(HEARTBEAT, "heartbeat", true, [Nodes, NodeEnds, Clock, Events]);
script!(LEAVE, "leave", true, [Nodes, NodeEnds, Events]);
script!(NODE, "get", false, [Nodes, NodeEnds]);
script!(NODES, "all", false, [Nodes, NodeEnds]);
script!(TABLES, "tables", false, [Tables]);
script!(SEE, "see", false, [Tables, Leases, LeaseEnds]);
script!(WRITE, "write", true, [Tables, Leases, LeaseEnds, Clock, Events]);
script!(REQUEST, "request", true, [Requests, Answers, RequestEnds, Clock, Events]);
script!(ASK, "ask", false, [Tables, Requests, Answers, RequestEnds]);
script!(ANSWER, "answer", true, [Tables, Requests, Answers, RequestEnds, Events]);
script!(REQUESTS, "requests", false, [Requests, Answers, RequestEnds]);
script!(
    REAP,
    "reap",
    false,
    [Leases, LeaseEnds, LeaseNames, Nodes, NodeEnds, Requests, Answers, RequestEnds, Events]
);
script!(
    /// Its second key, the table's chunks, is named by the caller.
    TIDY, "tidy", true, [Tables]
);
script!(
    /// Its keys are named by the caller.
    CHECK, "check", true, []
);

impl Script {
    pub(crate) fn code(&self) -> &'static str {
        self.code
    }

    /// What a server knows it by, which this function of the client makes from its code.
    pub(crate) fn hash(&self, hash_of: fn(&str) -> String) -> &str {
        self.hash.get_or_init(|| hash_of(self.code))
    }
}
