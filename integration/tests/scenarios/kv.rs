//! I, with a load on the example service: three processes of `sharded_kv` restart one after the other while
//! clients count at whichever member they like.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coord::cluster::Handoff;
use coord::{Incarnation, TableName};
use coord_integration::faults::Proxy;
use coord_integration::servers::Process;
use coord_integration::{Missing, free_port};
use libtest_mimic::Trial;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::backends::{self, Store};
use super::driver::{Done, PATIENCE, World, calm, on_each_found};
use super::load::{self, AGAIN, Outcome, THINKS};
use super::recording::now;

const NODES: usize = 3;
/// Each has one client.
const KEYS: usize = 40;
/// Longer than a member keeps a request whose shard is on its way.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// The default mode on each kind of store, the others on one.
pub(crate) fn trials() -> Vec<Trial> {
    let modes = [Handoff::Exclusive, Handoff::MakeBeforeBreak, Handoff::Eager];
    let on_mode = |handoff: Handoff| {
        let wanted = move |store: &Store| {
            store.servers == 1 && (handoff == Handoff::default() || store.name == "nats")
        };
        let stores = backends::all().into_iter().filter(wanted);
        let name = format!("i_the_example_service_restarts_under_load_{handoff}");
        let scenario = async move |world: &mut World| serve_on(world, handoff).await;
        on_each_found(stores, find, &name, calm, scenario)
    };
    modes.into_iter().flat_map(on_mode).collect()
}

/// Cargo builds it beside the tests of the workspace.
fn example() -> Option<PathBuf> {
    let here = std::env::current_exe().ok()?;
    let example = here.parent()?.parent()?.join("examples/sharded_kv");
    example.is_file().then_some(example)
}

fn find(store: &Store) -> Result<Store, Missing> {
    let found = store.find()?;
    let why = "the example sharded_kv is not built: `cargo xtask test` builds it";
    example().map(|_| found).ok_or_else(|| Missing::absent(store.name, why))
}

/// A process of the service.
struct Node {
    name: String,
    clients: SocketAddr,
    process: Process,
    _proxy: Proxy,
}

/// Where clients find members.
type Members = Arc<Mutex<Vec<SocketAddr>>>;

async fn serve_on(world: &mut World, handoff: Handoff) -> Done {
    let folder = tempfile::Builder::new().prefix("coord-scenario-").tempdir()?;
    let storage = folder.path().join("storage");
    let members = Members::default();
    let mut nodes = Vec::new();
    let start = async |world: &World, number: usize, time: usize| -> Done<Node> {
        let name = format!("kv-{number}");
        let (proxy, url) = world.way().await?;
        let clients = SocketAddr::from(([127, 0, 0, 1], free_port()?));
        let mut command = Command::new(example().ok_or("the example is gone")?);
        command.args(["--backend", &url, "--node", &name, "--handoff", handoff.as_str()]);
        command.args(["--clients", &clients.to_string(), "--storage"]).arg(&storage);
        let log = folder.path().join(format!("{name}-{time}.log"));
        let process = Process::spawn(command, &log)?;
        Ok(Node { name, clients, process, _proxy: proxy })
    };
    for number in 1..=NODES {
        nodes.push(start(world, number, 0).await?);
    }
    let mut runs = shared(world, &[]).await?;
    members.lock().unwrap_or_else(PoisonError::into_inner).extend(nodes.iter().map(|n| n.clients));

    let stop = CancellationToken::new();
    let mut clients = JoinSet::new();
    for key in 0..KEYS {
        clients.spawn(client(key, Arc::clone(&members), stop.clone()));
    }
    let begun = now();
    for number in 1..=NODES {
        let mut leaving = nodes.remove(0);
        // As a balancer would: who is about to go gets nothing new.
        let others = |all: &mut Vec<SocketAddr>| all.retain(|at| *at != leaving.clients);
        others(&mut members.lock().unwrap_or_else(PoisonError::into_inner));
        let mut way = Line::connect(leaving.clients).await.ok_or("a member is not reached")?;
        way.ask("leave").await.ok_or("a member does not hear that it shall leave")?;
        let ended = tokio::task::spawn_blocking(move || leaving.process.wait(PATIENCE));
        let ended = ended.await??;
        if !ended.success() {
            return Err(format!("{} left so: {ended}", leaving.name).into());
        }
        nodes.push(start(world, number, 1).await?);
        runs = shared(world, &runs).await?;
        let back = nodes[NODES - 1].clients;
        members.lock().unwrap_or_else(PoisonError::into_inner).push(back);
    }
    let took = now().since(begun);
    stop.cancel();
    let results = tokio::time::timeout(PATIENCE, clients.join_all()).await;
    let results = results.map_err(|_| "a request is never served")?;
    let results = results.into_iter().collect::<Result<Vec<_>, _>>()?;
    load::tell(&format!("{}, the example service, {handoff}", world.store.name), took, &results);
    Ok(())
}

