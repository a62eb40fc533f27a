//! The service of the load: a member serves numbered requests to the shards that it hosts, each exactly
//! once, and writes what it has served to the [ledger](super::ledger).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use coord::ShardId;
use coord::cluster::{Host, HostError, ShardFence};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;

use super::host::Shards;
use super::ledger::{self, Ask, Lines, Told};

/// How long after a ledger that did not answer it is asked again.
const AGAIN: Duration = Duration::from_millis(20);

/// A client's request; a shard has one client, that counts.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) shard: ShardId,
    pub(crate) number: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// It is served, by now or before.
    Served,
    /// The shard is not here, or not any more.
    Elsewhere,
}

/// The shards that are served here.
#[derive(Debug)]
pub(crate) struct Service {
    shards: Arc<Shards>,
    ledger: String,
    open: Mutex<BTreeMap<ShardId, Arc<tokio::sync::Mutex<Open>>>>,
}

/// One shard's state.
#[derive(Debug)]
struct Open {
    fence: ShardFence,
    stopped: bool,
    ledger: Lines,
    end: usize,
    last: u64,
}

impl Service {
    pub(crate) fn new(shards: Arc<Shards>, ledger: SocketAddr) -> Self {
        Self { shards, ledger: ledger.to_string(), open: Mutex::default() }
    }

    /// Serves clients for as long as the process runs.
    pub(crate) async fn serve(self: Arc<Self>, listener: TcpListener) {
        ledger::serve(listener, move |request: Request| {
            let service = Arc::clone(&self);
            async move { service.take(request).await }
        })
        .await;
    }

    async fn take(&self, request: Request) -> Reply {
        let open = {
            let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            open.get(&request.shard).map(Arc::clone)
        };
        let Some(open) = open else { return Reply::Elsewhere };
        let mut open = open.lock().await;
        open.take(request.number).await.unwrap_or(Reply::Elsewhere)
    }
}

impl Open {
    async fn start(fence: ShardFence, ledger: &str) -> Option<Self> {
        let token = fence.token()?;
        let mut ledger = Lines::connect(ledger).await.ok()?;
        match ledger.ask(&(token, Ask::Open)).await.ok()? {
            Told::Ends { end, last } => Some(Self { fence, stopped: false, ledger, end, last }),
            _ => None,
        }
    }

    /// None where the ledger gives no clear answer; the client asks again.
    async fn take(&mut self, number: u64) -> Option<Reply> {
        if self.stopped {
            return None;
        }
        if number > self.last {
            let token = self.fence.token()?;
            let append = Ask::Append { end: self.end, number };
            match self.ledger.ask(&(token, append)).await.ok()? {
                Told::Ends { end, last } => (self.end, self.last) = (end, last),
                // Another host has served meanwhile, where the mode allows two.
                Told::Conflict => {
                    let token = self.fence.token()?;
                    if let Told::Ends { end, last } =
                        self.ledger.ask(&(token, Ask::Open)).await.ok()?
                    {
                        (self.end, self.last) = (end, last);
                    }
                    return None;
                }
                Told::Stale => return None,
            }
        }
        Some(Reply::Served)
    }
}

#[async_trait]
impl Host for Service {
    async fn start(&self, shard: ShardId, fence: ShardFence) -> Result<(), HostError> {
        self.shards.start(shard, fence.clone()).await?;
        while fence.is_current() {
            if let Some(open) = Open::start(fence.clone(), &self.ledger).await {
                let open = Arc::new(tokio::sync::Mutex::new(open));
                self.open.lock().unwrap_or_else(PoisonError::into_inner).insert(shard, open);
                break;
            }
            tokio::time::sleep(AGAIN).await;
        }
        Ok(())
    }

    async fn stop(&self, shard: ShardId) {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner).remove(&shard);
        if let Some(open) = open {
            // After what is being served has come to its end.
            open.lock().await.stopped = true;
        }
        self.shards.stop(shard).await;
    }
}
