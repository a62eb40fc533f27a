//! Which status each node has, from what is seen of it and what is to be remembered. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use coord_core::{
    Capacity, Declared, Incarnation, Moment, NodeEntry, NodeId, NodeRecord, NodeStatus, Revision,
    ShardMap,
};
use coord_placement::{Accepts, Candidate};

use super::machine::Rules;
use crate::invariants::{Hosting, Hosts};
use crate::membership::{Absence, Presence, View};
use crate::record::{ClusterRecord, Failure, NodeNote};

/// One node, as the leader holds it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Seat {
    pub(crate) entry: NodeEntry,
    pub(crate) capacity: Capacity,
    /// It is draining because it leaves.
    pub(crate) leaving: bool,
    /// It was declared failed and may run on for a while.
    pub(crate) runs_on: bool,
}

/// All nodes, as the leader holds them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Roster(pub(crate) BTreeMap<NodeId, Seat>);

/// A node whose registration has to be evicted: it was declared failed, or fell silent and counts as
/// failed afterwards.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Suspect {
    pub(crate) node: NodeId,
    pub(crate) incarnation: Incarnation,
    pub(crate) revision: Revision,
}

impl Suspect {
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
    /// Until when a node that was declared failed may run on.
    pub(crate) runs_on: BTreeMap<NodeId, (Incarnation, Moment)>,
    /// Since when a node has been failed.
    failed_since: BTreeMap<NodeId, (Incarnation, Moment)>,
}

/// The roster, and what follows from finding it.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) roster: Roster,
    /// What is to be remembered from now on.
    pub(crate) record: ClusterRecord,
    pub(crate) suspects: Vec<Suspect>,
    /// When it may come out differently although nothing was heard.
    pub(crate) wake: Option<Moment>,
}

/// What the roster is taken from.
pub(crate) struct Sources<'a> {
    pub(crate) rules: &'a Rules,
    pub(crate) view: &'a View,
    pub(crate) cluster: &'a ShardMap,
    pub(crate) record: &'a ClusterRecord,
    /// Whether a node still owns a shard.
    pub(crate) owns: &'a dyn Fn(&NodeId) -> bool,
}

/// Finds each node's status.
pub(crate) fn take(sources: &Sources<'_>, timers: &mut Timers, now: Moment) -> Taken {
    let mut taken = Taken {
        roster: Roster::default(),
        record: sources.record.clone(),
        suspects: Vec::new(),
        wake: None,
    };
    let known: BTreeMap<&NodeId, &NodeEntry> =
        sources.cluster.nodes().iter().flatten().map(|entry| (&entry.id, entry)).collect();
    for record in sources.view.present() {
        taken.take_present(record, known.get(&record.info.id).copied());
    }
    for (id, entry) in known {
        if !taken.roster.0.contains_key(id) {
            taken.take_absent(sources, entry, timers, now);
        }
    }
    taken.forget(sources, timers, now);
    taken
}

