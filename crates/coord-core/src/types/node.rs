//! Nodes: what a process says of itself, and what the store holds of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::bounded;
use super::id::{Incarnation, TableUid};
use super::name::{NodeId, TableName};
use super::revision::Revision;
use super::shard::{ShardId, Version};
use super::shard_load::LoadReport;
use super::shared::Text;
use super::ttl::Ttl;
use crate::error::{Error, Result};
use crate::quote::quoted;

/// The most bytes that a node's metadata may take, keys and values together.
pub const METADATA_BYTES_MAX: usize = 16 * 1024;
/// The longest label (zone, role, version), in bytes.
pub const LABEL_BYTES_MAX: usize = 63;
/// The most roles a node may have.
pub const ROLES_MAX: usize = 32;
/// The most members that a node can say it does not reach.
pub const UNREACHABLE_MAX: usize = 512;

/// Where a node is reached, as `host:port`; an IPv6 address stands in brackets.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Address(Text);

impl Address {
    /// Parses `host:port` without looking it up.
    ///
    /// # Errors
    /// `Invalid`, naming the text, for an empty or malformed host or a port that is not 1 to 65535.
    pub fn new(text: impl AsRef<str>) -> Result<Self> {
        let text = text.as_ref();
        let fail =
            |why: &str| Err(Error::invalid("parse", format!("address {} {why}", quoted(text))));
        let Some((host, port)) = text.rsplit_once(':') else {
            return fail("has no port; write host:port");
        };
        if parse_port(port).is_none() {
            return fail("has a port that is not 1 to 65535");
        }
        if !is_host(host) {
            return fail(
                "has a malformed host; write a name, an IPv4 address or [an IPv6 address]",
            );
        }
        Ok(Self(text.into()))
    }

    /// The text, `host:port`.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Address {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        Self::new(text)
    }
}

impl TryFrom<String> for Address {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        Self::new(text)
    }
}

impl From<Address> for String {
    fn from(address: Address) -> Self {
        address.0.to_string()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

/// Whether this is a host name, an IPv4 address or an IPv6 address in brackets.
pub(crate) fn is_host(text: &str) -> bool {
    if let Some(rest) = text.strip_prefix('[') {
        let inner = rest.strip_suffix(']');
        return inner.is_some_and(|inner| inner.parse::<std::net::Ipv6Addr>().is_ok());
    }
    let good = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    text.len() <= 253 && text.split('.').all(|part| !part.is_empty() && part.bytes().all(good))
}

/// The port that this text is, if it is one of 1 to 65535.
pub(crate) fn parse_port(text: &str) -> Option<u16> {
    let is_number = text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|port| is_number && *port != 0)
}

/// How much a node can take compared with the others: finite and above 0; 1 by default.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Capacity(f64);

impl Capacity {
    /// A capacity of this size.
    ///
    /// # Errors
    /// `Invalid` unless it is finite and above 0.
    pub fn new(size: f64) -> Result<Self> {
        if !size.is_finite() || size <= 0.0 {
            let why = format!("capacity {size} is not a finite number above 0");
            return Err(Error::invalid("parse", why));
        }
        Ok(Self(size))
    }

    /// The size.
    #[must_use]
    pub fn get(self) -> f64 {
        self.0
    }

    /// As an integer weight for placement: `max(1, round(capacity × 2^16))`, at most 2^40.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the value lies between 1 and 2^40 when it is cast"
    )]
    pub fn weight(self) -> u64 {
        const WEIGHT_MAX: f64 = (1_u64 << 40) as f64;
        (self.0 * 65_536.0).round().clamp(1.0, WEIGHT_MAX) as u64
    }
}

impl Default for Capacity {
    fn default() -> Self {
        Self(1.0)
    }
}

// A capacity is never NaN, so equality is total.
impl Eq for Capacity {}

impl TryFrom<f64> for Capacity {
    type Error = Error;
    fn try_from(size: f64) -> Result<Self> {
        Self::new(size)
    }
}

impl From<Capacity> for f64 {
    fn from(capacity: Capacity) -> Self {
        capacity.0
    }
}

/// A short word that a node carries: its zone, a role, its version. Visible ASCII without spaces, up to
/// 63 bytes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Label(Text);

