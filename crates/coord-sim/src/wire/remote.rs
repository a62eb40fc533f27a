//! A process's client: the three traits, each call a message to the store's runtime and one back.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use coord_conformance::faults::{FaultControl, Faulty};
use coord_core::{
    Acquire, AcquireRequest, Answer, Answered, Backend, BackendInfo, Claim, ClaimRequest,
    Discovery, Error, ErrorKind, Evict, Fence, Grant, Health, Heartbeat, Incarnation, Lease,
    LeaseEvent, LeaseName, LeaseRecord, Listing, NodeEvent, NodeId, NodeInfo, NodeRecord, Page,
    Placement, PlacementEvent, Publish, Register, Registration, Release, Renew, Replace, Request,
    RequestEvent, RequestId, Result, Revision, ShardMap, StoredTable, TableName, Ttl, Version,
};
use futures::future::BoxFuture;
use futures::stream::{BoxStream, StreamExt};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::{Weather, Wire};

/// After this long without a reply a client gives up, as those of real stores do.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);

/// One process's client of the store.
#[derive(Clone)]
pub struct Remote(Arc<Inner>);

struct Inner {
    wire: Wire,
    weather: Arc<Mutex<Weather>>,
    store: Handle,
    /// A planted bug: what is granted lasts from the reply on.
    late: bool,
    /// On the store's side, as it was opened.
    faulty: Faulty,
    /// What is there now.
    there: watch::Sender<There>,
}

/// What a client finds where its store was.
#[derive(Clone, Debug)]
enum There {
    Store(Faulty),
    Another,
}

impl Inner {
    fn there(&self) -> Faulty {
        match &*self.there.borrow() {
            There::Store(store) => store.clone(),
            There::Another => self.faulty.clone(),
        }
    }

    fn lease(&self) -> Arc<dyn Lease> {
        self.there().lease()
    }

    fn discovery(&self) -> Arc<dyn Discovery> {
        self.there().discovery()
    }

    fn placement(&self) -> Arc<dyn Placement> {
        self.there().placement()
    }

    /// As the clients of real stores say it.
    fn is_same(&self, operation: &'static str) -> Result<()> {
        match &*self.there.borrow() {
            There::Store(_) => Ok(()),
            There::Another => {
                let why =
                    "the store is another one now than when the backend was opened; open it again";
                Err(Error::new(ErrorKind::Misconfigured, operation).message(why))
            }
        }
    }
}

impl Remote {
    /// A client of what `store`, entered through its runtime's handle, answers.
    #[must_use]
    pub fn new(wire: Wire, store: Handle, faulty: Faulty, weather: Weather, late: bool) -> Self {
        Self(Arc::new(Inner {
            wire,
            weather: Arc::new(Mutex::new(weather)),
            store,
            late,
            there: watch::Sender::new(There::Store(faulty.clone())),
            faulty,
        }))
    }

    /// Another store is where its own one was. A planted bug lets it go on there, under the old identity.
    pub fn replaced(&self, by: Option<Arc<dyn Backend>>) {
        let there = by.map_or(There::Another, |store| There::Store(Faulty::new(store)));
        self.0.there.send_replace(there);
    }

    /// What goes wrong between this process and the store.
    #[must_use]
    pub fn faults(&self) -> &FaultControl {
        self.0.faulty.control()
    }

    /// From now on messages travel so.
    pub fn set_weather(&self, weather: Weather) {
        *self.0.weather.lock().unwrap_or_else(PoisonError::into_inner) = weather;
    }

