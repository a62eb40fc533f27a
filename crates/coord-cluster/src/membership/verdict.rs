//! Whether the other side of a partition has downed an incarnation of this node.

use coord_core::{Incarnation, TableName};

use crate::downing::DownReason;
use crate::record::ClusterRecord;
use crate::shared::Shared;

/// Before a process whose incarnation was lost joins again, it reads whether that incarnation was downed; if
/// so, it shuts down. The down decision is stored before the eviction, so an evicted node finds it.
pub(super) async fn heed(shared: &Shared, run: Incarnation) {
    let name = TableName::cluster();
    loop {
        match shared.call("load", shared.placement.load(&name)).await {
            Ok(table) => {
                let record = table.map(|table| ClusterRecord::read(table.map.annex()));
                if record.is_some_and(|record| record.is_ok_and(|r| r.downed(&shared.node, run))) {
                    shared.go_down(DownReason::DeclaredFailed);
                }
                return;
            }
            Err(error) if error.is_retryable() => {
                let pause = shared.clock.now().plus(shared.settings.request_timeout);
                shared.sleep_until(pause).await;
            }
            Err(error) => {
                tracing::warn!(node = %shared.node, %error, "whether this node was downed can't be read");
                return;
            }
        }
    }
}
