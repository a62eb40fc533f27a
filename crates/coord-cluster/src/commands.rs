//! The commands of a cluster, and how they are answered.

use std::collections::BTreeMap;
use std::fmt;

use coord_core::{NodeId, NodeStatus, ShardId, TableName, Version};
use serde::{Deserialize, Serialize};

use crate::invariants::Violation;

/// What can be asked of a cluster. The leader carries it out; see
/// [`Cluster::request`](crate::Cluster::request).
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// Declares a node failed: its registration is evicted, and its shards move once its next incarnation has
    /// confirmed that they stopped, or the evicted record's TTL has passed. The command is done as soon as the
    /// failure is written down, and says nothing of a later incarnation of the node.
    MarkNodeFailed {
        /// Which node.
        node: NodeId,
        /// Why, for people; the first 256 bytes are kept.
        why: String,
    },
    /// Evacuates a node and gives it nothing new.
    Drain {
        /// Which node.
        node: NodeId,
    },
    /// Ends a drain.
    Undrain {
        /// Which node.
        node: NodeId,
    },
    /// Evacuates a node; then it goes. The last active one stops its shards and goes all the same.
    Leave {
        /// Which node.
        node: NodeId,
        /// Whether it stops its shards and goes also where they have not moved within the handoff timeout.
        #[serde(default)]
        force: bool,
    },
    /// Gives an empty place of a shard to a node.
    AssignShard {
        /// Of which table.
        table: TableName,
        /// Which shard.
        shard: ShardId,
        /// To which node.
        node: NodeId,
    },
    /// Replaces the owners of the named shards. The command is done as soon as their moves have begun.
    AssignShards {
        /// Of which table.
        table: TableName,
        /// The owners of each shard, the primary first.
        owners: BTreeMap<ShardId, Vec<NodeId>>,
    },
    /// Rebalances now.
    RebalanceShards {
        /// Which table; all of them where it is unset.
        table: Option<TableName>,
        /// Why, for people; the first 256 bytes are kept.
        reason: String,
    },
    /// Keeps a shard on a node while that may host it.
    Pin {
        /// Of which table.
        table: TableName,
        /// Which shard.
        shard: ShardId,
        /// Where.
        node: NodeId,
    },
    /// Ends a pin.
    Unpin {
        /// Of which table.
        table: TableName,
        /// Which shard.
        shard: ShardId,
    },
    /// Releases a quarantined shard, so that a node gets it again, and forgets the crashes of its hosts.
    Unpark {
        /// Of which table.
        table: TableName,
        /// Which shard.
        shard: ShardId,
    },
    /// Stops rebalances that only improve the balance; orphans are still placed.
    Pause,
    /// Ends a pause.
    Resume,
    /// The leader releases its lease, and is a candidate again after one retry interval.
    StepDown,
    /// The leader gives up its lease in favour of a node. The others leave it the time to take it, and one
    /// that was faster gives way.
    TransferLeadership {
        /// The node that is to lead.
        to: NodeId,
    },
}

impl Command {
    /// Whether it waits while the coordinator is gated: it places shards, or looks at where they are.
    pub(crate) const fn needs_gate(&self) -> bool {
        matches!(
            self,
            Self::AssignShard { .. }
                | Self::AssignShards { .. }
                | Self::RebalanceShards { .. }
                | Self::Pin { .. }
                | Self::Unpin { .. }
                | Self::Resume
        )
    }

    /// The command's name in one word, for logs.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::MarkNodeFailed { .. } => "mark_node_failed",
            Self::Drain { .. } => "drain",
            Self::Undrain { .. } => "undrain",
            Self::Leave { .. } => "leave",
            Self::AssignShard { .. } => "assign_shard",
            Self::AssignShards { .. } => "assign_shards",
            Self::RebalanceShards { .. } => "rebalance_shards",
            Self::Pin { .. } => "pin",
            Self::Unpin { .. } => "unpin",
            Self::Unpark { .. } => "unpark",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::StepDown => "step_down",
            Self::TransferLeadership { .. } => "transfer_leadership",
        }
    }
}

/// How a command came out.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
#[must_use]
pub enum Reply {
    /// It is done.
    Done(CommandSummary),
    /// It was refused, and nothing changed.
    Refused(CommandError),
    /// No answer came within the time limit; the command may still be carried out.
    Unanswered,
}

impl Reply {
    /// True for [`Done`](Self::Done).
    #[must_use]
    pub const fn is_done(&self) -> bool {
        matches!(self, Self::Done(_))
    }
}

/// What a command did.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandSummary {
    /// The versions that hold its effect, by table; empty where there was nothing to change.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub versions: BTreeMap<TableName, Version>,
    /// How many shards change their primary from one node to another, at once or at the end of the move that
    /// began.
    #[serde(default)]
    pub moved: u32,
}

