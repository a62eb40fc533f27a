//! What a node sees of the cluster, as downing needs it. Pure.

use std::collections::{BTreeMap, BTreeSet};

use coord_core::{Incarnation, Label, NodeEntry, NodeId, NodeStatus, ShardMap, Version};

use crate::downing::{Member, View};
use crate::member_view;
use crate::record::ClusterRecord;

/// What the watches show, and whose view it is.
pub(super) struct Snapshot<'a> {
    pub(super) me: &'a NodeId,
    /// This node's incarnation, while it is registered.
    pub(super) run: Option<Incarnation>,
    pub(super) cluster: &'a ShardMap,
    pub(super) record: &'a ClusterRecord,
    /// All registrations.
    pub(super) nodes: &'a member_view::View,
    /// The role that counts, if not all members do.
    pub(super) role: Option<&'a Label>,
}

/// The members, and what they tell.
#[derive(Clone, Debug, Default)]
pub(super) struct Inputs {
    members: Vec<Member>,
    /// The other members, and the nodes that are joining: these are probed.
    pub(super) peers: BTreeMap<NodeId, NodeEntry>,
    /// The nodes that each reporting peer does not reach.
    rows: BTreeMap<NodeId, BTreeSet<NodeId>>,
}

impl Inputs {
    pub(super) fn of(snapshot: &Snapshot<'_>) -> Self {
        let mut inputs = Self::default();
        for entry in snapshot.cluster.nodes().iter().flatten() {
            if entry.id == *snapshot.me {
                inputs.members.extend(snapshot.myself(entry));
                continue;
            }
            inputs.members.push(snapshot.member(entry, entry.status));
            if entry.status.may_host() || entry.status == NodeStatus::Discovered {
                inputs.peers.insert(entry.id.clone(), entry.clone());
            }
        }
        for seen in snapshot.nodes.present() {
            let peer = inputs.peers.get(&seen.info.id);
            let current = peer.is_some_and(|peer| peer.incarnation == seen.info.incarnation);
            if let Some(row) = seen.info.unreachable.as_ref().filter(|_| current) {
                inputs.rows.insert(seen.info.id.clone(), row.clone());
            }
        }
        inputs
    }

    /// Whether a node is Active or Draining.
    pub(super) fn is_member(&self, id: &NodeId) -> bool {
        self.members.iter().any(|member| member.id == *id && member.counts())
    }

    /// The view of a node that does not reach `row`. What others tell comes through the store: while that
    /// is away it is old, and would contradict what this node sees itself.
    pub(super) fn view(&self, me: &NodeId, row: &BTreeSet<NodeId>, with_others: bool) -> View {
        let view = View::new(me.clone(), self.members.iter().cloned());
        let view = view.with_unreachable(row.iter().cloned());
        let rows = self.rows.iter().filter(|_| with_others);
        rows.fold(view, |view, (peer, row)| view.with_row(peer.clone(), row.iter().cloned()))
    }
}

