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
//! stale [fence](JobContext::fence).
//!
//! ```
//! # use coord_core::{Backend, ClusterName, Incarnation, Leases, MemoryBackend, NodeId};
//! use coord_singleton::{Ended, Next, Singleton};
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

/// The examples of the README, as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod builder;
mod driver;
mod machine;
mod metrics;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use coord_core::session::{HeldLease, Leases};
use coord_core::{Error, Fence, LeaseName, Moment, Result};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use self::builder::SingletonBuilder;

/// What a job wants when it ends by itself.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Next {
    /// It is done: the lease is given back, and this node does not stand for it any more. Another node
    /// that waits runs its own; what may be done only once is to be remembered where the fence is checked.
    Done,
    /// It wants to run again: the lease is released, and this node is a candidate again after the restart
    /// pause, so that another node may be faster.
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

/// The state of a singleton on this node.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum State {
    /// It waits for the lease.
    Waiting,
    /// The job runs under this fence.
    Running(Fence),
    /// The job was told to stop, and the lease is still this node's.
    Stopping(Fence),
    /// It is a candidate again after this pause; with the failure, unless the job asked for it.
    Resting(Duration, Option<Failure>),
    /// It is over.
    Ended(Ended),
}

/// What a job has in its hands while it runs. Clones are the same.
#[derive(Clone, Debug)]
pub struct JobContext {
    tenure: HeldLease,
    cancel: CancellationToken,
}

impl JobContext {
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
    /// In a cluster, `Cluster::singleton` ends it with the node.
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

    /// Its state on this node, to look at or to follow.
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
