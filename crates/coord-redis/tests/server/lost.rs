//! A server that is emptied under processes that run, and one whose clock was fast for a while.

use std::sync::Arc;
use std::time::Duration;

use coord_core::{
    Acquire, Address, Backend, Effect, ErrorKind, Grant, HealthStatus, Heartbeat, Incarnation,
    NodeEvent, NodeId, NodeInfo, Register, Registration, Renew, Replace, TableName, Ttl,
};
use coord_integration::faults::Clock;
use coord_integration::servers::Redis;
use coord_redis::RedisBackend;
use futures::StreamExt;
use libtest_mimic::Trial;
use tokio::time::{Instant, timeout};

use super::setup::{Done, LONG, acquire, ask, ensure, on, on_clock, open, said, until};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        on("an_emptied_server_keeps_its_identity", Redis::new(), emptied),
        on("a_server_that_is_another_one_is_refused", Redis::new(), another),
        on("an_end_that_is_too_far_away_counts_from_now", Redis::new(), far_end),
        // Debian's Redis can't run under a clock that is moved.
        on_clock("a_clock_that_was_fast_keeps_nobody_alive", valkey(), fast_clock),
    ]
}

fn valkey() -> Redis {
    Redis::new().with_version("9.1.2")
}

fn node() -> Done<NodeInfo> {
    Ok(NodeInfo::new(NodeId::new("node-1")?, Address::new("127.0.0.1:1")?))
}

async fn join(backend: &RedisBackend, node: &NodeInfo, ttl: u64) -> Done<Registration> {
    match backend.discovery().register(node, Ttl::from_secs(ttl)?, Replace::No).await? {
        Register::Registered(held) => Ok(held),
        other => Err(format!("not registered: {other:?}").into()),
    }
}

const EMPTY: [&[&str]; 2] = [
    &["FLUSHALL"],
    &[
        "DEL",
        "coord:{orders}:id",
        "coord:{orders}:clock",
        "coord:{orders}:nodes",
        "coord:{orders}:leases",
    ],
];

/// Whoever runs goes on with the same identity, which a process that comes later finds.
async fn emptied(redis: Redis) -> Done {
    let server = redis.start()?;
    let (one, two) = (open(&server, "").await?, open(&server, "").await?);
    for empty in EMPTY {
        let (info, grant) = (node()?, acquire(&one, "jobs", 60).await?);
        let held = join(&one, &info, 60).await?;
        server.nodes()[0].ask(empty)?;
        let (status, detail) = said(&two, "identity").await?;
        ensure(status == HealthStatus::Warning && detail.contains("emptied"), detail)?;
        let beaten = one.discovery().heartbeat(&held, &info).await?;
        ensure(beaten == Heartbeat::Gone, &beaten)?;
        let renewed = one.lease().renew(&grant).await?;
        ensure(renewed == Renew::Lost(None), renewed)?;
        let third = open(&server, "").await?;
        ensure(third.info().origin == one.info().origin, "another identity")?;
        let next = acquire(&two, "jobs", 60).await?;
        ensure(next.term > grant.term, (next.term, grant.term))?;
        ensure(third.lease().get(&next.lease).await?.is_some(), "the third sees no lease")?;
        two.lease().release(&next).await?;
    }
    Ok(())
}

