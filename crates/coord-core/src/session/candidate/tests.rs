use proptest::prelude::*;

use super::super::timing::Asked;
use super::*;
use crate::error::ErrorKind;
use crate::types::{Holder, Incarnation, NodeId, Origin, Revision, Term, Ttl};

const TTL: Duration = Duration::from_secs(10);
const OWN: AttemptId = AttemptId::from_u128(1);
const OTHER: AttemptId = AttemptId::from_u128(2);

fn candidate(patience: Patience, seed: u64) -> (Candidate, Moment) {
    let (margin, renew_every, request_timeout, retry_every) = (None, None, None, None);
    let asked = Asked { ttl: TTL, margin, renew_every, request_timeout, retry_every };
    let timing = Timing::new(&asked).expect("times");
    let now = Moment::from_origin(Duration::from_secs(100));
    let lease = LeaseName::new("scheduler").expect("name");
    let jitter = Jitter::new(Some(seed));
    (Candidate::new(lease, OWN, timing, patience, jitter, now), now)
}

fn grant(attempt: AttemptId, term: u64, revision: u64) -> Grant {
    let node = NodeId::new("node-1").expect("id");
    Grant::new(
        LeaseName::new("scheduler").expect("name"),
        Holder::new(node, Incarnation::from_u128(1), attempt),
        Term::from_u64(term),
        Ttl::new(TTL).expect("in range"),
        Origin::new("test"),
        Revision::from_u64(revision),
    )
}

fn record(attempt: AttemptId, term: u64, revision: u64) -> LeaseRecord {
    LeaseRecord::new(grant(attempt, term, revision))
}

fn changed(attempt: AttemptId, revision: u64) -> Watched<LeaseEvent> {
    Watched::Event(LeaseEvent::Changed(record(attempt, 1, revision)))
}

const VACANT: Watched<LeaseEvent> = Watched::Event(LeaseEvent::Vacant);

fn held(candidate: &mut Candidate, now: Moment, revision: u64) {
    let answer = Ok(Acquire::Held(record(OTHER, 1, revision)));
    assert!(matches!(candidate.answered(now, now, answer, |_| Ok(())), Verdict::GoOn));
}

#[test]
fn after_a_release_it_tries_within_30_ms() {
    for seed in 0..200 {
        let (mut candidate, now) = candidate(Patience::WaitsItsTurn, seed);
        held(&mut candidate, now, 1);
        let wait = candidate.try_at().since(now);
        assert!(wait >= Duration::from_millis(1_800) && wait <= Duration::from_millis(2_200));
        let now = now.plus(Duration::from_secs(1));
        candidate.watched(now, &VACANT);
        assert!(candidate.try_at().since(now) <= Duration::from_millis(30));
    }
}

#[test]
fn after_an_expiry_it_tries_within_half_a_second() {
    let mut longest = Duration::ZERO;
    for seed in 0..200 {
        let (mut candidate, now) = candidate(Patience::WaitsItsTurn, seed);
        held(&mut candidate, now, 1);
        candidate.watched(now, &changed(OTHER, 2));
        let now = now.plus(TTL);
        held(&mut candidate, now, 2);
        candidate.watched(now, &VACANT);
        let wait = candidate.try_at().since(now);
        assert!(wait <= Duration::from_millis(500));
        longest = longest.max(wait);
    }
    assert!(longest > Duration::from_millis(300), "{longest:?}");
}

#[test]
fn losers_go_back_to_the_watch() {
    let (mut candidate, now) = candidate(Patience::WaitsItsTurn, 1);
    held(&mut candidate, now, 1);
    candidate.watched(now, &VACANT);
    candidate.watched(now, &changed(AttemptId::from_u128(3), 2));
    assert!(candidate.try_at().since(now) >= Duration::from_millis(1_800));
}

#[test]
fn an_answer_that_came_too_late_is_given_back_and_another_attempt_begins() {
    let (mut candidate, sent_at) = candidate(Patience::WaitsItsTurn, 1);
    let now = sent_at.plus(Duration::from_secs(9));
    let answer = Ok(Acquire::Acquired(grant(OWN, 1, 1)));
    let verdict = candidate.answered(sent_at, now, answer, |_| Ok(()));
    assert!(matches!(verdict, Verdict::TooLate(_)));
    candidate.begin_again(now, OTHER);
    assert_eq!(candidate.attempt(), OTHER);
    assert!(candidate.try_at() > now);
}

