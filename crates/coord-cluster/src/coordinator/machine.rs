//! What the leader does next. Pure: `now` is an argument, and every call is a [`Step`] for the driver.
//!
//! ```text
//!   claim _cluster ─► claim each table ─► look at ─► the members' ─► a command's  ─► rebalances
//!   (then read)                           the nodes  statuses        writes, answer  that are due
//! ```
//!
//! One step is in progress at a time, and each follows from the newest state: a write that comes back as
//! a conflict is dropped, its table read again, and what is to be done found anew.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use coord_core::{
    Fence, Incarnation, Moment, NodeEntry, NodeId, NodeInfo, Revision, ShardId, ShardMap, Slot,
    TableHeader, TableName, Ttl, Version,
};
use coord_placement::{Assignment, PlacementStrategy, Plan};

use super::candidacy::{self, Applicant};
use super::generations;
use super::judge::{self, Note, Write};
use super::loads::{Figures, Loads};
use super::placing::{Failed, Next, Placing, Question};
use super::poisoning::{self, Hosted, Poisoning};
use super::roster::{self, HostingState, PendingEviction, Roster, Seat, Sources, Taken, Timers};
use super::rules::{PAUSE_MIN, Rules};
use super::succession::{Candidate, Succession};
use crate::commands::{Command, CommandError, CommandSummary, Reply};
use crate::handoff::Handoff;
use crate::member_view::{Absence, MayRun, Presence, View};
use crate::model::{DownDecision, TableSpec, VersionTimes};
use crate::poison::{Fall, TableShard};
use crate::record::{self, Before, ClusterRecord, Failure, TableNote};
use crate::supervise;

/// The most commands that wait; one more is refused.
const COMMANDS_MAX: usize = 1_024;
/// How often a command is begun anew after a conflict or a failed write.
const COMMAND_TRIES_MAX: u8 = 5;
/// How often an answer is sent that is not confirmed.
const ANSWER_TRIES_MAX: u8 = 4;
/// One shard of this many may be in motion, unless the settings say otherwise.
const MOTIONS_SHARE: u32 = 10;
/// The most stuck shards of a table that are named.
const STUCK_MAX: usize = 256;

/// What metrics call the reason of a rebalance that was asked for.
const BY_COMMAND: &str = "command";
/// And the one of the first rebalance of a term.
const BY_TERM: &str = "term";

/// The caller of a command, as the driver counts.
pub(crate) type Ticket = u64;
/// The ticket of what the leader asks of itself.
const NOBODY: Ticket = 0;

/// A plan to be made, which may take a while.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) strategy: Arc<dyn PlacementStrategy>,
    pub(crate) current: Arc<Assignment>,
    pub(crate) question: Question,
}

impl Job {
    /// A strategy that panics, which may be the service's own code, is one that found no plan.
    pub(crate) fn plan(&self) -> Result<Plan, Failed> {
        let Question { candidates, settings } = &self.question;
        let plan = || self.strategy.plan(&self.current, candidates, settings);
        match catch_unwind(AssertUnwindSafe(plan)) {
            Ok(planned) => planned.map_err(Failed::Plan),
            Err(panic) => Err(Failed::Panicked(supervise::message(&*panic))),
        }
    }
}

impl PartialEq for Job {
    fn eq(&self, other: &Self) -> bool {
        self.question == other.question && self.current == other.current
    }
}

/// A call for the driver.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    /// Claim a table.
    Claim(TableName, TableHeader),
    /// See which nodes are registered now, however late the watch of them is.
    Look,
    /// Read a table.
    Load(TableName),
    /// Publish a map after this version.
    Publish(TableName, Version, Arc<ShardMap>),
    /// Evict a registration.
    Evict(PendingEviction),
    /// Make a plan for a table.
    Plan(TableName, Arc<Job>),
    /// Answer the caller.
    Answer(Ticket, Reply),
}

/// What to do next.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Turn {
    /// This call; its outcome comes before anything else.
    Do(Step),
    /// Nothing, until this moment or until something is heard.
    Wait(Option<Moment>),
    /// Nothing any more.
    Stop(Stop),
}

/// Why the leader's work is over.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Stop {
    /// A command asked for it; the lease is to be released.
    SteppedDown,
    /// This node is to lead, and was slower.
    Yields(NodeId),
    /// A table was deleted. What its next generation gives to hosts has to be newer than what the last one
    /// gave, so it takes another term.
    Deleted(TableName),
    /// A write was refused: another node leads, or the store went back.
    Fenced,
    /// The reserved table can't be used.
    Refused(String),
}

/// How a step came out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    /// The table is claimed, and this is its map.
    Claimed(Arc<ShardMap>),
    /// The table can't be claimed: its header or its lease is another.
    Refused(String),
    /// The view shows what is registered.
    Looked,
    /// The newest map; none if the table does not exist any more.
    Loaded(Option<Arc<ShardMap>>),
    /// The map is published.
    Published,
    /// The table has moved on.
    Conflict,
    /// The table does not exist any more.
    Deleted,
    /// Another leader has been there.
    Fenced,
    /// The registration is gone.
    Evicted,
    /// It has been written since; this is its revision now.
    Alive(Incarnation, Revision),
    /// The plan, if there is one.
    Planned(Result<Plan, Failed>),
    /// The answer is out, as far as that was possible.
    Answered,
    /// Nothing was sent: the lease that gates the tables is not held any more.
    Gated,
    /// The store could not tell.
    Failed(String),
}

/// The leader of one term.
#[derive(Debug)]
pub(crate) struct Machine {
    me: NodeId,
    fence: Fence,
    rules: Rules,
    view: Arc<View>,
    /// Whether the view is no older than the claims. If it were older, an incarnation that only the former
    /// leader has seen would count as over.
    looked: bool,
    /// What the registrations showed of a former generation, before the first table was claimed; none before
    /// they were looked at, and where `_cluster` has been written.
    traces: Option<bool>,
    /// Where the record of the members was lost: until then a node that no record names may still host.
    lost_until: Option<Moment>,
    cluster: Option<Arc<ShardMap>>,
    cluster_stale: bool,
    /// What is to be remembered; it may be ahead of what `_cluster` holds.
    record: ClusterRecord,
    /// What `_cluster` holds of it.
    published: ClusterRecord,
    timers: Timers,
    roster: Roster,
    /// The roster that placement has followed; none at the beginning of the term.
    placed: Option<Roster>,
    /// Why the record can't be written, while it can't.
    unwritten: Option<Unwritten>,
    /// Runs that are evicted and still show in the view.
    evicted: BTreeMap<NodeId, Incarnation>,
    /// An eviction that came too late for the revision that was seen, with the newer one.
    evict_again: Option<PendingEviction>,
    /// The quarantined shards and the pending_evictions; none before `_cluster` is read, or where quarantine is off.
    poison: Option<Poisoning>,
    tables: BTreeMap<TableName, Table>,
    /// The nodes that this node's side of a partition has downed, as far as that is still to be stored.
    verdicts: BTreeMap<NodeId, DownDecision>,
    /// Each with how often it was begun before.
    queue: VecDeque<(Ticket, Command, u8)>,
    current: Option<Current>,
    answers: VecDeque<(Ticket, Reply)>,
    /// How often the answer in progress was sent before.
    answer_tries: u8,
    doing: Option<Step>,
    /// When `_cluster` was written with other members, and until when they may stay so.
    gathers: Option<(Moment, Moment)>,
    /// Not before this moment, after the store failed.
    pause_until: Option<Moment>,
    failures: u32,
    /// Whether the tables may be written: false where a further lease gates them and is not held.
    open: bool,
    succession: Option<Succession>,
    /// The transfer target that was waited for in vain.
    late_target: Option<NodeId>,
    /// What this process knows of earlier generations of `_cluster`.
    before: Before,
    stop: Option<Stop>,
}

/// Why the record can't be written.
#[derive(Debug)]
struct Unwritten {
    why: String,
    /// Whether a down decision is among what is missing: it is not remembered until it is reported again.
    verdict: bool,
}

