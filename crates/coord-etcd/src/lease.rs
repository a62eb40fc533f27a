//! Leases: one key each, bound to an etcd lease of its own that ends it.
//!
//! The term is the revision of the write that acquired it: revisions of the whole store only rise.
//! The record does not hold it, for it is not known before the write; only when the record of a
//! live grant is written anew, for another TTL, it takes the term along.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use coord_core::kit::Op;
use coord_core::wire::{LeaseRecordV1, Record};
use coord_core::{
    Acquire, AcquireRequest, Grant, Lease, LeaseEvent, LeaseName, LeaseRecord, Listing, Page,
    Reclaim, Release, Renew, Result, Term, Ttl,
};
use futures::stream::{self, BoxStream, StreamExt};

use crate::client::{Batch, Change, Condition, Entry, Kept, Step, Topic, subscribe};
use crate::error::Problem;
use crate::keys::{Mark, Range};
use crate::{Handle, ROUNDS};

/// How many times to live are asked for at once.
const LOOKUPS_MAX: usize = 16;
/// How many leases are remembered that others held.
const CONTESTED_MAX: usize = 4_096;

#[async_trait]
impl Lease for Handle {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let op = Op::write("try_acquire", request.lease.as_str());
        let key = self.keys.lease(&request.lease);
        // An etcd lease is made in vain where another holds the key: so a look at it comes first where
        // that is likely.
        let mut found = match self.contested.contains(&request.lease) {
            true => self.client.get(op, key.clone()).await?,
            false => None,
        };
        for _ in 0..ROUNDS {
            let tried = match &found {
                None => self.take(op, request, &key, None, None).await?,
                Some(entry) => self.contest(op, request, &key, entry).await?,
            };
            found = match tried {
                Tried::Answer(outcome) => {
                    self.contested.learn(&request.lease, &outcome);
                    return Ok(outcome);
                }
                Tried::Changed(found) => found,
            };
        }
        Err(op.contended())
    }

    async fn renew(&self, grant: &Grant) -> Result<Renew> {
        let op = Op::write("renew", grant.lease.as_str());
        let key = self.keys.lease(&grant.lease);
        let mut lease = Mark::of(&grant.revision).map_or(0, |mark| mark.lease);
        for _ in 0..ROUNDS {
            let (kept, entry) = self.keep(op, lease, &key).await?;
            let Some(entry) = entry else { return Ok(Renew::Lost(None)) };
            let found = self.grant_of(op, &entry)?;
            if !is_same(&found, grant) {
                let record = self.observed(op, found, entry.lease).await;
                return Ok(Renew::Lost(Some(record)));
            }
            if entry.lease == lease && kept == Kept::Alive {
                return Ok(Renew::Renewed(found));
            }
            // It was bound to another etcd lease meanwhile, or its end has still to be seen.
            lease = entry.lease;
        }
        Err(op.contended())
    }

    async fn release(&self, grant: &Grant) -> Result<Release> {
        let op = Op::write("release", grant.lease.as_str());
        let key = self.keys.lease(&grant.lease);
        let remove = [Step::Delete(key.clone())];
        let look = [Step::Get(key.clone())];
        // Where the grant shows what the key holds, there is no need to look first.
        let (mut when, mut lease) = match Mark::of(&grant.revision) {
            Some(mark) => (held_by(&key, grant, mark)?, mark.lease),
            None => (Vec::new(), 0),
        };
        for _ in 0..ROUNDS {
            let found = if when.is_empty() {
                self.client.get(op, key.clone()).await?
            } else {
                let mut outcome = self.client.transact(op, &when, &remove, &look).await?;
                if outcome.succeeded {
                    self.client.discard(lease);
                    return Ok(Release::Released);
                }
                outcome.take(0)
            };
            let Some(entry) = &found else { return Ok(Release::NotHeld) };
            if !is_same(&self.grant_of(op, entry)?, grant) {
                return Ok(Release::NotHeld);
            }
            when = vec![Condition::At(key.clone(), entry.modified)];
            lease = entry.lease;
        }
        Err(op.contended())
    }

    async fn get(&self, lease: &LeaseName) -> Result<Option<LeaseRecord>> {
        let op = Op::read("get", lease.as_str());
        let Some(entry) = self.client.get(op, self.keys.lease(lease)).await? else {
            return Ok(None);
        };
        let grant = self.grant_of(op, &entry)?;
        Ok(Some(self.observed(op, grant, entry.lease).await))
    }

    async fn list(&self, page: Page) -> Result<Listing<LeaseRecord>> {
        let op = Op::read("list", self.info.cluster.as_str());
        let limit = usize::from(page.limit());
        let mut range = self.keys.leases();
        if let Some(after) = &page.after {
            range = range.after(&self.keys.lease(after));
        }
        let one_more = i64::from(page.limit()) + 1;
        let (mut entries, _) = self.client.list(op, range, Some(one_more)).await?;
        let has_more = entries.len() > limit;
        entries.truncate(limit);
        let grants: Vec<(Grant, i64)> = entries
            .iter()
            .map(|entry| Ok((self.grant_of(op, entry)?, entry.lease)))
            .collect::<Result<_>>()?;
        let last = grants.last().filter(|_| has_more).map(|(grant, _)| grant.lease.clone());
        let next = last.map(|last| Page::after(last).with_limit(page.limit()));
        let lookups = grants.into_iter().map(|(grant, lease)| self.observed(op, grant, lease));
        let items = stream::iter(lookups).buffered(LOOKUPS_MAX).collect().await;
        Ok(Listing::new(items, next))
    }

    fn watch(&self, lease: &LeaseName) -> BoxStream<'static, Result<LeaseEvent>> {
        let topic = LeaseTopic { handle: self.clone(), lease: lease.clone() };
        subscribe(&self.client, lease.as_str(), topic)
    }
}

