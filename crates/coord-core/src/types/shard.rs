//! Shards and tables: the fixed parts of a key space, and the owner of each.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::id::{Incarnation, TableUid};
use super::name::NodeId;
use super::node::{Address, Label};
use super::shared::CopyOnWrite;
use super::term::Fence;
use crate::error::{Error, Result};
use crate::quote::quoted;

/// The most shards a table may have, 2^24.
pub const SHARDS_MAX: u32 = 1 << 24;
/// The most owners a shard may have.
pub const REPLICAS_MAX: u8 = 7;
/// The most nodes one table can name: a slot is 16 bits wide, and one value means "no node".
pub const NODES_MAX: usize = 65_534;
/// The most bytes of a map's annex.
pub const ANNEX_BYTES_MAX: usize = 512 * 1024;

/// One shard, 0 to N − 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ShardId(u32);

impl ShardId {
    /// The shard with this number. Whether a table has it is for the table to say.
    #[must_use]
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// Its number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Its number, to index with.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for ShardId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for ShardId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShardId({})", self.0)
    }
}

/// How many shards a table has, 1 to 2^24; 1024 by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct ShardCount(u32);

impl ShardCount {
    /// One shard.
    pub const ONE: Self = Self(1);

    /// This many.
    ///
    /// # Errors
    /// `Invalid` for 0 and above 2^24.
    pub fn new(count: u32) -> Result<Self> {
        if count == 0 || count > SHARDS_MAX {
            let why = format!("{count} shards; it is 1 to {SHARDS_MAX}");
            return Err(Error::invalid("parse", why));
        }
        Ok(Self(count))
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The shards, in order.
    pub fn shards(self) -> impl ExactSizeIterator<Item = ShardId> + DoubleEndedIterator {
        (0..self.0).map(ShardId)
    }

    /// Whether a table of this many shards has this one.
    #[must_use]
    pub const fn contains(self, shard: ShardId) -> bool {
        shard.0 < self.0
    }
}

impl Default for ShardCount {
    fn default() -> Self {
        Self(1024)
    }
}

impl TryFrom<u32> for ShardCount {
    type Error = Error;
    fn try_from(count: u32) -> Result<Self> {
        Self::new(count)
    }
}

impl From<ShardCount> for u32 {
    fn from(count: ShardCount) -> Self {
        count.0
    }
}

/// How many owners each shard has, 1 to 7; 1 by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct ReplicationFactor(u8);

impl ReplicationFactor {
    /// This many.
    ///
    /// # Errors
    /// `Invalid` for 0 and above 7.
    pub fn new(count: u8) -> Result<Self> {
        if count == 0 || count > REPLICAS_MAX {
            let why = format!("replication factor {count}; it is 1 to {REPLICAS_MAX}");
            return Err(Error::invalid("parse", why));
        }
        Ok(Self(count))
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }
}

impl Default for ReplicationFactor {
    fn default() -> Self {
        Self(1)
    }
}

impl TryFrom<u8> for ReplicationFactor {
    type Error = Error;
    fn try_from(count: u8) -> Result<Self> {
        Self::new(count)
    }
}

impl From<ReplicationFactor> for u8 {
    fn from(count: ReplicationFactor) -> Self {
        count.0
    }
}

/// Counts the published maps of one life of a table, from 0 for the empty one that a claim creates.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(try_from = "u64", into = "u64")]
pub struct Version(u64);

/// The greatest version that is read from a store. It leaves room above, so that a reader that counts on from
/// there never comes to an end.
pub(crate) const VERSION_MAX: u64 = u64::MAX >> 1;

impl Version {
    /// Before anything was published.
    pub const ZERO: Self = Self(0);

