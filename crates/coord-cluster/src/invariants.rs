//! The invariants that a map must keep before it is published; all of them are in
//! `docs/design.md#invariants` of the repository.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use coord_core::{
    Fence, Incarnation, Motion, MotionPhase, NodeEntry, NodeId, ShardId, ShardMap, Slot, Version,
};
use serde::{Deserialize, Serialize};

use crate::handoff::Handoff;

/// An invariant of the cluster that can be checked on a map.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Invariant {
    /// Every shard has an owner while an active node exists, except quarantined ones.
    I2,
    /// No shard on a node that hosts nothing, none newly placed on one that takes nothing; and no shard
    /// twice on one node.
    I3,
    /// Assignments change only by the leader, inside its term.
    I4,
    /// No shard is hosted by two processes at one moment: a map gives no shard away that may still run on its
    /// former host. What the hosts really do is not on the map.
    I6,
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

/// What an incarnation of a node may do with shards. One that is not named hosts nothing.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hosting {
    /// It is active: it hosts and takes new ones.
    Takes,
    /// It may host what it has and takes nothing new: it is draining, it is absent and not given up, or it was
    /// declared failed or replaced and may still run.
    Keeps,
}

/// The runs that may host shards, and how.
pub type Hosts = BTreeMap<(NodeId, Incarnation), Hosting>;

/// What is known of the moves that a map completes.
#[non_exhaustive]
#[derive(Clone, Copy)]
pub struct Evidence<'a> {
    /// How owners change.
    pub handoff: Handoff,
    /// Whether an incarnation has reported a shard stopped, in answer to this version or a later one.
    pub stopped: &'a dyn Fn(&NodeEntry, ShardId, Version) -> bool,
    /// Whether an incarnation has reported a shard started, in answer to this version or a later one.
    pub started: &'a dyn Fn(&NodeEntry, ShardId, Version) -> bool,
    /// Whether a shard is quarantined, so that no node may have it: the exception to I2.
    pub parked: &'a dyn Fn(ShardId) -> bool,
}

impl<'a> Evidence<'a> {
    /// Evidence of its parts.
    #[must_use]
    pub fn new(
        handoff: Handoff,
        stopped: &'a dyn Fn(&NodeEntry, ShardId, Version) -> bool,
        started: &'a dyn Fn(&NodeEntry, ShardId, Version) -> bool,
    ) -> Self {
        Self { handoff, stopped, started, parked: &|_| false }
    }

    /// With these quarantined shards.
    #[must_use]
    pub fn with_parked(mut self, parked: &'a dyn Fn(ShardId) -> bool) -> Self {
        self.parked = parked;
        self
    }
}

impl fmt::Debug for Evidence<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Evidence").field("handoff", &self.handoff).finish_non_exhaustive()
    }
}

/// Checks I2 to I4, and of I6 what a map can break, on a map that is to follow `previous`, as the holder
/// of `fence` would publish it.
///
/// # Errors
/// The first violation, by shard.
pub fn check(
    previous: &ShardMap,
    next: &ShardMap,
    hosts: &Hosts,
    fence: &Fence,
    evidence: &Evidence<'_>,
) -> Result<(), Violation> {
    check_writer(previous, next, fence)?;
    let pair = Pair::new(previous, next, hosts, *evidence);
    let active = hosts.values().any(|hosting| *hosting == Hosting::Takes);
    for shard in next.header().shards.shards() {
        if active && next.owner(shard).is_none() && !(evidence.parked)(shard) {
            return Err(Violation::of(Invariant::I2, shard, "nobody owns it"));
        }
        pair.check_owners(shard)?;
        pair.check_moves(shard)?;
    }
    Ok(())
}

