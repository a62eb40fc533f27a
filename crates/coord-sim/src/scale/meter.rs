//! A store that counts what is asked of it and what it tells.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use coord_core::wire::{EncodedMap, Manifest, Record as _, WireLimits, encode_map, encode_next};
use coord_core::{
    Acquire, AcquireRequest, Answer, Answered, Backend, BackendInfo, Claim, ClaimRequest,
    Discovery, Evict, Fence, Grant, Health, Heartbeat, Incarnation, Lease, LeaseEvent, LeaseName,
    LeaseRecord, Listing, MemoryBackend, NodeEvent, NodeId, NodeInfo, NodeRecord, Page, Placement,
    PlacementEvent, Publish, Register, Registration, Release, Renew, Replace, Request,
    RequestEvent, RequestId, Result, Revision, ShardMap, Slot, StoredTable, TableName, Ttl,
    Version,
};
use futures::StreamExt;
use futures::stream::BoxStream;

use super::cpu_time;

/// The largest value that a map is split into, as on a NATS server of the usual settings.
const VALUE_BYTES_MAX: usize = 1 << 20;

/// What was asked and told since the meter was read last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// How often each operation was called.
    pub calls: BTreeMap<&'static str, u64>,
    /// How many events of each watch reached somebody, all subscribers together.
    pub told: BTreeMap<&'static str, u64>,
    /// What the published versions of each table come to.
    pub tables: BTreeMap<TableName, Versions>,
}

/// The published versions of one table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Versions {
    /// How many.
    pub versions: u64,
    /// Bytes that a real backend writes for them: manifests and chunks.
    pub bytes_written: u64,
    /// Bytes that one watcher reads to follow them: manifests and the chunks that it lacks.
    pub bytes_read: u64,
    /// Primaries that went from one node to another.
    pub moves: u64,
    /// What one watcher spends on putting the versions together.
    pub decoding: Duration,
    /// What the meter itself spends on counting, which no process does.
    pub metering: Duration,
}

impl Counts {
    /// How often this operation was called.
    #[must_use]
    pub fn calls(&self, operation: &str) -> u64 {
        self.calls.get(operation).copied().unwrap_or_default()
    }

    /// How many events of this watch reached somebody.
    #[must_use]
    pub fn told(&self, watch: &str) -> u64 {
        self.told.get(watch).copied().unwrap_or_default()
    }

    /// The versions of this table.
    #[must_use]
    pub fn table(&self, name: &TableName) -> Versions {
        self.tables.get(name).cloned().unwrap_or_default()
    }

    /// How many calls changed something in the store.
    #[must_use]
    pub fn writes(&self) -> u64 {
        let reads = ["get", "list", "load", "nodes", "tables"];
        self.calls.iter().filter(|(name, _)| !reads.contains(*name)).map(|(_, calls)| calls).sum()
    }
}

#[derive(Default)]
struct State {
    counts: Counts,
    known: HashMap<TableName, (Manifest, Arc<ShardMap>)>,
}

/// A memory backend behind a counter. Clones are the same store and the same counter.
#[derive(Clone)]
pub struct Meter {
    inner: MemoryBackend,
    lease: Arc<dyn Lease>,
    discovery: Arc<dyn Discovery>,
    placement: Arc<dyn Placement>,
    state: Arc<Mutex<State>>,
}

impl Meter {
    /// A counter in front of this store.
    #[must_use]
    pub fn new(inner: MemoryBackend) -> Self {
        let (lease, discovery) = (inner.lease(), inner.discovery());
        let (placement, state) = (inner.placement(), Arc::default());
        Self { inner, lease, discovery, placement, state }
    }

    /// What was counted since the last call.
    #[must_use]
    pub fn take(&self) -> Counts {
        std::mem::take(&mut self.state().counts)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self, operation: &'static str) {
        *self.state().counts.calls.entry(operation).or_default() += 1;
    }

    fn counted<E: Send + 'static>(
        &self,
        watch: &'static str,
        events: BoxStream<'static, E>,
    ) -> BoxStream<'static, E> {
        let state = Arc::clone(&self.state);
        let count = move |_: &E| {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            *state.counts.told.entry(watch).or_default() += 1;
        };
        events.inspect(count).boxed()
    }

    /// Encodes a version as a real backend does, and reads it as a watcher does that had the one before.
    fn published(&self, name: &TableName, map: &Arc<ShardMap>) -> Result<()> {
        let began = cpu_time();
        let known = self.state().known.get(name).cloned();
        let limits = WireLimits::new(VALUE_BYTES_MAX)?;
        let EncodedMap { manifest, chunks, .. } = match &known {
            Some((manifest, old)) => encode_next(manifest, old, map, limits)?,
            None => encode_map(map, limits)?,
        };
        let head = manifest.encode()?.len();
        let written = head + chunks.iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
        let chunks: HashMap<_, _> = chunks.into_iter().collect();
        let have = known.as_ref().map(|(_, old)| &**old);
        let lacks = manifest.needed(have);
        let read = lacks
            .iter()
            .filter_map(|key| chunks.get(key))
            .fold(head, |sum, chunk| sum + chunk.len());
        let decodes = cpu_time();
        let read_back = manifest.assemble(have, &chunks)?;
        let decoding = cpu_time().saturating_sub(decodes);
        debug_assert_eq!(read_back, **map, "what is read is what was written");
        let moves = have.map_or(0, |old| moves(old, map));
        drop(read_back);
        let mut state = self.state();
        state.known.insert(name.clone(), (manifest, Arc::clone(map)));
        let table = state.counts.tables.entry(name.clone()).or_default();
        table.versions += 1;
        table.bytes_written += wide(written);
        table.bytes_read += wide(read);
        table.moves += moves;
        table.decoding += decoding;
        table.metering += cpu_time().saturating_sub(began);
        Ok(())
    }
}

