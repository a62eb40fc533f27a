//! Subscriptions: a snapshot first, then events from a bounded buffer, and expiries when they
//! happen.

use std::sync::Arc;

use futures::stream::{self, BoxStream, Stream, StreamExt};
use tokio::sync::broadcast;
use tokio::time::{Instant, sleep_until};

use super::Handle;
use super::store::{State, Store};
use crate::error::Result;

/// What can be watched.
pub(super) trait Topic: Send + Sync + 'static {
    type Event: Clone + Send + 'static;

    /// Takes part from now on.
    fn receiver(&self, state: &mut State) -> broadcast::Receiver<Self::Event>;

    /// The state now, as an event.
    fn snapshot(&self, state: &State, now: Instant) -> Self::Event;

    /// Called after a subscription's receiver was dropped.
    fn left(&self, state: &mut State);
}

/// One subscription, which ends with the handle.
pub(super) fn subscribe<T: Topic>(
    handle: &Handle,
    topic: T,
) -> BoxStream<'static, Result<T::Event>> {
    let store = Arc::clone(&handle.store);
    let subscription = Subscription { store, topic, receiver: None };
    let events = stream::unfold(subscription, |mut subscription| async {
        Some((subscription.next().await, subscription))
    });
    until_closed(handle, events)
}

/// Ends a stream with an error once the handle is closed.
pub(super) fn until_closed<E: Send + 'static>(
    handle: &Handle,
    events: impl Stream<Item = E> + Send + 'static,
) -> BoxStream<'static, Result<E>> {
    let closed = handle.closed.clone().cancelled_owned();
    let error = handle.closed_error("watch");
    events.map(Ok).take_until(closed).chain(stream::once(async { Err(error) })).boxed()
}

/// Sleeps until the next thing of the store runs out; for ever if there is none. Whatever is added
/// later comes with an event, which wakes its watch anyhow.
async fn next_expiry(store: &Store) {
    match store.lock(|state, _| state.next_expiry()) {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

struct Subscription<T: Topic> {
    store: Arc<Store>,
    topic: T,
    /// None before the snapshot, and again after a lag.
    receiver: Option<broadcast::Receiver<T::Event>>,
}

impl<T: Topic> Subscription<T> {
    async fn next(&mut self) -> T::Event {
        loop {
            let Some(receiver) = &mut self.receiver else { return self.open() };
            tokio::select! {
                biased;
                event = receiver.recv() => match event {
                    Ok(event) => return event,
                    Err(_) => self.receiver = None,
                },
                // The step on the state that follows removes what has run out and sends the events.
                () = next_expiry(&self.store) => {}
            }
        }
    }

    fn open(&mut self) -> T::Event {
        let Self { store, topic, receiver } = self;
        store.lock(|state, now| {
            *receiver = Some(topic.receiver(state));
            topic.snapshot(state, now)
        })
    }
}

impl<T: Topic> Drop for Subscription<T> {
    fn drop(&mut self) {
        self.receiver = None;
        let Self { store, topic, .. } = self;
        store.lock(|state, _| topic.left(state));
    }
}
