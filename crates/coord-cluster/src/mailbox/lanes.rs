//! What the sender's side does with its messages. Pure: `now` is an argument.
//!
//! ```text
//!   push ─► queue (bounded) ─(an owner, not in motion)─► flight ─► told
//!             ▲                                            │ │
//!             └──────── certainly not handled ◄────────────┘ │
//!                                 broken: the same run again ┘
//! ```

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use coord_core::{Address, Epoch, Incarnation, Moment, ShardId, TableUid};

use super::MailboxLimits;

/// The first pause before an owner is asked again; it doubles.
const PAUSE_MIN: Duration = Duration::from_millis(2);
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// Numbers a message among all of one sender and table.
pub(crate) type Number = u64;

/// Where a message goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) run: Incarnation,
    pub(crate) address: Address,
    pub(crate) uid: TableUid,
    pub(crate) epoch: Epoch,
}

/// What the newest map says of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// Nobody owns it.
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
        number: Number,
        target: Target,
        payload: Bytes,
        deadline: Moment,
    },
    /// Tell the one who waits, and ask again.
    Tell(W, Ending),
}

/// What became of an attempt to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Answered(Bytes),
    /// The owner has not handed this attempt to a handler, and will not.
    NotHere,
    /// It certainly did not go out.
    NotSent,
    /// It went out, and no answer came.
    Lost(String),
    /// The owner had it, and says that it can't tell.
    Failed(String),
    /// The caller's time has passed meanwhile.
    Late,
}

/// What a caller is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Answered(Bytes),
    Unknown(String),
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
    /// Its caller was told already.
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
    waiter: W,
}

#[derive(Debug)]
struct Flight<W> {
    letter: Letter<W>,
    target: Target,
    /// Why an attempt may have reached the handler; it is asked about nowhere else then.
    unsure: Option<String>,
}

#[derive(Debug)]
struct Lane<W> {
    queue: VecDeque<Letter<W>>,
    flight: Option<Flight<W>>,
    /// How often in a row the present owner did not take the first one.
    failures: u32,
    /// This target is not asked before that.
    pause: Option<(Target, Moment)>,
}

impl<W> Default for Lane<W> {
    fn default() -> Self {
        Self { queue: VecDeque::new(), flight: None, failures: 0, pause: None }
    }
}

impl<W> Lane<W> {
    fn len(&self) -> usize {
        self.queue.len() + usize::from(self.flight.is_some())
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
}

/// The messages of one node to one table.
#[derive(Debug)]
pub(crate) struct Lanes<W> {
    limits: MailboxLimits,
    lanes: HashMap<ShardId, Lane<W>>,
    bytes: usize,
    last: Number,
    closed: bool,
}

impl<W> Lanes<W> {
    pub(crate) fn new(limits: MailboxLimits) -> Self {
        Self { limits, lanes: HashMap::new(), bytes: 0, last: 0, closed: false }
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
        let letter = Letter { number: self.last, payload, deadline, waiter };
        let is_first = !self.lanes.contains_key(&shard);
        self.lanes.entry(shard).or_default().queue.push_back(letter);
        Ok(Taken { number: self.last, is_first })
    }

    /// What a lane does now. Not to be asked while an attempt of it is on its way.
    pub(crate) fn next(&mut self, shard: ShardId, route: &Route, now: Moment) -> Step<W> {
        let Some(lane) = self.lanes.get_mut(&shard) else { return Step::Idle };
        if let Some(flight) = &lane.flight {
            let late = now >= flight.letter.deadline;
            let owner = route.owner().filter(|owner| owner.run == flight.target.run);
            let Some(owner) = owner.filter(|_| !late) else {
                let flight = lane.flight.take();
                return flight.map_or(Step::Idle, |flight| self.lost(flight));
            };
            if let Some(until) = lane.paused(&flight.target, now) {
                return Step::Wait(Some(until.min(flight.letter.deadline)));
            }
            return Step::Send {
                number: flight.letter.number,
                // The epoch of the first attempt: what it was refused for, it stays refused for.
                target: Target { address: owner.address.clone(), ..flight.target.clone() },
                payload: flight.letter.payload.clone(),
                deadline: flight.letter.deadline,
            };
        }
        let Some(first) = lane.queue.front() else {
            self.lanes.remove(&shard);
            return Step::Idle;
        };
        if self.closed {
            let letter = lane.queue.pop_front();
            return letter.map_or(Step::Idle, |letter| {
                self.bytes -= letter.payload.len();
                Step::Tell(letter.waiter, Ending::Closed)
            });
        }
        let Route::To(target) = route else { return Step::Wait(None) };
        if let Some(until) = lane.paused(target, now) {
            return Step::Wait(Some(until));
        }
        let step = Step::Send {
            number: first.number,
            target: target.clone(),
            payload: first.payload.clone(),
            deadline: first.deadline,
        };
        let (target, unsure) = (target.clone(), None);
        lane.flight = lane.queue.pop_front().map(|letter| Flight { letter, target, unsure });
        step
    }

    /// What became of the attempt that is on its way; who is to be told, if anybody is.
    pub(crate) fn on_outcome(
        &mut self,
        shard: ShardId,
        number: Number,
        outcome: Outcome,
        now: Moment,
    ) -> Option<(W, Ending)> {
        let lane = self.lanes.get_mut(&shard)?;
        let mut flight = lane.flight.take_if(|flight| flight.letter.number == number)?;
        match outcome {
            Outcome::Answered(_) | Outcome::Failed(_) | Outcome::Late => {
                lane.go_on();
                self.bytes -= flight.letter.payload.len();
                let late = || flight.unsure.unwrap_or_else(|| "no answer came in time".to_owned());
                let ending = match outcome {
                    Outcome::Answered(answer) => Ending::Answered(answer),
                    Outcome::Failed(why) => Ending::Unknown(why),
                    _ => Ending::Unknown(late()),
                };
                Some((flight.letter.waiter, ending))
            }
            Outcome::NotHere if flight.unsure.is_some() => {
                lane.go_on();
                match self.lost(flight) {
                    Step::Tell(waiter, ending) => Some((waiter, ending)),
                    _ => None,
                }
            }
            Outcome::NotSent if flight.unsure.is_some() => {
                lane.rest(flight.target.clone(), now);
                lane.flight = Some(flight);
                None
            }
            Outcome::NotHere | Outcome::NotSent => {
                lane.rest(flight.target, now);
                lane.queue.push_front(flight.letter);
                None
            }
            Outcome::Lost(why) => {
                lane.rest(flight.target.clone(), now);
                flight.unsure = Some(why);
                lane.flight = Some(flight);
                None
            }
        }
    }

    /// The caller does not wait any more.
    pub(crate) fn withdraw(&mut self, shard: ShardId, number: Number) -> Withdrawn {
        let Some(lane) = self.lanes.get_mut(&shard) else { return Withdrawn::Told };
        if lane.flight.as_ref().is_some_and(|flight| flight.letter.number == number) {
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

    fn lost(&mut self, flight: Flight<W>) -> Step<W> {
        self.bytes -= flight.letter.payload.len();
        let why = flight.unsure.unwrap_or_else(|| "its attempt was given up".to_owned());
        Step::Tell(flight.letter.waiter, Ending::Unknown(why))
    }
}

#[cfg(test)]
mod tests;