fn check_writer(previous: &ShardMap, next: &ShardMap, fence: &Fence) -> Result<(), Violation> {
    let wrong = |why: String| Err(Violation::of(Invariant::I4, None, why));
    if next.uid() != previous.uid() || next.header() != previous.header() {
        return wrong("it is another generation of the table".to_owned());
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

/// Two versions, with what each of their slots may do looked up once.
struct Pair<'a> {
    previous: &'a ShardMap,
    next: &'a ShardMap,
    evidence: Evidence<'a>,
    /// Of each slot of the next version: what its incarnation may do.
    hosting: Vec<Option<Hosting>>,
    /// Of each slot of the next version: the same node's slot in the previous one.
    before: Vec<Option<Slot>>,
    /// Of each slot of the previous version: whether its incarnation may still host.
    may_run: Vec<bool>,
    /// Of each slot of the previous version: the same incarnation's slot in the next one.
    after: Vec<Option<Slot>>,
}

impl<'a> Pair<'a> {
    fn new(
        previous: &'a ShardMap,
        next: &'a ShardMap,
        hosts: &Hosts,
        evidence: Evidence<'a>,
    ) -> Self {
        let slots = |map: &'a ShardMap| {
            let nodes = (0_u16..).zip(map.nodes());
            nodes.filter_map(|(slot, node)| Some((&node.as_ref()?.id, (Slot::new(slot), node))))
        };
        let old: HashMap<_, _> = slots(previous).collect();
        let new: HashMap<_, _> = slots(next).collect();
        let host = |node: &NodeEntry| hosts.get(&(node.id.clone(), node.incarnation)).copied();
        let each = |map: &'a ShardMap| map.nodes().iter().map(Option::as_ref);
        let same_run = |node: &NodeEntry| {
            let (slot, other) = new.get(&node.id)?;
            let same = other.as_ref().is_some_and(|o| o.incarnation == node.incarnation);
            same.then_some(*slot)
        };
        Self {
            hosting: each(next).map(|node| host(node?)).collect(),
            before: each(next).map(|node| Some(old.get(&node?.id)?.0)).collect(),
            may_run: each(previous).map(|node| node.and_then(host).is_some()).collect(),
            after: each(previous).map(|node| same_run(node?)).collect(),
            previous,
            next,
            evidence,
        }
    }

    fn check_owners(&self, shard: ShardId) -> Result<(), Violation> {
        let wrong = |slot: Slot, why: &str| {
            let id = self.next.node(slot).map_or("nobody", |node| node.id.as_str());
            Err(Violation::of(Invariant::I3, shard, format!("node {id} {why}")))
        };
        let filled = |slot: &Slot| *slot != Slot::NOBODY;
        for (place, slot) in self.next.owner_slots(shard).enumerate().filter(|(_, s)| filled(s)) {
            if self.next.owner_slots(shard).take(place).any(|other| other == slot) {
                return wrong(slot, "owns it twice");
            }
            // An incarnation that follows another one of the same node takes over its shards, also while it
            // drains.
            let had = || {
                let before = of(&self.before, slot).flatten();
                before.is_some_and(|before| self.previous.owner_slots(shard).any(|s| s == before))
            };
            match of(&self.hosting, slot).flatten() {
                Some(Hosting::Takes) => {}
                Some(Hosting::Keeps) if had() => {}
                Some(Hosting::Keeps) => return wrong(slot, "takes nothing new"),
                None => return wrong(slot, "hosts nothing as this run"),
            }
        }
        Ok(())
    }

    /// No incarnation that may still run a shard is followed by another node without having stopped the shard.
    fn check_moves(&self, shard: ShardId) -> Result<(), Violation> {
        if self.evidence.handoff == Handoff::Eager {
            return Ok(());
        }
        let wrong = |slot: Slot, why: &str| {
            let id = self.previous.node(slot).map_or("nobody", |node| node.id.as_str());
            Err(Violation::of(Invariant::I6, shard, format!("node {id} {why}")))
        };
        let none = Vec::new();
        let motions = self.previous.motions().get(&shard).unwrap_or(&none);
        let news = self.next.motions().get(&shard).unwrap_or(&none);
        let runs = |slot: Slot| of(&self.may_run, slot).unwrap_or(false);
        let told = |motion: &Motion, slot: Slot| {
            let node = self.previous.node(slot);
            node.is_some_and(|node| (self.evidence.stopped)(node, shard, motion.since))
        };
        for (place, old) in self.previous.owner_slots(shard).enumerate() {
            let after = of(&self.after, old).flatten();
            let stays = self.next.owner_slots(shard).take(place + 1).any(|s| Some(s) == after);
            if !runs(old) || stays {
                continue;
            }
            let motion = motions.iter().find(|motion| {
                usize::from(motion.replica) == place && motion.phase == MotionPhase::MovingTo
            });
            let stopped = motion.is_some_and(|motion| told(motion, old));
            let breaks = self.evidence.handoff == Handoff::MakeBeforeBreak
                && (self.next.owner_slots(shard).any(|slot| Some(slot) == after)
                    || news.iter().any(|motion| {
                        motion.phase == MotionPhase::Leaving && Some(motion.other.into()) == after
                    }));
            if !stopped && !breaks {
                return wrong(old, "may still run it");
            }
        }
        for motion in motions.iter().filter(|motion| motion.phase == MotionPhase::Leaving) {
            let other = Slot::from(motion.other);
            let after = of(&self.after, other).flatten();
            let kept = news
                .iter()
                .any(|m| m.phase == MotionPhase::Leaving && Some(Slot::from(m.other)) == after);
            if runs(other) && !kept && !told(motion, other) {
                return wrong(other, "has not stopped it yet");
            }
        }
        let owners: Vec<Slot> = self.next.owner_slots(shard).collect();
        // A move that goes on is looked at anew by the next plan.
        let begun =
            |motion: &&Motion| motion.phase == MotionPhase::MovingTo && !motions.contains(motion);
        for motion in news.iter().filter(begun) {
            let other = Slot::from(motion.other);
            let itself = owners.get(usize::from(motion.replica)) == Some(&other);
            if !itself && of(&self.hosting, other).flatten() != Some(Hosting::Takes) {
                return Err(Violation::of(Invariant::I3, shard, "it moves to where it can't go"));
            }
        }
        Ok(())
    }
}

