//! Faults, made to order: between a client and its server ([`Proxy`]), and to the clock of one process
//! ([`Clock`]); [`Link`] makes those of the conformance suite out of them. Pausing, killing and restarting are in [`Node`](crate::servers::Node) and
//! [`Process`](crate::servers::Process).

mod clock;
mod link;
mod proxy;

pub use clock::Clock;
pub use link::Link;
pub use proxy::{Direction, Proxy, Request, Traffic};
