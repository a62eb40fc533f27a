//! One stream of keep-alives for all etcd leases of a handle.
//!
//! Each message names the etcd lease that it is about, so one stream is enough for all. It is opened at the
//! first request, and again after it broke. The server answers one message after the other, and every answer
//! goes to the request that asked for it: an older answer would say that a lease lives longer than it does.
//!
//! A stream that does not answer is given up, and the waiting requests are sent again on a new one at the next
//! endpoint: to renew twice does no harm. An endpoint may hang, and one that forwards to a hanging leader would
//! wait for that leader even after another was elected. Each endpoint gets more time after each round in which
//! none answered.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use coord_core::kit::Op;
use coord_core::{Effect, ErrorKind};
use etcd_client::{LeaseKeepAliveStream, LeaseKeeper};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::Shared;
use super::endpoints::Endpoints;
use crate::error::{Problem, is_stale_token, problem};

/// How many may wait for the task.
const ASKS_MAX: usize = 1_024;

/// Whether an etcd lease lives on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// Its time to live began anew.
    Alive,
    /// It ran out or was revoked.
    Gone,
}

/// Asks the task that owns the stream.
#[derive(Clone)]
pub(super) struct KeepAlive {
    asks: mpsc::Sender<Ask>,
}

struct Ask {
    lease: i64,
    reply: Reply,
}

/// When a stream breaks under many, one of them is told the cause.
type Reply = oneshot::Sender<Result<Kept, Option<etcd_client::Error>>>;

impl KeepAlive {
    pub(super) fn start(endpoints: &Endpoints, shared: &Shared) -> Self {
        let (asks, receiver) = mpsc::channel(ASKS_MAX);
        let task = Task {
            endpoints: endpoints.clone(),
            place: endpoints.current(),
            failures: 0,
            asks: receiver,
            limit: shared.request_timeout,
            stream: None,
            queue: VecDeque::new(),
            waiting: HashMap::new(),
            progress: Instant::now(),
        };
        drop(shared.tasks.spawn(task.run(shared.closed.clone())));
        Self { asks }
    }

    /// Asks for one lease. To be called under a time limit.
    pub(super) async fn ask(&self, op: Op<'_>, lease: i64) -> Result<Kept, Problem> {
        let (reply, answer) = oneshot::channel();
        if self.asks.send(Ask { lease, reply }).await.is_err() {
            return Err(op.closed().into());
        }
        match answer.await {
            Ok(Ok(kept)) => Ok(kept),
            Ok(Err(Some(error))) => Err(problem(op, Effect::Unknown, error)),
            Ok(Err(None)) | Err(_) => {
                let error = op.error(ErrorKind::Unavailable).effect_unknown();
                Err(error.message("the stream of keep-alives broke").into())
            }
        }
    }
}

struct Task {
    endpoints: Endpoints,
    /// Where the stream is, or was last.
    place: usize,
    /// How many streams have failed since the last answer.
    failures: usize,
    asks: mpsc::Receiver<Ask>,
    limit: Duration,
    stream: Option<(LeaseKeeper, LeaseKeepAliveStream)>,
    /// What is not sent yet.
    queue: VecDeque<Ask>,
    /// What was sent and is not answered, by lease, the oldest first.
    waiting: HashMap<i64, VecDeque<Reply>>,
    /// When an answer came last, or the first of those that wait was sent.
    progress: Instant,
}

impl Task {
    async fn run(mut self, closed: CancellationToken) {
        // The requests that still wait learn of the end because their reply is dropped.
        closed.run_until_cancelled(self.serve()).await;
    }

    async fn serve(&mut self) {
        loop {
            let patient_until = self.progress + self.patience();
            match &mut self.stream {
                None => match self.queue.pop_front() {
                    Some(ask) => self.open(ask).await,
                    None => match self.asks.recv().await {
                        Some(ask) => self.queue.push_back(ask),
                        None => return,
                    },
                },
                Some((_, answers)) => {
                    let is_waiting = !self.waiting.is_empty();
                    tokio::select! {
                        ask = self.asks.recv(), if self.queue.len() < ASKS_MAX => match ask {
                            Some(ask) => self.queue.push_back(ask),
                            None => return,
                        },
                        answer = answers.message() => match answer {
                            Ok(Some(answer)) => self.answered(answer.id(), answer.ttl()),
                            Ok(None) => self.failed(Failure::Broke(None)),
                            Err(error) => self.failed(Failure::Broke(Some(error))),
                        },
                        () = sleep_until(patient_until), if is_waiting => {
                            self.failed(Failure::Hangs);
                        }
                    }
                    self.send_queued().await;
                }
            }
        }
    }

