//! The machine in a world of lost replies, late writes, stale views and second leaders.

use std::collections::BTreeSet;

use coord_core::{
    Address, AttemptId, LeaseName, NodeEvent, NodeInfo, NodeRecord, NodeStatus, Origin, ShardCount,
    TableUid, Term, Ttl,
};
use coord_placement::Balanced;
use proptest::prelude::*;

use super::*;
use crate::invariants::{Hosting, Hosts, check};

const SHARDS: u32 = 12;
const NODES: u8 = 5;
/// Within this after the last fault everything is as it should be; the rest of the hour is quiet.
const SETTLES_WITHIN: Duration = Duration::from_secs(20 * 60);
const HOUR: Duration = Duration::from_secs(3600);
/// More turns than an hour without faults takes.
const TURNS_MAX: usize = 2_000;

/// How a call goes wrong.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Nothing,
    /// It is refused for a conflict that is none.
    Conflict,
    /// It is applied, and its reply is lost.
    Lost,
    /// It is not applied, and nobody can tell.
    Unsent,
    /// It is applied later, and nobody can tell.
    Late,
}

#[derive(Clone, Debug)]
enum Act {
    /// A node registers as a new run, in place of its former one.
    Join(u8),
    Expire(u8),
    Deregister(u8),
    Heartbeat(u8),
    /// The watch shows what happened to the nodes.
    See,
    Ask(Command),
    Pass(Duration),
    /// The newest leader takes a turn, or the one before it.
    Turn(bool, Fault),
    /// Late writes arrive.
    Arrive,
    /// The lease goes to a new term.
    Elect,
    DeleteTable,
}

fn table() -> TableName {
    TableName::new("orders").expect("name")
}

fn id(number: u8) -> NodeId {
    NodeId::new(format!("n{number}")).expect("name")
}

fn fence(term: u64) -> Fence {
    let attempt = AttemptId::from_u128(u128::from(term));
    Fence::new(LeaseName::leader(), Term::from_u64(term), attempt, Origin::new("memory:1/c"))
}

struct Leader {
    machine: Machine,
    asked: Ticket,
    answered: BTreeSet<Ticket>,
    over: bool,
}

struct World {
    now: Moment,
    rules: Rules,
    specs: BTreeMap<TableName, Spec>,
    stored: BTreeMap<TableName, (Fence, Arc<ShardMap>)>,
    registered: BTreeMap<NodeId, NodeRecord>,
    news: Vec<NodeEvent>,
    view: View,
    late: Vec<(Fence, Step)>,
    /// Runs that fell silent, and so host nothing any more.
    silent: BTreeSet<Incarnation>,
    /// Until when runs that were evicted without having been silent may still host.
    run_on: BTreeMap<NodeId, (Incarnation, Moment)>,
    leaders: Vec<Leader>,
    marks: u64,
    last_write: Moment,
}

impl World {
    fn new(evict: bool, min_members: usize, restart_grace: Duration) -> Self {
        let judging = Judging { wait_ttl: false, from_heartbeat: true, evict };
        let settings = Settings { restart_grace, ..Settings::fast() };
        let rules = Rules { min_members, ..Rules::new(&settings, judging) };
        let header = TableHeader::new(ShardCount::new(SHARDS).expect("count"));
        let spec = Spec { header, strategy: Arc::new(Balanced::default()) };
        let now = Moment::from_origin(HOUR);
        let mut world = Self {
            now,
            rules,
            specs: BTreeMap::from([(table(), spec)]),
            stored: BTreeMap::new(),
            registered: BTreeMap::new(),
            news: vec![NodeEvent::Snapshot(Vec::new())],
            view: View::default(),
            late: Vec::new(),
            silent: BTreeSet::new(),
            run_on: BTreeMap::new(),
            leaders: Vec::new(),
            marks: 0,
            last_write: now,
        };
        world.elect();
        world
    }

    fn mark(&mut self) -> u64 {
        self.marks += 1;
        self.marks
    }

