//! A cluster as a platform engineer finds it: Istio's charts installed, a registry, and a workstation with the tools.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use e2e::kube::ApiServer;
use e2e::machine::Machine;
use e2e::tools;
use serde_json::json;
use tempfile::TempDir;
use test_support::port::free_port;
use test_support::process::{self, Background, Output, SHORT, until};
use test_support::project;

use crate::agent_support::{IMAGE, POD, chart};

/// What the documents call a registry of the reader's.
const REGISTRY: &str = "registry.example.com/mesh";

/// Debian's registry, on loopback.
pub struct Registry {
    _server: Background,
    _folder: TempDir,
    pub port: u16,
}

impl Registry {
    pub fn start() -> Result<Self> {
        let (folder, port) = (tempfile::tempdir()?, free_port()?);
        let config = json!({
            "version": "0.1", "log": {"level": "warn"},
            "storage": {"filesystem": {"rootdirectory": folder.path().join("store")}},
            "http": {"addr": format!("127.0.0.1:{port}")},
        });
        fs::write(folder.path().join("registry.yml"), config.to_string())?;
        let mut command = process::command("docker-registry", ["serve"]);
        command.arg(folder.path().join("registry.yml"));
        let log = folder.path().join("registry.log");
        let server = Background::start("the registry", &command, &log)?.killed_on_drop();
        let url = format!("http://127.0.0.1:{port}/v2/");
        until("the registry to answer", POD, &[&server], || {
            let answer = process::run(&mut process::command("curl", ["--silent", "--fail", &url]), SHORT)?;
            Ok(answer.status.success().then_some(()))
        })?;
        Ok(Self { _server: server, _folder: folder, port })
    }

    /// Its name and the folder in it, in the place of the one in the documents.
    pub fn name(&self) -> String {
        format!("127.0.0.1:{}/mesh", self.port)
    }
}

/// Where the engineer types: a machine with helm, kubectl and skopeo, a kubeconfig, and Istio's charts under the name that their repository usually has.
pub struct Workstation {
    machine: Machine,
    registry: String,
    kubeconfig: PathBuf,
    /// Of the user `sam`, who has the rights that the documents give.
    sams: PathBuf,
    /// What stands in its PATH beside the tools.
    _plugins: TempDir,
}

impl Workstation {
    pub fn start(api: &ApiServer, registry: &Registry) -> Result<Self> {
        let tools = tools::built("helm")?.parent().context("helm is in no folder")?.to_owned();
        let kubectl = tools::built("kubectl")?.parent().context("kubectl is in no folder")?.to_owned();
        let plugins = kubectl_plugins()?;
        let machine = Machine::start(&[&tools, &kubectl, plugins.path()], &[api.port(), registry.port])?;
        let station = Self {
            machine,
            registry: registry.name(),
            kubeconfig: api.admin_kubeconfig(),
            sams: api.certificate_kubeconfig("sam", "/CN=sam")?,
            _plugins: plugins,
        };
        // TLS is not a part of what is shown here: this registry has none.
        let insecure = format!("[[registry]]\nlocation = \"127.0.0.1:{}\"\ninsecure = true\n", registry.port);
        station.write("/root/.config/containers/registries.conf", &insecure)?;
        station.write(
            "/root/.config/containers/policy.json",
            r#"{"default": [{"type": "insecureAcceptAnything"}]}"#,
        )?;
        station.add_istios_charts()?;
        Ok(station)
    }

    /// Runs what a document shows. Where the documents name a registry, it is the test's.
    pub fn run(&self, script: &str) -> Result<Output> {
        self.run_as(&self.kubeconfig, script)
    }

    /// Runs it as a user without rights but those that the documents give.
    pub fn run_as_sam(&self, script: &str) -> Result<Output> {
        self.run_as(&self.sams, script)
    }

    fn run_as(&self, kubeconfig: &Path, script: &str) -> Result<Output> {
        let script = script.replace(REGISTRY, &self.registry);
        let (kubeconfig, programs) = (kubeconfig.to_string_lossy(), programs()?);
        let environment =
            [("KUBECONFIG", &*kubeconfig), ("PROGRAMS_AMD64", &programs), ("HELM_CACHE_HOME", "/root/helm")];
        self.machine.run(&script, &environment)
    }

    fn write(&self, path: &str, content: &str) -> Result<()> {
        let mut shell =
            process::command("sh", ["-ec", "mkdir -p \"$(dirname \"$0\")\" && cat >\"$0\"", path]);
        shell = self.machine.command(&shell);
        process::run_with_input(&mut shell, content, SHORT)?.ok()?;
        Ok(())
    }

    /// Stand-ins, in a folder by the name of Istio's repository, which Helm prefers: of the agent's chart, and of the values of istiod's that the
    /// documents set.
    fn add_istios_charts(&self) -> Result<()> {
        // Istio's agent gives the plugin its own token.
        let env = "          env:\n";
        let own_token = format!("{env}            - {{name: PLUGIN_SERVICE_ACCOUNT, value: \"\"}}\n");
        let agent = chart(false).replace("localhost/install-cni:latest", IMAGE).replace(env, &own_token);
        let istiod = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: istio-sidecar-injector}\ndata:\n  \
                      cni: {{ .Values.pilot.cni.enabled | quote }}\n  init: {{ .Values.global.proxy_init.image | quote }}\n";
        let values = "{pilot: {cni: {enabled: false}}, global: {proxy_init: {image: \"\"}}}";
        for (name, template, values) in [("cni", &*agent, "{}"), ("istiod", istiod, values)] {
            let chart = project::file("istio").join(name);
            let file = |path: &str| chart.join(path).display().to_string();
            self.write(&file("Chart.yaml"), &format!("{{apiVersion: v2, name: {name}, version: 1.30.3}}"))?;
            self.write(&file("values.yaml"), values)?;
            self.write(&file("templates/all.yaml"), template)?;
        }
        Ok(())
    }

    /// Installs Istio's charts as Istio's guide does, with the values of a user.
    pub fn install_istio(&self) -> Result<()> {
        let values = json!({
            "global": {"hub": "docker.io/istio", "tag": "1.30.3", "variant": "distroless"},
            "excludeNamespaces": ["kube-system"],
            "podLabels": {"team": "platform"},
        });
        self.write("/root/istio-values.yaml", &values.to_string())?;
        self.run(
            "set -e\nhelm install istiod istio/istiod --namespace istio-system --set pilot.cni.enabled=true\n\
             helm install istio-cni istio/cni --namespace istio-system --values /root/istio-values.yaml",
        )?
        .ok()?;
        Ok(())
    }
}

/// The folder of the programs as they are shipped, which `make guides` has built.
pub fn programs() -> Result<String> {
    std::env::var("PROGRAMS_AMD64").context("PROGRAMS_AMD64 names no folder: run make guides")
}

/// A folder with `kubectl-redirect` alone.
fn kubectl_plugins() -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    let program = Path::new(&programs()?).join("kubectl-redirect");
    fs::copy(&program, folder.path().join("kubectl-redirect"))
        .with_context(|| program.display().to_string())?;
    Ok(folder)
}

/// A command as root on a node.
pub fn on_node(node: &e2e::node::Node<'_>, script: &str) -> Result<Output> {
    e2e::guides::worlds::shell(|command: &Command| node.command(command), script)
}

/// What the release's objects come to.
pub fn ensure_capabilities(api: &ApiServer, expected: &[&str]) -> Result<()> {
    let set = api.get("daemonset", "istio-system", "istio-cni-node")?;
    let added = &set["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"]["add"];
    ensure!(*added == json!(expected), "{added}");
    Ok(())
}
