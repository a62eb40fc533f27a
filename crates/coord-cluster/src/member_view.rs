//! What a candidate knows of all registrations. Pure: `now` is an argument.
//!
//! Silence is not absence. While the store is away nothing here changes, and what is missing when it is
//! back counts as absent only after one more TTL.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use coord_core::{
    Consistency, ExpiryClock, ExpiryJudge, Guarantees, Incarnation, Moment, NodeEvent, NodeId,
    NodeRecord, Revision,
};

/// How long an absent node is remembered after it is of no more use.
const FORGET_AFTER: Duration = Duration::from_secs(3600);
/// The most absent nodes that are remembered.
const ABSENT_MAX: usize = 65_536;
/// How often, and after how many departures at the latest, absent nodes are looked through.
const FORGET_EVERY: Duration = Duration::from_secs(60);
const FORGET_DEPARTURES: u32 = 1_024;
/// The most former incarnations of one node that are remembered although their time is up.
const FORMER_MAX: usize = 16;

/// How a node came to be absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Absence {
    /// It deregistered, or was evicted.
    Left,
    /// Its registration ran out, or its record is gone and nothing says why.
    Expired,
}

/// What is known of one node.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Presence {
    /// It is registered.
    Present(NodeRecord),
    /// It was, and is not any more.
    Absent {
        /// What it said last.
        record: NodeRecord,
        /// How it went.
        how: Absence,
        /// When that counts: later than it was seen, where grace or the store's clock asks for it.
        counts_from: Moment,
    },
}

impl Presence {
    /// What the node said last.
    pub(crate) fn record(&self) -> &NodeRecord {
        match self {
            Self::Present(record) | Self::Absent { record, .. } => record,
        }
    }
}

/// Until when an incarnation may host what it owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MayRun {
    /// It is registered, so it reports what it stops.
    Registered,
    /// It is not, and its time is up then.
    Until(Moment),
}

/// What has to be added to the store's own judgement before an expiry counts. Where the store judged
/// nothing, since the record is merely gone, the whole TTL passes here after the absence was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Judging {
    /// The record's TTL has to pass here as well, since the store's clock may jump or its failover lose
    /// a heartbeat.
    pub(crate) wait_ttl: bool,
    /// That TTL counts from the last heartbeat that the watch showed; else from when the absence was
    /// seen. It takes a store that shows each heartbeat.
    pub(crate) from_heartbeat: bool,
    /// The registration has to be evicted first, since it is still there.
    pub(crate) evict: bool,
}

impl Judging {
    pub(crate) fn of(guarantees: &Guarantees) -> Self {
        Self {
            wait_ttl: guarantees.consistency == Consistency::BestEffort
                || guarantees.expiry_clock == ExpiryClock::ServerWall,
            from_heartbeat: guarantees.heartbeats_show,
            evict: guarantees.expiry_judge == ExpiryJudge::Observers,
        }
    }
}

/// All registrations, as a candidate has seen them.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    nodes: BTreeMap<NodeId, Presence>,
    /// When the store was last looked at for a new term, or for the first time.
    began: Option<Moment>,
    /// The number of that look.
    looks: u64,
    /// Records that a look found before the watch reported them: the watch may still report older ones.
    ahead: BTreeMap<NodeId, Revision>,
    /// Since when the watch has been silent.
    away_since: Option<Moment>,
    /// Whether the watch itself is interrupted.
    interrupted: bool,
    /// Until when nodes that have not been heard since an outage are left alone.
    grace: BTreeMap<NodeId, Moment>,
    /// When each node that is registered was heard last.
    heard: BTreeMap<NodeId, Moment>,
    /// Runs that others followed, and until when they may host.
    former: BTreeMap<NodeId, BTreeMap<Incarnation, Moment>>,
    /// Whether plain heartbeats came.
    beats: bool,
    /// When absent nodes were looked through last, and how many departed since.
    forgot: Option<Moment>,
    departures: u32,
}

impl View {
    /// The number of the last look at the store that this view has taken in.
    pub(crate) fn looks(&self) -> u64 {
        self.looks
    }

