//! What must hold in every scenario, whatever it did.

use std::collections::BTreeMap;
use std::sync::Arc;

use coord::cluster::invariants::{self, Hosting, Hosts};
use coord::{Moment, NodeStatus, ShardMap};
use coord_conformance::history::{Entry, History, What};

use super::driver::{Done, Member};
use super::said::{Call, Outcome, Said};

/// Checks the members' history, their calls, and the maps that a watch of the store showed.
pub(crate) fn check(members: &[Member], entries: Vec<Entry>, maps: &[Arc<ShardMap>]) -> Done {
    let mut wrong = Vec::new();
    nobody_leads_twice(members, &entries, &mut wrong);
    let violations = History::new(entries).check();
    wrong.extend(violations.iter().map(ToString::to_string));
    fenced_writes(members, &mut wrong);
    versions(members, &mut wrong);
    each_map(maps, &mut wrong);
    for member in members {
        let missed = member.lines.iter().any(|line| matches!(line.said, Said::Missed(_)));
        if missed {
            wrong.push(format!("{} missed events", member.name));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n").into()) }
}

/// A node that says it leads does so before its own deadline, and before another one was granted a
/// greater term.
fn nobody_leads_twice(members: &[Member], entries: &[Entry], wrong: &mut Vec<String>) {
    let mut granted: BTreeMap<_, (Moment, Moment)> = BTreeMap::new();
    for entry in entries {
        if let What::Holds { fence, until } = &entry.what {
            let tenure = granted.entry(fence.term).or_insert((entry.at, *until));
            *tenure = (tenure.0.min(entry.at), tenure.1.max(*until));
        }
    }
    for member in members {
        for line in &member.lines {
            let Said::Leads(fence) = &line.said else { continue };
            let at = line.at();
            if granted.get(&fence.term).is_none_or(|(_, until)| at >= *until) {
                wrong.push(format!("{} led past its deadline in term {}", member.name, fence.term));
            }
            let other = granted.range(fence.term..).skip(1).find(|(_, (from, _))| *from <= at);
            if let Some((term, _)) = other {
                let terms = format!("term {} after term {term} had begun", fence.term);
                wrong.push(format!("{} led in {terms}", member.name));
            }
        }
    }
}

/// No write was accepted that was sent after a claim by a higher fence had been answered.
fn fenced_writes(members: &[Member], wrong: &mut Vec<String>) {
    let calls = || {
        members.iter().flat_map(|member| {
            member.lines.iter().filter_map(move |line| match &line.said {
                Said::Call(call) if call.outcome == Outcome::Done => {
                    Some((member, line.at(), call))
                }
                _ => None,
            })
        })
    };
    let term = |call: &Call| call.fence.as_ref().map(|fence| fence.term);
    for (writer, _, write) in calls().filter(|(_, _, call)| call.operation == "publish") {
        let claimed = calls().find(|(_, answered, claim)| {
            claim.operation == "claim"
                && claim.subject == write.subject
                && *answered < write.sent()
                && term(claim) > term(write)
        });
        if let Some((claimer, _, claim)) = claimed {
            let of = format!("term {:?} of {}", term(claim), claimer.name);
            let by = format!("{} in term {:?}", writer.name, term(write));
            wrong.push(format!("{} was written by {by} after {of} had claimed it", write.subject));
        }
    }
}

/// What one node sees of a table never goes back.
fn versions(members: &[Member], wrong: &mut Vec<String>) {
    for member in members {
        let mut seen = BTreeMap::new();
        for line in &member.lines {
            let Said::View(view) = &line.said else { continue };
            for (table, version) in &view.tables {
                let before = seen.insert(table.clone(), *version);
                if before.is_some_and(|before| before > *version) {
                    wrong.push(format!("{} saw {table} go back to {version}", member.name));
                }
            }
        }
    }
}

/// I2 to I4 hold in each map that follows another.
fn each_map(maps: &[Arc<ShardMap>], wrong: &mut Vec<String>) {
    for pair in maps.windows(2) {
        let (old, new) = (&pair[0], &pair[1]);
        if old.version() == new.version() && old.uid() == new.uid() {
            continue;
        }
        if new.version() < old.version() || old.uid() != new.uid() {
            wrong.push(format!("version {} came after {}", new.version(), old.version()));
        }
        let (true, Some(writer)) = (new.version() == old.version().next(), new.writer()) else {
            // A slow reader may miss versions.
            continue;
        };
        let nodes = new.nodes().iter().flatten().filter_map(|node| {
            let hosting = match node.status {
                NodeStatus::Active => Hosting::Takes,
                NodeStatus::Draining => Hosting::Keeps,
                _ => return None,
            };
            Some((node.id.clone(), (node.incarnation, hosting)))
        });
        let hosts: Hosts = nodes.collect();
        if let Err(violation) = invariants::check(old, new, &hosts, writer) {
            wrong.push(format!("version {}: {violation}", new.version()));
        }
    }
}
