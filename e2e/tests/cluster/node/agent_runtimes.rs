//! The agent and the plugin under containerd 2 and Multus, on a real node: what newer runtimes ask, and who calls the plugin without a chain.
//!
//! `make runtimes` builds both and runs this.

mod crio;

use std::fs;
use std::path::PathBuf;

use crate::agent_support::{
    GATEWAY, LOOPBACK, MANIFEST, POD, agent_pod, apply_manifest, assert_redirected, chart, import_image,
    is_ready, run_dir, wait_loaded,
};
use anyhow::{Context, Result, ensure};
use e2e::kube::ApiServer;
use e2e::node::{Node, PRIMARY_CONFLIST, Pod, Runtime, plain_pod, sidecar_pod};
use serde_json::{Value, json};
use test_support::netns::Namespace;
use test_support::process::{self, Output, SHORT, until};
use test_support::sample;

/// Whether the node's Ready condition is true, and its message.
fn readiness(api: &ApiServer, node: &Node<'_>) -> Result<(bool, String)> {
    let node = api.get("node", "", node.name())?;
    let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let ready = conditions.into_iter().find(|condition| condition["type"] == "Ready").unwrap_or_default();
    Ok((ready["status"] == "True", ready["message"].as_str().unwrap_or_default().to_owned()))
}

fn wait_node_ready(api: &ApiServer, node: &Node<'_>) -> Result<()> {
    until("the node to be ready", POD, &[], || Ok(readiness(api, node)?.0.then_some(())))
}

/// A node of the newer containerd whose network is at version 1.1.0, with the agent's image.
fn current_node(api: &ApiServer) -> Result<Node<'_>> {
    let node = Node::joined_with(Runtime::Containerd2, api)?;
    import_image(&node)?;
    let mut conflist = node.primary_conflist();
    conflist["cniVersion"] = json!("1.1.0");
    node.configure(PRIMARY_CONFLIST, &conflist)?;
    wait_node_ready(api, &node)?;
    Ok(node)
}

fn start_agent<'n>(
    api: &ApiServer,
    node: &'n Node<'n>,
    daemon_set: &Value,
    server: &str,
    name: &str,
) -> Result<Pod<'n>> {
    let agent = node.start_pod(&agent_pod(daemon_set, server, api, name))?;
    agent.wait("ready", POD, is_ready).with_context(|| agent.log("install-cni").unwrap_or_default())?;
    Ok(agent)
}

fn meshed(node: &Node<'_>, name: &str) -> Result<()> {
    let pod = node.start_pod(&sidecar_pod(name))?;
    pod.wait_running(POD)?;
    assert_redirected(node, &pod)
}

/// What a reboot leaves of the agent's files: none that are below /var/run.
fn empty_run_dir(node: &Node<'_>) -> Result<()> {
    for entry in fs::read_dir(run_dir(node))? {
        fs::remove_file(entry?.path())?;
    }
    Ok(())
}

#[test]
#[ignore = "needs containerd 2 and Multus: make runtimes"]
fn containerd_2_holds_pods_back_for_an_agent_on_the_nodes_network() -> Result<()> {
    let api = ApiServer::start()?;
    let node = current_node(&api)?;
    let daemon_set = apply_manifest(&api, &node, MANIFEST)?;
    let agent = start_agent(&api, &node, &daemon_set, LOOPBACK, "istio-cni-node-one")?;
    wait_loaded(&node)?;
    meshed(&node, "before")?;
    agent.delete(POD)?;
    meshed(&node, "without-an-agent")?;

    empty_run_dir(&node)?;
    until("the node not to be ready", POD, &[], || {
        let (ready, message) = readiness(&api, &node)?;
        // The plugin's own words, which only STATUS can have brought there.
        let is_told = message.contains("istio-cni-kubeconfig") && message.contains("istio-cni");
        Ok((!ready && is_told).then_some(()))
    })
    .with_context(|| format!("{:?}", readiness(&api, &node)))?;
    start_agent(&api, &node, &daemon_set, LOOPBACK, "istio-cni-node-two")?;
    wait_node_ready(&api, &node)?;
    meshed(&node, "after")
}

