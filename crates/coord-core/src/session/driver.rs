//! Performs what the machines decide: the requests, the pauses, the tasks.

use std::future::{Future, pending};
use std::panic::AssertUnwindSafe;

use futures::FutureExt;
use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::{oneshot, watch};

use super::builder::{LeaseState, Leases, OnRetry, TryAcquire};
use super::candidate::{Candidate, Verdict};
use super::guard::{HeldLease, LeaseGuard, Lost, Stop, StopOrder};
use super::machine::{Action, Holding};
use super::timing::Timing;
use crate::clock::{Clock, Moment, sleep_until};
use crate::error::{Error, ErrorKind, Result};
use crate::lease::{Acquire, LeaseEvent, Release};
use crate::types::{AcquireRequest, AttemptId, Grant, LeaseRecord};
use crate::watch::{Watched, Watcher};

/// How often an attempt that may have been granted is looked up before its TTL is left to end it.
const SETTLE_TRIES: u32 = 3;

/// The answer to a request, or an error once the clock shows `until`. A panic in the backend is an
/// error as well.
async fn bounded<T>(
    clock: &dyn Clock,
    until: Moment,
    operation: &'static str,
    request: impl Future<Output = Result<T>> + Send,
) -> Result<T> {
    tokio::select! {
        biased;
        answer = AssertUnwindSafe(request).catch_unwind() => answer.unwrap_or_else(|_panic| {
            Err(Error::new(ErrorKind::Internal, operation)
                .message("the backend panicked")
                .effect_unknown())
        }),
        () = sleep_until(clock, until) => {
            Err(Error::unavailable(operation, "the store did not answer in time"))
        }
    }
}

/// One acquire: what its task needs.
pub(super) struct Campaign {
    pub(super) leases: Leases,
    pub(super) timing: Timing,
    pub(super) state: watch::Sender<LeaseState>,
    pub(super) on_retry: OnRetry,
    pub(super) candidate: Candidate,
    pub(super) request: AcquireRequest,
}

/// Acquires, and answers through `reply`. A grant that is won after the caller has stopped waiting is released.
pub(super) async fn campaign(mut task: Campaign, mut reply: oneshot::Sender<Result<TryAcquire>>) {
    task.state.send_replace(LeaseState::Acquiring(None));
    let answer = task.run(&mut reply).await;
    if !matches!(answer, Some(Ok(TryAcquire::Acquired(_)))) {
        task.state.send_replace(LeaseState::Idle);
    }
    if let Some(answer) = answer {
        // A guard that has no receiver is dropped here, which releases it.
        drop(reply.send(answer));
    }
    if task.candidate.maybe_granted() {
        task.settle().await;
    }
}

impl Campaign {
    /// The outcome; none if the caller is gone.
    async fn run(
        &mut self,
        reply: &mut oneshot::Sender<Result<TryAcquire>>,
    ) -> Option<Result<TryAcquire>> {
        let clock = self.leases.clock.clone();
        let (mut watcher, mut failed_with) = (None, None);
        loop {
            self.wait(&mut watcher, reply).await?;
            let sent_at = clock.now();
            self.request.holder.attempt = self.candidate.attempt();
            let until = sent_at.plus(self.timing.request_timeout);
            let request = self.leases.lease.try_acquire(&self.request);
            let answer = bounded(&*clock, until, "acquire", request).await;
            match &answer {
                Ok(Acquire::Held(record)) => self.saw(Some(record)),
                Err(error) if error.is_retryable() => {
                    let lease = &self.request.lease;
                    tracing::warn!(%lease, %error, "a lease could not be asked for");
                    self.on_retry.tell(error);
                }
                _ => {}
            }
            let failure = answer.as_ref().err().map(|error| (error.kind(), error.to_string()));
            let is_news = failure.as_ref().map(|(kind, _)| *kind) != failed_with;
            failed_with = failure.as_ref().map(|(kind, _)| *kind);
            let terms = &self.leases.terms;
            let fits = |grant: &Grant| terms.admit(grant);
            match self.candidate.answered(sent_at, clock.now(), answer, fits) {
                Verdict::GoOn => {
                    if let Some(failure) = failure.filter(|_| is_news) {
                        self.tell_failure(failure);
                    }
                    if watcher.is_none() && self.candidate.waits() {
                        watcher = Some(self.watcher());
                    }
                }
                Verdict::Won(grant) => {
                    let guard = self.hold(grant, sent_at);
                    return Some(Ok(TryAcquire::Acquired(guard)));
                }
                Verdict::TooLate(grant) => {
                    self.give_back(grant).await;
                    self.candidate.begin_again(clock.now(), AttemptId::random());
                }
                Verdict::Held(record) => return Some(Ok(TryAcquire::Held(record))),
                Verdict::Failed(error) => return Some(Err(error)),
                Verdict::Refused(grant, error) => {
                    self.give_back(grant).await;
                    return Some(Err(error));
                }
            }
        }
    }

