//! What waits for how long: the first assignment, a restart, a failed node, a failed rebalance.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use coord_cluster::{
    Balance, Cluster, ClusterState, Command, CommandError, EventKind, Reply, Settings, Table,
};
use coord_core::{Clock, MemoryBackend, Moment, NodeStatus, TokioClock, Version};
use coord_placement::{
    Assignment, Balanced, Candidate, PlacementStrategy, Plan, PlanError, PlanSettings,
};
use tokio::time::Instant;

use crate::common::{id, info, kinds, leader, map, moves, node_with, shares, store, table, until};

const SECOND: Duration = Duration::from_secs(1);

async fn three_with(store: &MemoryBackend, settings: &Settings) -> Vec<Cluster> {
    let mut nodes = Vec::new();
    for name in ["n1", "n2", "n3"] {
        nodes.push(node_with(store, name, settings.clone()).await);
    }
    for node in &nodes {
        until(node, |status| shares(status) == [341, 341, 342]).await;
    }
    nodes
}

#[tokio::test(start_paused = true)]
async fn the_first_assignment_waits_for_min_members_and_a_later_loss_does_not() {
    let store = store();
    let mut settings = Settings::fast();
    settings.min_members = 3;
    let one = node_with(&store, "n1", settings.clone()).await;
    let two = node_with(&store, "n2", settings.clone()).await;
    until(&one, |status| status.count(NodeStatus::Active) == 2).await;
    tokio::time::sleep(2 * settings.rebalance_check).await;
    let first = map(&one);
    assert_eq!((first.version(), first.orphans()), (Version::ZERO, 1024));
    let three = node_with(&store, "n3", settings).await;
    until(&three, |status| shares(status) == [341, 341, 342]).await;
    assert_eq!(map(&three).version(), Version::new(1), "one publish places all");
    let (stays, goes) = if one.is_leader() { (&one, &two) } else { (&two, &one) };
    goes.abandon();
    until(stays, |status| shares(status) == [512, 512]).await;
}

#[tokio::test(start_paused = true)]
async fn a_node_back_within_its_restart_grace_keeps_its_shards() {
    let store = store();
    let mut settings = Settings::fast();
    settings.restart_grace = Duration::from_secs(30);
    let nodes = three_with(&store, &settings).await;
    let leads = leader(&nodes);
    let (watching, down) = (&nodes[leads], &nodes[(leads + 1) % 3]);
    let mut events = watching.events();
    let before = map(watching);
    down.abandon();
    tokio::time::sleep(settings.node_ttl + settings.restart_grace - 2 * SECOND).await;
    assert!(map(watching).raw_owners() == before.raw_owners());
    let back = node_with(&store, down.node().as_str(), settings.clone()).await;
    let run = until(&back, |status| status.registered.is_some()).await.registered;
    until(watching, |status| {
        let member = status.member(down.node());
        member.map(|member| member.incarnation) == run && shares(status) == [341, 341, 342]
    })
    .await;
    assert!(map(watching).raw_owners() == before.raw_owners(), "nothing moved");
    let heard = kinds(&mut events);
    let bad = |kind: &EventKind| {
        matches!(kind, EventKind::NodeFailed { .. } | EventKind::ShardsMigrated { .. })
    };
    assert!(!heard.iter().any(bad), "{heard:?}");

    back.abandon();
    let start = Instant::now();
    until(watching, |status| shares(status) == [512, 512]).await;
    let verdict = settings.node_ttl + settings.restart_grace;
    assert!(start.elapsed() > verdict - settings.heartbeat - SECOND, "{:?}", start.elapsed());
    assert!(start.elapsed() <= verdict + SECOND, "{:?}", start.elapsed());
}

/// A clock that goes on while its process stands still.
#[derive(Debug)]
struct Jumping {
    inner: TokioClock,
    ahead: Mutex<Duration>,
}

