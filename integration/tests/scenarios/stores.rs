//! E: the store restarts, fails over, or is away for long.

use std::collections::BTreeMap;
use std::io::Error;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use coord::cluster::{EventKind, Settings};
use coord::{LeaseName, Moment, NodeId, ShardMap};
use coord_integration::until;
use libtest_mimic::Trial;

use super::backends::{self, Servers, Store};
use super::driver::{Done, PATIENCE, SLACK, World, on_each, quick};
use super::leaders::taken_over;
use super::recording::now;

pub(crate) fn trials() -> Vec<Trial> {
    let three = || backends::all().into_iter().filter(|store| store.servers == 3);
    let mut trials = on_each(backends::all(), "e_the_store_restarts", long, restarts);
    trials.extend(on_each(backends::all(), "e_the_store_is_away_for_long", quick, is_away));
    trials.extend(on_each(three(), "e_the_stores_leader_is_paused", long, leader_is_paused));
    trials.extend(on_each(three(), "e_the_stores_leader_dies", long, leader_dies));
    trials.extend(on_each(three(), "e_both_leaders_die", long, both_leaders_die));
    trials
}

/// TTLs of which the half is longer than the store takes to elect a leader.
fn long(store: &Store) -> Settings {
    let mut settings = Settings::fast();
    let times = u32::from(store.election > settings.leader_ttl / 2) + 1;
    for time in [
        &mut settings.leader_ttl,
        &mut settings.leader_renew,
        &mut settings.leader_retry,
        &mut settings.node_ttl,
        &mut settings.heartbeat,
    ] {
        *time *= times;
    }
    settings
}

/// Breaks the servers outside of the runtime.
pub(crate) async fn breaking(
    server: &Servers,
    act: impl FnOnce(&Servers) -> std::io::Result<()> + Send + 'static,
) -> Done {
    let server = server.clone();
    Ok(tokio::task::spawn_blocking(move || act(&server)).await??)
}

/// Waits until the store answers the scenario itself.
pub(crate) async fn answers(world: &World) -> Done<Moment> {
    let (lease, name) = (world.backend.lease(), LeaseName::leader());
    let ask = async {
        while !matches!(
            tokio::time::timeout(Duration::from_millis(500), lease.get(&name)).await,
            Ok(Ok(_))
        ) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, ask).await.map_err(|_| "the store does not come back")?;
    Ok(now())
}

/// Does this to the store while a cluster of three looks on: nothing is lost if the store was away for
/// less than half of the TTLs, and in no case has a node failed or a shard moved. Then the watches show
/// new things, and the terms go on to rise.
async fn survives(
    world: &mut World,
    what: &str,
    act: impl FnOnce(&Servers) -> std::io::Result<()> + Send + 'static,
) -> Done {
    let (leads, fence) = world.leader().await?;
    let before = world.map().await?;
    let begun = now();
    breaking(&world.server, act).await?;
    let away = answers(world).await?.since(begun);
    let limit = world.leader_ttl() / 2;
    world.note(&format!("the store answered again: {what}"), away, limit);
    let is_short = away < limit;
    let window = world.leader_ttl() + Duration::from_secs(1) + SLACK;
    let unharmed = |world: &World| {
        world.members.iter().all(|member| {
            let bad = |kind: &EventKind| match kind {
                EventKind::NodeFailed { .. } | EventKind::ShardsMigrated { .. } => true,
                EventKind::LeadershipLost { .. } | EventKind::RegistrationLost { .. } => is_short,
                _ => false,
            };
            member.event(begun, bad).is_none()
        })
    };
    world.throughout(&format!("nothing is lost: {what}"), window, unharmed).await?;
    world.shared_by(3).await?;
    let (still, under) = world.leader().await?;
    if is_short {
        assert_eq!((still, &under), (leads, &fence), "{what}");
    }
    assert!(under.term >= fence.term, "terms never go back");
    same_owners(&before, &*world.map().await?)
}

/// Every shard is still with its node, though it may run anew.
fn same_owners(before: &ShardMap, after: &ShardMap) -> Done {
    let owners = |map: &ShardMap| -> BTreeMap<_, Option<NodeId>> {
        let shards = map.header().shards.shards();
        shards.map(|shard| (shard, map.owner(shard).map(|node| node.id.clone()))).collect()
    };
    if owners(before) == owners(after) { Ok(()) } else { Err("shards have moved".into()) }
}

