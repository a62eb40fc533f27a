//! What the tasks of one node share.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coord_core::session::HeldLease;
use coord_core::{
    Clock, Discovery, Error, Incarnation, Lease, Moment, NodeId, Placement, Report, Result,
    ShardMap, TableName,
};
use tokio::sync::{broadcast, watch};
use tokio_util::sync::CancellationToken;

use crate::downing::DownReason;
use crate::events::{Event, EventSource};
use crate::gate::Gate;
use crate::member_view::{Judging, View};
use crate::model::{DownDecision, GatingLease, TableLoad, TableSpec, VersionTimes};
use crate::observer::Observer;
use crate::settings::Settings;
use crate::status::Status;
use crate::telemetry;

/// How often a stall of this process is looked for.
const STALL_TICK_MAX: Duration = Duration::from_secs(1);

/// How a node's runtime ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Leadership is released and the node deregistered.
    Orderly,
    /// Nothing is released, as if the process had crashed.
    Abandoned,
}

/// What the tasks of one node share.
pub(crate) struct Shared {
    pub(crate) node: NodeId,
    pub(crate) settings: Settings,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) lease: Arc<dyn Lease>,
    pub(crate) discovery: Arc<dyn Discovery>,
    pub(crate) placement: Arc<dyn Placement>,
    pub(crate) judging: Judging,
    pub(crate) specs: BTreeMap<TableName, TableSpec>,
    /// What gates the coordinator besides its own lease.
    pub(crate) gating: Option<GatingLease>,
    /// This node's incarnation, while it is registered.
    pub(crate) registered: watch::Sender<Option<Incarnation>>,
    /// Whether this process may host, and until when.
    pub(crate) gate: Arc<Gate>,
    /// The newest map of each table.
    pub(crate) maps: BTreeMap<TableName, watch::Sender<Option<Arc<ShardMap>>>>,
    /// What each table's region reports through the registration, and under which incarnation.
    pub(crate) reports: watch::Sender<BTreeMap<TableName, (Incarnation, Report)>>,
    /// The nodes that this node does not reach, where it reports them.
    pub(crate) row: watch::Sender<Option<BTreeSet<NodeId>>>,
    /// The nodes that this node's side of a partition has declared failed.
    pub(crate) verdicts: watch::Sender<BTreeMap<NodeId, DownDecision>>,
    /// How busy the shards of each table are that asks for it.
    pub(crate) loads: watch::Sender<BTreeMap<TableName, TableLoad>>,
    /// Cancelled when no region hosts anything any more.
    pub(crate) unhosted: CancellationToken,
    /// What is seen of all registrations.
    pub(crate) view: watch::Sender<Arc<View>>,
    /// When it was last looked whether this process had stalled.
    pub(crate) ticked: watch::Sender<Moment>,
    /// How often the registrations were to be looked at anew.
    pub(crate) looks: watch::Sender<u64>,
    /// This node's term, while it leads.
    pub(crate) tenure: watch::Sender<Option<HeldLease>>,
    /// Notified of each change of what this node knows.
    news: watch::Sender<()>,
    events: broadcast::Sender<Arc<Event>>,
    observer: Mutex<Known>,
    store: Mutex<StoreHealth>,
    /// When the versions of each table were seen here.
    seen: Mutex<BTreeMap<TableName, VersionTimes>>,
    /// Cancelled when the node's runtime ends.
    pub(crate) stop: CancellationToken,
    ending: Mutex<Ending>,
    /// Cancelled before `stop` where the runtime is abandoned.
    pub(crate) abandoned: CancellationToken,
    /// Cancelled when this node can't lead any more.
    pub(crate) led: CancellationToken,
}

/// What this node knows, and the status that follows from it. The status is computed when it is asked for: it
/// names all members, and most changes have no reader.
#[derive(Debug)]
struct Known {
    observer: Observer,
    status: Option<Arc<Status>>,
}

/// When the store last answered this process.
#[derive(Debug)]
struct StoreHealth {
    answered: Moment,
}

/// What a node is started with.
pub(crate) struct Parts {
    pub(crate) node: NodeId,
    pub(crate) settings: Settings,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) lease: Arc<dyn Lease>,
    pub(crate) discovery: Arc<dyn Discovery>,
    pub(crate) placement: Arc<dyn Placement>,
    pub(crate) judging: Judging,
    pub(crate) specs: BTreeMap<TableName, TableSpec>,
    pub(crate) gating: Option<GatingLease>,
}

