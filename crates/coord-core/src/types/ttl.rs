//! How long a grant or a registration lasts.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A time to live, between 1 s and 24 h.
///
/// A store may count in coarser steps: it then rounds up and reports what it granted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct Ttl(Duration);

impl Ttl {
    /// The shortest, 1 s.
    pub const MIN: Self = Self(Duration::from_secs(1));
    /// The longest, 24 h.
    pub const MAX: Self = Self(Duration::from_secs(24 * 60 * 60));

    /// A TTL of this duration, rounded up to whole milliseconds.
    ///
    /// # Errors
    /// `Invalid` below 1 s or above 24 h.
    pub fn new(duration: Duration) -> Result<Self> {
        let whole = Duration::from_millis(1);
        let rounded = round_up(duration, whole);
        if rounded < Self::MIN.0 || rounded > Self::MAX.0 {
            let why = format!("ttl {duration:?} is out of range; it is 1 s to 24 h");
            return Err(Error::invalid("parse", why));
        }
        Ok(Self(rounded))
    }

    /// A TTL of whole seconds.
    ///
    /// # Errors
    /// `Invalid` for 0 and above 86,400.
    pub fn from_secs(seconds: u64) -> Result<Self> {
        Self::new(Duration::from_secs(seconds))
    }

    /// As a duration.
    #[must_use]
    pub const fn get(self) -> Duration {
        self.0
    }

    /// Rounded up to a store's step, which stays within 24 h.
    #[must_use]
    pub fn round_up_to(self, step: Duration) -> Self {
        Self(round_up(self.0, step).min(Self::MAX.0))
    }
}

/// The smallest multiple of `step` that is not below `duration`; a zero step rounds nothing.
fn round_up(duration: Duration, step: Duration) -> Duration {
    if step.is_zero() {
        return duration;
    }
    let (nanos, step) = (duration.as_nanos(), step.as_nanos());
    let rounded = nanos.div_ceil(step).saturating_mul(step);
    Duration::from_nanos(u64::try_from(rounded).unwrap_or(u64::MAX))
}

impl TryFrom<u64> for Ttl {
    type Error = Error;
    fn try_from(millis: u64) -> Result<Self> {
        Self::new(Duration::from_millis(millis))
    }
}

impl From<Ttl> for u64 {
    fn from(ttl: Ttl) -> Self {
        Self::try_from(ttl.0.as_millis()).unwrap_or(Self::MAX)
    }
}

impl TryFrom<Duration> for Ttl {
    type Error = Error;
    fn try_from(duration: Duration) -> Result<Self> {
        Self::new(duration)
    }
}

impl From<Ttl> for Duration {
    fn from(ttl: Ttl) -> Self {
        ttl.0
    }
}

impl fmt::Display for Ttl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Debug for Ttl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ttl_is_in_range_and_rounds_up() {
        assert!(Ttl::new(Duration::from_millis(999)).is_err());
        assert!(Ttl::new(Duration::from_secs(86_401)).is_err());
        assert!(Ttl::new(Duration::MAX).is_err());
        let ttl = Ttl::new(Duration::from_millis(1_500)).expect("in range");
        assert_eq!(ttl.round_up_to(Duration::from_secs(1)).get(), Duration::from_secs(2));
        assert_eq!(ttl.round_up_to(Duration::ZERO), ttl);
        assert_eq!(Ttl::MAX.round_up_to(Duration::from_secs(7)), Ttl::MAX);
        let odd = Ttl::new(Duration::from_nanos(1_000_000_001)).expect("in range");
        assert_eq!(odd.get(), Duration::from_millis(1_001));
    }
}
