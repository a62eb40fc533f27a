//! The etcd client by itself, its own lock and election, and etcdctl.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use async_trait::async_trait;
use etcd_client::{
    Client, Compare, CompareOp, EventType, LeaseKeepAliveStream, LeaseKeeper, LockOptions,
    PutOptions, ResignOptions, Txn, TxnOp, WatchOptions,
};
use futures::future::join_all;
use futures::{StreamExt as _, stream};
use tokio_util::task::AbortOnDropHandle;

use crate::contender::{Contender, Fleet, Held};
use crate::{SETUP_MAX, spawn};

async fn client(addresses: &[String]) -> Client {
    Client::connect(addresses, None).await.expect("connects")
}

fn seconds(ttl: Duration) -> i64 {
    i64::try_from(ttl.as_secs()).expect("short")
}

/// Renews an etcd lease every third of its TTL until it is dropped.
fn kept(client: &Client, lease: i64, ttl: Duration) -> AbortOnDropHandle<()> {
    let mut client = client.clone();
    spawn(async move {
        tokio::time::sleep(ttl / 3).await;
        let (mut keeper, mut answers) = client.lease_keep_alive(lease).await.expect("kept");
        loop {
            tokio::time::sleep(ttl / 3).await;
            keeper.keep_alive().await.expect("sent");
            answers.message().await.expect("answered");
        }
    })
}

/// The least that a lease takes: an etcd lease, and a transaction that binds a key to it; a watch on the key
/// for who waits. No deadline, no attempt, no check that the key is still there.
pub(crate) struct Raw(Client);

impl Raw {
    pub(crate) async fn connect(addresses: &[String]) -> Self {
        Self(client(addresses).await)
    }
}

#[async_trait]
impl Contender for Raw {
    async fn acquire(&self, lease: &str, ttl: Duration) -> Box<dyn Held> {
        let mut client = self.0.clone();
        loop {
            let id = client.lease_grant(seconds(ttl), None).await.expect("granted").id();
            let free = Compare::create_revision(lease, CompareOp::Equal, 0);
            let put = TxnOp::put(lease, "bench", Some(PutOptions::new().with_lease(id)));
            let answer =
                client.txn(Txn::new().when([free]).and_then([put])).await.expect("answers");
            if answer.succeeded() {
                let kept = kept(&client, id, ttl);
                return Box::new(RawHeld { client, lease: id, _kept: kept });
            }
            client.lease_revoke(id).await.expect("revoked");
            let revision = answer.header().expect("a header").revision();
            let from = WatchOptions::new().with_start_revision(revision + 1);
            let mut changes = client.watch(lease, Some(from)).await.expect("watches");
            'changes: loop {
                let batch = changes.message().await.expect("watches").expect("goes on");
                for event in batch.events() {
                    if event.event_type() == EventType::Delete {
                        break 'changes;
                    }
                }
            }
        }
    }

    async fn fleet(&self, prefix: &str, size: usize, ttl: Duration) -> Option<Box<dyn Fleet>> {
        let leases = bound(&self.0, prefix, size, ttl).await;
        let opened = self.0.clone().lease_keep_alive(leases[0]).await.expect("opens");
        Some(Box::new(RawFleet { leases, opened }))
    }
}

struct RawHeld {
    client: Client,
    lease: i64,
    _kept: AbortOnDropHandle<()>,
}

#[async_trait]
impl Held for RawHeld {
    async fn release(mut self: Box<Self>) {
        self.client.lease_revoke(self.lease).await.expect("revoked");
    }
}

/// So many etcd leases, each with a key.
async fn bound(client: &Client, prefix: &str, size: usize, ttl: Duration) -> Vec<i64> {
    let grants = (0..size).map(|n| {
        let mut client = client.clone();
        let key = format!("{prefix}-{n}");
        async move {
            let id = client.lease_grant(seconds(ttl), None).await.expect("granted").id();
            let options = PutOptions::new().with_lease(id);
            client.put(key, "bench", Some(options)).await.expect("put");
            id
        }
    });
    stream::iter(grants).buffer_unordered(SETUP_MAX).collect().await
}

/// All on one stream, one message each, sent without waiting for the answers.
struct RawFleet {
    leases: Vec<i64>,
    opened: (LeaseKeeper, LeaseKeepAliveStream),
}

#[async_trait]
impl Fleet for RawFleet {
    async fn renew_all(&mut self) {
        let (keeper, answers) = &mut self.opened;
        let send = async {
            for lease in &self.leases {
                keeper.id = *lease;
                keeper.keep_alive().await.expect("sent");
            }
        };
        let receive = async {
            for _ in &self.leases {
                let answer = answers.message().await.expect("answered").expect("goes on");
                assert!(answer.ttl() > 0, "an etcd lease is gone");
            }
        };
        tokio::join!(send, receive);
    }
}

/// The same, and the key of each lease is read, each by a request of its own: what the raw client takes to
/// notice as much as coord does.
pub(crate) struct RawChecked(pub(crate) Raw);

#[async_trait]
impl Contender for RawChecked {
    async fn acquire(&self, lease: &str, ttl: Duration) -> Box<dyn Held> {
        self.0.acquire(lease, ttl).await
    }

    async fn fleet(&self, prefix: &str, size: usize, ttl: Duration) -> Option<Box<dyn Fleet>> {
        let client = self.0.0.clone();
        let keys = (0..size).map(|n| format!("{prefix}-{n}")).collect();
        Some(Box::new(Checked { client, keys, fleet: self.0.fleet(prefix, size, ttl).await? }))
    }
}

struct Checked {
    client: Client,
    keys: Vec<String>,
    fleet: Box<dyn Fleet>,
}

