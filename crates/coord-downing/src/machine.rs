//! From what is reachable to what is to be done. Pure: `now` is an argument.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use coord_core::{Moment, NodeId, NodeStatus, Result};
use serde::{Deserialize, Serialize};

use crate::partition_state::{PartitionState, Reach};
use crate::settings::{DowningSettings, Strategy};
use crate::sides::{Part, Sides};
use crate::stability::{Calm, Shift, Stability};
use crate::strategy::{Verdict, Warning, is_formed, judge, keeps, warnings};
use crate::view::{Member, View};

/// How long after a request for the lease that got no answer the next one follows.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// The TTL of a registration, unless another one is set.
const NODE_TTL: Duration = Duration::from_secs(90);

/// What is to be done now.
#[expect(clippy::exhaustive_enums, reason = "a driver has to know all of them")]
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Step {
    /// Nothing; ask again when something changed.
    Stay,
    /// Nothing; ask again then, which is later than now, or when something changed.
    Wait(Moment),
    /// Ask for the lease of downing, once and without waiting for a turn, and pass the answer to
    /// [`Downing::on_lease`]. The driver has to renew the lease while it is held.
    AskLease,
    /// Give the lease back, and tell [`Downing::on_lease_gone`] whatever became of it.
    ReleaseLease,
    /// This side goes on: have these nodes declared failed. It is said again after `stable_after` while
    /// they are still members.
    Down(BTreeSet<NodeId>),
    /// This node shuts down: it stops its regions and its coordinator, and may join again as a new incarnation,
    /// with a new machine. No step follows. A lease that it still has is left to its TTL.
    DownSelf(DownReason),
}

/// Why a node shuts down.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DownReason {
    /// The strategy keeps the other side, or no side.
    OtherSide,
    /// Its own side continues without it: it reaches only some of the nodes that reach it.
    PartlyConnected,
    /// The other side has the lease.
    LeaseHeld,
    /// The store of the lease gave no answer for too long.
    LeaseUnknown,
    /// Reachability went on changing for too long.
    Unstable,
    /// The others declared it failed.
    DeclaredFailed,
    /// One of the tasks of its runtime panicked; the log says which.
    TaskPanicked,
}

impl DownReason {
    /// In one word, for metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::OtherSide => "other_side",
            Self::PartlyConnected => "partly_connected",
            Self::LeaseHeld => "lease_held",
            Self::LeaseUnknown => "lease_unknown",
            Self::Unstable => "unstable",
            Self::DeclaredFailed => "declared_failed",
            Self::TaskPanicked => "task_panicked",
        }
    }
}

impl fmt::Display for DownReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OtherSide => "this side of the partition does not go on",
            Self::PartlyConnected => "this node reaches only some of its side",
            Self::LeaseHeld => "the other side holds the lease",
            Self::LeaseUnknown => "the store of the lease gave no answer",
            Self::Unstable => "reachability goes on changing",
            Self::DeclaredFailed => "this node was declared failed",
            Self::TaskPanicked => "a task of this node panicked",
        })
    }
}

/// What became of a request for the lease.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseAnswer {
    /// This node has it.
    Acquired,
    /// This one has it.
    HeldBy(NodeId),
    /// Unknown: the store did not answer.
    Unknown,
}

/// The downing of one node, for one incarnation of it.
#[derive(Clone, Debug)]
pub struct Downing {
    settings: DowningSettings,
    node_ttl: Duration,
    stability: Stability,
    view: Option<View>,
    /// The same, less what may be old, where anything is.
    doubting: Option<View>,
    /// The members, and the side of each.
    members: Vec<Member>,
    parts: BTreeMap<NodeId, Part>,
    links: Links,
    /// Whether what looked old was waited for.
    trusts: bool,
    store: Reach,
    /// Whether a quorum that the strategy asks for was there once.
    formed: bool,
    phase: Phase,
    lease: Option<Held>,
    asking: bool,
}

/// The lease that this node has.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// When it was won, or used.
    since: Moment,
    /// Whether a node was downed under it.
    used: bool,
}

