//! Which status each node has, from what is seen of it and what is to be remembered. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use coord_core::{
    Capacity, Declared, Incarnation, Moment, NodeEntry, NodeId, NodeInfo, NodeRecord, NodeStatus,
    Revision, ShardMap,
};

use super::rules::Rules;
use crate::invariants::Hosting;
use crate::member_view::{Absence, MayRun, Presence, View};
use crate::record::{ClusterRecord, Failure, NodeNote};

/// From this many members on, the mass failure brake applies.
const BRAKE_MEMBERS_MIN: usize = 5;
/// After so many TTLs without a heartbeat a node is evicted, whatever the store's clock says of it.
const SILENT_TTLS: u32 = 2;
/// After so many node TTLs a suspended node is given up.
const SUSPENDED_TTLS: u32 = 3;

/// One node, as the leader holds it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Seat {
    pub(crate) entry: NodeEntry,
    pub(crate) capacity: Capacity,
    /// It is draining because it leaves.
    pub(crate) leaving: bool,
    /// It was declared failed and may still run for a while.
    pub(crate) runs_on: bool,
    /// It is absent and not given up: it keeps what it has, takes nothing new, and nothing is moved away.
    pub(crate) frozen: bool,
}

/// All nodes, as the leader holds them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Roster(pub(crate) BTreeMap<NodeId, Seat>);

/// A node whose registration has to be evicted: it was declared failed, or fell silent and counts as
/// failed afterwards.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PendingEviction {
    pub(crate) node: NodeId,
    pub(crate) incarnation: Incarnation,
    pub(crate) revision: Revision,
}

impl PendingEviction {
    pub(crate) fn of(record: &NodeRecord) -> Self {
        Self {
            node: record.info.id.clone(),
            incarnation: record.info.incarnation,
            revision: record.revision.clone(),
        }
    }
}

/// What the leader's own clock has measured of nodes; a new leader begins anew.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timers {
    /// Until when incarnations that were declared failed may run.
    pub(crate) runs_on: BTreeMap<(NodeId, Incarnation), Moment>,
    /// Runs that this very leader has downed, so that no other can have evicted them, and until when each
    /// is left to go by itself; none once it may have been evicted, for then its absence says nothing.
    pub(crate) downed: BTreeMap<(NodeId, Incarnation), Option<Moment>>,
    /// Since when an incarnation has been failed.
    failed_since: BTreeMap<(NodeId, Incarnation), Moment>,
    /// Which incarnations vanished lately, and when.
    vanished: BTreeMap<(NodeId, Incarnation), Moment>,
    /// How many members there are to compare them with, once that was asked for.
    members: Option<usize>,
    /// Since when incarnations have been suspended.
    suspended: BTreeMap<(NodeId, Incarnation), Moment>,
    /// Runs that an eviction found alive although the watch had not shown them for long: when, and at which
    /// revision, which the next eviction has to name.
    alive: BTreeMap<(NodeId, Incarnation), (Moment, Revision)>,
    /// Until when incarnations are waited for that don't report which nodes they reach.
    joins: BTreeMap<(NodeId, Incarnation), Moment>,
    /// Which nodes failed lately.
    flaps: BTreeMap<NodeId, Flap>,
}

/// How a node has failed, again and again.
#[derive(Clone, Debug)]
struct Flap {
    /// How often, each time soon after the last.
    times: u32,
    last: (Incarnation, Moment),
    /// Until when its present incarnation is not admitted.
    hold: Option<(Incarnation, Moment)>,
}

/// Whether the incarnation of a node that a map names may still host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostingState {
    /// It is there, and reports what it stops.
    Reporting,
    /// It may still host, and reports nothing: until this moment, where that is known.
    MayStillRun(Option<Moment>),
    /// It hosts nothing any more.
    Stopped,
}

/// The roster, and what follows from finding it.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) roster: Roster,
    /// What is to be remembered from now on.
    pub(crate) record: ClusterRecord,
    pub(crate) pending_evictions: Vec<PendingEviction>,
    /// Incarnations that count as failed from now on because their registration ran out, and since when it was
    /// out.
    pub(crate) crashed: Vec<(NodeId, Incarnation, Moment)>,
    /// When it may come out differently although nothing was heard.
    pub(crate) wake: Option<Moment>,
}

