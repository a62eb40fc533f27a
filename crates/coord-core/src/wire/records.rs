//! The records of leases, nodes, tables and requests: JSON that an operator can read.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Manifest, digest, nodes};
use crate::error::{Error, Result};
use crate::types::{
    Answer, Binding, Era, Fence, Grant, Holder, LeaseName, NodeId, NodeInfo, NodeRecord, Origin,
    Request, RequestId, Revision, SHARD_LOADS_MAX, ShardMap, StoredTable, TableHeader, TableName,
    TableUid, Term, Ttl, Version,
};

/// A record as a store holds it: a JSON object with the number of its format.
///
/// A format may gain fields, which older readers ignore; what they must not ignore is a new format.
/// A reader of format n reads n − 1 as well, so that a cluster can be upgraded node by node.
pub trait Record: Serialize + DeserializeOwned {
    /// What it is, for errors.
    const WHAT: &'static str;
    /// The format that is written, and the newest that is read.
    const FORMAT: u32 = 1;
    /// The oldest format that is read.
    const OLDEST: u32 = 1;

    /// The record as JSON.
    ///
    /// # Errors
    /// `Internal` if it can't be written, which no record of ours does.
    fn encode(&self) -> Result<Bytes> {
        #[derive(Serialize)]
        struct Envelope<'a, T> {
            format: u32,
            #[serde(flatten)]
            record: &'a T,
        }
        let envelope = Envelope { format: Self::FORMAT, record: self };
        Ok(serde_json::to_vec(&envelope).map_err(nodes::unwritable)?.into())
    }

    /// Reads a record.
    ///
    /// # Errors
    /// `Corrupt` for what is no such record, or one of a format that this version does not read.
    fn decode(bytes: &[u8]) -> Result<Self> {
        #[derive(Deserialize)]
        struct Probe {
            format: u32,
        }
        let unreadable = |source: serde_json::Error| {
            Error::corrupt("decode", format!("this is no {} record: {source}", Self::WHAT))
        };
        let Probe { format: found } = serde_json::from_slice(bytes).map_err(unreadable)?;
        let (oldest, newest) = (Self::OLDEST, Self::FORMAT);
        if !(oldest..=newest).contains(&found) {
            let what = Self::WHAT;
            let why = format!(
                "{what} record of an unknown format found={found} supported={oldest}..={newest}"
            );
            return Err(Error::corrupt("decode", why));
        }
        let record = Self::read(found, bytes).map_err(unreadable)?;
        record.check()?;
        Ok(record)
    }

    /// Parses one format that is read; a record with more than one tells them apart here.
    ///
    /// # Errors
    /// The parser's.
    fn read(_format: u32, bytes: &[u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(bytes)
    }

    /// Looks for what the types alone do not rule out.
    ///
    /// # Errors
    /// `Corrupt`, naming it.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// A lease that is held. Where the lease lives is not stored: the backend that reads it knows.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRecordV1 {
    /// Which lease; a store's key may hold it only hashed.
    pub lease: LeaseName,
    /// The holder.
    #[serde(flatten)]
    pub holder: Holder,
    /// The store's part of the term, without the era; none while only the store's own count of the
    /// acquiring write tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub term: Option<u64>,
    /// How long each renewal lasts, as granted, in milliseconds.
    pub ttl_ms: Ttl,
}

impl Record for LeaseRecordV1 {
    const WHAT: &'static str = "lease";
}

impl LeaseRecordV1 {
    /// A record of its parts.
    #[must_use]
    pub fn new(lease: LeaseName, holder: Holder, term: Option<u64>, ttl: Ttl) -> Self {
        Self { lease, holder, term, ttl_ms: ttl }
    }

    /// The record of a grant.
    #[must_use]
    pub fn of(grant: &Grant) -> Self {
        let term = Some(grant.term.store_part());
        Self::new(grant.lease.clone(), grant.holder.clone(), term, grant.ttl)
    }

