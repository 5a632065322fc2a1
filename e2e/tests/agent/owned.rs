//! The copy in front, and other programs that change it.

use std::fs;
use std::os::unix::fs::symlink;

use e2e::agent::{Agent, CALICO, FakeApi, Node};
use e2e::http::failure;

const COPY: &str = "02-istio-cni.conflist";

fn node() -> Node {
    let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
    FakeApi::start(404, &failure(404)).serve(&mut node);
    node.set("ISTIO_OWNED_CNI_CONFIG", "true");
    node
}

fn wait_mended(node: &Node, agent: &Agent<'_>, whole: &str) {
    agent.wait("the copy, whole", || node.conf(COPY).as_deref() == Some(whole));
    agent.wait_ready();
    assert_eq!(node.conf("10-calico.conflist").as_deref(), Some(CALICO));
}

#[test]
fn a_copy_that_lost_the_entry_gets_it_back_whether_an_agent_runs_or_not() {
    let node = node();
    let agent = node.start_ready();
    let whole = node.conf(COPY).expect("a copy");
    node.write_conf(COPY, CALICO);
    wait_mended(&node, &agent, &whole);
    assert_eq!(agent.metric("istio_cni_conflist_obstacles_total{kind=\"foreign\"}"), 0.0);
    assert_eq!(agent.metric("istio_cni_fights_total"), 0.0, "once is not a conflict");

    agent.kill();
    for text in [CALICO, "{\"name\""] {
        node.write_conf(COPY, text);
        let agent = node.start();
        wait_mended(&node, &agent, &whole);
        agent.kill();
    }
    node.write_conf(COPY, CALICO);
    let done = node.command(&["cleanup"]).output().expect("runs");
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(node.confs().into_keys().collect::<Vec<_>>(), ["10-calico.conflist"]);
}

#[test]
fn links_are_replaced_and_a_directory_is_reported() {
    let node = node();
    let agent = node.start_ready();
    let (whole, path) = (node.conf(COPY).expect("a copy"), node.path("net.d").join(COPY));
    for target in ["10-calico.conflist", "nowhere", COPY] {
        symlink(target, node.path("net.d/beside")).expect("links");
        fs::rename(node.path("net.d/beside"), &path).expect("renames");
        wait_mended(&node, &agent, &whole);
        assert!(fs::symlink_metadata(&path).expect("is there").is_file(), "{target}");
    }
    agent.kill();
    fs::remove_file(&path).expect("removes");
    fs::create_dir(&path).expect("makes");
    let agent = node.start();
    agent.wait_not_ready("it is not a regular file; move it, and the agent continues");
    fs::remove_dir(&path).expect("removes");
    wait_mended(&node, &agent, &whole);
}

#[test]
fn a_program_that_keeps_taking_the_entry_out_of_a_copy_meets_no_busy_agent() {
    let node = node();
    let agent = node.start_ready();
    let whole = node.conf(COPY).expect("a copy");
    let reason = loop {
        node.write_conf(COPY, CALICO);
        let mut reason = String::new();
        agent.wait("the entry again, or a pause", || {
            reason = agent.readyz().unwrap_or_default().1;
            node.conf(COPY).as_ref() == Some(&whole) || reason.contains("next attempt in")
        });
        if reason.contains("next attempt in") {
            break reason;
        }
    };
    assert!(reason.contains("02-istio-cni.conflist has no istio-cni entry"), "{reason}");
    assert!(reason.contains("stop it from changing this agent's file"), "{reason}");
    wait_mended(&node, &agent, &whole);
    agent.wait_metric("istio_cni_fights_total", 1.0);
}
