//! Subscriptions: a snapshot, then what changes.
//!
//! ```text
//!  the cluster's stream ──► Hub, one task and one connection for all watches of a handle:
//!     reads what came (XREAD BLOCK), and ends what has run out
//!        └── hints ──► Subscription ──► reads again what they are about, tells the difference
//! ```
//!
//! A hint only says what to read again, so one that comes twice, or late, does no harm. Where hints
//! are missing (the stream was trimmed, or is another), each subscription begins anew with a snapshot;
//! and now and then it reads everything without being told.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use coord_core::kit::Op;
use coord_core::{Error, ErrorKind, Result};
use futures::stream::{self, BoxStream, StreamExt};
use redis::Value;
use tokio::sync::broadcast;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::link::Link;
use super::{Client, Reply, exchange};
use crate::error::strange;
use crate::keys::Kind;
use crate::scripts::REAP;

/// The longest that the hub waits for events before it looks whether something has run out.
const BLOCK_MAX: Duration = Duration::from_secs(3);
/// How many events are read at once.
const EVENTS_AT_ONCE: usize = 1_000;
/// How many batches a subscription may be behind before it begins anew.
const BEHIND_MAX: usize = 256;

/// What a hint is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    Lease,
    Node,
    Table,
    Request,
}

/// Something has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hint {
    pub(crate) subject: Subject,
    pub(crate) name: String,
    /// What happened, one word of the scripts'.
    pub(crate) what: String,
    /// The term or the incarnation that it happened to.
    pub(crate) about: String,
}

/// What the hub tells the subscriptions.
#[derive(Clone, Debug)]
enum Signal {
    Hints(Arc<[Hint]>),
    /// Hints are missing.
    Gap,
    Failed(ErrorKind, Arc<str>),
}

/// Reads the stream for all subscriptions of a handle, while there are any.
pub(crate) struct Hub {
    link: Arc<Link>,
    running: Arc<Mutex<Option<Running>>>,
}

struct Running {
    signals: broadcast::Sender<Signal>,
    /// Whether it knows from where on it reads.
    ready: watch::Receiver<bool>,
}

type Inbox = broadcast::Receiver<Signal>;

impl Hub {
    pub(crate) fn new(link: Link) -> Self {
        Self { link: Arc::new(link), running: Arc::default() }
    }

    /// Ends its connection.
    pub(super) fn cut(&self) {
        self.link.cut();
    }

    /// Joins the hub, and starts it if it does not run. Whatever changes from the answer on is told.
    async fn join(&self, op: Op<'_>, client: &Client) -> Result<Inbox> {
        let (mut inbox, mut ready) = {
            let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
            let running = running.get_or_insert_with(|| self.start(client));
            (running.signals.subscribe(), running.ready.clone())
        };
        // Its end is told through the inbox.
        let is_ready = ready.wait_for(|ready| *ready).await.is_ok();
        if is_ready {
            return Ok(inbox);
        }
        match inbox.try_recv() {
            Ok(Signal::Failed(kind, why)) => Err(op.error(kind).message(why.to_string())),
            _ => Err(op.error(ErrorKind::Unavailable).message("the events can't be read")),
        }
    }

    fn start(&self, client: &Client) -> Running {
        let (signals, _) = broadcast::channel(BEHIND_MAX);
        let (set_ready, ready) = watch::channel(false);
        let reader = Reader {
            // The task must not keep the handle alive.
            client: Arc::downgrade(&client.0),
            link: Arc::clone(&self.link),
            running: Arc::clone(&self.running),
            signals: signals.clone(),
            key: client.keys().of(Kind::Events),
            last: String::new(),
        };
        let closed = client.closed().clone();
        drop(client.0.tasks.spawn(async move {
            closed.run_until_cancelled(reader.run(set_ready)).await;
        }));
        Running { signals, ready }
    }
}

struct Reader {
    client: std::sync::Weak<super::Shared>,
    link: Arc<Link>,
    running: Arc<Mutex<Option<Running>>>,
    signals: broadcast::Sender<Signal>,
    key: String,
    /// The event that was read last.
    last: String,
}

