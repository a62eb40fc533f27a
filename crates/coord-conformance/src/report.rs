//! What a run of the suite found, for the tables of the documentation.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use coord_core::ClusterName;
use serde_json::{Value, json};

use crate::case::{Case, Verdict};
use crate::fixture::Fixture;
use crate::suite::runtime;

/// The folder that reports go to.
const VARIABLE: &str = "COORD_CONFORMANCE_REPORT";

/// The outcomes so far. Clones are the same one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report(Arc<Mutex<BTreeMap<String, Verdict>>>);

impl Report {
    pub(crate) fn note(&self, case: &Case, verdict: &Verdict) {
        let mut outcomes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        outcomes.insert(case.name(), verdict.clone());
    }

    /// Writes the report if a folder for it was named and a trial ran.
    pub(crate) fn write_if_wanted(&self, fixture: &dyn Fixture, slow: bool) -> Result<(), String> {
        let Some(folder) = std::env::var_os(VARIABLE) else { return Ok(()) };
        let trials = self.trials();
        if trials.is_empty() {
            return Ok(());
        }
        let value = json!({
            "backend": fixture.name(),
            "promises": promises(fixture)?,
            "trials": trials,
        });
        let part = if slow { "-slow" } else { "" };
        let path = Path::new(&folder).join(format!("{}{part}.json", fixture.name()));
        let written = std::fs::create_dir_all(&folder)
            .and_then(|()| std::fs::write(&path, format!("{value:#}\n")));
        written.map_err(|error| format!("{VARIABLE}: {}: {error}", path.display()))
    }

    fn trials(&self) -> Vec<Value> {
        let outcomes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let one = |(name, verdict): (&String, &Verdict)| match verdict {
            Verdict::Passed => json!({ "name": name, "outcome": "passed" }),
            Verdict::Ignored(why) => json!({ "name": name, "outcome": "ignored", "why": why }),
            Verdict::Failed(why) => json!({ "name": name, "outcome": "failed", "why": why }),
        };
        outcomes.iter().map(one).collect()
    }
}

/// The promises of the fixture's backend, in words.
fn promises(fixture: &dyn Fixture) -> Result<Vec<Value>, String> {
    let told = runtime()?.block_on(async {
        let cluster = ClusterName::new("report")?;
        let handle = fixture.open(&cluster).await?;
        let words = handle.backend.info().guarantees.in_words();
        handle.backend.close().await?;
        fixture.clean(&cluster).await;
        Ok::<_, coord_core::Error>(words)
    });
    let words =
        told.map_err(|error| format!("the backend can't be opened for its report: {error}"))?;
    Ok(words.into_iter().map(|(about, promise)| json!([about, promise])).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::cases;

    #[test]
    fn each_outcome_is_told_apart() {
        let report = Report::default();
        let mut some = cases();
        let mut note = |verdict| report.note(some.next().expect("a case"), &verdict);
        note(Verdict::Passed);
        note(Verdict::Ignored("no need".to_owned()));
        note(Verdict::Failed("no luck".to_owned()));
        let outcomes: Vec<_> =
            report.trials().into_iter().map(|trial| trial["outcome"].clone()).collect();
        for outcome in ["passed", "ignored", "failed"] {
            assert!(outcomes.contains(&json!(outcome)), "{outcomes:?}");
        }
    }
}
