//! The manifest: one small value, changed atomically, that names all immutable chunks of a map.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use super::chunk::{self, Life, Section};
use super::motions::MOTION_BYTES_MAX;
use super::nodes::{self, NODE_BYTES_MAX};
use super::varint::Reader;
use super::{Record, delta, digest, epochs, motions, owners};
use crate::error::{Error, Result};
use crate::types::{
    ANNEX_BYTES_MAX, AttemptId, Fence, NODES_MAX, ShardId, ShardMap, TableHeader, TableUid, Term,
    Version,
};

/// The smallest limit that maps are split for, 16 KiB.
pub const VALUE_BYTES_MIN: usize = 16 * 1024;
/// The most deltas on one base; a reader that comes new applies them all.
pub const DELTAS_MAX: usize = 64;
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
    /// Values of at most this many bytes: what the store takes, less what the backend adds to each. Up to
    /// a quarter of it, and 8 KiB, a map stands in the manifest itself.
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

/// Where a chunk is stored: what it is part of, who wrote it, and the hash of its content. Two different
/// chunks of one table never share a key, whoever wrote them, so "create if absent" is enough.
///
/// As text: term, attempt, version, index and hash in hexadecimal, between dots; all of a fixed length but
/// the index, so that keys sort by term, attempt and version.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkKey {
    /// The term of the writer.
    pub term: Term,
    /// The attempt of the writer.
    pub attempt: AttemptId,
    /// The version that the chunk was written for.
    pub version: Version,
    /// Which of that version's chunks it is.
    pub index: u32,
    /// XXH3 with 128 bits over the whole chunk.
    pub hash: u128,
}

impl fmt::Display for ChunkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { term, attempt, version, index, hash } = self;
        write!(f, "{:016x}.{attempt}.{:016x}.{index:x}.{hash:032x}", term.get(), version.get())
    }
}

impl FromStr for ChunkKey {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let parse = || {
            let mut parts = text.split('.').map(|part| u128::from_str_radix(part, 16).ok());
            let mut part = || parts.next().flatten();
            let key = Self {
                term: Term::from_u64(part()?.try_into().ok()?),
                attempt: AttemptId::from_u128(part()?),
                version: Version::new(part()?.try_into().ok()?),
                index: part()?.try_into().ok()?,
                hash: part()?,
            };
            // Only the one text that a key has is read back, so nothing else is taken for it.
            (key.to_string() == text).then_some(key)
        };
        parse().ok_or_else(|| Error::invalid("parse", format!("{text:?} is no chunk key")))
    }
}

/// A hash, as 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct Hash(u128);

impl TryFrom<String> for Hash {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        let hash =
            u128::from_str_radix(&text, 16).ok().filter(|hash| format!("{hash:032x}") == text);
        hash.map(Self).ok_or_else(|| {
            Error::corrupt("decode", format!("{text:?} is not 32 hexadecimal digits"))
        })
    }
}

impl From<Hash> for String {
    fn from(hash: Hash) -> Self {
        format!("{:032x}", hash.0)
    }
}

/// A chunk that stands in the manifest itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct Inline(Bytes);

impl TryFrom<String> for Inline {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        match BASE64.decode(&text) {
            Ok(bytes) => Ok(Self(bytes.into())),
            Err(source) => {
                Err(Error::corrupt("decode", "a chunk's data is no base64").with_source(source))
            }
        }
    }
}

impl From<Inline> for String {
    fn from(data: Inline) -> Self {
        BASE64.encode(data.0)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    section: Section,
    bytes: u32,
    hash: Hash,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    data: Option<Inline>,
}

/// The chunks that one publish wrote: a base or a delta.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Part {
    version: Version,
    term: Term,
    attempt: AttemptId,
    /// Of the whole map at this version.
    digest: Hash,
    chunks: Vec<Entry>,
}

impl Part {
    fn key(&self, index: usize) -> ChunkKey {
        ChunkKey {
            term: self.term,
            attempt: self.attempt,
            version: self.version,
            index: u32::try_from(index).unwrap_or(u32::MAX),
            hash: self.chunks[index].hash.0,
        }
    }

    fn bytes(&self) -> u64 {
        self.chunks.iter().map(|entry| u64::from(entry.bytes)).sum()
    }

    fn is_inline(&self) -> bool {
        self.chunks.iter().any(|entry| entry.data.is_some())
    }

    fn stored_keys(&self) -> impl Iterator<Item = ChunkKey> {
        let stored = self.chunks.iter().enumerate().filter(|(_, entry)| entry.data.is_none());
        stored.map(|(index, _)| self.key(index))
    }

