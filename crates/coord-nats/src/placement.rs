//! Tables and requests.
//!
//! A table is one record, its head: the highest fence and the manifest of the newest map. Claim and
//! publish are a compare-and-set of the head, so a claim makes every write fail that was decided on
//! before it. A map that is too large for the head stands in chunks, which are written before the
//! head names them and never changed. Where the server has atomic batches, a write is conditional
//! on the lease's record as well.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_core::kit::Op;
use coord_core::kit::tables::{self, Head, Seen, TableReader, TableWriter};
use coord_core::wire::{AnswerV1, ChunkKey, KnownMaps, Record, RequestV1, TableHeadV1};
use coord_core::{
    Answer, Answered, Claim, ClaimRequest, Error, Fence, Placement, PlacementEvent, Publish,
    Request, RequestEvent, RequestId, RequestRecord, Result, ShardMap, StoredTable, TableName,
    TableUid, Version,
};
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};

use crate::client::{
    Aside, Client, Condition, Expiry, Outcome, Put, Topic, Update, What, subscribe,
};
use crate::keys::Keys;
use crate::lease::READS_MAX;
use crate::{Handle, RACES_MAX, pause};

/// How many chunks are written or read at once.
const CHUNKS_MAX: usize = 8;

/// Whether a write has to be conditional on its lease.
pub(crate) enum Guard {
    /// The lease lives elsewhere, or the server has no atomic batches.
    None,
    /// This is the record under which the fence's grant holds its lease.
    Held { subject: String, sequence: u64 },
}

/// An answer that is given with a write of the head.
#[derive(Debug, PartialEq, Eq)]
struct Given {
    id: RequestId,
    ttl: Duration,
    value: Bytes,
}

impl Given {
    fn aside(&self) -> Aside {
        let what = format!("answer {} {}", self.id, self.ttl.as_millis());
        Aside { what, value: self.value.clone() }
    }

    fn of(aside: Aside) -> Option<Self> {
        let mut parts = aside.what.strip_prefix("answer ")?.split(' ');
        let id = parts.next()?.parse().ok()?;
        let ttl = Duration::from_millis(parts.next()?.parse().ok()?);
        parts.next().is_none().then_some(Self { id, ttl, value: aside.value })
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
        let filter = self.keys.tables();
        let subjects = self.client.subjects(op, &filter).await?;
        // A table that was deleted by the store's own tools leaves a marker.
        let reads = subjects.into_iter().map(|subject| async move {
            let last = self.client.get(op, &subject).await?;
            Ok(last.value.and_then(|_| Keys::table_of(&subject)))
        });
        let mut tables: Vec<_> = stream::iter(reads)
            .buffer_unordered(READS_MAX)
            .try_filter_map(|table| async { Ok::<_, Error>(table) })
            .try_collect()
            .await?;
        tables.sort_unstable();
        Ok(tables)
    }

