//! What a new leader must not forget, as it stands in the annex of `_cluster`; and what a table's annex
//! says of its version.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use coord_core::{
    Error, Incarnation, NodeEntry, NodeId, NodeStatus, Result, ShardId, ShardMap, TableName,
    TableUid, Ttl, Version,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::handoff::Handoff;

/// The format that is written; a higher one is refused. Format 2 added former incarnations, suspended nodes and
/// stuck shards, which a reader of format 1 must not overlook. Format 3 added quarantined shards, and is
/// written only where there are any, so that a cluster can be upgraded node by node.
const FORMAT: u16 = 3;
/// The format of a record without quarantined shards, and of a table's metadata.
const FORMAT_PLAIN: u16 = 2;

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
    /// The node that is to lead next.
    #[serde(rename = "heir", default, skip_serializing_if = "Option::is_none")]
    pub(crate) transfer_target: Option<NodeId>,
    /// The candidates for election; none where every node may be one.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) candidates: BTreeSet<NodeId>,
    /// Shards that have been in motion for longer than the handoff timeout, the first of each table.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) stuck: BTreeMap<TableName, BTreeSet<ShardId>>,
    /// Quarantined shards: no node may have them, because their hosts crashed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) parked: BTreeMap<TableName, BTreeMap<ShardId, Parked>>,
    /// The generation of each table, and the incarnations that have still to stop what they hosted of an
    /// earlier one.
    #[serde(rename = "lives", default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) generations: BTreeMap<TableName, TableGeneration>,
    /// Shards that crashed hosts have had in common.
    #[serde(default, skip_serializing_if = "Suspicions::is_empty")]
    pub(crate) suspicions: Suspicions,
    /// The record of an earlier generation of `_cluster` is lost, and with it the nodes that may host besides
    /// those that are registered. This holds until a whole node TTL has passed on the clock of one leader.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) lost: bool,
}

/// One generation of a table, from its creation to its deletion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TableGeneration {
    pub(crate) uid: TableUid,
    /// No node gets a shard before these are over or have stopped.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) awaits: Vec<Run>,
}

/// One incarnation of a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) node: NodeId,
    pub(crate) incarnation: Incarnation,
}

/// What a process knows of the members, as `_cluster` said while it was stored.
#[derive(Clone, Debug, Default)]
pub(crate) struct Before {
    /// The generation of `_cluster`.
    pub(crate) generation: Option<TableUid>,
    /// The incarnations that may host by that one.
    pub(crate) members: Vec<Run>,
    /// The incarnations that could host by the one before.
    pub(crate) former: Vec<Run>,
}

impl Before {
    /// The incarnations that may host by a generation before this one.
    pub(crate) fn this(&self, generation: TableUid) -> &[Run] {
        if self.generation.is_some_and(|known| known != generation) {
            &self.members
        } else {
            &self.former
        }
    }
}

/// Why a shard is quarantined.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Parked {
    /// The hosts that it took along, the first one first.
    pub(crate) hosts: Vec<NodeId>,
}

/// Which shards are suspect, and for which crashes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Suspicions {
    pub(crate) crashes: Vec<Crashed>,
    pub(crate) groups: Vec<Suspicion>,
}

impl Suspicions {
    fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }
}

/// An incarnation that crashed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Crashed {
    pub(crate) node: NodeId,
    pub(crate) incarnation: Incarnation,
    /// The version of each table then.
    pub(crate) versions: BTreeMap<TableName, Version>,
}

/// Shards that are suspect for the same crashes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Suspicion {
    /// Their indices in the list of crashes, the first one first.
    pub(crate) crashes: Vec<usize>,
    pub(crate) shards: BTreeMap<TableName, BTreeSet<ShardId>>,
}

/// What is to be remembered of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeNote {
    /// An operator drains it. Outlives its restarts.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) drain: bool,
    /// This incarnation of it is leaving.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) leaving: Option<Incarnation>,
    /// It goes also where its shards have not moved within the handoff timeout.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) forced: bool,
    /// It failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) failed: Option<Failure>,
    /// Incarnations of it that were declared failed and replaced since, with the TTL for which each may still
    /// run.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) former: BTreeMap<Incarnation, Ttl>,
    /// This incarnation of it vanished together with too many others to be declared failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) suspended: Option<Incarnation>,
}

