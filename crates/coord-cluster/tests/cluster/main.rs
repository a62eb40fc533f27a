//! Whole clusters in one process, on the embedded backend, under paused time.

mod commands;
mod common;
mod failover;
mod faults;
mod handoff;
mod leaders;
mod singleton;
mod timing;
