//! flannel's daemon and CNI plugin, as its DaemonSet installs them: VXLAN, both families.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;

use super::{Network, start_kube_proxy};
use crate::agent_support::POD;
use anyhow::{Context, Result};
use e2e::kube::ApiServer;
use e2e::node::Node;
use serde_json::json;
use test_support::process::{self, Background, until};

const LIST: &str = r#"{
  "name": "cbr0",
  "cniVersion": "0.3.1",
  "plugins": [
    {"type": "flannel", "delegate": {"hairpinMode": true, "isDefaultGateway": true}},
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
"#;
/// Networks of all nodes, and this node's parts of them.
const NETWORKS: &str = r#"{"Network": "10.244.0.0/16", "EnableIPv6": true, "IPv6Network": "fd44::/48", "Backend": {"Type": "vxlan"}}"#;
const OF_NODE: [&str; 2] = ["10.244.7.0/24", "fd44:0:0:7::/64"];
const OF_ALL_NODES: &str = "10.244.0.0/16,fd44::/48";

/// flannel on a node.
pub struct Flannel<'n> {
    node: &'n Node<'n>,
    api: &'n ApiServer,
    programs: PathBuf,
    daemon: Option<Background>,
    _kube_proxy: Background,
}

impl<'n> Flannel<'n> {
    /// Not started yet.
    pub fn new(api: &'n ApiServer, node: &'n Node<'n>) -> Result<Self> {
        let programs = std::env::var_os("FLANNEL").context("FLANNEL names no folder: run make networks")?;
        let ranges = json!({"spec": {"podCIDR": OF_NODE[0], "podCIDRs": OF_NODE}}).to_string();
        api.kubectl(&["patch", "node", node.name(), "-p", &ranges])?;
        fs::write(node.state_dir().join("net-conf.json"), NETWORKS)?;
        let kube_proxy = start_kube_proxy(api, node, OF_ALL_NODES)?;
        Ok(Self { node, api, programs: programs.into(), daemon: None, _kube_proxy: kube_proxy })
    }
}

impl Network for Flannel<'_> {
    fn list(&self) -> &'static str {
        "10-flannel.conflist"
    }

    /// It writes what the plugin reads.
    fn start(&mut self) -> Result<()> {
        let subnets = self.node.file("/run/flannel/subnet.env");
        let _ = fs::remove_file(&subnets);
        let mut command =
            process::command(self.programs.join("flanneld"), ["--kube-subnet-mgr", "--ip-masq"]);
        command.arg("--iface=eth0");
        command.arg(format!("--net-config-path={}", self.node.state_dir().join("net-conf.json").display()));
        command.arg(format!("--kubeconfig-file={}", self.api.admin_kubeconfig().display()));
        command.env("NODE_NAME", self.node.name());
        let log = self.node.state_dir().join("flanneld.log");
        let daemon = Background::start("flanneld", &self.node.command(&command), &log)?.killed_on_drop();
        until("flannel's subnet", POD, &[&daemon], || Ok(subnets.exists().then_some(())))?;
        self.daemon = Some(daemon);
        Ok(())
    }

    /// What its init containers do.
    fn write_list(&mut self) -> Result<()> {
        self.node.install_plugin(&self.programs.join("flannel"))?;
        // `cp -f`: the file is truncated and written, not renamed.
        Ok(fs::write(self.node.conf_dir().join(self.list()), LIST)?)
    }

    fn kill(&mut self) -> Result<()> {
        self.daemon.take();
        Ok(())
    }

    fn starts_pods_alone(&self) -> bool {
        true
    }

    fn serves(&self, pod: SocketAddr) -> Result<bool> {
        super::kube_proxy_serves(self.node, pod)
    }
}
