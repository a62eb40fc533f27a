//! Names that were replaced: sources and pages use those of docs/glossary.md.

use std::path::Path;

use crate::links::{Texts, read};

/// A name that was replaced, the present one, and the files in which it means something else.
struct Replaced {
    name: &'static str,
    present: &'static str,
    except: &'static [&'static str],
}

const REPLACED: [Replaced; 18] = [
    replaced("Tenure", "HeldLease"),
    replaced("Ran", "RunOutcome"),
    replaced("Watched::Away", "Watched::Disconnected"),
    replaced("Watched::Back", "Watched::Reconnected"),
    replaced("Heard", "EventOrLag"),
    replaced("Misfit", "TableMismatch"),
    Replaced { except: &["crates/coord-etcd/src/error.rs"], ..replaced("Cause", "EventSource") },
    replaced("Why::", "DownReason::"),
    Replaced { except: &["crates/coord-nats/src/"], ..replaced("Refusal", "CommandError") },
    replaced("Duty", "JobContext"),
    replaced("leave_by_force", "leave_now"),
    replaced("gated_by", "require_lease"),
    replaced("Posture", "PartitionState"),
    replaced("Watchman", "PartitionDriver"),
    replaced("Tenancy", "HostingState"),
    replaced("GivesWay", "Yields"),
    replaced("late_heir", "late_target"),
    replaced("coord::placement::", "coord::strategies::"),
];

const fn replaced(name: &'static str, present: &'static str) -> Replaced {
    Replaced { name, present, except: &[] }
}

/// Each place of a replaced name, and what stands there instead.
fn faults(texts: &Texts) -> Vec<String> {
    let mut faults = Vec::new();
    for (path, text) in texts {
        for Replaced { name, present, except } in &REPLACED {
            if except.iter().any(|folder| path.starts_with(folder)) {
                continue;
            }
            for (number, line) in text.lines().enumerate() {
                if has_word(line, name) {
                    let place = format!("{}:{}", path.display(), number + 1);
                    faults.push(format!("{place}: {name} is called {present}"));
                }
            }
        }
    }
    faults
}

fn has_word(line: &str, name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    line.match_indices(name).any(|(start, _)| {
        let is_begun = line[..start].ends_with(is_part);
        let goes_on = name.ends_with(is_part) && line[start + name.len()..].starts_with(is_part);
        !is_begun && !goes_on
    })
}

#[test]
fn no_source_and_no_page_uses_a_name_that_was_replaced() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut texts = Texts::new();
    read(&root, Path::new(""), &mut texts);
    // They tell of what was called otherwise.
    for path in ["CHANGELOG.md", "crates/xtask/src/words.rs"] {
        texts.remove(Path::new(path)).expect("it is there");
    }
    let faults = faults(&texts);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_replaced_name_is_found_as_a_whole_word() {
    let text = "let ran = Ran::Finished;\nRandom, Ranges and Ran_1\nuse crate::Heard;\n";
    let texts = [("src/a.rs".into(), text.to_owned())].into();
    let expected =
        ["src/a.rs:1: Ran is called RunOutcome", "src/a.rs:3: Heard is called EventOrLag"];
    assert_eq!(faults(&texts), expected);
    let nats = [("crates/coord-nats/src/error.rs".into(), "enum Refusal".to_owned())].into();
    assert!(faults(&nats).is_empty());
}
