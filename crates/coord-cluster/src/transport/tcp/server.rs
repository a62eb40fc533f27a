//! The server's side: answers the requests of its clients.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use coord_core::{Error, Incarnation, Result};
use futures::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, timeout};
use tokio_util::codec::{FramedRead, FramedWrite};

use super::codec::Codec;
use super::frame::{Frame, GREETING_MAX, Id, Who};
use super::silence::Silent;
use super::{Shared, VERSION, lock};
use crate::transport::Incoming;

/// The pause after a connection could not be accepted, for want of file descriptors say.
const PAUSE: Duration = Duration::from_millis(100);
/// How long a client has to take the last answers.
const FAREWELL: Duration = Duration::from_secs(1);
/// For how long a refused client is not logged again.
const REFUSAL_TOLD: Duration = Duration::from_secs(600);
/// For so many refused clients at most it is remembered that they were logged.
const REFUSALS_MAX: usize = 256;

type Reader<R> = FramedRead<Silent<R>, Codec>;
type Writer<W> = FramedWrite<Silent<W>, Codec>;

/// How many connections each address has.
type Counts = Arc<Mutex<HashMap<IpAddr, usize>>>;

/// One of the connections of an address.
struct Counted {
    counts: Counts,
    address: IpAddr,
}

impl Counted {
    fn new(counts: &Counts, address: IpAddr, max: usize) -> Option<Self> {
        let mut all = lock(counts);
        let count = all.entry(address).or_default();
        if *count >= max {
            return None;
        }
        *count += 1;
        drop(all);
        Some(Self { counts: Arc::clone(counts), address })
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut all = lock(&self.counts);
        if let Some(count) = all.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.address);
            }
        }
    }
}

/// Accepts connections until the transport closes.
pub(super) async fn listen(
    shared: Arc<Shared>,
    listener: TcpListener,
    incoming: Arc<dyn Incoming>,
) {
    let room = Arc::new(Semaphore::new(shared.limits.connections_max.min(Semaphore::MAX_PERMITS)));
    let counts = Counts::default();
    let accept = async {
        loop {
            let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
            let (stream, from) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection can't be accepted");
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            let max = shared.limits.connections_per_address_max;
            let Some(counted) = Counted::new(&counts, from.ip(), max) else {
                tracing::debug!(%from, max, "the address has too many connections");
                continue;
            };
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%from, %error, "a connection broke at once");
                continue;
            }
            let (read, write) = stream.into_split();
            let (all, answers) = (Arc::clone(&shared), Arc::clone(&incoming));
            let connection = connection(all, read, write, from, answers);
            let cut = shared.cut.clone();
            shared.tasks.spawn(async move {
                let _held = (place, counted);
                tokio::select! {
                    biased;
                    () = cut.cancelled() => {}
                    ended = connection => if let Err(error) = ended {
                        tracing::debug!(%from, %error, "a connection ended");
                    }
                }
            });
        }
    };
    tokio::select! {
        biased;
        () = shared.closing.cancelled() => {}
        () = accept => {}
    }
}

/// Serves one client, as long as it is there and the incarnation that it asked for lasts.
pub(super) async fn connection(
    shared: Arc<Shared>,
    read: impl AsyncRead + Unpin,
    write: impl AsyncWrite + Unpin,
    from: SocketAddr,
    incoming: Arc<dyn Incoming>,
) -> Result<()> {
    let silence = shared.limits.silence;
    // No memory is reserved for a client before it is known to belong here.
    let mut reader = FramedRead::new(Silent::new(read, silence), Codec::new(GREETING_MAX));
    let mut writer = FramedWrite::new(Silent::new(write, silence), Codec::new(GREETING_MAX));
    let greeting =
        timeout(shared.limits.connect_timeout, greeting(&shared, &*incoming, &mut reader));
    let late = |_elapsed| Error::unavailable("accept", "the client does not say what it wants");
    let (run, who) = match greeting.await.map_err(late)?? {
        Ok(welcome) => welcome,
        Err(refusal) => {
            shared.refusals.tell(from, &refusal);
            writer.send(refusal.reply).await.map_err(broken)?;
            farewell(&mut reader).await;
            return Ok(());
        }
    };
    reader.decoder_mut().set_max(shared.limits.frame_max);
    writer.send(Frame::Welcome(who)).await.map_err(broken)?;

    let (answers, to_write) =
        mpsc::channel(shared.limits.in_flight_max.min(Semaphore::MAX_PERMITS));
    let serving = Serving { shared, incoming, run, answers };
    let writing = write_all(writer, to_write, silence / 3);
    tokio::pin!(writing);
    let mut reader = tokio::select! {
        biased;
        // Not before there is nothing more to read, unless the client takes nothing any more.
        () = &mut writing => return Ok(()),
        reader = serving.read(reader) => reader,
    };
    writing.await;
    farewell(&mut reader).await;
    Ok(())
}

