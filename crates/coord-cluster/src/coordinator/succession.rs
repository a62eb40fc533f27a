//! Whether the leader hands over to a node of a newer version. Pure: `now` is an argument.

use std::collections::BTreeMap;
use std::time::Duration;

use coord_core::{Incarnation, Label, Moment, NodeId};

use super::release::Release;

/// A node that may lead.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate<'a> {
    pub(crate) node: &'a NodeId,
    pub(crate) incarnation: Incarnation,
    pub(crate) version: Option<&'a Label>,
}

/// What a leader has seen of those that may follow it.
///
/// It transfers at most once in `after`, since it counts each incarnation from when it saw it itself, and only
/// to a version newer than its own: leadership never goes back and forth.
#[derive(Debug)]
pub(crate) struct Succession {
    /// How long an incarnation has to be active before leadership is transferred to it.
    after: Duration,
    /// Since when each incarnation has been active, as this leader has seen it.
    since: BTreeMap<(NodeId, Incarnation), Moment>,
    /// When a transfer target was named that does not lead yet.
    named: Option<Moment>,
}

impl Succession {
    pub(crate) fn new(after: Duration) -> Self {
        Self { after, since: BTreeMap::new(), named: None }
    }

    /// The node that is to lead instead of `me`, of those that may lead now; else when that may change.
    pub(crate) fn decide(
        &mut self,
        me: &NodeId,
        candidates: &[Candidate<'_>],
        now: Moment,
    ) -> Result<NodeId, Option<Moment>> {
        let key = |candidate: &Candidate<'_>| (candidate.node.clone(), candidate.incarnation);
        let old = std::mem::take(&mut self.since);
        for candidate in candidates {
            let key = key(candidate);
            let since = old.get(&key).copied().unwrap_or(now);
            self.since.insert(key, since);
        }
        // A node without a version, or with one that can't be compared, is not preferred to any other, and
        // yields to none.
        let release = |candidate: &Candidate<'_>| Release::parse(candidate.version?).ok();
        let mine = candidates.iter().find(|candidate| candidate.node == me).and_then(release);
        let Some(mine) = mine else { return Err(None) };
        let newest = candidates.iter().filter_map(release).max();
        let Some(newest) = newest.filter(|newest| *newest > mine) else { return Err(None) };
        let targets = candidates.iter().filter(|c| release(c).as_ref() == Some(&newest));
        let longest = targets
            .map(|transfer_target| (self.since.get(&key(transfer_target)), transfer_target.node))
            .min();
        let Some((Some(since), transfer_target)) = longest else { return Err(None) };
        let ripe = since.plus(self.after);
        let again = self.named.map_or(ripe, |named| named.plus(self.after).max(ripe));
        if now < again {
            return Err(Some(again));
        }
        self.named = Some(now);
        Ok(transfer_target.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AFTER: Duration = Duration::from_secs(60);

    fn at(seconds: u64) -> Moment {
        Moment::from_origin(Duration::from_secs(seconds))
    }

    /// Nodes n1, n2, … of these versions and runs; `-` is a node without a version.
    struct Nodes(Vec<(NodeId, u128, Option<Label>)>);

    impl Nodes {
        fn new(nodes: &[(&str, u128)]) -> Self {
            let node = |(number, (version, run)): (usize, &(&str, u128))| {
                let id = NodeId::new(format!("n{}", number + 1)).expect("name");
                let version = (*version != "-").then(|| Label::new(version).expect("label"));
                (id, *run, version)
            };
            Self(nodes.iter().enumerate().map(node).collect())
        }

        fn decide(
            &self,
            succession: &mut Succession,
            now: Moment,
        ) -> Result<String, Option<Moment>> {
            let candidates: Vec<_> = self
                .0
                .iter()
                .map(|(node, run, version)| Candidate {
                    node,
                    incarnation: Incarnation::from_u128(*run),
                    version: version.as_ref(),
                })
                .collect();
            let me = NodeId::new("n1").expect("name");
            succession
                .decide(&me, &candidates, now)
                .map(|transfer_target| transfer_target.to_string())
        }
    }

    #[test]
    fn the_newest_leads_once_it_has_been_there_for_a_while() {
        let mut succession = Succession::new(AFTER);
        let old = Nodes::new(&[("1.9.0", 1), ("1.9.0", 1), ("1.9.0", 1)]);
        assert_eq!(old.decide(&mut succession, at(0)), Err(None));
        let one = Nodes::new(&[("1.9.0", 1), ("1.10.0", 2), ("1.9.0", 1)]);
        assert_eq!(one.decide(&mut succession, at(100)), Err(Some(at(160))));
        // The other one comes up too, and the first of them leads.
        let both = Nodes::new(&[("1.9.0", 1), ("1.10.0", 2), ("1.10.0", 2)]);
        assert_eq!(both.decide(&mut succession, at(150)), Err(Some(at(160))));
        assert_eq!(both.decide(&mut succession, at(160)), Ok("n2".to_owned()));
        // It did not take it; there is time to find out why.
        assert_eq!(both.decide(&mut succession, at(161)), Err(Some(at(220))));
        assert_eq!(both.decide(&mut succession, at(220)), Ok("n2".to_owned()));
    }

    #[test]
    fn one_that_restarts_begins_anew() {
        let mut succession = Succession::new(AFTER);
        let first = Nodes::new(&[("1", 1), ("2", 1)]);
        assert_eq!(first.decide(&mut succession, at(0)), Err(Some(at(60))));
        let again = Nodes::new(&[("1", 1), ("2", 2)]);
        assert_eq!(again.decide(&mut succession, at(59)), Err(Some(at(119))));
        let away = Nodes::new(&[("1", 1)]);
        assert_eq!(away.decide(&mut succession, at(100)), Err(None));
        assert_eq!(again.decide(&mut succession, at(110)), Err(Some(at(170))));
    }

    #[test]
    fn the_newest_is_waited_for_rather_than_led_by_two_in_a_row() {
        let mut succession = Succession::new(AFTER);
        let middle = Nodes::new(&[("1", 1), ("2", 1)]);
        assert_eq!(middle.decide(&mut succession, at(0)), Err(Some(at(60))));
        let newest = Nodes::new(&[("1", 1), ("2", 1), ("3", 1)]);
        assert_eq!(newest.decide(&mut succession, at(30)), Err(Some(at(90))));
        assert_eq!(newest.decide(&mut succession, at(90)), Ok("n3".to_owned()));
    }

    #[test]
    fn nothing_unknown_older_or_equal_is_preferred() {
        let late = at(1_000);
        for nodes in [
            [("2", 1), ("1", 1), ("2.0.0", 1)],
            [("2", 1), ("-", 1), ("main", 1)],
            [("2", 1), ("2-rc.1", 1), ("2+build7", 1)],
            // Whoever can't say what it is itself gives way to nobody.
            [("-", 1), ("3", 1), ("4", 1)],
            [("main", 1), ("3", 1), ("4", 1)],
        ] {
            let mut succession = Succession::new(AFTER);
            let nodes = Nodes::new(&nodes);
            assert_eq!(nodes.decide(&mut succession, at(0)), Err(None));
            assert_eq!(nodes.decide(&mut succession, late), Err(None));
        }
    }

    /// Whatever runs where, leadership comes to rest with at most as many transfers as there are versions.
    #[test]
    fn it_never_goes_back_and_forth() {
        let versions = ["1", "2", "3", "-"];
        for code in 0..256_usize {
            let pick = |place: u32| versions[code / 4_usize.pow(place) % 4];
            let mut nodes: Vec<_> = (0..4).map(|place| (pick(place), 1)).collect();
            let mut transfers = 0;
            loop {
                let mut succession = Succession::new(AFTER);
                let world = Nodes::new(&nodes);
                let _ = world.decide(&mut succession, at(0));
                let Ok(transfer_target) = world.decide(&mut succession, at(60)) else { break };
                let index: usize = transfer_target[1..].parse().expect("a number");
                // The leader is always n1 here.
                nodes.swap(0, index - 1);
                transfers += 1;
                assert!(transfers <= 1, "{nodes:?}");
            }
        }
    }
}
