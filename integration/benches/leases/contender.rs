//! What is measured: leases, locks and elections, as different clients offer them.

use std::time::Duration;

use async_trait::async_trait;
use coord_integration::servers::Server;

#[cfg(feature = "bench-lease-peers")]
use crate::peers;
use crate::{coord_leases, etcd, nats};

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
}

const fn kind(backend: &'static str, name: &'static str) -> Kind {
    Kind { name, backend, is_raw: false, is_slow: false, only_renews: false }
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
];

/// Connects a contender.
pub(crate) async fn connect(kind: Kind, server: &Server) -> Box<dyn Contender> {
    let addresses = server.addresses();
    match (kind.backend, kind.name) {
        (_, "coord") => Box::new(coord_leases::Sessions::connect(server).await),
        (_, "coord, trait alone") => Box::new(coord_leases::Trait::connect(server).await),
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
        _ => unreachable!("no such contender: {kind:?}"),
    }
}
