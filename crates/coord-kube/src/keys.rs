//! Where everything stands: the names and labels of one cluster's objects in a namespace.
//!
//! ```text
//! Lease      coord.<cluster>.lease.<lease>         a lease, also while nobody holds it
//!            coord.<cluster>.node.<node>           a registered node
//! ConfigMap  coord.<cluster>.table.<table>         a table's head       data.head     JSON
//!            coord.<cluster>.chunk.<table>.<key>   a part of its map    binaryData.chunk
//!            coord.<cluster>.request.<id>          a request            data.request  JSON
//!                                                  and its answer       data.answer   JSON
//! ```
//!
//! A cluster's name has no dot and kinds are fixed words, so that each name is read in one way only.
//! A reserved name begins with an underscore, which no name of an object may hold: its kind has
//! `own-` before it instead. Every object carries the labels `coord/cluster` and `coord/kind`, and a
//! chunk `coord/table` as well.

use coord_core::wire::ChunkKey;
use coord_core::{ClusterName, LeaseName, NodeId, RequestId, Revision, TableName};

/// The labels that objects are found by.
pub(crate) const LABEL_CLUSTER: &str = "coord/cluster";
pub(crate) const LABEL_KIND: &str = "coord/kind";
pub(crate) const LABEL_TABLE: &str = "coord/table";

/// The lease's last term, which outlives each holder.
pub(crate) const TERM: &str = "coord/term";
/// The lease's holder, or the node, as JSON.
pub(crate) const RECORD: &str = "coord/record";
/// Which incarnation of a node has deregistered or was evicted: its registration is over, and the
/// object is deleted next.
pub(crate) const FAREWELL: &str = "coord/farewell";
/// The leader since whose claim a request may be answered.
pub(crate) const SEALED: &str = "coord/sealed-by";

/// The fields of ConfigMaps.
pub(crate) const HEAD: &str = "head";
pub(crate) const CHUNK: &str = "chunk";
pub(crate) const REQUEST: &str = "request";
pub(crate) const ANSWER: &str = "answer";

/// What an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Lease,
    Node,
    Table,
    Chunk,
    Request,
    Check,
}

impl Kind {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Lease => "lease",
            Self::Node => "node",
            Self::Table => "table",
            Self::Chunk => "chunk",
            Self::Request => "request",
            Self::Check => "check",
        }
    }
}

/// The names of one cluster's objects.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    cluster: ClusterName,
}

impl Keys {
    pub(crate) fn new(cluster: ClusterName) -> Self {
        Self { cluster }
    }

    pub(crate) fn cluster(&self) -> &str {
        self.cluster.as_str()
    }

    pub(crate) fn lease(&self, name: &LeaseName) -> String {
        self.object(Kind::Lease, name.as_str())
    }

    pub(crate) fn node(&self, id: &NodeId) -> String {
        self.object(Kind::Node, id.as_str())
    }

    pub(crate) fn table(&self, name: &TableName) -> String {
        self.object(Kind::Table, name.as_str())
    }

    pub(crate) fn chunk(&self, table: &TableName, key: &ChunkKey) -> String {
        format!("{}{key}", self.before_chunks(table))
    }

    /// What the names of a table's chunks have before their keys.
    pub(crate) fn before_chunks(&self, table: &TableName) -> String {
        format!("{}.", self.object(Kind::Chunk, table.as_str()))
    }

    pub(crate) fn request(&self, id: RequestId) -> String {
        self.object(Kind::Request, &id.to_string())
    }

    /// An object that `check` makes.
    pub(crate) fn check(&self, name: &str) -> String {
        self.object(Kind::Check, name)
    }

    fn object(&self, kind: Kind, name: &str) -> String {
        let (cluster, kind) = (&self.cluster, kind.as_str());
        match name.strip_prefix('_') {
            Some(own) => format!("coord.{cluster}.own-{kind}.{own}"),
            None => format!("coord.{cluster}.{kind}.{name}"),
        }
    }

    /// The lease whose object has this name.
    pub(crate) fn lease_of(&self, object: &str) -> Option<LeaseName> {
        let own = LeaseName::reserved().into_iter().find(|own| object == self.lease(own));
        if own.is_some() {
            return own;
        }
        LeaseName::new(self.name_of(Kind::Lease, object)?).ok()
    }

    /// The table whose head has this name.
    pub(crate) fn table_of(&self, object: &str) -> Option<TableName> {
        let cluster = TableName::cluster();
        if object == self.table(&cluster) {
            return Some(cluster);
        }
        TableName::new(self.name_of(Kind::Table, object)?).ok()
    }

    pub(crate) fn request_of(&self, object: &str) -> Option<RequestId> {
        self.name_of(Kind::Request, object)?.parse().ok()
    }

    fn name_of<'a>(&self, kind: Kind, object: &'a str) -> Option<&'a str> {
        let rest = object.strip_prefix("coord.")?.strip_prefix(self.cluster.as_str())?;
        rest.strip_prefix('.')?.strip_prefix(kind.as_str())?.strip_prefix('.')
    }
}

