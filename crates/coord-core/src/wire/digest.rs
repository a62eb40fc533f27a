//! The digest of a map: what two maps have in common when they are the same.

use xxhash_rust::xxh3::Xxh3;

use super::motions::phase_number;
use crate::types::{Fence, KeyHash, NodeEntry, ShardMap, Slot};

/// XXH3 with 128 bits over a canonical form of the whole map, its writer included. A publish whose
/// reply was lost is recognised by it, and whatever is put together from chunks and deltas is
/// checked against it.
///
/// The form lists the fields of this format one by one, so a field that a newer version adds to a
/// record changes no digest that an older one computes.
#[must_use]
pub fn digest(map: &ShardMap) -> u128 {
    let mut hash = Canonical(Xxh3::new());
    hash.0.update(&map.uid.as_u128().to_le_bytes());
    hash.number(map.version.get());
    hash.number(map.header.shards.get().into());
    hash.number(map.header.replicas.get().into());
    let KeyHash::Xxh3MultiplyShift = map.header.hash;
    hash.number(0);
    hash.number(map.writer.is_some().into());
    map.writer.iter().for_each(|writer| hash.fence(writer));
    hash.number(map.nodes.len() as u64);
    map.nodes.iter().for_each(|node| hash.node(node.as_ref()));
    hash.blocks(&map.owners, u16::to_le_bytes);
    hash.blocks(&map.epochs, u64::to_le_bytes);
    hash.number(map.motions.len() as u64);
    for (shard, motions) in &map.motions {
        hash.number(shard.get().into());
        hash.number(motions.len() as u64);
        for motion in motions {
            hash.number(motion.replica.into());
            hash.number(Slot::from(motion.other).get().into());
            hash.number(phase_number(motion.phase).into());
            hash.number(motion.since.get());
        }
    }
    hash.text(&map.annex);
    hash.0.digest128()
}

struct Canonical(Xxh3);

impl Canonical {
    fn number(&mut self, number: u64) {
        self.0.update(&number.to_le_bytes());
    }

    fn text(&mut self, text: impl AsRef<[u8]>) {
        self.number(text.as_ref().len() as u64);
        self.0.update(text.as_ref());
    }

    fn fence(&mut self, fence: &Fence) {
        self.text(fence.lease.as_str());
        self.number(fence.term.get());
        self.0.update(&fence.attempt.as_u128().to_le_bytes());
        self.text(fence.origin.as_str());
    }

    fn node(&mut self, node: Option<&NodeEntry>) {
        let Some(node) = node else { return self.number(0) };
        self.number(1);
        self.text(node.id.as_str());
        self.0.update(&node.incarnation.as_u128().to_le_bytes());
        self.text(node.address.as_str());
        self.text(node.status.as_str());
        self.text(node.zone.as_ref().map_or("", |zone| zone.as_str()));
    }

    /// Hashes in blocks: a call for each number would cost more than the hashing.
    fn blocks<T: Copy, const N: usize>(&mut self, numbers: &[T], bytes: impl Fn(T) -> [u8; N]) {
        let mut block = Vec::with_capacity(N * 1024);
        for numbers in numbers.chunks(1024) {
            block.clear();
            numbers.iter().for_each(|&number| block.extend_from_slice(&bytes(number)));
            self.0.update(&block);
        }
    }
}
