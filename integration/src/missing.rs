//! What becomes of a test whose server is not there.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::sync::{Mutex, PoisonError};

use libtest_mimic::{Failed, Trial};

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
        self.fails_if(&std::env::var("COORD_REQUIRE").unwrap_or_default())
    }

    fn fails_if(&self, required: &str) -> bool {
        self.broken || required.split(',').any(|name| name.trim() == self.what)
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
            let reason = missing.to_string();
            let kind = format!("no {}", missing.what);
            // It fails also where somebody asks for ignored tests: it can't pass unrun.
            Trial::test(name, move || Err(Failed::from(reason)))
                .with_ignored_flag(!missing.fails())
                .with_kind(kind)
        }
    }
}

/// What was told already in this process.
static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

impl Missing {
    /// Says once, on the standard error, what is left out, and for `cargo xtask test`, which repeats it
    /// at the end, in the file that `COORD_LEFT_OUT` names.
    #[expect(clippy::print_stderr, reason = "who runs the tests has to see what was left out")]
    fn tell(&self) {
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
    use super::*;

    #[test]
    fn only_what_is_required_or_broken_fails() {
        let absent = Missing::absent("nats", "no program");
        assert!(!absent.fails_if(""));
        assert!(!absent.fails_if("etcd"));
        assert!(absent.fails_if("etcd, nats"));
        assert!(Missing::broken("nats", "does not start").fails_if(""));
    }

    #[test]
    fn a_trial_without_its_server_is_ignored() {
        let missing: Result<(), _> = Err(Missing::absent("zookeeper", "nobody wants it"));
        let trial = trial("name", &missing, |()| Ok(()));
        assert!(trial.has_ignored_flag());
        assert_eq!(trial.kind(), "no zookeeper");
    }
}
