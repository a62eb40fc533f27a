//! Discovery, broken.

use std::sync::Arc;

use async_trait::async_trait;
use coord_core::{
    Discovery, Evict, Heartbeat, Incarnation, NodeEvent, NodeId, NodeInfo, NodeRecord, Register,
    Registration, Replace, Result, Revision, Ttl,
};
use futures::future;
use futures::stream::{self, BoxStream, StreamExt};

use crate::fixture::Part;
use crate::plant::Plant;

impl Part<dyn Discovery> {
    async fn record(&self, node: &NodeId) -> Result<Option<NodeRecord>> {
        let nodes = self.inner.nodes().await?;
        Ok(nodes.into_iter().find(|record| record.info.id == *node))
    }
}

#[async_trait]
impl Discovery for Part<dyn Discovery> {
    async fn register(&self, node: &NodeInfo, ttl: Ttl, replace: Replace) -> Result<Register> {
        let unasked = self.plant == Plant::ReplacesUnasked;
        let replace = if unasked { Replace::Yes } else { replace };
        self.inner.register(node, ttl, replace).await
    }

    async fn heartbeat(&self, held: &Registration, node: &NodeInfo) -> Result<Heartbeat> {
        let outcome = self.inner.heartbeat(held, node).await?;
        let again = match (self.plant, &outcome) {
            (Plant::HeartbeatRecreates, Heartbeat::Gone) => {
                self.inner.register(node, held.ttl, Replace::No).await?
            }
            (Plant::HeartbeatByNameOnly, Heartbeat::Superseded(record)) => {
                self.inner.register(&record.info, held.ttl, Replace::No).await?
            }
            _ => return Ok(outcome),
        };
        match again {
            Register::Registered(held) => Ok(Heartbeat::Renewed(held)),
            _ => Ok(outcome),
        }
    }

    async fn deregister(&self, held: &Registration) -> Result<()> {
        if self.plant == Plant::DeregistersSuccessor
            && let Some(record) = self.record(&held.node).await?
        {
            let (run, seen) = (record.info.incarnation, &record.revision);
            return self.inner.evict(&held.node, run, seen).await.map(|_| ());
        }
        self.inner.deregister(held).await
    }

    async fn evict(
        &self,
        node: &NodeId,
        incarnation: Incarnation,
        seen: &Revision,
    ) -> Result<Evict> {
        let Some(record) = self.record(node).await? else { return Ok(Evict::Gone) };
        let (mut incarnation, mut seen) = (incarnation, seen);
        match self.plant {
            Plant::EvictIgnoresRevision => seen = &record.revision,
            Plant::EvictIgnoresIncarnation => incarnation = record.info.incarnation,
            _ => {}
        }
        self.inner.evict(node, incarnation, seen).await
    }

    async fn nodes(&self) -> Result<Vec<NodeRecord>> {
        match self.inner.nodes().await {
            Err(_) if self.plant == Plant::FailureReadsAsEmpty => Ok(Vec::new()),
            other => other,
        }
    }

    fn watch(&self) -> BoxStream<'static, Result<NodeEvent>> {
        let events = self.inner.watch();
        match self.plant {
            Plant::WatchForgetsDeparture => events
                .filter(|event| future::ready(!matches!(event, Ok(NodeEvent::Left { .. }))))
                .boxed(),
            Plant::NodeEndsWithoutEvent => events
                .filter(|event| future::ready(!matches!(event, Ok(NodeEvent::Expired { .. }))))
                .boxed(),
            Plant::CutWatchGoesOn => {
                let inner = Arc::clone(&self.inner);
                let next = stream::once(async move { inner.watch().skip(1) }).flatten();
                events.take_while(|event| future::ready(event.is_ok())).chain(next).boxed()
            }
            _ => events,
        }
    }
}
