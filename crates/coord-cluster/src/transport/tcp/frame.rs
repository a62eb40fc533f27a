//! The content of a frame.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use coord_core::{ClusterName, Error, Incarnation, NodeId, Result};

/// What a request's or answer's frame has beside its payload.
pub(super) const HEADER: usize = 1 + 8;
/// The most bytes of a frame before both sides know each other: names, and a reason.
pub(super) const GREETING_MAX: usize = 512;

/// Numbers the requests of one connection, from 1.
pub(super) type Id = u64;

/// The process that answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Who {
    pub(super) cluster: ClusterName,
    pub(super) node: NodeId,
    /// None while the node is not registered.
    pub(super) incarnation: Option<Incarnation>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// Of the same form in all versions, so that each can say what it speaks.
    Hello(u16, ClusterName),
    Welcome(Who),
    /// As `Hello`.
    Refused(String),
    Request(Id, Bytes),
    Answer(Id, Bytes),
    /// It was taken, and there is no answer.
    Failed(Id, String),
    Ping,
    Pong,
    /// No request after this one was taken.
    Goodbye(Id),
    /// The incarnation and the node that the client asks for.
    To(Incarnation, NodeId),
    /// Another process answers.
    Other(Who),
}

impl Who {
    fn len(&self) -> usize {
        let names = 2 + self.cluster.as_str().len() + self.node.as_str().len();
        names + self.incarnation.map_or(0, |_| size_of::<u128>())
    }

    fn write(&self, out: &mut BytesMut) {
        for name in [self.cluster.as_str(), self.node.as_str()] {
            // The longest has 200 bytes.
            out.put_u8(u8::try_from(name.len()).unwrap_or(u8::MAX));
            out.put_slice(name.as_bytes());
        }
        if let Some(incarnation) = self.incarnation {
            out.put_u128(incarnation.as_u128());
        }
    }

    fn read(mut bytes: Bytes) -> Result<Self> {
        let mut name = || {
            let length = usize::from(bytes.try_get_u8().ok()?);
            (length <= bytes.len()).then(|| text(&bytes.split_to(length)))
        };
        let cluster = ClusterName::new(name().ok_or_else(bad)?)?;
        let node = NodeId::new(name().ok_or_else(bad)?)?;
        let incarnation = match bytes.len() {
            0 => None,
            16 => Some(Incarnation::from_u128(bytes.get_u128())),
            _ => return Err(bad()),
        };
        Ok(Self { cluster, node, incarnation })
    }
}

impl Frame {
    /// How many bytes it has.
    pub(super) fn len(&self) -> usize {
        1 + match self {
            Self::Hello(_, cluster) => size_of::<u16>() + cluster.as_str().len(),
            Self::Welcome(who) | Self::Other(who) => who.len(),
            Self::Refused(why) => why.len(),
            Self::Request(_, payload) | Self::Answer(_, payload) => size_of::<Id>() + payload.len(),
            Self::Failed(_, why) => size_of::<Id>() + why.len(),
            Self::Ping | Self::Pong => 0,
            Self::Goodbye(_) => size_of::<Id>(),
            Self::To(_, node) => size_of::<u128>() + node.as_str().len(),
        }
    }

    pub(super) fn write(&self, out: &mut BytesMut) {
        let mut put = |kind: u8, id: Option<Id>, rest: &[u8]| {
            out.put_u8(kind);
            if let Some(id) = id {
                out.put_u64(id);
            }
            out.put_slice(rest);
        };
        match self {
            Self::Hello(version, cluster) => {
                put(1, None, &version.to_be_bytes());
                out.put_slice(cluster.as_str().as_bytes());
            }
            Self::Welcome(who) => {
                put(2, None, &[]);
                who.write(out);
            }
            Self::Refused(why) => put(3, None, why.as_bytes()),
            Self::Request(id, payload) => put(4, Some(*id), payload),
            Self::Answer(id, payload) => put(5, Some(*id), payload),
            Self::Failed(id, why) => put(6, Some(*id), why.as_bytes()),
            Self::Ping => put(7, None, &[]),
            Self::Pong => put(8, None, &[]),
            Self::Goodbye(id) => put(9, Some(*id), &[]),
            Self::To(incarnation, node) => {
                put(10, None, &incarnation.as_u128().to_be_bytes());
                out.put_slice(node.as_str().as_bytes());
            }
            Self::Other(who) => {
                put(11, None, &[]);
                who.write(out);
            }
        }
    }

