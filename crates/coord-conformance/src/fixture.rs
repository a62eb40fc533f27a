//! What a backend's author hands to the suite.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use coord_core::{
    Backend, ClusterName, Error, ErrorKind, LeaseName, NodeId, Result, TableName, Ttl,
};

use crate::faults::Faults;

/// Where the handles of one backend come from. See the [crate's first page](crate) for a whole one.
///
/// Each trial opens its own random cluster name, so that a fixture may point at a store that holds
/// other things: nothing is deleted that the trial did not make.
#[async_trait]
pub trait Fixture: Debug + Send + Sync + 'static {
    /// A short name for people and for `COORD_REQUIRE`: `memory`, `etcd`.
    fn name(&self) -> &str;

    /// How patient the suite has to be with this store.
    fn profile(&self) -> Profile;

    /// Whether the store can be tested here; asked once for each run.
    ///
    /// # Errors
    /// The reason why not. All trials are then ignored with it, or failed if `COORD_REQUIRE` names the
    /// fixture.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    async fn available(&self) -> Result<(), String> {
        Ok(())
    }

    /// Opens one more handle to a cluster in the store: its own connection, as another process would
    /// have.
    ///
    /// # Errors
    /// Whatever keeps the backend from being opened; the trial fails.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    async fn open(&self, cluster: &ClusterName) -> Result<Handle>;

    /// Removes what a trial left behind under a cluster name, where that does not go away by itself.
    ///
    /// # Cancel safety
    /// Some of it may stay.
    async fn clean(&self, cluster: &ClusterName) {
        let _ = cluster;
    }
}

/// One open backend, and what else can be done to it.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Handle {
    /// The backend.
    pub backend: Arc<dyn Backend>,
    /// The faults of this handle's connection. Trials that need one that is not there are ignored.
    pub faults: Option<Arc<dyn Faults>>,
    /// The store's own tools. Trials that need them are ignored without.
    pub operator: Option<Arc<dyn Operator>>,
}

impl Handle {
    /// A handle without faults and operator.
    #[must_use]
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        Self { backend, faults: None, operator: None }
    }

    /// With faults that strike this handle and no other.
    #[must_use]
    pub fn with_faults(mut self, faults: Arc<dyn Faults>) -> Self {
        self.faults = Some(faults);
        self
    }

    /// With the store's own tools.
    #[must_use]
    pub fn with_operator(mut self, operator: Arc<dyn Operator>) -> Self {
        self.operator = Some(operator);
        self
    }
}

/// What an operator does with the store's own tools, behind the backend's back, in the cluster of the
/// handle.
#[async_trait]
pub trait Operator: Debug + Send + Sync + 'static {
    /// Deletes the record of a lease.
    ///
    /// # Errors
    /// Whatever the store says.
    ///
    /// # Cancel safety
    /// The record may be deleted.
    async fn delete_lease(&self, lease: &LeaseName) -> Result<()>;

    /// Deletes a table with all its maps.
    ///
    /// # Errors
    /// Whatever the store says.
    ///
    /// # Cancel safety
    /// The table may be deleted.
    async fn delete_table(&self, table: &TableName) -> Result<()>;

    /// Deletes the record of a node, as a clean-up job or a garbage collector might while the node
    /// lives. Every real store can; where it is left out, the trials that need it are ignored.
    ///
    /// # Errors
    /// `Unsupported` where it is left out; else whatever the store says.
    ///
    /// # Cancel safety
    /// The record may be deleted.
    async fn delete_node(&self, node: &NodeId) -> Result<()> {
        let why = "the fixture's operator hook can't delete a node's record";
        Err(Error::new(ErrorKind::Unsupported, "delete_node").message(why).resource(node))
    }

    /// Loses all that the store holds of the cluster, what it counts terms by included: as if its disk
    /// was lost, or an operator emptied it. Where it is left out, the trials that need it are ignored.
    ///
    /// # Errors
    /// `Unsupported` where it is left out; else whatever the store says.
    ///
    /// # Cancel safety
    /// The data may be lost.
    async fn lose_data(&self) -> Result<()> {
        let why = "the fixture's operator hook can't lose the store's data";
        Err(Error::new(ErrorKind::Unsupported, "lose_data").message(why))
    }
}

/// How patient the suite has to be with a store.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Profile {
    /// The TTL that trials ask for where the length does not matter.
    pub ttl: Ttl,
    /// How long "at once" may take: a change to show in a watch, say.
    pub eventually: Duration,
    /// How much later than its TTL a grant or a registration may end.
    pub expiry_delay: Duration,
    /// How much earlier than its TTL one may seem to end, because two clocks tick apart.
    pub clock_slack: Duration,
    /// Whether trials run under tokio's paused time, where waiting takes none. Only for stores that
    /// know no other clock.
    pub paused: bool,
    /// After which a trial that still runs has failed.
    pub trial_limit: Duration,
    /// Passwords and tokens that the fixture connects with, none of which may ever show.
    pub secrets: Vec<String>,
}

impl Profile {
    /// For a store that lives in this process and knows tokio's time only.
    #[must_use]
    pub fn paused() -> Self {
        Self {
            ttl: ttl_of_secs(10),
            eventually: Duration::from_secs(1),
            expiry_delay: Duration::from_secs(1),
            clock_slack: Duration::ZERO,
            paused: true,
            trial_limit: Duration::from_secs(3_600),
            secrets: Vec::new(),
        }
    }

    /// For a server on this machine or nearby.
    #[must_use]
    pub fn real_time() -> Self {
        Self {
            ttl: ttl_of_secs(3),
            eventually: Duration::from_secs(2),
            expiry_delay: Duration::from_millis(1_500),
            clock_slack: Duration::from_millis(50),
            paused: false,
            trial_limit: Duration::from_secs(120),
            secrets: Vec::new(),
        }
    }

    /// With this TTL where the length does not matter.
    #[must_use]
    pub fn with_ttl(mut self, ttl: Ttl) -> Self {
        self.ttl = ttl;
        self
    }

    /// With this long for a change to show.
    #[must_use]
    pub fn with_eventually(mut self, eventually: Duration) -> Self {
        self.eventually = eventually;
        self
    }

    /// With expiry this much late at most.
    #[must_use]
    pub fn with_expiry_delay(mut self, delay: Duration) -> Self {
        self.expiry_delay = delay;
        self
    }

    /// With this limit for one trial.
    #[must_use]
    pub fn with_trial_limit(mut self, limit: Duration) -> Self {
        self.trial_limit = limit;
        self
    }

    /// With secrets that must never show.
    #[must_use]
    pub fn with_secrets(mut self, secrets: impl IntoIterator<Item = String>) -> Self {
        self.secrets.extend(secrets);
        self
    }
}

/// A TTL that is written down in this crate; out of range it is the shortest.
pub(crate) fn ttl_of_secs(seconds: u64) -> Ttl {
    Ttl::from_secs(seconds).unwrap_or(Ttl::MIN)
}
