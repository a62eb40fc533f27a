//! G: two coordinators by misconfiguration: one looks for its lease where another cluster has it.

use std::time::Duration;

use coord::cluster::{EventKind, TableMismatch};
use coord::session::Leases;
use coord::{
    Binding, Claim, ClaimRequest, ClusterName, Fence, Incarnation, LeaseName, NodeId, ShardCount,
    ShardMap, TableHeader, TableName,
};
use libtest_mimic::Trial;

use super::backends;
use super::driver::{Done, PATIENCE, World, connect, on_each, quick};
use super::leaders::taken_over;
use super::member::table;
use super::said::{Call, Outcome, Said};

pub(crate) fn trials() -> Vec<Trial> {
    let name = "g_a_second_coordinator_has_another_lease";
    let mut trials = on_each(backends::all(), name, quick, is_misled);
    trials.extend(on_each(backends::all(), "g_tables_are_bound_anew", quick, are_bound_anew));
    trials
}

/// The cluster whose leases are mistaken for this one's.
fn other(world: &World) -> Done<ClusterName> {
    Ok(ClusterName::new(format!("{}-other", world.cluster))?)
}

/// One of them, that leads by its own lease, is told that the tables obey this one.
async fn is_told(world: &mut World, members: &[usize], by: &Fence) -> Done {
    let right = TableMismatch::OtherLease(Binding::of(by));
    let told = |kind: &EventKind| {
        let EventKind::TableRefused { table, misfit, .. } = kind else { return false };
        *table == TableName::cluster() && *misfit == right
    };
    let is_told = |world: &mut World| {
        let any = |n: &usize| world.members[*n].events().any(|(_, event)| told(&event.kind));
        members.iter().any(any).then_some(())
    };
    world.until("it is told which lease the tables obey", PATIENCE, is_told).await
}

/// The calls of a member that had an effect on a table.
fn effects(world: &World, member: usize) -> impl Iterator<Item = &Call> {
    world.members[member].lines.iter().filter_map(|line| match &line.said {
        Said::Call(call)
            if call.outcome == Outcome::Done
                && matches!(call.operation.as_str(), "claim" | "publish") =>
        {
            Some(call)
        }
        _ => None,
    })
}

fn is_of(map: &ShardMap, fence: &Fence) -> bool {
    map.writer().is_some_and(|writer| writer.origin == fence.origin)
}

async fn is_misled(world: &mut World) -> Done {
    world.start(2).await?;
    let (leads, fence) = world.leader().await?;
    let other = other(world)?;
    let misled = world.add_misled("m1", &other).await?;
    is_told(world, &[misled], &fence).await?;
    // It is a node like any other: it hosts what the right leader gives it, and is no leader to itself for
    // longer than it takes to be told.
    world.shared_by_but(3, &[misled]).await?;
    world.add("n3").await?;
    world.shared_by_but(4, &[misled]).await?;
    assert_eq!(world.leader().await?, (leads, fence.clone()), "it leads on");
    // Nor does it take over.
    let gone = world.kill(leads)?;
    let next = taken_over(world, &fence, gone).await?;
    assert_ne!(next, misled);
    world.shared_by_but(3, &[misled]).await?;
    if let Some(call) = effects(world, misled).next() {
        return Err(format!("the misled one has written: {call:?}").into());
    }
    let maps = world.seen_maps();
    let alien = maps.iter().find(|map| map.writer().is_some() && !is_of(map, &fence));
    match alien {
        Some(map) => Err(format!("version {} is of {:?}", map.version(), map.writer()).into()),
        None => Ok(()),
    }
}

/// An operator moves the tables to the other lease: from then on its holder writes, and the former leader is
/// told.
async fn are_bound_anew(world: &mut World) -> Done {
    world.start(2).await?;
    let (_, former) = world.leader().await?;
    let other = other(world)?;
    let fence = rebind(world, &former, &other).await?;
    assert_ne!(fence.origin, former.origin);
    let heir = world.add_misled("m1", &other).await?;
    world.shared_by_but(3, &[0, 1]).await?;
    is_told(world, &[0, 1], &fence).await?;
    world.add_misled("m2", &other).await?;
    world.shared_by_but(4, &[0, 1]).await?;
    let map = world.map().await?;
    if !is_of(&map, &fence) || effects(world, heir).next().is_none() {
        return Err(format!("version {} is of {:?}", map.version(), map.writer()).into());
    }
    Ok(())
}

/// Binds all tables to the other cluster's lease, by a term of it that is greater than the former's.
async fn rebind(world: &World, former: &Fence, other: &ClusterName) -> Done<Fence> {
    let leases = connect(&world.store.url(&world.server, other)).await?;
    let fence = loop {
        let node = NodeId::new("operator")?;
        let session = Leases::new(leases.lease(), node, Incarnation::random());
        let session = session.named(LeaseName::leader()).ttl(Duration::from_secs(10));
        let guard = session.acquire().await?;
        let fence = guard.fence();
        if fence.term > former.term {
            let headers = [
                (TableName::cluster(), TableHeader::new(ShardCount::ONE)),
                (table(), TableHeader::default()),
            ];
            for (table, header) in headers {
                let claim = ClaimRequest::new(table, fence.clone(), header);
                let claim = claim.with_rebind_from(Binding::of(former));
                match world.backend.placement().claim(&claim).await? {
                    Claim::Claimed(_) => {}
                    refused => return Err(format!("the operator's claim: {refused:?}").into()),
                }
            }
            guard.release().await?;
            break fence;
        }
        guard.release().await?;
    };
    Ok(fence)
}
