//! Who hosts what at which moment, as the hosts themselves have noted it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use coord_cluster::{
    Cluster, Command, CommandError, EventKind, Handoff, Host, HostError, Reply, Settings,
    ShardFence, ShardToken, Status, Table,
};
use coord_conformance::faults::{FaultControl, Faulty};
use coord_core::{
    Backend, Effect, ErrorKind, MemoryBackend, NodeStatus, Replace, ShardCount, ShardId, ShardMap,
    TokioClock,
};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::common::{id, info, kinds, map, store, table, until};

const SHARDS: u32 = 64;
const MILLISECOND: Duration = Duration::from_millis(1);

/// One shard in one process, from before its start to after its stop.
#[derive(Clone, Debug)]
struct Stay {
    node: String,
    shard: ShardId,
    from: Instant,
    until: Option<Instant>,
    token: ShardToken,
}

/// What all hosts of a test have noted.
#[derive(Debug, Default)]
struct Ledger {
    stays: Mutex<Vec<Stay>>,
    tasks: TaskTracker,
}

impl Ledger {
    fn begin(self: &Arc<Self>, node: &str, shard: ShardId, fence: &ShardFence) {
        let token = fence.token().expect("current when it is handed out");
        let (node, from) = (node.to_owned(), Instant::now());
        let mut stays = self.stays.lock().expect("not poisoned");
        let at = stays.len();
        stays.push(Stay { node, shard, from, until: None, token });
        drop(stays);
        let (ledger, fence) = (Arc::clone(self), fence.clone());
        self.tasks.spawn(async move {
            fence.ended().await;
            assert_eq!(fence.token(), None);
            let mut stays = ledger.stays.lock().expect("not poisoned");
            stays[at].until.get_or_insert_with(Instant::now);
        });
    }

    fn end(&self, node: &str, shard: ShardId) {
        let mut stays = self.stays.lock().expect("not poisoned");
        let stay = stays.iter_mut().rev().find(|stay| stay.node == node && stay.shard == shard);
        stay.expect("it began").until.get_or_insert_with(Instant::now);
    }

    /// The stays of each shard, in order.
    fn by_shard(&self) -> BTreeMap<ShardId, Vec<Stay>> {
        let mut all: BTreeMap<ShardId, Vec<Stay>> = BTreeMap::new();
        for stay in self.stays.lock().expect("not poisoned").iter() {
            all.entry(stay.shard).or_default().push(stay.clone());
        }
        for stays in all.values_mut() {
            stays.sort_by_key(|stay| stay.from);
        }
        all
    }

    /// I6: of each shard, one stay is over before the next begins, and its token is newer.
    #[track_caller]
    fn check_alone(&self) {
        for stays in self.by_shard().values() {
            for pair in stays.windows(2) {
                let over = pair[0].until.is_some_and(|until| until <= pair[1].from);
                assert!(over, "two hosts: {pair:?}");
                assert!(pair[1].token.passes(&pair[0].token), "an older token: {pair:?}");
                let another = pair[0].node != pair[1].node;
                assert!(!another || !pair[0].token.passes(&pair[1].token), "as new: {pair:?}");
            }
        }
    }

    /// Which shards each node hosts now.
    fn now(&self) -> BTreeMap<String, BTreeSet<ShardId>> {
        let mut all: BTreeMap<String, BTreeSet<ShardId>> = BTreeMap::new();
        for stay in self.stays.lock().expect("not poisoned").iter() {
            if stay.until.is_none() {
                all.entry(stay.node.clone()).or_default().insert(stay.shard);
            }
        }
        all
    }
}

/// Notes what it hosts; takes a while to stop it.
#[derive(Debug)]
struct Noting {
    node: String,
    ledger: Arc<Ledger>,
    stops_in: Duration,
    /// Nothing stops while this is false.
    stops: watch::Receiver<bool>,
}

