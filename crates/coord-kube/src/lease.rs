//! Leases: one Lease object each, and every write of it conditional on the version that was read.
//!
//! The object outlives its holders, with the last term in an annotation, so that terms go on rising. A new
//! object begins with the API server's clock. Only its holder and its successor end a lease: each observer
//! judges for itself whether a holder is gone. A deleted object says nothing of the holder that was seen in it
//! last; that holder is waited for as if it had renewed just now.

use std::collections::VecDeque;
use std::time::Duration;

use async_trait::async_trait;
use coord_core::wire::{LeaseRecordV1, Record};
use coord_core::{
    Acquire, AcquireRequest, AttemptId, Era, Error, Grant, Holder, Incarnation, Lease, LeaseEvent,
    LeaseName, LeaseRecord, Listing, NODE_ID_BYTES_MAX, NodeId, Origin, Page, Reclaim, Release,
    Renew, Result, Standing, Term, Ttl,
};
use futures::stream::BoxStream;
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_128;

use crate::client::{List, Object, Resource, Selector, Topic, subscribe};
use crate::error::Op;
use crate::keys::{Kind, Mark, RECORD, TERM};
use crate::{Handle, RACES_MAX, Seen, pause};

/// For how long a holder counts that does not say it: another program's, that is.
const DURATION_MISSING: Duration = Duration::from_secs(60);
const MICROS: u64 = 1_000_000;

#[async_trait]
impl Lease for Handle {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Acquire> {
        let op = Op::write("try_acquire", request.lease.as_str()).for_ttl(request.ttl);
        let name = self.keys.lease(&request.lease);
        let ttl = self.info.guarantees.granted_ttl(request.ttl);
        for race in 0..RACES_MAX {
            pause(race).await;
            let asked = self.client.now();
            let found = self.client.get(op, Resource::Leases, &name).await?;
            let answered = self.client.now();
            let object = match found {
                Some(object) => object,
                None => {
                    if let Some((held, standing)) = self.leases.gone(&name, asked, answered)
                        && !may_follow(request, &held)
                    {
                        return Ok(Acquire::Held(record(held, standing)));
                    }
                    // The first term takes the clock of the API server, which answers with it.
                    let blank = Object::new(Resource::Leases, &self.keys, Kind::Lease, &name);
                    match self.client.create(op, Resource::Leases, &blank).await? {
                        Some(made) => made,
                        None => continue,
                    }
                }
            };
            let held = self.held(op, &request.lease, &object)?;
            let term = match held {
                None => {
                    if let Some((held, standing)) = self.leases.vacant(&object, asked, answered)
                        && !may_follow(request, &held)
                    {
                        return Ok(Acquire::Held(record(held, standing)));
                    }
                    self.next_term(op, &object)?
                }
                Some(held) => {
                    let standing = self.leases.observe_held(&object, &held, asked, answered);
                    let is_same = held.holder.attempt == request.holder.attempt;
                    // Not from another program, whose identity may look like a node's name.
                    let reclaims = may_follow(request, &held)
                        && object.spec()["holderIdentity"] == identity(&held.holder);
                    match (standing.is_expired(), is_same) {
                        (true, _) => self.next_term(op, &object)?,
                        (false, true) => held.term.store_part(),
                        (false, false) if reclaims => self.next_term(op, &object)?,
                        (false, false) => {
                            let held = record(held, standing);
                            return Ok(Acquire::Held(held.with_renewed_ago(renewed_ago(&object))));
                        }
                    }
                }
            };
            let written = self.acquired(op, object, request, term, ttl)?;
            if let Some(grant) = self.write_lease(op, &request.lease, &written).await? {
                return Ok(Acquire::Acquired(grant));
            }
        }
        Err(op.contended())
    }

    async fn renew(&self, grant: &Grant) -> Result<Renew> {
        let op = Op::write("renew", grant.lease.as_str()).within(grant.ttl);
        let name = self.keys.lease(&grant.lease);
        let mut known = self.leases.own(&name).filter(|object| is_of(object, grant));
        for race in 0..RACES_MAX {
            pause(race).await;
            let object = match known.take() {
                Some(object) => object,
                None => match self.current_lease(op, grant, &name).await? {
                    Ok(object) => object,
                    Err(other) => return Ok(Renew::Lost(other)),
                },
            };
            let mut written = object;
            written.set_spec("renewTime", later_than(written.spec().get("renewTime")));
            if let Some(grant) = self.write_lease(op, &grant.lease, &written).await? {
                return Ok(Renew::Renewed(grant));
            }
        }
        Err(op.contended())
    }

