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
    /// A node deregistered or was evicted.
    Left {
        /// Which node.
        node: NodeId,
        /// Which run of it.
        incarnation: Incarnation,
    },
    /// A node's registration ran out.
    Expired {
        /// Which node.
        node: NodeId,
        /// Which run of it.
        incarnation: Incarnation,
    },
}

/// The nodes of a cluster over one store: small, single-attempt, atomic steps for a backend to
/// implement.
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
    /// changes the record's revision; elsewhere only a rewrite must.
    ///
    /// # Errors
    /// As `register`.
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

    /// Removes another's registration if it is still this incarnation's and nobody has written it since
    /// the revision that was seen.
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

    /// One subscription: first a snapshot, also when it is empty, then changes. It ends after the first
    /// error; [`Watcher`](crate::watch::Watcher) subscribes again.
    fn watch(&self) -> BoxStream<'static, Result<NodeEvent>>;
}
