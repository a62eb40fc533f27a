//! Motions, in a map's section and in a delta: for each shard a gap, a count and the motions.

use std::collections::BTreeMap;

use super::varint::{self, Reader};
use crate::error::{Error, Result};
use crate::types::{Motion, MotionPhase, ShardId, Slot, TableHeader, VERSION_MAX, Version};

/// A motion takes a replica, a slot, a phase and a version; each shard besides a gap and a count.
pub(super) const MOTION_BYTES_MAX: u64 = 24;

pub(super) fn phase_number(phase: MotionPhase) -> u8 {
    match phase {
        MotionPhase::MovingTo => 0,
        MotionPhase::Leaving => 1,
    }
}

/// Writes the motions of these shards, which come in order; no motions at all end those there were.
pub(super) fn encode(
    out: &mut Vec<u8>,
    header: &TableHeader,
    shards: &[(ShardId, &[Motion])],
) -> Result<()> {
    varint::put(out, shards.len() as u64);
    let mut next = 0;
    for (shard, motions) in shards {
        if motions.len() > usize::from(header.replicas.get()) {
            let why = format!("shard {shard} has {} motions, more than owners", motions.len());
            return Err(Error::invalid("encode", why));
        }
        varint::put(out, u64::from(shard.get() - next));
        next = shard.get() + 1;
        varint::put(out, motions.len() as u64);
        for motion in *motions {
            out.push(motion.replica);
            varint::put(out, Slot::from(motion.other).get().into());
            out.push(phase_number(motion.phase));
            varint::put(out, motion.since.get());
        }
    }
    Ok(())
}

/// Reads them into `motions`, in the place of those of the same shards.
pub(super) fn decode(
    reader: &mut Reader<'_>,
    header: &TableHeader,
    known: &[bool],
    motions: &mut BTreeMap<ShardId, Vec<Motion>>,
) -> Result<()> {
    let shards = header.shards.get() as usize;
    let replicas = header.replicas.get();
    let mut next = 0_usize;
    for _ in 0..reader.index(shards, "number of moving shards")? {
        let shard = next + reader.index(shards.saturating_sub(next + 1), "moving shard")?;
        if shard >= shards {
            return Err(reader.corrupt("a moving shard is out of range"));
        }
        next = shard + 1;
        let count = reader.index(replicas.into(), "number of motions")?;
        let moving =
            (0..count).map(|_| decode_one(reader, replicas, known)).collect::<Result<Vec<_>>>()?;
        let shard = ShardId::new(u32::try_from(shard).unwrap_or(u32::MAX));
        if moving.is_empty() {
            motions.remove(&shard);
        } else {
            motions.insert(shard, moving);
        }
    }
    Ok(())
}

fn decode_one(reader: &mut Reader<'_>, replicas: u8, known: &[bool]) -> Result<Motion> {
    let replica = reader.byte()?;
    if replica >= replicas {
        return Err(reader.corrupt(&format!("a motion of replica {replica} of {replicas}")));
    }
    let other = reader.index(known.len(), "slot of a motion")?;
    if !known.get(other).copied().unwrap_or(false) {
        return Err(reader.corrupt(&format!("a motion names no node slot={other}")));
    }
    let phase = match reader.byte()? {
        0 => MotionPhase::MovingTo,
        1 => MotionPhase::Leaving,
        odd => return Err(reader.corrupt(&format!("unknown phase of a motion found={odd}"))),
    };
    let since = Version::new(reader.at_most(VERSION_MAX, "version that began a motion")?);
    Ok(Motion::new(replica, Slot::new(u16::try_from(other).unwrap_or(u16::MAX)), phase, since))
}
