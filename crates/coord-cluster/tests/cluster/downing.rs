//! Partitions: {peers reachable?} × {store reachable?}, and which side goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use coord_cluster::detector::Probe;
use coord_cluster::downing::{DowningSettings, Posture, Strategy, Why};
use coord_cluster::{Cluster, EventKind, Events, Host, HostError, Settings, ShardFence};
use coord_conformance::faults::{FaultControl, Faulty};
use coord_core::{
    Backend, Effect, Error, LeaseName, MemoryBackend, NodeEntry, NodeId, NodeStatus, ShardCount,
    ShardId, TableHeader, TokioClock,
};
use tokio::time::{Instant, sleep};

use crate::common::{LIMIT, id, info, kinds, map, store, table, until};

const SHARDS: u32 = 60;
const SECOND: Duration = Duration::from_secs(1);
/// When a partition of this long is decided: five probes missed, then stable for 20 s.
const DECIDED: Duration = Duration::from_secs(30);

/// The network between the nodes: which groups reach each other only among themselves.
#[derive(Clone, Debug, Default)]
struct Net(Arc<Mutex<Vec<BTreeSet<NodeId>>>>);

impl Net {
    fn split(&self, groups: &[&[&str]]) {
        let groups = groups.iter().map(|group| group.iter().map(|name| id(name)).collect());
        *self.0.lock().expect("not poisoned") = groups.collect();
    }

    fn reaches(&self, from: &NodeId, to: &NodeId) -> bool {
        let groups = self.0.lock().expect("not poisoned");
        groups.is_empty() || groups.iter().any(|group| group.contains(from) && group.contains(to))
    }
}

/// One node's way into the network.
#[derive(Debug)]
struct Line(Net, NodeId);

#[async_trait]
impl Probe for Line {
    async fn probe(&self, peer: &NodeEntry) -> coord_core::Result<()> {
        if self.0.reaches(&self.1, &peer.id) {
            return Ok(());
        }
        Err(Error::unavailable("probe", "no route"))
    }
}

/// Which node hosts each shard, and how often a second one began.
#[derive(Debug, Default)]
struct Hosting {
    running: Mutex<BTreeMap<ShardId, BTreeSet<NodeId>>>,
    doubled: Mutex<usize>,
}

impl Hosting {
    fn of(&self, node: &NodeId) -> usize {
        let running = self.running.lock().expect("not poisoned");
        running.values().filter(|hosts| hosts.contains(node)).count()
    }
}

#[derive(Debug)]
struct Noting(Arc<Hosting>, NodeId);

#[async_trait]
impl Host for Noting {
    async fn start(&self, shard: ShardId, _fence: ShardFence) -> Result<(), HostError> {
        let mut running = self.0.running.lock().expect("not poisoned");
        let hosts = running.entry(shard).or_default();
        hosts.insert(self.1.clone());
        *self.0.doubled.lock().expect("not poisoned") += usize::from(hosts.len() > 1);
        Ok(())
    }

    async fn stop(&self, shard: ShardId) {
        let mut running = self.0.running.lock().expect("not poisoned");
        running.entry(shard).or_default().remove(&self.1);
    }
}

struct Node {
    cluster: Cluster,
    events: Events,
    control: FaultControl,
}

struct World {
    store: MemoryBackend,
    net: Net,
    hosting: Arc<Hosting>,
    settings: Settings,
    probed: bool,
    nodes: BTreeMap<&'static str, Node>,
}

