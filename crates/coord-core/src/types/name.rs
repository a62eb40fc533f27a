//! Names: parsed once, at the edge, so that a bad one cannot exist further in.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::shared::Text;
use crate::error::{Error, Result};
use crate::quote::quoted;

/// The longest cluster name, in bytes.
pub const CLUSTER_NAME_BYTES_MAX: usize = 40;
/// The longest lease or table name, in bytes.
pub const NAME_BYTES_MAX: usize = 63;
/// The longest node id, in bytes.
pub const NODE_ID_BYTES_MAX: usize = 200;

/// Checks dot-separated parts of `a-z 0-9 -`, each beginning and ending alphanumeric.
fn check_parts(what: &'static str, text: &str, bytes_max: usize) -> Result<()> {
    let fail = |why: &str| Err(Error::invalid("parse", format!("{what} {} {why}", quoted(text))));
    if text.is_empty() {
        return fail("is empty; give at least one character of a-z 0-9");
    }
    if text.len() > bytes_max {
        return fail(&format!("is {} bytes long; at most {bytes_max} are allowed", text.len()));
    }
    if text.starts_with('_') {
        return fail("begins with an underscore; such names are reserved for coord itself");
    }
    for part in text.split('.') {
        let edge =
            |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
        if !edge(part.chars().next()) || !edge(part.chars().next_back()) {
            return fail("has a part that does not begin and end with a-z or 0-9");
        }
        let odd = |c: &char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || *c == '-');
        if let Some(odd) = part.chars().find(odd) {
            return fail(&format!("holds {odd:?}; allowed are a-z 0-9 - and dots between parts"));
        }
    }
    Ok(())
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident, $what:literal, $max:expr, [$($reserved:literal),*]) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Text);

        impl $name {
            /// Parses a name.
            ///
            /// # Errors
            /// `Invalid`, naming the text and the rule it breaks.
            pub fn new(text: impl AsRef<str>) -> Result<Self> {
                let text = text.as_ref();
                check_parts($what, text, $max)?;
                Ok(Self(text.into()))
            }

            /// The name as it was given.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// True for the names that coord keeps for itself; they begin with an underscore.
            #[must_use]
            pub fn is_reserved(&self) -> bool {
                self.0.starts_with('_')
            }

            // Reads back what a store holds, where our own names may stand as well.
            fn from_stored(text: String) -> Result<Self> {
                const RESERVED: &[&str] = &[$($reserved),*];
                if RESERVED.contains(&text.as_str()) {
                    return Ok(Self(text.into()));
                }
                Self::new(text)
            }
        }

        impl FromStr for $name {
            type Err = Error;
            fn from_str(text: &str) -> Result<Self> {
                Self::new(text)
            }
        }

        impl TryFrom<String> for $name {
            type Error = Error;
            fn try_from(text: String) -> Result<Self> {
                Self::from_stored(text)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0.to_string()
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }
    };
}

name_type!(
    /// The name of a lease: dot-separated parts of `a-z 0-9 -`, up to 63 bytes.
    LeaseName, "lease name", NAME_BYTES_MAX, ["_leader", "_downing"]
);
name_type!(
    /// The name of a table (one per sharded type): dot-separated parts of `a-z 0-9 -`, up to 63 bytes.
    TableName, "table name", NAME_BYTES_MAX, ["_cluster"]
);
name_type!(
    /// The stable name of a node: dot-separated parts of `a-z 0-9 -`, up to 200 bytes.
    NodeId, "node id", NODE_ID_BYTES_MAX, []
);

impl LeaseName {
    /// The reserved lease that elects a cluster's leader.
    #[must_use]
    pub fn leader() -> Self {
        Self("_leader".into())
    }

    /// The reserved lease that decides which side of a partition goes on.
    #[must_use]
    pub fn downing() -> Self {
        Self("_downing".into())
    }

    /// All leases that coord keeps for itself.
    #[must_use]
    pub fn reserved() -> [Self; 2] {
        [Self::leader(), Self::downing()]
    }
}