    /// Takes the nodes that a look for a new term found, so that no incarnation is missing that was registered
    /// at that time. That an incarnation is gone, and why, comes from the watch only: a look at the very end of
    /// a registration would lose the reason.
    pub(crate) fn on_found(&mut self, found: Vec<NodeRecord>, look: u64, now: Moment) {
        for record in found {
            if self.present_as(&record.info.id, record.info.incarnation).is_none() {
                self.ahead.insert(record.info.id.clone(), record.revision.clone());
                self.put(record, now, now);
            }
        }
        self.on_looked(look, now);
    }

    /// The newest state of this view was asked for by this look, so no incarnation is missing that was
    /// registered at that time. An incarnation that a map names and this view has never seen may have been
    /// replaced just now.
    pub(crate) fn on_looked(&mut self, look: u64, now: Moment) {
        if self.looks < look {
            (self.looks, self.began) = (look, Some(now));
        }
    }

    /// True once a first snapshot came.
    pub(crate) fn is_ready(&self) -> bool {
        self.began.is_some()
    }

    /// What is known of a node.
    pub(crate) fn presence(&self, node: &NodeId) -> Option<&Presence> {
        self.nodes.get(node)
    }

    /// When a node that is registered was heard last, as far as the watch shows it.
    pub(crate) fn heard(&self, node: &NodeId) -> Option<Moment> {
        self.heard.get(node).copied()
    }

    /// When a node that is registered was heard last, where each of its heartbeats shows and the store is
    /// there to show it.
    pub(crate) fn beat(&self, node: &NodeId, judging: Judging) -> Option<Moment> {
        self.heard(node).filter(|_| judging.from_heartbeat && !self.is_away())
    }

    /// All registrations that are there.
    pub(crate) fn present(&self) -> impl Iterator<Item = &NodeRecord> {
        self.nodes.values().filter_map(|presence| match presence {
            Presence::Present(record) => Some(record),
            Presence::Absent { .. } => None,
        })
    }

    /// What all nodes said last that are known, also those that are gone.
    pub(crate) fn records(&self) -> impl Iterator<Item = &NodeRecord> {
        self.nodes.values().map(Presence::record)
    }

    /// What a node said last.
    pub(crate) fn record(&self, node: &NodeId) -> Option<&NodeRecord> {
        self.nodes.get(node).map(Presence::record)
    }

    /// From when on a node counts as absent that this view has never seen, although the cluster knows
    /// it: one TTL after the last look, for it may be on its way back.
    pub(crate) fn unseen_counts_from(&self, node_ttl: Duration) -> Option<Moment> {
        Some(self.began?.plus(node_ttl))
    }

    /// Until when this incarnation of a node may host what it owns. One that was replaced, and whose end was
    /// not seen, has its whole TTL, for it need not have noticed. One that was never seen has its whole TTL
    /// from the last look on.
    pub(crate) fn may_run(&self, node: &NodeId, run: Incarnation, node_ttl: Duration) -> MayRun {
        let mut ttl = node_ttl;
        if let Some(presence) = self.nodes.get(node) {
            let record = presence.record();
            match presence {
                Presence::Present(_) if record.info.incarnation == run => {
                    return MayRun::Registered;
                }
                Presence::Absent { counts_from, .. } if record.info.incarnation == run => {
                    return MayRun::Until(*counts_from);
                }
                _ if record.info.ended.contains(&run) => {
                    return MayRun::Until(Moment::from_origin(Duration::ZERO));
                }
                _ => ttl = ttl.max(record.ttl.get()),
            }
        }
        if let Some(until) = self.former.get(node).and_then(|runs| runs.get(&run)) {
            return MayRun::Until(*until);
        }
        self.began.map_or(MayRun::Registered, |began| MayRun::Until(began.plus(ttl)))
    }

    /// The store fell silent at this moment.
    pub(crate) fn on_away(&mut self, since: Moment) {
        self.away_since.get_or_insert(since);
    }

    /// The watch itself ended, and is begun anew.
    pub(crate) fn on_interrupted(&mut self, now: Moment) {
        self.ahead.clear();
        self.interrupted = true;
        self.on_away(now);
    }

