//! Tables: a head for each, which one compare-and-set covers, and its map in chunks beside it; and
//! requests to the leader.
//!
//! A write is conditional on the head that was read, and on the lease itself where that lives here.
//! Chunks are written first. A reader that misses one reads the head again, for they are removed once
//! two newer maps have been written.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_core::kit::Op;
use coord_core::kit::tables::{self, Head, Seen, TableReader, TableWriter};
use coord_core::wire::{
    AnswerV1, ChunkKey, KnownMaps, Manifest, Record, RequestV1, TableHeadV1, digest,
};
use coord_core::{
    Answer, Answered, Claim, ClaimRequest, Effect, ErrorKind, Fence, Placement, PlacementEvent,
    Publish, Request, RequestEvent, RequestId, RequestRecord, Result, ShardMap, StoredTable,
    TableName, TableUid, Version,
};
use futures::future::BoxFuture;
use futures::stream::BoxStream;

use crate::client::{Hint, Reply, Subject, Topic, command, subscribe};
use crate::error::strange;
use crate::keys::mark_of;
use crate::lease::part;
use crate::scripts::{ANSWER, ASK, REQUEST, REQUESTS, SEE, TABLES, TIDY, WRITE};
use crate::{Handle, ROUNDS, VALUE_BYTES_MAX};

/// How many chunks are read at once: a server does nothing else meanwhile.
const CHUNKS_AT_ONCE: usize = 4;
/// How many chunks are removed at once.
const REMOVED_AT_ONCE: usize = 100;
/// The most requests that may be within their time limit at once.
const REQUESTS_MAX: usize = 10_000;

/// What must hold for a lease.
pub(crate) enum Condition {
    /// Of a lease in another store this one can't tell.
    Elsewhere,
    /// The lease is held by this attempt under this term.
    Held { lease: String, attempt: String, term: String },
}

/// Which write a head came by; none if there is no table.
type Mark = Option<u64>;

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
        tables::load(self, table).await
    }

    async fn tables(&self) -> Result<Vec<TableName>> {
        let op = Op::read("tables", self.info.cluster.as_str());
        let reply = self.client.run(op, &TABLES, &[]).await?;
        let name = |place| {
            TableName::try_from(reply.text(place).to_owned()).map_err(|error| op.corrupt(error))
        };
        let mut names = (0..reply.items().len()).map(name).collect::<Result<Vec<_>>>()?;
        names.sort();
        Ok(names)
    }

    fn watch(&self, table: &TableName) -> BoxStream<'static, Result<PlacementEvent>> {
        let topic = TableTopic { handle: self.clone(), table: table.clone(), shown: None };
        subscribe(&self.client, table.as_str(), topic)
    }

    async fn request(&self, request: &Request) -> Result<RequestId> {
        let id = request.id.to_string();
        let op = Op::write("request", &id);
        let value = RequestV1::of(request).encode()?;
        let limit = request.time_limit.as_micros().max(1).to_string();
        let most = REQUESTS_MAX.to_string();
        let arguments = [id.as_bytes(), &value, limit.as_bytes(), most.as_bytes()];
        let reply = self.client.run(op, &REQUEST, &arguments).await?;
        match reply.outcome() {
            "there" => Ok(request.id),
            "full" => {
                let why = format!("{REQUESTS_MAX} requests are waiting already");
                Err(op.error(ErrorKind::Unavailable).message(why))
            }
            other => Err(strange(op, other)),
        }
    }

    async fn answer(&self, id: &RequestId, fence: &Fence, answer: &Answer) -> Result<Answered> {
        let text = id.to_string();
        let op = Op::write("answer", &text);
        let value = AnswerV1::of(*id, answer).encode()?;
        let leader = TableName::cluster();
        for _ in 0..ROUNDS {
            let arguments = [leader.as_str().as_bytes(), text.as_bytes()];
            let seen = self.client.run(op, &ASK, &arguments).await?;
            let Some(head) = seen.some(0) else { return Ok(Answered::Fenced(None)) };
            let head = head_of(op, &leader, head)?;
            if head.record.fence != *fence {
                return Ok(Answered::Fenced(Some(head.record.fence)));
            }
            if seen.some(1).is_none() {
                return Ok(Answered::Gone);
            }
            if let Some(earlier) = seen.some(2) {
                let earlier = answer_of(op, *id, earlier)?;
                let is_same = earlier == *answer;
                return Ok(if is_same { Answered::Recorded } else { Answered::Already(earlier) });
            }
            let mark = head.mark.unwrap_or_default().to_string();
            let arguments = [leader.as_str().as_bytes(), mark.as_bytes(), text.as_bytes(), &value];
            match self.client.run(op, &ANSWER, &arguments).await?.outcome() {
                "recorded" => return Ok(Answered::Recorded),
                "changed" => {}
                other => return Err(strange(op, other)),
            }
        }
        Err(op.contended())
    }

    fn watch_requests(&self) -> BoxStream<'static, Result<RequestEvent>> {
        let topic = RequestsTopic { handle: self.clone(), known: BTreeMap::new() };
        subscribe(&self.client, self.info.cluster.as_str(), topic)
    }
}

