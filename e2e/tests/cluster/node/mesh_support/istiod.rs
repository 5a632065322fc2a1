//! istiod as a process of this machine beside the tests' API server, with what its chart installs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use e2e::kube::ApiServer;
use e2e::node::Node;
use e2e::traffic::Relay;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use test_support::port::free_port;
use test_support::process::{self, Background, until};

use super::release::{HUB, Release};
use crate::agent_support::{NAMESPACE, POD};
use crate::chart_support::{find, helm_with, objects};

/// A tag of its revision, by which a namespace can ask for injection.
pub const TAG: &str = "prod";
/// The port of the control plane for proxies, in their configuration.
const XDS: u16 = 15012;
/// Objects of the chart that only matter where istiod is a pod.
const OF_A_POD: [&str; 3] = ["Deployment", "HorizontalPodAutoscaler", "PodDisruptionBudget"];
/// What a stock Envoy lacks, left out.
const FOR_STOCK_ENVOY: [(&str, &str); 3] = [
    ("PILOT_ENABLE_METADATA_EXCHANGE", "false"),
    ("PILOT_ENABLE_ALPN_FILTER", "false"),
    ("PILOT_DISABLE_MX_ALPN", "true"),
];

/// A control plane that runs.
#[derive(Debug)]
pub struct Istiod {
    process: Mutex<Option<Background>>,
    folder: TempDir,
    kubeconfig: PathBuf,
    /// The variables among the values: the chart would give them to its pod.
    env: Value,
    ports: Ports,
    /// The address of its service.
    pub address: String,
}

/// Ports of this machine's loopback.
#[derive(Debug)]
struct Ports {
    http: u16,
    webhook: u16,
    xds: u16,
}

impl Istiod {
    /// The same, and pods of the node reach it at its service's address as long as the second value lives.
    pub fn start_on(
        release: &Release,
        api: &ApiServer,
        node: &Node<'_>,
        values: &Value,
    ) -> Result<(Self, Relay)> {
        let istiod = Self::start(release, api, values)?;
        node.namespace().add_address("lo", &format!("{}/32", istiod.address))?;
        let reached = node.reach_at(XDS, istiod.port())?;
        Ok((istiod, reached))
    }

    /// Installs the chart with these values on top of what the tests need, starts istiod, and waits until it injects.
    pub fn start(release: &Release, api: &ApiServer, values: &Value) -> Result<Self> {
        let ports = Ports { http: free_port()?, webhook: free_port()?, xds: free_port()? };
        let folder = tempfile::tempdir()?;
        install_charts(release, api, values, ports.webhook, folder.path())?;
        let service = api.get("service", NAMESPACE, "istiod")?;
        let address =
            service["spec"]["clusterIP"].as_str().context("istiod's service has no address")?.to_owned();
        let kubeconfig = api.admin_kubeconfig();
        let env = values["pilot"]["env"].clone();
        let istiod = Self { process: Mutex::new(None), folder, kubeconfig, env, ports, address };
        istiod.start_process(release)?;
        istiod.wait_injecting(api)?;
        Ok(istiod)
    }

    /// Its port of this machine's loopback, for proxies.
    pub fn port(&self) -> u16 {
        self.ports.xds
    }

    /// The certificate of the mesh's authority, as soon as namespaces have it.
    pub fn root_certificate(&self, api: &ApiServer) -> Result<String> {
        let process = self.process();
        let processes: Vec<&Background> = process.iter().collect();
        until("the mesh's authority", POD, &processes, || {
            let maps = api.list("configmaps", NAMESPACE)?;
            let map = maps.iter().find(|map| map["metadata"]["name"] == "istio-ca-root-cert");
            Ok(map.and_then(|map| map["data"]["root-cert.pem"].as_str().map(str::to_owned)))
        })
    }

    /// Ends it as a crash would, without a word to the proxies.
    pub fn kill(&self) -> Result<()> {
        let process = self.process().take().context("istiod does not run")?;
        process.signal(Signal::SIGKILL)?;
        process.wait(POD).map(drop)
    }

    /// Starts it again after [`Istiod::kill`], and waits until it injects.
    pub fn start_again(&self, release: &Release, api: &ApiServer) -> Result<()> {
        self.start_process(release)?;
        self.wait_injecting(api)
    }

    /// Installs another release's chart over this one's, and runs that release's program instead.
    pub fn upgrade(&self, release: &Release, api: &ApiServer, values: &Value) -> Result<()> {
        install_charts(release, api, values, self.ports.webhook, self.folder.path())?;
        self.kill()?;
        self.start_again(release, api)
    }

    /// Starts the process and waits until it says that it is ready.
    fn start_process(&self, release: &Release) -> Result<()> {
        let log = self.folder.path().join("istiod.log");
        let process = Background::start("istiod", &self.command(release), &log)?.killed_on_drop();
        let url = format!("http://127.0.0.1:{}/ready", self.ports.http);
        let mut ready = process::command("curl", ["--silent", "--fail", "--max-time", "30", &url]);
        until("istiod to be ready", POD, &[&process], || {
            Ok(process::run(&mut ready, process::SHORT)?.status.success().then_some(()))
        })?;
        *self.process() = Some(process);
        Ok(())
    }

    fn process(&self) -> MutexGuard<'_, Option<Background>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The end of its log.
    pub fn tail(&self) -> String {
        self.process().as_ref().map(Background::tail).unwrap_or_default()
    }

