//! The server's side: answers the requests of those who connect.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use coord_core::{Error, Result};
use futures::{SinkExt, StreamExt};
use tokio::io::AsyncReadExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use tokio_util::codec::{FramedRead, FramedWrite, LengthDelimitedCodec};

use super::frame::{Frame, Id};
use super::{Shared, VERSION};
use crate::transport::Incoming;

/// The pause after a connection could not be accepted, for want of file descriptors say.
const PAUSE: Duration = Duration::from_millis(100);
/// How long a client has to take the last answers.
const FAREWELL: Duration = Duration::from_secs(1);

/// Accepts connections until the transport closes.
pub(super) async fn listen(
    shared: Arc<Shared>,
    listener: TcpListener,
    incoming: Arc<dyn Incoming>,
) {
    let room = Arc::new(Semaphore::new(shared.limits.connections_max.min(Semaphore::MAX_PERMITS)));
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
            let connection = connection(Arc::clone(&shared), stream, Arc::clone(&incoming));
            let cut = shared.cut.clone();
            shared.tasks.spawn(async move {
                let _place = place;
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

async fn connection(
    shared: Arc<Shared>,
    stream: TcpStream,
    incoming: Arc<dyn Incoming>,
) -> Result<()> {
    stream.set_nodelay(true).map_err(broken)?;
    let (read, write) = stream.into_split();
    let codec = shared.limits.codec();
    let mut reader = FramedRead::new(read, codec.clone());
    let mut writer = FramedWrite::new(write, codec);
    let hello = timeout(shared.limits.connect_timeout, reader.next());
    let hello = hello.await.ok().flatten().transpose().map_err(broken)?;
    let hello = hello.map(|bytes| Frame::read(bytes.freeze())).transpose()?;
    if let Err(why) = check(&shared, hello) {
        writer.send(Frame::Refused(why.clone()).write()).await.map_err(broken)?;
        return Err(Error::invalid("accept", why));
    }
    writer.send(Frame::Welcome.write()).await.map_err(broken)?;

    let (answers, to_write) =
        mpsc::channel(shared.limits.in_flight_max.min(Semaphore::MAX_PERMITS));
    let serving = Serving { shared, incoming, answers };
    let (mut reader, writer) = tokio::join!(serving.read(reader), write_all(writer, to_write));
    drop(writer);
    // The other side closes once it has read all. Closing with bytes unread would take from it what it
    // has not read yet.
    let rest = reader.get_mut();
    let mut unread = [0; 1024];
    let drain = async { while rest.read(&mut unread).await.is_ok_and(|read| read > 0) {} };
    let _elapsed = timeout(FAREWELL, drain).await;
    Ok(())
}

fn check(shared: &Shared, hello: Option<Frame>) -> Result<(), String> {
    match hello {
        Some(Frame::Hello(version, _)) if version != VERSION => {
            Err(format!("it speaks version {VERSION} of the protocol, not {version}"))
        }
        Some(Frame::Hello(_, cluster)) if cluster != shared.cluster => {
            Err(format!("it belongs to the cluster {}, not {cluster}", shared.cluster))
        }
        Some(Frame::Hello(..)) => Ok(()),
        _ => Err("a connection begins with a hello".to_owned()),
    }
}

/// What one connection is served with.
struct Serving {
    shared: Arc<Shared>,
    incoming: Arc<dyn Incoming>,
    answers: mpsc::Sender<Frame>,
}

impl Serving {
    /// Takes requests until the client has gone or the transport closes. Then waits for the answers to
    /// what was taken, and says what was not.
    async fn read(
        self,
        mut reader: FramedRead<OwnedReadHalf, LengthDelimitedCodec>,
    ) -> FramedRead<OwnedReadHalf, LengthDelimitedCodec> {
        let most = self.shared.limits.in_flight_max.min(Semaphore::MAX_PERMITS);
        let room = Arc::new(Semaphore::new(most));
        let mut last = 0;
        // A client that lives pings.
        let silence = self.shared.limits.silence * 3;
        loop {
            let next = async {
                let place = Arc::clone(&room).acquire_owned().await.ok()?;
                let frame = timeout(silence, reader.next()).await.ok()??.ok()?;
                Some((place, Frame::read(frame.freeze()).ok()?))
            };
            let next = tokio::select! {
                biased;
                () = self.shared.closing.cancelled() => {
                    // Whoever holds a place answers before it gives it back.
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
                        drop(place);
                    });
                }
                Some((_, Frame::Ping)) => {
                    let _gone = self.answers.send(Frame::Pong).await;
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

async fn write_all(
    mut writer: FramedWrite<OwnedWriteHalf, LengthDelimitedCodec>,
    mut answers: mpsc::Receiver<Frame>,
) -> FramedWrite<OwnedWriteHalf, LengthDelimitedCodec> {
    let mut next = None;
    loop {
        let frame = match next.take() {
            Some(frame) => Some(frame),
            None => answers.recv().await,
        };
        let Some(frame): Option<Frame> = frame else { return writer };
        if writer.feed(frame.write()).await.is_err() {
            return writer;
        }
        next = answers.try_recv().ok();
        if next.is_none() && SinkExt::<Bytes>::flush(&mut writer).await.is_err() {
            return writer;
        }
    }
}

fn broken(error: std::io::Error) -> Error {
    Error::unavailable("accept", "the connection broke").with_source(error)
}
