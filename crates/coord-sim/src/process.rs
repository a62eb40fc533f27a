//! One process: a runtime of its own, so that it can stand still and die as a whole.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coord_cluster::{Cluster, Settings};
use coord_core::random::Seeded;
use coord_core::{Address, Clock, NodeId, NodeInfo, Replace};
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;

use crate::invariants::ProcessId;
use crate::ledger::Service;
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
}

impl Island {
    /// A new one, which begins now.
    ///
    /// # Panics
    /// If the operating system gives no runtime.
    #[must_use]
    #[expect(clippy::expect_used, reason = "a simulation without a runtime can't go on")]
    pub fn new(time: WorldTime, seed: u64) -> Self {
        let mut builder = Builder::new_current_thread();
        builder.enable_time().start_paused(true);
        #[cfg(tokio_unstable)]
        builder.rng_seed(tokio::runtime::RngSeed::from_bytes(&seed.to_le_bytes()));
        let runtime = builder.build().expect("a runtime");
        let reached = time.ticks();
        Self { runtime: Some(runtime), random: Seeded::new(seed), time, reached }
    }

    /// Runs to the end of the world's present tick; what it missed is over at once.
    pub fn run(&mut self) {
        let Self { runtime, random, time, reached } = self;
        let Some(runtime) = runtime else { return };
        let now = time.ticks();
        let missed = at(now.saturating_sub(*reached));
        *reached = now + 1;
        random.scope(|| {
            runtime.block_on(async {
                if !missed.is_zero() {
                    tokio::time::advance(missed).await;
                }
                time.enter(Some(Instant::now()));
                tokio::time::sleep(TICK).await;
                time.enter(None);
            });
        });
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
}

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
        let Start { id, clock, remote, maps, settings, tables, replace, services } = start;
        let mut island = Island::new(time, seed);
        let slot = Slot::default();
        let mine = slot.clone();
        let remotes = [remote.clone(), maps.clone()];
        let hosts: Vec<_> = services.into_iter().map(Arc::new).collect();
        island.within(|runtime| {
            runtime.spawn(async move {
                loop {
                    let address =
                        Address::new(format!("10.0.0.{}:4000", id.node)).expect("an address");
                    let info = NodeInfo::new(node_id(id.node), address);
                    let stores = coord_cluster::Stores::new(&remote).with_placement(&maps);
                    let mut builder = Cluster::builder(stores, info)
                        .settings(settings.clone())
                        .clock(Arc::clone(&clock))
                        .replace(replace);
                    for (sheet, host) in tables.sheets().zip(&hosts) {
                        builder = builder
                            .table(sheet.name.clone(), sheet.header.clone())
                            .handoff(sheet.name.clone(), sheet.handoff)
                            .host(sheet.name.clone(), Arc::clone(host) as _);
                    }
                    match builder.start().await {
                        Ok(cluster) => {
                            mine.set(State::Joined(cluster.clone()));
                            // Its only way to end is to be told so, or to leave.
                            let _ = cluster.wait_for(|_| false).await;
                            let _ = cluster.shutdown().await;
                            mine.set(State::Ended);
                            return;
                        }
                        Err(_) => tokio::time::sleep(Duration::from_millis(300)).await,
                    }
                }
            });
        });
        Self { id, remotes, stalled_until: 0, island, slot }
    }

    /// Lets it run for the world's present tick, unless it stands still.
    pub fn run(&mut self, tick: u64) {
        if tick >= self.stalled_until {
            self.island.run();
        }
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
