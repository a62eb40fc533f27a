//! Performs what the [`Machine`] decides, for one term.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use coord_core::session::{HeldLease, LeaseGuard, Lost};
use coord_core::{
    Answer, Answered, Claim, ClaimRequest, Error, ErrorKind, Evict, LeaseName, NodeId, Publish,
    Request, RequestEvent, RequestId, RequestRecord, Result, TableName, Watched, Watcher,
};
use tokio::sync::{mpsc, oneshot, watch};

use super::machine::{Job, Machine, Outcome, Step, Stop, Ticket, Turn};
use super::rules::Rules;
use crate::commands::{Command, CommandError, Reply};
use crate::events::{Event, EventKind, EventSource, TableMismatch};
use crate::observer::Observer;
use crate::record;
use crate::shared::Shared;
use crate::telemetry;

/// The most answers to requests that are remembered, so that none is carried out twice.
const SEEN_MAX: usize = 65_536;
/// Why a leader that is no live node ends its term.
const UNREGISTERED: &str = "its registration is lost";
/// The most places of a table that is planned in line with other work.
const PLAN_INLINE_MAX: usize = 16_384;

/// A command that was given to this very process.
#[derive(Debug)]
pub(crate) struct LocalCommand {
    pub(crate) command: Command,
    pub(crate) reply: oneshot::Sender<Reply>,
}

/// How a term's work ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The lease is lost.
    Lost(Lost),
    /// The lease is to be released, and left to this node first.
    Yielded(NodeId),
    /// The lease is to be released.
    Release(&'static str),
    /// The lease is to be released, and no new one wanted for a while.
    Refused(String),
    /// A write was refused although the lease is still this node's: the store went back.
    TermRegression,
    /// The work panicked, with this message. The lease is to be released, and no new one wanted for a while.
    Panicked(String),
    /// The node's runtime ends.
    Stopped,
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(lost) => write!(f, "the lease is lost: {lost}"),
            Self::Yielded(transfer_target) => {
                write!(f, "{transfer_target} is to lead, and was slower")
            }
            Self::Release(why) => f.write_str(why),
            Self::Refused(why) => f.write_str(why),
            Self::Panicked(message) => write!(f, "the leader's task panicked: {message}"),
            Self::TermRegression => f.write_str("the store went back"),
            Self::Stopped => f.write_str("the node's runtime ends"),
        }
    }
}

/// Works as the leader until the term ends.
pub(crate) async fn lead(
    shared: &Arc<Shared>,
    guard: &LeaseGuard,
    gate: Option<watch::Receiver<Option<HeldLease>>>,
    late_target: Option<NodeId>,
    local: &mut mpsc::Receiver<LocalCommand>,
) -> Ended {
    let rules = Rules::new(&shared.settings, shared.judging);
    let now = shared.clock.now();
    let mut machine = Machine::new(shared.node.clone(), guard.fence(), rules, &shared.specs, now);
    machine.on_gate(gate.is_none());
    machine.has_waited_for(late_target);
    machine.on_before(shared.look(Observer::before));
    for (name, seen) in shared.seen() {
        machine.on_history(&name, seen);
    }
    let mut lead = Lead {
        shared: Arc::clone(shared),
        guard,
        gate,
        require_lease: None,
        machine,
        look: None,
        asked: BTreeMap::new(),
        tickets: 0,
        seen: BTreeSet::new(),
    };
    let ended = lead.run(local).await;
    lead.dismiss();
    ended
}

/// One term's work.
pub(crate) struct Lead<'a> {
    shared: Arc<Shared>,
    guard: &'a LeaseGuard,
    /// The tenure of the lease that gates the tables, where there is one.
    gate: Option<watch::Receiver<Option<HeldLease>>>,
    /// The tenure of it that the machine knows.
    require_lease: Option<HeldLease>,
    machine: Machine,
    /// The number of the look at the nodes that is under way.
    look: Option<u64>,
    /// The callers that wait, by their answers.
    asked: BTreeMap<Ticket, Asker>,
    tickets: Ticket,
    /// Requests that were taken in and have not been forgotten by the store.
    seen: BTreeSet<RequestId>,
}

