//! Plain data that several parts of a node exchange. It imports no part of the runtime.

use std::collections::VecDeque;
use std::sync::Arc;

use coord_core::{
    Incarnation, Lease, LeaseName, Load, LoadReport, Moment, ShardMap, TableHeader, TableUid,
    Version,
};
use coord_placement::PlacementStrategy;

use crate::handoff::Handoff;

/// The most versions of a table whose time is remembered.
const VERSIONS_MAX: usize = 4_096;

/// A table as this node was started with it.
#[derive(Clone, Debug)]
pub(crate) struct TableSpec {
    pub(crate) header: TableHeader,
    pub(crate) strategy: Arc<dyn PlacementStrategy>,
    pub(crate) handoff: Handoff,
}

/// Downing's decision that an incarnation of a node goes down, since the other side of a partition goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DownDecision {
    pub(crate) incarnation: Incarnation,
    pub(crate) why: String,
}

/// How busy an incarnation's shards of a table are.
#[derive(Clone, Debug)]
pub(crate) struct TableLoad {
    pub(crate) run: Incarnation,
    pub(crate) report: LoadReport,
    /// All of them together.
    pub(crate) sum: Load,
}

/// A lease that gates the coordinator, on a store of its own choice.
#[derive(Clone, Debug)]
pub(crate) struct GatingLease {
    pub(crate) lease: Arc<dyn Lease>,
    pub(crate) name: LeaseName,
}

/// When each version of a table was seen first.
#[derive(Clone, Debug, Default)]
pub(crate) struct VersionTimes {
    uid: Option<TableUid>,
    versions: VecDeque<(Version, Moment)>,
}

impl VersionTimes {
    /// A version was seen.
    pub(crate) fn note(&mut self, map: &ShardMap, now: Moment) {
        if self.uid.replace(map.uid()) != Some(map.uid()) {
            self.versions.clear();
        }
        if self.versions.back().is_some_and(|(last, _)| *last >= map.version()) {
            return;
        }
        if self.versions.len() >= VERSIONS_MAX {
            self.versions.pop_front();
        }
        self.versions.push_back((map.version(), now));
    }

    /// When this version, or the first one after it, was seen; none if it was there before anything was.
    pub(crate) fn at(&self, version: Version) -> Option<Moment> {
        let after = self.versions.partition_point(|(seen, _)| *seen < version);
        let (_, at) = self.versions.get(after).filter(|_| after > 0)?;
        Some(*at)
    }
}
