//! Who sends messages to shards, and sees what is answered.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use coord_cluster::{AskError, Cluster};
use coord_core::ShardId;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::{JoinHandle, JoinSet};

use crate::invariants::Judge;
use crate::ledger::Ledger;
use crate::tables::{Place, Tables};
use crate::time::WorldTime;

/// How often a process asks a shard.
const EVERY: Duration = Duration::from_millis(120);

/// Asks the shards of all tables, one after the other by chance.
pub struct Asker {
    tables: Tables,
    ledger: Ledger,
    judge: Judge,
    time: WorldTime,
    random: Arc<Mutex<StdRng>>,
}

impl Asker {
    /// One that draws whom it asks from this seed.
    #[must_use]
    pub fn new(tables: Tables, ledger: Ledger, judge: Judge, time: WorldTime, seed: u64) -> Self {
        let random = Arc::new(Mutex::new(StdRng::seed_from_u64(seed)));
        Self { tables, ledger, judge, time, random }
    }

    /// Asks from now on, until what is returned is dropped.
    pub(crate) fn ask(&self, cluster: Cluster) -> Asking {
        let Self { tables, ledger, judge, time, random } = self;
        let (tables, ledger, judge) = (tables.clone(), ledger.clone(), judge.clone());
        let (time, random) = (time.clone(), Arc::clone(random));
        #[expect(clippy::disallowed_methods, reason = "what is returned owns it")]
        let task = tokio::spawn(async move {
            let mut asked = JoinSet::new();
            loop {
                tokio::time::sleep(EVERY).await;
                while asked.try_join_next().is_some() {}
                let (place, limit) = {
                    let mut random = random.lock().unwrap_or_else(PoisonError::into_inner);
                    let table = random.random_range(0..tables.sheets().count());
                    let sheet = tables.sheets().nth(table);
                    let shards = sheet.map_or(1, |sheet| sheet.header.shards.get());
                    let shard = ShardId::new(random.random_range(0..shards));
                    let limit = Duration::from_millis(random.random_range(300..2500));
                    (Place { table, shard }, limit)
                };
                let Some(sheet) = tables.sheets().nth(place.table) else { continue };
                let Ok(mailbox) = cluster.mailbox(&sheet.name) else { continue };
                let number = ledger.next_message();
                let payload = Bytes::copy_from_slice(&number.to_le_bytes());
                let asks = mailbox.ask_shard(place.shard, payload.clone(), limit);
                let (ledger, judge, time) = (ledger.clone(), judge.clone(), time.clone());
                asked.spawn(async move {
                    match asks.await {
                        Ok(answer) if answer == payload => ledger.answered(place, time.ticks()),
                        Ok(_) => judge.wrong("answers", format!("{place} gives another's answer")),
                        Err(error) if error.effect() == coord_core::Effect::None => {
                            ledger.not_taken(number);
                        }
                        Err(AskError::NoSuchShard { .. } | AskError::TooLarge { .. }) => {
                            judge.wrong("answers", format!("{place} is not known"));
                        }
                        Err(_) => {}
                    }
                });
            }
        });
        Asking(task)
    }
}

/// Ends with this.
pub(crate) struct Asking(JoinHandle<()>);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl fmt::Debug for Asker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Asker").field("tables", &self.tables).finish_non_exhaustive()
    }
}
