//! The receiver's side: what is hosted here is handled, and nothing else.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_core::{
    Clock, Epoch, Incarnation, Moment, NodeId, ShardCount, ShardId, ShardMap, TableName, TableUid,
    sleep_until,
};
use futures::FutureExt;
use tokio::sync::{OwnedMutexGuard, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::envelope::{Answer, Letter};
use super::lanes::{Attempt, FLIGHT_BYTES_MAX, Message, Number, Rest, Said};
use super::seen::{Check, Seen};
use super::{ASK_LIMIT_MAX, Handler, Mail, MailboxLimits, SenderRun};
use crate::region::{Host, HostError, ShardFence};
use crate::shared::Shared;
use crate::telemetry;
use crate::transport::Incoming;

/// After this, no further message of the same attempt is handed over.
const TURN_MAX: Duration = Duration::from_millis(5);

/// How many bytes of letters wait at most for the turn of one shard.
const SHARD_BYTES_MAX: usize = 4 * 1024 * 1024;

/// What a letter has to name so that its shard can come to be hosted here.
#[derive(Clone, Debug)]
pub(crate) struct Scope {
    pub(crate) shards: ShardCount,
    /// This node's incarnation. One that is over never comes back, and the next one is not known to any other
    /// node yet.
    pub(crate) run: watch::Receiver<Option<Incarnation>>,
    /// The newest map, which names the generation of the table.
    pub(crate) map: watch::Receiver<Option<Arc<ShardMap>>>,
}

impl Scope {
    /// None for a table that the node does not have.
    pub(crate) fn of(shared: &Shared, table: &TableName) -> Option<Self> {
        let shards = shared.specs.get(table)?.header.shards;
        let map = shared.maps.get(table)?.subscribe();
        Some(Self { shards, run: shared.registered.subscribe(), map })
    }

    fn contains(&self, letter: &Letter) -> bool {
        self.shards.contains(letter.shard)
            && *self.run.borrow() == Some(letter.to)
            && self.map.borrow().as_ref().is_some_and(|map| map.uid() == letter.uid)
    }
}

/// The messages that come to one node for one table.
pub(crate) struct Inbox {
    scope: Scope,
    handler: Arc<dyn Handler>,
    clock: Arc<dyn Clock>,
    stop_budget: Duration,
    limits: MailboxLimits,
    hosted: Mutex<HashMap<ShardId, Arc<Hosted>>>,
    seen: Arc<Mutex<Seen>>,
    /// How many bytes of letters wait for the turns of all shards.
    waiting: Arc<AtomicUsize>,
    /// Messages that are handled for longer than their callers wait.
    tasks: TaskTracker,
}

/// One stay of a shard at this node.
struct Hosted {
    fence: ShardFence,
    run: Incarnation,
    uid: TableUid,
    /// The epoch under which the stay began. What was sent under an older one was meant for another.
    since: Epoch,
    /// Held while a message is handled; those that wait for it are let in one after the other.
    turn: Arc<tokio::sync::Mutex<()>>,
    /// The letters that wait for it, one of each sender at the most.
    queue: Mutex<Queue>,
    /// Nothing more is handed over.
    closed: CancellationToken,
    /// What is being handled is dropped.
    cut: CancellationToken,
}

#[derive(Default)]
struct Queue {
    letters: HashMap<SenderRun, (Attempt, CancellationToken)>,
    bytes: usize,
}

/// A letter's place among those that wait.
struct Place {
    hosted: Arc<Hosted>,
    waiting: Arc<AtomicUsize>,
    sender: SenderRun,
    attempt: Attempt,
    bytes: usize,
    /// Cancelled when the sender has sent a newer one.
    leave: CancellationToken,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut queue = lock(&self.hosted.queue);
        queue.bytes -= self.bytes;
        self.waiting.fetch_sub(self.bytes, Ordering::Relaxed);
        let mine = |(attempt, _): &(Attempt, _)| *attempt == self.attempt;
        if queue.letters.get(&self.sender).is_some_and(mine) {
            queue.letters.remove(&self.sender);
        }
    }
}

