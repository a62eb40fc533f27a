//! Membership, leader election and shard placement for the processes of a distributed service, over the
//! store that the service already runs.
//!
//! ```
//! use std::time::Duration;
//!
//! # async fn example() -> coord::Result<()> {
//! let coord = coord::connect("memory://orders").await?;
//!
//! // Wait for the lease, work while it is held, stop when it is lost.
//! let guard = coord.lease("scheduler")?.ttl(Duration::from_secs(15)).acquire().await?;
//! let outcome = guard
//!     .run(|fence| async move {
//!         // Show the fence to whatever you write to: it refuses a stale one.
//!         println!("working in term {}", fence.term);
//!     })
//!     .await;
//! # assert!(matches!(outcome, coord::session::RunOutcome::Finished(())));
//! # Ok(())
//! # }
//! # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
//! # runtime.block_on(example()).unwrap();
//! ```
//!
//! # Picture
//!
//! ```text
//! connect("scheme://hosts/cluster")
//!    │
//!  Coord ── lease("name")      one holder at a time, with a fence          (coord_core::session)
//!    ├───── singleton("name")  a job that runs on one process of many      (coord_cluster::singleton)
//!    ├───── cluster(node)      members, a leader, shard maps that it keeps  (coord_cluster)
//!    ├───── backend()          the three traits themselves                  (coord_core)
//!    └───── check()            what is wrong with the store, in words
//! ```
//!
//! [`from_env`] takes the URL, the node and the settings from the environment.
//!
//! Reading order: [`connect`], [`Coord`], [`session`], [`cluster`], [`strategies`], and [`types`] for the words.
//!
//! # Features
//!
//! | feature | scheme | store |
//! | --- | --- | --- |
//! | always there | `memory://cluster` | none: inside this process, for tests, demos and single processes |
//! | `etcd` | `etcd://host,host/cluster` | etcd 3.4 or newer; building it takes `protoc` |
//! | `kube` | `kube:///cluster?namespace=…` | Kubernetes: Leases and ConfigMaps in a namespace |
//! | `nats` | `nats://host,host/cluster` | NATS 2.11.7 or newer with JetStream; 2.10 degraded |
//! | `redis` | `redis://host,host/cluster`, `rediss://…` | Redis 6.2 or newer, Valkey: single, Sentinel or Cluster; best effort |
//! | `tls` | | encrypted connections for the backends that are enabled |
//! | `full` | | all of them |

// docs.rs builds with nightly, and then shows which feature an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

/// The examples of the README, as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[doc(inline)]
pub use coord_core::*;

/// The cluster runtime: membership, election, coordinator.
pub mod cluster {
    #[doc(inline)]
    pub use coord_cluster::*;
}

/// Placement strategies: pure functions from one shard map to the next.
pub mod strategies {
    #[doc(inline)]
    pub use coord_placement::*;
}

mod connect;
mod environment;

pub use connect::{Coord, connect, connector, registry};
pub use environment::{Environment, from_env};
