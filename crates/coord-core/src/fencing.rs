//! What a claim and a publish come to, decided once for all backends.
//!
//! A backend reads what its store holds, asks here, and writes on condition that nothing of what it read
//! has changed. So the rules that keep an older leader from writing stand in one place, and a backend
//! brings only the atomic step.

use crate::error::{Error, Result};
use crate::placement::{Claim, Publish};
use crate::types::{
    Binding, ClaimRequest, Fence, ShardMap, StoredTable, TableHeader, TableName, TableUid, Version,
};
use crate::wire::TableHeadV1;

/// A table as a writer finds it.
#[derive(Clone, Copy, Debug)]
pub struct TableState<'a> {
    fence: &'a Fence,
    binding: &'a Binding,
    header: &'a TableHeader,
    uid: TableUid,
    version: Version,
}

impl<'a> From<&'a TableHeadV1> for TableState<'a> {
    fn from(head: &'a TableHeadV1) -> Self {
        let TableHeadV1 { fence, binding, header, uid, .. } = head;
        Self { fence, binding, header, uid: *uid, version: head.version() }
    }
}

impl<'a> From<&'a StoredTable> for TableState<'a> {
    fn from(table: &'a StoredTable) -> Self {
        let StoredTable { fence, binding, map, .. } = table;
        Self { fence, binding, header: map.header(), uid: map.uid(), version: map.version() }
    }
}

impl TableState<'_> {
    /// Why a claim is refused; none if the fence and the binding are to be written. `is_held` tells
    /// whether the fence's grant holds its lease, and is true where the store can't tell.
    #[must_use]
    pub fn refuse_claim(self, request: &ClaimRequest, is_held: bool) -> Option<Claim> {
        let fence = &request.fence;
        let is_bound = self.binding.admits(fence);
        if !is_bound && request.rebind_from.as_ref() != Some(self.binding) {
            return Some(Claim::OtherLease(self.binding.clone()));
        }
        if !is_held || (is_bound && !fence.passes(self.fence)) {
            return Some(Claim::Fenced(self.fence.clone()));
        }
        (*self.header != request.header).then(|| Claim::Mismatch(self.header.clone()))
    }

    /// What a publish comes to without a write; none if the map is to be written. `is_held` is as for a
    /// claim; `is_stored` tells whether the stored map is this very one, under this very fence: then the
    /// publish is a retry.
    ///
    /// # Errors
    /// `Invalid` for a map with another header.
    pub fn settle_publish(
        self,
        table: &TableName,
        fence: &Fence,
        expected: Version,
        map: &ShardMap,
        is_held: bool,
        is_stored: impl FnOnce() -> bool,
    ) -> Result<Option<Publish>> {
        let Self { uid, version, .. } = self;
        if !is_held || !self.binding.admits(fence) || !fence.passes(self.fence) {
            return Ok(Some(Publish::Fenced(Some(self.fence.clone()))));
        }
        if is_stored() {
            return Ok(Some(Publish::Published(map.version())));
        }
        if map.uid() != uid || expected != version {
            return Ok(Some(Publish::Conflict { uid, version }));
        }
        if map.header() != self.header {
            let why = format!("the map has header {:?}, the table another", map.header());
            return Err(Error::invalid("publish", why).resource(table));
        }
        Ok(None)
    }
}

