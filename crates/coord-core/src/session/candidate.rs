//! The decisions of a candidate: when to try, what an answer means, when to give up. Pure.

use std::time::Duration;

use super::machine::deadline;
use super::timing::Timing;
use crate::backoff::{BackOff, Jitter, OPERATOR_PAUSE};
use crate::clock::Moment;
use crate::error::{Effect, Error, ErrorKind, Result};
use crate::lease::{Acquire, LeaseEvent};
use crate::types::{AttemptId, Grant, LeaseName, LeaseRecord};
use crate::watch::Watched;

/// How often a candidate that does not wait its turn sends its request, if replies are lost.
const TRIES_MAX: u32 = 3;

/// Whether a candidate waits until the lease is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    WaitsItsTurn,
    TriesOnce,
}

/// What an answer means.
#[derive(Debug)]
pub(super) enum Verdict {
    /// Go on as [`Candidate::try_at`] says.
    GoOn,
    /// The lease is won.
    Won(Grant),
    /// The lease was won, and the answer came too late to use it: release it, and go on with a new
    /// attempt.
    TooLate(Grant),
    /// Another attempt holds it, and the candidate does not wait.
    Held(LeaseRecord),
    /// It can't be had.
    Failed(Error),
    /// It can't be had, and what was granted must be released.
    Refused(Grant, Error),
}

/// One logical acquire.
#[derive(Debug)]
pub(super) struct Candidate {
    lease: LeaseName,
    attempt: AttemptId,
    timing: Timing,
    patience: Patience,
    jitter: Jitter,
    back_off: BackOff,
    tries: u32,
    try_at: Moment,
    /// A request of this attempt may have been granted without an answer.
    maybe_granted: bool,
    /// The store has answered this candidate before, so that it may know better later what it
    /// denies now.
    was_answered: bool,
    /// How often it was denied since.
    denials: u32,
    /// Whether the last event of the watch was a holder of the lease, so that the watch will show the next
    /// change of it.
    is_watched: bool,
    other: Option<Other>,
}

/// What is known of the other that holds the lease.
#[derive(Debug)]
struct Other {
    record: LeaseRecord,
    /// When its last write was seen.
    seen_at: Moment,
    /// Whether the watch ever showed a renewal of it: only then does silence say anything.
    renewals_show: bool,
}

impl Candidate {
    pub(super) fn new(
        lease: LeaseName,
        attempt: AttemptId,
        timing: Timing,
        patience: Patience,
        jitter: Jitter,
        now: Moment,
    ) -> Self {
        Self {
            lease,
            attempt,
            timing,
            patience,
            jitter,
            back_off: BackOff::default(),
            tries: 0,
            try_at: now,
            maybe_granted: false,
            was_answered: false,
            denials: 0,
            is_watched: false,
            other: None,
        }
    }

    /// The id that the next request carries.
    pub(super) fn attempt(&self) -> AttemptId {
        self.attempt
    }

    /// When the next request is due.
    pub(super) fn try_at(&self) -> Moment {
        self.try_at
    }

    /// Whether the store may hold a grant of the present attempt whose reply was lost.
    pub(super) fn maybe_granted(&self) -> bool {
        self.maybe_granted
    }

    /// Whether it waits its turn.
    pub(super) fn waits(&self) -> bool {
        self.patience == Patience::WaitsItsTurn
    }

    /// Goes on as another attempt, after the grant of the last one was given back.
    pub(super) fn begin_again(&mut self, now: Moment, attempt: AttemptId) {
        self.attempt = attempt;
        self.maybe_granted = false;
        self.try_at = now.plus(self.jitter.around(self.timing.retry_pause));
    }

    /// Takes in the answer to a request that was sent at `sent_at`. `fits` says whether the term of a
    /// grant is above all that were seen before.
    pub(super) fn answered(
        &mut self,
        sent_at: Moment,
        now: Moment,
        answer: Result<Acquire>,
        fits: impl FnOnce(&Grant) -> Result<()>,
    ) -> Verdict {
        self.tries += 1;
        if answer.is_ok() {
            (self.was_answered, self.denials) = (true, 0);
        }
        match answer {
            Ok(Acquire::Acquired(grant)) => self.granted(sent_at, now, grant, fits),
            Ok(Acquire::Held(record)) => {
                self.maybe_granted = false;
                self.back_off.reset();
                if self.patience == Patience::TriesOnce {
                    return Verdict::Held(record);
                }
                self.saw(now, record, false);
                self.try_later(now);
                Verdict::GoOn
            }
            Err(error) => self.failed(now, error),
        }
    }

