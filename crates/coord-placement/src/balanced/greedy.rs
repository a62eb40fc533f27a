//! The sticky step: fills what is empty, then moves from nodes above their goal to nodes below it only
//! what fits there directly. It reaches the lower bound in nearly every plan; the rest is for the exact
//! pass.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::input::{NOBODY, mix};

use super::board::Board;

/// How many shards balancing may look at in vain. Past that the direct moves are used up, and the exact
/// pass does better.
const MISFITS_MAX: usize = 1 << 17;

/// Nodes below their goal, the neediest zone first and in it the neediest node; equals in an order that
/// changes from entry to entry, so that shards don't share the same few nodes.
#[derive(Debug)]
struct Needs {
    zones: BinaryHeap<(u64, u64, Reverse<u16>)>,
    nodes: Vec<BinaryHeap<(u64, u64, Reverse<u16>)>>,
    turn: u64,
}

impl Needs {
    fn new(board: &Board<'_>) -> Self {
        let mut needs = Self { zones: BinaryHeap::new(), nodes: Vec::new(), turn: 0 };
        for (zone, ranks) in (0_u16..).zip(&board.zone_nodes) {
            let open: Vec<(u64, u16)> = ranks
                .iter()
                .map(|&rank| (need(board, rank), rank))
                .filter(|(need, _)| *need > 0)
                .collect();
            let heap = open.iter().map(|&(need, rank)| (need, needs.tie(rank), Reverse(rank)));
            let heap = heap.collect();
            needs.nodes.push(heap);
            let total: u64 = open.iter().map(|(need, _)| need).sum();
            if total > 0 {
                let tie = needs.tie(zone);
                needs.zones.push((total, tie, Reverse(zone)));
            }
        }
        needs
    }

    fn tie(&mut self, of: u16) -> u64 {
        self.turn += 1;
        mix(self.turn << 16 | u64::from(of))
    }

    /// Takes a needy node that may become an owner of the shard, and counts it as served.
    fn take(&mut self, board: &Board<'_>, shard: usize) -> Option<u16> {
        let mut skipped = Vec::new();
        let mut found = None;
        while let Some((need, tie, Reverse(zone))) = self.zones.pop() {
            let open = board.zone_has_room(shard, usize::from(zone));
            found = if open { self.take_in(board, shard, usize::from(zone)) } else { None };
            if found.is_none() {
                skipped.push((need, tie, Reverse(zone)));
                continue;
            }
            if need > 1 {
                let tie = self.tie(zone);
                self.zones.push((need - 1, tie, Reverse(zone)));
            }
            break;
        }
        self.zones.extend(skipped);
        found
    }

    fn take_in(&mut self, board: &Board<'_>, shard: usize, zone: usize) -> Option<u16> {
        let mut skipped = Vec::new();
        let mut found = None;
        while let Some((need, tie, Reverse(rank))) = self.nodes[zone].pop() {
            if !board.may_join(shard, rank) {
                skipped.push((need, tie, Reverse(rank)));
                continue;
            }
            if need > 1 {
                let tie = self.tie(rank);
                self.nodes[zone].push((need - 1, tie, Reverse(rank)));
            }
            found = Some(rank);
            break;
        }
        self.nodes[zone].extend(skipped);
        found
    }
}

fn need(board: &Board<'_>, rank: u16) -> u64 {
    let rank = usize::from(rank);
    board.quotas[rank].goal.saturating_sub(board.loads[rank])
}

/// Runs the step. Places may stay empty and nodes above their goal, where nothing fits directly.
pub(super) fn run(board: &mut Board<'_>) {
    let mut needs = Needs::new(board);
    for shard in board.take_touched() {
        for _ in 0..board.missing(shard as usize) {
            let Some(rank) = needs.take(board, shard as usize) else { break };
            board.add(shard as usize, rank);
        }
    }
    balance(board, &mut needs);
}

fn balance(board: &mut Board<'_>, needs: &mut Needs) {
    let mut surplus: Vec<u64> = board
        .loads
        .iter()
        .zip(&board.quotas)
        .map(|(load, quota)| load.saturating_sub(quota.goal))
        .collect();
    let mut total: u64 = surplus.iter().sum();
    let mut misfits = 0;
    let first = board.input.first_shard();
    for shard in (first..board.shards()).chain(0..first) {
        if total == 0 || misfits > MISFITS_MAX || needs.zones.is_empty() {
            break;
        }
        for place in board.places(shard) {
            let rank = board.next[place];
            let Some(left) = surplus.get_mut(usize::from(rank)).filter(|left| **left > 0) else {
                continue;
            };
            if board.rules.is_pinned(shard, rank) {
                continue;
            }
            board.next[place] = NOBODY;
            let found = needs.take(board, shard);
            board.next[place] = rank;
            let Some(to) = found else {
                misfits += 1;
                continue;
            };
            *left -= 1;
            total -= 1;
            board.remove(shard, rank);
            board.add(shard, to);
        }
    }
}
