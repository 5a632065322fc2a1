//! As whom requests are made, how long for, and what is made of an agent's complaint.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use test_support::process;

use crate::server::{LIMIT, Reply, Server};

/// A node with a ready agent and a pod.
fn objects() -> Vec<(&'static str, Value)> {
    objects_of(&["n"])
}

/// Nodes with ready agents, and a pod.
pub fn objects_of(nodes: &[&str]) -> Vec<(&'static str, Value)> {
    let labels = json!({"k8s-app": "istio-cni-node"});
    let agent = |node: &str| {
        json!({"metadata": {"namespace": "mesh", "name": format!("agent-{node}"), "labels": labels,
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "agent", "uid": "u", "controller": true}]},
        "spec": {"nodeName": node, "containers": [{"name": "install-cni", "image": "hub/install-cni:0.1.0"}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": "install-cni", "image": "i", "imageID": "i", "ready": true,
            "restartCount": 0, "state": {"running": {}}}]}})
    };
    let set = json!({"metadata": {"namespace": "mesh", "name": "agent", "uid": "u"},
        "spec": {"template": {"metadata": {"labels": labels}, "spec": {"containers": []}}}});
    let cart = json!({"metadata": {"namespace": "shop", "name": "cart"}, "spec": {"nodeName": "n"}});
    let mut all = vec![("daemonsets", set), ("pods", cart)];
    for node in nodes {
        let info = json!({"metadata": {"name": node}, "status": {"nodeInfo": {"operatingSystem": "linux"}}});
        all.extend([("pods", agent(node)), ("nodes", info)]);
    }
    all
}

pub const MESH: [&str; 2] = ["--agent-namespace", "mesh"];

fn scanned(state: &str) -> Reply {
    Reply::of(json!({"version": 1, "pods": [{"subject": "shop/cart", "state": state}]}).to_string())
}

#[test]
fn every_request_is_made_as_the_user_that_is_named() {
    let server = Server::start(objects(), |call| match call.words[0].as_str() {
        "scan" => scanned("verified"),
        _ => Reply::of("fine"),
    });
    let sam = ["--as", "sam", "--as-group", "one", "--as-group=two"];
    for words in [&["scan"][..], &["verify", "shop/cart"], &["pod", "shop/cart"]] {
        let output = server.run(&[words, &MESH, &sam].concat());
        assert_eq!(output.code(), Some(0), "{words:?}: {output:?}");
    }
    let heads = server.heads();
    assert!(heads.iter().filter(|head| head.contains("/exec?")).count() == 3, "{heads:?}");
    for head in &heads {
        for header in ["impersonate-user: sam", "impersonate-group: one", "impersonate-group: two"] {
            assert!(head.contains(&format!("\r\n{header}\r\n")), "{header}: {head}");
        }
    }
    let (before, output) = (heads.len(), server.run(&[&["scan", "--as-group", "one"][..], &MESH].concat()));
    assert!(output.code() == Some(1) && output.stderr.contains("--as <USER>"), "{output:?}");
    assert_eq!(server.heads().len(), before, "nothing was asked");
    server.run(&[&["scan"][..], &MESH].concat());
    assert!(server.heads()[before..].iter().all(|head| !head.contains("impersonate")), "not asked for");
}

#[test]
fn a_scan_waits_until_all_is_well() {
    let count = AtomicUsize::new(0);
    let server = Server::start(objects(), move |_| {
        scanned(if count.fetch_add(1, Ordering::Relaxed) == 0 { "not-redirected" } else { "verified" })
    });
    let output = server.run(&[&["scan", "--wait=10m"][..], &MESH].concat());
    assert_eq!((output.code(), server.calls().len()), (Some(0), 2), "{output:?}");
    assert!(output.stdout.starts_with("1 of 1 pods redirected, verified\n"), "{output:?}");
    assert_eq!(output.stderr, "waiting: 0 of 1 pods redirected, verified\n");
}

#[test]
fn what_an_agent_logged_is_shown_without_its_fields() {
    let server = Server::start(objects(), |_| Reply::Ended {
        stdout: Vec::new(),
        stderr: b"2026-11-21T07:26:50.1Z\tinfo\tasks\n2026-11-21T07:26:51.2Z\terror\tno such pod\tpod=a/b\n"
            .to_vec(),
        code: 1,
    });
    let output = server.run(&[&["scan"][..], &MESH].concat());
    let unwrapped = output.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(unwrapped.contains("redirectctl failed: no such pod pod=a/b: n"), "{output:?}");
    let output = server.run(&[&["verify", "shop/cart"][..], &MESH].concat());
    assert!(output.stderr.contains("1.2Z\terror\tno such pod\tpod=a/b\n"), "{output:?}");
}

#[test]
fn archives_of_several_nodes_have_a_limit_and_each_fails_alone() {
    let server = Server::start(objects_of(&["a", "b", "c"]), |call| Reply::Ended {
        stdout: call.container.clone().into(),
        stderr: Vec::new(),
        code: u8::from(call.container.contains("agent-b")),
    });
    let run = |words: &[&str]| server.run(&[&["bundle"], words, &MESH].concat());
    let output = run(&["--all-nodes", "--limit", "2"]);
    assert!(output.code() == Some(1) && output.stderr.contains("3 nodes, more than --limit 2"), "{output:?}");
    let output = run(&["--node", "a", "--node", "c", "--file", "x"]);
    assert!(output.code() == Some(1) && output.stderr.contains("leave out --file"), "{output:?}");
    assert_eq!(server.calls(), []);
    let output = run(&["--all-nodes"]);
    assert_eq!((output.code(), output.stdout.lines().count()), (Some(1), 2), "{output:?}");
    // Nothing is overwritten, also not by one of several.
    let output = run(&["--node", "a", "--node", "n"]);
    assert!(output.code() == Some(1) && output.stderr.contains("redirectctl-a.tar.gz exists"), "{output:?}");
    assert!(output.stderr.contains("node n has no agent"), "{output:?}");
    assert!(run(&["shop/cart", "--node", "a"]).stderr.contains("cannot be used with"));
}

/// As older tools issue them.
#[test]
fn a_client_certificate_of_version_1_is_named_as_such() {
    let folder = tempfile::tempdir().expect("a folder");
    let script = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=ca -days 2 -keyout ca-key -out ca
        openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=sam -keyout key -out request
        openssl x509 -req -in request -CA ca -CAkey ca-key -days 2 -out certificate";
    let mut openssl = process::command("sh", ["-ec", script]);
    process::run(openssl.current_dir(&folder), LIMIT).expect("openssl runs").ok().expect("certificates");
    let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1", "insecure-skip-tls-verify": true}}],
        "users": [{"name": "u", "user": {"client-certificate": "certificate", "client-key": "key"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]});
    let file = folder.path().join("config");
    std::fs::write(&file, config.to_string()).expect("writes");
    let server = Server::start(Vec::new(), |_| Reply::of(""));
    let output = server.run(&["scan", "--kubeconfig", &file.display().to_string()]);
    assert_eq!(output.code(), Some(1), "{output:?}");
    assert!(output.stderr.contains("client certificate is of X.509 version 1"), "{output:?}");
}
