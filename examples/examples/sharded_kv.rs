//! A sharded key-value service of three processes whose writes are refused for a stale fence.
//!
//! With no arguments, or with `--backend URL` alone, it is a demo that ends by itself: three members in one
//! process, clients that add to counters while all members are restarted one after the other, and a
//! write under a stale token that the storage refuses.
//!
//! `cargo run -p coord-examples --example sharded_kv`
//!
//! With `--node`, it is one process of a service that goes on until it is told to `leave`. The backend has to
//! be built in (`cargo xtask cargo run -p coord-examples --features full --example sharded_kv -- …`):
//!
//! ```text
//! sharded_kv --backend etcd://127.0.0.1:2379/kv --node kv-1 --clients 127.0.0.1:7201 --storage /tmp/kv
//! printf 'set colour red\nget colour\nleave\n' | nc 127.0.0.1 7201
//! ```

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context as _;
use async_trait::async_trait;
use bytes::Bytes;
use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser as _};
use coord::cluster::{
    Cluster, Handler, Handoff, Host, HostError, Mail, Settings, ShardFence, ShardToken, Table,
    TcpTransport,
};
use coord::{NodeId, NodeInfo, NodeStatus, ShardCount, ShardId, TableName};
use coord_examples::kv::{self, Client, Kv, Storage};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;

const SHARDS: u32 = 60;
const IN_MEMORY: &str = "memory://sharded-kv";

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    if options.node.is_some() && options.backend.starts_with("memory:") {
        let why = "no other process sees what is in the memory of this one: give the --backend of a server";
        Options::command().error(ErrorKind::ArgumentConflict, why).exit();
    }
    if options.node.is_some() { serve(options).await } else { demo(options).await }
}

/// A sharded key-value service. Without --node it is a demo that ends by itself: three members in this process.
#[derive(clap::Parser)]
#[command(
    name = "sharded_kv",
    after_help = "\
A service of several processes, each with a name of its own, with the same --backend and --storage
(built with the backend: cargo xtask cargo run -p coord-examples --features full --example sharded_kv -- …):
  sharded_kv --node kv-1 --backend etcd://127.0.0.1:2379/kv --storage /tmp/kv --clients 127.0.0.1:7201
Clients send lines to any of them; `leave` ends that member in order:
  printf 'set colour red\\nget colour\\nadd visits 1\\nleave\\n' | nc 127.0.0.1 7201"
)]
struct Options {
    /// The store that the members coordinate over.
    #[arg(long, value_name = "URL", default_value = IN_MEMORY)]
    backend: String,
    /// Be one member of this name, until a client says `leave`.
    #[arg(long, value_name = "NAME", requires = "storage")]
    node: Option<String>,
    /// Where other members reach this one.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Where clients reach this member.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    clients: SocketAddr,
    /// The folder that all members write to.
    #[arg(long, value_name = "FOLDER")]
    storage: Option<PathBuf>,
    /// How shards get from one member to another: exclusive, make_before_break or eager.
    #[arg(long, value_name = "MODE", default_value = "exclusive", value_parser = handoff)]
    handoff: Handoff,
}

fn handoff(text: &str) -> Result<Handoff, String> {
    let all = [Handoff::Exclusive, Handoff::MakeBeforeBreak, Handoff::Eager];
    let mode = all.into_iter().find(|mode| mode.as_str() == text);
    mode.ok_or_else(|| "it is exclusive, make_before_break or eager".to_owned())
}

/// One member: its part in the cluster, and the port for its clients.
struct Member {
    cluster: Cluster,
    clients: SocketAddr,
    listener: TcpListener,
    kv: Arc<Noting>,
}

/// The service, and the tokens it was given: the demo wants to show one that is stale.
#[derive(Debug)]
struct Noting {
    kv: Kv,
    tokens: Mutex<Vec<ShardToken>>,
}

#[async_trait]
impl Host for Noting {
    async fn start(&self, shard: ShardId, fence: ShardFence) -> Result<(), HostError> {
        self.tokens.lock().expect("not poisoned").extend(fence.token());
        self.kv.start(shard, fence).await
    }

    async fn stop(&self, shard: ShardId) {
        self.kv.stop(shard).await;
    }
}