/// What the roster is taken from.
pub(crate) struct Sources<'a> {
    /// The leader.
    pub(crate) me: &'a NodeId,
    pub(crate) rules: &'a Rules,
    pub(crate) view: &'a View,
    /// `_cluster` as it was last read or published.
    pub(crate) cluster: &'a ShardMap,
    /// What `cluster` remembers.
    pub(crate) published: &'a ClusterRecord,
    /// The nodes that the maps name as hosts, where `cluster` has lost its members.
    pub(crate) hosts: &'a [NodeEntry],
    /// What is remembered now, published or not.
    pub(crate) record: &'a ClusterRecord,
    /// Whether a node still owns a shard.
    pub(crate) owns: &'a dyn Fn(&NodeId) -> bool,
}

impl Sources<'_> {
    /// The nodes that were listed before.
    fn known(&self) -> BTreeMap<&NodeId, &NodeEntry> {
        let known = self.hosts.iter().chain(self.cluster.nodes().iter().flatten());
        known.map(|entry| (&entry.id, entry)).collect()
    }
}

/// Finds each node's status.
pub(crate) fn take(sources: &Sources<'_>, timers: &mut Timers, now: Moment) -> Taken {
    let mut taken = Taken {
        roster: Roster::default(),
        record: sources.record.clone(),
        pending_evictions: Vec::new(),
        crashed: Vec::new(),
        wake: None,
    };
    timers.begin(sources, now);
    let known = sources.known();
    for record in sources.view.present() {
        taken.take_present(sources, record, known.get(&record.info.id).copied(), timers, now);
    }
    for (id, entry) in &known {
        if !taken.roster.0.contains_key(*id) {
            taken.take_absent(sources, entry, timers, now);
        }
    }
    taken.forget(sources, &known, timers, now);
    taken
}

/// Whether an incarnation that a map names may still host, by what is seen and remembered.
pub(crate) fn tenancy(
    sources: &Sources<'_>,
    timers: &Timers,
    (node, run): (&NodeId, Incarnation),
    now: Moment,
) -> HostingState {
    let note = sources.record.nodes.get(node);
    let failed = note.and_then(|note| note.failed.as_ref());
    let failed = failed.filter(|failed| failed.incarnation == run);
    let by_itself = failed.is_some_and(|failed| timers.goes_by_itself(node, failed));
    let lingers = failed.is_some_and(|failed| failed.runs_on.is_some() && !by_itself)
        || note.is_some_and(|note| note.former.contains_key(&run));
    if lingers {
        let until = timers.runs_on.get(&(node.clone(), run)).copied();
        // One that is seen again after its time tells no moment by which it ends.
        return HostingState::MayStillRun(until.filter(|until| *until > now));
    }
    if note.is_some_and(|note| note.suspended == Some(run)) {
        return HostingState::MayStillRun(None);
    }
    match sources.view.may_run(node, run, sources.rules.node_ttl) {
        // Its reports don't count once it is declared failed.
        MayRun::Registered if failed.is_some() => HostingState::MayStillRun(None),
        MayRun::Registered => HostingState::Reporting,
        MayRun::Until(until) if until > now => HostingState::MayStillRun(Some(until)),
        MayRun::Until(_) => {
            // Where observers judge, the registration is still there until it is evicted.
            let presence = sources.view.presence(node);
            let unjudged = sources.rules.judging.evict
                && failed.is_none()
                && matches!(presence, Some(Presence::Absent { record, how: Absence::Expired, .. })
                    if record.info.incarnation == run);
            if unjudged { HostingState::MayStillRun(None) } else { HostingState::Stopped }
        }
    }
}