    /// Whether the watch itself is interrupted.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.interrupted
    }

    /// Whether the store is silent, as far as this view knows.
    pub(crate) fn is_away(&self) -> bool {
        self.away_since.is_some()
    }

    /// The store is back. After an outage of a third of a node's TTL or more, the node gets a full TTL
    /// of grace.
    pub(crate) fn on_back(&mut self, now: Moment) {
        self.interrupted = false;
        let Some(since) = self.away_since.take() else { return };
        // Heartbeats that this view has not seen may have been answered meanwhile.
        self.heard.values_mut().for_each(|heard| *heard = now);
        for (id, presence) in &self.nodes {
            if let Presence::Present(record) = presence
                && now.since(since) >= record.ttl.get() / 3
            {
                self.grace.insert(id.clone(), now.plus(record.ttl.get()));
            }
        }
    }

    /// This runtime was itself stalled for this long, so it judges every node so much later.
    pub(crate) fn on_stall(&mut self, stalled: Duration) {
        for presence in self.nodes.values_mut() {
            if let Presence::Absent { counts_from, .. } = presence {
                *counts_from = counts_from.plus(stalled);
            }
        }
        let former = self.former.values_mut().flat_map(BTreeMap::values_mut);
        let waits = former.chain(self.grace.values_mut()).chain(self.heard.values_mut());
        for moment in waits.chain(self.began.as_mut()) {
            *moment = moment.plus(stalled);
        }
    }

    /// Takes an event. True if it changed more than the revision of a record: a plain heartbeat says only that
    /// the node lives, and a cluster of thousands has hundreds of them a second.
    pub(crate) fn on_event(&mut self, event: NodeEvent, judging: Judging, now: Moment) -> bool {
        let changed = self.take(event, judging, now);
        self.tidy(now);
        changed
    }

    fn take(&mut self, event: NodeEvent, judging: Judging, now: Moment) -> bool {
        match event {
            NodeEvent::Snapshot(records) => {
                self.ahead.clear();
                self.began.get_or_insert(now);
                let there: HashSet<&NodeId> = records.iter().map(|r| &r.info.id).collect();
                let missing: Vec<(NodeId, Incarnation)> = self
                    .present()
                    .filter(|record| !there.contains(&record.info.id))
                    .map(|record| (record.info.id.clone(), record.info.incarnation))
                    .collect();
                for record in records {
                    // It may repeat what a heartbeat wrote long before.
                    let known = self.present_as(&record.info.id, record.info.incarnation);
                    let heard = match known.is_some_and(|known| known.revision == record.revision) {
                        true => self.heard(&record.info.id),
                        false => None,
                    };
                    self.put(record, heard.unwrap_or(now), now);
                }
                for (node, incarnation) in missing {
                    // Nothing says why, and a heartbeat may have been answered meanwhile.
                    self.expire(&node, incarnation, false, judging, now);
                }
                true
            }
            NodeEvent::Joined(record) | NodeEvent::Updated(record) => {
                !self.is_behind(&record) && self.put(record, now, now)
            }
            NodeEvent::Left { node, incarnation } => {
                self.remove(&node, incarnation, Absence::Left, now)
            }
            NodeEvent::Expired { node, incarnation, judged } => {
                self.expire(&node, incarnation, judged, judging, now)
            }
            _ => false,
        }
    }

    /// Whether the watch tells of a record that a later one had replaced when the store was looked at.
    fn is_behind(&mut self, record: &NodeRecord) -> bool {
        let ahead = self.ahead.get(&record.info.id).and_then(Revision::as_u64);
        let is_behind =
            ahead.zip(record.revision.as_u64()).is_some_and(|(ahead, told)| told < ahead);
        if !is_behind {
            self.ahead.remove(&record.info.id);
        }
        is_behind
    }

    fn put(&mut self, record: NodeRecord, heard: Moment, now: Moment) -> bool {
        let id = record.info.id.clone();
        self.heard.insert(id.clone(), heard);
        self.grace.remove(&id);
        self.follow(&record, now);
        let says_more = match self.nodes.get(&id) {
            Some(Presence::Present(old)) => {
                (&old.info, old.ttl, old.judged) != (&record.info, record.ttl, record.judged)
            }
            _ => true,
        };
        self.nodes.insert(id, Presence::Present(record));
        self.beats |= !says_more;
        says_more
    }

    /// Whether plain heartbeats came since this was asked last.
    pub(crate) fn take_beats(&mut self) -> bool {
        std::mem::take(&mut self.beats)
    }

    /// An incarnation follows those of its node that were there before it.
    fn follow(&mut self, record: &NodeRecord, now: Moment) {
        let info = &record.info;
        let before = match self.nodes.get(&info.id) {
            Some(Presence::Present(old)) => (old.info.incarnation, now.plus(old.ttl.get())),
            Some(Presence::Absent { record: old, counts_from, .. }) => {
                (old.info.incarnation, *counts_from)
            }
            None => return,
        };
        let runs = self.former.entry(info.id.clone()).or_default();
        if before.0 != info.incarnation {
            runs.insert(before.0, before.1);
        }
        runs.remove(&info.incarnation);
        for (run, until) in runs.iter_mut() {
            if info.ended.contains(run) {
                *until = now.min(*until);
            }
        }
        if runs.len() > FORMER_MAX {
            runs.retain(|_, until| *until > now);
        }
    }

    /// A registration is gone, and nothing says that its node ended it.
    fn expire(
        &mut self,
        node: &NodeId,
        incarnation: Incarnation,
        judged: bool,
        judging: Judging,
        now: Moment,
    ) -> bool {
        let Some(record) = self.present_as(node, incarnation) else { return false };
        let ttl = record.ttl.get();
        let heard = self.heard(node).filter(|_| judged && judging.from_heartbeat);
        let waits = !judged || judging.wait_ttl;
        let wait_until = waits.then(|| heard.unwrap_or(now).plus(ttl));
        let grace = self.grace.get(node).copied();
        let counts_from = [wait_until, grace].into_iter().flatten().fold(now, Moment::max);
        self.remove(node, incarnation, Absence::Expired, counts_from)
    }

    fn present_as(&self, node: &NodeId, incarnation: Incarnation) -> Option<&NodeRecord> {
        match self.nodes.get(node)? {
            Presence::Present(record) if record.info.incarnation == incarnation => Some(record),
            _ => None,
        }
    }

    fn remove(
        &mut self,
        node: &NodeId,
        incarnation: Incarnation,
        how: Absence,
        counts_from: Moment,
    ) -> bool {
        let Some(record) = self.present_as(node, incarnation).cloned() else { return false };
        self.heard.remove(node);
        self.grace.remove(node);
        self.nodes.insert(node.clone(), Presence::Absent { record, how, counts_from });
        self.departures += 1;
        true
    }

    /// Forgets absent nodes from time to time.
    fn tidy(&mut self, now: Moment) {
        let due = self.forgot.is_none_or(|last| now.since(last) >= FORGET_EVERY);
        if self.departures > 0 && (due || self.departures >= FORGET_DEPARTURES) {
            self.forget(now);
            (self.forgot, self.departures) = (Some(now), 0);
        }
    }

    fn forget(&mut self, now: Moment) {
        let mut room = ABSENT_MAX;
        self.nodes.retain(|_, presence| match presence {
            Presence::Present(_) => true,
            Presence::Absent { counts_from, .. } => {
                room = room.saturating_sub(1);
                room > 0 && now.since(*counts_from) < FORGET_AFTER
            }
        });
        let nodes = &self.nodes;
        self.former.retain(|node, _| nodes.contains_key(node));
    }
}

