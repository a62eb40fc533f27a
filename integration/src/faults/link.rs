//! The conformance suite's faults, on a real server.

use async_trait::async_trait;
use coord_conformance::faults::{Fault, Faults};
use coord_core::{Error, ErrorKind, Result};

use super::proxy::{Direction, Proxy, Request};
use crate::servers::Server;

/// The way of one handle to its server: a proxy of its own. All faults strike between the backend and the
/// store. None sends a request twice, for no network does: what the trials repeat, they ask for twice.
#[derive(Debug)]
pub struct Link {
    proxy: Proxy,
    /// None where requests can't be seen.
    request: Option<Request>,
    /// What only replies hold; nothing where whatever the server says next is one.
    reply: Vec<u8>,
    restarts: Option<Server>,
}

impl Link {
    /// A way through this proxy.
    #[must_use]
    pub fn new(proxy: Proxy) -> Self {
        Self { proxy, request: Some(Request::Any), reply: Vec::new(), restarts: None }
    }

    /// Which request `DropReply` means. A client that keeps its connection alive, or has a watch on it,
    /// sends other things too, and an operation that writes may read first: name a part that only writes
    /// have.
    #[must_use]
    pub fn with_request(mut self, request: Request) -> Self {
        self.request = Some(request);
        self
    }

    /// What only replies to such requests hold, where the server says other things as well.
    #[must_use]
    pub fn with_reply(mut self, reply: impl Into<Vec<u8>>) -> Self {
        self.reply = reply.into();
        self
    }

    /// Without `DropReply`: requests can't be seen here, so that none can be told from what comes before
    /// it.
    #[must_use]
    pub fn without_sight(mut self) -> Self {
        self.request = None;
        self
    }

    /// With `Restart` of all processes of this server. Whoever else uses it at that time suffers too.
    #[must_use]
    pub fn with_restart(mut self, server: Server) -> Self {
        self.restarts = Some(server);
        self
    }

    /// The proxy.
    #[must_use]
    pub fn proxy(&self) -> &Proxy {
        &self.proxy
    }
}

#[async_trait]
impl Faults for Link {
    fn supports(&self, fault: Fault) -> bool {
        match fault {
            Fault::Cut | Fault::Pause | Fault::Delay(_) | Fault::CutWatches => true,
            Fault::DropReply => self.request.is_some(),
            Fault::Restart => {
                self.restarts.as_ref().is_some_and(|server| !server.nodes().is_empty())
            }
            _ => false,
        }
    }

    async fn inject(&self, fault: Fault) -> Result<()> {
        match (fault, &self.request) {
            (Fault::Cut, _) => self.proxy.cut(),
            (Fault::Pause, _) => self.proxy.hold(Direction::Both),
            (Fault::Delay(delay), _) => self.proxy.delay(Direction::ToClient, delay),
            (Fault::DropReply, Some(request)) => {
                self.proxy.lose_reply_with(request.clone(), self.reply.clone());
            }
            (Fault::CutWatches, _) => self.proxy.reset(),
            (Fault::Restart, _) if self.supports(fault) => {
                return restart(self.restarts.clone()).await;
            }
            _ => {
                let error = Error::new(ErrorKind::Unsupported, "inject");
                return Err(error.message(format!("{fault:?} can't be made here")));
            }
        }
        Ok(())
    }

    async fn heal(&self) -> Result<()> {
        self.proxy.heal();
        Ok(())
    }
}

/// Kills all processes before the first is started again: the whole store was away.
async fn restart(server: Option<Server>) -> Result<()> {
    let restarted = tokio::task::spawn_blocking(move || server.map_or(Ok(()), |s| s.restart()));
    let failed = |error| Error::new(ErrorKind::Internal, "inject").with_source(error);
    restarted.await.map_err(failed)?.map_err(|error| {
        Error::new(ErrorKind::Unavailable, "inject")
            .message("restart the server")
            .with_source(error)
    })
}