impl Taken {
    fn take_present(
        &mut self,
        sources: &Sources<'_>,
        seen: &NodeRecord,
        known: Option<&NodeEntry>,
        timers: &mut Timers,
        now: Moment,
    ) {
        let info = &seen.info;
        self.record.renote(&info.id, |note| {
            // A note about an older incarnation says nothing of this one; but the older one may still run.
            let failed = note.failed.take_if(|failed| failed.incarnation != info.incarnation);
            if let Some(Failure { incarnation, runs_on: Some(ttl), .. }) = failed {
                note.former.insert(incarnation, ttl);
            }
            note.former.retain(|run, _| !info.ended.contains(run));
            if note.leaving.take_if(|leaving| *leaving != info.incarnation).is_some() {
                note.forced = false;
            }
            note.suspended = None;
        });
        self.take_silent(sources, seen, known, timers, now);
        if let Some((run, until)) = known.and_then(|known| replaced(sources, seen, known, now)) {
            // The next leader may find it in no map: a table can be deleted meanwhile.
            timers.runs_on.insert((info.id.clone(), run), until);
            self.record.note(&info.id, |note| {
                note.former.insert(run, seen.ttl);
            });
        }
        let note = self.record.nodes.get(&info.id).cloned().unwrap_or_default();
        let member = known
            .is_some_and(|known| known.incarnation == info.incarnation && known.status.may_host());
        let hold = timers.flaps.get_mut(&info.id).filter(|_| !member);
        let hold = hold.and_then(|flap| flap.hold(info.incarnation, sources.rules, now));
        let status = if let Some(failed) = &note.failed {
            match timers.leave_alone(failed, seen, now) {
                Some(until) => self.wake_at(until),
                None => self.pending_evictions.push(PendingEviction::of(seen)),
            }
            NodeStatus::Failed
        } else if !seen.judged && known.is_none() {
            NodeStatus::Discovered
        } else if let Some(until) = hold {
            self.wake_at(until);
            NodeStatus::Discovered
        } else if !member && !self.is_reached(sources, info, timers, now) {
            NodeStatus::Discovered
        } else if info.declared == Declared::Draining || note.drain || note.leaving.is_some() {
            NodeStatus::Draining
        } else {
            NodeStatus::Active
        };
        let since = known.filter(|known| known.incarnation == info.incarnation);
        let since = since.and_then(|known| known.since);
        let counts = status.may_host().then(|| sources.cluster.version().next());
        let entry = NodeEntry::new(info.id.clone(), info.incarnation, info.address.clone(), status)
            .with_zone(info.zone.clone())
            .with_since(since.or(counts));
        self.seat(entry, info.capacity, &note, false);
    }

    /// A node whose heartbeats would show, and that was not heard for several TTLs, is evicted: the store's
    /// clock may have jumped and come back. The eviction shows whether the node lives all the same.
    fn take_silent(
        &mut self,
        sources: &Sources<'_>,
        seen: &NodeRecord,
        known: Option<&NodeEntry>,
        timers: &mut Timers,
        now: Moment,
    ) {
        let info = &seen.info;
        let run = (info.id.clone(), info.incarnation);
        let failed = self.record.nodes.get(&info.id).is_some_and(|note| note.failed.is_some());
        let heard = sources.view.beat(&info.id, sources.rules.judging);
        let Some(heard) = heard.filter(|_| !failed && info.id != *sources.me) else { return };
        let mut suspect = PendingEviction::of(seen);
        let mut heard = heard;
        if let Some((at, revision)) = timers.alive.get(&run).filter(|(at, _)| *at > heard) {
            (heard, suspect.revision) = (*at, revision.clone());
        }
        let after = |ttls: u32| heard.plus(seen.ttl.get().saturating_mul(ttls));
        let (until, given_up) = (after(SILENT_TTLS), after(SILENT_TTLS + SUSPENDED_TTLS));
        let known = known.filter(|known| known.incarnation == info.incarnation);
        if until > now {
            self.wake_at(until);
        } else if given_up > now && known.is_some_and(|known| timers.brake(sources, known, now)) {
            self.wake_at(given_up);
        } else {
            self.pending_evictions.push(suspect);
        }
    }

    /// Whether an incarnation that joins and the leader reach each other, where the leader reports which nodes
    /// it reaches. If they don't, it would be downed soon, and its shards would move twice. An incarnation that
    /// reports nothing is waited for: it may not know yet, or never report.
    fn is_reached(
        &mut self,
        sources: &Sources<'_>,
        joins: &NodeInfo,
        timers: &mut Timers,
        now: Moment,
    ) -> bool {
        let me = sources.view.record(sources.me);
        let missed = me.and_then(|me| me.info.unreachable.as_ref());
        let Some(missed) = missed.filter(|_| joins.id != *sources.me) else { return true };
        if let Some(row) = &joins.unreachable {
            return !row.contains(sources.me) && !missed.contains(&joins.id);
        }
        let ttl = sources.rules.node_ttl;
        let until = until(&mut timers.joins, &joins.id, joins.incarnation, ttl, now);
        if until > now {
            self.wake_at(until);
        }
        until <= now
    }