    pub(super) fn read(mut bytes: Bytes) -> Result<Self> {
        let kind = bytes.try_get_u8().map_err(|_short| bad())?;
        let mut id = || bytes.try_get_u64().map_err(|_short| bad());
        Ok(match kind {
            1 => {
                let version = bytes.try_get_u16().map_err(|_short| bad())?;
                Self::Hello(version, ClusterName::new(text(&bytes))?)
            }
            2 => Self::Welcome(Who::read(bytes)?),
            3 => Self::Refused(text(&bytes)),
            4 => Self::Request(id()?, bytes),
            5 => Self::Answer(id()?, bytes),
            6 => Self::Failed(id()?, text(&bytes)),
            7 => Self::Ping,
            8 => Self::Pong,
            9 => Self::Goodbye(id()?),
            10 => {
                let incarnation = bytes.try_get_u128().map_err(|_short| bad())?;
                Self::To(Incarnation::from_u128(incarnation), NodeId::new(text(&bytes))?)
            }
            11 => Self::Other(Who::read(bytes)?),
            _ => return Err(bad()),
        })
    }
}

fn bad() -> Error {
    Error::corrupt("read frame", "it is not a frame of coord's transport")
}

/// A text that may be shown: another process wrote it, so it holds no line break and no other control character.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(frame: &Frame) -> Bytes {
        let mut out = BytesMut::new();
        frame.write(&mut out);
        assert_eq!(out.len(), frame.len(), "{frame:?}");
        out.freeze()
    }

    fn frames() -> Vec<Frame> {
        let payload = Bytes::from_static(b"payload");
        let cluster = ClusterName::new("orders").expect("name");
        let node = NodeId::new("n1").expect("name");
        let run = Incarnation::from_u128(5);
        let who = Who { cluster: cluster.clone(), node: node.clone(), incarnation: Some(run) };
        vec![
            Frame::Hello(4, cluster),
            Frame::Welcome(who.clone()),
            Frame::Refused("why".to_owned()),
            Frame::Request(7, payload.clone()),
            Frame::Answer(8, payload),
            Frame::Failed(9, "why".to_owned()),
            Frame::Ping,
            Frame::Pong,
            Frame::Goodbye(10),
            Frame::To(run, node),
            Frame::Other(Who { incarnation: None, ..who }),
        ]
    }

    #[test]
    fn what_is_written_reads_back_and_what_is_cut_is_refused() {
        for frame in frames() {
            assert_eq!(Frame::read(written(&frame)).expect("reads"), frame);
        }
        for cut in [
            &b""[..],
            b"\x01",
            b"\x04\0\0",
            b"\x09\0",
            b"\x0a\0\0",
            b"\x02",
            b"\x02\x06orders\x02n",
            b"\x0b\x06orders\x02n1\0",
            b"\x0c",
        ] {
            assert!(Frame::read(Bytes::from_static(cut)).is_err(), "{cut:?}");
        }
    }

    #[test]
    fn what_all_versions_understand_is_as_it_was() {
        let frames = frames();
        assert_eq!(written(&frames[0]), &b"\x01\0\x04orders"[..]);
        assert_eq!(written(&frames[2]), &b"\x03why"[..]);
    }

    #[test]
    fn a_reason_is_one_line() {
        let read = Frame::read(Bytes::from_static(b"\x03one\r\nWARN two\x1b[0m\xff"));
        assert_eq!(read.expect("reads"), Frame::Refused("one  WARN two [0m\u{fffd}".to_owned()));
    }

    #[test]
    fn the_longest_names_fit_into_a_greeting() {
        let node = NodeId::new("n".repeat(coord_core::NODE_ID_BYTES_MAX)).expect("name");
        let cluster = "c".repeat(coord_core::CLUSTER_NAME_BYTES_MAX);
        let cluster = ClusterName::new(cluster).expect("name");
        let run = Incarnation::from_u128(u128::MAX);
        let to = Frame::To(run, node.clone());
        let welcome = Frame::Welcome(Who { cluster, node, incarnation: Some(run) });
        for frame in [to, welcome] {
            assert!(frame.len() <= GREETING_MAX, "{}", frame.len());
            assert_eq!(Frame::read(written(&frame)).expect("reads"), frame);
        }
    }
}
