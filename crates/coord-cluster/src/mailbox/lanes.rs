//! What the sender's side does with its messages. Pure: `now` is an argument.
//!
//! ```text
//!   push ─► queue (bounded) ─(an owner, not in motion)─► flight ─► told
//!             ▲                                            │ │
//!             └──────── certainly not handled ◄────────────┘ │
//!                                 broken: the same run again ┘
//! ```
//!
//! A flight is one message, or several that waited behind each other. It grows as long as its host takes
//! all of it in, so that a slow host, or one that dies, has few.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use coord_core::{Address, Epoch, Incarnation, Moment, NodeId, ShardId, TableUid};

use super::MailboxLimits;

/// The first pause before an owner is asked again; it doubles.
const PAUSE_MIN: Duration = Duration::from_millis(2);
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// The most messages of one flight.
pub(crate) const FLIGHT_MAX: usize = 32;
/// The most bytes of one flight, unless its first message alone has more.
pub(crate) const FLIGHT_BYTES_MAX: usize = 64 * 1024;
/// What a message takes besides its payload.
pub(crate) const MESSAGE_HEADER: usize = 16;
/// How much of the time that is left is kept for the way of the answer: an eighth, and no more than this.
const WAY_MAX: Duration = Duration::from_millis(100);
/// A message that was held up by those before it is not sent once more with less left than this.
const AGAIN_MIN: Duration = Duration::from_millis(120);

/// Numbers a message among all of one sender and table.
pub(crate) type Number = u64;
/// Numbers an attempt among all of one sender and table.
pub(crate) type Attempt = u64;

/// A message as it goes out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) number: Number,
    /// How long its caller still waits, less the way of the answer. The owner says by then what it can.
    pub(crate) left: Duration,
    pub(crate) payload: Bytes,
}

/// Where a message goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) node: NodeId,
    pub(crate) run: Incarnation,
    pub(crate) address: Address,
    pub(crate) uid: TableUid,
    pub(crate) epoch: Epoch,
}

/// What the newest map says of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// It has no owner.
    Nowhere,
    /// It is owned, and leaves: nothing new is sent there.
    Moving(Target),
    To(Target),
}

impl Route {
    fn owner(&self) -> Option<&Target> {
        match self {
            Self::Nowhere => None,
            Self::Moving(target) | Self::To(target) => Some(target),
        }
    }
}

/// What a lane has to do now.
#[derive(Debug, PartialEq)]
pub(crate) enum Step<W> {
    /// Nothing waits: the lane is gone.
    Idle,
    /// Ask again when the map has changed, or at this moment.
    Wait(Option<Moment>),
    Send {
        attempt: Attempt,
        target: Target,
        messages: Vec<Message>,
        /// When no caller waits for any of them any more.
        deadline: Moment,
    },
    /// Answer the caller, and ask again.
    Tell(W, Ending),
}

/// What became of an attempt to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// What became of the first ones. The others the owner has not handed to a handler, and will not
    /// because of this attempt or an earlier one.
    Taken(Vec<Said>, Rest),
    /// It certainly did not go out, or was not looked at.
    NotSent,
    /// It certainly did not go out, and asking again would not help: another process answers at the owner's
    /// address.
    Misdirected(String),
    /// It went out, and no answer came.
    Lost(String),
    /// The callers' time has passed meanwhile.
    Late,
}

/// What the owner says of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    Answered(Bytes),
    /// The owner had it, and can't tell.
    Failed(String),
}

impl Said {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Answered(answer) => answer.len(),
            Self::Failed(why) => why.len(),
        }
    }
}

/// Why an owner did not take all messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    /// It had enough for once.
    Later,
    /// It does not host the shard.
    NotHere,
    /// It is handling the first one of the others, and has to say so before it can say more. Those behind it
    /// were not taken.
    Busy,
}

/// The answer to a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Answered(Bytes),
    Unknown(String),
    /// Another process answers at the owner's address, so it was certainly not handled.
    Misdirected(String),
    /// Its time has passed, and it was certainly not handled.
    Late,
    Closed,
}

