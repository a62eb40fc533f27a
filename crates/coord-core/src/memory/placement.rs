//! Tables and requests.

use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::{self, BoxStream};
use tokio::sync::{broadcast, watch};
use tokio::time::Instant;

use super::Handle;
use super::store::{Expiring, State, Store};
use super::watch::{Topic, subscribe, until_closed};
use crate::error::{Error, ErrorKind, Result};
use crate::fencing::{TableState, check_map};
use crate::placement::{Answered, Claim, Placement, PlacementEvent, Publish, RequestEvent};
use crate::types::{
    Answer, Binding, ClaimRequest, Fence, REQUEST_TIME_LIMIT_MAX, Request, RequestId,
    RequestRecord, ShardMap, StoredTable, TableName, TableUid, Version,
};

/// The most requests that may be within their time limit at once.
pub(super) const REQUESTS_MAX: usize = 10_000;

/// A request within its time limit.
pub(super) struct OpenRequest {
    record: RequestRecord,
    /// When it came, among all others.
    place: u64,
}

#[async_trait]
impl Placement for Handle {
    async fn claim(&self, request: &ClaimRequest) -> Result<Claim> {
        self.run("claim", |state, _| Ok(state.claim(request)))
    }

    async fn publish(
        &self,
        table: &TableName,
        fence: &Fence,
        expected: Version,
        map: &Arc<ShardMap>,
    ) -> Result<Publish> {
        check_map(table, fence, expected, map)?;
        self.run("publish", |state, _| state.publish(table, fence, expected, map))
    }

    async fn load(&self, table: &TableName) -> Result<Option<StoredTable>> {
        self.run("load", |state, _| Ok(state.tables.get(table).cloned()))
    }

    async fn tables(&self) -> Result<Vec<TableName>> {
        self.run("tables", |state, _| Ok(state.tables.keys().cloned().collect()))
    }

    fn watch(&self, table: &TableName) -> BoxStream<'static, Result<PlacementEvent>> {
        let subscription = TableSubscription {
            store: Arc::clone(&self.store),
            table: table.clone(),
            changes: self.store.lock(|state, _| state.table_changes.subscribe()),
            shown: None,
        };
        let events = stream::unfold(subscription, |mut subscription| async {
            Some((subscription.next().await?, subscription))
        });
        until_closed(self, events)
    }

    async fn request(&self, request: &Request) -> Result<RequestId> {
        self.run("request", |state, now| state.request(request, now))
    }

    async fn answer(&self, id: &RequestId, fence: &Fence, answer: &Answer) -> Result<Answered> {
        self.run("answer", |state, _| Ok(state.answer(*id, fence, answer)))
    }

    fn watch_requests(&self) -> BoxStream<'static, Result<RequestEvent>> {
        subscribe(self, RequestsTopic)
    }
}

impl State {
    fn claim(&mut self, request: &ClaimRequest) -> Claim {
        let fence = &request.fence;
        let is_held = self.admits_lease_of(fence);
        let Some(table) = self.tables.get_mut(&request.table) else {
            if !is_held {
                return Claim::Fenced(fence.clone());
            }
            let map = Arc::new(ShardMap::empty(request.header.clone(), TableUid::random()));
            let name = request.table.clone();
            let table = StoredTable::new(name.clone(), fence.clone(), Binding::of(fence), map);
            self.tables.insert(name, table.clone());
            self.table_changes.send_replace(());
            return Claim::Claimed(table);
        };
        if let Some(refusal) = TableState::from(&*table).refuse_claim(request, is_held) {
            return refusal;
        }
        table.binding = Binding::of(fence);
        table.fence = fence.clone();
        Claim::Claimed(table.clone())
    }

    fn publish(
        &mut self,
        name: &TableName,
        fence: &Fence,
        expected: Version,
        map: &Arc<ShardMap>,
    ) -> Result<Publish> {
        let is_held = self.admits_lease_of(fence);
        let Some(table) = self.tables.get_mut(name) else { return Ok(Publish::Fenced(None)) };
        // The map names its version and its writer, so an equal one is a retry of the same publish.
        let state = TableState::from(&*table);
        let settled =
            state.settle_publish(name, fence, expected, map, is_held, || table.map == *map)?;
        if let Some(publish) = settled {
            return Ok(publish);
        }
        table.fence = fence.clone();
        table.map = Arc::clone(map);
        self.table_changes.send_replace(());
        Ok(Publish::Published(map.version()))
    }

