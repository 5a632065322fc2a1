//! What both taint controllers are tested with.

mod agent;
mod leader;

use std::time::Duration;

use serde_json::{Value, json};

use crate::broken::{AGENTS, Asked, Fault, Objects, Verb};
use e2e::agent::{Node, daemon_set};
use e2e::pods::{metric, wait};

pub const KEY: &str = "cni.istio.io/not-ready";
pub const TYPE: &str = "cni.istio.io/Ready";
pub const PATCH: Asked = (Verb::Patch, "nodes");
/// Each delays, and does no more.
pub const DELAYS: [Fault; 3] = [Fault::Status(500), Fault::Later(1), Fault::Silence];

/// An API server that has the agents' DaemonSet and nothing else.
pub fn api(node: &mut Node) -> Objects {
    let api = Objects::start(node);
    api.put(AGENTS, serde_json::from_str(&daemon_set(false)).expect("JSON"));
    api
}

pub fn path(node: &str) -> String {
    format!("/api/v1/nodes/{node}")
}

/// A node as it joins: with the taint, or without.
pub fn joins(api: &Objects, name: &str, is_tainted: bool) {
    let spec = if is_tainted { json!({"taints": [ours()]}) } else { json!({}) };
    let uid = format!("{name}-{}", api.state().requests.len());
    let labels = json!({"kubernetes.io/os": "linux"});
    api.put(
        &path(name),
        json!({"metadata": {"name": name, "uid": uid, "labels": labels}, "spec": spec, "status": {}}),
    );
}

pub fn ours() -> Value {
    json!({"key": KEY, "effect": "NoSchedule"})
}

pub fn another_controllers() -> Value {
    json!({"key": "example.com/other", "effect": "NoSchedule"})
}

/// Another controller's taint gets in front of ours, so that a patch by index does not fit any more.
pub fn taints_in_front(node: &mut Value) {
    let mut taints = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
    taints.insert(0, another_controllers());
    node["spec"]["taints"] = json!(taints);
}

pub fn taints(api: &Objects, node: &str) -> Vec<Value> {
    let node = api.object(&path(node)).expect("the node");
    node["spec"]["taints"].as_array().cloned().unwrap_or_default()
}

pub fn is_tainted(api: &Objects, node: &str) -> bool {
    taints(api, node).contains(&ours())
}

pub fn wait_tainted(of: &Node, api: &Objects, node: &str, wanted: bool) {
    wait(of, &format!("{node} to have the taint: {wanted}"), || is_tainted(api, node) == wanted);
}

/// How often a text is in the log.
pub fn lines(node: &Node, text: &str) -> usize {
    node.log().matches(text).count()
}

pub fn count(node: &Node, name: &str) -> f64 {
    metric(node, name).unwrap_or_else(|| panic!("no {name}\n{}", node.log()))
}

/// The time from the first request of a kind, which was answered with 429, to the next one.
pub fn pause_after_first(api: &Objects, asked: Asked) -> Duration {
    let requests = api.requests(asked);
    assert!(requests.len() >= 2, "{asked:?} {}", requests.len());
    requests[1].at - requests[0].at
}

/// Whether the clock of the day did jump, as the log's lines show it.
pub fn has_jumped(node: &Node) -> bool {
    let log = node.log();
    let mut days = log.lines().filter_map(|line| line.split_once('T').map(|(day, _)| day));
    let first = days.next();
    days.any(|day| Some(day) != first)
}