/// What is known of a slot.
fn of<T: Copy>(list: &[T], slot: Slot) -> Option<T> {
    list.get(slot.index()?).copied()
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
            let slot =
                owner.map_or(Slot::NOBODY, |number| edit.put_node(entry(number, 1)).expect("room"));
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
            .map(|(number, hosting)| ((entry(*number, 1).id, Incarnation::from_u128(1)), *hosting))
            .collect()
    }

    /// Without any reports, and with no wait for them.
    fn check(
        previous: &ShardMap,
        next: &ShardMap,
        hosts: &Hosts,
        fence: &Fence,
    ) -> Result<(), Violation> {
        let never = |_: &NodeEntry, _, _| false;
        super::check(previous, next, hosts, fence, &Evidence::new(Handoff::Eager, &never, &never))
    }

    #[test]
    fn a_shard_that_may_still_run_is_not_given_away() {
        use Hosting::{Keeps, Takes};
        let base = after(&empty(), &[Some(1); 6], 1);
        let mut edit = base.edit();
        let to = edit.put_node(entry(2, 1)).expect("room");
        let since = Version::new(2);
        let motion = |other| Motion::new(0, other, MotionPhase::MovingTo, since);
        edit.set_motions(ShardId::new(3), vec![motion(to)]).expect("in range");
        let moving = edit.finish(fence(1)).expect("changed");
        let all = hosts(&[(1, Takes), (2, Takes)]);
        let owners = [Some(1), Some(1), Some(1), Some(2), Some(1), Some(1)];
        let done = {
            let mut edit = moving.edit();
            edit.set_owner(ShardId::new(3), 0, to).expect("in range");
            edit.set_motions(ShardId::new(3), Vec::new()).expect("in range");
            edit.finish(fence(1)).expect("changed")
        };
        let judge = |from: &ShardMap, next: &ShardMap, hosts: &Hosts, handoff, reported: bool| {
            let stopped = |node: &NodeEntry, _: ShardId, at: Version| {
                reported && node.id == entry(1, 1).id && at == since
            };
            let never = |_: &NodeEntry, _, _| false;
            let evidence = Evidence::new(handoff, &stopped, &never);
            super::check(from, next, hosts, &fence(1), &evidence).err().map(|v| v.invariant)
        };
        let exclusive = Handoff::Exclusive;
        assert_eq!(judge(&base, &moving, &all, exclusive, false), None);
        assert_eq!(judge(&moving, &done, &all, exclusive, false), Some(Invariant::I6));
        assert_eq!(judge(&moving, &done, &all, exclusive, true), None);
        assert_eq!(
            judge(&moving, &done, &all, Handoff::MakeBeforeBreak, false),
            Some(Invariant::I6)
        );
        assert_eq!(judge(&moving, &done, &all, Handoff::Eager, false), None);
        // Without a move before it, no report counts; an owner that hosts nothing is not asked.
        let at_once = after(&base, &owners, 1);
        assert_eq!(judge(&base, &at_once, &all, exclusive, true), Some(Invariant::I6));
        let lingers = hosts(&[(1, Keeps), (2, Takes)]);
        assert_eq!(judge(&base, &at_once, &lingers, exclusive, true), Some(Invariant::I6));
        let all_gone = after(&base, &[Some(2); 6], 1);
        assert_eq!(judge(&base, &all_gone, &hosts(&[(2, Takes)]), exclusive, false), None);
        // A successor takes nothing from a run that may go on.
        let mut edit = base.edit();
        edit.put_node(entry(1, 2)).expect("room");
        let succeeded = edit.finish(fence(1)).expect("changed");
        let mut both = lingers;
        both.insert((entry(1, 2).id, Incarnation::from_u128(2)), Takes);
        assert_eq!(judge(&base, &succeeded, &both, exclusive, true), Some(Invariant::I6));
        // What only keeps its shards is no target.
        let keeps = hosts(&[(1, Takes), (2, Keeps)]);
        assert_eq!(judge(&base, &moving, &keeps, exclusive, false), Some(Invariant::I3));
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
        let other_run = Hosts::from([((entry(1, 1).id, Incarnation::from_u128(2)), Takes)]);
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
