//! One owner for each shard: the numbers that the contract names.

use coord_core::{NodeId, ReplicationFactor, ShardCount, Version};
use coord_placement::{
    Accepts, Assignment, Balanced, Candidate, PlacementStrategy, Plan, PlanSettings, Reason,
};

fn nodes(numbers: impl IntoIterator<Item = u32>) -> Vec<Candidate> {
    numbers.into_iter().map(|n| Candidate::new(NodeId::new(format!("n{n}")).expect("id"))).collect()
}

fn plan(current: &Assignment, candidates: &[Candidate]) -> Plan {
    Balanced::new().plan(current, candidates, &PlanSettings::default()).expect("a plan")
}

fn fresh(candidates: &[Candidate]) -> Assignment {
    let shards = ShardCount::new(1024).expect("count");
    plan(&Assignment::empty(shards, ReplicationFactor::default()), candidates).into_next()
}

fn loads(assignment: &Assignment) -> Vec<u64> {
    assignment.counts().into_values().collect()
}

#[test]
fn a_fifth_node_takes_exactly_204_shards() {
    let four = fresh(&nodes(1..=4));
    assert_eq!(loads(&four), [256; 4]);
    let plan = plan(&four, &nodes(1..=5));
    assert_eq!((plan.moves().len(), plan.count(Reason::Balance)), (204, 204));
    assert_eq!(loads(plan.next()), [205, 205, 205, 205, 204]);
    assert!(plan.is_optimal());
}

#[test]
fn a_lost_node_costs_exactly_its_256_shards_and_as_many_when_it_returns() {
    let four = fresh(&nodes(1..=4));
    let three = plan(&four, &nodes([1, 3, 4]));
    assert_eq!((three.moves().len(), three.count(Reason::Orphan)), (256, 256));
    assert_eq!(loads(three.next()), [342, 0, 341, 341]);
    let back = plan(three.next(), &nodes(1..=4));
    assert_eq!(back.moves().len(), 256);
    assert_eq!(loads(back.next()), [256; 4]);
}

#[test]
fn no_change_moves_nothing() {
    for count in [1, 3, 4, 7, 1000, 1500] {
        let candidates = nodes(1..=count);
        let again = plan(&fresh(&candidates), &candidates);
        assert!(!again.is_changed() && again.moves().is_empty(), "{count} nodes");
    }
}

#[test]
fn orphans_come_before_drain_and_drain_before_balance_within_the_limit() {
    let four = fresh(&nodes(1..=4));
    let mut candidates = nodes([1, 2, 3, 5]);
    candidates[0].accepts = Accepts::KeepOnly;
    let settings = PlanSettings::default().with_max_moves(Some(100)).with_version(Version::new(3));
    let mut current = four;
    let mut moved = Vec::new();
    for _ in 0..10 {
        let plan = Balanced::new().plan(&current, &candidates, &settings).expect("a plan");
        let count = |reason| plan.count(reason);
        moved.push((count(Reason::Orphan), count(Reason::Drain), count(Reason::Balance)));
        current = plan.into_next();
    }
    assert_eq!(&moved[..4], [(256, 100, 0), (0, 100, 0), (0, 56, 0), (0, 0, 0)]);
    assert_eq!(moved[9], (0, 0, 0));
    assert_eq!(loads(&current), [0, 342, 341, 0, 341]);
}
