//! What one node knows of the cluster, and the events that follow from each change. Pure.
//!
//! Every node derives its events from the same watches, the leader too: the leader's lease, the reserved
//! table `_cluster` and the tables. A node that was away gets the difference.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use coord_core::{
    Holder, Incarnation, MotionPhase, NodeEntry, NodeId, NodeStatus, Result, ShardId, ShardMap,
    Slot, TableName, Term, Version,
};

use crate::downing::{DownReason, PartitionState};
use crate::events::{Assigned, Event, EventKind, EventSource, Migrated};
use crate::record::{Before, ClusterRecord, RAN_OUT, Rebalance, Run, TableNote};
use crate::status::{
    Balance, ClusterState, Gating, HostFault, Leader, Member, Role, Status, TableStatus,
};
use crate::telemetry::Gauges;

/// What one node knows of the cluster.
#[derive(Clone, Debug)]
pub(crate) struct Observer {
    leader: Option<Leader>,
    role: Role,
    gating: Gating,
    /// Why this node, which leads, can't write down what it has to remember.
    unwritten: Option<String>,
    registered: Option<Incarnation>,
    cluster: Option<Arc<ShardMap>>,
    /// The members of the generation of `_cluster` before this one.
    former: Vec<Run>,
    /// What its metadata says; nodes whose registrations ran out are shown by their entries alone.
    record: Arc<ClusterRecord>,
    /// How many members there are of each status.
    counts: BTreeMap<NodeStatus, usize>,
    /// The tables that this node was started with; none until its map is seen.
    tables: BTreeMap<TableName, Option<Arc<ShardMap>>>,
    state: ClusterState,
    /// Whether there ever was an active node.
    had_nodes: bool,
    store_away: bool,
    partition_state: PartitionState,
    unreachable: Arc<[NodeId]>,
    went_down: Option<DownReason>,
    faults: BTreeMap<TableName, BTreeMap<ShardId, HostFault>>,
    /// Whether anybody hears which shards change: a version may change all of very many.
    heard: bool,
}

impl Observer {
    pub(crate) fn new(tables: impl IntoIterator<Item = TableName>) -> Self {
        Self {
            leader: None,
            role: Role::Follower,
            gating: Gating::None,
            unwritten: None,
            registered: None,
            cluster: None,
            former: Vec::new(),
            record: Arc::default(),
            counts: BTreeMap::new(),
            tables: tables.into_iter().map(|name| (name, None)).collect(),
            state: ClusterState::Initializing,
            had_nodes: false,
            store_away: false,
            partition_state: PartitionState::Normal,
            unreachable: Arc::default(),
            went_down: None,
            faults: BTreeMap::new(),
            heard: true,
        }
    }

    /// Says whether anybody listens from now on.
    pub(crate) fn set_heard(&mut self, heard: bool) {
        self.heard = heard;
    }

    /// What `_cluster` says should not be forgotten.
    pub(crate) fn record(&self) -> &ClusterRecord {
        &self.record
    }

    /// What this annex of `_cluster` says; it is read only where it is not the one that is known.
    pub(crate) fn read_record(&self, map: Option<&ShardMap>) -> Result<Arc<ClusterRecord>> {
        let Some(map) = map else { return Ok(Arc::default()) };
        match &self.cluster {
            Some(known) if known.annex() == map.annex() => Ok(Arc::clone(&self.record)),
            _ => Ok(Arc::new(ClusterRecord::read(map.annex())?)),
        }
    }

    /// The newest map of a table.
    pub(crate) fn map(&self, table: &TableName) -> Option<Arc<ShardMap>> {
        self.tables.get(table)?.clone()
    }

    /// Whether this node may have to lead, so that it is a candidate or at least sees the registrations. As
    /// long as no candidate slots are given, a node of a large cluster does not begin to watch all of them.
    pub(crate) fn may_have_to_lead(&self, me: &NodeId, places: usize) -> bool {
        let few = || !self.counts.is_empty() && self.counts.values().sum::<usize>() <= places;
        let everybody = self.record.candidates.is_empty();
        self.record.has_place(me) && (!everybody || places == 0 || few())
    }

    /// Whether the leader has declared this incarnation of a node failed.
    pub(crate) fn is_failed(&self, node: &NodeId, run: Incarnation) -> bool {
        let note = self.record.nodes.get(node).and_then(|note| note.failed.as_ref());
        let entry = || {
            let cluster = self.cluster.as_deref().filter(|_| self.count(NodeStatus::Failed) > 0)?;
            cluster.node(cluster.slot_of(node)?)
        };
        note.is_some_and(|failed| failed.incarnation == run)
            || entry()
                .is_some_and(|entry| entry.incarnation == run && entry.status == NodeStatus::Failed)
    }

