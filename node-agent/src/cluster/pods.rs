//! The node's pods: reading them, and changing one that did not change since it was read.

use std::time::Duration;

use cluster_client::params::{DeleteParams, GetParams, Patch, PatchParams, Preconditions};
use cluster_client::{Built, Request};
use controller_runtime::ChangeError;
use controller_runtime::cluster::as_json_patch;
use controller_runtime::resync::{Freshness, ReadError, Selection};
use k8s_openapi::api::core::v1::ObjectReference;
use serde_json::{Map, Value, json};

use super::{Cluster, pod_reference};

/// All pods of all namespaces.
pub const PODS: &str = "/api/v1/pods";
/// All namespaces.
pub const NAMESPACES: &str = "/api/v1/namespaces";
/// The rights of agents that watch pods.
pub const REMEDY: &str =
    "give the agent's service account the verbs get, list and watch on pods (ClusterRole istio-cni)";
/// How long the agents of all nodes together take to watch again after the API server was gone.
pub const SPREAD: Duration = Duration::from_secs(60);

/// The pods of a namespace.
pub(super) fn of_namespace(namespace: &str) -> Request {
    Request::new(format!("/api/v1/namespaces/{namespace}/pods"))
}

/// What `keep` keeps of the pods of the agent's node, in the state of a moment ago: the API server need not query its store.
///
/// # Errors
/// Why they cannot be read.
pub async fn of_node<T: Send + 'static>(
    cluster: &Cluster,
    keep: impl Fn(&Value) -> Option<T> + Clone + Send + 'static,
) -> Result<Vec<T>, ReadError> {
    let fields = format!("spec.nodeName={}", cluster.identity().node);
    let selection = Selection { fields, labels: String::new() };
    Ok(cluster.list(PODS, &selection, Freshness::Remembered, keep).await?.kept)
}

/// A pod in its current state; none if it does not exist.
///
/// # Errors
/// Why it cannot be read.
pub async fn get(cluster: &Cluster, namespace: &str, name: &str) -> Result<Option<Value>, ReadError> {
    Ok(cluster.find(of_namespace(namespace).get(name, &GetParams::default())).await?)
}

/// The labels of an object.
#[must_use]
pub fn labels(object: &Value) -> Map<String, Value> {
    object.pointer("/metadata/labels").and_then(Value::as_object).cloned().unwrap_or_default()
}

/// The labels of a namespace in its current state; none if it does not exist.
///
/// # Errors
/// Why it cannot be read.
pub async fn namespace_labels(
    cluster: &Cluster,
    name: &str,
) -> Result<Option<Map<String, Value>>, ReadError> {
    let request = Request::new(NAMESPACES).get(name, &GetParams::default());
    Ok(cluster.find::<Value>(request).await?.map(|namespace| labels(&namespace)))
}

/// A pod as it was read.
#[derive(Debug, Clone, Copy)]
pub struct ObservedPod<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
    /// Its UID.
    pub uid: &'a str,
    /// Its version.
    pub version: &'a str,
}

impl ObservedPod<'_> {
    /// For events about it.
    #[must_use]
    pub fn reference(&self) -> ObjectReference {
        pod_reference(self.namespace, self.name, Some(self.uid))
    }

    /// The version is tested first: a patch applies to the current pod, and was computed from the one that was read.
    fn label_request(&self, has_labels: bool, (key, value): (&str, &str)) -> Built {
        let add = if has_labels {
            // RFC 6901
            let key = key.replace('~', "~0").replace('/', "~1");
            json!({"op": "add", "path": format!("/metadata/labels/{key}"), "value": value})
        } else {
            json!({"op": "add", "path": "/metadata/labels", "value": {key: value}})
        };
        let patch = Patch::Merge(json!([
            {"op": "test", "path": "/metadata/uid", "value": self.uid},
            {"op": "test", "path": "/metadata/resourceVersion", "value": self.version},
            add,
        ]));
        let pods = of_namespace(self.namespace);
        as_json_patch(pods.patch_subresource("status", self.name, &PatchParams::default(), &patch))
    }
}

/// Deletes a pod, with the grace period it asks for, if it did not change.
///
/// # Errors
/// Why it was not deleted.
pub async fn delete(cluster: &Cluster, pod: &ObservedPod<'_>) -> Result<(), ChangeError> {
    let observed =
        Preconditions { uid: Some(pod.uid.to_owned()), resource_version: Some(pod.version.to_owned()) };
    let parameters = DeleteParams::default().preconditions(observed);
    let request = of_namespace(pod.namespace).delete(pod.name, &parameters);
    Ok(cluster.json::<Value>(request).await.map(drop)?)
}

/// Writes an annotation of the pod of this name and UID, or removes it.
///
/// # Errors
/// Why it is not written. A pod with another UID does not get it.
pub async fn annotate(
    cluster: &Cluster,
    (namespace, name, uid): (&str, &str, &str),
    key: &str,
    value: Option<&str>,
) -> Result<(), ChangeError> {
    // The UID makes the API server refuse another pod.
    let patch = Patch::Merge(json!({"metadata": {"uid": uid, "annotations": {key: value}}}));
    let request = of_namespace(namespace).patch_subresource("status", name, &PatchParams::default(), &patch);
    Ok(cluster.json::<Value>(request).await.map(drop)?)
}

/// Adds a label to a pod, if it did not change; `has_labels`: whether it had a field of labels.
///
/// # Errors
/// Why it was not labelled.
pub async fn label(
    cluster: &Cluster,
    pod: &ObservedPod<'_>,
    has_labels: bool,
    (key, value): (&str, &str),
) -> Result<(), ChangeError> {
    let request = pod.label_request(has_labels, (key, value));
    match cluster.json::<Value>(request).await.map_err(ChangeError::from) {
        Ok(_) => Ok(()),
        // A failed test has the status of an invalid patch: the pod shows which of the two it was.
        Err(ChangeError::Untrue(why) | ChangeError::Rejected(why)) => {
            match get(cluster, pod.namespace, pod.name).await {
                Ok(Some(now)) if now["metadata"]["uid"] != pod.uid => Err(ChangeError::Gone),
                Ok(None) => Err(ChangeError::Gone),
                Ok(Some(now)) if now["metadata"]["resourceVersion"] != pod.version => {
                    Err(ChangeError::Changed(why))
                }
                Ok(Some(_)) | Err(_) => Err(ChangeError::Rejected(why)),
            }
        }
        Err(error) => Err(error),
    }
}
