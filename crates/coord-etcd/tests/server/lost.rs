//! A store that is emptied under processes that run.

use coord_core::{
    Acquire, Address, Backend as _, Effect, ErrorKind, HealthStatus, Heartbeat, NodeId, NodeInfo,
    Register, Renew, Replace, Ttl,
};
use coord_etcd::EtcdBackend;
use coord_integration::servers::Etcd;
use etcd_client::DeleteOptions;
use futures::StreamExt as _;
use libtest_mimic::Trial;

use super::setup::{acquire, admin, ask, name, on, open, release};

pub(crate) fn trials() -> Vec<Trial> {
    let plain = Etcd::new();
    vec![
        on("an_emptied_store_keeps_its_identity", &plain, emptied),
        on("a_store_that_is_another_one_is_refused", &plain, another),
    ]
}

async fn empty(server: &coord_integration::servers::Server) {
    let mut root = admin(server.addresses(), None).await;
    let all = Some(DeleteOptions::new().with_prefix());
    root.delete("coord/orders/", all).await.expect("deletes");
}

async fn said(backend: &EtcdBackend) -> Option<(HealthStatus, String)> {
    let health = backend.check().await.expect("looks");
    let point = health.points.into_iter().find(|point| point.name == "identity");
    point.map(|point| (point.status, point.detail))
}

fn node() -> NodeInfo {
    let address = Address::new("127.0.0.1:1").expect("an address");
    NodeInfo::new(NodeId::new("node-1").expect("a name"), address)
}

async fn emptied(etcd: Etcd) {
    let server = etcd.start().expect("starts");
    let url = format!("{}/orders", server.url());
    let (one, two) = (open(&url).await, open(&url).await);
    let (info, grant) = (node(), acquire(&one, &ask("jobs", "node-1", 60)).await);
    let ttl = Ttl::from_secs(60).expect("a ttl");
    let Ok(Register::Registered(held)) = one.discovery().register(&info, ttl, Replace::No).await
    else {
        panic!("not registered")
    };
    empty(&server).await;
    assert!(matches!(said(&two).await, Some((HealthStatus::Warning, _))));
    assert_eq!(one.discovery().heartbeat(&held, &info).await.expect("asks"), Heartbeat::Gone);
    assert_eq!(one.lease().renew(&grant).await.expect("asks"), Renew::Lost(None));
    let third = open(&url).await;
    assert_eq!(third.info().origin, one.info().origin);
    empty(&server).await;
    // A write finds it missing as well, and is done.
    let next = acquire(&two, &ask("jobs", "node-2", 60)).await;
    assert!(next.term > grant.term);
    assert_eq!(open(&url).await.info().origin, one.info().origin);
    assert_eq!(said(&two).await, None);
    release(&two, &next).await;
}

async fn another(etcd: Etcd) {
    let server = etcd.start().expect("starts");
    let url = format!("{}/orders", server.url());
    let old = open(&url).await;
    let (info, grant) = (node(), acquire(&old, &ask("jobs", "node-1", 60)).await);
    let ttl = Ttl::from_secs(60).expect("a ttl");
    let Ok(Register::Registered(held)) = old.discovery().register(&info, ttl, Replace::No).await
    else {
        panic!("not registered")
    };
    empty(&server).await;
    let new = open(&url).await;
    assert_ne!(new.info().origin, old.info().origin);
    let watched = old.discovery().watch().next().await.expect("an end");
    for refusal in [
        old.discovery().heartbeat(&held, &info).await.err(),
        old.lease().renew(&grant).await.err(),
        old.lease().try_acquire(&ask("jobs", "node-1", 60)).await.err(),
        old.lease().get(&name("jobs")).await.err(),
        old.discovery().nodes().await.err(),
        watched.expect_err("a watch of another store").into(),
    ] {
        let error = refusal.expect("it was done in another store");
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        assert!(error.to_string().contains("open it again"), "{error}");
        assert_eq!(error.effect(), Effect::None, "{error}");
    }
    assert!(matches!(said(&old).await, Some((HealthStatus::Bad, _))));
    let won = new.lease().try_acquire(&ask("jobs", "node-2", 60)).await.expect("asks");
    assert!(matches!(won, Acquire::Acquired(_)), "{won:?}");
}
