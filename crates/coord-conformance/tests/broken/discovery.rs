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
        if self.plant == Plant::RepeatExtendsNothing
            && let Some(record) = self.record(&node.id).await?
            && record.info.incarnation == node.incarnation
        {
            let (id, run, revision) = (node.id.clone(), node.incarnation, record.revision);
            return Ok(Register::Registered(Registration::new(id, run, record.ttl, revision)));
        }
        let unasked = self.plant == Plant::ReplacesUnasked;
        let replace = if unasked { Replace::Yes } else { replace };
        self.inner.register(node, ttl, replace).await
    }

    async fn heartbeat(&self, held: &Registration, node: &NodeInfo) -> Result<Heartbeat> {
        if self.plant == Plant::HeartbeatWritesAnything
            && (&held.node, held.incarnation) != (&node.id, node.incarnation)
            && let Register::Registered(held) =
                self.inner.register(node, held.ttl, Replace::Yes).await?
        {
            return Ok(Heartbeat::Renewed(held));
        }
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
            Plant::FailureBeginsEmpty => events
                .map(|event| Ok(event.unwrap_or_else(|_| NodeEvent::Snapshot(Vec::new()))))
                .boxed(),
            Plant::OneDepartureALook | Plant::JoinHidesDepartures => {
                let plant = self.plant;
                events
                    .ready_chunks(100)
                    .flat_map(move |look| stream::iter(seen(plant, look)))
                    .boxed()
            }
            Plant::SnapshotsOnly => {
                let inner = Arc::clone(&self.inner);
                events
                    .then(move |event| {
                        let inner = Arc::clone(&inner);
                        async move {
                            event?;
                            inner.nodes().await.map(NodeEvent::Snapshot)
                        }
                    })
                    .boxed()
            }
            Plant::DeletionReadsAsFarewell | Plant::DeletionReadsAsJudged => {
                let plant = self.plant;
                events.map(move |event| event.map(|event| misread(plant, event))).boxed()
            }
            _ => events,
        }
    }
}

/// What is told of the events of one look.
fn seen(plant: Plant, look: Vec<Result<NodeEvent>>) -> Vec<Result<NodeEvent>> {
    let is_departure = |event: &Result<NodeEvent>| {
        matches!(event, Ok(NodeEvent::Left { .. } | NodeEvent::Expired { .. }))
    };
    let has_join = look.iter().any(|event| matches!(event, Ok(NodeEvent::Joined(_))));
    let mut departures = 0;
    let mut tells = |event: &Result<NodeEvent>| {
        departures += usize::from(is_departure(event));
        let hides = match plant {
            Plant::JoinHidesDepartures => has_join,
            _ => departures > 1,
        };
        !(is_departure(event) && hides)
    };
    look.into_iter().filter(|event| tells(event)).collect()
}

/// A deletion, taken for something else.
fn misread(plant: Plant, event: NodeEvent) -> NodeEvent {
    match event {
        NodeEvent::Expired { node, incarnation, judged: false } => match plant {
            Plant::DeletionReadsAsFarewell => NodeEvent::Left { node, incarnation },
            _ => NodeEvent::Expired { node, incarnation, judged: true },
        },
        other => other,
    }
}
