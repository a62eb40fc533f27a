//! How busy the shards of a node are, as its registration tells: few numbers, and coarse ones.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use super::bounded;
use super::id::TableUid;
use super::node::Load;
use super::shard::{ShardId, Version};

/// The most shards that a registration names with their loads, those of all its tables together. A
/// node of 16,000 shards names the heaviest 256 and tells the mean of the others: about 4 KiB, so that
/// 10,000 nodes that all speak once a minute bring each watcher less than 1 MiB a second.
pub const SHARD_LOADS_MAX: usize = 256;

/// The binary digits that a load keeps after its first one: steps of 3 to 6 %.
const DIGITS: u32 = 4;
/// What of an `f64` lies below them.
const BELOW: u32 = f64::MANTISSA_DIGITS - 1 - DIGITS;

/// The loads of one node's shards of one table, rounded so that they seldom change.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// The life of the table this speaks of.
    pub uid: TableUid,
    /// The newest version that the node had applied. It says nothing of shards that came later.
    pub applied: Version,
    /// The mean load of the shards that are not named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rest: Option<Load>,
    /// The heaviest shards.
    #[serde(default, deserialize_with = "named", skip_serializing_if = "BTreeMap::is_empty")]
    pub shards: BTreeMap<ShardId, Load>,
}

fn named<'de, D: Deserializer<'de>>(shards: D) -> Result<BTreeMap<ShardId, Load>, D::Error> {
    bounded::map(shards, "shard loads", SHARD_LOADS_MAX, |_, _| 1)
}

impl LoadReport {
    /// What is to be said after `last` was said: the loads of these shards, of which at most `named` are
    /// named. A load that is within one rounding step of what was said of the shard goes on being said,
    /// so that loads which waver rewrite nothing. Loads that are not finite or negative are left out.
    #[must_use]
    pub fn after(
        last: Option<&Self>,
        uid: TableUid,
        applied: Version,
        loads: impl IntoIterator<Item = (ShardId, f64)>,
        named: usize,
    ) -> Self {
        let last = last.filter(|last| last.uid == uid);
        let before = |shard| last.and_then(|last| last.load(shard)).map(|load| code(load.get()));
        let usable = loads.into_iter().filter(|(_, load)| load.is_finite() && *load >= 0.0);
        let mut all: Vec<(ShardId, u64)> = usable
            .map(|(shard, load)| {
                let now = code(load);
                let kept = before(shard).filter(|before| before.abs_diff(now) <= 1);
                (shard, kept.unwrap_or(now))
            })
            .collect();
        let was_named = |shard| last.is_some_and(|last| last.shards.contains_key(&shard));
        all.sort_by_key(|&(shard, code)| (Reverse(code), !was_named(shard), shard));
        all.dedup_by_key(|(shard, _)| *shard);
        let rest = all.split_off(named.min(all.len()));
        #[expect(clippy::cast_precision_loss, reason = "there are at most 2^24 shards")]
        let mean = |rest: &[(ShardId, u64)]| {
            // The mean of finite numbers stays finite where each is divided first.
            let count = rest.len() as f64;
            rest.iter().map(|(_, code)| size(*code) / count).sum::<f64>()
        };
        let rest = (!rest.is_empty()).then(|| {
            let now = code(mean(&rest));
            let kept = last.and_then(|last| last.rest).map(|rest| code(rest.get()));
            kept.filter(|kept| kept.abs_diff(now) <= 1).unwrap_or(now)
        });
        let load = |code| Load::new(size(code)).unwrap_or_default();
        Self {
            uid,
            applied,
            rest: rest.map(load),
            shards: all.into_iter().map(|(shard, code)| (shard, load(code))).collect(),
        }
    }

    /// What is said of a shard that the node hosted.
    #[must_use]
    pub fn load(&self, shard: ShardId) -> Option<Load> {
        self.shards.get(&shard).copied().or(self.rest)
    }

    /// Whether two reports say the same of the loads, whichever version they speak of.
    #[must_use]
    pub fn says_as(&self, other: &Self) -> bool {
        (self.uid, self.rest, &self.shards) == (other.uid, other.rest, &other.shards)
    }
}

