//! A connection to the server that keeps the cluster's keys, found anew whenever it is lost.
//!
//! ```text
//!  hosts of the URL ──► each says what it is (HELLO)
//!     sentinel    ──► asked for the master's address (option master)
//!     cluster     ──► asked who serves the slot of all our keys
//!     standalone  ──► taken if it is a master
//! ```

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use coord_core::kit::Op;
use coord_core::{Effect, Error, ErrorKind, Result};
use futures::stream::{FuturesUnordered, Stream, StreamExt};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ConnectionAddr, ConnectionInfo, RedisConnectionInfo, Value};
use redis::{Client as Vendor, IntoConnectionInfo};
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::timeout;

use super::{exchange, next_id};
use crate::config::{Config, Host, Login, Sentinel};
use crate::error::{is_withheld, problem};

/// How long a second master among the hosts of the URL is looked for: a former one that came back.
const SECOND_MASTER_LIMIT: Duration = Duration::from_millis(200);

/// How the servers are put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// One server, or one with replicas that nobody promotes by itself.
    Single,
    Sentinel,
    Cluster,
}

/// What a server is: `valkey`, 9.1.2 say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    pub(crate) server: String,
    pub(crate) version: String,
}

/// What a server says of itself.
#[derive(Clone, Debug)]
pub(crate) struct Hello {
    /// None where something stands between that does not tell.
    pub(crate) version: Option<Version>,
    pub(crate) shape: Shape,
    is_master: bool,
}

/// A connection that is up, as far as is known.
#[derive(Clone)]
pub(crate) struct Live {
    pub(crate) id: u64,
    pub(crate) connection: MultiplexedConnection,
    pub(crate) hello: Arc<Hello>,
}

/// One connection, made when it is needed.
pub(crate) struct Link {
    dial: Arc<Dial>,
    live: Mutex<Option<Live>>,
    /// One task looks for the master, the others wait for it.
    connecting: AsyncMutex<()>,
}

impl Link {
    pub(crate) fn new(config: &Config, slot: u16) -> Result<Self> {
        Ok(Self::over(Arc::new(Dial::new(config, slot)?)))
    }

    fn over(dial: Arc<Dial>) -> Self {
        Self { dial, live: Mutex::default(), connecting: AsyncMutex::default() }
    }

    /// A connection of its own to the same server.
    pub(crate) fn another(&self) -> Self {
        Self::over(Arc::clone(&self.dial))
    }

    /// The limit of a request, for what is sent without the client's.
    pub(super) fn request_timeout(&self) -> Duration {
        self.dial.request_timeout
    }

    fn peek(&self) -> Option<Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The connection that is up, or a new one.
    pub(crate) async fn live(&self, op: Op<'_>) -> Result<Live> {
        if let Some(live) = self.peek() {
            return Ok(live);
        }
        let _only = self.connecting.lock().await;
        if let Some(live) = self.peek() {
            return Ok(live);
        }
        let (mut connection, hello) = self.dial.master(op).await?;
        self.dial.recognise(op, &mut connection).await?;
        let live = Live { id: next_id(), connection, hello: Arc::new(hello) };
        *self.live.lock().unwrap_or_else(PoisonError::into_inner) = Some(live.clone());
        Ok(live)
    }

    /// The number of the connection that is up; 0 for none.
    pub(crate) fn current(&self) -> u64 {
        self.peek().map_or(0, |live| live.id)
    }

    /// Lets the next request look for a master anew, unless another one did so already.
    pub(crate) fn forget(&self, id: u64) {
        let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        if live.as_ref().is_some_and(|live| live.id <= id) {
            *live = None;
        }
    }

    /// See [`Client::stay_with`](super::Client::stay_with).
    pub(crate) fn stay_with(&self, key: String, identity: String) {
        // It is said once, when the backend is opened.
        let _ = self.dial.identity.set((key, identity));
    }

    /// The identity that was said; empty before.
    pub(crate) fn identity(&self) -> &str {
        self.dial.identity.get().map_or("", |(_, identity)| identity)
    }

    /// Ends the connection.
    pub(crate) fn cut(&self) {
        self.forget(u64::MAX);
    }
}

/// How to get to a server.
struct Dial {
    hosts: Vec<Host>,
    login: Login,
    sentinel: Option<Sentinel>,
    #[cfg(feature = "tls")]
    tls: Option<redis::TlsCertificates>,
    db: u16,
    slot: u16,
    request_timeout: Duration,
    connect_timeout: Duration,
    /// Which store it is, and the key that says so; none while the backend is being opened.
    identity: OnceLock<(String, String)>,
}

