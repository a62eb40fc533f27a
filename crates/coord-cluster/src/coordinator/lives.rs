//! A table that was deleted while its shards ran begins another life, whose map names none of those who
//! still run them. Nobody gets a shard of it before they have stopped. Pure.
//!
//! ```text
//!   another uid than `_cluster` remembers ─► all runs that may host are awaited
//!   a registration reports another uid    ─► its run is awaited
//!   each reports the new life, with nothing stopping, or is over ─► the first map is planned
//! ```

use std::collections::BTreeMap;

use coord_core::{Moment, Report, ShardMap, TableName, TableUid, Version};

use super::roster::{self, Sources, Tenancy, Timers};
use crate::handoff::Handoff;
use crate::member_view::{Presence, View};
use crate::record::{Life, Run};

/// Looks at who may still host an earlier life of a table. True where the last of them has just stopped.
pub(super) fn take(
    sources: &Sources<'_>,
    timers: &Timers,
    lives: &mut BTreeMap<TableName, Life>,
    before: &[Run],
    table: (&TableName, &ShardMap, Handoff),
    now: Moment,
) -> bool {
    let (name, map, handoff) = table;
    let uid = map.uid();
    let known = lives.get(name).map(|life| life.uid);
    if known != Some(uid) {
        let awaits = match known {
            // By rules that don't ask.
            _ if handoff == Handoff::Eager => Vec::new(),
            // Nothing was hosted before the first life. But the store may have lost what it knew of another
            // one, while those who were members then go on.
            None if is_new(map) => before.to_vec(),
            None => Vec::new(),
            Some(_) => {
                tracing::warn!(table = %name, "the table was deleted; its hosts are awaited");
                members(sources)
            }
        };
        lives.insert(name.clone(), Life { uid, awaits });
    }
    let Some(life) = lives.get_mut(name) else { return false };
    if handoff != Handoff::Eager && is_new(map) {
        let others = hosts_of_another(sources.view, name, uid);
        let others: Vec<_> = others.filter(|run| !life.awaits.contains(run)).collect();
        life.awaits.extend(others);
    }
    let before = life.awaits.len();
    life.awaits.retain(|run| {
        match roster::tenancy(sources, timers, (&run.node, run.incarnation), now) {
            Tenancy::Ended => false,
            Tenancy::Lingers(_) => true,
            Tenancy::Reports => !has_stopped(sources.view, run, name, map),
        }
    });
    before > 0 && life.awaits.is_empty()
}

/// Who says that it goes by another life of the table.
fn hosts_of_another<'a>(
    view: &'a View,
    name: &'a TableName,
    uid: TableUid,
) -> impl Iterator<Item = Run> + 'a {
    let other = move |report: &Report| report.uid != uid;
    let records = view.present().filter(move |it| it.info.reports.get(name).is_some_and(other));
    records.map(|it| Run { node: it.info.id.clone(), incarnation: it.info.incarnation })
}

/// Whether nobody was ever given a shard of it.
pub(super) fn is_new(map: &ShardMap) -> bool {
    map.version() == Version::default()
}

/// All runs that may host, of whichever table.
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

/// Whether a run goes by this life of the table, and has stopped all that it hosted of another.
fn has_stopped(view: &View, run: &Run, name: &TableName, map: &ShardMap) -> bool {
    let Some(Presence::Present(record)) = view.presence(&run.node) else { return false };
    let report =
        record.info.reports.get(name).filter(|_| record.info.incarnation == run.incarnation);
    report.is_some_and(|report| report.uid == map.uid() && report.stopping.is_empty())
}
