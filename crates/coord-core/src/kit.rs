//! For implementers of backends: what every backend needs and no store brings. Services don't need it.
//!
//! The steps to write a backend are in `docs/backend-guide.md`.

pub mod config;
pub mod duration;
mod op;
pub mod tables;

pub use op::Op;
