//! The clock that deadlines are read from.

use std::fmt::Debug;
use std::time::Duration;

/// An instant on a [`Clock`], counted from an arbitrary origin. Two clocks have nothing in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(Duration);

impl Moment {
    /// The moment this long after the clock's origin.
    #[must_use]
    pub const fn from_origin(elapsed: Duration) -> Self {
        Self(elapsed)
    }

    /// How long after the clock's origin this is.
    #[must_use]
    pub const fn since_origin(self) -> Duration {
        self.0
    }

    /// How long after `earlier` this is; zero if it is not after it.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// This much later.
    #[must_use]
    pub fn plus(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }

    /// This much earlier, at the origin at the earliest.
    #[must_use]
    pub fn minus(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(duration))
    }
}

/// Where deadlines are read from: monotonic, and going on while the machine is suspended.
pub trait Clock: Debug + Send + Sync + 'static {
    /// Now. Never goes back.
    fn now(&self) -> Moment;
}

/// A sleep is cut into pieces of this length: the runtime's timers stand still while the machine is
/// suspended, and the clock does not, so that what ran out meanwhile is noticed this soon.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// Sleeps until the clock shows `until`. After the machine was suspended it is up to a second late.
///
/// # Cancel safety
/// Nothing is lost.
pub async fn sleep_until(clock: &dyn Clock, until: Moment) {
    loop {
        let left = until.since(clock.now());
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(SLEEP_MAX)).await;
    }
}

/// The machine's boot clock: `CLOCK_BOOTTIME` on Linux, which counts suspended time too. Elsewhere the
/// standard library's monotonic clock, which may not.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct BootClock;

impl BootClock {
    /// The boot clock.
    #[must_use]
    pub const fn new() -> Self {
        Self
    }
}

impl Clock for BootClock {
    #[cfg(target_os = "linux")]
    fn now(&self) -> Moment {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let nanos = u32::try_from(time.tv_nsec).unwrap_or(0);
        Moment(Duration::new(seconds, nanos))
    }

    #[cfg(not(target_os = "linux"))]
    #[expect(clippy::disallowed_methods, reason = "this is the place that wraps it")]
    fn now(&self) -> Moment {
        use std::sync::OnceLock;
        use std::time::Instant;
        static ORIGIN: OnceLock<Instant> = OnceLock::new();
        Moment(ORIGIN.get_or_init(Instant::now).elapsed())
    }
}

/// The runtime's clock, which stands still while a test pauses it.
#[derive(Clone, Copy, Debug)]
pub struct TokioClock(tokio::time::Instant);

impl TokioClock {
    /// A clock whose origin is now.
    #[must_use]
    pub fn new() -> Self {
        Self(tokio::time::Instant::now())
    }
}

impl Default for TokioClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for TokioClock {
    fn now(&self) -> Moment {
        Moment(self.0.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_boot_clock_goes_on() {
        let clock = BootClock::new();
        let first = clock.now();
        assert!(clock.now() >= first);
    }

    #[tokio::test(start_paused = true)]
    async fn the_tokio_clock_can_be_moved() {
        let clock = TokioClock::new();
        let start = clock.now();
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(clock.now().since(start), Duration::from_secs(5));
    }
}
