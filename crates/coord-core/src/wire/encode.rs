//! Encoding a map: as a new base, or as a delta on the version before.

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_128;

use super::chunk::{self, Life, Section};
use super::key::ChunkKey;
use super::manifest::{DELTAS_MAX, Manifest};
use super::part::{Entry, Hash, Inline, Part};
use super::{Record, delta, digest, epochs, motions, nodes, owners};
use crate::error::{Error, Result};
use crate::types::{Fence, ShardId, ShardMap};

/// The smallest limit that maps are split for, 16 KiB.
pub const VALUE_BYTES_MIN: usize = 16 * 1024;
/// What a manifest leaves of the limit, for the record it stands in.
const HEAD_BYTES: usize = 4 * 1024;
/// Up to this many bytes, all chunks together stand in the manifest itself.
const INLINE_BYTES_MAX: usize = 8 * 1024;

/// How large the values are that a map is split into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireLimits {
    value_bytes_max: usize,
    inline_bytes_max: usize,
}

impl WireLimits {
    /// Values of at most this many bytes: what the store takes, less what the backend adds to each.
    /// Up to a quarter of it, and 8 KiB, a map stands in the manifest itself.
    ///
    /// # Errors
    /// `Invalid` below 16 KiB.
    pub fn new(value_bytes_max: usize) -> Result<Self> {
        if value_bytes_max < VALUE_BYTES_MIN {
            let why = format!("values of {value_bytes_max} bytes; at least {VALUE_BYTES_MIN}");
            return Err(Error::invalid("encode", why));
        }
        Ok(Self { value_bytes_max, inline_bytes_max: INLINE_BYTES_MAX.min(value_bytes_max / 4) })
    }

    /// With no map in the manifest itself, however small.
    #[must_use]
    pub fn without_inline(mut self) -> Self {
        self.inline_bytes_max = 0;
        self
    }
}

/// What a publish writes: first the chunks, each only if its key is absent, then the manifest.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedMap {
    /// The manifest of the new version.
    pub manifest: Manifest,
    /// The chunks that are new with it.
    pub chunks: Vec<(ChunkKey, Bytes)>,
}

/// Encodes a map as a new base.
///
/// # Errors
/// `Invalid` for a map that was never published (version 0 needs no chunks: see
/// [`ShardMap::empty`]), or one whose manifest would not fit into the limit.
pub fn encode_map(map: &ShardMap, limits: WireLimits) -> Result<EncodedMap> {
    let writer = writer_of(map)?;
    let life = Life::new(map.uid, map.version);
    let limit = limits.value_bytes_max;
    let epoch = epochs::constant(&map.epochs);
    let mut values = Vec::new();
    let mut add = |section, chunks: Vec<Bytes>| {
        values.extend(chunks.into_iter().map(|bytes| (section, bytes)));
    };
    add(Section::Owners, owners::encode(map, life, limit)?);
    let mut add_blob = |section, raw: &[u8]| {
        add(section, chunk::split(section, life, raw, limit)?);
        Ok::<_, Error>(())
    };
    if !map.nodes.is_empty() {
        add_blob(Section::Nodes, &nodes::encode(&map.nodes)?)?;
    }
    if epoch.is_none() {
        add_blob(Section::Epochs, &epochs::encode(&map.epochs))?;
    }
    if !map.motions.is_empty() {
        let moving = map.motions.iter().map(|(shard, motions)| (*shard, motions.as_slice()));
        let mut raw = Vec::new();
        motions::encode(&mut raw, &map.header, &moving.collect::<Vec<(ShardId, _)>>())?;
        add_blob(Section::Motions, &raw)?;
    }
    if !map.annex.is_empty() {
        add_blob(Section::Annex, &map.annex)?;
    }
    let total: usize = values.iter().map(|(_, bytes)| bytes.len()).sum();
    let inline = total <= limits.inline_bytes_max;
    let (base, chunks) = part(map, writer, values, inline)?;
    let manifest = Manifest {
        uid: map.uid,
        version: map.version,
        writer: writer.clone(),
        header: map.header.clone(),
        slots: chunk::length(map.nodes.len())?,
        epoch,
        base,
        deltas: Vec::new(),
    };
    within(manifest, limits, chunks)
}

