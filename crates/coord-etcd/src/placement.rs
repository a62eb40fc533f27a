//! Tables: a head for each, which one compare-and-set covers, and its map in chunks beside it; and
//! requests to the leader.
//!
//! A write is conditional on the head that was read, and on the lease itself where that lives here.
//! Chunks are written first, and read at the revision of the head that names them: what is missing
//! there was never written.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use coord_core::kit::Op;
use coord_core::kit::tables::{self, Head, Seen, TableReader, TableWriter};
use coord_core::wire::{AnswerV1, ChunkKey, KnownMaps, Record, RequestV1, TableHeadV1};
use coord_core::{
    Answer, Answered, Claim, ClaimRequest, ErrorKind, Fence, Placement, PlacementEvent, Publish,
    Request, RequestEvent, RequestId, RequestRecord, Result, ShardMap, StoredTable, TableName,
    TableUid, Ttl, Version,
};
use futures::future::BoxFuture;
use futures::stream::BoxStream;

use crate::client::{Batch, Change, Condition, Entry, Step, Topic, subscribe};
use crate::error::Problem;
use crate::keys::Range;
use crate::{Handle, ROUNDS, VALUE_BYTES_MAX};

/// How many chunks are read or removed at once. A server takes 128 steps in a transaction by
/// default.
const CHUNKS_AT_ONCE: usize = 16;
/// The most requests that may be within their time limit at once.
const REQUESTS_MAX: i64 = 10_000;

/// Where a head was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    /// The revision of its last write; 0 if there is none.
    modified: i64,
    /// A revision at which it stood. Its chunks are read there: what is missing there was never written.
    read: i64,
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
        tables::load(self, table).await
    }

    async fn tables(&self) -> Result<Vec<TableName>> {
        let op = Op::read("tables", self.info.cluster.as_str());
        let range = self.keys.tables();
        let mut outcome = self.client.read(op, &[Step::Keys(range.clone())]).await?;
        let entries = outcome.found.pop().unwrap_or_default().entries;
        let name = |entry: Entry| {
            let name = entry.key.strip_prefix(&range.from).unwrap_or_default().to_owned();
            TableName::try_from(name).map_err(|error| op.corrupt(error))
        };
        entries.into_iter().map(name).collect()
    }

    fn watch(&self, table: &TableName) -> BoxStream<'static, Result<PlacementEvent>> {
        let topic = TableTopic { handle: self.clone(), table: table.clone(), shown: None };
        subscribe(&self.client, table.as_str(), topic)
    }

    async fn request(&self, request: &Request) -> Result<RequestId> {
        let id = request.id.to_string();
        let op = Op::write("request", &id);
        let key = self.keys.request(request.id);
        let value = RequestV1::of(request).encode()?;
        for _ in 0..ROUNDS {
            let look = [Step::Get(key.clone()), Step::Count(self.keys.requests())];
            let mut outcome = self.client.read(op, &look).await?;
            if outcome.take(0).is_some() {
                return Ok(request.id);
            }
            // Answers are counted too: it is a bound, not a number.
            if outcome.found.get(1).is_some_and(|found| found.count >= REQUESTS_MAX * 2) {
                let why = format!("{REQUESTS_MAX} requests are waiting already");
                return Err(op.error(ErrorKind::Unavailable).message(why));
            }
            let limit = Ttl::new(request.time_limit.max(Ttl::MIN.get()))?;
            let (lease, _) = self.granted(op, limit).await?;
            let put = Step::Put { key: key.clone(), value: value.clone(), lease };
            match self.client.transact(op, &[Condition::Absent(key.clone())], &[put], &[]).await {
                Ok(outcome) if outcome.succeeded => return Ok(request.id),
                Ok(_) => self.client.discard(lease),
                Err(Problem::LeaseGone) => {}
                Err(problem) => return Err(problem.into()),
            }
        }
        Err(op.contended())
    }

    async fn answer(&self, id: &RequestId, fence: &Fence, answer: &Answer) -> Result<Answered> {
        let text = id.to_string();
        let op = Op::write("answer", &text);
        let value = AnswerV1::of(*id, answer).encode()?;
        let leader = TableName::cluster();
        let (table, key) = (self.keys.table(&leader), self.keys.answer(*id));
        for _ in 0..ROUNDS {
            let gets = [table.clone(), self.keys.request(*id), key.clone()].map(Step::Get);
            let mut outcome = self.client.read(op, &gets).await?;
            let Some(head) = outcome.take(0) else { return Ok(Answered::Fenced(None)) };
            let claimed = head_of(op, &leader, &head)?.fence;
            if claimed != *fence {
                return Ok(Answered::Fenced(Some(claimed)));
            }
            let Some(request) = outcome.take(1) else { return Ok(Answered::Gone) };
            if let Some(earlier) = outcome.take(2) {
                let earlier = answer_of(op, *id, &earlier)?;
                let is_same = earlier == *answer;
                return Ok(if is_same { Answered::Recorded } else { Answered::Already(earlier) });
            }
            let when = [
                Condition::At(table.clone(), head.modified),
                Condition::At(request.key, request.modified),
                Condition::Absent(key.clone()),
            ];
            let put = Step::Put { key: key.clone(), value: value.clone(), lease: request.lease };
            match self.client.transact(op, &when, &[put], &[]).await {
                Ok(outcome) if outcome.succeeded => return Ok(Answered::Recorded),
                Ok(_) | Err(Problem::LeaseGone) => {}
                Err(problem) => return Err(problem.into()),
            }
        }
        Err(op.contended())
    }

    fn watch_requests(&self) -> BoxStream<'static, Result<RequestEvent>> {
        let topic = RequestsTopic { handle: self.clone() };
        subscribe(&self.client, self.info.cluster.as_str(), topic)
    }
}

