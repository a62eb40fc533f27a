//! `coord-scale`: what clusters of thousands of nodes cost, phase by phase.

use std::process::ExitCode;

use clap::Parser;
use coord_core::{ShardCount, TableName};
use coord_sim::scale::{Phase, Scale, Then, resident, run, table};

/// Runs whole clusters in this process on paused time, and prints a table of each.
#[derive(Debug, Parser)]
#[command(name = "coord-scale", version)]
struct Options {
    /// How many nodes; several sizes are run one after the other.
    #[arg(long, value_delimiter = ',', default_value = "100,300,1000")]
    nodes: Vec<u32>,
    /// How many shards.
    #[arg(long, default_value_t = 1_000_000)]
    shards: u32,
    /// How many nodes are restarted; one of a hundred unless said.
    #[arg(long)]
    restarts: Option<u32>,
    /// How many of them at once; one of a thousand unless said.
    #[arg(long)]
    at_once: Option<u32>,
    /// What happens once all have started, in this order.
    #[arg(long, value_delimiter = ',', default_values = ["idle", "zone-lost", "zone-stopped", "restart"])]
    then: Vec<Then>,
}

#[expect(clippy::print_stdout, reason = "this is what the command is for")]
fn say(text: &str) {
    println!("{text}");
}

fn main() -> ExitCode {
    match all(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("failed: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn all(options: &Options) -> coord_core::Result<()> {
    say(
        "| nodes | shards | phase | took (virtual s) | CPU s | calls | of them heartbeats | publishes `_cluster` + table | written KiB | read KiB by one watcher | events `_cluster` / table / nodes / lease / requests | moves (fewest) | decode ms | RSS MiB |",
    );
    say("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    let table = table()?;
    for &nodes in &options.nodes {
        let shards = ShardCount::new(options.shards)?;
        let mut scale = Scale::new(nodes, shards);
        scale.restarts = options.restarts.unwrap_or(scale.restarts);
        scale.at_once = options.at_once.unwrap_or(scale.at_once);
        scale.then.clone_from(&options.then);
        let before = resident();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .map_err(|e| {
                coord_core::Error::new(coord_core::ErrorKind::Internal, "start").with_source(e)
            })?;
        let told = |phase: &Phase| say(&row(phase, options.shards, &table, before));
        runtime.block_on(run(&scale, told))?;
    }
    Ok(())
}

fn row(phase: &Phase, shards: u32, table: &TableName, before: u64) -> String {
    let Phase { name, nodes, took, cpu, counts, fewest_moves, resident } = phase;
    let (cluster, table) = (counts.table(&TableName::cluster()), counts.table(table));
    let told = |watch| counts.told(watch);
    format!(
        "| {nodes} | {shards} | {name} | {:.1} | {:.2} | {} | {} | {} + {} | {} | {} | {} / {} / {} / {} / {} | {} ({fewest_moves}) | {:.2} | {} |",
        took.as_secs_f64(),
        cpu.as_secs_f64(),
        counts.calls.values().sum::<u64>(),
        counts.calls("heartbeat"),
        cluster.versions,
        table.versions,
        (cluster.bytes_written + table.bytes_written) / 1024,
        (cluster.bytes_read + table.bytes_read) / 1024,
        told("cluster"),
        told("table"),
        told("nodes"),
        told("lease"),
        told("requests"),
        table.moves,
        (cluster.decoding + table.decoding).as_secs_f64() * 1e3,
        resident.saturating_sub(before) / (1 << 20),
    )
}
