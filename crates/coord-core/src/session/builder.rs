//! How a lease is asked for.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio_util::task::TaskTracker;

use super::candidate::{Candidate, Patience};
use super::driver::{Campaign, campaign};
use super::guard::LeaseGuard;
use super::timing::{Asked, Timing};
use crate::backoff::Jitter;
use crate::clock::{BootClock, Clock};
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::types::{
    AcquireRequest, AttemptId, Fence, Grant, Holder, Incarnation, LeaseName, LeaseRecord, NodeId,
    Reclaim, Term,
};

/// How many leases' highest terms are remembered.
const TERMS_MAX: usize = 4_096;
const TTL_DEFAULT: Duration = Duration::from_secs(30);

/// Acquires leases for one node, and owns the tasks that keep them. Clones share both.
///
/// ```
/// # use std::time::Duration;
/// # use coord_core::{Backend, ClusterName, Incarnation, Leases, MemoryBackend, NodeId, RunOutcome};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> coord_core::Result<()> {
/// let backend = MemoryBackend::isolated(ClusterName::new("orders")?);
/// let leases = Leases::new(backend.lease(), NodeId::new("node-1")?, Incarnation::random());
/// let guard = leases.lease("scheduler")?.ttl(Duration::from_secs(15)).acquire().await?;
/// assert!(guard.is_held());
/// match guard.run(|fence| async move { fence.term }).await {
///     RunOutcome::Finished(term) => println!("worked under term {term}"),
///     RunOutcome::Lost(lost) => println!("stopped: {lost}"),
///     RunOutcome::Panicked(payload) => std::panic::resume_unwind(payload),
///     _ => {}
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Leases {
    pub(super) lease: Arc<dyn Lease>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) tasks: TaskTracker,
    pub(super) terms: Arc<Terms>,
    node: NodeId,
    incarnation: Incarnation,
    jitter: Arc<Mutex<Jitter>>,
}

impl Leases {
    /// Leases of this store, for this run of this node.
    #[must_use]
    pub fn new(lease: Arc<dyn Lease>, node: NodeId, incarnation: Incarnation) -> Self {
        Self {
            lease,
            clock: Arc::new(BootClock::new()),
            tasks: TaskTracker::new(),
            terms: Arc::default(),
            node,
            incarnation,
            jitter: Arc::new(Mutex::new(Jitter::new(None))),
        }
    }

    /// Reads deadlines from this clock instead of the boot clock.
    #[must_use]
    pub fn with_clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// With jitter that repeats for the same seed. Attempts stay random: two processes with one seed
    /// must not be taken for one.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.jitter = Arc::new(Mutex::new(Jitter::new(Some(seed))));
        self
    }

    /// The lease with this name.
    ///
    /// # Errors
    /// `Invalid` for a bad name.
    pub fn lease(&self, name: impl AsRef<str>) -> Result<LeaseBuilder> {
        Ok(self.named(LeaseName::new(name)?))
    }

    /// The lease with this name, which was parsed before or is one of coord's own.
    pub fn named(&self, name: LeaseName) -> LeaseBuilder {
        let (margin, renew_every, request_timeout, retry_every) = (None, None, None, None);
        let ttl = TTL_DEFAULT;
        LeaseBuilder {
            leases: self.clone(),
            name,
            asked: Asked { ttl, margin, renew_every, request_timeout, retry_every },
            reclaim: Reclaim::No,
            on_retry: OnRetry::default(),
        }
    }

    /// Waits until no lease of these is held or being acquired any more, and the last release is done:
    /// what a process does before it ends, after it dropped its guards.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn idle(&self) {
        self.tasks.close();
        self.tasks.wait().await;
        self.tasks.reopen();
    }

    /// The clock that deadlines are read from.
    #[must_use]
    pub fn clock(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.clock)
    }

    pub(super) fn jitter(&self) -> Jitter {
        Jitter::new(Some(self.jitter.lock().unwrap_or_else(PoisonError::into_inner).seed()))
    }
}

impl fmt::Debug for Leases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leases")
            .field("node", &self.node)
            .field("incarnation", &self.incarnation)
            .field("tasks", &self.tasks.len())
            .finish_non_exhaustive()
    }
}

/// How one lease is to be held. What is not said follows from the TTL; everything is checked together
/// by [`build`](Self::build), before any I/O.
#[derive(Clone, Debug)]
#[must_use]
pub struct LeaseBuilder {
    leases: Leases,
    name: LeaseName,
    asked: Asked,
    reclaim: Reclaim,
    on_retry: OnRetry,
}

/// Called with each failed request to acquire that may succeed when it is tried again.
#[derive(Clone, Default)]
pub(super) struct OnRetry(Option<Tell>);

type Tell = Arc<dyn Fn(&Error) + Send + Sync>;

impl OnRetry {
    pub(super) fn tell(&self, error: &Error) {
        if let Some(tell) = &self.0 {
            tell(error);
        }
    }
}

impl fmt::Debug for OnRetry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Some" } else { "None" })
    }
}