#[derive(Debug)]
struct Table {
    spec: TableSpec,
    map: Option<Arc<ShardMap>>,
    /// When its versions were seen.
    seen: VersionTimes,
    stale: bool,
    /// It can't be claimed, and why.
    refused: Option<String>,
    due: Option<Due>,
    /// Failed rebalances in a row.
    failures: u32,
    check_at: Moment,
    /// The incarnations that its map names, and whether they may host; with the roster of the last look.
    tenancy: Vec<HostingState>,
    /// Runs that may host although they report nothing.
    lingering: BTreeSet<(NodeId, Incarnation)>,
    /// What the last plan started from, and for which version that holds.
    current: Option<(Version, Arc<Assignment>)>,
    planned: Option<(Arc<Job>, Result<Plan, Failed>)>,
    /// How busy its shards are; and what the present rebalance goes by, whatever is reported meanwhile.
    loads: Loads,
    figures: Option<Figures>,
    /// What the publish in progress does besides.
    publishing: Option<(u32, bool)>,
    /// Whether moves have still to begin that the last plan wants.
    more: bool,
    /// Whether a plan of this term has seen the roster as it is.
    followed: bool,
    /// Since when each shard has been in motion, as this leader has seen it.
    moving: BTreeMap<ShardId, (Version, Moment)>,
}

impl Table {
    fn is_unclaimed(&self) -> bool {
        self.map.is_none() && self.refused.is_none()
    }

    /// Whether it is claimed, and no node was ever given a shard of it.
    fn is_new(&self) -> bool {
        self.map.as_ref().is_some_and(|map| generations::is_new(map))
    }
}

/// A rebalance that is to come.
#[derive(Clone, Debug)]
struct Due {
    at: Moment,
    /// A burst of changes does not put it off for longer than this.
    cap: Moment,
    reason: String,
    /// The reason in one of a few words, for metrics.
    label: &'static str,
}

/// A command in progress.
#[derive(Debug)]
struct Current {
    ticket: Ticket,
    command: Command,
    tries: u8,
    writes: VecDeque<Write>,
    /// Whether the step in progress is its front write.
    writing: bool,
    done: CommandSummary,
}

impl Machine {
    pub(crate) fn new(
        me: NodeId,
        fence: Fence,
        rules: Rules,
        specs: &BTreeMap<TableName, TableSpec>,
        now: Moment,
    ) -> Self {
        let table = |spec: &TableSpec| Table {
            spec: spec.clone(),
            map: None,
            seen: VersionTimes::default(),
            stale: false,
            refused: None,
            due: None,
            failures: 0,
            check_at: now.plus(rules.check),
            tenancy: Vec::new(),
            lingering: BTreeSet::new(),
            current: None,
            planned: None,
            loads: Loads::default(),
            figures: None,
            publishing: None,
            more: false,
            followed: false,
            moving: BTreeMap::new(),
        };
        let tables = specs.iter().map(|(name, spec)| (name.clone(), table(spec))).collect();
        Self {
            me,
            fence,
            view: Arc::default(),
            looked: false,
            traces: None,
            lost_until: None,
            cluster: None,
            cluster_stale: false,
            record: ClusterRecord::default(),
            published: ClusterRecord::default(),
            timers: Timers::default(),
            roster: Roster::default(),
            placed: None,
            unwritten: None,
            evicted: BTreeMap::new(),
            evict_again: None,
            poison: None,
            tables,
            verdicts: BTreeMap::new(),
            queue: VecDeque::new(),
            current: None,
            answers: VecDeque::new(),
            answer_tries: 0,
            doing: None,
            gathers: None,
            pause_until: None,
            failures: 0,
            open: true,
            succession: rules.newer_leads_after.map(Succession::new),
            late_target: None,
            before: Before::default(),
            stop: None,
            rules,
        }
    }

    /// When this process saw the versions of a table, before it led.
    pub(crate) fn on_history(&mut self, name: &TableName, seen: VersionTimes) {
        if let Some(table) = self.tables.get_mut(name) {
            table.seen = seen;
        }
    }

    /// What this process knew of earlier generations of `_cluster` before it led.
    pub(crate) fn on_before(&mut self, before: Before) {
        self.before = before;
    }

    /// What is seen of the registrations has changed.
    pub(crate) fn on_view(&mut self, view: Arc<View>) {
        self.evicted.retain(|node, run| match view.presence(node) {
            Some(Presence::Present(record)) => record.info.incarnation == *run,
            _ => false,
        });
        self.view = view;
    }

    /// This node has waited for that one to lead, and does not give way to it again.
    pub(crate) fn has_waited_for(&mut self, transfer_target: Option<NodeId>) {
        self.late_target = transfer_target;
    }

    /// The lease that gates the tables is held now, or not any more. Only between two steps.
    pub(crate) fn on_gate(&mut self, held: bool) {
        if std::mem::replace(&mut self.open, held) == held {
            return;
        }
        if held {
            // Another holder may have written meanwhile.
            for table in self.tables.values_mut() {
                table.stale = table.map.is_some();
            }
            return;
        }
        for table in self.tables.values_mut() {
            table.planned = None;
        }
        // A command that is half done is begun anew, before those that came after it.
        if let Some(current) = self.current.take_if(|current| current.command.needs_gate()) {
            self.queue.push_front((current.ticket, current.command, current.tries));
        }
    }

    /// A command came in.
    pub(crate) fn on_command(&mut self, ticket: Ticket, command: Command) {
        if self.queue.len() >= COMMANDS_MAX {
            let why = format!("{COMMANDS_MAX} commands are waiting already");
            self.refuse(ticket, CommandError::Failed { why });
            return;
        }
        self.queue.push_back((ticket, command, 0));
    }

    /// This node's side of a partition continues without these nodes. Each down decision is written at most
    /// once: downing reports it again if it still holds.
    pub(crate) fn on_verdicts(&mut self, verdicts: &BTreeMap<NodeId, DownDecision>) {
        self.verdicts.clone_from(verdicts);
    }

    /// A command came in that can't even be judged.
    pub(crate) fn refuse(&mut self, ticket: Ticket, refusal: CommandError) {
        if ticket != NOBODY {
            self.answers.push_back((ticket, Reply::Refused(refusal)));
        }
    }

    /// What to do now. After [`Turn::Do`], [`on_outcome`](Self::on_outcome) has to come first.
    pub(crate) fn next(&mut self, now: Moment) -> Turn {
        debug_assert!(self.doing.is_none(), "the outcome of a step comes first");
        if self.stop == Some(Stop::Fenced) {
            return Turn::Stop(Stop::Fenced);
        }
        if let Some(until) = self.pause_until.filter(|until| *until > now) {
            return Turn::Wait(Some(until));
        }
        self.pause_until = None;
        if let Some(step) = self.next_answer() {
            return self.go(step);
        }
        if let Some(stop) = self.stop.clone() {
            return Turn::Stop(stop);
        }
        self.take_traces();
        if let Some(step) = self.next_read() {
            return self.go(step);
        }
        let Some(cluster) = self.cluster.clone().filter(|_| self.view.is_ready()) else {
            return Turn::Wait(None);
        };
        loop {
            let wake = match self.take_roster(&cluster, now) {
                Ok(wake) => wake,
                Err(step) => return self.go(step),
            };
            let remembered = self.record.clone();
            let wake = [
                wake,
                self.take_tenancy(&cluster, now),
                self.take_motions(now),
                self.take_succession(now),
            ];
            let wake = wake.into_iter().flatten().min();
            match self.next_write(now) {
                Some(Ok(step)) => return self.go(step),
                Some(Err(turn)) => return turn,
                None => {}
            }
            if self.open
                && let Some(step) = self.next_move(now).or_else(|| self.next_rebalance(now))
            {
                return self.go(step);
            }
            if self.record == remembered {
                return match self.next_check(now) {
                    Some(step) => self.go(step),
                    None => self.wait(wake, now),
                };
            }
        }
    }

    /// Waits for the earliest of this moment and the rebalances to come. A moment that has passed would be
    /// waited for again and again, and no time would go by.
    fn wait(&self, wake: Option<Moment>, now: Moment) -> Turn {
        let tables = self.tables.values().filter(|table| self.open && table.map.is_some());
        let due = tables.map(|table| table.due.as_ref().map_or(table.check_at, |due| due.at));
        let until = due.chain(wake).min();
        debug_assert!(until.is_none_or(|until| until > now), "waits at {now:?} until {until:?}");
        Turn::Wait(until)
    }

