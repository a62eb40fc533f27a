//! Where everything stands: the subjects of one cluster in the bucket's stream.
//!
//! ```text
//! $KV.<bucket>.<cluster>.lease.<lease>          a lease that is held     JSON, with a TTL
//!                       .node.<node>            a registered node        JSON, with a TTL
//!                       .table.<table>          a table's head           JSON
//!                       .chunk.<table>.<key>    a part of its map        binary, immutable
//!                       .guard.<table>          a lease's check          empty, with a TTL of 1 s
//!                       .request.<id>.asked     a request                JSON, with a TTL
//!                       .request.<id>.answered  its answer               JSON, with a TTL
//! ```
//!
//! A dot separates the tokens of a subject, so the dots of a name stand as slashes, which no name
//! holds. No name holds a wildcard either: only the filters below do.

use bytes::Bytes;
use coord_core::wire::ChunkKey;
use coord_core::{ClusterName, LeaseName, NodeId, RequestId, Revision, TableName};

/// The subjects of one cluster.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    root: String,
}

impl Keys {
    pub(crate) fn new(bucket: &str, cluster: &ClusterName) -> Self {
        Self { root: format!("$KV.{bucket}.{cluster}") }
    }

    pub(crate) fn lease(&self, name: &LeaseName) -> String {
        self.subject("lease", name.as_str())
    }

    /// A filter for all leases.
    pub(crate) fn leases(&self) -> String {
        format!("{}.lease.*", self.root)
    }

    /// The name that a lease's subject stands for.
    pub(crate) fn lease_of(subject: &str) -> Option<LeaseName> {
        let name = name_of(subject);
        let own = LeaseName::reserved().into_iter().find(|own| name == own.as_str());
        own.or_else(|| LeaseName::new(name).ok())
    }

    pub(crate) fn node(&self, id: &NodeId) -> String {
        self.subject("node", id.as_str())
    }

    /// A filter for all nodes.
    pub(crate) fn nodes(&self) -> String {
        format!("{}.node.*", self.root)
    }

    pub(crate) fn table(&self, name: &TableName) -> String {
        self.subject("table", name.as_str())
    }

    /// A filter for all tables' heads.
    pub(crate) fn tables(&self) -> String {
        format!("{}.table.*", self.root)
    }

    /// The name that a head's subject stands for.
    pub(crate) fn table_of(subject: &str) -> Option<TableName> {
        let name = name_of(subject);
        let cluster = TableName::cluster();
        if name == cluster.as_str() { Some(cluster) } else { TableName::new(name).ok() }
    }

    pub(crate) fn chunk(&self, table: &TableName, key: &ChunkKey) -> String {
        format!("{}.chunk.{}.{key}", self.root, token(table.as_str()))
    }

    /// A filter for all chunks of a table, and what they have before their keys.
    pub(crate) fn chunks(&self, table: &TableName) -> (String, String) {
        let before = format!("{}.chunk.{}.", self.root, token(table.as_str()));
        (format!("{before}>"), before)
    }

    pub(crate) fn guard(&self, table: &TableName) -> String {
        self.subject("guard", table.as_str())
    }

    pub(crate) fn asked(&self, id: RequestId) -> String {
        format!("{}.request.{id}.asked", self.root)
    }

    pub(crate) fn answered(&self, id: RequestId) -> String {
        format!("{}.request.{id}.answered", self.root)
    }

    /// A filter for all requests and answers.
    pub(crate) fn requests(&self) -> String {
        format!("{}.request.*.*", self.root)
    }

    /// The request that a subject belongs to, and whether the subject is that of its answer.
    pub(crate) fn request_of(subject: &str) -> Option<(RequestId, bool)> {
        let mut parts = subject.rsplit('.');
        let is_answer = match parts.next()? {
            "asked" => false,
            "answered" => true,
            _ => return None,
        };
        Some((parts.next()?.parse().ok()?, is_answer))
    }

    /// In one piece of memory: every renewal makes one.
    fn subject(&self, kind: &str, name: &str) -> String {
        let bytes = self.root.len() + kind.len() + name.len() + 2;
        let mut subject = String::with_capacity(bytes);
        for part in [&self.root, ".", kind, "."] {
            subject.push_str(part);
        }
        for (place, part) in name.split('.').enumerate() {
            if place > 0 {
                subject.push('/');
            }
            subject.push_str(part);
        }
        subject
    }