fn head_of(op: Op<'_>, table: &TableName, entry: &Entry) -> Result<TableHeadV1> {
    TableHeadV1::read(table, &entry.value).map_err(|error| op.corrupt(error))
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
        let mut outcome = self.client.read(op, &[Step::Get(self.keys.table(table))]).await?;
        let Some(entry) = outcome.take(0) else { return Ok(None) };
        let mark = Mark { modified: entry.modified, read: outcome.revision };
        Ok(Some(Head::new(head_of(op, table, &entry)?, mark)))
    }

    /// None if the revision at which the head stood was compacted away.
    async fn chunks(
        &self,
        op: Op<'_>,
        head: &Head<Mark>,
        keys: &[ChunkKey],
    ) -> Result<Option<HashMap<ChunkKey, Bytes>>> {
        let mut chunks = HashMap::with_capacity(keys.len());
        for keys in keys.chunks(CHUNKS_AT_ONCE) {
            let get = |key| Step::GetAt(self.keys.chunk(&head.record.table, key), head.mark.read);
            let gets: Vec<_> = keys.iter().map(get).collect();
            let mut outcome = match self.client.read(op, &gets).await {
                Ok(outcome) => outcome,
                Err(Problem::Compacted) => return Ok(None),
                Err(problem) => return Err(problem.into()),
            };
            for (place, key) in keys.iter().enumerate() {
                // A missing one is noticed when the map is put together.
                if let Some(entry) = outcome.take(place) {
                    chunks.insert(*key, entry.value);
                }
            }
        }
        Ok(Some(chunks))
    }

    async fn stored_chunks(&self, op: Op<'_>, table: &TableName) -> Result<Vec<(ChunkKey, ())>> {
        let range = self.keys.chunks(table);
        let mut outcome = self.client.read(op, &[Step::Keys(range.clone())]).await?;
        let entries = outcome.found.pop().unwrap_or_default().entries;
        let key = |entry: &Entry| {
            let key = entry.key.strip_prefix(&range.from)?.parse().ok()?;
            Some((key, ()))
        };
        Ok(entries.iter().filter_map(key).collect())
    }

    /// Each step is conditional on the head being the one with this mark.
    async fn remove_chunks(
        &self,
        op: Op<'_>,
        table: &TableName,
        mark: &Mark,
        old: Vec<(ChunkKey, ())>,
    ) -> Result<()> {
        let when = [Condition::At(self.keys.table(table), mark.modified)];
        for old in old.chunks(CHUNKS_AT_ONCE) {
            let delete = |(key, ()): &(ChunkKey, ())| Step::Delete(self.keys.chunk(table, key));
            let steps: Vec<_> = old.iter().map(delete).collect();
            // What is left is found at the next publish.
            if !self.client.transact(op, &when, &steps, &[]).await?.succeeded {
                break;
            }
        }
        Ok(())
    }
}

