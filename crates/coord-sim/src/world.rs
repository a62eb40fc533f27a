//! One world: its nodes, its stores, and what happens to them, all from one seed.

mod bounds;
mod mischief;
mod order;
mod trouble;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use coord_cluster::{Handoff, Settings};
use coord_conformance::faults::Faulty;
use coord_conformance::history::{Recorder, What};
use coord_core::{
    Backend, ClusterName, Fence, MemoryBackend, Replace, ShardCount, TableHeader, TableName,
};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use crate::books::Books;
use crate::invariants::{Broken, Judge, Leading, ProcessId, Seen};
use crate::kinds::{Kind, Kinds};
use crate::ledger::{Habits, Ledger, Service};
use crate::mail::Asker;
use crate::panics;
use crate::peers::Peers;
use crate::plants::Plant;
use crate::process::{Besides, Island, Process, Start};
use crate::tables::{Place, Sheet, Tables};
use crate::time::{ProcessClock, WorldTime, ticks};
use crate::wire::{Remote, Weather, Wire};

use self::bounds::Bounds;
use self::trouble::Trouble;

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
    /// What kind of world it was; none for a plain one.
    pub kind: Option<Kind>,
    /// The first thing that was wrong.
    pub broken: Option<Broken>,
    /// A digest of all that happened.
    pub digest: u64,
    /// How long after the last fault it took to be in order.
    pub healed_after: Duration,
    /// How many terms there were, and how many maps were published.
    pub terms: usize,
    /// The versions of the maps at the end, together.
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
    /// The store of the maps itself.
    maps: MemoryBackend,
    settings: Settings,
    tables: Tables,
    /// Shards that an operator may have pinned.
    pins: BTreeSet<Place>,
    runs: u32,
    /// When the faults of a process end.
    heals: BTreeMap<ProcessId, u64>,
    tenures: BTreeMap<ProcessId, Fence>,
    terms: usize,
    faults: u32,
    tracing: bool,
    kind: Option<Kind>,
    /// What the kind does, and what of it is under way.
    trouble: Trouble,
    /// How processes reach each other; none in a plain world.
    peers: Option<Peers>,
    bounds: Bounds,
}

#[expect(clippy::expect_used, reason = "the names are well formed")]
fn tables(random: &mut StdRng) -> Tables {
    let count = if random.random_bool(0.3) { 2 } else { 1 };
    let sheet = |number| {
        let name = TableName::new(format!("things-{number}")).expect("a name");
        let shards = ShardCount::new(random.random_range(6..=20)).expect("a count");
        let handoff = match random.random_range(0..10) {
            0..=6 => Handoff::Exclusive,
            7..=8 => Handoff::MakeBeforeBreak,
            _ => Handoff::Eager,
        };
        Sheet { name, header: TableHeader::new(shards), handoff }
    };
    Tables::new((0..count).map(sheet).collect())
}

