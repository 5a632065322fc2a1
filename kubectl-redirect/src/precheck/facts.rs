//! What a precheck asks the API server for.

use std::collections::BTreeMap;

use kube::api::ListParams;
use reasons::AGENT_LABEL;

use crate::CommandFailure;
use crate::cluster::{CONFIG_MAPS, DAEMON_SETS, DEPLOYMENTS, KubeApi, NAMESPACES, NODES, PODS, Right};
use crate::objects::{ClusterNode, ClusterPod, ConfigMap, DaemonSet, Meta, Object};

/// The DaemonSet of the agent, in Istio's chart and in ours.
pub const AGENT: &str = "istio-cni-node";
/// Ports that the agent uses on its node, and the chart's values for them.
pub const PORTS: [(i32, &str); 2] = [(8000, "healthPort"), (15014, "monitoringPort")];
/// Where network plugins usually are.
pub(super) const SYSTEM: &str = "kube-system";
/// The init container of pods that are validated.
const VALIDATION: &str = "istio-validation";

/// Who needs a right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// The one who installs the chart.
    Installing,
    /// The one who uses `kubectl redirect`.
    Asking,
}

/// All that is known. What could not be asked is the reason.
#[derive(Debug)]
pub struct ClusterFacts {
    /// The API server's address and version.
    pub server: (String, String),
    /// The namespace to install in, and its object if it exists.
    pub namespace: (String, Result<Option<Meta>, CommandFailure>),
    /// Rights, and whether the user has them.
    pub rights: Vec<(Needs, Right, Result<bool, CommandFailure>)>,
    /// The nodes.
    pub nodes: Result<Vec<ClusterNode>, CommandFailure>,
    /// The DaemonSets.
    pub daemon_sets: Result<Vec<DaemonSet>, CommandFailure>,
    /// The Deployments.
    pub deployments: Result<Vec<Object>, CommandFailure>,
    /// Of the pods, what counts.
    pub pods: Result<PodCounts, CommandFailure>,
    /// Cilium's settings, if it has any.
    pub cilium: Result<Option<ConfigMap>, CommandFailure>,
    /// The settings of an agent of the mesh that exists.
    pub agent: Result<Option<ConfigMap>, CommandFailure>,
}

/// What counts of the pods: a cluster has too many to keep them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodCounts {
    /// Pods of the mesh.
    pub mesh: usize,
    /// Those that use one of the agent's ports on their node, `NAMESPACE/NAME`, by port.
    pub ports: BTreeMap<i32, Vec<String>>,
    /// Those whose validation failed, `NAMESPACE/NAME`.
    pub broken: Vec<String>,
    /// Agents whose image cannot be pulled, `NAMESPACE/NAME`, each with the kubelet's reason and words.
    pub unpulled: BTreeMap<String, String>,
}

/// What the kubelet calls an image that it cannot get.
const UNPULLED: [&str; 6] = [
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImageInspectError",
    "RegistryUnavailable",
];

/// Why an image of a pod cannot be pulled, if so.
fn unpulled(pod: &ClusterPod) -> Option<String> {
    let all = pod.status.init_container_statuses.iter().chain(&pod.status.container_statuses);
    let mut waiting = all.filter_map(|status| status.state.as_ref()?.waiting.as_ref());
    let is_of_image =
        |reason: &Option<String>| reason.as_deref().is_some_and(|word| UNPULLED.contains(&word));
    let why = waiting.find(|waiting| is_of_image(&waiting.reason))?;
    let words = [&why.reason, &why.message].into_iter().flatten().filter(|words| !words.is_empty());
    Some(words.cloned().collect::<Vec<_>>().join(": "))
}

