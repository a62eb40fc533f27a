//! Shards that crash whoever hosts them, and crashes that no shard is to blame for.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use coord_cluster::{
    Cluster, Command, CommandError, EventKind, Host, HostError, Reply, Settings, ShardFence, Table,
};
use coord_core::{MemoryBackend, NodeStatus, ShardCount, ShardId, TableName, TokioClock};

use crate::common::{id, info, kinds, leader, map, store, table, until};

const SHARDS: u32 = 64;
const SECOND: Duration = Duration::from_secs(1);

/// Which shards kill their hosts, and the processes that they can kill.
#[derive(Debug, Default)]
struct Killer {
    deadly: Mutex<BTreeSet<ShardId>>,
    processes: Mutex<BTreeMap<String, Cluster>>,
    killed: Mutex<Vec<String>>,
    /// Shards whose start panics.
    broken: Mutex<BTreeSet<ShardId>>,
}

impl Killer {
    fn killed(&self) -> Vec<String> {
        self.killed.lock().expect("not poisoned").clone()
    }
}

#[derive(Debug)]
struct Mortal {
    node: String,
    killer: Arc<Killer>,
}

#[async_trait]
impl Host for Mortal {
    async fn start(&self, shard: ShardId, _: ShardFence) -> Result<(), HostError> {
        let broken = self.killer.broken.lock().expect("not poisoned").contains(&shard);
        assert!(!broken, "shard {shard} can't start");
        if self.killer.deadly.lock().expect("not poisoned").contains(&shard) {
            tokio::time::sleep(SECOND).await;
            let process = self.killer.processes.lock().expect("not poisoned").remove(&self.node);
            if let Some(process) = process {
                self.killer.killed.lock().expect("not poisoned").push(self.node.clone());
                process.abandon();
            }
        }
        Ok(())
    }

    async fn stop(&self, _: ShardId) {}
}

struct Scene {
    store: MemoryBackend,
    killer: Arc<Killer>,
    settings: Settings,
}

impl Scene {
    fn new() -> Self {
        Self { store: store(), killer: Arc::default(), settings: Settings::fast() }
    }

    async fn start(&self, name: &str) -> Cluster {
        let shards = ShardCount::new(SHARDS).expect("count");
        let host = Mortal { node: name.to_owned(), killer: Arc::clone(&self.killer) };
        let node = Cluster::builder(&self.store.reopen(), info(name))
            .settings(self.settings.clone())
            .table(Table::new(table()).shards(shards).host(Arc::new(host)))
            .clock(Arc::new(TokioClock::new()))
            .start()
            .await
            .expect("starts");
        self.killer.processes.lock().expect("not poisoned").insert(name.to_owned(), node.clone());
        node
    }

    /// Six nodes that begin together.
    async fn six(&mut self) -> Vec<Cluster> {
        self.settings.min_members = 6;
        let mut nodes = Vec::new();
        for number in 1..=6 {
            nodes.push(self.start(&format!("n{number}")).await);
        }
        nodes
    }
}

fn parked() -> BTreeMap<TableName, Vec<ShardId>> {
    BTreeMap::from([(table(), vec![ShardId::new(7)])])
}

fn alive(nodes: Vec<Cluster>, killed: &[String]) -> Vec<Cluster> {
    nodes.into_iter().filter(|node| !killed.contains(&node.node().to_string())).collect()
}

/// A cluster whose shard 7 has killed three hosts.
async fn three_killed(scene: &mut Scene) -> Vec<Cluster> {
    scene.killer.deadly.lock().expect("not poisoned").insert(ShardId::new(7));
    let nodes = scene.six().await;
    let mut events: Vec<_> = nodes.iter().map(Cluster::events).collect();
    tokio::time::sleep(300 * SECOND).await;
    let killed = scene.killer.killed();
    assert_eq!(killed.len(), 3, "{killed:?}");
    let survivor = nodes.iter().position(|n| !killed.contains(&n.node().to_string()));
    let survivor = survivor.expect("three live");
    let told: Vec<_> = kinds(&mut events[survivor])
        .into_iter()
        .filter(|kind| matches!(kind, EventKind::ShardsParked { .. }))
        .collect();
    let hosts: Vec<_> = killed.iter().map(|name| id(name)).collect();
    let (shards, hosts) = (vec![ShardId::new(7)].into(), hosts.into());
    assert_eq!(told, [EventKind::ShardsParked { table: table(), shards, hosts }]);
    alive(nodes, &killed)
}

