//! What stands in a frame.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use coord_core::{ClusterName, Error, Result};

/// What a request's or answer's frame has beside its payload.
pub(super) const HEADER: usize = 1 + 8;

/// Numbers the requests of one connection, from 1.
pub(super) type Id = u64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    Hello(u16, ClusterName),
    Welcome,
    Refused(String),
    Request(Id, Bytes),
    Answer(Id, Bytes),
    /// It was taken, and there is no answer.
    Failed(Id, String),
    Ping,
    Pong,
    /// No request after this one was taken.
    Goodbye(Id),
}

impl Frame {
    pub(super) fn write(&self) -> Bytes {
        let (kind, id, rest): (u8, Option<Id>, &[u8]) = match self {
            Self::Hello(version, cluster) => {
                let mut out = BytesMut::new();
                out.put_u8(1);
                out.put_u16(*version);
                out.put_slice(cluster.as_str().as_bytes());
                return out.freeze();
            }
            Self::Welcome => (2, None, &[]),
            Self::Refused(why) => (3, None, why.as_bytes()),
            Self::Request(id, payload) => (4, Some(*id), payload),
            Self::Answer(id, payload) => (5, Some(*id), payload),
            Self::Failed(id, why) => (6, Some(*id), why.as_bytes()),
            Self::Ping => (7, None, &[]),
            Self::Pong => (8, None, &[]),
            Self::Goodbye(id) => (9, Some(*id), &[]),
        };
        let mut out = BytesMut::with_capacity(HEADER + rest.len());
        out.put_u8(kind);
        if let Some(id) = id {
            out.put_u64(id);
        }
        out.put_slice(rest);
        out.freeze()
    }

    pub(super) fn read(mut bytes: Bytes) -> Result<Self> {
        let bad = || Error::corrupt("read frame", "it is not a frame of coord's transport");
        let text = |bytes: Bytes| String::from_utf8_lossy(&bytes).into_owned();
        let kind = bytes.try_get_u8().map_err(|_short| bad())?;
        let mut id = || bytes.try_get_u64().map_err(|_short| bad());
        Ok(match kind {
            1 => {
                let version = bytes.try_get_u16().map_err(|_short| bad())?;
                Self::Hello(version, ClusterName::new(text(bytes))?)
            }
            2 => Self::Welcome,
            3 => Self::Refused(text(bytes)),
            4 => Self::Request(id()?, bytes),
            5 => Self::Answer(id()?, bytes),
            6 => Self::Failed(id()?, text(bytes)),
            7 => Self::Ping,
            8 => Self::Pong,
            9 => Self::Goodbye(id()?),
            _ => return Err(bad()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_reads_back_and_what_is_cut_is_refused() {
        let payload = Bytes::from_static(b"payload");
        let frames = [
            Frame::Hello(1, ClusterName::new("orders").expect("name")),
            Frame::Welcome,
            Frame::Refused("why".to_owned()),
            Frame::Request(7, payload.clone()),
            Frame::Answer(8, payload),
            Frame::Failed(9, "why".to_owned()),
            Frame::Ping,
            Frame::Pong,
            Frame::Goodbye(10),
        ];
        for frame in frames {
            assert_eq!(Frame::read(frame.write()).expect("reads"), frame);
        }
        for cut in [&b""[..], b"\x01", b"\x04\0\0", b"\x09\0", b"\x0a"] {
            assert!(Frame::read(Bytes::from_static(cut)).is_err(), "{cut:?}");
        }
    }
}
