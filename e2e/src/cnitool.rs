//! The CNI project's own client, `cnitool`: it runs the plugins of a conflist and passes them exactly what it is reported.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::tools;
use test_support::netns::{Families, Namespace};
use test_support::process::Output;

/// Where Debian keeps the reference plugins (`bridge`, `host-local`, `loopback`, `portmap` ...).
pub const DEBIAN_PLUGINS: &str = "/usr/lib/cni";

/// The folder of a `bridge` and a `host-local` that know CNI 1.1.0.
///
/// # Errors
/// They are not built.
pub fn current_plugins() -> Result<PathBuf> {
    tools::built("host-local")?;
    let bridge = tools::built("bridge")?;
    bridge.parent().map(Path::to_owned).context("the plugin has a folder")
}

/// A configuration folder, a plugin search path and a stand-in for the node: a namespace in which `cnitool` and the plugins run, so that bridges and
/// routes of the node come and go with this value. The plugins' result cache (`/var/lib/cni`) is private to it as well.
#[derive(Debug)]
pub struct CniTool {
    node: Namespace,
    folder: TempDir,
    plugins: Vec<PathBuf>,
    cni_args: Vec<(String, String)>,
    capabilities: Option<String>,
}

impl CniTool {
    /// A client with no configuration, whose plugins are Debian's.
    pub fn new() -> Result<Self> {
        let folder = test_support::leftovers::temp_dir()?;
        for part in ["net.d", "state", "cache"] {
            fs::create_dir(folder.path().join(part))?;
        }
        Ok(Self {
            node: Namespace::empty(Families::Dual)?,
            folder,
            plugins: vec![PathBuf::from(DEBIAN_PLUGINS)],
            cni_args: Vec::new(),
            capabilities: None,
        })
    }

    /// The namespace that stands for the node's.
    pub fn node(&self) -> &Namespace {
        &self.node
    }

    /// The configuration folder (NETCONFPATH).
    pub fn conf_dir(&self) -> PathBuf {
        self.folder.path().join("net.d")
    }

    /// A folder for the plugins' own files, such as the `dataDir` of host-local.
    pub fn state_dir(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    /// Writes a file into the configuration folder. `cnitool` finds a network by the `name` inside.
    pub fn configure(&self, file: &str, content: &Value) -> Result<()> {
        fs::write(self.conf_dir().join(file), content.to_string())
            .with_context(|| format!("cannot write {file}"))
    }

    /// Plugins are also looked for in this folder, before the others.
    pub fn add_plugin_dir(&mut self, folder: &Path) {
        self.plugins.insert(0, folder.to_owned());
    }

    /// Sets one pair of CNI_ARGS, such as `K8S_POD_NAME`.
    pub fn set_arg(&mut self, name: &str, value: &str) {
        self.cni_args.retain(|(known, _)| known != name);
        self.cni_args.push((name.to_owned(), value.to_owned()));
    }

    /// Sets the pairs of CNI_ARGS that a kubelet passes for a pod.
    pub fn set_pod(&mut self, namespace: &str, name: &str, uid: &str) {
        self.set_arg("IgnoreUnknown", "1");
        self.set_arg("K8S_POD_NAMESPACE", namespace);
        self.set_arg("K8S_POD_NAME", name);
        self.set_arg("K8S_POD_UID", uid);
        self.set_arg("K8S_POD_INFRA_CONTAINER_ID", &format!("{name}-sandbox"));
    }

    /// Sets the capability arguments (CAP_ARGS), such as `{"portMappings": [...]}`.
    pub fn set_capabilities(&mut self, capabilities: &Value) {
        self.capabilities = Some(capabilities.to_string());
    }

    /// ADD of the network named `network` to `pod`, whatever comes of it. The error object of a plugin is on standard output and error.
    pub fn add(&self, network: &str, pod: &Namespace) -> Result<Output> {
        self.call("add", network, pod)
    }

    /// ADD that must succeed: the result object.
    pub fn added(&self, network: &str, pod: &Namespace) -> Result<Value> {
        let output = self.add(network, pod)?.ok()?;
        serde_json::from_str(&output.stdout).with_context(|| format!("no CNI result: {}", output.stdout))
    }

    /// CHECK.
    pub fn check(&self, network: &str, pod: &Namespace) -> Result<Output> {
        self.call("check", network, pod)
    }

    /// DEL.
    pub fn del(&self, network: &str, pod: &Namespace) -> Result<Output> {
        self.call("del", network, pod)
    }

    fn call(&self, verb: &str, network: &str, pod: &Namespace) -> Result<Output> {
        let cnitool = tools::built("cnitool")?;
        let script =
            "mount -t tmpfs none /var/lib; mkdir /var/lib/cni; mount --bind \"$0\" /var/lib/cni; exec \"$@\"";
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-euc", script])
            .arg(self.folder.path().join("cache"))
            .arg(cnitool)
            .args([verb, network]);
        command.arg(pod.path()).env("NETCONFPATH", self.conf_dir()).env("CNI_PATH", self.plugin_path()?);
        command.env("CNI_ARGS", self.cni_args_text()?);
        if let Some(capabilities) = &self.capabilities {
            command.env("CAP_ARGS", capabilities);
        }
        self.node.run(&command)
    }

    fn plugin_path(&self) -> Result<std::ffi::OsString> {
        std::env::join_paths(&self.plugins).context("a plugin folder has a colon in its name")
    }

    fn cni_args_text(&self) -> Result<String> {
        let pairs = self.cni_args.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>();
        ensure!(pairs.iter().all(|pair| !pair.contains(';')), "CNI_ARGS cannot carry a semicolon: {pairs:?}");
        Ok(pairs.join(";"))
    }
}

/// The part of a CNI result that tests check: every address, without its prefix length.
pub fn addresses(result: &Value) -> Vec<String> {
    let ips = result["ips"].as_array().into_iter().flatten();
    let addresses = ips.filter_map(|ip| ip["address"].as_str());
    addresses.map(|address| address.split('/').next().unwrap_or_default().to_owned()).collect()
}
