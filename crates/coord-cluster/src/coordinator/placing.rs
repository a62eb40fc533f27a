//! From a table's map, the roster and the pins to its next map. Pure.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use coord_core::{
    Fence, MapEdit, Motion, MotionPhase, NodeEntry, NodeId, NodeStatus, Report, Result, ShardId,
    ShardMap, Slot, Version,
};
use coord_placement::{Accepts, Assignment, Candidate, Plan, PlanError, PlanSettings};

use super::loads::Figures;
use super::moving::{Moves, Resolved, Trip, moving};
use super::roster::{HostingState, Roster, Seat};
use crate::handoff::Handoff;
use crate::invariants::{Evidence, Hosting, Hosts, Violation, check};
use crate::record::{Parked, Rebalance, TableNote, brief};

/// Why there is no next map.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Failed {
    /// The strategy found none.
    Plan(PlanError),
    /// The strategy panicked, with this message.
    Panicked(String),
    /// The one it found breaks an invariant.
    Violation(Violation),
    /// It could not be built.
    Build(String),
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Plan(error) => error.fmt(f),
            Self::Panicked(message) => write!(f, "the placement strategy panicked: {message}"),
            Self::Violation(violation) => violation.fmt(f),
            Self::Build(error) => f.write_str(error),
        }
    }
}

impl From<coord_core::Error> for Failed {
    fn from(error: coord_core::Error) -> Self {
        Self::Build(error.to_string())
    }
}

/// The next version of a table.
#[derive(Clone, Debug)]
pub(crate) struct Next {
    pub(crate) map: Arc<ShardMap>,
    /// How many shards change their primary by it, now or at the end of their move that began.
    pub(crate) begun: u32,
    /// Whether moves have still to begin.
    pub(crate) more: bool,
}

/// What a strategy is asked.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Question {
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) settings: PlanSettings,
}

/// What the next map is made from.
pub(crate) struct Placing<'a> {
    pub(crate) map: &'a ShardMap,
    /// The slots of the map, by name.
    pub(crate) slots: HashMap<&'a NodeId, Slot>,
    pub(crate) roster: &'a Roster,
    pub(crate) fence: &'a Fence,
    pub(crate) handoff: Handoff,
    /// Of each slot of the map.
    pub(crate) tenancy: &'a [HostingState],
    /// What the incarnation in each slot reports of this generation of the table.
    pub(crate) reports: Vec<Option<&'a Report>>,
    /// The shards that no node may have.
    pub(crate) parked: Option<&'a BTreeMap<ShardId, Parked>>,
    /// How many shards may be in motion.
    pub(crate) motions_max: usize,
}

/// The nodes that take shards.
struct Taking {
    /// Whether each slot does.
    slots: Vec<bool>,
    /// Whether anybody does.
    active: bool,
}

impl Taking {
    fn takes(&self, slot: Slot) -> bool {
        slot.index().is_some_and(|index| self.slots.get(index).copied().unwrap_or(false))
    }
}

/// The nodes of the next version.
struct Ground {
    edit: MapEdit,
    hosts: Hosts,
    taking: Taking,
    /// Whether each slot has to be left although no node takes its shards.
    leaves: Vec<bool>,
}

impl Ground {
    fn hosts(&self, node: &NodeEntry) -> bool {
        self.hosts.contains_key(&(node.id.clone(), node.incarnation))
    }
}

