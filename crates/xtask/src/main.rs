//! Development tasks: `cargo xtask test`, and `cargo xtask cargo …` for any other cargo command.
//!
//! Some dependencies run `protoc` in their build scripts. A newcomer has none, so this brings the one
//! that a crate carries, unless the machine has its own: see docs/adr/0001-protoc.md.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command talks to a terminal")]

#[cfg(test)]
mod imports;
#[cfg(test)]
mod links;
mod mutants;
mod programs;
mod protoc;
mod soak;
mod summary;
mod tables;
#[cfg(test)]
mod words;
mod woven;

use std::ffi::OsStr;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};

use crate::summary::Counts;

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
    /// Run all tests that this machine can run; at the end, how many were run, and what they lacked.
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
    /// Run the fuzz targets, all together for a minute unless `--for` says otherwise.
    ///
    /// `cargo xtask fuzz --help` says more, e.g. how a failing input is run again.
    #[command(disable_help_flag = true)]
    Fuzz {
        /// Passed on to `coord-fuzz`: targets, `--for 10m`, `--seed N`, `--replay FILE`, `--list`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Change the files that safety rests on in one place at a time, and look whether a test notices.
    ///
    /// crates/xtask/mutants.toml names the files, and explains each change that no test needs to notice. All of
    /// it takes hours: name files, a part or a time. docs/mutants.md says how long and what was found.
    Mutants {
        /// Only one part of all changes, e.g. 1/4 for the first of four.
        #[arg(long, value_name = "I/N")]
        shard: Option<String>,
        /// End after this time, with what is known by then, e.g. 30m.
        #[arg(long = "for", value_name = "TIME", value_parser = humantime::parse_duration)]
        time: Option<Duration>,
        /// Only changes whose name, as it is printed, matches this regular expression.
        #[arg(long = "re", value_name = "REGEX")]
        names: Vec<String>,
        /// Which of the files.
        files: Vec<String>,
    },
    /// Run test programs that were built again and again while other processes keep the machine busy, all of
    /// them at once, and sum up: what passes by luck fails some time.
    ///
    /// E.g. `cargo xtask soak target/debug/deps/conformance-0123456789abcdef`, as `cargo test --no-run` names it.
    Soak {
        /// How often each is run.
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
        times: u32,
        /// How many busy processes there are.
        #[arg(long, default_value_t = 8)]
        busy: u32,
        /// Begin no run after this time, e.g. 30m.
        #[arg(long = "for", value_name = "TIME", value_parser = humantime::parse_duration)]
        time: Option<Duration>,
        /// The programs.
        #[arg(required = true)]
        programs: Vec<PathBuf>,
        /// Passed on to each program.
        #[arg(last = true)]
        arguments: Vec<String>,
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
        Task::Mutants { shard, time, names, files } => {
            mutants::run(workspace_root(), &mutants::Ask { shard, time, names, files })
        }
        Task::Fuzz { args } => {
            let run = ["run", "--quiet", "--package", "coord-fuzz", "--"].map(str::to_owned);
            cargo(&[&run, args.as_slice()].concat())
        }
        Task::Test { at_once, args } => test(at_once.into(), args),
        Task::Soak { times, busy, time, programs, arguments } => {
            let ask = soak::Ask { times, busy, time, programs, arguments };
            let passed = soak::run(&ask, &workspace_root().join("target/soak"))?;
            Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Task::Tables { reports, check } => {
            let root = workspace_root();
            tables::run(root, &root.join(reports), check).map(|()| ExitCode::SUCCESS)
        }
    }
}

/// Runs the tests of the whole workspace, unless the arguments choose a package, and then says what
/// they did not cover.
fn test(at_once: usize, args: Vec<String>) -> Result<ExitCode> {
    summary::check_required(&std::env::var("COORD_REQUIRE").unwrap_or_default())?;
    let mut command = vec!["test".to_owned()];
    let chooses = |arg: &String| arg == "-p" || arg.starts_with("--package");
    if !args.iter().any(chooses) {
        command.extend(["--workspace", "--features", TEST_FEATURES].map(str::to_owned));
    }
    let told = workspace_root().join("target/left-out");
    std::fs::create_dir_all(workspace_root().join("target")).context("create target")?;
    std::fs::write(&told, "").with_context(|| format!("write {}", told.display()))?;
    let variables = [("COORD_LEFT_OUT", told.as_os_str())];
    let mut counts = Counts::default();
    let code = if args.is_empty() {
        all(&command, at_once, &variables, &mut counts)?
    } else {
        command.extend(args);
        cargo_counted(&command, &variables, &mut counts)?
    };
    let told = std::fs::read_to_string(&told).context("read what tests lacked")?;
    println!("\n{counts}\n{}", summary::lacking(&told).trim_end());
    Ok(code)
}

/// Builds all test programs, runs so many at once, and then the examples in the documentation.
fn all(
    command: &[String],
    at_once: usize,
    variables: &[(&str, &OsStr)],
    counts: &mut Counts,
) -> Result<ExitCode> {
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
    let programs = programs::read(&messages)?;
    let failed = programs::run(programs, at_once, &outputs, variables, counts)?;
    let examples = cargo_counted(&with(&["--doc"]), variables, counts)?;
    for name in &failed {
        println!("FAILED: {name}");
    }
    Ok(if failed.is_empty() { examples } else { ExitCode::FAILURE })
}

/// Runs cargo with `PROTOC` and `PROTOC_INCLUDE` set as needed, and hands its exit code on.
fn cargo(args: &[String]) -> Result<ExitCode> {
    let status = cargo_command(args)?.status();
    Ok(code_of(status.with_context(|| format!("start cargo {}", args.join(" ")))?))
}

/// Runs cargo, shows what it says and counts the trials in it.
fn cargo_counted(
    args: &[String],
    variables: &[(&str, &OsStr)],
    counts: &mut Counts,
) -> Result<ExitCode> {
    let mut command = cargo_command(args)?;
    command.envs(variables.iter().copied()).stdout(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("start cargo {}", args.join(" ")))?;
    let mut said = Vec::new();
    if let Some(mut output) = child.stdout.take() {
        let mut part = [0; 4096];
        loop {
            let length = output.read(&mut part).context("read what cargo says")?;
            if length == 0 {
                break;
            }
            std::io::stdout().write_all(&part[..length]).context("show what cargo says")?;
            std::io::stdout().flush().context("show what cargo says")?;
            said.extend_from_slice(&part[..length]);
        }
    }
    counts.add(&String::from_utf8_lossy(&said));
    Ok(code_of(child.wait().context("wait for cargo")?))
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
