//! Nodes: a record each in one hash, and its end, by the server's clock, in a sorted set beside it.
//!
//! A watching process ends what has run out; all others take what has run out for gone already.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_core::kit::Op;
use coord_core::wire::{NodeRecordV1, Record};
use coord_core::{
    Discovery, Error, Evict, Heartbeat, Incarnation, NodeEvent, NodeId, NodeInfo, NodeRecord,
    Register, Registration, Replace, Result, Revision, Ttl,
};
use futures::stream::BoxStream;

use crate::client::{Hint, Reply, Subject, Topic, subscribe};
use crate::error::strange;
use crate::keys::{mark_of, revision};
use crate::lease::{micros, remaining};
use crate::scripts::{HEARTBEAT, LEAVE, NODE, NODES, REGISTER};
use crate::{Handle, VALUE_BYTES_MAX};

#[async_trait]
impl Discovery for Handle {
    async fn register(&self, node: &NodeInfo, ttl: Ttl, replace: Replace) -> Result<Register> {
        let op = Op::write("register", node.id.as_str());
        let ttl = self.info.guarantees.granted_ttl(ttl);
        let (record, incarnation) = (encode(op, node, ttl)?, node.incarnation.to_string());
        let lasts = micros(ttl);
        let replaces: &[u8] = if replace == Replace::Yes { b"1" } else { b"0" };
        let arguments = [
            node.id.as_str().as_bytes(),
            &record,
            incarnation.as_bytes(),
            lasts.as_bytes(),
            replaces,
        ];
        let reply = self.client.run(op, &REGISTER, &arguments).await?;
        match reply.outcome() {
            "registered" => Ok(Register::Registered(registration(op, node, ttl, &reply)?)),
            "duplicate" => Ok(Register::Duplicate(node_record(op, &node.id, &reply, 1)?)),
            other => Err(strange(op, other)),
        }
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
        let (record, incarnation) = (encode(op, node, held.ttl)?, held.incarnation.to_string());
        let lasts = micros(held.ttl);
        let arguments =
            [held.node.as_str().as_bytes(), &record, incarnation.as_bytes(), lasts.as_bytes()];
        let reply = self.client.run(op, &HEARTBEAT, &arguments).await?;
        match reply.outcome() {
            "renewed" => Ok(Heartbeat::Renewed(registration(op, node, held.ttl, &reply)?)),
            "gone" => Ok(Heartbeat::Gone),
            "superseded" => Ok(Heartbeat::Superseded(node_record(op, &held.node, &reply, 1)?)),
            other => Err(strange(op, other)),
        }
    }

    async fn deregister(&self, held: &Registration) -> Result<()> {
        let op = Op::write("deregister", held.node.as_str());
        self.leave(op, &held.node, held.incarnation, "").await.map(drop)
    }

    async fn evict(
        &self,
        node: &NodeId,
        incarnation: Incarnation,
        seen: &Revision,
    ) -> Result<Evict> {
        let op = Op::write("evict", node.as_str());
        // One that this backend did not make is nobody's.
        let seen = seen.as_u64().unwrap_or(0).to_string();
        let reply = self.leave(op, node, incarnation, &seen).await?;
        match reply.outcome() {
            "removed" => Ok(Evict::Evicted),
            "gone" => Ok(Evict::Gone),
            "alive" => Ok(Evict::Alive(node_record(op, node, &reply, 1)?)),
            other => Err(strange(op, other)),
        }
    }

    async fn nodes(&self) -> Result<Vec<NodeRecord>> {
        let op = Op::read("nodes", self.info.cluster.as_str());
        self.read_nodes(op).await
    }

    fn watch(&self) -> BoxStream<'static, Result<NodeEvent>> {
        let topic = NodesTopic { handle: self.clone(), known: BTreeMap::new() };
        subscribe(&self.client, self.info.cluster.as_str(), topic)
    }
}

impl Handle {
    async fn leave(
        &self,
        op: Op<'_>,
        node: &NodeId,
        incarnation: Incarnation,
        seen: &str,
    ) -> Result<Reply> {
        let incarnation = incarnation.to_string();
        let arguments = [node.as_str().as_bytes(), incarnation.as_bytes(), seen.as_bytes()];
        self.client.run(op, &LEAVE, &arguments).await
    }

    /// All nodes, by their ids.
    async fn read_nodes(&self, op: Op<'_>) -> Result<Vec<NodeRecord>> {
        let reply = self.client.run(op, &NODES, &[]).await?;
        let mut records = Vec::with_capacity(reply.items().len() / 3);
        for place in (0..reply.items().len()).step_by(3) {
            let id = NodeId::try_from(reply.text(place).to_owned());
            let id = id.map_err(|error| op.corrupt(error))?;
            records.push(node_record(op, &id, &reply, place + 1)?);
        }
        records.sort_by(|one, two| one.info.id.cmp(&two.info.id));
        Ok(records)
    }
}

