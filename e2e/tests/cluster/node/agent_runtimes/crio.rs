//! The agent, the plugin and repair under CRI-O, whose pods have no process of their own (`drop_infra_ctr`).
//!
//! `make runtimes CRIO=FOLDER` runs this.

use std::fs;

use anyhow::{Context, Result, ensure};
use e2e::kube::ApiServer;
use e2e::node::{Node, Pod, Runtime, plain_pod};
use e2e::validation;
use serde_json::{Value, json};
use test_support::process::until;

use super::{list, meshed};
use crate::agent_support::host_agent::HostAgent;
use crate::agent_support::{MANIFEST, POD, apply_manifest, programs, run_dir, wait_loaded};
use crate::chart_support::yaml;

fn node(api: &ApiServer) -> Result<Node<'_>> {
    Node::joined_with(Runtime::Crio, api)
}

/// An agent on the node itself, ready.
fn agent<'n>(api: &ApiServer, node: &'n Node<'n>, env: &[(&'static str, &str)]) -> Result<HostAgent<'n>> {
    let mut agent = HostAgent::new(node, api, &programs()?)?;
    agent.env = [("MOUNTED_PROC_DIR", "/proc"), ("MOUNTED_CNI_NETNS_DIR", "/run/netns")]
        .iter()
        .chain(env)
        .map(|(name, value)| (*name, (*value).to_owned()))
        .collect();
    agent.start()?;
    agent.wait_ready()?;
    Ok(agent)
}

/// What the plugin noted of its decisions about a pod.
fn decisions(node: &Node<'_>, pod: &str) -> Result<Vec<Value>> {
    let log = fs::read_to_string(run_dir(node).join("istio-cni.log"))?;
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    Ok(lines.filter(|line| line["pod"] == format!("default/{pod}") && line["decision"].is_string()).collect())
}

/// Annotations arrive with the capability, so that nobody is asked about a pod outside of the mesh.
#[test]
#[ignore = "needs CRI-O: make runtimes CRIO=FOLDER"]
fn crio_passes_annotations_and_its_pods_are_redirected() -> Result<()> {
    let api = ApiServer::start()?;
    let node = node(&api)?;
    apply_manifest(&api, &node, MANIFEST)?;
    let _agent = agent(&api, &node, &[])?;
    wait_loaded(&node)?;
    meshed(&node, "web")?;

    let outside = node.start_pod(&plain_pod("outside"))?;
    outside.wait_running(POD)?;
    ensure!(outside.namespace()?.state_with_nft()?.is_pristine(), "a pod outside of the mesh has rules");
    let seen = decisions(&node, "outside")?;
    ensure!(
        matches!(&*seen, [one] if one["decision"] == "skip" && one["source"] == "annotations"),
        "{seen:#?}"
    );
    outside.delete(POD)?;
    let seen = decisions(&node, "web")?;
    ensure!(matches!(&*seen, [one] if one["decision"] == "redirect"), "{seen:#?}");

    // Its sandbox is made anew, and its network with it.
    let web = node.pod("default", "web");
    web.delete(POD)?;
    meshed(&node, "web")
}

/// CRI-O asks for STATUS only while it starts, so a pod shows that it reads the entry beside the list.
#[test]
#[ignore = "needs CRI-O: make runtimes CRIO=FOLDER"]
fn crio_reads_the_entry_beside_the_list_and_again_after_its_restart() -> Result<()> {
    let api = ApiServer::start()?;
    let node = node(&api)?;
    let owners = list(&node)?;
    apply_manifest(&api, &node, MANIFEST)?;
    let _agent = agent(&api, &node, &[("CNI_INSTALL", "auto")])?;
    wait_loaded(&node)?;
    let is_owners = || Ok((list(&node)? == owners).then_some(()));
    until("the list as its owner wrote it", POD, &[], is_owners)
        .with_context(|| format!("{:?}", list(&node)))?;
    meshed(&node, "beside")?;
    ensure!(node.conf_dir().join("podnet").exists(), "{:?}", fs::read_dir(node.conf_dir()));
    node.restart_containerd()?;
    meshed(&node, "after")
}

fn held_back(pod: &Pod<'_>) -> Result<()> {
    pod.wait("to be held back", POD, |pod| {
        let status = pod["status"]["initContainerStatuses"].as_array()?.first()?;
        let ends = [&status["state"]["terminated"], &status["lastState"]["terminated"]];
        ends.into_iter().any(|end| end["exitCode"] == 126).then_some(())
    })
}

/// A broken pod has a process, by which its namespace is found, only while its validation runs.
#[test]
#[ignore = "needs CRI-O: make runtimes CRIO=FOLDER"]
fn a_broken_pod_of_crio_is_repaired_in_place() -> Result<()> {
    let api = ApiServer::start()?;
    let node = node(&api)?;
    node.import(&validation::image()?)?;
    let manifest = MANIFEST.replace("# repair-in-place: ", "");
    apply_manifest(&api, &node, &manifest)?;
    // There before the plugin.
    let mut broken = yaml(validation::MANIFEST)?;
    broken["metadata"]["name"] = json!("broken");
    let pod = node.start_pod(&broken)?;
    held_back(&pod)?;
    let mut agent = agent(&api, &node, &[("REPAIR_REPAIR_PODS", "true")])?;
    let repaired = pod.wait_running(POD);
    let events: Vec<Value> = api
        .list("events", "default")?
        .into_iter()
        .filter(|event| event["involvedObject"]["name"] == "broken")
        .collect();
    repaired.with_context(|| format!("{events:#?}"))?;
    agent.stop(nix::sys::signal::Signal::SIGTERM)
}