/// Why a message was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    /// So many messages, and so many bytes, wait already.
    Buffer {
        waiting: usize,
        bytes: usize,
    },
    Closed,
}

/// What a withdrawn message was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Withdrawn {
    /// It waited, and never goes out now.
    Waited,
    InFlight,
    /// Its caller has its answer already.
    Told,
}

/// A message taken in: its number, and whether its lane has to be driven from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) number: Number,
    pub(crate) is_first: bool,
}

#[derive(Debug)]
struct Letter<W> {
    number: Number,
    payload: Bytes,
    deadline: Moment,
    /// Its owner had no time for it.
    held_up: bool,
    waiter: W,
}

#[derive(Debug)]
struct Flight<W> {
    /// At least one.
    letters: VecDeque<Letter<W>>,
    target: Target,
    attempt: Attempt,
    /// Why an attempt may have reached the handler; they are asked about nowhere else then.
    unsure: Option<String>,
}

impl<W> Flight<W> {
    fn step(&self, target: Target, now: Moment) -> Step<W> {
        let message = |letter: &Letter<W>| {
            let (number, payload) = (letter.number, letter.payload.clone());
            let left = letter.deadline.since(now);
            Message { number, left: left.saturating_sub((left / 8).min(WAY_MAX)), payload }
        };
        let deadlines = self.letters.iter().map(|letter| letter.deadline);
        Step::Send {
            attempt: self.attempt,
            target,
            messages: self.letters.iter().map(message).collect(),
            deadline: deadlines.max().unwrap_or(Moment::from_origin(Duration::ZERO)),
        }
    }
}

#[derive(Debug)]
struct Lane<W> {
    queue: VecDeque<Letter<W>>,
    flight: Option<Flight<W>>,
    /// How many go out at once.
    at_once: usize,
    /// How often in a row the present owner did not take the first one.
    failures: u32,
    /// This target is not asked before that.
    pause: Option<(Target, Moment)>,
}

impl<W> Default for Lane<W> {
    fn default() -> Self {
        Self { queue: VecDeque::new(), flight: None, at_once: 1, failures: 0, pause: None }
    }
}

impl<W> Lane<W> {
    fn len(&self) -> usize {
        self.queue.len() + self.flight.as_ref().map_or(0, |flight| flight.letters.len())
    }

    fn paused(&self, target: &Target, now: Moment) -> Option<Moment> {
        let (whom, until) = self.pause.as_ref()?;
        (whom == target && now < *until).then_some(*until)
    }

    fn rest(&mut self, target: Target, now: Moment) {
        if self.pause.as_ref().is_none_or(|(whom, _)| *whom != target) {
            self.failures = 0;
        }
        let pause = PAUSE_MIN.saturating_mul(1 << self.failures.min(10)).min(PAUSE_MAX);
        self.failures = self.failures.saturating_add(1);
        self.pause = Some((target, now.plus(pause)));
    }

    fn go_on(&mut self) {
        (self.failures, self.pause) = (0, None);
    }

    /// The next ones that go out together.
    fn take_next(&mut self, bytes_max: usize) -> VecDeque<Letter<W>> {
        let mut bytes = 0;
        let fits = |letter: &&Letter<W>| {
            bytes += letter.payload.len() + MESSAGE_HEADER;
            bytes <= bytes_max
        };
        let count = self.queue.iter().take(self.at_once).take_while(fits).count().max(1);
        self.queue.drain(..count.min(self.queue.len())).collect()
    }

    /// They certainly were not handled.
    fn take_back(&mut self, letters: VecDeque<Letter<W>>) {
        for letter in letters.into_iter().rev() {
            self.queue.push_front(letter);
        }
    }
}

/// The messages of one node to one table.
#[derive(Debug)]
pub(crate) struct Lanes<W> {
    limits: MailboxLimits,
    lanes: HashMap<ShardId, Lane<W>>,
    bytes: usize,
    last: Number,
    attempts: Attempt,
    closed: bool,
}

impl<W> Lanes<W> {
    pub(crate) fn new(limits: MailboxLimits) -> Self {
        Self { limits, lanes: HashMap::new(), bytes: 0, last: 0, attempts: 0, closed: false }
    }

