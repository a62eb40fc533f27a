//! A node is unreachable when its last heartbeat is too old.

use std::collections::BTreeMap;
use std::time::Duration;

use coord_core::{Incarnation, Moment, NodeId};

use super::FailureDetector;
use crate::Reach;

/// The default detector: a node is unreachable once its last heartbeat is `limit` old.
#[derive(Clone, Debug)]
pub struct HeartbeatAge {
    limit: Duration,
    heard: BTreeMap<NodeId, (Incarnation, Moment)>,
}

impl HeartbeatAge {
    /// With this limit: the node TTL where heartbeats come through the store.
    #[must_use]
    pub const fn new(limit: Duration) -> Self {
        Self { limit, heard: BTreeMap::new() }
    }
}

impl FailureDetector for HeartbeatAge {
    fn on_heartbeat(&mut self, node: &NodeId, incarnation: Incarnation, now: Moment) {
        self.heard.insert(node.clone(), (incarnation, now));
    }

    fn forget(&mut self, node: &NodeId) {
        self.heard.remove(node);
    }

    fn excuse(&mut self, silence: Duration) {
        for (_, heard) in self.heard.values_mut() {
            *heard = heard.plus(silence);
        }
    }

    fn reach(&self, node: &NodeId, now: Moment) -> Reach {
        match self.heard.get(node) {
            Some((_, heard)) if now >= heard.plus(self.limit) => Reach::Unreachable,
            _ => Reach::Reachable,
        }
    }

    fn next_change(&self, now: Moment) -> Option<Moment> {
        let ends = self.heard.values().map(|(_, heard)| heard.plus(self.limit));
        ends.filter(|end| *end > now).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::from_origin(Duration::from_secs(seconds))
    }

    #[test]
    fn a_node_is_unreachable_once_its_heartbeat_is_too_old() {
        let (one, two) = (NodeId::new("n1").expect("name"), NodeId::new("n2").expect("name"));
        let run = Incarnation::from_u128(1);
        let mut detector = HeartbeatAge::new(Duration::from_secs(9));
        assert_eq!(detector.reach(&one, at(100)), Reach::Reachable, "never heard of");
        detector.on_heartbeat(&one, run, at(0));
        detector.on_heartbeat(&two, run, at(3));
        assert_eq!(detector.next_change(at(3)), Some(at(9)));
        assert_eq!(detector.reach(&one, at(8)), Reach::Reachable);
        assert_eq!(detector.reach(&one, at(9)), Reach::Unreachable);
        assert_eq!(detector.next_change(at(9)), Some(at(12)));
        detector.excuse(Duration::from_secs(5));
        assert_eq!(detector.reach(&one, at(13)), Reach::Reachable);
        detector.forget(&two);
        detector.on_heartbeat(&one, run, at(13));
        assert_eq!(detector.next_change(at(13)), Some(at(22)));
    }
}