impl LeaseBuilder {
    /// How long a grant lasts without renewal, 1 s to 24 h; 30 s unless said.
    pub fn ttl(mut self, ttl: impl Into<Duration>) -> Self {
        self.asked.ttl = ttl.into();
        self
    }

    /// How long before the store may end the grant its holder stops, at least 100 ms; a tenth of the
    /// granted TTL, and at least 100 ms, unless said.
    pub fn margin(mut self, margin: Duration) -> Self {
        self.asked.margin = Some(margin);
        self
    }

    /// The time between renewals, of which up to a tenth is added or taken away; a third of the TTL
    /// unless said.
    pub fn renew_every(mut self, interval: Duration) -> Self {
        self.asked.renew_every = Some(interval);
        self
    }

    /// How long one request may take, below a third of the TTL; a fifth of it, and at most 5 s, unless
    /// said.
    pub fn request_timeout(mut self, timeout: Duration) -> Self {
        self.asked.request_timeout = Some(timeout);
        self
    }

    /// How often a waiting candidate tries where no watch shows it the holder of the lease; a fifth of the TTL,
    /// and at most 5 s, by default. With a watch that does, trying once a TTL is enough.
    pub fn retry_every(mut self, interval: Duration) -> Self {
        self.asked.retry_every = Some(interval);
        self
    }

    /// Whether a live grant of a former process of this node is taken over; never unless said.
    pub fn reclaim(mut self, reclaim: Reclaim) -> Self {
        self.reclaim = reclaim;
        self
    }

    /// Called for each request to acquire that failed and that trying again may heal, with the failure.
    /// It must not block.
    pub fn on_retry(mut self, tell: impl Fn(&Error) + Send + Sync + 'static) -> Self {
        self.on_retry = OnRetry(Some(Arc::new(tell)));
        self
    }

    /// Checks it all.
    ///
    /// # Errors
    /// `Invalid`, naming every contradiction.
    pub fn build(self) -> Result<LeaseSession> {
        let timing = Timing::new(&self.asked).map_err(|error| error.resource(&self.name))?;
        let state = watch::Sender::new(LeaseState::Idle);
        let Self { leases, name, reclaim, on_retry, .. } = self;
        Ok(LeaseSession { leases, name, timing, reclaim, on_retry, state })
    }

    /// [`build`](Self::build) and [`LeaseSession::acquire`].
    ///
    /// # Errors
    /// The errors of both.
    ///
    /// # Cancel safety
    /// As `LeaseSession::acquire`.
    pub async fn acquire(self) -> Result<LeaseGuard> {
        self.build()?.acquire().await
    }

    /// [`build`](Self::build) and [`LeaseSession::try_acquire`].
    ///
    /// # Errors
    /// The errors of both.
    ///
    /// # Cancel safety
    /// As `LeaseSession::try_acquire`.
    pub async fn try_acquire(self) -> Result<TryAcquire> {
        self.build()?.try_acquire().await
    }
}

/// What came of a try that does not wait.
#[non_exhaustive]
#[derive(Debug)]
#[must_use]
pub enum TryAcquire {
    /// The lease is held.
    Acquired(LeaseGuard),
    /// Another holds it.
    Held(LeaseRecord),
}

/// Where a session stands.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// It neither holds the lease nor wants it.
    Idle,
    /// It wants the lease; with the present holder, if that is known.
    Acquiring(Option<Holder>),
    /// It holds the lease, under this fence.
    Held(Fence),
}

/// One lease, to be acquired as often as wanted, with times that fit together.
#[derive(Clone, Debug)]
pub struct LeaseSession {
    leases: Leases,
    name: LeaseName,
    timing: Timing,
    reclaim: Reclaim,
    on_retry: OnRetry,
    state: watch::Sender<LeaseState>,
}

impl LeaseSession {
    /// Which lease it is.
    #[must_use]
    pub fn name(&self) -> &LeaseName {
        &self.name
    }

