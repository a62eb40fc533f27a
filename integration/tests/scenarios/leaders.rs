//! B, C, D, F: what becomes of a leader, and of its writes.

use std::sync::Arc;
use std::time::Duration;

use coord::cluster::{Balance, ClusterState, EventKind, Role};
use coord::{Fence, Moment};
use coord_integration::faults::Clock;
use libtest_mimic::Trial;

use super::backends;
use super::driver::{Done, Member, PATIENCE, SLACK, World, on_each, quick};
use super::nodes::only_moved;
use super::said::{Answer, Outcome, Question};

pub(crate) fn trials() -> Vec<Trial> {
    let single = || backends::all().into_iter().filter(|store| store.servers == 1);
    let mut trials = on_each(single(), "b_the_leader_dies", quick, dies);
    trials.extend(on_each(single(), "c_the_leader_is_cut_off", quick, is_cut_off));
    trials.extend(on_each(single(), "d_the_leader_is_paused", quick, is_paused));
    trials.extend(on_each(single(), "f_clocks_of_members_jump", quick, clocks_jump));
    trials
}

/// The term after a leader that was gone from `gone` on has begun in time.
pub(crate) async fn taken_over(world: &mut World, fence: &Fence, gone: Moment) -> Done<usize> {
    let limit = world.leader_ttl() + Duration::from_secs(1);
    let (next, at, _) = world.successor(fence, PATIENCE).await?;
    world.note("the next leader was granted", at.since(gone), limit);
    let late = format!("the next leader came after {:?}, promised are {limit:?}", at.since(gone));
    if at.since(gone) > limit + SLACK { Err(late.into()) } else { Ok(next) }
}

async fn dies(world: &mut World) -> Done {
    world.start(4).await?;
    let (leads, fence) = world.leader().await?;
    let before = world.map().await?;
    let gone = world.kill(leads)?;
    taken_over(world, &fence, gone).await?;
    world.shared_by(3).await?;
    only_moved(&before, &*world.map().await?, &[&world.members[leads].name])
}

/// The resumed or healed member's answer to the write that it had prepared.
async fn is_fenced(world: &mut World, member: usize, question: u32) -> Done {
    match world.answer(member, question).await? {
        Answer::Wrote(Outcome::Fenced) => Ok(()),
        other => Err(format!("a write of a former leader is not fenced: {other:?}").into()),
    }
}

async fn prepare(world: &mut World, member: usize, fence: &Fence) -> Done {
    match world.ask(member, Question::Prepare).await? {
        Answer::Prepared(under) if under == *fence => Ok(()),
        other => Err(format!("it prepared no write in its term: {other:?}").into()),
    }
}

/// It follows the one that leads, and has told that its own term is over.
async fn follows(world: &mut World, member: usize, fence: &Fence) -> Done {
    let term = fence.term;
    world
        .until("the former leader follows", PATIENCE, |world| {
            let member = &world.members[member];
            let view = member.view()?;
            let other = view.leader.as_ref()?.term > term && view.role != Role::Leader;
            let told = |kind: &EventKind| {
                matches!(kind, EventKind::LeadershipLost { term: ended, .. } if *ended == term)
            };
            (other && member.events().any(|(_, event)| told(&event.kind))).then_some(())
        })
        .await
}

async fn is_cut_off(world: &mut World) -> Done {
    world.start(3).await?;
    let (leads, fence) = world.leader().await?;
    prepare(world, leads, &fence).await?;
    let gone = super::recording::now();
    world.members[leads].proxy.cut();
    taken_over(world, &fence, gone).await?;
    world.shared_by_but(2, &[leads]).await?;
    let meanwhile = world.map().await?.version();
    // It goes on to try while the way is healed.
    let write = world.members[leads].ask(Question::Write)?;
    world.members[leads].proxy.heal();
    is_fenced(world, leads, write).await?;
    world.shared_by(3).await?;
    follows(world, leads, &fence).await?;
    assert!(world.map().await?.version() > meanwhile, "it has its share again");
    Ok(())
}

async fn is_paused(world: &mut World) -> Done {
    world.start(3).await?;
    let (leads, fence) = world.leader().await?;
    prepare(world, leads, &fence).await?;
    let gone = super::recording::now();
    world.members[leads].process.pause()?;
    taken_over(world, &fence, gone).await?;
    world.shared_by_but(2, &[leads]).await?;
    let meanwhile = world.map().await?;
    // It finds this when it goes on, before it can have heard of anything.
    let write = world.members[leads].ask(Question::Write)?;
    world.members[leads].process.resume()?;
    is_fenced(world, leads, write).await?;
    world.shared_by(3).await?;
    follows(world, leads, &fence).await?;
    let after = world.map().await?;
    assert_eq!(after.uid(), meanwhile.uid());
    assert!(after.version() > meanwhile.version(), "no map is lost");
    Ok(())
}

async fn clocks_jump(world: &mut World) -> Done {
    const HOUR: i64 = 3_600;
    let clocks: Vec<_> = (0..3).map(|_| Clock::new()).collect::<Result<_, _>>()?;
    for (n, clock) in clocks.iter().enumerate() {
        world.add_with(&format!("n{}", n + 1), false, Some(clock)).await?;
    }
    world.shared_by(3).await?;
    let (leads, fence) = world.leader().await?;
    let before = world.map().await?;
    // A view may come before the event that tells of it.
    let stable = |kind: &EventKind| {
        let stable = ClusterState::MultiNode(Balance::Stable);
        matches!(kind, EventKind::ClusterStateChanged { to, .. } if *to == stable)
    };
    let all_told = |world: &mut World| {
        let told = |m: &Member| m.events().last().is_some_and(|(_, event)| stable(&event.kind));
        world.members.iter().all(told).then_some(())
    };
    world.until("all is told", PATIENCE, all_told).await?;
    let events: Vec<_> = world.members.iter().map(|member| member.events().count()).collect();
    let window = world.leader_ttl().max(world.detection()) + SLACK;
    for sign in [1, -1] {
        clocks[leads].jump(sign * HOUR)?;
        clocks[(leads + 1) % 3].jump(-sign * HOUR)?;
        let (moved, right) = (wall(world, leads).await?, wall(world, (leads + 2) % 3).await?);
        assert!((moved - right - sign * HOUR).abs() < 60, "the clock did not move");
        let nothing = |world: &World| {
            let counts = world.members.iter().map(|member| member.events().count());
            counts.eq(events.iter().copied())
        };
        world.throughout("nothing happens", window, nothing).await?;
    }
    let (still, under) = world.leader().await?;
    assert_eq!((still, under), (leads, fence));
    assert_eq!(Arc::as_ref(&world.map().await?), Arc::as_ref(&before));
    Ok(())
}

async fn wall(world: &mut World, member: usize) -> Done<i64> {
    match world.ask(member, Question::Wall).await? {
        Answer::Wall(seconds) => Ok(i64::try_from(seconds)?),
        other => Err(format!("no time: {other:?}").into()),
    }
}
