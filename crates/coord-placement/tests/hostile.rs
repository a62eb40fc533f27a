//! Whatever the input: no panic, a valid map, the same plan for the same input in another order.

mod common;

use std::collections::BTreeSet;

use common::{by_name, check_valid, id, node, nothing};
use coord_core::{NodeId, ReplicationFactor, ShardCount, ShardId, Version};
use coord_placement::{
    Accepts, Assignment, Balanced, Candidate, ConsistentHash, LoadAware, PinProblem,
    PlacementStrategy, Plan, PlanError, PlanSettings, Reason, Rendezvous, Unsatisfied,
};
use proptest::prelude::*;

fn strategies() -> Vec<Box<dyn PlacementStrategy>> {
    vec![
        Box::new(Balanced::new()),
        Box::new(ConsistentHash::new().with_virtual_nodes(20)),
        Box::new(ConsistentHash::new().with_virtual_nodes(20).with_bounded_load(Some(250))),
        Box::new(Rendezvous::new()),
        Box::new(LoadAware::new().with_churn(1000)),
    ]
}

/// A problem with any pins, exclusions, limits and owners, and one with the same content in another
/// order.
#[derive(Debug, Clone)]
struct Problem {
    current: Assignment,
    candidates: Vec<Candidate>,
    settings: PlanSettings,
}

impl Problem {
    fn permuted(&self, seed: u64) -> Self {
        let mut random = common::Random(seed);
        let mut candidates = self.candidates.clone();
        let mut order: Vec<usize> = (0..self.current.nodes().len()).collect();
        for n in (1..order.len()).rev() {
            order.swap(n, random.below(n + 1));
        }
        for n in (1..candidates.len()).rev() {
            candidates.swap(n, random.below(n + 1));
        }
        let nodes = order.iter().map(|&n| self.current.nodes()[n].clone()).collect();
        let slot = |old: u16| match order.iter().position(|&n| n == usize::from(old)) {
            Some(slot) => u16::try_from(slot).expect("fits"),
            None => u16::MAX,
        };
        let owners = self.current.raw_owners().iter().map(|&old| slot(old)).collect();
        let (shards, replicas) = (self.current.shards(), self.current.replicas());
        let current = Assignment::new(shards, replicas, nodes, owners).expect("valid");
        Self { current, candidates, settings: self.settings.clone() }
    }
}

prop_compose! {
    fn a_candidate()(
        n in 0_usize..12,
        zone in 0_usize..5,
        weight in prop_oneof![Just(1), Just(65_536), 1_u64..=1 << 40],
        draining in prop::bool::weighted(0.2),
        max in prop::option::weighted(0.2, 0_u32..20),
    ) -> Candidate {
        let accepts = if draining { Accepts::KeepOnly } else { Accepts::New };
        node(n, zone, weight).with_accepts(accepts).with_max_shards(max)
    }
}

prop_compose! {
    fn a_problem()(
        shards in 1_u32..40,
        replicas in 1_u8..=5,
        slots in 0_u16..14,
    )(
        owners in prop::collection::vec(
            prop_oneof![1 => Just(u16::MAX), 4 => 0..slots.max(1)],
            shards as usize * usize::from(replicas),
        ),
        shards in Just(shards),
        replicas in Just(replicas),
        slots in Just(slots),
        candidates in prop::collection::vec(a_candidate(), 1..12),
        pins in prop::collection::btree_map(0_u32..45, prop::collection::vec(0_usize..14, 0..4), 0..4),
        exclusions in prop::collection::vec((0_u32..45, 0_usize..14), 0..8),
        max_moves in prop::option::weighted(0.3, 0_u64..10),
        version in any::<u64>(),
        tolerance in prop_oneof![3 => Just(0_u16), 1 => 0_u16..=1000],
        work in prop_oneof![3 => Just(1_000_000_u64), 1 => 0_u64..100],
    ) -> Problem {
        let owners = owners.into_iter().map(|o| if o < slots { o } else { u16::MAX }).collect();
        let nodes = (0..usize::from(slots)).map(|n| (n != 3).then(|| id(n))).collect::<Vec<_>>();
        let owners = Vec::into_iter(owners).map(|o| if o == 3 { u16::MAX } else { o }).collect();
        let current = Assignment::new(
            ShardCount::new(shards).expect("count"),
            ReplicationFactor::new(replicas).expect("factor"),
            nodes,
            owners,
        ).expect("valid");
        let mut seen = BTreeSet::new();
        let candidates =
            candidates.into_iter().filter(|c: &Candidate| seen.insert(c.id.clone())).collect();
        let mut settings = PlanSettings::default()
            .with_max_moves(max_moves)
            .with_version(Version::new(version))
            .with_tolerance(tolerance)
            .with_work_limit(work);
        for (shard, nodes) in pins {
            settings = settings.with_pin(ShardId::new(shard), nodes.into_iter().map(id).collect());
        }
        for (shard, node) in exclusions {
            settings = settings.with_exclusion(ShardId::new(shard), id(node));
        }
        Problem { current, candidates, settings }
    }
}

