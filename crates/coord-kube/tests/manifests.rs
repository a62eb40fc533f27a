//! The manifests hold only fields that Kubernetes knows, in the form that it knows them.

use std::path::PathBuf;

use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{Service, ServiceAccount};
use k8s_openapi::api::flowcontrol::v1::{FlowSchema, PriorityLevelConfiguration};
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

fn manifests() -> Vec<(String, Value)> {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/kubernetes"));
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("the manifests") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|end| end != "yaml") {
            continue;
        }
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&path).expect("readable");
        for document in text.split("\n---\n") {
            let value: Value = serde_saphyr::from_str(document).expect("YAML");
            found.push((name.clone(), value));
        }
    }
    found
}

/// Reads and writes it: what a type does not know is not there any more.
fn through<T: DeserializeOwned + Serialize>(value: &Value) -> Value {
    let typed: T = serde_json::from_value(value.clone()).expect("of that type");
    serde_json::to_value(typed).expect("writable")
}

/// The first place where something of the one is missing in the other.
fn lost(before: &Value, after: &Value, at: &str) -> Option<String> {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => before.iter().find_map(|(key, value)| {
            let at = format!("{at}.{key}");
            match after.get(key) {
                Some(after) => lost(value, after, &at),
                None => Some(at),
            }
        }),
        (Value::Array(before), Value::Array(after)) if before.len() == after.len() => {
            let mut pairs = before.iter().zip(after).enumerate();
            pairs.find_map(|(index, (one, two))| lost(one, two, &format!("{at}[{index}]")))
        }
        _ => (before != after).then(|| at.to_owned()),
    }
}

fn check(value: &Value) -> Option<String> {
    let after = match value["kind"].as_str().expect("a kind") {
        "Role" => through::<Role>(value),
        "RoleBinding" => through::<RoleBinding>(value),
        "ServiceAccount" => through::<ServiceAccount>(value),
        "Service" => through::<Service>(value),
        "Deployment" => through::<Deployment>(value),
        "StatefulSet" => through::<StatefulSet>(value),
        "FlowSchema" => through::<FlowSchema>(value),
        "PriorityLevelConfiguration" => through::<PriorityLevelConfiguration>(value),
        other => return Some(format!("kind {other}")),
    };
    lost(value, &after, "")
}

#[test]
fn every_field_is_known() {
    let all = manifests();
    assert_eq!(all.len(), 8, "{all:?}");
    for (name, value) in &all {
        assert_eq!(check(value), None, "{name} has a field that Kubernetes does not know");
    }
    // The check finds what is wrong.
    let (_, mut deployment) =
        all.into_iter().find(|(name, _)| name == "deployment.yaml").expect("a deployment");
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 30.into();
    let at = check(&deployment).expect("found");
    assert_eq!(at, ".spec.template.spec.terminationGracePeriod");
}

/// The document of this kind.
fn of_kind(kind: &str) -> Value {
    let mut all = manifests().into_iter().map(|(_, value)| value);
    all.find(|value| value["kind"] == kind).unwrap_or_else(|| panic!("there is no {kind}"))
}

#[test]
fn what_keeps_something_alive_has_a_share_of_its_own() {
    let (schema, account) = (of_kind("FlowSchema"), of_kind("ServiceAccount"));
    let level = &of_kind("PriorityLevelConfiguration")["metadata"]["name"];
    assert_eq!(schema["spec"]["priorityLevelConfiguration"]["name"], *level);
    // Before `service-accounts`, or it would match nothing.
    assert!(schema["spec"]["matchingPrecedence"].as_u64().expect("a number") < 9_000);
    let rule = &schema["spec"]["rules"][0];
    assert_eq!(rule["subjects"][0]["serviceAccount"]["name"], account["metadata"]["name"]);
    let requests = &rule["resourceRules"][0];
    assert_eq!(requests["namespaces"][0], rule["subjects"][0]["serviceAccount"]["namespace"]);
    assert_eq!(requests["resources"][0], "leases");
    let verbs: Vec<_> = requests["verbs"].as_array().expect("verbs").iter().collect();
    for verb in ["get", "create", "update"] {
        assert!(verbs.iter().any(|one| *one == verb), "{verbs:?}");
    }
    assert!(!verbs.iter().any(|one| *one == "list" || *one == "watch"), "{verbs:?}");
}

#[test]
fn pods_have_the_time_and_the_rights_that_they_need() {
    for (name, value) in manifests() {
        let kind = value["kind"].as_str().expect("a kind");
        if !matches!(kind, "Deployment" | "StatefulSet") {
            continue;
        }
        let pod = &value["spec"]["template"]["spec"];
        assert_eq!(pod["serviceAccountName"], "coord", "{name}");
        let seconds = pod["terminationGracePeriodSeconds"].as_u64().expect("a grace period");
        // The handoff timeout is 60 s.
        let least = if kind == "StatefulSet" { 60 + 3 + 15 } else { 15 };
        assert!(seconds >= least, "{name}: {seconds} s");
        let labels = &value["spec"]["template"]["metadata"]["labels"];
        assert_eq!(value["spec"]["selector"]["matchLabels"], *labels, "{name}");
    }
}
