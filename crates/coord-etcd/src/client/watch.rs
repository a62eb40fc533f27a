//! Subscriptions: a snapshot, then what changes from its revision on.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::time::Duration;

use coord_core::kit::Op;
use coord_core::{Effect, Result};
use etcd_client::{WatchOptions, WatchStream};
use futures::stream::{self, BoxStream, StreamExt};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use super::{Client, Connection, Entry, entry};
use crate::error::{Problem, is_stale_token, problem};
use crate::keys::Range;

/// How long a watch is followed before everything is read again. Servers of old patch releases lose
/// deletions at the moment of a compaction (etcd #18089, #19179); this finds them.
const READ_AGAIN: Duration = Duration::from_secs(5 * 60);

/// What changed in one revision or a few, in order.
pub(crate) type Batch = Vec<Change>;

/// What happened to a key.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Put(Entry),
    Deleted {
        key: String,
        /// The revision that deleted it.
        modified: i64,
    },
}

/// What can be watched.
pub(crate) trait Topic: Send + 'static {
    type Event: fmt::Debug + Send + 'static;

    /// Which keys it is about.
    fn range(&self) -> Range;

    /// The state now as an event, and its revision.
    fn snapshot(&mut self) -> impl Future<Output = Result<(Self::Event, i64), Problem>> + Send;

    /// What the changes since then mean.
    fn changed(
        &mut self,
        batch: Batch,
        events: &mut VecDeque<Self::Event>,
    ) -> impl Future<Output = Result<(), Problem>> + Send;
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
        changes: None,
        events: VecDeque::new(),
        read_again: Instant::now(),
    };
    let events = stream::unfold(Some(subscription), |subscription| async {
        let mut subscription = subscription?;
        match subscription.next().await {
            Ok(event) => Some((Ok(event), Some(subscription))),
            Err(error) => Some((Err(error.into()), None)),
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
    /// None before the snapshot, and when everything has to be read again.
    changes: Option<Changes>,
    events: VecDeque<T::Event>,
    read_again: Instant,
}

impl<T: Topic> Subscription<T> {
    async fn next(&mut self) -> Result<T::Event, Problem> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            let Some(changes) = &mut self.changes else {
                match self.open().await {
                    // It was compacted between the two steps of opening.
                    Err(Problem::Compacted) => continue,
                    opened => return opened,
                }
            };
            let op = Op::read("watch", &self.resource);
            let step = match timeout_at(self.read_again, changes.next(op)).await {
                Ok(Ok(batch)) => self.topic.changed(batch, &mut self.events).await,
                Ok(Err(problem)) => Err(problem),
                Err(_) => Err(Problem::Compacted),
            };
            match step {
                Ok(()) => {}
                Err(Problem::Compacted) => self.changes = None,
                Err(problem) => return Err(problem),
            }
        }
    }

    async fn open(&mut self) -> Result<T::Event, Problem> {
        let (event, revision) = self.topic.snapshot().await?;
        let op = Op::read("watch", &self.resource);
        self.changes = Some(self.client.watch(op, self.topic.range(), revision + 1).await?);
        self.read_again = Instant::now() + READ_AGAIN;
        Ok(event)
    }
}

/// A watch of the server's.
pub(crate) struct Changes {
    stream: WatchStream,
    given_up: CancellationToken,
    /// The beginning of a revision whose rest is still to come.
    fragments: Batch,
}

impl Client {
    /// What changes in a range from a revision on.
    pub(crate) async fn watch(
        &self,
        op: Op<'_>,
        range: Range,
        revision: i64,
    ) -> Result<Changes, Problem> {
        let send = |connection: Connection| {
            let mut client = connection.watch();
            let options = WatchOptions::new()
                .with_range(range.end.as_str())
                .with_start_revision(revision)
                .with_progress_notify()
                .with_fragment();
            let from = range.from.clone();
            async move {
                let stream = match client.watch(from.as_str(), Some(options.clone())).await {
                    Err(error) if is_stale_token(&error) => {
                        connection.vendor.refresh_token().await?;
                        client.watch(from, Some(options)).await
                    }
                    opened => opened,
                };
                Ok((stream?, connection.given_up))
            }
        };
        let (stream, given_up) = self.call(op, Effect::None, send).await?;
        Ok(Changes { stream, given_up, fragments: Batch::new() })
    }
}

impl Changes {
    /// The next changes, which end with a whole revision. Nothing is lost if the future is dropped.
    async fn next(&mut self, op: Op<'_>) -> Result<Batch, Problem> {
        loop {
            let Some(message) = self.given_up.run_until_cancelled(self.stream.message()).await
            else {
                let error = op.error(coord_core::ErrorKind::Unavailable);
                return Err(error.message("the endpoint that is watched does not answer").into());
            };
            let message = match message.map_err(|error| problem(op, Effect::None, error))? {
                Some(message) => message.0,
                None => {
                    let error = op.error(coord_core::ErrorKind::Unavailable);
                    return Err(error.message("the server ended the watch").into());
                }
            };
            // It is the last message, and nothing follows: the stream itself stays open.
            if message.canceled {
                return Err(canceled(op, message.compact_revision, &message.cancel_reason));
            }
            for event in message.events {
                let Some(kv) = event.kv else { continue };
                let entry = entry(op, kv)?;
                self.fragments.push(if event.r#type == 0 {
                    Change::Put(entry)
                } else {
                    Change::Deleted { key: entry.key, modified: entry.modified }
                });
            }
            if !message.fragment && !self.fragments.is_empty() {
                return Ok(std::mem::take(&mut self.fragments));
            }
        }
    }
}

fn canceled(op: Op<'_>, compact_revision: i64, reason: &str) -> Problem {
    use coord_core::ErrorKind::{Denied, Unavailable};
    if compact_revision != 0 {
        return Problem::Compacted;
    }
    let kind = if reason.contains("permission denied") { Denied } else { Unavailable };
    op.error(kind).message(format!("the server canceled the watch reason={reason:?}")).into()
}
