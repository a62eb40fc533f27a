//! What a caller uses: it asks a key's shard, and gets an answer or learns what became of the message.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use coord_core::{Effect, Error, ErrorKind, ShardCount, ShardId, TableName, shard_of};
use tokio::sync::oneshot;

use super::lanes::{Ending, Full, Number, Withdrawn};
use super::outbox::Outbox;
use super::{ASK_LIMIT, ASK_LIMIT_MAX};
use crate::telemetry;

/// The mailboxes of one table, as one node reaches them. Clones are the same.
#[derive(Clone)]
pub struct Mailbox(pub(super) Arc<Outbox>);

impl Mailbox {
    /// Sends a message to the shard of a key and waits for its answer, for 10 s at most. The message has
    /// its place in the order from this call on, whenever the future is polled.
    ///
    /// # Errors
    /// As [`AskError`] says, in the future's result.
    ///
    /// # Cancel safety
    /// A message that still waits is never sent; one that is on its way may be handled.
    pub fn ask<K: AsRef<[u8]>, P: Into<Bytes>>(
        &self,
        key: K,
        payload: P,
    ) -> impl Future<Output = Result<Bytes, AskError>> + Send + 'static + use<K, P> {
        self.ask_shard(self.shard_of(key), payload, ASK_LIMIT)
    }

    /// Sends a message to a shard and waits for its answer, no longer than this; at most 10 minutes.
    ///
    /// # Errors
    /// As [`AskError`] says, in the future's result.
    ///
    /// # Cancel safety
    /// As for [`ask`](Self::ask).
    pub fn ask_shard<P: Into<Bytes>>(
        &self,
        shard: ShardId,
        payload: P,
        limit: Duration,
    ) -> impl Future<Output = Result<Bytes, AskError>> + Send + 'static + use<P> {
        let asked = self.push(shard, payload.into(), limit);
        async move {
            let told = match asked {
                Ok(asked) => asked.answer().await,
                Err(error) => Err(error),
            };
            telemetry::asked(told.as_ref().err().map_or("answered", AskError::as_str));
            told
        }
    }

    /// The shard of a key.
    #[must_use]
    pub fn shard_of(&self, key: impl AsRef<[u8]>) -> ShardId {
        shard_of(key, self.shards())
    }

    /// How many shards the table has.
    #[must_use]
    pub fn shards(&self) -> ShardCount {
        self.0.shards()
    }

    /// The table's name.
    #[must_use]
    pub fn table(&self) -> &TableName {
        self.0.table()
    }

    fn push(&self, shard: ShardId, payload: Bytes, limit: Duration) -> Result<Asked, AskError> {
        let shards = self.shards();
        if !shards.contains(shard) {
            return Err(AskError::NoSuchShard { shard, shards });
        }
        let (bytes, max) = (payload.len(), self.0.limits.payload_max);
        if bytes > max {
            return Err(AskError::TooLarge { bytes, max });
        }
        let limit = limit.min(ASK_LIMIT_MAX);
        let deadline = self.0.deadline(limit);
        match self.0.push(shard, payload, deadline) {
            Ok((number, told)) => {
                let outbox = Arc::clone(&self.0);
                Ok(Asked { outbox, shard, number, limit, deadline, told })
            }
            Err(Full::Buffer { waiting, bytes }) => {
                Err(AskError::BufferFull { shard, waiting, bytes })
            }
            Err(Full::Closed) => Err(AskError::Closed),
        }
    }
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").field("table", self.table()).finish_non_exhaustive()
    }
}

/// A message that was taken in. Dropping it withdraws the message if it still waits.
struct Asked {
    outbox: Arc<Outbox>,
    shard: ShardId,
    number: Number,
    limit: Duration,
    deadline: coord_core::Moment,
    told: oneshot::Receiver<Ending>,
}

impl Asked {
    async fn answer(mut self) -> Result<Bytes, AskError> {
        let shard = self.shard;
        let told = tokio::select! {
            biased;
            told = &mut self.told => told.ok(),
            () = self.outbox.sleep_until(self.deadline) => {
                match self.outbox.withdraw(shard, self.number) {
                    Withdrawn::Waited => {
                        return Err(AskError::NotDelivered { shard, limit: self.limit });
                    }
                    Withdrawn::InFlight => {
                        let why = "no answer came in time".to_owned();
                        return Err(AskError::Unknown { shard, why });
                    }
                    Withdrawn::Told => self.told.try_recv().ok(),
                }
            }
        };
        match told {
            Some(Ending::Answered(answer)) => Ok(answer),
            Some(Ending::Unknown(why)) => Err(AskError::Unknown { shard, why }),
            Some(Ending::Misdirected(why)) => Err(AskError::Misdirected { shard, why }),
            Some(Ending::Late) => Err(AskError::NotDelivered { shard, limit: self.limit }),
            Some(Ending::Closed) => Err(AskError::Closed),
            None => {
                let why = "this node ended before the answer came".to_owned();
                Err(AskError::Unknown { shard, why })
            }
        }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if !self.told.is_terminated() {
            self.outbox.withdraw(self.shard, self.number);
        }
    }
}

