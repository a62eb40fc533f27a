//! The decisions of a holder: when to renew, when the grant is lost, when to release. Pure.

use std::sync::Arc;

use super::guard::{Lost, Stop};
use super::timing::Timing;
use crate::backoff::Jitter;
use crate::clock::Moment;
use crate::error::{Effect, Error, Result};
use crate::lease::{Release, Renew};
use crate::types::Grant;

/// How often a release is tried.
const RELEASE_TRIES: u32 = 3;

/// What the driver does next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Nothing until then, unless it is told to stop.
    Wait(Moment),
    /// Send a renewal, and count it as failed when there is no answer by then.
    Renew(Moment),
    /// Send a release, and count it as failed when there is no answer by then.
    Release(Moment),
    /// Nothing any more.
    Finish,
}

/// One tenure, from the grant to its end.
#[derive(Debug)]
pub(super) struct Holding {
    timing: Timing,
    jitter: Jitter,
    grant: Grant,
    deadline: Moment,
    /// When the last request was sent that may have extended the grant: the store ends the grant a TTL
    /// after this at the latest.
    last_sent: Moment,
    phase: Phase,
    last_error: Option<Arc<Error>>,
    end: Option<Lost>,
    /// A release may have been done without an answer.
    maybe_released: bool,
    released: Option<Result<Release>>,
}

#[derive(Debug)]
enum Phase {
    /// Held; the next renewal is due then.
    Held { renew_at: Moment },
    /// Held, with a renewal on its way.
    Renewing { sent_at: Moment },
    /// Lost by time: what the store still has is released when the holder lets go.
    Lapsed,
    /// Given up; a release is due then.
    Releasing { at: Moment, tries_left: u32 },
    /// Over.
    Over,
}

/// The local instant after which the holder of a grant must not act.
pub(super) fn deadline(sent_at: Moment, grant: &Grant, timing: &Timing) -> Moment {
    sent_at.plus(grant.ttl.get()).minus(timing.margin(grant.ttl))
}

impl Holding {
    /// A tenure whose acquiring request was sent at `sent_at`.
    pub(super) fn new(grant: Grant, sent_at: Moment, asked: &Timing, mut jitter: Jitter) -> Self {
        let timing = asked.for_granted(grant.ttl);
        let renew_at = sent_at.plus(jitter.around(timing.renew_every));
        Self {
            deadline: deadline(sent_at, &grant, &timing),
            last_sent: sent_at,
            phase: Phase::Held { renew_at },
            last_error: None,
            end: None,
            maybe_released: false,
            released: None,
            timing,
            jitter,
            grant,
        }
    }

    /// The grant as the store answered last.
    pub(super) fn grant(&self) -> &Grant {
        &self.grant
    }

    /// Until when the holder may act.
    pub(super) fn deadline(&self) -> Moment {
        self.deadline
    }

    /// How the tenure ended, told once.
    pub(super) fn take_end(&mut self) -> Option<Lost> {
        self.end.take()
    }

    /// What came of the release, told once, when there is nothing more to do.
    pub(super) fn take_released(&mut self) -> Result<Release> {
        self.released.take().unwrap_or(Ok(Release::NotHeld))
    }

    /// What to do at this moment.
    pub(super) fn next(&mut self, now: Moment) -> Action {
        match self.phase {
            Phase::Held { .. } | Phase::Renewing { .. } if now >= self.deadline => {
                self.lapse();
                self.next(now)
            }
            Phase::Held { renew_at } if now >= renew_at => {
                self.phase = Phase::Renewing { sent_at: now };
                self.last_sent = now;
                Action::Renew(now.plus(self.timing.request_timeout).min(self.deadline))
            }
            Phase::Held { renew_at } => Action::Wait(renew_at.min(self.deadline)),
            // The driver answers a renewal before it asks again.
            Phase::Renewing { .. } => Action::Wait(self.deadline),
            Phase::Lapsed | Phase::Releasing { .. } if now >= self.store_ends() => {
                self.phase = Phase::Over;
                Action::Finish
            }
            Phase::Lapsed => Action::Wait(self.store_ends()),
            Phase::Releasing { at, .. } if now < at => Action::Wait(at),
            Phase::Releasing { .. } => {
                Action::Release(now.plus(self.timing.request_timeout).min(self.store_ends()))
            }
            Phase::Over => Action::Finish,
        }
    }

