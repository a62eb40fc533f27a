//! Tells what happens, in one of three forms.

use std::io::{self, Write as _};
use std::time::Duration;

use coord::NodeId;
use coord::cluster::EventKind;
use serde::Serialize;

use super::view::{Frame, NodeLine, Screen, stamp};

/// The form of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// A frame that is drawn over itself.
    Live,
    /// A line for each thing.
    Lines,
    /// A JSON value for each thing.
    Json,
}

/// One line of the JSON form.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Line<'a> {
    /// A step begins.
    Step { at_ms: u64, step: &'a str },
    /// Something happened in the cluster.
    Event {
        at_ms: u64,
        text: &'a str,
        #[serde(flatten)]
        event: &'a EventKind,
    },
    /// A step came about.
    Done {
        at_ms: u64,
        step: &'a str,
        took_ms: u64,
        nodes: &'a [NodeLine],
        moved: u32,
        term: Option<u64>,
    },
    /// How it all went.
    Summary { at_ms: u64, held: bool, moved: &'a [u32], terms: &'a [u64], violations: &'a [String] },
}

/// Writes the report.
#[derive(Debug)]
pub(crate) struct Report {
    form: Form,
    screen: Screen,
    pub(crate) frame: Frame,
}

impl Report {
    pub(crate) fn new(form: Form) -> Self {
        Self { form, screen: Screen::default(), frame: Frame::default() }
    }

    /// Draws the frame again, in the form that has one.
    pub(crate) fn draw(&mut self) -> io::Result<()> {
        if self.form == Form::Live { self.screen.draw(&self.frame) } else { Ok(()) }
    }

    pub(crate) fn step(&mut self, at: Duration, step: &str) -> io::Result<()> {
        step.clone_into(&mut self.frame.step);
        self.line(&Line::Step { at_ms: millis(at), step }, &format!("> {step}"), at)
    }

    pub(crate) fn event(&mut self, at: Duration, event: &EventKind) -> io::Result<()> {
        let Some(text) = describe(event) else { return Ok(()) };
        self.frame.note(at, text.clone());
        self.line(&Line::Event { at_ms: millis(at), text: &text, event }, &text, at)
    }

    pub(crate) fn done(&mut self, at: Duration, done: &Done<'_>) -> io::Result<()> {
        let shares: Vec<String> =
            done.nodes.iter().map(|node| format!("{} {}", node.node, node.shards)).collect();
        let text = format!(
            "{}: {} after {} s, {} shards moved",
            done.step,
            shares.join(", "),
            seconds(done.took),
            done.moved
        );
        self.frame.note(at, format!("{} shards moved, {} s", done.moved, seconds(done.took)));
        let (at_ms, took_ms) = (millis(at), millis(done.took));
        let Done { step, nodes, moved, term, .. } = *done;
        self.line(&Line::Done { at_ms, step, took_ms, nodes, moved, term }, &text, at)
    }

    /// The last word, which stands below the frame where there is one.
    pub(crate) fn summary(
        &mut self,
        at: Duration,
        held: bool,
        (moved, terms): (&[u32], &[u64]),
        violations: &[String],
    ) -> io::Result<()> {
        self.draw()?;
        if self.form == Form::Json {
            return self.line(
                &Line::Summary { at_ms: millis(at), held, moved, terms, violations },
                "",
                at,
            );
        }
        let mut out = io::stdout().lock();
        for violation in violations {
            writeln!(out, "broken: {violation}")?;
        }
        if held {
            writeln!(out, "every step came about and every invariant held, {} s", seconds(at))
        } else {
            writeln!(out, "NOT as promised: see what is broken above, {} s", seconds(at))
        }
    }

    fn line(&mut self, json: &Line<'_>, text: &str, at: Duration) -> io::Result<()> {
        let mut out = io::stdout().lock();
        match self.form {
            Form::Live => Ok(()),
            Form::Lines => writeln!(out, "{}  {text}", stamp(at)),
            Form::Json => writeln!(out, "{}", serde_json::to_string(json)?),
        }
    }
}

/// A step that came about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done<'a> {
    pub(crate) step: &'a str,
    pub(crate) took: Duration,
    pub(crate) nodes: &'a [NodeLine],
    pub(crate) moved: u32,
    pub(crate) term: Option<u64>,
}

/// An event in words; none for what is not worth a line.
fn describe(event: &EventKind) -> Option<String> {
    Some(match event {
        EventKind::NodeJoined { node, .. } => format!("{node} joined"),
        EventKind::NodeReplaced { node, .. } => format!("{node} restarted"),
        EventKind::NodeFailed { node, why, .. } => format!("{node} failed: {why}"),
        EventKind::NodeLeft { node, .. } => format!("{node} left"),
        EventKind::LeaderElected { node, term } => format!("{node} leads in term {term}"),
        EventKind::LeadershipLost { node, term, why } => {
            format!("{node}'s term {term} ended: {why}")
        }
        EventKind::TableRefused { table, misfit, .. } => format!("table {table} {misfit}"),
        EventKind::RebalancingTriggered { reason, .. } => format!("rebalancing: {reason}"),
        EventKind::ShardsAssigned { shards, .. } => format!("{} shards assigned", shards.len()),
        EventKind::ShardsMoving { shards, .. } => format!("{} shards on their way", shards.len()),
        EventKind::HandoffStuck { shards, .. } => format!("{} shards are stuck", shards.len()),
        EventKind::ShardFailed { shard, why, .. } => format!("shard {shard} failed: {why}"),
        EventKind::ShardsFaulty { fault, shards, .. } => {
            format!("{} shards: {fault}", shards.len())
        }
        EventKind::NodeSuspended { node, .. } => format!("{node} is suspended"),
        EventKind::ShardsMigrated { shards, .. } => {
            let from: std::collections::BTreeSet<&NodeId> =
                shards.iter().map(|s| &s.from).collect();
            let from: Vec<&str> = from.into_iter().map(NodeId::as_str).collect();
            format!("{} shards migrated from {}", shards.len(), from.join(", "))
        }
        EventKind::ShardsOrphaned { shards, .. } => format!("{} shards orphaned", shards.len()),
        EventKind::RebalancingFailed { why, .. } => format!("rebalancing failed: {why}"),
        EventKind::NoActiveNodes => "no active nodes".to_owned(),
        EventKind::StoreAway => "the store is away".to_owned(),
        EventKind::StoreBack => "the store is back".to_owned(),
        EventKind::RegistrationLost { why, .. } => format!("a registration was lost: {why}"),
        _ => return None,
    })
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn seconds(duration: Duration) -> String {
    format!("{:.1}", duration.as_secs_f64())
}
