//! Pods that the agent gives to plugins: from what its watch holds, or read over its own connection.

use std::fs;
use std::os::unix::net::UnixStream;

use crate::broken::{Api, Fault, Objects, TO_WATCH, Verb};
use e2e::agent::{CALICO, Node, exchange, get};
use e2e::pods::{Proc, check, mesh_pod, metric, wait, wait_at_least};
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace};

/// A node whose agent follows pods, because it repairs them.
fn node() -> Node {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.set("REPAIR_LABEL_PODS", "true");
    node
}

/// What the agent answers at its socket: the status, and the body.
fn post(node: &Node, path: &str, body: &str) -> (u16, String) {
    let socket = UnixStream::connect(node.path("run/pluginevent.sock")).expect("connects");
    exchange(socket, "POST", path, body.as_bytes()).expect("an answer")
}

fn ask(node: &Node, name: &str, uid: &str) -> (u16, String) {
    post(node, "/v1/pod", &json!({"namespace": "shop", "name": name, "uid": uid}).to_string())
}

fn pod(name: &str, uid: &str) -> Value {
    let mut pod = mesh_pod(name, &["10.1.0.2"]);
    pod["metadata"]["uid"] = json!(uid);
    pod
}

/// What the agent says of the pods that it holds.
fn held_words(node: &Node) -> String {
    let (_, words) = get(node.health, "/readyz?verbose").expect("answers");
    let (_, held) = words.split_once("\nheld for plugins: ").expect("a line");
    held.lines().next().expect("words").to_owned()
}

/// How often a pod was read.
fn reads(api: &Api, name: &str) -> usize {
    api.requests_about((Verb::Get, "pods"), name).len()
}

#[test]
fn a_pod_that_the_watch_brought_is_given_while_the_api_server_is_away() {
    let mut node = node();
    let api = Api::start(&mut node);
    api.put(pod("old", "u-1"));
    let _agent = node.start_ready();
    wait(&node, "the watch", || api.lists_and_watches().1 == 1);
    api.put(pod("new", "u-2"));
    wait(&node, "the new pod", || ask(&node, "new", "u-2").0 == 200);
    assert!(metric(&node, "istio_cni_held_pods_age_seconds").is_some_and(|age| age >= 0.0));
    let words = held_words(&node);
    assert!(words.starts_with("2 pods, from a watch that last brought something "), "{words}");
    api.set_down(true);
    for (name, uid) in [("old", "u-1"), ("new", "u-2")] {
        let (status, body) = ask(&node, name, uid);
        assert_eq!(status, 200, "{body}");
        let given: Value = serde_json::from_str(&body).expect("JSON");
        let given = &given["pod"];
        assert_eq!((&given["metadata"]["name"], &given["metadata"]["uid"]), (&json!(name), &json!(uid)));
        assert_eq!(given["kind"], "Pod");
        assert_eq!(given["spec"]["containers"][1]["args"][1], "sidecar");
        assert_eq!(given["metadata"]["managedFields"], Value::Null, "it is no longer than it has to be");
        assert_eq!(given["spec"]["containers"][0]["env"], Value::Null);
    }
    assert_eq!(metric(&node, "istio_cni_held_pods"), Some(2.0));
    wait(&node, "the watch to be missed", || metric(&node, "istio_cni_held_pods_age_seconds") == Some(-1.0));
    assert_eq!(held_words(&node), "2 pods, which no watch keeps current");
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
    wait(&node, "the watch", || api.lists_and_watches().1 == 1);
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
    api.fail(TO_WATCH, &[Fault::SilentWatch]);
    let _agent = node.start_ready();
    wait(&node, "the watch", || api.lists_and_watches().1 == 1);
    api.put(pod("web", "u-1"));
    let (status, body) = ask(&node, "web", "u-1");
    assert_eq!(status, 200, "{body}");
    assert!(!body.contains("managedFields") && reads(&api, "web") == 1, "{body}");
    api.fail((Verb::Get, "pods"), &[Fault::Status(403)]);
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
    assert_eq!(api.lists_and_watches(), (0, 0));
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
    assert!(
        api.state().requests.iter().all(|request| request.verb != Verb::Get || !request.name.contains("web"))
    );
}

const PENDING: &str = "istio_cni_ambient_pods{state=\"pending\"}";
const NAMESPACES: &str = "/api/v1/namespaces";
const CLASS: &str = "/apis/node.k8s.io/v1/runtimeclasses/secure";

/// A node in ambient mode, with a pod `web` in the ambient namespace `shop`, and one in `quiet`, which is not.
fn ambient() -> (Node, Objects, impl Sized) {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    let host = Namespace::empty(Families::V4).expect("a namespace");
    let proc = Proc::of(&mut node, &host.path());
    node.set("AMBIENT_ENABLED", "true");
    let ztunnel = node.path("ztunnel/ztunnel.sock");
    node.set("ZTUNNEL_UDS_ADDRESS", &ztunnel.display().to_string());
    let api = Objects::start(&mut node);
    let label = json!({"istio.io/dataplane-mode": "ambient"});
    for (namespace, labels) in [("shop", label), ("quiet", json!({}))] {
        let pod = json!({"kind": "Pod",
            "metadata": {"namespace": namespace, "name": "web", "uid": format!("u-{namespace}")},
            "spec": {"serviceAccountName": "web", "runtimeClassName": "secure", "containers": [{"name": "web"}]}});
        // The stand-in's selectors select everything, and the watch asks for those with the label.
        if namespace == "shop" {
            api.put(
                &format!("{NAMESPACES}/{namespace}"),
                json!({"metadata": {"name": namespace, "labels": labels}}),
            );
        }
        // Where the watch of all namespaces' pods has it.
        api.put(&format!("/api/v1/pods/{namespace}"), pod);
    }
    api.put(CLASS, json!({"handler": "runsc"}));
    (node, api, (host, proc))
}

