//! Registrations: one subject each, and every write of it a compare-and-set with a TTL.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use async_trait::async_trait;
use coord_core::kit::Op;
use coord_core::wire::{NodeRecordV1, Record};
use coord_core::{
    Discovery, Error, Evict, Heartbeat, Incarnation, NodeEvent, NodeId, NodeInfo, NodeRecord,
    Register, Registration, Replace, Result, Revision, Ttl,
};
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};

use crate::client::{Condition, Last, Outcome, Put, Topic, Update, What, subscribe};
use crate::keys::{Keys, Mark};
use crate::lease::READS_MAX;
use crate::{Handle, RACES_MAX, pause};

#[async_trait]
impl Discovery for Handle {
    async fn register(&self, node: &NodeInfo, ttl: Ttl, replace: Replace) -> Result<Register> {
        let op = Op::write("register", node.id.as_str());
        let ttl = self.info.guarantees.granted_ttl(ttl);
        let mut at = 0;
        for race in 0..RACES_MAX {
            pause(race).await;
            if let Some(registration) = self.write_node(op, node, ttl, at).await? {
                return Ok(Register::Registered(registration));
            }
            let (last, live) = self.live(op, &node.id).await?;
            match live {
                Some(live)
                    if live.info.incarnation != node.incarnation && replace == Replace::No =>
                {
                    return Ok(Register::Duplicate(self.observed_node(op, live, &last).await));
                }
                _ => at = last.sequence,
            }
        }
        Err(op.contended())
    }

    async fn heartbeat(&self, held: &Registration, node: &NodeInfo) -> Result<Heartbeat> {
        let op = Op::write("heartbeat", held.node.as_str());
        if node.id != held.node || node.incarnation != held.incarnation {
            let why = format!(
                "the record is of node {} incarnation {}, the registration is not",
                node.id, node.incarnation
            );
            return Err(Error::invalid("heartbeat", why).resource(&held.node));
        }
        let (mut at, mut ttl) = (sequence_of(held), held.ttl);
        for race in 0..RACES_MAX {
            pause(race).await;
            if let Some(at) = at
                && let Some(registration) = self.write_node(op, node, ttl, at).await?
            {
                return Ok(Heartbeat::Renewed(registration));
            }
            let (last, live) = self.live(op, &held.node).await?;
            let other = match live {
                Some(live) if live.info.incarnation == held.incarnation => {
                    (at, ttl) = (Some(last.sequence), live.ttl);
                    continue;
                }
                other => other,
            };
            // Or another bucket has taken the place of the one that it was in.
            Box::pin(self.client.look_at_identity(op)).await?;
            return Ok(other.map_or(Heartbeat::Gone, Heartbeat::Superseded));
        }
        Err(op.contended())
    }

    async fn deregister(&self, held: &Registration) -> Result<()> {
        let op = Op::write("deregister", held.node.as_str());
        let subject = self.keys.node(&held.node);
        let mut at = sequence_of(held);
        for race in 0..RACES_MAX {
            pause(race).await;
            if let Some(at) = at
                && let Outcome::Done(_) =
                    self.client.remove(op, &subject, at, held.ttl.get()).await?
            {
                return Ok(());
            }
            let (last, live) = self.live(op, &held.node).await?;
            if live.is_none_or(|live| live.info.incarnation != held.incarnation) {
                return Ok(());
            }
            at = Some(last.sequence);
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
        for race in 0..RACES_MAX {
            pause(race).await;
            let (last, live) = self.live(op, node).await?;
            let Some(live) = live else { return Ok(Evict::Gone) };
            if live.info.incarnation != incarnation || live.revision != *seen {
                return Ok(Evict::Alive(live));
            }
            let subject = self.keys.node(node);
            let removed = self.client.remove(op, &subject, last.sequence, live.ttl.get()).await?;
            if let Outcome::Done(_) = removed {
                return Ok(Evict::Evicted);
            }
        }
        Err(op.contended())
    }

    async fn nodes(&self) -> Result<Vec<NodeRecord>> {
        let op = Op::read("nodes", &self.info.target);
        let filter = self.keys.nodes();
        let subjects = self.client.subjects(op, &filter).await?;
        let reads = subjects.into_iter().map(|subject| async move {
            let last = self.client.get(op, &subject).await?;
            let Some(value) = &last.value else { return Ok(None) };
            let record = self.read_node(op, &subject, value, last.sequence)?;
            Ok(Some(self.observed_node(op, record, &last).await))
        });
        let nodes: BTreeMap<NodeId, NodeRecord> = stream::iter(reads)
            .buffer_unordered(READS_MAX)
            .try_filter_map(|node| async { Ok(node.map(|node| (node.info.id.clone(), node))) })
            .try_collect()
            .await?;
        Ok(nodes.into_values().collect())
    }

    fn watch(&self) -> BoxStream<'static, Result<NodeEvent>> {
        let topic = NodesTopic {
            filter: self.keys.nodes(),
            keys: self.keys.clone(),
            nodes: HashMap::new(),
        };
        subscribe(&self.client, &self.info.target, topic)
    }
}