    fn take_absent(
        &mut self,
        sources: &Sources<'_>,
        known: &NodeEntry,
        timers: &mut Timers,
        now: Moment,
    ) {
        let note = self.record.nodes.get(&known.id).cloned().unwrap_or_default();
        let presence = sources.view.presence(&known.id);
        let (how, counts_from, capacity) = match presence {
            Some(Presence::Absent { record, how, counts_from }) => {
                (*how, Some(*counts_from), record.info.capacity)
            }
            _ => {
                let from = sources.view.unseen_counts_from(sources.rules.node_ttl);
                (Absence::Expired, from, Capacity::default())
            }
        };
        let mut entry = known.clone();
        if note.failed.is_some() || entry.status == NodeStatus::Failed {
            entry.status = NodeStatus::Failed;
            self.keep_failed(sources, entry, capacity, timers, now);
            return;
        }
        // Where observers judge, one that fell silent has to be evicted, also while it was leaving. One that a
        // new leader does not find at all has deregistered.
        let silent = sources.rules.judging.evict && presence.is_some();
        let leaves = note.leaving.is_some() && !silent;
        if how == Absence::Left || leaves {
            self.drop_note(&known.id);
            return;
        }
        let grace = sources.rules.restart_grace;
        let verdict = counts_from.map(|from| from.plus(grace)).filter(|verdict| *verdict > now);
        let suspended = note.suspended == Some(known.incarnation);
        let release = suspended.then(|| timers.suspend(known, sources.rules, now));
        if let Some(verdict) = verdict {
            self.wake_at(verdict);
        } else if suspended && sources.view.is_away() {
            // It may be back unseen. What is seen when the store is back decides.
        } else if let Some(release) = release.filter(|release| *release > now) {
            self.wake_at(release);
        } else if !suspended && timers.brake(sources, known, now) {
            self.record.note(&known.id, |note| note.suspended = Some(known.incarnation));
            self.wake_at(timers.suspend(known, sources.rules, now));
        } else if sources.rules.judging.evict
            && let Some(Presence::Absent { record, .. }) = presence
        {
            self.pending_evictions.push(PendingEviction::of(record));
        } else {
            // What vanished with too many others is no evidence against its shards.
            if let Some(from) = counts_from.filter(|_| !suspended) {
                self.crashed.push((known.id.clone(), known.incarnation, from));
            }
            let failure = Failure::ran_out(known.incarnation);
            self.record.note(&known.id, |note| {
                note.failed = Some(failure);
                note.suspended = None;
            });
            entry.status = NodeStatus::Failed;
            self.keep_failed(sources, entry, capacity, timers, now);
            return;
        }
        self.seat(entry, capacity, &note, true);
    }

    /// A failed node stays listed until it is forgotten.
    fn keep_failed(
        &mut self,
        sources: &Sources<'_>,
        entry: NodeEntry,
        capacity: Capacity,
        timers: &mut Timers,
        now: Moment,
    ) {
        let run = (entry.id.clone(), entry.incarnation);
        let since = *timers.failed_since.entry(run).or_insert(now);
        let forget_at = since.plus(sources.rules.remove_after);
        if forget_at <= now && !(sources.owns)(&entry.id) {
            self.drop_note(&entry.id);
            return;
        }
        if forget_at > now {
            self.wake_at(forget_at);
        }
        let failed = self.record.nodes.get(&entry.id).and_then(|note| note.failed.clone());
        let by_itself = failed.as_ref().is_some_and(|f| timers.goes_by_itself(&entry.id, f));
        if let Some(ttl) = failed.and_then(|failed| failed.runs_on) {
            let (id, run) = (&entry.id, entry.incarnation);
            let until = match sources.view.may_run(id, run, sources.rules.node_ttl) {
                // It went by itself, so what is seen of it counts.
                MayRun::Until(until) if by_itself => until,
                _ => until(&mut timers.runs_on, id, run, ttl.get(), now),
            };
            if until > now {
                self.wake_at(until);
            } else {
                self.record.note(&entry.id, |note| {
                    if let Some(failed) = &mut note.failed {
                        failed.runs_on = None;
                    }
                });
            }
        }
        let note = self.record.nodes.get(&entry.id).cloned().unwrap_or_default();
        self.seat(entry, capacity, &note, false);
    }

