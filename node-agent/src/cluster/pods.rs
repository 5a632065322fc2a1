//! The node's pods: reading them, and changing one that did not change since it was read.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use agent_runtime::ChangeError;
use agent_runtime::cluster::as_json_patch;
use agent_runtime::resync::{Freshness, Keep, ListLimits, ListSource, ReadError, Selection};
use cluster_client::params::{DeleteParams, GetParams, Patch, PatchParams, Preconditions};
use cluster_client::{ApiError, Built, Request};
use cni_core::pod_source::PodName;
use k8s_openapi::api::core::v1::ObjectReference;
use serde_json::{Map, Value, json};

use super::{Cluster, pod_reference};

/// Where namespaces are.
const NAMESPACES: &str = "/api/v1/namespaces";
/// How many namespaces an agent follows. Kubernetes is tested with 10,000.
const NAMESPACE_LIMITS: ListLimits = ListLimits { objects: 20_000, bytes: 64 << 20 };
/// The rights of agents that watch pods.
pub const REMEDY: &str =
    "give the agent's service account the verbs get, list and watch on pods (ClusterRole istio-cni)";
/// How long the agents of all nodes together take to watch again after the API server was gone.
pub const SPREAD: Duration = Duration::from_secs(60);

/// The pods of all namespaces, for one who selects those of a node.
#[must_use]
pub fn source() -> ListSource {
    ListSource { path: "/api/v1/pods".to_owned(), kind: "PodList", limits: ListLimits::OF_NODE }
}

/// Those of a node.
#[must_use]
pub fn of_node(node: &str) -> Selection {
    Selection { fields: format!("spec.nodeName={node}"), labels: String::new() }
}

/// All namespaces.
#[must_use]
pub fn namespaces() -> ListSource {
    ListSource { path: NAMESPACES.to_owned(), kind: "NamespaceList", limits: NAMESPACE_LIMITS }
}

/// The pods of a namespace.
pub(super) fn of_namespace(namespace: &str) -> Request {
    Request::new(format!("/api/v1/namespaces/{namespace}/pods"))
}

/// A pod as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedPod {
    /// Its namespace and name.
    pub name: PodName,
    /// Which of all pods that ever had this name.
    pub uid: String,
    /// Which of all versions of it.
    pub version: String,
}

impl ObservedPod {
    /// Which pod an object is; none if a part of that is missing.
    #[must_use]
    pub fn of(pod: &Value) -> Option<Self> {
        let metadata = pod.get("metadata")?;
        let text = |key| metadata.get(key)?.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        let name = PodName { namespace: text("namespace")?, name: text("name")? };
        Some(Self { name, uid: text("uid")?, version: text("resourceVersion")? })
    }

    /// For events about it.
    #[must_use]
    pub fn reference(&self) -> ObjectReference {
        pod_reference(&self.name.namespace, &self.name.name, Some(&self.uid))
    }
}

/// What decides of a pod at one version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodText {
    /// Which pod.
    pub pod: ObservedPod,
    /// The object.
    pub json: Arc<str>,
}

/// What is kept of the pods of the agent's node. Of a pod that is the same as in the last list, no more than the metadata is read.
#[derive(Debug, Clone)]
pub struct NodePods<T> {
    /// Pods of the last list, by their UIDs.
    listed: Arc<BTreeMap<String, ListedPod<T>>>,
}

/// A pod at one version, and what was kept of it, if anything.
#[derive(Debug, Clone)]
struct ListedPod<T> {
    version: String,
    kept: Option<T>,
}

impl<T> Default for NodePods<T> {
    fn default() -> Self {
        Self { listed: Arc::default() }
    }
}

