//! What agents and controllers wrote on nodes and pods and could not take back, because their rights went before they ended: removed once they are gone.

use std::collections::BTreeSet;
use std::time::Duration;

use agent_runtime::cluster::{ApiHandle, Cluster};
use agent_runtime::daemon_set::{self, is_deleted};
use agent_runtime::node::{NODES, Node, NodeMarking, RequestedTaint};
use agent_runtime::resync::{Freshness, Keep, ListLimits, ListSource, Selection};
use agent_runtime::{ChangeError, SCOPE};
use anyhow::bail;
use cluster_client::Request;
use cluster_client::params::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::{AGENTS, ControllerSettings};

/// How long agents may take to end. The chart gives them less.
const AGENTS_PATIENCE: Duration = Duration::from_secs(120);
/// The pauses between two lists of agents.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Waits until no agent runs on a node that is Ready, then takes conditions and taints from every node, and the label of broken pods.
///
/// # Errors
/// Agents may come back, the API server cannot be asked, or some nodes or pods are not clean: it names them.
pub async fn run(settings: ControllerSettings) -> anyhow::Result<()> {
    let connection = ApiHandle::new(settings.account, settings.identity);
    let cluster = connection.get()?;
    if daemon_set::find(&cluster).await?.is_some_and(|found| !is_deleted(&found)) {
        let name = &cluster.identity().daemon_set;
        bail!(
            "DaemonSet {name} has agents, which write on nodes and take that back as they end; delete it first"
        );
    }
    let (nodes, agents) = after_the_agents(&cluster).await?;
    let mut unclean = Vec::new();
    for node in &nodes {
        let cleaned = clean(&cluster, node, &settings.marking).await;
        if !report(node, agents.contains(node.name()), &cleaned) {
            unclean.push(node.name());
        }
    }
    let labelled = match &settings.broken_label {
        Some(label) => unlabel(&cluster, label).await?,
        None => Vec::new(),
    };
    if !unclean.is_empty() {
        bail!("{} of {} nodes are not clean: {}", unclean.len(), nodes.len(), unclean.join(", "));
    }
    if let Some((pod, error)) = labelled.first() {
        bail!("{} pods keep the label of broken ones, such as {pod}: {error}", labelled.len());
    }
    log::info!(target: SCOPE, nodes = nodes.len(); "every node is clean");
    Ok(())
}

/// Takes a label from all pods that have it with this value; returns those that keep it, and why.
async fn unlabel(
    cluster: &Cluster,
    (key, value): &(String, String),
) -> anyhow::Result<Vec<(String, ChangeError)>> {
    let pods = ("/api/v1/pods".to_owned(), "PodList");
    let labelled = list(cluster, pods, &format!("{key}={value}"), identity).await?;
    let mut kept = Vec::new();
    for (namespace, name, uid) in labelled {
        // With its UID: a successor of the name has a label of its own.
        let patch = json!({"metadata": {"uid": uid, "labels": {key: null}}});
        let pods = Request::new(format!("/api/v1/namespaces/{namespace}/pods"));
        let request = pods.patch(&name, &PatchParams::default(), &Patch::Merge(patch));
        let pod = format!("{namespace}/{name}");
        match cluster.json::<Value>(request).await.map_err(ChangeError::from) {
            Ok(_) => log::info!(target: SCOPE, pod = pod; "removed label {key}"),
            Err(ChangeError::Gone) => {}
            Err(error) => kept.push((pod, error)),
        }
    }
    Ok(kept)
}

/// Namespace, name and UID of a pod.
fn identity(pod: &Value) -> Option<(String, String, String)> {
    let text = |field: &str| pod["metadata"][field].as_str().map(str::to_owned);
    Some((text("namespace")?, text("name")?, text("uid")?))
}

