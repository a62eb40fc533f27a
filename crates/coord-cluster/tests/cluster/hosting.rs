//! Hosts that fail, or hang: everybody is told, and a shard has one host all the same.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use coord_cluster::{
    Cluster, EventKind, Host, HostError, HostFault, Settings, ShardFence, Status, Table,
};
use coord_core::{MemoryBackend, ShardCount, ShardId, TokioClock};
use tokio::sync::watch;

use crate::common::{id, info, kinds, map, store, table, until};
use crate::metrics::Metrics;

const SHARDS: u32 = 4;
const ODD: ShardId = ShardId::new(2);
const SECOND: Duration = Duration::from_secs(1);

/// What the host of one shard does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    Well,
    FailsToStart,
    HangsAtStart,
    HangsAtStop,
}

/// How hosts do with the odd shard, and what they did: which node, and what.
#[derive(Debug)]
struct World {
    mood: watch::Sender<Mood>,
    done: Mutex<Vec<(String, &'static str)>>,
}

impl World {
    fn new(mood: Mood) -> Arc<Self> {
        Arc::new(Self { mood: watch::Sender::new(mood), done: Mutex::default() })
    }

    fn done(&self) -> Vec<(String, &'static str)> {
        std::mem::take(&mut *self.done.lock().expect("not poisoned"))
    }

    /// Waits for as long as the mood is this one.
    async fn hangs(&self, mood: Mood) {
        let mut now = self.mood.subscribe();
        now.wait_for(|now| *now != mood).await.expect("the test goes on");
    }

    async fn start(self: &Arc<Self>, store: &MemoryBackend, name: &str) -> Cluster {
        let shards = ShardCount::new(SHARDS).expect("count");
        let host = Moody { node: name.to_owned(), world: Arc::clone(self) };
        Cluster::builder(&store.reopen(), info(name))
            .settings(Settings::fast())
            .table(Table::new(table()).shards(shards).host(Arc::new(host)))
            .clock(Arc::new(TokioClock::new()))
            .start()
            .await
            .expect("starts")
    }
}

#[derive(Debug)]
struct Moody {
    node: String,
    world: Arc<World>,
}

impl Moody {
    fn did(&self, shard: ShardId, what: &'static str) {
        if shard == ODD {
            self.world.done.lock().expect("not poisoned").push((self.node.clone(), what));
        }
    }
}

#[async_trait]
impl Host for Moody {
    async fn start(&self, shard: ShardId, _fence: ShardFence) -> Result<(), HostError> {
        self.did(shard, "starts");
        if shard == ODD && *self.world.mood.borrow() == Mood::FailsToStart {
            let source = "disk full".parse::<u32>().expect_err("no number");
            return Err(coord_core::Error::invalid("open", "no state").with_source(source).into());
        }
        if shard == ODD {
            self.world.hangs(Mood::HangsAtStart).await;
        }
        self.did(shard, "runs");
        Ok(())
    }

