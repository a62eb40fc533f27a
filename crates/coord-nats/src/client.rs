//! The NATS client: all calls of the vendor's crate are made here and below.
//!
//! JetStream is spoken as it stands on the wire, by requests with headers of our own: the client's
//! key-value store drops the TTL of a record when it is written over a tombstone or updated, and
//! reads from followers. Each request is bounded in time and ends when the handle is closed. None
//! is repeated.

mod bucket;
mod connect;
mod expiry;
mod watch;

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{HeaderMap, Message, Request};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use coord_core::kit::Op;
use coord_core::{Effect, Error, ErrorKind, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::watch as changes;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub(crate) use self::bucket::{Bucket, expires_late, is_full};
pub(crate) use self::expiry::{Expiry, MARKER_TTL};
use self::expiry::{Life, Sample, Stored, TTL_MS, time_of, ttl_of};
pub(crate) use self::watch::{Topic, Update, What, subscribe};
use crate::error::{
    DUPLICATE_SOON, NO_MESSAGE, NO_STREAM, Refusal, WRONG_SEQUENCE, WRONG_SEQUENCE_SOON, denied,
    is_unanswerable, request_error,
};

const EXPECTED: &str = "Nats-Expected-Last-Subject-Sequence";
const EXPECTED_OF: &str = "Nats-Expected-Last-Subject-Sequence-Subject";
const TTL: &str = "Nats-TTL";
const MESSAGE_ID: &str = "Nats-Msg-Id";
const ROLLUP: &str = "Nats-Rollup";
const OPERATION: &str = "KV-Operation";
const MARKER_REASON: &str = "Nats-Marker-Reason";
/// In the marker of a record that a handle removed on purpose. Without it another program deleted the record.
const REMOVED: &str = "Coord-Removed";
/// What a message holds besides its record, behind it: the record's length, and what that is.
/// Headers themselves take 64 KiB at most.
const ASIDE: &str = "Coord-Aside";
const BATCH_ID: &str = "Nats-Batch-Id";
const BATCH_SEQUENCE: &str = "Nats-Batch-Sequence";
const BATCH_COMMIT: &str = "Nats-Batch-Commit";

/// What the headers and the subject of a message take at most, of what the server takes for all.
const HEADER_BYTES: usize = 4 * 1024;
/// How many denials are kept to be looked at.
const DENIALS_MAX: usize = 64;
/// So many sequences after the last one that was seen, a bucket may be another one: microseconds, where
/// it was made again.
const SEQUENCES_FAR: u64 = 100_000;
/// How often a lost connection is looked at by those who wait for it.
const READY_PAUSE: Duration = Duration::from_millis(20);
/// The operations that go on in a bucket that is another one.
const CHECK: &str = "check";
const TAKE_BACK: &str = "take back";
/// How long `close` waits for what tidies up.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// One connection to the servers, and the bucket on them.
#[derive(Clone)]
pub(crate) struct Client {
    vendor: async_nats::Client,
    shared: Arc<Shared>,
    expiry: Expiry,
}

struct Shared {
    stream: String,
    request_timeout: Duration,
    closed: CancellationToken,
    tasks: TaskTracker,
    /// What ends requests and watches before their time.
    trouble: Arc<changes::Sender<Trouble>>,
    /// The newest that is known of the servers' clock.
    sample: Mutex<Option<Sample>>,
    /// The bucket that this handle was opened for; none while it is being opened.
    opened: OnceLock<Opened>,
}

/// How a sequence came to be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Read,
    Written,
}

/// The bucket that a handle was opened for.
struct Opened {
    identity: String,
    /// The sequence that the bucket was at then.
    from: u64,
    /// The newest that was seen since.
    newest: AtomicU64,
    /// Whether there is another bucket of that name by now.
    is_another: AtomicBool,
}

impl Opened {
    /// Whether such a sequence has to be looked into: a bucket that is made again counts on from the
    /// time at which that is done, far away from the last one. Elsewhere so many writes of others say
    /// so of a handle that was idle, and a look finds nothing.
    fn is_odd(&self, sequence: u64, found: Found) -> bool {
        let newest = self.newest.load(Ordering::Relaxed);
        let is_far = sequence > newest.saturating_add(SEQUENCES_FAR);
        // What is written now comes after all that was there.
        is_far || (found == Found::Written && sequence <= self.from)
    }
}

