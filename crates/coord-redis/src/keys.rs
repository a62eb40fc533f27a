//! Where everything stands, and how a revision is written down.
//!
//! ```text
//! coord:{<cluster>}:id            which store this is; made once, never deleted
//! coord:{<cluster>}:clock         the newest mark: terms and revisions
//! coord:{<cluster>}:leases        hash: the leases, by name
//! coord:{<cluster>}:lease-ends    sorted set: when each ends
//! coord:{<cluster>}:lease-names   sorted set: their names, for listing
//! coord:{<cluster>}:nodes         hash: the nodes, by id
//! coord:{<cluster>}:node-ends     sorted set: when each ends
//! coord:{<cluster>}:tables        hash: the tables' heads
//! coord:{<cluster>}:chunks:<table>   hash: the parts of its maps, immutable
//! coord:{<cluster>}:requests      hash: the requests, by id
//! coord:{<cluster>}:answers       hash: their answers
//! coord:{<cluster>}:request-ends  sorted set: when each ends
//! coord:{<cluster>}:events        stream: what the watches have to read again
//! coord:{<cluster>}:check:<id>    what `check` tries the commands on; gone 10 s later
//! ```
//!
//! Ends are microseconds since 1970 by the server's clock. All values but chunks, marks and the
//! identity are JSON. The braces put all keys of a cluster into one hash slot.

use std::sync::Arc;

use coord_core::kit::Op;
use coord_core::{ClusterName, ErrorKind, Result, Revision, TableName};

/// One kind of key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Identity,
    Clock,
    Leases,
    LeaseEnds,
    LeaseNames,
    Nodes,
    NodeEnds,
    Tables,
    Requests,
    Answers,
    RequestEnds,
    Events,
}

impl Kind {
    fn as_str(self) -> &'static str {
        match self {
            Self::Identity => "id",
            Self::Clock => "clock",
            Self::Leases => "leases",
            Self::LeaseEnds => "lease-ends",
            Self::LeaseNames => "lease-names",
            Self::Nodes => "nodes",
            Self::NodeEnds => "node-ends",
            Self::Tables => "tables",
            Self::Requests => "requests",
            Self::Answers => "answers",
            Self::RequestEnds => "request-ends",
            Self::Events => "events",
        }
    }
}

/// The keys of one cluster.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    root: Arc<str>,
    slot: u16,
}

impl Keys {
    pub(crate) fn new(cluster: &ClusterName) -> Self {
        Self { root: format!("coord:{{{cluster}}}:").into(), slot: slot_of(cluster.as_str()) }
    }

    /// What all keys begin with.
    pub(crate) fn root(&self) -> &str {
        &self.root
    }

    /// The hash slot that all keys are in.
    pub(crate) fn slot(&self) -> u16 {
        self.slot
    }

    pub(crate) fn of(&self, kind: Kind) -> String {
        format!("{}{}", self.root, kind.as_str())
    }

    pub(crate) fn chunks(&self, table: &TableName) -> String {
        format!("{}chunks:{table}", self.root)
    }

    /// A key that `check` writes.
    pub(crate) fn probe(&self, name: &str) -> String {
        format!("{}check:{name}", self.root)
    }
}

/// The hash slot of a tag, as the cluster specification has it: CRC16/XMODEM modulo 16384.
fn slot_of(tag: &str) -> u16 {
    let step = |crc: u16| if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
    let crc = tag
        .bytes()
        .fold(0_u16, |crc, byte| (0..8).fold(crc ^ (u16::from(byte) << 8), |crc, _| step(crc)));
    crc % 16_384
}

/// A [`Revision`] as this backend makes it: the mark that the record begins with.
pub(crate) fn revision(mark: u64) -> Revision {
    Revision::from_u64(mark)
}

/// The mark that a script put at the front of a record: `{"revision":7,…`.
pub(crate) fn mark_of(op: Op<'_>, record: &[u8]) -> Result<u64> {
    let digits = record.strip_prefix(br#"{"revision":"#).and_then(|rest| {
        let end = rest.iter().position(|byte| *byte == b',')?;
        std::str::from_utf8(&rest[..end]).ok()
    });
    digits.and_then(|digits| digits.parse().ok()).ok_or_else(|| {
        op.error(ErrorKind::Corrupt).message("the record does not begin with its revision")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_keys_of_a_cluster_hold_its_tag() {
        let keys = Keys::new(&ClusterName::new("orders").expect("name"));
        let table = TableName::cluster();
        for key in [keys.of(Kind::Leases), keys.chunks(&table), keys.probe("x")] {
            assert!(key.starts_with("coord:{orders}:"), "{key}");
        }
        assert_eq!(keys.of(Kind::LeaseEnds), "coord:{orders}:lease-ends");
    }

    #[test]
    fn a_record_begins_with_its_mark() {
        let op = Op::read("load", "orders");
        assert_eq!(
            mark_of(op, br#"{"revision":1790000000000000,"format":1}"#).ok(),
            Some(1_790_000_000_000_000)
        );
        for record in [&b""[..], b"{}", br#"{"format":1}"#, br#"{"revision":x,"format":1}"#] {
            assert_eq!(mark_of(op, record).expect_err("none").kind(), ErrorKind::Corrupt);
        }
    }

    #[test]
    fn slots_are_those_of_the_cluster_specification() {
        // The check value that the specification names, and what `CLUSTER KEYSLOT` answers.
        assert_eq!(slot_of("123456789"), 0x31C3);
        assert_eq!(slot_of("foo"), 12_182);
        assert_eq!(slot_of("bar"), 5_061);
    }
}
