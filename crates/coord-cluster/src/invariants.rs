//! The invariants that a map must keep before it is published.

use std::collections::BTreeMap;
use std::fmt;

use coord_core::{Fence, Incarnation, NodeEntry, NodeId, ShardId, ShardMap};
use serde::{Deserialize, Serialize};

/// An invariant of the cluster that can be checked on a map.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Invariant {
    /// Every shard has an owner while an active node exists.
    I2,
    /// No shard on a node that hosts nothing, none newly placed on one that takes nothing; and no shard
    /// twice on one node.
    I3,
    /// Assignments change only by the leader, inside its term.
    I4,
}

/// Which invariant a map breaks, and where.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// Which invariant.
    pub invariant: Invariant,
    /// At which shard; none where the whole map is wrong.
    pub shard: Option<ShardId>,
    /// How.
    pub why: String,
}

impl Violation {
    fn of(invariant: Invariant, shard: impl Into<Option<ShardId>>, why: impl Into<String>) -> Self {
        Self { invariant, shard: shard.into(), why: why.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the map breaks {:?}", self.invariant)?;
        if let Some(shard) = self.shard {
            write!(f, " at shard {shard}")?;
        }
        write!(f, ": {}", self.why)
    }
}

/// What a node may do with shards. A node that is not named hosts nothing.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hosting {
    /// It is active: it hosts and takes new ones.
    Takes,
    /// It keeps what it has and takes nothing new: it is draining, or it was declared failed and may
    /// still run.
    Keeps,
}

/// The nodes that may host shards: which run of each, and how.
pub type Hosts = BTreeMap<NodeId, (Incarnation, Hosting)>;

/// Checks I2 to I4 on a map that is to follow `previous`, as the holder of `fence` would publish it.
///
/// # Errors
/// The first violation, by shard.
pub fn check(
    previous: &ShardMap,
    next: &ShardMap,
    hosts: &Hosts,
    fence: &Fence,
) -> Result<(), Violation> {
    check_writer(previous, next, fence)?;
    let active = hosts.values().any(|(_, hosting)| *hosting == Hosting::Takes);
    for shard in next.header().shards.shards() {
        if active && next.owner(shard).is_none() {
            return Err(Violation::of(Invariant::I2, shard, "nobody owns it"));
        }
        check_owners(previous, next, hosts, shard)?;
    }
    Ok(())
}

fn check_writer(previous: &ShardMap, next: &ShardMap, fence: &Fence) -> Result<(), Violation> {
    let wrong = |why: String| Err(Violation::of(Invariant::I4, None, why));
    if next.uid() != previous.uid() || next.header() != previous.header() {
        return wrong("it is another life of the table".to_owned());
    }
    if next.version() != previous.version().next() {
        return wrong(format!("version {} follows {}", next.version(), previous.version()));
    }
    if next.writer() != Some(fence) {
        return wrong("its writer is not the one who publishes it".to_owned());
    }
    match previous.writer() {
        Some(former) if former.same_lease(fence) && !fence.passes(former) => {
            wrong(format!("term {} comes after {}", fence.term, former.term))
        }
        _ => Ok(()),
    }
}

