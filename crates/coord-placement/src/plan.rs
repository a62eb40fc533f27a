//! What a strategy answers.

use std::fmt;

use coord_core::{NodeId, ShardId, Slot};

use crate::assignment::Assignment;

/// Why a place of a shard gets another owner, in the order of work.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The shard had no live owner.
    Orphan,
    /// The shard had live owners, and fewer than it should have.
    MinReplicas,
    /// A pin wants it there.
    Pin,
    /// An exclusion forbids where it was.
    Exclusion,
    /// The old owner is draining.
    Drain,
    /// The shard had more owners in one zone than necessary.
    ZoneRepair,
    /// The old owner had more than its share, or the new one less.
    Balance,
}

impl Reason {
    /// All of them, in the order of work.
    pub const ALL: [Self; 7] = [
        Self::Orphan,
        Self::MinReplicas,
        Self::Pin,
        Self::Exclusion,
        Self::Drain,
        Self::ZoneRepair,
        Self::Balance,
    ];

    /// The reason as one lower-case word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Orphan => "orphan",
            Self::MinReplicas => "min-replicas",
            Self::Pin => "pin",
            Self::Exclusion => "exclusion",
            Self::Drain => "drain",
            Self::ZoneRepair => "zone-repair",
            Self::Balance => "balance",
        }
    }

    /// Whether [`max_moves`](crate::PlanSettings::max_moves) limits moves of this reason.
    #[must_use]
    pub const fn is_limited(self) -> bool {
        matches!(self, Self::Drain | Self::ZoneRepair | Self::Balance)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One place of a shard that gets another owner.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Which shard.
    pub shard: ShardId,
    /// Which place of it in the next map, 0 for the primary.
    pub replica: u8,
    /// Why.
    pub reason: Reason,
    /// The node that loses it, alive or not; `Slot::NOBODY` if the place was empty.
    pub from: Slot,
    /// The node that gets it.
    pub to: Slot,
}

/// Why a pin can't be followed.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PinProblem {
    /// The table has no such shard.
    UnknownShard,
    /// The node is no candidate.
    NotLive,
    /// The node is draining.
    Draining,
    /// An exclusion forbids the node.
    Excluded,
    /// The shard is pinned to more nodes than it has owners, or to one of them twice.
    TooMany,
    /// The node has as many as it may hold.
    Full,
}

/// What a plan could not do, and what stands in the way.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unsatisfied {
    /// There are fewer nodes to place on than owners for each shard.
    TooFewNodes {
        /// How many owners each shard should have.
        replicas: u8,
        /// How many nodes accept shards.
        nodes: usize,
    },
    /// There are fewer zones than owners for each shard, so some share a zone.
    TooFewZones {
        /// How many owners each shard should have.
        replicas: u8,
        /// How many zones have a node that accepts shards.
        zones: usize,
    },
    /// Places stay empty: all nodes that may take them have as many as they may hold, or are excluded.
    Unplaced {
        /// How many places.
        places: u64,
        /// The first shard with one.
        first: ShardId,
    },
    /// A shard has two owners in one zone although there are enough zones.
    ZoneShared {
        /// How many shards.
        shards: u64,
        /// The first of them.
        first: ShardId,
    },
    /// A pin that can't be followed.
    Pin {
        /// The shard.
        shard: ShardId,
        /// The node it is pinned to.
        node: NodeId,
        /// Why not.
        problem: PinProblem,
    },
    /// Moves left for a later plan, since the limit of moves is reached.
    MovesLeft {
        /// For this reason.
        reason: Reason,
        /// How many.
        moves: u64,
    },
    /// Pins, exclusions or limits leave nodes above or below their share.
    Uneven {
        /// How many nodes.
        nodes: usize,
    },
    /// Loads that are not numbers, infinite or negative; these shards count as if none was reported.
    LoadUnusable {
        /// How many shards.
        shards: u64,
        /// The first of them.
        first: ShardId,
    },
    /// A draining node keeps shards, since no other node can take them.
    NotDrained {
        /// The node.
        node: NodeId,
        /// How many places it keeps.
        places: u64,
    },
}

impl fmt::Display for PinProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::UnknownShard => "there is no such shard",
            Self::NotLive => "the node is not live",
            Self::Draining => "the node is draining",
            Self::Excluded => "the node is excluded for this shard",
            Self::TooMany => "the shard has more pins than owners, or one of them twice",
            Self::Full => "the node holds as many shards as it may",
        })
    }
}

impl fmt::Display for Unsatisfied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooFewNodes { replicas, nodes } => {
                write!(f, "{nodes} nodes accept shards; each shard should have {replicas} owners")
            }
            Self::TooFewZones { replicas, zones } => {
                write!(f, "{zones} zones accept shards; each shard should have {replicas} owners")
            }
            Self::Unplaced { places, first } => {
                write!(f, "{places} owners' places stay empty, the first in shard {first}")
            }
            Self::ZoneShared { shards, first } => {
                write!(f, "{shards} shards share a zone needlessly, the first is shard {first}")
            }
            Self::Pin { shard, node, problem } => {
                write!(f, "shard {shard} is not pinned to node {node}: {problem}")
            }
            Self::MovesLeft { reason, moves } => {
                write!(f, "{moves} moves for {reason} are left for later plans by the limit")
            }
            Self::Uneven { nodes } => {
                write!(f, "{nodes} nodes are above or below their share")
            }
            Self::LoadUnusable { shards, first } => {
                write!(
                    f,
                    "the loads of {shards} shards are no usable numbers, the first is shard {first}"
                )
            }
            Self::NotDrained { node, places } => {
                write!(f, "draining node {node} keeps {places} places that nobody else can take")
            }
        }
    }
}

/// The next map, and how it differs from the current one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub(crate) next: Assignment,
    pub(crate) changed: bool,
    pub(crate) moves: Vec<Move>,
    pub(crate) unsatisfied: Vec<Unsatisfied>,
    pub(crate) lower_bound: u64,
    pub(crate) optimal: bool,
}

impl Plan {
    /// The next map. Its node table begins with the current one's, slot by slot, followed by candidates
    /// that were not in it (in free slots first).
    #[must_use]
    pub fn next(&self) -> &Assignment {
        &self.next
    }

    /// The next map, by value.
    #[must_use]
    pub fn into_next(self) -> Assignment {
        self.next
    }

    /// Whether any owner changes; places that become empty count here, and are no moves.
    #[must_use]
    pub fn is_changed(&self) -> bool {
        self.changed
    }

    /// All moves, by shard.
    #[must_use]
    pub fn moves(&self) -> &[Move] {
        &self.moves
    }

    /// How many moves have this reason.
    #[must_use]
    pub fn count(&self, reason: Reason) -> usize {
        self.moves.iter().filter(|one| one.reason == reason).count()
    }

    /// The node at a slot, for the slots of the moves.
    #[must_use]
    pub fn node(&self, slot: Slot) -> Option<&NodeId> {
        self.next.node(slot)
    }

    /// What could not be done.
    #[must_use]
    pub fn unsatisfied(&self) -> &[Unsatisfied] {
        &self.unsatisfied
    }

    /// The fewest moves that the strategy's shares could allow; no plan needs fewer.
    #[must_use]
    pub fn lower_bound(&self) -> u64 {
        self.lower_bound
    }

    /// Whether it is proved that no other plan with these shares needs fewer moves.
    #[must_use]
    pub fn is_optimal(&self) -> bool {
        self.optimal
    }
}