/// The caller.
#[derive(Debug)]
enum Asker {
    Local(oneshot::Sender<Reply>),
    Remote(RequestId),
}

impl Lead<'_> {
    async fn run(&mut self, local: &mut mpsc::Receiver<LocalCommand>) -> Ended {
        let shared = Arc::clone(&self.shared);
        let mut requests = Watcher::<RequestEvent>::requests(Arc::clone(&shared.placement));
        let mut view = shared.view.subscribe();
        let mut registered = shared.registered.subscribe();
        let mut verdicts = shared.verdicts.subscribe();
        verdicts.mark_changed();
        let mut ticked = shared.ticked.subscribe();
        loop {
            while shared.may_have_stalled() {
                // A node that seems late may only have been unseen.
                tokio::select! {
                    biased;
                    () = shared.stop.cancelled() => return Ended::Stopped,
                    lost = self.guard.lost() => return Ended::Lost(lost),
                    _ = ticked.changed() => {}
                }
            }
            // Also where one step follows another, each of them slow.
            if registered.borrow_and_update().is_none() {
                return Ended::Release(UNREGISTERED);
            }
            self.machine.on_view(Arc::clone(&view.borrow_and_update()));
            self.take_gate();
            if verdicts.has_changed().unwrap_or_default() {
                self.machine.on_verdicts(&verdicts.borrow_and_update());
            }
            let turn = self.machine.next(shared.clock.now());
            self.tell_unwritten();
            let step = match turn {
                Turn::Do(step) => step,
                Turn::Stop(stop) => return self.stopped(stop).await,
                Turn::Wait(until) => {
                    tokio::select! {
                        biased;
                        () = shared.stop.cancelled() => return Ended::Stopped,
                        lost = self.guard.lost() => return Ended::Lost(lost),
                        // The leader is a live node.
                        _ = registered.wait_for(Option::is_none) => {
                            return Ended::Release(UNREGISTERED);
                        }
                        _ = view.changed() => {}
                        () = changed(self.gate.as_mut()) => {}
                        _ = verdicts.changed() => verdicts.mark_changed(),
                        Some(command) = local.recv() => self.take_local(command),
                        watched = requests.next() => self.take_request(watched),
                        () = shared.sleep_until_any(until) => {}
                    }
                    continue;
                }
            };
            let outcome = tokio::select! {
                biased;
                () = shared.stop.cancelled() => return Ended::Stopped,
                lost = self.guard.lost() => return Ended::Lost(lost),
                outcome = self.perform(&step) => outcome,
            };
            self.machine.on_outcome(outcome, shared.clock.now());
        }
    }

    /// Shows whether the leader can write down what it has to remember.
    fn tell_unwritten(&self) {
        let why = self.machine.unwritten();
        if self.shared.look(|observer| observer.unwritten() != why) {
            let why = why.map(str::to_owned);
            self.shared.observe(|observer| {
                observer.on_unwritten(why);
                Vec::new()
            });
        }
    }

    /// Tells the machine whether the tables may be written.
    fn take_gate(&mut self) {
        let Some(gate) = &mut self.gate else { return };
        let now = gate.borrow_and_update().clone().filter(HeldLease::is_held);
        let fence = |tenure: &Option<HeldLease>| tenure.as_ref().map(HeldLease::fence);
        if fence(&now) == fence(&self.require_lease) {
            return;
        }
        // Also where it was lost and is held again: others may have written in between.
        self.machine.on_gate(false);
        self.machine.on_gate(now.is_some());
        self.require_lease = now;
    }

    /// Whether a step has to wait for the lease that gates the tables. This is decided by the lease's clock,
    /// right before the write. A write that is already on its way is fenced by the claim of the lease's next
    /// holder.
    fn is_gated(&self, step: &Step) -> bool {
        let (Step::Claim(table, _) | Step::Publish(table, ..)) = step else { return false };
        let held = || self.require_lease.as_ref().is_some_and(HeldLease::is_held);
        self.gate.is_some() && !table.is_reserved() && !held()
    }

    async fn stopped(&self, stop: Stop) -> Ended {
        match stop {
            Stop::SteppedDown => Ended::Release("a command asked for it"),
            Stop::Yields(transfer_target) => Ended::Yielded(transfer_target),
            Stop::Deleted(table) => {
                tracing::warn!(%table, "the table was deleted");
                Ended::Release("a table was deleted")
            }
            Stop::Refused(why) => Ended::Refused(why),
            Stop::Fenced => {
                let name = LeaseName::leader();
                let read = self.shared.call("get", self.shared.lease.get(&name)).await;
                let fence = self.guard.fence();
                match read {
                    Ok(Some(record)) if record.fence() == fence && self.guard.is_held() => {
                        telemetry::term_regression(fence.term);
                        Ended::TermRegression
                    }
                    _ => Ended::Release("a write was refused, somebody else leads"),
                }
            }
        }
    }

    fn ticket(&mut self, asker: Asker) -> Ticket {
        self.tickets += 1;
        self.asked.insert(self.tickets, asker);
        self.tickets
    }

    fn take_local(&mut self, LocalCommand { command, reply }: LocalCommand) {
        let ticket = self.ticket(Asker::Local(reply));
        self.machine.on_command(ticket, command);
    }

    fn take_request(&mut self, watched: Watched<RequestEvent>) {
        match watched {
            Watched::Event(RequestEvent::Snapshot(records)) => {
                for RequestRecord { request, answer, .. } in records {
                    if answer.is_none() {
                        self.take_remote(request);
                    }
                }
            }
            Watched::Event(RequestEvent::Submitted(request)) => self.take_remote(request),
            Watched::Event(RequestEvent::Gone(id)) => {
                self.seen.remove(&id);
            }
            Watched::Disconnected(error) => {
                tracing::debug!(%error, "the requests to the leader can't be watched");
            }
            _ => {}
        }
    }

    fn take_remote(&mut self, request: Request) {
        if self.seen.len() >= SEEN_MAX || !self.seen.insert(request.id) {
            return;
        }
        let ticket = self.ticket(Asker::Remote(request.id));
        match record::read::<Command>("read command", &request.body) {
            Ok(command) => self.machine.on_command(ticket, command),
            Err(error) => {
                let why = std::error::Error::source(&error)
                    .map_or_else(|| error.to_string(), ToString::to_string);
                self.machine.refuse(ticket, CommandError::Unreadable { why });
            }
        }
    }

    async fn perform(&mut self, step: &Step) -> Outcome {
        if !self.guard.is_held() {
            return Outcome::Failed("the lease is not held any more".to_owned());
        }
        if self.is_gated(step) {
            return Outcome::Gated;
        }
        let outcome = match step {
            Step::Claim(table, header) => {
                let request = ClaimRequest::new(table.clone(), self.guard.fence(), header.clone());
                let claim = self.shared.placement.claim(&request);
                self.shared.call("claim", claim).await.map(|claim| self.claimed(table, claim))
            }
            Step::Look => self.look().await,
            Step::Load(table) => {
                let load = self.shared.placement.load(table);
                let table = self.shared.call("load", load).await;
                table.map(|table| Outcome::Loaded(table.map(|table| table.map)))
            }
            Step::Publish(table, expected, map) => {
                let fence = self.guard.fence();
                let publish = self.shared.placement.publish(table, &fence, *expected, map);
                match self.shared.call("publish", publish).await.map(published) {
                    Ok(Outcome::Fenced) => self.fenced(table).await,
                    outcome => outcome,
                }
            }
            Step::Evict(suspect) => {
                let (node, run) = (&suspect.node, suspect.incarnation);
                let evict = self.shared.discovery.evict(node, run, &suspect.revision);
                self.shared.call("evict", evict).await.map(evicted)
            }
            Step::Plan(_, job) => plan(Arc::clone(job)).await,
            Step::Answer(ticket, reply) => self.answer(*ticket, reply).await,
        };
        outcome.unwrap_or_else(|error| Outcome::Failed(error.to_string()))
    }

    fn claimed(&self, table: &TableName, claim: Claim) -> Outcome {
        let misfit = match claim {
            Claim::Claimed(table) => return Outcome::Claimed(table.map),
            Claim::Fenced(_) => return Outcome::Fenced,
            Claim::Mismatch(header) => TableMismatch::OtherHeader(header),
            Claim::OtherLease(binding) => TableMismatch::OtherLease(binding),
            _ => return Outcome::Failed("an unknown outcome of a claim".to_owned()),
        };
        let (name, term) = (table.clone(), self.guard.fence().term);
        let refused = EventKind::TableRefused { table: name, term, misfit: misfit.clone() };
        self.shared.observe(|_| vec![Event::new(EventSource::Local, refused)]);
        Outcome::Refused(format!("table {table} {misfit}"))
    }

    /// A table that does not exist any more refuses a write as if another leader had been there.
    async fn fenced(&self, table: &TableName) -> Result<Outcome> {
        let load = self.shared.placement.load(table);
        let is_there = self.shared.call("load", load).await?.is_some();
        Ok(if is_there { Outcome::Fenced } else { Outcome::Deleted })
    }

    /// Has the watch of the nodes begun anew, and waits until the view shows what it begins with.
    async fn look(&mut self) -> Result<Outcome> {
        let shared = &self.shared;
        let look = *self.look.get_or_insert_with(|| {
            shared.looks.send_modify(|looks| *looks += 1);
            *shared.looks.borrow()
        });
        let mut view = shared.view.subscribe();
        let seen = view.wait_for(|view| view.looks() >= look);
        let limit = shared.settings.request_timeout;
        match tokio::time::timeout(limit, seen).await {
            Ok(Ok(_)) => {
                self.look = None;
                Ok(Outcome::Looked)
            }
            _ => Err(Error::unavailable("watch", "the store did not show its nodes in time")),
        }
    }

    /// Answers the caller. An answer that can't be delivered at all is left out: the caller then counts the
    /// command as unanswered.
    async fn answer(&mut self, ticket: Ticket, reply: &Reply) -> Result<Outcome> {
        let id = match self.asked.remove(&ticket) {
            None => return Ok(Outcome::Answered),
            Some(Asker::Local(sender)) => {
                // The caller may have stopped waiting.
                let _ = sender.send(reply.clone());
                return Ok(Outcome::Answered);
            }
            Some(Asker::Remote(id)) => id,
        };
        let body = record::write("write reply", reply)?;
        let answer = Answer::new(body).or_else(|_too_long| {
            let why = "the answer does not fit into a record".to_owned();
            let reply = Reply::Refused(CommandError::Failed { why });
            Answer::new(record::write("write reply", &reply)?)
        })?;
        let fence = self.guard.fence();
        let call = self.shared.placement.answer(&id, &fence, &answer);
        Ok(match self.shared.call("answer", call).await {
            Ok(Answered::Fenced(_)) => Outcome::Fenced,
            Ok(_) => Outcome::Answered,
            Err(error) if error.is_retryable() => {
                self.asked.insert(ticket, Asker::Remote(id));
                return Err(error);
            }
            Err(error) => {
                tracing::debug!(%error, request = %id, "a request stays unanswered");
                Outcome::Answered
            }
        })
    }

    /// Tells the callers in this process that the term is over.
    fn dismiss(&mut self) {
        for asker in std::mem::take(&mut self.asked).into_values() {
            if let Asker::Local(sender) = asker {
                // The caller may have stopped waiting.
                let _ = sender.send(Reply::Refused(CommandError::Lost));
            }
        }
    }
}

