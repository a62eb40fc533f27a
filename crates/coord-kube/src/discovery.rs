//! Registrations: a Lease object each, as the kubelets have one, which goes with its registration.
//!
//! A heartbeat rewrites the object, so that every observer sees it change. An object that stays unchanged for
//! its TTL is taken for expired by each observer for itself, and stays until a node evicts it or registers over
//! it.
//!
//! A deregistration and an eviction write a farewell into the object, and then delete it. So a watch can tell
//! them from an object that another program deleted, whose node may live.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::Duration;

use async_trait::async_trait;
use coord_core::wire::{NodeRecordV1, Record};
use coord_core::{
    Discovery, Error, ErrorKind, Evict, Heartbeat, Incarnation, Moment, NodeEvent, NodeId,
    NodeInfo, NodeRecord, Register, Registration, Replace, Result, Revision, Standing, Ttl,
};
use futures::stream::BoxStream;

use crate::client::{Client, List, Object, Resource, Selector, Topic, subscribe};
use crate::error::Op;
use crate::keys::{FAREWELL, Keys, Kind, Mark, RECORD};
use crate::lease::{later_than, seconds};
use crate::{Handle, RACES_MAX, Seen, pause};

/// The largest record: what the API server takes as annotations in all is 256 KiB.
const RECORD_BYTES_MAX: usize = 240 << 10;
/// After how many TTLs a watching process deletes the object of a node that is gone.
const TTLS_MAX: u32 = 10;

#[async_trait]
impl Discovery for Handle {
    async fn register(&self, node: &NodeInfo, ttl: Ttl, replace: Replace) -> Result<Register> {
        let op = Op::write("register", node.id.as_str());
        let ttl = self.info.guarantees.granted_ttl(ttl);
        let record = encoded(op, node, ttl)?;
        let name = self.keys.node(&node.id);
        for race in 0..RACES_MAX {
            pause(race).await;
            let written = match self.live(op, &name).await? {
                Found::Nothing => {
                    let blank = Object::new(Resource::Leases, &self.keys, Kind::Node, &name);
                    let object = self.registered(blank, node, ttl, &record);
                    self.client.create(op, Resource::Leases, &object).await?
                }
                Found::Alive(_, live)
                    if live.info.incarnation != node.incarnation && replace == Replace::No =>
                {
                    return Ok(Register::Duplicate(live));
                }
                Found::Alive(object, _) | Found::Expired(object, _) | Found::Ended(object) => {
                    let object = self.registered(object, node, ttl, &record);
                    self.client.replace(op, Resource::Leases, &object).await?
                }
            };
            if let Some(written) = written {
                return Ok(Register::Registered(self.registration(node, ttl, &written)));
            }
        }
        Err(op.contended())
    }

    async fn heartbeat(&self, held: &Registration, node: &NodeInfo) -> Result<Heartbeat> {
        let op = Op::write("heartbeat", held.node.as_str()).within(held.ttl);
        if node.id != held.node || node.incarnation != held.incarnation {
            let why = format!(
                "the record is of node {} incarnation {}, the registration is not",
                node.id, node.incarnation
            );
            return Err(Error::invalid("heartbeat", why).resource(&held.node));
        }
        let name = self.keys.node(&held.node);
        let is_own = |object: &Object| is_of(object, &held.revision, held.incarnation);
        let mut known = self.nodes.own(&name).filter(is_own);
        let mut ttl = held.ttl;
        for race in 0..RACES_MAX {
            pause(race).await;
            let object = match known.take() {
                Some(object) => object,
                None => match self.live(op, &name).await? {
                    Found::Nothing | Found::Ended(_) => return Ok(Heartbeat::Gone),
                    Found::Alive(_, live) if live.info.incarnation != held.incarnation => {
                        self.nodes.disown(&name);
                        return Ok(Heartbeat::Superseded(live));
                    }
                    Found::Expired(..) => {
                        self.nodes.disown(&name);
                        return Ok(Heartbeat::Gone);
                    }
                    Found::Alive(object, live) => {
                        ttl = live.ttl;
                        object
                    }
                },
            };
            let record = encoded(op, node, ttl)?;
            let object = self.renewed(object, ttl, &record);
            if let Some(written) = self.client.replace(op, Resource::Leases, &object).await? {
                return Ok(Heartbeat::Renewed(self.registration(node, ttl, &written)));
            }
        }
        Err(op.contended())
    }

