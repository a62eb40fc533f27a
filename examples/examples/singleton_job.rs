//! A job that runs on exactly one of several workers, and goes on elsewhere when its worker stops.
//!
//! `cargo run -p coord-examples --example singleton_job [URL]`

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use coord::NodeId;
use coord::session::Ran;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::args().nth(1).unwrap_or("memory://singleton-example".into());
    let at_work = AtomicU32::new(0);
    futures::future::try_join_all(["w1", "w2"].map(|name| worker(&url, name, &at_work))).await?;
    Ok(())
}

async fn worker(url: &str, name: &str, at_work: &AtomicU32) -> anyhow::Result<()> {
    let coord = coord::connect(url).await?.with_node(NodeId::new(name)?);
    let guard = coord.lease("nightly-report")?.ttl(Duration::from_secs(5)).acquire().await?;

    // `run` keeps the lease while the job runs, drops the job at the deadline if the lease can't be
    // kept, and releases only after the job has stopped.
    let outcome = guard
        .run(|fence| async move {
            let others = at_work.fetch_add(1, Ordering::SeqCst);
            assert_eq!(others, 0, "two workers at work at one moment");
            println!("{name} writes the report in term {}", fence.term);
            tokio::time::sleep(Duration::from_millis(300)).await;
            at_work.fetch_sub(1, Ordering::SeqCst);
            "42 pages"
        })
        .await;

    match outcome {
        Ran::Finished(report) => println!("{name} is done: {report}"),
        Ran::Lost(why) => println!("{name} was stopped: the lease is {why}"),
        other => anyhow::bail!("{name}: {other:?}"),
    }
    Ok(())
}
