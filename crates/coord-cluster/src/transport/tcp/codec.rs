//! Frames in a stream of bytes: a length of 4 bytes, big-endian, and as many bytes.

use std::io::{Error, ErrorKind, Result};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio_util::codec::{Decoder, Encoder};

use super::frame::Frame;

/// A buffer that has grown beyond this is given back once it is empty.
const BUFFER_KEPT: usize = 64 * 1024;

/// Reads frames up to a length. The buffer grows with the bytes that have come, whatever length was announced:
/// a large announcement takes no memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Codec {
    max: usize,
}

impl Codec {
    pub(super) const fn new(max: usize) -> Self {
        Self { max }
    }

    /// From the next frame on, they may be so long.
    pub(super) const fn set_max(&mut self, max: usize) {
        self.max = max;
    }
}

impl Decoder for Codec {
    type Item = Bytes;
    type Error = Error;

    fn decode(&mut self, buffer: &mut BytesMut) -> Result<Option<Bytes>> {
        let Some(head) = buffer.first_chunk() else {
            if buffer.capacity() > BUFFER_KEPT {
                *buffer = BytesMut::from(&**buffer);
            }
            return Ok(None);
        };
        let length = u32::from_be_bytes(*head);
        let length = usize::try_from(length).ok().filter(|length| *length <= self.max);
        let length = length.ok_or_else(|| {
            let why = format!("a frame is longer than {} bytes", self.max);
            Error::new(ErrorKind::InvalidData, why)
        })?;
        if buffer.len() - head.len() < length {
            // The reader makes room for what comes, and doubles it: nothing is to be reserved here.
            return Ok(None);
        }
        buffer.advance(size_of::<u32>());
        Ok(Some(buffer.split_to(length).freeze()))
    }
}

impl Encoder<Frame> for Codec {
    type Error = Error;

    fn encode(&mut self, frame: Frame, buffer: &mut BytesMut) -> Result<()> {
        let too_long = |_| Error::new(ErrorKind::InvalidInput, "a frame is longer than 4 GiB");
        let length = u32::try_from(frame.len()).map_err(too_long)?;
        buffer.reserve(size_of::<u32>() + frame.len());
        buffer.put_u32(length);
        frame.write(buffer);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt, StreamExt};
    use tokio::io::{AsyncWriteExt, DuplexStream};
    use tokio_util::codec::FramedRead;

    use super::*;

    const MIB: usize = 1024 * 1024;

    /// Reads what has come, which is no whole frame, and says how large the buffer is.
    #[track_caller]
    fn buffered(reader: &mut FramedRead<DuplexStream, Codec>) -> usize {
        let next = reader.next().now_or_never();
        assert!(next.is_none(), "{next:?}");
        reader.read_buffer().capacity()
    }

    #[tokio::test]
    async fn a_frame_takes_as_much_as_has_come_of_it_and_gives_it_back() {
        let (mut client, server) = tokio::io::duplex(8 * MIB);
        let mut reader = FramedRead::new(server, Codec::new(4 * MIB));
        client.write_u32(u32::try_from(4 * MIB).expect("small")).await.expect("writes");
        let announced = buffered(&mut reader);
        assert!(announced <= 16 * 1024, "{announced}");
        client.write_all(&vec![7; MIB]).await.expect("writes");
        let quarter = buffered(&mut reader);
        assert!((MIB..=2 * MIB + 16 * 1024).contains(&quarter), "{quarter}");
        client.write_all(&vec![7; 3 * MIB]).await.expect("writes");
        // The next one's length begins to come.
        client.write_all(&[0, 0]).await.expect("writes");
        let frame = reader.next().await.expect("open").expect("a frame");
        assert_eq!(frame.len(), 4 * MIB);
        let after = buffered(&mut reader);
        assert!(after <= BUFFER_KEPT, "{after}");
        client.write_all(b"\0\x02ab").await.expect("writes");
        assert_eq!(reader.next().await.expect("open").expect("a frame"), "ab");
        client.write_u32(u32::try_from(4 * MIB).expect("small") + 1).await.expect("writes");
        let error = reader.next().await.expect("open").expect_err("too long");
        assert_eq!(error.kind(), ErrorKind::InvalidData);
    }
}
