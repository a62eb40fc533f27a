//! One cluster over several stores: who leads in one, who is alive in another, who owns what in a third.
//!
//! `cargo run -p coord-examples --example mixed_stores [LEASES NODES MAPS]`, each a URL. Kubernetes for the
//! leader, NATS for the heartbeats and etcd for the maps, say:
//! `… --features full --example mixed_stores kube://…/shop nats://…/shop etcd://…/shop`

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::time::Duration;

use coord::cluster::{Cluster, Settings, Stores, Table};
use coord::{Address, NodeId, NodeInfo, NodeStatus, ShardCount, TableName, connect};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let urls: [String; 3] = match given.len() {
        0 => ["leases", "nodes", "maps"].map(|name| format!("memory://{name}")),
        _ => given.try_into().map_err(|given| {
            anyhow::anyhow!("give three URLs, for leases, nodes and maps, or none; got {given:?}")
        })?,
    };
    let [leases, nodes, maps] = &urls;
    let (leases, nodes, maps) =
        (connect(leases).await?, connect(nodes).await?, connect(maps).await?);
    for (what, store) in [("leases", &leases), ("nodes", &nodes), ("maps", &maps)] {
        println!("{what} live in {}", store.info().target);
    }

    let table = TableName::new("orders")?;
    let mut members = Vec::new();
    for number in 1..=3_u16 {
        let id = NodeId::new(format!("member-{number}"))?;
        let node = NodeInfo::new(id, Address::new(format!("127.0.0.1:{}", 7000 + number))?);
        // A write is fenced by the term of the lease, wherever that lives: each store of maps keeps the
        // highest term that it has seen.
        let stores = Stores::new(leases.backend().as_ref())
            .with_discovery(nodes.backend().as_ref())
            .with_placement(maps.backend().as_ref());
        let member = Cluster::builder(stores, node)
            // Short times for an example; the defaults suit a real store.
            .settings(Settings::demo())
            .table(Table::new(table.clone()).shards(ShardCount::new(120)?))
            .start()
            .await?;
        members.push(member);
    }
    for member in &members {
        settled(member, 3).await?;
    }
    let leader = members.iter().position(Cluster::is_leader).unwrap_or_default();
    if let Some(fence) = members[leader].fence() {
        println!(
            "{} leads in term {}, by a lease in {}",
            members[leader].node(),
            fence.term,
            fence.origin
        );
    }

    // The leader crashes: its lease runs out in one store, its registration in another, and the next
    // leader writes the new map into the third.
    members.remove(leader).abandon();
    settled(&members[0], 2).await?;
    let map = members[0].map(&table).expect("a settled cluster has a map");
    for member in &members {
        println!("{} has {} shards now", member.node(), map.shards_of(member.node()).count());
    }
    for member in members {
        member.shutdown().await?;
    }
    Ok(())
}

/// Waits until this many members are active and every shard is where it belongs.
async fn settled(member: &Cluster, members: usize) -> anyhow::Result<()> {
    let settled = member
        .wait_for(|status| status.is_settled() && status.count(NodeStatus::Active) == members);
    tokio::time::timeout(Duration::from_secs(60), settled).await??;
    Ok(())
}
