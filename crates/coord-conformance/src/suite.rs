//! From cases to trials that a test runner runs.

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use libtest_mimic::{Arguments, Completion, Failed, Trial};

use crate::case::{Case, Verdict};
use crate::fixture::Fixture;
use crate::report::Report;
use crate::trials;

/// All trials as data: names, sentences, rules; each can be [run](Case::run) by itself.
pub fn cases() -> impl Iterator<Item = &'static Case> {
    trials::all()
}

/// The suite as trials for [`libtest_mimic::run`], named `group::behaviour`. Slow ones are marked as
/// ignored, and run with `--ignored` or `--include-ignored`.
#[must_use]
pub fn suite(fixture: impl Fixture) -> Vec<Trial> {
    trials_of(Arc::new(fixture), &Report::default())
}

fn trials_of(fixture: Arc<dyn Fixture>, report: &Report) -> Vec<Trial> {
    let required = is_required(fixture.name());
    let available = Arc::new(OnceLock::new());
    let trial = |case: &'static Case| {
        let (fixture, available) = (Arc::clone(&fixture), Arc::clone(&available));
        let report = report.clone();
        let trial = Trial::ignorable_test(case.name(), move || {
            match available.get_or_init(|| is_available(&*fixture)) {
                Ok(()) => {
                    let verdict = case.run(&fixture);
                    report.note(case, &verdict);
                    completion(verdict)
                }
                Err(reason) if required => Err(Failed::from(format!("required, but {reason}"))),
                Err(reason) => Ok(Completion::ignored_with(reason)),
            }
        });
        if case.slow { trial.with_kind("slow").with_ignored_flag(true) } else { trial }
    };
    cases().map(trial).collect()
}

/// Runs the suite with the arguments of the process, as a test target's `main` with `harness = false`:
/// the same arguments and output as any Rust test's.
///
/// It fails if a trial failed, and also if none ran although nobody asked for a part. Where
/// `COORD_CONFORMANCE_REPORT` names a folder, a run of the whole suite leaves `NAME.json` there, and one of
/// the slow trials alone (`--ignored`) `NAME-slow.json`: the backend's promises in words, and the outcome
/// of each trial.
pub fn main(fixture: impl Fixture) -> ExitCode {
    let (fixture, report): (Arc<dyn Fixture>, _) = (Arc::new(fixture), Report::default());
    let arguments = Arguments::from_args();
    let everything = arguments.filter.is_none() && arguments.skip.is_empty() && !arguments.list;
    let conclusion = libtest_mimic::run(&arguments, trials_of(Arc::clone(&fixture), &report));
    let counted = conclusion.num_passed + conclusion.num_failed + conclusion.num_ignored;
    if everything && let Err(why) = report.write_if_wanted(&*fixture, arguments.ignored) {
        return fail(&why);
    }
    if everything && counted == 0 { ExitCode::FAILURE } else { conclusion.exit_code() }
}

#[expect(clippy::print_stderr, reason = "a test says why it failed")]
fn fail(why: &str) -> ExitCode {
    eprintln!("{why}");
    ExitCode::FAILURE
}

/// Whether `COORD_REQUIRE` names this: then a test that can't have it fails, where it is otherwise
/// ignored. The variable holds names with commas between them.
#[must_use]
pub fn is_required(name: &str) -> bool {
    requires(&std::env::var("COORD_REQUIRE").unwrap_or_default(), name)
}

/// Whether the list of required fixtures has this one.
fn requires(list: &str, name: &str) -> bool {
    list.split(',').any(|required| required.trim() == name)
}

fn completion(verdict: Verdict) -> Result<Completion, Failed> {
    match verdict {
        Verdict::Passed => Ok(Completion::Completed),
        Verdict::Ignored(reason) => Ok(Completion::ignored_with(reason)),
        Verdict::Failed(why) => Err(Failed::from(why)),
    }
}

fn is_available(fixture: &dyn Fixture) -> Result<(), String> {
    runtime()?.block_on(fixture.available())
}

pub(crate) fn runtime() -> Result<tokio::runtime::Runtime, String> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().map_err(|error| format!("no runtime: {error}"))
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use coord_core::{ClusterName, Error, ErrorKind};

    use super::*;
    use crate::fixture::{Handle, Profile};

    #[derive(Debug)]
    struct Nowhere;

    #[async_trait]
    impl Fixture for Nowhere {
        fn name(&self) -> &str {
            "nowhere"
        }

        fn profile(&self) -> Profile {
            Profile::paused()
        }

        async fn available(&self) -> Result<(), String> {
            Err("there is no server".to_owned())
        }

        async fn open(&self, _: &ClusterName) -> coord_core::Result<Handle> {
            Err(Error::new(ErrorKind::Unavailable, "open"))
        }
    }

    #[test]
    fn a_store_that_is_not_there_passes_nothing() {
        let quietly = Arguments { quiet: true, ..Arguments::default() };
        let conclusion = libtest_mimic::run(&quietly, suite(Nowhere));
        assert_eq!(conclusion.num_passed, 0);
        assert_eq!(conclusion.num_failed, 0);
        assert_eq!(conclusion.num_ignored, u64::try_from(cases().count()).expect("fits"));
    }

    #[test]
    fn a_store_is_required_by_its_whole_name() {
        assert!(requires("etcd, memory", "memory"));
        assert!(!requires("etcd", "memory"));
        assert!(!requires("", "memory"));
        assert!(!requires("etcd-old", "etcd"));
    }
}
