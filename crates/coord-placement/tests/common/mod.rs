//! What the tests share: inputs, checks of a map, and an independent solver.

#![allow(dead_code, reason = "each test uses a part")]

use std::collections::{BTreeMap, BTreeSet};

use coord_core::{Label, NodeId, ReplicationFactor, ShardCount, ShardId};
use coord_placement::{Accepts, Assignment, Candidate, Plan};

pub(crate) mod flow;

pub(crate) fn id(n: usize) -> NodeId {
    NodeId::new(format!("n{n:04}")).expect("id")
}

pub(crate) fn nothing(shards: u32, replicas: u8) -> Assignment {
    let replicas = ReplicationFactor::new(replicas).expect("replicas");
    Assignment::empty(ShardCount::new(shards).expect("shards"), replicas)
}

/// A candidate in a numbered zone.
pub(crate) fn node(n: usize, zone: usize, weight: u64) -> Candidate {
    let zone = Label::new(format!("z{zone}")).expect("label");
    Candidate::new(id(n)).with_zone(Some(zone)).with_weight(weight)
}

/// A small deterministic generator (SplitMix64), so that a failure repeats.
#[derive(Debug, Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n as u64).expect("fits")
    }
}

/// Owners by name, shard by shard.
pub(crate) fn by_name(assignment: &Assignment) -> Vec<Vec<NodeId>> {
    let shards = assignment.shards().shards();
    shards.map(|shard| assignment.owners(shard).cloned().collect()).collect()
}

/// What must hold of every plan whatever its input: owners are candidates and distinct, and the moves
/// are exactly the difference between the two maps.
pub(crate) fn check_valid(current: &Assignment, candidates: &[Candidate], plan: &Plan) {
    let live: BTreeSet<&NodeId> = candidates.iter().map(|candidate| &candidate.id).collect();
    let draining: BTreeSet<&NodeId> = candidates
        .iter()
        .filter(|candidate| candidate.accepts == Accepts::KeepOnly)
        .map(|candidate| &candidate.id)
        .collect();
    let mut arrivals = BTreeSet::new();
    for shard in current.shards().shards() {
        let before: BTreeSet<&NodeId> = current.owners(shard).collect();
        let after: Vec<&NodeId> = plan.next().owners(shard).collect();
        let distinct: BTreeSet<&NodeId> = after.iter().copied().collect();
        assert_eq!(after.len(), distinct.len(), "shard {shard} names a node twice: {after:?}");
        for owner in after {
            assert!(live.contains(owner), "shard {shard} is on {owner}, which is not live");
            if !before.contains(owner) {
                assert!(!draining.contains(owner), "draining {owner} got shard {shard}");
                arrivals.insert((shard, owner.clone()));
            }
        }
    }
    let mut told = BTreeSet::new();
    for one in plan.moves() {
        let to = plan.node(one.to).expect("a node").clone();
        let place = plan.next().owner_slots(one.shard).nth(usize::from(one.replica));
        assert_eq!(place, Some(one.to), "{one:?} tells another place");
        assert!(told.insert((one.shard, to)), "{one:?} is told twice");
    }
    assert_eq!(told, arrivals, "the moves are not what changes");
    assert_eq!(plan.is_changed(), plan.next().raw_owners() != current.raw_owners());
    assert!(!plan.is_optimal() || plan.moves().len() as u64 >= plan.lower_bound());
}

/// Shards per zone limit: no shard has more owners in one zone than the smallest limit that lets all find
/// a place.
pub(crate) fn check_zones(candidates: &[Candidate], next: &Assignment) {
    let open: Vec<&Candidate> =
        candidates.iter().filter(|candidate| candidate.accepts == Accepts::New).collect();
    let zone_of: BTreeMap<&NodeId, &Option<Label>> =
        open.iter().map(|candidate| (&candidate.id, &candidate.zone)).collect();
    let limit = zone_limit(&open, usize::from(next.replicas().get()));
    for shard in next.shards().shards() {
        let mut zones: BTreeMap<&Option<Label>, usize> = BTreeMap::new();
        for owner in next.owners(shard) {
            *zones.entry(zone_of[owner]).or_default() += 1;
        }
        assert!(zones.values().all(|&n| n <= limit), "shard {shard}: {zones:?}, limit {limit}");
    }
}

pub(crate) fn zone_limit(open: &[&Candidate], replicas: usize) -> usize {
    let owners = replicas.min(open.len());
    let mut sizes: BTreeMap<&Option<Label>, usize> = BTreeMap::new();
    for candidate in open {
        *sizes.entry(&candidate.zone).or_default() += 1;
    }
    let room = |limit: usize| sizes.values().map(|&size| size.min(limit)).sum::<usize>();
    (1..=owners).find(|&limit| room(limit) >= owners).unwrap_or(owners)
}

