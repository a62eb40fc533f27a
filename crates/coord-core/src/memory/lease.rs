//! Leases and terms.

use std::ops::Bound;

use async_trait::async_trait;
use futures::stream::BoxStream;
use tokio::sync::broadcast;
use tokio::time::Instant;

use super::Handle;
use super::store::{Expiring, State};
use super::watch::{Topic, subscribe};
use crate::error::Result;
use crate::lease::{Acquire, Lease, LeaseEvent, Listing, Page, Release, Renew};
use crate::types::{AcquireRequest, Era, Fence, Grant, LeaseName, LeaseRecord, Reclaim, Term, Ttl};

/// How many events a watch of one lease may fall behind before it gets a snapshot.
const EVENTS_MAX: usize = 16;

/// A lease that is held.
pub(super) struct HeldLease {
    grant: Grant,
    expires: Instant,
}

#[async_trait]
impl Lease for Handle {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let ttl = self.info.guarantees.granted_ttl(request.ttl);
        self.run("try_acquire", |state, now| state.try_acquire(request, ttl, self.era, now))
    }

    async fn renew(&self, grant: &Grant) -> Result<Renew> {
        self.run("renew", |state, now| Ok(state.renew(grant, now)))
    }

    async fn release(&self, grant: &Grant) -> Result<Release> {
        self.run("release", |state, _| Ok(state.release(grant)))
    }

    async fn get(&self, lease: &LeaseName) -> Result<Option<LeaseRecord>> {
        self.run("get", |state, now| Ok(state.lease_record(lease, now)))
    }

    async fn list(&self, page: Page) -> Result<Listing<LeaseRecord>> {
        self.run("list", |state, now| Ok(state.list_leases(page, now)))
    }

    fn watch(&self, lease: &LeaseName) -> BoxStream<'static, Result<LeaseEvent>> {
        subscribe(self, LeaseTopic(lease.clone()))
    }
}

impl State {
    fn try_acquire(
        &mut self,
        request: &AcquireRequest,
        ttl: Ttl,
        era: Era,
        now: Instant,
    ) -> Result<Acquire> {
        if let Some(held) = self.leases.get(&request.lease) {
            let holder = &held.grant.holder;
            if holder.attempt == request.holder.attempt {
                let mut grant = held.grant.clone();
                let is_same_ttl = grant.ttl == ttl;
                (grant.ttl, grant.revision) = (ttl, self.next_revision());
                let grant = self.put_lease(grant, now);
                // Watches sleep by the old TTL until they hear of another.
                if !is_same_ttl {
                    self.tell_changed(&grant);
                }
                return Ok(Acquire::Acquired(grant));
            }
            let reclaims = request.reclaim == Reclaim::FormerProcessIsDead
                && holder.node == request.holder.node;
            if !reclaims {
                return Ok(Acquire::Held(held.record(now)));
            }
        }
        let term = Term::new(era, self.next_term())?;
        let (lease, holder) = (request.lease.clone(), request.holder.clone());
        let revision = self.next_revision();
        let grant = Grant::new(lease, holder, term, ttl, self.origin.clone(), revision);
        let grant = self.put_lease(grant, now);
        self.tell_changed(&grant);
        Ok(Acquire::Acquired(grant))
    }

    fn renew(&mut self, grant: &Grant, now: Instant) -> Renew {
        match self.leases.get(&grant.lease) {
            Some(held) if held.is(grant) => {
                let mut grant = held.grant.clone();
                grant.revision = self.next_revision();
                Renew::Renewed(self.put_lease(grant, now))
            }
            other => Renew::Lost(other.map(|held| held.record(now))),
        }
    }

    fn release(&mut self, grant: &Grant) -> Release {
        let is_held = self.leases.get(&grant.lease).is_some_and(|held| held.is(grant));
        if is_held && self.delete_lease(&grant.lease) {
            Release::Released
        } else {
            Release::NotHeld
        }
    }

    /// Ends a lease, whichever attempt holds it.
    pub(super) fn delete_lease(&mut self, lease: &LeaseName) -> bool {
        let Some(held) = self.leases.remove(lease) else { return false };
        self.set_expiry(Expiring::Lease(lease.clone()), Some(held.expires), None);
        self.tell_lease(lease, LeaseEvent::Vacant);
        true
    }

