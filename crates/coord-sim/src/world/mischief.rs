//! What goes wrong, and what operators ask for.

use std::time::Duration;

use coord_cluster::Command;
use coord_core::{Effect, Replace, TableName};
use rand::RngExt;

use super::World;
use crate::process::{Process, node_id};
use crate::tables::Place;
use crate::time::at;
use crate::wire::Weather;

impl World {
    /// Perhaps something goes wrong.
    pub(super) fn mischief(&mut self) {
        if self.time.ticks() < 100 || self.random.random_range(0..50) > 0 {
            return;
        }
        self.faults += 1;
        let lasts = self.random.random_range(4..200);
        let until = self.time.ticks() + lasts;
        let node = self.target();
        match self.random.random_range(0..28) {
            kind @ 0..=8 => self.cut_off(node, kind, until),
            9..=11 => self.with(node, |process| process.stalled_until = until, "stands still"),
            12..=13 => self.crash(node, lasts),
            14 => {
                self.trace(|| format!("n{node} gets a second process"));
                let former = self.random.random_range(0..3);
                match former {
                    0 => self.with(node, |process| process.stalled_until = until, "stands still"),
                    1 => self.cut_off(node, 0, until),
                    _ => {}
                }
                if self.nodes[node].processes.len() == 1 {
                    self.start(node, Replace::Yes);
                }
            }
            15 => self.ask(node, None),
            16 => {
                self.trace(|| "the store is cut off".to_owned());
                for node in 0..self.nodes.len() {
                    self.cut_off(node, 0, until);
                }
            }
            17 => {
                self.trace(|| format!("the store stands still for {:?}", at(lasts)));
                self.store_stalled_until = until;
            }
            18 => {
                for node in 0..self.nodes.len() {
                    if self.random.random_bool(0.5) {
                        self.cut_off(node, 0, until);
                    }
                }
            }
            19..=20 => self.condemn(node, until),
            21 => self.delete(),
            _ => self.command(node),
        }
    }

    /// A node, and often the one that leads.
    fn target(&mut self) -> usize {
        let leader = self.tenures.keys().next().map(|process| process.node);
        match leader {
            Some(leader) if self.random.random_bool(0.3) => leader,
            _ => self.random.random_range(0..self.nodes.len()),
        }
    }

    fn with(&mut self, node: usize, step: impl FnOnce(&mut Process), what: &str) {
        if let Some(process) = self.nodes[node].processes.first_mut() {
            step(process);
            let id = process.id;
            self.trace(|| format!("{id} {what}"));
        }
    }

    /// Something happens to the way between a process and its stores.
    fn cut_off(&mut self, node: usize, kind: u32, until: u64) {
        const OPERATIONS: [&str; 9] = [
            "try_acquire",
            "renew",
            "release",
            "register",
            "heartbeat",
            "deregister",
            "claim",
            "publish",
            "evict",
        ];
        let both = self.random.random_bool(0.6);
        let which = self.random.random_range(0..2);
        let operation = OPERATIONS[self.random.random_range(0..OPERATIONS.len())];
        let delay = Duration::from_millis(self.random.random_range(50..900));
        let latency = self.random.random_range(1..16);
        let lost = self.random.random_range(0..200);
        let unknown = self.random.random_bool(0.5);
        let Some(process) = self.nodes[node].processes.first() else { return };
        let id = process.id;
        for (index, remote) in process.remotes.iter().enumerate() {
            if !both && index != which {
                continue;
            }
            let faults = remote.faults();
            match kind {
                0 => faults.cut(if unknown { Effect::Unknown } else { Effect::None }),
                1 => faults.mute(),
                2 => faults.deafen(),
                3 => faults.pause(),
                4 => faults.delay(delay),
                5 => remote.set_weather(Weather { latency, twice: 200, lost }),
                6 => faults.drop_reply_to(operation),
                7 => faults.drop_request_to(operation),
                _ => faults.cut_watches(),
            }
        }
        let what = [
            "is cut off",
            "is mute",
            "is deaf",
            "is held up",
            "gets late replies",
            "has bad weather",
            "loses a reply",
            "loses a request",
            "has its watches cut",
        ];
        let what = what.get(kind as usize).copied().unwrap_or_default();
        self.trace(|| format!("{id} {what} until {:?}", at(until)));
        let heals = self.heals.entry(id).or_insert(until);
        *heals = until.max(*heals);
    }

