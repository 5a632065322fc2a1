//! `install-cni clean-nodes`: what agents left on nodes, removed after them, as the chart's hook runs it.

use std::process::Output;
use std::sync::MutexGuard;

use e2e::agent::{Node, daemon_set};
use e2e::http::{HttpRequest, StandIn, failure};
use serde_json::{Value, json};

/// An API server with nodes, agents and perhaps their DaemonSet.
struct Api(StandIn<State>);

#[derive(Default)]
struct State {
    nodes: Vec<Value>,
    /// The nodes of the agents in one list after the other, and the last one for ever.
    agents: Vec<Vec<&'static str>>,
    daemon_set: Option<String>,
    /// Names of pods with the label of broken ones, all in namespace shop.
    labelled: Vec<&'static str>,
    /// Paths and bodies of patches. Those of node `refused` are not allowed.
    patches: Vec<(String, Value)>,
}

impl Api {
    fn start(node: &mut Node, state: State) -> Self {
        let api = Self(StandIn::of(state, respond));
        node.set("KUBERNETES_SERVICE_PORT", &api.0.port.to_string());
        api
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state()
    }
}

fn respond(request: &HttpRequest, state: &mut State) -> (u16, String) {
    let (path, query) = (request.path(), request.query());
    let list = |kind: &str, items: Vec<Value>| {
        let list =
            json!({"kind": kind, "apiVersion": "v1", "metadata": {"resourceVersion": "7"}, "items": items});
        (200, list.to_string())
    };
    if request.method() == "PATCH" {
        let is_refused = path.contains("/refused");
        state.patches.push((path.to_owned(), serde_json::from_slice(&request.body).expect("JSON")));
        return if is_refused { (403, failure(403)) } else { (200, "{}".to_owned()) };
    }
    match path {
        "/api/v1/nodes" => list("NodeList", state.nodes.clone()),
        "/api/v1/namespaces/istio-system/pods" => {
            assert!(query.contains("k8s-app%3Distio-cni-node"), "{query}");
            let agents =
                if state.agents.len() > 1 { state.agents.remove(0) } else { state.agents[0].clone() };
            let pod = |node| json!({"metadata": {"name": "agent"}, "spec": {"nodeName": node}, "status": {}});
            list("PodList", agents.into_iter().map(pod).collect())
        }
        "/api/v1/pods" => {
            assert!(query.contains("labelSelector=example.com%2Fbroken%3Dyes"), "{query}");
            let pod = |name: &&str| json!({"metadata": {"namespace": "shop", "name": name, "uid": format!("uid-{name}")}});
            list("PodList", state.labelled.iter().map(pod).collect())
        }
        _ if path.contains("/daemonsets/") => {
            state.daemon_set.clone().map_or_else(|| (404, failure(404)), |set| (200, set))
        }
        _ => (404, failure(404)),
    }
}

fn of_cluster(name: &str, taints: &Value, conditions: &[(&str, &str)]) -> Value {
    let conditions: Vec<Value> =
        conditions.iter().map(|(of, status)| json!({"type": of, "status": status})).collect();
    json!({"metadata": {"name": name, "uid": format!("uid-{name}")}, "spec": {"taints": taints},
        "status": {"conditions": conditions}})
}

const READY: (&str, &str) = ("Ready", "True");
const OURS: (&str, &str) = ("cni.istio.io/Ready", "True");

fn run(node: &Node) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = node.command(&["clean-nodes"]).output().expect("runs");
    (status.code(), String::from_utf8_lossy(&stderr).into_owned())
}

