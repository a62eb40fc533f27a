//! What worlds of a [`Kind`] promise besides the invariants: who goes on, how long a shard has no host, and
//! how much waits.

use std::collections::BTreeMap;
use std::time::Duration;

use super::World;
use crate::kinds::Kind;
use crate::peers::Peers;
use crate::process::Process;
use crate::tables::Place;
use crate::time::{at, ticks};

/// How often hosts and numbers are looked at, in ticks.
const EVERY: u64 = 8;
/// From then on every shard has a host.
const BEGINS: Duration = Duration::from_secs(20);
/// Within so long after the last loss every shard has a host again: five unanswered probes, 20 s of
/// quiet and three quarters more of unrest; and one node TTL later where what was lost may run on.
pub(super) const LOST: Duration = Duration::from_secs(50);
/// A shard that is hosted all the while answers within so long.
const ANSWERS: Duration = Duration::from_secs(15);
/// The most tasks of one process: its node's, and those of messages.
const TASKS: (usize, usize) = (400, 400);

/// What was seen for it.
#[derive(Debug)]
pub(super) struct Bounds {
    /// How long a shard may have no host, in a world where only its kind does anything.
    hostless: Option<Duration>,
    /// Since when a shard has no host.
    without: BTreeMap<Place, u64>,
    /// Since when a shard has had the same host.
    with: BTreeMap<Place, (crate::invariants::ProcessId, u64)>,
}

impl Bounds {
    pub(super) fn new(kind: Option<Kind>, gentle: bool) -> Self {
        let seconds = match kind {
            _ if !gentle => None,
            None => None,
            // A host may work for 8 s without yielding, and then another one.
            Some(Kind::Handlers) => Some(40),
            // The failed start of a shard is tried again after up to a minute.
            Some(Kind::Panics) => Some(40),
            Some(Kind::Losses | Kind::Forget | Kind::Replaced) => None,
            // From the last of them on; whom it concerns may be cut off for 6 s.
            Some(Kind::Vanish | Kind::Wipe) => Some(14),
            Some(Kind::Hangs) => Some(15),
            // The clock may stand still for 12 s.
            Some(Kind::Clocks) => Some(28),
            Some(Kind::Restarts) => Some(20),
        };
        Self {
            hostless: seconds.map(Duration::from_secs),
            without: BTreeMap::new(),
            with: BTreeMap::new(),
        }
    }
}

impl World {
    /// Whether what the kind promises holds.
    pub(super) fn see_bounds(&mut self) {
        let Some(kind) = self.kind else { return };
        let now = self.time.ticks();
        if kind == Kind::Losses && self.trouble.keeps() {
            self.see_majority(now);
        }
        if kind == Kind::Replaced {
            self.see_outdated(now);
        }
        if !now.is_multiple_of(EVERY) || now < ticks(BEGINS) {
            return;
        }
        self.see_hosts(now);
        if kind.has_mail() {
            self.see_mail(kind, now);
        }
        let processes = self.nodes.iter().flat_map(|node| &node.processes);
        for process in processes {
            let (node, mail) = process.tasks();
            if node > TASKS.0 || mail > TASKS.1 {
                let why = format!("{} has {node} tasks, and {mail} of messages", process.id);
                self.judge.wrong("bounded", why);
            }
        }
    }

    fn see_majority(&self, now: u64) {
        // All have joined by then.
        if now < ticks(BEGINS) {
            return;
        }
        for (node, process) in self.kept_nodes() {
            let down = process.is_none_or(|process| {
                let status = process.cluster().map(|cluster| cluster.status());
                status.is_none_or(|status| status.went_down.is_some())
            });
            if down {
                let status = process.and_then(Process::cluster).map(|cluster| cluster.status());
                let strategy = &self.trouble.strategy;
                let how = status.and_then(|status| status.went_down);
                let why = format!("n{node} is not lost, and went down: {how:?} by {strategy:?}");
                self.judge.wrong("majority", why);
            }
        }
    }

    fn see_hosts(&mut self, now: u64) {
        let counts: Vec<_> = self.tables.sheets().map(|it| it.header.shards).collect();
        let lost_at = self.trouble.all_lost_at().filter(|_| self.trouble.keeps());
        let lost = lost_at.is_some_and(|lost| now >= lost + ticks(LOST + self.trouble.node_ttl));
        for (table, shards) in counts.into_iter().enumerate() {
            for shard in shards.shards() {
                let place = Place { table, shard };
                let hosts = self.ledger.hosts(place);
                let host = hosts.iter().find(|(host, _)| !self.trouble.is_lost(host.node));
                let Some((host, _)) = host else {
                    self.bounds.with.remove(&place);
                    let since = *self.bounds.without.entry(place).or_insert(now);
                    // Of records that vanish again and again each has its time.
                    let forgets = matches!(self.kind, Some(Kind::Vanish | Kind::Wipe));
                    let from = if forgets { since.max(self.trouble.last) } else { since };
                    let long = at(now - from);
                    if self.bounds.hostless.is_some_and(|most| long >= most) || lost {
                        let why = format!("{place} has had no host for {long:?}");
                        self.judge.wrong("a host for every shard", why);
                    }
                    continue;
                };
                self.bounds.without.remove(&place);
                let with = self.bounds.with.entry(place).or_insert((*host, now));
                if with.0 != *host {
                    *with = (*host, now);
                }
            }
        }
    }

    fn see_mail(&self, kind: Kind, now: u64) {
        if let Some(message) = self.ledger.taken_after_all() {
            let why =
                format!("message {message} was handled, and its sender knows that it was not");
            self.judge.wrong("effects", why);
        }
        let shards: u32 = self.tables.sheets().map(|sheet| sheet.header.shards.get()).sum();
        let most = 3 * usize::try_from(shards).unwrap_or(usize::MAX) + 8;
        let peers = self.peers.as_ref();
        if let Some((from, to, count)) = peers.and_then(Peers::most_working)
            && count > most
        {
            let why = format!("{count} requests of {from} wait at {to}, and {most} are enough");
            self.judge.wrong("bounded", why);
        }
        if kind != Kind::Hangs || !self.trouble.is_gentle() {
            return;
        }
        for (place, (host, since)) in &self.bounds.with {
            let since = self.ledger.answered_at(*place).unwrap_or(0).max(*since);
            let silent = at(now.saturating_sub(since));
            if silent >= ANSWERS && !self.ledger.hangs(*place) {
                let why =
                    format!("{place}, on {host} all the while, has not answered for {silent:?}");
                self.judge.wrong("answers", why);
            }
        }
    }
}
