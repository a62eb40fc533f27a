//! A plan's input, checked and in an order that does not depend on how the caller listed it.

use std::collections::BTreeMap;

use coord_core::{Label, NODES_MAX, NodeId};

use crate::assignment::Assignment;
use crate::candidate::{Accepts, Candidate, WEIGHT_MAX};
use crate::error::PlanError;
use crate::settings::PlanSettings;

pub(crate) const NOBODY: u16 = u16::MAX;

/// A candidate. Its rank is its index in [`Input::live`], the order of the node ids.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Live {
    pub(crate) slot: u16,
    /// Index of its zone, in the order of the zones' names.
    pub(crate) zone: u16,
    pub(crate) weight: u64,
    pub(crate) max_shards: u32,
    pub(crate) takes_new: bool,
}

#[derive(Debug)]
pub(crate) struct Input<'a> {
    pub(crate) current: &'a Assignment,
    pub(crate) settings: &'a PlanSettings,
    /// The next node table: the current one, with the new candidates in free slots.
    pub(crate) nodes: Vec<Option<NodeId>>,
    /// The candidates, by node id.
    pub(crate) live: Vec<Live>,
    /// The rank of each slot's node, `NOBODY` if it is not alive; one more entry for empty places.
    pub(crate) rank_of: Vec<u16>,
    /// How many zones have a candidate.
    pub(crate) zones: usize,
}

impl<'a> Input<'a> {
    pub(crate) fn new(
        current: &'a Assignment,
        candidates: &[Candidate],
        settings: &'a PlanSettings,
    ) -> Result<Self, PlanError> {
        let sorted = checked(candidates)?;
        if settings.tolerance > 1000 {
            return Err(PlanError::BadTolerance(settings.tolerance));
        }
        let (nodes, slots) = slots(current, &sorted)?;
        let zone_of = zones(&sorted);
        let mut rank_of = vec![NOBODY; nodes.len() + 1];
        let mut live = Vec::with_capacity(sorted.len());
        for ((rank, candidate), slot) in (0..NOBODY).zip(&sorted).zip(slots) {
            rank_of[usize::from(slot)] = rank;
            live.push(Live {
                slot,
                zone: zone_of[&candidate.zone.as_ref()],
                weight: candidate.weight,
                max_shards: candidate.max_shards.unwrap_or(u32::MAX),
                takes_new: candidate.accepts == Accepts::New,
            });
        }
        Ok(Self { current, settings, nodes, live, rank_of, zones: zone_of.len() })
    }

    /// How many places each slot of the next node table fills; the last entry counts the empty ones.
    pub(crate) fn counts(&self) -> Vec<u32> {
        let mut counts = self.current.slot_counts().to_vec();
        let empty = counts.pop().unwrap_or(0);
        counts.resize(self.nodes.len(), 0);
        counts.push(empty);
        counts
    }

    pub(crate) fn rank(&self, slot: u16) -> Option<usize> {
        match self.rank_of[usize::from(slot).min(self.nodes.len())] {
            NOBODY => None,
            rank => Some(usize::from(rank)),
        }
    }

    pub(crate) fn id(&self, slot: u16) -> Option<&NodeId> {
        self.nodes.get(usize::from(slot))?.as_ref()
    }

    /// The shard at which evictions begin.
    pub(crate) fn first_shard(&self) -> usize {
        let shards = self.current.shards().get();
        let hash = mix(self.settings.version.get());
        usize::try_from((u128::from(hash) * u128::from(shards)) >> 64).unwrap_or(0)
    }
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
/// generators").
pub(crate) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The candidates by id, each one fit to plan with.
fn checked(candidates: &[Candidate]) -> Result<Vec<&Candidate>, PlanError> {
    if candidates.is_empty() {
        return Err(PlanError::NoNodes);
    }
    if candidates.len() > NODES_MAX {
        return Err(PlanError::TooManyNodes { nodes: candidates.len() });
    }
    let mut sorted: Vec<&Candidate> = candidates.iter().collect();
    sorted.sort_by(|a, b| a.id.cmp(&b.id));
    if let Some(twice) = sorted.windows(2).find(|pair| pair[0].id == pair[1].id) {
        return Err(PlanError::DuplicateNode(twice[0].id.clone()));
    }
    if let Some(odd) = sorted.iter().find(|c| !(1..=WEIGHT_MAX).contains(&c.weight)) {
        return Err(PlanError::BadWeight { node: odd.id.clone(), weight: odd.weight });
    }
    if sorted.iter().all(|candidate| candidate.accepts == Accepts::KeepOnly) {
        return Err(PlanError::AllDraining { nodes: sorted.len() });
    }
    Ok(sorted)
}

/// The next node table, and the slot of each candidate in it.
fn slots(
    current: &Assignment,
    sorted: &[&Candidate],
) -> Result<(Vec<Option<NodeId>>, Vec<u16>), PlanError> {
    let mut nodes = current.nodes().to_vec();
    let mut named: Vec<(&NodeId, u16)> = (0..NOBODY)
        .zip(current.nodes())
        .filter_map(|(slot, node)| Some((node.as_ref()?, slot)))
        .collect();
    named.sort_by(|a, b| a.0.cmp(b.0));
    let mut named = named.into_iter().peekable();
    let mut free =
        (0..NOBODY).filter(|&s| !matches!(current.nodes().get(usize::from(s)), Some(Some(_))));
    let mut slots = Vec::with_capacity(sorted.len());
    for candidate in sorted {
        while named.next_if(|(id, _)| **id < candidate.id).is_some() {}
        if let Some((_, slot)) = named.next_if(|(id, _)| **id == candidate.id) {
            slots.push(slot);
            continue;
        }
        let full = PlanError::TooManyNodes { nodes: NODES_MAX + 1 };
        let slot = free.next().filter(|&slot| usize::from(slot) < NODES_MAX).ok_or(full)?;
        if nodes.len() <= usize::from(slot) {
            nodes.resize(usize::from(slot) + 1, None);
        }
        nodes[usize::from(slot)] = Some(candidate.id.clone());
        slots.push(slot);
    }
    Ok((nodes, slots))
}

/// The zones that have a candidate, numbered by name; no zone counts as one.
fn zones<'a>(sorted: &[&'a Candidate]) -> BTreeMap<Option<&'a Label>, u16> {
    let mut zones: BTreeMap<Option<&Label>, u16> =
        sorted.iter().map(|candidate| (candidate.zone.as_ref(), 0)).collect();
    for (number, zone) in (0..).zip(zones.values_mut()) {
        *zone = number;
    }
    zones
}
