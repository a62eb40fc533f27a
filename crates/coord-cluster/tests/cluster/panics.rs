//! Panics in the tasks of a node: in the service's code, and in a backend.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use coord_cluster::downing::DownReason;
use coord_cluster::{Cluster, EventKind, Role, Settings, Status, Table};
use coord_conformance::faults::{FaultControl, Faulty};
use coord_core::{MemoryBackend, NodeStatus, ShardCount, TokioClock};
use coord_placement::{
    Assignment, Balanced, Candidate, PlacementStrategy, Plan, PlanError, PlanSettings,
};

use crate::common::{LIMIT, id, info, kinds, shares, store, table, until};

async fn start(
    store: &MemoryBackend,
    name: &str,
    strategy: Arc<dyn PlacementStrategy>,
) -> (Cluster, FaultControl) {
    let faulty = Faulty::new(Arc::new(store.reopen()));
    let shards = ShardCount::new(12).expect("a count");
    let node = Cluster::builder(&faulty, info(name))
        .settings(Settings::fast())
        .table(Table::new(table()).shards(shards).strategy(strategy))
        .clock(Arc::new(TokioClock::new()))
        .start()
        .await
        .expect("it starts");
    (node, faulty.control().clone())
}

/// Two nodes, the first of which leads.
async fn two(store: &MemoryBackend) -> [(Cluster, FaultControl); 2] {
    let one = start(store, "a", Arc::new(Balanced::default())).await;
    until(&one.0, |status| shares(status) == [12]).await;
    let other = start(store, "b", Arc::new(Balanced::default())).await;
    until(&other.0, |status| shares(status) == [6, 6]).await;
    assert!(one.0.is_leader());
    [one, other]
}

async fn ends(node: &Cluster) -> Arc<Status> {
    let ended = tokio::time::timeout(LIMIT, node.shutdown()).await;
    // Whether it could deregister depends on what panicked.
    drop(ended.expect("shutdown returns"));
    let status = node.status();
    assert_eq!((status.registered, status.role), (None, Role::Follower));
    assert_eq!(status.leader, None);
    assert!(!node.is_leader() && node.fence().is_none());
    status
}

/// Panics as often as it is told to.
#[derive(Debug, Default)]
struct Panicking {
    left: AtomicU32,
    inner: Balanced,
}

impl PlacementStrategy for Panicking {
    fn name(&self) -> &'static str {
        "panicking"
    }

    fn plan(
        &self,
        current: &Assignment,
        candidates: &[Candidate],
        settings: &PlanSettings,
    ) -> Result<Plan, PlanError> {
        let left = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        assert!(left.is_err(), "it does not add up");
        self.inner.plan(current, candidates, settings)
    }
}

#[tokio::test(start_paused = true)]
async fn a_strategy_that_panics_has_found_no_plan_and_is_asked_again() {
    let strategy = Arc::new(Panicking { left: AtomicU32::new(3), ..Panicking::default() });
    let (node, _) = start(&store(), "a", strategy).await;
    let mut events = node.events();
    let started = tokio::time::Instant::now();
    until(&node, |status| shares(status) == [12]).await;
    assert!(started.elapsed() >= Duration::from_secs(1 + 2 + 4), "after a pause that doubles");
    let failed = |kind: &EventKind| match kind {
        EventKind::RebalancingFailed { why, .. } => why.contains("it does not add up"),
        _ => false,
    };
    assert!(kinds(&mut events).iter().any(failed));
    assert!(node.is_leader(), "in the same term");
    node.shutdown().await.expect("it ends in order");
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_the_leader_ends_its_term_and_not_the_node() {
    let store = store();
    let [(one, faults), (other, _)] = two(&store).await;
    faults.panic_in("publish");
    // It makes the leader write.
    let (third, _) = start(&store, "c", Arc::new(Balanced::default())).await;
    until(&third, |status| shares(status) == [4, 4, 4]).await;
    assert!(other.is_leader() || third.is_leader(), "the others need not wait for a TTL");
    until(&one, |status| status.role == Role::Candidate).await;
    assert!(one.status().registered.is_some());
    one.shutdown().await.expect("it ends in order");
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_the_heartbeat_ends_the_node_and_its_leadership() {
    let store = store();
    let [(one, faults), (other, _)] = two(&store).await;
    let mut events = one.events();
    faults.panic_in("heartbeat");
    until(&other, |status| {
        let failed = status.member(&id("a")).is_none_or(|a| a.status == NodeStatus::Failed);
        failed && status.is_settled() && status.leader.as_ref().is_some_and(|l| l.node == id("b"))
    })
    .await;
    assert_eq!(ends(&one).await.went_down, Some(DownReason::TaskPanicked));
    let told = kinds(&mut events);
    assert!(told.contains(&EventKind::WentDown { why: DownReason::TaskPanicked }), "{told:?}");
}

#[tokio::test(start_paused = true)]
async fn the_status_of_a_node_that_left_is_true() {
    let store = store();
    let [(one, _), (other, _)] = two(&store).await;
    let mut events = one.events();
    one.leave().await.expect("it leaves");
    ends(&one).await;
    let told = kinds(&mut events);
    assert!(matches!(told.last(), Some(EventKind::Ended { .. })), "{told:?}");
    until(&other, |status| shares(status) == [12]).await;
    let mut events = other.events();
    other.leave().await.expect("the last one leaves too");
    ends(&other).await;
    let reasons: Vec<String> = kinds(&mut events).iter().map(ToString::to_string).collect();
    assert!(!reasons.iter().any(|reason| reason.contains("failed")), "{reasons:?}");
}