impl<T: Clone + Send + Sync + 'static> NodePods<T> {
    /// Takes the pods from those that the agent holds. `keep` must always decide the same.
    pub fn take(&mut self, held: Vec<PodText>, keep: impl Fn(&Value) -> Option<T>) -> Vec<T> {
        let listed = held.into_iter().map(|PodText { pod: ObservedPod { uid, version, .. }, json }| {
            let listed = same(&self.listed, &uid, &version).unwrap_or_else(|| {
                let kept = serde_json::from_str(&json).ok().and_then(|pod| keep(&pod));
                ListedPod { version, kept }
            });
            (uid, listed)
        });
        self.listed = Arc::new(listed.collect());
        self.listed.values().filter_map(|pod| pod.kept.clone()).collect()
    }

    /// Lists the pods, in the state of a moment ago: the API server need not query its store. `keep` must always decide the same.
    ///
    /// # Errors
    /// Why they cannot be read.
    pub async fn list(
        &mut self,
        cluster: &Cluster,
        keep: impl Fn(&Value) -> Option<T> + Clone + Send + 'static,
    ) -> Result<Vec<T>, ReadError> {
        let selection = of_node(&cluster.identity().node);
        let keep = KeepChanged { listed: self.listed.clone(), keep };
        let listed = cluster.list(&source(), &selection, Freshness::Remembered, keep).await?;
        let kept = listed.kept.iter().filter_map(|(_, pod)| pod.kept.clone()).collect();
        self.listed = Arc::new(listed.kept.into_iter().collect());
        Ok(kept)
    }
}

/// Reads the pods that were not in the last list, or have another version now.
#[derive(Clone)]
struct KeepChanged<T, F> {
    listed: Arc<BTreeMap<String, ListedPod<T>>>,
    keep: F,
}

impl<T, F> Keep for KeepChanged<T, F>
where
    T: Clone + Send + Sync + 'static,
    F: Fn(&Value) -> Option<T> + Clone + Send + 'static,
{
    type Kept = (String, ListedPod<T>);

    fn by_metadata(&self, metadata: &Value) -> Option<Self::Kept> {
        let (uid, version) = identity(metadata)?;
        Some((uid.to_owned(), same(&self.listed, uid, version)?))
    }

    fn of(&self, pod: &Value) -> Option<Self::Kept> {
        let (uid, version) = identity(pod.get("metadata")?)?;
        Some((uid.to_owned(), ListedPod { version: version.to_owned(), kept: (self.keep)(pod) }))
    }
}

/// Whether a text can be the name of a pod or a namespace, and part of a path at the API server.
#[must_use]
pub fn is_name(text: &str) -> bool {
    let is_part =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
    (1..=253).contains(&text.len()) && text.bytes().all(is_part) && !text.starts_with('.')
}

/// A pod that was listed, if it has this version still.
fn same<T: Clone>(listed: &BTreeMap<String, ListedPod<T>>, uid: &str, version: &str) -> Option<ListedPod<T>> {
    listed.get(uid).filter(|listed| listed.version == version).cloned()
}

/// Copies fields, each by its object and its name, into another object; makes objects that this lacks.
pub fn copy_fields(pod: &Value, fields: &[(&str, &str)], into: &mut Value) {
    let Value::Object(into) = into else { return };
    for (object, field) in fields {
        let Some(value) = pod.get(object).and_then(|object| object.get(field)) else { continue };
        let part = into.entry(*object).or_insert_with(|| Value::Object(Map::new()));
        if let Value::Object(part) = part {
            part.insert((*field).to_owned(), value.clone());
        }
    }
}

/// The UID and the version: two objects with the same of both are the same.
#[must_use]
pub fn identity(metadata: &Value) -> Option<(&str, &str)> {
    let text = |key| metadata.get(key).and_then(Value::as_str).filter(|text| !text.is_empty());
    Some((text("uid")?, text("resourceVersion")?))
}

/// A pod in its current state; none if it does not exist.
///
/// # Errors
/// Why it cannot be read.
pub async fn get(cluster: &Cluster, namespace: &str, name: &str) -> Result<Option<Value>, ReadError> {
    find(cluster, &of_namespace(namespace), name).await
}

