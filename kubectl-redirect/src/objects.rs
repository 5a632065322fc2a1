//! The fields of the API's objects that are read, and no others: lists of a large cluster do not fit into memory otherwise.

use redirect_core::pod::PodFacts;
use std::collections::BTreeMap;

use cni_core::enablement::REDIRECTION_ANNOTATION;
use k8s_openapi::api::core::v1::{Container, ContainerStatus, NodeAddress, NodeCondition, NodeSystemInfo};
use k8s_openapi::api::rbac::v1::Subject;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde::Deserialize;
use serde_json::Value;

/// Any object, of which only this is of interest.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Object {
    /// Its name and labels.
    #[serde(default)]
    pub metadata: Meta,
}

/// What all objects have.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
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
    /// Which of all objects that ever had this name.
    pub uid: String,
    /// What it belongs to.
    #[serde(deserialize_with = "or_default")]
    pub owner_references: Vec<OwnerReference>,
}

impl Meta {
    /// `NAMESPACE/NAME`.
    #[must_use]
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Whether it has this label, with this value.
    #[must_use]
    pub fn has_label(&self, (key, value): (&str, &str)) -> bool {
        self.labels.get(key).is_some_and(|label| label == value)
    }
}

/// An event.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterEvent {
    /// What it is about.
    pub involved_object: Meta,
    /// What happened, in a word.
    pub reason: String,
    /// The same in a sentence.
    pub message: String,
    /// How often.
    #[serde(deserialize_with = "or_default")]
    pub count: usize,
    /// When that happened last, as a time that sorts as text.
    #[serde(deserialize_with = "or_default")]
    pub last_timestamp: String,
}

/// A pod.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct ClusterPod {
    /// Its name and labels.
    pub metadata: Meta,
    /// What it should be.
    pub spec: PodSpec,
    /// What it is.
    pub status: PodStatus,
}

impl ClusterPod {
    /// Whether the mesh's injector has dealt with it.
    #[must_use]
    pub fn is_of_mesh(&self) -> bool {
        self.metadata.annotations.contains_key(PodFacts::STATUS_ANNOTATION)
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
    /// As whom it asks the API server; empty for the namespace's default.
    pub service_account_name: String,
    /// Whether it uses its node's network.
    pub host_network: bool,
    /// Its containers.
    pub containers: Vec<Container>,
    /// Those that run before them.
    #[serde(deserialize_with = "or_default")]
    pub init_containers: Vec<Container>,
}

/// What a pod is.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatus {
    /// Pending, Running, Succeeded, Failed.
    pub phase: String,
    /// Its address, once it has a network.
    #[serde(rename = "podIP")]
    pub address: String,
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
pub struct ClusterNode {
    /// Its name and labels.
    pub metadata: Meta,
    /// What it should be.
    pub spec: NodeSpec,
    /// What it is.
    pub status: NodeStatus,
}

/// What a node should be.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct NodeSpec {
    /// As they came: a patch tests that they are still these.
    #[serde(deserialize_with = "or_default")]
    pub taints: Vec<Value>,
}

/// What a node is.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeStatus {
    /// Its system.
    pub node_info: NodeSystemInfo,
    /// Its conditions.
    #[serde(deserialize_with = "or_default")]
    pub conditions: Vec<NodeCondition>,
    /// Its addresses and names.
    #[serde(deserialize_with = "or_default")]
    pub addresses: Vec<NodeAddress>,
}

/// A DaemonSet.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct DaemonSet {
    /// Its name and labels.
    pub metadata: Meta,
    /// What it should be.
    pub spec: WorkloadSpec,
}

impl DaemonSet {
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
    pub template: ClusterPod,
}

/// A ClusterRoleBinding.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Binding {
    /// Its name and labels.
    pub metadata: Meta,
    /// Who has the role.
    #[serde(deserialize_with = "or_default")]
    pub subjects: Vec<Subject>,
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
        let pod: ClusterPod = serde_json::from_str(
            r#"{"metadata":{"name":"a","ownerReferences":null},
                "status":{"containerStatuses":null,"initContainerStatuses":[{"name":"i","lastState":{}}]}}"#,
        )
        .expect("a pod");
        assert_eq!((pod.metadata.name.as_str(), pod.status.init_container_statuses.len()), ("a", 1));
        assert!(serde_json::from_str::<ClusterNode>("{}").is_ok());
    }
}
