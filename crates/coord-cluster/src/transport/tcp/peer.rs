//! The client's side: one connection to one incarnation of another node, made again when it broke.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use coord_core::{Address, Error, ErrorKind, Result};
use futures::{SinkExt, StreamExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, timeout};
use tokio_util::codec::{FramedRead, FramedWrite};

use super::codec::Codec;
use super::frame::{Frame, GREETING_MAX, Id, Who};
use super::silence::Silent;
use super::{Shared, VERSION, lock};
use crate::transport::Recipient;

/// The first pause after a connection could not be made; it doubles.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// How long there is no request before the task for an address ends.
const IDLE: Duration = Duration::from_secs(300);

type Reader = FramedRead<Silent<OwnedReadHalf>, Codec>;
type Writer = FramedWrite<Silent<OwnedWriteHalf>, Codec>;

/// The connection to one incarnation of another node.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    to: Address,
    calls: mpsc::Sender<Call>,
    in_flight: Arc<Semaphore>,
}

/// A request, and its caller.
#[derive(Debug)]
struct Call {
    request: Bytes,
    waiter: Waiter,
}

/// Tells its caller in any case: what is dropped was not sent, or has an unknown effect.
#[derive(Debug)]
struct Waiter {
    to: Address,
    tell: Option<oneshot::Sender<Result<Bytes>>>,
    sent: bool,
}

impl Waiter {
    fn tell(mut self, answer: Result<Bytes>) {
        if let Some(tell) = self.tell.take() {
            // The caller may have stopped waiting.
            drop(tell.send(answer));
        }
    }

    fn not_sent(mut self) {
        self.sent = false;
    }

    fn waits(&self) -> bool {
        self.tell.as_ref().is_some_and(|tell| !tell.is_closed())
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let Some(tell) = self.tell.take() else { return };
        let error = if self.sent {
            Error::unavailable("call", "the connection broke before the answer came")
        } else {
            Error::new(ErrorKind::Unavailable, "call")
                .effect_none()
                .message("there is no connection")
        };
        drop(tell.send(Err(error.resource(&self.to))));
    }
}

impl Peer {
    pub(super) fn start(shared: Arc<Shared>, to: Recipient) -> Self {
        let in_flight = shared.limits.in_flight_max;
        let (calls, receiver) = mpsc::channel(in_flight.min(Semaphore::MAX_PERMITS));
        let tasks = shared.tasks.clone();
        let address = to.address.clone();
        tasks.spawn(Link { shared, to, failures: 0, refused: None }.run(receiver));
        Self {
            to: address,
            calls,
            in_flight: Arc::new(Semaphore::new(in_flight.min(Semaphore::MAX_PERMITS))),
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.calls.is_closed()
    }

    pub(super) async fn call(&self, request: Bytes) -> Result<Bytes> {
        let _permit = self.in_flight.acquire().await;
        let (tell, told) = oneshot::channel();
        let waiter = Waiter { to: self.to.clone(), tell: Some(tell), sent: false };
        // One that is not taken is dropped, and says so.
        let _taken = self.calls.send(Call { request, waiter }).await;
        told.await.unwrap_or_else(|_dropped| {
            Err(Error::new(ErrorKind::Internal, "call").message("nobody answered").effect_unknown())
        })
    }
}

/// What makes and keeps the connection.
struct Link {
    shared: Arc<Shared>,
    to: Recipient,
    failures: u32,
    /// Why it was refused last, which was logged.
    refused: Option<String>,
}

/// Why a connection is over.
struct Over;

impl Link {
    async fn run(mut self, mut calls: mpsc::Receiver<Call>) {
        let closing = self.shared.closing.clone();
        tokio::select! {
            biased;
            () = closing.cancelled() => {}
            () = self.keep(&mut calls) => {}
        }
    }

    async fn keep(&mut self, calls: &mut mpsc::Receiver<Call>) {
        while let Ok(Some(first)) = timeout(IDLE, calls.recv()).await {
            let limit = self.shared.limits.connect_timeout;
            let connected = timeout(limit, self.connect()).await.unwrap_or_else(|_elapsed| {
                Err(self.error(
                    ErrorKind::Unavailable,
                    format!("no connection in time limit={limit:?}"),
                ))
            });
            match connected {
                Ok((reader, writer)) => {
                    (self.failures, self.refused) = (0, None);
                    self.converse(reader, writer, first, calls).await;
                }
                Err(error) => {
                    let kind = error.kind();
                    let why = error.message_text().to_owned();
                    first.waiter.tell(Err(error));
                    self.refuse_for_a_while(calls, kind, &why).await;
                }
            }
        }
    }

    /// Requests that come meanwhile fail at once.
    async fn refuse_for_a_while(
        &mut self,
        calls: &mut mpsc::Receiver<Call>,
        kind: ErrorKind,
        why: &str,
    ) {
        let pause = PAUSE_MIN.saturating_mul(1 << self.failures.min(10)).min(PAUSE_MAX);
        self.failures = self.failures.saturating_add(1);
        let over = Instant::now() + pause;
        while let Ok(Some(call)) = tokio::time::timeout_at(over, calls.recv()).await {
            call.waiter.tell(Err(self.error(kind, why.to_owned())));
        }
    }

    fn error(&self, kind: ErrorKind, why: String) -> Error {
        Error::new(kind, "call").effect_none().message(why).resource(&self.to.address)
    }

