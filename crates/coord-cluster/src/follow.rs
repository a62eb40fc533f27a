//! The tasks that follow the leader's lease and the tables, and tell the observer.

use std::sync::Arc;

use coord_core::{LeaseEvent, LeaseName, PlacementEvent, ShardMap, TableName, Watched, Watcher};

use crate::record::ClusterRecord;
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
            shared.observe(|observer| observer.on_table(&name, map));
        }
        go_if_evacuated(&shared);
    }
}

fn take_cluster(shared: &Shared, map: Option<Arc<ShardMap>>) {
    let record = map.as_ref().map(|map| ClusterRecord::read(map.annex())).transpose();
    match record {
        Ok(record) => {
            shared.observe(|observer| observer.on_cluster(map, record.unwrap_or_default()));
        }
        // The members before it stay known.
        Err(error) => tracing::error!(node = %shared.node, %error, "the cluster can't be read"),
    }
}

/// A node that is leaving goes once it owns nothing.
fn go_if_evacuated(shared: &Shared) {
    let run = *shared.registered.borrow();
    let evacuated = shared.look(|observer| {
        let note = observer.record().nodes.get(&shared.node);
        note.is_some_and(|note| note.leaving.is_some() && note.leaving == run)
            && !observer.owns_any(&shared.node)
    });
    if evacuated {
        shared.end(Ending::Orderly);
    }
}

fn reached<E>(shared: &Shared, watched: &Watched<E>) {
    match watched {
        Watched::Away(error) => {
            tracing::debug!(node = %shared.node, %error, "a watch is interrupted");
            shared.store_failed();
        }
        Watched::Back => shared.store_answered(),
        _ => {}
    }
}
