//! What the stores hold, byte by byte, in `tests/golden`: written by one version, read by every
//! later one.
//!
//! A change of these files is a change of the format. Where that is meant, or a new zstd compresses
//! otherwise, `COORD_GOLDEN=write cargo test -p coord-core --test wire_golden` writes them anew;
//! files of a format that was released stay, and go on being read.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use coord_core::wire::{
    AnswerV1, ChunkKey, EncodedMap, LeaseRecordV1, Manifest, NodeRecordV1, Record, RequestV1,
    TableHeadV1, WireLimits, encode_map, encode_next,
};
use coord_core::*;

fn path(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "golden", name].iter().collect()
}

/// Compares with the golden file, and gives what the file holds.
fn golden(name: &str, text: &str) -> String {
    let path = path(name);
    if std::env::var("COORD_GOLDEN").is_ok_and(|value| value == "write") {
        std::fs::write(&path, text).expect("the golden file can be written");
    }
    let held = std::fs::read_to_string(&path).expect("the golden file is there");
    assert!(held == text, "{name} differs; it was\n{held}\nand is now\n{text}");
    held
}

/// Compares a record with its golden file, and what is read from the file with the record.
fn golden_record<T: Record + PartialEq + std::fmt::Debug>(name: &str, record: &T) {
    let text = String::from_utf8(record.encode().expect("encodes").to_vec()).expect("utf-8");
    let held = golden(name, &format!("{text}\n"));
    assert_eq!(T::decode(held.as_bytes()).expect("decodes"), *record, "{name}");
}

fn holder() -> Holder {
    let node = NodeId::new("node-1.eu").expect("name");
    Holder::new(node, Incarnation::from_u128(0x11), AttemptId::from_u128(0xa1))
}

fn fence(term: u64) -> Fence {
    let (lease, term) = (LeaseName::leader(), Term::from_u64(term));
    Fence::new(lease, term, holder().attempt, Origin::new("etcd:cafe/orders"))
}

fn entry(number: u16) -> NodeEntry {
    NodeEntry::new(
        NodeId::new(format!("node-{number}")).expect("name"),
        Incarnation::from_u128(u128::from(number) + 0x1000),
        Address::new(format!("10.0.0.{number}:7000")).expect("address"),
        if number == 3 { NodeStatus::Draining } else { NodeStatus::Active },
    )
    .with_zone((number > 1).then(|| Label::new(format!("eu-{}", number % 3)).expect("label")))
}

/// Five nodes, the third slot empty; shards without owners, in motion, and an annex.
fn map(shards: u32, replicas: u8, owner: impl Fn(u32) -> u16) -> ShardMap {
    let header = TableHeader::new(ShardCount::new(shards).expect("count"))
        .with_replicas(ReplicationFactor::new(replicas).expect("factor"));
    let mut edit = ShardMap::empty(header, TableUid::from_u128(0xfeed)).edit();
    for number in 1..=6 {
        edit.put_node(entry(number)).expect("room");
    }
    edit.remove_node(&entry(3).id).expect("owns nothing");
    let places = shards * u32::from(replicas);
    let slots = [u16::MAX, 0, 1, 3, 4, 5];
    let owners = (0..places).map(|place| slots[usize::from(owner(place) % 6)]).collect();
    edit.set_raw_owners(owners).expect("known");
    edit.finish(fence(7)).expect("changed")
}

fn next(map: &ShardMap) -> ShardMap {
    let mut edit = map.edit();
    let slot = edit.put_node(entry(9)).expect("room");
    edit.set_owner(ShardId::new(3), 0, slot).expect("in range");
    edit.set_owner(ShardId::new(5), 0, Slot::NOBODY).expect("in range");
    let motion = Motion::new(0, Slot::new(1), MotionPhase::MovingTo, map.version().next());
    edit.set_motions(ShardId::new(1), vec![motion]).expect("in range");
    edit.set_annex(Bytes::from_static(b"{\"paused\":true}")).expect("short");
    edit.finish(fence(8)).expect("changed")
}