/// The value of a chunk's label: a label can't begin with an underscore, and no user's table ends
/// with a hyphen or begins with one.
pub(crate) fn table_label(table: &TableName) -> String {
    match table.as_str().strip_prefix('_') {
        Some(own) => format!("own_{own}"),
        None => table.as_str().to_owned(),
    }
}

/// A [`Revision`] as this backend makes it: which version of which object, and whose record that is. So a
/// version with another record is never taken for one's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) version: String,
    pub(crate) uid: String,
    /// The attempt of a lease's holder, or the incarnation of a node.
    pub(crate) whose: u128,
}

impl Mark {
    pub(crate) fn revision(&self) -> Revision {
        let mut bytes = self.whose.to_be_bytes().to_vec();
        bytes.extend_from_slice(self.uid.as_bytes());
        bytes.push(0);
        bytes.extend_from_slice(self.version.as_bytes());
        Revision::from_bytes(bytes)
    }

    /// What a revision shows, if this backend made it for that attempt or incarnation.
    pub(crate) fn of(revision: &Revision, whose: u128) -> Option<Self> {
        let (by, rest) = revision.as_bytes().split_at_checked(16)?;
        if u128::from_be_bytes(by.try_into().ok()?) != whose {
            return None;
        }
        let (uid, version) = std::str::from_utf8(rest).ok()?.split_once('\0')?;
        Some(Self { version: version.to_owned(), uid: uid.to_owned(), whose })
    }
}

#[cfg(test)]
mod tests {
    use coord_core::{AttemptId, NAME_BYTES_MAX, NODE_ID_BYTES_MAX};

    use super::*;

    fn keys(cluster: &str) -> Keys {
        Keys::new(ClusterName::new(cluster).expect("cluster"))
    }

    /// The longest.
    fn chunk_key() -> ChunkKey {
        let (most, whole) = ("f".repeat(16), "f".repeat(32));
        let attempt = AttemptId::from_u128(u128::MAX);
        let key = format!("{most}.{attempt}.{most}.ffffffff.{whole}");
        key.parse().expect("a key")
    }

    /// What an object's name may be: a DNS-1123 subdomain.
    fn is_subdomain(name: &str) -> bool {
        let is_good = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        name.len() <= 253
            && name.split('.').all(|part| {
                part.bytes().all(is_good)
                    && !part.is_empty()
                    && !part.starts_with('-')
                    && !part.ends_with('-')
            })
    }

    #[test]
    fn the_longest_names_fit() {
        let keys = keys(&"c".repeat(40));
        let name = "x".repeat(NAME_BYTES_MAX);
        let table = TableName::new(&name).expect("table");
        for object in [
            keys.lease(&LeaseName::new(&name).expect("lease")),
            keys.lease(&LeaseName::leader()),
            keys.node(&NodeId::new("n".repeat(NODE_ID_BYTES_MAX)).expect("node")),
            keys.table(&table),
            keys.table(&TableName::cluster()),
            keys.chunk(&table, &chunk_key()),
            keys.chunk(&TableName::cluster(), &chunk_key()),
            keys.request(RequestId::from_u128(u128::MAX)),
        ] {
            assert!(is_subdomain(&object), "{object} has {} bytes", object.len());
        }
        for table in [table, TableName::cluster()] {
            let label = table_label(&table);
            assert!(label.len() <= 63 && !label.starts_with('_'), "{label}");
        }
    }

    #[test]
    fn names_are_told_apart_and_read_back() {
        let keys = keys("orders");
        for name in ["a", "a.b", "leader", "lease.leader", "own-lease.leader"] {
            let lease = LeaseName::new(name).expect("lease");
            assert_eq!(keys.lease_of(&keys.lease(&lease)), Some(lease.clone()));
            assert_ne!(keys.lease(&lease), keys.lease(&LeaseName::leader()));
        }
        let leader = keys.lease(&LeaseName::leader());
        assert_eq!(leader, "coord.orders.own-lease.leader");
        assert_eq!(keys.lease_of(&leader), Some(LeaseName::leader()));
        assert_eq!(keys.table_of(&keys.table(&TableName::cluster())), Some(TableName::cluster()));
        let id = RequestId::from_u128(7);
        assert_eq!(keys.request_of(&keys.request(id)), Some(id));
        assert_eq!(keys.lease_of("coord.orders.node.a"), None);
        assert_eq!(keys.lease_of("coord.orders-x.lease.a"), None);
        let table = TableName::new("t.u").expect("table");
        let object = keys.chunk(&table, &chunk_key());
        let text = object.strip_prefix(&keys.before_chunks(&table)).expect("its prefix");
        assert_eq!(text.parse::<ChunkKey>().expect("a key"), chunk_key());
        assert_ne!(table_label(&TableName::cluster()), "own.cluster");
    }

    #[test]
    fn a_revision_is_its_owners() {
        let mark = Mark { version: "71".to_owned(), uid: "u-1".to_owned(), whose: 7 };
        assert_eq!(Mark::of(&mark.revision(), 7), Some(mark.clone()));
        assert_eq!(Mark::of(&mark.revision(), 8), None);
        assert_eq!(Mark::of(&Revision::from_u64(1), 7), None);
    }
}