    /// Takes a message in, behind all others of its shard.
    pub(crate) fn push(
        &mut self,
        shard: ShardId,
        payload: Bytes,
        deadline: Moment,
        waiter: W,
    ) -> Result<Taken, Full> {
        if self.closed {
            return Err(Full::Closed);
        }
        let waiting = self.lanes.get(&shard).map_or(0, Lane::len);
        let bytes = self.bytes.saturating_add(payload.len());
        if waiting >= self.limits.lane_max || bytes > self.limits.bytes_max {
            return Err(Full::Buffer { waiting, bytes: self.bytes });
        }
        self.bytes = bytes;
        self.last += 1;
        let letter = Letter { number: self.last, payload, deadline, held_up: false, waiter };
        let is_first = !self.lanes.contains_key(&shard);
        self.lanes.entry(shard).or_default().queue.push_back(letter);
        Ok(Taken { number: self.last, is_first })
    }

    /// What a lane does now. Not to be asked while an attempt of it is on its way.
    pub(crate) fn next(&mut self, shard: ShardId, route: &Route, now: Moment) -> Step<W> {
        let Some(lane) = self.lanes.get_mut(&shard) else { return Step::Idle };
        if let Some(flight) = &mut lane.flight {
            // Its outcome can't be found out once its incarnation, or its table, has been made anew.
            let goes_on =
                |owner: &&Target| (owner.run, owner.uid) == (flight.target.run, flight.target.uid);
            let owner = route.owner().filter(goes_on);
            let late = flight.letters.iter().position(|letter| now >= letter.deadline);
            let lost = if owner.is_some() { late } else { Some(0) };
            if let Some(letter) = lost.and_then(|at| flight.letters.remove(at)) {
                let why = unknown(flight.unsure.as_ref());
                if flight.letters.is_empty() {
                    lane.flight = None;
                }
                self.bytes -= letter.payload.len();
                return Step::Tell(letter.waiter, Ending::Unknown(why));
            }
            if let Some(owner) = owner {
                let target = flight.target.clone();
                if let Some((whom, until)) = &lane.pause
                    && *whom == target
                    && now < *until
                {
                    let deadlines = flight.letters.iter().map(|letter| letter.deadline);
                    return Step::Wait(deadlines.chain([*until]).min());
                }
                self.attempts += 1;
                flight.attempt = self.attempts;
                // The epoch of the first attempt: what it was refused for, it stays refused for.
                return flight.step(Target { address: owner.address.clone(), ..target }, now);
            }
        }
        if lane.queue.is_empty() {
            self.lanes.remove(&shard);
            return Step::Idle;
        }
        if self.closed {
            let letter = lane.queue.pop_front();
            return letter.map_or(Step::Idle, |letter| {
                self.bytes -= letter.payload.len();
                Step::Tell(letter.waiter, Ending::Closed)
            });
        }
        // Also those whose callers don't look, so that no message is handled without a caller.
        let late = lane.queue.iter().take(lane.at_once).position(|one| now >= one.deadline);
        if let Some(letter) = late.and_then(|at| lane.queue.remove(at)) {
            self.bytes -= letter.payload.len();
            return Step::Tell(letter.waiter, Ending::Late);
        }
        let Route::To(target) = route else { return Step::Wait(None) };
        let no_time = |one: &&Letter<W>| one.held_up && one.deadline.since(now) < AGAIN_MIN;
        if let Some(letter) = lane.queue.front().filter(no_time) {
            return Step::Wait(Some(letter.deadline));
        }
        if let Some(until) = lane.paused(target, now) {
            return Step::Wait(Some(until));
        }
        let letters = lane.take_next(FLIGHT_BYTES_MAX.min(self.limits.payload_max));
        self.attempts += 1;
        let (target, attempt) = (target.clone(), self.attempts);
        let flight = lane.flight.insert(Flight { letters, target, attempt, unsure: None });
        flight.step(flight.target.clone(), now)
    }

