//! Whether a command is accepted, and which writes carry it out. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use coord_core::{Incarnation, NodeEntry, NodeId, NodeStatus, ShardId, ShardMap, TableName};

use super::roster::{Roster, Seat};
use crate::commands::{Command, CommandError};
use crate::member_view::{Presence, View};
use crate::poison::TableShard;
use crate::record::{ClusterRecord, Failure};

/// One write of a command.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Write {
    /// Remember this in `_cluster`.
    Note(Note),
    /// Give shards these owners.
    Owners(TableName, BTreeMap<ShardId, Vec<NodeId>>),
    /// Place all shards of a table anew.
    Rebalance(TableName, String),
    /// End the term.
    StepDown,
}

/// A change of what is to be remembered. It says nothing of the rest, which may change before it is
/// written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Note {
    Failed(NodeId, Failure),
    Drain(NodeId, bool),
    Leaving(NodeId, Incarnation, bool),
    Paused(bool),
    Pin(TableName, ShardId, NodeId),
    Unpin(TableName, ShardId),
    Unpark(TableShard),
    TransferTarget(NodeId),
}

impl Note {
    pub(crate) fn apply(self, record: &mut ClusterRecord) {
        match self {
            Self::Failed(node, failure) => record.note(&node, |note| {
                note.failed = Some(failure);
                note.suspended = None;
            }),
            Self::Drain(node, drain) => record.note(&node, |note| note.drain = drain),
            Self::Leaving(node, run, force) => record.note(&node, |note| {
                // Once by force, it stays so.
                note.forced |= force;
                note.leaving = Some(run);
            }),
            Self::Paused(paused) => record.paused = paused,
            Self::Pin(table, shard, node) => {
                record.pins.entry(table).or_default().insert(shard, node);
            }
            Self::Unpin(table, shard) => {
                if let Some(pins) = record.pins.get_mut(&table) {
                    pins.remove(&shard);
                }
                record.pins.retain(|_, pins| !pins.is_empty());
            }
            Self::Unpark(TableShard { table, shard }) => {
                if let Some(parked) = record.parked.get_mut(&table) {
                    parked.remove(&shard);
                }
                record.parked.retain(|_, parked| !parked.is_empty());
            }
            Self::TransferTarget(node) => record.transfer_target = Some(node),
        }
    }
}

/// What commands are judged by.
pub(crate) struct Bench<'a> {
    pub(crate) me: &'a NodeId,
    pub(crate) roster: &'a Roster,
    pub(crate) record: &'a ClusterRecord,
    pub(crate) view: &'a View,
    pub(crate) tables: Vec<TableName>,
    pub(crate) map: &'a dyn Fn(&TableName) -> Option<Arc<ShardMap>>,
    /// Whether an incarnation may still host and reports nothing.
    pub(crate) lingers: &'a dyn Fn(&NodeEntry) -> bool,
}