    pub(crate) fn leader(&self) -> Option<&Leader> {
        self.leader.as_ref()
    }

    /// The nodes that this node does not reach.
    pub(crate) fn unreachable(&self) -> &[NodeId] {
        &self.unreachable
    }

    /// Whether this node has shut down; it is reported once.
    pub(crate) fn is_down(&self) -> bool {
        self.went_down.is_some()
    }

    pub(crate) fn is_store_away(&self) -> bool {
        self.store_away
    }

    pub(crate) fn on_role(&mut self, role: Role) {
        self.role = role;
        if role != Role::Leader {
            self.unwritten = None;
        }
    }

    /// Why this node, which leads, can't write down what it has to remember.
    pub(crate) fn unwritten(&self) -> Option<&str> {
        self.unwritten.as_deref()
    }

    pub(crate) fn on_unwritten(&mut self, why: Option<String>) {
        self.unwritten = why;
    }

    pub(crate) fn on_gating(&mut self, gating: Gating) -> Vec<Event> {
        if std::mem::replace(&mut self.gating, gating) == gating {
            return Vec::new();
        }
        vec![Event::new(EventSource::Local, EventKind::GatingChanged { gating })]
    }

    /// The holder of the leader's lease; none if the lease is free.
    pub(crate) fn on_leader(&mut self, holder: Option<(&Holder, Term)>) -> Vec<Event> {
        let now = holder.map(|(holder, term)| Leader {
            node: holder.node.clone(),
            incarnation: holder.incarnation,
            term,
        });
        // A watch that lags may show an older term after a newer one.
        let older = |new: &Leader| self.leader.as_ref().is_some_and(|old| old.term >= new.term);
        if now == self.leader || now.as_ref().is_some_and(older) {
            return Vec::new();
        }
        let mut events = Vec::new();
        if let Some(old) = self.leader.take() {
            let why = match &now {
                Some(new) => format!("term {} of {} began", new.term, new.node),
                None => "the lease was released or ran out".to_owned(),
            };
            let Leader { node, term, .. } = old;
            events.push(Event::new(
                EventSource::Term(term),
                EventKind::LeadershipLost { node, term, why },
            ));
        }
        if let Some(Leader { node, term, .. }) = now.clone() {
            events
                .push(Event::new(EventSource::Term(term), EventKind::LeaderElected { node, term }));
        }
        self.leader = now;
        events
    }

    pub(crate) fn on_registered(&mut self, incarnation: Incarnation) -> Vec<Event> {
        self.registered = Some(incarnation);
        vec![Event::new(EventSource::Local, EventKind::Registered { incarnation })]
    }

    pub(crate) fn on_registration_lost(
        &mut self,
        incarnation: Incarnation,
        why: impl Into<String>,
    ) -> Vec<Event> {
        self.registered = None;
        let why = why.into();
        vec![Event::new(EventSource::Local, EventKind::RegistrationLost { incarnation, why })]
    }

    /// This node's runtime has ended: from now on it shows no member and no leader.
    pub(crate) fn on_ended(&mut self) -> Vec<Event> {
        let led = self.leader.take().filter(|leader| Some(leader.incarnation) == self.registered);
        self.on_role(Role::Follower);
        let mut events = self.on_gating(Gating::None);
        if let Some(Leader { node, term, .. }) = led {
            let why = "the node ended".to_owned();
            events.push(Event::new(
                EventSource::Term(term),
                EventKind::LeadershipLost { node, term, why },
            ));
        }
        if let Some(incarnation) = self.registered.take() {
            events.push(Event::new(EventSource::Local, EventKind::Ended { incarnation }));
        }
        events
    }

    /// The host of a shard failed here.
    pub(crate) fn on_shard_failed(
        &mut self,
        table: TableName,
        shard: ShardId,
        times: u32,
        why: String,
    ) -> Vec<Event> {
        vec![Event::new(EventSource::Local, EventKind::ShardFailed { table, shard, times, why })]
    }

    /// What is wrong with shards of this node's host. Each failure has an event of its own.
    pub(crate) fn on_host_faults(
        &mut self,
        table: &TableName,
        faults: BTreeMap<ShardId, HostFault>,
    ) -> Vec<Event> {
        let before = self.faults.insert(table.clone(), faults).unwrap_or_default();
        let now = &self.faults[table];
        let new = |fault: HostFault| {
            let is_new = |(shard, what): &(&ShardId, &HostFault)| {
                **what == fault && before.get(shard) != Some(&fault)
            };
            let shards: Arc<[_]> = now.iter().filter(is_new).map(|(shard, _)| *shard).collect();
            (!shards.is_empty()).then(|| {
                let table = table.clone();
                Event::new(EventSource::Local, EventKind::ShardsFaulty { table, fault, shards })
            })
        };
        let told = [HostFault::StartSlow, HostFault::StopSlow, HostFault::Aborted];
        told.into_iter().filter_map(new).collect()
    }

