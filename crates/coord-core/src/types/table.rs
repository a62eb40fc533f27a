//! Tables as the store holds them, and requests to the leader.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::id::RequestId;
use super::name::{LeaseName, NodeId, TableName};
use super::shard::{ShardMap, TableHeader};
use super::term::{Fence, Origin};
use crate::error::{Error, Result};

/// The most bytes of one request's or answer's body.
pub const REQUEST_BYTES_MAX: usize = 64 * 1024;
/// The longest time limit of a request.
pub const REQUEST_TIME_LIMIT_MAX: Duration = Duration::from_secs(60 * 60);

/// Which lease a table obeys: set when the table is created, changed only by an operator.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Binding {
    /// The lease.
    pub lease: LeaseName,
    /// Where it lives.
    pub origin: Origin,
}

impl Binding {
    /// The binding to the lease of this fence.
    #[must_use]
    pub fn of(fence: &Fence) -> Self {
        Self { lease: fence.lease.clone(), origin: fence.origin.clone() }
    }

    /// Whether the fence comes from this lease.
    #[must_use]
    pub fn admits(&self, fence: &Fence) -> bool {
        self.lease == fence.lease && self.origin == fence.origin
    }
}

/// A new leader's claim of a table: from its success on, every older writer is fenced.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRequest {
    /// Which table.
    pub table: TableName,
    /// Under which fence.
    pub fence: Fence,
    /// What the table must agree on; the first claim creates it so.
    pub header: TableHeader,
    /// An operator's command: if the table is bound to this lease, bind it to the fence's instead.
    pub rebind_from: Option<Binding>,
}

impl ClaimRequest {
    /// A claim that changes no binding.
    #[must_use]
    pub fn new(table: TableName, fence: Fence, header: TableHeader) -> Self {
        Self { table, fence, header, rebind_from: None }
    }

    /// Binds the table anew if it is bound to `from`. Terms of two leases are counted apart, so the
    /// fence of the new lease replaces the old one's whatever their numbers.
    #[must_use]
    pub fn with_rebind_from(mut self, from: Binding) -> Self {
        self.rebind_from = Some(from);
        self
    }
}

/// A table as the store holds it.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTable {
    /// Its name.
    pub name: TableName,
    /// The highest fence that claimed it or wrote to it.
    pub fence: Fence,
    /// The lease it obeys.
    pub binding: Binding,
    /// The newest map; version 0 before anything was published.
    pub map: Arc<ShardMap>,
}

impl StoredTable {
    /// A table of its parts, for backends.
    #[must_use]
    pub fn new(name: TableName, fence: Fence, binding: Binding, map: Arc<ShardMap>) -> Self {
        Self { name, fence, binding, map }
    }
}

/// A command for the leader, with its own time limit.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Chosen by the sender: submitting it again is the same request.
    pub id: RequestId,
    /// The node that asks.
    pub from: NodeId,
    /// After which it counts as unanswered.
    pub time_limit: Duration,
    /// The command, as the runtime encodes it.
    pub body: Bytes,
}

impl Request {
    /// A request with a new id.
    ///
    /// # Errors
    /// `Invalid` for a body above 64 KiB, or a time limit of 0 or above one hour.
    pub fn new(from: NodeId, time_limit: Duration, body: impl Into<Bytes>) -> Result<Self> {
        let body = body.into();
        check_body("request", &body)?;
        if time_limit.is_zero() || time_limit > REQUEST_TIME_LIMIT_MAX {
            let why = format!("time limit {time_limit:?} is not above 0 and at most 1 h");
            return Err(Error::invalid("request", why));
        }
        Ok(Self { id: RequestId::random(), from, time_limit, body })
    }

    /// With this id instead of a random one.
    #[must_use]
    pub fn with_id(mut self, id: RequestId) -> Self {
        self.id = id;
        self
    }
}

/// The leader's answer to a request, as the runtime encodes it.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// What is answered.
    pub body: Bytes,
}

impl Answer {
    /// An answer.
    ///
    /// # Errors
    /// `Invalid` for a body above 64 KiB.
    pub fn new(body: impl Into<Bytes>) -> Result<Self> {
        let body = body.into();
        check_body("answer", &body)?;
        Ok(Self { body })
    }
}

fn check_body(what: &'static str, body: &Bytes) -> Result<()> {
    if body.len() > REQUEST_BYTES_MAX {
        let why = format!("body of {} bytes; at most {REQUEST_BYTES_MAX}", body.len());
        return Err(Error::invalid(what, why));
    }
    Ok(())
}

/// A request as the store holds it, with its answer once there is one.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestRecord {
    /// The request.
    pub request: Request,
    /// Its answer.
    pub answer: Option<Answer>,
}

impl RequestRecord {
    /// A record of its parts, for backends.
    #[must_use]
    pub fn new(request: Request, answer: Option<Answer>) -> Self {
        Self { request, answer }
    }
}
