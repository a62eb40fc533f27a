//! Leases: a record each in one hash, and its end in a sorted set beside it.
//!
//! The term is a mark of the server's: greater than the last one and at least its clock's
//! microseconds. A server that has lost the last one goes on from its clock.

use std::collections::VecDeque;
use std::time::Duration;

use async_trait::async_trait;
use coord_core::kit::Op;
use coord_core::wire::{LeaseRecordV1, Record};
use coord_core::{
    Acquire, AcquireRequest, Error, Grant, Lease, LeaseEvent, LeaseName, LeaseRecord, Listing,
    Page, Reclaim, Release, Renew, Result, Term, Ttl,
};
use futures::stream::BoxStream;

use crate::Handle;
use crate::client::{Hint, Reply, Subject, Topic, subscribe};
use crate::error::strange;
use crate::keys::revision;
use crate::scripts::{ACQUIRE, LEASE, LIST, RELEASE, RENEW};

#[async_trait]
impl Lease for Handle {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let op = Op::write("try_acquire", request.lease.as_str());
        let ttl = self.info.guarantees.granted_ttl(request.ttl);
        let holder = &request.holder;
        let record =
            LeaseRecordV1::new(request.lease.clone(), holder.clone(), None, ttl).encode()?;
        let (attempt, lasts) = (holder.attempt.to_string(), micros(ttl));
        let reclaims: &[u8] = match request.reclaim {
            Reclaim::FormerProcessIsDead => b"1",
            _ => b"0",
        };
        let arguments = [
            request.lease.as_str().as_bytes(),
            &record,
            attempt.as_bytes(),
            holder.node.as_str().as_bytes(),
            lasts.as_bytes(),
            reclaims,
        ];
        let (reply, too_few) = self.client.run_and_wait(op, &ACQUIRE, &arguments).await?;
        match (reply.outcome(), too_few) {
            ("acquired", None) => {
                Ok(Acquire::Acquired(self.grant(op, &request.lease, reply.get(1))?))
            }
            ("acquired", Some(error)) => {
                let grant = self.grant(op, &request.lease, reply.get(1))?;
                Err(self.give_back(op, &grant, error).await)
            }
            ("held", _) => Ok(Acquire::Held(self.observed(op, &request.lease, &reply, 1)?)),
            (other, _) => Err(strange(op, other)),
        }
    }

    async fn renew(&self, grant: &Grant) -> Result<Renew> {
        let op = Op::write("renew", grant.lease.as_str());
        let lasts = micros(grant.ttl);
        let (attempt, term) = (grant.holder.attempt.to_string(), part(grant.term));
        let arguments = [
            grant.lease.as_str().as_bytes(),
            attempt.as_bytes(),
            term.as_bytes(),
            lasts.as_bytes(),
        ];
        let reply = self.client.run_confirmed(op, &RENEW, &arguments).await?;
        match reply.outcome() {
            "renewed" => Ok(Renew::Renewed(self.grant(op, &grant.lease, reply.get(1))?)),
            "lost" if reply.some(1).is_none() => Ok(Renew::Lost(None)),
            "lost" => Ok(Renew::Lost(Some(self.observed(op, &grant.lease, &reply, 1)?))),
            other => Err(strange(op, other)),
        }
    }

    async fn release(&self, grant: &Grant) -> Result<Release> {
        let op = Op::write("release", grant.lease.as_str());
        let (attempt, term) = (grant.holder.attempt.to_string(), part(grant.term));
        let arguments = [grant.lease.as_str().as_bytes(), attempt.as_bytes(), term.as_bytes()];
        let reply = self.client.run(op, &RELEASE, &arguments).await?;
        match reply.outcome() {
            "released" => Ok(Release::Released),
            "gone" => Ok(Release::NotHeld),
            other => Err(strange(op, other)),
        }
    }

    async fn get(&self, lease: &LeaseName) -> Result<Option<LeaseRecord>> {
        self.read_lease(Op::read("get", lease.as_str()), lease).await
    }

    async fn list(&self, page: Page) -> Result<Listing<LeaseRecord>> {
        let op = Op::read("list", self.info.cluster.as_str());
        let page_limit = page.limit();
        let limit = usize::from(page_limit);
        let after = page.after.as_ref().map_or("", LeaseName::as_str);
        let one_more = (limit + 1).to_string();
        let arguments = [after.as_bytes(), one_more.as_bytes()];
        let reply = self.client.run(op, &LIST, &arguments).await?;
        let mut items = Vec::new();
        for place in (0..reply.items().len()).step_by(3) {
            let name = LeaseName::try_from(reply.text(place).to_owned());
            let name = name.map_err(|error| op.corrupt(error))?;
            items.push(self.observed(op, &name, &reply, place + 1)?);
        }
        let has_more = items.len() > limit;
        items.truncate(limit);
        let last = items.last().filter(|_| has_more).map(|record| record.lease.clone());
        let next = last.map(|last| Page::after(last).with_limit(page_limit));
        Ok(Listing::new(items, next))
    }

    fn watch(&self, lease: &LeaseName) -> BoxStream<'static, Result<LeaseEvent>> {
        let topic = LeaseTopic { handle: self.clone(), lease: lease.clone(), shown: None };
        subscribe(&self.client, lease.as_str(), topic)
    }
}