    pub(crate) fn on_store(&mut self, away: bool) -> Vec<Event> {
        if self.store_away == away {
            return Vec::new();
        }
        self.store_away = away;
        let kind = if away { EventKind::StoreAway } else { EventKind::StoreBack };
        vec![Event::new(EventSource::Local, kind)]
    }

    /// The newest version of `_cluster`.
    pub(crate) fn cluster(&self) -> Option<&Arc<ShardMap>> {
        self.cluster.as_ref()
    }

    /// The nodes that this node does not reach, and the partition state that follows.
    pub(crate) fn on_partition_state(
        &mut self,
        to: PartitionState,
        unreachable: Arc<[NodeId]>,
    ) -> Vec<Event> {
        self.unreachable = Arc::clone(&unreachable);
        let from = std::mem::replace(&mut self.partition_state, to);
        if from == to {
            return Vec::new();
        }
        vec![Event::new(
            EventSource::Local,
            EventKind::PartitionStateChanged { from, to, unreachable },
        )]
    }

    /// This node shuts down.
    pub(crate) fn on_down(&mut self, why: DownReason) -> Vec<Event> {
        self.went_down = Some(why);
        vec![Event::new(EventSource::Local, EventKind::WentDown { why })]
    }

    /// A version of `_cluster`, with what its annex says.
    pub(crate) fn on_cluster(
        &mut self,
        map: Option<Arc<ShardMap>>,
        record: Arc<ClusterRecord>,
    ) -> Vec<Event> {
        let cause = cause(&TableName::cluster(), map.as_deref());
        let mut kinds = Vec::new();
        self.members_diff(map.as_deref(), &record, &mut kinds);
        if !Arc::ptr_eq(&self.record, &record) {
            record_diff(&self.record, &record, &mut kinds);
        }
        let uid = map.as_ref().map(|map| map.uid());
        if self.cluster.as_ref().is_some_and(|cluster| Some(cluster.uid()) != uid) {
            let members = self.runs();
            if !members.is_empty() {
                self.former = members;
            }
        }
        self.cluster = map;
        self.record = record;
        let mut events: Vec<_> =
            kinds.into_iter().map(|kind| Event::new(cause.clone(), kind)).collect();
        events.extend(self.refresh(&cause));
        events
    }

    /// What is known of the members, whichever generation of `_cluster` the store has.
    pub(crate) fn before(&self) -> Before {
        let generation = self.cluster.as_ref().map(|cluster| cluster.uid());
        Before { generation, members: self.runs(), former: self.former.clone() }
    }

    /// The members that may host.
    fn runs(&self) -> Vec<Run> {
        let run = |node: &NodeEntry| Run { node: node.id.clone(), incarnation: node.incarnation };
        self.members().filter(|node| node.status.may_host()).map(run).collect()
    }

    /// A version of a table.
    pub(crate) fn on_table(&mut self, name: &TableName, map: Option<Arc<ShardMap>>) -> Vec<Event> {
        let Some(known) = self.tables.get_mut(name) else { return Vec::new() };
        let old = std::mem::replace(known, map.clone());
        let Some(map) = map else { return Vec::new() };
        let cause = cause(name, Some(&map));
        let old = old.filter(|old| old.uid() == map.uid());
        let mut events: Vec<_> = table_diff(name, old.as_deref(), &map, self.heard)
            .into_iter()
            .map(|kind| Event::new(cause.clone(), kind))
            .collect();
        events.extend(self.refresh(&cause));
        events
    }

    /// What the next version says of the members. A node that is the same in the same slot tells nothing.
    fn members_diff(
        &mut self,
        map: Option<&ShardMap>,
        record: &ClusterRecord,
        out: &mut Vec<EventKind>,
    ) {
        let cluster = self.cluster.as_deref();
        let slots = |map: Option<&ShardMap>| map.map_or(0, |map| map.nodes().len());
        // One whose slot changed is in both.
        let (mut old, mut new) = (BTreeMap::new(), BTreeMap::new());
        for at in 0..slots(cluster).max(slots(map)) {
            let (was, is) = (in_slot(cluster, at), in_slot(map, at));
            if was != is {
                old.extend(was.map(|node| (&node.id, node)));
                new.extend(is.map(|node| (&node.id, node)));
            }
        }
        for (id, node) in &new {
            *self.counts.entry(node.status).or_default() += 1;
            member_diff(old.get(id).copied(), node, record, out);
        }
        for (id, node) in old {
            if let Some(count) = self.counts.get_mut(&node.status) {
                *count -= 1;
            }
            if !new.contains_key(id) && node.status != NodeStatus::Discovered {
                let (node, incarnation) = (id.clone(), node.incarnation);
                out.push(EventKind::NodeLeft { node, incarnation });
            }
        }
        self.counts.retain(|_, count| *count > 0);
    }

