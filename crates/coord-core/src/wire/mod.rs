//! What the stores hold: versioned records, and the encoding of a shard map.
//!
//! ```text
//!   LeaseRecordV1   NodeRecordV1   RequestV1   AnswerV1      JSON, one value each
//!
//!   TableHeadV1 ── highest fence
//!      └─ Manifest ── base: owners, nodes, epochs, motions, annex    chunks, immutable,
//!                 └── a delta for every version since                each under its ChunkKey
//! ```
//!
//! Every record names its format, ignores fields it does not know and refuses a format it does not
//! know. Nothing is trusted: what is torn, damaged, foreign or out of range is `Corrupt`, and no
//! length that was read decides alone how much memory is taken.
//!
//! Writing: [`encode_map`] or [`encode_next`]; store the chunks, then change the head. Reading:
//! [`TableHeadV1::read`], fetch what [`Manifest::needed`] names, [`Manifest::assemble`]. A backend does
//! both through [`KnownMaps`], and removes [`OldChunks`].

mod bits;
mod chunk;
mod delta;
mod digest;
mod encode;
mod epochs;
mod key;
mod known;
mod manifest;
mod motions;
mod nodes;
mod owners;
mod part;
mod records;
mod varint;

pub use chunk::CHUNK_HEADER_BYTES;
pub use digest::digest;
pub use encode::{
    EncodedMap, VALUE_BYTES_MIN, WireLimits, encode_map, encode_next, is_compaction_due,
};
pub use key::{ChunkKey, OldChunks};
pub use known::{Fetch, KnownMaps};
pub use manifest::{DELTAS_MAX, Manifest};
pub use owners::CHUNK_SHARDS_MAX;
pub use records::{AnswerV1, Body, LeaseRecordV1, NodeRecordV1, Record, RequestV1, TableHeadV1};

#[cfg(test)]
mod tests;
