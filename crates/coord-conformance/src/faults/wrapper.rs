//! The wrapper: each call passes through the controls on its way there and back.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use coord_core::{
    Acquire, AcquireRequest, Answer, Answered, Backend, BackendInfo, Claim, ClaimRequest,
    Discovery, Evict, Fence, Grant, Health, HealthStatus, Heartbeat, Incarnation, Lease,
    LeaseEvent, LeaseName, LeaseRecord, Listing, NodeEvent, NodeId, NodeInfo, NodeRecord, Page,
    Placement, PlacementEvent, Publish, Register, Registration, Release, Renew, Replace, Request,
    RequestEvent, RequestId, Result, Revision, ShardMap, StoredTable, TableName, Ttl, Version,
};
use futures::future::{self, Either};
use futures::stream::{self, BoxStream, StreamExt};

use super::{FaultControl, State, cut_off};

/// A backend between which and its callers everything can go wrong.
///
/// ```
/// # use coord_conformance::faults::Faulty;
/// # use coord_core::{Backend, ClusterName, Effect, MemoryBackend, Page};
/// # use std::sync::Arc;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> coord_core::Result<()> {
/// let store = MemoryBackend::open(ClusterName::new("orders")?);
/// let faulty = Faulty::new(Arc::new(store));
/// faulty.control().cut(Effect::None);
/// assert!(faulty.lease().list(Page::first()).await.is_err());
/// faulty.control().heal();
/// assert!(faulty.lease().list(Page::first()).await?.items.is_empty());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Faulty {
    inner: Arc<dyn Backend>,
    control: FaultControl,
}

impl Faulty {
    /// A backend that passes everything on until its [controls](Self::control) say otherwise.
    #[must_use]
    pub fn new(inner: Arc<dyn Backend>) -> Self {
        Self { inner, control: FaultControl::new() }
    }

    /// Its controls.
    #[must_use]
    pub fn control(&self) -> &FaultControl {
        &self.control
    }

    fn part<T: ?Sized>(&self, inner: Arc<T>) -> Arc<Part<T>> {
        Arc::new(Part { inner, control: self.control.clone() })
    }
}

#[deny(clippy::missing_trait_methods)]
#[async_trait]
impl Backend for Faulty {
    fn info(&self) -> &BackendInfo {
        self.inner.info()
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
        if let Err(error) = self.control.pass("check", false).await {
            let mut health = Health::default();
            health.add("reachable", HealthStatus::Bad, error.to_string());
            return Ok(health);
        }
        self.inner.check().await
    }

    async fn close(&self) -> Result<()> {
        let closed = self.inner.close().await;
        self.control.reply("close", true, closed).await
    }
}

/// One of the three traits, behind the controls.
#[derive(Debug)]
struct Part<T: ?Sized> {
    inner: Arc<T>,
    control: FaultControl,
}

impl<T: ?Sized + Send + Sync> Part<T> {
    async fn write<R: Send>(
        &self,
        operation: &'static str,
        call: impl Future<Output = Result<R>> + Send,
    ) -> Result<R> {
        self.control.pass(operation, true).await?;
        let result = call.await;
        self.control.reply(operation, true, result).await
    }

    async fn read<R: Send>(
        &self,
        operation: &'static str,
        call: impl Future<Output = Result<R>> + Send,
    ) -> Result<R> {
        self.control.pass(operation, false).await?;
        let result = call.await;
        self.control.reply(operation, false, result).await
    }

    /// The subscription that `open` makes, until the next cut. Nothing comes through during a pause.
    fn subscribe<E: Send + 'static>(
        &self,
        open: impl FnOnce() -> BoxStream<'static, Result<E>>,
    ) -> BoxStream<'static, Result<E>> {
        let states = self.control.0.state.subscribe();
        let state = *states.borrow();
        if state.cut.is_some() {
            return stream::iter([Err(cut_off("watch", false))]).boxed();
        }
        let from = state.watch_cuts;
        let begin = Some((open(), states));
        stream::unfold(begin, move |open| async move {
            let (mut inner, mut states) = open?;
            let is_cut = move |state: &State| state.watch_cuts > from;
            let event = {
                let cut = std::pin::pin!(states.wait_for(is_cut));
                match future::select(cut, inner.next()).await {
                    Either::Left(_) => return Some((Err(cut_off("watch", false)), None)),
                    Either::Right((event, _)) => event?,
                }
            };
            // What was on its way when a pause began waits too.
            let passes = |state: &State| is_cut(state) || !(state.paused || state.deaf);
            if !states.wait_for(passes).await.is_ok_and(|state| !is_cut(&state)) {
                return Some((Err(cut_off("watch", false)), None));
            }
            let next = if event.is_ok() { Some((inner, states)) } else { None };
            Some((event, next))
        })
        .boxed()
    }
}