/// What ends requests and watches before their time, all in one place: each request waits for it,
/// and a place to wait in is a lock to take.
#[derive(Default)]
struct Trouble {
    closed: bool,
    /// How often the connection was lost.
    losses: u64,
    /// How often the server denied something.
    denials: u64,
    /// What it said, the newest last; older ones are thrown away.
    denied: VecDeque<Arc<str>>,
}

impl Trouble {
    fn note_denial(&mut self, said: Arc<str>) {
        self.denials += 1;
        self.denied.push_back(said);
        if self.denied.len() > DENIALS_MAX {
            self.denied.pop_front();
        }
    }

    /// What the server said after this many denials that denies this subject, or all replies.
    fn denial(&self, after: u64, subject: &str) -> Option<Arc<str>> {
        let new = usize::try_from(self.denials - after).unwrap_or(usize::MAX);
        if new == 0 {
            return None;
        }
        let quoted = format!("\"{subject}\"");
        let about =
            |said: &&Arc<str>| said.contains(&quoted) || said.contains("Subscription to \"_INBOX");
        self.denied.iter().rev().take(new).rev().find(about).cloned()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.closed.cancel();
    }
}

/// The last message of a subject.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Last {
    /// Its sequence; 0 if there is none.
    pub(crate) sequence: u64,
    /// The record; none if there is no message or only a marker that the record is gone.
    pub(crate) value: Option<Bytes>,
    /// What was written besides it in the same step.
    pub(crate) aside: Option<Aside>,
    /// When it was written and how long it lives, where it ends by itself.
    pub(crate) life: Option<Life>,
}

/// What is written besides a record in the same step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Aside {
    /// What it is, in one line.
    pub(crate) what: String,
    pub(crate) value: Bytes,
}

/// One write, conditional on the last message of its subject.
#[derive(Clone, Debug)]
pub(crate) struct Put<'a> {
    pub(crate) subject: &'a str,
    pub(crate) value: Bytes,
    /// Whole seconds, 1 or more.
    pub(crate) ttl: Option<Duration>,
    pub(crate) condition: Condition<'a>,
}

/// What has to hold for a write.
#[derive(Clone, Debug)]
pub(crate) enum Condition<'a> {
    None,
    /// This is the sequence of the subject's own last message; 0 for none.
    At(u64),
    /// This is the sequence of another subject's last message. Of many writes that name the same
    /// id, the first one counts.
    Elsewhere {
        subject: &'a str,
        sequence: u64,
        id: &'a str,
    },
}

/// How a write came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Outcome {
    /// It was stored under this sequence.
    Done(u64),
    /// Its condition does not hold: nothing was stored.
    Conflict,
    /// Another one with the same id was stored before.
    Duplicate,
}

#[derive(Deserialize)]
struct Reply<T> {
    error: Option<Refusal>,
    #[serde(flatten)]
    value: Option<T>,
}

#[derive(Deserialize)]
struct PublishReply {
    error: Option<Refusal>,
    #[serde(default, rename = "seq")]
    sequence: u64,
    #[serde(default)]
    duplicate: bool,
}

#[derive(Deserialize)]
struct MessageReply {
    message: FoundMessage,
}

#[derive(Deserialize)]
struct FoundMessage {
    #[serde(rename = "seq")]
    sequence: u64,
    #[serde(default)]
    data: String,
    #[serde(default, rename = "hdrs")]
    headers: String,
    time: String,
}

impl Client {
    pub(crate) fn closed(&self) -> &CancellationToken {
        &self.shared.closed
    }

    /// For what goes on after a call has answered.
    pub(crate) fn tasks(&self) -> &TaskTracker {
        &self.shared.tasks
    }

    /// A text that no other client makes.
    pub(crate) fn unique(&self) -> String {
        let inbox = self.vendor.new_inbox();
        inbox.rsplit('.').next().unwrap_or_default().to_owned()
    }

    pub(crate) fn server_version(&self) -> String {
        self.vendor.server_info().version
    }

    /// How large a value may be. Reading one through the server's API makes it a third larger, and
    /// that has to pass as well.
    pub(crate) fn value_bytes_max(&self) -> usize {
        self.vendor.max_payload().saturating_sub(2 * HEADER_BYTES) / 4 * 3
    }

