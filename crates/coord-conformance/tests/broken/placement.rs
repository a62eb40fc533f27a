//! Placement, broken.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_core::{
    Answer, Answered, Claim, ClaimRequest, Fence, Placement, PlacementEvent, Publish, Request,
    RequestEvent, RequestId, Result, ShardMap, StoredTable, TableName, Version,
};
use futures::future;
use futures::stream::{self, BoxStream, StreamExt};

use crate::fixture::Part;
use crate::plant::Plant;

/// The same content as a version after `base`, by another writer.
fn rewritten(map: &ShardMap, base: &ShardMap, writer: &Fence) -> Result<Option<Arc<ShardMap>>> {
    let mut edit = base.edit();
    for node in map.nodes().iter().flatten() {
        edit.put_node(node.clone())?;
    }
    edit.set_raw_owners(map.raw_owners().to_vec())?;
    Ok(edit.finish(writer.clone()).map(Arc::new))
}

impl Part<dyn Placement> {
    /// Publishes whatever the fence and version, by writing as the one who may.
    async fn force(&self, table: &TableName, map: &ShardMap) -> Result<Option<Publish>> {
        let Some(stored) = self.inner.load(table).await? else { return Ok(None) };
        let Some(map) = rewritten(map, &stored.map, &stored.fence)? else { return Ok(None) };
        let expected = stored.map.version();
        self.inner.publish(table, &stored.fence, expected, &map).await.map(Some)
    }

    /// The table with the uid that it had in its first life.
    fn with_first_uid(&self, mut table: StoredTable) -> StoredTable {
        let uid = *self.memory().uids.entry(table.name.clone()).or_insert(table.map.uid());
        if uid != table.map.uid() && table.map.version() == Version::ZERO {
            table.map = Arc::new(ShardMap::empty(table.map.header().clone(), uid));
        }
        table
    }
}

#[async_trait]
impl Placement for Part<dyn Placement> {
    async fn claim(&self, request: &ClaimRequest) -> Result<Claim> {
        let before = self.inner.load(&request.table).await?;
        if matches!(self.plant, Plant::ClaimReadsFirst | Plant::ClaimNotAtomic) {
            tokio::task::yield_now().await;
        }
        let outcome = self.inner.claim(request).await?;
        let mut request = request.clone();
        match (self.plant, outcome) {
            (Plant::ClaimReadsFirst, Claim::Claimed(mut table)) => {
                if let Some(before) = before {
                    table.map = before.map;
                }
                Ok(Claim::Claimed(table))
            }
            (Plant::ClaimNotAtomic, Claim::Fenced(by)) => {
                let passed = before.as_ref().is_none_or(|it| request.fence.passes(&it.fence));
                match self.inner.load(&request.table).await? {
                    Some(table) if passed => Ok(Claim::Claimed(table)),
                    _ => Ok(Claim::Fenced(by)),
                }
            }
            (Plant::ClaimRaisesVersion, Claim::Claimed(mut table)) => {
                let mut edit = table.map.edit();
                edit.set_annex(Bytes::from(table.fence.term.to_string()))?;
                let expected = table.map.version();
                if let Some(map) = edit.finish(request.fence.clone()).map(Arc::new) {
                    let (name, fence) = (&request.table, &request.fence);
                    let _ = self.inner.publish(name, fence, expected, &map).await?;
                    table.map = map;
                }
                Ok(Claim::Claimed(table))
            }
            (Plant::ClaimIgnoresHeader, Claim::Mismatch(header)) => {
                request.header = header;
                self.inner.claim(&request).await
            }
            (Plant::ClaimIgnoresLease, Claim::OtherLease(binding)) => {
                self.inner.claim(&request.with_rebind_from(binding)).await
            }
            (Plant::UidSurvives, Claim::Claimed(table)) => {
                Ok(Claim::Claimed(self.with_first_uid(table)))
            }
            (_, outcome) => Ok(outcome),
        }
    }