    /// Forgets the notes about a node, except those of incarnations that may still run.
    fn drop_note(&mut self, node: &NodeId) {
        self.record.note(node, |note| {
            *note = NodeNote { former: std::mem::take(&mut note.former), ..NodeNote::default() };
        });
    }

    fn seat(&mut self, entry: NodeEntry, capacity: Capacity, note: &NodeNote, frozen: bool) {
        let seat = Seat {
            frozen,
            capacity,
            leaving: note.leaving.is_some(),
            runs_on: note.failed.as_ref().is_some_and(|failed| failed.runs_on.is_some()),
            entry,
        };
        self.roster.0.insert(seat.entry.id.clone(), seat);
    }

    /// Drops what belongs to nodes that are not listed any more, and the time of incarnations that is up. This
    /// roster may never be published, so the time of an incarnation that `_cluster` still shows continues.
    fn forget(
        &mut self,
        sources: &Sources<'_>,
        known: &BTreeMap<&NodeId, &NodeEntry>,
        timers: &mut Timers,
        now: Moment,
    ) {
        let roster = &self.roster.0;
        let entries = |(id, run): &(NodeId, Incarnation)| {
            let entries = roster.get(id).map(|seat| &seat.entry).into_iter();
            let run = *run;
            entries.chain(known.get(id).copied()).filter(move |entry| entry.incarnation == run)
        };
        let listed = |run: &(NodeId, Incarnation)| entries(run).next().is_some();
        let failed = |run: &(NodeId, Incarnation)| {
            entries(run).any(|entry| entry.status == NodeStatus::Failed)
        };
        let runs_on = |(id, run): &(NodeId, Incarnation)| {
            let note = sources.published.nodes.get(id);
            note.is_some_and(|note| {
                let failed = note.failed.as_ref().map(|failed| failed.incarnation);
                failed == Some(*run) || note.former.contains_key(run)
            })
        };
        let mut wake = None;
        for (id, note) in &mut self.record.nodes {
            note.former.retain(|run, ttl| {
                let until = until(&mut timers.runs_on, id, *run, ttl.get(), now);
                if until > now {
                    wake = Some(wake.map_or(until, |wake: Moment| wake.min(until)));
                }
                until > now
            });
        }
        timers.downed.retain(|run, _| listed(run));
        timers.failed_since.retain(|run, _| failed(run));
        timers.alive.retain(|run, _| listed(run));
        let notes = &self.record.nodes;
        timers
            .suspended
            .retain(|(id, run), _| notes.get(id).is_some_and(|note| note.suspended == Some(*run)));
        timers.joins.retain(|run, _| listed(run));
        timers.runs_on.retain(|run, until| *until > now || failed(run) || runs_on(run));
        let ttl = sources.rules.node_ttl;
        timers.vanished.retain(|_, at| at.plus(ttl) > now);
        timers.flaps.retain(|_, flap| flap.last.1.plus(sources.rules.remove_after) > now);
        // Notes of nodes that have been absent for as long as the cluster remembers them.
        self.record.nodes.retain(|id, note| {
            !note.is_empty()
                && (roster.contains_key(id)
                    || !note.former.is_empty()
                    || (note.drain && sources.view.presence(id).is_some()))
        });
        if let Some(wake) = wake {
            self.wake_at(wake);
        }
    }

    fn wake_at(&mut self, moment: Moment) {
        self.wake = Some(self.wake.map_or(moment, |wake| wake.min(moment)));
    }
}

