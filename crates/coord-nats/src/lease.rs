//! Leases: one subject each, and every write of it a compare-and-set with a TTL.
//!
//! The term is the sequence of the write that acquired the lease. It stands in no record of that
//! very write, which does not know it yet, and in the record of every later one. Sequences rise
//! with every write to the stream, and a stream begins with the time at which it was made: so terms
//! rise whatever happened to a lease, to its record, or to the stream.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Bound;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_core::kit::Op;
use coord_core::wire::{LeaseRecordV1, Record};
use coord_core::{
    Acquire, AcquireRequest, Era, Error, Grant, Holder, Lease, LeaseEvent, LeaseName, LeaseRecord,
    Listing, Origin, Page, Reclaim, Release, Renew, Result, Revision,
};
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};

use crate::client::{Condition, Last, Outcome, Put, Topic, Update, What, subscribe};
use crate::keys::{Keys, Mark};
use crate::{Handle, RACES_MAX, pause};

/// How many records a listing reads at once.
pub(crate) const READS_MAX: usize = 32;

#[async_trait]
impl Lease for Handle {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let op = Op::write("try_acquire", request.lease.as_str());
        let subject = self.keys.lease(&request.lease);
        let ttl = self.info.guarantees.granted_ttl(request.ttl);
        let record =
            |term| LeaseRecordV1::new(request.lease.clone(), request.holder.clone(), term, ttl);
        let (mut at, mut term) = (0, None);
        for race in 0..RACES_MAX {
            pause(race).await;
            if let Some(sequence) = self.write_lease(op, &subject, &record(term), at).await? {
                let grant = self.grant(op, record(term), sequence)?;
                return Ok(Acquire::Acquired(grant));
            }
            let last = self.client.get(op, &subject).await?;
            at = last.sequence;
            term = match self.held(op, &request.lease, &last)? {
                None => None,
                Some(held) if held.holder.attempt == request.holder.attempt => {
                    Some(held.term.store_part())
                }
                Some(held) => {
                    let reclaims = request.reclaim == Reclaim::FormerProcessIsDead
                        && held.holder.node == request.holder.node;
                    if !reclaims {
                        return Ok(Acquire::Held(self.observed(op, held, &last).await));
                    }
                    None
                }
            };
        }
        Err(op.contended())
    }

    async fn renew(&self, grant: &Grant) -> Result<Renew> {
        let op = Op::write("renew", grant.lease.as_str());
        let subject = self.keys.lease(&grant.lease);
        let mut grant = grant.clone();
        for race in 0..RACES_MAX {
            pause(race).await;
            if let Some(at) = sequence_of(&grant) {
                let record = LeaseRecordV1::of(&grant);
                if let Some(sequence) = self.write_lease(op, &subject, &record, at).await? {
                    grant.revision = revision(&grant.holder, sequence);
                    return Ok(Renew::Renewed(grant));
                }
            }
            // Boxed, so that it takes no room in the future of each renewal.
            let last = Box::pin(self.client.get(op, &subject)).await?;
            match self.held(op, &grant.lease, &last)? {
                // Written meanwhile by a call of one's own whose reply was lost, or by another copy
                // of the grant. That was before this call: the TTL has to be counted anew all the
                // same.
                Some(held) if is_same(&held, &grant) => grant = held,
                other => {
                    // Or another bucket has taken the place of the one that it was in.
                    Box::pin(self.client.look_at_identity(op)).await?;
                    let Some(other) = other else { return Ok(Renew::Lost(None)) };
                    let record = Box::pin(self.observed(op, other, &last)).await;
                    return Ok(Renew::Lost(Some(record)));
                }
            }
        }
        Err(op.contended())
    }

    async fn release(&self, grant: &Grant) -> Result<Release> {
        let op = Op::write("release", grant.lease.as_str());
        let subject = self.keys.lease(&grant.lease);
        let mut at = sequence_of(grant);
        for race in 0..RACES_MAX {
            pause(race).await;
            if let Some(at) = at
                && let Outcome::Done(_) =
                    self.client.remove(op, &subject, at, grant.ttl.get()).await?
            {
                return Ok(Release::Released);
            }
            let last = self.client.get(op, &subject).await?;
            at = Some(last.sequence);
            match self.held(op, &grant.lease, &last)? {
                Some(held) if is_same(&held, grant) => {}
                _ => return Ok(Release::NotHeld),
            }
        }
        Err(op.contended())
    }

    async fn get(&self, lease: &LeaseName) -> Result<Option<LeaseRecord>> {
        let op = Op::read("get", lease.as_str());
        let last = self.client.get(op, &self.keys.lease(lease)).await?;
        let Some(held) = self.held(op, lease, &last)? else { return Ok(None) };
        Ok(Some(self.observed(op, held, &last).await))
    }

    async fn list(&self, page: Page) -> Result<Listing<LeaseRecord>> {
        let op = Op::read("list", &self.info.target);
        let filter = self.keys.leases();
        let subjects = self.client.subjects(op, &filter).await?;
        let names: BTreeSet<_> = subjects.iter().filter_map(|text| Keys::lease_of(text)).collect();
        let page_limit = page.limit();
        let limit = usize::from(page_limit);
        let after = page.after.map_or(Bound::Unbounded, Bound::Excluded);
        // One more than asked for, to know whether there are more. A subject may hold a marker
        // only.
        let rest = names.range((after, Bound::Unbounded)).cloned();
        let reads = rest.map(|name| async move { self.get(&name).await });
        let records: Vec<_> = stream::iter(reads)
            .buffered(READS_MAX)
            .try_filter_map(|record| async { Ok(record) })
            .take(limit + 1)
            .try_collect()
            .await?;
        let has_more = records.len() > limit;
        let items: Vec<_> = records.into_iter().take(limit).collect();
        let last = items.last().filter(|_| has_more);
        let next = last.map(|last| Page::after(last.lease.clone()).with_limit(page_limit));
        Ok(Listing::new(items, next))
    }

    fn watch(&self, lease: &LeaseName) -> BoxStream<'static, Result<LeaseEvent>> {
        let topic = LeaseTopic {
            subject: self.keys.lease(lease),
            lease: lease.clone(),
            era: self.config.era,
            origin: self.info.origin.clone(),
            held: None,
        };
        subscribe(&self.client, lease.as_str(), topic)
    }
}

