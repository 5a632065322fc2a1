//! What the cluster's taint controller knows, and what follows for a node. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use agent_runtime::daemon_set::wants;
use agent_runtime::node::{Node, NodeMarking};
use k8s_openapi::api::apps::v1::DaemonSet;
use serde_json::Value;

/// What is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WatchedList {
    /// All nodes.
    Nodes,
    /// The pods of this requirement.
    Pods(usize),
}

/// What to do about a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaintAction {
    /// Nothing, until something changes.
    Leave,
    /// It may have to be tainted then.
    Wait(Instant),
    /// Taint it.
    Taint(TaintReason),
    /// Remove its taint.
    Free(TaintReason),
}

/// Why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaintReason {
    /// The node has joined, and no agent is ready there.
    Joined,
    /// No agent has been ready there for a while.
    AgentGone,
    /// The agent there reports that pods would not be redirected.
    AgentSaysNo,
    /// An agent is ready there, and does not report a failure.
    AgentReady,
    /// The agents were removed.
    AgentsRemoved,
}

impl TaintReason {
    /// For events.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Joined => "the node has joined, and no agent is ready there yet",
            Self::AgentGone => "no agent is ready there any more",
            Self::AgentSaysNo => "the agent there reports that pods would not be redirected",
            Self::AgentReady => "its agent is ready",
            Self::AgentsRemoved => "the agents' DaemonSet is gone",
        }
    }
}

/// What the agent of a node reports about it, by its condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReportedCondition {
    Yes,
    No,
    Unknown,
    /// The node lacks this condition: its agent does not publish it, or does not exist.
    Nothing,
}

/// Where agents should run.
#[derive(Clone)]
pub enum AgentPlacement {
    /// On every node, as far as known.
    Everywhere,
    /// On the nodes that this DaemonSet wants.
    On(Box<DaemonSet>),
    /// Unknown yet: agents may follow.
    NotSaid,
    /// Nowhere any more.
    Nowhere,
}

impl AgentPlacement {
    fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::On(set), Self::On(other)) => set.metadata.generation == other.metadata.generation,
            (Self::Everywhere, Self::Everywhere)
            | (Self::NotSaid, Self::NotSaid)
            | (Self::Nowhere, Self::Nowhere) => true,
            (Self::On(_) | Self::Everywhere | Self::NotSaid | Self::Nowhere, _) => false,
        }
    }
}

/// A pod that a node needs, as far as it counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentPod {
    name: String,
    node: String,
    is_ready: bool,
}

impl AgentPod {
    /// Reads one; none where it is on no node.
    #[must_use]
    pub fn of(pod: &Value) -> Option<Self> {
        let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str);
        let conditions = pod.pointer("/status/conditions").and_then(Value::as_array);
        let is_ready_condition = |one: &Value| one["type"] == "Ready" && one["status"] == "True";
        let is_ready = pod.pointer("/metadata/deletionTimestamp").is_none_or(Value::is_null)
            && conditions.into_iter().flatten().any(is_ready_condition);
        let node = text("/spec/nodeName").filter(|node| !node.is_empty())?.to_owned();
        Some(Self { name: text("/metadata/name")?.to_owned(), node, is_ready })
    }
}

/// The pods of a requirement, and how many of them are ready on each node.
#[derive(Debug, Clone, Default)]
struct Pods {
    by_name: BTreeMap<String, AgentPod>,
    ready_on: BTreeMap<String, usize>,
}

impl Pods {
    fn put(&mut self, pod: AgentPod) {
        self.remove(&pod.name);
        if pod.is_ready {
            *self.ready_on.entry(pod.node.clone()).or_default() += 1;
        }
        self.by_name.insert(pod.name.clone(), pod);
    }

    fn remove(&mut self, name: &str) -> Option<String> {
        let pod = self.by_name.remove(name)?;
        if pod.is_ready
            && let Some(count) = self.ready_on.get_mut(&pod.node)
        {
            *count -= 1;
            if *count == 0 {
                self.ready_on.remove(&pod.node);
            }
        }
        Some(pod.node)
    }
}