impl Shared {
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts { node, settings, clock, lease, discovery, placement, judging, specs, gating } =
            parts;
        let observer = Observer::new(specs.keys().cloned());
        let maps = specs.keys().map(|name| (name.clone(), watch::Sender::new(None))).collect();
        let (events, _) = broadcast::channel(settings.event_buffer);
        Self {
            registered: watch::Sender::new(None),
            gate: Gate::new(Arc::clone(&clock)),
            maps,
            reports: watch::Sender::default(),
            row: watch::Sender::default(),
            verdicts: watch::Sender::default(),
            loads: watch::Sender::default(),
            unhosted: CancellationToken::new(),
            view: watch::Sender::default(),
            ticked: watch::Sender::new(clock.now()),
            looks: watch::Sender::default(),
            tenure: watch::Sender::new(None),
            news: watch::Sender::default(),
            events,
            observer: Mutex::new(Known { observer, status: None }),
            seen: Mutex::default(),
            store: Mutex::new(StoreHealth { answered: clock.now() }),
            stop: CancellationToken::new(),
            ending: Mutex::new(Ending::Orderly),
            abandoned: CancellationToken::new(),
            led: CancellationToken::new(),
            node,
            settings,
            clock,
            lease,
            discovery,
            placement,
            judging,
            specs,
            gating,
        }
    }

    pub(crate) fn subscribe(&self) -> broadcast::Receiver<Arc<Event>> {
        self.events.subscribe()
    }

    /// Takes something in, and tells what follows from it. Never waits.
    pub(crate) fn observe(&self, take: impl FnOnce(&mut Observer) -> Vec<Event>) {
        let leads = self.tenure.borrow().is_some();
        let mut known = lock(&self.observer);
        known.observer.set_heard(leads || self.events.receiver_count() > 0);
        let events = take(&mut known.observer);
        known.status = None;
        telemetry::gauges(&known.observer.gauges(&self.node));
        // Sent under the lock, so that every listener gets the events in the order in which they happened.
        self.news.send_replace(());
        for event in events {
            telemetry::event(&event.kind);
            // Of what all nodes see, the leader's log is enough.
            if leads || event.cause == EventSource::Local {
                tracing::info!(node = %self.node, cause = ?event.cause, "{}", event.kind);
            }
            // There may be no listener.
            let _ = self.events.send(Arc::new(event));
        }
    }

    /// Looks at what this node knows.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&Observer) -> T) -> T {
        look(&lock(&self.observer).observer)
    }

    /// How things stand.
    pub(crate) fn status(&self) -> Arc<Status> {
        let mut known = lock(&self.observer);
        let Known { observer, status } = &mut *known;
        Arc::clone(status.get_or_insert_with(|| Arc::new(observer.status())))
    }

    /// Notified of each change of what this node knows.
    pub(crate) fn news(&self) -> watch::Receiver<()> {
        self.news.subscribe()
    }

    /// A version of a table was seen.
    pub(crate) fn note_seen(&self, name: &TableName, map: &ShardMap) {
        let mut seen = lock(&self.seen);
        seen.entry(name.clone()).or_default().note(map, self.clock.now());
    }

    /// When the versions of each table were seen here.
    pub(crate) fn seen(&self) -> BTreeMap<TableName, VersionTimes> {
        lock(&self.seen).clone()
    }

    /// How often a stall of this process is looked for.
    pub(crate) fn stall_tick(&self) -> Duration {
        (self.settings.node_ttl / 10).min(STALL_TICK_MAX)
    }

    /// Whether this process may have been stalled just now, so that no node must be judged before the next
    /// check.
    pub(crate) fn may_have_stalled(&self) -> bool {
        self.clock.now().since(*self.ticked.borrow()) > self.stall_tick() * 2
    }

    /// When the store last answered.
    pub(crate) fn answered(&self) -> Moment {
        lock(&self.store).answered
    }

    /// The store answered.
    pub(crate) fn store_answered(&self) {
        lock(&self.store).answered = self.clock.now();
        if self.look(Observer::is_store_away) {
            self.observe(|observer| observer.on_store(false));
        }
    }

    /// The store did not answer. It is away once no call has succeeded for a third of the node TTL.
    pub(crate) fn store_failed(&self) {
        let silent = self.clock.now().since(lock(&self.store).answered);
        if silent >= self.settings.node_ttl / 3 && !self.look(Observer::is_store_away) {
            self.observe(|observer| observer.on_store(true));
        }
    }

    /// Makes a call, bounded in time, and notes whether the store answered.
    pub(crate) async fn call<T>(
        &self,
        operation: &'static str,
        call: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        let limit = self.settings.request_timeout;
        let result = tokio::time::timeout(limit, call).await.unwrap_or_else(|_elapsed| {
            let why = format!("the store did not answer limit={limit:?}");
            Err(Error::unavailable(operation, why))
        });
        match &result {
            Err(error) if error.is_retryable() => self.store_failed(),
            _ => self.store_answered(),
        }
        result
    }

    /// Sleeps until the clock shows `until`.
    pub(crate) async fn sleep_until(&self, until: Moment) {
        coord_core::sleep_until(&*self.clock, until).await;
    }

    /// Sleeps until the clock shows `until`; for ever where there is no such moment.
    pub(crate) async fn sleep_until_any(&self, until: Option<Moment>) {
        match until {
            Some(until) => self.sleep_until(until).await,
            None => std::future::pending().await,
        }
    }

    /// This node shuts down: the reason is reported once, and then the node ends in order.
    pub(crate) fn go_down(&self, why: DownReason) {
        if !self.stop.is_cancelled() && !self.look(Observer::is_down) {
            self.observe(|observer| observer.on_down(why));
        }
        self.end(Ending::Orderly);
    }

    /// Ends the node's runtime; the first to say how is right.
    pub(crate) fn end(&self, ending: Ending) {
        let mut said = lock(&self.ending);
        if !self.stop.is_cancelled() {
            *said = ending;
            if ending == Ending::Abandoned {
                self.gate.shut();
                self.abandoned.cancel();
            }
            self.stop.cancel();
        }
    }

    pub(crate) fn ending(&self) -> Ending {
        *lock(&self.ending)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
