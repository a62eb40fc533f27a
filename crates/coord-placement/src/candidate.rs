//! The live nodes, as placement sees them.

use coord_core::{Capacity, Declared, Label, NodeId, NodeInfo};

/// The largest weight.
pub const WEIGHT_MAX: u64 = 1 << 40;
/// The weight of the default capacity, 1.
pub const WEIGHT_DEFAULT: u64 = 1 << 16;

/// What a node takes.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Accepts {
    /// New shards, up to its share.
    #[default]
    New,
    /// Nothing new (draining): it keeps what it has until that is moved away.
    KeepOnly,
}

/// A live node.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its name.
    pub id: NodeId,
    /// Its share of the shards relative to the others': 1 to 2^40.
    pub weight: u64,
    /// Its failure domain. Nodes without one are together in a domain of their own.
    pub zone: Option<Label>,
    /// What it takes.
    pub accepts: Accepts,
    /// The most owners' places it may hold, whatever its share.
    pub max_shards: Option<u32>,
}

impl Candidate {
    /// A node of the default weight, without a zone, that accepts new shards.
    #[must_use]
    pub fn new(id: NodeId) -> Self {
        Self { id, weight: WEIGHT_DEFAULT, zone: None, accepts: Accepts::New, max_shards: None }
    }

    /// With the weight of this capacity.
    #[must_use]
    pub fn with_capacity(self, capacity: Capacity) -> Self {
        self.with_weight(capacity.weight())
    }

    /// With this weight.
    #[must_use]
    pub fn with_weight(mut self, weight: u64) -> Self {
        self.weight = weight;
        self
    }

    /// In this zone.
    #[must_use]
    pub fn with_zone(mut self, zone: Option<Label>) -> Self {
        self.zone = zone;
        self
    }

    /// Taking this.
    #[must_use]
    pub fn with_accepts(mut self, accepts: Accepts) -> Self {
        self.accepts = accepts;
        self
    }

    /// Holding at most this many owners' places.
    #[must_use]
    pub fn with_max_shards(mut self, max: Option<u32>) -> Self {
        self.max_shards = max;
        self
    }
}

impl From<&NodeInfo> for Candidate {
    fn from(node: &NodeInfo) -> Self {
        let accepts = match node.declared {
            Declared::Draining => Accepts::KeepOnly,
            _ => Accepts::New,
        };
        Self::new(node.id.clone())
            .with_capacity(node.capacity)
            .with_zone(node.zone.clone())
            .with_accepts(accepts)
    }
}
