//! I2: every shard has an owner while an Active node exists: a map that names a registered run as Active
//! leaves none without.

use std::time::Duration;

use coord_core::NodeStatus;

use super::{Invariant, Seen};

pub(super) struct I2;

impl Invariant for I2 {
    fn name(&self) -> &'static str {
        "I2"
    }

    fn see(&mut self, seen: &Seen<'_>, _now: Duration) -> Option<String> {
        let Seen::Published(table, _, map, runs) = seen else { return None };
        if table.is_reserved() {
            return None;
        }
        let mut shards = map.header().shards.shards();
        let orphan = shards.find(|shard| map.owner(*shard).is_none())?;
        let active = map.nodes().iter().flatten().find(|node| {
            node.status == NodeStatus::Active && runs.contains(&(node.id.clone(), node.incarnation))
        })?;
        Some(format!(
            "{table} version {}: nobody owns shard {orphan}, and {} is active",
            map.version(),
            active.id
        ))
    }
}
