//! Whether this process may host shards under its registered incarnation. It is read synchronously, and is true
//! to the clock even if no task could run.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use coord_core::{Clock, Error, ErrorKind, Incarnation, Moment, Result};
use tokio::sync::watch;

/// How often it is checked whether the time of an incarnation is up, at the least and at the most.
const LOOK_MIN: Duration = Duration::from_millis(10);
const LOOK_MAX: Duration = Duration::from_secs(1);

/// A registration, and until when it allows to host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) incarnation: Incarnation,
    pub(crate) deadline: Moment,
}

/// Decides whether a shard may run in this process.
#[derive(Debug)]
pub(crate) struct Gate {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    standing: Option<Standing>,
    /// The incarnations under which shards run here, start or stop.
    running: BTreeMap<Incarnation, Running>,
    /// Closed for good: nothing runs here any more, whatever the registration says.
    shut: bool,
}

/// The shards of one incarnation.
#[derive(Debug)]
struct Running {
    shards: usize,
    /// Until when the incarnation may host.
    deadline: Moment,
}

impl Gate {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self { clock, state: Mutex::default(), changed: watch::Sender::new(()) })
    }

    /// The registration lasts until this deadline.
    pub(crate) fn hold(&self, standing: Standing) {
        let mut state = self.state();
        if !state.shut && state.standing != Some(standing) {
            state.standing = Some(standing);
            if let Some(running) = state.running.get_mut(&standing.incarnation) {
                running.deadline = standing.deadline;
            }
            drop(state);
            self.changed.send_replace(());
        }
    }

    /// The registration is lost.
    pub(crate) fn close(&self) {
        self.state().standing = None;
        self.changed.send_replace(());
    }

    /// The process counts as dead.
    pub(crate) fn shut(&self) {
        self.state().shut = true;
        self.close();
    }

    pub(crate) fn standing(&self) -> Option<Standing> {
        self.state().standing
    }

    /// Whether this incarnation may act now.
    pub(crate) fn is_current(&self, run: Incarnation) -> bool {
        self.deadline(run).is_some_and(|deadline| self.clock.now() < deadline)
    }

    /// Until when this incarnation may act; none once it may not act any more.
    pub(crate) fn deadline(&self, run: Incarnation) -> Option<Moment> {
        let standing = self.state().standing?;
        (standing.incarnation == run).then_some(standing.deadline)
    }

    /// Admits a shard under this incarnation. After the gate was closed no shard is admitted, so a gate that is
    /// idle then means that the incarnation hosts nothing.
    pub(crate) fn enter(self: &Arc<Self>, run: Incarnation) -> Option<Permit> {
        let mut state = self.state();
        let standing = state.standing.filter(|standing| standing.incarnation == run)?;
        (self.clock.now() < standing.deadline).then_some(())?;
        let deadline = standing.deadline;
        let running = state.running.entry(run).or_insert(Running { shards: 0, deadline });
        running.shards += 1;
        Some(Permit { gate: Arc::clone(self), run })
    }

    /// Whether nothing runs here.
    pub(crate) fn is_idle(&self) -> bool {
        self.state().running.is_empty()
    }

    /// Ends the process if a shard still runs this long after the deadline of its incarnation. A thread of its
    /// own checks this: work that does not return may block all threads of the runtime.
    ///
    /// # Errors
    /// `Internal` if there is no thread to be had.
    pub(crate) fn exit_late(self: &Arc<Self>, grace: Duration) -> Result<()> {
        let gate = Arc::downgrade(self);
        let pause = (grace / 4).clamp(LOOK_MIN, LOOK_MAX);
        let watch = move || {
            let mut late = Late::default();
            while let Some(gate) = Weak::upgrade(&gate) {
                if late.look(&gate.state().running, gate.clock.now(), grace) {
                    tracing::error!("a shard runs on past the deadline; the process ends");
                    std::process::abort();
                }
                drop(gate);
                std::thread::park_timeout(pause);
            }
        };
        let thread = std::thread::Builder::new().name("coord-deadline".to_owned()).spawn(watch);
        let failed = |error| {
            let why = "no thread can be started that ends the process at its deadline";
            Error::new(ErrorKind::Internal, "start").message(why).with_source(error)
        };
        thread.map(drop).map_err(failed)
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    pub(crate) fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A shard that is here. Whatever works for it holds it, and the last to let go of it gives it back.
#[derive(Debug)]
pub(crate) struct Permit {
    gate: Arc<Gate>,
    run: Incarnation,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.gate.state();
        if let Some(running) = state.running.get_mut(&self.run) {
            running.shards -= 1;
            if running.shards == 0 {
                state.running.remove(&self.run);
            }
        }
        drop(state);
        self.gate.changed.send_replace(());
    }
}

