//! The trait that every strategy implements.

use std::fmt::Debug;

use crate::assignment::Assignment;
use crate::candidate::Candidate;
use crate::error::PlanError;
use crate::plan::Plan;
use crate::settings::PlanSettings;

/// A pure function from (current map, nodes, settings) to the next map.
///
/// An implementation keeps these rules: the same input gives the same plan on every platform, per node
/// id, whatever the order of the candidates and of the slots; no input makes it panic; each place of the
/// next map is empty or names a candidate, and no shard names one twice.
pub trait PlacementStrategy: Debug + Send + Sync + 'static {
    /// The strategy's name, as settings and logs write it.
    fn name(&self) -> &'static str;

    /// Whether [loads](PlanSettings::with_loads) change its plans. The loads of a table are measured, stored
    /// and read only if its strategy asks for them.
    fn wants_loads(&self) -> bool {
        false
    }

    /// Plans the next map. `candidates` are the live nodes; any other owner of a shard of `current` has lost
    /// it.
    ///
    /// # Errors
    /// When no map can be made at all; see [`PlanError`]. What can be made only in part is a plan, which
    /// tells what is [unsatisfied](Plan::unsatisfied).
    fn plan(
        &self,
        current: &Assignment,
        candidates: &[Candidate],
        settings: &PlanSettings,
    ) -> Result<Plan, PlanError>;
}