fn is_uneven(one: &Unsatisfied) -> bool {
    matches!(one, Unsatisfied::Uneven { .. })
}

fn check_rules(problem: &Problem, plan: &Plan) {
    let refused: BTreeSet<(ShardId, &NodeId)> = plan
        .unsatisfied()
        .iter()
        .filter_map(|one| match one {
            Unsatisfied::Pin { shard, node, .. } => Some((*shard, node)),
            _ => None,
        })
        .collect();
    for (&shard, nodes) in &problem.settings.pins {
        for node in nodes {
            let there = plan.next().owners(shard).any(|owner| owner == node);
            assert!(there || refused.contains(&(shard, node)), "pin of {shard} to {node}");
        }
    }
    for (&shard, nodes) in &problem.settings.exclusions {
        let bad = plan.next().owners(shard).find(|owner| nodes.contains(*owner));
        assert_eq!(bad, None, "shard {shard} is on a node that is excluded");
    }
    if let Some(max) = problem.settings.max_moves {
        let limited = plan.moves().iter().filter(|one| one.reason.is_limited()).count();
        assert!(limited as u64 <= max, "{limited} moves, at most {max}");
    }
    let open = problem.candidates.iter().filter(|c| c.accepts == Accepts::New).count();
    let wanted = open.min(usize::from(problem.current.replicas().get()));
    let short = problem.current.shards().shards().any(|s| plan.next().owners(s).count() < wanted);
    let told = plan.unsatisfied().iter().any(|one| matches!(one, Unsatisfied::Unplaced { .. }));
    assert_eq!(short, told, "places stay empty, or not: {:?}", plan.unsatisfied());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_plan_is_valid_and_does_not_depend_on_order(
        problem in a_problem(),
        seed in any::<u64>(),
    ) {
        for strategy in strategies() {
            let plan = strategy.plan(&problem.current, &problem.candidates, &problem.settings);
            let other = problem.permuted(seed);
            let again = strategy.plan(&other.current, &other.candidates, &other.settings);
            let plan = match plan {
                Ok(plan) => plan,
                Err(error) => {
                    prop_assert_eq!(Err(error), again.map(|_| ()));
                    continue;
                }
            };
            check_valid(&problem.current, &problem.candidates, &plan);
            check_rules(&problem, &plan);
            let again = again.expect("the same input in another order");
            prop_assert_eq!(by_name(plan.next()), by_name(again.next()));
            prop_assert_eq!(plan.unsatisfied(), again.unsatisfied());
            let told = |plan: &Plan| -> Vec<_> {
                let moves = plan.moves().iter();
                moves.map(|m| (m.shard, m.replica, m.reason, plan.node(m.to).cloned())).collect()
            };
            prop_assert_eq!(told(&plan), told(&again));
        }
    }

    #[test]
    fn planning_what_is_planned_moves_nothing(problem in a_problem()) {
        let settings = problem.settings.with_max_moves(None).with_work_limit(10_000_000);
        for strategy in strategies() {
            let Ok(plan) = strategy.plan(&problem.current, &problem.candidates, &settings) else {
                continue;
            };
            // Where not everything can be had, each plan is better than the last, until one is no more.
            let uneven = plan.unsatisfied().iter().any(is_uneven);
            let mut current = plan.into_next();
            for round in 0.. {
                let again = strategy
                    .plan(&current, &problem.candidates, &settings)
                    .expect("planned before");
                if again.moves().is_empty() && !again.is_changed() {
                    break;
                }
                prop_assert!(
                    uneven && round < 20,
                    "{}, round {round}: {:?}\n{:?}",
                    strategy.name(), again.moves(), again.unsatisfied()
                );
                current = again.into_next();
            }
        }
    }

    #[test]
    fn plans_within_a_limit_arrive(problem in a_problem(), limit in 1_u64..5) {
        let free = problem.settings.clone().with_max_moves(None);
        let settings = problem.settings.with_max_moves(Some(limit));
        for strategy in strategies() {
            let mut current = problem.current.clone();
            for round in 0.. {
                let Ok(plan) = strategy.plan(&current, &problem.candidates, &settings) else {
                    break;
                };
                if plan.unsatisfied().iter().any(is_uneven) {
                    break;
                }
                let settled = plan.moves().is_empty();
                current = plan.into_next();
                if settled {
                    let rest = strategy.plan(&current, &problem.candidates, &free).expect("a plan");
                    prop_assert!(rest.moves().is_empty(), "{}: {:?}", strategy.name(), rest.moves());
                    break;
                }
                prop_assert!(round < 400, "{} never settles", strategy.name());
            }
        }
    }
}