    /// The chunks of one section, each found to be what its entry says.
    fn section<'a>(
        &'a self,
        section: Section,
        chunks: &'a HashMap<ChunkKey, Bytes>,
    ) -> Result<Vec<&'a Bytes>> {
        let of_section = |(_, entry): &(usize, &Entry)| entry.section == section;
        let entries = self.chunks.iter().enumerate().filter(of_section);
        entries
            .map(|(index, entry)| {
                let key = self.key(index);
                let inline = entry.data.as_ref().map(|data| &data.0);
                let Some(bytes) = inline.or_else(|| chunks.get(&key)) else {
                    return Err(section.corrupt(format!("it is missing key={key}")));
                };
                if bytes.len() != entry.bytes as usize || xxh3_128(bytes) != entry.hash.0 {
                    return Err(section.corrupt(format!("its content is not the key's key={key}")));
                }
                Ok(bytes)
            })
            .collect()
    }
}

/// Names all chunks of one version of a map: those of a base, and of a delta for every version since.
///
/// A backend keeps it where it is changed atomically, with the highest fence beside it
/// ([`TableHeadV1`](super::TableHeadV1)). A small map stands in it whole.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    uid: TableUid,
    version: Version,
    writer: Fence,
    header: TableHeader,
    /// How many slots the node table of the base has.
    slots: u32,
    /// The epoch of all shards in the base, where it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    epoch: Option<u64>,
    base: Part,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    deltas: Vec<Part>,
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

impl Record for Manifest {
    const WHAT: &'static str = "manifest";

    fn check(&self) -> Result<()> {
        let fail = |why: &str| Err(Error::corrupt("decode", format!("manifest: {why}")));
        let base = self.base.version.get();
        if self.deltas.len() > DELTAS_MAX {
            return fail(&format!("too many deltas found={} max={DELTAS_MAX}", self.deltas.len()));
        }
        let follows =
            |(before, part): (u64, &Part)| base.checked_add(before + 1) == Some(part.version.get());
        if !(0..).zip(&self.deltas).all(follows) || self.newest().version != self.version {
            return fail("its versions do not follow each other");
        }
        if self.newest().term != self.writer.term || self.newest().attempt != self.writer.attempt {
            return fail("its writer is not that of its newest part");
        }
        let is_delta = |entry: &Entry| entry.section == Section::Delta;
        if self.base.chunks.iter().any(is_delta)
            || !self.deltas.iter().flat_map(|part| &part.chunks).all(is_delta)
        {
            return fail("a chunk is of a section that does not belong there");
        }
        if self.slots as usize > NODES_MAX {
            return fail(&format!("too many slots found={} max={NODES_MAX}", self.slots));
        }
        Ok(())
    }
}

impl Manifest {
    /// Which life of the table this is.
    #[must_use]
    pub fn uid(&self) -> TableUid {
        self.uid
    }

    /// The version of the map.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The fence under which it was written.
    #[must_use]
    pub fn writer(&self) -> &Fence {
        &self.writer
    }

    /// What all users of the table agree on.
    #[must_use]
    pub fn header(&self) -> &TableHeader {
        &self.header
    }

    /// The [`digest`] of the map; with version and writer it tells a publish that was retried.
    #[must_use]
    pub fn digest(&self) -> u128 {
        self.newest().digest.0
    }

    /// The keys of all stored chunks. What neither this manifest nor the one before names may be removed.
    pub fn keys(&self) -> impl Iterator<Item = ChunkKey> {
        self.parts().flat_map(Part::stored_keys)
    }

    /// The keys of the chunks that a reader has to fetch, who may `have` an earlier map of the table. A
    /// chunk that is absent has been removed with its manifest: read the manifest again, and take it for
    /// damage only if that is unchanged.
    #[must_use]
    pub fn needed(&self, have: Option<&ShardMap>) -> Vec<ChunkKey> {
        let after = self.usable(have).map(|map| map.version);
        let parts = self.parts().filter(|part| after.is_none_or(|after| part.version > after));
        parts.flat_map(Part::stored_keys).collect()
    }

    /// Puts the map together from what [`needed`](Self::needed) named for the same `have`. It takes
    /// milliseconds for a million shards.
    ///
    /// # Errors
    /// `Corrupt`, naming what: a chunk that is missing, damaged, of an unknown format or not of this map,
    /// or a result whose digest is not the manifest's.
    pub fn assemble(
        &self,
        have: Option<&ShardMap>,
        chunks: &HashMap<ChunkKey, Bytes>,
    ) -> Result<ShardMap> {
        self.put_together(have, chunks)
            .map_err(|error| error.resource(format!("table {}", self.uid)))
    }

