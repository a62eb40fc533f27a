//! The difference between one version of a map and the next.
//!
//! Of the changed places come all gaps, as varints, and then all slots, bit-packed: apart, because
//! zstd then finds their patterns. An epoch is the version that changed the owner, so epochs need
//! nothing here, except where they do not follow that.

use super::bits;
use super::epochs;
use super::motions::{self, MOTION_BYTES_MAX};
use super::nodes::{self, NODE_BYTES_MAX};
use super::varint::{self, Reader};
use crate::error::Result;
use crate::types::{
    ANNEX_BYTES_MAX, Motion, NODES_MAX, NodeEntry, ShardId, ShardMap, TableHeader, Version,
};

const NOBODY: u16 = u16::MAX;
/// A changed place takes a gap of at most 4 bytes and a slot of at most 3.
const PLACE_BYTES_MAX: u64 = 7;

/// The longest delta that a table of this header can have, uncompressed.
pub(super) fn bytes_max(header: &TableHeader) -> u64 {
    let shards = u64::from(header.shards.get());
    let places = shards * u64::from(header.replicas.get());
    places * (PLACE_BYTES_MAX + MOTION_BYTES_MAX)
        + shards * (epochs::RUN_BYTES_MAX + MOTION_BYTES_MAX)
        + (NODES_MAX * (NODE_BYTES_MAX + 8) + ANNEX_BYTES_MAX) as u64
        + 64
}

/// Encodes how `new` differs from `old`, the version before it in the same life of the table.
pub(super) fn encode(old: &ShardMap, new: &ShardMap) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    put_nodes(&mut out, &old.nodes, &new.nodes)?;
    put_owners(&mut out, &old.owners, new);
    let none: &[Motion] = &[];
    let ended = old.motions.keys().filter(|shard| !new.motions.contains_key(shard));
    let begun = new.motions.iter().filter(|(shard, moving)| old.motions.get(shard) != Some(moving));
    let mut changed: Vec<(ShardId, &[Motion])> = ended.map(|shard| (*shard, none)).collect();
    changed.extend(begun.map(|(shard, moving)| (*shard, moving.as_slice())));
    changed.sort_unstable_by_key(|(shard, _)| *shard);
    motions::encode(&mut out, &new.header, &changed)?;
    if old.annex == new.annex {
        varint::put(&mut out, 0);
    } else {
        varint::put(&mut out, 1);
        varint::put_bytes(&mut out, &new.annex);
    }
    put_epochs(&mut out, old, new);
    Ok(out)
}

fn put_nodes(
    out: &mut Vec<u8>,
    old: &[Option<NodeEntry>],
    new: &[Option<NodeEntry>],
) -> Result<()> {
    let slots = old.len().max(new.len());
    let at = |nodes: &[Option<NodeEntry>], slot: usize| nodes.get(slot).cloned().flatten();
    let changed: Vec<usize> = (0..slots).filter(|&slot| at(old, slot) != at(new, slot)).collect();
    varint::put(out, new.len() as u64);
    varint::put(out, changed.len() as u64);
    let mut next = 0;
    for slot in changed {
        varint::put(out, (slot - next) as u64);
        next = slot + 1;
        let entry = at(new, slot).map(|node| serde_json::to_vec(&node)).transpose();
        varint::put_bytes(out, &entry.map_err(nodes::unwritable)?.unwrap_or_default());
    }
    Ok(())
}

fn put_owners(out: &mut Vec<u8>, old: &[u16], new: &ShardMap) {
    let (mut gaps, mut slots) = (Vec::new(), Vec::new());
    let mut next = 0;
    for (place, (before, after)) in old.iter().zip(&new.owners).enumerate() {
        if before != after {
            varint::put(&mut gaps, (place - next) as u64);
            slots.push(u32::from(*after));
            next = place + 1;
        }
    }
    let nobody = slot_count(&new.nodes);
    varint::put(out, slots.len() as u64);
    out.extend_from_slice(&gaps);
    let slots = slots.into_iter().map(|slot| slot.min(nobody));
    out.extend_from_slice(&bits::pack(slots, bits::width(nobody)));
}

/// How many slots there are, which is also the number for an empty place among packed slots.
fn slot_count(nodes: &[Option<NodeEntry>]) -> u32 {
    u32::try_from(nodes.len()).unwrap_or(u32::MAX)
}

