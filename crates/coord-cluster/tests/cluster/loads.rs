//! Loads of shards on their way from the hosts to the strategy.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use coord_cluster::{Cluster, Command, EventKind, Host, HostError, Settings, ShardFence, Table};
use coord_core::{Backend, MemoryBackend, NodeId, ShardCount, ShardId, ShardMap, TokioClock};
use coord_placement::{Balanced, LoadAware, PlacementStrategy};

use crate::common::{info, kinds, leader, map, store, table, until};

const SHARDS: u32 = 64;
const MINUTE: Duration = Duration::from_secs(60);
/// Every minute the balance is looked at, which is as often as loads are told.
const CHECK: Duration = MINUTE;

/// What each shard has to do, wherever it runs.
#[derive(Debug, Default)]
struct Meter {
    loads: Mutex<BTreeMap<ShardId, f64>>,
    asked: Mutex<u32>,
}

impl Meter {
    fn set(&self, shard: u32, load: f64) {
        self.loads.lock().expect("not poisoned").insert(ShardId::new(shard), load);
    }

    fn load(&self, shard: ShardId) -> f64 {
        self.loads.lock().expect("not poisoned").get(&shard).copied().unwrap_or(100.0)
    }

    fn asked(&self) -> u32 {
        *self.asked.lock().expect("not poisoned")
    }
}

#[derive(Debug)]
struct Metered(Arc<Meter>);

#[async_trait]
impl Host for Metered {
    async fn start(&self, _: ShardId, _: ShardFence) -> Result<(), HostError> {
        Ok(())
    }

    async fn stop(&self, _: ShardId) {}

    fn load(&self, shard: ShardId) -> Option<f64> {
        *self.0.asked.lock().expect("not poisoned") += 1;
        Some(self.0.load(shard))
    }
}

fn settings() -> Settings {
    let mut settings = Settings::fast();
    settings.rebalance_check = CHECK;
    settings
}

async fn node_with(
    store: &MemoryBackend,
    name: &str,
    meter: &Arc<Meter>,
    strategy: Arc<dyn PlacementStrategy>,
) -> Cluster {
    let shards = ShardCount::new(SHARDS).expect("count");
    Cluster::builder(&store.reopen(), info(name))
        .settings(settings())
        .table(
            Table::new(table())
                .shards(shards)
                .strategy(strategy)
                .host(Arc::new(Metered(Arc::clone(meter)))),
        )
        .clock(Arc::new(TokioClock::new()))
        .start()
        .await
        .expect("starts")
}

async fn four(store: &MemoryBackend, meter: &Arc<Meter>) -> Vec<Cluster> {
    let mut nodes = Vec::new();
    for name in ["n1", "n2", "n3", "n4"] {
        nodes.push(node_with(store, name, meter, Arc::new(LoadAware::new())).await);
    }
    for node in &nodes {
        until(node, |status| status.is_settled() && status.members.len() == 4).await;
    }
    // All have said how busy they are, and the balance has been looked at.
    tokio::time::sleep(4 * MINUTE).await;
    nodes
}

/// What each node has to do.
fn sums(map: &ShardMap, meter: &Meter) -> BTreeMap<NodeId, f64> {
    let mut sums = BTreeMap::new();
    for shard in map.header().shards.shards() {
        let owner = map.owner(shard).expect("owned").id.clone();
        *sums.entry(owner).or_default() += meter.load(shard);
    }
    sums
}

fn moved(old: &ShardMap, new: &ShardMap) -> usize {
    let owner = |map: &ShardMap, shard| map.owner(shard).map(|node| node.id.clone());
    old.header().shards.shards().filter(|s| owner(old, *s) != owner(new, *s)).count()
}

/// Within a band of 20 % around their share.
fn is_even(sums: &BTreeMap<NodeId, f64>) -> bool {
    let share = sums.values().sum::<f64>() / 4.0;
    sums.len() == 4 && sums.values().all(|sum| (sum - share).abs() <= share * 0.2)
}