    async fn release(&self, grant: &Grant) -> Result<Release> {
        let op = Op::write("release", grant.lease.as_str()).for_ttl(grant.ttl);
        let name = self.keys.lease(&grant.lease);
        let mut known = self.leases.own(&name).filter(|object| is_of(object, grant));
        for race in 0..RACES_MAX {
            pause(race).await;
            let object = match known.take() {
                Some(object) => object,
                None => match self.current_lease(op, grant, &name).await? {
                    Ok(object) => object,
                    Err(_) => return Ok(Release::NotHeld),
                },
            };
            if self.client.replace(op, Resource::Leases, &released(object)).await?.is_some() {
                self.leases.forget(&name);
                return Ok(Release::Released);
            }
        }
        Err(op.contended())
    }

    async fn get(&self, lease: &LeaseName) -> Result<Option<LeaseRecord>> {
        let op = Op::read("get", lease.as_str());
        let name = self.keys.lease(lease);
        let asked = self.client.now();
        let Some(object) = self.client.get(op, Resource::Leases, &name).await? else {
            let gone = self.leases.gone(&name, asked, self.client.now());
            return Ok(gone.map(|(held, standing)| record(held, standing)));
        };
        self.lease_record(op, lease, &object, asked)
    }

    async fn list(&self, page: Page) -> Result<Listing<LeaseRecord>> {
        let op = Op::read("list", &self.info.target);
        let cluster = self.keys.cluster().to_owned();
        let selector = Selector::Kind { cluster, kind: Kind::Lease };
        let mut records = Vec::new();
        // A lease is one by its name: client-go writes none of our labels.
        for selector in [selector, Selector::Unlabelled] {
            let list = self.client.list(op, Resource::Leases, &selector).await?;
            for object in &list.objects {
                let Some(lease) = self.keys.lease_of(object.name()) else { continue };
                if page.after.as_ref().is_none_or(|after| lease > *after) {
                    records.extend(self.lease_record(op, &lease, object, list.asked)?);
                }
            }
        }
        records.sort_unstable_by(|one, two| one.lease.cmp(&two.lease));
        // It may have been labelled between the two.
        records.dedup_by(|one, two| one.lease == two.lease);
        let limit = usize::from(page.limit());
        let has_more = records.len() > limit;
        records.truncate(limit);
        let last = records.last().filter(|_| has_more);
        let next = last.map(|last| Page::after(last.lease.clone()).with_limit(page.limit()));
        Ok(Listing::new(records, next))
    }

    fn watch(&self, lease: &LeaseName) -> BoxStream<'static, Result<LeaseEvent>> {
        let topic = LeaseTopic {
            lease: lease.clone(),
            object: self.keys.lease(lease),
            era: self.config.era,
            origin: self.info.origin.clone(),
            seen: self.leases.clone(),
            shown: None,
        };
        let client = self.client.clone();
        let open = move || subscribe(&client, topic.lease.as_str(), topic.clone());
        self.lease_watches.read(lease, open)
    }
}

impl Handle {
    /// The object under which this grant holds its lease now, or the present holder instead.
    async fn current_lease(
        &self,
        op: Op<'_>,
        grant: &Grant,
        name: &str,
    ) -> Result<Result<Object, Option<LeaseRecord>>> {
        let asked = self.client.now();
        let Some(object) = self.client.get(op, Resource::Leases, name).await? else {
            // The caller learns of it, so no process holds it by this grant any more.
            self.leases.forget_held(name, grant);
            return Ok(Err(None));
        };
        let other = self.lease_record(op, &grant.lease, &object, asked)?;
        let is_same = other.as_ref().is_some_and(|held| held.fence() == grant.fence());
        if is_same {
            return Ok(Ok(object));
        }
        self.leases.disown(name);
        Ok(Err(other))
    }

    /// Writes a lease that this grant holds; none if another version is there.
    async fn write_lease(
        &self,
        op: Op<'_>,
        lease: &LeaseName,
        object: &Object,
    ) -> Result<Option<Grant>> {
        let written = self.client.replace(op, Resource::Leases, object).await?;
        let Some(written) = written else { return Ok(None) };
        let Some(grant) = self.held(op, lease, &written)? else {
            return Err(op.unclear("the API server answered with a lease that nobody holds"));
        };
        self.leases.wrote_held(&written, &grant, self.client.now());
        Ok(Some(grant))
    }

