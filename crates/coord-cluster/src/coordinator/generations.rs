//! Waits for the hosts of a deleted table. A table that was deleted while its shards ran begins another
//! generation, whose map does not name the incarnations that still run them. No node gets a shard of it before
//! they have stopped. Pure.
//!
//! ```text
//!   another uid than `_cluster` remembers ─► all runs that may host are awaited
//!   a registration reports another uid    ─► its run is awaited
//!   each reports the new generation, with nothing stopping, or is over ─► the first map is planned
//! ```

use std::collections::BTreeMap;

use coord_core::{Moment, Report, ShardMap, TableName, TableUid, Version};

use super::roster::{self, HostingState, Sources, Timers};
use crate::handoff::Handoff;
use crate::member_view::{Presence, View};
use crate::record::{Run, TableGeneration};

/// Finds the incarnations that may still host an earlier generation of a table. True if the last of them has
/// just stopped.
pub(super) fn take(
    sources: &Sources<'_>,
    timers: &Timers,
    generations: &mut BTreeMap<TableName, TableGeneration>,
    before: &[Run],
    table: (&TableName, &ShardMap, Handoff),
    now: Moment,
) -> bool {
    let (name, map, handoff) = table;
    let uid = map.uid();
    let known = generations.get(name).map(|generation| generation.uid);
    if known != Some(uid) {
        let awaits = match known {
            // By rules that don't ask.
            _ if handoff == Handoff::Eager => Vec::new(),
            // Nothing was hosted before the first generation. But the store may have lost what it knew of
            // another one, and the members of that time then still run.
            None if is_new(map) => before.to_vec(),
            None => Vec::new(),
            Some(_) => {
                tracing::warn!(table = %name, "the table was deleted; its hosts are awaited");
                members(sources)
            }
        };
        generations.insert(name.clone(), TableGeneration { uid, awaits });
    }
    let Some(generation) = generations.get_mut(name) else { return false };
    if handoff != Handoff::Eager && is_new(map) {
        let others = hosts_of_another(sources.view, name, uid);
        let others: Vec<_> = others.filter(|run| !generation.awaits.contains(run)).collect();
        generation.awaits.extend(others);
    }
    let before = generation.awaits.len();
    generation.awaits.retain(|run| {
        match roster::tenancy(sources, timers, (&run.node, run.incarnation), now) {
            HostingState::Stopped => false,
            HostingState::MayStillRun(_) => true,
            HostingState::Reporting => !has_stopped(sources.view, run, name, map),
        }
    });
    before > 0 && generation.awaits.is_empty()
}

/// The incarnations that report another generation of the table.
fn hosts_of_another<'a>(
    view: &'a View,
    name: &'a TableName,
    uid: TableUid,
) -> impl Iterator<Item = Run> + 'a {
    let other = move |report: &Report| report.uid != uid;
    let records = view.present().filter(move |it| it.info.reports.get(name).is_some_and(other));
    records.map(|it| Run { node: it.info.id.clone(), incarnation: it.info.incarnation })
}

/// Whether no node was ever given a shard of it.
pub(super) fn is_new(map: &ShardMap) -> bool {
    map.version() == Version::default()
}

/// All incarnations that may host, of whichever table.
fn members(sources: &Sources<'_>) -> Vec<Run> {
    let listed = sources.cluster.nodes().iter().flatten().filter(|node| node.status.may_host());
    let listed = listed.map(|node| Run { node: node.id.clone(), incarnation: node.incarnation });
    let present = sources
        .view
        .present()
        .map(|record| Run { node: record.info.id.clone(), incarnation: record.info.incarnation });
    let noted = sources.record.nodes.iter().flat_map(|(node, note)| {
        let failed = note.failed.iter().map(|failed| failed.incarnation);
        let runs = failed.chain(note.former.keys().copied());
        runs.map(|incarnation| Run { node: node.clone(), incarnation })
    });
    let mut all: Vec<_> = listed.chain(present).chain(noted).collect();
    all.sort();
    all.dedup();
    all
}

/// Whether an incarnation goes by this generation of the table, and has stopped all that it hosted of another.
fn has_stopped(view: &View, run: &Run, name: &TableName, map: &ShardMap) -> bool {
    let Some(Presence::Present(record)) = view.presence(&run.node) else { return false };
    let report =
        record.info.reports.get(name).filter(|_| record.info.incarnation == run.incarnation);
    report.is_some_and(|report| report.uid == map.uid() && report.stopping.is_empty())
}
