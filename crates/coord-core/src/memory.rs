//! The embedded backend: everything in this process's memory, and the executable form of the
//! contract.
//!
//! What another backend does with a transaction or a script of its store is here a plain function
//! on a plain state under one lock: reading [`Lease`], [`Discovery`] and [`Placement`] beside it
//! shows what each call has to mean.
//!
//! ```text
//!   MemoryBackend ── handle ──┐                  ┌ lease.rs      leases and terms
//!   MemoryBackend ── handle ──┼── store ─ state ─┼ discovery.rs  registrations
//!   a watch       ── handle ──┘   (lock)         └ placement.rs  tables and requests
//! ```
//!
//! There is no background task. Each call first removes what has run out by the monotonic clock,
//! and a watch sleeps until the next thing runs out, so it tells of an expiry when it happens. The
//! store may be used from several runtimes at once; a watch has to be polled inside one.

mod discovery;
mod lease;
mod placement;
mod store;
#[cfg(test)]
mod tests;
mod watch;

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use self::store::WallClock;
use self::store::{State, Store};
use crate::backend::{Backend, BackendInfo, ExpiryClock, Guarantees, Health, HealthStatus};
use crate::discovery::Discovery;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::placement::Placement;
use crate::types::{ClusterName, Era, LeaseName, NodeId, TableName};
use crate::url::{BackendUrl, MEMORY_SCHEME};

/// A store in this process's memory, opened for one cluster.
///
/// Two [opened](Self::open) for the same cluster name see the same store. It lives as long as its
/// handles and their watches; only its terms go on rising in whatever store of that name comes
/// next. A clone is the same handle: closing one closes both.
///
/// Discovery: a plain heartbeat leaves the record's revision as it is, so an eviction that shows
/// the current revision succeeds also if a heartbeat came in between. Expiry is this store's own
/// business, and nobody has to prove silence to it.
///
/// Placement: a claim or a publish under a fence of this very store passes only while that grant
/// holds its lease. Else it is Fenced, with the table's fence, which may be the caller's own; for a
/// claim of a table that does not exist, with the fence of the claim.
#[derive(Clone)]
pub struct MemoryBackend {
    handle: Arc<Handle>,
}

/// One opened handle: what the three traits are implemented on.
pub(crate) struct Handle {
    store: Arc<Store>,
    era: Era,
    info: BackendInfo,
    closed: CancellationToken,
}

impl MemoryBackend {
    /// Opens this process's store of that cluster name, which is made if there is none.
    #[must_use]
    pub fn open(cluster: ClusterName) -> Self {
        let store = Store::shared(&cluster);
        Self::of(store, cluster, Era::default())
    }

    /// Opens this process's store of the URL's cluster, with the URL's era.
    ///
    /// # Errors
    /// `Invalid` for a user, a password, a host or a bad era; `Unsupported` for another option than
    /// `era`.
    pub fn from_url(url: &BackendUrl) -> Result<Self> {
        let era = url.options(&[])?.era()?;
        if url.user().is_some() || url.password().is_some() || !url.hosts().is_empty() {
            let why = "a store in memory has no user, no password and no host; \
                       write memory://cluster";
            return Err(Error::invalid("connect", why).resource(url));
        }
        Ok(Self::open(url.cluster().clone()).with_era(era))
    }

    /// A new store that nobody else can open, for tests. Its terms start at 1.
    #[must_use]
    pub fn isolated(cluster: ClusterName) -> Self {
        let store = Store::isolated(&cluster);
        Self::of(store, cluster, Era::default())
    }

    /// Another handle of the same store, open also if this one was closed.
    #[must_use]
    pub fn reopen(&self) -> Self {
        self.with_era(self.handle.era)
    }

    /// Another handle of the same store, which puts this era into the terms that it is granted.
    #[must_use]
    pub fn with_era(&self, era: Era) -> Self {
        Self::of(Arc::clone(&self.handle.store), self.handle.info.cluster.clone(), era)
    }

    /// Deletes a table and tells whether there was one, as an operator would with the store's own
    /// tools.
    pub fn delete_table(&self, table: &TableName) -> bool {
        self.handle.store.lock(|state, _| state.delete_table(table))
    }

    /// Ends a lease, whoever holds it, and tells whether anybody did, as an operator would with the
    /// store's own tools.
    pub fn delete_lease(&self, lease: &LeaseName) -> bool {
        self.handle.store.lock(|state, _| state.delete_lease(lease))
    }

    /// Deletes a node's record and tells whether there was one, as an operator would with the store's
    /// own tools: nothing says that the node left.
    pub fn delete_node(&self, node: &NodeId) -> bool {
        self.handle.store.lock(|state, _| state.delete_node(node))
    }

