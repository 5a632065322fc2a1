//! `cleanup`: takes from nodes what agents wrote on them and could not take back, because their rights were removed before they ended.
//! The only command that changes anything.

use std::fmt;

use presentation::Printable;
use presentation::text_writer::{TextLayout, TextStyle, TextWriter};
use reasons::{CONDITION, TAINT_KEYS};
use serde_json::{Value, json};

use crate::cluster::{DAEMON_SETS, KubeApi, NODES};
use crate::objects::{ClusterNode, DaemonSet};
use crate::precheck::is_ours;
use crate::terminal::{layout, print};
use crate::{CommandFailure, FINE, FOUND};

/// What agents write, by its names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CleanupRequest {
    /// The type of the condition.
    pub condition: String,
    /// The keys of the taint.
    pub taints: Vec<String>,
}

impl CleanupRequest {
    /// Other names than the usual ones, if any.
    #[must_use]
    pub fn of(condition: Option<String>, taint: Option<String>) -> Self {
        let usual = TAINT_KEYS.map(str::to_owned).to_vec();
        Self {
            condition: condition.unwrap_or_else(|| CONDITION.to_owned()),
            taints: taint.map_or(usual, |key| vec![key]),
        }
    }
}

/// `cleanup`
///
/// # Errors
/// An agent would write it again, or the API server cannot be asked.
pub async fn run(cluster: &KubeApi, wanted: &CleanupRequest) -> Result<u8, CommandFailure> {
    let sets: Vec<DaemonSet> = cluster.list(DAEMON_SETS).await?;
    if let Some(set) = sets.iter().find(|set| is_ours(set)) {
        let (namespace, name) = (&set.metadata.namespace, &set.metadata.name);
        return Err(CommandFailure(format!(
            "DaemonSet {namespace}/{name} has agents, which write on nodes and take that back as they end; run kubectl -n {namespace} delete daemonset {name} --cascade=foreground first"
        )));
    }
    let mut outcomes = Vec::new();
    for node in cluster.list::<ClusterNode>(NODES).await? {
        let cleaned = clean(cluster, &node, wanted).await;
        outcomes.extend(Outcome::of(&node, cleaned));
    }
    print(&text(&outcomes, layout()))?;
    Ok(if outcomes.iter().all(Outcome::is_fine) { FINE } else { FOUND })
}

/// Takes from a node what is the agent's; what that was.
async fn clean(
    cluster: &KubeApi,
    node: &ClusterNode,
    wanted: &CleanupRequest,
) -> Result<Vec<String>, CommandFailure> {
    let mut taken = Vec::new();
    let name = &node.metadata.name;
    if let Some((patch, keys)) = without_taints(node, &wanted.taints) {
        cluster.patch_json(NODES, name, &patch).await?;
        taken.extend(keys.into_iter().map(|key| format!("taint {key}")));
    }
    if node.status.conditions.iter().any(|condition| condition.type_ == wanted.condition) {
        // The UID: another node may have taken this name.
        let patch = json!({"metadata": {"uid": node.metadata.uid},
            "status": {"conditions": [{"$patch": "delete", "type": wanted.condition}]}});
        cluster.patch_status(NODES, name, &patch).await?;
        taken.push(format!("condition {}", wanted.condition));
    }
    Ok(taken)
}

/// The JSON patch that takes taints with these keys from a node and tests that the node is still the one that was read; and their keys.
fn without_taints(node: &ClusterNode, keys: &[String]) -> Option<(Value, Vec<String>)> {
    let is_agents = |taint: &&Value| keys.iter().any(|key| taint["key"] == key.as_str());
    let (taken, kept): (Vec<&Value>, Vec<&Value>) = node.spec.taints.iter().partition(is_agents);
    let keys = taken.iter().filter_map(|taint| taint["key"].as_str().map(str::to_owned)).collect();
    let patch = json!([
        {"op": "test", "path": "/metadata/uid", "value": node.metadata.uid},
        {"op": "test", "path": "/spec/taints", "value": node.spec.taints},
        {"op": "replace", "path": "/spec/taints", "value": kept},
    ]);
    (!taken.is_empty()).then_some((patch, keys))
}

