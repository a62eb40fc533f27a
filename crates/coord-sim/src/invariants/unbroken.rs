//! What `MakeBeforeBreak` promises (docs/design.md#handoff): "s: A, moving to B" → B reports started → "s: B, A leaving". So a
//! shard does not go from a run that is registered to a node that has not started it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use coord_cluster::Handoff;

use super::{Invariant, Newest, ProcessId, Seen};
use crate::process::node_id;
use crate::tables::{Place, Tables};

pub(super) struct Unbroken {
    tables: Tables,
    newest: Newest,
    /// Which processes have made a shard ready, the last of each node.
    ready: BTreeMap<Place, BTreeSet<ProcessId>>,
}

impl Unbroken {
    pub(super) fn new(tables: Tables) -> Self {
        Self { tables, newest: Newest::new(), ready: BTreeMap::new() }
    }
}

impl Invariant for Unbroken {
    fn name(&self) -> &'static str {
        "make before break"
    }

    fn see(&mut self, seen: &Seen<'_>, _now: Duration) -> Option<String> {
        let (table, map, runs) = match seen {
            Seen::Started(place, process, _) => {
                let ready = self.ready.entry(*place).or_default();
                ready.retain(|other| other.node != process.node || other == process);
                return None;
            }
            Seen::Ready(place, process) => {
                self.ready.entry(*place).or_default().insert(*process);
                return None;
            }
            Seen::Published(table, _, map, runs) => (*table, *map, *runs),
            _ => return None,
        };
        let number = self.tables.number(table)?;
        let previous = self.newest.insert(table.clone(), map.clone())?;
        if previous.uid() != map.uid() {
            return None;
        }
        for shard in map.header().shards.shards() {
            let place = Place { table: number, shard };
            if self.tables.handoff(place) != Handoff::MakeBeforeBreak {
                return None;
            }
            let (Some(old), Some(new)) = (previous.owner(shard), map.owner(shard)) else {
                continue;
            };
            let runs_on = runs.contains(&(old.id.clone(), old.incarnation));
            let mut ready = self.ready.get(&place).into_iter().flatten();
            if old.id != new.id && runs_on && !ready.any(|it| node_id(it.node) == new.id) {
                return Some(format!(
                    "{table} version {}: shard {shard} goes from {} to {}, which has not started it",
                    map.version(),
                    old.id,
                    new.id
                ));
            }
        }
        None
    }
}
