//! Unsigned LEB128 numbers, and a reader that fails instead of running past the end.

use std::io::{self, BufRead, Read};

use crate::error::{Error, Result};

/// Appends a number: 7 bits a byte, the least significant first.
pub(super) fn put(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    out.push((number & 0x7f) as u8);
}

/// Appends a length and the bytes.
pub(super) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Reads what `put` wrote; `what` names it in the errors.
///
/// What is compressed is unpacked while it is read, so that nothing is taken for bytes that are only
/// announced.
pub(super) struct Reader<'a> {
    what: &'static str,
    source: Box<dyn BufRead + 'a>,
    /// How many bytes there have to be.
    length: u64,
    taken: u64,
}

impl<'a> Reader<'a> {
    /// Reads bytes as they are.
    pub(super) fn new(what: &'static str, bytes: &'a [u8]) -> Self {
        Self::of(what, bytes, bytes.len() as u64)
    }

    /// Reads a source, which has to hold exactly so many bytes.
    pub(super) fn of(what: &'static str, source: impl BufRead + 'a, length: u64) -> Self {
        Self { what, source: Box::new(source), length, taken: 0 }
    }

    pub(super) fn corrupt(&self, why: &str) -> Error {
        Error::corrupt("decode", format!("{}: {why}", self.what))
    }

    /// How many bytes there are still to be.
    fn left(&self) -> usize {
        usize::try_from(self.length - self.taken).unwrap_or(usize::MAX)
    }

    /// The next bytes, none only at the end.
    fn fill(&mut self) -> Result<&[u8]> {
        let (what, left) = (self.what, self.left());
        match self.source.fill_buf() {
            Ok(bytes) => Ok(&bytes[..bytes.len().min(left)]),
            Err(source) => {
                let error = Error::corrupt("decode", format!("{what}: zstd failed to decompress"));
                Err(error.with_source(source))
            }
        }
    }

    fn consume(&mut self, count: usize) {
        self.source.consume(count);
        self.taken += count as u64;
    }

    pub(super) fn exactly(&mut self, count: usize) -> Result<Vec<u8>> {
        let mut taken = Vec::new();
        while taken.len() < count {
            let wanted = count - taken.len();
            let bytes = self.fill()?;
            let bytes = &bytes[..bytes.len().min(wanted)];
            if bytes.is_empty() {
                return Err(self.corrupt("it ends too early"));
            }
            taken.extend_from_slice(bytes);
            let count = bytes.len();
            self.consume(count);
        }
        Ok(taken)
    }

    pub(super) fn byte(&mut self) -> Result<u8> {
        let Some(byte) = self.fill()?.first().copied() else {
            return Err(self.corrupt("it ends too early"));
        };
        self.consume(1);
        Ok(byte)
    }

    pub(super) fn number(&mut self) -> Result<u64> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(self.corrupt("a number is wider than 64 bits"))
    }

    /// A number of at most `max`; `name` says which, if it is more.
    pub(super) fn at_most(&mut self, max: u64, name: &str) -> Result<u64> {
        let number = self.number()?;
        if number > max {
            return Err(self.corrupt(&format!("{name} is out of range found={number} max={max}")));
        }
        Ok(number)
    }

    /// As `at_most`, to count or index with.
    pub(super) fn index(&mut self, max: usize, name: &str) -> Result<usize> {
        let number = self.at_most(max as u64, name)?;
        usize::try_from(number).map_err(|_| self.corrupt("a number is too large for this machine"))
    }

    pub(super) fn bytes(&mut self, max: usize, name: &str) -> Result<Vec<u8>> {
        let count = self.index(max, name)?;
        self.exactly(count)
    }

    /// All that is left.
    pub(super) fn rest(mut self) -> Result<Vec<u8>> {
        let rest = self.exactly(self.left())?;
        self.end()?;
        Ok(rest)
    }

    /// Fails if anything is left over, or if it was not as long as it had to be.
    pub(super) fn end(mut self) -> Result<()> {
        let left = self.left();
        if left > 0 {
            return Err(self.corrupt(&format!("bytes are left over count={left}")));
        }
        let why = match self.source.fill_buf() {
            Ok([]) => return Ok(()),
            Ok(_) => format!("it holds more bytes than it says expected={}", self.length),
            Err(_) => "zstd failed to decompress".to_owned(),
        };
        Err(self.corrupt(&why))
    }
}

impl Read for Reader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let bytes = self.fill().map_err(io::Error::other)?;
        let count = bytes.len().min(buffer.len());
        buffer[..count].copy_from_slice(&bytes[..count]);
        self.consume(count);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_read_back(numbers in prop::collection::vec(any::<u64>(), 0..20)) {
            let mut out = Vec::new();
            numbers.iter().for_each(|&number| put(&mut out, number >> (number % 64)));
            let mut reader = Reader::new("test", &out);
            for number in numbers {
                prop_assert_eq!(reader.number().expect("there"), number >> (number % 64));
            }
            reader.end().expect("nothing left");
        }
    }

    #[test]
    fn what_is_too_wide_or_too_short_is_refused() {
        let read = |bytes: &[u8]| Reader::new("test", bytes).number();
        assert_eq!(
            read(&[0xff; 9].into_iter().chain([1]).collect::<Vec<_>>()).ok(),
            Some(u64::MAX)
        );
        assert!(read(&[0xff; 9].into_iter().chain([2]).collect::<Vec<_>>()).is_err());
        assert!(read(&[0x80; 11]).is_err());
        assert!(read(&[0x80]).is_err());
        assert!(Reader::new("test", &[5]).at_most(4, "it").is_err());
        assert!(Reader::new("test", &[5]).end().is_err());
    }
}
