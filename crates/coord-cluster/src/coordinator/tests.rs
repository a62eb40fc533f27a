//! Commands whose writes go wrong, on a store that is played here.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use coord_core::{
    Address, AttemptId, Fence, Incarnation, LeaseName, Moment, NodeEvent, NodeId, NodeInfo,
    NodeRecord, NodeStatus, Origin, Report, Revision, ShardCount, ShardId, ShardMap, TableHeader,
    TableName, TableUid, Term, Ttl,
};
use coord_placement::Balanced;

use super::machine::{Machine, Outcome, Rules, Spec, Step, Stop, Ticket, Turn, Verdict};
use super::roster::Suspect;
use crate::Settings;
use crate::commands::{Command, Refusal, Reply};
use crate::handoff::Handoff;
use crate::membership::{Judging, View};
use crate::record::{ClusterRecord, Failure};

const JUDGING: Judging = Judging { wait_ttl: false, from_heartbeat: true, evict: false };
const TTL: Duration = Duration::from_secs(9);
const TURNS_MAX: usize = 1_000;

fn table() -> TableName {
    TableName::new("orders").expect("name")
}

fn id(name: &str) -> NodeId {
    NodeId::new(name).expect("name")
}

fn run(number: u128) -> Incarnation {
    Incarnation::from_u128(number)
}

fn specs() -> BTreeMap<TableName, Spec> {
    let header = TableHeader::new(ShardCount::new(12).expect("count"));
    BTreeMap::from([(
        table(),
        Spec { header, strategy: Arc::new(Balanced::default()), handoff: Handoff::Exclusive },
    )])
}

fn machine(term: u64, now: Moment) -> Machine {
    let attempt = AttemptId::from_u128(u128::from(term));
    let origin = Origin::new("memory:1/c");
    let fence = Fence::new(LeaseName::leader(), Term::from_u64(term), attempt, origin);
    let rules = Rules::new(&Settings::fast(), JUDGING);
    Machine::new(id("n1"), fence, rules, &specs(), now)
}

/// A leader and its store. A step that is not carried out by [`perform`](Self::perform) has no effect.
struct Desk {
    now: Moment,
    machine: Machine,
    stored: BTreeMap<TableName, Arc<ShardMap>>,
    registered: BTreeMap<NodeId, NodeRecord>,
    view: View,
    revision: u64,
    /// Whether the nodes report what they stop.
    reports: bool,
    asked: Ticket,
    /// With what was to be remembered when the answer came.
    answers: Vec<(Ticket, Reply, ClusterRecord)>,
}

impl Desk {
    /// Three nodes n1 to n3 with four shards each.
    fn new() -> Self {
        let now = Moment::from_origin(Duration::from_secs(3600));
        let mut desk = Self {
            now,
            machine: machine(1, now),
            stored: BTreeMap::new(),
            registered: BTreeMap::new(),
            view: View::default(),
            revision: 0,
            reports: true,
            asked: 0,
            answers: Vec::new(),
        };
        desk.see(NodeEvent::Snapshot(Vec::new()));
        for name in ["n1", "n2", "n3"] {
            desk.join(name, 1);
        }
        desk.pass(Duration::from_secs(5));
        assert_eq!(["n1", "n2", "n3"].map(|name| desk.shards_of(name)), [4; 3]);
        desk
    }

    fn see(&mut self, event: NodeEvent) {
        self.view.on_event(event, JUDGING, self.now);
        self.machine.on_view(Arc::new(self.view.clone()));
    }

    fn join(&mut self, name: &str, incarnation: u128) {
        let record = self.register(name, incarnation);
        self.see(NodeEvent::Joined(record));
    }

    /// Registers a run, which the watch does not show yet.
    fn register(&mut self, name: &str, incarnation: u128) -> NodeRecord {
        self.revision += 1;
        let address = Address::new("localhost:1").expect("address");
        let info = NodeInfo::new(id(name), address).with_incarnation(run(incarnation));
        let ttl = Ttl::new(TTL).expect("ttl");
        let record = NodeRecord::new(info, ttl, Revision::from_u64(self.revision));
        self.registered.insert(id(name), record.clone());
        record
    }

    fn elect(&mut self, term: u64) {
        self.machine = machine(term, self.now);
        self.machine.on_view(Arc::new(self.view.clone()));
    }

    fn ask(&mut self, command: Command) -> Ticket {
        self.asked += 1;
        self.machine.on_command(self.asked, command);
        self.asked
    }

    fn fail_n2(&mut self) -> Ticket {
        self.ask(Command::MarkNodeFailed { node: id("n2"), why: "test".to_owned() })
    }

    /// n2 is downed, which has been written when this returns.
    fn down_n2(&mut self) {
        let verdict = Verdict { incarnation: run(1), why: "downed".to_owned() };
        self.machine.on_verdicts(&[(id("n2"), verdict)].into());
        self.pass(Duration::from_secs(1));
        let failure = self.failure("n2").expect("written down first");
        assert!(failure.downed && failure.runs_on == Ttl::new(TTL).ok(), "{failure:?}");
        assert!(self.registered.contains_key(&id("n2")), "it is left to go by itself");
        assert_eq!(self.shards_of("n2"), 4, "it may still run");
    }

