//! What one node sends and takes messages with.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use coord_core::TableName;
use futures::future::join_all;

use super::inbox::{Inbox, Inboxes};
use super::outbox::Outbox;
use super::{Mailbox, MailboxLimits};
use crate::model::TableSpec;
use crate::shared::Shared;
use crate::transport::Transport;

/// How long the last answers have at least to get away.
const CLOSE_WAIT_MIN: Duration = Duration::from_secs(1);

/// The mailboxes of one node; none without a transport.
pub(crate) struct Mailboxes {
    transport: Option<Arc<dyn Transport>>,
    outboxes: BTreeMap<TableName, Arc<Outbox>>,
}

impl Mailboxes {
    /// To be called inside a runtime. From now on the transport's requests are answered.
    pub(crate) fn new(
        shared: &Arc<Shared>,
        mailing: Option<(Arc<dyn Transport>, MailboxLimits)>,
        inboxes: BTreeMap<TableName, Arc<Inbox>>,
    ) -> Self {
        let Some((transport, limits)) = mailing else {
            return Self { transport: None, outboxes: BTreeMap::new() };
        };
        let outbox = |(name, spec): (&TableName, &TableSpec)| {
            let (transport, inbox) = (Arc::clone(&transport), inboxes.get(name).cloned());
            let shards = spec.header.shards;
            let shared = Arc::clone(shared);
            let outbox = Outbox::new(shared, name.clone(), shards, limits, transport, inbox);
            (name.clone(), outbox)
        };
        let outboxes = shared.specs.iter().map(outbox).collect();
        let (node, run) = (shared.node.clone(), shared.registered.subscribe());
        transport.serve(Arc::new(Inboxes { node, run, inboxes }));
        Self { transport: Some(transport), outboxes }
    }

    pub(crate) fn get(&self, table: &TableName) -> Option<Mailbox> {
        self.outboxes.get(table).cloned().map(Mailbox)
    }

    /// Waits for the node's end. Then the waiting messages fail, those on their way may end, and those that
    /// were taken are answered.
    pub(crate) async fn close(self: Arc<Self>, shared: Arc<Shared>) {
        shared.stop.cancelled().await;
        let limit = shared.settings.stop_budget();
        join_all(self.outboxes.values().map(|outbox| outbox.close(limit))).await;
        shared.unhosted.cancelled().await;
        if let Some(transport) = &self.transport {
            // A message that is still handled now does not yield to the runtime, and is not waited for.
            let _late = tokio::time::timeout(limit.max(CLOSE_WAIT_MIN), transport.close()).await;
        }
    }
}