    fn elect(&mut self) {
        let term = self.leaders.len() as u64 + 1;
        let rules = self.rules.clone();
        let machine = Machine::new(id(0), fence(term), rules, &self.specs, self.now);
        self.leaders.push(Leader { machine, asked: 0, answered: BTreeSet::new(), over: false });
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Join(number) => self.join(number),
            Act::Expire(number) => {
                let node = id(number);
                if let Some(record) = self.registered.get(&node) {
                    let incarnation = record.info.incarnation;
                    self.news.push(NodeEvent::Expired { node: node.clone(), incarnation });
                    self.silent.insert(incarnation);
                    if !self.rules.judging.evict {
                        self.registered.remove(&node);
                    }
                }
            }
            Act::Deregister(number) => self.deregister(&id(number)),
            Act::Heartbeat(number) => {
                let mark = self.mark();
                if let Some(record) = self.registered.get_mut(&id(number)) {
                    record.revision = Revision::from_u64(mark);
                    self.news.push(NodeEvent::Updated(record.clone()));
                }
            }
            Act::See => self.see(),
            Act::Ask(command) => {
                let leader = self.leaders.last_mut().expect("one");
                leader.asked += 1;
                leader.machine.on_command(leader.asked, command);
            }
            Act::Pass(time) => self.now = self.now.plus(time),
            Act::Turn(newest, fault) => {
                let last = self.leaders.len() - 1;
                self.turn(if newest { last } else { last.saturating_sub(1) }, fault);
            }
            Act::Arrive => {
                for (fence, step) in std::mem::take(&mut self.late) {
                    self.apply(&fence, &step);
                }
            }
            Act::Elect => self.elect(),
            Act::DeleteTable => drop(self.stored.remove(&table())),
        }
    }

    fn join(&mut self, number: u8) {
        let (node, run) = (id(number), self.mark());
        let info = NodeInfo::new(node.clone(), Address::new("localhost:1").expect("address"))
            .with_incarnation(Incarnation::from_u128(u128::from(run)));
        let ttl = Ttl::new(self.rules.node_ttl).expect("in range");
        let record = NodeRecord::new(info, ttl, Revision::from_u64(run));
        self.registered.insert(node, record.clone());
        self.news.push(NodeEvent::Joined(record));
    }

    fn deregister(&mut self, node: &NodeId) {
        if let Some(record) = self.registered.remove(node) {
            let incarnation = record.info.incarnation;
            self.news.push(NodeEvent::Left { node: node.clone(), incarnation });
        }
    }

    fn see(&mut self) {
        for event in std::mem::take(&mut self.news) {
            self.view.on_event(event, self.rules.judging, self.now);
        }
    }

    /// A turn of a leader; the moment until which it waits, if it does.
    fn turn(&mut self, which: usize, fault: Fault) -> Option<Option<Moment>> {
        let now = self.now;
        let leader = &mut self.leaders[which];
        if leader.over {
            return Some(None);
        }
        leader.machine.on_view(Arc::new(self.view.clone()));
        let step = match leader.machine.next(now) {
            Turn::Do(step) => step,
            Turn::Wait(until) => return Some(until),
            Turn::Stop(stop) => {
                leader.over = true;
                assert_eq!(leader.machine.next(now), Turn::Stop(stop), "it does nothing more");
                return Some(None);
            }
        };
        assert_eq!(leader.machine.doing.as_ref(), Some(&step));
        verify(&leader.machine, &step);
        if which == self.leaders.len() - 1 {
            self.verify_run_on(&step);
        }
        let leader = &mut self.leaders[which];
        if let Step::Answer(ticket, _) = &step {
            assert!((1..=leader.asked).contains(ticket) && leader.answered.insert(*ticket));
        }
        let fence = leader.machine.fence.clone();
        let failed = || Outcome::Failed("test".to_owned());
        let outcome = match (fault, &step) {
            (Fault::Nothing, _) | (_, Step::Answer(..)) => self.apply(&fence, &step),
            (Fault::Conflict, Step::Publish(..)) => Outcome::Conflict,
            (Fault::Lost, _) => {
                self.apply(&fence, &step);
                failed()
            }
            (Fault::Late, Step::Publish(..) | Step::Evict(_)) => {
                self.late.push((fence, step));
                failed()
            }
            _ => failed(),
        };
        let leader = &mut self.leaders[which];
        leader.machine.on_outcome(outcome, now);
        assert_eq!(leader.machine.doing, None, "one step at a time");
        None
    }

    /// What a run that may still host has is left to it, unless its successor is there.
    fn verify_run_on(&self, step: &Step) {
        let machine = &self.leaders.last().expect("one").machine;
        let Step::Publish(name, _, next) = step else { return };
        let Some(previous) = machine.tables.get(name).and_then(|table| table.map.as_ref()) else {
            return;
        };
        for (node, (run, until)) in &self.run_on {
            let succeeded = matches!(machine.view.presence(node), Some(Presence::Present(seen))
                if seen.info.incarnation != *run);
            if *until <= self.now || succeeded || self.registered.contains_key(node) {
                continue;
            }
            for shard in previous.shards_of(node) {
                assert_eq!(next.owner(shard).map(|owner| &owner.id), Some(node), "it still runs");
            }
        }
    }

    /// What the store does.
    fn apply(&mut self, fence: &Fence, step: &Step) -> Outcome {
        match step {
            Step::Claim(name, header) => {
                let uid = TableUid::from_u128(u128::from(self.mark()));
                let new = || (fence.clone(), Arc::new(ShardMap::empty(header.clone(), uid)));
                let (highest, map) = self.stored.entry(name.clone()).or_insert_with(new);
                if !fence.passes(highest) {
                    return Outcome::Fenced;
                }
                *highest = fence.clone();
                Outcome::Claimed(Arc::clone(map))
            }
            Step::Load(name) => {
                Outcome::Loaded(self.stored.get(name).map(|(_, map)| Arc::clone(map)))
            }
            Step::Publish(name, expected, next) => {
                let Some((highest, map)) = self.stored.get_mut(name) else {
                    return Outcome::Fenced;
                };
                if !fence.passes(highest) {
                    return Outcome::Fenced;
                }
                if map == next {
                    return Outcome::Published;
                }
                if map.uid() != next.uid() || map.version() != *expected {
                    return Outcome::Conflict;
                }
                (*highest, *map) = (fence.clone(), Arc::clone(next));
                self.last_write = self.now;
                Outcome::Published
            }
            Step::Evict(suspect) => match self.registered.get(&suspect.node) {
                Some(record) if record.info.incarnation != suspect.incarnation => Outcome::Evicted,
                Some(record) if record.revision != suspect.revision => {
                    Outcome::Alive(record.info.incarnation, record.revision.clone())
                }
                _ => {
                    let run = suspect.incarnation;
                    if self.registered.contains_key(&suspect.node) && !self.silent.contains(&run) {
                        let until = self.now.plus(self.rules.node_ttl);
                        self.run_on.insert(suspect.node.clone(), (run, until));
                    }
                    self.deregister(&suspect.node);
                    Outcome::Evicted
                }
            },
            Step::Answer(..) => match self.stored.get(&TableName::cluster()) {
                Some((highest, _)) if highest == fence => Outcome::Answered,
                _ => Outcome::Fenced,
            },
        }
    }

    /// An hour without faults.
    fn calm(&mut self) -> Result<(), TestCaseError> {
        let end = self.now.plus(HOUR);
        let calm = self.now;
        for _ in 0..TURNS_MAX {
            self.see();
            let newest = self.leaders.len() - 1;
            if self.leaders[newest].over {
                self.elect();
                continue;
            }
            match self.turn(newest, Fault::Nothing) {
                None => {}
                Some(None) => prop_assert!(self.leaders[newest].over, "it waits for nothing"),
                Some(Some(until)) if until > end => {
                    prop_assert!(
                        self.last_write <= calm.plus(SETTLES_WITHIN),
                        "it goes on writing"
                    );
                    return Ok(());
                }
                Some(Some(until)) => self.now = self.now.plus(until.since(self.now)),
            }
        }
        Err(TestCaseError::fail("it never settles"))
    }

    fn check_settled(&self) -> Result<(), TestCaseError> {
        let leader = self.leaders.last().expect("one");
        prop_assert_eq!(leader.answered.len() as u64, leader.asked, "all are answered");
        let cluster = &self.stored[&TableName::cluster()].1;
        let record = ClusterRecord::read(cluster.annex()).expect("reads");
        for entry in cluster.nodes().iter().flatten() {
            let present = matches!(self.view.presence(&entry.id), Some(Presence::Present(_)));
            prop_assert_eq!(entry.status.may_host(), present, "{:?}", entry);
        }
        for seen in self.view.present() {
            let slot = cluster.slot_of(&seen.info.id).expect("a member");
            let entry = cluster.node(slot).expect("listed");
            prop_assert_eq!(entry.incarnation, seen.info.incarnation);
        }
        let map = &self.stored[&table()].1;
        let hosts = hosts(cluster);
        let active: Vec<&NodeId> =
            hosts.iter().filter(|(_, (_, how))| *how == Hosting::Takes).map(|(id, _)| id).collect();
        let waits = map.version() == Version::ZERO && active.len() < self.rules.min_members;
        if active.is_empty() || waits {
            return Ok(());
        }
        for shard in map.header().shards.shards() {
            let owner = map.owner(shard).map(|owner| &owner.id);
            // A drain waits while balancing is paused.
            let hosted = owner.is_some_and(|owner| {
                active.contains(&owner) || (record.paused && hosts.contains_key(owner))
            });
            prop_assert!(hosted, "{:?}", owner);
        }
        if !record.paused && record.pins.is_empty() {
            let shares: Vec<_> = active.iter().map(|id| map.shards_of(id).count()).collect();
            let (least, most) = (shares.iter().min(), shares.iter().max());
            prop_assert!(most.zip(least).is_some_and(|(most, least)| most - least <= 1));
        }
        Ok(())
    }
}

