//! A coordinator that is gated by a further lease, on a store of its own.

use std::sync::Arc;
use std::time::Duration;

use coord_cluster::{
    Cluster, Command, CommandError, EventKind, Gating, Reply, Settings, Stores, Table,
};
use coord_conformance::faults::{FaultControl, Faulty};
use coord_core::session::LeaseGuard;
use coord_core::{
    Backend, Effect, ErrorKind, Incarnation, LeaseName, Leases, MemoryBackend, ShardId, TokioClock,
};
use tokio::time::{Instant, sleep};
use tokio_util::task::TaskTracker;

use crate::common::{id, info, kinds, leader, map, shares, store, table, until};

fn name() -> LeaseName {
    LeaseName::new("sharding").expect("name")
}

/// A node with its own way to the store of the gate.
async fn gated(
    store: &MemoryBackend,
    gates: &MemoryBackend,
    node: &str,
) -> (Cluster, FaultControl) {
    let way = Faulty::new(Arc::new(gates.reopen()));
    let cluster = start(&store.reopen(), &way, node, Settings::fast()).await;
    (cluster, way.control().clone())
}

async fn start(store: &dyn Backend, gates: &Faulty, node: &str, settings: Settings) -> Cluster {
    Cluster::builder(Stores::new(store), info(node))
        .settings(settings)
        .table(Table::new(table()))
        .require_lease(gates.lease(), name())
        .clock(Arc::new(TokioClock::new()))
        .start()
        .await
        .expect("starts")
}

/// Two nodes that share 1024 shards, and the index of the one that leads.
async fn two(
    store: &MemoryBackend,
    gates: &MemoryBackend,
) -> (Vec<Cluster>, Vec<FaultControl>, usize) {
    let (one, first) = gated(store, gates, "n1").await;
    let (two, second) = gated(store, gates, "n2").await;
    let nodes = vec![one, two];
    for node in &nodes {
        until(node, |status| shares(status) == [512, 512]).await;
    }
    let leads = leader(&nodes);
    (nodes, vec![first, second], leads)
}

/// Somebody else holds the gate, such as the leader of another cluster.
async fn foreign(gates: &MemoryBackend) -> LeaseGuard {
    Leases::new(gates.lease(), id("elsewhere"), Incarnation::random())
        .with_clock(Arc::new(TokioClock::new()))
        .named(name())
        .acquire()
        .await
        .expect("acquired")
}

fn changes(kinds: &[EventKind]) -> Vec<Gating> {
    let change = |kind: &EventKind| match kind {
        EventKind::GatingChanged { gating } => Some(*gating),
        _ => None,
    };
    kinds.iter().filter_map(change).collect()
}

#[tokio::test(start_paused = true)]
async fn a_coordinator_without_its_gate_places_nothing_until_it_is_back() {
    let (store, gates) = (store(), store());
    let elsewhere = foreign(&gates).await;
    let (one, _) = gated(&store, &gates, "n1").await;
    until(&one, |status| status.gating == Gating::Acquiring && status.members.len() == 1).await;
    let mut events = one.events();
    let (two, _) = gated(&store, &gates, "n2").await;
    let (three, _) = gated(&store, &gates, "n3").await;
    until(&one, |status| status.members.len() == 3).await;
    three.abandon();
    let failed = id("n3");
    until(&one, |status| status.members.iter().any(|m| m.id == failed && !m.status.may_host()))
        .await;
    sleep(Duration::from_secs(600)).await;
    // The members are known, and nothing was claimed, planned or written for them.
    assert!(one.is_leader() && two.status().gating == Gating::None);
    assert!(store.placement().load(&table()).await.expect("loads").is_none());

    let asked = Instant::now();
    elsewhere.release().await.expect("released");
    until(&two, |status| shares(status) == [512, 512]).await;
    // Woken by the watch, and the members have long been settled.
    assert!(asked.elapsed() < Duration::from_millis(200), "{:?}", asked.elapsed());
    assert_eq!(one.status().gating, Gating::Held);
    let heard = kinds(&mut events);
    assert_eq!(changes(&heard), [Gating::Held]);
}

#[tokio::test(start_paused = true)]
async fn one_that_loses_its_gate_keeps_the_homes_and_goes_on_once_it_is_back() {
    let (store, gates) = (store(), store());
    let (nodes, _, leads) = two(&store, &gates).await;
    let (one, other) = (&nodes[leads], &nodes[1 - leads]);
    let mut events = one.events();
    let before = map(one);
    // Somebody takes it by force.
    assert!(gates.delete_lease(&name()));
    let elsewhere = foreign(&gates).await;
    until(one, |status| status.gating == Gating::Acquiring).await;
    assert!(one.is_leader(), "it leads all the same");

    let (three, _) = gated(&store, &gates, "n3").await;
    until(one, |status| status.members.len() == 3).await;
    other.abandon();
    let gone = other.node().clone();
    until(one, |status| status.members.iter().any(|m| m.id == gone && !m.status.may_host())).await;
    sleep(Duration::from_secs(600)).await;
    assert_eq!(map(&three), before, "the known homes stay as they are");

    elsewhere.release().await.expect("released");
    until(&three, |status| shares(status) == [512, 512]).await;
    let changes = changes(&kinds(&mut events));
    assert_eq!(changes, [Gating::Acquiring, Gating::Held]);
}