    /// The version with this number.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Its number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The next one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl TryFrom<u64> for Version {
    type Error = Error;
    fn try_from(number: u64) -> Result<Self> {
        if number > VERSION_MAX {
            let why = format!("version is out of range found={number} max={VERSION_MAX}");
            return Err(Error::invalid("parse", why));
        }
        Ok(Self(number))
    }
}

impl From<Version> for u64 {
    fn from(version: Version) -> Self {
        version.0
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Rises whenever a shard's owners change, the incarnation included. It is the version of the map that
/// made the change, so it never repeats within one life of a table; 0 where nothing was ever assigned.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Epoch(u64);

impl Epoch {
    /// The epoch with this number.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Its number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How a key becomes a shard. All participants must agree, so it stands in the table's header.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum KeyHash {
    /// XXH3 with 64 bits and seed 0, then multiply-shift: `(u128(hash) × N) >> 64` (Lemire 2019,
    /// "Fast random integer generation in an interval", without the rejection step).
    #[default]
    #[serde(rename = "xxh3-64 seed 0, multiply-shift")]
    Xxh3MultiplyShift,
}

/// The shard of a key under the default [`KeyHash`]. A string counts as its UTF-8 bytes, an integer as 8
/// bytes, big-endian. `docs/vectors` has keys and their shards for other languages to agree with.
///
/// ```
/// # use coord_core::{shard_of, ShardCount};
/// let shards = ShardCount::new(1024).unwrap();
/// assert_eq!(shard_of("order-4711", shards), shard_of(b"order-4711", shards));
/// assert!(shard_of(4711_u64.to_be_bytes(), shards).get() < 1024);
/// ```
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "the quotient is below N")]
pub fn shard_of(key: impl AsRef<[u8]>, shards: ShardCount) -> ShardId {
    let hash = xxhash_rust::xxh3::xxh3_64(key.as_ref());
    ShardId(((u128::from(hash) * u128::from(shards.0)) >> 64) as u32)
}

/// What all users of a table must agree on; written once, when the first claim creates the table.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableHeader {
    /// How many shards there are.
    pub shards: ShardCount,
    /// How many owners each has.
    pub replicas: ReplicationFactor,
    /// How a key becomes a shard.
    pub hash: KeyHash,
}

impl TableHeader {
    /// A header with one replica and the default hash.
    #[must_use]
    pub fn new(shards: ShardCount) -> Self {
        Self { shards, ..Self::default() }
    }

    /// With this many owners for each shard.
    #[must_use]
    pub fn with_replicas(mut self, replicas: ReplicationFactor) -> Self {
        self.replicas = replicas;
        self
    }
}

/// What the cluster holds of a node.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeStatus {
    /// Seen, and not yet taken in.
    Discovered,
    /// Hosts shards and takes new ones.
    Active,
    /// Takes nothing new and keeps what it has until it is evacuated.
    Draining,
    /// Gone or declared so; hosts nothing.
    Failed,
    /// Forgotten.
    Deleted,
}

impl NodeStatus {
    /// The status as one lower-case word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Discovered => "discovered",
            Self::Active => "active",
            Self::Draining => "draining",
            Self::Failed => "failed",
            Self::Deleted => "deleted",
        }
    }

    /// Whether a node in this status may own shards.
    #[must_use]
    pub const fn may_host(self) -> bool {
        matches!(self, Self::Active | Self::Draining)
    }
}

impl fmt::Display for NodeStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for NodeStatus {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        [Self::Discovered, Self::Active, Self::Draining, Self::Failed, Self::Deleted]
            .into_iter()
            .find(|status| status.as_str() == text)
            .ok_or_else(|| Error::invalid("parse", format!("unknown node status {}", quoted(text))))
    }
}

/// The place of a node in a map's node table. It stays the same from version to version while the node
/// is named by any shard.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u16);

impl Slot {
    /// No node: the value that an owner's place holds while it is empty.
    pub const NOBODY: Self = Self(u16::MAX);

    /// The slot with this index.
    #[must_use]
    pub const fn new(index: u16) -> Self {
        Self(index)
    }

    /// Its index, or 65,535 for no node.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Its index, unless it is no node.
    #[must_use]
    pub const fn index(self) -> Option<usize> {
        if self.0 == u16::MAX { None } else { Some(self.0 as usize) }
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.index() {
            Some(index) => write!(f, "Slot({index})"),
            None => f.write_str("Slot(nobody)"),
        }
    }
}

