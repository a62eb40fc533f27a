//! {Are the peers reachable?} × {is the store reachable?}: four outcomes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Whether something can be reached.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reach {
    /// It can.
    #[default]
    Reachable,
    /// It can't. For the peers: at least one member. For the store: no call of this process has
    /// succeeded for a third of a TTL.
    Unreachable,
}

/// A node's state in a partition, by what it reaches.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PartitionState {
    /// Peers and store are there: business as usual.
    #[default]
    Normal,
    /// The peers are reachable, the store is not. The view is frozen: no node is declared failed for the
    /// silence of the store, and none is downed. What is hosted works on until the node's own registration runs
    /// out; new allocations wait.
    Frozen,
    /// The store is reachable, peers are not: a partition among the nodes, or nodes that died. The strategy
    /// decides, once things are stable. The side that continues has the other nodes evicted. These shut down by
    /// their own decision, or when they read the decision in the store.
    Split,
    /// Neither is reachable. This node may be cut off alone, or everything may be down. It can't store a
    /// decision, so it downs no other node and asks for no lease. If the strategy gives its side up, it shuts
    /// down. Else it continues until the store is back or its own registration runs out, at which its exclusive
    /// shards stop.
    Isolated,
}

impl PartitionState {
    /// The outcome for what can be reached.
    #[must_use]
    pub const fn of(peers: Reach, store: Reach) -> Self {
        match (peers, store) {
            (Reach::Reachable, Reach::Reachable) => Self::Normal,
            (Reach::Reachable, Reach::Unreachable) => Self::Frozen,
            (Reach::Unreachable, Reach::Reachable) => Self::Split,
            (Reach::Unreachable, Reach::Unreachable) => Self::Isolated,
        }
    }
}

impl fmt::Display for PartitionState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Normal => "normal",
            Self::Frozen => "frozen",
            Self::Split => "split",
            Self::Isolated => "isolated",
        })
    }
}
