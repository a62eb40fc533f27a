//! Who owns which shard: three workers share a table; each handles the keys of its own shards.
//!
//! `cargo run -p coord-examples --example sharded_worker [URL]`

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::collections::BTreeMap;
use std::time::Duration;

use coord::cluster::{Cluster, Settings};
use coord::{Address, NodeId, NodeInfo, NodeStatus, ShardCount, TableHeader, TableName};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::args().nth(1).unwrap_or("memory://sharded-example".into());
    let table = TableName::new("orders")?;

    // In a real service each worker is a process of its own.
    let mut workers = Vec::new();
    for number in 1..=3_u16 {
        workers.push(worker(&url, &table, number).await?);
    }
    for worker in &workers {
        settled(worker, 3).await?;
    }

    // Every worker can tell who owns a key: one hash and one look into an array, no call to the store.
    let mut shares: BTreeMap<NodeId, u32> = BTreeMap::new();
    for order in 0..3_000_u64 {
        let Some(owner) = workers[0].owner(&table, order.to_be_bytes()) else { continue };
        *shares.entry(owner.id).or_default() += 1;
    }
    println!("3 workers share 3000 orders: {shares:?}");

    // One leaves: its shards move to the others first, and nothing else moves.
    if let Some(leaving) = workers.pop() {
        println!("{} leaves", leaving.node());
        leaving.leave().await?;
    }
    settled(&workers[0], 2).await?;
    let map = workers[0].map(&table).expect("a settled cluster has a map");
    for worker in &workers {
        println!("{} has {} shards now", worker.node(), map.shards_of(worker.node()).count());
    }
    for worker in workers {
        worker.shutdown().await?;
    }
    Ok(())
}

async fn worker(url: &str, table: &TableName, number: u16) -> anyhow::Result<Cluster> {
    let node = NodeInfo::new(
        NodeId::new(format!("worker-{number}"))?,
        Address::new(format!("127.0.0.1:{}", 7000 + number))?,
    );
    let cluster = coord::connect(url)
        .await?
        .cluster(node)
        // Short times for an example; the defaults suit a real store.
        .settings(Settings::demo())
        .table(table.clone(), TableHeader::new(ShardCount::new(120)?))
        .start()
        .await?;
    Ok(cluster)
}

/// Waits until this many workers are active and every shard is where it belongs.
async fn settled(worker: &Cluster, workers: usize) -> anyhow::Result<()> {
    let settled = worker
        .wait_for(|status| status.is_settled() && status.count(NodeStatus::Active) == workers);
    tokio::time::timeout(Duration::from_secs(30), settled).await??;
    Ok(())
}
