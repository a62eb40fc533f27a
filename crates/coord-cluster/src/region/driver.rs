//! Performs what [`Hosting`] decides, for one table of one node.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::sync::{Arc, Weak};

use coord_core::{Load, SHARD_LOADS_MAX, ShardId, TableName};
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

use super::hosting::{Hosting, Order, Times, Turn};
use super::sampler::{Sample, Sampler};
use super::{Host, HostError, ShardFence, ShardToken};
use crate::gate::Permit;
use crate::model::{TableLoad, TableSpec};
use crate::shared::{Ending, Shared};

/// How many shards may be ready before the region has taken it in.
const STARTED_MAX: usize = 64;

/// Hosts the shards of a table, until the node's runtime ends and nothing runs any more.
pub(crate) async fn run(shared: Arc<Shared>, table: TableName, host: Option<Arc<dyn Host>>) {
    let times = Times {
        budget: shared.settings.stop_budget(),
        grace: shared.settings.grace(),
        slow: shared.settings.handoff_timeout,
    };
    let (ready, started) = mpsc::channel(STARTED_MAX);
    let hosting = Hosting::new(shared.node.clone(), times, host.is_some());
    let sampler = sampler(&shared, &table).filter(|_| host.is_some());
    let region = Region {
        shared,
        table,
        host,
        hosting,
        sampler,
        measuring: JoinSet::new(),
        ready,
        tasks: JoinSet::new(),
        by_task: HashMap::new(),
        running: HashMap::new(),
        leaving: BTreeMap::new(),
    };
    region.run(started).await;
}

/// None for a table whose strategy does not go by loads.
fn sampler(shared: &Shared, table: &TableName) -> Option<Sampler> {
    let wants = |spec: &&TableSpec| spec.strategy.wants_loads();
    shared.specs.get(table).filter(wants)?;
    let tables = shared.specs.values().filter(wants).count().max(1);
    let seed = shared.gate.standing().map_or(0, |standing| standing.incarnation.as_u128());
    Some(Sampler::new(seed, (SHARD_LOADS_MAX / tables).max(1), shared.clock.now()))
}

struct Region {
    shared: Arc<Shared>,
    table: TableName,
    host: Option<Arc<dyn Host>>,
    hosting: Hosting,
    sampler: Option<Sampler>,
    /// Asks the host for loads: its code may take its time, and must not hold up the region.
    measuring: JoinSet<Sample>,
    ready: mpsc::Sender<ShardId>,
    tasks: JoinSet<Result<(), HostError>>,
    by_task: HashMap<Id, ShardId>,
    running: HashMap<ShardId, Running>,
    /// Shards whose task has ended while other code of theirs goes on.
    leaving: BTreeMap<ShardId, Leaving>,
}

/// A shard that runs here.
struct Running {
    stop: CancellationToken,
    abort: AbortHandle,
    fence: ShardFence,
    stay: Weak<Permit>,
}

/// A shard of which something goes on.
struct Leaving {
    stay: Weak<Permit>,
    /// Why it could not be started, where it could not.
    why: Option<String>,
}