impl PodCounts {
    /// Takes a pod into account.
    pub fn see(&mut self, pod: &ClusterPod) {
        if pod.is_over() {
            return;
        }
        let is_agent = pod.metadata.has_label(AGENT_LABEL);
        for port in pod.spec.containers.iter().flat_map(|container| container.ports.iter().flatten()) {
            let used = if pod.spec.host_network { Some(port.container_port) } else { port.host_port };
            let taken = used.filter(|used| !is_agent && PORTS.iter().any(|(ours, _)| ours == used));
            if let Some(taken) = taken {
                self.ports.entry(taken).or_default().push(pod.metadata.full_name());
            }
        }
        if is_agent && pod.metadata.owner_references.iter().any(|owner| owner.kind == "DaemonSet") {
            self.unpulled.extend(unpulled(pod).map(|why| (pod.metadata.full_name(), why)));
        }
        self.mesh += usize::from(pod.is_of_mesh());
        let has_failed = pod.status.init_container_statuses.iter().any(|status| {
            let states = [&status.state, &status.last_state].into_iter().flatten();
            status.name == VALIDATION
                && !status.ready
                && states.filter_map(|state| state.terminated.as_ref()).any(|end| end.exit_code != 0)
        });
        if has_failed {
            self.broken.push(pod.metadata.full_name());
        }
    }
}

impl ClusterFacts {
    /// Asks for all of it.
    ///
    /// # Errors
    /// The API server does not respond at all.
    pub async fn of(cluster: &KubeApi, namespace: &str) -> Result<Self, CommandFailure> {
        let version = cluster.version().await?;
        let mut rights = Vec::new();
        for (needs, right) in needed(namespace) {
            let may = cluster.may(&right).await;
            rights.push((needs, right, may));
        }
        let daemon_sets = cluster.list::<DaemonSet>(DAEMON_SETS).await;
        let place = |name: &str, usual: &str| {
            let found = daemon_sets.as_ref().ok().and_then(|sets| named(sets, name, usual));
            found.map(|one| one.metadata.namespace.clone())
        };
        let (cilium, agent) = (place("cilium", SYSTEM), place(AGENT, namespace));
        let mut pods = PodCounts::default();
        let seen = cluster.each::<ClusterPod>(PODS, None, ListParams::default(), |pod| pods.see(&pod)).await;
        let object: Result<Option<Object>, CommandFailure> = cluster.get(NAMESPACES, None, namespace).await;
        Ok(Self {
            server: (cluster.url().to_owned(), version),
            namespace: (namespace.to_owned(), object.map(|found| found.map(|one| one.metadata))),
            rights,
            nodes: cluster.list(NODES).await,
            deployments: cluster.list(DEPLOYMENTS).await,
            pods: seen.map(|()| pods),
            cilium: config_map(cluster, cilium, "cilium-config").await,
            agent: config_map(cluster, agent, "istio-cni-config").await,
            daemon_sets,
        })
    }
}

/// The DaemonSet of this name, that of the usual namespace before others: tenants may use any name in theirs.
pub(super) fn named<'a>(sets: &'a [DaemonSet], name: &str, usual: &str) -> Option<&'a DaemonSet> {
    let all = sets.iter().filter(|set| set.metadata.name == name);
    all.min_by_key(|set| set.metadata.namespace != usual)
}

async fn config_map(
    cluster: &KubeApi,
    namespace: Option<String>,
    name: &str,
) -> Result<Option<ConfigMap>, CommandFailure> {
    match namespace {
        Some(namespace) => cluster.get(CONFIG_MAPS, Some(&namespace), name).await,
        None => Ok(None),
    }
}

