//! From a URL to a store, and from there to everything else.

use std::sync::Arc;
use std::time::Duration;

use coord_cluster::singleton::{Singleton, SingletonBuilder};
use coord_cluster::{Cluster, ClusterBuilder};
use coord_core::session::{LeaseBuilder, Leases};
use coord_core::{
    Backend, BackendInfo, Connector, Health, Incarnation, NODE_ID_BYTES_MAX, NodeId, NodeInfo,
    Registry, Result,
};
use tokio::time::timeout;

const CLOSE_WAIT_MAX: Duration = Duration::from_secs(5);
/// How long an unavailable store is waited for, unless the URL says otherwise.
const WAIT_FOR_STORE: Duration = Duration::from_secs(10);

/// Schemes whose backends a cargo feature of this crate brings.
const KNOWN: [(&str, &str); 5] =
    [("nats", "nats"), ("etcd", "etcd"), ("kube", "kube"), ("redis", "redis"), ("rediss", "redis")];

/// Opens the store that a URL names, for the cluster that it names. The scheme chooses the backend, from
/// [`registry`].
///
/// A store that is not there is tried again for 10 s, or for as long as the URL says
/// (`wait_for_store=30s`, `0s` tries once); [`connector`] says it in code and tells of each try.
///
/// # Errors
/// `Unsupported` for an unknown scheme or option, and for a scheme whose backend is not compiled in, each
/// listing what exists; `Invalid` for a malformed URL; and what the backend says. Nothing is sent before
/// the URL is known to be good.
///
/// # Cancel safety
/// Nothing is left behind.
pub async fn connect(url: &str) -> Result<Coord> {
    connector(url)?.open().await.map(Coord::new)
}

/// Begins to open the store that a URL names, for when the wait for it is to be chosen or told:
/// `Coord::new(connector(url)?.wait_for_store(limit).on_retry(tell).open().await?)`.
///
/// # Errors
/// `Invalid` for a malformed URL.
pub fn connector(url: &str) -> Result<Connector> {
    Ok(registry().connector(url)?.wait_for_store(WAIT_FOR_STORE))
}

/// The backends that this build has, as a value. Register a scheme of your own and connect through it:
/// `Coord::new(registry.connect(url).await?)`.
#[must_use]
pub fn registry() -> Registry {
    let registry = Registry::new().with_memory();
    let registry = KNOWN
        .iter()
        .fold(registry, |registry, (scheme, feature)| registry.with_known(scheme, feature));
    #[cfg(feature = "etcd")]
    let registry = with(registry, coord_etcd::SCHEME, coord_etcd::EtcdOpener::new());
    #[cfg(feature = "kube")]
    let registry = with(registry, coord_kube::SCHEME, coord_kube::KubeOpener::default());
    #[cfg(feature = "nats")]
    let registry = with(registry, coord_nats::SCHEME, coord_nats::NatsOpener::default());
    #[cfg(feature = "redis")]
    let registry = [coord_redis::SCHEME, coord_redis::SCHEME_TLS]
        .into_iter()
        .fold(registry, |all, scheme| with(all, scheme, coord_redis::RedisOpener::new()));
    registry
}

#[cfg(any(feature = "etcd", feature = "kube", feature = "nats", feature = "redis"))]
fn with(mut registry: Registry, scheme: &str, opener: impl coord_core::Opener) -> Registry {
    registry.register(scheme, opener).expect("each backend has a scheme of its own");
    registry
}

/// A store, opened for one cluster, and the identity under which this process acts in it.
///
/// A clone is another handle of the same.
#[derive(Clone, Debug)]
pub struct Coord {
    backend: Arc<dyn Backend>,
    leases: Leases,
}

