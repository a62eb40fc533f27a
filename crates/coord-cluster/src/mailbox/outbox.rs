//! Performs what [`Lanes`] decides, for one table of one node.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use coord_core::{
    Effect, ErrorKind, Incarnation, Moment, MotionPhase, ShardCount, ShardId, ShardMap, TableName,
};
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::envelope::{Answer, Letter};
use super::inbox::Inbox;
use super::lanes::{
    Attempt, Ending, Full, Lanes, Message, Number, Outcome, Route, Step, Target, Withdrawn,
};
use super::{MailboxLimits, SenderRun};
use crate::handoff::Handoff;
use crate::record::TableNote;
use crate::shared::Shared;
use crate::telemetry::Buffered;
use crate::transport::{Recipient, Transport};

/// How often a shard is looked at although nothing was heard.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long what was given up has to notice that.
const CUT_WAIT: Duration = Duration::from_secs(1);

/// The caller of a message.
struct Waiter {
    told: oneshot::Sender<Ending>,
    _buffered: Buffered,
}

impl Waiter {
    fn tell(self, ending: Ending) {
        // The caller may have stopped waiting.
        drop(self.told.send(ending));
    }
}

/// The messages that one node sends to one table.
pub(crate) struct Outbox {
    shared: Arc<Shared>,
    table: TableName,
    shards: ShardCount,
    pub(super) limits: MailboxLimits,
    sender: SenderRun,
    transport: Arc<dyn Transport>,
    /// Takes the messages whose owner is this incarnation itself.
    inbox: Option<Arc<Inbox>>,
    lanes: Mutex<Lanes<Waiter>>,
    tasks: TaskTracker,
    runtime: Handle,
    /// Nothing is sent any more.
    closed: CancellationToken,
    /// What is on its way is given up.
    cut: CancellationToken,
}

