//! The owners of shards, in the flat form that planning works on.

use std::collections::{BTreeMap, HashMap, HashSet};

use coord_core::{
    Error, MapEdit, NODES_MAX, NodeId, ReplicationFactor, Result, ShardCount, ShardId, ShardMap,
    Slot,
};

use crate::error::PlanError;

const NOBODY: u16 = u16::MAX;

/// The owners of shards: a node table, and for each shard the slots of its owners, the primary first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    shards: ShardCount,
    replicas: ReplicationFactor,
    nodes: Vec<Option<NodeId>>,
    /// `shards × replicas` slots, 65,535 for no node.
    owners: Vec<u16>,
    /// How many places each slot fills; the last entry counts the empty ones. Kept, since a plan would
    /// have to read the whole map for it.
    counts: Vec<u32>,
}

impl Assignment {
    /// No shard has an owner.
    #[must_use]
    pub fn empty(shards: ShardCount, replicas: ReplicationFactor) -> Self {
        let owners = vec![NOBODY; places(shards, replicas)];
        let counts = vec![u32::try_from(owners.len()).unwrap_or(u32::MAX)];
        Self { shards, replicas, nodes: Vec::new(), owners, counts }
    }

    /// An assignment of its parts: `nodes[slot]` names the node of a slot, and `owners` holds
    /// shards × replicas slots, those of shard s from s × replicas on, 65,535 for an empty place. A shard
    /// may name a node twice: a plan takes the second for a place that is missing.
    ///
    /// # Errors
    /// `WrongLength`, `TooManyNodes`, `DuplicateNode`, or `UnknownSlot` for a slot that names no node.
    pub fn new(
        shards: ShardCount,
        replicas: ReplicationFactor,
        nodes: Vec<Option<NodeId>>,
        owners: Vec<u16>,
    ) -> Result<Self, PlanError> {
        let expected = places(shards, replicas);
        if owners.len() != expected {
            return Err(PlanError::WrongLength { places: owners.len(), expected });
        }
        if nodes.len() > NODES_MAX {
            return Err(PlanError::TooManyNodes { nodes: nodes.len() });
        }
        let mut seen = HashSet::with_capacity(nodes.len());
        if let Some(twice) = nodes.iter().flatten().find(|id| !seen.insert(*id)) {
            return Err(PlanError::DuplicateNode(twice.clone()));
        }
        let (counts, unnamed) = count(&owners, nodes.len());
        let no_node = |slot: &u16| !matches!(nodes.get(usize::from(*slot)), Some(Some(_)));
        if unnamed || nodes.iter().zip(&counts).any(|(node, &count)| node.is_none() && count > 0) {
            let unknown = |slot: &u16| *slot != NOBODY && no_node(slot);
            if let Some(place) = owners.iter().position(unknown) {
                return Err(PlanError::UnknownSlot { slot: owners[place], place });
            }
        }
        Ok(Self { shards, replicas, nodes, owners, counts })
    }

    /// What a map says, with the same slots.
    ///
    /// # Errors
    /// As [`new`](Self::new), for a map that is damaged.
    pub fn from_map(map: &ShardMap) -> Result<Self, PlanError> {
        let nodes = map.nodes().iter().map(|node| Some(node.as_ref()?.id.clone())).collect();
        let header = map.header();
        Self::new(header.shards, header.replicas, nodes, map.raw_owners().to_vec())
    }

    /// Writes all owners into the next version of a map. Slots are matched by node id, so the map's node
    /// table may differ; it must name every node that owns a shard here.
    ///
    /// # Errors
    /// `Invalid` for a map with another number of shards or replicas, or without one of the owners.
    pub fn write_to(&self, edit: &mut MapEdit) -> Result<()> {
        let header = edit.map().header();
        if (header.shards, header.replicas) != (self.shards, self.replicas) {
            let why = format!(
                "an assignment of {} shards with {} replicas for a map of {} with {}",
                self.shards.get(),
                self.replicas.get(),
                header.shards.get(),
                header.replicas.get(),
            );
            return Err(Error::invalid("edit map", why));
        }
        let theirs: HashMap<&NodeId, u16> = (0..NOBODY)
            .zip(edit.map().nodes())
            .filter_map(|(slot, node)| Some((&node.as_ref()?.id, slot)))
            .collect();
        let slots: Vec<Option<u16>> =
            self.nodes.iter().map(|id| theirs.get(id.as_ref()?).copied()).collect();
        let translate = |&slot: &u16| match slots.get(usize::from(slot)) {
            None => Ok(NOBODY),
            Some(Some(slot)) => Ok(*slot),
            Some(None) => {
                let id = self.node(Slot::new(slot)).map_or("nobody", NodeId::as_str);
                Err(Error::invalid("edit map", format!("the map does not name node {id}")))
            }
        };
        let owners = self.owners.iter().map(translate).collect::<Result<Vec<_>>>()?;
        edit.set_raw_owners(owners)
    }