    fn go(&mut self, step: Step) -> Turn {
        self.doing = Some(step.clone());
        Turn::Do(step)
    }

    fn next_answer(&mut self) -> Option<Step> {
        self.answers.pop_front().map(|(ticket, reply)| Step::Answer(ticket, reply))
    }

    /// A periodic check reads everything first: the leader does not hear of a table that was deleted, or of a
    /// write of its own that arrived long after it had counted as failed.
    fn next_check(&mut self, now: Moment) -> Option<Step> {
        if !self.open {
            return None;
        }
        for table in self.tables.values_mut() {
            if table.map.is_some() && table.due.is_none() && table.check_at <= now {
                let reason = "periodic check".to_owned();
                table.due = Some(Due { at: now, cap: now, reason, label: "check" });
                table.stale = true;
                self.cluster_stale = true;
            }
        }
        self.next_read()
    }

    /// Looks for traces of a former generation where `_cluster` is new. No node has reported anything of a
    /// table if none was ever claimed.
    fn take_traces(&mut self) {
        let is_new = self.cluster.as_ref().is_some_and(|cluster| generations::is_new(cluster));
        if self.traces.is_none() && self.looked && is_new {
            let shows = |info: &NodeInfo| !info.reports.is_empty() || !info.ended.is_empty();
            self.traces = Some(self.view.present().any(|record| shows(&record.info)));
        }
    }

    /// Claims come before any read, so that no former leader can write after what is read.
    fn next_read(&self) -> Option<Step> {
        let Some(cluster) = &self.cluster else {
            return Some(Step::Claim(TableName::cluster(), cluster_header()));
        };
        if self.traces.is_none() && generations::is_new(cluster) {
            return Some(Step::Look);
        }
        let claim = self.tables.iter().find_map(|(name, table)| {
            (self.open && table.is_unclaimed())
                .then(|| Step::Claim(name.clone(), table.spec.header.clone()))
        });
        let stale = || {
            let table = self.tables.iter().find(|(_, table)| table.stale);
            table.map(|(name, _)| Step::Load(name.clone()))
        };
        let cluster = || self.cluster_stale.then(|| Step::Load(TableName::cluster()));
        let look = || (!self.looked).then_some(Step::Look);
        claim.or_else(look).or_else(cluster).or_else(stale)
    }

    /// Finds the roster; an `Err` is the step that has to be taken first.
    fn take_roster(
        &mut self,
        cluster: &Arc<ShardMap>,
        now: Moment,
    ) -> Result<Option<Moment>, Step> {
        let knows_at = self.take_loss(cluster, now);
        let tables = &self.tables;
        let owns = |node: &NodeId| {
            // What was not read yet may name it.
            tables.values().any(Table::is_unclaimed)
                || tables.values().filter_map(|table| table.map.as_ref()).any(|map| owns(map, node))
        };
        let hosts = if self.record.lost { self.hosts() } else { Vec::new() };
        let sources = Sources {
            me: &self.me,
            rules: &self.rules,
            view: &self.view,
            cluster,
            published: &self.published,
            hosts: &hosts,
            record: &self.record,
            owns: &owns,
        };
        let Taken { roster, record, pending_evictions, crashed, wake } =
            roster::take(&sources, &mut self.timers, now);
        let gone = |suspect: &PendingEviction| {
            self.evicted.get(&suspect.node) == Some(&suspect.incarnation)
        };
        if let Some(suspect) = pending_evictions.into_iter().find(|suspect| !gone(suspect)) {
            let again = self.evict_again.take().filter(|again| {
                (&again.node, again.incarnation) == (&suspect.node, suspect.incarnation)
            });
            return Err(Step::Evict(again.unwrap_or(suspect)));
        }
        let gathers_until = self.gathers_until(&record, now);
        if gathers_until.is_none() {
            let fall = |(node, run, counts_from): &(NodeId, Incarnation, Moment)| {
                poisoning::fall(&self.rules, &self.view, node, *run, *counts_from)
            };
            let mut falls: Vec<Fall> = crashed.iter().map(fall).collect();
            falls.extend(self.replaced(&roster, now));
            self.roster = roster;
            self.record = record;
            self.record.candidates = self.candidates();
            self.on_crashes(&falls, now);
        }
        let wake = wake.into_iter().chain(knows_at).chain(gathers_until);
        let wake = wake.chain(self.take_poison(now)).min();
        self.take_lives(cluster, now);
        if gathers_until.is_none() {
            match self.cluster_map(cluster) {
                Ok(None) => {
                    self.unwritten.take_if(|unwritten| !unwritten.verdict);
                }
                Ok(Some(map)) => {
                    let (name, version) = (TableName::cluster(), cluster.version());
                    return Err(Step::Publish(name, version, Arc::new(map)));
                }
                Err(error) => self.on_unwritten(&error, false),
            }
        } else if !self.record.says_what(&self.published) {
            // What can't wait ends the pause, and takes the members along.
            self.gathers = None;
            return self.take_roster(cluster, now);
        }
        let (reason, label) = match &self.placed {
            None => (Some(format!("term {} began", self.fence.term)), BY_TERM),
            Some(placed) => (self.roster.difference(placed), "members"),
        };
        if let Some(reason) = reason {
            self.placed = Some(self.roster.clone());
            self.trigger(&reason, label, now);
        }
        Ok(wake)
    }

    /// Deadline until which changes of the members are batched into the next version of `_cluster`; none to
    /// write them now. Until then everything goes on as if they had not been seen. A change that others wait
    /// for is never put off: a down decision, a command, a suspension, or an incarnation that may still run. A
    /// rebalance that comes due ends the batch, so that it is planned with the newest members.
    fn gathers_until(&self, record: &ClusterRecord, now: Moment) -> Option<Moment> {
        let (told, until) = self.gathers?;
        let idle = self.current.is_none() && self.queue.is_empty() && self.verdicts.is_empty();
        let dues = self.tables.values().filter_map(|table| Some(table.due.as_ref()?.at));
        // A rebalance that was due at the last version goes by that version: else it would never end.
        let due = dues.filter(|at| self.open && *at > told).min();
        let until = due.map_or(until, |due| until.min(due));
        let waits = idle && self.placed.is_some() && until > now;
        (waits && record.says_what(&self.published)).then_some(until)
    }

    /// Finds whether the record of the members is lost because `_cluster` was deleted. If it is, an
    /// incarnation that a map names or that is awaited may host for its whole TTL, unless it shows that it
    /// has stopped. An incarnation that no record names may do so as well. Returns when this time is over.
    fn take_loss(&mut self, cluster: &ShardMap, now: Moment) -> Option<Moment> {
        let generations = &self.record.generations;
        let mut tables = self.tables.iter().filter_map(|(name, it)| Some((name, it.map.as_ref()?)));
        let unknown =
            tables.any(|(name, map)| !generations::is_new(map) && !generations.contains_key(name));
        let is_late = generations::is_new(cluster)
            && (self.traces == Some(true) || !self.before.this(cluster.uid()).is_empty());
        if unknown || (self.lost_until.is_none() && (is_late || self.record.lost)) {
            if !self.record.lost {
                let term = self.fence.term;
                tracing::warn!(%term, "the record of the members is lost; hosts are waited for");
            }
            self.record.lost = true;
            self.lost_until = Some(now.plus(self.longest_ttl()));
        }
        let until = self.lost_until.filter(|_| self.record.lost)?;
        if until > now {
            self.hold_unconfirmed();
            return Some(until);
        }
        self.record.lost = false;
        let tables = self.tables.iter().filter(|(_, table)| table.is_new());
        for name in tables.map(|(name, _)| name.clone()).collect::<Vec<_>>() {
            self.trigger_table(
                &name,
                "the hosts of its former generation are over",
                "members",
                now,
            );
        }
        None
    }

