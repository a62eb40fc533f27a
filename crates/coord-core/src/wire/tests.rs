use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use xxhash_rust::xxh3::xxh3_128;

use super::chunk::{self, Life, Section};
use super::part::{Hash, Part};
use super::varint::Reader;
use super::*;
use crate::types::*;
use crate::{ErrorKind, Result};

const MEBIBYTE: usize = 1 << 20;

fn limits() -> WireLimits {
    WireLimits::new(MEBIBYTE - 4096).expect("large enough")
}

fn fence(term: u64) -> Fence {
    let attempt = AttemptId::from_u128(u128::from(term) << 100 | 77);
    Fence::new(LeaseName::leader(), Term::from_u64(term), attempt, Origin::new("memory:1/c"))
}

fn entry(number: usize, incarnation: u128) -> NodeEntry {
    let name = NodeId::new(format!("node-{number}.eu.example")).expect("name");
    let address =
        Address::new(format!("10.0.{}.{}:7{:03}", number >> 8, number & 255, number % 1000));
    let zone = Label::new(format!("eu-{}", number % 3)).expect("label");
    NodeEntry::new(
        name,
        Incarnation::from_u128(incarnation),
        address.expect("address"),
        NodeStatus::Active,
    )
    .with_zone((!number.is_multiple_of(5)).then_some(zone))
}

fn header(shards: u32, replicas: u8) -> TableHeader {
    TableHeader::new(ShardCount::new(shards).expect("count"))
        .with_replicas(ReplicationFactor::new(replicas).expect("factor"))
}

/// A slot that names a node, or nobody.
fn any_slot(map: &ShardMap, rng: &mut StdRng) -> u16 {
    let known: Vec<u16> =
        (0..).zip(&map.nodes).filter_map(|(n, node)| node.as_ref().map(|_| n)).collect();
    match rng.random_range(0..=known.len()) {
        place if place < known.len() => known[place],
        _ => u16::MAX,
    }
}

fn set_motions(map: &mut ShardMap, rng: &mut StdRng) {
    for _ in 0..rng.random_range(0..4) {
        let shard = ShardId::new(rng.random_range(0..map.header.shards.get()));
        let (other, replicas) = (any_slot(map, rng), map.header.replicas.get());
        let phase = if rng.random() { MotionPhase::MovingTo } else { MotionPhase::Leaving };
        let motion =
            Motion::new(rng.random_range(0..replicas), Slot::new(other), phase, map.version);
        if other == u16::MAX || rng.random() {
            map.motions.remove(&shard);
        } else {
            map.motions.insert(shard, vec![motion; rng.random_range(1..=replicas.into())]);
        }
    }
}

/// Any map: with holes in its node table, in runs or scattered, with epochs of all sorts.
fn any_map(rng: &mut StdRng, shards: u32, replicas: u8, nodes: usize) -> ShardMap {
    let mut map = ShardMap::empty(header(shards, replicas), TableUid::from_u128(rng.random()));
    let width = rng.random_range(1..60);
    map.version = Version::new(rng.random_range(1..1 << width));
    map.writer = Some(fence(rng.random_range(1..1 << 52)));
    let entries = (0..nodes).map(|n| rng.random_bool(0.8).then(|| entry(n, rng.random())));
    map.nodes = entries.collect::<Vec<_>>().into();
    let stay = if rng.random() { 0.0 } else { 0.95 };
    let mut slot = any_slot(&map, rng);
    for place in 0..map.owners.len() {
        if !rng.random_bool(stay) {
            slot = any_slot(&map, rng);
        }
        map.owners[place] = slot;
    }
    let version = map.version.get();
    match rng.random_range(0..3) {
        0 => map.epochs.fill(rng.random_range(0..=version)),
        1 => map.epochs.iter_mut().for_each(|epoch| *epoch = rng.random_range(0..=version)),
        _ => {}
    }
    set_motions(&mut map, rng);
    if rng.random_bool(0.3) {
        map.annex = (0..rng.random_range(1..2000)).map(|_| rng.random::<u8>()).collect();
    }
    map
}

