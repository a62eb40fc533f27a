//! Commands whose writes go wrong, on a store that is played here.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use coord_core::{
    ANNEX_BYTES_MAX, Address, AttemptId, Fence, Incarnation, LeaseName, Moment, NodeEvent, NodeId,
    NodeInfo, NodeRecord, NodeStatus, Origin, Report, Revision, ShardCount, ShardId, ShardMap,
    TableHeader, TableName, TableUid, Term, Ttl,
};
use coord_placement::Balanced;

use super::machine::{Machine, Outcome, Step, Stop, Ticket, Turn};
use super::roster::PendingEviction;
use super::rules::Rules;
use crate::Settings;
use crate::commands::{Command, CommandError, Reply};
use crate::handoff::Handoff;
use crate::member_view::{Judging, View};
use crate::model::{DownDecision, TableSpec};
use crate::record::{ClusterRecord, Failure};

const JUDGING: Judging = Judging { wait_ttl: false, from_heartbeat: false, evict: false };
/// Where each heartbeat shows.
const SHOWN: Judging = Judging { from_heartbeat: true, ..JUDGING };
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

fn specs() -> BTreeMap<TableName, TableSpec> {
    let header = TableHeader::new(ShardCount::new(12).expect("count"));
    BTreeMap::from([(
        table(),
        TableSpec { header, strategy: Arc::new(Balanced::default()), handoff: Handoff::Exclusive },
    )])
}

fn machine(term: u64, now: Moment) -> Machine {
    machine_with(term, Rules::new(&Settings::fast(), JUDGING), now)
}

fn machine_with(term: u64, rules: Rules, now: Moment) -> Machine {
    let attempt = AttemptId::from_u128(u128::from(term));
    let origin = Origin::new("memory:1/c");
    let fence = Fence::new(LeaseName::leader(), Term::from_u64(term), attempt, origin);
    Machine::new(id("n1"), fence, rules, &specs(), now)
}

/// A leader and its store. A step that is not carried out by [`perform`](Self::perform) has no effect.
struct Desk {
    now: Moment,
    machine: Machine,
    stored: BTreeMap<TableName, Arc<ShardMap>>,
    registered: BTreeMap<NodeId, NodeRecord>,
    view: View,
    judging: Judging,
    revision: u64,
    /// How many lives of tables there were.
    lives: u128,
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
            judging: JUDGING,
            revision: 0,
            lives: 0,
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
        self.view.on_event(event, self.judging, self.now);
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

    /// A heartbeat is answered, and maybe the watch shows it.
    fn beat(&mut self, name: &str, shows: bool) {
        self.revision += 1;
        let revision = Revision::from_u64(self.revision);
        let record = self.registered.get_mut(&id(name)).expect("registered");
        record.revision = revision;
        let record = record.clone();
        if shows {
            self.see(NodeEvent::Updated(record));
        }
    }

    /// A leader who sees each heartbeat.
    fn elect_shown(&mut self, term: u64) {
        self.judging = SHOWN;
        let rules = Rules::new(&Settings::fast(), SHOWN);
        self.elect_with(machine_with(term, rules, self.now));
    }

    fn elect(&mut self, term: u64) {
        self.elect_with(machine(term, self.now));
    }