fn encode(op: Op<'_>, node: &NodeInfo, ttl: Ttl) -> Result<Bytes> {
    let value = NodeRecordV1::new(node.clone(), ttl).encode()?;
    if value.len() > VALUE_BYTES_MAX {
        let why = format!("a record of {} bytes; at most {VALUE_BYTES_MAX}", value.len());
        return Err(Error::invalid(op.name, why).resource(op.resource));
    }
    Ok(value)
}

fn registration(op: Op<'_>, node: &NodeInfo, ttl: Ttl, reply: &Reply) -> Result<Registration> {
    let mark = reply.text(1).parse().map_err(|_| strange(op, "no mark"))?;
    Ok(Registration::new(node.id.clone(), node.incarnation, ttl, revision(mark)))
}

fn node_record(op: Op<'_>, id: &NodeId, reply: &Reply, place: usize) -> Result<NodeRecord> {
    let bytes = reply.get(place);
    let record = NodeRecordV1::decode(bytes).map_err(|error| op.corrupt(error))?;
    if record.node.id != *id {
        return Err(op.misplaced("field", id.as_str()));
    }
    let remaining = remaining(reply, place + 1, record.ttl_ms);
    let mark = mark_of(op, bytes)?;
    Ok(record.into_record(revision(mark)).with_may_expire_in(remaining))
}

struct NodesTopic {
    handle: Handle,
    /// The nodes that were shown.
    known: BTreeMap<NodeId, (Incarnation, Revision)>,
}

impl NodesTopic {
    /// What stands there now: of the nodes that the hints name, or of all.
    async fn read(&self, hints: &[Hint]) -> Result<BTreeMap<NodeId, Option<NodeRecord>>> {
        let op = Op::read("watch", self.handle.info.cluster.as_str());
        if hints.is_empty() {
            let records = self.handle.read_nodes(op).await?;
            let gone = self.known.keys().map(|id| (id.clone(), None));
            let mut found: BTreeMap<_, _> = gone.collect();
            found.extend(records.into_iter().map(|record| (record.info.id.clone(), Some(record))));
            return Ok(found);
        }
        let mut ids: Vec<NodeId> =
            hints.iter().filter_map(|hint| NodeId::try_from(hint.name.clone()).ok()).collect();
        ids.sort();
        ids.dedup();
        let names: Vec<&[u8]> = ids.iter().map(|id| id.as_str().as_bytes()).collect();
        let reply = self.handle.client.run(op, &NODE, &names).await?;
        let mut found = BTreeMap::new();
        for (index, id) in ids.into_iter().enumerate() {
            let place = index * 2;
            let record = match reply.some(place) {
                None => None,
                Some(_) => Some(node_record(op, &id, &reply, place)?),
            };
            found.insert(id, record);
        }
        Ok(found)
    }

    fn show(
        &mut self,
        id: NodeId,
        record: Option<NodeRecord>,
        hints: &[Hint],
        events: &mut VecDeque<NodeEvent>,
    ) {
        let now = record.as_ref().map(|record| (record.info.incarnation, record.revision.clone()));
        let before = match now.clone() {
            Some(now) => self.known.insert(id.clone(), now),
            None => self.known.remove(&id),
        };
        if before == now {
            return;
        }
        let is_same = match (&before, &now) {
            (Some((before, _)), Some((now, _))) => before == now,
            _ => false,
        };
        let ended = |what: &str, incarnation: Incarnation| {
            let incarnation = incarnation.to_string();
            let about = |hint: &Hint| hint.name == id.as_str() && hint.about == incarnation;
            hints.iter().any(|hint| hint.what == what && about(hint))
        };
        if let Some((incarnation, _)) = before.filter(|_| !is_same) {
            if ended("left", incarnation) {
                events.push_back(NodeEvent::Left { node: id.clone(), incarnation });
            } else {
                let judged = ended("expired", incarnation);
                if judged || record.is_none() {
                    let node = id.clone();
                    events.push_back(NodeEvent::Expired { node, incarnation, judged });
                }
            }
        }
        match record {
            Some(record) if is_same => events.push_back(NodeEvent::Updated(record)),
            Some(record) => events.push_back(NodeEvent::Joined(record)),
            None => {}
        }
    }
}

impl Topic for NodesTopic {
    type Event = NodeEvent;

    const READ_AGAIN: Duration = Duration::from_secs(30);

    fn concerns(&self, hint: &Hint) -> bool {
        hint.subject == Subject::Node
    }

    async fn snapshot(&mut self) -> Result<NodeEvent> {
        let op = Op::read("watch", self.handle.info.cluster.as_str());
        let records = self.handle.read_nodes(op).await?;
        let known = |record: &NodeRecord| {
            (record.info.id.clone(), (record.info.incarnation, record.revision.clone()))
        };
        self.known = records.iter().map(known).collect();
        Ok(NodeEvent::Snapshot(records))
    }

    async fn changed(&mut self, hints: &[Hint], events: &mut VecDeque<NodeEvent>) -> Result<()> {
        for (id, record) in self.read(hints).await? {
            self.show(id, record, hints, events);
        }
        Ok(())
    }
}
