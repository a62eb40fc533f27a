//! Terms, eras and fences: what makes a stale leader's write recognisable.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::id::AttemptId;
use super::name::LeaseName;
use crate::error::{Error, Result};
use crate::quote::quoted;

const STORE_BITS: u32 = 52;
const STORE_MASK: u64 = (1 << STORE_BITS) - 1;

/// The operator-set high 12 bits of every term, 0 to 4095; raised when a store was restored from an
/// old backup, so that its terms go on rising. 0 by default.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(try_from = "u16", into = "u16")]
pub struct Era(u16);

impl Era {
    /// The era with this number.
    ///
    /// # Errors
    /// `Invalid` above 4095.
    pub fn new(number: u16) -> Result<Self> {
        if u32::from(number) >= 1 << (64 - STORE_BITS) {
            return Err(Error::invalid("parse", format!("era {number} is above 4095")));
        }
        Ok(Self(number))
    }

    /// Its number.
    #[must_use]
    pub fn get(self) -> u16 {
        self.0
    }
}

impl FromStr for Era {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let wrong = |_| Error::invalid("parse", format!("era {} is not 0 to 4095", quoted(text)));
        Self::new(text.parse().map_err(wrong)?)
    }
}

impl TryFrom<u16> for Era {
    type Error = Error;
    fn try_from(number: u16) -> Result<Self> {
        Self::new(number)
    }
}

impl From<Era> for u16 {
    fn from(era: Era) -> Self {
        era.0
    }
}

/// The fencing token: strictly greater at every grant of a lease, gaps allowed.
///
/// The high 12 bits are the [`Era`], the low 52 bits the store's part.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Term(u64);

impl Term {
    /// Joins the era, which the client adds, and the part that the store counts.
    ///
    /// # Errors
    /// `Corrupt` if the store's part does not fit into 52 bits.
    pub fn new(era: Era, store_part: u64) -> Result<Self> {
        if store_part > STORE_MASK {
            let why = format!("the store's part of a term is 2^52 or more part={store_part}");
            return Err(Error::corrupt("read term", why));
        }
        Ok(Self((u64::from(era.0) << STORE_BITS) | store_part))
    }

    /// The whole number, as it is compared and shown.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The term with this whole number.
    #[must_use]
    pub const fn from_u64(number: u64) -> Self {
        Self(number)
    }

    /// The operator's part.
    #[must_use]
    pub fn era(self) -> Era {
        Era((self.0 >> STORE_BITS) as u16)
    }

    /// The store's part.
    #[must_use]
    pub fn store_part(self) -> u64 {
        self.0 & STORE_MASK
    }
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Term({})", self.0)
    }
}

/// Which store and which cluster in it a lease lives in, without secrets: terms of two origins are
/// counted apart and must not be compared.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Origin(Arc<str>);

impl Origin {
    /// An origin, as a backend names it: `scheme:store-identity/cluster`.
    #[must_use]
    pub fn new(text: impl AsRef<str>) -> Self {
        Self(text.as_ref().into())
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

/// What a holder shows to whatever is being protected.
///
/// The term decides; an equal term with another attempt is refused, because a store that lost its
/// newest writes may count the same number twice.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fence {
    /// The lease that was granted.
    pub lease: LeaseName,
    /// The term of the grant.
    pub term: Term,
    /// The attempt that won it.
    pub attempt: AttemptId,
    /// Where the lease lives.
    pub origin: Origin,
}

impl Fence {
    /// A fence of its four parts. A [`Grant`](crate::Grant) makes its own.
    #[must_use]
    pub fn new(lease: LeaseName, term: Term, attempt: AttemptId, origin: Origin) -> Self {
        Self { lease, term, attempt, origin }
    }

    /// Whether a write under `self` may pass where `highest` is the highest fence seen so far, of the
    /// same lease and origin: a greater term, or the very same grant.
    ///
    /// ```
    /// # use coord_core::{AttemptId, Fence, LeaseName, Origin, Term};
    /// let fence = |term, attempt| {
    ///     let (term, attempt) = (Term::from_u64(term), AttemptId::from_u128(attempt));
    ///     Fence::new(LeaseName::new("jobs").unwrap(), term, attempt, Origin::new("memory:1/orders"))
    /// };
    /// assert!(fence(8, 1).passes(&fence(7, 2)));
    /// assert!(fence(8, 1).passes(&fence(8, 1)));
    /// assert!(!fence(8, 1).passes(&fence(8, 2)));
    /// assert!(!fence(7, 1).passes(&fence(8, 2)));
    /// ```
    #[must_use]
    pub fn passes(&self, highest: &Self) -> bool {
        self.term > highest.term || (self.term == highest.term && self.attempt == highest.attempt)
    }

    /// Whether both fences come from one lease in one store, which is what makes them comparable.
    #[must_use]
    pub fn same_lease(&self, other: &Self) -> bool {
        self.lease == other.lease && self.origin == other.origin
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_term_is_era_and_store_part() {
        let era = Era::new(3).expect("era");
        let term = Term::new(era, 1_790_000_000_000_000).expect("micros fit");
        assert_eq!((term.era(), term.store_part()), (era, 1_790_000_000_000_000));
        assert!(term > Term::new(Era::default(), STORE_MASK).expect("largest"));
        assert!(Term::new(era, STORE_MASK + 1).is_err());
        assert!(Era::new(4096).is_err());
    }
}
