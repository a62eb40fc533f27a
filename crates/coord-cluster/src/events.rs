//! What happens in a cluster, as every node hears of it.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use coord_core::{Binding, Incarnation, NodeId, ShardId, TableHeader, TableName, Term, Version};
use futures::{Stream, StreamExt};
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;

use crate::downing::{DownReason, PartitionState};
use crate::status::{ClusterState, Gating, HostFault};

/// How many shards an event names when it is written for people.
const NAMED_MAX: usize = 8;

/// One thing that happened, and what it follows from.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// What it follows from.
    pub cause: EventSource,
    /// What happened.
    #[serde(flatten)]
    pub kind: EventKind,
}

impl Event {
    pub(crate) fn new(cause: EventSource, kind: EventKind) -> Self {
        Self { cause, kind }
    }
}

/// What an event follows from.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventSource {
    /// A version of a table.
    Version {
        /// Which table.
        table: TableName,
        /// Which version.
        version: Version,
    },
    /// A term of the leader's lease.
    Term(Term),
    /// Something on this node alone.
    Local,
}

/// What happened. Shards come in batches: one event for all shards that one version assigned or moved.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum EventKind {
    /// A node joined, or came back as another incarnation after it had failed or gone.
    NodeJoined {
        /// Which node.
        node: NodeId,
        /// Its incarnation.
        incarnation: Incarnation,
    },
    /// A node restarted before it was missed.
    NodeReplaced {
        /// Which node.
        node: NodeId,
        /// Its incarnation now.
        incarnation: Incarnation,
    },
    /// A node failed: its registration ran out, or it was declared failed.
    NodeFailed {
        /// Which node.
        node: NodeId,
        /// Its incarnation.
        incarnation: Incarnation,
        /// Why.
        why: String,
    },
    /// A node went on its own account, or was forgotten after it had failed.
    NodeLeft {
        /// Which node.
        node: NodeId,
        /// Its incarnation.
        incarnation: Incarnation,
    },
    /// A node takes nothing new and is evacuated.
    NodeDraining {
        /// Which node.
        node: NodeId,
    },
    /// A node takes shards again.
    NodeActive {
        /// Which node.
        node: NodeId,
    },
    /// A node leads, in this term.
    LeaderElected {
        /// The node that leads.
        node: NodeId,
        /// In which term.
        term: Term,
    },
    /// A node's term ended.
    LeadershipLost {
        /// The node that led.
        node: NodeId,
        /// In which term.
        term: Term,
        /// Why, as far as this node knows.
        why: String,
    },
    /// This node holds the leader's lease and may not write this table: the node and the cluster are configured
    /// differently. If the table is `_cluster`, the node releases the lease and is a candidate again after the
    /// lease's TTL.
    TableRefused {
        /// Which table.
        table: TableName,
        /// In which term of this node's own lease.
        term: Term,
        /// What the table is bound to.
        misfit: TableMismatch,
    },
    /// Shards are being placed anew.
    RebalancingTriggered {
        /// Of which table.
        table: TableName,
        /// Why.
        reason: String,
    },
    /// Shards without an owner have an owner now.
    ShardsAssigned {
        /// Of which table.
        table: TableName,
        /// The shards, and their new owners.
        shards: Arc<[Assigned]>,
    },
    /// Shards move from one node to another.
    ShardsMoving {
        /// Of which table.
        table: TableName,
        /// The shards, with the node that each leaves and the node that it moves to.
        shards: Arc<[Migrated]>,
    },
    /// Shards went from one node to another.
    ShardsMigrated {
        /// Of which table.
        table: TableName,
        /// The shards, with the node that each left and the node that it moved to.
        shards: Arc<[Migrated]>,
    },
    /// Shards have no owner any more.
    ShardsOrphaned {
        /// Of which table.
        table: TableName,
        /// Which shards.
        shards: Arc<[ShardId]>,
    },
    /// Shards have been moving for longer than the handoff timeout. Each stays with the node that has not
    /// stopped or started it yet.
    HandoffStuck {
        /// Of which table.
        table: TableName,
        /// Which shards; not more than the first 256.
        shards: Arc<[ShardId]>,
    },
    /// A node vanished together with so many others that it is not declared failed. Its shards stay with
    /// it until it returns, for three node TTLs at the most, or until an operator declares it failed with
    /// [`Command::MarkNodeFailed`](crate::Command::MarkNodeFailed).
    NodeSuspended {
        /// Which node.
        node: NodeId,
        /// Its incarnation.
        incarnation: Incarnation,
    },
    /// A rebalance is done.
    RebalancingCompleted {
        /// Of which table.
        table: TableName,
        /// How many shards changed their primary from one node to another.
        moved: u32,
    },
    /// A rebalance failed; the old map stays in force.
    RebalancingFailed {
        /// Of which table.
        table: TableName,
        /// Why.
        why: String,
    },
    /// A shard is kept on a node.
    ShardPinned {
        /// Of which table.
        table: TableName,
        /// Which shard.
        shard: ShardId,
        /// Where.
        node: NodeId,
    },
    /// A shard is free to move again.
    ShardUnpinned {
        /// Of which table.
        table: TableName,
        /// Which shard.
        shard: ShardId,
    },
    /// Shards are quarantined, because their hosts crashed one after the other. No node gets them until they
    /// are released.
    ShardsParked {
        /// Of which table.
        table: TableName,
        /// Which shards.
        shards: Arc<[ShardId]>,
        /// The hosts of the first of them that crashed, the first one first.
        hosts: Arc<[NodeId]>,
    },
    /// Quarantined shards are released, so that nodes get them again.
    ShardsUnparked {
        /// Of which table.
        table: TableName,
        /// Which shards.
        shards: Arc<[ShardId]>,
    },
    /// Only orphans are placed from now on.
    RebalancingPaused,
    /// Shards are balanced again.
    RebalancingResumed,
    /// No node can host shards.
    NoActiveNodes,
    /// The cluster as a whole is in another state.
    ClusterStateChanged {
        /// The state before.
        from: ClusterState,
        /// The state now.
        to: ClusterState,
    },
    /// The state of the lease that gates the coordinator has changed on this node.
    GatingChanged {
        /// The state now.
        gating: Gating,
    },
    /// This node is registered.
    Registered {
        /// The incarnation under which it is registered.
        incarnation: Incarnation,
    },
    /// This node's registration is gone. It hosts nothing from now on and joins as a new incarnation.
    RegistrationLost {
        /// The incarnation that was lost.
        incarnation: Incarnation,
        /// How.
        why: String,
    },
    /// This node's runtime has ended; it hosts nothing any more, and is not registered or will be so for its TTL
    /// only.
    Ended {
        /// The incarnation.
        incarnation: Incarnation,
    },
    /// The host of a shard failed here: its start returned an error, or it panicked, at its start or later.
    /// The shard does not run, and its start is tried again after a pause of 1 s that doubles up to 1 min.
    ShardFailed {
        /// Of which table.
        table: TableName,
        /// Which shard.
        shard: ShardId,
        /// How often since the shard was ready last.
        times: u32,
        /// The error and what it comes from, or the panic.
        why: String,
    },
    /// Starts or stops of shards take longer than the handoff timeout here, or were dropped because their
    /// time was up. As long as it is so, [`Status::faults`](crate::Status::faults) has them.
    ShardsFaulty {
        /// Of which table.
        table: TableName,
        /// What is wrong with them; never `Failed`, which is [`ShardFailed`](Self::ShardFailed).
        fault: HostFault,
        /// Which shards.
        shards: Arc<[ShardId]>,
    },
    /// The store has not answered this node for a third of the node TTL: what is known is frozen.
    StoreAway,
    /// The store answers again.
    StoreBack,
    /// This node's partition state has changed.
    PartitionStateChanged {
        /// The partition_state before.
        from: PartitionState,
        /// The partition_state now.
        to: PartitionState,
        /// The members that it does not reach.
        unreachable: Arc<[NodeId]>,
    },
    /// This node's side of a partition goes on, and these nodes go down.
    NodesDowned {
        /// Which nodes.
        nodes: Arc<[NodeId]>,
        /// By which strategy.
        strategy: String,
    },
    /// This node goes down: it stops its shards, leads no more, deregisters and ends.
    WentDown {
        /// Why.
        why: DownReason,
    },
    /// The settings of downing don't suit the members that there are: at a partition all would go down.
    DowningUnfit {
        /// How.
        why: String,
    },
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NodeJoined { node, .. } => write!(f, "node {node} joined"),
            Self::NodeReplaced { node, .. } => write!(f, "node {node} restarted"),
            Self::NodeFailed { node, why, .. } => write!(f, "node {node} failed: {why}"),
            Self::NodeLeft { node, .. } => write!(f, "node {node} left"),
            Self::NodeDraining { node } => write!(f, "node {node} is draining"),
            Self::NodeActive { node } => write!(f, "node {node} is active"),
            Self::LeaderElected { node, term } => write!(f, "node {node} leads, term {term}"),
            Self::LeadershipLost { node, term, why } => {
                write!(f, "term {term} of node {node} ended: {why}")
            }
            Self::TableRefused { table, term, misfit } => {
                write!(f, "table {table} is not for this node's term {term}: it {misfit}")
            }
            Self::RebalancingTriggered { table, reason } => {
                write!(f, "table {table} is rebalanced: {reason}")
            }
            Self::ShardsAssigned { table, shards } => {
                write!(f, "{} shards of table {table} are assigned", shards.len())
            }
            Self::ShardsMoving { table, shards } => {
                write!(f, "{} shards of table {table} are on their way", shards.len())
            }
            Self::HandoffStuck { table, shards } => {
                write!(f, "{} shards of table {table} are stuck on their way:", shards.len())?;
                shards.iter().take(NAMED_MAX).try_for_each(|shard| write!(f, " {shard}"))
            }
            Self::NodeSuspended { node, .. } => {
                write!(
                    f,
                    "node {node} is suspended: too many vanished with it; it keeps its shards for three \
                     node TTLs, unless it is declared failed (mark_node_failed)"
                )
            }
            Self::ShardsMigrated { table, shards } => {
                write!(f, "{} shards of table {table} moved", shards.len())
            }
            Self::ShardsOrphaned { table, shards } => {
                write!(f, "{} shards of table {table} are orphaned", shards.len())
            }
            Self::RebalancingCompleted { table, moved } => {
                write!(f, "table {table} is rebalanced, {moved} shards moved")
            }
            Self::RebalancingFailed { table, why } => {
                write!(f, "table {table} can't be rebalanced: {why}")
            }
            Self::ShardPinned { table, shard, node } => {
                write!(f, "shard {shard} of table {table} is pinned to node {node}")
            }
            Self::ShardUnpinned { table, shard } => {
                write!(f, "shard {shard} of table {table} is not pinned any more")
            }
            Self::ShardsParked { table, shards, hosts } => {
                write!(f, "{} shards of table {table} are parked:", shards.len())?;
                shards.iter().take(NAMED_MAX).try_for_each(|shard| write!(f, " {shard}"))?;
                f.write_str("; they took along")?;
                hosts.iter().take(NAMED_MAX).try_for_each(|host| write!(f, " {host}"))
            }
            Self::ShardsUnparked { table, shards } => {
                write!(f, "{} shards of table {table} are not parked any more", shards.len())
            }
            Self::RebalancingPaused => f.write_str("balancing is paused"),
            Self::RebalancingResumed => f.write_str("balancing is resumed"),
            Self::NoActiveNodes => f.write_str("no node is active"),
            Self::ClusterStateChanged { from, to } => {
                write!(f, "the cluster was {from} and is {to}")
            }
            Self::GatingChanged { gating: Gating::None } => {
                f.write_str("no gate is wanted for the coordinator")
            }
            Self::GatingChanged { gating: Gating::Acquiring } => {
                f.write_str("the coordinator waits for its gate")
            }
            Self::GatingChanged { gating: Gating::Held } => {
                f.write_str("the coordinator's gate is held")
            }
            Self::Registered { .. } => f.write_str("registered"),
            Self::Ended { .. } => f.write_str("this node has ended"),
            Self::RegistrationLost { why, .. } => write!(f, "the registration is lost: {why}"),
            Self::ShardFailed { table, shard, times, why } => {
                write!(f, "shard {shard} of table {table} failed, {times} in a row: {why}")
            }
            Self::ShardsFaulty { table, fault, shards } => {
                write!(f, "{fault}, {} shards of table {table}:", shards.len())?;
                shards.iter().take(NAMED_MAX).try_for_each(|shard| write!(f, " {shard}"))
            }
            Self::StoreAway => f.write_str("the store is away"),
            Self::StoreBack => f.write_str("the store is back"),
            Self::PartitionStateChanged { from, to, unreachable } => {
                write!(f, "this node was {from} and is {to}")?;
                name(f, ", it does not reach", unreachable)
            }
            Self::NodesDowned { nodes, strategy } => {
                write!(f, "this side goes on by {strategy}")?;
                name(f, " and downs", nodes)
            }
            Self::WentDown { why } => write!(f, "this node goes down: {why}"),
            Self::DowningUnfit { why } => write!(f, "downing can't decide: {why}"),
        }
    }
}

