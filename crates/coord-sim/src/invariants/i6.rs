//! I6 (exclusive mode): no shard is hosted by two processes at one moment. A process hosts from the call
//! of its host's `start` until `stop` has returned, and only while its fence says so; and while code of
//! the shard runs in it, a handler's too: for others up to the deadline of the run that began it, and for
//! itself until that code has returned.

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
        let (place, process, others, does) = match seen {
            Seen::Started(place, process, others) => (place, process, others, "starts"),
            Seen::Handles(place, process, others) => (place, process, others, "handles mail of"),
            _ => return None,
        };
        if self.0.handoff(*place) != Handoff::Exclusive {
            return None;
        }
        let other = others.first()?;
        Some(format!("{process} {does} {place}, which {other} still hosts"))
    }
}
