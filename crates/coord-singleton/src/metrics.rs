//! The names of all metrics, in one place.

use coord_core::LeaseName;
use metrics::{counter, gauge};

use crate::State;

/// A singleton's job was started on this node.
pub(crate) fn started(lease: &LeaseName) {
    tracing::info!(%lease, "the singleton's job starts here");
    counter!("cluster_singleton_starts", "lease" => lease.to_string()).increment(1);
}

/// The state of a singleton on this node has changed.
pub(crate) fn state(lease: &LeaseName, state: &State) {
    let runs = matches!(state, State::Running(_) | State::Stopping(_));
    let lease = lease.to_string();
    gauge!("cluster_singleton_running", "lease" => lease.clone()).set(if runs { 1.0 } else { 0.0 });
    if let State::Resting(pause, Some(failure)) = state {
        tracing::error!(lease, %failure, ?pause, "a singleton's lease is given up: nothing runs");
        let reason = failure.as_str();
        counter!("cluster_singleton_failures", "lease" => lease, "reason" => reason).increment(1);
    }
}
