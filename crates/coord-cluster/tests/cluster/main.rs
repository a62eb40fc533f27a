//! Whole clusters in one process, on the embedded backend, under paused time.

mod common;
mod failover;
