//! What is measured: leases, locks and elections, as different clients offer them.

use std::time::Duration;

use async_trait::async_trait;

#[cfg(feature = "bench-kubert")]
use crate::kubert;
use crate::store::Store;
use crate::{coord_leases, etcd, kube, nats, redis};
#[cfg(feature = "bench-lease-peers")]
use crate::{kube_peers, peers};

/// One client with connections of its own.
#[async_trait]
pub(crate) trait Contender: Send + Sync {
    /// Acquires a lease, waiting its turn.
    async fn acquire(&self, lease: &str, ttl: Duration) -> Box<dyn Held>;

    /// Acquires so many leases, to renew them all again and again; none if it has no such thing.
    async fn fleet(&self, _prefix: &str, _size: usize, _ttl: Duration) -> Option<Box<dyn Fleet>> {
        None
    }
}

/// A lease that is held, and renewed as its client does that.
#[async_trait]
pub(crate) trait Held: Send {
    async fn release(self: Box<Self>);
}

/// Many leases of one process.
#[async_trait]
pub(crate) trait Fleet: Send {
    /// Renews each of them once.
    async fn renew_all(&mut self);
}

/// How a contender is called in the tables, and what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) backend: &'static str,
    /// Whether it is the client that does the least possible.
    pub(crate) is_raw: bool,
    /// Whether each of its acquires takes so long by itself that there are few of them.
    pub(crate) is_slow: bool,
    /// Whether only its renewals are its own.
    pub(crate) only_renews: bool,
    /// Whether who waits for it sleeps until the TTL is over, whatever happens to the lease.
    pub(crate) sleeps: bool,
}

const fn kind(backend: &'static str, name: &'static str) -> Kind {
    Kind { name, backend, is_raw: false, is_slow: false, only_renews: false, sleeps: false }
}

/// All that were built.
pub(crate) const KINDS: &[Kind] = &[
    Kind { is_raw: true, ..kind("etcd", "raw client") },
    Kind { only_renews: true, ..kind("etcd", "raw client, each key read") },
    kind("etcd", "coord"),
    kind("etcd", "coord, trait alone"),
    kind("etcd", "etcd-client lock"),
    kind("etcd", "etcd-client election"),
    Kind { is_slow: true, ..kind("etcd", "etcdctl lock") },
    Kind { is_slow: true, ..kind("etcd", "etcdctl elect") },
    #[cfg(feature = "bench-lease-peers")]
    kind("etcd", "ash-lock 0.1.0"),
    #[cfg(feature = "bench-lease-peers")]
    kind("etcd", "photon-etcd-cluster 0.1.0"),
    Kind { is_raw: true, ..kind("nats", "raw client") },
    kind("nats", "coord"),
    kind("nats", "coord, trait alone"),
    kind("nats", "async-nats KV"),
    Kind { is_raw: true, ..kind("redis", "raw client") },
    kind("redis", "coord"),
    kind("redis", "coord, trait alone"),
    #[cfg(feature = "bench-lease-peers")]
    kind("redis", "rslock 0.10.0"),
    Kind { is_raw: true, ..kind("kube", "raw client") },
    kind("kube", "coord"),
    kind("kube", "coord, trait alone"),
    #[cfg(feature = "bench-lease-peers")]
    Kind { sleeps: true, ..kind("kube", "kube-lease-manager 0.13.1") },
    #[cfg(feature = "bench-kubert")]
    Kind { sleeps: true, ..kind("kube", "kubert 0.25.0") },
];

/// Connects a contender.
pub(crate) async fn connect(kind: Kind, store: &Store) -> Box<dyn Contender> {
    let addresses = store.addresses();
    match (kind.backend, kind.name) {
        (_, "coord") => Box::new(coord_leases::Sessions::connect(store).await),
        (_, "coord, trait alone") => Box::new(coord_leases::Trait::connect(store).await),
        ("etcd", "raw client") => Box::new(etcd::Raw::connect(addresses).await),
        ("etcd", "raw client, each key read") => {
            Box::new(etcd::RawChecked(etcd::Raw::connect(addresses).await))
        }
        ("etcd", "etcd-client lock") => Box::new(etcd::Lock::connect(addresses).await),
        ("etcd", "etcd-client election") => Box::new(etcd::Election::connect(addresses).await),
        ("etcd", "etcdctl lock") => Box::new(etcd::Etcdctl::new("lock", addresses)),
        ("etcd", "etcdctl elect") => Box::new(etcd::Etcdctl::new("elect", addresses)),
        #[cfg(feature = "bench-lease-peers")]
        ("etcd", "ash-lock 0.1.0") => Box::new(peers::AshLock::connect(addresses).await),
        #[cfg(feature = "bench-lease-peers")]
        ("etcd", "photon-etcd-cluster 0.1.0") => Box::new(peers::Photon::new(addresses)),
        ("nats", "raw client") => Box::new(nats::Raw::connect(addresses).await),
        ("nats", "async-nats KV") => Box::new(nats::Kv::connect(addresses).await),
        ("redis", "raw client") => Box::new(redis::Raw::connect(addresses).await),
        #[cfg(feature = "bench-lease-peers")]
        ("redis", "rslock 0.10.0") => Box::new(peers::RsLock::new(addresses)),
        ("kube", "raw client") => Box::new(kube::Raw::connect(store.kubeconfig()).await),
        #[cfg(feature = "bench-lease-peers")]
        ("kube", "kube-lease-manager 0.13.1") => {
            Box::new(kube_peers::Manager::connect(store.kubeconfig()).await)
        }
        #[cfg(feature = "bench-kubert")]
        ("kube", "kubert 0.25.0") => Box::new(kubert::Kubert::connect(store.kubeconfig()).await),
        _ => unreachable!("no such contender: {kind:?}"),
    }
}
