//! Follower → candidate → leader → follower.

mod vacancy;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use coord_core::session::{LeaseGuard, Leases};
use coord_core::{Incarnation, LeaseName, NodeId, Result};
use futures::FutureExt;
use tokio::sync::mpsc;
use tracing::Instrument;

use self::vacancy::Vacancy;
use crate::commands::{CommandError, Reply};
use crate::coordinator::{Ended, LocalCommand, lead};
use crate::gating;
use crate::shared::{Ending, Shared};
use crate::status::Role;
use crate::supervise;

/// How many retry intervals a candidate leaves to the node that leadership is transferred to.
const HEIR_RETRIES: u32 = 2;

/// Stands for election and leads, until the node's runtime ends. A node that does not stand only
/// refuses commands.
pub(crate) async fn run(shared: Arc<Shared>, mut local: mpsc::Receiver<LocalCommand>) {
    if shared.settings.candidate {
        let mut transfer_target = None;
        let mut vacancy = Vacancy::new(shared.settings.leader_ttl);
        while !shared.stop.is_cancelled() {
            transfer_target = term(&shared, &mut local, transfer_target, &mut vacancy).await;
        }
    } else {
        shared.stop.cancelled().await;
    }
    local.close();
    refuse(&shared, &mut local);
}

/// From one candidacy to the end of its term. Returns the transfer target that this node has yielded to, if it
/// has.
async fn term(
    shared: &Arc<Shared>,
    local: &mut mpsc::Receiver<LocalCommand>,
    transfer_target: Option<NodeId>,
    vacancy: &mut Vacancy,
) -> Option<NodeId> {
    // However the candidacy before it ended: this one may have to wait.
    shared.observe(|observer| {
        observer.on_role(Role::Follower);
        Vec::new()
    });
    let mut registered = shared.registered.subscribe();
    let incarnation = tokio::select! {
        biased;
        () = shared.stop.cancelled() => return None,
        Ok(now) = registered.wait_for(Option::is_some) => *now,
    }?;
    tokio::select! {
        biased;
        () = shared.stop.cancelled() => return None,
        _ = registered.wait_for(|now| *now != Some(incarnation)) => return None,
        () = has_to_stand(shared, vacancy) => {}
    }
    // One that did not take the lease is not waited for again.
    let late = leave_to_target(shared, transfer_target).await;
    shared.observe(|observer| {
        observer.on_role(Role::Candidate);
        Vec::new()
    });
    let acquired = tokio::select! {
        biased;
        () = shared.stop.cancelled() => return None,
        // Another incarnation of this node is the candidate then.
        _ = registered.wait_for(|now| *now != Some(incarnation)) => return None,
        () = heir_is_named(shared, late.as_ref()) => return None,
        () = others_stand(shared, vacancy) => return None,
        acquired = acquire(shared, incarnation) => acquired,
    };
    match acquired {
        Ok(guard) => {
            *vacancy = Vacancy::new(shared.settings.leader_ttl);
            reign(shared, guard, late, local).await
        }
        Err(error) => {
            tracing::error!(node = %shared.node, %error, "this node can't stand for election");
            pause(shared, shared.settings.leader_ttl).await;
            None
        }
    }
}

/// Waits until this node has to be a candidate: it has a candidate slot, or no node has led for too long.
async fn has_to_stand(shared: &Shared, vacancy: &mut Vacancy) {
    standing(shared, vacancy, |has_place, is_long, _| has_place || is_long).await;
}

/// Waits until this node need not stand any more: another one leads, and it has no place itself.
async fn others_stand(shared: &Shared, vacancy: &mut Vacancy) {
    standing(shared, vacancy, |has_place, is_long, is_led| !has_place && !is_long && is_led).await;
}

/// Waits until the state is this: whether this node has a candidate slot, whether no node has led for too long,
/// and whether another node leads.
async fn standing(
    shared: &Shared,
    vacancy: &mut Vacancy,
    wanted: impl Fn(bool, bool, bool) -> bool,
) {
    let mut news = shared.news();
    loop {
        let now = shared.clock.now();
        let (has_place, term) = shared.look(|observer| {
            let other = observer.leader().filter(|leader| leader.node != shared.node);
            (observer.record().has_place(&shared.node), other.map(|leader| leader.term))
        });
        vacancy.see(term, now);
        if wanted(has_place, vacancy.is_long(now), term.is_some()) {
            return;
        }
        let wake = vacancy.wake(now);
        tokio::select! {
            biased;
            Ok(()) = news.changed() => {}
            () = shared.sleep_until_any(wake) => {}
        }
    }
}

async fn acquire(shared: &Shared, incarnation: Incarnation) -> Result<LeaseGuard> {
    let settings = &shared.settings;
    Leases::new(Arc::clone(&shared.lease), shared.node.clone(), incarnation)
        .with_clock(Arc::clone(&shared.clock))
        .named(LeaseName::leader())
        .ttl(settings.leader_ttl)
        .renew_every(settings.leader_renew)
        .retry_every(settings.leader_retry)
        .request_timeout(settings.request_timeout)
        .acquire()
        .await
}