#[tokio::test(start_paused = true)]
async fn a_rebalance_whose_gate_is_lost_stops_where_it_is() {
    let (store, gates) = (store(), store());
    // One shard at a time, each for a while.
    let mut settings = Settings::fast();
    settings.motions_max = Some(1);
    let node = async |name: &str| {
        let way = Faulty::new(Arc::new(store.reopen()));
        way.control().delay(Duration::from_millis(20));
        let gates = Faulty::new(Arc::new(gates.reopen()));
        start(&way, &gates, name, settings.clone()).await
    };
    let one = node("n1").await;
    until(&one, |status| shares(status) == [1024]).await;
    let two = node("n2").await;
    until(&one, |status| status.tables.iter().any(|table| table.moving > 0)).await;
    assert!(gates.delete_lease(&name()));
    let elsewhere = foreign(&gates).await;
    until(&one, |status| status.gating == Gating::Acquiring).await;
    // Whatever was on its way has arrived.
    sleep(Duration::from_secs(1)).await;
    let (begun, moved) = (one.status(), map(&one));
    assert!(begun.members.iter().all(|member| member.shards > 0) && !begun.is_settled());
    sleep(Duration::from_secs(600)).await;
    assert_eq!(map(&two), moved, "no handoff step either");
    elsewhere.release().await.expect("released");
    until(&two, |status| shares(status) == [512, 512]).await;
}

#[tokio::test(start_paused = true)]
async fn commands_that_place_shards_wait_in_order_and_others_do_not() {
    let (store, gates) = (store(), store());
    let (nodes, _, leads) = two(&store, &gates).await;
    let (one, other) = (nodes[leads].clone(), nodes[1 - leads].node().clone());
    assert!(gates.delete_lease(&name()));
    let elsewhere = foreign(&gates).await;
    until(&one, |status| status.gating == Gating::Acquiring).await;
    let before = map(&one);
    let shard = |number| ShardId::new(number);
    let tasks = TaskTracker::new();
    let mut asked = Vec::new();
    // The later one wins if they are carried out in order.
    for to in [other.clone(), one.node().clone(), other.clone()] {
        let pin = Command::Pin { table: table(), shard: shard(7), node: to };
        let node = one.clone();
        asked.push(tasks.spawn(async move { node.command(pin).await.expect("runs") }));
        sleep(Duration::from_millis(1)).await;
    }
    let paused = one.command(Command::Pause).await.expect("runs");
    assert!(paused.is_done(), "{paused:?}");
    sleep(Duration::from_secs(60)).await;
    assert!(asked.iter().all(|task| !task.is_finished()));
    assert_eq!(map(&one), before);

    elsewhere.release().await.expect("released");
    for task in asked {
        let reply = task.await.expect("runs");
        assert!(matches!(reply, Reply::Done(_)), "{reply:?}");
    }
    until(&one, |_| map(&one).owner(shard(7)).is_some_and(|owner| owner.id == other)).await;

    // What still waits when the term ends is refused.
    assert!(gates.delete_lease(&name()));
    let _elsewhere = foreign(&gates).await;
    until(&one, |status| status.gating == Gating::Acquiring).await;
    let node = one.clone();
    let resume = tasks.spawn(async move { node.command(Command::Resume).await.expect("runs") });
    sleep(Duration::from_secs(1)).await;
    assert!(one.command(Command::StepDown).await.expect("runs").is_done());
    assert_eq!(resume.await.expect("runs"), Reply::Refused(CommandError::Lost));
}

#[tokio::test(start_paused = true)]
async fn a_graceful_end_of_the_leader_hands_the_gate_over_at_once() {
    let (store, gates) = (store(), store());
    let (nodes, _, leads) = two(&store, &gates).await;
    let (one, other) = (&nodes[leads], &nodes[1 - leads]);
    let asked = Instant::now();
    assert!(one.command(Command::StepDown).await.expect("runs").is_done());
    until(other, |status| status.gating == Gating::Held).await;
    assert!(asked.elapsed() < Duration::from_millis(200), "{:?}", asked.elapsed());
    assert_eq!(one.status().gating, Gating::None);

    let asked = Instant::now();
    other.shutdown().await.expect("ends");
    until(one, |status| status.gating == Gating::Held).await;
    // The first one pauses after it stepped down.
    assert!(asked.elapsed() < Settings::fast().leader_retry + Duration::from_millis(200));
    until(one, |status| shares(status) == [1024]).await;
}

#[tokio::test(start_paused = true)]
async fn a_store_of_the_gate_that_is_away_for_less_than_half_of_the_ttl_loses_nothing() {
    let (store, gates) = (store(), store());
    let (nodes, ways, leads) = two(&store, &gates).await;
    let one = &nodes[leads];
    let mut events = one.events();
    let ttl = Settings::fast().sharding_ttl;
    for round in 0..20_u64 {
        sleep(Duration::from_millis(5_000 + 277 * round)).await;
        if round % 2 == 0 {
            ways[leads].cut(Effect::Unknown);
        } else {
            ways[leads].mute();
        }
        sleep(ttl / 2 - Duration::from_millis(1)).await;
        ways[leads].heal();
    }
    assert_eq!(changes(&kinds(&mut events)), []);

    // Away for longer, it is lost by this node's own clock, and nothing else stops.
    ways[leads].cut(Effect::Unknown);
    let cut = Instant::now();
    until(one, |status| status.gating == Gating::Acquiring).await;
    assert!(cut.elapsed() < ttl);
    sleep(ttl * 10).await;
    let status = one.status();
    assert!(one.is_leader() && status.is_settled() && !status.store_away);
    ways[leads].heal();
    until(one, |status| status.gating == Gating::Held).await;
}

#[tokio::test(start_paused = true)]
async fn one_of_coords_own_leases_gates_nothing() {
    let store = store();
    let bad = Cluster::builder(&store, info("n1"))
        .require_lease(store.lease(), LeaseName::leader())
        .start()
        .await
        .expect_err("reserved");
    assert_eq!(bad.kind(), ErrorKind::Invalid);
    assert!(bad.to_string().contains("_leader") || bad.to_string().contains("own"), "{bad}");
}
