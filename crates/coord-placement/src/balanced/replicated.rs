//! Replicas, zones, pins and exclusions: the greedy step, then the exact pass where it can gain.

use crate::input::{Input, NOBODY};
use crate::plan::{Plan, Unsatisfied};
use crate::rules::Rules;
use crate::write::{Draft, write};

use super::board::Board;
use super::{exact, greedy};

pub(super) fn plan(input: Input<'_>) -> Plan {
    let accepting = input.live.iter().filter(|node| node.takes_new).count();
    let owners = usize::from(input.current.replicas().get()).min(accepting);
    let (rules, mut problems) = Rules::new(&input, owners);
    let mut board = Board::new(&input, &rules, owners);
    greedy::run(&mut board);
    let touched = board.take_touched();
    let moves: usize = touched.iter().map(|&shard| board.arrivals(shard as usize)).sum();
    let complete = touched.iter().all(|&shard| board.missing(shard as usize) == 0);
    let even = is_even(&board);
    let mut optimal = complete && even && moves as u64 == board.lower_bound;
    if !optimal {
        optimal = exact::run(&mut board);
        force(&mut board);
        // Where not everything can be had, the map changes only if that makes it better: so plans come
        // to rest.
        if !optimal && violations(&board, &board.next) >= violations(&board, &board.old) {
            board.reset();
        }
        let uneven = uneven(&board);
        if uneven > 0 {
            problems.push(Unsatisfied::Uneven { nodes: uneven });
        }
    }
    let touched = board.take_touched();
    let draft = Draft {
        owners,
        zone_limits: std::mem::take(&mut board.zone_limits),
        next: std::mem::take(&mut board.next),
        touched,
        lower_bound: board.lower_bound,
        optimal,
        problems,
    };
    drop(board);
    write(input, &rules, draft)
}

fn is_even(board: &Board<'_>) -> bool {
    uneven(board) == 0
}

fn uneven(board: &Board<'_>) -> usize {
    let outside = board
        .loads
        .iter()
        .zip(&board.quotas)
        .filter(|(load, quota)| !(quota.low..=quota.high).contains(load));
    outside.count()
}

/// What is wrong with a map, the worst first: empty places, pins that are not followed, owners above the
/// zones' limits, and places by which loads are outside their quotas.
fn violations(board: &Board<'_>, map: &[u16]) -> (usize, usize, usize, u64) {
    let (mut missing, mut unpinned, mut crowded) = (0, 0, 0);
    let mut loads = vec![0_u64; board.loads.len()];
    for (shard, places) in map.chunks_exact(board.replicas).enumerate() {
        let members = || places.iter().copied().filter(|&rank| rank != NOBODY);
        missing += board.owners.saturating_sub(members().count());
        let pins = board.rules.pins(shard).iter();
        unpinned += pins.filter(|pin| !places.contains(pin)).count();
        for (at, rank) in members().enumerate() {
            loads[usize::from(rank)] += 1;
            let zone = board.zone(rank);
            let before = members().take(at).filter(|&other| board.zone(other) == zone).count();
            crowded += usize::from(before >= usize::from(board.zone_limits[zone]));
        }
    }
    let outside = loads
        .iter()
        .zip(&board.quotas)
        .map(|(&load, quota)| load.saturating_sub(quota.high) + quota.low.saturating_sub(load));
    (missing, unpinned, crowded, outside.sum())
}

/// Fills what could not be filled within the quotas: by a node that has room, in a zone that has room if
/// there is one, else in any.
fn force(board: &mut Board<'_>) {
    for shard in board.take_touched() {
        let shard = shard as usize;
        for _ in 0..board.missing(shard) {
            let ranks = (0..NOBODY).zip(&board.input.live);
            let able = ranks.filter(|&(rank, node)| {
                node.takes_new
                    && board.may_join(shard, rank)
                    && board.loads[usize::from(rank)] < u64::from(node.max_shards)
            });
            let best = able.min_by_key(|&(rank, _)| {
                let (load, goal) =
                    (board.loads[usize::from(rank)], board.quotas[usize::from(rank)].goal);
                let crowded = !board.zone_has_room(shard, board.zone(rank));
                let stays = board.had(shard, rank);
                (
                    crowded,
                    !stays,
                    load.saturating_sub(goal),
                    u64::MAX - goal.saturating_sub(load),
                    rank,
                )
            });
            let Some((rank, _)) = best else { break };
            board.add(shard, rank);
        }
    }
}
