//! The suite itself is tested: backends that are broken on purpose, each caught by the trial that is
//! meant to catch it, which the good backend passes.

mod discovery;
mod fixture;
mod lease;
mod placement;
mod plant;

use std::io::Write as _;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use coord_conformance::{Case, Fixture, Verdict, cases};
use libtest_mimic::{Arguments, Failed, Trial};

use crate::fixture::BrokenFixture;
use crate::plant::{PLANTS, Plant};

/// What each trial said of the broken backend that it caught.
type Said = Arc<Mutex<Vec<(Plant, &'static str, String)>>>;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let said = Said::default();
    let trial = |(plant, caught_by): &(Plant, &'static str)| {
        let (plant, caught_by, said) = (*plant, *caught_by, Arc::clone(&said));
        Trial::test(format!("{plant:?} -> {caught_by}"), move || {
            let text = catch(plant, caught_by)?;
            let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
            said.push((plant, caught_by, text));
            Ok(())
        })
    };
    let conclusion = libtest_mimic::run(&arguments, PLANTS.iter().map(trial).collect());
    let mut said = std::mem::take(&mut *said.lock().unwrap_or_else(PoisonError::into_inner));
    said.sort_by_key(|(plant, ..)| *plant);
    if print_table(&said).is_err() {
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}

/// Runs the trial against the good backend, which has to pass, and against the broken one, which has
/// to fail with a text: neither a panic nor a trial that never ends counts as caught.
fn catch(plant: Plant, caught_by: &str) -> Result<String, Failed> {
    let case: &Case = cases()
        .find(|case| case.name() == caught_by)
        .ok_or_else(|| Failed::from(format!("there is no trial {caught_by}")))?;
    let good: Arc<dyn Fixture> = Arc::new(BrokenFixture::new(Plant::Nothing));
    let broken: Arc<dyn Fixture> = Arc::new(BrokenFixture::new(plant));
    match (case.run(&good), case.run(&broken)) {
        (Verdict::Passed, Verdict::Failed(why))
            if !why.starts_with("panicked") && !why.starts_with("still running") =>
        {
            Ok(why)
        }
        other => Err(Failed::from(format!("good and broken backend: {other:?}"))),
    }
}

fn print_table(said: &[(Plant, &'static str, String)]) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    for (plant, caught_by, text) in said {
        let plant = format!("{plant:?}");
        let line: String = text.chars().take(110).collect();
        writeln!(out, "{plant:26} | {caught_by:64} | {line}")?;
    }
    writeln!(out, "{} of {} broken backends were caught", said.len(), PLANTS.len())
}