/// The right to handle messages of a shard.
type Held = OwnedMutexGuard<()>;

/// A message, and whose it is.
struct Handed {
    sender: SenderRun,
    number: Number,
    mail: Mail,
}

impl Inbox {
    pub(crate) fn new(
        scope: Scope,
        handler: Arc<dyn Handler>,
        clock: Arc<dyn Clock>,
        stop_budget: Duration,
        limits: MailboxLimits,
    ) -> Self {
        Self {
            scope,
            handler,
            clock,
            stop_budget,
            limits,
            hosted: Mutex::default(),
            seen: Arc::new(Mutex::new(Seen::new(limits.answers_max))),
            waiting: Arc::default(),
            tasks: TaskTracker::new(),
        }
    }

    /// Handles messages one after the other, unless they were handled before, do not belong here or have no
    /// time left. Not to be dropped before it returns.
    pub(crate) async fn take(&self, letter: Letter) -> Answer {
        let count = letter.messages.len();
        let answer = self.take_all(letter).await;
        match &answer {
            Answer::Taken(said, Rest::NotHere) => telemetry::taken("not_here", count - said.len()),
            Answer::Unread => telemetry::taken("not_here", count),
            _ => {}
        }
        answer
    }

    async fn take_all(&self, letter: Letter) -> Answer {
        let belongs = |hosted: &&Arc<Hosted>| {
            hosted.uid == letter.uid && hosted.run == letter.to && letter.epoch >= hosted.since
        };
        let hosted = lock(&self.hosted).get(&letter.shard).filter(belongs).cloned();
        if hosted.is_none() && !self.scope.contains(&letter) {
            // The sender gets the answer again that it got before.
            let is_known = lock(&self.seen).knows(letter.sender, letter.shard);
            if !is_known {
                return Answer::Unread;
            }
        }
        let Letter { shard, sender, attempt, messages, .. } = letter;
        let (came, first) =
            (self.clock.now(), messages.first().map_or(0, |message| message.number));
        // As soon as it is here: an earlier attempt, whose sender does not listen to it any more, makes room.
        let admitted = match &hosted {
            Some(_) => lock(&self.seen).admit(sender, shard, attempt, first, came),
            None => lock(&self.seen).refuse(sender, shard, attempt, first, came),
        };
        if !admitted {
            return Answer::Taken(Vec::new(), Rest::NotHere);
        }
        let Some(hosted) = hosted else {
            // A repetition may come after the shard has gone. What is refused now, no earlier attempt may
            // hand over later.
            let seen = lock(&self.seen);
            let known = messages.iter().map_while(|one| known(&seen, sender, shard, one.number));
            return Answer::Taken(known.collect(), Rest::NotHere);
        };
        // Nothing can be said after the time of the first one of those of which nothing is said yet.
        let mut until = vec![came; messages.len()];
        let mut least = came.plus(ASK_LIMIT_MAX);
        for (until, message) in until.iter_mut().zip(&messages).rev() {
            least = least.min(came.plus(message.left));
            *until = least;
        }
        let size = messages.iter().map(|message| message.payload.len()).sum();
        let by = until.first().copied().unwrap_or(came);
        let mut turn = match self.wait_for_turn(&hosted, sender, attempt, size, by).await {
            Ok(turn) => turn,
            // Also where the shard stops meanwhile: an earlier attempt may have handed some of it over.
            Err(rest) => return self.so_far(sender, shard, &messages, rest),
        };
        let began = self.clock.now();
        let (mut all, mut bytes) = (Vec::with_capacity(messages.len()), 0);
        for (Message { number, payload, .. }, until) in messages.into_iter().zip(until) {
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
                let now = self.clock.now();
                if now >= until {
                    break;
                }
                // The first ones are not to wait for their answers until the last one has its own.
                let long = now.since(began) >= TURN_MAX || bytes >= FLIGHT_BYTES_MAX;
                if long && !all.is_empty() {
                    break;
                }
                if !seen.begin(sender, shard, attempt, number) {
                    return Answer::Taken(all, Rest::NotHere);
                }
                Mail { shard, payload, fence: hosted.fence.clone() }
            };
            let handed = Handed { sender, number, mail };
            let mut work = Box::pin(self.handle(&hosted, handed, turn));
            let done = tokio::select! {
                biased;
                done = &mut work => Some(done),
                () = sleep_until(&*self.clock, until) => None,
            };
            let Some((said, held)) = done else {
                // It goes on; only this flight does not wait for it any more.
                self.tasks.spawn(work);
                return Answer::Taken(all, Rest::Busy);
            };
            turn = held;
            bytes += said.len();
            all.push(said);
        }
        drop(turn);
        Answer::Taken(all, Rest::Later)
    }

    /// Waits until it is this letter's turn, at most until this moment and for as long as its sender listens;
    /// else why nothing of it is handled.
    async fn wait_for_turn(
        &self,
        hosted: &Arc<Hosted>,
        sender: SenderRun,
        attempt: Attempt,
        bytes: usize,
        until: Moment,
    ) -> Result<Held, Rest> {
        let turn = Arc::clone(&hosted.turn);
        if let Ok(turn) = Arc::clone(&turn).try_lock_owned() {
            return Ok(turn);
        }
        let place = self.place(hosted, sender, attempt, bytes).ok_or(Rest::Later)?;
        tokio::select! {
            biased;
            () = place.leave.cancelled() => Err(Rest::NotHere),
            () = hosted.closed.cancelled() => Err(Rest::NotHere),
            turn = turn.lock_owned() => Ok(turn),
            () = sleep_until(&*self.clock, until) => Err(Rest::Later),
        }
    }

    /// A place in the shard's queue, in that of an earlier letter of the sender; none where the queue is full.
    fn place(
        &self,
        hosted: &Arc<Hosted>,
        sender: SenderRun,
        attempt: Attempt,
        bytes: usize,
    ) -> Option<Place> {
        let leave = CancellationToken::new();
        let mut queue = lock(&hosted.queue);
        if let Some((earlier, leave)) = queue.letters.get(&sender) {
            if *earlier > attempt {
                return None;
            }
            leave.cancel();
        }
        let is_new = !queue.letters.contains_key(&sender);
        // One letter may always wait, so that no shard is kept out by the others.
        let all = self.waiting.load(Ordering::Relaxed).saturating_add(bytes);
        let full = queue.bytes.saturating_add(bytes) > SHARD_BYTES_MAX
            || all > self.limits.bytes_max
            || (is_new && queue.letters.len() >= self.limits.lane_max);
        if full && !queue.letters.is_empty() {
            return None;
        }
        queue.letters.insert(sender, (attempt, leave.clone()));
        queue.bytes += bytes;
        self.waiting.fetch_add(bytes, Ordering::Relaxed);
        drop(queue);
        let (hosted, waiting) = (Arc::clone(hosted), Arc::clone(&self.waiting));
        Some(Place { hosted, waiting, sender, attempt, bytes, leave })
    }

    /// What is known of a letter's messages while others are handled, or one of them is.
    fn so_far(
        &self,
        sender: SenderRun,
        shard: ShardId,
        messages: &[Message],
        rest: Rest,
    ) -> Answer {
        let (seen, mut all) = (lock(&self.seen), Vec::new());
        for message in messages {
            match seen.check(sender, shard, message.number) {
                Check::New => break,
                Check::Unanswered => return Answer::Taken(all, Rest::Busy),
                Check::Answered(_) | Check::Late => {
                    all.extend(known(&seen, sender, shard, message.number));
                }
            }
        }
        Answer::Taken(all, rest)
    }

    /// Handles one message to its end, and gives the turn back with what is said of it.
    fn handle(
        &self,
        hosted: &Arc<Hosted>,
        handed: Handed,
        turn: Held,
    ) -> impl Future<Output = (Said, Held)> + Send + 'static + use<> {
        let (handler, hosted) = (Arc::clone(&self.handler), Arc::clone(hosted));
        let (seen, max) = (Arc::clone(&self.seen), self.limits.payload_max);
        async move {
            let Handed { sender, number, mail } = handed;
            let shard = mail.shard;
            let handled = AssertUnwindSafe(handler.handle(mail)).catch_unwind();
            let done = tokio::select! {
                biased;
                () = hosted.cut.cancelled() => None,
                done = hosted.fence.run(handled) => done,
            };
            let said = match done {
                Some(Ok(answer)) if answer.len() > max => {
                    let bytes = answer.len();
                    Said::Failed(format!(
                        "it was handled, and its answer is too large bytes={bytes} max={max}"
                    ))
                }
                Some(Ok(answer)) => Said::Answered(answer),
                Some(Err(_panic)) => {
                    tracing::error!(%shard, "the handler of a message panicked");
                    Said::Failed("its handler panicked".to_owned())
                }
                None => {
                    let why = "the shard had to go before it was handled to its end";
                    Said::Failed(why.to_owned())
                }
            };
            let outcome = if let Said::Answered(_) = said { "answered" } else { "failed" };
            telemetry::taken(outcome, 1);
            if let Said::Answered(answer) = &said {
                lock(&seen).answered(sender, shard, number, answer.clone());
            }
            (said, turn)
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
            turn: Arc::default(),
            queue: Mutex::default(),
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
pub(crate) struct Inboxes {
    pub(crate) node: NodeId,
    pub(crate) run: watch::Receiver<Option<Incarnation>>,
    pub(crate) inboxes: BTreeMap<TableName, Arc<Inbox>>,
}

#[async_trait]
impl Incoming for Inboxes {
    fn node(&self) -> &NodeId {
        &self.node
    }

    fn incarnation(&self) -> Option<Incarnation> {
        *self.run.borrow()
    }

    async fn ended(&self, run: Incarnation) {
        let mut now = self.run.clone();
        // An error says that the node has ended.
        let _ended = now.wait_for(|now| *now != Some(run)).await;
    }

    async fn answer(&self, request: Bytes) -> Bytes {
        let answer = match Letter::read(request) {
            Ok(letter) => match self.inboxes.get(&letter.table) {
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
    use coord_core::{AttemptId, Fence, LeaseName, Origin, TableHeader, Term, TokioClock};

    use super::*;
    use crate::gate::{Gate, Permit, Standing};
    use crate::region::ShardToken;

    const SHARD: ShardId = ShardId::new(3);

    fn run() -> Incarnation {
        Incarnation::from_u128(5)
    }

    fn uid() -> TableUid {
        TableUid::from_u128(9)
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
        run: watch::Sender<Option<Incarnation>>,
        map: watch::Sender<Option<Arc<ShardMap>>>,
        gate: Arc<Gate>,
        /// As the region's task holds it.
        stay: Mutex<Option<Arc<Permit>>>,
    }

    impl Scene {
        fn new() -> Self {
            let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
            let gate = Gate::new(Arc::clone(&clock));
            let deadline = clock.now().plus(Duration::from_secs(86_400));
            gate.hold(Standing { incarnation: run(), deadline });
            let handler = Arc::new(Noting::default());
            let (budget, limits) = (Duration::from_secs(1), MailboxLimits::default());
            let map = Some(Arc::new(ShardMap::empty(TableHeader::default(), uid())));
            let (run, map) = (watch::Sender::new(Some(run())), watch::Sender::new(map));
            let shards = TableHeader::default().shards;
            let scope = Scope { shards, run: run.subscribe(), map: map.subscribe() };
            let inbox = Inbox::new(scope, Arc::<Noting>::clone(&handler), clock, budget, limits);
            Self { handler, inbox, run, map, gate, stay: Mutex::default() }
        }

        async fn start(&self) {
            let attempt = AttemptId::from_u128(1);
            let origin = Origin::new("memory:1/c");
            let fence = Fence::new(LeaseName::leader(), Term::from_u64(1), attempt, origin);
            let (uid, epoch) = (uid(), Epoch::new(7));
            let token = ShardToken { table: table(), uid, shard: SHARD, epoch, fence };
            let stay = Arc::new(self.gate.enter(run()).expect("registered"));
            let fence = ShardFence::new(Arc::clone(&self.gate), run(), &stay, token);
            *lock(&self.stay) = Some(stay);
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
            left: Duration::from_secs(10),
            payload: Bytes::from_static(payload.as_bytes()),
        };
        Letter {
            table: table(),
            uid: uid(),
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

    #[tokio::test(start_paused = true)]
    async fn what_was_sent_to_an_earlier_stay_or_another_incarnation_is_not_handled() {
        let scene = Scene::new();
        scene.start().await;
        let one = |change: fn(&mut Letter)| {
            let mut letter = letter(1, &[(1, "a")]);
            change(&mut letter);
            scene.inbox.take(letter)
        };
        // The shard was here, elsewhere, and is here again.
        let not_here = answers([], Rest::NotHere);
        assert_eq!(one(|letter| letter.epoch = Epoch::new(6)).await, not_here);
        assert_eq!(one(|letter| letter.shard = ShardId::new(4)).await, not_here);
        assert_eq!(one(|letter| letter.to = Incarnation::from_u128(4)).await, Answer::Unread);
        assert_eq!(one(|letter| letter.uid = TableUid::from_u128(8)).await, Answer::Unread);
        assert_eq!(scene.handled(), [""; 0]);
        // It has been renewed since it began: both are this stay.
        let later = |letter: &mut Letter| (letter.epoch, letter.attempt) = (Epoch::new(8), 9);
        assert_eq!(one(later).await, answers(["a"], Rest::Later));
    }

    #[tokio::test(start_paused = true)]
    async fn letters_for_what_can_never_be_here_leave_nothing_behind() {
        let scene = Scene::new();
        scene.start().await;
        let shards = TableHeader::default().shards.get();
        let odd: [fn(&mut Letter, u32); 3] = [
            |letter, number| letter.to = Incarnation::from_u128(1_000 + u128::from(number)),
            |letter, number| letter.uid = TableUid::from_u128(1_000 + u128::from(number)),
            |letter, number| {
                letter.shard = ShardId::new(TableHeader::default().shards.get() + number);
            },
        ];
        let send = async |change: fn(&mut Letter, u32), number| {
            let mut letter = letter(1, &[(1, "a")]);
            (letter.sender, letter.shard) =
                (SenderRun(u128::from(number)), ShardId::new(number % shards));
            change(&mut letter, number);
            scene.inbox.take(letter).await
        };
        for number in 0..10_000 {
            for change in odd {
                assert_eq!(send(change, number).await, Answer::Unread);
            }
        }
        // Nor while this process sees no map, or is not registered.
        scene.map.send_replace(None);
        assert_eq!(send(|_, _| {}, 7).await, Answer::Unread);
        scene.map.send_replace(Some(Arc::new(ShardMap::empty(TableHeader::default(), uid()))));
        scene.run.send_replace(None);
        assert_eq!(send(|_, _| {}, 7).await, Answer::Unread);
        assert!(lock(&scene.inbox.seen).is_empty());
        assert_eq!(lock(&scene.inbox.hosted).len(), 1);
        assert_eq!(scene.handled(), [""; 0]);
        // What may come to be here is remembered, once for each sender.
        scene.run.send_replace(Some(run()));
        assert_eq!(send(|_, _| {}, 7).await, answers([], Rest::NotHere));
        assert!(!lock(&scene.inbox.seen).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_run_that_is_over_says_again_what_it_has_said() {
        let scene = Scene::new();
        scene.start().await;
        assert_eq!(scene.take(1, &[(1, "a")]).await, answers(["a"], Rest::Later));
        scene.inbox.stop(SHARD).await;
        scene.run.send_replace(Some(Incarnation::from_u128(6)));
        assert_eq!(scene.take(2, &[(1, "a")]).await, answers(["a"], Rest::NotHere));
    }

    #[tokio::test(start_paused = true)]
    async fn those_behind_a_handler_that_hangs_are_answered_in_their_time_and_never_handled() {
        let scene = Scene::new();
        scene.start().await;
        let began = tokio::time::Instant::now();
        let busy = Answer::Taken(Vec::new(), Rest::Busy);
        assert_eq!(scene.take(1, &[(1, "long"), (2, "b")]).await, busy);
        assert_eq!(began.elapsed(), Duration::from_secs(10));
        // Another sender's wait is in vain, and says so in time.
        let mut other = letter(1, &[(1, "c"), (2, "d")]);
        other.sender = SenderRun(7);
        other.messages[1].left = Duration::from_secs(3);
        assert_eq!(scene.inbox.take(other).await, answers([], Rest::Later));
        assert_eq!(began.elapsed(), Duration::from_secs(13), "the least of their times");
        assert_eq!(scene.take(2, &[(1, "long")]).await, busy, "it still is handled");
        assert_eq!(scene.inbox.waiting.load(Ordering::Relaxed), 0);
        tokio::time::sleep(Duration::from_secs(3_600)).await;
        assert_eq!(scene.handled(), ["long"]);
        assert_eq!(scene.take(3, &[(1, "long")]).await, answers(["long"], Rest::Later));
    }

    #[tokio::test(start_paused = true)]
    async fn a_repetition_that_waits_while_the_shard_stops_is_not_told_that_nothing_was_handled() {
        let scene = Scene::new();
        scene.start().await;
        let busy = Answer::Taken(Vec::new(), Rest::Busy);
        assert_eq!(scene.take(1, &[(1, "long")]).await, busy);
        let stops = async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            scene.inbox.stop(SHARD).await;
        };
        let (again, ()) = tokio::join!(scene.take(2, &[(1, "long"), (2, "b")]), stops);
        assert_eq!(again, busy);
        assert_eq!(scene.handled(), ["long"]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_attempt_makes_room_for_a_later_one_and_the_queue_is_bounded() {
        let scene = Scene::new();
        scene.start().await;
        assert_eq!(scene.take(1, &[(1, "long")]).await, Answer::Taken(Vec::new(), Rest::Busy));
        let inbox = &scene.inbox;
        let mut waiting = Vec::new();
        let mut send = |sender: u128, attempt: u64, bytes: usize| {
            let mut letter = letter(attempt, &[(1, "")]);
            letter.sender = SenderRun(sender);
            letter.messages[0].payload = Bytes::from(vec![7; bytes]);
            let mut taken = Box::pin(inbox.take(letter));
            let now = (&mut taken).now_or_never();
            if now.is_none() {
                waiting.push(taken);
            }
            (now, inbox.waiting.load(Ordering::Relaxed))
        };
        for (attempt, count) in (1..100).zip(1..) {
            // The one before has been told to leave, and does when it is polled.
            let (now, bytes) = send(7, attempt, 1_000);
            assert_eq!((now, bytes), (None, count * 1_000));
        }
        let (now, _) = send(8, 1, SHARD_BYTES_MAX);
        assert_eq!(now, Some(answers([], Rest::Later)), "there is no room for it");
        let last = waiting.pop().expect("it waits");
        for taken in waiting {
            assert_eq!(taken.await, answers([], Rest::NotHere));
        }
        assert_eq!(inbox.waiting.load(Ordering::Relaxed), 1_000);
        drop(last);
        assert_eq!(inbox.waiting.load(Ordering::Relaxed), 0);
    }
}
