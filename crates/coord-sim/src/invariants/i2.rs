//! I2: every shard has an owner while an Active node exists. Where a map gives a shard to an Active node
//! in a version, that version leaves none without an owner.

use std::time::Duration;

use coord_core::NodeStatus;

use super::{Invariant, Seen};

pub(super) struct I2;

impl Invariant for I2 {
    fn name(&self) -> &'static str {
        "I2"
    }

    fn see(&mut self, seen: &Seen<'_>, _now: Duration) -> Option<String> {
        let Seen::Published(table, _, map) = seen else { return None };
        let shards = || map.header().shards.shards();
        let orphan = shards().find(|shard| map.owner(*shard).is_none())?;
        let active = shards()
            .filter_map(|shard| map.owner(shard))
            .find(|owner| owner.status == NodeStatus::Active)?;
        Some(format!(
            "{table} version {}: nobody owns shard {orphan}, and {} is active",
            map.version(),
            active.id
        ))
    }
}