/// The incarnation that this one of its node has replaced without confirming that it stopped, and until when it
/// may run.
fn replaced(
    sources: &Sources<'_>,
    seen: &NodeRecord,
    known: &NodeEntry,
    now: Moment,
) -> Option<(Incarnation, Moment)> {
    let (id, run) = (&seen.info.id, known.incarnation);
    if run == seen.info.incarnation || !known.status.may_host() || seen.info.ended.contains(&run) {
        return None;
    }
    match sources.view.may_run(id, run, sources.rules.node_ttl) {
        MayRun::Until(until) if until > now => Some((run, until)),
        _ => None,
    }
}

/// This long after this incarnation of the node was first found so.
fn until(
    timers: &mut BTreeMap<(NodeId, Incarnation), Moment>,
    node: &NodeId,
    run: Incarnation,
    after: Duration,
    now: Moment,
) -> Moment {
    *timers.entry((node.clone(), run)).or_insert(now.plus(after))
}

impl Timers {
    /// The roster is about to be taken anew.
    fn begin(&mut self, sources: &Sources<'_>, now: Moment) {
        let ttl = sources.rules.node_ttl;
        self.vanished.retain(|_, at| at.plus(ttl) > now);
        self.members = None;
    }

    /// Until when an incarnation that was downed is left to shut down by itself, which is faster for all than
    /// an eviction: a node that deregisters hosts nothing any more, and a node that died expires within one
    /// TTL. One that is still registered after that does not obey, and is evicted.
    fn leave_alone(&mut self, failed: &Failure, seen: &NodeRecord, now: Moment) -> Option<Moment> {
        let run = (seen.info.id.clone(), failed.incarnation);
        let until = self.downed.get_mut(&run).filter(|_| failed.downed)?;
        *until = until.filter(|until| *until > now);
        *until
    }

    /// Whether a failed incarnation ended by itself.
    fn goes_by_itself(&self, node: &NodeId, failed: &Failure) -> bool {
        let until = self.downed.get(&(node.clone(), failed.incarnation));
        failed.downed && until.is_some_and(Option::is_some)
    }

    /// Whether this incarnation must not be given up, because too many have vanished lately: a failed store or
    /// network looks the same.
    fn brake(&mut self, sources: &Sources<'_>, run: &NodeEntry, now: Moment) -> bool {
        let key = (run.id.clone(), run.incarnation);
        let others = self.vanished.len() - usize::from(self.vanished.contains_key(&key));
        // All that vanish now are among them, since they are members.
        let members = *self.members.get_or_insert_with(|| {
            let gone = |entry: &NodeEntry| {
                self.vanished.contains_key(&(entry.id.clone(), entry.incarnation))
            };
            let known = sources.known();
            known.values().filter(|entry| entry.status.may_host() || gone(entry)).count()
        });
        #[expect(clippy::cast_precision_loss, reason = "both are far below 2^52")]
        let too_many = (others + 1) as f64 > sources.rules.brake * members as f64;
        if members >= BRAKE_MEMBERS_MIN && too_many {
            return true;
        }
        if self.vanished.insert(key, now).is_none() {
            self.flap(run, sources.rules, now);
        }
        false
    }

    /// An eviction found an incarnation alive, at this revision: it has not vanished.
    pub(crate) fn found_alive(
        &mut self,
        node: &NodeId,
        run: Incarnation,
        revision: &Revision,
        now: Moment,
    ) {
        let key = (node.clone(), run);
        if self.vanished.remove(&key).is_some()
            && let Some(flap) = self.flaps.get_mut(node).filter(|flap| flap.last.0 == run)
        {
            flap.times = flap.times.saturating_sub(1);
        }
        self.alive.insert(key, (now, revision.clone()));
    }

    /// An incarnation is suspended. Returns until when, if nothing is heard of it before.
    fn suspend(&mut self, run: &NodeEntry, rules: &Rules, now: Moment) -> Moment {
        let since = self.suspended.entry((run.id.clone(), run.incarnation)).or_insert(now);
        since.plus(rules.node_ttl.saturating_mul(SUSPENDED_TTLS))
    }

    /// A node failed, maybe not for the first time.
    fn flap(&mut self, run: &NodeEntry, rules: &Rules, now: Moment) {
        let last = (run.incarnation, now);
        let flap = self.flaps.entry(run.id.clone()).or_insert(Flap { times: 0, last, hold: None });
        let soon = flap.last.1.plus(rules.remove_after) > now;
        flap.times = if soon { flap.times.saturating_add(1) } else { 1 };
        flap.last = last;
    }
}