/// A node as a map names it, so that a reader that watches only the maps knows the members too.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeEntry {
    /// Its name.
    pub id: NodeId,
    /// Which run of it.
    pub incarnation: Incarnation,
    /// Where it is reached.
    pub address: Address,
    /// What the cluster holds of it.
    pub status: NodeStatus,
    /// Its failure domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<Label>,
    /// In the reserved table: the version that first held this run as Active or Draining. The lower, the
    /// older the member.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Version>,
}

impl NodeEntry {
    /// An entry without a zone and an age.
    #[must_use]
    pub fn new(id: NodeId, incarnation: Incarnation, address: Address, status: NodeStatus) -> Self {
        Self { id, incarnation, address, status, zone: None, since: None }
    }

    /// A member since this version of the reserved table.
    #[must_use]
    pub fn with_since(mut self, since: Option<Version>) -> Self {
        self.since = since;
        self
    }

    /// In this zone.
    #[must_use]
    pub fn with_zone(mut self, zone: Option<Label>) -> Self {
        self.zone = zone;
        self
    }
}

/// One owner's place of a shard on its way from one node to another.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Motion {
    /// Which of the shard's owners, 0 for the primary.
    pub replica: u8,
    /// The other node: the one that it moves to, or (leaving) the one that has still to stop. The owner itself
    /// where it only has to stop, because no node takes the place.
    pub other: SlotNumber,
    /// Which half of the move this is.
    pub phase: MotionPhase,
    /// The version that began the move; reports at an older one do not count.
    pub since: Version,
}

impl Motion {
    /// A motion of its parts.
    #[must_use]
    pub fn new(replica: u8, other: Slot, phase: MotionPhase, since: Version) -> Self {
        Self { replica, other: SlotNumber(other.0), phase, since }
    }
}

/// A slot as a record holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SlotNumber(u16);

impl From<SlotNumber> for Slot {
    fn from(number: SlotNumber) -> Self {
        Self(number.0)
    }
}

/// Which half of a move is under way.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MotionPhase {
    /// The owner still is the old one; it moves to the other.
    MovingTo,
    /// The owner is the new one already; the other leaves (make before break).
    Leaving,
}

/// The owner of each shard of one table, at one version.
///
/// A map is immutable; [`edit`](Self::edit) makes the next version, which shares with this one what does
/// not change. Looking up an owner is one array access.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardMap {
    pub(crate) header: TableHeader,
    pub(crate) uid: TableUid,
    pub(crate) version: Version,
    pub(crate) writer: Option<Fence>,
    pub(crate) nodes: CopyOnWrite<Vec<Option<NodeEntry>>>,
    /// `shards × replicas` slots, the owners of shard s at `s × replicas`.
    pub(crate) owners: CopyOnWrite<Vec<u16>>,
    pub(crate) epochs: CopyOnWrite<Vec<u64>>,
    pub(crate) motions: CopyOnWrite<BTreeMap<ShardId, Vec<Motion>>>,
    pub(crate) annex: Bytes,
    pub(crate) tally: Tally,
}

/// What is counted of a map when it is first asked for. A clone counts anew, for it may become another map,
/// and it says nothing about the map that the map does not say.
#[derive(Debug, Default)]
pub(crate) struct Tally(OnceLock<(Vec<u32>, usize)>);

impl Clone for Tally {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl PartialEq for Tally {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Tally {}

impl ShardMap {
    /// The map of a table that was just created: version 0, no shard has an owner.
    #[must_use]
    pub fn empty(header: TableHeader, uid: TableUid) -> Self {
        let shards = header.shards.get() as usize;
        let places = shards * usize::from(header.replicas.get());
        Self {
            header,
            uid,
            version: Version::ZERO,
            writer: None,
            nodes: CopyOnWrite::default(),
            owners: vec![u16::MAX; places].into(),
            epochs: vec![0; shards].into(),
            motions: CopyOnWrite::default(),
            annex: Bytes::new(),
            tally: Tally::default(),
        }
    }

