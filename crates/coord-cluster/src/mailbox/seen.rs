//! What the receiver's side remembers, so that no message is handled twice. Pure: `now` is an argument.
//!
//! A sender has one attempt to a shard on its way at a time and numbers its messages and attempts in order,
//! so the messages from the first one of its last attempt on are all that has to be remembered.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use coord_core::{Moment, ShardId};

use super::lanes::{Attempt, FLIGHT_MAX, Number};
use super::{ASK_LIMIT_MAX, SenderRun};

/// No sender asks about a message for longer than its caller waits.
const KEPT: Duration = ASK_LIMIT_MAX.saturating_add(Duration::from_secs(60));
/// From this many on, the ones that no sender asks about any more are looked for.
const SENDERS_MIN: usize = 1_024;
/// For so many senders at most it is remembered that a message of theirs was refused; the oldest go.
const REFUSED_MAX: usize = 4_096;
/// So many messages of one sender and shard are remembered at most: more than a flight has.
const RECENT_MAX: usize = 4 * FLIGHT_MAX;
/// Up to this many of the oldest answers, those that were forgotten are not looked for.
const ANSWERS_MIN: usize = 64;

type Key = (SenderRun, ShardId);

/// What is known of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// It was not handed over.
    New,
    /// It was, and this was the answer.
    Answered(Bytes),
    /// It was, and there is no answer.
    Unanswered,
    /// The sender has given it up: a later one was handed over.
    Late,
}

/// What is known of one sender and shard.
#[derive(Debug)]
struct Last {
    /// The last message that was handed over; 0 before the first.
    number: Number,
    attempt: Attempt,
    /// The messages that were handed over and may be asked about again, and their answers.
    recent: VecDeque<(Number, Option<Bytes>)>,
    at: Moment,
}

impl Last {
    fn answers(&self) -> impl Iterator<Item = &Bytes> {
        self.recent.iter().filter_map(|(_, answer)| answer.as_ref())
    }

    fn find(&mut self, number: Number) -> Option<&mut Option<Bytes>> {
        let at = self.recent.binary_search_by_key(&number, |(number, _)| *number).ok()?;
        self.recent.get_mut(at).map(|(_, answer)| answer)
    }
}

/// What was handed over last, of each sender and shard.
#[derive(Debug)]
pub(crate) struct Seen {
    last: HashMap<Key, Last>,
    /// Of which attempts on, of senders that have handed nothing over at some shard, anything may be.
    refused: HashMap<SenderRun, (Attempt, Moment)>,
    /// The answers, oldest first; also some that were forgotten since.
    answers: VecDeque<(Key, Number)>,
    /// How many answers are remembered, and how many bytes they have.
    count: usize,
    bytes: usize,
    bytes_max: usize,
    prune_at: usize,
}

impl Seen {
    pub(crate) fn new(bytes_max: usize) -> Self {
        let (last, answers, refused) = (HashMap::new(), VecDeque::new(), HashMap::new());
        Self { last, refused, answers, count: 0, bytes: 0, bytes_max, prune_at: SENDERS_MIN }
    }

    /// Whether an attempt whose first message is this one may hand over anything. One that comes late may
    /// not: its sender may have been told since that some of it was not taken, and send that elsewhere.
    pub(crate) fn admit(
        &mut self,
        sender: SenderRun,
        shard: ShardId,
        attempt: Attempt,
        first: Number,
        now: Moment,
    ) -> bool {
        if self.last.len() >= self.prune_at {
            self.last.retain(|_, last| now.since(last.at) < KEPT);
            self.count = self.last.values().flat_map(Last::answers).count();
            self.bytes = self.last.values().flat_map(Last::answers).map(Bytes::len).sum();
            self.prune_at = (2 * self.last.len()).max(SENDERS_MIN);
        }
        // Attempts are numbered across the sender's shards, so this is never too little; where it is too much,
        // the sender tries again.
        let refused = self.refused.get(&sender).map_or(0, |(attempt, _)| *attempt);
        let last = self.last.entry((sender, shard)).or_insert_with(|| Last {
            number: 0,
            attempt: refused,
            recent: VecDeque::new(),
            at: now,
        });
        if attempt <= last.attempt {
            return false;
        }
        (last.attempt, last.at) = (attempt, now);
        while last.recent.front().is_some_and(|(number, _)| *number < first) {
            if let Some((_, Some(answer))) = last.recent.pop_front() {
                self.count -= 1;
                self.bytes -= answer.len();
            }
        }
        true
    }

