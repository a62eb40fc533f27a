//! Permissions and credentials.

use std::fmt::Write as _;
use std::sync::Arc;

use async_trait::async_trait;
use coord_conformance::{Fixture, Handle, Profile, Verdict};
use coord_core::{Backend as _, ClusterName, ErrorKind, HealthStatus, Result};
use coord_integration::servers::{ApiServer, Kube};
use k8s_openapi::api::rbac::v1::Role;
use libtest_mimic::Trial;

use super::setup::{File, acquire, ask, cluster, on, renew, shared, try_open};

const ROLE: &str = include_str!("../../../../deploy/kubernetes/role.yaml");
const ACCOUNT: &str = include_str!("../../../../deploy/kubernetes/service-account.yaml");
pub(crate) const TOKEN: &str = "token-of-the-service-account";
pub(crate) const USER: &str = "system:serviceaccount:default:coord";

/// Every call of the three traits is in one of these.
const ESSENTIAL: &[&str] = &[
    "backend::a_working_store_is_in_order",
    "lease::a_release_frees_the_lease",
    "lease::the_list_shows_what_is_held",
    "lease::a_watch_shows_holders_and_releases",
    "lease::a_watch_shows_expiry",
    "discovery::a_watch_shows_joins_updates_and_departures",
    "discovery::an_eviction_removes_the_record",
    "discovery::many_nodes_are_listed_in_order",
    "placement::a_watch_shows_the_newest_map",
    "placement::a_large_map_is_stored_whole",
    "placement::readers_see_whole_maps_only",
    "placement::tables_are_apart",
    "requests::an_answer_is_seen",
    "requests::an_answer_is_fenced",
    "requests::a_request_is_forgotten_at_its_limit",
];

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        on("the_role_is_enough", &with_account(), the_role_is_enough),
        on("each_missing_verb_is_named", &lacking(), each_missing_verb_is_named),
        on(
            "a_token_that_was_replaced_is_read_again",
            &Kube::new().with_changing_tokens(),
            replaced_token,
        ),
        shared("a_wrong_token_is_denied", a_wrong_token_is_denied),
    ]
}

/// Where the manifests' service account may do what its Role says.
pub(crate) fn with_account() -> Kube {
    Kube::new().with_token(TOKEN, USER).with_rbac(in_default(&[ROLE, ACCOUNT]))
}

/// The documents in the namespace `default`, as `kubectl apply --namespace default` puts them there.
fn in_default(documents: &[&str]) -> String {
    let all = documents.join("\n---\n");
    all.replace("metadata:\n  name: coord", "metadata:\n  name: coord\n  namespace: default")
}

#[derive(Debug)]
struct AsAccount {
    kubeconfig: File,
}

#[async_trait]
impl Fixture for AsAccount {
    fn name(&self) -> &str {
        "kube"
    }

    fn profile(&self) -> Profile {
        Profile::real_time().with_secrets([TOKEN.to_owned()])
    }

    async fn open(&self, cluster: &ClusterName) -> Result<Handle> {
        let backend = try_open(&self.kubeconfig.path(), cluster.as_str()).await?;
        Ok(Handle::new(Arc::new(backend)))
    }
}

async fn the_role_is_enough(kube: Kube) {
    let server = kube.start().expect("starts");
    let address = server.address().expect("an address").parse().expect("an address");
    let kubeconfig = File::new(&server.kubeconfig_via(address, TOKEN).expect("a kubeconfig"));
    let fixture: Arc<dyn Fixture> = Arc::new(AsAccount { kubeconfig });
    for name in ESSENTIAL {
        let case = coord_conformance::cases().find(|case| case.name() == *name);
        let case = case.unwrap_or_else(|| panic!("there is no trial {name}"));
        let fixture = Arc::clone(&fixture);
        // A trial brings a runtime of its own.
        let verdict = tokio::task::spawn_blocking(move || case.run(&fixture)).await.expect("runs");
        assert!(matches!(verdict, Verdict::Passed), "{name}: {verdict:?}");
    }
}

/// What the Role allows: (API group, resource, verb) each.
fn permissions() -> Vec<(String, String, String)> {
    let role: Role = serde_saphyr::from_str(ROLE).expect("a role");
    let mut all = Vec::new();
    for rule in role.rules.expect("rules") {
        for group in rule.api_groups.iter().flatten() {
            for resource in rule.resources.iter().flatten() {
                all.extend(
                    rule.verbs.iter().map(|verb| (group.clone(), resource.clone(), verb.clone())),
                );
            }
        }
    }
    all
}

