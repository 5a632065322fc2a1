//! The fields of the API's objects that are read, and no others: lists of a large cluster do not fit into memory otherwise.

use std::collections::BTreeMap;

use cni_core::enablement::REDIRECTION_ANNOTATION;
use k8s_openapi::api::core::v1::{Container, ContainerStatus, NodeSystemInfo};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use redirect_core::pod::STATUS_ANNOTATION;
use serde::Deserialize;

/// A page of a list.
#[derive(Debug, Deserialize)]
#[serde(bound = "T: Deserialize<'de>")]
pub struct List<T> {
    /// Where the next page begins.
    #[serde(default)]
    pub metadata: ListMeta,
    /// Its objects.
    // Servers may write null for an empty list.
    #[serde(default = "Vec::new", deserialize_with = "or_default")]
    pub items: Vec<T>,
}

/// Any object, of which only this is of interest.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Object {
    /// Its name and labels.
    #[serde(default)]
    pub metadata: Meta,
}

/// What all objects have.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Meta {
    /// Its name.
    pub name: String,
    /// Empty for what has none.
    pub namespace: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
    /// Since when it is being deleted.
    pub deletion_timestamp: Option<String>,
}

/// A pod.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Pod {
    /// Its name and labels.
    pub metadata: Meta,
    /// What it should be.
    pub spec: PodSpec,
    /// What it is.
    pub status: PodStatus,
}

impl Pod {
    /// `NAMESPACE/NAME`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}/{}", self.metadata.namespace, self.metadata.name)
    }

    /// Whether the mesh's injector has dealt with it.
    #[must_use]
    pub fn is_of_mesh(&self) -> bool {
        self.metadata.annotations.contains_key(STATUS_ANNOTATION)
    }

    /// Whether the agent has dealt with it as a pod of ambient mode.
    #[must_use]
    pub fn is_of_ambient(&self) -> bool {
        self.metadata.annotations.contains_key(REDIRECTION_ANNOTATION)
    }

    /// Whether it has ended for good.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.status.phase.as_str(), "Succeeded" | "Failed")
    }
}

/// What a pod should be.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    /// Its node, once it has one.
    pub node_name: String,
    /// Whether it uses its node's network.
    pub host_network: bool,
    /// Its containers.
    pub containers: Vec<Container>,
}

/// What a pod is.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatus {
    /// Pending, Running, Succeeded, Failed.
    pub phase: String,
    /// Its containers.
    #[serde(deserialize_with = "or_default")]
    pub container_statuses: Vec<ContainerStatus>,
    /// Its init containers.
    #[serde(deserialize_with = "or_default")]
    pub init_container_statuses: Vec<ContainerStatus>,
}

/// A node.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Node {
    /// Its name and labels.
    pub metadata: Meta,
    /// What it is.
    pub status: NodeStatus,
}

/// What a node is.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeStatus {
    /// Its system.
    pub node_info: NodeSystemInfo,
}

/// A DaemonSet.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Workload {
    /// Its name and labels.
    pub metadata: Meta,
    /// What it should be.
    pub spec: WorkloadSpec,
}

impl Workload {
    /// Its containers.
    #[must_use]
    pub fn containers(&self) -> &[Container] {
        &self.spec.template.spec.containers
    }
}

/// What a DaemonSet or Deployment should be.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct WorkloadSpec {
    /// Its pods.
    pub template: Pod,
}

/// A ConfigMap.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct ConfigMap {
    /// Its name and labels.
    pub metadata: Meta,
    /// Its texts.
    #[serde(deserialize_with = "or_default")]
    pub data: BTreeMap<String, String>,
}

fn or_default<'de, D: serde::Deserializer<'de>, T: Deserialize<'de> + Default>(
    from: D,
) -> Result<T, D::Error> {
    Option::deserialize(from).map(Option::unwrap_or_default)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_read_with_whatever_they_lack() {
        let list: List<Pod> = serde_json::from_str(
            r#"{"kind":"PodList","metadata":{"continue":"x"},"items":[{"metadata":{"name":"a"},
                "status":{"containerStatuses":null,"initContainerStatuses":[{"name":"i","lastState":{}}]}}]}"#,
        )
        .expect("a list");
        assert_eq!((list.items.len(), list.metadata.continue_.as_deref()), (1, Some("x")));
        let empty: List<Node> = serde_json::from_str(r#"{"items":null}"#).expect("a list");
        assert!(empty.items.is_empty() && empty.metadata.continue_.is_none());
    }
}
