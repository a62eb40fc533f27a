//! `coord lease run`: performs what the machine decides.

use std::future::pending;
use std::io::{self, Write as _};
use std::pin::pin;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coord::session::{LeaseGuard, LeaseSession, LeaseState, TryAcquire};
use coord::{Coord, Error, Holder, LeaseName, NodeId, Ttl};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::child::Child;
use super::machine::{Action, End, Input, Machine, Note};
use crate::args::LeaseRunArgs;
use crate::failure::{Failure, code};
use crate::signals::{self, Signals};

/// The longest time that the process waits for the lease of a cancelled acquire to be released.
const CLEAN_UP_MAX: Duration = Duration::from_secs(5);
/// How long closing the store may take once nothing is held any more.
const CLOSE_MAX: Duration = Duration::from_secs(1);
/// How often the same trouble is told again.
const TELL_AGAIN: Duration = Duration::from_secs(10);

/// Runs the command while the lease is held. Whatever happens, the command has ended when this returns,
/// and what the acquire has left in the store is cleaned up.
pub(super) async fn run(args: &LeaseRunArgs, url: &str) -> Result<ExitCode, Failure> {
    // Before anything else, so that a signal that comes meanwhile is heard.
    let signals = Signals::take()?;
    let plan = Plan::new(args)?;
    let mut run =
        Run { args, url, plan, signals, machine: Machine::new(), troubles: Arc::default() };
    let coord = match run.until_told(run.connect(url)?).await {
        Err(end) => return run.not_started(end, None),
        Ok(coord) => coord?,
    };
    let outcome = run.with_store(&coord).await;
    clean_up(coord, &args.name).await;
    outcome
}

/// What was asked for, checked before any I/O.
struct Plan {
    name: LeaseName,
    node: Option<NodeId>,
    stop_budget: Duration,
    /// When to give up.
    until: Option<Instant>,
}

impl Plan {
    fn new(args: &LeaseRunArgs) -> Result<Self, Failure> {
        Ok(Self {
            name: LeaseName::new(&args.name)?,
            node: args.node.as_ref().map(NodeId::new).transpose()?,
            stop_budget: stop_budget(args)?,
            until: args.wait.and_then(|wait| Instant::now().checked_add(wait)),
        })
    }
}

struct Run<'a> {
    args: &'a LeaseRunArgs,
    url: &'a str,
    plan: Plan,
    signals: Signals,
    machine: Machine,
    troubles: Arc<Troubles>,
}

