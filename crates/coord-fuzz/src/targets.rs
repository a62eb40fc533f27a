//! What is fuzzed. Each target reads bytes as one of our decoders does, and checks what it reads.

use std::fmt;

use bytes::Bytes;
use coord_cluster::{Settings, fuzzing};
use coord_core::wire::{
    AnswerV1, ChunkKey, LeaseRecordV1, Manifest, NodeRecordV1, Record, RequestV1, TableHeadV1,
};
use coord_core::{
    Address, AttemptId, BackendUrl, Capacity, ClusterName, Era, Error, Label, LeaseName, NodeId,
    NodeStatus, Origin, Revision, TableName, URL_BYTES_MAX, UrlOptions,
};

use crate::sealed::{Stored, maps};

/// What is taken whatever is read: errors, and the buffers that unpacking takes.
const MEMORY: usize = 256 * 1024;
/// How many bytes a byte that was read may take: of JSON, `[]` becomes 32 of them, and lists grow by doubling.
const MEMORY_A_BYTE: usize = 96;
/// What a map takes by its header alone: 600 shards and 65,534 empty slots, twice.
const MEMORY_OF_MAPS: usize = 16 * 1024 * 1024;

/// A decoder and good inputs of it.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Target {
    /// Its name.
    pub name: &'static str,
    /// Inputs that are read.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Makes of an input what the decoder is to read; this part is not measured.
    pub prepare: fn(&[u8]) -> Check,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// One input, ready to be read.
#[non_exhaustive]
pub struct Check {
    /// Reads it and checks what was read; says why it is refused.
    pub run: Box<dyn FnOnce() -> Result<(), String>>,
    bytes: usize,
    memory: usize,
}

impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Check({} bytes)", self.bytes)
    }
}

impl Check {
    fn new(bytes: usize, run: impl FnOnce() -> Result<(), String> + 'static) -> Self {
        Self { run: Box::new(run), bytes, memory: MEMORY }
    }

    /// How much memory it may take at once.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.memory + self.bytes * MEMORY_A_BYTE
    }
}

/// All targets.
#[must_use]
pub fn all() -> Vec<Target> {
    macro_rules! targets {
        ($($name:literal: $seeds:expr, $prepare:expr;)*) => {
            vec![$(Target { name: $name, seeds: $seeds, prepare: $prepare }),*]
        };
    }
    targets! {
        "records": records, |input| plain(input, read_records);
        "manifests": manifests, |input| plain(input, read_manifest);
        "chunks": || maps().iter().map(Stored::pack).collect(), |input| map(Stored::unpack(input));
        "resealed": opened, |input| map(Stored::unpack(input).sealed());
        "names": names, |input| plain(input, read_names);
        "urls": urls, |input| plain(input, read_url);
        "settings": settings, |input| plain(input, read_settings);
        "commands": commands, |input| plain(input, |bytes| fuzzing::command(bytes).map_err(why));
        "replies": replies, |input| plain(input, |bytes| fuzzing::reply(bytes).map_err(why));
        "annexes": annexes, |input| plain(input, |bytes| fuzzing::annex(bytes).map_err(why));
        "frames": frames, |input| plain(input, |bytes| fuzzing::frames(bytes).map_err(why));
        "letters": letters, |input| plain(input, |bytes| fuzzing::letter(bytes).map_err(why));
        "answers": answers, |input| plain(input, |bytes| fuzzing::answer(bytes).map_err(why));
    }
}

/// Why something is refused, as all that shows an error shows it; no part of it may be long.
fn why(error: Error) -> String {
    let text = format!("{error} {error:?}");
    assert!(text.len() < 16 * 1024, "an error of {} bytes", text.len());
    error.to_string()
}

fn plain(input: &[u8], read: fn(&Bytes) -> Result<(), String>) -> Check {
    let bytes = Bytes::copy_from_slice(input);
    Check::new(bytes.len(), move || read(&bytes))
}