    /// What all users of the table agree on.
    #[must_use]
    pub fn header(&self) -> &TableHeader {
        &self.header
    }

    /// Which life of the table this is.
    #[must_use]
    pub fn uid(&self) -> TableUid {
        self.uid
    }

    /// The version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The fence of the leader that wrote this version; none at version 0.
    #[must_use]
    pub fn writer(&self) -> Option<&Fence> {
        self.writer.as_ref()
    }

    /// The node table: a slot is an index into it, and an empty slot is `None`.
    #[must_use]
    pub fn nodes(&self) -> &[Option<NodeEntry>] {
        &self.nodes
    }

    /// The node at a slot.
    #[must_use]
    pub fn node(&self, slot: Slot) -> Option<&NodeEntry> {
        self.nodes.get(slot.index()?)?.as_ref()
    }

    /// The slot of a node, by its name.
    #[must_use]
    pub fn slot_of(&self, id: &NodeId) -> Option<Slot> {
        let index = self.nodes.iter().position(|n| n.as_ref().is_some_and(|n| n.id == *id))?;
        Some(Slot(u16::try_from(index).ok()?))
    }

    /// The slots of a shard's owners, the primary first; `Slot::NOBODY` where a place is empty. Empty
    /// for a shard that the table does not have.
    pub fn owner_slots(&self, shard: ShardId) -> impl ExactSizeIterator<Item = Slot> + '_ {
        let replicas = usize::from(self.header.replicas.get());
        let from = shard.index().saturating_mul(replicas);
        let places = self.owners.get(from..from + replicas).unwrap_or_default();
        places.iter().map(|&slot| Slot(slot))
    }

    /// The primary owner of a shard; `None` while it is orphaned.
    #[must_use]
    pub fn owner(&self, shard: ShardId) -> Option<&NodeEntry> {
        self.node(self.owner_slots(shard).next()?)
    }

    /// All owners of a shard, the primary first, empty places left out.
    pub fn owners(&self, shard: ShardId) -> impl Iterator<Item = &NodeEntry> + '_ {
        self.owner_slots(shard).filter_map(|slot| self.node(slot))
    }

    /// All owners' slots, `shards × replicas` of them, 65,535 for no node; what placement works on.
    #[must_use]
    pub fn raw_owners(&self) -> &[u16] {
        &self.owners
    }

    /// The epoch of a shard.
    #[must_use]
    pub fn epoch(&self, shard: ShardId) -> Epoch {
        Epoch(self.epochs.get(shard.index()).copied().unwrap_or_default())
    }

    /// The shards that are on their way, and how.
    #[must_use]
    pub fn motions(&self) -> &BTreeMap<ShardId, Vec<Motion>> {
        &self.motions
    }

    /// What else this version holds, which backends store and don't read: the reserved table keeps its
    /// state here, and the runtime the reason of a rebalance.
    #[must_use]
    pub fn annex(&self) -> &Bytes {
        &self.annex
    }

