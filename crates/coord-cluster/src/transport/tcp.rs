//! Requests over TCP, in frames of tokio-util's `LengthDelimitedCodec`.
//!
//! ```text
//!   frame     length 4, kind 1, the rest
//!   client    Hello(version 2, cluster)   Request(id 8, payload)                    Ping
//!   server    Welcome | Refused(why)      Answer(id 8, payload) | Failed(id 8, why) Pong   Goodbye(last id 8)
//! ```
//!
//! A connection carries the requests of one side and the answers to them; two processes that ask each
//! other have two. It is made when the first request needs it and kept; after it broke, requests fail at
//! once ("not sent") until a pause of 20 ms, doubling to 1 s, is over. Many requests are on their way on
//! one connection, up to [`TcpLimits::in_flight_max`]: beyond it, callers wait, and the server does not read
//! on.
//!
//! Nothing is sent before the server has welcomed the client, so that a process of another cluster, or of
//! another protocol, is told why and nothing else. A server that closes answers what it has read and says up
//! to where that was: what came after was certainly not taken. A side that hears nothing at all for
//! [`TcpLimits::silence`], not even answers to its pings, gives the connection up.

mod frame;
mod peer;
mod server;

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_core::{Address, ClusterName, Error, ErrorKind, Result};
use tokio::net::TcpListener;
use tokio_util::codec::LengthDelimitedCodec;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::peer::Peer;
use super::{Incoming, Transport};

/// The protocol's version; two processes that differ refuse each other.
const VERSION: u16 = 2;
/// How long [`Transport::close`] waits for what is on its way.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(10);

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
    /// How long it may take to connect and be welcomed; 3 s.
    pub connect_timeout: Duration,
    /// After how long without a sign of life a connection is given up; 5 s.
    pub silence: Duration,
}

impl Default for TcpLimits {
    fn default() -> Self {
        Self {
            frame_max: 4 * 1024 * 1024,
            in_flight_max: 1_024,
            connections_max: 4_096,
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

    fn codec(&self) -> LengthDelimitedCodec {
        LengthDelimitedCodec::builder().max_frame_length(self.frame_max).new_codec()
    }
}

/// A [`Transport`] over TCP.
///
/// Connections are neither encrypted nor authenticated beyond the cluster's name: it is for a private
/// network.
#[derive(Debug)]
pub struct TcpTransport {
    shared: Arc<Shared>,
    address: SocketAddr,
    listener: Mutex<Option<TcpListener>>,
    peers: Mutex<HashMap<Address, Peer>>,
}

/// What the tasks of one transport share.
struct Shared {
    cluster: ClusterName,
    limits: TcpLimits,
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
        let counts = [limits.frame_max, limits.in_flight_max, limits.connections_max];
        if counts.contains(&0) || limits.connect_timeout.is_zero() || limits.silence.is_zero() {
            return Err(Error::invalid("bind", format!("a limit is 0: {limits:?}")));
        }
        let failed = |error| {
            let error = Error::new(ErrorKind::Unavailable, "bind").with_source(error);
            error.message("can't listen there").resource(address)
        };
        let listener =
            TcpListener::bind(address).await.map_err(|error: std::io::Error| failed(error))?;
        let address = listener.local_addr().map_err(failed)?;
        let shared = Shared {
            cluster,
            limits,
            closing: CancellationToken::new(),
            cut: CancellationToken::new(),
            tasks: TaskTracker::new(),
        };
        Ok(Self {
            shared: Arc::new(shared),
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
    /// None that can happen: the port is known.
    pub fn address(&self) -> Result<Address> {
        Address::new(self.address.to_string())
    }

    fn peer(&self, to: &Address) -> Peer {
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

    async fn call(&self, to: &Address, request: Bytes) -> Result<Bytes> {
        let (bytes, max) = (request.len(), self.shared.limits.payload_max());
        if bytes > max {
            let why = format!("the request has {bytes} bytes; at most {max}");
            return Err(Error::invalid("call", why).resource(to));
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
            self.shared.tasks.wait().await;
        }
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.shared.closing.cancel();
        self.shared.cut.cancel();
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
