//! The Redis backend of coord: leases, nodes and shard maps in Redis 6.2 or newer, or Valkey.
//!
//! ```text
//!   RedisBackend ── lease.rs      a hash of leases, and when each ends by the server's clock
//!                ├─ discovery.rs  a hash of nodes, likewise
//!                ├─ placement.rs  a head for each table, its map in chunks beside it; requests
//!                │     every change is one script, which the server runs alone
//!                ├─ scripts.rs    the scripts, in scripts/*.lua
//!                ├─ keys.rs       where everything stands
//!                ├─ check.rs      what the server is set to
//!                └─ client.rs     the way to the master, watches; error.rs maps failures
//! ```
//!
//! **Best effort.** Redis replicates after it has answered. A failover may lose what was acknowledged,
//! and then two may hold a lease for a while; terms go on rising, and the shard maps stay fenced as
//! far as the data survived. [`Guarantees`] says so,
//! and [`require`](Guarantees::require) of linearizable refuses this backend, also over a server that
//! has no replica: nothing keeps one from being added and promoted.
//!
//! Reading order: [`RedisBackend`], then `keys.rs` in the source, then the three traits' files. What
//! is promised, and what the server has to be set to, stands in docs/backends/redis.md.

// docs.rs builds with nightly, and then shows which feature an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

/// The examples of the README, as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod check;
mod client;
mod config;
mod discovery;
mod error;
mod keys;
mod lease;
mod placement;
mod scripts;

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use coord_core::kit::Op;
use coord_core::wire::KnownMaps;
use coord_core::{
    Backend, BackendInfo, BackendUrl, Consistency, Discovery, Effect, Era, ErrorKind, ExpiryClock,
    Guarantees, Health, Incarnation, Lease, Opener, Origin, Placement, Result,
};

use crate::check::{VERSION_MIN, is_old};
use crate::client::{Client, command};
use crate::config::{Config, OPTIONS};
use crate::keys::{Keys, Kind};

/// The scheme of its URLs.
pub const SCHEME: &str = "redis";
/// The scheme of its URLs for encrypted connections: the same as `tls=on`.
pub const SCHEME_TLS: &str = "rediss";

/// The largest value that is written. A server takes 512 MiB, and does nothing else meanwhile.
const VALUE_BYTES_MAX: usize = 1 << 20;
/// How often a step that lost a race is tried again; each time another process succeeded.
const ROUNDS: usize = 32;

/// A cluster's part of a Redis or Valkey, opened over
/// `redis://[[user]:password@]host[:6379][,host…]/cluster[?option=value&…]`, or `rediss://…` for
/// encrypted connections.
///
/// Each host says itself what it is. Of a server and its replicas the master is taken; the nodes of a
/// Redis Cluster are asked which of them serves the cluster's hash slot, and any one node will do;
/// sentinels (port 26379) need the option `master`.
///
/// | option | default | |
/// | --- | --- | --- |
/// | `master` | none | the hosts are sentinels, which know the master by this name |
/// | `sentinel_user`, `sentinel_password` | none | the login of the sentinels; the URL's is that of the servers |
/// | `min_replicas` | `0` | how many replicas have to confirm a grant, a renewal, a claim and a publish |
/// | `db` | `0` | the number of the database; a Redis Cluster has only 0 |
/// | `tls` | `off`, with `rediss` `on` | `on` encrypts (cargo feature `tls`) |
/// | `ca` | the machine's roots | a PEM file of the roots to trust instead |
/// | `cert`, `key` | none | PEM files: the client's certificate and its key |
/// | `request_timeout` | `5s` | the limit of one request, `100ms` to `60s` |
/// | `connect_timeout` | `3s` | the limit of one connection attempt, `100ms` to `60s` |
/// | `era` | `0` | the operator's part of all terms, see [`Era`] |
///
/// A TTL is granted to the millisecond, and ends by the wall clock of the master. A clone is the same
/// handle: closing one closes both.
#[derive(Clone)]
pub struct RedisBackend {
    handle: Handle,
}

/// One opened handle: what the three traits are implemented on. Clones are the same one.
#[derive(Clone)]
pub(crate) struct Handle {
    client: Client,
    era: Era,
    info: Arc<BackendInfo>,
    maps: KnownMaps,
}

