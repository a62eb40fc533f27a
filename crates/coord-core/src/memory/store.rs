//! The state, the lock around it, and what runs out when.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{broadcast, watch};
use tokio::time::Instant;

use super::discovery::LiveNode;
use super::lease::HeldLease;
use super::placement::OpenRequest;
use crate::discovery::NodeEvent;
use crate::lease::LeaseEvent;
use crate::placement::RequestEvent;
use crate::types::{
    ClusterName, Incarnation, LeaseName, NodeId, Origin, RequestId, Revision, StoredTable,
    TableName,
};
use crate::url::MEMORY_SCHEME;

/// How many events a watch of all nodes or all requests may fall behind before it gets a snapshot.
const EVENTS_MAX: usize = 256;

/// The stores that are open in this process, by cluster.
static STORES: LazyLock<Mutex<HashMap<ClusterName, Weak<Store>>>> = LazyLock::new(Mutex::default);

/// Counts the terms of all shared stores, so that they rise also after a store has gone.
static SHARED_TERMS: LazyLock<Arc<AtomicU64>> = LazyLock::new(Arc::default);

/// Tells the shared stores of two processes apart.
static PROCESS: LazyLock<Incarnation> = LazyLock::new(Incarnation::random);

/// One store of one cluster.
pub(super) struct Store {
    origin: Origin,
    state: Mutex<State>,
}

/// All that the store holds. Every step on it is a plain function that is given the time.
pub(super) struct State {
    pub(super) origin: Origin,
    terms: Arc<AtomicU64>,
    last_write: u64,
    pub(super) leases: BTreeMap<LeaseName, HeldLease>,
    pub(super) nodes: BTreeMap<NodeId, LiveNode>,
    pub(super) tables: BTreeMap<TableName, StoredTable>,
    pub(super) requests: BTreeMap<RequestId, OpenRequest>,
    expiries: BTreeSet<(Instant, Expiring)>,
    clock: WallClock,
    /// Each heartbeat is told, as an update.
    pub(super) shows_heartbeats: bool,
    pub(super) lease_events: HashMap<LeaseName, broadcast::Sender<LeaseEvent>>,
    pub(super) node_events: broadcast::Sender<NodeEvent>,
    pub(super) request_events: broadcast::Sender<RequestEvent>,
    /// Wakes the watches of tables, which look for themselves what changed.
    pub(super) table_changes: watch::Sender<()>,
}

/// How the wall clock of a store that has one goes.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WallClock {
    /// As time does.
    #[default]
    Right,
    /// It is fast by this much; what is written now runs out as much later. What was written before
    /// does not run out any sooner.
    Fast(Duration),
    /// It does not go on, so nothing runs out.
    Still,
    /// It is slow by this much, as one that was never set: what was written before runs out as much
    /// later, leases alone after their TTL at the latest. What is written now ends early, once the
    /// clock is right.
    Slow(Duration),
}

/// Something that runs out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Expiring {
    Lease(LeaseName),
    Node(NodeId),
    Request(RequestId),
}

impl Store {
    /// This process's store of that cluster.
    pub(super) fn shared(cluster: &ClusterName) -> Arc<Self> {
        let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(store) = stores.get(cluster).and_then(Weak::upgrade) {
            return store;
        }
        stores.retain(|_, store| store.strong_count() > 0);
        let store = Arc::new(Self::new(*PROCESS, cluster, Arc::clone(&SHARED_TERMS)));
        stores.insert(cluster.clone(), Arc::downgrade(&store));
        store
    }

    /// A store of its own.
    pub(super) fn isolated(cluster: &ClusterName) -> Arc<Self> {
        Arc::new(Self::new(Incarnation::random(), cluster, Arc::default()))
    }

    fn new(identity: Incarnation, cluster: &ClusterName, terms: Arc<AtomicU64>) -> Self {
        let origin = Origin::new(format!("{MEMORY_SCHEME}:{identity}/{cluster}"));
        let state = State {
            origin: origin.clone(),
            terms,
            last_write: 0,
            leases: BTreeMap::new(),
            nodes: BTreeMap::new(),
            tables: BTreeMap::new(),
            requests: BTreeMap::new(),
            expiries: BTreeSet::new(),
            clock: WallClock::Right,
            shows_heartbeats: false,
            lease_events: HashMap::new(),
            node_events: broadcast::Sender::new(EVENTS_MAX),
            request_events: broadcast::Sender::new(EVENTS_MAX),
            table_changes: watch::Sender::new(()),
        };
        Self { origin, state: Mutex::new(state) }
    }

