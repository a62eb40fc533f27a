//! `coord plan`: what a rebalance would move, and why.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::ValueEnum as _;
use coord::strategies::{
    Accepts, Assignment, Balanced, Candidate, ConsistentHash, PlacementStrategy, Plan,
    PlanSettings, Reason, Rendezvous,
};
use coord::{Capacity, Label, NodeId, ReplicationFactor, ShardCount, ShardId, Version};
use serde::Serialize;

use crate::args::{Output, PlanArgs, Strategy};
use crate::failure::{Failure, code};

/// Plans and prints; success if everything that was wanted could be satisfied.
pub(crate) fn run(args: &PlanArgs, output: Output) -> Result<ExitCode, Failure> {
    let scene = Scene::read(args)?;
    let strategy: Box<dyn PlacementStrategy> = match args.strategy {
        Strategy::Balanced => Box::new(Balanced::new()),
        Strategy::ConsistentHash => Box::new(ConsistentHash::new()),
        Strategy::Rendezvous => Box::new(Rendezvous::new()),
    };
    let empty = Assignment::empty(scene.shards, scene.replicas);
    let before = strategy
        .plan(&empty, &scene.now, &PlanSettings::default())
        .map_err(|error| Failure::input(format!("the nodes as they are now: {error}")))?
        .into_next();
    let settings = PlanSettings::default()
        .with_version(Version::new(1))
        .with_max_moves(args.max_moves.map(u64::from));
    let settings = scene
        .pins
        .iter()
        .fold(settings, |settings, (shard, node)| settings.with_pin(*shard, vec![node.clone()]));
    let plan = strategy
        .plan(&before, &scene.then, &settings)
        .map_err(|error| Failure::input(format!("the nodes after the change: {error}")))?;
    let summary = Summary::of(&before, &plan, args);
    match output {
        Output::Text => summary.print()?,
        Output::Json => {
            let json = serde_json::to_string(&summary).map_err(io::Error::from)?;
            writeln!(io::stdout(), "{json}")?;
        }
    }
    let satisfied = plan.unsatisfied().is_empty();
    Ok(if satisfied { ExitCode::SUCCESS } else { ExitCode::from(code::DID_NOT_HOLD) })
}

/// What the arguments describe.
struct Scene {
    shards: ShardCount,
    replicas: ReplicationFactor,
    now: Vec<Candidate>,
    then: Vec<Candidate>,
    pins: BTreeMap<ShardId, NodeId>,
}

impl Scene {
    fn read(args: &PlanArgs) -> Result<Self, Failure> {
        let now = args.nodes.iter().map(|text| candidate(text)).collect::<Result<Vec<_>, _>>()?;
        let joining =
            args.join.iter().map(|text| candidate(text)).collect::<Result<Vec<_>, _>>()?;
        let mut then: Vec<Candidate> = now.iter().chain(&joining).cloned().collect();
        let known = |name: &String, flag: &str, then: &[Candidate]| {
            let found = then.iter().position(|node| node.id.as_str() == name);
            found.ok_or_else(|| {
                let names: Vec<&str> = then.iter().map(|node| node.id.as_str()).collect();
                let names = names.join(", ");
                Failure::input(format!("{flag} {name:?} is not one of the nodes; they are {names}"))
            })
        };
        for name in &args.drain {
            let index = known(name, "--drain", &then)?;
            then[index].accepts = Accepts::KeepOnly;
        }
        for name in &args.fail {
            let index = known(name, "--fail", &then)?;
            then.remove(index);
        }
        Ok(Self {
            shards: ShardCount::new(args.shards)?,
            replicas: ReplicationFactor::new(args.replicas)?,
            pins: pins(&args.pin)?,
            now,
            then,
        })
    }
}

/// Reads NAME, NAME=CAPACITY, NAME@ZONE or NAME=CAPACITY@ZONE.
fn candidate(text: &str) -> Result<Candidate, Failure> {
    let (text, zone) = match text.split_once('@') {
        Some((_, zone)) if zone.contains('=') => {
            let why =
                format!("node {text:?}: the capacity goes before the zone, NAME=CAPACITY@ZONE");
            return Err(Failure::input(why));
        }
        Some((rest, zone)) => (rest, Some(Label::new(zone)?)),
        None => (text, None),
    };
    let (name, capacity) = match text.split_once('=') {
        Some((name, size)) => {
            let wrong =
                |_| Failure::input(format!("capacity {size:?} of node {name:?} is not a number"));
            (name, Capacity::new(size.parse().map_err(wrong)?)?)
        }
        None => (text, Capacity::default()),
    };
    Ok(Candidate::new(NodeId::new(name)?).with_capacity(capacity).with_zone(zone))
}