impl TableName {
    /// The reserved table that holds what a new leader must not forget.
    #[must_use]
    pub fn cluster() -> Self {
        Self("_cluster".into())
    }
}

/// The name of a cluster, which isolates everything that is stored for it: one part of `a-z 0-9 -`,
/// up to 40 bytes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ClusterName(std::sync::Arc<str>);

impl ClusterName {
    /// Parses a cluster name.
    ///
    /// # Errors
    /// `Invalid`, naming the text and the rule it breaks.
    pub fn new(text: impl AsRef<str>) -> Result<Self> {
        let text = text.as_ref();
        check_parts("cluster name", text, CLUSTER_NAME_BYTES_MAX)?;
        if text.contains('.') {
            let why = format!("cluster name {text:?} holds a dot; it is one part of a-z 0-9 -");
            return Err(Error::invalid("parse", why));
        }
        Ok(Self(text.into()))
    }

    /// The name as it was given.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ClusterName {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        Self::new(text)
    }
}

impl TryFrom<String> for ClusterName {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        Self::new(text)
    }
}

impl From<ClusterName> for String {
    fn from(name: ClusterName) -> Self {
        name.0.to_string()
    }
}

impl fmt::Display for ClusterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ClusterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn good_names_parse() {
        for text in ["a", "0", "scheduler", "eu-1.orders.v2", &"a".repeat(63)] {
            assert_eq!(LeaseName::new(text).expect(text).as_str(), text);
            assert_eq!(TableName::new(text).expect(text).as_str(), text);
        }
        assert!(NodeId::new("n".repeat(200)).is_ok());
        assert!(ClusterName::new("c".repeat(40)).is_ok());
    }

    #[test]
    fn bad_names_are_refused_by_value_and_rule() {
        let long = "a".repeat(64);
        for text in
            ["", "A", "a b", "a/b", "-a", "a-", "a..b", ".a", "a.", "a*", "_leader", "ä", &long]
        {
            let error = LeaseName::new(text).expect_err(text);
            assert_eq!(error.kind(), crate::error::ErrorKind::Invalid);
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
        assert!(ClusterName::new("a.b").is_err());
        assert!(ClusterName::new("c".repeat(41)).is_err());
        assert!(NodeId::new("n".repeat(201)).is_err());
    }

    #[test]
    fn reserved_names_are_read_back_but_not_made() {
        let stored: LeaseName = serde_json::from_str("\"_leader\"").expect("stored");
        assert_eq!(stored, LeaseName::leader());
        for name in LeaseName::reserved() {
            let json = format!("\"{name}\"");
            assert_eq!(serde_json::from_str::<LeaseName>(&json).expect("stored"), name);
            assert!(name.is_reserved());
            assert!(name.as_str().parse::<LeaseName>().is_err());
        }
        assert!(serde_json::from_str::<LeaseName>("\"_other\"").is_err());
    }

    #[test]
    fn what_is_refused_is_not_repeated_at_length() {
        use crate::types::{Address, Era, Incarnation, Label, NodeStatus};
        let long = "x".repeat(1 << 20);
        for error in [
            LeaseName::new(&long).expect_err("long"),
            NodeId::new(&long).expect_err("long"),
            ClusterName::new(&long).expect_err("long"),
            ClusterName::new(long.replace('x', "x.")).expect_err("long"),
            Label::new(&long).expect_err("long"),
            Address::new(&long).expect_err("no port"),
            Address::new(format!("{long}:1")).expect_err("long"),
            long.parse::<Era>().expect_err("no number"),
            long.parse::<Incarnation>().expect_err("no id"),
            long.parse::<NodeStatus>().expect_err("no status"),
            long.parse::<crate::wire::ChunkKey>().expect_err("no key"),
        ] {
            let text = format!("{error} {error:?}");
            assert!(text.len() < 1000 && text.contains("… ("), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_parses_reads_back_the_same(text in "\\PC{0,70}") {
            if let Ok(name) = TableName::new(&text) {
                let json = serde_json::to_string(&name).expect("json");
                prop_assert_eq!(serde_json::from_str::<TableName>(&json).expect("back"), name);
            }
        }
    }
}
