//! The settings of a job.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use coord_core::session::{Leases, default_margin};
use coord_core::{Clock, Error, ErrorKind, LeaseName, Result};
use futures::FutureExt;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use crate::driver::{Driver, Job, Scope};
use crate::machine::Times;
use crate::{JobContext, Next, Singleton, State};

const TTL_DEFAULT: Duration = Duration::from_secs(30);
const RETRY_DEFAULT: Duration = Duration::from_secs(5);
const REQUEST_TIMEOUT_MAX: Duration = Duration::from_secs(2);
const RESTART_PAUSE: Duration = Duration::from_secs(1);
const RESTART_PAUSE_MAX: Duration = Duration::from_secs(300);

/// The settings of a job that runs on one node of many. Times that are not set follow from the TTL; everything
/// is checked together by [`start`](Self::start).
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

impl SingletonBuilder {
    pub(crate) fn new(leases: Leases, name: LeaseName) -> Self {
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

    /// How long this node waits before it is a candidate again after the job ended; 1 s by default. The pause
    /// doubles while the job fails, and begins anew once the job ran for longer than the longest pause.
    pub fn restart_pause(mut self, pause: Duration) -> Self {
        self.restart_pause = pause;
        self
    }

    /// The longest of those pauses; 5 min unless said.
    pub fn restart_pause_max(mut self, pause: Duration) -> Self {
        self.restart_pause_max = pause;
        self
    }

    /// Spawns its tasks with this tracker, so that their end can be waited for.
    pub fn tracked_by(mut self, tasks: TaskTracker) -> Self {
        self.scope.tasks = tasks;
        self
    }

    /// Stops when this token is cancelled, as [`Singleton::stop`] does.
    pub fn stopped_by(mut self, stop: &CancellationToken) -> Self {
        self.scope.stop = stop.child_token();
        self
    }

    /// Where this token is cancelled at the stop, the job is dropped and the lease left to its TTL, as if the
    /// process had crashed.
    pub fn abandoned_by(mut self, abandoned: CancellationToken) -> Self {
        self.scope.abandoned = abandoned;
        self
    }

    /// Checks everything, and is a candidate for the lease from now on, in a task of its own. `job` makes a
    /// future that runs in another task, once for each time that this node holds the lease.
    ///
    /// # Errors
    /// `Invalid`, naming every contradiction; `Internal` outside a Tokio runtime.
    pub fn start<F, W>(self, job: F) -> Result<Singleton>
    where
        F: Fn(JobContext) -> W + Send + Sync + 'static,
        W: Future<Output = Next> + Send + 'static,
    {
        let times = self.times()?;
        let runtime = Handle::try_current().map_err(|_error| {
            let error = Error::new(ErrorKind::Internal, "start singleton").effect_none();
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
        let usable = self.ttl.saturating_sub(default_margin(self.ttl));
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
