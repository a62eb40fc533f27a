//! What the trials have in common.

use std::future::Future;
use std::time::Duration;

use coord_core::{
    Acquire, AcquireRequest, AttemptId, Backend as _, BackendUrl, Grant, Holder, Incarnation,
    LeaseName, NodeId, Release, Renew, Ttl,
};
use coord_etcd::EtcdBackend;
use coord_integration::servers::Etcd;
use coord_integration::{Missing, trial};
use etcd_client::{Client, ConnectOptions};
use libtest_mimic::{Failed, Trial};

/// How long anything may take to show.
pub(crate) const SOON: Duration = Duration::from_secs(10);

/// A trial on a server of its own kind, in a runtime.
pub(crate) fn on<F: Future<Output = ()> + Send>(
    name: &'static str,
    etcd: &Etcd,
    body: impl FnOnce(Etcd) -> F + Send + 'static,
) -> Trial {
    let found: Result<Etcd, Missing> = etcd.clone().find();
    trial(name, &found, |etcd| {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime
            .block_on(async { tokio::time::timeout(SOON * 6, body(etcd)).await })
            .map_err(|_| Failed::from("the trial takes too long"))
    })
}

pub(crate) fn url(text: &str) -> BackendUrl {
    BackendUrl::parse(text).expect("a good URL")
}

pub(crate) async fn open(text: &str) -> EtcdBackend {
    EtcdBackend::open(&url(text)).await.expect("opens")
}

pub(crate) fn name(text: &str) -> LeaseName {
    LeaseName::new(text).expect("a good name")
}

pub(crate) fn ask(lease: &str, node: &str, seconds: u64) -> AcquireRequest {
    let node = NodeId::new(node).expect("a good name");
    let holder = Holder::new(node, Incarnation::random(), AttemptId::random());
    AcquireRequest::new(name(lease), holder, Ttl::from_secs(seconds).expect("a good ttl"))
}

pub(crate) async fn acquire(backend: &EtcdBackend, request: &AcquireRequest) -> Grant {
    match backend.lease().try_acquire(request).await.expect("acquires") {
        Acquire::Acquired(grant) => grant,
        other => panic!("not acquired: {other:?}"),
    }
}

pub(crate) async fn renew(backend: &EtcdBackend, grant: &Grant) {
    let renewed = backend.lease().renew(grant).await.expect("renews");
    assert!(matches!(renewed, Renew::Renewed(_)), "{renewed:?}");
}

pub(crate) async fn release(backend: &EtcdBackend, grant: &Grant) {
    let released = backend.lease().release(grant).await.expect("releases");
    assert_eq!(released, Release::Released);
}

/// Asks until there is an answer.
pub(crate) async fn until<T: Send, F>(what: &str, ask: impl Fn() -> F + Send + Sync) -> T
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
    tokio::time::timeout(SOON, asking).await.unwrap_or_else(|_| panic!("not in time: {what}"))
}

/// A client of its own, as `etcdctl` is.
pub(crate) async fn admin(addresses: &[String], password: Option<&str>) -> Client {
    let mut options = ConnectOptions::new();
    if let Some(password) = password {
        options = options.with_user("root", password);
    }
    Client::connect(addresses, Some(options)).await.expect("connects")
}