    pub(super) fn delete_table(&mut self, table: &TableName) -> bool {
        let was_there = self.tables.remove(table).is_some();
        self.table_changes.send_replace(());
        was_there
    }

    fn request(&mut self, request: &Request, now: Instant) -> Result<RequestId> {
        let id = request.id;
        if self.requests.contains_key(&id) {
            return Ok(id);
        }
        if self.requests.len() >= REQUESTS_MAX {
            let why = format!("{REQUESTS_MAX} requests are waiting already");
            let error = Error::new(ErrorKind::Unavailable, "request").effect_none();
            return Err(error.message(why).resource(id));
        }
        let expires = now + request.time_limit.min(REQUEST_TIME_LIMIT_MAX);
        let record = RequestRecord::new(request.clone(), None);
        let place = self.next_write();
        self.requests.insert(id, OpenRequest { record, place });
        self.set_expiry(Expiring::Request(id), None, Some(expires));
        // An error only says that there is no listener.
        let _ = self.request_events.send(RequestEvent::Submitted(request.clone()));
        Ok(id)
    }

    fn answer(&mut self, id: RequestId, fence: &Fence, answer: &Answer) -> Answered {
        let claimed = self.tables.get(&TableName::cluster()).map(|table| &table.fence);
        if claimed != Some(fence) {
            return Answered::Fenced(claimed.cloned());
        }
        let Some(open) = self.requests.get_mut(&id) else { return Answered::Gone };
        match &open.record.answer {
            Some(earlier) if earlier == answer => Answered::Recorded,
            Some(earlier) => Answered::Already(earlier.clone()),
            None => {
                open.record.answer = Some(answer.clone());
                let _ = self.request_events.send(RequestEvent::Answered(id, answer.clone()));
                Answered::Recorded
            }
        }
    }

    pub(super) fn delete_requests(&mut self) -> bool {
        let ids: Vec<_> = self.requests.keys().copied().collect();
        ids.iter().for_each(|id| self.expire_request(*id));
        !ids.is_empty()
    }

    pub(super) fn expire_request(&mut self, id: RequestId) {
        self.requests.remove(&id);
        let _ = self.request_events.send(RequestEvent::Gone(id));
    }
}

/// A watch of one table. It looks at the newest map whenever any table changed, so it keeps no
/// maps.
struct TableSubscription {
    store: Arc<Store>,
    table: TableName,
    changes: watch::Receiver<()>,
    /// What was yielded last; none before the first snapshot.
    shown: Option<Option<(TableUid, Version)>>,
}

impl TableSubscription {
    /// The next event; none if the store is gone, which it can't be while this holds it.
    async fn next(&mut self) -> Option<PlacementEvent> {
        loop {
            self.changes.mark_unchanged();
            let map = self
                .store
                .lock(|state, _| state.tables.get(&self.table).map(|table| Arc::clone(&table.map)));
            let current = map.as_ref().map(|map| (map.uid(), map.version()));
            if self.shown != Some(current) {
                let shown = self.shown.replace(current).flatten();
                return Some(match (shown, map) {
                    (Some((uid, _)), Some(map)) if uid == map.uid() => PlacementEvent::Changed(map),
                    (_, map) => PlacementEvent::Snapshot(map),
                });
            }
            self.changes.changed().await.ok()?;
        }
    }
}

struct RequestsTopic;

impl Topic for RequestsTopic {
    type Event = RequestEvent;

    fn receiver(&self, state: &mut State) -> broadcast::Receiver<RequestEvent> {
        state.request_events.subscribe()
    }

    /// In the order in which they came.
    fn snapshot(&self, state: &State, _: Instant) -> RequestEvent {
        let mut open: Vec<_> = state.requests.values().collect();
        open.sort_unstable_by_key(|open| open.place);
        RequestEvent::Snapshot(open.into_iter().map(|open| open.record.clone()).collect())
    }

    fn left(&self, _: &mut State) {}
}
