//! Leases, nodes and shard maps in Kubernetes: in Lease and ConfigMap objects, through the API
//! server that every cluster has.
//!
//! ```text
//!   KubeBackend ── Handle ─┬ lease.rs       a Lease each, replaced by its resourceVersion
//!                          ├ discovery.rs   a Lease for each node, as the kubelets have
//!                          ├ placement.rs   a ConfigMap for each head, chunk and request
//!                          │
//!                          ├ lease_watch.rs one watch of a lease for all who read it
//!                          ├ seen.rs        since when each object has not changed
//!                          ├ keys.rs        names, labels and fields
//!                          └ client.rs      the only file, with error.rs, that calls the vendor
//!                               ├ connect.rs   kubeconfig, service account, credentials
//!                               ├ object.rs    an object as it was read
//!                               └ watch.rs     subscriptions
//! ```
//!
//! The API server ends no record by itself. Whether a holder or a node is gone is judged by each
//! [observer](coord_core::Observations) for itself: by how long the record stayed unchanged on its
//! own clock. Nothing that a record says of a time is looked at.
//!
//! Its URL is `kube:///cluster[?option=value&…]`, with three slashes, since the API server stands in
//! the kubeconfig:
//!
//! | option | meaning | default |
//! | --- | --- | --- |
//! | `namespace` | where the objects are | that of the context, or of the pod |
//! | `context` | a context of the kubeconfig | its current one |
//! | `kubeconfig` | the file | see below |
//! | `request_timeout` | how long one request may take | `5s` |
//! | `connect_timeout` | how long connecting may take | `3s` |
//!
//! Who connects, and where to: the kubeconfig that the URL names, else that of `KUBECONFIG`, else in
//! a pod its service account, else `~/.kube/config`. With a `context` in the URL it is a kubeconfig
//! always.
//!
//! ```no_run
//! # async fn f() -> coord_core::Result<()> {
//! use coord_core::{Backend, BackendUrl};
//! use coord_kube::KubeBackend;
//!
//! let url: BackendUrl = "kube:///orders?namespace=shop".parse()?;
//! let backend = KubeBackend::open(&url).await?;
//! assert!(backend.lease().get(&"jobs".parse()?).await?.is_none());
//! # Ok(())
//! # }
//! ```

/// The examples of the README, as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod client;
mod config;
mod discovery;
mod error;
mod keys;
mod lease;
mod lease_watch;
mod placement;
mod seen;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use coord_core::wire::KnownMaps;
use coord_core::{
    AttemptId, Backend, BackendInfo, BackendUrl, Discovery, Error, ErrorKind, ExpiryClock,
    ExpiryJudge, Guarantees, Health, HealthStatus, Lease, Opener, Origin, Placement, Result,
};
use futures::future::join_all;
use tokio::time::Instant;

use self::client::{Client, Deleted, Object, Resource, Selector, Vendor};
use self::config::{Config, OPTIONS};
use self::error::Op;
use self::keys::{Keys, Kind};
use self::lease_watch::LeaseWatches;
use self::placement::VALUE_BYTES_MAX;
use self::seen::Seen;

/// The scheme of its URLs.
pub const SCHEME: &str = "kube";

/// What has to be permitted on Leases and on ConfigMaps.
const VERBS: [&str; 6] = ["get", "list", "watch", "create", "update", "delete"];
/// How often a method tries again that lost a race for an object, before it gives up.
const RACES_MAX: usize = 32;
/// How long an API server may forbid what it permits once it has read its roles.
const DENIED_AT_START_MAX: Duration = Duration::from_secs(10);
/// For how many nodes it is meant: each heartbeat is a write to the cluster's own etcd.
const NODES_MAX: u32 = 1_000;

/// A namespace of a Kubernetes cluster, opened for one coord cluster.
///
/// A clone is the same handle: closing one closes both.
#[derive(Clone, Debug)]
pub struct KubeBackend {
    handle: Arc<Handle>,
}

/// Opens [`KubeBackend`]s by their URLs, for a [`Registry`](coord_core::Registry).
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default)]
pub struct KubeOpener;

/// One opened handle: what the three traits are implemented on.
pub(crate) struct Handle {
    client: Client,
    config: Config,
    keys: Keys,
    info: BackendInfo,
    maps: KnownMaps,
    leases: Seen,
    lease_watches: LeaseWatches,
    nodes: Seen,
    requests: Seen,
}

