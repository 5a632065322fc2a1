//! Configuration of containerd and kubelet.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use nix::sys::statfs::{OVERLAYFS_SUPER_MAGIC, statfs};
use serde_json::{Value, json};

use super::host::announced_address;
use super::{KUBELET_READ_ONLY_PORT, Runtime};
use crate::image::PAUSE;
use crate::kube::ApiServer;
use crate::tools;
use test_support::netns::Families;
use test_support::process;

/// Writes the configuration files of a node's work folder but the runtime's.
pub(super) fn write_all(folder: &Path, name: &str, api: Option<&ApiServer>) -> Result<()> {
    fs::write(folder.join("kubelet.json"), kubelet(folder, name, api).to_string())?;
    fs::write(folder.join("resolv.conf"), "nameserver 10.96.0.10\n")?;
    if let Some(api) = api {
        let identity = api.node_identity(name)?;
        let user = json!({"client-certificate": identity.certificate, "client-key": identity.key});
        fs::write(folder.join("node.kubeconfig"), api.kubeconfig(&user)?.to_string())?;
    }
    Ok(())
}

pub(super) fn primary_conflist(state: &Path, families: Families) -> Value {
    let networks = [("10.88.0.0/24", "0.0.0.0/0"), ("fd88::/64", "::/0")];
    let networks: Vec<_> = families.each().map(|v6| networks[usize::from(v6)]).collect();
    let routes: Vec<Value> = networks.iter().map(|(_, all)| json!({"dst": all})).collect();
    let ranges: Vec<Value> = networks.iter().map(|(subnet, _)| json!([{"subnet": subnet}])).collect();
    json!({
        "cniVersion": "1.0.0",
        "name": "podnet",
        "plugins": [{
            "type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
            "ipam": {
                "type": "host-local", "dataDir": state.join("leases"),
                "ranges": ranges,
                "routes": routes,
            },
        }],
    })
}

pub(super) fn write_containerd(folder: &Path, runtime: Runtime) -> Result<()> {
    Ok(fs::write(folder.join("containerd.toml"), containerd(folder, runtime)?)?)
}

/// Whether a folder is on an overlay: the kernel does not stack another one on its upper layer.
pub(super) fn is_overlay(folder: &Path) -> Result<bool> {
    Ok(statfs(folder)?.filesystem_type() == OVERLAYFS_SUPER_MAGIC)
}

pub(super) fn containerd_command(program: &Path, folder: &Path) -> Command {
    process::command(program, ["-c", &folder.join("containerd.toml").to_string_lossy(), "-l", "debug"])
}

pub(super) fn socket(folder: &Path) -> PathBuf {
    folder.join("containerd.sock")
}

pub(super) fn kubelet_command(
    folder: &Path,
    name: &str,
    families: Families,
    joined: bool,
) -> Result<Command> {
    let path = |part: &str| folder.join(part).display().to_string();
    let mut command = Command::new(tools::built("kubelet")?);
    command.args([
        format!("--config={}", path("kubelet.json")),
        format!("--root-dir={}", path("kubelet")),
        format!("--cert-dir={}", path("kubelet-pki")),
        format!("--hostname-override={name}"),
        format!("--node-ip={}", announced_address(families)),
        "--v=2".to_owned(),
    ]);
    if joined {
        command.arg(format!("--kubeconfig={}", path("node.kubeconfig")));
    }
    Ok(command)
}

/// Everything that a container runtime leaves on a machine goes to the work folder.
fn containerd(folder: &Path, runtime: Runtime) -> Result<String> {
    let snapshotter = if is_overlay(folder)? { "native" } else { "overlayfs" };
    let (root, socket) = (folder.display(), socket(folder));
    let common = format!(
        r#"root = "{root}/containerd"
state = "{root}/containerd-state"

[grpc]
address = "{}"

[plugins."io.containerd.internal.v1.opt"]
path = "{root}/containerd-opt"
"#,
        socket.display()
    );
    // Without CAP_SYS_RESOURCE runc cannot lower an OOM score, so pods must not ask for it.
    Ok(match runtime {
        Runtime::Debian => format!(
            r#"version = 2
{common}
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{root}/bin"
conf_dir = "{root}/net.d"

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "{snapshotter}"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"#
        ),
        Runtime::Containerd2 | Runtime::Crio => format!(
            r#"version = 3
{common}
[plugins."io.containerd.cri.v1.images"]
snapshotter = "{snapshotter}"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE}"

[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{root}/bin"]
conf_dir = "{root}/net.d"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"#
        ),
    })
}

fn kubelet(folder: &Path, name: &str, api: Option<&ApiServer>) -> Value {
    let mut config = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": format!("unix://{}", socket(folder).display()),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": format!("/{name}"),
        "failCgroupV1": false,
        "failSwapOn": false,
        "localStorageCapacityIsolation": false,
        // The settings it wants are in place; to set them would be to set the machine's.
        "protectKernelDefaults": true,
        "evictionHard": {"memory.available": "10Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "readOnlyPort": KUBELET_READ_ONLY_PORT,
        "address": "127.0.0.1",
        "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "clusterDNS": ["10.96.0.10"],
        "clusterDomain": "cluster.local",
        "resolvConf": folder.join("resolv.conf"),
        "podLogsDir": folder.join("pod-logs"),
        "volumePluginDir": folder.join("plugins"),
        "staticPodPath": folder.join("manifests"),
        "shutdownGracePeriod": "0s",
    });
    if let Some(api) = api {
        config["authentication"]["x509"] = json!({"clientCAFile": api.ca_path()});
    }
    config
}
