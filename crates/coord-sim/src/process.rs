//! One process: a runtime of its own, so that it can stand still and die as a whole.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;
use std::time::Duration;

use coord_cluster::{Cluster, Settings, Table};
use coord_core::random::Seeded;
use coord_core::{Address, Clock, NodeId, NodeInfo, Replace};
use coord_placement::PlacementStrategy;
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;

use crate::invariants::ProcessId;
use crate::keep;
use crate::ledger::Service;
use crate::mail::Asker;
use crate::peers::Peers;
use crate::tables::Tables;
use crate::time::{TICK, WorldTime, at};
use crate::wire::Remote;

/// A runtime that runs only when the world lets it, and draws what it draws from a seed.
pub struct Island {
    /// None once it is gone.
    runtime: Option<Runtime>,
    random: Seeded,
    time: WorldTime,
    /// Up to which tick it has run.
    reached: u64,
    /// What it has not run of its last tick.
    owed: Duration,
    /// Until when it is kept by code that does not yield, and what goes on then.
    kept: Option<(u64, Vec<Waker>)>,
}

impl Island {
    /// A new one, which begins now.
    ///
    /// # Panics
    /// If the operating system gives no runtime.
    #[must_use]
    pub fn new(time: WorldTime, seed: u64) -> Self {
        Self::with(time, seed, |_| {})
    }

    /// A new one that may be [kept](crate::keep).
    ///
    /// # Panics
    /// If the operating system gives no runtime.
    #[must_use]
    pub fn that_may_be_kept(time: WorldTime, seed: u64) -> Self {
        // Nothing else is polled once something keeps it.
        Self::with(time, seed, |builder| {
            builder.event_interval(1);
        })
    }

    #[expect(clippy::expect_used, reason = "a simulation without a runtime can't go on")]
    fn with(time: WorldTime, seed: u64, set_up: impl FnOnce(&mut Builder)) -> Self {
        let mut builder = Builder::new_current_thread();
        builder.enable_time().start_paused(true);
        set_up(&mut builder);
        #[cfg(tokio_unstable)]
        builder.rng_seed(tokio::runtime::RngSeed::from_bytes(&seed.to_le_bytes()));
        let runtime = builder.build().expect("a runtime");
        let reached = time.ticks();
        let random = Seeded::new(seed);
        Self { runtime: Some(runtime), random, time, reached, owed: Duration::ZERO, kept: None }
    }

    /// Whether code that does not yield keeps it now.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// How many tasks there are in it.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.runtime.as_ref().map_or(0, |runtime| runtime.metrics().num_alive_tasks())
    }

    /// Runs to the end of the world's present tick; what it missed is over at once.
    pub fn run(&mut self) {
        let Self { runtime, random, time, reached, owed, kept } = self;
        let Some(runtime) = runtime else { return };
        let now = time.ticks();
        if kept.as_ref().is_some_and(|(until, _)| now < *until) {
            return;
        }
        for waker in kept.take().into_iter().flat_map(|(_, by)| by) {
            waker.wake();
        }
        let missed = at(now.saturating_sub(*reached)) + *owed;
        *reached = now + 1;
        random.scope(|| {
            runtime.block_on(async {
                if !missed.is_zero() {
                    tokio::time::advance(missed).await;
                }
                let began = Instant::now();
                time.enter(Some(began));
                tokio::select! {
                    biased;
                    () = tokio::time::sleep(TICK) => {}
                    () = keep::kept() => {}
                }
                *owed = TICK.saturating_sub(began.elapsed());
                time.enter(None);
            });
        });
        *kept = keep::take();
    }

    /// Does something in it that needs its runtime.
    pub fn within<T>(&mut self, step: impl FnOnce(&Runtime) -> T) -> Option<T> {
        let Self { runtime, random, .. } = self;
        let runtime = runtime.as_ref()?;
        Some(random.scope(|| step(runtime)))
    }
}

impl Drop for Island {
    fn drop(&mut self) {
        let runtime = self.runtime.take();
        self.random.scope(|| drop(runtime));
    }
}

impl fmt::Debug for Island {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Island").field("reached", &self.reached).finish_non_exhaustive()
    }
}

/// What a process makes of its node.
#[derive(Clone, Debug, Default)]
struct Slot(Arc<Mutex<State>>);

#[derive(Debug, Default)]
enum State {
    #[default]
    Joining,
    Joined(Cluster),
    Ended,
}

/// How a process is started.
#[derive(Debug)]
pub struct Start {
    /// Which one.
    pub id: ProcessId,
    /// Its clock.
    pub clock: Arc<dyn Clock>,
    /// Its client of the store for leases and nodes.
    pub remote: Remote,
    /// Its client of the store for maps.
    pub maps: Remote,
    /// The settings of all.
    pub settings: Settings,
    /// The world's tables.
    pub tables: Tables,
    /// Whether it takes the place of another process of its node.
    pub replace: Replace,
    /// What it hosts with, table by table.
    pub services: Vec<Service>,
    /// What it has besides, in a world that is not plain.
    pub besides: Option<Besides>,
}

/// What processes have in worlds that are not plain.
#[derive(Debug)]
pub struct Besides {
    /// How it reaches the others.
    pub peers: Peers,
    /// Who asks the shards.
    pub asker: Option<Asker>,
    /// Whether it asks the others whether they are there.
    pub probes: bool,
    /// What places the shards, if not the usual one.
    pub strategy: Option<Arc<dyn PlacementStrategy>>,
}