/// The mark of a head is that of the write that it came by.
fn head_of(op: Op<'_>, table: &TableName, bytes: &[u8]) -> Result<Head<Mark>> {
    let record = TableHeadV1::read(table, bytes).map_err(|error| op.corrupt(error))?;
    Ok(Head::new(record, Some(mark_of(op, bytes)?)))
}

impl TableReader for Handle {
    type Mark = Mark;
    type Found = ();

    const RACES_MAX: usize = ROUNDS;

    async fn pause(_: usize) {}

    fn maps(&self) -> &KnownMaps {
        &self.maps
    }

    async fn head(&self, op: Op<'_>, table: &TableName) -> Result<Option<Head<Mark>>> {
        // No lease is asked about: as a script, it is refused by a store that is another one.
        let reply = self.client.run(op, &SEE, &[table.as_str().as_bytes(), b""]).await?;
        reply.some(0).map(|bytes| head_of(op, table, bytes)).transpose()
    }

    async fn chunks(
        &self,
        op: Op<'_>,
        head: &Head<Mark>,
        keys: &[ChunkKey],
    ) -> Result<Option<HashMap<ChunkKey, Bytes>>> {
        let mut chunks = HashMap::with_capacity(keys.len());
        for keys in keys.chunks(CHUNKS_AT_ONCE) {
            let hash = std::iter::once(self.client.keys().chunks(&head.record.table));
            let get = command("HMGET", hash.chain(keys.iter().map(ChunkKey::to_string)));
            let reply = self.client.send(op, Effect::None, get).await?;
            for (place, key) in keys.iter().enumerate() {
                let Some(value) = reply.some(place) else { return Ok(None) };
                chunks.insert(*key, value.clone());
            }
        }
        Ok(Some(chunks))
    }

    async fn stored_chunks(&self, op: Op<'_>, table: &TableName) -> Result<Vec<(ChunkKey, ())>> {
        let list = command("HKEYS", [self.client.keys().chunks(table)]);
        let stored = self.client.send(op, Effect::None, list).await?;
        let key = |field: &Bytes| Some((std::str::from_utf8(field).ok()?.parse().ok()?, ()));
        Ok(stored.items().iter().filter_map(key).collect())
    }

    /// Each step is conditional on the head being the one with this mark.
    async fn remove_chunks(
        &self,
        op: Op<'_>,
        table: &TableName,
        mark: &Mark,
        old: Vec<(ChunkKey, ())>,
    ) -> Result<()> {
        let keys = [self.client.keys().chunks(table)];
        let head = mark.unwrap_or_default().to_string();
        let fields: Vec<_> = old.iter().map(|(key, ())| key.to_string()).collect();
        for fields in fields.chunks(REMOVED_AT_ONCE) {
            let mut arguments: Vec<&[u8]> = vec![table.as_str().as_bytes(), head.as_bytes()];
            arguments.extend(fields.iter().map(String::as_bytes));
            // What is left is found at the next publish.
            if self.client.run_on(op, &TIDY, &keys, &arguments).await?.outcome() != "removed" {
                break;
            }
        }
        Ok(())
    }
}

impl TableWriter for Handle {
    type Reader = Self;
    type Guard = Condition;

    /// A failover may have lost the first claim, and what is read after a claim must be sealed by it.
    const REPEATS_CLAIMS: bool = true;

    /// The first time may have gone without the replicas.
    fn repeats_publishes(&self) -> bool {
        self.client.min_replicas() > 0
    }

    fn reader(&self) -> Self {
        self.clone()
    }

    fn value_bytes_max(&self) -> usize {
        VALUE_BYTES_MAX
    }

