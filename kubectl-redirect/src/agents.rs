//! The agents' pods: which node has which, and whether it can be asked.

use std::collections::BTreeMap;

use cni_core::reasons::AGENT_LABEL;
use k8s_openapi::api::core::v1::ContainerStatus;
use kube::api::ListParams;

use crate::Failure;
use crate::cluster::{Cluster, PODS};
use crate::objects::Pod;

/// What selects the agents' pods, in Istio's chart and in ours.
#[must_use]
pub fn selector() -> String {
    let (key, value) = AGENT_LABEL;
    format!("{key}={value}")
}

/// Their container.
const CONTAINER: &str = "install-cni";

/// Whether an agent can be asked; the best last.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum AgentState {
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
    pub state: AgentState,
}

impl Agent {
    /// From its pod, once that has a node.
    #[must_use]
    pub fn of(pod: &Pod) -> Option<Self> {
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
        })
    }

    /// `NAMESPACE/NAME`.
    #[must_use]
    pub fn pod(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

fn state(pod: &Pod, status: Option<&ContainerStatus>) -> AgentState {
    let Some(status) = status else {
        return AgentState::NotRunning(pod.status.phase.to_lowercase());
    };
    let now = status.state.clone().unwrap_or_default();
    if now.running.is_none() {
        let waits = now.waiting.and_then(|why| why.reason);
        let reason = waits.or(now.terminated.and_then(|end| end.reason)).filter(|word| !word.is_empty());
        return AgentState::NotRunning(reason.unwrap_or_else(|| "not started".to_owned()));
    }
    if status.ready && pod.metadata.deletion_timestamp.is_none() {
        AgentState::Ready
    } else {
        AgentState::NotReady
    }
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

/// The agents of the cluster, or of one node.
///
/// # Errors
/// They cannot be listed.
pub async fn find(cluster: &Cluster, node: Option<&str>) -> Result<BTreeMap<String, Agent>, Failure> {
    let mut params = ListParams::default().labels(&selector());
    params.field_selector = node.map(|name| format!("spec.nodeName={name}"));
    let mut agents = Vec::new();
    cluster.each::<Pod>(PODS, None, params, |pod| agents.extend(Agent::of(&pod))).await?;
    Ok(by_node(agents))
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
        assert_eq!(state(status(true, json!({"running": {}}))), AgentState::Ready);
        assert_eq!(state(status(false, json!({"running": {}}))), AgentState::NotReady);
        let crashed = state(status(false, json!({"waiting": {"reason": "CrashLoopBackOff"}})));
        assert_eq!(crashed, AgentState::NotRunning("CrashLoopBackOff".to_owned()));
        assert_eq!(state(json!(null)), AgentState::NotRunning("pending".to_owned()));
        assert_eq!(agent("a", "", &json!(null)), None);
    }

    #[test]
    fn an_agent_that_goes_is_not_ready_and_one_that_is_over_is_none() {
        let pod = |phase: &str, leaves: Value| {
            let pod = json!({"metadata": {"name": "a", "deletionTimestamp": leaves},
                "spec": {"nodeName": "n", "containers": [{"name": "install-cni"}]},
                "status": {"phase": phase, "containerStatuses": [{"name": "install-cni", "ready": true, "state": {"running": {}}}]}});
            Agent::of(&serde_json::from_value(pod).expect("a pod")).map(|agent| agent.state)
        };
        assert_eq!(pod("Running", json!(null)), Some(AgentState::Ready));
        assert_eq!(pod("Running", json!("2026-11-24T00:00:00Z")), Some(AgentState::NotReady));
        assert_eq!(pod("Failed", json!(null)), None);
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
