//! A job that runs on one node of many: the one that holds its lease.
//!
//! ```text
//!            ┌────────── after a pause ◄── failed, or asked to go on ◄─┐
//!            ▼                                                         │
//!  waiting ── lease held ──► running ── told to stop ──► stopping ── the job is gone ── released
//!    ▲                                                      │          │
//!    └────────────── the lease was lost ◄───────────────────┘          └─► ended: done, or stopped
//! ```
//!
//! The job starts after the lease is held. It is told to stop a *stop budget* before the deadline of the
//! lease and dropped at the deadline, which is before another can hold it. The lease is given back only
//! once nothing of the job is left. A lease that is held while nothing runs, because the job panicked,
//! is gone or never began, is given up, so that another node takes over.
//!
//! Nothing stops a process that stands still past its deadline: what the job writes to must refuse a
//! stale [fence](Duty::fence).
//!
//! ```
//! # use coord_core::{Backend, ClusterName, Incarnation, Leases, MemoryBackend, NodeId};
//! use coord_cluster::singleton::{Ended, Next, Singleton};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> coord_core::Result<()> {
//! # let backend = MemoryBackend::isolated(ClusterName::new("orders")?);
//! # let leases = Leases::new(backend.lease(), NodeId::new("node-1")?, Incarnation::random());
//! let report = Singleton::builder(&leases, "nightly-report")?.start(|duty| async move {
//!     println!("writing the report in term {}", duty.fence().term);
//!     Next::Done
//! })?;
//! assert!(matches!(report.ended().await, Ended::Done));
//! # Ok(())
//! # }
//! ```

mod driver;
mod machine;
#[cfg(test)]
mod tests;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use coord_core::session::{Leases, Tenure};
use coord_core::{Clock, Error, ErrorKind, Fence, LeaseName, Moment, Result};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use self::driver::Driver;
use self::machine::Times;
use crate::settings::Settings;
use crate::shared::{Ending, Shared};

const TTL_DEFAULT: Duration = Duration::from_secs(30);
const RETRY_DEFAULT: Duration = Duration::from_secs(5);
const REQUEST_TIMEOUT_MAX: Duration = Duration::from_secs(2);
const RESTART_PAUSE: Duration = Duration::from_secs(1);
const RESTART_PAUSE_MAX: Duration = Duration::from_secs(300);

/// What a job wants when it ends by itself.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Next {
    /// It is done: the lease is given back, and this node does not stand for it any more. Another node
    /// that waits runs its own; what may be done only once is to be remembered where the fence is checked.
    Done,
    /// It wants to run again: the lease is given back, and this node stands for it after the restart
    /// pause, so that another may be faster.
    Again,
}

/// Why the lease was held while nothing ran.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum Failure {
    /// The job panicked, with this message.
    Panicked(String),
    /// The job's task is gone without a word, as when its runtime was shut down.
    Gone,
    /// The job's task was not run by its runtime within a third of the TTL.
    NeverStarted,
    /// The store refuses the lease, which may get well: no permission, or a setting of the store.
    Refused(Arc<Error>),
}

impl Failure {
    /// The reason as one lower-case word, for logs and metrics.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Panicked(_) => "panicked",
            Self::Gone => "gone",
            Self::NeverStarted => "never_started",
            Self::Refused(_) => "refused",
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Panicked(message) => write!(f, "the job panicked: {message}"),
            Self::Gone => f.write_str("the job's task is gone"),
            Self::NeverStarted => f.write_str("the job's task was never run"),
            Self::Refused(error) => write!(f, "the lease can't be had: {error}"),
        }
    }
}

/// How it ended on this node.
#[non_exhaustive]
#[derive(Clone, Debug)]
#[must_use]
pub enum Ended {
    /// The job said [`Next::Done`].
    Done,
    /// It was stopped.
    Stopped,
    /// The lease can't ever be had: the store was closed, or does not know such a lease.
    Failed(Arc<Error>),
}

/// Where a singleton stands on this node.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum State {
    /// It waits for the lease.
    Waiting,
    /// The job runs under this fence.
    Running(Fence),
    /// The job was told to stop, and the lease is still this node's.
    Stopping(Fence),
    /// It stands for the lease again after this pause; why, unless the job asked for it.
    Resting(Duration, Option<Failure>),
    /// It is over.
    Ended(Ended),
}

/// What a job has in its hands while it runs. Clones are the same.
#[derive(Clone, Debug)]
pub struct Duty {
    tenure: Tenure,
    cancel: CancellationToken,
}

