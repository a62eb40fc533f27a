//! A job that runs on exactly one of several workers, and goes on elsewhere when its worker stops.
//!
//! `cargo run -p coord-examples --example singleton_job [URL]`

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use coord::NodeId;
use coord::cluster::singleton::{JobContext, Next, Singleton};

const WORKERS: [&str; 3] = ["w1", "w2", "w3"];

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::args().nth(1).unwrap_or("memory://singleton-example".into());
    let at_work = Arc::new(AtomicU32::new(0));
    let mut workers = Vec::new();
    for name in WORKERS {
        workers.push((name, worker(&url, name, &at_work).await?));
    }
    // One worker after the other is stopped; the job goes on at another at once.
    while let Some(runs) = first_at_work(&workers).await {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let (name, worker) = workers.swap_remove(runs);
        let ended = worker.stop().await;
        println!("{name} is stopped: {ended:?}");
    }
    Ok(())
}

async fn worker(
    url: &str,
    name: &'static str,
    at_work: &Arc<AtomicU32>,
) -> anyhow::Result<Singleton> {
    let coord = coord::connect(url).await?.with_node(NodeId::new(name)?);
    let at_work = Arc::clone(at_work);
    let job = move |duty: JobContext| {
        let at_work = Arc::clone(&at_work);
        async move {
            assert_eq!(at_work.fetch_add(1, Ordering::SeqCst), 0, "two at work at one moment");
            // Show the fence to whatever the job writes to: it refuses a stale one.
            println!("{name} works in term {}", duty.fence().term);
            duty.cancelled().await;
            at_work.fetch_sub(1, Ordering::SeqCst);
            Next::Again
        }
    };
    // The lease is kept while the job runs, and given back once nothing of it is left.
    Ok(coord.singleton("nightly-report")?.ttl(Duration::from_secs(5)).start(job)?)
}

/// Waits until one of them runs the job.
async fn first_at_work(workers: &[(&str, Singleton)]) -> Option<usize> {
    use coord::cluster::singleton::State;
    loop {
        let runs = |(_, worker): &(&str, Singleton)| {
            matches!(&*worker.state().borrow(), State::Running(_))
        };
        if workers.is_empty() || workers.iter().any(runs) {
            return workers.iter().position(runs);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