impl Label {
    /// Parses a label.
    ///
    /// # Errors
    /// `Invalid`, naming the text, when it is empty, too long or not visible ASCII.
    pub fn new(text: impl AsRef<str>) -> Result<Self> {
        let text = text.as_ref();
        let good = !text.is_empty()
            && text.len() <= LABEL_BYTES_MAX
            && text.bytes().all(|b| b.is_ascii_graphic());
        if !good {
            let text = quoted(text);
            let why =
                format!("label {text} is not 1 to {LABEL_BYTES_MAX} visible ASCII characters");
            return Err(Error::invalid("parse", why));
        }
        Ok(Self(text.into()))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Label {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        Self::new(text)
    }
}

impl TryFrom<String> for Label {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        Self::new(text)
    }
}

impl From<Label> for String {
    fn from(label: Label) -> Self {
        label.0.to_string()
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

/// Free text that a node carries for others, at most 16 KiB in all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(into = "BTreeMap<String, String>")]
pub struct Metadata(Arc<BTreeMap<String, String>>);

impl Metadata {
    /// Takes the entries.
    ///
    /// # Errors
    /// `Invalid` when keys and values together exceed 16 KiB, or a key is empty.
    pub fn new(entries: BTreeMap<String, String>) -> Result<Self> {
        let bytes: usize = entries.iter().map(|(key, value)| key.len() + value.len()).sum();
        if bytes > METADATA_BYTES_MAX {
            let why =
                format!("metadata takes {bytes} bytes; at most {METADATA_BYTES_MAX} are allowed");
            return Err(Error::invalid("parse", why));
        }
        if entries.contains_key("") {
            return Err(Error::invalid("parse", "metadata has an empty key"));
        }
        Ok(Self(Arc::new(entries)))
    }

    /// The entries, by key.
    #[must_use]
    pub fn entries(&self) -> &BTreeMap<String, String> {
        &self.0
    }
}

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(entries: D) -> Result<Self, D::Error> {
        let bytes = |key: &String, value: &String| key.len() + value.len();
        let entries = bounded::map(entries, "bytes of metadata", METADATA_BYTES_MAX, bytes)?;
        Self::new(entries).map_err(D::Error::custom)
    }
}

impl TryFrom<BTreeMap<String, String>> for Metadata {
    type Error = Error;
    fn try_from(entries: BTreeMap<String, String>) -> Result<Self> {
        Self::new(entries)
    }
}

impl From<Metadata> for BTreeMap<String, String> {
    fn from(metadata: Metadata) -> Self {
        Arc::unwrap_or_clone(metadata.0)
    }
}

/// What a node declares of itself. What others hold of it is the runtime's `NodeStatus`.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Declared {
    /// It takes shards.
    #[default]
    Active,
    /// It takes nothing new and wants to be evacuated.
    Draining,
}

/// What a node has done with a table's shards: which version it applied, which shards it has started
/// and which it is still stopping.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The life of the table this speaks of.
    pub uid: TableUid,
    /// The newest version that the node has applied.
    pub applied: Version,
    /// Shards that were given away and still run here.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub stopping: BTreeSet<ShardId>,
    /// Shards that run here although they are still another's (make before break).
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub started: BTreeSet<ShardId>,
}

impl Report {
    /// A report that nothing is in motion at this version.
    #[must_use]
    pub fn new(uid: TableUid, applied: Version) -> Self {
        Self { uid, applied, stopping: BTreeSet::new(), started: BTreeSet::new() }
    }
}

/// Which process a registration is of: by this its successor on the same machine can see that it is dead.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMark {
    /// The machine's run, as its kernel names it.
    pub boot: String,
    /// The namespaces that the process's number and its start are of, as `/proc/self/ns` names them.
    pub namespace: String,
    /// The process's number.
    pub pid: u32,
    /// When it started, in the kernel's ticks since the machine did.
    pub started: u64,
    /// The uid of the pod that it runs in, where that was told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
}

impl ProcessMark {
    /// A process outside of pods.
    #[must_use]
    pub fn new(
        boot: impl Into<String>,
        namespace: impl Into<String>,
        pid: u32,
        started: u64,
    ) -> Self {
        Self { boot: boot.into(), namespace: namespace.into(), pid, started, pod: None }
    }

    /// In the pod with this uid.
    #[must_use]
    pub fn with_pod(mut self, uid: impl Into<String>) -> Self {
        self.pod = Some(uid.into());
        self
    }
}