/// Why there is no answer. [`effect`](Self::effect) says whether the message may have been handled all
/// the same.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AskError {
    /// So much waits already that the message was not taken: it was not sent.
    BufferFull {
        /// For which shard.
        shard: ShardId,
        /// How many messages of this node wait for it.
        waiting: usize,
        /// How many bytes of this node wait for all shards of the table.
        bytes: usize,
    },
    /// The time passed while the message waited for an owner, or there for those before it: it was not
    /// handled, and never will be.
    NotDelivered {
        /// For which shard.
        shard: ShardId,
        /// The time limit.
        limit: Duration,
    },
    /// It was sent, and may have been handled, or still be.
    Unknown {
        /// For which shard.
        shard: ShardId,
        /// Why there is no answer.
        why: String,
    },
    /// Another process answers at the address of the shard's owner: another node, another cluster, or another
    /// protocol. The message was not handled, and never will be. Asking again is in vain until an operator, or
    /// a map with another owner, has changed that.
    Misdirected {
        /// For which shard.
        shard: ShardId,
        /// The process that answers, and the one that was asked for.
        why: String,
    },
    /// The table does not have the shard.
    NoSuchShard {
        /// Which shard.
        shard: ShardId,
        /// How many shards it has.
        shards: ShardCount,
    },
    /// The message is too large.
    TooLarge {
        /// How many bytes it has.
        bytes: usize,
        /// How many it may have.
        max: usize,
    },
    /// This node is ending: the message was not sent.
    Closed,
}

impl AskError {
    /// Whether the message may have been handled: `None` says that it certainly was not, and never will
    /// be.
    #[must_use]
    pub const fn effect(&self) -> Effect {
        match self {
            Self::Unknown { .. } => Effect::Unknown,
            _ => Effect::None,
        }
    }

    /// As metrics name it.
    const fn as_str(&self) -> &'static str {
        match self {
            Self::BufferFull { .. } => "buffer_full",
            Self::NotDelivered { .. } => "not_delivered",
            Self::Unknown { .. } => "unknown",
            Self::Misdirected { .. } => "misdirected",
            Self::NoSuchShard { .. } => "no_such_shard",
            Self::TooLarge { .. } => "too_large",
            Self::Closed => "closed",
        }
    }
}

impl fmt::Display for AskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BufferFull { shard, waiting, bytes } => write!(
                f,
                "the mailbox of shard {shard} is full, nothing was sent waiting={waiting} \
                 table_bytes={bytes}"
            ),
            Self::NotDelivered { shard, limit } => {
                write!(
                    f,
                    "shard {shard} did not take the message in time, it was not handled limit={limit:?}"
                )
            }
            Self::Unknown { shard, why } => {
                write!(f, "it is not known whether shard {shard} has handled the message: {why}")
            }
            Self::Misdirected { shard, why } => {
                write!(f, "the owner of shard {shard} can't be asked, nothing was sent: {why}")
            }
            Self::NoSuchShard { shard, shards } => {
                write!(f, "there is no shard {shard}; the table has {}", shards.get())
            }
            Self::TooLarge { bytes, max } => {
                write!(f, "the message is too large bytes={bytes} max={max}")
            }
            Self::Closed => f.write_str("the node is ending, nothing was sent"),
        }
    }
}

impl std::error::Error for AskError {}

impl From<AskError> for Error {
    fn from(error: AskError) -> Self {
        let kind = match error {
            AskError::NoSuchShard { .. } | AskError::TooLarge { .. } => ErrorKind::Invalid,
            AskError::Closed => ErrorKind::Closed,
            // A misdirected one as well: an address that has passed to another node is put right by the next map.
            _ => ErrorKind::Unavailable,
        };
        let made = Self::new(kind, "ask").message(error.to_string());
        match error.effect() {
            Effect::Unknown => made.effect_unknown(),
            _ => made.effect_none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_whether_the_message_may_have_been_handled_and_whether_to_try_again() {
        let (shard, why) = (ShardId::new(1), "n3 is there".to_owned());
        let shards = ShardCount::new(1).expect("count");
        for (error, kind) in [
            (AskError::BufferFull { shard, waiting: 1, bytes: 1 }, ErrorKind::Unavailable),
            (AskError::NotDelivered { shard, limit: Duration::ZERO }, ErrorKind::Unavailable),
            (AskError::Unknown { shard, why: why.clone() }, ErrorKind::Unavailable),
            (AskError::Misdirected { shard, why }, ErrorKind::Unavailable),
            (AskError::NoSuchShard { shard, shards }, ErrorKind::Invalid),
            (AskError::TooLarge { bytes: 2, max: 1 }, ErrorKind::Invalid),
            (AskError::Closed, ErrorKind::Closed),
        ] {
            let effect = error.effect();
            let made = Error::from(error);
            assert_eq!((made.kind(), made.effect()), (kind, effect), "{made}");
        }
    }
}
