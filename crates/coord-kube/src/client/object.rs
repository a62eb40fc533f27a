//! One object of the API server, as it was read: what is not known here is kept, and written back.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use serde_json::{Map, Value, json};

use crate::keys::{Keys, Kind, LABEL_CLUSTER, LABEL_KIND};

/// Which sort of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resource {
    Leases,
    ConfigMaps,
}

impl Resource {
    pub(crate) const ALL: [Self; 2] = [Self::Leases, Self::ConfigMaps];

    /// As a Role names it, with its API group.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Leases => "leases.coordination.k8s.io",
            Self::ConfigMaps => "configmaps",
        }
    }

    pub(crate) fn path(self, namespace: &str) -> String {
        match self {
            Self::Leases => format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"),
            Self::ConfigMaps => format!("/api/v1/namespaces/{namespace}/configmaps"),
        }
    }

    fn kind(self) -> (&'static str, &'static str) {
        match self {
            Self::Leases => ("coordination.k8s.io/v1", "Lease"),
            Self::ConfigMaps => ("v1", "ConfigMap"),
        }
    }
}

/// An object, whole.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    value: Value,
    /// What the API server's clock said when it answered, in seconds since 1970.
    pub(crate) read_at: Option<i64>,
}

impl Object {
    /// One that is to be created.
    pub(crate) fn new(resource: Resource, keys: &Keys, kind: Kind, name: &str) -> Self {
        let (version, word) = resource.kind();
        let value = json!({
            "apiVersion": version,
            "kind": word,
            "metadata": {
                "name": name,
                "labels": { LABEL_CLUSTER: keys.cluster(), LABEL_KIND: kind.as_str() },
            },
        });
        Self { value, read_at: None }
    }

    /// Takes what was read, if it is an object with a name.
    pub(crate) fn parse(value: Value, read_at: Option<i64>) -> Option<Self> {
        value.get("metadata")?.get("name")?.as_str()?;
        Some(Self { value, read_at })
    }

    pub(crate) fn as_value(&self) -> &Value {
        &self.value
    }

    pub(crate) fn name(&self) -> &str {
        self.metadata("name")
    }

    pub(crate) fn uid(&self) -> &str {
        self.metadata("uid")
    }

    /// Its `resourceVersion`.
    pub(crate) fn version(&self) -> &str {
        self.metadata("resourceVersion")
    }

    /// When it was created by the API server's clock, in seconds since 1970.
    pub(crate) fn created_at(&self) -> Option<i64> {
        let at: jiff::Timestamp = self.metadata("creationTimestamp").parse().ok()?;
        Some(at.as_second())
    }

    fn metadata(&self, field: &str) -> &str {
        self.value["metadata"][field].as_str().unwrap_or_default()
    }

    pub(crate) fn annotation(&self, key: &str) -> Option<&str> {
        self.value["metadata"]["annotations"][key].as_str()
    }

    pub(crate) fn set_annotation(&mut self, key: &str, text: impl Into<String>) {
        self.put(&["metadata", "annotations"], key, Value::String(text.into()));
    }

    pub(crate) fn remove_annotation(&mut self, key: &str) {
        if let Some(annotations) = self.value["metadata"]["annotations"].as_object_mut() {
            annotations.remove(key);
        }
    }

    pub(crate) fn label(&self, key: &str) -> Option<&str> {
        self.value["metadata"]["labels"][key].as_str()
    }

    pub(crate) fn set_label(&mut self, key: &str, text: &str) {
        self.put(&["metadata", "labels"], key, Value::String(text.to_owned()));
    }

    /// With the labels that it is found by, which another writer's object lacks.
    pub(crate) fn adopt(&mut self, keys: &Keys, kind: Kind) {
        if self.label(LABEL_CLUSTER) != Some(keys.cluster())
            || self.label(LABEL_KIND) != Some(kind.as_str())
        {
            self.set_label(LABEL_CLUSTER, keys.cluster());
            self.set_label(LABEL_KIND, kind.as_str());
        }
    }

    /// Owned by no pod, after which Kubernetes would collect it. What else owns it stays.
    pub(crate) fn disown_pods(&mut self) {
        let metadata = &mut self.value["metadata"];
        let Some(owners) = metadata["ownerReferences"].as_array_mut() else { return };
        owners.retain(|owner| owner["kind"] != "Pod");
        if let (true, Some(metadata)) = (owners.is_empty(), metadata.as_object_mut()) {
            metadata.remove("ownerReferences");
        }
    }