    /// How many shards there are.
    #[must_use]
    pub fn shards(&self) -> ShardCount {
        self.shards
    }

    /// How many owners each should have.
    #[must_use]
    pub fn replicas(&self) -> ReplicationFactor {
        self.replicas
    }

    /// The node table; an empty slot is `None`.
    #[must_use]
    pub fn nodes(&self) -> &[Option<NodeId>] {
        &self.nodes
    }

    /// The node at a slot.
    #[must_use]
    pub fn node(&self, slot: Slot) -> Option<&NodeId> {
        self.nodes.get(slot.index()?)?.as_ref()
    }

    /// All owners' slots, shards × replicas of them, 65,535 for no node.
    #[must_use]
    pub fn raw_owners(&self) -> &[u16] {
        &self.owners
    }

    /// The slots of a shard's owners, the primary first, `Slot::NOBODY` where a place is empty; none for
    /// a shard that is out of range.
    pub fn owner_slots(&self, shard: ShardId) -> impl ExactSizeIterator<Item = Slot> + '_ {
        let replicas = usize::from(self.replicas.get());
        let from = shard.index().saturating_mul(replicas);
        let places = self.owners.get(from..from + replicas).unwrap_or_default();
        places.iter().map(|&slot| Slot::new(slot))
    }

    /// The primary owner of a shard.
    #[must_use]
    pub fn owner(&self, shard: ShardId) -> Option<&NodeId> {
        self.node(self.owner_slots(shard).next()?)
    }

    /// All owners of a shard, the primary first, empty places left out.
    pub fn owners(&self, shard: ShardId) -> impl Iterator<Item = &NodeId> + '_ {
        self.owner_slots(shard).filter_map(|slot| self.node(slot))
    }

    /// How many owners' places each node of the table fills.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<&NodeId, u64> {
        let counts = self.counts.iter().map(|&count| u64::from(count));
        self.nodes.iter().zip(counts).filter_map(|(id, n)| Some((id.as_ref()?, n))).collect()
    }

    /// How many places each slot fills; the last entry counts the empty ones.
    pub(crate) fn slot_counts(&self) -> &[u32] {
        &self.counts
    }

    /// The same shards with another node table and other owners; both were made by a strategy.
    pub(crate) fn with_parts(
        &self,
        nodes: Vec<Option<NodeId>>,
        owners: Vec<u16>,
        counts: Vec<u32>,
    ) -> Self {
        debug_assert_eq!(owners.len(), self.owners.len());
        debug_assert_eq!(count(&owners, nodes.len()), (counts.clone(), false));
        Self { shards: self.shards, replicas: self.replicas, nodes, owners, counts }
    }
}

/// How many places each of so many slots fills, and in one more entry how many no slot fills; and
/// whether some of the latter name a slot all the same.
fn count(owners: &[u16], slots: usize) -> (Vec<u32>, bool) {
    // Four tables, because runs of one slot would make each increment wait for the last.
    let mut tables = vec![[0_u32; 4]; slots + 1];
    let (fours, rest) = owners.as_chunks::<4>();
    let mut empty = 0_u32;
    for four in fours {
        for (lane, &slot) in four.iter().enumerate() {
            empty += u32::from(slot == NOBODY);
            tables[usize::from(slot).min(slots)][lane] += 1;
        }
    }
    for &slot in rest {
        empty += u32::from(slot == NOBODY);
        tables[usize::from(slot).min(slots)][0] += 1;
    }
    let counts: Vec<u32> = tables.iter().map(|lanes| lanes.iter().sum()).collect();
    let unnamed = counts[slots] != empty;
    (counts, unnamed)
}

fn places(shards: ShardCount, replicas: ReplicationFactor) -> usize {
    shards.get() as usize * usize::from(replicas.get())
}
