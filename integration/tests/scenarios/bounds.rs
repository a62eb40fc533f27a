//! How long shards are without a host: docs/takeover.md states the bounds, and this measures them.

use std::time::Duration;

use coord::cluster::{EventKind, Settings};
use coord::{Moment, Ttl};
use libtest_mimic::Trial;

use super::backends::{self, Servers, Store};
use super::driver::{Done, PATIENCE, SLACK, World, on_each};
use super::recording::now;
use super::stores::{answers, breaking};

/// A process that proves its predecessor's death has its shards back within this.
const RESTART: Duration = Duration::from_secs(2);

pub(crate) fn trials() -> Vec<Trial> {
    let single = || backends::all().into_iter().filter(|store| store.servers == 1);
    let mut trials = on_each(single(), "bounds_with_fast_settings", |_| Settings::fast(), measure);
    let defaults = on_each(single(), "bounds_with_default_settings", default, measure);
    // They take minutes: CI runs those of one store, another one with each commit.
    trials.extend(defaults.into_iter().map(|trial| trial.with_ignored_flag(true)));
    trials
}

fn default(_: &Store) -> Settings {
    Settings::default()
}

async fn measure(world: &mut World) -> Done {
    world.start(4).await?;
    // A registration that was just renewed takes the longest to end.
    let (leads, _) = world.leader().await?;
    let gone = world.kill(leads)?;
    within(world, "the leader died", gone, bound_of_a_loss(world)).await?;

    let (leads, _) = world.leader().await?;
    let cut = other_than(world, &[leads]);
    world.members[cut].proxy.cut();
    let at = now();
    let hosted = |world: &World| world.hosted_by(|n| n != cut) == world.shards.get();
    until(world, "a node was cut off", at, bound_of_a_loss(world), hosted).await?;
    world.members[cut].proxy.heal();
    world.shared_by(3).await?;

    let (leads, _) = world.leader().await?;
    let victim = other_than(world, &[leads]);
    let name = world.members[victim].name.clone();
    world.kill(victim)?;
    let started = now();
    world.add_successor(&name).await?;
    within(world, "a node restarted under its name", started, RESTART).await?;
    world.shared_by(3).await?;

    let begun = now();
    breaking(&world.server, Servers::kill).await?;
    let limit = world.settings.node_ttl + PATIENCE;
    let stopped = |world: &mut World| (world.hosted_by(|_| true) == 0).then_some(());
    world.until("no shard is hosted while the store is unavailable", limit, stopped).await?;
    breaking(&world.server, Servers::restart).await?;
    let back = answers(world).await?;
    within(world, "the store had been unavailable", back, bound_of_an_outage(world)).await?;
    let failed = |kind: &EventKind| matches!(kind, EventKind::NodeFailed { .. });
    if let Some(member) = world.living().find(|member| member.event(begun, failed).is_some()) {
        return Err(format!("to {} a node has failed", member.name).into());
    }
    world.shared_by(3).await
}

/// A registration and a leader's lease run out at once, and each is noticed within a second.
fn bound_of_a_loss(world: &World) -> Duration {
    granted(world, world.settings.node_ttl).max(world.leader_ttl()) + Duration::from_secs(1)
}

/// The former leader's lease may have to run out in a store that counts its TTL anew. Each node then needs
/// a heartbeat to learn that the store is back, and the leader another one for its own registration.
fn bound_of_an_outage(world: &World) -> Duration {
    world.leader_ttl() + 2 * world.settings.request_timeout + Duration::from_secs(1)
}

fn granted(world: &World, ttl: Duration) -> Duration {
    let asked = Ttl::new(ttl).expect("the settings are valid");
    world.backend.info().guarantees.granted_ttl(asked).get()
}

fn other_than(world: &World, not: &[usize]) -> usize {
    let lives = |n: &usize| !world.members[*n].was_killed() && !not.contains(n);
    (0..world.members.len()).find(lives).expect("there are others")
}

async fn within(world: &mut World, what: &str, since: Moment, limit: Duration) -> Done {
    let hosted = |world: &World| world.hosted_by(|_| true) == world.shards.get();
    until(world, what, since, limit, hosted).await
}

async fn until(
    world: &mut World,
    what: &str,
    since: Moment,
    limit: Duration,
    hosted: impl Fn(&World) -> bool + Send + Sync,
) -> Done {
    let story = format!("every shard has a host: {what}");
    let found = |world: &mut World| hosted(world).then(now);
    let at = world.until(&story, limit + PATIENCE, found).await?;
    world.note(&story, at.since(since), limit);
    if at.since(since) > limit + SLACK {
        let after = at.since(since);
        return Err(format!("{story} after {after:?}, promised are {limit:?}").into());
    }
    Ok(())
}