    fn put_together(
        &self,
        have: Option<&ShardMap>,
        chunks: &HashMap<ChunkKey, Bytes>,
    ) -> Result<ShardMap> {
        let mut map = match self.usable(have) {
            Some(map) => map.clone(),
            None => self.decode_base(chunks)?,
        };
        for part in &self.deltas {
            if part.version > map.version {
                let life = Life::new(self.uid, part.version);
                let pieces = part.section(Section::Delta, chunks)?;
                let raw_max = delta::bytes_max(&self.header);
                let raw = chunk::join(Section::Delta, life, &pieces, raw_max)?;
                delta::apply(&mut map, &raw)?;
            }
        }
        map.writer = Some(self.writer.clone());
        if digest(&map) != self.digest() {
            return Err(Error::corrupt("decode", "the map's digest is not the manifest's"));
        }
        Ok(map)
    }

    fn decode_base(&self, chunks: &HashMap<ChunkKey, Bytes>) -> Result<ShardMap> {
        let life = Life::new(self.uid, self.base.version);
        let shards = self.header.shards.get();
        let slots = self.slots as usize;
        let places = u64::from(shards) * u64::from(self.header.replicas.get());
        let blob = |section, raw_max: u64| {
            let pieces = self.base.section(section, chunks)?;
            let raw = chunk::join(section, life, &pieces, raw_max)?;
            Ok::<_, Error>((!pieces.is_empty()).then_some(raw))
        };
        let raw = blob(Section::Nodes, ((slots + 1) * NODE_BYTES_MAX) as u64)?;
        let nodes = raw.map_or(Ok(Vec::new()), |raw| nodes::decode(&raw, slots))?;
        let known = nodes::known(&nodes);
        let pieces = self.base.section(Section::Owners, chunks)?;
        let owners = owners::decode(&self.header, &known, life, &pieces)?;
        let epochs = match (self.epoch, blob(Section::Epochs, epochs::bytes_max(shards))?) {
            (Some(epoch), None) if epoch <= self.base.version.get() => vec![epoch; shards as usize],
            (None, Some(raw)) => epochs::decode(&raw, shards as usize, self.base.version)?,
            _ => return Err(Section::Epochs.corrupt("there is not exactly one form of epochs")),
        };
        let mut motions = BTreeMap::new();
        let raw_max = (places + u64::from(shards)) * MOTION_BYTES_MAX;
        if let Some(raw) = blob(Section::Motions, raw_max)? {
            let mut reader = Reader::new(Section::Motions.name(), &raw);
            motions::decode(&mut reader, &self.header, &known, &mut motions)?;
            reader.end()?;
        }
        let annex = blob(Section::Annex, ANNEX_BYTES_MAX as u64)?.unwrap_or_default().into();
        let (header, uid, version) = (self.header.clone(), self.uid, self.base.version);
        Ok(ShardMap { header, uid, version, writer: None, nodes, owners, epochs, motions, annex })
    }

    /// The map that the reader has, if it is one of those that the parts lead through.
    fn usable<'a>(&self, have: Option<&'a ShardMap>) -> Option<&'a ShardMap> {
        have.filter(|map| {
            let part = self.parts().find(|part| part.version == map.version);
            map.uid == self.uid
                && map.header == self.header
                && part.is_some_and(|part| part.digest.0 == digest(map))
        })
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        std::iter::once(&self.base).chain(&self.deltas)
    }

    fn newest(&self) -> &Part {
        self.deltas.last().unwrap_or(&self.base)
    }

    /// Fails if the manifest itself is too large, which takes a huge table on a store of small values.
    fn within(self, limits: WireLimits, chunks: Vec<(ChunkKey, Bytes)>) -> Result<EncodedMap> {
        let (bytes, most) = (self.encode()?.len(), limits.value_bytes_max - HEAD_BYTES);
        if bytes > most {
            let why = format!("the map's manifest takes {bytes} bytes; the store takes {most}");
            return Err(Error::invalid("encode", why));
        }
        Ok(EncodedMap { manifest: self, chunks })
    }
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
    manifest.within(limits, chunks)
}

/// Encodes the version after `old`, whose manifest is `previous`: as a delta more, or as a new base where
/// [`is_compaction_due`] says so, the map is small, or `previous` is not the manifest of `old`.
///
/// # Errors
/// As [`encode_map`], and `Invalid` if `new` is not the version after `old` in the same life of the table.
pub fn encode_next(
    previous: &Manifest,
    old: &ShardMap,
    new: &ShardMap,
    limits: WireLimits,
) -> Result<EncodedMap> {
    if old.uid != new.uid || old.header != new.header || old.version.next() != new.version {
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
    next.within(limits, chunks)
}

/// Whether a map is written as a new base: when its deltas together pass a quarter of the base, or are
/// more than 64.
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

#[cfg(test)]
mod tests;
