//! Code of a shard that goes on although its time is up: while it does, the shard has no other host.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::pin::Pin;
use std::process::{Command as Process, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_cluster::transport::MemoryNetwork;
use coord_cluster::{
    Cluster, Command, EventKind, Handler, Host, HostError, Mail, Settings, ShardFence, Table,
};
use coord_core::{Address, Backend, MemoryBackend, NodeInfo, ShardCount, ShardId, TokioClock};
use futures::FutureExt;
use tokio::runtime::{Handle as Runtime, RuntimeFlavor};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::common::{LIMIT, id, info, kinds, map, shares, store, table, until};

const SHARDS: u32 = 8;
const SECOND: Duration = Duration::from_secs(1);

/// Work that was begun, and neither goes on nor is dropped: as one that is under way on another thread and
/// does not give way to the runtime.
struct Left {
    _work: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl fmt::Debug for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Left")
    }
}

/// What all hosts of a test did, and what they have left behind.
#[derive(Debug, Default)]
struct World {
    starts: Mutex<Vec<(String, ShardId, Instant)>>,
    stops: Mutex<BTreeMap<(String, ShardId), Instant>>,
    left: Mutex<BTreeMap<(String, ShardId), Left>>,
    /// Whose hosts leave work behind.
    leaves: Mutex<Option<&'static str>>,
    /// How long a stop takes.
    stops_in: Mutex<Duration>,
}

impl World {
    fn starts_since(&self, since: Instant) -> Vec<(String, ShardId, Instant)> {
        let starts = self.starts.lock().expect("not poisoned");
        starts.iter().filter(|(_, _, at)| *at >= since).cloned().collect()
    }

    fn left(&self) -> BTreeSet<ShardId> {
        self.left.lock().expect("not poisoned").keys().map(|(_, shard)| *shard).collect()
    }

    async fn start(self: &Arc<Self>, store: &MemoryBackend, name: &str) -> Cluster {
        let host = Leaving { node: name.to_owned(), world: Arc::clone(self) };
        Cluster::builder(&store.reopen(), info(name))
            .settings(Settings::fast())
            .table(
                Table::new(table())
                    .shards(ShardCount::new(SHARDS).expect("count"))
                    .host(Arc::new(host)),
            )
            .clock(Arc::new(TokioClock::new()))
            .start()
            .await
            .expect("starts")
    }

    /// n1, which leads, and n2, with four shards each that all run.
    async fn two(self: &Arc<Self>, store: &MemoryBackend) -> (Cluster, Cluster) {
        let first = self.start(store, "n1").await;
        until(&first, |status| shares(status) == [8]).await;
        let second = self.start(store, "n2").await;
        for node in [&first, &second] {
            until(node, |status| shares(status) == [4, 4]).await;
        }
        let started = async {
            let by_second = || {
                let starts = self.starts.lock().expect("not poisoned");
                starts.iter().filter(|(node, ..)| node == "n2").count()
            };
            while by_second() < 4 {
                tokio::time::sleep(SECOND / 100).await;
            }
        };
        tokio::time::timeout(LIMIT, started).await.expect("n2 starts its shards");
        // What is started later is later by the clock, too.
        tokio::time::sleep(SECOND).await;
        (first, second)
    }
}

#[derive(Debug)]
struct Leaving {
    node: String,
    world: Arc<World>,
}

#[async_trait]
impl Host for Leaving {
    async fn start(&self, shard: ShardId, fence: ShardFence) -> Result<(), HostError> {
        let start = (self.node.clone(), shard, Instant::now());
        self.world.starts.lock().expect("not poisoned").push(start);
        if *self.world.leaves.lock().expect("not poisoned") == Some(self.node.as_str()) {
            let mut work: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
                fence.run(std::future::pending::<()>()).await;
            });
            assert!((&mut work).now_or_never().is_none(), "it has begun");
            let key = (self.node.clone(), shard);
            self.world.left.lock().expect("not poisoned").insert(key, Left { _work: work });
        }
        Ok(())
    }

    async fn stop(&self, shard: ShardId) {
        let stops_in = *self.world.stops_in.lock().expect("not poisoned");
        tokio::time::sleep(stops_in).await;
        let key = (self.node.clone(), shard);
        self.world.stops.lock().expect("not poisoned").insert(key, Instant::now());
    }
}

async fn declare_failed(by: &Cluster, name: &str) {
    let failed = Command::MarkNodeFailed { node: id(name), why: "a test".to_owned() };
    assert!(by.request(failed).await.expect("asked").is_done());
}

