//! One world: its nodes, its stores, and what happens to them, all from one seed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use coord_cluster::{Command, Settings, Status};
use coord_conformance::faults::Faulty;
use coord_conformance::history::{Recorder, What};
use coord_core::{
    Backend, ClusterName, Fence, MemoryBackend, NodeStatus, Placement, Replace, ShardCount,
    ShardMap, TableHeader, TableName, Version,
};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use crate::books::Books;
use crate::invariants::{Broken, Judge, Leading, ProcessId, Seen};
use crate::ledger::{Ledger, Service};
use crate::plants::Plant;
use crate::process::{Island, Process, Start, node_id};
use crate::time::{ProcessClock, WorldTime, at, ticks};
use crate::wire::{Remote, Weather, Wire};

/// How long faults happen.
const SAFETY: Duration = Duration::from_secs(40);
/// Within so long after the last fault everything has to be in order.
const CONVERGENCE: Duration = Duration::from_secs(30);
/// For so long it then has to stay so.
const QUIET: Duration = Duration::from_secs(2);
/// How often a node's operator looks after it while the world heals.
const OPERATOR: Duration = Duration::from_secs(2);

/// What came of a world.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// Its seed.
    pub seed: u64,
    /// The first thing that was wrong.
    pub broken: Option<Broken>,
    /// A digest of all that happened.
    pub digest: u64,
    /// How long after the last fault it took to be in order.
    pub healed_after: Duration,
    /// How many terms there were, and how many maps were published.
    pub terms: usize,
    /// The version of the map at the end.
    pub version: u64,
    /// How many faults there were.
    pub faults: u32,
}

/// One node, and the processes that run it: two while one takes the other's place.
#[derive(Debug, Default)]
struct Node {
    processes: Vec<Process>,
    restart_at: Option<u64>,
}

/// A world under way.
#[derive(Debug)]
pub struct World {
    seed: u64,
    random: StdRng,
    time: WorldTime,
    wire: Wire,
    judge: Judge,
    recorder: Recorder,
    ledger: Ledger,
    plant: Option<Plant>,
    store: Island,
    /// The store stands still until then.
    store_stalled_until: u64,
    /// For leases and nodes, and for maps: often the same.
    backends: [Arc<dyn Backend>; 2],
    nodes: Vec<Node>,
    settings: Settings,
    table: (TableName, TableHeader),
    runs: u32,
    /// When the faults of a process end.
    heals: BTreeMap<ProcessId, u64>,
    tenures: BTreeMap<ProcessId, Fence>,
    terms: usize,
    faults: u32,
    tracing: bool,
}

fn settings(random: &mut StdRng) -> Settings {
    let mut settings = Settings::demo();
    settings.remove_after = Duration::from_secs(8);
    settings.rebalance_check = Duration::from_secs(2);
    settings.handoff_timeout = Duration::from_secs(3);
    settings.min_members = random.random_range(1..=2);
    settings
}

