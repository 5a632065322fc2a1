//! What the cluster says around pods: their node, their events, the classes of their runtimes.

use std::collections::BTreeMap;

use cni_core::pod_source::PodName;
use serde_json::{Map, Value};

use crate::object::{ObjectCondition, PodEvent, text};
use crate::pod::Pod;

/// Objects besides pods, as far as they are known.
#[derive(Debug, Default)]
pub struct ClusterObjects {
    /// The nodes.
    pub nodes: Vec<NodeObject>,
    /// Of a pod, with its UID if the event has it.
    events: Vec<(PodName, String, PodEvent)>,
    /// The handlers of runtime classes, by the names of these.
    handlers: BTreeMap<String, String>,
    /// The labels of namespaces, by their names.
    namespaces: BTreeMap<String, Map<String, Value>>,
    /// Whether namespaces that are not listed have no labels that decide.
    pub(crate) has_all_namespaces: bool,
    /// Requests that the API server did not answer, and why.
    pub untold: Vec<String>,
}

/// What a node's object says about the mesh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeObject {
    /// Its name.
    pub name: String,
    /// Its taints, as `KEY=VALUE:EFFECT`, by their keys.
    pub taints: Vec<(String, String)>,
    /// Its conditions.
    pub conditions: Vec<ObjectCondition>,
}

impl ClusterObjects {
    /// Takes note of an object; returns whether its kind matters here.
    pub fn take(&mut self, object: &Value) -> bool {
        let text = |pointer: &str| text(object, pointer);
        match object.get("kind").and_then(Value::as_str) {
            Some("Node") => self.nodes.push(NodeObject::of(object)),
            Some("RuntimeClass") => {
                self.handlers.insert(text("/metadata/name"), text("/handler"));
            }
            Some("Namespace") => {
                let labels = object.pointer("/metadata/labels").and_then(Value::as_object);
                self.namespaces.insert(text("/metadata/name"), labels.cloned().unwrap_or_default());
            }
            Some("Event") => {
                let about = |field: &str| text(&format!("/involvedObject/{field}"));
                if about("kind") == "Pod" {
                    let pod = PodName { namespace: about("namespace"), name: about("name") };
                    self.events.push((pod, about("uid"), PodEvent::of(object)));
                }
            }
            Some(_) | None => return false,
        }
        true
    }

    /// Gives pods what is known around them.
    pub fn tell(&self, pods: &mut [Pod]) {
        for pod in pods {
            if let Some(handler) = pod.facts.runtime_class.as_ref().and_then(|class| self.handlers.get(class))
            {
                pod.handler = Some(handler.clone());
            }
            let labels = self.namespaces.get(&pod.name.namespace).cloned();
            pod.namespace_labels = labels.or_else(|| self.has_all_namespaces.then(Map::new));
            let is_about = |(name, uid, _): &&(PodName, String, PodEvent)| {
                // An earlier pod may have had the name.
                *name == pod.name && (uid.is_empty() || pod.uid.is_empty() || *uid == pod.uid)
            };
            pod.events = self.events.iter().filter(is_about).map(|(.., event)| event.clone()).collect();
            pod.events.sort();
        }
    }
}

impl NodeObject {
    fn of(object: &Value) -> Self {
        let taints = object.pointer("/spec/taints").and_then(Value::as_array).into_iter().flatten();
        let taints = taints.map(|taint| {
            let (key, value) = (text(taint, "/key"), text(taint, "/value"));
            let between = if value.is_empty() { "" } else { "=" };
            (key.clone(), format!("{key}{between}{value}:{}", text(taint, "/effect")))
        });
        Self {
            name: text(object, "/metadata/name"),
            taints: taints.collect(),
            conditions: ObjectCondition::all(object),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(uid: &str) -> Pod {
        let pod = json!({"metadata": {"name": "cart-0", "namespace": "shop", "uid": uid},
            "spec": {"runtimeClassName": "secure", "containers": []}});
        Pod::from_json(&pod).expect("a pod")
    }

    #[test]
    fn pods_are_told_what_is_about_them_and_nothing_else() {
        let event = |uid: &str, reason: &str| {
            json!({"kind": "Event", "reason": reason, "message": "m", "lastTimestamp": "2026-11-22T00:00:00Z",
                "involvedObject": {"kind": "Pod", "namespace": "shop", "name": "cart-0", "uid": uid}})
        };
        let mut cluster = ClusterObjects::default();
        for object in [
            event("1", "Old"),
            event("2", "New"),
            json!({"kind": "RuntimeClass", "metadata": {"name": "secure"}, "handler": "runsc"}),
            json!({"kind": "Node", "metadata": {"name": "n1"}, "spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}),
        ] {
            assert!(cluster.take(&object), "{object}");
        }
        assert!(!cluster.take(&json!({"kind": "Job"})) && !cluster.take(&json!(null)));
        let mut pods = [pod("2")];
        cluster.tell(&mut pods);
        let reasons: Vec<&str> = pods[0].events.iter().map(|event| event.reason.as_str()).collect();
        assert_eq!((reasons, pods[0].handler.as_deref()), (vec!["New"], Some("runsc")));
        assert_eq!(cluster.nodes[0].taints, [("a".to_owned(), "a:NoSchedule".to_owned())]);
    }
}
