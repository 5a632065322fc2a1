//! The agents' pods: which node has which, and whether it can be asked.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::ContainerStatus;
use kube::api::ListParams;
use reasons::AGENT_LABEL;

use crate::CommandFailure;
use crate::cluster::{BINDINGS, DAEMON_SETS, KubeApi, PODS};
use crate::objects::{Binding, ClusterPod, DaemonSet, PodSpec};
use crate::terminal::{counted, names};

/// The label of the objects of Istio's chart and of ours.
const CHART: &str = "app=istio-cni";
/// What to do where the agents are not found for sure.
const NAME_IT: &str = "name the namespace of the agents with --agent-namespace";
/// The label of the taint controller's replicas, which run beside them.
const CONTROLLER: (&str, &str) = ("app", "istio-cni-taint-controller");
/// Their container.
const CONTAINER: &str = "install-cni";

/// Whether an agent can be asked; the best last.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reachability {
    /// Its container does not run: why.
    NotRunning(String),
    /// It runs and is not ready.
    NotReady,
    /// It runs and is ready.
    Ready,
}

/// The pod of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agent {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its node.
    pub node: String,
    /// The container that has `redirectctl`.
    pub container: String,
    /// The image of that.
    pub image: String,
    /// Whether it can be asked.
    pub state: Reachability,
    /// How often it was restarted and how it ended last, if it was.
    pub restarts: Option<String>,
}

impl Agent {
    /// From its pod, once that has a node.
    #[must_use]
    pub fn of(pod: &ClusterPod) -> Option<Self> {
        let containers = &pod.spec.containers;
        let container = containers.iter().find(|one| one.name == CONTAINER).or(containers.first())?;
        let status = pod.status.container_statuses.iter().find(|one| one.name == container.name);
        (!pod.spec.node_name.is_empty() && !pod.is_over()).then(|| Self {
            namespace: pod.metadata.namespace.clone(),
            name: pod.metadata.name.clone(),
            node: pod.spec.node_name.clone(),
            container: container.name.clone(),
            image: container.image.clone().unwrap_or_default(),
            state: state(pod, status),
            restarts: status.and_then(restarts),
        })
    }

    /// `NAMESPACE/NAME`.
    #[must_use]
    pub fn pod(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

fn state(pod: &ClusterPod, status: Option<&ContainerStatus>) -> Reachability {
    let Some(status) = status else {
        return Reachability::NotRunning(pod.status.phase.to_lowercase());
    };
    let now = status.state.clone().unwrap_or_default();
    if now.running.is_none() {
        let waits = now.waiting.and_then(|why| why.reason);
        let reason = waits.or(now.terminated.and_then(|end| end.reason)).filter(|word| !word.is_empty());
        return Reachability::NotRunning(reason.unwrap_or_else(|| "not started".to_owned()));
    }
    if status.ready && pod.metadata.deletion_timestamp.is_none() {
        Reachability::Ready
    } else {
        Reachability::NotReady
    }
}

/// What the kubelet knows of a container's ends; its message is the end of the log.
fn restarts(status: &ContainerStatus) -> Option<String> {
    let end = status.last_state.as_ref().and_then(|last| last.terminated.as_ref());
    let text = |before: &str, text: &Option<String>| match text.as_deref().map(str::trim) {
        None | Some("") => String::new(),
        Some(text) => format!("{before}{text}"),
    };
    let words = end.map(|end| {
        let (reason, message) = (text(", ", &end.reason), text(": ", &end.message));
        format!("; it ended last with exit code {}{reason}{message}", end.exit_code)
    });
    (status.restart_count > 0).then(|| {
        let times = counted(status.restart_count.unsigned_abs() as usize, "time");
        format!("restarted {times}{}", words.unwrap_or_default())
    })
}

/// The agents by their nodes. Of two on one node, as during an update, the better one.
#[must_use]
pub fn by_node(agents: impl IntoIterator<Item = Agent>) -> BTreeMap<String, Agent> {
    let mut all: BTreeMap<String, Agent> = BTreeMap::new();
    for agent in agents {
        if all.get(&agent.node).is_none_or(|known| known.state < agent.state) {
            all.insert(agent.node.clone(), agent);
        }
    }
    all
}

/// The DaemonSet whose pods are the agents. A user who may create pods can give them our labels and names, so that only its own pods count: those
/// that it controls, by its UID, with its service account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fleet {
    namespace: String,
    name: String,
    uid: String,
    account: String,
}

impl std::fmt::Display for Fleet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DaemonSet {}/{}", self.namespace, self.name)
    }
}

