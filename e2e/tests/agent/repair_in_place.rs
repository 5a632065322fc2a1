//! Broken pods redirected in place: real network namespaces, real rules, real connections. Needs root.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};

use crate::broken::Api;
use e2e::agent::{CALICO, Node};
use e2e::pods::{
    LIMIT, Proc, Sandboxes, flood, held_back, hosts, mesh_pod_of, metric, redirect, wait, wait_at_least,
};
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace, Topology, pod_address, remote_address};

const WEB: &str = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0";
const SHOP: &str = "11111111-2222-3333-4444-555555555555";
const SUCCESS: &str = "istio_cni_repair_pods_repaired_total{type=\"repair\",result=\"success\"}";

fn node() -> Node {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.set("REPAIR_REPAIR_PODS", "true");
    node.set("EXCLUDE_NAMESPACES", "kube-system");
    node
}

fn failed(reason: &str) -> String {
    format!("istio_cni_repair_attempts_total{{type=\"repair\",reason=\"{reason}\"}}")
}

fn rules(namespace: &Namespace) -> String {
    namespace.sh("nft list ruleset").expect("runs").ok().expect("lists").stdout
}

/// A connection, with a listener that stays: both ends.
fn connect(
    from: &Namespace,
    to: &Namespace,
    address: IpAddr,
    port: u16,
) -> (TcpListener, TcpStream, TcpStream) {
    let listener = to.enter(|| TcpListener::bind((address, port))).expect("enters").expect("listens");
    let one = from.enter(|| TcpStream::connect((address, port))).expect("enters").expect("connects");
    let (other, _) = listener.accept().expect("accepts");
    for end in [&one, &other] {
        end.set_read_timeout(Some(LIMIT)).expect("sets");
    }
    (listener, one, other)
}

fn is_alive((_, one, other): &mut (TcpListener, TcpStream, TcpStream)) -> bool {
    one.write_all(b"x").and_then(|()| other.read_exact(&mut [0])).is_ok()
}

/// The namespace of the pod, redirected, with a process of the pod in it.
fn redirected(sandboxes: &mut Sandboxes, proc: &Proc) -> Namespace {
    let web = sandboxes.add("cni-web", &["10.1.0.2"]);
    proc.add_of(77, WEB, &web.path());
    redirect(&web);
    web
}

#[test]
fn a_pod_that_started_before_the_plugin_is_redirected_and_nothing_goes_on_beside_the_proxy() {
    for native in ["false", "true"] {
        let mut node = node();
        node.set("NATIVE_NFTABLES", native);
        let proc = Proc::new(&mut node);
        let mut sandboxes = Sandboxes::new(&mut node);
        let topology = Topology::new(Families::Dual).expect("namespaces");
        sandboxes.mount("cni-web", &topology.pod.path());
        proc.add_of(77, WEB, &topology.pod.path());
        let remote = remote_address(false);
        let own = pod_address(false);
        let mut out = connect(&topology.pod, &topology.client, remote, 80);
        let mut inward = connect(&topology.client, &topology.pod, own, 8080);
        assert!(is_alive(&mut out) && is_alive(&mut inward), "the test can fail");

        let addresses = [own, pod_address(true)].map(|address| address.to_string());
        let addresses = addresses.each_ref().map(String::as_str);
        let api = Api::start(&mut node);
        api.put(held_back(mesh_pod_of(WEB, "web", &addresses)));
        let _agent = node.start_ready();
        wait_at_least(&node, SUCCESS, 1.0);
        let table = if native == "true" { "istio-proxy-nat" } else { "table ip nat" };
        assert!(rules(&topology.pod).contains(table) && rules(&topology.pod).contains("15006"), "{native}");
        assert!(!is_alive(&mut out) && !is_alive(&mut inward), "native {native}");
        wait(&node, "the event", || !api.events_about("web").is_empty());
        let event = api.events_about("web").remove(0);
        assert_eq!([&event["reason"], &event["type"]], ["RepairBrokenPod", "Normal"]);
        let message = event["message"].as_str().expect("a message");
        for words in ["in force now and verified", "2 connections that bypassed the proxy were ended"] {
            assert!(message.contains(words), "{words} is not in {message}");
        }
        // A connection of today goes to the proxy.
        let proxy =
            topology.pod.enter(|| TcpListener::bind("0.0.0.0:15001")).expect("enters").expect("listens");
        let _new =
            topology.pod.enter(|| TcpStream::connect((remote, 80))).expect("enters").expect("connects");
        proxy.accept().expect("captured");
    }
}

