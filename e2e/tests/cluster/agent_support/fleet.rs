//! Agents of nodes that exist at the API server only, and the cluster's taint controller, with the rights of their service accounts. Agents have the
//! settings of the ConfigMap.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use e2e::agent::{DIRECTORIES, get, memory_kib};
use e2e::http;
use e2e::kube::ApiServer;
use e2e::program;
use test_support::port::free_port;
use test_support::process::{Background, until};

use super::NAMESPACE;

/// How long anything may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(300);
pub const CONFLIST: &str = r#"{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"bridge"}]}"#;

/// One of them, while it runs.
pub struct FleetAgent {
    pub process: Background,
    monitoring: u16,
}

impl FleetAgent {
    /// Starts the agent of a node, of the manifest in this namespace, with a folder of its own.
    pub fn start(
        api: &ApiServer,
        namespace: &str,
        folder: &Path,
        node: &str,
        env: &[(&str, &str)],
    ) -> Result<Self> {
        let mut command = Command::new(program::under_test("install-cni")?);
        command.args(["--log_output_level=all:debug", "--ctrlz_port=0"]).env_clear();
        for (name, part) in DIRECTORIES.into_iter().chain([("MOUNTED_CNI_NETNS_DIR", "netns")]) {
            fs::create_dir_all(folder.join(part))?;
            command.env(name, folder.join(part));
        }
        fs::copy(program::under_test("istio-cni")?, folder.join("image/istio-cni"))?;
        fs::write(folder.join("net.d/10-net.conflist"), CONFLIST)?;
        let config = api.get("configmap", namespace, "istio-cni-config")?;
        for (name, value) in config["data"].as_object().context("data")? {
            command.env(name, value.as_str().unwrap_or_default());
        }
        command.env("NODE_NAME", node).env("MOUNTED_PROC_DIR", "/proc");
        Self::run(api, folder, command, [namespace, "istio-cni", "istio-cni-node-x"], env)
    }

    /// Starts a replica of the cluster's taint controller, with a folder of its own.
    pub fn taint_controller(
        api: &ApiServer,
        folder: &Path,
        name: &str,
        env: &[(&str, &str)],
    ) -> Result<Self> {
        let mut command = Command::new(program::under_test("install-cni")?);
        command.args(["taint-controller", "--ctrlz_port=0"]).env_clear();
        fs::create_dir_all(folder.join("account"))?;
        command.env("SERVICE_ACCOUNT_DIR", folder.join("account"));
        Self::run(api, folder, command, [NAMESPACE, "istio-cni-taint-controller", name], env)
    }

    /// With the rights of a namespace's account, as a pod of this name.
    pub fn run(
        api: &ApiServer,
        folder: &Path,
        mut command: Command,
        [namespace, account, pod]: [&str; 3],
        env: &[(&str, &str)],
    ) -> Result<Self> {
        fs::copy(api.ca_path(), folder.join("account/ca.crt"))?;
        fs::write(folder.join("account/token"), api.token(namespace, account)?)?;
        let monitoring = free_port()?;
        let (port, health) = (api.port().to_string(), free_port()?.to_string());
        let common = [
            ("KUBERNETES_SERVICE_HOST", "127.0.0.1"),
            ("KUBERNETES_SERVICE_PORT", &port),
            ("POD_NAMESPACE", namespace),
            ("POD_NAME", pod),
            ("HEALTH_PORT", &health),
            ("MONITORING_PORT", &monitoring.to_string()),
            ("MONITORING_ADDRESS", "127.0.0.1"),
        ];
        command.envs(common).envs(env.iter().copied());
        let process = Background::start("install-cni", &command, &folder.join("log"))?.killed_on_drop();
        Ok(Self { process, monitoring })
    }

    /// A metric; none while the agent does not answer, or has no such metric.
    pub fn metric(&self, name: &str) -> Option<f64> {
        http::metric(&get(self.monitoring, "/metrics")?.1, name)
    }

    /// A metric; zero where it has not counted anything.
    pub fn count(&self, name: &str) -> f64 {
        self.metric(name).unwrap_or_default()
    }

    /// Waits until a metric is as high.
    pub fn wait_metric(&self, name: &str, least: f64) -> Result<()> {
        until(name, LIMIT, &[&self.process], || {
            Ok(self.metric(name).is_some_and(|value| value >= least).then_some(()))
        })
        .with_context(|| self.process.log())
    }

    /// The most memory it ever had, in KiB.
    pub fn most_memory(&self) -> u64 {
        memory_kib(self.process.id(), "VmHWM:")
    }

    /// The processor time it has used, in seconds.
    pub fn processor_seconds(&self) -> Result<f64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.process.id()))?;
        // The name, in parentheses, may hold spaces; user and system time are the 12th and 13th field after it.
        let (_, fields) = stat.rsplit_once(')').context("a name")?;
        let ticks: Vec<f64> =
            fields.split_whitespace().skip(11).take(2).map(str::parse).collect::<Result<_, _>>()?;
        Ok(ticks.iter().sum::<f64>() / 100.0)
    }
}
