//! Exact shares with the fewest possible moves.

mod board;
mod exact;
mod greedy;
mod quota;
mod replicated;
mod single;

use crate::assignment::Assignment;
use crate::candidate::Candidate;
use crate::error::PlanError;
use crate::input::Input;
use crate::plan::Plan;
use crate::settings::PlanSettings;
use crate::strategy::PlacementStrategy;

/// Every node gets its exact share by weight (equal weights differ by at most one), with the fewest
/// moves that those shares allow.
///
/// Order of work: orphans, then missing replicas, pins and exclusions, drain, zone repair, balance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Balanced {}

impl Balanced {
    /// The strategy; all that could be set is in the [`PlanSettings`].
    #[must_use]
    pub const fn new() -> Self {
        Self {}
    }
}

impl PlacementStrategy for Balanced {
    fn name(&self) -> &'static str {
        "balanced"
    }

    fn plan(
        &self,
        current: &Assignment,
        candidates: &[Candidate],
        settings: &PlanSettings,
    ) -> Result<Plan, PlanError> {
        let input = Input::new(current, candidates, settings)?;
        if current.replicas().get() == 1
            && settings.pins.is_empty()
            && settings.exclusions.is_empty()
        {
            return Ok(single::plan(input));
        }
        Ok(replicated::plan(input))
    }
}