/// Which members do not reach which, as the rows tell. A node that dies is missed by one member after the
/// other; until all say so it may be another that seems to be cut off for a moment. So unrest shows in
/// the links and not in the sides.
#[derive(Clone, Debug, Default)]
struct Links {
    broken: BTreeSet<(NodeId, NodeId)>,
    /// All pairs that were broken since all nodes were reached.
    ever: BTreeSet<(NodeId, NodeId)>,
}

impl Links {
    /// What the rows say that is new.
    fn on_view(&mut self, view: &View) -> Shift {
        let counts = |(from, to): &&(NodeId, NodeId)| view.is_counted(from) && view.is_counted(to);
        let known = self.broken.iter().filter(counts);
        // A member whose row is not known now says nothing new.
        let silent = known.clone().filter(|(from, _)| !view.tells(from)).cloned();
        let broken: BTreeSet<_> = view.broken().chain(silent).collect();
        let unrest = known.clone().any(|link| !broken.contains(link))
            || broken.difference(&self.broken).any(|link| self.ever.contains(link));
        self.ever.extend(broken.iter().cloned());
        self.broken = broken;
        if unrest { Shift::Unrest } else { Shift::Loss }
    }

    fn on_quiet(&mut self) {
        self.ever.clone_from(&self.broken);
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Watching,
    /// It asks for the lease, at this moment and until that.
    Asking {
        at: Moment,
        until: Moment,
    },
    /// The lease is with this side.
    Won,
    /// These were downed, at this moment the last time.
    Decided {
        downed: BTreeSet<NodeId>,
        at: Moment,
    },
    Down(DownReason),
}

impl Downing {
    /// A machine with these settings.
    ///
    /// # Errors
    /// As [`DowningSettings::validate`].
    pub fn new(settings: DowningSettings) -> Result<Self> {
        settings.validate()?;
        let stability = Stability::new(settings.stable_after, settings.unrest_limit());
        Ok(Self {
            stability: match settings.strategy {
                Strategy::LeaseMajority { .. } => stability.in_time(),
                _ => stability,
            },
            settings,
            node_ttl: NODE_TTL,
            view: None,
            doubting: None,
            members: Vec::new(),
            parts: BTreeMap::new(),
            links: Links::default(),
            trusts: false,
            store: Reach::Reachable,
            formed: false,
            phase: Phase::Watching,
            lease: None,
            asking: false,
        })
    }

    /// With this TTL of the registrations instead of 90 s.
    #[must_use]
    pub fn with_node_ttl(self, node_ttl: Duration) -> Self {
        Self { node_ttl, ..self }
    }

    /// Members or reachability may have changed.
    pub fn on_view(&mut self, view: View, now: Moment) {
        self.formed |= is_formed(&self.settings, &view);
        let me = view.member(view.me()).map(|me| me.status);
        let members: Vec<Member> = view.counted().cloned().collect();
        self.doubting = view.doubting();
        let shift = self.links.on_view(&view);
        self.view = Some(view);
        if matches!(self.phase, Phase::Down(_)) {
            return;
        }
        if matches!(me, Some(NodeStatus::Failed | NodeStatus::Deleted)) {
            self.phase = Phase::Down(DownReason::DeclaredFailed);
            return;
        }
        let losers = self.sides().map(|sides| sides.losers()).unwrap_or_default();
        let parts = self.parts();
        // A row that tells late what was so before changes no side.
        let shifted =
            parts.iter().any(|(id, part)| self.parts.get(id).is_some_and(|before| before != part));
        let changed = shifted || self.members != members;
        (self.members, self.parts) = (members, parts);
        match &self.phase {
            _ if losers.is_empty() => {
                self.stability.on_quiet();
                self.links.on_quiet();
                self.phase = Phase::Watching;
                self.trusts = false;
            }
            // The decision stands while it is carried out.
            Phase::Decided { downed, .. } if losers.is_subset(downed) => {}
            _ if changed => {
                if shifted {
                    self.stability.on_shift(shift, now);
                } else {
                    self.stability.on_members(now);
                }
                self.phase = Phase::Watching;
                self.trusts = false;
            }
            _ => {}
        }
    }