/// Any next version: nodes that come, go, restart and change; owners, motions and annex that
/// change.
fn any_next(rng: &mut StdRng, old: &ShardMap) -> ShardMap {
    let mut new = old.clone();
    new.version = old.version.next();
    new.writer =
        Some(fence(old.writer.as_ref().expect("writer").term.get() + rng.random_range(0..2)));
    for _ in 0..rng.random_range(0..3) {
        let slot = rng.random_range(0..=new.nodes.len());
        if slot == new.nodes.len() {
            new.nodes.push(Some(entry(1000 + slot, rng.random())));
        } else if new.nodes[slot].is_none() || rng.random() {
            new.nodes[slot] = Some(entry(slot, rng.random()));
        } else {
            let gone = u16::try_from(slot).expect("few");
            new.nodes[slot] = None;
            new.owners
                .iter_mut()
                .filter(|owner| **owner == gone)
                .for_each(|owner| *owner = u16::MAX);
            new.motions
                .retain(|_, motions| motions.iter().all(|m| Slot::from(m.other).get() != gone));
        }
    }
    while matches!(new.nodes.last(), Some(None)) {
        new.nodes.pop();
    }
    for _ in 0..rng.random_range(0..9) {
        let place = rng.random_range(0..new.owners.len());
        new.owners[place] = any_slot(&new, rng);
    }
    set_motions(&mut new, rng);
    if rng.random_bool(0.1) {
        new.annex = vec![7; rng.random_range(0..9)].into();
    }
    new.raise_epochs(old);
    if rng.random_bool(0.1) {
        let shard = rng.random_range(0..new.epochs.len());
        new.epochs[shard] = rng.random_range(0..=new.version.get());
    }
    new
}

/// What a store holds of a table: the manifest's bytes, and all chunks ever written.
#[derive(Clone, Default)]
struct Store {
    manifest: Bytes,
    chunks: HashMap<ChunkKey, Bytes>,
}

impl Store {
    fn write(&mut self, encoded: EncodedMap) -> Manifest {
        self.manifest = encoded.manifest.encode().expect("encodes");
        for (key, bytes) in encoded.chunks {
            assert_eq!(key.to_string().parse::<ChunkKey>().expect("a key"), key);
            let before = self.chunks.insert(key, bytes.clone());
            assert!(before.is_none_or(|before| before == bytes), "a key names one content");
        }
        let manifest = Manifest::decode(&self.manifest).expect("decodes");
        assert_eq!(manifest, encoded.manifest);
        manifest
    }

    fn read(&self, have: Option<&ShardMap>) -> Result<ShardMap> {
        let manifest = Manifest::decode(&self.manifest)?;
        let fetch = |key| Some((key, self.chunks.get(&key)?.clone()));
        let chunks = manifest.needed(have).into_iter().filter_map(fetch).collect();
        manifest.assemble(have, &chunks)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_map_and_the_maps_after_it_read_back(
        seed: u64, shards in 1..400_u32, replicas in 1..=4_u8, nodes in 0..40_usize, inline: bool,
    ) {
        let mut rng = StdRng::seed_from_u64(seed);
        let limits = if inline { limits() } else { limits().without_inline() };
        let mut map = any_map(&mut rng, shards, replicas, nodes);
        let first = map.clone();
        let mut store = Store::default();
        let mut manifest = store.write(encode_map(&map, limits).expect("encodes"));
        prop_assert_eq!(&store.read(None).expect("reads"), &map);
        for _ in 0..5 {
            let next = any_next(&mut rng, &map);
            let encoded = encode_next(&manifest, &map, &next, limits).expect("encodes");
            let again = encode_next(&manifest, &map, &next, limits).expect("encodes");
            prop_assert_eq!(&encoded, &again, "a publish that is retried writes the same");
            manifest = store.write(encoded);
            prop_assert_eq!(&store.read(None).expect("reads"), &next);
            prop_assert_eq!(&store.read(Some(&map)).expect("reads"), &next);
            prop_assert_eq!(&store.read(Some(&next)).expect("reads"), &next);
            prop_assert_eq!(&store.read(Some(&first)).expect("reads"), &next);
            prop_assert!(manifest.needed(Some(&next)).is_empty());
            map = next;
        }
    }

    #[test]
    fn what_is_damaged_is_corrupt_or_the_same(
        seed: u64, shards in 1..400_u32, nodes in 0..40_usize,
    ) {
        let mut rng = StdRng::seed_from_u64(seed);
        let limits = if rng.random() { limits() } else { limits().without_inline() };
        let old = any_map(&mut rng, shards, 2, nodes);
        let map = any_next(&mut rng, &old);
        let mut store = Store::default();
        let manifest = store.write(encode_map(&old, limits).expect("encodes"));
        store.write(encode_next(&manifest, &old, &map, limits).expect("encodes"));
        for _ in 0..20 {
            let mut damaged = store.clone();
            damage(&mut rng, &mut damaged);
            for have in [None, Some(&old)] {
                match damaged.read(have) {
                    Ok(read) => prop_assert_eq!(&read, &map),
                    Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error),
                }
            }
        }
    }

