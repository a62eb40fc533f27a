//! Fuzz targets for all that coord decodes from outside: what a store holds, what a peer sends, what an operator
//! writes. `cargo xtask fuzz` runs them on stable Rust.
//!
//! Each input is a damaged form of a good one. It must be read or refused: no panic, no hang, what was read reads
//! back the same, and the memory taken stays within so many bytes for each byte read.
//!
//! The engine is small and ours. libFuzzer and its relatives need a nightly compiler for their coverage, and
//! bolero without them draws at random as this does, but knows neither a time limit over several targets nor
//! a bound of memory. In the place of coverage, an input that is refused for a reason not seen before becomes a
//! seed.

mod engine;
mod mutation;
pub mod sealed;
mod targets;

pub use engine::{Failure, Meter, Plan, fuzz, replay};
pub use targets::{Check, Target, all};
