//! Downing: in a network partition, which side continues.
//!
//! The decisions are pure: `now` is an argument. The nodes of a cluster whose settings choose downing drive
//! them (`coord-cluster`).
//!
//! ```text
//!   FailureDetector ──► rows: reachable nodes of each ┐
//!   `_cluster`      ──► members, ages, roles, status ─┼─► View ─► Downing ─► Step
//!   calls           ──► is the store reachable? ──────┘              │
//!                                                       Stay · Wait · AskLease · ReleaseLease
//!                                                       Down(these) · DownSelf(why)
//! ```
//!
//! Each side of a partition decides alone, and both have to come to the same answer. So a decision depends only
//! on what both have seen alike: the members before the partition, their ages and roles. Ties are broken by the
//! lowest name. Where the two sides may have seen different things (a node that was just joining or leaving), a
//! side that can't be sure shuts down: no survivor is a restart, two survivors are a split brain.
//!
//! **Ages** are versions of the `_cluster` table, so no clock takes part.
//!
//! **Partial connectivity.** Some pairs of nodes may not reach each other although both reach a third node.
//! Where nodes share what they reach ([`View::with_row`]), all nodes of such a group exclude the same few nodes
//! from it, so that the others reach each other. The excluded nodes shut down, and the strategy decides with
//! the rest. A node that knows only its own row can't see this, and two overlapping majorities may each down
//! nodes of the other: then only [`Strategy::LeaseMajority`] keeps to one side.
//!
//! **What downing does not have to guarantee.** That no shard has two hosts (docs/design.md#handoff)
//! rests on fences and on every node's own deadline, never on the speed or the correctness of these
//! decisions. Downing is there so that a partition ends with one working cluster.
//!
//! Reading order: [`DowningSettings`] and [`Strategy`], [`View`], [`PartitionState`], [`Downing`]. The
//! choice of a strategy is the subject of `docs/downing.md`.
//!
//! # Sources
//! The strategies, their names and the defaults (stable after 20 s, down all when unstable for three
//! quarters of that, two seconds for the minority, release after 40 s) are those of the Split Brain
//! Resolver of Akka and Pekko (`split-brain-resolver.md` in the documentation of apache/pekko); the
//! referee is from Lightbend's older commercial one. The way nodes are cut out of a group that is only
//! partly connected is ours.

/// The examples of the README, as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub mod detector;
mod machine;
mod partition_state;
mod settings;
mod sides;
mod stability;
mod strategy;
#[cfg(test)]
mod tests;
mod view;

pub use machine::{DownReason, Downing, LeaseAnswer, Step};
pub use partition_state::{PartitionState, Reach};
pub use settings::{Detecting, DowningSettings, Strategy, Unstable};
pub use strategy::Warning;
pub use view::{Member, View};
