//! Messages to shards, wherever they are hosted.
//!
//! ```text
//!   ask(key, payload)                                        Handler::handle(mail) → answer
//!        │                                                          ▲
//!   ┌─ any node ──────────────────────┐             ┌─ the owner ───┴──────────────────┐
//!   │ outbox   a lane for each shard: │  Transport  │ inbox   hosted here, now, under   │
//!   │          waits for an owner,    ├────────────►│         this incarnation? then    │
//!   │          one flight on its way  │◄────────────┤         one message at a time     │
//!   └──────▲──────────────────────────┘  answer, or └──────▲────────────────────────────┘
//!          │ the newest map             "not here"         │ start and stop of the region
//! ```
//!
//! A message goes to the primary owner that the newest map names. It waits in its shard's lane while the shard
//! has no owner, while the shard is in motion (`Exclusive`), and after the owner answered "not here". The lane
//! continues as soon as the map names another owner; else it asks again after a pause of 2 ms that doubles to
//! 100 ms. Sending reads no store: it looks into the map that the table's watch brought last.
//!
//! What waits in a lane goes out together, as one *flight* in one frame: one message at first, twice as many
//! after each flight that was taken as a whole, up to 32 messages and 64 KiB. The owner handles them in order
//! for 5 ms, answers those, and refuses the others as not taken. They return to the front of the lane, and the
//! next flight has as many as were taken. So a slow handler gets one message at a time, and no answer waits
//! long for the messages behind it. A flight saves the messages of one shard a round trip each:
//! docs/benchmarks/history/messages.md has the numbers.
//!
//! # What is promised
//!
//! - **Order.** Messages of one node to one shard are handled in the order in which `ask` was called, also
//!   across a move. For that a lane has one flight on its way at a time; lanes of different shards, and
//!   of different nodes, do not wait for each other.
//! - **At most once.** A message is handed to a handler once or never. A message that certainly never reached a
//!   handler (no connection, "not here", not taken) is sent again by itself. If a connection breaks after the
//!   flight may have gone out, the same messages are asked about again at the *same incarnation of the same
//!   process* and nowhere else. That process remembers the last flight of each sender and shard, answers a
//!   repetition with the answers it gave, and refuses older messages and older attempts; so what it refuses then
//!   is certain again. Once that incarnation does not own the shard any more, the outcome is unknown, and the
//!   callers of the whole flight are told so.
//! - **A stale host is silent.** A message is accepted only while the shard's [`ShardFence`] is current, and
//!   only under an epoch at least as new as the one under which this incarnation began to host the shard, so that
//!   a message for an earlier stay is never handled in a later one. At the registration's deadline the message
//!   that is being handled is dropped.
//! - **Every caller gets an answer within its own time limit**: the reply, or an [`AskError`] that says whether
//!   the message may have been handled ([`AskError::effect`]). The caller gets it at once where waiting is of no
//!   use, because another node, cluster or protocol answers at the owner's address
//!   ([`Misdirected`](AskError::Misdirected)). If the node itself has another incarnation by now, its messages
//!   wait for the map to say so. A message carries what is left of its time, less an eighth or 100 ms for the way
//!   of the answer. The owner hands over no message whose time is up, and says by then which message of a flight
//!   it is handling; those behind that one are certain.
//! - **Bounded.** A lane holds at most [`MailboxLimits::lane_max`] messages, a table's lanes together
//!   [`MailboxLimits::bytes_max`] bytes; beyond that the sender is told at once. At the owner one flight of each
//!   sender waits for a shard, until its time is up or a newer attempt of it comes, and as many flights and bytes
//!   in all, for the node's own messages too; of one shard 4 MiB.
//!   Of a message that this node can't handle as it is (another incarnation, another generation of the table, a
//!   shard that the table does not have) nothing is remembered, and the sender is told that it was not looked at.
//!
//! Metrics: the gauge `cluster_mailbox_buffered` counts the messages that this node has accepted to send and
//! not yet answered; `cluster_mailbox_asked{outcome}` counts the answers to callers (`answered`, `unknown`,
//! `not_delivered`, `misdirected`, `buffer_full`, `too_large`, `no_such_shard`, `closed`), and
//! `cluster_mailbox_taken{outcome}` the outcomes of messages that came to this node (`answered`, `failed`,
//! `repeated`, `not_here`).
//!
//! Not promised: any order between two nodes; that a message is handled before its sender's process dies;
//! and, in the modes with two hosts (`MakeBeforeBreak`, `Eager`), that a message whose caller was told
//! "unknown" is not handled after a later one at the new host.
//!
//! # A move, as messages see it
//!
//! The region's stop closes the inbox first: what waits there is answered "not here" and goes back to the
//! front of its lane. What is being handled may finish within the stop budget and is dropped then
//! ("unknown"). Only after that the handler's own [`stop`](crate::Host::stop) runs, and the shard counts as
//! stopped.
//!
//! The decisions are in `lanes.rs` (the sender's side) and `seen.rs` (the receiver's), both without clock
//! and I/O; `outbox.rs` and `inbox.rs` perform them.

