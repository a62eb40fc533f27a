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
use super::lanes::{FLIGHT_BYTES_MAX, Message, Number, Rest, Said};
use super::seen::{Check, Seen};
use super::{Handler, Mail, MailboxLimits, SenderRun};
use crate::region::{Host, HostError, ShardFence};
use crate::telemetry;
use crate::transport::Incoming;

/// After this, no further message of the same attempt is handed over.
const TURN_MAX: Duration = Duration::from_millis(5);

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

    /// Handles messages one after the other, unless they were handled before or do not belong here. Not to
    /// be dropped before it returns.
    pub(crate) async fn take(&self, letter: Letter) -> Answer {
        let count = letter.messages.len();
        let answer = self.take_all(letter).await;
        if let Answer::Taken(said, Rest::NotHere) = &answer {
            telemetry::taken("not_here", count - said.len());
        }
        answer
    }

    async fn take_all(&self, letter: Letter) -> Answer {
        let Letter { uid, shard, epoch, to, sender, attempt, messages, .. } = letter;
        let first = messages.first().map_or(0, |message| message.number);
        let belongs =
            |hosted: &&Arc<Hosted>| hosted.uid == uid && hosted.run == to && epoch >= hosted.since;
        let hosted = lock(&self.hosted).get(&shard).filter(belongs).cloned();
        let Some(hosted) = hosted else {
            // A repetition may come after the shard has gone. What is refused now, no earlier attempt may
            // hand over later.
            let mut seen = lock(&self.seen);
            if !seen.admit(sender, shard, attempt, first, self.clock.now()) {
                return Answer::Taken(Vec::new(), Rest::NotHere);
            }
            let known = messages.iter().map_while(|one| known(&seen, sender, shard, one.number));
            return Answer::Taken(known.collect(), Rest::NotHere);
        };
        let _turn = hosted.turn.lock().await;
        let began = self.clock.now();
        if !lock(&self.seen).admit(sender, shard, attempt, first, began) {
            // Its sender listens to a later one.
            return Answer::Taken(Vec::new(), Rest::NotHere);
        }
        let (mut all, mut bytes) = (Vec::with_capacity(messages.len()), 0);
        for Message { number, payload } in messages {
            let mail = {
                let mut seen = lock(&self.seen);
                if let Some(known) = known(&seen, sender, shard, number) {
                    telemetry::taken("repeated", 1);
                    bytes += known.len();
                    all.push(known);
                    continue;
                }
                if hosted.closed.is_cancelled() || !hosted.fence.is_current() {
                    return Answer::Taken(all, Rest::NotHere);
                }
                // The first ones are not to wait for their answers until the last one has its own.
                let long = self.clock.now().since(began) >= TURN_MAX || bytes >= FLIGHT_BYTES_MAX;
                if long && !all.is_empty() {
                    break;
                }
                if !seen.begin(sender, shard, attempt, number) {
                    return Answer::Taken(all, Rest::NotHere);
                }
                Mail { shard, payload, fence: hosted.fence.clone() }
            };
            let said = self.handle(&hosted, mail).await;
            let outcome = if let Said::Answered(_) = said { "answered" } else { "failed" };
            telemetry::taken(outcome, 1);
            bytes += said.len();
            if let Said::Answered(answer) = &said {
                lock(&self.seen).answered(sender, shard, number, answer.clone());
            }
            all.push(said);
        }
        Answer::Taken(all, Rest::Later)
    }

    async fn handle(&self, hosted: &Hosted, mail: Mail) -> Said {
        let shard = mail.shard;
        let handled = AssertUnwindSafe(self.handler.handle(mail)).catch_unwind();
        let done = tokio::select! {
            biased;
            () = hosted.cut.cancelled() => None,
            done = hosted.fence.run(handled) => done,
        };
        match done {
            Some(Ok(answer)) if answer.len() > self.answer_max => {
                let (bytes, max) = (answer.len(), self.answer_max);
                Said::Failed(format!(
                    "it was handled, and its answer is too large bytes={bytes} max={max}"
                ))
            }
            Some(Ok(answer)) => Said::Answered(answer),
            Some(Err(_panic)) => {
                tracing::error!(%shard, "the handler of a message panicked");
                Said::Failed("its handler panicked".to_owned())
            }
            None => Said::Failed("the shard had to go before it was handled to its end".to_owned()),
        }
    }
}

/// What is said of a message that was handed over before; none for a new one.
fn known(seen: &Seen, sender: SenderRun, shard: ShardId, number: Number) -> Option<Said> {
    match seen.check(sender, shard, number) {
        Check::New => None,
        Check::Answered(answer) => Some(Said::Answered(answer)),
        Check::Unanswered => Some(Said::Failed("it was taken, and has no answer".to_owned())),
        Check::Late => Some(Said::Failed("its sender has given it up".to_owned())),
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