    /// Finds the state of the cluster as a whole anew.
    fn refresh(&mut self, cause: &EventSource) -> Vec<Event> {
        let active = self.count(NodeStatus::Active);
        let state = match active {
            0 if self.had_nodes || !self.counts.is_empty() => ClusterState::NoNodes,
            0 => ClusterState::Initializing,
            1 => ClusterState::SingleNode,
            _ => ClusterState::MultiNode(self.balance()),
        };
        self.had_nodes |= active > 0;
        let from = std::mem::replace(&mut self.state, state);
        let mut events = Vec::new();
        if from != state {
            let kind = EventKind::ClusterStateChanged { from, to: state };
            events.push(Event::new(cause.clone(), kind));
            if state == ClusterState::NoNodes {
                events.push(Event::new(cause.clone(), EventKind::NoActiveNodes));
            }
        }
        events
    }

    fn count(&self, status: NodeStatus) -> usize {
        self.counts.get(&status).copied().unwrap_or_default()
    }

    fn members(&self) -> impl Iterator<Item = &NodeEntry> {
        self.cluster.iter().flat_map(|map| map.nodes().iter().flatten())
    }

    fn balance(&self) -> Balance {
        let suspended = self.record.nodes.values().any(|note| note.suspended.is_some());
        if !self.record.failures.is_empty() || suspended {
            return Balance::Degraded;
        }
        let pending = self.tables.iter().any(|(name, map)| match map {
            Some(map) => self.is_pending(name, map),
            None => true,
        });
        if pending { Balance::Rebalancing } else { Balance::Stable }
    }

    /// How many shards have no owner although they are not quarantined.
    fn orphans(&self, name: &TableName, map: &ShardMap) -> usize {
        let parked = self.record.parked.get(name);
        let parked = parked
            .map_or(0, |parked| parked.keys().filter(|shard| map.owner(**shard).is_none()).count());
        map.orphans().saturating_sub(parked)
    }

    /// Whether a table has still to follow the members.
    fn is_pending(&self, name: &TableName, map: &ShardMap) -> bool {
        let Some(cluster) = &self.cluster else { return true };
        let unfinished = || TableNote::read(map.annex()).rebalance.is_some_and(|run| !run.done);
        if self.orphans(name, map) > 0 || !map.motions().is_empty() || unfinished() {
            return true;
        }
        let fits = |member: &NodeEntry, node: &NodeEntry| {
            member.incarnation == node.incarnation && member.status == NodeStatus::Active
        };
        let hosts = |at: usize| {
            let slot = u16::try_from(at).map_or(Slot::NOBODY, Slot::new);
            map.count(slot) > 0
        };
        // Most nodes are in the same slot of both maps; the others are found by their names.
        let (mut members, mut nodes) = (HashMap::new(), Vec::new());
        let slots = cluster.nodes().len().max(map.nodes().len());
        for at in 0..slots {
            match (in_slot(Some(cluster), at), in_slot(Some(map), at)) {
                (Some(member), Some(node)) if member.id == node.id => {
                    let left_out = member.status == NodeStatus::Active;
                    if !fits(member, node) && (left_out || hosts(at)) {
                        return true;
                    }
                }
                (member, node) => {
                    members.extend(member.map(|member| (&member.id, member)));
                    nodes.extend(node.map(|node| (node, hosts(at))));
                }
            }
        }
        for (node, hosts) in nodes {
            let member = members.remove(&node.id);
            let left_out = member.is_some_and(|member| member.status == NodeStatus::Active);
            if !member.is_some_and(|member| fits(member, node)) && (left_out || hosts) {
                return true;
            }
        }
        members.values().any(|member| member.status == NodeStatus::Active)
    }

    /// Whether a node owns a shard, or has still to stop one, in any table that this node knows.
    pub(crate) fn owns_any(&self, node: &NodeId) -> bool {
        self.tables.values().flatten().any(|map| {
            map.slot_of(node).is_some_and(|slot| {
                let mut motions = map.motions().values().flatten();
                map.count(slot) > 0 || motions.any(|motion| Slot::from(motion.other) == slot)
            })
        })
    }

