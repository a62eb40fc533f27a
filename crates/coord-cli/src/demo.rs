//! The main job: a cluster in this process loses its leader and goes on.

mod audit;
mod report;
mod script;
mod view;
mod world;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use crate::args::{DemoArgs, Output};
use crate::failure::{Failure, code};

/// Runs the demo; success only if every step came about and every invariant held throughout.
pub(crate) async fn run(
    args: &DemoArgs,
    backend: Option<&str>,
    output: Output,
) -> Result<ExitCode, Failure> {
    let form = match output {
        Output::Json => report::Form::Json,
        Output::Text if std::io::stdout().is_terminal() => report::Form::Live,
        Output::Text => report::Form::Lines,
    };
    // Each run is a cluster of its own, also where the store is shared.
    let own = format!("memory://demo-{}", std::process::id());
    let world = world::World::open(backend.unwrap_or(&own), args).await?;
    let held = script::play(world, report::Report::new(form), args).await?;
    Ok(if held { ExitCode::SUCCESS } else { ExitCode::from(code::DID_NOT_HOLD) })
}