    fn command(&self, release: &Release) -> Command {
        let Ports { http, webhook, xds } = self.ports;
        let mut command = process::command(release.program("pilot-discovery"), ["discovery"]);
        command.arg("--kubeconfig").arg(&self.kubeconfig);
        command.arg("--meshConfig").arg(self.folder.path().join("mesh"));
        command.arg("--injectionDirectory").arg(self.folder.path().join("inject"));
        // Loopback only.
        command.args([
            format!("--httpAddr=127.0.0.1:{http}"),
            format!("--httpsAddr=127.0.0.1:{webhook}"),
            format!("--secureGRPCAddr=127.0.0.1:{xds}"),
            "--grpcAddr=".to_owned(),
            "--monitoringAddr=127.0.0.1:0".to_owned(),
            "--ctrlz_port=0".to_owned(),
        ]);
        command.current_dir(self.folder.path());
        command.env("POD_NAMESPACE", NAMESPACE).env("POD_NAME", "istiod-0").env("SERVICE_ACCOUNT", "istiod");
        command
            .env("REVISION", "default")
            .env("CLUSTER_ID", "Kubernetes")
            .env("PILOT_CERT_PROVIDER", "istiod");
        // The name by which the API server calls the webhook, in the certificate.
        command.env("ISTIOD_CUSTOM_HOST", "localhost");
        command.env("INJECTION_WEBHOOK_CONFIG_NAME", "istio-sidecar-injector");
        command.env("VALIDATION_WEBHOOK_CONFIG_NAME", "istio-validator-istio-system");
        command.env("ISTIO_DUAL_STACK", "true").envs(FOR_STOCK_ENVOY);
        for (name, value) in self.env.as_object().into_iter().flatten() {
            command.env(name, value.as_str().unwrap_or_default());
        }
        command
    }

    /// Waits until the webhooks have their authority and the namespace in which pods start has the mesh's.
    fn wait_injecting(&self, api: &ApiServer) -> Result<()> {
        let process = self.process();
        let processes: Vec<&Background> = process.iter().collect();
        for configuration in ["istio-sidecar-injector", &format!("istio-revision-tag-{TAG}")] {
            until(&format!("istiod to serve {configuration}"), POD, &processes, || {
                let webhook = api.get("mutatingwebhookconfiguration", "", configuration)?;
                let webhooks = webhook["webhooks"].as_array().cloned().unwrap_or_default();
                let has_authority = |webhook: &Value| webhook["clientConfig"]["caBundle"].is_string();
                Ok(webhooks.iter().all(has_authority).then_some(()))
            })?;
        }
        Ok(())
    }
}

/// Installs what istiod needs in the cluster, and writes what would be mounted into its pod.
fn install_charts(
    release: &Release,
    api: &ApiServer,
    values: &Value,
    webhook: u16,
    folder: &Path,
) -> Result<()> {
    let objects = rendered(release, values)?;
    let crds = release.chart("base/files/crd-all.gen.yaml");
    api.kubectl(&["apply", "--server-side", "-f", &crds.to_string_lossy()])?;
    api.kubectl(&["wait", "--for=condition=established", "crd", "--all", "--timeout=5m"])?;
    install(api, objects.clone(), webhook)?;
    write_configuration(folder, &objects)
}

/// The chart's objects with the values that the tests need, and these.
fn rendered(release: &Release, values: &Value) -> Result<Vec<Value>> {
    let base = json!({
        "global": {
            "hub": HUB, "tag": release.version(), "imagePullPolicy": "IfNotPresent",
            // Many pods on a small node.
            "proxy": {"resources": {"requests": {"cpu": "10m", "memory": "40Mi"}}},
        },
        "pilot": {"cni": {"enabled": true}},
        "cni": {"enabled": true},
        "revisionTags": [TAG],
        // The metrics of Istio's own filter, which a stock Envoy lacks.
        "telemetry": {"enabled": false},
        "meshConfig": {"accessLogFile": "/dev/stdout", "defaultConfig": {"concurrency": 1}},
    });
    let chart = release.chart("istio-control/istio-discovery").display().to_string();
    let args = ["template", "istiod", &chart, "--namespace", NAMESPACE];
    objects(&helm_with(None, &args, &[&base, values])?.ok()?.stdout)
}

/// Applies the objects; webhooks call this machine's loopback instead of the service.
fn install(api: &ApiServer, mut objects: Vec<Value>, port: u16) -> Result<()> {
    objects.retain(|object| !OF_A_POD.iter().any(|kind| object["kind"] == *kind));
    for object in &mut objects {
        for webhook in object.get_mut("webhooks").and_then(Value::as_array_mut).into_iter().flatten() {
            let path = webhook["clientConfig"]["service"]["path"].as_str().unwrap_or("/").to_owned();
            webhook["clientConfig"] = json!({"url": format!("https://localhost:{port}{path}")});
        }
    }
    api.apply(&json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string())
}

/// What would be mounted into istiod's pod.
fn write_configuration(folder: &Path, objects: &[Value]) -> Result<()> {
    fs::create_dir_all(folder.join("inject"))?;
    for (map, key, file) in [
        ("istio", "mesh", "mesh"),
        ("istio-sidecar-injector", "config", "inject/config"),
        ("istio-sidecar-injector", "values", "inject/values"),
    ] {
        let text = find(objects, "ConfigMap", map)?["data"][key].as_str();
        fs::write(folder.join(file), text.with_context(|| format!("ConfigMap {map} has no {key}"))?)?;
    }
    Ok(())
}