fn texts(texts: &[&str]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

macro_rules! golden {
    ($($name:literal),*) => {
        texts(&[$(include_str!(concat!("../../coord-core/tests/golden/", $name))),*])
    };
}

fn records() -> Vec<Vec<u8>> {
    golden![
        "answer.json",
        "lease-term-counted.json",
        "lease.json",
        "node-full.json",
        "node-loads.json",
        "node-plain.json",
        "node-unreachable.json",
        "request.json",
        "table-aged.json",
        "table-created.json",
        "table-large-delta.json",
        "table-small.json"
    ]
}

/// Reads a record, and what is written of it again.
fn record<T: Record + PartialEq + fmt::Debug>(bytes: &[u8]) -> Result<T, String> {
    let record = T::decode(bytes).map_err(why)?;
    let again = T::decode(&record.encode().expect("what was read can be written"));
    assert_eq!(again.expect("what was written can be read"), record);
    Ok(record)
}

fn read_records(bytes: &Bytes) -> Result<(), String> {
    let (lease, node) = (record::<LeaseRecordV1>(bytes), record::<NodeRecordV1>(bytes));
    let (table, request) = (record::<TableHeadV1>(bytes), record::<RequestV1>(bytes));
    let answer = record::<AnswerV1>(bytes);
    let mut said = Vec::new();
    said.push(lease.and_then(|lease| {
        let (origin, revision) = (Origin::new("etcd:cafe/orders"), Revision::from_u64(1));
        lease.into_grant(Era::default(), Some(1), origin, revision).map(drop).map_err(why)
    }));
    said.push(node.map(|node| drop(node.into_record(Revision::from_u64(1)))));
    said.push(table.and_then(|table| {
        let Some(manifest) = table.manifest else { return Ok(()) };
        // A table that is kept in chunks needs them; the others are whole.
        if manifest.needed(None).is_empty() {
            let map = manifest.assemble(None, &[].into()).map_err(why)?;
            _ = map.version().next();
        }
        Ok(())
    }));
    said.push(request.and_then(|request| request.into_request().map(drop).map_err(why)));
    said.push(answer.and_then(|answer| answer.into_answer().map(drop).map_err(why)));
    if said.iter().any(Result::is_ok) {
        return Ok(());
    }
    Err(said.into_iter().filter_map(Result::err).collect::<Vec<_>>().join(" | "))
}

fn manifests() -> Vec<Vec<u8>> {
    maps().into_iter().map(|map| map.manifest).collect()
}

fn read_manifest(bytes: &Bytes) -> Result<(), String> {
    let manifest = record::<Manifest>(bytes)?;
    for key in manifest.keys() {
        assert_eq!(key.to_string().parse::<ChunkKey>().expect("a key"), key);
    }
    Ok(())
}

fn opened() -> Vec<Vec<u8>> {
    maps().into_iter().map(|map| map.opened().pack()).collect()
}

fn map(stored: Stored) -> Check {
    let mut check = Check::new(stored.len(), move || {
        let map = stored.read().map_err(why)?;
        assert!(map.version().next() > map.version(), "{}", map.version());
        Ok(())
    });
    check.memory = MEMORY_OF_MAPS;
    check
}

fn names() -> Vec<Vec<u8>> {
    texts(&[
        "orders",
        "eu-1.orders.v2",
        "node-1.eu:7000",
        "[2001:db8::7]:7000",
        "active",
        "4095",
        "2.5",
        "000000000000000000000000000000a1",
        "0000000000000007.000000000000000000000000000000a1.0000000000000001.0.0000000000000000000000000000beef",
    ])
}

fn read_names(bytes: &Bytes) -> Result<(), String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let said = [
        LeaseName::new(text).map(|name| assert_eq!(name.as_str(), text)),
        TableName::new(text).map(|name| assert_eq!(name.as_str(), text)),
        NodeId::new(text).map(|name| assert_eq!(name.as_str(), text)),
        ClusterName::new(text).map(|name| assert_eq!(name.as_str(), text)),
        Address::new(text).map(|address| assert_eq!(address.as_str(), text)),
        Label::new(text).map(|label| assert_eq!(label.as_str(), text)),
        text.parse::<NodeStatus>().map(|status| assert_eq!(status.as_str(), text)),
        text.parse::<Era>().map(drop),
        text.parse::<AttemptId>().map(|id| assert!(id.to_string().eq_ignore_ascii_case(text))),
        text.parse::<ChunkKey>().map(|key| assert_eq!(key.to_string(), text)),
        Capacity::new(text.parse().unwrap_or(f64::NAN)).map(|size| assert!(size.weight() > 0)),
    ];
    if said.iter().any(Result::is_ok) {
        return Ok(());
    }
    Err(said.into_iter().filter_map(|said| said.err().map(why)).collect::<Vec<_>>().join(" | "))
}

fn urls() -> Vec<Vec<u8>> {
    texts(&[
        "memory://orders",
        "etcd://root:s3cret@a:2379,b:2379/orders?era=2",
        "redis://us%40er:p%2Fw@a:6379,[::1]:7000,c/orders?tls=on&ca=/etc/ca&token=t%20t",
        "kube:///orders?namespace=x",
    ])
}

