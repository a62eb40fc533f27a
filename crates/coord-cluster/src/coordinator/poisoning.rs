//! What of a crash is evidence against a shard, and how quarantined shards are remembered. Pure: `now` is an
//! argument.

use std::collections::{BTreeMap, BTreeSet};

use coord_core::{
    Incarnation, Moment, MotionPhase, NodeId, ShardId, ShardMap, Slot, TableName, Version,
};

use super::rules::{PAUSE_MIN, Rules};
use crate::handoff::Handoff;
use crate::member_view::View;
use crate::model::VersionTimes;
use crate::poison::{Crash, Fall, Poison, PoisonNews, TableShard};
use crate::record::{ClusterRecord, Crashed, Parked, Suspicion, Suspicions};

/// The most shards under suspicion that the next leader hears of: a quarter of a common table.
const SUSPICIONS_MAX: usize = 1_024;

type Shards = BTreeMap<TableName, BTreeSet<ShardId>>;

/// A table whose shards an incarnation may have hosted.
pub(super) struct Hosted<'a> {
    pub(super) name: &'a TableName,
    pub(super) map: &'a ShardMap,
    pub(super) seen: &'a VersionTimes,
    pub(super) handoff: Handoff,
}

impl Hosted<'_> {
    /// The shards that this incarnation got, and when, as far as it was seen.
    fn shards(&self, node: &NodeId, run: Incarnation) -> Vec<(TableShard, Moment)> {
        let Some(slot) = self
            .map
            .slot_of(node)
            .filter(|slot| self.map.node(*slot).is_some_and(|entry| entry.incarnation == run))
        else {
            return Vec::new();
        };
        let given = |shard: ShardId| {
            let owns = self.map.owner_slots(shard).any(|owner| owner == slot);
            let none = Vec::new();
            let motions = self.map.motions().get(&shard).unwrap_or(&none).iter();
            let starts = motions.filter(|motion| {
                self.handoff == Handoff::MakeBeforeBreak
                    && motion.phase == MotionPhase::MovingTo
                    && Slot::from(motion.other) == slot
            });
            let epoch = owns.then(|| Version::new(self.map.epoch(shard).get()));
            starts.map(|motion| motion.since).chain(epoch).max()
        };
        let replicas = usize::from(self.map.header().replicas.get());
        // It has few of very many places, so that what is not its own is only passed over.
        let places = self.map.raw_owners().iter().enumerate();
        let owned = places.filter(|(_, owner)| **owner == slot.get()).map(|(at, _)| at / replicas);
        let owned = owned.map(|shard| ShardId::new(u32::try_from(shard).unwrap_or(u32::MAX)));
        let shards: BTreeSet<ShardId> = owned.chain(self.map.motions().keys().copied()).collect();
        let since = |shard| Some((shard, self.seen.at(given(shard)?)?));
        shards
            .into_iter()
            .filter_map(since)
            .map(|(shard, at)| (TableShard::new(self.name.clone(), shard), at))
            .collect()
    }
}

/// When an incarnation whose registration ran out at this moment can have crashed. It was heard one TTL before
/// that; where the absence itself has to last for a TTL, two.
pub(super) fn fall(
    rules: &Rules,
    view: &View,
    node: &NodeId,
    run: Incarnation,
    counts_from: Moment,
) -> Fall {
    let ttl = view.record(node).map_or(rules.node_ttl, |record| record.ttl.get());
    let twice = rules.judging.wait_ttl && !rules.judging.from_heartbeat;
    let heard = counts_from.minus(ttl * if twice { 2 } else { 1 });
    // Stores notice an expiry up to a second late, and heartbeats come up to a tenth late.
    let missed = heard.plus(rules.heartbeat.mul_f64(1.1)).plus(PAUSE_MIN);
    Fall::new(node.clone(), run, heard.minus(PAUSE_MIN), missed)
}

/// The quarantined and the suspect shards, and what the next leader has to know of them.
#[derive(Debug)]
pub(super) struct Poisoning {
    poison: Poison,
    parked: BTreeMap<TableName, BTreeMap<ShardId, Parked>>,
    suspicions: Suspicions,
}

impl Poisoning {
    /// Begins with a former leader's record; none where quarantine is off.
    pub(super) fn resume(
        rules: &Rules,
        record: &ClusterRecord,
        seen: &BTreeMap<TableName, &VersionTimes>,
        now: Moment,
    ) -> Option<Self> {
        let parked = record.parked.iter().flat_map(|(table, shards)| {
            let shard = |(shard, parked): (&ShardId, &Parked)| {
                (TableShard::new(table.clone(), *shard), parked.hosts.clone())
            };
            shards.iter().map(shard)
        });
        let mut poison = Poison::new(rules.poison?, parked, now).ok()?;
        for Suspicion { crashes, shards } in &record.suspicions.groups {
            for (table, shards) in shards {
                let crash = |at: &usize| {
                    let crashed = record.suspicions.crashes.get(*at)?;
                    // No clock reading is stored, so the time of the table's version is used instead.
                    let version = crashed.versions.get(table);
                    let at = version.and_then(|version| seen.get(table)?.at(*version));
                    let (node, incarnation) = (crashed.node.clone(), crashed.incarnation);
                    Some(Crash { node, incarnation, at: at.unwrap_or(now) })
                };
                let crashes: Vec<Crash> = crashes.iter().filter_map(crash).collect();
                for shard in shards {
                    poison.suspect(TableShard::new(table.clone(), *shard), crashes.clone());
                }
            }
        }
        let (parked, suspicions) = (record.parked.clone(), record.suspicions.clone());
        Some(Self { poison, parked, suspicions })
    }

