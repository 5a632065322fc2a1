//! A real kubelet with containerd, the clients that matter: a plain pod answers itself, a sidecar pod through its proxy.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::kube::ApiServer;
use e2e::node::{APP_PORT, GREETING, Node, PRIMARY_CONFLIST, Pod, plain_pod, sidecar_pod};
use e2e::plugin::istio_cni;
use e2e::traffic::{Client, Outcome, TcpServer};
use serde_json::{Value, json};
use test_support::netns::Families;
use test_support::process::until;

/// How long a pod may take to come or go on a busy machine.
const POD: Duration = Duration::from_secs(300);

/// Puts the plugin on the node, behind the plugins that are there.
fn install(node: &Node<'_>, conf: &Value) -> Result<()> {
    let program = node.state_dir().join("istio-cni");
    fs::copy(istio_cni(), &program)?;
    node.install_plugin(&program)?;
    let mut conflist = node.primary_conflist();
    let mut ours = json!({"type": "istio-cni", "cni_agent_run_dir": node.state_dir(), "add_timeout": "10s"});
    for (key, value) in conf.as_object().context("an object")? {
        ours[key] = value.clone();
    }
    conflist["plugins"].as_array_mut().context("a list")?.push(ours);
    node.configure(PRIMARY_CONFLIST, &conflist)
}

/// Nobody stands between the client and the application.
fn assert_answers_itself(node: &Node<'_>, pod: &Pod<'_>) -> Result<()> {
    for v6 in [false, true] {
        let app = SocketAddr::new(pod.address(v6)?, APP_PORT);
        until("the application to answer", POD, &[], || {
            Ok((Client::new(node.namespace()).tcp(app)? == Outcome::Foreign(GREETING.to_owned()))
                .then_some(()))
        })?;
    }
    Ok(())
}

/// What comes in reaches the proxy's inbound port, what goes out its outbound port.
fn assert_goes_through_the_proxy(node: &Node<'_>, pod: &Pod<'_>, v6s: &[bool]) -> Result<()> {
    let inside = pod.namespace()?;
    for v6 in v6s {
        let any: IpAddr = if *v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
        let _inbound = TcpServer::start(&inside, "inbound", (any, 15006))?;
        let _outbound = TcpServer::start(&inside, "outbound", (any, 15001))?;
        let app = SocketAddr::new(pod.address(*v6)?, APP_PORT);
        let report = Client::new(node.namespace()).tcp(app)?.report()?;
        assert_eq!((report.server.as_str(), report.original), ("inbound", Some(app)));
        let far: SocketAddr = if *v6 { "[2001:db8::9]:80" } else { "198.51.100.9:80" }.parse()?;
        let report = Client::new(&inside).user(1000, 1000).tcp(far)?.report()?;
        assert_eq!((report.server.as_str(), report.original), ("outbound", Some(far)));
    }
    Ok(())
}

fn dual_stack(mut pod: Value) -> Value {
    pod["spec"]["containers"][1]["env"] = json!([{"name": "ISTIO_DUAL_STACK", "value": "true"}]);
    pod
}

/// The plugin's own account of a pod.
fn account(node: &Node<'_>, pod: &Pod<'_>) -> Result<Value> {
    let log = fs::read_to_string(node.state_dir().join("istio-cni.log"))?;
    let mut lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let label = format!("default/{}", pod.name());
    lines.rfind(|line| line["pod"] == *label).with_context(|| format!("no line about {label}:\n{log}"))
}

#[test]
fn static_pods_and_a_manifest_folder_need_no_cluster() -> Result<()> {
    let node = Node::standalone()?;
    install(&node, &json!({"pod_manifest_dir": node.manifest_dir()}))?;
    let plain = node.start_pod(&plain_pod("plain"))?;
    let sidecar = node.start_pod(&dual_stack(sidecar_pod("sidecar")))?;
    plain.wait_running(POD)?;
    sidecar.wait_running(POD)?;
    assert_answers_itself(&node, &plain)?;
    assert_goes_through_the_proxy(&node, &sidecar, &[false, true])?;
    assert_eq!(account(&node, &plain)?["reason"], "no_proxy");
    assert_eq!(account(&node, &sidecar)?["decision"], "redirect");
    ensure!(plain.namespace()?.state_with_nft()?.is_pristine(), "a plain pod was programmed");

    plain.delete(POD)?;
    sidecar.delete(POD)?;
    Ok(())
}

#[test]
fn nodes_of_one_family_redirect_their_pods() -> Result<()> {
    for (families, v6) in [(Families::V4, false), (Families::V6, true)] {
        let node = Node::standalone_of(families)?;
        for (backend, native) in [("iptables", false), ("native", true)] {
            let settings = json!({"pod_manifest_dir": node.manifest_dir(), "native_nftables": native});
            install(&node, &settings)?;
            let sidecar = node.start_pod(&sidecar_pod(backend))?;
            let addresses = sidecar.wait_running(POD)?;
            ensure!(addresses.iter().all(|address| address.is_ipv6() == v6), "{addresses:?}");
            assert_goes_through_the_proxy(&node, &sidecar, &[v6])?;
            assert_eq!(account(&node, &sidecar)?["decision"], "redirect");
            sidecar.delete(POD)?;
        }
    }
    Ok(())
}

#[test]
fn pods_of_a_cluster_are_read_from_its_api_server() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    api.create_service_account("default", "istio-cni")?;
    api.kubectl(&["create", "clusterrole", "istio-cni", "--verb=get", "--resource=pods"])?;
    let binding = ["create", "clusterrolebinding", "istio-cni", "--clusterrole=istio-cni"];
    api.kubectl(&[&binding[..], &["--serviceaccount=default:istio-cni"]].concat())?;
    install(&node, &json!({"exclude_namespaces": ["kube-system"]}))?;

    // The agent has not written the kubeconfig yet: the pod waits, with a reason, and comes when it is there.
    let sidecar = node.start_pod(&sidecar_pod("sidecar"))?;
    let failure = sidecar.wait_sandbox_failure(POD)?;
    ensure!(failure.contains("istio-cni-kubeconfig is missing"), "{failure}");
    let token = api.token("default", "istio-cni")?;
    let kubeconfig = api.kubeconfig(&json!({"token": token}))?;
    fs::write(node.state_dir().join("istio-cni-kubeconfig"), kubeconfig.to_string())?;

    let plain = node.start_pod(&plain_pod("plain"))?;
    plain.wait_running(POD)?;
    sidecar.wait_running(POD)?;
    assert_answers_itself(&node, &plain)?;
    assert_goes_through_the_proxy(&node, &sidecar, &[false])?;
    assert_eq!(account(&node, &sidecar)?["decision"], "redirect");
    plain.delete(POD)?;
    sidecar.delete(POD)?;
    Ok(())
}