    /// The grant that it shows. `counted` is the store's own count of the acquiring write, for a
    /// record that could not hold it yet.
    ///
    /// # Errors
    /// `Corrupt` if the term is neither in the record nor counted, or does not fit into 52 bits.
    pub fn into_grant(
        self,
        era: Era,
        counted: Option<u64>,
        origin: Origin,
        revision: Revision,
    ) -> Result<Grant> {
        let Some(term) = self.term.or(counted) else {
            let why = "the record of the lease holds no term";
            return Err(Error::corrupt("decode", why).resource(&self.lease));
        };
        let term = Term::new(era, term)?;
        Ok(Grant::new(self.lease, self.holder, term, self.ttl_ms, origin, revision))
    }
}

/// A node that is registered.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeRecordV1 {
    /// The TTL of the registration, as granted, in milliseconds.
    pub ttl_ms: Ttl,
    /// What the node said last.
    pub node: NodeInfo,
}

impl Record for NodeRecordV1 {
    const WHAT: &'static str = "node";

    fn check(&self) -> Result<()> {
        let named: usize = self.node.loads.values().map(|report| report.shards.len()).sum();
        if named > SHARD_LOADS_MAX {
            let why = format!(
                "node record with too many shard loads found={named} max={SHARD_LOADS_MAX}"
            );
            return Err(Error::corrupt("decode", why).resource(&self.node.id));
        }
        Ok(())
    }
}

impl NodeRecordV1 {
    /// A record of its parts.
    #[must_use]
    pub fn new(node: NodeInfo, ttl: Ttl) -> Self {
        Self { ttl_ms: ttl, node }
    }

    /// The record as others see it, judged by the store.
    #[must_use]
    pub fn into_record(self, revision: Revision) -> NodeRecord {
        NodeRecord::new(self.node, self.ttl_ms, revision)
    }
}

/// A table: what all agree on, the highest fence, and the manifest of the newest map. One value, so
/// that one compare-and-set covers a claim (which raises the fence) and a publish (which changes
/// the manifest).
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableHeadV1 {
    /// Its name; a store's key may hold it only hashed.
    pub table: TableName,
    /// Which life of the table this is.
    pub uid: TableUid,
    /// What all users agree on.
    pub header: TableHeader,
    /// The lease it obeys.
    pub binding: Binding,
    /// The highest fence that claimed it or wrote to it.
    pub fence: Fence,
    /// The newest map; none at version 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<Manifest>,
}

impl Record for TableHeadV1 {
    const WHAT: &'static str = "table";

    fn check(&self) -> Result<()> {
        let Some(manifest) = &self.manifest else { return Ok(()) };
        manifest.check()?;
        if manifest.uid() != self.uid || *manifest.header() != self.header {
            let why = "the table's manifest is that of another table";
            return Err(Error::corrupt("decode", why).resource(&self.table));
        }
        Ok(())
    }
}

impl TableHeadV1 {
    /// A table that was just created by this fence: of a new uid, at version 0.
    #[must_use]
    pub fn created(table: TableName, header: TableHeader, fence: Fence) -> Self {
        let (uid, binding) = (TableUid::random(), Binding::of(&fence));
        Self { table, uid, header, binding, fence, manifest: None }
    }

    /// Reads the head of this very table.
    ///
    /// # Errors
    /// `Corrupt`, as [`decode`](Record::decode) says, and for the head of another table.
    pub fn read(table: &TableName, bytes: &[u8]) -> Result<Self> {
        let head = Self::decode(bytes)?;
        if head.table != *table {
            let why = format!("the record is that of another table found={}", head.table);
            return Err(Error::corrupt("decode", why).resource(table));
        }
        Ok(head)
    }

