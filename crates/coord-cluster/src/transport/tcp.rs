//! Requests over TCP, in frames of 4 bytes of length and so many bytes.
//!
//! ```text
//!   frame     length 4, kind 1, the rest
//!   client    Hello(version 4, cluster), To(incarnation 16, node)   Request(id 8, payload)                    Ping
//!   server    Welcome(who) | Other(who) | Refused(why)              Answer(id 8, payload) | Failed(id 8, why) Pong
//!             Goodbye(last id 8)
//!   who       length 1, cluster, length 1, node, incarnation 16 if it is registered
//! ```
//!
//! A connection carries the requests of one side to one incarnation of a node, and the answers to them; two
//! processes that ask each other have two connections. It is made when the first request needs it, and kept as
//! long as that incarnation is registered. After it broke, requests fail at once ("not sent") until a pause of
//! 20 ms, doubling to 1 s, is over. Many requests are on their way on one connection, up to
//! [`TcpLimits::in_flight_max`]: beyond that callers wait, and the server does not read on.
//!
//! Nothing is sent before the server has welcomed the client. A process of another cluster or protocol, another
//! node, and another incarnation of the node learn only which process answers. Both sides compare the process
//! that is asked for with the one that answers, and log a difference once for each peer. `Hello` and `Refused`
//! have one form in all versions.
//!
//! A server that closes, or whose incarnation is over, answers what it has read and reports how far that was:
//! what came after was certainly not taken. A side gives the connection up if it hears no byte for
//! [`TcpLimits::silence`], or can't send what it has to send for that long. So a client pings, and a server
//! reports that it lives, also while requests wait and it does not read on.
//!
//! Before the greeting is over, either side takes frames of 512 bytes at the most, and for no longer than
//! [`TcpLimits::connect_timeout`]. Later a frame takes as much memory as has come of it.

mod codec;
mod frame;
mod peer;
mod server;
mod silence;

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_core::{Address, ClusterName, Error, ErrorKind, Result};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::peer::Peer;
use self::server::Refusals;
use super::{Incoming, Recipient, Transport};

/// The protocol's version; two processes that differ refuse each other.
const VERSION: u16 = 4;
/// How long [`Transport::close`] waits for what is on its way.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(10);
/// How long what was given up then has to notice that.
const CUT_WAIT: Duration = Duration::from_secs(1);

/// What a [`TcpTransport`] allows.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpLimits {
    /// The most bytes of a frame: a request or an answer and 9 bytes; 4 MiB.
    pub frame_max: usize,
    /// The most requests on their way on one connection; 1,024.
    pub in_flight_max: usize,
    /// The most connections that others have open to this process; 4,096.
    pub connections_max: usize,
    /// The most connections that others have open to this process from one IP address; 256.
    pub connections_per_address_max: usize,
    /// How long it may take to connect and be welcomed; 3 s.
    pub connect_timeout: Duration,
    /// After how long without a byte from the other side, or to it while some wait, a connection is given up;
    /// 5 s.
    pub silence: Duration,
}

impl Default for TcpLimits {
    fn default() -> Self {
        Self {
            frame_max: 4 * 1024 * 1024,
            in_flight_max: 1_024,
            connections_max: 4_096,
            connections_per_address_max: 256,
            connect_timeout: Duration::from_secs(3),
            silence: Duration::from_secs(5),
        }
    }
}