impl Region {
    async fn run(mut self, mut started: mpsc::Receiver<ShardId>) {
        let shared = Arc::clone(&self.shared);
        let Some(mut maps) = shared.maps.get(&self.table).map(watch::Sender::subscribe) else {
            return;
        };
        let mut gate = shared.gate.subscribe();
        let mut ends = false;
        loop {
            let now = shared.clock.now();
            self.hosting.on_map(maps.borrow_and_update().clone());
            gate.borrow_and_update();
            self.let_go();
            self.hosting.on_standing(shared.gate.standing());
            if ends {
                if shared.ending() == Ending::Abandoned || self.hosting.is_idle() {
                    // What still runs is dropped with the tasks, and keeps its permit until it is.
                    return;
                }
                self.hosting.on_end(now.plus(shared.settings.stop_budget()));
            }
            let Turn { orders, report, wake, overdue, faults } = self.hosting.next(now);
            debug_assert!(wake.is_none_or(|wake| wake > now), "it would spin");
            if let Some(faults) = faults {
                shared.observe(|observer| observer.on_host_faults(&self.table, faults));
            }
            if overdue && ends {
                tracing::error!(table = %self.table, "shards run on although the node ends");
                return;
            }
            let again = self.obey(orders);
            if let Some(report) = report {
                shared.reports.send_modify(|all| {
                    all.insert(self.table.clone(), report);
                });
            }
            if again || (ends && self.hosting.is_idle()) {
                continue;
            }
            let measures = ends || !self.measuring.is_empty();
            let sample_at = self.sampler.as_ref().map(Sampler::at).filter(|_| !measures);
            let sample = async {
                match sample_at {
                    Some(at) => shared.sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = shared.stop.cancelled(), if !ends => ends = true,
                Ok(()) = maps.changed() => {}
                Ok(()) = gate.changed() => {}
                Some(shard) = started.recv() => self.hosting.on_started(shard),
                Some(ended) = self.tasks.join_next_with_id() => self.take_ended(ended),
                () = shared.sleep_until_any(wake) => {}
                Some(measured) = self.measuring.join_next() => self.take_sample(measured),
                () = sample => self.sample(),
            }
            while let Ok(shard) = started.try_recv() {
                self.hosting.on_started(shard);
            }
            while let Some(ended) = self.tasks.try_join_next_with_id() {
                self.take_ended(ended);
            }
        }
    }

    /// Asks the host how busy its shards are.
    fn sample(&mut self) {
        let (Some(sampler), Some(host)) = (&mut self.sampler, &self.host) else { return };
        let standing = self.shared.gate.standing();
        let hosted = standing.and_then(|standing| Some((standing, self.hosting.running()?)));
        let Some((standing, (uid, applied, shards, newest))) = hosted else {
            sampler.put_off(self.shared.clock.now());
            return;
        };
        let fence = |shard| Some((shard, self.running.get(&shard)?.fence.clone()));
        let shards: Vec<_> = shards.into_iter().filter_map(fence).collect();
        let (run, host) = (standing.incarnation, Arc::clone(host));
        self.measuring.spawn(async move {
            let mut loads = Vec::new();
            for (shard, fence) in shards {
                // Held while the host's code runs.
                let Some(_stay) = fence.stay() else { continue };
                loads.extend(host.load(shard).map(|load| (shard, load)));
            }
            Sample { run, uid, applied, newest, loads }
        });
    }

    /// Has the registration tell what is new of the loads.
    fn take_sample(&mut self, measured: Result<Sample, JoinError>) {
        let now = self.shared.clock.now();
        let Some(sampler) = &mut self.sampler else { return };
        let Ok(sample) = measured else {
            tracing::error!(table = %self.table, "the host panicked when it was asked for loads");
            sampler.put_off(now);
            return;
        };
        let run = sample.run;
        let sum: f64 = sample.loads.iter().map(|(_, load)| load).filter(|load| **load >= 0.0).sum();
        if let Some(report) = sampler.take(sample, now) {
            let told =
                TableLoad { run, report: report.clone(), sum: Load::new(sum).unwrap_or_default() };
            self.shared.loads.send_modify(|all| {
                all.insert(self.table.clone(), told);
            });
        }
    }

    /// True if a shard could not be let in, which changes what is to be done.
    fn obey(&mut self, orders: Vec<Order>) -> bool {
        let mut again = false;
        for order in orders {
            match order {
                Order::Start { shard, run, uid, epoch, fence } => {
                    let (Some(host), Some(permit)) = (&self.host, self.shared.gate.enter(run))
                    else {
                        let _ = self.hosting.on_ended(shard, None, self.shared.clock.now());
                        again = true;
                        continue;
                    };
                    let table = self.table.clone();
                    let token = ShardToken { table, uid, shard, epoch, fence };
                    let (gate, permit) = (Arc::clone(&self.shared.gate), Arc::new(permit));
                    let fence = ShardFence::new(gate, run, &permit, token);
                    let (stop, stay) = (CancellationToken::new(), Arc::downgrade(&permit));
                    let life = Life {
                        host: Arc::clone(host),
                        fence: Ended(fence.clone()),
                        shard,
                        stop: stop.clone(),
                        ready: self.ready.clone(),
                        _permit: permit,
                    };
                    let abort = self.tasks.spawn(life.live());
                    self.by_task.insert(abort.id(), shard);
                    self.running.insert(shard, Running { stop, abort, fence, stay });
                }
                Order::Renew { shard, epoch, fence } => {
                    if let Some(running) = self.running.get(&shard) {
                        running.fence.renew(epoch, fence);
                    }
                }
                Order::Stop(shard) => {
                    if let Some(running) = self.running.get(&shard) {
                        running.stop.cancel();
                    }
                }
                Order::Abort(shard) => {
                    if let Some(running) = self.running.get(&shard) {
                        running.abort.abort();
                    }
                }
            }
        }
        // Nothing can be waited for after a clock that stood still at the deadline.
        again
            && self
                .shared
                .gate
                .standing()
                .is_some_and(|standing| self.shared.clock.now() < standing.deadline)
    }

    fn take_ended(&mut self, ended: Result<(Id, Result<(), HostError>), JoinError>) {
        let (id, why) = match ended {
            Ok((id, started)) => (id, started.err().map(|error| chain(&*error))),
            Err(error) => {
                let id = error.id();
                (id, error.try_into_panic().ok().map(|panic| panicked(&*panic)))
            }
        };
        let Some(shard) = self.by_task.remove(&id) else { return };
        let stay = self.running.remove(&shard).map_or_else(Weak::new, |running| running.stay);
        self.leaving.insert(shard, Leaving { stay, why });
        self.let_go();
    }

    /// Shards of which nothing goes on any more are not here any more.
    fn let_go(&mut self) {
        let over = |(shard, leaving): (&ShardId, &Leaving)| {
            (leaving.stay.strong_count() == 0).then_some(*shard)
        };
        for shard in self.leaving.iter().filter_map(over).collect::<Vec<_>>() {
            let why = self.leaving.remove(&shard).and_then(|leaving| leaving.why);
            self.gone(shard, why);
        }
    }

    fn gone(&mut self, shard: ShardId, why: Option<String>) {
        let times = self.hosting.on_ended(shard, why.clone(), self.shared.clock.now());
        if let Some(why) = why {
            let table = self.table.clone();
            self.shared.observe(|observer| observer.on_shard_failed(table, shard, times, why));
        }
    }
}

/// What a panic says.
fn panicked(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("the host panicked: {}", text.unwrap_or("it does not say why"))
}

/// An error and what it comes from, in one line.
fn chain(error: &(dyn Error + 'static)) -> String {
    let sources = std::iter::successors(error.source(), |&source| source.source());
    sources.fold(error.to_string(), |text, source| format!("{text}: {source}"))
}

/// One shard from its start to its stop.
struct Life {
    host: Arc<dyn Host>,
    fence: Ended,
    shard: ShardId,
    stop: CancellationToken,
    ready: mpsc::Sender<ShardId>,
    /// Let go of last, when nothing of this runs any more.
    _permit: Arc<Permit>,
}

impl Life {
    /// Why it could not be started, where it could not.
    async fn live(self) -> Result<(), HostError> {
        let started = tokio::select! {
            biased;
            () = self.stop.cancelled() => None,
            started = self.host.start(self.shard, self.fence.0.clone()) => Some(started),
        };
        if let Some(Ok(())) = started {
            // The region is there for as long as its tasks.
            let _ = self.ready.send(self.shard).await;
            self.stop.cancelled().await;
        }
        self.host.stop(self.shard).await;
        started.unwrap_or(Ok(()))
    }
}

/// A fence that ends with its shard, also by a panic or an abort.
struct Ended(ShardFence);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.end();
    }
}
