//! Tables and requests.
//!
//! A table is one ConfigMap, its head: the highest fence and the manifest of the newest map. Claim
//! and publish replace it on condition of the version that was read, so a claim makes every write
//! fail that was decided on before it. A map that is too large for the head stands in ConfigMaps of
//! its own, which are written before the head names them and never changed.
//!
//! A request is one ConfigMap, and its answer stands in it. There is no write that depends on two
//! objects, so a claim of the reserved table marks every open request as well: what an older leader
//! had read of it before can't be answered any more.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_core::kit::tables::{self, Head, TableReader, TableWriter};
use coord_core::wire::{AnswerV1, ChunkKey, KnownMaps, Record, RequestV1, TableHeadV1};
use coord_core::{
    Answer, Answered, Claim, ClaimRequest, Error, ErrorKind, Fence, Moment, Placement,
    PlacementEvent, Publish, Request, RequestEvent, RequestId, RequestRecord, Result, ShardMap,
    StoredTable, TableName, TableUid, Version, kit,
};
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};
use serde_json::json;

use crate::client::{Client, List, Object, Resource, Selector, Topic, subscribe};
use crate::error::Op;
use crate::keys::{ANSWER, CHUNK, HEAD, Keys, Kind, LABEL_TABLE, REQUEST, SEALED, table_label};
use crate::{Handle, RACES_MAX, Seen, pause};

/// What one object holds at most: 1 MiB as the API server counts it, less what is added to it.
pub(crate) const VALUE_BYTES_MAX: usize = (1 << 20) - (16 << 10);

/// How many objects are written or read at once.
const WRITES_MAX: usize = 8;

/// The object of a head; none if there is no table. One version of an object is one write.
#[derive(Clone, Debug)]
pub(crate) struct Mark(Option<Object>);

impl PartialEq for Mark {
    fn eq(&self, other: &Self) -> bool {
        let (this, other) = (self.0.as_ref(), other.0.as_ref());
        this.map(Object::version) == other.map(Object::version)
    }
}

#[async_trait]
impl Placement for Handle {
    async fn claim(&self, request: &ClaimRequest) -> Result<Claim> {
        tables::claim(self, request).await
    }

    async fn publish(
        &self,
        table: &TableName,
        fence: &Fence,
        expected: Version,
        map: &Arc<ShardMap>,
    ) -> Result<Publish> {
        tables::publish(self, table, fence, expected, map).await
    }

    async fn load(&self, table: &TableName) -> Result<Option<StoredTable>> {
        tables::load(&self.reader(), table).await
    }

    async fn tables(&self) -> Result<Vec<TableName>> {
        let op = Op::read("tables", &self.info.target);
        let cluster = self.keys.cluster().to_owned();
        let selector = Selector::Kind { cluster, kind: Kind::Table };
        let list = self.client.names(op, Resource::ConfigMaps, &selector).await?;
        let names = list.objects.iter().filter_map(|object| self.keys.table_of(object.name()));
        let mut tables: Vec<_> = names.collect();
        tables.sort_unstable();
        Ok(tables)
    }