/// What the members may do with shards, as `_cluster` says it.
fn hosts(cluster: &ShardMap) -> Hosts {
    let record = ClusterRecord::read(cluster.annex()).expect("reads");
    let hosting = |entry: &NodeEntry| match entry.status {
        NodeStatus::Active => Some(Hosting::Takes),
        NodeStatus::Draining => Some(Hosting::Keeps),
        NodeStatus::Failed => {
            let failed = record.nodes.get(&entry.id).and_then(|note| note.failed.as_ref());
            failed.and_then(|failed| failed.runs_on).map(|_| Hosting::Keeps)
        }
        _ => None,
    };
    let host = |entry: &NodeEntry| Some((entry.id.clone(), (entry.incarnation, hosting(entry)?)));
    cluster.nodes().iter().flatten().filter_map(host).collect()
}

/// What is to be published follows from what was read, and keeps the invariants by what `_cluster`
/// says of the members.
fn verify(machine: &Machine, step: &Step) {
    let Step::Publish(name, expected, next) = step else { return };
    let cluster = machine.cluster.as_ref().expect("claimed first");
    if name.is_reserved() {
        assert_eq!((*expected, next.uid()), (cluster.version(), cluster.uid()));
        assert_eq!((next.version(), next.writer()), (expected.next(), Some(&machine.fence)));
        return;
    }
    let previous = machine.tables[name].map.as_ref().expect("claimed first");
    assert_eq!(*expected, previous.version());
    assert_eq!(check(previous, next, &hosts(cluster), &machine.fence), Ok(()));
}

