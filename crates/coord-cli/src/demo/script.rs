//! The steps of the demo, and what must be true after each.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use coord::cluster::{Event, EventKind, EventOrLag, Events};
use coord::{NodeId, ShardMap};
use futures::StreamExt as _;
use futures::stream::{BoxStream, SelectAll};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::audit::Audit;
use super::report::{Done, Report};
use super::world::World;
use crate::args::DemoArgs;
use crate::failure::Failure;

/// How often the world is looked at.
const TICK: Duration = Duration::from_millis(20);
/// How long the frame rests for the reader between two steps.
const REST: Duration = Duration::from_millis(1_500);
/// How long it rests at least, so that the events of a step are heard before its end is told.
const REST_MIN: Duration = Duration::from_millis(60);
/// A step that has not come about by then will not.
const STEP_MAX: Duration = Duration::from_secs(60);

/// Plays all steps. True if each came about and nothing was broken.
pub(crate) async fn play(world: World, report: Report, args: &DemoArgs) -> Result<bool, Failure> {
    let mut player = Player {
        world,
        report,
        audit: Audit::default(),
        events: SelectAll::new(),
        told: HashSet::new(),
        started: Instant::now(),
        rest: if args.fast { REST_MIN } else { REST },
        moved: Vec::new(),
        terms: Vec::new(),
        broken: Vec::new(),
    };
    player.title(args);
    player.steps(args).await?;
    player.finish().await
}

struct Player {
    world: World,
    report: Report,
    audit: Audit,
    events: SelectAll<BoxStream<'static, EventOrLag>>,
    /// Every node tells every event; each is told to the reader once.
    told: HashSet<String>,
    started: Instant,
    rest: Duration,
    moved: Vec<u32>,
    terms: Vec<u64>,
    broken: Vec<String>,
}

impl Player {
    fn title(&mut self, args: &DemoArgs) {
        let target = self.world.target();
        self.report.frame.title =
            format!("coord demo: {} nodes, {} shards, {target}", args.nodes, args.shards);
        self.report.frame.shards = args.shards;
    }

    async fn steps(&mut self, args: &DemoArgs) -> Result<(), Failure> {
        let nodes = usize::from(args.nodes);
        let step = format!("{nodes} nodes join");
        self.report.step(self.at(), &step)?;
        for number in 1..=args.nodes {
            let (_, events) = self.world.start(number).await?;
            self.listen(events);
        }
        let before = self.world.map();
        if !self.until(&step, before, |world, _| world.is_settled(nodes)).await? {
            return Ok(());
        }
        self.expect_shares(&step, args.shards, nodes);

        let Some((leader, fence)) = self.world.leaders().pop() else {
            self.broken.push("nobody leads a settled cluster".to_owned());
            return Ok(());
        };
        let step = format!("the leader {leader} is killed: a new term leads, its shards move");
        self.report.step(self.at(), &step)?;
        let before = self.world.map();
        let owned = before.as_ref().map_or(0, |map| map.shards_of(&leader).count());
        self.world.kill(&leader);
        let came = self
            .until(&step, before, |world, map| {
                world.is_settled(nodes - 1)
                    && map.is_some_and(|map| map.shards_of(&leader).next().is_none())
            })
            .await?;
        if !came {
            return Ok(());
        }
        self.expect_shares(&step, args.shards, nodes - 1);
        self.expect_moves(&step, owned);
        if self.world.leaders().iter().any(|(_, next)| next.term <= fence.term) {
            self.broken.push(format!("the new term is not above {}", fence.term));
        }

        let step = format!("{leader} comes back as a new incarnation");
        self.report.step(self.at(), &step)?;
        let before = self.world.map();
        let number = leader.as_str().trim_start_matches('n').parse().unwrap_or(1);
        // Its own events would tell again, from its view, what the others have told already.
        self.world.start(number).await?;
        if self.until(&step, before, |world, _| world.is_settled(nodes)).await? {
            self.expect_shares(&step, args.shards, nodes);
            self.expect_moves(&step, args.shards as usize / nodes);
        }
        Ok(())
    }

