//! The layer around the store at which the world sees what the store tells, and on whose two sides a
//! planted bug may sit.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use coord_conformance::history::{Recorder, What};
use coord_core::{
    Acquire, AcquireRequest, Answer, Answered, Backend, BackendInfo, Claim, ClaimRequest,
    Discovery, Error, Evict, ExpiryClock, Fence, Grant, Health, Heartbeat, Incarnation, Lease,
    LeaseEvent, LeaseName, LeaseRecord, Listing, Motion, MotionPhase, NodeEvent, NodeId, NodeInfo,
    NodeRecord, Page, Placement, PlacementEvent, Publish, Register, Registration, Release, Renew,
    Replace, Request, RequestEvent, RequestId, Result, Revision, ShardId, ShardMap, Slot,
    StoredTable, TableName, Term, Ttl, Version,
};
use futures::stream::{self, BoxStream, StreamExt};

use crate::invariants::{Judge, Seen};
use crate::plants::Plant;
use crate::wire::Wire;

/// Where the world writes down what the store tells; clones are the same.
#[derive(Clone, Debug)]
pub struct Books {
    judge: Judge,
    recorder: Recorder,
    wire: Wire,
    /// Of the store where nodes register.
    nodes: Arc<dyn Discovery>,
    /// Of the store where maps are.
    maps: Arc<dyn Placement>,
    plant: Option<Plant>,
    planted: Arc<Mutex<Planted>>,
}

/// What planted bugs remember.
#[derive(Debug, Default)]
struct Planted {
    first_term: Option<Term>,
    runs: BTreeMap<NodeId, Incarnation>,
    overwritten: BTreeMap<TableName, Arc<ShardMap>>,
    vanished: BTreeSet<NodeId>,
}

impl Books {
    /// Empty books.
    #[must_use]
    pub fn new(
        (judge, recorder, wire): (Judge, Recorder, Wire),
        (nodes, maps): (Arc<dyn Discovery>, Arc<dyn Placement>),
        plant: Option<Plant>,
    ) -> Self {
        Self { judge, recorder, wire, nodes, maps, plant, planted: Arc::default() }
    }

    /// The same backend, with these books.
    #[must_use]
    pub fn around(&self, inner: Arc<dyn Backend>) -> Booked {
        let mut info = inner.info().clone();
        if self.has(Plant::JumpCounts) {
            info.guarantees.expiry_clock = ExpiryClock::Monotonic;
        }
        Booked { inner, info, books: self.clone() }
    }

    fn has(&self, plant: Plant) -> bool {
        self.plant == Some(plant)
    }

