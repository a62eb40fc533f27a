//! Keeping this node registered. Pure: `now` is an argument.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use coord_core::session::default_margin;
use coord_core::{
    Incarnation, Load, Moment, NodeId, NodeInfo, Registration, Replace, Report, TableName,
    UNREACHABLE_MAX,
};

use crate::model::TableLoad;

/// What happened to the registration.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Registered {
    /// It exists, under this incarnation.
    As(Incarnation),
    /// It is gone: nothing may be hosted under this incarnation any more.
    Lost(Incarnation, &'static str),
}

/// What is to be done next.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RegistrarTurn {
    /// This call.
    Do(RegistrarStep),
    /// Nothing before this moment, which is later than now unless the registration was just lost.
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
    /// This other incarnation is registered under the id.
    Duplicate(Incarnation),
    /// The registration is gone.
    Gone,
    /// Another incarnation took the id.
    Superseded,
    /// The call could not tell.
    Failed,
}

/// Registers, renews, notices the loss and joins again as a new incarnation.
///
/// The deadline counts from before the request that last succeeded, less a margin. Past it the incarnation is
/// over, whatever a late answer says. An incarnation is registered by one request only: the store may have
/// taken a request whose answer was lost, the leader may have ended that incarnation since, and asking again
/// would revive it.
#[derive(Clone, Debug)]
pub(crate) struct Registrar {
    info: NodeInfo,
    held: Option<Held>,
    /// Only the first registration may replace another process.
    replace: Replace,
    /// The incarnation of this process that was lost last.
    former: Option<Incarnation>,
    /// Incarnations of this process that have ended or never began, the newest last. A request without an
    /// answer is repeated many times in an outage, and must not push out an incarnation that has hosted.
    ended: VecDeque<Incarnation>,
    unborn: VecDeque<Incarnation>,
    /// A former incarnation is in the way of the next one, which may replace it: it is over.
    behind_former: bool,
    interval: Duration,
    retry: Duration,
    due: Moment,
    sent: Moment,
    /// A request to register the present incarnation was sent.
    asked: bool,
    /// The reports are newer than the last record that the store was sent.
    unsent: bool,
}

/// The most former incarnations of this process that it confirms as stopped, of those that have hosted and of
/// the others.
const ENDED_MAX: usize = 4;

#[derive(Clone, Debug)]
struct Held {
    registration: Registration,
    deadline: Moment,
}

impl Registrar {
    pub(crate) fn new(info: NodeInfo, replace: Replace, times: Times, now: Moment) -> Self {
        let Times { interval, retry } = times;
        Self {
            info,
            held: None,
            replace,
            former: None,
            ended: VecDeque::new(),
            unborn: VecDeque::new(),
            behind_former: false,
            interval,
            retry,
            due: now,
            sent: now,
            asked: false,
            unsent: false,
        }
    }

    /// What the regions of each table report, and under which incarnation; it is sent at once.
    pub(crate) fn on_reports(
        &mut self,
        reports: &BTreeMap<TableName, (Incarnation, Report)>,
        now: Moment,
    ) {
        let mine = reports.iter().filter(|(_, (run, _))| *run == self.info.incarnation);
        let mine: BTreeMap<_, _> =
            mine.map(|(name, (_, report))| (name.clone(), report.clone())).collect();
        if mine != self.info.reports {
            self.info.reports = mine;
            self.unsent = true;
            self.due = self.due.min(now);
        }
    }

    /// The nodes that this node does not reach, where it reports them; it is sent at once.
    pub(crate) fn on_row(&mut self, row: Option<&BTreeSet<NodeId>>, now: Moment) {
        let row = row.filter(|row| row.len() <= UNREACHABLE_MAX);
        if row != self.info.unreachable.as_ref() {
            self.info.unreachable = row.cloned();
            if self.held.is_some() {
                self.unsent = true;
                self.due = self.due.min(now);
            }
        }
    }

    /// How busy the shards of each table are, and under which incarnation; the next heartbeat reports it.
    pub(crate) fn on_loads(&mut self, loads: &BTreeMap<TableName, TableLoad>) {
        let mine = || loads.iter().filter(|(_, told)| told.run == self.info.incarnation);
        if mine().next().is_none() {
            return;
        }
        let sum = mine().map(|(_, told)| told.sum.get()).sum();
        let reports = mine().map(|(name, told)| (name.clone(), told.report.clone())).collect();
        if self.info.loads != reports {
            self.info.load = Load::new(sum).ok();
            self.info.loads = reports;
        }
    }