/// A process that starts first makes it another store: the earlier handles do nothing there and say why.
async fn another(redis: Redis) -> Done {
    let server = redis.start()?;
    let old = open(&server, "").await?;
    let (info, grant) = (node()?, acquire(&old, "jobs", 60).await?);
    let held = join(&old, &info, 60).await?;
    server.nodes()[0].ask(&["FLUSHALL"])?;
    let new = open(&server, "").await?;
    ensure(new.info().origin != old.info().origin, "the same identity")?;
    let table = TableName::new("orders")?;
    let refusals = [
        old.discovery().heartbeat(&held, &info).await.err(),
        old.lease().renew(&grant).await.err(),
        old.lease().try_acquire(&ask("jobs", 60)?).await.err(),
        old.lease().get(&grant.lease).await.err(),
        old.discovery().nodes().await.err(),
        old.placement().load(&table).await.err(),
        old.placement().tables().await.err(),
    ];
    for refusal in refusals {
        let error = refusal.ok_or("it was done in another store")?;
        ensure(error.kind() == ErrorKind::Misconfigured, &error)?;
        ensure(error.effect() == Effect::None, &error)?;
        ensure(error.to_string().contains("open it again"), &error)?;
    }
    let mut watch = old.discovery().watch();
    let first = timeout(LONG, watch.next()).await?.ok_or("no end")?;
    let error = first.expect_err("a watch of another store");
    ensure(error.kind() == ErrorKind::Misconfigured, &error)?;
    let mut watch = old.placement().watch(&table);
    let first = timeout(LONG, watch.next()).await?.ok_or("no end")?;
    let error = first.expect_err("a watch of another store's table");
    ensure(error.kind() == ErrorKind::Misconfigured, &error)?;
    let (status, detail) = said(&old, "identity").await?;
    ensure(status == HealthStatus::Bad && detail.contains("another store"), detail)?;
    let won: Grant = acquire(&new, "jobs", 60).await?;
    new.lease().release(&won).await?;
    Ok(())
}

/// As a fast clock leaves them behind, written by hand.
async fn far_end(redis: Redis) -> Done {
    let server = redis.start()?;
    let backend = open(&server, "").await?;
    let (info, grant) = (node()?, acquire(&backend, "jobs", 2).await?);
    join(&backend, &info, 2).await?;
    let mut watch = backend.discovery().watch();
    timeout(LONG, watch.next()).await?.ok_or("no snapshot")??;
    // In the year 2100.
    let far = "4102444800000000";
    server.nodes()[0].ask(&["ZADD", "coord:{orders}:lease-ends", far, "jobs"])?;
    server.nodes()[0].ask(&["ZADD", "coord:{orders}:node-ends", far, "node-1"])?;
    let seen = Instant::now();
    let record = backend.lease().get(&grant.lease).await?.ok_or("not held")?;
    let left = record.may_expire_in.ok_or("no time left")?;
    ensure(left <= grant.ttl.get(), left)?;
    let listed = backend.discovery().nodes().await?;
    let left = listed.first().and_then(|record| record.may_expire_in).ok_or("no node")?;
    ensure(left <= grant.ttl.get(), left)?;
    until("another gets the lease", || async {
        match backend.lease().try_acquire(&ask("jobs", 60)?).await? {
            Acquire::Acquired(_) => Ok(Some(())),
            _ => Ok(None),
        }
    })
    .await?;
    let took = seen.elapsed();
    ensure(took + Duration::from_millis(100) >= grant.ttl.get(), took)?;
    let incarnation = info.incarnation;
    let gone = timeout(LONG, watch.next()).await?.ok_or("no event")??;
    ensure(gone == NodeEvent::Expired { node: info.id, incarnation, judged: true }, gone)
}

/// Eight hours fast for a moment, in which all is renewed; then nobody renews any more.
async fn fast_clock(redis: Redis, clock: Arc<Clock>) -> Done {
    let server = redis.start()?;
    let backend = open(&server, "").await?;
    let mut info = node()?;
    info = info.with_incarnation(Incarnation::random());
    let grant = acquire(&backend, "jobs", 3).await?;
    let held = join(&backend, &info, 3).await?;
    clock.jump(8 * 3_600)?;
    // What was there has ended by that clock, so all begins anew under it.
    let _ =
        (backend.lease().renew(&grant).await?, backend.discovery().heartbeat(&held, &info).await?);
    let grant = acquire(&backend, "jobs", 3).await?;
    join(&backend, &info, 3).await?;
    clock.jump(0)?;
    until("another gets the lease", || async {
        match backend.lease().try_acquire(&ask("jobs", 60)?).await? {
            Acquire::Acquired(next) => Ok(Some(next)),
            Acquire::Held(record) => {
                ensure(record.may_expire_in <= Some(grant.ttl.get()), record)?;
                Ok(None)
            }
            other => Err(format!("{other:?}").into()),
        }
    })
    .await?;
    until("the node is gone", || async {
        Ok(backend.discovery().nodes().await?.is_empty().then_some(()))
    })
    .await
}
