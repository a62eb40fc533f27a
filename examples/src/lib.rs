//! Examples of coord: see `examples/examples/`. Each runs with no server, and takes the URL of a store as
//! its argument: `cargo run -p coord-examples --example leader -- memory://orders`.
//!
//! [`kv`] is the service of the example `sharded_kv`, apart from it so that tests can put it under load.

/// The example of the README, as a test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

pub mod kv;
