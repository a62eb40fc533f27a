//! Subscriptions: a snapshot, then what changes, read by a task of its own.
//!
//! The server's consumer begins with the last message of each subject and goes on with what
//! follows. It numbers what it sends, so that a message that got lost on the way is seen to be
//! missing. What it can't tell is a marker that came and went while nothing was sent: so a
//! subscription ends when the connection was lost, and when nothing was heard of a record for
//! longer than it may live.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::time::Duration;

use async_nats::{HeaderMap, HeaderValue, Message, StatusCode, Subscriber};
use bytes::Bytes;
use coord_core::kit::Op;
use coord_core::{Error, ErrorKind, Result};
use futures::stream::{self, BoxStream, StreamExt};
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch as changes};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_util::task::task_tracker::TaskTrackerToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use super::expiry::{EXPIRED, End, Ends, TTL_MS, ttl_of};
use super::{ASIDE, Client, Expiry, MARKER_REASON, OPERATION, REMOVED, Trouble, apart, is_removal};

/// How often the server says that there is nothing to say, and after which silence it is away.
const HEARTBEAT: Duration = Duration::from_secs(2);
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// How long the server keeps a consumer that nobody reads.
const INACTIVE_MAX: Duration = Duration::from_secs(10);
/// How much later than its TTL the end of a record may come to be known, before it counts as
/// missed.
const GRACE: Duration = Duration::from_secs(5);
/// How soon a record is looked at again that could not be ended.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// The most events that wait for a reader; one more, and all are replaced by a snapshot.
const EVENTS_MAX: usize = 1_024;
/// How many of those the reader has at hand.
const CHANNEL: usize = 16;

/// What a subscription tells of one subject.
#[derive(Clone, Debug)]
pub(crate) struct Update {
    pub(crate) subject: String,
    pub(crate) sequence: u64,
    pub(crate) what: What,
    /// When it was written, by the server's clock, since 1970.
    written: Duration,
    /// How long it lives, where clients have to end it.
    ttl: Option<Duration>,
}

#[derive(Clone, Debug)]
pub(crate) enum What {
    /// The record was written.
    Put(Bytes),
    /// One of us removed it on purpose.
    Removed,
    /// Another program deleted it.
    Deleted,
    /// It ran out.
    Expired,
}

/// What can be watched: state that is built from updates.
pub(crate) trait Topic: Send + Sync + 'static {
    type Event: fmt::Debug + Send + 'static;

    /// Which subjects it is about.
    fn filter(&self) -> String;

    /// Takes an update in, and tells what it means and how long the record lives if it is not
    /// written again; none where it stays.
    fn apply(
        &mut self,
        update: Update,
        events: &mut VecDeque<Self::Event>,
    ) -> impl Future<Output = Result<Option<Duration>>> + Send;

    /// The record that stands at this sequence, as it is written once more under another one.
    fn written_anew(&self, value: Bytes, sequence: u64) -> Result<Bytes> {
        let _ = sequence;
        Ok(value)
    }

    /// The state now, as an event.
    fn snapshot(&mut self) -> impl Future<Output = Result<Self::Event>> + Send;
}

/// One subscription. It ends with its first error, and with the handle.
pub(crate) fn subscribe<T: Topic>(
    client: &Client,
    resource: &str,
    topic: T,
) -> BoxStream<'static, Result<T::Event>> {
    let (client, resource) = (client.clone(), resource.to_owned());
    // Not before somebody reads: only then there is a runtime for sure.
    let start = async move {
        let (events, receiver) = mpsc::channel(CHANNEL);
        let task = Handle::current().spawn(follow(client, resource, topic, events));
        stream::unfold((receiver, AbortOnDropHandle::new(task)), |(mut receiver, task)| async {
            Some((receiver.recv().await?, (receiver, task)))
        })
    };
    stream::once(start).flatten().boxed()
}