    fn planted<T>(&self, step: impl FnOnce(&mut Planted) -> T) -> T {
        step(&mut self.planted.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Somebody is about to delete the record of this node.
    pub fn vanishes(&self, node: NodeId) {
        self.planted(|it| it.vanished.insert(node));
    }

    fn granted(&self, grant: &Grant) {
        self.wire.note(grant.term.get());
        self.judge.see(&Seen::Granted(grant));
    }

    /// What readers get in place of this map.
    fn shown(&self, table: &TableName, map: Arc<ShardMap>) -> Arc<ShardMap> {
        let other = self.planted(|planted| planted.overwritten.get(table).cloned());
        let same =
            |other: &Arc<ShardMap>| (other.uid(), other.version()) == (map.uid(), map.version());
        other.filter(same).unwrap_or(map)
    }
}

/// A backend with books.
#[derive(Debug)]
pub struct Booked {
    inner: Arc<dyn Backend>,
    info: BackendInfo,
    books: Books,
}

impl Booked {
    fn part<T: ?Sized>(&self, inner: Arc<T>) -> Arc<Part<T>> {
        Arc::new(Part { inner, books: self.books.clone() })
    }
}

#[async_trait]
impl Backend for Booked {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn lease(&self) -> Arc<dyn Lease> {
        self.part(self.inner.lease())
    }

    fn discovery(&self) -> Arc<dyn Discovery> {
        self.part(self.inner.discovery())
    }

    fn placement(&self) -> Arc<dyn Placement> {
        self.part(self.inner.placement())
    }

    async fn check(&self) -> Result<Health> {
        self.inner.check().await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

/// One of the three traits, with books.
struct Part<T: ?Sized> {
    inner: Arc<T>,
    books: Books,
}

impl<T: ?Sized> fmt::Debug for Part<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Part").field("plant", &self.books.plant).finish_non_exhaustive()
    }
}

#[async_trait]
impl Lease for Part<dyn Lease> {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let mut sent = request.clone();
        if self.books.has(Plant::LeaseEndsEarly) {
            sent.ttl = Ttl::MIN;
        }
        let mut outcome = self.inner.try_acquire(&sent).await?;
        if let Acquire::Acquired(grant) = &mut outcome {
            if self.books.has(Plant::LeaseEndsEarly) {
                grant.ttl = request.ttl;
            }
            if self.books.has(Plant::TermRepeats) {
                let first = self.books.planted(|it| *it.first_term.get_or_insert(grant.term));
                grant.term = first;
            }
            self.books.granted(grant);
        }
        Ok(outcome)
    }

    async fn renew(&self, grant: &Grant) -> Result<Renew> {
        match self.inner.renew(grant).await? {
            Renew::Renewed(mut renewed) => {
                if self.books.has(Plant::LeaseEndsEarly) {
                    renewed.ttl = grant.ttl;
                }
                self.books.granted(&renewed);
                Ok(Renew::Renewed(renewed))
            }
            lost => Ok(lost),
        }
    }

    async fn release(&self, grant: &Grant) -> Result<Release> {
        self.inner.release(grant).await
    }

    async fn get(&self, lease: &LeaseName) -> Result<Option<LeaseRecord>> {
        self.inner.get(lease).await
    }

    async fn list(&self, page: Page) -> Result<Listing<LeaseRecord>> {
        self.inner.list(page).await
    }

    fn watch(&self, lease: &LeaseName) -> BoxStream<'static, Result<LeaseEvent>> {
        self.inner.watch(lease)
    }
}

impl Part<dyn Discovery> {
    async fn told(&self, node: &NodeInfo) -> Result<NodeInfo> {
        let mut node = node.clone();
        if self.books.has(Plant::ReportsNothingStopping) {
            node.reports.values_mut().for_each(|report| report.stopping.clear());
        }
        if self.books.has(Plant::AppliedAcrossLives) {
            for (table, report) in &mut node.reports {
                let stored = self.books.maps.load(table).await?;
                report.uid = stored.map_or(report.uid, |stored| stored.map.uid());
            }
        }
        Ok(node)
    }
}

#[async_trait]
impl Discovery for Part<dyn Discovery> {
    async fn register(&self, node: &NodeInfo, ttl: Ttl, replace: Replace) -> Result<Register> {
        let mut told = self.told(node).await?;
        if self.books.has(Plant::ReportOfAnother) {
            let former = self.books.planted(|it| it.runs.get(&node.id).copied());
            if let Some(former) = former.filter(|former| *former != node.incarnation) {
                told = told.with_ended(former);
            }
        }
        if self.books.has(Plant::RestartRefused)
            && self
                .books
                .planted(|it| it.runs.get(&node.id).is_some_and(|run| *run != node.incarnation))
        {
            return Err(Error::unavailable("register", "the world wants it"));
        }
        let early = self.books.has(Plant::NodeEndsEarly);
        let stored = if early { Ttl::MIN } else { ttl };
        let mut outcome = self.inner.register(&told, stored, replace).await?;
        if let Register::Registered(registration) = &mut outcome {
            if early {
                registration.ttl = ttl;
            }
            if self.books.has(Plant::RestartRefused) || self.books.has(Plant::ReportOfAnother) {
                self.books.planted(|it| it.runs.insert(node.id.clone(), node.incarnation));
            }
            self.books.judge.see(&Seen::Registered(&node.id, node.incarnation));
        }
        Ok(outcome)
    }

