//! What goes wrong in worlds of a [`Kind`]. What it draws it draws apart from all else, so that plain worlds
//! stay as they are.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coord_cluster::downing::{DowningSettings, Strategy};
use coord_cluster::{Command, Settings};
use coord_core::{
    Backend, ClusterName, Effect, Era, LeaseName, MemoryBackend, Replace, TableName, WallClock,
};
use coord_placement::{
    Assignment, Balanced, Candidate, PlacementStrategy, Plan, PlanError, PlanSettings,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::World;
use crate::books::Books;
use crate::invariants::{ProcessId, Seen};
use crate::kinds::Kind;
use crate::panics;
use crate::plants::Plant;
use crate::process::{Process, node_id};
use crate::time::{at, ticks};

/// Before this nothing of it happens.
const BEGINS: Duration = Duration::from_secs(10);
/// Within so long all losses happen.
const STAGGERED: Duration = Duration::from_secs(60);
/// The node TTL of worlds in which it does not run out before a decision.
const LONG_TTL: Duration = Duration::from_secs(30);
/// The node TTL of worlds in which another leader takes over while it lasts.
const LASTING_TTL: Duration = Duration::from_secs(6);
/// So much is a wall clock fast.
const FAST: Duration = Duration::from_secs(8 * 3600);
/// So much is one slow that was never set.
const NEVER_SET: Duration = Duration::from_secs(56 * 365 * 24 * 3600);
/// How much longer than a node TTL nobody starts, in ticks.
const SLACK: u64 = 20;

/// The trouble of one world.
#[derive(Debug)]
pub(super) struct Trouble {
    kind: Option<Kind>,
    random: StdRng,
    /// Nothing of what happens in plain worlds happens.
    gentle: bool,
    /// When something happens next.
    next: u64,
    /// When something happened last.
    pub(super) last: u64,
    losses: Vec<Loss>,
    lost: BTreeSet<usize>,
    pub(super) strategy: Option<Strategy>,
    pub(super) node_ttl: Duration,
    /// When the store's clock goes right again.
    clock_until: Option<u64>,
    /// Whether what is written now ends early when it does.
    ends_early: bool,
    /// No process starts before then: it could not know who hosts.
    pub(super) nobody_starts_until: u64,
    /// Processes that opened a store which another one has taken the place of.
    outdated: BTreeSet<ProcessId>,
    /// How often that happened.
    eras: u16,
    /// Whether a strategy has panicked.
    panicked: Arc<AtomicBool>,
    pub(super) stores: Vec<MemoryBackend>,
    pub(super) books: Option<Books>,
}

/// A node that is to be lost.
#[derive(Clone, Copy, Debug)]
struct Loss {
    at: u64,
    node: usize,
    how: How,
}

/// How a node is lost.
#[derive(Clone, Copy, Debug)]
enum How {
    Crash,
    CutFromAll,
    CutFromPeers,
    CutFromStore,
    StandsStill,
}

impl Trouble {
    pub(super) fn new(kind: Option<Kind>, mut random: StdRng) -> Self {
        let gentle = match kind {
            None => false,
            Some(Kind::Losses | Kind::Wipe | Kind::Replaced) => true,
            Some(_) => random.random_bool(0.5),
        };
        let next = ticks(BEGINS) + random.random_range(0..120);
        Self {
            kind,
            random,
            gentle,
            next,
            last: 0,
            losses: Vec::new(),
            lost: BTreeSet::new(),
            strategy: None,
            node_ttl: Settings::demo().node_ttl,
            clock_until: None,
            ends_early: false,
            nobody_starts_until: 0,
            outdated: BTreeSet::new(),
            eras: 0,
            panicked: Arc::default(),
            stores: Vec::new(),
            books: None,
        }
    }

    pub(super) fn is_gentle(&self) -> bool {
        self.gentle
    }

    /// A seed for what is drawn apart.
    pub(super) fn seed(&mut self) -> u64 {
        self.random.random()
    }

    /// What the kind wants of the settings, and how many nodes there are.
    pub(super) fn set_up(&mut self, nodes: usize, settings: &mut Settings) -> usize {
        match self.kind {
            Some(Kind::Losses) => {}
            Some(Kind::Forget) => {
                settings.node_ttl = LASTING_TTL;
                self.node_ttl = settings.node_ttl;
                return nodes;
            }
            // Nobody is there to release what is parked.
            Some(Kind::Panics | Kind::Restarts) if self.gentle => {
                settings.poison_crashes = 0;
                return nodes;
            }
            _ => return nodes,
        }
        let random = &mut self.random;
        let nodes: usize = random.random_range(4..=7);
        let majority = nodes / 2 + 1;
        let strategy = match random.random_range(0..8) {
            0..=2 => Strategy::KeepMajority,
            3 => Strategy::keep_oldest(),
            4 => Strategy::StaticQuorum { quorum: u32::try_from(majority).unwrap_or(1) },
            5 => Strategy::KeepReferee { referee: node_id(random.random_range(0..nodes)) },
            6 => Strategy::lease_majority(),
            _ => Strategy::DownAll,
        };
        let stable = Duration::from_secs([7, 10, 20][random.random_range(0..3)]);
        settings.min_members = 1;
        settings.poison_crashes = 0;
        // Longer than downing takes, so that it is downing that decides.
        if random.random_bool(0.6) {
            (settings.node_ttl, settings.heartbeat) = (LONG_TTL, LONG_TTL / 4);
            settings.stop_budget = Some(Duration::from_millis(300));
        }
        self.node_ttl = settings.node_ttl;
        settings.downing = Some(DowningSettings::new(strategy.clone()).with_stable_after(stable));
        self.strategy = Some(strategy);
        let most = ((nodes - 1) / 2).min(3);
        for _ in 0..random.random_range(1..=most) {
            let at = ticks(BEGINS) + 400 + random.random_range(0..ticks(STAGGERED));
            let node = random.random_range(0..nodes);
            let how = match random.random_range(0..8) {
                0..=3 => How::Crash,
                4 => How::CutFromAll,
                5 => How::CutFromPeers,
                6 => How::CutFromStore,
                _ => How::StandsStill,
            };
            if self.losses.iter().all(|loss| loss.node != node) {
                self.losses.push(Loss { at, node, how });
            }
        }
        nodes
    }

    /// When a node starts.
    pub(super) fn starts(&self, node: usize, start: u64) -> u64 {
        match self.kind {
            // The first one is the oldest.
            Some(Kind::Losses) if node > 0 => 120 + start,
            Some(Kind::Losses) => 0,
            _ => start,
        }
    }

    /// How long it goes on, where that is not the usual time.
    pub(super) fn lasts(&self) -> Option<u64> {
        let last = self.losses.iter().map(|loss| loss.at).max()?;
        Some(last + ticks(super::bounds::LOST + self.node_ttl) + 40)
    }

    /// How likely a process is started so that it takes the place of another one of its node.
    pub(super) fn replaces(&self) -> f64 {
        if self.kind == Some(Kind::Restarts) { 0.7 } else { 0.3 }
    }

    /// Whether a node is gone for good.
    pub(super) fn is_lost(&self, node: usize) -> bool {
        self.lost.contains(&node)
    }

    /// Whether all who are not lost go on, by the strategy.
    pub(super) fn keeps(&self) -> bool {
        match &self.strategy {
            Some(Strategy::KeepMajority | Strategy::StaticQuorum { .. }) => true,
            // The node that won the lease of the first loss keeps it for a while, and may be lost with it:
            // docs/downing.md.
            Some(Strategy::LeaseMajority { .. }) => self.losses.len() == 1,
            Some(Strategy::KeepReferee { referee }) => {
                self.losses.iter().all(|loss| node_id(loss.node) != *referee)
            }
            Some(Strategy::KeepOldest { .. }) => self.losses.iter().all(|loss| loss.node != 0),
            _ => false,
        }
    }

    /// When the last node was lost, once all are.
    pub(super) fn all_lost_at(&self) -> Option<u64> {
        let last = self.losses.iter().map(|loss| loss.at).max()?;
        (self.lost.len() == self.losses.len()).then_some(last)
    }

    /// What places the shards, if not the usual strategy.
    pub(super) fn strategy(&mut self, plant: Option<Plant>) -> Option<Arc<dyn PlacementStrategy>> {
        (self.kind == Some(Kind::Panics)).then(|| {
            let random = Mutex::new(StdRng::seed_from_u64(self.seed()));
            let stays = plant == Some(Plant::PanicStays);
            let panicked = Arc::clone(&self.panicked);
            Arc::new(Panics { inner: Balanced::default(), random, stays, panicked }) as _
        })
    }

    fn draw(&mut self, below: u32) -> u32 {
        self.random.random_range(0..below)
    }

    /// Something happens again between these, in ticks.
    fn again(&mut self, now: u64, least: u64, most: u64) {
        self.next = now + self.random.random_range(least..=most);
    }
}

impl World {
    /// Perhaps something of the world's kind goes wrong.
    pub(super) fn trouble(&mut self) {
        let now = self.time.ticks();
        let Some(kind) = self.kind else { return };
        if kind == Kind::Losses {
            self.lose(now);
            return;
        }
        self.set_clock_right(now);
        if now < self.trouble.next {
            return;
        }
        self.faults += 1;
        self.trouble.last = now;
        let node = self.trouble.random.random_range(0..self.nodes.len());
        match kind {
            Kind::Handlers => self.unsettle(now, node),
            Kind::Panics => {
                self.trouble.again(now, 80, 240);
                match self.trouble.draw(2) {
                    0 => self.crash(node, 8),
                    _ => self.ask(node, None),
                }
            }
            Kind::Vanish => self.vanish(now, node),
            Kind::Wipe => self.wipe(now, node),
            Kind::Clocks => self.set_clock_wrong(now),
            Kind::Hangs => {
                self.trouble.again(now, 40, 200);
                let table = self.trouble.random.random_range(0..self.tables.sheets().count());
                let shards = self.tables.sheets().nth(table).map(|sheet| sheet.header.shards.get());
                let shard = self.trouble.draw(shards.unwrap_or(1));
                let place = crate::tables::Place { table, shard: coord_core::ShardId::new(shard) };
                self.trace(|| format!("the handler of {place} hangs"));
                self.ledger.hang(place);
            }
            Kind::Restarts => self.restart(now, node),
            Kind::Forget => self.forget(now, node),
            Kind::Replaced => self.replaced(now, node),
            Kind::Losses => {}
        }
    }

    /// No more of it.
    pub(super) fn end_trouble(&mut self) {
        if self.kind.is_none() {
            return;
        }
        self.set_clock_right(u64::MAX);
        for node in 0..self.nodes.len() {
            self.start_outdated(node, 0);
        }
        self.trouble.lost.clear();
        self.trouble.losses.clear();
        self.ledger.calm();
        if let Some(peers) = &self.peers {
            peers.heal();
        }
    }

    /// Shards have to move, and registrations run out.
    fn unsettle(&mut self, now: u64, node: usize) {
        self.trouble.again(now, 60, 200);
        let lasts = self.trouble.random.random_range(20..240);
        match self.trouble.draw(5) {
            0 => self.ask(node, None),
            1 => self.ask(node, Some(Command::Drain { node: node_id(node) })),
            2 => {
                for node in 0..self.nodes.len() {
                    self.ask(node, Some(Command::Undrain { node: node_id(node) }));
                }
            }
            _ => self.cut_from_store(node, now + lasts),
        }
    }

    fn cut_from_store(&mut self, node: usize, until: u64) {
        let Some(process) = self.nodes[node].processes.first() else { return };
        let id = process.id;
        process.remotes.iter().for_each(|remote| remote.faults().cut(Effect::Unknown));
        self.trace(|| format!("{id} is cut off from the store until {:?}", at(until)));
        let heals = self.heals.entry(id).or_insert(until);
        *heals = until.max(*heals);
    }

    /// Nodes are lost, one after the other.
    fn lose(&mut self, now: u64) {
        let due: Vec<_> =
            self.trouble.losses.iter().filter(|loss| loss.at == now).copied().collect();
        for Loss { node, how, .. } in due {
            self.faults += 1;
            self.trace(|| format!("n{node} is lost: {how:?}"));
            self.trouble.lost.insert(node);
            if let (Some(Plant::ProbesLie), Some(peers)) = (self.plant, &self.peers) {
                peers.deny(0..self.nodes.len());
            }
            let all = 0..self.nodes.len();
            if let (How::CutFromAll | How::CutFromPeers, Some(peers)) = (how, &self.peers) {
                peers.cut(node, all);
            }
            match how {
                How::Crash => {
                    self.crash(node, 0);
                    self.nodes[node].restart_at = None;
                }
                How::CutFromAll | How::CutFromStore => self.cut_from_store(node, u64::MAX),
                How::StandsStill => {
                    if let Some(process) = self.nodes[node].processes.first_mut() {
                        process.stalled_until = u64::MAX;
                    }
                }
                How::CutFromPeers => {}
            }
        }
    }

    /// A record vanishes.
    fn vanish(&mut self, now: u64, node: usize) {
        match self.trouble.is_gentle() {
            true => self.trouble.again(now, 300, 900),
            false => self.trouble.again(now, 60, 200),
        }
        let lasts = self.trouble.random.random_range(0..240);
        let cut = self.trouble.random.random_bool(0.6);
        let what = self.trouble.draw(10);
        let table = self.trouble.random.random_range(0..self.tables.sheets().count());
        let table = self.tables.sheets().nth(table).map(|sheet| sheet.name.clone());
        let [leases, maps] = self.trouble.stores.as_slice() else { return };
        let (leases, maps) = (leases.clone(), maps.clone());
        let name = node_id(node);
        let (told, works): (_, Box<dyn FnOnce() -> bool>) = match what {
            0..=4 => {
                if cut {
                    self.cut_from_store(node, now + lasts);
                }
                if let Some(books) = &self.trouble.books {
                    books.vanishes(name.clone());
                }
                (format!("the record of {name}"), Box::new(move || leases.delete_node(&name)))
            }
            5..=6 => {
                let lease = LeaseName::leader();
                ("the leader's lease".to_owned(), Box::new(move || leases.delete_lease(&lease)))
            }
            7 => {
                let told = "all requests".to_owned();
                (told, Box::new(move || maps.delete_requests()))
            }
            8 => {
                let cluster = TableName::cluster();
                (format!("{cluster}"), Box::new(move || maps.delete_table(&cluster)))
            }
            _ => {
                let Some(table) = table else { return };
                (format!("{table}"), Box::new(move || maps.delete_table(&table)))
            }
        };
        self.trace(|| format!("{told} vanishes"));
        self.read_all();
        if matches!(what, 5..=6) {
            self.judge.see(&Seen::LeaseVanishes);
        }
        self.store.within(|runtime| runtime.block_on(async { works() }));
    }

    fn read_all(&mut self) {
        let tables = self.tables.sheets().map(|it| it.name.clone());
        self.read_last([TableName::cluster()].into_iter().chain(tables).collect());
    }

    /// Whether leases and maps are in one store.
    fn is_one_store(&self) -> bool {
        let [one, other] = &self.backends;
        one.info().origin == other.info().origin
    }

    /// Whether every node has a process that has seen the cluster.
    fn all_know(&self) -> bool {
        self.nodes.iter().all(|node| {
            let [process] = node.processes.as_slice() else { return false };
            process.cluster().is_some_and(|cluster| !cluster.status().members.is_empty())
        })
    }

    /// A process dies and starts again, where it may know or need not.
    fn start_again(&mut self, now: u64, node: usize) {
        if now >= self.trouble.nobody_starts_until {
            let pause = self.trouble.random.random_range(0..40);
            self.crash(node, pause);
        }
    }

    /// Whoever leads, or somebody.
    fn leader_or(&mut self, node: usize) -> usize {
        let leader = self.tenures.keys().next().map(|process| process.node);
        leader.filter(|_| self.trouble.random.random_bool(0.7)).unwrap_or(node)
    }

    /// Nobody starts before all is over that hosts now.
    fn bar(&mut self, now: u64) {
        self.trouble.nobody_starts_until = now + ticks(self.trouble.node_ttl) + SLACK;
    }

    /// The store loses its data, or a process dies.
    fn wipe(&mut self, now: u64, node: usize) {
        self.trouble.again(now, 60, 400);
        let lasts = self.trouble.random.random_range(20..160);
        let restarts = self.trouble.random.random_bool(0.5);
        let cuts = self.trouble.random.random_bool(0.5);
        let which = self.trouble.draw(3);
        if restarts {
            self.start_again(now, node);
            return;
        }
        let whole = which == 2 || self.is_one_store();
        if whole && !self.all_know() {
            self.trouble.next = now + SLACK;
            return;
        }
        if cuts {
            self.cut_from_store(node, now + lasts);
        }
        let rewinds = self.plant == Some(Plant::TermsStartAgain);
        let stores = self.trouble.stores.clone();
        self.trace(|| if whole { "all data is lost" } else { "a store loses its data" }.to_owned());
        self.read_all();
        self.judge.see(&Seen::LeaseVanishes);
        if whole {
            self.bar(now);
        } else {
            let dies = self.leader_or(node);
            self.start_again(now, dies);
        }
        self.store.within(|runtime| {
            runtime.block_on(async {
                for (number, store) in (0..).zip(stores) {
                    if which == 2 || which == number {
                        store.lose_data();
                        if rewinds {
                            store.rewind_terms(0);
                        }
                    }
                }
            });
        });
    }

    /// What is to be remembered is deleted, or what makes that worth remembering happens.
    fn forget(&mut self, now: u64, node: usize) {
        self.trouble.again(now, 20, 160);
        let lasts = self.trouble.random.random_range(20..160);
        let what = self.trouble.draw(8);
        let dies = self.trouble.random.random_bool(0.4);
        let leader = self.leader_or(node);
        let all = match what {
            0..=2 => {
                // Whoever is evicted while it is cut off hosts on.
                self.cut_from_store(node, now + lasts);
                self.condemn_by((node + 1) % self.nodes.len(), node);
                return;
            }
            3 => {
                self.start_again(now, leader);
                return;
            }
            // Where nobody is registered who has hosted, nobody can know that anybody does.
            4 if self.trouble.is_gentle() => self.many_report(),
            _ => false,
        };
        let named = if all { "all tables vanish" } else { "_cluster vanishes" };
        self.trace(|| named.to_owned());
        self.read_all();
        let tables = self.tables.sheets().map(|sheet| sheet.name.clone()).filter(|_| all);
        let tables: Vec<_> = tables.chain([TableName::cluster()]).collect();
        let maps = self.maps.clone();
        self.store.within(|runtime| {
            runtime.block_on(async {
                for table in &tables {
                    maps.delete_table(table);
                }
            });
        });
        match dies {
            true => self.start_again(now, leader),
            false => self.ask(leader, Some(Command::StepDown)),
        }
        if all {
            self.bar(now);
        }
    }

    /// Whether two registrations at least tell of a table.
    fn many_report(&mut self) -> bool {
        let nodes = self.backends[0].discovery();
        let told = self.store.within(|runtime| {
            let nodes = runtime.block_on(async { nodes.nodes().await });
            nodes.is_ok_and(|nodes| {
                nodes.iter().filter(|it| !it.info.reports.is_empty()).count() > 1
            })
        });
        told.unwrap_or_default()
    }

    /// Another store takes the place of the store; later an operator starts those again who say so.
    fn replaced(&mut self, now: u64, node: usize) {
        if now <= self.trouble.nobody_starts_until {
            self.trouble.next = self.trouble.nobody_starts_until + 1;
            return;
        }
        let there = self.nodes.iter().flat_map(|node| &node.processes);
        let there: BTreeSet<_> = there.map(|process| process.id).collect();
        self.trouble.outdated.retain(|process| there.contains(process));
        if !self.trouble.outdated.is_empty() {
            self.trouble.again(now, 80, 400);
            // An operator may overlook one.
            let overlooked = self.trouble.random.random_range(0..=self.nodes.len());
            for node in (0..self.nodes.len()).filter(|node| *node != overlooked) {
                let pause = self.trouble.random.random_range(0..40);
                self.start_outdated(node, pause);
            }
            return;
        }
        self.trace(|| "another store takes the place of the store".to_owned());
        self.read_all();
        self.judge.see(&Seen::LeaseVanishes);
        self.bar(now);
        self.trouble.next = self.trouble.nobody_starts_until + 1;
        self.trouble.eras += 1;
        self.open_another();
        for process in self.nodes.iter().flat_map(|node| &node.processes) {
            self.trouble.outdated.insert(process.id);
            for (remote, store) in process.remotes.iter().zip(&self.backends) {
                let goes_on = self.plant == Some(Plant::IdentityUnchecked);
                remote.replaced(goes_on.then(|| Arc::clone(store)));
            }
        }
        self.crash(node, 0);
    }

    #[expect(clippy::expect_used, reason = "the name and the era are well formed")]
    fn open_another(&mut self) {
        let era = Era::new(self.trouble.eras).expect("an era");
        let cluster = ClusterName::new("sim").expect("a name");
        let one = MemoryBackend::isolated(cluster.clone()).with_era(era);
        let maps = match self.is_one_store() {
            true => one.clone(),
            false => MemoryBackend::isolated(cluster).with_era(era),
        };
        let kept = (self.judge.clone(), self.recorder.clone(), self.wire.clone());
        let books = Books::new(kept, (one.discovery(), maps.placement()), self.plant);
        self.backends = [&one, &maps].map(|it| Arc::new(books.around(Arc::new(it.clone()))) as _);
        self.trouble.stores = vec![one, maps.clone()];
        self.trouble.books = Some(books);
        self.maps = maps;
    }

    /// Nobody goes on in a store that another one has taken the place of.
    pub(super) fn see_outdated(&self, now: u64) {
        let processes = self.nodes.iter().flat_map(|node| &node.processes);
        let outdated = processes.filter(|process| self.trouble.outdated.contains(&process.id));
        for process in outdated.filter(|_| now > self.trouble.nobody_starts_until) {
            let Some(cluster) = process.cluster() else { continue };
            if cluster.is_leader() || cluster.status().registered.is_some() {
                let why = format!("{} goes on in a store that it has not opened", process.id);
                self.judge.wrong("identity", why);
            }
        }
    }

    /// A process starts again that opened another store, where it says so.
    fn start_outdated(&mut self, node: usize, pause: u64) {
        let process = self.nodes[node].processes.first().map(|process| process.id);
        let outdated = process.is_some_and(|process| self.trouble.outdated.contains(&process));
        if outdated && self.plant != Some(Plant::IdentityUnchecked) {
            self.crash(node, pause);
        }
    }

    fn set_clock(&mut self, clock: WallClock) {
        self.trace(|| format!("the store's clock is {clock:?}"));
        let stores = self.trouble.stores.clone();
        self.store.within(|runtime| {
            runtime.block_on(async { stores.iter().for_each(|store| store.set_wall_clock(clock)) });
        });
    }

    fn set_clock_wrong(&mut self, now: u64) {
        self.trouble.again(now, 700, 1000);
        let mut lasts = self.trouble.random.random_range(40..=480);
        match self.trouble.draw(10) {
            kind @ 0..=7 => {
                self.trouble.clock_until = Some(now + lasts);
                let clock = match kind {
                    0..=3 => WallClock::Fast(FAST),
                    4..=5 => WallClock::Still,
                    _ => WallClock::Slow(NEVER_SET),
                };
                self.trouble.ends_early = matches!(clock, WallClock::Slow(_));
                self.set_clock(clock);
            }
            _ => {
                if self.trouble.random.random_bool(0.7) {
                    let cut = self.trouble.random.random_range(0..self.nodes.len());
                    self.cut_from_store(cut, now + lasts.min(160));
                }
                self.trace(|| "the store's clock jumps ahead, and all runs out".to_owned());
                self.judge.see(&Seen::LeaseVanishes);
                let stores = self.trouble.stores.clone();
                self.store.within(|runtime| {
                    runtime.block_on(async { stores.iter().for_each(MemoryBackend::run_out) });
                });
                lasts = 8;
            }
        }
        // Whoever leads dies while its lease is prolonged.
        let leader = self.tenures.keys().next().map(|process| process.node);
        let node = leader.filter(|_| self.trouble.random.random_bool(0.7));
        let node = node.unwrap_or_else(|| self.trouble.random.random_range(0..self.nodes.len()));
        self.trouble.losses = vec![Loss { at: now + lasts - 8, node, how: How::Crash }];
    }

    fn set_clock_right(&mut self, now: u64) {
        let due: Vec<_> =
            self.trouble.losses.iter().filter(|loss| loss.at <= now).copied().collect();
        if self.kind == Some(Kind::Clocks) && now < u64::MAX {
            for loss in due {
                self.trouble.losses.clear();
                self.crash(loss.node, 600);
            }
        }
        if self.trouble.clock_until.is_some_and(|until| until <= now) {
            self.trouble.clock_until = None;
            if std::mem::take(&mut self.trouble.ends_early) {
                self.judge.see(&Seen::LeaseVanishes);
            }
            let late = self.plant == Some(Plant::LeasesStayLate);
            self.set_clock(if late { WallClock::Fast(Duration::ZERO) } else { WallClock::Right });
        }
    }

    /// A process dies and starts again, or another one takes its place while it lives.
    fn restart(&mut self, now: u64, node: usize) {
        self.trouble.again(now, 20, 160);
        let pause = self.trouble.random.random_range(0..8);
        if self.trouble.draw(4) == 0 && self.nodes[node].processes.len() == 1 {
            self.trace(|| format!("n{node} gets a second process"));
            self.start(node, Replace::Yes);
        } else {
            self.crash(node, pause);
        }
    }

    /// Who is not lost, and should be there.
    pub(super) fn kept_nodes(&self) -> impl Iterator<Item = (usize, Option<&Process>)> {
        let nodes = self.nodes.iter().enumerate();
        let kept = nodes.filter(|(node, _)| !self.trouble.is_lost(*node));
        kept.map(|(number, node)| (number, node.processes.first()))
    }
}

/// A strategy that panics now and then.
#[derive(Debug)]
struct Panics {
    inner: Balanced,
    random: Mutex<StdRng>,
    /// A planted bug.
    stays: bool,
    panicked: Arc<AtomicBool>,
}

impl PlacementStrategy for Panics {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn plan(
        &self,
        current: &Assignment,
        candidates: &[Candidate],
        settings: &PlanSettings,
    ) -> Result<Plan, PlanError> {
        let again = self.stays && self.panicked.load(Ordering::Relaxed);
        let now = self.random.lock().unwrap_or_else(PoisonError::into_inner).random_bool(0.08);
        if again || now {
            self.panicked.store(true, Ordering::Relaxed);
            panics::planned();
        }
        self.inner.plan(current, candidates, settings)
    }
}
