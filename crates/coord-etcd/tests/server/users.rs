//! Users, passwords, tokens, certificates.

use coord_core::{Backend as _, ErrorKind, HealthStatus, Renew};
use coord_etcd::EtcdBackend;
use coord_integration::free_port;
use coord_integration::servers::Etcd;
use etcd_client::{Permission, PermissionType};
use futures::StreamExt as _;
use libtest_mimic::Trial;

use super::setup::{acquire, admin, ask, name, on, open, release, renew, until, url};

const PASSWORD: &str = "hunter2-root";

pub(crate) fn trials() -> Vec<Trial> {
    let plain = Etcd::new();
    let locked = Etcd::new().with_root_password(PASSWORD).with_control();
    let mut trials = vec![
        on("a_wrong_password_is_denied", &locked, a_wrong_password_is_denied),
        on("a_lost_token_is_renewed", &locked, a_lost_token_is_renewed),
        on("a_user_needs_its_prefix_only", &locked, a_user_needs_its_prefix_only),
        on("a_closed_port_is_told_apart", &plain, a_closed_port_is_told_apart),
    ];
    #[cfg(feature = "tls")]
    trials.push(on("tls_is_spoken", &Etcd::new().with_tls(), tls_is_spoken));
    trials.push(on("a_user_on_an_open_server_is_told", &plain, a_user_on_an_open_server_is_told));
    trials
}

async fn a_wrong_password_is_denied(etcd: Etcd) {
    let server = etcd.start().expect("starts");
    let wrong = format!("etcd://root:hunter2-wrong@{}/orders", server.addresses()[0]);
    let none = format!("etcd://{}/orders", server.addresses()[0]);
    for (text, part) in [(wrong, "user or the password is wrong"), (none, "wants a user")] {
        let error = EtcdBackend::open(&url(&text)).await.expect_err("denied");
        assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
        assert!(error.to_string().contains(part), "{error}");
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    }
}

async fn a_user_on_an_open_server_is_told(etcd: Etcd) {
    let server = etcd.start().expect("starts");
    let text = format!("etcd://root:hunter2@{}/orders", server.addresses()[0]);
    let error = EtcdBackend::open(&url(&text)).await.expect_err("no authentication there");
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error:?}");
}

async fn a_closed_port_is_told_apart(_: Etcd) {
    let text = format!("etcd://127.0.0.1:{}/orders", free_port().expect("a port"));
    let error = EtcdBackend::open(&url(&text)).await.expect_err("nobody listens");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(error.to_string().contains("is the server up there?"), "{error}");
}

/// A server forgets its tokens when it restarts: requests, keep-alives and watches need new ones.
async fn a_lost_token_is_renewed(etcd: Etcd) {
    let server = etcd.start().expect("starts");
    let backend = open(&format!("{}/orders", server.url())).await;
    let grant = acquire(&backend, &ask("jobs", "node-1", 60)).await;
    renew(&backend, &grant).await;
    server.nodes()[0].restart().expect("restarts");
    until("the grant is renewed again", || async {
        let renewed = backend.lease().renew(&grant).await.inspect_err(|error| {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        });
        matches!(renewed, Ok(Renew::Renewed(_))).then_some(())
    })
    .await;
    let first = backend.lease().watch(&name("jobs")).next().await.expect("an event");
    assert!(first.is_ok(), "{first:?}");
}

/// The permissions that the documentation names are enough, and all of them are needed.
async fn a_user_needs_its_prefix_only(etcd: Etcd) {
    let server = etcd.start().expect("starts");
    let mut root = admin(server.addresses(), Some(PASSWORD)).await;
    root.role_add("orders").await.expect("a role");
    let prefix = Permission::new(PermissionType::Readwrite, "coord/orders/").with_prefix();
    root.role_grant_permission("orders", prefix).await.expect("a permission");
    root.user_add("orders", "hunter2", None).await.expect("a user");
    root.user_grant_role("orders", "orders").await.expect("a role");
    let address = &server.addresses()[0];
    let backend = open(&format!("etcd://orders:hunter2@{address}/orders")).await;
    let grant = acquire(&backend, &ask("jobs", "node-1", 60)).await;
    renew(&backend, &grant).await;
    release(&backend, &grant).await;
    let health = backend.check().await.expect("checks");
    assert_ne!(health.status(), HealthStatus::Bad, "{health:?}");

    let other = format!("etcd://orders:hunter2@{address}/other");
    let error = EtcdBackend::open(&url(&other)).await.expect_err("not permitted");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");

    root.role_revoke_permission(
        "orders",
        "coord/orders/",
        Some(etcd_client::RoleRevokePermissionOptions::new().with_prefix()),
    )
    .await
    .expect("revoked");
    let health = backend.check().await.expect("checks");
    let bad = health.points.iter().find(|point| point.status == HealthStatus::Bad);
    let bad = bad.unwrap_or_else(|| panic!("nothing is found: {health:?}"));
    assert_eq!(bad.name, "permissions", "{health:?}");
    assert!(bad.detail.contains("prefix coord/orders/"), "{health:?}");
}

#[cfg(feature = "tls")]
async fn tls_is_spoken(etcd: Etcd) {
    let server = etcd.start().expect("starts");
    let address = &server.addresses()[0];
    let ca = server.authority().expect("an authority").display().to_string();
    let backend = open(&format!("etcd://{address}/orders?tls=on&ca={ca}")).await;
    let grant = acquire(&backend, &ask("jobs", "node-1", 60)).await;
    renew(&backend, &grant).await;

    for (options, kind) in [
        ("", ErrorKind::Unavailable),
        // Its authority is not one that this machine trusts.
        ("?tls=on", ErrorKind::Misconfigured),
        ("?tls=on&ca=/no/such/file", ErrorKind::Invalid),
    ] {
        let text = format!("etcd://{address}/orders{options}&request_timeout=2s");
        let text = if options.is_empty() { text.replacen('&', "?", 1) } else { text };
        let error = EtcdBackend::open(&url(&text)).await.expect_err(options);
        assert_eq!(error.kind(), kind, "{options}: {error:?}");
    }
}
