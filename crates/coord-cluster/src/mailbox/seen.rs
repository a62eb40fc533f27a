//! What the receiver's side remembers, so that no message is handled twice. Pure: `now` is an argument.
//!
//! A sender has one message to a shard on its way at a time and numbers them in order, so the last one of
//! each sender and shard is all that has to be remembered.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use coord_core::{Moment, ShardId};

use super::lanes::Number;
use super::{ASK_LIMIT_MAX, SenderRun};

/// No sender asks about a message for longer than its caller waits.
const KEPT: Duration = ASK_LIMIT_MAX.saturating_add(Duration::from_secs(60));
/// From this many on, those that nobody asks about any more are looked for.
const SENDERS_MIN: usize = 1_024;

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

#[derive(Debug)]
struct Last {
    number: Number,
    answer: Option<Bytes>,
    at: Moment,
}

/// The last message of each sender and shard.
#[derive(Debug)]
pub(crate) struct Seen {
    last: HashMap<Key, Last>,
    /// The answers, oldest first; also some that were replaced since.
    answers: VecDeque<(Key, Number)>,
    bytes: usize,
    bytes_max: usize,
    prune_at: usize,
}

impl Seen {
    pub(crate) fn new(bytes_max: usize) -> Self {
        let (last, answers) = (HashMap::new(), VecDeque::new());
        Self { last, answers, bytes: 0, bytes_max, prune_at: SENDERS_MIN }
    }

    pub(crate) fn check(&self, sender: SenderRun, shard: ShardId, number: Number) -> Check {
        match self.last.get(&(sender, shard)) {
            None => Check::New,
            Some(last) if last.number < number => Check::New,
            Some(last) if last.number > number => Check::Late,
            Some(last) => last.answer.clone().map_or(Check::Unanswered, Check::Answered),
        }
    }

    /// The message is handed over now.
    pub(crate) fn begin(&mut self, sender: SenderRun, shard: ShardId, number: Number, now: Moment) {
        if self.last.len() >= self.prune_at {
            self.last.retain(|_, last| now.since(last.at) < KEPT);
            self.bytes =
                self.last.values().filter_map(|last| last.answer.as_ref()).map(Bytes::len).sum();
            self.prune_at = (2 * self.last.len()).max(SENDERS_MIN);
        }
        let last = Last { number, answer: None, at: now };
        if let Some(before) = self.last.insert((sender, shard), last) {
            self.bytes -= before.answer.map_or(0, |answer| answer.len());
        }
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
        let Some(last) = self.last.get_mut(&key).filter(|last| last.number == number) else {
            return;
        };
        self.bytes += answer.len();
        last.answer = Some(answer);
        self.answers.push_back((key, number));
        while self.bytes > self.bytes_max {
            let Some((key, number)) = self.answers.pop_front() else { return };
            if let Some(last) = self.last.get_mut(&key).filter(|last| last.number == number) {
                self.bytes -= last.answer.take().map_or(0, |answer| answer.len());
            }
        }
        if self.answers.len() > 2 * self.last.len() {
            let last = &self.last;
            self.answers.retain(|(key, number)| {
                last.get(key).is_some_and(|last| last.number == *number && last.answer.is_some())
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
    fn a_repetition_gets_the_answer_and_an_older_one_none() {
        let mut seen = Seen::new(100);
        assert_eq!(seen.check(ONE, SHARD, 1), Check::New);
        seen.begin(ONE, SHARD, 1, at(0));
        assert_eq!(seen.check(ONE, SHARD, 1), Check::Unanswered);
        seen.answered(ONE, SHARD, 1, Bytes::from_static(b"one"));
        assert_eq!(seen.check(ONE, SHARD, 1), Check::Answered(Bytes::from_static(b"one")));
        assert_eq!(seen.check(SenderRun(2), SHARD, 1), Check::New);
        assert_eq!(seen.check(ONE, ShardId::new(4), 1), Check::New);
        seen.begin(ONE, SHARD, 5, at(1));
        assert_eq!(seen.check(ONE, SHARD, 1), Check::Late);
        seen.answered(ONE, SHARD, 1, Bytes::from_static(b"late"));
        assert_eq!(seen.check(ONE, SHARD, 5), Check::Unanswered);
    }

    #[test]
    fn senders_that_nobody_hears_of_any_more_are_forgotten() {
        let mut seen = Seen::new(1_000_000);
        for sender in 0..SENDERS_MIN {
            seen.begin(SenderRun(sender as u128), SHARD, 1, at(0));
        }
        let later = at(0).plus(KEPT);
        seen.begin(SenderRun(u128::MAX), SHARD, 1, later);
        assert_eq!(seen.last.len(), 1);
    }

    proptest! {
        #[test]
        fn what_was_handed_over_is_never_new_again(
            messages in prop::collection::vec((0_u128..4, 0_u32..3, 0_usize..40), 1..200),
            bytes_max in 0_usize..200,
        ) {
            let mut seen = Seen::new(bytes_max);
            let mut number = 0;
            let mut handed: Vec<(SenderRun, ShardId, Number)> = Vec::new();
            for (sender, shard, size) in messages {
                let (sender, shard) = (SenderRun(sender), ShardId::new(shard));
                number += 1;
                prop_assert_eq!(seen.check(sender, shard, number), Check::New);
                seen.begin(sender, shard, number, at(number));
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
                let held: usize = seen.last.values().filter_map(|last| last.answer.as_ref()).map(Bytes::len).sum();
                prop_assert_eq!(held, seen.bytes);
                prop_assert!(held <= bytes_max);
                prop_assert!(seen.answers.len() <= 2 * seen.last.len());
            }
        }
    }
}
