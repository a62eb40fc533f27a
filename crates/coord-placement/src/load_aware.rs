//! Even loads instead of even counts.

mod board;

use crate::assignment::Assignment;
use crate::candidate::Candidate;
use crate::error::PlanError;
use crate::input::Input;
use crate::plan::Plan;
use crate::settings::PlanSettings;
use crate::strategy::PlacementStrategy;

/// How far a node may be from its share of the load before shards move, in thousandths of it.
pub const LOAD_BAND_DEFAULT: u16 = 200;
/// How many thousandths of all places may move for balance in one plan.
pub const CHURN_DEFAULT: u16 = 100;

/// Nodes get shares of the load by weight, where each shard counts as much as was reported of it
/// ([`PlanSettings::with_loads`]).
///
/// Exact shares of unequal loads are bin packing, and would move shards for every change of a load. So
/// this strategy is content with *near*: nothing moves for balance while every node is within a band
/// around its share (20 %). Once one is outside, shards move one by one from the fullest to the emptiest,
/// each move making the fuller of the two less full and the other not fuller than that, until all are
/// within half the band or no such move is left. That the band is left only to be entered deeply is the
/// hysteresis: loads that waver around an edge don't move shards to and fro. A plan on the result of a
/// plan moves nothing, unless the first one was cut short.
///
/// At most 10 % of all places move for balance in one plan (the churn limit; at least one); the rest is
/// told as [`MovesLeft`](crate::Unsatisfied::MovesLeft) and follows in later plans.
///
/// A load that is not a number, infinite or negative counts as absent, and is told as
/// [`LoadUnusable`](crate::Unsatisfied::LoadUnusable). A shard without a load counts as the mean of the
/// others. One that does next to nothing counts as a sixteenth of the mean, lest all idle shards gather on
/// one node. Reports that are too old are the caller's to leave out.
///
/// Order of work: pins and exclusions, orphans and missing replicas (the heaviest first, each to the
/// emptiest node), drain, zone repair, balance. Only single moves are tried, no exchanges. The tolerance
/// of the settings widens the band.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadAware {
    band: u16,
    churn: u16,
}

impl Default for LoadAware {
    fn default() -> Self {
        Self::new()
    }
}

impl LoadAware {
    /// With a band of 200 thousandths and a churn limit of 100 thousandths.
    #[must_use]
    pub const fn new() -> Self {
        Self { band: LOAD_BAND_DEFAULT, churn: CHURN_DEFAULT }
    }

    /// With this band around a node's share, in thousandths of it; above 1000 counts as 1000.
    #[must_use]
    pub fn with_band(mut self, thousandths: u16) -> Self {
        self.band = thousandths.min(1000);
        self
    }

    /// With at most so many thousandths of all places moving for balance in one plan, at least one
    /// place; 0 for none, and above 1000 counts as 1000.
    #[must_use]
    pub fn with_churn(mut self, thousandths: u16) -> Self {
        self.churn = thousandths.min(1000);
        self
    }
}

impl PlacementStrategy for LoadAware {
    fn name(&self) -> &'static str {
        "load-aware"
    }

    fn wants_loads(&self) -> bool {
        true
    }

    fn plan(
        &self,
        current: &Assignment,
        candidates: &[Candidate],
        settings: &PlanSettings,
    ) -> Result<Plan, PlanError> {
        let input = Input::new(current, candidates, settings)?;
        let churn = if settings.holds_loads { 0 } else { self.churn };
        Ok(board::plan(input, self.band.max(settings.tolerance), churn))
    }
}
