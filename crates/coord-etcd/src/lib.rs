//! The etcd backend of coord: leases, nodes and shard maps in etcd 3.4 or newer.
//!
//! ```text
//!   EtcdBackend ── lease.rs      one key for each lease, bound to an etcd lease of its own
//!               ├─ discovery.rs  one key for each node, likewise
//!               ├─ placement.rs  a head for each table, its map in chunks beside it; requests
//!               │     every change is one transaction on the revisions that were read
//!               ├─ keys.rs       where everything stands
//!               └─ client.rs     requests, keep-alives, watches; error.rs maps failures
//! ```
//!
//! Reading order: [`EtcdBackend`], then `keys.rs` in the source, then the three traits' files. What
//! is promised, and what the server has to be set to, stands in docs/backends/etcd.md.
//!
//! Building this crate takes `protoc` and its include files, because the etcd client generates its
//! code: Debian's `protobuf-compiler` and `libprotobuf-dev`, or the variables `PROTOC` and
//! `PROTOC_INCLUDE`.

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
use coord_core::kit::Op;
use coord_core::wire::KnownMaps;
use coord_core::{
    Backend, BackendInfo, BackendUrl, Discovery, Era, Error, ErrorKind, Guarantees, Health,
    HealthStatus, Incarnation, Lease, Opener, Origin, Placement, Result, Ttl,
};
use tokio::time::Instant;

use crate::client::{Client, Condition, Entry, Kept, Seen, Step};
use crate::config::{Config, OPTIONS};
use crate::error::Problem;
use crate::keys::Keys;
use crate::lease::Contested;

/// The scheme of its URLs.
pub const SCHEME: &str = "etcd";

/// The largest value that is written. A server takes 1.5 MiB for a whole request by default.
const VALUE_BYTES_MAX: usize = 1 << 20;
/// How often a step that lost a race is tried again; each time another process succeeded.
const ROUNDS: usize = 32;
/// The etcd that has all that is used here.
const VERSION_MIN: (u32, u32) = (3, 4);
/// A database this large is worth a warning: the server's default quota is 2 GiB.
const DATABASE_BYTES_MANY: i64 = 1 << 30;

/// A cluster's part of an etcd, opened over
/// `etcd://[user:password@]host[:2379][,host…]/cluster[?option=value&…]`.
///
/// | option | default | |
/// | --- | --- | --- |
/// | `tls` | `off` | `on` encrypts (cargo feature `tls`) |
/// | `ca` | the machine's roots | a PEM file of the roots to trust instead |
/// | `cert`, `key` | none | PEM files: the client's certificate and its key |
/// | `tls_name` | the host | the name that the servers' certificates are for |
/// | `request_timeout` | `5s` | the limit of one request, `100ms` to `60s` |
/// | `connect_timeout` | `3s` | the limit of one connection attempt, `100ms` to `60s` |
/// | `era` | `0` | the operator's part of all terms, see [`Era`] |
///
/// A TTL is granted in whole seconds and is at least the server's minimum, 2 s unless its election
/// timeout was changed; it is asked for when the backend is opened. Terms are revisions of the
/// store, so they rise for as long as its data survives. A clone is the same handle: closing one
/// closes both.
#[derive(Clone)]
pub struct EtcdBackend {
    handle: Handle,
}

/// One opened handle: what the three traits are implemented on. Clones are the same one.
#[derive(Clone)]
pub(crate) struct Handle {
    client: Client,
    keys: Keys,
    era: Era,
    info: Arc<BackendInfo>,
    contested: Contested,
    maps: KnownMaps,
}

impl EtcdBackend {
    /// Opens the cluster that the URL names, and connects.
    ///
    /// # Errors
    /// `Invalid` and `Unsupported` for a URL that does not fit, before any I/O; `Unavailable`,
    /// `Denied` and `Misconfigured` for a store that can't be used; `Unsupported` for an etcd
    /// before 3.4.
    ///
    /// # Cancel safety
    /// The connection is closed. The store may keep the record that says which store it is.
    pub async fn open(url: &BackendUrl) -> Result<Self> {
        let config = Config::from_url(url)?;
        let op = Op::read("connect", &config.target);
        let client = Client::connect(&config).await?;
        require_version(op, &client).await?;
        let keys = Keys::new(&config.cluster);
        let identity = identity(op, &client, &keys).await?;
        client.stay_with(op, keys.identity(), identity.to_string().into()).await?;
        // The shortest TTL hangs on the servers' election timeout, and is told by being granted.
        let (lease, seconds) = client.grant(op, 1).await?;
        client.discard(lease);
        let mut guarantees = Guarantees::linearizable();
        guarantees.ttl_step = Duration::from_secs(1);
        guarantees.ttl_min = Ttl::from_secs(seconds.max(1))?;
        guarantees.publish_checks_lease = true;
        guarantees.value_bytes_max = Some(VALUE_BYTES_MAX as u64);
        let origin = Origin::new(format!("{SCHEME}:{identity}/{}", config.cluster));
        let info = BackendInfo::new(SCHEME, config.target, config.cluster, origin, guarantees);
        let (info, contested, maps) = (Arc::new(info), Contested::default(), KnownMaps::default());
        Ok(Self { handle: Handle { client, keys, era: config.era, info, contested, maps } })
    }
}

