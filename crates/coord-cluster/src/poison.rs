//! Poison shards: a shard that crashes whoever hosts it takes down one node after the other. Pure: `now`
//! is an argument.
//!
//! A crash of a node speaks against every shard that it hosted, and mostly against the wrong ones. Each
//! further crash speaks only against those that had moved there from the last one that crashed, so the
//! suspects get fewer, like 256, 85, 28, 9: a shard is parked once enough hosts in a row have crashed,
//! and so few shards are as suspect as it is that one of them may well be the cause.
//!
//! The idea is that of the "key of death" detection of Databricks' Dicer; the narrowing down is ours.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use coord_core::{Error, Incarnation, Moment, NodeId, Result, ShardId, TableName};

/// The most shards that are under suspicion at once; the longest unsuspected ones are forgotten.
const SUSPECTS_MAX: usize = 1 << 20;

/// A shard of a table.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableShard {
    /// The table.
    pub table: TableName,
    /// The shard.
    pub shard: ShardId,
}

impl TableShard {
    /// This shard of this table.
    #[must_use]
    pub const fn new(table: TableName, shard: ShardId) -> Self {
        Self { table, shard }
    }
}

/// When a shard counts as poison.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoisonSettings {
    /// How many of its hosts must have crashed one after the other, at least 2; 3.
    pub crashes: u32,
    /// Within which time; 1 h.
    pub window: Duration,
    /// The most shards that one crash may park, at least 1; 16. Where more are equally suspect, the next
    /// crash is awaited.
    pub parked_at_once_max: usize,
}

impl Default for PoisonSettings {
    fn default() -> Self {
        Self { crashes: 3, window: Duration::from_secs(3600), parked_at_once_max: 16 }
    }
}

impl PoisonSettings {
    /// Checks all of them together.
    ///
    /// # Errors
    /// `Invalid`, one error that names every fault.
    pub fn validate(&self) -> Result<()> {
        let mut faults = Vec::new();
        if self.crashes < 2 {
            let crashes = self.crashes;
            faults.push(format!("crashes is {crashes}; one crash accuses nobody, so at least 2"));
        }
        if self.window.is_zero() {
            faults.push("window is 0".to_owned());
        }
        if self.parked_at_once_max == 0 {
            faults.push("parked_at_once_max is 0; it is at least 1".to_owned());
        }
        if faults.is_empty() {
            return Ok(());
        }
        Err(Error::invalid("validate poison settings", faults.join("; ")))
    }
}

/// A host of a shard that crashed.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crash {
    /// Which node.
    pub node: NodeId,
    /// Which run of it.
    pub incarnation: Incarnation,
    /// When.
    pub at: Moment,
}

/// What a crash brought to light.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoisonNews {
    /// The shard is parked: it must not be given to anybody until an operator releases it.
    Parked {
        /// Which.
        shard: TableShard,
        /// The hosts that it took along, the first one first.
        crashes: Vec<Crash>,
    },
    /// Enough hosts have crashed one after the other, but too many shards were on all of them to say
    /// which one is the cause.
    Suspected {
        /// How many shards.
        shards: usize,
        /// How many crashes they have in common.
        crashes: usize,
    },
}

/// Watches crashes, and parks shards.
#[derive(Clone, Debug)]
pub struct Poison {
    settings: PoisonSettings,
    suspects: BTreeMap<TableShard, Vec<Crash>>,
    parked: BTreeSet<TableShard>,
}

impl Poison {
    /// With these settings, and what a former leader had parked.
    ///
    /// # Errors
    /// As [`PoisonSettings::validate`].
    pub fn new(
        settings: PoisonSettings,
        parked: impl IntoIterator<Item = TableShard>,
    ) -> Result<Self> {
        settings.validate()?;
        let parked = parked.into_iter().collect();
        Ok(Self { settings, suspects: BTreeMap::new(), parked })
    }

