//! Who hosts what, as the hosts' callbacks say.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use coord_cluster::{Handler, Handoff, Host, HostError, Mail, ShardFence};
use coord_core::{Epoch, ShardId, TableUid, Term};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::invariants::{Judge, ProcessId, Seen};
use crate::keep;
use crate::kinds::Kind;
use crate::panics;
use crate::plants::Plant;
use crate::tables::{Place, Tables};
use crate::time::{ProcessClock, WorldTime, ticks};
use crate::wire::Wire;

/// How likely the start of a shard fails at its end.
const FAILING: f64 = 0.03;

/// Who hosts which shard of the world's tables; clones are the same.
#[derive(Clone)]
pub struct Ledger(Arc<Mutex<Hosted>>);

#[derive(Default)]
struct Hosted {
    rights: BTreeMap<ProcessId, BTreeMap<Place, Right>>,
    /// Whose token each shard was shown last, and its life, epoch and term.
    shown: BTreeMap<Place, (ProcessId, TableUid, Epoch, Term)>,
    /// What works for a shard now, whatever its fence says.
    codes: BTreeMap<u64, Code>,
    counted: u64,
    /// Messages that were handed to a handler.
    handled: BTreeSet<u64>,
    /// Messages whose senders know that nobody handles them.
    not_taken: BTreeSet<u64>,
    /// Up to which tick each shard has answered.
    answered: BTreeMap<Place, u64>,
    /// Shards whose handlers do not return.
    hung: BTreeSet<Place>,
    /// Nobody does anything out of the way any more.
    calm: bool,
}

/// Code of a shard that runs.
struct Code {
    process: ProcessId,
    place: Place,
    fence: ShardFence,
    clock: Arc<ProcessClock>,
    /// Up to then nobody else may start the shard: the deadline as it was known last.
    until: Duration,
}

/// A right to host.
struct Right {
    fence: ShardFence,
    /// The life of the table that it was given in.
    uid: TableUid,
    /// A planted bug: its epoch is shown as 0.
    epoch_stays: bool,
}

impl Ledger {
    /// Nobody hosts anything.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::default())
    }

    fn lock(&self) -> MutexGuard<'_, Hosted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process is dead.
    pub fn died(&self, process: ProcessId) {
        let mut hosted = self.lock();
        let rights = hosted.rights.remove(&process);
        let gone: Vec<_> = {
            let codes = hosted.codes.iter().filter(|(_, code)| code.process == process);
            codes.map(|(number, _)| *number).collect()
        };
        let codes: Vec<_> = gone.iter().filter_map(|number| hosted.codes.remove(number)).collect();
        drop(hosted);
        drop((rights, codes));
    }

    /// Code of a shard begins to run, until what is returned is dropped.
    fn code(
        &self,
        process: ProcessId,
        place: Place,
        fence: ShardFence,
        clock: &Arc<ProcessClock>,
    ) -> Running {
        let until = clock.until(&fence).unwrap_or_default();
        let mut hosted = self.lock();
        hosted.counted += 1;
        let number = hosted.counted;
        let clock = Arc::clone(clock);
        hosted.codes.insert(number, Code { process, place, fence, clock, until });
        Running { ledger: self.clone(), number }
    }

    /// Whose code keeps this process from starting a shard now.
    fn keeps(&self, place: Place, process: ProcessId, now: Duration) -> Vec<ProcessId> {
        let hosted = self.lock();
        let codes = hosted.codes.values().filter(|code| code.place == place);
        let keeps = codes.filter(|code| code.process == process || now < code.until);
        keeps.map(|code| code.process).collect()
    }

    /// The number of the next message.
    pub(crate) fn next_message(&self) -> u64 {
        let mut hosted = self.lock();
        hosted.counted += 1;
        hosted.counted
    }

    /// A shard has answered.
    pub(crate) fn answered(&self, place: Place, tick: u64) {
        self.lock().answered.insert(place, tick);
    }

    /// When a shard answered last.
    #[must_use]
    pub fn answered_at(&self, place: Place) -> Option<u64> {
        self.lock().answered.get(&place).copied()
    }

    /// The sender of a message knows that nobody has handled it, or will.
    pub(crate) fn not_taken(&self, message: u64) {
        self.lock().not_taken.insert(message);
    }

    /// A message that was handled although its sender knows that it was not.
    #[must_use]
    pub fn taken_after_all(&self) -> Option<u64> {
        let hosted = self.lock();
        hosted.not_taken.iter().find(|message| hosted.handled.contains(message)).copied()
    }

    /// The handler of a shard does not return from now on.
    pub fn hang(&self, place: Place) {
        self.lock().hung.insert(place);
    }

    /// Whether it does not.
    #[must_use]
    pub fn hangs(&self, place: Place) -> bool {
        self.lock().hung.contains(&place)
    }

    /// Hosts and handlers do what they should from now on.
    pub fn calm(&self) {
        let mut hosted = self.lock();
        hosted.calm = true;
        hosted.hung.clear();
    }

    fn is_calm(&self) -> bool {
        self.lock().calm
    }

    /// Who may act for a shard now, and in which life of its table.
    #[must_use]
    pub fn hosts(&self, place: Place) -> Vec<(ProcessId, TableUid)> {
        let hosted = self.lock();
        let rights = hosted
            .rights
            .iter()
            .filter_map(|(process, rights)| Some((process, rights.get(&place)?)));
        let current = rights.filter(|(_, right)| right.fence.is_current());
        current.map(|(process, right)| (*process, right.uid)).collect()
    }

    /// Lets every exclusive host of this process write, as it would at any moment.
    pub fn write(&self, process: ProcessId, tables: &Tables, judge: &Judge) {
        let mut hosted = self.lock();
        let Hosted { rights, shown, codes, .. } = &mut *hosted;
        for code in codes.values_mut().filter(|code| code.process == process) {
            code.until = code.clock.until(&code.fence).unwrap_or(code.until);
        }
        for (place, right) in rights.get(&process).into_iter().flatten() {
            // Where two may host at a time, an epoch keeps nobody out.
            if tables.handoff(*place) != Handoff::Exclusive {
                continue;
            }
            if let Some(mut token) = right.fence.token() {
                if right.epoch_stays {
                    token.epoch = Epoch::default();
                }
                // The same once more says nothing new.
                let now = (process, token.uid, token.epoch, token.fence.term);
                if shown.insert(*place, now) != Some(now) {
                    judge.see(&Seen::Wrote(process, &token));
                }
            }
        }
    }
}

