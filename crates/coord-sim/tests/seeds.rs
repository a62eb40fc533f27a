//! A few worlds; `cargo sim` runs thousands. What tokio draws can be seeded only in its build: in the
//! ordinary one a seed is not the same world each time, and what it finds could not be found again.

use coord_sim::{Kinds, Plant, simulate};

#[cfg(tokio_unstable)]
#[test]
fn nothing_breaks_in_a_few_worlds() {
    for seed in 1..=5 {
        let outcome = simulate(seed, &Kinds::All, None, false);
        assert_eq!(outcome.broken, None, "seed {seed}");
        assert!(outcome.faults > 0 && outcome.terms > 0 && outcome.version > 0, "{outcome:?}");
    }
}

#[test]
fn a_planted_bug_is_seen() {
    let broken = |seed| simulate(seed, &Kinds::PLAIN, Some(Plant::LeaseEndsEarly), false).broken;
    assert!((1..=20).filter_map(broken).any(|broken| broken.invariant == "I1"), "two leaders");
}

#[cfg(tokio_unstable)]
#[test]
fn a_seed_repeats() {
    assert_eq!(simulate(7, &Kinds::All, None, false), simulate(7, &Kinds::All, None, false));
}
