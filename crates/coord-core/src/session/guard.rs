//! What a holder has in its hands.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use tokio::sync::{oneshot, watch};

use crate::clock::{Clock, Moment, sleep_until};
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Release;
use crate::types::{Fence, Grant, LeaseName, LeaseRecord};

/// What the holder wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// End the grant in the store.
    Release,
    /// Leave it to its TTL.
    Abandon,
}

/// How a tenure ended; exactly one for each term.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum Lost {
    /// The deadline passed before a renewal succeeded.
    Expired {
        /// The last error of a renewal, if there was one.
        last_error: Option<Arc<Error>>,
    },
    /// The store has no such grant any more, and the lease is free: it ran out or was deleted.
    Gone,
    /// Another attempt holds the lease.
    Superseded {
        /// What the store says of it.
        by: LeaseRecord,
    },
    /// The holder released it, or dropped its guard.
    Released,
    /// The holder abandoned it to its TTL.
    Abandoned,
    /// The store answered what can't be: stop, and let an operator look.
    Failed(Arc<Error>),
}

impl Lost {
    /// The reason as one lower-case word, for logs, metrics and machine-readable output.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Expired { .. } => "expired",
            Self::Gone => "gone",
            Self::Superseded { .. } => "superseded",
            Self::Released => "released",
            Self::Abandoned => "abandoned",
            Self::Failed(_) => "failed",
        }
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())?;
        match self {
            Self::Expired { last_error: Some(error) } | Self::Failed(error) => {
                write!(f, ": {error}")
            }
            Self::Superseded { by } => write!(f, " by {} term={}", by.holder, by.term),
            _ => Ok(()),
        }
    }
}

/// What came of [`LeaseGuard::run`].
#[non_exhaustive]
#[derive(Debug)]
#[must_use]
pub enum RunOutcome<T> {
    /// The work finished while the lease was held, and returned this; the lease was released then.
    Finished(T),
    /// The lease was lost first, and the work was dropped.
    Lost(Lost),
    /// The work panicked with this payload; the lease was released after the unwinding.
    Panicked(Box<dyn Any + Send>),
}

/// One tenure of a lease, as any part of the holding process may look at it. It can't end it: that is
/// for the [`LeaseGuard`], which derefs to this.
#[derive(Clone)]
pub struct HeldLease(Arc<Shared>);

struct Shared {
    clock: Arc<dyn Clock>,
    fence: Fence,
    grant: Mutex<Grant>,
    /// In nanoseconds since the clock's origin; [`SEALED`] once a reader has seen it pass or the tenure has
    /// ended, after which nothing raises it.
    deadline: AtomicU64,
    lost: watch::Receiver<Option<Lost>>,
}

const SEALED: u64 = 0;

impl HeldLease {
    pub(super) fn new(
        clock: Arc<dyn Clock>,
        grant: Grant,
        deadline: Moment,
        lost: watch::Receiver<Option<Lost>>,
    ) -> Self {
        Self(Arc::new(Shared {
            clock,
            fence: grant.fence(),
            grant: Mutex::new(grant),
            deadline: AtomicU64::new(nanos(deadline)),
            lost,
        }))
    }

    /// Whether the holder may act now: the clock has not reached the deadline, and the tenure has not
    /// ended. Once false, it stays false. No I/O, and true to the clock even if no task could run.
    #[must_use]
    pub fn is_held(&self) -> bool {
        let mut deadline = self.0.deadline.load(Ordering::Acquire);
        while deadline != SEALED {
            if nanos(self.0.clock.now()) < deadline {
                return true;
            }
            // Sealing it here keeps a renewal that is just being answered from reviving what this
            // caller has already been told is lost.
            match self.0.deadline.compare_exchange(
                deadline,
                SEALED,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return false,
                Err(raised) => deadline = raised,
            }
        }
        false
    }

    /// What to show to whatever is being protected. The same for the whole tenure, and after it.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.0.fence.clone()
    }

    /// Which lease it is.
    #[must_use]
    pub fn name(&self) -> &LeaseName {
        &self.0.fence.lease
    }

    /// The grant, as the store answered last.
    #[must_use]
    pub fn grant(&self) -> Grant {
        self.0.grant.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Until when the holder may act, unless a renewal moves it; the clock's origin once it has ended.
    #[must_use]
    pub fn deadline(&self) -> Moment {
        Moment::from_origin(Duration::from_nanos(self.0.deadline.load(Ordering::Acquire)))
    }

    /// How the tenure ended, if it has and a task could tell; [`is_held`](Self::is_held) may be false
    /// before.
    #[must_use]
    pub fn ended(&self) -> Option<Lost> {
        self.0.lost.borrow().clone()
    }

    /// Waits until the tenure has ended, and returns how; every caller gets the same answer, also a late one.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn lost(&self) -> Lost {
        let mut lost = self.0.lost.clone();
        // The task that tells is gone without a word only if the whole runtime was shut down.
        let told = lost.wait_for(Option::is_some).await.ok().and_then(|lost| lost.clone());
        told.unwrap_or(Lost::Expired { last_error: None })
    }

    /// Waits until the holder may not act any more, whether or not a task could tell why.
    async fn not_held(&self) {
        while self.is_held() {
            let mut lost = self.0.lost.clone();
            tokio::select! {
                biased;
                _ = lost.wait_for(Option::is_some) => return,
                () = sleep_until(&*self.0.clock, self.deadline()) => {}
            }
        }
    }

    /// Moves the deadline from `old` to `new`; false if it has been seen to pass meanwhile.
    pub(super) fn raise(&self, old: Moment, new: Moment) -> bool {
        let (old, new) = (nanos(old), nanos(new));
        self.0.deadline.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    pub(super) fn seal(&self) {
        self.0.deadline.store(SEALED, Ordering::Release);
    }

    pub(super) fn set_grant(&self, grant: &Grant) {
        *self.0.grant.lock().unwrap_or_else(PoisonError::into_inner) = grant.clone();
    }
}

