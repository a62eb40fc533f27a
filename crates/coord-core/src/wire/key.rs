//! Where a chunk is stored.

use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;

use super::Manifest;
use crate::error::{Error, Result};
use crate::quote::quoted;
use crate::types::{AttemptId, Fence, Term, Version};

/// Where a chunk is stored: what it is part of, its writer, and the hash of its content. Two different chunks
/// of one table never share a key, whichever fences wrote them, so "create if absent" is enough.
///
/// As text: term, attempt, version, index and hash in hexadecimal, between dots; all of a fixed
/// length but the index, so that keys sort by term, attempt and version.
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
        parse().ok_or_else(|| Error::invalid("parse", format!("{} is no chunk key", quoted(text))))
    }
}

/// Which chunks are of no use to anybody, once a map has been published.
#[derive(Clone, Debug)]
pub struct OldChunks {
    writer: Fence,
    version: Version,
    /// The chunks of the two newest manifests.
    named: HashSet<ChunkKey>,
}

impl OldChunks {
    /// After `writer` has put `manifest` in the place of `previous`.
    #[must_use]
    pub fn after(writer: &Fence, previous: Option<&Manifest>, manifest: &Manifest) -> Self {
        let named = manifest.keys().chain(previous.into_iter().flat_map(Manifest::keys)).collect();
        Self { writer: writer.clone(), version: manifest.version(), named }
    }

    /// Whether a chunk is one of them. Chunks of a greater term are a successor's, which may be writing them
    /// just now, and those of a later version this writer's own next.
    #[must_use]
    pub fn contains(&self, key: &ChunkKey) -> bool {
        let Self { writer, version, named } = self;
        let is_mine = key.attempt == writer.attempt && key.version <= *version;
        let is_past = key.term < writer.term || (key.term == writer.term && is_mine);
        is_past && !named.contains(key)
    }
}
