//! Nodes: one key each, bound to an etcd lease of its own that ends the registration.
//!
//! A deleted key does not say why. A deregistration and an eviction put a note beside it in the same
//! transaction. A deletion without a note is an expiry if the node's etcd lease is gone as well; if the lease
//! lives on, the key was deleted by another program, and the node may live. The note dies with the node's etcd
//! lease.

use std::collections::{HashMap, VecDeque};

use async_trait::async_trait;
use coord_core::kit::Op;
use coord_core::wire::{NodeRecordV1, Record};
use coord_core::{
    Discovery, Error, Evict, Heartbeat, Incarnation, NodeEvent, NodeId, NodeInfo, NodeRecord,
    Register, Registration, Replace, Result, Revision, Ttl,
};
use futures::stream::BoxStream;

use crate::client::{Batch, Change, Condition, Entry, Kept, Step, Topic, subscribe};
use crate::error::Problem;
use crate::keys::{Mark, Range};
use crate::{Handle, ROUNDS, VALUE_BYTES_MAX};

#[async_trait]
impl Discovery for Handle {
    async fn register(&self, node: &NodeInfo, ttl: Ttl, replace: Replace) -> Result<Register> {
        let op = Op::write("register", node.id.as_str());
        let key = self.keys.node(&node.id);
        for _ in 0..ROUNDS {
            let held = match self.client.get(op, key.clone()).await? {
                None => self.enrol(op, node, ttl, None).await?,
                Some(entry) => {
                    let found = node_of(op, &entry)?;
                    let is_own = found.node.incarnation == node.incarnation;
                    if is_own {
                        self.register_again(op, node, ttl, &entry, &found).await?
                    } else if replace == Replace::Yes {
                        self.enrol(op, node, ttl, Some(&entry)).await?
                    } else {
                        let record = self.node_observed(op, found, entry.mark()).await;
                        return Ok(Register::Duplicate(record));
                    }
                }
            };
            if let Some(held) = held {
                return Ok(Register::Registered(held));
            }
        }
        Err(op.contended())
    }

    async fn heartbeat(&self, held: &Registration, node: &NodeInfo) -> Result<Heartbeat> {
        let op = Op::write("heartbeat", held.node.as_str());
        if node.id != held.node || node.incarnation != held.incarnation {
            let (id, incarnation) = (&node.id, node.incarnation);
            let why = format!(
                "the record is of node {id} incarnation {incarnation}, the registration is not"
            );
            return Err(Error::invalid(op.name, why).resource(op.resource));
        }
        let key = self.keys.node(&held.node);
        let mut lease = Mark::of(&held.revision).map_or(0, |mark| mark.lease);
        for _ in 0..ROUNDS {
            let (kept, entry) = self.keep(op, lease, &key).await?;
            let Some(entry) = entry else { return Ok(Heartbeat::Gone) };
            let found = node_of(op, &entry)?;
            if found.node.incarnation != held.incarnation {
                let record = self.node_observed(op, found, entry.mark()).await;
                return Ok(Heartbeat::Superseded(record));
            }
            if entry.lease == lease && kept == Kept::Alive {
                let written = self.rewrite(op, node, &entry, &found).await?;
                if let Some(held) = written {
                    return Ok(Heartbeat::Renewed(held));
                }
            }
            // It was bound to another etcd lease meanwhile, or its end has still to be seen.
            lease = entry.lease;
        }
        Err(op.contended())
    }

    async fn deregister(&self, held: &Registration) -> Result<()> {
        let op = Op::write("deregister", held.node.as_str());
        let key = self.keys.node(&held.node);
        for _ in 0..ROUNDS {
            let Some(entry) = self.client.get(op, key.clone()).await? else { return Ok(()) };
            if node_of(op, &entry)?.node.incarnation != held.incarnation {
                return Ok(());
            }
            if self.remove(op, &held.node, held.incarnation, &entry).await? {
                return Ok(());
            }
        }
        Err(op.contended())
    }

    async fn evict(
        &self,
        node: &NodeId,
        incarnation: Incarnation,
        seen: &Revision,
    ) -> Result<Evict> {
        let op = Op::write("evict", node.as_str());
        for _ in 0..ROUNDS {
            let Some(entry) = self.client.get(op, self.keys.node(node)).await? else {
                return Ok(Evict::Gone);
            };
            let found = node_of(op, &entry)?;
            if found.node.incarnation != incarnation || entry.mark().revision() != *seen {
                let record = self.node_observed(op, found, entry.mark()).await;
                return Ok(Evict::Alive(record));
            }
            if self.remove(op, node, incarnation, &entry).await? {
                return Ok(Evict::Evicted);
            }
        }
        Err(op.contended())
    }