#[deny(clippy::missing_trait_methods)]
#[async_trait]
impl Lease for Part<dyn Lease> {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        self.write("try_acquire", self.inner.try_acquire(request)).await
    }

    async fn renew(&self, grant: &Grant) -> Result<Renew> {
        self.write("renew", self.inner.renew(grant)).await
    }

    async fn release(&self, grant: &Grant) -> Result<Release> {
        self.write("release", self.inner.release(grant)).await
    }

    async fn get(&self, lease: &LeaseName) -> Result<Option<LeaseRecord>> {
        self.read("get", self.inner.get(lease)).await
    }

    async fn list(&self, page: Page) -> Result<Listing<LeaseRecord>> {
        self.read("list", self.inner.list(page)).await
    }

    fn watch(&self, lease: &LeaseName) -> BoxStream<'static, Result<LeaseEvent>> {
        self.subscribe(|| self.inner.watch(lease))
    }
}

#[deny(clippy::missing_trait_methods)]
#[async_trait]
impl Discovery for Part<dyn Discovery> {
    async fn register(&self, node: &NodeInfo, ttl: Ttl, replace: Replace) -> Result<Register> {
        self.write("register", self.inner.register(node, ttl, replace)).await
    }

    async fn heartbeat(&self, held: &Registration, node: &NodeInfo) -> Result<Heartbeat> {
        self.write("heartbeat", self.inner.heartbeat(held, node)).await
    }

    async fn deregister(&self, held: &Registration) -> Result<()> {
        self.write("deregister", self.inner.deregister(held)).await
    }

    async fn evict(
        &self,
        node: &NodeId,
        incarnation: Incarnation,
        seen: &Revision,
    ) -> Result<Evict> {
        self.write("evict", self.inner.evict(node, incarnation, seen)).await
    }

    async fn nodes(&self) -> Result<Vec<NodeRecord>> {
        self.read("nodes", self.inner.nodes()).await
    }

    fn watch(&self) -> BoxStream<'static, Result<NodeEvent>> {
        self.subscribe(|| self.inner.watch())
    }
}

#[deny(clippy::missing_trait_methods)]
#[async_trait]
impl Placement for Part<dyn Placement> {
    async fn claim(&self, request: &ClaimRequest) -> Result<Claim> {
        self.write("claim", self.inner.claim(request)).await
    }

    async fn publish(
        &self,
        table: &TableName,
        fence: &Fence,
        expected: Version,
        map: &Arc<ShardMap>,
    ) -> Result<Publish> {
        self.write("publish", self.inner.publish(table, fence, expected, map)).await
    }

    async fn load(&self, table: &TableName) -> Result<Option<StoredTable>> {
        self.read("load", self.inner.load(table)).await
    }

    async fn tables(&self) -> Result<Vec<TableName>> {
        self.read("tables", self.inner.tables()).await
    }

    fn watch(&self, table: &TableName) -> BoxStream<'static, Result<PlacementEvent>> {
        self.subscribe(|| self.inner.watch(table))
    }

    async fn request(&self, request: &Request) -> Result<RequestId> {
        self.write("request", self.inner.request(request)).await
    }

    async fn answer(&self, id: &RequestId, fence: &Fence, answer: &Answer) -> Result<Answered> {
        self.write("answer", self.inner.answer(id, fence, answer)).await
    }

    fn watch_requests(&self) -> BoxStream<'static, Result<RequestEvent>> {
        self.subscribe(|| self.inner.watch_requests())
    }
}
