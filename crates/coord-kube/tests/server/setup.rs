//! What the trials have in common.

use std::future::Future;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use coord_core::{
    Acquire, AcquireRequest, AttemptId, Backend as _, BackendUrl, Grant, Holder, Incarnation,
    LeaseName, NodeId, Renew, Result, Ttl,
};
use coord_integration::servers::{ApiServer, Kube};
use coord_integration::{Missing, trial};
use coord_kube::KubeBackend;
use kube::config::{KubeConfigOptions, Kubeconfig};
use libtest_mimic::{Failed, Trial};
use tempfile::TempDir;

/// How long anything may take to show.
pub(crate) const SOON: Duration = Duration::from_secs(10);

/// A trial in a runtime, on the server that all plain ones share.
pub(crate) fn shared<F: Future<Output = ()> + Send>(
    name: &'static str,
    body: impl FnOnce(ApiServer) -> F + Send + 'static,
) -> Trial {
    on(name, &Kube::new().with_control(), |_| body(one_for_all()))
}

/// The server of the plain trials, as long as one of them runs.
fn one_for_all() -> ApiServer {
    static SERVER: Mutex<Option<ApiServer>> = Mutex::new(None);
    let mut slot = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    slot.get_or_insert_with(|| Kube::new().with_control().start().expect("starts")).clone()
}

/// A trial in a runtime, on a server of its own kind, which it starts.
pub(crate) fn on<F: Future<Output = ()> + Send>(
    name: &'static str,
    kube: &Kube,
    body: impl FnOnce(Kube) -> F + Send + 'static,
) -> Trial {
    let found: std::result::Result<Kube, Missing> = kube.clone().find();
    trial(name, &found, |kube| {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime
            .block_on(async { tokio::time::timeout(SOON * 12, body(kube)).await })
            .map_err(|_| Failed::from("the trial takes too long"))
    })
}

/// A cluster name that no other trial has.
pub(crate) fn cluster() -> String {
    let bits = AttemptId::random().as_u128();
    format!("trial-{:016x}", bits >> 64)
}

/// A kubeconfig of this text, gone with its folder.
#[derive(Debug)]
pub(crate) struct File {
    folder: TempDir,
}

impl File {
    pub(crate) fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("kubeconfig"), text).expect("written");
        Self { folder }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }
}

pub(crate) async fn try_open(kubeconfig: &std::path::Path, cluster: &str) -> Result<KubeBackend> {
    let path = kubeconfig.display();
    let url = format!("kube:///{cluster}?request_timeout=2s&kubeconfig={path}");
    KubeBackend::open(&BackendUrl::parse(&url)?).await
}

pub(crate) async fn open(server: &ApiServer, cluster: &str) -> KubeBackend {
    try_open(server.kubeconfig(), cluster).await.expect("opens")
}

/// A client of its own, as kubectl is.
pub(crate) async fn admin(server: &ApiServer) -> kube::Client {
    let kubeconfig = Kubeconfig::read_from(server.kubeconfig()).expect("a kubeconfig");
    let options = KubeConfigOptions::default();
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &options).await;
    kube::Client::try_from(config.expect("a config")).expect("a client")
}

pub(crate) fn lease(text: &str) -> LeaseName {
    LeaseName::new(text).expect("a good name")
}

pub(crate) fn ask(name: &str, node: &str, seconds: u64) -> AcquireRequest {
    let node = NodeId::new(node).expect("a good name");
    let holder = Holder::new(node, Incarnation::random(), AttemptId::random());
    AcquireRequest::new(lease(name), holder, Ttl::from_secs(seconds).expect("a good ttl"))
}

pub(crate) async fn acquire(backend: &KubeBackend, request: &AcquireRequest) -> Grant {
    match backend.lease().try_acquire(request).await.expect("acquires") {
        Acquire::Acquired(grant) => grant,
        other => panic!("not acquired: {other:?}"),
    }
}

pub(crate) async fn renew(backend: &KubeBackend, grant: &Grant) -> Grant {
    match backend.lease().renew(grant).await.expect("renews") {
        Renew::Renewed(again) => again,
        other => panic!("not renewed: {other:?}"),
    }
}

/// Asks until there is an answer.
pub(crate) async fn until<T: Send, F>(
    what: &str,
    limit: Duration,
    ask: impl Fn() -> F + Send + Sync,
) -> T
where
    F: Future<Output = Option<T>> + Send,
{
    let asking = async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(limit, asking).await.unwrap_or_else(|_| panic!("not in time: {what}"))
}
