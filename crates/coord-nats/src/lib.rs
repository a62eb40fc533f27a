//! Leases, nodes and shard maps in NATS JetStream.
//!
//! ```text
//!   NatsBackend ── Handle ─┬ lease.rs       CAS on the lease's subject, with a TTL
//!                          ├ discovery.rs   CAS on the node's subject, with a TTL
//!                          ├ placement.rs   CAS on a table's head; its map in immutable chunks
//!                          │
//!                          ├ keys.rs        which subject holds what
//!                          └ client.rs      the only file, with error.rs, that calls the NATS
//! client
//!                               ├ connect.rs   credentials, TLS, reconnecting
//!                               ├ bucket.rs    makes or checks the bucket
//!                               ├ expiry.rs    ends records where the server does not
//!                               └ watch.rs     subscriptions
//! ```
//!
//! Everything of a cluster stands in one key-value bucket, so that an operator reads it with
//! `nats kv get`. Each write names the sequence that it replaces, and the sequence of the write
//! that acquired a lease is its term.
//!
//! On servers older than 2.11.7, which end no single records, clients do it by the servers' clock:
//! see `docs/backends/nats.md`.
//!
//! Its URL is `nats://[user:password@ or token@]host[:4222][,host…]/cluster[?option=value&…]`:
//!
//! | option | meaning | default |
//! | --- | --- | --- |
//! | `bucket` | the bucket's name, `A-Z a-z 0-9 - _` | `coord` |
//! | `replicas` | how many servers keep the bucket: 1, 3 or 5 | 1 for a new one |
//! | `storage` | `file` or `memory` | `file` |
//! | `creds`, `nkey` | a file to log in with: a JWT and its seed, or the seed of an NKey | |
//! | `tls` | `on` to insist on an encrypted connection (feature `tls`) | `off` |
//! | `ca`, `cert`, `key` | PEM files, with `tls=on` | the machine's own roots |
//! | `request_timeout` | how long one request may take | `2s` |
//! | `connect_timeout` | how long connecting to one server may take | `3s` |
//!
//! ```no_run
//! # async fn f() -> coord_core::Result<()> {
//! use coord_core::{Backend, BackendUrl};
//! use coord_nats::NatsBackend;
//!
//! let url: BackendUrl = "nats://localhost:4222/orders".parse()?;
//! let backend = NatsBackend::open(&url).await?;
//! assert!(backend.lease().get(&"jobs".parse()?).await?.is_none());
//! # Ok(())
//! # }
//! ```

// docs.rs builds with nightly, and then shows which feature an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

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
mod placement;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_core::kit::Op;
use coord_core::wire::KnownMaps;
use coord_core::{
    Backend, BackendInfo, BackendUrl, Consistency, Discovery, ErrorKind, ExpiryClock, Guarantees,
    Health, HealthStatus, Lease, Opener, Origin, Placement, Result,
};
use tokio::time::Instant;

use self::client::{Bucket, Client, Condition, Expiry, MARKER_TTL, Put, expires_late, is_full};
use self::config::{Config, OPTIONS, Storage};
use self::keys::Keys;

/// The scheme of its URLs.
pub const SCHEME: &str = "nats";

/// How often a method tries again that lost a race for a record, before it gives up.
const RACES_MAX: usize = 16;

/// A bucket of a NATS server, opened for one cluster.
///
/// A clone is the same handle: closing one closes both.
///
/// Discovery: a heartbeat is a compare-and-set of the whole record, so each one changes the
/// revision, and shows in watches as an update; an eviction has to show the revision of the newest.
#[derive(Clone, Debug)]
pub struct NatsBackend {
    handle: Arc<Handle>,
}

/// Opens [`NatsBackend`]s by their URLs, for a [`Registry`](coord_core::Registry).
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default)]
pub struct NatsOpener;

/// One opened handle: what the three traits are implemented on.
pub(crate) struct Handle {
    client: Client,
    config: Config,
    bucket: Bucket,
    keys: Keys,
    info: BackendInfo,
    maps: KnownMaps,
}

