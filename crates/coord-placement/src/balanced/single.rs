//! One owner for each shard: exact shares with the fewest moves, in a few passes over the map.
//!
//! A node that has more than its goal gives away exactly the difference, one that has less gets exactly
//! the difference, and nobody does both. What stays, the sum of min(count, goal), is as much as any map
//! with these goals can leave in place, and the goals themselves need the fewest arrivals of all goals
//! between floor and ceiling ([`quotas`]). So the number of moves is the lower bound
//! max(holes + Σ max(0, count − ceiling), Σ max(0, floor − count)).

use coord_core::{ShardId, Slot};

use crate::input::{Input, NOBODY};
use crate::plan::{Move, Plan, Reason, Unsatisfied};
use crate::quota::{Claimant, Quota, quotas};

/// How many shards are looked at together in the search for lost ones.
const BLOCK: usize = 64;

pub(super) fn plan(input: Input<'_>) -> Plan {
    let counts = input.counts();
    let quotas = goals(&input, &counts);
    let lower_bound = lower_bound(&input, &counts, &quotas);
    let mut work = Work::new(&input, counts, &quotas);
    work.place_holes(&input);
    work.evict(&input, Reason::Drain);
    work.evict(&input, Reason::Balance);
    work.finish(input, lower_bound)
}

fn goals(input: &Input<'_>, counts: &[u32]) -> Vec<Quota> {
    let total = u64::from(input.current.shards().get());
    let claimants: Vec<Claimant> = input
        .live
        .iter()
        .map(|node| {
            let most = if node.takes_new { u64::from(node.max_shards).min(total) } else { 0 };
            let count = u64::from(counts[usize::from(node.slot)]);
            Claimant { weight: node.weight, count, least: 0, most }
        })
        .collect();
    quotas(&claimants, total, input.settings.tolerance)
}

/// How many places must be filled anew in any map within these floors and ceilings.
fn lower_bound(input: &Input<'_>, counts: &[u32], quotas: &[Quota]) -> u64 {
    let (mut kept, mut above, mut below) = (0, 0, 0);
    for (node, quota) in input.live.iter().zip(quotas) {
        let count = u64::from(counts[usize::from(node.slot)]);
        kept += count;
        above += count.saturating_sub(quota.high);
        below += quota.low.saturating_sub(count);
    }
    let holes = u64::from(input.current.shards().get()) - kept;
    below.max(holes + above)
}

struct Work {
    next: Vec<u16>,
    /// How many places each slot fills in `next` when all room is used up; the last entry counts the
    /// empty ones.
    counts: Vec<u32>,
    changed: bool,
    moves: Vec<Move>,
    /// Slots with room, one entry for each place, round-robin over the nodes: so what one node loses
    /// spreads over all others, and is recovered from all in parallel.
    room: std::vec::IntoIter<u16>,
    /// How many places each slot has to give away.
    surplus: Vec<u32>,
    unplaced: Option<(u64, ShardId)>,
    left: Vec<Unsatisfied>,
    limit: u64,
}

impl Work {
    fn new(input: &Input<'_>, mut counts: Vec<u32>, quotas: &[Quota]) -> Self {
        let mut surplus = vec![0; input.nodes.len() + 1];
        let mut open = Vec::with_capacity(quotas.len());
        for (node, quota) in input.live.iter().zip(quotas) {
            let count = &mut counts[usize::from(node.slot)];
            let goal = u32::try_from(quota.goal).unwrap_or(u32::MAX);
            surplus[usize::from(node.slot)] = count.saturating_sub(goal);
            if goal > *count {
                open.push((node.slot, goal - *count));
                *count = goal;
            }
        }
        Self {
            next: input.current.raw_owners().to_vec(),
            counts,
            changed: false,
            moves: Vec::new(),
            room: round_robin(open).into_iter(),
            surplus,
            unplaced: None,
            left: Vec::new(),
            limit: input.settings.max_moves.unwrap_or(u64::MAX),
        }
    }

    /// Gives every shard without a live owner to a node with room.
    fn place_holes(&mut self, input: &Input<'_>) {
        let mut lost = Vec::new();
        let mut holes = 0;
        for (slot, (count, &rank)) in (0..).zip(self.counts.iter_mut().zip(&input.rank_of)) {
            if rank == NOBODY && *count > 0 {
                holes += std::mem::take(count) as usize;
                lost.push(if usize::from(slot) == input.nodes.len() { NOBODY } else { slot });
            }
        }
        if holes == self.next.len() && holes == self.room.len() {
            return self.place_all();
        }
        self.moves.reserve(holes.min(self.room.len()));
        match *lost {
            [] => {}
            [one] => self.place(holes, |slot| slot == one),
            [one, two] => self.place(holes, |slot| slot == one || slot == two),
            _ => self.place(holes, |slot| input.rank(slot).is_none()),
        }
        if let Some((places, _)) = self.unplaced {
            self.counts[input.nodes.len()] = u32::try_from(places).unwrap_or(u32::MAX);
        }
    }