/// A new node is seen, and a leader that dies is followed by another.
async fn goes_on(world: &mut World) -> Done {
    world.add("n4").await?;
    world.shared_by(4).await?;
    let (leads, fence) = world.leader().await?;
    let gone = world.kill(leads)?;
    taken_over(world, &fence, gone).await?;
    world.shared_by(3).await
}

async fn restarts(world: &mut World) -> Done {
    world.start(3).await?;
    survives(world, "restarted", Servers::restart).await?;
    goes_on(world).await
}

/// One that hangs for half of the TTLs: the store may be back before, when the others have elected another
/// leader, and its clients have to find out by waiting that the one does not answer. An etcd leader that
/// wakes after a whole TTL may end leases that the next one renewed.
async fn leader_is_paused(world: &mut World) -> Done {
    world.start(3).await?;
    let hangs = world.leader_ttl() / 2;
    let server = world.server.clone();
    let (begin, begun) = mpsc::channel();
    let (pause, paused) = mpsc::channel();
    let fault = breaking(&server, move |server| {
        begun.recv().map_err(Error::other)?;
        let leader = server.leader()?;
        leader.pause()?;
        pause.send(()).map_err(Error::other)?;
        // There is no condition to wait for: that time passes is the fault.
        let _: Option<()> = until(hangs, || None);
        leader.resume()
    });
    let effect = survives(world, "its leader paused", move |_| {
        begin.send(()).map_err(Error::other)?;
        paused.recv().map_err(Error::other)
    });
    tokio::try_join!(fault, effect)?;
    goes_on(world).await
}

async fn leader_dies(world: &mut World) -> Done {
    world.start(3).await?;
    survives(world, "its leader killed", |server| server.leader()?.kill()).await?;
    goes_on(world).await
}

async fn both_leaders_die(world: &mut World) -> Done {
    world.start(3).await?;
    let (leads, fence) = world.leader().await?;
    let gone = now();
    breaking(&world.server, |server| server.leader()?.kill()).await?;
    world.kill(leads)?;
    let limit = 2 * world.leader_ttl() + world.store.election;
    let (_, at, _) = world.successor(&fence, PATIENCE).await?;
    world.note("the next leader was granted, the store's own killed too", at.since(gone), limit);
    if at.since(gone) > limit + SLACK {
        let after = at.since(gone);
        return Err(format!("the next leader came after {after:?}, promised {limit:?}").into());
    }
    world.shared_by(2).await
}

/// Longer than the TTLs: every node has to stop, and nobody has failed.
async fn is_away(world: &mut World) -> Done {
    world.start(3).await?;
    let (_, fence) = world.leader().await?;
    let before = world.map().await?;
    let begun = now();
    breaking(&world.server, Servers::kill).await?;
    let all_stopped = |world: &mut World| {
        let stopped = |kind: &EventKind| matches!(kind, EventKind::RegistrationLost { .. });
        let at = |member: &super::driver::Member| member.event(begun, stopped);
        world.members.iter().map(at).collect::<Option<Vec<_>>>()
    };
    let stopped = world.until("every node stops", PATIENCE, all_stopped).await?;
    let limit = world.settings.node_ttl;
    for at in stopped {
        assert!(at.since(begun) <= limit + SLACK, "it hosted on for {:?}", at.since(begun));
    }
    let away = |world: &mut World| {
        world.members.iter().all(|m| m.view().is_some_and(|view| view.store_away)).then_some(())
    };
    world.until("every node knows that the store is away", PATIENCE, away).await?;
    breaking(&world.server, Servers::restart).await?;
    let back = answers(world).await?;
    let joined = |world: &mut World| {
        let known = |member: &super::driver::Member| {
            let run = member.view()?.registered?;
            let knows = |other: &super::driver::Member| {
                let seen = other.view().and_then(|view| view.member(&member.name));
                seen.is_some_and(|seen| seen.incarnation == run)
            };
            world.members.iter().all(knows).then_some(())
        };
        world.members.iter().all(|member| known(member).is_some()).then_some(())
    };
    world.until("every node is back", PATIENCE, joined).await?;
    world.note("every node was back", now().since(back), 2 * limit);
    world.shared_by(3).await?;
    for member in &world.members {
        let failed = |kind: &EventKind| matches!(kind, EventKind::NodeFailed { .. });
        if member.event(begun, failed).is_some() {
            return Err(format!("to {} a node has failed", member.name).into());
        }
    }
    let (_, under) = world.leader().await?;
    assert!(under.term > fence.term, "nobody's term outlives its deadline");
    let after: Arc<ShardMap> = world.map().await?;
    same_owners(&before, &after)
}