    fn perform(&mut self, step: &Step) -> Outcome {
        match step {
            Step::Claim(name, header) => {
                let new = || Arc::new(ShardMap::empty(header.clone(), TableUid::from_u128(1)));
                Outcome::Claimed(Arc::clone(self.stored.entry(name.clone()).or_insert_with(new)))
            }
            Step::Look => {
                let looks = self.view.looks() + 1;
                self.view.on_looked(looks, self.now);
                self.see(NodeEvent::Snapshot(self.registered.values().cloned().collect()));
                Outcome::Looked
            }
            Step::Load(name) => Outcome::Loaded(self.stored.get(name).cloned()),
            Step::Publish(name, expected, map) => {
                if self.stored.get(name).map(|map| map.version()) != Some(*expected) {
                    return Outcome::Conflict;
                }
                self.stored.insert(name.clone(), Arc::clone(map));
                self.report(name);
                Outcome::Published
            }
            Step::Plan(_, job) => Outcome::Planned(job.plan()),
            Step::Evict(Suspect { node, incarnation, revision }) => {
                match self.registered.get(node) {
                    Some(record) if record.revision == *revision => {
                        self.registered.remove(node);
                        // As after a deregistration.
                        let (node, incarnation) = (node.clone(), *incarnation);
                        self.see(NodeEvent::Left { node, incarnation });
                        Outcome::Evicted
                    }
                    Some(record) => {
                        Outcome::Alive(record.info.incarnation, record.revision.clone())
                    }
                    None => Outcome::Evicted,
                }
            }
            Step::Answer(ticket, reply) => {
                self.answers.push((*ticket, reply.clone(), self.record()));
                Outcome::Answered
            }
        }
    }

    /// Every node has applied the newest version of a table, and hosts nothing that would have to stop.
    fn report(&mut self, name: &TableName) {
        if name.is_reserved() || !self.reports {
            return;
        }
        let report = Report::new(self.map().uid(), self.map().version());
        let nodes: Vec<NodeId> = self.registered.keys().cloned().collect();
        for node in nodes {
            self.revision += 1;
            let revision = Revision::from_u64(self.revision);
            let Some(record) = self.registered.get_mut(&node) else { continue };
            record.info.reports.insert(name.clone(), report.clone());
            record.revision = revision;
            let record = record.clone();
            self.see(NodeEvent::Updated(record));
        }
    }

    fn outcome(&mut self, outcome: Outcome) {
        self.machine.on_outcome(outcome, self.now);
    }

    fn lose(&mut self) {
        self.outcome(Outcome::Failed("no answer".to_owned()));
    }

    /// Carries steps out until this one, which the test decides on.
    fn until(&mut self, wanted: impl Fn(&Step) -> bool) -> Step {
        for _ in 0..TURNS_MAX {
            match self.machine.next(self.now) {
                Turn::Do(step) if wanted(&step) => return step,
                Turn::Do(step) => {
                    let outcome = self.perform(&step);
                    self.outcome(outcome);
                }
                Turn::Wait(Some(until)) => self.now = until.max(self.now),
                other => panic!("it never comes: {other:?}"),
            }
        }
        panic!("it never comes");
    }

    /// Carries all steps out that come within this time.
    fn pass(&mut self, time: Duration) {
        let end = self.now.plus(time);
        for _ in 0..TURNS_MAX {
            match self.machine.next(self.now) {
                Turn::Do(step) => {
                    let outcome = self.perform(&step);
                    self.outcome(outcome);
                }
                Turn::Wait(Some(until)) if until <= end => self.now = until,
                Turn::Wait(_) => {
                    self.now = end;
                    return;
                }
                Turn::Stop(stop) => panic!("it stops: {stop:?}"),
            }
        }
        panic!("it never comes to rest");
    }

    fn record(&self) -> ClusterRecord {
        let cluster = self.stored.get(&TableName::cluster()).expect("claimed");
        ClusterRecord::read(cluster.annex()).expect("reads")
    }

    fn failure(&self, name: &str) -> Option<Failure> {
        self.record().nodes.get(&id(name))?.failed.clone()
    }

    fn map(&self) -> &ShardMap {
        self.stored.get(&table()).expect("claimed")
    }

    fn shards_of(&self, name: &str) -> usize {
        let mut shards = self.map().header().shards.shards();
        let of = |shard| self.map().owner(shard).is_some_and(|owner| owner.id == id(name));
        shards.by_ref().filter(|shard| of(*shard)).count()
    }

    fn shard_of(&self, name: &str) -> ShardId {
        let mut shards = self.map().header().shards.shards();
        let of = |shard| self.map().owner(shard).is_some_and(|owner| owner.id == id(name));
        shards.find(|shard| of(*shard)).expect("it has some")
    }