/// Floor and ceiling of each node's share, capped per zone and node, computed with plain fractions.
pub(crate) fn shares(open: &[&Candidate], shards: usize, replicas: usize) -> Vec<(usize, usize)> {
    let owners = replicas.min(open.len());
    let limit = zone_limit(open, replicas);
    let zones: Vec<&Option<Label>> =
        open.iter().map(|c| &c.zone).collect::<BTreeSet<_>>().into_iter().collect();
    // A node's bounds: its own cap, then its zone's; water filling by bisection over a rational level
    // would need fractions, so caps are taken off one at a time, the tightest first.
    let mut fixed: BTreeMap<usize, (u128, u128)> = BTreeMap::new();
    let mut zone_done: BTreeSet<usize> = BTreeSet::new();
    let zone_index = |n: usize| zones.iter().position(|z| **z == open[n].zone).expect("zone");
    let zone_cap = |z: usize| {
        let size = (0..open.len()).filter(|&n| zone_index(n) == z).count();
        (size.min(limit) * shards) as u128
    };
    loop {
        let free: Vec<usize> = (0..open.len()).filter(|n| !fixed.contains_key(n)).collect();
        if free.is_empty() {
            break;
        }
        // All fixed values are whole, as caps are; so what is left is whole.
        let used: u128 = fixed.values().map(|(a, b)| a / b).sum::<u128>();
        let used_rest: u128 = {
            // Shares inside a capped zone are fractions that add up to the zone's cap.
            let in_capped: Vec<usize> =
                fixed.keys().copied().filter(|&n| zone_done.contains(&zone_index(n))).collect();
            let floors: u128 = in_capped.iter().map(|n| fixed[n].0 / fixed[n].1).sum();
            let caps: u128 = zone_done.iter().map(|&z| zone_cap(z)).sum();
            caps - floors
        };
        let left = (shards * owners) as u128 - used - used_rest;
        let weights: u128 = free.iter().map(|&n| u128::from(open[n].weight)).sum();
        // A zone whose nodes, each at most at its own cap, would take more than the zone's cap.
        let wants = |n: usize| match fixed.get(&n) {
            Some((a, _)) => a * weights,
            None => (left * u128::from(open[n].weight)).min(shards as u128 * weights),
        };
        let zone = (0..zones.len()).filter(|z| !zone_done.contains(z)).find(|&z| {
            let inside = (0..open.len()).filter(|&n| zone_index(n) == z);
            inside.map(wants).sum::<u128>() > zone_cap(z) * weights
        });
        let node = free
            .iter()
            .copied()
            .find(|&n| left * u128::from(open[n].weight) > shards as u128 * weights);
        if let (None, Some(n)) = (zone, node) {
            fixed.insert(n, (shards as u128, 1));
            continue;
        }
        let Some(z) = zone else {
            for &n in &free {
                fixed.insert(n, (left * u128::from(open[n].weight), weights));
            }
            break;
        };
        // Inside a zone at its cap the nodes share the cap, by the same rule.
        let members: Vec<usize> = (0..open.len()).filter(|&n| zone_index(n) == z).collect();
        for (n, share) in inside_zone(open, &members, zone_cap(z), shards as u128) {
            fixed.insert(n, share);
        }
        zone_done.insert(z);
    }
    (0..open.len())
        .map(|n| {
            let (a, b) = fixed[&n];
            let low = usize::try_from(a / b).expect("fits");
            (low, usize::try_from(a.div_ceil(b)).expect("fits"))
        })
        .collect()
}

fn inside_zone(
    open: &[&Candidate],
    members: &[usize],
    total: u128,
    cap: u128,
) -> Vec<(usize, (u128, u128))> {
    let mut free = members.to_vec();
    let mut left = total;
    let mut found = Vec::new();
    loop {
        let weights: u128 = free.iter().map(|&n| u128::from(open[n].weight)).sum();
        let over = free.iter().position(|&n| left * u128::from(open[n].weight) > cap * weights);
        let Some(at) = over else {
            found.extend(free.iter().map(|&n| (n, (left * u128::from(open[n].weight), weights))));
            return found;
        };
        found.push((free.remove(at), (cap, 1)));
        left -= cap;
    }
}

pub(crate) fn shard(n: usize) -> ShardId {
    ShardId::new(u32::try_from(n).expect("fits"))
}