#[test]
#[ignore = "needs containerd 2 and Multus: make runtimes"]
fn containerd_2_waits_for_no_agent_on_the_pods_network() -> Result<()> {
    let api = ApiServer::start()?;
    let node = current_node(&api)?;
    // The gateway's address is there as soon as a pod is.
    node.start_pod(&plain_pod("first"))?.wait_running(POD)?;
    let daemon_set = apply_manifest(&api, &node, &chart(false))?;
    let agent = start_agent(&api, &node, &daemon_set, GATEWAY, "istio-cni-node-one")?;
    wait_loaded(&node)?;
    agent.delete(POD)?;
    empty_run_dir(&node)?;
    start_agent(&api, &node, &daemon_set, GATEWAY, "istio-cni-node-two")?;
    meshed(&node, "after")?;
    ensure!(readiness(&api, &node)?.0, "the node is not ready");
    Ok(())
}

/// What the runtime keeps of an ADD: of this pod's.
fn kept(node: &Node<'_>, pod: &str) -> Result<Value> {
    for entry in fs::read_dir(node.file("/var/lib/cni/results"))? {
        let text = fs::read_to_string(entry?.path())?;
        if text.contains(&format!("\"{pod}\"")) {
            return serde_json::from_str(&text).context("no JSON");
        }
    }
    anyhow::bail!("the runtime keeps nothing of {pod}")
}

/// Calls the installed plugin as a runtime would that asks more than containerd does, with what containerd keeps.
fn call(node: &Node<'_>, command: &str, inside: &Namespace, kept: &Value, more: &Value) -> Result<Output> {
    let list: Value = serde_json::from_str(&fs::read_to_string(node.conf_dir().join(PRIMARY_CONFLIST))?)?;
    let plugins = list["plugins"].as_array().context("a list")?;
    let mut conf = plugins.iter().find(|plugin| plugin["type"] == "istio-cni").context("no entry")?.clone();
    (conf["cniVersion"], conf["name"]) = (list["cniVersion"].clone(), list["name"].clone());
    for (key, value) in more.as_object().into_iter().flatten() {
        conf[key] = value.clone();
    }
    let pairs = kept["cniArgs"].as_array().into_iter().flatten();
    let pair = |pair: &Value| Some(format!("{}={}", pair[0].as_str()?, pair[1].as_str()?));
    let pairs: Vec<String> = pairs.filter_map(pair).collect();
    let mut plugin = process::command::<&str>(node.bin_dir().join("istio-cni"), []);
    plugin.env_clear().env("CNI_COMMAND", command).env("CNI_PATH", node.bin_dir());
    plugin.env("CNI_IFNAME", kept["ifName"].as_str().unwrap_or("eth0")).env("CNI_ARGS", pairs.join(";"));
    plugin
        .env("CNI_CONTAINERID", kept["containerId"].as_str().unwrap_or_default())
        .env("CNI_NETNS", inside.path());
    process::run_with_input(&mut plugin, &conf.to_string(), SHORT)
}

/// No containerd calls CHECK or GC so far. Asked with what it keeps of a pod, the plugin answers both.
#[test]
#[ignore = "needs containerd 2 and Multus: make runtimes"]
fn check_and_gc_work_with_what_containerd_2_keeps() -> Result<()> {
    let api = ApiServer::start()?;
    let node = current_node(&api)?;
    let daemon_set = apply_manifest(&api, &node, MANIFEST)?;
    start_agent(&api, &node, &daemon_set, LOOPBACK, "istio-cni-node-one")?;
    wait_loaded(&node)?;
    let pod = node.start_pod(&sidecar_pod("web"))?;
    pod.wait_running(POD)?;
    let (inside, kept) = (pod.namespace()?, kept(&node, "web")?);
    let before = json!({"prevResult": kept["result"]});
    call(&node, "CHECK", &inside, &kept, &before)?.ok()?;

    let attached =
        json!({"cni.dev/valid-attachments": [{"containerID": kept["containerId"], "ifname": "eth0"}]});
    let state = inside.state_with_nft()?;
    for valid in [attached, json!({"cni.dev/valid-attachments": []})] {
        let collected = call(&node, "GC", &inside, &kept, &valid)?.ok()?;
        ensure!(collected.stdout.is_empty(), "{}", collected.stdout);
        ensure!(inside.state_with_nft()? == state, "GC changed a pod that runs");
    }

    inside.sh("iptables-nft -t nat -D OUTPUT -j ISTIO_OUTPUT")?;
    let check = call(&node, "CHECK", &inside, &kept, &before)?;
    let error: Value = serde_json::from_str(&check.stdout).context("no error object")?;
    assert_eq!(error["code"], 111, "{error}");
    ensure!(error["msg"].as_str().is_some_and(|text| text.contains("OUTPUT")), "{error}");
    Ok(())
}

