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
use coord_core::fencing::{TableState, check_map};
use coord_core::wire::{
    AnswerV1, ChunkKey, EncodedMap, Manifest, OldChunks, Record, RequestV1, TableHeadV1,
    WireLimits, digest,
};
use coord_core::{
    Answer, Answered, Claim, ClaimRequest, Effect, ErrorKind, Fence, Placement, PlacementEvent,
    Publish, Request, RequestEvent, RequestId, RequestRecord, Result, ShardMap, Table, TableName,
    TableUid, Version,
};
use futures::stream::BoxStream;

use crate::client::{Hint, Reply, Subject, Topic, subscribe};
use crate::error::Op;
use crate::keys::{Kind, mark_of};
use crate::lease::part;
use crate::scripts::{ANSWER, ASK, REQUEST, REQUESTS, SEE, TIDY, WRITE};
use crate::{Handle, ROUNDS, VALUE_BYTES_MAX};

/// How many chunks are read at once: a server does nothing else meanwhile.
const CHUNKS_AT_ONCE: usize = 4;
/// How many chunks are removed at once.
const REMOVED_AT_ONCE: usize = 100;
/// The most requests that may be within their time limit at once.
const REQUESTS_MAX: usize = 10_000;

/// A table and the lease of a fence, as they stood at one moment.
struct Seen {
    head: Option<Head>,
    /// What must hold for the fence's lease when something is written; none if the fence's grant
    /// does not hold it any more.
    lease: Option<Condition>,
}

/// A head as it was read.
#[derive(Clone)]
struct Head {
    record: TableHeadV1,
    /// The mark of the write that it came by.
    mark: u64,
}

/// What must hold for a lease.
enum Condition {
    /// Of a lease in another store this one can't tell.
    Elsewhere,
    /// The lease is held by this attempt under this term.
    Held { lease: String, attempt: String, term: String },
}

/// What a read of a map came to.
enum Read {
    Whole(Arc<ShardMap>),
    /// A chunk is gone: the head has to be read again.
    Torn,
}

#[async_trait]
impl Placement for Handle {
    async fn claim(&self, request: &ClaimRequest) -> Result<Claim> {
        let op = Op::new("claim", request.table.as_str());
        for _ in 0..ROUNDS {
            if let Some(claim) = self.try_claim(op, request).await? {
                return Ok(claim);
            }
        }
        Err(op.contended())
    }

    async fn publish(
        &self,
        table: &TableName,
        fence: &Fence,
        expected: Version,
        map: &Arc<ShardMap>,
    ) -> Result<Publish> {
        let op = Op::new("publish", table.as_str());
        check_map(table, fence, expected, map)?;
        for _ in 0..ROUNDS {
            if let Some(publish) = self.try_publish(op, table, fence, expected, map).await? {
                return Ok(publish);
            }
        }
        Err(op.contended())
    }

    async fn load(&self, table: &TableName) -> Result<Option<Table>> {
        let op = Op::new("load", table.as_str());
        let Some((head, map)) = self.read_table(op, table).await? else { return Ok(None) };
        Ok(Some(table_of(head, map)))
    }

    async fn tables(&self) -> Result<Vec<TableName>> {
        let op = Op::new("tables", self.info.cluster.as_str());
        let mut command = redis::cmd("HKEYS");
        command.arg(self.client.keys().of(Kind::Tables));
        let reply = self.client.send(op, Effect::None, command).await?;
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
        let op = Op::new("request", &id);
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
            other => Err(op.strange(other)),
        }
    }

    async fn answer(&self, id: &RequestId, fence: &Fence, answer: &Answer) -> Result<Answered> {
        let text = id.to_string();
        let op = Op::new("answer", &text);
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
            let mark = head.mark.to_string();
            let arguments = [leader.as_str().as_bytes(), mark.as_bytes(), text.as_bytes(), &value];
            match self.client.run(op, &ANSWER, &arguments).await?.outcome() {
                "recorded" => return Ok(Answered::Recorded),
                "changed" => {}
                other => return Err(op.strange(other)),
            }
        }
        Err(op.contended())
    }

    fn watch_requests(&self) -> BoxStream<'static, Result<RequestEvent>> {
        let topic = RequestsTopic { handle: self.clone(), known: BTreeMap::new() };
        subscribe(&self.client, self.info.cluster.as_str(), topic)
    }
}

