//! Registrations of nodes.

use async_trait::async_trait;
use futures::stream::BoxStream;
use tokio::sync::broadcast;
use tokio::time::Instant;

use super::Handle;
use super::store::{Expiring, State};
use super::watch::{Topic, subscribe};
use crate::discovery::{Discovery, Evict, Heartbeat, NodeEvent, Register, Replace};
use crate::error::{Error, Result};
use crate::types::{Incarnation, NodeId, NodeInfo, NodeRecord, Registration, Revision, Ttl};

/// A registration that lives.
pub(super) struct LiveNode {
    record: NodeRecord,
    expires: Instant,
}

#[async_trait]
impl Discovery for Handle {
    async fn register(&self, node: &NodeInfo, ttl: Ttl, replace: Replace) -> Result<Register> {
        let ttl = self.info.guarantees.granted_ttl(ttl);
        self.run("register", |state, now| Ok(state.register(node, ttl, replace, now)))
    }

    async fn heartbeat(&self, held: &Registration, node: &NodeInfo) -> Result<Heartbeat> {
        if node.id != held.node || node.incarnation != held.incarnation {
            let why = format!(
                "the record is of node {} incarnation {}, the registration is not",
                node.id, node.incarnation
            );
            return Err(Error::invalid("heartbeat", why).resource(&held.node));
        }
        self.run("heartbeat", |state, now| Ok(state.heartbeat(held, node, now)))
    }

    async fn deregister(&self, held: &Registration) -> Result<()> {
        self.run("deregister", |state, _| {
            state.deregister(held);
            Ok(())
        })
    }

    async fn evict(
        &self,
        node: &NodeId,
        incarnation: Incarnation,
        seen: &Revision,
    ) -> Result<Evict> {
        self.run("evict", |state, now| Ok(state.evict(node, incarnation, seen, now)))
    }

    async fn nodes(&self) -> Result<Vec<NodeRecord>> {
        self.run("nodes", |state, now| Ok(state.node_records(now)))
    }

    fn watch(&self) -> BoxStream<'static, Result<NodeEvent>> {
        subscribe(self, NodesTopic)
    }
}

impl State {
    fn register(&mut self, node: &NodeInfo, ttl: Ttl, replace: Replace, now: Instant) -> Register {
        let (event, revision): (fn(NodeRecord) -> NodeEvent, _) = match self.nodes.get(&node.id) {
            Some(live) if live.is(node.incarnation) => {
                let is_same = live.record.info == *node && live.record.ttl == ttl;
                (NodeEvent::Updated, is_same.then(|| live.record.revision.clone()))
            }
            Some(live) if replace == Replace::No => return Register::Duplicate(live.record(now)),
            _ => (NodeEvent::Joined, None),
        };
        Register::Registered(self.put_node(node, ttl, revision, event, now))
    }

    fn heartbeat(&mut self, held: &Registration, node: &NodeInfo, now: Instant) -> Heartbeat {
        let Some(live) = self.nodes.get(&held.node) else { return Heartbeat::Gone };
        if !live.is(held.incarnation) {
            return Heartbeat::Superseded(live.record(now));
        }
        let ttl = live.record.ttl;
        let stays = live.record.info == *node && !self.shows_heartbeats;
        let revision = stays.then(|| live.record.revision.clone());
        Heartbeat::Renewed(self.put_node(node, ttl, revision, NodeEvent::Updated, now))
    }

    fn deregister(&mut self, held: &Registration) {
        if self.nodes.get(&held.node).is_some_and(|live| live.is(held.incarnation)) {
            self.remove_node(&held.node);
        }
    }

    fn evict(
        &mut self,
        node: &NodeId,
        incarnation: Incarnation,
        seen: &Revision,
        now: Instant,
    ) -> Evict {
        let Some(live) = self.nodes.get(node) else { return Evict::Gone };
        if !live.is(incarnation) || live.record.revision != *seen {
            return Evict::Alive(live.record(now));
        }
        self.remove_node(node);
        Evict::Evicted
    }

    fn node_records(&self, now: Instant) -> Vec<NodeRecord> {
        self.nodes.values().map(|live| live.record(now)).collect()
    }

    /// Lets a registration last for its TTL from now. Where its record stays as it is, it keeps the
    /// revision; else it gets a new one, and the watches an event.
    fn put_node(
        &mut self,
        node: &NodeInfo,
        ttl: Ttl,
        revision: Option<Revision>,
        event: fn(NodeRecord) -> NodeEvent,
        now: Instant,
    ) -> Registration {
        let is_rewritten = revision.is_none();
        let revision = revision.unwrap_or_else(|| self.next_revision());
        let live = LiveNode {
            record: NodeRecord::new(node.clone(), ttl, revision.clone()),
            expires: self.expiry(now, ttl.get()),
        };
        if is_rewritten {
            // An error only says that there is no listener.
            let _ = self.node_events.send(event(live.record(now)));
        }
        let after = Some(live.expires);
        let before = self.nodes.insert(node.id.clone(), live).map(|live| live.expires);
        self.set_expiry(Expiring::Node(node.id.clone()), before, after);
        Registration::new(node.id.clone(), node.incarnation, ttl, revision)
    }

    fn remove_node(&mut self, node: &NodeId) {
        if let Some(live) = self.nodes.remove(node) {
            self.set_expiry(Expiring::Node(node.clone()), Some(live.expires), None);
            let incarnation = live.record.info.incarnation;
            let _ = self.node_events.send(NodeEvent::Left { node: node.clone(), incarnation });
        }
    }

    /// Only where the time of its expiry is told.
    pub(super) fn move_node(&mut self, node: &NodeId, expires: Instant) {
        if let Some(live) = self.nodes.get_mut(node) {
            live.expires = expires;
        }
    }

    pub(super) fn expire_node(&mut self, node: &NodeId) {
        if let Some(live) = self.nodes.remove(node) {
            self.tell_expired(node, &live, true);
        }
    }

    /// Deletes a record without a word of why.
    pub(super) fn delete_node(&mut self, node: &NodeId) -> bool {
        let Some(live) = self.nodes.remove(node) else { return false };
        self.set_expiry(Expiring::Node(node.clone()), Some(live.expires), None);
        self.tell_expired(node, &live, false);
        true
    }

    fn tell_expired(&self, node: &NodeId, live: &LiveNode, judged: bool) {
        let (node, incarnation) = (node.clone(), live.record.info.incarnation);
        let _ = self.node_events.send(NodeEvent::Expired { node, incarnation, judged });
    }
}

impl LiveNode {
    fn record(&self, now: Instant) -> NodeRecord {
        let remaining = self.expires.saturating_duration_since(now);
        self.record.clone().with_may_expire_in(Some(remaining))
    }

    fn is(&self, incarnation: Incarnation) -> bool {
        self.record.info.incarnation == incarnation
    }
}

struct NodesTopic;

impl Topic for NodesTopic {
    type Event = NodeEvent;

    fn receiver(&self, state: &mut State) -> broadcast::Receiver<NodeEvent> {
        state.node_events.subscribe()
    }

    fn snapshot(&self, state: &State, now: Instant) -> NodeEvent {
        NodeEvent::Snapshot(state.node_records(now))
    }

    fn left(&self, _: &mut State) {}
}