    /// A hostile writer makes every checksum and hash right; still nothing panics, and what is no
    /// map is refused.
    #[test]
    fn what_is_forged_is_corrupt_or_the_same(
        seed: u64, shards in 1..200_u32, nodes in 0..20_usize,
    ) {
        let mut rng = StdRng::seed_from_u64(seed);
        let limits = limits().without_inline();
        let old = any_map(&mut rng, shards, 2, nodes);
        let map = any_next(&mut rng, &old);
        let mut store = Store::default();
        let manifest = store.write(encode_map(&old, limits).expect("encodes"));
        let manifest = store.write(encode_next(&manifest, &old, &map, limits).expect("encodes"));
        for _ in 0..20 {
            let (forged, chunks) = forge(&mut rng, &manifest, &store.chunks);
            match forged.assemble(None, &chunks) {
                Ok(read) => prop_assert_eq!(&read, &map),
                Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error),
            }
        }
        let raw = delta::encode(&old, &map).expect("encodes");
        for _ in 0..50 {
            let mut forged = raw.clone();
            for _ in 0..rng.random_range(1..4) {
                let at = rng.random_range(0..forged.len());
                forged[at] = rng.random();
            }
            if let Err(error) = delta::apply(&mut old.clone(), map.version, Reader::new("test", &forged)) {
                prop_assert_eq!(error.kind(), ErrorKind::Corrupt);
            }
        }
    }
}

/// Flips a bit, cuts, or exchanges two values.
fn damage(rng: &mut StdRng, store: &mut Store) {
    let mut keys: Vec<ChunkKey> = store.chunks.keys().copied().collect();
    keys.sort_unstable();
    let key = (!keys.is_empty() && rng.random()).then(|| keys[rng.random_range(0..keys.len())]);
    if let Some(key) = key.filter(|_| rng.random_bool(0.2)) {
        let other = store.chunks[&keys[rng.random_range(0..keys.len())]].clone();
        store.chunks.insert(key, other);
        return;
    }
    let value = key.map_or(&store.manifest, |key| &store.chunks[&key]);
    let mut bytes = value.to_vec();
    let at = rng.random_range(0..bytes.len());
    if rng.random_bool(0.2) {
        bytes.truncate(at);
    } else {
        bytes[at] ^= 1 << rng.random_range(0..8);
    }
    match key {
        Some(key) => store.chunks.insert(key, bytes.into()).map_or((), drop),
        None => store.manifest = bytes.into(),
    }
}

fn forge(
    rng: &mut StdRng,
    manifest: &Manifest,
    chunks: &HashMap<ChunkKey, Bytes>,
) -> (Manifest, HashMap<ChunkKey, Bytes>) {
    let (mut manifest, mut chunks) = (manifest.clone(), chunks.clone());
    let deltas = manifest.deltas.len();
    let part = match rng.random_range(0..=deltas) {
        number if number < deltas => &mut manifest.deltas[number],
        _ => &mut manifest.base,
    };
    let index = rng.random_range(0..part.chunks.len());
    let mut bytes = chunks[&part.key(index)].to_vec();
    for _ in 0..rng.random_range(1..4) {
        let at = rng.random_range(0..bytes.len());
        bytes[at] = rng.random();
    }
    if rng.random_bool(0.3) {
        bytes.extend(vec![0; rng.random_range(1..9)]);
    }
    let body = chunk::length(bytes.len() - 48).expect("short");
    bytes[36..40].copy_from_slice(&body.to_le_bytes());
    part.chunks[index].bytes = chunk::length(bytes.len()).expect("short");
    part.chunks[index].hash = Hash(xxh3_128(&bytes));
    chunks.insert(part.key(index), bytes.into());
    (manifest, chunks)
}