#[cfg(test)]
mod tests {
    use coord_core::{Address, NodeInfo, Revision, Ttl};

    use super::*;

    const JUDGED: Judging = Judging { wait_ttl: false, from_heartbeat: true, evict: false };

    fn at(seconds: u64) -> Moment {
        Moment::from_origin(Duration::from_secs(seconds))
    }

    fn record(name: &str, incarnation: u128) -> NodeRecord {
        let id = NodeId::new(name).expect("name");
        let info = NodeInfo::new(id, Address::new("localhost:1").expect("address"))
            .with_incarnation(Incarnation::from_u128(incarnation));
        NodeRecord::new(info, Ttl::from_secs(9).expect("ttl"), Revision::from_u64(1))
    }

    fn expired(name: &str, incarnation: u128) -> NodeEvent {
        let node = NodeId::new(name).expect("name");
        NodeEvent::Expired { node, incarnation: Incarnation::from_u128(incarnation), judged: true }
    }

    fn counts_from(view: &View, name: &str) -> Option<Moment> {
        match view.presence(&NodeId::new(name).expect("name"))? {
            Presence::Present(_) => None,
            Presence::Absent { counts_from, .. } => Some(*counts_from),
        }
    }

    #[test]
    fn an_expiry_counts_at_once_and_an_older_runs_does_not() {
        let mut view = View::default();
        assert!(!view.is_ready());
        view.on_event(NodeEvent::Snapshot(vec![record("a", 1), record("b", 1)]), JUDGED, at(0));
        view.on_event(NodeEvent::Joined(record("b", 2)), JUDGED, at(1));
        assert!(view.on_event(expired("a", 1), JUDGED, at(2)));
        assert!(!view.on_event(expired("b", 1), JUDGED, at(2)));
        assert_eq!(counts_from(&view, "a"), Some(at(2)));
        assert_eq!(view.present().count(), 1);
    }