/// Why a command was refused.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "refusal", rename_all = "snake_case")]
pub enum CommandError {
    /// The cluster does not know the node.
    NodeNotFound {
        /// Which node.
        node: NodeId,
    },
    /// The node is not in a status in which this can be done.
    InvalidTransition {
        /// Which node.
        node: NodeId,
        /// Its status.
        status: NodeStatus,
    },
    /// The node that was asked does not lead.
    NotLeader {
        /// The node that leads, if one is known.
        leader: Option<NodeId>,
    },
    /// The node is leaving, and its shards have not moved within the handoff timeout. It stays until they
    /// have, or leaves by force.
    StuckLeaving {
        /// Which node.
        node: NodeId,
        /// How many of its shards are stuck; not more than the first 256 of each table are counted.
        shards: u32,
    },
    /// The node cannot host shards.
    UnhealthyNode {
        /// Which node.
        node: NodeId,
        /// Its status.
        status: NodeStatus,
    },
    /// An incarnation of the node was declared failed or was replaced, and may still run: its shards stay with
    /// it until the TTL of its registration has passed.
    MayStillRun {
        /// Which node.
        node: NodeId,
        /// Which shard would be taken from it.
        shard: ShardId,
    },
    /// The node takes nothing new.
    NodeDraining {
        /// Which node.
        node: NodeId,
    },
    /// There is no such table.
    TableNotFound {
        /// Which table.
        table: TableName,
    },
    /// The table has no such shard.
    ShardNotFound {
        /// Which shard.
        shard: ShardId,
        /// How many the table has.
        shards: u32,
    },
    /// The node can't lead: it does not stand for election, or is absent at the moment.
    NotCandidate {
        /// Which node.
        node: NodeId,
    },
    /// All places of the shard are taken.
    TooManyReplicas {
        /// Which shard.
        shard: ShardId,
        /// How many places it has.
        replicas: u8,
    },
    /// The shard is quarantined, because its hosts crashed; it has to be released first.
    ShardParked {
        /// Which shard.
        shard: ShardId,
    },
    /// The shard is not quarantined.
    ShardNotParked {
        /// Which shard.
        shard: ShardId,
    },
    /// The map that was asked for breaks an invariant.
    InvariantViolation(Violation),
    /// No node can host shards.
    NoActiveNodes,
    /// The strategy found no map, or the store did not take it; the old map stays in force.
    Failed {
        /// Why.
        why: String,
    },
    /// The leader lost its lease before it was done.
    Lost,
    /// The command could not be read.
    Unreadable {
        /// Why.
        why: String,
    },
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NodeNotFound { node } => write!(f, "the cluster does not know node {node}"),
            Self::InvalidTransition { node, status } => write!(f, "node {node} is {status}"),
            Self::NotLeader { leader: Some(leader) } => write!(f, "not the leader; {leader} is"),
            Self::NotLeader { leader: None } => {
                f.write_str("not the leader; nobody is known to be")
            }
            Self::StuckLeaving { node, shards } => write!(
                f,
                "{shards} shards of node {node} have not moved within the handoff timeout; it stays \
                 until they have, or leaves by force"
            ),
            Self::UnhealthyNode { node, status } => {
                write!(f, "node {node} is {status} and hosts nothing")
            }
            Self::MayStillRun { node, shard } => write!(
                f,
                "node {node} was declared failed and may still run; shard {shard} stays with it \
                 until the TTL of its registration has passed"
            ),
            Self::NodeDraining { node } => write!(f, "node {node} is draining"),
            Self::NotCandidate { node } => {
                write!(f, "node {node} does not stand for election, or is absent")
            }
            Self::TableNotFound { table } => write!(f, "there is no table {table}"),
            Self::ShardNotFound { shard, shards } => {
                write!(f, "there is no shard {shard}; the table has {shards}")
            }
            Self::TooManyReplicas { shard, replicas } => {
                write!(f, "all {replicas} places of shard {shard} are taken")
            }
            Self::ShardParked { shard } => write!(
                f,
                "shard {shard} is parked since its hosts crashed one after the other; unpark it first"
            ),
            Self::ShardNotParked { shard } => write!(f, "shard {shard} is not parked"),
            Self::InvariantViolation(violation) => violation.fmt(f),
            Self::NoActiveNodes => f.write_str("no node is active"),
            Self::Failed { why } => f.write_str(why),
            Self::Lost => f.write_str("the leader lost its lease before it was done"),
            Self::Unreadable { why } => write!(f, "the command cannot be read: {why}"),
        }
    }
}
