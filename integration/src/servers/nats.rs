//! NATS with JetStream.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::node::{Node, Program, Ready, Source};
use super::start::{Kind, Wanted, found, random_name, started};
use super::{Login, Server, http};
use crate::{Missing, free_port};

const NATS: Kind = Kind {
    backend: "nats",
    variable: "COORD_TEST_NATS_SERVER",
    programs: &["nats-server"],
    speaks_tls: |_| true,
    greets,
    image: ("COORD_NATS_IMAGE", "nats-server"),
};

/// It is the server that speaks first.
fn greets(address: &str) -> io::Result<bool> {
    let mut first = [0; 5];
    http::connect(address)?.read_exact(&mut first)?;
    Ok(&first == b"INFO ")
}

/// A NATS server to be started, by default alone, plain and open.
#[derive(Clone, Debug, Default)]
pub struct Nats {
    wanted: Wanted,
    config: String,
}

impl Nats {
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

    /// Only for this user with this password.
    #[must_use]
    pub fn with_login(mut self, user: impl Into<String>, password: impl Into<String>) -> Self {
        self.wanted.login = Some(Login { user: user.into(), password: password.into() });
        self
    }

    /// Only over TLS, with a certificate for 127.0.0.1 and localhost by an
    /// [authority](Server::authority) of its own.
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

    /// With these lines more in its configuration file.
    #[must_use]
    pub fn with_config(mut self, lines: &str) -> Self {
        self.config = lines.to_owned();
        self.wanted.control = true;
        self
    }

    /// Looks whether there is such a server, without starting it, for [`trial`](crate::trial).
    ///
    /// # Errors
    /// There is none on this machine.
    pub fn find(self) -> Result<Self, Missing> {
        found(&NATS, &self.wanted).map(|_| self)
    }

    /// Gets the server. Blocks the thread until it serves.
    ///
    /// # Errors
    /// There is none on this machine, or it does not work.
    pub fn start(&self) -> Result<Server, Missing> {
        started(&NATS, &self.wanted, |source, folder| self.nodes(source, folder))
    }

    fn nodes(&self, source: &Source, folder: &TempDir) -> io::Result<Vec<Node>> {
        let count = self.wanted.nodes_min_1();
        let cluster = random_name("nats");
        let ports = |_| Ok((free_port()?, free_port()?, free_port()?));
        let ports = (0..count).map(ports).collect::<io::Result<Vec<_>>>()?;
        let routes: Vec<_> =
            ports.iter().map(|(_, _, route)| format!("\"nats://127.0.0.1:{route}\"")).collect();
        let node = |(index, (port, http, route)): (usize, &(u16, u16, u16))| {
            let name = format!("{cluster}-{index}");
            let mut text = format!(
                "server_name: {name:?}\nlisten: \"127.0.0.1:{port}\"\nhttp: \"127.0.0.1:{http}\"\n\
                 jetstream {{ store_dir: {:?} }}\n",
                folder.path().join(&name)
            );
            if count > 1 {
                // Clients that learn of the others' addresses would go round the proxies.
                let _ = writeln!(
                    text,
                    "cluster {{ name: {cluster:?}, listen: \"127.0.0.1:{route}\", \
                     no_advertise: true, routes: [{}] }}",
                    routes.join(", ")
                );
            }
            self.secure(&mut text, folder.path())?;
            text.push_str(&self.config);
            let file = folder.path().join(format!("{name}.conf"));
            fs::write(&file, text)?;
            Ok(Node::new(self.program(name, source.clone(), file, folder, *port, *http)))
        };
        ports.iter().enumerate().map(node).collect()
    }

    fn secure(&self, text: &mut String, folder: &Path) -> io::Result<()> {
        if let Some(Login { user, password }) = &self.wanted.login {
            let _ = writeln!(text, "authorization {{ user: {user:?}, password: {password:?} }}");
        }
        if let Some(files) = self.wanted.certificate(folder)? {
            let _ = writeln!(
                text,
                "tls {{ cert_file: {:?}, key_file: {:?} }}",
                files.certificate, files.key
            );
        }
        Ok(())
    }

    fn program(
        &self,
        name: String,
        source: Source,
        config: PathBuf,
        folder: &TempDir,
        port: u16,
        http: u16,
    ) -> Program {
        Program {
            log: folder.path().join(format!("{name}.log")),
            name,
            source,
            arguments: vec!["-c".into(), config.into()],
            environment: self.wanted.environment.clone(),
            folder: folder.path().to_owned(),
            port,
            plain_port: port,
            ready: Ready::Http { port: http, path: "/healthz", answer: "\"ok\"" },
            sentinel: false,
        }
    }
}
