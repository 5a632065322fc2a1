//! The agent's life under its seccomp profile, `deploy/seccomp/install-cni.json`: a call that is not in it ends the agent, so that nothing it
//! tolerates goes unnoticed. Needs root.
//!
//! With SECCOMP_TRACES, a folder, the tests record the system calls there instead of using a profile: `make seccomp` compares.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::broken::Api;
use e2e::agent::{Node, get};
use e2e::pods::{
    self, PodApi, Proc, Sandboxes, UID, check, held_back, mesh_pod_of, mismatch, wait, wait_at_least,
};
use redirect_core::options::BackendChoice;
use serde_json::Value;
use test_support::netns::{Families, Topology, pod_address};
use test_support::project;

fn profile() -> PathBuf {
    project::file("deploy/seccomp/install-cni.json")
}

fn helper() -> PathBuf {
    e2e::program::built().expect("the programs are built").join("e2e-helper")
}

/// What the agent is started by. `life` names the trace.
fn under(life: &str) -> Vec<String> {
    let Some(traces) = std::env::var_os("SECCOMP_TRACES") else {
        return [
            helper().display().to_string(),
            "confined-or-killed".to_owned(),
            profile().display().to_string(),
        ]
        .into();
    };
    let trace = Path::new(&traces).join(life).display().to_string();
    // With -D it is the agent whom the test started, and strace is orphaned.
    ["strace", "-D", "-f", "-qq", "-o", &trace].map(str::to_owned).into()
}

fn words(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

fn pod() -> Value {
    mesh_pod_of(UID, "web", &["10.1.0.2"])
}

/// One run of `install-cni` to its end.
fn run_once(node: &Node, args: &[&str]) {
    let mut command = test_support::process::prefixed(&words(&under(args[0])), &node.command(args));
    let done = command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").output().expect("runs");
    assert!(done.status.success(), "{args:?}: {} {}", done.status, String::from_utf8_lossy(&done.stderr));
}

#[test]
fn it_installs_watches_heals_probes_serves_and_leaves() {
    for native in ["false", "true"] {
        let mut node = Node::with_the_real_plugin();
        node.set("NATIVE_NFTABLES", native);
        node.set("DRIFT_WATCH_INTERVAL", "1s");
        node.set("DRIFT_HEAL", "true");
        node.set("NODE_TAINT", "true");
        let choice = if native == "true" { BackendChoice::NativeNft } else { BackendChoice::Auto };
        let proc = Proc::new(&mut node);
        let mut sandboxes = Sandboxes::new(&mut node);
        let web = sandboxes.add("cni-web", &["10.1.0.2"]);
        proc.add_of(71, UID, &web.path());
        pods::redirect_with(&web, choice);
        let api = PodApi::start(&mut node, vec![pod()]);
        let agent = node.start_as(&words(&under(&format!("life-{native}"))));
        agent.wait_ready();
        wait_at_least(&node, &check("verified"), 1.0);
        wait_at_least(&node, "istio_cni_heal_watched_pods", 1.0);
        wait_at_least(&node, "istio_cni_node_probes_total{result=\"redirected\"}", 1.0);
        let deletion = if native == "true" { "nft flush ruleset" } else { "iptables-nft -t nat -F OUTPUT" };
        web.sh(deletion).expect("deletes").ok().expect("deletes");
        wait_at_least(&node, "istio_cni_heal_attempts_total{reason=\"healed\"}", 1.0);
        assert_eq!(mismatch(&web, &[], choice), None);
        wait(&node, "the event", || !api.events_about("web").is_empty());
        // Another program writes the node's configuration, and the settings' levels are changed over HTTP.
        node.write_conf("05-other.conflist", r#"{"name":"a","cniVersion":"0.3.1","plugins":[{"type":"b"}]}"#);
        agent.wait("the entry in the new file", || node.calls_us());
        for path in ["/healthz", "/readyz", "/metrics"] {
            assert!(get(node.health, path).is_some() || get(node.monitoring, path).is_some(), "{path}");
        }
        assert_eq!(agent.end(), Some(0), "{}", node.log());
        run_once(&node, &["uninstall"]);
        assert!(!node.calls_us() && !node.has_plugin(), "{}", node.log());
    }
}

#[test]
fn it_installs_once() {
    let node = Node::with_the_real_plugin();
    run_once(&node, &["install", "--once"]);
    assert!(node.has_plugin());
}

#[test]
fn it_redirects_a_broken_pod_where_it_stands() {
    let mut node = Node::with_the_real_plugin();
    node.set("REPAIR_REPAIR_PODS", "true");
    let proc = Proc::new(&mut node);
    let mut sandboxes = Sandboxes::new(&mut node);
    let topology = Topology::new(Families::Dual).expect("namespaces");
    sandboxes.mount("cni-web", &topology.pod.path());
    proc.add_of(77, UID, &topology.pod.path());
    let addresses = [pod_address(false), pod_address(true)].map(|address| address.to_string());
    let api = Api::start(&mut node);
    api.put(held_back(mesh_pod_of(UID, "web", &addresses.each_ref().map(String::as_str))));
    let agent = node.start_as(&words(&under("repair")));
    agent.wait_ready();
    wait_at_least(&node, "istio_cni_repair_pods_repaired_total{type=\"repair\",result=\"success\"}", 1.0);
    wait(&node, "the event", || !api.events_about("web").is_empty());
    assert_eq!(agent.end(), Some(0), "{}", node.log());
}

/// The test above can fail: an unlisted call ends the program.
#[test]
fn a_call_that_is_not_listed_is_noticed() {
    let helper = helper();
    let run = |how: &str| {
        let command =
            Command::new(&helper).arg(how).arg(profile()).args(["unshare", "--mount", "true"]).output();
        command.expect("runs").status
    };
    assert!(!run("confined").success());
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&run("confined-or-killed")), Some(31), "SIGSYS");
    let free = Command::new("unshare").args(["--mount", "true"]).status().expect("runs");
    assert!(free.success(), "without a profile it is let through");
}

#[test]
fn what_no_agent_needs_is_refused() {
    let done = Command::new(helper()).arg("forbidden").arg(profile()).output().expect("runs");
    assert!(done.status.success(), "{done:?}");
    assert_eq!(String::from_utf8_lossy(&done.stdout).trim(), "", "let through");
}
