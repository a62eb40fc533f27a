//! Whole clusters of thousands of nodes in one process, over the memory backend on paused time: what they
//! cost, and how that grows.
//!
//! ```text
//!   start ─► idle ─► a zone is lost ─► another stops ─► rolling restart of some nodes
//!      each phase: calls on the store, events told, versions, bytes, moves, processor time
//! ```
//!
//! Every node is a real [`Cluster`] with its own tasks. All share the process's one copy of each map, since
//! the memory backend hands out what was published; the [`Meter`] encodes and decodes each version once, as
//! a real backend and one of its watchers would. Nodes have no host: shards start and stop at once.

mod meter;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use coord_cluster::{Cluster, Settings, Status, Table};
use coord_core::{
    Address, ClusterName, Error, ErrorKind, Label, MemoryBackend, NodeId, NodeInfo, NodeStatus,
    Result, ShardCount, ShardMap, TableName, TokioClock,
};
use futures::future::{join_all, try_join_all};

pub use self::meter::{Counts, Meter, Versions};

/// Longer than any phase takes, on paused time.
const PHASE_MAX: Duration = Duration::from_secs(3600);

/// How large, and what happens.
#[derive(Clone, Debug)]
pub struct Scale {
    /// How many nodes.
    pub nodes: u32,
    /// How many shards, of one table.
    pub shards: ShardCount,
    /// How many zones the nodes are spread over, at least 3; the last is lost, the one before it stops.
    pub zones: u32,
    /// How many nodes stand for election.
    pub candidates: u32,
    /// How many nodes are restarted.
    pub restarts: u32,
    /// How many of them at once.
    pub at_once: u32,
    /// How long nothing happens.
    pub idle: Duration,
    /// What happens once all have started, in this order.
    pub then: Vec<Then>,
}

/// What happens to a cluster that has started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Then {
    /// Nothing.
    Idle,
    /// Every node of the last zone dies at once. Each is missed when its own registration has run out.
    ZoneLost,
    /// Every node of the last zone but one ends at once, and says so.
    ZoneStopped,
    /// Some nodes leave in good order and come back, some at once.
    Restart,
}

impl Then {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Idle, Self::ZoneLost, Self::ZoneStopped, Self::Restart];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::ZoneLost => "zone lost",
            Self::ZoneStopped => "zone stopped",
            Self::Restart => "restart",
        }
    }
}

impl Scale {
    /// Ten zones, five candidates, and one node of a hundred restarted, one of a thousand at once.
    #[must_use]
    pub fn new(nodes: u32, shards: ShardCount) -> Self {
        let (restarts, at_once) = ((nodes / 100).max(1), (nodes / 1000).max(1));
        let idle = Duration::from_secs(600);
        let then = Then::ALL.to_vec();
        Self { nodes, shards, zones: 10, candidates: 5, restarts, at_once, idle, then }
    }
}

/// What one phase came to.
#[derive(Clone, Debug)]
pub struct Phase {
    /// Which.
    pub name: &'static str,
    /// How many nodes lived in it.
    pub nodes: u32,
    /// How long it took, on the cluster's clock.
    pub took: Duration,
    /// Processor time of the whole process, without what the meter spent.
    pub cpu: Duration,
    /// What the store was asked and told.
    pub counts: Counts,
    /// The fewest moves that it could take.
    pub fewest_moves: u64,
    /// Resident memory at its end, bytes; 0 where that is not known.
    pub resident: u64,
}

/// The table that is sharded.
///
/// # Errors
/// None: the name is a good one.
pub fn table() -> Result<TableName> {
    TableName::new("orders")
}

/// Processor time that this process has used.
#[must_use]
pub fn cpu_time() -> Duration {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(spent).unwrap_or_default()
}

/// Resident memory of this process in bytes; 0 where the system does not tell.
#[must_use]
pub fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or_default() * 1024
}

