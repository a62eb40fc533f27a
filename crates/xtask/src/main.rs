//! Development tasks: `cargo xtask test`, and `cargo xtask cargo …` for any other cargo command.
//!
//! Some dependencies run `protoc` in their build scripts. A newcomer has none, so this brings the one
//! that a crate carries, unless the machine has its own: see docs/adr/0001-protoc.md.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command talks to a terminal")]

mod left_out;
mod protoc;
mod tables;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};

/// Everything but the peers of the benchmarks.
const TEST_FEATURES: &str =
    "coord-cli/full,coord-integration/containers,coord-integration/etcd,coord-integration/tls";

/// Development tasks of the coord workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run all tests that this machine can run, and name those it left out.
    ///
    /// COORD_REQUIRE=nats,etcd,… makes a failure of each named backend that is left out.
    Test {
        /// Passed on to `cargo test`, e.g. `-p coord-core` or a test's name.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Make docs/conformance.md and the README's table of guarantees from the conformance suite's reports.
    Tables {
        /// The folder that COORD_CONFORMANCE_REPORT named in a run of all backends.
        #[arg(default_value = "target/conformance")]
        reports: PathBuf,
        /// Change nothing; fail if they are not as the reports make them.
        #[arg(long)]
        check: bool,
    },
    /// Run any cargo command with `protoc` at hand, e.g. `cargo xtask cargo clippy --all-features`.
    Cargo {
        /// The command and its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        args: Vec<String>,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode> {
    match cli.task {
        Task::Cargo { args } => cargo(&args),
        Task::Test { args } => test(args),
        Task::Tables { reports, check } => {
            let root = workspace_root();
            tables::run(root, &root.join(reports), check).map(|()| ExitCode::SUCCESS)
        }
    }
}

/// Runs the tests of the whole workspace, unless the arguments choose a package, and then says what
/// they did not cover.
fn test(args: Vec<String>) -> Result<ExitCode> {
    let required = std::env::var("COORD_REQUIRE").unwrap_or_default();
    let left_out = left_out::find(workspace_root(), &required)?;
    let mut command = vec!["test".to_owned()];
    let chooses = |arg: &String| arg == "-p" || arg.starts_with("--package");
    if !args.iter().any(chooses) {
        command.extend(["--workspace", "--features", TEST_FEATURES].map(str::to_owned));
    }
    command.extend(args);
    let told = workspace_root().join("target/left-out");
    std::fs::create_dir_all(workspace_root().join("target")).context("create target")?;
    std::fs::write(&told, "").with_context(|| format!("write {}", told.display()))?;
    let code = cargo_with(&command, &[("COORD_LEFT_OUT", told.as_os_str())])?;
    println!("\n{left_out}");
    let told = std::fs::read_to_string(&told).context("read what tests left out")?;
    for line in told.lines().collect::<BTreeSet<_>>() {
        println!("left out: {line}");
    }
    if left_out.fails() { Ok(ExitCode::FAILURE) } else { Ok(code) }
}

/// Runs cargo with `PROTOC` and `PROTOC_INCLUDE` set as needed, and hands its exit code on.
fn cargo(args: &[String]) -> Result<ExitCode> {
    cargo_with(args, &[])
}

fn cargo_with(args: &[String], variables: &[(&str, &OsStr)]) -> Result<ExitCode> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(args).envs(variables.iter().copied()).current_dir(workspace_root());
    protoc::provide(&mut command)?;
    let status = command.status().with_context(|| format!("start cargo {}", args.join(" ")))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}

fn workspace_root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here)
}