impl Taken {
    fn take_present(&mut self, seen: &NodeRecord, known: Option<&NodeEntry>) {
        let info = &seen.info;
        self.record.note(&info.id, |note| {
            // What was said of an older run says nothing of this one.
            note.failed.take_if(|failed| failed.incarnation != info.incarnation);
            note.leaving.take_if(|leaving| *leaving != info.incarnation);
        });
        let note = self.record.nodes.get(&info.id).cloned().unwrap_or_default();
        let status = if note.failed.is_some() {
            self.suspects.push(Suspect::of(seen));
            NodeStatus::Failed
        } else if !seen.judged && known.is_none() {
            NodeStatus::Discovered
        } else if info.declared == Declared::Draining || note.drain || note.leaving.is_some() {
            NodeStatus::Draining
        } else {
            NodeStatus::Active
        };
        let entry = NodeEntry::new(info.id.clone(), info.incarnation, info.address.clone(), status)
            .with_zone(info.zone.clone());
        self.seat(entry, info.capacity, &note);
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
        if how == Absence::Left || note.leaving.is_some() {
            self.record.nodes.remove(&known.id);
            return;
        }
        let grace = sources.rules.restart_grace;
        let verdict = counts_from.map(|from| from.plus(grace)).filter(|verdict| *verdict > now);
        if let Some(verdict) = verdict {
            self.wake_at(verdict);
        } else if sources.rules.judging.evict
            && let Some(Presence::Absent { record, .. }) = presence
        {
            self.suspects.push(Suspect::of(record));
        } else {
            let why = "its registration ran out".to_owned();
            let failure = Failure { incarnation: known.incarnation, why, runs_on: None };
            self.record.note(&known.id, |note| note.failed = Some(failure));
            entry.status = NodeStatus::Failed;
            self.keep_failed(sources, entry, capacity, timers, now);
            return;
        }
        self.seat(entry, capacity, &note);
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
        let since = since(&mut timers.failed_since, &entry, now);
        let forget_at = since.plus(sources.rules.remove_after);
        if forget_at <= now && !(sources.owns)(&entry.id) {
            self.record.nodes.remove(&entry.id);
            return;
        }
        if forget_at > now {
            self.wake_at(forget_at);
        }
        let ttl = self.record.nodes.get(&entry.id).and_then(|n| n.failed.as_ref()?.runs_on);
        if let Some(ttl) = ttl {
            let until = until(&mut timers.runs_on, &entry, ttl.get(), now);
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
        self.seat(entry, capacity, &note);
    }

    fn seat(&mut self, entry: NodeEntry, capacity: Capacity, note: &NodeNote) {
        let seat = Seat {
            capacity,
            leaving: note.leaving.is_some(),
            runs_on: note.failed.as_ref().is_some_and(|failed| failed.runs_on.is_some()),
            entry,
        };
        self.roster.0.insert(seat.entry.id.clone(), seat);
    }

    /// Drops what belongs to nodes that are not listed any more.
    fn forget(&mut self, sources: &Sources<'_>, timers: &mut Timers, now: Moment) {
        let roster = &self.roster.0;
        let failed = |id: &NodeId| {
            roster.get(id).is_some_and(|seat| seat.entry.status == NodeStatus::Failed)
        };
        timers.failed_since.retain(|id, _| failed(id));
        timers.runs_on.retain(|id, (_, until)| failed(id) || *until > now);
        // Notes of nodes that nobody has seen for as long as the cluster remembers them.
        self.record.nodes.retain(|id, note| {
            roster.contains_key(id) || (note.drain && sources.view.presence(id).is_some())
        });
    }

    fn wake_at(&mut self, moment: Moment) {
        self.wake = Some(self.wake.map_or(moment, |wake| wake.min(moment)));
    }
}

/// When this run of the node was first found so.
fn since(
    timers: &mut BTreeMap<NodeId, (Incarnation, Moment)>,
    entry: &NodeEntry,
    now: Moment,
) -> Moment {
    until(timers, entry, Duration::ZERO, now)
}

/// This long after this run of the node was first found so.
fn until(
    timers: &mut BTreeMap<NodeId, (Incarnation, Moment)>,
    entry: &NodeEntry,
    after: Duration,
    now: Moment,
) -> Moment {
    let fresh = (entry.incarnation, now.plus(after));
    let timer = timers.entry(entry.id.clone()).or_insert(fresh);
    if timer.0 != entry.incarnation {
        *timer = fresh;
    }
    timer.1
}

impl Roster {
    pub(crate) fn seat(&self, node: &NodeId) -> Option<&Seat> {
        self.0.get(node)
    }

    /// How many nodes take shards.
    pub(crate) fn active(&self) -> usize {
        self.0.values().filter(|seat| seat.entry.status == NodeStatus::Active).count()
    }

    /// What a node may do with shards; none if it hosts nothing.
    fn hosting(&self, seat: &Seat) -> Option<Hosting> {
        match seat.entry.status {
            NodeStatus::Active => Some(Hosting::Takes),
            // Nobody can take the shards of the last one that leaves, and it goes all the same.
            NodeStatus::Draining if seat.leaving && self.active() == 0 => None,
            NodeStatus::Draining => Some(Hosting::Keeps),
            NodeStatus::Failed if seat.runs_on => Some(Hosting::Keeps),
            _ => None,
        }
    }

    /// The nodes that may host shards.
    pub(crate) fn hosts(&self) -> Hosts {
        let host = |seat: &Seat| {
            Some((seat.entry.id.clone(), (seat.entry.incarnation, self.hosting(seat)?)))
        };
        self.0.values().filter_map(host).collect()
    }

    /// The nodes that may host shards, as a strategy wants them. One that was declared failed and may
    /// still run is none of them: what it has is to be placed anew, later.
    pub(crate) fn candidates(&self) -> Vec<Candidate> {
        let candidate = |seat: &Seat| {
            let accepts = match self.hosting(seat)? {
                Hosting::Takes => Accepts::New,
                Hosting::Keeps => Accepts::KeepOnly,
            };
            Some(
                Candidate::new(seat.entry.id.clone())
                    .with_capacity(seat.capacity)
                    .with_zone(seat.entry.zone.clone())
                    .with_accepts(accepts),
            )
        };
        self.0.values().filter(|seat| !seat.runs_on).filter_map(candidate).collect()
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
            (_, None) => Some(format!("{id} failed")),
            (None, Some(_)) => Some(format!("{id} joined")),
            (Some(_), Some(_)) if hosted.is_none() => Some(format!("{id} joined")),
            (Some(old), Some(_)) => {
                if old.entry.incarnation != seat.entry.incarnation {
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
