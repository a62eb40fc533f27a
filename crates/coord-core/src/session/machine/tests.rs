use std::time::Duration;

use proptest::prelude::*;

use super::super::timing::Asked;
use super::*;
use crate::error::ErrorKind;
use crate::types::{
    AttemptId, Holder, Incarnation, LeaseName, LeaseRecord, NodeId, Origin, Revision, Term, Ttl,
};

fn grant(attempt: u128, term: u64, ttl: Ttl) -> Grant {
    Grant::new(
        LeaseName::new("scheduler").expect("name"),
        Holder::new(
            NodeId::new("node-1").expect("id"),
            Incarnation::from_u128(1),
            AttemptId::from_u128(attempt),
        ),
        Term::from_u64(term),
        ttl,
        Origin::new("test"),
        Revision::from_u64(1),
    )
}

fn timing(ttl: Ttl) -> Timing {
    let (margin, renew_every, request_timeout, retry_every) = (None, None, None, None);
    let ttl = ttl.get();
    Timing::new(&Asked { ttl, margin, renew_every, request_timeout, retry_every }).expect("times")
}

fn secs(seconds: u64) -> Ttl {
    Ttl::from_secs(seconds).expect("in range")
}

/// A tenure whose request was sent at 100 s.
fn holding() -> (Holding, Moment) {
    let start = Moment::from_origin(Duration::from_secs(100));
    let ttl = secs(10);
    (Holding::new(grant(1, 1, ttl), start, &timing(ttl), Jitter::new(Some(1))), start)
}

fn at(start: Moment, millis: u64) -> Moment {
    start.plus(Duration::from_millis(millis))
}

#[test]
fn the_deadline_counts_from_before_the_request() {
    let (mut holding, start) = holding();
    assert_eq!(holding.deadline(), at(start, 9_000));
    assert!(matches!(holding.next(at(start, 4_000)), Action::Renew(_)));
    holding.renewed(at(start, 5_900), Ok(Renew::Renewed(grant(1, 1, secs(10)))));
    assert_eq!(holding.deadline(), at(start, 13_000), "from the sending, not from the answer");
}

#[test]
fn the_granted_ttl_counts() {
    let (mut holding, start) = holding();
    assert!(matches!(holding.next(at(start, 4_000)), Action::Renew(_)));
    holding.renewed(at(start, 4_000), Ok(Renew::Renewed(grant(1, 1, secs(4)))));
    assert_eq!(holding.deadline(), at(start, 4_000 + 3_600));
    let Action::Wait(until) = holding.next(at(start, 4_000)) else { panic!("nothing is due") };
    assert!(until <= at(start, 4_000 + 1_467), "renewed by a third of what was granted");
}

#[test]
fn a_renewal_that_hangs_leaves_time_for_a_second_one() {
    let (mut holding, start) = holding();
    let due = at(start, 3_667);
    let Action::Renew(until) = holding.next(due) else { panic!("due") };
    holding.renewed(until, Err(Error::unavailable("renew", "no answer")));
    let Action::Wait(again) = holding.next(until) else { panic!("a pause first") };
    assert!(again < holding.deadline());
    let Action::Renew(until) = holding.next(again) else { panic!("again") };
    assert!(until.since(again) >= Duration::from_secs(2), "the second has its whole time");
}

#[test]
fn a_late_success_revives_nothing() {
    let (mut holding, start) = holding();
    assert!(matches!(holding.next(at(start, 8_000)), Action::Renew(_)));
    holding.renewed(at(start, 9_000), Ok(Renew::Renewed(grant(1, 1, secs(10)))));
    assert!(matches!(holding.take_end(), Some(Lost::Expired { .. })));
    assert_eq!(holding.deadline(), at(start, 9_000));
    // What the store still has is released once the holder lets go.
    assert_eq!(holding.next(at(start, 9_000)), Action::Wait(at(start, 18_000)));
    holding.stop(at(start, 9_500), Stop::Release);
    assert!(matches!(holding.next(at(start, 9_500)), Action::Release(_)));
    holding.released(at(start, 9_600), Ok(Release::Released));
    assert_eq!(holding.next(at(start, 9_600)), Action::Finish);
    assert!(holding.take_end().is_none());
}

#[test]
fn what_is_let_go_after_its_deadline_was_lost_and_not_released() {
    let (mut holding, start) = holding();
    holding.stop(at(start, 9_000), Stop::Release);
    assert!(matches!(holding.take_end(), Some(Lost::Expired { .. })));
    assert!(matches!(holding.next(at(start, 9_000)), Action::Release(_)));
}

