//! The table protocol over heads and chunks, written once for every store.
//!
//! ```text
//!   claim     see head and lease -> refused? -> write head -> read map
//!   publish   see head and lease -> settled? -> write chunks -> write head -> sweep old chunks
//!   load      read head -> read the chunks that it names
//! ```
//!
//! Each write of a head is conditional on the head that was read, so a claim makes every write fail that
//! was decided on before it. Chunks are written before a head names them, and never changed. They are
//! removed after newer maps were written, so a reader that misses one reads the head again.

use std::collections::HashMap;
use std::fmt::Debug;
use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt, TryStreamExt};

use super::Op;
use crate::error::Result;
use crate::fencing::{TableState, check_map};
use crate::placement::{Claim, Publish};
use crate::types::{ClaimRequest, Fence, ShardMap, StoredTable, TableName, Version};
use crate::wire::{ChunkKey, EncodedMap, KnownMaps, OldChunks, TableHeadV1, WireLimits};

/// A table's head as it stands.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Head<M> {
    /// The head.
    pub record: TableHeadV1,
    /// Which write it came by.
    pub mark: M,
}

/// A table's head and the lease of a fence, as a writer finds them.
#[non_exhaustive]
#[derive(Debug)]
pub struct Seen<M, G> {
    /// The head; none if there is no table.
    pub head: Option<TableHeadV1>,
    /// Which write the head came by, or that there is none.
    pub mark: M,
    /// What a write has to be conditional on beside the head. None if the fence's grant does not hold its
    /// lease any more.
    pub guard: Option<G>,
}

impl<M> Head<M> {
    /// A head and the mark of its write.
    pub fn new(record: TableHeadV1, mark: M) -> Self {
        Self { record, mark }
    }
}

impl<M, G> Seen<M, G> {
    /// What was seen at one moment, or so that a later write notices what changed between.
    pub fn new(head: Option<TableHeadV1>, mark: M, guard: Option<G>) -> Self {
        Self { head, mark, guard }
    }
}

/// Reads tables, and removes chunks that no head names.
pub trait TableReader: Clone + Debug + Send + Sync + 'static {
    /// Tells one write of a head from another.
    type Mark: Clone + Debug + PartialEq + Send + Sync + 'static;
    /// What the store needs to know of a chunk to remove it, beside its key.
    type Found: Send + 'static;

    /// How often a method that loses races for a head tries before it gives up.
    const RACES_MAX: usize;

    /// Waits before a race is run, of which so many were lost.
    fn pause(lost: usize) -> impl Future<Output = ()> + Send;

    /// The maps that went through this handle.
    fn maps(&self) -> &KnownMaps;

    /// A table's head; none if there is no table.
    ///
    /// # Errors
    /// Those of the store.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    fn head(
        &self,
        op: Op<'_>,
        table: &TableName,
    ) -> impl Future<Output = Result<Option<Head<Self::Mark>>>> + Send;

    /// Chunks of a head by their keys; none if one of them is gone, so that the head has to be read again.
    ///
    /// # Errors
    /// Those of the store.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    fn chunks(
        &self,
        op: Op<'_>,
        head: &Head<Self::Mark>,
        keys: &[ChunkKey],
    ) -> impl Future<Output = Result<Option<HashMap<ChunkKey, Bytes>>>> + Send;

    /// All chunks that are stored of a table.
    ///
    /// # Errors
    /// Those of the store.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    fn stored_chunks(
        &self,
        op: Op<'_>,
        table: &TableName,
    ) -> impl Future<Output = Result<Vec<(ChunkKey, Self::Found)>>> + Send;

    /// Removes chunks that no map needs after the head with this mark.
    ///
    /// # Errors
    /// Those of the store.
    ///
    /// # Cancel safety
    /// Some of the chunks may be removed.
    fn remove_chunks(
        &self,
        op: Op<'_>,
        table: &TableName,
        mark: &Self::Mark,
        old: Vec<(ChunkKey, Self::Found)>,
    ) -> impl Future<Output = Result<()>> + Send;
}

/// Writes tables.
pub trait TableWriter: Send + Sync {
    /// What reads the same store.
    type Reader: TableReader;
    /// What a write has to be conditional on beside the head.
    type Guard: Send + Sync;

    /// Whether a claim writes the head also where it names the claiming fence already: for a store that may
    /// lose a write that it acknowledged.
    const REPEATS_CLAIMS: bool = false;

    /// Whether a publish that is stored already writes the head again, for the same reason.
    fn repeats_publishes(&self) -> bool {
        false
    }

    /// A reader of the same handle.
    fn reader(&self) -> Self::Reader;

    /// The largest value that a record or a chunk may have.
    fn value_bytes_max(&self) -> usize;