/// The epochs that are not the ones that [`ShardMap::raise_epochs`] makes of this change.
fn put_epochs(out: &mut Vec<u8>, old: &ShardMap, new: &ShardMap) {
    let mut expected = new.clone();
    expected.epochs = old.epochs.clone();
    expected.raise_epochs(old);
    let pairs = expected.epochs.iter().zip(&new.epochs).enumerate();
    let odd: Vec<_> = pairs.filter(|(_, (expected, epoch))| expected != epoch).collect();
    varint::put(out, odd.len() as u64);
    let mut next = 0;
    for (shard, (_, epoch)) in odd {
        varint::put(out, (shard - next) as u64);
        varint::put(out, *epoch);
        next = shard + 1;
    }
}

/// Turns `map` into the version after it, all but its writer.
pub(super) fn apply(map: &mut ShardMap, version: Version, mut reader: Reader<'_>) -> Result<()> {
    let old = map.clone();
    map.version = version;
    read_nodes(&mut reader, &mut map.nodes)?;
    let known = nodes::known(&map.nodes);
    read_owners(&mut reader, &known, map)?;
    motions::decode(&mut reader, &old.header, &known, &mut map.motions)?;
    if reader.at_most(1, "annex mark")? == 1 {
        map.annex = reader.bytes(ANNEX_BYTES_MAX, "annex")?.into();
    }
    map.raise_epochs(&old);
    let shards = map.epochs.len();
    let mut next = 0;
    for _ in 0..reader.index(shards, "number of odd epochs")? {
        let shard = next + reader.index(shards, "shard of an odd epoch")?;
        let epoch = reader.at_most(map.version.get(), "epoch")?;
        let Some(place) = map.epochs.get_mut(shard) else {
            return Err(reader.corrupt(&format!("an odd epoch of shard {shard} of {shards}")));
        };
        *place = epoch;
        next = shard + 1;
    }
    reader.end()
}

fn read_nodes(reader: &mut Reader<'_>, nodes: &mut Vec<Option<NodeEntry>>) -> Result<()> {
    let slots = reader.index(NODES_MAX, "number of slots")?;
    let most = slots.max(nodes.len());
    nodes.resize(most, None);
    let mut next = 0;
    for _ in 0..reader.index(most, "number of changed nodes")? {
        let slot = next + reader.index(most, "slot")?;
        let entry = reader.bytes(NODE_BYTES_MAX, "node")?;
        let Some(place) = nodes.get_mut(slot) else {
            return Err(reader.corrupt(&format!("a node in slot {slot} of {most}")));
        };
        *place =
            match entry.as_slice() {
                [] => None,
                json => Some(serde_json::from_slice(json).map_err(|source| {
                    reader.corrupt(&format!("slot {slot} is no node: {source}"))
                })?),
            };
        next = slot + 1;
    }
    if nodes[slots..].iter().any(Option::is_some) {
        return Err(reader.corrupt("a node is beyond the last slot"));
    }
    nodes.truncate(slots);
    Ok(())
}

fn read_owners(reader: &mut Reader<'_>, known: &[bool], map: &mut ShardMap) -> Result<()> {
    let places = map.owners.len();
    let count = reader.index(places, "number of changed places")?;
    let mut next = 0;
    let mut changed = Vec::new();
    for _ in 0..count {
        let place = next + reader.index(places, "gap")?;
        if place >= places {
            return Err(reader.corrupt(&format!("a change of place {place} of {places}")));
        }
        changed.push(place);
        next = place + 1;
    }
    let nobody = slot_count(&map.nodes);
    let width = bits::width(nobody);
    let packed = reader.exactly(bits::packed_len(count, width))?;
    let slots = bits::unpack(&packed, count, width);
    let slots = slots.ok_or_else(|| reader.corrupt("bits are left over behind the slots"))?;
    let owners = &mut *map.owners;
    for (place, slot) in changed.into_iter().zip(slots) {
        if slot > nobody {
            return Err(reader.corrupt(&format!("a slot is out of range slot={slot}")));
        }
        owners[place] = if slot == nobody { NOBODY } else { u16::try_from(slot).unwrap_or(NOBODY) };
    }
    // A node may have left the table, so the places that did not change are looked at too.
    let is_known =
        |slot: u16| slot == NOBODY || known.get(usize::from(slot)).copied().unwrap_or(false);
    match map.owners.iter().find(|slot| !is_known(**slot)) {
        Some(odd) => Err(reader.corrupt(&format!("a slot names no node slot={odd}"))),
        None => Ok(()),
    }
}
