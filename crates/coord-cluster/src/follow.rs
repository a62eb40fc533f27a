//! The tasks that follow the leader's lease and the tables, and tell the observer.

use std::sync::Arc;

use coord_core::{
    Incarnation, LeaseEvent, LeaseName, Moment, PlacementEvent, ShardMap, TableName, Watched,
    Watcher,
};

use crate::shared::{Ending, Shared};

/// Follows the leader's lease.
pub(crate) async fn leader(shared: Arc<Shared>) {
    let mut watcher = Watcher::lease(Arc::clone(&shared.lease), LeaseName::leader());
    loop {
        let watched = tokio::select! {
            biased;
            () = shared.stop.cancelled() => return,
            watched = watcher.next() => watched,
        };
        let record = match watched {
            Watched::Event(LeaseEvent::Snapshot(record)) => record,
            Watched::Event(LeaseEvent::Changed(record)) => Some(record),
            Watched::Event(LeaseEvent::Vacant) => None,
            other => {
                reached(&shared, &other);
                continue;
            }
        };
        shared.observe(|observer| {
            observer.on_leader(record.as_ref().map(|record| (&record.holder, record.term)))
        });
    }
}

/// Follows a table; the reserved one tells of the members.
pub(crate) async fn table(shared: Arc<Shared>, name: TableName) {
    let mut watcher = Watcher::placement(Arc::clone(&shared.placement), name.clone());
    loop {
        let watched = tokio::select! {
            biased;
            () = shared.stop.cancelled() => return,
            watched = watcher.next() => watched,
        };
        let map = match watched {
            Watched::Event(PlacementEvent::Snapshot(map)) => map,
            Watched::Event(PlacementEvent::Changed(map)) => Some(map),
            other => {
                reached(&shared, &other);
                continue;
            }
        };
        if name.is_reserved() {
            take_cluster(&shared, map);
        } else {
            if let Some(known) = shared.maps.get(&name) {
                known.send_replace(map.clone());
            }
            if let Some(map) = &map {
                shared.note_seen(&name, map);
            }
            shared.observe(|observer| observer.on_table(&name, map));
        }
        go_if_evacuated(&shared);
    }
}

fn take_cluster(shared: &Shared, map: Option<Arc<ShardMap>>) {
    match shared.look(|observer| observer.read_record(map.as_deref())) {
        Ok(record) => shared.observe(|observer| observer.on_cluster(map, record)),
        // The members before it stay known.
        Err(error) => tracing::error!(node = %shared.node, %error, "the cluster can't be read"),
    }
}

/// A node that is leaving goes once it owns nothing.
fn go_if_evacuated(shared: &Shared) {
    let evacuated = || !shared.look(|observer| observer.owns_any(&shared.node));
    if leaving(shared).is_some() && evacuated() {
        shared.end(Ending::Orderly);
    }
}

/// A node that leaves by force goes once its shards have had the handoff timeout to move, counted from
/// when it saw itself that it is leaving.
pub(crate) async fn forced_leave(shared: Arc<Shared>) {
    let mut news = shared.news();
    let mut since: Option<(Incarnation, Moment)> = None;
    loop {
        let now = shared.clock.now();
        let leaving = leaving(&shared);
        since =
            leaving.map(|(run, _)| since.filter(|(seen, _)| *seen == run).unwrap_or((run, now)));
        let force_at = leaving.filter(|(_, forced)| *forced).and(since);
        let force_at = force_at.map(|(_, at)| at.plus(shared.settings.handoff_timeout));
        if force_at.is_some_and(|at| at <= now) {
            let shards = shared.status().member(&shared.node).map(|member| member.shards);
            let shards = shards.unwrap_or_default();
            tracing::warn!(node = %shared.node, shards, "leaves by force; its shards are orphaned");
            shared.end(Ending::Orderly);
            return;
        }
        tokio::select! {
            biased;
            () = shared.stop.cancelled() => return,
            Ok(()) = news.changed() => {}
            () = shared.sleep_until_any(force_at) => {}
        }
    }
}

/// This incarnation of this node, if it is leaving, and whether by force.
fn leaving(shared: &Shared) -> Option<(Incarnation, bool)> {
    let run = (*shared.registered.borrow())?;
    shared.look(|observer| {
        let note = observer.record().nodes.get(&shared.node)?;
        (note.leaving == Some(run)).then_some((run, note.forced))
    })
}

fn reached<E>(shared: &Shared, watched: &Watched<E>) {
    match watched {
        Watched::Disconnected(error) => {
            tracing::debug!(node = %shared.node, %error, "a watch is interrupted");
            shared.store_failed();
        }
        Watched::Reconnected => shared.store_answered(),
        _ => {}
    }
}
