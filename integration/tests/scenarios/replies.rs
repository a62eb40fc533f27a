//! K: a request was applied, and its reply is lost.

use std::collections::BTreeSet;

use coord::session::{LeaseGuard, Leases};
use coord::{Backend, Incarnation, LeaseEvent, LeaseName, NodeId, Release, Watched, Watcher};
use coord_integration::faults::Request;
use futures::FutureExt as _;
use libtest_mimic::Trial;

use super::backends::{self, Store};
use super::driver::{Client, Done, PATIENCE, World, on_each, on_each_found, quick};
use super::member::table;
use super::said::{Outcome, Said};

pub(crate) fn trials() -> Vec<Trial> {
    let single = || backends::all().into_iter().filter(|store| store.servers == 1);
    let mut trials = on_each_found(
        single(),
        Store::find_open,
        "k_replies_about_a_lease_are_lost",
        quick,
        of_a_lease,
    );
    trials.extend(on_each_found(
        single(),
        Store::find_open,
        "k_the_reply_to_a_publish_is_lost",
        quick,
        of_a_publish,
    ));
    let encrypted = single().filter(|store| !store.shows_keys());
    trials.extend(on_each(encrypted, "k_the_reply_to_a_renewal_is_lost", quick, of_a_renewal));
    trials
}

async fn of_a_lease(world: &mut World) -> Done {
    let name = LeaseName::new("jobs")?;
    let mut watcher = Watcher::<LeaseEvent>::lease(world.backend.lease(), name.clone());
    let client = world.client().await?;
    let leases = Leases::new(client.backend.lease(), NodeId::new("n1")?, Incarnation::random());
    let about = Request::With(world.store.lease(&world.cluster, "jobs"));
    let store = world.backend.lease();

    client.proxy.lose_reply(about.clone());
    let session = leases.named(name.clone()).ttl(world.settings.leader_ttl).build()?;
    let guard = tokio::time::timeout(PATIENCE, session.acquire()).await??;
    assert_eq!(client.proxy.replies_lost(), 1, "the reply to the acquire");
    let fence = guard.fence();
    let stored = async || store.get(&name).await.map(|record| record.map(|record| record.fence()));
    assert_eq!(stored().await?, Some(fence.clone()), "the one grant is its own");

    renewal_survives(world, &client, &guard).await?;
    assert!(guard.is_held());
    assert_eq!(stored().await?, Some(fence.clone()), "it is still the same grant");

    client.proxy.lose_reply(about);
    let released = tokio::time::timeout(PATIENCE, guard.release()).await??;
    assert!(matches!(released, Release::Released | Release::NotHeld));
    assert_eq!(client.proxy.replies_lost(), 3, "the reply to the release");
    assert_eq!(stored().await?, None);

    let mut fences = BTreeSet::new();
    while let Some(watched) = watcher.next().now_or_never() {
        if let Watched::Event(LeaseEvent::Snapshot(Some(record)) | LeaseEvent::Changed(record)) =
            watched
        {
            fences.insert((record.term, record.holder.attempt));
        }
    }
    assert_eq!(fences, BTreeSet::from([(fence.term, fence.attempt)]), "there was no second grant");
    Ok(())
}

/// Loses the reply to the next renewal, and waits until one is answered all the same.
async fn renewal_survives(world: &mut World, client: &Client, guard: &LeaseGuard) -> Done {
    // Renewals of etcd name no key.
    client.proxy.lose_reply(Request::Any);
    let lost = client.proxy.replies_lost() + 1;
    let renewed = |world: &mut World| {
        let from = guard.deadline().minus(world.leader_ttl());
        let is_done = |line: &super::said::Line| match &line.said {
            Said::Call(call) => call.operation == "renew" && call.outcome == Outcome::Done,
            _ => false,
        };
        let again = world.lines().iter().any(|line| line.at() > from && is_done(line));
        (client.proxy.replies_lost() == lost && again).then_some(())
    };
    world.until("it is renewed although a reply is lost", PATIENCE, renewed).await
}

/// The same where nobody can look into the requests: nothing but renewals is under way.
async fn of_a_renewal(world: &mut World) -> Done {
    let name = LeaseName::new("jobs")?;
    let client = world.client().await?;
    let leases = Leases::new(client.backend.lease(), NodeId::new("n1")?, Incarnation::random());
    let session = leases.named(name.clone()).ttl(world.settings.leader_ttl).build()?;
    let guard = tokio::time::timeout(PATIENCE, session.acquire()).await??;
    let fence = guard.fence();
    renewal_survives(world, &client, &guard).await?;
    assert!(guard.is_held());
    let stored = world.backend.lease().get(&name).await?.map(|record| record.fence());
    assert_eq!(stored, Some(fence), "it is still the same grant");
    tokio::time::timeout(PATIENCE, guard.release()).await??;
    Ok(())
}

async fn of_a_publish(world: &mut World) -> Done {
    world.start(3).await?;
    let (leads, fence) = world.leader().await?;
    let about = Request::With(world.store.head(&world.cluster, &table()));
    world.members[leads].proxy.lose_reply(about);
    world.add("n4").await?;
    world.shared_by(4).await?;
    assert_eq!(world.members[leads].proxy.replies_lost(), 1, "the reply to the publish");
    let refused = world.members[leads].lines.iter().find(|line| match &line.said {
        Said::Call(call) => matches!(call.outcome, Outcome::Conflict | Outcome::Fenced),
        _ => false,
    });
    if let Some(line) = refused {
        return Err(format!("its own write refused it: {:?}", line.said).into());
    }
    assert_eq!(world.leader().await?, (leads, fence), "it leads on");
    Ok(())
}