#[async_trait]
impl Host for Noting {
    async fn start(&self, shard: ShardId, fence: ShardFence) -> Result<(), HostError> {
        self.ledger.begin(&self.node, shard, &fence);
        Ok(())
    }

    async fn stop(&self, shard: ShardId) {
        tokio::time::sleep(self.stops_in).await;
        let mut stops = self.stops.clone();
        stops.wait_for(|stops| *stops).await.expect("the test goes on");
        self.ledger.end(&self.node, shard);
    }
}

/// A cluster under test.
struct Scene {
    store: MemoryBackend,
    ledger: Arc<Ledger>,
    settings: Settings,
    handoff: Handoff,
    stops_in: Duration,
    stops: watch::Sender<bool>,
}

impl Scene {
    fn new(handoff: Handoff, stops_in: Duration) -> Self {
        Self {
            store: store(),
            ledger: Arc::default(),
            settings: Settings::fast(),
            handoff,
            stops_in,
            stops: watch::Sender::new(true),
        }
    }

    async fn start(&self, name: &str) -> (Cluster, FaultControl) {
        self.start_as(name, name, Replace::No).await
    }

    /// Starts a process of a name, known to the ledger under another.
    async fn start_as(&self, name: &str, noted: &str, replace: Replace) -> (Cluster, FaultControl) {
        let faulty = Faulty::new(Arc::new(self.store.reopen()));
        let host = Noting {
            node: noted.to_owned(),
            ledger: Arc::clone(&self.ledger),
            stops_in: self.stops_in,
            stops: self.stops.subscribe(),
        };
        let shards = ShardCount::new(SHARDS).expect("count");
        let node = Cluster::builder(&faulty, info(name))
            .settings(self.settings.clone())
            .table(Table::new(table()).shards(shards).handoff(self.handoff).host(Arc::new(host)))
            .clock(Arc::new(TokioClock::new()))
            .replace(replace)
            .start()
            .await
            .expect("starts");
        (node, faulty.control().clone())
    }

    async fn four(&self) -> Vec<(Cluster, FaultControl)> {
        let mut nodes = Vec::new();
        for name in ["n1", "n2", "n3", "n4"] {
            nodes.push(self.start(name).await);
        }
        for (node, _) in &nodes {
            self.settled(node, 4).await;
        }
        nodes
    }

    /// All is settled, and every shard runs where the map says.
    async fn settled(&self, node: &Cluster, active: usize) {
        until(node, |status| is_settled(status, active)).await;
        self.hosted(node).await;
    }

    /// Every shard runs where the map says.
    async fn hosted(&self, node: &Cluster) {
        let limit = Instant::now() + Duration::from_secs(120);
        loop {
            let map = map(node);
            let hosts = self.ledger.now();
            let runs = |shard: ShardId| {
                let owner = map.owner(shard).map(|owner| owner.id.to_string());
                let host = |(name, shards): (&String, &BTreeSet<ShardId>)| {
                    shards.contains(&shard) && name.split('+').next() == owner.as_deref()
                };
                owner.is_some() && hosts.iter().any(host)
            };
            if map.header().shards.shards().all(runs) {
                return;
            }
            assert!(Instant::now() < limit, "{hosts:?}");
            tokio::time::sleep(10 * MILLISECOND).await;
        }
    }
}

fn is_settled(status: &Status, active: usize) -> bool {
    let least = SHARDS / u32::try_from(active).expect("few");
    status.is_settled()
        && status.count(NodeStatus::Active) == active
        && status
            .members
            .iter()
            .filter(|member| member.status == NodeStatus::Active)
            .all(|member| (least..=least + 1).contains(&member.shards))
}

fn leads(nodes: &[(Cluster, FaultControl)]) -> usize {
    nodes.iter().position(|(node, _)| node.is_leader()).expect("one leads")
}

