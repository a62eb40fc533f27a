//! Unsigned LEB128 numbers, and a reader that fails instead of running past the end.

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
pub(super) struct Reader<'a> {
    what: &'static str,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(what: &'static str, bytes: &'a [u8]) -> Self {
        Self { what, rest: bytes }
    }

    pub(super) fn corrupt(&self, why: &str) -> Error {
        Error::corrupt("decode", format!("{}: {why}", self.what))
    }

    pub(super) fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let Some((taken, rest)) = self.rest.split_at_checked(count) else {
            return Err(self.corrupt("it ends too early"));
        };
        self.rest = rest;
        Ok(taken)
    }

    pub(super) fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
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

    pub(super) fn bytes(&mut self, max: usize, name: &str) -> Result<&'a [u8]> {
        let count = self.index(max, name)?;
        self.take(count)
    }

    /// Fails if anything is left over.
    pub(super) fn end(self) -> Result<()> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(self.corrupt(&format!("bytes are left over count={}", self.rest.len())))
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