    /// The object as this attempt holds it.
    fn acquired(
        &self,
        op: Op<'_>,
        mut object: Object,
        request: &AcquireRequest,
        term: u64,
        ttl: Ttl,
    ) -> Result<Object> {
        let (lease, holder) = (request.lease.clone(), request.holder.clone());
        let is_new = object.annotation(TERM) != Some(term.to_string().as_str())
            || object.spec()["holderIdentity"] != identity(&holder);
        let stamp = later_than(object.spec().get("renewTime"));
        if is_new {
            let before = object.spec()["leaseTransitions"].as_i64();
            // The first holder is no transition.
            let count =
                before.map_or(0, |count| if count >= i64::from(i32::MAX) { 0 } else { count + 1 });
            object.set_spec("leaseTransitions", count);
            object.set_spec("acquireTime", stamp.clone());
        }
        object.set_spec("holderIdentity", identity(&holder));
        object.set_spec("leaseDurationSeconds", seconds(ttl));
        object.set_spec("renewTime", stamp);
        object.adopt(&self.keys, Kind::Lease);
        object.set_annotation(TERM, term.to_string());
        let record = LeaseRecordV1::new(lease, holder, Some(term), ttl).encode()?;
        let record = String::from_utf8(record.to_vec())
            .map_err(|source| op.damaged("a record is no text").with_source(source))?;
        object.set_annotation(RECORD, record);
        Ok(object)
    }

    /// A term above all that the lease had before.
    fn next_term(&self, op: Op<'_>, object: &Object) -> Result<u64> {
        let before = stored_term(op, object)?;
        let next = before.map_or_else(|| first_term(object), |before| before.saturating_add(1));
        let known = self.leases.term(object.name());
        Ok(next.max(known.map_or(0, |known| known.saturating_add(1))))
    }

    fn held(&self, op: Op<'_>, lease: &LeaseName, object: &Object) -> Result<Option<Grant>> {
        let held = held(op, lease, object, self.config.era, &self.info.origin)?;
        if let Some(held) = &held {
            self.leases.note_term(object.name(), held.term.store_part());
        }
        Ok(held)
    }

    /// The holder of a lease according to an object that was read then; none if it has expired.
    fn lease_record(
        &self,
        op: Op<'_>,
        lease: &LeaseName,
        object: &Object,
        asked: coord_core::Moment,
    ) -> Result<Option<LeaseRecord>> {
        let answered = self.client.now();
        let Some(held) = self.held(op, lease, object)? else {
            let vacant = self.leases.vacant(object, asked, answered);
            return Ok(vacant.map(|(held, standing)| record(held, standing)));
        };
        let standing = self.leases.observe_held(object, &held, asked, answered);
        let held = record(held, standing).with_renewed_ago(renewed_ago(object));
        Ok((!standing.is_expired()).then_some(held))
    }
}

/// Whether a request is not kept waiting by this holder, which is its own attempt or a former process
/// of its node that is known to be dead.
fn may_follow(request: &AcquireRequest, held: &Grant) -> bool {
    held.holder.attempt == request.holder.attempt
        || (request.reclaim == Reclaim::FormerProcessIsDead
            && held.holder.node == request.holder.node)
}

fn record(held: Grant, standing: Standing) -> LeaseRecord {
    LeaseRecord::new(held).with_may_expire_in(Some(standing.remaining))
}

/// For people: how long ago its holder says to have renewed it, by the API server's clock.
fn renewed_ago(object: &Object) -> Option<Duration> {
    let at: jiff::Timestamp = object.spec()["renewTime"].as_str()?.parse().ok()?;
    let seconds = object.read_at?.saturating_sub(at.as_second());
    Some(Duration::from_secs(u64::try_from(seconds).unwrap_or(0)))
}

/// Whether this is the object as this very grant wrote it last.
fn is_of(object: &Object, grant: &Grant) -> bool {
    let mark = Mark::of(&grant.revision, grant.holder.attempt.as_u128());
    mark.is_some_and(|mark| mark.version == object.version() && mark.uid == object.uid())
}

/// As client-go writes it when it lets go.
fn released(mut object: Object) -> Object {
    let stamp = later_than(object.spec().get("renewTime"));
    object.set_spec("holderIdentity", "");
    object.set_spec("leaseDurationSeconds", 1);
    object.set_spec("acquireTime", stamp.clone());
    object.set_spec("renewTime", stamp);
    object.remove_annotation(RECORD);
    object
}

