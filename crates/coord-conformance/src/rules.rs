//! What the contract asks for, and which trial looks for it.

use crate::case::Case;
use crate::trials;

/// One thing that the contract asks of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rule {
    /// A name that stays the same, for reports: a few words (`lease-retry`), or the number of a pitfall
    /// (`P9`).
    pub id: &'static str,
    /// Where coord's repository explains it: a page and its heading, `docs/design.md#grants`. These pages
    /// are not part of this crate; what is asked for stands in `text` and in the documentation of
    /// coord-core's traits.
    pub anchor: &'static str,
    /// The rule in a sentence.
    pub text: &'static str,
}

impl Rule {
    /// The trials that look for it.
    pub fn cases(self) -> impl Iterator<Item = &'static Case> {
        trials::all().filter(move |case| case.rules.contains(&self.id))
    }
}

/// All rules, in the order of docs/design.md and docs/pitfalls.md. Each has at least one trial.
///
/// Not among them is what backends have no part in: the lease session's and the watcher's own rules
/// beyond those that the trials of group `session` show, and what the runtime does with the answers.
#[must_use]
pub fn rules() -> &'static [Rule] {
    RULES
}

const fn rule(id: &'static str, anchor: &'static str, text: &'static str) -> Rule {
    Rule { id, anchor, text }
}

