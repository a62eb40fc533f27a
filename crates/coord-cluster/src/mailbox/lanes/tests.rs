//! The lanes against hosts that remember what they have seen, over a network that loses and delays.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::mailbox::SenderRun;
use crate::mailbox::seen::{Check, Seen};

const SHARD: ShardId = ShardId::new(3);
const SECOND: Duration = Duration::from_secs(1);

fn at(milliseconds: u64) -> Moment {
    Moment::from_origin(Duration::from_millis(milliseconds))
}

fn target(run: u128, epoch: u64) -> Target {
    Target {
        run: Incarnation::from_u128(run),
        address: Address::new(format!("127.0.0.1:{run}")).expect("address"),
        uid: TableUid::from_u128(1),
        epoch: Epoch::new(epoch),
    }
}

fn to(run: u128, epoch: u64) -> Route {
    Route::To(target(run, epoch))
}

fn lanes(lane_max: usize, bytes_max: usize) -> Lanes<u64> {
    Lanes::new(MailboxLimits::default().with_lane_max(lane_max).with_bytes_max(bytes_max))
}

fn push(lanes: &mut Lanes<u64>, waiter: u64) -> Result<Taken, Full> {
    lanes.push(SHARD, Bytes::from_static(b"1234"), at(60_000), waiter)
}

/// The message that goes out now, and to which run.
#[track_caller]
fn sent(lanes: &mut Lanes<u64>, route: &Route, now: Moment) -> (Number, u128) {
    match lanes.next(SHARD, route, now) {
        Step::Send { number, target, .. } => (number, target.run.as_u128()),
        step => panic!("nothing is sent: {step:?}"),
    }
}

#[test]
fn a_message_waits_for_an_owner_and_for_the_end_of_a_move() {
    let mut lanes = lanes(10, 100);
    assert!(push(&mut lanes, 1).expect("room").is_first);
    assert!(!push(&mut lanes, 2).expect("room").is_first);
    assert_eq!(lanes.next(SHARD, &Route::Nowhere, at(0)), Step::Wait(None));
    assert_eq!(lanes.next(SHARD, &Route::Moving(target(7, 1)), at(0)), Step::Wait(None));
    assert_eq!(sent(&mut lanes, &to(8, 2), at(0)), (1, 8));
    let answer = Bytes::from_static(b"yes");
    let told = lanes.on_outcome(SHARD, 1, Outcome::Answered(answer.clone()), at(1));
    assert_eq!(told, Some((1, Ending::Answered(answer.clone()))));
    assert_eq!(sent(&mut lanes, &to(8, 2), at(1)), (2, 8));
    assert!(lanes.on_outcome(SHARD, 2, Outcome::Answered(answer), at(2)).is_some());
    assert_eq!(lanes.next(SHARD, &to(8, 2), at(2)), Step::Idle);
    assert!(push(&mut lanes, 3).expect("room").is_first, "the lane is driven anew");
}

#[test]
fn not_here_goes_back_to_the_front_and_another_owner_ends_the_pause() {
    let mut lanes = lanes(10, 100);
    for waiter in [1, 2] {
        push(&mut lanes, waiter).expect("room");
    }
    let mut now = at(0);
    for pause in [2, 4, 8, 16, 32, 64, 100, 100] {
        assert_eq!(sent(&mut lanes, &to(7, 1), now), (1, 7));
        assert_eq!(lanes.on_outcome(SHARD, 1, Outcome::NotHere, now), None);
        let until = now.plus(Duration::from_millis(pause));
        assert_eq!(lanes.next(SHARD, &to(7, 1), now), Step::Wait(Some(until)));
        now = until;
    }
    assert_eq!(sent(&mut lanes, &to(7, 1), now), (1, 7));
    assert_eq!(lanes.on_outcome(SHARD, 1, Outcome::NotSent, now), None);
    assert_eq!(sent(&mut lanes, &to(8, 2), now), (1, 8));
}

