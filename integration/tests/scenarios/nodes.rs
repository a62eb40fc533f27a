//! A, H, L: nodes that die, come twice, or change while nobody looks.

use std::time::Duration;

use coord::cluster::EventKind;
use coord::{NodeEvent, ShardMap, Watched, Watcher};
use libtest_mimic::Trial;

use super::backends;
use super::driver::{Done, Member, PATIENCE, SLACK, World, connect, on_each, quick};
use super::member::table;
use super::said::{Answer, Line, Outcome, Question, Said};

pub(crate) fn trials() -> Vec<Trial> {
    let single = || backends::all().into_iter().filter(|store| store.servers == 1);
    let mut trials = on_each(single(), "a_one_of_four_nodes_dies", quick, dies);
    trials.extend(on_each(single(), "h_a_node_restarts_under_its_id", quick, restarts));
    trials.extend(on_each(single(), "h_a_node_is_replaced_while_paused", quick, is_replaced));
    trials.extend(on_each(single(), "l_nodes_change_while_a_watch_is_cut", quick, change_unseen));
    trials
}

/// All shards of these nodes have another owner, and those of the others have the same.
pub(crate) fn only_moved(before: &ShardMap, after: &ShardMap, nodes: &[&str]) -> Done {
    for shard in before.header().shards.shards() {
        let (from, to) = (before.owner(shard), after.owner(shard));
        let (Some(from), Some(to)) = (from, to) else {
            return Err(format!("shard {shard} has no owner").into());
        };
        let moved = (&from.id, from.incarnation) != (&to.id, to.incarnation);
        if moved != nodes.contains(&from.id.as_str()) {
            return Err(format!("shard {shard} of {} is now with {}", from.id, to.id).into());
        }
    }
    Ok(())
}

async fn dies(world: &mut World) -> Done {
    world.start(4).await?;
    let (leads, _) = world.leader().await?;
    let victim = (leads + 1) % 4;
    let before = world.map().await?;
    let gone = world.kill(victim)?;
    let (name, limit) = (world.members[victim].name.clone(), world.detection());
    let failed = |kind: &EventKind| matches!(kind, EventKind::NodeFailed { node, .. } if node.as_str() == name);
    world.shared_by(3).await?;
    only_moved(&before, &*world.map().await?, &[&name])?;
    for member in world.living() {
        let heard: Vec<_> = member.events().filter(|(_, event)| failed(&event.kind)).collect();
        let [(at, _)] = heard[..] else {
            return Err(format!("{} heard {} times of it", member.name, heard.len()).into());
        };
        world.note("a dead node was seen to have failed", at.since(gone), limit);
        if at.since(gone) > limit + SLACK {
            let late = format!("{} heard of it after {:?}", member.name, at.since(gone));
            return Err(format!("{late}, promised are {limit:?}").into());
        }
    }
    Ok(())
}

async fn restarts(world: &mut World) -> Done {
    world.start(3).await?;
    let (leads, _) = world.leader().await?;
    let victim = (leads + 1) % 3;
    let name = world.members[victim].name.clone();
    // While the registered process lives, another one is refused and told where it is.
    let second = world.add(&name).await?;
    let joined = world
        .until("it joins or not", PATIENCE, |world| world.members[second].has_joined())
        .await?;
    match joined {
        Err(why) if why.contains("localhost:4000") => {}
        other => return Err(format!("two processes under one id: {other:?}").into()),
    }
    world.kill(second)?;
    // A dead one is replaced at once, since the machine shows that it is dead.
    let gone = world.kill(victim)?;
    let back = world.add(&name).await?;
    let joined =
        world.until("it joins", PATIENCE, |world| world.members[back].has_joined()).await?;
    joined.map_err(|why| format!("a dead process keeps its id: {why}"))?;
    let at = super::recording::now();
    world.note("a node was back under its id", at.since(gone), Duration::from_secs(2));
    runs_alone(world, back, &[]).await
}

/// This very process is the one under its id: to the others, in the store and in the map.
async fn runs_alone(world: &mut World, member: usize, blind: &[usize]) -> Done {
    let name = world.members[member].name.clone();
    let what = format!("all know this run of {name}");
    let known = |world: &mut World| {
        let run = world.members[member].view()?.registered?;
        let knows = |(n, other): (usize, &Member)| {
            let seen = other.view().and_then(|view| view.member(&name));
            blind.contains(&n) || seen.is_some_and(|seen| seen.incarnation == run)
        };
        let mut living = world.members.iter().enumerate().filter(|(_, m)| !m.was_killed());
        living.all(knows).then_some(run)
    };
    let run = world.until(&what, PATIENCE, known).await?;
    world.shared_by_but(3, blind).await?;
    let nodes = world.backend.discovery().nodes().await?;
    let stored = nodes.iter().find(|record| record.info.id.as_str() == name);
    let stored = stored.map(|record| record.info.incarnation);
    let map = world.map().await?;
    let owner = map.nodes().iter().flatten().find(|node| node.id.as_str() == name);
    let owner = owner.map(|node| node.incarnation);
    if stored == Some(run) && owner == Some(run) {
        return Ok(());
    }
    Err(format!("{name} runs as {run}, is registered as {stored:?}, owns as {owner:?}").into())
}