    #[test]
    fn after_an_outage_everybody_has_one_ttl_of_grace_until_it_is_heard() {
        let mut view = View::default();
        view.on_event(NodeEvent::Snapshot(vec![record("a", 1), record("b", 1)]), JUDGED, at(0));
        view.on_away(at(10));
        view.on_back(at(40));
        view.on_event(expired("a", 1), JUDGED, at(40));
        assert_eq!(counts_from(&view, "a"), Some(at(49)));
        view.on_event(NodeEvent::Joined(record("b", 2)), JUDGED, at(41));
        view.on_event(expired("b", 2), JUDGED, at(42));
        assert_eq!(counts_from(&view, "b"), Some(at(42)));
    }

    #[test]
    fn there_is_one_grace_per_outage_and_a_stall_prolongs_it() {
        let mut view = View::default();
        let all = vec![record("a", 1), record("b", 1), record("c", 1)];
        view.on_event(NodeEvent::Snapshot(all), JUDGED, at(0));
        view.on_away(at(10));
        view.on_back(at(40));
        // The watch says it as well.
        view.on_back(at(45));
        view.on_event(expired("a", 1), JUDGED, at(46));
        assert_eq!(counts_from(&view, "a"), Some(at(49)));
        view.on_stall(Duration::from_secs(3));
        view.on_event(expired("b", 1), JUDGED, at(47));
        assert_eq!(counts_from(&view, "b"), Some(at(52)));
        // It is over by itself.
        view.on_event(expired("c", 1), JUDGED, at(60));
        assert_eq!(counts_from(&view, "c"), Some(at(60)));
    }

    #[test]
    fn an_empty_answer_is_an_answer() {
        let mut view = View::default();
        view.on_event(NodeEvent::Snapshot(vec![record("a", 1)]), JUDGED, at(0));
        assert!(view.on_event(NodeEvent::Snapshot(Vec::new()), JUDGED, at(3)));
        assert_eq!((counts_from(&view, "a"), view.present().count()), (Some(at(12)), 0));
    }

    #[test]
    fn a_short_gap_gives_no_grace() {
        let mut view = View::default();
        view.on_event(NodeEvent::Snapshot(vec![record("a", 1)]), JUDGED, at(0));
        view.on_away(at(10));
        view.on_back(at(12));
        view.on_event(expired("a", 1), JUDGED, at(12));
        assert_eq!(counts_from(&view, "a"), Some(at(12)));
    }

    #[test]
    fn where_the_stores_clock_may_jump_the_ttl_passes_here_too() {
        let judging = Judging { wait_ttl: true, from_heartbeat: false, evict: false };
        let mut view = View::default();
        view.on_event(NodeEvent::Snapshot(vec![record("a", 1)]), judging, at(0));
        view.on_event(expired("a", 1), judging, at(5));
        assert_eq!(counts_from(&view, "a"), Some(at(14)));
        view.on_stall(Duration::from_secs(3));
        assert_eq!(counts_from(&view, "a"), Some(at(17)));
    }

