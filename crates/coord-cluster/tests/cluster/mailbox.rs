//! Messages to shards while they move, while nobody leads, and while hosts die.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_cluster::transport::MemoryNetwork;
use coord_cluster::{
    AskError, Cluster, Handler, Handoff, Host, HostError, Mail, MailboxLimits, Settings,
    ShardFence, Table,
};
use coord_conformance::faults::{FaultControl, Faulty};
use coord_core::{
    Address, Clock, Effect, MemoryBackend, Moment, NodeInfo, NodeStatus, ShardCount, ShardId,
    TokioClock,
};
use futures::future::join_all;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::common::{id, map, store, table, until};
use crate::metrics::Metrics;

const SHARDS: u32 = 12;
const MILLISECOND: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// What all handlers of a test have handled: which node, which shard, what.
#[derive(Debug, Default)]
struct Ledger(Mutex<Vec<(String, ShardId, String)>>);

impl Ledger {
    fn of(&self, shard: ShardId) -> Vec<(String, String)> {
        let all = self.0.lock().expect("not poisoned");
        let of = all.iter().filter(|(_, of, _)| *of == shard);
        of.map(|(node, _, what)| (node.clone(), what.clone())).collect()
    }

    /// Each sender's messages, "sender number", were handled once and in order.
    #[track_caller]
    fn check(&self) {
        let mut last: BTreeMap<(ShardId, String), u32> = BTreeMap::new();
        for (node, shard, what) in self.0.lock().expect("not poisoned").iter() {
            let (sender, number) = what.split_once(' ').expect("sender and number");
            let number = number.parse().expect("a number");
            let before = last.insert((*shard, sender.to_owned()), number);
            assert!(
                before < Some(number),
                "{node} handled {what} of shard {shard} after {before:?}"
            );
        }
    }
}

/// Notes what it handles, and takes a while for it.
#[derive(Debug)]
struct Noting {
    node: String,
    ledger: Arc<Ledger>,
    takes: watch::Receiver<Duration>,
}

#[async_trait]
impl Host for Noting {
    async fn start(&self, _shard: ShardId, _fence: ShardFence) -> Result<(), HostError> {
        tokio::time::sleep(20 * MILLISECOND).await;
        Ok(())
    }

    async fn stop(&self, _shard: ShardId) {
        tokio::time::sleep(20 * MILLISECOND).await;
    }
}

#[async_trait]
impl Handler for Noting {
    async fn handle(&self, mail: Mail) -> Bytes {
        assert!(mail.fence.token().is_some_and(|token| token.shard == mail.shard));
        let what = String::from_utf8(mail.payload.to_vec()).expect("text");
        let note = (self.node.clone(), mail.shard, what.clone());
        self.ledger.0.lock().expect("not poisoned").push(note);
        let takes = *self.takes.borrow();
        tokio::time::sleep(takes).await;
        format!("{} {what}", self.node).into()
    }
}

/// A clock that can jump ahead, as time does for a process that is paused.
#[derive(Debug, Default)]
struct Jumping {
    clock: TokioClock,
    ahead: Mutex<Duration>,
}

impl Clock for Jumping {
    fn now(&self) -> Moment {
        self.clock.now().plus(*self.ahead.lock().expect("not poisoned"))
    }
}

struct Node {
    cluster: Cluster,
    store: FaultControl,
    clock: Arc<Jumping>,
}

impl Node {
    fn name(&self) -> String {
        self.cluster.node().to_string()
    }

    /// Asks a shard; the message has its place from now on.
    fn ask(
        &self,
        shard: ShardId,
        what: impl Into<String>,
        limit: Duration,
    ) -> impl Future<Output = Result<Bytes, AskError>> + Send + 'static {
        self.cluster.mailbox(&table()).expect("has one").ask_shard(shard, what.into(), limit)
    }

    /// A shard of this node.
    fn shard(&self) -> ShardId {
        map(&self.cluster).shards_of(self.cluster.node()).next().expect("it owns some")
    }
}

fn address(name: &str) -> Address {
    Address::new(format!("{name}:4000")).expect("address")
}

struct Scene {
    store: MemoryBackend,
    network: MemoryNetwork,
    ledger: Arc<Ledger>,
    takes: watch::Sender<Duration>,
    handoff: Handoff,
    limits: MailboxLimits,
    settings: Settings,
}