/// In what a table differs from what a node that leads is configured with.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TableMismatch {
    /// It obeys this lease, and not the one that the node leads by.
    OtherLease(Binding),
    /// It was created with this header.
    OtherHeader(TableHeader),
}

impl fmt::Display for TableMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherLease(Binding { lease, origin, .. }) => {
                write!(f, "obeys lease {lease} of {origin}")
            }
            Self::OtherHeader(header) => {
                let (shards, replicas) = (header.shards.get(), header.replicas.get());
                write!(f, "was made with {shards} shards of {replicas} owners each")
            }
        }
    }
}

/// Names the first of these nodes, if there are any.
fn name(f: &mut fmt::Formatter<'_>, what: &str, nodes: &[NodeId]) -> fmt::Result {
    if nodes.is_empty() {
        return Ok(());
    }
    f.write_str(what)?;
    nodes.iter().take(NAMED_MAX).try_for_each(|node| write!(f, " {node}"))?;
    match nodes.len().saturating_sub(NAMED_MAX) {
        0 => Ok(()),
        more => write!(f, " and {more} more"),
    }
}

/// A shard that got an owner.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assigned {
    /// Which shard.
    pub shard: ShardId,
    /// The owner now.
    pub to: NodeId,
}

/// A shard that changed its owner.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Migrated {
    /// Which shard.
    pub shard: ShardId,
    /// The former owner.
    pub from: NodeId,
    /// The owner now.
    pub to: NodeId,
}

