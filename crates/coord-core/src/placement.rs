//! The `Placement` trait: the owner of each shard, written by the leader only.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::BoxStream;

use crate::error::Result;
use crate::types::{
    Answer, Binding, ClaimRequest, Fence, Request, RequestId, RequestRecord, ShardMap, StoredTable,
    TableHeader, TableName, TableUid, Version,
};

/// What came of a claim.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Claim {
    /// The table is this fence's: every older writer is fenced from now on.
    Claimed(StoredTable),
    /// A higher fence, or an equal term of another attempt, was there before.
    Fenced(Fence),
    /// The table exists with another header.
    Mismatch(TableHeader),
    /// The table obeys another lease; an operator can bind it anew.
    OtherLease(Binding),
}

/// What came of a publish.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Publish {
    /// The map is the table's newest, at this version.
    Published(Version),
    /// The table is at another version, or is another life of it.
    Conflict {
        /// Which life of the table is stored.
        uid: TableUid,
        /// At which version it is.
        version: Version,
    },
    /// A higher fence, an equal term of another attempt, or another lease's was there before; none if
    /// the table does not exist.
    Fenced(Option<Fence>),
}

/// What came of an answer.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Answered {
    /// It is recorded; the same answer, repeated, is recorded as before.
    Recorded,
    /// The request has another answer already.
    Already(Answer),
    /// The fence is not the one that claimed the reserved table last, which is returned: it is lower, or
    /// greater and never claimed the table. None if no fence has claimed it.
    Fenced(Option<Fence>),
    /// There is no such request any more.
    Gone,
}

/// A change of one table.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlacementEvent {
    /// The newest map, or that there is no table; it replaces all that was seen before.
    Snapshot(Option<Arc<ShardMap>>),
    /// A newer map of the same life of the table.
    Changed(Arc<ShardMap>),
}

/// A change among the requests.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestEvent {
    /// All requests within their time limit; it replaces all that was seen before.
    Snapshot(Vec<RequestRecord>),
    /// A request was submitted.
    Submitted(Request),
    /// A request was answered.
    Answered(RequestId, Answer),
    /// A request is gone: its time limit passed, answered or not.
    Gone(RequestId),
}

/// The shard maps of a cluster over one store: small, single-attempt, atomic steps for a backend to
/// implement.
///
/// **Fencing.** The store keeps, for each table, the highest fence that claimed it or wrote to it. A
/// write with a lower term, or an equal term and another attempt, is refused in the same atomic step.
///
/// The repository explains the contract in `docs/design.md#placement`, and the steps to implement it
/// in `docs/backend-guide.md#7-placement`.
///
/// # Cancel safety
/// Every method: a dropped future is an unknown effect, exactly like a timeout. The same call, repeated,
/// is recognised as the same.
#[async_trait]
pub trait Placement: Debug + Send + Sync + 'static {
    /// Claims a table for a fence; the only call that creates one (version 0, a random uid, the header,
    /// bound to the fence's lease). A claim raises the stored fence and not the version. What it returns
    /// was read after the claim took effect, so no older writer can change it any more.
    ///
    /// Where the fence is of this very store and its lease is not held by it any more, the claim is
    /// [`Fenced`](Claim::Fenced), with the table's fence; for a table that does not exist, with the claim's
    /// own.
    ///
    /// # Errors
    /// `Unavailable` (effect unknown where the request was sent), `Denied`, `Corrupt`, `Closed`.
    ///
    /// # Cancel safety
    /// See the trait: the table may be claimed.
    async fn claim(&self, request: &ClaimRequest) -> Result<Claim>;

    /// Replaces the map if the table is at `expected` and the fence passes. The map is at the version
    /// after `expected`, of the stored uid, and names `fence` as its writer. A retry after a lost reply
    /// is recognised by version, fence and content and answered as the success that it was.
    ///
    /// # Errors
    /// As `claim`, and `Invalid` for a map whose version or writer does not fit the call.
    ///
    /// # Cancel safety
    /// See the trait: the map may be published.
    async fn publish(
        &self,
        table: &TableName,
        fence: &Fence,
        expected: Version,
        map: &Arc<ShardMap>,
    ) -> Result<Publish>;

    /// The table with its newest map, whole; `None` if it does not exist.
    ///
    /// # Errors
    /// `Unavailable`, `Denied`, `Corrupt`, `Closed`; never with an effect.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    async fn load(&self, table: &TableName) -> Result<Option<StoredTable>>;

    /// The names of all tables, in order; the reserved one among them.
    ///
    /// # Errors
    /// As `load`.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    async fn tables(&self) -> Result<Vec<TableName>>;

    /// One subscription: first a snapshot, also when there is no table, then newer maps. A slow reader
    /// may miss versions, and never sees one go back within one uid; another uid comes as a snapshot. A
    /// snapshot may come again at any time. It ends after the first error, also with `Closed` when the handle
    /// is closed while it is open; [`Watcher`](crate::watch::Watcher) subscribes again.
    fn watch(&self, table: &TableName) -> BoxStream<'static, Result<PlacementEvent>>;

    /// Submits a command for the leader. Submitting the same id again is the same request, with the limit of
    /// the first submission. The store forgets it once that has passed, with its answer.
    ///
    /// Its body has at most [`REQUEST_BYTES_MAX`](crate::REQUEST_BYTES_MAX) bytes. A store takes 10,000
    /// requests within their limits at once, or more; one more is `Unavailable`, without effect.
    ///
    /// # Errors
    /// As `claim`.
    ///
    /// # Cancel safety
    /// See the trait: the request may be submitted.
    async fn request(&self, request: &Request) -> Result<RequestId>;

    /// Answers a request, under the very fence that claimed the reserved table `_cluster` last.
    ///
    /// # Errors
    /// As `claim`.
    ///
    /// # Cancel safety
    /// See the trait: the answer may be recorded.
    async fn answer(&self, id: &RequestId, fence: &Fence, answer: &Answer) -> Result<Answered>;

    /// One subscription: first a snapshot, then changes. What is told of one request comes in its order:
    /// submitted, answered, gone; between two requests nothing is said of the order. A snapshot may come
    /// again at any time. It ends after the first error, also with `Closed` when the handle is closed while
    /// it is open; [`Watcher`](crate::watch::Watcher) subscribes again.
    fn watch_requests(&self) -> BoxStream<'static, Result<RequestEvent>>;
}