    fn watch(&self, table: &TableName) -> BoxStream<'static, Result<PlacementEvent>> {
        let topic = TableTopic { reader: self.reader(), table: table.clone(), map: None };
        subscribe(&self.client, table.as_str(), topic)
    }

    async fn request(&self, request: &Request) -> Result<RequestId> {
        let name = request.id.to_string();
        let op = Op::write("request", &name);
        let object = self.keys.request(request.id);
        let mut object = Object::new(Resource::ConfigMaps, &self.keys, Kind::Request, &object);
        object.set_data(REQUEST, text(op, RequestV1::of(request).encode()?)?);
        // One that is there is this very one, submitted before.
        if let Some(made) = self.client.create(op, Resource::ConfigMaps, &object).await? {
            self.requests.observe_fixed(&made, request.time_limit, self.client.now());
        }
        Ok(request.id)
    }

    async fn answer(&self, id: &RequestId, fence: &Fence, answer: &Answer) -> Result<Answered> {
        let name = id.to_string();
        let op = Op::write("answer", &name);
        let value = text(op, AnswerV1::of(*id, answer).encode()?)?;
        let (asked, cluster) = (self.keys.request(*id), TableName::cluster());
        for race in 0..RACES_MAX {
            pause(race).await;
            // The request is read before the head. If the head is this leader's own then, a later
            // leader that claims it marks the request, and the version that was read is gone.
            let object = self.client.get(op, Resource::ConfigMaps, &asked).await?;
            // Judged at once: a watch that sees it deleted forgets since when it was there.
            let is_over = match &object {
                Some(object) => {
                    let request = read_request(op, *id, object)?;
                    is_over(&self.requests, object, &request, self.client.now())
                }
                None => true,
            };
            let claimed = self.reader().head(*op, &cluster).await?.map(|head| head.record.fence);
            if claimed.as_ref() != Some(fence) {
                return Ok(Answered::Fenced(claimed));
            }
            let Some(mut object) = object.filter(|_| !is_over) else {
                return Ok(Answered::Gone);
            };
            if let Some(earlier) = read_answer(op, *id, &object)? {
                let is_same = earlier == *answer;
                return Ok(if is_same { Answered::Recorded } else { Answered::Already(earlier) });
            }
            object.set_data(ANSWER, value.clone());
            if self.client.replace(op, Resource::ConfigMaps, &object).await?.is_some() {
                return Ok(Answered::Recorded);
            }
        }
        Err(op.contended())
    }

    fn watch_requests(&self) -> BoxStream<'static, Result<RequestEvent>> {
        let topic = RequestsTopic {
            keys: self.keys.clone(),
            client: self.client.clone(),
            seen: self.requests.clone(),
            open: BTreeMap::new(),
        };
        subscribe(&self.client, &self.info.target, topic)
    }
}

impl Handle {
    /// Marks every open request, so that no older leader can answer it any more.
    async fn seal_requests(&self, op: Op<'_>, fence: &Fence) -> Result<()> {
        let cluster = self.keys.cluster().to_owned();
        let selector = Selector::Kind { cluster, kind: Kind::Request };
        let list = self.client.list(op, Resource::ConfigMaps, &selector).await?;
        let seal = format!("{}.{}", fence.term, fence.attempt);
        let is_open = |object: &Object| {
            object.data(ANSWER).is_none() && object.annotation(SEALED) != Some(seal.as_str())
        };
        let open = list.objects.into_iter().filter(is_open);
        let writes = open.map(|object| self.seal_request(op, object, &seal));
        stream::iter(writes).buffer_unordered(WRITES_MAX).try_collect::<()>().await
    }

    async fn seal_request(&self, op: Op<'_>, mut object: Object, seal: &str) -> Result<()> {
        let name = object.name().to_owned();
        for race in 0..RACES_MAX {
            pause(race).await;
            object.set_annotation(SEALED, seal);
            if self.client.replace(op, Resource::ConfigMaps, &object).await?.is_some() {
                return Ok(());
            }
            match self.client.get(op, Resource::ConfigMaps, &name).await? {
                // Answered or forgotten meanwhile: by whom it was allowed to.
                None => return Ok(()),
                Some(now) if now.data(ANSWER).is_some() => return Ok(()),
                Some(now) => object = now,
            }
        }
        Err(op.contended())
    }

    /// Writes a chunk unless it is there.
    async fn write_chunk(&self, op: Op<'_>, object: &Object, bytes: &Bytes) -> Result<()> {
        for race in 0..RACES_MAX {
            pause(race).await;
            if self.client.create(op, Resource::ConfigMaps, object).await?.is_some() {
                return Ok(());
            }
            match self.client.get(op, Resource::ConfigMaps, object.name()).await? {
                Some(stored) if stored.binary(CHUNK).as_ref() == Some(bytes) => return Ok(()),
                Some(_) => {
                    let why = format!("a chunk holds something else object={}", object.name());
                    return Err(op.damaged(why));
                }
                None => {}
            }
        }
        Err(op.contended())
    }
}

impl TableWriter for Handle {
    type Reader = Reader;
    /// No write depends on two objects.
    type Guard = ();

    fn reader(&self) -> Reader {
        Reader { client: self.client.clone(), keys: self.keys.clone(), maps: self.maps.clone() }
    }

    fn value_bytes_max(&self) -> usize {
        VALUE_BYTES_MAX
    }

    async fn see(
        &self,
        op: kit::Op<'_>,
        table: &TableName,
        _: &Fence,
    ) -> Result<tables::Seen<Mark, ()>> {
        let (head, mark) = match self.reader().head(op, table).await? {
            Some(Head { record, mark, .. }) => (Some(record), mark),
            None => (None, Mark(None)),
        };
        Ok(tables::Seen::new(head, mark, Some(())))
    }