/// Leads, and releases the lease when the term ends. Returns the transfer target that this node was only faster
/// than, if there is one.
async fn reign(
    shared: &Arc<Shared>,
    guard: LeaseGuard,
    late: Option<NodeId>,
    local: &mut mpsc::Receiver<LocalCommand>,
) -> Option<NodeId> {
    let term = guard.fence().term;
    tracing::info!(node = %shared.node, %term, "this node leads");
    shared.tenure.send_replace(Some(guard.tenure()));
    shared.observe(|observer| {
        observer.on_role(Role::Leader);
        Vec::new()
    });
    let gate = gating::Keeper::start(shared, guard.grant().holder.incarnation);
    let held = gate.as_ref().map(gating::Keeper::tenure);
    let work =
        lead(shared, &guard, held, late, local).instrument(tracing::info_span!("term", %term));
    let ended = AssertUnwindSafe(work).catch_unwind().await;
    let ended = ended.unwrap_or_else(|panic| Ended::Panicked(supervise::message(&*panic)));
    shared.tenure.send_replace(None);
    shared.observe(|observer| {
        observer.on_role(Role::Follower);
        Vec::new()
    });
    refuse(shared, local);
    if matches!(ended, Ended::Refused(_) | Ended::Panicked(_)) {
        tracing::error!(node = %shared.node, %term, why = %ended, "this node can't lead here");
    } else {
        tracing::info!(node = %shared.node, %term, why = %ended, "this node leads no more");
    }
    let again_after = match &ended {
        Ended::Lost(_) | Ended::Yielded(_) => None,
        // So that another node can take the lease.
        Ended::Release(_) => Some(shared.settings.leader_retry),
        Ended::Refused(_) | Ended::Panicked(_) | Ended::TermRegression => {
            Some(shared.settings.leader_ttl)
        }
        Ended::Stopped if shared.ending() == Ending::Abandoned => {
            guard.abandon();
            gating::Keeper::end(gate).await;
            return None;
        }
        Ended::Stopped => None,
    };
    // Neither store keeps the other waiting.
    let (released, ()) = tokio::join!(guard.release(), gating::Keeper::end(gate));
    if let Err(error) = released {
        tracing::warn!(node = %shared.node, %error, "the lease is left to its TTL");
    }
    if let Some(after) = again_after {
        pause(shared, after).await;
    }
    match ended {
        Ended::Yielded(transfer_target) => Some(transfer_target),
        _ => None,
    }
}

async fn pause(shared: &Shared, duration: std::time::Duration) {
    let until = shared.clock.now().plus(duration);
    tokio::select! {
        biased;
        () = shared.stop.cancelled() => {}
        () = shared.sleep_until(until) => {}
    }
}

/// The node that leadership is being transferred to, if that is another.
fn other_target(shared: &Shared) -> Option<NodeId> {
    shared.look(|observer| {
        observer
            .record()
            .transfer_target
            .clone()
            .filter(|transfer_target| *transfer_target != shared.node)
    })
}

/// Whether this node leads already.
fn leads(shared: &Shared, node: &NodeId) -> bool {
    shared.look(|observer| observer.leader().is_some_and(|now| now.node == *node))
}

/// Waits until leadership is being transferred to another node than the one that was late. One that leads
/// stays named until its first write, and is waited for no more: by neither this nor [`leave_to_target`], or
/// a candidate would go from one to the other for as long without ever pausing.
async fn heir_is_named(shared: &Shared, late: Option<&NodeId>) {
    let mut news = shared.news();
    while other_target(shared).is_none_or(|transfer_target| {
        Some(&transfer_target) == late || leads(shared, &transfer_target)
    }) {
        if news.changed().await.is_err() {
            return;
        }
    }
}

/// Gives the node that is to lead the time to take the lease: the one that is named, or the one that this
/// node has given way to. Who it is, if it did not.
async fn leave_to_target(shared: &Shared, yielded_to: Option<NodeId>) -> Option<NodeId> {
    let mut news = shared.news();
    let limit = shared.clock.now().plus(shared.settings.leader_retry * HEIR_RETRIES);
    let expected = || {
        let transfer_target = other_target(shared).or_else(|| yielded_to.clone())?;
        (!leads(shared, &transfer_target)).then_some(transfer_target)
    };
    tokio::select! {
        biased;
        () = shared.stop.cancelled() => {}
        () = async { while expected().is_some() && news.changed().await.is_ok() {} } => {}
        () = shared.sleep_until(limit) => {}
    }
    expected()
}

/// Refuses the commands that came too late for the term.
fn refuse(shared: &Shared, local: &mut mpsc::Receiver<LocalCommand>) {
    while let Ok(LocalCommand { reply, .. }) = local.try_recv() {
        let leader = shared.look(|observer| observer.leader().map(|leader| leader.node.clone()));
        // The caller may have stopped waiting.
        let _ = reply.send(Reply::Refused(CommandError::NotLeader { leader }));
    }
}
