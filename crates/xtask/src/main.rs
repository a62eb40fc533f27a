//! Development tasks: `cargo xtask test`, and `cargo xtask cargo …` for any other cargo command.
//!
//! Some dependencies run `protoc` in their build scripts. A newcomer has none, so this brings the one
//! that a crate carries, unless the machine has its own: see docs/adr/0001-protoc.md.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command talks to a terminal")]

mod left_out;
mod programs;
mod protoc;
mod tables;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

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
        /// How many test programs run at once when all are run; they mostly wait for servers.
        #[arg(long, value_name = "PROGRAMS", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..))]
        at_once: u8,
        /// Passed on to `cargo test`, e.g. `-p coord-core` or a test's name: it then runs one program
        /// after the other.
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
        Task::Test { at_once, args } => test(at_once.into(), args),
        Task::Tables { reports, check } => {
            let root = workspace_root();
            tables::run(root, &root.join(reports), check).map(|()| ExitCode::SUCCESS)
        }
    }
}

/// Runs the tests of the whole workspace, unless the arguments choose a package, and then says what
/// they did not cover.
fn test(at_once: usize, args: Vec<String>) -> Result<ExitCode> {
    let required = std::env::var("COORD_REQUIRE").unwrap_or_default();
    let left_out = left_out::find(workspace_root(), &required)?;
    let mut command = vec!["test".to_owned()];
    let chooses = |arg: &String| arg == "-p" || arg.starts_with("--package");
    if !args.iter().any(chooses) {
        command.extend(["--workspace", "--features", TEST_FEATURES].map(str::to_owned));
    }
    let told = workspace_root().join("target/left-out");
    std::fs::create_dir_all(workspace_root().join("target")).context("create target")?;
    std::fs::write(&told, "").with_context(|| format!("write {}", told.display()))?;
    let variables = [("COORD_LEFT_OUT", told.as_os_str())];
    let code = if args.is_empty() {
        all(&command, at_once, &variables)?
    } else {
        command.extend(args);
        cargo_with(&command, &variables)?
    };
    println!("\n{left_out}");
    let told = std::fs::read_to_string(&told).context("read what tests left out")?;
    for line in told.lines().collect::<BTreeSet<_>>() {
        println!("left out: {line}");
    }
    if left_out.fails() { Ok(ExitCode::FAILURE) } else { Ok(code) }
}

/// Builds all test programs, runs so many at once, and then the examples in the documentation.
fn all(command: &[String], at_once: usize, variables: &[(&str, &OsStr)]) -> Result<ExitCode> {
    let with = |more: &[&str]| -> Vec<String> {
        command.iter().cloned().chain(more.iter().map(|arg| (*arg).to_owned())).collect()
    };
    let mut build =
        cargo_command(&with(&["--no-run", "--message-format", "json-render-diagnostics"]))?;
    let built = build.stderr(Stdio::inherit()).output().context("start cargo test --no-run")?;
    if !built.status.success() {
        return Ok(code_of(built.status));
    }
    let messages = String::from_utf8(built.stdout).context("cargo's messages")?;
    let outputs = workspace_root().join("target/test-programs");
    let failed = programs::run(programs::read(&messages)?, at_once, &outputs, variables)?;
    let examples = cargo_with(&with(&["--doc"]), variables)?;
    for name in &failed {
        println!("FAILED: {name}");
    }
    Ok(if failed.is_empty() { examples } else { ExitCode::FAILURE })
}

/// Runs cargo with `PROTOC` and `PROTOC_INCLUDE` set as needed, and hands its exit code on.
fn cargo(args: &[String]) -> Result<ExitCode> {
    cargo_with(args, &[])
}

fn cargo_with(args: &[String], variables: &[(&str, &OsStr)]) -> Result<ExitCode> {
    let mut command = cargo_command(args)?;
    command.envs(variables.iter().copied());
    let status = command.status().with_context(|| format!("start cargo {}", args.join(" ")))?;
    Ok(code_of(status))
}

fn cargo_command(args: &[String]) -> Result<Command> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(args).current_dir(workspace_root());
    protoc::provide(&mut command)?;
    Ok(command)
}

fn code_of(status: ExitStatus) -> ExitCode {
    ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

fn workspace_root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here)
}