#[async_trait]
impl Fleet for Checked {
    async fn renew_all(&mut self) {
        let reads = self.keys.iter().map(|key| {
            let mut client = self.client.clone();
            async move {
                let found = client.get(key.as_str(), None).await.expect("read");
                assert_eq!(found.kvs().len(), 1, "{key} is gone");
            }
        });
        tokio::join!(self.fleet.renew_all(), join_all(reads));
    }
}

/// etcd's own lock service: a queue of keys on the server.
pub(crate) struct Lock(Client);

impl Lock {
    pub(crate) async fn connect(addresses: &[String]) -> Self {
        Self(client(addresses).await)
    }
}

#[async_trait]
impl Contender for Lock {
    async fn acquire(&self, lease: &str, ttl: Duration) -> Box<dyn Held> {
        let mut client = self.0.clone();
        let id = client.lease_grant(seconds(ttl), None).await.expect("granted").id();
        let kept = kept(&client, id, ttl);
        let options = LockOptions::new().with_lease(id);
        let key = client.lock(lease, Some(options)).await.expect("locked").key().to_vec();
        Box::new(Locked { client, lease: id, key, _kept: kept })
    }

    /// As its examples do it: a stream for each lease.
    async fn fleet(&self, prefix: &str, size: usize, ttl: Duration) -> Option<Box<dyn Fleet>> {
        let mut streams = Vec::new();
        for lease in bound(&self.0, prefix, size, ttl).await {
            streams.push(self.0.clone().lease_keep_alive(lease).await.expect("opens"));
        }
        Some(Box::new(Streams(streams)))
    }
}

struct Locked {
    client: Client,
    lease: i64,
    key: Vec<u8>,
    _kept: AbortOnDropHandle<()>,
}

#[async_trait]
impl Held for Locked {
    async fn release(mut self: Box<Self>) {
        let key = std::mem::take(&mut self.key);
        self.client.unlock(key).await.expect("unlocked");
        let (mut client, lease) = (self.client.clone(), self.lease);
        drop(spawn(async move { client.lease_revoke(lease).await }).detach());
    }
}

struct Streams(Vec<(LeaseKeeper, LeaseKeepAliveStream)>);

#[async_trait]
impl Fleet for Streams {
    async fn renew_all(&mut self) {
        join_all(self.0.iter_mut().map(|(keeper, answers)| async move {
            keeper.keep_alive().await.expect("sent");
            let answer = answers.message().await.expect("answered").expect("goes on");
            assert!(answer.ttl() > 0, "an etcd lease is gone");
        }))
        .await;
    }
}

/// etcd's own election service.
pub(crate) struct Election(Client);

impl Election {
    pub(crate) async fn connect(addresses: &[String]) -> Self {
        Self(client(addresses).await)
    }
}

#[async_trait]
impl Contender for Election {
    async fn acquire(&self, lease: &str, ttl: Duration) -> Box<dyn Held> {
        let mut client = self.0.clone();
        let id = client.lease_grant(seconds(ttl), None).await.expect("granted").id();
        let kept = kept(&client, id, ttl);
        let elected = client.campaign(lease, "bench", id).await.expect("elected");
        let options = ResignOptions::new().with_leader(elected.leader().expect("a key").clone());
        Box::new(Elected { client, lease: id, options, _kept: kept })
    }
}

struct Elected {
    client: Client,
    lease: i64,
    options: ResignOptions,
    _kept: AbortOnDropHandle<()>,
}

#[async_trait]
impl Held for Elected {
    async fn release(mut self: Box<Self>) {
        let options = self.options.clone();
        self.client.resign(Some(options)).await.expect("resigned");
        let (mut client, lease) = (self.client.clone(), self.lease);
        drop(spawn(async move { client.lease_revoke(lease).await }).detach());
    }
}

/// Where etcdctl is: beside the servers, else on the PATH.
pub(crate) fn etcdctl() -> Option<PathBuf> {
    let folder = std::env::var_os("COORD_SERVERS_DIR").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = folder.into_iter().chain(std::env::split_paths(&path));
    folders.map(|folder| folder.join("etcdctl")).find(|program| program.is_file())
}

/// A process of its own for each lease.
pub(crate) struct Etcdctl {
    command: &'static str,
    addresses: Vec<String>,
}

impl Etcdctl {
    pub(crate) fn new(command: &'static str, addresses: &[String]) -> Self {
        Self { command, addresses: addresses.to_vec() }
    }
}

#[async_trait]
impl Contender for Etcdctl {
    async fn acquire(&self, lease: &str, ttl: Duration) -> Box<dyn Held> {
        let mut command = Command::new(etcdctl().expect("etcdctl"));
        command.arg("--endpoints").arg(self.addresses.join(",")).arg(self.command).arg(lease);
        // `elect` has no such option: its TTL is 60 s.
        match self.command {
            "lock" => command.arg("--ttl").arg(ttl.as_secs().to_string()),
            _ => command.arg("bench"),
        };
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let acquire = move || {
            let mut child = command.spawn().expect("etcdctl starts");
            let mut line = String::new();
            let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
            output.read_line(&mut line).expect("reads");
            assert!(!line.is_empty(), "etcdctl ended");
            // It would be killed by the next line that it writes to a closed pipe.
            Box::new(Controlled { child, _output: output })
        };
        tokio::task::spawn_blocking(acquire).await.expect("no panic")
    }
}

struct Controlled {
    child: Child,
    _output: BufReader<std::process::ChildStdout>,
}

impl Drop for Controlled {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[async_trait]
impl Held for Controlled {
    async fn release(mut self: Box<Self>) {
        let id = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(id, rustix::process::Signal::INT).expect("signalled");
        let wait = move || self.child.wait().expect("ends");
        tokio::task::spawn_blocking(wait).await.expect("no panic");
    }
}
