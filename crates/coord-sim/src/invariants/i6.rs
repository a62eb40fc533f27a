//! I6: no shard is hosted by two processes at one moment. A process hosts from the call of its host's
//! `start` until `stop` has returned, and only while its fence says so.

use std::time::Duration;

use super::{Invariant, Seen};

pub(super) struct I6;

impl Invariant for I6 {
    fn name(&self) -> &'static str {
        "I6"
    }

    fn see(&mut self, seen: &Seen<'_>, _now: Duration) -> Option<String> {
        let Seen::Started(shard, process, others) = seen else { return None };
        let other = others.first()?;
        Some(format!("{process} starts shard {shard}, which {other} still hosts"))
    }
}
