//! The rules, each a pass over the entries.

use std::collections::BTreeMap;

use coord_core::{AttemptId, Fence, LeaseName, Moment, Origin, TableName, TableUid, Term, Version};

use super::{Entry, Violation, What, Written};

pub(super) fn check(entries: &[Entry]) -> Vec<Violation> {
    let mut wrong = Vec::new();
    leases(entries, &mut wrong);
    tables(entries, &mut wrong);
    watches(entries, &mut wrong);
    wrong
}

fn violation(rule: &'static str, text: String) -> Violation {
    Violation { rule, text }
}

/// One tenure, as its holder saw it.
struct Holding<'a> {
    who: &'a str,
    fence: &'a Fence,
    from: Moment,
    until: Moment,
    /// Whether its holder has seen the deadline pass.
    lapsed: bool,
    ended: Vec<Moment>,
}

impl Holding<'_> {
    /// When the holder stopped for sure.
    fn end(&self) -> Moment {
        self.ended.first().copied().map_or(self.until, |ended| ended.min(self.until))
    }

    fn text(&self) -> String {
        let (from, end) = (self.from.since_origin(), self.end().since_origin());
        format!("{} term={} from {from:?} to {end:?}", self.who, self.fence.term)
    }
}

/// The tenures of one lease, in the order in which they began.
type Tenures<'a> = Vec<Holding<'a>>;

fn leases(entries: &[Entry], wrong: &mut Vec<Violation>) {
    let mut leases: BTreeMap<(&LeaseName, &Origin), Tenures<'_>> = BTreeMap::new();
    for entry in entries {
        match &entry.what {
            What::Holds { fence, until } => {
                let tenures = leases.entry((&fence.lease, &fence.origin)).or_default();
                holds(tenures, entry, fence, *until, wrong);
            }
            What::Lapsed { fence } => {
                let tenures = leases.entry((&fence.lease, &fence.origin)).or_default();
                if let Some(tenure) = tenures.iter_mut().find(|tenure| tenure.fence == fence) {
                    tenure.lapsed = true;
                }
            }
            What::Ended { fence, how } => {
                let tenures = leases.entry((&fence.lease, &fence.origin)).or_default();
                match tenures.iter_mut().find(|tenure| tenure.fence == fence) {
                    Some(tenure) => tenure.ended.push(entry.at),
                    None => wrong.push(violation(
                        "an end without a tenure",
                        format!("{} was told {how} of term={}", entry.who, fence.term),
                    )),
                }
            }
            _ => {}
        }
    }
    let last = entries.last().map(|entry| entry.at);
    for tenures in leases.values() {
        overlaps(tenures, wrong);
        terms(tenures, wrong);
        ends(tenures, last, wrong);
    }
}

fn holds<'a>(
    tenures: &mut Tenures<'a>,
    entry: &'a Entry,
    fence: &'a Fence,
    until: Moment,
    wrong: &mut Vec<Violation>,
) {
    let Some(tenure) = tenures.iter_mut().find(|tenure| tenure.fence == fence) else {
        let (who, from) = (entry.who.as_str(), entry.at);
        tenures.push(Holding { who, fence, from, until, lapsed: false, ended: Vec::new() });
        return;
    };
    // A deadline that was recorded may have been moved since, before it passed.
    if tenure.lapsed || tenure.ended.first().is_some_and(|ended| *ended <= entry.at) {
        let text = format!("{}, and holds again at {:?}", tenure.text(), entry.at.since_origin());
        wrong.push(violation("a tenure was revived", text));
    }
    tenure.until = tenure.until.max(until);
}

