//! The settings that the leader decides by.

use std::time::Duration;

use crate::member_view::Judging;
use crate::poison::PoisonSettings;
use crate::settings::Settings;

/// Below this many members all watchers are notified of each change of them at once.
const GATHER_MEMBERS_MIN: usize = 256;
/// How many watchers are notified per second in larger clusters.
const TOLD_PER_SECOND: u32 = 10_000;
/// The first pause after a failure; it doubles.
pub(super) const PAUSE_MIN: Duration = Duration::from_secs(1);

/// The settings that the leader decides by.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) delay: Duration,
    pub(crate) check: Duration,
    pub(crate) remove_after: Duration,
    pub(crate) restart_grace: Duration,
    pub(crate) node_ttl: Duration,
    pub(crate) heartbeat: Duration,
    pub(crate) poison: Option<PoisonSettings>,
    pub(crate) min_members: usize,
    pub(crate) brake: f64,
    pub(crate) handoff_timeout: Duration,
    pub(crate) motions_max: Option<u32>,
    pub(crate) newer_leads_after: Option<Duration>,
    /// How many candidate slots there are; 0 if every node may be a candidate.
    pub(crate) places: usize,
    pub(crate) judging: Judging,
    /// From this many members on, changes of them are batched, because every watcher is notified of each
    /// version.
    pub(crate) gather_from: usize,
    /// How many watchers are notified per second then.
    pub(crate) told_per_second: u32,
}

impl Rules {
    pub(crate) fn new(settings: &Settings, judging: Judging) -> Self {
        Self {
            delay: settings.rebalance_delay,
            check: settings.rebalance_check,
            remove_after: settings.remove_after,
            restart_grace: settings.restart_grace,
            node_ttl: settings.node_ttl,
            heartbeat: settings.heartbeat,
            poison: settings.poison(),
            min_members: usize::try_from(settings.min_members).unwrap_or(usize::MAX),
            brake: settings.mass_failure_brake,
            handoff_timeout: settings.handoff_timeout,
            motions_max: settings.motions_max,
            newer_leads_after: settings.newer_leads_after,
            places: usize::try_from(settings.candidates).unwrap_or(usize::MAX),
            judging,
            gather_from: GATHER_MEMBERS_MIN,
            told_per_second: TOLD_PER_SECOND,
        }
    }

    /// How long after a version with other members the next one may be put off: a second with 10,000 watchers.
    pub(super) fn gathers_for(&self, members: usize) -> Option<Duration> {
        let many = u32::try_from(members).ok().filter(|_| members >= self.gather_from)?;
        Some(Duration::from_secs(1) * many / self.told_per_second.max(1))
    }
}
