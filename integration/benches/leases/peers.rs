//! Other crates for leases.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use ash_lock::{EtcdBackend, LockBackend, LockClient, LockConfig, LockGuard};
use async_trait::async_trait;
use futures::future::join_all;
use futures::{StreamExt as _, stream};
use noleader::{Leader, Status};
use photon_etcd_cluster::ClusterNode;
use rslock::{Lock, LockManager};
use tokio::sync::broadcast;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::contender::{Contender, Fleet, Held};
use crate::store::Store;
use crate::{SETUP_MAX, spawn};

/// How often a flag is looked at that says who leads.
const LOOK: Duration = Duration::from_millis(1);

pub(crate) struct AshLock(Arc<EtcdBackend>);

impl AshLock {
    pub(crate) async fn connect(addresses: &[String]) -> Self {
        Self(Arc::new(EtcdBackend::connect(addresses, None).await.expect("connects")))
    }
}

#[async_trait]
impl Contender for AshLock {
    async fn acquire(&self, lease: &str, ttl: Duration) -> Box<dyn Held> {
        let config =
            LockConfig { cluster_seed: Vec::new(), default_ttl: ttl, watchdog_interval: ttl / 3 };
        let client = LockClient::connect_with(config, self.0.clone()).await.expect("connects");
        loop {
            // It polls for one TTL, and then gives up.
            if let Ok(guard) = client.lock(lease).await.acquire().await {
                return Box::new(AshLocked(guard));
            }
        }
    }

    async fn fleet(&self, prefix: &str, size: usize, ttl: Duration) -> Option<Box<dyn Fleet>> {
        let acquires = (0..size).map(|n| {
            let backend = Arc::clone(&self.0);
            async move {
                let name = format!("{prefix}-{n}");
                let (token, _) = backend.try_acquire(&name, ttl).await.expect("free");
                (name, token)
            }
        });
        let held = stream::iter(acquires).buffer_unordered(SETUP_MAX).collect().await;
        Some(Box::new(AshFleet { backend: Arc::clone(&self.0), held, ttl }))
    }
}

struct AshLocked(LockGuard);

#[async_trait]
impl Held for AshLocked {
    async fn release(self: Box<Self>) {
        self.0.unlock().await.expect("unlocked");
    }
}

struct AshFleet {
    backend: Arc<EtcdBackend>,
    held: Vec<(String, u64)>,
    ttl: Duration,
}

#[async_trait]
impl Fleet for AshFleet {
    async fn renew_all(&mut self) {
        let Self { backend, held, ttl } = self;
        let (backend, ttl) = (&*backend, *ttl);
        let renewals = held.iter().map(|(name, token)| async move {
            backend.try_renew(name, *token, ttl).await.expect("renewed");
        });
        join_all(renewals).await;
    }
}

/// A node of a cluster that elects: it connects anew for each.
pub(crate) struct Photon(Vec<String>);

impl Photon {
    pub(crate) fn new(addresses: &[String]) -> Self {
        Self(addresses.iter().map(|address| format!("http://{address}")).collect())
    }
}

#[async_trait]
impl Contender for Photon {
    async fn acquire(&self, lease: &str, ttl: Duration) -> Box<dyn Held> {
        let id = format!("node-{}", coord::Incarnation::random());
        let seconds = i64::try_from(ttl.as_secs()).expect("short");
        let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let node = ClusterNode::new(self.0.clone(), id, ip, lease.to_owned(), Some(seconds));
        let (shutdown, mut ended) = broadcast::channel(1);
        let running = node.clone();
        let task = spawn(async move {
            running.run(&mut ended).await.expect("runs");
        });
        while !node.is_leader() {
            sleep(LOOK).await;
        }
        Box::new(PhotonNode { shutdown, task })
    }
}

struct PhotonNode {
    shutdown: broadcast::Sender<()>,
    task: AbortOnDropHandle<()>,
}

#[async_trait]
impl Held for PhotonNode {
    async fn release(self: Box<Self>) {
        self.shutdown.send(()).expect("it runs");
        self.task.await.expect("no panic");
    }
}

/// A lock that nothing renews: its caller has to.
pub(crate) struct RsLock(LockManager);

impl RsLock {
    pub(crate) fn new(addresses: &[String]) -> Self {
        Self(LockManager::new(vec![format!("redis://{}/", addresses[0])]))
    }
}

#[async_trait]
impl Contender for RsLock {
    async fn acquire(&self, lease: &str, ttl: Duration) -> Box<dyn Held> {
        let lock = Arc::new(self.0.acquire_no_guard(lease, ttl).await.expect("locked"));
        let (manager, kept) = (self.0.clone(), Arc::clone(&lock));
        let renews = spawn(async move {
            loop {
                sleep(ttl / 3).await;
                manager.extend(&kept, ttl).await.expect("extended");
            }
        });
        Box::new(RsLocked { manager: self.0.clone(), lock, _renews: renews })
    }

    async fn fleet(&self, prefix: &str, size: usize, ttl: Duration) -> Option<Box<dyn Fleet>> {
        let locks = (0..size).map(|n| {
            let name = format!("{prefix}-{n}");
            async move { self.0.lock(name.as_str(), ttl).await.expect("free") }
        });
        let locks = stream::iter(locks).buffer_unordered(SETUP_MAX).collect().await;
        Some(Box::new(RsLocks { manager: self.0.clone(), locks, ttl }))
    }
}

struct RsLocked {
    manager: LockManager,
    lock: Arc<Lock>,
    _renews: AbortOnDropHandle<()>,
}

#[async_trait]
impl Held for RsLocked {
    async fn release(self: Box<Self>) {
        self.manager.unlock(&self.lock).await;
    }
}

struct RsLocks {
    manager: LockManager,
    locks: Vec<Lock>,
    ttl: Duration,
}

#[async_trait]
impl Fleet for RsLocks {
    async fn renew_all(&mut self) {
        let Self { manager, locks, ttl } = self;
        let (manager, ttl) = (&*manager, *ttl);
        let renewals: Vec<_> = locks.iter().map(|lock| manager.extend(lock, ttl)).collect();
        // Its client gives up after half a second, too early for thousands of requests at once.
        let renewed: Vec<_> = stream::iter(renewals).buffer_unordered(SETUP_MAX).collect().await;
        for renewed in renewed {
            renewed.expect("extended");
        }
    }
}

/// Seconds until a first candidate leads, and from its end until the next one does. Times are fixed in the
/// crate: a TTL of 60 s, polls every 0 to 10 s and longer after each failure, 10 s between write and lead.
pub(crate) async fn noleader(store: &Store, limit: Duration) -> (f64, Option<f64>) {
    let client = async_nats_042::connect(format!("nats://{}", store.addresses().join(",")))
        .await
        .expect("connects");
    let candidate = || Leader::new("noleader", "bench", client.clone());
    let leads = |leader: Leader| async move {
        let started = Instant::now();
        while !matches!(leader.is_leader().await, Status::Leader) {
            sleep(LOOK * 10).await;
        }
        started.elapsed().as_secs_f64()
    };
    let start =
        |leader: Leader, stop: CancellationToken| spawn(async move { leader.start(stop).await });
    let (first, second) = (candidate(), candidate());
    first.create_bucket().await.expect("a bucket");
    let (stop, end) = (CancellationToken::new(), CancellationToken::new());
    let _first = start(first.clone(), stop.clone());
    let acquired = leads(first).await;
    let _second = start(second.clone(), end.clone());
    stop.cancel();
    let handed = tokio::time::timeout(limit, leads(second)).await.ok();
    end.cancel();
    (acquired, handed)
}
