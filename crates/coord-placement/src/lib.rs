//! Placement strategies of coord: pure functions from one shard map to the next.
//!
//! ```text
//!   current Assignment ─┐
//!   live Candidates ────┼─► PlacementStrategy::plan ─► Plan: next Assignment, moves with reasons,
//!   PlanSettings ───────┘                                    what could not be satisfied
//! ```
//!
//! No I/O, no clock, no randomness: the same input gives the same bytes on every platform, whatever the
//! order of the candidates and of the slots. Reading order: [`Assignment`], [`Candidate`],
//! [`PlanSettings`], [`Plan`], then the strategies.
//!
//! ```
//! use coord_core::{NodeId, ReplicationFactor, ShardCount};
//! use coord_placement::{Assignment, Balanced, Candidate, PlacementStrategy, PlanSettings};
//!
//! let node = |n: u32| Candidate::new(NodeId::new(format!("n{n}")).unwrap());
//! let settings = PlanSettings::default();
//! let nothing = Assignment::empty(ShardCount::default(), ReplicationFactor::default());
//!
//! let four: Vec<_> = (1..=4).map(node).collect();
//! let first = Balanced::new().plan(&nothing, &four, &settings)?;
//! assert_eq!(first.moves().len(), 1024);
//!
//! let three: Vec<_> = (1..=3).map(node).collect();
//! let second = Balanced::new().plan(first.next(), &three, &settings)?;
//! assert_eq!(second.moves().len(), 256, "only what the lost node owned");
//! # Ok::<(), coord_placement::PlanError>(())
//! ```

/// The examples of the README, as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod assignment;
mod balanced;
mod candidate;
mod consistent_hash;
mod error;
mod hashed;
mod input;
mod load_aware;
mod loads;
mod plan;
mod quota;
mod rendezvous;
mod rules;
mod settings;
mod strategy;
mod write;

pub use assignment::Assignment;
pub use balanced::Balanced;
pub use candidate::{Accepts, Candidate, WEIGHT_DEFAULT, WEIGHT_MAX};
pub use consistent_hash::{ConsistentHash, VIRTUAL_NODES_DEFAULT, VIRTUAL_NODES_MAX};
pub use error::PlanError;
pub use load_aware::{CHURN_DEFAULT, LOAD_BAND_DEFAULT, LoadAware};
pub use loads::ShardLoads;
pub use plan::{Move, PinProblem, Plan, Reason, Unsatisfied};
pub use rendezvous::Rendezvous;
pub use settings::{PlanSettings, WORK_LIMIT_DEFAULT};
pub use strategy::PlacementStrategy;