    /// A node crashed: it failed without having been asked to, by an operator, a drain or a downing.
    /// `hosted` names the shards that it hosted, and when it began to host each. A run that crashed before
    /// counts once.
    pub fn on_crash(
        &mut self,
        node: &NodeId,
        incarnation: Incarnation,
        hosted: impl IntoIterator<Item = (TableShard, Moment)>,
        now: Moment,
    ) -> Vec<PoisonNews> {
        self.forget_old(now);
        // By how many crashes in a row, who was hosted here.
        let mut rows: BTreeMap<usize, Vec<TableShard>> = BTreeMap::new();
        for (shard, since) in hosted {
            if self.parked.contains(&shard) {
                continue;
            }
            let crashes = self.suspects.entry(shard.clone()).or_default();
            // A host that had the shard before the last one crashed, a replica say, is not next in a row.
            let next = crashes.last().is_none_or(|last| {
                since >= last.at && (&last.node, last.incarnation) != (node, incarnation)
            });
            if next {
                crashes.push(Crash { node: node.clone(), incarnation, at: now });
                rows.entry(crashes.len()).or_default().push(shard);
            }
        }
        self.make_room();
        let Some((row, mut worst)) = rows.pop_last() else { return Vec::new() };
        if row < self.settings.crashes as usize {
            return Vec::new();
        }
        worst.sort();
        worst.dedup();
        if worst.len() > self.settings.parked_at_once_max {
            return vec![PoisonNews::Suspected { shards: worst.len(), crashes: row }];
        }
        let park = |shard: TableShard| {
            let crashes = self.suspects.remove(&shard).unwrap_or_default();
            self.parked.insert(shard.clone());
            PoisonNews::Parked { shard, crashes }
        };
        worst.into_iter().map(park).collect()
    }

    /// An operator releases a shard. True if it was parked.
    pub fn release(&mut self, shard: &TableShard) -> bool {
        self.suspects.remove(shard);
        self.parked.remove(shard)
    }

    /// Whether a shard must not be given to anybody.
    #[must_use]
    pub fn is_parked(&self, shard: &TableShard) -> bool {
        self.parked.contains(shard)
    }

    /// All shards that must not be given to anybody.
    pub fn parked(&self) -> impl ExactSizeIterator<Item = &TableShard> {
        self.parked.iter()
    }

    fn forget_old(&mut self, now: Moment) {
        let window = self.settings.window;
        self.suspects.retain(|_, crashes| {
            crashes.retain(|crash| now.since(crash.at) < window);
            !crashes.is_empty()
        });
    }

