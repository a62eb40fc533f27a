//! The words of the field, as types that cannot hold a bad value.

pub(crate) mod bounded;
mod id;
mod lease;
mod name;
mod node;
mod revision;
mod shard;
mod shard_load;
mod shared;
mod table;
mod term;
mod ttl;

pub use id::*;
pub use lease::*;
pub use name::*;
pub use node::*;
pub(crate) use node::{is_host, parse_port};
pub use revision::*;
pub use shard::*;
pub use shard_load::*;
pub use table::*;
pub use term::*;
pub use ttl::*;
