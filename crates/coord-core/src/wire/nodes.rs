//! The nodes section: the node table as JSON, `null` for an empty slot.

use super::chunk::Section;
use crate::error::{Error, ErrorKind, Result};
use crate::types::NodeEntry;

/// The most bytes of one entry: its names and addresses are bounded, and the rest is for what a
/// newer version adds.
pub(super) const NODE_BYTES_MAX: usize = 1024;

pub(super) fn encode(nodes: &[Option<NodeEntry>]) -> Result<Vec<u8>> {
    serde_json::to_vec(nodes).map_err(unwritable)
}

pub(super) fn decode(raw: &[u8], slots: usize) -> Result<Vec<Option<NodeEntry>>> {
    let nodes: Vec<Option<NodeEntry>> = serde_json::from_slice(raw)
        .map_err(|source| Section::Nodes.corrupt("it is no node table").with_source(source))?;
    if nodes.len() != slots {
        let why = format!("slots found={} expected={slots}", nodes.len());
        return Err(Section::Nodes.corrupt(why));
    }
    Ok(nodes)
}

/// Which slots name a node.
pub(super) fn known(nodes: &[Option<NodeEntry>]) -> Vec<bool> {
    nodes.iter().map(Option::is_some).collect()
}

pub(super) fn unwritable(source: serde_json::Error) -> Error {
    Error::new(ErrorKind::Internal, "encode")
        .message("a record can't be written")
        .with_source(source)
}