    /// Whether the stored map is this very one, written under this very fence.
    #[must_use]
    pub fn holds(&self, map: &ShardMap) -> bool {
        self.manifest.as_ref().is_some_and(|manifest| {
            manifest.uid() == map.uid()
                && manifest.version() == map.version()
                && Some(manifest.writer()) == map.writer()
                && manifest.digest() == digest(map)
        })
    }

    /// As a claim of this fence leaves it.
    #[must_use]
    pub fn claimed_by(mut self, fence: &Fence) -> Self {
        self.binding = Binding::of(fence);
        self.fence = fence.clone();
        self
    }

    /// With this as the highest fence.
    #[must_use]
    pub fn with_fence(mut self, fence: Fence) -> Self {
        self.fence = fence;
        self
    }

    /// Bound to another lease.
    #[must_use]
    pub fn with_binding(mut self, binding: Binding) -> Self {
        self.binding = binding;
        self
    }

    /// With this manifest.
    #[must_use]
    pub fn with_manifest(mut self, manifest: Manifest) -> Self {
        self.manifest = Some(manifest);
        self
    }

    /// The version of the newest map.
    #[must_use]
    pub fn version(&self) -> Version {
        self.manifest.as_ref().map_or(Version::ZERO, Manifest::version)
    }

    /// The table with its map, as [`Manifest::assemble`] put it together; none for version 0.
    ///
    /// # Errors
    /// `Corrupt` if the map is not the one that the head speaks of.
    pub fn into_table(self, map: Option<ShardMap>) -> Result<StoredTable> {
        let map = map.unwrap_or_else(|| ShardMap::empty(self.header.clone(), self.uid));
        if map.uid() != self.uid || map.version() != self.version() {
            let (found, expected) = (map.version(), self.version());
            let why = format!("the map is not the table's found={found} expected={expected}");
            return Err(Error::corrupt("decode", why).resource(&self.table));
        }
        Ok(StoredTable::new(self.table, self.fence, self.binding, map.into()))
    }
}

/// A command for the leader.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestV1 {
    /// Chosen by the sender.
    pub id: RequestId,
    /// The node that asks.
    pub from: NodeId,
    /// After which it counts as unanswered, in milliseconds.
    pub time_limit_ms: u64,
    /// The command.
    pub body: Body,
}

impl Record for RequestV1 {
    const WHAT: &'static str = "request";

    fn check(&self) -> Result<()> {
        self.clone().into_request().map(drop)
    }
}

impl RequestV1 {
    /// The record of a request, its time limit rounded up to whole milliseconds.
    #[must_use]
    pub fn of(request: &Request) -> Self {
        let millis = request.time_limit.as_nanos().div_ceil(1_000_000);
        Self {
            id: request.id,
            from: request.from.clone(),
            time_limit_ms: u64::try_from(millis).unwrap_or(u64::MAX),
            body: Body(request.body.clone()),
        }
    }

    /// Reads this very request.
    ///
    /// # Errors
    /// `Corrupt`, as [`decode`](Record::decode) says, and for another request.
    pub fn read(id: RequestId, bytes: &[u8]) -> Result<Request> {
        let record = Self::decode(bytes)?;
        is_of(id, record.id)?;
        record.into_request()
    }

    /// The request.
    ///
    /// # Errors
    /// `Corrupt` for a body or a time limit that no request may have.
    pub fn into_request(self) -> Result<Request> {
        let time_limit = Duration::from_millis(self.time_limit_ms);
        match Request::new(self.from, time_limit, self.body.0) {
            Ok(request) => Ok(request.with_id(self.id)),
            Err(error) => Err(out_of_bounds(&error, self.id)),
        }
    }
}

/// The leader's answer to a request.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnswerV1 {
    /// Which request it answers.
    pub id: RequestId,
    /// The answer.
    pub body: Body,
}

impl Record for AnswerV1 {
    const WHAT: &'static str = "answer";

    fn check(&self) -> Result<()> {
        self.clone().into_answer().map(drop)
    }
}