fn overlaps(tenures: &[Holding<'_>], wrong: &mut Vec<Violation>) {
    for (n, one) in tenures.iter().enumerate() {
        for two in &tenures[n + 1..] {
            if one.from < two.end() && two.from < one.end() {
                let text = format!("{}: {} and {}", one.fence.lease, one.text(), two.text());
                wrong.push(violation("tenures overlap", text));
            }
        }
    }
}

fn terms(tenures: &[Holding<'_>], wrong: &mut Vec<Violation>) {
    for pair in tenures.windows(2) {
        if pair[1].fence.term <= pair[0].fence.term {
            let text =
                format!("{}: {}, then {}", pair[0].fence.lease, pair[0].text(), pair[1].text());
            wrong.push(violation("a term did not rise", text));
        }
    }
}

fn ends(tenures: &[Holding<'_>], last: Option<Moment>, wrong: &mut Vec<Violation>) {
    for tenure in tenures {
        let times = tenure.ended.len();
        if times > 1 {
            let text = format!("{}: {} was told {times} times", tenure.fence.lease, tenure.text());
            wrong.push(violation("an end was told again", text));
        }
        if times == 0 && last > Some(tenure.until) {
            let text = format!("{}: {}", tenure.fence.lease, tenure.text());
            wrong.push(violation("an end was never told", text));
        }
    }
}

/// What is known of one life of a table.
#[derive(Default)]
struct Life<'a> {
    published: BTreeMap<Version, (&'a str, &'a Written)>,
    last_read: Option<Version>,
}

fn tables(entries: &[Entry], wrong: &mut Vec<Violation>) {
    let mut lives: BTreeMap<(&TableName, TableUid), Life<'_>> = BTreeMap::new();
    for entry in entries {
        if let What::Published(version, written) = &entry.what {
            let life = lives.entry((&written.table, written.uid)).or_default();
            let (who, _) = *life.published.entry(*version).or_insert((&entry.who, written));
            if life.published[version].1 != written {
                let text = format!("{who} and {} both published {version}", entry.who);
                wrong.push(violation("two updates of one version", text));
            }
        }
    }
    for entry in entries {
        let What::Read(version, written) = &entry.what else { continue };
        let Some(life) = lives.get_mut(&(&written.table, written.uid)) else { continue };
        life.last_read = Some(*version);
        if let Some((who, published)) = life.published.get(version)
            && *published != written
        {
            let text = format!("{} read {version} of {who} as something else", entry.who);
            wrong.push(violation("an update was lost", text));
        }
    }
    for ((table, _), life) in &lives {
        let newest = life.published.last_key_value().map(|(version, _)| *version);
        if life.last_read.is_some() && life.last_read < newest {
            let text = format!("{table} was read last at {:?} of {newest:?}", life.last_read);
            wrong.push(violation("an update was lost", text));
        }
        writers(table, life, wrong);
    }
}

fn writers(table: &TableName, life: &Life<'_>, wrong: &mut Vec<Violation>) {
    let mut highest: Option<(Term, AttemptId)> = None;
    for (version, (who, written)) in &life.published {
        let Some(fence) = &written.writer else { continue };
        let by = (fence.term, fence.attempt);
        let passes =
            highest.is_none_or(|(term, attempt)| by.0 > term || (by.0 == term && by.1 == attempt));
        if !passes {
            let text = format!("{table}: {who} published {version} under {by:?} after {highest:?}");
            wrong.push(violation("a fenced writer wrote", text));
        }
        highest = highest.max(Some(by));
    }
}

fn watches(entries: &[Entry], wrong: &mut Vec<Violation>) {
    let mut listed = BTreeMap::new();
    let mut watched = BTreeMap::new();
    for entry in entries {
        match &entry.what {
            What::Listed { subject, state } => {
                listed.insert(subject, state);
            }
            What::Watched { subject, state } => {
                watched.insert((entry.who.as_str(), subject), state);
            }
            _ => {}
        }
    }
    for ((who, subject), state) in watched {
        if let Some(right) = listed.get(subject).filter(|right| **right != state) {
            let text = format!("{who} was shown {subject} as {state:?}, listed is {right:?}");
            wrong.push(violation("a watch did not converge", text));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::History;
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::from_origin(Duration::from_secs(seconds))
    }

    fn fence(term: u64, attempt: u128) -> Fence {
        let lease = LeaseName::new("jobs").expect("a name");
        let attempt = AttemptId::from_u128(attempt);
        Fence::new(lease, Term::from_u64(term), attempt, Origin::new("memory:1/orders"))
    }

    fn holds(moment: u64, who: &str, term: u64, until: u64) -> Entry {
        let (fence, until) = (fence(term, term.into()), at(until));
        Entry { at: at(moment), who: who.to_owned(), what: What::Holds { fence, until } }
    }

    fn ended(moment: u64, who: &str, term: u64) -> Entry {
        let (fence, how) = (fence(term, term.into()), "expired".to_owned());
        Entry { at: at(moment), who: who.to_owned(), what: What::Ended { fence, how } }
    }

    fn written(term: u64, attempt: u128, digest: u64) -> Written {
        let table = TableName::new("orders").expect("a name");
        let uid = TableUid::from_u128(1);
        Written { table, uid, writer: Some(fence(term, attempt)), digest }
    }

    fn published(moment: u64, version: u64, written: Written) -> Entry {
        let what = What::Published(Version::new(version), written);
        Entry { at: at(moment), who: "writer".to_owned(), what }
    }

    fn read(moment: u64, version: u64, written: Written) -> Entry {
        let what = What::Read(Version::new(version), written);
        Entry { at: at(moment), who: "reader".to_owned(), what }
    }

    fn shown(moment: u64, listed: bool, names: &[&str]) -> Entry {
        let (subject, mark) = ("nodes".to_owned(), "active".to_owned());
        let state = names.iter().map(|name| ((*name).to_owned(), mark.clone())).collect();
        let what =
            if listed { What::Listed { subject, state } } else { What::Watched { subject, state } };
        Entry { at: at(moment), who: "watcher".to_owned(), what }
    }

    fn rules(entries: Vec<Entry>) -> Vec<&'static str> {
        History::new(entries).check().into_iter().map(|violation| violation.rule).collect()
    }

    const NONE: [&str; 0] = [];

    #[test]
    fn a_right_history_has_no_violation() {
        let entries = vec![
            holds(1, "one", 7, 10),
            holds(5, "one", 7, 14),
            ended(14, "one", 7),
            holds(14, "two", 9, 24),
            published(15, 1, written(9, 9, 100)),
            published(15, 1, written(9, 9, 100)),
            ended(16, "two", 9),
            holds(16, "one", 12, 26),
            published(17, 2, written(12, 12, 200)),
            read(18, 2, written(12, 12, 200)),
            shown(19, false, &["a"]),
            shown(20, false, &["a", "b"]),
            shown(20, true, &["a", "b"]),
        ];
        assert_eq!(rules(entries), NONE);
        assert_eq!(rules(Vec::new()), NONE);
    }

    #[test]
    fn overlapping_tenures_are_seen() {
        let overlapping = vec![holds(1, "one", 7, 10), holds(9, "two", 8, 20)];
        assert_eq!(rules(overlapping), ["tenures overlap"]);
        let released_before =
            vec![holds(1, "one", 7, 10), ended(9, "one", 7), holds(9, "two", 8, 20)];
        assert_eq!(rules(released_before), NONE);
        let extended =
            vec![holds(1, "one", 7, 10), holds(8, "one", 7, 18), holds(11, "two", 8, 20)];
        assert_eq!(rules(extended), ["tenures overlap"]);
    }

    #[test]
    fn a_term_that_does_not_rise_is_seen() {
        let fell = vec![holds(1, "one", 7, 5), ended(5, "one", 7), holds(5, "two", 6, 9)];
        assert_eq!(rules(fell), ["a term did not rise"]);
        let mut twin = holds(6, "two", 7, 9);
        twin.what = What::Holds { fence: fence(7, 99), until: at(9) };
        let equal = vec![holds(1, "one", 7, 5), ended(5, "one", 7), twin];
        assert_eq!(rules(equal), ["a term did not rise"]);
    }

    #[test]
    fn an_end_that_is_told_twice_or_never_is_seen() {
        let twice = vec![holds(1, "one", 7, 5), ended(5, "one", 7), ended(6, "one", 7)];
        assert_eq!(rules(twice), ["an end was told again"]);
        let never = vec![holds(1, "one", 7, 5), holds(6, "two", 8, 20)];
        assert_eq!(rules(never), ["an end was never told"]);
        assert_eq!(rules(vec![ended(5, "one", 7)]), ["an end without a tenure"]);
    }

    #[test]
    fn a_revived_tenure_is_seen() {
        let lapsed = Entry { what: What::Lapsed { fence: fence(7, 7) }, ..ended(5, "one", 7) };
        let after_its_deadline =
            vec![holds(1, "one", 7, 5), lapsed, holds(6, "one", 7, 12), ended(12, "one", 7)];
        assert_eq!(rules(after_its_deadline), ["a tenure was revived"]);
        // Nobody saw it pass: it was renewed in between.
        let renewed = vec![holds(1, "one", 7, 5), holds(6, "one", 7, 12), ended(12, "one", 7)];
        assert_eq!(rules(renewed), Vec::<&str>::new());
        let after_its_end = vec![holds(1, "one", 7, 9), ended(5, "one", 7), holds(6, "one", 7, 12)];
        assert_eq!(rules(after_its_end), ["a tenure was revived"]);
    }

    #[test]
    fn a_lost_update_is_seen() {
        let twice = vec![published(1, 1, written(7, 7, 100)), published(2, 1, written(7, 7, 200))];
        assert_eq!(rules(twice), ["two updates of one version"]);
        let other = vec![published(1, 1, written(7, 7, 100)), read(2, 1, written(7, 7, 200))];
        assert_eq!(rules(other), ["an update was lost"]);
        let older = vec![
            published(1, 1, written(7, 7, 100)),
            published(2, 2, written(7, 7, 200)),
            read(3, 1, written(7, 7, 100)),
        ];
        assert_eq!(rules(older), ["an update was lost"]);
    }

    #[test]
    fn a_fenced_writer_is_seen() {
        let lower = vec![published(1, 1, written(8, 8, 100)), published(2, 2, written(7, 7, 200))];
        assert_eq!(rules(lower), ["a fenced writer wrote"]);
        let twin = vec![published(1, 1, written(8, 8, 100)), published(2, 2, written(8, 9, 200))];
        assert_eq!(rules(twin), ["a fenced writer wrote"]);
    }

    #[test]
    fn a_watch_that_does_not_converge_is_seen() {
        let forgot = vec![shown(1, false, &["a", "b"]), shown(2, true, &["a"])];
        assert_eq!(rules(forgot), ["a watch did not converge"]);
    }
}
