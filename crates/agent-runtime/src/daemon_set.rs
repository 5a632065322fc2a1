//! The agents' DaemonSet: where it puts pods.

use std::collections::BTreeMap;

use cluster_client::params::GetParams;
use cluster_client::{ApiError, Request};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::NodeSelectorRequirement;

use crate::cluster::Cluster;

/// The DaemonSets of the controller's namespace.
#[must_use]
pub fn collection(cluster: &Cluster) -> Request {
    Request::new(format!("/apis/apps/v1/namespaces/{}/daemonsets", cluster.identity().namespace))
}

/// The agents' DaemonSet, also while it is being deleted; none if it does not exist.
///
/// # Errors
/// Why it cannot be read.
pub async fn find(cluster: &Cluster) -> Result<Option<DaemonSet>, ApiError> {
    let request = collection(cluster).get(&cluster.identity().daemon_set, &GetParams::default());
    cluster.find(request).await
}

/// Whether a DaemonSet is being deleted.
#[must_use]
pub const fn is_deleted(daemon_set: &DaemonSet) -> bool {
    daemon_set.metadata.deletion_timestamp.is_some()
}

/// Whether a DaemonSet puts pods on a node with these labels, according to its selector and its required affinity.
#[must_use]
pub fn wants(daemon_set: &DaemonSet, node: &str, labels: &BTreeMap<String, String>) -> bool {
    let Some(pod) = daemon_set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref()) else {
        return true;
    };
    let selector = pod.node_selector.iter().flatten();
    let is_selected = selector.into_iter().all(|(key, value)| labels.get(key) == Some(value));
    let affinity = pod.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required =
        affinity.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
    let fields = BTreeMap::from([("metadata.name".to_owned(), node.to_owned())]);
    let is_required = required.is_none_or(|required| {
        required.node_selector_terms.iter().any(|term| {
            let by_label = term.match_expressions.iter().flatten().all(|wanted| matches(wanted, labels));
            by_label && term.match_fields.iter().flatten().all(|wanted| matches(wanted, &fields))
        })
    });
    is_selected && is_required
}

fn matches(wanted: &NodeSelectorRequirement, labels: &BTreeMap<String, String>) -> bool {
    let (value, values) = (labels.get(&wanted.key), wanted.values.as_deref().unwrap_or_default());
    let number = |text: &String| text.parse::<i64>().ok();
    let ordering = || Some(value.and_then(number)?.cmp(&values.first().and_then(number)?));
    match wanted.operator.as_str() {
        "In" => value.is_some_and(|value| values.contains(value)),
        "NotIn" => value.is_none_or(|value| !values.contains(value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => ordering() == Some(std::cmp::Ordering::Greater),
        "Lt" => ordering() == Some(std::cmp::Ordering::Less),
        // An operator of the future: an agent that cannot decide stays.
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn daemon_set(pod: &serde_json::Value) -> DaemonSet {
        let spec = json!({"selector": {}, "template": {"spec": pod}});
        serde_json::from_value(json!({"metadata": {}, "spec": spec})).expect("a DaemonSet")
    }

    fn affinity(term: &serde_json::Value) -> serde_json::Value {
        let required = json!({"nodeSelectorTerms": [term]});
        json!({"containers": [], "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}})
    }

    #[test]
    fn a_daemon_set_wants_the_nodes_it_selects() {
        let labels =
            BTreeMap::from([("os".to_owned(), "linux".to_owned()), ("gen".to_owned(), "7".to_owned())]);
        let wants = |pod: serde_json::Value| wants(&daemon_set(&pod), "node-1", &labels);
        assert!(wants(json!({"containers": []})));
        assert!(wants(json!({"containers": [], "nodeSelector": {"os": "linux"}})));
        assert!(!wants(json!({"containers": [], "nodeSelector": {"os": "linux", "mesh": "yes"}})));
        for (operator, key, values, expected) in [
            ("In", "os", json!(["linux", "bsd"]), true),
            ("In", "os", json!(["bsd"]), false),
            ("NotIn", "os", json!(["linux"]), false),
            ("NotIn", "zone", json!(["a"]), true),
            ("Exists", "gen", json!([]), true),
            ("DoesNotExist", "gen", json!([]), false),
            ("Gt", "gen", json!(["6"]), true),
            ("Lt", "gen", json!(["7"]), false),
        ] {
            let term = json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
            assert_eq!(wants(affinity(&term)), expected, "{operator} {key}");
        }
        let named = |name: &str| {
            affinity(&json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}))
        };
        assert!(wants(named("node-1")) && !wants(named("node-2")));
    }
}