impl Handle {
    /// Writes a node's record over the message with this sequence, to live for its TTL; none if
    /// another one is there.
    async fn write_node(
        &self,
        op: Op<'_>,
        node: &NodeInfo,
        ttl: Ttl,
        at: u64,
    ) -> Result<Option<Registration>> {
        let record = NodeRecordV1::new(node.clone(), ttl);
        let put = Put {
            subject: &self.keys.node(&node.id),
            value: self.fitting(op, record.encode()?)?,
            ttl: Some(ttl.get()),
            condition: Condition::At(at),
        };
        Ok(match self.client.put(op, put).await? {
            Outcome::Done(sequence) => {
                let revision = revision(node.incarnation, sequence);
                Some(Registration::new(node.id.clone(), node.incarnation, ttl, revision))
            }
            _ => None,
        })
    }

    /// A node's last message, and the registration that lives.
    async fn live(&self, op: Op<'_>, node: &NodeId) -> Result<(Last, Option<NodeRecord>)> {
        let subject = self.keys.node(node);
        let last = self.client.get(op, &subject).await?;
        let read = |value| self.read_node(op, &subject, value, last.sequence);
        let live = last.value.as_deref().map(read).transpose()?;
        Ok((last, live))
    }

    /// A registration as others see it, with how long it has still to live.
    async fn observed_node(&self, op: Op<'_>, mut record: NodeRecord, last: &Last) -> NodeRecord {
        let subject = self.keys.node(&record.info.id);
        let (standing, at) = self.client.observe(op, &subject, last, record.ttl.get()).await;
        record.revision = revision(record.info.incarnation, at);
        record.with_may_expire_in(standing.map(|standing| standing.left))
    }

    fn read_node(
        &self,
        op: Op<'_>,
        subject: &str,
        value: &[u8],
        sequence: u64,
    ) -> Result<NodeRecord> {
        read_node(op, &self.keys, subject, value, sequence)
    }
}

fn read_node(
    op: Op<'_>,
    keys: &Keys,
    subject: &str,
    value: &[u8],
    sequence: u64,
) -> Result<NodeRecord> {
    let record = NodeRecordV1::decode(value).map_err(|error| op.corrupt(error))?;
    if keys.node(&record.node.id) != subject {
        let why = format!("the record is that of another node subject={subject}");
        return Err(Error::corrupt(op.name, why).resource(&record.node.id));
    }
    let revision = revision(record.node.incarnation, sequence);
    Ok(record.into_record(revision))
}

fn revision(incarnation: Incarnation, sequence: u64) -> Revision {
    Mark { sequence, whose: incarnation.as_u128() }.revision()
}

/// The sequence of the last write of this registration that the caller knows of.
fn sequence_of(held: &Registration) -> Option<u64> {
    Mark::sequence_of(&held.revision, held.incarnation.as_u128())
}

struct NodesTopic {
    filter: String,
    keys: Keys,
    /// The live ones, by their subjects.
    nodes: HashMap<String, NodeRecord>,
}

impl Topic for NodesTopic {
    type Event = NodeEvent;

    fn filter(&self) -> String {
        self.filter.clone()
    }

    async fn apply(
        &mut self,
        update: Update,
        events: &mut VecDeque<NodeEvent>,
    ) -> Result<Option<Duration>> {
        let value = match update.what {
            What::Put(value) => value,
            gone => {
                if let Some(record) = self.nodes.remove(&update.subject) {
                    let (node, incarnation) = (record.info.id, record.info.incarnation);
                    events.push_back(match gone {
                        What::Removed => NodeEvent::Left { node, incarnation },
                        other => {
                            let judged = matches!(other, What::Expired);
                            NodeEvent::Expired { node, incarnation, judged }
                        }
                    });
                }
                return Ok(None);
            }
        };
        let op = Op::read("watch", &update.subject);
        let record = read_node(op, &self.keys, &update.subject, &value, update.sequence)?;
        let ttl = record.ttl;
        // A plain heartbeat shows as well: expiry goes by the server's wall clock, so observers
        // count for themselves since when nothing was heard, and an eviction has to show the newest
        // revision.
        match self.nodes.insert(update.subject, record.clone()) {
            Some(shown) if shown.info.incarnation == record.info.incarnation => {
                events.push_back(NodeEvent::Updated(record));
            }
            _ => events.push_back(NodeEvent::Joined(record)),
        }
        Ok(Some(ttl.get()))
    }

    async fn snapshot(&mut self) -> Result<NodeEvent> {
        let mut nodes: Vec<_> = self.nodes.values().cloned().collect();
        nodes.sort_unstable_by(|a, b| a.info.id.cmp(&b.info.id));
        Ok(NodeEvent::Snapshot(nodes))
    }
}
