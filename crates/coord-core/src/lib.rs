//! The traits, types and lease session of coord, and its embedded backend.
//!
//! ```text
//!    a service ── coord (facade) ── coord-cluster: membership, election, coordinator
//!                                         │
//!              session, watch             │       written once, here, over any backend
//!         ─────────────────────────────────────
//!              Lease   Discovery   Placement      three traits of small atomic steps
//!         ─────────────────────────────────────
//!              memory │ nats │ etcd │ kube │ redis
//! ```
//!
//! Reading order: [`types`] (the words), [`Lease`], [`Discovery`], [`Placement`] and [`Backend`] (what a
//! store has to do).

/// The examples of the README, as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod backend;
mod backoff;
mod clock;
mod discovery;
mod error;
pub mod fencing;
pub mod kit;
mod lease;
pub mod memory;
mod observations;
mod placement;
mod quote;
#[doc(hidden)]
pub mod random;
mod registry;
pub mod session;
pub mod types;
mod url;
pub mod watch;
pub mod wire;

pub use backend::*;
pub use clock::{BootClock, Clock, Moment, TokioClock, sleep_until};
pub use discovery::*;
pub use error::{Effect, Error, ErrorKind, Result};
pub use lease::*;
pub use memory::{MemoryBackend, WallClock};
pub use observations::{Observations, Standing};
pub use placement::*;
#[doc(hidden)]
pub use quote::quoted;
pub use registry::{Connector, Opener, Registry};
pub use session::{
    HeldLease, LeaseBuilder, LeaseGuard, LeaseSession, LeaseState, Leases, Lost, RunOutcome,
    TryAcquire,
};
pub use types::*;
pub use url::{BackendUrl, COMMON_OPTIONS, Secret, URL_BYTES_MAX, UrlHost, UrlOptions};
pub use watch::{Watched, Watcher};