    /// Tells that a try failed that is made again: once, until it goes otherwise.
    fn tell_failure(&self, (kind, error): (ErrorKind, String)) {
        let lease = &self.request.lease;
        if kind == ErrorKind::Denied {
            tracing::error!(%lease, error, "the lease is denied now; it is tried again, ever more slowly");
        } else {
            tracing::warn!(%lease, error, "the lease can't be asked for; it is tried again");
        }
    }

    /// Waits until the next request is due; none if the caller is gone.
    async fn wait(
        &mut self,
        watcher: &mut Option<Watcher<LeaseEvent>>,
        reply: &mut oneshot::Sender<Result<TryAcquire>>,
    ) -> Option<()> {
        let clock = &*self.leases.clock;
        loop {
            let told = async {
                match watcher {
                    Some(watcher) => watcher.next().await,
                    None => pending().await,
                }
            };
            tokio::select! {
                biased;
                () = reply.closed() => return None,
                told = told => {
                    match &told {
                        Watched::Event(LeaseEvent::Snapshot(record)) => self.saw(record.as_ref()),
                        Watched::Event(LeaseEvent::Changed(record)) => self.saw(Some(record)),
                        Watched::Event(LeaseEvent::Vacant) => self.saw(None),
                        Watched::Disconnected(error) => {
                            let lease = &self.request.lease;
                            tracing::warn!(%lease, %error, "the lease can't be watched");
                        }
                        Watched::Reconnected => {}
                    }
                    self.candidate.watched(clock.now(), &told);
                }
                () = sleep_until(clock, self.candidate.try_at()) => return Some(()),
            }
        }
    }

    /// Notes and shows the holder of the lease.
    fn saw(&self, record: Option<&LeaseRecord>) {
        if let Some(record) = record {
            self.leases.terms.saw(record);
        }
        // Its own grant, whose reply it has not seen yet, is no other holder's.
        let own = self.request.holder.attempt;
        let other = record.map(|record| &record.holder).filter(|holder| holder.attempt != own);
        let now = LeaseState::Acquiring(other.cloned());
        self.state.send_if_modified(|state| {
            let is_news = *state != now;
            *state = now;
            is_news
        });
    }

    fn watcher(&self) -> Watcher<LeaseEvent> {
        let (lease, name) = (self.leases.lease.clone(), self.request.lease.clone());
        Watcher::with_seed(move || lease.watch(&name), self.leases.jitter().seed())
    }

    /// Begins the tenure.
    fn hold(&self, grant: Grant, sent_at: Moment) -> LeaseGuard {
        let fence = grant.fence();
        tracing::info!(lease = %grant.lease, term = %grant.term, node = %grant.holder.node, "lease acquired");
        self.state.send_replace(LeaseState::Held(fence));
        let holding = Holding::new(grant.clone(), sent_at, &self.timing, self.leases.jitter());
        let (lost, lost_seen) = watch::channel(None);
        let (stop, stopped) = oneshot::channel();
        let clock = self.leases.clock.clone();
        let tenure = HeldLease::new(clock, grant, holding.deadline(), lost_seen);
        let keeper = Keeper {
            leases: self.leases.clone(),
            state: self.state.clone(),
            tenure: tenure.clone(),
            holding,
            lost,
            stopped: Some(stopped),
            reply: None,
        };
        self.leases.tasks.spawn(keeper.keep());
        LeaseGuard::new(tenure, stop)
    }

    /// Releases a grant that no caller has received.
    async fn give_back(&self, grant: Grant) {
        let clock = &*self.leases.clock;
        let (name, term) = (grant.lease.clone(), grant.term);
        let mut holding = Holding::new(grant, clock.now(), &self.timing, self.leases.jitter());
        holding.stop(clock.now(), Stop::Release);
        loop {
            match holding.next(clock.now()) {
                Action::Wait(until) => sleep_until(clock, until).await,
                Action::Release(until) => release(&self.leases, &mut holding, until).await,
                Action::Renew(_) | Action::Finish => break,
            }
        }
        if let Err(error) = holding.take_released() {
            tracing::warn!(lease = %name, %term, %error, "a lease could not be given back");
        }
    }