    async fn stop(&self, shard: ShardId) {
        if shard == ODD {
            self.world.hangs(Mood::HangsAtStop).await;
        }
        self.did(shard, "stopped");
    }
}

fn faults(status: &Status) -> Option<&HostFault> {
    assert!(status.faults.values().flatten().all(|(shard, _)| *shard == ODD), "no other shard");
    status.faults.get(&table())?.get(&ODD)
}

fn faulty(kinds: &[EventKind]) -> Vec<(HostFault, Vec<ShardId>)> {
    let told = |kind: &EventKind| match kind {
        EventKind::ShardsFaulty { table: of, fault, shards } => {
            assert_eq!(*of, table());
            Some((fault.clone(), shards.to_vec()))
        }
        _ => None,
    };
    kinds.iter().filter_map(told).collect()
}

#[tokio::test(start_paused = true)]
async fn a_start_that_returns_an_error_is_told_stopped_and_tried_again() {
    let world = World::new(Mood::FailsToStart);
    let store = store();
    let node = world.start(&store, "n1").await;
    let mut events = node.events();
    let status =
        until(&node, |status| matches!(faults(status), Some(HostFault::Failed { times: 3, .. })))
            .await;
    assert!(status.is_settled(), "its owner keeps it");
    let told: Vec<_> = kinds(&mut events)
        .into_iter()
        .filter_map(|kind| match kind {
            EventKind::ShardFailed { shard: ODD, times, why, .. } => Some((times, why)),
            _ => None,
        })
        .collect();
    let why = "open: invalid: no state: invalid digit found in string";
    assert_eq!(told, [1, 2, 3].map(|times| (times, why.to_owned())));
    let once = [("n1".to_owned(), "starts"), ("n1".to_owned(), "stopped")];
    assert_eq!(world.done(), vec![once; 3].concat(), "what a start has left behind is stopped");
    world.mood.send_replace(Mood::Well);
    until(&node, |status| faults(status).is_none()).await;
    assert_eq!(world.done(), [("n1".to_owned(), "starts"), ("n1".to_owned(), "runs")]);
}

#[test]
fn a_start_that_hangs_is_told_once_and_until_it_ends() {
    Metrics::run(async |metrics| {
        let slow = || metrics.gauge("cluster_shards_faulty{start_slow}");
        let world = World::new(Mood::HangsAtStart);
        let store = store();
        let node = world.start(&store, "n1").await;
        let mut events = node.events();
        until(&node, |status| faults(status) == Some(&HostFault::StartSlow)).await;
        tokio::time::sleep(5 * Settings::fast().handoff_timeout).await;
        assert_eq!(faulty(&kinds(&mut events)), [(HostFault::StartSlow, vec![ODD])]);
        assert_eq!(world.done(), [("n1".to_owned(), "starts")], "it goes on");
        assert_eq!(slow(), 1.0);
        world.mood.send_replace(Mood::Well);
        until(&node, |status| faults(status).is_none()).await;
        assert_eq!(world.done(), [("n1".to_owned(), "runs")]);
        assert_eq!(slow(), 0.0);
    });
}

#[tokio::test(start_paused = true)]
async fn a_stop_that_hangs_is_told_by_its_node_and_nobody_else_starts_the_shard() {
    let world = World::new(Mood::Well);
    let store = store();
    let mut nodes = Vec::new();
    for name in ["n1", "n2"] {
        nodes.push(world.start(&store, name).await);
    }
    for node in &nodes {
        until(node, |status| status.is_settled() && status.members.iter().all(|m| m.shards == 2))
            .await;
    }
    let owner = map(&nodes[0]).owner(ODD).expect("owned").id.clone();
    let (from, to) = if owner == id("n1") { (0, 1) } else { (1, 0) };
    let mut events = nodes[from].events();
    world.done();
    world.mood.send_replace(Mood::HangsAtStop);
    let drain = coord_cluster::Command::Drain { node: owner };
    assert!(nodes[0].request(drain).await.expect("asked").is_done());
    until(&nodes[from], |status| faults(status) == Some(&HostFault::StopSlow)).await;
    tokio::time::sleep(5 * Settings::fast().handoff_timeout).await;
    assert_eq!(faulty(&kinds(&mut events)), [(HostFault::StopSlow, vec![ODD])]);
    assert_eq!(nodes[to].status().faults, BTreeMap::new(), "it is told where it is");
    assert_eq!(world.done(), []);
    world.mood.send_replace(Mood::Well);
    until(&nodes[from], |status| status.is_settled() && status.faults.is_empty()).await;
    until(&nodes[to], |status| status.members.iter().any(|member| member.shards == 4)).await;
    tokio::time::sleep(SECOND).await;
    let name = |at: usize| nodes[at].node().to_string();
    assert_eq!(world.done(), [(name(from), "stopped"), (name(to), "starts"), (name(to), "runs")]);
}

#[tokio::test(start_paused = true)]
async fn a_stop_beyond_the_stop_budget_is_dropped_and_told() {
    let world = World::new(Mood::HangsAtStop);
    let store = store();
    let node = world.start(&store, "n1").await;
    until(&node, Status::is_settled).await;
    let mut events = node.events();
    node.shutdown().await.expect("ends all the same");
    assert_eq!(faulty(&kinds(&mut events)), [(HostFault::Aborted, vec![ODD])]);
    assert_eq!(world.done(), [("n1".to_owned(), "starts"), ("n1".to_owned(), "runs")]);
}
