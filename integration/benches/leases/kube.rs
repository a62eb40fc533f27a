//! The Kubernetes client by itself.

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use futures::{StreamExt as _, stream};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams, WatchEvent, WatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, ResourceExt as _};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use crate::contender::{Contender, Fleet, Held};
use crate::{SETUP_MAX, spawn};

pub(crate) async fn client(kubeconfig: &Path) -> Client {
    let kubeconfig = Kubeconfig::read_from(kubeconfig).expect("a kubeconfig");
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    Client::try_from(config.expect("a context")).expect("a client")
}

fn now() -> MicroTime {
    MicroTime(Timestamp::now())
}

fn held_for(ttl: Duration) -> LeaseSpec {
    LeaseSpec {
        holder_identity: Some(coord::AttemptId::random().to_string()),
        lease_duration_seconds: Some(i32::try_from(ttl.as_secs()).expect("short")),
        renew_time: Some(now()),
        ..LeaseSpec::default()
    }
}

/// For how long an unchanged record holds; none if it is nobody's.
fn holds_for(lease: &Lease) -> Option<Duration> {
    let spec = lease.spec.as_ref()?;
    spec.holder_identity.as_ref().filter(|holder| !holder.is_empty())?;
    Some(Duration::from_secs(spec.lease_duration_seconds?.unsigned_abs().into()))
}

fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}

/// The least that a lease takes: a read and a conditional write to acquire it, a conditional write to renew and to
/// release it, and a watch of the object for who waits. No term, no deadline, nothing repeated.
#[derive(Clone)]
pub(crate) struct Raw(Api<Lease>);

impl Raw {
    pub(crate) async fn connect(kubeconfig: &Path) -> Self {
        Self(Api::default_namespaced(client(kubeconfig).await))
    }

    async fn create(&self, name: &str, spec: LeaseSpec) -> Result<Lease, kube::Error> {
        let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
        let lease = Lease { metadata, spec: Some(spec) };
        self.0.create(&PostParams::default(), &lease).await
    }

    /// An object that nobody holds.
    #[cfg(feature = "bench-kubert")]
    pub(crate) async fn make(&self, name: &str) {
        match self.create(name, LeaseSpec::default()).await {
            Err(error) if !is_conflict(&error) => panic!("{name}: {error}"),
            _ => {}
        }
    }

    /// Follows the object until nobody holds it, or it did not change for as long as it says.
    async fn vacant(&self, mut lease: Lease) -> Option<Lease> {
        if holds_for(&lease).is_none() {
            return Some(lease);
        }
        let version = lease.resource_version().expect("a version");
        let mut events =
            Box::pin(self.0.watch(&one(&lease.name_any()), &version).await.expect("watches"));
        while let Some(rest) = holds_for(&lease) {
            match timeout(rest, events.next()).await {
                Err(_) => break,
                Ok(Some(Ok(WatchEvent::Modified(changed)))) => lease = changed,
                // Ended by the server, or too old: it is read again.
                Ok(_) => return None,
            }
        }
        Some(lease)
    }

    /// When the lease has no holder.
    pub(crate) async fn see_vacant(&self, name: &str) {
        loop {
            let lease = self.0.get(name).await.expect("answers");
            if self.vacant(lease).await.is_some() {
                return;
            }
        }
    }
}

fn one(name: &str) -> WatchParams {
    WatchParams::default().fields(&format!("metadata.name={name}")).disable_bookmarks()
}

#[async_trait]
impl Contender for Raw {
    async fn acquire(&self, lease: &str, ttl: Duration) -> Box<dyn Held> {
        loop {
            let written = match self.0.get_opt(lease).await.expect("answers") {
                None => self.create(lease, held_for(ttl)).await,
                Some(found) => {
                    let Some(mut found) = self.vacant(found).await else { continue };
                    found.spec = Some(held_for(ttl));
                    self.0.replace(lease, &PostParams::default(), &found).await
                }
            };
            match written {
                Ok(lease) => {
                    return Box::new(RawHeld::keep(RawGrant { api: self.0.clone(), lease }, ttl));
                }
                Err(error) if is_conflict(&error) => {}
                Err(error) => panic!("{lease}: {error}"),
            }
        }
    }

    async fn fleet(&self, prefix: &str, size: usize, ttl: Duration) -> Option<Box<dyn Fleet>> {
        let grants = (0..size).map(|n| async move {
            let made = self.create(&format!("{prefix}-{n}"), held_for(ttl)).await;
            RawGrant { api: self.0.clone(), lease: made.expect("free") }
        });
        Some(Box::new(RawFleet(stream::iter(grants).buffer_unordered(SETUP_MAX).collect().await)))
    }
}

struct RawGrant {
    api: Api<Lease>,
    lease: Lease,
}

impl RawGrant {
    async fn write(&mut self) {
        let (name, params) = (self.lease.name_any(), PostParams::default());
        let written = self.api.replace(&name, &params, &self.lease).await;
        self.lease = written.expect("its own");
    }

    async fn renew(&mut self) {
        self.lease.spec.as_mut().expect("a spec").renew_time = Some(now());
        self.write().await;
    }
}

struct RawHeld {
    stop: tokio::sync::oneshot::Sender<()>,
    kept: AbortOnDropHandle<RawGrant>,
}

impl RawHeld {
    fn keep(mut grant: RawGrant, ttl: Duration) -> Self {
        let (stop, mut stopped) = tokio::sync::oneshot::channel();
        let kept = spawn(async move {
            loop {
                tokio::select! {
                    _ = &mut stopped => return grant,
                    () = tokio::time::sleep(ttl / 3) => grant.renew().await,
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
        let mut grant = self.kept.await.expect("no panic");
        grant.lease.spec.as_mut().expect("a spec").holder_identity = None;
        grant.write().await;
    }
}

struct RawFleet(Vec<RawGrant>);

#[async_trait]
impl Fleet for RawFleet {
    async fn renew_all(&mut self) {
        let renewals: Vec<_> = self.0.iter_mut().map(RawGrant::renew).collect();
        stream::iter(renewals).buffer_unordered(SETUP_MAX).collect::<Vec<()>>().await;
    }
}
