//! This node's own registration, and the view of all registrations.
//!
//! The decisions are in [`registration`] and [`member_view`](crate::member_view); the tasks here perform them.

mod process;
mod registration;
mod verdict;

use std::sync::Arc;

use coord_core::{
    Error, Heartbeat, Incarnation, Moment, NodeEvent, NodeInfo, NodeRecord, Register, Replace,
    Result, Ttl, Watched, Watcher,
};
use futures::FutureExt;
use futures::future::BoxFuture;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::watch;

use self::process::Former;
pub(crate) use self::registration::{Registered, Registrar, RegistrarStep, RegistrarTurn};
use self::registration::{RegistrarOutcome, Times};
use crate::gate::Standing;
use crate::member_view::View;
use crate::observer::Observer;
use crate::settings::Settings;
use crate::shared::{Ending, Shared};
use crate::telemetry;

/// How many events of the nodes make one change of the view.
const EVENTS_AT_ONCE_MAX: usize = 4_096;

/// Whether the live registration of another process under this id is replaced at the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Replaces {
    /// Unless that process is seen to be alive.
    #[default]
    Unseen,
    /// Only if it is proved dead.
    No,
    /// Whatever is known of it.
    Yes,
    /// The operator or the supervisor that starts this node says that it is dead.
    Dead,
}

impl Replaces {
    fn replaces(self, former: Former) -> bool {
        match self {
            Self::Unseen => former != Former::Alive,
            Self::No => false,
            Self::Yes | Self::Dead => true,
        }
    }
}

/// The registration of this node, and what it takes to keep it.
pub(crate) struct Keeper {
    shared: Arc<Shared>,
    registrar: Registrar,
    ttl: Ttl,
    jitter: StdRng,
    /// An incarnation that was lost, and how long its shards may take to stop.
    lost: Option<(Incarnation, Moment)>,
    /// Until when an incarnation that this one replaced may run.
    replaced_until: Option<Moment>,
}

impl Keeper {
    /// Registers this node.
    ///
    /// # Errors
    /// `Invalid` if another process is registered under its id, and as the store answers.
    pub(crate) async fn register(
        shared: Arc<Shared>,
        info: NodeInfo,
        replaces: Replaces,
    ) -> Result<Self> {
        let info = match process::this() {
            Some(this) => info.with_process(this),
            None => info,
        };
        let this = info.process.clone();
        let Settings { heartbeat: interval, request_timeout: retry, .. } = shared.settings;
        let times = Times { interval, retry };
        let ttl = Ttl::new(shared.settings.node_ttl)?;
        // Incarnations are random, so no two nodes beat in step.
        let seed = info.incarnation.as_u128().to_le_bytes();
        let mut whole = [0; 32];
        whole[..16].copy_from_slice(&seed);
        let jitter = StdRng::from_seed(whole);
        let registrar = Registrar::new(info, Replace::No, times, shared.clock.now());
        let (lost, replaced_until) = (None, None);
        let mut keeper = Self { shared, registrar, ttl, jitter, lost, replaced_until };
        for tries in 0..2 {
            let now = keeper.shared.clock.now();
            let (RegistrarTurn::Do(step), _) = keeper.registrar.next(now) else { break };
            let outcome = keeper.perform(step).await?;
            let Told::Duplicate(other, why) = &outcome else {
                keeper.take(outcome);
                break;
            };
            let now = keeper.shared.clock.now();
            let marks = this.as_ref().zip(other.info.process.as_ref());
            let former = marks.map_or(Former::Unknown, |(this, other)| process::judge(this, other));
            let dead = former == Former::Dead || replaces == Replaces::Dead;
            if tries > 0 || !(dead || replaces.replaces(former)) {
                return Err(Error::invalid("start", why.clone()).resource(&keeper.shared.node));
            }
            let former = other.info.incarnation;
            if dead {
                tracing::info!(node = %keeper.shared.node, %former, "the process before is dead");
            } else {
                keeper.replaced_until = Some(now.plus(keeper.shared.settings.node_ttl));
            }
            keeper.registrar.replace(dead.then_some(former), now);
        }
        Ok(keeper)
    }

