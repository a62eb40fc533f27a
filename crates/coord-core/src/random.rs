//! Where random ids and pauses come from: the operating system, or a seed while a simulation runs.

use std::cell::RefCell;

use rand::rngs::{StdRng, SysRng};
use rand::{RngExt, SeedableRng, TryRng};

thread_local! {
    static SEEDED: RefCell<Option<StdRng>> = const { RefCell::new(None) };
}

/// A source that repeats, for simulations: whatever this crate draws on a thread inside
/// [`scope`](Self::scope) comes from it. Ids that are drawn so tell no two processes apart.
#[doc(hidden)]
#[derive(Debug)]
pub struct Seeded(Option<StdRng>);

impl Seeded {
    /// A source that gives the same for the same seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(Some(StdRng::seed_from_u64(seed)))
    }

    /// Runs a step on this thread, and goes on where the former step ended.
    pub fn scope<T>(&mut self, step: impl FnOnce() -> T) -> T {
        let former = SEEDED.replace(self.0.take());
        let done = step();
        self.0 = SEEDED.replace(former);
        done
    }
}

/// 128 bits, so that two processes started in the same instant differ.
pub(crate) fn bits() -> u128 {
    let seeded = SEEDED.with_borrow_mut(|source| source.as_mut().map(RngExt::random));
    seeded.unwrap_or_else(|| {
        let mut bytes = [0_u8; 16];
        #[expect(
            clippy::expect_used,
            reason = "an operating system without randomness can't run us"
        )]
        SysRng.try_fill_bytes(&mut bytes).expect("the operating system's random source");
        u128::from_le_bytes(bytes)
    })
}

/// A source of its own for one task.
pub(crate) fn source() -> StdRng {
    let seeded = SEEDED.with_borrow_mut(|source| source.as_mut().map(RngExt::random));
    // The fallback is for a system without randomness, where ids can't be made either.
    let system =
        || StdRng::try_from_rng(&mut SysRng).unwrap_or_else(|_error| StdRng::seed_from_u64(0));
    seeded.map_or_else(system, StdRng::seed_from_u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_and_ends_with_its_scope() {
        let drawn = |seed| {
            let mut seeded = Seeded::new(seed);
            (seeded.scope(bits), seeded.scope(bits))
        };
        assert_eq!(drawn(7), drawn(7));
        assert_ne!(drawn(7), drawn(8));
        assert_ne!(drawn(7).0, drawn(7).1);
        assert_ne!(bits(), bits());
    }
}
