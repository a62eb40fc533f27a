//! How a test gets a server: a URL given, else a program started on free ports with a folder of its own,
//! else (with the feature `containers`) such a program in a container.
//!
//! | backend | URL | program | image |
//! | --- | --- | --- | --- |
//! | nats | `COORD_TEST_NATS_URL` | `COORD_TEST_NATS_SERVER`, `nats-server` | `COORD_NATS_IMAGE` |
//! | etcd | `COORD_TEST_ETCD_URL` | `COORD_TEST_ETCD`, `etcd` | `COORD_ETCD_IMAGE` |
//! | redis | `COORD_TEST_REDIS_URL` | `COORD_TEST_REDIS_SERVER`, `valkey-server`, `redis-server` | `COORD_REDIS_IMAGE` |
//!
//! Programs are looked for on the PATH, then in the folder `COORD_SERVERS_DIR` (by default
//! `target/servers`, which `.ci/servers` fills), where each one's name ends with its version:
//! `nats-server-2.11.7`. That folder is also the [matrix](versions) of versions. Images are by default
//! those that `docker-compose.yml` pins. `COORD_TEST_SERVERS` set to `url`, `programs` or `containers`
//! allows only that source.
//!
//! A Kubernetes API server comes from the kubeconfig `COORD_TEST_KUBECONFIG`, else it is the program
//! `COORD_TEST_KUBE_APISERVER`, or envtest's `kube-apiserver` in the folder `KUBEBUILDER_ASSETS`, with an
//! etcd of its own.
//!
//! A URL that was given serves the tests for which any server will do.
//!
//! A [`Server`] stops when the last clone of it goes, also in a panic; a guardian process stops it if the
//! test process is killed or leaves by `exit`; its containers are removed when the next one starts. Its log is printed if it goes in a panic.

#[cfg_attr(not(feature = "containers"), path = "servers/no_container.rs")]
mod container;
mod etcd;
mod find;
mod http;
#[cfg(feature = "tls")]
mod https;
#[cfg(feature = "tls")]
mod kube;
mod leader;
mod nats;
mod node;
mod process;
mod redis;
mod resp;
mod start;
#[cfg(feature = "tls")]
mod tls;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;

use self::node::Source;
use self::start::Kind;
use crate::Missing;

pub use etcd::Etcd;
pub(crate) use find::folder;
pub use find::{version, versions};
#[cfg(feature = "tls")]
pub(crate) use https::trusting;
#[cfg(feature = "tls")]
pub use kube::{ApiServer, Kube};
pub use nats::Nats;
pub use node::Node;
pub use process::Process;
pub use redis::Redis;

/// Where a server came from.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It runs already; its URL was given.
    Url,
    /// This program was started.
    Program(PathBuf),
    /// A container of this image was started.
    Container(String),
}

impl From<Source> for Origin {
    fn from(source: Source) -> Self {
        match source {
            Source::Program(program) => Self::Program(program),
            Source::Image(image, _) => Self::Container(image),
        }
    }
}

/// A server that runs, or several that form one cluster. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Server(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    backend: &'static str,
    login: Option<Login>,
    addresses: Vec<String>,
    sentinels: Vec<String>,
    origin: Origin,
    authority: Option<PathBuf>,
    // In this order: first the processes end, then their folder goes.
    nodes: Vec<Node>,
    _folder: Option<TempDir>,
}

/// A user and a password.
#[derive(Clone, Debug)]
struct Login {
    user: String,
    password: String,
}

impl Server {
    /// `nats`, `etcd`, `redis`.
    #[must_use]
    pub fn backend(&self) -> &'static str {
        self.0.backend
    }

    /// Where it came from.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        &self.0.origin
    }

    /// What to hand to `coord::connect`, with user and password: `nats://u:p@127.0.0.1:20123`.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_at(&self.0.addresses)
    }

    /// The same with other addresses, those of proxies, say, in place of the servers'.
    #[must_use]
    pub fn url_via(&self, addresses: &[SocketAddr]) -> String {
        self.url_at(&addresses.iter().map(ToString::to_string).collect::<Vec<_>>())
    }

    fn url_at(&self, addresses: &[String]) -> String {
        let login = self.0.login.as_ref();
        let login = login.map(|login| format!("{}:{}@", login.user, login.password));
        let login = login.unwrap_or_default();
        format!("{}://{login}{}", self.0.backend, addresses.join(","))
    }

    /// `host:port` of each server for clients; not of [sentinels](Self::sentinels).
    #[must_use]
    pub fn addresses(&self) -> &[String] {
        &self.0.addresses
    }

    /// `host:port` of each of Redis's sentinels.
    #[must_use]
    pub fn sentinels(&self) -> &[String] {
        &self.0.sentinels
    }

    /// The PEM file of the authority that signed the servers' certificates, if they speak TLS.
    #[must_use]
    pub fn authority(&self) -> Option<&Path> {
        self.0.authority.as_deref()
    }

    /// The processes, to pause, kill and restart. Empty if the server was not started here.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.0.nodes
    }

    /// Kills all processes, and then starts them on the same data. Blocks the thread until they serve.
    ///
    /// # Errors
    /// One does not come to serve: with the end of its log.
    pub fn restart(&self) -> io::Result<()> {
        self.nodes().iter().try_for_each(Node::kill)?;
        self.nodes().iter().try_for_each(Node::spawn)?;
        self.nodes().iter().try_for_each(Node::serve)
    }

    /// The last lines of each process's log.
    #[must_use]
    pub fn log_tail(&self) -> String {
        self.0.nodes.iter().map(Node::log_tail).collect()
    }
}

impl Drop for Inner {
    #[expect(clippy::print_stderr, reason = "a test that fails shows what its server said")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            for node in &self.nodes {
                eprintln!("{}", node.log_tail());
            }
        }
    }
}

fn url_variable(backend: &str) -> String {
    format!("COORD_TEST_{}_URL", backend.to_uppercase())
}

/// The server whose URL was given.
fn given(kind: &Kind, url: &str) -> Result<Server, Missing> {
    let backend = kind.backend;
    let variable = url_variable(backend);
    let prefix = format!("{backend}://");
    let Some(rest) = url.strip_prefix(&prefix) else {
        return Err(Missing::broken(backend, format!("{variable} has to begin with {prefix}")));
    };
    let (login, hosts) = match rest.rsplit_once('@') {
        None => (None, rest),
        Some((login, hosts)) => {
            let (user, password) = login.split_once(':').unwrap_or((login, ""));
            (Some(Login { user: user.to_owned(), password: password.to_owned() }), hosts)
        }
    };
    let addresses: Vec<String> =
        hosts.trim_end_matches('/').split(',').map(str::to_owned).collect();
    for address in &addresses {
        let reason = match (kind.greets)(address) {
            Ok(true) => continue,
            Ok(false) => format!("what answers at {address}, from {variable}, is another server"),
            Err(error) => format!("nothing answers at {address}, from {variable}: {error}"),
        };
        return Err(Missing::broken(backend, reason));
    }
    Ok(Server(Arc::new(Inner {
        backend,
        login,
        addresses,
        sentinels: Vec::new(),
        origin: Origin::Url,
        authority: None,
        nodes: Vec::new(),
        _folder: None,
    })))
}