mod ask;
mod envelope;
mod inbox;
mod lanes;
mod mailboxes;
mod outbox;
mod seen;

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_core::ShardId;

pub use self::ask::{AskError, Mailbox};
#[cfg(feature = "fuzzing")]
pub(crate) use self::envelope::{Answer, Letter, sample as sample_letter};
pub(crate) use self::inbox::{Inbox, Scope};
pub(crate) use self::mailboxes::Mailboxes;
use crate::region::{Host, ShardFence};

/// The longest time limit of one message.
pub const ASK_LIMIT_MAX: Duration = Duration::from_secs(10 * 60);
/// How long a caller waits for its answer unless it says otherwise.
pub const ASK_LIMIT: Duration = Duration::from_secs(10);

/// A host that is sent messages.
#[async_trait]
pub trait Handler: Host {
    /// Handles one message, and answers it. Messages of one shard never overlap, and come after its
    /// `start` has returned and before its `stop` is called.
    ///
    /// Show [`ShardFence::token`] with every write; what the service itself can refuse is part of the answer. A
    /// panic is an unknown outcome for the caller, and the next message comes all the same. A handler that asks
    /// its own shard waits for itself.
    ///
    /// # Cancel safety
    /// It is dropped at the registration's deadline, and where the shard has to go and the stop budget is
    /// used up. The caller is told that the outcome is unknown.
    async fn handle(&self, mail: Mail) -> Bytes;
}

/// One message, as its handler gets it.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Mail {
    /// For which shard.
    pub shard: ShardId,
    /// What was sent.
    pub payload: Bytes,
    /// The right under which this node hosts the shard; `mail.fence.token()` goes with every write.
    pub fence: ShardFence,
}

/// How much may wait.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MailboxLimits {
    /// The most messages of this node that wait for one shard; 1,000.
    pub lane_max: usize,
    /// The most bytes of all messages of this node that wait for one table's shards; 64 MiB.
    pub bytes_max: usize,
    /// The most bytes of one message, and of one answer; 1 MiB. Answers to one flight may have 64 KiB more.
    pub payload_max: usize,
    /// The most bytes of answers that are remembered for a repetition, for each table; 16 MiB.
    pub answers_max: usize,
}

impl Default for MailboxLimits {
    fn default() -> Self {
        const MIB: usize = 1024 * 1024;
        Self { lane_max: 1_000, bytes_max: 64 * MIB, payload_max: MIB, answers_max: 16 * MIB }
    }
}

impl MailboxLimits {
    /// With at most so many messages waiting for one shard.
    #[must_use]
    pub const fn with_lane_max(mut self, messages: usize) -> Self {
        self.lane_max = messages;
        self
    }

    /// With at most so many bytes waiting for one table's shards.
    #[must_use]
    pub const fn with_bytes_max(mut self, bytes: usize) -> Self {
        self.bytes_max = bytes;
        self
    }

    /// With messages and answers of at most so many bytes. The transport has a limit of its own, which is to
    /// be higher by 64 KiB.
    #[must_use]
    pub const fn with_payload_max(mut self, bytes: usize) -> Self {
        self.payload_max = bytes;
        self
    }
}

/// The incarnation of a sender's mailboxes that sent a message: repetitions are recognised by it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SenderRun(pub(crate) u128);

impl fmt::Debug for SenderRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SenderRun({:032x})", self.0)
    }
}
