//! What the chart starts, on a real node.
//!
//! `make chart` builds Helm and runs this.

mod agent_support;
mod chart_support;

use agent_support::{
    LOOPBACK, POD, agent_pod, apply_manifest, assert_redirected, import_image, is_ready, wait_loaded,
};
use anyhow::{Context, Result, ensure};
use chart_support::rendered_without_tests;
use e2e::kube::ApiServer;
use e2e::node::{Node, sidecar_pod};
use serde_json::json;

#[test]
#[ignore = "needs helm: make chart"]
fn the_charts_defaults_run_an_agent_that_is_ready_and_has_nothing_to_complain_of() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    import_image(&node)?;
    let daemon_set = apply_manifest(&api, &node, &rendered_without_tests(&json!({}))?)?;
    let agent = node.start_pod(&agent_pod(&daemon_set, LOOPBACK, &api, "istio-cni-node-one"))?;
    agent.wait("ready", POD, is_ready).with_context(|| agent.log("install-cni").unwrap_or_default())?;
    wait_loaded(&node)?;
    let pod = node.start_pod(&sidecar_pod("web"))?;
    pod.wait_running(POD)?;
    assert_redirected(&node, &pod)?;
    let log = agent.log("install-cni")?;
    ensure!(!log.contains("\twarn\t") && !log.contains("\terror\t"), "{log}");
    Ok(())
}
