//! Messages and their answers as bytes. The transport's handshake has agreed on the format.
//!
//! ```text
//!   letter   1, name length, table name, uid 16, shard 4, epoch 8, to 16, sender 16, attempt 8, messages
//!   message  number 8, left 4, length 4, payload
//!   answer   1 the rest later  |  2 the rest not here  |  4 no such table here  |  5 one more is being handled, the
//!            rest later  |  6 not looked at; and what is said of the first ones
//!   said     1 answered  |  3 failed, length 4, the answer or why
//! ```
//!
//! Numbers are big-endian. What is left is how many milliseconds of its time a message has.

use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use coord_core::{Epoch, Error, Incarnation, Result, ShardId, TableName, TableUid};

use super::SenderRun;
use super::lanes::{Attempt, MESSAGE_HEADER, Message, Outcome, Rest, Said};

/// 1 was one message alone; 2 did not say what is left of its time.
const LETTER: u8 = 3;
const LATER: u8 = 1;
const NOT_HERE: u8 = 2;
const ANSWERED: u8 = 1;
const FAILED: u8 = 3;
const NO_TABLE: u8 = 4;
const BUSY: u8 = 5;
const UNREAD: u8 = 6;
/// What stands between the table's name and the messages.
const FIXED: usize = 16 + 4 + 8 + 16 + 16 + 8;

/// Messages to one shard, in order, for one incarnation of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Letter {
    pub(crate) table: TableName,
    pub(crate) uid: TableUid,
    pub(crate) shard: ShardId,
    /// The epoch under which the sender saw the shard there.
    pub(crate) epoch: Epoch,
    pub(crate) to: Incarnation,
    pub(crate) sender: SenderRun,
    pub(crate) attempt: Attempt,
    /// At least one.
    pub(crate) messages: Vec<Message>,
}

impl Letter {
    pub(crate) fn write(&self) -> Bytes {
        let name = self.table.as_str().as_bytes();
        let length = |message: &Message| MESSAGE_HEADER + message.payload.len();
        let messages: usize = self.messages.iter().map(length).sum();
        let mut out = BytesMut::with_capacity(2 + name.len() + FIXED + messages);
        out.put_u8(LETTER);
        // A name has 63 bytes at most.
        out.put_u8(u8::try_from(name.len()).unwrap_or(u8::MAX));
        out.put_slice(name);
        out.put_u128(self.uid.as_u128());
        out.put_u32(self.shard.get());
        out.put_u64(self.epoch.get());
        out.put_u128(self.to.as_u128());
        out.put_u128(self.sender.0);
        out.put_u64(self.attempt);
        for Message { number, left, payload } in &self.messages {
            out.put_u64(*number);
            // No caller waits for longer than ten minutes.
            out.put_u32(u32::try_from(left.as_millis()).unwrap_or(u32::MAX));
            put(&mut out, payload);
        }
        out.freeze()
    }

    pub(crate) fn read(mut bytes: Bytes) -> Result<Self> {
        let bad = || Error::corrupt("read message", "it is no message to a shard");
        if bytes.len() < 2 || bytes.get_u8() != LETTER {
            return Err(bad());
        }
        let length = usize::from(bytes.get_u8());
        if bytes.len() < length + FIXED {
            return Err(bad());
        }
        let name = bytes.split_to(length);
        let mut letter = Self {
            table: TableName::new(std::str::from_utf8(&name).map_err(|_not_text| bad())?)?,
            uid: TableUid::from_u128(bytes.get_u128()),
            shard: ShardId::new(bytes.get_u32()),
            epoch: Epoch::new(bytes.get_u64()),
            to: Incarnation::from_u128(bytes.get_u128()),
            sender: SenderRun(bytes.get_u128()),
            attempt: bytes.get_u64(),
            messages: Vec::new(),
        };
        while letter.messages.is_empty() || !bytes.is_empty() {
            let number = bytes.try_get_u64().map_err(|_cut| bad())?;
            let left = bytes.try_get_u32().map_err(|_cut| bad())?;
            let left = Duration::from_millis(left.into());
            let payload = take(&mut bytes).ok_or_else(bad)?;
            letter.messages.push(Message { number, left, payload });
        }
        Ok(letter)
    }
}

/// A piece of bytes, behind its length.
fn put(out: &mut BytesMut, bytes: &[u8]) {
    // The limits of mailboxes are far below 4 GiB, and what is cut by this one can't be read.
    out.put_u32(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
    out.put_slice(bytes);
}

fn take(bytes: &mut Bytes) -> Option<Bytes> {
    let length = usize::try_from(bytes.try_get_u32().ok()?).ok()?;
    (length <= bytes.len()).then(|| bytes.split_to(length))
}

/// What the receiver says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// What became of the first messages, and of the others.
    Taken(Vec<Said>, Rest),
    /// This process has no such table, which is not meant to be.
    NoTable,
    /// They are for nothing that can come to be here by what is known. Nothing is remembered of them, so an
    /// earlier attempt that is still on its way may be taken.
    Unread,
}