fn read_url(bytes: &Bytes) -> Result<(), String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let url = BackendUrl::parse(text).map_err(why)?;
    let shown = url.to_string();
    // What is encoded is longer, and may be too long.
    if shown.len() <= URL_BYTES_MAX {
        let again = BackendUrl::parse(&shown).expect("what is printed parses");
        assert_eq!(again.to_string(), shown);
    }
    let known = ["tls", "ca", "token", "namespace"];
    url.options(&known).and_then(UrlOptions::era).map(drop).map_err(why)
}

fn settings() -> Vec<Vec<u8>> {
    let usual = toml::to_string(&Settings::default()).expect("settings can be written");
    let downing = "node_ttl = '90s'\n[downing]\nstrategy = 'static-quorum'\nquorum = 3\n";
    texts(&[&usual, downing, "COORD_CLUSTER_NODE_TTL=90s\nCOORD_CLUSTER_DOWNING_STABLE_AFTER=7s\n"])
}

/// As TOML, or as variables of the environment.
fn read_settings(bytes: &Bytes) -> Result<(), String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let variables = text.lines().filter_map(|line| line.split_once('='));
    let read = [Settings::default().with_toml(text), Settings::default().with_variables(variables)];
    for settings in read.iter().flatten() {
        // Numbers that are none are refused here, and are not equal to themselves.
        if settings.validate().map_err(why).is_err() {
            continue;
        }
        let text = toml::to_string(settings).expect("what was read can be written");
        let again = Settings::default().with_toml(&text).expect("what was written can be read");
        assert_eq!(again, *settings);
    }
    match read {
        [Err(toml), Err(variables)] => Err(why(toml) + " | " + &why(variables)),
        _ => Ok(()),
    }
}

fn commands() -> Vec<Vec<u8>> {
    texts(&[
        r#"{"mark_node_failed":{"node":"n1","why":"it burns"}}"#,
        r#"{"leave":{"node":"n1","force":true}}"#,
        r#"{"assign_shards":{"table":"orders","owners":{"7":["n1","n2"]}}}"#,
        r#"{"rebalance_shards":{"table":null,"reason":"by hand"}}"#,
        r#"{"pin":{"table":"orders","shard":7,"node":"n1"}}"#,
    ])
}

fn replies() -> Vec<Vec<u8>> {
    fuzzing::replies().into_iter().map(Into::into).collect()
}

fn annexes() -> Vec<Vec<u8>> {
    texts(&[
        r#"{"format":2,"nodes":{"n1":{"drain":true,"leaving":"00000000000000000000000000000001"},"n2":{"failed":{"incarnation":"00000000000000000000000000000002","why":"operator","runs_on":90000},"former":{"00000000000000000000000000000003":90000},"suspended":"00000000000000000000000000000004"}},"paused":true,"pins":{"orders":{"7":"n1"}},"failures":{"orders":"no room"},"heir":"n3","stuck":{"orders":[7]}}"#,
        r#"{"format":3,"parked":{"orders":{"7":{"hosts":["n1","n2"]}}},"suspicions":{"crashes":[{"node":"n1","incarnation":"00000000000000000000000000000001","versions":{"orders":5}}],"groups":[{"crashes":[0],"shards":{"orders":[7]}}]}}"#,
        r#"{"format":2,"rebalance":{"reason":"a node joined","since":7,"moved":3,"done":false}}"#,
    ])
}

fn frames() -> Vec<Vec<u8>> {
    let frame = |kind: u8, rest: &[u8]| {
        let length = u32::try_from(rest.len() + 1).unwrap_or(0);
        [&length.to_be_bytes()[..], &[kind], rest].concat()
    };
    let id = 7_u64.to_be_bytes();
    let (run, who) = (7_u128.to_be_bytes(), b"\x06orders\x02n1");
    let greeting = [frame(1, b"\0\x04orders"), frame(10, &[&run[..], b"n1"].concat())].concat();
    let client = [greeting, frame(4, &[&id[..], b"payload"].concat()), frame(7, &[])].concat();
    let ended = frame(6, &[&id[..], b"why"].concat());
    let answer = frame(5, &[&id[..], b"payload"].concat());
    let welcome = frame(2, &[&who[..], &run].concat());
    let server = [welcome, answer, ended, frame(8, &[]), frame(9, &id)].concat();
    vec![client, server, frame(3, b"another version"), frame(11, who)]
}

fn letters() -> Vec<Vec<u8>> {
    fuzzing::letters().into_iter().map(Into::into).collect()
}

fn answers() -> Vec<Vec<u8>> {
    let mut answers = texts(&["\x02\x01\0\0\0\x03yes\x03\0\0\0\x02no", "\x01\x01\0\0\0\0"]);
    answers.extend([vec![4], vec![6]]);
    answers
}
