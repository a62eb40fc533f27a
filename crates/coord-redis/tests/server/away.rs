//! Servers that are away, slow, or have lost what they knew.

use std::time::Duration;

use coord_core::{Backend, Effect, ErrorKind, HealthStatus, Release, Renew};
use coord_integration::faults::Clock;
use coord_integration::servers::Redis;
use libtest_mimic::Trial;

use super::setup::{Done, acquire, acquire_at_last, ask, ensure, on, open, said, until};

pub(crate) fn trials() -> Vec<Trial> {
    let forgetful = "appendonly no\n";
    vec![
        on("a_restart_loses_no_grant", Redis::new(), restart),
        on("terms_rise_over_lost_data", Redis::new().with_config(forgetful), lost_data),
        // Debian's Redis can't run under a clock that is moved.
        on("terms_rise_though_the_clock_goes_back", Redis::new().with_version("9.1.2"), clock),
        on("forgotten_scripts_are_sent_again", Redis::new(), flushed_scripts),
        on("a_server_that_gives_no_answer_is_an_unknown_effect", Redis::new(), paused),
        on("a_server_that_loads_its_data_is_waited_for", slow_to_load(), loading),
        on("too_few_replicas_grant_nothing", Redis::new(), too_few_replicas),
        on("a_damaged_record_is_told", Redis::new(), damaged),
    ]
}

async fn restart(redis: Redis) -> Done {
    let server = redis.start()?;
    let backend = open(&server, "").await?;
    let grant = acquire(&backend, "jobs", 60).await?;
    server.nodes()[0].restart()?;
    let again = until("it is renewed", || async {
        match backend.lease().renew(&grant).await {
            Ok(Renew::Renewed(again)) => Ok(Some(again)),
            Ok(lost) => Err(format!("{lost:?}").into()),
            Err(error) if error.is_retryable() => Ok(None),
            Err(error) => Err(error.into()),
        }
    })
    .await?;
    ensure(again.fence() == grant.fence(), &again)?;
    ensure(backend.lease().release(&again).await? == Release::Released, "not released")?;
    let next = acquire(&backend, "jobs", 60).await?;
    ensure(next.term > grant.term, (next.term, grant.term))
}

async fn lost_data(redis: Redis) -> Done {
    let server = redis.start()?;
    let backend = open(&server, "").await?;
    let grant = acquire(&backend, "jobs", 60).await?;
    server.nodes()[0].restart()?;
    let next = acquire_at_last(&backend, "jobs", 60).await?;
    ensure(next.term > grant.term, (next.term, grant.term))?;
    let renewed = backend.lease().renew(&grant).await?;
    ensure(matches!(renewed, Renew::Lost(Some(_))), renewed)?;
    // The store goes on under the name that those who use it know.
    let other = open(&server, "").await?;
    ensure(other.info().origin == backend.info().origin, other.info())?;
    // Where somebody else has filled it meanwhile, nobody takes it for the one that it was.
    server.nodes()[0].kill()?;
    server.nodes()[0].start()?;
    let stranger = open(&server, "").await?;
    let error = until("it is noticed", || async {
        match backend.lease().get(&grant.lease).await {
            Err(error) if error.kind() == ErrorKind::Misconfigured => Ok(Some(error)),
            _ => Ok(None),
        }
    })
    .await?;
    ensure(error.to_string().contains("another store"), &error)?;
    ensure(stranger.info().origin != backend.info().origin, stranger.info())
}

async fn clock(redis: Redis) -> Done {
    let clock = Clock::new()?;
    let server = redis.with_clock(&clock).start()?;
    let backend = open(&server, "").await?;
    let grant = acquire(&backend, "jobs", 60).await?;
    clock.jump(-3_600)?;
    ensure(backend.lease().release(&grant).await? == Release::Released, "not released")?;
    let next = acquire(&backend, "jobs", 60).await?;
    ensure(next.term > grant.term, (next.term, grant.term))?;
    // Forwards: what was granted is over at once, and the next term is greater all the same.
    clock.jump(3_600)?;
    until("what was granted is over", || async {
        Ok(matches!(backend.lease().renew(&next).await?, Renew::Lost(None)).then_some(()))
    })
    .await?;
    let last = acquire(&backend, "jobs", 60).await?;
    ensure(last.term > next.term, (last.term, next.term))
}

async fn flushed_scripts(redis: Redis) -> Done {
    let server = redis.start()?;
    let backend = open(&server, "").await?;
    let grant = acquire(&backend, "jobs", 60).await?;
    server.nodes()[0].ask(&["SCRIPT", "FLUSH"])?;
    let renewed = backend.lease().renew(&grant).await?;
    ensure(matches!(renewed, Renew::Renewed(_)), renewed)
}