#[test]
fn a_manifest_of_a_newer_format_is_refused_and_unknown_fields_are_not() {
    let mut rng = StdRng::seed_from_u64(1);
    let map = any_map(&mut rng, 8, 1, 3);
    let encoded = encode_map(&map, limits()).expect("encodes");
    let json =
        String::from_utf8(encoded.manifest.encode().expect("encodes").to_vec()).expect("utf-8");
    let more = json.replacen('{', "{\"colour\":\"blue\",", 1);
    assert_eq!(Manifest::decode(more.as_bytes()).expect("decodes"), encoded.manifest);
    let newer = json.replacen("\"format\":1", "\"format\":2", 1);
    let error = Manifest::decode(newer.as_bytes()).expect_err("newer");
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("found=2 supported=1..=1"), "{error}");
}

/// Whoever counts on from a number that was read must not come to its end.
#[test]
fn a_version_that_leaves_no_next_one_is_corrupt_by_its_name() {
    let mut rng = StdRng::seed_from_u64(4);
    let mut map = any_map(&mut rng, 8, 1, 3);
    map.epochs.fill(7);
    for (number, good) in [(VERSION_MAX, true), (VERSION_MAX + 1, false), (u64::MAX, false)] {
        map.version = Version::new(number);
        let manifest = encode_map(&map, limits()).expect("encodes").manifest;
        let read = Manifest::decode(&manifest.encode().expect("encodes"));
        assert_eq!(read.is_ok(), good, "{number}");
        let Err(error) = read else { continue };
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        let why = format!("version is out of range found={number} max={VERSION_MAX}");
        assert!(error.to_string().contains(&why), "{error}");
    }
    let last = Version::new(VERSION_MAX);
    assert!(last.next() > last && Version::new(u64::MAX).next() == Version::new(u64::MAX));
    map.version = Version::new(8);
    map.nodes = vec![Some(entry(0, 1))].into();
    map.owners.fill(0);
    let motion = Motion::new(0, Slot::new(0), MotionPhase::MovingTo, Version::new(u64::MAX));
    map.motions = BTreeMap::from([(ShardId::new(1), vec![motion])]).into();
    let manifest = encode_map(&map, limits()).expect("encodes").manifest;
    let error = manifest.assemble(None, &HashMap::new()).expect_err("a motion of no version");
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("version that began a motion is out of range"), "{error}");
}

/// The manifest's hash is what tells of damage, whatever the chunk says of itself.
#[test]
fn any_change_of_a_chunk_is_told_by_its_hash() {
    let mut rng = StdRng::seed_from_u64(6);
    let map = any_map(&mut rng, 64, 2, 5);
    let encoded = encode_map(&map, limits().without_inline()).expect("encodes");
    for (key, bytes) in &encoded.chunks {
        for at in (0..bytes.len()).step_by(7) {
            let mut chunks: HashMap<_, _> = encoded.chunks.iter().cloned().collect();
            let mut damaged = bytes.to_vec();
            damaged[at] ^= 1;
            chunks.insert(*key, damaged.into());
            let error = encoded.manifest.assemble(None, &chunks).expect_err("damaged");
            let why = format!("its content is not the key's key={key}");
            assert!(error.to_string().contains(&why), "{error}");
        }
    }
}

