//! What is the same for all backends: the order of the sources, and the start of what is found.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rand::Rng as _;
use rand::rngs::StdRng;
use tempfile::TempDir;

use super::node::{Node, Source};
use super::{Inner, Login, Server, container, find};
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
    /// Whether it is such a server that answers at an address.
    pub(super) greets: fn(&str) -> io::Result<bool>,
    /// The variable that names the image, and the program in it.
    pub(super) image: (&'static str, &'static str),
}

/// The images that are used by default: those that `docker-compose.yml` pins.
const COMPOSE: &str = include_str!("../../../docker-compose.yml");

/// What a test wants its server to be.
#[derive(Clone, Debug, Default)]
pub(super) struct Wanted {
    pub(super) version: Option<String>,
    pub(super) nodes: usize,
    pub(super) login: Option<Login>,
    pub(super) tls: bool,
    pub(super) control: bool,
    /// A server whose URL was given will do, whatever it is like.
    pub(super) given: bool,
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
    Start(Source),
}

/// The sources that `COORD_TEST_SERVERS` allows: all of them unless it names one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowed {
    pub(super) url: bool,
    pub(super) programs: bool,
    containers: bool,
}

impl Allowed {
    pub(super) const VARIABLE: &str = "COORD_TEST_SERVERS";

    pub(super) fn read(text: Option<&str>) -> Result<Self, String> {
        let none = Self { url: false, programs: false, containers: false };
        match text {
            None | Some("") => Ok(Self { url: true, programs: true, containers: true }),
            Some("url") => Ok(Self { url: true, ..none }),
            Some("programs") => Ok(Self { programs: true, ..none }),
            Some("containers") => Ok(Self { containers: true, ..none }),
            Some(odd) => {
                Err(format!("{}={odd:?}: it is url, programs or containers", Self::VARIABLE))
            }
        }
    }
}

/// Finds where a server would come from, in the order that the [module](super) gives.
pub(super) fn found(kind: &Kind, wanted: &Wanted) -> Result<Found, Missing> {
    let allowed = std::env::var(Allowed::VARIABLE).ok();
    let allowed = Allowed::read(allowed.as_deref())
        .map_err(|reason| Missing::broken(kind.backend, reason))?;
    let mut reasons = Vec::new();
    if allowed.url {
        let variable = super::url_variable(kind.backend);
        match std::env::var(&variable) {
            Ok(url) if wanted.given || wanted.is_plain() => return Ok(Found::Given(url)),
            Ok(_) => reasons.push(format!("what {variable} names is not what is wanted here")),
            Err(_) => reasons.push(format!("{variable} is not set")),
        }
    }
    if allowed.programs {
        let program = match &wanted.version {
            Some(version) => find::exact(kind.programs, version),
            None => find::program(kind.variable, kind.programs, |program| {
                !wanted.tls || (kind.speaks_tls)(program)
            }),
        };
        match program {
            Ok(program) => return Ok(Found::Start(Source::Program(program))),
            Err(reason) => reasons.push(reason),
        }
    }
    if allowed.containers {
        match image(kind, wanted) {
            Ok(source) => return Ok(Found::Start(source)),
            Err(reason) => reasons.push(reason),
        }
    }
    Err(Missing::absent(kind.backend, reasons.join("; ")))
}

/// The image that the variable names, else the one that the compose file pins.
fn image(kind: &Kind, wanted: &Wanted) -> Result<Source, String> {
    if let Some(version) = &wanted.version {
        return Err(format!(
            "no container: {version} is wanted, and images are not chosen by that"
        ));
    }
    if !wanted.environment.is_empty() {
        return Err("no container: the clock of one can't be moved".to_owned());
    }
    let (variable, program) = kind.image;
    let image = std::env::var(variable).ok().or_else(|| pinned(variable));
    let image = image.ok_or_else(|| format!("no container: {variable} is not set"))?;
    container::find(&image)?;
    Ok(Source::Image(image, program))
}

fn pinned(variable: &str) -> Option<String> {
    let (_, after) = COMPOSE.split_once(&format!("\"${{{variable}:-"))?;
    after.split_once('}').map(|(image, _)| image.to_owned())
}

/// Gets a server in the order that the [module](super) gives. `nodes` prepares the processes in a folder.
pub(super) fn started(
    kind: &Kind,
    wanted: &Wanted,
    nodes: impl Fn(&Source, &TempDir) -> io::Result<Vec<Node>>,
) -> Result<Server, Missing> {
    let backend = kind.backend;
    let source = match found(kind, wanted).inspect_err(Missing::tell)? {
        Found::Given(url) => return super::given(kind, &url),
        Found::Start(source) => source,
    };
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..STARTS_MAX {
        match start(kind, wanted, &source, &nodes) {
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
    source: &Source,
    nodes: impl Fn(&Source, &TempDir) -> io::Result<Vec<Node>>,
) -> io::Result<Server> {
    let folder = tempfile::Builder::new().prefix(&format!("coord-{}-", kind.backend)).tempdir()?;
    let nodes = nodes(source, &folder)?;
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
        origin: source.clone().into(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_source_can_be_forced_and_an_unknown_one_is_refused() {
        for (text, url, programs, containers) in [
            (None, true, true, true),
            (Some("url"), true, false, false),
            (Some("programs"), false, true, false),
            (Some("containers"), false, false, true),
        ] {
            let allowed = Allowed::read(text).expect("known");
            let Allowed { url: u, programs: p, containers: c } = allowed;
            assert_eq!((u, p, c), (url, programs, containers), "{text:?}");
        }
        let reason = Allowed::read(Some("docker")).expect_err("unknown");
        assert!(reason.contains("docker") && reason.contains("containers"), "{reason}");
    }

    #[test]
    fn the_compose_file_pins_an_image_for_each_backend() {
        for variable in ["COORD_NATS_IMAGE", "COORD_ETCD_IMAGE", "COORD_REDIS_IMAGE"] {
            let image = pinned(variable).expect(variable);
            assert!(image.contains(':') && !image.contains(['{', '"', ' ']), "{image}");
        }
        assert_eq!(pinned("COORD_NO_IMAGE"), None);
    }
}