impl KubeBackend {
    /// Reads the kubeconfig or the pod's service account, and looks the namespace up.
    ///
    /// # Errors
    /// `Invalid` or `Unsupported` for a URL that does not suit, before any I/O; `Misconfigured` for a
    /// kubeconfig that can't be used and for a namespace that is not there; `Unavailable` where no
    /// API server answers; `Denied` for credentials that it does not take, and where the namespace
    /// may not be read.
    ///
    /// # Cancel safety
    /// Nothing is left behind.
    pub async fn open(url: &BackendUrl) -> Result<Self> {
        let config = Config::from_url(url)?;
        let op = Op::read("connect", &config.target);
        let vendor = Vendor::find(op, &config).await?;
        let client = Client::open(op, vendor, config.request_timeout).await?;
        let uid = client.namespace_uid(op).await?;
        let keys = Keys::new(config.cluster.clone());
        let info = info(&config, &uid);
        let (leases, nodes, requests) = (Seen::of_leases(), Seen::default(), Seen::default());
        let maps = KnownMaps::default();
        let lease_watches = LeaseWatches::default();
        let handle =
            Handle { client, config, keys, info, maps, leases, lease_watches, nodes, requests };
        Ok(Self { handle: Arc::new(handle) })
    }
}

fn info(config: &Config, namespace_uid: &str) -> BackendInfo {
    let mut guarantees = Guarantees::linearizable();
    guarantees.expiry_judge = ExpiryJudge::Observers;
    guarantees.expiry_clock = ExpiryClock::Observer;
    guarantees.ttl_step = Duration::from_secs(1);
    guarantees.terms_survive_loss = true;
    guarantees.value_bytes_max = Some(VALUE_BYTES_MAX as u64);
    guarantees.nodes_max = NODES_MAX;
    let cluster = config.cluster.clone();
    let origin = Origin::new(format!("{SCHEME}:{namespace_uid}/{cluster}"));
    BackendInfo::new(SCHEME, config.target.clone(), cluster, origin, guarantees)
}

#[async_trait]
impl Opener for KubeOpener {
    fn options(&self) -> &'static [&'static str] {
        OPTIONS
    }

    async fn open(&self, url: &BackendUrl) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(KubeBackend::open(url).await?))
    }

    /// An API server that has only just started forbids everything until it has read its roles.
    fn may_pass(&self, error: &Error) -> Duration {
        let is_forbidden = error.kind() == ErrorKind::Denied && error::is_forbidden(error);
        if is_forbidden { DENIED_AT_START_MAX } else { Duration::ZERO }
    }
}

#[async_trait]
impl Backend for KubeBackend {
    fn info(&self) -> &BackendInfo {
        &self.handle.info
    }

    fn lease(&self) -> Arc<dyn Lease> {
        Arc::clone(&self.handle) as _
    }

    fn discovery(&self) -> Arc<dyn Discovery> {
        Arc::clone(&self.handle) as _
    }

    fn placement(&self) -> Arc<dyn Placement> {
        Arc::clone(&self.handle) as _
    }

    async fn check(&self) -> Result<Health> {
        self.handle.check().await
    }

    async fn close(&self) -> Result<()> {
        let op = Op::read("close", &self.handle.info.target);
        self.handle.client.close(op).await
    }
}

impl Handle {
    async fn check(&self) -> Result<Health> {
        let op = Op::read("check", &self.info.target);
        if self.client.closed().is_cancelled() {
            return Err(op.closed());
        }
        let mut health = Health::default();
        let version = self.client.server_version(op).await;
        let namespace = self.client.namespace_uid(op).await;
        // Whoever may not read one of them was answered all the same.
        let is_reached = |error: &Error| error.kind() != ErrorKind::Unavailable;
        if let (Err(error), Err(_)) = (&version, &namespace)
            && !is_reached(error)
        {
            health.add("reachable", HealthStatus::Bad, said(error));
            return Ok(health);
        }
        health.add("reachable", HealthStatus::Good, "the API server answers");
        match &version {
            Ok(version) => {
                let text = format!("Kubernetes {version}; Leases are served since 1.14");
                health.add("version", HealthStatus::Good, text);
            }
            Err(error) => health.add("version", HealthStatus::Warning, said(error)),
        }
        self.check_namespace(namespace, &mut health);
        if self.check_permissions(&mut health).await {
            self.check_round_trip(&mut health).await;
        }
        Ok(health)
    }