    /// The shards whose primary is this node.
    pub fn shards_of<'a>(&'a self, id: &NodeId) -> impl Iterator<Item = ShardId> + 'a {
        let slot = self.slot_of(id).map_or(u16::MAX, Slot::get);
        self.header.shards.shards().filter(move |shard| {
            slot != u16::MAX && self.owner_slots(*shard).next() == Some(Slot(slot))
        })
    }

    /// How many places each slot fills; the index is the slot. Counted once for each map.
    #[must_use]
    pub fn counts(&self) -> Vec<u32> {
        self.tally().0.clone()
    }

    /// How many places this slot fills.
    #[must_use]
    pub fn count(&self, slot: Slot) -> u32 {
        let count = slot.index().and_then(|index| self.tally().0.get(index));
        count.copied().unwrap_or_default()
    }

    /// How many shards have no primary.
    #[must_use]
    pub fn orphans(&self) -> usize {
        self.tally().1
    }

    fn tally(&self) -> &(Vec<u32>, usize) {
        self.tally.0.get_or_init(|| {
            let mut counts = vec![0; self.nodes.len()];
            for &slot in &self.owners {
                if let Some(count) = counts.get_mut(usize::from(slot)) {
                    *count += 1;
                }
            }
            let replicas = usize::from(self.header.replicas.get());
            let primaries = self.owners.iter().step_by(replicas);
            (counts, primaries.filter(|&&slot| slot == u16::MAX).count())
        })
    }

    /// Which slots a shard names, as an owner or in a motion.
    fn named(&self) -> Vec<bool> {
        let mut named = vec![false; self.nodes.len()];
        let motions = self.motions.values().flatten().map(|motion| motion.other.0);
        for slot in self.owners.iter().copied().chain(motions) {
            if let Some(named) = named.get_mut(usize::from(slot)) {
                *named = true;
            }
        }
        named
    }

    /// Gives this map's version, as the new epoch, to every shard whose owners are not those of `base`.
    /// An owner is a node and its incarnation: a slot that now names another run counts as changed.
    pub(crate) fn raise_epochs(&mut self, base: &Self) {
        fn who(map: &ShardMap, slot: u16) -> Option<(&NodeId, Incarnation)> {
            map.node(Slot(slot)).map(|node| (&node.id, node.incarnation))
        }
        let slots = base.nodes.len().max(self.nodes.len());
        let renamed: Vec<bool> = (0..u16::try_from(slots).unwrap_or(u16::MAX))
            .map(|slot| who(base, slot) != who(self, slot))
            .collect();
        if self.owners == base.owners && !renamed.contains(&true) {
            return;
        }
        let is_renamed = |slot: &u16| renamed.get(usize::from(*slot)).copied().unwrap_or(false);
        let replicas = usize::from(self.header.replicas.get());
        let version = self.version.get();
        let pairs = base.owners.chunks_exact(replicas).zip(self.owners.chunks_exact(replicas));
        for ((old, new), epoch) in pairs.zip(self.epochs.iter_mut()) {
            if old != new || new.iter().any(is_renamed) {
                *epoch = version;
            }
        }
    }

    /// Begins the next version.
    #[must_use]
    pub fn edit(&self) -> MapEdit {
        MapEdit { base: self.clone(), next: self.clone(), slots: None, named: None }
    }
}

/// The next version of a map in the making. [`finish`](Self::finish) raises the version and the epochs
/// of all shards whose owners changed.
#[derive(Clone, Debug)]
pub struct MapEdit {
    base: ShardMap,
    next: ShardMap,
    /// The slots by name and the empty ones, found when the first node is put or removed: a cluster of
    /// thousands puts them all.
    slots: Option<Slots>,
    /// Which slots a shard names, found when the first node is removed; none again once owners change.
    named: Option<Vec<bool>>,
}

/// Where the nodes of a table are.
#[derive(Clone, Debug)]
struct Slots {
    by_id: HashMap<NodeId, u16>,
    free: BTreeSet<u16>,
}

impl Slots {
    fn of(nodes: &[Option<NodeEntry>]) -> Self {
        let (mut by_id, mut free) = (HashMap::with_capacity(nodes.len()), BTreeSet::new());
        for (slot, node) in (0..u16::MAX).zip(nodes) {
            match node {
                Some(node) => _ = by_id.insert(node.id.clone(), slot),
                None => _ = free.insert(slot),
            }
        }
        Self { by_id, free }
    }
}

impl MapEdit {
    /// The map as it stands so far; its version and epochs are still the old ones.
    #[must_use]
    pub fn map(&self) -> &ShardMap {
        &self.next
    }

    /// What was counted does not hold any more.
    fn changed(&mut self) {
        self.named = None;
        self.next.tally = Tally::default();
    }

