//! Core's watcher over the backend's watches: a cut loses nothing.

use std::time::Duration;

use coord_core::watch::{Watchable, Watched, Watcher};
use coord_core::{Declared, Heartbeat, Replace, Ttl};
use tokio::time::{Instant, timeout_at};

use super::placement::{claim, fence, next_map, published, table_name};
use crate::case::{Done, Stop, cases, ensure, want};
use crate::cx::{Cx, lease_name, node, release};
use crate::faults::Fault;
use crate::view::{LeaseView, NodesView, TableView, View};

cases! { "watch":
    /// Nodes join, change, leave and are replaced while the store is away: the watcher tells that it is
    /// away once, and afterwards every change, the departures too.
    a_watcher_of_nodes_outlives_a_cut => ["watcher", "node-watch", "scenario-l", "P37"];
    /// A lease changes hands while the store is away: the watcher tells who holds it by then.
    a_watcher_of_a_lease_outlives_a_cut => ["watcher", "scenario-l", "P37"];
    /// Maps are published while the store is away: the watcher tells the newest.
    a_watcher_of_a_table_outlives_a_cut => ["watcher", "table-watch", "scenario-l", "P37"];
}

/// The watcher's longest pause before it subscribes again, and some more.
const BACK_OFF: Duration = Duration::from_secs(8);

/// A watcher and what it has told.
struct Followed<V: View>
where
    V::Event: Watchable,
{
    watcher: Watcher<V::Event>,
    view: V,
    away: usize,
}

impl<V: View + Send> Followed<V>
where
    V::Event: Watchable,
{
    fn new(watcher: Watcher<V::Event>) -> Self {
        Self { watcher, view: V::default(), away: 0 }
    }

    /// Follows until all is as wanted.
    async fn until(
        &mut self,
        what: &str,
        limit: Duration,
        wanted: impl Fn(&Self) -> bool + Send,
    ) -> Done {
        let end = Instant::now() + limit;
        while !wanted(self) {
            match timeout_at(end, self.watcher.next()).await {
                Ok(Watched::Event(event)) => self.view.apply(event)?,
                Ok(Watched::Disconnected(_)) => self.away += 1,
                Ok(_) => {}
                Err(_) => {
                    let view = &self.view;
                    let text = format!("not within {limit:?}: {what}; the watcher told {view:?}");
                    return Err(Stop::Failed(text));
                }
            }
        }
        Ok(())
    }
}

async fn a_watcher_of_nodes_outlives_a_cut(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let faults = other.faults(&[Fault::Cut])?;
    // Long enough for none of them to run out meanwhile.
    let ttl = Ttl::from_secs(300)?;
    let infos = [node("node-1")?, node("node-2")?, node("node-3")?];
    let mut held = Vec::new();
    for info in &infos {
        let outcome = client.discovery.register(info, ttl, Replace::No).await?;
        held.push(want!(outcome, coord_core::Register::Registered(held) => held, "it joins"));
    }
    let mut followed: Followed<NodesView> = Followed::new(Watcher::nodes(other.discovery.clone()));
    followed.until("all are told", cx.soon(), |it| it.view.nodes.len() == 3).await?;
    faults.inject(Fault::Cut).await?;
    followed.until("the store is away", cx.soon(), |it| it.away > 0).await?;
    client.discovery.deregister(&held[0]).await?;
    let said = infos[1].clone().with_declared(Declared::Draining);
    let outcome = client.discovery.heartbeat(&held[1], &said).await?;
    want!(outcome, Heartbeat::Renewed(_) => (), "it changes");
    let next = node("node-3")?;
    let replaced = client.discovery.register(&next, ttl, Replace::Yes).await?;
    want!(replaced, coord_core::Register::Registered(_) => (), "it is replaced");
    let none_gone = followed.view.gone.is_empty();
    ensure!(none_gone, "silence made {:?} go", followed.view.gone);
    faults.heal().await?;
    let right = [&said, &next];
    let converged =
        |it: &Followed<NodesView>| it.view.nodes.values().map(|record| &record.info).eq(right);
    followed.until("all changes are told", cx.soon() + BACK_OFF, converged).await?;
    let (away, gone) = (followed.away, &followed.view.gone);
    ensure!(away == 1, "one absence was told {away} times");
    let left = gone.iter().any(|(id, run, _)| *id == infos[0].id && *run == infos[0].incarnation);
    ensure!(left, "that node-1 left was not told: {gone:?}");
    Ok(())
}

async fn a_watcher_of_a_lease_outlives_a_cut(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let faults = other.faults(&[Fault::Cut])?;
    let lease = lease_name("jobs")?;
    let first = cx.grant(&client, &lease, "node-1").await?;
    let watcher = Watcher::lease(other.lease.clone(), lease.clone());
    let mut followed: Followed<LeaseView> = Followed::new(watcher);
    followed.until("node-1 holds it", cx.soon(), |it| it.view.now.is_some()).await?;
    faults.inject(Fault::Cut).await?;
    followed.until("the store is away", cx.soon(), |it| it.away > 0).await?;
    release(&client, &first).await?;
    // It may run out before the watcher is back, so that it has to be asked for again.
    let outcome =
        coord_core::AcquireRequest::new(lease, crate::cx::holder("node-2")?, Ttl::from_secs(300)?);
    let second = crate::cx::won(client.lease.try_acquire(&outcome).await?)?.fence();
    faults.heal().await?;
    let told = |it: &Followed<LeaseView>| {
        it.view.now.as_ref().is_some_and(|record| record.fence() == second)
    };
    followed.until("node-2 holds it", cx.soon() + BACK_OFF, told).await
}

async fn a_watcher_of_a_table_outlives_a_cut(cx: &Cx) -> Done {
    let (client, other) = (cx.open().await?, cx.open().await?);
    let faults = other.faults(&[Fault::Cut])?;
    let (name, fence) = (table_name("orders")?, fence(5)?);
    let mut map = claim(&client, &name, &fence).await?.map;
    let watcher = Watcher::placement(other.placement.clone(), name.clone());
    let mut followed: Followed<TableView> = Followed::new(watcher);
    followed.until("the table is there", cx.soon(), |it| it.view.map.is_some()).await?;
    faults.inject(Fault::Cut).await?;
    followed.until("the store is away", cx.soon(), |it| it.away > 0).await?;
    for tag in 1..=3 {
        map = next_map(&map, &fence, tag)?;
        published(&client, &name, &map).await?;
    }
    faults.heal().await?;
    let newest = |it: &Followed<TableView>| it.view.map.as_ref() == Some(&map);
    followed.until("the newest map is told", cx.soon() + BACK_OFF, newest).await
}