/// A server with a user for each permission, who has all but that one.
fn lacking() -> Kube {
    let all = permissions();
    let mut documents = String::new();
    let mut kube = Kube::new();
    for (index, lacked) in all.iter().enumerate() {
        let meta = format!("metadata:\n  name: without-{index}\n  namespace: default\n");
        write!(
            documents,
            "\n---\napiVersion: rbac.authorization.k8s.io/v1\nkind: Role\n{meta}rules:"
        )
        .expect("written");
        for (group, resource, verb) in all.iter().filter(|one| *one != lacked) {
            write!(
                documents,
                "\n- apiGroups: [\"{group}\"]\n  resources: [{resource}]\n  verbs: [{verb}]"
            )
            .expect("written");
        }
        write!(
            documents,
            "\n---\napiVersion: rbac.authorization.k8s.io/v1\nkind: RoleBinding\n{meta}roleRef:\n  \
             apiGroup: rbac.authorization.k8s.io\n  kind: Role\n  name: without-{index}\nsubjects:\n\
             - kind: User\n  name: user-{index}"
        )
        .expect("written");
        kube = kube.with_token(&format!("token-{index}"), &format!("user-{index}"));
    }
    kube.with_rbac(documents)
}

async fn each_missing_verb_is_named(kube: Kube) {
    let server = kube.start().expect("starts");
    let address = server.address().expect("an address").parse().expect("an address");
    let all = permissions();
    assert_eq!(all.len(), 13, "{all:?}");
    for (index, (group, resource, verb)) in all.iter().enumerate() {
        let token = format!("token-{index}");
        let kubeconfig = File::new(&server.kubeconfig_via(address, &token).expect("a kubeconfig"));
        let opened = try_open(&kubeconfig.path(), &cluster()).await;
        let what = if group.is_empty() { resource.clone() } else { format!("{resource}.{group}") };
        let right = format!("may not {verb} {what} in namespace \"default\"");
        if resource == "namespaces" {
            let error = opened.expect_err("it may not read the namespace");
            assert_eq!(error.kind(), ErrorKind::Denied);
            assert!(error.to_string().contains(&right), "{error}");
            continue;
        }
        let backend = opened.expect("opens");
        let health = backend.check().await.expect("checks");
        assert_eq!(health.status(), HealthStatus::Bad, "without {verb} {what}: {health:?}");
        let bad: Vec<_> =
            health.points.iter().filter(|point| point.status == HealthStatus::Bad).collect();
        assert_eq!(bad.len(), 1, "without {verb} {what}: {health:?}");
        assert_eq!(bad[0].name, "permissions");
        assert!(bad[0].detail.contains(&right), "without {verb} {what}: {health:?}");
        assert!(!format!("{health:?}").contains(&token), "{health:?}");
    }
    // The real call says it as well.
    let token = all.iter().position(|(_, resource, verb)| resource == "leases" && verb == "update");
    let token = format!("token-{}", token.expect("a verb"));
    let kubeconfig = File::new(&server.kubeconfig_via(address, &token).expect("a kubeconfig"));
    let backend = try_open(&kubeconfig.path(), &cluster()).await.expect("opens");
    let error = backend.lease().try_acquire(&ask("jobs", "a", 5)).await.expect_err("denied");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, coord_core::Effect::None));
    assert!(error.to_string().contains("may not update leases.coordination.k8s.io"), "{error}");
}

async fn replaced_token(kube: Kube) {
    let server = kube.start().expect("starts");
    let file = File::new("");
    let token = file.path().with_file_name("token");
    std::fs::write(&token, "first").expect("written");
    server.set_tokens(&[("first", "user,system:masters")]).expect("set");
    let text = server.kubeconfig_with_token_file(&token).expect("a kubeconfig");
    std::fs::write(file.path(), text).expect("written");
    let backend = try_open(&file.path(), &cluster()).await.expect("opens");
    let grant = acquire(&backend, &ask("jobs", "a", 30)).await;
    // As the kubelet does it; the client has read the first within the last minute.
    std::fs::write(&token, "second").expect("written");
    server.set_tokens(&[("second", "user,system:masters")]).expect("set");
    let grant = renew(&backend, &grant).await;
    // Without a new one it is denied, and shows neither.
    server.set_tokens(&[("third", "user,system:masters")]).expect("set");
    let error = backend.lease().renew(&grant).await.expect_err("denied");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, coord_core::Effect::None));
    assert!(!format!("{error:?}").contains("second"), "{error:?}");
}

async fn a_wrong_token_is_denied(server: ApiServer) {
    let address = server.address().expect("an address").parse().expect("an address");
    let kubeconfig = File::new(&server.kubeconfig_via(address, "wr0ng").expect("a kubeconfig"));
    let error = try_open(&kubeconfig.path(), &cluster()).await.expect_err("denied");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(error.to_string().contains("token"), "{error}");
    assert!(!format!("{error:?}").contains("wr0ng"), "{error:?}");
}