fn head_of(op: Op<'_>, table: &TableName, bytes: &[u8]) -> Result<Head> {
    let record = TableHeadV1::read(table, bytes).map_err(|error| op.corrupt(error))?;
    Ok(Head { record, mark: mark_of(op, bytes)? })
}

fn table_of(head: Head, map: Arc<ShardMap>) -> Table {
    Table::new(head.record.table, head.record.fence, head.record.binding, map)
}

impl Handle {
    async fn read_head(&self, op: Op<'_>, table: &TableName) -> Result<Option<Head>> {
        let mut command = redis::cmd("HMGET");
        command.arg(self.client.keys().of(Kind::Tables)).arg(table.as_str());
        let reply = self.client.send(op, Effect::None, command).await?;
        reply.some(0).map(|bytes| head_of(op, table, bytes)).transpose()
    }

    /// A table's head with the map that it names.
    async fn read_table(
        &self,
        op: Op<'_>,
        table: &TableName,
    ) -> Result<Option<(Head, Arc<ShardMap>)>> {
        let mut torn = None;
        for _ in 0..ROUNDS {
            let Some(head) = self.read_head(op, table).await? else { return Ok(None) };
            match self.map_of(op, &head.record).await? {
                Read::Whole(map) => return Ok(Some((head, map))),
                Read::Torn if torn == Some(head.mark) => {
                    let why = "a part of the map is missing";
                    return Err(op.error(ErrorKind::Corrupt).message(why));
                }
                Read::Torn => torn = Some(head.mark),
            }
        }
        Err(op.contended())
    }

