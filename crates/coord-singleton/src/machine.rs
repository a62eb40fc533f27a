//! When a job runs, stops and rests. Pure: `now` is an argument.

use std::sync::Arc;
use std::time::Duration;

use coord_core::{Error, ErrorKind, Moment};

use crate::{Ended, Failure, Next};

/// How long things take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// The job may take this long to stop.
    pub(crate) stop_budget: Duration,
    /// It has to begin within this.
    pub(crate) start_within: Duration,
    pub(crate) restart_pause: Duration,
    pub(crate) restart_pause_max: Duration,
}

/// What the driver does next.
#[derive(Clone, Debug)]
pub(crate) enum Turn {
    /// Acquire the lease.
    Acquire,
    /// Start the job.
    Begin,
    /// Tell the job to stop.
    Cancel,
    /// Drop the job.
    Abort,
    /// Give the lease back: nothing of the job is left.
    Release,
    /// Nothing, until this moment, which is later than now, or until something is heard.
    Wait(Option<Moment>),
    /// Nothing any more.
    End(Ended),
}

/// How a job's task ended.
#[derive(Clone, Debug)]
pub(crate) enum JobEnd {
    Returned(Next),
    Panicked(String),
    /// It was dropped, by us or by its runtime.
    Gone,
}

/// The state.
#[derive(Clone, Debug)]
pub(crate) enum Phase {
    /// It wants the lease.
    Waiting,
    /// The lease is held, and the job is to start.
    Held,
    /// The job has been started; whether it runs is another question.
    Running { since: Moment, seen: bool },
    /// The job was told to stop.
    Stopping { since: Moment, why: EndReason, abort_at: Moment, aborted: bool },
    /// Nothing of the job is left.
    Releasing(EndReason),
    /// It wants the lease again at this moment.
    Resting { until: Moment, pause: Duration, failure: Option<Failure> },
    /// It is over.
    Over(Ended),
}

/// Why a job does not run any more.
#[derive(Clone, Debug)]
pub(crate) enum EndReason {
    Stopped,
    Lost,
    Done,
    Again,
    Failed(Failure),
}

#[derive(Debug)]
pub(crate) struct Machine {
    times: Times,
    phase: Phase,
    /// It is asked to end.
    stop: bool,
    /// Failures in a row.
    failures: u32,
}

impl Machine {
    pub(crate) fn new(times: Times) -> Self {
        Self { times, phase: Phase::Waiting, stop: false, failures: 0 }
    }

    pub(crate) fn phase(&self) -> &Phase {
        &self.phase
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stop
    }

    /// It is asked to end.
    pub(crate) fn on_stop(&mut self) {
        self.stop = true;
    }

    pub(crate) fn on_acquired(&mut self) {
        self.phase = Phase::Held;
    }

    /// The lease can't be had.
    pub(crate) fn on_refused(&mut self, error: Error, now: Moment) {
        let forever =
            matches!(error.kind(), ErrorKind::Closed | ErrorKind::Invalid | ErrorKind::Unsupported);
        let error = Arc::new(error);
        if forever {
            self.phase = Phase::Over(Ended::Failed(error));
        } else {
            self.rest(Some(Failure::Refused(error)), now);
        }
    }

    /// The job's task has been run.
    pub(crate) fn on_seen(&mut self) {
        if let Phase::Running { seen, .. } = &mut self.phase {
            *seen = true;
        }
    }

    /// The job's task has ended.
    pub(crate) fn on_job_end(&mut self, end: JobEnd, now: Moment) {
        let (why, since) = match &self.phase {
            Phase::Running { since, .. } => {
                let why = match end {
                    JobEnd::Returned(Next::Done) => EndReason::Done,
                    JobEnd::Returned(Next::Again) => EndReason::Again,
                    JobEnd::Panicked(message) => EndReason::Failed(Failure::Panicked(message)),
                    JobEnd::Gone => EndReason::Failed(Failure::Gone),
                };
                (why, *since)
            }
            // What a job returns that was told to stop does not count; a panic does.
            Phase::Stopping { since, why, .. } => {
                let why = match (why, end) {
                    (EndReason::Lost, JobEnd::Panicked(message)) => {
                        EndReason::Failed(Failure::Panicked(message))
                    }
                    (why, _) => why.clone(),
                };
                (why, *since)
            }
            _ => return,
        };
        if now.since(since) >= self.times.restart_pause_max {
            self.failures = 0;
        }
        self.phase = Phase::Releasing(why);
    }

