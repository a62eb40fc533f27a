//! The NATS client by itself, and its own key-value store.

use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream::kv::{Config, Operation, Store};
use async_trait::async_trait;
use futures::future::join_all;
use futures::{StreamExt as _, stream};
use serde_json::Value;
use tokio_util::task::AbortOnDropHandle;

use crate::contender::{Contender, Fleet, Held};
use crate::{SETUP_MAX, spawn};

async fn connect(addresses: &[String]) -> (async_nats::Client, Store) {
    let client =
        async_nats::connect(format!("nats://{}", addresses.join(","))).await.expect("connects");
    let config = Config {
        bucket: "raw".to_owned(),
        history: 1,
        limit_markers: Some(Duration::from_secs(1)),
        ..Config::default()
    };
    let context = async_nats::jetstream::new(client.clone());
    let store = match context.get_key_value("raw").await {
        Ok(store) => store,
        Err(_) => context.create_key_value(config).await.expect("a bucket"),
    };
    (client, store)
}

/// Writes over the message with this sequence, to live for the TTL; the new sequence, or none if another one
/// is there. One request.
async fn put(
    client: &async_nats::Client,
    lease: &str,
    at: u64,
    ttl: Option<Duration>,
) -> Option<u64> {
    let mut headers = HeaderMap::new();
    headers.insert("Nats-Expected-Last-Subject-Sequence", at.to_string().as_str());
    match ttl {
        Some(ttl) => headers.insert("Nats-TTL", format!("{}s", ttl.as_secs()).as_str()),
        None => headers.insert("KV-Operation", "DEL"),
    }
    let subject = format!("$KV.raw.{lease}");
    let answer = client.request_with_headers(subject, headers, "bench".into()).await;
    let answer: Value =
        serde_json::from_slice(&answer.expect("answers").payload).expect("an answer in JSON");
    match answer.get("seq").and_then(Value::as_u64) {
        Some(sequence) if answer.get("error").is_none() => Some(sequence),
        _ => None,
    }
}

/// Waits until the lease is vacant, and tells the sequence of its last message.
async fn vacant(store: &Store, lease: &str) -> u64 {
    let mut entries = store.watch_with_history(lease).await.expect("watches");
    loop {
        let entry = entries.next().await.expect("goes on").expect("an entry");
        if entry.operation != Operation::Put {
            return entry.revision;
        }
    }
}

/// The least that a lease takes: one conditional write for each step, and a watch for who waits.
pub(crate) struct Raw(async_nats::Client, Store);

impl Raw {
    pub(crate) async fn connect(addresses: &[String]) -> Self {
        let (client, store) = connect(addresses).await;
        Self(client, store)
    }
}

#[async_trait]
impl Contender for Raw {
    async fn acquire(&self, lease: &str, ttl: Duration) -> Box<dyn Held> {
        let mut at = 0;
        loop {
            if let Some(sequence) = put(&self.0, lease, at, Some(ttl)).await {
                let grant =
                    RawGrant { client: self.0.clone(), lease: lease.to_owned(), sequence, ttl };
                return Box::new(RawHeld::keep(grant));
            }
            at = vacant(&self.1, lease).await;
        }
    }

    async fn fleet(&self, prefix: &str, size: usize, ttl: Duration) -> Option<Box<dyn Fleet>> {
        let grants = (0..size).map(|n| {
            let client = self.0.clone();
            async move {
                let lease = format!("{prefix}-{n}");
                let sequence = put(&client, &lease, 0, Some(ttl)).await.expect("free");
                RawGrant { client, lease, sequence, ttl }
            }
        });
        Some(Box::new(RawFleet(stream::iter(grants).buffer_unordered(SETUP_MAX).collect().await)))
    }
}

struct RawGrant {
    client: async_nats::Client,
    lease: String,
    sequence: u64,
    ttl: Duration,
}

impl RawGrant {
    async fn renew(&mut self) {
        let renewed = put(&self.client, &self.lease, self.sequence, Some(self.ttl)).await;
        self.sequence = renewed.expect("its own");
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
            loop {
                tokio::select! {
                    _ = &mut stopped => return grant,
                    () = tokio::time::sleep(grant.ttl / 3) => grant.renew().await,
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
        let RawGrant { client, lease, sequence, .. } = self.kept.await.expect("no panic");
        put(&client, &lease, sequence, None).await.expect("its own");
    }
}

struct RawFleet(Vec<RawGrant>);

#[async_trait]
impl Fleet for RawFleet {
    async fn renew_all(&mut self) {
        join_all(self.0.iter_mut().map(RawGrant::renew)).await;
    }
}

/// The client's own key-value store. Its `update` writes a value without a TTL, so that what was renewed once
/// never ends by itself; there is no other one.
pub(crate) struct Kv(Store);

impl Kv {
    pub(crate) async fn connect(addresses: &[String]) -> Self {
        Self(connect(addresses).await.1)
    }
}

#[async_trait]
impl Contender for Kv {
    async fn acquire(&self, lease: &str, ttl: Duration) -> Box<dyn Held> {
        loop {
            if let Ok(revision) = self.0.create_with_ttl(lease, "bench".into(), ttl).await {
                return Box::new(KvHeld {
                    store: self.0.clone(),
                    lease: lease.to_owned(),
                    revision,
                });
            }
            vacant(&self.0, lease).await;
        }
    }

    async fn fleet(&self, prefix: &str, size: usize, ttl: Duration) -> Option<Box<dyn Fleet>> {
        let held = (0..size).map(|n| {
            let store = self.0.clone();
            async move {
                let lease = format!("{prefix}-{n}");
                let created = store.create_with_ttl(&lease, "bench".into(), ttl).await;
                KvHeld { revision: created.expect("free"), store, lease }
            }
        });
        Some(Box::new(KvFleet(stream::iter(held).buffer_unordered(SETUP_MAX).collect().await)))
    }
}

struct KvHeld {
    store: Store,
    lease: String,
    revision: u64,
}

#[async_trait]
impl Held for KvHeld {
    async fn release(self: Box<Self>) {
        let Self { store, lease, revision } = *self;
        store.delete_expect_revision(&lease, Some(revision)).await.expect("its own");
    }
}

struct KvFleet(Vec<KvHeld>);

#[async_trait]
impl Fleet for KvFleet {
    async fn renew_all(&mut self) {
        join_all(self.0.iter_mut().map(|held| async move {
            let renewed = held.store.update(&held.lease, "bench".into(), held.revision).await;
            held.revision = renewed.expect("its own");
        }))
        .await;
    }
}