    async fn see(
        &self,
        op: Op<'_>,
        table: &TableName,
        fence: &Fence,
    ) -> Result<Seen<Mark, Condition>> {
        let is_ours = fence.origin == self.info.origin;
        let lease = if is_ours { fence.lease.as_str() } else { "" };
        let arguments = [table.as_str().as_bytes(), lease.as_bytes()];
        let reply = self.client.run(op, &SEE, &arguments).await?;
        let guard = match reply.some(1) {
            None => (!is_ours).then_some(Condition::Elsewhere),
            Some(record) => {
                let held = self.grant(op, &fence.lease, record)?;
                let (attempt, term) = (fence.attempt, fence.term.store_part());
                let is_held = held.holder.attempt == attempt && held.term.store_part() == term;
                is_held.then(|| Condition::Held {
                    lease: fence.lease.to_string(),
                    attempt: attempt.to_string(),
                    term: part(fence.term),
                })
            }
        };
        let head = reply.some(0).map(|bytes| head_of(op, table, bytes)).transpose()?;
        Ok(match head {
            Some(Head { record, mark, .. }) => Seen::new(Some(record), mark, guard),
            None => Seen::new(None, None, guard),
        })
    }

    async fn write_head(
        &self,
        op: Op<'_>,
        head: &TableHeadV1,
        over: &Mark,
        guard: &Condition,
    ) -> Result<Option<Mark>> {
        let value = head.encode()?;
        let over = over.map(|mark| mark.to_string()).unwrap_or_default();
        let (lease, attempt, term) = match guard {
            Condition::Elsewhere => ("", "", ""),
            Condition::Held { lease, attempt, term } => {
                (lease.as_str(), attempt.as_str(), term.as_str())
            }
        };
        let arguments = [
            head.table.as_str().as_bytes(),
            over.as_bytes(),
            &value,
            lease.as_bytes(),
            attempt.as_bytes(),
            term.as_bytes(),
        ];
        let reply = self.client.run_confirmed(op, &WRITE, &arguments).await?;
        match reply.outcome() {
            "written" => {
                let mark = reply.text(1).parse().map_err(|_| strange(op, "no mark"))?;
                Ok(Some(Some(mark)))
            }
            "changed" => Ok(None),
            other => Err(strange(op, other)),
        }
    }

    async fn write_chunks(
        &self,
        op: Op<'_>,
        head: &Head<Mark>,
        chunks: Vec<(ChunkKey, Bytes)>,
    ) -> Result<()> {
        let hash = self.client.keys().chunks(&head.record.table);
        for (key, value) in chunks {
            let field = key.to_string();
            let set = command("HSETNX", [hash.as_bytes(), field.as_bytes(), &value[..]]);
            self.client.send(op, Effect::Unknown, set).await?;
        }
        Ok(())
    }

    fn run(&self, task: BoxFuture<'static, ()>) {
        self.client.tidy_up(task);
    }
}

impl Handle {
    /// Requests with their answers, by id: those that are named, or all. None for one that is gone.
    async fn read_requests(
        &self,
        op: Op<'_>,
        ids: &[&[u8]],
    ) -> Result<BTreeMap<RequestId, Option<Arrived>>> {
        let reply = self.client.run(op, &REQUESTS, ids).await?;
        let mut found = BTreeMap::new();
        for place in (0..reply.items().len()).step_by(3) {
            let id: RequestId = reply.text(place).parse().map_err(|error| op.corrupt(error))?;
            found.insert(id, Arrived::of(op, id, &reply, place + 1)?);
        }
        Ok(found)
    }
}

struct TableTopic {
    handle: Handle,
    table: TableName,
    /// What was shown last; none where there was no table.
    shown: Option<Shown>,
}

/// Which map was shown. Two maps have one version where a failover has lost one of them.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Shown {
    uid: TableUid,
    version: Version,
    digest: u128,
}

impl Shown {
    fn of(map: &ShardMap) -> Self {
        Self { uid: map.uid(), version: map.version(), digest: digest(map) }
    }

    fn is_of(&self, head: &TableHeadV1) -> bool {
        let digest = head.manifest.as_ref().map(Manifest::digest);
        self.uid == head.uid
            && self.version == head.version()
            && digest.is_none_or(|digest| digest == self.digest)
    }
}

impl Topic for TableTopic {
    type Event = PlacementEvent;

    const READ_AGAIN: Duration = Duration::from_secs(5);

    fn concerns(&self, hint: &Hint) -> bool {
        hint.subject == Subject::Table && hint.name == self.table.as_str()
    }