impl TableWriter for Handle {
    type Reader = Self;
    /// What must hold for the fence's lease when something is written.
    type Guard = Vec<Condition>;

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
    ) -> Result<Seen<Mark, Vec<Condition>>> {
        let is_ours = fence.origin == self.info.origin;
        let mut gets = vec![Step::Get(self.keys.table(table))];
        if is_ours {
            gets.push(Step::Get(self.keys.lease(&fence.lease)));
        }
        let mut outcome = self.client.read(op, &gets).await?;
        let guard = match outcome.take(1) {
            // Of a lease in another store this one can't tell.
            None => (!is_ours).then(Vec::new),
            Some(entry) => {
                let held = self.grant_of(op, &entry)?;
                let is_held = held.holder.attempt == fence.attempt
                    && held.term.store_part() == fence.term.store_part();
                is_held.then(|| vec![Condition::At(entry.key, entry.modified)])
            }
        };
        let entry = outcome.take(0);
        let modified = entry.as_ref().map_or(0, |entry| entry.modified);
        let head = entry.map(|entry| head_of(op, table, &entry)).transpose()?;
        Ok(Seen::new(head, Mark { modified, read: outcome.revision }, guard))
    }

    async fn write_head(
        &self,
        op: Op<'_>,
        head: &TableHeadV1,
        over: &Mark,
        guard: &Vec<Condition>,
    ) -> Result<Option<Mark>> {
        let key = self.keys.table(&head.table);
        let mut when = guard.clone();
        when.push(match over.modified {
            0 => Condition::Absent(key.clone()),
            modified => Condition::At(key.clone(), modified),
        });
        let put = Step::Put { key, value: head.encode()?, lease: 0 };
        let outcome = self.client.transact(op, &when, &[put], &[]).await?;
        let mark = Mark { modified: outcome.revision, read: outcome.revision };
        Ok(outcome.succeeded.then_some(mark))
    }

    async fn write_chunks(
        &self,
        op: Op<'_>,
        head: &Head<Mark>,
        chunks: Vec<(ChunkKey, Bytes)>,
    ) -> Result<()> {
        for (key, value) in chunks {
            let key = self.keys.chunk(&head.record.table, &key);
            let put = Step::Put { key: key.clone(), value, lease: 0 };
            self.client.transact(op, &[Condition::Absent(key)], &[put], &[]).await?;
        }
        Ok(())
    }

    fn run(&self, task: BoxFuture<'static, ()>) {
        self.client.tidy_up(task);
    }
}

struct TableTopic {
    handle: Handle,
    table: TableName,
    /// What was shown last; none where there was no table.
    shown: Option<(TableUid, Version)>,
}

impl TableTopic {
    async fn map(&mut self, entry: Option<Entry>, revision: i64) -> Result<Map, Problem> {
        let op = Op::read("watch", self.table.as_str());
        let Some(entry) = entry else { return Ok(None) };
        let head = head_of(op, &self.table, &entry)?;
        let head = Head::new(head, Mark { modified: entry.modified, read: revision });
        let map = tables::read_map(&self.handle, op, &head).await?;
        map.map(Some).ok_or(Problem::Compacted)
    }
}

type Map = Option<Arc<ShardMap>>;

impl Topic for TableTopic {
    type Event = PlacementEvent;

    fn range(&self) -> Range {
        Range::one(self.handle.keys.table(&self.table))
    }

    async fn snapshot(&mut self) -> Result<(PlacementEvent, i64), Problem> {
        let op = Op::read("watch", self.table.as_str());
        let get = [Step::Get(self.handle.keys.table(&self.table))];
        let mut outcome = self.handle.client.read(op, &get).await?;
        let entry = outcome.take(0);
        let map = self.map(entry, outcome.revision).await?;
        self.shown = map.as_ref().map(|map| (map.uid(), map.version()));
        Ok((PlacementEvent::Snapshot(map), outcome.revision))
    }

