//! The agent and the plugin under CRI-O, whose pods have no process of their own (`drop_infra_ctr`).
//!
//! `make runtimes CRIO=FOLDER` runs this.

use std::fs;

use anyhow::{Result, ensure};
use e2e::kube::ApiServer;
use e2e::node::{Node, Runtime, plain_pod};
use serde_json::Value;

use super::meshed;
use crate::agent_support::host_agent::HostAgent;
use crate::agent_support::{MANIFEST, POD, apply_manifest, programs, run_dir, wait_loaded};

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
    let node = Node::joined_with(Runtime::Crio, &api)?;
    apply_manifest(&api, &node, MANIFEST)?;
    let mut agent = HostAgent::new(&node, &api, &programs()?)?;
    agent.start()?;
    agent.wait_ready()?;
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