    /// This former incarnation of the process certainly hosts nothing any more.
    pub(crate) fn on_ended(&mut self, run: Incarnation, now: Moment) {
        push(&mut self.ended, run);
        self.vouch();
        self.due = self.due.min(now);
    }

    fn vouch(&mut self) {
        self.info.ended = self.ended.iter().chain(&self.unborn).copied().collect();
    }

    /// The leader has declared this incarnation failed.
    pub(crate) fn on_failed(&mut self, run: Incarnation, now: Moment) -> Option<Registered> {
        let held = self.held.as_ref().filter(|held| held.registration.incarnation == run);
        held.is_some().then(|| self.lose("it was declared failed", now)).flatten()
    }

    /// The process that is registered under this id is replaced at once. If it was proved dead, this is its
    /// incarnation.
    pub(crate) fn replace(&mut self, dead: Option<Incarnation>, now: Moment) {
        if let Some(run) = dead {
            self.on_ended(run, now);
        }
        self.replace = Replace::Yes;
        (self.asked, self.due) = (false, now);
    }

    /// Joins at once.
    pub(crate) fn join(&mut self, now: Moment) {
        self.due = self.due.min(now);
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
        if self.held.as_ref().is_some_and(|held| now >= held.deadline) {
            // What still runs under that incarnation comes first.
            return (RegistrarTurn::WaitUntil(now), self.lose("its deadline passed", now));
        }
        if now < self.due {
            let until = self.deadline().map_or(self.due, |deadline| deadline.min(self.due));
            return (RegistrarTurn::WaitUntil(until), None);
        }
        self.sent = now;
        // A call that never comes back must not be repeated without a pause.
        self.due = now.plus(self.retry);
        self.unsent = false;
        let step = match &self.held {
            Some(held) => RegistrarStep::Heartbeat(held.registration.clone(), self.info.clone()),
            None => {
                if self.asked {
                    // Nothing was ever hosted here under this incarnation.
                    push(&mut self.unborn, self.info.incarnation);
                    self.vouch();
                    self.begin_run();
                }
                self.asked = true;
                // Reported once: at the next try another process may have the id.
                let behind_former = std::mem::take(&mut self.behind_former);
                let replace = if behind_former { Replace::Yes } else { self.replace };
                RegistrarStep::Register(self.info.clone(), replace)
            }
        };
        (RegistrarTurn::Do(step), None)
    }