#[test]
fn lost_says_to_whom() {
    let other = LeaseRecord::new(grant(2, 2, secs(10)));
    for (answer, word) in [
        (Renew::Lost(Some(other)), "superseded"),
        (Renew::Lost(None), "gone"),
        (Renew::Renewed(grant(1, 2, secs(10))), "failed"),
        (Renew::Renewed(grant(2, 1, secs(10))), "failed"),
    ] {
        let (mut holding, start) = holding();
        assert!(matches!(holding.next(at(start, 4_000)), Action::Renew(_)));
        holding.renewed(at(start, 4_001), Ok(answer));
        assert_eq!(holding.take_end().expect("ended").as_str(), word);
        assert_eq!(holding.next(at(start, 4_001)), Action::Finish);
    }
}

/// The answers to the tries of a release, one after the other; what came of it.
fn release_answered(answers: impl IntoIterator<Item = Result<Release>>) -> Result<Release> {
    let (mut holding, start) = holding();
    holding.stop(start, Stop::Release);
    let mut now = start;
    for answer in answers {
        while let Action::Wait(until) = holding.next(now) {
            now = until;
        }
        assert!(matches!(holding.next(now), Action::Release(_)));
        holding.released(now, answer);
    }
    assert_eq!(holding.next(now), Action::Finish);
    holding.take_released()
}

#[test]
fn a_release_is_not_judged_by_its_last_answer_alone() {
    let lost = || Err(Error::unavailable("release", "no answer"));
    let refused = || {
        let error = Error::new(ErrorKind::Unavailable, "release").message("not sent");
        Err(error.effect_none())
    };
    let not_held = || Ok(Release::NotHeld);
    assert_eq!(release_answered([lost(), not_held()]).ok(), Some(Release::Released));
    assert_eq!(release_answered([lost(), refused(), not_held()]).ok(), Some(Release::Released));
    // A try that was never sent has ended nothing.
    assert_eq!(release_answered([refused(), not_held()]).ok(), Some(Release::NotHeld));
    assert_eq!(release_answered([not_held()]).ok(), Some(Release::NotHeld));
    let error = release_answered([lost(), refused(), refused()]).expect_err("never answered");
    assert_eq!(error.effect(), Effect::Unknown);
    let denied = || Err(Error::new(ErrorKind::Denied, "release"));
    assert_eq!(release_answered([lost(), denied()]).expect_err("denied").effect(), Effect::Unknown);
    assert_eq!(release_answered([denied()]).expect_err("denied").effect(), Effect::None);
}

#[test]
fn a_release_is_tried_three_times_and_not_beyond_the_ttl() {
    let (mut holding, start) = holding();
    holding.stop(at(start, 1_000), Stop::Release);
    assert!(matches!(holding.take_end(), Some(Lost::Released)));
    let mut now = at(start, 1_000);
    let mut tries = 0;
    loop {
        match holding.next(now) {
            Action::Release(until) => {
                tries += 1;
                now = until;
                holding.released(now, Err(Error::unavailable("release", "no answer")));
            }
            Action::Wait(until) => now = until,
            Action::Finish => break,
            Action::Renew(_) => panic!("nothing renews any more"),
        }
    }
    assert_eq!(tries, 3);
    assert!(now <= at(start, 10_000));
    assert!(holding.take_released().is_err());
}

#[derive(Clone, Debug)]
enum Input {
    Advance(u64),
    Renewed(u64),
    Error,
    Denied,
    Superseded,
    Gone,
    WrongTerm,
    Release,
    Abandon,
    Overtaken,
    Released,
}

fn inputs() -> impl Strategy<Value = Vec<Input>> {
    let input = prop_oneof![
        8 => (0_u64..3_000).prop_map(Input::Advance),
        1 => (3_000_u64..30_000).prop_map(Input::Advance),
        8 => (1_u64..20).prop_map(Input::Renewed),
        4 => Just(Input::Error),
        1 => Just(Input::Denied),
        1 => Just(Input::Superseded),
        1 => Just(Input::Gone),
        1 => Just(Input::WrongTerm),
        1 => Just(Input::Release),
        1 => Just(Input::Abandon),
        1 => Just(Input::Overtaken),
        4 => Just(Input::Released),
    ];
    proptest::collection::vec(input, 1..120)
}

/// What the driver does, with a model of what may be promised beside the machine.
struct Model {
    holding: Holding,
    now: Moment,
    /// The request on its way: whether it is a renewal, and when it was sent.
    in_flight: Option<(bool, Moment)>,
    /// The latest instant up to which any successful request allows to hold.
    allowed: Moment,
    ends: u32,
    stopped: bool,
}