    async fn deregister(&self, held: &Registration) -> Result<()> {
        let op = Op::write("deregister", held.node.as_str());
        let name = self.keys.node(&held.node);
        let is_own = |object: &Object| is_of(object, &held.revision, held.incarnation);
        let mut known = self.nodes.own(&name).filter(is_own);
        for race in 0..RACES_MAX {
            pause(race).await;
            let object = match known.take() {
                Some(object) => object,
                None => match self.live(op, &name).await? {
                    Found::Nothing => return Ok(()),
                    Found::Ended(object) => {
                        self.delete_ended(op, &object).await;
                        return Ok(());
                    }
                    // Also what has run out is in the way of nobody once it is gone.
                    Found::Alive(object, NodeRecord { info: NodeInfo { incarnation, .. }, .. })
                    | Found::Expired(object, incarnation) => {
                        if incarnation != held.incarnation {
                            return Ok(());
                        }
                        object
                    }
                },
            };
            if self.end(op, object, held.incarnation).await? {
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
        let name = self.keys.node(node);
        for race in 0..RACES_MAX {
            pause(race).await;
            let asked = self.client.now();
            let Some(object) = self.client.get(op, Resource::Leases, &name).await? else {
                return Ok(Evict::Gone);
            };
            let record = read_node(op, &self.keys, &object)?;
            if is_ended(&object, record.info.incarnation) {
                self.delete_ended(op, &object).await;
                return Ok(Evict::Gone);
            }
            if !is_of(&object, seen, incarnation) || record.info.incarnation != incarnation {
                // Written since, so it is alive, whatever became of that.
                let record = seen_record(&self.nodes, &object, record, asked, self.client.now());
                return Ok(Evict::Alive(record));
            }
            if self.end(op, object, incarnation).await? {
                return Ok(Evict::Evicted);
            }
        }
        Err(op.contended())
    }

    async fn nodes(&self) -> Result<Vec<NodeRecord>> {
        let op = Op::read("nodes", &self.info.target);
        let list = self.client.list(op, Resource::Leases, &self.node_selector()).await?;
        let mut nodes = BTreeMap::new();
        for object in &list.objects {
            let record = read_node(op, &self.keys, object)?;
            if is_ended(object, record.info.incarnation) {
                continue;
            }
            let record = seen_record(&self.nodes, object, record, list.asked, list.answered);
            if !is_expired(&record) {
                nodes.insert(record.info.id.clone(), record);
            }
        }
        self.nodes.only(&list.objects);
        Ok(nodes.into_values().collect())
    }

    fn watch(&self) -> BoxStream<'static, Result<NodeEvent>> {
        let topic = NodesTopic {
            selector: self.node_selector(),
            keys: self.keys.clone(),
            client: self.client.clone(),
            seen: self.nodes.clone(),
            nodes: HashMap::new(),
            lingering: HashMap::new(),
        };
        subscribe(&self.client, &self.info.target, topic)
    }
}

/// What stands under a node's id.
enum Found {
    Nothing,
    Alive(Object, NodeRecord),
    /// This observer has seen it unchanged for its TTL.
    Expired(Object, Incarnation),
    /// A registration that is over, whose object is still there.
    Ended(Object),
}

impl Handle {
    fn node_selector(&self) -> Selector {
        Selector::Kind { cluster: self.keys.cluster().to_owned(), kind: Kind::Node }
    }

    async fn live(&self, op: Op<'_>, name: &str) -> Result<Found> {
        let asked = self.client.now();
        let Some(object) = self.client.get(op, Resource::Leases, name).await? else {
            self.nodes.forget(name);
            return Ok(Found::Nothing);
        };
        let record = read_node(op, &self.keys, &object)?;
        if is_ended(&object, record.info.incarnation) {
            self.nodes.forget(name);
            return Ok(Found::Ended(object));
        }
        let record = seen_record(&self.nodes, &object, record, asked, self.client.now());
        Ok(match is_expired(&record) {
            true => Found::Expired(object, record.info.incarnation),
            false => Found::Alive(object, record),
        })
    }

    /// Ends a registration: with a farewell, and then without its object. False if it was written
    /// since it was read.
    async fn end(&self, op: Op<'_>, mut object: Object, incarnation: Incarnation) -> Result<bool> {
        object.set_annotation(FAREWELL, incarnation.to_string());
        let Some(ended) = self.client.replace(op, Resource::Leases, &object).await? else {
            return Ok(false);
        };
        self.nodes.forget(ended.name());
        self.delete_ended(op, &ended).await;
        Ok(true)
    }

    /// Deletes the object of a registration that is over. If that fails, a watching process does it later.
    async fn delete_ended(&self, op: Op<'_>, object: &Object) {
        let (name, uid, version) = (object.name(), object.uid(), Some(object.version()));
        let deleted = self.client.delete(op, Resource::Leases, name, uid, version).await;
        if let Err(error) = deleted {
            tracing::debug!(object = name, %error, "the lease of a node that ended is left behind");
        }
    }

