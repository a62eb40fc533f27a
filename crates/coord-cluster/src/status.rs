//! The state of a cluster, as one node sees it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use coord_core::{
    Address, Incarnation, Label, NodeId, NodeStatus, ShardId, ShardMap, TableName, Term, Version,
};
use serde::{Deserialize, Serialize};

use crate::downing::{DownReason, PartitionState};

/// The state of a cluster as a whole.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClusterState {
    /// No node has been taken in yet.
    #[default]
    Initializing,
    /// One active node.
    SingleNode,
    /// Several active nodes.
    MultiNode(Balance),
    /// There were nodes, and none is active now; shards are orphaned until one comes.
    NoNodes,
}

/// How the shards of a cluster with several nodes stand.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Balance {
    /// Every shard is where it should be.
    Stable,
    /// Members changed, and shards are yet to follow; or shards are in motion.
    Rebalancing,
    /// A rebalance failed, and its table stays as it was; or nodes are suspended because too many vanished
    /// at once.
    Degraded,
}

impl fmt::Display for ClusterState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Initializing => "initializing",
            Self::SingleNode => "single node",
            Self::MultiNode(Balance::Stable) => "stable",
            Self::MultiNode(Balance::Rebalancing) => "rebalancing",
            Self::MultiNode(Balance::Degraded) => "degraded",
            Self::NoNodes => "no nodes",
        })
    }
}

/// A node's part in the election.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// It follows.
    #[default]
    Follower,
    /// It is a candidate.
    Candidate,
    /// It leads.
    Leader,
}

/// What a node has of the lease that gates the coordinator.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gating {
    /// It does not want it: it does not lead, or nothing gates the coordinator.
    #[default]
    None,
    /// It leads and waits for it: no shard is placed.
    Acquiring,
    /// It leads and holds it.
    Held,
}

impl Gating {
    /// The state as one lower-case word, for logs and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Acquiring => "acquiring",
            Self::Held => "held",
        }
    }
}

impl fmt::Display for Gating {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The leader, as one node sees it.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leader {
    /// The node that leads.
    pub node: NodeId,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// In which term.
    pub term: Term,
}

/// What is wrong with a shard as this node's [`Host`](crate::Host) runs it.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostFault {
    /// Its start failed, or its host panicked: it is tried again after a pause, until it is ready.
    Failed {
        /// How often in a row.
        times: u32,
        /// Why, the last time.
        why: String,
    },
    /// Its start takes longer than the handoff timeout, and goes on.
    StartSlow,
    /// Its stop takes longer than the handoff timeout, and goes on. The shard has no other host before.
    StopSlow,
    /// It was to be dropped at the registration's deadline, or at the end of the node, and still runs: its
    /// code has not returned to the runtime. Others may host the shard.
    Aborted,
}

impl HostFault {
    /// As logs and metrics name them, each at its index.
    pub(crate) const NAMES: [&str; 4] = ["failed", "start_slow", "stop_slow", "aborted"];

    pub(crate) const fn index(&self) -> usize {
        match self {
            Self::Failed { .. } => 0,
            Self::StartSlow => 1,
            Self::StopSlow => 2,
            Self::Aborted => 3,
        }
    }
}

impl fmt::Display for HostFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { times, why } => write!(f, "failed, {times} in a row: {why}"),
            Self::StartSlow => f.write_str("the start takes longer than the handoff timeout"),
            Self::StopSlow => f.write_str("the stop takes longer than the handoff timeout"),
            Self::Aborted => f.write_str("what had not stopped in time is dropped"),
        }
    }
}

/// A member, as the cluster holds it.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its name.
    pub id: NodeId,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// Where it is reached.
    pub address: Address,
    /// Its status.
    pub status: NodeStatus,
    /// Its failure domain.
    pub zone: Option<Label>,
    /// How many places it fills, all tables together.
    pub shards: u32,
}

/// A table, as one node sees it.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableStatus {
    /// Its name.
    pub name: TableName,
    /// Its version.
    pub version: Version,
    /// How many shards it has.
    pub shards: u32,
    /// How many have no primary; quarantined ones do not count.
    pub orphans: u32,
    /// How many are in motion.
    pub moving: u32,
    /// The owner of each shard.
    pub map: Arc<ShardMap>,
}

/// The state of the cluster, as one node sees it.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The cluster as a whole.
    pub state: ClusterState,
    /// The leader, if one is known.
    pub leader: Option<Leader>,
    /// This node's part in the election.
    pub role: Role,
    /// What this node has of the lease that gates the coordinator.
    pub gating: Gating,
    /// Why this node, which leads, can't store what it has to remember of the cluster, as long as it can't: the
    /// record of a cluster is bounded. Changes of members, down decisions and commands wait. To make room,
    /// unpin or release shards, or let failed nodes be forgotten.
    pub unwritten: Option<String>,
    /// This node's incarnation, while it is registered.
    pub registered: Option<Incarnation>,
    /// All members, by name; failed ones until they are forgotten.
    pub members: Vec<Member>,
    /// The tables that this node was started with, by name, as far as they exist.
    pub tables: Vec<TableStatus>,
    /// Whether balancing is paused.
    pub paused: bool,
    /// Shards whose handoff is past its timeout, by table; not more than the first 256 of each.
    pub stuck: BTreeMap<TableName, Vec<ShardId>>,
    /// Quarantined shards by table: no node gets them, because their hosts crashed.
    pub parked: BTreeMap<TableName, Vec<ShardId>>,
    /// Nodes that vanished together with too many others. Their shards stay with them for three node TTLs at
    /// the most; [`Command::MarkNodeFailed`](crate::Command::MarkNodeFailed) ends that at once.
    pub suspended: Vec<NodeId>,
    /// Whether the store is away.
    pub store_away: bool,
    /// This node's partition state, where downing is chosen.
    pub partition_state: PartitionState,
    /// The members that this node does not reach, where downing is chosen.
    pub unreachable: Vec<NodeId>,
    /// Why this node went down, once it did. Its runtime ends then.
    pub went_down: Option<DownReason>,
    /// The shards of this node whose host does not do as it should, by table.
    pub faults: BTreeMap<TableName, BTreeMap<ShardId, HostFault>>,
}

impl Status {
    /// A member by its name.
    #[must_use]
    pub fn member(&self, id: &NodeId) -> Option<&Member> {
        self.members.iter().find(|member| member.id == *id)
    }

    /// A table by its name.
    #[must_use]
    pub fn table(&self, name: &TableName) -> Option<&TableStatus> {
        self.tables.iter().find(|table| table.name == *name)
    }

    /// How many members are in this status.
    #[must_use]
    pub fn count(&self, status: NodeStatus) -> usize {
        self.members.iter().filter(|member| member.status == status).count()
    }

    /// True when every member that may host is there, every shard that is not quarantined has an owner, and no
    /// shard is about to move.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        matches!(self.state, ClusterState::SingleNode | ClusterState::MultiNode(Balance::Stable))
            && !self.tables.is_empty()
            && self.tables.iter().all(|table| table.orphans == 0 && table.moving == 0)
    }
}
