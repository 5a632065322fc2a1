//! CRI-O as the runtime of a node. No registry has its programs: CRIO names a folder that holds `crio` and `pinns`; `conmon`, `runc` and `skopeo` are Debian's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Host, START, config};
use crate::image::PAUSE;
use test_support::process::{self, Background, SHORT, until};

/// A program of the folder that CRIO names.
pub(super) fn program(name: &str) -> Result<PathBuf> {
    let folder = std::env::var_os("CRIO").context("CRIO names no folder: make runtimes CRIO=FOLDER")?;
    let program = Path::new(&folder).join(name);
    ensure!(program.exists(), "CRIO has no {}", program.display());
    Ok(program)
}

/// Everything that CRI-O leaves on a machine goes to the work folder. Pods have no process of their own, as by default.
pub(super) fn write(folder: &Path) -> Result<()> {
    let (root, driver) = (folder.display(), driver(folder)?);
    fs::write(folder.join("policy.json"), r#"{"default": [{"type": "insecureAcceptAnything"}]}"#)?;
    let configuration = format!(
        r#"[crio]
root = "{root}/crio"
runroot = "{root}/crio-run"
storage_driver = "{driver}"
log_dir = "{root}/crio-log"
version_file = "{root}/crio-version"
version_file_persist = ""
clean_shutdown_file = ""

[crio.api]
listen = "{}"
stream_port = "0"

[crio.runtime]
cgroup_manager = "cgroupfs"
conmon_cgroup = "pod"
default_runtime = "runc"
drop_infra_ctr = true
pinns_path = "{}"
container_exits_dir = "{root}/crio-exits"
container_attach_socket_dir = "{root}/crio-attach"
namespaces_dir = "/var/run"
hooks_dir = []

[crio.runtime.runtimes.runc]
runtime_path = "/usr/sbin/runc"
runtime_root = "{root}/runc"
monitor_path = "/usr/bin/conmon"
monitor_cgroup = "pod"

[crio.image]
pause_image = "{PAUSE}"
pause_command = ""
signature_policy = "{root}/policy.json"

[crio.network]
network_dir = "{root}/net.d"
plugin_dirs = ["{root}/bin"]
"#,
        config::socket(folder).display(),
        program("pinns")?.display(),
    );
    Ok(fs::write(folder.join("crio.conf"), configuration)?)
}

fn driver(folder: &Path) -> Result<&'static str> {
    Ok(if config::is_overlay(folder)? { "vfs" } else { "overlay" })
}

/// CRI-O limits what the kernel lists, and `runc` fails at a controller of which the machine has no hierarchy.
const WITHOUT_HUGETLB: &str =
    r#"[ -e "$0" ] || { grep -v hugetlb /proc/cgroups >"$0" && mount --bind "$0" /proc/cgroups; }"#;

pub(super) fn start(host: &Host, folder: &Path) -> Result<Background> {
    let mut hide = process::command("sh", ["-euc", WITHOUT_HUGETLB]);
    hide.arg(folder.join("controllers"));
    process::run(&mut host.command(&hide), SHORT)?.ok()?;
    let path = |name: &str| folder.join(name).display().to_string();
    let args = ["--config", &path("crio.conf"), "--config-dir", "", "--log-level", "debug"];
    let crio = Background::start(
        "crio",
        &host.command(&process::command(program("crio")?, args)),
        &folder.join("crio.log"),
    )?
    .killed_on_drop();
    let socket = config::socket(folder);
    let mut status = host.command(&process::command(
        program("crio")?,
        ["status", "--socket", &socket.to_string_lossy(), "info"],
    ));
    until("CRI-O to answer", START, &[&crio], || {
        Ok(process::run(&mut status, SHORT)?.status.success().then_some(()))
    })?;
    Ok(crio)
}

/// Puts an image that `docker save` could have written where CRI-O has its own.
pub(super) fn import_command(folder: &Path, archive: &Path, reference: &str) -> Result<Command> {
    let (root, driver) = (folder.display(), driver(folder)?);
    let from = format!("docker-archive:{}", archive.display());
    let to = format!("containers-storage:[{driver}@{root}/crio+{root}/crio-run]{reference}");
    Ok(process::command("skopeo", ["copy", "--quiet", "--insecure-policy", &from, &to]))
}

/// The files, as the node has them, of the network namespaces of a pod's sandboxes.
pub(super) fn networks(folder: &Path, namespace: &str, name: &str) -> Result<Vec<String>> {
    let containers = folder.join("crio-run").join(format!("{}-containers", driver(folder)?));
    let Ok(containers) = fs::read_dir(containers) else { return Ok(Vec::new()) };
    // A container that goes while they are read has none.
    let texts =
        containers.flatten().filter_map(|entry| fs::read(entry.path().join("userdata/config.json")).ok());
    let configurations = texts.filter_map(|text| serde_json::from_slice::<Value>(&text).ok());
    Ok(configurations.filter_map(|configuration| network(&configuration, namespace, name)).collect())
}

fn network(configuration: &Value, namespace: &str, name: &str) -> Option<String> {
    let annotations = &configuration["annotations"];
    let is_its = annotations["io.kubernetes.cri-o.ContainerType"] == "sandbox"
        && annotations["io.kubernetes.cri-o.Namespace"] == namespace
        && annotations["io.kubernetes.cri-o.KubeName"] == name;
    let mut namespaces = configuration["linux"]["namespaces"].as_array()?.iter().filter(|_| is_its);
    let network = namespaces.find(|namespace| namespace["type"] == "network")?;
    network["path"].as_str().map(str::to_owned)
}
