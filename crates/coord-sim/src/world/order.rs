//! The healing phase: whether everything is in order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use coord_cluster::{Command, Settings, Status};
use coord_conformance::history::What;
use coord_core::{Moment, NodeStatus, Placement, TableName, Version};

use super::{CONVERGENCE, OPERATOR, QUIET, World, clear};
use crate::invariants::ProcessId;
use crate::process::{Process, node_id};
use crate::tables::Place;
use crate::time::{at, ticks};

impl World {
    /// No more faults; everything has to be in order soon, and to stay so.
    pub(super) fn heal(&mut self) -> Duration {
        self.trace(|| "no more faults".to_owned());
        let began = self.time.ticks();
        self.heals.clear();
        self.store_stalled_until = 0;
        self.end_trouble();
        for node in 0..self.nodes.len() {
            while self.nodes[node].processes.len() > 1 {
                self.crash(node, 0);
            }
            match self.nodes[node].processes.first_mut() {
                Some(process) => {
                    process.stalled_until = 0;
                    clear(process);
                }
                None => self.nodes[node].restart_at = Some(began),
            }
        }
        let mut quiet: Option<(u64, Vec<Version>)> = None;
        let mut why = String::new();
        let bound =
            CONVERGENCE + 2 * self.settings.node_ttl.saturating_sub(Settings::demo().node_ttl);
        while self.time.ticks() < began + ticks(bound) + ticks(QUIET) {
            if (self.time.ticks() - began).is_multiple_of(ticks(OPERATOR)) {
                self.operate();
            }
            self.tick();
            if self.judge.broken().is_some() {
                return Duration::ZERO;
            }
            match self.out_of_order() {
                Ok(now) => match &quiet {
                    Some((since, then)) if *then == now => {
                        let since = *since;
                        if self.time.ticks() - since >= ticks(QUIET) {
                            self.read_back();
                            return at(since - began);
                        }
                    }
                    _ => quiet = Some((self.time.ticks(), now)),
                },
                Err(now) => (quiet, why) = (None, now),
            }
        }
        self.judge.wrong("convergence", format!("after {bound:?} {why}"));
        Duration::ZERO
    }

    /// What an operator does: end drains, pauses and pins, and release what is parked: no host is to
    /// blame, so whatever the world's crashes brought under suspicion is innocent.
    fn operate(&mut self) {
        let status = self.processes().find_map(Process::cluster).map(|cluster| cluster.status());
        let Some(status) = status else { return };
        for member in status.members.iter().filter(|it| it.status == NodeStatus::Draining) {
            self.ask(0, Some(Command::Undrain { node: member.id.clone() }));
        }
        if status.paused {
            self.ask(0, Some(Command::Resume));
        }
        for (table, shards) in &status.parked {
            for shard in shards {
                self.ask(0, Some(Command::Unpark { table: table.clone(), shard: *shard }));
            }
        }
        for Place { table, shard } in self.pins.clone() {
            let table = self.tables.sheets().nth(table).map(|sheet| sheet.name.clone());
            let Some(table) = table else { continue };
            self.ask(0, Some(Command::Unpin { table, shard }));
        }
    }

    fn processes(&self) -> impl Iterator<Item = &Process> {
        self.nodes.iter().flat_map(|node| &node.processes)
    }