/// The holder that a Lease names: the node for people, the attempt for all else.
fn identity(holder: &Holder) -> String {
    format!("{}_{}", holder.node, holder.attempt)
}

/// Whole seconds, as a Lease holds them.
pub(crate) fn seconds(ttl: Ttl) -> u64 {
    ttl.get().as_millis().div_ceil(1_000).try_into().unwrap_or(u64::MAX)
}

/// Now by this machine's wall clock, for people and for client-go's display; nothing is judged by
/// it. It is later than the one before, whatever the clock says: a heartbeat is seen by a value that
/// was not there before, and an observer that looks now and then sees not each of them.
pub(crate) fn later_than(before: Option<&Value>) -> String {
    later(jiff::Timestamp::now(), before)
}

fn later(now: jiff::Timestamp, before: Option<&Value>) -> String {
    let before: Option<jiff::Timestamp> =
        before.and_then(Value::as_str).and_then(|text| text.parse().ok());
    let step = jiff::Span::new().microseconds(1);
    // Where no time is later, the clock's own is another one at least.
    let least = before.and_then(|before| before.checked_add(step).ok());
    least.map_or(now, |least| now.max(least)).strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string()
}

/// The term of a lease that has none: the API server's clock in microseconds, of which it tells the
/// seconds; the rest comes from the version, which rises with every write to the store.
fn first_term(object: &Object) -> u64 {
    let clock = object.read_at.or_else(|| object.created_at()).unwrap_or(0);
    let seconds = u64::try_from(clock).unwrap_or(0);
    let version: u64 = object.version().parse().unwrap_or(0);
    seconds.saturating_mul(MICROS).saturating_add(version % MICROS)
}

fn stored_term(op: Op<'_>, object: &Object) -> Result<Option<u64>> {
    let Some(text) = object.annotation(TERM) else { return Ok(None) };
    let unreadable = |_| op.damaged(format!("annotation {TERM} is no number found={text:?}"));
    text.parse().map(Some).map_err(unreadable)
}

/// The holder of a lease according to its object, whether or not that has run out.
fn held(
    op: Op<'_>,
    lease: &LeaseName,
    object: &Object,
    era: Era,
    origin: &Origin,
) -> Result<Option<Grant>> {
    let spec = object.spec();
    let by = match spec["holderIdentity"].as_str() {
        None | Some("") => return Ok(None),
        Some(by) => by,
    };
    let term = Term::new(era, stored_term(op, object)?.unwrap_or(0)).map_err(|e| op.corrupt(e))?;
    let ours = match object.annotation(RECORD) {
        None => None,
        Some(text) => {
            let record = LeaseRecordV1::decode(text.as_bytes()).map_err(|e| op.corrupt(e))?;
            if record.lease != *lease {
                let why = format!("the record is that of another lease found={}", record.lease);
                return Err(Error::corrupt(op.name, why).resource(lease));
            }
            // Another program may have taken the lease since, and left the annotation as it was.
            Some(record.holder).filter(|holder| identity(holder) == by)
        }
    };
    let holder = ours.unwrap_or_else(|| foreign(by));
    let mark = Mark {
        version: object.version().to_owned(),
        uid: object.uid().to_owned(),
        whose: holder.attempt.as_u128(),
    };
    let (ttl, revision) = (duration(spec), mark.revision());
    Ok(Some(Grant::new(lease.clone(), holder, term, ttl, origin.clone(), revision)))
}

/// For how long a Lease's record counts.
fn duration(spec: &Value) -> Ttl {
    let seconds = spec["leaseDurationSeconds"].as_u64().filter(|seconds| *seconds > 0);
    let duration = seconds.map_or(DURATION_MISSING, Duration::from_secs);
    Ttl::new(duration.clamp(Ttl::MIN.get(), Ttl::MAX.get())).unwrap_or(Ttl::MAX)
}

/// A holder of another program, client-go's say: its identity as a node's name, as far as one may
/// hold it, and as ids that no attempt of ours has.
fn foreign(identity: &str) -> Holder {
    let id = xxh3_128(identity.as_bytes());
    let kept = |c: char| match c.to_ascii_lowercase() {
        c @ ('a'..='z' | '0'..='9') => c,
        _ => '-',
    };
    let name: String = identity.chars().map(kept).take(NODE_ID_BYTES_MAX).collect();
    let node = NodeId::new(name.trim_matches('-')).or_else(|_| NodeId::new(format!("{id:032x}")));
    let node = node.unwrap_or_else(|_| unreachable!("hexadecimal digits make a name"));
    Holder::new(node, Incarnation::from_u128(id), AttemptId::from_u128(id))
}

