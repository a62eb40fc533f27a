//! What a watch has shown so far, and waiting for more.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use coord_core::{
    Error, Incarnation, LeaseEvent, LeaseName, LeaseRecord, NodeEvent, NodeId, NodeRecord,
    PlacementEvent, RequestEvent, RequestId, RequestRecord, Result, ShardMap, TableName,
};
use futures::stream::{BoxStream, StreamExt};
use tokio::time::{Instant, timeout, timeout_at};

use crate::case::{Done, Stop, ensure};
use crate::cx::Client;

/// State that is built from the events of one subscription.
pub(crate) trait View: Default + Debug {
    type Event: Debug + Send + 'static;

    fn is_snapshot(event: &Self::Event) -> bool;

    /// Takes an event in, unless it breaks a rule.
    fn apply(&mut self, event: Self::Event) -> Done;
}

/// One subscription and what it has shown.
pub(crate) struct Watched<V: View> {
    stream: BoxStream<'static, Result<V::Event>>,
    pub(crate) view: V,
}

impl<V: View + Send> Watched<V> {
    /// Waits for the first event, which has to be a snapshot.
    pub(crate) async fn begin(
        stream: BoxStream<'static, Result<V::Event>>,
        limit: Duration,
    ) -> Done<Self> {
        let mut watched = Self { stream, view: V::default() };
        let first = watched.next(limit).await?;
        let Some(first) = first else {
            return Err(Stop::Failed(format!("the watch showed no snapshot within {limit:?}")));
        };
        ensure!(V::is_snapshot(&first), "the watch began with {first:?}, not with a snapshot");
        watched.view.apply(first)?;
        Ok(watched)
    }