    /// Keeps the registration until the node's runtime ends and hosts nothing any more. An orderly end
    /// deregisters.
    ///
    /// # Errors
    /// As the store answers the deregistration.
    pub(crate) async fn keep(mut self) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        let mut reports = shared.reports.subscribe();
        let mut row = shared.row.subscribe();
        let mut changes = shared.news();
        loop {
            self.clear_out().await;
            let now = shared.clock.now();
            changes.mark_unchanged();
            if let Some(run) = declared_failed(&shared) {
                let lost = self.registrar.on_failed(run, now);
                self.announce(lost);
                if self.lost.is_some() {
                    continue;
                }
            }
            self.registrar.on_reports(&reports.borrow_and_update(), now);
            self.registrar.on_row(row.borrow_and_update().as_ref(), now);
            self.registrar.on_loads(&shared.loads.borrow());
            if self.registrar.registration().is_none() && shared.stop.is_cancelled() {
                break;
            }
            let (turn, news) = self.registrar.next(now);
            self.announce(news);
            if self.lost.is_some() {
                continue;
            }
            match turn {
                RegistrarTurn::WaitUntil(until) => {
                    debug_assert!(until > now, "it would spin");
                    tokio::select! {
                        biased;
                        () = self.over() => break,
                        Ok(()) = reports.changed() => {}
                        Ok(()) = row.changed() => {}
                        () = told_failed(&shared, &mut changes) => {}
                        () = shared.sleep_until(until) => {}
                    }
                }
                RegistrarTurn::Do(step) => {
                    let outcome = tokio::select! {
                        biased;
                        () = self.over() => break,
                        outcome = self.perform(step) => outcome,
                        // The deadline holds also while a call hangs.
                        () = self.until_deadline() => Ok(Told::Nothing),
                    };
                    match outcome {
                        Ok(outcome) => self.take(outcome),
                        Err(error) => {
                            tracing::debug!(node = %shared.node, %error, "a heartbeat failed");
                            self.take(Told::Nothing);
                        }
                    }
                }
            }
        }
        self.end().await
    }

    /// Waits until the runtime has ended, in good order or not.
    async fn over(&self) {
        self.shared.stop.cancelled().await;
        if self.shared.ending() == Ending::Orderly {
            self.shared.unhosted.cancelled().await;
        }
    }

    /// After a loss: waits until nothing of the lost incarnation runs any more. The next incarnation confirms
    /// that, so that its shards need not wait for a TTL. It does not confirm it if something still runs.
    async fn clear_out(&mut self) {
        let Some((run, limit)) = self.lost.take() else { return };
        let shared = Arc::clone(&self.shared);
        let mut gate = shared.gate.subscribe();
        let idle = async { while !shared.gate.is_idle() && gate.changed().await.is_ok() {} };
        tokio::select! {
            biased;
            () = self.over() => {}
            () = idle => self.registrar.on_ended(run, shared.clock.now()),
            () = shared.sleep_until(limit) => {
                tracing::error!(node = %shared.node, "shards run on past the deadline");
                self.registrar.join(shared.clock.now());
            }
        }
        if shared.settings.downing.is_some() {
            tokio::select! {
                biased;
                () = shared.stop.cancelled() => {}
                () = verdict::heed(&shared, run) => {}
            }
        }
    }

    async fn end(self) -> Result<()> {
        if self.shared.ending() == Ending::Abandoned {
            return Ok(());
        }
        // The leader is a live node: it gives up its lease before its registration.
        self.shared.led.cancelled().await;
        self.shared.gate.shut();
        let Some(registration) = self.registrar.registration() else { return Ok(()) };
        let replacing = self.replaced_until.is_some_and(|until| self.shared.clock.now() < until);
        if replacing || !self.shared.gate.is_idle() {
            // A deregistration says that no incarnation of this node hosts anything.
            tracing::warn!(node = %self.shared.node, "the registration is left to its TTL");
            return Ok(());
        }
        let held = registration.clone();
        self.shared.call("deregister", self.shared.discovery.deregister(&held)).await
    }

    async fn until_deadline(&self) {
        self.shared.sleep_until_any(self.registrar.deadline()).await;
    }

    async fn perform(&self, step: RegistrarStep) -> Result<Told> {
        let shared = &self.shared;
        let began = shared.clock.now();
        match step {
            RegistrarStep::Register(info, replace) => {
                let call = shared.discovery.register(&info, self.ttl, replace);
                Ok(match shared.call("register", call).await? {
                    Register::Registered(held) => Told::Held(held),
                    Register::Duplicate(other) => {
                        let why = format!(
                            "another process is registered under this id address={}; choose \
                             another id, or ask to replace it",
                            other.info.address
                        );
                        Told::Duplicate(Box::new(other), why)
                    }
                    _ => Told::Nothing,
                })
            }
            RegistrarStep::Heartbeat(held, info) => {
                let call = shared.discovery.heartbeat(&held, &info);
                let answer = shared.call("heartbeat", call).await?;
                telemetry::heartbeat(shared.clock.now().since(began));
                if let Some(load) = info.load {
                    telemetry::node_load(&shared.node, load);
                }
                Ok(match answer {
                    Heartbeat::Renewed(held) => Told::Held(held),
                    Heartbeat::Gone => Told::Gone,
                    Heartbeat::Superseded(_) => Told::Superseded,
                    _ => Told::Nothing,
                })
            }
        }
    }

    fn take(&mut self, told: Told) {
        let outcome = match told {
            Told::Held(held) => RegistrarOutcome::Held(held),
            Told::Duplicate(other, _) => RegistrarOutcome::Duplicate(other.info.incarnation),
            Told::Gone => RegistrarOutcome::Gone,
            Told::Superseded => RegistrarOutcome::Superseded,
            Told::Nothing => RegistrarOutcome::Failed,
        };
        let jitter = self.jitter.random_range(0.9..=1.1);
        let news = self.registrar.on_outcome(outcome, jitter, self.shared.clock.now());
        self.announce(news);
        if let (Some(held), Some(deadline)) =
            (self.registrar.registration(), self.registrar.deadline())
        {
            self.shared.gate.hold(Standing { incarnation: held.incarnation, deadline });
        }
    }

    fn announce(&mut self, news: Option<Registered>) {
        match news {
            Some(Registered::As(incarnation)) => {
                self.shared.observe(|observer| observer.on_registered(incarnation));
                self.shared.registered.send_replace(Some(incarnation));
            }
            Some(Registered::Lost(incarnation, why)) => {
                let grace = self.shared.settings.grace();
                let standing = self.shared.gate.standing();
                let deadline = standing.map_or(self.shared.clock.now(), |now| now.deadline);
                self.lost = Some((incarnation, deadline.plus(grace)));
                self.shared.gate.close();
                self.shared.registered.send_replace(None);
                self.shared.observe(|observer| observer.on_registration_lost(incarnation, why));
            }
            None => {}
        }
    }
}

