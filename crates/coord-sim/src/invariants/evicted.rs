//! An evicted run does not come back by a heartbeat (docs/design.md#registrations): its shards have
//! moved by the time it does.

use std::collections::BTreeSet;
use std::time::Duration;

use coord_core::{Incarnation, NodeId};

use super::{Invariant, Seen};

#[derive(Default)]
pub(super) struct Evicted(BTreeSet<(NodeId, Incarnation)>);

impl Invariant for Evicted {
    fn name(&self) -> &'static str {
        "evicted"
    }

    fn see(&mut self, seen: &Seen<'_>, _now: Duration) -> Option<String> {
        match seen {
            Seen::Evicted(node, run) => {
                self.0.insert(((*node).clone(), *run));
                None
            }
            // The network may deliver a request twice, and the second one late.
            Seen::Registered(node, run) => {
                self.0.remove(&((*node).clone(), *run));
                None
            }
            Seen::Renewed(node, run) => {
                let evicted = self.0.contains(&((*node).clone(), *run));
                evicted.then(|| format!("run {run} of {node} is renewed after its eviction"))
            }
            _ => None,
        }
    }
}
