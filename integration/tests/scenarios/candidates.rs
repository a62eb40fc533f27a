//! J: a thousand candidates on one lease.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coord::session::{LeaseGuard, Leases};
use coord::{Backend, Incarnation, LeaseName, NodeId};
use coord_conformance::history::History;
use coord_integration::faults::Traffic;
use libtest_mimic::Trial;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::backends;
use super::driver::{Done, PATIENCE, World, on_each, own_entries, quick};
use super::figures::note;
use super::recording::{Recording, now};
use super::said::{Line, Said};

const CANDIDATES: u32 = 1_000;
/// Long enough for a thousand to stand at once, on few cores, without the holder's renewals failing.
const TTL: Duration = Duration::from_secs(30);
const WINDOW: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_secs(5);
/// How often the lease is handed on.
const HANDOVERS: u32 = 5;
/// More than one request takes, with its answer and what a watch says of it.
const REQUEST_BYTES_MAX: u64 = 4 << 10;

pub(crate) fn trials() -> Vec<Trial> {
    let name = "j_a_thousand_candidates_want_one_lease";
    let single = backends::all().into_iter().filter(|store| store.servers == 1);
    let mut trials = on_each(single, name, quick, on_a_server);
    trials.push(Trial::test(format!("memory::{name}"), || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(in_memory())
    }));
    trials
}

/// A thousand tasks take the machine's time, and are not to take it from each other.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

async fn on_a_server(world: &mut World) -> Done {
    let _turn = ONE_AT_A_TIME.lock().await;
    let client = world.client().await?;
    let traffic = || client.proxy.traffic();
    contend(world.store.name, &client.backend, &|| world.lines(), &traffic).await
}

async fn in_memory() -> Done {
    let _turn = ONE_AT_A_TIME.lock().await;
    let coord = coord::connect("memory://scenario-candidates").await?;
    let lines = Arc::<Mutex<Vec<Line>>>::default();
    let kept = Arc::clone(&lines);
    let keep = move |line| kept.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    let backend = Recording::new(Arc::clone(coord.backend()), keep);
    let lines = || lines.lock().unwrap_or_else(PoisonError::into_inner).clone();
    contend("memory", &backend, &lines, &Traffic::default).await?;
    let violations = History::new(own_entries("the scenario", &lines())).check();
    if violations.is_empty() { Ok(()) } else { Err(format!("{violations:?}").into()) }
}

type Won = (u32, LeaseGuard);

/// Waits for its turn, and hands the lease to the scenario.
async fn stand(leases: Leases, number: u32, won: mpsc::Sender<Won>) -> coord::Result<()> {
    let session = leases.named(name()).ttl(TTL).retry_every(RETRY).build()?;
    let guard = session.acquire().await?;
    // Nobody takes it once the scenario is over, and then it is released.
    let _ = won.send((number, guard)).await;
    Ok(())
}

fn name() -> LeaseName {
    LeaseName::new("jobs").expect("a name")
}

async fn next(won: &mut mpsc::Receiver<Won>) -> Done<Won> {
    let next = tokio::time::timeout(PATIENCE, won.recv()).await.map_err(|_| "nobody wins")?;
    Ok(next.ok_or("all candidates are gone")?)
}

async fn contend(
    store: &str,
    backend: &Recording,
    lines: &(dyn Fn() -> Vec<Line> + Sync),
    traffic: &(dyn Fn() -> Traffic + Sync),
) -> Done {
    let (sender, mut won) = mpsc::channel(1);
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    for number in 0..CANDIDATES {
        let node = NodeId::new(format!("n{number}"))?;
        let leases = Leases::new(backend.lease(), node, Incarnation::random());
        let standing = stand(leases, number, sender.clone());
        tasks.spawn(stop.clone().run_until_cancelled_owned(standing));
    }
    let (mut winner, mut guard) = next(&mut won).await?;
    let tries = || {
        let tries = |line: &&Line| matches!(&line.said, Said::Call(call) if call.operation == "try_acquire");
        u64::try_from(lines().iter().filter(tries).count()).expect("few")
    };
    // All have stood once.
    let begun = now();
    while tries() < u64::from(CANDIDATES) {
        if now().since(begun) > PATIENCE {
            return Err(format!("only {} candidates have stood", tries()).into());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    // While somebody holds it, each looks once in a while.
    let (before, sent) = (tries(), traffic());
    tokio::time::sleep(WINDOW).await;
    let (tried, now_sent) = (tries() - before, traffic());
    assert!(won.try_recv().is_err(), "there are two winners");
    assert!(guard.is_held());
    let bytes = now_sent.bytes_to_server + now_sent.bytes_to_client
        - sent.bytes_to_server
        - sent.bytes_to_client;
    note(format!(
        "{store}: {CANDIDATES} candidates made {tried} requests and {bytes} bytes in {WINDOW:?}, over \
         {} connections",
        now_sent.connections
    ));
    // Every RETRY, a tenth of it earlier or later, and one that had begun before.
    let looks = u64::from(CANDIDATES) * (WINDOW.as_secs() * 10 / (RETRY.as_secs() * 9) + 1);
    assert!(tried <= looks, "{tried} tries in {WINDOW:?}, allowed are {looks}");
    assert!(bytes <= looks * REQUEST_BYTES_MAX, "{bytes} bytes in {WINDOW:?}");

    // Handed on, it goes to one of the others, and they do not all jump at it again and again.
    let mut slowest = Duration::ZERO;
    let (before, began) = (tries(), now());
    for _ in 0..HANDOVERS {
        let fence = guard.fence();
        let released = now();
        guard.release().await?;
        let (other, next_guard) = next(&mut won).await?;
        slowest = slowest.max(now().since(released));
        assert!(next_guard.fence().term > fence.term);
        assert_ne!(other, winner, "each stands once");
        (winner, guard) = (other, next_guard);
    }
    let (tried, took) = (tries() - before, now().since(began));
    note(format!("{store}: {HANDOVERS} handovers, {tried} tries, the slowest took {slowest:.1?}"));
    let looks =
        u64::from(CANDIDATES) * (u64::from(HANDOVERS) + took.as_secs() / RETRY.as_secs() + 1);
    assert!(tried <= looks, "{tried} tries in {HANDOVERS} handovers, allowed are {looks}");

    stop.cancel();
    tasks.close();
    tokio::time::timeout(PATIENCE, tasks.wait()).await?;
    drop(won);
    guard.release().await?;
    // A candidate that is gone leaves no lease behind.
    let left = async {
        while backend.lease().get(&name()).await?.is_some() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok::<(), coord::Error>(())
    };
    tokio::time::timeout(TTL, left).await.map_err(|_| "a lease is left behind")??;
    Ok(())
}
