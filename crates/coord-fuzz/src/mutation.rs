//! Small damage to bytes, of the kinds that decoders go wrong on: lengths, numbers, repetitions, cuts.

use rand::rngs::StdRng;
use rand::{Rng as _, RngExt as _};

/// The longest input that is made.
const BYTES_MAX: usize = 256 * 1024;
const NUMBERS: [u64; 18] = [
    0,
    1,
    2,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0xffff_ffff,
    0x1_0000_0000,
    (1 << 52) - 1,
    1 << 53,
    u64::MAX >> 1,
    (u64::MAX >> 1) + 1,
    u64::MAX - 1,
    u64::MAX,
];
const WORDS: [&str; 22] = [
    "null,", "[", "]", "{", "}", "\"", "\\u0000", ",", ":", "true", "{}", "[]", "-1", "1e999",
    "0.1", "\0", "\u{fffd}", "://", "@", "%2f", "=", "\n",
];

/// Damages `input` in one to eight places; `other` is something to take pieces from.
pub(crate) fn mutate(rng: &mut StdRng, input: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..1 << rng.random_range(0_u32..5).saturating_sub(1) {
        step(rng, input, other);
    }
    input.truncate(BYTES_MAX);
}

fn step(rng: &mut StdRng, input: &mut Vec<u8>, other: &[u8]) {
    let at = rng.random_range(0..=input.len());
    let end = input.len().min(at + (1 << rng.random_range(0..8)));
    let number = NUMBERS[rng.random_range(0..NUMBERS.len())];
    match rng.random_range(0..14) {
        0 | 1 if at < input.len() => input[at] ^= 1 << rng.random_range(0..8),
        2 if at < input.len() => input[at] = rng.random(),
        3 => {
            let bytes = if rng.random() { number.to_be_bytes() } else { number.to_le_bytes() };
            let width = 1 << rng.random_range(0..4);
            // The lower bytes, which stand at the end of a big-endian number.
            let from = if bytes == number.to_be_bytes() { 8 - width } else { 0 };
            let end = input.len().min(at + width);
            let fits = end - at;
            input[at..end].copy_from_slice(&bytes[from..from + fits]);
        }
        4 => digits(rng, input, at, number),
        5 => _ = input.drain(at..end),
        6 => input.truncate(at),
        7 => {
            let piece = input[at..end].to_vec();
            insert(input, at, &piece.repeat(1 << rng.random_range(0..6)));
        }
        8 => {
            let word = WORDS[rng.random_range(0..WORDS.len())].as_bytes();
            insert(input, at, &word.repeat(1 << rng.random_range(0..3)));
        }
        9 if rng.random_bool(0.1) => {
            let word = WORDS[rng.random_range(0..WORDS.len())].as_bytes();
            insert(input, at, &word.repeat(1 << rng.random_range(0..14)));
        }
        10 | 11 if !other.is_empty() => {
            let from = rng.random_range(0..other.len());
            let to = other.len().min(from + (1 << rng.random_range(0..8)));
            insert(input, at, &other[from..to]);
        }
        12 => {
            let mut bytes = vec![0; 1 << rng.random_range(0..5)];
            rng.fill_bytes(&mut bytes);
            insert(input, at, &bytes);
        }
        _ => {
            let to = rng.random_range(0..=input.len());
            let length = (end - at).min(input.len() - to);
            input.copy_within(at..at + length, to);
        }
    }
}

/// Puts another number in the place of the next one that stands there in decimal digits.
fn digits(rng: &mut StdRng, input: &mut Vec<u8>, at: usize, number: u64) {
    let Some(from) = input[at..].iter().position(u8::is_ascii_digit).map(|found| at + found) else {
        return;
    };
    let length = input[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let sign = if rng.random_bool(0.1) { "-" } else { "" };
    input.splice(from..from + length, format!("{sign}{number}").into_bytes());
}

fn insert(input: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    input.splice(at..at, bytes.iter().copied());
}
