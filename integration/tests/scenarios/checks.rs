//! What must hold in every scenario, whatever it did.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use coord::cluster::Handoff;
use coord::cluster::invariants::{self, Evidence, Hosting, Hosts};
use coord::{
    Address, AttemptId, Fence, Incarnation, LeaseName, Moment, NodeEntry, NodeId, NodeStatus,
    Origin, ShardCount, ShardId, ShardMap, TableHeader, TableUid, Term, Version,
};
use coord_conformance::history::{Entry, History, What};
use libtest_mimic::Trial;

use super::driver::{Done, own_entries};
use super::hosted;
use super::said::{Call, Line, Outcome, Said};

/// What one member said.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Told<'a> {
    pub(crate) name: &'a str,
    pub(crate) lines: &'a [Line],
    pub(crate) killed: Option<Moment>,
}

/// Checks the members' history, their calls, and the maps that a watch of the store showed.
pub(crate) fn check(
    members: &[Told<'_>],
    entries: Vec<Entry>,
    maps: &[Arc<ShardMap>],
    handoff: Handoff,
) -> Done {
    let mut wrong = Vec::new();
    nobody_leads_twice(members, &entries, &mut wrong);
    let violations = History::new(entries).check();
    wrong.extend(violations.iter().map(ToString::to_string));
    fenced_writes(members, &mut wrong);
    if handoff == Handoff::Exclusive {
        hosted::check(members, &mut wrong);
    }
    versions(members, &mut wrong);
    each_map(maps, handoff, &mut wrong);
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
fn nobody_leads_twice(members: &[Told<'_>], entries: &[Entry], wrong: &mut Vec<String>) {
    let mut granted: BTreeMap<_, (Moment, Moment)> = BTreeMap::new();
    for entry in entries {
        if let What::Holds { fence, until } = &entry.what {
            let tenure = granted.entry((&fence.origin, fence.term)).or_insert((entry.at, *until));
            *tenure = (tenure.0.min(entry.at), tenure.1.max(*until));
        }
    }
    for member in members {
        for line in member.lines {
            let Said::Leads(fence) = &line.said else { continue };
            let at = line.at();
            if granted.get(&(&fence.origin, fence.term)).is_none_or(|(_, until)| at >= *until) {
                wrong.push(format!("{} led past its deadline in term {}", member.name, fence.term));
            }
            let later = granted.range((&fence.origin, fence.term)..).skip(1);
            let mut later = later.take_while(|((origin, _), _)| **origin == fence.origin);
            if let Some(((_, term), _)) = later.find(|(_, (from, _))| *from <= at) {
                let terms = format!("term {} after term {term} had begun", fence.term);
                wrong.push(format!("{} led in {terms}", member.name));
            }
        }
    }
}

/// No write was accepted that was sent after a claim by a higher fence had been answered.
fn fenced_writes(members: &[Told<'_>], wrong: &mut Vec<String>) {
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
fn versions(members: &[Told<'_>], wrong: &mut Vec<String>) {
    for member in members {
        let mut seen = BTreeMap::new();
        for line in member.lines {
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
fn each_map(maps: &[Arc<ShardMap>], handoff: Handoff, wrong: &mut Vec<String>) {
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
            Some(((node.id.clone(), node.incarnation), hosting))
        });
        let hosts: Hosts = nodes.collect();
        // What was reported to the leader is not on the map: taken as said.
        let reported = |_: &NodeEntry, _: ShardId, _: Version| true;
        let evidence = Evidence::new(handoff, &reported, &reported);
        if let Err(violation) = invariants::check(old, new, &hosts, writer, &evidence) {
            wrong.push(format!("version {}: {violation}", new.version()));
        }
    }
}

/// The checks see what they are for.
pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("checks::a_second_leader_is_seen", a_second_leader_is_seen),
        Trial::test("checks::a_write_of_a_former_leader_is_seen", a_former_leaders_write_is_seen),
        Trial::test("checks::maps_that_are_wrong_are_seen", wrong_maps_are_seen),
    ]
}

fn at(seconds: u64) -> Moment {
    Moment::from_origin(Duration::from_secs(seconds))
}

fn fence(term: u64) -> Fence {
    let attempt = AttemptId::from_u128(u128::from(term));
    Fence::new(LeaseName::leader(), Term::from_u64(term), attempt, Origin::new("test:1/c"))
}

fn holds(from: u64, term: u64, until: u64) -> Line {
    Line::new(at(from), Said::Entry(What::Holds { fence: fence(term), until: at(until) }))
}

fn leads(when: u64, term: u64) -> Line {
    Line::new(at(when), Said::Leads(fence(term)))
}

/// What is wrong with what two members said.
fn wrong(one: &[Line], two: &[Line], maps: &[Arc<ShardMap>]) -> String {
    let told = |name, lines| Told { name, lines, killed: None };
    let members = [told("one", one), told("two", two)];
    let entries = members.iter().flat_map(|told| own_entries(told.name, told.lines)).collect();
    check(&members, entries, maps, Handoff::Exclusive)
        .err()
        .and_then(|failed| failed.message().map(str::to_owned))
        .unwrap_or_default()
}

fn a_second_leader_is_seen() -> Done {
    let one = [holds(1, 7, 10), leads(2, 7), leads(9, 7)];
    let ended = What::Ended { fence: fence(7), how: "expired".to_owned() };
    let ended = Line::new(at(10), Said::Entry(ended));
    let right = [&one[..], std::slice::from_ref(&ended)].concat();
    assert_eq!(wrong(&right, &[holds(11, 8, 20), leads(12, 8)], &[]), "");
    let late = [&right[..], &[leads(10, 7)]].concat();
    assert!(wrong(&late, &[], &[]).contains("past its deadline"));
    let text = wrong(&right, &[holds(8, 8, 20)], &[]);
    assert!(text.contains("one led in term 7 after term 8") && text.contains("tenures overlap"));
    let text = wrong(&right, &[holds(11, 7, 20)], &[]);
    assert!(text.contains("a tenure was revived"), "{text}");
    Ok(())
}

fn a_former_leaders_write_is_seen() -> Done {
    let call = |operation, term, sent, answered, outcome| {
        let call = Call::new(operation, "orders", Some(fence(term)), at(sent), outcome);
        Line::new(at(answered), Said::Call(call))
    };
    let claim = [call("claim", 8, 1, 2, Outcome::Done)];
    let write = |sent, outcome| [call("publish", 7, sent, sent + 2, outcome)];
    assert!(wrong(&write(3, Outcome::Done), &claim, &[]).contains("term Some(Term(8)) of two"));
    assert_eq!(wrong(&write(3, Outcome::Fenced), &claim, &[]), "");
    assert_eq!(wrong(&write(1, Outcome::Done), &claim, &[]), "", "it may have come first");
    Ok(())
}

fn wrong_maps_are_seen() -> Done {
    let empty =
        Arc::new(ShardMap::empty(TableHeader::new(ShardCount::new(2)?), TableUid::random()));
    let mut edit = empty.edit();
    let (id, address) = (NodeId::new("n1")?, Address::new("localhost:1")?);
    let node = NodeEntry::new(id, Incarnation::random(), address, NodeStatus::Active);
    let slot = edit.put_node(node)?;
    edit.set_owner(ShardId::new(0), 0, slot)?;
    let mut half = edit.clone();
    edit.set_owner(ShardId::new(1), 0, slot)?;
    let whole = Arc::new(edit.finish(fence(7)).ok_or("it changes something")?);
    assert_eq!(wrong(&[], &[], &[Arc::clone(&empty), Arc::clone(&whole)]), "");
    half.set_annex(b"half".as_slice().into())?;
    let half = Arc::new(half.finish(fence(7)).ok_or("it changes something")?);
    assert!(wrong(&[], &[], &[Arc::clone(&empty), half]).contains("breaks I2"));
    assert!(wrong(&[], &[], &[whole, empty]).contains("came after"));
    Ok(())
}