    async fn nodes(&self) -> Result<Vec<NodeRecord>> {
        let op = Op::read("nodes", self.info.cluster.as_str());
        let (entries, _) = self.client.list(op, self.keys.nodes(), None).await?;
        entries.iter().map(|entry| node_record(op, entry)).collect()
    }

    fn watch(&self) -> BoxStream<'static, Result<NodeEvent>> {
        let topic = NodesTopic { handle: self.clone(), known: HashMap::new() };
        subscribe(&self.client, self.info.cluster.as_str(), topic)
    }
}

impl Handle {
    /// Registers under an etcd lease of its own, in the place of the record `over` if there is one. None if
    /// another process was faster.
    async fn enrol(
        &self,
        op: Op<'_>,
        node: &NodeInfo,
        ttl: Ttl,
        over: Option<&Entry>,
    ) -> Result<Option<Registration>> {
        // A record that is too large is refused before anything is done.
        encode(op, node, ttl)?;
        let (lease, ttl) = self.granted(op, ttl).await?;
        let written = self.put_node(op, node, ttl, lease, over).await?;
        if written.is_none() {
            self.client.discard(lease);
        } else if let Some(over) = over {
            self.client.discard(over.lease);
        }
        Ok(written)
    }

    /// Registers an incarnation that is registered; none if that changed meanwhile.
    async fn register_again(
        &self,
        op: Op<'_>,
        node: &NodeInfo,
        ttl: Ttl,
        entry: &Entry,
        found: &NodeRecordV1,
    ) -> Result<Option<Registration>> {
        if found.ttl_ms != self.info.guarantees.granted_ttl(ttl) {
            return self.enrol(op, node, ttl, Some(entry)).await;
        }
        match self.client.keep_alive(op, entry.lease).await? {
            Kept::Alive => self.rewrite(op, node, entry, found).await,
            Kept::Gone => Ok(None),
        }
    }

    /// Writes the node's record if it has changed; none if another process wrote meanwhile.
    async fn rewrite(
        &self,
        op: Op<'_>,
        node: &NodeInfo,
        entry: &Entry,
        found: &NodeRecordV1,
    ) -> Result<Option<Registration>> {
        if found.node == *node {
            let (id, revision) = (node.id.clone(), entry.mark().revision());
            return Ok(Some(Registration::new(id, node.incarnation, found.ttl_ms, revision)));
        }
        self.put_node(op, node, found.ttl_ms, entry.lease, Some(entry)).await
    }

    async fn put_node(
        &self,
        op: Op<'_>,
        node: &NodeInfo,
        ttl: Ttl,
        lease: i64,
        over: Option<&Entry>,
    ) -> Result<Option<Registration>> {
        let key = self.keys.node(&node.id);
        let when = match over {
            None => Condition::Absent(key.clone()),
            Some(entry) => Condition::At(key.clone(), entry.modified),
        };
        let put = Step::Put { key, value: encode(op, node, ttl)?, lease };
        let outcome = match self.client.transact(op, &[when], &[put], &[]).await {
            Err(Problem::LeaseGone) => return Ok(None),
            outcome => outcome?,
        };
        let revision = Mark { modified: outcome.revision, lease }.revision();
        let held = Registration::new(node.id.clone(), node.incarnation, ttl, revision);
        Ok(outcome.succeeded.then_some(held))
    }

    /// Ends a registration on purpose, if its record is still the one that was read.
    async fn remove(
        &self,
        op: Op<'_>,
        node: &NodeId,
        incarnation: Incarnation,
        entry: &Entry,
    ) -> Result<bool> {
        let when = [Condition::At(entry.key.clone(), entry.modified)];
        // The watches take the note for this deletion because both have one revision.
        let note = Step::Put {
            key: self.keys.node_left(node),
            value: incarnation.to_string().into(),
            lease: entry.lease,
        };
        let then = [note, Step::Delete(entry.key.clone())];
        match self.client.transact(op, &when, &then, &[]).await {
            // The registration has run out, and its key goes with its etcd lease.
            Err(Problem::LeaseGone) => Ok(false),
            outcome => {
                let removed = outcome?.succeeded;
                if removed {
                    self.client.discard(entry.lease);
                }
                Ok(removed)
            }
        }
    }

