//! The map while it is being planned.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::input::{Input, NOBODY, mix};
use crate::loads::ShardLoads;
use crate::plan::{Plan, Reason, Unsatisfied};
use crate::quota::zone_limits;
use crate::rules::Rules;
use crate::write::{Draft, write};

/// How often orphans, drain and zones are looked at again after balance made room.
const ROUNDS_MAX: usize = 4;

pub(super) fn plan(input: Input<'_>, band: u16, churn: u16) -> Plan {
    let mut zone_sizes = vec![0; input.zones];
    for node in input.live.iter().filter(|node| node.takes_new) {
        zone_sizes[usize::from(node.zone)] += 1;
    }
    let replicas = usize::from(input.current.replicas().get());
    let wanted = replicas.min(zone_sizes.iter().sum());
    let (rules, mut problems) = Rules::new(&input, wanted);
    let loads = input.settings.loads.as_deref();
    if let Some((shards, first)) = loads.and_then(ShardLoads::unusable) {
        problems.push(Unsatisfied::LoadUnusable { shards, first });
    }
    let limits = zone_limits(&zone_sizes, wanted);
    let mut board = Board::new(&input, &rules, limits, wanted);
    let places = input.current.raw_owners().len() as u64;
    let churn = match churn {
        0 => 0,
        churn => (places * u64::from(churn) / 1000).max(1),
    };
    board.run(u128::from(band), churn);
    problems.append(&mut board.left);
    let touched = board.touched();
    let holes = input.current.raw_owners().iter().filter(|&&slot| input.rank(slot).is_none());
    let Board { next, limits, .. } = board;
    let draft = Draft {
        owners: wanted,
        zone_limits: limits,
        next,
        touched,
        lower_bound: holes
            .count()
            .saturating_sub((replicas - wanted) * input.current.shards().get() as usize)
            as u64,
        optimal: false,
        problems,
    };
    let mut plan = write(input, &rules, draft);
    plan.optimal = plan.unsatisfied.is_empty() && plan.moves.len() as u64 == plan.lower_bound;
    plan
}

struct Board<'a> {
    input: &'a Input<'a>,
    rules: &'a Rules,
    limits: Vec<u8>,
    replicas: usize,
    wanted: usize,
    costs: Vec<u64>,
    /// For each place a rank, `NOBODY` where it is empty.
    next: Vec<u16>,
    loads: Vec<u64>,
    counts: Vec<u64>,
    /// The nodes that take shards, the emptiest for its weight first.
    order: BTreeSet<(u128, u16)>,
    /// What each rank holds, the lightest first.
    held: Vec<BTreeSet<(u64, u32)>>,
    left: Vec<Unsatisfied>,
    work: u64,
}

impl<'a> Board<'a> {
    fn new(input: &'a Input<'a>, rules: &'a Rules, limits: Vec<u8>, wanted: usize) -> Self {
        let nodes = input.live.len();
        let shards = input.current.shards();
        let costs = input.settings.loads.as_deref().cloned().unwrap_or_default().costs(shards);
        let mut board = Self {
            input,
            rules,
            limits,
            replicas: usize::from(input.current.replicas().get()),
            wanted,
            costs,
            next: vec![NOBODY; input.current.raw_owners().len()],
            loads: vec![0; nodes],
            counts: vec![0; nodes],
            order: BTreeSet::new(),
            held: vec![BTreeSet::new(); nodes],
            left: Vec::new(),
            work: input.settings.work_limit,
        };
        let ranks = (0_u16..).zip(&input.live).filter(|(_, node)| node.takes_new);
        board.order = ranks.map(|(rank, _)| (0, rank)).collect();
        for (place, &slot) in input.current.raw_owners().iter().enumerate() {
            let shard = place / board.replicas;
            let Some(rank) = input.rank(slot).and_then(|rank| u16::try_from(rank).ok()) else {
                continue;
            };
            if !board.row(shard).contains(&rank) && !rules.excludes(shard, rank) {
                board.set(place, rank);
            }
        }
        board
    }

