//! Pods that the agent gives to plugins: from what its watch holds, or read over its own connection.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use crate::broken::{Api, Fault, Verb};
use e2e::agent::{CALICO, Node};
use e2e::pods::{mesh_pod, metric, wait};
use serde_json::{Value, json};

/// A node whose agent follows pods, because it repairs them.
fn node() -> Node {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.set("REPAIR_LABEL_PODS", "true");
    node
}

/// What the agent answers at its socket: the status, and the body.
fn post(node: &Node, path: &str, body: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(node.path("run/pluginevent.sock")).expect("connects");
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: unix\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all((head + body).as_bytes()).expect("sends");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.expect("a status"), body.to_owned())
}

fn ask(node: &Node, name: &str, uid: &str) -> (u16, String) {
    post(node, "/v1/pod", &json!({"namespace": "shop", "name": name, "uid": uid}).to_string())
}

fn pod(name: &str, uid: &str) -> Value {
    let mut pod = mesh_pod(name, &["10.1.0.2"]);
    pod["metadata"]["uid"] = json!(uid);
    pod
}

/// How often a pod was read.
fn reads(api: &Api, name: &str) -> usize {
    api.state().gets.iter().filter(|read| *read == name).count()
}

#[test]
fn a_pod_that_the_watch_brought_is_given_while_the_api_server_is_away() {
    let mut node = node();
    let api = Api::start(&mut node);
    api.put(pod("old", "u-1"));
    let _agent = node.start_ready();
    wait(&node, "the watch", || api.state().watches == 1);
    api.put(pod("new", "u-2"));
    wait(&node, "the new pod", || ask(&node, "new", "u-2").0 == 200);
    assert!(metric(&node, "istio_cni_held_pods_age_seconds").is_some_and(|age| age >= 0.0));
    api.set_down(true);
    for (name, uid) in [("old", "u-1"), ("new", "u-2")] {
        let (status, body) = ask(&node, name, uid);
        assert_eq!(status, 200, "{body}");
        let given: Value = serde_json::from_str(&body).expect("JSON");
        assert_eq!((&given["metadata"]["name"], &given["metadata"]["uid"]), (&json!(name), &json!(uid)));
        assert_eq!(given["kind"], "Pod");
        assert_eq!(given["spec"]["containers"][1]["args"][1], "sidecar");
        assert_eq!(given["metadata"]["managedFields"], Value::Null, "it is no longer than it has to be");
        assert_eq!(given["spec"]["containers"][0]["env"], Value::Null);
    }
    assert_eq!(metric(&node, "istio_cni_held_pods"), Some(2.0));
    wait(&node, "the watch to be missed", || metric(&node, "istio_cni_held_pods_age_seconds") == Some(-1.0));
    // The others are known to be missing, and why.
    let (status, why) = ask(&node, "new", "u-3");
    assert!(status == 503 && !why.trim().is_empty(), "{status} {why}");
    assert_eq!(reads(&api, "old"), 0);
}

#[test]
fn a_pod_that_was_replaced_is_not_given_for_the_one_that_has_its_name() {
    let mut node = node();
    let api = Api::start(&mut node);
    api.put(pod("web", "u-1"));
    let _agent = node.start_ready();
    wait(&node, "the watch", || api.state().watches == 1);
    wait(&node, "the pod", || ask(&node, "web", "u-1").0 == 200);
    api.remove("web");
    api.put(pod("web", "u-2"));
    wait(&node, "its successor", || ask(&node, "web", "u-2").0 == 200);
    let (status, why) = ask(&node, "web", "u-1");
    assert!(status == 503 && why.contains("another pod of this name"), "{status} {why}");
}

/// With watches that bring nothing, as those of a server that lags.
#[test]
fn a_pod_that_the_watch_has_not_brought_is_read() {
    let mut node = node();
    let api = Api::start(&mut node);
    api.fail(&[(Verb::Watch, Fault::SilentWatch)]);
    let _agent = node.start_ready();
    wait(&node, "the watch", || api.state().watches == 1);
    api.put(pod("web", "u-1"));
    let (status, body) = ask(&node, "web", "u-1");
    assert_eq!(status, 200, "{body}");
    assert!(!body.contains("managedFields") && reads(&api, "web") == 1, "{body}");
    api.fail(&[(Verb::Get, Fault::Status(403))]);
    let (status, why) = ask(&node, "web", "u-1");
    assert!(status == 503 && why.contains("403"), "{status} {why}");
}

#[test]
fn without_a_part_that_follows_pods_they_are_read_and_nothing_is_watched() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    let api = Api::start(&mut node);
    api.put(pod("web", "u-1"));
    let _agent = node.start_ready();
    assert_eq!(ask(&node, "web", "u-1").0, 200);
    assert_eq!(reads(&api, "web"), 1);
    let state = api.state();
    assert_eq!((state.lists, state.watches), (0, 0));
}

#[test]
fn what_is_not_a_request_for_a_pod_is_refused_without_asking() {
    let mut node = node();
    let api = Api::start(&mut node);
    let _agent = node.start_ready();
    for (name, uid) in [("../secrets/x", "u"), ("web?watch=true", "u"), ("", "u"), ("web", "")] {
        assert_eq!(ask(&node, name, uid).0, 400, "{name:?} {uid:?}");
    }
    assert_eq!(post(&node, "/v1/pod", "{").0, 400);
    for path in ["/v2/pod", "/", "/cmdadd"] {
        assert_eq!(post(&node, path, "{}").0, 404, "{path}: ambient mode is off");
    }
    assert!(api.state().gets.iter().all(|name| !name.contains("web")), "{:?}", api.state().gets);
}