impl Outbox {
    /// To be called inside a runtime.
    pub(crate) fn new(
        shared: Arc<Shared>,
        table: TableName,
        shards: ShardCount,
        limits: MailboxLimits,
        transport: Arc<dyn Transport>,
        inbox: Option<Arc<Inbox>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            shared,
            table,
            shards,
            limits,
            // As random as an incarnation, and not this node's own: that one may change meanwhile.
            sender: SenderRun(Incarnation::random().as_u128()),
            transport,
            inbox,
            lanes: Mutex::new(Lanes::new(limits)),
            tasks: TaskTracker::new(),
            runtime: Handle::current(),
            closed: CancellationToken::new(),
            cut: CancellationToken::new(),
        })
    }

    pub(super) fn shards(&self) -> ShardCount {
        self.shards
    }

    pub(super) fn table(&self) -> &TableName {
        &self.table
    }

    pub(super) fn deadline(&self, limit: Duration) -> Moment {
        self.shared.clock.now().plus(limit)
    }

    pub(super) async fn sleep_until(&self, until: Moment) {
        self.shared.sleep_until(until).await;
    }

    pub(super) fn push(
        self: &Arc<Self>,
        shard: ShardId,
        payload: Bytes,
        deadline: Moment,
    ) -> Result<(Number, oneshot::Receiver<Ending>), Full> {
        let (told_by, told) = oneshot::channel();
        let waiter = Waiter { told: told_by, _buffered: Buffered::new() };
        let taken = self.lanes().push(shard, payload, deadline, waiter)?;
        if taken.is_first {
            self.tasks.spawn_on(Arc::clone(self).drive(shard), &self.runtime);
        }
        Ok((taken.number, told))
    }

    pub(super) fn withdraw(&self, shard: ShardId, number: Number) -> Withdrawn {
        self.lanes().withdraw(shard, number)
    }

    /// Tells all that wait that nothing is sent any more, and waits for what is on its way, but not
    /// longer than this and a moment: what does not give way to the runtime is left to itself.
    pub(crate) async fn close(&self, limit: Duration) {
        self.lanes().close();
        self.closed.cancel();
        self.tasks.close();
        if tokio::time::timeout(limit, self.tasks.wait()).await.is_err() {
            self.cut.cancel();
            let _late = tokio::time::timeout(CUT_WAIT, self.tasks.wait()).await;
        }
    }

    /// Drives the lane of a shard until nothing waits in it.
    async fn drive(self: Arc<Self>, shard: ShardId) {
        let Some(mut maps) = self.shared.maps.get(&self.table).map(watch::Sender::subscribe) else {
            return;
        };
        loop {
            let now = self.shared.clock.now();
            let route = route(maps.borrow_and_update().as_deref(), shard);
            let step = self.lanes().next(shard, &route, now);
            match step {
                Step::Idle => return,
                Step::Tell(waiter, ending) => waiter.tell(ending),
                Step::Wait(until) => {
                    debug_assert!(until.is_none_or(|until| until > now), "it would spin");
                    let next_look = now.plus(LOOK_EVERY);
                    let until = until.map_or(next_look, |until| until.min(next_look));
                    tokio::select! {
                        biased;
                        () = self.cut.cancelled() => return,
                        () = self.closed.cancelled(), if !self.closed.is_cancelled() => {}
                        Ok(()) = maps.changed() => {}
                        () = self.shared.sleep_until(until) => {}
                    }
                }
                Step::Send { attempt, target, messages, deadline } => {
                    let outcome = tokio::select! {
                        biased;
                        () = self.cut.cancelled() => return,
                        outcome = self.attempt(shard, attempt, target, messages) => outcome,
                        () = self.shared.sleep_until(deadline) => Outcome::Late,
                    };
                    let now = self.shared.clock.now();
                    let told = self.lanes().on_outcome(shard, attempt, outcome, now);
                    for (waiter, ending) in told {
                        waiter.tell(ending);
                    }
                }
            }
        }
    }

    async fn attempt(
        &self,
        shard: ShardId,
        attempt: Attempt,
        target: Target,
        messages: Vec<Message>,
    ) -> Outcome {
        let Target { node, run, address, uid, epoch } = target;
        let (table, sender) = (self.table.clone(), self.sender);
        let letter = Letter { table, uid, shard, epoch, to: run, sender, attempt, messages };
        let here = *self.shared.registered.borrow() == Some(run);
        if let Some(inbox) = self.inbox.as_ref().filter(|_| here) {
            // In a task of its own: that the caller's time is over is no reason to drop a handler.
            let inbox = Arc::clone(inbox);
            let taken = self.tasks.spawn_on(async move { inbox.take(letter).await }, &self.runtime);
            return taken
                .await
                .map_or_else(|error| Outcome::Lost(error.to_string()), Outcome::from);
        }
        let to = Recipient::new(node, run, address);
        match self.transport.call(&to, letter.write()).await.map(Answer::read) {
            Ok(Ok(answer)) => answer.into(),
            Ok(Err(error)) => Outcome::Lost(error.to_string()),
            Err(error) if error.effect() == Effect::None => {
                if let ErrorKind::Misconfigured | ErrorKind::Unsupported = error.kind() {
                    return Outcome::Misdirected(error.to_string());
                }
                tracing::debug!(table = %self.table, %shard, %error, "messages can't be sent now");
                Outcome::NotSent
            }
            Err(error) => Outcome::Lost(error.to_string()),
        }
    }

    fn lanes(&self) -> MutexGuard<'_, Lanes<Waiter>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where messages to a shard go by this map: to its primary.
fn route(map: Option<&ShardMap>, shard: ShardId) -> Route {
    let Some((map, owner)) = map.and_then(|map| Some((map, map.owner(shard)?))) else {
        return Route::Nowhere;
    };
    let target = Target {
        node: owner.id.clone(),
        run: owner.incarnation,
        address: owner.address.clone(),
        uid: map.uid(),
        epoch: map.epoch(shard),
    };
    let leaves = map.motions().get(&shard).is_some_and(|motions| {
        motions.iter().any(|motion| motion.replica == 0 && motion.phase == MotionPhase::MovingTo)
    });
    // The annex is read only while the shard moves.
    if leaves && TableNote::read(map.annex()).handoff != Handoff::MakeBeforeBreak {
        return Route::Moving(target);
    }
    Route::To(target)
}