    fn run(&mut self, band: u128, churn: u64) {
        let mut limited = self.input.settings.max_moves.unwrap_or(u64::MAX);
        let mut churn = churn;
        self.pin();
        for _ in 0..ROUNDS_MAX {
            self.left.retain(|one| !matches!(one, Unsatisfied::MovesLeft { .. }));
            self.fill();
            let drained = self.drain(limited);
            limited -= drained;
            let repaired = self.repair_zones(limited);
            limited -= repaired;
            let moved = self.balance(band, churn.min(limited));
            limited -= moved;
            churn -= moved;
            // Each of them may have made room for what the ones before could not do.
            if drained + repaired + moved == 0 || !self.left.is_empty() {
                break;
            }
        }
        let outside = self.outside(band).count();
        if outside > 0 && self.left.is_empty() {
            self.left.push(Unsatisfied::Uneven { nodes: outside });
        }
    }

    fn row(&self, shard: usize) -> &[u16] {
        &self.next[shard * self.replicas..(shard + 1) * self.replicas]
    }

    fn members(&self, shard: usize) -> usize {
        self.row(shard).iter().filter(|&&rank| rank != NOBODY).count()
    }

    fn key(&self, rank: u16) -> (u128, u16) {
        let n = usize::from(rank);
        ((u128::from(self.loads[n]) << 44) / u128::from(self.input.live[n].weight), rank)
    }

    /// Gives a place to a rank, or takes it from everybody.
    fn set(&mut self, place: usize, rank: u16) {
        let shard = place / self.replicas;
        let cost = self.costs[shard];
        let entry = (cost, u32::try_from(shard).unwrap_or(u32::MAX));
        let old = std::mem::replace(&mut self.next[place], rank);
        for (rank, joins) in [(old, false), (rank, true)] {
            let n = usize::from(rank);
            let Some(node) = self.input.live.get(n) else { continue };
            let key = self.key(rank);
            self.order.remove(&key);
            if joins {
                self.loads[n] += cost;
                self.counts[n] += 1;
                self.held[n].insert(entry);
            } else {
                self.loads[n] -= cost;
                self.counts[n] -= 1;
                self.held[n].remove(&entry);
            }
            if node.takes_new {
                self.order.insert(self.key(rank));
            }
        }
    }

    /// Whether a node may take a shard that `leaving` leaves.
    fn allows(&mut self, shard: usize, rank: u16, leaving: u16, zones: bool) -> bool {
        self.work = self.work.saturating_sub(1);
        let node = &self.input.live[usize::from(rank)];
        if self.row(shard).contains(&rank)
            || self.counts[usize::from(rank)] >= u64::from(node.max_shards)
            || self.rules.excludes(shard, rank)
        {
            return false;
        }
        let zone = usize::from(node.zone);
        !zones || self.in_zone(shard, zone, leaving) < usize::from(self.limits[zone])
    }

    /// How many owners of a shard are in a zone, without one who leaves.
    fn in_zone(&self, shard: usize, zone: usize, leaving: u16) -> usize {
        let there = |rank: &&u16| {
            **rank != leaving
                && self
                    .input
                    .live
                    .get(usize::from(**rank))
                    .is_some_and(|n| usize::from(n.zone) == zone)
        };
        self.row(shard).iter().filter(there).count()
    }

    /// The emptiest node that may take a shard.
    fn choose(&mut self, shard: usize, leaving: u16, zones: bool) -> Option<u16> {
        let order = std::mem::take(&mut self.order);
        let found = order.iter().find(|(_, rank)| self.allows(shard, *rank, leaving, zones));
        let found = found.map(|(_, rank)| *rank);
        self.order = order;
        found
    }

    /// Puts pinned nodes in, in place of others where there is no room.
    fn pin(&mut self) {
        let shards: Vec<usize> =
            self.input.settings.pins.keys().map(|shard| shard.index()).collect();
        let count = self.costs.len();
        for shard in shards.into_iter().filter(|&shard| shard < count) {
            for rank in self.rules.pins(shard).to_vec() {
                if self.row(shard).contains(&rank) {
                    continue;
                }
                let row = self.row(shard);
                let full = self.members(shard) >= self.wanted;
                let free = row.iter().position(|&rank| rank == NOBODY).filter(|_| !full);
                let other = |rank: &u16| *rank != NOBODY && !self.rules.is_pinned(shard, *rank);
                let at = free.or_else(|| row.iter().rposition(other));
                if let Some(at) = at {
                    self.set(shard * self.replicas + at, rank);
                }
            }
        }
    }