    /// The one answer, and what was remembered when it came.
    fn answer(&self, ticket: Ticket) -> (&Reply, &ClusterRecord) {
        let mut answers = self.answers.iter().filter(|(answered, ..)| *answered == ticket);
        let (_, reply, record) = answers.next().expect("answered");
        assert_eq!(answers.next(), None, "answered twice");
        (reply, record)
    }

    /// The shards of n2 stay for its TTL from now on, and go then.
    #[track_caller]
    fn keeps_for_its_ttl(&mut self) {
        self.pass(TTL - Duration::from_secs(1));
        assert_eq!(self.shards_of("n2"), 4, "it may still run");
        self.pass(Duration::from_secs(3));
        assert_eq!(self.shards_of("n2"), 0);
    }
}

fn is_cluster(step: &Step) -> bool {
    matches!(step, Step::Publish(name, ..) if *name == TableName::cluster())
}

fn is_evict(step: &Step) -> bool {
    matches!(step, Step::Evict(_))
}

fn is_answer(step: &Step) -> bool {
    matches!(step, Step::Answer(..))
}

#[test]
fn a_command_is_done_by_its_own_write_only() {
    let mut desk = Desk::new();
    let ticket = desk.ask(Command::Drain { node: id("n2") });
    desk.until(is_cluster);
    desk.lose();
    desk.join("n4", 1);
    desk.pass(Duration::from_secs(5));
    let (reply, record) = desk.answer(ticket);
    assert!(reply.is_done(), "{reply:?}");
    assert!(record.nodes.get(&id("n2")).is_some_and(|note| note.drain), "{record:?}");
    assert_eq!(desk.shards_of("n2"), 0);
}

#[test]
fn a_command_that_is_tried_again_reverts_nothing() {
    let mut desk = Desk::new();
    let ticket = desk.ask(Command::Pause);
    desk.until(is_cluster);
    desk.lose();
    desk.see(NodeEvent::Expired { node: id("n3"), incarnation: run(1) });
    desk.pass(Duration::from_secs(5));
    let (reply, record) = desk.answer(ticket);
    assert!(reply.is_done() && record.paused, "{reply:?} {record:?}");
    assert!(record.nodes.get(&id("n3")).is_some_and(|note| note.failed.is_some()), "{record:?}");
    assert!(desk.failure("n3").is_some());
}

#[test]
fn a_store_that_takes_no_write_makes_a_command_fail() {
    let mut desk = Desk::new();
    let ticket = desk.ask(Command::Pause);
    for _ in 0..5 {
        desk.until(is_cluster);
        desk.lose();
    }
    desk.pass(Duration::from_secs(60));
    let (reply, record) = desk.answer(ticket);
    assert!(matches!(reply, Reply::Refused(Refusal::Failed { .. })), "{reply:?}");
    assert!(!record.paused);
}

#[test]
fn a_verdict_outlives_a_leader_that_did_not_come_to_evict() {
    let mut desk = Desk::new();
    desk.fail_n2();
    desk.until(is_evict);
    let failure = desk.failure("n2").expect("written down first");
    assert_eq!((failure.incarnation, failure.runs_on), (run(1), Ttl::new(TTL).ok()));
    assert!(desk.registered.contains_key(&id("n2")));
    desk.elect(2);
    let step = desk.until(is_evict);
    let outcome = desk.perform(&step);
    assert_eq!(outcome, Outcome::Evicted);
    desk.outcome(outcome);
    desk.keeps_for_its_ttl();
}

#[test]
fn a_leader_that_dies_after_an_eviction_leaves_the_shards_where_they_may_run() {
    let mut desk = Desk::new();
    desk.fail_n2();
    let step = desk.until(is_evict);
    assert_eq!(desk.perform(&step), Outcome::Evicted);
    desk.elect(2);
    desk.keeps_for_its_ttl();
    assert!(desk.failure("n2").is_some());
}

#[test]
fn a_downed_run_that_goes_by_itself_leaves_its_shards_at_once() {
    let (node, incarnation) = (id("n2"), run(1));
    let left = NodeEvent::Left { node: node.clone(), incarnation };
    for gone in [left, NodeEvent::Expired { node, incarnation }] {
        let mut desk = Desk::new();
        desk.down_n2();
        desk.registered.remove(&id("n2"));
        desk.see(gone);
        desk.pass(Duration::from_secs(1));
        assert_eq!(desk.shards_of("n2"), 0);
        assert!(desk.failure("n2").is_some_and(|f| f.downed && f.runs_on.is_none()));
    }
}

#[test]
fn a_downed_run_that_does_not_go_is_evicted_and_keeps_its_shards_for_its_ttl() {
    let mut desk = Desk::new();
    desk.down_n2();
    let start = desk.now;
    let step = desk.until(is_evict);
    assert!(desk.now.since(start) >= TTL - Duration::from_secs(1), "{:?}", desk.now.since(start));
    assert_eq!(desk.perform(&step), Outcome::Evicted);
    desk.lose();
    desk.keeps_for_its_ttl();
}

