//! Which shards of one table this node hosts. Pure: `now` is an argument.
//!
//! ```text
//!   not here ─(the map says so)─► starting ─► running ─(it does not any more)─► stopping ─► not here
//! ```
//!
//! It goes by the newest map that it has seen, however old that is: no other node gets a shard before this node
//! has reported it stopped, or this incarnation's time is up by its own deadline and the leader's clock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use coord_core::{
    Epoch, Fence, Incarnation, Moment, Motion, MotionPhase, NodeId, Report, ShardId, ShardMap,
    Slot, TableUid, Version,
};

use crate::gate::Standing;
use crate::handoff::Handoff;
use crate::record::TableNote;
use crate::status::HostFault;

/// How many shards start at once.
const STARTING_MAX: usize = 64;
/// The most stopping shards that a report lists; while there are more, it is held back.
const REPORT_SHARDS_MAX: usize = 4_096;
/// The first pause before a shard whose host failed is started again; it doubles.
const FAULT_PAUSE_MIN: Duration = Duration::from_secs(1);
const FAULT_PAUSE_MAX: Duration = Duration::from_secs(60);

/// What is to be done with a shard.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Order {
    Start {
        shard: ShardId,
        run: Incarnation,
        uid: TableUid,
        epoch: Epoch,
        fence: Fence,
    },
    /// It goes on, under another epoch.
    Renew {
        shard: ShardId,
        epoch: Epoch,
        fence: Fence,
    },
    Stop(ShardId),
    /// Its time is up.
    Abort(ShardId),
}

/// What is to be done now.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Turn {
    pub(crate) orders: Vec<Order>,
    /// What the registration has to say.
    pub(crate) report: Option<(Incarnation, Report)>,
    /// When to ask again although nothing was heard; later than now.
    pub(crate) wake: Option<Moment>,
    /// A shard still runs although it was aborted a while ago.
    pub(crate) overdue: bool,
    /// What is wrong with shards here, where that has changed.
    pub(crate) faults: Option<BTreeMap<ShardId, HostFault>>,
}

impl Turn {
    fn wake_by(&mut self, at: Moment) {
        self.wake = Some(self.wake.map_or(at, |wake| wake.min(at)));
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Starting,
    Running,
    Stopping,
    /// It is overdue at this moment.
    Aborted(Moment),
}

#[derive(Clone, Debug)]
struct Hosted {
    run: Incarnation,
    uid: TableUid,
    epoch: Epoch,
    state: State,
    /// When the order to start or to stop came.
    since: Moment,
}

/// Why a shard has to wait before it is started again.
#[derive(Debug)]
struct Failure {
    times: u32,
    why: String,
    until: Moment,
}

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// How long before the deadline it begins to stop.
    pub(crate) budget: Duration,
    /// How long after an abort a shard counts as overdue.
    pub(crate) grace: Duration,
    /// After this a start, or a stop, counts as slow.
    pub(crate) slow: Duration,
}

/// What one node hosts of one table.
#[derive(Debug)]
pub(crate) struct Hosting {
    me: NodeId,
    times: Times,
    /// Whether anything is really hosted; without a host every shard starts and stops at once.
    hosts: bool,
    standing: Option<Standing>,
    /// Until when each incarnation that still has shards here may host.
    deadlines: BTreeMap<Incarnation, Moment>,
    /// Nothing is hosted any more, and what still runs then is aborted.
    ends_at: Option<Moment>,
    map: Option<Arc<ShardMap>>,
    handoff: Handoff,
    shards: BTreeMap<ShardId, Hosted>,
    wanted: BTreeMap<ShardId, Epoch>,
    /// Shards whose host failed since they were ready last.
    failures: BTreeMap<ShardId, Failure>,
    /// The last report.
    faults: BTreeMap<ShardId, HostFault>,
    reported: Option<(Incarnation, Report)>,
}

impl Hosting {
    pub(crate) fn new(me: NodeId, times: Times, hosts: bool) -> Self {
        Self {
            me,
            times,
            hosts,
            standing: None,
            deadlines: BTreeMap::new(),
            ends_at: None,
            map: None,
            handoff: Handoff::default(),
            shards: BTreeMap::new(),
            wanted: BTreeMap::new(),
            failures: BTreeMap::new(),
            faults: BTreeMap::new(),
            reported: None,
        }
    }

