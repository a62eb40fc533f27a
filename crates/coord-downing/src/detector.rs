//! Whether a node can be reached, judged from when its heartbeats came. Pure: `now` is an argument.
//!
//! A detector only suspects. [`Downing`](crate::Downing) decides what follows from its suspicion; by the
//! suspicion alone no node loses a shard.

mod heartbeat_age;
mod phi;

use std::fmt::Debug;
use std::time::Duration;

use coord_core::{Incarnation, Moment, NodeId};

pub use self::heartbeat_age::HeartbeatAge;
pub use self::phi::{PHI_MAX, PhiAccrual, PhiSettings};
use crate::Reach;

/// Judges from heartbeats whether nodes can be reached.
///
/// An implementation keeps these rules: a node that it never heard is [`Reach::Reachable`], since there is no
/// evidence against it; the heartbeats of one incarnation of a node say nothing of another incarnation; a
/// silent node becomes unreachable at some moment and stays so until it is heard again.
pub trait FailureDetector: Debug + Send + Sync + 'static {
    /// A heartbeat of this incarnation of a node came. Another incarnation than the last one starts anew.
    fn on_heartbeat(&mut self, node: &NodeId, incarnation: Incarnation, now: Moment);

    /// The node left: nothing is expected of it any more.
    fn forget(&mut self, node: &NodeId);

    /// No node could be heard for so long, since this process was stalled or the store that brings the
    /// heartbeats was unavailable: that silence counts against no node.
    fn excuse(&mut self, silence: Duration);

    /// Whether the node can be reached.
    fn reach(&self, node: &NodeId, now: Moment) -> Reach;

    /// When the next node that is reachable now becomes unreachable if nothing is heard of it.
    fn next_change(&self, now: Moment) -> Option<Moment>;
}
