//! The leader's part: it takes in members, places shards and carries out commands.
//!
//! All decisions are made in [`machine`], without I/O and without a clock; [`driver`] performs them.

mod candidacy;
mod driver;
mod generations;
mod judge;
mod loads;
mod machine;
mod moving;
mod placing;
mod poisoning;
mod release;
mod roster;
mod rules;
mod succession;

pub(crate) use driver::{Ended, LocalCommand, lead};
pub(crate) use release::Release;

#[cfg(test)]
mod tests;