    /// What the gauges show of this node.
    pub(crate) fn gauges(&self, me: &NodeId) -> Gauges {
        let maps = || self.tables.values().flatten();
        let mine = |map: &Arc<ShardMap>| map.slot_of(me).map_or(0, |slot| map.count(slot));
        Gauges {
            nodes: [NodeStatus::Active, NodeStatus::Draining, NodeStatus::Failed]
                .map(|status| (status, self.count(status))),
            mine: maps().map(mine).sum(),
            orphans: self
                .tables
                .iter()
                .filter_map(|(name, map)| Some(self.orphans(name, map.as_ref()?)))
                .sum(),
            parked: self.record.parked.values().map(BTreeMap::len).sum(),
            stuck: self.record.stuck.values().map(BTreeSet::len).sum(),
            unreachable: self.unreachable.len(),
            faults: self.faults.values().flat_map(BTreeMap::values).fold(
                [0; HostFault::NAMES.len()],
                |mut counts, fault| {
                    counts[fault.index()] += 1;
                    counts
                },
            ),
            leads: self.role == Role::Leader,
            gating: self.gating,
            unwritten: self.unwritten.is_some(),
            term: self.leader.as_ref().map(|leader| leader.term),
            rebalancing: self.state == ClusterState::MultiNode(Balance::Rebalancing),
        }
    }

    /// How things stand.
    pub(crate) fn status(&self) -> Status {
        let mut counts: BTreeMap<&NodeId, u32> = BTreeMap::new();
        for map in self.tables.values().flatten() {
            for (count, node) in map.counts().into_iter().zip(map.nodes()) {
                if let Some(node) = node {
                    *counts.entry(&node.id).or_default() += count;
                }
            }
        }
        let mut members: Vec<_> = self
            .members()
            .map(|node| Member {
                id: node.id.clone(),
                incarnation: node.incarnation,
                address: node.address.clone(),
                status: node.status,
                zone: node.zone.clone(),
                shards: counts.get(&node.id).copied().unwrap_or_default(),
            })
            .collect();
        members.sort_by(|a, b| a.id.cmp(&b.id));
        let tables = self.tables.iter().filter_map(|(name, map)| {
            let map = map.clone()?;
            Some(TableStatus {
                name: name.clone(),
                version: map.version(),
                shards: map.header().shards.get(),
                orphans: count(self.orphans(name, &map)),
                moving: count(map.motions().len()),
                map,
            })
        });
        Status {
            state: self.state,
            leader: self.leader.clone(),
            role: self.role,
            gating: self.gating,
            unwritten: self.unwritten.clone(),
            registered: self.registered,
            members,
            tables: tables.collect(),
            paused: self.record.paused,
            stuck: self
                .record
                .stuck
                .iter()
                .map(|(table, shards)| (table.clone(), shards.iter().copied().collect()))
                .collect(),
            parked: self
                .record
                .parked
                .iter()
                .map(|(table, shards)| (table.clone(), shards.keys().copied().collect()))
                .collect(),
            suspended: {
                let notes = self.record.nodes.iter();
                notes.filter(|(_, n)| n.suspended.is_some()).map(|(id, _)| id.clone()).collect()
            },
            store_away: self.store_away,
            partition_state: self.partition_state,
            unreachable: self.unreachable.to_vec(),
            went_down: self.went_down,
            faults: self
                .faults
                .iter()
                .filter(|(_, faults)| !faults.is_empty())
                .map(|(table, faults)| (table.clone(), faults.clone()))
                .collect(),
        }
    }
}

/// A number of shards, which never exceeds 2^24.
fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// The node with this index in a map's node table.
fn in_slot(map: Option<&ShardMap>, at: usize) -> Option<&NodeEntry> {
    map?.nodes().get(at)?.as_ref()
}

fn cause(table: &TableName, map: Option<&ShardMap>) -> EventSource {
    let version = map.map_or(Version::ZERO, ShardMap::version);
    EventSource::Version { table: table.clone(), version }
}

fn member_diff(
    old: Option<&NodeEntry>,
    new: &NodeEntry,
    record: &ClusterRecord,
    out: &mut Vec<EventKind>,
) {
    let (node, incarnation) = (new.id.clone(), new.incarnation);
    let before = old.map(|old| old.status);
    let hosted = before.is_some_and(NodeStatus::may_host);
    match new.status {
        NodeStatus::Failed if hosted => {
            let failure = record.nodes.get(&node).and_then(|note| note.failed.as_ref());
            let why = failure.map_or(RAN_OUT, |failure| &failure.why).to_owned();
            out.push(EventKind::NodeFailed { node, incarnation, why });
        }
        status if status.may_host() => {
            if !hosted {
                out.push(EventKind::NodeJoined { node: node.clone(), incarnation });
            } else if old.is_some_and(|old| old.incarnation != incarnation) {
                out.push(EventKind::NodeReplaced { node: node.clone(), incarnation });
            }
            match (before, status) {
                (Some(NodeStatus::Draining), NodeStatus::Active) => {
                    out.push(EventKind::NodeActive { node });
                }
                (before, NodeStatus::Draining) if before != Some(NodeStatus::Draining) => {
                    out.push(EventKind::NodeDraining { node });
                }
                _ => {}
            }
        }
        _ => {}
    }
}

