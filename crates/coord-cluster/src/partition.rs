//! Drives [`downing`](crate::downing) for one node.
//!
//! `peers` asks the other members and judges which of them this node reaches, `inputs` makes what downing
//! decides by from the watches, and `driver` carries the decisions out.

mod driver;
mod inputs;
mod peers;
mod probe;

pub(crate) use self::driver::PartitionDriver;
pub use self::probe::Probe;