    /// Shows the newest map of the batch only.
    async fn changed(
        &mut self,
        mut batch: Batch,
        events: &mut VecDeque<PlacementEvent>,
    ) -> Result<(), Problem> {
        let op = Op::read("watch", self.table.as_str());
        let entry = match batch.pop() {
            None => return Ok(()),
            Some(Change::Deleted { .. }) => None,
            Some(Change::Put(entry)) => Some(entry),
        };
        if let Some(entry) = &entry {
            let head = head_of(op, &self.table, entry)?;
            // A claim changes the head and not the map.
            if self.shown == Some((head.uid, head.version())) {
                return Ok(());
            }
        }
        let revision = entry.as_ref().map_or(0, |entry| entry.modified);
        let map = self.map(entry, revision).await?;
        let before =
            std::mem::replace(&mut self.shown, map.as_ref().map(|map| (map.uid(), map.version())));
        events.push_back(match (before, map) {
            (Some((uid, _)), Some(map)) if uid == map.uid() => PlacementEvent::Changed(map),
            (_, map) => PlacementEvent::Snapshot(map),
        });
        Ok(())
    }
}

struct RequestsTopic {
    handle: Handle,
}

/// What a key under the requests stands for.
#[derive(Debug, PartialEq, Eq)]
enum Part {
    Request(RequestId),
    Answer(RequestId),
}

fn part_of(op: Op<'_>, range: &Range, key: &str) -> Result<Part> {
    let rest = key.strip_prefix(&range.from).unwrap_or_default();
    let (id, part): (&str, fn(RequestId) -> Part) = match rest.strip_suffix("/answer") {
        Some(id) => (id, Part::Answer),
        None => (rest, Part::Request),
    };
    id.parse().map(part).map_err(|error| op.corrupt(error))
}

fn request_of(op: Op<'_>, id: RequestId, entry: &Entry) -> Result<Request> {
    RequestV1::read(id, &entry.value).map_err(|error| op.corrupt(error))
}

fn answer_of(op: Op<'_>, id: RequestId, entry: &Entry) -> Result<Answer> {
    AnswerV1::read(id, &entry.value).map_err(|error| op.corrupt(error))
}

impl Topic for RequestsTopic {
    type Event = RequestEvent;

    fn range(&self) -> Range {
        self.handle.keys.requests()
    }

    /// In the order in which they came.
    async fn snapshot(&mut self) -> Result<(RequestEvent, i64), Problem> {
        let op = Op::read("watch_requests", self.handle.info.cluster.as_str());
        let range = self.range();
        let (mut entries, revision) = self.handle.client.list(op, range.clone(), None).await?;
        entries.sort_by_key(|entry| entry.created);
        let mut answers = HashMap::new();
        let mut requests = Vec::new();
        for entry in &entries {
            match part_of(op, &range, &entry.key)? {
                Part::Request(id) => requests.push(request_of(op, id, entry)?),
                Part::Answer(id) => {
                    answers.insert(id, answer_of(op, id, entry)?);
                }
            }
        }
        let record = |request: Request| {
            let answer = answers.remove(&request.id);
            RequestRecord::new(request, answer)
        };
        Ok((RequestEvent::Snapshot(requests.into_iter().map(record).collect()), revision))
    }

    async fn changed(
        &mut self,
        batch: Batch,
        events: &mut VecDeque<RequestEvent>,
    ) -> Result<(), Problem> {
        let op = Op::read("watch_requests", self.handle.info.cluster.as_str());
        let range = self.range();
        for change in batch {
            match change {
                Change::Put(entry) => events.push_back(match part_of(op, &range, &entry.key)? {
                    Part::Request(id) => RequestEvent::Submitted(request_of(op, id, &entry)?),
                    Part::Answer(id) => RequestEvent::Answered(id, answer_of(op, id, &entry)?),
                }),
                Change::Deleted { key, .. } => {
                    // An answer goes with its request.
                    if let Part::Request(id) = part_of(op, &range, &key)? {
                        events.push_back(RequestEvent::Gone(id));
                    }
                }
            }
        }
        Ok(())
    }
}