#[test]
fn a_missing_or_foreign_chunk_is_named() {
    let mut rng = StdRng::seed_from_u64(2);
    let map = any_map(&mut rng, 64, 1, 3);
    let encoded = encode_map(&map, limits().without_inline()).expect("encodes");
    let missing = encoded.manifest.assemble(None, &HashMap::new()).expect_err("missing");
    let named = |key: &ChunkKey| missing.to_string().contains(&key.to_string());
    assert!(encoded.chunks.iter().any(|(key, _)| named(key)), "{missing}");
    assert!(missing.to_string().contains(&map.uid.to_string()), "{missing}");
}

/// A store that was restored from a backup may hold another map under a version that a reader has.
#[test]
fn a_map_of_another_history_is_not_built_upon() {
    let mut rng = StdRng::seed_from_u64(3);
    let limits = limits().without_inline();
    let mut old = any_map(&mut rng, 4000, 1, 9);
    old.owners.iter_mut().for_each(|slot| *slot = u16::MAX);
    let mut other = old.clone();
    other.annex = Bytes::from_static(b"another history");
    let mut next = old.clone();
    next.version = old.version.next();
    let mut store = Store::default();
    let manifest = store.write(encode_map(&old, limits).expect("encodes"));
    let manifest = store.write(encode_next(&manifest, &old, &next, limits).expect("encodes"));
    assert_eq!(manifest.deltas.len(), 1, "a small change of a large map is a delta");
    assert_eq!(manifest.needed(Some(&old)).len(), 1);
    assert_eq!(manifest.needed(Some(&other)).len(), manifest.needed(None).len());
    assert_eq!(store.read(Some(&other)).expect("reads"), next);
    let mut following = other.clone();
    following.version = other.version.next();
    let based = encode_next(&manifest, &other, &following, limits).expect("encodes");
    assert!(based.manifest.deltas.is_empty(), "nor is it by a writer");
    assert!(encode_next(&manifest, &old, &old, limits).is_err());
}

#[test]
fn compaction_is_due_past_a_quarter_or_64_deltas() {
    assert!(!is_compaction_due(4000, 1000, 64));
    assert!(is_compaction_due(4000, 1001, 1));
    assert!(is_compaction_due(4000, 0, 65));
}

#[test]
fn deltas_gather_until_a_new_base_is_written() {
    let mut map = large(65_536, 1, 100);
    let mut store = Store::default();
    let mut manifest = store.write(encode_map(&map, limits().without_inline()).expect("encodes"));
    let (mut bases, mut longest) = (0, 0);
    for step in 0..100_u16 {
        let mut edit = map.edit();
        for shard in 0..20 {
            let shard = ShardId::new(u32::from(step) * 600 + shard * 7);
            edit.set_owner(shard, 0, Slot::new((step + 50) % 100)).expect("in range");
        }
        let next = edit.finish(fence(9)).expect("changed");
        let encoded = encode_next(&manifest, &map, &next, limits().without_inline());
        manifest = store.write(encoded.expect("encodes"));
        assert_eq!(store.read(Some(&map)).expect("reads"), next);
        bases += usize::from(manifest.deltas.is_empty());
        longest = longest.max(manifest.deltas.len());
        map = next;
    }
    assert_eq!(store.read(None).expect("reads"), map);
    assert!((1..30).contains(&bases), "{bases}");
    assert!((4..=DELTAS_MAX).contains(&longest), "{longest}");
}

#[test]
fn a_change_of_most_shards_is_a_new_base() {
    let map = large(65_536, 1, 100);
    let mut rng = StdRng::seed_from_u64(6);
    let mut edit = map.edit();
    for shard in 0..65_536 {
        let slot = Slot::new(rng.random_range(0..100));
        edit.set_owner(ShardId::new(shard), 0, slot).expect("in range");
    }
    let next = edit.finish(fence(9)).expect("changed");
    let limits = limits().without_inline();
    let manifest = encode_map(&map, limits).expect("encodes").manifest;
    let encoded = encode_next(&manifest, &map, &next, limits).expect("encodes");
    assert!(encoded.manifest.deltas.is_empty());
}

