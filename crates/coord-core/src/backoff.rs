//! Pauses between attempts: exponential back-off and jitter, from a seeded source so that tests repeat.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::error::Error;

/// The longest pause after an error that time may heal.
pub(crate) const PAUSE_MAX: Duration = Duration::from_secs(5);
/// The pause after an error that an operator has to heal.
pub(crate) const OPERATOR_PAUSE: Duration = Duration::from_secs(60);
const PAUSE_MIN: Duration = Duration::from_millis(100);

/// Random durations.
#[derive(Debug)]
pub(crate) struct Jitter(StdRng);

impl Jitter {
    /// Seeded by `seed`, or by the operating system.
    pub(crate) fn new(seed: Option<u64>) -> Self {
        Self(seed.map_or_else(crate::random::source, StdRng::seed_from_u64))
    }

    /// A duration from zero up to and including `most`.
    pub(crate) fn up_to(&mut self, most: Duration) -> Duration {
        let most = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(self.0.random_range(0..=most))
    }

    /// `middle`, at most a tenth shorter or longer.
    pub(crate) fn around(&mut self, middle: Duration) -> Duration {
        middle - middle / 10 + self.up_to(middle / 5)
    }

    /// A seed for another source.
    pub(crate) fn seed(&mut self) -> u64 {
        self.0.random()
    }
}

/// Pauses that double from 100 ms to 5 s, each shortened at random by up to a half.
#[derive(Debug, Default)]
pub(crate) struct BackOff {
    failures: u32,
}

impl BackOff {
    /// The pause after one more failure with this error.
    pub(crate) fn after(&mut self, error: &Error, jitter: &mut Jitter) -> Duration {
        let doubled = PAUSE_MIN.saturating_mul(1 << self.failures.min(10));
        self.failures = self.failures.saturating_add(1);
        if !error.is_retryable() {
            return OPERATOR_PAUSE + jitter.up_to(OPERATOR_PAUSE / 10);
        }
        let pause = doubled.min(PAUSE_MAX);
        pause - jitter.up_to(pause / 2)
    }

    /// Starts again from the shortest pause.
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn pauses_double_up_to_a_bound_and_reset() {
        let (mut back_off, mut jitter) = (BackOff::default(), Jitter::new(Some(1)));
        let error = Error::unavailable("watch", "away");
        let mut bound = PAUSE_MIN;
        for _ in 0..40 {
            let pause = back_off.after(&error, &mut jitter);
            assert!(pause >= bound / 2 && pause <= bound, "{pause:?} of {bound:?}");
            bound = (bound * 2).min(PAUSE_MAX);
        }
        back_off.reset();
        assert!(back_off.after(&error, &mut jitter) <= PAUSE_MIN);
        let denied = Error::new(ErrorKind::Denied, "watch");
        assert!(back_off.after(&denied, &mut jitter) >= OPERATOR_PAUSE);
    }

    #[test]
    fn jitter_stays_within_a_tenth_and_repeats_by_seed() {
        let (mut one, mut two) = (Jitter::new(Some(7)), Jitter::new(Some(7)));
        let middle = Duration::from_secs(10);
        for _ in 0..1_000 {
            let around = one.around(middle);
            assert!((Duration::from_secs(9)..=Duration::from_secs(11)).contains(&around));
            assert_eq!(around, two.around(middle));
        }
        assert_eq!(one.up_to(Duration::ZERO), Duration::ZERO);
    }
}