#[test]
fn a_new_leader_does_not_know_how_a_downed_run_went() {
    let mut desk = Desk::new();
    desk.down_n2();
    let (node, incarnation) = (id("n2"), run(1));
    desk.registered.remove(&node);
    desk.see(NodeEvent::Left { node, incarnation });
    desk.elect(2);
    desk.keeps_for_its_ttl();
}

#[test]
fn a_downed_run_that_another_one_followed_is_not_declared_failed() {
    let mut desk = Desk::new();
    desk.join("n2", 2);
    let verdict = Verdict { incarnation: run(1), why: "downed".to_owned() };
    desk.machine.on_verdicts(&[(id("n2"), verdict)].into());
    desk.pass(Duration::from_secs(1));
    assert_eq!(desk.failure("n2"), None);
}

#[test]
fn a_member_is_as_old_as_the_version_that_took_its_run_in() {
    let mut desk = Desk::new();
    let since = |desk: &Desk, name| {
        let cluster = &desk.stored[&TableName::cluster()];
        let slot = cluster.slot_of(&id(name)).expect("a member");
        cluster.node(slot).and_then(|entry| entry.since).expect("told")
    };
    let before = since(&desk, "n2");
    let version = desk.stored[&TableName::cluster()].version();
    desk.join("n4", 1);
    desk.ask(Command::Drain { node: id("n2") });
    desk.pass(Duration::from_secs(5));
    assert_eq!(since(&desk, "n2"), before, "a status does not change it");
    assert!(since(&desk, "n4") > version);
    desk.join("n2", 2);
    desk.pass(Duration::from_secs(5));
    assert!(since(&desk, "n2") > since(&desk, "n4"), "another run is as young as any");
    assert!(desk.map().nodes().iter().flatten().all(|entry| entry.since.is_none()));
}

#[test]
fn an_eviction_whose_reply_is_lost_is_no_leave() {
    let mut desk = Desk::new();
    let ticket = desk.fail_n2();
    let step = desk.until(is_evict);
    assert_eq!(desk.perform(&step), Outcome::Evicted);
    desk.lose();
    desk.keeps_for_its_ttl();
    assert!(desk.answer(ticket).0.is_done());
}

#[test]
fn a_verdict_says_nothing_of_the_run_that_took_over() {
    let mut desk = Desk::new();
    let ticket = desk.fail_n2();
    let step = desk.until(is_evict);
    let successor = desk.register("n2", 2);
    let outcome = desk.perform(&step);
    assert!(matches!(outcome, Outcome::Alive(run, _) if run == Incarnation::from_u128(2)));
    desk.outcome(outcome);
    desk.see(NodeEvent::Joined(successor));
    desk.pass(TTL);
    assert!(desk.answer(ticket).0.is_done());
    assert_eq!(desk.failure("n2"), None);
    assert!(desk.registered.contains_key(&id("n2")));
}

#[test]
fn a_verdict_stands_while_the_node_writes_its_registration() {
    let mut desk = Desk::new();
    let ticket = desk.fail_n2();
    let step = desk.until(is_evict);
    desk.register("n2", 1);
    let outcome = desk.perform(&step);
    assert!(matches!(outcome, Outcome::Alive(..)));
    desk.outcome(outcome);
    desk.keeps_for_its_ttl();
    assert!(desk.answer(ticket).0.is_done());
}

#[test]
fn nobody_is_given_a_shard_that_may_still_run_elsewhere() {
    let mut desk = Desk::new();
    desk.fail_n2();
    desk.pass(Duration::from_secs(2));
    let shard = desk.shard_of("n2");
    let take = |owners: &[&str]| {
        let owners = owners.iter().map(|name| id(name)).collect();
        Command::AssignShards { table: table(), owners: BTreeMap::from([(shard, owners)]) }
    };
    let refused = desk.ask(take(&["n1"]));
    let orphaned = desk.ask(take(&[]));
    let kept = desk.ask(take(&["n2"]));
    desk.pass(Duration::from_secs(1));
    let refusal = Reply::Refused(Refusal::MayStillRun { node: id("n2"), shard });
    assert_eq!(desk.answer(refused).0, &refusal);
    assert_eq!(desk.answer(orphaned).0, &refusal);
    assert!(desk.answer(kept).0.is_done());
    desk.pass(TTL);
    let granted = desk.ask(take(&["n1"]));
    desk.pass(Duration::from_secs(1));
    assert!(desk.answer(granted).0.is_done());
}

#[test]
fn an_answer_is_brought_before_the_term_ends() {
    let mut desk = Desk::new();
    let ticket = desk.ask(Command::StepDown);
    desk.until(is_answer);
    desk.lose();
    let step = desk.until(is_answer);
    let outcome = desk.perform(&step);
    desk.outcome(outcome);
    assert_eq!(desk.machine.next(desk.now), Turn::Stop(Stop::SteppedDown));
    assert!(desk.answer(ticket).0.is_done());
}