fn head(manifest: Option<Manifest>) -> TableHeadV1 {
    let binding = Binding::of(&fence(7));
    let header = manifest.as_ref().map(|m| m.header().clone()).unwrap_or_default();
    let created = TableHeadV1::created(TableName::new("order").expect("name"), header, fence(7));
    let mut head = created.with_binding(binding).with_fence(fence(9));
    head.uid = TableUid::from_u128(0xfeed);
    head.manifest = manifest;
    head
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes all");
        text
    })
}

fn unhex(text: &str) -> Bytes {
    let digits = |at| u8::from_str_radix(&text[at..at + 2], 16).expect("hexadecimal");
    (0..text.len()).step_by(2).map(digits).collect()
}

/// One line for each chunk, its key and its bytes.
fn golden_chunks(name: &str, maps: &[&EncodedMap]) -> HashMap<ChunkKey, Bytes> {
    let chunks = maps.iter().flat_map(|encoded| &encoded.chunks);
    let text: String = chunks.map(|(key, bytes)| format!("{key} {}\n", hex(bytes))).collect();
    let held = golden(name, &text);
    let parse = |line: &str| {
        let (key, bytes) = line.split_once(' ').expect("two words");
        (key.parse().expect("a key"), unhex(bytes))
    };
    held.lines().map(parse).collect()
}

#[test]
fn leases() {
    let ttl = Ttl::from_secs(15).expect("ttl");
    let term = Some(1_790_000_000_000_000);
    golden_record("lease.json", &LeaseRecordV1::new(LeaseName::leader(), holder(), term, ttl));
    let counted = LeaseName::new("jobs.nightly").expect("name");
    golden_record("lease-term-counted.json", &LeaseRecordV1::new(counted, holder(), None, ttl));
}

#[test]
fn nodes() {
    let ttl = Ttl::from_secs(90).expect("ttl");
    let label = |text| Label::new(text).expect("label");
    let info = || {
        let address = Address::new("[2001:db8::7]:7000").expect("address");
        NodeInfo::new(holder().node, address).with_incarnation(holder().incarnation)
    };
    golden_record("node-plain.json", &NodeRecordV1::new(info(), ttl));
    let metadata = [("rack".to_owned(), "r 7 \"b\"".to_owned())].into();
    let mut info = info()
        .with_capacity(Capacity::new(2.5).expect("capacity"))
        .with_zone(label("eu-1"))
        .with_version(label("1.4.2"))
        .with_roles([label("api"), label("worker")].into())
        .expect("few")
        .with_metadata(Metadata::new(metadata).expect("short"))
        .with_declared(Declared::Draining)
        .with_started_at_ms(1_790_000_000_000);
    info.load = Some(Load::new(0.75).expect("load"));
    let mut report = Report::new(TableUid::from_u128(0xfeed), Version::new(12));
    report.stopping = BTreeSet::from([ShardId::new(3)]);
    report.started = BTreeSet::from([ShardId::new(4), ShardId::new(5)]);
    info.reports = [(TableName::new("order").expect("name"), report)].into();
    info = info.with_ended(Incarnation::from_u128(0x10));
    golden_record("node-full.json", &NodeRecordV1::new(info.clone(), ttl));
    let node = |name| NodeId::new(name).expect("name");
    let partly = info.with_unreachable(Some([node("node-2"), node("node-3")].into()));
    golden_record("node-unreachable.json", &NodeRecordV1::new(partly, ttl));
}