    pub(super) fn crash(&mut self, node: usize, pause: u64) {
        if self.nodes[node].processes.is_empty() {
            return;
        }
        let process = self.nodes[node].processes.remove(0);
        self.trace(|| format!("{} crashes", process.id));
        self.bury(process);
        if self.nodes[node].processes.is_empty() {
            self.nodes[node].restart_at = Some(self.time.ticks() + pause);
        }
    }

    /// A process of this node is asked to go, or to tell the leader something.
    pub(super) fn ask(&mut self, node: usize, command: Option<Command>) {
        let leaves = command.is_none() && self.random.random_bool(0.5);
        let Some(process) = self.nodes[node].processes.first_mut() else { return };
        let id = process.id;
        let told = command.as_ref().map_or("go", Command::name);
        process.spawn(|cluster| async move {
            // What comes of it is seen by all.
            match command {
                Some(command) => {
                    drop(cluster.request_within(command, Duration::from_secs(3)).await);
                }
                None if leaves => drop(cluster.leave_now().await),
                None => drop(cluster.shutdown().await),
            }
        });
        self.trace(|| format!("{id} is asked to {told}"));
    }

    /// A live node that hardly hears of it is declared failed.
    fn condemn(&mut self, node: usize, until: u64) {
        let kind = self.random.random_range(0..6);
        match kind {
            5 => self.with(node, |process| process.stalled_until = until, "stands still"),
            kind => self.cut_off(node, kind, until),
        }
        let by = self.random.random_range(0..self.nodes.len());
        self.condemn_by(by, node);
    }

    pub(super) fn condemn_by(&mut self, by: usize, node: usize) {
        let why = "the world wants it".to_owned();
        self.trace(|| format!("n{node} is declared failed by n{by}"));
        self.ask(by, Some(Command::MarkNodeFailed { node: node_id(node), why }));
    }

    /// Somebody deletes a table.
    fn delete(&mut self) {
        let table = self.place().table;
        let Some(name) = self.tables.sheets().nth(table).map(|sheet| sheet.name.clone()) else {
            return;
        };
        self.trace(|| format!("{name} is deleted"));
        self.read_last(vec![name.clone()]);
        let maps = self.maps.clone();
        self.store.within(|runtime| runtime.block_on(async { maps.delete_table(&name) }));
    }

    /// These tables are about to end: read once more, for the history of this life.
    pub(super) fn read_last(&mut self, tables: Vec<TableName>) {
        let placement = self.backends[1].placement();
        self.store.within(|runtime| {
            runtime.block_on(async {
                for table in tables {
                    drop(placement.load(&table).await);
                }
            });
        });
    }

    /// Any shard of any table.
    fn place(&mut self) -> Place {
        let counts = self.tables.sheets().map(|sheet| sheet.header.shards.get());
        let counts: Vec<_> = counts.collect();
        let table = self.random.random_range(0..counts.len());
        let shard = self.random.random_range(0..counts.get(table).copied().unwrap_or(1));
        Place { table, shard: coord_core::ShardId::new(shard) }
    }

    fn command(&mut self, by: usize) {
        let node = node_id(self.random.random_range(0..self.nodes.len()));
        let place = self.place();
        let table = self.tables.sheets().nth(place.table).map(|sheet| sheet.name.clone());
        let Some(table) = table else { return };
        let shard = place.shard;
        let command = match self.random.random_range(0..16) {
            0..=2 => Command::MarkNodeFailed { node, why: "the world wants it".to_owned() },
            3..=4 => Command::Drain { node },
            5..=6 => Command::Undrain { node },
            7 => Command::RebalanceShards { table: None, reason: "the world".to_owned() },
            8 => Command::StepDown,
            9 => Command::TransferLeadership { to: node },
            10..=11 => {
                self.pins.insert(place);
                Command::Pin { table, shard, node }
            }
            12 => Command::Unpin { table, shard },
            13 => Command::Pause,
            14 => Command::Resume,
            _ => Command::Leave { node, force: by.is_multiple_of(2) },
        };
        self.trace(|| format!("{command:?}"));
        self.ask(by, Some(command));
    }
}