impl TcpLimits {
    /// The most bytes of a request or an answer.
    fn payload_max(&self) -> usize {
        self.frame_max.saturating_sub(frame::HEADER)
    }
}

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing {
    //! What the fuzz targets read.

    use std::net::Ipv4Addr;

    use bytes::BytesMut;
    use coord_core::{Incarnation, NodeId};
    use futures::future::try_join_all;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio_util::codec::{Decoder as _, Encoder as _};

    use super::codec::Codec;
    use super::frame::Frame;
    use super::*;

    /// Reads what comes on a connection to its end, and checks that what is read reads back the same.
    pub(crate) fn read_frames(bytes: &[u8]) -> Result<()> {
        let bad =
            |source| Error::corrupt("read frame", "it is cut or too long").with_source(source);
        let mut bytes = BytesMut::from(bytes);
        let mut codec = Codec::new(TcpLimits::default().frame_max);
        while let Some(frame) = codec.decode_eof(&mut bytes).map_err(bad)? {
            let frame = Frame::read(frame)?;
            let mut again = BytesMut::new();
            codec.encode(frame.clone(), &mut again).map_err(bad)?;
            let again = codec.decode_eof(&mut again).map_err(bad)?.unwrap_or_default();
            assert_eq!(Frame::read(again)?, frame);
        }
        Ok(())
    }

    #[derive(Debug)]
    struct Nobody(NodeId);

    #[async_trait]
    impl Incoming for Nobody {
        fn node(&self) -> &NodeId {
            &self.0
        }

        fn incarnation(&self) -> Option<Incarnation> {
            Some(Incarnation::from_u128(5))
        }

        async fn ended(&self, _run: Incarnation) {
            std::future::pending::<()>().await;
        }

        async fn answer(&self, request: Bytes) -> Bytes {
            request
        }
    }

    /// Serves so many clients that greet as they should, announce the longest frame and send 4 KiB of it; returns
    /// once all of that has come.
    pub(crate) async fn announced(connections: usize) -> Result<()> {
        const PIPE: usize = 1024;
        let shared = Shared::new(ClusterName::new("orders")?, TcpLimits::default());
        let (shared, node) = (Arc::new(shared), NodeId::new("n1")?);
        let mut greeting = BytesMut::new();
        let hello = Frame::Hello(VERSION, shared.cluster.clone());
        for frame in [hello, Frame::To(Incarnation::from_u128(5), node.clone())] {
            Codec::new(0).encode(frame, &mut greeting).map_err(broken)?;
        }
        let length = u32::try_from(shared.limits.frame_max).unwrap_or(u32::MAX).to_be_bytes();
        let incoming: Arc<dyn Incoming> = Arc::new(Nobody(node));
        let clients = (0..connections).map(|_| {
            let (mut client, server) = tokio::io::duplex(PIPE);
            let from = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
            let incoming = Arc::clone(&incoming);
            let (read, write) = tokio::io::split(server);
            shared.tasks.spawn(server::connection(
                Arc::clone(&shared),
                read,
                write,
                from,
                incoming,
            ));
            let (greeting, length) = (greeting.clone(), &length);
            async move {
                client.write_all(&greeting).await?;
                let mut head = [0; 5];
                client.read_exact(&mut head).await?;
                client.write_all(length).await?;
                // What does not fit into the pipe was read.
                client.write_all(&[7; 5 * PIPE]).await?;
                Ok(client)
            }
        });
        let open = try_join_all(clients).await.map_err(broken)?;
        assert_eq!(shared.tasks.len(), connections, "all of them are served");
        drop(open);
        Ok(())
    }

    fn broken(error: std::io::Error) -> Error {
        Error::unavailable("serve", "a client is not served").with_source(error)
    }
}

/// A [`Transport`] over TCP.
///
/// Connections are neither encrypted nor authenticated: it is for a private network. What both sides say of
/// themselves guards against mistakes, and not against attackers.
#[derive(Debug)]
pub struct TcpTransport {
    shared: Arc<Shared>,
    address: SocketAddr,
    listener: Mutex<Option<TcpListener>>,
    peers: Mutex<HashMap<Recipient, Peer>>,
}

/// What the tasks of one transport share.
struct Shared {
    cluster: ClusterName,
    limits: TcpLimits,
    /// Which clients were refused.
    refusals: Refusals,
    /// Nothing more is taken.
    closing: CancellationToken,
    /// What is still on its way is given up.
    cut: CancellationToken,
    tasks: TaskTracker,
}