/// What a listener hears.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
pub enum EventOrLag {
    /// An event.
    Event(Arc<Event>),
    /// The listener was slow, and this many events passed it by. The
    /// [status](crate::Cluster::status) tells how things stand.
    Missed(u64),
}

/// The events of a cluster from the subscription on. A slow listener misses events and is told how many;
/// it never holds up the runtime. The stream ends when the cluster stops.
#[derive(Debug)]
pub struct Events(BroadcastStream<Arc<Event>>);

impl Events {
    pub(crate) fn new(receiver: broadcast::Receiver<Arc<Event>>) -> Self {
        Self(BroadcastStream::new(receiver))
    }

    /// The next thing that is heard; `None` once the cluster has stopped.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn next(&mut self) -> Option<EventOrLag> {
        self.0.next().await.map(heard)
    }
}

impl Stream for Events {
    type Item = EventOrLag;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<EventOrLag>> {
        Pin::new(&mut self.0).poll_next(context).map(|next| next.map(heard))
    }
}

fn heard(item: Result<Arc<Event>, BroadcastStreamRecvError>) -> EventOrLag {
    match item {
        Ok(event) => EventOrLag::Event(event),
        Err(BroadcastStreamRecvError::Lagged(missed)) => EventOrLag::Missed(missed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_slow_listener_is_told_how_much_it_missed() {
        let (sender, receiver) = broadcast::channel(2);
        let mut events = Events::new(receiver);
        for _ in 0..5 {
            let event = Event::new(EventSource::Local, EventKind::StoreAway);
            sender.send(Arc::new(event)).expect("one listener");
        }
        drop(sender);
        assert_eq!(events.next().await, Some(EventOrLag::Missed(3)));
        assert!(matches!(events.next().await, Some(EventOrLag::Event(_))));
        assert!(matches!(events.next().await, Some(EventOrLag::Event(_))));
        assert_eq!(events.next().await, None);
    }

    #[test]
    fn events_read_back_from_json() {
        let table = TableName::new("orders").expect("name");
        let cause = EventSource::Version { table: table.clone(), version: Version::new(3) };
        let event = Event::new(cause, EventKind::RebalancingCompleted { table, moved: 256 });
        let json = serde_json::to_string(&event).expect("writes");
        assert!(json.contains("\"event\":\"rebalancing_completed\""), "{json}");
        assert_eq!(serde_json::from_str::<Event>(&json).expect("reads"), event);
    }
}