    /// Down decisions are lost with the record, and a former leader may evict a node after this leader has
    /// looked. So an absent node counts as stopped only where its next incarnation or its own expiry says so,
    /// or where it has failed since: a failure has its own time.
    fn hold_unconfirmed(&mut self) {
        let listed = self.tables.values().filter_map(|table| table.map.as_ref());
        let listed = listed.flat_map(|map| map.nodes().iter().flatten());
        let listed = listed.map(|entry| (&entry.id, entry.incarnation));
        let awaited = self.record.generations.values().flat_map(|generation| &generation.awaits);
        let runs: BTreeSet<_> =
            listed.chain(awaited.map(|run| (&run.node, run.incarnation))).collect();
        let failed = |node: &NodeId| self.record.nodes.get(node)?.failed.as_ref();
        let has_failed = |(node, run): &(&NodeId, Incarnation)| {
            failed(node).is_some_and(|failed| failed.incarnation == *run)
        };
        let is_over = |(node, run): &(&NodeId, Incarnation)| match self.view.presence(node) {
            Some(Presence::Absent { record, how: Absence::Expired, .. })
            | Some(Presence::Present(record))
                if record.info.incarnation == *run =>
            {
                true
            }
            Some(presence) => presence.record().info.ended.contains(run),
            None => false,
        };
        let held = runs.into_iter().filter(|run| !is_over(run) && !has_failed(run));
        let held: Vec<_> = held.map(|(node, run)| (node.clone(), run)).collect();
        let ttl = Ttl::new(self.longest_ttl()).unwrap_or(Ttl::MAX);
        for (node, run) in held {
            self.record.note(&node, |note| {
                note.former.entry(run).or_insert(ttl);
            });
        }
    }

    /// The nodes that the maps name as hosts.
    fn hosts(&self) -> Vec<NodeEntry> {
        let maps = self.tables.values().filter_map(|table| table.map.as_ref());
        let hosts = maps.flat_map(|map| {
            map.nodes().iter().flatten().filter(|entry| owns(map, &entry.id)).cloned()
        });
        hosts.collect()
    }

    /// The longest time for which any node may host that renews no more.
    fn longest_ttl(&self) -> Duration {
        let seen = self.view.records().map(|record| record.ttl.get());
        seen.chain([self.rules.node_ttl]).max().unwrap_or_default()
    }

    /// Finds the tables that are in another generation than before, and the incarnations that have still to
    /// stop the earlier one.
    fn take_lives(&mut self, cluster: &ShardMap, now: Moment) {
        let mut generations = std::mem::take(&mut self.record.generations);
        let sources = Sources {
            me: &self.me,
            rules: &self.rules,
            view: &self.view,
            cluster,
            published: &self.published,
            hosts: &[],
            record: &self.record,
            owns: &|_| false,
        };
        let before = self.before.this(cluster.uid());
        let (mut begin, mut born) = (Vec::new(), Vec::new());
        for (name, table) in &self.tables {
            let Some(map) = &table.map else { continue };
            if generations.get(name).is_some_and(|known| known.uid != map.uid()) {
                born.push(name.clone());
            }
            let table = (name, &**map, table.spec.handoff);
            if generations::take(&sources, &self.timers, &mut generations, before, table, now) {
                begin.push(name.clone());
            }
        }
        self.record.generations = generations;
        for name in born {
            self.record.parked.remove(&name);
            if let Some(poison) = &mut self.poison {
                poison.forget(&name);
                poison.remember(&mut self.record);
            }
        }
        for name in begin {
            self.trigger_table(
                &name,
                "the hosts of its former generation have stopped",
                "members",
                now,
            );
        }
    }

    /// Whether hosts of an earlier generation of the table have still to stop.
    fn awaits_former_life(&self, name: &TableName) -> bool {
        let generation = self.record.generations.get(name);
        generation.is_some_and(|generation| !generation.awaits.is_empty())
            || self.awaits_unknown(name)
    }

    /// Whether an incarnation that is not known any more may host an earlier generation of the table.
    fn awaits_unknown(&self, name: &TableName) -> bool {
        let Some(table) = self.tables.get(name).filter(|_| self.record.lost) else { return false };
        table.spec.handoff != Handoff::Eager && table.is_new()
    }

    /// Incarnations that another one of their node followed, without having been seen to end and without a
    /// report of their own. The process may have been gone for a while, and most are back at once.
    fn replaced(&self, roster: &Roster, now: Moment) -> Vec<Fall> {
        let fall = |(node, seat): (&NodeId, &Seat)| {
            let before = &self.roster.seat(node)?.entry;
            let follows = before.incarnation != seat.entry.incarnation && before.status.may_host();
            let may_run = self.view.may_run(node, before.incarnation, self.rules.node_ttl);
            let unseen = matches!(may_run, MayRun::Until(until) if until > now);
            let heard = now.minus(self.rules.heartbeat);
            (follows && unseen).then(|| Fall::new(node.clone(), before.incarnation, heard, now))
        };
        roster.0.iter().filter_map(fall).collect()
    }

    /// Incarnations ended unplanned. If so many vanish that the mass-failure guard holds, none of it is
    /// evidence.
    fn on_crashes(&mut self, falls: &[Fall], now: Moment) {
        let Some(poison) = self.poison.as_mut().filter(|_| !falls.is_empty()) else { return };
        if self.record.nodes.values().any(|note| note.suspended.is_some()) {
            return;
        }
        let hosted = self.tables.iter().filter_map(|(name, table)| {
            let (map, handoff) = (table.map.as_ref()?, table.spec.handoff);
            Some(Hosted { name, map, seen: &table.seen, handoff })
        });
        poison.on_crashes(falls, &hosted.collect::<Vec<_>>(), now);
    }

    /// Releases shards that have been quarantined for long, and writes down the present ones. Returns when the
    /// next one is due.
    fn take_poison(&mut self, now: Moment) -> Option<Moment> {
        let old = self.poison.as_mut()?.release_old(now);
        for TableShard { table, shard } in old {
            let reason = format!("parked shard {shard} is given another try");
            self.trigger_table(&table, &reason, "parked", now);
        }
        let poison = self.poison.as_ref()?;
        poison.remember(&mut self.record);
        poison.releases_at()
    }

    /// Finds which incarnations that the maps name may still host. Returns when the first of them has to stop.
    fn take_tenancy(&mut self, cluster: &ShardMap, now: Moment) -> Option<Moment> {
        let sources = Sources {
            me: &self.me,
            rules: &self.rules,
            view: &self.view,
            cluster,
            published: &self.published,
            hosts: &[],
            record: &self.record,
            owns: &|_| false,
        };
        let (mut wake, mut over) = (None, Vec::new());
        for (name, table) in &mut self.tables {
            let Some(map) = &table.map else { continue };
            let mut lingering = BTreeSet::new();
            table.tenancy.clear();
            for node in map.nodes() {
                let tenancy = node.as_ref().map_or(HostingState::Stopped, |node| {
                    let run = (&node.id, node.incarnation);
                    roster::tenancy(&sources, &self.timers, run, now)
                });
                if let (Some(node), HostingState::MayStillRun(until)) = (node, tenancy) {
                    lingering.insert((node.id.clone(), node.incarnation));
                    wake = wake.into_iter().chain(until).min();
                }
                table.tenancy.push(tenancy);
            }
            let left = std::mem::replace(&mut table.lingering, lingering);
            if table.due.is_none() && left.iter().any(|run| !table.lingering.contains(run)) {
                over.push(name.clone());
            }
        }
        for name in over {
            self.trigger_table(&name, "a run that may have gone on is over", "members", now);
        }
        wake
    }

    /// Notes since when shards are in motion, and which of them are stuck; tells when the next may be.
    fn take_motions(&mut self, now: Moment) -> Option<Moment> {
        let timeout = self.rules.handoff_timeout;
        let mut wake = None;
        for (name, table) in &mut self.tables {
            let Some(map) = &table.map else { continue };
            let old = std::mem::take(&mut table.moving);
            let mut stuck = BTreeSet::new();
            for (&shard, motions) in map.motions() {
                let Some(since) = motions.iter().map(|motion| motion.since).min() else { continue };
                let seen = old.get(&shard).filter(|(version, _)| *version == since);
                let at = seen.map_or(now, |(_, at)| *at);
                table.moving.insert(shard, (since, at));
                let late = at.plus(timeout);
                if late > now {
                    wake = Some(wake.map_or(late, |wake: Moment| wake.min(late)));
                } else if stuck.len() < STUCK_MAX {
                    stuck.insert(shard);
                }
            }
            if stuck.is_empty() {
                self.record.stuck.remove(name);
            } else if self.record.stuck.get(name) != Some(&stuck) {
                tracing::warn!(table = %name, shards = stuck.len(), "a handoff is stuck");
                self.record.stuck.insert(name.clone(), stuck);
            }
        }
        let tables = &self.tables;
        self.record.stuck.retain(|name, _| tables.contains_key(name));
        wake
    }

