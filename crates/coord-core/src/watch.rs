//! The watcher: one of the four watches, followed for good.

mod view;

use std::collections::VecDeque;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use futures::future::poll_fn;
use futures::stream::BoxStream;
use futures::task::AtomicWaker;
use futures::{FutureExt, Stream, StreamExt};
use tokio::runtime::Handle;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use self::view::Follow;
use crate::backoff::{BackOff, Jitter, PAUSE_MAX};
use crate::discovery::{Discovery, NodeEvent};
use crate::error::{Error, ErrorKind, Result};
use crate::lease::{Lease, LeaseEvent};
use crate::placement::{Placement, PlacementEvent, RequestEvent};
use crate::types::{LeaseName, TableName};

/// The most events that wait for a reader; one more, and all are replaced by a snapshot.
pub const WATCH_BUFFER_MAX: usize = 1_024;

/// An event that a [`Watcher`] can follow: those of the four watches.
pub trait Watchable: Follow {}

impl<E: Follow> Watchable for E {}

/// What a [`Watcher`] tells its reader.
#[non_exhaustive]
#[derive(Debug)]
pub enum Watched<E> {
    /// A change. The first is a snapshot; another one comes to a reader that was too slow for the
    /// changes, and for another life of a table. It replaces all that was seen before.
    Event(E),
    /// The store can't be watched, and why. What was seen may be out of date from here on. Told once
    /// for each outage, and again when the kind of the error changes.
    Disconnected(Error),
    /// It can be watched again. What changed meanwhile follows as events.
    Reconnected,
}

/// One of the four watches, followed until it is dropped.
///
/// It subscribes again after each error, with back-off and jitter (100 ms to 5 s; a minute where an
/// operator has to act first), and turns the snapshot after a gap into the differences to what was
/// seen before. A node that is missing from such a snapshot is told as
/// [`Expired`](NodeEvent::Expired), never as [`Left`](NodeEvent::Left), and not as judged: nothing
/// says that it stopped its work in order, or that its TTL has passed. A map never goes back within one life of its table.
///
/// The subscription is read by a task of its own, however slow the reader is, and at most
/// [`WATCH_BUFFER_MAX`] events wait. Dropping the watcher ends the task.
///
/// As a [`Stream`] it never ends either.
pub struct Watcher<E: Watchable> {
    shared: Arc<Shared<E>>,
    _task: AbortOnDropHandle<()>,
}

impl<E: Watchable> Watcher<E> {
    /// Follows what `subscribe` subscribes to.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub fn new(subscribe: impl FnMut() -> BoxStream<'static, Result<E>> + Send + 'static) -> Self {
        Self::start(subscribe, Jitter::new(None))
    }

    /// As `new`, with pauses that repeat for the same seed.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub fn with_seed(
        subscribe: impl FnMut() -> BoxStream<'static, Result<E>> + Send + 'static,
        seed: u64,
    ) -> Self {
        Self::start(subscribe, Jitter::new(Some(seed)))
    }

    fn start(
        subscribe: impl FnMut() -> BoxStream<'static, Result<E>> + Send + 'static,
        jitter: Jitter,
    ) -> Self {
        let shared = Arc::new(Shared::default());
        let task = Handle::current().spawn(follow(subscribe, jitter, shared.clone()));
        Self { shared, _task: AbortOnDropHandle::new(task) }
    }

    /// What comes next; waits for it, for ever if need be.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn next(&mut self) -> Watched<E> {
        poll_fn(|cx| self.shared.poll(cx)).await
    }
}

impl Watcher<LeaseEvent> {
    /// Follows one lease.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    #[must_use]
    pub fn lease(lease: Arc<dyn Lease>, name: LeaseName) -> Self {
        Self::new(move || lease.watch(&name))
    }
}

impl Watcher<NodeEvent> {
    /// Follows the nodes.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    #[must_use]
    pub fn nodes(discovery: Arc<dyn Discovery>) -> Self {
        Self::new(move || discovery.watch())
    }
}

impl Watcher<PlacementEvent> {
    /// Follows one table.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    #[must_use]
    pub fn placement(placement: Arc<dyn Placement>, table: TableName) -> Self {
        Self::new(move || placement.watch(&table))
    }
}

impl Watcher<RequestEvent> {
    /// Follows the requests to the leader.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    #[must_use]
    pub fn requests(placement: Arc<dyn Placement>) -> Self {
        Self::new(move || placement.watch_requests())
    }
}

impl<E: Watchable> Stream for Watcher<E> {
    type Item = Watched<E>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Watched<E>>> {
        self.shared.poll(cx).map(Some)
    }
}

impl<E: Watchable> fmt::Debug for Watcher<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watcher").finish_non_exhaustive()
    }
}