    /// What is not in order yet; the versions of the maps when all is.
    fn out_of_order(&self) -> Result<Vec<Version>, String> {
        let mut statuses: Vec<(ProcessId, Arc<Status>)> = Vec::new();
        for (number, node) in self.nodes.iter().enumerate() {
            let [process] = node.processes.as_slice() else {
                return Err(format!("n{number} has {} processes", node.processes.len()));
            };
            let cluster =
                process.cluster().ok_or_else(|| format!("{} has not joined", process.id))?;
            statuses.push((process.id, cluster.status()));
        }
        let Some((_, first)) = statuses.first() else { return Err("there is nobody".to_owned()) };
        let leader = first.leader.clone().ok_or("n0 knows no leader")?;
        let [leads] = self.tenures.keys().collect::<Vec<_>>()[..] else {
            return Err(format!("{} lead", self.tenures.len()));
        };
        for (id, status) in &statuses {
            if status.leader.as_ref() != Some(&leader) || leader.node != node_id(leads.node) {
                return Err(format!("{id} follows {:?}, and {leads} leads", status.leader));
            }
            if !status.is_settled() {
                return Err(format!("{id} sees {}", status.state));
            }
            if status.registered.is_none() {
                return Err(format!("{id} is not registered"));
            }
            if status.count(NodeStatus::Active) != self.nodes.len() {
                let members = status.members.iter();
                let seen: Vec<_> =
                    members.map(|member| format!("{} {}", member.id, member.status)).collect();
                return Err(format!("{id} sees {}", seen.join(", ")));
            }
        }
        (0..)
            .zip(self.tables.sheets())
            .map(|(n, it)| self.misplaced(n, &it.name, &statuses))
            .collect()
    }

    /// What of one table is not in order yet; its version when all is.
    fn misplaced(
        &self,
        table: usize,
        name: &TableName,
        statuses: &[(ProcessId, Arc<Status>)],
    ) -> Result<Version, String> {
        let map_of = |status: &Status| Some(Arc::clone(&status.table(name)?.map));
        let first = statuses.first().and_then(|(_, status)| map_of(status));
        let map = first.ok_or_else(|| format!("n0 has no map of {name}"))?;
        for (id, status) in statuses {
            let theirs = map_of(status).ok_or_else(|| format!("{id} has no map of {name}"))?;
            if (theirs.uid(), theirs.version()) != (map.uid(), map.version()) {
                return Err(format!("{id} knows version {} of {name}", theirs.version()));
            }
        }
        let mut counts = BTreeMap::new();
        for shard in map.header().shards.shards() {
            let place = Place { table, shard };
            let owner = map.owner(shard).ok_or_else(|| format!("nobody owns {place}"))?;
            let (host, _) = statuses
                .iter()
                .find(|(id, status)| {
                    node_id(id.node) == owner.id && status.registered == Some(owner.incarnation)
                })
                .ok_or_else(|| format!("{place} is on a former run of {}", owner.id))?;
            let hosts = self.ledger.hosts(place);
            if hosts != [(*host, map.uid())] {
                return Err(format!("{place} of {host} is hosted by {hosts:?}"));
            }
            *counts.entry(host).or_insert(0_usize) += 1;
        }
        let most = counts.values().copied().max().unwrap_or(0);
        let least = if counts.len() < self.nodes.len() {
            0
        } else {
            counts.values().copied().min().unwrap_or(0)
        };
        // A pin may outlive the last word of its operator, and pull as many shards to one node.
        if most - least > self.pins.len().max(1) {
            return Err(format!("the shards of {name} lie {least} to {most} a node"));
        }
        Ok(map.version())
    }

    /// The versions of all maps, together.
    pub(super) fn versions(&self) -> u64 {
        let cluster = self.processes().find_map(Process::cluster);
        let version = |cluster: &coord_cluster::Cluster, name: &TableName| {
            cluster.map(name).map_or(0, |map| map.version().get())
        };
        cluster.map_or(0, |it| self.tables.sheets().map(|sheet| version(&it, &sheet.name)).sum())
    }

    /// What is stored is read once more, for the history.
    fn read_back(&mut self) {
        let placement: Arc<dyn Placement> = self.backends[1].placement();
        let mut tables: Vec<_> = self.tables.sheets().map(|sheet| sheet.name.clone()).collect();
        tables.push(TableName::cluster());
        let until = Moment::from_origin(self.time.elapsed() + self.settings.leader_ttl);
        for (process, fence) in &self.tenures {
            let holds = What::Holds { fence: fence.clone(), until };
            self.recorder.record(process.to_string(), holds);
        }
        self.store.within(|runtime| {
            runtime.spawn(async move {
                for table in tables {
                    drop(placement.load(&table).await);
                }
            });
        });
        self.store.run();
    }
}