#[test]
fn an_answer_that_cannot_be_brought_holds_nothing_up_for_long() {
    let mut desk = Desk::new();
    desk.ask(Command::StepDown);
    let began = desk.now;
    for _ in 0..4 {
        desk.until(is_answer);
        desk.lose();
    }
    match desk.machine.next(desk.now) {
        Turn::Wait(Some(until)) => desk.now = until,
        other => panic!("the store failed: {other:?}"),
    }
    assert_eq!(desk.machine.next(desk.now), Turn::Stop(Stop::SteppedDown));
    assert!(desk.now.since(began) <= Duration::from_secs(15));
}

#[test]
fn a_handoff_past_its_timeout_is_reported_and_not_forced() {
    let mut desk = Desk::new();
    desk.reports = false;
    desk.ask(Command::Drain { node: id("n2") });
    let timeout = Settings::fast().handoff_timeout;
    desk.pass(timeout - Duration::from_secs(1));
    assert!(desk.record().stuck.is_empty());
    desk.pass(Duration::from_secs(2));
    // One in ten of twelve shards, at least one.
    assert_eq!(desk.record().stuck[&table()].len(), 1);
    desk.pass(10 * timeout);
    assert_eq!(desk.shards_of("n2"), 4, "nothing is forced");
    // A new leader goes on with the move that it finds, and reports it anew.
    desk.elect(2);
    desk.pass(timeout + Duration::from_secs(2));
    assert_eq!(desk.record().stuck[&table()].len(), 1);
    assert_eq!(desk.map().motions().len(), 1);
    desk.reports = true;
    desk.report(&table());
    desk.pass(Duration::from_secs(5));
    assert_eq!(desk.shards_of("n2"), 0);
    assert!(desk.record().stuck.is_empty());
}

#[test]
fn a_new_leader_goes_on_with_the_moves_that_it_finds() {
    let mut desk = Desk::new();
    desk.reports = false;
    desk.join("n4", 1);
    desk.pass(Duration::from_secs(5));
    let begun = desk.map().motions().clone();
    assert_eq!(begun.len(), 1);
    desk.elect(2);
    desk.pass(Duration::from_secs(5));
    assert_eq!(desk.map().motions(), &begun, "neither begun anew nor given up");
    desk.reports = true;
    desk.report(&table());
    desk.pass(Duration::from_secs(5));
    assert_eq!(desk.shards_of("n4"), 3);
}

#[test]
fn a_successor_hosts_once_its_predecessor_is_certainly_over() {
    for proof in [false, true] {
        let mut desk = Desk::new();
        let mut successor = desk.register("n2", 2);
        if proof {
            successor.info.ended.insert(run(1));
        }
        desk.registered.insert(id("n2"), successor.clone());
        desk.see(NodeEvent::Joined(successor));
        let runs = |desk: &Desk| {
            let slot = desk.map().slot_of(&id("n2")).expect("listed");
            desk.map().node(slot).expect("listed").incarnation
        };
        let epoch = desk.map().epoch(desk.shard_of("n2"));
        desk.pass(TTL - Duration::from_secs(1));
        assert_eq!(runs(&desk), run(if proof { 2 } else { 1 }));
        desk.pass(Duration::from_secs(3));
        assert_eq!((runs(&desk), desk.shards_of("n2")), (run(2), 4), "no move");
        assert!(desk.map().epoch(desk.shard_of("n2")) > epoch);
    }
}

#[test]
fn what_a_successor_reports_says_nothing_of_its_predecessor() {
    let mut desk = Desk::new();
    desk.reports = false;
    desk.ask(Command::Drain { node: id("n2") });
    desk.pass(Duration::from_secs(2));
    assert_eq!(desk.map().motions().len(), 1);
    let mut successor = desk.register("n2", 2);
    let report = Report::new(desk.map().uid(), coord_core::Version::new(u64::MAX));
    successor.info.reports.insert(table(), report);
    desk.registered.insert(id("n2"), successor.clone());
    desk.see(NodeEvent::Joined(successor));
    desk.pass(TTL - Duration::from_secs(1));
    assert_eq!(desk.shards_of("n2"), 4, "its predecessor may still run them");
    desk.reports = true;
    desk.pass(Duration::from_secs(10));
    assert_eq!(desk.shards_of("n2"), 0);
}

#[test]
fn the_successor_of_a_condemned_run_waits_also_under_a_new_leader() {
    let mut desk = Desk::new();
    desk.fail_n2();
    desk.pass(Duration::from_secs(1));
    desk.join("n2", 2);
    desk.pass(Duration::from_secs(1));
    assert!(desk.record().nodes[&id("n2")].former.contains_key(&run(1)));
    desk.elect(2);
    desk.pass(TTL - Duration::from_secs(2));
    let slot = desk.map().slot_of(&id("n2")).expect("listed");
    assert_eq!(desk.map().node(slot).expect("listed").incarnation, run(1));
    desk.pass(Duration::from_secs(5));
    assert_eq!(desk.map().node(slot).expect("listed").incarnation, run(2));
    assert_eq!(desk.record().nodes.get(&id("n2")), None);
}

