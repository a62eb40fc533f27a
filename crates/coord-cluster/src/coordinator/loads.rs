//! How busy the shards of one table are, as far as the leader knows. Pure: `now` is an argument.
//!
//! A node reports its shards once a minute at most, and a shard that moved is in no report for a while. Its
//! former load counts until then, lest its new owner look idle and get more shards.

use std::sync::Arc;
use std::time::Duration;

use coord_core::{LoadReport, Moment, ShardId, ShardMap, TableName, TableUid};
use coord_placement::ShardLoads;

use crate::member_view::View;

/// How long balance waits for loads that are not known while others are: two reports, and one heartbeat
/// of the longest usual kind.
const WAIT_MAX: Duration = Duration::from_secs(180);

/// What a plan goes by.
#[derive(Clone, Debug)]
pub(crate) struct Figures {
    pub(crate) loads: Arc<ShardLoads>,
    /// Nothing is moved for balance alone.
    pub(crate) hold: bool,
}

/// What is known of a table's shards.
#[derive(Debug, Default)]
pub(crate) struct Loads {
    uid: Option<TableUid>,
    known: Vec<Option<f64>>,
    waits_until: Option<Moment>,
}

impl Loads {
    /// Takes the reports of the registrations. Loads that are not known yet hold balance back for a while.
    pub(crate) fn take(
        &mut self,
        table: &TableName,
        map: &ShardMap,
        view: &View,
        now: Moment,
    ) -> Figures {
        let shards = map.header().shards;
        if self.uid.replace(map.uid()) != Some(map.uid()) {
            self.known = vec![None; shards.get() as usize];
            self.waits_until = None;
        }
        self.guess(table, map, view);
        let reports: Vec<Option<&LoadReport>> = map
            .nodes()
            .iter()
            .map(|node| {
                let (node, record) = node.as_ref().and_then(|n| Some((n, view.record(&n.id)?)))?;
                let report = record.info.loads.get(table)?;
                let same = record.info.incarnation == node.incarnation && report.uid == map.uid();
                same.then_some(report)
            })
            .collect();
        let mut unknown = false;
        for shard in shards.shards() {
            let Some(known) = self.known.get_mut(shard.index()) else { continue };
            let owners = map.owner_slots(shard).filter_map(coord_core::Slot::index);
            let mut said = owners.filter_map(|slot| {
                let report = reports.get(slot).copied().flatten()?;
                // What it says of others is no word on a shard that came later.
                (map.epoch(shard).get() <= report.applied.get()).then(|| report.load(shard))?
            });
            if let Some(load) = said.next() {
                *known = Some(load.get());
            }
            unknown |= known.is_none() && map.owner(shard).is_some();
        }
        let any = self.known.iter().any(Option::is_some);
        let hold = unknown && any && { now < *self.waits_until.get_or_insert(now.plus(WAIT_MAX)) };
        if !unknown {
            self.waits_until = None;
        }
        let known = (0..).map(ShardId::new).zip(&self.known);
        let loads = known.filter_map(|(shard, load)| Some((shard, (*load)?)));
        Figures { loads: Arc::new(ShardLoads::new(loads)), hold }
    }

    /// What anybody said by name of a shard that nothing is known of: its owner before the last one, say,
    /// where this leader was not there.
    fn guess(&mut self, table: &TableName, map: &ShardMap, view: &View) {
        let reports = view.records().filter_map(|record| record.info.loads.get(table));
        let mut reports: Vec<_> = reports.filter(|report| report.uid == map.uid()).collect();
        reports.sort_by_key(|report| std::cmp::Reverse(report.applied));
        for (shard, load) in reports.iter().flat_map(|report| &report.shards) {
            if let Some(known) = self.known.get_mut(shard.index()) {
                known.get_or_insert(load.get());
            }
        }
    }

    /// Until when balance waits.
    pub(crate) fn waits_until(&self) -> Option<Moment> {
        self.waits_until
    }
}

#[cfg(test)]
mod tests;