    #[test]
    fn a_record_that_is_merely_gone_may_be_of_a_node_that_lives() {
        let wall = Judging { wait_ttl: true, from_heartbeat: true, evict: false };
        for judging in [JUDGED, wall, Judging { from_heartbeat: false, ..JUDGED }] {
            let gone = |judged| {
                let mut view = View::default();
                view.on_event(NodeEvent::Snapshot(vec![record("a", 1)]), judging, at(0));
                let NodeEvent::Expired { node, incarnation, .. } = expired("a", 1) else {
                    panic!("another event");
                };
                let event = NodeEvent::Expired { node, incarnation, judged };
                view.on_event(event, judging, at(10));
                counts_from(&view, "a")
            };
            assert_eq!(gone(false), Some(at(19)), "a whole TTL {judging:?}");
            assert_eq!(gone(true), Some(at(10)), "it has passed already {judging:?}");
        }
    }

    #[test]
    fn a_snapshot_that_repeats_a_record_is_no_heartbeat() {
        let judging = Judging { wait_ttl: true, from_heartbeat: true, evict: false };
        for (again, counts) in [(2, 12), (3, 17)] {
            let mut view = View::default();
            view.on_event(NodeEvent::Snapshot(Vec::new()), judging, at(0));
            view.on_event(NodeEvent::Joined(beat("a", 1)), judging, at(2));
            view.on_event(NodeEvent::Updated(beat("a", 2)), judging, at(3));
            // A leader looks at the nodes anew.
            view.on_event(NodeEvent::Snapshot(vec![beat("a", again)]), judging, at(8));
            view.on_event(expired("a", 1), judging, at(9));
            assert_eq!(counts_from(&view, "a"), Some(at(counts)), "{again}");
        }
    }

    #[test]
    fn a_farewell_counts_at_once() {
        let mut view = View::default();
        view.on_event(NodeEvent::Snapshot(vec![record("a", 1)]), JUDGED, at(0));
        let NodeEvent::Expired { node, incarnation, .. } = expired("a", 1) else {
            panic!("another event");
        };
        view.on_event(NodeEvent::Left { node, incarnation }, JUDGED, at(2));
        assert_eq!(counts_from(&view, "a"), Some(at(2)));
    }

    /// Like `record`, as written by the n-th heartbeat.
    fn beat(name: &str, n: u64) -> NodeRecord {
        let NodeRecord { info, ttl, .. } = record(name, 1);
        NodeRecord::new(info, ttl, Revision::from_u64(n))
    }

    #[test]
    fn a_plain_heartbeat_changes_nothing_that_is_to_be_told() {
        let mut view = View::default();
        view.on_event(NodeEvent::Snapshot(vec![beat("a", 1)]), JUDGED, at(0));
        assert!(!view.on_event(NodeEvent::Updated(beat("a", 2)), JUDGED, at(1)));
        assert!(view.take_beats() && !view.take_beats());
        let last = view.present().next().map(|record| record.revision.clone());
        assert_eq!(last, Some(Revision::from_u64(2)), "it is known all the same");
        let mut drains = beat("a", 3);
        drains.info.declared = coord_core::Declared::Draining;
        assert!(view.on_event(NodeEvent::Updated(drains), JUDGED, at(2)));
    }

    #[test]
    fn the_ttl_counts_from_the_last_heartbeat_that_shows() {
        let judging = Judging { wait_ttl: true, from_heartbeat: true, evict: false };
        let after = |beats: &[u64], away: bool, judging: Judging| {
            let mut view = View::default();
            view.on_event(NodeEvent::Snapshot(vec![beat("a", 1)]), judging, at(0));
            for seconds in beats {
                let updated = NodeEvent::Updated(beat("a", 1 + seconds));
                view.on_event(updated, judging, at(*seconds));
            }
            if away {
                view.on_away(at(8));
                view.on_back(at(10));
            }
            view.on_event(expired("a", 1), judging, at(12));
            counts_from(&view, "a")
        };
        assert_eq!(after(&[3, 6], false, judging), Some(at(15)));
        assert_eq!(after(&[], false, judging), Some(at(12)), "it has passed already");
        assert_eq!(after(&[3, 6], true, judging), Some(at(19)), "one may have passed unseen");
        let unseen = Judging { from_heartbeat: false, ..judging };
        assert_eq!(after(&[3, 6], false, unseen), Some(at(21)), "one may not have shown");
    }

