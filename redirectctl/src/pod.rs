//! A pod as Kubernetes writes it: what its redirection depends on, and what else can spoil it.

use std::net::IpAddr;

use cni_core::enablement::REDIRECTION_ANNOTATION;
use cni_core::pod_source::PodName;
use presentation::manifest;
use reasons::AGENT_LABEL;
use redirect_core::pod::PodFacts;
use redirect_core::pod_json::PodJsonErrors;
use serde_json::{Map, Value, json};

use crate::object::{ObjectCondition, PodEvent};
use crate::validation::LastValidation;

/// A pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Its name.
    pub name: PodName,
    /// What the decision depends on.
    pub facts: PodFacts,
    /// Its addresses, as far as they are known.
    pub addresses: Vec<IpAddr>,
    /// Its containers, init containers first, as Kubernetes starts them.
    pub containers: Vec<Container>,
    /// Whether it is on the host's network: then no plugin is asked for it.
    pub host_network: bool,
    /// The node it is on.
    pub node: Option<String>,
    /// `Running`, `Pending`, ...
    pub phase: Option<String>,
    /// What distinguishes it from an earlier pod of its name; empty if unknown.
    pub uid: String,
    /// Its conditions.
    pub conditions: Vec<ObjectCondition>,
    /// Why containers of it wait.
    pub waits: Vec<String>,
    /// How its validation failed, if that is the last that is known of it.
    pub validation: Option<LastValidation>,
    /// Whether it is a node agent's.
    pub is_agent: bool,
    /// The handler of its runtime class, where that is known.
    pub handler: Option<String>,
    /// The IDs of its containers as the runtime has them, and their names, as far as they are known.
    pub container_ids: Vec<(String, String)>,
    /// The labels of its namespace, where they are known.
    pub namespace_labels: Option<Map<String, Value>>,
    /// What happened to it, the oldest first, as far as that is known.
    pub events: Vec<PodEvent>,
}

/// A container of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// Its name.
    pub name: String,
    /// When it runs.
    pub kind: ContainerKind,
    /// Whom it runs as, as far as the pod says; the image may say something else.
    pub user: Option<i64>,
    /// The ports it says it listens on, TCP only.
    pub ports: Vec<u16>,
}

/// When a container runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContainerKind {
    /// Once, before what comes behind it.
    Init,
    /// From its turn among the init containers on (`restartPolicy: Always`).
    Sidecar,
    /// From when all init containers are done.
    Regular,
}

impl Pod {
    /// Reads a pod.
    ///
    /// # Errors
    /// Everything wrong with the fields that a decision depends on.
    pub fn from_json(pod: &Value) -> Result<Self, PodJsonErrors> {
        let manifest::PodManifest { name, facts, addresses, host_network } =
            manifest::PodManifest::from_json(pod)?;
        let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
        Ok(Self {
            name,
            addresses,
            containers: containers(pod),
            host_network,
            node: text("/spec/nodeName"),
            phase: text("/status/phase"),
            uid: text("/metadata/uid").unwrap_or_default(),
            conditions: ObjectCondition::all(pod),
            waits: waits(pod),
            validation: LastValidation::of(pod),
            is_agent: facts.labels.get(AGENT_LABEL.0).is_some_and(|value| value == AGENT_LABEL.1),
            handler: None,
            namespace_labels: None,
            container_ids: container_ids(pod),
            events: Vec::new(),
            facts,
        })
    }

    /// The container of the proxy.
    #[must_use]
    pub fn proxy(&self) -> Option<&Container> {
        self.containers.iter().rev().find(|container| container.name == PodFacts::PROXY_CONTAINER)
    }

    /// What selectors of ambient mode decide by.
    #[must_use]
    pub fn for_selectors(&self) -> Value {
        let PodFacts { labels, annotations, .. } = &self.facts;
        json!({
            "metadata": {"namespace": self.name.namespace, "labels": labels, "annotations": annotations},
            "spec": {"hostNetwork": self.host_network},
        })
    }

    /// What the agent's annotation of ambient mode says, if it is there.
    #[must_use]
    pub fn ambient_annotation(&self) -> Option<&str> {
        self.facts.annotations.get(REDIRECTION_ANNOTATION).map(String::as_str)
    }

    /// Why its namespace is not found, with where it should be.
    #[must_use]
    pub fn unfound(&self, why: &impl std::fmt::Display) -> String {
        self.node.as_ref().map_or_else(|| why.to_string(), |node| format!("{why}; the pod is on node {node}"))
    }

    /// Whether its containers have ended, and its namespace with them.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.phase.as_deref(), Some("Succeeded" | "Failed"))
    }
}

