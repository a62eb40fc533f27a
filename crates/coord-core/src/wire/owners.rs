//! The owners section: chunks of 65,536 shards, each in the smallest of three forms.

use bytes::Bytes;

use super::bits;
use super::chunk::{self, CHUNK_HEADER_BYTES, Encoding, Head, Life, Section};
use super::varint::{self, Reader};
use crate::error::Result;
use crate::types::{ShardMap, TableHeader};

/// The most shards of one chunk; fewer where the bit-packed form would pass the store's limit.
pub const CHUNK_SHARDS_MAX: u32 = 65_536;

const NOBODY: u16 = u16::MAX;
const OWNERS_LEVEL: i32 = 1;
/// A run takes two numbers, of at most 3 and 4 bytes.
const RUN_BYTES_MAX: usize = 8;

/// Encodes all owners of a map, in chunks of at most `limit` bytes.
pub(super) fn encode(map: &ShardMap, life: Life, limit: usize) -> Result<Vec<Bytes>> {
    let replicas = usize::from(map.header.replicas.get());
    let slots = u16::try_from(map.nodes.len()).unwrap_or(NOBODY);
    let width = bits::width(slots.into());
    let step = shards_a_chunk(replicas, width, limit);
    let mut first = 0;
    map.owners
        .chunks(step as usize * replicas)
        .map(|owners| {
            let count = chunk::length(owners.len() / replicas)?;
            let chunk = encode_chunk(owners, slots, width, life, (first, count));
            first += count;
            chunk
        })
        .collect()
}

fn shards_a_chunk(replicas: usize, width: u32, limit: usize) -> u32 {
    let fits = |shards: u32| {
        CHUNK_HEADER_BYTES + bits::packed_len(shards as usize * replicas, width) <= limit
    };
    let mut shards = CHUNK_SHARDS_MAX;
    while shards > 1 && !fits(shards) {
        shards /= 2;
    }
    shards
}

fn encode_chunk(
    owners: &[u16],
    slots: u16,
    width: u32,
    life: Life,
    (first, count): (u32, u32),
) -> Result<Bytes> {
    let packed = bits::pack(
        owners.iter().map(|&slot| u32::from(if slot == NOBODY { slots } else { slot })),
        width,
    );
    let raw: Vec<u8> = owners.iter().flat_map(|slot| slot.to_le_bytes()).collect();
    let runs = encode_runs(owners);
    let forms = [
        (Encoding::Plain, packed.len(), packed),
        (Encoding::Zstd, raw.len(), chunk::compress(&raw, OWNERS_LEVEL)?),
        (Encoding::ZstdRuns, runs.len(), chunk::compress(&runs, OWNERS_LEVEL)?),
    ];
    let [best, second, third] = forms;
    let shorter = |a: (Encoding, usize, Vec<u8>), b: (Encoding, usize, Vec<u8>)| {
        if b.2.len() < a.2.len() { b } else { a }
    };
    let (encoding, raw_len, body) = shorter(shorter(best, second), third);
    let bits = u8::try_from(width).unwrap_or(u8::MAX);
    let raw_len = chunk::length(raw_len)?;
    let head = Head { section: Section::Owners, encoding, bits, first, count, raw_len };
    chunk::seal(&head, life, &body)
}

/// Runs as slot + 1 (0 for an empty place) and length.
fn encode_runs(owners: &[u16]) -> Vec<u8> {
    let mut out = Vec::new();
    for run in owners.chunk_by(|a, b| a == b) {
        varint::put(&mut out, u64::from(run[0].wrapping_add(1)));
        varint::put(&mut out, run.len() as u64);
    }
    out
}

/// Decodes all chunks, in order. `known` says which slots name a node.
pub(super) fn decode(
    header: &TableHeader,
    known: &[bool],
    life: Life,
    chunks: &[&Bytes],
) -> Result<Vec<u16>> {
    let replicas = usize::from(header.replicas.get());
    let shards = header.shards.get();
    let mut owners: Vec<u16> = Vec::new();
    let mut next = 0;
    for bytes in chunks {
        let (head, body) = chunk::open(bytes, Section::Owners, life)?;
        let room = (shards - next).min(CHUNK_SHARDS_MAX);
        if head.first != next || head.count == 0 || head.count > room {
            let (first, count) = (head.first, head.count);
            let why = format!("shards found={first}+{count} expected={next}+1..={room}");
            return Err(Section::Owners.corrupt(why));
        }
        let from = owners.len();
        decode_chunk(&head, body, known.len(), head.count as usize * replicas, &mut owners)?;
        let is_known =
            |slot: u16| slot == NOBODY || known.get(usize::from(slot)).copied().unwrap_or(false);
        if let Some(odd) = owners[from..].iter().find(|slot| !is_known(**slot)) {
            return Err(Section::Owners.corrupt(format!("a slot names no node slot={odd}")));
        }
        next += head.count;
    }
    if next != shards {
        return Err(Section::Owners.corrupt(format!("shards found={next} expected={shards}")));
    }
    Ok(owners)
}

fn decode_chunk(
    head: &Head,
    body: &[u8],
    slots: usize,
    places: usize,
    owners: &mut Vec<u16>,
) -> Result<()> {
    let raw_len = head.raw_len as usize;
    let unfit = || Section::Owners.corrupt("its encoding and its length do not fit");
    match head.encoding {
        Encoding::Plain => {
            let slots = u32::try_from(slots).unwrap_or(u32::MAX);
            let width = bits::width(slots);
            if u32::from(head.bits) != width {
                let why = format!("bits found={} expected={width}", head.bits);
                return Err(Section::Owners.corrupt(why));
            }
            let numbers = bits::unpack(body, places, width).ok_or_else(unfit)?;
            // What is above 16 bits names no node either, and is refused as such.
            owners.extend(numbers.into_iter().map(|number| match u16::try_from(number) {
                Ok(slot) if number != slots => slot,
                _ if number == slots => NOBODY,
                _ => NOBODY - 1,
            }));
        }
        Encoding::Zstd if raw_len == places * 2 => {
            let raw = chunk::unpack(Section::Owners, body, head.raw_len)?.rest()?;
            owners.extend(raw.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])));
        }
        Encoding::ZstdRuns if raw_len <= places * RUN_BYTES_MAX => {
            let runs = chunk::unpack(Section::Owners, body, head.raw_len)?;
            decode_runs(runs, places, owners)?;
        }
        _ => return Err(unfit()),
    }
    Ok(())
}

fn decode_runs(mut reader: Reader<'_>, places: usize, owners: &mut Vec<u16>) -> Result<()> {
    let mut left = places;
    while left > 0 {
        let slot = reader.at_most(u16::MAX.into(), "slot")?;
        let length = reader.index(left, "run")?;
        if length == 0 {
            return Err(reader.corrupt("a run is empty"));
        }
        let slot = u16::try_from(slot).unwrap_or(0).wrapping_sub(1);
        owners.extend(std::iter::repeat_n(slot, length));
        left -= length;
    }
    reader.end()
}