#[async_trait]
impl Handler for Noting {
    async fn handle(&self, mail: Mail) -> Bytes {
        self.kv.handle(mail).await
    }
}

async fn start(options: &Options, name: &str, storage: &Path) -> anyhow::Result<Member> {
    let coord = coord::connect(&options.backend).await?;
    let listener = TcpListener::bind(options.clients).await;
    let listener = listener.with_context(|| format!("--clients {}", options.clients))?;
    let clients = listener.local_addr()?;
    let transport = TcpTransport::bind(options.listen, coord.info().cluster.clone()).await?;
    let node = NodeInfo::new(NodeId::new(name)?, transport.address()?);
    let table = TableName::new("kv")?;
    let storage =
        Storage::open(storage).with_context(|| format!("--storage {}", storage.display()))?;
    let kv = Kv::new(storage);
    let kv = Arc::new(Noting { kv, tokens: Mutex::default() });
    // Short times for an example; the defaults suit most services.
    let in_memory = options.backend.starts_with("memory:");
    let settings = if in_memory { Settings::demo() } else { Settings::fast() };
    let cluster = coord
        .cluster(node)
        .settings(settings)
        .table(
            Table::new(table.clone())
                .shards(ShardCount::new(SHARDS)?)
                .handoff(options.handoff)
                .handler(Arc::<Noting>::clone(&kv)),
        )
        .transport(Arc::new(transport))
        .start()
        .await?;
    Ok(Member { cluster, clients, listener, kv })
}

/// One process of the service.
async fn serve(options: Options) -> anyhow::Result<()> {
    let name = options.node.clone().context("--node is given")?;
    let storage = options.storage.clone().context("members share a folder: give --storage")?;
    let Member { cluster, clients, listener, .. } = start(&options, &name, &storage).await?;
    println!("{name} answers clients at {clients}");
    let leave = Arc::new(Notify::new());
    let mailbox = cluster.mailbox(&TableName::new("kv")?)?;
    let mut serving = JoinSet::new();
    serving.spawn(kv::serve(listener, mailbox, Arc::clone(&leave)));
    leave.notified().await;
    println!("{name} leaves");
    // Its shards move first, and clients are answered all the while.
    cluster.leave().await?;
    println!("{name} has left");
    Ok(())
}

async fn demo(options: Options) -> anyhow::Result<()> {
    let own = std::env::temp_dir().join(format!("coord-sharded-kv-{}", std::process::id()));
    let storage = options.storage.clone().unwrap_or_else(|| own.clone());
    let shown = show(&options, &storage).await;
    // It is not there where the demo could not even begin.
    if options.storage.is_none() && own.exists() {
        std::fs::remove_dir_all(&own)?;
    }
    shown
}

