//! How a shard gets from one owner to the next.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How a shard of a table gets from one live owner to the next. It stands in every version of the
/// table's map, so that all nodes go by what the leader decided.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Handoff {
    /// The old owner stops first, and the new one starts once that is certain: never two hosts, and a
    /// gap while the shard moves.
    #[default]
    Exclusive,
    /// The new owner starts first, and the old one stops then: no gap, and two hosts meanwhile. For
    /// shards that are mostly read.
    MakeBeforeBreak,
    /// The new owner is published at once, also in the place of one that may still run: two hosts for a
    /// moment, and nothing is waited for.
    Eager,
}

impl Handoff {
    /// The mode as one lower-case word, as settings and records write it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Exclusive => "exclusive",
            Self::MakeBeforeBreak => "make_before_break",
            Self::Eager => "eager",
        }
    }
}

impl fmt::Display for Handoff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}
