//! Ready means that the next pod gets the plugin: what the agent says of configuration directories, and what it does in them.

use std::fs;

use e2e::agent::{CALICO, FakeApi, Node, daemon_set};
use e2e::net_dirs::{self, Expected};

const OTHER: &str = r#"{"cniVersion":"1.0.0","name":"other","plugins":[{"type":"bridge"}]}"#;
const OVN: &str = include_str!("../../fixtures/conflists/10-ovn-kubernetes.conf");
const COPY: &str = "02-istio-cni.conflist";

#[test]
fn every_directory_is_ready_if_the_next_pod_gets_the_plugin() {
    for case in net_dirs::all() {
        let mut node = Node::new(&[]);
        case.write(&node.path("net.d"));
        node.use_real_plugin();
        for (name, value) in &case.env {
            node.set(name, value);
        }
        let before = node.confs();
        let agent = node.start();
        match &case.expected {
            Expected::Called => agent.wait_ready(),
            Expected::NotCalled(part) => {
                agent.wait_not_ready(part);
                agent.passes_at_rest();
                agent.wait_not_ready(part);
            }
            Expected::Open(part) => {
                let reason = agent.wait_not_ready(part);
                let reason = reason.trim().trim_start_matches("not ready: ");
                agent.wait("the log", || node.log().contains(reason));
            }
        }
        let others = |confs: &std::collections::BTreeMap<String, String>| {
            let mut confs = confs.clone();
            confs.retain(|_, text| !text.contains("istio-cni"));
            confs
        };
        let after = others(&node.confs());
        assert!(
            others(&before).iter().all(|(name, text)| after.get(name) == Some(text)),
            "{}: {after:?}",
            case.name
        );
    }
}

#[test]
fn where_files_leave_it_open_a_call_decides_or_the_operator() {
    for command in ["ADD", "STATUS"] {
        let mut node = Node::new(&[]);
        node.use_real_plugin();
        node.set("CHAINED_CNI_PLUGIN", "false");
        let agent = node.start();
        let reason = agent.wait_not_ready("installed, not seen called");
        assert!(reason.contains("YYY-istio-cni.conf"), "{reason}");
        agent.wait_metric("istio_cni_conflist_obstacles_total{kind=\"not_seen_called\"}", 1.0);
        // The agent's own questions, and what a runtime asks with a configuration that it remembers, prove nothing.
        node.runtime_asks("DEL", "YYY-istio-cni.conf");
        node.runtime_asks("VERSION", "YYY-istio-cni.conf");
        assert_eq!(agent.readyz().expect("answers").0, 503, "{}", node.log());
        node.runtime_asks(command, "YYY-istio-cni.conf");
        agent.wait_ready();
    }
    let mut node = Node::new(&[]);
    node.set("CHAINED_CNI_PLUGIN", "false");
    node.set("READY_BEFORE_CALLED", "true");
    node.start_ready();
}

/// The runtime asks the plugin with its entry in Calico's list.
fn call(node: &Node) {
    let list: serde_json::Value =
        serde_json::from_str(&node.conf("10-calico.conflist").expect("a list")).expect("JSON");
    let entry = list["plugins"].as_array().expect("plugins").last().expect("an entry").to_string();
    fs::write(node.path("net.d/entry"), entry).expect("writes");
    node.runtime_asks("STATUS", "entry");
}

/// CRI-O passes over what it cannot load; containerd loads nothing then.
#[test]
fn a_call_counts_only_for_the_files_that_it_was_made_with() {
    let node = Node::new(&[("10-calico.conflist", CALICO)]);
    node.use_real_plugin();
    let agent = node.start_ready();
    call(&node);
    for file in ["00-a.conf", "00-b.conf"] {
        node.write_conf(file, "");
        agent.wait_not_ready(&format!("{file} comes first and cannot be loaded"));
        agent.wait("the gauge", || agent.metric("istio_cni_install_ready") == 0.0);
        call(&node);
        agent.wait_ready();
        fs::remove_file(node.path("net.d").join(file)).expect("removes");
        agent.wait_ready();
    }
}