/// What the agent gives of the pod `web`; null until it has it.
fn given(node: &Node, namespace: &str) -> Value {
    let asked = json!({"namespace": namespace, "name": "web", "uid": format!("u-{namespace}")});
    let (status, body) = post(node, "/v1/pod", &asked.to_string());
    if status == 200 { serde_json::from_str(&body).expect("JSON") } else { Value::Null }
}

#[test]
fn a_pod_comes_with_what_else_decides_about_it() {
    let (node, api, _host) = ambient();
    let watch = (Verb::Watch, "namespaces");
    api.fail_always(watch, Fault::Status(500));
    let agent = node.start();
    agent.wait("its socket", || UnixStream::connect(node.path("run/pluginevent.sock")).is_ok());
    let both = || ["shop", "quiet"].map(|namespace| given(&node, namespace)["namespaceLabels"].clone());
    wait(&node, "the pods", || given(&node, "shop").is_object() && !api.requests(watch).is_empty());
    assert_eq!(
        both(),
        [Value::Null, Value::Null],
        "pods are watched, and namespaces are not: labels may be older"
    );
    api.recover();
    let labels = [json!({"istio.io/dataplane-mode": "ambient"}), json!({})];
    wait(&node, "both watches", || both() == labels);
    let classes = api.requests((Verb::Get, "runtimeclasses"));
    assert_eq!(
        (&given(&node, "shop")["runtimeHandler"], classes.len()),
        (&json!("runsc"), 1),
        "it is read once"
    );
    assert!(api.requests_about((Verb::Get, "namespaces"), "shop").is_empty());
    // As a server that is restarted does.
    for watch in [watch, TO_WATCH] {
        api.fail_always(watch, Fault::Status(500));
    }
    api.end_watches();
    wait(&node, "the watch to be missed", || held_words(&node).ends_with(", which no watch keeps current"));
    assert_eq!(both(), labels, "they are as old as the pods");
}

#[test]
fn a_runtime_class_that_the_drift_watch_has_read_is_not_read_again_for_plugins() {
    let mut node = node();
    node.set("DRIFT_WATCH_INTERVAL", "1s");
    let api = Objects::start(&mut node);
    let mut pod = pod("web", "u-1");
    pod["spec"]["runtimeClassName"] = json!("secure");
    api.put("/api/v1/pods/web", pod);
    api.put(CLASS, json!({"handler": "runsc"}));
    let _agent = node.start();
    wait_at_least(&node, &check("sandboxed"), 1.0);
    wait(&node, "the pod", || ask(&node, "web", "u-1").0 == 200);
    let given: Value = serde_json::from_str(&ask(&node, "web", "u-1").1).expect("JSON");
    let classes = api.requests((Verb::Get, "runtimeclasses"));
    assert_eq!((&given["runtimeHandler"], classes.len()), (&json!("runsc"), 1));
}

/// What the agent answers to an ADD of the pod `web` in `shop`.
fn enrol(node: &Node, uid: &str, netns: &str) -> (u16, String) {
    let event = json!({"Netns": netns, "PodName": "web", "PodNamespace": "shop", "PodUID": uid,
        "IPs": [{"Address": {"IP": "10.1.0.2", "Mask": "////AA=="}}]});
    post(node, "/cmdadd", &event.to_string())
}

/// It fails because no ztunnel is there, and not because the API server does not answer.
#[test]
fn a_pod_of_ambient_mode_that_the_watch_brought_is_enrolled_without_reading_it() {
    let (node, api, _host) = ambient();
    let agent = node.start();
    agent.wait("its socket", || UnixStream::connect(node.path("run/pluginevent.sock")).is_ok());
    wait(&node, "both watches", || given(&node, "shop")["namespaceLabels"].is_object());
    let reads = || api.requests_about((Verb::Get, "pods"), "web").len();
    let before = reads();
    api.fail_always((Verb::Get, "pods"), Fault::Status(500));
    let (status, why) = enrol(&node, "u-shop", "/run/netns/none");
    assert!(status == 500 && !why.contains("cannot be read"), "{status} {why}");
    assert_eq!(reads(), before);
    let (status, why) = enrol(&node, "", "/run/netns/none");
    assert!(status == 500 && why.contains("the pod cannot be read"), "{status} {why}");
}

/// It waits for a ztunnel while the template of the plugin's entry is removed.
#[test]
fn an_add_that_waits_is_refused_for_the_reason_that_no_pod_can_be_enrolled() {
    let (mut node, _api, _host) = ambient();
    let template = node.path("template");
    let entry = r#"{"name":"istio-cni","type":"istio-cni","ambient_enabled":true}"#;
    fs::write(&template, entry).expect("writes");
    node.set("CNI_NETWORK_CONFIG_FILE", &template.display().to_string());
    let agent = node.start();
    agent.wait("its socket", || UnixStream::connect(node.path("run/pluginevent.sock")).is_ok());
    wait(&node, "both watches", || given(&node, "shop")["namespaceLabels"].is_object());
    let netns = Namespace::pod(Families::V4).expect("a namespace");
    let waiting = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| enrol(&node, "u-shop", &netns.path().display().to_string()));
        wait(&node, "the pod to be pending", || metric(&node, PENDING) == Some(1.0));
        fs::remove_file(&template).expect("removes");
        waiting.join().expect("an answer")
    });
    assert!(waiting.0 == 500 && waiting.1.contains("the plugin's entry cannot be read"), "{waiting:?}");
}
