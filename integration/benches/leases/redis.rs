//! The Redis client by itself.

use std::time::Duration;

use async_trait::async_trait;
use futures::future::join_all;
use futures::{StreamExt as _, stream};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Script, Value};
use tokio_util::task::AbortOnDropHandle;

use crate::contender::{Contender, Fleet, Held};
use crate::{SETUP_MAX, spawn};

/// How long a request may take.
const PATIENCE: Duration = Duration::from_secs(30);
const RENEW: &str = "\
if redis.call('GET', KEYS[1]) == ARGV[1] then \
    return redis.call('PEXPIRE', KEYS[1], ARGV[2]) \
end \
return 0";
const RELEASE: &str = "\
if redis.call('GET', KEYS[1]) == ARGV[1] then \
    return redis.call('DEL', KEYS[1]) \
end \
return 0";

fn milliseconds(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_millis()).expect("short")
}

fn token() -> String {
    coord::AttemptId::random().to_string()
}

/// The least that a lease takes: a key set if it is not there, to live for the TTL, and a script each to renew and
/// to delete it if it is one's own; for who waits, the server's word that a key has gone. No term, no look
/// for a word that was lost.
pub(crate) struct Raw {
    client: Client,
    connection: MultiplexedConnection,
}

impl Raw {
    pub(crate) async fn connect(addresses: &[String]) -> Self {
        let client = Client::open(format!("redis://{}/", addresses[0])).expect("a URL");
        // By default it gives up after half a second, too early for thousands of requests at once.
        let settings = AsyncConnectionConfig::new().set_response_timeout(Some(PATIENCE));
        let connected = client.get_multiplexed_async_connection_with_config(&settings);
        let mut connection = connected.await.expect("connects");
        let mut notify = redis::cmd("CONFIG");
        notify.arg("SET").arg("notify-keyspace-events").arg("Kgx");
        let () = notify.query_async(&mut connection).await.expect("set");
        Self { client, connection }
    }

    async fn set(&self, lease: &str, ttl: Duration) -> Option<RawGrant> {
        let (mut connection, token) = (self.connection.clone(), token());
        let mut set = redis::cmd("SET");
        set.arg(lease).arg(&token).arg("NX").arg("PX").arg(milliseconds(ttl));
        let answer: Option<String> = set.query_async(&mut connection).await.expect("answers");
        answer.map(|_| RawGrant { connection, lease: lease.to_owned(), token, ttl })
    }
}

#[async_trait]
impl Contender for Raw {
    async fn acquire(&self, lease: &str, ttl: Duration) -> Box<dyn Held> {
        if let Some(grant) = self.set(lease, ttl).await {
            return Box::new(RawHeld::keep(grant));
        }
        let mut words = self.client.get_async_pubsub().await.expect("connects");
        words.subscribe(format!("__keyspace@0__:{lease}")).await.expect("subscribes");
        let mut words = words.on_message();
        loop {
            // It may have gone before the subscription.
            if let Some(grant) = self.set(lease, ttl).await {
                return Box::new(RawHeld::keep(grant));
            }
            loop {
                let word: String =
                    words.next().await.expect("goes on").get_payload().expect("text");
                if word == "del" || word == "expired" {
                    break;
                }
            }
        }
    }

    async fn fleet(&self, prefix: &str, size: usize, ttl: Duration) -> Option<Box<dyn Fleet>> {
        let grants = (0..size)
            .map(|n| async move { self.set(&format!("{prefix}-{n}"), ttl).await.expect("free") });
        Some(Box::new(RawFleet(stream::iter(grants).buffer_unordered(SETUP_MAX).collect().await)))
    }
}

struct RawGrant {
    connection: MultiplexedConnection,
    lease: String,
    token: String,
    ttl: Duration,
}

impl RawGrant {
    async fn renew(&mut self, script: &Script) {
        let mut renew = script.prepare_invoke();
        renew.key(&self.lease).arg(&self.token).arg(milliseconds(self.ttl));
        let renewed: u32 = renew.invoke_async(&mut self.connection).await.expect("answers");
        assert_eq!(renewed, 1, "{} is gone", self.lease);
    }
}

struct RawHeld {
    stop: tokio::sync::oneshot::Sender<()>,
    kept: AbortOnDropHandle<RawGrant>,
}

impl RawHeld {
    fn keep(mut grant: RawGrant) -> Self {
        let (stop, mut stopped) = tokio::sync::oneshot::channel();
        let kept = spawn(async move {
            let script = Script::new(RENEW);
            loop {
                tokio::select! {
                    _ = &mut stopped => return grant,
                    () = tokio::time::sleep(grant.ttl / 3) => grant.renew(&script).await,
                }
            }
        });
        Self { stop, kept }
    }
}

#[async_trait]
impl Held for RawHeld {
    async fn release(self: Box<Self>) {
        let _ = self.stop.send(());
        let RawGrant { mut connection, lease, token, .. } = self.kept.await.expect("no panic");
        let script = Script::new(RELEASE);
        let mut release = script.prepare_invoke();
        release.key(lease).arg(token);
        let released: u32 = release.invoke_async(&mut connection).await.expect("answers");
        assert_eq!(released, 1, "its own");
    }
}

struct RawFleet(Vec<RawGrant>);

#[async_trait]
impl Fleet for RawFleet {
    async fn renew_all(&mut self) {
        let script = Script::new(RENEW);
        join_all(self.0.iter_mut().map(|grant| grant.renew(&script))).await;
    }
}

/// Waits until this client sees the next event in coord's stream that tells of this lease.
pub(crate) async fn next_event(client: &Client, lease: &str) {
    let settings = AsyncConnectionConfig::new().set_response_timeout(None);
    let connected = client.get_multiplexed_async_connection_with_config(&settings);
    let mut connection = connected.await.expect("connects");
    loop {
        let mut read = redis::cmd("XREAD");
        read.arg(&["BLOCK", "0", "STREAMS", "coord:{bench}:events", "$"]);
        let answer: Value = read.query_async(&mut connection).await.expect("reads");
        if format!("{answer:?}").contains(lease) {
            return;
        }
    }
}