impl Fleet {
    /// Finds it in the namespace that is named; otherwise in those whose service accounts the chart's ClusterRoleBindings name, which takes an
    /// administrator to create.
    ///
    /// # Errors
    /// It does not exist, is not the only one, or nothing can be read.
    pub async fn find(cluster: &KubeApi) -> Result<Self, CommandFailure> {
        let mut found = Vec::new();
        let looked = if let Some(namespace) = cluster.agents() {
            found.extend(Self::of(cluster, namespace).await?);
            format!("in namespace {namespace}; correct --agent-namespace")
        } else {
            let accounts = accounts(cluster).await?;
            for (namespace, names) in &accounts {
                let fleets = Self::of(cluster, namespace).await?;
                found.extend(fleets.into_iter().filter(|fleet| names.contains(&fleet.account)));
            }
            let namespaces: Vec<String> = accounts.into_keys().collect();
            if namespaces.is_empty() {
                format!("no ClusterRoleBinding with the label {CHART} names its account; {NAME_IT}")
            } else {
                format!(
                    "with its account in {}, which ClusterRoleBindings name; {NAME_IT}",
                    names(&namespaces)
                )
            }
        };
        if let [fleet] = found.as_slice() {
            return Ok(fleet.clone());
        }
        if found.is_empty() {
            let (key, value) = AGENT_LABEL;
            return Err(CommandFailure(format!(
                "no agent found: no DaemonSet of pods with the label {key}={value} {looked}; kubectl redirect precheck shows whether one can be installed"
            )));
        }
        let all: Vec<String> = found.iter().map(ToString::to_string).collect();
        Err(CommandFailure(format!(
            "{} may be the agents': {}; {NAME_IT}, and remove those that are not",
            found.len(),
            all.join(", ")
        )))
    }

    /// The DaemonSets of a namespace whose pods have the agents' label.
    async fn of(cluster: &KubeApi, namespace: &str) -> Result<Vec<Self>, CommandFailure> {
        let mut found = Vec::new();
        let see = |set: DaemonSet| {
            let template = &set.spec.template;
            if template.metadata.has_label(AGENT_LABEL) {
                found.push(Self {
                    namespace: namespace.to_owned(),
                    name: set.metadata.name,
                    uid: set.metadata.uid,
                    account: account(&template.spec).to_owned(),
                });
            }
        };
        cluster.each(DAEMON_SETS, Some(namespace), ListParams::default(), see).await?;
        Ok(found)
    }

    /// Whether a pod is one of its own.
    #[must_use]
    pub fn owns(&self, pod: &ClusterPod) -> bool {
        let mut owners = pod.metadata.owner_references.iter();
        let is_owned = owners.any(|owner| {
            owner.kind == "DaemonSet" && owner.controller == Some(true) && owner.uid == self.uid
        });
        is_owned
            && !self.uid.is_empty()
            && pod.metadata.namespace == self.namespace
            && account(&pod.spec) == self.account
    }

    /// The agents by their nodes, or the one of a node.
    ///
    /// # Errors
    /// They cannot be listed.
    pub async fn agents(
        &self,
        cluster: &KubeApi,
        node: Option<&str>,
    ) -> Result<BTreeMap<String, Agent>, CommandFailure> {
        let mut params = labelled(AGENT_LABEL);
        params.field_selector = node.map(|name| format!("spec.nodeName={name}"));
        let mut agents = Vec::new();
        let see = |pod: ClusterPod| agents.extend(Agent::of(&pod).filter(|_| self.owns(&pod)));
        cluster.each(PODS, Some(&self.namespace), params, see).await?;
        Ok(by_node(agents))
    }

    /// The replicas of the taint controller, none of which does its work; nothing where one does, or none is wanted.
    ///
    /// # Errors
    /// They cannot be listed.
    pub async fn idle_controllers(&self, cluster: &KubeApi) -> Result<Vec<Agent>, CommandFailure> {
        let mut replicas = Vec::new();
        let see = |pod: ClusterPod| {
            replicas.extend(Agent::of(&pod).filter(|_| pod.metadata.has_label(CONTROLLER)));
        };
        cluster.each(PODS, Some(&self.namespace), labelled(CONTROLLER), see).await?;
        Ok(unless_one_works(replicas))
    }
}

/// Asks for objects with a label.
fn labelled((key, value): (&str, &str)) -> ListParams {
    ListParams::default().labels(&format!("{key}={value}"))
}

fn unless_one_works(replicas: Vec<Agent>) -> Vec<Agent> {
    let works = replicas.iter().any(|replica| replica.state == Reachability::Ready);
    if works { Vec::new() } else { replicas }
}

/// As whom a pod asks the API server.
fn account(spec: &PodSpec) -> &str {
    if spec.service_account_name.is_empty() { "default" } else { &spec.service_account_name }
}