#[derive(Clone)]
struct LeaseTopic {
    lease: LeaseName,
    object: String,
    era: Era,
    origin: Origin,
    seen: Seen,
    shown: Option<LeaseRecord>,
}

impl LeaseTopic {
    fn take(
        &mut self,
        object: Option<&Object>,
        asked: coord_core::Moment,
        answered: coord_core::Moment,
        events: &mut VecDeque<LeaseEvent>,
    ) -> Result<()> {
        let op = Op::read("watch", self.lease.as_str());
        let held = match object {
            Some(object) => held(op, &self.lease, object, self.era, &self.origin)?,
            None => None,
        };
        let now = match (object, held) {
            (Some(object), Some(held)) => {
                let standing = self.seen.observe_held(object, &held, asked, answered);
                (!standing.is_expired()).then_some((held, standing))
            }
            (Some(object), None) => self.seen.vacant(object, asked, answered),
            (None, _) => self.seen.gone(&self.object, asked, answered),
        };
        let now = now.map(|(held, standing)| record(held, standing));
        let is_same = match (&self.shown, &now) {
            (None, None) => true,
            (Some(shown), Some(now)) => shown.fence() == now.fence() && shown.ttl == now.ttl,
            _ => false,
        };
        self.shown.clone_from(&now);
        if !is_same {
            events.push_back(now.map_or(LeaseEvent::Vacant, LeaseEvent::Changed));
        }
        Ok(())
    }
}

impl Topic for LeaseTopic {
    type Event = LeaseEvent;

    fn selector(&self) -> (Resource, Selector) {
        (Resource::Leases, Selector::Name(self.object.clone()))
    }

    async fn all(&mut self, list: List, events: &mut VecDeque<LeaseEvent>) -> Result<()> {
        let (asked, answered) = (list.asked, list.answered);
        self.take(list.objects.first(), asked, answered, events)
    }

    async fn one(
        &mut self,
        object: Object,
        is_deleted: bool,
        events: &mut VecDeque<LeaseEvent>,
    ) -> Result<()> {
        let now = self.seen.now();
        self.take(Some(&object).filter(|_| !is_deleted), now, now, events)
    }

    fn snapshot(&mut self) -> LeaseEvent {
        let left = self.due();
        LeaseEvent::Snapshot(self.shown.clone().map(|shown| shown.with_may_expire_in(left)))
    }

    fn due(&self) -> Option<Duration> {
        self.shown.as_ref()?;
        self.seen.remaining(&self.object)
    }
}

#[cfg(test)]
mod tests {
    use coord_core::ErrorKind;
    use serde_json::json;

    use super::*;

    fn object(spec: Value, annotations: Value) -> Object {
        let metadata = json!({
            "name": "coord.orders.lease.jobs", "uid": "u", "resourceVersion": "1234567",
            "creationTimestamp": "2026-11-29T20:40:00Z", "annotations": annotations,
        });
        Object::parse(json!({ "metadata": metadata, "spec": spec }), Some(1_800_000_000))
            .expect("an object")
    }

    fn seen(spec: Value, annotations: Value) -> Result<Option<Grant>> {
        let lease = LeaseName::new("jobs").expect("name");
        let (op, origin) = (Op::read("get", "jobs"), Origin::new("kube:u/orders"));
        held(op, &lease, &object(spec, annotations), Era::default(), &origin)
    }

    #[test]
    fn client_go_is_understood() {
        // As `LeaderElectionRecordToLeaseSpec` writes it, in use and released.
        let spec = json!({
            "holderIdentity": "ip-10-0-0-1.ec2_7B9f", "leaseDurationSeconds": 15,
            "acquireTime": "2026-11-29T20:40:00.000000Z",
            "renewTime": "2026-11-29T20:40:02.000000Z", "leaseTransitions": 3,
        });
        let grant = seen(spec.clone(), json!({ TERM: "41" })).expect("readable").expect("held");
        assert_eq!(grant.holder.node.as_str(), "ip-10-0-0-1-ec2-7b9f");
        assert_eq!((grant.ttl.get(), grant.term.get()), (Duration::from_secs(15), 41));
        let again = seen(spec, json!({})).expect("readable").expect("held");
        assert_eq!(again.holder, grant.holder, "the same identity is the same holder");
        for spec in [
            json!({ "holderIdentity": "", "leaseDurationSeconds": 1, "leaseTransitions": 3 }),
            json!({}),
            Value::Null,
        ] {
            assert_eq!(seen(spec, Value::Null).expect("readable"), None);
        }
    }

