//! Where everything stands, and how a revision is written down.
//!
//! ```text
//! coord/<cluster>/identity             which store this is; made once, never deleted
//! coord/<cluster>/lease/<lease>        a lease that is held
//! coord/<cluster>/node/<node>          a node that is registered
//! coord/<cluster>/node-left/<node>     that it left on purpose; gone a moment later
//! coord/<cluster>/table/<table>        a table's head
//! coord/<cluster>/chunk/<table>/<key>  a part of its map, immutable
//! coord/<cluster>/request/<id>         a request
//! coord/<cluster>/request/<id>/answer  its answer
//! ```
//!
//! Leases, nodes and requests, with what belongs to them, are bound to etcd leases and go with
//! those. All values but chunks and the identity are JSON.
//!
//! Names hold none of `/` and nothing that etcd can't take, so they stand as they are.

use coord_core::wire::ChunkKey;
use coord_core::{ClusterName, LeaseName, NodeId, RequestId, Revision, TableName};

/// The keys of one cluster.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    root: std::sync::Arc<str>,
}

/// All keys from one to before another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) from: String,
    /// Not in the range; empty for the one key alone.
    pub(crate) end: String,
}

impl Range {
    pub(crate) fn one(key: String) -> Self {
        Self { from: key, end: String::new() }
    }

    /// All keys that begin with a prefix, which ends with a slash.
    pub(crate) fn prefix(prefix: String) -> Self {
        let mut end = prefix.clone();
        debug_assert!(end.ends_with('/'));
        end.pop();
        end.push(char::from(b'/' + 1));
        Self { from: prefix, end }
    }

    /// What follows a key.
    pub(crate) fn after(self, key: &str) -> Self {
        Self { from: format!("{key}\0"), end: self.end }
    }
}

impl Keys {
    pub(crate) fn new(cluster: &ClusterName) -> Self {
        Self { root: format!("coord/{cluster}").into() }
    }

    pub(crate) fn identity(&self) -> String {
        format!("{}/identity", self.root)
    }

    /// A key that `check` writes and deletes.
    pub(crate) fn probe(&self, name: &str) -> String {
        format!("{}/check/{name}", self.root)
    }

    pub(crate) fn lease(&self, name: &LeaseName) -> String {
        format!("{}/lease/{name}", self.root)
    }

    pub(crate) fn leases(&self) -> Range {
        Range::prefix(format!("{}/lease/", self.root))
    }

    pub(crate) fn node(&self, id: &NodeId) -> String {
        format!("{}/node/{id}", self.root)
    }

    pub(crate) fn nodes(&self) -> Range {
        Range::prefix(format!("{}/node/", self.root))
    }

    pub(crate) fn node_left(&self, id: &NodeId) -> String {
        format!("{}/node-left/{id}", self.root)
    }

    /// The nodes and what is said of their leaving: the range begins with `node-left/`, ends behind
    /// `node/`, and there is no other kind in between.
    pub(crate) fn nodes_and_left(&self) -> Range {
        Range { from: format!("{}/node-left/", self.root), end: self.nodes().end }
    }

    pub(crate) fn table(&self, name: &TableName) -> String {
        format!("{}/table/{name}", self.root)
    }

    pub(crate) fn tables(&self) -> Range {
        Range::prefix(format!("{}/table/", self.root))
    }

    pub(crate) fn chunk(&self, table: &TableName, key: &ChunkKey) -> String {
        format!("{}/chunk/{table}/{key}", self.root)
    }

    pub(crate) fn chunks(&self, table: &TableName) -> Range {
        Range::prefix(format!("{}/chunk/{table}/", self.root))
    }

    pub(crate) fn request(&self, id: RequestId) -> String {
        format!("{}/request/{id}", self.root)
    }

    pub(crate) fn answer(&self, id: RequestId) -> String {
        format!("{}/request/{id}/answer", self.root)
    }

    pub(crate) fn requests(&self) -> Range {
        Range::prefix(format!("{}/request/", self.root))
    }
}

/// A [`Revision`] as this backend makes it: the etcd revision of the write, and the etcd lease that
/// the record is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) modified: i64,
    pub(crate) lease: i64,
}

impl Mark {
    pub(crate) fn revision(self) -> Revision {
        let mut bytes = self.modified.to_be_bytes().to_vec();
        bytes.extend_from_slice(&self.lease.to_be_bytes());
        Revision::from_bytes(bytes)
    }

    /// None for a revision that another backend made.
    pub(crate) fn of(revision: &Revision) -> Option<Self> {
        let (modified, lease) = revision.as_bytes().split_at_checked(8)?;
        Some(Self {
            modified: i64::from_be_bytes(modified.try_into().ok()?),
            lease: i64::from_be_bytes(lease.try_into().ok()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Keys {
        Keys::new(&ClusterName::new("orders").expect("name"))
    }

    fn holds(range: &Range, key: &str) -> bool {
        range.from.as_str() <= key && key < range.end.as_str()
    }

    #[test]
    fn a_range_holds_its_own_kind_and_no_other() {
        let keys = keys();
        let (lease, node) = (LeaseName::leader(), NodeId::new("a.b-c").expect("name"));
        let table = TableName::cluster();
        let id = RequestId::from_u128(7);
        let all = [
            keys.identity(),
            keys.lease(&lease),
            keys.node(&node),
            keys.node_left(&node),
            keys.table(&table),
            keys.request(id),
            keys.answer(id),
        ];
        let held = |range: &Range| all.iter().filter(|key| holds(range, key)).count();
        assert_eq!([keys.leases(), keys.nodes(), keys.tables()].map(|range| held(&range)), [1; 3]);
        assert_eq!(held(&keys.nodes_and_left()), 2);
        assert_eq!(held(&keys.requests()), 2);
        let longer = Keys::new(&ClusterName::new("orders-2").expect("name"));
        assert!(!holds(&keys.leases(), &longer.lease(&lease)));
        assert!(!holds(&keys.leases().after(&keys.lease(&lease)), &keys.lease(&lease)));
    }

    #[test]
    fn a_mark_comes_back() {
        let mark = Mark { modified: 77, lease: -3 };
        assert_eq!(Mark::of(&mark.revision()), Some(mark));
        assert_eq!(Mark::of(&Revision::from_u64(77)), None);
        assert_eq!(Mark::of(&Revision::from_bytes("")), None);
    }
}