impl AnswerV1 {
    /// The record of an answer.
    #[must_use]
    pub fn of(id: RequestId, answer: &Answer) -> Self {
        Self { id, body: Body(answer.body.clone()) }
    }

    /// Reads the answer to this very request.
    ///
    /// # Errors
    /// `Corrupt`, as [`decode`](Record::decode) says, and for the answer to another request.
    pub fn read(id: RequestId, bytes: &[u8]) -> Result<Answer> {
        let record = Self::decode(bytes)?;
        is_of(id, record.id)?;
        record.into_answer()
    }

    /// The answer.
    ///
    /// # Errors
    /// `Corrupt` for a body that is too long.
    pub fn into_answer(self) -> Result<Answer> {
        Answer::new(self.body.0).map_err(|error| out_of_bounds(&error, self.id))
    }
}

fn is_of(id: RequestId, found: RequestId) -> Result<()> {
    if found == id {
        return Ok(());
    }
    let why = format!("the record is that of another request found={found}");
    Err(Error::corrupt("decode", why).resource(id))
}

fn out_of_bounds(error: &Error, id: RequestId) -> Error {
    Error::corrupt("decode", error.message_text().to_owned()).resource(id)
}

/// The body of a request or an answer: in JSON as text where it is text, else as `{"base64": …}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Body(Bytes);

impl Body {
    /// The body's bytes.
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.0
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum BodyJson<T> {
    Text(T),
    Binary { base64: T },
}

impl Serialize for Body {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match std::str::from_utf8(&self.0) {
            Ok(text) => BodyJson::Text(text).serialize(serializer),
            Err(_) => {
                let base64 = BASE64.encode(&self.0);
                BodyJson::Binary { base64: base64.as_str() }.serialize(serializer)
            }
        }
    }
}

