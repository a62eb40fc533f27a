//! The world's time, and the clocks that processes read it from.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coord_cluster::ShardFence;
use coord_core::{Clock, Moment};
use tokio::time::Instant;

/// The world goes on by this much at a time: every process runs for so long before the next one does.
pub const TICK: Duration = Duration::from_millis(25);

/// The time of one world; clones tell the same.
#[derive(Clone, Debug, Default)]
pub struct WorldTime(Arc<State>);

#[derive(Debug, Default)]
struct State {
    ticks: AtomicU64,
    /// When the process that runs now began its tick, by its own runtime.
    began: Mutex<Option<Instant>>,
}

impl WorldTime {
    /// How many ticks have passed.
    #[must_use]
    pub fn ticks(&self) -> u64 {
        self.0.ticks.load(Ordering::Relaxed)
    }

    /// How long the world has existed, to the instant of the process that runs now.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        let began = *self.0.began.lock().unwrap_or_else(PoisonError::into_inner);
        let within = began.map_or(Duration::ZERO, |began| began.elapsed());
        at(self.ticks()) + within
    }

    pub(crate) fn advance(&self) {
        self.0.ticks.fetch_add(1, Ordering::Relaxed);
    }

    /// A process begins its tick, inside its runtime; none ends it.
    pub(crate) fn enter(&self, began: Option<Instant>) {
        *self.0.began.lock().unwrap_or_else(PoisonError::into_inner) = began;
    }
}

impl Clock for WorldTime {
    fn now(&self) -> Moment {
        Moment::from_origin(self.elapsed())
    }
}

/// So many ticks as a duration.
#[must_use]
pub fn at(ticks: u64) -> Duration {
    TICK.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX))
}

/// So long as ticks, rounded up.
#[must_use]
pub fn ticks(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(TICK.as_nanos())).unwrap_or(u64::MAX)
}

/// One process's clock: it began somewhere else and does not run at the world's rate.
#[derive(Debug)]
pub struct ProcessClock {
    world: WorldTime,
    offset: Duration,
    /// In thousandths of the world's rate.
    rate: u32,
}

impl ProcessClock {
    /// A clock that shows `offset` at the world's beginning.
    #[must_use]
    pub fn new(world: WorldTime, offset: Duration, rate: u32) -> Self {
        Self { world, offset, rate }
    }
}

impl ProcessClock {
    /// Until when a fence is current, in the world's time, if nothing moves that; none once it is not.
    #[must_use]
    pub fn until(&self, fence: &ShardFence) -> Option<Duration> {
        let left = fence.deadline()?.since(self.now());
        // A tick before, so that rounding here makes no node look late.
        Some((self.world.elapsed() + left * 1000 / self.rate).saturating_sub(TICK))
    }
}

impl Clock for ProcessClock {
    fn now(&self) -> Moment {
        Moment::from_origin(self.offset + self.world.elapsed() * self.rate / 1000)
    }
}
