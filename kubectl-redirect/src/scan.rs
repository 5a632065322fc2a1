//! `scan`: every node's agent is asked for its pods.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use kube::api::ListParams;
use presentation::Printable;
use presentation::node_scan::{NodeScan, ReportedFinding};

use crate::agents::{Agent, Fleet, Reachability};
use crate::cluster::{EVENTS, KubeApi, NODES, PODS};
use crate::exec::{self, AgentExecError};
use crate::objects::{ClusterEvent, ClusterNode, ClusterPod, Meta, Object};
use crate::terminal::{Progress, counted, layout, note};
use crate::verdict::{Audience, ClusterVerdict, PodFilter, Unasked, VERSION, not_set_up, seen_of_agent};
use crate::wait::{Attempt, CommandText, WaitGoal, until_fine};
use crate::{CommandFailure, FAILED};

/// How many agents are asked at once.
const AT_ONCE: usize = 16;

/// The events of a kubelet about pods whose network could not be set up.
const SETUP_FAILED: &str = "reason=FailedCreatePodSandBox";

/// The most of a node's answer: several are in memory at once.
const MOST_BYTES: u64 = 8 << 20;

/// What to scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScanRequest {
    /// Pods of this namespace alone.
    pub namespace: Option<String>,
    /// One node in place of all.
    pub node: Option<String>,
    /// The labels of the pods.
    pub selector: Option<String>,
    /// Whether the answer is JSON.
    pub is_json: bool,
    /// How long a node may take.
    pub patience: Duration,
    /// What is good enough.
    pub goal: WaitGoal,
}

/// What became of one node's question.
type NodeAnswer = Result<Result<NodeScan, String>, CommandFailure>;

/// `scan`
///
/// # Errors
/// Nothing can be asked.
pub async fn run(cluster: &KubeApi, wanted: &ScanRequest) -> Result<u8, CommandFailure> {
    until_fine(wanted.goal.wait, async || look(cluster, wanted).await).await?.print()
}

/// Asks all once.
async fn look(cluster: &KubeApi, wanted: &ScanRequest) -> Result<Attempt, CommandFailure> {
    let mut verdict = ClusterVerdict::new(filter(cluster, wanted).await?);
    verdict.shows_agents = wanted.node.is_some();
    verdict.ignores_warnings = wanted.goal.ignores_warnings;
    let fleet = match ask_agents(cluster, wanted, &mut verdict).await? {
        Ok(fleet) => fleet,
        Err(failure) => return Ok(Err(failure)),
    };
    for replica in fleet.idle_controllers(cluster).await? {
        verdict.see_controller(&replica);
    }
    let text = if wanted.is_json { Printable::json(&verdict.json()) } else { verdict.text(layout()) };
    Ok(Ok(CommandText { text, headline: verdict.headline(), code: verdict.code() }))
}

/// Asks all once, and passes their answers to the audience; whose agents they are. The inner failure is one that may pass.
pub(crate) async fn ask_agents(
    cluster: &KubeApi,
    wanted: &ScanRequest,
    audience: &mut impl Audience,
) -> Result<Result<Fleet, CommandFailure>, CommandFailure> {
    let nodes = nodes(cluster, wanted.node.as_deref()).await?;
    let fleet = Fleet::find(cluster).await?;
    let agents = fleet.agents(cluster, wanted.node.as_deref()).await?;
    if agents.is_empty() {
        return Ok(Err(CommandFailure(format!(
            "no agent found: no pod of {fleet} on {}; kubectl redirect precheck shows whether one can be installed",
            wanted.node.as_ref().map_or("any node".to_owned(), |node| format!("node {node}")),
        ))));
    }
    for agent in agents.values() {
        audience.see(agent);
    }
    for node in nodes.iter().filter(|node| !agents.contains_key(*node)) {
        audience.miss(node, Unasked::NoAgent(mesh_pods(cluster, node).await?));
    }
    if audience.wants_history() {
        for agent in agents.values() {
            let seen = history(cluster, agent).await;
            if !seen.is_empty() {
                audience.add_finding(&agent.node, seen_of_agent(seen));
            }
        }
    }
    ask_all(cluster, agents, wanted.patience, audience).await?;
    explain_unseen(cluster, wanted.namespace.as_deref(), audience).await;
    Ok(Ok(fleet))
}