    fn watch(&self, table: &TableName) -> BoxStream<'static, Result<PlacementEvent>> {
        let topic = TableTopic { reader: self.reader(), table: table.clone(), seen: 0, map: None };
        subscribe(&self.client, table.as_str(), topic)
    }

    async fn request(&self, request: &Request) -> Result<RequestId> {
        let name = request.id.to_string();
        let op = Op::write("request", &name);
        let subject = self.keys.asked(request.id);
        let value = self.fitting(op, RequestV1::of(request).encode()?)?;
        let mut at = 0;
        for race in 0..RACES_MAX {
            pause(race).await;
            let put = Put {
                subject: &subject,
                value: value.clone(),
                ttl: Some(request.time_limit),
                condition: Condition::At(at),
            };
            if let Outcome::Done(_) = self.client.put(op, put).await? {
                return Ok(request.id);
            }
            let last = self.client.get(op, &subject).await?;
            if last.value.is_some() {
                return Ok(request.id);
            }
            at = last.sequence;
        }
        Err(op.contended())
    }

    async fn answer(&self, id: &RequestId, fence: &Fence, answer: &Answer) -> Result<Answered> {
        let name = id.to_string();
        let op = Op::write("answer", &name);
        let value = self.fitting(op, AnswerV1::of(*id, answer).encode()?)?;
        let (asked, answered) = (self.keys.asked(*id), self.keys.answered(*id));
        let cluster = TableName::cluster();
        let table = self.keys.table(&cluster);
        for race in 0..RACES_MAX {
            pause(race).await;
            // The head is read before the answer and is a condition of the write. So whatever was
            // answered under another head is seen here, and of those who see this one the first
            // wins.
            let (sequence, head) = self.head(op, &cluster).await?;
            let claimed = head.as_ref().map(|head| &head.fence);
            if claimed != Some(fence) {
                return Ok(Answered::Fenced(claimed.cloned()));
            }
            let Some(request) = self.client.get(op, &asked).await?.value else {
                return Ok(Answered::Gone);
            };
            let request = read_request(op, *id, &request)?;
            if let Some(earlier) = self.client.get(op, &answered).await?.value {
                let earlier = read_answer(op, *id, &earlier)?;
                let is_same = earlier == *answer;
                return Ok(if is_same { Answered::Recorded } else { Answered::Already(earlier) });
            }
            if let (Expiry::Clients, Some(head)) = (self.bucket.expiry, &head) {
                let put = Put {
                    subject: &table,
                    value: head.encode()?,
                    ttl: None,
                    condition: Condition::At(sequence),
                };
                let given = Given { id: *id, ttl: request.time_limit, value: value.clone() };
                match self.give(op, put, &given).await? {
                    Some(answered) => return Ok(answered),
                    None => continue,
                }
            }
            let first = format!("{id}.{sequence}");
            let condition = Condition::Elsewhere { subject: &table, sequence, id: &first };
            let ttl = Some(request.time_limit);
            let put = Put { subject: &answered, value: value.clone(), ttl, condition };
            if let Outcome::Done(_) = self.client.put(op, put).await? {
                return Ok(Answered::Recorded);
            }
        }
        Err(op.contended())
    }

    fn watch_requests(&self) -> BoxStream<'static, Result<RequestEvent>> {
        let topic = RequestsTopic { filter: self.keys.requests(), open: BTreeMap::new() };
        subscribe(&self.client, &self.info.target, topic)
    }
}

impl Handle {
    /// The sequence of a head's last message, and the head, to be written over. An answer that was
    /// given with it is in its own place before that.
    async fn head(&self, op: Op<'_>, table: &TableName) -> Result<(u64, Option<TableHeadV1>)> {
        let last = self.client.get(op, &self.keys.table(table)).await?;
        if let Some(aside) = last.aside {
            let given = Given::of(aside).ok_or_else(|| {
                let why = "what was written with the table's head is no answer";
                Error::corrupt(op.name, why).resource(table)
            })?;
            self.put_in_place(op, &given).await?;
        }
        let read = |value: Bytes| read_head(op, table, &value);
        Ok((last.sequence, last.value.map(read).transpose()?))
    }

    /// Gives an answer with a write of the head that it is conditional on, and puts it in its own
    /// place then. None if the head is another one by now.
    ///
    /// For servers that take no condition on another subject. Every write of the head puts what was
    /// given with the one before in its place first, so of two answers the first is there when the
    /// second comes, and an answer that was given is never lost.
    async fn give(&self, op: Op<'_>, head: Put<'_>, given: &Given) -> Result<Option<Answered>> {
        self.fits(op, head.value.len() + given.value.len())?;
        let Outcome::Done(_) = self.client.put_with(op, head, &given.aside()).await? else {
            return Ok(None);
        };
        if self.put_in_place(op, given).await? {
            return Ok(Some(Answered::Recorded));
        }
        let stored = self.client.get(op, &self.keys.answered(given.id)).await?;
        let Some(stored) = stored.value else { return Ok(Some(Answered::Gone)) };
        if stored == given.value {
            return Ok(Some(Answered::Recorded));
        }
        Ok(Some(Answered::Already(read_answer(op, given.id, &stored)?)))
    }