fn plan(current: &Assignment, candidates: &[Candidate]) -> Result<Plan, PlanError> {
    let mut answers: Vec<_> = strategies()
        .iter()
        .map(|strategy| strategy.plan(current, candidates, &PlanSettings::default()))
        .collect();
    let errors: Vec<_> = answers.iter().map(|answer| answer.as_ref().err().cloned()).collect();
    assert!(errors.windows(2).all(|pair| pair[0] == pair[1]), "strategies differ: {errors:?}");
    answers.swap_remove(0)
}

#[test]
fn bad_input_is_a_typed_error_that_names_the_value() {
    let map = nothing(8, 2);
    let draining = || node(2, 0, 1).with_accepts(Accepts::KeepOnly);
    assert_eq!(plan(&map, &[]), Err(PlanError::NoNodes));
    assert_eq!(plan(&map, &[draining()]), Err(PlanError::AllDraining { nodes: 1 }));
    let twice = [node(1, 0, 1), node(2, 0, 1), node(1, 1, 7)];
    assert_eq!(plan(&map, &twice), Err(PlanError::DuplicateNode(id(1))));
    for weight in [0, (1 << 40) + 1, u64::MAX] {
        let bad = plan(&map, &[node(5, 0, weight)]);
        assert_eq!(bad, Err(PlanError::BadWeight { node: id(5), weight }));
    }
    let settings = PlanSettings::default().with_tolerance(1001);
    let bad = Balanced::new().plan(&map, &[node(1, 0, 1)], &settings);
    assert_eq!(bad, Err(PlanError::BadTolerance(1001)));
    let text = PlanError::BadWeight { node: id(5), weight: 0 }.to_string();
    assert_eq!(text, "weight 0 of node n0005 is not 1 to 1099511627776");

    let (shards, replicas) = (map.shards(), map.replicas());
    let new = |nodes, owners| Assignment::new(shards, replicas, nodes, owners);
    let wrong = new(vec![], vec![u16::MAX; 15]);
    assert_eq!(wrong, Err(PlanError::WrongLength { places: 15, expected: 16 }));
    let mut owners = vec![u16::MAX; 16];
    owners[9] = 1;
    let unknown = new(vec![Some(id(0)), None], owners.clone());
    assert_eq!(unknown, Err(PlanError::UnknownSlot { slot: 1, place: 9 }));
    let twice = new(vec![Some(id(0)), Some(id(0))], owners);
    assert_eq!(twice, Err(PlanError::DuplicateNode(id(0))));
    let many = (0..65_535).map(|n| Some(id(n))).collect();
    let many = new(many, vec![u16::MAX; 16]);
    assert_eq!(many, Err(PlanError::TooManyNodes { nodes: 65_535 }));
}

