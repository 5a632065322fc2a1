//! What the tests of `istio-cni` share: the program, an invocation of it, a run directory, a stand-in for the API server.

pub mod fake_agent;
mod pod_api;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use crate::program::{self, PATH};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use test_support::netns::Namespace;
use test_support::process::{self, Output};

pub use pod_api::PodApi;

/// Longer than any ADD of these tests may take, whatever its deadline.
const PATIENCE: Duration = Duration::from_secs(900);

/// The program under test: the one ISTIO_CNI names, else the workspace's, built once per test process.
pub fn istio_cni() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| program::under_test("istio-cni").expect("istio-cni is built"))
}

/// One invocation of the plugin, as a runtime would make it, with nothing else in its environment.
#[derive(Clone, Debug)]
pub struct Invocation {
    program: PathBuf,
    env: Vec<(String, String)>,
    input: String,
    /// Words before the program.
    prefix: Vec<String>,
}

impl Invocation {
    /// A command for a container with this configuration on standard input.
    pub fn new(command: &str, conf: &Value) -> Self {
        let env = [
            ("PATH", PATH),
            ("CNI_COMMAND", command),
            ("CNI_CONTAINERID", "abc"),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/opt/cni/bin"),
        ];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        Self { program: istio_cni().to_owned(), env, input: conf.to_string(), prefix: Vec::new() }
    }

    /// Of this program.
    #[must_use]
    pub fn program(mut self, program: &Path) -> Self {
        program.clone_into(&mut self.program);
        self
    }

    /// Sets a variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.retain(|(known, _)| known != name);
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sets the network namespace.
    #[must_use]
    pub fn netns(self, namespace: &Namespace) -> Self {
        let path = namespace.path().display().to_string();
        self.env("CNI_NETNS", &path)
    }

    /// Sets the pod, as a kubelet does.
    #[must_use]
    pub fn pod(self, namespace: &str, name: &str) -> Self {
        let args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name};K8S_POD_INFRA_CONTAINER_ID=abc"
        );
        self.env("CNI_ARGS", &args)
    }

    /// The same with the pod's UID, as runtimes pass it today.
    #[must_use]
    pub fn pod_of_uid(self, namespace: &str, name: &str, uid: &str) -> Self {
        let named = self.pod(namespace, name);
        let args = named.env.iter().find(|(known, _)| known == "CNI_ARGS").map(|(_, args)| args.clone());
        let args = format!("{};K8S_POD_UID={uid}", args.unwrap_or_default());
        named.env("CNI_ARGS", &args)
    }

    /// Replaces standard input.
    #[must_use]
    pub fn input(mut self, input: &str) -> Self {
        input.clone_into(&mut self.input);
        self
    }

    /// Has another program run it, which is given as its path and arguments before those of the plugin.
    #[must_use]
    pub fn under(mut self, words: Vec<String>) -> Self {
        self.prefix = words;
        self
    }

    /// Sends standard error to a file, where it can be read while it is written.
    #[must_use]
    pub fn stderr(self, file: &Path) -> Self {
        let file = file.display().to_string();
        self.under(vec!["/bin/sh".to_owned(), "-c".to_owned(), "exec \"$@\" 2>\"$0\"".to_owned(), file])
    }

    /// The command, and what it gets on standard input.
    pub fn command(&self) -> (Command, &str) {
        let mut command = process::command(&self.program, [""; 0]);
        if let [program, words @ ..] = &self.prefix[..] {
            command = process::command(program, words);
            command.arg(&self.program);
        }
        command.env_clear().envs(self.env.iter().map(|(name, value)| (name, value)));
        (command, &self.input)
    }

    /// Runs it to its end.
    pub fn run(&self) -> Result<Answer> {
        let (mut command, input) = self.command();
        process::run_with_input(&mut command, input, PATIENCE).map(Answer)
    }
}