/// How many threads of a process work out messages.
const WORKERS: u64 = 4;

/// A process that runs a node.
#[derive(Debug)]
pub struct Process {
    /// Which one.
    pub id: ProcessId,
    /// Its ways to the stores.
    pub remotes: [Remote; 2],
    /// It stands still until then.
    pub stalled_until: u64,
    island: Island,
    /// Its threads for messages.
    workers: Vec<Island>,
    slot: Slot,
}

/// The name of a node.
///
/// # Panics
/// Never: the name is well formed.
#[must_use]
#[expect(clippy::expect_used, reason = "the name is well formed")]
pub fn node_id(node: usize) -> NodeId {
    NodeId::new(format!("n{node}")).expect("a name")
}

impl Process {
    /// Starts one; it joins as soon as it can.
    ///
    /// # Panics
    /// Never: its address is well formed.
    #[must_use]
    #[expect(clippy::expect_used, reason = "the address is well formed")]
    pub fn start(start: Start, time: WorldTime, seed: u64) -> Self {
        let Start { id, clock, remote, maps, settings, tables, replace, services, besides } = start;
        let (mut island, mut workers) = match &besides {
            None => (Island::new(time, seed), Vec::new()),
            Some(_) => {
                let island = |seed| Island::that_may_be_kept(time.clone(), seed);
                (island(seed), (1..=WORKERS).map(|it| island(seed.wrapping_add(it))).collect())
            }
        };
        let address = Address::new(format!("10.0.0.{}:4000", id.node)).expect("an address");
        let handles = workers.iter_mut().filter_map(|it| it.within(|rt| rt.handle().clone()));
        let handles = handles.collect();
        let end = besides.as_ref().map(|it| it.peers.end(address.clone(), id, handles));
        let slot = Slot::default();
        let mine = slot.clone();
        let remotes = [remote.clone(), maps.clone()];
        let hosts: Vec<_> = services.into_iter().map(Arc::new).collect();
        island.within(|runtime| {
            runtime.spawn(async move {
                loop {
                    let info = NodeInfo::new(node_id(id.node), address.clone());
                    let stores = coord_cluster::Stores::new(&remote).with_placement(&maps);
                    let mut builder = Cluster::builder(stores, info)
                        .settings(settings.clone())
                        .clock(Arc::clone(&clock))
                        .replace(replace);
                    let asker = besides.as_ref().and_then(|besides| besides.asker.as_ref());
                    let strategy = besides.as_ref().and_then(|besides| besides.strategy.clone());
                    for (sheet, host) in tables.sheets().zip(&hosts) {
                        let mut table = Table::new(sheet.name.clone())
                            .shards(sheet.header.shards)
                            .replicas(sheet.header.replicas)
                            .handoff(sheet.handoff);
                        if let Some(strategy) = &strategy {
                            table = table.strategy(Arc::clone(strategy));
                        }
                        table = match asker {
                            Some(_) => table.handler(Arc::clone(host) as _),
                            None => table.host(Arc::clone(host) as _),
                        };
                        builder = builder.table(table);
                    }
                    if let (Some(end), Some(besides)) = (&end, &besides) {
                        if asker.is_some() {
                            builder = builder.transport(Arc::new(end.clone()));
                        }
                        if besides.probes {
                            builder = builder.probe(Arc::new(end.clone()));
                        }
                    }
                    match builder.start().await {
                        Ok(cluster) => {
                            mine.set(State::Joined(cluster.clone()));
                            let asks = asker.map(|asker| asker.ask(cluster.clone()));
                            // Its only way to end is to be told so, or to leave.
                            let _ = cluster.wait_for(|_| false).await;
                            drop(asks);
                            let _ = cluster.shutdown().await;
                            mine.set(State::Ended);
                            return;
                        }
                        Err(_) => tokio::time::sleep(Duration::from_millis(300)).await,
                    }
                }
            });
        });
        Self { id, remotes, stalled_until: 0, island, workers, slot }
    }

    /// Lets it run for the world's present tick, unless it stands still.
    pub fn run(&mut self, tick: u64) {
        if tick >= self.stalled_until {
            self.island.run();
            self.workers.iter_mut().for_each(Island::run);
        }
    }

    /// Whether its node's thread is kept, and which of those for messages.
    #[must_use]
    pub fn kept(&self) -> (bool, Vec<bool>) {
        (self.island.is_kept(), self.workers.iter().map(Island::is_kept).collect())
    }

    /// How many tasks it has, on the thread of its node and on those for messages.
    #[must_use]
    pub fn tasks(&self) -> (usize, usize) {
        (self.island.tasks(), self.workers.iter().map(Island::tasks).sum())
    }

    /// Its handle, once it has joined.
    #[must_use]
    pub fn cluster(&self) -> Option<Cluster> {
        match &*self.slot.lock() {
            State::Joined(cluster) => Some(cluster.clone()),
            _ => None,
        }
    }

    /// Whether its node has left, and the process is over.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        matches!(&*self.slot.lock(), State::Ended)
    }

    /// Does something with its node, in its own time.
    pub fn spawn<F>(&mut self, work: impl FnOnce(Cluster) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        if let Some(cluster) = self.cluster() {
            self.island.within(|runtime| runtime.spawn(work(cluster)));
        }
    }
}

impl Slot {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, state: State) {
        let former = std::mem::replace(&mut *self.lock(), state);
        drop(former);
    }
}
