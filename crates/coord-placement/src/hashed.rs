//! What the strategies that hash have in common: everybody's place follows from names alone, so the
//! current map decides only what counts as a move.

use crate::input::{Input, Live, NOBODY};
use crate::plan::Plan;
use crate::quota::zone_limits;
use crate::rules::Rules;
use crate::write::{Draft, write};

/// The owners chosen so far, and who may still be chosen.
#[derive(Debug)]
pub(crate) struct Choice<'a> {
    input: &'a Input<'a>,
    rules: &'a Rules,
    zone_limits: &'a [u8],
    loads: Vec<u64>,
    /// How many places each rank may fill unless nobody else is left.
    bounds: Option<Vec<u64>>,
    shard: usize,
    owners: Vec<u16>,
    wanted: usize,
    /// How many nodes accept shards and have room.
    open: usize,
}

/// How strictly a node is judged; each is tried when the one before leaves places empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Strictness {
    /// Zones and bounds hold.
    Full,
    /// Zones hold.
    Zones,
    /// Only what makes a map valid.
    Valid,
}

impl Strictness {
    pub(crate) const ALL: [Self; 3] = [Self::Full, Self::Zones, Self::Valid];
}

impl Choice<'_> {
    /// The shard whose owners are chosen.
    pub(crate) fn shard(&self) -> usize {
        self.shard
    }

    /// Whether all owners are chosen, or nobody has room.
    pub(crate) fn is_settled(&self) -> bool {
        self.owners.len() >= self.wanted || self.open == 0
    }

    /// Takes a node as the next owner if it may be one.
    pub(crate) fn offer(&mut self, rank: u16, strictness: Strictness) {
        if !self.is_settled() && self.allows(rank, strictness) {
            self.owners.push(rank);
        }
    }

    pub(crate) fn allows(&self, rank: u16, strictness: Strictness) -> bool {
        let n = usize::from(rank);
        let node = &self.input.live[n];
        let full = self.loads[n] >= u64::from(node.max_shards)
            || strictness == Strictness::Full
                && self.bounds.as_ref().is_some_and(|bounds| self.loads[n] >= bounds[n]);
        if full || self.owners.contains(&rank) {
            return false;
        }
        if !self.rules.is_empty() && self.rules.excludes(self.shard, rank) {
            return false;
        }
        let same = |&&other: &&u16| self.input.live[usize::from(other)].zone == node.zone;
        strictness == Strictness::Valid
            || self.owners.is_empty()
            || self.owners.iter().filter(same).count()
                < usize::from(self.zone_limits[usize::from(node.zone)])
    }
}

/// Plans with the owners that `choose` offers for each shard, of the nodes that accept new shards.
pub(crate) fn plan(
    input: Input<'_>,
    bounds: Option<Vec<u64>>,
    mut choose: impl FnMut(&mut Choice<'_>),
) -> Plan {
    let mut zone_sizes = vec![0; input.zones];
    for node in input.live.iter().filter(|node| node.takes_new) {
        zone_sizes[usize::from(node.zone)] += 1;
    }
    let replicas = usize::from(input.current.replicas().get());
    let wanted = replicas.min(zone_sizes.iter().sum());
    let (rules, problems) = Rules::new(&input, wanted);
    let zone_limits = zone_limits(&zone_sizes, wanted);
    let mut choice = Choice {
        input: &input,
        rules: &rules,
        zone_limits: &zone_limits,
        loads: rules.pinned.clone(),
        bounds,
        shard: 0,
        owners: Vec::with_capacity(replicas),
        wanted,
        open: 0,
    };
    let room = |(node, &load): (&Live, &u64)| node.takes_new && load < u64::from(node.max_shards);
    choice.open = input.live.iter().zip(&choice.loads).filter(|&pair| room(pair)).count();
    let mut next = vec![NOBODY; input.current.raw_owners().len()];
    let (mut touched, mut holes) = (Vec::new(), 0);
    for (shard, now) in input.current.raw_owners().chunks_exact(replicas).enumerate() {
        choice.shard = shard;
        choice.owners.clear();
        choice.owners.extend(rules.pins(shard));
        choose(&mut choice);
        for &rank in &choice.owners[rules.pins(shard).len()..] {
            let load = &mut choice.loads[usize::from(rank)];
            *load += 1;
            let full = *load == u64::from(input.live[usize::from(rank)].max_shards);
            choice.open -= usize::from(full);
        }
        let places = &mut next[shard * replicas..][..replicas];
        places[..choice.owners.len()].copy_from_slice(&choice.owners);
        let had = |&&rank: &&u16| now.iter().any(|&slot| input.rank(slot) == Some(rank.into()));
        let stay = choice.owners.iter().filter(had).count();
        if stay < wanted || choice.owners.len() < replicas {
            touched.push(u32::try_from(shard).unwrap_or(u32::MAX));
        }
        holes += now.iter().filter(|&&slot| input.rank(slot).is_none()).count();
    }
    drop(choice);
    // Only what has no live owner must move, whatever the strategy.
    let lower_bound = holes.saturating_sub((replicas - wanted) * next.len() / replicas) as u64;
    let draft =
        Draft { owners: wanted, zone_limits, next, touched, lower_bound, optimal: false, problems };
    let mut plan = write(input, &rules, draft);
    plan.optimal = plan.unsatisfied.is_empty() && plan.moves.len() as u64 == plan.lower_bound;
    plan
}
