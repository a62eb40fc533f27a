//! The members on this node's side.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use coord_core::{Label, NodeId};

use crate::view::{Member, View};

/// The members, parted as this node sees it. Every node of one side that knows the same rows finds the
/// same parts.
#[derive(Debug)]
pub(crate) struct Sides<'a> {
    /// The members of this node's group that all reach each other.
    pub(crate) mine: Vec<&'a Member>,
    /// The members of this node's group that have to go, so that the rest reach each other.
    pub(crate) cut: Vec<&'a Member>,
    /// The members that the group does not reach.
    pub(crate) other: Vec<&'a Member>,
    /// Joining nodes that the group does not reach: the other side may count them by now.
    pub(crate) joining: Vec<&'a Member>,
}

/// The part of [`Sides`] that a member belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Mine,
    Cut,
    Other,
}

impl<'a> Sides<'a> {
    /// Parts the members. `keep` is not cut out whatever it fails to reach; between two equals, one with
    /// the role stays.
    pub(crate) fn of(view: &'a View, role: Option<&Label>, keep: Option<&NodeId>) -> Self {
        let group = group(view);
        let cut = cut(view, &group, role, keep);
        let (mut mine, mut gone, mut other) = (Vec::new(), Vec::new(), Vec::new());
        for member in view.counted() {
            let part = if cut.contains(&member.id) {
                &mut gone
            } else if group.contains_key(&member.id) {
                &mut mine
            } else {
                &mut other
            };
            part.push(member);
        }
        // A joining node that reports this side as unreachable is not admitted by it. That report came through
        // the store, so this node would also see another leader admit the joining node.
        let misses = |member: &&Member| {
            let mut group = group.keys();
            group.any(|&id| view.is_broken(id, &member.id) && !view.is_missed_by(id, &member.id))
        };
        Self { mine, cut: gone, other, joining: view.joining().filter(misses).collect() }
    }

    /// Whether there is anything to decide.
    pub(crate) fn is_whole(&self) -> bool {
        self.cut.is_empty() && self.other.is_empty()
    }

    pub(crate) fn is_mine(&self, id: &NodeId) -> bool {
        self.mine.iter().any(|member| member.id == *id)
    }

    /// Where each member is.
    pub(crate) fn parts(&self) -> BTreeMap<NodeId, Part> {
        let parts = [(&self.mine, Part::Mine), (&self.cut, Part::Cut), (&self.other, Part::Other)];
        let placed = |(members, part): (&Vec<&Member>, _)| -> Vec<_> {
            members.iter().map(|member| (member.id.clone(), part)).collect()
        };
        parts.into_iter().flat_map(placed).collect()
    }

    /// All nodes that this side has to down if it continues.
    pub(crate) fn losers(&self) -> BTreeSet<NodeId> {
        self.cut.iter().chain(&self.other).map(|member| member.id.clone()).collect()
    }
}

/// The members that this node reaches, directly or through others that report which nodes they reach.
fn group(view: &View) -> BTreeMap<&NodeId, &Member> {
    let Some(me) = view.member(view.me()).filter(|me| me.counts()) else { return BTreeMap::new() };
    let mut found = BTreeMap::from([(&me.id, me)]);
    let mut open = vec![me];
    while let Some(from) = open.pop() {
        if !view.tells(&from.id) {
            continue;
        }
        for to in view.counted() {
            if !found.contains_key(&to.id) && !view.is_broken(&from.id, &to.id) {
                found.insert(&to.id, to);
                open.push(to);
            }
        }
    }
    found
}

/// Which members to exclude until all that are left reach each other: again and again the one that misses the
/// most others, then one without the role, then the youngest.
fn cut<'a>(
    view: &View,
    group: &BTreeMap<&'a NodeId, &'a Member>,
    role: Option<&Label>,
    keep: Option<&NodeId>,
) -> BTreeSet<&'a NodeId> {
    let mut broken: BTreeMap<&NodeId, BTreeSet<&NodeId>> = BTreeMap::new();
    for &one in group.keys() {
        for &other in group.keys().filter(|&&other| other != one) {
            if view.is_broken(one, other) {
                broken.entry(one).or_default().insert(other);
            }
        }
    }
    let mut cut = BTreeSet::new();
    loop {
        let worst = broken
            .iter()
            .filter(|(id, missed)| Some(**id) != keep && !missed.is_empty())
            .max_by_key(|(id, missed)| {
                let member = group[**id];
                (missed.len(), Reverse(member.has_role(role)), member.age())
            })
            .map(|(id, _)| *id);
        let Some(worst) = worst else { return cut };
        for missed in broken.remove(worst).unwrap_or_default() {
            if let Some(row) = broken.get_mut(missed) {
                row.remove(worst);
            }
        }
        cut.insert(worst);
    }
}