impl World {
    /// These nodes, started in this order, with the default settings (node TTL 90 s) and this strategy.
    async fn of(strategy: Strategy, names: &[&'static str]) -> Self {
        let mut settings = Settings::default();
        settings.downing = Some(DowningSettings::new(strategy));
        Self::with(settings, true, names).await
    }

    async fn with(settings: Settings, probed: bool, names: &[&'static str]) -> Self {
        let (net, hosting, nodes) = (Net::default(), Arc::default(), BTreeMap::new());
        let mut world = Self { store: store(), net, hosting, settings, probed, nodes };
        for name in names {
            world.start(name).await;
            let count = world.nodes.len();
            until(&world.nodes[name].cluster, |status| status.count(NodeStatus::Active) == count)
                .await;
        }
        world.settles(names).await;
        world
    }

    async fn start(&mut self, name: &'static str) {
        let faulty = Faulty::new(Arc::new(self.store.reopen()));
        let mut builder = Cluster::builder(&faulty, info(name))
            .settings(self.settings.clone())
            .table(table(), TableHeader::new(ShardCount::new(SHARDS).expect("count")))
            .host(table(), Arc::new(Noting(Arc::clone(&self.hosting), id(name))))
            .clock(Arc::new(TokioClock::new()));
        if self.probed {
            builder = builder.probe(Arc::new(Line(self.net.clone(), id(name))));
        }
        let cluster = builder.start().await.expect("starts");
        let (events, control) = (cluster.events(), faulty.control().clone());
        self.nodes.insert(name, Node { cluster, events, control });
    }

    /// Waits until exactly these are active, own all shards, and host what they own.
    async fn settles(&self, names: &[&str]) {
        for name in names {
            until(&self.nodes[name].cluster, |status| {
                status.is_settled() && status.count(NodeStatus::Active) == names.len()
            })
            .await;
        }
        let each = usize::try_from(SHARDS).expect("small") / names.len();
        let hosts = || names.iter().all(|name| self.hosting.of(&id(name)) == each);
        tokio::time::timeout(LIMIT, async {
            while !hosts() {
                sleep(SECOND).await;
            }
        })
        .await
        .expect("they host what they own");
    }

    fn cut(&self, names: &[&str]) {
        names.iter().for_each(|name| self.nodes[name].control.cut(Effect::Unknown));
    }

    fn heal(&self, names: &[&str]) {
        names.iter().for_each(|name| self.nodes[name].control.heal());
    }

    /// Why a node went down, once its runtime has ended.
    async fn ended(&self, name: &str) -> Why {
        let node = &self.nodes[name].cluster;
        let ended = tokio::time::timeout(LIMIT, node.wait_for(|_| false)).await.expect("ends");
        ended.expect_err("the runtime has ended");
        // Without the store it can't say goodbye.
        let _ = node.shutdown().await;
        assert_eq!(self.hosting.of(&id(name)), 0, "{name} hosts on");
        node.status().went_down.expect("it went down")
    }

    fn posture(&self, name: &str) -> Posture {
        self.nodes[name].cluster.status().posture
    }

    /// What downing has told on a node so far: whom it downed, why it went down.
    fn told(&mut self, name: &str) -> Vec<EventKind> {
        let mut all = kinds(&mut self.nodes.get_mut(name).expect("a node").events);
        all.retain(|kind| {
            matches!(kind, EventKind::NodesDowned { .. } | EventKind::WentDown { .. })
        });
        all
    }

    fn downed(strategy: &str, names: &[&str]) -> EventKind {
        let nodes: Vec<NodeId> = names.iter().map(|name| id(name)).collect();
        EventKind::NodesDowned { nodes: nodes.into(), strategy: strategy.to_owned() }
    }

    /// I6.
    #[track_caller]
    fn check_alone(&self) {
        assert_eq!(*self.hosting.doubled.lock().expect("not poisoned"), 0, "a shard had two hosts");
    }
}

const FIVE: [&str; 5] = ["n1", "n2", "n3", "n4", "n5"];

fn both() -> [Strategy; 2] {
    [Strategy::KeepMajority, Strategy::lease_majority()]
}

#[tokio::test(start_paused = true)]
async fn peers_and_store_reachable_is_normal() {
    for strategy in both() {
        let mut world = World::of(strategy, &FIVE).await;
        let before = map(&world.nodes["n1"].cluster);
        sleep(Duration::from_secs(900)).await;
        for name in FIVE {
            assert_eq!(world.posture(name), Posture::Normal);
            assert_eq!(world.told(name), []);
        }
        assert!(map(&world.nodes["n1"].cluster).raw_owners() == before.raw_owners());
        world.check_alone();
    }
}

#[tokio::test(start_paused = true)]
async fn peers_reachable_and_the_store_away_is_frozen() {
    for strategy in both() {
        let mut world = World::of(strategy, &FIVE).await;
        let before = map(&world.nodes["n1"].cluster);
        world.cut(&FIVE);
        for name in FIVE {
            until(&world.nodes[name].cluster, |status| status.posture == Posture::Frozen).await;
            assert_eq!(world.hosting.of(&id(name)), 12, "what is hosted works on");
        }
        world.heal(&FIVE);
        world.settles(&FIVE).await;
        sleep(Duration::from_secs(300)).await;
        for name in FIVE {
            assert_eq!(world.posture(name), Posture::Normal);
            assert_eq!(world.told(name), []);
        }
        assert!(map(&world.nodes["n1"].cluster).raw_owners() == before.raw_owners());
        world.check_alone();
    }
}

/// The leader is on the smaller side, whose nodes are the older ones and have the lower names.
#[tokio::test(start_paused = true)]
async fn peers_away_and_the_store_reachable_is_split_and_the_majority_goes_on() {
    for strategy in both() {
        let (name, lost) = (
            strategy.as_str(),
            match strategy {
                Strategy::KeepMajority => Why::OtherSide,
                _ => Why::LeaseHeld,
            },
        );
        let by_lease = lost == Why::LeaseHeld;
        let mut world = World::of(strategy, &FIVE).await;
        assert!(world.nodes["n1"].cluster.is_leader());
        let start = Instant::now();
        let (losers, winners) = (["n1", "n2"], ["n3", "n4", "n5"]);
        world.net.split(&[&losers, &winners]);
        until(&world.nodes["n3"].cluster, |status| status.posture == Posture::Split).await;
        for loser in losers {
            // Whoever hears the verdict first need not find out alone.
            let why = world.ended(loser).await;
            assert!(why == lost || why == Why::DeclaredFailed, "{loser}: {why}");
            assert!(!world.nodes[loser].cluster.is_leader());
            assert_eq!(world.told(loser), [EventKind::WentDown { why }]);
        }
        assert!(start.elapsed() < DECIDED, "{:?}", start.elapsed());
        world.settles(&winners).await;
        assert!(start.elapsed() < 2 * DECIDED, "before any TTL: {:?}", start.elapsed());
        world.check_alone();
        let mut told = Vec::new();
        for winner in winners {
            told.extend(world.told(winner));
            assert_eq!(world.posture(winner), Posture::Normal);
        }
        assert!(
            !told.is_empty() && told.iter().all(|t| *t == World::downed(name, &losers)),
            "{told:?}"
        );
        assert!(told.len() <= winners.len(), "each says it once: {told:?}");

        let lease = world.store.lease();
        let holder = lease.get(&LeaseName::downing()).await.expect("reads");
        assert_eq!(holder.is_some(), by_lease);
        assert!(holder.is_none_or(|held| winners.contains(&held.holder.node.as_str())));
        sleep(Duration::from_secs(60)).await;
        assert_eq!(
            lease.get(&LeaseName::downing()).await.expect("reads"),
            None,
            "it is given back"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn neither_peers_nor_store_is_isolated_and_the_majority_holds_on_until_the_store_is_back() {
    let mut world = World::of(Strategy::KeepMajority, &FIVE).await;
    let (losers, winners) = (["n1", "n2"], ["n3", "n4", "n5"]);
    world.net.split(&[&losers, &winners]);
    world.cut(&FIVE);
    sleep(2 * DECIDED).await;
    for loser in losers {
        assert_eq!(world.ended(loser).await, Why::OtherSide);
    }
    for winner in winners {
        assert_eq!(world.posture(winner), Posture::Isolated);
        assert_eq!(world.told(winner), [], "it can't write a verdict");
        assert_eq!(world.hosting.of(&id(winner)), 12);
    }
    world.heal(&FIVE);
    world.settles(&winners).await;
    world.check_alone();
}

#[tokio::test(start_paused = true)]
async fn neither_peers_nor_store_has_no_lease_to_ask_for_and_holds_on() {
    let mut world = World::of(Strategy::lease_majority(), &FIVE).await;
    let (losers, winners) = (["n1", "n2"], ["n3", "n4", "n5"]);
    world.net.split(&[&losers, &winners]);
    world.cut(&FIVE);
    sleep(2 * DECIDED).await;
    for name in FIVE {
        assert_eq!(world.posture(name), Posture::Isolated);
        assert_eq!(world.told(name), []);
        assert_eq!(world.hosting.of(&id(name)), 12);
    }
    world.check_alone();
}

#[tokio::test(start_paused = true)]
async fn a_side_without_the_store_reads_the_verdict_when_it_is_back() {
    let world = World::of(Strategy::lease_majority(), &FIVE).await;
    let (losers, winners) = (["n1", "n2"], ["n3", "n4", "n5"]);
    world.net.split(&[&losers, &winners]);
    world.cut(&losers);
    let failed = |status: &coord_cluster::Status| status.count(NodeStatus::Failed) == 2;
    until(&world.nodes["n3"].cluster, failed).await;
    for loser in losers {
        assert_eq!(world.posture(loser), Posture::Isolated);
        assert_eq!(world.hosting.of(&id(loser)), 12, "nobody else has them yet");
    }
    world.heal(&losers);
    let start = Instant::now();
    for loser in losers {
        assert_eq!(world.ended(loser).await, Why::DeclaredFailed);
    }
    assert!(start.elapsed() < DECIDED);
    world.settles(&winners).await;
    assert!(start.elapsed() < DECIDED, "they went in order: {:?}", start.elapsed());
    world.check_alone();
}

/// Cut off for longer than its TTL, it hosts nothing; and back again, it does not join.
#[tokio::test(start_paused = true)]
async fn a_side_whose_registrations_ran_out_does_not_join_again_after_a_verdict() {
    let world = World::of(Strategy::lease_majority(), &FIVE).await;
    let (losers, winners) = (["n1", "n2"], ["n3", "n4", "n5"]);
    world.net.split(&[&losers, &winners]);
    world.cut(&losers);
    world.settles(&winners).await;
    assert!(losers.iter().all(|loser| world.hosting.of(&id(loser)) == 0));
    world.heal(&losers);
    for loser in losers {
        assert_eq!(world.ended(loser).await, Why::DeclaredFailed);
    }
    sleep(Duration::from_secs(300)).await;
    world.settles(&winners).await;
    world.check_alone();
}

#[tokio::test(start_paused = true)]
async fn what_heals_in_time_downs_nobody() {
    let mut world = World::of(Strategy::DownAll, &FIVE).await;
    world.net.split(&[&["n1"], &["n2", "n3", "n4", "n5"]]);
    sleep(Duration::from_secs(15)).await;
    assert_eq!(world.posture("n1"), Posture::Split);
    world.net.split(&[]);
    sleep(Duration::from_secs(300)).await;
    for name in FIVE {
        assert_eq!(world.posture(name), Posture::Normal);
        assert_eq!(world.told(name), []);
    }
    world.settles(&FIVE).await;
}

#[tokio::test(start_paused = true)]
async fn down_all_leaves_nobody() {
    let world = World::of(Strategy::DownAll, &FIVE).await;
    world.net.split(&[&["n1"], &["n2", "n3", "n4", "n5"]]);
    for name in FIVE {
        let why = world.ended(name).await;
        assert_eq!(why, Why::OtherSide, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_quorum_that_two_sides_could_have_is_warned_of_once_and_all_go_down() {
    let four = ["n1", "n2", "n3", "n4"];
    let mut world = World::of(Strategy::StaticQuorum { quorum: 2 }, &four).await;
    sleep(Duration::from_secs(300)).await;
    for name in four {
        let mut told = kinds(&mut world.nodes.get_mut(name).expect("a node").events);
        told.retain(|kind| matches!(kind, EventKind::DowningUnfit { .. }));
        let why = "4 members are too many for a quorum of 2; at most 3 can be told apart";
        assert_eq!(told, [EventKind::DowningUnfit { why: why.to_owned() }], "{name}");
    }
    world.net.split(&[&["n1", "n2"], &["n3", "n4"]]);
    for name in four {
        assert_eq!(world.ended(name).await, Why::OtherSide);
    }
}

/// The first to become Active, whatever its name.
#[tokio::test(start_paused = true)]
async fn the_oldest_member_is_the_one_that_became_active_first() {
    let order = ["n5", "n1", "n2", "n3"];
    let world = World::of(Strategy::keep_oldest(), &order).await;
    world.net.split(&[&["n1", "n3"], &["n2", "n5"]]);
    for loser in ["n1", "n3"] {
        let why = world.ended(loser).await;
        assert!(matches!(why, Why::OtherSide | Why::DeclaredFailed), "{why}");
    }
    world.settles(&["n2", "n5"]).await;
    world.check_alone();
}

/// A verdict must not make a crash take longer than it does without downing.
#[tokio::test(start_paused = true)]
async fn the_shards_of_a_node_that_crashed_move_at_its_own_ttl() {
    let mut world = World::of(Strategy::KeepMajority, &["n1", "n2", "n3"]).await;
    let start = Instant::now();
    world.nodes["n2"].cluster.abandon();
    world.net.split(&[&["n1", "n3"], &["n2"]]);
    until(&world.nodes["n1"].cluster, |status| status.count(NodeStatus::Failed) == 1).await;
    assert!(start.elapsed() < DECIDED, "{:?}", start.elapsed());
    world.settles(&["n1", "n3"]).await;
    assert!(start.elapsed() < Duration::from_secs(93), "{:?}", start.elapsed());
    for name in ["n1", "n3"] {
        assert_eq!(world.told(name), [World::downed("keep-majority", &["n2"])]);
    }
}

/// The brake holds the leader back, and downing is the standing order of what to do then.
#[tokio::test(start_paused = true)]
async fn without_probes_the_strategy_decides_on_those_that_the_brake_keeps() {
    let mut settings = Settings::default();
    settings.downing = Some(DowningSettings::new(Strategy::KeepMajority));
    let mut world = World::with(settings, false, &FIVE).await;
    for name in ["n3", "n4", "n5"] {
        world.nodes[name].cluster.abandon();
    }
    world.settles(&["n1", "n2"]).await;
    let told: Vec<EventKind> = ["n1", "n2"].iter().flat_map(|name| world.told(name)).collect();
    let one =
        |kind: &EventKind| matches!(kind, EventKind::NodesDowned { nodes, .. } if nodes.len() == 1);
    assert!(!told.is_empty() && told.iter().all(one), "{told:?}");
}

#[tokio::test(start_paused = true)]
async fn a_probe_without_downing_is_a_mistake() {
    let started = Cluster::builder(&store(), info("n1"))
        .probe(Arc::new(Line(Net::default(), id("n1"))))
        .start()
        .await;
    let error = started.expect_err("nobody would use it");
    assert!(error.to_string().contains("set downing"), "{error}");
}
