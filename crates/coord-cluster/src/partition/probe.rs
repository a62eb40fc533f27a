//! Asking another node whether it is there.

use std::fmt::Debug;

use async_trait::async_trait;
use coord_core::{NodeEntry, Result};

/// Asks another node whether it is there: what a transport, or whatever else the members of a cluster
/// speak with each other, gives to downing. It should go the way that the nodes' own messages go, for
/// that is the way whose loss splits the cluster.
///
/// ```
/// # use async_trait::async_trait;
/// # use coord_cluster::Probe;
/// # use coord_core::{Error, NodeEntry, Result};
/// /// A peer is there when something listens at its address.
/// #[derive(Debug)]
/// struct Listens;
///
/// #[async_trait]
/// impl Probe for Listens {
///     async fn probe(&self, peer: &NodeEntry) -> Result<()> {
///         let connected = tokio::net::TcpStream::connect(peer.address.as_str()).await;
///         connected.map(drop).map_err(|e| Error::unavailable("probe", "refused").with_source(e))
///     }
/// }
/// ```
#[async_trait]
pub trait Probe: Debug + Send + Sync + 'static {
    /// Asks this node once, and returns when it has answered. Where the peer tells its incarnation, an
    /// answer of another run is an error.
    ///
    /// # Errors
    /// Whatever kept the answer from coming; all of them count as silence.
    ///
    /// # Cancel safety
    /// It is dropped when the answer takes longer than two intervals.
    async fn probe(&self, peer: &NodeEntry) -> Result<()>;
}