    /// A lease lasts no longer than its TTL from now.
    pub(super) fn shorten_lease(&mut self, lease: &LeaseName, now: Instant) {
        let Some(held) = self.leases.get_mut(lease) else { return };
        let (before, latest) = (held.expires, now + held.grant.ttl.get());
        if before > latest {
            held.expires = latest;
            self.set_expiry(Expiring::Lease(lease.clone()), Some(before), Some(latest));
        }
    }

    /// Only where the time of its expiry is told.
    pub(super) fn move_lease(&mut self, lease: &LeaseName, expires: Instant) {
        if let Some(held) = self.leases.get_mut(lease) {
            held.expires = expires;
        }
    }

    pub(super) fn expire_lease(&mut self, lease: &LeaseName) {
        self.leases.remove(lease);
        self.tell_lease(lease, LeaseEvent::Vacant);
    }

    fn lease_record(&self, lease: &LeaseName, now: Instant) -> Option<LeaseRecord> {
        self.leases.get(lease).map(|held| held.record(now))
    }

    fn list_leases(&self, page: Page, now: Instant) -> Listing<LeaseRecord> {
        let limit = page.limit();
        let after = page.after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut rest = self.leases.range((after, Bound::Unbounded));
        let items: Vec<_> =
            rest.by_ref().take(usize::from(limit)).map(|(_, held)| held.record(now)).collect();
        let last = items.last().filter(|_| rest.next().is_some());
        let next = last.map(|last| Page::after(last.lease.clone()).with_limit(limit));
        Listing::new(items, next)
    }

    /// Whether this very grant still holds its lease in this store; so too for a fence of another
    /// store, about which this one can't tell.
    pub(super) fn admits_lease_of(&self, fence: &Fence) -> bool {
        fence.origin != self.origin
            || self.leases.get(&fence.lease).is_some_and(|held| held.grant.fence() == *fence)
    }

    /// Writes a grant, which then lasts for its TTL from now.
    fn put_lease(&mut self, grant: Grant, now: Instant) -> Grant {
        let expires = self.expiry(now, grant.ttl.get());
        let held = HeldLease { grant: grant.clone(), expires };
        let before = self.leases.insert(grant.lease.clone(), held).map(|held| held.expires);
        self.set_expiry(Expiring::Lease(grant.lease.clone()), before, Some(expires));
        grant
    }

    fn tell_changed(&mut self, grant: &Grant) {
        let record = LeaseRecord::new(grant.clone()).with_may_expire_in(Some(grant.ttl.get()));
        self.tell_lease(&grant.lease, LeaseEvent::Changed(record));
    }

    fn tell_lease(&self, lease: &LeaseName, event: LeaseEvent) {
        if let Some(events) = self.lease_events.get(lease) {
            // An error only says that there is no listener.
            let _ = events.send(event);
        }
    }
}

impl HeldLease {
    fn record(&self, now: Instant) -> LeaseRecord {
        LeaseRecord::new(self.grant.clone())
            .with_may_expire_in(Some(self.expires.saturating_duration_since(now)))
    }

    fn is(&self, grant: &Grant) -> bool {
        self.grant.holder.attempt == grant.holder.attempt && self.grant.term == grant.term
    }
}

struct LeaseTopic(LeaseName);

impl Topic for LeaseTopic {
    type Event = LeaseEvent;

    fn receiver(&self, state: &mut State) -> broadcast::Receiver<LeaseEvent> {
        let new = || broadcast::Sender::new(EVENTS_MAX);
        state.lease_events.entry(self.0.clone()).or_insert_with(new).subscribe()
    }

    fn snapshot(&self, state: &State, now: Instant) -> LeaseEvent {
        LeaseEvent::Snapshot(state.lease_record(&self.0, now))
    }

    fn left(&self, state: &mut State) {
        if state.lease_events.get(&self.0).is_some_and(|events| events.receiver_count() == 0) {
            state.lease_events.remove(&self.0);
        }
    }
}