const DEFINITIONS: &str = r#"
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: network-attachment-definitions.k8s.cni.cncf.io}
spec:
  group: k8s.cni.cncf.io
  scope: Namespaced
  names: {plural: network-attachment-definitions, singular: network-attachment-definition, kind: NetworkAttachmentDefinition}
  versions:
    - name: v1
      served: true
      storage: true
      schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
"#;

/// As Istio's chart makes it for the provider multus: its name is that of the network in the file.
const ATTACHMENT: &str = r#"{"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
    "metadata": {"name": "istio-cni", "namespace": "default"}}"#;

fn multus() -> Result<PathBuf> {
    e2e::tools::built("multus")
}

#[test]
#[ignore = "needs containerd 2 and Multus: make runtimes"]
fn multus_calls_the_plugin_that_stands_alone() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined_with(Runtime::Containerd2, &api)?;
    import_image(&node)?;
    api.apply(DEFINITIONS)?;
    api.kubectl(&[
        "wait",
        "--for=condition=Established",
        "crd",
        "network-attachment-definitions.k8s.cni.cncf.io",
    ])?;
    api.apply(ATTACHMENT)?;
    node.install_plugin(&multus()?)?;
    node.configure(
        "00-multus.conf",
        &json!({
            "cniVersion": "1.0.0", "name": "multus-cni-network", "type": "multus",
            "kubeconfig": api.admin_kubeconfig(), "confDir": node.conf_dir(), "binDir": node.bin_dir(),
            "logLevel": "debug", "logFile": node.state_dir().join("multus.log"),
            "delegates": [node.primary_conflist()],
        }),
    )?;
    let manifest = MANIFEST.replace("CHAINED_CNI_PLUGIN: \"true\"", "CHAINED_CNI_PLUGIN: \"false\"");
    let daemon_set = apply_manifest(&api, &node, &manifest)?;
    let agent = node.start_pod(&agent_pod(&daemon_set, LOOPBACK, &api, "istio-cni-node-one"))?;
    until("a configuration of its own", POD, &[], || {
        Ok(node.conf_dir().join("YYY-istio-cni.conf").exists().then_some(()))
    })?;

    let attached = |name: &str| {
        let mut pod = sidecar_pod(name);
        pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] = json!("default/istio-cni");
        pod
    };
    let log = || fs::read_to_string(node.state_dir().join("multus.log")).unwrap_or_default();
    let pod = node.start_pod(&attached("attached"))?;
    pod.wait_running(POD).with_context(log)?;
    assert_redirected(&node, &pod).with_context(log)?;
    // No file shows that Multus calls the plugin, so the agent is ready only now.
    agent.wait("ready", POD, is_ready).with_context(|| agent.log("install-cni").unwrap_or_default())?;
    // Multus calls the plugin for pods that ask for it, which Istio's injector sees to.
    let other = node.start_pod(&sidecar_pod("other"))?;
    other.wait_running(POD)?;
    ensure!(
        other.namespace()?.state_with_nft()?.is_pristine(),
        "Multus called the plugin without being asked"
    );
    pod.delete(POD)
}

/// A manifest whose agents may have the entry beside the network's list.
fn installed_as(api: &ApiServer, node: &Node<'_>, install: &str) -> Result<Value> {
    let chained = "CHAINED_CNI_PLUGIN: \"true\"";
    let manifest = MANIFEST.replace(chained, &format!("{chained}\n  CNI_INSTALL: {install}"));
    let mut daemon_set = apply_manifest(api, node, &manifest)?;
    let spec = &mut daemon_set["spec"]["template"]["spec"];
    let volumes = spec["volumes"].as_array_mut().context("volumes")?;
    volumes.push(json!({"name": "host-proc", "hostPath": {"path": "/proc"}}));
    let mounts = spec["containers"][0]["volumeMounts"].as_array_mut().context("mounts")?;
    mounts.push(json!({"name": "host-proc", "mountPath": "/host/proc", "readOnly": true}));
    Ok(daemon_set)
}

fn list(node: &Node<'_>) -> Result<String> {
    Ok(fs::read_to_string(node.conf_dir().join(PRIMARY_CONFLIST))?)
}

