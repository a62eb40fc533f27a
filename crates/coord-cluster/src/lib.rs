//! The cluster runtime of coord: membership, election, coordinator.

mod cluster;
mod commands;
mod coordinator;
mod duration;
mod election;
mod events;
mod follow;
pub mod invariants;
mod membership;
mod observer;
mod record;
mod settings;
mod shared;
mod status;
mod telemetry;

pub use cluster::{Cluster, ClusterBuilder, Stores};
pub use commands::{Command, Done, Joining, Refusal, Reply};
pub use events::{Assigned, Cause, Event, EventKind, Events, Heard, Migrated};
pub use settings::{ENV_PREFIX, EVENT_BUFFER_MAX, Settings};
pub use status::{Balance, ClusterState, Leader, Member, Role, Status, TableStatus};
