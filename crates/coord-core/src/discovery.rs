//! The `Discovery` trait: which nodes are alive.

use std::fmt::Debug;

use async_trait::async_trait;
use futures::stream::BoxStream;

use crate::error::Result;
use crate::types::{Incarnation, NodeId, NodeInfo, NodeRecord, Registration, Revision, Ttl};

/// Whether a registration may replace a live one of the same node.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Replace {
    /// A live registration of another process is a duplicate.
    #[default]
    No,
    /// It is replaced; the older incarnation learns that it is superseded.
    Yes,
}

/// What came of a registration.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub enum Register {
    /// The node is registered; the same incarnation, retried, gets the same answer.
    Registered(Registration),
    /// Another process is registered under this id.
    Duplicate(NodeRecord),
}

/// What came of a heartbeat.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub enum Heartbeat {
    /// The registration goes on for its TTL.
    Renewed(Registration),
    /// The registration is gone: expired, evicted or deleted.
    Gone,
    /// Another incarnation has taken the id.
    Superseded(NodeRecord),
}

/// What came of an eviction.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub enum Evict {
    /// The registration was removed.
    Evicted,
    /// It has been written since the revision that was shown, or is another incarnation's.
    Alive(NodeRecord),
    /// There is none.
    Gone,
}

/// A change among the nodes.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
pub enum NodeEvent {
    /// All nodes now; it replaces all that was seen before.
    Snapshot(Vec<NodeRecord>),
    /// A node registered: a new one, or another incarnation of one that was there.
    Joined(NodeRecord),
    /// A node changed what it says of itself. Plain renewals need not show.
    Updated(NodeRecord),
    /// A node deregistered or was evicted, and the store has a record of that. A missing record alone says
    /// neither: an operator or a garbage collector may have deleted it while the node lives. That is
    /// [`Expired`](Self::Expired).
    Left {
        /// Which node.
        node: NodeId,
        /// Which run of it.
        incarnation: Incarnation,
    },
    /// A node's registration is gone, and nothing says that the node ended it.
    Expired {
        /// Which node.
        node: NodeId,
        /// Which run of it.
        incarnation: Incarnation,
        /// Whether the clock that judges expiry ended the registration, so that its whole TTL has
        /// passed since its last answered heartbeat. False where the record is merely gone, and where
        /// the backend can't tell: its node may live, and may host until its own deadline.
        judged: bool,
    },
}

/// The nodes of a cluster over one store: small, single-attempt, atomic steps for a backend to
/// implement. The repository explains the contract in `docs/design.md#discovery`, and the steps to
/// implement it in `docs/backend-guide.md#6-discovery`.
///
/// # Cancel safety
/// Every method: a dropped future is an unknown effect, exactly like a timeout. All of them may be
/// repeated by the same incarnation.
#[async_trait]
pub trait Discovery: Debug + Send + Sync + 'static {
    /// Registers a node; the only call that creates a registration. While another incarnation lives
    /// under the id, it is a duplicate unless `replace` says otherwise. The same incarnation, retried,
    /// is registered as before, extended.
    ///
    /// # Errors
    /// `Unavailable` (effect unknown where the request was sent), `Denied`, `Invalid` (record too large
    /// for the store), `Corrupt`, `Closed`.
    ///
    /// # Cancel safety
    /// See the trait: the node may be registered.
    async fn register(&self, node: &NodeInfo, ttl: Ttl, replace: Replace) -> Result<Register>;

    /// Extends a registration by its TTL, and rewrites the record if `node` differs from what the store
    /// holds. Creates nothing: what is gone stays gone. Where observers judge expiry, every heartbeat
    /// changes the record's revision; elsewhere only a rewrite must. The TTL is that of the record, which
    /// is told.
    ///
    /// # Errors
    /// As `register`; and `Invalid`, before any I/O, if `node` is not the node and the incarnation of
    /// `held`: nothing is written then.
    ///
    /// # Cancel safety
    /// See the trait: the registration may have been extended.
    async fn heartbeat(&self, held: &Registration, node: &NodeInfo) -> Result<Heartbeat>;

    /// Ends a registration of one's own, and only that; harmless when it is gone already.
    ///
    /// # Errors
    /// As `register`.
    ///
    /// # Cancel safety
    /// See the trait: the registration may have been ended.
    async fn deregister(&self, held: &Registration) -> Result<()>;

    /// Removes another node's registration if it is still of this incarnation and was not written since the
    /// revision that was seen.
    ///
    /// # Errors
    /// As `register`.
    ///
    /// # Cancel safety
    /// See the trait: the registration may have been removed.
    async fn evict(
        &self,
        node: &NodeId,
        incarnation: Incarnation,
        seen: &Revision,
    ) -> Result<Evict>;

    /// All live registrations, ordered by id; linearizable where the store can. An empty answer means
    /// that there are none, which a failed look-up never says.
    ///
    /// # Errors
    /// `Unavailable`, `Denied`, `Corrupt`, `Closed`; never with an effect.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    async fn nodes(&self) -> Result<Vec<NodeRecord>>;

    /// One subscription: first a snapshot, also when it is empty, then changes. A snapshot may come again at
    /// any time, for a reader that lags or after a gap, and replaces all before it. A backend that shows
    /// departures by snapshots only reports no deregistration, and so keeps the shards of every leaving node
    /// waiting. Each node's departure is reported, however many go or come at one moment. Several updates of
    /// one node may be reported as one. It ends after the first error, also with `Closed` when the handle is
    /// closed while it is open; [`Watcher`](crate::watch::Watcher) subscribes again.
    ///
    /// Absence is no statement. Only a recorded deregistration or eviction is [`Left`](NodeEvent::Left); every
    /// other missing record is [`Expired`](NodeEvent::Expired), `judged` only where the clock that judges
    /// expiry ended the registration and the record was not deleted otherwise. A node that a snapshot, or
    /// [`nodes`](Self::nodes), lacks is merely gone.
    fn watch(&self) -> BoxStream<'static, Result<NodeEvent>>;
}
