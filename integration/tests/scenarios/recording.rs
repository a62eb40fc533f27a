//! A backend that tells what its user was told: each grant for the history, and each claim and publish.

use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use coord::{
    Acquire, AcquireRequest, Answer, Answered, AttemptId, Backend, BackendInfo, BootClock, Claim,
    ClaimRequest, Clock as _, Discovery, Fence, Grant, Health, Lease, LeaseEvent, LeaseName,
    LeaseRecord, Listing, Moment, Page, Placement, PlacementEvent, Publish, Release, Renew,
    Request, RequestEvent, RequestId, Result, ShardMap, StoredTable, TableName, Version,
};
use coord_conformance::history::What;
use futures::stream::BoxStream;

use super::said::{Call, Line, Outcome, Said};

/// Where lines go.
type Sink = dyn Fn(Line) + Send + Sync;

/// Passes everything on, and tells of it.
#[derive(Clone)]
pub(crate) struct Recording {
    inner: Arc<dyn Backend>,
    told: Told,
}

impl Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recording").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// What was told, and until when the user of this backend may act.
#[derive(Clone)]
pub(crate) struct Told {
    sink: Arc<Sink>,
    tenures: Arc<Mutex<BTreeMap<AttemptId, Holding>>>,
}

#[derive(Debug)]
struct Holding {
    fence: Fence,
    until: Moment,
    ended: bool,
}

impl Told {
    pub(crate) fn say(&self, at: Moment, said: Said) {
        (self.sink)(Line::new(at, said));
    }

    fn call(
        &self,
        operation: &str,
        subject: impl ToString,
        fence: Option<Fence>,
        sent: Moment,
        outcome: Outcome,
    ) {
        let call = Call::new(operation, subject, fence, sent, outcome);
        self.say(now(), Said::Call(call));
    }

    /// A request that was sent then was answered with this grant. An answer after the deadline is none:
    /// the holder does not act on it.
    fn holds(&self, grant: &Grant, sent: Moment) {
        let (fence, ttl) = (grant.fence(), grant.ttl.get());
        let until = sent.plus(ttl).minus((ttl / 10).max(Duration::from_millis(100)));
        let mut tenures = self.tenures.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = Holding { fence: fence.clone(), until, ended: false };
        let tenure = tenures.entry(fence.attempt).or_insert(fresh);
        let at = now();
        if at < tenure.until && !tenure.ended {
            tenure.until = tenure.until.max(until);
            self.say(at, Said::Entry(What::Holds { fence, until: tenure.until }));
        }
    }

    /// The holder stopped, at its deadline at the latest.
    pub(crate) fn ended(&self, fence: &Fence, how: &str) {
        let mut tenures = self.tenures.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(tenure) = tenures.get_mut(&fence.attempt) else { return };
        if !std::mem::replace(&mut tenure.ended, true) {
            let (fence, how) = (tenure.fence.clone(), how.to_owned());
            self.say(now().min(tenure.until), Said::Entry(What::Ended { fence, how }));
        }
    }

    /// All tenures that go on, for whoever notices their ends.
    pub(crate) fn going_on(&self) -> Vec<Fence> {
        let tenures = self.tenures.lock().unwrap_or_else(PoisonError::into_inner);
        tenures.values().filter(|tenure| !tenure.ended).map(|tenure| tenure.fence.clone()).collect()
    }
}

pub(crate) fn now() -> Moment {
    BootClock::new().now()
}

impl Recording {
    pub(crate) fn new(
        inner: Arc<dyn Backend>,
        sink: impl Fn(Line) + Send + Sync + 'static,
    ) -> Self {
        Self { inner, told: Told { sink: Arc::new(sink), tenures: Arc::default() } }
    }

    pub(crate) fn told(&self) -> &Told {
        &self.told
    }
}

#[async_trait]
impl Backend for Recording {
    fn info(&self) -> &BackendInfo {
        self.inner.info()
    }

    fn lease(&self) -> Arc<dyn Lease> {
        Arc::new(Leases { inner: self.inner.lease(), told: self.told.clone() })
    }

