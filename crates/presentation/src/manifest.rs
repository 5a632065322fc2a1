//! Pods from the text of a manifest.

mod stream;

use std::net::IpAddr;

use cni_core::pod_name::PodName;
use cni_core::yaml;
use redirect_core::pod::PodFacts;
use redirect_core::pod_json::{FieldProblem, PodJsonErrors};
use serde_json::Value;

pub use stream::each_of_json;

/// A pod, as far as its plan depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodManifest {
    /// Its name.
    pub name: PodName,
    /// What the decision depends on.
    pub facts: PodFacts,
    /// Its addresses, as far as they are known.
    pub addresses: Vec<IpAddr>,
    /// Whether it is on the host's network: then no plugin is asked for it.
    pub host_network: bool,
}

impl PodManifest {
    /// Reads a pod.
    ///
    /// # Errors
    /// Everything wrong with the fields that a decision depends on.
    pub fn from_json(pod: &Value) -> Result<Self, PodJsonErrors> {
        let facts = PodFacts::from_json(pod)?;
        let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
        let name = PodName {
            namespace: text("/metadata/namespace")
                .filter(|name| !name.is_empty())
                .unwrap_or_else(|| "default".into()),
            name: text("/metadata/name")
                .or_else(|| text("/metadata/generateName"))
                .unwrap_or_else(|| "?".into()),
        };
        let host_network = pod.pointer("/spec/hostNetwork") == Some(&Value::Bool(true));
        Ok(Self { name, facts, addresses: addresses(pod), host_network })
    }
}

fn addresses(pod: &Value) -> Vec<IpAddr> {
    let all = pod.pointer("/status/podIPs").and_then(Value::as_array);
    let all = all.into_iter().flatten().filter_map(|entry| entry.get("ip")?.as_str());
    let one = pod.pointer("/status/podIP").and_then(Value::as_str);
    let mut addresses: Vec<IpAddr> = Vec::new();
    for address in all.chain(one).filter_map(|text| text.parse().ok()) {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    addresses
}

/// The objects of a text in YAML or JSON. A list, as `kubectl get pods -o json` prints it, counts as its items, and a workload, such as a
/// Deployment, as the pod of its template.
///
/// # Errors
/// It is not YAML, in words.
pub fn objects(text: &str) -> Result<Vec<Value>, String> {
    let mut objects = Vec::new();
    for mut document in yaml::documents(text)?.into_iter().filter(|document| !document.is_null()) {
        match document.get_mut("items").and_then(Value::as_array_mut) {
            Some(items) => objects.append(items),
            None => objects.push(document),
        }
    }
    Ok(objects.into_iter().map(PodFacts::pod_of).collect())
}

/// Everything wrong with a pod's object, each with its name.
#[must_use]
pub fn faults(object: &Value, errors: &PodJsonErrors) -> Vec<String> {
    let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or("?");
    let hint = |problem: &FieldProblem| {
        let is_other = matches!(problem, FieldProblem::NotAPod(_));
        if is_other {
            "; give a Pod, a list of pods, or a workload with a pod template, such as a Deployment"
        } else {
            ""
        }
    };
    errors.iter().map(|error| format!("{name}: {error}{}", hint(&error.problem))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The pods of a text, whether JSON is read at once or object by object.
    fn pods(text: &str) -> Vec<PodManifest> {
        let at_once: Vec<PodManifest> = objects(text)
            .expect("objects")
            .iter()
            .map(|object| PodManifest::from_json(object).expect("a pod"))
            .collect();
        let mut one_by_one = Vec::new();
        if each_of_json(text.as_bytes(), |object| {
            one_by_one.push(PodManifest::from_json(&object).expect("a pod"));
        })
        .is_ok()
        {
            assert_eq!(one_by_one, at_once);
        }
        at_once
    }

    #[test]
    fn a_workload_is_the_pod_of_its_template() {
        let template = |metadata: &Value| json!({"metadata": metadata, "spec": {"hostNetwork": true, "containers": [{"name": "app"}, {"name": "istio-proxy"}]}});
        let own = json!({"annotations": {"a": "b"}, "labels": {"c": "d"}});
        let name = json!({"name": "cart", "namespace": "shop", "annotations": {"of": "the workload"}});
        let within = |kind: &str, spec: Value| json!({"kind": kind, "metadata": name, "spec": spec});
        let mut all = Vec::new();
        for kind in [
            "Deployment",
            "ReplicaSet",
            "StatefulSet",
            "DaemonSet",
            "Job",
            "ReplicationController",
            "Rollout",
        ] {
            all.push(within(kind, json!({"template": template(&own)})));
        }
        all.push(within("CronJob", json!({"jobTemplate": {"spec": {"template": template(&own)}}})));
        all.push(json!({"kind": "PodTemplate", "metadata": name, "template": template(&own)}));
        // As a list of the API server has them.
        all.push(json!({"kind": "DeploymentList", "items": [{"metadata": name, "spec": {"template": template(&own)}}]}));
        all.push(
            json!({"kind": "List", "items": [within("Deployment", json!({"template": template(&own)}))]}),
        );
        for object in all {
            let [pod] = pods(&object.to_string()).try_into().expect("one pod");
            assert_eq!(pod.name.to_string(), "shop/cart", "{object}");
            let told: Vec<_> = pod.facts.annotations.keys().chain(pod.facts.labels.keys()).collect();
            assert_eq!(told, ["a", "c"], "{object}");
            assert!(pod.host_network && pod.facts.containers.contains("istio-proxy"), "{object}");
        }
        let [bare] = pods(&within("Job", json!({"template": template(&Value::Null)})).to_string())
            .try_into()
            .expect("one pod");
        assert_eq!((bare.name.to_string().as_str(), bare.facts.annotations.len()), ("shop/cart", 0));
        let yaml = "kind: Deployment\nmetadata: {name: a}\nspec:\n  template:\n    spec: {containers: [{name: x}]}\n---\nkind: Pod\nmetadata: {name: b}\nspec: {}\n";
        let names: Vec<String> = pods(yaml).iter().map(|pod| pod.name.to_string()).collect();
        assert_eq!(names, ["default/a", "default/b"]);
    }

    #[test]
    fn what_has_no_pod_is_refused_with_what_is_taken() {
        for kind in ["Service", "Deployment"] {
            let object = json!({"kind": kind, "metadata": {"name": "a"}, "spec": {"template": {"spec": {}}}});
            let errors = PodManifest::from_json(&objects(&object.to_string()).expect("objects")[0])
                .expect_err("no pod");
            let told = faults(&object, &errors);
            assert_eq!(
                told,
                [format!(
                    "a: kind: {kind:?} is not Pod; give a Pod, a list of pods, or a workload with a pod template, such as a Deployment"
                )]
            );
        }
    }
}