impl Clock for Jumping {
    fn now(&self) -> Moment {
        self.inner.now().plus(*self.ahead.lock().expect("not poisoned"))
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_was_stalled_judges_everybody_so_much_later() {
    let store = store();
    let mut settings = Settings::fast();
    settings.restart_grace = 6 * SECOND;
    let clock = Arc::new(Jumping { inner: TokioClock::new(), ahead: Mutex::default() });
    let watching = Cluster::builder(&store.reopen(), info("n1"))
        .settings(settings.clone())
        .table(Table::new(table()))
        .clock(Arc::<Jumping>::clone(&clock))
        .start()
        .await
        .expect("starts");
    until(&watching, |status| shares(status) == [1024]).await;
    let down = node_with(&store, "n2", settings.clone()).await;
    until(&watching, |status| shares(status) == [512, 512]).await;
    let fence = watching.fence().expect("leads");
    let mut events = watching.events();
    let before = map(&watching);
    down.abandon();
    // It runs out, and the grace begins.
    tokio::time::sleep(settings.node_ttl + SECOND).await;
    // The leader stands still for less than its lease lasts. Everybody else's time goes on too, but a
    // grace that was to be looked at in between is not over unseen.
    *clock.ahead.lock().expect("not poisoned") += 5 * SECOND;
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    let back = node_with(&store, "n2", settings).await;
    let run = until(&back, |status| status.registered.is_some()).await.registered;
    until(&watching, |status| {
        let member = status.member(down.node());
        member.map(|member| member.incarnation) == run && shares(status) == [512, 512]
    })
    .await;
    assert_eq!(watching.fence(), Some(fence), "it leads all the time");
    let heard = kinds(&mut events);
    let failed = |kind: &EventKind| matches!(kind, EventKind::NodeFailed { .. });
    assert!(!heard.iter().any(failed), "{heard:?}");
    assert!(map(&watching).raw_owners() == before.raw_owners(), "nothing moved: {heard:?}");
}

#[tokio::test(start_paused = true)]
async fn a_failed_node_is_listed_until_remove_after() {
    let store = store();
    let mut settings = Settings::fast();
    settings.remove_after = Duration::from_secs(20);
    let nodes = three_with(&store, &settings).await;
    let leads = leader(&nodes);
    let (watching, dead) = (&nodes[leads], &nodes[(leads + 1) % 3]);
    let mut events = watching.events();
    dead.abandon();
    let is_failed = |member: &coord_cluster::Member| member.status == NodeStatus::Failed;
    until(watching, |status| status.member(dead.node()).is_some_and(is_failed)).await;
    let failed = Instant::now();
    until(watching, |status| shares(status) == [512, 512]).await;
    assert!(watching.status().member(dead.node()).is_some_and(is_failed));
    until(watching, |status| status.member(dead.node()).is_none()).await;
    let listed = failed.elapsed();
    assert!(listed >= settings.remove_after && listed <= settings.remove_after + SECOND);
    let left =
        |kind: &EventKind| matches!(kind, EventKind::NodeLeft { node, .. } if node == dead.node());
    assert_eq!(kinds(&mut events).iter().filter(|kind| left(kind)).count(), 1);
}

#[tokio::test(start_paused = true)]
async fn without_an_active_node_nothing_is_rebalanced_and_draining_ones_keep_their_shards() {
    let store = store();
    let nodes = three_with(&store, &Settings::fast()).await;
    let mut events = nodes[0].events();
    for name in ["n1", "n2"] {
        let drain = Command::Drain { node: id(name) };
        assert!(nodes[0].request(drain).await.expect("asked").is_done());
    }
    until(&nodes[0], |status| shares(status) == [1024]).await;
    let before = map(&nodes[0]);
    let drain = Command::Drain { node: id("n3") };
    assert!(nodes[0].request(drain).await.expect("asked").is_done());
    until(&nodes[0], |status| status.state == ClusterState::NoNodes).await;
    for table in [None, Some(table())] {
        let command = Command::RebalanceShards { table, reason: "test".to_owned() };
        let reply = nodes[1].request(command).await.expect("asked");
        assert_eq!(reply, Reply::Refused(CommandError::NoActiveNodes));
    }
    tokio::time::sleep(2 * Settings::fast().rebalance_check).await;
    assert!(map(&nodes[0]).raw_owners() == before.raw_owners());
    let none = |kind: &EventKind| *kind == EventKind::NoActiveNodes;
    assert_eq!(kinds(&mut events).iter().filter(|kind| none(kind)).count(), 1, "no storm");
    let undrain = Command::Undrain { node: id("n1") };
    assert!(nodes[0].request(undrain).await.expect("asked").is_done());
    until(&nodes[2], |status| shares(status) == [1024]).await;
    assert_eq!(nodes[2].status().member(&id("n1")).map(|member| member.shards), Some(1024));
}

/// Plans as [`Balanced`] does, unless it is told to fail; notes when it was asked.
#[derive(Debug, Default)]
struct Flaky {
    fails: AtomicBool,
    asked: Mutex<Vec<Instant>>,
}

impl Flaky {
    fn fail(&self, fails: bool) {
        self.fails.store(fails, Ordering::SeqCst);
        self.asked.lock().expect("not poisoned").clear();
    }

    /// The seconds between one failed plan and the next.
    fn pauses(&self) -> Vec<u64> {
        let asked = self.asked.lock().expect("not poisoned");
        asked.windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect()
    }
}

impl PlacementStrategy for Flaky {
    fn name(&self) -> &'static str {
        "flaky"
    }

    fn plan(
        &self,
        current: &Assignment,
        candidates: &[Candidate],
        settings: &PlanSettings,
    ) -> Result<Plan, PlanError> {
        self.asked.lock().expect("not poisoned").push(Instant::now());
        if self.fails.load(Ordering::SeqCst) {
            return Err(PlanError::AllDraining { nodes: candidates.len() });
        }
        Balanced::default().plan(current, candidates, settings)
    }
}

async fn flaky_node(store: &MemoryBackend, name: &str, strategy: &Arc<Flaky>) -> Cluster {
    let strategy: Arc<dyn PlacementStrategy> = Arc::<Flaky>::clone(strategy);
    Cluster::builder(&store.reopen(), info(name))
        .settings(Settings::fast())
        .table(Table::new(table()).strategy(strategy))
        .clock(Arc::new(TokioClock::new()))
        .start()
        .await
        .expect("starts")
}

#[tokio::test(start_paused = true)]
async fn a_rebalance_that_fails_is_tried_again_ever_later_while_a_shard_has_no_host() {
    let store = store();
    let strategy = Arc::new(Flaky::default());
    let mut nodes = Vec::new();
    for name in ["n1", "n2", "n3"] {
        nodes.push(flaky_node(&store, name, &strategy).await);
    }
    for node in &nodes {
        until(node, |status| shares(status) == [341, 341, 342]).await;
    }
    let leads = leader(&nodes);
    let (watching, dead) = (&nodes[leads], &nodes[(leads + 1) % 3]);
    let before = map(watching);
    let mut events = watching.events();
    strategy.fail(true);
    dead.abandon();
    let degraded = ClusterState::MultiNode(Balance::Degraded);
    until(watching, |status| status.state == degraded).await;
    tokio::time::sleep(Duration::from_secs(511 + 650)).await;
    assert_eq!(strategy.pauses(), [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
    assert_eq!(map(watching), before, "the old map stays in force");
    let heard = kinds(&mut events);
    let failed: Vec<_> = heard
        .iter()
        .filter_map(|kind| match kind {
            EventKind::RebalancingFailed { why, .. } => Some(why),
            _ => None,
        })
        .collect();
    assert_eq!(failed, [&PlanError::AllDraining { nodes: 2 }.to_string()], "told once");

    // A change of the topology is tried at once, and begins the back-off anew.
    strategy.fail(true);
    let fourth = flaky_node(&store, "n4", &strategy).await;
    until(&fourth, |status| status.members.len() == 4).await;
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert_eq!(strategy.pauses(), [1, 2, 4]);
    strategy.fail(false);
    until(&fourth, |status| shares(status) == [341, 341, 342]).await;
    let moved = moves(&before, &map(&fourth));
    assert!(moved.keys().any(|(from, _)| from == dead.node()), "{moved:?}");
    let completed = |kind: &EventKind| matches!(kind, EventKind::RebalancingCompleted { .. });
    assert!(kinds(&mut events).iter().any(completed));
}

#[tokio::test(start_paused = true)]
async fn a_rebalance_that_only_lacks_balance_is_tried_again_after_five_minutes() {
    let store = store();
    let strategy = Arc::new(Flaky::default());
    let one = flaky_node(&store, "n1", &strategy).await;
    until(&one, |status| shares(status) == [1024]).await;
    let before = map(&one);
    strategy.fail(true);
    let two = flaky_node(&store, "n2", &strategy).await;
    let degraded = ClusterState::MultiNode(Balance::Degraded);
    until(&two, |status| status.state == degraded).await;
    tokio::time::sleep(Duration::from_secs(650)).await;
    assert_eq!(strategy.pauses(), [300, 300]);
    assert_eq!(map(&one), before);
    let command = Command::RebalanceShards { table: None, reason: "test".to_owned() };
    let reply = two.request(command.clone()).await.expect("asked");
    let why = PlanError::AllDraining { nodes: 2 }.to_string();
    assert_eq!(reply, Reply::Refused(CommandError::Failed { why }));
    strategy.fail(false);
    assert!(two.request(command).await.expect("asked").is_done());
    until(&two, |status| shares(status) == [512, 512]).await;
}
