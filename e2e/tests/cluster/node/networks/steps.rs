//! What is done to a node with a network and the agent, in one order, and what has to come of it.

use std::fs;

use super::Network;
use crate::agent_support::{POD, programs, wait_loaded};
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
    pub agent: &'s Pod<'n>,
}

/// What is done, and how, with what has to come of it.
pub type Step = (&'static str, fn(&mut Stage<'_, '_>) -> Result<()>);

/// In this order.
pub const STEPS: [Step; 4] = [
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
    ("`install-cni uninstall`", |stage| {
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
];

impl Stage<'_, '_> {
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