    async fn write_head(
        &self,
        op: kit::Op<'_>,
        head: &TableHeadV1,
        over: &Mark,
        (): &(),
    ) -> Result<Option<Mark>> {
        let (op, value) = (op.into(), text(op.into(), head.encode()?)?);
        let written = if let Some(object) = &over.0 {
            let mut object = object.clone();
            object.set_data(HEAD, value);
            self.client.replace(op, Resource::ConfigMaps, &object).await?
        } else {
            let name = self.keys.table(&head.table);
            let mut object = Object::new(Resource::ConfigMaps, &self.keys, Kind::Table, &name);
            object.set_data(HEAD, value);
            self.client.create(op, Resource::ConfigMaps, &object).await?
        };
        Ok(written.map(|object| Mark(Some(object))))
    }

    async fn write_chunks(
        &self,
        op: kit::Op<'_>,
        head: &Head<Mark>,
        chunks: Vec<(ChunkKey, Bytes)>,
    ) -> Result<()> {
        let table = &head.record.table;
        // Kubernetes removes the chunks of a head that an operator deletes.
        let owner = head.mark.0.as_ref().map(|head| {
            json!({
                "apiVersion": "v1", "kind": "ConfigMap", "name": head.name(), "uid": head.uid(),
            })
        });
        let writes = chunks.into_iter().map(|(key, bytes)| {
            let name = self.keys.chunk(table, &key);
            let mut object = Object::new(Resource::ConfigMaps, &self.keys, Kind::Chunk, &name);
            object.set_label(LABEL_TABLE, &table_label(table));
            if let Some(owner) = &owner {
                object.set_owner(owner.clone());
            }
            object.set_immutable_binary(CHUNK, &bytes);
            async move { self.write_chunk(op.into(), &object, &bytes).await }
        });
        tables::each(WRITES_MAX, writes).await.map(drop)
    }

    fn run(&self, task: BoxFuture<'static, ()>) {
        self.client.tasks().spawn(task);
    }

    async fn claimed(&self, op: kit::Op<'_>, request: &ClaimRequest) -> Result<()> {
        match request.table == TableName::cluster() {
            true => self.seal_requests(op.into(), &request.fence).await,
            false => Ok(()),
        }
    }
}

/// Reads tables.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    client: Client,
    keys: Keys,
    maps: KnownMaps,
}

impl TableReader for Reader {
    type Mark = Mark;
    type Found = Object;

    const RACES_MAX: usize = RACES_MAX;

    async fn pause(lost: usize) {
        pause(lost).await;
    }

    fn maps(&self) -> &KnownMaps {
        &self.maps
    }

    async fn head(&self, op: kit::Op<'_>, table: &TableName) -> Result<Option<Head<Mark>>> {
        let (op, name) = (op.into(), self.keys.table(table));
        let Some(object) = self.client.get(op, Resource::ConfigMaps, &name).await? else {
            return Ok(None);
        };
        let record = read_head(op, table, &object)?;
        Ok(Some(Head::new(record, Mark(Some(object)))))
    }

    async fn chunks(
        &self,
        op: kit::Op<'_>,
        head: &Head<Mark>,
        keys: &[ChunkKey],
    ) -> Result<Option<HashMap<ChunkKey, Bytes>>> {
        let table = &head.record.table;
        let reads = keys.iter().copied().map(|key| async move {
            let name = self.keys.chunk(table, &key);
            let object = self.client.get(op.into(), Resource::ConfigMaps, &name).await?;
            let Some(object) = object else { return Ok::<_, Error>(None) };
            match object.binary(CHUNK) {
                Some(bytes) => Ok(Some((key, bytes))),
                None => Err(op.damaged(format!("object {name} holds no chunk"))),
            }
        });
        Ok(tables::each(WRITES_MAX, reads).await?.into_iter().collect())
    }

    async fn stored_chunks(
        &self,
        op: kit::Op<'_>,
        table: &TableName,
    ) -> Result<Vec<(ChunkKey, Object)>> {
        let before = self.keys.before_chunks(table);
        let cluster = self.keys.cluster().to_owned();
        let selector = Selector::Chunks { cluster, table: table_label(table) };
        let list = self.client.names(op.into(), Resource::ConfigMaps, &selector).await?;
        let key = |object: Object| {
            let key = object.name().strip_prefix(&before)?.parse().ok()?;
            Some((key, object))
        };
        Ok(list.objects.into_iter().filter_map(key).collect())
    }

