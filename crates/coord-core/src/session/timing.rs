//! How long everything takes, checked as a whole.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::types::Ttl;

const MARGIN_MIN: Duration = Duration::from_millis(100);
const INTERVAL_MIN: Duration = Duration::from_millis(10);
const REQUEST_TIMEOUT_MAX: Duration = Duration::from_secs(5);
const RETRY_EVERY_MAX: Duration = Duration::from_secs(5);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);
const RELEASE_JITTER: Duration = Duration::from_millis(30);
const EXPIRY_JITTER_MAX: Duration = Duration::from_millis(500);

/// How long before a TTL ends its holder stops, unless another margin is chosen: a tenth of it, and at least
/// 100 ms.
#[must_use]
pub fn default_margin(ttl: Duration) -> Duration {
    (ttl / 10).max(MARGIN_MIN)
}

/// What a caller asked for; what is absent follows from the TTL.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) ttl: Duration,
    pub(super) margin: Option<Duration>,
    pub(super) renew_every: Option<Duration>,
    pub(super) request_timeout: Option<Duration>,
    pub(super) retry_every: Option<Duration>,
}

/// Times that fit together.
#[derive(Clone, Debug)]
pub(super) struct Timing {
    pub(super) ttl: Ttl,
    margin: Option<Duration>,
    /// The time from one renewal to the next, before jitter.
    pub(super) renew_every: Duration,
    /// How long one request may take.
    pub(super) request_timeout: Duration,
    /// How often a candidate tries where no watch shows it the holder, before jitter.
    pub(super) retry_every: Duration,
    /// The pause after a request that failed.
    pub(super) retry_pause: Duration,
}

impl Timing {
    /// Checks the times together.
    ///
    /// # Errors
    /// `Invalid`, naming every contradiction.
    pub(super) fn new(asked: &Asked) -> Result<Self> {
        let ttl = Ttl::new(asked.ttl)?;
        let whole = ttl.get();
        let timing = Self {
            ttl,
            margin: asked.margin,
            renew_every: asked.renew_every.unwrap_or(whole / 3),
            request_timeout: asked
                .request_timeout
                .unwrap_or_else(|| (whole / 5).min(REQUEST_TIMEOUT_MAX)),
            retry_every: asked.retry_every.unwrap_or_else(|| (whole / 5).min(RETRY_EVERY_MAX)),
            retry_pause: (whole / 30).min(RETRY_PAUSE_MAX),
        };
        let wrong = timing.contradictions();
        if wrong.is_empty() {
            return Ok(timing);
        }
        Err(Error::invalid("configure lease", wrong.join("; ")))
    }

    fn contradictions(&self) -> Vec<String> {
        let Self { renew_every, request_timeout, retry_every, retry_pause, .. } = self;
        let (ttl, margin) = (self.ttl.get(), self.margin(self.ttl));
        let mut wrong = Vec::new();
        if margin < MARGIN_MIN || margin >= ttl {
            wrong
                .push(format!("margin {margin:?} is not from {MARGIN_MIN:?} to below ttl {ttl:?}"));
        }
        for (name, interval) in [
            ("renew_every", renew_every),
            ("request_timeout", request_timeout),
            ("retry_every", retry_every),
        ] {
            if *interval < INTERVAL_MIN {
                wrong.push(format!("{name} {interval:?} is below {INTERVAL_MIN:?}"));
            }
        }
        if *request_timeout >= ttl / 3 {
            wrong.push(format!("request_timeout {request_timeout:?} is not below ttl/3 {ttl:?}/3"));
        }
        if request_timeout.saturating_add(*retry_pause).saturating_add(margin) >= ttl {
            wrong.push(format!(
                "request_timeout {request_timeout:?} + pause {retry_pause:?} + margin {margin:?} \
                 is not below ttl {ttl:?}"
            ));
        }
        // A renewal may come a tenth late, and a second one has to fit in when the first one hangs.
        let second = renew_every
            .saturating_add(*renew_every / 10)
            .saturating_add(*request_timeout)
            .saturating_add(*retry_pause);
        if second >= ttl.saturating_sub(margin) {
            wrong.push(format!(
                "1.1 × renew_every {renew_every:?} + request_timeout {request_timeout:?} + pause \
                 {retry_pause:?} is not below ttl {ttl:?} - margin {margin:?}: a renewal that \
                 hangs leaves no time for a second one"
            ));
        }
        wrong
    }

    /// How long before the store may end a grant of this TTL its holder stops: a tenth of it and at
    /// least 100 ms, unless the caller chose another margin.
    pub(super) fn margin(&self, granted: Ttl) -> Duration {
        self.margin.unwrap_or_else(|| default_margin(granted.get()))
    }

    /// These times for a grant whose TTL differs from the one that was asked for.
    pub(super) fn for_granted(&self, granted: Ttl) -> Self {
        if granted == self.ttl {
            return self.clone();
        }
        let ttl = granted.get();
        Self {
            ttl: granted,
            margin: self.margin,
            renew_every: self.renew_every.min(ttl / 3),
            request_timeout: self.request_timeout.min(ttl / 5),
            retry_every: self.retry_every,
            retry_pause: self.retry_pause.min(ttl / 30),
        }
    }