    /// Opens the stream with a first message, whose answer comes with it.
    async fn open(&mut self, ask: Ask) {
        if ask.reply.is_closed() {
            return;
        }
        self.place = self.endpoints.current();
        match timeout(self.patience(), self.try_open(ask.lease)).await {
            Ok(Ok(stream)) => {
                self.stream = Some(stream);
                self.failures = 0;
                self.progress = Instant::now();
                // An error says that the request does not wait any more, here and below.
                let _ = ask.reply.send(Ok(Kept::Alive));
                self.send_queued().await;
            }
            Ok(Err(etcd_client::Error::LeaseKeepAliveError(_))) => {
                self.failures = 0;
                let _ = ask.reply.send(Ok(Kept::Gone));
            }
            failed => {
                self.queue.push_front(ask);
                self.failed(match failed {
                    Ok(broke) => Failure::Broke(broke.err()),
                    Err(_) => Failure::Hangs,
                });
            }
        }
    }

    async fn try_open(
        &mut self,
        lease: i64,
    ) -> Result<(LeaseKeeper, LeaseKeepAliveStream), etcd_client::Error> {
        let vendor = self.endpoints.connection(self.place).await?.vendor;
        let mut client = vendor.lease_client();
        match client.keep_alive(lease).await {
            Err(error) if is_stale_token(&error) => {
                vendor.refresh_token().await?;
                client.keep_alive(lease).await
            }
            opened => opened,
        }
    }

    /// Sends as much as the connection takes just now. What is left waits for an answer to come.
    async fn send_queued(&mut self) {
        while let Some((keeper, _)) = &mut self.stream
            && keeper.sender.capacity() > 0
            && let Some(Ask { lease, reply }) = self.queue.pop_front()
        {
            if reply.is_closed() {
                continue;
            }
            keeper.id = lease;
            let sent = keeper.keep_alive().await;
            if self.waiting.is_empty() {
                self.progress = Instant::now();
            }
            self.waiting.entry(lease).or_default().push_back(reply);
            if let Err(error) = sent {
                self.failed(Failure::Broke(Some(error)));
            }
        }
    }

    fn answered(&mut self, lease: i64, seconds: i64) {
        self.progress = Instant::now();
        self.failures = 0;
        let Some(replies) = self.waiting.get_mut(&lease) else { return };
        let reply = replies.pop_front();
        if replies.is_empty() {
            self.waiting.remove(&lease);
        }
        if let Some(reply) = reply {
            let kept = if seconds > 0 { Kept::Alive } else { Kept::Gone };
            let _ = reply.send(Ok(kept));
        }
    }

    /// How long an answer is waited for.
    fn patience(&self) -> Duration {
        let rounds = self.failures / self.endpoints.len();
        let times = u32::try_from(rounds).ok().and_then(|rounds| 2_u32.checked_pow(rounds));
        let patience = self.endpoints.patience();
        patience.checked_mul(times.unwrap_or(u32::MAX)).map_or(self.limit, |it| it.min(self.limit))
    }

    /// Goes on to the next endpoint with all waiting requests; if all endpoints broke, the requests fail.
    fn failed(&mut self, failure: Failure) {
        self.stream = None;
        self.failures = self.failures.saturating_add(1);
        self.endpoints.give_up(self.place);
        let waiting = std::mem::take(&mut self.waiting);
        let again = waiting.into_iter().flat_map(|(lease, replies)| {
            replies.into_iter().map(move |reply| Ask { lease, reply })
        });
        let queued = std::mem::take(&mut self.queue);
        let asks = again.chain(queued).filter(|ask| !ask.reply.is_closed());
        match failure {
            Failure::Broke(mut cause) if self.failures >= self.endpoints.len() => {
                self.failures = 0;
                for ask in asks {
                    let _ = ask.reply.send(Err(cause.take()));
                }
            }
            _ => self.queue = asks.collect(),
        }
    }
}

/// What became of a stream.
enum Failure {
    Broke(Option<etcd_client::Error>),
    /// It is open and does not answer.
    Hangs,
}