#[test]
fn a_lost_answer_is_asked_about_at_the_same_run_only() {
    let lost = || Outcome::Lost("broken".to_owned());
    let mut one = lanes(10, 100);
    push(&mut one, 1).expect("room");
    push(&mut one, 2).expect("room");
    assert_eq!(sent(&mut one, &to(7, 1), at(0)), (1, 7));
    assert_eq!(one.on_outcome(SHARD, 1, lost(), at(0)), None);
    assert_eq!(one.withdraw(SHARD, 1), Withdrawn::InFlight);
    // Also while the shard is leaving, and when it can't be reached for a while.
    assert_eq!(sent(&mut one, &Route::Moving(target(7, 1)), at(2)), (1, 7));
    assert_eq!(one.on_outcome(SHARD, 1, Outcome::NotSent, at(2)), None);
    assert_eq!(sent(&mut one, &to(7, 1), at(6)), (1, 7));
    assert_eq!(one.on_outcome(SHARD, 1, lost(), at(6)), None);
    let unknown = Ending::Unknown("broken".to_owned());
    assert_eq!(one.next(SHARD, &to(8, 2), at(6)), Step::Tell(1, unknown.clone()));
    assert_eq!(sent(&mut one, &to(8, 2), at(6)), (2, 8));
    // The run is there and does not have it: it may have had it.
    assert_eq!(one.on_outcome(SHARD, 2, lost(), at(6)), None);
    assert_eq!(sent(&mut one, &to(8, 2), at(8)), (2, 8));
    assert_eq!(one.on_outcome(SHARD, 2, Outcome::NotHere, at(8)), Some((2, unknown)));
}

#[test]
fn what_is_withdrawn_is_not_sent_and_what_is_late_is_unknown() {
    let mut lanes = lanes(10, 100);
    for waiter in [1, 2, 3] {
        push(&mut lanes, waiter).expect("room");
    }
    assert_eq!(lanes.withdraw(SHARD, 2), Withdrawn::Waited);
    assert_eq!(lanes.withdraw(SHARD, 2), Withdrawn::Told);
    assert_eq!(sent(&mut lanes, &to(7, 1), at(0)), (1, 7));
    let told = lanes.on_outcome(SHARD, 1, Outcome::Late, at(60_000));
    assert!(matches!(told, Some((1, Ending::Unknown(_)))), "{told:?}");
    assert_eq!(sent(&mut lanes, &to(7, 1), at(60_000)), (3, 7));
    assert_eq!(lanes.on_outcome(SHARD, 1, Outcome::NotHere, at(60_000)), None, "told already");
}

#[test]
fn the_buffer_has_two_bounds_and_a_closed_one_takes_nothing() {
    let mut few = lanes(2, 100);
    assert!(push(&mut few, 1).is_ok() && push(&mut few, 2).is_ok());
    assert_eq!(push(&mut few, 3), Err(Full::Buffer { waiting: 2, bytes: 8 }));
    assert_eq!(sent(&mut few, &to(7, 1), at(0)).0, 1);
    assert_eq!(push(&mut few, 3), Err(Full::Buffer { waiting: 2, bytes: 8 }), "one is in flight");
    few.close();
    assert_eq!(push(&mut few, 3), Err(Full::Closed));
    let answered = Outcome::Answered(Bytes::new());
    assert!(few.on_outcome(SHARD, 1, answered, at(0)).is_some());
    assert_eq!(few.next(SHARD, &to(7, 1), at(0)), Step::Tell(2, Ending::Closed));
    assert_eq!(few.next(SHARD, &to(7, 1), at(0)), Step::Idle);
    assert_eq!(few.bytes, 0);
    let mut small = lanes(10, 10);
    assert!(push(&mut small, 1).is_ok() && push(&mut small, 2).is_ok());
    assert_eq!(push(&mut small, 3), Err(Full::Buffer { waiting: 2, bytes: 8 }));
}