    /// Puts an answer in its own place, unless one is there.
    async fn put_in_place(&self, op: Op<'_>, given: &Given) -> Result<bool> {
        let put = Put {
            subject: &self.keys.answered(given.id),
            value: given.value.clone(),
            ttl: Some(given.ttl),
            condition: Condition::At(0),
        };
        Ok(matches!(self.client.put(op, put).await?, Outcome::Done(_)))
    }

    /// What a write under this fence has to be conditional on; none if the fence's grant does not hold its
    /// lease any more.
    async fn guard(&self, op: Op<'_>, fence: &Fence) -> Result<Option<Guard>> {
        if !self.bucket.atomic || fence.origin != self.info.origin {
            return Ok(Some(Guard::None));
        }
        let subject = self.keys.lease(&fence.lease);
        let last = self.client.get(op, &subject).await?;
        let sequence = last.sequence;
        let held = self.held(op, &fence.lease, &last)?;
        let is_held = held.is_some_and(|held| held.fence() == *fence);
        Ok(is_held.then_some(Guard::Held { subject, sequence }))
    }

    /// Writes a chunk unless it is there.
    async fn write_chunk(
        &self,
        op: Op<'_>,
        table: &TableName,
        key: ChunkKey,
        bytes: Bytes,
    ) -> Result<()> {
        let subject = self.keys.chunk(table, &key);
        let mut at = 0;
        for race in 0..RACES_MAX {
            pause(race).await;
            let condition = Condition::At(at);
            let put = Put { subject: &subject, value: bytes.clone(), ttl: None, condition };
            if let Outcome::Done(_) = self.client.put(op, put).await? {
                return Ok(());
            }
            let last = self.client.get(op, &subject).await?;
            match last.value {
                Some(stored) if stored == bytes => return Ok(()),
                Some(_) => {
                    return Err(op.damaged(format!("a chunk's key holds something else key={key}")));
                }
                None => at = last.sequence,
            }
        }
        Err(op.contended())
    }
}

impl TableWriter for Handle {
    type Reader = Reader;
    type Guard = Guard;

    fn reader(&self) -> Reader {
        Reader { client: self.client.clone(), keys: self.keys.clone(), maps: self.maps.clone() }
    }

    fn value_bytes_max(&self) -> usize {
        self.client.value_bytes_max()
    }

    async fn see(&self, op: Op<'_>, table: &TableName, fence: &Fence) -> Result<Seen<u64, Guard>> {
        // Where a table was deleted, its marker has a sequence, which a new head is written over.
        let (mark, head) = self.head(op, table).await?;
        let guard = self.guard(op, fence).await?;
        Ok(Seen::new(head, mark, guard))
    }

    async fn write_head(
        &self,
        op: Op<'_>,
        head: &TableHeadV1,
        over: &u64,
        guard: &Guard,
    ) -> Result<Option<u64>> {
        let subject = self.keys.table(&head.table);
        let value = self.fitting(op, head.encode()?)?;
        let put = Put { subject: &subject, value, ttl: None, condition: Condition::At(*over) };
        let outcome = match guard {
            Guard::Held { subject, sequence } => {
                let guard = self.keys.guard(&head.table);
                self.client.put_guarded(op, put, &guard, (subject, *sequence)).await?
            }
            Guard::None => self.client.put(op, put).await?,
        };
        Ok(match outcome {
            Outcome::Done(sequence) => Some(sequence),
            Outcome::Conflict | Outcome::Duplicate => None,
        })
    }

