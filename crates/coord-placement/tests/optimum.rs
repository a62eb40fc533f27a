//! The number of moves against an independent min-cost-flow solver.

mod common;

use common::{Random, check_valid, check_zones, id, node, nothing, shares};
use coord_core::Version;
use coord_placement::{Assignment, Balanced, Candidate, PlacementStrategy, PlanSettings};

/// A history of nodes that come and go; each plan is checked.
fn history(random: &mut Random, replicas: u8, zones: usize, weighted: bool) -> (usize, usize) {
    let shards = 1 + random.below(48);
    let nodes = 1 + random.below(9);
    let weight =
        |random: &mut Random| 65_536 * (1 + if weighted { random.below(4) } else { 0 }) as u64;
    let mut pool: Vec<Candidate> =
        (0..nodes + 2).map(|n| node(n, random.below(zones), weight(random))).collect();
    let mut current = nothing(u32::try_from(shards).expect("fits"), replicas);
    let (mut plans, mut at_bound) = (0, 0);
    for step in 0..8 {
        if random.below(5) == 0 {
            current = scrambled(random, &current, pool.len());
        }
        if weighted && random.below(3) == 0 {
            let n = random.below(pool.len());
            pool[n].weight = weight(random);
        }
        let live: Vec<Candidate> = pool.iter().filter(|_| random.below(4) > 0).cloned().collect();
        if live.is_empty() {
            continue;
        }
        let settings = PlanSettings::default().with_version(Version::new(step));
        let plan = Balanced::new().plan(&current, &live, &settings).expect("a plan");
        check(&current, &live, &plan);
        plans += 1;
        at_bound += usize::from(plan.moves().len() as u64 == plan.lower_bound());
        current = plan.into_next();
    }
    (plans, at_bound)
}

fn check(current: &Assignment, live: &[Candidate], plan: &coord_placement::Plan) {
    check_valid(current, live, plan);
    check_zones(live, plan.next());
    let open: Vec<&Candidate> = live.iter().collect();
    let shards = current.shards().get() as usize;
    let bounds = shares(&open, shards, usize::from(current.replicas().get()));
    let loads = plan.next().counts();
    for (candidate, (low, high)) in live.iter().zip(&bounds) {
        let load = loads.get(&candidate.id).copied().unwrap_or(0);
        let range = *low as u64..=*high as u64;
        assert!(
            range.contains(&load),
            "{} has {load}, not {range:?}: S {shards}, {live:?} {bounds:?} {loads:?}",
            candidate.id
        );
    }
    let best = common::flow::fewest_moves(current, &open, &bounds).expect("feasible");
    assert_eq!(plan.moves().len(), best, "not the fewest moves");
    assert!(plan.is_optimal(), "the proof is missing");
    if current.replicas().get() == 1 {
        assert_eq!(plan.lower_bound(), best as u64, "one replica always reaches the bound");
    }
}

/// Any owners at all, also the same node twice.
fn scrambled(random: &mut Random, like: &Assignment, pool: usize) -> Assignment {
    let nodes = (0..pool).map(|n| Some(id(n))).collect();
    let owners = like
        .raw_owners()
        .iter()
        .map(|_| match random.below(pool + 1) {
            n if n == pool => u16::MAX,
            n => u16::try_from(n).expect("fits"),
        })
        .collect();
    Assignment::new(like.shards(), like.replicas(), nodes, owners).expect("valid")
}

#[test]
fn every_plan_has_the_fewest_moves() {
    let mut random = Random(1);
    for (replicas, zones, weighted) in [
        (1, 1, false),
        (1, 1, true),
        (1, 3, true),
        (2, 2, false),
        (2, 4, true),
        (3, 3, false),
        (3, 3, true),
        (3, 5, false),
        (3, 5, true),
        (3, 1, false),
        (3, 2, true),
        (5, 3, true),
        (5, 5, false),
    ] {
        let (mut plans, mut at_bound) = (0, 0);
        for _ in 0..60 {
            let (some, bound) = history(&mut random, replicas, zones, weighted);
            plans += some;
            at_bound += bound;
        }
        println!(
            "R {replicas}, {zones} zones, weighted {weighted}: {plans} plans, {at_bound} at M*"
        );
    }
}

/// A node leaves and returns, at sizes that the solver still manages.
#[test]
fn larger_plans_have_the_fewest_moves() {
    let mut random = Random(5);
    for (shards, nodes, zones, replicas, weights) in
        [(1024, 100, 1, 1, 1), (256, 12, 4, 3, 1), (256, 12, 4, 3, 4), (1024, 12, 4, 3, 1)]
    {
        let mut weight = || 65_536 * (1 + random.below(weights)) as u64;
        let all: Vec<Candidate> = (0..nodes).map(|n| node(n, n % zones, weight())).collect();
        let settings = PlanSettings::default();
        let full = Balanced::new().plan(&nothing(shards, replicas), &all, &settings);
        let full = full.expect("a plan").into_next();
        let less = Balanced::new().plan(&full, &all[1..], &settings).expect("a plan");
        check(&full, &all[1..], &less);
        let back = Balanced::new().plan(less.next(), &all, &settings).expect("a plan");
        check(less.next(), &all, &back);
    }
}

#[test]
fn a_search_that_ends_for_want_of_work_proves_nothing() {
    let mut random = Random(9);
    let (mut proved, mut ended) = (0, 0);
    for _ in 0..100 {
        let (shards, nodes) = (1 + random.below(24), 3 + random.below(6));
        let weights = [(); 9].map(|()| 65_536 * (1 + random.below(3)) as u64);
        let all: Vec<Candidate> = (0..nodes).map(|n| node(n, n % 3, weights[n])).collect();
        let empty = nothing(u32::try_from(shards).expect("fits"), 3);
        let current = scrambled(&mut random, &empty, nodes);
        let settings = PlanSettings::default().with_work_limit(1);
        let plan = Balanced::new().plan(&current, &all, &settings).expect("a plan");
        let open: Vec<&Candidate> = all.iter().collect();
        let bounds = shares(&open, shards, 3);
        let best = common::flow::fewest_moves(&current, &open, &bounds).expect("feasible");
        if plan.is_optimal() {
            assert_eq!(plan.moves().len(), best, "not the fewest moves");
            proved += 1;
        } else {
            ended += 1;
        }
    }
    assert!(proved > 0 && ended > 0, "{proved} proved, {ended} ended early");
}
