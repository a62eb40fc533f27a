//! The machine alone: when it stops, aborts, rests and gives up.

use coord_core::ErrorKind;

use super::machine::{JobEnd, Machine, Phase, Times, Turn};
use super::*;

const BUDGET: Duration = Duration::from_secs(2);
const START_WITHIN: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

fn at(seconds: u64) -> Moment {
    Moment::from_origin(Duration::from_secs(seconds))
}

fn machine() -> Machine {
    Machine::new(Times {
        stop_budget: BUDGET,
        start_within: START_WITHIN,
        restart_pause: PAUSE,
        restart_pause_max: PAUSE_MAX,
    })
}

/// A job that was started at this moment.
fn begun(machine: &mut Machine, now: Moment) {
    assert!(matches!(machine.next(now, at(0)), Turn::Acquire));
    machine.on_acquired();
    assert!(matches!(machine.next(now, now.plus(BUDGET * 2)), Turn::Begin));
}

/// The lease is released, and what comes then.
fn released(machine: &mut Machine, now: Moment) -> Turn {
    assert!(matches!(machine.next(now, at(0)), Turn::Release));
    machine.on_released(now);
    machine.next(now, at(0))
}

#[test]
fn a_job_is_told_before_the_deadline_and_dropped_at_it() {
    let mut machine = machine();
    begun(&mut machine, at(100));
    machine.on_seen();
    let deadline = at(127);
    assert!(matches!(machine.next(at(100), deadline), Turn::Wait(Some(until)) if until == at(125)));
    // A renewal moved the deadline meanwhile.
    assert!(matches!(machine.next(at(125), at(130)), Turn::Wait(Some(until)) if until == at(128)));
    assert!(matches!(machine.next(at(128), at(130)), Turn::Cancel));
    // Another one comes too late for a job that was told: it has no longer than it was promised.
    assert!(matches!(machine.next(at(129), at(140)), Turn::Wait(Some(until)) if until == at(130)));
    assert!(matches!(machine.next(at(130), at(140)), Turn::Abort));
    // Nothing but the end of the job lets go of the lease.
    assert!(matches!(machine.next(at(500), at(0)), Turn::Wait(None)));
    machine.on_job_end(JobEnd::Gone, at(501));
    assert!(matches!(released(&mut machine, at(501)), Turn::Acquire));
}

#[test]
fn a_lease_that_is_gone_at_once_leaves_no_time() {
    let mut machine = machine();
    begun(&mut machine, at(100));
    machine.on_seen();
    assert!(matches!(machine.next(at(101), at(0)), Turn::Cancel));
    assert!(matches!(machine.next(at(101), at(0)), Turn::Abort));
}

#[test]
fn what_is_held_while_nothing_runs_is_given_up() {
    // Its runtime does not run it.
    let mut machine = machine();
    begun(&mut machine, at(100));
    let begun_by = at(110);
    assert!(matches!(machine.next(at(100), at(127)), Turn::Wait(Some(u)) if u == begun_by));
    assert!(matches!(machine.next(begun_by, at(137)), Turn::Cancel));
    assert!(matches!(machine.next(begun_by, at(137)), Turn::Abort));
    machine.on_job_end(JobEnd::Gone, at(110));
    assert!(matches!(released(&mut machine, at(110)), Turn::Wait(Some(until)) if until == at(111)));
    let never = Some(Failure::NeverStarted);
    assert!(matches!(machine.phase(), Phase::Resting { failure, .. }
        if failure.as_ref().map(Failure::as_str) == never.as_ref().map(Failure::as_str)));

    // Its task is gone.
    begun(&mut machine, at(111));
    machine.on_seen();
    machine.on_job_end(JobEnd::Gone, at(115));
    assert!(matches!(released(&mut machine, at(115)), Turn::Wait(Some(until)) if until == at(117)));
    let failure = |machine: &Machine| match machine.phase() {
        Phase::Resting { failure: Some(failure), .. } => failure.as_str(),
        other => panic!("it rests: {other:?}"),
    };
    assert_eq!(failure(&machine), "gone");
}

#[test]
fn the_pause_doubles_up_to_its_most_and_begins_anew_after_a_long_run() {
    let mut machine = machine();
    let mut now = at(100);
    let mut fail_after = |run: Duration| {
        begun(&mut machine, now);
        machine.on_seen();
        now = now.plus(run);
        machine.on_job_end(JobEnd::Panicked("test".to_owned()), now);
        let Turn::Wait(Some(until)) = released(&mut machine, now) else { panic!("it rests") };
        let pause = until.since(now);
        now = until;
        pause.as_secs()
    };
    let pauses: Vec<u64> = (0..8).map(|_| fail_after(PAUSE)).collect();
    assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
    assert_eq!(fail_after(PAUSE_MAX), 1);
    assert_eq!(fail_after(PAUSE), 2);
    begun(&mut machine, now);
    machine.on_job_end(JobEnd::Returned(Next::Again), now);
    let rests = released(&mut machine, now);
    assert!(matches!(rests, Turn::Wait(Some(until)) if until == now.plus(PAUSE)), "{rests:?}");
}

#[test]
fn what_a_job_says_counts_unless_it_was_told_to_stop() {
    let mut done = machine();
    begun(&mut done, at(100));
    done.on_job_end(JobEnd::Returned(Next::Done), at(101));
    assert!(matches!(released(&mut done, at(101)), Turn::End(Ended::Done)));

    let mut told = machine();
    begun(&mut told, at(100));
    told.on_seen();
    assert!(matches!(told.next(at(125), at(127)), Turn::Cancel));
    told.on_job_end(JobEnd::Returned(Next::Done), at(126));
    assert!(matches!(released(&mut told, at(126)), Turn::Acquire), "it waits for its next turn");

    let mut stopped = machine();
    begun(&mut stopped, at(100));
    stopped.on_stop();
    assert!(matches!(stopped.next(at(101), at(127)), Turn::Cancel));
    assert!(matches!(stopped.next(at(101), at(127)), Turn::Wait(Some(until)) if until == at(103)));
    stopped.on_job_end(JobEnd::Returned(Next::Again), at(102));
    assert!(matches!(released(&mut stopped, at(102)), Turn::End(Ended::Stopped)));
}

#[test]
fn one_that_is_stopped_in_between_starts_nothing() {
    let mut waiting = machine();
    waiting.on_stop();
    assert!(matches!(waiting.next(at(100), at(0)), Turn::End(Ended::Stopped)));
    let mut held = machine();
    assert!(matches!(held.next(at(100), at(0)), Turn::Acquire));
    held.on_acquired();
    held.on_stop();
    assert!(matches!(released(&mut held, at(100)), Turn::End(Ended::Stopped)));
}

#[test]
fn a_refusal_that_may_get_well_is_tried_again() {
    let refused = |kind| {
        let mut machine = machine();
        machine.on_refused(Error::new(kind, "acquire").effect_none(), at(100));
        machine.next(at(100), at(0))
    };
    assert!(matches!(refused(ErrorKind::Denied), Turn::Wait(Some(until)) if until == at(101)));
    assert!(matches!(refused(ErrorKind::Closed), Turn::End(Ended::Failed(_))));
}