const RULES: &[Rule] = &[
    rule(
        "term-rises",
        "docs/design.md#terms",
        "A term is strictly greater at every grant, whatever ended the last one.",
    ),
    rule(
        "errors",
        "docs/design.md#outcomes-and-errors",
        "An error says kind and effect; a failed look-up never reads as absence.",
    ),
    rule(
        "dropped-calls",
        "docs/design.md#outcomes-and-errors",
        "A lost reply is an unknown effect, and the same call resolves it.",
    ),
    rule(
        "guarantees",
        "docs/design.md#guarantees",
        "A backend states what it promises as data, and keeps it.",
    ),
    rule(
        "watch-snapshot",
        "docs/design.md#watches",
        "A watch begins with a snapshot, also when there is nothing.",
    ),
    rule(
        "watch-ends",
        "docs/design.md#watches",
        "A watch ends at its first error; the next one begins with a snapshot.",
    ),
    rule("watch-lag", "docs/design.md#watches", "A reader that lags learns how things stand."),
    rule(
        "watcher",
        "docs/design.md#watches",
        "The watcher over it tells an absence once, and then every change.",
    ),
    rule(
        "cluster-isolated",
        "docs/design.md#names",
        "A backend is opened for one cluster name, which isolates all it stores.",
    ),
    rule(
        "health-check",
        "docs/design.md#health-closing-and-secrets",
        "check says in words what works and what does not.",
    ),
    rule(
        "closing",
        "docs/design.md#health-closing-and-secrets",
        "After a close every call is Closed; nothing is given up by it.",
    ),
    rule(
        "no-secrets",
        "docs/design.md#health-closing-and-secrets",
        "No secret shows in info, health or Debug.",
    ),
    rule(
        "lease-one-holder",
        "docs/design.md#grants",
        "At most one live grant per name, decided in one atomic step.",
    ),
    rule(
        "lease-retry",
        "docs/design.md#grants",
        "The same attempt gets the same grant and term, extended.",
    ),
    rule(
        "lease-other-attempt",
        "docs/design.md#grants",
        "Any other attempt, also of the same node, is another holder.",
    ),
    rule(
        "lease-reclaim",
        "docs/design.md#grants",
        "Reclaim takes over the same node's grant, with a greater term.",
    ),
    rule(
        "lease-own-grant",
        "docs/design.md#grants",
        "Renew and release act only on the caller's own grant.",
    ),
    rule(
        "lease-lost",
        "docs/design.md#grants",
        "Renewing what is gone is Lost, and never acquires.",
    ),
    rule(
        "lease-expiry",
        "docs/design.md#expiry",
        "A grant ends at its TTL, judged by the store or the observer, and not before.",
    ),
    rule(
        "names-apart",
        "docs/design.md#names",
        "Different names are different things, up to the longest.",
    ),
    rule(
        "ttl-granted",
        "docs/design.md#grants",
        "A TTL is rounded up to the store's step and told as granted.",
    ),
    rule("lease-get", "docs/design.md#grants", "get shows who holds a lease, or that nobody does."),
    rule(
        "lease-list",
        "docs/design.md#grants",
        "list shows what is held, ordered by name, page by page.",
    ),
    rule(
        "lease-watch",
        "docs/design.md#grants",
        "A lease's watch shows each holder and each vacancy, by release and expiry.",
    ),
    rule(
        "session",
        "docs/design.md#lease-sessions",
        "A session keeps its lease, and tells its end exactly once.",
    ),
    rule(
        "session-deadline",
        "docs/design.md#lease-sessions",
        "The holder stops at a deadline that counts from before the request.",
    ),
    rule(
        "session-retries",
        "docs/design.md#lease-sessions",
        "Errors are retried until the deadline: one is not a loss.",
    ),
    rule(
        "session-cancel",
        "docs/design.md#lease-sessions",
        "A cancelled acquire leaves no lease behind.",
    ),
    rule(
        "node-record",
        "docs/design.md#registrations",
        "A node's record is stored whole, and nodes are listed by id.",
    ),
    rule(
        "register-creates",
        "docs/design.md#registrations",
        "Only register creates; the same incarnation may repeat it.",
    ),
    rule(
        "heartbeat-updates",
        "docs/design.md#registrations",
        "A heartbeat extends, and rewrites what changed.",
    ),
    rule(
        "heartbeat-gone",
        "docs/design.md#registrations",
        "A heartbeat of what is gone is told so, and creates nothing.",
    ),
    rule(
        "node-duplicate",
        "docs/design.md#duplicates-and-evictions",
        "Another live process with the id is a duplicate, with its address.",
    ),
    rule(
        "node-superseded",
        "docs/design.md#duplicates-and-evictions",
        "A replaced incarnation learns that it is superseded.",
    ),
    rule(
        "node-evict",
        "docs/design.md#duplicates-and-evictions",
        "evict is a compare-and-set on the incarnation and its revision.",
    ),
    rule(
        "node-silence",
        "docs/design.md#departures",
        "Silence is not expiry: nobody is gone because the store is away.",
    ),
    rule(
        "node-watch",
        "docs/design.md#departures",
        "The watch of all nodes shows every join, update, departure and expiry.",
    ),
    rule(
        "node-own",
        "docs/design.md#registrations",
        "deregister ends only one's own registration, and may be repeated.",
    ),
    rule(
        "node-expiry",
        "docs/design.md#expiry",
        "A registration ends at its TTL after the last heartbeat, not before.",
    ),
    rule(
        "table-fence",
        "docs/design.md#fencing",
        "A lower term, or an equal one of another attempt, is fenced.",
    ),
    rule(
        "table-claim-first",
        "docs/design.md#fencing",
        "What a claim returns no older writer can change any more.",
    ),
    rule(
        "table-claim-version",
        "docs/design.md#fencing",
        "A claim changes the stored fence, and not the version.",
    ),
    rule(
        "table-lease-checked",
        "docs/design.md#fencing",
        "Where promised, a write is conditional on the lease itself.",
    ),
    rule(
        "table-bound",
        "docs/design.md#fencing",
        "A table obeys one lease of one store, until an operator binds it anew.",
    ),
    rule(
        "table-create",
        "docs/design.md#tables",
        "Only claim creates a table: version 0, a random uid, the header.",
    ),
    rule("table-mismatch", "docs/design.md#tables", "A differing header is a mismatch."),
    rule(
        "table-uid",
        "docs/design.md#tables",
        "A table made again is another generation: another uid, and a snapshot.",
    ),
    rule(
        "publish-cas",
        "docs/design.md#publishing",
        "publish is a compare-and-set on the version.",
    ),
    rule(
        "publish-retry",
        "docs/design.md#publishing",
        "A publish whose reply was lost is recognised as its own success.",
    ),
    rule("whole-maps", "docs/design.md#publishing", "Readers see whole maps only, however large."),
    rule(
        "table-watch",
        "docs/design.md#publishing",
        "A table's watch yields the newest map, and never goes back within a uid.",
    ),
    rule(
        "reserved-table",
        "docs/design.md#the-reserved-table",
        "The reserved table is fenced like others, and keeps its annex.",
    ),
    rule(
        "request",
        "docs/design.md#requests",
        "A request reaches the leader once, and its answer who asked.",
    ),
    rule(
        "request-answer",
        "docs/design.md#requests",
        "A request is answered once, by the fence that claimed the reserved table.",
    ),
    rule("request-limit", "docs/design.md#requests", "A request is forgotten at its time limit."),
    rule(
        "scenario-c",
        "docs/design.md#failure-scenarios",
        "A leader that was cut off finds the write that it had prepared fenced.",
    ),
    rule(
        "scenario-d",
        "docs/design.md#failure-scenarios",
        "A leader that was paused past its TTL finds its next write fenced.",
    ),
    rule(
        "scenario-e",
        "docs/design.md#failure-scenarios",
        "The store restarts: terms never go back, nobody is gone for its silence.",
    ),
    rule(
        "scenario-g",
        "docs/design.md#failure-scenarios",
        "Of two coordinators one writes, and the other is told.",
    ),
    rule(
        "scenario-h",
        "docs/design.md#failure-scenarios",
        "A node restarts with the same id: one incarnation at a time.",
    ),
    rule(
        "scenario-j",
        "docs/design.md#failure-scenarios",
        "Many candidates for one lease: one winner.",
    ),
    rule(
        "scenario-k",
        "docs/design.md#failure-scenarios",
        "A reply is lost: recognised as one's own success, no false conflict.",
    ),
    rule(
        "scenario-l",
        "docs/design.md#failure-scenarios",
        "The watch is cut, nodes change, it heals: every change is seen.",
    ),
    rule(
        "P1",
        "docs/pitfalls.md#p1",
        "The deadline counts from when the request was sent: late replies prolong nothing.",
    ),
    rule("P3", "docs/pitfalls.md#p3", "One failed renewal is not a loss."),
    rule(
        "P4",
        "docs/pitfalls.md#p4",
        "A timed-out request may have landed: the attempt recognises its own write.",
    ),
    rule("P5", "docs/pitfalls.md#p5", "Loss is told exactly once for each tenure."),
    rule(
        "P6",
        "docs/pitfalls.md#p6",
        "No success before the write has won, however the candidates race.",
    ),
    rule("P7", "docs/pitfalls.md#p7", "The same name is not the same process."),
    rule(
        "P8",
        "docs/pitfalls.md#p8",
        "The term advances on every change of tenure, also after a deletion.",
    ),
    rule("P9", "docs/pitfalls.md#p9", "A late release does not evict the successor."),
    rule(
        "P13",
        "docs/pitfalls.md#p13",
        "The TTL granted may differ from the one asked for, and is told.",
    ),
    rule("P15", "docs/pitfalls.md#p15", "A renewal of a dead grant is not silent: it is lost."),
    rule(
        "P18",
        "docs/pitfalls.md#p18",
        "What is set up wrongly is found at the start, not at the first fault.",
    ),
    rule("P19", "docs/pitfalls.md#p19", "Two different names never collide in the store."),
    rule(
        "P21",
        "docs/pitfalls.md#p21",
        "Each write carries the token: a leader paused before its write is fenced.",
    ),
    rule("P22", "docs/pitfalls.md#p22", "A new leader reads only after sealing."),
    rule(
        "P23b",
        "docs/pitfalls.md#p23b",
        "A report names uid and version, and reaches the leader as it was sent.",
    ),
    rule("P31", "docs/pitfalls.md#p31", "A shard's epoch advances only when its owner changes."),
    rule(
        "P32",
        "docs/pitfalls.md#p32",
        "What all must agree on stands in a header, and a mismatch is refused.",
    ),
    rule(
        "P33",
        "docs/pitfalls.md#p33",
        "A map larger than the store's limit for one value is stored all the same.",
    ),
    rule("P34", "docs/pitfalls.md#p34", "Empty and failed are different answers."),
    rule("P37", "docs/pitfalls.md#p37", "A gap in a watch loses no departure."),
    rule("P41", "docs/pitfalls.md#p41", "A heartbeat of an old incarnation resurrects nothing."),
    rule("P42", "docs/pitfalls.md#p42", "A node that was evicted learns it."),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_rule_has_a_trial_and_every_trial_a_rule() {
        let ids: BTreeSet<&str> = RULES.iter().map(|rule| rule.id).collect();
        assert_eq!(ids.len(), RULES.len(), "an id stands twice");
        for rule in RULES {
            assert!(rule.cases().next().is_some(), "no trial looks for {rule:?}");
        }
        for case in trials::all() {
            assert!(!case.rules.is_empty(), "{case:?} names no rule");
            for id in case.rules {
                assert!(ids.contains(id), "{case:?} names {id}, which is no rule");
            }
        }
    }

    #[test]
    fn every_rule_says_where_it_is_explained() {
        for rule in RULES {
            let (page, heading) = rule.anchor.split_once('#').expect("a page and a heading");
            // The test of all links, in xtask, looks whether the heading exists.
            match page {
                "docs/pitfalls.md" => assert_eq!(heading, rule.id.to_lowercase(), "{rule:?}"),
                _ => assert_eq!(page, "docs/design.md", "{rule:?}"),
            }
        }
    }

    #[test]
    fn the_pitfalls_for_every_backend_are_all_rules() {
        // Those that docs/pitfalls.md marks with a star.
        for id in ["P1", "P3", "P4", "P6", "P8", "P9", "P21", "P23b", "P34", "P37"] {
            assert!(RULES.iter().any(|rule| rule.id == id), "{id} is no rule");
        }
    }

    #[test]
    fn every_trial_has_a_name_of_its_own_and_a_sentence() {
        let names: BTreeSet<String> = trials::all().map(Case::name).collect();
        assert_eq!(names.len(), trials::all().count(), "a name stands twice");
        for case in trials::all() {
            assert!(case.doc.ends_with('.'), "{case:?}: {:?}", case.doc);
        }
    }
}
