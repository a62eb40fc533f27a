//! Redis, or Valkey.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Command, Stdio};

use rand::Rng as _;
use rand::rngs::StdRng;
use tempfile::TempDir;

use super::node::{Ask, Node, Program, Ready, Source};
use super::start::{Kind, Wanted, found, random_name, started};
use super::{Login, Server};
use crate::faults::Clock;
use crate::{Missing, free_port};

const REDIS: Kind = Kind {
    backend: "redis",
    variable: "COORD_TEST_REDIS_SERVER",
    programs: &["valkey-server", "redis-server"],
    speaks_tls,
    greets,
    image: ("COORD_REDIS_IMAGE", "redis-server"),
};

/// The name under which sentinels watch the primary.
const WATCHED: &str = "coord";
/// After how many milliseconds a server that does not answer is taken for dead.
const DEAD_AFTER_MS: u32 = 2_000;
const SLOTS: usize = 16_384;
/// How far above its clients' port the servers of a cluster talk to each other; before Redis 7 it is
/// always so.
const BUS: u16 = 10_000;
const TRIES_MAX: usize = 100;

/// A Redis (or Valkey) server to be started, by default alone, plain and open. What it answered is on its
/// disk (`appendfsync always`), unless [`with_config`](Self::with_config) says otherwise.
#[derive(Clone, Debug, Default)]
pub struct Redis {
    wanted: Wanted,
    shape: Shape,
    config: String,
}

#[derive(Clone, Copy, Debug, Default)]
enum Shape {
    #[default]
    Single,
    /// One primary with replicas, watched by sentinels.
    Sentinel { replicas: usize },
    /// Hash slots spread over primaries, each with so many replicas.
    Cluster { primaries: usize, replicas: usize },
}

/// One server to be.
#[derive(Debug)]
struct Place {
    name: String,
    port: u16,
    /// The clients' port, unless that speaks TLS.
    plain: u16,
    /// What it goes by in a cluster.
    id: String,
    sentinel: bool,
}

impl Redis {
    /// A server of whatever version is there.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Exactly this version, of Valkey or of Redis, from the servers' folder.
    #[must_use]
    pub fn with_version(mut self, version: impl Into<String>) -> Self {
        self.wanted.version = Some(version.into());
        self
    }

    /// A primary with so many replicas, and so many sentinels that watch it under the name `coord`. The
    /// first of the [nodes](Server::nodes) begins as the primary, then come the replicas, and then the
    /// [sentinels](Server::sentinels), which want no password themselves. (Redis 7.0 can't read again
    /// what its sentinels write down of a password with blanks or quotes.)
    #[must_use]
    pub fn with_sentinels(mut self, replicas: usize, sentinels: usize) -> Self {
        self.shape = Shape::Sentinel { replicas };
        self.wanted.nodes = 1 + replicas + sentinels;
        self
    }

    /// A cluster (`cluster-enabled`) of so many primaries with so many replicas each. The primaries are
    /// the first of the [nodes](Server::nodes).
    #[must_use]
    pub fn with_cluster(mut self, primaries: usize, replicas: usize) -> Self {
        self.shape = Shape::Cluster { primaries, replicas };
        self.wanted.nodes = primaries * (1 + replicas);
        self.wanted.control = true;
        self
    }

    /// Only for this user with this password. The user may do everything; `default` is Redis's own.
    #[must_use]
    pub fn with_login(mut self, user: impl Into<String>, password: impl Into<String>) -> Self {
        self.wanted.login = Some(Login { user: user.into(), password: password.into() });
        self
    }

    /// Only over TLS, with a certificate for 127.0.0.1 and localhost by an
    /// [authority](Server::authority) of its own. (A plain port is left open besides, for the harness.)
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn with_tls(mut self) -> Self {
        self.wanted.tls = true;
        self
    }

    /// A server whose URL was given will do all the same, whatever it is like.
    #[must_use]
    pub fn or_given(mut self) -> Self {
        self.wanted.given = true;
        self
    }

    /// One that is started here, so that it can be paused, killed and restarted.
    #[must_use]
    pub fn with_control(mut self) -> Self {
        self.wanted.control = true;
        self
    }

    /// With these lines more in its configuration file; not in those of sentinels.
    #[must_use]
    pub fn with_config(mut self, lines: &str) -> Self {
        self.config = lines.to_owned();
        self.wanted.control = true;
        self
    }

    /// With a clock that can be moved. Debian's Redis can't run under it, the Valkey that `.ci/servers`
    /// brings can.
    #[must_use]
    pub fn with_clock(mut self, clock: &Clock) -> Self {
        self.wanted.environment = clock.variables().to_vec();
        self
    }

