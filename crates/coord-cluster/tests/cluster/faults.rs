//! Stores that are away, leaders that are cut off, and nodes that come twice.

use std::sync::Arc;
use std::time::Duration;

use coord_cluster::{Cluster, Command, EventKind, Handoff, Settings, Stores, Table};
use coord_conformance::faults::{FaultControl, Faulty};
use coord_core::{
    Backend, Effect, ErrorKind, Evict, MemoryBackend, NodeStatus, ProcessMark, Publish, Register,
    Replace, ShardCount, ShardId, ShardMap, TokioClock, Ttl,
};
use tokio::time::Instant;

use crate::common::{four, id, info, kinds, leader, map, node, shares, store, table, until};

/// Three nodes, each with its own way to the store.
async fn three(store: &MemoryBackend) -> Vec<(Cluster, FaultControl)> {
    three_with(store, Handoff::Exclusive).await
}

async fn three_with(store: &MemoryBackend, handoff: Handoff) -> Vec<(Cluster, FaultControl)> {
    let mut nodes = Vec::new();
    for name in ["n1", "n2", "n3"] {
        let faulty = Faulty::new(Arc::new(store.reopen()));
        let node = Cluster::builder(&faulty, info(name))
            .settings(Settings::fast())
            .table(Table::new(table()).handoff(handoff))
            .clock(Arc::new(TokioClock::new()))
            .start()
            .await
            .expect("starts");
        nodes.push((node, faulty.control().clone()));
    }
    for (node, _) in &nodes {
        until(node, |status| shares(status) == [341, 341, 342]).await;
    }
    nodes
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_is_cut_off_stops_before_another_leads_and_its_write_is_fenced() {
    let store = store();
    let nodes = three(&store).await;
    let leads = nodes.iter().position(|(node, _)| node.is_leader()).expect("one leads");
    let (cut, control) = &nodes[leads];
    let (other, _) = &nodes[(leads + 1) % 3];
    let fence = cut.fence().expect("leads");
    let prepared = map(cut);
    control.cut(Effect::Unknown);
    let taken = until(other, |status| {
        status.leader.as_ref().is_some_and(|leader| leader.term > fence.term)
    });
    tokio::select! {
        biased;
        _ = taken => assert!(!cut.is_leader(), "two lead at once"),
        () = tokio::time::sleep(Duration::from_secs(60)) => panic!("nobody took over"),
    }
    until(other, |status| shares(status) == [512, 512]).await;
    let mut edit = prepared.edit();
    edit.set_annex(b"{}".as_slice().into()).expect("fits");
    let late = Arc::new(edit.finish(fence.clone()).expect("changed"));
    let placement = store.placement();
    let written = placement.publish(&table(), &fence, prepared.version(), &late).await;
    assert!(matches!(written, Ok(Publish::Fenced(_))), "{written:?}");
    control.heal();
    until(cut, |status| shares(status) == [341, 341, 342]).await;
    assert!(!cut.is_leader());
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_makes_nobody_fail() {
    let store = store();
    let nodes = three(&store).await;
    let before = map(&nodes[0].0);
    let mut events: Vec<_> = nodes.iter().map(|(node, _)| node.events()).collect();
    for (_, control) in &nodes {
        control.cut(Effect::Unknown);
    }
    tokio::time::sleep(3 * Settings::fast().node_ttl).await;
    assert!(nodes.iter().all(|(node, _)| node.status().store_away));
    for (_, control) in &nodes {
        control.heal();
    }
    for (node, _) in &nodes {
        until(node, |status| {
            shares(status) == [341, 341, 342] && status.leader.is_some() && !status.store_away
        })
        .await;
    }
    tokio::time::sleep(3 * Settings::fast().node_ttl).await;
    for events in &mut events {
        let kinds = kinds(events);
        let bad = |kind: &EventKind| {
            matches!(kind, EventKind::NodeFailed { .. } | EventKind::ShardsMigrated { .. })
        };
        assert!(!kinds.iter().any(bad), "{kinds:?}");
        assert!(kinds.contains(&EventKind::StoreBack));
    }
    assert!(map(&nodes[0].0).raw_owners() == before.raw_owners());
}

/// A failed look-up is not an empty answer, also where all else works and the leader leads on.
#[tokio::test(start_paused = true)]
async fn a_leader_that_can_not_see_the_nodes_declares_none_failed() {
    let store = store();
    let discovery = Faulty::new(Arc::new(store.reopen()));
    let first =
        Cluster::builder(Stores::new(&store.reopen()).with_discovery(&discovery), info("n1"))
            .settings(Settings::fast())
            .table(Table::new(table()))
            .clock(Arc::new(TokioClock::new()))
            .start()
            .await
            .expect("starts");
    until(&first, |status| shares(status) == [1024]).await;
    let _others = [node(&store, "n2").await, node(&store, "n3").await];
    until(&first, |status| shares(status) == [341, 341, 342]).await;
    let (before, mut events) = (map(&first), first.events());
    discovery.control().cut(Effect::Unknown);
    tokio::time::sleep(Settings::fast().node_ttl / 2).await;
    assert!(first.is_leader());
    discovery.control().heal();
    tokio::time::sleep(3 * Settings::fast().node_ttl).await;
    let failed = |kind: &EventKind| matches!(kind, EventKind::NodeFailed { .. });
    assert!(!kinds(&mut events).iter().any(failed));
    assert!(first.is_leader() && map(&first).raw_owners() == before.raw_owners());
}

/// A node that died is declared failed one TTL after the leader has the store back, whether its watches
/// ended, or went on while nothing was answered.
#[tokio::test(start_paused = true)]
async fn after_an_outage_a_leader_leaves_everybody_a_whole_ttl() {
    let ttl = Settings::fast().node_ttl;
    for watches_end in [true, false] {
        let store = store();
        let nodes = three(&store).await;
        let leads = nodes.iter().position(|(node, _)| node.is_leader()).expect("one leads");
        let (leader, control) = &nodes[leads];
        let (victim, _) = &nodes[(leads + 1) % 3];
        victim.abandon();
        if watches_end {
            // It runs out while nobody can see it.
            tokio::time::sleep(ttl * 6 / 10).await;
            control.cut(Effect::Unknown);
        } else {
            // It runs out just afterwards.
            control.mute();
        }
        tokio::time::sleep(ttl / 2).await;
        control.heal();
        let back = Instant::now();
        until(leader, |status| status.count(NodeStatus::Failed) == 1).await;
        assert!(leader.is_leader());
        let passed = back.elapsed();
        // A watch that ended may be begun anew a few seconds later.
        assert!(passed >= ttl && passed < 2 * ttl, "{watches_end}: {passed:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_told_that_it_failed_joins_again_before_anybody_evicts_it() {
    let store = store();
    let nodes = three(&store).await;
    let leads = nodes.iter().position(|(node, _)| node.is_leader()).expect("one leads");
    for _ in 0..1_000 {
        nodes[leads].1.drop_request_to("evict");
    }
    let victim = &nodes[(leads + 1) % 3].0;
    let run = victim.status().registered.expect("registered");
    let mut events = victim.events();
    let why = "test".to_owned();
    let command = Command::MarkNodeFailed { node: victim.node().clone(), why };
    assert!(nodes[leads].0.request(command).await.expect("asked").is_done());
    until(victim, |status| status.registered.is_some_and(|now| now != run)).await;
    until(victim, |status| shares(status) == [341, 341, 342]).await;
    let lost = kinds(&mut events).into_iter().find_map(|kind| match kind {
        EventKind::RegistrationLost { why, .. } => Some(why),
        _ => None,
    });
    assert_eq!(lost.as_deref(), Some("it was declared failed"));
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_is_no_live_node_goes_although_it_has_much_to_do() {
    let store = store();
    let nodes = three(&store).await;
    let leads = nodes.iter().position(|(node, _)| node.is_leader()).expect("one leads");
    let ((leader, control), (other, _)) = (&nodes[leads], &nodes[(leads + 1) % 3]);
    let term = leader.fence().expect("leads").term;
    control.delay(Duration::from_secs(1));
    let mut asked = tokio::task::JoinSet::new();
    for shard in 0..200 {
        let (asker, node) = (leader.clone(), other.node().clone());
        let command = Command::Pin { table: table(), shard: ShardId::new(shard), node };
        asked.spawn(async move { asker.request(command).await });
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    let discovery = store.discovery();
    let all = discovery.nodes().await.expect("listed");
    let seen = all.iter().find(|seen| seen.info.id == *leader.node()).expect("registered");
    let run = seen.info.incarnation;
    let evicted = discovery.evict(leader.node(), run, &seen.revision).await.expect("answered");
    assert_eq!(evicted, Evict::Evicted);
    let led = until(leader, |status| status.registered != Some(run)).await;
    assert!(led.leader.as_ref().is_some_and(|leader| leader.term == term), "it has much to do");
    let start = Instant::now();
    until(other, |status| status.leader.as_ref().is_some_and(|leader| leader.term > term)).await;
    assert!(start.elapsed() < Settings::fast().leader_ttl, "{:?}", start.elapsed());
    asked.abort_all();
}

#[tokio::test(start_paused = true)]
async fn a_lost_reply_to_a_publish_is_no_second_write() {
    let store = store();
    // Where nothing is waited for, one version does it all.
    let nodes = three_with(&store, Handoff::Eager).await;
    let leads = nodes.iter().position(|(node, _)| node.is_leader()).expect("one leads");
    nodes[leads].1.drop_reply_to("publish");
    let version = map(&nodes[0].0).version();
    let fourth = node(&store, "n4").await;
    until(&fourth, |status| shares(status) == [256; 4]).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(map(&fourth).version(), version.next());
}

#[tokio::test(start_paused = true)]
async fn a_command_to_step_down_ends_one_term_although_its_answer_was_lost() {
    let store = store();
    let nodes = three(&store).await;
    let leads = nodes.iter().position(|(node, _)| node.is_leader()).expect("one leads");
    let (asker, _) = &nodes[(leads + 1) % 3];
    let term = nodes[leads].0.fence().expect("leads").term;
    let mut events = asker.events();
    nodes[leads].1.drop_request_to("answer");
    assert!(asker.request(Command::StepDown).await.expect("asked").is_done());
    tokio::time::sleep(Duration::from_secs(60)).await;
    let elected = |kind: &EventKind| match kind {
        EventKind::LeaderElected { term, .. } => Some(*term),
        _ => None,
    };
    let terms: Vec<_> = kinds(&mut events).iter().filter_map(elected).collect();
    assert!(matches!(terms[..], [next] if next > term), "{terms:?} after {term}");
}

#[tokio::test(start_paused = true)]
async fn an_eviction_whose_reply_is_lost_is_no_leave() {
    let store = store();
    let nodes = three(&store).await;
    let leads = nodes.iter().position(|(node, _)| node.is_leader()).expect("one leads");
    let (watching, control) = &nodes[leads];
    let (victim, _) = &nodes[(leads + 1) % 3];
    let name = victim.node().clone();
    // It can't notice, as if it were paused.
    victim.abandon();
    let before = map(watching);
    let start = Instant::now();
    control.drop_reply_to("evict");
    let command = Command::MarkNodeFailed { node: name.clone(), why: "test".to_owned() };
    assert!(watching.command(command).await.expect("asked").is_done());
    let ttl = Settings::fast().node_ttl;
    tokio::time::sleep(ttl.saturating_sub(start.elapsed()) - Duration::from_millis(1)).await;
    let member = watching.status().member(&name).map(|member| member.status);
    assert_eq!(member, Some(NodeStatus::Failed));
    assert!(map(watching).raw_owners() == before.raw_owners(), "it may still run");
    until(watching, |status| shares(status) == [512, 512]).await;
}

#[tokio::test(start_paused = true)]
async fn a_graceful_leave_fails_nobody_and_the_next_leader_comes_at_once() {
    let store = store();
    let mut nodes = four(&store).await;
    let leaving = nodes.remove(leader(&nodes));
    let mut events = nodes[0].events();
    let term = leaving.fence().expect("leads").term;
    leaving.leave().await.expect("leaves");
    let start = Instant::now();
    until(&nodes[0], |status| status.leader.as_ref().is_some_and(|leader| leader.term > term))
        .await;
    assert!(start.elapsed() < Duration::from_millis(200), "{:?}", start.elapsed());
    until(&nodes[0], |status| {
        shares(status) == [341, 341, 342] && status.member(leaving.node()).is_none()
    })
    .await;
    let kinds = kinds(&mut events);
    let bad = |kind: &EventKind| {
        matches!(kind, EventKind::NodeFailed { .. } | EventKind::ShardsOrphaned { .. })
    };
    assert!(!kinds.iter().any(bad), "{kinds:?}");
    let left = |kind: &EventKind| matches!(kind, EventKind::NodeLeft { node, .. } if node == leaving.node());
    assert!(kinds.iter().any(left), "{kinds:?}");
}

#[tokio::test(start_paused = true)]
async fn the_last_node_leaves_its_shards_orphaned_and_the_next_one_takes_them() {
    let store = store();
    let one = node(&store, "n1").await;
    until(&one, |status| shares(status) == [1024]).await;
    let mut events = one.events();
    one.leave().await.expect("leaves");
    let kinds = kinds(&mut events);
    assert!(kinds.iter().any(
        |kind| matches!(kind, EventKind::ShardsOrphaned { shards, .. } if shards.len() == 1024)
    ));
    assert!(kinds.contains(&EventKind::NoActiveNodes));
    let two = node(&store, "n2").await;
    until(&two, |status| shares(status) == [1024]).await;
}

#[tokio::test(start_paused = true)]
async fn an_id_is_taken_by_one_process_at_a_time() {
    let store = store();
    let nodes = four(&store).await;
    let builder = || {
        Cluster::builder(&store.reopen(), info("n1"))
            .settings(Settings::fast())
            .table(Table::new(table()))
            .clock(Arc::new(TokioClock::new()))
    };
    let error = builder().start().await.expect_err("a duplicate");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("localhost:4000"), "{error}");

    let mut events = nodes[0].events();
    let successor = builder().replace(Replace::Yes).start().await.expect("replaces");
    let run = until(&successor, |status| status.registered.is_some()).await.registered;
    until(&successor, |status| {
        shares(status) == [256; 4]
            && status.member(&id("n1")).map(|member| member.incarnation) == run
    })
    .await;
    until(&nodes[0], |status| status.registered.is_none()).await;
    let lost = |kind: &EventKind| matches!(kind, EventKind::RegistrationLost { .. });
    assert!(kinds(&mut events).iter().any(lost));
}

/// The mark of a process that was killed.
fn killed() -> ProcessMark {
    let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("it starts");
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("boot id");
    let namespace = |kind| {
        let link = std::fs::read_link(format!("/proc/self/ns/{kind}")).expect("namespace");
        link.to_str().expect("text").to_owned()
    };
    let namespaces = format!("{} {}", namespace("pid"), namespace("time"));
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).expect("stat");
    let started = stat.split(' ').nth(21).and_then(|field| field.parse().ok()).expect("a start");
    child.kill().expect("it is there");
    child.wait().expect("it ended");
    ProcessMark::new(boot.trim(), namespaces, child.id(), started)
}

/// How long after the start of its successor the shards of a process without a farewell start there.
async fn taken_over_after(mark: Option<ProcessMark>) -> Duration {
    let store = store();
    let mut before = info("n2");
    before.process = mark;
    let ttl = Ttl::new(Settings::fast().node_ttl).expect("a TTL");
    let registered = store.discovery().register(&before, ttl, Replace::No).await;
    assert!(matches!(registered, Ok(Register::Registered(_))));
    let first = node(&store, "n1").await;
    until(&first, |status| shares(status) == [512; 2]).await;
    let since = Instant::now();
    let successor = node(&store, "n2").await;
    let run = successor.status().registered;
    let hosts = |map: &ShardMap| {
        let mut nodes = map.nodes().iter().zip(map.counts());
        nodes.any(|(node, count)| count == 512 && node.as_ref().map(|node| node.incarnation) == run)
    };
    until(&first, |status| {
        shares(status) == [512; 2] && status.table(&table()).is_some_and(|t| hosts(&t.map))
    })
    .await;
    since.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_restart_under_the_same_name_waits_for_a_ttl_only_if_the_process_before_may_live() {
    let second = Duration::from_secs(1);
    let proved = taken_over_after(Some(killed())).await;
    assert!(proved < 2 * second, "{proved:?}");
    let elsewhere = ProcessMark::new("another machine", "pid:[1]", 7, 7);
    for unknown in [Some(elsewhere), None] {
        let waited = taken_over_after(unknown).await;
        let ttl = Settings::fast().node_ttl;
        assert!(waited >= ttl && waited < ttl + 2 * second, "{waited:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_configured_otherwise_is_refused_at_start() {
    let store = store();
    let one = node(&store, "n1").await;
    until(&one, |status| shares(status) == [1024]).await;
    let shards = ShardCount::new(64).expect("count");
    let error = Cluster::builder(&store.reopen(), info("n2"))
        .settings(Settings::fast())
        .table(Table::new(table()).shards(shards))
        .start()
        .await
        .expect_err("another header");
    assert_eq!(error.kind(), ErrorKind::Misconfigured);
    assert!(error.to_string().contains("shards=1024"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_paused_cluster_places_orphans_only() {
    let store = store();
    let mut nodes = four(&store).await;
    assert!(nodes[0].request(Command::Pause).await.expect("asked").is_done());
    let fifth = node(&store, "n5").await;
    until(&fifth, |status| status.is_settled() && status.members.len() == 5).await;
    assert_eq!(fifth.status().member(&id("n5")).map(|member| member.shards), Some(0));
    let dead = nodes.remove((leader(&nodes) + 1) % 4);
    dead.abandon();
    until(&fifth, |status| status.member(&id("n5")).is_some_and(|member| member.shards > 0)).await;
    assert_eq!(map(&fifth).orphans(), 0);
}