fn wait_for_list(node: &Node<'_>, agent: &Pod<'_>, what: &str, is_so: impl Fn(&str) -> bool) -> Result<()> {
    until(what, POD, &[], || Ok(is_so(&list(node)?).then_some(())))
        .with_context(|| format!("{:?}\n{:?}", list(node), agent.log("install-cni")))
}

/// How often the plugin was asked to redirect a pod.
fn decisions(node: &Node<'_>, pod: &str) -> Result<Vec<String>> {
    let log = fs::read_to_string(run_dir(node).join("istio-cni.log"))?;
    let about = format!("\"default/{pod}\"");
    let lines = log.lines().filter(|line| line.contains(&about) && line.contains("\"decision\""));
    Ok(lines.map(str::to_owned).collect())
}

#[test]
#[ignore = "needs containerd 2 and Multus: make runtimes"]
fn containerd_2_1_reads_the_entry_beside_the_list() -> Result<()> {
    let api = ApiServer::start()?;
    let node = current_node(&api)?;
    let owners = list(&node)?;
    let daemon_set = installed_as(&api, &node, "auto")?;
    let agent = start_agent(&api, &node, &daemon_set, LOOPBACK, "istio-cni-node-one")?;
    // It asks for STATUS every few seconds, with both.
    let is_owners = |list: &str| list == owners;
    wait_for_list(&node, &agent, "the list as its owner wrote it", is_owners)?;
    meshed(&node, "beside")?;
    ensure!(decisions(&node, "beside")?.len() == 1, "{:?}", decisions(&node, "beside"));

    // Another process may be an older runtime: the entry is in the list unless this one is seen at once to read beside it.
    let reader = || fs::read_to_string(run_dir(&node).join("drop-in-reader")).unwrap_or_default();
    let before = reader();
    node.restart_containerd()?;
    until("the new process to be known", POD, &[], || {
        let now = reader();
        Ok((!now.is_empty() && now != before).then_some(()))
    })?;
    wait_for_list(&node, &agent, "the list as its owner wrote it", is_owners)?;
    meshed(&node, "after")?;

    let known = fs::metadata(node.conf_dir().join(PRIMARY_CONFLIST))?.modified()?;
    api.kubectl(&[
        "-n",
        "istio-system",
        "delete",
        "daemonset",
        "istio-cni-node",
        "--cascade=orphan",
        "--wait=false",
    ])?;
    agent.delete(POD)?;
    ensure!(list(&node)? == owners && !node.conf_dir().join("podnet").exists());
    ensure!(
        fs::metadata(node.conf_dir().join(PRIMARY_CONFLIST))?.modified()? == known,
        "the list was written"
    );
    let pod = node.start_pod(&sidecar_pod("without"))?;
    pod.wait_running(POD)?;
    ensure!(pod.namespace()?.state_with_nft()?.is_pristine(), "the runtime still has the plugin");
    Ok(())
}

/// A list of an older version, of which no STATUS is asked: the first pod shows it, and its second ADD changes nothing.
#[test]
#[ignore = "needs containerd 2 and Multus: make runtimes"]
fn the_first_pod_shows_that_containerd_2_1_reads_beside_an_older_list() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined_with(Runtime::Containerd2, &api)?;
    import_image(&node)?;
    node.configure(PRIMARY_CONFLIST, &node.primary_conflist())?;
    let owners = list(&node)?;
    let daemon_set = installed_as(&api, &node, "auto")?;
    let agent = start_agent(&api, &node, &daemon_set, LOOPBACK, "istio-cni-node-one")?;
    meshed(&node, "first")?;
    let decisions = decisions(&node, "first")?;
    let changed: Vec<bool> = decisions.iter().map(|line| line.contains("\"changed\":true")).collect();
    ensure!(changed == [true, false], "{decisions:#?}");
    wait_for_list(&node, &agent, "the list as its owner wrote it", |list| list == owners)
}

/// Debian's containerd 1.6 knows no folders of lists.
#[test]
#[ignore = "needs containerd 2 and Multus: make runtimes"]
fn containerd_1_6_keeps_the_entry_in_the_list() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    import_image(&node)?;
    node.configure(PRIMARY_CONFLIST, &node.primary_conflist())?;
    let daemon_set = installed_as(&api, &node, "auto")?;
    let agent = start_agent(&api, &node, &daemon_set, LOOPBACK, "istio-cni-node-one")?;
    for name in ["one", "two"] {
        meshed(&node, name)?;
        ensure!(decisions(&node, name)?.len() == 1, "{:?}", decisions(&node, name));
    }
    ensure!(list(&node)?.contains("istio-cni"), "{:?}", list(&node));
    let log = agent.log("install-cni")?;
    ensure!(log.matches("the entry is in the network's list: until").count() == 1, "{log}");
    Ok(())
}