    /// The lease is given back, as far as that was possible.
    pub(crate) fn on_released(&mut self, now: Moment) {
        let Phase::Releasing(why) = &self.phase else { return };
        match why.clone() {
            EndReason::Stopped => self.phase = Phase::Over(Ended::Stopped),
            EndReason::Done => self.phase = Phase::Over(Ended::Done),
            EndReason::Lost => self.phase = Phase::Waiting,
            EndReason::Again => self.rest(None, now),
            EndReason::Failed(failure) => self.rest(Some(failure), now),
        }
    }

    fn rest(&mut self, failure: Option<Failure>, now: Moment) {
        let Times { restart_pause, restart_pause_max, .. } = self.times;
        let times = if failure.is_some() { self.failures } else { 0 };
        let pause = restart_pause.saturating_mul(1 << times.min(20)).min(restart_pause_max);
        self.failures = if failure.is_some() { self.failures.saturating_add(1) } else { 0 };
        self.phase = Phase::Resting { until: now.plus(pause), pause, failure };
    }

    /// What to do now; `deadline` is that of the lease, in the past once it is lost.
    pub(crate) fn next(&mut self, now: Moment, deadline: Moment) -> Turn {
        match &mut self.phase {
            Phase::Waiting | Phase::Resting { .. } if self.stop => {
                self.phase = Phase::Over(Ended::Stopped);
                Turn::End(Ended::Stopped)
            }
            Phase::Waiting => Turn::Acquire,
            Phase::Resting { until, .. } if now < *until => Turn::Wait(Some(*until)),
            Phase::Resting { .. } => {
                self.phase = Phase::Waiting;
                Turn::Acquire
            }
            Phase::Held if self.stop => {
                self.phase = Phase::Releasing(EndReason::Stopped);
                Turn::Release
            }
            Phase::Held => {
                self.phase = Phase::Running { since: now, seen: false };
                Turn::Begin
            }
            Phase::Running { since, seen } => {
                let (since, budget) = (*since, self.times.stop_budget);
                let (stop_at, begun_by) =
                    (deadline.minus(budget), since.plus(self.times.start_within));
                if self.stop {
                    self.stop_job(EndReason::Stopped, since, now.plus(budget).min(deadline))
                } else if now >= stop_at {
                    self.stop_job(EndReason::Lost, since, deadline)
                } else if *seen {
                    Turn::Wait(Some(stop_at))
                } else if now >= begun_by {
                    // There is no job that could be told to stop.
                    self.stop_job(EndReason::Failed(Failure::NeverStarted), since, now)
                } else {
                    Turn::Wait(Some(stop_at.min(begun_by)))
                }
            }
            // Nothing else ends it: while it runs on, the lease is neither given back nor asked for.
            Phase::Stopping { aborted: true, .. } => Turn::Wait(None),
            Phase::Stopping { abort_at, aborted, .. } => {
                let abort_at = (*abort_at).min(deadline);
                if now < abort_at {
                    return Turn::Wait(Some(abort_at));
                }
                *aborted = true;
                Turn::Abort
            }
            Phase::Releasing(_) => Turn::Release,
            Phase::Over(ended) => Turn::End(ended.clone()),
        }
    }

    fn stop_job(&mut self, why: EndReason, since: Moment, abort_at: Moment) -> Turn {
        self.phase = Phase::Stopping { since, why, abort_at, aborted: false };
        Turn::Cancel
    }
}