    /// The nodes that have a candidate slot.
    fn candidates(&self) -> BTreeSet<NodeId> {
        let applicants = willing(&self.roster, &self.view).map(|(seat, seen)| Applicant {
            node: &seen.id,
            zone: seen.zone.as_ref(),
            since: seat.entry.since,
        });
        let applicants: Vec<_> = applicants.collect();
        let places = if self.roster.0.len() > self.rules.places { self.rules.places } else { 0 };
        candidacy::give(places, &self.me, &self.record.candidates, &applicants)
    }

    /// Begins to hand over to a node of a newer version, where that is wanted; tells when it may be.
    fn take_succession(&mut self, now: Moment) -> Option<Moment> {
        let succession = self.succession.as_mut()?;
        let candidates = willing(&self.roster, &self.view).map(|(_, seen)| Candidate {
            node: &seen.id,
            incarnation: seen.incarnation,
            version: seen.version.as_ref(),
        });
        let candidates: Vec<_> = candidates.collect();
        match succession.decide(&self.me, &candidates, now) {
            Ok(to) => {
                tracing::info!(%to, "leadership goes to a node of a newer version");
                self.queue.push_back((NOBODY, Command::TransferLeadership { to }, 0));
                None
            }
            Err(wake) => wake,
        }
    }

    /// The next version of `_cluster`; none if it says all of this already.
    fn cluster_map(&self, cluster: &ShardMap) -> coord_core::Result<Option<ShardMap>> {
        let mut edit = cluster.edit();
        for seat in self.roster.0.values() {
            edit.put_node(seat.entry.clone())?;
        }
        for node in cluster.nodes().iter().flatten() {
            if self.roster.seat(&node.id).is_none() {
                edit.remove_node(&node.id)?;
            }
        }
        let listed = |node: &NodeId| self.roster.seat(node).map(|seat| &seat.entry);
        edit.set_annex(self.record.write_beside(listed)?)?;
        Ok(edit.finish(self.fence.clone()))
    }

    /// Asks for a rebalance of every table, after a while in which more may change.
    fn trigger(&mut self, reason: &str, label: &'static str, now: Moment) {
        let names: Vec<_> = self.tables.keys().cloned().collect();
        for name in names {
            self.trigger_table(&name, reason, label, now);
        }
    }

    fn trigger_table(&mut self, name: &TableName, reason: &str, label: &'static str, now: Moment) {
        const BURST: u32 = 5;
        let delay = self.rules.delay;
        let Some(table) = self.tables.get_mut(name) else { return };
        (table.followed, table.figures) = (false, None);
        // A retry after a failure may be far away, and what failed may go well now.
        let retries = std::mem::take(&mut table.failures) > 0;
        // What changes all the time does not put off for ever what is due.
        let due = table.due.take().filter(|due| due.at > now || due.label == label);
        let (cap, reason) = match due {
            Some(due) if !retries => (due.cap, join(&due.reason, reason)),
            Some(due) => (now.plus(delay.saturating_mul(BURST)), join(&due.reason, reason)),
            None => (now.plus(delay.saturating_mul(BURST)), reason.to_owned()),
        };
        table.due = Some(Due { at: now.plus(delay).min(cap), cap, reason, label });
    }

