//! Random identities: one run of a node, one attempt to acquire, one life of a table, one request.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::quote::quoted;

macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(u128);

        impl $name {
            /// A new one, from the operating system's random source.
            #[must_use]
            pub fn random() -> Self {
                Self(crate::random::bits())
            }

            /// The one with these bits, for tests and simulations that must repeat.
            #[must_use]
            pub const fn from_u128(bits: u128) -> Self {
                Self(bits)
            }

            /// Its bits.
            #[must_use]
            pub const fn as_u128(self) -> u128 {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }

        impl FromStr for $name {
            type Err = Error;
            fn from_str(text: &str) -> Result<Self> {
                let hex = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
                match u128::from_str_radix(text, 16) {
                    Ok(bits) if hex => Ok(Self(bits)),
                    _ => Err(Error::invalid(
                        "parse",
                        format!("{} {} is not 32 hexadecimal digits", $what, quoted(text)),
                    )),
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = Error;
            fn try_from(text: String) -> Result<Self> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.to_string()
            }
        }
    };
}

random_id!(
    /// One run of a node: new at every start of the process, and after every lost registration.
    /// Two of them have no order; the store says which one came later.
    Incarnation, "incarnation"
);
random_id!(
    /// One logical acquire. The same attempt, retried after a lost reply, is the same acquire; any
    /// other attempt, also by the same node, is another holder.
    AttemptId, "attempt"
);
random_id!(
    /// One life of a table: a table that was deleted and made again has another uid.
    TableUid, "table uid"
);
random_id!(
    /// One request to the leader. Submitting the same id again is the same request.
    RequestId, "request id"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_random_and_read_back() {
        let one = AttemptId::random();
        assert_ne!(one, AttemptId::random());
        assert_eq!(one.to_string().parse::<AttemptId>().expect("parses"), one);
        assert!("+1".repeat(16).parse::<AttemptId>().is_err());
        assert!("12".parse::<Incarnation>().is_err());
    }
}