impl Run<'_> {
    /// Opens the store, and waits for it as long as for the lease.
    fn connect(
        &self,
        url: &str,
    ) -> Result<impl Future<Output = Result<Coord, Failure>> + use<>, Failure> {
        let wait = self.args.wait.unwrap_or(Duration::MAX);
        let troubles = Arc::clone(&self.troubles);
        let tell = move |error: &Error, _pause: Duration| troubles.tell(error);
        let connector = coord::connector(url)?.wait_for_store(wait).on_retry(tell);
        let node = self.plan.node.clone();
        Ok(async move {
            let coord = Coord::new(connector.open().await?);
            if coord.info().scheme == "memory" {
                super::say_memory()?;
            }
            Ok(match node {
                Some(node) => coord.with_node(node),
                None => coord,
            })
        })
    }

    /// The future's outcome, unless coord is told to end first.
    async fn until_told<T>(&mut self, future: impl Future<Output = T>) -> Result<T, End> {
        let mut future = pin!(future);
        loop {
            let signal = tokio::select! {
                biased;
                signal = self.signals.next() => signal,
                outcome = &mut future => return Ok(outcome),
            };
            for action in self.machine.on(Input::Signal(signal)) {
                match action {
                    Action::End(end) => return Err(end),
                    Action::Say(note) => say(&self.args.name, note),
                    _ => {}
                }
            }
        }
    }

    async fn with_store(&mut self, coord: &Coord) -> Result<ExitCode, Failure> {
        // The lease counts as lost early enough for the command to end before another can hold it.
        let margin = (self.args.ttl / 10).max(Duration::from_millis(100)) + self.plan.stop_budget;
        let troubles = Arc::clone(&self.troubles);
        let lease = coord.lease(self.plan.name.as_str())?.ttl(self.args.ttl).margin(margin);
        let lease = lease.on_retry(move |error| troubles.tell(error)).build()?;
        let acquire = acquire(lease, self.args.wait, self.plan.until);
        let guard = match self.until_told(acquire).await {
            Err(end) => return self.not_started(end, None),
            Ok(Ok(guard)) => guard,
            Ok(Err(why)) => {
                for action in self.machine.on(Input::NotAcquired) {
                    if let Action::End(end) = action {
                        return self.not_started(end, Some(why));
                    }
                }
                return self.not_started(End::NotAcquired, Some(why));
            }
        };
        self.supervise(guard).await
    }

    /// Runs the command under the guard. The command has ended when this returns, and only then is the
    /// lease released.
    async fn supervise(&mut self, guard: LeaseGuard) -> Result<ExitCode, Failure> {
        let mut child = None;
        let mut budget = None;
        let mut lost_told = false;
        let mut input = Input::Acquired;
        let end = 'run: loop {
            for action in self.machine.on(input) {
                match (action, &child) {
                    (Action::Start, _) => match Child::start(&guard.fence(), self.args, self.url) {
                        Ok(started) => {
                            self.machine.started(started.own_group);
                            child = Some(started);
                        }
                        Err(failure) => {
                            self.release(guard).await;
                            return Err(failure);
                        }
                    },
                    (Action::Send(signal), Some(child)) => child.send(signal),
                    (Action::PassOn(signal), Some(child)) => child.pass_on(signal),
                    (Action::Send(_) | Action::PassOn(_), None) => {}
                    (Action::StartBudget, _) => {
                        budget = Some(Instant::now() + self.plan.stop_budget);
                    }
                    (Action::Say(note), _) => say(&self.args.name, note),
                    (Action::End(end), _) => break 'run end,
                }
            }
            let changed = async {
                match &mut child {
                    Some(child) => child.changed(|| guard.is_held()).await,
                    None => pending().await,
                }
            };
            let spent = async {
                match budget {
                    Some(at) => sleep_until(at).await,
                    None => pending().await,
                }
            };
            input = tokio::select! {
                biased;
                signal = self.signals.next() => Input::Signal(signal),
                _ = guard.lost(), if !lost_told => {
                    lost_told = true;
                    Input::Lost
                }
                changed = changed => changed?,
                () = spent => {
                    budget = None;
                    Input::BudgetSpent
                }
            };
        };
        match end {
            End::Lost { stopped } => {
                let how = if stopped { "was stopped" } else { "ended by itself, too late" };
                let lost = guard.lost().await;
                guard.abandon();
                let name = &self.args.name;
                let message = format!("the lease {name} was lost ({lost}); the command {how}");
                Err(Failure::new(code::LOST, message))
            }
            _ => {
                self.release(guard).await;
                Ok(child.map_or(ExitCode::SUCCESS, |child| child.code()))
            }
        }
    }

    /// The command has done its work, or was never started: a lease that can't be released changes
    /// nothing about that.
    async fn release(&self, guard: LeaseGuard) {
        if let Err(error) = guard.release().await {
            let name = &self.args.name;
            tell(&format!("note: {name} could not be released and ends by its ttl: {error}"));
        }
    }

    fn not_started(&self, end: End, why: Option<NotAcquired>) -> Result<ExitCode, Failure> {
        let name = &self.args.name;
        let after = "the command was not started";
        let held = self.args.conflict_exit_code.unwrap_or(code::HELD);
        Err(match (end, why) {
            (End::Told(signal), _) => {
                let code = u8::try_from(128 + signal).unwrap_or(code::DID_NOT_HOLD);
                let signal = signals::name(signal);
                Failure::new(code, format!("{signal} came while {name} was waited for; {after}"))
            }
            (_, Some(NotAcquired::Held(holder))) => {
                Failure::new(held, format!("{name} is held by {holder}; {after}"))
            }
            (_, Some(NotAcquired::Failed(error))) => error.into(),
            _ => {
                // No holder is known, so a request was under way.
                let error = self.troubles.last();
                let error = error.unwrap_or_else(|| "the store has not answered yet".to_owned());
                Failure::new(code::STORE, format!("{name} was not acquired in time: {error}"))
            }
        })
    }
}

/// Why the lease was not acquired.
enum NotAcquired {
    /// This other one holds it.
    Held(Holder),
    /// The time was over, and no holder is known.
    NotInTime,
    Failed(Error),
}