    /// The store answers again, or has not answered for a third of a TTL. A node that was cut off from it looks
    /// at it for `stable_after` before it decides: the decision of the others may be there.
    pub fn on_store(&mut self, store: Reach, now: Moment) {
        let back = store == Reach::Reachable && self.store != store;
        self.store = store;
        if back && !matches!(self.phase, Phase::Down(_) | Phase::Decided { .. }) {
            self.stability.restart(now);
            self.phase = Phase::Watching;
            self.trusts = false;
        }
    }

    /// This process was stalled for so long: what it sees is so much older than it seems.
    pub fn on_stall(&mut self, stalled: Duration) {
        self.stability.on_stall(stalled);
        if let Phase::Asking { at, until } = &mut self.phase {
            *at = at.plus(stalled);
            *until = until.plus(stalled);
        }
    }

    /// What became of [`Step::AskLease`].
    pub fn on_lease(&mut self, answer: &LeaseAnswer, now: Moment) {
        self.asking = false;
        if *answer == LeaseAnswer::Acquired {
            self.lease = Some(Held { since: now, used: false });
        }
        // After a change of the view it is another question.
        let Phase::Asking { at, .. } = &mut self.phase else { return };
        match answer {
            LeaseAnswer::Acquired => self.phase = Phase::Won,
            LeaseAnswer::HeldBy(node) => {
                let ours = self.sides().is_some_and(|sides| sides.is_mine(node));
                self.phase = if ours { Phase::Won } else { Phase::Down(DownReason::LeaseHeld) };
            }
            LeaseAnswer::Unknown => *at = now.plus(ASK_AGAIN),
        }
    }

    /// The lease that this node had was lost or given back, or giving it back failed.
    pub fn on_lease_gone(&mut self) {
        self.lease = None;
    }

    /// The nodes that this node's side has downed; none while nothing is decided.
    #[must_use]
    pub fn downed(&self) -> Option<&BTreeSet<NodeId>> {
        match &self.phase {
            Phase::Decided { downed, .. } => Some(downed),
            _ => None,
        }
    }

    /// What can be reached, and what that means.
    #[must_use]
    pub fn partition_state(&self) -> PartitionState {
        let whole = self.sides().is_none_or(|sides| sides.is_whole());
        let peers = if whole { Reach::Reachable } else { Reach::Unreachable };
        PartitionState::of(peers, self.store)
    }

    /// What is wrong with the settings for the members that there are.
    #[must_use]
    pub fn warnings(&self) -> Vec<Warning> {
        self.view.as_ref().map(|view| warnings(&self.settings, view)).unwrap_or_default()
    }

    /// What is to be done now.
    pub fn next(&mut self, now: Moment) -> Step {
        if let Phase::Down(why) = self.phase {
            return Step::DownSelf(why);
        }
        if self.is_lease_over(now) {
            return Step::ReleaseLease;
        }
        let step = self.decide(now);
        match (step, self.lease_ends()) {
            (Step::Stay, Some(end)) => Step::Wait(end),
            (Step::Wait(until), Some(end)) => Step::Wait(until.min(end)),
            (step, _) => step,
        }
    }