/// A node as it describes itself.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Its stable name.
    pub id: NodeId,
    /// This run of it.
    pub incarnation: Incarnation,
    /// Where it is reached.
    pub address: Address,
    /// How much it can take.
    #[serde(default)]
    pub capacity: Capacity,
    /// How busy it is, in the service's own unit; finite and not negative.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<Load>,
    /// Its failure domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<Label>,
    /// The version of the service it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<Label>,
    /// What it is there for.
    #[serde(default, deserialize_with = "roles", skip_serializing_if = "BTreeSet::is_empty")]
    pub roles: BTreeSet<Label>,
    /// Anything else that others should know.
    #[serde(default)]
    pub metadata: Metadata,
    /// Whether it takes shards.
    #[serde(default)]
    pub declared: Declared,
    /// Whether it stands for election.
    #[serde(default = "stands", skip_serializing_if = "is_true")]
    pub candidate: bool,
    /// When it started by its own wall clock, in milliseconds since 1970: for people, never compared.
    #[serde(default)]
    pub started_at_ms: u64,
    /// What it did with each table's shards.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub reports: BTreeMap<TableName, Report>,
    /// Earlier runs of this node that certainly host nothing any more: this very process was them and has
    /// stopped what they ran, or its operator proved them dead. Their shards need not wait for a TTL.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub ended: BTreeSet<Incarnation>,
    /// Which members this node does not reach, where it tells: an empty set says that it reaches all, and
    /// none says nothing. At most 512.
    #[serde(default, deserialize_with = "unreachable", skip_serializing_if = "Option::is_none")]
    pub unreachable: Option<BTreeSet<NodeId>>,
    /// How busy its shards are, of each table whose strategy asks for it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub loads: BTreeMap<TableName, LoadReport>,
    /// Which process it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessMark>,
}

fn roles<'de, D: Deserializer<'de>>(roles: D) -> Result<BTreeSet<Label>, D::Error> {
    bounded::set(roles, "roles", ROLES_MAX)
}

fn unreachable<'de, D: Deserializer<'de>>(nodes: D) -> Result<Option<BTreeSet<NodeId>>, D::Error> {
    bounded::set(nodes, "unreachable nodes", UNREACHABLE_MAX).map(Some)
}

/// Who says nothing of it does.
fn stands() -> bool {
    true
}

fn is_true(value: &bool) -> bool {
    *value
}

impl NodeInfo {
    /// A node of capacity 1 with a new incarnation.
    #[must_use]
    pub fn new(id: NodeId, address: Address) -> Self {
        Self {
            id,
            incarnation: Incarnation::random(),
            address,
            capacity: Capacity::default(),
            load: None,
            zone: None,
            version: None,
            roles: BTreeSet::new(),
            metadata: Metadata::default(),
            declared: Declared::Active,
            candidate: true,
            started_at_ms: 0,
            reports: BTreeMap::new(),
            ended: BTreeSet::new(),
            unreachable: None,
            loads: BTreeMap::new(),
            process: None,
        }
    }

    /// As this process.
    #[must_use]
    pub fn with_process(mut self, process: ProcessMark) -> Self {
        self.process = Some(process);
        self
    }

    /// With this incarnation instead of a random one.
    #[must_use]
    pub fn with_incarnation(mut self, incarnation: Incarnation) -> Self {
        self.incarnation = incarnation;
        self
    }

    /// With this capacity.
    #[must_use]
    pub fn with_capacity(mut self, capacity: Capacity) -> Self {
        self.capacity = capacity;
        self
    }

    /// In this zone.
    #[must_use]
    pub fn with_zone(mut self, zone: Label) -> Self {
        self.zone = Some(zone);
        self
    }

    /// Running this version of the service.
    #[must_use]
    pub fn with_version(mut self, version: Label) -> Self {
        self.version = Some(version);
        self
    }

    /// With these roles.
    ///
    /// # Errors
    /// `Invalid` for more than 32.
    pub fn with_roles(mut self, roles: BTreeSet<Label>) -> Result<Self> {
        if roles.len() > ROLES_MAX {
            let why = format!("{} roles; at most {ROLES_MAX} are allowed", roles.len());
            return Err(Error::invalid("parse", why));
        }
        self.roles = roles;
        Ok(self)
    }

    /// With this metadata.
    #[must_use]
    pub fn with_metadata(mut self, metadata: Metadata) -> Self {
        self.metadata = metadata;
        self
    }

    /// Declaring itself so.
    #[must_use]
    pub fn with_declared(mut self, declared: Declared) -> Self {
        self.declared = declared;
        self
    }

    /// Not standing for election.
    #[must_use]
    pub fn without_candidacy(mut self) -> Self {
        self.candidate = false;
        self
    }