    /// Gives every place of the map to the nodes with room, where that is exactly enough.
    fn place_all(&mut self) {
        let places = self.next.iter_mut().zip(&mut self.room).enumerate();
        self.moves = places
            .map(|(shard, (slot, to))| {
                moved(shard, std::mem::replace(slot, to), to, Reason::Orphan)
            })
            .collect();
        self.changed = true;
    }

    /// Gives so many places, each with a slot that is lost, to nodes with room.
    fn place(&mut self, mut holes: usize, is_lost: impl Fn(u16) -> bool) {
        // A block without a hole is seen to be one by vector instructions.
        for (block, slots) in self.next.chunks_mut(BLOCK).enumerate() {
            if holes == 0 {
                break;
            }
            if !slots.iter().fold(false, |any, &slot| any | is_lost(slot)) {
                continue;
            }
            for (at, slot) in slots.iter_mut().enumerate().filter(|(_, slot)| is_lost(**slot)) {
                holes -= 1;
                let shard = block * BLOCK + at;
                let to = self.room.next().unwrap_or(NOBODY);
                let from = std::mem::replace(slot, to);
                self.changed |= from != to;
                if to == NOBODY {
                    self.unplaced.get_or_insert((0, id(shard))).0 += 1;
                } else {
                    self.moves.push(moved(shard, from, to, Reason::Orphan));
                }
            }
        }
    }

    /// Moves what draining nodes hold, or what nodes have above their goal.
    fn evict(&mut self, input: &Input<'_>, reason: Reason) {
        let mut surplus = vec![0_u32; self.surplus.len()];
        for node in input.live.iter().filter(|n| n.takes_new == (reason == Reason::Balance)) {
            surplus[usize::from(node.slot)] = self.surplus[usize::from(node.slot)];
        }
        let wanted: u64 = surplus.iter().map(|&n| u64::from(n)).sum();
        let possible = wanted.min(self.room.len() as u64);
        let mut allowed = possible.min(self.limit);
        self.limit -= allowed;
        if allowed < possible {
            self.left.push(Unsatisfied::MovesLeft { reason, moves: possible - allowed });
        }
        let first = input.first_shard();
        let (before, after) = (self.moves.len(), self.next.len());
        for shard in (first..after).chain(0..first) {
            if allowed == 0 {
                break;
            }
            let from = self.next[shard];
            // A place of the last entry is empty, and has nothing to give away.
            let slot = usize::from(from).min(input.nodes.len());
            if surplus[slot] == 0 {
                continue;
            }
            let Some(to) = self.room.next() else { break };
            surplus[slot] -= 1;
            self.counts[slot] -= 1;
            allowed -= 1;
            self.next[shard] = to;
            self.moves.push(moved(shard, from, to, reason));
        }
        if self.moves.len() > before {
            self.changed = true;
            self.moves.sort_unstable_by_key(|one| one.shard);
        }
        if reason == Reason::Drain && possible < wanted {
            self.not_drained(input, &surplus);
        }
    }

    fn not_drained(&mut self, input: &Input<'_>, surplus: &[u32]) {
        for node in &input.live {
            let places = u64::from(surplus[usize::from(node.slot)]);
            if let (1.., Some(id)) = (places, &input.nodes[usize::from(node.slot)]) {
                self.left.push(Unsatisfied::NotDrained { node: id.clone(), places });
            }
        }
    }

    fn finish(mut self, input: Input<'_>, lower_bound: u64) -> Plan {
        for slot in self.room {
            self.counts[usize::from(slot)] -= 1;
        }
        let unplaced = self.unplaced.map(|(places, first)| Unsatisfied::Unplaced { places, first });
        Plan {
            optimal: self.moves.len() as u64 == lower_bound,
            next: input.current.with_parts(input.nodes, self.next, self.counts),
            changed: self.changed,
            moves: self.moves,
            unsatisfied: unplaced.into_iter().chain(self.left).collect(),
            lower_bound,
        }
    }
}

/// One entry for each place, taking turns.
fn round_robin(mut open: Vec<(u16, u32)>) -> Vec<u16> {
    let total = open.iter().map(|(_, places)| *places as usize).sum();
    let mut turns = Vec::with_capacity(total);
    // All nodes take part in as many rounds as the one with the fewest places.
    while let Some(rounds) = open.iter().map(|(_, places)| *places).min() {
        let from = turns.len();
        turns.extend(open.iter().map(|(slot, _)| *slot));
        for _ in 1..rounds {
            turns.extend_from_within(from..from + open.len());
        }
        open.retain_mut(|(_, places)| {
            *places -= rounds;
            *places > 0
        });
    }
    turns
}

fn moved(shard: usize, from: u16, to: u16, reason: Reason) -> Move {
    let (from, to) = (Slot::new(from), Slot::new(to));
    Move { shard: id(shard), replica: 0, reason, from, to }
}

fn id(shard: usize) -> ShardId {
    ShardId::new(u32::try_from(shard).unwrap_or(u32::MAX))
}
