//! One stream of keep-alives for all etcd leases of a handle.
//!
//! Each message names the etcd lease that it is about, so one stream is enough for all. It is
//! opened when somebody asks, and again after it broke. The server answers one message after the
//! other, and every answer goes to the one who asked for it: an older answer would say that a lease
//! lives longer than it does.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use coord_core::{Effect, ErrorKind};
use etcd_client::{LeaseKeepAliveStream, LeaseKeeper};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::Shared;
use crate::error::{Op, Problem, is_stale_token, problem};

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
    pub(super) fn start(vendor: &etcd_client::Client, shared: &Shared) -> Self {
        let (asks, receiver) = mpsc::channel(ASKS_MAX);
        let task = Task {
            vendor: vendor.clone(),
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
    vendor: etcd_client::Client,
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
        // Who still waits hears of the end by its reply being dropped.
        closed.run_until_cancelled(self.serve()).await;
    }

    async fn serve(&mut self) {
        loop {
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
                            Ok(None) => self.broke(None),
                            Err(error) => self.broke(Some(error)),
                        },
                        () = sleep_until(self.progress + self.limit), if is_waiting => {
                            self.broke(None);
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
        match timeout(self.limit, self.try_open(ask.lease)).await {
            Ok(Ok(stream)) => {
                self.stream = Some(stream);
                self.progress = Instant::now();
                // An error says that nobody waits any more, here and below.
                let _ = ask.reply.send(Ok(Kept::Alive));
                self.send_queued().await;
            }
            Ok(Err(etcd_client::Error::LeaseKeepAliveError(_))) => {
                let _ = ask.reply.send(Ok(Kept::Gone));
            }
            failed => {
                self.queue.push_front(ask);
                self.broke(failed.ok().and_then(Result::err));
            }
        }
    }

    async fn try_open(
        &mut self,
        lease: i64,
    ) -> Result<(LeaseKeeper, LeaseKeepAliveStream), etcd_client::Error> {
        match self.vendor.lease_keep_alive(lease).await {
            Err(error) if is_stale_token(&error) => {
                self.vendor.refresh_token().await?;
                self.vendor.lease_keep_alive(lease).await
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
                self.broke(Some(error));
            }
        }
    }

    fn answered(&mut self, lease: i64, seconds: i64) {
        self.progress = Instant::now();
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

    /// Drops the stream and everybody who waits.
    fn broke(&mut self, mut cause: Option<etcd_client::Error>) {
        self.stream = None;
        let waiting = self.waiting.drain().flat_map(|(_, replies)| replies);
        let queued = self.queue.drain(..).map(|ask| ask.reply);
        for reply in waiting.chain(queued).filter(|reply| !reply.is_closed()) {
            let _ = reply.send(Err(cause.take()));
        }
    }
}
