//! Loads that come nearer to even within the churn limit, and then rest.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::{by_name, check_valid, id, node, nothing};
use coord_core::{NodeId, ShardId};
use coord_placement::{
    Assignment, Candidate, LoadAware, PlacementStrategy, Plan, PlanSettings, Reason, ShardLoads,
    Unsatisfied,
};
use proptest::prelude::*;

fn loads(given: &[f64]) -> PlanSettings {
    let given = (0..).map(ShardId::new).zip(given.iter().copied());
    PlanSettings::default().with_loads(Arc::new(ShardLoads::new(given)))
}

fn plan(
    strategy: LoadAware,
    map: &Assignment,
    nodes: &[Candidate],
    settings: &PlanSettings,
) -> Plan {
    let plan = strategy.plan(map, nodes, settings).expect("a plan");
    check_valid(map, nodes, &plan);
    plan
}

/// What each node has to do for its weight, the fullest first.
fn fullness(map: &Assignment, nodes: &[Candidate], given: &[f64]) -> Vec<f64> {
    let mut sums: BTreeMap<&NodeId, f64> = nodes.iter().map(|node| (&node.id, 0.0)).collect();
    for shard in map.shards().shards() {
        for owner in map.owners(shard) {
            *sums.entry(owner).or_default() += given[shard.index()];
        }
    }
    let mut all: Vec<f64> = nodes.iter().map(|node| sums[&node.id] / node.weight as f64).collect();
    all.sort_by(|a, b| b.total_cmp(a));
    all
}

/// Loads that count as they are: none is below a sixteenth of the mean.
fn some_loads(shards: usize) -> impl Strategy<Value = Vec<f64>> {
    prop::collection::vec(10.0_f64..100.0, shards)
}

fn some_nodes() -> impl Strategy<Value = Vec<Candidate>> {
    let one = (0_usize..3, 1_u64..4);
    prop::collection::vec(one, 1..9).prop_map(|all| {
        all.into_iter().enumerate().map(|(n, (zone, w))| node(n, zone, w << 16)).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn within_the_churn_limit_never_worse_and_then_at_rest(
        nodes in some_nodes(),
        replicas in 1_u8..4,
        before in some_loads(60),
        after in some_loads(60),
        churn in 0_u16..300,
        band in 0_u16..600,
    ) {
        let strategy = LoadAware::new().with_band(band).with_churn(churn);
        let map = plan(strategy, &nothing(60, replicas), &nodes, &loads(&before)).into_next();
        let settings = loads(&after);
        let limit = if churn == 0 { 0 } else { (60 * usize::from(replicas) * usize::from(churn) / 1000).max(1) };
        let mut current = map;
        let mut seen = vec![by_name(&current)];
        loop {
            let next = plan(strategy, &current, &nodes, &settings);
            let balance = next.count(Reason::Balance);
            prop_assert!(balance <= limit, "{balance} moves, at most {limit}");
            prop_assert_eq!(balance, next.moves().len(), "nothing else to do: {:?}", next.moves());
            let (old, new) = (fullness(&current, &nodes, &after), fullness(next.next(), &nodes, &after));
            prop_assert!(new[0] <= old[0] * (1.0 + 1e-6), "{} is fuller than {}", new[0], old[0]);
            let cut = next.unsatisfied().iter().any(|one| matches!(one, Unsatisfied::MovesLeft { .. }));
            current = next.into_next();
            if !cut || limit == 0 {
                break;
            }
            prop_assert!(!seen.contains(&by_name(&current)), "it goes in a circle");
            seen.push(by_name(&current));
        }
        let rest = plan(strategy, &current, &nodes, &settings);
        if limit > 0 {
            prop_assert!(!rest.is_changed(), "a plan on its own result moves {:?}", rest.moves());
        }
    }

    #[test]
    fn no_load_is_too_odd(
        nodes in some_nodes(),
        replicas in 1_u8..4,
        given in prop::collection::vec(any::<f64>(), 0..80),
    ) {
        let settings = loads(&given);
        let bad = given.iter().filter(|load| !(load.is_finite() && **load >= 0.0)).count();
        let map = plan(LoadAware::new(), &nothing(60, replicas), &nodes, &settings);
        let told = map.unsatisfied().iter().any(|one| matches!(one, Unsatisfied::LoadUnusable { .. }));
        prop_assert_eq!(told, bad > 0);
        let fewer = &nodes[..nodes.len().div_ceil(2)];
        plan(LoadAware::new(), map.next(), fewer, &settings);
    }
}

#[test]
fn one_hot_shard_gets_room_and_wavering_loads_move_nothing() {
    let nodes: Vec<Candidate> = (0..4).map(|n| node(n, 0, 1 << 16)).collect();
    let mut given = vec![10.0; 64];
    let map = plan(LoadAware::new(), &nothing(64, 1), &nodes, &loads(&given)).into_next();
    assert!(map.counts().into_values().all(|count| count == 16));
    // 5 % more here, 5 % less there: inside the band.
    for (n, load) in given.iter_mut().enumerate() {
        *load += if n % 2 == 0 { 0.5 } else { -0.5 };
    }
    assert!(!plan(LoadAware::new(), &map, &nodes, &loads(&given)).is_changed());
    // One shard becomes as heavy as all that a node had.
    given[0] = 160.0;
    let next = plan(LoadAware::new().with_churn(1000), &map, &nodes, &loads(&given));
    let hot = map.owner(ShardId::new(0)).expect("an owner").clone();
    let at = |map: &Assignment| map.counts()[&hot];
    assert!(at(next.next()) < 9, "{} shards beside the hot one", at(next.next()));
    let all = fullness(next.next(), &nodes, &given);
    assert!(all[0] / all[3] < 1.25, "{all:?}");
}

#[test]
fn orphans_go_to_the_emptiest_and_a_new_node_gets_its_share() {
    let nodes: Vec<Candidate> = (0..5).map(|n| node(n, 0, 1 << 16)).collect();
    let given = vec![1.0; 1024];
    let settings = loads(&given);
    let strategy = LoadAware::new().with_churn(1000);
    let four = plan(strategy, &nothing(1024, 1), &nodes[..4], &settings).into_next();
    let three = plan(strategy, &four, &nodes[..3], &settings);
    assert_eq!((three.moves().len(), three.count(Reason::Orphan)), (256, 256));
    let mut counts: Vec<u64> = three.next().counts().into_values().filter(|n| *n > 0).collect();
    counts.sort_unstable();
    assert_eq!(counts, [341, 341, 342]);
    let five = plan(strategy, &four, &nodes, &settings);
    let new = five.next().counts()[&id(4)];
    assert!((185..=205).contains(&new), "{new} shards");
    assert_eq!(five.moves().len() as u64, new);
    // With the usual churn limit it takes two plans.
    let first = plan(LoadAware::new(), &four, &nodes, &settings);
    assert_eq!(first.moves().len(), 102);
    assert!(matches!(
        first.unsatisfied(),
        [Unsatisfied::MovesLeft { reason: Reason::Balance, .. }]
    ));
}