/// What must not be touched, and why it is not.
#[test]
fn a_namespace_without_proof_of_its_pod_stays_as_it_is() {
    type Scene = fn(&Proc, &mut Sandboxes, &Namespace) -> Option<Namespace>;
    let cases: [(&str, Scene); 8] = [
        ("namespace-not-found", |_, _, _| None),
        ("no_process", |_, sandboxes, web| {
            sandboxes.mount("cni-web", &web.path());
            None
        }),
        // A container with CAP_NET_ADMIN has taken the pod's addresses.
        ("no_process", |proc, sandboxes, web| {
            sandboxes.mount("cni-web", &web.path());
            proc.add_of(77, SHOP, &web.path());
            None
        }),
        ("other_pod", |proc, _, web| {
            proc.add_of(77, WEB, &web.path());
            proc.add_of(78, SHOP, &web.path());
            None
        }),
        ("namespace-ambiguous", |proc, _, web| {
            proc.add_of(77, WEB, &web.path());
            let twin = Namespace::empty(Families::Dual).expect("a namespace");
            twin.add_eth0(["10.1.0.2", "fd00:10::2"]).expect("addresses");
            proc.add_of(78, WEB, &twin.path());
            Some(twin)
        }),
        // It has one of the pod's two addresses.
        ("namespace-not-found", |proc, _, _| {
            let half = Namespace::empty(Families::Dual).expect("a namespace");
            half.add_eth0(["10.1.0.2"]).expect("addresses");
            proc.add_of(77, WEB, &half.path());
            Some(half)
        }),
        // A process of the pod on the host's network.
        ("namespace-not-found", |proc, _, _| {
            proc.add_of(77, WEB, &hosts());
            None
        }),
        // The host's one is unknown.
        ("namespace-not-found", |proc, _, web| {
            proc.add_of(77, WEB, &web.path());
            fs::remove_file(proc.0.path().join("1/ns/net")).expect("removes");
            None
        }),
    ];
    for (index, (reason, scene)) in cases.into_iter().enumerate() {
        let mut node = node();
        let proc = Proc::new(&mut node);
        let mut sandboxes = Sandboxes::new(&mut node);
        let _other = sandboxes.add("cni-other", &["10.1.0.99"]);
        let web = Namespace::empty(Families::Dual).expect("a namespace");
        web.add_eth0(["10.1.0.2", "fd00:10::2"]).expect("addresses");
        let more = scene(&proc, &mut sandboxes, &web);
        let api = Api::start(&mut node);
        api.put(held_back(mesh_pod_of(WEB, "web", &["10.1.0.2", "fd00:10::2"])));
        let _agent = node.start_ready();
        wait_at_least(&node, &failed(reason), 1.0);
        wait(&node, "the event", || !api.events_about("web").is_empty());
        assert_eq!(metric(&node, SUCCESS), Some(0.0), "{index}: {reason}");
        for namespace in [Some(&web), more.as_ref()].into_iter().flatten() {
            assert_eq!(rules(namespace), "", "{index}: {reason}");
        }
        assert_eq!(api.events_about("web")[0]["type"], "Warning");
    }
}

#[test]
fn pods_that_cannot_be_redirected_in_place_are_reported() {
    type Change = fn(&mut Value);
    let changes: [(&str, Change); 4] = [
        ("not_meshed", |pod| pod["spec"]["hostNetwork"] = json!(true)),
        ("not_meshed", |pod| pod["metadata"]["namespace"] = json!("kube-system")),
        ("ended", |pod| pod["status"]["phase"] = json!("Failed")),
        ("namespace-not-found", |pod| pod["status"]["podIPs"] = json!([])),
    ];
    for (reason, change) in changes {
        let mut node = node();
        let proc = Proc::new(&mut node);
        let mut sandboxes = Sandboxes::new(&mut node);
        let web = sandboxes.add("cni-web", &["10.1.0.2"]);
        proc.add_of(77, WEB, &web.path());
        let api = Api::start(&mut node);
        let mut pod = held_back(mesh_pod_of(WEB, "web", &["10.1.0.2"]));
        change(&mut pod);
        api.put(pod);
        let _agent = node.start_ready();
        wait_at_least(&node, &failed(reason), 1.0);
        assert_eq!((metric(&node, SUCCESS), rules(&web)), (Some(0.0), String::new()), "{reason}");
    }
}

#[test]
fn a_pod_whose_processes_come_later_is_redirected_when_they_run() {
    let mut node = node();
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    // Without an infra container: between two runs the namespace has no processes.
    let web = sandboxes.add("6f3c8f0e", &["fd00:10::2"]);
    let api = Api::start(&mut node);
    api.put(held_back(mesh_pod_of(WEB, "web", &["fd00:10::2"])));
    let _agent = node.start_ready();
    wait_at_least(&node, &failed("no_process"), 2.0);
    proc.add_of(77, WEB, &web.path());
    api.change("web", |pod| {
        let status = &mut pod["status"]["initContainerStatuses"][0];
        status["lastState"] = status["state"].clone();
        status["state"] = json!({"running": {}});
    });
    wait_at_least(&node, SUCCESS, 1.0);
    assert!(rules(&web).contains("15006"));
}