impl RedisBackend {
    /// Opens the cluster that the URL names, and connects to the master.
    ///
    /// # Errors
    /// `Invalid` and `Unsupported` for a URL that does not fit, before any I/O; `Unavailable`,
    /// `Denied` and `Misconfigured` for a store that can't be used; `Unsupported` for a server
    /// before 6.2.
    ///
    /// # Cancel safety
    /// The connection is closed. The store may keep the record that says which store it is.
    pub async fn open(url: &BackendUrl) -> Result<Self> {
        let config = Config::from_url(url)?;
        let op = Op::read("connect", &config.target);
        let keys = Keys::new(&config.cluster);
        let client = Client::connect(&config, &keys).await?;
        require_version(op, &client).await?;
        let identity = identity(op, &client).await?;
        client.stay_with(identity.to_string());
        let mut guarantees = Guarantees::linearizable();
        guarantees.consistency = Consistency::BestEffort;
        guarantees.expiry_clock = ExpiryClock::ServerWall;
        guarantees.heartbeats_show = true;
        guarantees.terms_survive_loss = true;
        guarantees.publish_checks_lease = true;
        guarantees.value_bytes_max = Some(VALUE_BYTES_MAX as u64);
        guarantees.nodes_max = 1_000;
        let origin = Origin::new(format!("{SCHEME}:{identity}/{}", config.cluster));
        let info = BackendInfo::new(
            config.scheme,
            config.target.clone(),
            config.cluster.clone(),
            origin,
            guarantees,
        );
        let handle =
            Handle { client, era: config.era, info: Arc::new(info), maps: KnownMaps::default() };
        handle.warn(op).await?;
        Ok(Self { handle })
    }
}

async fn require_version(op: Op<'_>, client: &Client) -> Result<()> {
    match client.server(op).await?.0 {
        Some(found) if is_old(&found.version) => {
            let (major, minor) = VERSION_MIN;
            let why = format!("{found} is too old; {major}.{minor} is needed");
            Err(op.error(ErrorKind::Unsupported).message(why))
        }
        // What can't be told is taken for new enough. `check` says so.
        _ => Ok(()),
    }
}

/// The identity of the store: made by the first handle that opens it, and kept by replicas and backups.
async fn identity(op: Op<'_>, client: &Client) -> Result<Incarnation> {
    let key = client.keys().of(Kind::Identity);
    let made = Incarnation::random().to_string();
    let make = command("SET", [key.as_str(), made.as_str(), "NX"]);
    client.send(op, Effect::Unknown, make).await?;
    let stored = client.send(op, Effect::None, command("GET", [&key])).await?;
    stored.text(0).parse().map_err(|_| {
        let why = format!("the record that says which store it is holds something else key={key}");
        op.error(ErrorKind::Corrupt).message(why)
    })
}

#[async_trait]
impl Backend for RedisBackend {
    fn info(&self) -> &BackendInfo {
        &self.handle.info
    }

    fn lease(&self) -> Arc<dyn Lease> {
        Arc::new(self.handle.clone())
    }

    fn discovery(&self) -> Arc<dyn Discovery> {
        Arc::new(self.handle.clone())
    }

    fn placement(&self) -> Arc<dyn Placement> {
        Arc::new(self.handle.clone())
    }

    async fn check(&self) -> Result<Health> {
        let mut health = Health::default();
        self.handle.check(&mut health).await?;
        Ok(health)
    }

    async fn close(&self) -> Result<()> {
        self.handle.client.close().await;
        Ok(())
    }
}

impl fmt::Debug for RedisBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBackend").field("handle", &self.handle).finish()
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("target", &self.info.target)
            .field("origin", &self.info.origin)
            .field("era", &self.era)
            .field("closed", &self.client.closed().is_cancelled())
            .finish_non_exhaustive()
    }
}

/// Opens `redis://` and `rediss://` URLs, for a [`Registry`](coord_core::Registry).
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct RedisOpener;

impl RedisOpener {
    /// The opener.
    #[must_use]
    pub const fn new() -> Self {
        Self
    }
}

#[async_trait]
impl Opener for RedisOpener {
    fn options(&self) -> &'static [&'static str] {
        OPTIONS
    }

    async fn open(&self, url: &BackendUrl) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(RedisBackend::open(url).await?))
    }
}
