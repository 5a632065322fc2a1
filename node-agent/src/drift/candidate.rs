//! Which pods are looked at, and what is remembered of them until it is their turn.

use std::net::IpAddr;

use cni_core::conf::Conf;
use cni_core::pod_source::PodName;
use redirect_core::pod::PodFacts;
use serde_json::Value;

/// A pod that runs and should be redirected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Its namespace and name.
    pub name: PodName,
    /// Which of all pods that ever had this name.
    pub uid: String,
    /// All its addresses.
    pub addresses: Vec<IpAddr>,
    /// What a decision depends on, and no more.
    pub facts: PodFacts,
}

impl Candidate {
    /// The pod, if it is to be looked at: it runs, has a network of its own and is to be redirected. A pod that starts or ends is left
    /// alone: its rules may not be there yet, or its namespace not any more.
    #[must_use]
    pub fn of(pod: &Value, conf: &Conf) -> Option<Self> {
        let text =
            |pointer: &str| pod.pointer(pointer).and_then(Value::as_str).filter(|text| !text.is_empty());
        let is_ending = pod.pointer("/metadata/deletionTimestamp").is_some_and(|at| !at.is_null());
        let on_host = pod.pointer("/spec/hostNetwork") == Some(&Value::Bool(true));
        if is_ending || on_host || text("/status/phase") != Some("Running") {
            return None;
        }
        let name =
            PodName { namespace: text("/metadata/namespace")?.into(), name: text("/metadata/name")?.into() };
        if conf.skips(&name).is_some() {
            return None;
        }
        let facts = PodFacts::from_json(pod).ok()?;
        if facts.skip_reason().is_some() {
            return None;
        }
        let listed = pod.pointer("/status/podIPs").and_then(Value::as_array).into_iter().flatten();
        let addresses = listed.filter_map(|item| item.get("ip")?.as_str()?.parse().ok()).collect();
        Some(Self { name, uid: text("/metadata/uid")?.into(), addresses, facts: facts.condensed() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni_core::conf::Envelope;
    use cni_core::wire::Command;
    use serde_json::json;

    fn candidate(pod: &Value) -> Option<Candidate> {
        let conf = br#"{"cniVersion":"1.0.0","name":"n","type":"istio-cni","exclude_namespaces":["kube-system"],"pod_namespace":"istio-system"}"#;
        let conf = Envelope::read(conf, Command::Add).expect("JSON").conf().expect("a configuration");
        Candidate::of(pod, &conf)
    }

    fn pod() -> Value {
        json!({"metadata": {"namespace": "shop", "name": "web", "uid": "u-1", "annotations": {"sidecar.istio.io/status": "{}", "a": "b"}},
            "spec": {"containers": [{"name": "app"}, {"name": "istio-proxy", "args": ["proxy", "sidecar"]}]},
            "status": {"phase": "Running", "podIP": "10.1.0.2", "podIPs": [{"ip": "10.1.0.2"}, {"ip": "fd00::2"}]}})
    }

    #[test]
    fn a_running_pod_of_the_mesh_is_looked_at() {
        let candidate = candidate(&pod()).expect("a candidate");
        assert_eq!((candidate.name.to_string().as_str(), candidate.uid.as_str()), ("shop/web", "u-1"));
        assert_eq!(
            candidate.addresses,
            ["10.1.0.2", "fd00::2"].map(|ip| ip.parse::<IpAddr>().expect("an address"))
        );
        assert_eq!(candidate.facts.annotations.len(), 1, "{:?}", candidate.facts);
    }

    #[test]
    fn others_are_left_out() {
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