impl Handle {
    /// Takes a lease that is free, or the place of the record `over`: as a new grant, or under the
    /// term of the one that goes on.
    async fn take(
        &self,
        op: Op<'_>,
        request: &AcquireRequest,
        key: &str,
        over: Option<&Entry>,
        term: Option<Term>,
    ) -> Result<Tried> {
        let (lease, ttl) = self.granted(op, request.ttl).await?;
        let (name, holder) = (request.lease.clone(), request.holder.clone());
        let record = LeaseRecordV1::new(name, holder, term.map(Term::store_part), ttl);
        let put = Step::Put { key: key.to_owned(), value: record.encode()?, lease };
        let when = match over {
            None => Condition::Absent(key.to_owned()),
            Some(entry) => Condition::At(key.to_owned(), entry.modified),
        };
        let look = Step::Get(key.to_owned());
        let mut outcome = match self.client.transact(op, &[when], &[put], &[look]).await {
            Err(Problem::LeaseGone) => {
                return Ok(Tried::Changed(self.client.get(op, key.to_owned()).await?));
            }
            outcome => outcome?,
        };
        if !outcome.succeeded {
            self.client.discard(lease);
            return Ok(Tried::Changed(outcome.take(0)));
        }
        if let Some(over) = over {
            self.client.discard(over.lease);
        }
        let mark = Mark { modified: outcome.revision, lease };
        Ok(Tried::Answer(Acquire::Acquired(self.grant(op, record, mark)?)))
    }

    /// What comes of a try for a lease that is held.
    async fn contest(
        &self,
        op: Op<'_>,
        request: &AcquireRequest,
        key: &str,
        entry: &Entry,
    ) -> Result<Tried> {
        let held = self.grant_of(op, entry)?;
        if held.holder.attempt == request.holder.attempt {
            if held.ttl != self.info.guarantees.granted_ttl(request.ttl) {
                return self.take(op, request, key, Some(entry), Some(held.term)).await;
            }
            return Ok(match self.client.keep_alive(op, entry.lease).await? {
                Kept::Alive => Tried::Answer(Acquire::Acquired(held)),
                Kept::Gone => Tried::Changed(self.client.get(op, key.to_owned()).await?),
            });
        }
        let reclaims = request.reclaim == Reclaim::FormerProcessIsDead
            && held.holder.node == request.holder.node;
        if reclaims {
            return self.take(op, request, key, Some(entry), None).await;
        }
        Ok(Tried::Answer(Acquire::Held(self.observed(op, held, entry.lease).await)))
    }

    /// A new etcd lease, and the TTL that it has.
    pub(crate) async fn granted(&self, op: Op<'_>, asked: Ttl) -> Result<(i64, Ttl)> {
        let asked = self.info.guarantees.granted_ttl(asked);
        let (lease, seconds) = self.client.grant(op, asked.get().as_secs()).await?;
        Ok((lease, Ttl::from_secs(seconds)?))
    }