    /// A subject that `check` writes to.
    pub(crate) fn probe(&self, name: &str) -> String {
        format!("{}.check.{name}", self.root)
    }
}

/// A [`Revision`] as this backend makes it: the sequence of the write, and whose record it wrote. So the
/// sequence of another record is never taken for one's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) sequence: u64,
    /// The attempt of a lease's holder, or the incarnation of a node.
    pub(crate) whose: u128,
}

impl Mark {
    pub(crate) fn revision(self) -> Revision {
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&self.sequence.to_be_bytes());
        bytes[8..].copy_from_slice(&self.whose.to_be_bytes());
        Revision::from_bytes(Bytes::copy_from_slice(&bytes))
    }

    /// The sequence that a revision shows, if this backend made it for that attempt or incarnation.
    pub(crate) fn sequence_of(revision: &Revision, whose: u128) -> Option<u64> {
        let (sequence, by) = revision.as_bytes().split_at_checked(8)?;
        let by = u128::from_be_bytes(by.try_into().ok()?);
        (by == whose).then_some(u64::from_be_bytes(sequence.try_into().ok()?))
    }
}

fn token(name: &str) -> String {
    name.replace('.', "/")
}

fn name_of(subject: &str) -> String {
    subject.rsplit('.').next().unwrap_or_default().replace('/', ".")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Keys {
        Keys::new("coord", &ClusterName::new("orders").expect("name"))
    }

    #[test]
    fn a_name_is_one_token_and_comes_back() {
        for text in ["a", "a.b", "a-b", "eu-1.orders.v2"] {
            let lease = LeaseName::new(text).expect("name");
            let subject = keys().lease(&lease);
            assert_eq!(subject.split('.').count(), 5, "{subject}");
            assert_eq!(Keys::lease_of(&subject), Some(lease));
            let table = TableName::new(text).expect("name");
            assert_eq!(Keys::table_of(&keys().table(&table)), Some(table));
        }
        for own in LeaseName::reserved() {
            assert_eq!(Keys::lease_of(&keys().lease(&own)), Some(own));
        }
        let cluster = TableName::cluster();
        assert_eq!(Keys::table_of(&keys().table(&cluster)), Some(cluster));
        assert_eq!(Keys::lease_of("$KV.coord.orders.lease._other"), None);
    }

    #[test]
    fn the_chunks_of_a_table_are_told_from_those_of_another() {
        let text = format!("{:016x}.{:032x}.{:016x}.0.{:032x}", 7, 1, 3, 9);
        let key: ChunkKey = text.parse().expect("a key");
        let (short, long) =
            (TableName::new("a").expect("name"), TableName::new("a.b").expect("name"));
        let (filter, before) = keys().chunks(&short);
        assert_eq!(filter, "$KV.coord.orders.chunk.a.>");
        let subject = keys().chunk(&short, &key);
        assert_eq!(subject.strip_prefix(&before).and_then(|text| text.parse().ok()), Some(key));
        assert!(!keys().chunk(&long, &key).starts_with(&before));
    }

    #[test]
    fn a_mark_is_good_for_whose_it_is() {
        let revision = Mark { sequence: 77, whose: 5 }.revision();
        assert_eq!(Mark::sequence_of(&revision, 5), Some(77));
        assert_eq!(Mark::sequence_of(&revision, 6), None);
        assert_eq!(Mark::sequence_of(&Revision::from_u64(77), 5), None);
        assert_eq!(Mark::sequence_of(&Revision::from_bytes(""), 0), None);
    }

    #[test]
    fn a_request_and_its_answer_belong_together() {
        let id = RequestId::from_u128(7);
        assert_eq!(Keys::request_of(&keys().asked(id)), Some((id, false)));
        assert_eq!(Keys::request_of(&keys().answered(id)), Some((id, true)));
        assert_eq!(Keys::request_of("$KV.coord.orders.request.x.asked"), None);
        assert_eq!(Keys::request_of("$KV.coord.orders.request.1.other"), None);
    }
}
