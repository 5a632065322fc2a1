//! Other programs' files stay as they are, whatever the settings name.

use e2e::agent::{CALICO, FakeApi, Node};
use e2e::http::failure;

const MULTUS: &str = include_str!("../../fixtures/conflists/00-multus.conf");

/// Plays a whole life of the agent with settings that name another program's file, and expects to find everything as it was.
fn refused(files: &[(&str, &str)], env: &[(&str, &str)], named: &str) {
    let mut node = Node::new(files);
    FakeApi::start(404, &failure(404)).serve(&mut node);
    for (name, value) in env {
        node.set(name, value);
    }
    let before = node.confs();
    let agent = node.start();
    let reason = agent.wait_not_ready("belongs to another program");
    assert!(reason.contains(named), "{reason}");
    agent.wait_metric("istio_cni_conflist_obstacles_total{kind=\"foreign\"}", 1.0);
    assert_eq!(node.confs(), before);
    assert_eq!(agent.end(), Some(0));
    assert_eq!(node.confs(), before, "{}", node.log());
    node.start().wait_not_ready("belongs to another program");
    let done = node.command(&["cleanup"]).output().expect("runs");
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(node.confs(), before);
    assert!(!node.path("bin/istio-cni").exists() && node.kubeconfig().is_none());
}

#[test]
fn a_copy_is_not_written_over_the_network_it_is_to_copy() {
    let env = [("ISTIO_OWNED_CNI_CONFIG", "true"), ("ISTIO_OWNED_CNI_CONFIG_FILENAME", "10-calico.conflist")];
    refused(&[("10-calico.conflist", CALICO)], &env, "10-calico.conflist");
}

#[test]
fn an_entry_alone_is_not_written_over_multus() {
    let env = [("CHAINED_CNI_PLUGIN", "false"), ("CNI_CONF_NAME", "00-multus.conf")];
    refused(&[("00-multus.conf", MULTUS), ("10-calico.conflist", CALICO)], &env, "00-multus.conf");
}