/// What the plugin answered.
#[derive(Debug)]
pub struct Answer(pub Output);

impl Answer {
    /// The result on standard output; the plugin must have succeeded.
    pub fn result(self) -> Result<Value> {
        let output = self.0.ok()?;
        serde_json::from_str(&output.stdout).with_context(|| format!("no JSON: {:?}", output.stdout))
    }

    /// Nothing on standard output; the plugin must have succeeded.
    pub fn silence(self) -> Result<()> {
        let output = self.0.ok()?;
        ensure!(output.stdout.is_empty(), "standard output: {}", output.stdout);
        Ok(())
    }

    /// Code and text of the error object; the plugin must have failed, with exit code 1.
    pub fn error(&self) -> Result<(u64, String)> {
        let Output { stdout, stderr, .. } = &self.0;
        ensure!(self.0.code() == Some(1), "exit code {:?}: {stdout}{stderr}", self.0.code());
        let object: Value = serde_json::from_str(stdout).with_context(|| format!("no JSON: {stdout:?}"))?;
        let code = object["code"].as_u64().with_context(|| format!("no code: {stdout}"))?;
        let text = |key: &str| object[key].as_str().unwrap_or_default().to_owned();
        ensure!(!text("msg").is_empty(), "no message: {stdout}");
        Ok((code, format!("{} {}", text("msg"), text("details"))))
    }

    /// The lines of standard error, which have to be JSON objects.
    pub fn log(&self) -> Result<Vec<Value>> {
        let lines = self.0.stderr.lines();
        lines.map(|line| serde_json::from_str(line).with_context(|| format!("no JSON: {line}"))).collect()
    }
}

/// A run directory of the agent.
#[derive(Debug)]
pub struct RunDir(TempDir);

impl RunDir {
    /// An empty one.
    pub fn new() -> Result<Self> {
        Ok(Self(tempfile::Builder::new().prefix(&format!("e2e-{}-run", std::process::id())).tempdir()?))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes the plugin's kubeconfig.
    pub fn write_kubeconfig(&self, kubeconfig: &Value) -> Result<()> {
        self.write("istio-cni-kubeconfig", kubeconfig)
    }

    /// Writes a pod manifest into the folder `manifests`.
    pub fn write_manifest(&self, file: &str, pod: &Value) -> Result<()> {
        fs::create_dir_all(self.manifests())?;
        self.write(&format!("manifests/{file}"), pod)
    }

    /// The folder of manifests.
    pub fn manifests(&self) -> PathBuf {
        self.path().join("manifests")
    }

    /// A configuration of the plugin that uses this directory.
    pub fn conf(&self) -> Value {
        json!({"cniVersion": "1.1.0", "name": "net", "type": "istio-cni", "cni_agent_run_dir": self.path()})
    }

    /// A configuration of the plugin that uses this directory and its manifests.
    pub fn manifest_conf(&self) -> Value {
        let mut conf = self.conf();
        conf["pod_manifest_dir"] = json!(self.manifests());
        conf
    }

    fn write(&self, file: &str, content: &Value) -> Result<()> {
        fs::write(self.path().join(file), content.to_string()).with_context(|| format!("cannot write {file}"))
    }
}

/// A kubeconfig for a server without TLS and a user without credentials.
pub fn plain_kubeconfig(port: u16) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{"name": "c", "cluster": {"server": format!("http://127.0.0.1:{port}")}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    })
}

/// A pod in the mesh, with these annotations besides the injector's.
pub fn sidecar(name: &str, annotations: &[(&str, &str)]) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "annotations": {"sidecar.istio.io/status": "{}"}},
        "spec": {"containers": [
            {"name": "app", "image": "app"},
            {"name": "istio-proxy", "image": "proxy", "args": ["proxy", "sidecar"]},
        ]},
    });
    for (key, value) in annotations {
        pod["metadata"]["annotations"][key] = json!(value);
    }
    pod
}