    fn weather(&self) -> Weather {
        *self.0.weather.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request, perhaps twice, and waits for the first reply.
    async fn call<T: Send + 'static>(
        &self,
        operation: &'static str,
        call: impl Fn(Arc<Inner>) -> BoxFuture<'static, Result<T>> + Send + Sync + 'static,
    ) -> Result<T> {
        let weather = self.weather();
        let (reply, answer) = oneshot::channel();
        let reply = Arc::new(Mutex::new(Some(reply)));
        let call = Arc::new(call);
        let wire = &self.0.wire;
        wire.note_text(operation);
        let copies = 1 + u32::from(wire.chance(weather.twice));
        for _ in 0..copies {
            if wire.chance(weather.lost) {
                continue;
            }
            let (remote, call, reply) = (self.clone(), Arc::clone(&call), Arc::clone(&reply));
            let arrive = move || {
                let answered = remote.clone();
                let applied = async move {
                    let result = match answered.0.is_same(operation) {
                        Ok(()) => call(Arc::clone(&answered.0)).await,
                        Err(error) => Err(error),
                    };
                    let wire = &answered.0.wire;
                    let weather = answered.weather();
                    if wire.chance(weather.lost) {
                        return;
                    }
                    let arrive = move || {
                        let sender = reply.lock().unwrap_or_else(PoisonError::into_inner).take();
                        // The caller may have given up.
                        let _ = sender.map(|sender| sender.send(result));
                    };
                    wire.send(weather, 0, Box::new(arrive));
                };
                remote.0.store.spawn(applied);
            };
            wire.send(weather, 0, Box::new(arrive));
        }
        let lost = |why: &'static str| Error::unavailable(operation, why).effect_unknown();
        match tokio::time::timeout(CLIENT_TIMEOUT, answer).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => {
                // Whoever loses a message notices it by time alone.
                tokio::time::sleep(CLIENT_TIMEOUT).await;
                Err(lost("no reply came"))
            }
            Err(_elapsed) => Err(lost("no reply came in time")),
        }
    }

    /// The TTL as the caller hears of it, after a request that took so long.
    fn heard(&self, ttl: Ttl, sent: Instant) -> Ttl {
        let late = Ttl::new(ttl.get() + sent.elapsed()).ok().filter(|_| self.0.late);
        late.unwrap_or(ttl)
    }

    /// Subscribes, and brings each event in order.
    fn watch<E: Send + 'static>(
        &self,
        open: impl FnOnce(&Inner) -> BoxStream<'static, Result<E>> + Send + 'static,
    ) -> BoxStream<'static, Result<E>> {
        #[expect(
            clippy::disallowed_methods,
            reason = "the wire holds what is under way; a world lasts a minute of its own time"
        )]
        let (sender, events) = mpsc::unbounded_channel();
        let remote = self.clone();
        let arrive = move || {
            let store = remote.0.store.clone();
            store.spawn(async move {
                let mut there = remote.0.there.subscribe();
                let mut subscription = open(&remote.0);
                let mut last = 0;
                loop {
                    let event = match remote.0.is_same("watch") {
                        Err(error) => Some(Err(error)),
                        Ok(()) => tokio::select! {
                            biased;
                            () = sender.closed() => return,
                            Ok(()) = there.changed() => {
                                let is_same = remote.0.is_same("watch");
                                let ended = || Err(Error::unavailable("watch", "the store is gone"));
                                Some(is_same.and_then(|()| ended()))
                            }
                            event = subscription.next() => event,
                        },
                    };
                    let Some(event) = event else { return };
                    let ends = event.is_err();
                    let to = sender.clone();
                    // Nobody may be listening any more.
                    let arrive = move || drop(to.send(event));
                    last = remote.0.wire.send(remote.weather(), last, Box::new(arrive));
                    if ends {
                        return;
                    }
                }
            });
        };
        self.0.wire.send(self.weather(), 0, Box::new(arrive));
        UnboundedReceiverStream::new(events).boxed()
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("faulty", &self.0.faulty).finish_non_exhaustive()
    }
}

#[async_trait]
impl Backend for Remote {
    fn info(&self) -> &BackendInfo {
        self.0.faulty.info()
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
        self.call("check", |it| Box::pin(async move { it.faulty.check().await })).await
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

#[async_trait]
impl Lease for Remote {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let request = request.clone();
        let sent = Instant::now();
        let mut outcome = self
            .call("try_acquire", move |it| {
                let request = request.clone();
                Box::pin(async move { it.lease().try_acquire(&request).await })
            })
            .await?;
        if let Acquire::Acquired(grant) = &mut outcome {
            grant.ttl = self.heard(grant.ttl, sent);
            grant.origin = self.info().origin.clone();
        }
        Ok(outcome)
    }

    async fn renew(&self, grant: &Grant) -> Result<Renew> {
        let grant = grant.clone();
        let sent = Instant::now();
        let mut outcome = self
            .call("renew", move |it| {
                let grant = grant.clone();
                Box::pin(async move { it.lease().renew(&grant).await })
            })
            .await?;
        if let Renew::Renewed(grant) = &mut outcome {
            grant.ttl = self.heard(grant.ttl, sent);
            grant.origin = self.info().origin.clone();
        }
        Ok(outcome)
    }

    async fn release(&self, grant: &Grant) -> Result<Release> {
        let grant = grant.clone();
        self.call("release", move |it| {
            let grant = grant.clone();
            Box::pin(async move { it.lease().release(&grant).await })
        })
        .await
    }

    async fn get(&self, lease: &LeaseName) -> Result<Option<LeaseRecord>> {
        let lease = lease.clone();
        self.call("get", move |it| {
            let lease = lease.clone();
            Box::pin(async move { it.lease().get(&lease).await })
        })
        .await
    }

    async fn list(&self, page: Page) -> Result<Listing<LeaseRecord>> {
        self.call("list", move |it| {
            let page = page.clone();
            Box::pin(async move { it.lease().list(page).await })
        })
        .await
    }

    fn watch(&self, lease: &LeaseName) -> BoxStream<'static, Result<LeaseEvent>> {
        let lease = lease.clone();
        Self::watch(self, move |it| it.lease().watch(&lease))
    }
}