#[test]
fn too_few_nodes_zones_or_shards_is_a_plan_that_says_so() {
    let two = [node(1, 0, 1), node(2, 0, 1)];
    let few = plan(&nothing(8, 3), &two).expect("a plan");
    let told = Unsatisfied::TooFewNodes { replicas: 3, nodes: 2 };
    assert_eq!(few.unsatisfied(), [told]);
    assert!(few.next().shards().shards().all(|shard| few.next().owners(shard).count() == 2));

    let zones = [node(1, 0, 1), node(2, 0, 1), node(3, 1, 1)];
    let few = plan(&nothing(8, 3), &zones).expect("a plan");
    assert_eq!(few.unsatisfied(), [Unsatisfied::TooFewZones { replicas: 3, zones: 2 }]);

    let many: Vec<_> = (0..20).map(|n| node(n, 0, 1)).collect();
    let plan = plan(&nothing(8, 1), &many).expect("fewer shards than nodes");
    assert_eq!(plan.moves().len(), 8);
    assert!(plan.next().counts().into_values().all(|load| load <= 1));
}

#[test]
fn the_heaviest_and_the_lightest_weights_share_without_overflow() {
    let nodes = [node(1, 0, 1 << 40), node(2, 0, 1), node(3, 1, 1 << 40)];
    for replicas in 1..=3 {
        let plan = plan(&nothing(1 << 16, replicas), &nodes).expect("a plan");
        check_valid(&nothing(1 << 16, replicas), &nodes, &plan);
    }
}

#[test]
fn a_draining_node_keeps_what_nobody_else_can_take() {
    let nodes = [node(1, 0, 1), node(2, 0, 1), node(3, 0, 1)];
    let settings = PlanSettings::default();
    let full = Balanced::new().plan(&nothing(8, 3), &nodes, &settings).expect("a plan");
    let mut nodes = nodes;
    nodes[2].accepts = Accepts::KeepOnly;
    let plan = Balanced::new().plan(full.next(), &nodes, &settings).expect("a plan");
    assert!(!plan.is_changed());
    let kept = Unsatisfied::NotDrained { node: id(3), places: 8 };
    assert!(plan.unsatisfied().contains(&kept), "{:?}", plan.unsatisfied());

    let mut two = [node(1, 0, 1), node(2, 0, 1).with_max_shards(Some(5))];
    let half = Balanced::new().plan(&nothing(8, 1), &two, &settings).expect("a plan");
    two[0].accepts = Accepts::KeepOnly;
    let plan = Balanced::new().plan(half.next(), &two, &settings).expect("a plan");
    assert_eq!((plan.moves().len(), plan.count(Reason::Drain)), (1, 1));
    assert_eq!(plan.unsatisfied(), [Unsatisfied::NotDrained { node: id(1), places: 3 }]);
}

#[test]
fn pins_are_checked_like_any_other_assignment() {
    let mut nodes = vec![node(1, 0, 1), node(2, 0, 1), node(3, 0, 1)];
    nodes[1].accepts = Accepts::KeepOnly;
    nodes[2].max_shards = Some(1);
    let shard = ShardId::new;
    let settings = PlanSettings::default()
        .with_pin(shard(0), vec![id(3)])
        .with_pin(shard(1), vec![id(2)])
        .with_pin(shard(2), vec![id(9)])
        .with_pin(shard(3), vec![id(1), id(1)])
        .with_pin(shard(4), vec![id(3)])
        .with_pin(shard(5), vec![id(1)])
        .with_exclusion(shard(5), id(1))
        .with_pin(shard(99), vec![id(1)]);
    for strategy in strategies() {
        let plan = strategy.plan(&nothing(8, 1), &nodes, &settings).expect("a plan");
        let pin = |number, node, problem| Unsatisfied::Pin { shard: shard(number), node, problem };
        let told = plan.unsatisfied().iter().filter(|one| matches!(one, Unsatisfied::Pin { .. }));
        let told: Vec<_> = told.cloned().collect();
        let expected = [
            pin(1, id(2), PinProblem::Draining),
            pin(2, id(9), PinProblem::NotLive),
            pin(3, id(1), PinProblem::TooMany),
            pin(4, id(3), PinProblem::Full),
            pin(5, id(1), PinProblem::Excluded),
            pin(99, id(1), PinProblem::UnknownShard),
        ];
        assert_eq!(told, expected, "{}", strategy.name());
        assert_eq!(plan.next().owner(shard(0)), Some(&id(3)));
        assert_eq!(plan.next().owner(shard(3)), Some(&id(1)));
        assert_eq!(plan.next().owner(shard(5)), None, "1 is excluded, 3 is full, 2 drains");
    }
}