    /// A record of another's, with the time that it has still to live if that can be told.
    async fn node_observed(&self, op: Op<'_>, record: NodeRecordV1, mark: Mark) -> NodeRecord {
        let remaining = self.client.time_to_live(op, mark.lease).await.ok();
        let remaining = remaining.map(|remaining| remaining.min(record.ttl_ms.get()));
        record.into_record(mark.revision()).with_may_expire_in(remaining)
    }
}

fn encode(op: Op<'_>, node: &NodeInfo, ttl: Ttl) -> Result<bytes::Bytes> {
    let value = NodeRecordV1::new(node.clone(), ttl).encode()?;
    if value.len() > VALUE_BYTES_MAX {
        let why = format!("a record of {} bytes; at most {VALUE_BYTES_MAX}", value.len());
        return Err(Error::invalid(op.name, why).resource(op.resource));
    }
    Ok(value)
}

fn node_of(op: Op<'_>, entry: &Entry) -> Result<NodeRecordV1> {
    let record = NodeRecordV1::decode(&entry.value).map_err(|error| op.corrupt(error))?;
    if !entry.key.ends_with(&format!("/{}", record.node.id)) {
        return Err(op.misplaced("key", &entry.key));
    }
    Ok(record)
}

fn node_record(op: Op<'_>, entry: &Entry) -> Result<NodeRecord> {
    Ok(node_of(op, entry)?.into_record(entry.mark().revision()))
}

struct NodesTopic {
    handle: Handle,
    /// The nodes that are there, by their keys.
    known: HashMap<String, Known>,
}

/// A node that was shown.
struct Known {
    node: NodeId,
    incarnation: Incarnation,
    /// The etcd lease that its key is bound to.
    lease: i64,
}

impl Known {
    fn of(record: &NodeRecord, entry: &Entry) -> Self {
        let (node, incarnation) = (record.info.id.clone(), record.info.incarnation);
        Self { node, incarnation, lease: entry.lease }
    }
}

impl Topic for NodesTopic {
    type Event = NodeEvent;

    fn range(&self) -> Range {
        self.handle.keys.nodes_and_left()
    }

    async fn snapshot(&mut self) -> Result<(NodeEvent, i64), Problem> {
        let op = Op::read("watch", self.handle.info.cluster.as_str());
        let range = self.handle.keys.nodes();
        let (entries, revision) = self.handle.client.list(op, range, None).await?;
        self.known.clear();
        let mut records = Vec::with_capacity(entries.len());
        for entry in entries {
            let record = node_record(op, &entry)?;
            let known = Known::of(&record, &entry);
            self.known.insert(entry.key, known);
            records.push(record);
        }
        Ok((NodeEvent::Snapshot(records), revision))
    }

    async fn changed(
        &mut self,
        batch: Batch,
        events: &mut VecDeque<NodeEvent>,
    ) -> Result<(), Problem> {
        let op = Op::read("watch", self.handle.info.cluster.as_str());
        let nodes = self.handle.keys.nodes();
        let is_node = |key: &str| key.starts_with(&nodes.from);
        // A note stands before the deletion that it is about, in the same batch.
        let mut notes = HashMap::new();
        let mut can_ask = true;
        for change in batch {
            match change {
                Change::Put(entry) if is_node(&entry.key) => {
                    let record = node_record(op, &entry)?;
                    let known = Known::of(&record, &entry);
                    let incarnation = known.incarnation;
                    let before = self.known.insert(entry.key, known);
                    let is_update = before.is_some_and(|before| before.incarnation == incarnation);
                    events.push_back(match is_update {
                        true => NodeEvent::Updated(record),
                        false => NodeEvent::Joined(record),
                    });
                }
                Change::Put(note) => {
                    notes.insert(note.modified, note.value);
                }
                Change::Deleted { key, modified } => {
                    // What is not known is a note that is gone.
                    let Some(Known { node, incarnation, lease }) = self.known.remove(&key) else {
                        continue;
                    };
                    let text = incarnation.to_string();
                    if notes.get(&modified).is_some_and(|note| note == text.as_bytes()) {
                        events.push_back(NodeEvent::Left { node, incarnation });
                        continue;
                    }
                    // What can't be found out is not judged, and then the rest is not asked for either.
                    let ended = match can_ask {
                        true => self.handle.client.has_ended(op, lease).await.ok(),
                        false => None,
                    };
                    can_ask = ended.is_some();
                    let judged = ended.unwrap_or(false);
                    events.push_back(NodeEvent::Expired { node, incarnation, judged });
                }
            }
        }
        Ok(())
    }
}
