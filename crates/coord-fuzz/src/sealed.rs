//! Maps as stores hold them, taken apart so that what is inside a chunk can be damaged, and sealed again so
//! that no hash tells of it.

use std::collections::HashMap;

use bytes::Bytes;
use coord_core::wire::{
    CHUNK_HEADER_BYTES, ChunkKey, Manifest, Record as _, WireLimits, encode_map, encode_next,
};
use coord_core::{
    Address, AttemptId, Fence, Incarnation, Label, LeaseName, Motion, MotionPhase, NodeEntry,
    NodeId, NodeStatus, Origin, ReplicationFactor, ShardCount, ShardId, ShardMap, Slot,
    TableHeader, TableUid, Term,
};
use serde_json::Value;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Where a chunk's header says how it is encoded, how long it is unpacked and packed, and its checksum.
const ENCODING: usize = 6;
const RAW_LENGTH: usize = 32;
const LENGTH: usize = 36;
const CHECKSUM: usize = 40;

/// A manifest and its chunks, in its order.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Stored {
    /// The manifest's JSON.
    pub manifest: Vec<u8>,
    /// Each chunk as it is stored.
    pub chunks: Vec<Vec<u8>>,
}

/// Maps of all forms: with and without motions and an annex, as a base and with a delta.
#[must_use]
pub fn maps() -> Vec<Stored> {
    [(600, 1, 5), (300, 3, 40), (40, 2, 0)]
        .into_iter()
        .flat_map(|(shards, replicas, nodes)| map(shards, replicas, nodes).unwrap_or_default())
        .collect()
}

fn map(shards: u32, replicas: u8, nodes: u16) -> coord_core::Result<Vec<Stored>> {
    let header =
        TableHeader::new(ShardCount::new(shards)?).with_replicas(ReplicationFactor::new(replicas)?);
    let limits = WireLimits::new(1 << 20)?.without_inline();
    let mut edit = ShardMap::empty(header, TableUid::from_u128(0xfeed)).edit();
    for number in 0..nodes {
        edit.put_node(entry(number)?)?;
    }
    let places = shards * u32::from(replicas);
    let slot = |place: u32| match u16::try_from(place.wrapping_mul(0x9e37) >> 7) {
        Ok(hash) if nodes > 0 => hash % nodes,
        _ => u16::MAX,
    };
    edit.set_raw_owners((0..places).map(slot).collect())?;
    edit.set_annex(Bytes::from_static(b"{\"format\":2,\"paused\":true}"))?;
    let Some(first) = edit.finish(fence(7)) else { return Ok(Vec::new()) };
    let base = encode_map(&first, limits)?;
    let mut edit = first.edit();
    let slot = edit.put_node(entry(900)?)?;
    edit.set_owner(ShardId::new(3), 0, slot)?;
    edit.set_owner(ShardId::new(5), 0, Slot::NOBODY)?;
    let motion = Motion::new(0, slot, MotionPhase::MovingTo, first.version().next());
    edit.set_motions(ShardId::new(1), vec![motion])?;
    let Some(second) = edit.finish(fence(8)) else { return Ok(Vec::new()) };
    let delta = encode_next(&base.manifest, &first, &second, limits)?;
    let whole = encode_map(&second, limits)?;
    let held: HashMap<ChunkKey, Bytes> =
        [&base, &delta, &whole].into_iter().flat_map(|map| map.chunks.iter().cloned()).collect();
    [&base, &delta, &whole]
        .into_iter()
        .map(|encoded| {
            let chunks = encoded.manifest.keys().filter_map(|key| Some(held.get(&key)?.to_vec()));
            let chunks = chunks.collect();
            Ok(Stored { manifest: encoded.manifest.encode()?.to_vec(), chunks })
        })
        .collect()
}

fn entry(number: u16) -> coord_core::Result<NodeEntry> {
    let id = NodeId::new(format!("node-{number}.eu"))?;
    let address = Address::new(format!("10.0.0.{}:7000", number % 250))?;
    let run = Incarnation::from_u128(u128::from(number) + 0x1000);
    let zone = (!number.is_multiple_of(3))
        .then(|| Label::new(format!("eu-{}", number % 3)))
        .transpose()?;
    Ok(NodeEntry::new(id, run, address, NodeStatus::Active).with_zone(zone))
}

fn fence(term: u64) -> Fence {
    let attempt = AttemptId::from_u128(0xa1);
    Fence::new(LeaseName::leader(), Term::from_u64(term), attempt, Origin::new("etcd:cafe/orders"))
}

