//! The `coord` command: run, inspect and try out a cluster.

mod args;
mod check;
mod demo;
mod exec;
mod failure;
mod first;
mod lease;
mod plan;
mod signals;
mod store;

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _};
use coord::Coord;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::args::{Cli, Command};
use crate::failure::{Failure, code};

fn main() -> ExitCode {
    if let Some(code) = exec::become_the_command().or_else(first::run) {
        return code;
    }
    let matches = Cli::command().try_get_matches();
    let cli = matches.and_then(|matches| {
        let cli = Cli::from_arg_matches(&matches)?;
        Ok((store::named(&matches), cli))
    });
    let (store, cli) = match cli {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    start_logging(cli.verbose);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let outcome = match (store, runtime) {
        (Ok(store), Ok(runtime)) => runtime.block_on(run(cli, store.as_deref())),
        (Err(failure), _) => Err(failure),
        (_, Err(error)) => Err(Failure::from(error)),
    };
    match outcome {
        Ok(code) => code,
        Err(Failure { code, message }) => {
            if !message.is_empty() {
                // Nothing can be done about a standard error that can't be written to.
                let _ = writeln!(std::io::stderr(), "coord: {}", failure::shown(&message));
            }
            ExitCode::from(code)
        }
    }
}

/// Says what is wrong with the arguments, or what was asked for in their place (help, version). clap
/// repeats an argument that it can't place, which may be a URL with a password.
fn refuse(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    let shown = failure::without_secrets(&failure::shown(&text));
    // Nothing can be done about an output that can't be written to.
    if !error.use_stderr() || (shown == text && !text.contains("://")) {
        let _ = error.print();
    } else {
        let hint = "\nA store's URL goes with --backend, before or after the command.\n";
        let _ = write!(std::io::stderr(), "{shown}{hint}");
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(code::BAD_INPUT))
}

async fn run(cli: Cli, store: Option<&str>) -> Result<ExitCode, Failure> {
    match &cli.command {
        Command::Demo(args) => demo::run(args, store, cli.output).await,
        Command::Plan(args) => plan::run(args, cli.output),
        Command::Check(args) => check::run(args, store::needed(store)?, cli.output).await,
        Command::Lease(command) => lease::run(command, store::needed(store)?, cli.output).await,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "coord", &mut script);
            std::io::stdout().write_all(&script)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Opens the store for a command at a terminal: it is tried once, unless the URL says to wait.
async fn connect(url: &str) -> coord::Result<Coord> {
    coord::connector(url)?.wait_for_store(std::time::Duration::ZERO).open().await.map(Coord::new)
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
    let colours = std::io::stderr().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let layer = tracing_subscriber::fmt::layer().with_ansi(colours).with_writer(std::io::stderr);
    tracing_subscriber::registry().with(layer).with(Targets::new().with_targets(ours)).init();
}