    /// Takes a node into the table, or replaces its entry where its name stands already, and tells its
    /// slot. A slot is used again only when no shard names it.
    ///
    /// # Errors
    /// `Invalid` when the table names 65,534 nodes already.
    pub fn put_node(&mut self, entry: NodeEntry) -> Result<Slot> {
        let slots = self.slots.get_or_insert_with(|| Slots::of(&self.next.nodes));
        if let Some(&slot) = slots.by_id.get(&entry.id) {
            let index = usize::from(slot);
            // What is the same is not copied.
            if self.next.nodes[index].as_ref() != Some(&entry) {
                self.next.nodes[index] = Some(entry);
            }
            return Ok(Slot(slot));
        }
        let index = slots.free.first().map_or(self.next.nodes.len(), |slot| usize::from(*slot));
        if index >= NODES_MAX {
            let why = format!("the map names {NODES_MAX} nodes already, no room for {}", entry.id);
            return Err(Error::invalid("edit map", why));
        }
        let slot = u16::try_from(index).unwrap_or(u16::MAX);
        slots.free.remove(&slot);
        slots.by_id.insert(entry.id.clone(), slot);
        let nodes = &mut *self.next.nodes;
        if index == nodes.len() {
            nodes.push(None);
        }
        nodes[index] = Some(entry);
        self.changed();
        Ok(Slot(slot))
    }

    /// Removes a node from the table.
    ///
    /// # Errors
    /// `Invalid` while a shard still names it.
    pub fn remove_node(&mut self, id: &NodeId) -> Result<()> {
        let slots = self.slots.get_or_insert_with(|| Slots::of(&self.next.nodes));
        let Some(&slot) = slots.by_id.get(id) else { return Ok(()) };
        let index = usize::from(slot);
        let named = self.named.get_or_insert_with(|| self.next.named());
        if named.get(index).copied().unwrap_or(false) {
            return Err(Error::invalid("edit map", format!("node {id} still owns shards")));
        }
        slots.by_id.remove(id);
        slots.free.insert(slot);
        let nodes = &mut *self.next.nodes;
        nodes[index] = None;
        while matches!(nodes.last(), Some(None)) {
            nodes.pop();
            slots.free.pop_last();
        }
        self.next.tally = Tally::default();
        Ok(())
    }

    /// Gives one place of a shard to a node, or empties it.
    ///
    /// # Errors
    /// `Invalid` for a shard or replica that the table does not have, or a slot that names no node.
    pub fn set_owner(&mut self, shard: ShardId, replica: u8, slot: Slot) -> Result<()> {
        let replicas = self.next.header.replicas.get();
        if !self.next.header.shards.contains(shard) || replica >= replicas {
            let why = format!("the table has no shard {shard} with replica {replica}");
            return Err(Error::invalid("edit map", why));
        }
        if slot != Slot::NOBODY && self.next.node(slot).is_none() {
            return Err(Error::invalid("edit map", format!("{slot:?} names no node")));
        }
        self.next.owners[shard.index() * usize::from(replicas) + usize::from(replica)] = slot.0;
        self.changed();
        Ok(())
    }

    /// Replaces all owners at once, as placement makes them.
    ///
    /// # Errors
    /// `Invalid` for another number of places, or a slot that names no node.
    pub fn set_raw_owners(&mut self, owners: Vec<u16>) -> Result<()> {
        if owners.len() != self.next.owners.len() {
            let why = format!("{} places for {}", owners.len(), self.next.owners.len());
            return Err(Error::invalid("edit map", why));
        }
        let known: Vec<bool> = self.next.nodes.iter().map(Option::is_some).collect();
        let odd =
            |slot: u16| slot != u16::MAX && !known.get(usize::from(slot)).copied().unwrap_or(false);
        if let Some(odd) = owners.iter().find(|&&slot| odd(slot)) {
            return Err(Error::invalid("edit map", format!("slot {odd} names no node")));
        }
        if owners != *self.next.owners {
            self.next.owners = owners.into();
            self.changed();
        }
        Ok(())
    }