    /// The object as this node's process registers it.
    fn registered(&self, mut object: Object, node: &NodeInfo, ttl: Ttl, record: &str) -> Object {
        object.disown_pods();
        object.remove_annotation(FAREWELL);
        object.adopt(&self.keys, Kind::Node);
        let by = format!("{}_{}", node.id, node.incarnation);
        if object.spec()["holderIdentity"] != by.as_str() {
            let stamp = later_than(object.spec().get("acquireTime"));
            object.set_spec("holderIdentity", by);
            object.set_spec("acquireTime", stamp);
        }
        self.renewed(object, ttl, record)
    }

    fn renewed(&self, mut object: Object, ttl: Ttl, record: &str) -> Object {
        let stamp = later_than(object.spec().get("renewTime"));
        object.set_spec("renewTime", stamp);
        object.set_spec("leaseDurationSeconds", seconds(ttl));
        object.set_annotation(RECORD, record);
        object
    }

    fn registration(&self, node: &NodeInfo, ttl: Ttl, written: &Object) -> Registration {
        self.nodes.wrote(written, ttl, self.client.now());
        let revision = mark(written, node.incarnation).revision();
        Registration::new(node.id.clone(), node.incarnation, ttl, revision)
    }
}

fn encoded(op: Op<'_>, node: &NodeInfo, ttl: Ttl) -> Result<String> {
    let record = NodeRecordV1::new(node.clone(), ttl).encode()?;
    if record.len() > RECORD_BYTES_MAX {
        let why = format!(
            "the node's record has {} bytes; an annotation holds {RECORD_BYTES_MAX}",
            record.len()
        );
        return Err(op.error(ErrorKind::Invalid).message(why));
    }
    String::from_utf8(record.to_vec())
        .map_err(|source| op.damaged("a record is no text").with_source(source))
}

fn mark(object: &Object, incarnation: Incarnation) -> Mark {
    Mark {
        version: object.version().to_owned(),
        uid: object.uid().to_owned(),
        whose: incarnation.as_u128(),
    }
}

fn is_of(object: &Object, revision: &Revision, incarnation: Incarnation) -> bool {
    Mark::of(revision, incarnation.as_u128())
        .is_some_and(|known| known == mark(object, incarnation))
}

/// Whether this incarnation's registration was ended, by itself or by an eviction. The farewell of another
/// incarnation was left there by a node that registered since and knew nothing of it.
fn is_ended(object: &Object, incarnation: Incarnation) -> bool {
    object.annotation(FAREWELL) == Some(incarnation.to_string().as_str())
}

fn read_node(op: Op<'_>, keys: &Keys, object: &Object) -> Result<NodeRecord> {
    let Some(text) = object.annotation(RECORD) else {
        return Err(op.damaged(format!("object {} has no annotation {RECORD}", object.name())));
    };
    let record = NodeRecordV1::decode(text.as_bytes()).map_err(|error| op.corrupt(error))?;
    if keys.node(&record.node.id) != object.name() {
        let why = format!("the record is that of another node object={}", object.name());
        return Err(Error::corrupt(op.name, why).resource(&record.node.id));
    }
    let revision = mark(object, record.node.incarnation).revision();
    Ok(record.into_record(revision))
}

/// The record with how it stands for this observer.
fn seen_record(
    seen: &Seen,
    object: &Object,
    record: NodeRecord,
    asked: Moment,
    answered: Moment,
) -> NodeRecord {
    let Standing { remaining, judged, .. } = seen.observe(object, record.ttl, asked, answered);
    record.with_may_expire_in(Some(remaining)).with_judged(judged)
}

fn is_expired(record: &NodeRecord) -> bool {
    record.may_expire_in.is_some_and(|left| left.is_zero())
}

struct NodesTopic {
    selector: Selector,
    keys: Keys,
    client: Client,
    seen: Seen,
    /// The live ones, by the names of their objects.
    nodes: HashMap<String, NodeRecord>,
    /// The registrations that ran out and were not evicted, and after how long unchanged they are deleted.
    lingering: HashMap<String, Duration>,
}

impl NodesTopic {
    fn take(
        &mut self,
        object: &Object,
        asked: Moment,
        answered: Moment,
        events: &mut VecDeque<NodeEvent>,
    ) -> Result<()> {
        let op = Op::read("watch", object.name());
        let record = read_node(op, &self.keys, object)?;
        let is_ended = is_ended(object, record.info.incarnation);
        let record = seen_record(&self.seen, object, record, asked, answered);
        if is_ended {
            self.ended(object, &record, events);
            return Ok(());
        }
        let shown = self.nodes.get(object.name());
        if is_expired(&record) {
            if self.nodes.remove(object.name()).is_some() {
                let (node, incarnation) = (record.info.id.clone(), record.info.incarnation);
                events.push_back(NodeEvent::Expired { node, incarnation, judged: true });
            }
            self.collect(object, &record);
            return Ok(());
        }
        self.lingering.remove(object.name());
        match shown {
            // What was looked up again, and is as it was.
            Some(shown) if shown.revision == record.revision && shown.judged == record.judged => {}
            // A plain heartbeat shows as well: an eviction has to show the newest revision.
            Some(shown) if shown.info.incarnation == record.info.incarnation => {
                events.push_back(NodeEvent::Updated(record.clone()));
            }
            _ => events.push_back(NodeEvent::Joined(record.clone())),
        }
        self.nodes.insert(object.name().to_owned(), record);
        Ok(())
    }

