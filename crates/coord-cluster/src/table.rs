//! A table, as a node is started with it.

use std::fmt;
use std::sync::Arc;

use coord_core::{ReplicationFactor, ShardCount, TableHeader, TableName};
use coord_placement::PlacementStrategy;

use crate::handoff::Handoff;
use crate::mailbox::Handler;
use crate::model::TableSpec;
use crate::region::Host;
use crate::settings::Settings;

/// A table of shards: how many there are, what places them, how they move, and what runs them on this node.
///
/// All nodes of a cluster name the same tables with the same values; what the leader was started with counts.
/// A value that is not given here is the one of [`Settings`]: shards, replicas and strategy. A table without
/// a host or a handler is only shown as owned.
///
/// ```
/// use std::sync::Arc;
///
/// use coord_cluster::{Handoff, Table};
/// use coord_core::{ShardCount, TableName};
/// use coord_placement::ConsistentHash;
///
/// # fn main() -> coord_core::Result<()> {
/// let sessions = Table::new(TableName::new("sessions")?)
///     .shards(ShardCount::new(256)?)
///     .strategy(Arc::new(ConsistentHash::new()))
///     .handoff(Handoff::Eager);
/// assert_eq!(sessions.name().as_str(), "sessions");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use = "a table is given to a builder"]
pub struct Table {
    name: TableName,
    shards: Option<ShardCount>,
    replicas: Option<ReplicationFactor>,
    strategy: Option<Arc<dyn PlacementStrategy>>,
    handoff: Handoff,
    pub(crate) runner: Option<Runner>,
}

/// What runs the shards of a table on this node.
#[derive(Clone)]
pub(crate) enum Runner {
    Host(Arc<dyn Host>),
    Handler(Arc<dyn Handler>),
}

impl Table {
    /// A table of this name; all else is as the settings say.
    pub fn new(name: TableName) -> Self {
        Self {
            name,
            shards: None,
            replicas: None,
            strategy: None,
            handoff: Handoff::default(),
            runner: None,
        }
    }

    /// What it is called.
    #[must_use]
    pub fn name(&self) -> &TableName {
        &self.name
    }

    /// With so many shards. The number can't be changed once the table exists.
    pub fn shards(mut self, shards: ShardCount) -> Self {
        self.shards = Some(shards);
        self
    }

    /// With so many owners for each shard. The number can't be changed once the table exists.
    pub fn replicas(mut self, replicas: ReplicationFactor) -> Self {
        self.replicas = Some(replicas);
        self
    }

    /// Placed by this strategy.
    pub fn strategy(mut self, strategy: Arc<dyn PlacementStrategy>) -> Self {
        self.strategy = Some(strategy);
        self
    }

    /// How its shards get from one node to another; [`Handoff::Exclusive`] unless said.
    pub fn handoff(mut self, handoff: Handoff) -> Self {
        self.handoff = handoff;
        self
    }

    /// Runs its shards that this node owns in this host, in the place of any host or handler given before.
    pub fn host(mut self, host: Arc<dyn Host>) -> Self {
        self.runner = Some(Runner::Host(host));
        self
    }

    /// Runs its shards that this node owns in this handler, which is sent messages as well, in the place of any
    /// host or handler given before. It takes a [transport](crate::ClusterBuilder::transport). Every node that
    /// takes shards of the table needs a handler: on a node without one, messages wait in vain.
    pub fn handler(mut self, handler: Arc<dyn Handler>) -> Self {
        self.runner = Some(Runner::Handler(handler));
        self
    }

    /// What the coordinator has to know of it.
    pub(crate) fn spec(&self, settings: &Settings) -> TableSpec {
        let by_settings = settings.header();
        let header = TableHeader::new(self.shards.unwrap_or(by_settings.shards))
            .with_replicas(self.replicas.unwrap_or(by_settings.replicas));
        let strategy = self.strategy.clone().unwrap_or_else(|| settings.placement_strategy());
        TableSpec { header, strategy, handoff: self.handoff }
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("name", &self.name).finish_non_exhaustive()
    }
}