impl fmt::Debug for HeldLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldLease")
            .field("fence", &self.0.fence)
            .field("deadline", &self.deadline())
            .finish_non_exhaustive()
    }
}

/// Saturates after 584 years on one clock.
fn nanos(moment: Moment) -> u64 {
    u64::try_from(moment.since_origin().as_nanos()).unwrap_or(u64::MAX)
}

/// A lease that this process holds, renewed by a task until the guard is released, abandoned or
/// dropped.
///
/// Dropping it releases the lease, through the task that already runs: also outside a runtime, and
/// without waiting.
#[must_use = "dropping the guard releases the lease"]
pub struct LeaseGuard {
    tenure: HeldLease,
    stop: Option<oneshot::Sender<StopOrder>>,
}

/// Tells the task to stop; dropped unsent, it means a release without a waiting caller.
pub(super) struct StopOrder {
    pub(super) stop: Stop,
    pub(super) reply: Option<oneshot::Sender<Result<Release>>>,
}

impl StopOrder {
    pub(super) fn release() -> Self {
        Self { stop: Stop::Release, reply: None }
    }
}

impl LeaseGuard {
    pub(super) fn new(tenure: HeldLease, stop: oneshot::Sender<StopOrder>) -> Self {
        Self { tenure, stop: Some(stop) }
    }

    /// A view of the tenure to hand to other parts of the process.
    #[must_use]
    pub fn tenure(&self) -> HeldLease {
        self.tenure.clone()
    }

    /// Ends the tenure: stops renewing, awaits the renewal that is on its way, and only then releases
    /// the grant in the store. [`is_held`](HeldLease::is_held) is false as soon as this is polled. What
    /// was lost before is `NotHeld`; what a try ended whose answer was lost is `Released`.
    ///
    /// # Errors
    /// That of the last of three tries; its effect is unknown if that of any of them is. The lease then
    /// ends by its TTL.
    ///
    /// # Cancel safety
    /// The release goes on without the caller.
    pub async fn release(mut self) -> Result<Release> {
        let (reply, answer) = oneshot::channel();
        let sent = self.order(StopOrder { stop: Stop::Release, reply: Some(reply) });
        match (sent, answer.await) {
            (true, Ok(answer)) => answer,
            _ if self.tenure.ended().is_some() => Ok(Release::NotHeld),
            _ => Err(Error::new(ErrorKind::Internal, "release")
                .message("the runtime that kept the lease was shut down")
                .resource(self.tenure.name())
                .effect_unknown()),
        }
    }

    /// Stops renewing and leaves the lease to its TTL, as a crash would.
    pub fn abandon(mut self) {
        self.order(StopOrder { stop: Stop::Abandon, reply: None });
    }

    /// Does the work while the lease is held, then releases it.
    ///
    /// `work` gets the fence and makes a future. It is dropped at the deadline, which is before another
    /// can hold the lease; what it spawned elsewhere it must stop itself when dropped, and code that
    /// does not yield can't be dropped in time. The lease is released only after the work has stopped,
    /// whether it finished, was dropped or panicked. A release that failed is logged: the outcome of
    /// the work stands, and the TTL ends the lease.
    ///
    /// # Cancel safety
    /// The work is dropped, and the lease is released after it.
    pub async fn run<T, F, W>(self, work: F) -> RunOutcome<T>
    where
        F: FnOnce(Fence) -> W + Send,
        W: Future<Output = T> + Send,
        T: Send,
    {
        let fence = self.fence();
        let outcome = {
            let work = async move { work(fence).await };
            let mut work = pin!(AssertUnwindSafe(work).catch_unwind());
            tokio::select! {
                biased;
                () = self.not_held() => None,
                outcome = &mut work => Some(outcome),
            }
        };
        let Some(outcome) = outcome else { return RunOutcome::Lost(self.lost().await) };
        let name = self.name().clone();
        if let Err(error) = self.release().await {
            tracing::warn!(lease = %name, %error, "the lease could not be released after its work");
        }
        match outcome {
            Ok(value) => RunOutcome::Finished(value),
            Err(payload) => RunOutcome::Panicked(payload),
        }
    }

    /// Gives the order and ends the tenure for every reader; false if the task is gone. The order comes first,
    /// so that the task never takes the seal for a deadline that passed.
    fn order(&mut self, order: StopOrder) -> bool {
        let sent = self.stop.take().is_some_and(|stop| stop.send(order).is_ok());
        self.tenure.seal();
        sent
    }
}

impl Deref for LeaseGuard {
    type Target = HeldLease;

    fn deref(&self) -> &HeldLease {
        &self.tenure
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        if self.stop.is_some() {
            self.order(StopOrder::release());
        }
    }
}

impl fmt::Debug for LeaseGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseGuard").field("tenure", &self.tenure).finish_non_exhaustive()
    }
}