fn record_diff(old: &ClusterRecord, new: &ClusterRecord, out: &mut Vec<EventKind>) {
    if old.paused != new.paused {
        let paused = EventKind::RebalancingPaused;
        out.push(if new.paused { paused } else { EventKind::RebalancingResumed });
    }
    for (table, shards) in &new.stuck {
        let before = old.stuck.get(table);
        let fresh = |shard: &&ShardId| before.is_none_or(|before| !before.contains(*shard));
        let shards: Arc<[ShardId]> = shards.iter().filter(fresh).copied().collect();
        if !shards.is_empty() {
            out.push(EventKind::HandoffStuck { table: table.clone(), shards });
        }
    }
    parked_diff(old, new, out);
    for (node, note) in &new.nodes {
        let before = old.nodes.get(node).and_then(|note| note.suspended);
        if let Some(incarnation) = note.suspended.filter(|run| Some(*run) != before) {
            out.push(EventKind::NodeSuspended { node: node.clone(), incarnation });
        }
    }
    for (table, why) in &new.failures {
        if old.failures.get(table) != Some(why) {
            let (table, why) = (table.clone(), why.clone());
            out.push(EventKind::RebalancingFailed { table, why });
        }
    }
    let tables: BTreeSet<&TableName> = old.pins.keys().chain(new.pins.keys()).collect();
    let none = BTreeMap::new();
    for table in tables {
        let before = old.pins.get(table).unwrap_or(&none);
        let after = new.pins.get(table).unwrap_or(&none);
        for (&shard, node) in after.iter().filter(|(shard, node)| before.get(shard) != Some(node)) {
            let (table, node) = (table.clone(), node.clone());
            out.push(EventKind::ShardPinned { table, shard, node });
        }
        for &shard in before.keys().filter(|shard| !after.contains_key(shard)) {
            out.push(EventKind::ShardUnpinned { table: table.clone(), shard });
        }
    }
}

fn parked_diff(old: &ClusterRecord, new: &ClusterRecord, out: &mut Vec<EventKind>) {
    let without = |of: &ClusterRecord,
                   table: &TableName,
                   other: &ClusterRecord|
     -> Arc<[ShardId]> {
        let kept = other.parked.get(table);
        let gone = |shard: &&ShardId| kept.is_none_or(|kept| !kept.contains_key(*shard));
        of.parked.get(table).into_iter().flat_map(BTreeMap::keys).filter(gone).copied().collect()
    };
    let tables: BTreeSet<&TableName> = old.parked.keys().chain(new.parked.keys()).collect();
    for table in tables {
        let (shards, freed) = (without(new, table, old), without(old, table, new));
        if let Some(first) = shards.first() {
            let parked = new.parked.get(table).and_then(|parked| parked.get(first));
            let hosts = parked.map_or_else(Vec::new, |parked| parked.hosts.clone()).into();
            out.push(EventKind::ShardsParked { table: table.clone(), shards, hosts });
        }
        if !freed.is_empty() {
            out.push(EventKind::ShardsUnparked { table: table.clone(), shards: freed });
        }
    }
}

/// What one version of a table changed: which primaries, if anybody hears it, and why.
fn table_diff(
    name: &TableName,
    old: Option<&ShardMap>,
    new: &ShardMap,
    heard: bool,
) -> Vec<EventKind> {
    let (mut assigned, mut migrated, mut orphaned) = (Vec::new(), Vec::new(), Vec::new());
    let shards = if heard { changed(old, new) } else { Vec::new() };
    for shard in shards {
        let before = old.and_then(|map| map.owner(shard)).map(|node| &node.id);
        let after = new.owner(shard).map(|node| &node.id);
        match (before, after) {
            (None, Some(to)) => assigned.push(Assigned { shard, to: to.clone() }),
            (Some(from), Some(to)) if from != to => {
                migrated.push(Migrated { shard, from: from.clone(), to: to.clone() });
            }
            (Some(_), None) => orphaned.push(shard),
            _ => {}
        }
    }
    let moving = old.filter(|_| heard).map_or_else(Vec::new, |old| begun(old, new));
    let table = || name.clone();
    let rebalance = TableNote::read(new.annex()).rebalance;
    let before = old.and_then(|old| TableNote::read(old.annex()).rebalance);
    let mut kinds = Vec::new();
    let begins = |run: &&Rebalance| before.as_ref().is_none_or(|old| old.since != run.since);
    if let Some(run) = rebalance.as_ref().filter(begins) {
        let reason = run.reason.clone();
        kinds.push(EventKind::RebalancingTriggered { table: table(), reason });
    }
    if !assigned.is_empty() {
        kinds.push(EventKind::ShardsAssigned { table: table(), shards: assigned.into() });
    }
    if !moving.is_empty() {
        kinds.push(EventKind::ShardsMoving { table: table(), shards: moving.into() });
    }
    if !migrated.is_empty() {
        kinds.push(EventKind::ShardsMigrated { table: table(), shards: migrated.into() });
    }
    if !orphaned.is_empty() {
        let shards: Arc<[ShardId]> = orphaned.into();
        kinds.push(EventKind::ShardsOrphaned { table: table(), shards });
    }
    let was_done = before.as_ref().is_some_and(|old| old.done);
    if let Some(run) = rebalance.filter(|run| run.done && (begins(&run) || !was_done)) {
        kinds.push(EventKind::RebalancingCompleted { table: table(), moved: run.moved });
    }
    kinds
}

