//! A cluster of several nodes on one isolated store.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use coord_cluster::{Cluster, Event, EventKind, EventOrLag, Events, Settings, Status, Table};
use coord_core::{
    Address, ClusterName, MemoryBackend, NodeId, NodeInfo, NodeStatus, ShardMap, TableName,
    TokioClock,
};
use futures::FutureExt;
use tokio::task::unconstrained;

/// Longer than anything in a test takes; under paused time it costs nothing.
pub(crate) const LIMIT: Duration = Duration::from_secs(600);

pub(crate) fn table() -> TableName {
    TableName::new("orders").expect("name")
}

pub(crate) fn id(name: &str) -> NodeId {
    NodeId::new(name).expect("name")
}

pub(crate) fn info(name: &str) -> NodeInfo {
    NodeInfo::new(id(name), Address::new("localhost:4000").expect("address"))
}

pub(crate) fn store() -> MemoryBackend {
    MemoryBackend::isolated(ClusterName::new("orders").expect("name"))
}

/// Starts a node with the fast settings and one table of 1024 shards.
pub(crate) async fn node(store: &MemoryBackend, name: &str) -> Cluster {
    node_with(store, name, Settings::fast()).await
}

pub(crate) async fn node_with(store: &MemoryBackend, name: &str, settings: Settings) -> Cluster {
    Cluster::builder(&store.reopen(), info(name))
        .settings(settings)
        .table(Table::new(table()))
        .clock(Arc::new(TokioClock::new()))
        .start()
        .await
        .expect("starts")
}

/// Four nodes n1 to n4 that share 1024 shards evenly.
pub(crate) async fn four(store: &MemoryBackend) -> Vec<Cluster> {
    let mut nodes = Vec::new();
    for name in ["n1", "n2", "n3", "n4"] {
        nodes.push(node(store, name).await);
    }
    for node in &nodes {
        until(node, |status| shares(status) == [256; 4]).await;
    }
    nodes
}

/// Waits, within bounds, until things stand so.
pub(crate) async fn until(
    node: &Cluster,
    wanted: impl FnMut(&Status) -> bool + Send,
) -> Arc<Status> {
    match tokio::time::timeout(LIMIT, node.wait_for(wanted)).await {
        Ok(status) => status.expect("runs"),
        Err(_elapsed) => panic!("{} never got there: {:?}", node.node(), node.status()),
    }
}

/// How many shards each live member has, smallest first, once all is settled; empty before.
pub(crate) fn shares(status: &Status) -> Vec<u32> {
    if !status.is_settled() {
        return Vec::new();
    }
    let live = status.members.iter().filter(|member| member.status == NodeStatus::Active);
    let mut shares: Vec<u32> = live.map(|member| member.shards).collect();
    shares.sort_unstable();
    shares
}

pub(crate) fn leader(nodes: &[Cluster]) -> usize {
    nodes.iter().position(Cluster::is_leader).expect("one leads")
}

pub(crate) fn map(node: &Cluster) -> Arc<ShardMap> {
    node.map(&table()).expect("a map")
}

/// The primaries that differ, by (from, to).
pub(crate) fn moves(old: &ShardMap, new: &ShardMap) -> BTreeMap<(NodeId, NodeId), u32> {
    let mut moves = BTreeMap::new();
    for shard in old.header().shards.shards() {
        let from = old.owner(shard).expect("owned").id.clone();
        let to = new.owner(shard).expect("owned").id.clone();
        if from != to {
            *moves.entry((from, to)).or_default() += 1;
        }
    }
    moves
}

/// All events that have been heard so far.
pub(crate) fn heard(events: &mut Events) -> Vec<Arc<Event>> {
    let mut all = Vec::new();
    // A task that has heard very many is told to wait, whatever else is there.
    while let Some(Some(heard)) = unconstrained(events.next()).now_or_never() {
        match heard {
            EventOrLag::Event(event) => all.push(event),
            other => panic!("a listener that keeps up misses nothing: {other:?}"),
        }
    }
    all
}

/// The kinds of all events that have been heard so far.
pub(crate) fn kinds(events: &mut Events) -> Vec<EventKind> {
    heard(events).iter().map(|event| event.kind.clone()).collect()
}