/// A TTL as the scripts take it: in microseconds.
pub(crate) fn micros(ttl: Ttl) -> String {
    ttl.get().as_micros().to_string()
}

/// The store's part of a term, as it stands in a record.
pub(crate) fn part(term: Term) -> String {
    term.store_part().to_string()
}

impl Handle {
    /// Ends a grant that too few replicas know of, so that no candidate has to wait for its TTL.
    async fn give_back(&self, op: Op<'_>, grant: &Grant, error: Error) -> Error {
        match self.release(grant).await {
            Ok(_) => {
                let why = error.message_text().to_owned();
                op.error(error.kind()).message(why)
            }
            Err(_) => error,
        }
    }

    async fn read_lease(&self, op: Op<'_>, lease: &LeaseName) -> Result<Option<LeaseRecord>> {
        let reply = self.client.run(op, &LEASE, &[lease.as_str().as_bytes()]).await?;
        match reply.some(0) {
            None => Ok(None),
            Some(_) => self.observed(op, lease, &reply, 0).map(Some),
        }
    }

    /// A grant as others see it, from a record and the time that it has still to live.
    fn observed(
        &self,
        op: Op<'_>,
        lease: &LeaseName,
        reply: &Reply,
        place: usize,
    ) -> Result<LeaseRecord> {
        let grant = self.grant(op, lease, reply.get(place))?;
        let remaining = remaining(reply, place + 1, grant.ttl);
        Ok(LeaseRecord::new(grant).with_may_expire_in(remaining))
    }

    /// The grant that a record shows.
    pub(crate) fn grant(&self, op: Op<'_>, lease: &LeaseName, record: &[u8]) -> Result<Grant> {
        let record = LeaseRecordV1::decode(record).map_err(|error| op.corrupt(error))?;
        if record.lease != *lease {
            return Err(op.misplaced("field", lease.as_str()));
        }
        let mark = revision(record.term.unwrap_or_default());
        let grant = record.into_grant(self.era, None, self.info.origin.clone(), mark);
        grant.map_err(|error| op.corrupt(error))
    }
}

/// How long something has still to live: at most its TTL, whatever the server's clock did.
pub(crate) fn remaining(reply: &Reply, place: usize, ttl: Ttl) -> Option<Duration> {
    reply.micros(place).map(|rest| rest.min(ttl.get()))
}

struct LeaseTopic {
    handle: Handle,
    lease: LeaseName,
    /// The grant that was shown last.
    shown: Option<(Term, Ttl)>,
}

impl LeaseTopic {
    async fn read(&self) -> Result<Option<LeaseRecord>> {
        let op = Op::read("watch", self.lease.as_str());
        self.handle.read_lease(op, &self.lease).await
    }
}

impl Topic for LeaseTopic {
    type Event = LeaseEvent;

    const READ_AGAIN: Duration = Duration::from_secs(5);

    fn concerns(&self, hint: &Hint) -> bool {
        hint.subject == Subject::Lease && hint.name == self.lease.as_str()
    }

    async fn snapshot(&mut self) -> Result<LeaseEvent> {
        let record = self.read().await?;
        self.shown = record.as_ref().map(|record| (record.term, record.ttl));
        Ok(LeaseEvent::Snapshot(record))
    }

    async fn changed(&mut self, hints: &[Hint], events: &mut VecDeque<LeaseEvent>) -> Result<()> {
        let record = self.read().await?;
        let now = record.as_ref().map(|record| (record.term, record.ttl));
        let before = std::mem::replace(&mut self.shown, now);
        if before == now {
            return Ok(());
        }
        let Some(record) = record else {
            events.push_back(LeaseEvent::Vacant);
            return Ok(());
        };
        let ended = |(term, _): (Term, Ttl)| {
            let term = part(term);
            hints.iter().any(|hint| hint.what == "ended" && hint.about == term)
        };
        if before.is_some_and(ended) {
            events.push_back(LeaseEvent::Vacant);
        }
        events.push_back(LeaseEvent::Changed(record));
        Ok(())
    }
}
