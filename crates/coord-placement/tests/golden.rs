//! Fixed inputs and the digests of their results: a plan that differs on some platform shows here, and so
//! does a change of what a strategy answers.

mod common;

use common::{node, nothing};
use coord_core::Version;
use coord_placement::{
    Balanced, Candidate, ConsistentHash, PlacementStrategy, PlanSettings, Rendezvous,
};

/// FNV-1a over the owners' ids of the maps of a short history.
fn digest(strategy: &dyn PlacementStrategy, replicas: u8) -> u64 {
    let pool: Vec<Candidate> =
        (0..40).map(|n| node(n, n % 5, 65_536 * (1 + n as u64 % 3))).collect();
    let mut current = nothing(2000, replicas);
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for (version, gone) in [99, 3, 99, 17].into_iter().enumerate() {
        let live: Vec<Candidate> =
            pool.iter().enumerate().filter(|(n, _)| *n != gone).map(|(_, c)| c.clone()).collect();
        let settings = PlanSettings::default().with_version(Version::new(version as u64));
        current = strategy.plan(&current, &live, &settings).expect("a plan").into_next();
        for owner in common::by_name(&current).iter().flatten() {
            for byte in owner.as_str().bytes() {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
        }
    }
    hash
}

#[test]
fn the_same_input_gives_the_same_map_everywhere() {
    let ring = ConsistentHash::new();
    let found = [
        digest(&Balanced::new(), 1),
        digest(&Balanced::new(), 3),
        digest(&ring, 1),
        digest(&ring.with_bounded_load(Some(250)), 3),
        digest(&Rendezvous::new(), 3),
    ];
    assert_eq!(found.map(|digest| format!("{digest:016x}")), GOLDEN);
}

const GOLDEN: [&str; 5] = [
    "e80b66678c5dbc64",
    "05bc085cb47cb97d",
    "a0c627a98f01aa6e",
    "b039111b4c6adf53",
    "4a5a33ce3c8aa25e",
];