/// This node's incarnation, if the leader has declared it failed. A node that the other side of a partition has
/// downed does not join again; it finds that out itself.
fn declared_failed(shared: &Shared) -> Option<Incarnation> {
    let run = (*shared.registered.borrow())?;
    shared.look(|observer| {
        let downed = observer.record().downed(&shared.node, run);
        let goes_down = downed && shared.settings.downing.is_some();
        (observer.is_failed(&shared.node, run) && !goes_down).then_some(run)
    })
}

/// Waits until the news show that this node's incarnation is declared failed.
async fn told_failed(shared: &Shared, changes: &mut watch::Receiver<()>) {
    loop {
        if changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        if declared_failed(shared).is_some() {
            return;
        }
    }
}

/// What the store said of the registration.
enum Told {
    Held(coord_core::Registration),
    Duplicate(Box<NodeRecord>, String),
    Gone,
    Superseded,
    Nothing,
}

/// Keeps the view of all registrations while this node leads or may have to, until its runtime ends. The view
/// is dropped at a gap: it does not say which nodes left meanwhile.
pub(crate) async fn watch_nodes_as_needed(shared: Arc<Shared>, always: bool) {
    while !shared.stop.is_cancelled() {
        watching(&shared, always, true).await;
        tokio::select! {
            biased;
            () = watching(&shared, always, false) => {}
            () = watch_nodes(Arc::clone(&shared)) => {}
        }
        shared.view.send_replace(Arc::default());
    }
}

/// Waits until this node has to watch the registrations, or need not any more, or its runtime ends.
async fn watching(shared: &Shared, always: bool, wanted: bool) {
    let places = usize::try_from(shared.settings.candidates).unwrap_or(usize::MAX);
    let (mut news, mut tenure) = (shared.news(), shared.tenure.subscribe());
    loop {
        let leads = tenure.borrow_and_update().is_some();
        let may = || shared.look(|observer| observer.may_have_to_lead(&shared.node, places));
        if (always || leads || may()) == wanted {
            return;
        }
        tokio::select! {
            biased;
            () = shared.stop.cancelled() => return,
            Ok(()) = news.changed() => {}
            Ok(()) = tenure.changed() => {}
        }
    }
}

