//! Faults, made to order: between a client and its server ([`Proxy`]), and to the clock of one process
//! ([`Clock`]). Pausing, killing and restarting are in [`Node`](crate::servers::Node) and
//! [`Process`](crate::servers::Process).

mod clock;
mod proxy;

pub use clock::Clock;
pub use proxy::{Direction, Proxy, Request, Traffic};