    /// Owned by this object, after which Kubernetes collects it.
    pub(crate) fn set_owner(&mut self, owner: Value) {
        self.put(&["metadata"], "ownerReferences", json!([owner]));
    }

    /// What a Lease says of its holder.
    pub(crate) fn spec(&self) -> &Value {
        &self.value["spec"]
    }

    pub(crate) fn set_spec(&mut self, field: &str, value: impl Into<Value>) {
        self.put(&["spec"], field, value.into());
    }

    pub(crate) fn data(&self, field: &str) -> Option<&str> {
        self.value["data"][field].as_str()
    }

    pub(crate) fn set_data(&mut self, field: &str, text: impl Into<String>) {
        self.put(&["data"], field, Value::String(text.into()));
    }

    pub(crate) fn binary(&self, field: &str) -> Option<Bytes> {
        let text = self.value["binaryData"][field].as_str()?;
        BASE64.decode(text).ok().map(Bytes::from)
    }

    /// With bytes that the API server never lets anybody change.
    pub(crate) fn set_immutable_binary(&mut self, field: &str, bytes: &[u8]) {
        self.put(&["binaryData"], field, Value::String(BASE64.encode(bytes)));
        self.put(&[], "immutable", Value::Bool(true));
    }

    fn put(&mut self, path: &[&str], field: &str, value: Value) {
        let mut at = &mut self.value;
        for part in path {
            at = fields(at).entry(*part).or_insert(Value::Null);
        }
        fields(at).insert(field.to_owned(), value);
    }
}

/// The fields of an object; something that is none becomes one.
fn fields(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(fields) => fields,
        _ => unreachable!("it was made one just now"),
    }
}

#[cfg(test)]
mod tests {
    use coord_core::ClusterName;

    use super::*;

    #[test]
    fn what_is_not_known_survives() {
        let read = json!({
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": "jobs", "uid": "u", "resourceVersion": "7", "generation": 3,
                "creationTimestamp": "2026-11-29T20:40:00Z",
            },
            "spec": { "holderIdentity": "host_1", "fromTheFuture": { "deep": [1, 2] } },
            "status": { "alsoNew": true },
        });
        let mut object = Object::parse(read.clone(), Some(5)).expect("an object");
        assert_eq!((object.name(), object.uid(), object.version()), ("jobs", "u", "7"));
        assert_eq!(object.created_at(), Some(1_795_984_800));
        let keys = Keys::new(ClusterName::new("orders").expect("cluster"));
        object.adopt(&keys, Kind::Lease);
        object.set_annotation("coord/term", "9");
        object.set_spec("holderIdentity", "");
        object.remove_annotation("absent");
        let mut right = read;
        right["metadata"]["labels"] = json!({ "coord/cluster": "orders", "coord/kind": "lease" });
        right["metadata"]["annotations"] = json!({ "coord/term": "9" });
        right["spec"]["holderIdentity"] = json!("");
        assert_eq!(*object.as_value(), right);
        assert!(Object::parse(json!([1]), None).is_none());
        assert!(Object::parse(json!({ "metadata": { "name": 1 } }), None).is_none());
    }

    #[test]
    fn only_pods_stop_owning() {
        let of = |owners: Value| {
            let metadata = json!({ "name": "n", "ownerReferences": owners });
            let mut object = Object::parse(json!({ "metadata": metadata }), None).expect("one");
            object.disown_pods();
            object.as_value()["metadata"]["ownerReferences"].clone()
        };
        let (pod, other) = (json!({ "kind": "Pod", "uid": "1" }), json!({ "kind": "StatefulSet" }));
        assert_eq!(of(json!([pod, other])), json!([other]));
        assert_eq!(of(json!([pod])), Value::Null);
        assert_eq!(of(Value::Null), Value::Null);
    }

    #[test]
    fn odd_shapes_are_no_panic() {
        let mut object =
            Object::parse(json!({ "metadata": { "name": "a" }, "spec": 7, "data": [] }), None)
                .expect("it has a name");
        assert_eq!((object.version(), object.annotation("x"), object.data("y")), ("", None, None));
        object.set_spec("holderIdentity", "me");
        object.set_data("head", "{}");
        assert_eq!(object.spec()["holderIdentity"], "me");
        assert_eq!(object.data("head"), Some("{}"));
        object.set_immutable_binary("chunk", &[0, 255]);
        assert_eq!(object.binary("chunk").as_deref(), Some(&[0, 255][..]));
    }
}