type Found = (MultiplexedConnection, Hello);

impl Dial {
    fn new(config: &Config, slot: u16) -> Result<Self> {
        // Without the feature there is none: the URL was refused.
        debug_assert!(cfg!(feature = "tls") || config.tls.is_none());
        Ok(Self {
            hosts: config.hosts.clone(),
            login: config.login.clone(),
            sentinel: config.sentinel.clone(),
            #[cfg(feature = "tls")]
            tls: tls(Op::read("connect", &config.target), config)?,
            db: config.db,
            slot,
            request_timeout: config.request_timeout,
            connect_timeout: config.connect_timeout,
            identity: OnceLock::new(),
        })
    }

    /// Asks all hosts at once, and takes the first that leads to the master.
    async fn master(&self, op: Op<'_>) -> Result<Found> {
        let mut asked: FuturesUnordered<_> =
            self.hosts.iter().map(|host| self.master_by(op, host)).collect();
        let mut failed: Option<Error> = None;
        while let Some(found) = asked.next().await {
            match found {
                Ok(found) if found.1.shape == Shape::Single => {
                    return match timeout(SECOND_MASTER_LIMIT, any_ok(asked)).await {
                        Ok(true) => {
                            let why = "two of the hosts say that they are the master; let one \
                                       follow the other, or name one only";
                            Err(op.error(ErrorKind::Misconfigured).message(why))
                        }
                        _ => Ok(found),
                    };
                }
                Ok(found) => return Ok(found),
                // What an operator has to change is told rather than who is away.
                Err(error)
                    if failed.as_ref().is_none_or(|failed| {
                        error.needs_operator() && !failed.needs_operator()
                    }) =>
                {
                    failed = Some(error);
                }
                Err(_) => {}
            }
        }
        Err(failed.unwrap_or_else(|| op.error(ErrorKind::Internal).message("no host")))
    }

    /// Refuses a server that keeps another store's data. A server that has lost its data (for example because
    /// it was restarted without persistence) is given its identity back, so that all handles continue together.
    async fn recognise(&self, op: Op<'_>, connection: &mut MultiplexedConnection) -> Result<()> {
        let Some((key, identity)) = self.identity.get() else { return Ok(()) };
        let mut set = redis::cmd("SET");
        set.arg(key).arg(identity).arg("NX");
        exchange(op, connection, &set, self.request_timeout).await?;
        let mut get = redis::cmd("GET");
        get.arg(key);
        let found = text(&exchange(op, connection, &get, self.request_timeout).await?);
        if found == *identity {
            return Ok(());
        }
        let why = "the server has the data of another store than when the backend was opened; open \
                   it again";
        Err(op.error(ErrorKind::Misconfigured).message(why))
    }

    async fn master_by(&self, op: Op<'_>, host: &Host) -> Result<Found> {
        if let Some(sentinel) = &self.sentinel {
            return self.master_by_sentinel(op, host, sentinel).await;
        }
        let (mut connection, hello) = self.dial(op, host, &self.login, self.db).await?;
        match hello.shape {
            Shape::Sentinel => {
                let why =
                    format!("{host} is a sentinel; give the option master, the name it knows");
                Err(op.error(ErrorKind::Misconfigured).message(why))
            }
            Shape::Cluster => self.master_in_cluster(op, host, &mut connection).await,
            Shape::Single if hello.is_master => Ok((connection, hello)),
            Shape::Single => {
                let why = format!("{host} is a replica; name the master too, or the sentinels");
                Err(op.error(ErrorKind::Unavailable).message(why))
            }
        }
    }