    /// Deletes all requests, answered ones too, and tells whether there were any.
    pub fn delete_requests(&self) -> bool {
        self.handle.store.lock(|state, _| state.delete_requests())
    }

    /// Loses all that is stored: leases, nodes, tables and requests. The terms go on rising; see
    /// [`rewind_terms`](Self::rewind_terms).
    pub fn lose_data(&self) {
        self.handle.store.lock(|state, _| state.lose_data());
    }

    /// Another handle of the same store, which from now on shows each heartbeat and judges expiry as a
    /// store does that goes by a wall clock: see [`set_wall_clock`](Self::set_wall_clock).
    #[must_use]
    pub fn by_wall_clock(&self) -> Self {
        self.handle.store.lock(|state, _| state.shows_heartbeats = true);
        let mut info = self.handle.info.clone();
        info.guarantees.expiry_clock = ExpiryClock::ServerWall;
        info.guarantees.heartbeats_show = true;
        let (store, closed) = (Arc::clone(&self.handle.store), CancellationToken::new());
        Self { handle: Arc::new(Handle { store, era: self.handle.era, info, closed }) }
    }

    /// Sets the store's wall clock right, or lets it err. Once it is right again, what is held for longer
    /// than its TTL from now is held for its TTL, leases alone; of a node the record stays for as long as
    /// the clock said.
    pub fn set_wall_clock(&self, clock: WallClock) {
        self.handle.store.lock(|state, now| state.set_wall_clock(clock, now));
    }

    /// Ends whatever runs out some day, as a wall clock does that jumps ahead: it is told as if its time
    /// had passed.
    pub fn run_out(&self) {
        self.handle.store.lock(State::run_out);
    }

    /// Lets the terms count on from after this number, as if the store had been restored from an
    /// old backup. What is held stays as it is; see [`delete_lease`](Self::delete_lease).
    pub fn rewind_terms(&self, store_part: u64) {
        self.handle.store.lock(|state, _| state.rewind_terms(store_part));
    }

    fn of(store: Arc<Store>, cluster: ClusterName, era: Era) -> Self {
        let guarantees = Guarantees { publish_checks_lease: true, ..Guarantees::linearizable() };
        let target = format!("{MEMORY_SCHEME}://{cluster}");
        let info =
            BackendInfo::new(MEMORY_SCHEME, target, cluster, store.origin().clone(), guarantees);
        let closed = CancellationToken::new();
        Self { handle: Arc::new(Handle { store, era, info, closed }) }
    }
}

#[async_trait]
impl Backend for MemoryBackend {
    fn info(&self) -> &BackendInfo {
        &self.handle.info
    }

    fn lease(&self) -> Arc<dyn Lease> {
        Arc::clone(&self.handle) as _
    }

    fn discovery(&self) -> Arc<dyn Discovery> {
        Arc::clone(&self.handle) as _
    }

    fn placement(&self) -> Arc<dyn Placement> {
        Arc::clone(&self.handle) as _
    }

    async fn check(&self) -> Result<Health> {
        let started = Instant::now();
        let written = self.handle.run("check", |state, _| Ok(state.next_write()))?;
        let read = self.handle.run("check", |state, _| Ok(state.last_write()))?;
        let took = started.elapsed();

        let mut health = Health::default();
        let good = HealthStatus::Good;
        health.add("reachable", good, "the store is in the memory of this process");
        health.add("version", good, concat!("coord-core ", env!("CARGO_PKG_VERSION")));
        let kept = "nothing is kept once the last handle is gone or the process ends; \
                    other processes can't see it";
        health.add("configuration", good, kept);
        // Another handle may have written in between: the number only ever rises.
        if read >= written {
            health.add("round trip", good, format!("made a write and read it back in {took:?}"));
        } else {
            let why = format!("made write {written} and read {read}: report this as a bug");
            health.add("round trip", HealthStatus::Bad, why);
        }
        health.round_trip = Some(took);
        Ok(health)
    }

    async fn close(&self) -> Result<()> {
        self.handle.closed.cancel();
        Ok(())
    }
}

impl Handle {
    /// One atomic step on what has not run out, unless the handle was closed.
    fn run<T>(
        &self,
        operation: &'static str,
        step: impl FnOnce(&mut State, Instant) -> Result<T>,
    ) -> Result<T> {
        if self.closed.is_cancelled() {
            return Err(self.closed_error(operation));
        }
        self.store.lock(step)
    }

    fn closed_error(&self, operation: &'static str) -> Error {
        Error::new(ErrorKind::Closed, operation)
            .resource(&self.info.target)
            .message("the handle was closed; open the backend again")
    }
}

impl fmt::Debug for MemoryBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryBackend").field("handle", &self.handle).finish()
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("origin", &self.info.origin)
            .field("era", &self.era)
            .field("closed", &self.closed.is_cancelled())
            .finish_non_exhaustive()
    }
}
