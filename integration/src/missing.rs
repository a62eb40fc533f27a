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

    /// Whether there is what a fixture of the conformance suite needs, or why its trials are left out. What is
    /// broken is not left out: its trials run, and fail.
    ///
    /// # Errors
    /// The reason.
    pub fn available<T>(needed: &Result<T, Self>) -> Result<(), String> {
        match needed {
            Err(missing) if !missing.broken => Err(missing.to_string()),
            _ => Ok(()),
        }
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
    /// Says once, on the standard error, what is left out, and for `cargo xtask test`, which sums it up at
    /// the end, in the file that `COORD_LEFT_OUT` names.
    #[expect(clippy::print_stderr, reason = "who runs the tests has to see what was left out")]
    pub(crate) fn tell(&self) {
        let text = self.to_string();
        if !TOLD.lock().unwrap_or_else(PoisonError::into_inner).insert(text.clone()) {
            return;
        }
        eprintln!("left out: {text}");
        if let Some(path) = std::env::var_os("COORD_LEFT_OUT") {
            let how = if self.broken { "broken" } else { "absent" };
            let reason = self.reason.replace(['\n', '\t'], " ");
            let line = format!("{}\t{how}\t{reason}\n", self.what);
            let file = OpenOptions::new().create(true).append(true).open(&path);
            // In one write, since other programs write to it at the same time.
            if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
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

    #[test]
    fn what_is_broken_is_not_left_out() {
        let (absent, broken) = (Missing::absent("kube", "none"), Missing::broken("kube", "mute"));
        assert_eq!(Missing::available(&Ok(1)), Ok(()));
        assert_eq!(Missing::available::<()>(&Err(broken)), Ok(()));
        let reason = Missing::available::<()>(&Err(absent)).expect_err("it is not here");
        assert_eq!(reason, "kube is not here: none");
    }
}
