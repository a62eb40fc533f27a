//! What becomes of a test whose server is not there.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::sync::{Mutex, PoisonError};

use libtest_mimic::{Completion, Failed, Trial};

/// Why a test can't have what it needs.
#[derive(Clone, Debug)]
pub struct Missing {
    what: String,
    reason: String,
    broken: bool,
}

impl Missing {
    /// `what` (a backend's name, or a tool's) is not on this machine. Its tests are ignored, unless
    /// `COORD_REQUIRE` names it.
    #[must_use]
    pub fn absent(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { what: what.into(), reason: reason.into(), broken: false }
    }

    /// `what` is there and does not work. Its tests fail.
    #[must_use]
    pub fn broken(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { what: what.into(), reason: reason.into(), broken: true }
    }

    /// What is missing.
    #[must_use]
    pub fn what(&self) -> &str {
        &self.what
    }

    /// Whether its tests fail: it is there and broken, or it was required.
    #[must_use]
    pub fn fails(&self) -> bool {
        self.broken || coord_conformance::is_required(&self.what)
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = if self.broken { "broken" } else { "not here" };
        write!(f, "{} is {word}: {}", self.what, self.reason)
    }
}

impl std::error::Error for Missing {}

/// A trial that gets what it needs. Where that is missing the trial is ignored, or fails if it
/// [has to](Missing::fails), and the reason is told.
pub fn trial<T, F>(name: impl Into<String>, needed: &Result<T, Missing>, body: F) -> Trial
where
    T: Clone + Send + 'static,
    F: FnOnce(T) -> Result<(), Failed> + Send + 'static,
{
    match needed {
        Ok(needed) => {
            let needed = needed.clone();
            Trial::test(name, move || body(needed))
        }
        Err(missing) => {
            missing.tell();
            unmet(name, missing)
        }
    }
}

fn unmet(name: impl Into<String>, missing: &Missing) -> Trial {
    let (reason, fails) = (missing.to_string(), missing.fails());
    // Not the flag for ignored tests: somebody may ask for those, and it would pass unrun.
    Trial::ignorable_test(name, move || match fails {
        true => Err(Failed::from(reason)),
        false => Ok(Completion::ignored_with(reason)),
    })
}

/// What was told already in this process.
static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

impl Missing {
    /// Says once, on the standard error, what is left out, and for `cargo xtask test`, which repeats it
    /// at the end, in the file that `COORD_LEFT_OUT` names.
    #[expect(clippy::print_stderr, reason = "who runs the tests has to see what was left out")]
    pub(crate) fn tell(&self) {
        let text = self.to_string();
        if !TOLD.lock().unwrap_or_else(PoisonError::into_inner).insert(text.clone()) {
            return;
        }
        eprintln!("left out: {text}");
        if let Some(path) = std::env::var_os("COORD_LEFT_OUT") {
            let file = OpenOptions::new().create(true).append(true).open(&path);
            if let Err(error) = file.and_then(|mut file| writeln!(file, "{text}")) {
                eprintln!("COORD_LEFT_OUT={}: {error}", path.display());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use libtest_mimic::Arguments;

    use super::*;

    #[test]
    fn a_trial_without_its_server_is_never_passed() {
        let missing = Missing::absent("zookeeper", "nobody wants it");
        let arguments = Arguments { quiet: true, ..Arguments::default() };
        let trials = vec![unmet("name", &missing)];
        let conclusion = libtest_mimic::run(&arguments, trials);
        assert_eq!((conclusion.num_passed, conclusion.num_ignored), (0, 1));
    }
}