fn pins(texts: &[String]) -> Result<BTreeMap<ShardId, NodeId>, Failure> {
    let mut pins = BTreeMap::new();
    for text in texts {
        let (shard, node) = pin(text)?;
        if let Some(other) = pins.insert(shard, node.clone()) {
            let why = format!("--pin: shard {shard} is pinned twice, to {other} and to {node}");
            return Err(Failure::input(why));
        }
    }
    Ok(pins)
}

fn pin(text: &str) -> Result<(ShardId, NodeId), Failure> {
    let wrong = || Failure::input(format!("--pin {text:?} is not SHARD=NAME, such as 17=n2"));
    let (shard, node) = text.split_once('=').ok_or_else(wrong)?;
    Ok((ShardId::new(shard.parse().map_err(|_| wrong())?), NodeId::new(node)?))
}

/// What is printed.
#[derive(Debug, Serialize)]
struct Summary {
    strategy: String,
    shards: u32,
    replicas: u8,
    moves: usize,
    lower_bound: u64,
    optimal: bool,
    reasons: BTreeMap<&'static str, usize>,
    nodes: Vec<NodeChange>,
    unsatisfied: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    list: Option<Vec<OneMove>>,
}

#[derive(Debug, Serialize)]
struct NodeChange {
    node: NodeId,
    before: u64,
    after: u64,
    gained: usize,
    lost: usize,
}

#[derive(Debug, Serialize)]
struct OneMove {
    shard: ShardId,
    replica: u8,
    from: Option<NodeId>,
    to: NodeId,
    reason: &'static str,
}

impl Summary {
    fn of(before: &Assignment, plan: &Plan, args: &PlanArgs) -> Self {
        let list: Vec<OneMove> = plan
            .moves()
            .iter()
            .filter_map(|one| {
                Some(OneMove {
                    shard: one.shard,
                    replica: one.replica,
                    from: plan.node(one.from).cloned(),
                    to: plan.node(one.to)?.clone(),
                    reason: one.reason.as_str(),
                })
            })
            .collect();
        let (had, has) = (before.counts(), plan.next().counts());
        let names: BTreeSet<&NodeId> = had.keys().chain(has.keys()).copied().collect();
        let change = |node: &NodeId| NodeChange {
            node: node.clone(),
            before: had.get(node).copied().unwrap_or(0),
            after: has.get(node).copied().unwrap_or(0),
            gained: list.iter().filter(|one| one.to == *node).count(),
            lost: list.iter().filter(|one| one.from.as_ref() == Some(node)).count(),
        };
        let counted = Reason::ALL.iter().map(|reason| (reason.as_str(), plan.count(*reason)));
        Self {
            strategy: args
                .strategy
                .to_possible_value()
                .map_or(String::new(), |value| value.get_name().to_owned()),
            shards: args.shards,
            replicas: args.replicas,
            moves: list.len(),
            lower_bound: plan.lower_bound(),
            optimal: plan.is_optimal(),
            reasons: counted.filter(|(_, count)| *count > 0).collect(),
            nodes: names.into_iter().map(change).collect(),
            unsatisfied: plan.unsatisfied().iter().map(ToString::to_string).collect(),
            list: args.moves.then_some(list),
        }
    }

    fn print(&self) -> io::Result<()> {
        let mut out = io::stdout().lock();
        let width =
            self.nodes.iter().map(|node| node.node.as_str().len()).max().unwrap_or(0).max(4);
        writeln!(
            out,
            "{:width$}  {:>8}  {:>8}  {:>8}  {:>8}",
            "node", "before", "after", "gained", "lost"
        )?;
        for NodeChange { node, before, after, gained, lost } in &self.nodes {
            let node = node.as_str();
            writeln!(out, "{node:width$}  {before:>8}  {after:>8}  {gained:>8}  {lost:>8}")?;
        }
        let reasons: Vec<String> =
            self.reasons.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
        let of =
            if reasons.is_empty() { String::new() } else { format!(" ({})", reasons.join(", ")) };
        writeln!(out, "\n{} moves{of}", self.moves)?;
        if self.optimal {
            writeln!(out, "proved: no plan with these shares moves fewer")?;
        } else if self.lower_bound > 0 {
            writeln!(out, "no plan with these shares moves fewer than {}", self.lower_bound)?;
        }
        for what in &self.unsatisfied {
            writeln!(out, "not satisfied: {what}")?;
        }
        for one in self.list.iter().flatten() {
            let OneMove { shard, replica, from, to, reason } = one;
            let from = from.as_ref().map_or("nobody", NodeId::as_str);
            writeln!(out, "shard {shard} replica {replica}: {from} -> {to} ({reason})")?;
        }
        Ok(())
    }
}
