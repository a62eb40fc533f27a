//! What the contract asks for, and which trial looks for it.

use crate::case::Case;
use crate::trials;

/// One thing that the contract asks of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rule {
    /// Where it stands: a section of DESIGN.md with a word where that says several things (`4.1.2-retry`),
    /// or a number in PITFALLS.md (`P9`).
    pub id: &'static str,
    /// The rule in a sentence.
    pub text: &'static str,
}

impl Rule {
    /// The trials that look for it.
    pub fn cases(self) -> impl Iterator<Item = &'static Case> {
        trials::all().filter(move |case| case.rules.contains(&self.id))
    }
}

/// All rules, in the order of the design. Each has at least one trial.
///
/// Not among them is what backends have no part in: the lease session's and the watcher's own rules
/// beyond those that the trials of group `session` show, and what the runtime does with the answers.
#[must_use]
pub fn rules() -> &'static [Rule] {
    RULES
}

const fn rule(id: &'static str, text: &'static str) -> Rule {
    Rule { id, text }
}

const RULES: &[Rule] = &[
    rule("3-term", "A term is strictly greater at every grant, whatever ended the last one."),
    rule("4.0-errors", "An error says kind and effect; a failed look-up never reads as absence."),
    rule("4.0-dropped", "A lost reply is an unknown effect, and the same call resolves it."),
    rule("4.0-guarantees", "A backend states what it promises as data, and keeps it."),
    rule("4.0-watch-snapshot", "A watch begins with a snapshot, also when there is nothing."),
    rule("4.0-watch-ends", "A watch ends at its first error; the next one begins with a snapshot."),
    rule("4.0-lag", "A reader that lags learns how things stand."),
    rule("4.0-isolated", "A backend is opened for one cluster name, which isolates all it stores."),
    rule("4.0-check", "check says in words what works and what does not."),
    rule("4.0-close", "After a close every call is Closed; nothing is given up by it."),
    rule("4.0-no-secrets", "No secret shows in info, health or Debug."),
    rule("4.1.1", "At most one live grant per name, decided in one atomic step."),
    rule("4.1.2-retry", "The same attempt gets the same grant and term, extended."),
    rule("4.1.2-other-attempt", "Any other attempt, also of the same node, is another holder."),
    rule("4.1.2-reclaim", "Reclaim takes over the same node's grant, with a greater term."),
    rule("4.1.3-own", "Renew and release act only on the caller's own grant."),
    rule("4.1.3-lost", "Renewing what is gone is Lost, and never acquires."),
    rule("4.1.4", "A grant ends at its TTL, judged by the store or the observer, and not before."),
    rule("4.1.5-names", "Different names are different things, up to the longest."),
    rule("4.1.5-ttl", "A TTL is rounded up to the store's step and told as granted."),
    rule("4.1-get", "get shows who holds a lease, or that nobody does."),
    rule("4.1-list", "list shows what is held, ordered by name, page by page."),
    rule("4.1-watch", "A lease's watch shows each holder and each vacancy, by release and expiry."),
    rule("4.2.1-info", "A node's record is stored whole, and nodes are listed by id."),
    rule("4.2.2-create", "Only register creates; the same incarnation may repeat it."),
    rule("4.2.2-update", "A heartbeat extends, and rewrites what changed."),
    rule("4.2.2-gone", "A heartbeat of what is gone is told so, and creates nothing."),
    rule("4.2.3-duplicate", "Another live process with the id is a duplicate, with its address."),
    rule("4.2.3-superseded", "A replaced incarnation learns that it is superseded."),
    rule("4.2.4-evict", "evict is a compare-and-set on the incarnation and its revision."),
    rule("4.2.4-silence", "Silence is not expiry: nobody is gone because the store is away."),
    rule("4.2.5-watch", "The watch of all nodes shows every join, update, departure and expiry."),
    rule("4.2-own", "deregister ends only one's own registration, and may be repeated."),
    rule("4.2-expiry", "A registration ends at its TTL after the last heartbeat, not before."),
    rule("4.3.1-fence", "A lower term, or an equal one of another attempt, is fenced."),
    rule("4.3.1-claim-first", "What a claim returns no older writer can change any more."),
    rule("4.3.1-claim-version", "A claim changes the stored fence, and not the version."),
    rule("4.3.1-lease-checked", "Where promised, a write is conditional on the lease itself."),
    rule("4.3.1-bound", "A table obeys one lease of one store, until an operator binds it anew."),
    rule("4.3.2-create", "Only claim creates a table: version 0, a random uid, the header."),
    rule("4.3.2-mismatch", "A differing header is a mismatch."),
    rule("4.3.2-uid", "A table made again is another life: another uid, and a snapshot."),
    rule("4.3.3-cas", "publish is a compare-and-set on the version."),
    rule("4.3.3-retry", "A publish whose reply was lost is recognised as its own success."),
    rule("4.3.4-whole", "Readers see whole maps only, however large."),
    rule("4.3.5-watch", "A table's watch yields the newest map, and never goes back within a uid."),
    rule("4.3.7-cluster", "The reserved table is fenced like others, and keeps its annex."),
    rule("4.3.7-request", "A request reaches the leader once, and its answer who asked."),
    rule(
        "4.3.7-answer",
        "A request is answered once, by the fence that claimed the reserved table.",
    ),
    rule("4.3.7-limit", "A request is forgotten at its time limit."),
    rule("12-C", "A leader that was cut off finds the write that it had prepared fenced."),
    rule("12-D", "A leader that was paused past its TTL finds its next write fenced."),
    rule("12-E", "The store restarts: terms never go back, nobody is gone for its silence."),
    rule("12-G", "Of two coordinators one writes, and the other is told."),
    rule("12-H", "A node restarts with the same id: one incarnation at a time."),
    rule("12-J", "Many candidates for one lease: one winner."),
    rule("12-K", "A reply is lost: recognised as one's own success, no false conflict."),
    rule("12-L", "The watch is cut, nodes change, it heals: every change is seen."),
    rule("P4", "A timed-out request may have landed: the attempt recognises its own write."),
    rule("P6", "No success before the write has won, however the candidates race."),
    rule("P7", "The same name is not the same process."),
    rule("P8", "The term advances on every change of tenure, also after a deletion."),
    rule("P9", "A late release does not evict the successor."),
    rule("P13", "The TTL granted may differ from the one asked for, and is told."),
    rule("P15", "A renewal of a dead grant is not silent: it is lost."),
    rule("P18", "What is set up wrongly is found at the start, not at the first fault."),
    rule("P19", "Two different names never collide in the store."),
    rule("P21", "Each write carries the token: a leader paused before its write is fenced."),
    rule("P22", "A new leader reads only after sealing."),
    rule("P23b", "A report names uid and version, and reaches the leader as it was sent."),
    rule("P31", "A shard's epoch advances only when its owner changes."),
    rule("P32", "What all must agree on stands in a header, and a mismatch is refused."),
    rule("P33", "A map larger than the store's limit for one value is stored all the same."),
    rule("P34", "Empty and failed are different answers."),
    rule("P37", "A gap in a watch loses no departure."),
    rule("P41", "A heartbeat of an old incarnation resurrects nothing."),
    rule("P42", "A node that was evicted learns it."),
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
    fn the_pitfalls_for_every_backend_are_all_rules() {
        // Those that PITFALLS.md marks with a star; 1 and 3 are the session's.
        for id in ["P4", "P6", "P8", "P9", "P21", "P23b", "P34", "P37"] {
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
