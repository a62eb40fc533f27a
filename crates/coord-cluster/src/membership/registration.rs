//! Keeping this node registered. Pure: `now` is an argument.

use std::time::Duration;

use coord_core::{Incarnation, Moment, NodeInfo, Registration, Replace};

/// What happened to the registration.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Registered {
    /// It exists, as this run.
    As(Incarnation),
    /// It is gone: nothing may be hosted as this run any more.
    Lost(Incarnation, &'static str),
}

/// What is to be done next.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RegistrarTurn {
    /// This call.
    Do(RegistrarStep),
    /// Nothing before this moment.
    WaitUntil(Moment),
}

/// A call to Discovery.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RegistrarStep {
    /// Register as this.
    Register(NodeInfo, Replace),
    /// Renew with this.
    Heartbeat(Registration, NodeInfo),
}

/// How the last call came out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RegistrarOutcome {
    /// The registration goes on for its TTL.
    Held(Registration),
    /// Another process is registered under the id.
    Duplicate,
    /// The registration is gone.
    Gone,
    /// Another incarnation took the id.
    Superseded,
    /// The call could not tell.
    Failed,
}

/// Registers, renews, notices the loss and joins again as a new incarnation.
///
/// The deadline counts from before the request that last succeeded, less a margin. Past it the run is
/// over, whatever a late answer says.
#[derive(Clone, Debug)]
pub(crate) struct Registrar {
    info: NodeInfo,
    held: Option<Held>,
    /// Only the first registration may replace another process.
    replace: Replace,
    interval: Duration,
    retry: Duration,
    due: Moment,
    sent: Moment,
}

#[derive(Clone, Debug)]
struct Held {
    registration: Registration,
    deadline: Moment,
}

impl Registrar {
    pub(crate) fn new(info: NodeInfo, replace: Replace, times: Times, now: Moment) -> Self {
        let Times { interval, retry } = times;
        Self { info, held: None, replace, interval, retry, due: now, sent: now }
    }

    /// The registration, while it is held.
    pub(crate) fn registration(&self) -> Option<&Registration> {
        self.held.as_ref().map(|held| &held.registration)
    }

    /// When the registration has to be given up.
    pub(crate) fn deadline(&self) -> Option<Moment> {
        self.held.as_ref().map(|held| held.deadline)
    }

    /// What is to be done now, and what was noticed on the way.
    pub(crate) fn next(&mut self, now: Moment) -> (RegistrarTurn, Option<Registered>) {
        let lost = match &self.held {
            Some(held) if now >= held.deadline => self.lose("its deadline passed", now),
            _ => None,
        };
        if now < self.due {
            let until = self.deadline().map_or(self.due, |deadline| deadline.min(self.due));
            return (RegistrarTurn::WaitUntil(until), lost);
        }
        self.sent = now;
        // A call that never comes back must not be repeated without a pause.
        self.due = now.plus(self.retry);
        let step = match &self.held {
            Some(held) => RegistrarStep::Heartbeat(held.registration.clone(), self.info.clone()),
            None => RegistrarStep::Register(self.info.clone(), self.replace),
        };
        (RegistrarTurn::Do(step), lost)
    }

    /// Takes in how the call came out; `jitter` is a tenth of the interval, shorter or longer.
    pub(crate) fn on_outcome(
        &mut self,
        outcome: RegistrarOutcome,
        jitter: f64,
        now: Moment,
    ) -> Option<Registered> {
        match outcome {
            RegistrarOutcome::Held(registration) => self.hold(registration, jitter, now),
            RegistrarOutcome::Duplicate => {
                self.due = now.plus(self.interval);
                None
            }
            RegistrarOutcome::Gone => self.lose("it is gone from the store", now),
            RegistrarOutcome::Superseded => {
                self.lose("another process registered under this id", now)
            }
            RegistrarOutcome::Failed => None,
        }
    }

    fn hold(&mut self, registration: Registration, jitter: f64, now: Moment) -> Option<Registered> {
        let ttl = registration.ttl.get();
        let deadline = self.sent.plus(ttl).minus(crate::Settings::margin(ttl));
        // A late success revives nothing: what was lost meanwhile stays lost, and a registration that
        // comes after its own deadline is let expire.
        let current = registration.incarnation == self.info.incarnation;
        if !current || now >= deadline {
            return None;
        }
        if self.held.as_ref().is_some_and(|held| held.deadline <= now) {
            return self.lose("its deadline passed", now);
        }
        let news = self.held.is_none().then_some(Registered::As(registration.incarnation));
        self.held = Some(Held { registration, deadline });
        self.replace = Replace::No;
        let pause = self.interval.mul_f64(jitter.clamp(0.9, 1.1));
        self.due = self.sent.plus(pause).max(now);
        news
    }

    fn lose(&mut self, why: &'static str, now: Moment) -> Option<Registered> {
        self.held.take()?;
        let lost = self.info.incarnation;
        self.info.incarnation = Incarnation::random();
        self.info.reports.clear();
        self.due = now;
        Some(Registered::Lost(lost, why))
    }
}

/// How often a registration is renewed, and how soon a failed call is repeated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) interval: Duration,
    pub(crate) retry: Duration,
}

#[cfg(test)]
mod tests {
    use coord_core::{Address, NodeId, Revision, Ttl};

    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::from_origin(Duration::from_secs(seconds))
    }

    fn granted(incarnation: Incarnation, revision: u64) -> RegistrarOutcome {
        let node = NodeId::new("n1").expect("name");
        let ttl = Ttl::from_secs(10).expect("ttl");
        let revision = Revision::from_u64(revision);
        RegistrarOutcome::Held(Registration::new(node, incarnation, ttl, revision))
    }

    #[test]
    fn a_success_after_the_deadline_revives_nothing() {
        let id = NodeId::new("n1").expect("name");
        let info = NodeInfo::new(id, Address::new("localhost:1").expect("address"))
            .with_incarnation(Incarnation::from_u128(1));
        let times = Times { interval: Duration::from_secs(3), retry: Duration::from_secs(1) };
        let mut registrar = Registrar::new(info, Replace::No, times, at(0));
        let run = Incarnation::from_u128(1);
        assert!(matches!(registrar.next(at(0)).0, RegistrarTurn::Do(_)));
        let news = registrar.on_outcome(granted(run, 1), 1.0, at(0));
        assert_eq!(news, Some(Registered::As(run)));
        // The deadline is 9 s after the request; the heartbeat is sent just before it.
        assert_eq!(registrar.deadline(), Some(at(9)));
        assert!(matches!(registrar.next(at(8)).0, RegistrarTurn::Do(RegistrarStep::Heartbeat(..))));
        let news = registrar.on_outcome(granted(run, 2), 1.0, at(9));
        assert_eq!(news, Some(Registered::Lost(run, "its deadline passed")));
        assert_eq!(registrar.registration(), None);
        let (turn, news) = registrar.next(at(9));
        assert_eq!(news, None);
        match turn {
            RegistrarTurn::Do(RegistrarStep::Register(info, Replace::No)) => {
                assert_ne!(info.incarnation, run);
            }
            other => panic!("it joins as a new run: {other:?}"),
        }
    }
}
