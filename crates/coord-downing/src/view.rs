//! What a node knows when it has to decide.

use std::collections::{BTreeMap, BTreeSet};

use coord_core::{Label, NodeId, NodeStatus, Version};

/// A node of the cluster, as downing sees it.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name.
    pub id: NodeId,
    /// The version of the `_cluster` table that made it Active: the lower, the older. Of two with the same
    /// version, the lower name counts as older. So a node that is still joining will be younger than all
    /// members.
    pub since: Version,
    /// What it is there for.
    pub roles: BTreeSet<Label>,
    /// Active and Draining ones count; Discovered ones may have become Active where this node can't see
    /// it; the rest is left out.
    pub status: NodeStatus,
}

impl Member {
    /// An Active member without roles.
    #[must_use]
    pub fn new(id: NodeId, since: Version) -> Self {
        Self { id, since, roles: BTreeSet::new(), status: NodeStatus::Active }
    }

    /// With these roles.
    #[must_use]
    pub fn with_roles(mut self, roles: BTreeSet<Label>) -> Self {
        self.roles = roles;
        self
    }

    /// With this status.
    #[must_use]
    pub fn with_status(mut self, status: NodeStatus) -> Self {
        self.status = status;
        self
    }

    /// Whether it is Active or Draining, so that the strategy counts it.
    #[must_use]
    pub fn counts(&self) -> bool {
        matches!(self.status, NodeStatus::Active | NodeStatus::Draining)
    }

    /// Whether it has this role; true if no role is asked for.
    #[must_use]
    pub fn has_role(&self, role: Option<&Label>) -> bool {
        role.is_none_or(|role| self.roles.contains(role))
    }

    /// Sorts the oldest first.
    pub(crate) fn age(&self) -> (Version, &NodeId) {
        (self.since, &self.id)
    }
}

/// The members, and which of them each node reaches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    me: NodeId,
    members: BTreeMap<NodeId, Member>,
    /// For each node that reports it, the nodes that it does not reach.
    rows: BTreeMap<NodeId, BTreeSet<NodeId>>,
}

impl View {
    /// The view of the node `me`, which reaches all nodes. Of two members with one name the last counts.
    #[must_use]
    pub fn new(me: NodeId, members: impl IntoIterator<Item = Member>) -> Self {
        let members = members.into_iter().map(|member| (member.id.clone(), member)).collect();
        let rows = BTreeMap::from([(me.clone(), BTreeSet::new())]);
        Self { me, members, rows }
    }

    /// With the nodes that this node does not reach.
    #[must_use]
    pub fn with_unreachable(self, nodes: impl IntoIterator<Item = NodeId>) -> Self {
        let me = self.me.clone();
        self.with_row(me, nodes)
    }

    /// With the nodes that a node reports as unreachable, as far as this node knows it, directly or through
    /// others. A node without a row has reported nothing; that does not mean that it reaches all nodes.
    #[must_use]
    pub fn with_row(mut self, observer: NodeId, nodes: impl IntoIterator<Item = NodeId>) -> Self {
        let mut row: BTreeSet<NodeId> = nodes.into_iter().collect();
        row.remove(&observer);
        self.rows.insert(observer, row);
        self
    }

    /// Whose view it is.
    #[must_use]
    pub fn me(&self) -> &NodeId {
        &self.me
    }

    /// A member, of whatever status.
    #[must_use]
    pub fn member(&self, id: &NodeId) -> Option<&Member> {
        self.members.get(id)
    }

    /// All members that count: the Active and the Draining ones.
    pub fn counted(&self) -> impl Iterator<Item = &Member> {
        self.members.values().filter(|member| member.counts())
    }

    /// The members that are joining: the Discovered ones.
    pub fn joining(&self) -> impl Iterator<Item = &Member> {
        self.members.values().filter(|member| member.status == NodeStatus::Discovered)
    }

    pub(crate) fn is_counted(&self, id: &NodeId) -> bool {
        self.member(id).is_some_and(Member::counts)
    }

    /// Whether a node is known to report which nodes it reaches.
    pub(crate) fn tells(&self, id: &NodeId) -> bool {
        self.rows.contains_key(id)
    }

    /// Whether one of the two reports the other as unreachable.
    #[must_use]
    pub fn is_broken(&self, one: &NodeId, other: &NodeId) -> bool {
        let misses = |from: &NodeId, to| self.rows.get(from).is_some_and(|row| row.contains(to));
        misses(one, other) || misses(other, one)
    }

    /// The pairs of members of which the first reports the second as unreachable.
    pub(crate) fn broken(&self) -> impl Iterator<Item = (NodeId, NodeId)> {
        let rows = self.rows.iter().filter(|(from, _)| self.is_counted(from));
        rows.flat_map(|(from, row)| {
            let row = row.iter().filter(|to| self.is_counted(to));
            row.map(move |to| (from.clone(), to.clone()))
        })
    }

    /// Whether a node itself reports this one as unreachable.
    pub(crate) fn is_missed_by(&self, id: &NodeId, by: &NodeId) -> bool {
        self.rows.get(by).is_some_and(|row| row.contains(id))
    }

    /// This view without what may only be in an old row. If a node is reported unreachable and does not report
    /// the same, it is dead, or can't write its row; a node that still reports to reach it may be unable to
    /// write, too. What this node reaches itself is never in doubt. None where nothing is.
    pub(crate) fn doubting(&self) -> Option<Self> {
        let says = |from: &NodeId, to| self.rows.get(from).is_none_or(|row| row.contains(to));
        let missed = self.rows.get(&self.me).into_iter().flatten();
        let mute: BTreeSet<&NodeId> = missed
            .filter(|node| {
                let rows = self.rows.iter().filter(|(observer, _)| self.is_counted(observer));
                rows.filter(|(_, row)| row.contains(*node)).any(|(by, _)| !says(node, by))
            })
            .collect();
        if mute.is_empty() {
            return None;
        }
        let mut view = self.clone();
        for (observer, row) in view.rows.iter_mut().filter(|(observer, _)| **observer != self.me) {
            row.extend(mute.iter().filter(|node| **node != observer).map(|node| (*node).clone()));
        }
        Some(view)
    }
}