async fn follow<E: Watchable>(
    mut subscribe: impl FnMut() -> BoxStream<'static, Result<E>> + Send + 'static,
    mut jitter: Jitter,
    shared: Arc<Shared<E>>,
) {
    let mut back_off = BackOff::default();
    loop {
        let start = Instant::now();
        let one = follow_one(&mut subscribe, &shared);
        let error = AssertUnwindSafe(one).catch_unwind().await.unwrap_or_else(|_panic| {
            Error::new(ErrorKind::Internal, "watch")
                .message("the subscription panicked")
                .effect_none()
        });
        // One that broke at once each time must not be opened as if each were the first.
        if start.elapsed() >= PAUSE_MAX {
            back_off.reset();
        }
        let pause = back_off.after(&error, &mut jitter);
        shared.change(|inbox| inbox.away(error));
        tokio::time::sleep(pause).await;
    }
}

/// Follows one subscription to its end.
async fn follow_one<E: Watchable>(
    subscribe: &mut (impl FnMut() -> BoxStream<'static, Result<E>> + Send),
    shared: &Shared<E>,
) -> Error {
    let mut subscription = subscribe();
    while let Some(event) = subscription.next().await {
        match event {
            Ok(event) => shared.change(|inbox| inbox.event(event)),
            Err(error) => return error,
        }
    }
    Error::unavailable("watch", "the subscription ended")
}

/// What the task and the reader share.
struct Shared<E: Watchable> {
    inbox: Mutex<Inbox<E>>,
    reader: AtomicWaker,
}

impl<E: Watchable> Default for Shared<E> {
    fn default() -> Self {
        Self { inbox: Mutex::default(), reader: AtomicWaker::new() }
    }
}

impl<E: Watchable> Shared<E> {
    fn change(&self, change: impl FnOnce(&mut Inbox<E>)) {
        change(&mut self.inbox.lock().unwrap_or_else(PoisonError::into_inner));
        self.reader.wake();
    }

    fn poll(&self, cx: &Context<'_>) -> Poll<Watched<E>> {
        self.reader.register(cx.waker());
        let next = self.inbox.lock().unwrap_or_else(PoisonError::into_inner).pop();
        next.map_or(Poll::Pending, Poll::Ready)
    }
}

/// What waits for the reader, and what it amounts to. Pure.
struct Inbox<E: Watchable> {
    queue: VecDeque<Watched<E>>,
    /// All that was seen so far; none before the first event.
    view: Option<E::View>,
    /// The kind of the error that the present outage was told with.
    away: Option<ErrorKind>,
    /// Whether the last thing that the reader heard of the store is that it is away.
    reader_away: bool,
}

impl<E: Watchable> Default for Inbox<E> {
    fn default() -> Self {
        Self { queue: VecDeque::new(), view: None, away: None, reader_away: false }
    }
}

impl<E: Watchable> Inbox<E> {
    fn event(&mut self, event: E) {
        if self.away.take().is_some() {
            self.queue.push_back(Watched::Reconnected);
        }
        let mut changes = Vec::new();
        if let Some(view) = &mut self.view {
            event.apply(view, &mut changes);
        } else {
            let view = self.view.insert(E::View::default());
            event.apply(view, &mut changes);
            changes = vec![E::snapshot(view)];
        }
        self.queue.extend(changes.into_iter().map(Watched::Event));
        self.bound();
    }

    fn away(&mut self, error: Error) {
        if self.away != Some(error.kind()) {
            self.away = Some(error.kind());
            self.queue.push_back(Watched::Disconnected(error));
            self.bound();
        }
    }

    fn pop(&mut self) -> Option<Watched<E>> {
        let next = self.queue.pop_front()?;
        match next {
            Watched::Disconnected(_) => self.reader_away = true,
            Watched::Reconnected => self.reader_away = false,
            Watched::Event(_) => {}
        }
        Some(next)
    }

    /// Replaces a queue that grew too long by what it amounts to.
    fn bound(&mut self) {
        if self.queue.len() <= WATCH_BUFFER_MAX {
            return;
        }
        let mut came_back = false;
        let mut last_away = None;
        for item in self.queue.drain(..) {
            match item {
                Watched::Disconnected(error) => last_away = Some(error),
                Watched::Reconnected => came_back = true,
                Watched::Event(_) => {}
            }
        }
        if self.reader_away && came_back {
            self.queue.push_back(Watched::Reconnected);
        }
        if let Some(view) = &self.view {
            self.queue.push_back(Watched::Event(E::snapshot(view)));
        }
        if let Some(error) = last_away.filter(|_| self.away.is_some()) {
            self.queue.push_back(Watched::Disconnected(error));
        }
    }
}

#[cfg(test)]
mod tests;
