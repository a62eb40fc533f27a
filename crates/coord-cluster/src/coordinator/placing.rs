//! From a table's map, the roster and the pins to its next map. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use coord_core::{Fence, MapEdit, NodeId, Result, ShardId, ShardMap, Slot};
use coord_placement::{Assignment, PlacementStrategy, PlanError, PlanSettings};

use super::roster::Roster;
use crate::invariants::{Hosting, Hosts, Violation, check};
use crate::record::TableNote;

/// Why there is no next map.
#[derive(Debug)]
pub(crate) enum Failed {
    /// The strategy found none.
    Plan(PlanError),
    /// The one it found breaks an invariant.
    Violation(Violation),
    /// It could not be built.
    Build(coord_core::Error),
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Plan(error) => error.fmt(f),
            Self::Violation(violation) => violation.fmt(f),
            Self::Build(error) => error.fmt(f),
        }
    }
}

impl From<coord_core::Error> for Failed {
    fn from(error: coord_core::Error) -> Self {
        Self::Build(error)
    }
}

/// What the next map is made from.
pub(crate) struct Placing<'a> {
    pub(crate) map: &'a ShardMap,
    pub(crate) roster: &'a Roster,
    pub(crate) fence: &'a Fence,
}

/// What a rebalance has to respect besides balance.
pub(crate) struct Wishes<'a> {
    pub(crate) strategy: &'a dyn PlacementStrategy,
    pub(crate) pins: Option<&'a BTreeMap<ShardId, NodeId>>,
    pub(crate) paused: bool,
    pub(crate) reason: &'a str,
}

impl Placing<'_> {
    /// Places all shards anew; none if they are where they should be.
    pub(crate) fn rebalance(&self, wishes: &Wishes<'_>) -> Result<Option<Arc<ShardMap>>, Failed> {
        let hosts = self.roster.hosts();
        let mut edit = self.map.edit();
        self.list_hosts(&mut edit, &hosts)?;
        if self.roster.active() == 0 {
            orphan_homeless(&mut edit, &hosts)?;
        } else {
            let current = Assignment::from_map(self.map).map_err(Failed::Plan)?;
            let settings = self.plan_settings(wishes, &hosts);
            let plan = wishes
                .strategy
                .plan(&current, &self.roster.candidates(), &settings)
                .map_err(Failed::Plan)?;
            if !plan.unsatisfied().is_empty() {
                tracing::debug!(unsatisfied = ?plan.unsatisfied(), "the plan leaves wishes open");
            }
            plan.next().write_to(&mut edit)?;
            self.leave_where_they_run(&mut edit, &hosts)?;
        }
        unlist(&mut edit, &hosts);
        self.finish(edit, &hosts, Some(wishes.reason))
    }

    /// Gives the named shards these owners; none if they have them already.
    pub(crate) fn assign(
        &self,
        owners: &BTreeMap<ShardId, Vec<NodeId>>,
    ) -> Result<Option<Arc<ShardMap>>, Failed> {
        let hosts = self.roster.hosts();
        let mut edit = self.map.edit();
        self.list_hosts(&mut edit, &hosts)?;
        for (&shard, nodes) in owners {
            for replica in 0..self.map.header().replicas.get() {
                let node = nodes.get(usize::from(replica));
                let slot = node.and_then(|node| edit.map().slot_of(node)).unwrap_or(Slot::NOBODY);
                edit.set_owner(shard, replica, slot)?;
            }
        }
        self.finish(edit, &hosts, None)
    }

    /// Lists every host with its present run and status.
    fn list_hosts(&self, edit: &mut MapEdit, hosts: &Hosts) -> Result<(), Failed> {
        for seat in self.roster.0.values().filter(|seat| hosts.contains_key(&seat.entry.id)) {
            edit.put_node(seat.entry.clone())?;
        }
        Ok(())
    }

    /// A node that was declared failed may still run: its shards stay with it until its time is up,
    /// whatever the plan made of them. Owners beside it that are gone are replaced as planned.
    fn leave_where_they_run(&self, edit: &mut MapEdit, hosts: &Hosts) -> Result<(), Failed> {
        let runs_on = |slot: Slot| {
            let seat = self.map.node(slot).and_then(|node| self.roster.seat(&node.id));
            seat.is_some_and(|seat| seat.runs_on)
        };
        if !self.roster.0.values().any(|seat| seat.runs_on) {
            return Ok(());
        }
        for shard in self.map.header().shards.shards() {
            let mut row: Vec<Slot> = self.map.owner_slots(shard).collect();
            if !row.iter().any(|slot| runs_on(*slot)) {
                continue;
            }
            let planned: Vec<Slot> = edit.map().owner_slots(shard).collect();
            for place in 0..row.len() {
                let node = self.map.node(row[place]);
                if node.is_some_and(|node| hosts.contains_key(&node.id)) {
                    continue;
                }
                let heir = planned.iter().find(|slot| !row.contains(slot));
                row[place] = heir.copied().unwrap_or(Slot::NOBODY);
            }
            for (replica, slot) in (0..).zip(row) {
                edit.set_owner(shard, replica, slot)?;
            }
        }
        Ok(())
    }

    fn plan_settings(&self, wishes: &Wishes<'_>, hosts: &Hosts) -> PlanSettings {
        let mut settings = PlanSettings::default()
            .with_version(self.map.version())
            .with_max_moves(wishes.paused.then_some(0));
        for (shard, node) in wishes.pins.into_iter().flatten() {
            if matches!(hosts.get(node), Some((_, Hosting::Takes))) {
                settings = settings.with_pin(*shard, vec![node.clone()]);
            }
        }
        settings
    }

    /// The next version, checked; none if owners and nodes are as they were.
    fn finish(
        &self,
        mut edit: MapEdit,
        hosts: &Hosts,
        reason: Option<&str>,
    ) -> Result<Option<Arc<ShardMap>>, Failed> {
        let same_owners = edit.map().raw_owners() == self.map.raw_owners();
        if same_owners && edit.map().nodes() == self.map.nodes() {
            return Ok(None);
        }
        let reason = reason.filter(|_| !same_owners).map(str::to_owned);
        edit.set_annex(TableNote::new(reason).write()?)?;
        let Some(next) = edit.finish(self.fence.clone()) else { return Ok(None) };
        check(self.map, &next, hosts, self.fence).map_err(Failed::Violation)?;
        Ok(Some(Arc::new(next)))
    }
}

/// With nobody to take them, shards of those who host nothing are nobody's.
fn orphan_homeless(edit: &mut MapEdit, hosts: &Hosts) -> Result<(), Failed> {
    let owners: Vec<u16> = edit
        .map()
        .raw_owners()
        .iter()
        .map(|&slot| match edit.map().node(Slot::new(slot)) {
            Some(node) if hosts.contains_key(&node.id) => slot,
            _ => Slot::NOBODY.get(),
        })
        .collect();
    Ok(edit.set_raw_owners(owners)?)
}

/// Drops nodes that host nothing and own nothing.
fn unlist(edit: &mut MapEdit, hosts: &Hosts) {
    let listed = edit.map().nodes().iter().flatten();
    let gone: Vec<NodeId> =
        listed.filter(|node| !hosts.contains_key(&node.id)).map(|node| node.id.clone()).collect();
    for node in gone {
        // Refused while a shard names it, which the invariant check then reports.
        let _ = edit.remove_node(&node);
    }
}