    fn check_namespace(&self, namespace: Result<String>, health: &mut Health) {
        let name = self.client.namespace();
        let opened = &self.info.origin;
        let cluster = self.keys.cluster();
        match namespace {
            Ok(uid) if opened.as_str() == format!("{SCHEME}:{uid}/{cluster}") => {
                let text = format!("objects coord.{cluster}.* in namespace {name:?}");
                health.add("configuration", HealthStatus::Good, text);
            }
            Ok(_) => {
                let why = "the namespace was deleted and made again; open the backend again";
                health.add("configuration", HealthStatus::Bad, why);
            }
            Err(error) => {
                let point = match error.kind() {
                    ErrorKind::Denied => "permissions",
                    _ => "configuration",
                };
                health.add(point, HealthStatus::Bad, said(&error));
            }
        }
    }

    /// Tries each verb, without changing anything. True if all are permitted.
    async fn check_permissions(&self, health: &mut Health) -> bool {
        let op = Op::read("check", &self.info.target);
        let name = self.keys.check(&unique());
        let cluster = self.keys.cluster().to_owned();
        let selector = Selector::Kind { cluster, kind: Kind::Check };
        let tries = Resource::ALL.into_iter().flat_map(|resource| {
            let probe = Object::new(resource, &self.keys, Kind::Check, &name);
            let selector = &selector;
            VERBS.into_iter().map(move |verb| {
                let probe = probe.clone();
                async move { self.client.try_verb(op, resource, verb, &probe, selector).await }
            })
        });
        let mut missing = Vec::new();
        let mut is_all_tried = true;
        for tried in join_all(tries).await {
            match tried {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Denied => missing.push(said(&error)),
                Err(error) => {
                    is_all_tried = false;
                    health.add("permissions", HealthStatus::Bad, said(&error));
                }
            }
        }
        for missing in &missing {
            health.add("permissions", HealthStatus::Bad, missing.clone());
        }
        let is_good = is_all_tried && missing.is_empty();
        if is_good {
            let text = format!(
                "it may {} Leases and ConfigMaps in namespace {:?}",
                VERBS.join(", "),
                self.client.namespace()
            );
            health.add("permissions", HealthStatus::Good, text);
        }
        is_good
    }

    /// Writes an object of its own, reads it and removes it.
    async fn check_round_trip(&self, health: &mut Health) {
        let op = Op::write("check", &self.info.target);
        let name = self.keys.check(&unique());
        let probe = Object::new(Resource::Leases, &self.keys, Kind::Check, &name);
        let started = Instant::now();
        let made = self.client.create(op, Resource::Leases, &probe).await;
        let read = match made {
            Ok(_) => self.client.get(op, Resource::Leases, &name).await,
            Err(error) => Err(error),
        };
        let took = started.elapsed();
        match read {
            Ok(Some(object)) => {
                let text = format!("wrote an object and read it back in {took:?}");
                health.add("round trip", HealthStatus::Good, text);
                health.round_trip = Some(took);
                let removed =
                    self.client.delete(op, Resource::Leases, &name, object.uid(), None).await;
                if !matches!(removed, Ok(Deleted::Done | Deleted::Gone)) {
                    let text = format!("the object {name} of the check is left behind");
                    health.add("round trip", HealthStatus::Warning, text);
                }
            }
            Ok(None) => {
                let text = "wrote an object and did not read it back";
                health.add("round trip", HealthStatus::Bad, text);
            }
            Err(error) => health.add("round trip", HealthStatus::Bad, said(&error)),
        }
    }
}

/// A text that no other check makes.
fn unique() -> String {
    AttemptId::random().to_string()
}

/// Waits before a lost race is run once more, ever longer, and each of many for another time.
async fn pause(race: usize) {
    const PAUSE_MAX: u64 = 64;
    let Some(doublings) = race.checked_sub(2) else { return };
    let doublings = u32::try_from(doublings).unwrap_or(u32::MAX).min(6);
    let most = (1_u64 << doublings).min(PAUSE_MAX);
    let some = u64::try_from(AttemptId::random().as_u128() & 0xffff).unwrap_or(0);
    tokio::time::sleep(Duration::from_micros(most * 500 + most * 500 * some / 0xffff)).await;
}

fn said(error: &Error) -> String {
    format!("{}: {}", error.kind(), error.message_text())
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("target", &self.info.target)
            .field("origin", &self.info.origin)
            .field("client", &self.client)
            .finish_non_exhaustive()
    }
}