impl Reader {
    async fn run(mut self, ready: watch::Sender<bool>) {
        let op = Op::read("watch", "events");
        loop {
            match self.round(op, &ready).await {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    self.link.cut();
                    // The next to subscribe starts another hub.
                    *self.running.lock().unwrap_or_else(PoisonError::into_inner) = None;
                    let why = error.message_text().into();
                    // Nobody may be left to hear it.
                    let _ = self.signals.send(Signal::Failed(error.kind(), why));
                    return;
                }
            }
        }
    }

    /// Ends what has run out, and reads what comes until more runs out. False once nobody listens.
    async fn round(&mut self, op: Op<'_>, ready: &watch::Sender<bool>) -> Result<bool> {
        let reaped = {
            let Some(client) = self.client.upgrade().map(Client) else { return Ok(false) };
            client.run(op, &REAP, &[self.last.as_bytes()]).await?
        };
        let next_end = reaped.micros(2).unwrap_or(BLOCK_MAX);
        if self.last.is_empty() {
            reaped.text(1).clone_into(&mut self.last);
            ready.send_replace(true);
        } else if reaped.text(0) == "1" {
            reaped.text(1).clone_into(&mut self.last);
            // Nobody may be left to hear it.
            let _ = self.signals.send(Signal::Gap);
        }
        if self.is_alone() {
            return Ok(false);
        }
        // A millisecond later, so that what runs out has then run out.
        let block = next_end.min(BLOCK_MAX) + Duration::from_millis(1);
        let mut command = redis::cmd("XREAD");
        command.arg("COUNT").arg(EVENTS_AT_ONCE).arg("BLOCK").arg(block.as_millis().to_string());
        command.arg("STREAMS").arg(&self.key).arg(&self.last);
        let mut live = tokio::time::timeout(self.link.request_timeout(), self.link.live(op))
            .await
            .unwrap_or_else(|_| {
                Err(op.error(ErrorKind::Unavailable).message("no connection in time"))
            })?;
        let limit = block + self.link.request_timeout();
        let answer = exchange(op, &mut live.connection, &command, limit).await?;
        let (last, hints) = hints(op, answer)?;
        if let Some(last) = last {
            // Whether some are missing before these is seen by whether the one before is still there.
            let before = std::mem::replace(&mut self.last, last);
            if !hints.is_empty() {
                let _ = self.signals.send(Signal::Hints(hints.into()));
            }
            self.look_back(op, &before).await?;
        }
        Ok(true)
    }

    /// Tells of a gap if the event that was read before the last ones is gone: then so may be some in
    /// between.
    async fn look_back(&self, op: Op<'_>, before: &str) -> Result<()> {
        if before == "0-0" {
            return Ok(());
        }
        let Some(client) = self.client.upgrade().map(Client) else { return Ok(()) };
        let mut command = redis::cmd("XRANGE");
        command.arg(&self.key).arg(before).arg(before);
        let mut live = self.link.live(op).await?;
        let limit = client.0.request_timeout;
        let answer = exchange(op, &mut live.connection, &command, limit).await?;
        if matches!(&answer, Value::Array(found) if found.is_empty()) {
            let _ = self.signals.send(Signal::Gap);
        }
        Ok(())
    }

    /// Whether nobody listens any more; then the next to subscribe starts another hub.
    fn is_alone(&self) -> bool {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let is_alone = self.signals.receiver_count() == 0;
        if is_alone {
            *running = None;
        }
        is_alone
    }
}

/// What `XREAD` answered for its one stream: the last id, and the hints that can be read. Others are
/// of a newer version.
fn hints(op: Op<'_>, answer: Value) -> Result<(Option<String>, Vec<Hint>)> {
    let array = |value| match value {
        Value::Array(items) => Ok(items),
        Value::Nil => Ok(Vec::new()),
        other => Err(strange(op, &format!("{other:?}"))),
    };
    let Some(stream) = array(answer)?.pop() else { return Ok((None, Vec::new())) };
    let mut last = None;
    let mut hints = Vec::new();
    for entry in array(array(stream)?.pop().unwrap_or(Value::Nil))? {
        let mut entry = array(entry)?.into_iter();
        let id = Reply::of(op, entry.next().unwrap_or(Value::Nil))?;
        last = Some(id.text(0).to_owned());
        let fields = Reply::of(op, entry.next().unwrap_or(Value::Nil))?;
        hints.extend(hint(&fields));
    }
    Ok((last, hints))
}

fn hint(fields: &Reply) -> Option<Hint> {
    let field = |name: &str| {
        let pairs = fields.items().chunks_exact(2);
        let found = pairs.into_iter().find(|pair| pair[0] == name.as_bytes());
        found.map(|pair: &[Bytes]| String::from_utf8_lossy(&pair[1]).into_owned())
    };
    let subject = match field("kind")?.as_str() {
        "lease" => Subject::Lease,
        "node" => Subject::Node,
        "table" => Subject::Table,
        "request" => Subject::Request,
        _ => return None,
    };
    let (what, about) = (field("what").unwrap_or_default(), field("about").unwrap_or_default());
    Some(Hint { subject, name: field("name")?, what, about })
}

/// What can be watched.
pub(crate) trait Topic: Send + 'static {
    type Event: fmt::Debug + Send + 'static;

    /// How often everything is read again, should a hint be missing or somebody have written by hand.
    const READ_AGAIN: Duration;

    /// Whether a hint is about it.
    fn concerns(&self, hint: &Hint) -> bool;

    /// The state now, as an event.
    fn snapshot(&mut self) -> impl Future<Output = Result<Self::Event>> + Send;

    /// Reads again what the hints are about, or everything where there are none, and tells what is
    /// different.
    fn changed(
        &mut self,
        hints: &[Hint],
        events: &mut VecDeque<Self::Event>,
    ) -> impl Future<Output = Result<()>> + Send;
}