#[test]
fn too_many_that_vanish_at_once_are_suspended_until_they_return_or_an_operator_speaks() {
    let mut desk = Desk::new();
    for name in ["n4", "n5", "n6"] {
        desk.join(name, 1);
    }
    desk.pass(Duration::from_secs(60));
    assert_eq!(desk.shards_of("n6"), 2);
    let lost = ["n3", "n4", "n5", "n6"];
    for name in lost {
        desk.see(NodeEvent::Expired { node: id(name), incarnation: run(1) });
        desk.registered.remove(&id(name));
    }
    desk.pass(Duration::from_secs(3600));
    // Half of six may go; which ones does not matter.
    let suspended = |desk: &Desk| {
        let record = desk.record();
        lost.iter()
            .filter(|name| record.nodes.get(&id(name)).is_some_and(|note| note.suspended.is_some()))
            .map(|name| (*name).to_owned())
            .collect::<Vec<_>>()
    };
    let held = suspended(&desk);
    assert_eq!(held.len(), 1, "{held:?}");
    assert_eq!(desk.shards_of(&held[0]), 2, "its shards stay");
    let cluster = desk.stored.get(&TableName::cluster()).expect("claimed");
    let failed = cluster.nodes().iter().flatten().filter(|n| n.status == NodeStatus::Failed);
    assert_eq!(failed.count(), 0, "they are forgotten by now");
    let why = "test".to_owned();
    let ticket = desk.ask(Command::MarkNodeFailed { node: id(&held[0]), why });
    desk.pass(Duration::from_secs(5));
    assert!(desk.answer(ticket).0.is_done());
    assert_eq!((desk.shards_of(&held[0]), suspended(&desk).len()), (0, 0));
}

#[test]
fn a_run_joins_once_it_and_the_leader_reach_each_other_where_that_is_told() {
    let mut desk = Desk::new();
    let tell = |desk: &mut Desk, name: &str, incarnation, row: &[&str]| {
        let mut record = desk.register(name, incarnation);
        record.info.unreachable = Some(row.iter().map(|name| id(name)).collect());
        desk.registered.insert(id(name), record.clone());
        desk.see(NodeEvent::Updated(record));
        desk.pass(Duration::from_secs(1));
    };
    let listed = |desk: &Desk, name: &str| {
        let cluster = desk.stored.get(&TableName::cluster()).expect("claimed");
        let listed = cluster.nodes().iter().flatten().find(|node| node.id == id(name));
        listed.map(|node| node.status)
    };
    tell(&mut desk, "n1", 1, &["n6"]);
    assert_eq!(listed(&desk, "n2"), Some(NodeStatus::Active), "whoever is a member stays one");
    desk.join("n4", 1);
    desk.join("n7", 1);
    tell(&mut desk, "n5", 1, &["n1"]);
    tell(&mut desk, "n6", 1, &[]);
    for name in ["n4", "n5", "n6", "n7"] {
        assert_eq!(listed(&desk, name), Some(NodeStatus::Discovered), "{name}");
    }
    tell(&mut desk, "n4", 1, &["n2"]);
    tell(&mut desk, "n5", 1, &[]);
    tell(&mut desk, "n1", 1, &[]);
    for name in ["n4", "n5", "n6"] {
        assert_eq!(listed(&desk, name), Some(NodeStatus::Active), "{name}");
    }
    assert_eq!(listed(&desk, "n7"), Some(NodeStatus::Discovered), "it may not know yet");
    desk.pass(Settings::fast().node_ttl);
    assert_eq!(listed(&desk, "n7"), Some(NodeStatus::Active), "it never tells");
}

#[test]
fn those_that_leave_do_not_count_among_the_many_that_vanish() {
    let mut desk = Desk::new();
    for name in ["n4", "n5", "n6", "n7", "n8"] {
        desk.join(name, 1);
    }
    desk.pass(Duration::from_secs(60));
    for name in ["n4", "n5", "n6"] {
        desk.see(NodeEvent::Left { node: id(name), incarnation: run(1) });
        desk.registered.remove(&id(name));
    }
    // Two of the five that are left may go at once.
    for name in ["n7", "n8"] {
        desk.see(NodeEvent::Expired { node: id(name), incarnation: run(1) });
        desk.registered.remove(&id(name));
    }
    desk.pass(Duration::from_secs(1));
    for name in ["n7", "n8"] {
        assert!(desk.failure(name).is_some(), "{name}");
    }
    desk.pass(Duration::from_secs(60));
    assert_eq!(["n1", "n2", "n3"].map(|name| desk.shards_of(name)), [4; 3]);
}