    /// Logs once why the process that answers does not serve this client.
    fn refused(&mut self, error: Error) -> Error {
        let why = error.message_text();
        if self.refused.as_deref() != Some(why) {
            let Recipient { node, address, .. } = &self.to;
            if error.is_retryable() {
                tracing::info!(%node, %address, %why, "a node does not take messages now");
            } else {
                tracing::warn!(%node, %address, %why, "a node can't be sent messages");
            }
            self.refused = Some(why.to_owned());
        }
        error
    }

    async fn connect(&mut self) -> Result<(Reader, Writer)> {
        let failed = |error: std::io::Error| {
            self.error(ErrorKind::Unavailable, format!("no connection: {error}"))
        };
        let stream = TcpStream::connect(self.to.address.as_str()).await.map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        let (read, write) = stream.into_split();
        let silence = self.shared.limits.silence;
        let mut reader = FramedRead::new(Silent::new(read, silence), Codec::new(GREETING_MAX));
        let mut writer = FramedWrite::new(Silent::new(write, silence), Codec::new(GREETING_MAX));
        // In one piece: a server of another version reads no further than the hello.
        let hello = Frame::Hello(VERSION, self.shared.cluster.clone());
        writer.feed(hello).await.map_err(failed)?;
        let to = Frame::To(self.to.incarnation, self.to.node.clone());
        writer.send(to).await.map_err(failed)?;
        let foreign = || {
            let why = "it does not speak coord's transport".to_owned();
            self.error(ErrorKind::Misconfigured, why)
        };
        let reply = match reader.next().await {
            Some(Ok(bytes)) => Frame::read(bytes).map_err(|_other| foreign()),
            Some(Err(error)) if error.kind() == std::io::ErrorKind::InvalidData => Err(foreign()),
            Some(Err(error)) => return Err(failed(error)),
            None => {
                return Err(self.error(ErrorKind::Unavailable, "closed at once".to_owned()));
            }
        };
        let refused = match reply {
            Ok(Frame::Welcome(who)) => match self.check(&who) {
                Ok(()) => {
                    reader.decoder_mut().set_max(self.shared.limits.frame_max);
                    return Ok((reader, writer));
                }
                Err(error) => error,
            },
            Ok(Frame::Other(who)) => self.check(&who).err().unwrap_or_else(|| {
                let why = "it takes itself for another than it is".to_owned();
                self.error(ErrorKind::Unavailable, why)
            }),
            Ok(Frame::Refused(why)) => self.error(ErrorKind::Unsupported, why),
            Ok(_) => foreign(),
            Err(error) => error,
        };
        Err(self.refused(refused))
    }

    /// Whether the process that answers is the one that this is for.
    fn check(&self, who: &Who) -> Result<()> {
        if who.cluster != self.shared.cluster {
            let why = format!(
                "node {} answers there, of the cluster {}, and not node {} of {}",
                who.node, who.cluster, self.to.node, self.shared.cluster
            );
            return Err(self.error(ErrorKind::Misconfigured, why));
        }
        self.to.check(&who.node, who.incarnation)
    }

    /// Sends requests and takes answers until the connection is over. The callers that still wait then get
    /// their error when the table of them is dropped.
    async fn converse(
        &self,
        reader: Reader,
        writer: Writer,
        first: Call,
        calls: &mut mpsc::Receiver<Call>,
    ) {
        let pending = Mutex::new(BTreeMap::new());
        // Side by side, for neither may wait for the other: both ends could be full.
        let sending = self.send(writer, &pending, first, calls);
        let taking = self.take(reader, &pending);
        tokio::select! {
            Over = sending => {}
            Over = taking => {}
        }
    }

    async fn send(
        &self,
        mut writer: Writer,
        pending: &Mutex<BTreeMap<Id, Waiter>>,
        first: Call,
        calls: &mut mpsc::Receiver<Call>,
    ) -> Over {
        let mut pings = tokio::time::interval(self.shared.limits.silence / 3);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut call, mut last) = (Some(first), 0);
        loop {
            let frame = if let Some(Call { request, mut waiter }) = call.take() {
                if !waiter.waits() {
                    continue;
                }
                last += 1;
                waiter.sent = true;
                lock(pending).insert(last, waiter);
                Frame::Request(last, request)
            } else {
                tokio::select! {
                    biased;
                    next = calls.recv() => match next {
                        Some(next) => { call = Some(next); continue }
                        None => return Over,
                    },
                    _ = pings.tick() => Frame::Ping,
                }
            };
            if writer.feed(frame).await.is_err() {
                return Over;
            }
            call = calls.try_recv().ok();
            if call.is_none() && SinkExt::<Frame>::flush(&mut writer).await.is_err() {
                return Over;
            }
        }
    }

    async fn take(&self, mut reader: Reader, pending: &Mutex<BTreeMap<Id, Waiter>>) -> Over {
        while let Some(Ok(bytes)) = reader.next().await {
            match Frame::read(bytes) {
                Ok(Frame::Answer(id, answer)) => {
                    let waiter = lock(pending).remove(&id);
                    if let Some(waiter) = waiter {
                        waiter.tell(Ok(answer));
                    }
                }
                Ok(Frame::Failed(id, why)) => {
                    let waiter = lock(pending).remove(&id);
                    if let Some(waiter) = waiter {
                        waiter.tell(Err(self.error(ErrorKind::Unavailable, why).effect_unknown()));
                    }
                }
                Ok(Frame::Pong) => {}
                Ok(Frame::Goodbye(last)) => {
                    let not_taken = lock(pending).split_off(&(last.saturating_add(1)));
                    not_taken.into_values().for_each(Waiter::not_sent);
                    return Over;
                }
                _ => return Over,
            }
        }
        Over
    }
}
