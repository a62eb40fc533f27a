//! A store's own mark of one write.

use std::fmt;

use bytes::Bytes;

/// A store's opaque mark of one write, for compare-and-set. Never compared for order in our code: only the
/// backend that made it knows what it holds.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Revision(Bytes);

impl Revision {
    /// The revision that a backend encodes so.
    #[must_use]
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Self {
        Self(bytes.into())
    }

    /// The revision that is this number, for stores that count.
    #[must_use]
    pub fn from_u64(number: u64) -> Self {
        Self(Bytes::copy_from_slice(&number.to_be_bytes()))
    }

    /// What the backend put in.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The number that was put in, if it was one.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        Some(u64::from_be_bytes(self.0.as_ref().try_into().ok()?))
    }
}

impl fmt::Debug for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.as_u64() {
            Some(number) => write!(f, "Revision({number})"),
            None => write!(f, "Revision({:?})", self.0),
        }
    }
}