impl<'de> Deserialize<'de> for Body {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match BodyJson::<String>::deserialize(deserializer)? {
            BodyJson::Text(text) => Ok(Self(text.into())),
            BodyJson::Binary { base64 } => {
                BASE64.decode(base64).map(|bytes| Self(bytes.into())).map_err(D::Error::custom)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{WireLimits, encode_map};
    use super::*;
    use crate::ErrorKind;
    use crate::types::{
        Address, AttemptId, Capacity, Incarnation, Label, Load, ROLES_MAX, ShardId, Slot,
        UNREACHABLE_MAX,
    };

    fn node() -> NodeId {
        NodeId::new("n1").expect("name")
    }

    fn grant(term: u64) -> Grant {
        let holder = Holder::new(node(), Incarnation::from_u128(1), AttemptId::from_u128(2));
        let term = Term::new(Era::new(3).expect("era"), term).expect("fits");
        let ttl = Ttl::from_secs(15).expect("ttl");
        let revision = Revision::from_u64(4);
        Grant::new(LeaseName::leader(), holder, term, ttl, Origin::new("etcd:1/c"), revision)
    }

    #[test]
    fn a_lease_is_stored_without_era_and_origin() {
        let grant = grant(1_790_000_000_000_000);
        let record = LeaseRecordV1::of(&grant);
        let bytes = record.encode().expect("encodes");
        let text = std::str::from_utf8(&bytes).expect("utf-8");
        assert!(text.contains("\"term\":1790000000000000") && !text.contains("etcd"), "{text}");
        let read = LeaseRecordV1::decode(&bytes).expect("decodes");
        assert_eq!(read, record);
        let back = |record: LeaseRecordV1, counted| {
            let (origin, revision) = (grant.origin.clone(), grant.revision.clone());
            record.into_grant(grant.term.era(), counted, origin, revision)
        };
        assert_eq!(back(read, Some(8)).expect("a term"), grant, "the stored term counts");
        let record = LeaseRecordV1 { term: None, ..record };
        let bytes = record.encode().expect("encodes");
        let read = LeaseRecordV1::decode(&bytes).expect("decodes");
        let counted = back(read.clone(), Some(8)).expect("a term");
        assert_eq!(counted.term, Term::new(grant.term.era(), 8).expect("fits"));
        assert_eq!(back(read.clone(), None).expect_err("no term").kind(), ErrorKind::Corrupt);
        assert!(back(read, Some(1 << 52)).is_err());
    }

    #[test]
    fn a_node_is_checked_when_it_is_read() {
        let address = Address::new("10.0.0.1:7000").expect("address");
        let roles = |count: usize| (0..count).map(|n| Label::new(format!("r{n}")).expect("label"));
        let mut info = NodeInfo::new(node(), address)
            .with_capacity(Capacity::new(0.1).expect("capacity"))
            .with_roles(roles(ROLES_MAX).collect())
            .expect("few enough");
        info.load = Some(Load::new(0.3).expect("load"));
        let record = NodeRecordV1::new(info, Ttl::from_secs(90).expect("ttl"));
        let bytes = record.encode().expect("encodes");
        assert_eq!(NodeRecordV1::decode(&bytes).expect("decodes"), record);
        let seen = record.clone().into_record(Revision::from_u64(7));
        assert_eq!((seen.ttl, seen.judged), (record.ttl_ms, true));
        let mut many = record.clone();
        many.node.roles = roles(ROLES_MAX + 1).collect();
        let error = NodeRecordV1::decode(&many.encode().expect("encodes")).expect_err("too many");
        assert!(error.to_string().contains("found=33 max=32"), "{error}");
        let missed = |count: usize| {
            let nodes = (0..count).map(|n| NodeId::new(format!("n{n}")).expect("name"));
            let mut record = record.clone();
            record.node.unreachable = Some(nodes.collect());
            NodeRecordV1::decode(&record.encode().expect("encodes"))
        };
        assert!(missed(UNREACHABLE_MAX).is_ok());
        let error = missed(UNREACHABLE_MAX + 1).expect_err("too many");
        assert!(error.to_string().contains("found=513 max=512"), "{error}");
        let text = String::from_utf8(bytes.to_vec()).expect("utf-8");
        for (good, bad) in [("10.0.0.1:7000", "10.0.0.1"), ("90000", "900"), ("0.1", "-0.1")] {
            let error = NodeRecordV1::decode(text.replace(good, bad).as_bytes()).expect_err(bad);
            assert_eq!(error.kind(), ErrorKind::Corrupt);
        }
    }

    #[test]
    fn a_table_speaks_of_its_own_map_only() {
        let header = TableHeader::default();
        let created = TableHeadV1::created(TableName::cluster(), header, grant(5).fence());
        let read = TableHeadV1::decode(&created.encode().expect("encodes")).expect("decodes");
        assert_eq!(read, created);
        assert_eq!(read.version(), Version::ZERO);
        let table = read.into_table(None).expect("version 0");
        assert_eq!((table.map.uid(), table.map.orphans()), (created.uid, 1024));
        let mut edit = table.map.edit();
        edit.set_annex(Bytes::from_static(b"state")).expect("short");
        let map = edit.finish(grant(6).fence()).expect("changed");
        let limits = WireLimits::new(1 << 20).expect("large enough");
        let manifest = encode_map(&map, limits).expect("encodes").manifest;
        let head = created.clone().with_fence(grant(6).fence()).with_manifest(manifest.clone());
        let read = TableHeadV1::decode(&head.encode().expect("encodes")).expect("decodes");
        assert_eq!(read, head);
        assert!(read.clone().into_table(None).is_err(), "version 1 has a map");
        assert_eq!(*read.into_table(Some(map.clone())).expect("its map").map, map);
        let other = TableHeadV1::created(TableName::cluster(), head.header, grant(5).fence());
        let other = other.with_manifest(manifest);
        assert!(TableHeadV1::decode(&other.encode().expect("encodes")).is_err(), "another uid");
        assert!(created.into_table(Some(map)).is_err(), "version 0 has no map");
        assert_eq!(table.map.owner_slots(ShardId::new(0)).next(), Some(Slot::NOBODY));
    }

    #[test]
    fn a_body_stays_readable_where_it_is_text() {
        let request =
            Request::new(node(), Duration::from_nanos(1_000_001), &b"{\"drain\":\"n2\"}"[..]);
        let record = RequestV1::of(&request.expect("good"));
        let text = String::from_utf8(record.encode().expect("encodes").to_vec()).expect("utf-8");
        assert!(text.contains(r#""time_limit_ms":2,"body":"{\"drain\":\"n2\"}""#), "{text}");
        let binary = Answer::new(&[0xff, 0][..]).expect("short");
        let record = AnswerV1::of(RequestId::from_u128(1), &binary);
        let text = String::from_utf8(record.encode().expect("encodes").to_vec()).expect("utf-8");
        assert!(text.contains(r#""body":{"base64":"/wA="}"#), "{text}");
        let read = AnswerV1::decode(text.as_bytes()).expect("decodes");
        assert_eq!(read.into_answer().expect("short"), binary);
    }

    /// A record of which this version knows two formats, as every record will be one day.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Second {
        seconds: u64,
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct First {
        minutes: u64,
    }

    impl Record for First {
        const WHAT: &'static str = "first";
    }

    impl Record for Second {
        const WHAT: &'static str = "second";
        const FORMAT: u32 = 2;

        fn read(format: u32, bytes: &[u8]) -> serde_json::Result<Self> {
            match format {
                1 => {
                    let First { minutes } = serde_json::from_slice(bytes)?;
                    Ok(Self { seconds: minutes * 60 })
                }
                _ => serde_json::from_slice(bytes),
            }
        }
    }

    #[test]
    fn two_versions() {
        let old = First { minutes: 2 }.encode().expect("encodes");
        let new = Second { seconds: 120 }.encode().expect("encodes");
        assert_eq!(Second::decode(&old).expect("reads the one before"), Second { seconds: 120 });
        assert_eq!(Second::decode(&new).expect("reads its own"), Second { seconds: 120 });
        let error = First::decode(&new).expect_err("does not guess at a newer one");
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        let text = error.to_string();
        assert!(
            text.contains("first record of an unknown format found=2 supported=1..=1"),
            "{text}"
        );
        let more = br#"{"format":1,"colour":"blue","minutes":2}"#;
        assert_eq!(
            First::decode(more).expect("ignores what it does not know"),
            First { minutes: 2 }
        );
        for bad in [&b"{\"format\":0,\"minutes\":2}"[..], b"{\"minutes\":2}", b"", b"[]", b"\xff"] {
            assert_eq!(First::decode(bad).expect_err("bad").kind(), ErrorKind::Corrupt);
        }
    }

    proptest! {
        #[test]
        fn requests_read_back(id: u128, millis in 1..3_600_000_u64, body: Vec<u8>) {
            let request = Request::new(node(), Duration::from_millis(millis), body).expect("good");
            let request = request.with_id(RequestId::from_u128(id));
            let bytes = RequestV1::of(&request).encode().expect("encodes");
            let read = RequestV1::decode(&bytes).expect("decodes").into_request().expect("good");
            prop_assert_eq!(read, request);
        }

        #[test]
        fn a_damaged_record_is_corrupt_or_a_record(
            at: prop::sample::Index, bit in 0..8_u8, cut: bool,
        ) {
            let mut bytes = LeaseRecordV1::of(&grant(7)).encode().expect("encodes").to_vec();
            let at = at.index(bytes.len());
            if cut {
                bytes.truncate(at);
            } else {
                bytes[at] ^= 1_u8 << bit;
            }
            if let Err(error) = LeaseRecordV1::decode(&bytes) {
                prop_assert_eq!(error.kind(), ErrorKind::Corrupt);
            }
        }
    }
}
