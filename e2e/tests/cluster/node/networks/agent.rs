//! The agent on a node with a network: ours, or Istio's own.

use crate::agent_support::{
    DAEMON_SET, LOOPBACK, NAMESPACE, POD, agent_pod, apply_manifest, import_image, is_ready, wait_loaded,
};
use crate::chart_support::{helm_with, rendered_without_tests};
use crate::node::mesh_support::release::Release;
use anyhow::{Context, Result};
use e2e::kube::ApiServer;
use e2e::node::{Node, Pod};
use serde_json::{Value, json};

/// What redirects pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agent {
    /// Ours, with its entry where this value of `install` says.
    Ours(&'static str),
    /// That of the release that ISTIO names.
    Istios,
}

impl Agent {
    /// Its place in a cell of the table.
    pub fn place(self) -> usize {
        match self {
            Self::Ours(_) => 0,
            Self::Istios => 1,
        }
    }

    /// Gives the node its image and the cluster its objects, with ambient mode. Returns its DaemonSet.
    pub fn install(self, api: &ApiServer, node: &Node<'_>) -> Result<Value> {
        match self {
            Self::Ours(install) => {
                import_image(node)?;
                let values = json!({"install": install, "ambient": {"enabled": true}});
                apply_manifest(api, node, &rendered_without_tests(&values)?)
            }
            Self::Istios => {
                let release = Release::named()?;
                release.import_agent(node)?;
                api.create_namespace(NAMESPACE)?;
                api.apply(&istios_objects(&release, node)?)?;
                api.get("daemonset", NAMESPACE, DAEMON_SET)
            }
        }
    }
}

/// What Istio's own chart makes for a node's folders. The API server is on the node's loopback.
fn istios_objects(release: &Release, node: &Node<'_>) -> Result<String> {
    let values = json!({
        "image": release.agent_image(), "pullPolicy": "Never",
        "cniBinDir": node.bin_dir(), "cniConfDir": node.conf_dir(),
        "ambient": {"enabled": true, "shareHostNetworkNamespace": true},
    });
    let chart = release.chart("istio-cni").display().to_string();
    let words = ["template", "istio-cni", &chart, "--namespace", NAMESPACE];
    Ok(helm_with(None, &words, &[&values])?.ok()?.stdout)
}

/// Starts the pod of the agent's DaemonSet.
pub fn start<'n>(api: &ApiServer, node: &'n Node<'n>, daemon_set: &Value, name: &str) -> Result<Pod<'n>> {
    node.start_pod(&agent_pod(daemon_set, LOOPBACK, api, name))
}

/// Waits until pods are redirected and the agent is ready: beside a list of an older version, only a pod shows that the runtime reads the entry.
pub fn wait_installed(node: &Node<'_>, agent: &Pod<'_>) -> Result<()> {
    let log = || agent.log("install-cni").unwrap_or_default();
    wait_loaded(node).with_context(log)?;
    agent.wait("ready", POD, is_ready).with_context(log)?;
    Ok(())
}
