//! A node's part that hosts shards.
//!
//! The decisions are in [`hosting`]; [`driver`] performs them through a service's [`Host`].

mod driver;
mod hosting;
mod sampler;

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use async_trait::async_trait;
use coord_core::{Epoch, Fence, Incarnation, Moment, ShardId, TableName, TableUid, sleep_until};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

pub(crate) use self::driver::run;
#[cfg(test)]
pub(crate) use self::hosting::{Hosting, Order, Times};
use crate::gate::{Gate, Permit};

/// Why a host can't start a shard. Any error fits, by `?` too.
pub type HostError = Box<dyn Error + Send + Sync>;

/// What a service does when shards come and go. Both calls for one shard never overlap.
///
/// A shard counts as running from the call of `start` until `stop` has returned, and beyond that for as long
/// as any of its code goes on: `start`, `stop`, [`load`](Self::load), the handling of a message, and what runs
/// under [`ShardFence::run`]. They are dropped at the registration's deadline if they still run then; what
/// they have set off by themselves has to run under [`ShardFence::run`], or to look at
/// [`ShardFence::is_current`] before each of its effects. What does not give way to the runtime can't be
/// dropped: nobody else is told that it has stopped before it returns, and the setting `exit_at_deadline` ends
/// the process.
#[async_trait]
pub trait Host: fmt::Debug + Send + Sync + 'static {
    /// Begins to host a shard, and returns when it is ready. The fence is good for as long as this node
    /// hosts the shard.
    ///
    /// One that takes longer than the setting `handoff_timeout` goes on, and is told as the event
    /// [`ShardsFaulty`](crate::EventKind::ShardsFaulty) and in [`Status::faults`](crate::Status::faults)
    /// until it has ended.
    ///
    /// # Errors
    /// Whatever keeps the shard from being hosted now. `stop` follows, the error is told as the event
    /// [`ShardFailed`](crate::EventKind::ShardFailed), and this node, which stays the shard's owner, tries
    /// again after 1 s, doubling up to 1 min. Messages to the shard wait. A panic is told and tried again
    /// alike, but `stop` does not follow.
    ///
    /// # Cancel safety
    /// It is dropped when the shard has to go before it was ready; `stop` follows.
    async fn start(&self, shard: ShardId, fence: ShardFence) -> Result<(), HostError>;

    /// Ends hosting a shard, and returns when nothing of it runs any more: from then on another node may
    /// host it. One that takes longer than the setting `handoff_timeout` is told as a start is, and goes on:
    /// the shard has no other host before it returns.
    ///
    /// # Cancel safety
    /// It is dropped at the registration's deadline, which is told, too.
    async fn stop(&self, shard: ShardId);

    /// How busy a running shard is, in any unit that is the same on all nodes; none if that is not
    /// known. It is asked of each running shard once a minute, where the table's strategy
    /// [goes by loads](coord_placement::PlacementStrategy::wants_loads), so it only reads what was
    /// counted. The registration names the heaviest ([`SHARD_LOADS_MAX`](coord_core::SHARD_LOADS_MAX))
    /// and tells the mean of the others.
    fn load(&self, shard: ShardId) -> Option<f64> {
        let _ = shard;
        None
    }
}

/// What a host shows to whatever it writes to: refuse one that does not [pass](Self::passes) the highest
/// that was seen of its shard.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardToken {
    /// Which table.
    pub table: TableName,
    /// Which life of it.
    pub uid: TableUid,
    /// Which shard.
    pub shard: ShardId,
    /// Rises at every change of the shard's owners.
    pub epoch: Epoch,
    /// The fence of the leader whose map said so.
    pub fence: Fence,
}

impl ShardToken {
    /// Whether this one is at least as new as the highest that was seen of the same shard.
    #[must_use]
    pub fn passes(&self, highest: &Self) -> bool {
        if (&self.table, self.shard) != (&highest.table, highest.shard) {
            return false;
        }
        if self.uid == highest.uid {
            return self.epoch >= highest.epoch;
        }
        self.fence.term > highest.fence.term
    }
}

/// The right to host one shard, as any part of the service may look at it. Clones are the same right.
#[derive(Clone)]
pub struct ShardFence(Arc<Inner>);

struct Inner {
    gate: Arc<Gate>,
    run: Incarnation,
    /// Held by all that works for the shard.
    stay: Weak<Permit>,
    token: Mutex<ShardToken>,
    ended: watch::Sender<bool>,
}