/// A map in equal blocks, as the first placement fills it.
fn large(shards: u32, replicas: u8, nodes: usize) -> ShardMap {
    let mut rng = StdRng::seed_from_u64(5);
    let mut edit = ShardMap::empty(header(shards, replicas), TableUid::from_u128(5)).edit();
    for number in 0..nodes {
        edit.put_node(entry(number, rng.random())).expect("room");
    }
    let nodes = u64::try_from(nodes).expect("few");
    let owner = |shard: u32, replica: u8| {
        let block = u64::from(shard) * nodes / u64::from(shards);
        u16::try_from((block + u64::from(replica) * nodes / 3) % nodes).expect("few")
    };
    let owners = (0..shards).flat_map(|shard| (0..replicas).map(move |r| (shard, r)));
    edit.set_raw_owners(owners.map(|(s, r)| owner(s, r)).collect()).expect("known");
    edit.finish(fence(7)).expect("changed")
}

/// The same loads with no order at all.
fn scattered(mut map: ShardMap) -> ShardMap {
    let mut rng = StdRng::seed_from_u64(4);
    for place in (1..map.owners.len()).rev() {
        map.owners.swap(place, rng.random_range(0..=place));
    }
    map.epochs.iter_mut().for_each(|epoch| *epoch = rng.random_range(0..2));
    map
}

/// The node in this slot leaves; what it had goes to the others in turn.
fn leave(map: &ShardMap, slot: u16) -> (ShardMap, usize) {
    let mut edit = map.edit();
    let nodes = u16::try_from(map.nodes.len()).expect("few");
    let mut owners = map.owners.to_vec();
    let mut heirs = (0..nodes).filter(|heir| *heir != slot).cycle();
    let mut moved = 0;
    for owner in owners.iter_mut().filter(|owner| **owner == slot) {
        *owner = heirs.next().expect("endless");
        moved += 1;
    }
    edit.set_raw_owners(owners).expect("known");
    let id = map.nodes[usize::from(slot)].as_ref().expect("a node").id.clone();
    edit.remove_node(&id).expect("owns nothing");
    (edit.finish(fence(8)).expect("changed"), moved)
}

fn section_bytes(part: &Part, section: Section) -> Vec<usize> {
    let entries = part.chunks.iter().filter(|entry| entry.section == section);
    entries.map(|entry| entry.bytes as usize).collect()
}

#[test]
fn a_large_map_is_at_most_bit_packed_and_every_value_fits() {
    let million = 1 << 20;
    for (name, map) in [
        ("R 1, fresh", large(million, 1, 1000)),
        ("R 1, scattered", scattered(large(million, 1, 1000))),
        ("R 3, fresh", large(million, 3, 1000)),
        ("R 3, scattered", scattered(large(million, 3, 1000))),
    ] {
        let mut store = Store::default();
        let manifest = store.write(encode_map(&map, limits()).expect("encodes"));
        assert!(store.read(None).expect("reads") == map);
        let owners = section_bytes(&manifest.base, Section::Owners);
        let packed = (map.owners.len() * 10).div_ceil(8);
        assert_eq!(owners.len(), 16);
        assert!(owners.iter().sum::<usize>() <= packed + 16 * 48, "{name}: {owners:?}");
        let largest = store.chunks.values().map(Bytes::len).max().unwrap_or(0);
        assert!(largest < MEBIBYTE && store.manifest.len() < 8 * 1024, "{name}: {largest}");
        let epochs: usize = section_bytes(&manifest.base, Section::Epochs).iter().sum();
        assert_eq!(epochs == 0, manifest.epoch.is_some(), "equal epochs take no chunk");
        let nodes: usize = section_bytes(&manifest.base, Section::Nodes).iter().sum();
        let owners: usize = owners.iter().sum();
        println!(
            "{name}: owners {owners} of {packed}, largest value {largest}, epochs {epochs}, \
             nodes {nodes}, manifest {}",
            store.manifest.len(),
        );
    }
}