    async fn heartbeat(&self, held: &Registration, node: &NodeInfo) -> Result<Heartbeat> {
        let node = self.told(node).await?;
        let mut outcome = self.inner.heartbeat(held, &node).await?;
        if matches!(outcome, Heartbeat::Gone)
            && self.books.has(Plant::HeartbeatRecreates)
            && let Register::Registered(again) =
                self.inner.register(&node, held.ttl, Replace::No).await?
        {
            outcome = Heartbeat::Renewed(again);
        }
        if let Heartbeat::Renewed(registration) = &mut outcome {
            if self.books.has(Plant::NodeEndsEarly) {
                registration.ttl = held.ttl;
            }
            self.books.judge.see(&Seen::Renewed(&held.node, held.incarnation));
        }
        Ok(outcome)
    }

    async fn deregister(&self, held: &Registration) -> Result<()> {
        self.inner.deregister(held).await
    }

    async fn evict(
        &self,
        node: &NodeId,
        incarnation: Incarnation,
        seen: &Revision,
    ) -> Result<Evict> {
        let outcome = self.inner.evict(node, incarnation, seen).await?;
        if let Evict::Evicted = &outcome {
            self.books.judge.see(&Seen::Evicted(node, incarnation));
        }
        Ok(outcome)
    }

    async fn nodes(&self) -> Result<Vec<NodeRecord>> {
        self.inner.nodes().await
    }

    fn watch(&self) -> BoxStream<'static, Result<NodeEvent>> {
        let events = self.inner.watch();
        if self.books.has(Plant::LagIsExpiry) {
            let nobody = stream::iter([Ok(NodeEvent::Snapshot(Vec::new()))]);
            let late = stream::once(tokio::time::sleep(Duration::from_secs(1)));
            return nobody.chain(late.flat_map(move |()| stream::empty())).chain(events).boxed();
        }
        if self.books.has(Plant::VanishedIsLeft) {
            let books = self.books.clone();
            let told = move |event: NodeEvent| match event {
                NodeEvent::Expired { node, incarnation, .. }
                    if books.planted(|it| it.vanished.contains(&node)) =>
                {
                    NodeEvent::Left { node, incarnation }
                }
                other => other,
            };
            return events.map(move |event| event.map(&told)).boxed();
        }
        if self.books.has(Plant::SuccessorEarly) {
            let mut runs: BTreeMap<NodeId, Incarnation> = BTreeMap::new();
            let events = events.flat_map(move |event| {
                let records = match &event {
                    Ok(NodeEvent::Snapshot(records)) => records.as_slice(),
                    Ok(NodeEvent::Joined(record) | NodeEvent::Updated(record)) => {
                        std::slice::from_ref(record)
                    }
                    _ => &[],
                };
                let mut all = Vec::new();
                for NodeRecord { info, .. } in records {
                    let (node, run) = (info.id.clone(), info.incarnation);
                    let former = runs.insert(node.clone(), run).filter(|former| *former != run);
                    all.extend(former.map(|incarnation| Ok(NodeEvent::Left { node, incarnation })));
                }
                all.push(event);
                stream::iter(all)
            });
            return events.boxed();
        }
        events
    }
}

/// The same version with other content: what `change` makes of each shard's owner.
fn rewritten(
    before: &ShardMap,
    map: &ShardMap,
    writer: &Fence,
    change: impl Fn(&ShardMap, ShardId) -> Option<Slot>,
) -> Result<Option<Arc<ShardMap>>> {
    let mut edit = before.edit();
    for node in map.nodes().iter().flatten() {
        edit.put_node(node.clone())?;
    }
    let slot = |edit: &coord_core::MapEdit, slot: Slot| {
        let id = map.node(slot).map(|node| &node.id);
        id.and_then(|id| edit.map().slot_of(id)).unwrap_or(Slot::NOBODY)
    };
    for shard in map.header().shards.shards() {
        let owner = map.owner_slots(shard).next().unwrap_or(Slot::NOBODY);
        let changed = change(map, shard);
        let to = slot(&edit, changed.unwrap_or(owner));
        edit.set_owner(shard, 0, to)?;
        let motions = map.motions().get(&shard).filter(|_| changed.is_none());
        let motions = motions.into_iter().flatten().map(|motion| {
            let other = slot(&edit, motion.other.into());
            Motion::new(motion.replica, other, motion.phase, motion.since)
        });
        let motions = motions.collect();
        edit.set_motions(shard, motions)?;
    }
    edit.set_annex(map.annex().clone())?;
    Ok(edit.finish(writer.clone()).map(Arc::new))
}