/// What befalls one attempt.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Arrives,
    /// It is handled, and its answer lost.
    AnswerLost,
    NotSent,
    /// It gets lost on the way.
    Lost,
    /// The connection breaks, and it arrives at some later time.
    Delayed,
    /// The caller's time passes while it is handled.
    Late,
}

#[derive(Clone, Copy, Debug)]
enum Act {
    Push,
    Drive(Fate),
    Withdraw(usize),
    /// What was delayed longest arrives.
    Arrive,
    /// Its host stops it; then the map names another, or the same; then that one starts.
    Stop,
    Assign(u128),
    Start,
    Advance,
}

fn act() -> impl Strategy<Value = Act> {
    let fate = prop_oneof![
        4 => Just(Fate::Arrives),
        1 => Just(Fate::AnswerLost),
        1 => Just(Fate::NotSent),
        1 => Just(Fate::Lost),
        1 => Just(Fate::Delayed),
        1 => Just(Fate::Late),
    ];
    prop_oneof![
        4 => Just(Act::Push),
        8 => fate.prop_map(Act::Drive),
        1 => (0_usize..5).prop_map(Act::Withdraw),
        2 => Just(Act::Arrive),
        1 => Just(Act::Stop),
        1 => (1_u128..4).prop_map(Act::Assign),
        2 => Just(Act::Start),
        4 => Just(Act::Advance),
    ]
}

/// Three hosts, of which one at a time hosts the shard.
struct World {
    seen: BTreeMap<u128, Seen>,
    owner: (u128, u64),
    /// The run that hosts it, and the epoch under which it began to.
    hosted: Option<(u128, u64)>,
    handled: Vec<Number>,
    delayed: Vec<(Target, Number)>,
    now: Moment,
}

impl World {
    fn new() -> Self {
        let seen = (1..4).map(|run| (run, Seen::new(1_000))).collect();
        let (owner, hosted) = ((1, 1), Some((1, 1)));
        Self { seen, owner, hosted, handled: Vec::new(), delayed: Vec::new(), now: at(0) }
    }

    fn route(&self) -> Route {
        to(self.owner.0, self.owner.1)
    }

    fn arrive(&mut self, target: &Target, number: Number) -> Outcome {
        let (run, epoch) = (target.run.as_u128(), target.epoch.get());
        let seen = self.seen.get_mut(&run).expect("one of three");
        match seen.check(SenderRun(9), SHARD, number) {
            Check::Answered(answer) => return Outcome::Answered(answer),
            Check::Unanswered | Check::Late => return Outcome::Failed("seen".to_owned()),
            Check::New => {}
        }
        if self.hosted.is_none_or(|(host, since)| host != run || epoch < since) {
            return Outcome::NotHere;
        }
        seen.begin(SenderRun(9), SHARD, number, self.now);
        let answer = Bytes::from(number.to_string());
        seen.answered(SenderRun(9), SHARD, number, answer.clone());
        self.handled.push(number);
        Outcome::Answered(answer)
    }
}

/// What the callers were told.
#[derive(Default)]
struct Callers {
    waiting: BTreeSet<Number>,
    answered: BTreeSet<Number>,
    never: BTreeSet<Number>,
}

impl Callers {
    fn told(&mut self, number: Number, ending: &Ending) -> Result<(), TestCaseError> {
        prop_assert!(self.waiting.remove(&number), "{number} was told twice");
        match ending {
            Ending::Answered(answer) => {
                prop_assert_eq!(answer, &Bytes::from(number.to_string()));
                self.answered.insert(number);
            }
            Ending::Closed => drop(self.never.insert(number)),
            Ending::Unknown(_) => {}
        }
        Ok(())
    }
}

