//! The tables of the documentation that come from what the conformance suite found: which trials each
//! backend passes, and what it promises.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

/// The backends in the order of the columns.
const BACKENDS: [&str; 5] = ["memory", "etcd", "nats", "redis", "kube"];
const CONFORMANCE: &str = "docs/conformance.md";
const README: &str = "README.md";
const BEGIN: &str = "<!-- guarantees: made by `cargo xtask tables` -->\n";
const END: &str = "<!-- end of guarantees -->";

/// What one backend's run of the suite left behind.
#[derive(Debug, Deserialize)]
struct Report {
    backend: String,
    promises: Vec<(String, String)>,
    trials: Vec<Trial>,
}

#[derive(Debug, Deserialize)]
struct Trial {
    name: String,
    outcome: String,
    #[serde(default)]
    why: String,
}

/// Makes the tables from the reports in the folder, or checks that they are as these make them.
pub(crate) fn run(root: &Path, folder: &Path, check: bool) -> Result<()> {
    let reports = read(folder)?;
    let readme = fs::read_to_string(root.join(README)).context(README)?;
    let made = [(CONFORMANCE, conformance(&reports)), (README, promises(&readme, &reports)?)];
    for (name, text) in made {
        let path = root.join(name);
        if !check {
            fs::write(&path, text).with_context(|| format!("write {name}"))?;
        } else if fs::read_to_string(&path).unwrap_or_default() != text {
            bail!(
                "{name} is not what the reports in {} make it; run `cargo xtask tables`",
                folder.display()
            );
        }
    }
    Ok(())
}

/// All reports, in the order of the columns. The slow trials have run apart.
fn read(folder: &Path) -> Result<Vec<Report>> {
    let part = |name: &str, part: &str| {
        let path = folder.join(format!("{name}{part}.json"));
        let text = fs::read_to_string(&path).with_context(|| {
            format!("{}: run the conformance suite with COORD_CONFORMANCE_REPORT", path.display())
        })?;
        let report: Report =
            serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        if report.backend != name {
            bail!("{} is a report of {}", path.display(), report.backend);
        }
        Ok(report)
    };
    let whole = |name: &&str| {
        let mut report = part(name, "")?;
        report.trials.extend(part(name, "-slow")?.trials);
        Ok(report)
    };
    BACKENDS.iter().map(whole).collect()
}

fn conformance(reports: &[Report]) -> String {
    let mut rows: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut notes: Vec<&str> = Vec::new();
    for (column, report) in reports.iter().enumerate() {
        for trial in &report.trials {
            let row = rows.entry(&trial.name).or_default();
            row.resize(column, "");
            row.push(&trial.outcome);
            if trial.outcome == "ignored" && !notes.contains(&trial.why.as_str()) {
                notes.push(&trial.why);
            }
        }
    }
    let note = |report: &Report, name: &str| {
        let trial = report.trials.iter().find(|trial| trial.name == name)?;
        notes.iter().position(|why| *why == trial.why).map(|index| index + 1)
    };
    let mut text = String::from(
        "# Conformance\n\n\
         Each trial of `coord-conformance` on each backend, on a real server; made by `cargo xtask tables` \
         from the run\nof CI, which fails where this page differs. `+`: shown. A number: not asked, for the \
         reason below. `FAILED`: not so.\n\n",
    );
    header(&mut text, "trial", reports);
    for (name, outcomes) in &rows {
        let cell = |(report, outcome): (&Report, &&str)| match *outcome {
            "passed" => "+".to_owned(),
            "ignored" => note(report, name).map_or_else(String::new, |note| format!("({note})")),
            "" => "not run".to_owned(),
            other => other.to_uppercase(),
        };
        let mut outcomes = outcomes.clone();
        outcomes.resize(reports.len(), "");
        let cells: Vec<String> = reports.iter().zip(&outcomes).map(cell).collect();
        let _ = writeln!(text, "| `{name}` | {} |", cells.join(" | "));
    }
    text.push('\n');
    for (index, why) in notes.iter().enumerate() {
        let _ = writeln!(text, "{}. {why}", index + 1);
    }
    text
}

