//! `cargo xtask fuzz`: runs the fuzz targets.

#![expect(clippy::print_stderr, reason = "a command talks to a terminal")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use coord_core::AttemptId;
use coord_fuzz::{Meter, Plan, Target, all, fuzz, replay};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Runs the fuzz targets: first the inputs that went wrong once, then good ones, then damaged forms of them.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask fuzz", bin_name = "cargo xtask fuzz")]
struct Cli {
    /// Which targets; all of them unless some are named.
    targets: Vec<String>,
    /// For how long, all targets together.
    #[arg(long = "for", value_name = "TIME", default_value = "60s", value_parser = humantime::parse_duration)]
    time: Duration,
    /// What the damage is drawn from; another one at each run unless it is given.
    #[arg(long)]
    seed: Option<u64>,
    /// Runs the one target that is named on this file only.
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
    /// Names the targets.
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("coord-fuzz: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(cli: &Cli) -> Result<ExitCode> {
    let targets = chosen(&cli.targets)?;
    if cli.list {
        targets.iter().for_each(|target| eprintln!("{}", target.name));
        return Ok(ExitCode::SUCCESS);
    }
    #[expect(clippy::cast_possible_truncation, reason = "any of its bits do")]
    let seed = cli.seed.unwrap_or_else(|| AttemptId::random().as_u128() as u64);
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let failures = here.ancestors().nth(2).unwrap_or(here).join("target/fuzz");
    let plan = Plan::new(cli.time, seed, here.join("regressions"), failures);
    let meter = Meter::new(
        || ALLOCATOR.current_usage(),
        || ALLOCATOR.peak_usage(),
        || ALLOCATOR.reset_peak_usage(),
    );
    let failures = match &cli.replay {
        Some(file) => {
            let [target] = targets.as_slice() else { bail!("--replay takes one target") };
            replay(target, file, &plan, meter)?.into_iter().collect()
        }
        None => {
            eprintln!("seed {seed}");
            fuzz(&targets, &plan, meter)?
        }
    };
    for failure in &failures {
        eprintln!("FAILED: {failure}");
    }
    Ok(if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn chosen(names: &[String]) -> Result<Vec<Target>> {
    let all = all();
    if names.is_empty() {
        return Ok(all);
    }
    let find = |name: &String| {
        let known = || all.iter().map(|target| target.name).collect::<Vec<_>>().join(", ");
        let found = all.iter().find(|target| target.name == name);
        found
            .copied()
            .with_context(|| format!("no target is named {name:?}; there are {}", known()))
    };
    names.iter().map(find).collect()
}