    async fn publish(
        &self,
        table: &TableName,
        fence: &Fence,
        expected: Version,
        map: &Arc<ShardMap>,
    ) -> Result<Publish> {
        let stored = self.inner.load(table).await?;
        let at = stored.as_ref().map(|table| table.map.version());
        if self.plant == Plant::PublishRetryConflicts && at > Some(expected) {
            let outcome = stored.map(|table| (table.map.uid(), table.map.version()));
            if let Some((uid, version)) = outcome {
                return Ok(Publish::Conflict { uid, version });
            }
        }
        let outcome = self.inner.publish(table, fence, expected, map).await?;
        let forced = match (self.plant, &outcome) {
            (Plant::PublishIgnoresFence, Publish::Fenced(Some(_)))
            | (Plant::PublishOverwrites, Publish::Conflict { .. }) => {
                self.force(table, map).await?
            }
            (Plant::EqualTermPublishes, Publish::Fenced(Some(by))) if by.term == fence.term => {
                self.force(table, map).await?
            }
            (Plant::PublishCreates, Publish::Fenced(None)) => {
                let header = map.header().clone();
                let claim = ClaimRequest::new(table.clone(), fence.clone(), header);
                let _ = self.inner.claim(&claim).await?;
                Some(Publish::Published(map.version()))
            }
            _ => None,
        };
        Ok(forced.unwrap_or(outcome))
    }

    async fn load(&self, table: &TableName) -> Result<Option<StoredTable>> {
        self.inner.load(table).await
    }

    async fn tables(&self) -> Result<Vec<TableName>> {
        self.inner.tables().await
    }

    fn watch(&self, table: &TableName) -> BoxStream<'static, Result<PlacementEvent>> {
        let events = self.inner.watch(table);
        if self.plant != Plant::WatchGoesBack {
            return events;
        }
        let mut old: Option<Arc<ShardMap>> = None;
        events
            .flat_map(move |event| {
                let stale = old.take().map(|map| Ok(PlacementEvent::Changed(map)));
                if let Ok(PlacementEvent::Changed(map) | PlacementEvent::Snapshot(Some(map))) =
                    &event
                {
                    old = Some(Arc::clone(map));
                }
                stream::iter(std::iter::once(event).chain(stale))
            })
            .boxed()
    }

    async fn request(&self, request: &Request) -> Result<RequestId> {
        let mut request = request.clone();
        self.memory().repeated.entry(request.id).and_modify(|again| *again = true).or_default();
        if self.plant == Plant::RequestsStay {
            request.time_limit = Duration::from_secs(3_600);
        }
        self.inner.request(&request).await
    }

    async fn answer(&self, id: &RequestId, fence: &Fence, answer: &Answer) -> Result<Answered> {
        match (self.plant, self.inner.answer(id, fence, answer).await?) {
            (Plant::AnswersTwice, Answered::Already(_)) => Ok(Answered::Recorded),
            (Plant::AnswerIgnoresFence, Answered::Fenced(Some(by))) => {
                self.inner.answer(id, &by, answer).await
            }
            (Plant::HigherTermAnswers, Answered::Fenced(Some(by))) if fence.term > by.term => {
                self.inner.answer(id, &by, answer).await
            }
            (_, outcome) => Ok(outcome),
        }
    }

    fn watch_requests(&self) -> BoxStream<'static, Result<RequestEvent>> {
        let events = self.inner.watch_requests();
        if self.plant != Plant::RepeatProlongs {
            return events;
        }
        // The end of the first limit passes unnoticed.
        let shared = Arc::clone(&self.shared);
        let stays = move |event: &Result<RequestEvent>| {
            let Ok(RequestEvent::Gone(id)) = event else { return true };
            shared.lock().is_ok_and(|memory| memory.repeated.get(id) != Some(&true))
        };
        events.filter(move |event| future::ready(stays(event))).boxed()
    }
}