/// Encodes the version after `old`, whose manifest is `previous`: as a delta more, or as a new base
/// where [`is_compaction_due`] says so, the map is small, or `previous` is not the manifest of
/// `old`.
///
/// # Errors
/// As [`encode_map`], and `Invalid` if `new` is not the version after `old` in the same life of the
/// table.
pub fn encode_next(
    previous: &Manifest,
    old: &ShardMap,
    new: &ShardMap,
    limits: WireLimits,
) -> Result<EncodedMap> {
    let follows = new.version.get().checked_sub(1) == Some(old.version.get());
    if old.uid != new.uid || old.header != new.header || !follows {
        let why = format!("version {} does not follow version {}", new.version, old.version);
        return Err(Error::invalid("encode", why));
    }
    let fits = previous.version == old.version && previous.usable(Some(old)).is_some();
    if !fits || previous.base.is_inline() {
        return encode_map(new, limits);
    }
    let writer = writer_of(new)?;
    let life = Life::new(new.uid, new.version);
    let raw = delta::encode(old, new)?;
    let pieces = chunk::split(Section::Delta, life, &raw, limits.value_bytes_max)?;
    let values = pieces.into_iter().map(|bytes| (Section::Delta, bytes)).collect();
    let (part, chunks) = part(new, writer, values, false)?;
    let mut next = previous.clone();
    next.deltas.push(part);
    let deltas_bytes = next.deltas.iter().map(Part::bytes).sum();
    if is_compaction_due(next.base.bytes(), deltas_bytes, next.deltas.len()) {
        return encode_map(new, limits);
    }
    next.version = new.version;
    next.writer = writer.clone();
    within(next, limits, chunks)
}

/// Whether a map is written as a new base: when its deltas together pass a quarter of the base, or
/// are more than 64.
#[must_use]
pub fn is_compaction_due(base_bytes: u64, deltas_bytes: u64, deltas: usize) -> bool {
    deltas_bytes > base_bytes / 4 || deltas > DELTAS_MAX
}

fn writer_of(map: &ShardMap) -> Result<&Fence> {
    map.writer().ok_or_else(|| Error::invalid("encode", "the map has no writer: it is version 0"))
}

fn part(
    map: &ShardMap,
    writer: &Fence,
    values: Vec<(Section, Bytes)>,
    inline: bool,
) -> Result<(Part, Vec<(ChunkKey, Bytes)>)> {
    let entry = |(section, bytes): &(Section, Bytes)| {
        let data = inline.then(|| Inline(bytes.clone()));
        let hash = Hash(xxh3_128(bytes));
        Ok(Entry { section: *section, bytes: chunk::length(bytes.len())?, hash, data })
    };
    let part = Part {
        version: map.version,
        term: writer.term,
        attempt: writer.attempt,
        digest: Hash(digest(map)),
        chunks: values.iter().map(entry).collect::<Result<_>>()?,
    };
    let stored = values.into_iter().enumerate().filter(|_| !inline);
    let chunks = stored.map(|(index, (_, bytes))| (part.key(index), bytes)).collect();
    Ok((part, chunks))
}

/// Fails if the manifest itself is too large, which takes a huge table on a store of small values.
fn within(
    manifest: Manifest,
    limits: WireLimits,
    chunks: Vec<(ChunkKey, Bytes)>,
) -> Result<EncodedMap> {
    let (bytes, most) = (manifest.encode()?.len(), limits.value_bytes_max - HEAD_BYTES);
    if bytes > most {
        let why = format!("the map's manifest takes {bytes} bytes; the store takes {most}");
        return Err(Error::invalid("encode", why));
    }
    Ok(EncodedMap { manifest, chunks })
}