impl Placing<'_> {
    /// The owners that a plan starts from: shards in motion are where they go, if they still can.
    pub(crate) fn assignment(&self) -> Result<Assignment, Failed> {
        let taking = self.taking(self.map);
        let header = self.map.header();
        let nodes =
            self.map.nodes().iter().map(|node| Some(node.as_ref()?.id.clone())).collect::<Vec<_>>();
        let mut owners = self.map.raw_owners().to_vec();
        for (&shard, motions) in self.map.motions() {
            let row = self.effective(&taking, shard, motions);
            write_row(&mut owners, shard, &row);
        }
        Assignment::new(header.shards, header.replicas, nodes, owners).map_err(Failed::Plan)
    }

    /// The question for the strategy; none if no node takes shards.
    pub(crate) fn question(
        &self,
        current: &Assignment,
        pins: Option<&BTreeMap<ShardId, NodeId>>,
        paused: bool,
        figures: Option<&Figures>,
    ) -> Option<Question> {
        if self.roster.active() == 0 {
            return None;
        }
        let counts = current.counts();
        let candidate = |seat: &Seat| {
            let hosting = self.roster.hosting(seat)?;
            let mut candidate = Candidate::new(seat.entry.id.clone())
                .with_capacity(seat.capacity)
                .with_zone(seat.entry.zone.clone());
            if seat.frozen || (hosting == Hosting::Takes && self.is_held(seat)) {
                let count = counts.get(&seat.entry.id).copied().unwrap_or_default();
                candidate = candidate.with_max_shards(u32::try_from(count).ok());
            } else if hosting == Hosting::Keeps {
                candidate = candidate.with_accepts(Accepts::KeepOnly);
            }
            Some(candidate)
        };
        let candidates = self.roster.0.values().filter_map(candidate).collect();
        let mut settings = PlanSettings::default()
            .with_version(self.map.version())
            .with_max_moves(paused.then_some(0));
        if let Some(Figures { loads, hold }) = figures {
            settings = settings.with_loads(Arc::clone(loads)).with_holds_loads(*hold);
        }
        for (shard, node) in pins.into_iter().flatten() {
            let takes = self.roster.seat(node).is_some_and(|seat| {
                self.roster.hosting(seat) == Some(Hosting::Takes) && !self.is_held(seat)
            });
            if takes {
                settings = settings.with_pin(*shard, vec![node.clone()]);
            }
        }
        Some(Question { candidates, settings })
    }

    /// Follows a plan, as far as moves may begin and can be completed. Returns none if nothing changes, and
    /// also whether moves have still to begin. Without a plan no node takes shards, and shards that lost their
    /// host become unassigned.
    pub(crate) fn rebalance(
        &self,
        plan: Option<&Plan>,
        reason: &str,
    ) -> Result<(Option<Next>, bool), Failed> {
        let mut ground = self.ground()?;
        let mut target = match plan {
            Some(plan) => {
                plan.next().write_to(&mut ground.edit)?;
                self.reachable(&ground, ground.edit.map().raw_owners().to_vec())
            }
            None => self.homes(&ground),
        };
        for shard in self.parked.into_iter().flat_map(BTreeMap::keys) {
            write_row(&mut target, *shard, &self.nobody());
        }
        // A shard that no node takes only has to stop.
        let motions_max = if plan.is_some() { self.motions_max } else { usize::MAX };
        self.go(ground, &target, motions_max, Some(reason))
    }

    /// Goes on with the moves that are under way; none if none of them can. Whether a plan has seen how
    /// things stand decides whether the rebalance is done after the last one.
    pub(crate) fn advance(&self, planned: bool) -> Result<Option<Next>, Failed> {
        let moves = self.moves();
        let taking = self.taking(self.map);
        let mut target = BTreeMap::new();
        for (&shard, motions) in self.map.motions() {
            let row: Vec<Slot> = self.map.owner_slots(shard).collect();
            let goal = self.effective(&taking, shard, motions);
            let off_course = |motion: &Motion| {
                let place = usize::from(motion.replica);
                motion.phase == MotionPhase::MovingTo && goal.get(place) == row.get(place)
            };
            if motions.iter().any(off_course) {
                // The next plan finds another way.
                continue;
            }
            let trip = Trip { shard, row: &row, motions, target: &goal, begin: false };
            let next = moves.resolve(&trip);
            if next.row != row || next.motions != *motions {
                target.insert(shard, next);
            }
        }
        if target.is_empty() {
            return Ok(None);
        }
        let ground = self.ground()?;
        let mut changes = Changes { owners: self.map.raw_owners().to_vec(), ..Changes::default() };
        let none = Vec::new();
        for (shard, next) in target {
            let row: Vec<Slot> = self.map.owner_slots(shard).collect();
            changes.take(shard, &row, self.map.motions().get(&shard).unwrap_or(&none), next);
        }
        self.write(ground, changes, Open { more: false, planned, reason: None })
    }

    /// Gives the named shards these owners; none if they have them already.
    pub(crate) fn assign(
        &self,
        owners: &BTreeMap<ShardId, Vec<NodeId>>,
    ) -> Result<Option<Next>, Failed> {
        let ground = self.ground()?;
        let mut target = self.map.raw_owners().to_vec();
        for (&shard, motions) in self.map.motions() {
            let row = self.effective(&ground.taking, shard, motions);
            write_row(&mut target, shard, &row);
        }
        for (&shard, nodes) in owners {
            let replicas = usize::from(self.map.header().replicas.get());
            let slot = |node: &NodeId| ground.edit.map().slot_of(node).unwrap_or(Slot::NOBODY);
            let row: Vec<Slot> =
                (0..replicas).map(|r| nodes.get(r).map_or(Slot::NOBODY, slot)).collect();
            write_row(&mut target, shard, &row);
        }
        self.check_goal(&ground, &target, owners)?;
        let named = owners.len() + self.map.motions().len();
        Ok(self.go(ground, &target, named.max(self.motions_max), None)?.0)
    }

    /// What a command asks for has to be right before its first move begins.
    fn check_goal(
        &self,
        ground: &Ground,
        target: &[u16],
        named: &BTreeMap<ShardId, Vec<NodeId>>,
    ) -> Result<(), Failed> {
        let mut edit = ground.edit.clone();
        edit.set_raw_owners(target.to_vec())?;
        for shard in self.map.motions().keys() {
            edit.set_motions(*shard, Vec::new())?;
        }
        edit.set_annex(TableNote::new(self.handoff, None).write()?)?;
        let Some(goal) = edit.finish(self.fence.clone()) else { return Ok(()) };
        let never = |_: &NodeEntry, _: ShardId, _: Version| false;
        let parked = |shard| self.is_parked(shard);
        let evidence = Evidence::new(Handoff::Eager, &never, &never).with_parked(&parked);
        match check(self.map, &goal, &ground.hosts, self.fence, &evidence) {
            // What is wrong elsewhere is not this command's fault, and is found when it is published.
            Err(violation) if violation.shard.is_none_or(|shard| named.contains_key(&shard)) => {
                Err(Failed::Violation(violation))
            }
            _ => Ok(()),
        }
    }

    fn is_parked(&self, shard: ShardId) -> bool {
        self.parked.is_some_and(|parked| parked.contains_key(&shard))
    }

    fn nobody(&self) -> Vec<Slot> {
        vec![Slot::NOBODY; usize::from(self.map.header().replicas.get())]
    }

    /// Whether a former incarnation of this node may still host shards of the table, which then stay in its
    /// name.
    pub(crate) fn is_held(&self, seat: &Seat) -> bool {
        let Some(&slot) = self.slots.get(&seat.entry.id) else { return false };
        let other = self.map.node(slot).is_some_and(|e| e.incarnation != seat.entry.incarnation);
        let may_run = slot.index().and_then(|index| self.tenancy.get(index));
        other
            && self.handoff != Handoff::Eager
            && may_run.is_some_and(|tenancy| *tenancy != HostingState::Stopped)
            && self.is_named(slot)
    }

    fn is_named(&self, slot: Slot) -> bool {
        let mut motions = self.map.motions().values().flatten();
        self.map.raw_owners().contains(&slot.get())
            || motions.any(|motion| Slot::from(motion.other) == slot)
    }

    fn moves(&self) -> Moves<'_> {
        Moves {
            handoff: self.handoff,
            tenancy: self.tenancy,
            reports: self.reports.clone(),
            next: self.map.version().next(),
        }
    }

    /// Lists every host with its present incarnation and status, unless a former incarnation may still host.
    fn ground(&self) -> Result<Ground, Failed> {
        let mut edit = self.map.edit();
        let mut hosts = Hosts::new();
        for (entry, tenancy) in self.map.nodes().iter().zip(self.tenancy) {
            if let Some(entry) = entry.as_ref().filter(|_| *tenancy != HostingState::Stopped) {
                hosts.insert((entry.id.clone(), entry.incarnation), Hosting::Keeps);
            }
        }
        for seat in self.roster.0.values() {
            let Some(hosting) = self.roster.hosting(seat) else {
                // The last one that leaves is listed as what it is, for as long as it has shards to stop.
                let listed = self.slots.get(&seat.entry.id).and_then(|slot| self.map.node(*slot));
                let here = listed.is_some_and(|it| it.incarnation == seat.entry.incarnation);
                if here && seat.entry.status == NodeStatus::Draining {
                    edit.put_node(seat.entry.clone().with_since(None))?;
                }
                continue;
            };
            if !self.is_held(seat) {
                edit.put_node(seat.entry.clone().with_since(None))?;
                hosts.insert((seat.entry.id.clone(), seat.entry.incarnation), hosting);
            }
        }
        let taking = self.taking(edit.map());
        let leaves = |entry: &Option<NodeEntry>| {
            let seat = entry.as_ref().and_then(|entry| {
                let seat = self.roster.seat(&entry.id)?;
                (seat.entry.incarnation == entry.incarnation).then_some(seat)
            });
            seat.is_some_and(|seat| {
                seat.entry.status == NodeStatus::Draining && self.roster.hosting(seat).is_none()
            })
        };
        let leaves = edit.map().nodes().iter().map(leaves).collect();
        Ok(Ground { edit, hosts, taking, leaves })
    }

    /// Which slots of the current map, or of the next one, take shards.
    fn taking(&self, map: &ShardMap) -> Taking {
        let takes =
            |seat: &Seat| self.roster.hosting(seat) == Some(Hosting::Takes) && !self.is_held(seat);
        let slot = |entry: &Option<NodeEntry>| {
            let seat = entry.as_ref().and_then(|entry| self.roster.seat(&entry.id));
            seat.is_some_and(takes)
        };
        let slots = map.nodes().iter().map(slot).collect();
        Taking { slots, active: self.roster.0.values().any(takes) }
    }

    /// Where a shard goes that is in motion; where it is if it can't go there any more.
    fn effective(&self, taking: &Taking, shard: ShardId, motions: &[Motion]) -> Vec<Slot> {
        if self.is_parked(shard) {
            return self.nobody();
        }
        let row: Vec<Slot> = self.map.owner_slots(shard).collect();
        let goal: Vec<Slot> = row
            .iter()
            .zip(0_u8..)
            .map(|(&owner, replica)| match moving(motions, replica) {
                Some(motion) => match Slot::from(motion.other) {
                    to if to == owner && !taking.active => Slot::NOBODY,
                    to if to != owner && taking.takes(to) => to,
                    _ => owner,
                },
                None => owner,
            })
            .collect();
        let twice =
            |(place, slot): (usize, &Slot)| *slot != Slot::NOBODY && goal[..place].contains(slot);
        if goal.iter().enumerate().any(twice) { row } else { goal }
    }

    /// Leaves each place where it is that can't become what is planned.
    fn reachable(&self, ground: &Ground, mut target: Vec<u16>) -> Vec<u16> {
        let replicas = usize::from(self.map.header().replicas.get());
        let current = self.map.raw_owners();
        for (row, goal) in current.chunks_exact(replicas).zip(target.chunks_exact_mut(replicas)) {
            if row == goal {
                continue;
            }
            let bad = (0..replicas).any(|place| {
                let to = Slot::new(goal[place]);
                to != Slot::NOBODY && !ground.taking.takes(to) && !row.contains(&goal[place])
            });
            if bad {
                goal.copy_from_slice(row);
                continue;
            }
            for place in 0..replicas {
                // A place is not given up for an empty one while its owner may still run.
                if goal[place] == Slot::NOBODY.get()
                    && self.map.node(Slot::new(row[place])).is_some_and(|node| ground.hosts(node))
                    && !goal.contains(&row[place])
                {
                    goal[place] = row[place];
                }
            }
        }
        target
    }

    /// If no node accepts shards, the shards of nodes that host nothing become unassigned; those of the last
    /// leaving node become so once it has stopped them.
    fn homes(&self, ground: &Ground) -> Vec<u16> {
        let keeps: Vec<bool> = ground
            .edit
            .map()
            .nodes()
            .iter()
            .zip(&ground.leaves)
            .map(|(node, leaves)| !leaves && node.as_ref().is_some_and(|node| ground.hosts(node)))
            .collect();
        let keep = |slot: u16| keeps.get(usize::from(slot)).copied().unwrap_or(false);
        let owners = self.map.raw_owners().iter();
        owners.map(|&slot| if keep(slot) { slot } else { Slot::NOBODY.get() }).collect()
    }

    /// Brings every shard as near to its target as it can get now.
    fn go(
        &self,
        ground: Ground,
        target: &[u16],
        motions_max: usize,
        reason: Option<&str>,
    ) -> Result<(Option<Next>, bool), Failed> {
        let replicas = usize::from(self.map.header().replicas.get());
        let moves = self.moves();
        let slots = |row: &[u16]| row.iter().map(|&slot| Slot::new(slot)).collect::<Vec<_>>();
        let none: Vec<Motion> = Vec::new();
        let mut changes = Changes { owners: self.map.raw_owners().to_vec(), ..Changes::default() };
        let mut later = Vec::new();
        let mut in_motion = 0;
        let rows = self.map.raw_owners().chunks_exact(replicas).zip(target.chunks_exact(replicas));
        for (shard, (row, goal)) in (0..).map(ShardId::new).zip(rows) {
            let motions = self.map.motions().get(&shard);
            if row == goal && motions.is_none() {
                continue;
            }
            let (row, goal) = (slots(row), slots(goal));
            let begin = motions.is_some();
            let motions = motions.unwrap_or(&none);
            let next = moves.resolve(&Trip { shard, row: &row, motions, target: &goal, begin });
            in_motion += usize::from(!next.motions.is_empty());
            if next.deferred {
                later.push((!self.is_evacuated(&ground, &row), shard, row, goal));
            } else {
                changes.take(shard, &row, motions, next);
            }
        }
        // Those that have to go somewhere else come before those that only stand better there.
        later.sort_by_key(|(optional, shard, ..)| (*optional, *shard));
        let room = motions_max.saturating_sub(in_motion);
        let more = later.len() > room;
        for (at, (_, shard, row, goal)) in later.into_iter().enumerate() {
            let trip = Trip { shard, row: &row, motions: &none, target: &goal, begin: at < room };
            let next = moves.resolve(&trip);
            changes.take(shard, &row, &none, next);
        }
        Ok((self.write(ground, changes, Open { more, planned: true, reason })?, more))
    }

    fn write(
        &self,
        mut ground: Ground,
        mut changes: Changes,
        open: Open<'_>,
    ) -> Result<Option<Next>, Failed> {
        ground.edit.set_raw_owners(std::mem::take(&mut changes.owners))?;
        for (shard, motions) in std::mem::take(&mut changes.motions) {
            ground.edit.set_motions(shard, motions)?;
        }
        unlist(&mut ground.edit, &ground.hosts);
        self.finish(ground, &changes, &open)
    }

    /// Whether a shard has an owner that is to keep nothing.
    fn is_evacuated(&self, ground: &Ground, row: &[Slot]) -> bool {
        row.iter().any(|slot| *slot != Slot::NOBODY && !ground.taking.takes(*slot))
    }

    /// The next version, checked; none if it says what the current one says.
    fn finish(
        &self,
        ground: Ground,
        changes: &Changes,
        open: &Open<'_>,
    ) -> Result<Option<Next>, Failed> {
        let Ground { mut edit, hosts, .. } = ground;
        let before = TableNote::read(self.map.annex());
        let rebalance = self.progress(&edit, before.rebalance.clone(), changes, open);
        let note = TableNote::new(self.handoff, rebalance);
        let plain = self.map.version() == Version::ZERO && note.rebalance.is_none();
        if note != before && !plain {
            edit.set_annex(note.write()?)?;
        }
        let Some(next) = edit.finish(self.fence.clone()) else { return Ok(None) };
        let moves = self.moves();
        let slot = |node: &NodeEntry| {
            let slot = self.map.slot_of(&node.id)?;
            self.map.node(slot).filter(|entry| entry.incarnation == node.incarnation)?;
            Some(slot)
        };
        let stopped = |node: &NodeEntry, shard: ShardId, since: Version| {
            slot(node).is_some_and(|slot| moves.stopped(slot, shard, since))
        };
        let started = |node: &NodeEntry, shard: ShardId, since: Version| {
            slot(node).is_some_and(|slot| moves.started(slot, shard, since))
        };
        let parked = |shard| self.is_parked(shard);
        let evidence = Evidence::new(self.handoff, &stopped, &started).with_parked(&parked);
        check(self.map, &next, &hosts, self.fence, &evidence).map_err(Failed::Violation)?;
        Ok(Some(Next { map: Arc::new(next), begun: changes.begun, more: open.more }))
    }

    /// How far the rebalance is that the next version belongs to.
    fn progress(
        &self,
        edit: &MapEdit,
        before: Option<Rebalance>,
        changes: &Changes,
        open: &Open<'_>,
    ) -> Option<Rebalance> {
        let next = edit.map();
        let done = next.motions().is_empty() && open.planned && !open.more;
        let changed =
            next.raw_owners() != self.map.raw_owners() || next.motions() != self.map.motions();
        match (before, open.reason) {
            (Some(old), _) if !old.done => {
                Some(Rebalance { moved: old.moved + changes.moved, done, ..old })
            }
            (_, Some(reason)) if changed => Some(Rebalance {
                reason: brief(reason),
                since: self.map.version().next(),
                moved: changes.moved,
                done,
            }),
            (before, _) => before,
        }
    }
}