/// Since when each incarnation was seen to run past its deadline.
#[derive(Debug, Default)]
struct Late(BTreeMap<Incarnation, Moment>);

impl Late {
    /// Whether one of them has had its time to end. However late that is noticed, as after a suspend, it has
    /// the whole of it.
    fn look(
        &mut self,
        running: &BTreeMap<Incarnation, Running>,
        now: Moment,
        grace: Duration,
    ) -> bool {
        let is_late = |run: &Incarnation| running.get(run).is_some_and(|run| run.deadline <= now);
        self.0.retain(|run, _| is_late(run));
        for run in running.keys().filter(|run| is_late(run)) {
            self.0.entry(*run).or_insert(now);
        }
        self.0.values().any(|since| now.since(*since) >= grace)
    }
}

#[cfg(test)]
mod tests {
    use coord_core::TokioClock;

    use super::*;

    fn run(number: u128) -> Incarnation {
        Incarnation::from_u128(number)
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_is_let_in_after_the_deadline_or_after_it_was_closed() {
        let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
        let gate = Gate::new(Arc::clone(&clock));
        let until = |seconds| clock.now().plus(Duration::from_secs(seconds));
        assert!(gate.enter(run(1)).is_none());
        gate.hold(Standing { incarnation: run(1), deadline: until(5) });
        let permit = gate.enter(run(1)).expect("registered");
        assert!(gate.enter(run(2)).is_none(), "another run");
        assert!(gate.is_current(run(1)) && !gate.is_idle());
        tokio::time::advance(Duration::from_secs(5)).await;
        assert!(!gate.is_current(run(1)) && gate.enter(run(1)).is_none());
        gate.close();
        gate.hold(Standing { incarnation: run(2), deadline: until(5) });
        assert!(!gate.is_current(run(1)) && gate.is_current(run(2)));
        assert!(!gate.is_idle(), "what the former run had let in is still there");
        drop(permit);
        assert!(gate.is_idle());
        gate.shut();
        gate.hold(Standing { incarnation: run(2), deadline: until(5) });
        assert!(gate.enter(run(2)).is_none(), "it is over");
    }

    #[test]
    fn a_run_that_goes_on_past_its_deadline_has_its_grace_from_when_that_is_seen() {
        let at = |seconds| Moment::from_origin(Duration::from_secs(seconds));
        let running =
            |deadline| BTreeMap::from([(run(1), Running { shards: 1, deadline: at(deadline) })]);
        let (mut late, grace) = (Late::default(), Duration::from_secs(2));
        assert!(!late.look(&running(10), at(9), grace) && !late.look(&running(10), at(10), grace));
        assert!(!late.look(&running(10), at(11), grace) && late.look(&running(10), at(12), grace));
        assert!(!late.look(&running(20), at(13), grace), "its registration was renewed");
        // As after a suspend.
        assert!(!late.look(&running(20), at(99), grace) && late.look(&running(20), at(101), grace));
        assert!(!late.look(&BTreeMap::new(), at(101), grace), "it has ended");
        assert!(!late.look(&running(20), at(102), grace));
    }
}
