//! The parts of a manifest: what one publish wrote, and the hash of each chunk of it.

use std::collections::HashMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use super::chunk::Section;
use super::key::ChunkKey;
use crate::error::{Error, Result};
use crate::quote::quoted;
use crate::types::{AttemptId, Term, Version};

/// A hash, as 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(super) struct Hash(pub(super) u128);

impl TryFrom<String> for Hash {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        let hash =
            u128::from_str_radix(&text, 16).ok().filter(|hash| format!("{hash:032x}") == text);
        hash.map(Self).ok_or_else(|| {
            Error::corrupt("decode", format!("{} is not 32 hexadecimal digits", quoted(&text)))
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
pub(super) struct Inline(pub(super) Bytes);

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
pub(super) struct Entry {
    pub(super) section: Section,
    pub(super) bytes: u32,
    pub(super) hash: Hash,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) data: Option<Inline>,
}

/// The chunks that one publish wrote: a base or a delta.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) version: Version,
    pub(super) term: Term,
    pub(super) attempt: AttemptId,
    /// Of the whole map at this version.
    pub(super) digest: Hash,
    pub(super) chunks: Vec<Entry>,
}

impl Part {
    pub(super) fn key(&self, index: usize) -> ChunkKey {
        ChunkKey {
            term: self.term,
            attempt: self.attempt,
            version: self.version,
            index: u32::try_from(index).unwrap_or(u32::MAX),
            hash: self.chunks[index].hash.0,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.chunks.iter().map(|entry| u64::from(entry.bytes)).sum()
    }

    pub(super) fn is_inline(&self) -> bool {
        self.chunks.iter().any(|entry| entry.data.is_some())
    }

    pub(super) fn stored_keys(&self) -> impl Iterator<Item = ChunkKey> {
        let stored = self.chunks.iter().enumerate().filter(|(_, entry)| entry.data.is_none());
        stored.map(|(index, _)| self.key(index))
    }

    /// The chunks of one section, each found to be what its entry says.
    pub(super) fn section<'a>(
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