/// The other side closes once it has read all. Closing with bytes unread would take from it what it has not read
/// yet.
async fn farewell<R: AsyncRead + Unpin>(reader: &mut Reader<R>) {
    let rest = reader.get_mut();
    let mut unread = [0; 1024];
    let drain = async { while rest.read(&mut unread).await.is_ok_and(|read| read > 0) {} };
    let _elapsed = timeout(FAREWELL, drain).await;
}

/// Why a client is not served.
struct Rejection {
    reply: Frame,
    why: String,
    /// No operator has to act.
    heals: bool,
}

impl Rejection {
    fn plain(why: String) -> Self {
        Self { reply: Frame::Refused(why.clone()), why, heals: false }
    }
}

/// What the client wants: to be served by the incarnation that answers now, or something that it can't have.
async fn greeting<R: AsyncRead + Unpin>(
    shared: &Shared,
    incoming: &dyn Incoming,
    reader: &mut Reader<R>,
) -> Result<Result<(Incarnation, Who), Rejection>> {
    match next(reader).await? {
        Some(Frame::Hello(version, _)) if version != VERSION => {
            let why = format!("it speaks version {VERSION} of the protocol, not {version}");
            return Ok(Err(Rejection::plain(why)));
        }
        Some(Frame::Hello(_, cluster)) if cluster != shared.cluster => {
            let why = format!("it is for the cluster {cluster}, and this is {}", shared.cluster);
            let reply = Frame::Other(who(shared, incoming));
            return Ok(Err(Rejection { reply, why, heals: false }));
        }
        Some(Frame::Hello(..)) => {}
        _ => return Ok(Err(Rejection::plain("a connection begins with a hello".to_owned()))),
    }
    let Some(Frame::To(run, node)) = next(reader).await? else {
        let why = "after the hello a client names the node that it speaks to";
        return Ok(Err(Rejection::plain(why.to_owned())));
    };
    let who = who(shared, incoming);
    if node == who.node && who.incarnation == Some(run) {
        return Ok(Ok((run, who)));
    }
    let heals = node == who.node;
    let why = match who.incarnation {
        _ if !heals => format!(
            "it is for node {node}, and this is {}; each node needs an address that leads to it and to no \
             other",
            who.node
        ),
        Some(now) => format!("it is for run {run} of the node, which is {now} now"),
        None => format!("it is for run {run} of the node, which is not registered now"),
    };
    Ok(Err(Rejection { reply: Frame::Other(who), why, heals }))
}

async fn next<R: AsyncRead + Unpin>(reader: &mut Reader<R>) -> Result<Option<Frame>> {
    let bytes = reader.next().await.transpose().map_err(broken)?;
    bytes.map(Frame::read).transpose()
}

fn who(shared: &Shared, incoming: &dyn Incoming) -> Who {
    Who {
        cluster: shared.cluster.clone(),
        node: incoming.node().clone(),
        incarnation: incoming.incarnation(),
    }
}

/// Which clients were refused, and when that was logged; what heals by itself apart from the rest.
#[derive(Debug, Default)]
pub(super) struct Refusals(Mutex<HashMap<(IpAddr, bool), Instant>>);

impl Refusals {
    fn tell(&self, from: SocketAddr, Rejection { why, heals, .. }: &Rejection) {
        if !self.is_news((from.ip(), *heals)) {
            tracing::debug!(%from, %why, "a connection was refused");
        } else if *heals {
            tracing::info!(%from, %why, "a connection was refused");
        } else {
            tracing::warn!(%from, %why, "a connection was refused");
        }
    }