fn settings(random: &mut StdRng) -> Settings {
    let mut settings = Settings::demo();
    settings.remove_after = Duration::from_secs(8);
    settings.rebalance_check = Duration::from_secs(2);
    settings.handoff_timeout = Duration::from_secs(3);
    settings.candidates = 3;
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
    pub fn new(seed: u64, kinds: &Kinds, plant: Option<Plant>, tracing: bool) -> Self {
        panics::watch();
        let (kind, other) = kinds.draw(seed);
        let mut trouble = Trouble::new(kind, other);
        let mut random = StdRng::seed_from_u64(seed);
        let time = WorldTime::default();
        let wire = Wire::new(time.clone(), random.random());
        let mut settings = settings(&mut random);
        let tables = tables(&mut random);
        let judge = Judge::new(time.clone(), settings.leader_ttl, &tables);
        let recorder = Recorder::new(Arc::new(time.clone()));
        let mut store = Island::new(time.clone(), random.random());
        let opened = store.within(|_| {
            let cluster = ClusterName::new("sim").expect("a name");
            [MemoryBackend::isolated(cluster.clone()), MemoryBackend::isolated(cluster)]
        });
        let opened = opened.expect("the store's runtime is there");
        let [one, other] = match kind {
            Some(Kind::Clocks) => opened.map(|store| store.by_wall_clock()),
            _ => opened,
        };
        // With maps in another store, nothing but claims keeps a former leader from writing.
        let maps = if random.random_bool(0.5) { other } else { one.clone() };
        let kept = (judge.clone(), recorder.clone(), wire.clone());
        let books = Books::new(kept, (one.discovery(), maps.placement()), plant);
        let booked = |backend: &MemoryBackend| {
            Arc::new(books.around(Arc::new(backend.clone()))) as Arc<dyn Backend>
        };
        let backends = [booked(&one), booked(&maps)];
        let nodes = random.random_range(3..=6);
        let nodes = trouble.set_up(nodes, &mut settings);
        let peers = kind.map(|_| Peers::new(Wire::new(time.clone(), trouble.seed())));
        if let (Some(peers), Some(Plant::LettersPileUp)) = (&peers, plant) {
            peers.pile_up();
        }
        let bounds = Bounds::new(kind, trouble.is_gentle());
        trouble.stores = vec![one, maps.clone()];
        trouble.books = Some(books);
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
            maps,
            settings,
            tables,
            pins: BTreeSet::new(),
            runs: 0,
            heals: BTreeMap::new(),
            tenures: BTreeMap::new(),
            terms: 0,
            faults: 0,
            tracing,
            kind,
            trouble,
            peers,
            bounds,
        }
    }

    /// Lets it happen, up to the first thing that is wrong.
    #[must_use]
    pub fn run(mut self) -> Outcome {
        for node in 0..self.nodes.len() {
            let start = self.random.random_range(0..80);
            self.nodes[node].restart_at = Some(self.trouble.starts(node, start));
        }
        let mut healed_after = Duration::ZERO;
        let safety = self.trouble.lasts().unwrap_or(ticks(SAFETY));
        while self.time.ticks() < safety && self.judge.broken().is_none() {
            if !self.trouble.is_gentle() {
                self.mischief();
            }
            self.trouble();
            self.tick();
            self.see_bounds();
        }
        if self.judge.broken().is_none() {
            healed_after = self.heal();
        }
        if self.judge.broken().is_none() {
            // Whoever holds a lease that somebody deletes believes it for a while: I1 says for how long.
            let vanishes = matches!(
                self.kind,
                Some(Kind::Vanish | Kind::Wipe | Kind::Clocks | Kind::Replaced)
            );
            let violations = self.recorder.history().check().into_iter();
            for violation in violations.filter(|it| !vanishes || it.rule != "tenures overlap") {
                self.judge.wrong(format!("history: {}", violation.rule), violation.text);
            }
        }
        let version = self.versions();
        Outcome {
            seed: self.seed,
            kind: self.kind,
            broken: self.judge.broken(),
            digest: self.wire.digest() ^ self.peers.as_ref().map_or(0, Peers::digest),
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
        if let Some(peers) = &self.peers {
            peers.deliver();
        }
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
            if let Some(peers) = &self.peers {
                let (kept, workers) = process.kept();
                peers.shows(process.id, kept || now < process.stalled_until, &workers);
            }
            if now >= process.stalled_until {
                self.ledger.write(process.id, &self.tables, &self.judge);
            }
        }
        self.leaders();
        self.endings(now);
        if let Some(told) = panics::take() {
            self.judge.wrong("no panic", told);
        }
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
                if self.nodes[node].processes.is_empty() && !self.trouble.is_lost(node) {
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
        if let Some(peers) = &self.peers {
            peers.died(id);
        }
        drop(process);
        self.ledger.died(id);
    }

    fn restarts(&mut self, now: u64) {
        if now < self.trouble.nobody_starts_until {
            return;
        }
        for node in 0..self.nodes.len() {
            if self.nodes[node].restart_at.is_some_and(|at| at <= now) {
                self.nodes[node].restart_at = None;
                let replace = self.random.random_bool(self.trouble.replaces());
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
        let service = |table| {
            let shared = (self.ledger.clone(), self.judge.clone(), self.wire.clone());
            let habits = Habits {
                kind: self.kind,
                plant: self.plant,
                time: self.time.clone(),
                clock: Arc::clone(&clock),
                random: Mutex::new(StdRng::seed_from_u64(self.trouble.seed())),
            };
            Service::new((id, table), shared, slowness, random.random(), habits)
        };
        let services = (0..self.tables.sheets().count()).map(service).collect();
        let seed = random.random();
        let [remote, maps] = remotes;
        let besides = self.besides();
        let start = Start {
            id,
            clock,
            remote,
            maps,
            settings: self.settings.clone(),
            tables: self.tables.clone(),
            replace,
            services,
            besides,
        };
        let process = Process::start(start, self.time.clone(), seed);
        self.nodes[node].processes.push(process);
    }

    fn besides(&mut self) -> Option<Besides> {
        let (peers, kind) = (self.peers.clone()?, self.kind?);
        let shared = (self.tables.clone(), self.ledger.clone(), self.judge.clone());
        let (tables, ledger, judge) = shared;
        let seed = self.trouble.seed();
        let asker = || Asker::new(tables, ledger, judge, self.time.clone(), seed);
        let asker = kind.has_mail().then(asker);
        let strategy = self.trouble.strategy(self.plant);
        Some(Besides { peers, asker, probes: kind == Kind::Losses, strategy })
    }
}

/// Nothing goes wrong between this process and its stores any more.
fn clear(process: &Process) {
    for remote in &process.remotes {
        remote.faults().heal();
        remote.set_weather(Weather { latency: 2, ..Weather::FAIR });
    }
}
