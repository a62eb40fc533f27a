//! What must hold at every step, one invariant a file.

mod epochs;
mod evicted;
mod i1;
mod i2;
mod i3;
mod i4;
mod i5;
mod i6;
mod unbroken;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coord_cluster::ShardToken;
use coord_core::{Fence, Grant, Incarnation, NodeId, ShardMap, TableName, TableUid};

use crate::tables::{Place, Tables};
use crate::time::WorldTime;

/// One process of the world: which node it runs, and its number among all processes ever started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessId {
    /// The node's number.
    pub node: usize,
    /// Counted through the whole world.
    pub run: u32,
}

impl fmt::Display for ProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "n{} (process {})", self.node, self.run)
    }
}

/// Who believes to lead at one moment.
#[derive(Clone, Debug)]
pub struct Leading {
    /// Which process.
    pub process: ProcessId,
    /// Under which fence.
    pub fence: Fence,
    /// Whether it holds itself for registered.
    pub registered: bool,
}

/// The runs that are registered.
pub type Runs = BTreeSet<(NodeId, Incarnation)>;

/// Something that happened, as the world sees it.
#[derive(Debug)]
pub enum Seen<'a> {
    /// The store told somebody that a lease is theirs.
    Granted(&'a Grant),
    /// The store told somebody that a table is claimed, in this life of it.
    Claimed(&'a TableName, TableUid, &'a Fence),
    /// The store told somebody that this run is registered now.
    Registered(&'a NodeId, Incarnation),
    /// The store told somebody that the registration of this run goes on.
    Renewed(&'a NodeId, Incarnation),
    /// The store told somebody that this run is evicted.
    Evicted(&'a NodeId, Incarnation),
    /// The store told somebody that a map is published, while these are registered.
    Published(&'a TableName, &'a Fence, &'a Arc<ShardMap>, &'a Runs),
    /// All who lead now, by their own clocks.
    Leaders(&'a [Leading]),
    /// A process begins to host a shard while these may act for it too.
    Started(Place, ProcessId, &'a [ProcessId]),
    /// Somebody deletes a lease that may be held.
    LeaseVanishes,
    /// A process hands a message to a shard while these may act for it too.
    Handles(Place, ProcessId, &'a [ProcessId]),
    /// A process has made a shard ready.
    Ready(Place, ProcessId),
    /// A process shows its token to what the shard writes to.
    Wrote(ProcessId, &'a ShardToken),
}

/// One invariant, and what it remembers.
trait Invariant: Send {
    fn name(&self) -> &'static str;
    /// How what is seen breaks it.
    fn see(&mut self, seen: &Seen<'_>, now: Duration) -> Option<String>;
}

/// An invariant that did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// When, since the world began.
    pub at: Duration,
    /// Which.
    pub invariant: String,
    /// How.
    pub why: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {:?}: {} is broken: {}", self.at, self.invariant, self.why)
    }
}

/// All invariants of one world; clones are the same.
#[derive(Clone)]
pub struct Judge(Arc<Mutex<State>>);

struct State {
    time: WorldTime,
    invariants: Vec<Box<dyn Invariant>>,
    broken: Vec<Broken>,
}

impl Judge {
    /// Nothing was seen yet.
    #[must_use]
    pub fn new(time: WorldTime, leader_ttl: Duration, tables: &Tables) -> Self {
        let invariants: Vec<Box<dyn Invariant>> = vec![
            Box::new(i1::I1::new(leader_ttl)),
            Box::new(i2::I2::default()),
            Box::new(i3::I3::default()),
            Box::new(i4::I4::default()),
            Box::new(i5::I5::new(leader_ttl)),
            Box::new(i6::I6(tables.clone())),
            Box::new(unbroken::Unbroken::new(tables.clone())),
            Box::new(epochs::Epochs::default()),
            Box::new(evicted::Evicted::default()),
        ];
        Self(Arc::new(Mutex::new(State { time, invariants, broken: Vec::new() })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows what happened to every invariant.
    pub fn see(&self, seen: &Seen<'_>) {
        let mut state = self.lock();
        let now = state.time.elapsed();
        let State { invariants, broken, .. } = &mut *state;
        for invariant in invariants {
            if let Some(why) = invariant.see(seen, now) {
                broken.push(Broken { at: now, invariant: invariant.name().to_owned(), why });
            }
        }
    }

    /// Something else was found to be wrong.
    pub fn wrong(&self, invariant: impl Into<String>, why: impl Into<String>) {
        let mut state = self.lock();
        let at = state.time.elapsed();
        state.broken.push(Broken { at, invariant: invariant.into(), why: why.into() });
    }

    /// The first invariant that was broken.
    #[must_use]
    pub fn broken(&self) -> Option<Broken> {
        self.lock().broken.first().cloned()
    }
}

impl fmt::Debug for Judge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Judge").field("broken", &self.lock().broken).finish_non_exhaustive()
    }
}

/// The newest map of each table, for those that compare with it.
type Newest = BTreeMap<TableName, Arc<ShardMap>>;