    async fn remove_chunks(
        &self,
        op: kit::Op<'_>,
        _: &TableName,
        _: &Mark,
        old: Vec<(ChunkKey, Object)>,
    ) -> Result<()> {
        let removals = old.into_iter().map(|(_, object)| async move {
            let (name, uid) = (object.name(), object.uid());
            // One that is gone by now was removed by another.
            let deleted =
                self.client.delete(op.into(), Resource::ConfigMaps, name, uid, None).await?;
            tracing::trace!(name, ?deleted, "an old chunk");
            Ok::<_, Error>(())
        });
        tables::each(WRITES_MAX, removals).await.map(drop)
    }
}

fn text(op: Op<'_>, record: Bytes) -> Result<String> {
    if record.len() > VALUE_BYTES_MAX {
        let why =
            format!("the record has {} bytes; an object holds {VALUE_BYTES_MAX}", record.len());
        return Err(op.error(ErrorKind::Invalid).message(why));
    }
    String::from_utf8(record.to_vec())
        .map_err(|source| op.damaged("a record is no text").with_source(source))
}

/// The field of an object that has to have it.
fn field<'a>(op: Op<'_>, object: &'a Object, name: &str) -> Result<&'a [u8]> {
    match object.data(name) {
        Some(text) => Ok(text.as_bytes()),
        None => Err(op.damaged(format!("object {} has no data.{name}", object.name()))),
    }
}

fn read_head(op: Op<'_>, table: &TableName, object: &Object) -> Result<TableHeadV1> {
    TableHeadV1::read(table, field(op, object, HEAD)?).map_err(|error| op.corrupt(error))
}

fn read_request(op: Op<'_>, id: RequestId, object: &Object) -> Result<Request> {
    RequestV1::read(id, field(op, object, REQUEST)?).map_err(|error| op.corrupt(error))
}

fn read_answer(op: Op<'_>, id: RequestId, object: &Object) -> Result<Option<Answer>> {
    let text = object.data(ANSWER);
    text.map(|text| AnswerV1::read(id, text.as_bytes()))
        .transpose()
        .map_err(|error| op.corrupt(error))
}

/// Whether a request's time limit has passed: by how long this observer has known it, or by the API
/// server's own clock, for one that was left behind. That clock tells seconds, and the servers'
/// clocks differ a little.
fn is_over(seen: &Seen, object: &Object, request: &Request, now: Moment) -> bool {
    const SLACK: i64 = 2;
    let standing = seen.observe_fixed(object, request.time_limit, now);
    let age = match (object.read_at, object.created_at()) {
        (Some(read), Some(created)) => read.saturating_sub(created),
        _ => 0,
    };
    let limit = i64::try_from(request.time_limit.as_secs()).unwrap_or(i64::MAX);
    standing.is_expired() || age > limit.saturating_add(1 + SLACK)
}

struct TableTopic {
    reader: Reader,
    table: TableName,
    map: Option<Arc<ShardMap>>,
}

impl TableTopic {
    async fn take(
        &mut self,
        object: Option<&Object>,
        events: &mut VecDeque<PlacementEvent>,
    ) -> Result<()> {
        let table = self.table.clone();
        let op = Op::read("watch", table.as_str());
        let map = match object {
            Some(object) => {
                let head = read_head(op, &table, object)?;
                if self.shows(head.uid, head.version()) {
                    return Ok(());
                }
                let head = Head::new(head, Mark(Some(object.clone())));
                match tables::read_map(&self.reader, *op, &head).await? {
                    Some(map) => Some(map),
                    // The head is out of date.
                    None => {
                        tables::read_table(&self.reader, *op, &table).await?.map(|(_, map)| map)
                    }
                }
            }
            None => None,
        };
        let is_next = match (&self.map, &map) {
            (None, None) => return Ok(()),
            // A read was ahead of the watch.
            (Some(old), Some(new)) if old.uid() == new.uid() => {
                if new.version() <= old.version() {
                    return Ok(());
                }
                true
            }
            _ => false,
        };
        self.map.clone_from(&map);
        // Only the newest map waits for a slow reader.
        let was_snapshot = events.drain(..).any(|e| matches!(e, PlacementEvent::Snapshot(_)));
        events.push_back(match map {
            Some(map) if is_next && !was_snapshot => PlacementEvent::Changed(map),
            map => PlacementEvent::Snapshot(map),
        });
        Ok(())
    }

    fn shows(&self, uid: TableUid, version: Version) -> bool {
        self.map.as_ref().is_some_and(|map| map.uid() == uid && map.version() == version)
    }
}

