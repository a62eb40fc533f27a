//! I5: the leader is a live node. One that has lost its registration leads no longer than it takes to
//! release the lease, and in no case for a whole TTL of it.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Invariant, ProcessId, Seen};

pub(super) struct I5 {
    leader_ttl: Duration,
    /// Since when a leader is not registered.
    without: BTreeMap<ProcessId, Duration>,
}

impl I5 {
    pub(super) fn new(leader_ttl: Duration) -> Self {
        Self { leader_ttl, without: BTreeMap::new() }
    }
}

impl Invariant for I5 {
    fn name(&self) -> &'static str {
        "I5"
    }

    fn see(&mut self, seen: &Seen<'_>, now: Duration) -> Option<String> {
        let Seen::Leaders(leaders) = seen else { return None };
        self.without.retain(|process, _| {
            leaders.iter().any(|leading| leading.process == *process && !leading.registered)
        });
        for leading in leaders.iter().filter(|leading| !leading.registered) {
            let since = *self.without.entry(leading.process).or_insert(now);
            if now - since >= self.leader_ttl {
                return Some(format!("{} leads and is not registered", leading.process));
            }
        }
        None
    }
}
