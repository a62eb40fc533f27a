//! A hash ring with virtual nodes.

use coord_core::NodeId;
use xxhash_rust::xxh3::xxh3_64;

use crate::assignment::Assignment;
use crate::candidate::{Candidate, WEIGHT_DEFAULT};
use crate::error::PlanError;
use crate::hashed::{self, Strictness};
use crate::input::{Input, mix};
use crate::plan::Plan;
use crate::quota::{Claimant, quotas};
use crate::settings::PlanSettings;
use crate::strategy::PlacementStrategy;

/// How many points on the ring a node of the default weight has, unless set otherwise.
pub const VIRTUAL_NODES_DEFAULT: u16 = 150;
/// The most points of a node of the default weight.
pub const VIRTUAL_NODES_MAX: u16 = 4096;
/// The most points of a whole ring.
const POINTS_MAX: u64 = 1 << 24;
/// The most points of a whole ring, in multiples of what nodes of the default weight would have.
const CROWDING_MAX: u64 = 64;
/// Keeps the hash of a shard apart from those of nodes.
const SHARD_SALT: u64 = 0x7368_6172_6420_6964;

/// Each shard belongs to the nodes whose points come next on a ring (Karger et al. 1997, "Consistent
/// hashing and random trees"). A node's points are as many as its weight says, and follow from its id
/// alone, so a node that leaves gives away only what it had. Loads are even only roughly: with 150
/// points, expect a tenth above the mean with four nodes, and more with more nodes; [`Balanced`] has
/// exact shares with the fewest moves.
///
/// With [bounded load](Self::with_bounded_load) no node gets more than so much above its share; what it
/// can't take goes on to the next (Mirrokni, Thorup, Zadimoghaddam 2018, "Consistent hashing with bounded
/// loads"), which costs more moves the tighter the bound is.
///
/// [`Balanced`]: crate::Balanced
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConsistentHash {
    virtual_nodes: u16,
    bounded_load: Option<u16>,
}

impl Default for ConsistentHash {
    fn default() -> Self {
        Self::new()
    }
}

impl ConsistentHash {
    /// A ring with 150 points for a node of the default weight, without bounded load.
    #[must_use]
    pub const fn new() -> Self {
        Self { virtual_nodes: VIRTUAL_NODES_DEFAULT, bounded_load: None }
    }

    /// With this many points for a node of the default weight, 1 to 4096; what is outside counts as the
    /// nearer end.
    #[must_use]
    pub fn with_virtual_nodes(mut self, points: u16) -> Self {
        self.virtual_nodes = points.clamp(1, VIRTUAL_NODES_MAX);
        self
    }

    /// With at most so many thousandths above its share for each node; above 1000 counts as 1000.
    #[must_use]
    pub fn with_bounded_load(mut self, thousandths: Option<u16>) -> Self {
        self.bounded_load = thousandths.map(|thousandths| thousandths.min(1000));
        self
    }
}

impl PlacementStrategy for ConsistentHash {
    fn name(&self) -> &'static str {
        "consistent-hash"
    }

    fn plan(
        &self,
        current: &Assignment,
        candidates: &[Candidate],
        settings: &PlanSettings,
    ) -> Result<Plan, PlanError> {
        let input = Input::new(current, candidates, settings)?;
        let ring = Ring::new(&input, self.virtual_nodes);
        let bounds = self.bounded_load.map(|thousandths| bounds(&input, thousandths));
        Ok(hashed::plan(input, bounds, |choice| {
            let hash = mix(choice.shard() as u64 ^ SHARD_SALT);
            for strictness in Strictness::ALL {
                let mut walk = ring.walk(hash);
                while let (false, Some(rank)) = (choice.is_settled(), walk.next()) {
                    choice.offer(rank, strictness);
                }
            }
        }))
    }
}

/// How many places each node may fill.
fn bounds(input: &Input<'_>, thousandths: u16) -> Vec<u64> {
    let shards = u64::from(input.current.shards().get());
    let accepting = input.live.iter().filter(|node| node.takes_new).count() as u64;
    let owners = u64::from(input.current.replicas().get()).min(accepting);
    let claim = |node: &crate::input::Live| Claimant {
        weight: node.weight,
        count: 0,
        least: 0,
        most: if node.takes_new { u64::from(node.max_shards).min(shards) } else { 0 },
    };
    let claimants: Vec<Claimant> = input.live.iter().map(claim).collect();
    quotas(&claimants, shards * owners, thousandths).iter().map(|quota| quota.high).collect()
}

#[derive(Debug)]
struct Ring {
    /// Hash and rank of each point, in order.
    points: Vec<(u64, u16)>,
    /// The first point in each of 2^bits equal parts of the ring.
    starts: Vec<u32>,
    shift: u32,
}

impl Ring {
    fn new(input: &Input<'_>, virtual_nodes: u16) -> Self {
        let accepting = (0_u16..).zip(&input.live).filter(|(_, node)| node.takes_new);
        let nodes: Vec<(u16, &NodeId, u64)> = accepting
            .filter_map(|(rank, node)| Some((rank, input.id(node.slot)?, node.weight)))
            .collect();
        let counts = point_counts(nodes.iter().map(|(_, _, weight)| *weight), virtual_nodes);
        let mut points = Vec::new();
        for ((rank, id, _), count) in nodes.into_iter().zip(counts) {
            let seed = xxh3_64(id.as_str().as_bytes());
            points.extend((0..count).map(|n| (mix(seed ^ mix(n)), rank)));
        }
        points.sort_unstable();
        let bits = usize::BITS - points.len().leading_zeros();
        let shift = u64::BITS - bits;
        let mut starts = Vec::with_capacity((1 << bits) + 1);
        let mut at = 0;
        for part in 0..1_u64 << bits {
            while points.get(at).is_some_and(|(hash, _)| hash >> shift < part) {
                at += 1;
            }
            starts.push(u32::try_from(at).unwrap_or(u32::MAX));
        }
        Self { points, starts, shift }
    }

    /// The nodes of all points from a hash on, once around.
    fn walk(&self, hash: u64) -> impl Iterator<Item = u16> + '_ {
        let part = usize::try_from(hash >> self.shift).unwrap_or(0);
        let start = self.starts[part] as usize;
        let near = self.points[start..].iter().take_while(|(point, _)| *point < hash).count();
        let (before, after) = self.points.split_at(start + near);
        after.iter().chain(before).map(|(_, rank)| *rank)
    }
}

/// How many points each node gets. Weights are scaled down by powers of two only, and only where there
/// would be too many points: so a node that comes or goes rarely changes those of others.
fn point_counts(weights: impl Iterator<Item = u64> + Clone, virtual_nodes: u16) -> Vec<u64> {
    let count = |weight: u64, shift: u32| {
        let points = u128::from(weight >> shift) * u128::from(virtual_nodes);
        let rounded = (points + u128::from(WEIGHT_DEFAULT / 2)) / u128::from(WEIGHT_DEFAULT);
        u64::try_from(rounded).unwrap_or(u64::MAX).max(1)
    };
    let total = |shift: u32| {
        weights.clone().fold(0_u64, |sum, weight| sum.saturating_add(count(weight, shift)))
    };
    let usual = weights.clone().count() as u64 * u64::from(virtual_nodes);
    let most = usual.saturating_mul(CROWDING_MAX).min(POINTS_MAX);
    let shift = (0..u64::BITS).find(|&shift| total(shift) <= most).unwrap_or(u64::BITS - 1);
    weights.clone().map(|weight| count(weight, shift)).collect()
}