#[tokio::test(start_paused = true)]
async fn the_next_incarnation_confirms_no_stop_while_hosts_still_stop() {
    let (store, world) = (store(), Arc::<World>::default());
    let (first, second) = world.two(&store).await;
    *world.stops_in.lock().expect("not poisoned") = 3 * SECOND;
    let record = async || {
        let nodes = store.discovery().nodes().await.expect("answers");
        nodes.into_iter().find(|node| node.info.id == id("n2"))
    };
    let lost = record().await.expect("registered").info.incarnation;
    world.stops.lock().expect("not poisoned").clear();
    declare_failed(&first, "n2").await;
    let confirmed = async {
        loop {
            tokio::time::sleep(SECOND / 100).await;
            let stopped = world.stops.lock().expect("not poisoned").len();
            match record().await {
                Some(node) if node.info.incarnation != lost => return (node, stopped),
                _ => {}
            }
        }
    };
    let (next, stopped) = tokio::time::timeout(LIMIT, confirmed).await.expect("it joins again");
    assert!(next.info.ended.contains(&lost), "{:?}", next.info);
    assert_eq!(stopped, 4, "what it confirms is so");
    until(&second, |status| status.is_settled() && shares(status) == [4, 4]).await;
}

#[tokio::test(start_paused = true)]
async fn the_next_incarnation_confirms_no_stop_while_work_is_left_and_does_not_start_again() {
    let (store, world) = (store(), Arc::<World>::default());
    *world.leaves.lock().expect("not poisoned") = Some("n2");
    let (first, second) = world.two(&store).await;
    *world.leaves.lock().expect("not poisoned") = None;
    let left = world.left();
    assert_eq!(left.len(), 4);
    let began = Instant::now();
    declare_failed(&first, "n2").await;
    let ttl = Settings::fast().node_ttl;
    tokio::time::sleep_until(began + ttl - SECOND / 2).await;
    assert_eq!(world.starts_since(began), [], "its work is left");
    assert_eq!(second.status().count(coord_core::NodeStatus::Active), 2, "it has joined again");
    // By now nobody waits for the lost incarnation any more, and its successor has some of its shards.
    tokio::time::sleep(60 * SECOND).await;
    let mine: BTreeSet<ShardId> = map(&first).shards_of(&id("n2")).collect();
    assert!(mine.intersection(&left).count() > 0, "{mine:?} {left:?}");
    let by_second = |(node, shard, _): &(String, ShardId, Instant)| {
        (node == "n2" && left.contains(shard)).then_some(*shard)
    };
    let started =
        || world.starts_since(began).iter().filter_map(by_second).collect::<BTreeSet<_>>();
    assert_eq!(started(), BTreeSet::new(), "the same process does not start them again");
    world.left.lock().expect("not poisoned").clear();
    tokio::time::sleep(SECOND).await;
    assert_eq!(started(), &mine & &left);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_while_work_is_left_leaves_the_registration_to_its_ttl() {
    let (store, world) = (store(), Arc::<World>::default());
    *world.leaves.lock().expect("not poisoned") = Some("n2");
    let (first, second) = world.two(&store).await;
    let began = Instant::now();
    second.shutdown().await.expect("it ends all the same");
    assert!(began.elapsed() < Settings::fast().node_ttl / 2, "{:?}", began.elapsed());
    let moved = async {
        while world.starts_since(began).len() < 4 {
            tokio::time::sleep(SECOND / 100).await;
        }
    };
    tokio::time::timeout(LIMIT, moved).await.expect("the others take them in the end");
    let least = Settings::fast().node_ttl - Settings::fast().heartbeat - SECOND;
    for (node, shard, at) in world.starts_since(began) {
        assert!(at - began > least, "{node} started {shard} after {:?}", at - began);
    }
    drop(first);
}

/// Works on in `handle` without giving way to the runtime, for as long as it is told to.
#[derive(Debug)]
struct Blocking {
    node: &'static str,
    works: Arc<AtomicBool>,
    goes_on: Arc<AtomicBool>,
    starts: Arc<Mutex<Vec<(&'static str, bool)>>>,
}

#[async_trait]
impl Host for Blocking {
    async fn start(&self, _shard: ShardId, _fence: ShardFence) -> Result<(), HostError> {
        let works = self.works.load(Ordering::SeqCst);
        self.starts.lock().expect("not poisoned").push((self.node, works));
        Ok(())
    }

    async fn stop(&self, _shard: ShardId) {}
}

#[async_trait]
impl Handler for Blocking {
    async fn handle(&self, mail: Mail) -> Bytes {
        if Runtime::current().runtime_flavor() == RuntimeFlavor::MultiThread {
            // Its task does not give way, but another thread takes over this worker's tasks and timers. A
            // runtime whose one awake worker is blocked looks at no timer, neither at those of this test.
            tokio::task::block_in_place(|| self.work());
        } else {
            self.work();
        }
        mail.payload
    }
}

impl Blocking {
    fn work(&self) {
        self.works.store(true, Ordering::SeqCst);
        // Bounded: a test that fails must end, too.
        for _ in 0..12_000 {
            if !self.goes_on.load(Ordering::SeqCst) {
                break;
            }
            std::thread::park_timeout(SECOND / 100);
        }
        self.works.store(false, Ordering::SeqCst);
    }
}

/// A node with one shard, whose handler works on until it is told not to.
struct Blocked {
    store: MemoryBackend,
    network: MemoryNetwork,
    works: Arc<AtomicBool>,
    goes_on: Arc<AtomicBool>,
    starts: Arc<Mutex<Vec<(&'static str, bool)>>>,
    tasks: TaskTracker,
}

impl Blocked {
    fn new() -> Self {
        Self {
            store: store(),
            network: MemoryNetwork::new(),
            works: Arc::default(),
            goes_on: Arc::new(AtomicBool::new(true)),
            starts: Arc::default(),
            tasks: TaskTracker::new(),
        }
    }

    async fn start(&self, name: &'static str, settings: Settings) -> Cluster {
        let address = Address::new(format!("{name}:4000")).expect("address");
        let handler = Blocking {
            node: name,
            works: Arc::clone(&self.works),
            goes_on: Arc::clone(&self.goes_on),
            starts: Arc::clone(&self.starts),
        };
        Cluster::builder(&self.store.reopen(), NodeInfo::new(id(name), address.clone()))
            .settings(settings)
            .table(
                Table::new(table())
                    .shards(ShardCount::new(1).expect("count"))
                    .handler(Arc::new(handler)),
            )
            .transport(Arc::new(self.network.transport(address)))
            .start()
            .await
            .expect("starts")
    }

    /// Waits until the handler of this node's shard works.
    async fn occupy(&self, node: &Cluster) {
        until(node, |status| shares(status).contains(&1)).await;
        let mailbox = node.mailbox(&table()).expect("has one");
        self.tasks.spawn(mailbox.ask_shard(ShardId::new(0), "go", LIMIT));
        let works = async {
            while !self.works.load(Ordering::SeqCst) {
                tokio::time::sleep(SECOND / 100).await;
            }
        };
        tokio::time::timeout(30 * SECOND, works).await.expect("the handler works");
    }

    /// Whether any start found the handler at work.
    fn overlaps(&self) -> bool {
        self.starts.lock().expect("not poisoned").iter().any(|(_, works)| *works)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_handler_that_works_on_at_a_shutdown_has_its_shard_for_itself() {
    let scene = Blocked::new();
    let first = scene.start("n1", Settings::fast()).await;
    scene.occupy(&first).await;
    let second = scene.start("n2", Settings::fast()).await;
    first.shutdown().await.expect("it ends all the same");
    // Its deregistration would have been seen by now.
    until(&second, |status| status.leader.as_ref().is_some_and(|leader| leader.node == id("n2")))
        .await;
    tokio::time::sleep(SECOND).await;
    assert_eq!(*scene.starts.lock().expect("not poisoned"), [("n1", false)]);
    assert!(scene.works.load(Ordering::SeqCst), "it still works");
    scene.goes_on.store(false, Ordering::SeqCst);
    until(&second, |status| {
        status.is_settled() && status.member(&id("n2")).is_some_and(|m| m.shards == 1)
    })
    .await;
    assert!(!scene.overlaps());
    second.shutdown().await.expect("ends");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_handler_that_works_on_past_the_deadline_is_not_joined_by_another_start() {
    let scene = Blocked::new();
    let node = scene.start("n1", Settings::demo()).await;
    scene.occupy(&node).await;
    let mut events = node.events();
    declare_failed(&node, "n1").await;
    // The lost incarnation's TTL passes, its successor owns the shard, and has for a while.
    until(&node, |status| status.is_settled() && shares(status) == [1]).await;
    let joined = |kind: &EventKind| matches!(kind, EventKind::NodeJoined { .. });
    tokio::time::sleep(2 * Settings::demo().node_ttl).await;
    let kinds = kinds(&mut events);
    assert!(kinds.iter().any(joined), "it has joined again: {kinds:?}");
    assert_eq!(*scene.starts.lock().expect("not poisoned"), [("n1", false)]);
    scene.goes_on.store(false, Ordering::SeqCst);
    let again = async {
        while scene.starts.lock().expect("not poisoned").len() < 2 {
            tokio::time::sleep(SECOND / 100).await;
        }
    };
    tokio::time::timeout(30 * SECOND, again).await.expect("it is started once that one has ended");
    assert!(!scene.overlaps());
    node.shutdown().await.expect("ends");
}

const CHILD: &str = "COORD_TEST_BLOCKS";

/// The test's own program is the process that is to end.
#[cfg(unix)]
#[test]
fn a_process_that_may_not_outlive_its_deadline_ends_whatever_its_threads_do() {
    use std::os::unix::process::ExitStatusExt as _;

    if std::env::var_os(CHILD).is_some() {
        // The only thread of this runtime is the one that the handler keeps.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let scene = Blocked::new();
            let mut settings = Settings::demo();
            settings.exit_at_deadline = true;
            let node = scene.start("n1", settings).await;
            scene.occupy(&node).await;
        });
        return;
    }
    let name = std::thread::current().name().expect("a test has a name").to_owned();
    let mut child = Process::new(std::env::current_exe().expect("this program"))
        .args(["--exact", &name, "--nocapture"])
        .env(CHILD, "1")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("starts");
    let status = child.wait().expect("it ends: its handler is bounded");
    assert_eq!(status.signal(), Some(6), "it is aborted: {status:?}");
}