/// The nodes, and the names of those whose agents have not ended.
async fn after_the_agents(cluster: &Cluster) -> anyhow::Result<(Vec<Node>, BTreeSet<String>)> {
    let namespace = &cluster.identity().namespace;
    let (started, mut pause) = (Instant::now(), FIRST_PAUSE);
    loop {
        let pods = format!("/api/v1/namespaces/{namespace}/pods");
        let agents = list(cluster, (pods, "PodList"), AGENTS, node_of_agent).await?;
        let nodes = list(cluster, (NODES.to_owned(), "NodeList"), "", Node::of).await?;
        let agents: BTreeSet<String> = agents.into_iter().collect();
        // An agent that its node's kubelet cannot end is not waited for.
        let is_awaited = nodes.iter().any(|node| node.is_ready() && agents.contains(node.name()));
        if !is_awaited || started.elapsed() >= AGENTS_PATIENCE {
            return Ok((nodes, agents));
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// The node of an agent that has not ended.
fn node_of_agent(pod: &Value) -> Option<String> {
    let has_ended = matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
    pod["spec"]["nodeName"].as_str().filter(|_| !has_ended).map(str::to_owned)
}

async fn list<K>(
    cluster: &Cluster,
    (path, kind): (String, &'static str),
    labels: &str,
    keep: K,
) -> anyhow::Result<Vec<K::Kept>>
where
    K: Keep<Kept: Send> + Clone + Send + 'static,
{
    let source = ListSource { path, kind, limits: ListLimits::OF_NODES };
    let of = Selection { fields: String::new(), labels: labels.to_owned() };
    Ok(cluster.list(&source, &of, Freshness::Newest, keep).await?.kept)
}

/// Takes from a node what agents and controllers write; what that was.
async fn clean(cluster: &Cluster, node: &Node, marking: &NodeMarking) -> Result<Vec<String>, ChangeError> {
    let mut taken = Vec::new();
    if cluster.set_taint(node, marking, RequestedTaint::Free).await? {
        taken.push(format!("taint {}", marking.taint.key));
    }
    if let Some(patch) = node.condition_removal(&marking.condition_type) {
        cluster.patch_node_status(node.name(), patch).await?;
        taken.push(format!("condition {}", marking.condition_type));
    }
    Ok(taken)
}

/// Logs what became of a node; whether it is clean. `has_agent`: whether its agent has not ended.
fn report(node: &Node, has_agent: bool, cleaned: &Result<Vec<String>, ChangeError>) -> bool {
    let name = node.name();
    let is_reached = node.is_ready() && !has_agent;
    match cleaned {
        Ok(taken) if taken.is_empty() => {}
        Ok(taken) => log::info!(target: SCOPE, node = name; "removed {}", taken.join(", ")),
        Err(ChangeError::Gone) => return true,
        Err(error) => {
            log::error!(target: SCOPE, node = name; "{error}; kubectl redirect cleanup tries again");
        }
    }
    if !is_reached {
        let why = if has_agent { "its agent has not ended" } else { "it is not Ready" };
        log::warn!(target: SCOPE, node = name; "not reached: {why}, so the plugin may still be there; run install-cni uninstall on it");
    }
    is_reached && cleaned.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(ready: &str) -> Node {
        let conditions = json!([{"type": "Ready", "status": ready}]);
        Node::of(&json!({"metadata": {"name": "n", "uid": "u"}, "status": {"conditions": conditions}}))
            .expect("a node")
    }

    #[test]
    fn a_node_is_clean_if_it_was_reached_and_has_nothing() {
        let refused = || Err(ChangeError::Refused(String::new()));
        for (ready, has_agent, cleaned, is_clean) in [
            ("True", false, Ok(vec!["taint x".to_owned()]), true),
            ("True", false, refused(), false),
            ("True", true, Ok(Vec::new()), false),
            ("Unknown", false, Ok(Vec::new()), false),
            ("Unknown", true, Err(ChangeError::Gone), true),
        ] {
            assert_eq!(report(&node(ready), has_agent, &cleaned), is_clean, "{ready} {has_agent}");
        }
    }

    #[test]
    fn agents_that_have_ended_run_nowhere() {
        let pod = |phase: &str| json!({"spec": {"nodeName": "n"}, "status": {"phase": phase}});
        assert_eq!(node_of_agent(&pod("Running")).as_deref(), Some("n"));
        assert_eq!(node_of_agent(&pod("Failed")), None);
        assert_eq!(node_of_agent(&json!({"spec": {}, "status": {"phase": "Pending"}})), None);
    }
}