    pub(super) fn origin(&self) -> &Origin {
        &self.origin
    }

    /// One atomic step on what has not run out. The time is read under the lock, so that it never
    /// goes back from one step to the next.
    pub(super) fn lock<T>(&self, step: impl FnOnce(&mut State, Instant) -> T) -> T {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        state.expire(now);
        step(&mut state, now)
    }
}

impl State {
    /// The store's part of the next term.
    pub(super) fn next_term(&mut self) -> u64 {
        self.terms.fetch_add(1, Ordering::Relaxed).saturating_add(1)
    }

    pub(super) fn rewind_terms(&mut self, store_part: u64) {
        self.terms = Arc::new(AtomicU64::new(store_part));
    }

    /// The number of the next write.
    pub(super) fn next_write(&mut self) -> u64 {
        self.last_write += 1;
        self.last_write
    }

    pub(super) fn last_write(&self) -> u64 {
        self.last_write
    }

    /// The mark of the next write.
    pub(super) fn next_revision(&mut self) -> Revision {
        Revision::from_u64(self.next_write())
    }

    /// When the next thing runs out.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        // It is looked at again by the next step, whatever that is.
        self.expiries.first().map(|(at, _)| *at).filter(|_| self.clock != WallClock::Still)
    }

    /// Moves the time at which something runs out; `None` is for what is not there.
    pub(super) fn set_expiry(
        &mut self,
        what: Expiring,
        before: Option<Instant>,
        after: Option<Instant>,
    ) {
        if let Some(before) = before {
            self.expiries.remove(&(before, what.clone()));
        }
        if let Some(after) = after {
            self.expiries.insert((after, what));
        }
    }

    /// Ends everything without saying why.
    pub(super) fn lose_data(&mut self) {
        while let Some(lease) = self.leases.keys().next().cloned() {
            self.delete_lease(&lease);
        }
        while let Some(node) = self.nodes.keys().next().cloned() {
            self.delete_node(&node);
        }
        while let Some(table) = self.tables.keys().next().cloned() {
            self.delete_table(&table);
        }
        while let Some(id) = self.requests.keys().next().copied() {
            self.expire_request(id);
        }
        self.expiries.clear();
    }

    pub(super) fn set_wall_clock(&mut self, clock: WallClock, now: Instant) {
        let before = std::mem::replace(&mut self.clock, clock);
        if let WallClock::Slow(by) = before {
            self.shift_expiries(|at| at.checked_sub(by).unwrap_or(now));
        }
        if let WallClock::Slow(by) = clock {
            self.shift_expiries(|at| at + by);
        }
        if matches!(clock, WallClock::Right | WallClock::Slow(_)) {
            for lease in self.leases.keys().cloned().collect::<Vec<_>>() {
                self.shorten_lease(&lease, now);
            }
        }
    }

    /// Ends what would end some day, as a clock does that jumps ahead.
    pub(super) fn run_out(&mut self, now: Instant) {
        self.shift_expiries(|at| at.min(now));
        self.expire(now);
    }

    fn shift_expiries(&mut self, shift: impl Fn(Instant) -> Instant) {
        for (before, what) in std::mem::take(&mut self.expiries) {
            let at = shift(before);
            match &what {
                Expiring::Lease(lease) => self.move_lease(lease, at),
                Expiring::Node(node) => self.move_node(node, at),
                Expiring::Request(_) => {}
            }
            self.expiries.insert((at, what));
        }
    }

    /// When something runs out that lasts so long from now, by the store's clock.
    pub(super) fn expiry(&self, now: Instant, ttl: Duration) -> Instant {
        match self.clock {
            WallClock::Fast(by) => now + by + ttl,
            WallClock::Right | WallClock::Still | WallClock::Slow(_) => now + ttl,
        }
    }

    /// Removes what has run out, and tells the watches.
    fn expire(&mut self, now: Instant) {
        if self.clock == WallClock::Still {
            return;
        }
        while let Some((at, _)) = self.expiries.first()
            && *at <= now
            && let Some((_, what)) = self.expiries.pop_first()
        {
            match what {
                Expiring::Lease(lease) => self.expire_lease(&lease),
                Expiring::Node(node) => self.expire_node(&node),
                Expiring::Request(id) => self.expire_request(id),
            }
        }
    }
}