    /// Takes in what came of the renewal.
    pub(super) fn renewed(&mut self, now: Moment, answer: Result<Renew>) {
        let Phase::Renewing { sent_at } = self.phase else { return };
        if now >= self.deadline {
            self.last_error = answer.err().map(Arc::new).or(self.last_error.take());
            return self.lapse();
        }
        match answer {
            Ok(Renew::Renewed(grant)) if !self.is_same(&grant) => {
                let why = format!(
                    "a renewal was answered for another grant term={} instead_of={}",
                    grant.term, self.grant.term
                );
                let error = Error::corrupt("renew", why).resource(&self.grant.lease);
                self.finish(Lost::Failed(Arc::new(error)));
            }
            Ok(Renew::Renewed(grant)) => {
                self.timing = self.timing.for_granted(grant.ttl);
                self.deadline = deadline(sent_at, &grant, &self.timing);
                self.grant = grant;
                self.last_error = None;
                let renew_at = sent_at.plus(self.jitter.around(self.timing.renew_every));
                self.phase = Phase::Held { renew_at };
            }
            Ok(Renew::Lost(Some(by))) if by.holder.attempt != self.grant.holder.attempt => {
                self.finish(Lost::Superseded { by });
            }
            Ok(Renew::Lost(_)) => self.finish(Lost::Gone),
            Err(error) => {
                self.last_error = Some(Arc::new(error));
                let pause = self.jitter.around(self.timing.retry_pause);
                self.phase = Phase::Held { renew_at: now.plus(pause) };
            }
        }
    }

    /// The holder lets go. Comes after the answer to a renewal, never in between.
    pub(super) fn stop(&mut self, now: Moment, stop: Stop) {
        let held = match self.phase {
            Phase::Held { .. } | Phase::Renewing { .. } => true,
            Phase::Lapsed => false,
            Phase::Releasing { .. } | Phase::Over => return,
        };
        if held && now >= self.deadline {
            self.lapse();
        } else if held {
            self.end = Some(match stop {
                Stop::Release => Lost::Released,
                Stop::Abandon => Lost::Abandoned,
            });
        }
        self.phase = match stop {
            Stop::Release => Phase::Releasing { at: now, tries_left: RELEASE_TRIES },
            Stop::Abandon => Phase::Over,
        };
    }

    /// A reader saw the deadline pass before a renewal was answered, so that it came too late.
    pub(super) fn overtaken(&mut self) {
        if matches!(self.phase, Phase::Held { .. } | Phase::Renewing { .. }) {
            self.lapse();
        }
    }

    /// Takes in what came of the release.
    pub(super) fn released(&mut self, now: Moment, answer: Result<Release>) {
        let Phase::Releasing { tries_left, .. } = self.phase else { return };
        let again = tries_left > 1 && answer.as_ref().is_err_and(Error::is_retryable);
        self.maybe_released |=
            answer.as_ref().is_err_and(|error| error.effect() == Effect::Unknown);
        self.released = Some(match answer {
            // It was an earlier try whose answer was lost: until its TTL nothing else ends the grant.
            Ok(Release::NotHeld) if self.maybe_released => Ok(Release::Released),
            Err(error) if self.maybe_released => Err(error.effect_unknown()),
            answer => answer,
        });
        self.phase = if again {
            let pause = self.jitter.around(self.timing.retry_pause);
            Phase::Releasing { at: now.plus(pause), tries_left: tries_left - 1 }
        } else {
            Phase::Over
        };
    }

    fn is_same(&self, grant: &Grant) -> bool {
        grant.lease == self.grant.lease && grant.fence() == self.grant.fence()
    }

    fn lapse(&mut self) {
        self.end = Some(Lost::Expired { last_error: self.last_error.take() });
        self.phase = Phase::Lapsed;
    }

    fn finish(&mut self, lost: Lost) {
        self.end = Some(lost);
        self.phase = Phase::Over;
    }

    /// When the store has ended the grant at the latest, by its TTL.
    fn store_ends(&self) -> Moment {
        self.last_sent.plus(self.grant.ttl.get())
    }
}

#[cfg(test)]
mod tests;