    /// Looks whether there is such a server, without starting it, for [`trial`](crate::trial).
    ///
    /// # Errors
    /// There is none on this machine.
    pub fn find(self) -> Result<Self, Missing> {
        found(&REDIS, &self.wanted).map(|_| self)
    }

    /// Gets the server. Blocks the thread until it serves: its replicas are connected, its sentinels
    /// know of each other and of the replicas, or its cluster covers all slots.
    ///
    /// # Errors
    /// There is none on this machine, or it does not work.
    pub fn start(&self) -> Result<Server, Missing> {
        started(&REDIS, &self.wanted, |source, folder| self.nodes(source, folder))
    }

    fn nodes(&self, source: &Source, folder: &TempDir) -> io::Result<Vec<Node>> {
        let places = self.places()?;
        let node = |place: &Place| {
            let data = folder.path().join(&place.name);
            fs::create_dir(&data)?;
            let mut text = self.common(place, &data, folder.path())?;
            if place.sentinel {
                self.watch(&mut text, &places);
            } else {
                self.serve(&mut text, place, &places);
            }
            if let Shape::Cluster { primaries, .. } = self.shape {
                fs::write(data.join("nodes.conf"), cluster(place, &places, primaries))?;
            }
            // Servers write into it what they learn, and read that again when they are restarted.
            let file = folder.path().join(format!("{}.conf", place.name));
            fs::write(&file, text)?;
            let mut arguments = vec![file.into()];
            if place.sentinel {
                arguments.push("--sentinel".into());
            }
            Ok(Node::new(Program {
                log: folder.path().join(format!("{}.log", place.name)),
                name: place.name.clone(),
                source: source.clone(),
                arguments,
                environment: self.wanted.environment.clone(),
                folder: folder.path().to_owned(),
                port: place.port,
                plain_port: place.plain,
                ready: self.ready(place),
                sentinel: place.sentinel,
            }))
        };
        places.iter().map(node).collect()
    }

    fn places(&self) -> io::Result<Vec<Place>> {
        let group = random_name("redis");
        let data = match self.shape {
            Shape::Single => 1,
            Shape::Sentinel { replicas, .. } => 1 + replicas,
            Shape::Cluster { primaries, replicas } => primaries * (1 + replicas),
        };
        let place = |index| {
            let port = match self.shape {
                Shape::Cluster { .. } => port_with_bus()?,
                _ => free_port()?,
            };
            Ok(Place {
                name: format!("{group}-{index}"),
                port,
                plain: if self.wanted.tls { free_port()? } else { port },
                id: random_id(),
                sentinel: index >= data,
            })
        };
        (0..self.wanted.nodes_min_1()).map(place).collect()
    }

    /// What servers and sentinels have in common.
    fn common(&self, place: &Place, data: &Path, folder: &Path) -> io::Result<String> {
        let mut text =
            format!("bind 127.0.0.1\nprotected-mode no\nport {}\ndir {:?}\n", place.plain, data);
        if let Some(files) = self.wanted.certificate(folder)? {
            let _ = writeln!(
                text,
                "tls-port {}\ntls-cert-file {:?}\ntls-key-file {:?}\ntls-ca-cert-file {:?}\n\
                 tls-auth-clients no\ntls-replication yes",
                place.port,
                files.certificate,
                files.key,
                self.wanted.authority(folder),
            );
        }
        Ok(text)
    }

    /// The configuration of a server that keeps data.
    fn serve(&self, text: &mut String, place: &Place, places: &[Place]) {
        text.push_str("save \"\"\nappendonly yes\nappendfsync always\n");
        if let Some(Login { user, password }) = &self.wanted.login {
            let _ = match user.as_str() {
                "default" => writeln!(text, "requirepass {password:?}"),
                _ => writeln!(
                    text,
                    "user default off\nuser {user} on {:?} ~* &* +@all\nmasteruser {user:?}",
                    format!(">{password}")
                ),
            };
            let _ = writeln!(text, "masterauth {password:?}");
        }
        match self.shape {
            Shape::Single => {}
            Shape::Sentinel { .. } => {
                let _ = writeln!(
                    text,
                    "replica-announce-ip 127.0.0.1\nreplica-announce-port {}\n\
                     repl-diskless-sync-delay 0",
                    place.port
                );
                if place.name != places[0].name {
                    let _ = writeln!(text, "replicaof 127.0.0.1 {}", places[0].port);
                }
            }
            Shape::Cluster { .. } => {
                let _ = writeln!(
                    text,
                    "cluster-enabled yes\ncluster-node-timeout {DEAD_AFTER_MS}\n\
                     repl-diskless-sync-delay 0"
                );
                if self.wanted.tls {
                    text.push_str("tls-cluster yes\n");
                }
            }
        }
        text.push_str(&self.config);
    }

