//! Who hosts which shard: three workers share a table; each runs the shards that are its own, and a shard
//! never runs on two of them.
//!
//! `cargo run -p coord-examples --example sharded_worker [URL]`

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use coord::cluster::{Cluster, Host, HostError, Settings, ShardFence, Table};
use coord::{Address, NodeId, NodeInfo, NodeStatus, ShardCount, ShardId, TableName};

/// The work of one process: what it does for each shard that it hosts.
#[derive(Debug, Default)]
struct Work {
    running: Mutex<BTreeMap<ShardId, ShardFence>>,
}

#[async_trait]
impl Host for Work {
    async fn start(&self, shard: ShardId, fence: ShardFence) -> Result<(), HostError> {
        // A real worker would read the shard's state here, and show `fence.token()` with every write.
        self.running.lock().expect("not poisoned").insert(shard, fence);
        Ok(())
    }

    async fn stop(&self, shard: ShardId) {
        // Once this returns, another worker may start the shard: nothing of it may go on here.
        self.running.lock().expect("not poisoned").remove(&shard);
    }
}

impl Work {
    /// How many shards it may work on at this moment.
    fn count(&self) -> usize {
        let running = self.running.lock().expect("not poisoned");
        running.values().filter(|fence| fence.is_current()).count()
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::args().nth(1).unwrap_or("memory://sharded-example".into());
    let table = TableName::new("orders")?;

    // In a real service each worker is a process of its own.
    let mut workers = Vec::new();
    for number in 1..=3_u16 {
        workers.push(worker(&url, &table, number).await?);
    }
    for (worker, _) in &workers {
        settled(worker, 3).await?;
    }

    // Every worker can tell who owns a key: one hash and one look into an array, no call to the store.
    let mut shares: BTreeMap<NodeId, u32> = BTreeMap::new();
    for order in 0..3_000_u64 {
        let Some(owner) = workers[0].0.owner(&table, order.to_be_bytes()) else { continue };
        *shares.entry(owner.id).or_default() += 1;
    }
    println!("3 workers share 3000 orders: {shares:?}");

    // One leaves: it stops its shards, they move to the others, and nothing else moves.
    if let Some((leaving, work)) = workers.pop() {
        println!("{} leaves", leaving.node());
        leaving.leave().await?;
        println!("{} runs {} shards now", leaving.node(), work.count());
    }
    settled(&workers[0].0, 2).await?;
    for (worker, work) in &workers {
        while work.count() < 60 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        println!("{} runs {} shards now", worker.node(), work.count());
    }
    for (worker, _) in workers {
        worker.shutdown().await?;
    }
    Ok(())
}

async fn worker(url: &str, table: &TableName, number: u16) -> anyhow::Result<(Cluster, Arc<Work>)> {
    let work = Arc::new(Work::default());
    let node = NodeInfo::new(
        NodeId::new(format!("worker-{number}"))?,
        Address::new(format!("127.0.0.1:{}", 7000 + number))?,
    );
    let cluster = coord::connect(url)
        .await?
        .cluster(node)
        // Short times for an example; the defaults suit a real store.
        .settings(Settings::demo())
        .table(
            Table::new(table.clone()).shards(ShardCount::new(120)?).host(Arc::<Work>::clone(&work)),
        )
        .start()
        .await?;
    Ok((cluster, work))
}

/// Waits until this many workers are active and every shard is where it belongs.
async fn settled(worker: &Cluster, workers: usize) -> anyhow::Result<()> {
    let settled = worker
        .wait_for(|status| status.is_settled() && status.count(NodeStatus::Active) == workers);
    tokio::time::timeout(Duration::from_secs(30), settled).await??;
    Ok(())
}
