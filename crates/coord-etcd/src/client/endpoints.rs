//! The endpoints of a handle, of which one is the current one: requests go there as long as it
//! answers.
//!
//! An endpoint may hang: its connections stay open and nothing answers. So a request that has waited for its
//! [patience](Endpoints::patience) goes on to the next one:
//! - A request without effect is sent there *as well*, and the first answer counts. A slow store is
//!   so asked once by each endpoint, and still has the whole time limit to answer.
//! - A write is never sent twice, for it might be applied twice. It fails at its time limit, and
//!   whoever tries again, which is right for the same attempt, does so at another endpoint.
//!
//! One that does not answer, or that answers for a server that is cut off from the others, is
//! given up: it is not the current one any more, its watches end, and it gets a new connection when
//! its turn comes again. A request that found no connection was certainly not sent, and goes to the
//! next one whatever it is.

use std::future::Future;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use etcd_client::{ConnectOptions, Error, KvClient, WatchClient};
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::sync::OnceCell;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::ANSWER_BYTES_MAX;
use crate::error::{is_never_sent, is_of_endpoint};

/// How long an endpoint may take to answer before another one is asked.
const PATIENCE: Duration = Duration::from_millis(400);

/// All of them, shared by the clones of a handle.
#[derive(Clone)]
pub(super) struct Endpoints(Arc<Shared>);

struct Shared {
    slots: Vec<Slot>,
    options: ConnectOptions,
    /// The place of the one that requests go to.
    current: AtomicUsize,
    patience: Duration,
}

struct Slot {
    url: String,
    link: Mutex<Arc<Link>>,
}

/// A connection, made when it is needed first.
#[derive(Default)]
struct Link {
    vendor: OnceCell<etcd_client::Client>,
    given_up: CancellationToken,
}

/// A connection to one endpoint.
#[derive(Clone)]
pub(super) struct Connection {
    pub(super) vendor: etcd_client::Client,
    /// Fires once its endpoint hangs.
    pub(super) given_up: CancellationToken,
}

impl Connection {
    pub(super) fn kv(&self) -> KvClient {
        self.vendor.kv_client().max_decoding_message_size(ANSWER_BYTES_MAX)
    }

    pub(super) fn watch(&self) -> WatchClient {
        self.vendor.watch_client().max_decoding_message_size(ANSWER_BYTES_MAX)
    }
}

impl Endpoints {
    /// There is at least one. Handles begin at different ones.
    pub(super) fn new(urls: &[String], options: &ConnectOptions, limit: Duration) -> Self {
        let slot = |url: &String| Slot { url: url.clone(), link: Mutex::default() };
        let begin = usize::try_from(RandomState::new().hash_one(()) >> 32).unwrap_or(0);
        // All of them have their turn within the limit.
        let turns = u32::try_from(urls.len()).unwrap_or(u32::MAX).saturating_add(1);
        Self(Arc::new(Shared {
            slots: urls.iter().map(slot).collect(),
            options: options.clone(),
            current: AtomicUsize::new(begin % urls.len().max(1)),
            patience: PATIENCE.min(limit / turns),
        }))
    }

    pub(super) fn len(&self) -> usize {
        self.0.slots.len()
    }

    pub(super) fn patience(&self) -> Duration {
        self.0.patience
    }

    pub(super) fn current(&self) -> usize {
        self.0.current.load(Ordering::Relaxed)
    }

    /// Makes the next one the current one, unless another request has done so.
    pub(super) fn give_up(&self, place: usize) {
        let next = (place + 1) % self.len();
        self.replace(place, next);
    }

    fn replace(&self, place: usize, next: usize) {
        if place == next {
            return;
        }
        let order = Ordering::Relaxed;
        let moved = self.0.current.compare_exchange(place, next, order, order).is_ok();
        if moved && let Some(slot) = self.0.slots.get(place) {
            let mut link = slot.link.lock().unwrap_or_else(PoisonError::into_inner);
            link.given_up.cancel();
            *link = Arc::default();
        }
    }

    /// The connection to the endpoint at a place; the first user of it waits for authentication
    /// where there is a user.
    pub(super) async fn connection(&self, place: usize) -> Result<Connection, Error> {
        let slot = self.0.slots.get(place).ok_or(Error::EndpointsNotManaged)?;
        let link = slot.link.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let connect = || {
            let options = self.0.options.clone();
            etcd_client::Client::connect([slot.url.as_str()], Some(options))
        };
        let vendor = link.vendor.get_or_try_init(connect).await?.clone();
        Ok(Connection { vendor, given_up: link.given_up.clone() })
    }

    async fn attempt<T, F>(
        &self,
        place: usize,
        send: &(impl Fn(Connection) -> F + Send + Sync),
    ) -> (usize, Result<T, Error>)
    where
        F: Future<Output = Result<T, Error>> + Send,
    {
        match self.connection(place).await {
            Ok(connection) => (place, send(connection).await),
            Err(error) => (place, Err(error)),
        }
    }

    /// Sends what has no effect: to one after the other until one answers.
    pub(super) async fn race<T, F>(
        &self,
        send: impl Fn(Connection) -> F + Send + Sync,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>> + Send,
    {
        let first = self.current();
        let mut waiting = Waiting::for_answer(self, first);
        let mut running = FuturesUnordered::new();
        running.push(self.attempt(first, &send));
        let mut tries = 1;
        loop {
            let may_hang = tries < self.len();
            let answer = tokio::select! {
                biased;
                answer = running.next() => answer,
                () = sleep(self.patience()), if may_hang => None,
            };
            let is_last = match &answer {
                None => false,
                Some((place, Err(error))) if is_of_endpoint(error) => {
                    // A connection that broke while it was idle is found by its next user.
                    let tries_max = self.len() * if is_never_sent(error) { 2 } else { 1 };
                    if *place == first {
                        self.give_up(first);
                    }
                    tries >= tries_max && running.is_empty()
                }
                Some((place, _)) => {
                    self.replace(first, *place);
                    true
                }
            };
            match answer {
                Some((_, answer)) if is_last => {
                    waiting.is_over();
                    return answer;
                }
                Some(_) if tries >= self.len() && !running.is_empty() => {}
                _ => {
                    running.push(self.attempt((first + tries) % self.len(), &send));
                    tries += 1;
                }
            }
        }
    }

    /// Sends what may be applied, and what therefore is sent only once.
    pub(super) async fn once<T, F>(
        &self,
        send: impl Fn(Connection) -> F + Send + Sync,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>> + Send,
    {
        let mut tries = self.len() * 2;
        loop {
            let place = self.current();
            let mut waiting = Waiting::for_answer(self, place);
            let (_, answer) = self.attempt(place, &send).await;
            waiting.is_over();
            tries -= 1;
            match answer {
                Err(error) if is_of_endpoint(&error) => {
                    self.give_up(place);
                    if !is_never_sent(&error) || tries == 0 {
                        return Err(error);
                    }
                }
                answer => return answer,
            }
        }
    }
}

/// Gives an endpoint up if no request waits any more for what it has not answered.
struct Waiting<'a> {
    endpoints: &'a Endpoints,
    place: usize,
    since: Option<Instant>,
}

impl<'a> Waiting<'a> {
    fn for_answer(endpoints: &'a Endpoints, place: usize) -> Self {
        Self { endpoints, place, since: Some(Instant::now()) }
    }

    fn is_over(&mut self) {
        self.since = None;
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.since.is_some_and(|since| since.elapsed() >= self.endpoints.patience()) {
            self.endpoints.give_up(self.place);
        }
    }
}
