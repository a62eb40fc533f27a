//! Partitions: {peers reachable?} × {store reachable?}, and which side goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use coord_cluster::Probe;
use coord_cluster::downing::{DownReason, DowningSettings, PartitionState, Strategy};
use coord_cluster::{Cluster, EventKind, Events, Host, HostError, Settings, ShardFence, Table};
use coord_conformance::faults::{FaultControl, Faulty};
use coord_core::{
    Backend, Effect, Error, Label, LeaseName, MemoryBackend, NodeEntry, NodeId, NodeStatus,
    ShardCount, ShardId, TokioClock,
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
        let role = self.settings.downing.as_ref().and_then(|downing| downing.role.clone());
        let roles = role.filter(|_| CORE.contains(&name)).into_iter().collect();
        let info = info(name).with_roles(roles).expect("few");
        let mut builder = Cluster::builder(&faulty, info)
            .settings(self.settings.clone())
            .table(
                Table::new(table())
                    .shards(ShardCount::new(SHARDS).expect("count"))
                    .host(Arc::new(Noting(Arc::clone(&self.hosting), id(name)))),
            )
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
    async fn ended(&self, name: &str) -> DownReason {
        let node = &self.nodes[name].cluster;
        let ended = tokio::time::timeout(LIMIT, node.wait_for(|_| false)).await.expect("ends");
        ended.expect_err("the runtime has ended");
        // Without the store it can't say goodbye.
        let _ = node.shutdown().await;
        assert_eq!(self.hosting.of(&id(name)), 0, "{name} hosts on");
        node.status().went_down.expect("it went down")
    }

    fn partition_state(&self, name: &str) -> PartitionState {
        self.nodes[name].cluster.status().partition_state
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
/// Those that have the role, where one counts.
const CORE: [&str; 3] = ["n1", "n4", "n5"];

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
            assert_eq!(world.partition_state(name), PartitionState::Normal);
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
            until(&world.nodes[name].cluster, |status| {
                status.partition_state == PartitionState::Frozen
            })
            .await;
            assert_eq!(world.hosting.of(&id(name)), 12, "what is hosted works on");
        }
        world.heal(&FIVE);
        world.settles(&FIVE).await;
        sleep(Duration::from_secs(300)).await;
        for name in FIVE {
            assert_eq!(world.partition_state(name), PartitionState::Normal);
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
                Strategy::KeepMajority => DownReason::OtherSide,
                _ => DownReason::LeaseHeld,
            },
        );
        let by_lease = lost == DownReason::LeaseHeld;
        let mut world = World::of(strategy, &FIVE).await;
        assert!(world.nodes["n1"].cluster.is_leader());
        let start = Instant::now();
        let (losers, winners) = (["n1", "n2"], ["n3", "n4", "n5"]);
        world.net.split(&[&losers, &winners]);
        until(&world.nodes["n3"].cluster, |status| status.partition_state == PartitionState::Split)
            .await;
        for loser in losers {
            // Whoever hears the verdict first need not find out alone.
            let why = world.ended(loser).await;
            assert!(why == lost || why == DownReason::DeclaredFailed, "{loser}: {why}");
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
            assert_eq!(world.partition_state(winner), PartitionState::Normal);
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
        assert_eq!(world.ended(loser).await, DownReason::OtherSide);
    }
    for winner in winners {
        assert_eq!(world.partition_state(winner), PartitionState::Isolated);
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
        assert_eq!(world.partition_state(name), PartitionState::Isolated);
        assert_eq!(world.told(name), []);
        assert_eq!(world.hosting.of(&id(name)), 12);
    }
    world.check_alone();
}

/// Nobody's rows tell of the partition before the store is back to it, and all the others' are old then.
/// Whichever side the lease goes to, all of it goes on.
#[tokio::test(start_paused = true)]
async fn a_store_that_comes_back_to_one_after_the_other_keeps_one_whole_side() {
    let orders = [
        ["n3", "n4", "n5", "n1", "n2"],
        ["n1", "n3", "n2", "n4", "n5"],
        ["n2", "n5", "n4", "n3", "n1"],
        ["n5", "n1", "n2", "n3", "n4"],
    ];
    for order in orders {
        let mut settings = Settings::default();
        // Longer than the outage, so that all of them are still the same runs.
        settings.node_ttl = Duration::from_secs(180);
        settings.downing = Some(DowningSettings::new(Strategy::lease_majority()));
        let world = World::with(settings, true, &FIVE).await;
        let sides = [&["n1", "n2"][..], &["n3", "n4", "n5"]];
        world.net.split(&sides);
        world.cut(&FIVE);
        sleep(DECIDED).await;
        for name in order {
            assert_eq!(world.partition_state(name), PartitionState::Isolated, "{name}");
            world.heal(&[name]);
            sleep(Duration::from_secs(12)).await;
        }
        let lease = world.store.lease();
        let holder = || async { lease.get(&LeaseName::downing()).await.expect("reads") };
        let holder = tokio::time::timeout(LIMIT, async {
            loop {
                match holder().await {
                    Some(record) => break record.holder.node,
                    None => sleep(SECOND).await,
                }
            }
        });
        let holder = holder.await.expect("one side asks for the lease");
        for side in sides {
            if side.contains(&holder.as_str()) {
                world.settles(side).await;
                continue;
            }
            for loser in side {
                let why = world.ended(loser).await;
                assert!(
                    matches!(why, DownReason::LeaseHeld | DownReason::DeclaredFailed),
                    "{loser}: {why}"
                );
            }
        }
        world.check_alone();
    }
}

