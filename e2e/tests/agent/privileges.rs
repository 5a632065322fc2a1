//! The agent with exactly the capabilities that docs/reference/privileges.md says it needs, and with one fewer: then it names it, and changes nothing. Needs root.
//!
//! The other programs are in `e2e/tests/programs/least_privilege.rs`.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::process::Command;

use crate::broken::{Api, Objects};
use e2e::agent::{Agent, CALICO, Node, daemon_set};
use e2e::pods::{
    LIMIT, PodApi, Proc, Sandboxes, UID, check, held_back, mesh_pod_of, metric, mismatch, redirect, wait,
    wait_at_least,
};
use e2e::privileges::{needs, one_fewer, only};
use redirect_core::options::BackendChoice;
use serde_json::{Value, json};
use test_support::netns::Namespace;
use test_support::process::{Background, prefixed, until};

const DELETE_RULE: &str = "iptables-nft -t nat -D OUTPUT -j ISTIO_OUTPUT";
const DRIFTED: &str = "istio_cni_drifted_pods";
const BLIND: &str = "istio_cni_drift_rounds_total{result=\"no_capability\"}";

fn node(settings: &[(&str, &str)]) -> Node {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    for (name, value) in settings {
        node.set(name, value);
    }
    node
}

/// The agent as root with these capabilities and no others.
fn start<'n>(node: &'n Node, capabilities: &[String]) -> Agent<'n> {
    let words = only(capabilities);
    node.start_as(&words.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Starts it without each capability in turn: it reports that by this metric and by name.
fn ensure_each_is_named(node: &Node, needed: &[String], metric: &str, mut then: impl FnMut(&str)) {
    assert!(!needed.is_empty(), "the page lists nothing");
    for (some, missing) in one_fewer(needed) {
        let _agent = start(node, &some);
        wait_at_least(node, metric, 1.0);
        wait(node, &missing, || node.log().contains(&format!("lacks {missing}")));
        then(&missing);
    }
}

#[test]
fn the_plugin_is_installed_and_kept_without_any() {
    let needed = needs("install-cni", "installs and keeps the plugin").expect("a row");
    let node = node(&[]);
    let agent = start(&node, &needed);
    agent.wait_ready();
    assert!(node.calls_us() && node.has_plugin());
    fs::remove_file(node.path("bin/istio-cni")).expect("removes");
    agent.wait("the plugin to be back", || node.has_plugin());
    assert_eq!(agent.end(), Some(0));
}

#[test]
fn directories_of_another_user_need_dac_override() {
    const PARTS: [&str; 3] = ["bin", "net.d", "run"];
    let needed = needs("install-cni", "the same where the node's directories belong to another user");
    let needed = needed.expect("a row");
    assert!(!needed.is_empty());
    for part in PARTS {
        let node = node(&[]);
        chown(node.path(part), Some(1000), Some(1000)).expect("gives away");
        let files = || fs::read_dir(node.path(part)).expect("lists").count();
        let before = (files(), node.confs());
        for (some, missing) in one_fewer(&needed) {
            let agent = start(&node, &some);
            wait(&node, &missing, || node.log().contains(&format!("add {missing}")));
            assert!(
                agent.readyz().is_none_or(|(status, _)| status != 200),
                "{part}: ready without {missing}"
            );
            assert_eq!((files(), node.confs()), before, "{part} without {missing}");
        }
        let agent = start(&node, &needed);
        agent.wait_ready();
        assert!(node.calls_us() && node.has_plugin() && node.kubeconfig().is_some());
        assert_eq!(fs::metadata(node.path(part)).expect("is there").uid(), 1000, "still theirs");
        assert_eq!(agent.end(), Some(0));
    }
}

/// A namespace of a redirected pod in which a rule was deleted, the pod, and a process of it that is not root's.
fn drifted(node: &mut Node) -> (Sandboxes, Namespace, Value) {
    let mut sandboxes = Sandboxes::new(node);
    let web = sandboxes.add("cni-web", &["10.1.0.2"]);
    redirect(&web);
    web.sh(DELETE_RULE).expect("runs").ok().expect("deletes");
    (sandboxes, web, mesh_pod_of(UID, "web", &["10.1.0.2"]))
}

#[test]
fn the_drift_watch_needs_what_the_page_says() {
    let needed = needs("install-cni", "watches for drift").expect("a row");
    let mut node = node(&[("DRIFT_WATCH_INTERVAL", "1s")]);
    let (_sandboxes, web, pod) = drifted(&mut node);
    let _api = PodApi::start(&mut node, vec![pod]);
    let before = web.snapshot().expect("a snapshot");
    ensure_each_is_named(&node, &needed, BLIND, |missing| {
        assert_eq!(metric(&node, DRIFTED), Some(0.0), "it sees without {missing}");
    });
    let _agent = start(&node, &needed);
    wait(&node, "the gauge", || metric(&node, DRIFTED) == Some(1.0));
    redirect(&web);
    wait_at_least(&node, &check("verified"), 1.0);
    assert!(!web.snapshot().expect("a snapshot").changes_since(&before).is_empty(), "the test can fail");
}

/// An API server with the agents' DaemonSet and a node.
fn cluster_with(node: &mut Node, name: &str) -> Objects {
    let api = Objects::start(node);
    let agents = "/apis/apps/v1/namespaces/istio-system/daemonsets/istio-cni-node";
    api.put(agents, serde_json::from_str(&daemon_set(false)).expect("JSON"));
    let metadata = json!({"name": name, "uid": name, "labels": {"kubernetes.io/os": "linux"}});
    api.put(&format!("/api/v1/nodes/{name}"), json!({"metadata": metadata, "spec": {}, "status": {}}));
    api
}

#[test]
fn the_probe_needs_the_documented_capabilities() {
    let needed = needs("install-cni", "probes for taint or condition").expect("a row");
    let mut node = node(&[("NODE_CONDITION", "true")]);
    let api = cluster_with(&mut node, "node-1");
    let probes = |result: &str| format!("istio_cni_node_probes_total{{result=\"{result}\"}}");
    let says = |reason: &str| {
        let conditions =
            api.object("/api/v1/nodes/node-1").expect("the node")["status"]["conditions"].clone();
        conditions.as_array().is_some_and(|all| all.iter().any(|one| one["reason"] == reason))
    };
    ensure_each_is_named(&node, &needed, &probes("impossible"), |missing| {
        assert!(says("ProbeImpossible"), "without {missing}");
    });
    let _agent = start(&node, &needed);
    wait_at_least(&node, &probes("redirected"), 1.0);
    wait(&node, "the condition", || says("Verified"));
    assert_eq!(metric(&node, &probes("impossible")), Some(0.0), "{}", node.log());
}

/// A process of a pod that is not root's, as the agent finds it among the host's. Ends with the value.
fn process_of_the_pod(node: &mut Node, web: &Namespace) -> (Proc, Background) {
    let words = ["--reuid=1337", "--regid=1337", "--clear-groups", "sleep", "infinity"];
    let mut command = Command::new("setpriv");
    command.args(words);
    let sleeps = Background::start("sleep", &web.command(&command), &node.path("sleep.log"));
    let sleeps = sleeps.expect("starts").killed_on_drop();
    let folder = format!("/proc/{}", sleeps.id());
    until("the process to have another user", LIMIT, &[&sleeps], || {
        Ok((fs::metadata(&folder)?.uid() == 1337).then_some(()))
    })
    .expect("is");
    let proc = Proc::new(node);
    proc.add_of(sleeps.id(), UID, format!("{folder}/ns/net").as_ref());
    (proc, sleeps)
}

#[test]
fn the_repair_in_place_needs_the_documented_capabilities() {
    let needed = needs("install-cni", "repairs in place").expect("a row");
    let mut node = node(&[("REPAIR_REPAIR_PODS", "true")]);
    let (_sandboxes, web, pod) = drifted(&mut node);
    let _processes = process_of_the_pod(&mut node, &web);
    let api = Api::start(&mut node);
    api.put(held_back(pod));
    let before = web.snapshot().expect("a snapshot");
    let unable = "istio_cni_repair_attempts_total{type=\"repair\",reason=\"no_capability\"}";
    ensure_each_is_named(&node, &needed, unable, |missing| {
        let changes = web.snapshot().expect("a snapshot").changes_since(&before);
        assert!(changes.is_empty(), "without {missing}: {changes:?}");
    });
    let _agent = start(&node, &needed);
    wait_at_least(&node, "istio_cni_repair_pods_repaired_total{type=\"repair\",result=\"success\"}", 1.0);
    assert_eq!(mismatch(&web, &[], BackendChoice::Auto), None);
}

#[test]
fn healing_needs_the_documented_capabilities() {
    let needed = needs("install-cni", "heals").expect("a row");
    let mut node = node(&[("DRIFT_WATCH_INTERVAL", "1h"), ("DRIFT_HEAL", "true")]);
    let (_sandboxes, web, pod) = drifted(&mut node);
    let _processes = process_of_the_pod(&mut node, &web);
    let _api = PodApi::start(&mut node, vec![pod]);
    let before = web.snapshot().expect("a snapshot");
    let attempts = |reason: &str| format!("istio_cni_heal_attempts_total{{reason=\"{reason}\"}}");
    let unable = attempts("no_capability");
    // Without the rights of the drift watch, nothing is checked, and nothing attempted.
    let sees = needs("install-cni", "watches for drift").expect("a row");
    let (some, more): (Vec<_>, Vec<_>) = needed.iter().cloned().partition(|name| sees.contains(name));
    assert_eq!((some, more.len()), (sees.clone(), 1), "the drift watch's and one more");
    for (some, missing) in one_fewer(&needed) {
        let _agent = start(&node, &some);
        let is_blind = sees.iter().any(|name| !some.contains(name));
        wait_at_least(&node, if is_blind { BLIND } else { &unable }, 1.0);
        wait(&node, &missing, || node.log().contains(&format!("lacks {missing}")));
        let changes = web.snapshot().expect("a snapshot").changes_since(&before);
        assert!(changes.is_empty(), "without {missing}: {changes:?}");
    }
    let _agent = start(&node, &needed);
    wait_at_least(&node, &attempts("healed"), 1.0);
    assert_eq!(mismatch(&web, &[], BackendChoice::Auto), None);
}

#[test]
fn rules_of_ambient_mode_are_programmed_by_hand_with_the_documented_capabilities() {
    let needed = needs("install-cni ambient", "applies, removes rules").expect("a row");
    assert!(!needed.is_empty());
    let pod = Namespace::pod(test_support::netns::Families::Dual).expect("a namespace");
    let program = node(&[]).command(&[]).get_program().to_owned();
    let run = |action: &str, capabilities: &[String]| {
        let mut command = Command::new(&program);
        command.env_clear().args(["ambient", action, "--network-namespace"]).arg(pod.path());
        let words = only(capabilities);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        test_support::process::run(&mut prefixed(&words, &command), LIMIT).expect("runs")
    };
    for action in ["apply", "remove"] {
        let before = pod.snapshot().expect("a snapshot");
        for (some, missing) in one_fewer(&needed) {
            let output = run(action, &some);
            assert!(output.code() == Some(1) && output.stderr.contains(&missing), "{missing}: {output:?}");
            let changes = pod.snapshot().expect("a snapshot").changes_since(&before);
            assert!(changes.is_empty(), "without {missing}: {changes:?}");
        }
        run(action, &needed).ok().expect("done");
        assert!(!pod.snapshot().expect("a snapshot").changes_since(&before).is_empty(), "{action}");
    }
}

/// The program with these words, as a user without privileges.
fn unprivileged(node: &Node, args: &[&str]) -> Command {
    // In a folder that another user may read, unlike the folder of the build.
    let program = node.path("install-cni");
    fs::copy(node.command(&[]).get_program(), &program).expect("copies");
    fs::set_permissions(node.path(""), fs::Permissions::from_mode(0o755)).expect("opens");
    let mut command = Command::new(program);
    command.args(args).env_clear().envs(&node.env);
    let mut words =
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"].map(str::to_owned).to_vec();
    words.extend(only::<&str>(&[]));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    prefixed(&words, &command)
}

#[test]
fn the_clusters_nodes_are_cleaned_unprivileged() {
    assert!(needs("install-cni clean-nodes", "frees nodes").expect("a row").is_empty());
    let mut node = node(&[]);
    let _api = cluster_with(&mut node, "node-1");
    let done = unprivileged(&node, &["clean-nodes"]).output().expect("runs");
    // It came as far as the API server.
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(said.contains("DaemonSet istio-cni-node has agents") && !said.contains("\twarn\t"), "{said}");
}

#[test]
fn the_clusters_taint_controller_runs_unprivileged() {
    let needed = needs("install-cni taint-controller", "taints nodes").expect("a row");
    assert!(needed.is_empty());
    let mut node = node(&[("TAINT_AFTER", "1s")]);
    let api = cluster_with(&mut node, "late");
    let command = unprivileged(&node, &["taint-controller", "--ctrlz_port=0"]);
    let running = Background::start("taint-controller", &command, &node.path("log"));
    let running = running.expect("starts").killed_on_drop();
    until("the taint", LIMIT, &[&running], || {
        let node = api.object("/api/v1/nodes/late").unwrap_or_default();
        let taints = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
        Ok(taints.iter().any(|taint| taint["key"] == "cni.istio.io/not-ready").then_some(()))
    })
    .expect("is made");
    let status = fs::read_to_string(format!("/proc/{}/status", running.id())).expect("runs");
    assert!(status.contains("\nUid:\t65534\t65534\t65534\t65534\n"), "{status}");
    assert!(status.contains("\nCapEff:\t0000000000000000\n"), "{status}");
}