/// Starts all nodes, and does what is to happen then; each phase is told as soon as it is over. It wants a runtime of one thread on paused time.
///
/// # Errors
/// As a node's start, and `Internal` where the cluster does not settle or its nodes do not agree.
pub async fn run(scale: &Scale, mut tell: impl FnMut(&Phase)) -> Result<Vec<Phase>> {
    let mut world = World::new(scale)?;
    let mut phases = Vec::new();
    let mut over = |phase: Phase| {
        tell(&phase);
        phases.push(phase);
    };
    world.begin();
    world.start_all().await?;
    over(world.end("start", 0)?);
    for then in &scale.then {
        world.begin();
        let fewest = match then {
            Then::Idle => {
                tokio::time::sleep(scale.idle).await;
                0
            }
            Then::ZoneLost => world.lose_zone().await?,
            Then::ZoneStopped => world.stop_zone().await?,
            Then::Restart => world.restart().await?,
        };
        over(world.end(then.as_str(), fewest)?);
    }
    Ok(phases)
}

struct World<'a> {
    scale: &'a Scale,
    table: TableName,
    meter: Meter,
    nodes: BTreeMap<u32, Cluster>,
    began: (tokio::time::Instant, Duration),
}

impl<'a> World<'a> {
    fn new(scale: &'a Scale) -> Result<Self> {
        let meter = Meter::new(MemoryBackend::isolated(ClusterName::new("scale")?));
        let began = (tokio::time::Instant::now(), Duration::ZERO);
        Ok(Self { scale, table: table()?, meter, nodes: BTreeMap::new(), began })
    }

    fn begin(&mut self) {
        let _ = self.meter.take();
        self.began = (tokio::time::Instant::now(), cpu_time());
    }

    fn end(&self, name: &'static str, fewest_moves: u64) -> Result<Phase> {
        let cpu = cpu_time().saturating_sub(self.began.1);
        self.check()?;
        let counts = self.meter.take();
        let metering: Duration = counts.tables.values().map(|table| table.metering).sum();
        Ok(Phase {
            name,
            nodes: u32::try_from(self.nodes.len()).unwrap_or(u32::MAX),
            took: self.began.0.elapsed(),
            cpu: cpu.saturating_sub(metering),
            counts,
            fewest_moves,
            resident: resident(),
        })
    }

    fn zone(&self, node: u32) -> u32 {
        node % self.scale.zones
    }

    async fn start(&self, node: u32) -> Result<Cluster> {
        let id = NodeId::new(format!("node-{node:05}"))?;
        let address = Address::new(format!("10.0.{}.{}:4000", node / 250, node % 250))?;
        let zone = Label::new(format!("zone-{}", self.zone(node)))?;
        let mut settings = Settings::default();
        settings.min_members = self.scale.nodes;
        settings.candidates = self.scale.candidates;
        Cluster::builder(&self.meter, NodeInfo::new(id, address).with_zone(zone))
            .settings(settings)
            .table(Table::new(self.table.clone()).shards(self.scale.shards))
            .clock(Arc::new(TokioClock::new()))
            .start()
            .await
    }

    async fn start_all(&mut self) -> Result<()> {
        for node in 0..self.scale.nodes {
            let cluster = self.start(node).await?;
            self.nodes.insert(node, cluster);
        }
        self.settle().await
    }

    /// Waits until all nodes that live are in, and nothing moves any more.
    async fn settle(&self) -> Result<()> {
        let observer = self.nodes.values().next().ok_or_else(|| wrong("no node lives"))?;
        let live = self.nodes.len();
        let settled =
            |status: &Status| status.is_settled() && status.count(NodeStatus::Active) == live;
        let waited = tokio::time::timeout(PHASE_MAX, observer.wait_for(settled)).await;
        waited
            .map_err(|_elapsed| wrong(format!("not settled: {:?}", observer.status().state)))??;
        // Those that hear of it after the observer.
        tokio::time::sleep(Duration::from_millis(1)).await;
        Ok(())
    }

