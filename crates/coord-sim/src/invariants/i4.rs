//! I4: assignments change only by the leader, inside its term; for maps a term ends at the next claim.

use std::collections::BTreeMap;
use std::time::Duration;

use coord_core::{Fence, TableName, TableUid, Version};

use super::{Invariant, Seen};

#[derive(Default)]
pub(super) struct I4 {
    claimed: BTreeMap<TableName, Fence>,
    lives: BTreeMap<TableName, TableUid>,
    newest: BTreeMap<TableName, (TableUid, Version)>,
}

impl I4 {
    fn passes(&mut self, table: &TableName, fence: &Fence, what: &str) -> Option<String> {
        let highest = self.claimed.entry(table.clone()).or_insert_with(|| fence.clone());
        if !fence.passes(highest) {
            return Some(format!(
                "{table}: {what} under term {} after a claim under {}",
                fence.term, highest.term
            ));
        }
        *highest = fence.clone();
        None
    }
}

impl Invariant for I4 {
    fn name(&self) -> &'static str {
        "I4"
    }

    fn see(&mut self, seen: &Seen<'_>, _now: Duration) -> Option<String> {
        match seen {
            Seen::Claimed(table, uid, fence) => {
                // A table that was deleted remembers nobody.
                if self.lives.insert((*table).clone(), *uid) != Some(*uid) {
                    self.claimed.remove(*table);
                }
                self.passes(table, fence, "claimed")
            }
            Seen::Published(table, fence, map, _) => {
                if let Some(why) = self.passes(table, fence, "published") {
                    return Some(why);
                }
                if map.writer() != Some(*fence) {
                    return Some(format!("{table}: the map names another writer"));
                }
                let now = (map.uid(), map.version());
                let (uid, version) = self.newest.insert((*table).clone(), now)?;
                // The same publish, told again, is the same success.
                let follows = uid != now.0 || now.1 == version || now.1 == version.next();
                (!follows).then(|| format!("{table}: version {} follows {version}", now.1))
            }
            _ => None,
        }
    }
}
