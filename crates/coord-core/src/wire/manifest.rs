//! The manifest: one small value, changed atomically, that names all immutable chunks of a map.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize};

use super::chunk::{self, Life, Section};
use super::key::ChunkKey;
use super::motions::MOTION_BYTES_MAX;
use super::nodes::{self, NODE_BYTES_MAX};
use super::part::{Entry, Part};
use super::varint::Reader;
use super::{Record, delta, digest, epochs, motions, owners};
use crate::error::{Error, Result};
use crate::types::{
    ANNEX_BYTES_MAX, Fence, NODES_MAX, ShardMap, TableHeader, TableUid, Version, bounded,
};

/// The most deltas on one base; a reader that comes new applies them all.
pub const DELTAS_MAX: usize = 64;

/// Names all chunks of one version of a map: those of a base, and of a delta for every version
/// since.
///
/// A backend keeps it where it is changed atomically, with the highest fence beside it
/// ([`TableHeadV1`](super::TableHeadV1)). A small map stands in it whole.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub(super) uid: TableUid,
    pub(super) version: Version,
    pub(super) writer: Fence,
    pub(super) header: TableHeader,
    /// How many slots the node table of the base has.
    pub(super) slots: u32,
    /// The epoch of all shards in the base, where it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) epoch: Option<u64>,
    pub(super) base: Part,
    #[serde(default, deserialize_with = "deltas", skip_serializing_if = "Vec::is_empty")]
    pub(super) deltas: Vec<Part>,
}

fn deltas<'de, D: Deserializer<'de>>(parts: D) -> Result<Vec<Part>, D::Error> {
    bounded::list(parts, "deltas", DELTAS_MAX)
}

impl Record for Manifest {
    const WHAT: &'static str = "manifest";

    fn check(&self) -> Result<()> {
        let fail = |why: &str| Err(Error::corrupt("decode", format!("manifest: {why}")));
        let base = self.base.version.get();
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

    /// The keys of all stored chunks. What neither this manifest nor the one before names may be
    /// removed.
    pub fn keys(&self) -> impl Iterator<Item = ChunkKey> {
        self.parts().flat_map(Part::stored_keys)
    }

    /// The keys of the chunks that a reader has to fetch; it may `have` an earlier map of the table. A chunk
    /// that is absent has been removed with its manifest: read the manifest again, and report damage only if
    /// that is unchanged.
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
    /// `Corrupt`, naming what: a chunk that is missing, damaged, of an unknown format or not of
    /// this map, or a result whose digest is not the manifest's.
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
                let reader = chunk::join(Section::Delta, life, &pieces, raw_max)?;
                delta::apply(&mut map, part.version, reader)?;
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
            let reader = chunk::join(section, life, &pieces, raw_max)?;
            Ok::<_, Error>((!pieces.is_empty()).then_some(reader))
        };
        let nodes = blob(Section::Nodes, ((slots + 1) * NODE_BYTES_MAX) as u64)?;
        let nodes = nodes.map_or(Ok(Vec::new()), |reader| nodes::decode(reader, slots))?;
        let known = nodes::known(&nodes);
        let pieces = self.base.section(Section::Owners, chunks)?;
        let owners = owners::decode(&self.header, &known, life, &pieces)?;
        let epochs = match (self.epoch, blob(Section::Epochs, epochs::bytes_max(shards))?) {
            (Some(epoch), None) if epoch <= self.base.version.get() => vec![epoch; shards as usize],
            (None, Some(reader)) => epochs::decode(reader, shards as usize, self.base.version)?,
            _ => return Err(Section::Epochs.corrupt("there is not exactly one form of epochs")),
        };
        let mut motions = BTreeMap::new();
        let raw_max = (places + u64::from(shards)) * MOTION_BYTES_MAX;
        if let Some(mut reader) = blob(Section::Motions, raw_max)? {
            motions::decode(&mut reader, &self.header, &known, &mut motions)?;
            reader.end()?;
        }
        let annex = blob(Section::Annex, ANNEX_BYTES_MAX as u64)?;
        let annex = annex.map_or(Ok(Vec::new()), Reader::rest)?.into();
        let (header, uid, version) = (self.header.clone(), self.uid, self.base.version);
        let (nodes, owners) = (nodes.into(), owners.into());
        let (epochs, motions) = (epochs.into(), motions.into());
        let (writer, tally) = (None, Default::default());
        Ok(ShardMap { header, uid, version, writer, nodes, owners, epochs, motions, annex, tally })
    }

    /// The map that the reader has, if it is one of those that the parts lead through.
    pub(super) fn usable<'a>(&self, have: Option<&'a ShardMap>) -> Option<&'a ShardMap> {
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
}
