//! kube-lease-manager, a crate for leases in Kubernetes.

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use kube_lease_manager::LeaseManagerBuilder;
use tokio::task::JoinHandle;

use crate::contender::{Contender, Held};
use crate::kube;

pub(crate) fn identity() -> String {
    coord::AttemptId::random().to_string()
}

/// A manager that runs by itself. When it renews is its own affair.
pub(crate) struct Manager(::kube::Client);

impl Manager {
    pub(crate) async fn connect(kubeconfig: &Path) -> Self {
        Self(kube::client(kubeconfig).await)
    }
}

#[async_trait]
impl Contender for Manager {
    async fn acquire(&self, lease: &str, ttl: Duration) -> Box<dyn Held> {
        let builder = LeaseManagerBuilder::new(self.0.clone(), lease)
            .with_identity(identity())
            .with_duration(ttl.as_secs())
            .with_grace(ttl.as_secs() * 2 / 3);
        let (mut leads, task) = builder.build().await.expect("built").watch().await;
        leads.wait_for(|leads| *leads).await.expect("runs");
        Box::new(Managed { leads, task })
    }
}

struct Managed {
    leads: tokio::sync::watch::Receiver<bool>,
    task: JoinHandle<kube_lease_manager::Result<kube_lease_manager::LeaseManager>>,
}

#[async_trait]
impl Held for Managed {
    async fn release(self: Box<Self>) {
        let Self { leads, task } = *self;
        drop(leads);
        task.await.expect("no panic").expect("released");
    }
}