async fn is_replaced(world: &mut World) -> Done {
    world.start(3).await?;
    let (leads, fence) = world.leader().await?;
    let name = world.members[leads].name.clone();
    if !matches!(world.ask(leads, Question::Prepare).await?, Answer::Prepared(_)) {
        return Err("it prepared no write".into());
    }
    world.members[leads].process.pause()?;
    let second = world.add_with(&name, true, None).await?;
    let joined =
        world.until("it joins", PATIENCE, |world| world.members[second].has_joined()).await?;
    joined.map_err(|why| format!("it can't replace the paused one: {why}"))?;
    // The term of the former one ends, as far as maps go, with the next one's claim.
    let claimed = |world: &mut World| {
        let claims = |line: &Line| match &line.said {
            Said::Call(call) if call.operation == "claim" && call.outcome == Outcome::Done => {
                let later = call.fence.as_ref().is_some_and(|claim| claim.term > fence.term);
                later && call.subject == table().as_str()
            }
            _ => false,
        };
        world.members.iter().any(|member| member.lines.iter().any(claims)).then_some(())
    };
    world.until("another leader claims the table", PATIENCE, claimed).await?;

    let write = world.members[leads].ask(Question::Write)?;
    let resumed = super::recording::now();
    world.members[leads].process.resume()?;
    match world.answer(leads, write).await? {
        Answer::Wrote(Outcome::Fenced) => {}
        other => return Err(format!("a write of the former run is not fenced: {other:?}").into()),
    }
    let lost = |kind: &EventKind| matches!(kind, EventKind::RegistrationLost { .. });
    let told = |world: &mut World| world.members[leads].event(resumed, lost);
    world.until("the former run learns that it is none any more", PATIENCE, told).await?;
    // It may ask again, and never gets the id back while its successor lives.
    let window = 2 * world.settings.node_ttl;
    let still = |world: &World| {
        let registered = |n: usize| world.members[n].view().and_then(|view| view.registered);
        registered(leads).is_none() && registered(second).is_some()
    };
    world.throughout("one of the two is registered", window, still).await?;
    runs_alone(world, second, &[leads]).await?;
    world.kill(leads)?;
    Ok(())
}

async fn change_unseen(world: &mut World) -> Done {
    world.start(5).await?;
    let (leads, _) = world.leader().await?;
    let [leaves, dies, blind] = [1, 2, 3].map(|n| (leads + n) % 5);
    let name = |n: usize, world: &World| world.members[n].name.clone();
    let (left, dead) = (name(leaves, world), name(dies, world));
    // A watch of the nodes alone, on a way of its own.
    let (proxy, url) = world.way().await?;
    let watched = connect(&url).await?;
    let mut watcher = Watcher::<NodeEvent>::nodes(watched.discovery());
    let seen = next_event(&mut watcher).await?;
    assert!(matches!(&seen, NodeEvent::Snapshot(nodes) if nodes.len() == 5), "{seen:?}");

    proxy.cut();
    world.members[blind].proxy.cut();
    let cut = super::recording::now();
    world.members[leaves].ask(Question::Leave)?;
    world.kill(dies)?;
    world.add("n6").await?;
    let gone = |world: &mut World| {
        let over = |line: &Line| matches!(line.said, Said::Over(_));
        world.members[leaves].lines.iter().any(over).then_some(())
    };
    world.until("a node leaves", PATIENCE, gone).await?;
    world.kill(leaves)?;
    // The blind one itself is taken for dead meanwhile.
    world.shared_by_but(3, &[blind]).await?;
    proxy.heal();
    world.members[blind].proxy.heal();
    world.shared_by(4).await?;

    let heard = |wanted: &dyn Fn(&EventKind) -> bool| {
        let member = &world.members[blind];
        member.events().filter(|(at, event)| *at > cut && wanted(&event.kind)).count()
    };
    let counts = [
        heard(&|kind| matches!(kind, EventKind::NodeLeft { node, .. } if node.as_str() == left)),
        heard(&|kind| matches!(kind, EventKind::NodeFailed { node, .. } if node.as_str() == dead)),
        heard(&|kind| matches!(kind, EventKind::NodeJoined { node, .. } if node.as_str() == "n6")),
    ];
    if counts != [1; 3] {
        return Err(format!("left, failed and joined were heard {counts:?} times").into());
    }
    departures(&mut watcher, &[&left, &dead]).await
}

async fn next_event(watcher: &mut Watcher<NodeEvent>) -> Done<NodeEvent> {
    let event = async {
        loop {
            if let Watched::Event(event) = watcher.next().await {
                return event;
            }
        }
    };
    tokio::time::timeout(PATIENCE, event).await.map_err(|_| "the watch shows nothing".into())
}

/// The watch that was cut too tells of both departures, and ends where the store is.
async fn departures(watcher: &mut Watcher<NodeEvent>, gone: &[&str]) -> Done {
    let mut missing: Vec<&str> = gone.to_vec();
    let mut joined = false;
    while !missing.is_empty() || !joined {
        match next_event(watcher).await? {
            NodeEvent::Left { node, .. } | NodeEvent::Expired { node, .. } => {
                missing.retain(|name| *name != node.as_str());
            }
            NodeEvent::Joined(record) => joined |= record.info.id.as_str() == "n6",
            NodeEvent::Snapshot(_) => return Err("a snapshot hides who is gone".into()),
            _ => {}
        }
    }
    Ok(())
}