impl Snapshot<'_> {
    /// This node as a member; none while this incarnation of it is none that may decide.
    fn myself(&self, entry: &NodeEntry) -> Option<Member> {
        if self.run != Some(entry.incarnation) {
            return None;
        }
        let failed = self.record.nodes.get(self.me).and_then(|note| note.failed.as_ref());
        // A node that was declared failed for another reason joins again under a new incarnation; one that was
        // downed shuts down.
        let downed = self.record.downed(self.me, entry.incarnation);
        let stays = entry.status != NodeStatus::Failed
            && failed.is_none_or(|failed| failed.incarnation != entry.incarnation);
        (stays || downed).then(|| self.member(entry, entry.status))
    }

    fn member(&self, entry: &NodeEntry, status: NodeStatus) -> Member {
        let since = entry.since.unwrap_or(Version::ZERO);
        let member = Member::new(entry.id.clone(), since).with_status(status);
        match self.nodes.presence(&entry.id) {
            Some(presence) => member.with_roles(presence.record().info.roles.clone()),
            None => match self.role {
                // Its role was reported before this node looked. Like a node that is joining, it counts for the
                // other side only.
                Some(role) if status.may_host() => member
                    .with_roles(BTreeSet::from([role.clone()]))
                    .with_status(NodeStatus::Discovered),
                _ => member,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use coord_core::{
        Address, AttemptId, Fence, LeaseName, Moment, NodeEvent, NodeInfo, NodeRecord, Origin,
        Revision, ShardCount, TableHeader, TableUid, Term, Ttl,
    };

    use super::*;
    use crate::member_view::Judging;
    use crate::record::Failure;

    fn id(n: u8) -> NodeId {
        NodeId::new(format!("n{n}")).expect("name")
    }

    fn run(n: u8) -> Incarnation {
        Incarnation::from_u128(u128::from(n))
    }

    fn address() -> Address {
        Address::new("localhost:1").expect("address")
    }

    /// n1 to n3 are members since their number, n4 is joining, n5 has failed.
    fn cluster() -> ShardMap {
        let header = TableHeader::new(ShardCount::ONE);
        let mut edit = ShardMap::empty(header, TableUid::from_u128(1)).edit();
        for n in 1..=5 {
            let status = match n {
                4 => NodeStatus::Discovered,
                5 => NodeStatus::Failed,
                _ => NodeStatus::Active,
            };
            let entry = NodeEntry::new(id(n), run(n), address(), status);
            edit.put_node(entry.with_since(Some(Version::new(u64::from(n))))).expect("room");
        }
        let attempt = AttemptId::from_u128(1);
        let origin = Origin::new("memory:1/c");
        edit.finish(Fence::new(LeaseName::leader(), Term::from_u64(1), attempt, origin))
            .expect("changed")
    }

    fn registered(n: u8, incarnation: Incarnation, row: Option<&[u8]>) -> NodeRecord {
        let core = Label::new("core").expect("label");
        let info = NodeInfo::new(id(n), address())
            .with_incarnation(incarnation)
            .with_roles([core].into())
            .expect("few")
            .with_unreachable(row.map(|row| row.iter().copied().map(id).collect()));
        NodeRecord::new(info, Ttl::from_secs(9).expect("ttl"), Revision::from_u64(1))
    }

    fn nodes(records: Vec<NodeRecord>) -> member_view::View {
        let judging = Judging { wait_ttl: false, from_heartbeat: true, evict: false };
        let mut view = member_view::View::default();
        let now = Moment::from_origin(Duration::ZERO);
        view.on_event(NodeEvent::Snapshot(records), judging, now);
        view
    }

    #[test]
    fn members_come_from_the_cluster_and_rows_from_their_present_runs() {
        let cluster = cluster();
        let nodes = nodes(vec![
            registered(1, run(1), None),
            registered(2, run(2), Some(&[3])),
            registered(3, run(99), Some(&[1])),
        ]);
        let (me, record, role) =
            (id(1), ClusterRecord::default(), Label::new("core").expect("label"));
        let mut snapshot = Snapshot {
            me: &me,
            run: Some(run(1)),
            cluster: &cluster,
            record: &record,
            nodes: &nodes,
            role: None,
        };
        let inputs = Inputs::of(&snapshot);
        assert_eq!(inputs.peers.keys().cloned().collect::<Vec<_>>(), [id(2), id(3), id(4)]);
        let view = inputs.view(&me, &BTreeSet::new(), true);
        let counted: Vec<_> =
            view.counted().map(|member| (member.id.clone(), member.since)).collect();
        let expected =
            [(id(1), Version::new(1)), (id(2), Version::new(2)), (id(3), Version::new(3))];
        assert_eq!(counted, expected);
        assert!(view.is_broken(&id(2), &id(3)));
        assert!(!view.is_broken(&id(1), &id(3)), "a row of another run says nothing");
        let alone = inputs.view(&me, &[id(3)].into(), false);
        assert!(alone.is_broken(&id(1), &id(3)) && !alone.is_broken(&id(2), &id(3)));

        let unseen = self::nodes(vec![registered(1, run(1), None), registered(2, run(2), None)]);
        snapshot = Snapshot { nodes: &unseen, role: Some(&role), ..snapshot };
        let view = Inputs::of(&snapshot).view(&me, &BTreeSet::new(), true);
        assert_eq!(view.counted().count(), 2, "nobody told this node of n3's roles");
        assert_eq!(view.joining().filter(|member| member.has_role(Some(&role))).count(), 1);
    }

    #[test]
    fn only_this_run_decides_and_only_a_verdict_of_downing_takes_it_down() {
        let failed = |downed| {
            let mut edit = cluster().edit();
            let entry = NodeEntry::new(id(1), run(1), address(), NodeStatus::Failed);
            edit.put_node(entry).expect("room");
            let attempt = AttemptId::from_u128(1);
            let origin = Origin::new("memory:1/c");
            let fence = Fence::new(LeaseName::leader(), Term::from_u64(2), attempt, origin);
            let mut record = ClusterRecord::default();
            record.note(&id(1), |note| {
                note.failed = Some(Failure { downed, ..Failure::over(run(1), "test") });
            });
            (edit.finish(fence).expect("changed"), record)
        };
        let nodes = nodes(vec![registered(1, run(1), None)]);
        let mine = |cluster: &ShardMap, record: &ClusterRecord, run| {
            let me = id(1);
            let snapshot = Snapshot { me: &me, run, cluster, record, nodes: &nodes, role: None };
            let view = Inputs::of(&snapshot).view(&me, &BTreeSet::new(), true);
            view.member(&me).map(|me| me.status)
        };
        let calm = ClusterRecord::default();
        assert_eq!(mine(&cluster(), &calm, Some(run(1))), Some(NodeStatus::Active));
        assert_eq!(mine(&cluster(), &calm, Some(run(9))), None, "it is not taken in yet");
        assert_eq!(mine(&cluster(), &calm, None), None);
        let (cluster, record) = failed(true);
        assert_eq!(mine(&cluster, &record, Some(run(1))), Some(NodeStatus::Failed));
        assert_eq!(mine(&cluster, &record, Some(run(9))), None);
        let (cluster, record) = failed(false);
        assert_eq!(mine(&cluster, &record, Some(run(1))), None);
        assert_eq!(mine(&cluster, &calm, Some(run(1))), None, "its registration ran out");
    }
}