fn drive(
    lanes: &mut Lanes<u64>,
    world: &mut World,
    callers: &mut Callers,
    fate: Fate,
) -> Result<bool, TestCaseError> {
    let route = world.route();
    match lanes.next(SHARD, &route, world.now) {
        Step::Idle => return Ok(false),
        Step::Wait(until) => prop_assert!(until.is_none_or(|until| until > world.now)),
        Step::Tell(number, ending) => callers.told(number, &ending)?,
        Step::Send { number, target, .. } => {
            let lost = || Outcome::Lost("lost".to_owned());
            let outcome = match fate {
                Fate::Arrives => world.arrive(&target, number),
                Fate::AnswerLost => {
                    world.arrive(&target, number);
                    lost()
                }
                Fate::NotSent => Outcome::NotSent,
                Fate::Lost => lost(),
                Fate::Delayed => {
                    world.delayed.push((target, number));
                    lost()
                }
                Fate::Late => {
                    world.arrive(&target, number);
                    Outcome::Late
                }
            };
            if let Some((number, ending)) = lanes.on_outcome(SHARD, number, outcome, world.now) {
                callers.told(number, &ending)?;
            }
        }
    }
    Ok(true)
}

proptest! {
    #[test]
    fn in_order_at_most_once_bounded_and_nothing_is_forgotten(
        acts in prop::collection::vec(act(), 1..200),
        lane_max in 1_usize..6,
    ) {
        let mut lanes = lanes(lane_max, 1_000);
        let (mut world, mut callers) = (World::new(), Callers::default());
        let mut last = 0;
        for act in acts {
            match act {
                Act::Push => {
                    let waiter = last + 1;
                    let payload = Bytes::from_static(b"1234");
                    match lanes.push(SHARD, payload, at(u64::MAX / 4), waiter) {
                        Ok(taken) => {
                            prop_assert_eq!(taken.number, waiter);
                            last = waiter;
                            callers.waiting.insert(waiter);
                        }
                        Err(full) => {
                            let waiting = callers.waiting.len();
                            prop_assert_eq!(full, Full::Buffer { waiting, bytes: 4 * waiting });
                            prop_assert_eq!(waiting, lane_max);
                        }
                    }
                }
                Act::Drive(fate) => drop(drive(&mut lanes, &mut world, &mut callers, fate)?),
                Act::Withdraw(which) => {
                    let Some(&number) = callers.waiting.iter().nth(which) else { continue };
                    match lanes.withdraw(SHARD, number) {
                        Withdrawn::Waited => {
                            callers.waiting.remove(&number);
                            callers.never.insert(number);
                        }
                        Withdrawn::InFlight => {}
                        Withdrawn::Told => prop_assert!(false, "{} waits", number),
                    }
                }
                Act::Arrive => {
                    if !world.delayed.is_empty() {
                        let (target, number) = world.delayed.remove(0);
                        world.arrive(&target, number);
                    }
                }
                Act::Stop => world.hosted = None,
                Act::Assign(run) if world.hosted.is_none() => {
                    world.owner = (run, world.owner.1 + 1);
                }
                Act::Start if world.hosted.is_none() => world.hosted = Some(world.owner),
                Act::Assign(_) | Act::Start => {}
                Act::Advance => world.now = world.now.plus(Duration::from_millis(30)),
            }
            prop_assert!(callers.waiting.len() <= lane_max);
            prop_assert!(world.handled.is_sorted_by(|one, next| one < next), "{:?}", world.handled);
            let handled: BTreeSet<Number> = world.handled.iter().copied().collect();
            prop_assert!(callers.answered.is_subset(&handled));
            prop_assert!(callers.never.is_disjoint(&handled));
        }
        // All is well again: everybody who waits is told.
        world.hosted.get_or_insert(world.owner);
        let mut turns = 0;
        while drive(&mut lanes, &mut world, &mut callers, Fate::Arrives)? {
            world.now = world.now.plus(SECOND);
            turns += 1;
            prop_assert!(turns < 1_000);
        }
        prop_assert!(callers.waiting.is_empty());
        prop_assert_eq!(lanes.bytes, 0);
        let handled: BTreeSet<Number> = world.handled.iter().copied().collect();
        prop_assert!(world.handled.is_sorted_by(|one, next| one < next), "{:?}", world.handled);
        prop_assert!(callers.never.is_disjoint(&handled));
    }
}
