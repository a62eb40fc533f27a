//! One immutable value of a map: a header of 48 bytes that says what it is, and a body.
//!
//! ```text
//! 0 magic "COMC" | 4 format | 5 section | 6 encoding | 7 bits | 8 XXH3-64 of the table's uid
//! 16 version | 24 first | 28 count | 32 raw length | 36 body length
//! 40 XXH3-64 of bytes 0..40 and the body
//! ```
//!
//! Numbers are little-endian. The last one is written and not looked at: a chunk is read only after its
//! manifest's hash has been found to be that of all its bytes. Of owners, `first` and `count` are shards; of every other section,
//! the number of this piece and how many there are.

use std::io::{self, BufRead, BufReader, Cursor};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};
use zstd::stream::read::Decoder;

use super::varint::Reader;
use crate::error::{Error, Result};
use crate::types::{TableUid, Version};

/// The bytes of a chunk's header.
pub const CHUNK_HEADER_BYTES: usize = 48;

const MAGIC: [u8; 4] = *b"COMC";
const FORMAT: u8 = 1;
const BLOB_LEVEL: i32 = 3;
/// The memory that unpacking may take, 2^23 bytes: what zstd asks of every decoder. Our levels need less.
const WINDOW_LOG_MAX: u32 = 23;
/// How many bytes are unpacked at a time.
const UNPACKED_BYTES: usize = 16 * 1024;

/// What part of a map a chunk holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Section {
    Owners,
    Nodes,
    Epochs,
    Motions,
    Annex,
    Delta,
}

impl Section {
    fn number(self) -> u8 {
        match self {
            Self::Owners => 0,
            Self::Nodes => 1,
            Self::Epochs => 2,
            Self::Motions => 3,
            Self::Annex => 4,
            Self::Delta => 5,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Owners => "owners chunk",
            Self::Nodes => "nodes chunk",
            Self::Epochs => "epochs chunk",
            Self::Motions => "motions chunk",
            Self::Annex => "annex chunk",
            Self::Delta => "delta",
        }
    }

    pub(super) fn corrupt(self, why: impl std::fmt::Display) -> Error {
        Error::corrupt("decode", format!("{}: {why}", self.name()))
    }
}

/// The form of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    /// As it is: bit-packed slots, or the bytes of another section.
    Plain = 0,
    /// Compressed by zstd: slots of 16 bits, or the bytes of another section.
    Zstd = 1,
    /// Runs of equal slots, compressed by zstd.
    ZstdRuns = 2,
}

/// Which version of which life of a table a chunk belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    table: u64,
    version: Version,
}

impl Life {
    pub(super) fn new(uid: TableUid, version: Version) -> Self {
        Self { table: xxh3_64(&uid.as_u128().to_le_bytes()), version }
    }
}

/// What a chunk's header says of its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) section: Section,
    pub(super) encoding: Encoding,
    /// The width of a bit-packed slot.
    pub(super) bits: u8,
    pub(super) first: u32,
    pub(super) count: u32,
    /// The length of the body before compression; of a blob in pieces, of the whole.
    pub(super) raw_len: u32,
}

/// Puts the header before a body.
pub(super) fn seal(head: &Head, life: Life, body: &[u8]) -> Result<Bytes> {
    let mut out = Vec::with_capacity(CHUNK_HEADER_BYTES + body.len());
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&[FORMAT, head.section.number(), head.encoding as u8, head.bits]);
    out.extend_from_slice(&life.table.to_le_bytes());
    out.extend_from_slice(&life.version.get().to_le_bytes());
    for number in [head.first, head.count, head.raw_len, length(body.len())?] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    let mut hash = Xxh3::new();
    hash.update(&out);
    hash.update(body);
    out.extend_from_slice(&hash.digest().to_le_bytes());
    out.extend_from_slice(body);
    Ok(out.into())
}