/// The nodes that can have an agent.
async fn nodes(cluster: &KubeApi, named: Option<&str>) -> Result<Vec<String>, CommandFailure> {
    let field_selector = named.map(|name| format!("metadata.name={name}"));
    let mut names = Vec::new();
    let is_linux =
        |node: &ClusterNode| matches!(node.status.node_info.operating_system.as_str(), "linux" | "");
    let params = ListParams { field_selector, ..ListParams::default() };
    let see = |node: ClusterNode| names.extend(is_linux(&node).then_some(node.metadata.name));
    cluster.each(NODES, None, params, see).await?;
    match named {
        Some(name) if names.is_empty() => {
            Err(CommandFailure(format!("the API server has no Linux node {name}")))
        }
        Some(_) | None => Ok(names),
    }
}

/// Which pods are asked for.
pub(crate) async fn filter(cluster: &KubeApi, wanted: &ScanRequest) -> Result<PodFilter, CommandFailure> {
    let namespace = wanted.namespace.clone();
    let Some(selector) = &wanted.selector else { return Ok(PodFilter { namespace, names: None }) };
    let params = ListParams::default().labels(selector);
    let mut names = BTreeSet::new();
    let see = |pod: Object| names.extend([pod.metadata.full_name()]);
    cluster.each(PODS, namespace.as_deref(), params, see).await?;
    Ok(PodFilter { namespace, names: Some(names) })
}

/// How many pods of the mesh are on a node.
async fn mesh_pods(cluster: &KubeApi, node: &str) -> Result<usize, CommandFailure> {
    let mut count = 0;
    let params = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let is_counted = |pod: &ClusterPod| (pod.is_of_mesh() || pod.is_of_ambient()) && !pod.is_over();
    cluster.each(PODS, None, params, |pod: ClusterPod| count += usize::from(is_counted(&pod))).await?;
    Ok(count)
}

async fn ask_all(
    cluster: &KubeApi,
    agents: BTreeMap<String, Agent>,
    patience: Duration,
    audience: &mut impl Audience,
) -> Result<(), CommandFailure> {
    let mut questions = Vec::new();
    for (node, agent) in agents {
        match &agent.state {
            Reachability::NotRunning(why) => audience.miss(&node, Unasked::NotRunning(why.clone())),
            Reachability::NotReady | Reachability::Ready => questions.push((node, agent)),
        }
    }
    let mut progress = Progress::new(questions.len());
    let asked = stream::iter(questions)
        .map(|(node, agent)| async move { (node, ask(cluster, &agent, patience).await) });
    let mut answers = std::pin::pin!(asked.buffer_unordered(AT_ONCE));
    while let Some((node, answer)) = answers.next().await {
        match answer? {
            Ok(scan) => audience.add(&node, scan),
            Err(why) => audience.miss(&node, Unasked::Failed(why)),
        }
        progress.step();
    }
    Ok(())
}

/// What Kubernetes knows of an agent: that it was restarted, and the last warning of each kind.
async fn history(cluster: &KubeApi, agent: &Agent) -> Vec<String> {
    let about = ListParams::default()
        .fields(&format!("type=Warning,involvedObject.kind=Pod,involvedObject.name={}", agent.name));
    let mut last: BTreeMap<String, ClusterEvent> = BTreeMap::new();
    let see = |event: ClusterEvent| {
        if last.get(&event.reason).is_none_or(|last| last.last_timestamp <= event.last_timestamp) {
            last.insert(event.reason.clone(), event);
        }
    };
    if let Err(failure) = cluster.each(EVENTS, Some(&agent.namespace), about, see).await {
        note(&Printable::line(&format!("what happened to the agent is not known: {failure}")));
    }
    let words = |ClusterEvent { reason, message, count, last_timestamp, .. }: ClusterEvent| {
        format!("{reason} ({}, last at {last_timestamp}): {message}", counted(count.max(1), "time"))
    };
    agent.restarts.clone().into_iter().chain(last.into_values().map(words)).collect()
}