fn command() -> impl Strategy<Value = Command> {
    let reason = || "test".to_owned();
    (0..10_u8, 0..NODES, 0..NODES, 0..SHARDS).prop_map(move |(kind, one, two, shard)| {
        let (table, node, shard) = (table(), id(one), ShardId::new(shard));
        match kind {
            0 => Command::Drain { node },
            1 => Command::Undrain { node },
            2 => Command::Leave { node },
            3 => Command::MarkNodeFailed { node, why: reason() },
            4 => Command::Pin { table, shard, node },
            5 => Command::Unpin { table, shard },
            6 => Command::AssignShards { table, owners: [(shard, vec![id(two)])].into() },
            7 => Command::RebalanceShards { table: None, reason: reason() },
            8 if one == 0 => Command::Pause,
            8 => Command::Resume,
            _ if one == 0 => Command::StepDown,
            _ => Command::TransferLeadership { to: node },
        }
    })
}

fn act() -> impl Strategy<Value = Act> {
    let fault = prop_oneof![
        6 => Just(Fault::Nothing),
        1 => Just(Fault::Conflict),
        1 => Just(Fault::Lost),
        1 => Just(Fault::Unsent),
        1 => Just(Fault::Late),
    ];
    prop_oneof![
        4 => (0..NODES).prop_map(Act::Join),
        2 => (0..NODES).prop_map(Act::Expire),
        1 => (0..NODES).prop_map(Act::Deregister),
        1 => (0..NODES).prop_map(Act::Heartbeat),
        5 => Just(Act::See),
        3 => command().prop_map(Act::Ask),
        8 => (0..15_000_u64).prop_map(|ms| Act::Pass(Duration::from_millis(ms))),
        24 => (proptest::bool::weighted(0.85), fault).prop_map(|(who, how)| Act::Turn(who, how)),
        2 => Just(Act::Arrive),
        1 => Just(Act::Elect),
        1 => (0..4_u8).prop_map(|n| if n == 0 { Act::DeleteTable } else { Act::See }),
    ]
}

proptest! {
    #[test]
    fn whatever_happens_it_keeps_the_invariants_and_settles_afterwards(
        evict in any::<bool>(),
        min_members in 1..3_usize,
        restart_grace in prop_oneof![Just(Duration::ZERO), Just(Duration::from_secs(20))],
        acts in proptest::collection::vec(act(), 1..150),
    ) {
        let mut world = World::new(evict, min_members, restart_grace);
        for act in acts {
            world.act(act);
        }
        world.act(Act::Arrive);
        world.calm()?;
        world.check_settled()?;
        // Nothing that a former leader still wants to write passes.
        let stored = world.stored.clone();
        for former in 0..world.leaders.len() - 1 {
            let ends = (0..TURNS_MAX).any(|_| world.turn(former, Fault::Nothing).is_some());
            prop_assert!(ends, "a former leader goes on for ever");
        }
        prop_assert!(stored == world.stored);
    }
}
