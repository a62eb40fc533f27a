//! What a new leader must not forget, as it stands in the annex of `_cluster`; and what a table's annex
//! says of its version.

use std::collections::BTreeMap;

use bytes::Bytes;
use coord_core::{Error, Incarnation, NodeId, Result, ShardId, TableName, Ttl};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The format that is written; a higher one is refused.
const FORMAT: u16 = 1;

/// The annex of `_cluster`: what was set by verdict or operator. It holds durations and never the time
/// of a machine's clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClusterRecord {
    format: u16,
    /// What is to be remembered of nodes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) nodes: BTreeMap<NodeId, NodeNote>,
    /// Whether balancing is paused.
    #[serde(default)]
    pub(crate) paused: bool,
    /// Which shards are kept where.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) pins: BTreeMap<TableName, BTreeMap<ShardId, NodeId>>,
    /// The tables whose last rebalance failed, and why.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) failures: BTreeMap<TableName, String>,
    /// Who is to lead next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) heir: Option<NodeId>,
}

/// What is to be remembered of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeNote {
    /// An operator drains it. Outlives its restarts.
    #[serde(default)]
    pub(crate) drain: bool,
    /// This run of it is leaving.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) leaving: Option<Incarnation>,
    /// It failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) failed: Option<Failure>,
}

impl NodeNote {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// How a node failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    /// Which run of it.
    pub(crate) incarnation: Incarnation,
    /// Why, for people.
    pub(crate) why: String,
    /// The TTL of the evicted record, where it was declared failed and may run on for that long: its
    /// shards stay where they are until this has passed on the leader's own clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) runs_on: Option<Ttl>,
}

impl Default for ClusterRecord {
    fn default() -> Self {
        Self {
            format: FORMAT,
            nodes: BTreeMap::new(),
            paused: false,
            pins: BTreeMap::new(),
            failures: BTreeMap::new(),
            heir: None,
        }
    }
}

impl ClusterRecord {
    /// Reads an annex; an empty one is that of a new table.
    pub(crate) fn read(annex: &Bytes) -> Result<Self> {
        if annex.is_empty() {
            return Ok(Self::default());
        }
        let record: Self = read("read cluster record", annex)?;
        check_format(record.format)?;
        Ok(record)
    }

    pub(crate) fn write(&self) -> Result<Bytes> {
        write("write cluster record", self)
    }

    /// Changes the note of a node, and drops it when nothing is left to remember.
    pub(crate) fn note(&mut self, node: &NodeId, change: impl FnOnce(&mut NodeNote)) {
        let note = self.nodes.entry(node.clone()).or_default();
        change(note);
        if note.is_empty() {
            self.nodes.remove(node);
        }
    }
}

/// The annex of a table: why its version was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TableNote {
    format: u16,
    /// Why its shards were placed anew, where they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rebalance: Option<String>,
}

impl TableNote {
    pub(crate) fn new(rebalance: Option<String>) -> Self {
        Self { format: FORMAT, rebalance }
    }

    /// Reads an annex; one that can't be read says nothing, for nothing depends on it but a reason.
    pub(crate) fn read(annex: &Bytes) -> Self {
        serde_json::from_slice(annex).unwrap_or_else(|_error| Self::new(None))
    }

    pub(crate) fn write(&self) -> Result<Bytes> {
        write("write table note", self)
    }
}

fn check_format(format: u16) -> Result<()> {
    if format == 0 || format > FORMAT {
        let why = format!("the cluster record is of a newer format format={format} known={FORMAT}");
        return Err(Error::corrupt("read cluster record", why));
    }
    Ok(())
}

/// Reads what this crate stores as JSON.
pub(crate) fn read<T: DeserializeOwned>(operation: &'static str, bytes: &Bytes) -> Result<T> {
    serde_json::from_slice(bytes)
        .map_err(|e| Error::corrupt(operation, "not the expected JSON").with_source(e))
}

/// Writes what this crate stores as JSON.
pub(crate) fn write<T: Serialize>(operation: &'static str, value: &T) -> Result<Bytes> {
    let json = serde_json::to_vec(value)
        .map_err(|e| Error::invalid(operation, "cannot be written as JSON").with_source(e))?;
    Ok(json.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOLDEN: &str = r#"{"format":1,"nodes":{"n1":{"drain":true,"leaving":"00000000000000000000000000000001"},"n2":{"drain":false,"failed":{"incarnation":"00000000000000000000000000000002","why":"operator","runs_on":90000}}},"paused":true,"pins":{"orders":{"7":"n1"}},"failures":{"orders":"no room"},"heir":"n3"}"#;

    fn node(name: &str) -> NodeId {
        NodeId::new(name).expect("name")
    }

    #[test]
    fn the_record_reads_and_writes_its_golden_form() {
        let mut record = ClusterRecord { paused: true, ..ClusterRecord::default() };
        record.note(&node("n1"), |note| {
            note.drain = true;
            note.leaving = Some(Incarnation::from_u128(1));
        });
        record.note(&node("n2"), |note| {
            note.failed = Some(Failure {
                incarnation: Incarnation::from_u128(2),
                why: "operator".to_owned(),
                runs_on: Some(Ttl::from_secs(90).expect("in range")),
            });
        });
        record.note(&node("n4"), |_note| {});
        let table = TableName::new("orders").expect("name");
        record.pins.entry(table.clone()).or_default().insert(ShardId::new(7), node("n1"));
        record.failures.insert(table, "no room".to_owned());
        record.heir = Some(node("n3"));
        let bytes = record.write().expect("writes");
        assert_eq!(std::str::from_utf8(&bytes).expect("text"), GOLDEN);
        assert_eq!(ClusterRecord::read(&bytes).expect("reads"), record);
    }

    #[test]
    fn unknown_fields_pass_and_newer_formats_and_damage_do_not() {
        let odd = Bytes::from_static(br#"{"format":1,"later":5}"#);
        assert_eq!(ClusterRecord::read(&odd).expect("reads"), ClusterRecord::default());
        assert_eq!(ClusterRecord::read(&Bytes::new()).expect("new"), ClusterRecord::default());
        for bad in ["{\"format\":2}", "{\"format\":0}", "{", "{}"] {
            let error = ClusterRecord::read(&Bytes::from(bad)).expect_err(bad);
            assert_eq!(error.kind(), coord_core::ErrorKind::Corrupt);
        }
        assert_eq!(TableNote::read(&Bytes::from_static(b"?")).rebalance, None);
    }
}