/// Reads a subscription to its end.
async fn follow<T: Topic>(
    client: Client,
    resource: String,
    topic: T,
    out: mpsc::Sender<Result<T::Event>>,
) {
    let op = Op::read("watch", &resource);
    let mut events = VecDeque::new();
    let error = {
        let run = run(&client, op, topic, &mut events, &out);
        tokio::select! {
            biased;
            () = client.closed().cancelled() => op.closed(),
            error = run => error,
        }
    };
    // A reader that is gone needs neither.
    for event in events {
        if out.send(Ok(event)).await.is_err() {
            return;
        }
    }
    let _ = out.send(Err(error)).await;
}

async fn run<T: Topic>(
    client: &Client,
    op: Op<'_>,
    mut topic: T,
    events: &mut VecDeque<T::Event>,
    out: &mpsc::Sender<Result<T::Event>>,
) -> Error {
    let mut subscription = match Subscription::open(client, op, topic.filter()).await {
        Ok(subscription) => subscription,
        Err(error) => return error,
    };
    let mut is_current = false;
    let mut deadlines = Deadlines::default();
    let mut ends = Ends::default();
    loop {
        // No snapshot shows what should be over and was not looked at yet.
        let is_complete = subscription.is_current && ends.due(Instant::now()).is_none();
        if events.len() > EVENTS_MAX || (!is_current && is_complete) {
            is_current = true;
            events.clear();
            match topic.snapshot().await {
                Ok(snapshot) => events.push_back(snapshot),
                Err(error) => return error,
            }
        }
        let step = tokio::select! {
            biased;
            permit = out.reserve(), if !events.is_empty() => {
                let Ok(permit) = permit else { return op.closed() };
                if let Some(event) = events.pop_front() {
                    permit.send(Ok(event));
                }
                continue;
            }
            () = come(ends.next()) => Ok(look_at(client, op, &mut ends).await),
            step = subscription.next(op) => {
                if let Ok(Some(update)) = &step {
                    client.note_end(update, is_current, &mut ends);
                }
                step
            }
        };
        let applied = match step {
            Ok(Some(update)) => deadlines.apply(update, &mut topic, events).await,
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = applied {
            return error;
        }
        if let Some((subject, ttl)) = deadlines.overdue(Instant::now()) {
            match Box::pin(end_anew(client, op, &topic, &subject, ttl)).await {
                Ok(true) => deadlines.set(subject, ttl),
                Ok(false) => {
                    let why = format!("the end of a record was missed subject={subject}");
                    return op.unclear(why);
                }
                Err(error) => return error,
            }
        }
        if !is_current {
            // What is seen before the snapshot is told by it.
            events.clear();
        }
    }
}

/// Looks at a record that must have ended long ago by one's own clock, and tells whether it is there
/// still because its end is further away than it may live: it was written while the server's clock was
/// fast. Then it is written once more, so that its TTL counts from now.
async fn end_anew<T: Topic>(
    client: &Client,
    op: Op<'_>,
    topic: &T,
    subject: &str,
    ttl: Duration,
) -> Result<bool> {
    let Some(stored) = client.stored(op, subject).await? else { return Ok(false) };
    let standing = client.standing(op, &stored.last, ttl).await;
    let Some(value) = stored.last.value.filter(|_| standing.is_some_and(|it| it.ends_too_late))
    else {
        return Ok(false);
    };
    let sequence = stored.last.sequence;
    let value = topic.written_anew(value, sequence)?;
    // Whatever it came to: what stands there now shows in the watch.
    client.count_anew(op, subject, value, ttl, sequence).await.map(|_| true)
}

/// Waits until then; for ever where there is nothing to wait for.
async fn come(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Looks at the record whose time should be over, and tells if it is.
async fn look_at(client: &Client, op: Op<'_>, ends: &mut Ends) -> Option<Update> {
    let (subject, sequence) = ends.due(Instant::now())?;
    let again = match client.try_end(op, &subject, sequence).await {
        Ok(End::Over) => {
            ends.remove(&subject);
            let (written, ttl) = (Duration::ZERO, None);
            return Some(Update { subject, sequence, what: What::Expired, written, ttl });
        }
        // One that is too far away is seen to be overdue.
        Ok(End::In(left)) => left,
        // What took its place is on its way here.
        Ok(End::Replaced) => LOOK_AGAIN,
        Err(error) => {
            tracing::debug!(%error, %subject, "a record was not looked at");
            LOOK_AGAIN
        }
    };
    ends.set(&subject, Instant::now() + again, sequence);
    None
}

impl Client {
    /// Remembers when a record has to be looked at, where the server does not end it, and takes
    /// away what others left behind.
    fn note_end(&self, update: &Update, is_current: bool, ends: &mut Ends) {
        if self.expiry == Expiry::Server {
            return;
        }
        self.heard_of(update.written);
        match (&update.what, update.ttl) {
            (What::Put(_), Some(ttl)) => {
                ends.set(&update.subject, self.local(update.written + ttl), update.sequence);
            }
            (What::Put(_), None) => ends.remove(&update.subject),
            (What::Removed | What::Deleted | What::Expired, _) => {
                ends.remove(&update.subject);
                if !is_current {
                    self.forget_old(&update.subject, update.sequence, update.written, update.ttl);
                }
            }
        }
    }
}

/// By when something has to be heard of each record.
#[derive(Default)]
struct Deadlines {
    /// With how long the record lives.
    by_subject: HashMap<String, (Instant, Duration)>,
    checked: Option<Instant>,
}

impl Deadlines {
    async fn apply<T: Topic>(
        &mut self,
        update: Update,
        topic: &mut T,
        events: &mut VecDeque<T::Event>,
    ) -> Result<()> {
        let subject = update.subject.clone();
        match topic.apply(update, events).await? {
            Some(ttl) => self.set(subject, ttl),
            None => drop(self.by_subject.remove(&subject)),
        }
        Ok(())
    }

    fn set(&mut self, subject: String, ttl: Duration) {
        self.by_subject.insert(subject, (Instant::now() + ttl + GRACE, ttl));
    }

    /// A record that must have ended long ago although nothing was said of it, and how long it lives.
    fn overdue(&mut self, now: Instant) -> Option<(String, Duration)> {
        if self.checked.is_some_and(|checked| now < checked + HEARTBEAT) {
            return None;
        }
        let mut late = self.by_subject.iter().filter(|(_, (deadline, _))| *deadline < now);
        let late = late.next().map(|(subject, (_, ttl))| (subject.clone(), *ttl));
        // There may be more of them.
        self.checked = late.is_none().then_some(now);
        late
    }
}

/// Deletes a consumer when it is dropped, as far as that goes: the server deletes it all the same,
/// but only after a while, and it takes so many at a time only.
struct Deletion {
    vendor: async_nats::Client,
    subject: String,
    runtime: Handle,
    limit: Duration,
    /// Has `close` wait for it.
    tasks: TaskTracker,
    _pending: TaskTrackerToken,
}

impl Deletion {
    fn of(client: &Client, consumer: &str) -> Self {
        Self {
            vendor: client.vendor.clone(),
            subject: format!("$JS.API.CONSUMER.DELETE.{}.{consumer}", client.shared.stream),
            runtime: Handle::current(),
            limit: client.shared.request_timeout,
            tasks: client.tasks().clone(),
            _pending: client.tasks().token(),
        }
    }
}

impl Drop for Deletion {
    fn drop(&mut self) {
        let (vendor, subject) = (self.vendor.clone(), std::mem::take(&mut self.subject));
        let limit = self.limit;
        // Without a connection it waits for the next one. Nobody needs the answer.
        let delete = async move { timeout(limit, vendor.publish(subject, Bytes::new())).await };
        self.tasks.spawn_on(delete, &self.runtime);
    }
}

/// What the server sends.
struct Subscription {
    messages: Subscriber,
    trouble: changes::Receiver<Trouble>,
    /// How often the connection had been lost at the beginning.
    losses: u64,
    /// Deletes the server's consumer when the subscription is dropped.
    _deletion: Deletion,
    /// How many messages were taken in.
    taken: u64,
    /// How many make the snapshot.
    pending: u64,
    /// Whether all that was there at the beginning has been told.
    is_current: bool,
    heard: Instant,
}

#[derive(Serialize)]
struct Create<'a> {
    stream_name: &'a str,
    config: Consumer<'a>,
}

#[derive(Serialize)]
struct Consumer<'a> {
    name: &'a str,
    deliver_subject: &'a str,
    deliver_policy: &'a str,
    ack_policy: &'a str,
    replay_policy: &'a str,
    filter_subject: &'a str,
    /// Nanoseconds.
    idle_heartbeat: u128,
    inactive_threshold: u128,
    max_deliver: i64,
    num_replicas: u8,
    mem_storage: bool,
}