async fn acquire(
    lease: LeaseSession,
    wait: Option<Duration>,
    until: Option<Instant>,
) -> Result<LeaseGuard, NotAcquired> {
    if wait == Some(Duration::ZERO) {
        return match lease.try_acquire().await {
            Ok(TryAcquire::Acquired(guard)) => Ok(guard),
            Ok(TryAcquire::Held(record)) => Err(NotAcquired::Held(record.holder)),
            Ok(_) => Err(NotAcquired::NotInTime),
            Err(error) => Err(NotAcquired::Failed(error)),
        };
    }
    let state = lease.state();
    let told = tell_holders(lease.name().clone(), lease.state());
    let acquired = async {
        tokio::select! {
            biased;
            acquired = lease.acquire() => acquired.map_err(NotAcquired::Failed),
            () = told => Err(NotAcquired::NotInTime),
        }
    };
    let Some(until) = until else { return acquired.await };
    let mut acquired = pin!(acquired);
    match timeout_at(until, &mut acquired).await {
        Ok(acquired) => acquired,
        // Looked at before the acquire is cancelled, which forgets it.
        Err(_elapsed) => match &*state.borrow() {
            LeaseState::Acquiring(Some(holder)) => Err(NotAcquired::Held(holder.clone())),
            _ => Err(NotAcquired::NotInTime),
        },
    }
}

/// Prints the holder that is waited for, once for each of them.
async fn tell_holders(name: LeaseName, mut state: tokio::sync::watch::Receiver<LeaseState>) {
    let mut last = None;
    loop {
        if let LeaseState::Acquiring(Some(holder)) = &*state.borrow_and_update()
            && last.as_ref() != Some(holder)
        {
            tell(&format!("waiting: {name} is held by {holder}"));
            last = Some(holder.clone());
        }
        if state.changed().await.is_err() {
            pending::<()>().await;
        }
    }
}

/// Waits until nothing of this process is held or being acquired any more, and closes the store.
async fn clean_up(coord: Coord, name: &str) {
    if timeout(CLEAN_UP_MAX, coord.idle()).await.is_err() {
        let why = "the store does not answer";
        tell(&format!("note: {why}; what it may have granted of {name} ends by its ttl"));
    }
    // What is closed here is this process's own end of it.
    if !matches!(timeout(CLOSE_MAX, coord.backend().close()).await, Ok(Ok(()))) {
        tracing::info!("the store could not be told that this process ends");
    }
}

/// What went wrong at the store while it was waited for.
#[derive(Debug, Default)]
struct Troubles(Mutex<Option<(String, Instant)>>);

impl Troubles {
    /// Tells it, unless the same was told just now.
    fn tell(&self, error: &Error) {
        let text = error.to_string();
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let is_old = |(before, at): &(String, Instant)| *before == text && *at + TELL_AGAIN > now;
        if !last.as_ref().is_some_and(is_old) {
            tell(&format!("waiting for the store: {text}"));
            *last = Some((text, now));
        }
    }

    fn last(&self) -> Option<String> {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().map(|(text, _)| text.clone())
    }
}

/// The stop budget, checked against the TTL: what is left of that has to hold two renewals.
fn stop_budget(args: &LeaseRunArgs) -> Result<Duration, Failure> {
    let ttl = Ttl::new(args.ttl)?.get();
    let Some(asked) = args.stop_budget else {
        return Ok((ttl / 5).min(Duration::from_secs(1)));
    };
    let most = ttl * 3 / 10;
    if asked < most {
        return Ok(asked);
    }
    let (asked, ttl, most) = (
        humantime::format_duration(asked),
        humantime::format_duration(ttl),
        humantime::format_duration(most),
    );
    Err(Failure::input(format!(
        "--stop-budget {asked} does not fit into --ttl {ttl}: it must be below three tenths of it, {most}"
    )))
}

fn say(lease: &str, note: Note) {
    tell(&match note {
        Note::NoCommandYet(signal) => {
            format!("note: {} has no command to go to yet", signals::name(signal))
        }
        Note::Stopped(signal) => {
            let signal = signals::name(signal);
            format!("note: the command is stopped by {signal}; {lease} stays held until it ends")
        }
        Note::Continued => "note: the command goes on".to_owned(),
        Note::WantsTerminal(signal) => format!(
            "the command asks for the terminal ({}), whose foreground coord is not in; it is ended",
            signals::name(signal)
        ),
    });
}

/// A line for the user. Nothing can be done about a standard error that can't be written to.
fn tell(line: &str) {
    let _ = writeln!(io::stderr(), "coord: {}", crate::failure::shown(line));
}
