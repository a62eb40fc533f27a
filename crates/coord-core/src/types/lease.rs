//! Leases: what is asked for, what is granted, what others see.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::id::{AttemptId, Incarnation};
use super::name::{LeaseName, NodeId};
use super::revision::Revision;
use super::term::{Fence, Origin, Term};
use super::ttl::Ttl;

/// The holder of a lease: a node, its incarnation, and the attempt that won. The attempt alone decides.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Holder {
    /// The node's name.
    pub node: NodeId,
    /// Which run of it.
    pub incarnation: Incarnation,
    /// The attempt that won.
    pub attempt: AttemptId,
}

impl Holder {
    /// A holder of its parts.
    #[must_use]
    pub fn new(node: NodeId, incarnation: Incarnation, attempt: AttemptId) -> Self {
        Self { node, incarnation, attempt }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.node.fmt(f)
    }
}

/// Whether an acquire may take over a live grant of the same node.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reclaim {
    /// A former grant is waited out like anybody's.
    #[default]
    No,
    /// The caller states that the former process of this node is dead; its grant is taken over at once,
    /// with a greater term. Said without proof, it makes two holders.
    FormerProcessIsDead,
}

/// One try to acquire a lease.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcquireRequest {
    /// Which lease.
    pub lease: LeaseName,
    /// The node, and its attempt.
    pub holder: Holder,
    /// For how long.
    pub ttl: Ttl,
    /// Whether a grant of a former process of this node is taken over.
    pub reclaim: Reclaim,
}

impl AcquireRequest {
    /// A request that takes nothing over.
    #[must_use]
    pub fn new(lease: LeaseName, holder: Holder, ttl: Ttl) -> Self {
        Self { lease, holder, ttl, reclaim: Reclaim::No }
    }

    /// With this choice about a former grant.
    #[must_use]
    pub fn with_reclaim(mut self, reclaim: Reclaim) -> Self {
        self.reclaim = reclaim;
        self
    }
}

/// One tenure of a lease, as the store granted it.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Which lease.
    pub lease: LeaseName,
    /// Whose it is.
    pub holder: Holder,
    /// The term, constant for the whole tenure.
    pub term: Term,
    /// For how long, as granted: what counts, whatever was asked for.
    pub ttl: Ttl,
    /// Where the lease lives.
    pub origin: Origin,
    /// The store's mark of the last write.
    pub revision: Revision,
}

impl Grant {
    /// A grant of its parts, for backends.
    #[must_use]
    pub fn new(
        lease: LeaseName,
        holder: Holder,
        term: Term,
        ttl: Ttl,
        origin: Origin,
        revision: Revision,
    ) -> Self {
        Self { lease, holder, term, ttl, origin, revision }
    }

    /// What the holder shows to whatever is being protected.
    #[must_use]
    pub fn fence(&self) -> Fence {
        Fence::new(self.lease.clone(), self.term, self.holder.attempt, self.origin.clone())
    }
}

/// A lease as others see it: an observation, never a permission.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRecord {
    /// Which lease.
    pub lease: LeaseName,
    /// The holder.
    pub holder: Holder,
    /// Under which term.
    pub term: Term,
    /// For how long each renewal lasts.
    pub ttl: Ttl,
    /// Where the lease lives.
    pub origin: Origin,
    /// The store's mark of the last write.
    pub revision: Revision,
    /// How long it has still to live if it is not renewed, where that is known.
    pub may_expire_in: Option<Duration>,
    /// How long ago it was renewed, where its holder or the store tells. For people: it goes by wall
    /// clocks, maybe by those of two machines, so that nothing may be judged by it.
    pub renewed_ago: Option<Duration>,
}

impl LeaseRecord {
    /// The record of a grant, seen from outside.
    #[must_use]
    pub fn new(grant: Grant) -> Self {
        let Grant { lease, holder, term, ttl, origin, revision } = grant;
        let (may_expire_in, renewed_ago) = (None, None);
        Self { lease, holder, term, ttl, origin, revision, may_expire_in, renewed_ago }
    }

    /// With the time it has still to live.
    #[must_use]
    pub fn with_may_expire_in(mut self, remaining: Option<Duration>) -> Self {
        self.may_expire_in = remaining;
        self
    }

    /// With how long ago it was renewed, as far as is told.
    #[must_use]
    pub fn with_renewed_ago(mut self, ago: Option<Duration>) -> Self {
        self.renewed_ago = ago;
        self
    }

    /// Whether its holder seems to be gone: no renewal is known within the TTL. Where only observers end a
    /// lease, such a record stays until another node takes the lease over.
    #[must_use]
    pub fn seems_abandoned(&self) -> bool {
        self.renewed_ago.is_some_and(|ago| ago > self.ttl.get())
    }

    /// The grant that this record shows, for an operator who ends another node's tenure on purpose.
    #[must_use]
    pub fn into_grant(self) -> Grant {
        Grant::new(self.lease, self.holder, self.term, self.ttl, self.origin, self.revision)
    }

    /// The fence of the grant that this record shows.
    #[must_use]
    pub fn fence(&self) -> Fence {
        Fence::new(self.lease.clone(), self.term, self.holder.attempt, self.origin.clone())
    }
}