impl NatsBackend {
    /// Connects to the servers that the URL names, and makes the bucket if it is not there.
    ///
    /// # Errors
    /// `Invalid` or `Unsupported` for a URL that does not suit, before any I/O; `Unavailable` where
    /// no server is reached; `Denied` for the wrong credentials; `Unsupported` for a server older
    /// than 2.10, and for one older than 2.11.7 where the bucket was made by a newer one; `Misconfigured` for a server without JetStream and for a bucket that is set up
    /// otherwise, naming the field.
    ///
    /// # Cancel safety
    /// The bucket may have been made.
    pub async fn open(url: &BackendUrl) -> Result<Self> {
        let config = Config::from_url(url)?;
        let op = Op::read("connect", &config.target);
        let (client, bucket) = Client::open(op, &config).await?;
        let keys = Keys::new(&config.bucket, &config.cluster);
        let subject = keys.probe(&client.unique());
        client.reach_bucket(op, &subject, config.connect_timeout).await?;
        let info = info(&client, &config, &bucket);
        let handle = Handle { client, config, bucket, keys, info, maps: KnownMaps::default() };
        Ok(Self { handle: Arc::new(handle) })
    }
}

fn info(client: &Client, config: &Config, bucket: &Bucket) -> BackendInfo {
    let mut guarantees = Guarantees::linearizable();
    if bucket.storage == Storage::Memory && bucket.replicas == 1 {
        guarantees.consistency = Consistency::BestEffort;
    }
    guarantees.expiry_clock = ExpiryClock::ServerWall;
    guarantees.heartbeats_show = true;
    guarantees.ttl_step = Duration::from_secs(1);
    guarantees.terms_survive_loss = true;
    guarantees.publish_checks_lease = bucket.atomic;
    guarantees.value_bytes_max = Some(client.value_bytes_max() as u64);
    let cluster = config.cluster.clone();
    let origin = Origin::new(format!("{SCHEME}:{}/{cluster}", bucket.identity));
    BackendInfo::new(SCHEME, config.target.clone(), cluster, origin, guarantees)
}

#[async_trait]
impl Opener for NatsOpener {
    fn options(&self) -> &'static [&'static str] {
        OPTIONS
    }

    async fn open(&self, url: &BackendUrl) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(NatsBackend::open(url).await?))
    }
}