    /// The last message of a subject, as the stream's leader has it.
    pub(crate) async fn get(&self, op: Op<'_>, subject: &str) -> Result<Last> {
        match (self.stored(op, subject).await?, self.expiry) {
            (None, _) => Ok(Last::default()),
            (Some(stored), Expiry::Server) => Ok(stored.last),
            (Some(stored), Expiry::Clients) => Box::pin(self.judged(op, subject, stored)).await,
        }
    }

    async fn stored(&self, op: Op<'_>, subject: &str) -> Result<Option<Stored>> {
        #[derive(Serialize)]
        struct Get<'a> {
            last_by_subj: &'a str,
        }
        let api = format!("STREAM.MSG.GET.{}", self.shared.stream);
        let request = Get { last_by_subj: subject };
        let found: MessageReply = match self.api(op.reading(), &api, &request).await? {
            Ok(found) => found,
            Err(refusal) if refusal.err_code == NO_MESSAGE => return Ok(None),
            Err(refusal) => return Err(refusal.error(op.reading())),
        };
        let unreadable = |source: base64::DecodeError| {
            op.error(ErrorKind::Corrupt)
                .message("the server's answer is no base64")
                .with_source(source)
        };
        let message = found.message;
        let headers = BASE64.decode(message.headers).map_err(unreadable)?;
        let headers = String::from_utf8_lossy(&headers);
        let (value, aside) = if is_marker(&headers) {
            (None, None)
        } else {
            let value = BASE64.decode(message.data).map_err(unreadable)?;
            let (value, aside) = apart(value.into(), header(&headers, ASIDE));
            (Some(value), aside)
        };
        self.saw(op, message.sequence, Found::Read).await?;
        let ttl = header(&headers, TTL_MS).and_then(ttl_of);
        let ttl = ttl.or_else(|| header(&headers, TTL).and_then(server_ttl_of));
        let written = time_of(op, &message.time)?;
        let life = ttl.filter(|_| value.is_some()).map(|ttl| Life { written, ttl });
        let last = Last { sequence: message.sequence, value, aside, life };
        Ok(Some(Stored { last, written, ttl }))
    }

    /// Writes if the condition holds.
    pub(crate) async fn put(&self, op: Op<'_>, put: Put<'_>) -> Result<Outcome> {
        if self.is_too_late(op, &put).await? {
            return Ok(Outcome::Conflict);
        }
        self.put_as_it_is(op, put).await
    }

    /// The same, also where the record's time is over by the server's clock.
    async fn put_as_it_is(&self, op: Op<'_>, put: Put<'_>) -> Result<Outcome> {
        let headers = put.headers(self.expiry);
        let subject = put.subject;
        let reply = match self.request(op, subject, headers, put.value).await {
            Err(error) if is_unanswerable(&error) => {
                return Err(Box::pin(self.explained(op, error)).await);
            }
            reply => reply?,
        };
        let outcome = outcome(op, &reply)?;
        if let Outcome::Done(sequence) = outcome
            && let Err(error) = self.saw(op, sequence, Found::Written).await
        {
            return Err(Box::pin(self.taken_back(op, subject, sequence, error)).await);
        }
        Ok(outcome)
    }

    /// Takes in at which sequence the bucket is, and fails if that is another one's.
    async fn saw(&self, op: Op<'_>, sequence: u64, found: Found) -> Result<()> {
        let Some(opened) = self.shared.opened.get() else { return Ok(()) };
        if opened.is_odd(sequence, found) {
            Box::pin(self.look_at_identity(op)).await?;
        }
        opened.newest.fetch_max(sequence, Ordering::Relaxed);
        Ok(())
    }

    /// Takes away what was written to another bucket than it was meant for, and tells so.
    async fn taken_back(&self, op: Op<'_>, subject: &str, sequence: u64, error: Error) -> Error {
        if error.kind() != ErrorKind::Misconfigured {
            return op.unclear(error.message_text().to_owned()).with_source(error);
        }
        let condition = Condition::At(sequence);
        let put = Put { subject, value: Bytes::new(), ttl: Some(MARKER_TTL), condition };
        // If it fails, the record's TTL ends it.
        match self.mark(op.named(TAKE_BACK), &put, REMOVED).await {
            Ok(Outcome::Done(_)) => error,
            _ => error.effect_unknown(),
        }
    }

    /// What nobody answered, and whether that is because the bucket is gone.
    async fn explained(&self, op: Op<'_>, error: Error) -> Error {
        match self.stream_info(op.reading()).await {
            Ok(Err(refusal)) if refusal.err_code == NO_STREAM => {
                refusal.error(op.reading()).with_source(error)
            }
            _ => error,
        }
    }

    /// Fails if the bucket was deleted and made again, for an answer that may come from another one.
    pub(crate) async fn look_at_identity(&self, op: Op<'_>) -> Result<()> {
        let op = op.reading();
        let info = self.stream_info(op).await?.map_err(|refusal| refusal.error(op))?;
        self.is_same(op, &info)
    }

    /// What is said of a bucket that was deleted and made again.
    fn another(op: Op<'_>) -> Error {
        let why = "the bucket was deleted and made again, and is another one now than when the backend \
                   was opened; open it again";
        op.error(ErrorKind::Misconfigured).message(why)
    }

    /// Writes if the condition holds, and something else in the same message.
    pub(crate) async fn put_with(
        &self,
        op: Op<'_>,
        put: Put<'_>,
        aside: &Aside,
    ) -> Result<Outcome> {
        let mut headers = put.headers(self.expiry);
        headers.insert(ASIDE, format!("{} {}", put.value.len(), aside.what));
        let both = [&put.value[..], &aside.value].concat();
        let reply = self.request(op, put.subject, headers, both.into()).await?;
        outcome(op, &reply)
    }

    /// Whether this would write over a record that has run out, or over another one than it names.
    /// Only where the server does not end records: what it ended can't be written over.
    async fn is_too_late(&self, op: Op<'_>, put: &Put<'_>) -> Result<bool> {
        match (self.expiry, put.ttl, &put.condition) {
            (Expiry::Clients, Some(_), Condition::At(at)) if *at > 0 => {
                // One that has a lower sequence was read from a deposed leader.
                Ok(Box::pin(self.get(op, put.subject)).await?.sequence > *at)
            }
            _ => Ok(false),
        }
    }

    /// Writes if the condition holds and `guarded` has this last message, in one atomic step. The
    /// guard's subject takes a message of its own for that.
    pub(crate) async fn put_guarded(
        &self,
        op: Op<'_>,
        put: Put<'_>,
        guard: &str,
        guarded: (&str, u64),
    ) -> Result<Outcome> {
        self.ready(op).await?;
        let batch = self.unique();
        let mut headers = HeaderMap::new();
        headers.insert(EXPECTED, guarded.1.to_string());
        headers.insert(EXPECTED_OF, guarded.0);
        headers.insert(TTL, seconds(MARKER_TTL));
        headers.insert(BATCH_ID, batch.as_str());
        headers.insert(BATCH_SEQUENCE, "1");
        // Without its end the server throws a batch away, so nothing has happened if this fails.
        let begin = self.vendor.publish_with_headers(guard.to_owned(), headers, Bytes::new());
        match timeout(self.shared.request_timeout, begin).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                return Err(op.reading().unclear("the connection broke").with_source(error));
            }
            Err(_) => return Err(op.reading().unclear("no room for a request in time")),
        }
        let mut headers = put.headers(self.expiry);
        headers.insert(BATCH_ID, batch.as_str());
        headers.insert(BATCH_SEQUENCE, "2");
        headers.insert(BATCH_COMMIT, "1");
        let reply = self.request(op, put.subject, headers, put.value).await?;
        outcome(op, &reply)
    }

    /// Removes a record of this TTL if this is its sequence. A marker stays for a moment, so that
    /// watches see it; where the server ends no records, as long as the record would have lived.
    pub(crate) async fn remove(
        &self,
        op: Op<'_>,
        subject: &str,
        sequence: u64,
        ttl: Duration,
    ) -> Result<Outcome> {
        let ttl = match self.expiry {
            Expiry::Server => MARKER_TTL,
            Expiry::Clients => ttl,
        };
        let condition = Condition::At(sequence);
        let put = Put { subject, value: Bytes::new(), ttl: Some(ttl), condition };
        if self.is_too_late(op, &put).await? {
            return Ok(Outcome::Conflict);
        }
        self.mark(op, &put, REMOVED).await
    }

    /// Puts a marker in a record's place that says why it is gone.
    async fn mark(&self, op: Op<'_>, put: &Put<'_>, why: &'static str) -> Result<Outcome> {
        let mut headers = put.headers(self.expiry);
        headers.insert(OPERATION, "PURGE");
        headers.insert(ROLLUP, "sub");
        headers.insert(why, "1");
        let reply = self.request(op, put.subject, headers, Bytes::new()).await?;
        let outcome = outcome(op, &reply)?;
        if let (Outcome::Done(marker), Expiry::Clients) = (outcome, self.expiry) {
            self.forget(put.subject, marker, put.ttl.unwrap_or_default());
        }
        Ok(outcome)
    }

    /// Removes what nobody needs any more, whatever its sequence.
    pub(crate) async fn erase(&self, op: Op<'_>, subject: &str) -> Result<()> {
        if self.expiry == Expiry::Clients {
            return self.purge(op, Some(subject), None).await;
        }
        let put =
            Put { subject, value: Bytes::new(), ttl: Some(MARKER_TTL), condition: Condition::None };
        self.mark(op, &put, REMOVED).await.map(drop)
    }

    /// Tells the server and ends everything of this handle.
    pub(crate) async fn close(&self, op: Op<'_>) -> Result<()> {
        self.shared.closed.cancel();
        self.shared.trouble.send_modify(|trouble| trouble.closed = true);
        self.shared.tasks.close();
        let tidy = async {
            self.shared.tasks.wait().await;
            self.vendor.drain().await
        };
        match timeout(CLOSE_LIMIT, tidy).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(op.reading().unclear("the connection broke").with_source(error)),
            Err(_) => Err(op.reading().unclear("the connection did not close in time")),
        }
    }

    /// One request to JetStream's own API.
    async fn api<T: DeserializeOwned>(
        &self,
        op: Op<'_>,
        api: &str,
        request: &(impl Serialize + Sync),
    ) -> Result<Result<T, Refusal>> {
        let unwritable = |source: serde_json::Error| {
            op.error(ErrorKind::Internal).message("a request can't be written").with_source(source)
        };
        let body = serde_json::to_vec(request).map_err(unwritable)?;
        let subject = format!("$JS.API.{api}");
        let reply = self.request(op, &subject, HeaderMap::new(), body.into()).await?;
        let unreadable = || op.unclear("the server's answer can't be read");
        let parsed: Reply<T> = serde_json::from_slice(&reply.payload)
            .map_err(|source| unreadable().with_source(source))?;
        match parsed {
            Reply { error: Some(refusal), .. } => Ok(Err(refusal)),
            Reply { value: Some(value), .. } => Ok(Ok(value)),
            Reply { .. } => Err(unreadable()),
        }
    }

    /// One request and its reply, within the time limit.
    async fn request(
        &self,
        op: Op<'_>,
        subject: &str,
        headers: HeaderMap,
        payload: Bytes,
    ) -> Result<Message> {
        self.ready(op).await?;
        let mut trouble = self.shared.trouble.subscribe();
        let (losses, denials) = {
            let before = trouble.borrow();
            (before.losses, before.denials)
        };
        let mut ended = None;
        let is_over = |trouble: &Trouble| {
            if trouble.closed {
                // What was sent may be applied all the same.
                ended = Some(match op.effect {
                    Effect::None => op.closed(),
                    _ => op.closed().effect_unknown(),
                });
            } else if let Some(denial) = trouble.denial(denials, subject) {
                ended = Some(denied(op, &denial));
            } else if trouble.losses != losses {
                ended = Some(op.unclear("the connection was lost"));
            }
            ended.is_some()
        };
        let mut request = Request::new().payload(payload).timeout(None);
        if !headers.is_empty() {
            request = request.headers(headers);
        }
        let reply = self.vendor.send_request(subject.to_owned(), request);
        let reply = tokio::select! {
            biased;
            reply = timeout(self.shared.request_timeout, reply) => Some(reply),
            _ = trouble.wait_for(is_over) => None,
        };
        match reply {
            Some(Ok(reply)) => reply.map_err(|error| request_error(op, error)),
            Some(Err(_)) => Err(op.unclear("no answer in time")),
            None => Err(ended.unwrap_or_else(|| op.unclear("the connection was lost"))),
        }
    }

    /// Waits for a connection, as long as a request may take. A request that is handed over without
    /// one would be sent whenever there is one again, long after its caller has given up.
    async fn ready(&self, op: Op<'_>) -> Result<()> {
        let limit = Instant::now() + self.shared.request_timeout;
        loop {
            if self.shared.closed.is_cancelled() {
                return Err(op.closed());
            }
            let is_another = |opened: &Opened| opened.is_another.load(Ordering::Relaxed);
            if ![CHECK, TAKE_BACK].contains(&op.name)
                && self.shared.opened.get().is_some_and(is_another)
            {
                return Err(Self::another(op));
            }
            if self.vendor.connection_state() == State::Connected {
                return Ok(());
            }
            if Instant::now() >= limit {
                return Err(op.reading().unclear("no connection to any server just now"));
            }
            // The client tells of its connection only when it is asked.
            sleep(READY_PAUSE).await;
        }
    }
}

