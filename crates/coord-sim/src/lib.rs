//! Deterministic simulation of coord: worlds of nodes and their stores, behind faults, all from one seed.
//!
//! ```text
//!    World ── tick ──► wire ──► store (an island: Faulty ─ Books ─ MemoryBackend)
//!      │                 ▲             │
//!      │                 └── replies ──┘
//!      └──── tick ──► process (an island: a whole coord-cluster, its Service, its clock)
//!
//!    Judge: I1 to I6, epochs and make-before-break, at every step      Recorder: the history, at the end
//! ```
//!
//! An [island](process::Island) is a tokio runtime on paused time that runs for one [tick](time::TICK) at a
//! time, one island after the other in an order drawn from the seed. So a process can stand still, die
//! between two of its instructions, and have a clock of its own, and no step of one overlaps with a step of
//! another. Everything between a process and the store is a message of the [wire].
//!
//! What would differ from run to run comes from the seed too: ids and pauses through
//! [`coord_core::random`], and tokio's own draws, which takes `--cfg tokio_unstable`; `cargo sim` sets it.
//!
//! In the safety phase faults happen and the [invariants] hold at every step; in the healing phase nothing
//! happens any more, and all has to be in order within a bound, and to stay so.

#![expect(
    clippy::exhaustive_structs,
    clippy::exhaustive_enums,
    reason = "it is not published: whoever uses it is in this workspace"
)]

pub mod books;
pub mod invariants;
pub mod keep;
pub mod kinds;
pub mod ledger;
pub mod mail;
mod panics;
pub mod peers;
pub mod plants;
pub mod process;
pub mod scale;
pub mod tables;
pub mod time;
pub mod wire;
pub mod world;

pub use kinds::{Kind, Kinds};
pub use plants::Plant;
pub use world::{Outcome, World};

/// What comes of the world of this seed.
#[must_use]
pub fn simulate(seed: u64, kinds: &Kinds, plant: Option<Plant>, tracing: bool) -> Outcome {
    World::new(seed, kinds, plant, tracing).run()
}
