//! What all trials need.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use coord_core::{
    Acquire, AcquireRequest, AttemptId, Backend, BackendUrl, Claim, ClaimRequest, Fence, Grant,
    HealthStatus, Holder, Incarnation, LeaseName, NodeId, ShardCount, StoredTable, TableHeader,
    TableName, Ttl,
};
use coord_integration::faults::Clock;
use coord_integration::servers::{Redis, Server};
use coord_integration::trial;
use coord_redis::RedisBackend;
use libtest_mimic::{Failed, Trial};
use tokio::time::{Instant, sleep};

pub(crate) type Done<T = ()> = Result<T, Failed>;

/// How long something may take that a server does by itself: a failover, say.
pub(crate) const LONG: Duration = Duration::from_secs(40);

/// A trial on a server of its own.
pub(crate) fn on<F>(name: &str, redis: Redis, body: fn(Redis) -> F) -> Trial
where
    F: Future<Output = Done> + 'static,
{
    trial(name, &redis.with_control().find(), move |redis| {
        let runtime = tokio::runtime::Builder::new_multi_thread();
        run(runtime, body(redis))
    })
}

/// A trial on a server of its own, whose clock it moves.
pub(crate) fn on_clock<F>(name: &str, redis: Redis, body: fn(Redis, Arc<Clock>) -> F) -> Trial
where
    F: Future<Output = Done> + 'static,
{
    let both = redis.with_control().find().and_then(|redis| Ok((redis, Arc::new(Clock::new()?))));
    trial(name, &both, move |(redis, clock)| {
        let runtime = tokio::runtime::Builder::new_multi_thread();
        run(runtime, body(redis.with_clock(&clock), clock))
    })
}

fn run(mut runtime: tokio::runtime::Builder, body: impl Future<Output = Done>) -> Done {
    runtime.worker_threads(2).enable_all().build()?.block_on(body)
}

pub(crate) fn ensure(holds: bool, what: impl Debug) -> Done {
    if holds { Ok(()) } else { Err(format!("{what:?}").into()) }
}

pub(crate) async fn open_url(url: &str) -> coord_core::Result<RedisBackend> {
    RedisBackend::open(&BackendUrl::parse(url)?).await
}

pub(crate) async fn open(server: &Server, options: &str) -> coord_core::Result<RedisBackend> {
    open_url(&format!("{}/orders{options}", server.url())).await
}

/// The URL of the sentinels of a group.
pub(crate) fn by_sentinels(server: &Server, options: &str) -> String {
    format!("redis://{}/orders?master=coord{options}", server.sentinels().join(","))
}

pub(crate) fn ask(lease: &str, ttl: u64) -> Done<AcquireRequest> {
    let holder = Holder::new(NodeId::new("node-1")?, Incarnation::random(), AttemptId::random());
    Ok(AcquireRequest::new(LeaseName::new(lease)?, holder, Ttl::from_secs(ttl)?))
}

pub(crate) async fn acquire(backend: &RedisBackend, lease: &str, ttl: u64) -> Done<Grant> {
    match backend.lease().try_acquire(&ask(lease, ttl)?).await? {
        Acquire::Acquired(grant) => Ok(grant),
        other => Err(format!("not acquired: {other:?}").into()),
    }
}

/// Acquires as soon as the store answers and the lease is free.
pub(crate) async fn acquire_at_last(backend: &RedisBackend, lease: &str, ttl: u64) -> Done<Grant> {
    let request = ask(lease, ttl)?;
    until(&format!("{lease} is granted"), || async {
        match backend.lease().try_acquire(&request).await {
            Ok(Acquire::Acquired(grant)) => Ok(Some(grant)),
            Ok(_) => Ok(None),
            Err(error) if error.is_retryable() => Ok(None),
            Err(error) => Err(error.into()),
        }
    })
    .await
}

/// Looks again and again, with a bound.
pub(crate) async fn until<T, F>(what: &str, mut look: impl FnMut() -> F) -> Done<T>
where
    F: Future<Output = Done<Option<T>>>,
{
    let end = Instant::now() + LONG;
    loop {
        if let Some(found) = look().await? {
            return Ok(found);
        }
        ensure(Instant::now() < end, format!("waited {LONG:?} in vain: {what}"))?;
        sleep(Duration::from_millis(50)).await;
    }
}

pub(crate) fn orders() -> Done<TableName> {
    Ok(TableName::new("orders")?)
}

pub(crate) async fn claim(backend: &RedisBackend, fence: &Fence, shards: u32) -> Done<StoredTable> {
    let header = TableHeader::new(ShardCount::new(shards)?);
    let request = ClaimRequest::new(orders()?, fence.clone(), header);
    match backend.placement().claim(&request).await? {
        Claim::Claimed(table) => Ok(table),
        other => Err(format!("not claimed: {other:?}").into()),
    }
}

/// The worst that `check` says of one thing, in its words.
pub(crate) async fn said(backend: &RedisBackend, name: &str) -> Done<(HealthStatus, String)> {
    let health = backend.check().await?;
    let points = health.points.into_iter().filter(|point| point.name == name);
    let worst = points.max_by_key(|point| point.status);
    worst.map(|point| (point.status, point.detail)).ok_or_else(|| format!("no {name}").into())
}
