//! I, with a load: clients send numbered requests all the time while every node is restarted in order.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coord::cluster::Handoff;
use coord::{Moment, ShardCount, ShardId, ShardMap};
use libtest_mimic::Trial;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::backends;
use super::driver::{Done, PATIENCE, World, calm, on_each};
use super::figures::note;
use super::ledger::{Ledger, Lines};
use super::member::ServiceAt;
use super::recording::now;
use super::service::{Reply, Request};

const NODES: usize = 3;
/// Each has one client.
const SHARDS: u32 = 48;
/// How long a client waits before its next request, and before it tries one again.
pub(crate) const THINKS: Duration = Duration::from_millis(100);
pub(crate) const AGAIN: Duration = Duration::from_millis(10);
/// After which it tries again although nothing was answered.
const LIMIT: Duration = Duration::from_secs(2);

pub(crate) fn trials() -> Vec<Trial> {
    let single = || backends::all().into_iter().filter(|store| store.servers == 1);
    let name = |handoff| format!("i_all_nodes_are_restarted_under_load_{handoff}");
    let mut trials =
        on_each(single(), &name(Handoff::Exclusive), calm, async |world: &mut World| {
            serve_on(world, Handoff::Exclusive).await
        });
    trials.extend(on_each(
        single(),
        &name(Handoff::MakeBeforeBreak),
        calm,
        async |world: &mut World| serve_on(world, Handoff::MakeBeforeBreak).await,
    ));
    trials.extend(on_each(single(), &name(Handoff::Eager), calm, async |world: &mut World| {
        serve_on(world, Handoff::Eager).await
    }));
    trials
}

async fn serve_on(world: &mut World, handoff: Handoff) -> Done {
    let ledger = Ledger::start().await?;
    world.handoff = handoff;
    world.shards = ShardCount::new(SHARDS)?;
    world.service = Some(ServiceAt { ledger: ledger.address });
    world.start(NODES).await?;

    let stop = CancellationToken::new();
    let mut clients = JoinSet::new();
    for shard in world.shards.shards() {
        let client = Client { shard, maps: world.maps(), stop: stop.clone() };
        clients.spawn(client.run());
    }
    let begun = now();
    for member in 0..NODES {
        let name = world.members[member].name.clone();
        world.leave(member).await?;
        world.add(&name).await?;
        world.shared_by(NODES).await?;
    }
    let took = now().since(begun);
    stop.cancel();
    let results = tokio::time::timeout(PATIENCE, clients.join_all()).await;
    let results = results.map_err(|_| "a request is never served")?;

    let logs = ledger.logs.lock().unwrap_or_else(PoisonError::into_inner);
    let mut wrong = String::new();
    for (shard, outcome) in &results {
        let (served, sent) = (logs.of(*shard), outcome.latencies.len());
        let each_once = (1..).zip(served).all(|(number, served)| *served == number);
        if !each_once || served.len() != sent {
            let _ = writeln!(wrong, "shard {shard}: {sent} requests, served {served:?}");
        }
    }
    let (stale, conflicts) = (logs.stale, logs.conflicts);
    let outcomes: Vec<_> = results.into_iter().map(|(_, outcome)| outcome).collect();
    let store = world.store.name;
    tell(
        &format!("{store}, {handoff}, {stale} stale writes and {conflicts} conflicts refused"),
        took,
        &outcomes,
    );
    // Where a shard never has two hosts, nobody writes what another has to be kept from.
    if handoff == Handoff::Exclusive && (stale, conflicts) != (0, 0) {
        let _ =
            write!(wrong, "{stale} stale writes and {conflicts} conflicts of an exclusive host");
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.into()) }
}

/// Notes how long what took, as clients saw it.
pub(crate) fn tell(what: &str, took: Duration, results: &[Outcome]) {
    let mut latencies: Vec<_> = results.iter().flat_map(|r| &r.latencies).copied().collect();
    latencies.sort_unstable();
    let mut gaps: Vec<_> = results.iter().map(|result| result.gap).collect();
    gaps.sort_unstable();
    let at = |sorted: &[Duration], percent: usize| sorted[(sorted.len() - 1) * percent / 100];
    note(format!(
        "{what}: all nodes restarted in {took:.1?} under {} clients: {} requests, each served once, p50 {:.1?}, \
         p99 {:.1?}; longest time without a success, by client: p50 {:.0?}, longest {:.0?} (they pause for \
         {THINKS:.0?})",
        results.len(),
        latencies.len(),
        at(&latencies, 50),
        at(&latencies, 99),
        at(&gaps, 50),
        at(&gaps, 100),
    ));
}

/// The client of one shard: it counts, and sends each number until it is served.
struct Client {
    shard: ShardId,
    maps: Arc<Mutex<Vec<Arc<ShardMap>>>>,
    stop: CancellationToken,
}

/// What a client saw.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Of each request, from its first try to its success.
    pub(crate) latencies: Vec<Duration>,
    /// The longest time between two successes.
    pub(crate) gap: Duration,
}

impl Client {
    async fn run(self) -> (ShardId, Outcome) {
        let (mut connection, mut last) = (None, now());
        let mut outcome = Outcome::default();
        for number in 1.. {
            let request = Request { shard: self.shard, number };
            let begun = now();
            while self.ask(&mut connection, request).await != Some(Reply::Served) {
                tokio::time::sleep(AGAIN).await;
            }
            let at: Moment = now();
            outcome.latencies.push(at.since(begun));
            outcome.gap = outcome.gap.max(at.since(last));
            last = at;
            if self.stop.run_until_cancelled(tokio::time::sleep(THINKS)).await.is_none() {
                break;
            }
        }
        (self.shard, outcome)
    }

    /// Asks whoever owns the shard by the newest map.
    async fn ask(
        &self,
        connection: &mut Option<(String, Lines)>,
        request: Request,
    ) -> Option<Reply> {
        let owner = {
            let maps = self.maps.lock().unwrap_or_else(PoisonError::into_inner);
            maps.last()?.owner(self.shard)?.address.to_string()
        };
        if connection.as_ref().is_none_or(|(to, _)| *to != owner) {
            *connection = None;
            *connection = Some((owner.clone(), Lines::connect(&owner).await.ok()?));
        }
        let (_, lines) = connection.as_mut()?;
        match tokio::time::timeout(LIMIT, lines.ask(&request)).await {
            Ok(Ok(reply)) => Some(reply),
            // It may have been served.
            Ok(Err(_)) | Err(_) => {
                *connection = None;
                None
            }
        }
    }
}