#[test]
fn each_time_that_a_node_fails_again_it_waits_twice_as_long() {
    let mut desk = Desk::new();
    let fail = |desk: &mut Desk, round| {
        desk.see(NodeEvent::Expired { node: id("n3"), incarnation: run(round) });
        desk.registered.remove(&id("n3"));
        desk.pass(Duration::from_secs(30));
        desk.join("n3", round + 1);
        let since = desk.now;
        while desk.shards_of("n3") == 0 {
            desk.pass(Duration::from_secs(1));
        }
        desk.now.since(since).as_secs() / Settings::fast().node_ttl.as_secs()
    };
    let waits: Vec<_> = (1..=5).map(|round| fail(&mut desk, round)).collect();
    assert_eq!(waits, [0, 1, 2, 4, 8]);
    desk.pass(Settings::fast().remove_after + Duration::from_secs(1));
    assert_eq!(fail(&mut desk, 6), 0, "it was well for long");
}

#[test]
fn a_flapping_node_is_taken_in_ever_later() {
    let mut desk = Desk::new();
    let began = desk.map().version();
    let mut joined = 0;
    for round in 1..=60 {
        desk.see(NodeEvent::Expired { node: id("n3"), incarnation: run(round) });
        desk.registered.remove(&id("n3"));
        desk.pass(Duration::from_secs(5));
        desk.join("n3", round + 1);
        desk.pass(Duration::from_secs(5));
        joined += u32::from(desk.shards_of("n3") > 0);
    }
    assert!((1..=2).contains(&joined), "{joined}");
    let versions = desk.map().version().get() - began.get();
    assert!(versions <= 40, "{versions} versions");
    desk.pass(Settings::fast().rebalance_check + Duration::from_secs(60));
    assert_eq!(desk.shards_of("n3"), 4, "once it stays, it takes its share");
}

#[test]
fn after_all_were_away_the_first_one_back_does_not_get_everything() {
    let mut desk = Desk::new();
    desk.machine = {
        let mut rules = Rules::new(&Settings::fast(), JUDGING);
        rules.min_members = 2;
        let origin = Origin::new("memory:1/c");
        let attempt = AttemptId::from_u128(2);
        let fence = Fence::new(LeaseName::leader(), Term::from_u64(2), attempt, origin);
        Machine::new(id("n1"), fence, rules, &specs(), desk.now)
    };
    desk.machine.on_view(Arc::new(desk.view.clone()));
    for name in ["n1", "n2", "n3"] {
        desk.see(NodeEvent::Expired { node: id(name), incarnation: run(1) });
        desk.registered.remove(&id(name));
    }
    desk.pass(Duration::from_secs(5));
    desk.join("n4", 1);
    desk.pass(Duration::from_secs(60));
    assert_eq!(desk.shards_of("n4"), 0);
    desk.join("n1", 2);
    desk.pass(Duration::from_secs(5));
    assert_eq!((desk.shards_of("n1"), desk.shards_of("n4")), (6, 6));
}

#[test]
fn a_new_leader_claims_everything_before_it_reads_or_writes_anything() {
    let mut desk = Desk::new();
    desk.elect(2);
    for name in [TableName::cluster(), table()] {
        let step = desk.until(|_| true);
        assert!(matches!(&step, Step::Claim(claimed, _) if *claimed == name), "{step:?}");
        // What comes with the claim is what counts, not what was seen before it.
        let outcome = desk.perform(&step);
        desk.outcome(outcome);
    }
    desk.pass(Duration::from_secs(5));
    assert_eq!(["n1", "n2", "n3"].map(|name| desk.shards_of(name)), [4; 3]);
}

#[test]
fn without_its_gate_no_table_is_claimed_planned_or_written() {
    let mut desk = Desk::new();
    desk.elect(2);
    desk.machine.on_gate(false);
    desk.join("n4", 1);
    let before = desk.map().version();
    let of_tables = |step: &Step| match step {
        Step::Claim(name, _) | Step::Publish(name, ..) => !name.is_reserved(),
        Step::Plan(..) => true,
        _ => false,
    };
    let end = desk.now.plus(Duration::from_secs(3_600));
    while desk.now < end {
        match desk.machine.next(desk.now) {
            Turn::Do(step) => {
                assert!(!of_tables(&step), "{step:?}");
                let outcome = desk.perform(&step);
                desk.outcome(outcome);
            }
            Turn::Wait(until) => {
                let until = until.unwrap_or(end);
                assert!(until > desk.now, "it waits for what is past");
                desk.now = until.min(end);
            }
            Turn::Stop(stop) => panic!("it stops: {stop:?}"),
        }
    }
    assert_eq!(desk.map().version(), before);
    assert!(desk.stored[&TableName::cluster()].slot_of(&id("n4")).is_some(), "it is a member");
    desk.machine.on_gate(true);
    desk.pass(Duration::from_secs(5));
    assert_eq!(["n1", "n2", "n3", "n4"].map(|name| desk.shards_of(name)), [3; 4]);
}