    async fn master_by_sentinel(
        &self,
        op: Op<'_>,
        host: &Host,
        sentinel: &Sentinel,
    ) -> Result<Found> {
        let (mut connection, hello) = self.dial(op, host, &sentinel.login, 0).await?;
        if hello.shape != Shape::Sentinel {
            let why = format!("{host} is no sentinel; leave the option master out");
            return Err(op.error(ErrorKind::Misconfigured).message(why));
        }
        let mut command = redis::cmd("SENTINEL");
        command.arg("GET-MASTER-ADDR-BY-NAME").arg(&sentinel.master);
        let answer = exchange(op, &mut connection, &command, self.request_timeout).await?;
        let master = match texts(answer).as_slice() {
            [ip, port] => Host { host: ip.clone(), port: port.parse().unwrap_or(0) },
            _ => {
                let why = format!("the sentinel {host} knows no master {:?}", sentinel.master);
                return Err(op.error(ErrorKind::Misconfigured).message(why));
            }
        };
        let (connection, hello) = self.dial(op, &master, &self.login, self.db).await?;
        if !hello.is_master {
            let why = format!("{master}, the master by its sentinels, is none: a failover goes on");
            return Err(op.error(ErrorKind::Unavailable).message(why));
        }
        Ok((connection, Hello { shape: Shape::Sentinel, ..hello }))
    }

    async fn master_in_cluster(
        &self,
        op: Op<'_>,
        host: &Host,
        connection: &mut MultiplexedConnection,
    ) -> Result<Found> {
        let mut command = redis::cmd("CLUSTER");
        command.arg("SLOTS");
        let answer = exchange(op, connection, &command, self.request_timeout).await?;
        let Some(master) = serves(answer, self.slot, host) else {
            let why = format!("no server of the cluster serves slot {}", self.slot);
            return Err(op.error(ErrorKind::Unavailable).message(why));
        };
        let found = self.dial(op, &master, &self.login, self.db).await?;
        if !found.1.is_master {
            let why = format!("{master}, by the cluster the master, is none: a failover goes on");
            return Err(op.error(ErrorKind::Unavailable).message(why));
        }
        Ok(found)
    }

    /// Connects to one server, and asks what it is.
    async fn dial(&self, op: Op<'_>, host: &Host, login: &Login, db: u16) -> Result<Found> {
        let failed = |error| {
            let error = problem(op, Effect::None, error);
            let why = format!("{}: {}", host, error.message_text());
            op.error(error.kind()).message(why).with_source(error)
        };
        let client = self.vendor(host, login, db).map_err(failed)?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect_timeout))
            .set_response_timeout(None);
        let connect = client.get_multiplexed_async_connection_with_config(&config);
        let mut connection = connect.await.map_err(failed)?;
        let hello = redis::cmd("HELLO");
        let answer = connection.send_packed_command(&hello);
        let answer = match timeout(self.connect_timeout, answer).await {
            Ok(answer) => answer.and_then(super::checked),
            Err(_) => {
                let why = format!("{host}: no answer within {:?}", self.connect_timeout);
                return Err(op.error(ErrorKind::Unavailable).message(why));
            }
        };
        let hello = match answer {
            Ok(answer) => Hello::of(answer),
            // A proxy that does not pass it on; what it leads to has to be a master.
            Err(error) if error.code() != Some("NOAUTH") && is_withheld(&error) => {
                Hello { version: None, shape: Shape::Single, is_master: true }
            }
            Err(error) => return Err(failed(error)),
        };
        Ok((connection, hello))
    }

    fn vendor(&self, host: &Host, login: &Login, db: u16) -> redis::RedisResult<Vendor> {
        let mut settings =
            RedisConnectionInfo::default().set_db(i64::from(db)).set_skip_set_lib_name();
        if let Some(user) = &login.user {
            settings = settings.set_username(user.expose());
        }
        if let Some(password) = &login.password {
            settings = settings.set_password(password.expose());
        }
        let info = |address: ConnectionAddr| -> redis::RedisResult<ConnectionInfo> {
            Ok(address.into_connection_info()?.set_redis_settings(settings))
        };
        #[cfg(feature = "tls")]
        if let Some(certificates) = &self.tls {
            let address = ConnectionAddr::TcpTls {
                host: host.host.clone(),
                port: host.port,
                insecure: false,
                tls_params: None,
            };
            return Vendor::build_with_tls(info(address)?, certificates.clone());
        }
        Vendor::open(info(ConnectionAddr::Tcp(host.host.clone(), host.port))?)
    }
}

/// Whether one of those that are asked still leads to a master.
async fn any_ok<T, E>(mut asked: impl Stream<Item = Result<T, E>> + Send + Unpin) -> bool {
    while let Some(found) = asked.next().await {
        if found.is_ok() {
            return true;
        }
    }
    false
}