#[tokio::test(start_paused = true)]
async fn a_hot_shard_makes_a_few_others_move_once_and_then_all_is_quiet() {
    let (store, meter) = (store(), Arc::<Meter>::default());
    let nodes = four(&store, &meter).await;
    let before = map(&nodes[0]);
    assert!(is_even(&sums(&before, &meter)));
    // As much as eight others: its node has 23 of 71.
    meter.set(0, 800.0);
    assert!(!is_even(&sums(&before, &meter)));
    let mut versions = Vec::new();
    for _ in 0..50 {
        tokio::time::sleep(CHECK).await;
        versions.push(map(&nodes[0]).version());
    }
    let after = map(&nodes[0]);
    assert!(is_even(&sums(&after, &meter)), "{:?}", sums(&after, &meter));
    let moves = moved(&before, &after);
    assert!((1..=12).contains(&moves), "{moves} moves; two plans may move six each");
    let last = versions.last().copied();
    let quiet = versions.iter().rev().take_while(|version| Some(**version) == last).count();
    assert!(quiet >= 44, "quiet for {quiet} rounds of 50");
    for (node, record) in nodes.iter().zip(store.discovery().nodes().await.expect("answers").iter())
    {
        assert!(record.info.load.is_some() && record.info.loads.contains_key(&table()), "{node:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn loads_that_waver_move_nothing_and_write_nothing() {
    let (store, meter) = (store(), Arc::<Meter>::default());
    let nodes = four(&store, &meter).await;
    let before = map(&nodes[0]);
    let revisions = || async {
        let records = store.discovery().nodes().await.expect("answers");
        records.into_iter().map(|record| record.info.loads).collect::<Vec<_>>()
    };
    let told = revisions().await;
    for round in 0..50_u32 {
        for shard in 0..SHARDS {
            // Up to 3 % up or down.
            let noise = (shard.wrapping_mul(2_654_435_761) ^ round.wrapping_mul(40_503)) % 7;
            meter.set(shard, 97.0 + f64::from(noise));
        }
        tokio::time::sleep(CHECK).await;
    }
    assert_eq!(map(&nodes[0]).version(), before.version());
    assert_eq!(revisions().await, told);
}

#[tokio::test(start_paused = true)]
async fn another_leader_begins_no_second_round() {
    let (store, meter) = (store(), Arc::<Meter>::default());
    let mut nodes = four(&store, &meter).await;
    let before = map(&nodes[0]);
    // More than one plan may put right.
    for shard in 0..SHARDS {
        let owner = before.owner(ShardId::new(shard)).expect("owned").id.as_str();
        meter.set(shard, if owner == "n1" { 900.0 } else { 100.0 });
    }
    let mut events = nodes[0].events();
    let triggered = |kind: &EventKind| matches!(kind, EventKind::RebalancingTriggered { .. });
    while map(&nodes[0]).version() == before.version() {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    until(&nodes[0], coord_cluster::Status::is_settled).await;
    assert_eq!(moved(&before, &map(&nodes[0])), 6, "as many as one plan may move");
    kinds(&mut events);
    // Each new leader finds the loads still uneven, and leaves it to the periodic check.
    let first = map(&nodes[0]);
    for _ in 0..3 {
        let leads = leader(&nodes);
        let term = nodes[leads].fence().expect("leads").term;
        assert!(nodes[leads].request(Command::StepDown).await.expect("asked").is_done());
        until(&nodes[0], |s| s.leader.as_ref().is_some_and(|leader| leader.term > term)).await;
        tokio::time::sleep(Duration::from_secs(20)).await;
    }
    assert_eq!(moved(&first, &map(&nodes[0])), 0);
    assert!(!kinds(&mut events).iter().any(triggered));
    tokio::time::sleep(CHECK).await;
    assert!(moved(&first, &map(&nodes[0])) > 0, "it is not forgotten");
    nodes.truncate(1);
}

#[tokio::test(start_paused = true)]
async fn a_table_that_does_not_go_by_loads_is_never_asked_for_them() {
    let (store, meter) = (store(), Arc::<Meter>::default());
    let node = node_with(&store, "n1", &meter, Arc::new(Balanced::default())).await;
    until(&node, coord_cluster::Status::is_settled).await;
    tokio::time::sleep(5 * MINUTE).await;
    assert_eq!(meter.asked(), 0);
    let records = store.discovery().nodes().await.expect("answers");
    assert!(records.iter().all(|record| record.info.loads.is_empty()));
}
