use coord_core::{
    Address, AttemptId, Fence, Incarnation, LeaseName, NodeEntry, NodeEvent, NodeId, NodeInfo,
    NodeRecord, NodeStatus, Origin, Revision, ShardCount, TableHeader, Term, Ttl, Version,
};

use super::*;
use crate::member_view::Judging;

const JUDGING: Judging = Judging { wait_ttl: false, from_heartbeat: true, evict: false };
const UID: TableUid = TableUid::from_u128(1);

fn at(seconds: u64) -> Moment {
    Moment::from_origin(Duration::from_secs(seconds))
}

fn table() -> TableName {
    TableName::new("orders").expect("name")
}

fn info(number: u16) -> NodeInfo {
    let id = NodeId::new(format!("n{number}")).expect("name");
    NodeInfo::new(id, Address::new("localhost:1").expect("address"))
        .with_incarnation(Incarnation::from_u128(number.into()))
}

/// The version after `base` in which these nodes own shards 0, 1, 2 ….
fn after(base: &ShardMap, owners: &[u16]) -> ShardMap {
    let mut edit = base.edit();
    for (shard, &number) in (0..).map(ShardId::new).zip(owners) {
        let NodeInfo { id, incarnation, address, .. } = info(number);
        let entry = NodeEntry::new(id, incarnation, address, NodeStatus::Active);
        let slot = edit.put_node(entry).expect("room");
        edit.set_owner(shard, 0, slot).expect("in range");
    }
    let (lease, attempt) = (LeaseName::leader(), AttemptId::from_u128(1));
    let fence = Fence::new(lease, Term::from_u64(1), attempt, Origin::new("memory:1/c"));
    edit.finish(fence).expect("changed")
}

/// Shards 0 and 1 of node 1, 2 and 3 of node 2, at version 1.
fn map() -> ShardMap {
    let header = TableHeader::new(ShardCount::new(4).expect("count"));
    after(&ShardMap::empty(header, UID), &[1, 1, 2, 2])
}

fn says(view: &mut View, number: u16, applied: u64, loads: &[(u32, f64)], named: usize) {
    let loads = loads.iter().map(|(shard, load)| (ShardId::new(*shard), *load));
    let report = LoadReport::after(None, UID, Version::new(applied), loads, named);
    let mut info = info(number);
    info.loads = [(table(), report)].into();
    let record = NodeRecord::new(info, Ttl::from_secs(9).expect("ttl"), Revision::from_u64(1));
    view.on_event(NodeEvent::Updated(record), JUDGING, at(0));
}

fn known(loads: &Loads) -> Vec<Option<f64>> {
    loads.known.clone()
}

#[test]
fn a_shard_that_moved_counts_as_before_until_its_new_owner_has_spoken() {
    let (mut view, mut loads) = (View::default(), Loads::default());
    says(&mut view, 1, 1, &[(0, 64.0), (1, 1.0)], 1);
    says(&mut view, 2, 1, &[(2, 2.0), (3, 2.0)], 1);
    assert!(!loads.take(&table(), &map(), &view, at(0)).hold);
    assert_eq!(known(&loads), [Some(64.0), Some(1.0), Some(2.0), Some(2.0)]);
    let moved = after(&map(), &[2]);
    // Its former owner has nothing to say of it any more, and the new one's mean is no word on it.
    says(&mut view, 1, 2, &[(1, 1.0)], 1);
    assert!(!loads.take(&table(), &moved, &view, at(9)).hold);
    assert_eq!(known(&loads)[0], Some(64.0));
    says(&mut view, 2, 2, &[(0, 32.0), (2, 2.0), (3, 2.0)], 1);
    loads.take(&table(), &moved, &view, at(60));
    assert_eq!(known(&loads)[0], Some(32.0));
}

#[test]
fn a_new_leader_takes_the_former_owners_word_and_waits_for_what_nobody_says() {
    let moved = after(&map(), &[2]);
    let mut view = View::default();
    says(&mut view, 1, 1, &[(0, 64.0), (1, 1.0)], 2);
    says(&mut view, 2, 1, &[(2, 2.0), (3, 2.0)], 2);
    let mut loads = Loads::default();
    assert!(!loads.take(&table(), &moved, &view, at(0)).hold);
    assert_eq!(known(&loads)[0], Some(64.0));

    says(&mut view, 1, 2, &[(1, 1.0)], 2);
    let mut loads = Loads::default();
    assert!(loads.take(&table(), &moved, &view, at(0)).hold);
    assert_eq!(loads.waits_until(), Some(at(180)));
    assert!(loads.take(&table(), &moved, &view, at(179)).hold);
    assert!(!loads.take(&table(), &moved, &view, at(180)).hold, "not for ever");
    says(&mut view, 2, 2, &[(0, 64.0), (2, 2.0), (3, 2.0)], 2);
    assert!(!loads.take(&table(), &moved, &view, at(181)).hold);
    assert_eq!(loads.waits_until(), None);
}

#[test]
fn where_nobody_says_anything_nothing_waits_and_another_life_knows_nothing() {
    let (mut view, mut loads) = (View::default(), Loads::default());
    let figures = loads.take(&table(), &map(), &view, at(0));
    assert!(!figures.hold);
    assert_eq!(*figures.loads, ShardLoads::default());
    says(&mut view, 1, 1, &[(0, 64.0), (1, 1.0)], 2);
    assert!(loads.take(&table(), &map(), &view, at(1)).hold);
    let header = map().header().clone();
    let other = after(&ShardMap::empty(header, TableUid::from_u128(2)), &[1, 1, 2, 2]);
    assert!(!loads.take(&table(), &other, &view, at(2)).hold);
    assert_eq!(known(&loads), [None; 4]);
}