    fn is_news(&self, client: (IpAddr, bool)) -> bool {
        let now = Instant::now();
        let mut told = lock(&self.0);
        if told.len() >= REFUSALS_MAX {
            told.retain(|_, at| now.duration_since(*at) < REFUSAL_TOLD);
        }
        let was = told.get(&client).is_some_and(|at| now.duration_since(*at) < REFUSAL_TOLD);
        let is_news = !was && told.len() < REFUSALS_MAX;
        if is_news {
            told.insert(client, now);
        }
        is_news
    }
}

/// What one connection is served with.
struct Serving {
    shared: Arc<Shared>,
    incoming: Arc<dyn Incoming>,
    run: Incarnation,
    answers: mpsc::Sender<Frame>,
}

impl Serving {
    /// Takes requests until the client has gone, the transport closes or the incarnation is over. Then waits
    /// for the answers to the requests that were taken, and reports which were not.
    async fn read<R: AsyncRead + Unpin>(self, mut reader: Reader<R>) -> Reader<R> {
        let most = self.shared.limits.in_flight_max.min(Semaphore::MAX_PERMITS);
        let room = Arc::new(Semaphore::new(most));
        let mut last = 0;
        let over = async {
            tokio::select! {
                biased;
                () = self.shared.closing.cancelled() => {}
                () = self.incoming.ended(self.run) => {}
            }
        };
        tokio::pin!(over);
        loop {
            let next = async {
                // A client that lives pings, so that something comes.
                let frame = Frame::read(reader.next().await?.ok()?).ok()?;
                // Only requests wait for a place.
                let place = match frame {
                    Frame::Request(..) => Some(Arc::clone(&room).acquire_owned().await.ok()?),
                    _ => None,
                };
                Some((place, frame))
            };
            let next = tokio::select! {
                biased;
                () = &mut over => {
                    // A request that holds a permit is answered before it gives the permit back.
                    let all = u32::try_from(most).unwrap_or(u32::MAX);
                    let _all = room.acquire_many(all).await;
                    let _gone = self.answers.send(Frame::Goodbye(last)).await;
                    return reader;
                }
                next = next => next,
            };
            match next {
                Some((place, Frame::Request(id, request))) => {
                    last = id;
                    let answer = self.answer(id, request);
                    self.shared.tasks.spawn(async move {
                        answer.await;
                        drop::<Option<OwnedSemaphorePermit>>(place);
                    });
                }
                Some((_, Frame::Ping)) => {
                    // Where there is no room, answers are under way, which say as much.
                    let _full = self.answers.try_send(Frame::Pong);
                }
                _ => return reader,
            }
        }
    }

    fn answer(&self, id: Id, request: Bytes) -> impl Future<Output = ()> + Send + 'static + use<> {
        let (incoming, answers) = (Arc::clone(&self.incoming), self.answers.clone());
        let max = self.shared.limits.payload_max();
        async move {
            let answer = incoming.answer(request).await;
            let frame = match answer.len() {
                bytes if bytes > max => {
                    Frame::Failed(id, format!("the answer has {bytes} bytes; at most {max}"))
                }
                _ => Frame::Answer(id, answer),
            };
            // The client may have gone.
            let _gone = answers.send(frame).await;
        }
    }
}

/// Writes until there will be nothing more, or the client takes nothing any more. Reports from time to time
/// that it lives, whatever the reader waits for.
async fn write_all<W: AsyncWrite + Unpin>(
    mut writer: Writer<W>,
    mut answers: mpsc::Receiver<Frame>,
    pause: Duration,
) {
    let mut next = None;
    loop {
        let frame = match next.take() {
            Some(frame) => Some(frame),
            None => timeout(pause, answers.recv()).await.unwrap_or(Some(Frame::Pong)),
        };
        let Some(frame): Option<Frame> = frame else { return };
        if writer.feed(frame).await.is_err() {
            return;
        }
        next = answers.try_recv().ok();
        if next.is_none() && SinkExt::<Frame>::flush(&mut writer).await.is_err() {
            return;
        }
    }
}

fn broken(error: std::io::Error) -> Error {
    Error::unavailable("accept", "the connection broke").with_source(error)
}