impl Answer {
    pub(crate) fn write(&self) -> Bytes {
        let mut out = BytesMut::new();
        let (said, rest) = match self {
            Self::Taken(said, rest) => (said, rest),
            Self::NoTable => return Bytes::from_static(&[NO_TABLE]),
            Self::Unread => return Bytes::from_static(&[UNREAD]),
        };
        out.put_u8(match rest {
            Rest::Later => LATER,
            Rest::NotHere => NOT_HERE,
            Rest::Busy => BUSY,
        });
        for said in said {
            let (kind, text): (u8, &[u8]) = match said {
                Said::Answered(answer) => (ANSWERED, answer),
                Said::Failed(why) => (FAILED, why.as_bytes()),
            };
            out.put_u8(kind);
            put(&mut out, text);
        }
        out.freeze()
    }

    pub(crate) fn read(mut bytes: Bytes) -> Result<Self> {
        let bad = || Error::corrupt("read answer", "it is not the answer of a shard");
        let rest = match bytes.try_get_u8() {
            Ok(LATER) => Rest::Later,
            Ok(NOT_HERE) => Rest::NotHere,
            Ok(BUSY) => Rest::Busy,
            Ok(NO_TABLE) => return Ok(Self::NoTable),
            Ok(UNREAD) => return Ok(Self::Unread),
            _ => return Err(bad()),
        };
        let mut said = Vec::new();
        while let Ok(kind) = bytes.try_get_u8() {
            let text = take(&mut bytes).ok_or_else(bad)?;
            said.push(match kind {
                ANSWERED => Said::Answered(text),
                FAILED => Said::Failed(String::from_utf8_lossy(&text).into_owned()),
                _ => return Err(bad()),
            });
        }
        Ok(Self::Taken(said, rest))
    }
}

impl From<Answer> for Outcome {
    fn from(answer: Answer) -> Self {
        match answer {
            Answer::Taken(said, rest) => Self::Taken(said, rest),
            Answer::NoTable => Self::Taken(Vec::new(), Rest::NotHere),
            Answer::Unread => Self::NotSent,
        }
    }
}

/// A letter to look at.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn sample() -> Letter {
    Letter {
        table: TableName::new("orders").expect("name"),
        uid: TableUid::from_u128(9),
        shard: ShardId::new(3),
        epoch: Epoch::new(7),
        to: Incarnation::from_u128(5),
        sender: SenderRun(6),
        attempt: 8,
        messages: vec![
            Message {
                number: 9,
                left: Duration::from_secs(10),
                payload: Bytes::from_static(b"hello"),
            },
            Message { number: 11, left: Duration::ZERO, payload: Bytes::new() },
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::sample as letter;
    use super::*;

    #[test]
    fn what_is_written_reads_back() {
        assert_eq!(Letter::read(letter().write()).expect("reads"), letter());
        let said = || {
            let there = Said::Answered(Bytes::from_static(b"there"));
            vec![there, Said::Failed("why".to_owned()), Said::Answered(Bytes::new())]
        };
        let answers = [
            Answer::Taken(said(), Rest::Later),
            Answer::Taken(said(), Rest::NotHere),
            Answer::Taken(said(), Rest::Busy),
            Answer::Taken(Vec::new(), Rest::NotHere),
            Answer::NoTable,
            Answer::Unread,
        ];
        for answer in answers {
            assert_eq!(Answer::read(answer.write()).expect("reads"), answer);
        }
    }

    #[test]
    fn the_bytes_are_as_they_were() {
        let golden = "0306" // letter, the name's length
            .to_owned()
            + "6f7264657273"
            + "00000000000000000000000000000009"
            + "00000003"
            + "0000000000000007"
            + "00000000000000000000000000000005"
            + "00000000000000000000000000000006"
            + "0000000000000008"
            + "0000000000000009"
            + "00002710"
            + "00000005"
            + "68656c6c6f"
            + "000000000000000b"
            + "00000000"
            + "00000000";
        let hex: String = letter().write().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, golden);
        let said = vec![Said::Answered(Bytes::from_static(b"yes")), Said::Failed("no".to_owned())];
        let answer = Answer::Taken(said, Rest::NotHere).write();
        let hex: String = answer.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "02".to_owned() + "0100000003796573" + "03000000026e6f");
    }

    #[test]
    fn what_is_cut_or_foreign_is_refused() {
        let whole = letter().write();
        let first = whole.len() - MESSAGE_HEADER;
        for length in (0..whole.len()).filter(|length| *length != first) {
            assert!(Letter::read(whole.slice(..length)).is_err(), "{length} bytes");
        }
        assert!(Letter::read(Bytes::from_static(b"GET / HTTP/1.1\r\n\r\n")).is_err());
        assert!(Answer::read(Bytes::new()).is_err());
        assert!(Answer::read(Bytes::from_static(b"\x09")).is_err());
        assert!(Answer::read(Bytes::from_static(b"\x01\x01\0\0\0\x02a")).is_err());
        assert!(Answer::read(Bytes::from_static(b"\x01\x02\0\0\0\0")).is_err());
    }
}
