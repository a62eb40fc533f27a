//! Leases, broken.

use async_trait::async_trait;
use coord_core::{
    Acquire, AcquireRequest, Grant, Lease, LeaseEvent, LeaseName, LeaseRecord, Listing, Page,
    Reclaim, Release, Renew, Result, Term, Ttl,
};
use futures::future;
use futures::stream::{BoxStream, StreamExt};

use crate::fixture::Part;
use crate::plant::Plant;

/// A grant that no store made.
fn forged(request: &AcquireRequest, held: LeaseRecord) -> Acquire {
    let mut grant = held.into_grant();
    grant.term = Term::from_u64(grant.term.get() + 1);
    grant.holder = request.holder.clone();
    Acquire::Acquired(grant)
}

fn cut(lease: &LeaseName) -> LeaseName {
    let short = lease.as_str().get(..60).and_then(|short| LeaseName::new(short).ok());
    short.unwrap_or_else(|| lease.clone())
}

impl Part<dyn Lease> {
    /// Ends whatever is there, and acquires.
    async fn steal(&self, request: &AcquireRequest) -> Result<Acquire> {
        if let Some(record) = self.inner.get(&request.lease).await? {
            let _ = self.inner.release(&record.into_grant()).await?;
        }
        self.inner.try_acquire(request).await
    }

    /// What the store is asked for instead.
    fn distorted(&self, request: &AcquireRequest) -> AcquireRequest {
        let mut request = request.clone();
        match self.plant {
            Plant::CutsNames => request.lease = cut(&request.lease),
            Plant::EndsEarly => {
                request.ttl = Ttl::new(request.ttl.get() / 2).unwrap_or(Ttl::MIN);
            }
            Plant::HolderByNameOnly => request.reclaim = Reclaim::FormerProcessIsDead,
            Plant::SecondGrantNeverEnds => {
                let mut memory = self.memory();
                let grants = memory.grants.entry(request.lease.clone()).or_default();
                *grants += 1;
                if *grants > 1 {
                    request.ttl = Ttl::MAX;
                }
            }
            _ => {}
        }
        request
    }

    /// What the caller is told instead.
    fn told(&self, request: &AcquireRequest, mut grant: Grant) -> Grant {
        let mut memory = self.memory();
        memory.real.insert(grant.holder.attempt, grant.clone());
        match self.plant {
            Plant::TermRepeats => grant.term = Term::from_u64(1),
            Plant::TermInTheRecord => {
                let term = memory.terms.entry(grant.lease.clone()).or_default();
                *term += 1;
                grant.term = Term::from_u64(*term);
            }
            Plant::SecondGrantNeverEnds | Plant::EndsEarly => grant.ttl = request.ttl,
            Plant::HidesTheGrantedTtl => {
                let more = grant.ttl.get() + std::time::Duration::from_secs(1);
                grant.ttl = Ttl::new(more).unwrap_or(Ttl::MIN);
            }
            _ => {}
        }
        grant
    }

    /// The grant as the store knows it.
    fn real(&self, grant: &Grant) -> Grant {
        self.memory().real.get(&grant.holder.attempt).unwrap_or(grant).clone()
    }
}

#[async_trait]
impl Lease for Part<dyn Lease> {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let seen = self.inner.get(&request.lease).await?;
        let is_mine =
            seen.as_ref().is_some_and(|record| record.holder.attempt == request.holder.attempt);
        if self.plant == Plant::RetryGetsNewTerm && is_mine {
            return self.steal(request).await;
        }
        if self.plant == Plant::ReclaimTakesAll && request.reclaim != Reclaim::No {
            return self.steal(request).await;
        }
        if self.plant == Plant::LooksBeforeItGrants {
            tokio::task::yield_now().await;
        }
        match self.inner.try_acquire(&self.distorted(request)).await? {
            Acquire::Acquired(grant) => Ok(Acquire::Acquired(self.told(request, grant))),
            Acquire::Held(record)
                if self.plant == Plant::GrantsTwice
                    || (self.plant == Plant::LooksBeforeItGrants && seen.is_none()) =>
            {
                Ok(forged(request, record))
            }
            other => Ok(other),
        }
    }

    async fn renew(&self, grant: &Grant) -> Result<Renew> {
        let renewed = self.inner.renew(&self.real(grant)).await?;
        let again = AcquireRequest::new(grant.lease.clone(), grant.holder.clone(), grant.ttl);
        let acquired = match (self.plant, &renewed) {
            (Plant::LateRenewResurrects, Renew::Lost(None)) => {
                self.inner.try_acquire(&again).await?
            }
            (Plant::LateRenewSteals, Renew::Lost(Some(_))) => self.steal(&again).await?,
            (Plant::HidesTheGrantedTtl, Renew::Renewed(_)) => {
                return Ok(Renew::Renewed(grant.clone()));
            }
            (Plant::RenewTellsAnotherTtl, Renew::Renewed(_)) => {
                let _ = self.inner.try_acquire(&again).await?;
                return Ok(renewed);
            }
            _ => return Ok(renewed),
        };
        match acquired {
            Acquire::Acquired(grant) => Ok(Renew::Renewed(grant)),
            _ => Ok(renewed),
        }
    }

    async fn release(&self, grant: &Grant) -> Result<Release> {
        self.memory().releases += 1;
        if self.plant == Plant::ReleaseEvictsSuccessor
            && let Some(record) = self.inner.get(&grant.lease).await?
        {
            return self.inner.release(&record.into_grant()).await;
        }
        self.inner.release(&self.real(grant)).await
    }

    async fn get(&self, lease: &LeaseName) -> Result<Option<LeaseRecord>> {
        match self.inner.get(lease).await {
            Err(_) if self.plant == Plant::FailureReadsAsVacant => Ok(None),
            other => other,
        }
    }

    async fn list(&self, page: Page) -> Result<Listing<LeaseRecord>> {
        let mut listing = self.inner.list(page).await?;
        if self.plant == Plant::ListEndsEarly {
            listing.next = None;
        }
        Ok(listing)
    }

    fn watch(&self, lease: &LeaseName) -> BoxStream<'static, Result<LeaseEvent>> {
        let events = self.inner.watch(lease);
        let shared = self.shared.clone();
        match self.plant {
            Plant::NoFirstSnapshot => events.skip(1).boxed(),
            Plant::WatchKnowsNodesOnly => {
                let mut shown = None;
                let mut is_new = move |event: &Result<LeaseEvent>| {
                    let Ok(LeaseEvent::Changed(record)) = event else { return true };
                    let node = Some(record.holder.node.clone());
                    std::mem::replace(&mut shown, node.clone()) != node
                };
                events.filter(move |event| future::ready(is_new(event))).boxed()
            }
            Plant::LeaseEndsWithoutEvent => events
                .filter(move |event| {
                    let released = shared.lock().is_ok_and(|memory| memory.releases > 0);
                    future::ready(released || !matches!(event, Ok(LeaseEvent::Vacant)))
                })
                .boxed(),
            _ => events,
        }
    }
}
