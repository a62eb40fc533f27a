//! The epochs section: runs of equal epochs. All equal, they stand in the manifest as one number.

use super::varint::{self, Reader};
use crate::error::Result;
use crate::types::Version;

/// A run takes a length of at most 4 bytes and a difference of at most 10.
pub(super) const RUN_BYTES_MAX: u64 = 14;

/// The longest section that this many shards can have, uncompressed.
pub(super) fn bytes_max(shards: u32) -> u64 {
    (u64::from(shards) + 1) * RUN_BYTES_MAX
}

/// The one epoch that all shards have, if so.
pub(super) fn constant(epochs: &[u64]) -> Option<u64> {
    let first = epochs.first().copied()?;
    epochs.iter().all(|epoch| *epoch == first).then_some(first)
}

/// The lengths of all runs, then the differences of each to the one before: apart, because zstd
/// then finds the many equal lengths.
pub(super) fn encode(epochs: &[u64]) -> Vec<u8> {
    let (mut lengths, mut steps) = (Vec::new(), Vec::new());
    let (mut runs, mut before) = (0, 0);
    for run in epochs.chunk_by(|a, b| a == b) {
        varint::put(&mut lengths, run.len() as u64);
        varint::put(&mut steps, zigzag(run[0].wrapping_sub(before)));
        before = run[0];
        runs += 1;
    }
    let mut out = Vec::with_capacity(lengths.len() + steps.len() + 4);
    varint::put(&mut out, runs);
    out.extend_from_slice(&lengths);
    out.extend_from_slice(&steps);
    out
}

/// Decodes the epochs of `shards` shards, none of them above `version`.
pub(super) fn decode(mut reader: Reader<'_>, shards: usize, version: Version) -> Result<Vec<u64>> {
    let runs = reader.index(shards, "number of runs")?;
    let (mut lengths, mut left) = (Vec::new(), shards);
    for _ in 0..runs {
        let length = reader.index(left, "run")?;
        left -= length;
        lengths.push(length);
    }
    if left > 0 {
        let why = format!("epochs found={} expected={shards}", shards - left);
        return Err(reader.corrupt(&why));
    }
    let mut epochs = Vec::new();
    let mut epoch = 0_u64;
    for length in lengths {
        epoch = epoch.wrapping_add(unzigzag(reader.number()?));
        if epoch > version.get() {
            let why = format!("an epoch is above the version found={epoch} version={version}");
            return Err(reader.corrupt(&why));
        }
        epochs.resize(epochs.len() + length, epoch);
    }
    reader.end()?;
    Ok(epochs)
}

/// A difference, modulo 2^64, so that small ones in both directions are small numbers.
fn zigzag(step: u64) -> u64 {
    (step << 1) ^ (step >> 63).wrapping_neg()
}

fn unzigzag(number: u64) -> u64 {
    (number >> 1) ^ (number & 1).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn epochs_read_back(epochs in prop::collection::vec(0..9_u64, 1..99), wide: bool) {
            let scale = if wide { u64::MAX / 8 } else { 1 };
            let epochs: Vec<u64> = epochs.into_iter().map(|epoch| epoch * scale).collect();
            let raw = encode(&epochs);
            let read = |shards, version| {
                decode(Reader::new("test", &raw), shards, Version::new(version))
            };
            prop_assert_eq!(&read(epochs.len(), u64::MAX).expect("decodes"), &epochs);
            prop_assert!(read(epochs.len() + 1, u64::MAX).is_err());
            prop_assert!(read(epochs.len() - 1, u64::MAX).is_err());
            let most = epochs.iter().max().copied().unwrap_or(0);
            prop_assert!(most == 0 || read(epochs.len(), most - 1).is_err());
        }
    }
}