/// What the kubelet says of containers that wait.
fn waits(pod: &Value) -> Vec<String> {
    let lists = ["/status/initContainerStatuses", "/status/containerStatuses"];
    let all = lists.into_iter().filter_map(|list| pod.pointer(list)?.as_array()).flatten();
    let waiting = all.filter_map(|status| {
        let why = status.pointer("/state/waiting/reason")?.as_str()?;
        Some(format!("container {} waits ({why})", status.get("name")?.as_str()?))
    });
    waiting.collect()
}

/// Without the runtime's name before `://`.
fn container_ids(pod: &Value) -> Vec<(String, String)> {
    let lists = ["initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses"];
    let all = lists.into_iter().filter_map(|list| pod.get("status")?.get(list)?.as_array()).flatten();
    let id = |status: &Value| {
        let (_, id) = status.get("containerID")?.as_str()?.split_once("://")?;
        (!id.is_empty()).then(|| Some((id.to_owned(), status.get("name")?.as_str()?.to_owned())))?
    };
    all.filter_map(id).collect()
}

fn containers(pod: &Value) -> Vec<Container> {
    let id = |of: &Value| of.pointer("/securityContext/runAsUser").and_then(Value::as_i64);
    let spec = pod.get("spec").unwrap_or(&Value::Null);
    let list = |field: &str| spec.get(field).and_then(Value::as_array).cloned().unwrap_or_default();
    let read = |container: &Value, is_init: bool| Container {
        name: container.get("name").and_then(Value::as_str).unwrap_or("?").to_owned(),
        kind: match (is_init, container.get("restartPolicy").and_then(Value::as_str)) {
            (true, Some("Always")) => ContainerKind::Sidecar,
            (true, _) => ContainerKind::Init,
            (false, _) => ContainerKind::Regular,
        },
        user: id(container).or_else(|| id(spec)),
        ports: ports(container),
    };
    let inits = list("initContainers");
    let regular = list("containers");
    inits.iter().map(|one| read(one, true)).chain(regular.iter().map(|one| read(one, false))).collect()
}

fn ports(container: &Value) -> Vec<u16> {
    let ports = container.get("ports").and_then(Value::as_array).into_iter().flatten();
    let tcp =
        ports.filter(|port| port.get("protocol").and_then(Value::as_str).is_none_or(|name| name == "TCP"));
    tcp.filter_map(|port| u16::try_from(port.get("containerPort")?.as_u64()?).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_manifest_says_is_read() {
        let pod = Pod::from_json(&json!({
            "kind": "Pod",
            "metadata": {"name": "cart-0", "namespace": "shop"},
            "spec": {
                "nodeName": "n1", "runtimeClassName": "kata", "hostNetwork": true,
                "securityContext": {"runAsUser": 7},
                "initContainers": [{"name": "migrate"}, {"name": "istio-proxy", "restartPolicy": "Always", "securityContext": {"runAsUser": 1337}}],
                "containers": [{"name": "app", "ports": [{"containerPort": 80}, {"containerPort": 53, "protocol": "UDP"}]}],
            },
            "status": {"phase": "Running", "podIP": "10.1.0.2", "podIPs": [{"ip": "10.1.0.2"}, {"ip": "fd00::2"}]},
        }));
        let pod = pod.expect("a pod");
        assert_eq!((pod.name.to_string(), pod.addresses.len()), ("shop/cart-0".to_owned(), 2));
        let told: Vec<(&str, ContainerKind, Option<i64>)> =
            pod.containers.iter().map(|one| (one.name.as_str(), one.kind, one.user)).collect();
        assert_eq!(
            told,
            [
                ("migrate", ContainerKind::Init, Some(7)),
                ("istio-proxy", ContainerKind::Sidecar, Some(1337)),
                ("app", ContainerKind::Regular, Some(7))
            ]
        );
        assert_eq!(pod.containers[2].ports, [80]);
        assert_eq!(pod.proxy().map(|proxy| proxy.kind), Some(ContainerKind::Sidecar));
        assert!(pod.host_network && !pod.is_over() && pod.facts.runtime_class.as_deref() == Some("kata"));
    }

    #[test]
    fn a_pod_that_says_little_is_one_all_the_same() {
        let pod = Pod::from_json(&json!({"spec": {"containers": [{"name": "app"}]}})).expect("a pod");
        assert_eq!(pod.name.to_string(), "default/?");
        assert!(pod.addresses.is_empty() && pod.proxy().is_none() && !pod.host_network);
        assert!(Pod::from_json(&json!({"kind": "Job", "spec": {}})).is_err());
    }
}
