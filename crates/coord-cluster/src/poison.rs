//! Poison shards: a shard that crashes whoever hosts it takes down one node after the other. Pure: `now`
//! is an argument.
//!
//! A crash of a node speaks against every shard that it hosted, and mostly against the wrong ones. Each
//! further crash speaks only against those that had moved there from the last one that crashed, so the
//! suspects get fewer, like 256, 85, 28, 9: a shard is parked once enough hosts in a row have crashed,
//! and so few shards are as suspect as it is that one of them may well be the cause.
//!
//! Only a crash at the start of a shard or soon after it is evidence. Machines that are killed one after
//! the other have hosted their shards for longer than that; and whoever dies together with others had
//! died before it could be given a shard of theirs.
//!
//! The idea is that of the "key of death" detection of Databricks' Dicer; the narrowing down is ours.

use std::collections::BTreeMap;
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
    /// How long after the start of a shard a crash still speaks against it; 10 s.
    pub soon: Duration,
    /// Within which time; 1 h.
    pub window: Duration,
    /// The most shards that one crash may park, at least 1; 16. Where more are equally suspect, the next
    /// crash is awaited.
    pub parked_at_once_max: usize,
    /// After this a parked shard is given another try, for it may have been mended; 6 h.
    pub release_after: Duration,
}

impl Default for PoisonSettings {
    fn default() -> Self {
        const HOUR: Duration = Duration::from_secs(3600);
        Self {
            crashes: 3,
            soon: Duration::from_secs(10),
            window: HOUR,
            parked_at_once_max: 16,
            release_after: 6 * HOUR,
        }
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
            faults.push(format!("crashes is {crashes}; one crash is no evidence, so at least 2"));
        }
        if self.window.is_zero() {
            faults.push("window is 0".to_owned());
        }
        for (name, value) in [("soon", self.soon), ("release_after", self.release_after)] {
            if value.is_zero() {
                faults.push(format!("{name} is 0"));
            }
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

/// An unplanned end of an incarnation. Its time is known only within bounds: the incarnation was there at the
/// first moment, and gone at the last one.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fall {
    /// Which node.
    pub node: NodeId,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// When it was heard last.
    pub heard: Moment,
    /// When it should have been heard again.
    pub missed: Moment,
}

impl Fall {
    /// The end of this incarnation between these moments.
    #[must_use]
    pub const fn new(
        node: NodeId,
        incarnation: Incarnation,
        heard: Moment,
        missed: Moment,
    ) -> Self {
        Self { node, incarnation, heard, missed }
    }

    /// Whether a shard that the incarnation got at this moment may have been starting, or have started shortly
    /// before.
    fn follows(&self, since: Moment, soon: Duration) -> bool {
        since <= self.missed && self.heard <= since.plus(soon)
    }
}

/// A host of a shard that crashed.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crash {
    /// Which node.
    pub node: NodeId,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// When.
    pub at: Moment,
}

/// What a crash brought to light.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoisonNews {
    /// The shard is quarantined: no node may get it until an operator releases it, or a long time has passed.
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
    parked: BTreeMap<TableShard, Parked>,
}

#[derive(Clone, Debug)]
struct Parked {
    /// Since when, as far as this leader knows.
    since: Moment,
    /// The hosts that it took along.
    hosts: Vec<NodeId>,
}

impl Poison {
    /// With these settings, and what a former leader had quarantined, with the crashed hosts of each shard.
    ///
    /// # Errors
    /// As [`PoisonSettings::validate`].
    pub fn new(
        settings: PoisonSettings,
        parked: impl IntoIterator<Item = (TableShard, Vec<NodeId>)>,
        now: Moment,
    ) -> Result<Self> {
        settings.validate()?;
        let parked = parked.into_iter();
        let parked = parked.map(|(shard, hosts)| (shard, Parked { since: now, hosts })).collect();
        Ok(Self { settings, suspects: BTreeMap::new(), parked })
    }

