//! A TCP proxy that cuts, delays, holds back, throttles, and loses replies.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

#[cfg(feature = "tls")]
use crate::servers::ApiServer;
use crate::servers::Server;

/// How many ports it tries for an address of its own.
const PORTS_MAX: usize = 8;
const CHUNK_BYTES: usize = 16 << 10;
/// How many chunks of one direction are on their way at most; then the sender is held up.
const CHUNKS_MAX: usize = 64;
/// From the first byte that the server says after a request whose reply is to be lost, until the
/// connection is reset. What comes first may be something else: a push, a window update.
const LOSING: Duration = Duration::from_millis(200);

/// Stands between clients and one or several servers. Dropped, it ends with all its connections.
///
/// It runs on the runtime on which it was started. All faults but `reset` and `lose_reply` stay until
/// [`heal`](Self::heal). Bytes are never reordered, and never lost from a connection that lives on.
#[derive(Debug)]
pub struct Proxy {
    addresses: Vec<SocketAddr>,
    shared: Arc<Shared>,
    stop: CancellationToken,
}

#[derive(Debug, Default)]
struct Shared {
    rules: watch::Sender<Rules>,
    /// Cancelled, it resets the connections that are open now.
    open: Mutex<CancellationToken>,
    /// Each is used up by the first request that it fits. With what only its reply holds.
    losing: Mutex<Vec<(Request, Vec<u8>)>>,
    lost: AtomicU64,
    connections: AtomicU64,
    to_server: AtomicU64,
    to_client: AtomicU64,
    #[cfg(feature = "tls")]
    encryption: Option<Encryption>,
    /// How clients are spoken to, where they are not in the open.
    #[cfg(feature = "tls")]
    serving: Option<Arc<rustls::ServerConfig>>,
}

/// How the server is spoken to.
#[cfg(feature = "tls")]
type Encryption = (Arc<rustls::ClientConfig>, rustls::pki_types::ServerName<'static>);

#[derive(Clone, Copy, Debug, Default)]
struct Rules {
    cut: bool,
    to_server: Flow,
    to_client: Flow,
}

#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    held: bool,
    delay: Duration,
    bytes_per_second: Option<u32>,
}

/// Which way bytes go.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the clients.
    ToServer,
    /// To the clients.
    ToClient,
    /// Both ways.
    Both,
}

/// The request whose reply is lost.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Whatever bytes a client sends next.
    Any,
    /// The next one with these bytes in it: a subject, a key. They can't be seen through TLS.
    With(Vec<u8>),
    /// The next one with any of these in it.
    WithAny(Vec<Vec<u8>>),
}

/// What went through a proxy so far.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Connections that clients made.
    pub connections: u64,
    /// Bytes that servers were sent.
    pub bytes_to_server: u64,
    /// Bytes that clients were sent.
    pub bytes_to_client: u64,
}

impl Proxy {
    /// Stands in front of all addresses of a server, in their order.
    ///
    /// # Errors
    /// There is no free port.
    ///
    /// # Cancel safety
    /// Nothing is left.
    pub async fn to(server: &Server) -> io::Result<Self> {
        Self::start(server.addresses()).await
    }

    /// Stands in front of each of these `host:port`, in their order.
    ///
    /// # Errors
    /// There is no free port.
    ///
    /// # Cancel safety
    /// Nothing is left.
    pub async fn start(targets: &[String]) -> io::Result<Self> {
        Self::with(targets, Shared::default()).await
    }

    /// Stands in front of an API server, and speaks TLS in its clients' stead: they come
    /// [in the open](ApiServer::kubeconfig_open_via), so that what requests hold can be seen.
    ///
    /// # Errors
    /// There is no free port, or the server was not started here.
    ///
    /// # Cancel safety
    /// Nothing is left.
    #[cfg(feature = "tls")]
    pub async fn encrypting(server: &ApiServer) -> io::Result<Self> {
        let encryption = Some(crate::servers::trusting(server.authority()?)?);
        Self::with(&[server.address()?], Shared { encryption, ..Shared::default() }).await
    }

    /// Stands in front of an API server, and speaks TLS with both sides, with the server's own
    /// certificate: what requests hold can be seen, and clients are as they always are.
    ///
    /// # Errors
    /// There is no free port, or the server was not started here.
    ///
    /// # Cancel safety
    /// Nothing is left.
    #[cfg(feature = "tls")]
    pub async fn seeing(server: &ApiServer) -> io::Result<Self> {
        let encryption = Some(crate::servers::trusting(server.authority()?)?);
        let serving = Some(server.serving()?);
        let shared = Shared { encryption, serving, ..Shared::default() };
        Self::with(&[server.address()?], shared).await
    }