#[tokio::test(start_paused = true)]
async fn a_shard_that_kills_its_hosts_is_parked_after_three_and_the_others_are_placed() {
    let mut scene = Scene::new();
    let nodes = three_killed(&mut scene).await;
    for node in &nodes {
        let status = until(node, coord_cluster::Status::is_settled).await;
        assert_eq!(status.parked, parked());
        assert_eq!(status.tables[0].orphans, 0, "it is no orphan that anybody has to place");
    }
    let now = map(&nodes[0]);
    for shard in now.header().shards.shards() {
        let owner = now.owner(shard).map(|owner| owner.id.to_string());
        let lives = owner.as_ref().is_some_and(|o| nodes.iter().any(|n| n.node().as_str() == o));
        assert_eq!(lives, shard != ShardId::new(7), "shard {shard} of {owner:?}");
    }
    // It stays so, whoever leads, and costs nothing.
    for _ in 0..2 {
        let leads = leader(&nodes);
        let term = nodes[leads].fence().expect("leads").term;
        assert!(nodes[leads].request(Command::StepDown).await.expect("asked").is_done());
        until(&nodes[0], |s| s.leader.as_ref().is_some_and(|leader| leader.term > term)).await;
        tokio::time::sleep(600 * SECOND).await;
        assert_eq!(nodes[0].status().parked, parked());
        assert_eq!(map(&nodes[0]).version(), now.version());
    }
    assert_eq!(scene.killer.killed().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn an_operator_unparks_a_shard_and_what_is_parked_is_given_to_nobody() {
    let mut scene = Scene::new();
    let nodes = three_killed(&mut scene).await;
    let ask = |command| async { nodes[0].request(command).await.expect("asked") };
    let shard = ShardId::new(7);
    let to = nodes[0].node().clone();
    let owners = BTreeMap::from([(shard, vec![to.clone()])]);
    let assigns = [
        Command::AssignShard { table: table(), shard, node: to.clone() },
        Command::AssignShards { table: table(), owners },
    ];
    for command in assigns {
        assert_eq!(ask(command).await, Reply::Refused(CommandError::ShardParked { shard }));
    }
    let unpark = |shard| Command::Unpark { table: table(), shard };
    let other = ShardId::new(8);
    assert_eq!(
        ask(unpark(other)).await,
        Reply::Refused(CommandError::ShardNotParked { shard: other })
    );
    let none = ShardId::new(64);
    let refusal = CommandError::ShardNotFound { shard: none, shards: SHARDS };
    assert_eq!(ask(unpark(none)).await, Reply::Refused(refusal));
    scene.killer.deadly.lock().expect("not poisoned").clear();
    let mut events = nodes[0].events();
    assert!(ask(unpark(shard)).await.is_done());
    until(&nodes[0], |status| status.parked.is_empty() && status.is_settled()).await;
    assert!(map(&nodes[0]).owner(shard).is_some());
    let told = EventKind::ShardsUnparked { table: table(), shards: vec![shard].into() };
    assert!(kinds(&mut events).contains(&told));
    tokio::time::sleep(60 * SECOND).await;
    assert_eq!(scene.killer.killed().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_parked_shard_is_given_another_try_after_a_long_time() {
    let mut scene = Scene::new();
    scene.settings.poison_release = 1_000 * SECOND;
    let nodes = three_killed(&mut scene).await;
    assert_eq!(nodes[0].status().parked, parked());
    tokio::time::sleep(600 * SECOND).await;
    assert_eq!(scene.killer.killed().len(), 3);
    scene.killer.deadly.lock().expect("not poisoned").clear();
    tokio::time::sleep(600 * SECOND).await;
    let status = until(&nodes[0], coord_cluster::Status::is_settled).await;
    assert!(status.parked.is_empty());
    assert!(map(&nodes[0]).owner(ShardId::new(7)).is_some());
}

#[tokio::test(start_paused = true)]
async fn a_deleted_table_takes_what_was_held_against_its_shards_with_it() {
    let mut scene = Scene::new();
    let mut nodes = three_killed(&mut scene).await;
    scene.killer.deadly.lock().expect("not poisoned").clear();
    for name in scene.killer.killed() {
        nodes.push(scene.start(&name).await);
    }
    until(&nodes[0], |status| status.is_settled() && status.count(NodeStatus::Active) == 6).await;
    assert_eq!(nodes[0].status().parked, parked());
    let mut events = nodes[0].events();
    let former = map(&nodes[0]).uid();
    assert!(scene.store.delete_table(&table()));
    for node in &nodes {
        until(node, |status| {
            let reborn = node.map(&table()).is_some_and(|map| map.uid() != former);
            reborn && status.is_settled() && status.parked.is_empty()
        })
        .await;
    }
    assert!(map(&nodes[0]).owner(ShardId::new(7)).is_some());
    let shards = vec![ShardId::new(7)].into();
    assert!(kinds(&mut events).contains(&EventKind::ShardsUnparked { table: table(), shards }));
}

/// The strictest setting there is.
fn strict() -> Scene {
    let mut scene = Scene::new();
    scene.settings.poison_crashes = 2;
    scene
}

#[tokio::test(start_paused = true)]
async fn machines_that_are_killed_one_after_the_other_park_nothing() {
    let mut scene = strict();
    let mut nodes = scene.six().await;
    let settled = |active| {
        move |status: &coord_cluster::Status| {
            status.is_settled() && status.count(NodeStatus::Active) == active
        }
    };
    until(&nodes[0], settled(6)).await;
    for round in 0..12 {
        // Each has been well with what it was given for longer than a poison shard allows.
        tokio::time::sleep(scene.settings.poison_soon + 4 * SECOND).await;
        let victim = nodes.remove(0);
        victim.abandon();
        until(&nodes[0], settled(5)).await;
        tokio::time::sleep(scene.settings.poison_soon + 4 * SECOND).await;
        nodes.push(scene.start(victim.node().as_str()).await);
        until(&nodes[0], settled(6)).await;
        assert!(nodes[0].status().parked.is_empty(), "round {round}");
    }
}

#[tokio::test(start_paused = true)]
async fn machines_that_die_together_and_verdicts_and_leaves_park_nothing() {
    let mut scene = strict();
    let nodes = scene.six().await;
    let last = &nodes[5];
    // So soon that their crashes are evidence against what they have.
    until(last, |status| status.is_settled() && status.members.len() == 6).await;
    for node in &nodes[..2] {
        node.abandon();
        // Not even in the same heartbeat: the first one's shards may go to the second one, which is dead.
        tokio::time::sleep(4 * SECOND).await;
    }
    until(last, |status| status.is_settled() && status.count(NodeStatus::Active) == 4).await;
    assert!(last.status().parked.is_empty());
    for node in &nodes[2..4] {
        let run = node.status().registered.expect("registered");
        let command = Command::MarkNodeFailed { node: node.node().clone(), why: "test".to_owned() };
        assert!(last.request(command).await.expect("asked").is_done());
        // It joins again, as another run.
        until(node, |status| status.registered.is_some_and(|now| now != run)).await;
        until(last, |status| status.is_settled() && status.count(NodeStatus::Active) == 4).await;
    }
    nodes[4].leave().await.expect("leaves");
    until(last, |status| status.is_settled() && status.count(NodeStatus::Active) == 3).await;
    assert!(last.status().parked.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_start_that_fails_is_told_and_tried_again_ever_later() {
    let scene = Scene::new();
    let shard = ShardId::new(7);
    scene.killer.broken.lock().expect("not poisoned").insert(shard);
    let node = scene.start("n1").await;
    let mut events = node.events();
    tokio::time::sleep(20 * SECOND).await;
    let failed = |kind: &EventKind| match kind {
        EventKind::ShardFailed { table: of, shard: which, times, why } => {
            assert_eq!((of, *which), (&table(), shard));
            assert_eq!(why, "the host panicked: shard 7 can't start");
            Some(*times)
        }
        _ => None,
    };
    let times: Vec<u32> = kinds(&mut events).iter().filter_map(failed).collect();
    assert_eq!(times, [1, 2, 3, 4, 5], "at 0, 1, 3, 7 and 15 s");
    scene.killer.broken.lock().expect("not poisoned").clear();
    tokio::time::sleep(60 * SECOND).await;
    assert_eq!(kinds(&mut events).iter().filter_map(failed).count(), 0);
}
