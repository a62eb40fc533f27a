//! The nodes section: the node table as JSON, `null` for an empty slot.

use std::cell::Cell;
use std::fmt;
use std::io::{self, Read};

use serde::Deserializer as _;
use serde::de::{Error as _, SeqAccess, Visitor};
use serde_json::Deserializer;

use super::chunk::Section;
use super::varint::Reader;
use crate::error::{Error, ErrorKind, Result};
use crate::types::NodeEntry;

/// The most bytes of one entry, with what stands between it and the next: its names and addresses are bounded, and the rest is for what a
/// newer version adds.
pub(super) const NODE_BYTES_MAX: usize = 1024;

pub(super) fn encode(nodes: &[Option<NodeEntry>]) -> Result<Vec<u8>> {
    serde_json::to_vec(nodes).map_err(unwritable)
}

/// Reads as many slots as there have to be, and no more: neither their number nor their length is found
/// out only when they are all there.
pub(super) fn decode(mut reader: Reader<'_>, slots: usize) -> Result<Vec<Option<NodeEntry>>> {
    let room = Cell::new(NODE_BYTES_MAX);
    let mut json = Deserializer::from_reader(Bounded { reader: &mut reader, room: &room });
    let nodes = json.deserialize_seq(Slots { slots, room: &room });
    let nodes = nodes.and_then(|nodes| json.end().map(|()| nodes));
    let nodes =
        nodes.map_err(|source| Section::Nodes.corrupt(format!("it is no node table: {source}")))?;
    if nodes.len() != slots {
        let why = format!("slots found={} expected={slots}", nodes.len());
        return Err(Section::Nodes.corrupt(why));
    }
    reader.end()?;
    Ok(nodes)
}

/// The bytes of the table, of which there is room for those of one entry at a time.
struct Bounded<'a, 'b> {
    reader: &'a mut Reader<'b>,
    room: &'a Cell<usize>,
}

impl Read for Bounded<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = buffer.len().min(self.room.get());
        let count = self.reader.read(&mut buffer[..most])?;
        if count == 0 && most < buffer.len() {
            let why = format!("an entry is longer than {NODE_BYTES_MAX} bytes");
            return Err(io::Error::other(why));
        }
        self.room.set(self.room.get() - count);
        Ok(count)
    }
}

struct Slots<'a> {
    slots: usize,
    room: &'a Cell<usize>,
}

impl<'de> Visitor<'de> for Slots<'_> {
    type Value = Vec<Option<NodeEntry>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of {} nodes", self.slots)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut nodes = Vec::new();
        while let Some(node) = seq.next_element()? {
            if nodes.len() == self.slots {
                return Err(A::Error::custom(format!("more slots than expected={}", self.slots)));
            }
            nodes.push(node);
            self.room.set(NODE_BYTES_MAX);
        }
        Ok(nodes)
    }
}

/// Which slots name a node.
pub(super) fn known(nodes: &[Option<NodeEntry>]) -> Vec<bool> {
    nodes.iter().map(Option::is_some).collect()
}

pub(super) fn unwritable(source: serde_json::Error) -> Error {
    Error::new(ErrorKind::Internal, "encode")
        .effect_none()
        .message("a record can't be written")
        .with_source(source)
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use super::*;

    /// The same bytes, again and again.
    struct Endless(&'static [u8], usize);

    impl Read for Endless {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let bytes = &self.0[self.1..];
            let count = bytes.len().min(buffer.len());
            buffer[..count].copy_from_slice(&bytes[..count]);
            self.1 = (self.1 + count) % self.0.len();
            Ok(count)
        }
    }

    #[test]
    fn no_more_is_read_than_there_are_slots() {
        let read = |begin: &'static str, then: &'static str| {
            let source = BufReader::new(begin.as_bytes().chain(Endless(then.as_bytes(), 0)));
            let reader = Reader::of("nodes chunk", source, u64::MAX);
            decode(reader, 3).expect_err("it has no end").to_string()
        };
        let (slots, entry) = ("more slots than expected=3", "an entry is longer than 1024 bytes");
        for (begin, then, why) in [
            ("[", "null,", slots),
            ("[\"", "a", entry),
            ("[", " ", entry),
            ("[null,{\"x\":\"", "a", entry),
            ("[null,null,null]", " ", entry),
        ] {
            let error = read(begin, then);
            assert!(error.contains(why), "{begin}{then}…: {error}");
        }
        let read = |text: &str| decode(Reader::new("nodes chunk", text.as_bytes()), 3);
        assert_eq!(read("[null,null,null]").expect("three"), vec![None; 3]);
        for bad in ["[null,null]", "[null,null,null] x", "[null,null,null", "", "{}"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
