//! The lease session: acquire a lease, keep it, and tell when it is lost. Written once, over any
//! [`Lease`](crate::Lease).
//!
//! ```text
//!   Leases ── lease("scheduler") ── LeaseBuilder ── build ── LeaseSession
//!                                                                │ acquire, try_acquire
//!                 candidate: tries, waits for the watch ◄────────┤
//!                 holding:   renews until it is told to stop ◄── LeaseGuard
//! ```
//!
//! A guard's deadline counts from **before** the acquiring or renewing request was sent:
//! `sent_at + granted TTL − margin`. [`LeaseGuard::is_held`](HeldLease::is_held) compares it with the
//! clock, so that it is false in time even if no task ran in between. The decisions are in pure state
//! machines (`candidate`, `machine`); `driver` performs them in tasks that the [`Leases`] own.

mod builder;
mod candidate;
mod driver;
mod guard;
mod machine;
mod timing;

pub use self::builder::{LeaseBuilder, LeaseSession, LeaseState, Leases, TryAcquire};
pub use self::guard::{HeldLease, LeaseGuard, Lost, RunOutcome};
pub use self::timing::default_margin;

#[cfg(test)]
mod tests;