    /// The configuration of a sentinel.
    fn watch(&self, text: &mut String, places: &[Place]) {
        let sentinels = places.iter().filter(|place| place.sentinel).count();
        let _ = writeln!(
            text,
            "sentinel monitor {WATCHED} 127.0.0.1 {} {}\n\
             sentinel down-after-milliseconds {WATCHED} {DEAD_AFTER_MS}\n\
             sentinel failover-timeout {WATCHED} {}",
            places[0].port,
            sentinels / 2 + 1,
            5 * DEAD_AFTER_MS
        );
        if let Some(Login { user, password }) = &self.wanted.login {
            if user != "default" {
                let _ = writeln!(text, "sentinel auth-user {WATCHED} {user}");
            }
            let _ = writeln!(text, "sentinel auth-pass {WATCHED} {password:?}");
        }
    }

    /// What has to be answered to what, by a server that serves.
    fn ready(&self, place: &Place) -> Ready {
        let ask = |command, text: &str| Ask { command, text: text.to_owned(), said: true };
        let mut asks = vec![ask(&["PING"], "PONG")];
        if let Shape::Cluster { .. } = self.shape {
            asks.push(ask(&["CLUSTER", "INFO"], "cluster_state:ok"));
        }
        match self.shape {
            Shape::Sentinel { replicas, .. } if place.sentinel => {
                asks.push(ask(&["SENTINEL", "CKQUORUM", WATCHED], "OK"));
                let known = format!("num-slaves\n{replicas}\n");
                asks.push(ask(&["SENTINEL", "MASTER", WATCHED], &known));
            }
            // A primary has no link to a primary, so none that is down.
            _ => {
                let link = ask(&["INFO", "replication"], "master_link_status:down");
                asks.push(Ask { said: false, ..link });
            }
        }
        let login = self.wanted.login.clone().filter(|_| !place.sentinel);
        Ready::Redis { login, asks }
    }
}

/// What a server of a cluster knows about it when it starts: everything, so that nobody has to
/// introduce them to each other.
fn cluster(me: &Place, places: &[Place], primaries: usize) -> String {
    let mut text = String::new();
    for (index, place) in places.iter().enumerate() {
        let primary = index % primaries;
        let me = if place.id == me.id { "myself," } else { "" };
        let role = match index < primaries {
            true => "master -".to_owned(),
            false => format!("slave {}", places[primary].id),
        };
        let Place { id, port, .. } = place;
        let (bus, epoch) = (port + BUS, primary + 1);
        let _ = write!(text, "{id} 127.0.0.1:{port}@{bus} {me}{role} 0 0 {epoch} connected");
        if index < primaries {
            let (from, to) = (SLOTS * index / primaries, SLOTS * (index + 1) / primaries - 1);
            let _ = write!(text, " {from}-{to}");
        }
        text.push('\n');
    }
    let _ = writeln!(text, "vars currentEpoch {primaries} lastVoteEpoch 0");
    text
}

/// A free port whose place for the bus is free too.
fn port_with_bus() -> io::Result<u16> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..TRIES_MAX {
        let port = free_port()?;
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port + BUS)) {
            Ok(_) => return Ok(port),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// It says that it wants a password, or that it needs none.
fn greets(address: &str) -> io::Result<bool> {
    match super::resp::ask(address, None, &["PING"]) {
        Ok(answer) => Ok(answer == "PONG\n"),
        Err(error) if error.kind() == io::ErrorKind::Other => Ok(true),
        Err(error) => Err(error),
    }
}

fn random_id() -> String {
    let mut rng: StdRng = rand::make_rng();
    (0..5).map(|_| format!("{:08x}", rng.next_u32())).collect()
}

/// Without a certificate neither kind of program starts; they say why.
fn speaks_tls(program: &Path) -> bool {
    let mut command = Command::new(program);
    command.args(["--port", "0", "--tls-port", "1", "--save", ""]).stdin(Stdio::null());
    command.output().is_ok_and(|output| {
        String::from_utf8_lossy(&output.stdout).contains("tls-cert-file")
            || String::from_utf8_lossy(&output.stderr).contains("tls-cert-file")
    })
}