/// Checks what a chunk says of itself and gives its body. That it is not damaged, its hash in the manifest
/// has told.
pub(super) fn open(bytes: &[u8], section: Section, life: Life) -> Result<(Head, &[u8])> {
    let Some((head, body)) = bytes.split_first_chunk::<CHUNK_HEADER_BYTES>() else {
        return Err(section.corrupt(format!("it is shorter than a header bytes={}", bytes.len())));
    };
    let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let long = |at: usize| u64::from(word(at)) | (u64::from(word(at + 4)) << 32);
    if head[..4] != MAGIC {
        return Err(section.corrupt("it does not begin with the mark of a chunk"));
    }
    if head[4] != FORMAT {
        let why = format!("unknown format found={} supported={FORMAT}", head[4]);
        return Err(section.corrupt(why));
    }
    if word(36) as usize != body.len() {
        let why = format!("torn, body bytes found={} expected={}", body.len(), word(36));
        return Err(section.corrupt(why));
    }
    if head[5] != section.number() {
        return Err(section.corrupt(format!("it is another section found={}", head[5])));
    }
    let found = Life { table: long(8), version: Version::new(long(16)) };
    if found.table != life.table {
        return Err(section.corrupt("it belongs to another table"));
    }
    if found.version != life.version {
        let why = format!("another version found={} expected={}", found.version, life.version);
        return Err(section.corrupt(why));
    }
    let encoding = [Encoding::Plain, Encoding::Zstd, Encoding::ZstdRuns]
        .into_iter()
        .find(|encoding| *encoding as u8 == head[6])
        .ok_or_else(|| section.corrupt(format!("unknown encoding found={}", head[6])))?;
    let (bits, first, count, raw_len) = (head[7], word(24), word(28), word(32));
    Ok((Head { section, encoding, bits, first, count, raw_len }, body))
}

/// Turns the bytes of a section into chunks of at most `limit` bytes, compressed where that is
/// shorter.
pub(super) fn split(section: Section, life: Life, raw: &[u8], limit: usize) -> Result<Vec<Bytes>> {
    let compressed = compress(raw, BLOB_LEVEL)?;
    let (encoding, body) = if compressed.len() < raw.len() {
        (Encoding::Zstd, compressed.as_slice())
    } else {
        (Encoding::Plain, raw)
    };
    let size = limit.saturating_sub(CHUNK_HEADER_BYTES).max(1);
    let count = length(body.len().div_ceil(size).max(1))?;
    let raw_len = length(raw.len())?;
    (0..count)
        .map(|first| {
            let from = first as usize * size;
            let piece = &body[from..body.len().min(from + size)];
            seal(&Head { section, encoding, bits: 0, first, count, raw_len }, life, piece)
        })
        .collect()
}

/// Puts the pieces of a section together again, to be read; what they hold is at most `raw_max` bytes
/// long.
pub(super) fn join(
    section: Section,
    life: Life,
    pieces: &[&Bytes],
    raw_max: u64,
) -> Result<Reader<'static>> {
    let mut body = Vec::new();
    let mut whole: Option<Head> = None;
    for (place, piece) in pieces.iter().enumerate() {
        let (head, bytes) = open(piece, section, life)?;
        let whole = *whole.get_or_insert(head);
        if whole.count as usize != pieces.len() || head != (Head { first: length(place)?, ..whole })
        {
            let why = format!("it is out of place found={} expected={place}", head.first);
            return Err(section.corrupt(why));
        }
        body.extend_from_slice(bytes);
    }
    let Some(whole) = whole else { return Ok(Reader::new(section.name(), &[])) };
    if u64::from(whole.raw_len) > raw_max {
        let why = format!("its length is out of range found={} max={raw_max}", whole.raw_len);
        return Err(section.corrupt(why));
    }
    match whole.encoding {
        Encoding::Plain if body.len() == whole.raw_len as usize => {
            Ok(Reader::of(section.name(), Cursor::new(body), whole.raw_len.into()))
        }
        Encoding::Zstd => unpack(section, Cursor::new(body), whole.raw_len),
        _ => Err(section.corrupt("its encoding and its length do not fit")),
    }
}