impl Model {
    fn is_held(&self) -> bool {
        self.ends == 0 && self.now < self.holding.deadline()
    }

    fn step(&mut self, input: &Input) {
        let was_held = self.is_held();
        let was_deadline = self.holding.deadline();
        let renewing = self.in_flight.filter(|(renewal, _)| *renewal).map(|(_, sent_at)| sent_at);
        let ttl = secs(10);
        match (input, renewing) {
            (Input::Advance(millis), _) => self.now = self.now.plus(Duration::from_millis(*millis)),
            (Input::Renewed(seconds), Some(sent_at)) => {
                let ttl = secs(*seconds);
                let margin = (ttl.get() / 10).max(Duration::from_millis(100));
                if self.is_held() {
                    self.allowed = sent_at.plus(ttl.get()).minus(margin);
                }
                self.answer(Ok(Renew::Renewed(grant(1, 1, ttl))));
            }
            (Input::Error, Some(_)) => self.answer(Err(Error::unavailable("renew", "reset"))),
            (Input::Denied, Some(_)) => self.answer(Err(Error::new(ErrorKind::Denied, "renew"))),
            (Input::Gone, Some(_)) => self.answer(Ok(Renew::Lost(None))),
            (Input::Superseded, Some(_)) => {
                self.answer(Ok(Renew::Lost(Some(LeaseRecord::new(grant(2, 2, ttl))))));
            }
            (Input::WrongTerm, Some(_)) => self.answer(Ok(Renew::Renewed(grant(1, 9, ttl)))),
            (Input::Release | Input::Abandon, None) if !self.stopped => {
                let abandon = matches!(input, Input::Abandon);
                self.stopped = true;
                self.holding.stop(self.now, if abandon { Stop::Abandon } else { Stop::Release });
            }
            (Input::Overtaken, None) if self.now >= self.holding.deadline() => {
                self.holding.overtaken();
            }
            (Input::Released, None) if self.in_flight.take().is_some() => {
                self.holding.released(self.now, Ok(Release::Released));
            }
            _ => {}
        }
        self.perform();
        assert!(was_held || !self.is_held(), "nothing is revived");
        assert!(self.ends <= 1, "ended more than once");
        assert!(!self.is_held() || self.now < self.allowed, "held for too long");
        assert!(self.ends == 0 || self.holding.deadline() <= was_deadline, "raised after its end");
    }

    fn answer(&mut self, answer: Result<Renew>) {
        self.in_flight = None;
        self.holding.renewed(self.now, answer);
    }

    /// Asks for actions as the driver does: never while a request is on its way.
    fn perform(&mut self) {
        if self.in_flight.is_some() {
            return;
        }
        let action = self.holding.next(self.now);
        self.ends += u32::from(self.holding.take_end().is_some());
        match action {
            Action::Wait(until) => assert!(until > self.now, "a wait that is over"),
            Action::Renew(until) => {
                assert!(self.is_held() && !self.stopped, "renewed for nobody");
                assert!(until > self.now && until <= self.holding.deadline());
                self.in_flight = Some((true, self.now));
            }
            Action::Release(until) => {
                assert!(self.stopped && self.ends == 1, "released before the holder let go");
                assert!(until > self.now);
                self.in_flight = Some((false, self.now));
            }
            Action::Finish => assert_eq!(self.ends, 1, "finished without an end"),
        }
    }
}

proptest! {
    #[test]
    fn whatever_happens_it_is_never_held_too_long_and_ends_once(
        inputs in inputs(),
        seed in any::<u64>(),
    ) {
        let start = Moment::from_origin(Duration::from_secs(1));
        let ttl = secs(10);
        let holding = Holding::new(grant(1, 1, ttl), start, &timing(ttl), Jitter::new(Some(seed)));
        let allowed = holding.deadline();
        let mut model =
            Model { holding, now: start, in_flight: None, allowed, ends: 0, stopped: false };
        for input in &inputs {
            model.step(input);
        }
        // Left alone, it ends by itself.
        model.now = model.now.plus(Duration::from_secs(100));
        if model.in_flight.take().is_some() {
            let late = || Error::unavailable("renew", "no answer");
            model.holding.renewed(model.now, Err(late()));
            model.holding.released(model.now, Err(late()));
        }
        model.perform();
        prop_assert_eq!(model.ends, 1);
        prop_assert_eq!(model.holding.next(model.now), Action::Finish);
    }
}