/// The number of the nearest rounding step. Positive floats are ordered as their bits are, so that this
/// is exact and alike on every platform.
fn code(load: f64) -> u64 {
    let largest = f64::MAX.to_bits() >> BELOW;
    ((load.abs().to_bits() + (1 << (BELOW - 1))) >> BELOW).min(largest)
}

/// The load that a step stands for.
fn size(code: u64) -> f64 {
    f64::from_bits(code << BELOW)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UID: TableUid = TableUid::from_u128(7);

    fn say(last: Option<&LoadReport>, loads: &[f64], named: usize) -> LoadReport {
        let loads = (0..).map(ShardId::new).zip(loads.iter().copied());
        LoadReport::after(last, UID, Version::new(1), loads, named)
    }

    #[test]
    fn the_heaviest_are_named_and_the_others_are_a_mean() {
        let report = say(None, &[1.0, 9.0, 2.0, 300.0, 3.0, f64::NAN, -1.0], 2);
        let named: Vec<_> = report.shards.iter().map(|(s, l)| (s.get(), l.get())).collect();
        assert_eq!(named, [(1, 9.0), (3, 304.0)], "300 is between 296 and 304");
        assert_eq!(report.rest, Some(Load::new(2.0).expect("finite")));
        assert_eq!(report.load(ShardId::new(4)), report.rest);
        assert_eq!(say(None, &[5.0], 2).rest, None);
    }

    #[test]
    fn what_wavers_is_said_as_before_and_what_grows_is_said_anew() {
        let first = say(None, &[100.0; 400], SHARD_LOADS_MAX);
        let loads: Vec<f64> = (0..400).map(|n| 100.0 + f64::from(n % 7) - 3.0).collect();
        assert_eq!(say(Some(&first), &loads, SHARD_LOADS_MAX), first);
        let mut hot = loads;
        hot[399] = 900.0;
        let next = say(Some(&first), &hot, SHARD_LOADS_MAX);
        assert_eq!(next.load(ShardId::new(399)).map(Load::get), Some(896.0));
        assert_eq!(next.shards.len(), SHARD_LOADS_MAX);
        let other = LoadReport { uid: TableUid::from_u128(8), ..first };
        assert!(!say(Some(&other), &[100.0; 400], 256).says_as(&other), "another life");
    }

    #[test]
    fn the_largest_report_is_small() {
        let huge = |n: u32| f64::from(n).mul_add(1e-9, 1e-300);
        let loads: Vec<f64> = (0..16_384).map(huge).collect();
        let report = say(None, &loads, SHARD_LOADS_MAX);
        let bytes = serde_json::to_vec(&report).expect("writes").len();
        assert!(bytes <= 10 * 1024, "{bytes} bytes");
        let usual: Vec<f64> = (0..16_384_u32).map(|n| f64::from(n % 5000)).collect();
        let bytes = serde_json::to_vec(&say(None, &usual, SHARD_LOADS_MAX)).expect("writes").len();
        assert!(bytes <= 4 * 1024 + 512, "{bytes} bytes");
    }

    proptest! {
        #[test]
        fn rounding_is_near_stays_put_and_keeps_the_order(a in 0.0..1e300_f64, b in 0.0..1e300_f64) {
            let rounded = size(code(a));
            prop_assert!((rounded - a).abs() <= a / 31.9);
            prop_assert_eq!(code(rounded), code(a));
            prop_assert!(a > b || code(a) <= code(b));
        }

        #[test]
        fn no_load_breaks_it(loads in proptest::collection::vec(proptest::num::f64::ANY, 0..20)) {
            let report = say(None, &loads, 4);
            let json = serde_json::to_vec(&report).expect("writes");
            let read: LoadReport = serde_json::from_slice(&json).expect("reads");
            // JSON's reader may be off by the last bit, which no rounding step notices.
            let codes = |report: &LoadReport| -> Vec<u64> {
                report.shards.values().chain(&report.rest).map(|load| code(load.get())).collect()
            };
            prop_assert_eq!(codes(&read), codes(&report));
            prop_assert!(read.shards.keys().eq(report.shards.keys()));
        }
    }
}