    fn placing<'a>(&'a self, table: &'a Table, map: &'a ShardMap) -> Placing<'a> {
        let name = self.tables.iter().find(|(_, other)| std::ptr::eq(*other, table));
        let report = |node: &Option<NodeEntry>| {
            let node = node.as_ref()?;
            let Presence::Present(record) = self.view.presence(&node.id)? else { return None };
            let info = &record.info;
            let report = info.reports.get(name?.0)?;
            (info.incarnation == node.incarnation && report.uid == map.uid()).then_some(report)
        };
        let slots = (0_u16..).zip(map.nodes());
        let slots = slots.filter_map(|(slot, node)| Some((&node.as_ref()?.id, Slot::new(slot))));
        let shards = map.header().shards.get();
        let motions_max = self.rules.motions_max.unwrap_or(shards / MOTIONS_SHARE).max(1);
        Placing {
            map,
            slots: slots.collect(),
            roster: &self.roster,
            fence: &self.fence,
            handoff: table.spec.handoff,
            tenancy: &table.tenancy,
            parked: name.and_then(|(name, _)| self.record.parked.get(name)),
            reports: map.nodes().iter().map(report).collect(),
            motions_max: usize::try_from(motions_max).unwrap_or(usize::MAX),
        }
    }

    /// Finds how busy a table's shards are, once for each rebalance: a plan of what changes all the time
    /// would never be the answer to what is asked. A new leader does not go on at once where its predecessor had
    /// moved as much for balance as one plan may.
    fn take_loads(&mut self, name: &TableName, now: Moment) {
        let by_command = self.current_write().is_some();
        let Some(table) = self.tables.get_mut(name) else { return };
        let Some(map) = &table.map else { return };
        if table.figures.is_none() && table.spec.strategy.wants_loads() {
            let mut figures = table.loads.take(name, map, &self.view, now);
            let begins = table.due.as_ref().is_some_and(|due| due.label == BY_TERM);
            figures.hold |= begins && !by_command;
            table.figures = Some(figures);
        }
    }

    /// Makes the next version of a table, or asks for the plan that it needs.
    fn plan(
        &mut self,
        name: &TableName,
        reason: &str,
        now: Moment,
    ) -> Result<Option<Step>, Failed> {
        let made = self.tables.get_mut(name).and_then(|table| table.planned.take());
        self.take_loads(name, now);
        let Some((table, map)) = self.tables.get(name).and_then(|t| Some((t, t.map.clone()?)))
        else {
            return Ok(None);
        };
        let placing = self.placing(table, &map);
        let kept = table.current.as_ref().filter(|(version, _)| *version == map.version());
        let current = match kept {
            Some((_, current)) => Arc::clone(current),
            None => Arc::new(placing.assignment()?),
        };
        let (pins, paused) = (self.record.pins.get(name), self.record.paused);
        let question = placing.question(&current, pins, paused, table.figures.as_ref());
        let (next, more) = match question {
            None => placing.rebalance(None, reason)?,
            Some(question) => {
                let strategy = Arc::clone(&table.spec.strategy);
                let job = Arc::new(Job { strategy, current: Arc::clone(&current), question });
                match made.as_ref().filter(|(planned, _)| *planned == job) {
                    Some((_, Ok(plan))) => {
                        if !plan.unsatisfied().is_empty() {
                            let unsatisfied = plan.unsatisfied();
                            tracing::debug!(table = %name, ?unsatisfied, "wishes stay open");
                        }
                        placing.rebalance(Some(plan), reason)?
                    }
                    Some((_, Err(failed))) => return Err(failed.clone()),
                    None => return Ok(Some(Step::Plan(name.clone(), job))),
                }
            }
        };
        let Some(table) = self.tables.get_mut(name) else { return Ok(None) };
        // Where shards are in motion, what they start from changes with the roster too.
        table.current = map.motions().is_empty().then(|| (map.version(), current));
        table.planned = made.filter(|_| next.is_some());
        if next.is_none() {
            (table.more, table.followed) = (more, true);
        }
        Ok(Self::publish(table, name, &map, next))
    }

    fn publish(
        table: &mut Table,
        name: &TableName,
        map: &ShardMap,
        next: Option<Next>,
    ) -> Option<Step> {
        let Next { map: next, begun, more } = next?;
        table.publishing = Some((begun, more));
        Some(Step::Publish(name.clone(), map.version(), next))
    }

    /// The next step of the moves under way, as far as the reports allow it.
    fn next_move(&mut self, now: Moment) -> Option<Step> {
        let names: Vec<_> = self.tables.keys().cloned().collect();
        for name in names {
            let Some((table, map)) = self.tables.get(&name).and_then(|t| Some((t, t.map.clone()?)))
            else {
                continue;
            };
            let moves = map.motions().len();
            let placing = self.placing(table, &map);
            let (max, done) = (placing.motions_max, table.followed && !table.more);
            let next = if moves == 0 { Ok(None) } else { placing.advance(done) };
            let Some(table) = self.tables.get_mut(&name) else { continue };
            match next {
                Ok(Some(mut next)) => {
                    next.more = table.more;
                    return Self::publish(table, &name, &map, Some(next));
                }
                Ok(None) => {}
                Err(failed) => {
                    tracing::debug!(table = %name, %failed, "the moves wait for the next plan");
                }
            }
            let open = TableNote::read(map.annex()).rebalance.is_some_and(|run| !run.done);
            let ready = (table.more && moves * 2 <= max) || (open && moves == 0);
            if table.due.is_none() && ready {
                let reason = "its moves go on".to_owned();
                table.due = Some(Due { at: now, cap: now, reason, label: "moves" });
            }
        }
        None
    }

    /// The first rebalance that is due and changes anything.
    fn next_rebalance(&mut self, now: Moment) -> Option<Step> {
        let names: Vec<_> = self.tables.keys().cloned().collect();
        for name in names {
            let Some((reason, map)) = self.due(&name, now) else { continue };
            if self.waits_for_members(&name, &map) || self.awaits_former_life(&name) {
                // The next node that joins, or the last one that stops, triggers it again.
                self.settled(&name, now);
                continue;
            }
            match self.plan(&name, &reason, now) {
                Ok(Some(step)) => return Some(step),
                Ok(None) => self.settled(&name, now),
                Err(failed) => self.put_off(&name, &failed, &reason, now),
            }
        }
        None
    }

    /// Whether too few are there to begin with, so that the first one up does not get everything; also
    /// after all have been away.
    fn waits_for_members(&self, name: &TableName, map: &ShardMap) -> bool {
        let active = self.roster.active();
        let Some(table) = self.tables.get(name) else { return false };
        let hosted =
            |(count, tenancy): (u32, &HostingState)| count > 0 && *tenancy != HostingState::Stopped;
        active > 0
            && active < self.rules.min_members
            && !map.counts().into_iter().zip(&table.tenancy).any(hosted)
    }

    fn due(&self, name: &TableName, now: Moment) -> Option<(String, Arc<ShardMap>)> {
        let table = self.tables.get(name)?;
        let map = table.map.clone()?;
        let due = table.due.as_ref().filter(|due| due.at <= now)?;
        Some((due.reason.clone(), map))
    }

    /// The table is as it should be.
    fn settled(&mut self, name: &TableName, now: Moment) {
        if let Some(table) = self.tables.get_mut(name) {
            (table.due, table.figures) = (None, None);
            table.failures = 0;
            let check = now.plus(self.rules.check);
            let waits = table.loads.waits_until().filter(|until| *until > now);
            table.check_at = waits.map_or(check, |until| until.min(check));
        }
        self.record.failures.remove(name);
    }

    /// The old map stays in force, and the rebalance is tried again later.
    fn put_off(&mut self, name: &TableName, failed: &Failed, reason: &str, now: Moment) {
        let check = self.rules.check;
        let why = record::brief(&failed.to_string());
        let Some(table) = self.tables.get_mut(name) else { return };
        table.figures = None;
        // A shard of a node that failed is as much without a host as one that never had an owner.
        let homeless = table.map.as_ref().is_some_and(|map| {
            let hosted = |slot: Slot| {
                let tenancy = slot.index().and_then(|index| table.tenancy.get(index));
                tenancy.is_some_and(|tenancy| *tenancy != HostingState::Stopped)
            };
            let primary = |shard| map.owner_slots(shard).next();
            let parked = self.record.parked.get(name);
            let is_parked = |shard| parked.is_some_and(|parked| parked.contains_key(&shard));
            let shards = map.header().shards;
            !shards.shards().all(|s| primary(s).is_some_and(hosted) || is_parked(s))
        });
        let pause = if homeless { doubled(table.failures).min(check) } else { check };
        table.failures = table.failures.saturating_add(1);
        let at = now.plus(pause);
        let label = table.due.as_ref().map_or(BY_COMMAND, |due| due.label);
        table.due = Some(Due { at, cap: at, reason: reason.to_owned(), label });
        table.check_at = at;
        if self.record.failures.get(name) != Some(&why) {
            tracing::warn!(table = %name, why, "a rebalance failed; the old map stays in force");
            crate::telemetry::rebalancing_failed("plan");
        }
        self.record.failures.insert(name.clone(), why);
    }

    /// The next write of a command; begins the next command when there is none.
    fn next_write(&mut self, now: Moment) -> Option<Result<Step, Turn>> {
        loop {
            if self.current.is_none() && !self.begin_verdict(now) {
                let (ticket, command, tries) = self.next_command()?;
                self.begin(ticket, command, tries);
            } else {
                match self.front_write(now) {
                    Front::Step(step) => {
                        if let Some(current) = &mut self.current {
                            current.writing = true;
                        }
                        return Some(Ok(step));
                    }
                    Front::Nothing => self.write_done(None),
                    Front::Refused(refusal) => self.finish(Reply::Refused(refusal)),
                    Front::Empty => self.finish_done(),
                }
            }
            if let Some(step) = self.next_answer() {
                return Some(Ok(step));
            }
            if let Some(stop) = self.stop.as_ref().filter(|_| self.current.is_none()) {
                return Some(Err(Turn::Stop(stop.clone())));
            }
        }
    }

    /// The first command that can be carried out now; those that place shards wait in order for the gate.
    fn next_command(&mut self) -> Option<(Ticket, Command, u8)> {
        let ready = |(_, command, _): &(Ticket, Command, u8)| self.open || !command.needs_gate();
        let index = self.queue.iter().position(ready)?;
        self.queue.remove(index)
    }

    /// Begins to write a down decision, as the command to declare the node failed would.
    fn begin_verdict(&mut self, now: Moment) -> bool {
        while let Some((node, DownDecision { incarnation, why })) = self.verdicts.pop_first() {
            let stays =
                |seat: &Seat| seat.entry.incarnation == incarnation && seat.entry.status.may_host();
            if !self.roster.seat(&node).is_some_and(stays) {
                continue;
            }
            let runs_on = match self.view.presence(&node) {
                Some(Presence::Present(seen)) => Some(seen.ttl),
                _ => None,
            };
            let until = runs_on.map(|ttl| now.plus(ttl.get()));
            self.timers.downed.insert((node.clone(), incarnation), until);
            let failure = Failure { runs_on, downed: true, ..Failure::over(incarnation, &why) };
            let note = Note::Failed(node.clone(), failure);
            let (ticket, tries, writing) = (NOBODY, 0, false);
            let writes = VecDeque::from([Write::Note(note)]);
            let (command, done) =
                (Command::MarkNodeFailed { node, why }, CommandSummary::default());
            self.current = Some(Current { ticket, command, tries, writes, writing, done });
            return true;
        }
        false
    }

    fn begin(&mut self, ticket: Ticket, command: Command, tries: u8) {
        let table = |name: &TableName| self.tables.get(name)?.map.clone();
        let lingers = |run: &NodeEntry| {
            let key = (run.id.clone(), run.incarnation);
            self.tables.values().any(|table| table.lingering.contains(&key))
        };
        let bench = judge::Bench {
            lingers: &lingers,
            me: &self.me,
            roster: &self.roster,
            record: &self.record,
            view: &self.view,
            tables: self.tables.keys().cloned().collect(),
            map: &table,
        };
        match bench.judge(&command) {
            Ok(writes) => {
                let (writes, done) = (writes.into(), CommandSummary::default());
                let writing = false;
                self.current = Some(Current { ticket, command, tries, writes, writing, done });
            }
            Err(refusal) => self.refuse(ticket, refusal),
        }
    }

    fn front_write(&mut self, now: Moment) -> Front {
        let Some(write) = self.current.as_ref().and_then(|current| current.writes.front()) else {
            return Front::Empty;
        };
        match write.clone() {
            Write::Note(note) => {
                if let (Note::Unpark(shard), Some(poison)) = (&note, &mut self.poison) {
                    poison.release(shard);
                }
                note.apply(&mut self.record);
                self.front_record()
            }
            Write::Owners(table, _) | Write::Rebalance(table, _)
                if self.awaits_former_life(&table) =>
            {
                let why =
                    format!("hosts of the former generation of table {table} have not stopped yet");
                Front::Refused(CommandError::Failed { why })
            }
            Write::Owners(table, owners) => self.front_owners(&table, &owners),
            Write::Rebalance(table, reason) => match self.plan(&table, &reason, now) {
                Ok(Some(step)) => Front::Step(step),
                Ok(None) => {
                    self.settled(&table, now);
                    Front::Nothing
                }
                Err(failed) => {
                    let why = failed.to_string();
                    self.put_off(&table, &failed, &reason, now);
                    Front::Refused(CommandError::Failed { why })
                }
            },
            Write::StepDown => {
                self.stop = Some(Stop::SteppedDown);
                Front::Nothing
            }
        }
    }

    fn front_record(&mut self) -> Front {
        let Some(cluster) = self.cluster.clone() else { return Front::Nothing };
        match self.cluster_map(&cluster) {
            Ok(Some(map)) => {
                let version = cluster.version();
                Front::Step(Step::Publish(TableName::cluster(), version, Arc::new(map)))
            }
            Ok(None) => Front::Nothing,
            Err(error) => {
                // Not remembered, so that the next version is not refused for the same reason.
                self.cluster_stale = true;
                if self.current.as_ref().is_some_and(|current| current.ticket == NOBODY) {
                    self.on_unwritten(&error, true);
                }
                Front::Refused(CommandError::Failed { why: error.to_string() })
            }
        }
    }

    /// The leader itself has something to remember, and can't write it down.
    fn on_unwritten(&mut self, error: &coord_core::Error, verdict: bool) {
        let why = record::brief(&error.to_string());
        if self.unwritten.is_none() {
            tracing::warn!(why, "the leader can't write down what it has to remember");
        }
        let verdict = verdict || self.unwritten.as_ref().is_some_and(|before| before.verdict);
        self.unwritten = Some(Unwritten { why, verdict });
    }

    /// Why the leader can't write down what it has to remember, while it can't.
    pub(crate) fn unwritten(&self) -> Option<&str> {
        self.unwritten.as_ref().map(|unwritten| &*unwritten.why)
    }

    fn front_owners(&mut self, name: &TableName, owners: &BTreeMap<ShardId, Vec<NodeId>>) -> Front {
        let Some((table, map)) = self.tables.get(name).and_then(|t| Some((t, t.map.clone()?)))
        else {
            return Front::Refused(CommandError::TableNotFound { table: name.clone() });
        };
        let more = table.more;
        match self.placing(table, &map).assign(owners) {
            Ok(next) => {
                let table = self.tables.get_mut(name);
                let next = next.map(|next| Next { more, ..next });
                let step = table.and_then(|table| Self::publish(table, name, &map, next));
                step.map_or(Front::Nothing, Front::Step)
            }
            Err(Failed::Violation(violation)) => {
                Front::Refused(CommandError::InvariantViolation(violation))
            }
            Err(failed) => Front::Refused(CommandError::Failed { why: failed.to_string() }),
        }
    }

    /// The front write of the current command took effect, in this version of this table.
    fn write_done(&mut self, effect: Option<(TableName, Version, u32)>) {
        let Some(current) = &mut self.current else { return };
        current.writes.pop_front();
        if let Some((table, version, moved)) = effect {
            current.done.versions.insert(table, version);
            current.done.moved += moved;
        }
    }

    fn finish_done(&mut self) {
        let done = self.current.as_mut().map(|current| std::mem::take(&mut current.done));
        self.finish(Reply::Done(done.unwrap_or_default()));
    }

    fn finish(&mut self, reply: Reply) {
        if let Some(Current { ticket, .. }) = self.current.take()
            && ticket != NOBODY
        {
            self.answers.push_back((ticket, reply));
        }
    }

    /// The current command's write came to nothing, as far as is known: it is tried again, on what is
    /// stored then.
    fn again(&mut self) {
        let Some(mut current) = self.current.take() else { return };
        current.tries += 1;
        if current.tries >= COMMAND_TRIES_MAX {
            let why = "the store did not take it".to_owned();
            self.refuse(current.ticket, CommandError::Failed { why });
        } else if matches!(current.writes.front(), Some(Write::Owners(..))) {
            // The owners may follow from the map as it was.
            self.queue.push_front((current.ticket, current.command, current.tries));
        } else {
            self.current = Some(current);
        }
    }

    /// How the step in progress came out.
    pub(crate) fn on_outcome(&mut self, outcome: Outcome, now: Moment) {
        let Some(step) = self.doing.take() else { return };
        let current = self.current.as_mut();
        let ordered = current.is_some_and(|current| std::mem::take(&mut current.writing));
        match outcome {
            Outcome::Fenced => self.stop = Some(Stop::Fenced),
            // Nothing was sent; `on_gate` follows.
            Outcome::Gated => {}
            Outcome::Deleted => {
                if let Step::Publish(name, ..) = step {
                    self.stop = Some(Stop::Deleted(name));
                }
            }
            Outcome::Failed(why) => self.on_failed(step, ordered, &why, now),
            Outcome::Looked => self.looked = true,
            Outcome::Claimed(map) => {
                self.looked = false;
                self.on_map(&step, Some(map), now);
            }
            Outcome::Loaded(map) => self.on_map(&step, map, now),
            Outcome::Refused(why) => self.on_refused(&step, why),
            Outcome::Published => self.on_published(step, ordered, now),
            Outcome::Conflict => self.on_not_written(&step, ordered),
            Outcome::Evicted => self.on_evicted(step, now),
            Outcome::Alive(incarnation, revision) => {
                self.on_alive(&step, incarnation, &revision, now);
            }
            Outcome::Answered => self.answer_tries = 0,
            Outcome::Planned(planned) => {
                if let Step::Plan(name, job) = step
                    && let Some(table) = self.tables.get_mut(&name)
                {
                    table.planned = Some((job, planned));
                }
            }
        }
        if self.pause_until.is_none() {
            self.failures = 0;
        }
    }

    fn on_failed(&mut self, step: Step, ordered: bool, why: &str, now: Moment) {
        if self.failures == 0 {
            tracing::warn!(why, "the leader's call to the store failed; it is repeated");
            crate::telemetry::rebalancing_failed("store");
        }
        self.pause_until = Some(now.plus(doubled(self.failures).min(self.rules.check)));
        self.failures = self.failures.saturating_add(1);
        match step {
            Step::Answer(ticket, reply) => self.answer_again(ticket, reply),
            step => self.on_not_written(&step, ordered),
        }
    }

    /// A request that stays unanswered is carried out once more by the next leader, so a command to step down
    /// would go from leader to leader.
    fn answer_again(&mut self, ticket: Ticket, reply: Reply) {
        self.answer_tries += 1;
        if self.answer_tries < ANSWER_TRIES_MAX {
            self.answers.push_front((ticket, reply));
        } else {
            self.answer_tries = 0;
        }
    }

    /// The write may have been applied: what is stored decides what is still to be done.
    fn on_not_written(&mut self, step: &Step, ordered: bool) {
        if let Step::Publish(name, ..) = step {
            match self.tables.get_mut(name) {
                Some(table) => table.stale = true,
                None => self.cluster_stale = true,
            }
        }
        if ordered {
            self.again();
        }
    }

    fn on_map(&mut self, step: &Step, map: Option<Arc<ShardMap>>, now: Moment) {
        let (Step::Claim(name, _) | Step::Load(name)) = step else { return };
        if let Some(table) = self.tables.get_mut(name) {
            table.stale = false;
            if let Some(map) = &map {
                table.seen.note(map, now);
            }
            let same = |old: &Arc<ShardMap>| map.as_ref().is_some_and(|map| map.uid() == old.uid());
            if table.map.as_ref().is_some_and(|old| !same(old)) {
                self.stop = Some(Stop::Deleted(name.clone()));
            }
            table.map = map;
            return;
        }
        self.cluster_stale = false;
        let same = |map: &Arc<ShardMap>| {
            self.cluster.as_ref().is_none_or(|cluster| cluster.uid() == map.uid())
        };
        let Some(map) = map.filter(same) else {
            // What is to be remembered is lost with it, and this term goes by it.
            self.stop = Some(Stop::Deleted(name.clone()));
            return;
        };
        match ClusterRecord::read_beside(&map) {
            Ok(mut record) => {
                self.published.clone_from(&record);
                // This node leads now, so the succession is settled, unless the node was only faster than the
                // transfer target, and has not seen so before.
                let transfer_target = record.transfer_target.take().filter(|transfer_target| {
                    *transfer_target != self.me
                        && self.cluster.is_none()
                        && self.late_target.as_ref() != Some(transfer_target)
                        && matches!(self.view.presence(transfer_target), Some(Presence::Present(_)))
                });
                if let Some(transfer_target) = transfer_target {
                    self.stop = Some(Stop::Yields(transfer_target));
                }
                if self.poison.is_none() {
                    let seen = self.tables.iter().map(|(name, table)| (name.clone(), &table.seen));
                    let seen = seen.collect();
                    self.poison = Poisoning::resume(&self.rules, &record, &seen, now);
                }
                self.record = record;
                self.cluster = Some(map);
            }
            Err(error) => self.stop = Some(Stop::Refused(error.to_string())),
        }
    }

    fn on_refused(&mut self, step: &Step, why: String) {
        let Step::Claim(name, _) = step else { return };
        match self.tables.get_mut(name) {
            Some(table) => {
                tracing::error!(table = %name, why, "the table can't be used");
                table.refused = Some(why);
            }
            None => self.stop = Some(Stop::Refused(why)),
        }
    }

    fn on_published(&mut self, step: Step, ordered: bool, now: Moment) {
        let Step::Publish(name, _, map) = step else { return };
        let version = map.version();
        let Some(table) = self.tables.get_mut(&name) else {
            let others = self.cluster.as_ref().is_none_or(|old| old.nodes() != map.nodes());
            if others {
                let members = map.nodes().iter().flatten().count();
                self.gathers = self.rules.gathers_for(members).map(|pause| (now, now.plus(pause)));
            }
            self.published.clone_from(&self.record);
            self.cluster = Some(map);
            self.unwritten = None;
            if ordered {
                self.write_done(Some((name, version, 0)));
            }
            return;
        };
        let (moved, more) = table.publishing.take().unwrap_or_default();
        let rebalance = TableNote::read(map.annex()).rebalance;
        let placed_anew = rebalance.is_some_and(|run| run.since == version);
        let label = table.due.as_ref().map_or(BY_COMMAND, |due| due.label);
        table.seen.note(&map, now);
        table.map = Some(map);
        table.more = more;
        tracing::debug!(table = %name, %version, moved, "a map is published");
        if ordered && matches!(self.current_write(), Some(Write::Owners(..))) {
            self.write_done(Some((name, version, moved)));
            return;
        }
        let by_command = ordered && matches!(self.current_write(), Some(Write::Rebalance(..)));
        if placed_anew {
            let label = if by_command { BY_COMMAND } else { label };
            crate::telemetry::rebalancing_triggered(label);
        }
        if by_command {
            self.write_done(Some((name.clone(), version, moved)));
        }
        if let Some(table) = self.tables.get_mut(&name)
            && let Some((_, Ok(plan))) = table.planned.take()
        {
            table.followed = true;
            // Where all of it came about, the next plan starts from this one.
            let next = plan.into_next();
            let same = |map: &Arc<ShardMap>| {
                let ids = map.nodes().iter().map(|node| node.as_ref().map(|node| &node.id));
                map.motions().is_empty()
                    && map.raw_owners() == next.raw_owners()
                    && ids.eq(next.nodes().iter().map(Option::as_ref))
            };
            let came_about = table.map.as_ref().is_some_and(same);
            table.current = came_about.then(|| (version, Arc::new(next)));
        }
        self.settled(&name, now);
    }

    fn current_write(&self) -> Option<&Write> {
        self.current.as_ref()?.writes.front()
    }

    /// An evicted registration: of a node that was declared failed, or that fell silent.
    fn on_evicted(&mut self, step: Step, now: Moment) {
        let Step::Evict(PendingEviction { node, incarnation, .. }) = step else { return };
        let failed = self.record.nodes.get(&node).and_then(|note| note.failed.as_ref());
        match failed.filter(|failed| failed.incarnation == incarnation) {
            Some(Failure { runs_on, .. }) => {
                if let Some(ttl) = runs_on {
                    let run = (node.clone(), incarnation);
                    self.timers.runs_on.insert(run, now.plus(ttl.get()));
                }
                self.evicted.insert(node, incarnation);
            }
            None => {
                let from = match self.view.presence(&node) {
                    Some(Presence::Absent { counts_from, .. }) => Some(*counts_from),
                    // It fell silent, and the store still showed it.
                    Some(Presence::Present(_)) => {
                        self.evicted.insert(node.clone(), incarnation);
                        Some(now)
                    }
                    None => None,
                };
                if let Some(from) = from {
                    let fall = poisoning::fall(&self.rules, &self.view, &node, incarnation, from);
                    self.on_crashes(&[fall], now);
                }
                let failure = Failure::ran_out(incarnation);
                self.record.note(&node, |note| {
                    note.failed = Some(failure);
                    note.suspended = None;
                });
            }
        }
    }

    /// The node has been heard since: a down decision stays, silence does not count.
    fn on_alive(
        &mut self,
        step: &Step,
        incarnation: Incarnation,
        revision: &Revision,
        now: Moment,
    ) {
        let Step::Evict(suspect) = step else { return };
        let failed = self.record.nodes.get(&suspect.node).and_then(|note| note.failed.as_ref());
        let verdict = failed.is_some_and(|failed| failed.incarnation == incarnation);
        let seen = match self.view.presence(&suspect.node) {
            Some(Presence::Present(record)) => Some(&record.revision),
            _ => None,
        };
        // Plain renewals need not show in the watch, so the revision that was seen may be an old one.
        if verdict && seen == Some(&suspect.revision) {
            self.evict_again =
                Some(PendingEviction { revision: revision.clone(), ..suspect.clone() });
        } else {
            let lives = !verdict && incarnation == suspect.incarnation;
            if lives {
                self.timers.found_alive(&suspect.node, incarnation, revision, now);
            }
            // One that was silent only is left alone for a while; what else was found, the watch will show.
            if !lives || seen.is_none() {
                self.pause_until = Some(now.plus(PAUSE_MIN));
            }
        }
    }
}