/// Keeps the view of all registrations, until the node's runtime ends.
async fn watch_nodes(shared: Arc<Shared>) {
    let mut looks = shared.looks.subscribe();
    // Before the watch begins, so that what it begins with is no older.
    let first_look = *looks.borrow_and_update();
    let mut watcher = Watcher::<NodeEvent>::nodes(Arc::clone(&shared.discovery));
    let mut view = View::default();
    let mut listing = Listing::new(Arc::clone(&shared));
    let tick = shared.stall_tick();
    let (mut beats, mut told) = (false, shared.clock.now());
    loop {
        let began = shared.clock.now();
        listing.begin(&view, *looks.borrow());
        let lists = listing.is_under_way();
        let changed = tokio::select! {
            biased;
            () = shared.stop.cancelled() => return,
            Ok(()) = looks.changed() => false,
            found = listing.next() => take_found(&shared, &mut view, found),
            () = tokio::time::sleep(tick) => {
                let late = shared.clock.now().since(began).saturating_sub(tick);
                // Below a tick it is the usual jitter of a busy machine.
                if late > tick {
                    view.on_stall(late);
                }
                let heard = take_silence(&shared, &mut view);
                late > tick || heard
            }
            watched = watcher.next(), if !lists => {
                let mut changed = take_watched(&shared, &mut view, first_look, watched);
                // A zone that fails is one change of the view and not a thousand.
                for _ in 0..EVENTS_AT_ONCE_MAX {
                    let Some(watched) = watcher.next().now_or_never() else { break };
                    changed |= take_watched(&shared, &mut view, first_look, watched);
                }
                changed
            }
        };
        // Plain heartbeats matter only to readers that count the silence, and can wait a little.
        let now = shared.clock.now();
        beats |= view.take_beats();
        if changed || (beats && now.since(told) >= tick) {
            (beats, told) = (false, now);
            shared.view.send_replace(Arc::new(view.clone()));
        }
        shared.ticked.send_replace(shared.clock.now());
    }
}

/// All nodes, and the look that they were listed for.
type Found = (Vec<NodeRecord>, u64);

/// Lists the nodes for a look. The list shows the present nodes, however late the watch is. The watch waits
/// meanwhile, so the list lacks nothing that the watch had reported before.
struct Listing {
    shared: Arc<Shared>,
    under_way: Option<BoxFuture<'static, Result<Found>>>,
    /// Not before this moment, after the store failed.
    pause_until: Moment,
}

impl Listing {
    fn new(shared: Arc<Shared>) -> Self {
        let pause_until = shared.clock.now();
        Self { shared, under_way: None, pause_until }
    }

    fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Begins where this look is still to come, and the watch is there to tell what changes afterwards.
    fn begin(&mut self, view: &View, look: u64) {
        let is_due = view.looks() < look && view.is_ready() && !view.is_interrupted();
        if is_due && !self.is_under_way() && self.shared.clock.now() >= self.pause_until {
            let shared = Arc::clone(&self.shared);
            let list =
                async move { Ok((shared.call("nodes", shared.discovery.nodes()).await?, look)) };
            self.under_way = Some(list.boxed());
        }
    }

    /// What was found. Nothing comes while no list is under way.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    async fn next(&mut self) -> Result<Found> {
        let Some(list) = &mut self.under_way else { return std::future::pending().await };
        let found = list.await;
        self.under_way = None;
        if found.is_err() {
            self.pause_until = self.shared.clock.now().plus(self.shared.stall_tick());
        }
        found
    }
}

fn take_found(shared: &Shared, view: &mut View, found: Result<Found>) -> bool {
    match found {
        Ok((records, look)) => view.on_found(records, look, shared.clock.now()),
        Err(error) => tracing::debug!(node = %shared.node, %error, "the nodes can't be listed"),
    }
    true
}

/// A store may also be away without the watch noticing.
fn take_silence(shared: &Shared, view: &mut View) -> bool {
    let away = shared.look(Observer::is_store_away);
    match (away, view.is_away()) {
        (true, false) => view.on_away(shared.answered()),
        (false, true) if !view.is_interrupted() => view.on_back(shared.clock.now()),
        _ => return false,
    }
    true
}

fn take_watched(shared: &Shared, view: &mut View, look: u64, watched: Watched<NodeEvent>) -> bool {
    let now = shared.clock.now();
    match watched {
        Watched::Event(event) => {
            shared.store_answered();
            let snapshot = matches!(event, NodeEvent::Snapshot(_));
            if snapshot && view.is_interrupted() {
                // The watch before this one would have reported it.
                view.on_back(now);
            }
            let changed = view.on_event(event, shared.judging, now);
            if snapshot {
                view.on_looked(look, now);
            }
            changed
        }
        Watched::Disconnected(error) => {
            tracing::debug!(node = %shared.node, %error, "the nodes can't be watched");
            view.on_interrupted(now);
            false
        }
        Watched::Reconnected => {
            shared.store_answered();
            view.on_back(now);
            false
        }
        _ => false,
    }
}
