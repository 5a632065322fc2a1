//! What agents left on nodes is removed once no agent is there that would write it again.

use std::io::{Read as _, Write as _};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::server::{Reply, Server};

fn node(name: &str, taints: &Value, conditions: &[(&str, &str)]) -> (&'static str, Value) {
    let conditions: Vec<Value> =
        conditions.iter().map(|(of, status)| json!({"type": of, "status": status})).collect();
    let node = json!({"metadata": {"name": name, "uid": format!("uid-{name}")}, "spec": {"taints": taints},
        "status": {"conditions": conditions}});
    ("nodes", node)
}

fn agents(env: &[&str]) -> (&'static str, Value) {
    let env: Vec<Value> = env.iter().map(|name| json!({"name": name, "value": "x"})).collect();
    let containers = json!([{"name": "install-cni", "image": "x", "env": env}]);
    let set = json!({"metadata": {"namespace": "mesh", "name": "istio-cni-node"},
        "spec": {"template": {"spec": {"containers": containers}}}});
    ("daemonsets", set)
}

/// The patches that were sent: targets and bodies.
type Patches = Arc<Mutex<Vec<(String, Value)>>>;

/// A cluster whose server takes patches of every node but `refused`.
fn cluster(objects: Vec<(&'static str, Value)>) -> (Server, Patches) {
    let patches = Patches::default();
    let kept = patches.clone();
    let answer = move |target: &str, stream: &mut std::net::TcpStream| {
        if !target.contains("/nodes/") {
            return false;
        }
        let mut body = vec![0; 64 << 10];
        let count = stream.read(&mut body).unwrap_or_default();
        let target = target.split('?').next().unwrap_or_default().to_owned();
        let refusal = json!({"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403, "message": "no"});
        let (code, words) = if target.contains("refused") { (403, refusal) } else { (200, json!({})) };
        kept.lock().expect("patches").push((target, serde_json::from_slice(&body[..count]).expect("JSON")));
        let words = words.to_string();
        let head =
            format!("HTTP/1.1 {code} X\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", words.len());
        let _ = stream.write_all((head + &words).as_bytes());
        true
    };
    (Server::with(objects, |_| Reply::of(""), answer), patches)
}

const READY: (&str, &str) = ("Ready", "True");
const OURS: (&str, &str) = ("cni.istio.io/Ready", "True");

#[test]
fn conditions_and_taints_of_agents_are_removed_and_no_others() {
    let (other, taint) = (
        json!({"key": "x", "effect": "NoExecute"}),
        json!({"key": "cni.istio.io/not-ready", "effect": "NoSchedule"}),
    );
    let (server, patches) = cluster(vec![
        node("a", &json!([other, taint]), &[READY, OURS]),
        node("b", &json!([other]), &[READY, ("other/Ready", "True")]),
    ]);
    let done = server.run(&["cleanup"]);
    assert_eq!(done.status.code(), Some(0), "{}{}", done.stdout, done.stderr);
    let told = "a removed taint cni.istio.io/not-ready, condition cni.istio.io/Ready\nevery node is clean\n";
    assert_eq!(done.stdout, told);
    let patches = patches.lock().expect("patches");
    let [(of_taints, taints), (of_status, status)] = &patches[..] else { panic!("{patches:?}") };
    assert_eq!((of_taints.as_str(), of_status.as_str()), ("/api/v1/nodes/a", "/api/v1/nodes/a/status"));
    assert_eq!(taints[0], json!({"op": "test", "path": "/metadata/uid", "value": "uid-a"}));
    assert_eq!(taints[2], json!({"op": "replace", "path": "/spec/taints", "value": [other]}));
    assert_eq!(status["metadata"]["uid"], "uid-a");
    assert_eq!(status["status"]["conditions"], json!([{"$patch": "delete", "type": "cni.istio.io/Ready"}]));
}

#[test]
fn nodes_that_were_not_reached_or_stay_as_they_are_are_named() {
    let (server, _) = cluster(vec![
        node("away", &json!(null), &[("Ready", "Unknown"), OURS]),
        node("refused", &json!(null), &[READY, OURS]),
    ]);
    let done = server.run(&["cleanup"]);
    assert_eq!(done.status.code(), Some(2), "{}", done.stderr);
    let words = done.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "away removed condition cni.istio.io/Ready; not reached: the node is not Ready",
        "install-cni uninstall",
        "refused missing right: patch nodes/status refused: no; run this again",
    ] {
        assert!(words.contains(part), "{part}: {words}");
    }
    assert!(!words.contains("clean"), "{words}");
}

#[test]
fn agents_of_this_project_come_first() {
    let mut objects = vec![node("a", &json!(null), &[READY, OURS])];
    objects.push(agents(&["SETTINGS_DIR"]));
    let (server, patches) = cluster(objects);
    let refused = server.run(&["cleanup"]);
    assert_eq!(refused.status.code(), Some(1));
    let command = "kubectl -n mesh delete daemonset istio-cni-node --cascade=foreground";
    assert!(refused.stderr.contains(command), "{}", refused.stderr);
    assert!(patches.lock().expect("patches").is_empty());
    // Istio's agent knows nothing of them.
    let (server, _) = cluster(vec![node("a", &json!(null), &[READY, ("mesh/Ready", "False")]), agents(&[])]);
    let done = server.run(&["cleanup", "--condition-type", "mesh/Ready"]);
    assert_eq!(done.stdout, "a removed condition mesh/Ready\nevery node is clean\n", "{}", done.stderr);
}