    /// Shards by what they cost, the heaviest first.
    fn heaviest(&self, which: impl Fn(usize) -> bool) -> Vec<usize> {
        let mut shards: Vec<usize> = (0..self.costs.len()).filter(|&shard| which(shard)).collect();
        shards.sort_by_key(|&shard| (Reverse(self.costs[shard]), mix(shard as u64)));
        shards
    }

    fn fill(&mut self) {
        for shard in self.heaviest(|shard| self.members(shard) < self.wanted) {
            while self.members(shard) < self.wanted {
                let found = self.choose(shard, NOBODY, true);
                let Some(rank) = found.or_else(|| self.choose(shard, NOBODY, false)) else { break };
                let Some(at) = self.row(shard).iter().position(|&rank| rank == NOBODY) else {
                    break;
                };
                self.set(shard * self.replicas + at, rank);
            }
        }
    }

    /// Moves what draining nodes hold; how many moves that took.
    fn drain(&mut self, limit: u64) -> u64 {
        let leaves = |board: &Self, rank: u16| {
            board.input.live.get(usize::from(rank)).is_some_and(|node| !node.takes_new)
        };
        if self.input.live.iter().all(|node| node.takes_new) {
            return 0;
        }
        let (mut moved, mut left) = (0, 0);
        for shard in self.heaviest(|shard| self.row(shard).iter().any(|&rank| leaves(self, rank))) {
            for at in 0..self.replicas {
                let rank = self.row(shard)[at];
                if !leaves(self, rank) {
                    continue;
                }
                let found = self.choose(shard, rank, true);
                let Some(to) = found.or_else(|| self.choose(shard, rank, false)) else { continue };
                if moved == limit {
                    left += 1;
                    continue;
                }
                moved += 1;
                self.set(shard * self.replicas + at, to);
            }
        }
        if left > 0 {
            self.left.push(Unsatisfied::MovesLeft { reason: Reason::Drain, moves: left });
        }
        moved
    }

    /// The place of a shard in a zone that holds too many.
    fn crowded(&self, shard: usize) -> Option<usize> {
        let over = |rank: u16| {
            self.input.live.get(usize::from(rank)).is_some_and(|node| {
                let zone = usize::from(node.zone);
                self.in_zone(shard, zone, NOBODY) > usize::from(self.limits[zone])
            })
        };
        let moves = |&rank: &u16| over(rank) && !self.rules.is_pinned(shard, rank);
        Some(shard * self.replicas + self.row(shard).iter().rposition(moves)?)
    }

    fn repair_zones(&mut self, limit: u64) -> u64 {
        if self.replicas == 1 {
            return 0;
        }
        let (mut moved, mut left) = (0, 0);
        for shard in self.heaviest(|shard| self.crowded(shard).is_some()) {
            while let Some(place) = self.crowded(shard) {
                let rank = self.next[place];
                let Some(to) = self.choose(shard, rank, true) else { break };
                if moved == limit {
                    left += 1;
                    break;
                }
                moved += 1;
                self.set(place, to);
            }
        }
        if left > 0 {
            self.left.push(Unsatisfied::MovesLeft { reason: Reason::ZoneRepair, moves: left });
        }
        moved
    }

