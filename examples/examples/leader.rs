//! Leader election: three candidates, one leader at a time, a new one as soon as the old one stops.
//!
//! `cargo run -p coord-examples --example leader [URL]`

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::time::Duration;

use coord::NodeId;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::args().nth(1).unwrap_or("memory://leader-example".into());

    // In a real service each candidate is a process of its own; here all three share one.
    futures::future::try_join_all(["a", "b", "c"].map(|name| candidate(&url, name))).await?;
    Ok(())
}

async fn candidate(url: &str, name: &'static str) -> anyhow::Result<()> {
    let coord = coord::connect(url).await?.with_node(NodeId::new(name)?);

    // Waits its turn: woken by a watch when the lease becomes free, not by polling.
    let guard = coord.lease("leader")?.ttl(Duration::from_secs(10)).acquire().await?;
    println!("{name} leads in term {}", guard.fence().term);

    // Work in small steps while the lease is held. `is_held` reads a clock and costs nothing.
    for step in 1..=3 {
        if !guard.is_held() {
            anyhow::bail!("{name} has lost the lease and stops at step {step}");
        }
        println!("{name} does step {step}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    // Stepping down at once lets the next candidate lead within milliseconds. Without it (a crash), the
    // next one leads when the TTL has passed.
    guard.release().await?;
    Ok(())
}