/// The identity of the store: made by the first handle that opens it, and kept by backups.
async fn identity(op: Op<'_>, client: &Client, keys: &Keys) -> Result<Incarnation> {
    let made = Incarnation::random();
    let (key, value) = (keys.identity(), made.to_string().into());
    let put = Step::Put { key: key.clone(), value, lease: 0 };
    let when = [Condition::Absent(key.clone())];
    let mut outcome = client.transact(op, &when, &[put], &[Step::Get(key)]).await?;
    if outcome.succeeded {
        return Ok(made);
    }
    let stored = outcome.take(0).map(|entry| entry.value).unwrap_or_default();
    let stored = std::str::from_utf8(&stored).ok().and_then(|text| text.parse().ok());
    stored.ok_or_else(|| {
        let why = "the record that says which store it is holds something else";
        op.error(ErrorKind::Corrupt).message(format!("{why} key={}", keys.identity()))
    })
}

async fn require_version(op: Op<'_>, client: &Client) -> Result<()> {
    match client.status(op).await.map_err(Error::from) {
        Ok(status) if is_old(&status.version) => {
            let (major, minor) = VERSION_MIN;
            let why = format!("etcd {} is too old; {major}.{minor} is needed", status.version);
            Err(op.error(ErrorKind::Unsupported).message(why))
        }
        Ok(_) => Ok(()),
        // Not every user may ask. `check` says so.
        Err(error) if error.kind() == ErrorKind::Denied => Ok(()),
        Err(error) => Err(error),
    }
}

/// A version that can't be read is taken for a newer one.
fn is_old(version: &str) -> bool {
    let mut parts = version.split('.').map_while(|part| part.parse::<u32>().ok());
    match (parts.next(), parts.next()) {
        (Some(major), Some(minor)) => (major, minor) < VERSION_MIN,
        _ => false,
    }
}

#[async_trait]
impl Backend for EtcdBackend {
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

impl Handle {
    /// Lets an etcd lease begin anew, and reads the key that is bound to it. Both have to be looked
    /// at: the lease may live on after its key was deleted or bound to another, and the answer to a
    /// keep-alive may come from a leader that has been deposed, which a read never does.
    async fn keep(
        &self,
        op: Op<'_>,
        lease: i64,
        key: &str,
    ) -> Result<(Kept, Option<Entry>), Problem> {
        let kept = self.client.keep_alive(op, lease);
        let read = self.client.get_with_others(op, key.to_owned());
        let both = futures::future::try_join(kept, read).await;
        // Whichever failed, the keep-alive may have been heard.
        both.map_err(|problem| match problem {
            Problem::Failed(error) if error.is_retryable() => error.effect_unknown().into(),
            problem => problem,
        })
    }

    async fn check(&self, health: &mut Health) -> Result<()> {
        use HealthStatus::{Bad, Good, Warning};
        let op = Op::read("check", &self.info.target);
        let status = match self.client.status(op).await.map_err(Error::from) {
            Ok(status) => status,
            Err(error) if error.kind() == ErrorKind::Closed => return Err(error),
            Err(error) => {
                health.add("reachable", Bad, said(&error));
                return Ok(());
            }
        };
        match status.has_leader {
            true => health.add("reachable", Good, "a server answers, and has a leader"),
            false => health.add("reachable", Bad, "a server answers, and there is no leader"),
        }
        let (major, minor) = VERSION_MIN;
        match is_old(&status.version) {
            false => health.add("version", Good, format!("etcd {}", status.version)),
            true => {
                let why = format!("etcd {}; {major}.{minor} is needed", status.version);
                health.add("version", Bad, why);
            }
        }
        match self.client.look_at_identity(op).await {
            Ok(Seen::Missing) => {
                let why = "the store was emptied: leases, nodes and maps are gone. It is given its \
                           identity back by the first request";
                health.add("identity", Warning, why);
            }
            Ok(Seen::Another) => {
                let why = "the store was emptied or made anew and is another one now than when the \
                           backend was opened: restart the service";
                health.add("identity", Bad, why);
            }
            // What keeps it from being looked at shows in the round trip.
            Ok(Seen::Same) | Err(_) => {}
        }
        self.check_configuration(op, health).await;
        if status.database_bytes > DATABASE_BYTES_MANY {
            let mib = status.database_bytes >> 20;
            let why = format!("the database has {mib} MiB: turn on auto-compaction and defragment");
            health.add("configuration", Warning, why);
        }
        self.check_round_trip(op, health).await;
        Ok(())
    }