    fn elect_with(&mut self, machine: Machine) {
        self.machine = machine;
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
        let verdict = DownDecision { incarnation: run(1), why: "downed".to_owned() };
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
                self.lives += 1;
                let uid = TableUid::from_u128(self.lives);
                let new = || Arc::new(ShardMap::empty(header.clone(), uid));
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
            Step::Evict(PendingEviction { node, incarnation, revision }) => {
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
        ClusterRecord::read_beside(cluster).expect("reads")
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

    /// n2 is declared failed and evicted, and may still run; nobody remembers that.
    fn evict_n2_and_forget(&mut self) {
        self.fail_n2();
        let step = self.until(is_evict);
        assert_eq!(self.perform(&step), Outcome::Evicted);
        self.stored.remove(&TableName::cluster());
    }

    /// A leader that has seen nothing before.
    fn elect_fresh(&mut self, term: u64) {
        self.view = View::default();
        self.elect(term);
        self.see(NodeEvent::Snapshot(self.registered.values().cloned().collect()));
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
    desk.see(NodeEvent::Expired { node: id("n3"), incarnation: run(1), judged: true });
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
    assert!(matches!(reply, Reply::Refused(CommandError::Failed { .. })), "{reply:?}");
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
    for gone in [left, NodeEvent::Expired { node, incarnation, judged: true }] {
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
    let verdict = DownDecision { incarnation: run(1), why: "downed".to_owned() };
    desk.machine.on_verdicts(&[(id("n2"), verdict)].into());
    desk.pass(Duration::from_secs(1));
    assert_eq!(desk.failure("n2"), None);
}

#[test]
fn a_run_that_was_replaced_without_a_word_is_remembered_until_it_is_over() {
    let mut desk = Desk::new();
    let former = |desk: &Desk| {
        let note = desk.record().nodes.get(&id("n2")).cloned().unwrap_or_default();
        note.former.contains_key(&run(1))
    };
    desk.join("n2", 2);
    desk.pass(Duration::from_secs(1));
    assert!(former(&desk));
    // Whoever leads next has not seen it, and gives it its whole time.
    desk.elect(2);
    desk.pass(TTL - Duration::from_secs(1));
    assert!(former(&desk));
    desk.pass(Duration::from_secs(2));
    assert!(!former(&desk));
    // A run that the next one vouches for is over.
    let record = desk.register("n2", 3);
    let info = record.info.with_ended(run(2));
    let record = NodeRecord::new(info, Ttl::new(TTL).expect("ttl"), record.revision);
    desk.registered.insert(id("n2"), record.clone());
    desk.see(NodeEvent::Joined(record));
    desk.pass(Duration::from_secs(1));
    assert!(desk.record().nodes.get(&id("n2")).is_none_or(|note| note.former.is_empty()));
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
fn a_failed_run_that_is_seen_again_after_its_time_lets_time_go_by() {
    let mut desk = Desk::new();
    desk.fail_n2();
    let record = desk.registered[&id("n2")].clone();
    desk.pass(Duration::from_secs(1));
    assert!(!desk.registered.contains_key(&id("n2")));
    desk.see(NodeEvent::Joined(record));
    // It may still run for all that is seen, and no moment tells until when.
    desk.pass(TTL * 3);
    assert_eq!(desk.shards_of("n2"), 4);
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
    let refusal = Reply::Refused(CommandError::MayStillRun { node: id("n2"), shard });
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
fn too_many_that_vanish_at_once_are_suspended_until_an_operator_speaks_or_for_three_ttls() {
    for speaks in [true, false] {
        too_many_vanish(speaks);
    }
}

fn too_many_vanish(operator_speaks: bool) {
    let mut desk = Desk::new();
    for name in ["n4", "n5", "n6"] {
        desk.join(name, 1);
    }
    desk.pass(Duration::from_secs(60));
    assert_eq!(desk.shards_of("n6"), 2);
    let lost = ["n3", "n4", "n5", "n6"];
    for name in lost {
        desk.see(NodeEvent::Expired { node: id(name), incarnation: run(1), judged: true });
        desk.registered.remove(&id(name));
    }
    let node_ttl = Settings::fast().node_ttl;
    desk.pass(node_ttl * 3 - Duration::from_secs(1));
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
    if operator_speaks {
        let why = "test".to_owned();
        let ticket = desk.ask(Command::MarkNodeFailed { node: id(&held[0]), why });
        desk.pass(Duration::from_millis(900));
        assert!(desk.answer(ticket).0.is_done());
    } else {
        desk.pass(Duration::from_secs(2));
        assert_eq!(desk.failure(&held[0]), Some(Failure::ran_out(run(1))));
    }
    assert_eq!((desk.shards_of(&held[0]), suspended(&desk).len()), (0, 0));
}

#[test]
fn one_that_is_silent_for_two_ttls_is_evicted_whatever_the_store_says() {
    let mut desk = Desk::new();
    desk.elect_shown(2);
    desk.beat("n3", true);
    for second in (0..TTL.as_secs() * 2).step_by(3) {
        assert!(desk.registered.contains_key(&id("n3")), "{second}");
        for name in ["n1", "n2"] {
            desk.beat(name, true);
        }
        desk.pass(Duration::from_secs(3));
    }
    assert!(!desk.registered.contains_key(&id("n3")), "evicted");
    assert_eq!(desk.failure("n3"), Some(Failure::ran_out(run(1))));
    desk.pass(Duration::from_secs(2));
    assert_eq!(["n1", "n2", "n3"].map(|name| desk.shards_of(name)), [6, 6, 0]);
}

#[test]
fn one_whose_heartbeats_do_not_show_is_found_alive_and_kept() {
    let mut desk = Desk::new();
    desk.elect_shown(2);
    for _ in 0..TTL.as_secs() {
        for name in ["n1", "n2"] {
            desk.beat(name, true);
        }
        desk.beat("n3", false);
        desk.pass(Duration::from_secs(3));
    }
    assert!(desk.registered.contains_key(&id("n3")));
    assert_eq!((desk.failure("n3"), desk.shards_of("n3")), (None, 4));
}

#[test]
fn one_that_was_found_alive_unseen_is_evicted_once_it_is_silent_to_the_store_too() {
    let mut desk = Desk::new();
    desk.elect_shown(2);
    for second in (0..TTL.as_secs() * 7).step_by(3) {
        desk.beat("n2", true);
        if second < TTL.as_secs() * 3 {
            desk.beat("n3", false);
        }
        desk.pass(Duration::from_secs(3));
    }
    assert_eq!(desk.failure("n3"), Some(Failure::ran_out(run(1))));
    assert_eq!(desk.shards_of("n3"), 0);
}

#[test]
fn too_many_that_fall_silent_are_evicted_one_after_the_other() {
    let mut desk = Desk::new();
    for name in ["n4", "n5", "n6"] {
        desk.join(name, 1);
    }
    desk.pass(Duration::from_secs(3));
    desk.elect_shown(2);
    desk.reports = false;
    let ttl = TTL.as_secs();
    let listed = |desk: &Desk| desk.registered.len();
    for second in (0..ttl * 6).step_by(3) {
        desk.beat("n2", true);
        desk.pass(Duration::from_secs(3));
        if (ttl * 2..ttl * 3 - 3).contains(&(second + 3)) {
            assert_eq!(listed(&desk), 3, "half of six, after {second} s");
        }
    }
    assert_eq!(desk.registered.keys().cloned().collect::<Vec<_>>(), [id("n1"), id("n2")]);
    assert_eq!(desk.shards_of("n1") + desk.shards_of("n2"), 12);
}

#[test]
fn a_suspended_one_is_not_given_up_while_the_store_is_away() {
    let mut desk = Desk::new();
    for name in ["n4", "n5", "n6"] {
        desk.join(name, 1);
    }
    desk.elect(2);
    desk.pass(Duration::from_secs(3));
    for name in ["n3", "n4", "n5", "n6"] {
        desk.see(NodeEvent::Expired { node: id(name), incarnation: run(1), judged: true });
        desk.registered.remove(&id(name));
    }
    desk.pass(Duration::from_secs(1));
    let suspended =
        |desk: &Desk| desk.record().nodes.values().filter(|note| note.suspended.is_some()).count();
    assert_eq!(suspended(&desk), 1);
    desk.view.on_away(desk.now);
    desk.machine.on_view(Arc::new(desk.view.clone()));
    desk.pass(Settings::fast().node_ttl * 4);
    assert_eq!(suspended(&desk), 1);
    desk.view.on_back(desk.now);
    desk.machine.on_view(Arc::new(desk.view.clone()));
    desk.pass(Duration::from_secs(1));
    assert_eq!(suspended(&desk), 0);
}

#[test]
fn what_people_write_is_cut_before_it_is_stored() {
    let mut desk = Desk::new();
    let long = format!("x{}", "ä".repeat(30_000));
    let ticket = desk.ask(Command::MarkNodeFailed { node: id("n2"), why: long.clone() });
    desk.pass(Duration::from_secs(1));
    assert!(desk.answer(ticket).0.is_done());
    let why = desk.failure("n2").expect("failed").why;
    assert!(why.len() < 300 && why.ends_with("ä… (60001 bytes)"), "{why}");
    desk.pass(TTL * 2);
    let ticket = desk.ask(Command::Pin { table: table(), shard: ShardId::new(1), node: id("n3") });
    desk.pass(Duration::from_secs(1));
    assert!(desk.answer(ticket).0.is_done());
    let owner = desk.map().owner(ShardId::new(5)).expect("owned").id.clone();
    desk.ask(Command::Drain { node: owner });
    desk.ask(Command::RebalanceShards { table: None, reason: long });
    desk.pass(Duration::from_secs(5));
    let annex = desk.map().annex();
    assert!(annex.len() < 1_000, "{} bytes", annex.len());
}

#[test]
fn a_leader_that_can_t_write_its_record_says_so_until_it_can() {
    for verdict in [false, true] {
        let mut desk = Desk::new();
        for name in ["n4", "n5", "n6"] {
            desk.join(name, 1);
        }
        desk.pass(Duration::from_secs(5));
        // An older leader has filled it.
        let mut full = desk.record();
        let spare = TableName::new("spare").expect("name");
        full.failures.insert(spare.clone(), String::new());
        let room = ANNEX_BYTES_MAX - full.write().expect("writes").len();
        full.failures.insert(spare, "x".repeat(room - 10));
        let fill = |desk: &mut Desk, record: &ClusterRecord| {
            let cluster = desk.stored.get_mut(&TableName::cluster()).expect("claimed");
            let mut edit = cluster.edit();
            edit.set_annex(record.write().expect("writes")).expect("fits");
            let fence = cluster.writer().expect("written").clone();
            *cluster = Arc::new(edit.finish(fence).expect("differs"));
        };
        fill(&mut desk, &full);
        desk.elect(2);
        desk.pass(Duration::from_secs(5));
        assert_eq!(desk.machine.unwritten(), None);
        let ticket = desk.ask(Command::Drain { node: id("n2") });
        desk.pass(Duration::from_secs(1));
        assert!(matches!(desk.answer(ticket).0, Reply::Refused(CommandError::Failed { .. })));
        assert_eq!(desk.machine.unwritten(), None, "whoever asked was told");

        if verdict {
            let verdict = DownDecision { incarnation: run(1), why: "downed".to_owned() };
            desk.machine.on_verdicts(&[(id("n2"), verdict)].into());
        } else {
            // One of them is suspended, which takes more room than there is.
            for name in ["n3", "n4", "n5", "n6"] {
                let node = id(name);
                desk.see(NodeEvent::Expired { node, incarnation: run(1), judged: true });
                desk.registered.remove(&id(name));
            }
        }
        desk.pass(Duration::from_secs(1));
        let why = desk.machine.unwritten().expect("it says so").to_owned();
        assert!(why.contains("annex") && why.len() < 300, "{why}");

        full.failures.clear();
        fill(&mut desk, &full);
        desk.pass(Settings::fast().rebalance_check + Duration::from_secs(5));
        if verdict {
            assert!(desk.machine.unwritten().is_some(), "it is still to be written");
            let verdict = DownDecision { incarnation: run(1), why: "downed".to_owned() };
            desk.machine.on_verdicts(&[(id("n2"), verdict)].into());
            desk.pass(Duration::from_secs(1));
        }
        assert_eq!(desk.machine.unwritten(), None);
    }
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
        desk.see(NodeEvent::Expired { node: id(name), incarnation: run(1), judged: true });
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
        desk.see(NodeEvent::Expired { node: id("n3"), incarnation: run(round), judged: true });
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
        desk.see(NodeEvent::Expired { node: id("n3"), incarnation: run(round), judged: true });
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
        desk.see(NodeEvent::Expired { node: id(name), incarnation: run(1), judged: true });
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
    assert_eq!(desk.record().transfer_target, Some(id("n3")));
    // Another run of n1 wins, which has not seen who was named.
    desk.elect(2);
    assert_eq!(stops(&mut desk), Some(Stop::Yields(id("n3"))));
    assert_eq!(
        desk.record().transfer_target,
        Some(id("n3")),
        "it leaves that to the transfer_target"
    );
    // It has waited in vain.
    desk.elect(3);
    desk.machine.has_waited_for(Some(id("n3")));
    assert_eq!(stops(&mut desk), None);
    assert_eq!(desk.record().transfer_target, None);
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
fn one_that_left_while_nobody_led_has_not_failed() {
    for evict in [false, true] {
        let mut desk = Desk::new();
        desk.ask(Command::Leave { node: id("n2"), force: false });
        desk.pass(Duration::from_secs(5));
        assert_eq!(desk.shards_of("n2"), 0);
        desk.registered.remove(&id("n2"));
        // The next leader has never seen it.
        desk.judging = Judging { evict, ..JUDGING };
        desk.view = View::default();
        let rules = Rules::new(&Settings::fast(), desk.judging);
        desk.elect_with(machine_with(2, rules, desk.now));
        desk.see(NodeEvent::Snapshot(desk.registered.values().cloned().collect()));
        for _ in 0..4 {
            desk.pass(TTL);
            assert_eq!(desk.failure("n2"), None, "evict={evict}");
        }
        let cluster = desk.stored.get(&TableName::cluster()).expect("claimed");
        assert_eq!(cluster.slot_of(&id("n2")), None);
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

#[test]
fn a_term_ends_where_the_record_of_the_members_is_deleted_under_it() {
    for writes in [false, true] {
        let mut desk = Desk::new();
        desk.stored.remove(&TableName::cluster());
        if writes {
            desk.ask(Command::Drain { node: id("n2") });
        }
        let stop = (0..TURNS_MAX).find_map(|_| match desk.machine.next(desk.now) {
            Turn::Do(step) => {
                assert!(!matches!(&step, Step::Claim(..)), "this term goes by what is deleted");
                let outcome = desk.perform(&step);
                desk.outcome(outcome);
                None
            }
            Turn::Wait(until) => {
                desk.now = until.expect("a time");
                None
            }
            Turn::Stop(stop) => Some(stop),
        });
        assert_eq!(stop, Some(Stop::Deleted(TableName::cluster())), "writes={writes}");
    }
}

#[test]
fn a_run_that_was_evicted_has_its_time_although_the_record_of_that_is_lost() {
    let mut desk = Desk::new();
    desk.evict_n2_and_forget();
    desk.elect(2);
    desk.keeps_for_its_ttl();
    assert!(!desk.record().lost);

    // Whoever leads next meanwhile counts from the beginning.
    let mut desk = Desk::new();
    desk.evict_n2_and_forget();
    desk.elect(2);
    desk.pass(TTL / 2);
    desk.elect(3);
    desk.keeps_for_its_ttl();

    // So has one that another run followed,
    let mut desk = Desk::new();
    desk.evict_n2_and_forget();
    desk.join("n2", 2);
    desk.elect(2);
    desk.pass(TTL - Duration::from_secs(1));
    let listed = |desk: &Desk| {
        let slot = desk.map().slot_of(&id("n2")).expect("listed");
        desk.map().node(slot).expect("listed").incarnation
    };
    assert_eq!((desk.shards_of("n2"), listed(&desk)), (4, run(1)));
    desk.pass(Duration::from_secs(3));
    assert_eq!((desk.shards_of("n2"), listed(&desk)), (4, run(2)));

    // unless that says that it has stopped.
    let mut desk = Desk::new();
    desk.evict_n2_and_forget();
    desk.elect(2);
    desk.pass(Duration::from_secs(2));
    assert_eq!(desk.shards_of("n2"), 4);
    let record = desk.register("n2", 2);
    let info = record.info.with_ended(run(1));
    let record = NodeRecord::new(info, Ttl::new(TTL).expect("ttl"), record.revision);
    desk.registered.insert(id("n2"), record.clone());
    desk.see(NodeEvent::Joined(record));
    desk.pass(Duration::from_secs(2));
    assert_eq!(listed(&desk), run(2));
}

#[test]
fn where_the_record_is_lost_an_end_may_be_the_work_of_a_former_leader() {
    let mut desk = Desk::new();
    desk.stored.remove(&TableName::cluster());
    desk.elect(2);
    desk.pass(Duration::from_secs(2));
    assert_eq!(desk.shards_of("n2"), 4, "it is registered");
    // The verdict is lost, and the eviction that followed from it is not.
    let (node, incarnation) = (id("n2"), run(1));
    desk.registered.remove(&node);
    desk.see(NodeEvent::Left { node, incarnation });
    desk.keeps_for_its_ttl();

    // What ran out is over.
    let mut desk = Desk::new();
    desk.stored.remove(&TableName::cluster());
    desk.elect(2);
    desk.pass(Duration::from_secs(2));
    expire(&mut desk, "n2");
    desk.pass(Duration::from_secs(2));
    assert_eq!(desk.shards_of("n2"), 0);
}

#[test]
fn a_host_that_nobody_knows_any_more_is_evicted_where_observers_judge() {
    let mut desk = Desk::new();
    // Its record is still there.
    expire(&mut desk, "n2");
    desk.stored.remove(&TableName::cluster());
    desk.judging = Judging { evict: true, ..JUDGING };
    let rules = Rules::new(&Settings::fast(), desk.judging);
    desk.elect_with(machine_with(2, rules, desk.now));
    let step = desk.until(is_evict);
    assert!(matches!(&step, Step::Evict(suspect) if suspect.node == id("n2")), "{step:?}");
    desk.outcome(Outcome::Evicted);
    desk.pass(TTL);
    assert_eq!(desk.shards_of("n2"), 0);
}

#[test]
fn a_table_that_is_lost_with_the_record_begins_when_nobody_can_host_it_any_more() {
    let mut desk = Desk::new();
    desk.evict_n2_and_forget();
    desk.stored.remove(&table());
    desk.elect_fresh(2);
    desk.pass(TTL / 2);
    // n1 and n3 go by the new life now, and nothing shows any more that there was another.
    desk.report(&table());
    desk.elect_fresh(3);
    desk.pass(TTL - Duration::from_secs(1));
    assert_eq!(desk.map().orphans(), 12, "n2 may still run, and nobody knows of it");
    desk.pass(Duration::from_secs(3));
    assert_eq!(desk.map().orphans(), 0);

    // Those who say that they host the former life are waited for, however long that takes.
    let mut desk = Desk::new();
    for name in [table(), TableName::cluster()] {
        desk.stored.remove(&name);
    }
    desk.elect_fresh(2);
    desk.pass(TTL * 3);
    assert_eq!(desk.map().orphans(), 12);
    desk.report(&table());
    desk.pass(Duration::from_secs(2));
    assert_eq!(desk.map().orphans(), 0);
}

#[test]
fn a_first_start_waits_for_nobody() {
    let mut desk = Desk::new();
    for name in [table(), TableName::cluster()] {
        desk.stored.remove(&name);
    }
    for name in ["n1", "n2", "n3"] {
        desk.register(name, 2);
    }
    desk.elect_fresh(2);
    desk.pass(Duration::from_secs(2));
    assert_eq!((desk.map().orphans(), desk.record().lost), (0, false));
}

/// A leader that gathers changes of the members for 3 s where there are three of them, and for 4 s where there are
/// four.
fn gathering() -> Desk {
    let mut desk = Desk::new();
    let mut rules = Rules::new(&Settings::fast(), JUDGING);
    (rules.gather_from, rules.told_per_second) = (3, 1);
    desk.elect_with(machine_with(2, rules, desk.now));
    desk.pass(Duration::from_secs(10));
    desk
}

fn members_version(desk: &Desk) -> u64 {
    desk.stored.get(&TableName::cluster()).expect("claimed").version().get()
}

fn status(desk: &Desk, name: &str) -> Option<NodeStatus> {
    let cluster = desk.stored.get(&TableName::cluster()).expect("claimed");
    Some(cluster.node(cluster.slot_of(&id(name))?)?.status)
}

fn expire(desk: &mut Desk, name: &str) {
    desk.see(NodeEvent::Expired { node: id(name), incarnation: run(1), judged: true });
    desk.registered.remove(&id(name));
}

#[test]
fn a_large_cluster_hears_of_its_members_now_and_then() {
    let mut desk = gathering();
    let began = members_version(&desk);
    desk.join("n4", 1);
    desk.pass(Duration::ZERO);
    assert_eq!(status(&desk, "n4"), Some(NodeStatus::Active), "the first change is told at once");
    // One each 100 ms for 4 s; a rebalance is due after half a second, and ends a pause.
    for node in 10..50 {
        desk.join(&format!("n{node}"), 1);
        desk.pass(Duration::from_millis(100));
    }
    let versions = members_version(&desk) - began;
    assert!((3..=9).contains(&versions), "{versions} versions for 41 that join");
    let hosts = desk.map().nodes().iter().flatten().count();
    assert!(hosts > 4, "a rebalance waits no longer than it does without a pause");
    desk.pass(Duration::from_secs(60));
    assert_eq!(status(&desk, "n49"), Some(NodeStatus::Active));
    assert_eq!(desk.map().counts().iter().filter(|count| **count > 0).count(), 12);
}

#[test]
fn what_others_wait_for_is_told_at_once_and_takes_the_members_along() {
    let begin = || {
        let mut desk = gathering();
        desk.join("n4", 1);
        desk.pass(Duration::ZERO);
        desk.join("n5", 1);
        desk.pass(Duration::ZERO);
        assert_eq!(status(&desk, "n5"), None, "it waits");
        desk
    };
    let mut desk = begin();
    let ticket = desk.ask(Command::Drain { node: id("n3") });
    desk.pass(Duration::ZERO);
    assert!(desk.answer(ticket).0.is_done());
    assert_eq!(status(&desk, "n5"), Some(NodeStatus::Active));

    let mut desk = begin();
    let verdict = DownDecision { incarnation: run(1), why: "downed".to_owned() };
    desk.machine.on_verdicts(&[(id("n2"), verdict)].into());
    desk.pass(Duration::ZERO);
    assert!(desk.failure("n2").expect("written").downed);
    assert_eq!(status(&desk, "n5"), Some(NodeStatus::Active));

    // Three of five are too many to be given up: that the third is suspended is told.
    let mut desk = begin();
    desk.pass(Duration::from_secs(60));
    expire(&mut desk, "n5");
    desk.pass(Duration::ZERO);
    assert_eq!(status(&desk, "n5"), Some(NodeStatus::Failed));
    expire(&mut desk, "n4");
    desk.pass(Duration::ZERO);
    assert_eq!(status(&desk, "n4"), Some(NodeStatus::Active), "it waits");
    expire(&mut desk, "n3");
    desk.pass(Duration::ZERO);
    assert!(desk.record().nodes[&id("n3")].suspended.is_some());
    assert_eq!(status(&desk, "n4"), Some(NodeStatus::Failed));
}

#[test]
fn a_failed_node_is_forgotten_in_time_although_the_members_are_gathered() {
    let mut desk = gathering();
    for name in ["n4", "n5"] {
        desk.join(name, 1);
    }
    desk.pass(Duration::from_secs(60));
    expire(&mut desk, "n5");
    desk.pass(Duration::from_secs(1));
    expire(&mut desk, "n4");
    desk.pass(Duration::from_secs(20));
    assert_eq!(["n4", "n5"].map(|name| status(&desk, name)), [Some(NodeStatus::Failed); 2]);
    // That n5 is forgotten begins a pause, in which the time of n4 is up.
    desk.pass(Rules::new(&Settings::fast(), JUDGING).remove_after);
    assert_eq!(["n4", "n5"].map(|name| status(&desk, name)), [None; 2]);
}

#[test]
fn a_former_run_is_waited_for_once_although_the_write_that_says_so_is_lost() {
    let mut desk = Desk::new();
    desk.join("n2", 2);
    desk.pass(TTL / 2);
    assert!(desk.record().nodes[&id("n2")].former.contains_key(&run(1)));
    let is_write = |step: &Step| matches!(step, Step::Publish(name, ..) if name.is_reserved());
    desk.until(is_write);
    desk.lose();
    desk.pass(Duration::from_secs(2));
    assert!(!desk.record().nodes.contains_key(&id("n2")));
}

#[test]
fn a_failure_while_the_record_is_lost_takes_its_own_time() {
    let mut desk = gathering();
    let record = desk.register("n4", 1);
    let ttl = Ttl::new(TTL * 4).expect("ttl");
    let record = NodeRecord::new(record.info, ttl, record.revision);
    desk.registered.insert(id("n4"), record.clone());
    desk.see(NodeEvent::Joined(record));
    desk.pass(Duration::from_secs(10));
    desk.stored.remove(&TableName::cluster());
    let mut rules = Rules::new(&Settings::fast(), JUDGING);
    (rules.gather_from, rules.told_per_second) = (3, 1);
    desk.elect_with(machine_with(3, rules, desk.now));
    desk.pass(Duration::from_secs(2));
    desk.fail_n2();
    desk.pass(TTL - Duration::from_secs(1));
    assert_eq!((desk.shards_of("n2"), desk.record().lost), (3, true));
    // The members are gathered while the time of n2 ends.
    desk.join("n5", 1);
    desk.pass(Duration::from_secs(2));
    assert_eq!((desk.shards_of("n2"), desk.record().lost), (0, true));
}

#[test]
fn where_the_record_is_lost_too_many_that_vanish_are_no_evidence_either() {
    let mut desk = Desk::new();
    for name in ["n4", "n5", "n6"] {
        desk.join(name, 1);
    }
    desk.pass(Duration::from_secs(10));
    desk.stored.remove(&TableName::cluster());
    let vanished = ["n3", "n4", "n5", "n6"];
    vanished.iter().for_each(|name| expire(&mut desk, name));
    desk.elect(2);
    desk.pass(Duration::from_secs(2));
    let suspended =
        |name| desk.record().nodes.get(&id(name)).is_some_and(|n| n.suspended.is_some());
    assert!(vanished.iter().any(|name| suspended(name)), "{:?}", desk.record());
    // As many as elsewhere are given up before the rest is suspended.
    let gone = vanished.iter().filter(|name| desk.shards_of(name) == 0).count();
    assert!(gone <= 3, "{gone} of 6 members");
}

#[test]
fn a_small_cluster_hears_of_each_change_at_once() {
    let mut desk = Desk::new();
    for name in ["n4", "n5", "n6"] {
        desk.join(name, 1);
        desk.pass(Duration::ZERO);
        assert_eq!(status(&desk, name), Some(NodeStatus::Active));
    }
}

#[test]
fn a_leader_of_more_nodes_than_have_places_gives_them_and_replaces_who_goes() {
    let mut desk = Desk::new();
    let places = |desk: &Desk| {
        let record = desk.record();
        record.candidates.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    for name in ["n4", "n5"] {
        desk.join(name, 1);
    }
    desk.pass(Duration::from_secs(5));
    assert_eq!(places(&desk), [""; 0], "everybody stands");
    desk.join("n6", 1);
    desk.join("n7", 1);
    desk.pass(Duration::ZERO);
    assert_eq!(places(&desk), ["n1", "n2", "n3", "n4", "n5"]);
    expire(&mut desk, "n3");
    desk.pass(Duration::ZERO);
    assert_eq!(places(&desk), ["n1", "n2", "n4", "n5", "n6"]);
    desk.ask(Command::Drain { node: id("n5") });
    desk.pass(Duration::ZERO);
    assert_eq!(places(&desk), ["n1", "n2", "n4", "n6", "n7"]);
    // Whoever leads next keeps them.
    desk.elect(2);
    desk.pass(Duration::from_secs(5));
    assert_eq!(places(&desk), ["n1", "n2", "n4", "n6", "n7"]);
}