/// Waits until the shards are shared evenly by runs of which one is not among these; the runs.
async fn shared(world: &World, before: &[Incarnation]) -> Done<Vec<Incarnation>> {
    let (table, begun) = (TableName::new("kv")?, now());
    loop {
        if let Ok(Some(table)) = world.backend.placement().load(&table).await {
            let map = &table.map;
            let owners = map.header().shards.shards().filter_map(|shard| map.owner(shard));
            let mut shares = std::collections::BTreeMap::new();
            for owner in owners {
                *shares.entry(owner.incarnation).or_insert(0_usize) += 1;
            }
            let even = map.header().shards.get() / u32::try_from(NODES)?;
            let even = shares.values().all(|share| u32::try_from(*share) == Ok(even));
            let fresh = shares.keys().filter(|run| !before.contains(run)).count();
            let wanted = if before.is_empty() { NODES } else { 1 };
            if shares.len() == NODES && even && fresh == wanted && map.motions().is_empty() {
                return Ok(shares.into_keys().collect());
            }
        }
        if now().since(begun) > PATIENCE {
            return Err("the shards of the example are not shared".into());
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// A connection to a member.
struct Line(BufReader<TcpStream>);

impl Line {
    async fn connect(to: SocketAddr) -> Option<Self> {
        Some(Self(BufReader::new(TcpStream::connect(to).await.ok()?)))
    }

    async fn ask(&mut self, line: &str) -> Option<String> {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes()).await.ok()?;
        let mut reply = String::new();
        let read =
            tokio::time::timeout(ANSWER_LIMIT, self.0.read_line(&mut reply)).await.ok()?.ok()?;
        (read > 0).then(|| reply.trim_end().to_owned())
    }
}

/// Adds one to a counter again and again: what its n-th request returns is n, or else one was lost or served
/// twice.
async fn client(key: usize, members: Members, stop: CancellationToken) -> Result<Outcome, String> {
    let mut outcome = Outcome::default();
    let mut last = now();
    for number in 1_usize.. {
        let begun = now();
        for turn in number.. {
            let at = {
                let members = members.lock().unwrap_or_else(PoisonError::into_inner);
                members[(key + turn) % members.len()]
            };
            let reply = match Line::connect(at).await {
                Some(mut line) => line.ask(&format!("add counter-{key} 1")).await,
                None => Some("no connection".to_owned()),
            };
            let reply = reply.unwrap_or_else(|| "unknown: no answer".to_owned());
            match reply.split_once(' ') {
                Some(("ok", value)) if value == number.to_string() => break,
                Some(("no", _)) => tokio::time::sleep(AGAIN).await,
                _ => return Err(format!("request {number} of counter {key}: {reply:?}")),
            }
        }
        let at = now();
        outcome.latencies.push(at.since(begun));
        outcome.gap = outcome.gap.max(at.since(last));
        last = at;
        if stop.run_until_cancelled(tokio::time::sleep(THINKS)).await.is_none() {
            break;
        }
    }
    Ok(outcome)
}