    /// Takes the outcome of the attempt that is on its way; returns the callers to answer.
    pub(crate) fn on_outcome(
        &mut self,
        shard: ShardId,
        attempt: Attempt,
        outcome: Outcome,
        now: Moment,
    ) -> Vec<(W, Ending)> {
        let Some(lane) = self.lanes.get_mut(&shard) else { return Vec::new() };
        let flight = lane.flight.take_if(|flight| flight.attempt == attempt);
        let Some(mut flight) = flight else { return Vec::new() };
        let mut told = Vec::new();
        match outcome {
            Outcome::Taken(said, rest) => {
                for said in said {
                    let Some(letter) = flight.letters.pop_front() else { break };
                    let ending = match said {
                        Said::Answered(answer) => Ending::Answered(answer),
                        Said::Failed(why) => Ending::Unknown(why),
                    };
                    told.push((letter, ending));
                }
                match rest {
                    _ if flight.letters.is_empty() => {
                        lane.at_once = (2 * lane.at_once).min(FLIGHT_MAX);
                        lane.go_on();
                    }
                    Rest::Later if !told.is_empty() => {
                        lane.at_once = told.len();
                        lane.go_on();
                        lane.take_back(flight.letters);
                    }
                    Rest::Busy => {
                        let first = flight.letters.pop_front();
                        flight.letters.iter_mut().for_each(|letter| letter.held_up = true);
                        lane.at_once = 1;
                        lane.rest(flight.target.clone(), now);
                        let others = std::mem::take(&mut flight.letters);
                        lane.take_back(others);
                        flight.letters.extend(first);
                        flight.unsure = Some("it is being handled, and its time is up".to_owned());
                        lane.flight = Some(flight);
                    }
                    Rest::Later | Rest::NotHere => {
                        let held_up = rest == Rest::Later;
                        flight.letters.iter_mut().for_each(|letter| letter.held_up |= held_up);
                        lane.rest(flight.target, now);
                        lane.take_back(flight.letters);
                    }
                }
            }
            Outcome::Late => {
                lane.at_once = 1;
                lane.go_on();
                let why = unknown(flight.unsure.as_ref());
                let late = flight.letters.into_iter();
                told.extend(late.map(|letter| (letter, Ending::Unknown(why.clone()))));
            }
            Outcome::Misdirected(why) if flight.unsure.is_none() => {
                lane.at_once = 1;
                lane.go_on();
                let ending = |letter| (letter, Ending::Misdirected(why.clone()));
                told.extend(flight.letters.into_iter().map(ending));
            }
            Outcome::NotSent if flight.unsure.is_none() => {
                // It may have been too large for the transport.
                lane.at_once = 1;
                lane.rest(flight.target, now);
                lane.take_back(flight.letters);
            }
            Outcome::NotSent | Outcome::Misdirected(_) | Outcome::Lost(_) => {
                lane.rest(flight.target.clone(), now);
                if let Outcome::Lost(why) = outcome {
                    flight.unsure = Some(why);
                }
                lane.flight = Some(flight);
            }
        }
        self.bytes -= told.iter().map(|(letter, _)| letter.payload.len()).sum::<usize>();
        told.into_iter().map(|(letter, ending)| (letter.waiter, ending)).collect()
    }

    /// The caller does not wait any more.
    pub(crate) fn withdraw(&mut self, shard: ShardId, number: Number) -> Withdrawn {
        let Some(lane) = self.lanes.get_mut(&shard) else { return Withdrawn::Told };
        let flies = |flight: &Flight<W>| flight.letters.iter().any(|one| one.number == number);
        if lane.flight.as_ref().is_some_and(flies) {
            return Withdrawn::InFlight;
        }
        let Ok(at) = lane.queue.binary_search_by_key(&number, |letter| letter.number) else {
            return Withdrawn::Told;
        };
        if let Some(letter) = lane.queue.remove(at) {
            self.bytes -= letter.payload.len();
        }
        Withdrawn::Waited
    }

    /// Nothing is taken in or sent from now on; what is on its way may end.
    pub(crate) fn close(&mut self) {
        self.closed = true;
    }
}

/// Why the outcome of a message is unknown.
fn unknown(unsure: Option<&String>) -> String {
    unsure.cloned().unwrap_or_else(|| "no answer came in time".to_owned())
}

#[cfg(test)]
mod tests;