/// Where a move leads to.
fn target(map: &ShardMap, shard: ShardId) -> Option<Slot> {
    let motions = map.motions().get(&shard)?;
    let moving = motions.iter().find(|motion| motion.phase == MotionPhase::MovingTo)?;
    Some(moving.other.into())
}

/// The same version of `_cluster`, which has forgotten that runs declared failed may run on.
fn forgetful(before: &ShardMap, map: &ShardMap, writer: &Fence) -> Result<Option<Arc<ShardMap>>> {
    let Ok(mut annex) = serde_json::from_slice::<serde_json::Value>(map.annex()) else {
        return Ok(None);
    };
    let notes = annex.get_mut("nodes").and_then(serde_json::Value::as_object_mut);
    let failures = notes.into_iter().flat_map(|notes| notes.values_mut());
    let failures = failures.filter_map(|note| note.get_mut("failed")?.as_object_mut());
    if failures.filter_map(|failed| failed.remove("runs_on")).count() == 0 {
        return Ok(None);
    }
    with_annex(before, map, &annex, writer)
}

/// The same version of `_cluster`, which has forgotten that an earlier one was lost.
fn careless(before: &ShardMap, map: &ShardMap, writer: &Fence) -> Result<Option<Arc<ShardMap>>> {
    let annex = serde_json::from_slice::<serde_json::Value>(map.annex()).ok();
    let Some(serde_json::Value::Object(mut annex)) = annex else { return Ok(None) };
    if annex.remove("lost").is_none() {
        return Ok(None);
    }
    let notes = annex.get_mut("nodes").and_then(serde_json::Value::as_object_mut);
    let notes = notes.into_iter().flat_map(|notes| notes.values_mut());
    for note in notes.filter_map(serde_json::Value::as_object_mut) {
        note.remove("former");
    }
    with_annex(before, map, &annex.into(), writer)
}

/// A version of `_cluster` with other notes.
fn with_annex(
    before: &ShardMap,
    map: &ShardMap,
    annex: &serde_json::Value,
    writer: &Fence,
) -> Result<Option<Arc<ShardMap>>> {
    let mut edit = before.edit();
    for node in before.nodes().iter().flatten().filter(|node| map.slot_of(&node.id).is_none()) {
        edit.remove_node(&node.id)?;
    }
    for node in map.nodes().iter().flatten() {
        edit.put_node(node.clone())?;
    }
    edit.set_annex(annex.to_string().into())?;
    Ok(edit.finish(writer.clone()).map(Arc::new))
}

impl Part<dyn Placement> {
    /// What is published in place of this map.
    async fn outer(
        &self,
        table: &TableName,
        fence: &Fence,
        map: &Arc<ShardMap>,
    ) -> Result<Arc<ShardMap>> {
        let same = || Ok(Arc::clone(map));
        const CHANGED: [Plant; 3] =
            [Plant::GrantBeforeReport, Plant::FailedMovesAtOnce, Plant::LossOverlooked];
        if !CHANGED.iter().any(|plant| self.books.has(*plant)) {
            return same();
        }
        let Some(stored) = self.inner.load(table).await? else { return same() };
        if stored.map.version().next() != map.version() {
            return same();
        }
        let other = match table.is_reserved() {
            true if self.books.has(Plant::FailedMovesAtOnce) => forgetful(&stored.map, map, fence)?,
            true if self.books.has(Plant::LossOverlooked) => careless(&stored.map, map, fence)?,
            false if self.books.has(Plant::GrantBeforeReport) => {
                rewritten(&stored.map, map, fence, target)?
            }
            _ => None,
        };
        other.map_or_else(same, Ok)
    }

    /// What a planted bug makes of a publish that was fenced.
    async fn fenced(&self, table: &TableName, map: &Arc<ShardMap>) -> Result<Option<Publish>> {
        let Some(stored) = self.inner.load(table).await? else { return Ok(None) };
        if self.books.has(Plant::ChunkOverwritten) {
            self.books.planted(|it| it.overwritten.insert(table.clone(), Arc::clone(map)));
        }
        if !self.books.has(Plant::FenceUnchecked) || map.uid() != stored.map.uid() {
            return Ok(None);
        }
        let forced = rewritten(&stored.map, map, &stored.fence, |_, _| None)?;
        let Some(forced) = forced else { return Ok(None) };
        let expected = stored.map.version();
        self.inner.publish(table, &stored.fence, expected, &forced).await.map(Some)
    }
}

