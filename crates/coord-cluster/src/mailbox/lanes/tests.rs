//! The lanes against hosts that remember what they have seen, over a network that loses and delays.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::mailbox::SenderRun;
use crate::mailbox::envelope::Answer;
use crate::mailbox::seen::{Check, Seen};

const SHARD: ShardId = ShardId::new(3);
const SECOND: Duration = Duration::from_secs(1);

fn at(milliseconds: u64) -> Moment {
    Moment::from_origin(Duration::from_millis(milliseconds))
}

fn target(run: u128, epoch: u64) -> Target {
    Target {
        node: NodeId::new(format!("n{run}")).expect("name"),
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

/// What goes out now: the attempt, its messages, and to which run.
#[track_caller]
fn sent(lanes: &mut Lanes<u64>, route: &Route, now: Moment) -> (Attempt, Vec<Number>, u128) {
    match lanes.next(SHARD, route, now) {
        Step::Send { attempt, target, messages, .. } => {
            let numbers = messages.iter().map(|message| message.number).collect();
            (attempt, numbers, target.run.as_u128())
        }
        step => panic!("nothing is sent: {step:?}"),
    }
}

fn yes(count: usize) -> Vec<Said> {
    vec![Said::Answered(Bytes::from_static(b"yes")); count]
}

fn answered(waiter: u64) -> (u64, Ending) {
    (waiter, Ending::Answered(Bytes::from_static(b"yes")))
}

fn not_here() -> Outcome {
    Outcome::Taken(Vec::new(), Rest::NotHere)
}

#[test]
fn a_message_waits_for_an_owner_and_for_the_end_of_a_move() {
    let mut lanes = lanes(10, 100);
    assert!(push(&mut lanes, 1).expect("room").is_first);
    assert!(!push(&mut lanes, 2).expect("room").is_first);
    assert_eq!(lanes.next(SHARD, &Route::Nowhere, at(0)), Step::Wait(None));
    assert_eq!(lanes.next(SHARD, &Route::Moving(target(7, 1)), at(0)), Step::Wait(None));
    assert_eq!(sent(&mut lanes, &to(8, 2), at(0)), (1, vec![1], 8));
    let all = |count| Outcome::Taken(yes(count), Rest::Later);
    assert_eq!(lanes.on_outcome(SHARD, 1, all(1), at(1)), [answered(1)]);
    assert_eq!(sent(&mut lanes, &to(8, 2), at(1)), (2, vec![2], 8));
    assert_eq!(lanes.on_outcome(SHARD, 2, all(1), at(2)), [answered(2)]);
    assert_eq!(lanes.next(SHARD, &to(8, 2), at(2)), Step::Idle);
    assert!(push(&mut lanes, 3).expect("room").is_first, "the lane is driven anew");
}

#[test]
fn whoever_asks_an_owner_that_is_somebody_else_is_told_at_once() {
    let mut lanes = lanes(10, 100);
    for waiter in 1..=3 {
        push(&mut lanes, waiter).expect("room");
    }
    let elsewhere = || Outcome::Misdirected("it is n2".to_owned());
    let told = |waiter| (waiter, Ending::Misdirected("it is n2".to_owned()));
    assert_eq!(sent(&mut lanes, &to(7, 1), at(0)), (1, vec![1], 7));
    assert_eq!(lanes.on_outcome(SHARD, 1, elsewhere(), at(0)), [told(1)]);
    assert_eq!(sent(&mut lanes, &to(7, 1), at(0)), (2, vec![2], 7), "without a pause");
    assert_eq!(lanes.on_outcome(SHARD, 2, elsewhere(), at(0)), [told(2)]);
    // One that may have been handled is asked about until its owner is another.
    let (attempt, ..) = sent(&mut lanes, &to(7, 1), at(0));
    assert_eq!(lanes.on_outcome(SHARD, attempt, Outcome::Lost("lost".to_owned()), at(0)), []);
    let (attempt, ..) = sent(&mut lanes, &to(7, 1), at(10));
    assert_eq!(lanes.on_outcome(SHARD, attempt, elsewhere(), at(10)), []);
    let lost = Step::Tell(3, Ending::Unknown("lost".to_owned()));
    assert_eq!(lanes.next(SHARD, &to(8, 2), at(10)), lost);
    assert_eq!((lanes.next(SHARD, &to(8, 2), at(10)), lanes.bytes), (Step::Idle, 0));
}

#[test]
fn what_nobody_looked_at_is_certain_unless_an_earlier_attempt_may_arrive() {
    let mut lanes = lanes(10, 100);
    push(&mut lanes, 1).expect("room");
    let (attempt, ..) = sent(&mut lanes, &to(7, 1), at(0));
    assert_eq!(lanes.on_outcome(SHARD, attempt, Answer::Unread.into(), at(0)), []);
    let (attempt, numbers, run) = sent(&mut lanes, &to(8, 2), at(0));
    assert_eq!((numbers, run), (vec![1], 8), "it goes to the next owner");
    assert_eq!(lanes.on_outcome(SHARD, attempt, Outcome::Lost("lost".to_owned()), at(0)), []);
    let (attempt, ..) = sent(&mut lanes, &to(8, 2), at(10));
    assert_eq!(lanes.on_outcome(SHARD, attempt, Answer::Unread.into(), at(10)), []);
    let lost = Step::Tell(1, Ending::Unknown("lost".to_owned()));
    assert_eq!(lanes.next(SHARD, &to(7, 3), at(10)), lost, "the lost one may be handled yet");
}

#[test]
fn a_lost_message_is_told_once_its_table_was_made_anew_and_holds_up_no_other() {
    let mut lanes = lanes(10, 100);
    for waiter in 1..=2 {
        push(&mut lanes, waiter).expect("room");
    }
    let (attempt, ..) = sent(&mut lanes, &to(7, 1), at(0));
    assert_eq!(lanes.on_outcome(SHARD, attempt, Outcome::Lost("lost".to_owned()), at(0)), []);
    // The same incarnation owns the shard of the new table, and never looks at what was for the old one.
    let anew = Route::To(Target { uid: TableUid::from_u128(2), ..target(7, 1) });
    let lost = Step::Tell(1, Ending::Unknown("lost".to_owned()));
    assert_eq!(lanes.next(SHARD, &anew, at(10)), lost);
    assert_eq!(sent(&mut lanes, &anew, at(10)).1, [2]);
}

#[test]
fn a_flight_grows_while_all_of_it_is_taken_and_shrinks_to_what_was() {
    let mut lanes = lanes(1_000, 10_000);
    for waiter in 1..=200 {
        push(&mut lanes, waiter).expect("room");
    }
    let (mut first, mut attempts) = (1, 0);
    for count in [1, 2, 4, 8, 16, 32, 32] {
        attempts += 1;
        let numbers = (first..first + count).collect();
        assert_eq!(sent(&mut lanes, &to(7, 1), at(0)), (attempts, numbers, 7));
        let taken = Outcome::Taken(yes(usize::try_from(count).expect("few")), Rest::Later);
        let told = lanes.on_outcome(SHARD, attempts, taken, at(0));
        assert_eq!(told, (first..first + count).map(answered).collect::<Vec<_>>());
        first += count;
    }
    assert_eq!(sent(&mut lanes, &to(7, 1), at(0)).1.len(), 32);
    let told = lanes.on_outcome(SHARD, 8, Outcome::Taken(yes(3), Rest::Later), at(0));
    assert_eq!(told, (first..first + 3).map(answered).collect::<Vec<_>>());
    first += 3;
    // The others were not handled, so they may go to another owner, at once and in order.
    assert_eq!(sent(&mut lanes, &to(8, 2), at(0)), (9, vec![first, first + 1, first + 2], 8));
    assert_eq!(lanes.on_outcome(SHARD, 9, Outcome::NotSent, at(0)), []);
    assert_eq!(sent(&mut lanes, &to(9, 3), at(0)), (10, vec![first], 9), "one fits anywhere");
}

#[test]
fn a_flight_has_no_more_bytes_than_one_frame_takes() {
    let mut lanes: Lanes<u64> = Lanes::new(MailboxLimits::default());
    for (waiter, size) in [(1, 1), (2, 200_000), (3, 30_000), (4, 30_000), (5, 30_000)] {
        let taken = lanes.push(SHARD, Bytes::from(vec![7; size]), at(60_000), waiter);
        taken.expect("room");
    }
    for (attempt, numbers) in [(1, vec![1]), (2, vec![2]), (3, vec![3, 4]), (4, vec![5])] {
        let count = numbers.len();
        assert_eq!(sent(&mut lanes, &to(7, 1), at(0)), (attempt, numbers, 7));
        lanes.on_outcome(SHARD, attempt, Outcome::Taken(yes(count), Rest::Later), at(0));
    }
}

#[test]
fn not_here_goes_back_to_the_front_and_another_owner_ends_the_pause() {
    let mut lanes = lanes(10, 100);
    for waiter in [1, 2] {
        push(&mut lanes, waiter).expect("room");
    }
    let (mut now, mut attempt) = (at(0), 0);
    for pause in [2, 4, 8, 16, 32, 64, 100, 100] {
        attempt += 1;
        assert_eq!(sent(&mut lanes, &to(7, 1), now), (attempt, vec![1], 7));
        assert_eq!(lanes.on_outcome(SHARD, attempt, not_here(), now), []);
        let until = now.plus(Duration::from_millis(pause));
        assert_eq!(lanes.next(SHARD, &to(7, 1), now), Step::Wait(Some(until)));
        now = until;
    }
    assert_eq!(sent(&mut lanes, &to(7, 1), now), (9, vec![1], 7));
    assert_eq!(lanes.on_outcome(SHARD, 9, Outcome::NotSent, now), []);
    assert_eq!(sent(&mut lanes, &to(8, 2), now), (10, vec![1], 8));
}

/// Lanes with messages 1 to 4, of which the last three go out together, to run 7.
fn three() -> Lanes<u64> {
    let mut lanes = lanes(10, 100);
    for waiter in [1, 2, 3, 4] {
        push(&mut lanes, waiter).expect("room");
    }
    lanes.lanes.get_mut(&SHARD).expect("there").at_once = 3;
    assert_eq!(lanes.withdraw(SHARD, 1), Withdrawn::Waited);
    assert_eq!(sent(&mut lanes, &to(7, 1), at(0)), (1, vec![2, 3, 4], 7));
    lanes
}

#[test]
fn a_lost_answer_is_asked_about_at_the_same_run_only() {
    let lost = || Outcome::Lost("broken".to_owned());
    let unknown = |waiter: u64| (waiter, Ending::Unknown("broken".to_owned()));
    let mut one = three();
    assert_eq!(one.on_outcome(SHARD, 1, lost(), at(0)), []);
    assert_eq!(one.withdraw(SHARD, 3), Withdrawn::InFlight);
    // Also while the shard is leaving, and when it can't be reached for a while.
    let leaving = Route::Moving(target(7, 1));
    assert_eq!(sent(&mut one, &leaving, at(2)), (2, vec![2, 3, 4], 7));
    assert_eq!(one.on_outcome(SHARD, 1, lost(), at(2)), [], "that one is over");
    assert_eq!(one.on_outcome(SHARD, 2, Outcome::NotSent, at(2)), []);
    assert_eq!(sent(&mut one, &to(7, 1), at(6)), (3, vec![2, 3, 4], 7));
    assert_eq!(one.on_outcome(SHARD, 3, lost(), at(6)), []);
    for waiter in [2, 3, 4] {
        let (waiter, ending) = unknown(waiter);
        assert_eq!(one.next(SHARD, &to(8, 2), at(6)), Step::Tell(waiter, ending));
    }
    assert_eq!(one.next(SHARD, &to(8, 2), at(6)), Step::Idle);
    assert_eq!(one.bytes, 0);
    // What it refuses when it is asked again, no earlier attempt can hand over any more.
    for (rest, next) in [(Rest::Later, vec![3]), (Rest::NotHere, vec![3, 4])] {
        let mut one = three();
        assert_eq!(one.on_outcome(SHARD, 1, lost(), at(0)), []);
        assert_eq!(sent(&mut one, &to(7, 1), at(2)), (2, vec![2, 3, 4], 7));
        let some = Outcome::Taken(yes(1), rest);
        assert_eq!(one.on_outcome(SHARD, 2, some, at(2)), [answered(2)]);
        assert_eq!(sent(&mut one, &to(8, 2), at(2)), (3, next, 8));
    }
}

#[test]
fn what_is_withdrawn_is_not_sent_and_what_is_late_is_unknown() {
    let mut lanes = lanes(10, 100);
    for waiter in [1, 2, 3] {
        push(&mut lanes, waiter).expect("room");
    }
    assert_eq!(lanes.withdraw(SHARD, 2), Withdrawn::Waited);
    assert_eq!(lanes.withdraw(SHARD, 2), Withdrawn::Told);
    assert_eq!(sent(&mut lanes, &to(7, 1), at(0)), (1, vec![1], 7));
    let told = lanes.on_outcome(SHARD, 1, Outcome::Late, at(60_000));
    assert!(matches!(told[..], [(1, Ending::Unknown(_))]), "{told:?}");
    assert_eq!(lanes.on_outcome(SHARD, 1, not_here(), at(60_000)), [], "told already");
    // Nobody waits for it any more, whether or not its caller has looked.
    assert_eq!(lanes.next(SHARD, &to(7, 1), at(60_000)), Step::Tell(3, Ending::Late));
    assert_eq!((lanes.next(SHARD, &to(7, 1), at(60_000)), lanes.bytes), (Step::Idle, 0));
}

#[test]
fn each_of_a_lost_flight_has_its_own_time() {
    let mut lanes: Lanes<u64> = lanes(10, 100);
    for (waiter, deadline) in [(1, 60), (2, 30), (3, 90)] {
        lanes.push(SHARD, Bytes::new(), at(deadline), waiter).expect("room");
    }
    lanes.lanes.get_mut(&SHARD).expect("there").at_once = 3;
    let step = lanes.next(SHARD, &to(7, 1), at(0));
    assert!(matches!(step, Step::Send { deadline, .. } if deadline == at(90)), "{step:?}");
    assert_eq!(lanes.on_outcome(SHARD, 1, Outcome::Lost("broken".to_owned()), at(29)), []);
    let wait = lanes.next(SHARD, &to(7, 1), at(29));
    assert_eq!(wait, Step::Wait(Some(at(30))), "the second one's time is up before the pause");
    let told = lanes.next(SHARD, &to(7, 1), at(30));
    assert_eq!(told, Step::Tell(2, Ending::Unknown("broken".to_owned())));
    assert_eq!(sent(&mut lanes, &to(7, 1), at(31)), (2, vec![1, 3], 7));
}

#[test]
fn the_buffer_has_two_bounds_and_a_closed_one_takes_nothing() {
    let mut few = lanes(2, 100);
    assert!(push(&mut few, 1).is_ok() && push(&mut few, 2).is_ok());
    assert_eq!(push(&mut few, 3), Err(Full::Buffer { waiting: 2, bytes: 8 }));
    assert_eq!(sent(&mut few, &to(7, 1), at(0)).1, [1]);
    assert_eq!(push(&mut few, 3), Err(Full::Buffer { waiting: 2, bytes: 8 }), "one is in flight");
    few.close();
    assert_eq!(push(&mut few, 3), Err(Full::Closed));
    let taken = Outcome::Taken(yes(1), Rest::Later);
    assert_eq!(few.on_outcome(SHARD, 1, taken, at(0)), [answered(1)]);
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
    /// No more of it than so many is handed over.
    Arrives(usize),
    /// It arrives where nothing is known of what it names, unless it is hosted or was seen there.
    Unread,
    /// Somebody else is at the address.
    Misdirected,
    /// It is handled, or some of it, and the answer lost.
    AnswerLost(usize),
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
        4 => (1_usize..9).prop_map(Fate::Arrives),
        1 => Just(Fate::Unread),
        1 => Just(Fate::Misdirected),
        1 => (1_usize..9).prop_map(Fate::AnswerLost),
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

/// One attempt as it went out.
struct Frame {
    target: Target,
    attempt: Attempt,
    numbers: Vec<Number>,
}

/// Three hosts, of which one at a time hosts the shard.
struct World {
    seen: BTreeMap<u128, Seen>,
    owner: (u128, u64),
    /// The run that hosts it, and the epoch under which it began to.
    hosted: Option<(u128, u64)>,
    handled: Vec<Number>,
    delayed: Vec<Frame>,
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

    /// Whether its host hands any of it over or remembers anything of its sender.
    fn is_known(&self, frame: &Frame) -> bool {
        let run = frame.target.run.as_u128();
        let hosts = self.hosted.is_some_and(|(host, _)| host == run);
        hosts || self.seen[&run].knows(SenderRun(9), SHARD)
    }

    /// As `Inbox::take` does it.
    fn arrive(&mut self, frame: &Frame, most: usize) -> Outcome {
        let (run, epoch) = (frame.target.run.as_u128(), frame.target.epoch.get());
        let seen = self.seen.get_mut(&run).expect("one of three");
        let mut said = Vec::new();
        let hosts = self.hosted.is_some_and(|(host, since)| host == run && epoch >= since);
        let (sender, first) = (SenderRun(9), frame.numbers[0]);
        let admitted = match hosts {
            true => seen.admit(sender, SHARD, frame.attempt, first, self.now),
            false => seen.refuse(sender, SHARD, frame.attempt, first, self.now),
        };
        if !admitted {
            return not_here();
        }
        for &number in &frame.numbers {
            match seen.check(sender, SHARD, number) {
                Check::Answered(answer) => said.push(Said::Answered(answer)),
                Check::Unanswered | Check::Late => said.push(Said::Failed("seen".to_owned())),
                Check::New if !hosts => return Outcome::Taken(said, Rest::NotHere),
                Check::New if said.len() >= most => break,
                Check::New => {
                    assert!(seen.begin(sender, SHARD, frame.attempt, number));
                    let answer = Bytes::from(number.to_string());
                    seen.answered(sender, SHARD, number, answer.clone());
                    self.handled.push(number);
                    said.push(Said::Answered(answer));
                }
            }
        }
        Outcome::Taken(said, Rest::Later)
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
            Ending::Closed | Ending::Late | Ending::Misdirected(_) => {
                self.never.insert(number);
            }
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
        Step::Send { attempt, target, messages, .. } => {
            let numbers = messages.iter().map(|message| message.number).collect();
            let frame = Frame { target, attempt, numbers };
            let lost = || Outcome::Lost("lost".to_owned());
            let outcome = match fate {
                Fate::Unread if !world.is_known(&frame) => Answer::Unread.into(),
                Fate::Unread => world.arrive(&frame, usize::MAX),
                Fate::Misdirected => Outcome::Misdirected("elsewhere".to_owned()),
                Fate::Arrives(most) => world.arrive(&frame, most),
                Fate::AnswerLost(most) => {
                    world.arrive(&frame, most);
                    lost()
                }
                Fate::NotSent => Outcome::NotSent,
                Fate::Lost => lost(),
                Fate::Delayed => {
                    world.delayed.push(frame);
                    lost()
                }
                Fate::Late => {
                    world.arrive(&frame, usize::MAX);
                    Outcome::Late
                }
            };
            for (number, ending) in lanes.on_outcome(SHARD, attempt, outcome, world.now) {
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
        lane_max in 1_usize..12,
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
                        let frame = world.delayed.remove(0);
                        world.arrive(&frame, usize::MAX);
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
        while drive(&mut lanes, &mut world, &mut callers, Fate::Arrives(usize::MAX))? {
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

#[test]
fn a_message_says_what_is_left_of_its_time() {
    let mut lanes: Lanes<u64> = lanes(10, 100);
    for (waiter, deadline) in [(1, 400), (2, 60_000)] {
        let taken = lanes.push(SHARD, Bytes::from_static(b"1234"), at(deadline), waiter);
        taken.expect("room");
    }
    lanes.lanes.get_mut(&SHARD).expect("there").at_once = 2;
    let Step::Send { messages, .. } = lanes.next(SHARD, &to(7, 1), at(0)) else { panic!("sent") };
    let left: Vec<_> = messages.iter().map(|message| message.left.as_millis()).collect();
    assert_eq!(left, [350, 59_900], "the way of the answer takes some");
}

#[test]
fn those_behind_one_that_is_handled_for_long_are_told_the_truth() {
    let mut one = three();
    let busy = || Outcome::Taken(Vec::new(), Rest::Busy);
    assert_eq!(one.on_outcome(SHARD, 1, busy(), at(59_900)), []);
    // It is asked about once more, alone, and where it is being handled.
    assert_eq!(one.next(SHARD, &to(7, 1), at(59_900)), Step::Wait(Some(at(59_902))));
    assert_eq!(sent(&mut one, &to(7, 1), at(59_902)), (2, vec![2], 7));
    assert_eq!(one.on_outcome(SHARD, 2, busy(), at(59_990)), []);
    let told = one.next(SHARD, &to(7, 1), at(60_000));
    assert!(matches!(told, Step::Tell(2, Ending::Unknown(_))), "{told:?}");
    for waiter in [3, 4] {
        assert_eq!(one.next(SHARD, &to(7, 1), at(60_000)), Step::Tell(waiter, Ending::Late));
    }
    assert_eq!((one.next(SHARD, &to(7, 1), at(60_000)), one.bytes), (Step::Idle, 0));
}

#[test]
fn what_was_held_up_is_not_sent_once_more_at_its_end() {
    let mut one = three();
    let later = Outcome::Taken(Vec::new(), Rest::Later);
    assert_eq!(one.on_outcome(SHARD, 1, later, at(59_900)), []);
    assert_eq!(one.next(SHARD, &to(7, 1), at(59_910)), Step::Wait(Some(at(60_000))));
    assert_eq!(one.next(SHARD, &to(7, 1), at(60_000)), Step::Tell(2, Ending::Late));
    let mut one = three();
    assert_eq!(one.on_outcome(SHARD, 1, not_here(), at(59_900)), []);
    assert_eq!(
        sent(&mut one, &to(8, 2), at(59_910)),
        (2, vec![2, 3, 4], 8),
        "to a new owner it is"
    );
}