impl Scene {
    fn new(handoff: Handoff) -> Self {
        let network = MemoryNetwork::new();
        network.delay(MILLISECOND);
        Self {
            store: store(),
            network,
            ledger: Arc::default(),
            takes: watch::Sender::new(3 * MILLISECOND),
            handoff,
            limits: MailboxLimits::default(),
            settings: Settings::fast(),
        }
    }

    async fn start(&self, name: &str) -> Node {
        self.start_at(name, address(name)).await
    }

    /// Starts a node that says that it is reached there.
    async fn start_at(&self, name: &str, says: Address) -> Node {
        let faulty = Faulty::new(Arc::new(self.store.reopen()));
        let clock = Arc::new(Jumping::default());
        let handler = Noting {
            node: name.to_owned(),
            ledger: Arc::clone(&self.ledger),
            takes: self.takes.subscribe(),
        };
        let shards = ShardCount::new(SHARDS).expect("count");
        let transport = self.network.transport(address(name));
        let cluster = Cluster::builder(&faulty, NodeInfo::new(id(name), says))
            .settings(self.settings.clone())
            .table(
                Table::new(table()).shards(shards).handoff(self.handoff).handler(Arc::new(handler)),
            )
            .transport_with(Arc::new(transport), self.limits)
            .clock(Arc::<Jumping>::clone(&clock))
            .start()
            .await
            .expect("starts");
        Node { cluster, store: faulty.control().clone(), clock }
    }

    async fn nodes(&self, names: &[&str]) -> Vec<Node> {
        let mut nodes = Vec::new();
        for name in names {
            nodes.push(self.start(name).await);
        }
        for node in &nodes {
            settled(node, names.len()).await;
        }
        nodes
    }
}

async fn settled(node: &Node, active: usize) {
    until(&node.cluster, |status| {
        let live: Vec<_> = status
            .members
            .iter()
            .filter(|member| member.status == NodeStatus::Active)
            .map(|member| member.shards)
            .collect();
        let share = SHARDS / u32::try_from(active).expect("few");
        status.is_settled() && live.len() == active && live.iter().all(|shards| *shards >= share)
    })
    .await;
}

/// Asks every shard again and again until told to stop; the longest that one round took.
async fn load(
    sender: Cluster,
    name: String,
    mut stop: watch::Receiver<bool>,
) -> Result<Duration, AskError> {
    let mailbox = sender.mailbox(&table()).expect("has one");
    let (mut number, mut longest) = (0, Duration::ZERO);
    while !*stop.borrow_and_update() {
        let began = Instant::now();
        // Three for each shard at once, to have a queue.
        let asked: Vec<_> = (0..3 * SHARDS)
            .map(|at| {
                number += 1;
                let what = format!("{name} {number}");
                mailbox.ask_shard(ShardId::new(at % SHARDS), what, MINUTE)
            })
            .collect();
        for answer in join_all(asked).await {
            answer?;
        }
        longest = longest.max(began.elapsed());
        tokio::time::sleep(10 * MILLISECOND).await;
    }
    Ok(longest)
}

async fn rolling_restart(handoff: Handoff) -> Duration {
    let scene = Scene::new(handoff);
    let mut nodes = scene.nodes(&["n1", "n2", "n3"]).await;
    let client = scene.start("client").await;
    let drain = coord_cluster::Command::Drain { node: id("client") };
    assert!(nodes[0].cluster.request(drain).await.expect("asked").is_done());
    settled(&nodes[0], 3).await;
    let stop = watch::Sender::new(false);
    let mut loads = tokio::task::JoinSet::new();
    for name in ["a", "b"] {
        loads.spawn(load(client.cluster.clone(), name.to_owned(), stop.subscribe()));
    }
    for _ in 0..3 {
        let leaving = nodes.remove(0);
        leaving.cluster.leave().await.expect("leaves in order");
        let back = scene.start(&leaving.name()).await;
        settled(&back, 3).await;
        nodes.push(back);
    }
    stop.send_replace(true);
    let mut longest = Duration::ZERO;
    while let Some(ended) = loads.join_next().await {
        longest = longest.max(ended.expect("no panic").expect("no message is lost"));
    }
    // The two share a lane, so their numbers are told apart by their names.
    scene.ledger.check();
    longest
}