    /// An incarnation ended, without an operator, a drain or a downing as the cause, and not together with half
    /// of the others. `hosted` names the shards that it got, and when. An incarnation that crashed before
    /// counts once.
    pub fn on_crash(
        &mut self,
        fall: &Fall,
        hosted: impl IntoIterator<Item = (TableShard, Moment)>,
        now: Moment,
    ) -> Vec<PoisonNews> {
        self.forget_old(now);
        // The nodes that hosted here, by the number of crashes in a row.
        let mut rows: BTreeMap<usize, Vec<TableShard>> = BTreeMap::new();
        for (shard, since) in hosted {
            if self.parked.contains_key(&shard) || !fall.follows(since, self.settings.soon) {
                continue;
            }
            let crashes = self.suspects.entry(shard.clone()).or_default();
            // A host that had the shard before the last one crashed, a replica say, is not next in a row.
            let next = crashes.last().is_none_or(|last| {
                since >= last.at && (&last.node, last.incarnation) != (&fall.node, fall.incarnation)
            });
            if next {
                let (node, incarnation) = (fall.node.clone(), fall.incarnation);
                crashes.push(Crash { node, incarnation, at: now });
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
            let hosts = crashes.iter().map(|crash| crash.node.clone()).collect();
            self.parked.insert(shard.clone(), Parked { since: now, hosts });
            PoisonNews::Parked { shard, crashes }
        };
        worst.into_iter().map(park).collect()
    }

    /// An operator releases a shard. True if it was quarantined.
    pub fn release(&mut self, shard: &TableShard) -> bool {
        self.suspects.remove(shard);
        self.parked.remove(shard).is_some()
    }

    /// The table was deleted: no crash counts against the shards of its next generation.
    pub fn forget(&mut self, table: &TableName) {
        self.suspects.retain(|shard, _| shard.table != *table);
        self.parked.retain(|shard, _| shard.table != *table);
    }

    /// Releases the shards that have been quarantined for long enough.
    pub fn release_old(&mut self, now: Moment) -> Vec<TableShard> {
        let after = self.settings.release_after;
        let old = self.parked.iter().filter(|(_, parked)| now.since(parked.since) >= after);
        let old: Vec<_> = old.map(|(shard, _)| shard.clone()).collect();
        for shard in &old {
            self.release(shard);
        }
        old
    }

    /// When the next shard is released without an operator.
    #[must_use]
    pub fn releases_at(&self) -> Option<Moment> {
        let since = self.parked.values().map(|parked| parked.since).min()?;
        Some(since.plus(self.settings.release_after))
    }

    /// The shards that crashed hosts have had in common, and those hosts, the first one first.
    pub fn suspects(&self) -> impl Iterator<Item = (&TableShard, &[Crash])> {
        self.suspects.iter().map(|(shard, crashes)| (shard, crashes.as_slice()))
    }

    /// A former leader had this shard under suspicion, for these crashes.
    pub fn suspect(&mut self, shard: TableShard, crashes: Vec<Crash>) {
        self.suspects.insert(shard, crashes);
    }

    /// Whether a shard must not be given to anybody.
    #[must_use]
    pub fn is_parked(&self, shard: &TableShard) -> bool {
        self.parked.contains_key(shard)
    }

    /// All shards that must not be given to anybody, with the hosts that each took along.
    pub fn parked(&self) -> impl ExactSizeIterator<Item = (&TableShard, &[NodeId])> {
        self.parked.iter().map(|(shard, parked)| (shard, parked.hosts.as_slice()))
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
        Poison::new(PoisonSettings::default(), [], at(0)).expect("valid")
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
        // It is noticed late.
        let fall = Fall::new(node, run, at(since + 1), at(since + 4));
        poison.on_crash(&fall, hosted, at(second))
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
    fn only_a_crash_soon_after_the_start_is_evidence() {
        let soon = |heard: u64, missed: u64, since: u64| {
            let mut poison = poison();
            for n in 1..=3_u64 {
                let node = NodeId::new(format!("n{n}")).expect("name");
                let run = Incarnation::from_u128(n.into());
                let day = |second: u64| at(n * 100 + second);
                let fall = Fall::new(node, run, day(heard), day(missed));
                poison.on_crash(&fall, [(shard(0), day(since))], day(90));
            }
            poison.is_parked(&shard(0))
        };
        assert!(soon(8, 12, 10), "it may have been the start itself");
        assert!(soon(20, 24, 10));
        assert!(!soon(21, 25, 10), "it was well for more than ten seconds");
        assert!(!soon(5, 9, 10), "it was gone before it was given the shard");
    }

    #[test]
    fn a_parked_shard_is_given_another_try_after_a_long_time() {
        let hour = 3600;
        let mut poison =
            Poison::new(PoisonSettings::default(), [(shard(4), vec![])], at(hour)).expect("valid");
        assert_eq!(poison.releases_at(), Some(at(7 * hour)));
        assert_eq!(poison.release_old(at(7 * hour - 1)), []);
        assert_eq!(poison.release_old(at(7 * hour)), [shard(4)]);
        assert!(!poison.is_parked(&shard(4)));
        assert_eq!(poison.releases_at(), None);
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
        let mut poison =
            Poison::new(PoisonSettings::default(), [(shard(4), vec![])], at(0)).expect("valid");
        for n in 1..=3 {
            assert_eq!(crash(&mut poison, n, [4], u64::from(n) * 10, u64::from(n) * 10), []);
        }
        assert!(poison.is_parked(&shard(4)) && poison.parked().len() == 1);
        assert!(poison.release(&shard(4)));
        assert!(!poison.release(&shard(4)));
        crash(&mut poison, 1, [4], 90, 100);
        crash(&mut poison, 2, [4], 101, 110);
        assert!(!poison.is_parked(&shard(4)), "the old crashes are forgotten");
        assert_eq!(parked(&crash(&mut poison, 3, [4], 111, 120)), [4]);
    }

    #[test]
    fn bad_settings_are_named() {
        let zero = Duration::ZERO;
        let bad = PoisonSettings {
            crashes: 1,
            soon: zero,
            window: zero,
            parked_at_once_max: 0,
            release_after: zero,
        };
        let why = Poison::new(bad, [], at(0)).expect_err("five faults").to_string();
        let parts = [
            "crashes is 1",
            "soon is 0",
            "window is 0",
            "parked_at_once_max is 0",
            "release_after is 0",
        ];
        for part in parts {
            assert!(why.contains(part), "{why}");
        }
    }
}
