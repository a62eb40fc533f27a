//! Who is alive: nodes register, one leaves in good order, one dies, and a watch sees it all.
//!
//! `cargo run -p coord-examples --example discovery [URL]`

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::time::Duration;

use coord::{Address, NodeEvent, NodeId, NodeInfo, Register, Replace, Ttl};
use futures::StreamExt as _;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::args().nth(1).unwrap_or("memory://discovery-example".into());
    let coord = coord::connect(&url).await?;
    let discovery = coord.backend().discovery();

    // A service uses `coord.cluster(node)`, which sends the heartbeats. These are the steps below it.
    let ttl = Ttl::from_secs(1)?;
    let mut registrations = Vec::new();
    for number in 1..=2_u16 {
        let id = NodeId::new(format!("n{number}"))?;
        let node = NodeInfo::new(id, Address::new(format!("10.0.0.{number}:7000"))?);
        match discovery.register(&node, ttl, Replace::No).await? {
            Register::Registered(registration) => registrations.push(registration),
            other => anyhow::bail!("{other:?}"),
        }
    }

    // One subscription: a snapshot first, then what changes.
    let mut events = discovery.watch();
    if let Some(NodeEvent::Snapshot(nodes)) = events.next().await.transpose()? {
        for node in nodes {
            println!("{} is there, at {}", node.info.id, node.info.address);
        }
    }
    discovery.deregister(&registrations[0]).await?;
    // n2 sends no heartbeat: it dies when its TTL has passed, without anybody asking.
    loop {
        let event = tokio::time::timeout(Duration::from_secs(30), events.next()).await?;
        match event.transpose()? {
            Some(NodeEvent::Left { node, .. }) => println!("{node} left"),
            Some(NodeEvent::Expired { node, .. }) => {
                println!("{node} died");
                return Ok(());
            }
            Some(_) => {}
            None => anyhow::bail!("the watch ended"),
        }
    }
}