    /// Where this session and its clones stand, to look at or to follow; with several acquires at once,
    /// where the last one stands.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<LeaseState> {
        self.state.subscribe()
    }

    /// Acquires the lease, waiting until it is free.
    ///
    /// The wait is driven by the watch, with the retry interval as the net. A store that can't be
    /// reached is tried again with back-off, without end.
    ///
    /// # Errors
    /// `Denied`, `Invalid`, `Unsupported`, `Misconfigured`, `Closed`, `Internal` as the store answers,
    /// at once; but a candidate that the store has answered before, and that is denied then, goes on
    /// ever more slowly (up to a minute apart), for a store that has just started may deny everything.
    /// `Corrupt` if the store granted a term that is not above all that were seen before: that
    /// grant is released.
    ///
    /// # Cancel safety
    /// No lease stays behind: a request that is on its way is awaited by a task of the [`Leases`],
    /// which releases what was won.
    pub async fn acquire(&self) -> Result<LeaseGuard> {
        loop {
            // A caller that was not polled for so long that its guard was lost waits again.
            if let TryAcquire::Acquired(guard) = self.begin(Patience::WaitsItsTurn).await?
                && guard.is_held()
            {
                return Ok(guard);
            }
        }
    }

    /// Acquires the lease if it is free. A lost reply is resolved by sending the same attempt again, at most
    /// three requests in all.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), and `Unavailable`. What the store may have granted all the same
    /// is looked up and released.
    ///
    /// # Cancel safety
    /// As `acquire`.
    pub async fn try_acquire(&self) -> Result<TryAcquire> {
        match self.begin(Patience::TriesOnce).await? {
            TryAcquire::Acquired(guard) if !guard.is_held() => {
                let why = "the lease was lost before it could be handed out";
                Err(Error::unavailable("acquire", why).resource(&self.name))
            }
            outcome => Ok(outcome),
        }
    }

    async fn begin(&self, patience: Patience) -> Result<TryAcquire> {
        let internal = |why| {
            let error = Error::new(ErrorKind::Internal, "acquire").effect_none();
            error.message(why).resource(&self.name)
        };
        let runtime =
            Handle::try_current().map_err(|_error| internal("not inside a Tokio runtime"))?;
        let (reply, answer) = oneshot::channel();
        let task = Campaign {
            leases: self.leases.clone(),
            timing: self.timing.clone(),
            state: self.state.clone(),
            on_retry: self.on_retry.clone(),
            candidate: Candidate::new(
                self.name.clone(),
                AttemptId::random(),
                self.timing.clone(),
                patience,
                self.leases.jitter(),
                self.leases.clock.now(),
            ),
            request: AcquireRequest::new(
                self.name.clone(),
                Holder::new(self.leases.node.clone(), self.leases.incarnation, AttemptId::random()),
                self.timing.ttl,
            )
            .with_reclaim(self.reclaim),
        };
        self.leases.tasks.spawn_on(campaign(task, reply), &runtime);
        answer
            .await
            .unwrap_or_else(|_gone| Err(internal("the runtime was shut down").effect_unknown()))
    }
}

/// The highest term that was seen of each lease, so that one that went back is noticed.
#[derive(Debug, Default)]
pub(super) struct Terms(Mutex<Seen>);

impl Terms {
    /// Notes what a record shows.
    pub(super) fn saw(&self, record: &LeaseRecord) {
        self.note(&record.lease, record.term, record.holder.attempt);
    }

    /// Notes a grant.
    ///
    /// # Errors
    /// `Corrupt` if its term is not above all that were seen of other attempts.
    pub(super) fn admit(&self, grant: &Grant) -> Result<()> {
        let (highest, by) = self.note(&grant.lease, grant.term, grant.holder.attempt);
        if (highest, by) == (grant.term, grant.holder.attempt) {
            return Ok(());
        }
        let why = format!(
            "the term went back, as after restoring the store from a backup; raise the era \
             term={} seen={highest}",
            grant.term
        );
        Err(Error::corrupt("acquire", why).resource(&grant.lease))
    }

    /// The highest term, and whose it is, once this one is taken into account.
    fn note(&self, lease: &LeaseName, term: Term, attempt: AttemptId) -> (Term, AttemptId) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.note(lease, term, attempt)
    }
}

/// Terms by lease, and which lease was seen longest ago.
#[derive(Debug, Default)]
struct Seen {
    by_lease: BTreeMap<LeaseName, Highest>,
    by_age: BTreeMap<u64, LeaseName>,
    looks: u64,
}

#[derive(Debug)]
struct Highest {
    term: Term,
    attempt: AttemptId,
    /// When it was looked at last.
    look: u64,
}

impl Seen {
    fn note(&mut self, lease: &LeaseName, term: Term, attempt: AttemptId) -> (Term, AttemptId) {
        self.looks += 1;
        let look = self.looks;
        let highest = match self.by_lease.get_mut(lease) {
            Some(highest) => highest,
            None => {
                if self.by_lease.len() >= TERMS_MAX
                    && let Some((_, oldest)) = self.by_age.pop_first()
                {
                    self.by_lease.remove(&oldest);
                }
                self.by_lease.entry(lease.clone()).or_insert(Highest { term, attempt, look })
            }
        };
        self.by_age.remove(&highest.look);
        self.by_age.insert(look, lease.clone());
        highest.look = look;
        if term > highest.term {
            (highest.term, highest.attempt) = (term, attempt);
        }
        (highest.term, highest.attempt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lease_that_was_seen_longest_ago_is_forgotten() {
        let name = |number: usize| LeaseName::new(format!("jobs-{number:05}")).expect("a name");
        let attempt = AttemptId::random();
        let mut seen = Seen::default();
        for number in 0..TERMS_MAX {
            seen.note(&name(number), Term::from_u64(9), attempt);
        }
        // The first in order is looked at again, so the second is the oldest now.
        assert_eq!(seen.note(&name(0), Term::from_u64(3), attempt).0, Term::from_u64(9));
        seen.note(&name(TERMS_MAX), Term::from_u64(9), attempt);
        assert_eq!(seen.note(&name(0), Term::from_u64(3), attempt).0, Term::from_u64(9));
        assert_eq!(seen.note(&name(1), Term::from_u64(3), attempt).0, Term::from_u64(3));
        assert_eq!((seen.by_lease.len(), seen.by_age.len()), (TERMS_MAX, TERMS_MAX));
    }
}