    fn discovery(&self) -> Arc<dyn Discovery> {
        self.inner.discovery()
    }

    fn placement(&self) -> Arc<dyn Placement> {
        Arc::new(Maps { inner: self.inner.placement(), told: self.told.clone() })
    }

    async fn check(&self) -> Result<Health> {
        self.inner.check().await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

struct Leases {
    inner: Arc<dyn Lease>,
    told: Told,
}

impl Debug for Leases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Debug::fmt(&self.inner, f)
    }
}

#[async_trait]
impl Lease for Leases {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let sent = now();
        let result = self.inner.try_acquire(request).await;
        let (fence, outcome) = match &result {
            Ok(Acquire::Acquired(grant)) => {
                self.told.holds(grant, sent);
                (Some(grant.fence()), Outcome::Done)
            }
            Ok(_) => (None, Outcome::NotHeld),
            Err(error) => (None, Outcome::Failed(error.to_string())),
        };
        self.told.call("try_acquire", &request.lease, fence, sent, outcome);
        result
    }

    async fn renew(&self, grant: &Grant) -> Result<Renew> {
        let sent = now();
        let result = self.inner.renew(grant).await;
        let outcome = match &result {
            Ok(Renew::Renewed(grant)) => {
                self.told.holds(grant, sent);
                Outcome::Done
            }
            Ok(_) => {
                self.told.ended(&grant.fence(), "lost");
                Outcome::NotHeld
            }
            Err(error) => Outcome::Failed(error.to_string()),
        };
        self.told.call("renew", &grant.lease, Some(grant.fence()), sent, outcome);
        result
    }

    async fn release(&self, grant: &Grant) -> Result<Release> {
        // The work has stopped before it is sent.
        self.told.ended(&grant.fence(), "released");
        let sent = now();
        let result = self.inner.release(grant).await;
        let outcome = match &result {
            Ok(Release::Released) => Outcome::Done,
            Ok(_) => Outcome::NotHeld,
            Err(error) => Outcome::Failed(error.to_string()),
        };
        self.told.call("release", &grant.lease, Some(grant.fence()), sent, outcome);
        result
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

struct Maps {
    inner: Arc<dyn Placement>,
    told: Told,
}

impl Debug for Maps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Debug::fmt(&self.inner, f)
    }
}

#[async_trait]
impl Placement for Maps {
    async fn claim(&self, request: &ClaimRequest) -> Result<Claim> {
        let sent = now();
        let result = self.inner.claim(request).await;
        let outcome = match &result {
            Ok(Claim::Claimed(_)) => Outcome::Done,
            Ok(Claim::Fenced(_)) => Outcome::Fenced,
            Ok(other) => Outcome::Other(format!("{other:?}")),
            Err(error) => Outcome::Failed(error.to_string()),
        };
        self.told.call("claim", &request.table, Some(request.fence.clone()), sent, outcome);
        result
    }

    async fn publish(
        &self,
        table: &TableName,
        fence: &Fence,
        expected: Version,
        map: &Arc<ShardMap>,
    ) -> Result<Publish> {
        let sent = now();
        let result = self.inner.publish(table, fence, expected, map).await;
        let outcome = match &result {
            Ok(Publish::Published(_)) => {
                self.told.say(now(), Said::Entry(What::published(table, map)));
                Outcome::Done
            }
            Ok(Publish::Conflict { .. }) => Outcome::Conflict,
            Ok(Publish::Fenced(_)) => Outcome::Fenced,
            Ok(other) => Outcome::Other(format!("{other:?}")),
            Err(error) => Outcome::Failed(error.to_string()),
        };
        self.told.call("publish", table, Some(fence.clone()), sent, outcome);
        result
    }

    async fn load(&self, table: &TableName) -> Result<Option<StoredTable>> {
        self.inner.load(table).await
    }

    async fn tables(&self) -> Result<Vec<TableName>> {
        self.inner.tables().await
    }

    fn watch(&self, table: &TableName) -> BoxStream<'static, Result<PlacementEvent>> {
        self.inner.watch(table)
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