    /// A map was seen. One that is older than another of the same generation is ignored.
    pub(crate) fn on_map(&mut self, map: Option<Arc<ShardMap>>) {
        let older = |old: &Arc<ShardMap>| {
            map.as_ref().is_some_and(|new| new.uid() == old.uid() && new.version() <= old.version())
        };
        if self.map.as_ref().is_some_and(older) {
            return;
        }
        self.handoff =
            map.as_ref().map_or(Handoff::default(), |map| TableNote::read(map.annex()).handoff);
        self.map = map;
        self.find_wanted();
    }

    /// The registration is held like this, or lost.
    pub(crate) fn on_standing(&mut self, standing: Option<Standing>) {
        if let Some(standing) = standing {
            self.deadlines.insert(standing.incarnation, standing.deadline);
        }
        let run = |standing: Option<Standing>| standing.map(|standing| standing.incarnation);
        let other = run(self.standing) != run(standing);
        self.standing = standing;
        if other {
            self.failures.clear();
            self.find_wanted();
        }
    }

    /// Everything is stopped, and what is left then aborted.
    pub(crate) fn on_end(&mut self, limit: Moment) {
        self.ends_at.get_or_insert(limit);
    }

    pub(crate) fn on_started(&mut self, shard: ShardId) {
        if let Some(hosted) = self.shards.get_mut(&shard)
            && hosted.state == State::Starting
        {
            hosted.state = State::Running;
            self.failures.remove(&shard);
        }
    }

    /// Nothing of the shard runs here any more, and this is why, where its host failed. Tells how often it
    /// has since the shard was ready last.
    pub(crate) fn on_ended(&mut self, shard: ShardId, failed: Option<String>, now: Moment) -> u32 {
        self.shards.remove(&shard);
        let times = self.failures.get(&shard).map_or(0, |failure| failure.times);
        let Some(why) = failed else { return times };
        let pause = FAULT_PAUSE_MIN.saturating_mul(1 << times.min(10)).min(FAULT_PAUSE_MAX);
        let times = times.saturating_add(1);
        self.failures.insert(shard, Failure { times, why, until: now.plus(pause) });
        times
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.shards.is_empty()
    }

    /// The generation and version of the table that it goes by, the shards that run, and the version that
    /// brought the last of them.
    pub(crate) fn running(&self) -> Option<(TableUid, Version, Vec<ShardId>, Version)> {
        let map = self.map.as_ref()?;
        let runs = self.shards.iter().filter(|(_, hosted)| hosted.state == State::Running);
        let newest = runs.clone().map(|(_, hosted)| hosted.epoch.get()).max().unwrap_or_default();
        let shards = runs.map(|(shard, _)| *shard).collect();
        Some((map.uid(), map.version(), shards, Version::new(newest)))
    }

    /// What to do now.
    pub(crate) fn next(&mut self, now: Moment) -> Turn {
        let mut turn = Turn::default();
        let begin_to_stop =
            self.standing.map(|standing| standing.deadline.minus(self.times.budget));
        let may_host = self.ends_at.is_none() && begin_to_stop.is_some_and(|until| now < until);
        turn.wake = begin_to_stop.filter(|until| may_host && *until > now);
        self.stop_unwanted(may_host, now, &mut turn);
        if may_host {
            self.start_wanted(now, &mut turn);
        }
        self.abort_late(now, &mut turn);
        if !self.hosts {
            self.shards.clear();
            turn.orders.clear();
        }
        self.find_faults(now, &mut turn);
        self.report(&mut turn);
        let runs: BTreeSet<Incarnation> = self.shards.values().map(|hosted| hosted.run).collect();
        let present = self.standing.map(|standing| standing.incarnation);
        self.deadlines.retain(|run, _| Some(*run) == present || runs.contains(run));
        turn
    }