/// All registrations are gone by then, so that all join as other runs: those who reach whoever leads by
/// then go on, and the others wait until the network heals.
#[tokio::test(start_paused = true)]
async fn a_store_that_comes_back_after_all_registrations_ran_out_keeps_the_side_that_leads() {
    let orders = [
        ["n3", "n1", "n4", "n5", "n2"],
        ["n1", "n3", "n2", "n4", "n5"],
        ["n2", "n5", "n4", "n3", "n1"],
    ];
    for order in orders {
        let mut world = World::of(Strategy::lease_majority(), &FIVE).await;
        let sides = [&["n1", "n2"][..], &["n3", "n4", "n5"]];
        world.net.split(&sides);
        world.cut(&FIVE);
        sleep(Duration::from_secs(120)).await;
        assert!(FIVE.iter().all(|name| world.hosting.of(&id(name)) == 0));
        for name in order {
            world.heal(&[name]);
            sleep(Duration::from_secs(12)).await;
        }
        let side = sides.into_iter().find(|side| side.contains(&order[0])).expect("a side");
        world.settles(side).await;
        for name in FIVE {
            let went: Vec<_> = world
                .told(name)
                .into_iter()
                .filter(|kind| matches!(kind, EventKind::WentDown { .. }))
                .collect();
            assert_eq!(went, [], "{name} of {order:?}");
        }
        world.net.split(&[]);
        world.settles(&FIVE).await;
        world.check_alone();
    }
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
        assert_eq!(world.partition_state(loser), PartitionState::Isolated);
        assert_eq!(world.hosting.of(&id(loser)), 12, "nobody else has them yet");
    }
    world.heal(&losers);
    let start = Instant::now();
    for loser in losers {
        assert_eq!(world.ended(loser).await, DownReason::DeclaredFailed);
    }
    assert!(start.elapsed() < DECIDED);
    world.settles(&winners).await;
    assert!(start.elapsed() < DECIDED, "they went in order: {:?}", start.elapsed());
    world.check_alone();
}

/// Cut off for longer than its TTL, it hosts nothing; and back again, it does not join.
#[tokio::test(start_paused = true)]
async fn a_side_whose_registrations_ran_out_does_not_join_again_after_a_verdict() {
    let mut world = World::of(Strategy::lease_majority(), &FIVE).await;
    let (losers, winners) = (["n1", "n2"], ["n3", "n4", "n5"]);
    world.net.split(&[&losers, &winners]);
    world.cut(&losers);
    world.settles(&winners).await;
    assert!(losers.iter().all(|loser| world.hosting.of(&id(loser)) == 0));
    kinds(&mut world.nodes.get_mut("n3").expect("a node").events);
    world.heal(&losers);
    for loser in losers {
        assert_eq!(world.ended(loser).await, DownReason::DeclaredFailed);
    }
    sleep(Duration::from_secs(300)).await;
    let joined = |kind: &EventKind| matches!(kind, EventKind::NodeJoined { .. });
    assert!(!kinds(&mut world.nodes.get_mut("n3").expect("a node").events).iter().any(joined));
    world.settles(&winners).await;
    world.check_alone();
}

/// Whatever else speaks for the other side: n1 leads, is the oldest and has the lowest name.
#[tokio::test(start_paused = true)]
async fn each_strategy_keeps_the_side_that_it_names() {
    let role = Label::new("core").expect("label");
    let cases: [(DowningSettings, &[&str], &[&str]); 4] = [
        (
            DowningSettings::new(Strategy::StaticQuorum { quorum: 3 }),
            &["n1", "n2"],
            &["n3", "n4", "n5"],
        ),
        (
            DowningSettings::new(Strategy::KeepReferee { referee: id("n5") }),
            &["n1", "n2", "n3"],
            &["n4", "n5"],
        ),
        (
            DowningSettings::new(Strategy::KeepMajority).with_role(role),
            &["n1", "n2", "n3"],
            &["n4", "n5"],
        ),
        (DowningSettings::new(Strategy::keep_oldest()), &["n1"], &["n2", "n3", "n4", "n5"]),
    ];
    for (downing, losers, winners) in cases {
        let mut settings = Settings::default();
        settings.downing = Some(downing);
        let world = World::with(settings, true, &FIVE).await;
        assert!(world.nodes["n1"].cluster.is_leader());
        world.net.split(&[losers, winners]);
        for loser in losers {
            let why = world.ended(loser).await;
            assert!(
                matches!(why, DownReason::OtherSide | DownReason::DeclaredFailed),
                "{loser}: {why}"
            );
        }
        world.settles(winners).await;
        world.check_alone();
    }
}