impl TcpTransport {
    /// Listens at this address; port 0 takes a free one. Requests are taken once a node serves them.
    ///
    /// # Errors
    /// `Unavailable` if the address can't be listened at.
    ///
    /// # Cancel safety
    /// Nothing is left behind.
    pub async fn bind(address: SocketAddr, cluster: ClusterName) -> Result<Self> {
        Self::bind_with(address, cluster, TcpLimits::default()).await
    }

    /// As [`bind`](Self::bind), with other limits.
    ///
    /// # Errors
    /// As `bind`; `Invalid` for a limit of 0.
    ///
    /// # Cancel safety
    /// Nothing is left behind.
    pub async fn bind_with(
        address: SocketAddr,
        cluster: ClusterName,
        limits: TcpLimits,
    ) -> Result<Self> {
        let connections = [limits.connections_max, limits.connections_per_address_max];
        let counts = [limits.frame_max, limits.in_flight_max, connections[0], connections[1]];
        if counts.contains(&0) || limits.connect_timeout.is_zero() || limits.silence.is_zero() {
            return Err(Error::invalid("bind", format!("a limit is 0: {limits:?}")));
        }
        let failed = |error| {
            let error = Error::new(ErrorKind::Unavailable, "bind").effect_none().with_source(error);
            error.message("can't listen there").resource(address)
        };
        let listener =
            TcpListener::bind(address).await.map_err(|error: std::io::Error| failed(error))?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self {
            shared: Arc::new(Shared::new(cluster, limits)),
            address,
            listener: Mutex::new(Some(listener)),
            peers: Mutex::default(),
        })
    }

    /// Where it listens.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Where it listens, as a node's address. Others reach it there only if it listens at an address of
    /// this machine that is theirs too, and not at "all" (`0.0.0.0`).
    ///
    /// # Errors
    /// `Invalid` where it listens at "all" addresses: to others that one means themselves.
    pub fn address(&self) -> Result<Address> {
        if self.address.ip().to_canonical().is_unspecified() {
            let why =
                "it listens at all addresses of this machine; name one that others reach it at";
            return Err(Error::invalid("address", why).resource(self.address));
        }
        Address::new(self.address.to_string())
    }

    fn peer(&self, to: &Recipient) -> Peer {
        let mut peers = lock(&self.peers);
        if let Some(peer) = peers.get(to).filter(|peer| !peer.has_ended()) {
            return peer.clone();
        }
        let peer = Peer::start(Arc::clone(&self.shared), to.clone());
        peers.retain(|_, peer| !peer.has_ended());
        peers.insert(to.clone(), peer.clone());
        peer
    }
}

#[async_trait]
impl Transport for TcpTransport {
    fn serve(&self, incoming: Arc<dyn Incoming>) {
        if let Some(listener) = lock(&self.listener).take() {
            self.shared.tasks.spawn(server::listen(Arc::clone(&self.shared), listener, incoming));
        }
    }

    async fn call(&self, to: &Recipient, request: Bytes) -> Result<Bytes> {
        let (bytes, max) = (request.len(), self.shared.limits.payload_max());
        if bytes > max {
            let why = format!("the request has {bytes} bytes; at most {max}");
            return Err(Error::invalid("call", why).resource(&to.address));
        }
        if self.shared.closing.is_cancelled() {
            return Err(Error::new(ErrorKind::Closed, "call").message("the transport is closed"));
        }
        self.peer(to).call(request).await
    }

    async fn close(&self) {
        self.shared.closing.cancel();
        lock(&self.listener).take();
        self.shared.tasks.close();
        if tokio::time::timeout(CLOSE_WAIT_MAX, self.shared.tasks.wait()).await.is_err() {
            self.shared.cut.cancel();
            // What does not give way to the runtime is left to itself.
            let _late = tokio::time::timeout(CUT_WAIT, self.shared.tasks.wait()).await;
        }
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.shared.closing.cancel();
        self.shared.cut.cancel();
    }
}

impl Shared {
    fn new(cluster: ClusterName, limits: TcpLimits) -> Self {
        Self {
            cluster,
            limits,
            refusals: Refusals::default(),
            closing: CancellationToken::new(),
            cut: CancellationToken::new(),
            tasks: TaskTracker::new(),
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
