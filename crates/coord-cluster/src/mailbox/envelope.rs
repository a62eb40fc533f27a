//! A message and its answer as bytes. The transport's handshake has agreed on the format.
//!
//! ```text
//!   letter   1, name length, table name, uid 16, shard 4, epoch 8, to 16, sender 16, number 8, payload
//!   answer   1 answered, payload  |  2 not here  |  3 failed, why  |  4 no such table here
//! ```
//!
//! Numbers are big-endian.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use coord_core::{Epoch, Error, Incarnation, Result, ShardId, TableName, TableUid};

use super::SenderRun;
use super::lanes::{Number, Outcome};

const LETTER: u8 = 1;
const ANSWERED: u8 = 1;
const NOT_HERE: u8 = 2;
const FAILED: u8 = 3;
const NO_TABLE: u8 = 4;
/// What stands between the table's name and the payload.
const FIXED: usize = 16 + 4 + 8 + 16 + 16 + 8;

/// One message on its way to a certain run of a certain process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Letter {
    pub(crate) table: TableName,
    pub(crate) uid: TableUid,
    pub(crate) shard: ShardId,
    /// The epoch under which the sender saw the shard there.
    pub(crate) epoch: Epoch,
    pub(crate) to: Incarnation,
    pub(crate) sender: SenderRun,
    pub(crate) number: Number,
    pub(crate) payload: Bytes,
}

impl Letter {
    pub(crate) fn write(&self) -> Bytes {
        let name = self.table.as_str().as_bytes();
        let mut out = BytesMut::with_capacity(2 + name.len() + FIXED + self.payload.len());
        out.put_u8(LETTER);
        // A name has 63 bytes at most.
        out.put_u8(u8::try_from(name.len()).unwrap_or(u8::MAX));
        out.put_slice(name);
        out.put_u128(self.uid.as_u128());
        out.put_u32(self.shard.get());
        out.put_u64(self.epoch.get());
        out.put_u128(self.to.as_u128());
        out.put_u128(self.sender.0);
        out.put_u64(self.number);
        out.put_slice(&self.payload);
        out.freeze()
    }

    pub(crate) fn read(mut bytes: Bytes) -> Result<Self> {
        let bad = || Error::corrupt("read message", "it is not a message to a shard");
        if bytes.len() < 2 || bytes.get_u8() != LETTER {
            return Err(bad());
        }
        let length = usize::from(bytes.get_u8());
        if bytes.len() < length + FIXED {
            return Err(bad());
        }
        let name = bytes.split_to(length);
        Ok(Self {
            table: TableName::new(std::str::from_utf8(&name).map_err(|_not_text| bad())?)?,
            uid: TableUid::from_u128(bytes.get_u128()),
            shard: ShardId::new(bytes.get_u32()),
            epoch: Epoch::new(bytes.get_u64()),
            to: Incarnation::from_u128(bytes.get_u128()),
            sender: SenderRun(bytes.get_u128()),
            number: bytes.get_u64(),
            payload: bytes,
        })
    }
}

/// What the receiver says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Answered(Bytes),
    /// It was not handed over, and will not be.
    NotHere,
    /// It was handed over once, and there is no answer.
    Failed(String),
    /// This process has no such table, which is not meant to be.
    NoTable,
}

impl Answer {
    pub(crate) fn write(&self) -> Bytes {
        let (kind, rest): (u8, &[u8]) = match self {
            Self::Answered(answer) => (ANSWERED, answer),
            Self::NotHere => (NOT_HERE, &[]),
            Self::Failed(why) => (FAILED, why.as_bytes()),
            Self::NoTable => (NO_TABLE, &[]),
        };
        let mut out = BytesMut::with_capacity(1 + rest.len());
        out.put_u8(kind);
        out.put_slice(rest);
        out.freeze()
    }

    pub(crate) fn read(mut bytes: Bytes) -> Result<Self> {
        match bytes.try_get_u8() {
            Ok(ANSWERED) => Ok(Self::Answered(bytes)),
            Ok(NOT_HERE) => Ok(Self::NotHere),
            Ok(FAILED) => Ok(Self::Failed(String::from_utf8_lossy(&bytes).into_owned())),
            Ok(NO_TABLE) => Ok(Self::NoTable),
            _ => Err(Error::corrupt("read answer", "it is not the answer of a shard")),
        }
    }
}

impl From<Answer> for Outcome {
    fn from(answer: Answer) -> Self {
        match answer {
            Answer::Answered(answer) => Self::Answered(answer),
            Answer::NotHere | Answer::NoTable => Self::NotHere,
            Answer::Failed(why) => Self::Failed(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letter() -> Letter {
        Letter {
            table: TableName::new("orders").expect("name"),
            uid: TableUid::from_u128(9),
            shard: ShardId::new(3),
            epoch: Epoch::new(7),
            to: Incarnation::from_u128(5),
            sender: SenderRun(6),
            number: 8,
            payload: Bytes::from_static(b"hello"),
        }
    }

    #[test]
    fn what_is_written_reads_back() {
        assert_eq!(Letter::read(letter().write()).expect("reads"), letter());
        let answers = [
            Answer::Answered(Bytes::from_static(b"there")),
            Answer::NotHere,
            Answer::Failed("why".to_owned()),
            Answer::NoTable,
        ];
        for answer in answers {
            assert_eq!(Answer::read(answer.write()).expect("reads"), answer);
        }
    }

    #[test]
    fn the_bytes_are_as_they_were() {
        let golden = "0106" // letter, the name's length
            .to_owned()
            + "6f7264657273"
            + "00000000000000000000000000000009"
            + "00000003"
            + "0000000000000007"
            + "00000000000000000000000000000005"
            + "00000000000000000000000000000006"
            + "0000000000000008"
            + "68656c6c6f";
        let hex: String = letter().write().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, golden);
    }

    #[test]
    fn what_is_cut_or_foreign_is_refused() {
        let whole = letter().write();
        let payload = letter().payload.len();
        for length in 0..whole.len() - payload {
            assert!(Letter::read(whole.slice(..length)).is_err(), "{length} bytes");
        }
        assert!(Letter::read(Bytes::from_static(b"GET / HTTP/1.1\r\n\r\n")).is_err());
        assert!(Answer::read(Bytes::new()).is_err());
        assert!(Answer::read(Bytes::from_static(b"\x09")).is_err());
    }
}
