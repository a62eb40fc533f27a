//! I3: no shard on a Failed or Deleted node, none newly placed on a Draining one.

use std::time::Duration;

use coord_core::NodeStatus;

use super::{Invariant, Newest, Seen};

#[derive(Default)]
pub(super) struct I3(Newest);

impl Invariant for I3 {
    fn name(&self) -> &'static str {
        "I3"
    }

    fn see(&mut self, seen: &Seen<'_>, _now: Duration) -> Option<String> {
        let Seen::Published(table, _, map, _) = seen else { return None };
        let previous = self.0.insert((*table).clone(), (*map).clone());
        let previous = previous.filter(|previous| previous.uid() == map.uid());
        for shard in map.header().shards.shards() {
            for owner in map.owners(shard) {
                let had = previous
                    .as_ref()
                    .is_some_and(|map| map.owners(shard).any(|before| before.id == owner.id));
                // One that was declared failed keeps what it may still run, and nothing else.
                let wrong = match owner.status {
                    NodeStatus::Active => false,
                    NodeStatus::Draining | NodeStatus::Failed => !had,
                    _ => true,
                };
                if wrong {
                    return Some(format!(
                        "{table} version {}: shard {shard} on {}, which is {}",
                        map.version(),
                        owner.id,
                        owner.status.as_str()
                    ));
                }
            }
        }
        None
    }
}
