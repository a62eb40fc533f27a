//! How much each shard has to do.

use std::collections::BTreeMap;

use coord_core::{ShardCount, ShardId};

/// What the heaviest shard counts: loads are whole numbers up to it, so that sums are exact on every
/// platform.
const HEAVIEST: u64 = 1 << 32;
/// The part of the mean that a shard counts at least.
const IDLE: u64 = 16;

/// How much each shard has to do, in any unit that is the same for all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardLoads {
    loads: BTreeMap<ShardId, u64>,
    unusable: u64,
    first_unusable: Option<ShardId>,
}

impl ShardLoads {
    /// The loads of these shards; of several for one shard the last counts. One that is not a number,
    /// infinite or negative counts as absent.
    #[must_use]
    pub fn new(loads: impl IntoIterator<Item = (ShardId, f64)>) -> Self {
        let mut given: BTreeMap<ShardId, f64> = loads.into_iter().collect();
        let before = given.len();
        let mut first_unusable = None;
        given.retain(|shard, load| {
            let usable = load.is_finite() && *load >= 0.0;
            if !usable {
                first_unusable.get_or_insert(*shard);
            }
            usable
        });
        let unusable = (before - given.len()) as u64;
        let most = given.values().copied().fold(0.0, f64::max);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a number from 0 to 2^32"
        )]
        let scaled = |load: f64| match most > 0.0 {
            true => (load / most * HEAVIEST as f64).round() as u64,
            false => 0,
        };
        let loads = given.into_iter().map(|(shard, load)| (shard, scaled(load))).collect();
        Self { loads, unusable, first_unusable }
    }

    /// How many loads were no usable numbers, and the first shard of them.
    #[must_use]
    pub fn unusable(&self) -> Option<(u64, ShardId)> {
        Some((self.unusable, self.first_unusable?))
    }

    /// What each shard counts, at least 1.
    pub(crate) fn costs(&self, shards: ShardCount) -> Vec<u64> {
        let known = || self.loads.iter().filter(|(shard, _)| shards.contains(**shard));
        let count = known().count() as u64;
        let sum: u64 = known().map(|(_, load)| *load).sum();
        let mean = sum.checked_div(count).unwrap_or(HEAVIEST).max(1);
        let mut costs = vec![mean; shards.get() as usize];
        for (shard, load) in known() {
            costs[shard.index()] = (*load).max(mean / IDLE).max(1);
        }
        costs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_load_counts_as_the_mean_and_idle_shards_as_a_little() {
        let given = [f64::NAN, -1.0, f64::INFINITY, 3.0, 1.0, 0.0, 1e-300];
        let loads = ShardLoads::new((0..).map(ShardId::new).zip(given));
        assert_eq!(loads.unusable(), Some((3, ShardId::new(0))));
        let costs = loads.costs(ShardCount::new(8).expect("count"));
        let mean = ((1 << 32) + 1_431_655_765_u64) / 4;
        let idle = mean / 16;
        assert_eq!(costs, [mean, mean, mean, 1 << 32, 1_431_655_765, idle, idle, mean]);
        let none = ShardLoads::new([(ShardId::new(0), 0.0), (ShardId::new(900), 5.0)]);
        assert_eq!(none.costs(ShardCount::new(2).expect("count")), [1, 1]);
        assert_eq!(ShardLoads::default().costs(ShardCount::ONE), [HEAVIEST]);
    }
}