impl Default for Ledger {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ledger")
            .field("processes", &self.lock().rights.len())
            .finish_non_exhaustive()
    }
}

/// The service of one process for one table: it takes a while to start and to stop a shard.
pub struct Service {
    process: ProcessId,
    table: usize,
    ledger: Ledger,
    judge: Judge,
    wire: Wire,
    slowness: Duration,
    /// A planted bug: the epoch that it shows never rises.
    epoch_stays: bool,
    random: Mutex<StdRng>,
    habits: Habits,
}

/// What a service does out of the way.
#[derive(Debug)]
pub struct Habits {
    /// In a world of this kind.
    pub kind: Option<Kind>,
    /// The bug that is planted.
    pub plant: Option<Plant>,
    /// The world's time.
    pub time: WorldTime,
    /// Its process's clock.
    pub clock: Arc<ProcessClock>,
    /// What draws when it does.
    pub random: Mutex<StdRng>,
}

impl Habits {
    /// Whether it does now what it does so many times in a thousand.
    fn draw(&self, thousandths: u32) -> bool {
        self.random(0..1000) < u64::from(thousandths)
    }

    fn random(&self, range: std::ops::Range<u64>) -> u64 {
        self.random.lock().unwrap_or_else(PoisonError::into_inner).random_range(range)
    }

    /// Works for a while without yielding.
    async fn work(&self) {
        let lasts = self.random(ticks(Duration::from_millis(200))..ticks(Duration::from_secs(8)));
        keep::work(self.time.clone(), self.time.ticks() + lasts).await;
    }
}

/// Code of a shard that runs, until this is dropped.
struct Running {
    ledger: Ledger,
    number: u64,
}

impl Drop for Running {
    fn drop(&mut self) {
        let code = self.ledger.lock().codes.remove(&self.number);
        drop(code);
    }
}

impl Service {
    /// A service that takes up to `slowness` for each shard.
    #[must_use]
    pub fn new(
        (process, table): (ProcessId, usize),
        (ledger, judge, wire): (Ledger, Judge, Wire),
        slowness: Duration,
        seed: u64,
        habits: Habits,
    ) -> Self {
        let random = Mutex::new(StdRng::seed_from_u64(seed));
        let epoch_stays = habits.plant == Some(Plant::EpochStays);
        Self { process, table, ledger, judge, wire, slowness, epoch_stays, random, habits }
    }