#[async_trait]
impl Placement for Part<dyn Placement> {
    async fn claim(&self, request: &ClaimRequest) -> Result<Claim> {
        let before = self.books.has(Plant::ReadBeforeClaim);
        let stored = match before || self.books.has(Plant::ClaimIgnored) {
            true => self.inner.load(&request.table).await?,
            false => None,
        };
        if before && stored.is_some() {
            let (placement, request) = (Arc::clone(&self.inner), request.clone());
            #[expect(
                clippy::disallowed_methods,
                reason = "it outlives its caller; the world ends it"
            )]
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_secs(1)).await;
                // By now somebody else may have claimed it.
                drop(placement.claim(&request).await);
            });
        }
        let outcome = match stored {
            Some(table) => Claim::Claimed(table),
            None => self.inner.claim(request).await?,
        };
        if let Claim::Claimed(table) = &outcome {
            self.books.wire.note(request.fence.term.get());
            let uid = table.map.uid();
            self.books.judge.see(&Seen::Claimed(&request.table, uid, &request.fence));
        }
        Ok(outcome)
    }

    async fn publish(
        &self,
        table: &TableName,
        fence: &Fence,
        expected: Version,
        map: &Arc<ShardMap>,
    ) -> Result<Publish> {
        let wanted = map;
        let map = &self.outer(table, fence, map).await?;
        let mut outcome = self.inner.publish(table, fence, expected, map).await?;
        if let Publish::Fenced(_) = &outcome {
            outcome = self.fenced(table, map).await?.unwrap_or(outcome);
        }
        if let Publish::Published(version) = &outcome {
            self.books.wire.note(version.get());
            map.raw_owners().iter().for_each(|owner| self.books.wire.note((*owner).into()));
            let nodes = self.books.nodes.nodes().await?;
            let runs =
                nodes.into_iter().map(|node| (node.info.id, node.info.incarnation)).collect();
            self.books.judge.see(&Seen::Published(table, fence, map, &runs));
            self.books.recorder.record("leader", What::published(table, map));
            if table.is_reserved() && !Arc::ptr_eq(wanted, map) {
                // A conflict, which makes the leader read what was written in its place.
                return self.inner.publish(table, fence, expected, wanted).await;
            }
        }
        Ok(outcome)
    }

    async fn load(&self, table: &TableName) -> Result<Option<StoredTable>> {
        let mut loaded = self.inner.load(table).await?;
        if let Some(found) = &mut loaded {
            found.map = self.books.shown(table, Arc::clone(&found.map));
            self.books.recorder.record("reader", What::read(table, &found.map));
        }
        Ok(loaded)
    }

    async fn tables(&self) -> Result<Vec<TableName>> {
        self.inner.tables().await
    }

    fn watch(&self, table: &TableName) -> BoxStream<'static, Result<PlacementEvent>> {
        let events = self.inner.watch(table);
        if !self.books.has(Plant::ChunkOverwritten) {
            return events;
        }
        let (books, table) = (self.books.clone(), table.clone());
        let shown = move |event: Result<PlacementEvent>| {
            event.map(|event| match event {
                PlacementEvent::Changed(map) => PlacementEvent::Changed(books.shown(&table, map)),
                PlacementEvent::Snapshot(Some(map)) => {
                    PlacementEvent::Snapshot(Some(books.shown(&table, map)))
                }
                other => other,
            })
        };
        events.map(shown).boxed()
    }

    async fn request(&self, request: &Request) -> Result<RequestId> {
        self.inner.request(request).await
    }

    async fn answer(&self, id: &RequestId, fence: &Fence, answer: &Answer) -> Result<Answered> {
        self.inner.answer(id, fence, answer).await
    }

    fn watch_requests(&self) -> BoxStream<'static, Result<RequestEvent>> {
        self.inner.watch_requests()
    }
}
