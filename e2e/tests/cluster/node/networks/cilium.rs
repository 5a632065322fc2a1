//! Cilium's agent, operator and CNI plugin, with the settings of its chart.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use super::{Network, start_kube_proxy};
use crate::agent_support::POD;
use crate::chart_support::{find, helm, objects};
use anyhow::{Context, Result};
use e2e::kube::ApiServer;
use e2e::node::Node;
use serde_json::{Value, json};
use test_support::leftovers::cgroup_roots;
use test_support::process::{self, Background, until};

const LIST: &str = "05-cilium.conflist";
const NAMESPACE: &str = "kube-system";
/// Networks of all nodes. The operator gives each a part.
const OF_ALL_NODES: [&str; 2] = ["10.244.0.0/16", "fd44::/104"];
/// Beside the chart's defaults: both families, none of what needs more programs, and the node's interface, which has no way out by which Cilium would know it.
const VALUES: [&str; 5] = [
    "devices=eth0",
    "ipv6.enabled=true",
    "hubble.enabled=false",
    "endpointHealthChecking.enabled=false",
    "operator.prometheus.enabled=false",
];
const SOCKET: &str = "/run/cilium/cilium.sock";

/// Cilium on a node.
pub struct Cilium<'n> {
    node: &'n Node<'n>,
    api: &'n ApiServer,
    folder: PathBuf,
    config: PathBuf,
    daemon: Option<Background>,
    _operator: Background,
    kube_proxy: Option<Background>,
    _membership: Membership,
}

impl<'n> Cilium<'n> {
    /// Not started yet, with these values of its chart.
    pub fn new(api: &'n ApiServer, node: &'n Node<'n>, values: &[&str]) -> Result<Self> {
        let folder: PathBuf =
            std::env::var_os("CILIUM").context("CILIUM names no folder: run make networks")?.into();
        let config = node.state_dir().join("cilium");
        let settings = settings(&folder, values)?;
        write_settings(&config, &settings, node)?;
        let roots = cgroup_roots();
        let root = roots.iter().find(|root| root.join("cgroup.controllers").exists());
        let root = root.context("no control groups of version 2")?;
        let group = root.join(node.name());
        make_room(node, &folder, &group)?;
        let membership = Membership::new(root, &group)?;
        node.install_plugin(&folder.join("cilium-cni"))?;
        let replaces_kube_proxy = settings["kube-proxy-replacement"] == "true";
        let kube_proxy = (!replaces_kube_proxy)
            .then(|| start_kube_proxy(api, node, &OF_ALL_NODES.join(",")))
            .transpose()?;
        let operator = start(api, node, &config, &folder.join("cilium-operator-generic"))?;
        Ok(Self {
            node,
            api,
            folder,
            config,
            daemon: None,
            _operator: operator,
            kube_proxy,
            _membership: membership,
        })
    }

    fn ask(&self, path: &str) -> Result<String> {
        let url = format!("http://localhost{path}");
        let curl = process::command("curl", ["--silent", "--unix-socket", SOCKET, &url]);
        Ok(self.node.run(&curl)?.stdout)
    }
}

impl Network for Cilium<'_> {
    fn list(&self) -> &'static str {
        LIST
    }

    fn start(&mut self) -> Result<()> {
        let agent = start(self.api, self.node, &self.config, &self.folder.join("cilium-agent"))?;
        let daemon = self.daemon.insert(agent);
        let list = self.node.conf_dir().join(LIST);
        until("Cilium to be ready", POD, &[daemon], || {
            let health = process::command(
                "curl",
                ["--silent", "--fail", "--header", "brief: true", "http://127.0.0.1:9879/healthz"],
            );
            Ok((list.exists() && self.node.run(&health)?.status.success()).then_some(()))
        })
    }

    fn kill(&mut self) -> Result<()> {
        self.daemon.take();
        until("Cilium's agent to be gone", POD, &[], || Ok(self.ask("/v1/healthz")?.is_empty().then_some(())))
    }

    /// The agent writes it when it starts.
    fn write_list(&mut self) -> Result<()> {
        self.kill()?;
        self.start()
    }

    fn starts_pods_alone(&self) -> bool {
        false
    }

    fn serves(&self, pod: SocketAddr) -> Result<bool> {
        if self.kube_proxy.is_some() {
            return super::kube_proxy_serves(self.node, pod);
        }
        let services: Vec<Value> = serde_json::from_str(&self.ask("/v1/service")?)?;
        // The pod's `hostPort` is another one.
        Ok(services.iter().map(|service| &service["spec"]).any(|service| {
            let is_pods = |backend: &Value| backend["ip"] == pod.ip().to_string();
            service["flags"]["type"] == "ClusterIP"
                && service["backend-addresses"].as_array().into_iter().flatten().any(is_pods)
        }))
    }
}