/// Rights on what the chart creates, and those of this program. A release of Helm is a Secret.
fn needed(namespace: &str) -> Vec<(Needs, Right)> {
    const RBAC: &str = "rbac.authorization.k8s.io";
    let right = |verb, group, resource, inside: bool| Right {
        verb,
        group,
        resource,
        namespace: inside.then(|| namespace.to_owned()),
    };
    let install = [
        right("create", "apps", "daemonsets", true),
        right("create", "", "configmaps", true),
        right("create", "", "serviceaccounts", true),
        right("create", "", "serviceaccounts/token", true),
        right("create", "", "secrets", true),
        right("create", RBAC, "roles", true),
        right("create", RBAC, "rolebindings", true),
        right("create", RBAC, "clusterroles", false),
        right("create", RBAC, "clusterrolebindings", false),
    ];
    let ask = [
        right("list", "", "nodes", false),
        right("list", "", "pods", false),
        right("list", RBAC, "clusterrolebindings", false),
        right("list", "", "events", false),
        right("list", "apps", "daemonsets", true),
        right("get", "", "pods/exec", true),
        right("create", "", "pods/exec", true),
    ];
    let of = |needs: Needs| move |right: Right| (needs, right);
    install.into_iter().map(of(Needs::Installing)).chain(ask.into_iter().map(of(Needs::Asking))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn seen(pods: Value) -> PodCounts {
        let pods: Vec<ClusterPod> = serde_json::from_value(pods).expect("pods");
        let mut facts = PodCounts::default();
        pods.iter().for_each(|pod| facts.see(pod));
        facts
    }

    #[test]
    fn ports_of_the_node_count_and_those_of_pods_do_not() {
        let pod = |name: &str, on_node: bool, port: Value| {
            json!({"metadata": {"namespace": "a", "name": name, "labels": {"k8s-app": name}},
                "spec": {"hostNetwork": on_node, "containers": [{"ports": [port]}]}})
        };
        let facts = seen(json!([
            pod("on-node", true, json!({"containerPort": 15014})),
            pod("mapped", false, json!({"containerPort": 80, "hostPort": 8000})),
            pod("inside", false, json!({"containerPort": 8000})),
            pod("istio-cni-node", true, json!({"containerPort": 8000})),
        ]));
        let ports = [(8000, vec!["a/mapped".to_owned()]), (15014, vec!["a/on-node".to_owned()])];
        assert_eq!(facts.ports, ports.into_iter().collect());
    }

    #[test]
    fn agents_whose_image_cannot_be_pulled_are_known() {
        let pod = |name: &str, label: &str, waiting: Value| {
            json!({"metadata": {"namespace": "mesh", "name": name, "labels": {"k8s-app": label},
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u"}]},
                "status": {"containerStatuses": [{"name": "install-cni", "state": {"waiting": waiting}}]}})
        };
        let agent = "istio-cni-node";
        let facts = seen(json!([
            pod("first", agent, json!({"reason": "ErrImagePull", "message": "not found"})),
            pod("later", agent, json!({"reason": "ImagePullBackOff"})),
            pod("starts", agent, json!({"reason": "ContainerCreating"})),
            pod("other", "app", json!({"reason": "ErrImagePull"})),
        ]));
        let wanted = [("mesh/first", "ErrImagePull: not found"), ("mesh/later", "ImagePullBackOff")];
        assert_eq!(facts.unpulled, wanted.map(|(pod, why)| (pod.to_owned(), why.to_owned())).into());
    }

    #[test]
    fn pods_whose_validation_failed_are_known() {
        let pod = |name: &str, status: Value| {
            json!({"metadata": {"namespace": "a", "name": name, "annotations": {"sidecar.istio.io/status": "{}"}},
                "status": {"initContainerStatuses": [status]}})
        };
        let end = |code: i32| json!({"terminated": {"exitCode": code}});
        let facts = seen(json!([
            pod("held", json!({"name": "istio-validation", "state": end(126)})),
            pod(
                "loops",
                json!({"name": "istio-validation", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": end(126)})
            ),
            pod("sound", json!({"name": "istio-validation", "ready": true, "state": end(0)})),
            pod(
                "healed",
                json!({"name": "istio-validation", "ready": true, "state": end(0), "lastState": end(126)})
            ),
            pod("other", json!({"name": "migrate", "state": end(1)})),
        ]));
        assert_eq!((facts.mesh, facts.broken), (5, vec!["a/held".to_owned(), "a/loops".to_owned()]));
    }
}
