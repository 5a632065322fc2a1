//! Pods of the mesh whose runtime is sandboxed: rules do not bind them, so nobody takes them for redirected. Needs root.

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;

use e2e::agent::{CALICO, Node, exchange, get};
use e2e::pods::{
    self, LIMIT, PodApi, Proc, Sandboxes, UID, check, held_back, mesh_pod, mesh_pod_of, metric, redirect,
    wait, wait_at_least,
};
use redirectctl::pod::Pod;
use redirectctl::scan::Scan;
use serde_json::{Value, json};

fn node() -> Node {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.set("DRIFT_WATCH_INTERVAL", "1s");
    node
}

fn with_class(mut pod: Value, class: &str) -> Value {
    pod["spec"]["runtimeClassName"] = json!(class);
    pod
}

fn state(state: &str) -> String {
    format!("istio_cni_meshed_pods{{state=\"{state}\"}}")
}

/// Also one with all its rules, which was there before the plugin refused it.
#[test]
fn a_sandboxed_pod_is_never_verified_or_healed_and_is_reported_once() {
    let mut node = node();
    node.set("DRIFT_HEAL", "true");
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let [whole, bare, plain] = [("cni-1", "10.1.0.2"), ("cni-2", "10.1.0.3"), ("cni-3", "10.1.0.4")]
        .map(|(name, address)| sandboxes.add(name, &[address]));
    redirect(&whole);
    redirect(&plain);
    proc.add_of(71, UID, &bare.path());
    let pods = vec![
        with_class(mesh_pod("whole", &["10.1.0.2"]), "gvisor"),
        with_class(mesh_pod_of(UID, "bare", &["10.1.0.3"]), "secure"),
        with_class(mesh_pod("plain", &["10.1.0.4"]), "nvidia"),
    ];
    let api = PodApi::start(&mut node, pods.clone());
    api.state().handlers = [("secure", "runsc"), ("nvidia", "nvidia")]
        .map(|(class, handler)| (class.into(), handler.into()))
        .into();
    let _agent = node.start_ready();
    wait_at_least(&node, &check("sandboxed"), 4.0);
    wait(&node, "the states", || {
        metric(&node, &state("sandboxed")) == Some(2.0) && metric(&node, &state("verified")) == Some(1.0)
    });
    let (_, verbose) = get(node.health, "/readyz?verbose").expect("answers");
    assert!(verbose.contains("1 of 3 meshed pods verified: 2 sandboxed"), "{verbose}");
    wait(&node, "the events", || api.state().events.len() == 2);
    let about: BTreeSet<String> = api
        .state()
        .events
        .iter()
        .map(|event| {
            assert_eq!(event["reason"], "SandboxedRuntime");
            event["involvedObject"]["name"].to_string()
        })
        .collect();
    assert_eq!(about.len(), 2, "{about:?}");
    pods::wait_rounds(&node, 3.0);
    assert_eq!((api.state().events.len(), metric(&node, "istio_cni_drifted_pods")), (2, Some(0.0)));
    // Nobody writes what does nothing.
    assert!(bare.state().expect("a state").is_pristine(), "{}", node.log());
    // One request for a class whose name says nothing, in all these rounds, and none for the other.
    let mut asked = api.state().asked_classes.clone();
    asked.sort();
    assert_eq!(asked, ["nvidia", "secure"]);

    // redirectctl says the same.
    let mut pods: Vec<Pod> = pods.iter().map(|pod| Pod::from_json(pod).expect("a pod")).collect();
    pods[1].handler = Some("runsc".to_owned());
    let scan =
        Scan::of(&pods, sandboxes.path(), &redirectctl::node::NodeConfiguration::default()).expect("scans");
    let states: Vec<&str> = scan.entries.iter().map(|entry| entry.state.word()).collect();
    assert_eq!(states, ["sandboxed", "verified", "sandboxed"]);
}

/// Neither repair in place nor another pod in its place would help.
#[test]
fn a_sandboxed_pod_that_fails_its_validation_is_not_touched() {
    for (setting, action) in
        [("REPAIR_REPAIR_PODS", "repair"), ("REPAIR_DELETE_PODS", "delete"), ("REPAIR_LABEL_PODS", "label")]
    {
        let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
        node.set(setting, "true");
        let proc = Proc::new(&mut node);
        let mut sandboxes = Sandboxes::new(&mut node);
        let bare = sandboxes.add("cni-1", &["10.1.0.3"]);
        proc.add_of(71, UID, &bare.path());
        let pod = with_class(held_back(mesh_pod_of(UID, "bare", &["10.1.0.3"])), "secure");
        let api = PodApi::start(&mut node, vec![pod]);
        api.state().handlers = [("secure".to_owned(), "kata-qemu".to_owned())].into();
        let _agent = node.start_ready();
        let attempts = format!("istio_cni_repair_attempts_total{{type=\"{action}\",reason=\"sandboxed\"}}");
        wait_at_least(&node, &attempts, 1.0);
        assert!(bare.state().expect("a state").is_pristine(), "{action}: {}", node.log());
        wait(&node, "the event", || {
            api.events_about("bare").iter().any(|event| event["message"].to_string().contains("secure"))
        });
    }
}

/// What a plugin with `SANDBOXED_PODS=skip` logs becomes an event about the pod, and a count.
#[test]
fn a_pod_that_was_left_alone_is_an_event_and_a_count() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.set("SANDBOXED_PODS", "skip");
    let api = PodApi::start(&mut node, Vec::new());
    let _agent = node.start_ready();
    let line = |reason: &str| {
        json!({"level": "info", "time": "2026-11-21T07:26:50.000001Z", "msg": "not redirected", "pod": "shop/web", "uid": "u-1",
            "decision": "skip", "reason": reason}).to_string()
    };
    let body = json!([line("sandboxed_runtime"), line("no_proxy")]).to_string();
    let socket = UnixStream::connect(node.path("run/log.sock")).expect("connects");
    socket.set_read_timeout(Some(LIMIT)).expect("sets");
    let answer = exchange(socket, "POST", "/log", body.as_bytes());
    assert_eq!(answer.map(|(status, _)| status), Some(200));
    wait(&node, "the event", || !api.events_about("web").is_empty());
    let event = api.events_about("web").remove(0);
    assert_eq!(
        [&event["reason"], &event["involvedObject"]["uid"], &event["type"]],
        ["SandboxedRuntime", "u-1", "Warning"]
    );
    assert_eq!(
        metric(&node, "istio_cni_plugin_add_total{outcome=\"skip\",reason=\"sandboxed_runtime\"}"),
        Some(1.0)
    );
    assert_eq!(api.state().events.len(), 1);
    let conflist = std::fs::read_to_string(node.path("net.d/10-calico.conflist")).expect("reads");
    assert!(conflist.contains("\"sandboxed_pods\":\"skip\""), "{conflist}");
}