    fn decide(&mut self, now: Moment) -> Step {
        let partition_state = self.partition_state();
        match &mut self.phase {
            _ if matches!(partition_state, PartitionState::Normal | PartitionState::Frozen) => {
                return Step::Stay;
            }
            Phase::Decided { at, .. } => {
                let again = at.plus(self.settings.stable_after);
                if now < again {
                    return Step::Wait(again);
                }
                return self.down_losers(partition_state, now);
            }
            Phase::Won => return self.down_losers(partition_state, now),
            Phase::Asking { at, until } => {
                let (at, until) = (*at, *until);
                return self.ask(partition_state, at, until, now);
            }
            Phase::Watching | Phase::Down(_) => {}
        }
        let since = match self.stability.calm(now) {
            None => return Step::Stay,
            Some(Calm::NotYet(until)) => return Step::Wait(until),
            Some(Calm::Never) => return self.down_self(DownReason::Unstable),
            Some(Calm::Since(since)) => since,
        };
        if !self.formed {
            return Step::Stay;
        }
        if !self.trusts && self.is_in_doubt() {
            // By then a node that can't write its row is not registered any more.
            let certain = since.plus(self.settings.stable_after).plus(self.node_ttl);
            if now < certain {
                return Step::Wait(certain);
            }
            self.trusts = true;
            self.parts = self.parts();
        }
        let Some(sides) = self.sides() else { return Step::Stay };
        let verdict = judge(&self.settings, &sides);
        let partly = self.view.as_ref().is_some_and(|view| !sides.is_mine(view.me()));
        match verdict {
            _ if partly => self.down_self(DownReason::PartlyConnected),
            Verdict::GoesDown => self.down_self(DownReason::OtherSide),
            Verdict::GoesOn => self.down_losers(partition_state, now),
            Verdict::Lease { .. } if self.lease.is_some() => {
                self.phase = Phase::Won;
                self.down_losers(partition_state, now)
            }
            Verdict::Lease { majority } => {
                let Strategy::LeaseMajority { minority_delay, patience, .. } =
                    self.settings.strategy
                else {
                    return Step::Stay;
                };
                let delay = if majority { Duration::ZERO } else { minority_delay };
                let at = since.plus(self.settings.stable_after).max(now).plus(delay);
                let until = at.plus(patience);
                self.phase = Phase::Asking { at, until };
                self.ask(partition_state, at, until, now)
            }
        }
    }

    fn ask(
        &mut self,
        partition_state: PartitionState,
        at: Moment,
        until: Moment,
        now: Moment,
    ) -> Step {
        if partition_state == PartitionState::Isolated {
            return Step::Stay;
        }
        if now >= until {
            return self.down_self(DownReason::LeaseUnknown);
        }
        if self.asking {
            return Step::Wait(until);
        }
        if now < at {
            return Step::Wait(at.min(until));
        }
        self.asking = true;
        Step::AskLease
    }

    fn down_losers(&mut self, partition_state: PartitionState, now: Moment) -> Step {
        // A down decision is a write.
        if partition_state == PartitionState::Isolated {
            return Step::Stay;
        }
        let losers = self.sides().map(|sides| sides.losers()).unwrap_or_default();
        if let (false, Some(held)) = (matches!(self.phase, Phase::Decided { .. }), &mut self.lease)
        {
            *held = Held { since: now, used: true };
        }
        self.phase = Phase::Decided { downed: losers.clone(), at: now };
        Step::Down(losers)
    }

    fn down_self(&mut self, why: DownReason) -> Step {
        self.phase = Phase::Down(why);
        Step::DownSelf(why)
    }

    /// None if this node is no member that counts, and so has nothing to decide.
    fn sides(&self) -> Option<Sides<'_>> {
        let doubting = self.doubting.as_ref().filter(|_| !self.trusts);
        self.sides_of(doubting.or(self.view.as_ref())?)
    }

    fn sides_of<'a>(&self, view: &'a View) -> Option<Sides<'a>> {
        let (role, keep) = (self.settings.role.as_ref(), keeps(&self.settings.strategy));
        view.is_counted(view.me()).then(|| Sides::of(view, role, keep))
    }

    fn parts(&self) -> BTreeMap<NodeId, Part> {
        self.sides().map(|sides| sides.parts()).unwrap_or_default()
    }

    /// Whether the sides depend on rows that may be old.
    fn is_in_doubt(&self) -> bool {
        let (Some(view), Some(doubting)) = (&self.view, &self.doubting) else { return false };
        let parts = |view| self.sides_of(view).map(|sides| sides.parts());
        parts(view) != parts(doubting)
    }

    /// The winner keeps the lease for a while, so that the other side, which may ask late, does not get
    /// it. One that was won for nothing, since all is well again, is given back at once.
    fn is_lease_over(&self, now: Moment) -> bool {
        let Some(held) = self.lease else { return false };
        let idle = self.phase == Phase::Watching && self.stability.calm(now).is_none();
        (idle && !held.used) || self.lease_ends().is_some_and(|end| now >= end)
    }

    fn lease_ends(&self) -> Option<Moment> {
        let Strategy::LeaseMajority { release_after, .. } = self.settings.strategy else {
            return None;
        };
        Some(self.lease?.since.plus(release_after))
    }
}