    async fn check_configuration(&self, op: Op<'_>, health: &mut Health) {
        use HealthStatus::{Bad, Good, Warning};
        match self.client.alarms(op).await.map_err(Error::from) {
            Ok(alarms) if alarms.is_empty() => {
                health.add("configuration", Good, "no alarm is raised");
            }
            Ok(alarms) => {
                let why = format!(
                    "raised alarms: {}; NOSPACE: compact, defragment, then `etcdctl alarm disarm`; \
                     CORRUPT: replace the member that differs",
                    alarms.join(", ")
                );
                health.add("configuration", Bad, why);
            }
            Err(error) => {
                let why = format!("the alarms can't be read: {}", said(&error));
                health.add("configuration", Warning, why);
            }
        }
        match self.client.members(op).await.map_err(Error::from) {
            Ok(1) => {
                let why = "one member: while it is away so is the store, and its disk is the only \
                           one; run three";
                health.add("configuration", Warning, why);
            }
            Ok(2) => {
                let why = "two members: the store is away as soon as one of them is; run three";
                health.add("configuration", Warning, why);
            }
            Ok(members) => health.add("configuration", Good, format!("{members} members")),
            Err(error) => {
                let why = format!("the members can't be listed: {}", said(&error));
                health.add("configuration", Warning, why);
            }
        }
        let min = self.info.guarantees.ttl_min;
        health.add("configuration", Good, format!("the shortest ttl that is granted is {min}"));
    }

    /// Writes, reads and deletes a key of the cluster's own.
    async fn check_round_trip(&self, op: Op<'_>, health: &mut Health) {
        use HealthStatus::{Bad, Good};
        let key = self.keys.probe(&Incarnation::random().to_string());
        let started = Instant::now();
        let written = self.probe(op, &key).await.map_err(Error::from);
        let took = started.elapsed();
        match written {
            Ok(true) => {
                health.add("permissions", Good, "may write, read and delete the cluster's keys");
                let how = format!("made a write and read it back in {took:?}");
                health.add("round trip", Good, how);
                health.round_trip = Some(took);
            }
            Ok(false) => {
                let why = "a write was acknowledged and could not be read back";
                health.add("round trip", Bad, why);
            }
            Err(error) if error.kind() == ErrorKind::Denied => {
                let cluster = &self.info.cluster;
                let why = format!(
                    "{}; grant the user's role readwrite on the prefix coord/{cluster}/",
                    said(&error)
                );
                health.add("permissions", Bad, why);
            }
            Err(error) => health.add("round trip", Bad, said(&error)),
        }
    }

    async fn probe(&self, op: Op<'_>, key: &str) -> Result<bool, Problem> {
        let (lease, _) = self.client.grant(op, 10).await?;
        let put = Step::Put { key: key.to_owned(), value: "check".into(), lease };
        self.client.transact(op, &[], &[put], &[]).await?;
        let found = self.client.get(op, key.to_owned()).await?;
        self.client.transact(op, &[], &[Step::Delete(key.to_owned())], &[]).await?;
        self.client.discard(lease);
        Ok(found.is_some_and(|entry| entry.value == "check"))
    }
}

/// An error as a line for an operator: what it says, and the innermost cause.
fn said(error: &Error) -> String {
    let causes = std::iter::successors(std::error::Error::source(error), |&error| error.source());
    match causes.last() {
        Some(cause) => format!("{} ({cause})", error.message_text()),
        None => error.message_text().to_owned(),
    }
}

impl fmt::Debug for EtcdBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdBackend").field("handle", &self.handle).finish()
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

/// Opens `etcd://` URLs, for a [`Registry`](coord_core::Registry).
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct EtcdOpener;

impl EtcdOpener {
    /// The opener.
    #[must_use]
    pub const fn new() -> Self {
        Self
    }
}

#[async_trait]
impl Opener for EtcdOpener {
    fn options(&self) -> &'static [&'static str] {
        OPTIONS
    }

    async fn open(&self, url: &BackendUrl) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(EtcdBackend::open(url).await?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        for (version, old) in [
            ("3.3.27", true),
            ("2.10.0", true),
            ("3.4.0", false),
            ("3.10.1", false),
            ("4.0.0", false),
        ] {
            assert_eq!(is_old(version), old, "{version}");
        }
        assert!(!is_old("unknown"));
    }
}