impl NodeNote {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// How a node failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    /// Its incarnation.
    pub(crate) incarnation: Incarnation,
    /// Why, for people. The usual reason is left out: half of a cluster of thousands may fail at once, and
    /// the annex is bounded.
    #[serde(default = "ran_out", skip_serializing_if = "is_ran_out")]
    pub(crate) why: String,
    /// The TTL of the evicted record, where the incarnation was declared failed and may still run for that
    /// long: its shards stay where they are until this has passed on the leader's own clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) runs_on: Option<Ttl>,
    /// It was downed: its process goes down when it reads this, and does not join again.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) downed: bool,
}

impl Failure {
    /// Nothing of the incarnation runs any more.
    pub(crate) fn over(incarnation: Incarnation, why: &str) -> Self {
        Self { incarnation, why: brief(why), runs_on: None, downed: false }
    }
}

/// The most bytes that are kept of a text for people: what is stored is bounded, and has to hold what others
/// rely on.
const TEXT_BYTES_MAX: usize = 256;

/// A text for people as it is stored: of a long one the beginning and its length.
pub(crate) fn brief(text: &str) -> String {
    if text.len() <= TEXT_BYTES_MAX {
        return text.to_owned();
    }
    let ends = text.char_indices().map(|(at, char)| at + char.len_utf8());
    let end = ends.take_while(|end| *end <= TEXT_BYTES_MAX).last().unwrap_or_default();
    format!("{}… ({} bytes)", &text[..end], text.len())
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_false(value: &bool) -> bool {
    !value
}

/// Why most nodes fail.
pub(crate) const RAN_OUT: &str = "its registration ran out";

impl Failure {
    /// This incarnation's registration ran out.
    pub(crate) fn ran_out(incarnation: Incarnation) -> Self {
        Self::over(incarnation, RAN_OUT)
    }
}

fn ran_out() -> String {
    RAN_OUT.to_owned()
}

fn is_ran_out(why: &str) -> bool {
    why == RAN_OUT
}

impl Default for ClusterRecord {
    fn default() -> Self {
        Self {
            format: FORMAT_PLAIN,
            nodes: BTreeMap::new(),
            paused: false,
            pins: BTreeMap::new(),
            failures: BTreeMap::new(),
            transfer_target: None,
            candidates: BTreeSet::new(),
            stuck: BTreeMap::new(),
            parked: BTreeMap::new(),
            generations: BTreeMap::new(),
            suspicions: Suspicions::default(),
            lost: false,
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

    /// Reads the annex of a version of `_cluster`, and from its nodes what the annex leaves out.
    pub(crate) fn read_beside(map: &ShardMap) -> Result<Self> {
        let mut record = Self::read(map.annex())?;
        let failed = map.nodes().iter().flatten().filter(|node| node.status == NodeStatus::Failed);
        for NodeEntry { id, incarnation, .. } in failed {
            record.note(id, |note| {
                note.failed.get_or_insert_with(|| Failure::ran_out(*incarnation));
            });
        }
        Ok(record)
    }

    /// What [`read_beside`](Self::read_beside) finds among these nodes again is left out: a zone of a thousand
    /// nodes may fail, and every node reads each version.
    pub(crate) fn write_beside<'a>(
        &self,
        mut listed: impl FnMut(&NodeId) -> Option<&'a NodeEntry>,
    ) -> Result<Bytes> {
        let mut record = self.clone();
        record.nodes.retain(|node, note| {
            let entry = listed(node).filter(|entry| entry.status == NodeStatus::Failed);
            let ran_out = |entry: &NodeEntry| {
                let failed = Some(Failure::ran_out(entry.incarnation));
                *note == NodeNote { failed, ..NodeNote::default() }
            };
            !entry.is_some_and(ran_out)
        });
        record.write()
    }

    pub(crate) fn write(&self) -> Result<Bytes> {
        let format = if self.parked.is_empty() { FORMAT_PLAIN } else { FORMAT };
        write("write cluster record", &Self { format, ..self.clone() })
    }

    /// Whether both say the same except for nodes that left or whose registrations ran out: that a node is gone
    /// is visible to every node in the node table, and all else only here.
    pub(crate) fn says_what(&self, other: &Self) -> bool {
        let rest = |record: &Self| Self { nodes: BTreeMap::new(), ..record.clone() };
        let note = |note: &NodeNote| NodeNote {
            failed: note
                .failed
                .clone()
                .filter(|failed| *failed != Failure::ran_out(failed.incarnation)),
            leaving: None,
            forced: false,
            ..note.clone()
        };
        let notes = |record: &Self| {
            let notes = record.nodes.iter().map(|(node, said)| (node.clone(), note(said)));
            notes.filter(|(_, note)| !note.is_empty()).collect::<BTreeMap<_, _>>()
        };
        rest(self) == rest(other) && notes(self) == notes(other)
    }

    /// Whether this node has a candidate slot, or is to lead next.
    pub(crate) fn has_place(&self, node: &NodeId) -> bool {
        let everybody = self.candidates.is_empty();
        everybody || self.candidates.contains(node) || self.transfer_target.as_ref() == Some(node)
    }

    /// Whether this incarnation of a node was downed.
    pub(crate) fn downed(&self, node: &NodeId, run: Incarnation) -> bool {
        let failed = self.nodes.get(node).and_then(|note| note.failed.as_ref());
        failed.is_some_and(|failed| failed.downed && failed.incarnation == run)
    }

    /// As [`note`](Self::note), where there is one.
    pub(crate) fn renote(&mut self, node: &NodeId, change: impl FnOnce(&mut NodeNote)) {
        if self.nodes.contains_key(node) {
            self.note(node, change);
        }
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

/// The annex of a table: how its owners change, and the rebalance that is under way or was the last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TableNote {
    format: u16,
    /// How its owners change; it decides when a host starts and stops.
    #[serde(default)]
    pub(crate) handoff: Handoff,
    /// The rebalance that this version belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rebalance: Option<Rebalance>,
}

/// A rebalance, over all versions that it takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rebalance {
    /// Why.
    pub(crate) reason: String,
    /// The version that began it.
    pub(crate) since: Version,
    /// How many shards have changed their primary from one node to another so far.
    pub(crate) moved: u32,
    /// Whether everything is where it should be.
    pub(crate) done: bool,
}

impl TableNote {
    pub(crate) fn new(handoff: Handoff, rebalance: Option<Rebalance>) -> Self {
        Self { format: FORMAT_PLAIN, handoff, rebalance }
    }

    /// Reads an annex. One that can't be read stands for the safest handoff, and says nothing else.
    pub(crate) fn read(annex: &Bytes) -> Self {
        serde_json::from_slice(annex).unwrap_or_else(|_error| Self::new(Handoff::Exclusive, None))
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

    const GOLDEN: &str = r#"{"format":2,"nodes":{"n1":{"drain":true,"leaving":"00000000000000000000000000000001"},"n2":{"failed":{"incarnation":"00000000000000000000000000000002","why":"operator","runs_on":90000},"former":{"00000000000000000000000000000003":90000},"suspended":"00000000000000000000000000000004"},"n5":{"failed":{"incarnation":"00000000000000000000000000000005","why":"downed","downed":true}}},"paused":true,"pins":{"orders":{"7":"n1"}},"failures":{"orders":"no room"},"heir":"n3","stuck":{"orders":[7]}}"#;
    /// As the first format had it.
    const FIRST: &str = r#"{"format":1,"nodes":{"n1":{"drain":true,"leaving":"00000000000000000000000000000001"},"n2":{"drain":false,"failed":{"incarnation":"00000000000000000000000000000002","why":"operator","runs_on":90000}}},"paused":true,"pins":{"orders":{"7":"n1"}},"failures":{"orders":"no room"},"heir":"n3"}"#;

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
                downed: false,
            });
            note.former =
                BTreeMap::from([(Incarnation::from_u128(3), Ttl::from_secs(90).expect("ttl"))]);
            note.suspended = Some(Incarnation::from_u128(4));
        });
        record.note(&node("n4"), |_note| {});
        record.note(&node("n5"), |note| {
            let failure = Failure::over(Incarnation::from_u128(5), "downed");
            note.failed = Some(Failure { downed: true, ..failure });
        });
        let table = TableName::new("orders").expect("name");
        record.pins.entry(table.clone()).or_default().insert(ShardId::new(7), node("n1"));
        record.failures.insert(table.clone(), "no room".to_owned());
        record.transfer_target = Some(node("n3"));
        record.stuck.insert(table, BTreeSet::from([ShardId::new(7)]));
        let bytes = record.write().expect("writes");
        assert_eq!(std::str::from_utf8(&bytes).expect("text"), GOLDEN);
        assert_eq!(ClusterRecord::read(&bytes).expect("reads"), record);

        let first = ClusterRecord::read(&Bytes::from_static(FIRST.as_bytes())).expect("reads");
        record.stuck.clear();
        record.nodes.remove(&node("n5"));
        record.note(&node("n2"), |note| {
            note.former.clear();
            note.suspended = None;
        });
        record.format = 1;
        assert_eq!(first, record);
    }

    #[test]
    fn parked_shards_and_lives_read_and_write_their_golden_form_and_are_not_overlooked() {
        let golden = r#"{"format":3,"paused":false,"parked":{"orders":{"7":{"hosts":["n1","n2"]}}},"lives":{"orders":{"uid":"00000000000000000000000000000009","awaits":[{"node":"n1","incarnation":"00000000000000000000000000000001"}]}},"suspicions":{"crashes":[{"node":"n1","incarnation":"00000000000000000000000000000001","versions":{"orders":5}}],"groups":[{"crashes":[0],"shards":{"orders":[3,4]}}]}}"#;
        let table = TableName::new("orders").expect("name");
        let parked = Parked { hosts: vec![node("n1"), node("n2")] };
        let crashed = Crashed {
            node: node("n1"),
            incarnation: Incarnation::from_u128(1),
            versions: BTreeMap::from([(table.clone(), Version::new(5))]),
        };
        let run = Run { node: node("n1"), incarnation: Incarnation::from_u128(1) };
        let generation = TableGeneration { uid: TableUid::from_u128(9), awaits: vec![run] };
        let shards = BTreeSet::from([3, 4].map(ShardId::new));
        let shards = BTreeMap::from([(table.clone(), shards)]);
        let mut record = ClusterRecord {
            format: FORMAT,
            parked: BTreeMap::from([(table.clone(), BTreeMap::from([(ShardId::new(7), parked)]))]),
            generations: BTreeMap::from([(table, generation)]),
            suspicions: Suspicions {
                crashes: vec![crashed],
                groups: vec![Suspicion { crashes: vec![0], shards }],
            },
            ..ClusterRecord::default()
        };
        let bytes = record.write().expect("writes");
        assert_eq!(std::str::from_utf8(&bytes).expect("text"), golden);
        assert_eq!(ClusterRecord::read(&bytes).expect("reads"), record);
        // Without them, those of the version before can read it.
        record.parked.clear();
        assert!(record.write().expect("writes").starts_with(br#"{"format":2,"#));
        let lost = ClusterRecord { format: 2, lost: true, ..ClusterRecord::default() };
        let bytes = lost.write().expect("writes");
        assert_eq!(&bytes[..], br#"{"format":2,"paused":false,"lost":true}"#);
        assert_eq!(ClusterRecord::read(&bytes).expect("reads"), lost);
    }

    #[test]
    fn half_of_ten_thousand_nodes_may_fail_at_once() {
        let mut record = ClusterRecord::default();
        for at in 0..5_000_u32 {
            let failure = Failure::ran_out(Incarnation::from_u128(u128::MAX - u128::from(at)));
            let node = node(&format!("orders-7c9f6d8b5d-{at:05}"));
            record.note(&node, |note| note.failed = Some(failure));
        }
        let bytes = record.write().expect("writes");
        assert!(bytes.len() <= coord_core::ANNEX_BYTES_MAX, "{} bytes", bytes.len());
        assert_eq!(ClusterRecord::read(&bytes).expect("reads"), record);
    }

    #[test]
    fn a_table_note_reads_and_writes_its_golden_form() {
        let golden = r#"{"format":2,"handoff":"make_before_break","rebalance":{"reason":"n1 joined","since":7,"moved":3,"done":false}}"#;
        let rebalance = Rebalance {
            reason: "n1 joined".to_owned(),
            since: Version::new(7),
            moved: 3,
            done: false,
        };
        let note = TableNote::new(Handoff::MakeBeforeBreak, Some(rebalance));
        let bytes = note.write().expect("writes");
        assert_eq!(std::str::from_utf8(&bytes).expect("text"), golden);
        assert_eq!(TableNote::read(&bytes), note);
    }

    #[test]
    fn unknown_fields_pass_and_newer_formats_and_damage_do_not() {
        let odd = Bytes::from_static(br#"{"format":2,"later":5}"#);
        assert_eq!(ClusterRecord::read(&odd).expect("reads"), ClusterRecord::default());
        assert_eq!(ClusterRecord::read(&Bytes::new()).expect("new"), ClusterRecord::default());
        for bad in ["{\"format\":4}", "{\"format\":0}", "{", "{}"] {
            let error = ClusterRecord::read(&Bytes::from(bad)).expect_err(bad);
            assert_eq!(error.kind(), coord_core::ErrorKind::Corrupt);
        }
        assert_eq!(TableNote::read(&Bytes::from_static(b"?")).rebalance, None);
    }
}
