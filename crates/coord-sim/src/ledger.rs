//! Who hosts what, as the hosts' callbacks say.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use coord_cluster::{Host, ShardFence};
use coord_core::{Epoch, ShardId};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::invariants::{Judge, ProcessId, Seen};
use crate::wire::Wire;

/// Who hosts which shard of the world's table; clones are the same.
#[derive(Clone)]
pub struct Ledger(Arc<Mutex<Hosted>>);

type Hosted = BTreeMap<ShardId, BTreeMap<ProcessId, Right>>;

/// A right to host, and whether its epoch is shown as 0.
type Right = (ShardFence, bool);

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
        self.lock().values_mut().for_each(|hosts| drop(hosts.remove(&process)));
    }

    /// Who may act for a shard now.
    #[must_use]
    pub fn hosts(&self, shard: ShardId) -> Vec<ProcessId> {
        let hosted = self.lock();
        let hosts = hosted.get(&shard).into_iter().flatten();
        hosts.filter(|(_, (fence, _))| fence.is_current()).map(|(process, _)| *process).collect()
    }

    /// Lets every host of this process write, as it would at any moment.
    pub fn write(&self, process: ProcessId, judge: &Judge) {
        for hosts in self.lock().values() {
            let Some((fence, epoch_stays)) = hosts.get(&process) else { continue };
            if let Some(mut token) = fence.token() {
                if *epoch_stays {
                    token.epoch = Epoch::default();
                }
                judge.see(&Seen::Wrote(process, &token));
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
        f.debug_struct("Ledger").field("shards", &self.lock().len()).finish_non_exhaustive()
    }
}

/// The service of one process: it takes a while to start and to stop a shard.
pub struct Service {
    process: ProcessId,
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
        process: ProcessId,
        (ledger, judge, wire): (Ledger, Judge, Wire),
        slowness: Duration,
        seed: u64,
        epoch_stays: bool,
    ) -> Self {
        let random = Mutex::new(StdRng::seed_from_u64(seed));
        Self { process, ledger, judge, wire, slowness, epoch_stays, random }
    }

    async fn take_time(&self) {
        let most = u64::try_from(self.slowness.as_millis()).unwrap_or(0);
        let millis = {
            let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
            random.random_range(0..=most)
        };
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }

    fn note(&self, what: u64, shard: ShardId) {
        self.wire.note(what << 32 | u64::from(self.process.run) << 16 | u64::from(shard.get()));
    }
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("process", &self.process).finish_non_exhaustive()
    }
}

#[async_trait]
impl Host for Service {
    async fn start(&self, shard: ShardId, fence: ShardFence) {
        self.note(1, shard);
        let others: Vec<_> =
            self.ledger.hosts(shard).into_iter().filter(|other| *other != self.process).collect();
        self.judge.see(&Seen::Started(shard, self.process, &others));
        self.ledger
            .lock()
            .entry(shard)
            .or_default()
            .insert(self.process, (fence, self.epoch_stays));
        self.take_time().await;
    }

    async fn stop(&self, shard: ShardId) {
        self.take_time().await;
        self.note(2, shard);
        self.ledger.lock().entry(shard).or_default().remove(&self.process);
    }
}