async fn show(options: &Options, storage: &Path) -> anyhow::Result<()> {
    let table = TableName::new("kv")?;
    let mut serving = JoinSet::new();
    let mut members = Vec::new();
    for name in ["kv-1", "kv-2", "kv-3"] {
        members.push(member(options, name, storage, &mut serving).await?);
    }
    settled(&members[0].cluster, 3).await?;

    let mut client = Client::connect(members[0].clients).await?;
    println!("set colour red: {}", client.ask("set colour red").await?);
    let mut client = Client::connect(members[1].clients).await?;
    println!("get colour, of another member: {}", client.ask("get colour").await?);
    let owner = members[0].cluster.owner(&table, "colour").context("every shard has an owner")?;
    println!("it is {} that hosts the shard of \"colour\"", owner.id);
    // What its host shows to the storage: it will be stale once the shard has moved.
    let shard = members[0].cluster.mailbox(&table)?.shard_of("colour");
    let host = members.iter().find(|member| *member.cluster.node() == owner.id);
    let tokens = host.context("one of the three")?.kv.tokens.lock().expect("not poisoned").clone();
    let old = tokens.into_iter().rev().find(|token| token.shard == shard).context("hosted")?;

    // Clients add to counters all the while, each at whatever member it likes.
    let load = Arc::new(Load::default());
    load.ports.lock().expect("not poisoned").extend(members.iter().map(|member| member.clients));
    let mut clients = JoinSet::new();
    for number in 0..8 {
        clients.spawn(Arc::clone(&load).run(number));
    }
    // A rolling restart: each leaves in order and comes back.
    for _ in 0..3 {
        let leaving = members.remove(0);
        load.ports.lock().expect("not poisoned").retain(|port| *port != leaving.clients);
        leaving.cluster.leave().await?;
        let name = leaving.cluster.node().to_string();
        println!("{name} has left, {} additions so far", load.added.load(Ordering::SeqCst));
        let back = member(options, &name, storage, &mut serving).await?;
        settled(&back.cluster, 3).await?;
        load.ports.lock().expect("not poisoned").push(back.clients);
        members.push(back);
    }
    load.stop.store(true, Ordering::SeqCst);
    while let Some(ended) = clients.join_next().await {
        ended??;
    }

    let mut sum = 0;
    let mut client = Client::connect(members[0].clients).await?;
    for counter in 0..Load::COUNTERS {
        let reply = client.ask(&format!("get counter-{counter}")).await?;
        sum += reply.strip_prefix("ok ").map_or(Ok(0), str::parse::<u64>)?;
    }
    let added = load.added.load(Ordering::SeqCst);
    let unknown = load.unknown.load(Ordering::SeqCst);
    let longest = Duration::from_millis(load.longest_ms.load(Ordering::SeqCst));
    println!(
        "{added} additions were acknowledged, {unknown} unknown; the counters say {sum}; handoff \
         {}: the longest took {longest:?}",
        options.handoff
    );
    anyhow::ensure!(sum == added && unknown == 0, "an addition was lost or made twice");

    // The host from before all this wakes up, and writes what it had prepared.
    let refused = Storage::open(storage)?
        .write(&old, |values| values.insert("colour".to_owned(), "stale".to_owned()))
        .expect_err("a stale token");
    println!("{} wakes up and writes: {refused}", owner.id);
    println!("get colour: {}", client.ask("get colour").await?);

    for member in members {
        member.cluster.shutdown().await?;
    }
    Ok(())
}

/// A member whose clients are answered.
struct Running {
    cluster: Cluster,
    clients: SocketAddr,
    kv: Arc<Noting>,
}

async fn member(
    options: &Options,
    name: &str,
    storage: &Path,
    serving: &mut JoinSet<anyhow::Result<()>>,
) -> anyhow::Result<Running> {
    let Member { cluster, clients, listener, kv } = start(options, name, storage).await?;
    let mailbox = cluster.mailbox(&TableName::new("kv")?)?;
    serving.spawn(kv::serve(listener, mailbox, Arc::default()));
    Ok(Running { cluster, clients, kv })
}

/// What the clients of the demo share.
#[derive(Default)]
struct Load {
    ports: Mutex<Vec<SocketAddr>>,
    added: AtomicU64,
    unknown: AtomicU64,
    longest_ms: AtomicU64,
    stop: AtomicBool,
}

impl Load {
    const COUNTERS: usize = 40;

    /// Adds, again and again; what was certainly not done is tried again, at another member.
    async fn run(self: Arc<Self>, number: usize) -> anyhow::Result<()> {
        let mut turn = number;
        'addition: while !self.stop.load(Ordering::SeqCst) {
            turn += 1;
            let line = format!("add counter-{} 1", turn % Self::COUNTERS);
            let began = Instant::now();
            loop {
                let ports = self.ports.lock().expect("not poisoned").clone();
                let port = ports[turn % ports.len()];
                turn += Self::COUNTERS;
                let Ok(mut client) = Client::connect(port).await else { continue };
                let reply =
                    client.ask(&line).await.unwrap_or_else(|error| format!("unknown {error:#}"));
                if reply.starts_with("ok ") {
                    break;
                }
                if reply.starts_with("unknown ") {
                    self.unknown.fetch_add(1, Ordering::SeqCst);
                    println!("{reply}");
                    continue 'addition;
                }
            }
            let took = u64::try_from(began.elapsed().as_millis())?;
            self.longest_ms.fetch_max(took, Ordering::SeqCst);
            self.added.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }
}

/// Waits until this many members are active and every shard is where it belongs.
async fn settled(member: &Cluster, members: usize) -> anyhow::Result<()> {
    let settled = member
        .wait_for(|status| status.is_settled() && status.count(NodeStatus::Active) == members);
    tokio::time::timeout(Duration::from_secs(30), settled).await??;
    Ok(())
}