    /// The most that a candidate waits once it heard of a release.
    pub(super) fn release_jitter() -> Duration {
        RELEASE_JITTER
    }

    /// The most that a candidate waits once it heard of an expiry.
    pub(super) fn expiry_jitter(&self) -> Duration {
        (self.ttl.get() / 10).min(EXPIRY_JITTER_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(ttl: Duration) -> Asked {
        let (margin, renew_every, request_timeout, retry_every) = (None, None, None, None);
        Asked { ttl, margin, renew_every, request_timeout, retry_every }
    }

    #[test]
    fn the_defaults_fit_for_every_ttl() {
        for seconds in [1, 2, 10, 30, 3_600, 86_400] {
            let ttl = Duration::from_secs(seconds);
            let timing = Timing::new(&asked(ttl)).expect("defaults");
            assert_eq!(timing.renew_every, ttl / 3);
            assert!(timing.margin(timing.ttl) >= (ttl / 10).max(MARGIN_MIN));
        }
        let leader = Timing::new(&asked(Duration::from_secs(10))).expect("defaults");
        assert_eq!(leader.retry_every, Duration::from_secs(2));
    }

    #[test]
    fn one_error_names_every_contradiction() {
        let mut bad = asked(Duration::from_secs(10));
        bad.margin = Some(Duration::from_millis(1));
        bad.request_timeout = Some(Duration::from_secs(4));
        bad.renew_every = Some(Duration::from_secs(9));
        bad.retry_every = Some(Duration::ZERO);
        let error = Timing::new(&bad).expect_err("bad").to_string();
        for name in ["margin 1ms", "request_timeout 4s", "renew_every 9s", "retry_every 0ns"] {
            assert!(error.contains(name), "{error}");
        }
        bad.renew_every = Some(Duration::MAX);
        assert!(Timing::new(&bad).is_err());
        assert!(Timing::new(&asked(Duration::from_millis(10))).is_err());
    }

    #[test]
    fn each_bound_is_told_where_it_is_reached_and_only_there() {
        let ns = Duration::from_nanos(1);
        let ttl = Duration::from_secs(10);
        let told =
            |asked: Asked| Timing::new(&asked).err().map_or_else(String::new, |e| e.to_string());
        let least = |interval| Asked {
            margin: Some(MARGIN_MIN),
            renew_every: Some(interval),
            request_timeout: Some(interval),
            retry_every: Some(interval),
            ttl,
        };
        assert_eq!(told(least(INTERVAL_MIN)), "");
        for name in ["renew_every", "request_timeout", "retry_every"] {
            assert!(told(least(INTERVAL_MIN - ns)).contains(&format!("{name} 9.99")));
        }
        let timeout = |timeout| {
            let renew_every = Some(Duration::from_secs(1));
            told(Asked { request_timeout: Some(timeout), renew_every, ..asked(ttl) })
        };
        assert!(timeout(ttl / 3).contains("is not below ttl/3"));
        assert_eq!(timeout(ttl / 3 - ns), "");
        let margin = |margin| told(Asked { margin: Some(margin), ..asked(ttl) });
        assert!(margin(MARGIN_MIN - ns).contains("is not from"));
        assert!(margin(ttl).contains("is not from"));
        let most = ttl - ttl / 5 - ttl / 30;
        assert!(margin(most).contains("is not below ttl 10s;"), "{}", margin(most));
        assert!(!margin(most - ns).contains("is not below ttl 10s;"));
        // With a tenth of it, this is what a timeout of 2 s, a pause and the margin leave.
        let renew =
            |nanos| told(Asked { renew_every: Some(Duration::from_nanos(nanos)), ..asked(ttl) });
        assert!(renew(6_060_606_061).contains("no time for a second one"));
        assert_eq!(renew(6_060_606_060), "");
    }

    #[test]
    fn what_is_granted_shortens_each_interval_and_lengthens_none() {
        let (secs, millis) = (Duration::from_secs, Duration::from_millis);
        let timing = Timing::new(&asked(secs(30))).expect("defaults");
        let times = |timing: &Timing| {
            let Timing { ttl, renew_every, request_timeout, retry_every, retry_pause, .. } = timing;
            [ttl.get(), *renew_every, *request_timeout, *retry_every, *retry_pause]
        };
        assert_eq!(times(&timing), [secs(30), secs(10), secs(5), secs(5), secs(1)]);
        let short = timing.for_granted(Ttl::new(secs(3)).expect("in range"));
        assert_eq!(times(&short), [secs(3), secs(1), millis(600), secs(5), millis(100)]);
        let long = timing.for_granted(Ttl::new(secs(60)).expect("in range"));
        assert_eq!(times(&long), [secs(60), secs(10), secs(5), secs(5), secs(1)]);
    }

    #[test]
    fn candidates_spread_over_a_tenth_of_the_ttl_at_most_and_less_after_a_release() {
        let jitter = |seconds| {
            let timing = Timing::new(&asked(Duration::from_secs(seconds))).expect("defaults");
            timing.expiry_jitter()
        };
        assert_eq!(jitter(1), Duration::from_millis(100));
        assert_eq!(jitter(60), EXPIRY_JITTER_MAX);
        assert_eq!(Timing::release_jitter(), RELEASE_JITTER);
    }
}