    /// A table's head, to be written over, and the lease of a fence.
    ///
    /// # Errors
    /// Those of the store.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    fn see(
        &self,
        op: Op<'_>,
        table: &TableName,
        fence: &Fence,
    ) -> impl Future<Output = Result<Seen<MarkOf<Self>, Self::Guard>>> + Send;

    /// Writes a head over what was seen under a mark. None if something else is there by now, or the guard
    /// does not hold any more.
    ///
    /// # Errors
    /// Those of the store.
    ///
    /// # Cancel safety
    /// The head may be written.
    fn write_head(
        &self,
        op: Op<'_>,
        head: &TableHeadV1,
        over: &MarkOf<Self>,
        guard: &Self::Guard,
    ) -> impl Future<Output = Result<Option<MarkOf<Self>>>> + Send;

    /// Writes each chunk that is not there yet. `head` is the one that they come after.
    ///
    /// # Errors
    /// Those of the store.
    ///
    /// # Cancel safety
    /// Some of the chunks may be written.
    fn write_chunks(
        &self,
        op: Op<'_>,
        head: &Head<MarkOf<Self>>,
        chunks: Vec<(ChunkKey, Bytes)>,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Runs something to its end in the background, unless the handle is closed before.
    fn run(&self, task: BoxFuture<'static, ()>);

    /// What a store has to do between a claim and the read of the map.
    ///
    /// # Errors
    /// Those of the store.
    ///
    /// # Cancel safety
    /// Some of it may be done.
    fn claimed(
        &self,
        op: Op<'_>,
        request: &ClaimRequest,
    ) -> impl Future<Output = Result<()>> + Send {
        let _ = (op, request);
        async { Ok(()) }
    }
}

/// The mark of a writer's heads.
pub type MarkOf<W> = <<W as TableWriter>::Reader as TableReader>::Mark;

/// [`Placement::claim`](crate::Placement::claim) over a store of heads and chunks.
///
/// # Errors
/// As the trait says.
///
/// # Cancel safety
/// The table may be claimed.
pub async fn claim<W: TableWriter + ?Sized>(store: &W, request: &ClaimRequest) -> Result<Claim> {
    let op = Op::write("claim", request.table.as_str());
    let ClaimRequest { table, fence, header, .. } = request;
    for lost in 0..<W::Reader as TableReader>::RACES_MAX {
        <W::Reader as TableReader>::pause(lost).await;
        let Seen { head, mark, guard } = store.see(op, table, fence).await?;
        let record = match head {
            None => TableHeadV1::created(table.clone(), header.clone(), fence.clone()),
            Some(record) => {
                let state = TableState::from(&record);
                if let Some(refusal) = state.refuse_claim(request, guard.is_some()) {
                    return Ok(refusal);
                }
                let is_claimed = record.fence == *fence && record.binding.admits(fence);
                if is_claimed && !W::REPEATS_CLAIMS {
                    return claimed(store, op, request, Head { record, mark }).await;
                }
                record.claimed_by(fence)
            }
        };
        // Only a table that does not exist gets here without its lease.
        let Some(guard) = guard else { return Ok(Claim::Fenced(fence.clone())) };
        if let Some(mark) = store.write_head(op, &record, &mark, &guard).await? {
            return claimed(store, op, request, Head { record, mark }).await;
        }
    }
    Err(op.contended())
}

/// The table of a head that names the claiming fence.
async fn claimed<W: TableWriter + ?Sized>(
    store: &W,
    op: Op<'_>,
    request: &ClaimRequest,
    head: Head<MarkOf<W>>,
) -> Result<Claim> {
    store.claimed(op, request).await?;
    let reader = store.reader();
    if let Some(map) = read_map(&reader, op, &head).await? {
        return Ok(Claim::Claimed(whole(head.record, map)));
    }
    // A newer map has replaced it: this fence wrote it, or that of a successor.
    Ok(match read_table(&reader, op, &request.table).await? {
        Some((head, map)) if head.record.fence == request.fence => {
            Claim::Claimed(whole(head.record, map))
        }
        Some((head, _)) => Claim::Fenced(head.record.fence),
        None => Claim::Fenced(request.fence.clone()),
    })
}

/// [`Placement::publish`](crate::Placement::publish) over a store of heads and chunks.
///
/// # Errors
/// As the trait says.
///
/// # Cancel safety
/// The map may be published.
pub async fn publish<W: TableWriter + ?Sized>(
    store: &W,
    table: &TableName,
    fence: &Fence,
    expected: Version,
    map: &Arc<ShardMap>,
) -> Result<Publish> {
    check_map(table, fence, expected, map)?;
    let op = Op::write("publish", table.as_str());
    let reader = store.reader();
    for lost in 0..<W::Reader as TableReader>::RACES_MAX {
        <W::Reader as TableReader>::pause(lost).await;
        let Seen { head, mark, guard } = store.see(op, table, fence).await?;
        let Some(record) = head else { return Ok(Publish::Fenced(None)) };
        let (is_held, is_stored) = (guard.is_some(), || record.holds(map));
        let settled = TableState::from(&record)
            .settle_publish(table, fence, expected, map, is_held, is_stored)?;
        let Some(guard) = guard else {
            return Ok(settled.unwrap_or(Publish::Fenced(Some(record.fence))));
        };
        if let Some(publish) = settled {
            let is_done = !matches!(publish, Publish::Published(_))
                || !store.repeats_publishes()
                || store.write_head(op, &record, &mark, &guard).await?.is_some();
            if is_done {
                return Ok(publish);
            }
            continue;
        }
        let head = Head { record, mark };
        let limits = WireLimits::new(store.value_bytes_max())?;
        let EncodedMap { manifest, chunks, .. } =
            reader.maps().encode(&head.record, map, limits)?;
        store.write_chunks(op, &head, chunks).await?;
        let Head { record, mark } = head;
        let old = OldChunks::after(fence, record.manifest.as_ref(), &manifest);
        let record = record.with_fence(fence.clone()).with_manifest(manifest.clone());
        let Some(mark) = store.write_head(op, &record, &mark, &guard).await? else {
            continue;
        };
        if reader.maps().published(table, &manifest, map) {
            let (table, version) = (table.clone(), manifest.version());
            let sweep = Sweep { reader, table, mark, version, old };
            store.run(Box::pin(sweep.run()));
        }
        return Ok(Publish::Published(map.version()));
    }
    Err(op.contended())
}

/// [`Placement::load`](crate::Placement::load) over a store of heads and chunks.
///
/// # Errors
/// As the trait says.
///
/// # Cancel safety
/// Nothing is lost.
pub async fn load<R: TableReader>(reader: &R, table: &TableName) -> Result<Option<StoredTable>> {
    let op = Op::read("load", table.as_str());
    let table = read_table(reader, op, table).await?;
    Ok(table.map(|(head, map)| whole(head.record, map)))
}

/// A table's head with the map that it names; none if there is no table.
///
/// # Errors
/// `Corrupt` if a chunk is missing that the head names, and what the reader's own errors are.
///
/// # Cancel safety
/// Nothing is lost.
pub async fn read_table<R: TableReader>(
    reader: &R,
    op: Op<'_>,
    table: &TableName,
) -> Result<Option<(Head<R::Mark>, Arc<ShardMap>)>> {
    let mut before = None;
    for lost in 0..R::RACES_MAX {
        R::pause(lost).await;
        let Some(head) = reader.head(op, table).await? else { return Ok(None) };
        if let Some(map) = read_map(reader, op, &head).await? {
            return Ok(Some((head, map)));
        }
        // It was removed with its manifest, so there must be another manifest by now.
        if before.as_ref() == Some(&head.mark) {
            return Err(op.damaged("a chunk is missing that the table's head names"));
        }
        before = Some(head.mark);
    }
    Err(op.contended())
}

/// The map that a head names; none if a chunk of it is gone.
///
/// # Errors
/// `Corrupt` if the chunks don't make the map, and what the reader's own errors are.
///
/// # Cancel safety
/// Nothing is lost.
pub async fn read_map<R: TableReader>(
    reader: &R,
    op: Op<'_>,
    head: &Head<R::Mark>,
) -> Result<Option<Arc<ShardMap>>> {
    let fetch = match reader.maps().read(&head.record) {
        Ok(map) => return Ok(Some(map)),
        Err(fetch) => fetch,
    };
    let chunks = reader.chunks(op, head, &fetch.keys).await?;
    let Some(chunks) = chunks else { return Ok(None) };
    let map = reader.maps().assemble(&head.record, &fetch, &chunks);
    map.map(Some).map_err(|error| op.corrupt(error))
}

fn whole(head: TableHeadV1, map: Arc<ShardMap>) -> StoredTable {
    StoredTable::new(head.table, head.fence, head.binding, map)
}

/// Removes the chunks of older maps.
struct Sweep<R: TableReader> {
    reader: R,
    table: TableName,
    mark: R::Mark,
    version: Version,
    old: OldChunks,
}

impl<R: TableReader> Sweep<R> {
    async fn run(self) {
        if let Err(error) = self.sweep().await {
            // The next publish tries again.
            tracing::debug!(%error, table = %self.table, "old chunks were not removed");
        }
    }

    async fn sweep(&self) -> Result<()> {
        let op = Op::write("sweep", self.table.as_str());
        let mut stored = self.reader.stored_chunks(op, &self.table).await?;
        if stored.is_empty() {
            self.reader.maps().swept(&self.table, self.version);
        }
        stored.retain(|(key, _)| self.old.contains(key));
        self.reader.remove_chunks(op, &self.table, &self.mark, stored).await
    }
}

/// Runs requests that don't depend on each other, a few at once, up to the first error.
///
/// # Errors
/// The first error of a request.
///
/// # Cancel safety
/// The requests that were sent may have taken effect.
pub async fn each<T, F>(at_once: usize, requests: impl Iterator<Item = F> + Send) -> Result<Vec<T>>
where
    T: Send,
    F: Future<Output = Result<T>> + Send,
{
    stream::iter(requests).buffer_unordered(at_once).try_collect().await
}
