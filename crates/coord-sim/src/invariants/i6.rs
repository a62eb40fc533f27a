//! I6 (exclusive mode): no shard is hosted by two processes at one moment. A process hosts from the call
//! of its host's `start` until `stop` has returned, and only while its fence says so.

use std::time::Duration;

use coord_cluster::Handoff;

use super::{Invariant, Seen};
use crate::tables::Tables;

pub(super) struct I6(pub(super) Tables);

impl Invariant for I6 {
    fn name(&self) -> &'static str {
        "I6"
    }

    fn see(&mut self, seen: &Seen<'_>, _now: Duration) -> Option<String> {
        let Seen::Started(place, process, others) = seen else { return None };
        if self.0.handoff(*place) != Handoff::Exclusive {
            return None;
        }
        let other = others.first()?;
        Some(format!("{process} starts {place}, which {other} still hosts"))
    }
}