/// Adds why pods do not start, as far as their events say. The agents may not read events; where the user may not either, only this is missing.
async fn explain_unseen(cluster: &KubeApi, namespace: Option<&str>, audience: &mut impl Audience) {
    if audience.unseen().is_empty() {
        return;
    }
    for (pod, finding) in not_started(cluster, namespace, audience.unseen()).await {
        audience.add_finding(&pod, finding);
    }
}

/// Why these pods have no network, of those whose events say it.
pub(crate) async fn not_started(
    cluster: &KubeApi,
    namespace: Option<&str>,
    pods: &BTreeSet<String>,
) -> Vec<(String, ReportedFinding)> {
    let last = setup_failures(cluster, namespace, pods).await.unwrap_or_else(|failure| {
        note(&Printable::line(&format!("why pods have not started is not known: {failure}")));
        BTreeMap::new()
    });
    let mut found = Vec::new();
    for (pod, event) in last {
        let Meta { namespace, name, uid, .. } = &event.involved_object;
        // An event outlives its pod, whose successor may have its name.
        let now = cluster.get::<Object>(PODS, Some(namespace), name).await;
        if now.is_ok_and(|now| now.is_some_and(|now| now.metadata.uid == *uid)) {
            found.push((pod, not_set_up(&event.message)));
        }
    }
    found
}

/// The last event of each of these pods about a network that could not be set up.
///
/// # Errors
/// Events cannot be listed.
pub(crate) async fn setup_failures(
    cluster: &KubeApi,
    namespace: Option<&str>,
    pods: &BTreeSet<String>,
) -> Result<BTreeMap<String, ClusterEvent>, CommandFailure> {
    let params = ListParams::default().fields(SETUP_FAILED);
    let mut last: BTreeMap<String, ClusterEvent> = BTreeMap::new();
    let see = |event: ClusterEvent| {
        let of = event.involved_object.full_name();
        let is_later = last.get(&of).is_none_or(|last| last.last_timestamp <= event.last_timestamp);
        if is_later && pods.contains(&of) {
            last.insert(of, event);
        }
    };
    cluster.each(EVENTS, namespace, params, see).await?;
    Ok(last)
}

/// A missing right ends it all: it is missing for every node.
async fn ask(cluster: &KubeApi, agent: &Agent, patience: Duration) -> NodeAnswer {
    let words = ["scan", "--output", "json"];
    let output = match exec::output(cluster, agent, &words, patience, MOST_BYTES).await {
        Ok(output) => output,
        Err(error @ AgentExecError::Forbidden { .. }) => return Err(CommandFailure::of(error)),
        Err(error) => return Ok(Err(error.to_string())),
    };
    if output.code == FAILED {
        return Ok(Err(format!("redirectctl failed: {}", output.complaint())));
    }
    Ok(read(&output.stdout))
}

fn read(json: &[u8]) -> Result<NodeScan, String> {
    let scan: NodeScan = serde_json::from_slice(json)
        .map_err(|error| format!("redirectctl's answer is unreadable: {error}"))?;
    if scan.version != VERSION {
        return Err(format!(
            "redirectctl answers in version {} of its documents, and this program reads {VERSION}: use the kubectl-redirect of the agents' release",
            scan.version
        ));
    }
    Ok(scan)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_another_version_are_refused() {
        assert!(read(br#"{"version": 1, "node": [], "pods": []}"#).is_ok());
        let refused = read(br#"{"version": 2, "state": {}}"#).expect_err("another version");
        assert!(refused.contains("version 2"), "{refused}");
        assert!(read(b"no JSON").is_err());
    }
}