    /// With proof that an earlier run of this node hosts nothing any more. Without one its shards stay
    /// where they are until it deregistered or its whole TTL has passed.
    #[must_use]
    pub fn with_ended(mut self, run: Incarnation) -> Self {
        self.ended.insert(run);
        self
    }

    /// Telling which members it does not reach; more than 512 tell nothing.
    #[must_use]
    pub fn with_unreachable(mut self, nodes: Option<BTreeSet<NodeId>>) -> Self {
        self.unreachable = nodes.filter(|nodes| nodes.len() <= UNREACHABLE_MAX);
        self
    }

    /// Started at this wall-clock time, in milliseconds since 1970.
    #[must_use]
    pub fn with_started_at_ms(mut self, millis: u64) -> Self {
        self.started_at_ms = millis;
        self
    }
}

/// How busy a node says it is: finite and not negative, in the service's own unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Load(f64);

impl Load {
    /// A load of this size.
    ///
    /// # Errors
    /// `Invalid` unless it is finite and not negative.
    pub fn new(size: f64) -> Result<Self> {
        if !size.is_finite() || size < 0.0 {
            let why = format!("load {size} is not a finite number of 0 or more");
            return Err(Error::invalid("parse", why));
        }
        Ok(Self(size))
    }

    /// The size.
    #[must_use]
    pub fn get(self) -> f64 {
        self.0
    }
}

impl TryFrom<f64> for Load {
    type Error = Error;
    fn try_from(size: f64) -> Result<Self> {
        Self::new(size)
    }
}

impl From<Load> for f64 {
    fn from(load: Load) -> Self {
        load.0
    }
}

/// A node as the store holds it.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
pub struct NodeRecord {
    /// What the node said last.
    pub info: NodeInfo,
    /// The TTL of its registration, as granted.
    pub ttl: Ttl,
    /// The store's mark of its last write; what [`evict`](crate::Discovery::evict) compares.
    pub revision: Revision,
    /// How long it has still to live if it sends nothing, where that is known.
    pub may_expire_in: Option<Duration>,
    /// False where expiry is judged by observers and this one has not watched it for a whole TTL.
    pub judged: bool,
}

impl NodeRecord {
    /// A record that the store judges itself.
    #[must_use]
    pub fn new(info: NodeInfo, ttl: Ttl, revision: Revision) -> Self {
        Self { info, ttl, revision, may_expire_in: None, judged: true }
    }

    /// With the time it has still to live.
    #[must_use]
    pub fn with_may_expire_in(mut self, remaining: Option<Duration>) -> Self {
        self.may_expire_in = remaining;
        self
    }

    /// Said to be judged or not.
    #[must_use]
    pub fn with_judged(mut self, judged: bool) -> Self {
        self.judged = judged;
        self
    }
}

/// A registration that this process holds.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
pub struct Registration {
    /// Whose it is.
    pub node: NodeId,
    /// Of which run.
    pub incarnation: Incarnation,
    /// For how long, as granted.
    pub ttl: Ttl,
    /// The store's mark of the last write.
    pub revision: Revision,
}

impl Registration {
    /// A registration of its parts, for backends.
    #[must_use]
    pub fn new(node: NodeId, incarnation: Incarnation, ttl: Ttl, revision: Revision) -> Self {
        Self { node, incarnation, ttl, revision }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse_or_say_why() {
        for good in ["localhost:1", "10.0.0.7:65535", "[::1]:80", "my_host.svc.local:9000"] {
            assert_eq!(Address::new(good).expect(good).as_str(), good);
        }
        for bad in
            ["", "host", ":1", "host:0", "host:65536", "host:+1", "::1:80", "[::1:80", "a b:1"]
        {
            assert!(Address::new(bad).expect_err(bad).to_string().contains("address"));
        }
    }

    #[test]
    fn capacities_are_finite_and_positive() {
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(Capacity::new(bad).is_err());
        }
        assert_eq!(Capacity::default().weight(), 65_536);
        assert_eq!(Capacity::new(1e-12).expect("positive").weight(), 1);
        assert_eq!(Capacity::new(1e300).expect("finite").weight(), 1 << 40);
    }

    #[test]
    fn metadata_and_labels_are_bounded() {
        let big = BTreeMap::from([("k".to_owned(), "v".repeat(METADATA_BYTES_MAX))]);
        assert!(Metadata::new(big).is_err());
        assert!(Label::new("eu-1a").is_ok());
        assert!(Label::new("a b").is_err());
        assert!(Label::new("x".repeat(64)).is_err());
        assert!(Load::new(-0.1).is_err());
    }
}
