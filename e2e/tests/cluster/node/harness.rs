//! Nodes of the harness: alone, and of a cluster.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use e2e::kube::ApiServer;
use e2e::node::{APP_PORT, GREETING, Node, PRIMARY_CONFLIST, plain_pod, sidecar_pod};
use e2e::traffic::{Client, Outcome, TcpServer};
use serde_json::json;
use test_support::process;

#[test]
fn a_standalone_node_runs_static_pods() -> Result<()> {
    let node = Node::standalone()?;
    let name = node.name().to_owned();
    assert!(!cgroups(&name).is_empty());
    let pod = node.start_pod(&plain_pod("plain"))?;
    assert_eq!(pod.wait_running(POD)?.len(), 2);
    for v6 in [false, true] {
        assert_answers(&node, SocketAddr::new(pod.address(v6)?, APP_PORT))?;
    }
    assert_eq!(pod.exec("app", &["id", "-u"])?.stdout, "0\n");

    let inside = pod.namespace()?;
    let proxy = TcpServer::start(&inside, "proxy", (Ipv4Addr::UNSPECIFIED, 15006))?;
    inside.sh("iptables-nft -t nat -A PREROUTING -p tcp --dport 8080 -j REDIRECT --to-ports 15006")?;
    let app = SocketAddr::new(pod.address(false)?, APP_PORT);
    assert_eq!(Client::new(node.namespace()).tcp(app)?.report()?.original, Some(app));
    drop((proxy, inside));

    pod.delete(POD)?;
    assert!(pod.object()?.is_none());
    assert!(!node.namespace().sh("ip -o link")?.stdout.contains("veth"), "the bridge has a port left");
    drop(node);
    assert_eq!(cgroups(&name), Vec::<PathBuf>::new());
    Ok(())
}

#[test]
fn a_sandbox_that_cannot_be_made_is_told() -> Result<()> {
    let node = Node::standalone()?;
    let mut conflist = node.primary_conflist();
    conflist["plugins"].as_array_mut().expect("a list").push(json!({"type": "no-such-plugin"}));
    node.configure(PRIMARY_CONFLIST, &conflist)?;
    let pod = node.start_pod(&plain_pod("plain"))?;
    let failure = pod.wait_sandbox_failure(POD)?;
    assert!(failure.contains("no-such-plugin"), "{failure}");

    node.configure(PRIMARY_CONFLIST, &node.primary_conflist())?;
    pod.wait_running(POD)?;
    Ok(())
}

#[test]
fn a_joined_node_runs_pods_of_the_cluster() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    let pod = node.start_pod(&sidecar_pod("sidecar"))?;
    let addresses = pod.wait_running(POD)?;
    assert_answers(&node, SocketAddr::new(addresses[0], APP_PORT))?;
    process::until("the status to reach the API server", POD, &[], || {
        Ok((api.get("pod", "default", "sidecar")?["status"]["phase"] == "Running").then_some(()))
    })?;

    let kubectl = api.kubectl(&["get", "--raw", "/readyz"])?;
    assert_eq!(kubectl.stdout, "ok");
    let inside = format!("curl --silent --cacert {} {}/readyz", api.ca_path().display(), api.url());
    assert_eq!(node.run(&process::command("sh", ["-c", &inside]))?.ok()?.stdout, "ok");

    node.restart_kubelet()?;
    assert_eq!(pod.wait_running(POD)?, addresses);
    pod.delete(POD)?;
    Ok(())
}

/// How long a pod may take to come or go on a busy machine.
const POD: Duration = Duration::from_secs(300);

/// The cgroups of a node, whichever way this machine has its hierarchies.
fn cgroups(name: &str) -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let hierarchies = root.read_dir().expect("is mounted").flatten().map(|entry| entry.path());
    hierarchies
        .chain([root.to_owned()])
        .map(|root| root.join(name))
        .filter(|cgroup| cgroup.exists())
        .collect()
}

fn assert_answers(node: &Node<'_>, app: SocketAddr) -> Result<()> {
    // A container that runs may not listen yet.
    process::until("the application to answer", POD, &[], || {
        Ok((Client::new(node.namespace()).tcp(app)? == Outcome::Foreign(GREETING.to_owned())).then_some(()))
    })
}
