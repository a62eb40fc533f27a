//! Replicas, sentinels, clusters.

use coord_core::{Backend, Consistency, Effect, ErrorKind, Grant, Publish, Renew};
use coord_integration::servers::{Redis, Server};
use coord_redis::RedisBackend;
use libtest_mimic::Trial;

use super::maps::shuffled;
use super::setup::{
    Done, acquire, acquire_at_last, ask, by_sentinels, claim, ensure, on, open, open_url, orders,
    said, until,
};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        on("a_promoted_replica_repeats_no_term", Redis::new().with_sentinels(1, 3), promoted),
        on("a_lost_grant_is_granted_under_a_greater_term", Redis::new(), lost_grant),
        on("sentinels_are_told_from_servers", Redis::new().with_sentinels(1, 3), sentinels),
        on("a_master_that_became_a_replica_is_left", Redis::new(), demoted),
        on("a_cluster_serves_every_slot", Redis::new().with_cluster(3, 0), cluster),
        on("a_cluster_outlives_a_master", Redis::new().with_cluster(3, 1), cluster_failover),
    ]
}

/// Renews until the store answers again; a failure is no loss.
async fn renewed(backend: &RedisBackend, grant: &Grant) -> Done<Renew> {
    until("the store answers", || async {
        match backend.lease().renew(grant).await {
            Ok(renewed) => Ok(Some(renewed)),
            Err(error) if error.is_retryable() => Ok(None),
            Err(error) => Err(error.into()),
        }
    })
    .await
}

async fn promoted(redis: Redis) -> Done {
    let server = redis.start()?;
    // Two confirmed writes, so that the replica has them: what a failover may lose is not tried here.
    let backend = open_url(&by_sentinels(&server, "&min_replicas=1")).await?;
    ensure(backend.info().guarantees.consistency == Consistency::BestEffort, backend.info())?;
    let grant = acquire(&backend, "jobs", 120).await?;
    let table = claim(&backend, &grant.fence(), 1_000).await?;
    let map = shuffled(&table.map, &grant.fence(), 1, 1_000);
    let published =
        backend.placement().publish(&orders()?, &grant.fence(), table.map.version(), &map).await?;
    ensure(published == Publish::Published(map.version()), published)?;
    server.nodes()[0].kill()?;
    // There is no replica left to confirm anything.
    let survivor = until("a replica is promoted", || async {
        Ok(open_url(&by_sentinels(&server, "")).await.ok())
    })
    .await?;
    let again = renewed(&survivor, &grant).await?;
    ensure(matches!(again, Renew::Renewed(_)), again)?;
    let error = backend.lease().renew(&grant).await.expect_err("no replica confirms");
    ensure(error.kind() == ErrorKind::Unavailable && error.effect() == Effect::Unknown, &error)?;
    survivor.lease().release(&grant).await?;
    let next = acquire(&survivor, "jobs", 120).await?;
    ensure(next.term > grant.term, (next.term, grant.term))?;
    // What the former leader had prepared is refused, also before the table is claimed.
    let late = shuffled(&map, &grant.fence(), 2, 1_000);
    let refused =
        survivor.placement().publish(&orders()?, &grant.fence(), map.version(), &late).await?;
    ensure(matches!(refused, Publish::Fenced(_)), refused)?;
    let claimed = claim(&survivor, &next.fence(), 1_000).await?;
    ensure(*claimed.map == *map, "the map is not the one that was published")
}

/// Two holders, by a failover that loses a grant: the terms tell them apart.
async fn lost_grant(redis: Redis) -> Done {
    let (old, new) = (redis.start()?, redis.start()?);
    let backend = open(&old, "").await?;
    // The other one is what a replica is that never got to hear of the grant.
    let other = open(&new, "").await?;
    let grant = acquire(&backend, "jobs", 60).await?;
    let next = acquire(&other, "jobs", 60).await?;
    ensure(next.term > grant.term, (next.term, grant.term))
}