#[derive(Deserialize)]
struct Created {
    #[serde(default)]
    num_pending: u64,
}

impl Subscription {
    async fn open(client: &Client, op: Op<'_>, filter: String) -> Result<Self> {
        client.ready(op).await?;
        match client.expiry {
            Expiry::Clients => client.sample_time(op).await?,
            Expiry::Server => client.look_at_identity(op).await?,
        }
        let trouble = client.shared.trouble.subscribe();
        let losses = trouble.borrow().losses;
        let inbox = client.vendor.new_inbox();
        let subscribe = client.vendor.subscribe(inbox.clone());
        let messages = match timeout(client.shared.request_timeout, subscribe).await {
            Ok(Ok(messages)) => messages,
            Ok(Err(error)) => return Err(op.unclear("the connection broke").with_source(error)),
            Err(_) => return Err(op.unclear("no room for a request in time")),
        };
        let (stream, name) = (&client.shared.stream, client.unique());
        let config = Consumer {
            name: &name,
            deliver_subject: &inbox,
            deliver_policy: "last_per_subject",
            ack_policy: "none",
            replay_policy: "instant",
            filter_subject: &filter,
            idle_heartbeat: HEARTBEAT.as_nanos(),
            inactive_threshold: INACTIVE_MAX.as_nanos(),
            max_deliver: 1,
            num_replicas: 1,
            mem_storage: true,
        };
        // From here on, as a creation whose answer nobody waits for may be done all the same.
        let deletion = Deletion::of(client, &name);
        let api = format!("CONSUMER.CREATE.{stream}.{name}.{filter}");
        let request = Create { stream_name: stream, config };
        let created: Created =
            client.api(op, &api, &request).await?.map_err(|refusal| refusal.error(op))?;
        Ok(Self {
            messages,
            trouble,
            losses,
            _deletion: deletion,
            taken: 0,
            pending: created.num_pending,
            is_current: created.num_pending == 0,
            heard: Instant::now(),
        })
    }

