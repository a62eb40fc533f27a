//! Events that are lost.

use std::time::Duration;

use coord_core::{Backend, LeaseEvent, NodeEvent, NodeId, NodeInfo, Replace, Ttl};
use coord_integration::servers::Redis;
use futures::StreamExt;
use futures::stream::BoxStream;
use libtest_mimic::Trial;
use tokio::time::timeout;

use super::setup::{Done, LONG, acquire, ensure, on, open};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        on("lost_events_are_made_up_for_by_a_snapshot", Redis::new(), lost_events),
        on("what_an_operator_deletes_is_seen", Redis::new(), deleted),
        on("what_nobody_renews_expires_for_all_that_watch", Redis::new(), expired),
    ]
}

async fn lost_events(redis: Redis) -> Done {
    let server = redis.start()?;
    let (backend, other) = (open(&server, "").await?, open(&server, "").await?);
    let grant = acquire(&backend, "jobs", 120).await?;
    let mut watch = other.lease().watch(&grant.lease);
    let first = timeout(LONG, watch.next()).await?.ok_or("no snapshot")??;
    ensure(matches!(first, LeaseEvent::Snapshot(Some(_))), &first)?;
    for lose in
        [&["DEL", "coord:{orders}:events"][..], &["XTRIM", "coord:{orders}:events", "MAXLEN", "0"]]
    {
        // So that there is something to be lost.
        acquire(&backend, "other", 1).await?;
        server.nodes()[0].ask(lose)?;
        let event = timeout(LONG, watch.next()).await?.ok_or("no event")??;
        ensure(matches!(event, LeaseEvent::Snapshot(Some(_))), &event)?;
        tokio::time::sleep(Duration::from_millis(1_100)).await;
    }
    backend.lease().release(&grant).await?;
    loop {
        match timeout(LONG, watch.next()).await?.ok_or("no event")?? {
            LeaseEvent::Vacant | LeaseEvent::Snapshot(None) => return Ok(()),
            LeaseEvent::Snapshot(Some(_)) => {}
            other => return Err(format!("{other:?}").into()),
        }
    }
}

async fn deleted(redis: Redis) -> Done {
    let server = redis.start()?;
    let backend = open(&server, "").await?;
    let grant = acquire(&backend, "jobs", 120).await?;
    let mut watch = backend.lease().watch(&grant.lease);
    timeout(LONG, watch.next()).await?.ok_or("no snapshot")??;
    server.nodes()[0].ask(&["HDEL", "coord:{orders}:leases", "jobs"])?;
    let event = timeout(LONG, watch.next()).await?.ok_or("no event")??;
    ensure(event == LeaseEvent::Vacant, event)
}

async fn expired(redis: Redis) -> Done {
    let server = redis.start()?;
    let (one, two) = (open(&server, "").await?, open(&server, "").await?);
    let node = NodeInfo::new(NodeId::new("node-1")?, "10.0.0.1:80".parse()?);
    let mut watches = [one.discovery().watch(), two.discovery().watch()];
    for watch in &mut watches {
        let first = timeout(LONG, watch.next()).await?.ok_or("no snapshot")??;
        ensure(first == NodeEvent::Snapshot(Vec::new()), first)?;
    }
    let ttl = Ttl::from_secs(1)?;
    let _registered = two.discovery().register(&node, ttl, Replace::No).await?;
    // One that is read late need not see what came and went meanwhile.
    let [first, second] = watches;
    let (first, second) = tokio::join!(comes_and_goes(first), comes_and_goes(second));
    for gone in [first?, second?] {
        let incarnation = node.incarnation;
        ensure(
            gone == NodeEvent::Expired { node: node.id.clone(), incarnation, judged: true },
            gone,
        )?;
    }
    // And nothing of it is left.
    let left = server.nodes()[0].ask(&["HLEN", "coord:{orders}:nodes"])?;
    ensure(left.trim() == "0", left)
}

async fn comes_and_goes(
    mut watch: BoxStream<'static, coord_core::Result<NodeEvent>>,
) -> Done<NodeEvent> {
    let joined = timeout(LONG, watch.next()).await?.ok_or("no event")??;
    ensure(matches!(joined, NodeEvent::Joined(_)), joined)?;
    Ok(timeout(LONG, watch.next()).await?.ok_or("no event")??)
}