    #[test]
    fn a_record_says_when_it_was_renewed() {
        let ago = |at: Value| renewed_ago(&object(json!({ "renewTime": at }), Value::Null));
        // The server's clock shows 2027-01-15T08:00:00Z.
        assert_eq!(ago("2027-01-15T07:59:40.250000Z".into()), Some(Duration::from_secs(20)));
        assert_eq!(ago("2031-01-01T00:00:00Z".into()), Some(Duration::ZERO));
        assert_eq!((ago("odd".into()), ago(Value::Null)), (None, None));
    }

    #[test]
    fn what_is_missing_or_odd_counts_as_held() {
        for (spec, ttl) in [
            (json!({ "holderIdentity": "???" }), DURATION_MISSING),
            (json!({ "holderIdentity": "a", "leaseDurationSeconds": 0 }), DURATION_MISSING),
            (json!({ "holderIdentity": "a", "leaseDurationSeconds": "x" }), DURATION_MISSING),
            (
                json!({ "holderIdentity": "a", "leaseDurationSeconds": 900_000, "renewTime": "x" }),
                Ttl::MAX.get(),
            ),
        ] {
            let grant = seen(spec, Value::Null).expect("readable").expect("held");
            assert_eq!(grant.ttl.get(), ttl, "{grant:?}");
        }
    }

    #[test]
    fn a_record_that_another_program_left_is_not_the_holder() {
        let holder = Holder::new(
            NodeId::new("web-1").expect("name"),
            Incarnation::from_u128(1),
            AttemptId::from_u128(2),
        );
        let record = |lease: &str| {
            let lease = LeaseName::new(lease).expect("name");
            let ttl = Ttl::from_secs(9).expect("ttl");
            let record = LeaseRecordV1::new(lease, holder.clone(), Some(7), ttl);
            String::from_utf8(record.encode().expect("encodes").to_vec()).expect("text")
        };
        let notes = json!({ TERM: "7", RECORD: record("jobs") });
        let spec = |by: String| json!({ "holderIdentity": by, "leaseDurationSeconds": 9 });
        let ours = seen(spec(identity(&holder)), notes.clone()).expect("readable").expect("held");
        assert_eq!((ours.holder.clone(), ours.term.get()), (holder.clone(), 7));
        let theirs = seen(spec("web-1_x".to_owned()), notes).expect("readable").expect("held");
        assert_ne!(theirs.holder.attempt, holder.attempt);
        for (odd, part) in [
            (json!({ RECORD: record("other") }), "another lease"),
            (json!({ RECORD: "{}" }), "no lease record"),
            (json!({ TERM: "many" }), "no number"),
            (json!({ TERM: (1_u64 << 52).to_string() }), "2^52"),
        ] {
            let error = seen(spec(identity(&holder)), odd).expect_err(part);
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            assert!(error.to_string().contains(part), "{error}");
        }
    }

    #[test]
    fn a_first_term_is_the_servers_clock() {
        let mut fresh = object(Value::Null, Value::Null);
        assert_eq!(first_term(&fresh), 1_800_000_000_234_567);
        fresh.read_at = None;
        assert_eq!(first_term(&fresh), 1_795_984_800_234_567);
        assert!(first_term(&fresh) < 1 << 52);
    }

    #[test]
    fn a_stamp_was_not_there_before() {
        let text = |stamp: &str| Value::String(stamp.to_owned());
        let now: jiff::Timestamp = "2026-11-29T20:40:00.5Z".parse().expect("a time");
        // A clock that stands still, and one that was ahead before.
        for before in ["2026-11-29T20:40:00.500000Z", "2031-01-01T00:00:00.123456789+02:00"] {
            let mut stamps = vec![before.parse::<jiff::Timestamp>().expect("a time")];
            let mut last = text(before);
            for _ in 0..4 {
                last = text(&later(now, Some(&last)));
                stamps.push(last.as_str().expect("text").parse().expect("a time"));
            }
            assert!(stamps.is_sorted_by(|one, two| one < two), "{stamps:?}");
        }
        let plain = "2026-11-29T20:40:00.500000Z";
        for before in ["2026-11-29T20:39:59.999999Z", "9999-12-30T22:00:00.999999999Z", "odd"] {
            assert_eq!(later(now, Some(&text(before))), plain);
        }
        assert_eq!(later(now, None), plain);
    }
}