    async fn see(&self, op: Op<'_>, table: &TableName, fence: &Fence) -> Result<Seen> {
        let is_ours = fence.origin == self.info.origin;
        let lease = if is_ours { fence.lease.as_str() } else { "" };
        let arguments = [table.as_str().as_bytes(), lease.as_bytes()];
        let reply = self.client.run(op, &SEE, &arguments).await?;
        let lease = match reply.some(1) {
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
        Ok(Seen { head, lease })
    }

    /// One try to claim; none if somebody else wrote meanwhile.
    async fn try_claim(&self, op: Op<'_>, request: &ClaimRequest) -> Result<Option<Claim>> {
        let ClaimRequest { table, fence, header, .. } = request;
        let Seen { head, lease } = self.see(op, table, fence).await?;
        let Some(Head { record, mark }) = head else {
            let Some(lease) = lease else { return Ok(Some(Claim::Fenced(fence.clone()))) };
            let record = TableHeadV1::created(table.clone(), header.clone(), fence.clone());
            return self.put_claim(op, record, None, &lease).await;
        };
        let state = TableState::from(&record);
        if let Some(refusal) = state.refuse_claim(request, lease.is_some()) {
            return Ok(Some(refusal));
        }
        let Some(lease) = lease else { return Ok(None) };
        let claimed = record.claimed_by(fence);
        // Also where it was this fence's already: what is read below must be sealed by it now.
        self.put_claim(op, claimed, Some(mark), &lease).await
    }

    async fn put_claim(
        &self,
        op: Op<'_>,
        record: TableHeadV1,
        over: Option<u64>,
        lease: &Condition,
    ) -> Result<Option<Claim>> {
        let Some(mark) = self.put_head(op, &record, over, lease).await? else { return Ok(None) };
        match self.map_of(op, &record).await? {
            Read::Whole(map) => Ok(Some(Claim::Claimed(table_of(Head { record, mark }, map)))),
            // Somebody else claimed it and went on, or it is damaged: then it is so still.
            Read::Torn => {
                let now = self.read_head(op, &record.table).await?;
                if now.is_some_and(|now| now.mark == mark) {
                    let why = "a part of the map is missing";
                    return Err(op.error(ErrorKind::Corrupt).message(why));
                }
                Ok(None)
            }
        }
    }

    /// Writes a head in the place of the one that was read, if the lease is still held: its mark, or
    /// none if either has changed.
    async fn put_head(
        &self,
        op: Op<'_>,
        record: &TableHeadV1,
        over: Option<u64>,
        lease: &Condition,
    ) -> Result<Option<u64>> {
        let value = record.encode()?;
        let over = over.map(|mark| mark.to_string()).unwrap_or_default();
        let (lease, attempt, term) = match lease {
            Condition::Elsewhere => ("", "", ""),
            Condition::Held { lease, attempt, term } => {
                (lease.as_str(), attempt.as_str(), term.as_str())
            }
        };
        let arguments = [
            record.table.as_str().as_bytes(),
            over.as_bytes(),
            &value,
            lease.as_bytes(),
            attempt.as_bytes(),
            term.as_bytes(),
        ];
        let reply = self.client.run_confirmed(op, &WRITE, &arguments).await?;
        match reply.outcome() {
            "written" => reply.text(1).parse().map(Some).map_err(|_| op.strange("no mark")),
            "changed" => Ok(None),
            other => Err(op.strange(other)),
        }
    }

    /// One try to publish; none if somebody else wrote meanwhile.
    async fn try_publish(
        &self,
        op: Op<'_>,
        table: &TableName,
        fence: &Fence,
        expected: Version,
        map: &Arc<ShardMap>,
    ) -> Result<Option<Publish>> {
        let Seen { head, lease } = self.see(op, table, fence).await?;
        let Some(Head { record: head, mark }) = head else {
            return Ok(Some(Publish::Fenced(None)));
        };
        let settled = TableState::from(&head).settle_publish(
            table,
            fence,
            expected,
            map,
            lease.is_some(),
            || head.holds(map),
        )?;
        let Some(lease) = lease else { return Ok(settled) };
        if let Some(settled) = settled {
            // Written once more where it has to be confirmed: the first time may have gone without.
            let is_done = self.client.min_replicas() == 0
                || !matches!(settled, Publish::Published(_))
                || self.put_head(op, &head, Some(mark), &lease).await?.is_some();
            return Ok(is_done.then_some(settled));
        }
        let limits = WireLimits::new(VALUE_BYTES_MAX)?;
        let encoded = self.maps.encode(&head, map, limits)?;
        self.put_chunks(op, table, &encoded).await?;
        let old = OldChunks::after(fence, head.manifest.as_ref(), &encoded.manifest);
        let head = head.with_fence(fence.clone()).with_manifest(encoded.manifest.clone());
        let Some(mark) = self.put_head(op, &head, Some(mark), &lease).await? else {
            return Ok(None);
        };
        if self.maps.published(table, &encoded.manifest, map) {
            self.remove_chunks(table, mark, map.version(), old);
        }
        Ok(Some(Publish::Published(map.version())))
    }

    async fn put_chunks(&self, op: Op<'_>, table: &TableName, encoded: &EncodedMap) -> Result<()> {
        for (key, value) in &encoded.chunks {
            let mut command = redis::cmd("HSETNX");
            command.arg(self.client.keys().chunks(table)).arg(key.to_string()).arg(&value[..]);
            self.client.send(op, Effect::Unknown, command).await?;
        }
        Ok(())
    }

    /// Removes, in the background, the chunks that are of no use any more. Each step is conditional on
    /// the head being the one that was just written.
    fn remove_chunks(&self, table: &TableName, head: u64, version: Version, old: OldChunks) {
        let (client, maps, table) = (self.client.clone(), self.maps.clone(), table.clone());
        self.client.tidy_up(async move {
            let op = Op::new("remove chunks", table.as_str());
            let chunks = client.keys().chunks(&table);
            let mut command = redis::cmd("HKEYS");
            command.arg(&chunks);
            let Ok(stored) = client.send(op, Effect::None, command).await else { return };
            if stored.items().is_empty() {
                maps.swept(&table, version);
            }
            let is_old = |field: &&Bytes| {
                let key = std::str::from_utf8(field).ok().and_then(|text| text.parse().ok());
                key.is_some_and(|key| old.contains(&key))
            };
            let old: Vec<&Bytes> = stored.items().iter().filter(is_old).collect();
            let head = head.to_string();
            for old in old.chunks(REMOVED_AT_ONCE) {
                let mut arguments: Vec<&[u8]> = vec![table.as_str().as_bytes(), head.as_bytes()];
                arguments.extend(old.iter().map(|field| &field[..]));
                let keys = [chunks.clone()];
                match client.run_on(op, &TIDY, &keys, &arguments).await {
                    Ok(reply) if reply.outcome() == "removed" => {}
                    // What is left is found at the next publish.
                    _ => return,
                }
            }
        });
    }

    /// The map that a head names.
    async fn map_of(&self, op: Op<'_>, head: &TableHeadV1) -> Result<Read> {
        let fetch = match self.maps.read(head) {
            Ok(map) => return Ok(Read::Whole(map)),
            Err(fetch) => fetch,
        };
        let chunks = self.chunks(op, &head.table, &fetch.keys).await?;
        let Some(chunks) = chunks else { return Ok(Read::Torn) };
        let map = self.maps.assemble(head, &fetch, &chunks);
        map.map(Read::Whole).map_err(|error| op.corrupt(error))
    }

    /// Chunks by their keys; none if one of them is gone.
    async fn chunks(
        &self,
        op: Op<'_>,
        table: &TableName,
        keys: &[ChunkKey],
    ) -> Result<Option<HashMap<ChunkKey, Bytes>>> {
        let mut chunks = HashMap::with_capacity(keys.len());
        for keys in keys.chunks(CHUNKS_AT_ONCE) {
            let mut command = redis::cmd("HMGET");
            command.arg(self.client.keys().chunks(table));
            for key in keys {
                command.arg(key.to_string());
            }
            let reply = self.client.send(op, Effect::None, command).await?;
            for (place, key) in keys.iter().enumerate() {
                let Some(value) = reply.some(place) else { return Ok(None) };
                chunks.insert(*key, value.clone());
            }
        }
        Ok(Some(chunks))
    }

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
        let op = Op::new("watch", self.table.as_str());
        let map = self.handle.read_table(op, &self.table).await?.map(|(_, map)| map);
        self.shown = map.as_deref().map(Shown::of);
        Ok(PlacementEvent::Snapshot(map))
    }