async fn changed(gate: Option<&mut watch::Receiver<Option<HeldLease>>>) {
    if let Some(gate) = gate
        && gate.changed().await.is_ok()
    {
        return;
    }
    std::future::pending::<()>().await;
}

/// A plan of a large table takes longer than other tasks of this thread should wait.
async fn plan(job: Arc<Job>) -> Result<Outcome> {
    if job.current.raw_owners().len() <= PLAN_INLINE_MAX {
        return Ok(Outcome::Planned(job.plan()));
    }
    let planned = tokio::task::spawn_blocking(move || job.plan()).await;
    planned.map(Outcome::Planned).map_err(|error| {
        Error::new(ErrorKind::Internal, "plan")
            .effect_none()
            .message("no plan was made")
            .with_source(error)
    })
}

fn published(publish: Publish) -> Outcome {
    match publish {
        Publish::Published(_) => Outcome::Published,
        Publish::Conflict { .. } => Outcome::Conflict,
        Publish::Fenced(_) => Outcome::Fenced,
        _ => Outcome::Failed("an unknown outcome of a publish".to_owned()),
    }
}

fn evicted(evict: Evict) -> Outcome {
    match evict {
        Evict::Evicted | Evict::Gone => Outcome::Evicted,
        Evict::Alive(record) => Outcome::Alive(record.info.incarnation, record.revision),
        _ => Outcome::Failed("an unknown outcome of an eviction".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use coord_core::{
        Backend, Clock, ClusterName, Incarnation, Leases, MemoryBackend, Moment, TableHeader,
        TokioClock,
    };

    use super::*;
    use crate::member_view::Judging;
    use crate::settings::Settings;
    use crate::shared::Parts;
    use crate::table::Table;

    /// A clock that can jump ahead, as time does for a process that is paused.
    #[derive(Debug, Default)]
    struct Jumping {
        clock: TokioClock,
        ahead: Mutex<Duration>,
    }

    impl Clock for Jumping {
        fn now(&self) -> Moment {
            self.clock.now().plus(*self.ahead.lock().expect("not poisoned"))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_written_once_the_lease_or_its_gate_is_over_by_the_clock() {
        let store = MemoryBackend::isolated(ClusterName::new("orders").expect("name"));
        let clock = Arc::new(Jumping::default());
        let node = NodeId::new("n1").expect("name");
        let settings = Settings::fast();
        let [gated, late] = ["gated", "late"].map(|name| TableName::new(name).expect("name"));
        let names = [gated.clone(), late.clone()];
        let specs: BTreeMap<_, _> =
            names.map(|name| (name.clone(), Table::new(name).spec(&settings))).into();
        let judging = Judging::of(&store.info().guarantees);
        let rules = Rules::new(&settings, judging);
        let shared = Arc::new(Shared::new(Parts {
            node: node.clone(),
            settings,
            clock: Arc::<Jumping>::clone(&clock),
            lease: store.lease(),
            discovery: store.discovery(),
            placement: store.placement(),
            judging,
            specs: specs.clone(),
            gating: None,
        }));
        let guard = Leases::new(store.lease(), node.clone(), Incarnation::from_u128(1))
            .with_clock(Arc::<Jumping>::clone(&clock))
            .named(LeaseName::leader())
            .acquire()
            .await
            .expect("acquired");
        let (_gate, locked) = watch::channel(None);
        let mut lead = Lead {
            shared,
            guard: &guard,
            gate: Some(locked),
            require_lease: None,
            machine: Machine::new(node, guard.fence(), rules, &specs, clock.now()),
            look: None,
            asked: BTreeMap::new(),
            tickets: 0,
            seen: BTreeSet::new(),
        };
        let claim = |name: &TableName| Step::Claim(name.clone(), TableHeader::default());
        let reserved = lead.perform(&claim(&TableName::cluster())).await;
        assert!(matches!(reserved, Outcome::Claimed(_)), "{reserved:?}");
        assert_eq!(lead.perform(&claim(&gated)).await, Outcome::Gated);
        lead.gate = None;
        // Nobody has told the leader yet.
        *clock.ahead.lock().expect("not poisoned") = guard.grant().ttl.get();
        let outcome = lead.perform(&claim(&late)).await;
        assert!(matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
        for name in [gated, late] {
            assert!(store.placement().load(&name).await.expect("loads").is_none(), "{name}");
        }
    }
}