    async fn with(targets: &[String], mut shared: Shared) -> io::Result<Self> {
        let stop = CancellationToken::new();
        shared.open = Mutex::new(stop.child_token());
        let shared = Arc::new(shared);
        let mut proxy = Self { addresses: Vec::new(), shared, stop };
        let tasks = TaskTracker::new();
        for target in targets {
            let listener = listen().await?;
            proxy.addresses.push(listener.local_addr()?);
            let (target, shared) = (target.clone(), Arc::clone(&proxy.shared));
            let accepting = accept(listener, target, shared, tasks.clone());
            tasks.spawn(proxy.stop.clone().run_until_cancelled_owned(accepting));
        }
        Ok(proxy)
    }

    /// Where clients connect, one for each target.
    #[must_use]
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Resets all connections, and each new one at once.
    pub fn cut(&self) {
        self.shared.rules.send_modify(|rules| rules.cut = true);
        self.reset();
    }

    /// Resets the connections that are open now. New ones work.
    pub fn reset(&self) {
        let fresh = self.stop.child_token();
        std::mem::replace(&mut *self.shared.open(), fresh).cancel();
    }

    /// A black hole: what is sent this way does not arrive, nor does the end of a connection, until
    /// [`heal`](Self::heal). Then it arrives late, as TCP would send it again.
    pub fn hold(&self, direction: Direction) {
        self.change(direction, |flow| flow.held = true);
    }

    /// What is sent this way arrives this much later.
    pub fn delay(&self, direction: Direction, delay: Duration) {
        self.change(direction, |flow| flow.delay = delay);
    }

    /// What is sent this way on each connection arrives at this rate.
    pub fn throttle(&self, direction: Direction, bytes_per_second: u32) {
        self.change(direction, |flow| flow.bytes_per_second = Some(bytes_per_second));
    }

    /// Delivers the next such request, and not what the server says after it: from then on that
    /// connection's client hears nothing, and a moment later the connection is reset.
    pub fn lose_reply(&self, request: Request) {
        self.lose_reply_with(request, Vec::new());
    }

    /// The same, and the connection is not reset before the server has said something with these bytes in
    /// it: where it says other things as well, the request may not be applied yet when the first come.
    pub fn lose_reply_with(&self, request: Request, reply: Vec<u8>) {
        self.shared.losing().push((request, reply));
    }

    /// How many connections were reset because a reply was lost on them.
    #[must_use]
    pub fn replies_lost(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }

    /// What went through so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        Traffic {
            connections: self.shared.connections.load(Ordering::Relaxed),
            bytes_to_server: self.shared.to_server.load(Ordering::Relaxed),
            bytes_to_client: self.shared.to_client.load(Ordering::Relaxed),
        }
    }

    /// Ends all faults, also those that have not struck yet.
    pub fn heal(&self) {
        self.shared.losing().clear();
        self.shared.rules.send_replace(Rules::default());
    }

    fn change(&self, direction: Direction, change: impl Fn(&mut Flow)) {
        self.shared.rules.send_modify(|rules| {
            if direction != Direction::ToClient {
                change(&mut rules.to_server);
            }
            if direction != Direction::ToServer {
                change(&mut rules.to_client);
            }
        });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Shared {
    fn open(&self) -> MutexGuard<'_, CancellationToken> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn losing(&self) -> MutexGuard<'_, Vec<(Request, Vec<u8>)>> {
        self.losing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the reply to a request that ends in the bytes from `fresh` on is to be lost; if so, what the
    /// reply holds, and that one is used up.
    fn loses(&self, bytes: &[u8], fresh: usize) -> Option<Vec<u8>> {
        let mut losing = self.losing();
        let fits = |(request, _): &(Request, Vec<u8>)| match request {
            Request::Any => true,
            Request::With(part) => holds(bytes, fresh, part),
            Request::WithAny(parts) => parts.iter().any(|part| holds(bytes, fresh, part)),
        };
        let index = losing.iter().position(fits)?;
        Some(losing.remove(index).1)
    }
}

/// Whether these bytes hold such a part that ends in those from `fresh` on.
fn holds(bytes: &[u8], fresh: usize, part: &[u8]) -> bool {
    let from = (fresh + 1).saturating_sub(part.len());
    part.is_empty() || bytes[from..].windows(part.len()).any(|window| window == part)
}

/// A port that was free may have been taken by another test program since.
async fn listen() -> io::Result<TcpListener> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..PORTS_MAX {
        match TcpListener::bind((Ipv4Addr::LOCALHOST, crate::free_port()?)).await {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

async fn accept(listener: TcpListener, target: String, shared: Arc<Shared>, tasks: TaskTracker) {
    while let Ok((client, _)) = listener.accept().await {
        shared.connections.fetch_add(1, Ordering::Relaxed);
        // Taken before the look at the rules: a cut in between cancels it.
        let open = shared.open().clone();
        tasks.spawn(connection(client, target.clone(), Arc::clone(&shared), open));
    }
}

/// Carries one connection until both its ends are closed, or it is reset.
async fn connection(
    mut client: TcpStream,
    target: String,
    shared: Arc<Shared>,
    open: CancellationToken,
) {
    let mut server = None;
    let carried = async {
        if shared.rules.borrow().cut {
            return Err(io::Error::from(io::ErrorKind::ConnectionReset));
        }
        let server = server.insert(TcpStream::connect(&target).await?);
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        #[cfg(feature = "tls")]
        if let Some((config, name)) = &shared.encryption {
            let connector = tokio_rustls::TlsConnector::from(Arc::clone(config));
            let encrypted = connector.connect(name.clone(), server).await?;
            let server = tokio::io::split(encrypted);
            let Some(serving) = &shared.serving else {
                return carry(client.split(), server, &shared).await;
            };
            let acceptor = tokio_rustls::TlsAcceptor::from(Arc::clone(serving));
            let client = acceptor.accept(&mut client).await?;
            return carry(tokio::io::split(client), server, &shared).await;
        }
        carry(client.split(), server.split(), &shared).await
    };
    if !matches!(open.run_until_cancelled(carried).await, Some(Ok(()))) {
        let _ = client.set_zero_linger();
        let _ = server.map(|server| server.set_zero_linger());
    }
}

async fn carry(
    (from_client, to_client): (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    (from_server, to_server): (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    shared: &Shared,
) -> io::Result<()> {
    let (client_sends, client_sent) = mpsc::channel(CHUNKS_MAX);
    let (server_sends, server_sent) = mpsc::channel(CHUNKS_MAX);
    let losing = watch::Sender::new(None);
    tokio::try_join!(
        read(from_client, client_sends, shared, |rules| rules.to_server.delay),
        read(from_server, server_sends, shared, |rules| rules.to_client.delay),
        write_to_server(to_server, client_sent, shared, &losing),
        write_to_client(to_client, server_sent, shared, losing.subscribe()),
    )?;
    Ok(())
}

/// Bytes, and when they arrive at the earliest.
type Chunk = (Instant, Vec<u8>);

async fn read(
    mut from: impl AsyncRead + Unpin,
    to: mpsc::Sender<Chunk>,
    shared: &Shared,
    delay: impl Fn(&Rules) -> Duration,
) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let length = from.read(&mut buffer).await?;
        let due = Instant::now() + delay(&shared.rules.borrow());
        // No bytes are the end of this direction, which is as late as bytes would be.
        let sent = to.send((due, buffer[..length].to_vec())).await;
        if length == 0 || sent.is_err() {
            return Ok(());
        }
    }
}

async fn write_to_server(
    mut to: impl AsyncWrite + Unpin,
    mut from: mpsc::Receiver<Chunk>,
    shared: &Shared,
    losing: &watch::Sender<Option<Vec<u8>>>,
) -> io::Result<()> {
    // The end of what was sent before, in which a request may begin.
    let mut before = Vec::new();
    while let Some(chunk) = from.recv().await {
        let bytes = arrived(chunk, shared, |rules| rules.to_server).await;
        if bytes.is_empty() {
            return to.shutdown().await;
        }
        let fresh = before.len();
        before.extend_from_slice(&bytes);
        if let Some(reply) = shared.loses(&before, fresh) {
            losing.send_replace(Some(reply));
        }
        before.drain(..before.len().saturating_sub(CHUNK_BYTES));
        to.write_all(&bytes).await?;
        to.flush().await?;
        shared.to_server.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    }
    Ok(())
}

async fn write_to_client(
    mut to: impl AsyncWrite + Unpin,
    mut from: mpsc::Receiver<Chunk>,
    shared: &Shared,
    losing: watch::Receiver<Option<Vec<u8>>>,
) -> io::Result<()> {
    let mut lost = Vec::new();
    while let Some(chunk) = from.recv().await {
        let bytes = arrived(chunk, shared, |rules| rules.to_client).await;
        let reply = losing.borrow().clone();
        if let Some(reply) = reply {
            let is_over = bytes.is_empty();
            let fresh = lost.len();
            lost.extend_from_slice(&bytes);
            if !is_over && !holds(&lost, fresh, &reply) {
                continue;
            }
            tokio::time::sleep(LOSING).await;
            shared.lost.fetch_add(1, Ordering::Relaxed);
            return Err(io::Error::from(io::ErrorKind::ConnectionReset));
        }
        if bytes.is_empty() {
            return to.shutdown().await;
        }
        to.write_all(&bytes).await?;
        to.flush().await?;
        shared.to_client.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    }
    Ok(())
}

/// The bytes of a chunk, once delay, rate and black hole let them through.
async fn arrived((due, bytes): Chunk, shared: &Shared, flow: fn(&Rules) -> Flow) -> Vec<u8> {
    tokio::time::sleep_until(due).await;
    let rate = flow(&shared.rules.borrow()).bytes_per_second;
    if let Some(rate) = rate {
        let seconds = bytes.len() as f64 / f64::from(rate.max(1));
        tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
    }
    // The sender of the rules lives as long as `shared`.
    let _ = shared.rules.subscribe().wait_for(|rules| !flow(rules).held).await;
    bytes
}