#[test]
fn a_term_that_went_back_is_refused_and_released() {
    let (mut candidate, now) = candidate(Patience::WaitsItsTurn, 1);
    let answer = Ok(Acquire::Acquired(grant(OWN, 1, 1)));
    let fits = |_: &Grant| Err(Error::corrupt("acquire", "the term went back"));
    assert!(matches!(candidate.answered(now, now, answer, fits), Verdict::Refused(..)));
}

#[test]
fn what_an_operator_must_mend_fails_at_once() {
    for kind in [ErrorKind::Denied, ErrorKind::Misconfigured, ErrorKind::Closed] {
        let (mut candidate, now) = candidate(Patience::WaitsItsTurn, 1);
        let verdict = candidate.answered(now, now, Err(Error::new(kind, "acquire")), |_| Ok(()));
        assert!(matches!(verdict, Verdict::Failed(error) if error.kind() == kind));
        assert!(!candidate.maybe_granted());
    }
}

#[test]
fn trying_once_sends_at_most_three_requests_of_one_attempt() {
    let (mut candidate, mut now) = candidate(Patience::TriesOnce, 1);
    let lost = || Err(Error::unavailable("acquire", "no answer"));
    for _ in 0..2 {
        assert!(matches!(candidate.answered(now, now, lost(), |_| Ok(())), Verdict::GoOn));
        assert_eq!(candidate.attempt(), OWN);
        assert!(candidate.try_at() > now);
        now = candidate.try_at();
    }
    assert!(matches!(candidate.answered(now, now, lost(), |_| Ok(())), Verdict::Failed(_)));
    assert!(candidate.maybe_granted());
}

#[derive(Clone, Debug)]
enum Input {
    Advance(u64),
    Won,
    Held,
    Lost,
    Vacant,
    Changed(u128, u64),
    Back,
}

fn inputs() -> impl Strategy<Value = Vec<Input>> {
    let input = prop_oneof![
        (0_u64..12_000).prop_map(Input::Advance),
        Just(Input::Won),
        Just(Input::Held),
        Just(Input::Lost),
        Just(Input::Vacant),
        (1_u128..5, 1_u64..9).prop_map(|(attempt, revision)| Input::Changed(attempt, revision)),
        Just(Input::Back),
    ];
    proptest::collection::vec(input, 1..80)
}

proptest! {
    #[test]
    fn it_wins_only_in_time_and_always_tries_again(inputs in inputs(), seed in any::<u64>()) {
        let (mut candidate, mut now) = candidate(Patience::WaitsItsTurn, seed);
        let mut sent_at = None;
        let mut next_attempt = 100;
        for input in inputs {
            if sent_at.is_none() && now >= candidate.try_at() {
                sent_at = Some(now);
            }
            let attempt = candidate.attempt();
            let answer = match input {
                Input::Won => Ok(Acquire::Acquired(grant(attempt, 1, 1))),
                Input::Held => Ok(Acquire::Held(record(OTHER, 1, 1))),
                Input::Lost => Err(Error::unavailable("acquire", "no answer")),
                Input::Advance(millis) => {
                    now = now.plus(Duration::from_millis(millis));
                    continue;
                }
                Input::Vacant | Input::Changed(..) | Input::Back if sent_at.is_some() => continue,
                Input::Vacant => { candidate.watched(now, &VACANT); continue }
                Input::Changed(attempt, revision) => {
                    candidate.watched(now, &changed(AttemptId::from_u128(attempt), revision));
                    continue;
                }
                Input::Back => { candidate.watched(now, &Watched::Back); continue }
            };
            let Some(sent) = sent_at.take() else { continue };
            let in_time = now < sent.plus(TTL - TTL / 10);
            match candidate.answered(sent, now, answer, |_| Ok(())) {
                Verdict::Won(_) => {
                    prop_assert!(in_time);
                    return Ok(());
                }
                Verdict::TooLate(_) => {
                    prop_assert!(!in_time);
                    next_attempt += 1;
                    candidate.begin_again(now, AttemptId::from_u128(next_attempt));
                }
                Verdict::GoOn => prop_assert_eq!(candidate.attempt(), attempt),
                other => prop_assert!(false, "{:?}", other),
            }
            // A pause after each answer, and never a long one: the net holds.
            prop_assert!(candidate.try_at() > now);
            prop_assert!(candidate.try_at().since(now) <= Duration::from_millis(2_200));
        }
    }
}
