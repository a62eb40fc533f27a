//! The cluster runtime of coord: membership, leader election, and the owner of each shard.
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
//!   │ election     is candidate   ├─────►│  roster    each node's status     │
//!   │ observer     what the       │      │  placing   the next map           │
//!   │              watches show   │      │  moving    a shard's next step    │
//!   │ region       hosts shards   │      │  driver    performs, fenced       │
//!   └──────▲───────────────▲──────┘      └───────────────┬───────────────────┘
//!          │ Lease         │ Discovery                   ▼ Placement
//!       the leader's    the nodes         `_cluster` (members, failures, pins),
//!       lease                             a map per table, commands and answers
//! ```
//!
//! Every node derives its status and its events from the same watches, so the leader is no bottleneck: what it
//! has written stays in force while no node leads.
//!
//! Reading order: [`Cluster`] and [`Settings`] (how a node is started), [`Status`] and [`EventKind`]
//! (what it shows), [`Host`] (how shards are run), [`mailbox`] (how they are sent messages), [`singleton`]
//! (a job on one node), [`Command`] and [`CommandError`] (what can be asked of it),
//! [`invariants`] (what each map keeps before it is published). Inside: `coordinator/machine.rs`, then
//! `roster.rs`, `placing.rs` and `moving.rs`; on the node's side `region/hosting.rs`.
//!
//! ```
//! use coord_cluster::{Cluster, Settings, Table};
//! use coord_core::{Address, ClusterName, MemoryBackend, NodeId, NodeInfo, TableName};
//!
//! # async fn run() -> coord_core::Result<()> {
//! let store = MemoryBackend::isolated(ClusterName::new("orders")?);
//! let sessions = TableName::new("sessions")?;
//! let mut nodes = Vec::new();
//! for (name, address) in [("n1", "localhost:4001"), ("n2", "localhost:4002")] {
//!     let info = NodeInfo::new(NodeId::new(name)?, Address::new(address)?);
//!     let node = Cluster::builder(&store.reopen(), info)
//!         .settings(Settings::demo())
//!         .table(Table::new(sessions.clone()))
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
//! # Hosting
//!
//! A service that gives its [`Table`] a [`Host`] is told which shards to start and to stop, and
//! gets a [`ShardFence`] for each. By default ([`Handoff::Exclusive`]) a shard never has two hosts: its
//! new owner is published once the old one has reported it stopped, or can't host any more by the
//! clock of its own registration. A table without a host is only shown as owned.
//!
//! # Messages
//!
//! A host that is also a [`Handler`] is sent messages: [`Cluster::mailbox`] asks a key's shard wherever it
//! is hosted, waits while it moves, and keeps the order. [`mailbox`] says what is promised; [`transport`]
//! carries the messages from one process to another.
//!
//! # A job on one node
//!
//! [`Cluster::singleton`] runs a job on whichever node holds its lease; [`singleton`] does so without a
//! cluster too.
//!
//! # A gate for the coordinator
//!
//! [`ClusterBuilder::require_lease`] names a further lease, on any store, without which the leader places no
//! shard and takes no step of a move: where the leader's own lease is in a store that may lose it, a lease in a
//! stricter store decides. [`Status::gating`] shows it. Losing it stops the writes, first by the clock of this
//! node, and for certain by the fence, since a leader claims the tables only once it holds that lease. Nothing
//! else stops: shards stay where they are, and work on.
//!
//! # Who leads next
//!
//! [`Command::TransferLeadership`] names a node, and the others leave it the time to take the lease: two retry
//! intervals. A candidate that was faster, and reads the name only then, yields. With the setting
//! [`newer_leads_after`](Settings::newer_leads_after) a leader transfers leadership by itself, to a newer
//! version of the service.
//!
//! In a cluster of more than [`Settings::candidates`] nodes only so many are candidates for election and watch
//! the registrations. The leader gives the candidate slots; if no node has led for a leader TTL, all are
//! candidates.
//!
//! # Partitions
//!
//! Where [`Settings::downing`] is chosen, each node decides by a [`downing`] strategy whether its side of a
//! partition continues; a [`Probe`] finds out which nodes it reaches.
//!
//! # What is not there yet
//!
//! A table that is deleted while a node runs that does not know it waits for that node's end before it is
//! hosted again.

/// The examples of the README, as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod cluster;
mod commands;
mod coordinator;
mod election;
mod events;
mod follow;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod gate;
mod gating;
mod handoff;
pub mod invariants;
pub mod mailbox;
mod member_view;
mod membership;
mod model;
mod observer;
mod partition;
pub mod poison;
mod record;
mod region;
mod settings;
mod shared;
mod status;
mod supervise;
mod table;
mod telemetry;
pub mod transport;

pub use cluster::{Cluster, ClusterBuilder, Stores};
pub use commands::{Command, CommandError, CommandSummary, Reply};
pub use coord_downing as downing;
pub use coord_singleton as singleton;
pub use events::{
    Assigned, Event, EventKind, EventOrLag, EventSource, Events, Migrated, TableMismatch,
};
pub use handoff::Handoff;
pub use mailbox::{AskError, Handler, Mail, Mailbox, MailboxLimits};
pub use partition::Probe;
pub use region::{Host, HostError, ShardFence, ShardToken};
pub use settings::{ENV_PREFIX, EVENT_BUFFER_MAX, Settings, Strategies};
pub use singleton::Singleton;
pub use status::{
    Balance, ClusterState, Gating, HostFault, Leader, Member, Role, Status, TableStatus,
};
pub use table::Table;
pub use transport::{TcpTransport, Transport};