    /// Incarnations ended unplanned.
    pub(super) fn on_crashes(&mut self, falls: &[Fall], hosted: &[Hosted<'_>], now: Moment) {
        let shards = |fall: &Fall| {
            let (node, run) = (fall.node.clone(), fall.incarnation);
            hosted.iter().flat_map(move |table| table.shards(&node, run))
        };
        let news: Vec<_> =
            falls.iter().flat_map(|fall| self.poison.on_crash(fall, shards(fall), now)).collect();
        for news in news {
            match news {
                PoisonNews::Parked { shard, crashes } => {
                    let nodes: Vec<_> = crashes.iter().map(|crash| crash.node.as_str()).collect();
                    tracing::error!(
                        table = %shard.table, shard = %shard.shard, ?nodes,
                        "a shard is parked: its hosts crashed one after the other"
                    );
                }
                PoisonNews::Suspected { shards, crashes } => {
                    tracing::warn!(shards, crashes, "too many shards are suspect to park one");
                }
            }
        }
        let versions: BTreeMap<_, _> =
            hosted.iter().map(|table| (table.name.clone(), table.map.version())).collect();
        self.note(&versions);
    }

    /// An operator releases a shard.
    pub(super) fn release(&mut self, shard: &TableShard) {
        self.poison.release(shard);
        self.note(&BTreeMap::new());
    }

    /// The table was deleted: no crash counts against the shards of its next generation.
    pub(super) fn forget(&mut self, table: &TableName) {
        self.poison.forget(table);
        self.note(&BTreeMap::new());
    }

    /// Releases the shards that have been quarantined for long enough.
    pub(super) fn release_old(&mut self, now: Moment) -> Vec<TableShard> {
        let old = self.poison.release_old(now);
        if !old.is_empty() {
            self.note(&BTreeMap::new());
        }
        old
    }

    /// When the next shard is released without an operator.
    pub(super) fn releases_at(&self) -> Option<Moment> {
        self.poison.releases_at()
    }

    /// Writes down what the next leader has to know.
    pub(super) fn remember(&self, record: &mut ClusterRecord) {
        record.parked.clone_from(&self.parked);
        record.suspicions.clone_from(&self.suspicions);
    }

    fn note(&mut self, versions: &BTreeMap<TableName, Version>) {
        let mut all: BTreeMap<TableName, BTreeMap<ShardId, Parked>> = BTreeMap::new();
        for (TableShard { table, shard }, hosts) in self.poison.parked() {
            let parked = Parked { hosts: hosts.to_vec() };
            all.entry(table.clone()).or_default().insert(*shard, parked);
        }
        self.parked = all;
        self.suspicions = suspicions(&self.poison, &self.suspicions, versions);
    }
}

/// The most suspect first, as many as fit; all of those that are equally suspect, or none of them.
fn suspicions(
    poison: &Poison,
    before: &Suspicions,
    versions: &BTreeMap<TableName, Version>,
) -> Suspicions {
    let mut groups: BTreeMap<Vec<(NodeId, Incarnation)>, Shards> = BTreeMap::new();
    for (shard, crashes) in poison.suspects() {
        let key = crashes.iter().map(|crash| (crash.node.clone(), crash.incarnation)).collect();
        let group = groups.entry(key).or_default();
        group.entry(shard.table.clone()).or_default().insert(shard.shard);
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(crashes, _)| std::cmp::Reverse(crashes.len()));
    let mut after = Suspicions::default();
    let mut room = SUSPICIONS_MAX;
    for (crashes, shards) in groups {
        let count: usize = shards.values().map(BTreeSet::len).sum();
        let Some(left) = room.checked_sub(count) else { break };
        room = left;
        let crashes = crashes.into_iter().map(|(node, incarnation)| {
            let is = |crash: &&Crashed| (&crash.node, crash.incarnation) == (&node, incarnation);
            if let Some(at) = after.crashes.iter().position(|crash| is(&crash)) {
                return at;
            }
            let known = before.crashes.iter().find(is);
            let versions = known.map_or_else(|| versions.clone(), |crash| crash.versions.clone());
            after.crashes.push(Crashed { node, incarnation, versions });
            after.crashes.len() - 1
        });
        let crashes = crashes.collect();
        after.groups.push(Suspicion { crashes, shards });
    }
    after
}

#[cfg(test)]
mod tests;
