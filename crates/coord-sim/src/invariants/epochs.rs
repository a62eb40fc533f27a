//! What hosts show (docs/design.md#handoff): an epoch belongs to one run, and whoever may act is not refused by what the shard
//! writes to.

use std::collections::BTreeMap;
use std::time::Duration;

use coord_cluster::ShardToken;
use coord_core::{Epoch, ShardId, TableName, TableUid};

use super::{Invariant, ProcessId, Seen};

#[derive(Default)]
pub(super) struct Epochs {
    /// The present life of each table.
    lives: BTreeMap<TableName, TableUid>,
    shown: BTreeMap<(TableUid, ShardId, Epoch), ProcessId>,
    highest: BTreeMap<(TableName, ShardId), ShardToken>,
}

impl Invariant for Epochs {
    fn name(&self) -> &'static str {
        "epochs"
    }

    fn see(&mut self, seen: &Seen<'_>, _now: Duration) -> Option<String> {
        if let Seen::Published(table, _, map, _) = seen {
            self.lives.insert((*table).clone(), map.uid());
        }
        let Seen::Wrote(process, token) = seen else { return None };
        // One that has not heard of its table's end may be refused.
        if self.lives.get(&token.table).is_some_and(|uid| *uid != token.uid) {
            return None;
        }
        let key = (token.uid, token.shard, token.epoch);
        let known = *self.shown.entry(key).or_insert(*process);
        if known != *process {
            return Some(format!(
                "{known} and {process} both show epoch {} of shard {}",
                token.epoch, token.shard
            ));
        }
        let highest = self
            .highest
            .entry((token.table.clone(), token.shard))
            .or_insert_with(|| (*token).clone());
        if !token.passes(highest) {
            return Some(format!(
                "{process} may act for shard {} and is refused: epoch {} after {}",
                token.shard, token.epoch, highest.epoch
            ));
        }
        *highest = (*token).clone();
        None
    }
}
