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
fn an_answer_for_another_attempt_or_lease_is_corrupt_and_not_used() {
    let (mut candidate, now) = candidate(Patience::WaitsItsTurn, 1);
    let answer = Ok(Acquire::Acquired(grant(OTHER, 1, 1)));
    let verdict = candidate.answered(now, now, answer, |_| Ok(()));
    assert!(matches!(verdict, Verdict::Failed(error) if error.kind() == ErrorKind::Corrupt));
}

#[test]
fn a_granted_ttl_that_the_margin_uses_up_is_refused() {
    let (mut candidate, now) = candidate(Patience::WaitsItsTurn, 1);
    let (renew_every, request_timeout, retry_every) = (None, None, None);
    let margin = Some(Duration::from_secs(2));
    let asked = Asked { ttl: TTL, margin, renew_every, request_timeout, retry_every };
    candidate.timing = Timing::new(&asked).expect("times");
    let mut short = grant(OWN, 1, 1);
    short.ttl = Ttl::MIN;
    let verdict = candidate.answered(now, now, Ok(Acquire::Acquired(short)), |_| Ok(()));
    assert!(matches!(verdict, Verdict::Refused(_, error) if error.kind() == ErrorKind::Invalid));
}

#[test]
fn its_own_grant_in_the_watch_and_the_end_of_an_outage_wake_it() {
    let (mut candidate, now) = candidate(Patience::WaitsItsTurn, 1);
    held(&mut candidate, now, 1);
    candidate.watched(now, &Watched::Reconnected);
    assert!(candidate.try_at().since(now) <= Duration::from_millis(500));
    candidate.watched(now, &changed(OWN, 2));
    assert_eq!(candidate.try_at(), now);
}

#[test]
fn what_an_operator_must_mend_fails_at_once() {
    for kind in [ErrorKind::Denied, ErrorKind::Misconfigured, ErrorKind::Closed] {
        let (mut candidate, now) = candidate(Patience::WaitsItsTurn, 1);
        let verdict = candidate.answered(
            now,
            now,
            Err(Error::new(kind, "acquire").effect_none()),
            |_| Ok(()),
        );
        assert!(matches!(verdict, Verdict::Failed(error) if error.kind() == kind));
        assert!(!candidate.maybe_granted());
    }
}

#[test]
fn one_that_was_answered_goes_on_slowly_after_a_denial() {
    let denied = || Err(Error::new(ErrorKind::Denied, "acquire"));
    let (mut candidate, mut now) = candidate(Patience::WaitsItsTurn, 1);
    held(&mut candidate, now, 1);
    let mut pauses = Vec::new();
    for _ in 0..20 {
        assert!(matches!(candidate.answered(now, now, denied(), |_| Ok(())), Verdict::GoOn));
        pauses.push(candidate.try_at().since(now));
        now = candidate.try_at();
    }
    assert!(pauses[0] <= Duration::from_millis(2_200), "{pauses:?}");
    assert!(pauses[19] >= OPERATOR_PAUSE - OPERATOR_PAUSE / 10, "{pauses:?}");
    assert!(pauses.iter().all(|pause| *pause <= OPERATOR_PAUSE * 11 / 10), "{pauses:?}");
    // An answer ends it.
    held(&mut candidate, now, 2);
    assert!(matches!(candidate.answered(now, now, denied(), |_| Ok(())), Verdict::GoOn));
    assert!(candidate.try_at().since(now) <= Duration::from_millis(2_200));
    // What time does not mend ends it all the same.
    let closed = Err(Error::new(ErrorKind::Closed, "acquire"));
    assert!(matches!(candidate.answered(now, now, closed, |_| Ok(())), Verdict::Failed(_)));
}

#[test]
fn a_lease_that_is_watched_is_tried_once_a_ttl() {
    let (mut candidate, now) = candidate(Patience::WaitsItsTurn, 1);
    held(&mut candidate, now, 1);
    assert!(candidate.try_at().since(now) <= Duration::from_millis(2_200));
    candidate.watched(now, &changed(OTHER, 1));
    assert!(candidate.try_at().since(now) >= Duration::from_secs(9));
    held(&mut candidate, now, 1);
    assert!(candidate.try_at().since(now) >= Duration::from_secs(9));
    // A watch that fails shows nothing any more, and one that told a vacancy may have been early.
    let away = Watched::Disconnected(Error::unavailable("watch", "cut"));
    candidate.watched(now, &away);
    assert!(candidate.try_at().since(now) <= Duration::from_millis(2_200));
    candidate.watched(now, &changed(OTHER, 2));
    candidate.watched(now, &VACANT);
    held(&mut candidate, now, 2);
    assert!(candidate.try_at().since(now) <= Duration::from_millis(2_200));
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
                Input::Back => { candidate.watched(now, &Watched::Reconnected); continue }
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
            let most = if candidate.is_watched { TTL } else { TTL / 5 };
            prop_assert!(candidate.try_at().since(now) <= most * 11 / 10);
        }
    }
}

#[test]
fn what_the_watch_tells_counts_as_an_answer_and_an_outage_does_not() {
    let away = || Watched::Disconnected(Error::unavailable("watch", "cut"));
    let goes_on = |told: &[Watched<LeaseEvent>]| {
        let (mut candidate, now) = candidate(Patience::WaitsItsTurn, 1);
        told.iter().for_each(|told| candidate.watched(now, told));
        let denied = Err(Error::new(ErrorKind::Denied, "acquire"));
        matches!(candidate.answered(now, now, denied, |_| Ok(())), Verdict::GoOn)
    };
    assert!(goes_on(&[VACANT]));
    assert!(goes_on(&[changed(OTHER, 1), away()]));
    assert!(!goes_on(&[away()]));
}

#[test]
fn silence_tells_of_an_expiry_only_after_nine_tenths_of_the_ttl() {
    let ran_out = |silent: Duration, renews: bool| {
        let (mut candidate, now) = candidate(Patience::WaitsItsTurn, 1);
        candidate.watched(now, &changed(OTHER, 1));
        let last = if renews { now.plus(TTL) } else { now };
        if renews {
            candidate.watched(last, &changed(OTHER, 2));
        }
        candidate.ran_out(last.plus(silent))
    };
    let most = TTL - TTL / 10;
    assert!(ran_out(most, true));
    assert!(!ran_out(most - Duration::from_nanos(1), true));
    // Where renewals don't show, silence says nothing.
    assert!(!ran_out(TTL * 2, false));
}

#[test]
fn a_renewal_that_only_a_try_found_is_none_that_the_watch_shows() {
    for seed in 0..200 {
        let (mut candidate, now) = candidate(Patience::WaitsItsTurn, seed);
        candidate.watched(now, &changed(OTHER, 1));
        held(&mut candidate, now.plus(TTL), 4);
        let now = now.plus(TTL * 2);
        candidate.watched(now, &VACANT);
        assert!(candidate.try_at().since(now) <= Duration::from_millis(30), "it was released");
    }
}

#[test]
fn another_holder_is_news_and_has_shown_no_renewal() {
    let (mut candidate, now) = candidate(Patience::WaitsItsTurn, 1);
    candidate.watched(now, &changed(OTHER, 1));
    let later = now.plus(TTL / 2);
    candidate.watched(later, &changed(AttemptId::from_u128(3), 2));
    assert!(candidate.try_at() >= later.plus(TTL - TTL / 10), "it waits again");
    assert!(!candidate.ran_out(later.plus(TTL * 2)));
}