    /// Looks on until the condition holds; false if it didn't within a minute.
    async fn until(
        &mut self,
        step: &str,
        before: Option<Arc<ShardMap>>,
        condition: impl Fn(&World, Option<&ShardMap>) -> bool,
    ) -> Result<bool, Failure> {
        let began = Instant::now();
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut came_at = None;
        loop {
            tokio::select! {
                Some(heard) = self.events.next() => self.hear(heard)?,
                _ = ticks.tick() => {}
            }
            self.look();
            self.report.draw()?;
            // It has to hold through the rest as well.
            if condition(&self.world, self.world.map().as_deref()) {
                came_at.get_or_insert_with(Instant::now);
            } else {
                came_at = None;
            }
            match came_at {
                Some(at) if at.elapsed() >= self.rest => {
                    self.done(step, at - began, before.as_deref())?;
                    return Ok(true);
                }
                None if began.elapsed() > STEP_MAX => {
                    self.broken.push(format!("{step}: not within {} s", STEP_MAX.as_secs()));
                    return Ok(false);
                }
                _ => {}
            }
        }
    }

    fn listen(&mut self, events: Events) {
        self.events.push(events.boxed());
    }

    fn hear(&mut self, heard: EventOrLag) -> Result<(), Failure> {
        let EventOrLag::Event(event) = heard else { return Ok(()) };
        if let EventKind::LeaderElected { term, .. } = &event.kind
            && !self.terms.contains(&term.get())
        {
            self.terms.push(term.get());
        }
        if self.told.insert(key(&event)) {
            self.report.event(self.at(), &event.kind)?;
        }
        Ok(())
    }

    /// Takes the state of the world into the audit and the frame.
    fn look(&mut self) {
        let leaders = self.world.leaders();
        self.audit.leaders(&leaders);
        for (node, map) in self.world.maps() {
            self.audit.map(node, &map);
        }
        self.audit.hosts(self.world.hosted_twice());
        let map = self.world.map();
        let frame = &mut self.report.frame;
        frame.elapsed = self.started.elapsed();
        frame.term = leaders.first().map(|(_, fence)| fence.term.get());
        frame.version = map.as_ref().map_or(0, |map| map.version().get());
        frame.orphans =
            map.map_or(frame.shards, |map| u32::try_from(map.orphans()).unwrap_or(u32::MAX));
        frame.nodes = self.world.lines();
    }

    fn done(
        &mut self,
        step: &str,
        took: Duration,
        before: Option<&ShardMap>,
    ) -> Result<(), Failure> {
        let moved = match (before, self.world.map()) {
            (Some(before), Some(after)) => moves(before, &after),
            _ => 0,
        };
        self.moved.push(moved);
        let nodes = self.world.lines();
        let term = self.report.frame.term;
        self.report.done(self.at(), &Done { step, took, nodes: &nodes, moved, term })?;
        Ok(())
    }

    /// Every active node has its exact share, give or take the one that can't be divided.
    fn expect_shares(&mut self, step: &str, shards: u32, active: usize) {
        let (floor, ceil) = (shards as usize / active, (shards as usize).div_ceil(active));
        for node in self.world.lines().iter().filter(|node| node.status == "active") {
            if !(floor..=ceil).contains(&(node.shards as usize)) {
                let why =
                    format!("{} has {} shards, not {floor} to {ceil}", node.node, node.shards);
                self.broken.push(format!("{step}: {why}"));
            }
        }
    }

    /// Exactly this many shards moved, which is the fewest that could.
    fn expect_moves(&mut self, step: &str, fewest: usize) {
        let moved = self.moved.last().copied().unwrap_or(0) as usize;
        if moved != fewest {
            self.broken.push(format!("{step}: {moved} shards moved where {fewest} suffice"));
        }
    }

    async fn finish(mut self) -> Result<bool, Failure> {
        self.broken.extend_from_slice(self.audit.violations());
        let held = self.broken.is_empty();
        let at = self.at();
        self.report.summary(at, held, (&self.moved, &self.terms), &self.broken)?;
        self.world.shut_down().await?;
        Ok(held)
    }

    fn at(&self) -> Duration {
        self.started.elapsed()
    }
}

/// What tells two events apart. A member's coming and going is the same event whatever it followed from.
fn key(event: &Event) -> String {
    let json = match &event.kind {
        EventKind::NodeJoined { .. }
        | EventKind::NodeFailed { .. }
        | EventKind::NodeLeft { .. } => serde_json::to_string(&event.kind),
        _ => serde_json::to_string(event),
    };
    json.unwrap_or_default()
}

/// How many shards have another primary in the second map.
fn moves(before: &ShardMap, after: &ShardMap) -> u32 {
    let owner = |map: &ShardMap, shard| map.owner(shard).map(|node| node.id.clone());
    let changed = |shard: &coord::ShardId| {
        let (from, to): (Option<NodeId>, Option<NodeId>) =
            (owner(before, *shard), owner(after, *shard));
        from.is_some() && from != to
    };
    let shards = after.header().shards.shards();
    u32::try_from(shards.filter(changed).count()).unwrap_or(u32::MAX)
}
