//! Performs what the [`Machine`] decides.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use coord_core::session::{LeaseGuard, LeaseSession};
use coord_core::{Clock, Moment, sleep_until};
use futures::future::BoxFuture;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::machine::{JobEnd, Machine, Phase, Times, Turn};
use crate::metrics;
use crate::{Ended, JobContext, Next, State};

pub(crate) type Job = Box<dyn Fn(JobContext) -> BoxFuture<'static, Next> + Send + Sync>;

/// What ends the singleton with its process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scope {
    pub(crate) tasks: TaskTracker,
    pub(crate) stop: CancellationToken,
    /// Cancelled where the process is to count as crashed.
    pub(crate) abandoned: CancellationToken,
}

pub(crate) struct Driver {
    session: LeaseSession,
    clock: Arc<dyn Clock>,
    job: Arc<Job>,
    machine: Machine,
    scope: Scope,
    state: watch::Sender<State>,
    guard: Option<LeaseGuard>,
    work: Option<Work>,
}

impl Driver {
    pub(crate) fn new(
        session: LeaseSession,
        clock: Arc<dyn Clock>,
        job: Arc<Job>,
        times: Times,
        scope: Scope,
        state: watch::Sender<State>,
    ) -> Self {
        let machine = Machine::new(times);
        Self { session, clock, job, machine, scope, state, guard: None, work: None }
    }

    pub(crate) async fn run(mut self) {
        loop {
            if self.scope.stop.is_cancelled() && self.scope.abandoned.is_cancelled() {
                self.abandon();
                return;
            }
            let guard = self.guard.as_ref();
            let deadline =
                guard.map_or(Moment::from_origin(Duration::ZERO), |guard| guard.deadline());
            let now = self.clock.now();
            let turn = self.machine.next(now, deadline);
            self.show();
            match turn {
                Turn::Acquire => self.acquire().await,
                Turn::Begin => self.begin(),
                Turn::Cancel => self.work.iter().for_each(|work| work.cancel.cancel()),
                Turn::Abort => self.abort(),
                Turn::Release => self.release().await,
                Turn::Wait(until) => {
                    debug_assert!(until.is_none_or(|until| until > now), "it would spin");
                    self.wait(until).await;
                }
                Turn::End(ended) => return self.tell(State::Ended(ended)),
            }
        }
    }

    async fn acquire(&mut self) {
        let acquired = tokio::select! {
            biased;
            () = self.scope.stop.cancelled() => return self.machine.on_stop(),
            acquired = self.session.acquire() => acquired,
        };
        match acquired {
            Ok(guard) => {
                self.guard = Some(guard);
                self.machine.on_acquired();
            }
            Err(error) => self.machine.on_refused(error, self.clock.now()),
        }
    }

    fn begin(&mut self) {
        let Some(guard) = &self.guard else { return };
        let duty = JobContext { tenure: guard.tenure(), cancel: CancellationToken::new() };
        metrics::started(self.session.name());
        self.work = Some(Work::begin(&self.scope.tasks, Arc::clone(&self.job), duty));
    }

    fn abort(&self) {
        tracing::warn!("the singleton's job did not stop in time and is dropped");
        self.work.iter().for_each(|work| work.task.abort());
    }

    /// Waits until this moment, or until there is something to take in.
    async fn wait(&mut self, until: Option<Moment>) {
        let (clock, guard) = (Arc::clone(&self.clock), &self.guard);
        // Awaited once: afterwards the deadline shows it.
        let lost = async {
            match guard.as_ref().filter(|guard| guard.ended().is_none()) {
                Some(guard) => drop(guard.lost().await),
                None => std::future::pending().await,
            }
        };
        let timer = async {
            match until {
                Some(until) => sleep_until(&*clock, until).await,
                None => std::future::pending().await,
            }
        };
        let heard = tokio::select! {
            biased;
            () = self.scope.stop.cancelled(), if !self.machine.is_stopping() => {
                return self.machine.on_stop();
            }
            heard = Work::next(&mut self.work) => heard,
            () = lost => return,
            () = timer => return,
        };
        match heard {
            JobEvent::Begun => self.machine.on_seen(),
            JobEvent::End(end) => {
                self.work = None;
                if let JobEnd::Panicked(message) = &end {
                    tracing::error!(message, "the singleton's job panicked");
                }
                self.machine.on_job_end(end, self.clock.now());
            }
        }
    }

    async fn release(&mut self) {
        if let Some(guard) = self.guard.take()
            && let Err(error) = guard.release().await
        {
            tracing::warn!(%error, "the singleton's lease is left to its TTL");
        }
        self.machine.on_released(self.clock.now());
    }

    /// As if the process had crashed.
    fn abandon(&mut self) {
        if let Some(work) = &self.work {
            work.task.abort();
        }
        if let Some(guard) = self.guard.take() {
            guard.abandon();
        }
        self.tell(State::Ended(Ended::Stopped));
    }

    /// Publishes the state, once for each change.
    fn show(&self) {
        let fence = || self.guard.as_ref().map(|guard| guard.fence());
        let state = match (self.machine.phase(), fence()) {
            (Phase::Waiting, _) => State::Waiting,
            (Phase::Running { .. }, Some(fence)) => State::Running(fence),
            (Phase::Stopping { .. } | Phase::Releasing(_), Some(fence)) => State::Stopping(fence),
            (Phase::Resting { pause, failure, .. }, _) => State::Resting(*pause, failure.clone()),
            _ => return,
        };
        if std::mem::discriminant(&state) == std::mem::discriminant(&self.state.borrow()) {
            return;
        }
        self.tell(state);
    }

    fn tell(&self, state: State) {
        metrics::state(self.session.name(), &state);
        self.state.send_replace(state);
    }
}

/// A job's task. Dropping it drops the job.
struct Work {
    task: JoinHandle<Next>,
    /// Cancelled when the task is run for the first time, which is heard once.
    begun: CancellationToken,
    heard: bool,
    cancel: CancellationToken,
}

enum JobEvent {
    Begun,
    End(JobEnd),
}

impl Work {
    fn begin(tasks: &TaskTracker, job: Arc<Job>, duty: JobContext) -> Self {
        let cancel = duty.cancel.clone();
        let begun = CancellationToken::new();
        let begins = begun.clone();
        let task = tasks.spawn(async move {
            begins.cancel();
            // Made in here, so that a panic of the closure is one of the job.
            job(duty).await
        });
        Self { task, begun, heard: false, cancel }
    }

    async fn next(work: &mut Option<Self>) -> JobEvent {
        let Some(Self { task, begun, heard, .. }) = work else {
            return std::future::pending().await;
        };
        tokio::select! {
            biased;
            () = begun.cancelled(), if !*heard => {
                *heard = true;
                JobEvent::Begun
            }
            ended = task => JobEvent::End(ended.map_or_else(failed, JobEnd::Returned)),
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn failed(error: JoinError) -> JobEnd {
    error.try_into_panic().map_or(JobEnd::Gone, |payload| JobEnd::Panicked(message(&*payload)))
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a payload that is no text".to_owned())
}