/// Kept apart from the other fields of a node, which older records have without it.
#[test]
fn loads_of_shards() {
    let ttl = Ttl::from_secs(90).expect("ttl");
    let mut info = NodeInfo::new(holder().node, Address::new("n1:7000").expect("address"))
        .with_incarnation(holder().incarnation);
    let loads = (0..).map(ShardId::new).zip([12.5, 3.0, 0.0, 1.0, 1e9]);
    let report = LoadReport::after(None, TableUid::from_u128(0xfeed), Version::new(12), loads, 3);
    info.load = Some(Load::new(16.5).expect("load"));
    info.loads = [(TableName::new("order").expect("name"), report)].into();
    golden_record("node-loads.json", &NodeRecordV1::new(info.clone(), ttl));
    let many = (0..300).map(|shard| (ShardId::new(shard), 1.0));
    let report = LoadReport::after(None, TableUid::from_u128(1), Version::new(1), many, 300);
    info.loads = [(TableName::new("order").expect("name"), report)].into();
    let bytes = NodeRecordV1::new(info, ttl).encode().expect("encodes");
    let error = NodeRecordV1::decode(&bytes).expect_err("too many").to_string();
    assert!(error.contains("shard loads found=257 max=256"), "{error}");
}

#[test]
fn requests_and_answers() {
    let body = &b"{\"drain\":\"node-1.eu\"}"[..];
    let request = Request::new(holder().node, Duration::from_secs(30), body).expect("good");
    let request = request.with_id(RequestId::from_u128(0xbeef));
    golden_record("request.json", &RequestV1::of(&request));
    let answer = Answer::new(&b"\x00\xff binary"[..]).expect("short");
    golden_record("answer.json", &AnswerV1::of(request.id, &answer));
}

#[test]
fn tables_as_one_value() {
    golden_record("table-created.json", &head(None));
    let limits = WireLimits::new(1 << 20).expect("large enough");
    let map = next(&map(16, 2, |place| u16::try_from(place * 7 % 13).expect("small")));
    let encoded = encode_map(&map, limits).expect("encodes");
    golden_record("table-small.json", &head(Some(encoded.manifest.clone())));
    assert_eq!(encoded.manifest.assemble(None, &HashMap::new()).expect("reads"), map);
    let mut edit = map.edit();
    edit.put_node(entry(1).with_since(Some(Version::new(7)))).expect("known");
    let aged = edit.finish(fence(9)).expect("changed");
    let encoded = encode_map(&aged, limits).expect("encodes");
    golden_record("table-aged.json", &head(Some(encoded.manifest.clone())));
    assert_eq!(encoded.manifest.assemble(None, &HashMap::new()).expect("reads"), aged);
}

/// Three chunks of owners, one in each form, and a delta on them.
#[test]
fn tables_in_chunks() {
    let limits = WireLimits::new(1 << 20).expect("large enough").without_inline();
    let old = map(2 * 65_536 + 512, 1, |place| {
        let form = match place >> 16 {
            0 => place / 9_000,
            1 => place * 7 % 5,
            _ => (place ^ (place.wrapping_mul(place)) >> 7).wrapping_mul(0x85eb_ca6b) >> 16,
        };
        u16::try_from(form % 6).expect("small")
    });
    let map = next(&old);
    let base = encode_map(&old, limits).expect("encodes");
    let delta = encode_next(&base.manifest, &old, &map, limits).expect("encodes");
    assert_eq!(delta.chunks.len(), 1, "one delta");
    let chunks = golden_chunks("table-large.chunks", &[&base, &delta]);
    let forms: BTreeSet<u8> = base.chunks[..3].iter().map(|(_, bytes)| bytes[6]).collect();
    assert_eq!(forms, BTreeSet::from([0, 1, 2]), "packed, zstd, and zstd of runs");
    golden_record("table-large-base.json", &head(Some(base.manifest.clone())));
    golden_record("table-large-delta.json", &head(Some(delta.manifest.clone())));
    assert!(base.manifest.assemble(None, &chunks).expect("reads") == old);
    assert!(delta.manifest.assemble(None, &chunks).expect("reads") == map);
    assert!(delta.manifest.assemble(Some(&old), &chunks).expect("reads") == map);
}