fn check_owners(
    previous: &ShardMap,
    next: &ShardMap,
    hosts: &Hosts,
    shard: ShardId,
) -> Result<(), Violation> {
    let wrong = |why: String| Err(Violation::of(Invariant::I3, shard, why));
    // A run that follows another of the same node takes its shards over, also while it drains.
    let had = |node: &NodeEntry| previous.owners(shard).any(|owner| owner.id == node.id);
    for (place, owner) in next.owners(shard).enumerate() {
        if next.owners(shard).take(place).any(|other| other.id == owner.id) {
            return wrong(format!("node {} owns it twice", owner.id));
        }
        match hosts.get(&owner.id) {
            Some((run, Hosting::Takes)) if *run == owner.incarnation => {}
            Some((run, Hosting::Keeps)) if *run == owner.incarnation => {
                if !had(owner) {
                    return wrong(format!("node {} takes nothing new", owner.id));
                }
            }
            Some(_) => return wrong(format!("node {} is another incarnation now", owner.id)),
            None => return wrong(format!("node {} hosts nothing", owner.id)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use coord_core::{
        Address, AttemptId, LeaseName, NodeStatus, Origin, ShardCount, TableHeader, TableUid, Term,
    };
    use proptest::prelude::*;

    use super::*;

    const SHARDS: u32 = 6;

    fn fence(term: u64) -> Fence {
        let attempt = AttemptId::from_u128(u128::from(term));
        Fence::new(LeaseName::leader(), Term::from_u64(term), attempt, Origin::new("memory:1/c"))
    }

    fn entry(number: u8, incarnation: u128) -> NodeEntry {
        NodeEntry::new(
            NodeId::new(format!("n{number}")).expect("name"),
            Incarnation::from_u128(incarnation),
            Address::new("localhost:1").expect("address"),
            NodeStatus::Active,
        )
    }

    /// A map after `base` in which shard s belongs to the s-th of `owners`, all of incarnation 1.
    fn after(base: &ShardMap, owners: &[Option<u8>], term: u64) -> ShardMap {
        let mut edit = base.edit();
        for (shard, owner) in (0..).map(ShardId::new).zip(owners) {
            let slot = owner.map_or(coord_core::Slot::NOBODY, |number| {
                edit.put_node(entry(number, 1)).expect("room")
            });
            edit.set_owner(shard, 0, slot).expect("in range");
        }
        edit.finish(fence(term)).expect("changed")
    }

    fn empty() -> ShardMap {
        let header = TableHeader::new(ShardCount::new(SHARDS).expect("count"));
        ShardMap::empty(header, TableUid::from_u128(1))
    }

    fn hosts(list: &[(u8, Hosting)]) -> Hosts {
        list.iter()
            .map(|(number, hosting)| (entry(*number, 1).id, (Incarnation::from_u128(1), *hosting)))
            .collect()
    }

    #[test]
    fn each_invariant_is_seen_to_break() {
        use Hosting::{Keeps, Takes};
        let base = after(&empty(), &[Some(1); 6], 1);
        let owners = [Some(1), Some(1), Some(2), Some(1), Some(1), Some(1)];
        let next = after(&base, &owners, 2);
        let both = hosts(&[(1, Takes), (2, Takes)]);
        assert_eq!(check(&base, &next, &both, &fence(2)), Ok(()));
        let broken = |next: &ShardMap, hosts: &Hosts, term| {
            let violation = check(&base, next, hosts, &fence(term)).expect_err("broken");
            (violation.invariant, violation.shard.map(ShardId::get))
        };
        assert_eq!(broken(&next, &hosts(&[(1, Takes)]), 2), (Invariant::I3, Some(2)));
        assert_eq!(broken(&next, &hosts(&[(1, Takes), (2, Keeps)]), 2), (Invariant::I3, Some(2)));
        assert_eq!(broken(&next, &both, 3), (Invariant::I4, None));
        let orphaned = after(&base, &[Some(1), None], 2);
        assert_eq!(broken(&orphaned, &both, 2), (Invariant::I2, Some(1)));
        assert_eq!(check(&base, &orphaned, &hosts(&[(1, Keeps)]), &fence(2)), Ok(()));
        let other_run = Hosts::from([(entry(1, 1).id, (Incarnation::from_u128(2), Takes))]);
        assert_eq!(broken(&next, &other_run, 2), (Invariant::I3, Some(0)));
        let late = after(&next, &[None], 2);
        assert_eq!(broken(&late, &both, 2), (Invariant::I4, None));
    }

    #[test]
    fn an_older_term_never_follows_a_newer_one() {
        let base = after(&empty(), &[Some(1); 6], 5);
        let next = after(&base, &[Some(2)], 4);
        let both = hosts(&[(1, Hosting::Takes), (2, Hosting::Takes)]);
        let violation = check(&base, &next, &both, &fence(4)).expect_err("older");
        assert_eq!(violation.invariant, Invariant::I4);
    }

    proptest! {
        /// On random maps the checker agrees with a direct reading of the definitions.
        #[test]
        fn random_maps_are_judged_by_the_definitions(
            old in proptest::collection::vec(proptest::option::of(0_u8..4), SHARDS as usize),
            new in proptest::collection::vec(proptest::option::of(0_u8..4), SHARDS as usize),
            states in proptest::collection::vec(0_u8..3, 4),
        ) {
            prop_assume!(old != new && old.iter().any(Option::is_some));
            let base = after(&empty(), &old, 1);
            let next = after(&base, &new, 2);
            let hosting = |number: u8| match states[usize::from(number)] {
                0 => Some(Hosting::Takes),
                1 => Some(Hosting::Keeps),
                _ => None,
            };
            let list: Vec<_> = (0..4).filter_map(|n| Some((n, hosting(n)?))).collect();
            let active = list.iter().any(|(_, h)| *h == Hosting::Takes);
            let bad = (0..SHARDS as usize).find(|&shard| match new[shard] {
                None => active,
                Some(node) => match hosting(node) {
                    Some(Hosting::Takes) => false,
                    Some(Hosting::Keeps) => old[shard] != Some(node),
                    None => true,
                },
            });
            let verdict = check(&base, &next, &hosts(&list), &fence(2));
            prop_assert_eq!(verdict.err().and_then(|v| v.shard).map(ShardId::index), bad);
        }
    }
}