    /// The next update; none for a sign of life. Nothing is lost if the future is dropped.
    async fn next(&mut self, op: Op<'_>) -> Result<Option<Update>> {
        let message = tokio::select! {
            biased;
            message = timeout_at(self.heard + SILENCE_MAX, self.messages.next()) => message,
            _ = self.trouble.wait_for(|trouble| trouble.losses != self.losses) => return Err(op.unclear("the connection was lost")),
        };
        let message = match message {
            Ok(Some(message)) => message,
            Ok(None) => return Err(op.unclear("the client ended the subscription")),
            Err(_) => return Err(op.unclear("nothing was heard of the server for too long")),
        };
        self.heard = Instant::now();
        match message.status {
            None => self.take(op, message).map(Some),
            Some(StatusCode::IDLE_HEARTBEAT) => self.heartbeat(op, message.headers.as_ref()),
            Some(status) => {
                let said = message.description.unwrap_or_default();
                Err(op.unclear(format!("the server ended the watch status={status} said={said:?}")))
            }
        }
    }

    fn heartbeat(&mut self, op: Op<'_>, headers: Option<&HeaderMap>) -> Result<Option<Update>> {
        let last = headers.and_then(|headers| headers.get("Nats-Last-Consumer"));
        let sent = last.and_then(|last| last.as_str().parse::<u64>().ok());
        if sent.is_some_and(|sent| sent != self.taken) {
            return Err(op.unclear("a message was lost on the way"));
        }
        // It is sent only when there is nothing else to send.
        self.is_current = true;
        Ok(None)
    }

