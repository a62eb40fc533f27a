//! How bytes get from one process to another and back. A transport knows addresses, and no shards.
//!
//! [`TcpTransport`] is the one for services; [`MemoryNetwork`] makes transports that reach each other inside
//! one process, for tests. What it takes to write another one is the trait, [`Transport`].

mod memory;
mod tcp;

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use coord_core::{Address, Result};

pub use self::memory::{MemoryNetwork, MemoryTransport};
pub use self::tcp::{TcpLimits, TcpTransport};

/// Requests to other processes, and theirs to this one.
#[async_trait]
pub trait Transport: Debug + Send + Sync + 'static {
    /// Gives every request that arrives from now on to this; called once, when the node starts. An
    /// answer is worked out to its end also where the connection it came by is gone.
    fn serve(&self, incoming: Arc<dyn Incoming>);

    /// Sends one request and waits for its answer. It is sent once: whether to ask again is for the
    /// caller to decide, which is why the error's effect has to be right.
    ///
    /// # Errors
    /// With [`Effect::None`](coord_core::Effect::None) only where the request certainly did not reach the
    /// other process's [`Incoming`] and never will; with `Effect::Unknown` else. `Unavailable` for what
    /// time may heal, `Invalid` for a request that is too large, `Misconfigured` or `Unsupported` for a
    /// process of another cluster or protocol, `Closed` after [`close`](Self::close).
    ///
    /// # Cancel safety
    /// The request may have been sent.
    async fn call(&self, to: &Address, request: Bytes) -> Result<Bytes>;

    /// Takes no more requests, lets those that were taken be answered, and ends. Whoever sent one that
    /// was not taken learns that with certainty, where the network still lets it.
    ///
    /// # Cancel safety
    /// It is closed, and answers may be lost.
    async fn close(&self);
}

/// Who answers the requests of other processes.
#[async_trait]
pub trait Incoming: Debug + Send + Sync + 'static {
    /// Answers one request.
    ///
    /// # Cancel safety
    /// Not to be dropped before it returns.
    async fn answer(&self, request: Bytes) -> Bytes;
}
