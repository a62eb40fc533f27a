//! Why a lease alone is not enough, and how a fence makes it so.
//!
//! A holder that is paused (by a long garbage collection, say) wakes up after its lease has gone to
//! another, and still writes. Only what it writes to can refuse that: by the fence.
//!
//! `cargo run -p coord-examples --example fenced_writer [URL]`

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::time::Duration;

use coord::{Fence, NodeId};

/// Something worth protecting: it keeps the highest fence it has seen and refuses lower ones.
#[derive(Default)]
struct Ledger {
    highest: Option<Fence>,
    entries: Vec<String>,
}

impl Ledger {
    fn write(&mut self, fence: &Fence, entry: &str) -> Result<(), String> {
        if let Some(highest) = &self.highest
            && !fence.passes(highest)
        {
            return Err(format!("term {} is refused, {} was seen", fence.term, highest.term));
        }
        self.highest = Some(fence.clone());
        self.entries.push(entry.to_owned());
        Ok(())
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::args().nth(1).unwrap_or("memory://fenced-example".into());
    let mut ledger = Ledger::default();

    let old = coord::connect(&url).await?.with_node(NodeId::new("old")?);
    let guard = old.lease("ledger")?.ttl(Duration::from_secs(1)).acquire().await?;
    let stale = guard.fence();
    ledger.write(&stale, "written by old").map_err(anyhow::Error::msg)?;
    println!("old writes in term {}", stale.term);

    // A paused process renews nothing. `abandon` does the same: the lease is left to its TTL.
    guard.abandon();

    let new = coord::connect(&url).await?.with_node(NodeId::new("new")?);
    let guard = new.lease("ledger")?.ttl(Duration::from_secs(1)).acquire().await?;
    ledger.write(&guard.fence(), "written by new").map_err(anyhow::Error::msg)?;
    println!("new writes in term {}", guard.fence().term);

    // The old holder wakes up and writes what it had prepared.
    let refused = ledger.write(&stale, "written too late").expect_err("a stale fence");
    println!("old wakes up and writes: {refused}");
    assert_eq!(ledger.entries, ["written by old", "written by new"]);

    guard.release().await?;
    Ok(())
}