    /// The nodes outside a band around their share, the fullest first.
    fn outside(&self, band: u128) -> impl DoubleEndedIterator<Item = (u16, bool)> + '_ {
        let ranks = || self.order.iter().map(|(_, rank)| usize::from(*rank));
        let load: u128 = ranks().map(|n| u128::from(self.loads[n])).sum();
        let weight: u128 = ranks().map(|n| u128::from(self.input.live[n].weight)).sum();
        self.order.iter().rev().filter_map(move |&(_, rank)| {
            let n = usize::from(rank);
            let own = u128::from(self.loads[n]) * weight * 1000;
            let share = load * u128::from(self.input.live[n].weight);
            let hot = own > share * (1000 + band);
            (hot || own < share * (1000 - band)).then_some((rank, hot))
        })
    }

    /// Moves shards until all nodes are within half the band, if one is outside of it; how many moves
    /// that took. What is above the limit is counted and not done.
    fn balance(&mut self, band: u128, limit: u64) -> u64 {
        if self.outside(band).next().is_none() {
            return 0;
        }
        let mut moved = 0;
        let mut arrived: BTreeSet<(usize, u16)> = BTreeSet::new();
        let mut kept: Option<Vec<u16>> = None;
        while let Some((shard, from, to)) = self.best_move(band / 2) {
            if !arrived.remove(&(shard, from)) {
                if moved == limit {
                    kept.get_or_insert_with(|| self.next.clone());
                }
                moved += 1;
            }
            arrived.insert((shard, to));
            let Some(at) = self.row(shard).iter().position(|&rank| rank == from) else { break };
            self.set(shard * self.replicas + at, to);
        }
        let Some(kept) = kept else { return moved };
        for (place, rank) in kept.into_iter().enumerate() {
            if self.next[place] != rank {
                self.set(place, rank);
            }
        }
        let moves = moved - limit;
        self.left.push(Unsatisfied::MovesLeft { reason: Reason::Balance, moves });
        limit
    }

    /// From a node that is too full to the emptiest that can take something, or from the fullest that can
    /// give something to a node that is too empty.
    fn best_move(&mut self, band: u128) -> Option<(usize, u16, u16)> {
        let outside: Vec<(u16, bool)> = self.outside(band).collect();
        let order: Vec<u16> = self.order.iter().map(|(_, rank)| *rank).collect();
        for &(from, _) in outside.iter().filter(|(_, hot)| *hot) {
            for &to in order.iter().take_while(|&&to| to != from) {
                if let Some(shard) = self.best_shard(from, to) {
                    return Some((shard, from, to));
                }
            }
        }
        for &(to, _) in outside.iter().rev().filter(|(_, hot)| !*hot) {
            for &from in order.iter().rev().take_while(|&&from| from != to) {
                if let Some(shard) = self.best_shard(from, to) {
                    return Some((shard, from, to));
                }
            }
        }
        None
    }

    /// The shard that brings two nodes closest together, of those that leave both less full than the
    /// fuller one was.
    fn best_shard(&mut self, from: u16, to: u16) -> Option<usize> {
        if self.work == 0 {
            return None;
        }
        let load = |rank: u16| u128::from(self.loads[usize::from(rank)]);
        let weight = |rank: u16| u128::from(self.input.live[usize::from(rank)].weight);
        let gap = (load(from) * weight(to)).checked_sub(load(to) * weight(from))?;
        // Strictly less, so that loads only ever come closer, and plans come to rest.
        let most = u64::try_from(gap.checked_sub(1)? / weight(from)).unwrap_or(u64::MAX);
        let ideal = u64::try_from(gap / (weight(from) + weight(to))).unwrap_or(u64::MAX).min(most);
        let held = std::mem::take(&mut self.held[usize::from(from)]);
        let mut fits = |&&(_, shard): &&(u64, u32)| {
            let shard = shard as usize;
            !self.rules.is_pinned(shard, from) && self.allows(shard, to, from, true)
        };
        let below = held.range(..=(ideal, u32::MAX)).rev().find(&mut fits).copied();
        let above = ideal.checked_add(1).filter(|next| *next <= most);
        let above = above
            .and_then(|next| held.range((next, 0)..=(most, u32::MAX)).find(&mut fits).copied());
        self.held[usize::from(from)] = held;
        let near = |one: &(u64, u32)| (one.0.abs_diff(ideal), one.1);
        let best = [below, above].into_iter().flatten().min_by_key(near)?;
        Some(best.1 as usize)
    }

    /// The shards that differ from the current map, or are not as they should be.
    fn touched(&self) -> Vec<u32> {
        let differs = |shard: &u32| {
            let shard = *shard as usize;
            let range = shard * self.replicas..(shard + 1) * self.replicas;
            let now = self.input.current.raw_owners()[range].iter();
            // A place of somebody who is gone has to be written, whoever follows.
            let now = now.map(|&slot| match self.input.rank(slot) {
                Some(rank) => rank,
                None if slot == NOBODY => usize::from(NOBODY),
                None => usize::MAX,
            });
            let drains = |&rank: &u16| {
                self.input.live.get(usize::from(rank)).is_some_and(|node| !node.takes_new)
            };
            self.members(shard) < self.wanted
                || self.crowded(shard).is_some()
                || self.row(shard).iter().any(drains)
                || now.ne(self.row(shard).iter().map(|&rank| usize::from(rank)))
        };
        (0..self.input.current.shards().get()).filter(differs).collect()
    }
}
