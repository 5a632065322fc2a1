//! The agent on a node outside of any pod: it starts and ends at once.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};
use e2e::agent::get;
use e2e::kube::ApiServer;
use e2e::node::Node;
use nix::sys::signal::Signal;
use test_support::process::{Background, until};

use super::{NAMESPACE, POD, run_dir};

/// An agent that runs on the node outside of any pod, with the service account's token.
pub struct HostAgent<'n> {
    node: &'n Node<'n>,
    program: PathBuf,
    image: PathBuf,
    pub account: PathBuf,
    port: u16,
    pub plugin_account: &'static str,
    /// The entry, where it is not the built-in one.
    pub template: Option<&'static str>,
    /// More of its environment.
    pub env: Vec<(&'static str, String)>,
    running: Option<Background>,
}

impl<'n> HostAgent<'n> {
    pub fn new(node: &'n Node<'n>, api: &ApiServer, programs: &Path) -> Result<Self> {
        let (image, account) = (node.state_dir().join("image"), node.state_dir().join("account"));
        for folder in [&image, &account, &run_dir(node)] {
            fs::create_dir(folder)?;
        }
        fs::copy(programs.join("istio-cni"), image.join("istio-cni"))?;
        fs::copy(api.ca_path(), account.join("ca.crt"))?;
        fs::write(account.join("token"), api.token(NAMESPACE, "istio-cni")?)?;
        // Another build can be tried, such as the static one of the image.
        let program =
            std::env::var_os("INSTALL_CNI").map_or_else(|| programs.join("install-cni"), Into::into);
        Ok(Self {
            node,
            program,
            image,
            account,
            port: api.port(),
            plugin_account: "istio-cni-plugin",
            template: None,
            env: Vec::new(),
            running: None,
        })
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env_clear().args(["--log_output_level=info", "--ctrlz_port=0"]);
        for (name, path) in [
            ("MOUNTED_CNI_NET_DIR", &self.node.conf_dir()),
            ("MOUNTED_CNI_BIN_DIR", &self.node.bin_dir()),
            ("SOURCE_CNI_BIN_DIR", &self.image),
            ("CNI_AGENT_RUN_DIR", &run_dir(self.node)),
            ("SERVICE_ACCOUNT_DIR", &self.account),
        ] {
            command.env(name, path);
        }
        command
            .env("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            .env("KUBERNETES_SERVICE_PORT", self.port.to_string());
        command
            .env("POD_NAMESPACE", NAMESPACE)
            .env("POD_NAME", "istio-cni-node-x")
            .env("NODE_NAME", self.node.name())
            .env("PLUGIN_SERVICE_ACCOUNT", self.plugin_account)
            .envs(self.template.map(|template| ("CNI_NETWORK_CONFIG", template)))
            .envs(self.env.iter().map(|(name, value)| (name, value)));
        self.node.command(&command)
    }

    pub fn start(&mut self) -> Result<()> {
        let log = self.node.state_dir().join("agent.log");
        self.running = Some(Background::start("install-cni", &self.command(), &log)?.killed_on_drop());
        Ok(())
    }

    pub fn wait_ready(&self) -> Result<()> {
        let running: Vec<&Background> = self.running.iter().collect();
        until("the agent to be ready", POD, &running, || Ok(self.wait_ready_now().ok()))
    }

    pub fn stop(&mut self, signal: Signal) -> Result<()> {
        if let Some(running) = self.running.take() {
            running.signal(signal)?;
            running.wait(POD)?;
        }
        Ok(())
    }

    /// A new version of the plugin in the image: bytes after an executable's end change nothing but its content.
    pub fn new_version(&self, version: usize) -> Result<()> {
        let mut content = fs::read(self.image.join("istio-cni"))?;
        content.extend_from_slice(version.to_string().as_bytes());
        let new = self.image.join("istio-cni.new");
        fs::write(&new, content)?;
        fs::set_permissions(&new, fs::metadata(self.image.join("istio-cni"))?.permissions())?;
        Ok(fs::rename(new, self.image.join("istio-cni"))?)
    }

    /// Ready at this moment, or an error that says why not.
    pub fn wait_ready_now(&self) -> Result<()> {
        let answer = self.node.namespace().enter(|| get(8000, "/readyz"))?;
        ensure!(answer.as_ref().is_some_and(|(status, _)| *status == 200), "{answer:?}");
        Ok(())
    }
}