    /// Its object says that the registration was ended.
    fn ended(&mut self, object: &Object, record: &NodeRecord, events: &mut VecDeque<NodeEvent>) {
        let (node, incarnation) = (record.info.id.clone(), record.info.incarnation);
        if let Some(shown) = self.nodes.remove(object.name()) {
            // Another one had taken its place unseen, and it is the other that ended.
            if shown.info.incarnation != incarnation {
                events.push_back(NodeEvent::Joined(record.clone()));
            }
            events.push_back(NodeEvent::Left { node, incarnation });
        }
        self.collect(object, record);
    }

    /// There is no object, and no farewell was seen: another program deleted it, and its node may live.
    fn gone(&mut self, name: &str, events: &mut VecDeque<NodeEvent>) {
        self.seen.absent(name);
        self.lingering.remove(name);
        if let Some(record) = self.nodes.remove(name) {
            let (node, incarnation) = (record.info.id, record.info.incarnation);
            events.push_back(NodeEvent::Expired { node, incarnation, judged: false });
        }
    }

    /// Deletes the object of a node that was not evicted, long after it has run out.
    fn collect(&mut self, object: &Object, record: &NodeRecord) {
        let unchanged = self.seen.unchanged_for(object.name()).unwrap_or_default();
        let long = record.ttl.get() * TTLS_MAX;
        let due = self.lingering.entry(object.name().to_owned()).or_insert(long);
        if unchanged < *due {
            return;
        }
        *due = unchanged + long;
        let (client, object) = (self.client.clone(), object.clone());
        self.client.tasks().spawn(async move {
            let op = Op::write("collect", object.name());
            let (uid, version) = (object.uid(), Some(object.version()));
            // The next look tries again.
            let deleted = client.delete(op, Resource::Leases, object.name(), uid, version).await;
            tracing::debug!(object = object.name(), ?deleted, "a node's lease ran out long ago");
        });
    }
}

impl Topic for NodesTopic {
    type Event = NodeEvent;

    fn selector(&self) -> (Resource, Selector) {
        (Resource::Leases, self.selector.clone())
    }

    async fn all(&mut self, list: List, events: &mut VecDeque<NodeEvent>) -> Result<()> {
        let there: HashSet<_> = list.objects.iter().map(Object::name).collect();
        let is_missing = |name: &&String| !there.contains(name.as_str());
        let missing: Vec<_> = self.nodes.keys().filter(is_missing).cloned().collect();
        for name in missing {
            self.gone(&name, events);
        }
        for object in &list.objects {
            self.take(object, list.asked, list.answered, events)?;
        }
        self.seen.only(&list.objects);
        Ok(())
    }

    async fn one(
        &mut self,
        object: Object,
        is_deleted: bool,
        events: &mut VecDeque<NodeEvent>,
    ) -> Result<()> {
        let now = self.seen.now();
        if is_deleted {
            // It is told as it was last, which shows a farewell that was missed.
            let record = read_node(Op::read("watch", object.name()), &self.keys, &object);
            if let Some(record) = record.ok().filter(|r| is_ended(&object, r.info.incarnation)) {
                self.ended(&object, &record, events);
            }
            self.gone(object.name(), events);
            return Ok(());
        }
        self.take(&object, now, now, events)
    }

    fn snapshot(&mut self) -> NodeEvent {
        let now = |(name, record): (&String, &NodeRecord)| {
            let left = self.seen.standing(name).map(|standing| standing.remaining);
            record.clone().with_may_expire_in(left)
        };
        let mut nodes: Vec<_> = self.nodes.iter().map(now).collect();
        nodes.sort_unstable_by(|a, b| a.info.id.cmp(&b.info.id));
        NodeEvent::Snapshot(nodes)
    }

    fn due(&self) -> Option<Duration> {
        let alive = self.nodes.keys().filter_map(|name| self.seen.remaining(name));
        let gone = self.lingering.iter().filter_map(|(name, due)| {
            let unchanged = self.seen.unchanged_for(name)?;
            Some(due.saturating_sub(unchanged) + Duration::from_millis(1))
        });
        alive.chain(gone).min()
    }
}