    /// Finds out whether the attempt was granted without an answer, and gives the grant back.
    async fn settle(&mut self) {
        let clock = self.leases.clock.clone();
        for _ in 0..SETTLE_TRIES {
            let until = clock.now().plus(self.timing.request_timeout);
            let look = self.leases.lease.get(&self.request.lease);
            match bounded(&*clock, until, "get", look).await {
                Ok(Some(record)) if record.holder.attempt == self.candidate.attempt() => {
                    return self.give_back(record.into_grant()).await;
                }
                Ok(_) => return,
                Err(_unanswered) => {
                    sleep_until(&*clock, clock.now().plus(self.timing.retry_pause)).await;
                }
            }
        }
    }
}

async fn release(leases: &Leases, holding: &mut Holding, until: Moment) {
    let grant = holding.grant().clone();
    let request = leases.lease.release(&grant);
    let answer = bounded(&*leases.clock, until, "release", request).await;
    holding.released(leases.clock.now(), answer);
}

/// The task of one tenure: the only one that renews and releases it, so that those never overlap.
struct Keeper {
    leases: Leases,
    state: watch::Sender<LeaseState>,
    tenure: HeldLease,
    holding: Holding,
    lost: watch::Sender<Option<Lost>>,
    /// None once the order to stop has come.
    stopped: Option<oneshot::Receiver<StopOrder>>,
    reply: Option<oneshot::Sender<Result<Release>>>,
}

impl Keeper {
    async fn keep(mut self) {
        let clock = self.leases.clock.clone();
        loop {
            // Nothing is renewed for a holder that has gone.
            self.look_for_order();
            let now = clock.now();
            let action = self.holding.next(now);
            self.tell();
            match action {
                Action::Wait(until) => {
                    debug_assert!(until > now, "it would spin");
                    self.wait(until).await;
                }
                Action::Renew(until) => self.renew(until).await,
                Action::Release(until) => release(&self.leases, &mut self.holding, until).await,
                Action::Finish => break,
            }
        }
        let released = self.holding.take_released();
        if let Err(error) = &released {
            tracing::warn!(lease = %self.tenure.name(), %error, "a lease could not be released");
        }
        if let Some(reply) = self.reply {
            // The caller may have gone: the release is done all the same.
            drop(reply.send(released));
        }
    }

    fn look_for_order(&mut self) {
        match self.stopped.as_mut().map(oneshot::Receiver::try_recv) {
            None | Some(Err(TryRecvError::Empty)) => {}
            Some(Ok(order)) => self.obey(order),
            Some(Err(TryRecvError::Closed)) => self.obey(StopOrder::release()),
        }
    }

    fn obey(&mut self, order: StopOrder) {
        self.stopped = None;
        self.holding.stop(self.leases.clock.now(), order.stop);
        self.reply = order.reply;
    }

    async fn wait(&mut self, until: Moment) {
        let clock = &*self.leases.clock;
        let Some(stopped) = &mut self.stopped else { return sleep_until(clock, until).await };
        let order = tokio::select! {
            biased;
            order = stopped => order.unwrap_or(StopOrder::release()),
            () = sleep_until(clock, until) => return,
        };
        self.obey(order);
    }

    async fn renew(&mut self, until: Moment) {
        let grant = self.holding.grant().clone();
        let request = self.leases.lease.renew(&grant);
        let answer = bounded(&*self.leases.clock, until, "renew", request).await;
        if let Err(error) = &answer {
            tracing::warn!(lease = %grant.lease, term = %grant.term, %error, "a renewal failed");
        }
        let before = self.holding.deadline();
        self.holding.renewed(self.leases.clock.now(), answer);
        let after = self.holding.deadline();
        if after == before {
            return;
        }
        if self.tenure.raise(before, after) {
            self.tenure.set_grant(self.holding.grant());
        } else {
            // Either the holder has just released it, or a reader was told that the lease is lost.
            self.look_for_order();
            self.holding.overtaken();
        }
    }

    /// Tells how the tenure ended, once.
    fn tell(&mut self) {
        let Some(lost) = self.holding.take_end() else { return };
        self.tenure.seal();
        let fence = self.tenure.fence();
        match &lost {
            Lost::Released | Lost::Abandoned => {
                tracing::info!(lease = %fence.lease, term = %fence.term, reason = %lost, "lease ended");
            }
            _ => {
                tracing::warn!(lease = %fence.lease, term = %fence.term, reason = %lost, "lease lost");
            }
        }
        self.lost.send_replace(Some(lost));
        self.state.send_if_modified(|state| {
            let was_this = *state == LeaseState::Held(fence);
            if was_this {
                *state = LeaseState::Idle;
            }
            was_this
        });
    }
}
