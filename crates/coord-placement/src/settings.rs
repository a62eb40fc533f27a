//! What a plan has to respect besides balance.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use coord_core::{NodeId, ShardId, Version};

use crate::loads::ShardLoads;

/// How many steps the search for fewer moves may take, unless the settings say otherwise: some hundred
/// milliseconds of one core.
pub const WORK_LIMIT_DEFAULT: u64 = 50_000_000;

/// What a plan has to respect besides balance. The default: no pins, no exclusions, no limits.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanSettings {
    /// Nodes that a shard has to be on, the primary first. A pin is checked like any other assignment:
    /// one that can't be followed is reported as unsatisfied and does not stop the plan.
    pub pins: BTreeMap<ShardId, Vec<NodeId>>,
    /// Nodes that a shard must not be on.
    pub exclusions: BTreeMap<ShardId, BTreeSet<NodeId>>,
    /// The most moves for drain, zone repair and balance together. Orphans, missing replicas, pins and
    /// exclusions are not limited.
    pub max_moves: Option<u64>,
    /// The version of the current map. It decides at which shard evictions begin, so that it is not
    /// always the low shards that move.
    pub version: Version,
    /// By how many thousandths of its share a node may be above or below it before shards move; 0 for
    /// the exact share.
    pub tolerance: u16,
    /// The most steps that the search for fewer moves may take. Steps, not time: the plan must not depend
    /// on how fast the machine is.
    pub work_limit: u64,
    /// How much each shard has to do, for strategies that go by it; none for all the same.
    pub loads: Option<Arc<ShardLoads>>,
    /// Whether strategies that go by loads move nothing for balance alone, since the loads are not all known
    /// yet, say; false.
    pub holds_loads: bool,
}

impl Default for PlanSettings {
    fn default() -> Self {
        Self {
            pins: BTreeMap::new(),
            exclusions: BTreeMap::new(),
            max_moves: None,
            version: Version::ZERO,
            tolerance: 0,
            work_limit: WORK_LIMIT_DEFAULT,
            loads: None,
            holds_loads: false,
        }
    }
}

impl PlanSettings {
    /// With a shard pinned to these nodes, the primary first.
    #[must_use]
    pub fn with_pin(mut self, shard: ShardId, nodes: Vec<NodeId>) -> Self {
        self.pins.insert(shard, nodes);
        self
    }

    /// With a node excluded for a shard.
    #[must_use]
    pub fn with_exclusion(mut self, shard: ShardId, node: NodeId) -> Self {
        self.exclusions.entry(shard).or_default().insert(node);
        self
    }

    /// With this limit of moves for drain, zone repair and balance.
    #[must_use]
    pub fn with_max_moves(mut self, max: Option<u64>) -> Self {
        self.max_moves = max;
        self
    }

    /// For the map of this version.
    #[must_use]
    pub fn with_version(mut self, version: Version) -> Self {
        self.version = version;
        self
    }

    /// With this tolerance, in thousandths of a node's share.
    #[must_use]
    pub fn with_tolerance(mut self, thousandths: u16) -> Self {
        self.tolerance = thousandths;
        self
    }

    /// With these loads of the shards.
    #[must_use]
    pub fn with_loads(mut self, loads: Arc<ShardLoads>) -> Self {
        self.loads = Some(loads);
        self
    }

    /// With strategies that go by loads moving nothing for balance alone.
    #[must_use]
    pub fn with_holds_loads(mut self, holds: bool) -> Self {
        self.holds_loads = holds;
        self
    }

    /// With this limit of steps for the search for fewer moves.
    #[must_use]
    pub fn with_work_limit(mut self, steps: u64) -> Self {
        self.work_limit = steps;
        self
    }
}
