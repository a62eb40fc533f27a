//! I2: every shard has an owner while an Active node exists (docs/design.md#invariants), but for those that `_cluster` says are
//! parked.
//!
//! Who is Active is what `_cluster` says (docs/design.md#the-reserved-table), of a run that is registered at this moment. Not counted
//! is a node that the map names as another run: the shards of a run that may go on stay in its name, and a
//! map can't name two runs of a node, so the new one takes nothing until the old one is over (docs/design.md#handoff).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use coord_core::{NodeStatus, ShardId, ShardMap, TableName};

use super::{Invariant, Seen};

#[derive(Default)]
pub(super) struct I2 {
    cluster: Option<Arc<ShardMap>>,
    parked: BTreeSet<(TableName, ShardId)>,
}

impl Invariant for I2 {
    fn name(&self) -> &'static str {
        "I2"
    }

    fn see(&mut self, seen: &Seen<'_>, _now: Duration) -> Option<String> {
        let Seen::Published(table, _, map, runs) = seen else { return None };
        if table.is_reserved() {
            self.cluster = Some((*map).clone());
            self.parked = parked(map);
            return None;
        }
        let mut shards = map.header().shards.shards();
        let orphan = shards.find(|shard| {
            map.owner(*shard).is_none() && !self.parked.contains(&((*table).clone(), *shard))
        })?;
        let members = self.cluster.iter().flat_map(|cluster| cluster.nodes().iter().flatten());
        let active = members.filter(|node| node.status == NodeStatus::Active).find(|node| {
            let listed = map.slot_of(&node.id).and_then(|slot| map.node(slot));
            runs.contains(&(node.id.clone(), node.incarnation))
                && listed.is_none_or(|listed| listed.incarnation == node.incarnation)
        })?;
        Some(format!(
            "{table} version {}: nobody owns shard {orphan}, and {} is active",
            map.version(),
            active.id
        ))
    }
}

/// The annex of `_cluster` is the runtime's own, and JSON that anybody can read.
fn parked(cluster: &ShardMap) -> BTreeSet<(TableName, ShardId)> {
    let annex: serde_json::Value = serde_json::from_slice(cluster.annex()).unwrap_or_default();
    let tables = annex.get("parked").and_then(serde_json::Value::as_object);
    let tables = tables.into_iter().flatten();
    let shards = tables.filter_map(|(table, shards)| {
        let table = TableName::new(table).ok()?;
        let shards = shards.as_object()?.keys().filter_map(|shard| shard.parse().ok());
        Some(shards.map(move |shard| (table.clone(), ShardId::new(shard))).collect::<Vec<_>>())
    });
    shards.flatten().collect()
}
