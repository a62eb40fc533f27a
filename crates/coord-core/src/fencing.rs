//! What a claim and a publish come to, decided once for all backends.
//!
//! A backend reads what its store holds, asks here, and writes on condition that nothing of what it read
//! has changed. So the rules that keep an older leader from writing stand in one place, and a backend
//! brings only the atomic step.

use crate::error::{Error, Result};
use crate::placement::{Claim, Publish};
use crate::types::{
    Binding, ClaimRequest, Fence, ShardMap, Table, TableHeader, TableName, TableUid, Version,
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

impl<'a> From<&'a Table> for TableState<'a> {
    fn from(table: &'a Table) -> Self {
        let Table { fence, binding, map, .. } = table;
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