impl Handle {
    /// Writes a lease's record over the message with this sequence, to live for its TTL; none if
    /// another one is there.
    async fn write_lease(
        &self,
        op: Op<'_>,
        subject: &str,
        record: &LeaseRecordV1,
        at: u64,
    ) -> Result<Option<u64>> {
        let ttl = Some(record.ttl_ms.get());
        let (value, condition) = (record.encode()?, Condition::At(at));
        let outcome = self.client.put(op, Put { subject, value, ttl, condition }).await?;
        Ok(match outcome {
            Outcome::Done(sequence) => Some(sequence),
            _ => None,
        })
    }

    /// The grant that is held according to the last message.
    pub(crate) fn held(&self, op: Op<'_>, lease: &LeaseName, last: &Last) -> Result<Option<Grant>> {
        let Some(value) = &last.value else { return Ok(None) };
        let record = read_record(op, lease, value)?;
        self.grant(op, record, last.sequence).map(Some)
    }

    /// A grant as others see it, with how long it has still to live and since when.
    async fn observed(&self, op: Op<'_>, mut held: Grant, last: &Last) -> LeaseRecord {
        let subject = self.keys.lease(&held.lease);
        let (standing, at) = self.client.observe(op, &subject, last, held.ttl.get()).await;
        held.revision = revision(&held.holder, at);
        LeaseRecord::new(held)
            .with_may_expire_in(standing.map(|standing| standing.left))
            .with_renewed_ago(standing.and_then(|standing| standing.written_ago))
    }

    fn grant(&self, op: Op<'_>, record: LeaseRecordV1, sequence: u64) -> Result<Grant> {
        grant(op, record, sequence, self.config.era, &self.info.origin)
    }
}

fn read_record(op: Op<'_>, lease: &LeaseName, value: &[u8]) -> Result<LeaseRecordV1> {
    let record = LeaseRecordV1::decode(value).map_err(|error| op.corrupt(error))?;
    if record.lease != *lease {
        let why = format!("the record is that of another lease found={}", record.lease);
        return Err(Error::corrupt(op.name, why).resource(lease));
    }
    Ok(record)
}

/// The grant of a record that stands at this sequence, which is the term if the record holds none.
fn grant(
    op: Op<'_>,
    record: LeaseRecordV1,
    sequence: u64,
    era: Era,
    origin: &Origin,
) -> Result<Grant> {
    let revision = revision(&record.holder, sequence);
    let grant = record.into_grant(era, Some(sequence), origin.clone(), revision);
    grant.map_err(|error| op.corrupt(error))
}

fn revision(holder: &Holder, sequence: u64) -> Revision {
    Mark { sequence, whose: holder.attempt.as_u128() }.revision()
}

/// The sequence of the last write of this grant that the caller knows of.
fn sequence_of(grant: &Grant) -> Option<u64> {
    Mark::sequence_of(&grant.revision, grant.holder.attempt.as_u128())
}

fn is_same(held: &Grant, grant: &Grant) -> bool {
    held.term == grant.term && held.holder.attempt == grant.holder.attempt
}

struct LeaseTopic {
    subject: String,
    lease: LeaseName,
    era: Era,
    origin: Origin,
    held: Option<Grant>,
}

impl Topic for LeaseTopic {
    type Event = LeaseEvent;

    fn filter(&self) -> String {
        self.subject.clone()
    }

    async fn apply(
        &mut self,
        update: Update,
        events: &mut VecDeque<LeaseEvent>,
    ) -> Result<Option<Duration>> {
        let What::Put(value) = update.what else {
            if self.held.take().is_some() {
                events.push_back(LeaseEvent::Vacant);
            }
            return Ok(None);
        };
        let op = Op::read("watch", self.lease.as_str());
        let record = read_record(op, &self.lease, &value)?;
        let grant = grant(op, record, update.sequence, self.era, &self.origin)?;
        let ttl = grant.ttl;
        let shown = self.held.replace(grant.clone());
        if shown.is_none_or(|shown| shown.fence() != grant.fence() || shown.ttl != ttl) {
            events.push_back(LeaseEvent::Changed(LeaseRecord::new(grant)));
        }
        Ok(Some(ttl.get()))
    }

    fn written_anew(&self, value: Bytes, sequence: u64) -> Result<Bytes> {
        // The record of a first write does not say its term, which is that write's sequence.
        let op = Op::read("watch", self.lease.as_str());
        let record = read_record(op, &self.lease, &value)?;
        let grant = grant(op, record, sequence, self.era, &self.origin)?;
        LeaseRecordV1::of(&grant).encode()
    }

    async fn snapshot(&mut self) -> Result<LeaseEvent> {
        Ok(LeaseEvent::Snapshot(self.held.clone().map(LeaseRecord::new)))
    }
}
