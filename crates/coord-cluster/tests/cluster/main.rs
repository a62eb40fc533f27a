//! Whole clusters in one process, on the embedded backend, under paused time.

mod candidates;
mod commands;
mod common;
mod downing;
mod failover;
mod faults;
mod gating;
mod handoff;
mod hosting;
mod leaders;
mod left_behind;
mod loads;
mod mailbox;
mod metrics;
mod panics;
mod poison;
mod singleton;
mod succession;
mod tcp;
mod timing;
