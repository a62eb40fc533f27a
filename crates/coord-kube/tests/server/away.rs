//! A server that is not there, restarts, or is the wrong one.

use std::time::Duration;

use coord_core::watch::{Watched, Watcher};
use coord_core::{Backend as _, ErrorKind, HealthStatus, LeaseEvent};
use coord_integration::servers::{ApiServer, Kube};
use libtest_mimic::Trial;

use super::setup::{File, SOON, acquire, ask, cluster, lease, on, open, shared, try_open, until};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        on("a_restart_loses_nothing", &Kube::new().with_control(), a_restart_loses_nothing),
        shared("what_is_set_up_wrongly_is_told", what_is_set_up_wrongly_is_told),
        shared("a_namespace_that_is_not_there_is_told", a_namespace_that_is_not_there_is_told),
    ]
}

async fn a_restart_loses_nothing(kube: Kube) {
    let server = kube.start().expect("starts");
    let name = cluster();
    let (backend, other) = (open(&server, &name).await, open(&server, &name).await);
    let grant = acquire(&backend, &ask("jobs", "a", 60)).await;
    let mut watcher = Watcher::lease(other.lease(), lease("jobs"));
    let mut seen = Vec::new();
    let stopped = server.clone();
    tokio::task::spawn_blocking(move || {
        let (etcd, node) = (stopped.etcd()?, stopped.node()?);
        node.kill()?;
        etcd.restart()
    })
    .await
    .expect("runs")
    .expect("restarts");
    let error = backend.lease().renew(&grant).await.expect_err("it is away");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    // No connection is left over, and none can be made.
    let error = backend.lease().renew(&grant).await.expect_err("it is away");
    assert_eq!(error.effect(), coord_core::Effect::None, "it can't have been sent: {error}");
    assert_eq!(backend.check().await.expect("checks").status(), HealthStatus::Bad);
    let started = server.clone();
    tokio::task::spawn_blocking(move || started.node()?.start())
        .await
        .expect("runs")
        .expect("starts");
    let renewed =
        until("the lease is renewed", SOON, || async { backend.lease().renew(&grant).await.ok() })
            .await;
    assert!(matches!(renewed, coord_core::Renew::Renewed(_)), "{renewed:?}");
    backend.lease().release(&grant).await.expect("releases");
    let next = acquire(&other, &ask("jobs", "b", 60)).await;
    assert!(next.term > grant.term, "{} after {}", next.term, grant.term);
    // Whatever was told of the outage, the watch ends up with the new holder.
    let reading = async {
        loop {
            let event = watcher.next().await;
            seen.push(format!("{event:?}"));
            if let Watched::Event(LeaseEvent::Snapshot(Some(record)) | LeaseEvent::Changed(record)) =
                event
                && record.fence() == next.fence()
            {
                return;
            }
        }
    };
    let limit = Duration::from_secs(60);
    assert!(tokio::time::timeout(limit, reading).await.is_ok(), "the watch shows {seen:?}");
}

async fn what_is_set_up_wrongly_is_told(server: ApiServer) {
    let text = std::fs::read_to_string(server.kubeconfig()).expect("a kubeconfig");
    let address = server.address().expect("an address");
    let unused = coord_integration::free_port().expect("a port");
    let nobody = text.replace(&address, &format!("127.0.0.1:{unused}"));
    let authority = text.lines().find(|line| line.contains("certificate-authority"));
    let distrusted = text.replace(authority.expect("an authority"), "");
    for (text, kind, part) in [
        (nobody, ErrorKind::Unavailable, "no answer"),
        (distrusted, ErrorKind::Misconfigured, "authority"),
        ("not: a kubeconfig".to_owned(), ErrorKind::Misconfigured, "kubeconfig"),
        (
            text.replace("current-context: test", "current-context: x"),
            ErrorKind::Misconfigured,
            "x",
        ),
    ] {
        let file = File::new(&text);
        let error = try_open(&file.path(), &cluster()).await.expect_err(part);
        assert_eq!(error.kind(), kind, "{error:?}");
        assert!(error.to_string().contains(part), "{error:?}");
    }
    let absent = File::new("").path().with_file_name("nowhere");
    let error = try_open(&absent, &cluster()).await.expect_err("there is no file");
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error:?}");
    assert!(error.to_string().contains("nowhere"), "{error}");
}

async fn a_namespace_that_is_not_there_is_told(server: ApiServer) {
    let path = server.kubeconfig().display();
    let url = format!("kube:///{}?namespace=nowhere&kubeconfig={path}", cluster());
    let url = coord_core::BackendUrl::parse(&url).expect("a good URL");
    let error = coord_kube::KubeBackend::open(&url).await.expect_err("there is no such namespace");
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error:?}");
    assert!(error.to_string().contains("no namespace \"nowhere\""), "{error}");
    // The same cluster in two namespaces is two clusters.
    let made = r#"{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"second"}}"#;
    let asked = server.clone();
    let (status, answer) =
        tokio::task::spawn_blocking(move || asked.ask("POST", "/api/v1/namespaces", Some(made)))
            .await
            .expect("runs")
            .expect("answers");
    assert!([201, 409].contains(&status), "{status} {answer}");
    let name = cluster();
    let url = format!("kube:///{name}?namespace=second&kubeconfig={path}");
    let url = coord_core::BackendUrl::parse(&url).expect("a good URL");
    let second = coord_kube::KubeBackend::open(&url).await.expect("opens");
    let first = open(&server, &name).await;
    assert_ne!(first.info().origin, second.info().origin);
    acquire(&first, &ask("jobs", "a", 60)).await;
    assert!(second.lease().get(&lease("jobs")).await.expect("reads").is_none());
}
