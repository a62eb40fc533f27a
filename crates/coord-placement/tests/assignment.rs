//! Assignments read from a shard map and written into the next one.

mod common;

use common::{id, node, nothing};
use coord_core::{
    Address, AttemptId, Fence, Incarnation, LeaseName, NodeEntry, NodeStatus, Origin,
    ReplicationFactor, ShardCount, ShardId, ShardMap, Slot, TableHeader, TableUid, Term,
};
use coord_placement::{Assignment, Balanced, PlacementStrategy, PlanSettings};

fn entry(n: usize) -> NodeEntry {
    let address = Address::new("127.0.0.1:1").expect("address");
    NodeEntry::new(id(n), Incarnation::from_u128(1), address, NodeStatus::Active)
}

fn fence() -> Fence {
    let lease = LeaseName::new("c").expect("name");
    Fence::new(lease, Term::from_u64(7), AttemptId::from_u128(1), Origin::new("memory:1/c"))
}

/// A map whose node table names these nodes, in this order.
fn map(shards: u32, replicas: u8, nodes: &[usize]) -> ShardMap {
    let mut header = TableHeader::new(ShardCount::new(shards).expect("count"));
    header.replicas = ReplicationFactor::new(replicas).expect("factor");
    let mut edit = ShardMap::empty(header, TableUid::from_u128(9)).edit();
    for &n in nodes {
        edit.put_node(entry(n)).expect("room");
    }
    edit.finish(fence()).expect("changed")
}

#[test]
fn what_is_written_to_a_map_is_read_from_it() {
    let live = [node(1, 0, 1), node(2, 1, 1), node(3, 2, 1)];
    let plan = Balanced::new().plan(&nothing(16, 2), &live, &PlanSettings::default());
    let planned = plan.expect("a plan").into_next();
    // Other slots than in the assignment, and a node that owns nothing.
    let mut edit = map(16, 2, &[9, 3, 1, 2]).edit();
    planned.write_to(&mut edit).expect("all nodes are named");
    let read = Assignment::from_map(&edit.finish(fence()).expect("changed")).expect("whole");
    assert_eq!(common::by_name(&read), common::by_name(&planned));
    assert_eq!(read.nodes(), [9, 3, 1, 2].map(|n| Some(id(n))));
    assert_eq!(read.counts()[&id(9)], 0);
    assert_eq!(read.counts().into_values().sum::<u64>(), 32);
}

#[test]
fn empty_places_and_free_slots_stay_so() {
    let mut edit = map(4, 2, &[1, 2]).edit();
    edit.remove_node(&id(1)).expect("owns nothing");
    edit.set_owner(ShardId::new(3), 1, Slot::new(1)).expect("in range");
    let read = Assignment::from_map(&edit.finish(fence()).expect("changed")).expect("whole");
    assert_eq!(read.nodes(), [None, Some(id(2))]);
    assert_eq!(read.raw_owners(), [65_535, 65_535, 65_535, 65_535, 65_535, 65_535, 65_535, 1]);
    let mut edit = map(4, 2, &[2]).edit();
    read.write_to(&mut edit).expect("the only owner is named");
    assert_eq!(edit.map().raw_owners()[6..], [65_535, 0]);
}

#[test]
fn a_map_of_another_shape_or_without_an_owner_is_refused_and_unchanged() {
    let planned = Balanced::new()
        .plan(&nothing(8, 1), &[node(1, 0, 1), node(2, 0, 1)], &PlanSettings::default())
        .expect("a plan")
        .into_next();
    for (shards, replicas, nodes, why) in [
        (9, 1, vec![1, 2], "8 shards with 1 replicas for a map of 9 with 1"),
        (8, 2, vec![1, 2], "8 shards with 1 replicas for a map of 8 with 2"),
        (8, 1, vec![1], "the map does not name node n0002"),
    ] {
        let mut edit = map(shards, replicas, &nodes).edit();
        let error = planned.write_to(&mut edit).expect_err("does not fit").to_string();
        assert!(error.contains(why), "{error}");
        assert!(edit.map().raw_owners().iter().all(|&slot| slot == u16::MAX));
    }
}
