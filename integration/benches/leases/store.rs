//! What the leases are kept in while they are measured.

use std::path::Path;

use coord_integration::Missing;
use coord_integration::servers::{ApiServer, Etcd, Kube, Nats, Redis, Server};

/// All that there are.
pub(crate) const BACKENDS: &[&str] = &["etcd", "nats", "redis", "kube"];

/// Thousands of requests at once take longer than a single one may; the raw clients wait as long.
const PATIENT: &str = "request_timeout=30s";

#[derive(Clone, Debug)]
pub(crate) enum Store {
    Server(&'static str, Server),
    Kube(ApiServer),
}

impl Store {
    pub(crate) fn start(backend: &str, nodes: usize) -> Result<Self, Missing> {
        Ok(match backend {
            "etcd" => Self::Server("etcd", Etcd::new().with_nodes(nodes).start()?),
            "nats" => Self::Server("nats", Nats::new().with_nodes(nodes).start()?),
            "redis" => Self::Server("redis", Redis::new().start()?),
            "kube" => Self::Kube(Kube::new().start()?),
            other => panic!("unknown backend {other:?}; known are {BACKENDS:?}"),
        })
    }

    pub(crate) fn backend(&self) -> &'static str {
        match self {
            Self::Server(backend, _) => backend,
            Self::Kube(_) => "kube",
        }
    }

    /// Where it came from.
    pub(crate) fn origin(&self) -> String {
        match self {
            Self::Server(_, server) => format!("{:?}", server.origin()),
            Self::Kube(server) if server.is_own() => "an API server started here".to_owned(),
            Self::Kube(_) => "a kubeconfig".to_owned(),
        }
    }

    /// coord's URL of it, for the cluster `bench`.
    pub(crate) fn coord_url(&self) -> String {
        match self {
            Self::Server("redis", server) => format!("{}/bench?{PATIENT}", server.url()),
            Self::Server(_, server) => format!("{}/bench", server.url()),
            Self::Kube(server) => {
                format!("kube:///bench?{PATIENT}&kubeconfig={}", server.kubeconfig().display())
            }
        }
    }

    /// The variable, and its value, by which another process gets the same one.
    pub(crate) fn variable(&self) -> (String, String) {
        match self {
            Self::Server(backend, server) => {
                (format!("COORD_TEST_{}_URL", backend.to_uppercase()), server.url())
            }
            Self::Kube(server) => {
                ("COORD_TEST_KUBECONFIG".to_owned(), server.kubeconfig().display().to_string())
            }
        }
    }

    /// Those of the servers; Kubernetes has a kubeconfig.
    pub(crate) fn addresses(&self) -> &[String] {
        match self {
            Self::Server(_, server) => server.addresses(),
            Self::Kube(_) => &[],
        }
    }

    /// The kubeconfig of an API server.
    pub(crate) fn kubeconfig(&self) -> &Path {
        match self {
            Self::Server(backend, _) => panic!("{backend} has no kubeconfig"),
            Self::Kube(server) => server.kubeconfig(),
        }
    }
}