/// Refuses, before any I/O, a map that does not follow `expected` or does not name its writer.
///
/// # Errors
/// `Invalid` for a map that is not the version after `expected`, or that names another writer.
pub fn check_map(
    table: &TableName,
    fence: &Fence,
    expected: Version,
    map: &ShardMap,
) -> Result<()> {
    let why = if map.version().get().checked_sub(1) != Some(expected.get()) {
        format!("the map is of version {}, which does not follow {expected}", map.version())
    } else if map.writer() != Some(fence) {
        format!("the map does not name the fence of term {} as its writer", fence.term)
    } else {
        return Ok(());
    };
    Err(Error::invalid("publish", why).resource(table))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use crate::types::{AttemptId, LeaseName, Origin, ShardCount, Term};

    fn fence_of(origin: &str, term: u64, attempt: u128) -> Fence {
        let (term, attempt) = (Term::from_u64(term), AttemptId::from_u128(attempt));
        Fence::new(LeaseName::leader(), term, attempt, Origin::new(origin))
    }

    fn fence(term: u64) -> Fence {
        fence_of("memory:1/c", term, u128::from(term))
    }

    fn foreign(term: u64) -> Fence {
        fence_of("etcd:2/c", term, 1)
    }

    fn name() -> TableName {
        TableName::new("orders").expect("name")
    }

    fn header(shards: u32) -> TableHeader {
        TableHeader::new(ShardCount::new(shards).expect("count"))
    }

    /// A table of 8 shards, last written under term 7.
    fn head() -> TableHeadV1 {
        TableHeadV1::created(name(), header(8), fence(7))
    }

    #[test]
    fn a_claim_needs_the_lease_the_fence_and_the_header() {
        let head = head();
        let claim = |fence: Fence, shards, held| {
            let request = ClaimRequest::new(name(), fence, header(shards));
            TableState::from(&head).refuse_claim(&request, held)
        };
        assert_eq!(claim(fence(8), 8, true), None);
        assert_eq!(claim(fence(7), 8, true), None, "the very same grant");
        let fenced = Some(Claim::Fenced(fence(7)));
        assert_eq!(claim(fence(6), 8, true), fenced);
        assert_eq!(claim(fence_of("memory:1/c", 7, 1), 8, true), fenced, "another grant");
        assert_eq!(claim(fence(8), 8, false), fenced, "its lease is not held");
        assert_eq!(claim(fence(8), 9, true), Some(Claim::Mismatch(header(8))));
        assert_eq!(claim(foreign(9), 8, true), Some(Claim::OtherLease(Binding::of(&fence(1)))));
    }

    #[test]
    fn a_binding_is_changed_only_from_the_one_that_is_named() {
        let head = head();
        let claim = |term, from: &Fence, held| {
            let request = ClaimRequest::new(name(), foreign(term), header(8));
            let request = request.with_rebind_from(Binding::of(from));
            TableState::from(&head).refuse_claim(&request, held)
        };
        assert_eq!(claim(1, &fence(1), true), None, "terms of two leases are counted apart");
        assert_eq!(claim(1, &fence(1), false), Some(Claim::Fenced(fence(7))));
        assert!(matches!(claim(9, &foreign(1), true), Some(Claim::OtherLease(_))));
    }

    #[test]
    fn a_publish_is_fenced_settled_or_written() {
        let table = head().into_table(None).expect("version 0");
        let mut edit = table.map.edit();
        edit.set_annex(bytes::Bytes::from_static(b"news")).expect("short");
        let map = edit.finish(fence(8)).expect("changed");
        let settle = |fence: &Fence, expected, map: &ShardMap, held, stored| {
            let expected = Version::new(expected);
            let state = TableState::from(&table);
            state.settle_publish(&name(), fence, expected, map, held, || stored)
        };
        let write =
            |fence: &Fence, held, stored| settle(fence, 0, &map, held, stored).expect("fits");
        assert_eq!(write(&fence(8), true, false), None);
        assert_eq!(write(&fence(7), true, false), None);
        let fenced = Some(Publish::Fenced(Some(fence(7))));
        for stored in [false, true] {
            assert_eq!(write(&fence(6), true, stored), fenced);
            assert_eq!(write(&foreign(9), true, stored), fenced);
            assert_eq!(write(&fence(8), false, stored), fenced);
        }
        let published = Some(Publish::Published(Version::new(1)));
        assert_eq!(write(&fence(8), true, true), published);
        let again = settle(&fence(8), 5, &map, true, true).expect("fits");
        assert_eq!(again, published, "a retry is told by what is stored");
        let conflict = Some(Publish::Conflict { uid: table.map.uid(), version: Version::ZERO });
        assert_eq!(settle(&fence(8), 5, &map, true, false).expect("fits"), conflict);
        let other = ShardMap::empty(header(8), TableUid::from_u128(1));
        assert_eq!(settle(&fence(8), 0, &other, true, false).expect("fits"), conflict);
        let wide = ShardMap::empty(header(9), map.uid());
        let error = settle(&fence(8), 0, &wide, true, false).expect_err("another header");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("header"), "{error}");
    }

    #[test]
    fn a_map_follows_the_expected_one_and_names_its_writer() {
        let mut edit = ShardMap::empty(header(8), TableUid::from_u128(1)).edit();
        edit.set_annex(bytes::Bytes::from_static(b"news")).expect("short");
        let map = edit.finish(fence(8)).expect("changed");
        let check = |fence: &Fence, expected| {
            check_map(&name(), fence, Version::new(expected), &map).map_err(|e| e.to_string())
        };
        assert_eq!(check(&fence(8), 0), Ok(()));
        assert!(check(&fence(8), 1).expect_err("not the next").contains("does not follow 1"));
        assert!(check(&fence(7), 0).expect_err("another writer").contains("fence of term 7"));
    }
}
