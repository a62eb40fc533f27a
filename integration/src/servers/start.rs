//! What is the same for all backends: the order of the sources, and the start of what is found.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rand::Rng as _;
use rand::rngs::StdRng;
use tempfile::TempDir;

use super::node::Node;
use super::{Inner, Login, Origin, Server, find};
use crate::Missing;

/// How often a start is tried with other ports, where another process took one of them first.
const STARTS_MAX: usize = 3;

/// What is fixed for a backend.
#[derive(Debug)]
pub(super) struct Kind {
    pub(super) backend: &'static str,
    /// The variable that names the program.
    pub(super) variable: &'static str,
    /// What it may be called.
    pub(super) programs: &'static [&'static str],
    /// Whether a program was built with TLS.
    pub(super) speaks_tls: fn(&Path) -> bool,
}

/// What a test wants its server to be.
#[derive(Clone, Debug, Default)]
pub(super) struct Wanted {
    pub(super) version: Option<String>,
    pub(super) nodes: usize,
    pub(super) login: Option<Login>,
    pub(super) tls: bool,
    pub(super) control: bool,
    pub(super) environment: Vec<(OsString, OsString)>,
}

/// The PEM files of a server's certificate.
#[derive(Debug)]
pub(super) struct Certificate {
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

impl Wanted {
    pub(super) fn nodes_min_1(&self) -> usize {
        self.nodes.max(1)
    }

    /// Whether any server will do, also one that somebody else started.
    fn is_plain(&self) -> bool {
        self.version.is_none()
            && self.nodes <= 1
            && self.login.is_none()
            && !self.tls
            && !self.control
            && self.environment.is_empty()
    }

    /// The certificate of who signed [`certificate`](Self::certificate).
    pub(super) fn authority(&self, folder: &Path) -> PathBuf {
        folder.join("authority.pem")
    }

    /// The certificate that all nodes in the folder share, made when the first asks.
    pub(super) fn certificate(&self, folder: &Path) -> io::Result<Option<Certificate>> {
        if !self.tls {
            return Ok(None);
        }
        let files =
            Certificate { certificate: folder.join("server.pem"), key: folder.join("server.key") };
        #[cfg(feature = "tls")]
        if !files.key.exists() {
            super::tls::write(&self.authority(folder), &files)?;
        }
        Ok(Some(files))
    }
}

/// Where a server would come from.
#[derive(Debug)]
pub(super) enum Found {
    Given(String),
    Program(PathBuf),
}

/// Finds where a server would come from, in the order that the [module](super) gives.
pub(super) fn found(kind: &Kind, wanted: &Wanted) -> Result<Found, Missing> {
    let url = std::env::var(super::url_variable(kind.backend)).ok();
    if let Some(url) = url.filter(|_| wanted.is_plain()) {
        return Ok(Found::Given(url));
    }
    let program = match &wanted.version {
        Some(version) => find::exact(kind.programs, version),
        None => find::program(kind.variable, kind.programs, |program| {
            !wanted.tls || (kind.speaks_tls)(program)
        }),
    };
    program.map(Found::Program).map_err(|reason| Missing::absent(kind.backend, reason))
}

/// Gets a server in the order that the [module](super) gives. `nodes` prepares the processes in a folder.
pub(super) fn started(
    kind: &Kind,
    wanted: &Wanted,
    nodes: impl Fn(&Path, &TempDir) -> io::Result<Vec<Node>>,
) -> Result<Server, Missing> {
    let backend = kind.backend;
    let program = match found(kind, wanted)? {
        Found::Given(url) => return super::given(backend, &url),
        Found::Program(program) => program,
    };
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..STARTS_MAX {
        match start(kind, wanted, &program, &nodes) {
            Ok(server) => return Ok(server),
            Err(error) if error.to_string().contains("address already in use") => last = error,
            Err(error) => return Err(Missing::broken(backend, error.to_string())),
        }
    }
    Err(Missing::broken(backend, last.to_string()))
}

fn start(
    kind: &Kind,
    wanted: &Wanted,
    program: &Path,
    nodes: impl Fn(&Path, &TempDir) -> io::Result<Vec<Node>>,
) -> io::Result<Server> {
    let folder = tempfile::Builder::new().prefix(&format!("coord-{}-", kind.backend)).tempdir()?;
    let nodes = nodes(program, &folder)?;
    // Servers of a cluster serve only when most of them are there.
    nodes.iter().try_for_each(Node::spawn)?;
    nodes.iter().try_for_each(Node::serve)?;
    let addresses = |sentinel| {
        let nodes = nodes.iter().filter(|node| node.is_sentinel() == sentinel);
        nodes.map(|node| format!("127.0.0.1:{}", node.port())).collect()
    };
    Ok(Server(Arc::new(Inner {
        backend: kind.backend,
        login: wanted.login.clone(),
        addresses: addresses(false),
        sentinels: addresses(true),
        origin: Origin::Program(program.to_owned()),
        authority: wanted.tls.then(|| wanted.authority(folder.path())),
        nodes,
        _folder: Some(folder),
    })))
}

/// A name that no other server has.
pub(super) fn random_name(prefix: &str) -> String {
    let mut rng: StdRng = rand::make_rng();
    format!("{prefix}-{:08x}", rng.next_u32())
}