    async fn changed(
        &mut self,
        _hints: &[Hint],
        events: &mut VecDeque<PlacementEvent>,
    ) -> Result<()> {
        let op = Op::new("watch", self.table.as_str());
        // A claim changes the head and not the map.
        match (self.handle.read_head(op, &self.table).await?, self.shown) {
            (None, None) => return Ok(()),
            (Some(head), Some(shown)) if shown.is_of(&head.record) => return Ok(()),
            _ => {}
        }
        let map = self.handle.read_table(op, &self.table).await?.map(|(_, map)| map);
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
        let op = Op::new("watch_requests", self.handle.info.cluster.as_str());
        let found = self.handle.read_requests(op, &[]).await?;
        let mut found: Vec<Arrived> = found.into_values().flatten().collect();
        found.sort_by_key(|arrived| arrived.mark);
        let known = |arrived: &Arrived| (arrived.request.id, arrived.answer.is_some());
        self.known = found.iter().map(known).collect();
        let record = |arrived: Arrived| RequestRecord::new(arrived.request, arrived.answer);
        Ok(RequestEvent::Snapshot(found.into_iter().map(record).collect()))
    }

    async fn changed(&mut self, hints: &[Hint], events: &mut VecDeque<RequestEvent>) -> Result<()> {
        let op = Op::new("watch_requests", self.handle.info.cluster.as_str());
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
