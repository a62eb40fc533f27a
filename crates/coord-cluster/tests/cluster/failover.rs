//! Nodes come, fail, come back and leave.

use std::sync::Arc;
use std::time::Duration;

use coord_cluster::{Balance, Cluster, ClusterState, EventKind, Settings, Table};
use coord_core::{NodeStatus, ShardCount, TokioClock};
use tokio::time::Instant;

use crate::common::{
    four, heard, id, info, kinds, leader, map, moves, node, shares, store, table, until,
};

#[tokio::test(start_paused = true)]
async fn four_nodes_share_evenly_and_survive_the_loss_of_their_leader() {
    let store = store();
    let mut nodes = four(&store).await;
    let lost = nodes.remove(leader(&nodes));
    let fence = lost.fence().expect("leads");
    let before = map(&nodes[0]);
    let mut events = nodes[0].events();

    lost.abandon();
    let start = Instant::now();
    let limit = Settings::fast().leader_ttl + Duration::from_secs(1);
    let status = until(&nodes[0], |status| {
        status.leader.as_ref().is_some_and(|leader| leader.term > fence.term)
    })
    .await;
    assert!(start.elapsed() <= limit, "{:?}", start.elapsed());
    assert_ne!(status.leader.as_ref().expect("leads").node, *lost.node());

    for node in &nodes {
        until(node, |status| shares(status) == [341, 341, 342]).await;
    }
    assert!(start.elapsed() <= limit + Duration::from_secs(1), "{:?}", start.elapsed());
    let moved = moves(&before, &map(&nodes[0]));
    assert!(moved.keys().all(|(from, _)| from == lost.node()), "{moved:?}");
    assert_eq!(moved.values().sum::<u32>(), 256);
    let kinds = kinds(&mut events);
    assert!(kinds.contains(&EventKind::RebalancingCompleted { table: table(), moved: 256 }));

    let back = node(&store, lost.node().as_str()).await;
    let failed_over = map(&nodes[0]);
    until(&back, |status| shares(status) == [256; 4]).await;
    let moved = moves(&failed_over, &map(&back));
    assert!(moved.keys().all(|(_, to)| to == lost.node()), "{moved:?}");
    assert_eq!(moved.values().sum::<u32>(), 256);
    let status = back.status();
    assert_eq!(status.member(lost.node()).map(|member| member.status), Some(NodeStatus::Active));
}

#[tokio::test(start_paused = true)]
async fn a_fifth_node_takes_its_share_and_nothing_else_moves() {
    let store = store();
    let nodes = four(&store).await;
    let before = map(&nodes[0]);
    let fifth = node(&store, "n5").await;
    until(&fifth, |status| shares(status) == [204, 205, 205, 205, 205]).await;
    let moved = moves(&before, &map(&fifth));
    assert!(moved.keys().all(|(_, to)| *to == id("n5")), "{moved:?}");
    assert_eq!(moved.values().sum::<u32>(), 204);
}

#[tokio::test(start_paused = true)]
async fn a_follower_that_dies_fails_within_its_ttl() {
    let store = store();
    let mut nodes = four(&store).await;
    let dead = nodes.remove((leader(&nodes) + 1) % 4);
    let mut events: Vec<_> = nodes.iter().map(Cluster::events).collect();
    let before = map(&nodes[0]);
    dead.abandon();
    let start = Instant::now();
    for node in &nodes {
        until(node, |status| shares(status) == [341, 341, 342]).await;
    }
    assert!(start.elapsed() <= Settings::fast().node_ttl + Duration::from_secs(1));
    assert!(moves(&before, &map(&nodes[0])).keys().all(|(from, _)| from == dead.node()));
    for events in &mut events {
        let failed = heard(events)
            .iter()
            .filter(|event| matches!(&event.kind, EventKind::NodeFailed { node, .. } if node == dead.node()))
            .count();
        assert_eq!(failed, 1, "each node hears of it once");
    }
}

#[tokio::test(start_paused = true)]
async fn too_many_that_vanish_at_once_are_not_all_given_up() {
    let store = store();
    let mut nodes = Vec::new();
    for name in ["n1", "n2", "n3", "n4", "n5", "n6"] {
        nodes.push(node(&store, name).await);
    }
    for node in &nodes {
        until(node, |status| shares(status) == [170, 170, 171, 171, 171, 171]).await;
    }
    let leads = leader(&nodes);
    nodes.rotate_left(leads);
    let watching = &nodes[0];
    let mut events = watching.events();
    for lost in &nodes[2..] {
        lost.abandon();
    }
    let degraded = ClusterState::MultiNode(Balance::Degraded);
    until(watching, |status| status.state == degraded && status.count(NodeStatus::Failed) == 3)
        .await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    let kinds = kinds(&mut events);
    let suspended = kinds.iter().filter_map(|kind| match kind {
        EventKind::NodeSuspended { node, .. } => Some(node),
        _ => None,
    });
    let suspended: Vec<_> = suspended.collect();
    assert_eq!(suspended.len(), 1, "half of six may go: {kinds:?}");
    let status = watching.status();
    let member = status.member(suspended[0]).expect("listed");
    assert_eq!((status.state, member.status), (degraded, NodeStatus::Active));
    assert!(member.shards >= 170, "its shards stay with it");
    assert_eq!(status.suspended, [suspended[0].clone()]);
    // Its return releases them.
    let back = node(&store, suspended[0].as_str()).await;
    until(&back, |status| shares(status) == [341, 341, 342]).await;
    assert!(back.status().suspended.is_empty());
}

#[tokio::test(start_paused = true)]
async fn where_the_suspended_ones_never_return_new_nodes_get_their_shards() {
    let store = store();
    let mut nodes = Vec::new();
    for name in ["n1", "n2", "n3", "n4", "n5", "n6"] {
        nodes.push(node(&store, name).await);
    }
    until(&nodes[0], |status| shares(status) == [170, 170, 171, 171, 171, 171]).await;
    for lost in &nodes {
        lost.abandon();
    }
    let new = node(&store, "m1").await;
    until(&new, |status| !status.suspended.is_empty()).await;
    let since = Instant::now();
    until(&new, |status| shares(status) == [1024]).await;
    assert!(since.elapsed() < Duration::from_secs(40), "{:?}", since.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_table_of_which_the_code_says_nothing_is_as_the_settings_say() {
    let store = store();
    let text = "shards = 32\nreplicas = 2\nstrategy = 'consistent-hash'\nvirtual_nodes = 40";
    let settings = Settings::fast().with_toml(text).expect("reads");
    let builder = |name| {
        Cluster::builder(&store.reopen(), info(name))
            .settings(settings.clone())
            .clock(Arc::new(TokioClock::new()))
    };
    let start = async |name| builder(name).table(Table::new(table())).start().await;
    let (one, two) = (start("n1").await.expect("starts"), start("n2").await.expect("starts"));
    for node in [&one, &two] {
        until(node, |status| shares(status) == [32, 32]).await;
    }
    assert_eq!(*map(&one).header(), settings.header());
    let shards = ShardCount::new(1024).expect("count");
    let error = builder("n3").table(Table::new(table()).shards(shards)).start().await;
    let error = error.expect_err("another header").to_string();
    assert!(
        error.contains("shards=32 replicas=2") && error.contains("shards=1024 replicas=2"),
        "{error}"
    );
}