#[test]
fn only_a_verified_repair_counts() {
    let mut node = node();
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = sandboxes.add("cni-web", &["10.1.0.2"]);
    proc.add_of(77, WEB, &web.path());
    web.sh("nft 'table ip theirs { chain out { type nat hook output priority -150; meta l4proto tcp redirect to :1; }; }'")
        .expect("runs").ok().expect("adds a table");
    let api = Api::start(&mut node);
    api.put(held_back(mesh_pod_of(WEB, "web", &["10.1.0.2"])));
    let _agent = node.start_ready();
    wait_at_least(&node, &failed("not_verified"), 1.0);
    wait(&node, "the event", || !api.events_about("web").is_empty());
    let event = api.events_about("web").remove(0);
    let message = event["message"].as_str().expect("a message");
    assert!(message.contains("table ip theirs") && event["type"] == "Warning", "{message}");
    assert_eq!(metric(&node, SUCCESS), Some(0.0));
    web.sh("nft delete table ip theirs").expect("runs").ok().expect("deletes");
    wait_at_least(&node, SUCCESS, 1.0);
}

#[test]
fn a_pod_with_too_many_mesh_rules_is_not_repaired_and_reported() {
    let mut node = node();
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = redirected(&mut sandboxes, &proc);
    flood(&web, "nat", "ISTIO_OUTPUT");
    let api = Api::start(&mut node);
    api.put(held_back(mesh_pod_of(WEB, "web", &["10.1.0.2"])));
    let _agent = node.start_ready();
    wait(&node, "an attempt", || !api.events_about("web").is_empty());
    let message = api.events_about("web").remove(0)["message"].to_string();
    assert!(
        message.contains("bytes of rules, more than the plan") && message.contains("nothing was changed"),
        "{message}"
    );
    wait_at_least(&node, &failed("not_applied"), 1.0);
    assert_eq!(metric(&node, SUCCESS), Some(0.0));
}

#[test]
fn too_many_rules_of_other_programs_do_not_prevent_redirection() {
    let mut node = node();
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let topology = Topology::new(Families::V4).expect("namespaces");
    sandboxes.mount("cni-web", &topology.pod.path());
    proc.add_of(77, WEB, &topology.pod.path());
    let mut out = connect(&topology.pod, &topology.client, remote_address(false), 80);
    flood(&topology.pod, "filter", "FORWARD");
    assert!(is_alive(&mut out), "the test can fail");
    let api = Api::start(&mut node);
    api.put(held_back(mesh_pod_of(WEB, "web", &[&pod_address(false).to_string()])));
    let _agent = node.start_ready();
    // No captured packet meets these.
    wait_at_least(&node, SUCCESS, 1.0);
    assert!(!is_alive(&mut out));
    let nat = topology.pod.sh("nft list table ip nat").expect("runs").ok().expect("lists").stdout;
    assert!(nat.contains("15006"), "{nat}");
}

#[test]
fn a_redirected_pod_that_fails_again_is_checked_and_not_changed() {
    let mut node = node();
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = redirected(&mut sandboxes, &proc);
    let before = rules(&web);
    let api = Api::start(&mut node);
    api.put(held_back(mesh_pod_of(WEB, "web", &["10.1.0.2"])));
    let _agent = node.start_ready();
    wait_at_least(&node, SUCCESS, 1.0);
    api.change("web", |pod| {
        pod["status"]["initContainerStatuses"][0]["state"]["terminated"]["containerID"] =
            json!("containerd://2");
    });
    wait_at_least(&node, SUCCESS, 2.0);
    assert_eq!(rules(&web), before);
    wait(&node, "both events", || api.events_about("web").len() == 2);
    let message = api.events_about("web").remove(1)["message"].to_string();
    assert!(message.contains("in force already"), "{message}");
}

#[test]
fn the_current_settings_folder_counts() {
    let mut node = node();
    let folder = node.path("settings");
    fs::create_dir(&folder).expect("makes");
    node.set("SETTINGS_DIR", &folder.display().to_string());
    let range = folder.join("ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR");
    fs::write(&range, "127.7.0.0/16").expect("writes");
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let web = sandboxes.add("cni-web", &["10.1.0.2"]);
    proc.add_of(77, WEB, &web.path());
    let api = Api::start(&mut node);
    let _agent = node.start_ready();
    fs::write(&range, "127.9.0.0/16").expect("writes");
    wait(&node, "the new settings", || {
        node.log().contains("the settings in the settings folder have changed")
    });
    api.put(held_back(mesh_pod_of(WEB, "web", &["10.1.0.2"])));
    wait_at_least(&node, SUCCESS, 1.0);
    assert!(rules(&web).contains("127.9.0.0/16"), "{}", rules(&web));
}
