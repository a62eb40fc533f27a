//! Whether this node's side goes on.

use std::fmt;

use coord_core::{Label, NodeId, NodeStatus};

use crate::settings::{DowningSettings, Strategy};
use crate::sides::Sides;
use crate::view::{Member, View};

/// A strategy's answer for this node's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It goes on.
    GoesOn,
    /// It shuts down.
    GoesDown,
    /// A lease decides; the side that is the majority asks first.
    Lease {
        /// Whether this side is.
        majority: bool,
    },
}

/// What is wrong with the settings for the present members. Nothing fails yet; at a partition all nodes would
/// shut down.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Warning {
    /// There are so many members that two sides could each have the quorum.
    QuorumTooSmall {
        /// The quorum.
        quorum: u32,
        /// How many members count.
        members: usize,
    },
    /// The referee is not a member.
    NoReferee(NodeId),
    /// No member has the role.
    NoMemberWithRole(Label),
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::QuorumTooSmall { quorum, members } => write!(
                f,
                "{members} members are too many for a quorum of {quorum}; at most {} can be told \
                 apart",
                u64::from(*quorum) * 2 - 1
            ),
            Self::NoReferee(node) => write!(f, "the referee {node} is not a member"),
            Self::NoMemberWithRole(role) => write!(f, "no member has the role {}", role.as_str()),
        }
    }
}

/// What is wrong with the settings for these members.
pub(crate) fn warnings(settings: &DowningSettings, view: &View) -> Vec<Warning> {
    let role = settings.role.as_ref();
    let members = view.counted().filter(|member| member.has_role(role)).count();
    let mut found = Vec::new();
    if let (Some(role), 0) = (role, members) {
        found.push(Warning::NoMemberWithRole(role.clone()));
    }
    match &settings.strategy {
        Strategy::StaticQuorum { quorum } if too_many(members, *quorum) => {
            found.push(Warning::QuorumTooSmall { quorum: *quorum, members });
        }
        Strategy::KeepReferee { referee } if !view.is_counted(referee) => {
            found.push(Warning::NoReferee(referee.clone()));
        }
        _ => {}
    }
    found
}

/// Whether two sides could each have the quorum.
fn too_many(members: usize, quorum: u32) -> bool {
    members as u64 >= u64::from(quorum) * 2
}

/// The node that is never excluded from a group, since the strategy goes by it.
pub(crate) fn keeps(strategy: &Strategy) -> Option<&NodeId> {
    match strategy {
        Strategy::KeepReferee { referee } => Some(referee),
        _ => None,
    }
}

/// Whether a quorum that is asked for was there at all.
pub(crate) fn is_formed(settings: &DowningSettings, view: &View) -> bool {
    let Strategy::StaticQuorum { quorum } = settings.strategy else { return true };
    let role = settings.role.as_ref();
    view.counted().filter(|member| member.has_role(role)).count() as u64 >= u64::from(quorum)
}

/// Whether this side goes on.
pub(crate) fn judge(settings: &DowningSettings, sides: &Sides<'_>) -> Verdict {
    let counts = Counts::of(sides, settings.role.as_ref());
    let goes_on = match &settings.strategy {
        Strategy::LeaseMajority { .. } => {
            let majority = counts.is_majority();
            return Verdict::Lease { majority };
        }
        // Also with every joining node on the other side.
        Strategy::KeepMajority if counts.joining == 0 => counts.is_majority(),
        Strategy::KeepMajority => counts.mine.len() > counts.other.len() + counts.joining,
        Strategy::KeepOldest { down_if_alone } => {
            // Also where the other side has seen a node leave that is leaving here.
            counts.has_oldest(*down_if_alone) && counts.settled().has_oldest(*down_if_alone)
        }
        Strategy::StaticQuorum { quorum } => {
            let all = counts.mine.len() + counts.cut + counts.other.len() + counts.joining;
            counts.mine.len() as u64 >= u64::from(*quorum) && !too_many(all, *quorum)
        }
        Strategy::KeepReferee { referee } => sides.is_mine(referee),
        Strategy::DownAll => false,
    };
    if goes_on { Verdict::GoesOn } else { Verdict::GoesDown }
}

/// The members with the role, by side.
struct Counts<'a> {
    mine: Vec<&'a Member>,
    other: Vec<&'a Member>,
    cut: usize,
    joining: usize,
}

impl<'a> Counts<'a> {
    fn of(sides: &Sides<'a>, role: Option<&Label>) -> Self {
        let with_role = |members: &[&'a Member]| -> Vec<&'a Member> {
            members.iter().copied().filter(|member| member.has_role(role)).collect()
        };
        Self {
            mine: with_role(&sides.mine),
            other: with_role(&sides.other),
            cut: with_role(&sides.cut).len(),
            joining: with_role(&sides.joining).len(),
        }
    }

    /// Without the leaving nodes of this side.
    fn settled(&self) -> Self {
        let stays = |member: &&&Member| member.status != NodeStatus::Draining;
        Self {
            mine: self.mine.iter().filter(stays).copied().collect(),
            other: self.other.clone(),
            ..*self
        }
    }

    fn is_majority(&self) -> bool {
        let lowest = |members: &[&'a Member]| members.iter().map(|member| &member.id).min();
        match self.mine.len().cmp(&self.other.len()) {
            std::cmp::Ordering::Greater => true,
            std::cmp::Ordering::Less => false,
            // None of either is not a majority.
            std::cmp::Ordering::Equal => lowest(&self.mine) < lowest(&self.other),
        }
    }

    fn has_oldest(&self, down_if_alone: bool) -> bool {
        let oldest = |members: &[&'a Member]| members.iter().map(|member| member.age()).min();
        let (mine, other) = (self.mine.len(), self.other.len());
        let is_here = match (oldest(&self.mine), oldest(&self.other)) {
            (None, _) => return false,
            (Some(_), None) => true,
            (Some(here), Some(there)) => here < there,
        };
        if is_here {
            !(down_if_alone && mine == 1 && other + self.joining >= 2)
        } else {
            down_if_alone && other == 1 && self.joining == 0 && mine >= 2
        }
    }
}