#[test]
fn nodes_are_cleaned_once_their_agents_have_ended() {
    let other = json!({"key": "x", "effect": "NoExecute"});
    let taint = json!({"key": "cni.istio.io/not-ready", "effect": "NoSchedule"});
    let mut node = Node::new(&[]);
    let state = State {
        nodes: vec![
            of_cluster("a", &json!([other, taint]), &[READY, OURS]),
            of_cluster("b", &json!([other]), &[READY, ("other/Ready", "True")]),
        ],
        agents: vec![vec!["a", "b"], vec!["b"], vec![]],
        daemon_set: Some(daemon_set(true)),
        ..State::default()
    };
    let api = Api::start(&mut node, state);
    let (code, log) = run(&node);
    assert_eq!(code, Some(0), "{log}");
    for words in ["removed taint cni.istio.io/not-ready, condition cni.istio.io/Ready", "every node is clean"]
    {
        assert!(log.contains(words), "{words}: {log}");
    }
    let state = api.state();
    assert_eq!(state.agents.len(), 1, "it did not wait");
    let [(of_taints, taints), (of_status, status)] = &state.patches[..] else {
        panic!("{:?}", state.patches)
    };
    assert_eq!((of_taints.as_str(), of_status.as_str()), ("/api/v1/nodes/a", "/api/v1/nodes/a/status"));
    assert_eq!(taints[0], json!({"op": "test", "path": "/metadata/uid", "value": "uid-a"}));
    assert_eq!(taints[2], json!({"op": "remove", "path": "/spec/taints/1"}));
    let removed = json!([{"$patch": "delete", "type": "cni.istio.io/Ready"}]);
    assert_eq!(status, &json!({"metadata": {"uid": "uid-a"}, "status": {"conditions": removed}}));
}

/// Whose agents labelled broken pods.
fn labelling() -> Node {
    let mut node = Node::new(&[]);
    for (name, value) in [
        ("LABEL_PODS", "true"),
        ("BROKEN_POD_LABEL_KEY", "example.com/broken"),
        ("BROKEN_POD_LABEL_VALUE", "yes"),
    ] {
        node.set(&format!("REPAIR_{name}"), value);
    }
    node
}

#[test]
fn pods_lose_the_label_of_broken_ones() {
    let mut node = labelling();
    let state = State { agents: vec![vec![]], labelled: vec!["cart", "web"], ..State::default() };
    let api = Api::start(&mut node, state);
    let (code, log) = run(&node);
    assert_eq!(code, Some(0), "{log}");
    let patch = |name: &str| {
        let metadata = json!({"uid": format!("uid-{name}"), "labels": {"example.com/broken": null}});
        (format!("/api/v1/namespaces/shop/pods/{name}"), json!({"metadata": metadata}))
    };
    assert_eq!(api.state().patches, [patch("cart"), patch("web")]);
}

#[test]
fn pods_that_keep_the_label_are_named() {
    let mut node = labelling();
    let state = State { agents: vec![vec![]], labelled: vec!["refused", "web"], ..State::default() };
    let api = Api::start(&mut node, state);
    let (code, log) = run(&node);
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("1 pods keep the label of broken ones, such as shop/refused"), "{log}");
    assert_eq!(api.state().patches.len(), 2);
}

/// No agent is waited for that no kubelet can end.
#[test]
fn nodes_that_were_not_reached_or_stay_as_they_are_are_named() {
    let mut node = Node::new(&[]);
    let state = State {
        nodes: vec![
            of_cluster("away", &json!(null), &[("Ready", "Unknown"), OURS]),
            of_cluster("refused", &json!(null), &[READY, OURS]),
            of_cluster("clean", &json!(null), &[READY]),
        ],
        agents: vec![vec!["away"]],
        ..State::default()
    };
    let api = Api::start(&mut node, state);
    let (code, log) = run(&node);
    assert_eq!(code, Some(1), "{log}");
    for words in [
        "not reached: its agent has not ended, so the plugin may still be there; run install-cni uninstall",
        "kubectl redirect cleanup tries again",
        "2 of 3 nodes are not clean: away, refused",
    ] {
        assert!(log.contains(words), "{words}: {log}");
    }
    assert_eq!(api.state().patches[0].0, "/api/v1/nodes/away/status");
}

/// As where a rendered chart is applied with its hooks.
#[test]
fn beside_a_daemon_set_nothing_is_changed() {
    let mut node = Node::new(&[]);
    let state = State { daemon_set: Some(daemon_set(false)), ..State::default() };
    let api = Api::start(&mut node, state);
    let (code, log) = run(&node);
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("DaemonSet istio-cni-node has agents"), "{log}");
    assert!(api.state().patches.is_empty());
}