    fn granted(
        &mut self,
        sent_at: Moment,
        now: Moment,
        grant: Grant,
        fits: impl FnOnce(&Grant) -> Result<()>,
    ) -> Verdict {
        self.maybe_granted = false;
        self.back_off.reset();
        if grant.lease != self.lease || grant.holder.attempt != self.attempt {
            let why = format!(
                "an acquire was answered for another one lease={} attempt={}",
                grant.lease, grant.holder.attempt
            );
            // The grant is not ours to release.
            return Verdict::Failed(Error::corrupt("acquire", why).resource(&self.lease));
        }
        if let Err(error) = fits(&grant) {
            return Verdict::Refused(grant, error);
        }
        let until = deadline(sent_at, &grant, &self.timing);
        if until <= sent_at {
            let why = format!(
                "the store granted ttl {}, which the margin {:?} uses up; ask for a shorter margin",
                grant.ttl,
                self.timing.margin(grant.ttl)
            );
            return Verdict::Refused(grant, Error::invalid("acquire", why).resource(&self.lease));
        }
        if now < until {
            return Verdict::Won(grant);
        }
        if self.may_try_again() {
            return Verdict::TooLate(grant);
        }
        let error = Error::unavailable("acquire", "the answer came after the deadline");
        Verdict::Refused(grant, error.resource(&self.lease))
    }

    fn failed(&mut self, now: Moment, error: Error) -> Verdict {
        self.maybe_granted |= error.effect() == Effect::Unknown;
        // A store that has just started may deny what it permits a second later.
        let is_denied = error.kind() == ErrorKind::Denied && self.waits() && self.was_answered;
        if !is_denied && (!error.is_retryable() || !self.may_try_again()) {
            let error = if self.maybe_granted { error.effect_unknown() } else { error };
            return Verdict::Failed(error);
        }
        let retry_every = self.timing.retry_every;
        let pause = match self.patience {
            _ if is_denied => {
                let doubled = retry_every.saturating_mul(1 << self.denials.min(10));
                self.denials += 1;
                self.jitter.around(doubled.min(OPERATOR_PAUSE.max(retry_every)))
            }
            Patience::TriesOnce => self.jitter.around(self.timing.retry_pause),
            Patience::WaitsItsTurn => {
                self.back_off.after(&error, &mut self.jitter).min(retry_every)
            }
        };
        self.try_at = now.plus(pause);
        Verdict::GoOn
    }

    fn may_try_again(&self) -> bool {
        self.waits() || self.tries < TRIES_MAX
    }

    /// Takes in what the watch tells.
    pub(super) fn watched(&mut self, now: Moment, told: &Watched<LeaseEvent>) {
        let was_watched = self.is_watched;
        self.is_watched =
            matches!(told, Watched::Event(LeaseEvent::Changed(_) | LeaseEvent::Snapshot(Some(_))));
        self.was_answered |= !matches!(told, Watched::Disconnected(_));
        match told {
            Watched::Event(LeaseEvent::Vacant | LeaseEvent::Snapshot(None)) => {
                let most = if self.ran_out(now) {
                    self.timing.expiry_jitter()
                } else {
                    Timing::release_jitter()
                };
                self.other = None;
                self.try_within(now, most);
            }
            Watched::Event(LeaseEvent::Changed(record) | LeaseEvent::Snapshot(Some(record))) => {
                // Its own grant, of which it was not told, is had by trying again.
                if record.holder.attempt == self.attempt {
                    return self.try_within(now, Duration::ZERO);
                }
                // Another one was faster: a candidate that was about to try waits again.
                let is_change = matches!(told, Watched::Event(LeaseEvent::Changed(_)));
                let is_new = self.saw(now, record.clone(), is_change);
                if is_new || !was_watched {
                    self.try_later(now);
                }
            }
            // All candidates hear of it at once, as of an expiry.
            Watched::Reconnected => self.try_within(now, self.timing.expiry_jitter()),
            Watched::Disconnected(_) => {
                let most = now.plus(self.jitter.around(self.timing.retry_every));
                self.try_at = self.try_at.min(most);
            }
        }
    }

    /// While the watch tells what becomes of the lease, trying is the net under it, and once a TTL is
    /// enough.
    fn try_later(&mut self, now: Moment) {
        let retry_every = self.timing.retry_every;
        let pause =
            if self.is_watched { retry_every.max(self.timing.ttl.get()) } else { retry_every };
        self.try_at = now.plus(self.jitter.around(pause));
    }

    fn try_within(&mut self, now: Moment, most: Duration) {
        let at = now.plus(self.jitter.up_to(most));
        self.try_at = self.try_at.min(at);
    }

    /// Notes the holder of the lease; true if that is news. Only a change that the watch shows means that it
    /// would show the next one too: what a try finds may be any number of renewals old.
    fn saw(&mut self, now: Moment, record: LeaseRecord, is_change: bool) -> bool {
        match &mut self.other {
            Some(other) if other.record.holder.attempt == record.holder.attempt => {
                let renewed = other.record.revision != record.revision;
                if renewed {
                    other.seen_at = now;
                    other.renewals_show |= is_change;
                }
                other.record = record;
                false
            }
            other => {
                *other = Some(Other { record, seen_at: now, renewals_show: false });
                true
            }
        }
    }

    /// Whether a lease that is vacant now must be taken for expired: its last write, where writes show, is a
    /// whole TTL ago. Else it was released, or that can't be told, and a release is answered quickly.
    fn ran_out(&self, now: Moment) -> bool {
        self.other.as_ref().is_some_and(|other| {
            let ttl = other.record.ttl.get();
            other.renewals_show && now >= other.seen_at.plus(ttl - ttl / 10)
        })
    }
}

#[cfg(test)]
mod tests;