/// What became of a node that has something to report.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    node: String,
    taken: Result<Vec<String>, CommandFailure>,
    is_reachable: bool,
}

impl Outcome {
    fn of(node: &ClusterNode, taken: Result<Vec<String>, CommandFailure>) -> Option<Self> {
        let is_reachable =
            node.status.conditions.iter().any(|one| one.type_ == "Ready" && one.status == "True");
        let outcome = Self { node: node.metadata.name.clone(), taken, is_reachable };
        let is_silent = outcome.is_fine() && outcome.taken == Ok(Vec::new());
        (!is_silent).then_some(outcome)
    }

    const fn is_fine(&self) -> bool {
        self.is_reachable && self.taken.is_ok()
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.taken {
            Ok(taken) if taken.is_empty() => {}
            Ok(taken) => write!(f, "removed {}", taken.join(", "))?,
            Err(why) => write!(f, "{why}; run this again")?,
        }
        if !self.is_reachable {
            let comma = if self.taken == Ok(Vec::new()) { "" } else { "; " };
            write!(
                f,
                "{comma}not reached: the node is not Ready, so its agent may not have removed the plugin; when it is back, run install-cni uninstall there"
            )?;
        }
        Ok(())
    }
}

fn text(outcomes: &[Outcome], layout: TextLayout) -> Printable {
    let mut paper = TextWriter::new(layout);
    for outcome in outcomes {
        let style = if outcome.is_fine() { TextStyle::Green } else { TextStyle::Red };
        paper.marked(0, &format!("{} ", outcome.node), style, &outcome.to_string());
    }
    if outcomes.iter().all(Outcome::is_fine) {
        paper.line(0, "every node is clean");
    }
    paper.into_text()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(taints: &Value, ready: &str) -> ClusterNode {
        let object = json!({"metadata": {"name": "n", "uid": "u"}, "spec": {"taints": taints},
            "status": {"conditions": [{"type": "Ready", "status": ready}]}});
        serde_json::from_value(object).expect("a node")
    }

    #[test]
    fn taints_of_other_programs_stay_as_they_are() {
        let other = json!({"key": "x", "effect": "NoSchedule", "timeAdded": "then"});
        let usual = CleanupRequest::of(None, None).taints;
        assert_eq!(without_taints(&node(&json!([other]), "True"), &usual), None);
        assert_eq!(without_taints(&node(&json!(null), "True"), &usual), None);
        let ours = json!({"key": TAINT_KEYS[1], "value": "v", "effect": "NoExecute"});
        let (patch, keys) = without_taints(&node(&json!([ours, other]), "True"), &usual).expect("a patch");
        assert_eq!((&patch[1]["value"], &patch[2]["value"]), (&json!([ours, other]), &json!([other])));
        assert_eq!(keys, [TAINT_KEYS[1]]);
        assert_eq!(
            without_taints(&node(&json!([ours]), "True"), &CleanupRequest::of(None, Some("y".into())).taints),
            None
        );
    }

    #[test]
    fn a_node_that_was_not_reached_is_named_even_if_it_has_nothing() {
        assert_eq!(Outcome::of(&node(&json!([]), "True"), Ok(Vec::new())), None);
        for ready in ["False", "Unknown"] {
            let outcome = Outcome::of(&node(&json!([]), ready), Ok(Vec::new())).expect("a line");
            assert!(!outcome.is_fine() && outcome.to_string().starts_with("not reached"), "{outcome}");
        }
        let refused = Outcome::of(&node(&json!([]), "True"), Err(CommandFailure::of("403"))).expect("a line");
        assert!(!refused.is_fine() && refused.to_string().starts_with("403"), "{refused}");
    }
}
