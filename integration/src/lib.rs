//! Servers, faults and failure scenarios for the tests of coord.
//!
//! ```text
//!  test ──► servers::Nats, Etcd, Redis ──► a URL given, else a program, else a container ──► Server
//!    │                                                                                 │ nodes
//!    └────► faults::Proxy  cut, delay, black hole, lost reply                          ▼
//!           faults::Clock  the clock of one process                Node: pause, kill, restart
//! ```
//!
//! A test that needs a server which is not there is *ignored* with the reason, or fails if
//! `COORD_REQUIRE` names the backend: see [`trial`]. It never passes unrun.
//!
//! Reading order: [`missing`](Missing), [`servers`], [`faults`].

mod missing;
mod port;
mod wait;

pub mod faults;
pub mod servers;

pub use missing::{Missing, trial};
pub use port::free_port;
pub use wait::{opened, until};
