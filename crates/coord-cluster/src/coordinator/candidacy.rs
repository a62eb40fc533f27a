//! Which nodes of a large cluster are candidates for election. Pure.
//!
//! A candidate watches the registrations and tries for the leader's lease, so the load on the store grows with
//! their number. The leader gives candidate slots to a few nodes, and writes their names into `_cluster`:
//!
//! ```text
//!   no names in `_cluster`      every node: a small cluster, a new one, or a leader of an older version
//!   names                       the nodes with a slot, and the one that is named to lead next
//!   the lease is vacant for     every node, until one leads and has given the slots anew
//!   longer than its TTL, or
//!   no holder keeps it that long
//! ```
//!
//! So there are candidates whatever happens to the nodes with a slot, also if all are lost at once. A node
//! keeps its slot while it is active, so that what it has seen of the others stays of use. The leader always
//! has one.

use std::collections::{BTreeMap, BTreeSet};

use coord_core::{Label, NodeId, Version};

/// A node that would stand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Applicant<'a> {
    pub(crate) node: &'a NodeId,
    pub(crate) zone: Option<&'a Label>,
    /// The lower, the older the member.
    pub(crate) since: Option<Version>,
}

/// The nodes that have one of so many candidate slots from now on; none if there are no slots, so that every
/// node is a candidate.
pub(crate) fn give(
    places: usize,
    me: &NodeId,
    held: &BTreeSet<NodeId>,
    applicants: &[Applicant<'_>],
) -> BTreeSet<NodeId> {
    let mine = applicants.iter().filter(|one| one.node == me);
    let others = applicants.iter().filter(|one| one.node != me && held.contains(one.node));
    // The leader comes first.
    let mut given: Vec<&Applicant<'_>> = mine.chain(others).collect();
    while given.len() > places {
        let crowds = crowds(&given);
        let last = (1..given.len()).max_by_key(|at| (crowds.get(&given[*at].zone), *at));
        given.remove(last.unwrap_or(0));
    }
    while given.len() < places {
        let crowds = crowds(&given);
        let new = |one: &&Applicant<'_>| given.iter().all(|other| other.node != one.node);
        // One in every zone first; and then the oldest member, which is the least likely to go.
        let rank = |one: &&Applicant<'_>| {
            let crowd = crowds.get(&one.zone).copied().unwrap_or(0);
            (crowd, one.since.map_or(u64::MAX, Version::get), one.node.clone())
        };
        let Some(next) = applicants.iter().filter(new).min_by_key(rank) else { break };
        given.push(next);
    }
    given.into_iter().map(|one| one.node.clone()).collect()
}

/// How many of them are in each zone.
fn crowds<'a>(given: &[&Applicant<'a>]) -> BTreeMap<Option<&'a Label>, usize> {
    let mut crowds = BTreeMap::new();
    for one in given {
        *crowds.entry(one.zone).or_default() += 1;
    }
    crowds
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(name: &str) -> NodeId {
        NodeId::new(name).expect("name")
    }

    /// Who has a place of five, of nodes in these zones, the oldest first.
    fn give_to(me: &str, held: &[&str], nodes: &[(&str, &str)]) -> Vec<String> {
        let nodes: Vec<_> =
            nodes.iter().map(|(name, zone)| (id(name), Label::new(zone).expect("label"))).collect();
        let applicants: Vec<_> = nodes
            .iter()
            .zip(1..)
            .map(|((node, zone), age)| {
                let since = Some(Version::new(age));
                Applicant { node, zone: Some(zone), since }
            })
            .collect();
        let held = held.iter().map(|name| id(name)).collect();
        give(5, &id(me), &held, &applicants).iter().map(ToString::to_string).collect()
    }

    const NODES: [(&str, &str); 8] = [
        ("a1", "a"),
        ("a2", "a"),
        ("a3", "a"),
        ("a4", "a"),
        ("b1", "b"),
        ("b2", "b"),
        ("c1", "c"),
        ("c2", "c"),
    ];

    #[test]
    fn there_are_no_more_places_than_nodes_that_would_stand() {
        assert_eq!(give_to("a1", &[], &NODES[..3]), ["a1", "a2", "a3"]);
        assert_eq!(give_to("a1", &["a2"], &NODES[..6]).len(), 5);
        assert_eq!(give_to("a1", &["a1"], &[]), [""; 0]);
    }

    #[test]
    fn the_leader_has_a_place_and_the_others_are_in_all_zones_the_oldest_first() {
        assert_eq!(give_to("a1", &[], &NODES), ["a1", "a2", "b1", "b2", "c1"]);
        assert_eq!(give_to("a4", &[], &NODES), ["a1", "a4", "b1", "b2", "c1"]);
    }

    #[test]
    fn places_are_kept_and_one_that_goes_is_replaced() {
        let held = ["a2", "a3", "b2", "c2", "a1"];
        assert_eq!(give_to("a1", &held, &NODES), ["a1", "a2", "a3", "b2", "c2"]);
        let without: Vec<_> = NODES.into_iter().filter(|(name, _)| *name != "c2").collect();
        assert_eq!(give_to("a1", &held, &without), ["a1", "a2", "a3", "b2", "c1"]);
        // Whoever leads without a place takes the one of the fullest zone.
        assert_eq!(give_to("b1", &held, &NODES), ["a1", "a2", "b1", "b2", "c2"]);
    }

    #[test]
    fn one_that_may_not_stand_has_no_place_although_it_leads() {
        assert_eq!(give_to("z", &["z"], &NODES), ["a1", "a2", "b1", "b2", "c1"]);
    }
}
