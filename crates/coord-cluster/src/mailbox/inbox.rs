//! The receiver's side: what is hosted here is handled, and nothing else.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_core::{Clock, Epoch, Incarnation, ShardId, TableName, TableUid};
use futures::FutureExt;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::envelope::{Answer, Letter};
use super::seen::{Check, Seen};
use super::{Handler, Mail, MailboxLimits};
use crate::region::{Host, HostError, ShardFence};
use crate::transport::Incoming;

/// The messages that come to one node for one table.
pub(crate) struct Inbox {
    handler: Arc<dyn Handler>,
    clock: Arc<dyn Clock>,
    stop_budget: Duration,
    answer_max: usize,
    hosted: Mutex<HashMap<ShardId, Arc<Hosted>>>,
    seen: Mutex<Seen>,
}

/// One stay of a shard at this node.
struct Hosted {
    fence: ShardFence,
    run: Incarnation,
    uid: TableUid,
    /// The epoch under which the stay began. What was sent under an older one was meant for another.
    since: Epoch,
    /// Held while a message is handled; those that wait for it are let in one after the other.
    turn: tokio::sync::Mutex<()>,
    /// Nothing more is handed over.
    closed: CancellationToken,
    /// What is being handled is dropped.
    cut: CancellationToken,
}

impl Inbox {
    pub(crate) fn new(
        handler: Arc<dyn Handler>,
        clock: Arc<dyn Clock>,
        stop_budget: Duration,
        limits: MailboxLimits,
    ) -> Self {
        Self {
            handler,
            clock,
            stop_budget,
            answer_max: limits.payload_max,
            hosted: Mutex::default(),
            seen: Mutex::new(Seen::new(limits.answers_max)),
        }
    }

    /// Handles a message, unless it was handled before or does not belong here. Not to be dropped before
    /// it returns.
    pub(crate) async fn take(&self, letter: Letter) -> Answer {
        let Letter { uid, shard, epoch, to, sender, number, payload, .. } = letter;
        let belongs =
            |hosted: &&Arc<Hosted>| hosted.uid == uid && hosted.run == to && epoch >= hosted.since;
        let hosted = lock(&self.hosted).get(&shard).filter(belongs).cloned();
        let Some(hosted) = hosted else {
            // A repetition may come after the shard has gone.
            return self
                .known(lock(&self.seen).check(sender, shard, number))
                .unwrap_or(Answer::NotHere);
        };
        let _turn = hosted.turn.lock().await;
        let mail = {
            let mut seen = lock(&self.seen);
            if let Some(answer) = self.known(seen.check(sender, shard, number)) {
                return answer;
            }
            if hosted.closed.is_cancelled() || !hosted.fence.is_current() {
                return Answer::NotHere;
            }
            seen.begin(sender, shard, number, self.clock.now());
            Mail { shard, payload, fence: hosted.fence.clone() }
        };
        let handled = AssertUnwindSafe(self.handler.handle(mail)).catch_unwind();
        let done = tokio::select! {
            biased;
            () = hosted.cut.cancelled() => None,
            done = hosted.fence.run(handled) => done,
        };
        match done {
            Some(Ok(answer)) if answer.len() > self.answer_max => {
                let (bytes, max) = (answer.len(), self.answer_max);
                Answer::Failed(format!(
                    "it was handled, and its answer is too large bytes={bytes} max={max}"
                ))
            }
            Some(Ok(answer)) => {
                lock(&self.seen).answered(sender, shard, number, answer.clone());
                Answer::Answered(answer)
            }
            Some(Err(_panic)) => {
                tracing::error!(%shard, "the handler of a message panicked");
                Answer::Failed("its handler panicked".to_owned())
            }
            None => {
                Answer::Failed("the shard had to go before it was handled to its end".to_owned())
            }
        }
    }

    fn known(&self, check: Check) -> Option<Answer> {
        match check {
            Check::New => None,
            Check::Answered(answer) => Some(Answer::Answered(answer)),
            Check::Unanswered => Some(Answer::Failed("it was taken, and has no answer".to_owned())),
            Check::Late => Some(Answer::Failed("its sender has given it up".to_owned())),
        }
    }
}

#[async_trait]
impl Host for Inbox {
    async fn start(&self, shard: ShardId, fence: ShardFence) -> Result<(), HostError> {
        let Some(token) = fence.token() else { return Ok(()) };
        self.handler.start(shard, fence.clone()).await?;
        let hosted = Hosted {
            run: fence.run_of(),
            fence,
            uid: token.uid,
            since: token.epoch,
            turn: tokio::sync::Mutex::default(),
            closed: CancellationToken::new(),
            cut: CancellationToken::new(),
        };
        lock(&self.hosted).insert(shard, Arc::new(hosted));
        Ok(())
    }

    async fn stop(&self, shard: ShardId) {
        let hosted = lock(&self.hosted).remove(&shard);
        if let Some(hosted) = hosted {
            hosted.closed.cancel();
            if timeout(self.stop_budget, hosted.turn.lock()).await.is_err() {
                hosted.cut.cancel();
                drop(hosted.turn.lock().await);
            }
        }
        self.handler.stop(shard).await;
    }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("handler", &self.handler).finish_non_exhaustive()
    }
}

/// All inboxes of a node, behind its transport.
#[derive(Debug)]
pub(crate) struct Inboxes(pub(crate) BTreeMap<TableName, Arc<Inbox>>);

#[async_trait]
impl Incoming for Inboxes {
    async fn answer(&self, request: Bytes) -> Bytes {
        let answer = match Letter::read(request) {
            Ok(letter) => match self.0.get(&letter.table) {
                Some(inbox) => inbox.take(letter).await,
                None => Answer::NoTable,
            },
            Err(error) => {
                tracing::warn!(%error, "a request that is no message was dropped");
                Answer::NoTable
            }
        };
        answer.write()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