/// What the chart writes for these values into the ConfigMap of agent and operator.
fn settings(folder: &Path, values: &[&str]) -> Result<Value> {
    let chart = folder.join("chart").display().to_string();
    let mut words = vec!["template", "cilium", &chart, "--namespace", NAMESPACE];
    words.extend(["--show-only", "templates/cilium-configmap.yaml"]);
    let [v4, v6] = OF_ALL_NODES;
    let networks = [
        format!("ipam.operator.clusterPoolIPv4PodCIDRList={{{v4}}}"),
        format!("ipam.operator.clusterPoolIPv6PodCIDRList={{{v6}}}"),
    ];
    let values = VALUES.iter().chain(values).copied().chain(networks.iter().map(String::as_str));
    words.extend(values.flat_map(|value| ["--set", value]));
    let rendered = helm(None, &words)?.ok()?.stdout;
    let maps = objects(&rendered)?;
    Ok(find(&maps, "ConfigMap", "cilium-config")?["data"].clone())
}

/// A file for each setting, as the ConfigMap is mounted, with this node's folders.
fn write_settings(config: &Path, settings: &Value, node: &Node<'_>) -> Result<()> {
    let mut settings = settings.as_object().context("no settings")?.clone();
    settings.insert("procfs".to_owned(), json!("/proc"));
    let list = node.conf_dir().join(LIST);
    settings.insert("write-cni-conf-when-ready".to_owned(), json!(list));
    fs::create_dir(config)?;
    for (name, value) in &settings {
        fs::write(config.join(name), value.as_str().context("a setting that is no text")?)?;
    }
    Ok(())
}

/// What Cilium finds on a node of its own: a file system of BPF, and the root of all control groups of version 2, which are the node's here.
/// Settings of the kernel that the whole machine has are hidden from it.
const ROOM: &str = r#"mkdir -p /run/cilium/cgroupv2 /var/lib/cilium "$0/processes"
mount -t bpf bpf /sys/fs/bpf
mount --bind "$0" /run/cilium/cgroupv2
ln -s "$1/bpf" /var/lib/cilium/bpf
for setting in unprivileged_bpf_disabled timer_migration; do
    cp "/proc/sys/kernel/$setting" "$2/$setting" && mount --bind "$2/$setting" "/proc/sys/kernel/$setting"
done
for process in /proc/[0-9]*; do
    echo "${process#/proc/}" >"$0/processes/cgroup.procs" || [ ! -d "$process" ]
done"#;

fn make_room(node: &Node<'_>, folder: &Path, group: &Path) -> Result<()> {
    let mut room = process::command("sh", ["-euc", ROOM]);
    room.arg(group).arg(folder).arg(node.state_dir());
    node.run(&room)?.ok().map(drop)
}

/// A program of Cilium on the node.
fn start(api: &ApiServer, node: &Node<'_>, config: &Path, program: &Path) -> Result<Background> {
    let mut command = process::command(program, [format!("--config-dir={}", config.display())]);
    command.arg(format!("--k8s-kubeconfig-path={}", api.admin_kubeconfig().display()));
    command.env("K8S_NODE_NAME", node.name()).env("CILIUM_K8S_NAMESPACE", NAMESPACE);
    // The agent compiles its programs with the folder's clang.
    let folders = [program.parent().context("no folder")?.display().to_string(), std::env::var("PATH")?];
    command.env("PATH", folders.join(":"));
    let program = program.file_name().context("no program")?.to_string_lossy();
    let log = node.state_dir().join(format!("{program}.log"));
    Ok(Background::start(&program, &node.command(&command), &log)?.killed_on_drop())
}

/// While it lives, this process and its clients are in a control group.
struct Membership(PathBuf);

impl Membership {
    fn new(root: &Path, group: &Path) -> Result<Self> {
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let before = own.lines().find_map(|line| line.strip_prefix("0::/")).context("no control group")?;
        let membership = Self(root.join(before));
        fs::write(group.join("processes/cgroup.procs"), "0")?;
        Ok(membership)
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("cgroup.procs"), "0");
    }
}