/// The README with its table of promises made anew.
fn promises(readme: &str, reports: &[Report]) -> Result<String> {
    let parts = readme
        .split_once(BEGIN)
        .and_then(|(before, rest)| rest.split_once(END).map(|(_, after)| (before, after)));
    let Some((before, after)) = parts else {
        bail!("{README} has no place for the guarantees between {BEGIN:?} and {END:?}");
    };
    let mut text = before.to_owned() + BEGIN;
    header(&mut text, "", reports);
    let named = |told: fn(&str) -> String| {
        let cells: Vec<String> = reports.iter().map(|report| told(&report.backend)).collect();
        cells.join(" | ")
    };
    let scheme = |name: &str| match name {
        "memory" => "always there, `memory://cluster`".to_owned(),
        "kube" => "`kube`, `kube:///cluster?namespace=…`".to_owned(),
        name => format!("`{name}`, `{name}://host,host/cluster`"),
    };
    let page = |name: &str| match name {
        "memory" => "`coord_core::memory`".to_owned(),
        name => format!("[docs/backends/{name}.md](docs/backends/{name}.md)"),
    };
    let _ = writeln!(text, "| cargo feature, scheme | {} |", named(scheme));
    for (row, (about, _)) in reports[0].promises.iter().enumerate() {
        let cells: Vec<&str> =
            reports.iter().map(|report| report.promises[row].1.as_str()).collect();
        let _ = writeln!(text, "| {about} | {} |", cells.join(" | "));
    }
    let _ = writeln!(text, "| details | {} |", named(page));
    Ok(text + END + after)
}

fn header(text: &mut String, first: &str, reports: &[Report]) {
    let names: Vec<&str> = reports.iter().map(|report| report.backend.as_str()).collect();
    let _ = writeln!(text, "| {first} | {} |", names.join(" | "));
    let _ = writeln!(text, "| --- |{}", " --- |".repeat(reports.len()));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(backend: &str, outcome: &str, why: &str) -> Report {
        let trial = |name: &str, outcome: &str| Trial {
            name: name.to_owned(),
            outcome: outcome.to_owned(),
            why: why.to_owned(),
        };
        Report {
            backend: backend.to_owned(),
            promises: vec![("clock".to_owned(), format!("{backend}'s"))],
            trials: vec![trial("lease::one_holder", "passed"), trial("lease::rises", outcome)],
        }
    }

    #[test]
    fn a_trial_that_did_not_pass_does_not_look_as_if_it_had() {
        let reports = [
            report("memory", "passed", ""),
            report("etcd", "ignored", "it does not promise it"),
            report("nats", "failed", "no"),
        ];
        let page = conformance(&reports);
        assert!(page.contains("| `lease::one_holder` | + | + | + |"), "{page}");
        assert!(page.contains("| `lease::rises` | + | (1) | FAILED |"), "{page}");
        assert!(page.ends_with("\n1. it does not promise it\n"), "{page}");
    }

    #[test]
    fn a_trial_that_one_backend_lacks_is_not_run_there() {
        let mut short = report("etcd", "passed", "");
        short.trials.pop();
        let page = conformance(&[report("memory", "passed", ""), short]);
        assert!(page.contains("| `lease::rises` | + | not run |"), "{page}");
    }

    #[test]
    fn only_the_table_of_the_readme_changes() {
        let readme = format!("before\n{BEGIN}old\n{END}\nafter\n");
        let made = promises(&readme, &[report("memory", "passed", "")]).expect("a table");
        assert!(made.starts_with("before\n") && made.ends_with("\nafter\n"), "{made}");
        assert!(made.contains("| clock | memory's |") && !made.contains("old"), "{made}");
        assert!(promises("no place", &[]).is_err());
    }
}