/// The shards whose owners may differ. Most versions change few of very many, so that what is the same is
/// compared many at a time.
fn changed(old: Option<&ShardMap>, new: &ShardMap) -> Vec<ShardId> {
    /// So many shards are looked at together.
    const BLOCK: usize = 256;
    let Some(old) = old.filter(|old| old.header() == new.header()) else {
        return new.header().shards.shards().collect();
    };
    let reused = old.nodes().iter().zip(new.nodes());
    let reused: Vec<bool> = reused
        .map(|pair| matches!(pair, (Some(before), Some(after)) if before.id != after.id))
        .collect();
    let any_reused = reused.contains(&true);
    let reused = |slot: &u16| reused.get(usize::from(*slot)).copied().unwrap_or(false);
    let replicas = usize::from(new.header().replicas.get());
    let mut shards = Vec::new();
    let size = BLOCK * replicas;
    let pairs = old.raw_owners().chunks(size).zip(new.raw_owners().chunks(size));
    for (block, (before, after)) in pairs.enumerate() {
        if before == after && !any_reused {
            continue;
        }
        let rows = before.chunks_exact(replicas).zip(after.chunks_exact(replicas));
        for (row, (before, after)) in rows.enumerate() {
            if before != after || (any_reused && after.iter().any(reused)) {
                let shard = u32::try_from(block * BLOCK + row).unwrap_or(u32::MAX);
                shards.push(ShardId::new(shard));
            }
        }
    }
    shards
}

/// The primaries whose move began with this version.
fn begun(old: &ShardMap, new: &ShardMap) -> Vec<Migrated> {
    let to = |map: &ShardMap, shard: &ShardId| {
        let motions = map.motions().get(shard)?;
        let motion = motions
            .iter()
            .find(|motion| motion.replica == 0 && motion.phase == MotionPhase::MovingTo)?;
        Some(map.node(motion.other.into())?.id.clone())
    };
    let moving = new.motions().keys().filter_map(|shard| {
        let (from, to_now) = (new.owner(*shard)?.id.clone(), to(new, shard)?);
        let begins = to(old, shard).as_ref() != Some(&to_now) && from != to_now;
        begins.then_some(Migrated { shard: *shard, from, to: to_now })
    });
    moving.collect()
}

#[cfg(test)]
mod tests {
    use coord_core::{
        Address, AttemptId, Fence, LeaseName, Origin, ShardCount, TableHeader, TableUid,
    };

    use super::*;
    use crate::record::Failure;

    fn name() -> TableName {
        TableName::new("orders").expect("name")
    }

    fn id(node: &str) -> NodeId {
        NodeId::new(node).expect("name")
    }

    fn run(number: u128) -> Incarnation {
        Incarnation::from_u128(number)
    }

    fn leader(node: &str, term: u64) -> (Holder, Term) {
        let holder = Holder::new(id(node), run(1), AttemptId::from_u128(u128::from(term)));
        (holder, Term::from_u64(term))
    }

    /// A version after `base` with these nodes, whose shards go to them by index.
    fn after(
        base: &ShardMap,
        nodes: &[(&str, u128, NodeStatus)],
        owners: &[usize],
    ) -> Arc<ShardMap> {
        let mut edit = base.edit();
        let slots: Vec<Slot> = nodes
            .iter()
            .map(|(node, incarnation, status)| {
                let address = Address::new("localhost:1").expect("address");
                let entry = NodeEntry::new(id(node), run(*incarnation), address, *status);
                edit.put_node(entry).expect("room")
            })
            .collect();
        for (shard, owner) in (0..).map(ShardId::new).zip(owners) {
            edit.set_owner(shard, 0, slots[*owner]).expect("in range");
        }
        let origin = Origin::new("memory:1/c");
        let attempt = AttemptId::from_u128(1);
        let fence = Fence::new(LeaseName::leader(), Term::from_u64(1), attempt, origin);
        Arc::new(edit.finish(fence).expect("changed"))
    }