#[tokio::test(start_paused = true)]
async fn where_no_side_has_the_quorum_all_go_down() {
    let world = World::of(Strategy::StaticQuorum { quorum: 3 }, &FIVE).await;
    world.net.split(&[&["n1", "n2"], &["n3", "n4"], &["n5"]]);
    for name in FIVE {
        assert_eq!(world.ended(name).await, DownReason::OtherSide);
    }
}

/// On a network that fails for 3 s time and again, a failure of 6 s is nothing unusual to the one
/// detector, and more than the other one allows.
#[tokio::test(start_paused = true)]
async fn the_detector_that_the_settings_name_judges() {
    let phi = "{ kind = 'phi-accrual', threshold = 8.0 }";
    let age = "{ kind = 'heartbeat-age', limit = '5s' }";
    let each = FIVE.map(|name| [name]);
    let apart: Vec<&[&str]> = each.iter().map(|one| &one[..]).collect();
    for (detector, expected) in [(phi, PartitionState::Normal), (age, PartitionState::Split)] {
        let toml =
            format!("[downing]\nstrategy = {{ kind = 'keep-majority' }}\ndetector = {detector}");
        let settings = Settings::load::<String, String>([], &toml).expect("valid");
        let world = World::with(settings, true, &FIVE).await;
        for _ in 0..12 {
            world.net.split(&apart);
            sleep(3 * SECOND).await;
            world.net.split(&[]);
            sleep(11 * SECOND).await;
            assert!(FIVE.iter().all(|name| world.partition_state(name) == PartitionState::Normal));
        }
        world.net.split(&apart);
        sleep(6 * SECOND).await;
        assert!(FIVE.iter().all(|name| world.partition_state(name) == expected), "{detector}");
        world.net.split(&[&["n1", "n2"], &["n3", "n4", "n5"]]);
        for loser in ["n1", "n2"] {
            let why = world.ended(loser).await;
            assert!(
                matches!(why, DownReason::OtherSide | DownReason::DeclaredFailed),
                "{loser}: {why}"
            );
        }
        world.settles(&["n3", "n4", "n5"]).await;
    }
}

/// It is listed, hosts nothing, and is not decided on, until it reaches those that went on.
#[tokio::test(start_paused = true)]
async fn a_node_of_the_lost_side_that_is_restarted_moves_nothing_before_the_network_heals() {
    let mut world = World::of(Strategy::KeepMajority, &FIVE).await;
    let (losers, winners) = (["n1", "n2"], ["n3", "n4", "n5"]);
    world.net.split(&[&losers, &winners]);
    for loser in losers {
        world.ended(loser).await;
    }
    world.settles(&winners).await;
    let before = map(&world.nodes["n3"].cluster);
    for winner in winners {
        world.told(winner);
    }
    for _ in 0..3 {
        for loser in losers {
            world.start(loser).await;
        }
        sleep(3 * DECIDED).await;
        for loser in losers {
            let status = world.nodes[loser].cluster.status();
            let listed = status.member(&id(loser)).map(|member| member.status);
            assert_eq!((listed, status.went_down), (Some(NodeStatus::Discovered), None));
            world.nodes[loser].cluster.shutdown().await.expect("ends");
        }
    }
    let after = map(&world.nodes["n3"].cluster);
    assert_eq!(after.version(), before.version(), "no shard was moved");
    for loser in losers {
        world.start(loser).await;
    }
    sleep(DECIDED).await;
    // Those that wait don't count for the other side: two of three are still the majority.
    world.net.split(&[&losers, &["n3", "n4"], &["n5"]]);
    world.ended("n5").await;
    world.net.split(&[]);
    world.settles(&["n1", "n2", "n3", "n4"]).await;
    for winner in ["n3", "n4"] {
        let told = world.told(winner);
        let one = World::downed("keep-majority", &["n5"]);
        assert!(told.iter().all(|told| *told == one), "{told:?}");
    }
    world.check_alone();
}

#[tokio::test(start_paused = true)]
async fn what_heals_in_time_downs_nobody() {
    let mut world = World::of(Strategy::DownAll, &FIVE).await;
    world.net.split(&[&["n1"], &["n2", "n3", "n4", "n5"]]);
    sleep(Duration::from_secs(15)).await;
    assert_eq!(world.partition_state("n1"), PartitionState::Split);
    world.net.split(&[]);
    sleep(Duration::from_secs(300)).await;
    for name in FIVE {
        assert_eq!(world.partition_state(name), PartitionState::Normal);
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
        assert_eq!(why, DownReason::OtherSide, "{name}");
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
        assert_eq!(world.ended(name).await, DownReason::OtherSide);
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
        assert!(matches!(why, DownReason::OtherSide | DownReason::DeclaredFailed), "{why}");
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
