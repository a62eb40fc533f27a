//! The cluster runtime of coord: who is a member, who leads, and who owns which shard.
//!
//! Each process starts one [`Cluster`], which registers it, follows what the store holds and, while it
//! leads, decides for all. It runs over any three stores that implement
//! [`Lease`](coord_core::Lease), [`Discovery`](coord_core::Discovery) and
//! [`Placement`](coord_core::Placement).
//!
//! ```text
//!          Cluster: status, events, owner(table, key), request(command)
//!             ▲                                        │
//!   ┌─ every node ────────────────┐      ┌─ the leader ▼─────────────────────┐
//!   │ membership   keeps itself   │      │ coordinator                       │
//!   │              registered     │      │  machine   what to do next (pure) │
//!   │ election     stands, leads  ├─────►│  roster    each node's status     │
//!   │ observer     what the       │      │  placing   the next map           │
//!   │              watches show   │      │  driver    performs, fenced       │
//!   └──────▲───────────────▲──────┘      └───────────────┬───────────────────┘
//!          │ Lease         │ Discovery                   ▼ Placement
//!       the leader's    the nodes         `_cluster` (members, verdicts, pins),
//!       lease                             a map per table, commands and answers
//! ```
//!
//! Every node derives its status and its events from the same watches, so that the leader is in no
//! one's way: what it has written stays in force while nobody leads.
//!
//! Reading order: [`Cluster`] and [`Settings`] (how a node is started), [`Status`] and [`EventKind`]
//! (what it shows), [`Command`] and [`Refusal`] (what can be asked of it), [`invariants`] (what each
//! map keeps before it is published). Inside: `coordinator/machine.rs`, then `roster.rs` and
//! `placing.rs`.
//!
//! ```
//! use coord_cluster::{Cluster, Settings};
//! use coord_core::{Address, ClusterName, MemoryBackend, NodeId, NodeInfo, TableHeader, TableName};
//!
//! # async fn run() -> coord_core::Result<()> {
//! let store = MemoryBackend::isolated(ClusterName::new("orders")?);
//! let sessions = TableName::new("sessions")?;
//! let mut nodes = Vec::new();
//! for (name, address) in [("n1", "localhost:4001"), ("n2", "localhost:4002")] {
//!     let info = NodeInfo::new(NodeId::new(name)?, Address::new(address)?);
//!     let node = Cluster::builder(&store.reopen(), info)
//!         .settings(Settings::demo())
//!         .table(sessions.clone(), TableHeader::default())
//!         .start()
//!         .await?;
//!     nodes.push(node);
//! }
//! // 1024 shards, of which each of the two gets its half.
//! let status = nodes[0]
//!     .wait_for(|status| status.is_settled() && status.members.iter().all(|m| m.shards == 512))
//!     .await?;
//! assert_eq!(status.members.len(), 2);
//! let owner = nodes[1].owner(&sessions, "alice").expect("every shard has an owner");
//! println!("the session of alice lives at {}", owner.address);
//! for node in nodes {
//!     node.leave().await?;
//! }
//! # Ok(())
//! # }
//! # let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
//! # runtime.block_on(run()).unwrap();
//! ```
//!
//! # What is not there yet
//!
//! A change of owner is published at once: there is no handoff yet, and no regions and singleton;
//! [`downing`], [`detector`] and [`poison`] are there as machines that nothing drives yet.
//! Every node stands for election unless its setting `candidate` is false.
//! `mass_failure_brake` is validated and not yet applied.

mod cluster;
mod commands;
mod coordinator;
pub mod detector;
pub mod downing;
mod duration;
mod election;
mod events;
mod follow;
pub mod invariants;
mod membership;
mod observer;
pub mod poison;
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