    fn empty(shards: u32) -> ShardMap {
        let header = TableHeader::new(ShardCount::new(shards).expect("count"));
        ShardMap::empty(header, TableUid::from_u128(1))
    }

    fn kinds(events: &[Event]) -> Vec<EventKind> {
        events.iter().map(|event| event.kind.clone()).collect()
    }

    /// Two active nodes that share four shards, and n1 leads.
    fn two() -> (Observer, Arc<ShardMap>, Arc<ShardMap>) {
        let nodes = [("n1", 1, NodeStatus::Active), ("n2", 1, NodeStatus::Active)];
        let cluster = after(&empty(1), &nodes, &[]);
        let table = after(&empty(4), &nodes, &[0, 0, 1, 1]);
        let mut observer = Observer::new([name()]);
        let (holder, term) = leader("n1", 1);
        observer.on_leader(Some((&holder, term)));
        observer.on_cluster(Some(Arc::clone(&cluster)), Arc::default());
        observer.on_table(&name(), Some(Arc::clone(&table)));
        assert_eq!(observer.status().state, ClusterState::MultiNode(Balance::Stable));
        (observer, cluster, table)
    }

    #[test]
    fn a_node_that_was_away_gets_the_difference() {
        let (mut observer, cluster, table) = two();
        // n2 failed, n3 joined and drained, n1 restarted, in versions that were never seen.
        let between = after(&cluster, &[("n3", 1, NodeStatus::Active)], &[]);
        let nodes = [
            ("n1", 2, NodeStatus::Active),
            ("n2", 1, NodeStatus::Failed),
            ("n3", 1, NodeStatus::Draining),
        ];
        let cluster = after(&between, &nodes, &[]);
        let mut record = ClusterRecord::default();
        record.paused = true;
        let failure = Failure::over(run(1), "test");
        record.note(&id("n2"), |note| note.failed = Some(failure));
        let record = Arc::new(record);
        let events = observer.on_cluster(Some(Arc::clone(&cluster)), Arc::clone(&record));
        let why = "test".to_owned();
        for kind in [
            EventKind::NodeReplaced { node: id("n1"), incarnation: run(2) },
            EventKind::NodeFailed { node: id("n2"), incarnation: run(1), why },
            EventKind::NodeJoined { node: id("n3"), incarnation: run(1) },
            EventKind::NodeDraining { node: id("n3") },
            EventKind::RebalancingPaused,
        ] {
            assert_eq!(kinds(&events).iter().filter(|heard| **heard == kind).count(), 1, "{kind}");
        }
        let cause =
            EventSource::Version { table: TableName::cluster(), version: cluster.version() };
        assert!(events.iter().all(|event| event.cause == cause));

        let to_third = after(&table, &nodes, &[0, 0, 2, 2]);
        let newest = after(&to_third, &nodes, &[0, 0, 0, 2]);
        let events = observer.on_table(&name(), Some(Arc::clone(&newest)));
        let went = |shard, to| Migrated { shard: ShardId::new(shard), from: id("n2"), to: id(to) };
        let shards: Arc<[Migrated]> = [went(2, "n1"), went(3, "n3")].into();
        assert!(kinds(&events).contains(&EventKind::ShardsMigrated { table: name(), shards }));

        // What is seen twice happened once.
        assert_eq!(observer.on_cluster(Some(cluster), record), []);
        assert_eq!(observer.on_table(&name(), Some(newest)), []);
    }

    #[test]
    fn a_leader_of_an_older_term_is_none() {
        let (mut observer, ..) = two();
        let (holder, term) = leader("n2", 7);
        let events = observer.on_leader(Some((&holder, term)));
        assert_eq!(events.len(), 2, "one term ends, another begins: {events:?}");
        assert_eq!(events[0].cause, EventSource::Term(Term::from_u64(1)));
        assert_eq!(events[1].kind, EventKind::LeaderElected { node: id("n2"), term });
        let (late, older) = leader("n1", 1);
        assert_eq!(observer.on_leader(Some((&late, older))), []);
        assert_eq!(observer.status().leader.map(|leader| leader.term), Some(term));
        assert_eq!(observer.on_leader(None).len(), 1);
        assert_eq!(observer.on_leader(None), []);
    }

    #[test]
    fn a_table_of_another_life_is_new() {
        let (mut observer, _, table) = two();
        let header = table.header().clone();
        let nodes = [("n1", 1, NodeStatus::Active)];
        let fresh = ShardMap::empty(header, TableUid::from_u128(2));
        let other = after(&fresh, &nodes, &[0; 4]);
        let events = observer.on_table(&name(), Some(other));
        let assigned = |kind: &EventKind| matches!(kind, EventKind::ShardsAssigned { shards, .. } if shards.len() == 4);
        assert!(kinds(&events).iter().any(assigned), "{events:?}");
    }
}