async fn paused(redis: Redis) -> Done {
    let server = redis.start()?;
    let backend = open(&server, "?request_timeout=500ms").await?;
    let grant = acquire(&backend, "jobs", 60).await?;
    server.nodes()[0].pause()?;
    let error = backend.lease().renew(&grant).await.expect_err("no answer");
    ensure(error.kind() == ErrorKind::Unavailable, &error)?;
    ensure(error.effect() == Effect::Unknown, &error)?;
    let error = backend.lease().get(&grant.lease).await.expect_err("no answer");
    ensure(error.effect() == Effect::None, &error)?;
    server.nodes()[0].resume()?;
    let renewed = until("it answers again", || async {
        match backend.lease().renew(&grant).await {
            Ok(renewed) => Ok(Some(renewed)),
            Err(_) => Ok(None),
        }
    })
    .await?;
    ensure(matches!(renewed, Renew::Renewed(_)), renewed)
}

/// Takes two milliseconds to load a key, and answers after each KiB of keys: by default it answers after
/// two MiB, and while it reads its log after a thousand commands, which is too seldom for a connection.
fn slow_to_load() -> Redis {
    let config = "key-load-delay 2000\nloading-process-events-interval-bytes 1024\n";
    Redis::new().with_version("9.1.2").with_config(config)
}

async fn loading(redis: Redis) -> Done {
    let server = redis.start()?;
    let backend = open(&server, "").await?;
    let grant = acquire(&backend, "jobs", 120).await?;
    let node = &server.nodes()[0];
    let fill = "for i = 1, 3000 do redis.call('SET', 'other:' .. i, i) end";
    node.ask(&["EVAL", fill, "0"])?;
    // From now on its keys stand in a snapshot.
    node.ask(&["BGREWRITEAOF"])?;
    until("the log is rewritten", || async {
        let info = node.ask(&["INFO", "persistence"])?;
        let ended = ["aof_rewrite_in_progress:0", "aof_rewrite_scheduled:0"];
        Ok(ended.iter().all(|line| info.contains(line)).then_some(()))
    })
    .await?;
    node.kill()?;
    let starting = server.clone();
    let start = std::thread::spawn(move || starting.nodes()[0].start());
    let error = until("it says that it loads", || async {
        match backend.lease().renew(&grant).await {
            Err(error) if error.to_string().contains("loading its data") => Ok(Some(error)),
            _ => Ok(None),
        }
    })
    .await?;
    ensure(error.kind() == ErrorKind::Unavailable, &error)?;
    start.join().map_err(|_| "the harness panicked")??;
    let renewed = backend.lease().renew(&grant).await?;
    ensure(matches!(renewed, Renew::Renewed(_)), renewed)
}

async fn too_few_replicas(redis: Redis) -> Done {
    let server = redis.start()?;
    let backend = open(&server, "?min_replicas=1&request_timeout=1s").await?;
    let request = ask("jobs", 60)?;
    let error = backend.lease().try_acquire(&request).await.expect_err("no replica");
    ensure(error.kind() == ErrorKind::Unavailable && error.effect() == Effect::None, &error)?;
    ensure(error.to_string().contains("0 of 1 replicas"), &error)?;
    ensure(backend.lease().get(&request.lease).await?.is_none(), "it is held")?;
    let (status, detail) = said(&backend, "configuration").await?;
    ensure(status == HealthStatus::Bad && detail.contains("min_replicas=1"), detail)?;
    let patient = open(&server, "").await?;
    let waited = tokio::time::timeout(Duration::from_secs(5), acquire(&patient, "jobs", 60));
    waited.await?.map(drop)
}

async fn damaged(redis: Redis) -> Done {
    let server = redis.start()?;
    let backend = open(&server, "").await?;
    let grant = acquire(&backend, "jobs", 60).await?;
    let node = &server.nodes()[0];
    node.ask(&["HSET", "coord:{orders}:leases", "jobs", "{\"no\":\"lease\"}"])?;
    let error = backend.lease().get(&grant.lease).await.expect_err("damaged");
    ensure(error.kind() == ErrorKind::Corrupt, &error)?;
    let error = backend.lease().try_acquire(&ask("jobs", 60)?).await.expect_err("damaged");
    ensure(error.kind() == ErrorKind::Corrupt, &error)?;
    for clock in ["x", "4503599627370496"] {
        node.ask(&["SET", "coord:{orders}:clock", clock])?;
        let error = backend.lease().try_acquire(&ask("other", 60)?).await.expect_err("damaged");
        ensure(error.kind() == ErrorKind::Corrupt, &error)?;
        ensure(backend.lease().get(&ask("other", 60)?.lease).await?.is_none(), "granted")?;
    }
    node.ask(&["DEL", "coord:{orders}:clock"])?;
    node.ask(&["HSET", "coord:{orders}:clock", "a", "b"])?;
    let error = backend.lease().try_acquire(&ask("other", 60)?).await.expect_err("another type");
    ensure(error.kind() == ErrorKind::Corrupt, &error)
}