    /// A grant as others see it, with the time that it has still to live if that can be told.
    async fn observed(&self, op: Op<'_>, grant: Grant, lease: i64) -> LeaseRecord {
        let remaining = self.client.time_to_live(op, lease).await.ok();
        let ttl = grant.ttl.get();
        let remaining = remaining.map(|remaining| remaining.min(ttl));
        LeaseRecord::new(grant).with_may_expire_in(remaining)
    }

    /// The grant that a key shows.
    pub(crate) fn grant_of(&self, op: Op<'_>, entry: &Entry) -> Result<Grant> {
        let record = LeaseRecordV1::decode(&entry.value).map_err(|error| op.corrupt(error))?;
        if self.keys.lease(&record.lease) != entry.key {
            return Err(op.misplaced("key", &entry.key));
        }
        self.grant(op, record, entry.mark())
    }

    fn grant(&self, op: Op<'_>, record: LeaseRecordV1, mark: Mark) -> Result<Grant> {
        let counted = u64::try_from(mark.modified).ok();
        let origin = self.info.origin.clone();
        let grant = record.into_grant(self.era, counted, origin, mark.revision());
        grant.map_err(|error| op.corrupt(error))
    }
}

/// That a key holds the record of this grant and no other, as it was written first. A revision alone does not
/// say so much: a restored store counts anew, and uses it for another's.
fn held_by(key: &str, grant: &Grant, mark: Mark) -> Result<Vec<Condition>> {
    let (name, holder) = (grant.lease.clone(), grant.holder.clone());
    let record = LeaseRecordV1::new(name, holder, None, grant.ttl).encode()?;
    let counted = u64::try_from(mark.modified).ok();
    if counted != Some(grant.term.store_part()) {
        return Ok(Vec::new());
    }
    Ok(vec![
        Condition::At(key.to_owned(), mark.modified),
        Condition::Bound(key.to_owned(), mark.lease),
        Condition::Holds(key.to_owned(), record),
    ])
}

/// What came of one step towards a lease.
enum Tried {
    Answer(Acquire),
    /// Another process was faster; the key as it is now.
    Changed(Option<Entry>),
}

/// Leases that others held when this handle tried for them last.
#[derive(Clone, Debug, Default)]
pub(crate) struct Contested(Arc<Mutex<BTreeSet<LeaseName>>>);

impl Contested {
    fn contains(&self, lease: &LeaseName) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(lease)
    }

    fn learn(&self, lease: &LeaseName, outcome: &Acquire) {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !matches!(outcome, Acquire::Held(_)) {
            held.remove(lease);
            return;
        }
        if held.len() >= CONTESTED_MAX {
            held.pop_first();
        }
        held.insert(lease.clone());
    }
}

/// Whether both are one tenure. The era is the reader's own and says nothing.
fn is_same(one: &Grant, two: &Grant) -> bool {
    one.holder.attempt == two.holder.attempt && one.term.store_part() == two.term.store_part()
}

struct LeaseTopic {
    handle: Handle,
    lease: LeaseName,
}

impl Topic for LeaseTopic {
    type Event = LeaseEvent;

    fn range(&self) -> Range {
        Range::one(self.handle.keys.lease(&self.lease))
    }

    async fn snapshot(&mut self) -> Result<(LeaseEvent, i64), Problem> {
        let op = Op::read("watch", self.lease.as_str());
        let get = [Step::Get(self.handle.keys.lease(&self.lease))];
        let mut outcome = self.handle.client.read(op, &get).await?;
        let record = match outcome.take(0) {
            None => None,
            Some(entry) => {
                let grant = self.handle.grant_of(op, &entry)?;
                Some(self.handle.observed(op, grant, entry.lease).await)
            }
        };
        Ok((LeaseEvent::Snapshot(record), outcome.revision))
    }

    async fn changed(
        &mut self,
        batch: Batch,
        events: &mut VecDeque<LeaseEvent>,
    ) -> Result<(), Problem> {
        let op = Op::read("watch", self.lease.as_str());
        for change in batch {
            events.push_back(match change {
                Change::Put(entry) => {
                    LeaseEvent::Changed(LeaseRecord::new(self.handle.grant_of(op, &entry)?))
                }
                Change::Deleted { .. } => LeaseEvent::Vacant,
            });
        }
        Ok(())
    }
}