impl Flap {
    /// Until when this incarnation is not admitted. One that came back for the first time is admitted at once;
    /// after that, each time takes twice as long.
    fn hold(&mut self, run: Incarnation, rules: &Rules, now: Moment) -> Option<Moment> {
        let again = self.times.checked_sub(2)?;
        let pause = rules.node_ttl.saturating_mul(1 << again.min(20)).min(rules.check);
        let hold = *self.hold.get_or_insert((run, now.plus(pause)));
        if hold.0 != run {
            self.hold = Some((run, now.plus(pause)));
        }
        self.hold.map(|(_, until)| until).filter(|until| *until > now)
    }
}

impl Seat {
    /// Whether leadership may be transferred to it, if it is a candidate.
    pub(crate) fn may_lead(&self) -> bool {
        self.entry.status == NodeStatus::Active && !self.frozen
    }
}

impl Roster {
    pub(crate) fn seat(&self, node: &NodeId) -> Option<&Seat> {
        self.0.get(node)
    }

    /// How many nodes take shards.
    pub(crate) fn active(&self) -> usize {
        self.0
            .values()
            .filter(|seat| seat.entry.status == NodeStatus::Active && !seat.frozen)
            .count()
    }

    /// What a node may do with shards; none if it hosts nothing.
    pub(crate) fn hosting(&self, seat: &Seat) -> Option<Hosting> {
        match seat.entry.status {
            NodeStatus::Active | NodeStatus::Draining if seat.frozen => Some(Hosting::Keeps),
            NodeStatus::Active => Some(Hosting::Takes),
            // No node can take the shards of the last one that leaves, and it goes all the same.
            NodeStatus::Draining if seat.leaving && self.active() == 0 => None,
            NodeStatus::Draining => Some(Hosting::Keeps),
            _ => None,
        }
    }

    /// What changed since `before`, in words; none if nothing did that placement depends on.
    pub(crate) fn difference(&self, before: &Self) -> Option<String> {
        const NAMED_MAX: usize = 3;
        let mut changes = Vec::new();
        for (id, seat) in &self.0 {
            changes.extend(before.change(self, id, seat));
        }
        for (id, seat) in &before.0 {
            if !self.0.contains_key(id) && before.hosting(seat).is_some() {
                changes.push(format!("{id} left"));
            }
        }
        let more = changes.len().saturating_sub(NAMED_MAX);
        changes.truncate(NAMED_MAX);
        let text = changes.join(", ");
        match (text.is_empty(), more) {
            (true, _) => None,
            (false, 0) => Some(text),
            (false, more) => Some(format!("{text} and {more} more")),
        }
    }

    fn change(&self, after: &Self, id: &NodeId, seat: &Seat) -> Option<String> {
        let hosts = after.hosting(seat);
        let old = self.0.get(id);
        let hosted = old.and_then(|old| self.hosting(old));
        match (old, hosts) {
            (_, None) if hosted.is_none() => None,
            (_, None) if seat.entry.status == NodeStatus::Failed => Some(format!("{id} failed")),
            (_, None) if seat.leaving => Some(format!("{id} leaves")),
            (_, None) => Some(format!("{id} hosts nothing any more")),
            (None, Some(_)) => Some(format!("{id} joined")),
            (Some(_), Some(_)) if hosted.is_none() => Some(format!("{id} joined")),
            (Some(old), Some(_)) => {
                if old.frozen != seat.frozen && old.entry.incarnation == seat.entry.incarnation {
                    Some(if seat.frozen {
                        format!("{id} is absent")
                    } else {
                        format!("{id} is back")
                    })
                } else if old.entry.incarnation != seat.entry.incarnation {
                    Some(format!("{id} restarted"))
                } else if hosted != hosts || old.entry.status != seat.entry.status {
                    Some(format!("{id} is {}", seat.entry.status))
                } else if old.capacity != seat.capacity || old.entry.zone != seat.entry.zone {
                    Some(format!("{id} changed"))
                } else {
                    None
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
