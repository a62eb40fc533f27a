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
                (crowded, load.saturating_sub(goal), u64::MAX - goal.saturating_sub(load), rank)
            });
            let Some((rank, _)) = best else { break };
            board.add(shard, rank);
        }
    }
}