    /// What it does out of the way when it starts or stops a shard.
    async fn stray(&self, place: Place, fence: Option<&ShardFence>) {
        if self.ledger.is_calm() {
            return;
        }
        match self.habits.kind {
            Some(Kind::Handlers) if self.habits.draw(20) => {
                let clock = &self.habits.clock;
                let fence = fence.cloned();
                let _running = fence.map(|it| self.ledger.code(self.process, place, it, clock));
                self.habits.work().await;
            }
            Some(Kind::Panics) if self.habits.draw(20) => panics::planned(),
            _ => {}
        }
    }

    async fn take_time(&self) {
        let most = u64::try_from(self.slowness.as_millis()).unwrap_or(0);
        let millis = self.random().random_range(0..=most);
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }

    fn random(&self) -> MutexGuard<'_, StdRng> {
        self.random.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, shard: ShardId) -> Place {
        Place { table: self.table, shard }
    }

    fn note(&self, what: u64, shard: ShardId) {
        let table = u64::try_from(self.table).unwrap_or(u64::MAX);
        let what = what << 48 | table << 40 | u64::from(self.process.run) << 16;
        self.wire.note(what | u64::from(shard.get()));
    }
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("process", &self.process).finish_non_exhaustive()
    }
}

#[async_trait]
impl Host for Service {
    async fn start(&self, shard: ShardId, fence: ShardFence) -> Result<(), HostError> {
        self.note(1, shard);
        let place = self.place(shard);
        // One that is over before it began may never act.
        if let Some(token) = fence.token() {
            let uid = token.uid;
            // Also those that host it in another life of its table: a service sees no difference.
            let hosts = self.ledger.hosts(place).into_iter().map(|(other, _)| other);
            let mut others: Vec<_> = hosts.filter(|other| *other != self.process).collect();
            others.extend(self.ledger.keeps(place, self.process, self.habits.time.elapsed()));
            self.judge.see(&Seen::Started(place, self.process, &others));
            let right = Right { fence: fence.clone(), uid, epoch_stays: self.epoch_stays };
            self.ledger.lock().rights.entry(self.process).or_default().insert(place, right);
        }
        self.stray(place, Some(&fence)).await;
        self.take_time().await;
        if self.random().random_bool(FAILING) {
            return Err("the world wants it".into());
        }
        self.judge.see(&Seen::Ready(place, self.process));
        Ok(())
    }

    async fn stop(&self, shard: ShardId) {
        let place = self.place(shard);
        let fence = {
            let hosted = self.ledger.lock();
            let rights = hosted.rights.get(&self.process);
            rights.and_then(|rights| Some(rights.get(&place)?.fence.clone()))
        };
        self.stray(place, fence.as_ref()).await;
        self.take_time().await;
        self.note(2, shard);
        if let Some(rights) = self.ledger.lock().rights.get_mut(&self.process) {
            rights.remove(&self.place(shard));
        }
    }
}

#[async_trait]
impl Handler for Service {
    async fn handle(&self, mail: Mail) -> Bytes {
        let place = self.place(mail.shard);
        let number = <[u8; 8]>::try_from(&*mail.payload).map(u64::from_le_bytes).unwrap_or(0);
        if !self.ledger.lock().handled.insert(number) {
            self.judge.wrong("at most once", format!("{place} handles message {number} again"));
        }
        let Habits { kind, plant, clock, .. } = &self.habits;
        let running = self.ledger.code(self.process, place, mail.fence.clone(), clock);
        let others = self.ledger.hosts(place).into_iter().map(|(other, _)| other);
        let others: Vec<_> = others.filter(|other| *other != self.process).collect();
        if mail.fence.is_current() {
            self.judge.see(&Seen::Handles(place, self.process, &others));
        }
        let calm = self.ledger.is_calm();
        match kind {
            Some(Kind::Handlers) if !calm && self.habits.draw(15) => {
                if *plant == Some(Plant::HandlerGoesOn) {
                    let lasts = Duration::from_millis(self.habits.random(2000..8000));
                    #[expect(
                        clippy::disallowed_methods,
                        reason = "the bug is that nobody owns it"
                    )]
                    tokio::spawn(async move {
                        tokio::time::sleep(lasts).await;
                        drop(running);
                    });
                } else {
                    self.habits.work().await;
                }
            }
            Some(Kind::Panics) if !calm && self.habits.draw(30) => panics::planned(),
            Some(Kind::Hangs) => {
                while self.ledger.hangs(place) {
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
            }
            _ if self.habits.draw(100) => {
                let takes = Duration::from_millis(self.habits.random(1..300));
                tokio::time::sleep(takes).await;
            }
            _ => {}
        }
        mail.payload
    }
}