    /// An attempt hands nothing over here. No earlier one may later on, which of a sender that has not handed
    /// over anything for the shard is remembered for all shards together: a stranger leaves little behind.
    /// False where the attempt is one of those.
    pub(crate) fn refuse(
        &mut self,
        sender: SenderRun,
        shard: ShardId,
        attempt: Attempt,
        first: Number,
        now: Moment,
    ) -> bool {
        if self.last.contains_key(&(sender, shard)) {
            return self.admit(sender, shard, attempt, first, now);
        }
        if self.refused.len() >= REFUSED_MAX && !self.refused.contains_key(&sender) {
            let mut heard: Vec<_> = self.refused.values().map(|(_, at)| *at).collect();
            let (_, middle, _) = heard.select_nth_unstable(REFUSED_MAX / 2);
            let middle = *middle;
            self.refused.retain(|_, (_, at)| *at > middle);
        }
        let last = self.refused.entry(sender).or_insert((0, now));
        *last = (last.0.max(attempt), now);
        true
    }

    /// Whether nothing at all is remembered.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.last.is_empty() && self.refused.is_empty() && self.answers.is_empty()
    }

    /// Whether anything of this sender and shard is remembered.
    pub(crate) fn knows(&self, sender: SenderRun, shard: ShardId) -> bool {
        self.last.contains_key(&(sender, shard))
    }

    pub(crate) fn check(&self, sender: SenderRun, shard: ShardId, number: Number) -> Check {
        let Some(last) = self.last.get(&(sender, shard)) else { return Check::New };
        if last.number < number {
            return Check::New;
        }
        match last.recent.iter().find(|(recent, _)| *recent == number) {
            None => Check::Late,
            Some((_, answer)) => answer.clone().map_or(Check::Unanswered, Check::Answered),
        }
    }

    /// The message is handed over now; false if it must not be, since a later attempt was admitted.
    #[must_use]
    pub(crate) fn begin(
        &mut self,
        sender: SenderRun,
        shard: ShardId,
        attempt: Attempt,
        number: Number,
    ) -> bool {
        let last = self.last.get_mut(&(sender, shard));
        let Some(last) = last.filter(|last| last.attempt == attempt) else { return false };
        last.number = number;
        last.recent.push_back((number, None));
        if last.recent.len() > RECENT_MAX
            && let Some((_, Some(answer))) = last.recent.pop_front()
        {
            self.count -= 1;
            self.bytes -= answer.len();
        }
        true
    }

    /// It was answered. The oldest answers are forgotten where they are too many bytes; that a message
    /// was handed over is not.
    pub(crate) fn answered(
        &mut self,
        sender: SenderRun,
        shard: ShardId,
        number: Number,
        answer: Bytes,
    ) {
        let key = (sender, shard);
        let Some(place) = self.last.get_mut(&key).and_then(|last| last.find(number)) else {
            return;
        };
        self.bytes += answer.len();
        self.count += 1;
        *place = Some(answer);
        self.answers.push_back((key, number));
        while self.bytes > self.bytes_max {
            let Some((key, number)) = self.answers.pop_front() else { return };
            let place = self.last.get_mut(&key).and_then(|last| last.find(number));
            if let Some(answer) = place.and_then(Option::take) {
                self.count -= 1;
                self.bytes -= answer.len();
            }
        }
        if self.answers.len() > 2 * self.count.max(ANSWERS_MIN) {
            let last = &mut self.last;
            self.answers.retain(|(key, number)| {
                last.get_mut(key).and_then(|last| last.find(*number)).is_some_and(|a| a.is_some())
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::from_origin(Duration::from_secs(seconds))
    }

    const ONE: SenderRun = SenderRun(1);
    const SHARD: ShardId = ShardId::new(3);

    #[test]
    fn a_repetition_gets_the_answers_and_what_is_older_none() {
        let answer = |text: &'static str| Check::Answered(Bytes::from_static(text.as_bytes()));
        let mut seen = Seen::new(100);
        assert_eq!(seen.check(ONE, SHARD, 1), Check::New);
        assert!(seen.admit(ONE, SHARD, 1, 1, at(0)));
        assert!(seen.begin(ONE, SHARD, 1, 1) && seen.begin(ONE, SHARD, 1, 2));
        assert_eq!(seen.check(ONE, SHARD, 1), Check::Unanswered);
        seen.answered(ONE, SHARD, 1, Bytes::from_static(b"one"));
        assert!(seen.admit(ONE, SHARD, 2, 1, at(0)), "asked about again");
        assert_eq!(seen.check(ONE, SHARD, 1), answer("one"));
        assert_eq!(seen.check(ONE, SHARD, 2), Check::Unanswered);
        assert_eq!(seen.check(ONE, SHARD, 3), Check::New);
        assert_eq!(seen.check(SenderRun(2), SHARD, 1), Check::New);
        assert_eq!(seen.check(ONE, ShardId::new(4), 1), Check::New);
        assert!(seen.admit(ONE, SHARD, 3, 2, at(1)));
        assert_eq!(seen.check(ONE, SHARD, 1), Check::Late);
        seen.answered(ONE, SHARD, 1, Bytes::from_static(b"late"));
        assert_eq!((seen.count, seen.bytes), (0, 0));
        assert_eq!(seen.check(ONE, SHARD, 2), Check::Unanswered);
    }

    #[test]
    fn an_attempt_that_comes_late_or_twice_hands_over_nothing() {
        let mut seen = Seen::new(100);
        assert!(seen.admit(ONE, SHARD, 2, 1, at(0)));
        assert!(!seen.admit(ONE, SHARD, 2, 1, at(0)) && !seen.admit(ONE, SHARD, 1, 1, at(0)));
        assert!(seen.admit(ONE, ShardId::new(4), 1, 1, at(0)), "each shard has its own");
        assert!(seen.admit(ONE, SHARD, 3, 1, at(0)));
        assert!(!seen.begin(ONE, SHARD, 2, 1), "not even one that was admitted before");
        assert!(seen.begin(ONE, SHARD, 3, 1));
    }

    #[test]
    fn senders_that_nobody_hears_of_any_more_are_forgotten() {
        let mut seen = Seen::new(1_000_000);
        for sender in 0..SENDERS_MIN {
            assert!(seen.admit(SenderRun(sender as u128), SHARD, 1, 1, at(0)));
        }
        let later = at(0).plus(KEPT);
        assert!(seen.admit(SenderRun(u128::MAX), SHARD, 1, 1, later));
        assert_eq!(seen.last.len(), 1);
    }

    #[test]
    fn strangers_leave_little_behind_and_what_was_refused_stays_so() {
        let mut seen = Seen::new(1_000_000);
        for stranger in 0..200_000_u32 {
            let (sender, shard) = (SenderRun(1_000 + u128::from(stranger)), ShardId::new(stranger));
            assert!(seen.refuse(sender, shard, 1, 1, at(u64::from(stranger) / 100)));
        }
        assert_eq!(seen.last.len(), 0);
        assert!(seen.refused.len() <= REFUSED_MAX, "{}", seen.refused.len());
        assert!(seen.refuse(ONE, SHARD, 7, 1, at(3_000)));
        assert!(!seen.admit(ONE, SHARD, 6, 1, at(3_000)), "an earlier attempt comes late");
        assert!(seen.admit(ONE, SHARD, 8, 1, at(3_000)));
        for number in 1..=10_000 {
            assert!(seen.begin(ONE, SHARD, 8, number));
            seen.answered(ONE, SHARD, number, Bytes::from_static(b"yes"));
        }
        assert_eq!((seen.count, seen.bytes), (RECENT_MAX, 3 * RECENT_MAX));
        assert_eq!(seen.check(ONE, SHARD, 1), Check::Late, "and is not handed over again");
    }

    proptest! {
        #[test]
        fn what_was_handed_over_is_never_new_again(
            messages in
                prop::collection::vec((0_u128..4, 0_u32..3, 0_usize..40, any::<bool>()), 1..200),
            bytes_max in 0_usize..200,
        ) {
            let mut seen = Seen::new(bytes_max);
            let (mut number, mut attempt) = (0, 0);
            let mut attempts = HashMap::new();
            let mut handed: Vec<(SenderRun, ShardId, Number)> = Vec::new();
            for (sender, shard, size, begins) in messages {
                let (sender, shard) = (SenderRun(sender), ShardId::new(shard));
                number += 1;
                if begins || seen.check(sender, shard, 0) == Check::New {
                    attempt += 1;
                    prop_assert!(seen.admit(sender, shard, attempt, number, at(number)));
                    attempts.insert((sender, shard), attempt);
                }
                prop_assert_eq!(seen.check(sender, shard, number), Check::New);
                prop_assert!(seen.begin(sender, shard, attempts[&(sender, shard)], number));
                let answer = Bytes::from(vec![7; size]);
                seen.answered(sender, shard, number, answer.clone());
                handed.push((sender, shard, number));
                if size <= bytes_max {
                    let check = seen.check(sender, shard, number);
                    prop_assert_eq!(check, Check::Answered(answer));
                }
                for (sender, shard, number) in &handed {
                    prop_assert_ne!(seen.check(*sender, *shard, *number), Check::New);
                }
                let held: Vec<_> = seen.last.values().flat_map(Last::answers).map(Bytes::len).collect();
                prop_assert_eq!((held.len(), held.iter().sum()), (seen.count, seen.bytes));
                prop_assert!(seen.bytes <= bytes_max);
                prop_assert!(seen.answers.len() <= 2 * seen.count.max(ANSWERS_MIN));
            }
        }
    }
}