impl Coord {
    /// Over a backend that is open already. The node id is made of the host's name and the process id
    /// until [`with_node`](Self::with_node) says otherwise.
    #[must_use]
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        let leases = Leases::new(backend.lease(), host_and_process(), Incarnation::random());
        Self { backend, leases }
    }

    /// Acting under this node id, as a new incarnation.
    #[must_use]
    pub fn with_node(mut self, node: NodeId) -> Self {
        self.leases = Leases::new(self.backend.lease(), node, Incarnation::random());
        self
    }

    /// Begins to acquire a lease: set its TTL, then `acquire` (waits its turn) or `try_acquire`.
    ///
    /// # Errors
    /// `Invalid` for a bad name.
    pub fn lease(&self, name: &str) -> Result<LeaseBuilder> {
        self.leases.lease(name)
    }

    /// Describes a job that runs on one process of many, the one that holds the lease of this name: see
    /// [`singleton`](coord_cluster::singleton).
    ///
    /// # Errors
    /// `Invalid` for a bad name.
    pub fn singleton(&self, name: &str) -> Result<SingletonBuilder> {
        Singleton::builder(&self.leases, name)
    }

    /// Begins to take part in the cluster as this node: settings and tables, then `start`.
    pub fn cluster(&self, node: NodeInfo) -> ClusterBuilder {
        Cluster::builder(Arc::clone(&self.backend), node)
    }

    /// The backend, for the three traits themselves.
    #[must_use]
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// What the backend is, where it points and what it promises.
    #[must_use]
    pub fn info(&self) -> &BackendInfo {
        self.backend.info()
    }

    /// Looks whether the store is reachable, new enough, permitted and set up as needed.
    ///
    /// # Errors
    /// `Closed`. What does not work is a point of the answer.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn check(&self) -> Result<Health> {
        self.backend.check().await
    }

    /// Waits until no lease of this handle is held or being acquired any more, and the last release is
    /// done.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn idle(&self) {
        self.leases.idle().await;
    }

    /// Waits, for 5 s at most, until all guards are dropped and their leases released, and closes the
    /// store for this handle and its clones. A guard that is still there keeps its lease until its TTL.
    ///
    /// # Errors
    /// `Unavailable` if the store could not be told; it is closed all the same.
    ///
    /// # Cancel safety
    /// Leases that are being released are released all the same; the store may be left open.
    pub async fn close(self) -> Result<()> {
        if timeout(CLOSE_WAIT_MAX, self.idle()).await.is_err() {
            tracing::warn!("closing although leases are held; they end with their TTL");
        }
        self.backend.close().await
    }
}

/// The host's name and the process id as a node id, such as `web-3-4711`.
pub(crate) fn host_and_process() -> NodeId {
    let host = gethostname::gethostname().to_string_lossy().to_ascii_lowercase();
    let kept = |c: char| if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '-' };
    let process = std::process::id();
    // A process id takes ten digits at most, and a hyphen goes before it.
    let host: String = host.chars().map(kept).take(NODE_ID_BYTES_MAX - 11).collect();
    let host = match host.trim_matches('-') {
        "" => "node",
        host => host,
    };
    NodeId::new(format!("{host}-{process}")).expect("made of allowed characters only")
}

#[cfg(test)]
mod tests {
    use super::*;
    use coord_core::ErrorKind;

    #[test]
    fn this_process_has_a_node_id() {
        assert!(host_and_process().as_str().ends_with(&format!("-{}", std::process::id())));
    }

    #[tokio::test]
    async fn the_ways_to_name_no_backend_are_told_apart() {
        let message = async |url| {
            let error = connect(url).await.expect_err(url);
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            error.to_string()
        };
        let unknown = message("zookeeper://localhost/orders").await;
        assert!(unknown.contains("zookeeper") && unknown.contains("memory"), "{unknown}");
        #[cfg(not(feature = "etcd"))]
        {
            let left_out = message("etcd://localhost/orders").await;
            assert!(left_out.contains("needs the cargo feature \"etcd\""), "{left_out}");
        }
        let option = message("memory://orders?colour=red").await;
        assert!(option.contains("colour") && option.contains("era"), "{option}");
    }
}
