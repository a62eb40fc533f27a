//! A task of a node that panics ends its node, so that nothing goes on as if that task still worked.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt;

use crate::downing::DownReason;
use crate::shared::Shared;

/// Performs one of a node's tasks. If it panics, the node shuts down: it ends in order, as far as the other
/// tasks can.
pub(crate) async fn supervise(
    shared: Arc<Shared>,
    task: &'static str,
    work: impl Future<Output = ()>,
) {
    if let Err(panic) = AssertUnwindSafe(work).catch_unwind().await {
        let message = message(&*panic);
        tracing::error!(node = %shared.node, task, message, "a task panicked; the node ends");
        shared.go_down(DownReason::TaskPanicked);
    }
}

/// What a panic says.
pub(crate) fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("it said nothing").to_owned()
}