/// Reads the certificates, and sees to it that there is cryptography.
#[cfg(feature = "tls")]
fn tls(op: Op<'_>, config: &Config) -> Result<Option<redis::TlsCertificates>> {
    let Some(tls) = &config.tls else { return Ok(None) };
    let read = |option: &str, path: &std::path::Path| {
        std::fs::read(path).map_err(|error| {
            let why = format!("the file of option {option}, {path:?}, can't be read");
            op.error(ErrorKind::Misconfigured).message(why).with_source(error)
        })
    };
    let client_tls = match &tls.identity {
        None => None,
        Some((cert, key)) => Some(redis::ClientTlsConfig {
            client_cert: read("cert", cert)?,
            client_key: read("key", key)?,
        }),
    };
    let root_cert = tls.ca.as_deref().map(|ca| read("ca", ca)).transpose()?;
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Another thread's is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
    Ok(Some(redis::TlsCertificates { client_tls, root_cert }))
}

impl Hello {
    /// A server answers with names and values in turn.
    fn of(answer: Value) -> Self {
        let pairs = match answer {
            Value::Map(pairs) => pairs,
            Value::Array(items) => {
                let mut items = items.into_iter();
                std::iter::from_fn(|| Some((items.next()?, items.next()?))).collect()
            }
            _ => Vec::new(),
        };
        let value = |name: &str| {
            let found = pairs.iter().find(|(key, _)| text(key) == name);
            found.map(|(_, value)| text(value)).unwrap_or_default()
        };
        let version = Version { server: value("server"), version: value("version") };
        let shape = match value("mode").as_str() {
            "sentinel" => Shape::Sentinel,
            "cluster" => Shape::Cluster,
            _ => Shape::Single,
        };
        let is_master = !matches!(value("role").as_str(), "replica" | "slave");
        Self { version: Some(version).filter(|it| !it.version.is_empty()), shape, is_master }
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::SimpleString(text) => text.clone(),
        Value::Int(number) => number.to_string(),
        _ => String::new(),
    }
}

fn texts(value: Value) -> Vec<String> {
    match value {
        Value::Array(items) => items.iter().map(text).collect(),
        _ => Vec::new(),
    }
}

/// Who serves a slot, by what `CLUSTER SLOTS` answered: ranges, each with its master first. A server
/// that does not know its own address leaves it out.
fn serves(answer: Value, slot: u16, asked: &Host) -> Option<Host> {
    let Value::Array(ranges) = answer else { return None };
    let number = |value: &Value| text(value).parse::<u16>().ok();
    ranges.into_iter().find_map(|range| {
        let Value::Array(range) = range else { return None };
        let [from, to, master, ..] = range.as_slice() else { return None };
        let holds = number(from)? <= slot && slot <= number(to)?;
        let Value::Array(master) = master else { return None };
        let (host, port) = (text(master.first()?), number(master.get(1)?)?);
        let host = if matches!(host.as_str(), "" | "?") { asked.host.clone() } else { host };
        holds.then_some(Host { host, port })
    })
}

impl std::fmt::Display for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.into())
    }

    fn asked() -> Host {
        Host { host: "asked".into(), port: 7000 }
    }

    #[test]
    fn a_server_says_what_it_is() {
        let answer = ["server", "valkey", "version", "9.1.2", "mode", "cluster", "role", "replica"];
        let hello = Hello::of(Value::Array(answer.map(bulk).to_vec()));
        assert_eq!(hello.version.expect("told").version, "9.1.2");
        assert_eq!((hello.shape, hello.is_master), (Shape::Cluster, false));
        let silent = Hello::of(Value::Nil);
        assert!(silent.version.is_none() && silent.is_master);
    }

    #[test]
    fn the_master_of_a_slot_is_found() {
        let server = |host: &str, port| Value::Array(vec![bulk(host), Value::Int(port)]);
        let range = |from, to, servers: [Value; 2]| {
            let mut range = vec![Value::Int(from), Value::Int(to)];
            range.extend(servers);
            Value::Array(range)
        };
        let slots = Value::Array(vec![
            range(0, 100, [server("a", 1), server("b", 2)]),
            range(101, 200, [server("", 3), server("d", 4)]),
        ]);
        let found = |slot| serves(slots.clone(), slot, &asked());
        assert_eq!(found(100), Some(Host { host: "a".into(), port: 1 }));
        assert_eq!(found(101), Some(Host { host: "asked".into(), port: 3 }));
        assert_eq!(found(201), None);
        assert_eq!(serves(Value::Nil, 0, &asked()), None);
    }
}