    /// Says which parts of a shard are on their way; none ends its motion.
    ///
    /// # Errors
    /// `Invalid` for a shard or replica that the table does not have, or a slot that names no node.
    pub fn set_motions(&mut self, shard: ShardId, motions: Vec<Motion>) -> Result<()> {
        let bad = |m: &Motion| {
            m.replica >= self.next.header.replicas.get() || self.next.node(m.other.into()).is_none()
        };
        if !self.next.header.shards.contains(shard) || motions.iter().any(bad) {
            return Err(Error::invalid("edit map", format!("bad motion of shard {shard}")));
        }
        self.changed();
        if motions.is_empty() {
            self.next.motions.remove(&shard);
        } else {
            self.next.motions.insert(shard, motions);
        }
        Ok(())
    }

    /// Replaces the annex.
    ///
    /// # Errors
    /// `Invalid` above 512 KiB.
    pub fn set_annex(&mut self, annex: Bytes) -> Result<()> {
        if annex.len() > ANNEX_BYTES_MAX {
            let why = format!("annex of {} bytes; at most {ANNEX_BYTES_MAX}", annex.len());
            return Err(Error::invalid("edit map", why));
        }
        self.next.annex = annex;
        Ok(())
    }

    /// The next version, written under this fence; `None` if nothing changed, so that nothing is written.
    #[must_use]
    pub fn finish(self, writer: Fence) -> Option<ShardMap> {
        let Self { base, mut next, .. } = self;
        if next == base {
            return None;
        }
        next.version = base.version.next();
        next.writer = Some(writer);
        next.raise_epochs(&base);
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{AttemptId, LeaseName, Origin, Term};

    fn fence() -> Fence {
        let lease = LeaseName::leader();
        Fence::new(lease, Term::from_u64(7), AttemptId::from_u128(1), Origin::new("memory:1/c"))
    }

    fn entry(name: &str, incarnation: u128) -> NodeEntry {
        NodeEntry::new(
            NodeId::new(name).expect("name"),
            Incarnation::from_u128(incarnation),
            Address::new("127.0.0.1:1").expect("address"),
            NodeStatus::Active,
        )
    }

    fn map() -> ShardMap {
        let header = TableHeader::new(ShardCount::new(4).expect("count"));
        ShardMap::empty(header, TableUid::from_u128(9))
    }

    #[test]
    fn keys_spread_and_stay_in_range() {
        let shards = ShardCount::new(7).expect("count");
        let mut seen = [0; 7];
        for key in 0..7_000_u64 {
            seen[shard_of(key.to_be_bytes(), shards).index()] += 1;
        }
        assert!(seen.iter().all(|n| (800..1200).contains(n)), "{seen:?}");
        assert_eq!(shard_of("", ShardCount::new(1).expect("count")), ShardId::new(0));
    }

    #[test]
    fn an_edit_raises_version_and_the_changed_epochs_only() {
        let mut edit = map().edit();
        let slot = edit.put_node(entry("n1", 1)).expect("room");
        edit.set_owner(ShardId::new(2), 0, slot).expect("in range");
        let map = edit.finish(fence()).expect("changed");
        assert_eq!(map.version(), Version::new(1));
        assert_eq!(map.epoch(ShardId::new(2)), Epoch::new(1));
        assert_eq!(map.epoch(ShardId::new(0)), Epoch::new(0));
        assert_eq!(map.owner(ShardId::new(2)).expect("owner").id.as_str(), "n1");
        assert_eq!(map.orphans(), 3);
        assert!(map.edit().finish(fence()).is_none(), "nothing changed, nothing to write");
    }

    #[test]
    fn a_new_incarnation_in_the_same_slot_raises_the_epoch() {
        let mut edit = map().edit();
        let slot = edit.put_node(entry("n1", 1)).expect("room");
        edit.set_owner(ShardId::new(0), 0, slot).expect("in range");
        let map = edit.finish(fence()).expect("changed");
        let mut edit = map.edit();
        assert_eq!(edit.put_node(entry("n1", 2)).expect("room"), slot);
        let map = edit.finish(fence()).expect("changed");
        assert_eq!(map.epoch(ShardId::new(0)), Epoch::new(2));
        assert_eq!(map.epoch(ShardId::new(1)), Epoch::new(0));
    }

    #[test]
    fn the_next_version_shares_what_did_not_change() {
        let mut edit = map().edit();
        let slot = edit.put_node(entry("n1", 1)).expect("room");
        edit.set_raw_owners(vec![slot.get(); 4]).expect("known");
        let old = edit.finish(fence()).expect("changed");
        let mut edit = old.edit();
        edit.put_node(entry("n1", 1)).expect("the same");
        edit.set_raw_owners(vec![slot.get(); 4]).expect("the same");
        edit.set_annex(Bytes::from_static(b"news")).expect("small");
        let new = edit.finish(fence()).expect("changed");
        let same = |old: *const u8, new: *const u8| assert_eq!(old, new, "it was copied");
        same(old.nodes.as_ptr().cast(), new.nodes.as_ptr().cast());
        same(old.owners.as_ptr().cast(), new.owners.as_ptr().cast());
        same(old.epochs.as_ptr().cast(), new.epochs.as_ptr().cast());
        let mut edit = new.edit();
        edit.set_owner(ShardId::new(1), 0, Slot::NOBODY).expect("in range");
        let next = edit.finish(fence()).expect("changed");
        assert_eq!((new.orphans(), next.orphans()), (0, 1));
        assert_eq!(new.epoch(ShardId::new(1)), Epoch::new(1));
    }

    #[test]
    fn an_empty_slot_is_filled_first_and_one_that_is_named_stays() {
        let name = |name: &str| NodeId::new(name).expect("name");
        let mut edit = map().edit();
        for (at, id) in (0..).zip(["n1", "n2", "n3", "n4"]) {
            assert_eq!(edit.put_node(entry(id, 1)).expect("room"), Slot::new(at));
        }
        edit.set_owner(ShardId::new(0), 0, Slot::new(2)).expect("in range");
        edit.remove_node(&name("n4")).expect("owns nothing");
        edit.remove_node(&name("n2")).expect("owns nothing");
        assert!(edit.remove_node(&name("n3")).is_err());
        assert_eq!(edit.put_node(entry("n5", 1)).expect("room"), Slot::new(1));
        assert_eq!(edit.put_node(entry("n6", 1)).expect("room"), Slot::new(3));
        edit.set_owner(ShardId::new(0), 0, Slot::NOBODY).expect("in range");
        edit.remove_node(&name("n6")).expect("owns nothing");
        edit.remove_node(&name("n3")).expect("owns nothing any more");
        let map = edit.finish(fence()).expect("changed");
        assert_eq!(map.slot_of(&name("n5")), Some(Slot::new(1)));
        assert_eq!(map.nodes().len(), 2, "empty slots at the end are none");
    }

    #[test]
    fn bad_edits_are_refused() {
        let mut edit = map().edit();
        assert!(edit.set_owner(ShardId::new(4), 0, Slot::NOBODY).is_err());
        assert!(edit.set_owner(ShardId::new(0), 1, Slot::NOBODY).is_err());
        assert!(edit.set_owner(ShardId::new(0), 0, Slot::new(0)).is_err());
        assert!(edit.set_raw_owners(vec![0; 4]).is_err());
        assert!(edit.set_raw_owners(vec![u16::MAX; 3]).is_err());
        let slot = edit.put_node(entry("n1", 1)).expect("room");
        edit.set_owner(ShardId::new(0), 0, slot).expect("in range");
        assert!(edit.remove_node(&NodeId::new("n1").expect("name")).is_err());
        edit.set_owner(ShardId::new(0), 0, Slot::NOBODY).expect("in range");
        edit.remove_node(&NodeId::new("n1").expect("name")).expect("owns nothing");
        assert!(edit.map().nodes().is_empty());
    }
}
