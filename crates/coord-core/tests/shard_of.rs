//! `shard_of` against docs/vectors/shard_of.json, which other languages test themselves with, and against
//! values of XXH3 that others have published.

use std::path::PathBuf;

use coord_core::{KeyHash, ShardCount, TableHeader, shard_of};
use serde::Deserialize;
use xxhash_rust::xxh3::xxh3_64;

#[derive(Deserialize)]
struct Vectors {
    hash: KeyHash,
    counts: Vec<ShardCount>,
    keys: Vec<Key>,
}

#[derive(Deserialize)]
struct Key {
    text: Option<String>,
    integer: Option<String>,
    bytes: Option<String>,
    hash: String,
    shards: Vec<u32>,
}

impl Key {
    fn bytes(&self) -> Vec<u8> {
        match (&self.text, &self.integer, &self.bytes) {
            (Some(text), None, None) => text.as_bytes().to_vec(),
            (None, Some(digits), None) => match digits.parse::<i64>() {
                Ok(number) => number.to_be_bytes().to_vec(),
                Err(_large) => digits.parse::<u64>().expect("an integer").to_be_bytes().to_vec(),
            },
            (None, None, Some(hex)) => (0..hex.len())
                .step_by(2)
                .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal"))
                .collect(),
            _ => panic!("a key is a text, an integer or bytes"),
        }
    }
}

fn vectors() -> Vectors {
    let path: PathBuf =
        [env!("CARGO_MANIFEST_DIR"), "..", "..", "docs", "vectors", "shard_of.json"]
            .iter()
            .collect();
    let text = std::fs::read_to_string(path).expect("the vectors are there");
    serde_json::from_str(&text).expect("the vectors can be read")
}

/// The same product without 128 bits, as docs/vectors/README.md offers it to other languages.
fn by_halves(hash: u64, shards: u32) -> u64 {
    let (high, low, shards) = (hash >> 32, hash & 0xffff_ffff, u64::from(shards));
    (high * shards + ((low * shards) >> 32)) >> 32
}

#[test]
fn every_published_key_has_its_published_shard() {
    let vectors = vectors();
    assert_eq!(vectors.hash, TableHeader::default().hash);
    assert!(vectors.keys.len() >= 30);
    for count in [1, 1024, 1 << 24] {
        assert!(vectors.counts.iter().any(|one| one.get() == count), "{count} is missing");
    }
    for key in &vectors.keys {
        let bytes = key.bytes();
        let hash = u64::from_str_radix(&key.hash, 16).expect("hexadecimal");
        assert_eq!(key.shards.len(), vectors.counts.len());
        for (&count, &shard) in vectors.counts.iter().zip(&key.shards) {
            assert_eq!(shard_of(&bytes, count).get(), shard, "{bytes:02x?} of {count:?}");
            assert_eq!(by_halves(hash, count.get()), u64::from(shard), "{bytes:02x?} of {count:?}");
        }
    }
}

/// Short inputs as several projects publish them, and the lengths at which XXH3 takes another path as
/// LLVM tests them (llvm/unittests/Support/xxhashTest.cpp: a xorshift generator's low bytes).
#[test]
fn the_hash_is_xxh3_as_others_know_it() {
    assert_eq!(xxh3_64(b""), 0x2d06_8005_38d3_94c2);
    assert_eq!(xxh3_64(b"a"), 0xe6c6_32b6_1e96_4e1f);
    assert_eq!(xxh3_64(b"ab"), 0xa873_719c_24d5_735c);
    assert_eq!(xxh3_64(b"abc"), 0x78af_5f94_892f_3950);
    let mut state = 1_u64;
    let bytes: Vec<u8> = (0..2243)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[0]
        })
        .collect();
    let known = [
        (1, 0xd0d4_96e0_5c55_3485),
        (8, 0xabc1_413d_a6cd_0209),
        (16, 0x7e46_9167_54d7_c9b8),
        (17, 0xed4b_e912_ba5f_836d),
        (128, 0x06a1_46ee_9a2d_a378),
        (129, 0xbc71_3812_9bf0_65da),
        (512, 0xcdfa_6b62_68e3_650f),
        (2243, 0x0979_f786_a24e_dde7),
    ];
    for (length, hash) in known {
        assert_eq!(xxh3_64(&bytes[..length]), hash, "of {length} bytes");
        let shards = ShardCount::new(1024).expect("count");
        let shard = shard_of(&bytes[..length], shards).get();
        assert_eq!(u64::from(shard), hash >> 54, "1024 shards: the ten high bits");
    }
}