    fn stop_unwanted(&mut self, may_host: bool, now: Moment, turn: &mut Turn) {
        let run = self.standing.map(|standing| standing.incarnation);
        let fence = self.map.as_ref().and_then(|map| map.writer().cloned());
        let uid = self.map.as_ref().map(|map| map.uid());
        for (&shard, hosted) in &mut self.shards {
            if !matches!(hosted.state, State::Starting | State::Running) {
                continue;
            }
            // A shard that runs for another generation of the table is another shard.
            let same = may_host && Some(hosted.run) == run && Some(hosted.uid) == uid;
            let epoch = self.wanted.get(&shard).filter(|_| same);
            match (epoch, &fence) {
                (Some(epoch), Some(fence)) if *epoch != hosted.epoch => {
                    hosted.epoch = *epoch;
                    let (epoch, fence) = (*epoch, fence.clone());
                    turn.orders.push(Order::Renew { shard, epoch, fence });
                }
                (Some(_), _) => {}
                (None, _) => {
                    (hosted.state, hosted.since) = (State::Stopping, now);
                    turn.orders.push(Order::Stop(shard));
                }
            }
        }
    }

    fn start_wanted(&mut self, now: Moment, turn: &mut Turn) {
        let (Some(standing), Some(map)) = (self.standing, &self.map) else { return };
        if !self.hosts {
            return;
        }
        let starting = self.shards.values().filter(|hosted| hosted.state == State::Starting);
        let mut room = STARTING_MAX.saturating_sub(starting.count());
        let (run, uid) = (standing.incarnation, map.uid());
        let Some(fence) = map.writer() else { return };
        for (&shard, &epoch) in &self.wanted {
            if room == 0 {
                return;
            }
            if self.shards.contains_key(&shard) {
                continue;
            }
            let failure = self.failures.get(&shard).map(|failure| failure.until);
            if let Some(until) = failure.filter(|until| *until > now) {
                turn.wake_by(until);
                continue;
            }
            room -= 1;
            let hosted = Hosted { run, uid, epoch, state: State::Starting, since: now };
            self.shards.insert(shard, hosted);
            turn.orders.push(Order::Start { shard, run, uid, epoch, fence: fence.clone() });
        }
    }

    fn abort_late(&mut self, now: Moment, turn: &mut Turn) {
        for (&shard, hosted) in &mut self.shards {
            let deadline = self.deadlines.get(&hosted.run).copied().unwrap_or(now);
            let until = self.ends_at.map_or(deadline, |end| end.min(deadline));
            let wake = match hosted.state {
                State::Stopping if until <= now => {
                    // However late it was aborted, it has its time to end.
                    let overdue = now.plus(self.times.grace);
                    hosted.state = State::Aborted(overdue);
                    turn.orders.push(Order::Abort(shard));
                    overdue
                }
                State::Aborted(overdue) if overdue <= now => {
                    turn.overdue = true;
                    continue;
                }
                State::Aborted(overdue) => overdue,
                State::Stopping => until,
                State::Starting | State::Running => continue,
            };
            turn.wake_by(wake);
        }
    }

    /// What is wrong with shards that are here, or are meant to be.
    fn find_faults(&mut self, now: Moment, turn: &mut Turn) {
        let failed = self.failures.iter().filter(|(shard, _)| self.wanted.contains_key(shard));
        let failed = failed.map(|(shard, Failure { times, why, .. })| {
            (*shard, HostFault::Failed { times: *times, why: why.clone() })
        });
        let mut faults: BTreeMap<_, _> = failed.collect();
        for (&shard, hosted) in &self.shards {
            let slow_at = hosted.since.plus(self.times.slow);
            let fault = match hosted.state {
                State::Running => continue,
                State::Aborted(_) => HostFault::Aborted,
                State::Starting | State::Stopping if now < slow_at => {
                    turn.wake_by(slow_at);
                    continue;
                }
                State::Starting => HostFault::StartSlow,
                State::Stopping => HostFault::StopSlow,
            };
            faults.insert(shard, fault);
        }
        if faults != self.faults {
            self.faults.clone_from(&faults);
            turn.faults = Some(faults);
        }
    }

    /// The slot of this incarnation in the map.
    fn slot(&self) -> Option<(Slot, &ShardMap)> {
        let (standing, map) = (self.standing?, self.map.as_ref()?);
        let slot = map.slot_of(&self.me)?;
        let entry = map.node(slot)?;
        (entry.incarnation == standing.incarnation).then_some((slot, &**map))
    }

