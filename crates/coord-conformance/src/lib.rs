//! The suite of behaviours that every coord backend passes, also one that is not ours.
//!
//! ```text
//!   your Fixture ──► suite: one trial per behaviour ──► lease │ discovery │ placement │ requests │ …
//!        │                      each names the rules it looks for
//!        └── optional: a fault hook (cut, pause, delay, lost replies), the store's own tools
//! ```
//!
//! The repository has the contract, `docs/design.md`, and the steps to write a backend,
//! `docs/backend-guide.md`.
//!
//! Reading order: [`Fixture`] (what you write), [`main`] (what runs it), [`rules()`] (what is looked for),
//! [`faults`] (a wrapper that makes any backend's connection fail), [`history`] (a checker for what a
//! cluster did).
//!
//! A backend's author implements [`Fixture`] and calls [`main`] from a test target with
//! `harness = false`. This is the whole of it, for the embedded backend:
//!
//! ```
//! use std::sync::Arc;
//!
//! use async_trait::async_trait;
//! use coord_conformance::{Fixture, Handle, Profile};
//! use coord_core::{ClusterName, MemoryBackend, Result};
//!
//! #[derive(Debug)]
//! struct Memory;
//!
//! #[async_trait]
//! impl Fixture for Memory {
//!     fn name(&self) -> &str {
//!         "memory"
//!     }
//!
//!     fn profile(&self) -> Profile {
//!         Profile::paused() // a server wants Profile::real_time()
//!     }
//!
//!     async fn open(&self, cluster: &ClusterName) -> Result<Handle> {
//!         Ok(Handle::new(Arc::new(MemoryBackend::open(cluster.clone()))))
//!     }
//! }
//!
//! // In tests/conformance.rs: `fn main() -> std::process::ExitCode { coord_conformance::main(Memory) }`
//! let trials = coord_conformance::suite(Memory);
//! assert!(trials.len() > 100);
//! let conclusion = libtest_mimic::run(&libtest_mimic::Arguments::default(), trials);
//! assert!(!conclusion.has_failed());
//! ```
//!
//! # What a trial may rely on
//! Each trial opens a random cluster name, so that trials run side by side and in a store that holds other
//! things. [`Profile`] says how long things may take. A trial that needs what the fixture does not have,
//! or what the backend does not promise (its [`Guarantees`](coord_core::Guarantees)), is *ignored* with
//! the reason; it never counts as passed. Set `COORD_REQUIRE` to the fixture's name, or to several with
//! commas between them, and a store that is not there is a failure instead.

/// The examples of the README, as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub mod faults;
pub mod history;

mod case;
mod cx;
mod fixture;
mod memory;
mod report;
mod rules;
mod suite;
mod trials;
mod view;

pub use case::{Case, Verdict};
pub use fixture::{Fixture, Handle, Operator, Profile};
pub use memory::MemoryFixture;
pub use rules::{Rule, rules};
pub use suite::{cases, is_required, main, suite};