#[async_trait]
impl Discovery for Remote {
    async fn register(&self, node: &NodeInfo, ttl: Ttl, replace: Replace) -> Result<Register> {
        let node = node.clone();
        self.call("register", move |it| {
            let node = node.clone();
            Box::pin(async move { it.discovery().register(&node, ttl, replace).await })
        })
        .await
    }

    async fn heartbeat(&self, held: &Registration, node: &NodeInfo) -> Result<Heartbeat> {
        let (held, node) = (held.clone(), node.clone());
        self.call("heartbeat", move |it| {
            let (held, node) = (held.clone(), node.clone());
            Box::pin(async move { it.discovery().heartbeat(&held, &node).await })
        })
        .await
    }

    async fn deregister(&self, held: &Registration) -> Result<()> {
        let held = held.clone();
        self.call("deregister", move |it| {
            let held = held.clone();
            Box::pin(async move { it.discovery().deregister(&held).await })
        })
        .await
    }

    async fn evict(
        &self,
        node: &NodeId,
        incarnation: Incarnation,
        seen: &Revision,
    ) -> Result<Evict> {
        let (node, seen) = (node.clone(), seen.clone());
        self.call("evict", move |it| {
            let (node, seen) = (node.clone(), seen.clone());
            Box::pin(async move { it.discovery().evict(&node, incarnation, &seen).await })
        })
        .await
    }

    async fn nodes(&self) -> Result<Vec<NodeRecord>> {
        self.call("nodes", |it| Box::pin(async move { it.discovery().nodes().await })).await
    }

    fn watch(&self) -> BoxStream<'static, Result<NodeEvent>> {
        Self::watch(self, |it| it.discovery().watch())
    }
}

#[async_trait]
impl Placement for Remote {
    async fn claim(&self, request: &ClaimRequest) -> Result<Claim> {
        let request = request.clone();
        self.call("claim", move |it| {
            let request = request.clone();
            Box::pin(async move { it.placement().claim(&request).await })
        })
        .await
    }

    async fn publish(
        &self,
        table: &TableName,
        fence: &Fence,
        expected: Version,
        map: &Arc<ShardMap>,
    ) -> Result<Publish> {
        let (table, fence, map) = (table.clone(), fence.clone(), Arc::clone(map));
        self.call("publish", move |it| {
            let (table, fence, map) = (table.clone(), fence.clone(), Arc::clone(&map));
            Box::pin(async move { it.placement().publish(&table, &fence, expected, &map).await })
        })
        .await
    }

    async fn load(&self, table: &TableName) -> Result<Option<StoredTable>> {
        let table = table.clone();
        self.call("load", move |it| {
            let table = table.clone();
            Box::pin(async move { it.placement().load(&table).await })
        })
        .await
    }

    async fn tables(&self) -> Result<Vec<TableName>> {
        self.call("tables", |it| Box::pin(async move { it.placement().tables().await })).await
    }

    fn watch(&self, table: &TableName) -> BoxStream<'static, Result<PlacementEvent>> {
        let table = table.clone();
        Self::watch(self, move |it| it.placement().watch(&table))
    }

    async fn request(&self, request: &Request) -> Result<RequestId> {
        let request = request.clone();
        self.call("request", move |it| {
            let request = request.clone();
            Box::pin(async move { it.placement().request(&request).await })
        })
        .await
    }

    async fn answer(&self, id: &RequestId, fence: &Fence, answer: &Answer) -> Result<Answered> {
        let (id, fence, answer) = (*id, fence.clone(), answer.clone());
        self.call("answer", move |it| {
            let (fence, answer) = (fence.clone(), answer.clone());
            Box::pin(async move { it.placement().answer(&id, &fence, &answer).await })
        })
        .await
    }

    fn watch_requests(&self) -> BoxStream<'static, Result<RequestEvent>> {
        Self::watch(self, |it| it.placement().watch_requests())
    }
}