/// What is at the front of a command's writes.
enum Front {
    /// This has to be done.
    Step(Step),
    /// It is as it should be already.
    Nothing,
    /// It can't be done.
    Refused(CommandError),
    /// There is no write left.
    Empty,
}

/// The nodes that leadership may be handed to, with what they say of themselves.
fn willing<'a>(
    roster: &'a Roster,
    view: &'a View,
) -> impl Iterator<Item = (&'a Seat, &'a NodeInfo)> {
    let seats = roster.0.iter().filter(|(_, seat)| seat.may_lead());
    seats.filter_map(|(node, seat)| match view.presence(node)? {
        Presence::Present(record) if record.info.candidate => Some((seat, &record.info)),
        _ => None,
    })
}

/// Whether a map names this node as a host, or as the next one.
fn owns(map: &ShardMap, node: &NodeId) -> bool {
    map.slot_of(node).is_some_and(|slot| {
        let mut motions = map.motions().values().flatten();
        map.count(slot) > 0 || motions.any(|motion| Slot::from(motion.other) == slot)
    })
}

/// The header of the reserved table, which has no shards to speak of.
pub(crate) fn cluster_header() -> TableHeader {
    TableHeader::new(coord_core::ShardCount::ONE)
}

/// 1 s, 2 s, 4 s, ….
fn doubled(failures: u32) -> Duration {
    PAUSE_MIN.saturating_mul(1 << failures.min(20))
}

/// Two reasons in one, bounded.
fn join(first: &str, second: &str) -> String {
    const REASON_BYTES_MAX: usize = 200;
    if first == second || first.len() + second.len() > REASON_BYTES_MAX {
        return first.to_owned();
    }
    format!("{first}, {second}")
}

#[cfg(test)]
mod tests;
