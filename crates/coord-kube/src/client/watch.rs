//! Subscriptions: a list, then what changes, read by a task of its own.
//!
//! A watch of the API server goes on from the version of a list. The server ends it after a while,
//! and it is opened again from the last version seen; one that the server has
//! forgotten (410) leads to a new list, whose differences are told. A connection that fell silent
//! is noticed by the time at which the server should have ended it, and a record that seems to have
//! run out is looked up before anybody is told: so a watch that hangs ends nothing. Neither
//! bookmarks nor streaming lists are needed. A server that sends bookmarks does so once a minute and
//! shortly before it ends a watch: then watches are long, and a silence between two of them is noticed.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::time::Duration;

use bytes::{Buf as _, BytesMut};
use coord_core::Result;
use futures::stream::{self, BoxStream, StreamExt};
use http::StatusCode;
use http_body_util::BodyExt as _;
use kube::client::Body;
use serde::Deserialize;
use serde_json::Value;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::task::AbortOnDropHandle;

use super::{Client, List, Object, Resource, Selector, unreadable};
use crate::error::{Asked, Op, refused};

/// After how long the server ends a watch, which is then opened again: as long as no bookmark came,
/// and from then on.
const SHORT_SECONDS: u64 = 30;
const LONG_SECONDS: u64 = 300;
/// How much longer a short watch may take until its connection counts as dead.
const SILENCE_GRACE: Duration = Duration::from_secs(5);
/// For how long a long one may be silent: bookmarks come once a minute.
const BOOKMARKS_EVERY_MAX: Duration = Duration::from_secs(100);
/// A watch that ends sooner than this, and said nothing, is not opened again at once.
const SHORT: Duration = Duration::from_secs(1);
/// The most events that wait for a reader; one more, and all are replaced by a snapshot.
const EVENTS_MAX: usize = 1_024;
/// How many of those the reader has at hand.
const CHANNEL: usize = 16;
/// The longest event, an object of 1 MiB in base64 say.
const LINE_BYTES_MAX: usize = 8 << 20;

/// What can be watched: state that is built from objects.
pub(crate) trait Topic: Send + 'static {
    type Event: fmt::Debug + Send + 'static;

    /// Which objects it is about.
    fn selector(&self) -> (Resource, Selector);

    /// Takes in all objects that there are, and tells what differs from the state before.
    fn all(
        &mut self,
        list: List,
        events: &mut VecDeque<Self::Event>,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Takes in an object that was written, or deleted.
    fn one(
        &mut self,
        object: Object,
        is_deleted: bool,
        events: &mut VecDeque<Self::Event>,
    ) -> impl Future<Output = Result<()>> + Send;

    /// The state now, as an event.
    fn snapshot(&mut self) -> Self::Event;

    /// After how long something will have run out, if nothing is heard of it.
    fn due(&self) -> Option<Duration>;
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
            ended = run => match ended {
                Err(error) => error,
                // The reader is gone.
                Ok(()) => return,
            },
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
) -> Result<()> {
    let (resource, selector) = topic.selector();
    let (mut is_first, mut has_bookmarks) = (true, false);
    loop {
        let list = client.list(op, resource, &selector).await?;
        let version = list.version.clone();
        topic.all(list, events).await?;
        if std::mem::take(&mut is_first) {
            events.clear();
            events.push_back(topic.snapshot());
        }
        let selector = &selector;
        let mut open =
            Open { client, op, resource, selector, version, has_bookmarks, stream: None };
        loop {
            if events.len() > EVENTS_MAX {
                events.clear();
                events.push_back(topic.snapshot());
            }
            let due = topic.due();
            let step = tokio::select! {
                biased;
                permit = out.reserve(), if !events.is_empty() => {
                    let Ok(permit) = permit else { return Ok(()) };
                    if let Some(event) = events.pop_front() {
                        permit.send(Ok(event));
                    }
                    continue;
                }
                step = open.next() => step?,
                () = sleep(due.unwrap_or_default()), if due.is_some() => Step::Forgotten,
            };
            match step {
                Step::Object(object, is_deleted) => {
                    topic.one(*object, is_deleted, events).await?;
                }
                Step::Alive => {}
                Step::Forgotten => break,
            }
        }
        has_bookmarks = open.has_bookmarks;
    }
}

enum Step {
    /// An object was written, or deleted.
    Object(Box<Object>, bool),
    /// The connection lives.
    Alive,
    /// What is known is too old to go on from.
    Forgotten,
}

/// A watch that is opened as often as it ends.
struct Open<'a> {
    client: &'a Client,
    op: Op<'a>,
    resource: Resource,
    selector: &'a Selector,
    version: String,
    has_bookmarks: bool,
    stream: Option<Lines>,
}