    /// All nodes see the same map, and every node has its share of it.
    fn check(&self) -> Result<()> {
        let maps = self.nodes.values().map(|node| node.map(&self.table));
        let maps: Vec<_> = maps.collect::<Option<_>>().ok_or_else(|| wrong("a map is missing"))?;
        let first: &Arc<ShardMap> = maps.first().ok_or_else(|| wrong("no node lives"))?;
        if let Some(other) = maps.iter().find(|map| map.version() != first.version()) {
            return Err(wrong(format!("{} and {} are seen", first.version(), other.version())));
        }
        let counts = first.counts().into_iter().filter(|count| *count > 0);
        let (low, high) = counts.clone().fold((u32::MAX, 0), |(l, h), c| (l.min(c), h.max(c)));
        if high - low > 1 || counts.count() != self.nodes.len() {
            return Err(wrong(format!("shares from {low} to {high}")));
        }
        Ok(())
    }

    fn map(&self) -> Result<Arc<ShardMap>> {
        let map = self.nodes.values().next().and_then(|node| node.map(&self.table));
        map.ok_or_else(|| wrong("no map"))
    }

    async fn lose_zone(&mut self) -> Result<u64> {
        let (fewest, lost) = self.take_zone(self.scale.zones - 1)?;
        lost.iter().for_each(Cluster::abandon);
        self.settle().await?;
        Ok(fewest)
    }

    async fn stop_zone(&mut self) -> Result<u64> {
        let (fewest, stopped) = self.take_zone(self.scale.zones - 2)?;
        for ended in join_all(stopped.iter().map(Cluster::shutdown)).await {
            ended?;
        }
        self.settle().await?;
        Ok(fewest)
    }

    /// The nodes of a zone, and how many shards they have: the others only gain, so no more has to move.
    fn take_zone(&mut self, lost: u32) -> Result<(u64, Vec<Cluster>)> {
        let before = self.map()?;
        let zone = Label::new(format!("zone-{lost}"))?;
        let lost_nodes = before.nodes().iter().zip(before.counts());
        let orphans: u64 = lost_nodes
            .filter(|(node, _)| node.as_ref().is_some_and(|node| node.zone.as_ref() == Some(&zone)))
            .map(|(_, count)| u64::from(count))
            .sum();
        let of_zone: Vec<u32> =
            self.nodes.keys().copied().filter(|node| self.zone(*node) == lost).collect();
        let lost = of_zone.iter().filter_map(|node| self.nodes.remove(node)).collect();
        Ok((orphans, lost))
    }

    async fn restart(&mut self) -> Result<u64> {
        let mut fewest = 0;
        let chosen: Vec<u32> = {
            // The leader stays: what a new one costs is another matter.
            let nodes = self.nodes.iter().filter(|(_, node)| !node.is_leader());
            let nodes = nodes.map(|(node, _)| *node);
            nodes.take(usize::try_from(self.scale.restarts).unwrap_or(usize::MAX)).collect()
        };
        for wave in chosen.chunks(usize::try_from(self.scale.at_once).unwrap_or(1).max(1)) {
            let counts = self.map()?;
            let leaving: Vec<Cluster> =
                wave.iter().filter_map(|node| self.nodes.remove(node)).collect();
            let slots = leaving.iter().filter_map(|node| counts.slot_of(node.node())?.index());
            let held: u64 = slots.map(|slot| u64::from(counts.counts()[slot])).sum();
            for left in join_all(leaving.iter().map(Cluster::leave)).await {
                left?;
            }
            self.settle().await?;
            let back = try_join_all(wave.iter().map(|node| self.start(*node))).await?;
            self.nodes.extend(wave.iter().copied().zip(back));
            self.settle().await?;
            // What they had leaves, and their shares, rounded down, come back.
            let (nodes, shards) = (self.nodes.len(), self.scale.shards.get());
            let share = u64::from(shards) / u64::try_from(nodes).unwrap_or(u64::MAX);
            fewest += held + share * u64::try_from(wave.len()).unwrap_or(0);
        }
        Ok(fewest)
    }
}

impl fmt::Debug for World<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("scale", self.scale).finish_non_exhaustive()
    }
}

fn wrong(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::Internal, "scale").effect_none().message(why.into())
}