/// The service accounts, by namespace, to which the chart's objects give rights in the whole cluster.
async fn accounts(cluster: &KubeApi) -> Result<BTreeMap<String, BTreeSet<String>>, CommandFailure> {
    let mut accounts: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let see = |binding: Binding| {
        for subject in binding.subjects {
            if let ("ServiceAccount", Some(namespace)) = (subject.kind.as_str(), subject.namespace) {
                accounts.entry(namespace).or_default().insert(subject.name);
            }
        }
    };
    let listed = cluster.each(BINDINGS, None, ListParams::default().labels(CHART), see).await;
    listed.map_err(|CommandFailure(why)| {
        CommandFailure(format!("cannot find the agents' namespace: {why}; {NAME_IT}"))
    })?;
    Ok(accounts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn agent(name: &str, node: &str, state: &Value) -> Option<Agent> {
        let pod = json!({
            "metadata": {"namespace": "mesh", "name": name}, "spec": {"nodeName": node,
                "containers": [{"name": "log"}, {"name": "install-cni", "image": "hub/install-cni:0.1.0"}]},
            "status": {"phase": "Pending", "containerStatuses": state},
        });
        Agent::of(&serde_json::from_value(pod).expect("a pod"))
    }

    #[test]
    fn an_agent_is_as_its_container_is() {
        let state = |state: Value| agent("a", "n", &state).expect("an agent").state;
        let status =
            |ready: bool, state: Value| json!([{"name": "install-cni", "ready": ready, "state": state}]);
        assert_eq!(state(status(true, json!({"running": {}}))), Reachability::Ready);
        assert_eq!(state(status(false, json!({"running": {}}))), Reachability::NotReady);
        let crashed = state(status(false, json!({"waiting": {"reason": "CrashLoopBackOff"}})));
        assert_eq!(crashed, Reachability::NotRunning("CrashLoopBackOff".to_owned()));
        assert_eq!(state(json!(null)), Reachability::NotRunning("pending".to_owned()));
        assert_eq!(agent("a", "", &json!(null)), None);
    }

    #[test]
    fn an_agents_last_end_is_told_with_its_reason() {
        let restarts = |state: Value| agent("a", "n", &state).expect("an agent").restarts;
        let status = |count: i32, last: Value| {
            restarts(
                json!([{"name": "install-cni", "restartCount": count, "state": {"running": {}}, "lastState": last}]),
            )
        };
        assert_eq!(status(0, json!({})), None);
        assert_eq!(status(1, json!({})).as_deref(), Some("restarted 1 time"));
        let last =
            json!({"terminated": {"exitCode": 1, "reason": "Error", "message": "flag --x: not a number\n"}});
        let words = "restarted 4 times; it ended last with exit code 1, Error: flag --x: not a number";
        assert_eq!(status(4, last).as_deref(), Some(words));
    }

    #[test]
    fn an_agent_that_goes_is_not_ready_and_one_that_is_over_is_none() {
        let pod = |phase: &str, leaves: Value| {
            let pod = json!({"metadata": {"name": "a", "deletionTimestamp": leaves},
                "spec": {"nodeName": "n", "containers": [{"name": "install-cni"}]},
                "status": {"phase": phase, "containerStatuses": [{"name": "install-cni", "ready": true, "state": {"running": {}}}]}});
            Agent::of(&serde_json::from_value(pod).expect("a pod")).map(|agent| agent.state)
        };
        assert_eq!(pod("Running", json!(null)), Some(Reachability::Ready));
        assert_eq!(pod("Running", json!("2026-11-24T00:00:00Z")), Some(Reachability::NotReady));
        assert_eq!(pod("Failed", json!(null)), None);
    }

    #[test]
    fn a_replica_that_waits_for_another_is_no_trouble() {
        let replica = |ready: bool| {
            agent("a", "n", &json!([{"name": "install-cni", "ready": ready, "state": {"running": {}}}]))
        };
        let left = |ready: [bool; 2]| unless_one_works(ready.into_iter().filter_map(replica).collect()).len();
        assert_eq!([left([false, true]), left([true, false]), left([false, false])], [0, 0, 2]);
    }

    #[test]
    fn of_two_agents_of_a_node_the_ready_one_counts() {
        let running =
            |ready: bool| json!([{"name": "install-cni", "ready": ready, "state": {"running": {}}}]);
        let both = [
            agent("new", "n", &running(true)),
            agent("old", "n", &running(false)),
            agent("x", "m", &json!(null)),
        ];
        let all = by_node(both.into_iter().flatten());
        assert_eq!(all.values().map(|one| one.name.as_str()).collect::<Vec<_>>(), ["x", "new"]);
    }
}
