//! The `Backend` trait: one store, opened for one cluster, and what it promises.

use std::fmt::{self, Debug};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::discovery::Discovery;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;
use crate::placement::Placement;
use crate::types::{ClusterName, Origin, Ttl};

/// How far a store's answers can be trusted when its servers fail over.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Consistency {
    /// An acknowledged write is never lost, and every call sees it.
    Linearizable,
    /// A failover may lose acknowledged writes: two may hold a lease for a while, and only fencing
    /// keeps the protected resource safe.
    BestEffort,
}

/// The party that decides that a grant or a registration has run out.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExpiryJudge {
    /// The store itself.
    Store,
    /// Each observer, by how long the record stayed unchanged on its own clock.
    Observers,
}

/// Whose clock expiry is judged by.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExpiryClock {
    /// A monotonic clock of the store: a jump of the wall clock changes nothing.
    Monotonic,
    /// The wall clock of the store's server: a jump may end leases early or late.
    ServerWall,
    /// The observer's own monotonic clock.
    Observer,
}

/// What a backend promises, as data: the conformance suite picks its checks by it, and a service may
/// refuse to run on less. The repository says how to choose it in
/// `docs/backend-guide.md#2-state-what-you-promise`.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guarantees {
    /// Whether acknowledged writes survive a failover.
    pub consistency: Consistency,
    /// The party that judges expiry.
    pub expiry_judge: ExpiryJudge,
    /// By whose clock.
    pub expiry_clock: ExpiryClock,
    /// Whether a watch of the nodes shows every heartbeat that it may count on, as an update with another
    /// revision, before the expiry that follows it. A watch that may have missed one, as after a failover,
    /// ends with an error or begins anew.
    pub heartbeats_show: bool,
    /// TTLs are rounded up to multiples of this.
    pub ttl_step: Duration,
    /// The shortest TTL that the store grants; a shorter one is raised to it.
    pub ttl_min: Ttl,
    /// The longest.
    pub ttl_max: Ttl,
    /// Whether terms go on rising after the store has lost its data.
    pub terms_survive_loss: bool,
    /// Whether a publish is also conditional on the lease itself, where that lives in the same store.
    pub publish_checks_lease: bool,
    /// The largest value the store takes, in bytes; larger maps are split. `None` without a limit.
    pub value_bytes_max: Option<u64>,
    /// How many nodes it is meant for.
    pub nodes_max: u32,
}

impl Guarantees {
    /// The promises of a linearizable store that judges expiry itself, on a monotonic clock, in steps
    /// of a millisecond; change the fields that differ.
    #[must_use]
    pub fn linearizable() -> Self {
        Self {
            consistency: Consistency::Linearizable,
            expiry_judge: ExpiryJudge::Store,
            expiry_clock: ExpiryClock::Monotonic,
            heartbeats_show: false,
            ttl_step: Duration::from_millis(1),
            ttl_min: Ttl::MIN,
            ttl_max: Ttl::MAX,
            terms_survive_loss: false,
            publish_checks_lease: false,
            value_bytes_max: None,
            nodes_max: 10_000,
        }
    }

    /// Refuses a backend that promises less consistency than is needed.
    ///
    /// # Errors
    /// `Unsupported` if `consistency` is linearizable and the backend is best effort.
    pub fn require(&self, consistency: Consistency) -> Result<()> {
        if consistency == Consistency::Linearizable && self.consistency != consistency {
            return Err(Error::new(ErrorKind::Unsupported, "require").message(
                "the store is best effort: a failover may lose acknowledged writes; \
                 use a linearizable store or accept best effort",
            ));
        }
        Ok(())
    }