    /// Takes events in until the view is as wanted.
    pub(crate) async fn until(
        &mut self,
        what: &str,
        limit: Duration,
        wanted: impl Fn(&V) -> bool + Send,
    ) -> Done {
        let end = Instant::now() + limit;
        while !wanted(&self.view) {
            match timeout_at(end, self.stream.next()).await {
                Ok(Some(Ok(event))) => self.view.apply(event)?,
                Ok(Some(Err(error))) => return Err(error.into()),
                Ok(None) => {
                    return Err(Stop::Failed(format!("the watch ended without error; {what}")));
                }
                Err(_) => {
                    let view = &self.view;
                    return Err(Stop::Failed(format!(
                        "the watch did not show within {limit:?} that {what}; it shows {view:?}"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Takes in what comes within this time, and nothing need come.
    pub(crate) async fn drain(&mut self, time: Duration) -> Done {
        let end = Instant::now() + time;
        while let Some(event) = self.next(end.saturating_duration_since(Instant::now())).await? {
            self.view.apply(event)?;
        }
        Ok(())
    }

    /// Waits for the error, after which the subscription has to end.
    pub(crate) async fn error(&mut self, limit: Duration) -> Done<Error> {
        let end = Instant::now() + limit;
        loop {
            match timeout_at(end, self.stream.next()).await {
                Ok(Some(Ok(event))) => self.view.apply(event)?,
                Ok(Some(Err(error))) => {
                    let after = timeout(limit, self.stream.next()).await;
                    ensure!(
                        matches!(after, Ok(None)),
                        "the watch went on after an error: {after:?}"
                    );
                    return Ok(error);
                }
                Ok(None) => return Err(Stop::Failed("the watch ended without an error".into())),
                Err(_) => {
                    return Err(Stop::Failed(format!("the watch showed no error in {limit:?}")));
                }
            }
        }
    }

    async fn next(&mut self, limit: Duration) -> Done<Option<V::Event>> {
        match timeout(limit, self.stream.next()).await {
            Ok(Some(event)) => Ok(Some(event?)),
            Ok(None) => Err(Stop::Failed("the watch ended without an error".into())),
            Err(_) => Ok(None),
        }
    }
}

/// One lease.
#[derive(Debug, Default)]
pub(crate) struct LeaseView {
    pub(crate) now: Option<LeaseRecord>,
    /// How often the lease was seen to become vacant.
    pub(crate) vacancies: usize,
}

impl View for LeaseView {
    type Event = LeaseEvent;

    fn is_snapshot(event: &LeaseEvent) -> bool {
        matches!(event, LeaseEvent::Snapshot(_))
    }

    fn apply(&mut self, event: LeaseEvent) -> Done {
        let next = match event {
            LeaseEvent::Snapshot(record) => record,
            LeaseEvent::Changed(record) => Some(record),
            _ => None,
        };
        if let (Some(old), Some(new)) = (&self.now, &next) {
            ensure!(new.term >= old.term, "the watch went from term {} to {}", old.term, new.term);
        }
        self.vacancies += usize::from(self.now.is_some() && next.is_none());
        self.now = next;
        Ok(())
    }
}

impl Watched<LeaseView> {
    pub(crate) async fn lease(client: &Client, name: &LeaseName, limit: Duration) -> Done<Self> {
        Self::begin(client.lease.watch(name), limit).await
    }
}

/// How a node was seen to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Departure {
    Left,
    /// By the clock that judges expiry.
    Expired,
    /// The record was gone, and nothing said why.
    Gone,
    /// It was not in a later snapshot.
    Missing,
}

/// All nodes.
#[derive(Debug, Default)]
pub(crate) struct NodesView {
    pub(crate) nodes: BTreeMap<NodeId, NodeRecord>,
    pub(crate) gone: Vec<(NodeId, Incarnation, Departure)>,
}

impl NodesView {
    pub(crate) fn has(&self, node: &NodeId, incarnation: Incarnation) -> bool {
        self.nodes.get(node).is_some_and(|record| record.info.incarnation == incarnation)
    }

    fn remove(&mut self, node: NodeId, incarnation: Incarnation, how: Departure) {
        if self.has(&node, incarnation) {
            self.nodes.remove(&node);
            self.gone.push((node, incarnation, how));
        }
    }
}

impl View for NodesView {
    type Event = NodeEvent;

    fn is_snapshot(event: &NodeEvent) -> bool {
        matches!(event, NodeEvent::Snapshot(_))
    }

    fn apply(&mut self, event: NodeEvent) -> Done {
        match event {
            NodeEvent::Snapshot(records) => {
                let next: BTreeMap<NodeId, NodeRecord> =
                    records.into_iter().map(|record| (record.info.id.clone(), record)).collect();
                for (id, old) in std::mem::replace(&mut self.nodes, next) {
                    if !self.nodes.contains_key(&id) {
                        self.gone.push((id, old.info.incarnation, Departure::Missing));
                    }
                }
            }
            NodeEvent::Joined(record) | NodeEvent::Updated(record) => {
                self.nodes.insert(record.info.id.clone(), record);
            }
            NodeEvent::Left { node, incarnation } => {
                self.remove(node, incarnation, Departure::Left);
            }
            NodeEvent::Expired { node, incarnation, judged } => {
                let how = if judged { Departure::Expired } else { Departure::Gone };
                self.remove(node, incarnation, how);
            }
            other => return Err(Stop::Failed(format!("this suite does not know {other:?}"))),
        }
        Ok(())
    }
}

impl Watched<NodesView> {
    pub(crate) async fn nodes(client: &Client, limit: Duration) -> Done<Self> {
        Self::begin(client.discovery.watch(), limit).await
    }
}

/// One table.
#[derive(Debug, Default)]
pub(crate) struct TableView {
    pub(crate) map: Option<Arc<ShardMap>>,
}

impl View for TableView {
    type Event = PlacementEvent;

    fn is_snapshot(event: &PlacementEvent) -> bool {
        matches!(event, PlacementEvent::Snapshot(_))
    }

    fn apply(&mut self, event: PlacementEvent) -> Done {
        let as_snapshot = Self::is_snapshot(&event);
        let next = match event {
            PlacementEvent::Snapshot(map) => map,
            PlacementEvent::Changed(map) => Some(map),
            other => return Err(Stop::Failed(format!("this suite does not know {other:?}"))),
        };
        if let (Some(old), Some(new)) = (&self.map, &next) {
            if old.uid() == new.uid() {
                let (from, to) = (old.version(), new.version());
                ensure!(to >= from, "the watch went back from version {from} to {to}");
            } else {
                ensure!(as_snapshot, "another uid came as a change, not as a snapshot");
            }
        } else {
            ensure!(as_snapshot || self.map.is_some(), "a change came where there was no table");
        }
        self.map = next;
        Ok(())
    }
}

impl Watched<TableView> {
    pub(crate) async fn table(client: &Client, name: &TableName, limit: Duration) -> Done<Self> {
        Self::begin(client.placement.watch(name), limit).await
    }
}

/// All requests.
#[derive(Debug, Default)]
pub(crate) struct RequestsView {
    pub(crate) requests: BTreeMap<RequestId, RequestRecord>,
}

impl View for RequestsView {
    type Event = RequestEvent;

    fn is_snapshot(event: &RequestEvent) -> bool {
        matches!(event, RequestEvent::Snapshot(_))
    }

    fn apply(&mut self, event: RequestEvent) -> Done {
        match event {
            RequestEvent::Snapshot(records) => {
                self.requests =
                    records.into_iter().map(|record| (record.request.id, record)).collect();
            }
            RequestEvent::Submitted(request) => {
                ensure!(
                    !self.requests.contains_key(&request.id),
                    "request {} was submitted twice",
                    request.id
                );
                self.requests.insert(request.id, RequestRecord::new(request, None));
            }
            RequestEvent::Answered(id, answer) => {
                let Some(record) = self.requests.get_mut(&id) else {
                    return Err(Stop::Failed(format!(
                        "request {id} was answered, never submitted"
                    )));
                };
                record.answer = Some(answer);
            }
            RequestEvent::Gone(id) => {
                self.requests.remove(&id);
            }
            other => return Err(Stop::Failed(format!("this suite does not know {other:?}"))),
        }
        Ok(())
    }
}

impl Watched<RequestsView> {
    pub(crate) async fn requests(client: &Client, limit: Duration) -> Done<Self> {
        Self::begin(client.placement.watch_requests(), limit).await
    }
}