/// What is left to be done after a version, as far as is known.
struct Open<'a> {
    /// Moves have still to begin.
    more: bool,
    /// A plan has seen how things stand.
    planned: bool,
    /// Why shards are placed anew, where a plan places them.
    reason: Option<&'a str>,
}

/// What becomes of the shards that change.
#[derive(Debug, Default)]
struct Changes {
    owners: Vec<u16>,
    motions: Vec<(ShardId, Vec<Motion>)>,
    /// Primaries that went from one node to another.
    moved: u32,
    /// Those, and the ones whose move began.
    begun: u32,
}

impl Changes {
    fn take(&mut self, shard: ShardId, row: &[Slot], motions: &[Motion], next: Resolved) {
        if let (Some(&old), Some(&new)) = (row.first(), next.row.first()) {
            let went = old != new && old != Slot::NOBODY && new != Slot::NOBODY;
            let begins = moving(&next.motions, 0).is_some();
            let began = moving(motions, 0).is_some();
            self.moved += u32::from(went);
            self.begun += u32::from((went || begins) && !began);
        }
        write_row(&mut self.owners, shard, &next.row);
        if next.motions != motions {
            self.motions.push((shard, next.motions));
        }
    }
}

fn write_row(owners: &mut [u16], shard: ShardId, row: &[Slot]) {
    let from = shard.index() * row.len();
    for (place, slot) in owners[from..].iter_mut().zip(row) {
        *place = slot.get();
    }
}

/// Drops nodes that host nothing and own nothing.
fn unlist(edit: &mut MapEdit, hosts: &Hosts) {
    let listed = edit.map().nodes().iter().flatten();
    let gone: Vec<NodeId> = listed
        .filter(|node| !hosts.contains_key(&(node.id.clone(), node.incarnation)))
        .map(|node| node.id.clone())
        .collect();
    for node in gone {
        // Refused while a shard names it, which the invariant check then reports.
        let _ = edit.remove_node(&node);
    }
}