#[tokio::test(start_paused = true)]
async fn no_message_is_lost_doubled_or_overtaken_in_a_rolling_restart() {
    for handoff in [Handoff::Exclusive, Handoff::MakeBeforeBreak, Handoff::Eager] {
        let longest = rolling_restart(handoff).await;
        println!("{handoff}: the longest round took {longest:?}");
        assert!(longest < 5 * SECOND, "{handoff}: {longest:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn while_nobody_leads_known_shards_answer_and_orphans_wait_in_order() {
    let scene = Scene::new(Handoff::Exclusive);
    let mut nodes = scene.nodes(&["n1", "n2", "n3"]).await;
    let leads = nodes.iter().position(|node| node.cluster.is_leader()).expect("one leads");
    let dead = nodes.remove(leads);
    let (orphan, known) = (dead.shard(), nodes[1].shard());
    scene.network.cut(&address(&dead.name()));
    dead.cluster.abandon();
    let waiting: Vec<_> =
        (1..=5).map(|number| nodes[0].ask(orphan, format!("a {number}"), MINUTE)).collect();
    for number in 1..=5 {
        let answer = nodes[0].ask(known, format!("a {number}"), SECOND).await.expect("flows");
        assert_eq!(answer, format!("{} a {number}", nodes[1].name()));
    }
    assert!(!nodes.iter().any(|node| node.cluster.is_leader()));
    for answer in join_all(waiting).await {
        answer.expect("it is delivered once there is a leader, and an owner");
    }
    scene.ledger.check();
    assert_eq!(scene.ledger.of(orphan).len(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_full_buffer_says_so_at_once_and_what_waited_is_certainly_not_handled() {
    let mut scene = Scene::new(Handoff::Exclusive);
    scene.limits = scene.limits.with_lane_max(3);
    // Nobody ever leads, so nobody owns anything.
    scene.settings.candidate = false;
    let node = scene.start("n1").await;
    let shard = ShardId::new(5);
    let began = Instant::now();
    let waiting: Vec<_> =
        (1..=3).map(|number| node.ask(shard, format!("a {number}"), 5 * SECOND)).collect();
    let full = node.ask(shard, "a 4", 5 * SECOND).await.expect_err("full");
    assert!(matches!(full, AskError::BufferFull { waiting: 3, bytes: 9, .. }), "{full:?}");
    assert_eq!((full.effect(), began.elapsed()), (Effect::None, Duration::ZERO));
    let other = node.ask(ShardId::new(6), "a 1", SECOND).await.expect_err("no owner");
    assert!(matches!(other, AskError::NotDelivered { .. }), "each shard has its own buffer");
    for answer in join_all(waiting).await {
        let late = answer.expect_err("no owner");
        assert!(matches!(late, AskError::NotDelivered { .. }), "{late:?}");
        assert_eq!(late.effect(), Effect::None);
    }
    assert_eq!(began.elapsed(), 5 * SECOND);
    // A dropped future takes its message along, and room is there again.
    let dropped: Vec<_> =
        (1..=3).map(|number| node.ask(shard, format!("a {number}"), MINUTE)).collect();
    drop(dropped);
    let waits = node.ask(shard, "a 5", MINUTE);
    node.cluster.shutdown().await.expect("ends");
    assert_eq!(waits.await, Err(AskError::Closed));
    assert_eq!(node.ask(shard, "a 6", MINUTE).await, Err(AskError::Closed));
    let odd = node.ask(ShardId::new(SHARDS), "a 7", MINUTE).await.expect_err("no such shard");
    assert!(matches!(odd, AskError::NoSuchShard { .. }), "{odd:?}");
    assert!(scene.ledger.of(shard).is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_message_that_a_host_takes_to_its_grave_is_unknown_and_later_ones_go_on() {
    let scene = Scene::new(Handoff::Exclusive);
    let mut nodes = scene.nodes(&["n1", "n2", "n3"]).await;
    let leads = nodes.iter().position(|node| node.cluster.is_leader()).expect("one leads");
    let dead = nodes.remove((leads + 1) % 3);
    let (shard, name) = (dead.shard(), dead.name());
    scene.takes.send_replace(10 * SECOND);
    let first = nodes[0].ask(shard, "a 1", MINUTE);
    let second = nodes[0].ask(shard, "a 2", MINUTE);
    tokio::time::sleep(SECOND).await;
    assert_eq!(scene.ledger.of(shard), [(name.clone(), "a 1".to_owned())]);
    scene.network.cut(&address(&name));
    dead.cluster.abandon();
    scene.takes.send_replace(MILLISECOND);
    let unknown = first.await.expect_err("nobody can tell");
    assert!(matches!(unknown, AskError::Unknown { .. }), "{unknown:?}");
    assert_eq!(unknown.effect(), Effect::Unknown);
    let answer = second.await.expect("it waited, and the next owner handles it");
    assert!(!answer.starts_with(name.as_bytes()));
    let handled = scene.ledger.of(shard);
    assert_eq!(handled.iter().map(|(_, what)| what.as_str()).collect::<Vec<_>>(), ["a 1", "a 2"]);
}

#[tokio::test(start_paused = true)]
async fn a_lost_answer_is_given_again_and_the_message_not_handled_again() {
    let scene = Scene::new(Handoff::Exclusive);
    let nodes = scene.nodes(&["n1", "n2"]).await;
    let shard = nodes[1].shard();
    // Its start is not over yet, so "not here" is lost, too.
    scene.network.lose_answers(&address(&nodes[1].name()), 3);
    let asked: Vec<_> =
        (1..=3).map(|number| nodes[0].ask(shard, format!("a {number}"), MINUTE)).collect();
    for (answer, number) in join_all(asked).await.into_iter().zip(1..) {
        assert_eq!(answer.expect("answered"), format!("{} a {number}", nodes[1].name()));
    }
    assert_eq!(scene.ledger.of(shard).len(), 3);
    // And where it is hosted.
    scene.network.lose_answers(&address(&nodes[1].name()), 3);
    let asked: Vec<_> =
        (4..=6).map(|number| nodes[0].ask(shard, format!("a {number}"), MINUTE)).collect();
    for (answer, number) in join_all(asked).await.into_iter().zip(4..) {
        assert_eq!(answer.expect("answered"), format!("{} a {number}", nodes[1].name()));
    }
    assert_eq!(scene.ledger.of(shard).len(), 6);
    scene.ledger.check();
}

#[tokio::test(start_paused = true)]
async fn a_host_past_its_deadline_handles_nothing() {
    let scene = Scene::new(Handoff::Exclusive);
    let mut nodes = scene.nodes(&["n1", "n2", "n3"]).await;
    let leads = nodes.iter().position(|node| node.cluster.is_leader()).expect("one leads");
    let stale = nodes.remove((leads + 1) % 3);
    let (shard, name) = (stale.shard(), stale.name());
    // It was paused for longer than its registration lasts, and nothing of it has run since.
    stale.store.cut(Effect::Unknown);
    *stale.clock.ahead.lock().expect("not poisoned") = scene.settings.node_ttl;
    let asked: Vec<_> =
        (1..=3).map(|number| nodes[0].ask(shard, format!("a {number}"), MINUTE)).collect();
    let own = stale.ask(shard, "b 1", 2 * SECOND).await.expect_err("its own messages, too");
    assert_eq!(own.effect(), Effect::None, "{own:?}");
    for answer in join_all(asked).await {
        answer.expect("the next owner handles it");
    }
    assert!(scene.ledger.of(shard).iter().all(|(node, _)| *node != name));
    scene.ledger.check();
}

#[tokio::test(start_paused = true)]
async fn what_is_handled_for_longer_than_the_stop_budget_does_not_hold_up_a_move() {
    let mut scene = Scene::new(Handoff::Exclusive);
    scene.settings.stop_budget = Some(SECOND);
    let mut nodes = scene.nodes(&["n1", "n2", "n3"]).await;
    let leaving = nodes.remove(0);
    let shard = leaving.shard();
    scene.takes.send_replace(MINUTE);
    let first = nodes[0].ask(shard, "a 1", MINUTE);
    tokio::time::sleep(100 * MILLISECOND).await;
    scene.takes.send_replace(MILLISECOND);
    let second = nodes[0].ask(shard, "a 2", MINUTE);
    leaving.cluster.leave().await.expect("leaves in order");
    let dropped = first.await.expect_err("it was dropped");
    assert_eq!(dropped.effect(), Effect::Unknown, "{dropped:?}");
    second.await.expect("the next owner handles it");
    scene.ledger.check();
}

#[tokio::test(start_paused = true)]
async fn an_ask_ends_at_once_where_the_address_of_the_owner_is_that_of_another_node() {
    let scene = Scene::new(Handoff::Exclusive);
    let nodes = [scene.start("n1").await, scene.start_at("n2", address("n1")).await];
    for node in &nodes {
        settled(node, 2).await;
    }
    let shard = nodes[1].shard();
    let began = Instant::now();
    let asked: Vec<_> =
        (1..=100).map(|number| nodes[0].ask(shard, format!("a {number}"), MINUTE)).collect();
    for answer in join_all(asked).await {
        let error = answer.expect_err("n1 is no owner");
        assert!(matches!(error, AskError::Misdirected { .. }), "{error:?}");
        assert_eq!(error.effect(), Effect::None);
        assert!(error.to_string().contains("node n1 answers there, and not node n2"), "{error}");
    }
    // A way there each, and no pause.
    assert!(began.elapsed() < SECOND, "{:?}", began.elapsed());
    let own = nodes[1].ask(shard, "b 1", SECOND).await.expect("it needs no address for itself");
    assert_eq!(own, "n2 b 1");
    assert_eq!(scene.ledger.of(shard).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_registers_again_in_its_process_is_asked_as_its_new_run() {
    let scene = Scene::new(Handoff::Exclusive);
    let nodes = scene.nodes(&["n1", "n2", "n3"]).await;
    let leads = nodes.iter().position(|node| node.cluster.is_leader()).expect("one leads");
    let (asks, away) = (&nodes[leads], &nodes[(leads + 1) % 3]);
    let (shard, name) = (away.shard(), away.name());
    let former = away.cluster.status().registered;
    let handled = |number| asks.ask(shard, format!("a {number}"), MINUTE);
    handled(1).await.expect("it is hosted");
    away.store.cut(Effect::Unknown);
    let asked: Vec<_> = (2..=5).map(handled).collect();
    tokio::time::sleep(scene.settings.node_ttl * 2).await;
    away.store.heal();
    for answer in join_all(asked).await {
        answer.expect("its owner then, or the next one, handles it");
    }
    // Until who asks sees that the new run owns shards, and nothing moves.
    let owned = || {
        let (map, now) = (map(&asks.cluster), away.cluster.status().registered);
        let owner = |shard: &ShardId| map.owner(*shard).map(|owner| owner.incarnation);
        let back = now.is_some() && now != former;
        map.header().shards.shards().find(|shard| back && owner(shard) == now)
    };
    until(&asks.cluster, |status| status.is_settled() && owned().is_some()).await;
    let shard = owned().expect("it owns some");
    let answer = asks.ask(shard, "a 6", MINUTE).await.expect("it is hosted");
    assert_eq!(answer, format!("{name} a 6"));
    scene.ledger.check();
}

#[tokio::test(start_paused = true)]
async fn what_waits_for_one_shard_goes_out_together() {
    let scene = Scene::new(Handoff::Exclusive);
    let nodes = scene.nodes(&["n1", "n2"]).await;
    scene.takes.send_replace(Duration::ZERO);
    let shard = nodes[1].shard();
    let began = Instant::now();
    let asked: Vec<_> =
        (1..=200).map(|number| nodes[0].ask(shard, format!("a {number}"), MINUTE)).collect();
    for answer in join_all(asked).await {
        answer.expect("answered");
    }
    // 1, 2, 4, 8, 16 and then 32 at a time: 11 ways there and back. One at a time it were 200.
    assert!(began.elapsed() < 200 * 2 * MILLISECOND / 4, "{:?}", began.elapsed());
    assert_eq!(scene.ledger.of(shard).len(), 200);
    scene.ledger.check();
    // A slow handler's first answers do not wait for the last ones.
    scene.takes.send_replace(SECOND);
    let asked: Vec<_> =
        (201..=210).map(|number| nodes[0].ask(shard, format!("a {number}"), MINUTE)).collect();
    let began = Instant::now();
    for (asked, number) in asked.into_iter().zip(1..) {
        asked.await.expect("answered");
        let late = began.elapsed() - number * SECOND;
        assert!(late < 100 * MILLISECOND, "answer {number} came {late:?} late");
    }
}

#[tokio::test(start_paused = true)]
async fn in_order_and_at_most_once_while_answers_are_lost_and_the_shard_moves() {
    let scene = Scene::new(Handoff::Exclusive);
    let mut nodes = scene.nodes(&["n1", "n2", "n3"]).await;
    scene.takes.send_replace(MILLISECOND);
    let leaving = nodes.remove(1);
    let shard = leaving.shard();
    let asked: Vec<_> =
        (1..=600).map(|number| nodes[0].ask(shard, format!("a {number}"), MINUTE)).collect();
    let leaves = async {
        for _ in 0..20 {
            scene.network.lose_answers(&address(&leaving.name()), 1);
            tokio::time::sleep(10 * MILLISECOND).await;
        }
        leaving.cluster.leave().await.expect("leaves in order");
    };
    let (answers, ()) = tokio::join!(join_all(asked), leaves);
    scene.ledger.check();
    let handled = scene.ledger.of(shard);
    let by_leaving = handled.iter().filter(|(node, _)| *node == leaving.name()).count();
    assert!(by_leaving > 0 && by_leaving < handled.len(), "it moved under way: {by_leaving}");
    for (answer, number) in answers.into_iter().zip(1..) {
        let what = format!("a {number}");
        let by = handled.iter().find(|(_, handled)| *handled == what).map(|(node, _)| node);
        match answer {
            Ok(answer) => assert_eq!(answer, format!("{} {what}", by.expect("handled"))),
            Err(error) => assert_eq!(error.effect(), Effect::Unknown, "{what}: {error}"),
        }
    }
}

#[test]
fn metrics_tell_what_waits_and_what_became_of_it() {
    Metrics::run(async |metrics| {
        let mut scene = Scene::new(Handoff::Exclusive);
        scene.limits = scene.limits.with_lane_max(3);
        let mut nodes = scene.nodes(&["n1", "n2"]).await;
        let (asked, taken) = ("cluster_mailbox_asked", "cluster_mailbox_taken");
        let buffered = || metrics.gauge("cluster_mailbox_buffered");
        let shard = nodes[1].shard();
        nodes[0].ask(shard, "b 1", MINUTE).await.expect("it is hosted");
        assert!(metrics.count(&format!("{taken}{{not_here}}")) > 0, "it was not at first");
        let waiting: Vec<_> =
            (1..=3).map(|number| nodes[0].ask(shard, format!("a {number}"), MINUTE)).collect();
        nodes[0].ask(shard, "a 4", MINUTE).await.expect_err("full");
        assert_eq!((buffered(), metrics.count(&format!("{asked}{{buffer_full}}"))), (3.0, 1));
        scene.network.lose_answers(&address(&nodes[1].name()), 1);
        for answer in join_all(waiting).await {
            answer.expect("answered");
        }
        assert_eq!((buffered(), metrics.count(&format!("{asked}{{answered}}"))), (0.0, 4));
        assert_eq!(metrics.count(&format!("{taken}{{answered}}")), 4);
        assert_eq!(metrics.count(&format!("{taken}{{repeated}}")), 1);
        // Its host dies with one, and another waits and is given up.
        scene.takes.send_replace(MINUTE);
        let dead = nodes.remove(1);
        let unknown = nodes[0].ask(shard, "a 5", SECOND);
        let never = nodes[0].ask(shard, "a 6", SECOND);
        let dropped = nodes[0].ask(shard, "a 7", MINUTE);
        tokio::time::sleep(100 * MILLISECOND).await;
        assert_eq!(buffered(), 3.0);
        drop(dropped);
        scene.network.cut(&address(&dead.name()));
        dead.cluster.abandon();
        assert_eq!(unknown.await.expect_err("it died").effect(), Effect::Unknown);
        assert_eq!(never.await.expect_err("it waited").effect(), Effect::None);
        // The lane learns of it by its own timer.
        tokio::time::sleep(SECOND).await;
        assert_eq!(buffered(), 0.0);
        assert_eq!(metrics.count(&format!("{asked}{{unknown}}")), 1);
        assert_eq!(metrics.count(&format!("{asked}{{not_delivered}}")), 1);
    });
}

#[tokio::test(start_paused = true)]
async fn a_handler_needs_a_transport_and_a_mailbox_a_table() {
    let scene = Scene::new(Handoff::Exclusive);
    let handler =
        Noting { node: "n1".to_owned(), ledger: Arc::default(), takes: scene.takes.subscribe() };
    let builder = Cluster::builder(&scene.store, NodeInfo::new(id("n1"), address("n1")));
    let error = builder
        .table(Table::new(table()).handler(Arc::new(handler)))
        .start()
        .await
        .expect_err("no transport");
    assert!(error.to_string().contains("needs a transport"), "{error}");
    let node = scene.start("n1").await;
    assert!(node.cluster.mailbox(&table()).is_ok());
    let other = coord_core::TableName::new("other").expect("name");
    assert!(node.cluster.mailbox(&other).is_err());
}