impl Duty {
    /// What to show to whatever the job writes to.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.tenure.fence()
    }

    /// Whether the job may act now. Once false, it stays false. No I/O, and true to the clock even if no
    /// task could run.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.tenure.is_held()
    }

    /// Until when it may act, unless a renewal moves it.
    #[must_use]
    pub fn deadline(&self) -> Moment {
        self.tenure.deadline()
    }

    /// Whether the job was told to stop. It has the stop budget to end by itself, and is dropped then.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Waits until the job is told to stop. What it returns afterwards does not count.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn cancelled(&self) {
        self.cancel.cancelled().await;
    }
}

type Job = Box<dyn Fn(Duty) -> BoxFuture<'static, Next> + Send + Sync>;

/// How a job is to run on one node of many. What is not said follows from the TTL; everything is checked
/// together by [`start`](Self::start).
#[derive(Clone, Debug)]
#[must_use = "nothing runs before it is started"]
pub struct SingletonBuilder {
    leases: Leases,
    clock: Arc<dyn Clock>,
    name: LeaseName,
    ttl: Duration,
    retry_every: Duration,
    request_timeout: Option<Duration>,
    stop_budget: Option<Duration>,
    restart_pause: Duration,
    restart_pause_max: Duration,
    scope: Scope,
}

/// Whose end ends the singleton too.
#[derive(Clone, Default)]
struct Scope {
    tasks: TaskTracker,
    stop: CancellationToken,
    shared: Option<Arc<Shared>>,
}

impl Scope {
    /// Whether the process is to count as crashed.
    fn is_abandoned(&self) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.ending() == Ending::Abandoned)
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("node", &self.shared.is_some()).finish_non_exhaustive()
    }
}

impl SingletonBuilder {
    fn new(leases: Leases, name: LeaseName) -> Self {
        Self {
            clock: leases.clock(),
            leases,
            name,
            ttl: TTL_DEFAULT,
            retry_every: RETRY_DEFAULT,
            request_timeout: None,
            stop_budget: None,
            restart_pause: RESTART_PAUSE,
            restart_pause_max: RESTART_PAUSE_MAX,
            scope: Scope::default(),
        }
    }

    /// For a node of a cluster, with whose runtime it ends.
    pub(crate) fn of_node(
        shared: &Arc<Shared>,
        tasks: &TaskTracker,
        leases: Leases,
        name: LeaseName,
    ) -> Self {
        let Settings { sharding_ttl, sharding_retry, request_timeout, .. } = shared.settings;
        let (tasks, stop) = (tasks.clone(), shared.stop.child_token());
        Self {
            scope: Scope { tasks, stop, shared: Some(Arc::clone(shared)) },
            ..Self::new(leases, name)
        }
        .ttl(sharding_ttl)
        .retry_every(sharding_retry)
        .request_timeout(request_timeout)
    }

    /// How long the lease lasts without renewal, 1 s to 24 h; 30 s unless said. A node that crashes is
    /// followed by another after this.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// How often a node that waits tries although the watch tells it nothing; 5 s unless said.
    pub fn retry_every(mut self, interval: Duration) -> Self {
        self.retry_every = interval;
        self
    }

    /// How long one request to the store may take; a tenth of the TTL, and at most 2 s, unless said.
    pub fn request_timeout(mut self, timeout: Duration) -> Self {
        self.request_timeout = Some(timeout);
        self
    }

    /// How long the job may take to stop once it was told to; a fifteenth of the TTL unless said. With no
    /// more than that, a store that is away for less than half of the TTL stops no job.
    pub fn stop_budget(mut self, budget: Duration) -> Self {
        self.stop_budget = Some(budget);
        self
    }

    /// How long this node waits before it stands for the lease again after the job ended; 1 s unless said.
    /// It doubles while the job fails, and begins anew once it ran for longer than the longest pause.
    pub fn restart_pause(mut self, pause: Duration) -> Self {
        self.restart_pause = pause;
        self
    }

    /// The longest of those pauses; 5 min unless said.
    pub fn restart_pause_max(mut self, pause: Duration) -> Self {
        self.restart_pause_max = pause;
        self
    }