pub(super) fn compress(raw: &[u8], level: i32) -> Result<Vec<u8>> {
    zstd::bulk::compress(raw, level).map_err(|source| {
        let error = Error::new(crate::ErrorKind::Internal, "encode");
        error.message("zstd failed to compress").with_source(source)
    })
}

/// Decompresses, while it is read, to exactly `raw_len` bytes, which the caller has found to be in range.
pub(super) fn unpack<'a>(
    section: Section,
    body: impl BufRead + 'a,
    raw_len: u32,
) -> Result<Reader<'a>> {
    let failed =
        |source: io::Error| section.corrupt("zstd failed to decompress").with_source(source);
    let mut decoder = Decoder::with_buffer(body).map_err(failed)?;
    decoder.window_log_max(WINDOW_LOG_MAX).map_err(failed)?;
    let source = BufReader::with_capacity(UNPACKED_BYTES, decoder);
    Ok(Reader::of(section.name(), source, raw_len.into()))
}

/// A length as a header holds it.
pub(super) fn length(length: usize) -> Result<u32> {
    u32::try_from(length)
        .map_err(|_| Error::invalid("encode", format!("{length} bytes are more than 4 GiB")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life() -> Life {
        Life::new(TableUid::from_u128(1), Version::new(3))
    }

    fn raw() -> Vec<u8> {
        (0..5_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect()
    }

    fn read(section: Section, life: Life, pieces: &[&Bytes], raw_max: u64) -> Result<Vec<u8>> {
        join(section, life, pieces, raw_max)?.rest()
    }

    #[test]
    fn a_blob_in_pieces_comes_back_and_each_is_within_the_limit() {
        for limit in [100, 1_000, 1 << 20] {
            let pieces = split(Section::Annex, life(), &raw(), limit).expect("splits");
            assert!(pieces.iter().all(|piece| piece.len() <= limit));
            let pieces: Vec<_> = pieces.iter().collect();
            assert_eq!(read(Section::Annex, life(), &pieces, 20_000).expect("joins"), raw());
            let error = read(Section::Annex, life(), &pieces, 19_999).expect_err("too long");
            assert!(error.to_string().contains("out of range"), "{error}");
        }
    }

    #[test]
    fn foreign_and_misplaced_pieces_are_named() {
        let pieces = split(Section::Annex, life(), &raw(), 9_000).expect("splits");
        let say = |section, life, pieces: &[&Bytes]| {
            read(section, life, pieces, 20_000).expect_err("corrupt").to_string()
        };
        let whole: Vec<_> = pieces.iter().collect();
        let other_life = Life::new(TableUid::from_u128(2), Version::new(3));
        assert!(say(Section::Annex, other_life, &whole).contains("another table"));
        let other_version = Life::new(TableUid::from_u128(1), Version::new(4));
        assert!(say(Section::Annex, other_version, &whole).contains("another version found=3"));
        assert!(say(Section::Nodes, life(), &whole).contains("another section"));
        assert!(
            say(Section::Annex, life(), &[whole[1], whole[0], whole[2]]).contains("out of place")
        );
        assert!(say(Section::Annex, life(), &whole[..2]).contains("out of place"));
        let torn = pieces[0].slice(..pieces[0].len() - 1);
        assert!(say(Section::Annex, life(), &[&torn]).contains("torn"));
        let mut newer = pieces[0].to_vec();
        newer[4] = 2;
        let text = say(Section::Annex, life(), &[&newer.into()]);
        assert!(text.contains("unknown format found=2 supported=1"), "{text}");
    }

    #[test]
    fn a_frame_that_is_not_as_long_as_it_says_is_refused() {
        let bomb = compress(&vec![0; 1 << 20], 1).expect("compresses");
        for (raw_len, why) in [(100, "more bytes than it says"), (2 << 20, "it ends too early")] {
            let encoding = Encoding::Zstd;
            let head =
                Head { section: Section::Annex, encoding, bits: 0, first: 0, count: 1, raw_len };
            let chunk = seal(&head, life(), &bomb).expect("seals");
            let error = read(Section::Annex, life(), &[&chunk], raw_len.into()).expect_err("odd");
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