/// From 1.6 to 2.1 and back under one agent: the entry is where each of them reads it.
#[test]
#[ignore = "needs containerd 2 and Multus: make runtimes"]
fn the_entry_follows_containerd_from_1_6_to_2_1_and_back() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    import_image(&node)?;
    node.configure(PRIMARY_CONFLIST, &node.primary_conflist())?;
    let owners = list(&node)?;
    let daemon_set = installed_as(&api, &node, "auto")?;
    let agent = start_agent(&api, &node, &daemon_set, LOOPBACK, "istio-cni-node-one")?;
    meshed(&node, "under-1-6")?;
    ensure!(list(&node)?.contains("istio-cni"), "{:?}", list(&node));

    node.restart_containerd_as(Runtime::Containerd2)?;
    meshed(&node, "under-2-1")?;
    wait_for_list(&node, &agent, "the list as its owner wrote it", |list| list == owners)?;
    meshed(&node, "beside-the-list")?;

    node.restart_containerd_as(Runtime::Debian)?;
    wait_for_list(&node, &agent, "the entry in the list", |list| list.contains("istio-cni"))?;
    wait_loaded(&node)?;
    meshed(&node, "under-1-6-again")
}

/// Pods start while the network's program rewrites its list once a second, as it would without us. Prints its figures.
#[allow(clippy::print_stdout, reason = "figures for people")]
fn quarrel(install: &str) -> Result<()> {
    let (pods, seconds) = (sample::number("QUARREL_PODS", 200), sample::number("QUARREL_SECONDS", 600));
    let api = ApiServer::start()?;
    let node = current_node(&api)?;
    let owners = list(&node)?;
    let daemon_set = installed_as(&api, &node, install)?;
    let agent = start_agent(&api, &node, &daemon_set, LOOPBACK, "istio-cni-node-one")?;
    if install == "auto" {
        wait_for_list(&node, &agent, "the list as its owner wrote it", |list| list == owners)?;
    } else {
        wait_loaded(&node)?;
    }
    let path = node.conf_dir().join(PRIMARY_CONFLIST);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let (mut redirected, mut writes, mut seen_as_written) = (0, 0, 0);
    let start = std::time::Instant::now();
    std::thread::scope(|scope| -> Result<()> {
        let writer = scope.spawn(|| -> Result<(u64, u64)> {
            let (mut writes, mut kept) = (0, 0);
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                let beside = path.with_extension("tmp");
                fs::write(&beside, &owners)?;
                fs::rename(&beside, &path)?;
                writes += 1;
                std::thread::sleep(std::time::Duration::from_secs(1));
                kept += u64::from(fs::read_to_string(&path)? == owners);
            }
            Ok((writes, kept))
        });
        let started = (0..pods).try_for_each(|count| -> Result<()> {
            let due = std::time::Duration::from_secs_f64(seconds as f64 * count as f64 / pods as f64);
            std::thread::sleep(due.saturating_sub(start.elapsed()));
            let pod = node.start_pod(&sidecar_pod(&format!("pod-{count}")))?;
            pod.wait_running(POD)?;
            redirected += u64::from(!pod.namespace()?.state_with_nft()?.is_pristine());
            pod.delete(POD)
        });
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        (writes, seen_as_written) = writer.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
        started
    })?;
    let events = api.list("events", "istio-system")?;
    let contested = events.iter().filter(|event| event["reason"] == "NetworkConfigContested").count();
    println!(
        "{install}: {redirected} of {pods} pods redirected in {} s; {seen_as_written} of {writes} writes of the list untouched a second later; {contested} events of a quarrel",
        start.elapsed().as_secs()
    );
    if install == "auto" {
        ensure!(redirected == pods && seen_as_written == writes && contested == 0);
        ensure!(list(&node)? == owners, "{:?}", list(&node));
    }
    Ok(())
}

#[test]
#[ignore = "takes ten minutes: make quarrel"]
fn quarrel_beside_the_list() -> Result<()> {
    quarrel("auto")
}

#[test]
#[ignore = "takes ten minutes: make quarrel"]
fn quarrel_in_the_list() -> Result<()> {
    quarrel("inline")
}