    async fn write_chunks(
        &self,
        op: Op<'_>,
        head: &Head<u64>,
        chunks: Vec<(ChunkKey, Bytes)>,
    ) -> Result<()> {
        let table = &head.record.table;
        let writes = chunks.into_iter().map(|(key, bytes)| self.write_chunk(op, table, key, bytes));
        tables::each(CHUNKS_MAX, writes).await.map(drop)
    }

    fn run(&self, task: BoxFuture<'static, ()>) {
        self.client.tasks().spawn(task);
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
    type Mark = u64;
    /// The subject.
    type Found = String;

    const RACES_MAX: usize = RACES_MAX;

    async fn pause(lost: usize) {
        pause(lost).await;
    }

    fn maps(&self) -> &KnownMaps {
        &self.maps
    }

    async fn head(&self, op: Op<'_>, table: &TableName) -> Result<Option<Head<u64>>> {
        let last = self.client.get(op, &self.keys.table(table)).await?;
        let Some(value) = last.value else { return Ok(None) };
        let record = read_head(op, table, &value)?;
        Ok(Some(Head::new(record, last.sequence)))
    }

    async fn chunks(
        &self,
        op: Op<'_>,
        head: &Head<u64>,
        keys: &[ChunkKey],
    ) -> Result<Option<HashMap<ChunkKey, Bytes>>> {
        let table = &head.record.table;
        let reads = keys.iter().copied().map(|key| async move {
            let last = self.client.get(op, &self.keys.chunk(table, &key)).await?;
            Ok::<_, Error>(last.value.map(|value| (key, value)))
        });
        Ok(tables::each(CHUNKS_MAX, reads).await?.into_iter().collect())
    }

    async fn stored_chunks(
        &self,
        op: Op<'_>,
        table: &TableName,
    ) -> Result<Vec<(ChunkKey, String)>> {
        let (filter, before) = self.keys.chunks(table);
        let subjects = self.client.subjects(op, &filter).await?;
        let key = |subject: String| {
            let key = subject.strip_prefix(&before)?.parse().ok()?;
            Some((key, subject))
        };
        Ok(subjects.into_iter().filter_map(key).collect())
    }

    async fn remove_chunks(
        &self,
        op: Op<'_>,
        _: &TableName,
        _: &u64,
        old: Vec<(ChunkKey, String)>,
    ) -> Result<()> {
        let removals = old
            .into_iter()
            .map(|(_, subject)| async move { self.client.erase(op, &subject).await });
        tables::each(CHUNKS_MAX, removals).await.map(drop)
    }
}

fn read_head(op: Op<'_>, table: &TableName, value: &[u8]) -> Result<TableHeadV1> {
    TableHeadV1::read(table, value).map_err(|error| op.corrupt(error))
}

fn read_request(op: Op<'_>, id: RequestId, value: &[u8]) -> Result<Request> {
    RequestV1::read(id, value).map_err(|error| op.corrupt(error))
}

fn read_answer(op: Op<'_>, id: RequestId, value: &[u8]) -> Result<Answer> {
    AnswerV1::read(id, value).map_err(|error| op.corrupt(error))
}

struct TableTopic {
    reader: Reader,
    table: TableName,
    /// The sequence of the newest head that was taken in: a read may be ahead of the subscription.
    seen: u64,
    map: Option<Arc<ShardMap>>,
}

impl Topic for TableTopic {
    type Event = PlacementEvent;

    fn filter(&self) -> String {
        self.reader.keys.table(&self.table)
    }

