//! The `coord` command: run, inspect and try out a cluster.

mod args;
mod check;
mod demo;
mod failure;
mod lease;
mod plan;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::args::{Cli, Command};
use crate::failure::{Failure, code};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    start_logging(cli.verbose);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let outcome = match runtime {
        Ok(runtime) => runtime.block_on(run(cli)),
        Err(error) => Err(Failure::from(error)),
    };
    match outcome {
        Ok(code) => code,
        Err(Failure { code, message }) => {
            if !message.is_empty() {
                // Nothing can be done about a standard error that can't be written to.
                let _ = writeln!(std::io::stderr(), "coord: {message}");
            }
            ExitCode::from(code)
        }
    }
}

/// Says what is wrong with the arguments, or what was asked for in their place (help, version). clap
/// repeats an argument that it can't place, which may be a URL with a password.
fn refuse(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    if !error.use_stderr() || !text.contains("://") {
        // Nothing can be done about an output that can't be written to.
        let _ = error.print();
    } else {
        let hint = "\nA store's URL goes with --backend, before or after the command.\n";
        let _ = write!(std::io::stderr(), "{}{hint}", failure::without_secrets(&text));
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(code::BAD_INPUT))
}

async fn run(cli: Cli) -> Result<ExitCode, Failure> {
    let backend = cli.backend.as_deref();
    match &cli.command {
        Command::Demo(args) => demo::run(args, backend, cli.output).await,
        Command::Plan(args) => plan::run(args, cli.output),
        Command::Check => check::run(backend, cli.output).await,
        Command::Lease(command) => lease::run(command, backend, cli.output).await,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "coord", &mut script);
            std::io::stdout().write_all(&script)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// The store that a command talks to when none is named.
fn backend_or_memory(backend: Option<&str>) -> &str {
    backend.unwrap_or("memory://default")
}

/// Logs go to standard error, so that standard output can be piped.
fn start_logging(verbose: u8) {
    let level = match verbose {
        0 => LevelFilter::ERROR,
        1 => LevelFilter::INFO,
        _ => LevelFilter::DEBUG,
    };
    let ours =
        ["coord", "coord_core", "coord_cluster", "coord_placement"].map(|name| (name, level));
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    tracing_subscriber::registry().with(layer).with(Targets::new().with_targets(ours)).init();
}