impl Put<'_> {
    fn headers(&self, expiry: Expiry) -> HeaderMap {
        let mut headers = HeaderMap::new();
        match self.condition {
            Condition::None => {}
            Condition::At(sequence) => headers.insert(EXPECTED, sequence.to_string()),
            Condition::Elsewhere { subject, sequence, id } => {
                headers.insert(EXPECTED, sequence.to_string());
                headers.insert(EXPECTED_OF, subject);
                headers.insert(MESSAGE_ID, id);
            }
        }
        match (self.ttl, expiry) {
            (None, _) => {}
            (Some(ttl), Expiry::Server) => headers.insert(TTL, seconds(ttl)),
            (Some(ttl), Expiry::Clients) => headers.insert(TTL_MS, ttl.as_millis().to_string()),
        }
        headers
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("stream", &self.shared.stream)
            .field("closed", &self.shared.closed.is_cancelled())
            .finish_non_exhaustive()
    }
}

fn outcome(op: Op<'_>, reply: &Message) -> Result<Outcome> {
    let reply: PublishReply = serde_json::from_slice(&reply.payload)
        .map_err(|source| op.unclear("the server's answer can't be read").with_source(source))?;
    match reply {
        PublishReply { error: Some(refusal), .. } => match refusal.err_code {
            WRONG_SEQUENCE | WRONG_SEQUENCE_SOON => Ok(Outcome::Conflict),
            DUPLICATE_SOON => Ok(Outcome::Duplicate),
            _ => Err(refusal.error(op)),
        },
        PublishReply { duplicate: true, .. } => Ok(Outcome::Duplicate),
        PublishReply { sequence: 0, .. } => Err(op.unclear("the server's answer has no sequence")),
        PublishReply { sequence, .. } => Ok(Outcome::Done(sequence)),
    }
}