    fn make_room(&mut self) {
        let excess = self.suspects.len().saturating_sub(SUSPECTS_MAX);
        if excess == 0 {
            return;
        }
        let last = |crashes: &Vec<Crash>| crashes.last().map(|crash| crash.at);
        let mut order: Vec<_> =
            self.suspects.iter().map(|(shard, crashes)| (last(crashes), shard.clone())).collect();
        order.sort();
        for (_, shard) in order.into_iter().take(excess) {
            self.suspects.remove(&shard);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::from_origin(Duration::from_secs(seconds))
    }

    fn shard(n: u32) -> TableShard {
        TableShard::new(TableName::new("orders").expect("name"), ShardId::new(n))
    }

    fn poison() -> Poison {
        Poison::new(PoisonSettings::default(), []).expect("valid")
    }

    /// Node `n` crashes at this second with these shards, hosted since that second.
    fn crash(
        poison: &mut Poison,
        n: u32,
        shards: impl IntoIterator<Item = u32>,
        since: u64,
        second: u64,
    ) -> Vec<PoisonNews> {
        let node = NodeId::new(format!("n{n}")).expect("name");
        let run = Incarnation::from_u128(u128::from(second) + 1);
        let hosted = shards.into_iter().map(|n| (shard(n), at(since)));
        poison.on_crash(&node, run, hosted, at(second))
    }

    fn parked(news: &[PoisonNews]) -> Vec<u32> {
        let shard = |one: &PoisonNews| match one {
            PoisonNews::Parked { shard, .. } => Some(shard.shard.get()),
            PoisonNews::Suspected { .. } => None,
        };
        news.iter().filter_map(shard).collect()
    }

    #[test]
    fn the_shard_that_all_crashed_hosts_had_is_parked() {
        let mut poison = poison();
        assert_eq!(crash(&mut poison, 1, [0, 1, 2, 3, 7], 0, 10), []);
        assert_eq!(crash(&mut poison, 2, [2, 3, 4, 7], 11, 20), []);
        let news = crash(&mut poison, 3, [3, 5, 6, 7], 21, 30);
        assert_eq!(parked(&news), [3, 7], "two are equally suspect");
        let PoisonNews::Parked { crashes, .. } = &news[0] else { panic!("{news:?}") };
        let nodes: Vec<&str> = crashes.iter().map(|crash| crash.node.as_str()).collect();
        assert_eq!(nodes, ["n1", "n2", "n3"]);
        assert!(poison.is_parked(&shard(7)) && !poison.is_parked(&shard(2)));
    }

    #[test]
    fn too_many_suspects_wait_for_the_next_crash() {
        let mut poison = poison();
        crash(&mut poison, 1, 0..256, 0, 10);
        crash(&mut poison, 2, 0..85, 11, 20);
        let news = crash(&mut poison, 3, 0..28, 21, 30);
        assert_eq!(news, [PoisonNews::Suspected { shards: 28, crashes: 3 }]);
        let news = crash(&mut poison, 4, 0..9, 31, 40);
        assert_eq!(parked(&news), (0..9).collect::<Vec<_>>());
    }

    #[test]
    fn crashes_at_once_or_far_apart_or_of_one_run_are_no_row() {
        // Three replicas on nodes that lose power together.
        let mut poison = poison();
        for n in 1..=3 {
            assert_eq!(crash(&mut poison, n, [0], 0, 10), []);
        }
        // One every 40 minutes.
        let mut poison = self::poison();
        for n in 1..=5_u32 {
            let second = u64::from(n) * 2400;
            assert_eq!(crash(&mut poison, n, [0], second - 1, second), []);
        }
        // One crash, told three times.
        let mut poison = self::poison();
        for _ in 0..3 {
            assert_eq!(crash(&mut poison, 1, [0], 10, 10), []);
        }
    }

    #[test]
    fn the_same_node_restarting_again_and_again_counts() {
        let mut poison = poison();
        crash(&mut poison, 1, [0], 0, 10);
        crash(&mut poison, 1, [0], 11, 20);
        assert_eq!(parked(&crash(&mut poison, 1, [0], 21, 30)), [0]);
    }

    #[test]
    fn only_an_operator_releases_and_a_new_leader_remembers() {
        let mut poison = Poison::new(PoisonSettings::default(), [shard(4)]).expect("valid");
        for n in 1..=3 {
            assert_eq!(crash(&mut poison, n, [4], u64::from(n) * 10, u64::from(n) * 10), []);
        }
        assert_eq!(poison.parked().collect::<Vec<_>>(), [&shard(4)]);
        assert!(poison.release(&shard(4)));
        assert!(!poison.release(&shard(4)));
        crash(&mut poison, 1, [4], 90, 100);
        crash(&mut poison, 2, [4], 101, 110);
        assert!(!poison.is_parked(&shard(4)), "the old crashes are forgotten");
        assert_eq!(parked(&crash(&mut poison, 3, [4], 111, 120)), [4]);
    }

    #[test]
    fn bad_settings_are_named() {
        let bad = PoisonSettings { crashes: 1, window: Duration::ZERO, parked_at_once_max: 0 };
        let why = Poison::new(bad, []).expect_err("three faults").to_string();
        for part in ["crashes is 1", "window is 0", "parked_at_once_max is 0"] {
            assert!(why.contains(part), "{why}");
        }
    }
}