/// A node whose plugin has been called for weeks is not unready because its agent is replaced.
#[test]
fn a_restarted_agent_knows_the_calls_of_the_same_files() {
    const FRONT: &str = "00-a.conf";
    const UNSEEN: &str = "installed, not seen called: 00-a.conf";
    let mut node = Node::new(&[("10-calico.conflist", CALICO), (FRONT, "")]);
    FakeApi::start(404, &e2e::http::failure(404)).serve(&mut node);
    node.use_real_plugin();
    for is_called in [false, true] {
        let agent = node.start();
        agent.wait_not_ready(UNSEEN);
        if is_called {
            call(&node);
            agent.wait_ready();
        }
        agent.kill();
    }
    // Other settings change the entry, which is the agent's own.
    for namespaces in ["", "kube-system"] {
        node.set("EXCLUDE_NAMESPACES", namespaces);
        node.start_ready().kill();
    }
    for front in ["{", ""] {
        node.write_conf(FRONT, front);
        let agent = node.start();
        agent.wait_not_ready(UNSEEN);
        agent.kill();
    }
    let agent = node.start();
    agent.wait_not_ready(UNSEEN);
    call(&node);
    agent.wait_ready();
    let kept = node.path("run/plugin-called.json");
    assert!(kept.exists());
    assert_eq!(agent.end(), Some(0));
    assert!(!kept.exists(), "{}", node.log());
}

#[test]
fn a_link_whose_target_comes_is_used() {
    let mut node = Node::new(&[("87-podman.conflist", OTHER)]);
    node.set("LANDLOCK", "false");
    let elsewhere = node.path("elsewhere");
    std::os::unix::fs::symlink(&elsewhere, node.path("net.d/10-flannel.conflist")).expect("links");
    let agent = node.start();
    let reason = agent.wait_not_ready("10-flannel.conflist");
    assert!(
        reason.contains("symbolic link") && reason.contains(&elsewhere.display().to_string()),
        "{reason}"
    );
    assert_eq!(node.conf("87-podman.conflist").as_deref(), Some(OTHER));
    fs::write(&elsewhere, CALICO).expect("writes");
    agent.wait_ready();
    assert!(node.calls_us());
    assert_eq!(node.conf("87-podman.conflist").as_deref(), Some(OTHER));
}

/// A link to where the container has nothing keeps no agent from leaving.
#[test]
fn a_link_to_nowhere_does_not_keep_the_plugin() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    FakeApi::start(404, &e2e::http::failure(404)).serve(&mut node);
    std::os::unix::fs::symlink("/nix/store/x", node.path("net.d/20-x.conflist")).expect("links");
    assert_eq!(node.start_ready().end(), Some(0));
    assert!(!node.path("bin/istio-cni").exists(), "{}", node.log());
}

#[test]
fn a_link_that_landlock_forbids_is_named() {
    let mut node = Node::new(&[]);
    let elsewhere = node.path("elsewhere");
    fs::write(&elsewhere, CALICO).expect("writes");
    std::os::unix::fs::symlink(&elsewhere, node.path("net.d/10-calico.conflist")).expect("links");
    node.set("LANDLOCK", "true");
    let reason = node.start().wait_not_ready("symbolic link");
    for part in ["10-calico.conflist", &elsewhere.display().to_string(), "LANDLOCK"] {
        assert!(reason.contains(part), "{part}: {reason}");
    }
}

/// The runtime's file changes: the one before is as its owner wrote it, and its owner may write it at any moment.
#[test]
fn the_entry_moves_and_nothing_of_it_stays() {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    FakeApi::start(200, &daemon_set(false)).serve(&mut node);
    let agent = node.start_ready();
    node.write_conf("05-other.conflist", OTHER);
    agent.wait("the entry to move", || {
        node.calls_us() && node.conf("10-calico.conflist").as_deref() == Some(CALICO)
    });
    agent.wait_ready();
    fs::remove_file(node.path("net.d/05-other.conflist")).expect("removes");
    agent.wait("the entry to come back", || node.calls_us());
    agent.wait_ready();
}

#[test]
fn the_file_of_ovn_kubernetes_keeps_its_name() {
    let name = "10-ovn-kubernetes.conf";
    let mut node = Node::new(&[(name, OVN)]);
    FakeApi::start(404, &e2e::http::failure(404)).serve(&mut node);
    let before = node.confs();
    let agent = node.start_ready();
    assert_eq!(node.conf(name).as_deref(), Some(OVN));
    assert!(node.calls_us() && node.conf(COPY).is_some(), "{:?}", node.confs());
    // Its owner writes it again, and takes it away when it ends.
    let newer = OVN.replacen('{', "{\"newer\":true,", 1);
    node.write_conf(name, &newer);
    agent.wait("the copy", || node.conf(COPY).is_some_and(|copy| copy.contains("newer")));
    fs::remove_file(node.path("net.d").join(name)).expect("removes");
    agent.wait("the copy to go", || node.conf(COPY).is_none());
    agent.wait_not_ready("waiting for the network plugin");
    node.write_conf(name, OVN);
    agent.wait_ready();
    assert_eq!(agent.end(), Some(0));
    assert_eq!(node.confs(), before, "{}", node.log());
}