impl Bench<'_> {
    /// The writes that carry a command out, or why it is refused.
    pub(crate) fn judge(&self, command: &Command) -> Result<Vec<Write>, CommandError> {
        match command {
            Command::MarkNodeFailed { node, why } => self.mark_failed(node, why),
            Command::Drain { node } => self.drain(node),
            Command::Undrain { node } => self.undrain(node),
            Command::Leave { node, force } => self.leave(node, *force),
            Command::AssignShard { table, shard, node } => self.assign(table, *shard, node),
            Command::AssignShards { table, owners } => self.assign_all(table, owners),
            Command::RebalanceShards { table, reason } => self.rebalance(table.as_ref(), reason),
            Command::Pin { table, shard, node } => self.pin(table, *shard, node),
            Command::Unpin { table, shard } => self.unpin(table, *shard),
            Command::Unpark { table, shard } => self.unpark(table, *shard),
            Command::Pause => Ok(vec![Write::Note(Note::Paused(true))]),
            Command::Resume => {
                let mut writes = vec![Write::Note(Note::Paused(false))];
                writes.extend(self.rebalance_all("balancing was resumed"));
                Ok(writes)
            }
            Command::StepDown => Ok(vec![Write::StepDown]),
            Command::TransferLeadership { to } => self.transfer(to),
        }
    }

    fn rebalance_all(&self, reason: &str) -> Vec<Write> {
        if self.roster.active() == 0 {
            return Vec::new();
        }
        let write = |table: &TableName| Write::Rebalance(table.clone(), reason.to_owned());
        self.tables.iter().map(write).collect()
    }

    fn is_parked(&self, table: &TableName, shard: ShardId) -> bool {
        self.record.parked.get(table).is_some_and(|parked| parked.contains_key(&shard))
    }

    fn free(&self, table: &TableName, shard: ShardId) -> Result<(), CommandError> {
        match self.is_parked(table, shard) {
            true => Err(CommandError::ShardParked { shard }),
            false => Ok(()),
        }
    }

    fn unpark(&self, table: &TableName, shard: ShardId) -> Result<Vec<Write>, CommandError> {
        self.table_with(table, shard)?;
        if !self.is_parked(table, shard) {
            return Err(CommandError::ShardNotParked { shard });
        }
        let mut writes = vec![Write::Note(Note::Unpark(TableShard::new(table.clone(), shard)))];
        if self.roster.active() > 0 {
            writes.push(Write::Rebalance(table.clone(), format!("shard {shard} is unparked")));
        }
        Ok(writes)
    }

    fn seat(&self, node: &NodeId) -> Result<&Seat, CommandError> {
        self.roster.seat(node).ok_or_else(|| CommandError::NodeNotFound { node: node.clone() })
    }

    fn table(&self, table: &TableName) -> Result<Arc<ShardMap>, CommandError> {
        (self.map)(table).ok_or_else(|| CommandError::TableNotFound { table: table.clone() })
    }

    fn table_with(&self, table: &TableName, shard: ShardId) -> Result<Arc<ShardMap>, CommandError> {
        let map = self.table(table)?;
        let shards = map.header().shards;
        if shards.contains(shard) {
            Ok(map)
        } else {
            Err(CommandError::ShardNotFound { shard, shards: shards.get() })
        }
    }

    fn mark_failed(&self, node: &NodeId, why: &str) -> Result<Vec<Write>, CommandError> {
        let seat = self.seat(node)?;
        if seat.entry.status == NodeStatus::Failed {
            return Ok(Vec::new());
        }
        // Once the failure can't be forgotten, the registration is evicted, and only the TTL after that frees
        // the node's shards.
        let (incarnation, runs_on) = match self.view.presence(node) {
            Some(Presence::Present(seen)) => (seen.info.incarnation, Some(seen.ttl)),
            _ => (seat.entry.incarnation, None),
        };
        let failure = Failure { runs_on, ..Failure::over(incarnation, why) };
        Ok(vec![Write::Note(Note::Failed(node.clone(), failure))])
    }

    fn drain(&self, node: &NodeId) -> Result<Vec<Write>, CommandError> {
        let status = self.seat(node)?.entry.status;
        if status != NodeStatus::Active {
            return Err(CommandError::InvalidTransition { node: node.clone(), status });
        }
        Ok(vec![Write::Note(Note::Drain(node.clone(), true))])
    }

    fn undrain(&self, node: &NodeId) -> Result<Vec<Write>, CommandError> {
        let seat = self.seat(node)?;
        let by_operator = self.record.nodes.get(node).is_some_and(|note| note.drain);
        if seat.entry.status != NodeStatus::Draining || seat.leaving || !by_operator {
            let status = seat.entry.status;
            return Err(CommandError::InvalidTransition { node: node.clone(), status });
        }
        Ok(vec![Write::Note(Note::Drain(node.clone(), false))])
    }

    fn leave(&self, node: &NodeId, force: bool) -> Result<Vec<Write>, CommandError> {
        let seat = self.seat(node)?;
        let (status, incarnation) = (seat.entry.status, seat.entry.incarnation);
        if !status.may_host() {
            return Err(CommandError::InvalidTransition { node: node.clone(), status });
        }
        let shards = self.stuck(node);
        if seat.leaving && !force && shards > 0 {
            return Err(CommandError::StuckLeaving { node: node.clone(), shards });
        }
        Ok(vec![Write::Note(Note::Leaving(node.clone(), incarnation, force))])
    }

    /// How many shards of a node have been in motion for longer than the handoff timeout.
    fn stuck(&self, node: &NodeId) -> u32 {
        let of_table = |(table, shards): (&TableName, &BTreeSet<ShardId>)| {
            let Some(map) = (self.map)(table) else { return 0 };
            let owns = |shard: &&ShardId| map.owners(**shard).any(|owner| owner.id == *node);
            shards.iter().filter(owns).count()
        };
        let shards: usize = self.record.stuck.iter().map(of_table).sum();
        u32::try_from(shards).unwrap_or(u32::MAX)
    }

    /// Whether a node may be given a shard that it may have already.
    fn may_take(&self, map: &ShardMap, shard: ShardId, node: &NodeId) -> Result<(), CommandError> {
        let status = self.seat(node)?.entry.status;
        let has = map.owners(shard).any(|owner| owner.id == *node);
        match status {
            NodeStatus::Active => Ok(()),
            NodeStatus::Draining if has => Ok(()),
            NodeStatus::Draining => Err(CommandError::NodeDraining { node: node.clone() }),
            status => Err(CommandError::UnhealthyNode { node: node.clone(), status }),
        }
    }

    fn assign(
        &self,
        table: &TableName,
        shard: ShardId,
        node: &NodeId,
    ) -> Result<Vec<Write>, CommandError> {
        let map = self.table_with(table, shard)?;
        self.may_take(&map, shard, node)?;
        self.free(table, shard)?;
        let mut owners: Vec<_> = map.owners(shard).map(|owner| owner.id.clone()).collect();
        if owners.contains(node) {
            return Ok(Vec::new());
        }
        let replicas = map.header().replicas.get();
        if owners.len() >= usize::from(replicas) {
            return Err(CommandError::TooManyReplicas { shard, replicas });
        }
        owners.push(node.clone());
        Ok(vec![Write::Owners(table.clone(), BTreeMap::from([(shard, owners)]))])
    }

    fn assign_all(
        &self,
        table: &TableName,
        owners: &BTreeMap<ShardId, Vec<NodeId>>,
    ) -> Result<Vec<Write>, CommandError> {
        let map = self.table(table)?;
        let replicas = map.header().replicas.get();
        for (&shard, nodes) in owners {
            self.table_with(table, shard)?;
            self.free(table, shard)?;
            if nodes.len() > usize::from(replicas) {
                return Err(CommandError::TooManyReplicas { shard, replicas });
            }
            for node in nodes {
                self.seat(node)?;
            }
            self.leaves_where_it_runs(&map, shard, nodes)?;
        }
        Ok(vec![Write::Owners(table.clone(), owners.clone())])
    }

    /// An incarnation that was declared failed or replaced may still run, so no node may take its place yet.
    fn leaves_where_it_runs(
        &self,
        map: &ShardMap,
        shard: ShardId,
        nodes: &[NodeId],
    ) -> Result<(), CommandError> {
        for (place, slot) in map.owner_slots(shard).enumerate() {
            let Some(owner) = map.node(slot) else { continue };
            if (self.lingers)(owner) && nodes.get(place) != Some(&owner.id) {
                return Err(CommandError::MayStillRun { node: owner.id.clone(), shard });
            }
        }
        Ok(())
    }

    fn rebalance(
        &self,
        table: Option<&TableName>,
        reason: &str,
    ) -> Result<Vec<Write>, CommandError> {
        if let Some(table) = table {
            self.table(table)?;
        }
        if self.roster.active() == 0 {
            return Err(CommandError::NoActiveNodes);
        }
        Ok(match table {
            Some(table) => vec![Write::Rebalance(table.clone(), reason.to_owned())],
            None => self.rebalance_all(reason),
        })
    }

    fn pin(
        &self,
        table: &TableName,
        shard: ShardId,
        node: &NodeId,
    ) -> Result<Vec<Write>, CommandError> {
        let map = self.table_with(table, shard)?;
        self.may_take(&map, shard, node)?;
        let mut writes = vec![Write::Note(Note::Pin(table.clone(), shard, node.clone()))];
        writes.extend(self.rebalance(Some(table), &format!("shard {shard} is pinned"))?);
        Ok(writes)
    }

    fn unpin(&self, table: &TableName, shard: ShardId) -> Result<Vec<Write>, CommandError> {
        self.table_with(table, shard)?;
        Ok(vec![Write::Note(Note::Unpin(table.clone(), shard))])
    }

    fn transfer(&self, to: &NodeId) -> Result<Vec<Write>, CommandError> {
        let seat = self.seat(to)?;
        match seat.entry.status {
            NodeStatus::Active => {}
            NodeStatus::Draining => return Err(CommandError::NodeDraining { node: to.clone() }),
            status => return Err(CommandError::UnhealthyNode { node: to.clone(), status }),
        }
        if to == self.me {
            return Ok(Vec::new());
        }
        match self.view.presence(to) {
            Some(Presence::Present(seen)) if seen.info.candidate && seat.may_lead() => {}
            _ => return Err(CommandError::NotCandidate { node: to.clone() }),
        }
        Ok(vec![Write::Note(Note::TransferTarget(to.clone())), Write::StepDown])
    }
}