    /// Checks it all, and stands for the lease from now on, in a task of its own. `job` makes a future
    /// that runs in another task, once for each time that this node holds the lease.
    ///
    /// # Errors
    /// `Invalid`, naming every contradiction; `Internal` outside a Tokio runtime.
    pub fn start<F, W>(self, job: F) -> Result<Singleton>
    where
        F: Fn(Duty) -> W + Send + Sync + 'static,
        W: Future<Output = Next> + Send + 'static,
    {
        let times = self.times()?;
        let runtime = Handle::try_current().map_err(|_error| {
            let error = Error::new(ErrorKind::Internal, "start singleton");
            error.message("not inside a Tokio runtime").resource(&self.name)
        })?;
        let session = self
            .leases
            .named(self.name.clone())
            .ttl(self.ttl)
            .retry_every(self.retry_every)
            .renew_every(self.renew_every())
            .request_timeout(self.timeout())
            .build()?;
        let state = watch::Sender::new(State::Waiting);
        let Self { clock, name, scope, .. } = self;
        let singleton =
            Singleton { name: name.clone(), state: state.subscribe(), stop: scope.stop.clone() };
        let span = tracing::info_span!("singleton", lease = %name);
        let job: Job = Box::new(move |duty| job(duty).boxed());
        let tasks = scope.tasks.clone();
        let driver = Driver::new(session, clock, Arc::new(job), times, scope, state);
        tasks.spawn_on(driver.run().instrument(span), &runtime);
        Ok(singleton)
    }

    /// Renewed six times in a TTL, so that one comes in time also where the store was away for half of it.
    fn renew_every(&self) -> Duration {
        self.ttl / 6
    }

    fn timeout(&self) -> Duration {
        self.request_timeout.unwrap_or_else(|| (self.ttl / 10).min(REQUEST_TIMEOUT_MAX))
    }

    fn times(&self) -> Result<Times> {
        let stop_budget = self.stop_budget.unwrap_or(self.ttl / 15);
        let Self { restart_pause, restart_pause_max, .. } = *self;
        let mut wrong = Vec::new();
        if restart_pause.is_zero() {
            wrong.push("restart_pause is 0: a job that fails would not rest".to_owned());
        }
        if restart_pause_max < restart_pause {
            wrong.push(format!(
                "restart_pause_max {restart_pause_max:?} is below restart_pause {restart_pause:?}"
            ));
        }
        let usable = self.ttl.saturating_sub(Settings::margin(self.ttl));
        let renewed = (self.renew_every() * 11 / 10).saturating_add(self.timeout());
        if renewed.saturating_add(stop_budget) >= usable {
            wrong.push(format!(
                "stop_budget {stop_budget:?} and the time of a renewal {renewed:?} are not below ttl \
                 less its margin, {usable:?}"
            ));
        }
        if !wrong.is_empty() {
            let error = Error::invalid("configure singleton", wrong.join("; "));
            return Err(error.resource(&self.name));
        }
        let start_within = self.ttl / 3;
        Ok(Times { stop_budget, start_within, restart_pause, restart_pause_max })
    }
}

/// A job that runs on one node of many, as this node takes part in it. Dropping it stops it in the
/// background, as [`stop`](Self::stop) does.
#[derive(Debug)]
#[must_use = "dropping it stops the job"]
pub struct Singleton {
    name: LeaseName,
    state: watch::Receiver<State>,
    stop: CancellationToken,
}

impl Singleton {
    /// Describes a job that runs wherever the lease of this name is held. All nodes name the same lease.
    /// In a cluster, [`Cluster::singleton`](crate::Cluster::singleton) ends it with the node.
    ///
    /// # Errors
    /// `Invalid` for a bad name.
    pub fn builder(leases: &Leases, name: impl AsRef<str>) -> Result<SingletonBuilder> {
        Ok(SingletonBuilder::new(leases.clone(), LeaseName::new(name)?))
    }

    /// Its lease.
    #[must_use]
    pub fn name(&self) -> &LeaseName {
        &self.name
    }

    /// Where it stands on this node, to look at or to follow.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<State> {
        self.state.clone()
    }

    /// Tells the job to stop, drops it after the stop budget if it has not, and gives the lease back once
    /// nothing of it is left.
    ///
    /// # Cancel safety
    /// It stops without the caller.
    pub async fn stop(&self) -> Ended {
        self.stop.cancel();
        self.ended().await
    }

    /// Waits until it has ended on this node and the lease is given back.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn ended(&self) -> Ended {
        let mut state = self.state.clone();
        let over = state.wait_for(|state| matches!(state, State::Ended(_))).await;
        match over.as_deref() {
            Ok(State::Ended(ended)) => ended.clone(),
            // Its task is gone only if the whole runtime was shut down.
            _ => Ended::Stopped,
        }
    }
}

impl Drop for Singleton {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
