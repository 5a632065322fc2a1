//! Istio's own agent in ambient mode, with a file system like the one its DaemonSet gives it.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::ensure;
use nix::sys::signal::Signal;
use test_support::process::{Background, SHORT, until};

use super::World;
use crate::node::mesh_support::release::Release;
use e2e::agent::get;

/// Where it answers the kubelet.
const READY: u16 = 8000;

/// It looks at fixed paths; so it gets a root of its own, in which they are the node's.
const ROOT: &str = r#"
root=$1 node=$2 proc=$3 program=$4
mount --make-rprivate /
mount -t tmpfs none "$root"
for part in /*; do
    case $part in
    /host | /opt | /var) ;;
    *) if [ -L "$part" ]; then cp -P "$part" "$root$part"
       elif [ -d "$part" ]; then mkdir "$root$part"; mount --rbind "$part" "$root$part"; fi ;;
    esac
done
mkdir -p "$root/host/proc" "$root/host/opt/cni/bin" "$root/host/etc/cni/net.d" "$root/opt/cni/bin" "$root/var/run/secrets/kubernetes.io/serviceaccount"
mount --bind "$proc" "$root/host/proc"
mount --bind "$node/bin" "$root/host/opt/cni/bin"
mount --bind "$node/net.d" "$root/host/etc/cni/net.d"
mount --bind "$node/theirs" "$root/opt/cni/bin"
mount --bind "$node/account" "$root/var/run/secrets/kubernetes.io/serviceaccount"
exec chroot "$root" "$program"
"#;

/// What its account may do.
pub const RIGHTS: &str = r#"
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: istios-agent}
rules:
- {apiGroups: [""], resources: [pods, namespaces, nodes], verbs: [get, list, watch]}
- {apiGroups: [""], resources: [pods/status], verbs: [patch, update]}
- {apiGroups: [apps], resources: [daemonsets], verbs: [get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: istios-agent}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: istios-agent}
subjects: [{kind: ServiceAccount, name: agent, namespace: istio-system}]
---
apiVersion: v1
kind: Node
metadata: {name: node-1}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: istio-cni-node, namespace: istio-system}
spec:
  selector: {matchLabels: {k8s-app: istio-cni-node}}
  template:
    metadata: {labels: {k8s-app: istio-cni-node}}
    spec: {containers: [{name: install-cni, image: install-cni}]}
"#;

/// Istio's agent, running.
pub struct IstiosAgent {
    process: Background,
    log: PathBuf,
}

impl IstiosAgent {
    /// Starts it beside the same ztunnel, and waits until it is ready.
    pub fn start(world: &World, is_native: bool) -> Self {
        let release = Release::named().expect("a release of Istio");
        let folder = |part: &str| {
            let path = world.node.path(part);
            fs::create_dir_all(&path).expect("a folder");
            path
        };
        let (root, run) = (folder("root-of-istios"), folder("run-of-istios"));
        folder("ztunnel");
        complete_processes(world);
        fs::copy(release.program("istio-cni"), folder("theirs").join("istio-cni")).expect("Istio's plugin");
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-euc", ROOT, "sh"]);
        command
            .arg(root)
            .arg(world.node.path(""))
            .arg(world.proc.0.path())
            .arg(release.program("install-cni"));
        command.env("CNI_AGENT_RUN_DIR", run).env("ZTUNNEL_UDS_ADDRESS", world.socket());
        command.env("KUBERNETES_SERVICE_HOST", "127.0.0.1");
        command.envs([
            ("KUBERNETES_SERVICE_PORT", world.api.port().to_string().as_str()),
            ("AMBIENT_ENABLED", "true"),
            ("AMBIENT_IPV6", "true"),
            ("AMBIENT_RECONCILE_POD_RULES_ON_STARTUP", "true"),
            ("AMBIENT_ENABLEMENT_SELECTOR", "- podSelector: {matchLabels: {istio.io/dataplane-mode: ambient}}\n- podSelector: {matchExpressions: [{key: istio.io/dataplane-mode, operator: NotIn, values: [none]}]}\n  namespaceSelector: {matchLabels: {istio.io/dataplane-mode: ambient}}"),
            ("NATIVE_NFTABLES", if is_native { "true" } else { "false" }),
            ("ALLOW_SWITCH_TO_HOST_NS", "true"),
            ("REPAIR_ENABLED", "false"),
            ("POD_NAMESPACE", "istio-system"),
            ("SYSTEM_NAMESPACE", "istio-system"),
            ("NODE_NAME", &world.node_name),
            ("KUBERNETES_NODE_NAME", &world.node_name),
        ]);
        let log = world.node.path("istios-agent.log");
        let process = Background::start("Istio's agent", &command, &log).expect("starts").killed_on_drop();
        let agent = Self { process, log };
        agent.wait_ready();
        agent
    }

    fn wait_ready(&self) {
        let is_ready = || {
            ensure!(self.process.ended().is_none(), "it ended");
            Ok(get(READY, "/readyz").is_some_and(|answer| answer.0 == 200).then_some(()))
        };
        until("Istio's agent", SHORT, &[], is_ready)
            .unwrap_or_else(|error| panic!("{error:#}\n{}", self.log()));
    }

    /// Its log.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Ends it as the kubelet does when its DaemonSet gets another image: it leaves all as it is.
    pub fn end(self) {
        self.process.signal(Signal::SIGTERM).expect("a signal");
        self.process.wait(SHORT).unwrap_or_else(|error| panic!("{error:#}\n{}", self.log()));
    }
}

/// What it wants to know of the node's processes: when they started, and which one is the kubelet.
fn complete_processes(world: &World) {
    const KUBELET: u32 = 50;
    let proc = world.proc.0.path();
    let kubelet = proc.join(KUBELET.to_string());
    if !kubelet.exists() {
        world.proc.add(KUBELET, "0::/system.slice/kubelet.service\n", &world.host.path());
        for (file, text) in [
            ("comm", "kubelet\n"),
            ("cmdline", "/usr/bin/kubelet\0"),
            ("status", "Name:\tkubelet\nTgid:\t50\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\n"),
        ] {
            fs::write(kubelet.join(file), text).expect("writes");
        }
    }
    for entry in fs::read_dir(proc).expect("a folder") {
        let folder = entry.expect("an entry").path();
        if folder.is_dir() {
            fs::write(folder.join("stat"), format!("1 (app) S{}\n", " 7".repeat(49))).expect("writes");
        }
    }
}