impl World {
    /// The world of this seed, perhaps with a bug in it.
    ///
    /// # Panics
    /// Never: its names are well formed.
    #[must_use]
    #[expect(clippy::expect_used, reason = "the names are well formed")]
    pub fn new(seed: u64, plant: Option<Plant>, tracing: bool) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let time = WorldTime::default();
        let wire = Wire::new(time.clone(), random.random());
        let settings = settings(&mut random);
        let judge = Judge::new(time.clone(), settings.leader_ttl);
        let recorder = Recorder::new(Arc::new(time.clone()));
        let mut store = Island::new(time.clone(), random.random());
        let opened = store.within(|_| {
            let cluster = ClusterName::new("sim").expect("a name");
            [MemoryBackend::isolated(cluster.clone()), MemoryBackend::isolated(cluster)]
        });
        let [one, other] = opened.expect("the store's runtime is there");
        let kept = (judge.clone(), recorder.clone(), wire.clone());
        let books = Books::new(kept, one.discovery(), plant);
        // With maps in another store, nothing but claims keeps a former leader from writing.
        let maps = if random.random_bool(0.5) { other } else { one.clone() };
        let booked = |backend: MemoryBackend| Arc::new(books.around(Arc::new(backend))) as _;
        let backends = [booked(one), booked(maps)];
        let shards = ShardCount::new(random.random_range(8..=32)).expect("a count");
        let table = (TableName::new("things").expect("a name"), TableHeader::new(shards));
        let nodes = random.random_range(3..=6);
        Self {
            seed,
            random,
            time,
            wire,
            judge,
            recorder,
            ledger: Ledger::new(),
            plant,
            store,
            store_stalled_until: 0,
            backends,
            nodes: (0..nodes).map(|_| Node::default()).collect(),
            settings,
            table,
            runs: 0,
            heals: BTreeMap::new(),
            tenures: BTreeMap::new(),
            terms: 0,
            faults: 0,
            tracing,
        }
    }

    /// Lets it happen, up to the first thing that is wrong.
    #[must_use]
    pub fn run(mut self) -> Outcome {
        for node in 0..self.nodes.len() {
            let start = self.random.random_range(0..80);
            self.nodes[node].restart_at = Some(start);
        }
        let mut healed_after = Duration::ZERO;
        let safety = ticks(SAFETY);
        while self.time.ticks() < safety && self.judge.broken().is_none() {
            self.mischief();
            self.tick();
        }
        if self.judge.broken().is_none() {
            healed_after = self.heal();
        }
        if self.judge.broken().is_none() {
            for violation in self.recorder.history().check() {
                self.judge.wrong(format!("history: {}", violation.rule), violation.text);
            }
        }
        let version = self.newest().map_or(0, |map| map.version().get());
        Outcome {
            seed: self.seed,
            broken: self.judge.broken(),
            digest: self.wire.digest(),
            healed_after,
            terms: self.terms,
            version,
            faults: self.faults,
        }
    }

    #[expect(clippy::print_stderr, reason = "a replayed seed is read on the terminal")]
    fn trace(&self, what: impl FnOnce() -> String) {
        if self.tracing {
            eprintln!("{:>9.3} s  {}", self.time.elapsed().as_secs_f64(), what());
        }
    }

    fn tick(&mut self) {
        let now = self.time.ticks();
        self.wire.deliver();
        if now >= self.store_stalled_until {
            self.store.run();
        }
        self.restarts(now);
        let mut order: Vec<(usize, usize)> = Vec::new();
        for (number, node) in self.nodes.iter().enumerate() {
            order.extend((0..node.processes.len()).map(|at| (number, at)));
        }
        order.shuffle(&mut self.random);
        for (node, at) in order {
            let process = &mut self.nodes[node].processes[at];
            process.run(now);
            if now >= process.stalled_until {
                self.ledger.write(process.id, &self.judge);
            }
        }
        self.leaders();
        self.endings(now);
        self.time.advance();
    }

    /// Who leads, by their own clocks.
    fn leaders(&mut self) {
        let mut leaders = Vec::new();
        for process in self.nodes.iter().flat_map(|node| &node.processes) {
            let Some(cluster) = process.cluster() else { continue };
            if let Some(fence) = cluster.fence() {
                let registered = cluster.status().registered.is_some();
                leaders.push(Leading { process: process.id, fence, registered });
            }
        }
        self.judge.see(&Seen::Leaders(&leaders));
        let now: BTreeMap<_, _> =
            leaders.into_iter().map(|leading| (leading.process, leading.fence)).collect();
        if now == self.tenures {
            return;
        }
        let moment = coord_core::Moment::from_origin(self.time.elapsed());
        for (process, fence) in &self.tenures {
            if now.get(process) != Some(fence) {
                let (who, how) = (process.to_string(), "leads no more".to_owned());
                let holds = What::Holds { fence: fence.clone(), until: moment };
                self.recorder.record(who.clone(), holds);
                self.recorder.record(who, What::Ended { fence: fence.clone(), how });
            }
        }
        for (process, fence) in &now {
            if self.tenures.get(process) != Some(fence) {
                self.terms += 1;
                self.wire.note(fence.term.get());
                self.trace(|| format!("{process} leads in term {}", fence.term));
                let until = moment.plus(self.settings.leader_ttl);
                self.recorder
                    .record(process.to_string(), What::Holds { fence: fence.clone(), until });
            }
        }
        self.tenures = now;
    }

    /// Processes that are over are started again, by and by.
    fn endings(&mut self, now: u64) {
        for node in 0..self.nodes.len() {
            let ended = self.nodes[node].processes.iter().position(Process::has_ended);
            if let Some(index) = ended {
                let process = self.nodes[node].processes.remove(index);
                self.bury(process);
                if self.nodes[node].processes.is_empty() {
                    let pause = self.random.random_range(4..80);
                    self.nodes[node].restart_at = Some(now + pause);
                }
            }
        }
        let due: Vec<_> =
            self.heals.iter().filter(|(_, until)| **until <= now).map(|(id, _)| *id).collect();
        for id in due {
            self.heals.remove(&id);
            self.trace(|| format!("{id} is reached again"));
            for process in self.nodes[id.node].processes.iter().filter(|it| it.id == id) {
                clear(process);
            }
        }
    }

    fn bury(&mut self, process: Process) {
        let id = process.id;
        self.trace(|| format!("{id} is gone"));
        self.heals.remove(&id);
        drop(process);
        self.ledger.died(id);
    }

    fn restarts(&mut self, now: u64) {
        for node in 0..self.nodes.len() {
            if self.nodes[node].restart_at.is_some_and(|at| at <= now) {
                self.nodes[node].restart_at = None;
                let replace = self.random.random_bool(0.3);
                self.start(node, if replace { Replace::Yes } else { Replace::No });
            }
        }
    }

    fn start(&mut self, node: usize, replace: Replace) {
        self.runs += 1;
        let id = ProcessId { node, run: self.runs };
        self.trace(|| format!("{id} starts, replace {replace:?}"));
        let random = &mut self.random;
        let offset = Duration::from_millis(random.random_range(0..10_000_000));
        // A clock may be slow by half of the margin, or a little fast.
        let rate = if random.random_bool(0.5) { 1000 } else { random.random_range(955..=1010) };
        let clock = Arc::new(ProcessClock::new(self.time.clone(), offset, rate));
        let weather = Weather { latency: random.random_range(1..=3), ..Weather::FAIR };
        let late = self.plant == Some(Plant::DeadlineFromReply);
        let handle = self.store.within(|runtime| runtime.handle().clone());
        let Some(handle) = handle else { return };
        let remotes = self.backends.each_ref().map(|backend| {
            let faulty = Faulty::new(Arc::clone(backend));
            Remote::new(self.wire.clone(), handle.clone(), faulty, weather, late)
        });
        let slowness = Duration::from_millis(random.random_range(0..400));
        let (service_seed, seed) = (random.random(), random.random());
        let shared = (self.ledger.clone(), self.judge.clone(), self.wire.clone());
        let stays = self.plant == Some(Plant::EpochStays);
        let service = Service::new(id, shared, slowness, service_seed, stays);
        let [remote, maps] = remotes;
        let start = Start {
            id,
            clock,
            remote,
            maps,
            settings: self.settings.clone(),
            table: self.table.clone(),
            replace,
            service,
        };
        let process = Process::start(start, self.time.clone(), seed);
        self.nodes[node].processes.push(process);
    }

    /// Perhaps something goes wrong.
    fn mischief(&mut self) {
        if self.time.ticks() < 100 || self.random.random_range(0..50) > 0 {
            return;
        }
        self.faults += 1;
        let lasts = self.random.random_range(4..200);
        let until = self.time.ticks() + lasts;
        let node = self.target();
        match self.random.random_range(0..24) {
            kind @ 0..=8 => self.cut_off(node, kind, until),
            9..=11 => self.with(node, |process| process.stalled_until = until, "stands still"),
            12..=13 => self.crash(node, lasts),
            14 => {
                self.trace(|| format!("n{node} gets a second process"));
                let former = self.random.random_range(0..3);
                match former {
                    0 => self.with(node, |process| process.stalled_until = until, "stands still"),
                    1 => self.cut_off(node, 0, until),
                    _ => {}
                }
                if self.nodes[node].processes.len() == 1 {
                    self.start(node, Replace::Yes);
                }
            }
            15 => self.ask(node, None),
            16 => {
                self.trace(|| "the store is cut off".to_owned());
                for node in 0..self.nodes.len() {
                    self.cut_off(node, 0, until);
                }
            }
            17 => {
                self.trace(|| format!("the store stands still for {:?}", at(lasts)));
                self.store_stalled_until = until;
            }
            18 => {
                for node in 0..self.nodes.len() {
                    if self.random.random_bool(0.5) {
                        self.cut_off(node, 0, until);
                    }
                }
            }
            _ => self.command(node),
        }
    }

    /// A node, and often the one that leads.
    fn target(&mut self) -> usize {
        let leader = self.tenures.keys().next().map(|process| process.node);
        match leader {
            Some(leader) if self.random.random_bool(0.3) => leader,
            _ => self.random.random_range(0..self.nodes.len()),
        }
    }

    fn with(&mut self, node: usize, step: impl FnOnce(&mut Process), what: &str) {
        if let Some(process) = self.nodes[node].processes.first_mut() {
            step(process);
            let id = process.id;
            self.trace(|| format!("{id} {what}"));
        }
    }

    /// Something happens to the way between a process and its stores.
    fn cut_off(&mut self, node: usize, kind: u32, until: u64) {
        const OPERATIONS: [&str; 9] = [
            "try_acquire",
            "renew",
            "release",
            "register",
            "heartbeat",
            "deregister",
            "claim",
            "publish",
            "evict",
        ];
        let both = self.random.random_bool(0.6);
        let which = self.random.random_range(0..2);
        let operation = OPERATIONS[self.random.random_range(0..OPERATIONS.len())];
        let delay = Duration::from_millis(self.random.random_range(50..900));
        let latency = self.random.random_range(1..16);
        let lost = self.random.random_range(0..200);
        let unknown = self.random.random_bool(0.5);
        let Some(process) = self.nodes[node].processes.first() else { return };
        let id = process.id;
        for (index, remote) in process.remotes.iter().enumerate() {
            if !both && index != which {
                continue;
            }
            let faults = remote.faults();
            use coord_core::Effect;
            match kind {
                0 => faults.cut(if unknown { Effect::Unknown } else { Effect::None }),
                1 => faults.mute(),
                2 => faults.deafen(),
                3 => faults.pause(),
                4 => faults.delay(delay),
                5 => remote.set_weather(Weather { latency, twice: 200, lost }),
                6 => faults.drop_reply_to(operation),
                7 => faults.drop_request_to(operation),
                _ => faults.cut_watches(),
            }
        }
        let what = [
            "is cut off",
            "is mute",
            "is deaf",
            "is held up",
            "gets late replies",
            "has bad weather",
            "loses a reply",
            "loses a request",
            "has its watches cut",
        ];
        let what = what.get(kind as usize).copied().unwrap_or_default();
        self.trace(|| format!("{id} {what} until {:?}", at(until)));
        let heals = self.heals.entry(id).or_insert(until);
        *heals = until.max(*heals);
    }

    fn crash(&mut self, node: usize, pause: u64) {
        if self.nodes[node].processes.is_empty() {
            return;
        }
        let process = self.nodes[node].processes.remove(0);
        self.trace(|| format!("{} crashes", process.id));
        self.bury(process);
        if self.nodes[node].processes.is_empty() {
            self.nodes[node].restart_at = Some(self.time.ticks() + pause);
        }
    }

    /// A process of this node is asked to go, or to tell the leader something.
    fn ask(&mut self, node: usize, command: Option<Command>) {
        let leaves = command.is_none() && self.random.random_bool(0.5);
        let Some(process) = self.nodes[node].processes.first_mut() else { return };
        let id = process.id;
        let told = command.as_ref().map_or("go", Command::name);
        process.spawn(|cluster| async move {
            // What comes of it is seen by all.
            match command {
                Some(command) => {
                    drop(cluster.request_within(command, Duration::from_secs(3)).await);
                }
                None if leaves => drop(cluster.leave_by_force().await),
                None => drop(cluster.shutdown().await),
            }
        });
        self.trace(|| format!("{id} is asked to {told}"));
    }

    fn command(&mut self, by: usize) {
        let node = node_id(self.random.random_range(0..self.nodes.len()));
        let command = match self.random.random_range(0..10) {
            0..=2 => Command::MarkNodeFailed { node, why: "the world wants it".to_owned() },
            3..=4 => Command::Drain { node },
            5..=6 => Command::Undrain { node },
            7 => Command::RebalanceShards { table: None, reason: "the world".to_owned() },
            8 => Command::StepDown,
            _ => Command::TransferLeadership { to: node },
        };
        self.trace(|| format!("{command:?}"));
        self.ask(by, Some(command));
    }

    /// No more faults; everything has to be in order soon, and to stay so.
    fn heal(&mut self) -> Duration {
        self.trace(|| "no more faults".to_owned());
        let began = self.time.ticks();
        self.heals.clear();
        self.store_stalled_until = 0;
        for node in 0..self.nodes.len() {
            while self.nodes[node].processes.len() > 1 {
                self.crash(node, 0);
            }
            match self.nodes[node].processes.first_mut() {
                Some(process) => {
                    process.stalled_until = 0;
                    clear(process);
                }
                None => self.nodes[node].restart_at = Some(began),
            }
        }
        let mut quiet: Option<(u64, Version)> = None;
        let mut why = String::new();
        while self.time.ticks() < began + ticks(CONVERGENCE) + ticks(QUIET) {
            if (self.time.ticks() - began).is_multiple_of(ticks(OPERATOR)) {
                self.operate();
            }
            self.tick();
            if self.judge.broken().is_some() {
                return Duration::ZERO;
            }
            match (self.out_of_order(), quiet) {
                (Ok(version), Some((since, then))) if version == then => {
                    if self.time.ticks() - since >= ticks(QUIET) {
                        self.read_back();
                        return at(since - began);
                    }
                }
                (Ok(version), _) => quiet = Some((self.time.ticks(), version)),
                (Err(now), _) => (quiet, why) = (None, now),
            }
        }
        self.judge.wrong("convergence", format!("after {CONVERGENCE:?} {why}"));
        Duration::ZERO
    }

    /// What an operator does: end drains and pauses.
    fn operate(&mut self) {
        let status = self.processes().find_map(Process::cluster).map(|cluster| cluster.status());
        let Some(status) = status else { return };
        for member in status.members.iter().filter(|it| it.status == NodeStatus::Draining) {
            self.ask(0, Some(Command::Undrain { node: member.id.clone() }));
        }
    }

    fn processes(&self) -> impl Iterator<Item = &Process> {
        self.nodes.iter().flat_map(|node| &node.processes)
    }

    /// What is not in order yet; the version of the map when all is.
    fn out_of_order(&self) -> Result<Version, String> {
        let mut statuses: Vec<(ProcessId, Arc<Status>)> = Vec::new();
        for (number, node) in self.nodes.iter().enumerate() {
            let [process] = node.processes.as_slice() else {
                return Err(format!("n{number} has {} processes", node.processes.len()));
            };
            let cluster =
                process.cluster().ok_or_else(|| format!("{} has not joined", process.id))?;
            statuses.push((process.id, cluster.status()));
        }
        let Some((_, first)) = statuses.first() else { return Err("there is nobody".to_owned()) };
        let leader = first.leader.clone().ok_or("n0 knows no leader")?;
        let [leads] = self.tenures.keys().collect::<Vec<_>>()[..] else {
            return Err(format!("{} lead", self.tenures.len()));
        };
        let map = self.map_of(first).ok_or("n0 has no map")?;
        for (id, status) in &statuses {
            let theirs = self.map_of(status).ok_or_else(|| format!("{id} has no map"))?;
            if status.leader.as_ref() != Some(&leader) || leader.node != node_id(leads.node) {
                return Err(format!("{id} follows {:?}, and {leads} leads", status.leader));
            }
            if theirs != map {
                return Err(format!("{id} knows version {}", theirs.version()));
            }
            if !status.is_settled() {
                return Err(format!("{id} sees {}", status.state));
            }
            if status.registered.is_none() {
                return Err(format!("{id} is not registered"));
            }
            if status.count(NodeStatus::Active) != self.nodes.len() {
                return Err(format!("{id} sees {} active", status.count(NodeStatus::Active)));
            }
        }
        let mut counts = BTreeMap::new();
        for shard in map.header().shards.shards() {
            let owner = map.owner(shard).ok_or_else(|| format!("nobody owns {shard}"))?;
            let (host, _) = statuses
                .iter()
                .find(|(id, status)| {
                    node_id(id.node) == owner.id && status.registered == Some(owner.incarnation)
                })
                .ok_or_else(|| format!("shard {shard} is on a former run of {}", owner.id))?;
            if self.ledger.hosts(shard) != [*host] {
                let hosts = self.ledger.hosts(shard);
                return Err(format!("shard {shard} of {host} is hosted by {hosts:?}"));
            }
            *counts.entry(host).or_insert(0_u32) += 1;
        }
        let most = counts.values().copied().max().unwrap_or(0);
        let least = if counts.len() < self.nodes.len() {
            0
        } else {
            counts.values().copied().min().unwrap_or(0)
        };
        if most - least > 1 {
            return Err(format!("the shards lie {least} to {most} a node"));
        }
        Ok(map.version())
    }

    fn map_of(&self, status: &Status) -> Option<Arc<ShardMap>> {
        Some(Arc::clone(&status.table(&self.table.0)?.map))
    }

    fn newest(&self) -> Option<Arc<ShardMap>> {
        let cluster = self.processes().find_map(Process::cluster)?;
        cluster.map(&self.table.0)
    }

    /// What is stored is read once more, for the history.
    fn read_back(&mut self) {
        let placement: Arc<dyn Placement> = self.backends[1].placement();
        let tables = [self.table.0.clone(), TableName::cluster()];
        let until = coord_core::Moment::from_origin(self.time.elapsed() + self.settings.leader_ttl);
        for (process, fence) in &self.tenures {
            let holds = What::Holds { fence: fence.clone(), until };
            self.recorder.record(process.to_string(), holds);
        }
        self.store.within(|runtime| {
            runtime.spawn(async move {
                for table in tables {
                    drop(placement.load(&table).await);
                }
            });
        });
        self.store.run();
    }
}

/// Nothing goes wrong between this process and its stores any more.
fn clear(process: &Process) {
    for remote in &process.remotes {
        remote.faults().heal();
        remote.set_weather(Weather { latency: 2, ..Weather::FAIR });
    }
}