    /// Takes the outcome of the call; `jitter` is a tenth of the interval, shorter or longer.
    pub(crate) fn on_outcome(
        &mut self,
        outcome: RegistrarOutcome,
        jitter: f64,
        now: Moment,
    ) -> Option<Registered> {
        match outcome {
            RegistrarOutcome::Held(registration) => self.hold(registration, jitter, now),
            RegistrarOutcome::Duplicate(other) => {
                self.asked = false;
                self.behind_former = self.former == Some(other) || self.info.ended.contains(&other);
                self.due = if self.behind_former { now } else { now.plus(self.interval) };
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
        let deadline = self.sent.plus(ttl).minus(default_margin(ttl));
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
        self.due = if self.unsent { now } else { self.sent.plus(pause).max(now) };
        news
    }

    fn lose(&mut self, why: &'static str, now: Moment) -> Option<Registered> {
        self.held.take()?;
        let lost = self.info.incarnation;
        self.former = Some(lost);
        self.begin_run();
        self.unsent = false;
        self.due = now;
        Some(Registered::Lost(lost, why))
    }

    fn begin_run(&mut self) {
        self.info.incarnation = Incarnation::random();
        self.info.reports.clear();
        self.info.loads.clear();
        self.asked = false;
    }
}

fn push(runs: &mut VecDeque<Incarnation>, run: Incarnation) {
    runs.push_back(run);
    while runs.len() > ENDED_MAX {
        runs.pop_front();
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
    use coord_core::{Address, LoadReport, Revision, Ttl};

    use super::*;

    /// TTL 10 s, so the deadline is 9 s after the request.
    const TTL_SECS: u64 = 10;

    fn at(seconds: u64) -> Moment {
        Moment::from_origin(Duration::from_secs(seconds))
    }

    fn registrar() -> Registrar {
        let id = NodeId::new("n1").expect("name");
        let info = NodeInfo::new(id, Address::new("localhost:1").expect("address"))
            .with_incarnation(Incarnation::from_u128(1));
        let (interval, retry) = (Duration::from_secs(3), Duration::from_secs(2));
        let times = Times { interval, retry };
        Registrar::new(info, Replace::Yes, times, at(0))
    }

    fn held(incarnation: Incarnation) -> RegistrarOutcome {
        let ttl = Ttl::from_secs(TTL_SECS).expect("in range");
        let node = NodeId::new("n1").expect("name");
        RegistrarOutcome::Held(Registration::new(node, incarnation, ttl, Revision::from_u64(1)))
    }

    /// The call that is due now; none while there is nothing to do.
    fn call(registrar: &mut Registrar, now: Moment) -> Option<RegistrarStep> {
        match registrar.next(now) {
            (RegistrarTurn::Do(step), None) => Some(step),
            (RegistrarTurn::WaitUntil(_), None) => None,
            (_, news) => panic!("unexpected news: {news:?}"),
        }
    }

    /// Registered by a request of 0 s that was answered at once.
    fn registered() -> Registrar {
        let mut registrar = registrar();
        let first = call(&mut registrar, at(0));
        assert!(matches!(first, Some(RegistrarStep::Register(_, Replace::Yes))), "{first:?}");
        let run = Incarnation::from_u128(1);
        let news = registrar.on_outcome(held(run), 1.0, at(0));
        assert_eq!(news, Some(Registered::As(run)));
        registrar
    }

    #[test]
    fn the_deadline_counts_from_before_the_request() {
        let mut registrar = registered();
        assert_eq!(registrar.deadline(), Some(at(9)));
        assert_eq!(registrar.next(at(1)), (RegistrarTurn::WaitUntil(at(3)), None));
        assert!(matches!(call(&mut registrar, at(3)), Some(RegistrarStep::Heartbeat(..))));
        // The answer takes 2 s, which belong to the TTL.
        assert_eq!(registrar.on_outcome(held(Incarnation::from_u128(1)), 1.0, at(5)), None);
        assert_eq!(registrar.deadline(), Some(at(12)));
    }

    #[test]
    fn a_failed_heartbeat_is_repeated_and_loses_nothing_before_the_deadline() {
        let mut registrar = registered();
        for seconds in [3, 5, 7] {
            let step = call(&mut registrar, at(seconds));
            assert!(matches!(step, Some(RegistrarStep::Heartbeat(..))), "{step:?}");
            assert_eq!(registrar.on_outcome(RegistrarOutcome::Failed, 1.0, at(seconds)), None);
            assert_eq!(call(&mut registrar, at(seconds + 1)), None);
        }
        let lost = Registered::Lost(Incarnation::from_u128(1), "its deadline passed");
        assert_eq!(registrar.next(at(9)), (RegistrarTurn::WaitUntil(at(9)), Some(lost)));
        let step = call(&mut registrar, at(9));
        let Some(RegistrarStep::Register(info, Replace::No)) = step else {
            panic!("it joins again, and replaces nobody: {step:?}");
        };
        assert_ne!(info.incarnation, Incarnation::from_u128(1));
    }

    #[test]
    fn a_late_success_revives_nothing() {
        let mut registrar = registered();
        assert!(call(&mut registrar, at(8)).is_some());
        let old = Incarnation::from_u128(1);
        let (_, news) = registrar.next(at(9));
        assert!(matches!(news, Some(Registered::Lost(run, _)) if run == old), "{news:?}");
        let step = call(&mut registrar, at(9));
        assert!(matches!(step, Some(RegistrarStep::Register(..))), "{step:?}");
        assert_eq!(registrar.on_outcome(held(old), 1.0, at(9)), None);
        assert_eq!((registrar.registration(), registrar.deadline()), (None, None));

        // A first registration that comes after its own deadline is none either.
        let mut registrar = self::registrar();
        assert!(call(&mut registrar, at(0)).is_some());
        assert_eq!(registrar.on_outcome(held(old), 1.0, at(9)), None);
        assert_eq!(registrar.registration(), None);
    }

    #[test]
    fn a_run_whose_registration_was_not_answered_is_not_registered_again() {
        let mut registrar = registrar();
        let mut runs = Vec::new();
        for seconds in [0, 2, 4] {
            let step = call(&mut registrar, at(seconds));
            let Some(RegistrarStep::Register(info, _)) = step else { panic!("{step:?}") };
            // Nothing was hosted as any of them, should the leader have seen one.
            assert_eq!(info.ended, runs.iter().copied().collect());
            assert!(!runs.contains(&info.incarnation), "the leader may have ended it");
            runs.push(info.incarnation);
            assert_eq!(registrar.on_outcome(RegistrarOutcome::Failed, 1.0, at(seconds)), None);
        }
        assert_eq!(registrar.on_outcome(held(runs[0]), 1.0, at(5)), None, "it is over");
        // One of them did arrive; whoever it was, it is over.
        let step = call(&mut registrar, at(6));
        let Some(RegistrarStep::Register(info, _)) = step else { panic!("{step:?}") };
        let outcome = RegistrarOutcome::Duplicate(runs[1]);
        assert_eq!(registrar.on_outcome(outcome, 1.0, at(6)), None);
        let replaces = Some(RegistrarStep::Register(info.clone(), Replace::Yes));
        assert_eq!(call(&mut registrar, at(6)), replaces);
        let news = registrar.on_outcome(held(info.incarnation), 1.0, at(6));
        assert_eq!(news, Some(Registered::As(info.incarnation)));
    }

    #[test]
    fn a_run_that_has_hosted_is_vouched_for_however_long_the_store_is_away() {
        let mut registrar = registered();
        let old = Incarnation::from_u128(1);
        assert!(registrar.next(at(9)).1.is_some());
        registrar.on_ended(old, at(9));
        for seconds in (9..60).step_by(2) {
            let step = call(&mut registrar, at(seconds));
            let Some(RegistrarStep::Register(info, Replace::No)) = step else { panic!("{step:?}") };
            assert!(info.ended.contains(&old) && info.ended.len() <= 2 * ENDED_MAX, "{info:?}");
            assert_eq!(registrar.on_outcome(RegistrarOutcome::Failed, 1.0, at(seconds)), None);
        }
    }

    #[test]
    fn a_run_that_was_declared_failed_joins_again_as_another() {
        let mut registrar = registered();
        assert_eq!(registrar.on_failed(Incarnation::from_u128(7), at(1)), None, "another run was");
        let old = Incarnation::from_u128(1);
        let lost = Registered::Lost(old, "it was declared failed");
        assert_eq!(registrar.on_failed(old, at(1)), Some(lost));
        assert_eq!(registrar.on_failed(old, at(1)), None);
        let step = call(&mut registrar, at(1));
        let Some(RegistrarStep::Register(info, Replace::No)) = step else { panic!("{step:?}") };
        assert_ne!(info.incarnation, old);
    }

    #[test]
    fn a_renewal_that_comes_after_the_deadline_revives_nothing() {
        let mut registrar = registered();
        assert!(call(&mut registrar, at(8)).is_some());
        let old = Incarnation::from_u128(1);
        // It was sent before the deadline, and nobody has looked at the clock since.
        let news = registrar.on_outcome(held(old), 1.0, at(9));
        assert_eq!(news, Some(Registered::Lost(old, "its deadline passed")));
        assert_eq!(registrar.registration(), None);
        let step = call(&mut registrar, at(9));
        let Some(RegistrarStep::Register(info, Replace::No)) = step else {
            panic!("it joins as a new run: {step:?}");
        };
        assert_ne!(info.incarnation, old);
    }

    #[test]
    fn a_run_that_is_gone_or_superseded_joins_again_as_another() {
        for outcome in [RegistrarOutcome::Gone, RegistrarOutcome::Superseded] {
            let mut registrar = registered();
            assert!(call(&mut registrar, at(3)).is_some());
            let news = registrar.on_outcome(outcome.clone(), 1.0, at(3));
            let old = Incarnation::from_u128(1);
            assert!(matches!(news, Some(Registered::Lost(run, _)) if run == old), "{news:?}");
            let step = call(&mut registrar, at(3));
            let Some(RegistrarStep::Register(info, Replace::No)) = step else {
                panic!("it joins again at once, and replaces nobody: {step:?}");
            };
            assert_ne!(info.incarnation, old);
            // Told twice, it loses the run once.
            assert_eq!(registrar.on_outcome(outcome, 1.0, at(3)), None);
        }
    }

    fn duplicate(incarnation: u128) -> RegistrarOutcome {
        RegistrarOutcome::Duplicate(Incarnation::from_u128(incarnation))
    }

    #[test]
    fn a_run_that_is_over_is_replaced_by_the_next_one_of_the_same_process() {
        let mut registrar = registered();
        let (_, news) = registrar.next(at(9));
        assert!(matches!(news, Some(Registered::Lost(..))), "{news:?}");
        let step = call(&mut registrar, at(9));
        let Some(RegistrarStep::Register(next, Replace::No)) = step else {
            panic!("it asks first: {step:?}");
        };
        // The store, which was away, still has the former run.
        assert_eq!(registrar.on_outcome(duplicate(1), 1.0, at(10)), None);
        let replaces = Some(RegistrarStep::Register(next.clone(), Replace::Yes));
        assert_eq!(call(&mut registrar, at(10)), replaces);
        // It may not have been applied, and somebody else may have come.
        assert_eq!(registrar.on_outcome(RegistrarOutcome::Failed, 1.0, at(12)), None);
        let step = call(&mut registrar, at(12));
        let Some(RegistrarStep::Register(after, Replace::No)) = step else { panic!("{step:?}") };
        assert_ne!(after.incarnation, next.incarnation);
        assert_eq!(registrar.on_outcome(duplicate(7), 1.0, at(12)), None);
        assert_eq!(registrar.next(at(12)), (RegistrarTurn::WaitUntil(at(15)), None));
    }

    #[test]
    fn a_report_is_sent_at_once_and_again_until_it_arrived() {
        let mut registrar = registered();
        let run = Incarnation::from_u128(1);
        let table = TableName::new("orders").expect("name");
        let report = |version| {
            let uid = coord_core::TableUid::from_u128(1);
            Report::new(uid, coord_core::Version::new(version))
        };
        let other = BTreeMap::from([(table.clone(), (Incarnation::from_u128(9), report(1)))]);
        registrar.on_reports(&other, at(1));
        assert_eq!(call(&mut registrar, at(1)), None, "that was another run");
        let sent = |step: Option<RegistrarStep>| match step {
            Some(RegistrarStep::Heartbeat(_, info)) => info.reports.get(&table).cloned(),
            other => panic!("no heartbeat: {other:?}"),
        };
        registrar.on_reports(&BTreeMap::from([(table.clone(), (run, report(2)))]), at(1));
        assert_eq!(sent(call(&mut registrar, at(1))), Some(report(2)));
        // The next one comes while the first is on its way.
        registrar.on_reports(&BTreeMap::from([(table.clone(), (run, report(3)))]), at(1));
        assert_eq!(registrar.on_outcome(held(run), 1.0, at(2)), None);
        assert_eq!(sent(call(&mut registrar, at(2))), Some(report(3)));
        assert_eq!(registrar.on_outcome(RegistrarOutcome::Failed, 1.0, at(2)), None);
        assert_eq!(sent(call(&mut registrar, at(4))), Some(report(3)));
        assert_eq!(registrar.on_outcome(held(run), 1.0, at(4)), None);
        assert_eq!(call(&mut registrar, at(5)), None);
    }

    #[test]
    fn loads_go_with_the_next_heartbeat_and_end_with_their_run() {
        let mut registrar = registered();
        let run = Incarnation::from_u128(1);
        let uid = coord_core::TableUid::from_u128(1);
        let shard = (coord_core::ShardId::new(0), 5.0);
        let report = LoadReport::after(None, uid, coord_core::Version::new(1), [shard], 8);
        let table = TableName::new("orders").expect("name");
        let told = |run| {
            let sum = Load::new(5.0).expect("finite");
            BTreeMap::from([(table.clone(), TableLoad { run, report: report.clone(), sum })])
        };
        registrar.on_loads(&told(Incarnation::from_u128(9)));
        registrar.on_loads(&told(run));
        assert_eq!(call(&mut registrar, at(2)), None, "nothing is hurried");
        match call(&mut registrar, at(3)) {
            Some(RegistrarStep::Heartbeat(_, info)) => {
                assert_eq!(info.loads, BTreeMap::from([(table.clone(), report.clone())]));
                assert_eq!(info.load.map(Load::get), Some(5.0));
            }
            other => panic!("no heartbeat: {other:?}"),
        }
        assert!(registrar.on_outcome(RegistrarOutcome::Gone, 1.0, at(3)).is_some());
        registrar.on_loads(&told(run));
        match call(&mut registrar, at(3)) {
            Some(RegistrarStep::Register(info, _)) => assert!(info.loads.is_empty()),
            other => panic!("it joins again: {other:?}"),
        }
    }

    #[test]
    fn a_new_run_vouches_for_the_one_that_ended() {
        let mut registrar = registered();
        assert!(call(&mut registrar, at(3)).is_some());
        let old = Incarnation::from_u128(1);
        assert!(registrar.on_outcome(RegistrarOutcome::Gone, 1.0, at(3)).is_some());
        registrar.on_ended(old, at(4));
        match call(&mut registrar, at(4)) {
            Some(RegistrarStep::Register(info, _)) => {
                assert!(info.ended.contains(&old) && info.incarnation != old, "{info:?}");
            }
            other => panic!("it joins again: {other:?}"),
        }
    }

    #[test]
    fn a_duplicate_is_asked_about_again_after_an_interval() {
        let mut registrar = registrar();
        assert!(call(&mut registrar, at(0)).is_some());
        assert_eq!(registrar.on_outcome(duplicate(7), 1.0, at(1)), None);
        assert_eq!(registrar.next(at(1)), (RegistrarTurn::WaitUntil(at(4)), None));
        assert!(call(&mut registrar, at(4)).is_some());
    }
}
