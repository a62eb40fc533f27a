//! Watches a cluster from outside and remembers what broke.

use std::collections::BTreeMap;
use std::sync::Arc;

use coord::{Fence, NodeId, NodeStatus, ShardMap, TableUid, Version};

/// What has been seen so far, and what of it must not have been.
#[derive(Debug, Default)]
pub(crate) struct Audit {
    newest: Option<Arc<ShardMap>>,
    shown: BTreeMap<NodeId, (TableUid, Version)>,
    highest: Option<Fence>,
    violations: Vec<String>,
}

impl Audit {
    /// What was violated, in the order in which it was seen.
    pub(crate) fn violations(&self) -> &[String] {
        &self.violations
    }

    /// Takes what the nodes that run say of leadership at one moment: I1, one leader at a time, and terms
    /// that rise (I5 follows: only nodes that run are asked).
    pub(crate) fn leaders(&mut self, fences: &[(NodeId, Fence)]) {
        if let [(one, _), (other, _), ..] = fences {
            self.violation(format!("I1: {one} and {other} lead at one moment"));
        }
        for (node, fence) in fences {
            match &self.highest {
                Some(highest) if !fence.passes(highest) => {
                    let why =
                        format!("I1: {node} leads in term {} after {}", fence.term, highest.term);
                    self.violation(why);
                }
                _ => self.highest = Some(fence.clone()),
            }
        }
    }

    /// Takes a map as a node shows it: versions don't go back on a node, and each newer map keeps I2 to I4.
    pub(crate) fn map(&mut self, node: &NodeId, map: &Arc<ShardMap>) {
        let now = (map.uid(), map.version());
        if let Some((uid, version)) = self.shown.insert(node.clone(), now)
            && uid == map.uid()
            && version > map.version()
        {
            self.violation(format!("{node} went back from version {version} to {}", map.version()));
        }
        let newest = self.newest.as_ref().map(|newest| (newest.uid(), newest.version()));
        if newest.is_none_or(|(uid, version)| uid != map.uid() || version < map.version()) {
            self.newer(map);
            self.newest = Some(Arc::clone(map));
        }
    }

    /// Takes what the hosts have noted: I6, no shard on two nodes at one moment.
    pub(crate) fn hosts(&mut self, twice: Vec<String>) {
        for what in twice {
            self.violation(what);
        }
    }

    fn newer(&mut self, map: &Arc<ShardMap>) {
        if map.version() == Version::ZERO {
            return;
        }
        let version = map.version();
        match (map.writer(), self.newest.as_ref().and_then(|map| map.writer()).cloned()) {
            (None, _) => self.violation(format!("I4: version {version} has no writer")),
            (Some(writer), Some(former)) if !writer.passes(&former) => {
                let why = format!(
                    "I4: term {} wrote version {version} after {}",
                    writer.term, former.term
                );
                self.violation(why);
            }
            _ => {}
        }
        let active = map.nodes().iter().flatten().any(|node| node.status == NodeStatus::Active);
        let orphans = map.orphans();
        if active && orphans > 0 {
            self.violation(format!("I2: version {version} leaves {orphans} shards without owner"));
        }
        let counts = map.counts();
        for (node, count) in map.nodes().iter().zip(counts) {
            if let Some(node) = node
                && count > 0
                && !node.status.may_host()
            {
                let (id, status) = (&node.id, node.status);
                self.violation(format!(
                    "I3: version {version} gives {count} shards to {id}, {status}"
                ));
            }
        }
    }

    fn violation(&mut self, what: String) {
        if !self.violations.contains(&what) {
            self.violations.push(what);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use coord::{
        Address, AttemptId, Incarnation, LeaseName, NodeEntry, Origin, ShardCount, ShardId,
        TableHeader, Term,
    };

    fn fence(term: u64) -> Fence {
        let attempt = AttemptId::from_u128(term.into());
        Fence::new(LeaseName::leader(), Term::from_u64(term), attempt, Origin::new("memory:1/demo"))
    }

    fn node(name: &str) -> NodeId {
        NodeId::new(name).expect("name")
    }

    fn map(status: NodeStatus, shards: u32, term: u64) -> Arc<ShardMap> {
        let header = TableHeader::new(ShardCount::new(2).expect("count"));
        let mut edit = ShardMap::empty(header, TableUid::from_u128(1)).edit();
        let address = Address::new("127.0.0.1:1").expect("address");
        let entry = NodeEntry::new(node("n1"), Incarnation::from_u128(1), address, status);
        let slot = edit.put_node(entry).expect("room");
        for shard in 0..shards {
            edit.set_owner(ShardId::new(shard), 0, slot).expect("in range");
        }
        Arc::new(edit.finish(fence(term)).expect("changed"))
    }

    #[test]
    fn a_good_history_has_no_violation() {
        let mut audit = Audit::default();
        audit.leaders(&[(node("n1"), fence(1))]);
        audit.leaders(&[]);
        audit.leaders(&[(node("n2"), fence(2))]);
        audit.map(&node("n1"), &map(NodeStatus::Active, 2, 1));
        assert!(audit.violations().is_empty(), "{:?}", audit.violations());
    }

    #[test]
    fn it_sees_what_breaks() {
        let mut audit = Audit::default();
        audit.leaders(&[(node("n1"), fence(2)), (node("n2"), fence(3))]);
        audit.leaders(&[(node("n1"), fence(2))]);
        assert_eq!(audit.violations().len(), 2, "{:?}", audit.violations());

        let mut audit = Audit::default();
        audit.map(&node("n1"), &map(NodeStatus::Active, 1, 1));
        assert!(audit.violations()[0].starts_with("I2"), "{:?}", audit.violations());

        let mut audit = Audit::default();
        audit.map(&node("n1"), &map(NodeStatus::Failed, 2, 1));
        assert!(audit.violations()[0].starts_with("I3"), "{:?}", audit.violations());

        let mut audit = Audit::default();
        let newer = map(NodeStatus::Active, 2, 1);
        audit.map(&node("n1"), &newer);
        let header = TableHeader::new(ShardCount::new(2).expect("count"));
        audit.map(&node("n1"), &Arc::new(ShardMap::empty(header, newer.uid())));
        assert!(audit.violations()[0].contains("went back"), "{:?}", audit.violations());
    }
}
