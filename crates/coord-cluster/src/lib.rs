//! The cluster runtime of coord: membership, election, coordinator.

mod commands;
mod duration;
mod events;
pub mod invariants;
mod record;
mod settings;
mod status;

pub use commands::{Command, Done, Joining, Refusal, Reply};
pub use events::{Assigned, Cause, Event, EventKind, Events, Heard, Migrated};
pub use settings::{ENV_PREFIX, EVENT_BUFFER_MAX, Settings};
pub use status::{Balance, ClusterState, Leader, Member, Role, Status, TableStatus};
