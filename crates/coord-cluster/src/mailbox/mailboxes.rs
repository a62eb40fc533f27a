//! What one node sends and takes messages with.

use std::collections::BTreeMap;
use std::sync::Arc;

use coord_core::TableName;
use futures::future::join_all;

use super::inbox::{Inbox, Inboxes};
use super::outbox::Outbox;
use super::{Mailbox, MailboxLimits};
use crate::coordinator::Spec;
use crate::shared::Shared;
use crate::transport::Transport;

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
        let outbox = |(name, spec): (&TableName, &Spec)| {
            let (transport, inbox) = (Arc::clone(&transport), inboxes.get(name).cloned());
            let shards = spec.header.shards;
            let shared = Arc::clone(shared);
            let outbox = Outbox::new(shared, name.clone(), shards, limits, transport, inbox);
            (name.clone(), outbox)
        };
        let outboxes = shared.specs.iter().map(outbox).collect();
        transport.serve(Arc::new(Inboxes(inboxes)));
        Self { transport: Some(transport), outboxes }
    }

    pub(crate) fn get(&self, table: &TableName) -> Option<Mailbox> {
        self.outboxes.get(table).cloned().map(Mailbox)
    }

    /// Waits for the node's end. What waits is told so then, what is on its way may end, and what was
    /// taken is answered.
    pub(crate) async fn close(self: Arc<Self>, shared: Arc<Shared>) {
        shared.stop.cancelled().await;
        let limit = shared.settings.stop_budget();
        join_all(self.outboxes.values().map(|outbox| outbox.close(limit))).await;
        shared.unhosted.cancelled().await;
        if let Some(transport) = &self.transport {
            transport.close().await;
        }
    }
}