impl Topic for TableTopic {
    type Event = PlacementEvent;

    fn selector(&self) -> (Resource, Selector) {
        (Resource::ConfigMaps, Selector::Name(self.reader.keys.table(&self.table)))
    }

    async fn all(&mut self, list: List, events: &mut VecDeque<PlacementEvent>) -> Result<()> {
        self.take(list.objects.first(), events).await
    }

    async fn one(
        &mut self,
        object: Object,
        is_deleted: bool,
        events: &mut VecDeque<PlacementEvent>,
    ) -> Result<()> {
        self.take(Some(&object).filter(|_| !is_deleted), events).await
    }

    fn snapshot(&mut self) -> PlacementEvent {
        PlacementEvent::Snapshot(self.map.clone())
    }

    fn due(&self) -> Option<Duration> {
        None
    }
}

struct RequestsTopic {
    keys: Keys,
    client: Client,
    seen: Seen,
    open: BTreeMap<RequestId, Open>,
}

/// A request that is not over.
struct Open {
    object: Object,
    record: RequestRecord,
}

impl RequestsTopic {
    fn take(&mut self, object: Object, events: &mut VecDeque<RequestEvent>) -> Result<()> {
        let Some(id) = self.keys.request_of(object.name()) else { return Ok(()) };
        let op = Op::read("watch", object.name());
        let request = read_request(op, id, &object)?;
        if is_over(&self.seen, &object, &request, self.client.now()) {
            self.gone(id, events);
            self.collect(object);
            return Ok(());
        }
        let answer = read_answer(op, id, &object)?;
        let was_answered = match self.open.get(&id) {
            Some(open) => open.record.answer.is_some(),
            None => {
                events.push_back(RequestEvent::Submitted(request.clone()));
                false
            }
        };
        if let Some(answer) = answer.clone().filter(|_| !was_answered) {
            events.push_back(RequestEvent::Answered(id, answer));
        }
        let record = RequestRecord::new(request, answer);
        self.open.insert(id, Open { object, record });
        Ok(())
    }

    fn gone(&mut self, id: RequestId, events: &mut VecDeque<RequestEvent>) {
        if self.open.remove(&id).is_some() {
            events.push_back(RequestEvent::Gone(id));
        }
    }

    /// Deletes a request that is over. Every watching process tries, and one of them is the first.
    fn collect(&self, object: Object) {
        let client = self.client.clone();
        self.client.tasks().spawn(async move {
            let op = Op::write("collect", object.name());
            let (name, uid) = (object.name(), object.uid());
            let deleted = client.delete(op, Resource::ConfigMaps, name, uid, None).await;
            tracing::trace!(name, ?deleted, "a request is over");
        });
    }
}

impl Topic for RequestsTopic {
    type Event = RequestEvent;

    fn selector(&self) -> (Resource, Selector) {
        let cluster = self.keys.cluster().to_owned();
        (Resource::ConfigMaps, Selector::Kind { cluster, kind: Kind::Request })
    }

    async fn all(&mut self, list: List, events: &mut VecDeque<RequestEvent>) -> Result<()> {
        let names = list.objects.iter().filter_map(|object| self.keys.request_of(object.name()));
        let there: HashSet<_> = names.collect();
        let missing: Vec<_> = self.open.keys().filter(|id| !there.contains(id)).copied().collect();
        for id in missing {
            self.gone(id, events);
        }
        self.seen.only(&list.objects);
        list.objects.into_iter().try_for_each(|object| self.take(object, events))
    }

    async fn one(
        &mut self,
        object: Object,
        is_deleted: bool,
        events: &mut VecDeque<RequestEvent>,
    ) -> Result<()> {
        if !is_deleted {
            return self.take(object, events);
        }
        self.seen.absent(object.name());
        if let Some(id) = self.keys.request_of(object.name()) {
            self.gone(id, events);
        }
        Ok(())
    }

    fn snapshot(&mut self) -> RequestEvent {
        // In the order in which they came, as far as the API server tells it: by the second.
        let mut open: Vec<_> = self.open.iter().collect();
        open.sort_by_key(|(id, open)| (open.object.created_at(), **id));
        RequestEvent::Snapshot(open.into_iter().map(|(_, open)| open.record.clone()).collect())
    }

    fn due(&self) -> Option<Duration> {
        self.open.values().filter_map(|open| self.seen.remaining(open.object.name())).min()
    }
}