#[test]
fn values_are_split_to_a_small_limit() {
    let limits = WireLimits::new(64 * 1024).expect("large enough");
    let mut map = scattered(large(1 << 17, 7, 300));
    map.annex =
        (0..100_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let mut store = Store::default();
    store.write(encode_map(&map, limits).expect("encodes"));
    assert!(store.chunks.values().all(|bytes| bytes.len() <= 64 * 1024));
    assert!(store.read(None).expect("reads") == map);
    assert!(WireLimits::new(VALUE_BYTES_MIN - 1).is_err());
}

#[test]
fn a_leave_takes_at_most_3_1_bytes_for_each_shard_that_moves() {
    for (name, map, slot) in [
        ("1024 x 4", large(1024, 1, 4), 2),
        ("1024 x 4, scattered", scattered(large(1024, 1, 4)), 2),
        ("1048576 x 1000", large(1 << 20, 1, 1000), 500),
        ("1048576 x 1000, scattered", scattered(large(1 << 20, 1, 1000)), 500),
    ] {
        let (next, moved) = leave(&map, slot);
        let raw = delta::encode(&map, &next).expect("encodes");
        let life = Life::new(map.uid, next.version);
        let chunks = chunk::split(Section::Delta, life, &raw, MEBIBYTE).expect("splits");
        let bytes: usize = chunks.iter().map(Bytes::len).sum();
        println!("{name}: moved {moved}, delta {} plain, {bytes} as stored", raw.len());
        assert!(bytes * 10 <= moved * 31, "{name}: {bytes} for {moved}");
        let mut applied = map.clone();
        delta::apply(&mut applied, next.version, Reader::new("test", &raw)).expect("applies");
        applied.writer.clone_from(&next.writer);
        assert!(applied == next);
    }
}

#[test]
fn a_small_map_is_one_value() {
    for (nodes, replicas, most) in [(4, 1, 3 * 1024), (100, 3, 24 * 1024)] {
        let map = large(1024, replicas, nodes);
        let encoded = encode_map(&map, limits()).expect("encodes");
        assert!(encoded.chunks.is_empty());
        assert_eq!(encoded.manifest.assemble(None, &HashMap::new()).expect("reads"), map);
        let bytes = encoded.manifest.encode().expect("encodes").len();
        println!("1024 x {nodes}, R {replicas}: {bytes}");
        assert!(bytes <= most, "{bytes}");
        let (next, _) = leave(&map, 1);
        let after = encode_next(&encoded.manifest, &map, &next, limits()).expect("encodes");
        assert!(after.chunks.is_empty() && after.manifest.deltas.is_empty());
    }
}

#[test]
fn the_digest_tells_maps_apart_and_version_0_is_not_encoded() {
    let map = large(64, 2, 3);
    let others: [fn(&mut ShardMap); 8] = [
        |map| map.version = map.version.next(),
        |map| map.uid = TableUid::from_u128(6),
        |map| map.writer = None,
        |map| map.owners.swap(0, 1),
        |map| map.epochs[3] = 0,
        |map| map.nodes.push(None),
        |map| map.annex = Bytes::from_static(b"x"),
        |map| {
            let motion = Motion::new(0, Slot::new(1), MotionPhase::Leaving, map.version);
            map.motions.insert(ShardId::new(1), vec![motion]);
        },
    ];
    let mut seen = std::collections::HashSet::from([digest(&map)]);
    for change in others {
        let mut other = map.clone();
        change(&mut other);
        assert!(seen.insert(digest(&other)));
    }
    let empty = ShardMap::empty(header(4, 1), TableUid::from_u128(1));
    assert_eq!(encode_map(&empty, limits()).expect_err("no writer").kind(), ErrorKind::Invalid);
}

#[test]
fn only_the_one_text_of_a_key_is_a_key() {
    let key = ChunkKey {
        term: Term::from_u64(7),
        attempt: AttemptId::from_u128(8),
        version: Version::new(9),
        index: 10,
        hash: 11,
    };
    let text = key.to_string();
    assert_eq!(text.parse::<ChunkKey>().expect("a key"), key);
    assert!(text.len() <= 110 && !text.contains(|c: char| !c.is_ascii_alphanumeric() && c != '.'));
    for bad in
        ["", "7.8.9.a.b", &format!("{text}.0"), &text.to_uppercase(), &format!("+{}", &text[1..])]
    {
        assert!(bad.parse::<ChunkKey>().is_err(), "{bad}");
    }
}

#[test]
fn what_a_handle_knows_makes_reads_and_writes_small_and_decides_nothing() {
    let mut rng = StdRng::seed_from_u64(5);
    let (limits, known, table) =
        (limits().without_inline(), KnownMaps::default(), TableName::cluster());
    let old = Arc::new(any_map(&mut rng, 4000, 1, 9));
    let encoded = encode_map(&old, limits).expect("encodes");
    let created = TableHeadV1::created(table.clone(), old.header.clone(), fence(1));
    let head = TableHeadV1 { uid: old.uid, ..created }.with_manifest(encoded.manifest.clone());
    let fetch = known.read(&head).expect_err("nothing is known yet");
    let chunks: HashMap<_, _> = encoded.chunks.into_iter().collect();
    assert_eq!(fetch.keys.len(), chunks.len());
    let read = known.assemble(&head, &fetch, &chunks).expect("whole");
    assert_eq!(read, old);
    assert_eq!(known.read(&head).expect("known"), old);
    let mut next = (*old).clone();
    next.version = old.version.next();
    next.owners[0] = if next.owners[0] == u16::MAX { any_slot(&next, &mut rng) } else { u16::MAX };
    let next = Arc::new(next);
    let change = known.encode(&head, &next, limits).expect("encodes");
    assert_eq!(change.manifest.deltas.len(), 1, "a difference from what is known");
    let fresh = KnownMaps::default().encode(&head, &next, limits).expect("encodes");
    assert!(fresh.manifest.deltas.is_empty(), "and a base where nothing is");
    assert!(known.published(&table, &change.manifest, &next), "chunks are stored");
    // A late read of the older map does not take the place of the newer.
    known.assemble(&head, &fetch, &chunks).expect("whole");
    let newer = head.clone().with_manifest(change.manifest);
    assert_eq!(known.read(&newer).expect("known"), next);
}

#[test]
fn a_swept_table_without_chunks_is_not_swept_again() {
    let mut map = ShardMap::empty(header(4, 1), TableUid::from_u128(1));
    let (known, table) = (KnownMaps::default(), TableName::cluster());
    let mut publish = |swept| {
        map.version = map.version.next();
        map.writer = Some(fence(1));
        let manifest = encode_map(&map, limits()).expect("encodes").manifest;
        let is_due = known.published(&table, &manifest, &Arc::new(map.clone()));
        if swept {
            known.swept(&table, map.version);
        }
        is_due
    };
    assert!(publish(false), "nobody knows what is there");
    assert!(publish(true), "still nobody does");
    assert!(!publish(false) && !publish(false), "nothing is there, and nothing came");
    known.swept(&table, Version::new(1));
}

#[test]
fn only_what_no_reader_and_no_writer_needs_is_old() {
    let mut rng = StdRng::seed_from_u64(6);
    let limits = limits().without_inline();
    let mut map = any_map(&mut rng, 4000, 1, 9);
    map.version = Version::new(40);
    let mut manifest = |version, term| {
        map.version = Version::new(version);
        map.writer = Some(fence(term));
        encode_map(&map, limits).expect("encodes").manifest
    };
    let key = |version, term| {
        let (attempt, version) = (fence(term).attempt, Version::new(version));
        ChunkKey { term: Term::from_u64(term), attempt, version, index: 0, hash: 1 }
    };
    let (previous, newest) = (manifest(40, 7), manifest(41, 7));
    let old = OldChunks::after(&fence(7), Some(&previous), &newest);
    let named = previous.keys().chain(newest.keys());
    assert!(named.into_iter().all(|key| !old.contains(&key)), "the two newest are read");
    assert!(
        old.contains(&key(39, 7)) && old.contains(&key(41, 7)),
        "this writer's former and failed"
    );
    assert!(old.contains(&key(99, 6)), "an older writer's, whatever it was about to write");
    assert!(!old.contains(&key(42, 7)), "this writer's next");
    assert!(!old.contains(&key(41, 8)), "a successor's");
    assert!(!old.contains(&ChunkKey { attempt: AttemptId::from_u128(1), ..key(41, 7) }));
}
