//! Code that works without yielding: it keeps the thread that it runs on, and nothing else of that thread
//! runs, is dropped or is told anything, until it is done. What other threads of the process do goes on.
//!
//! An island is one thread. Such code stops it at once, inside its poll, by the world's time.

use std::cell::RefCell;
use std::task::{Poll, Waker};

use futures::future::poll_fn;

use crate::time::WorldTime;

#[derive(Default)]
struct Kept {
    /// Ends the tick of the thread that runs now.
    thread: Option<Waker>,
    /// Until which tick it is kept, and by whom.
    until: Option<u64>,
    by: Vec<Waker>,
}

thread_local! {
    static KEPT: RefCell<Kept> = RefCell::default();
}

/// Works until this tick without yielding.
pub async fn work(time: WorldTime, until: u64) {
    poll_fn(move |cx| {
        if time.ticks() >= until {
            return Poll::Ready(());
        }
        let thread = KEPT.with_borrow_mut(|kept| {
            kept.until = kept.until.max(Some(until));
            kept.by.push(cx.waker().clone());
            kept.thread.take()
        });
        if let Some(thread) = thread {
            thread.wake();
        }
        Poll::Pending
    })
    .await;
}

/// Waits until something keeps this thread.
pub(crate) async fn kept() {
    poll_fn(|cx| {
        KEPT.with_borrow_mut(|kept| {
            if kept.until.is_some() {
                return Poll::Ready(());
            }
            kept.thread = Some(cx.waker().clone());
            Poll::Pending
        })
    })
    .await;
}

/// Until when this thread is kept, and who goes on then; nobody keeps it from now on.
pub(crate) fn take() -> Option<(u64, Vec<Waker>)> {
    let Kept { until, by, .. } = KEPT.take();
    until.map(|until| (until, by))
}
