//! Whether this process may host as the run that it is registered as. Read synchronously, and true to the
//! clock even if no task could run.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coord_core::{Clock, Incarnation, Moment};
use tokio::sync::watch;

/// A registration, and until when it allows to host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) incarnation: Incarnation,
    pub(crate) deadline: Moment,
}

/// What decides whether a shard may run in this process.
#[derive(Debug)]
pub(crate) struct Gate {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    standing: Option<Standing>,
    /// How many shards run here, or are on their way to or from it.
    running: usize,
    /// Nothing runs here any more, whatever is told.
    shut: bool,
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

    /// Whether this run may act now.
    pub(crate) fn is_current(&self, run: Incarnation) -> bool {
        self.deadline(run).is_some_and(|deadline| self.clock.now() < deadline)
    }

    /// Until when this run may act; none once it may not any more.
    pub(crate) fn deadline(&self, run: Incarnation) -> Option<Moment> {
        let standing = self.state().standing?;
        (standing.incarnation == run).then_some(standing.deadline)
    }

    /// Lets a shard in for this run. Nobody is let in after the gate was closed, and whoever then finds
    /// nobody running knows that nothing of the run goes on.
    pub(crate) fn enter(self: &Arc<Self>, run: Incarnation) -> Option<Permit> {
        let mut state = self.state();
        let standing = state.standing.filter(|standing| standing.incarnation == run)?;
        (self.clock.now() < standing.deadline).then_some(())?;
        state.running += 1;
        Some(Permit(Arc::clone(self)))
    }

    /// Whether nothing runs here.
    pub(crate) fn is_idle(&self) -> bool {
        self.state().running == 0
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

/// A shard that runs here; dropped when it does not any more.
#[derive(Debug)]
pub(crate) struct Permit(Arc<Gate>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.state().running -= 1;
        self.0.changed.send_replace(());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
}