/// An object of this name, as long as that is what the API server answers with: keys that another one lacks would decide.
async fn find(cluster: &Cluster, of: &Request, name: &str) -> Result<Option<Value>, ReadError> {
    let found: Option<Value> = cluster.find(of.get(name, &GetParams::default())).await?;
    if found.as_ref().is_some_and(|found| found["metadata"]["name"] != name) {
        let server = cluster.client().server().to_owned();
        let what = format!("requested {name}, received something else");
        return Err(ApiError::Garbled { server, what }.into());
    }
    Ok(found)
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
    let namespace = find(cluster, &Request::new(NAMESPACES), name).await?;
    Ok(namespace.as_ref().map(labels))
}

/// The version is tested first: a patch applies to the current pod, and was computed from the one that was read.
fn label_request(pod: &ObservedPod, has_labels: bool, (key, value): (&str, &str)) -> Built {
    let add = if has_labels {
        // RFC 6901
        let key = key.replace('~', "~0").replace('/', "~1");
        json!({"op": "add", "path": format!("/metadata/labels/{key}"), "value": value})
    } else {
        json!({"op": "add", "path": "/metadata/labels", "value": {key: value}})
    };
    let patch = Patch::Merge(json!([
        {"op": "test", "path": "/metadata/uid", "value": pod.uid},
        {"op": "test", "path": "/metadata/resourceVersion", "value": pod.version},
        add,
    ]));
    let pods = of_namespace(&pod.name.namespace);
    as_json_patch(pods.patch_subresource("status", &pod.name.name, &PatchParams::default(), &patch))
}

/// Deletes a pod, with the grace period it asks for, if it did not change.
///
/// # Errors
/// Why it was not deleted.
pub async fn delete(cluster: &Cluster, pod: &ObservedPod) -> Result<(), ChangeError> {
    let ObservedPod { name, uid, version } = pod.clone();
    let observed = Preconditions { uid: Some(uid), resource_version: Some(version) };
    let parameters = DeleteParams::default().preconditions(observed);
    let request = of_namespace(&name.namespace).delete(&name.name, &parameters);
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
    pod: &ObservedPod,
    has_labels: bool,
    (key, value): (&str, &str),
) -> Result<(), ChangeError> {
    let request = label_request(pod, has_labels, (key, value));
    match cluster.json::<Value>(request).await.map_err(ChangeError::from) {
        Ok(_) => Ok(()),
        // A failed test has the status of an invalid patch: the pod shows which of the two it was.
        Err(ChangeError::Untrue(why) | ChangeError::Rejected(why)) => {
            match get(cluster, &pod.name.namespace, &pod.name.name).await {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_no_paths() {
        assert!(is_name("web-7d9f.b") && is_name("7"));
        for text in ["", ".", "..", "a/b", "a?b", "A", "a b", "a%2f", &"a".repeat(254)] {
            assert!(!is_name(text), "{text}");
        }
    }

    #[test]
    fn a_pod_of_the_last_list_is_read_again_when_it_is_another_or_has_another_version() {
        let read = |pod: &Value| pod.pointer("/spec/x").cloned();
        let pod = |uid: &str, version: &str, x: u8| json!({"metadata": {"uid": uid, "resourceVersion": version}, "spec": {"x": x}});
        let mut keep = KeepChanged { listed: Arc::default(), keep: read };
        let (uid, first) = keep.of(&pod("a", "1", 1)).expect("a pod");
        assert_eq!((uid.as_str(), &first.kept), ("a", &Some(json!(1))));
        keep.listed = Arc::new(BTreeMap::from([(uid, first)]));
        let known = |uid: &str, version: &str| {
            keep.by_metadata(&pod(uid, version, 2)["metadata"]).map(|(_, pod)| pod.kept)
        };
        assert_eq!(known("a", "1"), Some(Some(json!(1))));
        for (uid, version) in [("a", "2"), ("b", "1"), ("a", ""), ("", "")] {
            assert_eq!(known(uid, version), None, "{uid} {version}");
        }
        // Of most pods nothing is kept, and that is known, too.
        let (_, other) = keep.of(&json!({"metadata": {"uid": "c", "resourceVersion": "1"}})).expect("a pod");
        assert_eq!(other.kept, None);
        assert!(keep.of(&json!({"metadata": {"uid": "c"}})).is_none());
    }
}