/// Whether a message says that the record is gone: one of ours, one of the store's own tools, or
/// the one that the server leaves where a record ran out.
fn is_marker(headers: &str) -> bool {
    header(headers, MARKER_REASON).is_some() || header(headers, OPERATION).is_some_and(is_removal)
}

/// A record, and what was written besides it, as the header says.
fn apart(mut value: Bytes, header: Option<&str>) -> (Bytes, Option<Aside>) {
    let said = header.and_then(|text| text.split_once(' '));
    match said.and_then(|(length, what)| Some((length.parse::<usize>().ok()?, what))) {
        Some((length, what)) if length <= value.len() => {
            let rest = value.split_off(length);
            (value, Some(Aside { what: what.to_owned(), value: rest }))
        }
        _ => (value, None),
    }
}

/// What a header says, in a message's headers as they stand on the wire.
fn header<'a>(headers: &'a str, name: &str) -> Option<&'a str> {
    let mut fields = headers.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
}

fn is_removal(operation: &str) -> bool {
    operation == "DEL" || operation == "PURGE"
}

/// A TTL as it stands in the server's own header: in whole seconds, as [`seconds`] writes it.
fn server_ttl_of(text: &str) -> Option<Duration> {
    text.trim().strip_suffix('s')?.parse().ok().map(Duration::from_secs)
}