#[async_trait]
impl Backend for NatsBackend {
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
        let looked = self.client.look_at_bucket(op, &self.config).await;
        if let Err(error) = &looked
            && !matches!(error.kind(), ErrorKind::Misconfigured | ErrorKind::Denied)
        {
            health.add("reachable", HealthStatus::Bad, said(error));
            return Ok(health);
        }
        health.add("reachable", HealthStatus::Good, "the server answers");
        self.check_version(&mut health);
        match &looked {
            Ok(bucket) => self.check_bucket(bucket, &mut health),
            Err(error) if error.kind() == ErrorKind::Denied => {
                health.add("permissions", HealthStatus::Bad, said(error));
            }
            Err(error) => health.add("configuration", HealthStatus::Bad, said(error)),
        }
        self.check_round_trip(&mut health).await;
        Ok(health)
    }

    fn check_version(&self, health: &mut Health) {
        let version = self.client.server_version();
        if self.bucket.expiry == Expiry::Clients {
            let then = match is_full(&version) {
                true => "this server can do it: move to a new bucket when no service runs",
                false => "upgrade to 2.11.10, 2.12.1 or newer, and move to a new bucket then",
            };
            let text = format!(
                "NATS {version}, degraded: the bucket was made for servers that end no single \
                 records, so clients end them by the servers' clock when they notice, with one read \
                 more for each renewal, and a publish is fenced by claim and compare-and-set; {then}"
            );
            health.add("version", HealthStatus::Warning, text);
        } else if expires_late(&version) {
            let text = format!(
                "NATS {version} lets records run out only when nothing else is written for a while, \
                 so a dead holder may be replaced many seconds late; use 2.11.10, 2.12.1 or newer"
            );
            health.add("version", HealthStatus::Warning, text);
        } else if self.bucket.atomic {
            let text = format!("NATS {version}: a publish is conditional on the lease itself");
            health.add("version", HealthStatus::Good, text);
        } else {
            let text = format!(
                "NATS {version}: a publish is fenced by claim and compare-and-set; from 2.12 on it \
                 is conditional on the lease as well, in a bucket with allow_atomic"
            );
            health.add("version", HealthStatus::Good, text);
        }
    }

    fn check_bucket(&self, bucket: &Bucket, health: &mut Health) {
        if bucket.identity != self.bucket.identity {
            let why = "the bucket was deleted and made again; open the backend again";
            health.add("configuration", HealthStatus::Bad, why);
            return;
        }
        let (replicas, storage) = (bucket.replicas, bucket.storage.as_str());
        let name = &self.config.bucket;
        let text = format!("bucket {name:?} is kept by {replicas} server(s), storage={storage}");
        let mut wishes = Vec::new();
        if replicas < 3 {
            wishes.push("keep it on 3 servers (replicas=3), or it is lost with its one server");
        }
        if bucket.storage == Storage::Memory {
            wishes.push("keep it in files, or a restart loses everything");
        }
        wishes.push(
            "set sync_interval: always in the servers' jetstream block, or acknowledged writes of \
             the last 2 minutes can be lost when machines lose power (Jepsen, NATS 2.12.1)",
        );
        let status = match wishes.len() {
            1 => HealthStatus::Good,
            _ => HealthStatus::Warning,
        };
        health.add("configuration", status, format!("{text}; {}", wishes.join("; ")));
    }

    /// Writes a record of its own, reads it and removes it.
    async fn check_round_trip(&self, health: &mut Health) {
        let subject = self.keys.probe(&self.client.unique());
        let op = Op::write("check", &self.info.target);
        let started = Instant::now();
        let value = Bytes::from_static(b"coord check");
        let condition = Condition::At(0);
        let put = Put { subject: &subject, value: value.clone(), ttl: Some(MARKER_TTL), condition };
        let written = self.client.put(op, put).await;
        let read = match written {
            Ok(_) => self.client.get(op, &subject).await,
            Err(error) => Err(error),
        };
        let took = started.elapsed();
        match read {
            Ok(last) if last.value.as_ref() == Some(&value) => {
                let text = "records can be written and read";
                health.add("permissions", HealthStatus::Good, text);
                let text = format!("wrote a record and read it back in {took:?}");
                health.add("round trip", HealthStatus::Good, text);
                health.round_trip = Some(took);
                self.check_removal(op, &subject, last.sequence, health).await;
            }
            Ok(last) => {
                let text = format!("wrote a record and did not read it back: {last:?}");
                health.add("round trip", HealthStatus::Bad, text);
            }
            Err(error) if error.kind() == ErrorKind::Denied => {
                health.add("permissions", HealthStatus::Bad, said(&error));
            }
            Err(error) => health.add("round trip", HealthStatus::Bad, said(&error)),
        }
    }

    /// Removes the record of the check. Where the server ends records, it ends by itself anyhow;
    /// elsewhere that takes a permission of its own.
    async fn check_removal(&self, op: Op<'_>, subject: &str, sequence: u64, health: &mut Health) {
        let removed = match self.bucket.expiry {
            Expiry::Server => self.client.remove(op, subject, sequence, MARKER_TTL).await.map(drop),
            Expiry::Clients => self.client.erase(op, subject).await,
        };
        if let Err(error) = removed
            && error.kind() == ErrorKind::Denied
        {
            let text = format!("{}; old records stay for ever", said(&error));
            health.add("permissions", HealthStatus::Warning, text);
        }
    }

    /// A record that the store takes, or the reason why not, before anything is sent.
    fn fitting(&self, op: Op<'_>, record: Bytes) -> Result<Bytes> {
        self.fits(op, record.len())?;
        Ok(record)
    }

    fn fits(&self, op: Op<'_>, bytes: usize) -> Result<()> {
        let most = self.client.value_bytes_max();
        if bytes > most {
            let why =
                format!("the record has {bytes} bytes; the server takes {most} (max_payload)");
            return Err(op.error(ErrorKind::Invalid).message(why));
        }
        Ok(())
    }
}

/// Waits before a lost race is run once more: what won it may still be on its way to the other
/// servers of the cluster, and can't be read before it has arrived.
async fn pause(race: usize) {
    const PAUSE_MAX: Duration = Duration::from_millis(20);
    if let Some(doublings) = race.checked_sub(2) {
        let doublings = u32::try_from(doublings).unwrap_or(u32::MAX).min(5);
        tokio::time::sleep(Duration::from_millis(1 << doublings).min(PAUSE_MAX)).await;
    }
}

fn said(error: &coord_core::Error) -> String {
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