    fn take(&mut self, op: Op<'_>, message: Message) -> Result<Update> {
        let reply = message.reply.as_deref().unwrap_or_default();
        let Some(place) = Place::parse(reply) else {
            let why = format!("the server sent a message of an unknown form reply={reply:?}");
            return Err(op.error(ErrorKind::Corrupt).message(why));
        };
        self.taken += 1;
        if place.number != self.taken {
            return Err(op.unclear("a message was lost on the way"));
        }
        self.is_current |= place.pending == 0 || self.taken >= self.pending;
        let header = |name: &str| message.headers.as_ref()?.get(name).map(HeaderValue::as_str);
        let what = if header(MARKER_REASON) == Some("MaxAge") || header(EXPIRED).is_some() {
            What::Expired
        } else if header(REMOVED).is_some() {
            What::Removed
        } else if header(MARKER_REASON).is_some() || header(OPERATION).is_some_and(is_removal) {
            What::Deleted
        } else {
            What::Put(apart(message.payload.clone(), header(ASIDE)).0)
        };
        let ttl = header(TTL_MS).and_then(ttl_of);
        let (subject, sequence) = (message.subject.to_string(), place.sequence);
        Ok(Update { subject, sequence, what, written: place.written, ttl })
    }
}

/// Where a message stands, as the subject for its acknowledgement says.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    /// In the stream.
    sequence: u64,
    /// Among what the consumer has sent.
    number: u64,
    /// When it was written, by the server's clock, since 1970.
    written: Duration,
    /// How many wait behind it.
    pending: u64,
}

impl Place {
    /// `$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<number>.<time>.<pending>`, or the
    /// longer form with the domain and the account before the stream and a token at the end.
    fn parse(reply: &str) -> Option<Self> {
        let tokens: Vec<&str> = reply.split('.').collect();
        let first = match (tokens.as_slice(), tokens.len()) {
            (["$JS", "ACK", ..], 9) => 5,
            (["$JS", "ACK", ..], 11..) => 7,
            _ => return None,
        };
        let number = |index: usize| tokens.get(index)?.parse().ok();
        Some(Self {
            sequence: number(first)?,
            number: number(first + 1)?,
            written: Duration::from_nanos(number(first + 2)?),
            pending: number(first + 3)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_says_where_it_stands() {
        let written = Duration::from_nanos(1_795_975_796_485_859_536);
        let place = Some(Place { sequence: 1_700, number: 2, written, pending: 0 });
        assert_eq!(Place::parse("$JS.ACK.KV_t.w1.1.1700.2.1795975796485859536.0"), place);
        let long = "$JS.ACK.hub.ACCOUNT.KV_t.w1.1.1700.2.1795975796485859536.0.token";
        assert_eq!(Place::parse(long), place);
        assert_eq!(Place::parse("$JS.FC.KV_t.w1.abc"), None);
        assert_eq!(Place::parse(""), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_that_should_have_ended_is_noticed() {
        let mut deadlines = Deadlines::default();
        let (now, ttl) = (Instant::now(), Duration::from_secs(3));
        deadlines.set("a".to_owned(), ttl);
        assert_eq!(deadlines.overdue(now), None);
        assert_eq!(deadlines.overdue(now + GRACE), None);
        let late = now + Duration::from_secs(4) + GRACE;
        assert_eq!(deadlines.overdue(late), Some(("a".to_owned(), ttl)));
        deadlines.by_subject.remove("a");
        assert_eq!(deadlines.overdue(late), None);
        deadlines.set("b".to_owned(), ttl);
        let just_now = deadlines.overdue(late + Duration::from_millis(1));
        assert_eq!(just_now, None, "looked at just now");
    }
}
