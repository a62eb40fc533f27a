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

#[cfg(test)]
mod tests {
    use coord_core::{AttemptId, Fence, LeaseName, Origin, Term, TokioClock};

    use super::*;
    use crate::gate::{Gate, Standing};
    use crate::region::ShardToken;

    const SHARD: ShardId = ShardId::new(3);

    fn run() -> Incarnation {
        Incarnation::from_u128(5)
    }

    fn table() -> TableName {
        TableName::new("orders").expect("name")
    }

    /// Notes what it handles; each message takes 3 ms, and "long" an hour.
    #[derive(Debug, Default)]
    struct Noting(Mutex<Vec<Bytes>>);

    #[async_trait]
    impl Host for Noting {
        async fn start(&self, _shard: ShardId, _fence: ShardFence) -> Result<(), HostError> {
            Ok(())
        }

        async fn stop(&self, _shard: ShardId) {}
    }

    #[async_trait]
    impl Handler for Noting {
        async fn handle(&self, mail: Mail) -> Bytes {
            lock(&self.0).push(mail.payload.clone());
            let takes = if mail.payload == "long" { 3_600_000 } else { 3 };
            tokio::time::sleep(Duration::from_millis(takes)).await;
            mail.payload
        }
    }

    struct Scene {
        handler: Arc<Noting>,
        inbox: Inbox,
        gate: Arc<Gate>,
    }

    impl Scene {
        fn new() -> Self {
            let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
            let gate = Gate::new(Arc::clone(&clock));
            let deadline = clock.now().plus(Duration::from_secs(86_400));
            gate.hold(Standing { incarnation: run(), deadline });
            let handler = Arc::new(Noting::default());
            let (budget, limits) = (Duration::from_secs(1), MailboxLimits::default());
            let inbox = Inbox::new(Arc::<Noting>::clone(&handler), clock, budget, limits);
            Self { handler, inbox, gate }
        }

        async fn start(&self) {
            let attempt = AttemptId::from_u128(1);
            let origin = Origin::new("memory:1/c");
            let fence = Fence::new(LeaseName::leader(), Term::from_u64(1), attempt, origin);
            let (uid, epoch) = (TableUid::from_u128(9), Epoch::new(7));
            let token = ShardToken { table: table(), uid, shard: SHARD, epoch, fence };
            let fence = ShardFence::new(Arc::clone(&self.gate), run(), token);
            self.inbox.start(SHARD, fence).await.expect("starts");
        }

        /// What is said of the messages of an attempt, and why not of all.
        async fn take(&self, attempt: u64, messages: &[(Number, &'static str)]) -> Answer {
            self.inbox.take(letter(attempt, messages)).await
        }

        fn handled(&self) -> Vec<Bytes> {
            lock(&self.handler.0).clone()
        }
    }

    fn letter(attempt: u64, messages: &[(Number, &'static str)]) -> Letter {
        let message = |(number, payload): &(Number, &'static str)| Message {
            number: *number,
            payload: Bytes::from_static(payload.as_bytes()),
        };
        Letter {
            table: table(),
            uid: TableUid::from_u128(9),
            shard: SHARD,
            epoch: Epoch::new(7),
            to: run(),
            sender: SenderRun(6),
            attempt,
            messages: messages.iter().map(message).collect(),
        }
    }

    fn answers<const N: usize>(texts: [&'static str; N], rest: Rest) -> Answer {
        let said = |text: &'static str| Said::Answered(Bytes::from_static(text.as_bytes()));
        Answer::Taken(texts.map(said).to_vec(), rest)
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_not_taken_no_earlier_attempt_hands_over_later() {
        let scene = Scene::new();
        scene.start().await;
        let messages = [(1, "a"), (2, "b"), (3, "c")];
        let some = answers(["a", "b"], Rest::Later);
        assert_eq!(scene.take(2, &messages).await, some, "two of 3 ms in 5 ms");
        // The first one of these was lost for a while, and its sender may send "c" elsewhere by now.
        assert_eq!(scene.take(1, &messages).await, answers([], Rest::NotHere));
        assert_eq!(scene.handled(), ["a", "b"]);
        assert_eq!(scene.take(3, &messages).await, answers(["a", "b", "c"], Rest::Later));
        assert_eq!(scene.handled(), ["a", "b", "c"]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_not_here_no_earlier_attempt_hands_over_later() {
        let scene = Scene::new();
        assert_eq!(scene.take(2, &[(1, "a")]).await, answers([], Rest::NotHere));
        scene.start().await;
        assert_eq!(scene.take(1, &[(1, "a")]).await, answers([], Rest::NotHere));
        assert_eq!(scene.handled(), [""; 0]);
        assert_eq!(scene.take(3, &[(1, "a")]).await, answers(["a"], Rest::Later));
    }

    #[tokio::test(start_paused = true)]
    async fn a_shard_that_has_to_go_drops_what_is_handled_and_takes_no_more() {
        let scene = Scene::new();
        scene.start().await;
        let stops = async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            scene.inbox.stop(SHARD).await;
        };
        let (taken, ()) = tokio::join!(scene.take(1, &[(1, "long"), (2, "b")]), stops);
        let dropped = "the shard had to go before it was handled to its end".to_owned();
        assert_eq!(taken, Answer::Taken(vec![Said::Failed(dropped)], Rest::NotHere));
        assert_eq!(scene.handled(), ["long"]);
        // Asked again where the shard has gone: it is known which of them was handed over.
        let known = scene.take(2, &[(1, "long"), (2, "b")]).await;
        let unanswered = "it was taken, and has no answer".to_owned();
        assert_eq!(known, Answer::Taken(vec![Said::Failed(unanswered)], Rest::NotHere));
    }
}