impl Stored {
    /// As a damaged input holds it: each piece behind its length.
    #[must_use]
    pub fn pack(&self) -> Vec<u8> {
        let pieces = std::iter::once(&self.manifest).chain(&self.chunks);
        let mut out = Vec::new();
        for piece in pieces {
            out.extend_from_slice(&u32::try_from(piece.len()).unwrap_or(u32::MAX).to_be_bytes());
            out.extend_from_slice(piece);
        }
        out
    }

    /// What [`pack`](Self::pack) made, as far as it is still there.
    #[must_use]
    pub fn unpack(mut bytes: &[u8]) -> Self {
        let mut pieces = Vec::new();
        while let Some((length, rest)) = bytes.split_first_chunk() {
            let length = rest.len().min(u32::from_be_bytes(*length) as usize);
            let (piece, rest) = rest.split_at(length);
            pieces.push(piece.to_vec());
            bytes = rest;
        }
        let manifest = if pieces.is_empty() { Vec::new() } else { pieces.remove(0) };
        Self { manifest, chunks: pieces }
    }

    /// With every chunk uncompressed, so that damage reaches what is inside.
    #[must_use]
    pub fn opened(mut self) -> Self {
        for chunk in &mut self.chunks {
            if chunk.len() > CHUNK_HEADER_BYTES && chunk[ENCODING] != 0 {
                let body = zstd::decode_all(&chunk[CHUNK_HEADER_BYTES..]).unwrap_or_default();
                chunk.truncate(CHUNK_HEADER_BYTES);
                chunk.extend_from_slice(&body);
            }
        }
        self
    }

    /// The reverse of [`opened`](Self::opened): each chunk compressed where its header says so, with the lengths
    /// that it has, and named with its hash in the manifest.
    #[must_use]
    pub fn sealed(mut self) -> Self {
        for chunk in &mut self.chunks {
            if chunk.len() < CHUNK_HEADER_BYTES {
                continue;
            }
            let raw = chunk.split_off(CHUNK_HEADER_BYTES);
            let body = match chunk[ENCODING] {
                0 => raw.clone(),
                _ => zstd::encode_all(raw.as_slice(), 1).unwrap_or_default(),
            };
            chunk[RAW_LENGTH..LENGTH].copy_from_slice(&length(&raw));
            chunk[LENGTH..CHECKSUM].copy_from_slice(&length(&body));
            let mut hash = Xxh3::new();
            hash.update(&chunk[..CHECKSUM]);
            hash.update(&body);
            chunk[CHECKSUM..].copy_from_slice(&hash.digest().to_le_bytes());
            chunk.extend_from_slice(&body);
        }
        self.named()
    }

    /// With the length and the hash of each chunk in the manifest, if that is one.
    fn named(mut self) -> Self {
        let Ok(mut manifest) = serde_json::from_slice::<Value>(&self.manifest) else { return self };
        let mut chunks = self.chunks.iter();
        let mut name = |part: &mut Value| {
            let entries = part.get_mut("chunks").and_then(Value::as_array_mut);
            for entry in entries.into_iter().flatten() {
                let (Some(entry), Some(chunk)) = (entry.as_object_mut(), chunks.next()) else {
                    return;
                };
                entry.insert("bytes".to_owned(), chunk.len().into());
                entry.insert("hash".to_owned(), format!("{:032x}", xxh3_128(chunk)).into());
            }
        };
        if let Some(manifest) = manifest.as_object_mut() {
            manifest.get_mut("base").into_iter().for_each(&mut name);
            let deltas = manifest.get_mut("deltas").and_then(Value::as_array_mut);
            deltas.into_iter().flatten().for_each(name);
        }
        self.manifest = manifest.to_string().into_bytes();
        self
    }

    /// Reads the map as a backend does.
    ///
    /// # Errors
    /// As the manifest's `decode` and `assemble`.
    pub fn read(&self) -> coord_core::Result<ShardMap> {
        let manifest = Manifest::decode(&self.manifest)?;
        let chunks = self.chunks.iter().map(|chunk| Bytes::copy_from_slice(chunk));
        let chunks = manifest.needed(None).into_iter().zip(chunks).collect();
        manifest.assemble(None, &chunks)
    }

    /// How many bytes are stored.
    #[must_use]
    pub fn len(&self) -> usize {
        self.manifest.len() + self.chunks.iter().map(Vec::len).sum::<usize>()
    }

    /// Whether nothing is stored.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn length(bytes: &[u8]) -> [u8; 4] {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes()
}