    #[test]
    fn what_a_later_snapshot_lacks_has_expired() {
        let mut view = View::default();
        view.on_event(NodeEvent::Snapshot(vec![record("a", 1), record("b", 1)]), JUDGED, at(0));
        view.on_event(NodeEvent::Snapshot(vec![record("b", 1)]), JUDGED, at(3));
        assert_eq!(counts_from(&view, "a"), Some(at(12)), "nothing says since when");
        assert_eq!(view.unseen_counts_from(Duration::from_secs(9)), Some(at(9)));
    }

    #[test]
    fn a_look_adds_what_the_watch_has_not_told_and_takes_nothing_away() {
        let mut view = View::default();
        view.on_event(NodeEvent::Snapshot(vec![record("a", 1), record("b", 1)]), JUDGED, at(0));
        let shown = |view: &View| {
            let mut runs: Vec<_> = view.present().map(|record| record.info.incarnation).collect();
            runs.sort();
            runs
        };
        let run = Incarnation::from_u128;
        let newer = |run: u128, revision: u64| {
            let record = record("b", run);
            NodeRecord::new(record.info, record.ttl, Revision::from_u64(revision))
        };
        // The registration of `a` is just over, and the watch has still to say so.
        view.on_found(vec![newer(3, 30)], 1, at(9));
        assert_eq!((shown(&view), view.looks()), (vec![run(1), run(3)], 1));
        let ended =
            NodeEvent::Expired { node: record("a", 1).info.id, incarnation: run(1), judged: true };
        assert!(view.on_event(ended, JUDGED, at(10)));
        assert_eq!(counts_from(&view, "a"), Some(at(10)), "it is known why, so nothing is added");
        // A watch that is late goes through what was there before.
        for (run, revision) in [(1, 9), (2, 20)] {
            assert!(!view.on_event(NodeEvent::Joined(newer(run, revision)), JUDGED, at(10)));
        }
        assert_eq!(shown(&view), [run(3)]);
        assert!(view.on_event(NodeEvent::Joined(newer(4, 40)), JUDGED, at(11)));
        assert_eq!(shown(&view), [run(4)]);
        // A store that counts anew after an outage is believed.
        view.on_found(vec![newer(5, 50)], 2, at(12));
        view.on_interrupted(at(13));
        assert!(view.on_event(NodeEvent::Joined(newer(6, 1)), JUDGED, at(14)));
        assert_eq!(shown(&view), [run(6)]);
    }

    #[test]
    fn a_run_that_nobody_saw_has_its_ttl_from_the_last_look_on() {
        let mut view = View::default();
        let unseen = |view: &View| {
            view.may_run(&record("a", 2).info.id, Incarnation::from_u128(2), Duration::from_secs(5))
        };
        view.on_event(NodeEvent::Snapshot(vec![record("a", 1)]), JUDGED, at(0));
        assert_eq!(unseen(&view), MayRun::Until(at(9)), "the longer of both TTLs");
        view.on_looked(1, at(20));
        assert_eq!((unseen(&view), view.looks()), (MayRun::Until(at(29)), 1));
        view.on_looked(1, at(30));
        assert_eq!(unseen(&view), MayRun::Until(at(29)), "that was no other look");
        view.on_stall(Duration::from_secs(3));
        assert_eq!(unseen(&view), MayRun::Until(at(32)));
        assert_eq!(view.unseen_counts_from(Duration::from_secs(9)), Some(at(32)));
    }

    #[test]
    fn a_run_that_was_replaced_has_its_ttl_and_as_much_more_as_this_process_was_stalled() {
        let mut view = View::default();
        view.on_event(NodeEvent::Snapshot(vec![record("a", 1)]), JUDGED, at(0));
        view.on_event(NodeEvent::Joined(record("a", 2)), JUDGED, at(2));
        let former = |view: &View| {
            view.may_run(&record("a", 1).info.id, Incarnation::from_u128(1), Duration::from_secs(9))
        };
        assert_eq!(former(&view), MayRun::Until(at(11)));
        view.on_stall(Duration::from_secs(3));
        assert_eq!(former(&view), MayRun::Until(at(14)));
    }
}