impl ShardFence {
    pub(crate) fn new(
        gate: Arc<Gate>,
        run: Incarnation,
        stay: &Arc<Permit>,
        token: ShardToken,
    ) -> Self {
        let (token, ended) = (Mutex::new(token), watch::Sender::new(false));
        Self(Arc::new(Inner { gate, run, stay: Arc::downgrade(stay), token, ended }))
    }

    /// What a piece of work for the shard holds until nothing of it is left; none where it must not begin.
    pub(crate) fn stay(&self) -> Option<Arc<Permit>> {
        // In this order: whoever finds that nobody holds it knows that nobody will.
        let stay = self.0.stay.upgrade()?;
        self.is_current().then_some(stay)
    }

    /// Whether this node may act for the shard now: the host has not stopped it, and the clock has not
    /// reached the registration's deadline. Once false, it stays false. No I/O, and true to the clock
    /// even if no task could run.
    #[must_use]
    pub fn is_current(&self) -> bool {
        !*self.0.ended.borrow() && self.0.gate.is_current(self.0.run)
    }

    /// What to show to whatever is written to; none once it is not current any more.
    #[must_use]
    pub fn token(&self) -> Option<ShardToken> {
        let token = self.0.token.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.is_current().then_some(token)
    }

    /// Until when this node may act, unless a renewal of its registration moves it; none once it is not
    /// current any more.
    #[must_use]
    pub fn deadline(&self) -> Option<Moment> {
        self.0.gate.deadline(self.0.run).filter(|_| self.is_current())
    }

    /// Waits until it is not current any more.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn ended(&self) {
        let mut ended = self.0.ended.subscribe();
        let mut gate = self.0.gate.subscribe();
        while let Some(deadline) = self.deadline() {
            tokio::select! {
                biased;
                _ = ended.wait_for(|ended| *ended) => return,
                _ = gate.changed() => {}
                () = sleep_until(self.0.gate.clock(), deadline) => {}
            }
        }
    }

    /// Does this work while the fence is current, and drops it then; what it returned, if it came to its
    /// end. The shard counts as running here until the work has returned or is dropped: a future of this
    /// that was polled once and is kept without being polled again keeps the shard.
    ///
    /// # Cancel safety
    /// The work is dropped.
    pub async fn run<T>(&self, work: impl Future<Output = T> + Send) -> Option<T> {
        let _stay = self.stay()?;
        // Taken in after the stay, so that it is dropped before it.
        let mut work = pin!(work);
        tokio::select! {
            biased;
            () = self.ended() => None,
            done = &mut work => Some(done),
        }
    }

    /// The run of this process that hosts the shard.
    pub(crate) fn run_of(&self) -> Incarnation {
        self.0.run
    }

    fn end(&self) {
        self.0.ended.send_replace(true);
    }

    fn renew(&self, epoch: Epoch, fence: Fence) {
        let mut token = self.0.token.lock().unwrap_or_else(PoisonError::into_inner);
        (token.epoch, token.fence) = (epoch, fence);
    }
}

impl fmt::Debug for ShardFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.0.token.lock().unwrap_or_else(PoisonError::into_inner).clone();
        f.debug_struct("ShardFence")
            .field("token", &token)
            .field("current", &self.is_current())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use coord_core::{AttemptId, LeaseName, Origin, Term};

    use super::*;

    fn token(uid: u128, epoch: u64, term: u64) -> ShardToken {
        let attempt = AttemptId::from_u128(u128::from(term));
        let origin = Origin::new("memory:1/c");
        ShardToken {
            table: TableName::new("orders").expect("name"),
            uid: TableUid::from_u128(uid),
            shard: ShardId::new(3),
            epoch: Epoch::new(epoch),
            fence: Fence::new(LeaseName::leader(), Term::from_u64(term), attempt, origin),
        }
    }

    #[test]
    fn the_epoch_decides_within_one_life_and_the_term_between_two() {
        let now = token(1, 7, 4);
        assert!(now.passes(&now) && token(1, 8, 4).passes(&now));
        assert!(token(1, 7, 5).passes(&now), "its host goes on under another leader");
        assert!(!token(1, 6, 9).passes(&now));
        assert!(token(2, 1, 5).passes(&now));
        assert!(!token(2, 9, 4).passes(&now) && !token(2, 9, 3).passes(&now));
        let mut other = now.clone();
        other.shard = ShardId::new(4);
        assert!(!other.passes(&now));
    }
}
