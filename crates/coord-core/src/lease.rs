//! The `Lease` trait: at most one holder of a name at a time.

use std::fmt::Debug;

use async_trait::async_trait;
use futures::stream::BoxStream;

use crate::error::Result;
use crate::types::{AcquireRequest, Grant, LeaseName, LeaseRecord};

/// What came of one try to acquire.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Acquire {
    /// The lease is this attempt's, new or extended.
    Acquired(Grant),
    /// Another attempt holds it.
    Held(LeaseRecord),
}

/// What came of one renewal.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Renew {
    /// The grant goes on for its TTL.
    Renewed(Grant),
    /// The grant is gone, for good; with the present holder, if there is one.
    Lost(Option<LeaseRecord>),
}

/// What came of a release.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The grant was ended.
    Released,
    /// There was no such grant any more; nothing changed.
    NotHeld,
}

/// A change of one lease.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseEvent {
    /// The state now; it replaces all that was seen before.
    Snapshot(Option<LeaseRecord>),
    /// There is a new holder, or the record changed.
    Changed(LeaseRecord),
    /// It is free: released, expired or deleted.
    Vacant,
}

/// Which part of a long listing is wanted.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Names after this one only, by the order of their bytes.
    pub after: Option<LeaseName>,
    /// 1 to 1,000.
    limit: u16,
}

impl Page {
    /// The most entries of one page.
    pub const LIMIT_MAX: u16 = 1_000;

    /// The first page.
    #[must_use]
    pub fn first() -> Self {
        Self { after: None, limit: Self::LIMIT_MAX }
    }

    /// The page after this name.
    #[must_use]
    pub fn after(name: LeaseName) -> Self {
        Self { after: Some(name), limit: Self::LIMIT_MAX }
    }

    /// With at most this many entries; 0 counts as 1, and 1,000 is the most.
    #[must_use]
    pub fn with_limit(mut self, limit: u16) -> Self {
        self.limit = limit.clamp(1, Self::LIMIT_MAX);
        self
    }

    /// The most entries that are asked for, 1 to 1,000.
    #[must_use]
    pub fn limit(&self) -> u16 {
        self.limit
    }
}

impl Default for Page {
    fn default() -> Self {
        Self::first()
    }
}

/// One page of a listing, ordered by name.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing<T> {
    /// The entries.
    pub items: Vec<T>,
    /// The page that follows, if there is one.
    pub next: Option<Page>,
}

impl<T> Listing<T> {
    /// A page of these entries.
    #[must_use]
    pub fn new(items: Vec<T>, next: Option<Page>) -> Self {
        Self { items, next }
    }
}

/// Leases over one store: small, single-attempt, atomic steps for a backend to implement.
///
/// Waiting, renewing, deadlines and retries are written once on top, in the
/// [lease session](crate::session). A service uses that, not this trait.
///
/// An expected race is an `Ok` outcome. An error means that the call could not tell or could not
/// proceed; its [effect](crate::Effect) says whether it may have been applied.
///
/// The repository explains the contract in `docs/design.md#leases`, and the steps to implement it in
/// `docs/backend-guide.md#5-leases`.
///
/// # Cancel safety
/// Every method: a dropped future is an unknown effect, exactly like a timeout. The same attempt, tried
/// again, resolves it; else its TTL ends it.
#[async_trait]
pub trait Lease: Debug + Send + Sync + 'static {
    /// Tries to acquire once, without waiting.
    ///
    /// The same attempt, retried, gets the same grant and term again, extended. Any other attempt, also
    /// of the same node, is another holder. Every new grant of a name has a greater term than all before
    /// it, whatever ended them. With [`Reclaim`](crate::Reclaim), a live grant of the same node is
    /// replaced by a new one with a greater term.
    ///
    /// After the store has lost all its data, terms go on rising where
    /// [`terms_survive_loss`](crate::Guarantees::terms_survive_loss) says so; elsewhere the operator raises
    /// the era. A handle that is open meanwhile gives the store its identity back, or fails with
    /// `Misconfigured` from then on: it never goes on in another store under the old origin.
    ///
    /// A record that was deleted by another program is no release. A backend may keep the lease held for the
    /// holder that it has seen, and for its TTL at most, before it grants it to another.
    ///
    /// # Errors
    /// `Unavailable` (effect unknown where the request was sent), `Denied`, `Corrupt`, `Closed`.
    ///
    /// # Cancel safety
    /// See the trait: unknown effect, resolved by the same attempt.
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Acquire>;

    /// Extends this grant by its TTL, counted by the store from now. What is gone stays gone: nothing
    /// is acquired again, and a renewal that comes late revives nothing.
    ///
    /// Which TTL: one and the same is set, stored and told. An older copy of the grant may name another one
    /// than the record does, after the same attempt acquired again for another TTL; the record's is the
    /// one to take.
    ///
    /// # Errors
    /// As `try_acquire`.
    ///
    /// # Cancel safety
    /// See the trait: the grant may have been extended.
    async fn renew(&self, grant: &Grant) -> Result<Renew>;

    /// Ends this grant, and only this one: what another attempt holds is left alone.
    ///
    /// # Errors
    /// As `try_acquire`.
    ///
    /// # Cancel safety
    /// See the trait: the grant may have been ended. Releasing again is harmless.
    async fn release(&self, grant: &Grant) -> Result<Release>;

    /// The present holder of the lease; `None` if it is free.
    ///
    /// # Errors
    /// `Unavailable`, `Denied`, `Corrupt`, `Closed`; never with an effect.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    async fn get(&self, lease: &LeaseName) -> Result<Option<LeaseRecord>>;

    /// The leases that are held now, ordered by name, one page.
    ///
    /// # Errors
    /// As `get`.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    async fn list(&self, page: Page) -> Result<Listing<LeaseRecord>>;

    /// One subscription: first a snapshot, also when the lease is free, then changes. Renewals need not show;
    /// another term shows, also one of the same node. A snapshot may come again at any time, for a reader that
    /// lags or after a gap, and replaces all before it. Changes that follow each other may be reported as one,
    /// so a vacancy in between need not show to a slow reader. It ends after the first error, also with
    /// `Closed` when the handle is closed while it is open; [`Watcher`](crate::watch::Watcher) subscribes
    /// again.
    fn watch(&self, lease: &LeaseName) -> BoxStream<'static, Result<LeaseEvent>>;
}
