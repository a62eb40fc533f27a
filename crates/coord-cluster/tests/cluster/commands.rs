//! Commands, and each refusal.

use std::collections::BTreeMap;
use std::time::Duration;

use coord_cluster::invariants::Invariant;
use coord_cluster::{Cluster, Command, CommandError, EventKind, Reply, Settings};
use coord_core::{NodeStatus, ShardId, TableName};

use crate::common::{
    four, id, kinds, leader, map, moves, node, node_with, shares, store, table, until,
};

const SHARD: ShardId = ShardId::new(7);

async fn refusal(node: &Cluster, command: Command) -> CommandError {
    match node.request(command.clone()).await.expect("asked") {
        Reply::Refused(refusal) => refusal,
        other => panic!("{command:?} is not refused: {other:?}"),
    }
}

async fn done(node: &Cluster, command: Command) -> u32 {
    match node.request(command.clone()).await.expect("asked") {
        Reply::Done(done) => done.moved,
        other => panic!("{command:?} is not done: {other:?}"),
    }
}

fn assign(table: TableName, shard: ShardId, node: &str) -> Command {
    Command::AssignShard { table, shard, node: id(node) }
}

#[tokio::test(start_paused = true)]
async fn a_follower_names_the_leader_and_a_request_reaches_it() {
    let store = store();
    let nodes = four(&store).await;
    let leads = leader(&nodes);
    let follower = &nodes[(leads + 1) % 4];
    let refused = follower.command(Command::Pause).await.expect("asked");
    let leader = Some(nodes[leads].node().clone());
    assert_eq!(refused, Reply::Refused(CommandError::NotLeader { leader }));
    done(follower, Command::Pause).await;
    until(follower, |status| status.paused).await;
    assert!(nodes[leads].command(Command::Resume).await.expect("asked").is_done());
    until(follower, |status| !status.paused).await;
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_record_is_deleted_is_carried_out_by_nobody() {
    let store = store();
    let mut settings = Settings::fast();
    settings.candidate = false;
    let one = node_with(&store, "n1", settings).await;
    // Nobody leads, so it waits.
    let asked = one.request_within(Command::Pause, Duration::from_secs(60));
    let deleted = async {
        while !store.delete_requests() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let two = node(&store, "n2").await;
        until(&two, |status| shares(status) == [512, 512]).await;
        two
    };
    let (reply, two) = tokio::join!(asked, deleted);
    assert_eq!(reply.expect("asked"), Reply::Unanswered);
    assert!(!two.status().paused);
}

#[tokio::test(start_paused = true)]
async fn every_refusal_says_why() {
    let store = store();
    let nodes = four(&store).await;
    let one = &nodes[0];
    let unknown = CommandError::NodeNotFound { node: id("n9") };
    let why = "test".to_owned();
    for command in [
        Command::MarkNodeFailed { node: id("n9"), why },
        Command::Drain { node: id("n9") },
        Command::Undrain { node: id("n9") },
        Command::Leave { node: id("n9"), force: false },
        assign(table(), SHARD, "n9"),
        Command::TransferLeadership { to: id("n9") },
    ] {
        assert_eq!(refusal(one, command).await, unknown);
    }
    let refused = refusal(one, Command::Undrain { node: id("n1") }).await;
    let status = NodeStatus::Active;
    assert_eq!(refused, CommandError::InvalidTransition { node: id("n1"), status });
    let other = TableName::new("other").expect("name");
    assert_eq!(
        refusal(one, assign(other.clone(), SHARD, "n1")).await,
        CommandError::TableNotFound { table: other }
    );
    let shard = ShardId::new(1024);
    let refused = refusal(one, assign(table(), shard, "n1")).await;
    assert_eq!(refused, CommandError::ShardNotFound { shard, shards: 1024 });
    let owner = map(one).owner(SHARD).expect("owned").id.clone();
    let another = if owner == id("n1") { "n2" } else { "n1" };
    assert_eq!(
        refusal(one, assign(table(), SHARD, another)).await,
        CommandError::TooManyReplicas { shard: SHARD, replicas: 1 }
    );
    let owners = BTreeMap::from([(SHARD, Vec::new())]);
    match refusal(one, Command::AssignShards { table: table(), owners }).await {
        CommandError::InvariantViolation(violation) => {
            assert_eq!((violation.invariant, violation.shard), (Invariant::I2, Some(SHARD)));
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_draining_node_is_evacuated_and_takes_nothing_until_undrained() {
    let store = store();
    let nodes = four(&store).await;
    let mut events = nodes[3].events();
    done(&nodes[0], Command::Drain { node: id("n2") }).await;
    until(&nodes[0], |status| shares(status) == [341, 341, 342]).await;
    let status = nodes[0].status();
    assert_eq!(
        status.member(&id("n2")).map(|m| (m.status, m.shards)),
        Some((NodeStatus::Draining, 0))
    );
    assert_eq!(
        refusal(&nodes[0], assign(table(), SHARD, "n2")).await,
        CommandError::NodeDraining { node: id("n2") }
    );
    done(&nodes[0], Command::Undrain { node: id("n2") }).await;
    until(&nodes[3], |status| shares(status) == [256; 4]).await;
    let kinds = kinds(&mut events);
    assert!(kinds.contains(&EventKind::NodeDraining { node: id("n2") }));
    assert!(kinds.contains(&EventKind::NodeActive { node: id("n2") }));
}

#[tokio::test(start_paused = true)]
async fn a_pin_moves_one_shard_and_holds() {
    let store = store();
    let nodes = four(&store).await;
    let before = map(&nodes[0]);
    let owner = before.owner(SHARD).expect("owned").id.clone();
    let wanted = if owner == id("n1") { id("n2") } else { id("n1") };
    let pin = Command::Pin { table: table(), shard: SHARD, node: wanted.clone() };
    let moved = done(&nodes[0], pin).await;
    assert!((1..=2).contains(&moved), "the shard, and one in exchange: {moved}");
    until(&nodes[0], |_| map(&nodes[0]).owner(SHARD).is_some_and(|node| node.id == wanted)).await;
    let reason = "test".to_owned();
    assert_eq!(done(&nodes[0], Command::RebalanceShards { table: None, reason }).await, 0);
    assert_eq!(map(&nodes[0]).owner(SHARD).expect("owned").id, wanted);
    done(&nodes[0], Command::Unpin { table: table(), shard: SHARD }).await;
}

#[tokio::test(start_paused = true)]
async fn a_node_declared_failed_keeps_its_shards_until_its_ttl_has_passed() {
    let store = store();
    let nodes = four(&store).await;
    let leads = leader(&nodes);
    let victim = &nodes[(leads + 1) % 4];
    // It can't notice, as if it were paused.
    let name = victim.node().clone();
    victim.abandon();
    let watching = &nodes[leads];
    let before = map(watching);
    let start = tokio::time::Instant::now();
    let command = Command::MarkNodeFailed { node: name.clone(), why: "test".to_owned() };
    done(watching, command).await;
    until(watching, |status| {
        status.member(&name).is_some_and(|member| member.status == NodeStatus::Failed)
    })
    .await;
    let ttl = Settings::fast().node_ttl;
    tokio::time::sleep(ttl - Duration::from_secs(1)).await;
    assert_eq!(moves(&before, &map(watching)).len(), 0, "it may still run");
    until(watching, |status| shares(status) == [341, 341, 342]).await;
    assert!(start.elapsed() >= ttl && start.elapsed() <= ttl + Duration::from_secs(1));
    assert!(moves(&before, &map(watching)).keys().all(|(from, _)| *from == name));
    let refused = refusal(watching, assign(table(), SHARD, name.as_str())).await;
    assert!(matches!(refused, CommandError::UnhealthyNode { status: NodeStatus::Failed, .. }));
}

#[tokio::test(start_paused = true)]
async fn leadership_is_given_up_and_transferred() {
    let store = store();
    let nodes = four(&store).await;
    let first = leader(&nodes);
    let term = nodes[first].fence().expect("leads").term;
    done(&nodes[(first + 1) % 4], Command::StepDown).await;
    let status = until(&nodes[first], |status| {
        status.leader.as_ref().is_some_and(|leader| leader.term > term)
    })
    .await;
    let second = status.leader.clone().expect("leads");
    assert_ne!(second.node, *nodes[first].node());
    let target = nodes[first].node().clone();
    done(&nodes[first], Command::TransferLeadership { to: target.clone() }).await;
    until(&nodes[first], |status| {
        status
            .leader
            .as_ref()
            .is_some_and(|leader| leader.term > second.term && leader.node == target)
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_while_balanced() {
    let store = store();
    let nodes = four(&store).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let version = map(&nodes[0]).version();
    let mut events = nodes[0].events();
    tokio::time::sleep(Duration::from_secs(15 * 60)).await;
    assert_eq!(map(&nodes[0]).version(), version);
    assert_eq!(kinds(&mut events), []);
}

#[tokio::test(start_paused = true)]
async fn nobody_answers_without_a_leader() {
    let store = store();
    let one = node(&store, "n1").await;
    until(&one, |status| shares(status) == [1024]).await;
    let mut settings = Settings::fast();
    settings.candidate = false;
    let two = node_with(&store, "n2", settings).await;
    until(&two, |status| shares(status) == [512, 512]).await;
    one.abandon();
    let limit = Duration::from_secs(5);
    let reply = two.request_within(Command::Pause, limit).await.expect("asked");
    assert_eq!(reply, Reply::Unanswered);
    assert_eq!(two.status().count(NodeStatus::Active), 2, "nobody is there to judge");
}
