//! The names of all metrics, in one place.

use coord_core::{Load, NodeId, NodeStatus, Term};
use metrics::{counter, gauge, histogram};

use crate::events::EventKind;
use crate::status::{Gating, HostFault};

/// What the gauges show of one node.
#[derive(Debug)]
pub(crate) struct Gauges {
    pub(crate) nodes: [(NodeStatus, usize); 3],
    /// Places that this node fills.
    pub(crate) mine: u32,
    pub(crate) orphans: usize,
    pub(crate) parked: usize,
    pub(crate) stuck: usize,
    pub(crate) unreachable: usize,
    pub(crate) gating: Gating,
    /// Whether this node leads and can't write down what it has to remember.
    pub(crate) unwritten: bool,
    pub(crate) leads: bool,
    pub(crate) term: Option<Term>,
    pub(crate) rebalancing: bool,
    /// Shards of this node's host, by what is wrong with them.
    pub(crate) faults: [usize; HostFault::NAMES.len()],
}

/// Sets the gauges to what this node sees.
pub(crate) fn gauges(gauges: &Gauges) {
    for (status, count) in gauges.nodes {
        gauge!("cluster_nodes_count", "status" => status.as_str()).set(float(count));
    }
    gauge!("cluster_handoff_stuck").set(float(gauges.stuck));
    gauge!("cluster_shards_parked").set(float(gauges.parked));
    gauge!("cluster_shards_assigned").set(f64::from(gauges.mine));
    gauge!("cluster_shards_orphaned").set(float(gauges.orphans));
    for state in [Gating::None, Gating::Acquiring, Gating::Held] {
        let is_so = if gauges.gating == state { 1.0 } else { 0.0 };
        gauge!("cluster_coordinator_gate", "state" => state.as_str()).set(is_so);
    }
    gauge!("cluster_leader_unwritten").set(if gauges.unwritten { 1.0 } else { 0.0 });
    gauge!("cluster_leader_is_leader").set(if gauges.leads { 1.0 } else { 0.0 });
    gauge!("cluster_leader_term").set(wide(gauges.term.map_or(0, Term::get)));
    gauge!("cluster_rebalancing_active").set(if gauges.rebalancing { 1.0 } else { 0.0 });
    gauge!("cluster_nodes_unreachable").set(float(gauges.unreachable));
    for (fault, count) in HostFault::NAMES.into_iter().zip(gauges.faults) {
        gauge!("cluster_shards_faulty", "fault" => fault).set(float(count));
    }
}

/// Counts what an event tells.
pub(crate) fn event(kind: &EventKind) {
    match kind {
        EventKind::RebalancingCompleted { moved, .. } => {
            counter!("cluster_rebalancing_completed").increment(1);
            counter!("cluster_rebalancing_shards_moved").increment(u64::from(*moved));
        }
        EventKind::ShardFailed { .. } => counter!("cluster_shards_failures").increment(1),
        EventKind::NodeFailed { .. } => counter!("cluster_node_failures").increment(1),
        EventKind::NodesDowned { nodes, strategy } => {
            counter!("cluster_downing_decisions", "outcome" => "stay", "reason" => strategy.clone())
                .increment(1);
            counter!("cluster_downing_nodes_downed").increment(wide_count(nodes.len()));
        }
        EventKind::WentDown { why } => {
            counter!("cluster_downing_decisions", "outcome" => "down", "reason" => why.as_str())
                .increment(1);
        }
        _ => {}
    }
}

/// The leader placed the shards of a table anew: for its new term, for a change of the members, at the
/// periodic check, or by a command.
pub(crate) fn rebalancing_triggered(reason: &'static str) {
    counter!("cluster_rebalancing_triggered", "reason" => reason).increment(1);
}

/// A rebalance failed on the leader, at this stage.
pub(crate) fn rebalancing_failed(reason: &'static str) {
    counter!("cluster_rebalancing_failed", "reason" => reason).increment(1);
}

/// A term began although the store still holds an older one for us: somebody restored it.
pub(crate) fn term_regression(term: Term) {
    tracing::error!(
        %term,
        "a write was refused although the lease is held: the store went back; raise the era"
    );
    counter!("cluster_leader_term_regressions").increment(1);
}

/// A message that this node has taken in to send, and has not told its caller about: it waits for its
/// shard's owner, or is on its way. Counted for as long as this exists.
#[derive(Debug)]
pub(crate) struct Buffered(());

impl Buffered {
    pub(crate) fn new() -> Self {
        gauge!("cluster_mailbox_buffered").increment(1.0);
        Self(())
    }
}

impl Drop for Buffered {
    fn drop(&mut self) {
        gauge!("cluster_mailbox_buffered").decrement(1.0);
    }
}

/// A caller of this node was told so.
pub(crate) fn asked(outcome: &'static str) {
    counter!("cluster_mailbox_asked", "outcome" => outcome).increment(1);
}

/// What this node did with messages that came to it.
pub(crate) fn taken(outcome: &'static str, messages: usize) {
    if messages > 0 {
        counter!("cluster_mailbox_taken", "outcome" => outcome).increment(wide_count(messages));
    }
}

/// How long a heartbeat took.
pub(crate) fn heartbeat(took: std::time::Duration) {
    histogram!("cluster_node_heartbeat_latency_ms").record(took.as_secs_f64() * 1_000.0);
}

fn wide_count(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

/// How busy this node says that it is.
pub(crate) fn node_load(me: &NodeId, load: Load) {
    gauge!("cluster_node_load", "node" => me.to_string()).set(load.get());
}

#[expect(clippy::cast_precision_loss, reason = "a gauge is a float")]
fn float(number: usize) -> f64 {
    number as f64
}

#[expect(clippy::cast_precision_loss, reason = "a gauge is a float")]
fn wide(number: u64) -> f64 {
    number as f64
}
