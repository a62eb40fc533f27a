//! Leadership that is handed over: to a node that was named, or to one of a newer version.

use std::sync::Arc;
use std::time::Duration;

use coord_cluster::{Cluster, Command, CommandError, EventKind, Events, Reply, Settings, Table};
use coord_core::{ErrorKind, Label, MemoryBackend, NodeId, Term, TokioClock};
use tokio::time::{Instant, sleep};

use crate::common::{four, id, info, kinds, leader, node, node_with, store, table, until};

const AFTER: Duration = Duration::from_secs(60);

fn prefers_newer(after: Duration) -> Settings {
    let mut settings = Settings::fast();
    settings.newer_leads_after = Some(after);
    settings
}

async fn start(store: &MemoryBackend, name: &str, version: &str) -> coord_core::Result<Cluster> {
    let version = Label::new(version).expect("label");
    Cluster::builder(&store.reopen(), info(name).with_version(version))
        .settings(prefers_newer(AFTER))
        .table(Table::new(table()))
        .clock(Arc::new(TokioClock::new()))
        .start()
        .await
}

/// Who was elected, in which terms, as it was heard.
fn elected(events: &mut Events) -> Vec<(NodeId, Term)> {
    let elected = |kind: EventKind| match kind {
        EventKind::LeaderElected { node, term } => Some((node, term)),
        _ => None,
    };
    kinds(events).into_iter().filter_map(elected).collect()
}

async fn leads(watching: &Cluster, name: &NodeId) -> Term {
    let status =
        until(watching, |status| status.leader.as_ref().is_some_and(|leader| leader.node == *name))
            .await;
    status.leader.as_ref().expect("leads").term
}

async fn refusal(node: &Cluster, to: &str) -> CommandError {
    let command = Command::TransferLeadership { to: id(to) };
    match node.request(command).await.expect("asked") {
        Reply::Refused(refusal) => refusal,
        other => panic!("it is refused: {other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn leadership_goes_to_the_node_that_was_named_and_to_nobody_in_between() {
    let store = store();
    let nodes = four(&store).await;
    let mut events = nodes[0].events();
    for round in 0..24 {
        let first = leader(&nodes);
        let target = &nodes[(first + 1 + round % 3) % 4];
        let asked = Instant::now();
        let command = Command::TransferLeadership { to: target.node().clone() };
        assert!(nodes[round % 4].request(command).await.expect("asked").is_done());
        leads(target, target.node()).await;
        assert!(asked.elapsed() < Duration::from_millis(200), "{:?}", asked.elapsed());
        until(&nodes[0], |_| target.is_leader()).await;
        // Whoever led stands again after a while, and so do the others.
        sleep(Duration::from_secs(7)).await;
        let elected = elected(&mut events);
        assert!(matches!(&elected[..], [(node, _)] if node == target.node()), "{elected:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_was_named_and_does_not_come_is_waited_for_once() {
    let store = store();
    let nodes = four(&store).await;
    let first = leader(&nodes);
    let target = &nodes[(first + 1) % 4];
    let others = &nodes[(first + 2) % 4];
    let mut events = others.events();
    let term = nodes[first].fence().expect("leads").term;
    // It can't say that it is gone.
    target.abandon();
    let command = Command::TransferLeadership { to: target.node().clone() };
    assert!(nodes[first].command(command).await.expect("asked").is_done());
    let asked = Instant::now();
    until(others, |status| status.leader.as_ref().is_some_and(|leader| leader.term > term)).await;
    let retry = Settings::fast().leader_retry;
    assert!(asked.elapsed() >= retry * 2, "the others held back: {:?}", asked.elapsed());
    assert!(asked.elapsed() < retry * 2 + Duration::from_secs(1), "{:?}", asked.elapsed());
    sleep(Duration::from_secs(60)).await;
    assert_eq!(elected(&mut events).len(), 1, "nobody gives way to it again");
}

#[tokio::test(start_paused = true)]
async fn a_transfer_to_one_that_can_not_lead_is_refused() {
    let store = store();
    let nodes = four(&store).await;
    let mut events = nodes[0].events();
    let first = leader(&nodes);
    let other = nodes[(first + 1) % 4].node().to_string();
    assert_eq!(refusal(&nodes[0], "n9").await, CommandError::NodeNotFound { node: id("n9") });
    let mut settings = Settings::fast();
    settings.candidate = false;
    let fifth = node_with(&store, "n5", settings).await;
    until(&fifth, |status| status.members.len() == 5).await;
    assert_eq!(refusal(&fifth, "n5").await, CommandError::NotCandidate { node: id("n5") });
    let drain = Command::Drain { node: id(&other) };
    assert!(nodes[0].request(drain).await.expect("asked").is_done());
    assert_eq!(refusal(&nodes[0], &other).await, CommandError::NodeDraining { node: id(&other) });
    // To itself there is nothing to do.
    let to = nodes[first].node().clone();
    let done = nodes[0].request(Command::TransferLeadership { to }).await.expect("asked");
    assert!(done.is_done());
    sleep(Duration::from_secs(30)).await;
    assert_eq!(elected(&mut events), []);
    assert!(nodes[first].is_leader());
}

#[tokio::test(start_paused = true)]
async fn a_rolling_update_changes_the_leader_once() {
    let store = store();
    let mut nodes = Vec::new();
    for name in ["n1", "n2", "n3"] {
        nodes.push(start(&store, name, "1.9.0").await.expect("starts"));
    }
    let observer = node(&store, "n9").await;
    until(&observer, |status| status.members.len() == 4).await;
    let first = nodes.iter().position(Cluster::is_leader).expect("one leads");
    let mut events = observer.events();
    // The followers are updated one after the other, the leader last.
    nodes.swap(first, 2);
    let last = nodes.pop().expect("three");
    let mut updated = Vec::new();
    for old in nodes {
        let name = old.node().to_string();
        old.leave().await.expect("leaves");
        let new = start(&store, &name, "1.10.0").await.expect("starts");
        until(&new, |status| status.members.len() == 4).await;
        sleep(AFTER / 4).await;
        assert_eq!(elected(&mut events), [], "not before it has been there for a while");
        updated.push(new);
    }
    sleep(AFTER).await;
    let now = elected(&mut events);
    let [(target, _)] = &now[..] else { panic!("it changed once: {now:?}") };
    assert!(updated.iter().any(|node| node.node() == target), "{target}");
    let name = last.node().to_string();
    last.leave().await.expect("leaves");
    updated.push(start(&store, &name, "1.10.0").await.expect("starts"));
    sleep(AFTER * 5).await;
    assert_eq!(elected(&mut events), [], "and stays where it is");
}

#[tokio::test(start_paused = true)]
async fn a_version_that_can_not_be_compared_is_named_at_the_start() {
    let error = start(&store(), "n1", "main-branch").await.expect_err("no version");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("\"main-branch\""), "{error}");
    // Where nobody wants to compare, anything goes.
    let free = info("n1").with_version(Label::new("main-branch").expect("label"));
    let started = Cluster::builder(&store(), free).settings(Settings::fast()).start().await;
    assert!(started.is_ok());
    let error = prefers_newer(Duration::from_secs(1)).validate().expect_err("too short");
    assert!(error.to_string().contains("newer_leads_after 1s"), "{error}");
}