    async fn snapshot(&mut self) -> Result<PlacementEvent> {
        let op = Op::read("watch", self.table.as_str());
        let found = tables::read_table(&self.handle, op, &self.table).await?;
        let map = found.map(|(_, map)| map);
        self.shown = map.as_deref().map(Shown::of);
        Ok(PlacementEvent::Snapshot(map))
    }

    async fn changed(
        &mut self,
        _hints: &[Hint],
        events: &mut VecDeque<PlacementEvent>,
    ) -> Result<()> {
        let op = Op::read("watch", self.table.as_str());
        // A claim changes the head and not the map.
        match (self.handle.head(op, &self.table).await?, self.shown) {
            (None, None) => return Ok(()),
            (Some(head), Some(shown)) if shown.is_of(&head.record) => return Ok(()),
            _ => {}
        }
        let found = tables::read_table(&self.handle, op, &self.table).await?;
        let map = found.map(|(_, map)| map);
        let now = map.as_deref().map(Shown::of);
        let before = std::mem::replace(&mut self.shown, now);
        match (before, now) {
            // A failover can lose the newest: within one life the watch never goes back.
            (Some(was), Some(now)) if was.uid == now.uid && now.version < was.version => {
                self.shown = before;
            }
            (Some(was), Some(now)) if was.uid == now.uid => {
                events.extend(map.map(PlacementEvent::Changed));
            }
            _ => events.push_back(PlacementEvent::Snapshot(map)),
        }
        Ok(())
    }
}

/// A request as it stands in the store.
struct Arrived {
    /// The mark of its arrival.
    mark: u64,
    request: Request,
    answer: Option<Answer>,
}

impl Arrived {
    fn of(op: Op<'_>, id: RequestId, reply: &Reply, place: usize) -> Result<Option<Self>> {
        let Some(bytes) = reply.some(place) else { return Ok(None) };
        let request = RequestV1::read(id, bytes).map_err(|error| op.corrupt(error))?;
        let answer = reply.some(place + 1).map(|bytes| answer_of(op, id, bytes)).transpose()?;
        Ok(Some(Self { mark: mark_of(op, bytes)?, request, answer }))
    }
}

fn answer_of(op: Op<'_>, id: RequestId, bytes: &[u8]) -> Result<Answer> {
    AnswerV1::read(id, bytes).map_err(|error| op.corrupt(error))
}

struct RequestsTopic {
    handle: Handle,
    /// The requests that were shown, and whether with an answer.
    known: BTreeMap<RequestId, bool>,
}

impl Topic for RequestsTopic {
    type Event = RequestEvent;

    const READ_AGAIN: Duration = Duration::from_secs(30);

    fn concerns(&self, hint: &Hint) -> bool {
        hint.subject == Subject::Request
    }

    /// In the order in which they came.
    async fn snapshot(&mut self) -> Result<RequestEvent> {
        let op = Op::read("watch_requests", self.handle.info.cluster.as_str());
        let found = self.handle.read_requests(op, &[]).await?;
        let mut found: Vec<Arrived> = found.into_values().flatten().collect();
        found.sort_by_key(|arrived| arrived.mark);
        let known = |arrived: &Arrived| (arrived.request.id, arrived.answer.is_some());
        self.known = found.iter().map(known).collect();
        let record = |arrived: Arrived| RequestRecord::new(arrived.request, arrived.answer);
        Ok(RequestEvent::Snapshot(found.into_iter().map(record).collect()))
    }

    async fn changed(&mut self, hints: &[Hint], events: &mut VecDeque<RequestEvent>) -> Result<()> {
        let op = Op::read("watch_requests", self.handle.info.cluster.as_str());
        let ids: Vec<&[u8]> = hints.iter().map(|hint| hint.name.as_bytes()).collect();
        let mut found = self.handle.read_requests(op, &ids).await?;
        if hints.is_empty() {
            for id in self.known.keys() {
                found.entry(*id).or_insert(None);
            }
        }
        let mut came = Vec::new();
        for (id, arrived) in found {
            match arrived {
                Some(arrived) => came.push(arrived),
                None if self.known.remove(&id).is_some() => {
                    events.push_back(RequestEvent::Gone(id));
                }
                None => {}
            }
        }
        came.sort_by_key(|arrived| arrived.mark);
        for Arrived { request, answer, .. } in came {
            let id = request.id;
            let before = self.known.insert(id, answer.is_some());
            if before.is_none() {
                events.push_back(RequestEvent::Submitted(request));
            }
            if let Some(answer) = answer.filter(|_| before != Some(true)) {
                events.push_back(RequestEvent::Answered(id, answer));
            }
        }
        Ok(())
    }
}