impl Open<'_> {
    /// The next step. Nothing is lost if the future is dropped.
    async fn next(&mut self) -> Result<Step> {
        if self.stream.is_none() {
            let opened = self.client.open_watch(
                self.op,
                self.resource,
                self.selector,
                &self.version,
                if self.has_bookmarks { LONG_SECONDS } else { SHORT_SECONDS },
            );
            match opened.await? {
                None => return Ok(Step::Forgotten),
                Some(body) => self.stream = Some(Lines::new(body, self.has_bookmarks)),
            }
        }
        let Some(lines) = &mut self.stream else { return Ok(Step::Alive) };
        let line = match timeout_at(lines.silent_at(), lines.next(self.op)).await {
            Ok(line) => line?,
            Err(_) => {
                return Err(self.op.unclear("nothing was heard of the API server for too long"));
            }
        };
        match line {
            Some(line) => self.take(&line),
            None => {
                if lines.count == 0 && lines.opened.elapsed() < SHORT {
                    sleep(SHORT).await;
                }
                self.stream = None;
                Ok(Step::Alive)
            }
        }
    }

    fn take(&mut self, line: &[u8]) -> Result<Step> {
        #[derive(Deserialize)]
        struct Event {
            r#type: String,
            object: Value,
        }
        let event: Event = serde_json::from_slice(line)
            .map_err(|source| unreadable(self.op).with_source(source))?;
        match event.r#type.as_str() {
            kind @ ("ADDED" | "MODIFIED" | "DELETED") => {
                let object =
                    Object::parse(event.object, None).ok_or_else(|| unreadable(self.op))?;
                object.version().clone_into(&mut self.version);
                Ok(Step::Object(Box::new(object), kind == "DELETED"))
            }
            "BOOKMARK" => {
                self.has_bookmarks = true;
                if let Some(version) = event.object["metadata"]["resourceVersion"].as_str() {
                    version.clone_into(&mut self.version);
                }
                Ok(Step::Alive)
            }
            "ERROR" => self.error(&event.object),
            other => {
                let why = format!("the API server sent an event of an unknown type {other:?}");
                Err(self.op.unclear(why))
            }
        }
    }

    fn error(&self, status: &Value) -> Result<Step> {
        let code = status["code"].as_u64().and_then(|code| u16::try_from(code).ok());
        let code = code.and_then(|code| StatusCode::from_u16(code).ok());
        let code = code.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        if code == StatusCode::GONE {
            return Ok(Step::Forgotten);
        }
        let (namespace, what) = (self.client.namespace(), self.resource.name());
        let asked = Asked { verb: "watch", what, namespace, is_starting: false };
        Err(refused(self.op, asked, code, None, status.to_string().as_bytes()))
    }
}

/// The lines of an answer that goes on.
struct Lines {
    body: Body,
    buffer: BytesMut,
    /// Up to where the buffer has no end of a line.
    searched: usize,
    count: u64,
    is_long: bool,
    opened: Instant,
    heard: Instant,
}

impl Lines {
    fn new(body: Body, is_long: bool) -> Self {
        let opened = Instant::now();
        let (buffer, heard) = (BytesMut::new(), opened);
        Self { body, buffer, searched: 0, count: 0, is_long, opened, heard }
    }

    /// When the connection counts as dead.
    fn silent_at(&self) -> Instant {
        match self.is_long {
            true => self.heard + BOOKMARKS_EVERY_MAX,
            false => self.opened + Duration::from_secs(SHORT_SECONDS) + SILENCE_GRACE,
        }
    }

    /// The next line without its end; none at the end of all. Nothing is lost if the future is
    /// dropped.
    async fn next(&mut self, op: Op<'_>) -> Result<Option<BytesMut>> {
        loop {
            let rest = &self.buffer[self.searched..];
            if let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let line = self.buffer.split_to(self.searched + end);
                self.buffer.advance(1);
                self.searched = 0;
                self.count += 1;
                return Ok(Some(line));
            }
            self.searched = self.buffer.len();
            if self.searched > LINE_BYTES_MAX {
                return Err(op.unclear("the API server sent an event that is too long"));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    self.heard = Instant::now();
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                Some(Err(error)) => {
                    return Err(op.unclear("the connection of the watch broke").with_source(error));
                }
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(op.unclear("the watch ended in the middle of an event")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Lines {
        Lines::new(Body::from(text.as_bytes().to_vec()), false)
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_watch_counts_as_dead_soon_after_a_missing_bookmark() {
        let op = Op::read("watch", "jobs");
        let mut long = Lines::new(Body::from(b"{}\n".to_vec()), true);
        sleep(Duration::from_secs(60)).await;
        long.next(op).await.expect("whole");
        assert_eq!(long.silent_at(), Instant::now() + BOOKMARKS_EVERY_MAX);
        let short = lines("");
        assert_eq!(short.silent_at() - short.opened, Duration::from_secs(35));
    }

    #[tokio::test]
    async fn an_answer_is_cut_into_lines() {
        let op = Op::read("watch", "jobs");
        let mut whole = lines("{\"a\":1}\n{}\n");
        for right in [Some(&b"{\"a\":1}"[..]), Some(b"{}"), None] {
            assert_eq!(whole.next(op).await.expect("whole").as_deref(), right);
        }
        let mut torn = lines("{}\n{\"a\"");
        torn.next(op).await.expect("the first is whole");
        torn.next(op).await.expect_err("the second is torn");
    }
}
