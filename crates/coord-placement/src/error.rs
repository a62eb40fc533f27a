//! Why no plan can be made.

use std::fmt;

use coord_core::{Error, NODES_MAX, NodeId};

use crate::candidate::WEIGHT_MAX;

/// Why no plan can be made from this input.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanError {
    /// There is no candidate.
    NoNodes,
    /// No candidate accepts new shards.
    AllDraining {
        /// How many candidates there are.
        nodes: usize,
    },
    /// A node is listed twice, as candidate or in the node table.
    DuplicateNode(NodeId),
    /// A weight is not 1 to 2^40.
    BadWeight {
        /// Whose it is.
        node: NodeId,
        /// The weight.
        weight: u64,
    },
    /// Candidates and the nodes that still own shards need more than 65,534 slots.
    TooManyNodes {
        /// How many there are.
        nodes: usize,
    },
    /// The number of owners' places is not shards × replicas.
    WrongLength {
        /// How many there are.
        places: usize,
        /// How many there should be.
        expected: usize,
    },
    /// A place names a slot that names no node.
    UnknownSlot {
        /// The slot.
        slot: u16,
        /// The index of the place, shard × replicas + replica.
        place: usize,
    },
    /// A tolerance is not 0 to 1000 thousandths.
    BadTolerance(u16),
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoNodes => f.write_str("no live node to place shards on"),
            Self::AllDraining { nodes } => {
                write!(f, "all {nodes} live nodes are draining; one must accept new shards")
            }
            Self::DuplicateNode(node) => write!(f, "node {node} is listed twice"),
            Self::BadWeight { node, weight } => {
                write!(f, "weight {weight} of node {node} is not 1 to {WEIGHT_MAX}")
            }
            Self::TooManyNodes { nodes } => {
                write!(f, "{nodes} nodes in one map; at most {NODES_MAX} are possible")
            }
            Self::WrongLength { places, expected } => {
                write!(f, "{places} owners' places; shards times replicas is {expected}")
            }
            Self::UnknownSlot { slot, place } => {
                write!(f, "slot {slot} at place {place} names no node")
            }
            Self::BadTolerance(thousandths) => {
                write!(f, "tolerance of {thousandths} thousandths is not 0 to 1000")
            }
        }
    }
}

impl std::error::Error for PlanError {}

impl From<PlanError> for Error {
    fn from(error: PlanError) -> Self {
        Self::invalid("plan", error.to_string())
    }
}