/// How many primaries differ, by the node's name.
fn moves(old: &ShardMap, new: &ShardMap) -> u64 {
    let of = |map: &ShardMap, shard| map.owner(shard).map(|node| node.id.clone());
    let rows = old.raw_owners() == new.raw_owners() && old.nodes() == new.nodes();
    if rows {
        return 0;
    }
    let renamed: Vec<bool> = old
        .nodes()
        .iter()
        .zip(new.nodes())
        .map(|(a, b)| a.as_ref().map(|a| &a.id) != b.as_ref().map(|b| &b.id))
        .collect();
    let renamed = |slot: Slot| slot.index().and_then(|at| renamed.get(at)) == Some(&true);
    let shards = new.header().shards.shards();
    let went = shards.filter(|&shard| {
        let slot = |map: &ShardMap| map.owner_slots(shard).next();
        let (before, after) = (slot(old), slot(new));
        if before == after && !before.is_some_and(renamed) {
            return false;
        }
        let (before, after) = (of(old, shard), of(new, shard));
        before.is_some() && after.is_some() && before != after
    });
    wide(went.count())
}

fn wide(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

#[async_trait]
impl Lease for Meter {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        self.call("try_acquire");
        self.lease.try_acquire(request).await
    }

    async fn renew(&self, grant: &Grant) -> Result<Renew> {
        self.call("renew");
        self.lease.renew(grant).await
    }

    async fn release(&self, grant: &Grant) -> Result<Release> {
        self.call("release");
        self.lease.release(grant).await
    }

    async fn get(&self, lease: &LeaseName) -> Result<Option<LeaseRecord>> {
        self.call("get");
        self.lease.get(lease).await
    }

    async fn list(&self, page: Page) -> Result<Listing<LeaseRecord>> {
        self.call("list");
        self.lease.list(page).await
    }

    fn watch(&self, lease: &LeaseName) -> BoxStream<'static, Result<LeaseEvent>> {
        self.counted("lease", self.lease.watch(lease))
    }
}

#[async_trait]
impl Discovery for Meter {
    async fn register(&self, node: &NodeInfo, ttl: Ttl, replace: Replace) -> Result<Register> {
        self.call("register");
        self.discovery.register(node, ttl, replace).await
    }

    async fn heartbeat(&self, held: &Registration, node: &NodeInfo) -> Result<Heartbeat> {
        self.call("heartbeat");
        self.discovery.heartbeat(held, node).await
    }

    async fn deregister(&self, held: &Registration) -> Result<()> {
        self.call("deregister");
        self.discovery.deregister(held).await
    }

    async fn evict(&self, node: &NodeId, run: Incarnation, seen: &Revision) -> Result<Evict> {
        self.call("evict");
        self.discovery.evict(node, run, seen).await
    }

    async fn nodes(&self) -> Result<Vec<NodeRecord>> {
        self.call("nodes");
        self.discovery.nodes().await
    }

    fn watch(&self) -> BoxStream<'static, Result<NodeEvent>> {
        self.counted("nodes", self.discovery.watch())
    }
}

#[async_trait]
impl Placement for Meter {
    async fn claim(&self, request: &ClaimRequest) -> Result<Claim> {
        self.call("claim");
        self.placement.claim(request).await
    }

    async fn publish(
        &self,
        table: &TableName,
        fence: &Fence,
        expected: Version,
        map: &Arc<ShardMap>,
    ) -> Result<Publish> {
        self.call("publish");
        let published = self.placement.publish(table, fence, expected, map).await?;
        if matches!(published, Publish::Published(_)) {
            self.published(table, map)?;
        }
        Ok(published)
    }

    async fn load(&self, table: &TableName) -> Result<Option<StoredTable>> {
        self.call("load");
        self.placement.load(table).await
    }

    async fn tables(&self) -> Result<Vec<TableName>> {
        self.call("tables");
        self.placement.tables().await
    }

    fn watch(&self, table: &TableName) -> BoxStream<'static, Result<PlacementEvent>> {
        let watch = if table.is_reserved() { "cluster" } else { "table" };
        self.counted(watch, self.placement.watch(table))
    }

    async fn request(&self, request: &Request) -> Result<RequestId> {
        self.call("request");
        self.placement.request(request).await
    }

    async fn answer(&self, id: &RequestId, fence: &Fence, answer: &Answer) -> Result<Answered> {
        self.call("answer");
        self.placement.answer(id, fence, answer).await
    }

    fn watch_requests(&self) -> BoxStream<'static, Result<RequestEvent>> {
        self.counted("requests", self.placement.watch_requests())
    }
}

#[async_trait]
impl Backend for Meter {
    fn info(&self) -> &BackendInfo {
        self.inner.info()
    }

    fn lease(&self) -> Arc<dyn Lease> {
        Arc::new(self.clone())
    }

    fn discovery(&self) -> Arc<dyn Discovery> {
        Arc::new(self.clone())
    }

    fn placement(&self) -> Arc<dyn Placement> {
        Arc::new(self.clone())
    }

    async fn check(&self) -> Result<Health> {
        self.inner.check().await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("inner", &self.inner).finish_non_exhaustive()
    }
}
