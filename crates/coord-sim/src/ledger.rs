//! Who hosts what, as the hosts' callbacks say.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use coord_cluster::{Handoff, Host, HostError, ShardFence};
use coord_core::{Epoch, ShardId, TableUid, Term};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::invariants::{Judge, ProcessId, Seen};
use crate::tables::{Place, Tables};
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
        self.lock().rights.remove(&process);
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
        let Hosted { rights, shown } = &mut *hosted;
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
}

impl Service {
    /// A service that takes up to `slowness` for each shard.
    #[must_use]
    pub fn new(
        (process, table): (ProcessId, usize),
        (ledger, judge, wire): (Ledger, Judge, Wire),
        slowness: Duration,
        seed: u64,
        epoch_stays: bool,
    ) -> Self {
        let random = Mutex::new(StdRng::seed_from_u64(seed));
        Self { process, table, ledger, judge, wire, slowness, epoch_stays, random }
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
            let others: Vec<_> = hosts.filter(|other| *other != self.process).collect();
            self.judge.see(&Seen::Started(place, self.process, &others));
            let right = Right { fence, uid, epoch_stays: self.epoch_stays };
            self.ledger.lock().rights.entry(self.process).or_default().insert(place, right);
        }
        self.take_time().await;
        if self.random().random_bool(FAILING) {
            return Err("the world wants it".into());
        }
        self.judge.see(&Seen::Ready(place, self.process));
        Ok(())
    }

    async fn stop(&self, shard: ShardId) {
        self.take_time().await;
        self.note(2, shard);
        if let Some(rights) = self.ledger.lock().rights.get_mut(&self.process) {
            rights.remove(&self.place(shard));
        }
    }
}