    async fn apply(
        &mut self,
        update: Update,
        events: &mut VecDeque<PlacementEvent>,
    ) -> Result<Option<Duration>> {
        if update.sequence <= self.seen {
            return Ok(None);
        }
        self.seen = update.sequence;
        let table = self.table.clone();
        let op = Op::read("watch", table.as_str());
        let map = match update.what {
            What::Put(value) => {
                let head = read_head(op, &self.table, &value)?;
                if self.shows(head.uid, head.version()) {
                    return Ok(None);
                }
                let head = Head::new(head, update.sequence);
                match tables::read_map(&self.reader, op, &head).await? {
                    Some(map) => Some(map),
                    None => self.newest(op).await?,
                }
            }
            What::Removed | What::Deleted | What::Expired => None,
        };
        let is_next = match (&self.map, &map) {
            (None, None) => return Ok(None),
            (Some(old), Some(new)) => old.uid() == new.uid(),
            _ => false,
        };
        self.map.clone_from(&map);
        // Only the newest map waits for a slow reader.
        let was_snapshot = events.drain(..).any(|e| matches!(e, PlacementEvent::Snapshot(_)));
        events.push_back(match map {
            Some(map) if is_next && !was_snapshot => PlacementEvent::Changed(map),
            map => PlacementEvent::Snapshot(map),
        });
        Ok(None)
    }

    async fn snapshot(&mut self) -> Result<PlacementEvent> {
        Ok(PlacementEvent::Snapshot(self.map.clone()))
    }
}

impl TableTopic {
    fn shows(&self, uid: TableUid, version: Version) -> bool {
        self.map.as_ref().is_some_and(|map| map.uid() == uid && map.version() == version)
    }

    /// The table as it stands, where the subscription's head is out of date.
    async fn newest(&mut self, op: Op<'_>) -> Result<Option<Arc<ShardMap>>> {
        let found = tables::read_table(&self.reader, op, &self.table).await?;
        let Some((head, map)) = found else { return Ok(None) };
        self.seen = self.seen.max(head.mark);
        Ok(Some(map))
    }
}

struct RequestsTopic {
    filter: String,
    /// With the sequence of each request, by which they are ordered.
    open: BTreeMap<RequestId, (u64, RequestRecord)>,
}

impl Topic for RequestsTopic {
    type Event = RequestEvent;

    fn filter(&self) -> String {
        self.filter.clone()
    }

    async fn apply(
        &mut self,
        update: Update,
        events: &mut VecDeque<RequestEvent>,
    ) -> Result<Option<Duration>> {
        let Some((id, is_answer)) = Keys::request_of(&update.subject) else { return Ok(None) };
        let op = Op::read("watch", &update.subject);
        match (update.what, is_answer) {
            (What::Put(value), false) => {
                let request = read_request(op, id, &value)?;
                let ttl = request.time_limit;
                let record = RequestRecord::new(request.clone(), None);
                if self.open.insert(id, (update.sequence, record)).is_none() {
                    events.push_back(RequestEvent::Submitted(request));
                }
                return Ok(Some(ttl));
            }
            (What::Put(value), true) => {
                // The answer may outlive its request, which is gone then, and the answer with it.
                if let Some((_, record)) = self.open.get_mut(&id) {
                    let answer = read_answer(op, id, &value)?;
                    record.answer = Some(answer.clone());
                    events.push_back(RequestEvent::Answered(id, answer));
                }
            }
            (_, false) => {
                if self.open.remove(&id).is_some() {
                    events.push_back(RequestEvent::Gone(id));
                }
            }
            (_, true) => {}
        }
        Ok(None)
    }

    async fn snapshot(&mut self) -> Result<RequestEvent> {
        let mut open: Vec<_> = self.open.values().cloned().collect();
        open.sort_unstable_by_key(|(sequence, _)| *sequence);
        Ok(RequestEvent::Snapshot(open.into_iter().map(|(_, record)| record).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_beside_a_head_is_whole_or_refused() {
        let (id, ttl) = (RequestId::random(), Duration::from_secs(30));
        let given = Given { id, ttl, value: Bytes::from_static(b"{}") };
        let aside = given.aside();
        assert_eq!(Given::of(aside.clone()), Some(given));
        let what = aside.what.as_str();
        for bad in ["", "answer", "answer x 30", &what[1..], &format!("{what} more")] {
            let bad = Aside { what: bad.to_owned(), value: Bytes::new() };
            assert_eq!(Given::of(bad.clone()), None, "{bad:?}");
        }
    }
}
