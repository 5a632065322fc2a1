//! Which pods should be redirected, and what of them decides how.

use std::net::IpAddr;

use cni_core::conf::Conf;
use cni_core::pod_source::PodName;
use k8s_openapi::api::core::v1::ObjectReference;
use redirect_core::pod::{PodFacts, SkipReason};
use serde_json::Value;

use crate::cluster::pod_reference;

/// A pod that the plugin would redirect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeshPod {
    /// Its namespace and name.
    pub name: PodName,
    /// Its UID.
    pub uid: String,
    /// All its addresses.
    pub addresses: Vec<IpAddr>,
    /// The class of its runtime, where it names one.
    pub runtime_class: Option<String>,
    /// What a decision depends on, and no more.
    pub facts: PodFacts,
}

impl MeshPod {
    /// Reads a pod.
    ///
    /// # Errors
    /// The plugin would not redirect it, and why.
    pub fn read(pod: &Value, conf: &Conf) -> Result<Self, String> {
        let text = |pointer| text(pod, pointer).map(str::to_owned).ok_or("the pod has no name or no UID");
        let skipped = |reason: SkipReason| format!("the plugin skips the pod: {}", reason.explanation());
        if pod.pointer("/spec/hostNetwork") == Some(&Value::Bool(true)) {
            return Err("the pod is on the node's network, which is never redirected".to_owned());
        }
        let name = PodName { namespace: text("/metadata/namespace")?, name: text("/metadata/name")? };
        if let Some(reason) = conf.skips(&name) {
            return Err(skipped(reason));
        }
        let facts = PodFacts::from_json(pod).map_err(|errors| {
            let problems: Vec<String> = errors.iter().map(ToString::to_string).collect();
            problems.join("; ")
        })?;
        if let Some(reason) = facts.skip_reason() {
            return Err(skipped(reason));
        }
        let listed = pod.pointer("/status/podIPs").and_then(Value::as_array).into_iter().flatten();
        let addresses = listed.filter_map(|item| item.get("ip")?.as_str()?.parse().ok()).collect();
        let (uid, runtime_class) = (text("/metadata/uid")?, facts.runtime_class.clone());
        Ok(Self { name, uid, addresses, runtime_class, facts: facts.condensed() })
    }

    /// For events about it.
    #[must_use]
    pub fn reference(&self) -> ObjectReference {
        pod_reference(&self.name.namespace, &self.name.name, Some(&self.uid))
    }

    /// Reads a pod that runs. The rules of a pod that starts may not exist yet, and the namespace of one that ends may be gone.
    #[must_use]
    pub fn running(pod: &Value, conf: &Conf) -> Option<Self> {
        let is_ending = pod.pointer("/metadata/deletionTimestamp").is_some_and(|at| !at.is_null());
        let runs = !is_ending && text(pod, "/status/phase") == Some("Running");
        if runs { Self::read(pod, conf).ok() } else { None }
    }
}

fn text<'a>(pod: &'a Value, pointer: &str) -> Option<&'a str> {
    pod.pointer(pointer).and_then(Value::as_str).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni_core::conf::Envelope;
    use cni_core::wire::CniCommand;
    use serde_json::json;

    fn candidate(pod: &Value) -> Option<MeshPod> {
        let conf = br#"{"cniVersion":"1.0.0","name":"n","type":"istio-cni","exclude_namespaces":["kube-system"],"pod_namespace":"istio-system"}"#;
        let conf = Envelope::read(conf, CniCommand::Add).expect("JSON").conf().expect("a configuration");
        MeshPod::running(pod, &conf)
    }

    fn pod() -> Value {
        json!({"metadata": {"namespace": "shop", "name": "web", "uid": "u-1", "annotations": {"sidecar.istio.io/status": "{}", "a": "b"}},
            "spec": {"containers": [{"name": "app"}, {"name": "istio-proxy", "args": ["proxy", "sidecar"]}]},
            "status": {"phase": "Running", "podIP": "10.1.0.2", "podIPs": [{"ip": "10.1.0.2"}, {"ip": "fd00::2"}]}})
    }

    #[test]
    fn a_running_pod_of_the_mesh_is_checked() {
        let candidate = candidate(&pod()).expect("a candidate");
        assert_eq!((candidate.name.to_string().as_str(), candidate.uid.as_str()), ("shop/web", "u-1"));
        assert_eq!(
            candidate.addresses,
            ["10.1.0.2", "fd00::2"].map(|ip| ip.parse::<IpAddr>().expect("an address"))
        );
        assert_eq!(candidate.facts.annotations.len(), 1, "{:?}", candidate.facts);
    }

    #[test]
    fn other_pods_are_skipped() {
        let changes: [(&str, Value); 10] = [
            ("/spec/hostNetwork", json!(true)),
            ("/status/phase", json!("Pending")),
            ("/status/phase", json!("Succeeded")),
            ("/status/phase", json!("Failed")),
            ("/metadata/deletionTimestamp", json!("2026-11-21T00:00:00Z")),
            ("/metadata/namespace", json!("kube-system")),
            ("/metadata/annotations", json!({})),
            ("/metadata/labels", json!({"sidecar.istio.io/inject": "false"})),
            ("/spec/initContainers", json!([{"name": "istio-init"}])),
            ("/spec/containers", json!([{"name": "app"}])),
        ];
        for (pointer, value) in changes {
            let mut pod = pod();
            let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
            pod.pointer_mut(parent).expect("a parent")[key] = value;
            assert_eq!(candidate(&pod), None, "{pointer}");
        }
        let mut agent = pod();
        agent["metadata"]["namespace"] = json!("istio-system");
        agent["metadata"]["name"] = json!("istio-cni-node-x");
        assert_eq!(candidate(&agent), None);
        assert_eq!(candidate(&json!(7)), None);
    }
}
