//! What this crate reads from stores and peers, for the fuzz targets. Each checks that what was read reads back
//! the same once it is written.

use bytes::Bytes;
use coord_core::{Error, NodeId, Result};
use serde::{Serialize, de::DeserializeOwned};

use crate::commands::{Command, CommandError, Reply};
use crate::mailbox::{Answer, Letter};
use crate::record::{self, ClusterRecord, TableNote};

fn json<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(
    bytes: &Bytes,
) -> Result<()> {
    let value: T = record::read("read", bytes)?;
    assert_eq!(record::read::<T>("read", &record::write("write", &value)?)?, value);
    Ok(())
}

/// A request's body.
///
/// # Errors
/// `Corrupt` for what is none.
pub fn command(bytes: &Bytes) -> Result<()> {
    json::<Command>(bytes)
}

/// An answer's body.
///
/// # Errors
/// `Corrupt` for what is none.
pub fn reply(bytes: &Bytes) -> Result<()> {
    json::<Reply>(bytes)
}

/// Some answers' bodies.
#[must_use]
pub fn replies() -> Vec<Bytes> {
    let refused = CommandError::NotLeader { leader: NodeId::new("n1").ok() };
    let replies = [Reply::Refused(refused), Reply::Unanswered];
    replies.iter().filter_map(|reply| record::write("write", reply).ok()).collect()
}

/// The annex of the reserved table, or of another one.
///
/// # Errors
/// `Corrupt` for what is neither.
pub fn annex(bytes: &Bytes) -> Result<()> {
    let note = TableNote::read(bytes);
    assert_eq!(TableNote::read(&note.write()?), note);
    // An older format is written as the present one.
    let record = ClusterRecord::read(bytes)?.write()?;
    assert_eq!(ClusterRecord::read(&record)?.write()?, record);
    Ok(())
}

/// What stands in the frames of one connection, from either side.
///
/// # Errors
/// `Corrupt` for the first that is none.
pub fn frames(bytes: &Bytes) -> Result<()> {
    crate::transport::fuzzing::read_frames(bytes)
}

/// Serves so many clients that greet as they should, announce the longest frame and send 4 KiB of it.
///
/// # Errors
/// Where one of them is not served, or there is no runtime to be had.
pub fn announced(connections: usize) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let failed = |error| Error::unavailable("serve", "there is no runtime").with_source(error);
    let runtime = runtime.map_err(|error: std::io::Error| failed(error))?;
    runtime.block_on(crate::transport::fuzzing::announced(connections))
}

/// Messages to a shard.
///
/// # Errors
/// `Corrupt` for what is none.
pub fn letter(bytes: &Bytes) -> Result<()> {
    let letter = Letter::read(bytes.clone())?;
    assert_eq!(Letter::read(letter.write())?, letter);
    Ok(())
}

/// Some messages to a shard.
#[must_use]
pub fn letters() -> Vec<Bytes> {
    vec![crate::mailbox::sample_letter().write()]
}

/// What the host of a shard says of messages.
///
/// # Errors
/// `Corrupt` for what says nothing of that kind.
pub fn answer(bytes: &Bytes) -> Result<()> {
    let answer = Answer::read(bytes.clone())?;
    assert_eq!(Answer::read(answer.write())?, answer);
    Ok(())
}