    /// Each promise in words, for people: what it is about, and what is promised.
    #[must_use]
    pub fn in_words(&self) -> [(&'static str, String); 8] {
        let consistency = match self.consistency {
            Consistency::Linearizable => "yes (linearizable)",
            Consistency::BestEffort => "not always (best effort)",
        };
        let judge = match self.expiry_judge {
            ExpiryJudge::Store => "the store",
            ExpiryJudge::Observers => "each observer",
        };
        let clock = match self.expiry_clock {
            ExpiryClock::Monotonic => "monotonic",
            ExpiryClock::ServerWall => "its server's wall clock",
            ExpiryClock::Observer => "its own monotonic clock",
        };
        let survive = match self.terms_survive_loss {
            true => "yes, counted from a clock",
            false => "no: raise the era (`?era=1`)",
        };
        let checks = match self.publish_checks_lease {
            true => "yes",
            false => "no: on the claim and the version",
        };
        let value = match self.value_bytes_max {
            Some(bytes) if bytes % (1024 * 1024) == 0 => format!("{} MiB", bytes / (1024 * 1024)),
            Some(bytes) => format!("{bytes} B"),
            None => "unlimited".to_owned(),
        };
        let (step, min, max) = (self.ttl_step, self.ttl_min, self.ttl_max);
        [
            ("acknowledged writes survive a failover", consistency.to_owned()),
            ("who judges expiry, by which clock", format!("{judge}, {clock}")),
            ("the TTL's range", format!("{min} to {max}")),
            ("the TTL's step", format!("{step:?}")),
            ("terms rise after the store lost its data", survive.to_owned()),
            ("a publish is conditional on the lease itself", checks.to_owned()),
            ("largest value; larger maps are split", value),
            ("meant for so many nodes", self.nodes_max.to_string()),
        ]
    }

    /// The TTL that the store will grant for one that is asked for.
    #[must_use]
    pub fn granted_ttl(&self, asked: Ttl) -> Ttl {
        asked.round_up_to(self.ttl_step).clamp(self.ttl_min, self.ttl_max)
    }
}

/// What a backend is and where it points.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendInfo {
    /// The scheme of its URL.
    pub scheme: &'static str,
    /// The URL without secrets.
    pub target: String,
    /// The cluster it was opened for.
    pub cluster: ClusterName,
    /// Which store and cluster its leases live in.
    pub origin: Origin,
    /// What it promises.
    pub guarantees: Guarantees,
}

impl BackendInfo {
    /// The description of a backend, for implementers.
    #[must_use]
    pub fn new(
        scheme: &'static str,
        target: impl Into<String>,
        cluster: ClusterName,
        origin: Origin,
        guarantees: Guarantees,
    ) -> Self {
        Self { scheme, target: target.into(), cluster, origin, guarantees }
    }
}

/// How one point of a health check came out.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HealthStatus {
    /// As it should be.
    Good,
    /// It works, and something should be changed.
    Warning,
    /// It does not work.
    Bad,
}

impl fmt::Display for HealthStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Good => "good",
            Self::Warning => "warning",
            Self::Bad => "bad",
        })
    }
}

/// One point of a health check, in words an operator can act on.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthPoint {
    /// What was looked at: `reachable`, `version`, `permissions`, `configuration`, `round trip`.
    pub name: &'static str,
    /// How it came out.
    pub status: HealthStatus,
    /// What was found, and what to do about it.
    pub detail: String,
}

/// What a backend found out about its store.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// The points, in the order in which they were looked at.
    pub points: Vec<HealthPoint>,
    /// The time of one write and read.
    pub round_trip: Option<Duration>,
}

impl Health {
    /// Adds a point.
    pub fn add(&mut self, name: &'static str, status: HealthStatus, detail: impl Into<String>) {
        self.points.push(HealthPoint { name, status, detail: detail.into() });
    }

    /// The worst point; good when there is none.
    #[must_use]
    pub fn status(&self) -> HealthStatus {
        self.points.iter().map(|point| point.status).max().unwrap_or(HealthStatus::Good)
    }
}

/// One store, opened for one cluster name, which isolates everything that is stored.
///
/// The three parts may also be taken from different backends: lease on Kubernetes, discovery on NATS,
/// placement on etcd.
#[async_trait]
pub trait Backend: Debug + Send + Sync + 'static {
    /// What it is and promises.
    fn info(&self) -> &BackendInfo;

    /// Its leases.
    fn lease(&self) -> Arc<dyn Lease>;

    /// Its nodes.
    fn discovery(&self) -> Arc<dyn Discovery>;

    /// Its shard maps.
    fn placement(&self) -> Arc<dyn Placement>;

    /// Looks whether the store is reachable, new enough, permitted and set up as needed, and times a
    /// round trip. What does not work is a point of the answer, not an error.
    ///
    /// # Errors
    /// `Closed`.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    async fn check(&self) -> Result<Health>;

    /// Closes the connection. Calls from then on are `Closed`. What is held is neither released nor
    /// deregistered: that is for its sessions to do before.
    ///
    /// # Errors
    /// `Unavailable` if the store could not be told; the handle is closed all the same.
    ///
    /// # Cancel safety
    /// The handle is closed as soon as the call began.
    async fn close(&self) -> Result<()>;
}