#[tokio::test(start_paused = true)]
async fn a_rolling_restart_leaves_no_shard_with_two_hosts_or_without_an_owner() {
    let scene = Scene::new(Handoff::Exclusive, 50 * MILLISECOND);
    let mut nodes = scene.four().await;
    let mut events = nodes[0].0.events();
    for round in 0..4 {
        let (leaving, _) = nodes.remove(0);
        leaving.leave().await.expect("leaves in order");
        assert_eq!(scene.ledger.now().get(leaving.node().as_str()), None, "round {round}");
        scene.settled(&nodes[0].0, 3).await;
        let back = scene.start(leaving.node().as_str()).await;
        scene.settled(&back.0, 4).await;
        nodes.push(back);
    }
    scene.ledger.check_alone();
    let kinds = kinds(&mut events);
    let bad = |kind: &EventKind| {
        matches!(kind, EventKind::NodeFailed { .. } | EventKind::ShardsOrphaned { .. })
    };
    assert!(!kinds.iter().any(bad), "{kinds:?}");
}

#[tokio::test(start_paused = true)]
async fn a_new_leader_goes_on_with_the_moves_it_finds() {
    let scene = Scene::new(Handoff::Exclusive, Duration::from_secs(5));
    let mut nodes = scene.four().await;
    let fifth = scene.start("n5").await;
    until(&fifth.0, |status| status.tables.iter().any(|table| table.moving > 0)).await;
    let (dead, _) = nodes.remove(leads(&nodes));
    dead.abandon();
    scene.settled(&fifth.0, 4).await;
    scene.ledger.check_alone();
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_cut_off_stops_before_others_start() {
    let scene = Scene::new(Handoff::Exclusive, 50 * MILLISECOND);
    let nodes = scene.four().await;
    for victim in [leads(&nodes), (leads(&nodes) + 1) % 4] {
        let (node, control) = &nodes[victim];
        let (other, _) = &nodes[(victim + 2) % 4];
        let name = node.node().to_string();
        assert_eq!(scene.ledger.now()[&name].len(), 16);
        control.cut(Effect::Unknown);
        scene.settled(other, 3).await;
        assert_eq!(scene.ledger.now().get(&name), None);
        scene.ledger.check_alone();
        control.heal();
        // Another one's view first: its own may show for a moment how things stood before.
        scene.settled(other, 4).await;
        scene.settled(node, 4).await;
        scene.ledger.check_alone();
    }
}

#[tokio::test(start_paused = true)]
async fn a_host_that_does_not_stop_is_aborted_at_its_deadline() {
    let scene = Scene::new(Handoff::Exclusive, Duration::ZERO);
    let nodes = scene.four().await;
    let victim = (leads(&nodes) + 1) % 4;
    let (node, control) = &nodes[victim];
    scene.stops.send_replace(false);
    let cut = Instant::now();
    control.cut(Effect::Unknown);
    let name = node.node().to_string();
    scene.settled(&nodes[leads(&nodes)].0, 3).await;
    scene.ledger.check_alone();
    let stays = scene.ledger.by_shard();
    let ends = stays.values().flatten().filter(|stay| stay.node == name);
    let latest = ends.filter_map(|stay| stay.until).max().expect("it hosted");
    let ttl = scene.settings.node_ttl;
    assert!(latest <= cut + ttl - ttl / 10, "{:?}", latest - cut);
    scene.stops.send_replace(true);
    control.heal();
    scene.settled(node, 4).await;
    scene.ledger.check_alone();
}

#[tokio::test(start_paused = true)]
async fn the_successor_of_a_process_that_is_cut_off_waits_for_its_ttl() {
    let scene = Scene::new(Handoff::Exclusive, 50 * MILLISECOND);
    let nodes = scene.four().await;
    let victim = (leads(&nodes) + 1) % 4;
    let (node, control) = &nodes[victim];
    let name = node.node().to_string();
    control.cut(Effect::Unknown);
    let noted = format!("{name}+2");
    let (successor, _) = scene.start_as(&name, &noted, Replace::Yes).await;
    let replaced = Instant::now();
    until(&successor, |_| scene.ledger.now().contains_key(&noted)).await;
    scene.settled(&successor, 4).await;
    scene.ledger.check_alone();
    let stays = scene.ledger.by_shard();
    let starts = stays.values().flatten().filter(|stay| stay.node == noted);
    let first = starts.map(|stay| stay.from).min().expect("it hosts");
    assert!(first >= replaced + scene.settings.node_ttl, "{:?}", first - replaced);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_told_that_it_failed_stops_and_comes_back_without_waiting() {
    let scene = Scene::new(Handoff::Exclusive, 50 * MILLISECOND);
    let nodes = scene.four().await;
    let victim = (leads(&nodes) + 1) % 4;
    let (node, _) = &nodes[victim];
    let run = node.status().registered.expect("registered");
    let mut events = node.events();
    let why = "test".to_owned();
    let command = Command::MarkNodeFailed { node: node.node().clone(), why };
    assert!(nodes[0].0.request(command).await.expect("asked").is_done());
    let told = Instant::now();
    until(node, |status| {
        let member = status.member(node.node());
        member.is_some_and(|member| member.incarnation != run && member.shards > 0)
    })
    .await;
    scene.settled(node, 4).await;
    // It vouches for the run that it was, so nobody waits for a TTL.
    let heartbeat = scene.settings.heartbeat * 11 / 10;
    assert!(told.elapsed() < heartbeat + Duration::from_secs(2), "{:?}", told.elapsed());
    scene.ledger.check_alone();
    let lost = |kind: &EventKind| matches!(kind, EventKind::RegistrationLost { .. });
    assert!(kinds(&mut events).iter().any(lost));
}

#[tokio::test(start_paused = true)]
async fn make_before_break_leaves_no_gap() {
    let scene = Scene::new(Handoff::MakeBeforeBreak, 50 * MILLISECOND);
    let nodes = scene.four().await;
    let fifth = scene.start("n5").await;
    scene.settled(&fifth.0, 5).await;
    let (leaving, _) = &nodes[(leads(&nodes) + 1) % 4];
    leaving.leave().await.expect("leaves in order");
    scene.settled(&fifth.0, 4).await;
    let mut moved = 0;
    for stays in scene.ledger.by_shard().values() {
        for pair in stays.windows(2) {
            moved += 1;
            let gap = pair[0].until.is_some_and(|until| until < pair[1].from);
            assert!(!gap, "nobody hosts it for a while: {pair:?}");
        }
        let running = stays.iter().filter(|stay| stay.until.is_none()).count();
        assert_eq!(running, 1, "{stays:?}");
    }
    assert!(moved >= 12 + 12, "{moved}");
}

#[tokio::test(start_paused = true)]
async fn a_stuck_handoff_is_reported_and_not_forced() {
    let scene = Scene::new(Handoff::Exclusive, Duration::ZERO);
    let nodes = scene.four().await;
    let mut events = nodes[0].0.events();
    scene.stops.send_replace(false);
    let fifth = scene.start("n5").await;
    let status = until(&fifth.0, |status| !status.stuck.is_empty()).await;
    let stuck = status.stuck[&table()].clone();
    // One in ten of 64 shards.
    assert_eq!(stuck.len(), 6);
    tokio::time::sleep(5 * scene.settings.handoff_timeout).await;
    assert_eq!(scene.ledger.now().get("n5"), None, "nothing is forced");
    let told = |kind: &EventKind| matches!(kind, EventKind::HandoffStuck { shards, .. } if **shards == *stuck);
    assert_eq!(kinds(&mut events).iter().filter(|kind| told(kind)).count(), 1);
    scene.stops.send_replace(true);
    scene.settled(&fifth.0, 5).await;
    assert!(fifth.0.status().stuck.is_empty());
    scene.ledger.check_alone();
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_for_longer_than_the_ttl_stops_everything_and_fails_nobody() {
    let scene = Scene::new(Handoff::Exclusive, 50 * MILLISECOND);
    let nodes = scene.four().await;
    let mut events = nodes[0].0.events();
    for (_, control) in &nodes {
        control.cut(Effect::Unknown);
    }
    tokio::time::sleep(2 * scene.settings.node_ttl).await;
    assert_eq!(scene.ledger.now(), BTreeMap::new(), "each stopped at its own deadline");
    for (_, control) in &nodes {
        control.heal();
    }
    for (node, _) in &nodes {
        scene.settled(node, 4).await;
    }
    scene.ledger.check_alone();
    let kinds = kinds(&mut events);
    let bad = |kind: &EventKind| {
        matches!(kind, EventKind::NodeFailed { .. } | EventKind::ShardsMigrated { .. })
    };
    assert!(!kinds.iter().any(bad), "{kinds:?}");
}

#[tokio::test(start_paused = true)]
async fn the_last_node_that_leaves_has_stopped_before_the_next_one_starts() {
    let scene = Scene::new(Handoff::Exclusive, Duration::from_secs(1));
    let (one, _) = scene.start("n1").await;
    scene.settled(&one, 1).await;
    let (two, _) = tokio::join!(
        async {
            tokio::time::sleep(300 * MILLISECOND).await;
            scene.start("n2").await.0
        },
        async { one.leave().await.expect("leaves in order") },
    );
    scene.settled(&two, 1).await;
    scene.ledger.check_alone();
    assert_eq!(scene.ledger.now().keys().collect::<Vec<_>>(), ["n2"]);
}

#[tokio::test(start_paused = true)]
async fn a_drained_node_hosts_nothing_and_takes_its_share_again() {
    let scene = Scene::new(Handoff::Exclusive, 50 * MILLISECOND);
    let nodes = scene.four().await;
    let drain = Command::Drain { node: id("n2") };
    assert!(nodes[0].0.request(drain).await.expect("asked").is_done());
    until(&nodes[0].0, |status| {
        status.is_settled() && status.member(&id("n2")).is_some_and(|member| member.shards == 0)
    })
    .await;
    scene.hosted(&nodes[0].0).await;
    assert_eq!(scene.ledger.now().get("n2"), None);
    let undrain = Command::Undrain { node: id("n2") };
    assert!(nodes[0].0.request(undrain).await.expect("asked").is_done());
    scene.settled(&nodes[0].0, 4).await;
    scene.ledger.check_alone();
}

#[tokio::test(start_paused = true)]
async fn no_more_shards_are_in_motion_than_allowed() {
    let mut scene = Scene::new(Handoff::Exclusive, 200 * MILLISECOND);
    scene.settings.motions_max = Some(3);
    let nodes = scene.four().await;
    let mut events = nodes[0].0.events();
    let fifth = scene.start("n5").await;
    let mut most = 0;
    let watching = until(&fifth.0, |status| {
        most = most.max(status.tables.iter().map(|table| table.moving).max().unwrap_or_default());
        is_settled(status, 5)
    });
    watching.await;
    assert_eq!(most, 3);
    let kinds = kinds(&mut events);
    let triggered = |kind: &&EventKind| matches!(kind, EventKind::RebalancingTriggered { .. });
    assert_eq!(kinds.iter().filter(triggered).count(), 1, "one rebalance in many versions");
    assert!(kinds.contains(&EventKind::RebalancingCompleted { table: table(), moved: 12 }));
    scene.ledger.check_alone();
}

#[tokio::test(start_paused = true)]
async fn a_node_whose_shards_are_stuck_leaves_by_force_only() {
    let scene = Scene::new(Handoff::Exclusive, Duration::ZERO);
    let nodes = scene.four().await;
    let leads = leads(&nodes);
    let (leaving, _) = &nodes[(leads + 1) % 4];
    let (other, _) = &nodes[leads];
    let name = leaving.node().clone();
    let hosted = |name: &str| scene.ledger.now().get(name).map_or(0, BTreeSet::len);
    scene.stops.send_replace(false);

    let asked = Instant::now();
    let error = leaving.leave().await.expect_err("its shards are stuck");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(asked.elapsed(), scene.settings.handoff_timeout);
    until(other, |status| !status.stuck.is_empty()).await;
    let leave = |force| Command::Leave { node: name.clone(), force };
    let refused = other.request(leave(false)).await.expect("asked");
    let Reply::Refused(CommandError::StuckLeaving { node, shards }) = refused else {
        panic!("it is stuck: {refused:?}")
    };
    // One in ten of 64 shards is in motion at once, and all of those are stuck.
    assert_eq!((node, shards), (name.clone(), 6));
    let error = leaving.leave().await.expect_err("it is refused at once");
    assert!(error.to_string().contains("6 shards"), "{error}");
    tokio::time::sleep(5 * scene.settings.handoff_timeout).await;
    assert_eq!(hosted(name.as_str()), 16, "it stays, and so do its shards");

    // It has had its time: by force it goes at once, within what its shards may take to stop.
    assert!(other.request(leave(true)).await.expect("asked").is_done());
    let asked = Instant::now();
    let ended = leaving.wait_for(|_| false).await.expect_err("it ends");
    assert_eq!((ended.kind(), hosted(name.as_str())), (ErrorKind::Closed, 16));
    assert!(asked.elapsed() < Duration::from_secs(1), "{:?}", asked.elapsed());
    scene.stops.send_replace(true);
    scene.settled(other, 3).await;
    assert_eq!(hosted(name.as_str()), 0);
    scene.ledger.check_alone();
}

#[tokio::test(start_paused = true)]
async fn one_that_is_told_to_leave_by_force_has_the_handoff_timeout_first() {
    let scene = Scene::new(Handoff::Exclusive, Duration::ZERO);
    let nodes = scene.four().await;
    let leads = leads(&nodes);
    let (leaving, _) = &nodes[(leads + 1) % 4];
    let (other, _) = &nodes[leads];
    scene.stops.send_replace(false);
    let asked = Instant::now();
    let (left, ()) = tokio::join!(leaving.leave_now(), async {
        tokio::time::sleep(scene.settings.handoff_timeout - MILLISECOND).await;
        assert_eq!(scene.ledger.now().get(leaving.node().as_str()).map(BTreeSet::len), Some(16));
    });
    assert_eq!(left.expect("ends"), 16);
    assert!(asked.elapsed() < scene.settings.handoff_timeout + scene.settings.node_ttl);
    scene.stops.send_replace(true);
    scene.settled(other, 3).await;
    scene.ledger.check_alone();

    // Where they do move, force changes nothing.
    let (leaving, _) = &nodes[(leads + 2) % 4];
    let mut events = other.events();
    assert_eq!(leaving.leave_now().await.expect("leaves"), 0);
    scene.settled(other, 2).await;
    let orphaned = |kind: &EventKind| matches!(kind, EventKind::ShardsOrphaned { .. });
    assert!(!kinds(&mut events).iter().any(orphaned));
}

/// How a leader comes to know that a table was deleted.
#[derive(Debug)]
enum Finds {
    /// It looks at everything now and then.
    ByACheck,
    /// It writes.
    ByAWrite,
    /// It is another one than before.
    AnotherLeader,
}

#[tokio::test(start_paused = true)]
async fn a_table_that_is_deleted_while_it_is_hosted_begins_anew_once_all_have_stopped() {
    for finds in [Finds::ByACheck, Finds::ByAWrite, Finds::AnotherLeader] {
        let mut scene = Scene::new(Handoff::Exclusive, 500 * MILLISECOND);
        if matches!(finds, Finds::ByACheck) {
            scene.settings.rebalance_check = Duration::from_secs(2);
        }
        let nodes = scene.four().await;
        let leads = leads(&nodes);
        let term = nodes[leads].0.fence().expect("leads").term;
        let (deaf, control) = &nodes[(leads + 1) % 4];
        let (other, _) = &nodes[(leads + 2) % 4];
        // Two shards change places, so that a map from scratch gives one to another than has it.
        let first = map(other);
        let of = |node: &Cluster| {
            let mut shards = first.header().shards.shards();
            let owns = |shard: &ShardId| first.owner(*shard).is_some_and(|o| o.id == *node.node());
            shards.find(owns).expect("it owns some")
        };
        let owners =
            [(of(deaf), vec![other.node().clone()]), (of(other), vec![deaf.node().clone()])];
        let command = Command::AssignShards { table: table(), owners: owners.into() };
        assert!(nodes[leads].0.command(command).await.expect("asked").is_done());
        let swapped = |map: &ShardMap| map.owner(of(other)).is_some_and(|o| o.id == *deaf.node());
        until(other, |status| {
            is_settled(status, 4) && status.table(&table()).is_some_and(|t| swapped(&t.map))
        })
        .await;
        scene.hosted(other).await;
        // One of them hears of nothing, and hosts until its own deadline.
        control.cut(Effect::Unknown);
        assert!(scene.store.delete_table(&table()));
        let reply = match finds {
            Finds::ByACheck => None,
            Finds::ByAWrite => {
                Some(Command::Drain { node: nodes[(leads + 3) % 4].0.node().clone() })
            }
            Finds::AnotherLeader => Some(Command::StepDown),
        };
        if let Some(command) = reply {
            assert!(nodes[leads].0.command(command).await.expect("asked").is_done());
        }
        let reborn = |status: &Status| {
            let lives = status.table(&table()).is_some_and(|table| table.map.uid() != first.uid());
            lives && status.leader.as_ref().is_some_and(|leader| leader.term > term)
        };
        let began = Instant::now();
        until(other, |status| reborn(status)).await;
        assert!(began.elapsed() < Duration::from_secs(5), "{finds:?} while the deaf one hosts");
        if matches!(finds, Finds::ByAWrite) {
            let undrain = Command::Undrain { node: nodes[(leads + 3) % 4].0.node().clone() };
            assert!(other.request(undrain).await.expect("asked").is_done());
        }
        until(other, |status| reborn(status) && is_settled(status, 3)).await;
        scene.hosted(other).await;
        control.heal();
        scene.settled(deaf, 4).await;
        scene.ledger.check_alone();
        let now = map(other);
        for (shard, stays) in scene.ledger.by_shard() {
            let uids: Vec<_> = stays.iter().map(|stay| stay.token.uid).collect();
            assert!(uids.is_sorted_by_key(|uid| *uid == now.uid()), "{finds:?} {shard}: {uids:?}");
            assert_eq!(stays.iter().filter(|stay| stay.until.is_none()).count(), 1);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_process_that_replaced_another_and_ends_at_once_does_not_speak_for_it() {
    let scene = Scene::new(Handoff::Exclusive, 50 * MILLISECOND);
    let (first, _) = scene.start("n1").await;
    until(&first, |status| is_settled(status, 1)).await;
    let (replaced, control) = scene.start("n2").await;
    scene.settled(&first, 2).await;
    scene.settled(&replaced, 2).await;
    // It does not hear that it is replaced, and hosts until its own deadline.
    control.cut(Effect::Unknown);
    let (other, _) = scene.start_as("n2", "n2+", Replace::Yes).await;
    other.shutdown().await.expect("ends");
    // A deregistration says that no incarnation of the node hosts anything.
    let nodes = scene.store.discovery().nodes().await.expect("answers");
    assert!(nodes.iter().any(|node| node.info.id == id("n2")), "it is left to its TTL");
    until(&first, |status| status.members.iter().any(|member| member.shards == SHARDS)).await;
    scene.hosted(&first).await;
    scene.ledger.check_alone();
}
