//! Highest random weight.

use xxhash_rust::xxh3::xxh3_64;

use crate::assignment::Assignment;
use crate::candidate::Candidate;
use crate::error::PlanError;
use crate::hashed::{self, Strictness};
use crate::input::{Input, mix};
use crate::plan::Plan;
use crate::settings::PlanSettings;
use crate::strategy::PlacementStrategy;

/// Each shard belongs to the nodes with the highest scores for it (Thaler, Ravishankar 1998, "Using
/// name-based mappings to increase hit rates"), where a score is weight / -ln(hash): so a node is first
/// with a probability that is its share of the weights. A node that leaves gives away only what it had.
/// Loads are even only roughly, and planning takes shards × nodes steps.
///
/// The logarithm is computed in integers, because the platform's differs from machine to machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rendezvous {}

impl Rendezvous {
    /// The strategy; there is nothing to set.
    #[must_use]
    pub const fn new() -> Self {
        Self {}
    }
}

impl PlacementStrategy for Rendezvous {
    fn name(&self) -> &'static str {
        "rendezvous"
    }

    fn plan(
        &self,
        current: &Assignment,
        candidates: &[Candidate],
        settings: &PlanSettings,
    ) -> Result<Plan, PlanError> {
        let input = Input::new(current, candidates, settings)?;
        let nodes: Vec<Node> = (0_u16..)
            .zip(&input.live)
            .filter(|(_, node)| node.takes_new)
            .filter_map(|(rank, node)| {
                let seed = xxh3_64(input.id(node.slot)?.as_str().as_bytes());
                Some(Node { rank, seed, weight: node.weight })
            })
            .collect();
        let equal = nodes.windows(2).all(|pair| pair[0].weight == pair[1].weight);
        let mut costs = vec![0; nodes.len()];
        Ok(hashed::plan(input, None, |choice| {
            let shard = mix(choice.shard() as u64);
            for (node, cost) in nodes.iter().zip(&mut costs) {
                let hash = mix(node.seed ^ shard);
                // With equal weights the order of the logarithms is the order of the hashes.
                *cost = if equal { !hash } else { minus_log2(hash) };
            }
            for strictness in Strictness::ALL {
                while !choice.is_settled() {
                    let Some(best) =
                        lowest(&nodes, &costs, equal, |rank| choice.allows(rank, strictness))
                    else {
                        break;
                    };
                    choice.offer(best, strictness);
                }
            }
        }))
    }
}

#[derive(Clone, Copy, Debug)]
struct Node {
    rank: u16,
    seed: u64,
    weight: u64,
}

/// The node of the lowest cost per weight among those allowed; of equal ones the first.
fn lowest(
    nodes: &[Node],
    costs: &[u64],
    equal: bool,
    allowed: impl Fn(u16) -> bool,
) -> Option<u16> {
    let mut best: Option<(u16, u64, u64)> = None;
    for (node, &cost) in nodes.iter().zip(costs) {
        let better = match best {
            None => true,
            Some((_, lowest, _)) if equal => cost < lowest,
            Some((_, lowest, weight)) => {
                u128::from(cost) * u128::from(weight) < u128::from(lowest) * u128::from(node.weight)
            }
        };
        if better && allowed(node.rank) {
            best = Some((node.rank, cost, node.weight));
        }
    }
    best.map(|(rank, _, _)| rank)
}

/// Bits after the point of a logarithm.
const LOG_BITS: u32 = 48;
/// Steps of the table between two powers of two, as a power of two.
const TABLE_BITS: u32 = 10;

/// log2(1 + n / 2^10) for n from 0 to 2^10, in units of 2^-48.
static LOG_TABLE: [u64; (1 << TABLE_BITS) + 1] = log_table();

/// -log2(hash / 2^64) in units of 2^-48, at least 1: a table with linear interpolation, exact to 2^-22.
fn minus_log2(hash: u64) -> u64 {
    let hash = hash | 1;
    let zeros = hash.leading_zeros();
    // The bits after the leading one, moved to the top.
    let fraction = (hash << zeros) << 1;
    let index = usize::try_from(fraction >> (u64::BITS - TABLE_BITS)).unwrap_or(0);
    let rest = u128::from(fraction << TABLE_BITS);
    let (low, high) = (LOG_TABLE[index], LOG_TABLE[index + 1]);
    let between = u64::try_from((u128::from(high - low) * rest) >> u64::BITS).unwrap_or(0);
    let log = (u64::from(u64::BITS - 1 - zeros) << LOG_BITS) + low + between;
    ((u64::from(u64::BITS) << LOG_BITS) - log).max(1)
}

/// Bit by bit: squaring doubles a logarithm, and its whole part then is the next bit.
const fn log_table() -> [u64; (1 << TABLE_BITS) + 1] {
    let mut table = [0; (1 << TABLE_BITS) + 1];
    let mut n = 0;
    while n < 1 << TABLE_BITS {
        // 1 + n / 2^10 with 63 bits after the point.
        let mut value: u64 = (1 << 63) + ((n as u64) << (63 - TABLE_BITS));
        let mut log = 0;
        let mut bit = 0;
        while bit < LOG_BITS {
            let square = (value as u128 * value as u128) >> 63;
            log <<= 1;
            if square >> 64 != 0 {
                log |= 1;
                value = low_bits(square >> 1);
            } else {
                value = low_bits(square);
            }
            bit += 1;
        }
        table[n] = log;
        n += 1;
    }
    table[1 << TABLE_BITS] = 1 << LOG_BITS;
    table
}

#[expect(clippy::cast_possible_truncation, reason = "the caller's value is below 2^64")]
const fn low_bits(value: u128) -> u64 {
    value as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logarithm_is_right_and_falls() {
        let mut last = u64::MAX;
        for step in 1..=4096_u64 {
            let hash = step << 52;
            let hash = if hash == 0 { u64::MAX } else { hash };
            let ours = minus_log2(hash);
            let exact = 64.0 - (hash as f64).log2();
            let ours_float = ours as f64 / (1_u64 << LOG_BITS) as f64;
            assert!((ours_float - exact).abs() < 3e-7, "{hash}: {ours_float} is not {exact}");
            assert!(ours < last);
            last = ours;
        }
        assert_eq!(minus_log2(0), minus_log2(1));
        assert_eq!(minus_log2(1) >> LOG_BITS, 64);
        assert_eq!(minus_log2(u64::MAX), 1);
        assert_eq!(minus_log2(1 << 63), 1 << LOG_BITS);
    }
}
