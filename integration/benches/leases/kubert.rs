//! kubert, a crate for Kubernetes with leases, on a client of its own.

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use futures::{StreamExt as _, stream};
use k8s_openapi_025::api::coordination::v1 as old_api;
use kubert::lease::{ClaimParams, LeaseManager};
use tokio::task::JoinHandle;

use crate::contender::{Contender, Fleet, Held};
use crate::kube_peers::identity;
use crate::{SETUP_MAX, kube};

const NAMESPACE: &str = "default";

/// The object has to be there before.
pub(crate) struct Kubert {
    api: kube_client_1::Api<old_api::Lease>,
    raw: kube::Raw,
}

impl Kubert {
    pub(crate) async fn connect(path: &Path) -> Self {
        let kubeconfig = kube_client_1::config::Kubeconfig::read_from(path).expect("a kubeconfig");
        let options = kube_client_1::config::KubeConfigOptions::default();
        let config = kube_client_1::Config::from_custom_kubeconfig(kubeconfig, &options).await;
        let client = kube_client_1::Client::try_from(config.expect("a context")).expect("a client");
        let api = kube_client_1::Api::namespaced(client, NAMESPACE);
        Self { api, raw: kube::Raw::connect(path).await }
    }

    async fn manager(&self, lease: &str) -> LeaseManager {
        self.raw.make(lease).await;
        LeaseManager::init(self.api.clone(), lease).await.expect("read")
    }
}

#[async_trait]
impl Contender for Kubert {
    async fn acquire(&self, lease: &str, ttl: Duration) -> Box<dyn Held> {
        let params = ClaimParams { lease_duration: ttl, renew_grace_period: ttl * 2 / 3 };
        let identity = identity();
        let spawned = self.manager(lease).await.spawn(&identity, params).await;
        let (mut claims, task) = spawned.expect("claimed");
        claims.wait_for(|claim| claim.is_current_for(&identity)).await.expect("runs");
        Box::new(Claimed(Box::new(move || drop(claims)), task))
    }

    async fn fleet(&self, prefix: &str, size: usize, ttl: Duration) -> Option<Box<dyn Fleet>> {
        // Within its grace from the beginning, so that each call renews.
        let params = ClaimParams { lease_duration: ttl, renew_grace_period: ttl };
        let claim = |n| {
            let params = params.clone();
            async move {
                let (manager, identity) =
                    (self.manager(&format!("{prefix}-{n}")).await, identity());
                manager.ensure_claimed(&identity, &params).await.expect("claimed");
                (manager, identity)
            }
        };
        let managers =
            stream::iter((0..size).map(claim)).buffer_unordered(SETUP_MAX).collect().await;
        Some(Box::new(Claims { managers, params }))
    }
}

struct Claimed(Box<dyn FnOnce() + Send>, JoinHandle<Result<(), kubert::lease::Error>>);

#[async_trait]
impl Held for Claimed {
    async fn release(self: Box<Self>) {
        let Self(unwatch, task) = *self;
        unwatch();
        task.await.expect("no panic").expect("vacated");
    }
}

struct Claims {
    managers: Vec<(LeaseManager, String)>,
    params: ClaimParams,
}

#[async_trait]
impl Fleet for Claims {
    async fn renew_all(&mut self) {
        let params = &self.params;
        let renewals = self.managers.iter().map(|(manager, identity)| async move {
            manager.ensure_claimed(identity, params).await.expect("renewed");
        });
        let renewals: Vec<_> = renewals.collect();
        stream::iter(renewals).buffer_unordered(SETUP_MAX).collect::<Vec<()>>().await;
    }
}