    fn find_wanted(&mut self) {
        let mut wanted = BTreeMap::new();
        if let Some((me, map)) = self.slot().filter(|_| self.hosts) {
            let replicas = usize::from(map.header().replicas.get());
            // This node has few of very many places, so that what is not its own is only passed over.
            let places = map.raw_owners().iter().enumerate();
            let owned = places.filter(|(_, slot)| **slot == me.get());
            let shard = |at: usize| ShardId::new(u32::try_from(at / replicas).unwrap_or(u32::MAX));
            let owned = owned.map(|(at, _)| (shard(at), Some(at % replicas)));
            let to_me = |motions: &[Motion]| motions.iter().any(|m| Slot::from(m.other) == me);
            let moving = map.motions().iter().filter(|(_, motions)| to_me(motions));
            let coming = moving
                .filter(|(shard, _)| map.owner_slots(**shard).all(|slot| slot != me))
                .map(|(shard, _)| (*shard, None));
            for (shard, place) in owned.chain(coming) {
                let motions = map.motions().get(&shard).map_or(&[][..], Vec::as_slice);
                if is_mine(self.handoff, me, place, motions) {
                    wanted.insert(shard, map.epoch(shard));
                }
            }
        }
        self.wanted = wanted;
    }

    /// A report is due when a move waits for it, or when it would say something else than the last one.
    fn report(&mut self, turn: &mut Turn) {
        let Some(standing) = self.standing else { return };
        let Some(map) = &self.map else { return };
        let run = standing.incarnation;
        let mut report = Report::new(map.uid(), map.version());
        for (&shard, hosted) in &self.shards {
            match hosted.state {
                State::Stopping | State::Aborted(_) => {
                    report.stopping.insert(shard);
                }
                State::Starting | State::Running => {}
            }
        }
        let mut asked = None;
        if let Some((me, map)) = self.slot() {
            for (&shard, motions) in map.motions() {
                for motion in motions {
                    let owner = map.owner_slots(shard).nth(motion.replica.into());
                    let other = Slot::from(motion.other);
                    let starts = motion.phase == MotionPhase::MovingTo
                        && self.handoff == Handoff::MakeBeforeBreak
                        && other == me
                        && owner != Some(me);
                    let stops = match motion.phase {
                        MotionPhase::MovingTo => owner == Some(me),
                        MotionPhase::Leaving => other == me,
                        _ => false,
                    };
                    if starts || stops {
                        asked = asked.max(Some(motion.since));
                    }
                    let runs = self.shards.get(&shard).map(|hosted| hosted.state);
                    if starts && (!self.hosts || runs == Some(State::Running)) {
                        report.started.insert(shard);
                    }
                }
            }
        }
        let last = self.reported.as_ref().filter(|(of, last)| *of == run && last.uid == report.uid);
        let is_news = match last {
            // A generation that begins may wait for the hosts of the one before it, so a report names its
            // generation.
            None => asked.is_some() || !self.shards.is_empty() || map.version() == Version::ZERO,
            Some((_, last)) => {
                asked > Some(last.applied)
                    || (&last.stopping, &last.started) != (&report.stopping, &report.started)
            }
        };
        // A stop that is not listed counts as done, so a report that can't list all of them is not made.
        if is_news && report.stopping.len() <= REPORT_SHARDS_MAX {
            self.reported = Some((run, report.clone()));
            turn.report = Some((run, report));
        }
    }
}

/// Whether a node runs a shard in which it has this place.
fn is_mine(handoff: Handoff, me: Slot, place: Option<usize>, motions: &[Motion]) -> bool {
    let moving = |motion: &&Motion| motion.phase == MotionPhase::MovingTo;
    let to_me = |motion: &&Motion| Slot::from(motion.other) == me;
    let at = |motion: &Motion| usize::from(motion.replica);
    let Some(place) = place else {
        return handoff == Handoff::MakeBeforeBreak
            && motions.iter().filter(moving).any(|motion| to_me(&motion));
    };
    match motions.iter().filter(moving).find(|motion| at(motion) == place) {
        None => true,
        // No node takes the place: the shard only has to stop.
        Some(motion) if to_me(&motion) => false,
        Some(_) if handoff == Handoff::MakeBeforeBreak => true,
        // One that goes nearer to the front runs on.
        Some(_) => motions.iter().filter(moving).any(|motion| to_me(&motion) && at(motion) < place),
    }
}

#[cfg(test)]
mod tests;
