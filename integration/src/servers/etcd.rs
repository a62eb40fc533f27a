//! etcd.

use std::ffi::OsString;
use std::io;

use tempfile::TempDir;

use super::node::{Node, Program, Ready, Source, local};
use super::start::{Kind, Wanted, found, random_name, started};
use super::{Login, Server, http};
use crate::{Missing, free_port};

const ETCD: Kind = Kind {
    backend: "etcd",
    variable: "COORD_TEST_ETCD",
    programs: &["etcd"],
    speaks_tls: |_| true,
    greets,
    image: ("COORD_ETCD_IMAGE", "etcd"),
};

/// An etcd server to be started, by default alone, plain and open.
#[derive(Clone, Debug, Default)]
pub struct Etcd {
    wanted: Wanted,
    arguments: Vec<OsString>,
}

/// The ports of one server.
#[derive(Debug)]
struct Ports {
    client: u16,
    peer: u16,
    metrics: u16,
    /// The clients' port, unless that speaks TLS.
    plain: u16,
}

impl Etcd {
    /// A server of whatever version is there.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Exactly this version, from the servers' folder.
    #[must_use]
    pub fn with_version(mut self, version: impl Into<String>) -> Self {
        self.wanted.version = Some(version.into());
        self
    }

    /// A cluster of so many servers.
    #[must_use]
    pub fn with_nodes(mut self, nodes: usize) -> Self {
        self.wanted.nodes = nodes;
        self
    }

    /// With authentication on, and this password for the user `root`, who may do everything.
    #[must_use]
    pub fn with_root_password(mut self, password: impl Into<String>) -> Self {
        self.wanted.login = Some(Login { user: "root".to_owned(), password: password.into() });
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

    /// With one more argument, `--auth-token-ttl=2` say.
    #[must_use]
    pub fn with_argument(mut self, argument: impl Into<OsString>) -> Self {
        self.arguments.push(argument.into());
        self.wanted.control = true;
        self
    }

    /// Looks whether there is such a server, without starting it, for [`trial`](crate::trial).
    ///
    /// # Errors
    /// There is none on this machine.
    pub fn find(self) -> Result<Self, Missing> {
        found(&ETCD, &self.wanted).map(|_| self)
    }

    /// Gets the server. Blocks the thread until it serves.
    ///
    /// # Errors
    /// There is none on this machine, or it does not work.
    pub fn start(&self) -> Result<Server, Missing> {
        let server = started(&ETCD, &self.wanted, |source, folder| self.nodes(source, folder))?;
        let (login, node) = (&self.wanted.login, server.nodes().first());
        if let (Some(Login { password, .. }), Some(node)) = (login, node) {
            let broken = |error: io::Error| Missing::broken(ETCD.backend, error.to_string());
            enable_login(node.plain_port(), password).map_err(broken)?;
        }
        Ok(server)
    }

    fn nodes(&self, source: &Source, folder: &TempDir) -> io::Result<Vec<Node>> {
        let cluster = random_name("etcd");
        let ports = |_| {
            let client = free_port()?;
            let plain = if self.wanted.tls { free_port()? } else { client };
            Ok(Ports { client, peer: free_port()?, metrics: free_port()?, plain })
        };
        let ports: Vec<_> = (0..self.wanted.nodes_min_1()).map(ports).collect::<io::Result<_>>()?;
        let members: Vec<_> = ports
            .iter()
            .enumerate()
            .map(|(index, ports)| format!("{cluster}-{index}=http://127.0.0.1:{}", ports.peer))
            .collect();
        let node = |(index, ports): (usize, &Ports)| {
            let name = format!("{cluster}-{index}");
            let mut arguments = self.arguments(&name, ports, folder)?;
            arguments.push(format!("--initial-cluster-token={cluster}").into());
            arguments.push(format!("--initial-cluster={}", members.join(",")).into());
            Ok(Node::new(Program {
                log: folder.path().join(format!("{name}.log")),
                name,
                source: source.clone(),
                arguments,
                environment: self.wanted.environment.clone(),
                folder: folder.path().to_owned(),
                port: ports.client,
                plain_port: ports.plain,
                ready: Ready::Http { port: ports.metrics, path: "/health", answer: "\"true\"" },
                sentinel: false,
            }))
        };
        ports.iter().enumerate().map(node).collect()
    }

    fn arguments(&self, name: &str, ports: &Ports, folder: &TempDir) -> io::Result<Vec<OsString>> {
        let Ports { client, peer, metrics, plain } = ports;
        let certificate = self.wanted.certificate(folder.path())?;
        let (advertised, listened) = match certificate {
            None => (format!("http://127.0.0.1:{client}"), String::new()),
            Some(_) => {
                (format!("https://127.0.0.1:{client}"), format!(",http://127.0.0.1:{plain}"))
            }
        };
        let mut arguments: Vec<OsString> = vec![
            format!("--name={name}").into(),
            "--data-dir".into(),
            folder.path().join(name).into(),
            format!("--advertise-client-urls={advertised}").into(),
            format!("--listen-peer-urls=http://127.0.0.1:{peer}").into(),
            format!("--initial-advertise-peer-urls=http://127.0.0.1:{peer}").into(),
            format!("--listen-metrics-urls=http://127.0.0.1:{metrics}").into(),
            format!("--listen-client-urls={advertised}{listened}").into(),
        ];
        if let Some(files) = certificate {
            arguments.extend(["--cert-file".into(), files.certificate.into()]);
            arguments.extend(["--key-file".into(), files.key.into()]);
        }
        arguments.extend(self.arguments.iter().cloned());
        Ok(arguments)
    }
}

fn greets(address: &str) -> io::Result<bool> {
    http::get(address, "/version")
        .map(|(status, body)| status == 200 && body.contains("etcdserver"))
}

/// What `etcdctl auth enable` does, over the server's own JSON gateway.
fn enable_login(port: u16, password: &str) -> io::Result<()> {
    let steps = [
        ("role/add", r#"{"name":"root"}"#.to_owned()),
        ("user/add", format!(r#"{{"name":"root","password":{password:?}}}"#)),
        ("user/grant", r#"{"user":"root","role":"root"}"#.to_owned()),
        ("enable", "{}".to_owned()),
    ];
    for (step, json) in steps {
        let (status, body) = http::post(&local(port), &format!("/v3/auth/{step}"), &json)?;
        if status != 200 {
            return Err(io::Error::other(format!("auth/{step}: {status} {body}")));
        }
    }
    Ok(())
}