/// One subscription. It ends with its first error, and with the handle.
pub(crate) fn subscribe<T: Topic>(
    client: &Client,
    resource: &str,
    topic: T,
) -> BoxStream<'static, Result<T::Event>> {
    let closed = client.closed().clone().cancelled_owned();
    let end = Op::read("watch", resource).closed();
    let subscription = Subscription {
        client: client.clone(),
        resource: resource.to_owned(),
        topic,
        inbox: None,
        events: VecDeque::new(),
        read_again: Instant::now(),
    };
    let events = stream::unfold(Some(subscription), |subscription| async {
        let mut subscription = subscription?;
        match subscription.next().await {
            Ok(event) => Some((Ok(event), Some(subscription))),
            Err(error) => Some((Err(error), None)),
        }
    });
    // An error that `take_until` cuts off is replaced by the reason.
    let mut ended = false;
    let closing = stream::once(async { Err(end) });
    events
        .take_until(closed)
        .chain(closing)
        .take_while(move |event| {
            let goes_on = !std::mem::replace(&mut ended, event.is_err());
            std::future::ready(goes_on)
        })
        .boxed()
}

struct Subscription<T: Topic> {
    client: Client,
    resource: String,
    topic: T,
    /// None before the snapshot.
    inbox: Option<Inbox>,
    events: VecDeque<T::Event>,
    read_again: Instant,
}

/// Why a subscription reads something.
enum Wake {
    Hints(Vec<Hint>),
    Gap,
}

impl<T: Topic> Subscription<T> {
    async fn next(&mut self) -> Result<T::Event> {
        if self.inbox.is_none() {
            let op = Op::read("watch", &self.resource);
            self.inbox = Some(self.client.hub().join(op, &self.client).await?);
            return self.snapshot().await;
        }
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            match self.wake().await? {
                Wake::Gap => return self.snapshot().await,
                Wake::Hints(hints) => {
                    if hints.is_empty() {
                        self.read_again = Instant::now() + T::READ_AGAIN;
                    }
                    self.topic.changed(&hints, &mut self.events).await?;
                }
            }
        }
    }

    async fn snapshot(&mut self) -> Result<T::Event> {
        self.events.clear();
        self.read_again = Instant::now() + T::READ_AGAIN;
        self.topic.snapshot().await
    }

    /// Waits until there is something to be read: hints that concern the topic, or none when it is
    /// time to read everything.
    async fn wake(&mut self) -> Result<Wake> {
        let op = Op::read("watch", &self.resource);
        let Some(inbox) = &mut self.inbox else { return Ok(Wake::Gap) };
        let mut found = Vec::new();
        loop {
            let signal = if found.is_empty() {
                tokio::select! {
                    signal = inbox.recv() => signal,
                    () = sleep_until(self.read_again) => return Ok(Wake::Hints(Vec::new())),
                }
            } else {
                // What came meanwhile is read in one go.
                match inbox.try_recv() {
                    Ok(signal) => Ok(signal),
                    Err(broadcast::error::TryRecvError::Lagged(_)) => return Ok(Wake::Gap),
                    Err(_) => return Ok(Wake::Hints(found)),
                }
            };
            match signal {
                Ok(Signal::Hints(hints)) => {
                    found.extend(hints.iter().filter(|hint| self.topic.concerns(hint)).cloned());
                }
                Ok(Signal::Gap) | Err(broadcast::error::RecvError::Lagged(_)) => {
                    return Ok(Wake::Gap);
                }
                Ok(Signal::Failed(kind, why)) => {
                    return Err(Error::new(kind, op.name)
                        .effect_none()
                        .resource(op.resource)
                        .message(why.to_string()));
                }
                Err(broadcast::error::RecvError::Closed) => {
                    let why = "the events are not read any more";
                    return Err(op.error(ErrorKind::Unavailable).message(why));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.into())
    }

    #[test]
    fn what_a_newer_version_says_is_passed_over() {
        let op = Op::read("watch", "events");
        let entry = |id: &str, kind: &str| {
            let fields = ["kind", kind, "name", "jobs", "what", "ended", "about", "7"].map(bulk);
            Value::Array(vec![bulk(id), Value::Array(fields.to_vec())])
        };
        let entries = Value::Array(vec![entry("1-0", "lease"), entry("2-0", "weather")]);
        let answer = Value::Array(vec![Value::Array(vec![bulk("key"), entries])]);
        let (last, found) = hints(op, answer).expect("reads");
        assert_eq!(last.as_deref(), Some("2-0"));
        let [hint] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!((hint.subject, hint.name.as_str()), (Subject::Lease, "jobs"));
        assert_eq!((hint.what.as_str(), hint.about.as_str()), ("ended", "7"));
        assert_eq!(hints(op, Value::Nil).expect("nothing came"), (None, Vec::new()));
    }
}