/// A TTL as the server takes it: in whole seconds, 1 at least.
fn seconds(ttl: Duration) -> String {
    let millis = ttl.as_millis();
    format!("{}s", millis.div_ceil(1_000).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ttl_is_rounded_up_to_seconds() {
        for (millis, text) in
            [(0, "1s"), (500, "1s"), (1_000, "1s"), (1_001, "2s"), (60_000, "60s")]
        {
            assert_eq!(seconds(Duration::from_millis(millis)), text);
            let rounded = Duration::from_millis(millis.div_ceil(1_000).max(1) * 1_000);
            assert_eq!(server_ttl_of(text), Some(rounded));
        }
    }

    #[test]
    fn a_bucket_that_counts_from_elsewhere_is_looked_at() {
        let made = 1_790_000_000_000_000;
        let opened = Opened {
            identity: "one".to_owned(),
            from: made,
            newest: AtomicU64::new(made + 10),
            is_another: AtomicBool::new(false),
        };
        for found in [Found::Read, Found::Written] {
            assert!(!opened.is_odd(made + 1, found));
            assert!(!opened.is_odd(made + 5_000, found));
            // Made again a second later.
            assert!(opened.is_odd(made + 1_000_000, found));
        }
        // By a server whose clock had gone back; a record may be an old one.
        assert!(opened.is_odd(made - 1_000_000, Found::Written));
        assert!(!opened.is_odd(made - 1_000_000, Found::Read));
    }

    #[test]
    fn a_marker_is_told_from_a_record() {
        for (headers, gone) in [
            ("NATS/1.0\r\nNats-Marker-Reason: MaxAge\r\nNats-TTL: 1s\r\n\r\n", true),
            ("NATS/1.0\r\nKV-Operation: DEL\r\n\r\n", true),
            ("NATS/1.0\r\nNats-TTL: 2s\r\nKV-Operation: PURGE\r\n\r\n", true),
            ("NATS/1.0\r\nNats-TTL: 2s\r\nNats-Expected-Last-Subject-Sequence: 0\r\n\r\n", false),
            ("", false),
        ] {
            assert_eq!(is_marker(headers), gone, "{headers:?}");
        }
    }

    #[test]
    fn a_denial_ends_what_it_is_about_and_came_before() {
        let mut trouble = Trouble::default();
        trouble.note_denial("permissions violation for publish to \"a.b\"".into());
        assert!(trouble.denial(0, "a.b").is_some());
        assert_eq!((trouble.denial(0, "a"), trouble.denial(1, "a.b")), (None, None));
        for number in 0..2 * DENIALS_MAX {
            trouble
                .note_denial(format!("permissions violation for publish to \"{number}\"").into());
        }
        assert_eq!(trouble.denied.len(), DENIALS_MAX);
        assert_eq!(trouble.denial(0, "a.b"), None, "thrown away");
        let last = (2 * DENIALS_MAX - 1).to_string();
        assert!(trouble.denial(trouble.denials - 1, &last).is_some());
        trouble.note_denial("permissions violation for subscription to \"_INBOX.x\"".into());
        assert_eq!(trouble.denial(trouble.denials - 1, "a.b"), None);
        trouble.note_denial("Permissions Violation for Subscription to \"_INBOX.x\"".into());
        assert!(trouble.denial(trouble.denials - 1, "a.b").is_some());
    }

    #[test]
    fn what_is_written_besides_a_record_is_told_apart() {
        let both = || Bytes::from_static(b"recordaside");
        let aside = Aside { what: "an answer".to_owned(), value: Bytes::from_static(b"aside") };
        assert_eq!(apart(both(), Some("6 an answer")), (both().slice(..6), Some(aside)));
        for text in [None, Some(""), Some("6"), Some("12 more than there is"), Some("x y")] {
            assert_eq!(apart(both(), text), (both(), None));
        }
    }

    #[test]
    fn a_write_names_its_condition_and_its_ttl() {
        let put = |condition| Put {
            subject: "a",
            value: Bytes::new(),
            ttl: Some(Duration::from_millis(1_500)),
            condition,
        };
        let headers = put(Condition::At(7)).headers(Expiry::Server);
        let text = |headers: &HeaderMap, name| headers.get(name).map(ToString::to_string);
        assert_eq!(text(&headers, EXPECTED).as_deref(), Some("7"));
        assert_eq!(text(&headers, TTL).as_deref(), Some("2s"));
        assert_eq!((text(&headers, EXPECTED_OF), text(&headers, TTL_MS)), (None, None));
        let headers = put(Condition::At(7)).headers(Expiry::Clients);
        assert_eq!(text(&headers, TTL_MS).as_deref(), Some("1500"));
        assert_eq!(text(&headers, TTL), None);
        let elsewhere = Condition::Elsewhere { subject: "b", sequence: 9, id: "one" };
        let headers = put(elsewhere).headers(Expiry::Server);
        assert_eq!(text(&headers, EXPECTED).as_deref(), Some("9"));
        assert_eq!(text(&headers, EXPECTED_OF).as_deref(), Some("b"));
        assert_eq!(text(&headers, MESSAGE_ID).as_deref(), Some("one"));
    }
}
