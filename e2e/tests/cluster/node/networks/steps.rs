//! What is done to a node with a network and the agent, in one order, and what has to come of it.

use std::fs;

use super::{Network, agent};
use crate::agent_support::{IMAGE, POD, import_image_as, programs, wait_loaded};
use anyhow::{Result, ensure};
use e2e::kube::ApiServer;
use e2e::node::{Node, Pod, sidecar_pod};
use serde_json::Value;
use test_support::process::{self, until};

/// Pods that start at once.
const CROWD: usize = 5;

/// A node with a network and the agent.
pub struct Stage<'n, 's> {
    pub api: &'n ApiServer,
    pub node: &'n Node<'n>,
    pub network: &'s mut dyn Network,
    pub daemon_set: &'s Value,
    pub agent: Pod<'n>,
}

/// What is done, and how, with what has to come of it.
pub type Step = (&'static str, fn(&mut Stage<'_, '_>) -> Result<()>);

const UPGRADE: &str = "the agent is upgraded";
const UNINSTALL: &str = "`install-cni uninstall`";
/// Those for which there is one release of Istio's agent, and a command that it has not.
pub const OURS: [&str; 2] = [UPGRADE, UNINSTALL];

/// In this order.
pub const STEPS: [Step; 6] = [
    ("the network's daemon is killed", |stage| {
        stage.network.kill()?;
        let pods = crowd(stage.node, "without-daemon")?;
        if stage.network.starts_pods_alone() {
            redirected(&pods)?;
        } else {
            until("a pod to fail", POD, &[], || {
                let events = stage.api.list("events", "default")?;
                Ok(events.iter().any(|event| event["reason"] == "FailedCreatePodSandBox").then_some(()))
            })?;
        }
        stage.network.start()?;
        redirected(&pods)?;
        leave(&pods)?;
        ensure_pods_start_redirected(stage.node, "with-daemon-again")
    }),
    ("the network writes its list again", |stage| {
        stage.network.write_list()?;
        wait_loaded(stage.node)?;
        ensure_pods_start_redirected(stage.node, "upgraded")
    }),
    ("the agent ends", |stage| {
        stage.agent.delete(POD)?;
        ensure_pods_start_redirected(stage.node, "without-agent")
    }),
    (UPGRADE, |stage| {
        import_image_as(stage.node, IMAGE, "newer")?;
        stage.start_agent("istio-cni-node-two")?;
        stage.agent.delete(POD)
    }),
    (UNINSTALL, |stage| {
        let owners = without_ours(&stage.list()?);
        let mut uninstall = process::command(programs()?.join("install-cni"), ["uninstall"]);
        uninstall.arg("--mounted-cni-net-dir").arg(stage.node.conf_dir());
        uninstall.arg("--mounted-cni-bin-dir").arg(stage.node.bin_dir());
        stage.node.run(&uninstall)?.ok()?;
        let list = stage.list()?;
        ensure!(list == owners, "{list:#}");
        until("pods without rules", POD, &[], || {
            let pod = stage.node.start_pod(&sidecar_pod("left"))?;
            pod.wait_running(POD)?;
            let is_untouched = pod.namespace()?.state_with_nft()?.is_pristine();
            pod.delete(POD)?;
            Ok(is_untouched.then_some(()))
        })
    }),
    ("the agent comes after the network", |stage| stage.start_agent("istio-cni-node-three")),
];

impl Stage<'_, '_> {
    /// Starts another pod of the agent, and a few of the mesh.
    fn start_agent(&mut self, name: &str) -> Result<()> {
        self.agent = agent::start(self.api, self.node, self.daemon_set, name)?;
        agent::wait_installed(self.node, &self.agent)?;
        ensure_pods_start_redirected(self.node, name)
    }

    fn list(&self) -> Result<Value> {
        Ok(serde_json::from_slice(&fs::read(self.node.conf_dir().join(self.network.list()))?)?)
    }
}

/// A list without the agent's entry.
fn without_ours(list: &Value) -> Value {
    let mut list = list.clone();
    if let Some(plugins) = list["plugins"].as_array_mut() {
        plugins.retain(|plugin| plugin["type"] != "istio-cni");
    }
    list
}

fn crowd<'n>(node: &'n Node<'n>, word: &str) -> Result<Vec<Pod<'n>>> {
    (0..CROWD).map(|number| node.start_pod(&sidecar_pod(&format!("{word}-{number}")))).collect()
}

fn redirected(pods: &[Pod<'_>]) -> Result<()> {
    for pod in pods {
        pod.wait_running(POD)?;
        ensure!(!pod.namespace()?.state_with_nft()?.is_pristine(), "{} is not redirected", pod.name());
    }
    Ok(())
}

fn leave(pods: &[Pod<'_>]) -> Result<()> {
    pods.iter().try_for_each(|pod| pod.delete(POD))
}

fn ensure_pods_start_redirected(node: &Node<'_>, word: &str) -> Result<()> {
    let pods = crowd(node, word)?;
    redirected(&pods)?;
    leave(&pods)
}