async fn sentinels(redis: Redis) -> Done {
    let server = redis.start()?;
    let sentinels = server.sentinels().join(",");
    let error = open_url(&format!("redis://{sentinels}/orders")).await.expect_err("sentinels");
    ensure(error.kind() == ErrorKind::Misconfigured, &error)?;
    ensure(error.to_string().contains("option master"), &error)?;
    let url = format!("redis://{sentinels}/orders?master=nobody");
    let error = open_url(&url).await.expect_err("another name");
    ensure(error.kind() == ErrorKind::Misconfigured, &error)?;
    ensure(error.to_string().contains("\"nobody\""), &error)?;
    let port = server.nodes()[0].port();
    let url = format!("redis://127.0.0.1:{port}/orders?master=coord");
    let error = open_url(&url).await.expect_err("no sentinel");
    ensure(error.kind() == ErrorKind::Misconfigured, &error)?;
    ensure(error.to_string().contains("no sentinel"), &error)?;
    let port = server.nodes()[1].port();
    let error = open_url(&format!("redis://127.0.0.1:{port}/orders")).await.expect_err("replica");
    ensure(error.to_string().contains("is a replica"), &error)?;
    let backend = open_url(&by_sentinels(&server, "")).await?;
    let (_, detail) = said(&backend, "reachable").await?;
    ensure(detail.contains("sentinels"), detail)
}

async fn demoted(redis: Redis) -> Done {
    let (one, two) = (redis.start()?, redis.start()?);
    let port = |server: &Server| server.nodes()[0].port().to_string();
    let url = format!("redis://{},{}/orders", one.addresses()[0], two.addresses()[0]);
    two.nodes()[0].ask(&["REPLICAOF", "127.0.0.1", &port(&one)])?;
    let linked = || async {
        let said = two.nodes()[0].ask(&["INFO", "replication"])?;
        Ok(said.contains("master_link_status:up").then_some(()))
    };
    until("the replica follows", linked).await?;
    let backend = open_url(&url).await?;
    let grant = acquire(&backend, "jobs", 120).await?;
    let copied = || async {
        let said = two.nodes()[0].ask(&["HGET", "coord:{orders}:leases", "jobs"])?;
        Ok(said.contains("term").then_some(()))
    };
    until("the replica has the grant", copied).await?;
    // As a failover does it; the connections to the former master stay.
    two.nodes()[0].ask(&["REPLICAOF", "NO", "ONE"])?;
    one.nodes()[0].ask(&["REPLICAOF", "127.0.0.1", &port(&two)])?;
    let again = renewed(&backend, &grant).await?;
    ensure(matches!(again, Renew::Renewed(_)), again)?;
    let next = acquire(&backend, "other", 60).await?;
    ensure(next.term > grant.term, (next.term, grant.term))?;
    let alone = open_url(&format!("redis://{}/orders", one.addresses()[0])).await;
    let error = alone.expect_err("a replica alone");
    ensure(error.kind() == ErrorKind::Unavailable, error)?;
    // It comes back as a master: then nobody can tell which one is right.
    one.nodes()[0].ask(&["REPLICAOF", "NO", "ONE"])?;
    let error = open_url(&url).await.expect_err("two masters");
    ensure(error.kind() == ErrorKind::Misconfigured, &error)?;
    ensure(error.to_string().contains("two of the hosts"), error)
}

async fn cluster(redis: Redis) -> Done {
    let server = redis.start()?;
    let (status, detail) = said(&open(&server, "").await?, "reachable").await?;
    ensure(detail.contains("hash slot"), (status, detail))?;
    // These three are each in the slots of another master; any node leads to all of them.
    for name in ["a", "b", "c"] {
        let url = format!("redis://{}/{name}", server.addresses()[0]);
        let backend = open_url(&url).await?;
        let grant = acquire(&backend, "jobs", 60).await?;
        claim(&backend, &grant.fence(), 8).await?;
        let other = open_url(&url).await?;
        let held = other.lease().get(&grant.lease).await?;
        ensure(held.is_some_and(|held| held.term == grant.term), "not held")?;
    }
    let error = open(&server, "?db=1").await.expect_err("one database");
    ensure(error.kind() == ErrorKind::Invalid, error)
}

async fn cluster_failover(redis: Redis) -> Done {
    let server = redis.start()?;
    let backend = open(&server, "").await?;
    let grant = acquire(&backend, "jobs", 120).await?;
    let keeper = || async {
        for node in server.nodes() {
            let owns = node.ask(&["INFO", "replication"])?.contains("role:master");
            if owns && node.ask(&["DBSIZE"])?.trim() != "0" {
                return Ok(Some(node));
            }
        }
        Ok(None)
    };
    let keeper = until("a master has the grant", keeper).await?;
    keeper.kill()?;
    let next = acquire_at_last(&backend, "other", 60).await?;
    ensure(next.term > grant.term, (next.term, grant.term))?;
    // The first is there unless it was lost: then another has it under a greater term.
    let request = ask("jobs", 60)?;
    let held = backend.lease().get(&request.lease).await?;
    ensure(held.is_none_or(|held| held.term >= grant.term), "an older term")
}