#[derive(Debug)]
struct Known {
    node: Node,
    /// It has joined since all was listed, and nothing was decided about it.
    is_new: bool,
    unfit_since: Option<Instant>,
}

/// Nodes, and the pods that each needs: one of every requirement.
pub struct Model {
    marking: NodeMarking,
    nodes: Option<BTreeMap<String, Known>>,
    /// Of every requirement.
    pods: Vec<Option<Pods>>,
    placement: Option<AgentPlacement>,
    /// What has not been listed since its watch broke.
    stale: BTreeSet<WatchedList>,
}

impl Model {
    /// Nothing is known yet.
    #[must_use]
    pub fn new(marking: NodeMarking, requirements: usize) -> Self {
        Self { marking, nodes: None, pods: vec![None; requirements], placement: None, stale: BTreeSet::new() }
    }

    /// A watch broke. What is known may be out of date from now on, until it is listed again.
    pub fn mark_stale(&mut self, of: WatchedList) {
        self.stale.insert(of);
    }

    /// Whether everything was listed. Before that nothing can be decided: an unlisted pod seems to be gone.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.nodes.is_some() && self.placement.is_some() && self.pods.iter().all(Option::is_some)
    }

    /// All nodes.
    pub fn list_nodes(&mut self, nodes: Vec<Node>) {
        let is_first = self.nodes.is_none();
        let mut before = self.nodes.take().unwrap_or_default();
        let mut after = BTreeMap::new();
        for node in nodes {
            let old = before.remove(node.name());
            after.insert(node.name().to_owned(), self.know(old, node, !is_first));
        }
        self.nodes = Some(after);
        self.stale.remove(&WatchedList::Nodes);
    }

    /// A node is new, or other than before.
    pub fn put_node(&mut self, node: Node) {
        let name = node.name().to_owned();
        let old = self.nodes.as_mut().and_then(|nodes| nodes.remove(&name));
        let known = self.know(old, node, true);
        self.nodes.get_or_insert_default().insert(name, known);
    }

    fn know(&self, old: Option<Known>, node: Node, is_new: bool) -> Known {
        let Some(old) = old.filter(|old| old.node.uid() == node.uid()) else {
            return Known { node, is_new, unfit_since: None };
        };
        // An agent that frees a node, or reports it as fit, gets the time to be proved right.
        let reports_yes = |node: &Node| self.reported(node) == ReportedCondition::Yes;
        let is_freed = self.is_held(&old.node) && !self.is_held(&node);
        let is_restarted = is_freed || (reports_yes(&node) && !reports_yes(&old.node));
        Known {
            unfit_since: old.unfit_since.filter(|_| !is_restarted),
            is_new: old.is_new && !is_restarted,
            node,
        }
    }

    /// A node is gone.
    pub fn remove_node(&mut self, name: &str) {
        if let Some(nodes) = &mut self.nodes {
            nodes.remove(name);
        }
    }

    /// All pods of a requirement.
    pub fn list_pods(&mut self, requirement: usize, listed: Vec<AgentPod>) {
        let mut pods = Pods::default();
        listed.into_iter().for_each(|pod| pods.put(pod));
        self.pods[requirement] = Some(pods);
        self.stale.remove(&WatchedList::Pods(requirement));
    }

    /// A pod is new, or other than before; the node that this is about.
    pub fn put_pod(&mut self, requirement: usize, pod: AgentPod) -> String {
        let node = pod.node.clone();
        self.pods[requirement].get_or_insert_default().put(pod);
        node
    }

    /// A pod is gone; the node that this is about.
    pub fn remove_pod(&mut self, requirement: usize, name: &str) -> Option<String> {
        self.pods[requirement].as_mut()?.remove(name)
    }

    /// Sets where agents should run; true if that changed.
    pub fn place(&mut self, placement: AgentPlacement) -> bool {
        let is_news = self.placement.as_ref().is_none_or(|old| !old.is_like(&placement));
        self.placement = Some(placement);
        is_news
    }

    /// Every node's name.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.nodes.iter().flatten().map(|(name, _)| name.as_str())
    }

    /// The number of nodes, and of those with the taint.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        let nodes = || self.nodes.iter().flatten();
        (nodes().count(), nodes().filter(|(_, known)| known.node.has(&self.marking.taint)).count())
    }

    /// A node as it was seen last.
    #[must_use]
    pub fn node(&self, name: &str) -> Option<&Node> {
        Some(&self.nodes.as_ref()?.get(name)?.node)
    }

    /// What to do about a node at this moment. With stale knowledge a node that joins is tainted, and nothing else is done.
    pub fn next_action(&mut self, name: &str, now: Instant) -> TaintAction {
        let ready = self.is_ready(name);
        let Some(known) = self.nodes.as_ref().and_then(|nodes| nodes.get(name)) else {
            return TaintAction::Leave;
        };
        if known.node.is_leaving() || !self.is_complete() {
            return TaintAction::Leave;
        }
        let is_held = self.is_held(&known.node);
        let free = |reason| if is_held { TaintAction::Free(reason) } else { TaintAction::Leave };
        match &self.placement {
            Some(AgentPlacement::Nowhere) => return free(TaintReason::AgentsRemoved),
            Some(AgentPlacement::NotSaid) => return TaintAction::Leave,
            Some(AgentPlacement::On(set)) if !wants(set, name, known.node.labels()) => {
                return self.is_well(name);
            }
            Some(AgentPlacement::On(_) | AgentPlacement::Everywhere) | None => {}
        }
        let (reported, has_taint, is_new) =
            (self.reported(&known.node), known.node.has(&self.marking.taint), known.is_new);
        if !self.stale.is_empty() {
            let is_held_back = has_taint || ready || !is_new;
            return if is_held_back { TaintAction::Leave } else { TaintAction::Taint(TaintReason::Joined) };
        }
        let after = self.marking.after;
        let Some(known) = self.nodes.as_mut().and_then(|nodes| nodes.get_mut(name)) else {
            return TaintAction::Leave;
        };
        match (ready, reported) {
            (true, ReportedCondition::Yes | ReportedCondition::Nothing) => {
                (known.is_new, known.unfit_since) = (false, None);
                return free(TaintReason::AgentReady);
            }
            // It is ready, with an unknown state.
            (true, ReportedCondition::Unknown) => return self.is_well(name),
            (_, ReportedCondition::No) | (false, _) => {}
        }
        let since = *known.unfit_since.get_or_insert(now);
        if has_taint {
            known.is_new = false;
            return TaintAction::Leave;
        }
        match (is_new, ready) {
            (true, _) => TaintAction::Taint(TaintReason::Joined),
            (false, _) if now < since + after => TaintAction::Wait(since + after),
            (false, true) => TaintAction::Taint(TaintReason::AgentSaysNo),
            (false, false) => TaintAction::Taint(TaintReason::AgentGone),
        }
    }

    /// Nothing is wrong with a node: what was before does not count when something is.
    fn is_well(&mut self, name: &str) -> TaintAction {
        if let Some(known) = self.nodes.as_mut().and_then(|nodes| nodes.get_mut(name)) {
            known.unfit_since = None;
        }
        TaintAction::Leave
    }

    /// Whether a pod of every requirement is ready on the node.
    fn is_ready(&self, node: &str) -> bool {
        self.pods.iter().all(|pods| pods.as_ref().is_some_and(|pods| pods.ready_on.contains_key(node)))
    }

    fn reported(&self, node: &Node) -> ReportedCondition {
        match node.condition(&self.marking.condition_type).map(|condition| condition.status.as_str()) {
            Some("True") => ReportedCondition::Yes,
            Some("False") => ReportedCondition::No,
            Some(_) => ReportedCondition::Unknown,
            None => ReportedCondition::Nothing,
        }
    }

    fn is_held(&self, node: &Node) -> bool {
        let keys = std::iter::once(self.marking.taint.key.as_str())
            .chain(self.marking.old_keys.iter().map(String::as_str));
        node.has_key(keys)
    }
}

#[cfg(test)]
mod tests;