#[test]
fn a_command_whose_gate_is_lost_waits_before_those_that_came_after_it() {
    let mut desk = Desk::new();
    let (shard, home) = (desk.shard_of("n1"), desk.map().version());
    let pin = |node: &str| Command::Pin { table: table(), shard, node: id(node) };
    let first = desk.ask(pin("n2"));
    let second = desk.ask(pin("n3"));
    // Right before its write the driver finds that the gate is lost.
    let writes = |step: &Step| matches!(step, Step::Publish(name, ..) if *name == table());
    desk.until(writes);
    desk.outcome(Outcome::Gated);
    desk.machine.on_gate(false);
    let pause = desk.ask(Command::Pause);
    desk.pass(Duration::from_secs(3_600));
    assert!(matches!(desk.answer(pause).0, Reply::Done(_)));
    assert_eq!(desk.answers.len(), 1);
    assert_eq!(desk.map().version(), home);
    desk.machine.on_gate(true);
    desk.pass(Duration::from_secs(60));
    let order: Vec<Ticket> = desk.answers.iter().map(|(ticket, ..)| *ticket).collect();
    assert_eq!(order, [pause, first, second]);
    assert_eq!(desk.map().owner(shard).map(|owner| owner.id.clone()), Some(id("n3")));
}

#[test]
fn one_that_was_faster_than_the_heir_gives_way_once() {
    let mut desk = Desk::new();
    desk.ask(Command::TransferLeadership { to: id("n3") });
    let stops = |desk: &mut Desk| {
        for _ in 0..TURNS_MAX {
            match desk.machine.next(desk.now) {
                Turn::Do(step) => {
                    let outcome = desk.perform(&step);
                    desk.outcome(outcome);
                }
                Turn::Stop(stop) => return Some(stop),
                Turn::Wait(_) => return None,
            }
        }
        panic!("it never comes to rest");
    };
    assert_eq!(stops(&mut desk), Some(Stop::SteppedDown));
    assert_eq!(desk.record().heir, Some(id("n3")));
    // Another run of n1 wins, which has not seen who was named.
    desk.elect(2);
    assert_eq!(stops(&mut desk), Some(Stop::GivesWay(id("n3"))));
    assert_eq!(desk.record().heir, Some(id("n3")), "it leaves that to the heir");
    // It has waited in vain.
    desk.elect(3);
    desk.machine.has_waited_for(Some(id("n3")));
    assert_eq!(stops(&mut desk), None);
    assert_eq!(desk.record().heir, None);
}

#[test]
fn a_run_that_only_the_former_leader_has_seen_keeps_its_shards() {
    for there in [true, false] {
        let mut desk = Desk::new();
        let stale = desk.view.clone();
        let mut successor = desk.register("n2", 2);
        successor.info.ended.insert(run(1));
        desk.registered.insert(id("n2"), successor.clone());
        desk.see(NodeEvent::Joined(successor));
        desk.pass(Duration::from_secs(5));
        let runs = |desk: &Desk| {
            let slot = desk.map().slot_of(&id("n2")).expect("listed");
            (desk.map().node(slot).expect("listed").incarnation, desk.shards_of("n2"))
        };
        assert_eq!(runs(&desk), (run(2), 4));
        // The next leader's watch has not shown that run yet.
        desk.view = stale;
        if !there {
            // Nor will it ever: a third one has replaced it, and it need not have noticed.
            desk.register("n2", 3);
        }
        desk.elect(2);
        desk.pass(TTL - Duration::from_secs(1));
        assert_eq!(runs(&desk), (run(2), 4));
        desk.pass(Duration::from_secs(5));
        assert_eq!(runs(&desk), (run(if there { 2 } else { 3 }), 4));
    }
}

#[test]
fn the_last_one_that_leaves_is_listed_as_what_it_is() {
    let mut desk = Desk::new();
    for name in ["n2", "n3"] {
        desk.registered.remove(&id(name));
        desk.see(NodeEvent::Left { node: id(name), incarnation: run(1) });
    }
    desk.pass(Duration::from_secs(5));
    desk.reports = false;
    desk.ask(Command::Leave { node: id("n1"), force: false });
    desk.pass(Duration::from_secs(5));
    // It has still to stop them, and nobody takes them.
    assert_eq!((desk.map().motions().len(), desk.shards_of("n1")), (12, 12));
    let status = |desk: &Desk| {
        let slot = desk.map().slot_of(&id("n1")).expect("listed");
        desk.map().node(slot).expect("listed").status
    };
    assert_eq!(status(&desk), NodeStatus::Draining);
    desk.reports = true;
    desk.report(&table());
    desk.pass(Duration::from_secs(5));
    assert_eq!((desk.map().orphans(), status(&desk)), (12, NodeStatus::Draining));
}

#[test]
fn a_deleted_table_begins_its_next_life_under_another_term() {
    let mut desk = Desk::new();
    desk.stored.remove(&table());
    desk.ask(Command::Drain { node: id("n2") });
    for _ in 0..TURNS_MAX {
        match desk.machine.next(desk.now) {
            Turn::Do(step) => {
                assert!(!matches!(&step, Step::Claim(name, _) if *name == table()));
                let outcome = desk.perform(&step);
                desk.outcome(outcome);
            }
            Turn::Wait(until) => desk.now = until.expect("a time"),
            Turn::Stop(stop) => {
                assert_eq!(stop, Stop::Deleted(table()));
                return;
            }
        }
    }
    panic!("it never notices");
}
