//! Pods of a node.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};

use super::{Node, Runtime, address_of_family, crio};
use crate::image::BUSYBOX;
use test_support::netns::Namespace;
use test_support::process::{Output, until};

/// The port on which the container of [`plain_pod`] says [`GREETING`].
pub const APP_PORT: u16 = 8080;
/// What the container of [`plain_pod`] says to everyone who connects.
pub const GREETING: &str = "hello-from-app\n";

/// A pod with one container, `app`, that answers on [`APP_PORT`].
pub fn plain_pod(name: &str) -> Value {
    let command = format!("exec nc -ll -p {APP_PORT} -e echo {}", GREETING.trim_end());
    pod_of(name, &json!({}), &json!([container("app", &command)]))
}

/// A pod as the injector leaves it: annotated, with a container `istio-proxy` of user and group 1337 beside `app`. The proxy only sleeps; a
/// [`crate::traffic::TcpServer`] in [`Pod::namespace`] can do its work. More annotations go into `metadata.annotations` of the result.
pub fn sidecar_pod(name: &str) -> Value {
    let app = format!("exec nc -ll -p {APP_PORT} -e echo {}", GREETING.trim_end());
    let mut proxy = container("istio-proxy", "exec sleep 1000000");
    proxy["securityContext"] = json!({"runAsUser": 1337, "runAsGroup": 1337});
    proxy["args"] = json!(["proxy", "sidecar"]);
    pod_of(name, &json!({"sidecar.istio.io/status": "{}"}), &json!([container("app", &app), proxy]))
}

fn pod_of(name: &str, annotations: &Value, containers: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "annotations": annotations},
        "spec": {
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": 0,
            "containers": containers,
        },
    })
}

fn container(name: &str, command: &str) -> Value {
    json!({"name": name, "image": BUSYBOX, "imagePullPolicy": "Never", "command": ["/bin/sh", "-c", command]})
}

/// A pod by its name on a node.
#[derive(Debug)]
pub struct Pod<'a> {
    node: &'a Node<'a>,
    namespace: String,
    name: String,
    manifest: Option<PathBuf>,
}

impl<'a> Pod<'a> {
    pub(super) fn new(node: &'a Node<'a>, namespace: &str, name: &str, manifest: Option<PathBuf>) -> Self {
        Self { node, namespace: namespace.to_owned(), name: name.to_owned(), manifest }
    }

    /// Its name on the node, which is what plugins get as K8S_POD_NAME. A static pod's ends in the node's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The object as the kubelet sees it, with its status; none before it has seen it and after it is gone.
    pub fn object(&self) -> Result<Option<Value>> {
        let is_this = |pod: &Value| {
            pod["metadata"]["name"] == *self.name && pod["metadata"]["namespace"] == *self.namespace
        };
        Ok(self.node.pods()?.into_iter().find(is_this))
    }

    /// Waits until every container runs and the pod has its addresses, and returns these.
    pub fn wait_running(&self, deadline: Duration) -> Result<Vec<IpAddr>> {
        self.wait("to run", deadline, |pod| {
            let containers = pod["status"]["containerStatuses"].as_array()?;
            let wanted = pod["spec"]["containers"].as_array()?.len();
            let running = containers.iter().filter(|status| status["state"]["running"].is_object()).count();
            let addresses = pod_addresses(pod);
            (running == wanted && !addresses.is_empty()).then_some(addresses)
        })
    }

    /// Waits until the pod is as `is_so` wants it, and returns what that returns.
    pub fn wait<T>(
        &self,
        what: &str,
        deadline: Duration,
        mut is_so: impl FnMut(&Value) -> Option<T>,
    ) -> Result<T> {
        let mut last = None;
        let waited = until(&format!("pod {} {what}", self.name), deadline, &[], || {
            last = self.object()?;
            Ok(last.as_ref().and_then(&mut is_so))
        });
        waited.map_err(|error| {
            let status = last.map_or("unknown to the kubelet".to_owned(), |pod| pod["status"].to_string());
            anyhow!("{error:#}\npod status: {status}\n{}", self.node.tails())
        })
    }

    /// The address of a family.
    pub fn address(&self, v6: bool) -> Result<IpAddr> {
        let pod = self.object()?.with_context(|| format!("no pod {}", self.name))?;
        address_of_family(&pod_addresses(&pod), v6)
            .with_context(|| format!("pod {} has no such address", self.name))
    }

    /// Its network namespace, for as long as the value lives, also after the pod is gone.
    pub fn namespace(&self) -> Result<Namespace> {
        let path = self.network()?.with_context(|| format!("pod {} has no network namespace", self.name))?;
        Namespace::attach(&path)
    }

    /// Waits for an attempt to set up the pod's sandbox to fail, and returns the kubelet's log line about it, which has the plugin's message.
    pub fn wait_sandbox_failure(&self, deadline: Duration) -> Result<String> {
        let what = format!("the sandbox of {} to fail", self.name);
        let waited = until(&what, deadline, &[], || Ok(self.sandbox_failures().pop()));
        waited.map_err(|error| anyhow!("{error:#}\n{}", self.node.tails()))
    }

    /// The kubelet's log lines about attempts to set up the pod's sandbox that failed, so far.
    pub fn sandbox_failures(&self) -> Vec<String> {
        let log = fs::read_to_string(self.node.folder.path().join("kubelet.log")).unwrap_or_default();
        let name = format!("{}/{}", self.namespace, self.name);
        let failures = log.lines().filter(|line| line.contains("CreatePodSandbox for pod failed"));
        failures.filter(|line| line.contains(&name)).map(str::to_owned).collect()
    }

    /// What a container has printed.
    pub fn log(&self, container: &str) -> Result<String> {
        let prefix = format!("{}_{}_", self.namespace, self.name);
        let folders = fs::read_dir(self.node.folder.path().join("pod-logs"))?.flatten();
        let mut files = folders.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
        let folder =
            files.next().with_context(|| format!("pod {} has no logs", self.name))?.path().join(container);
        let mut parts: Vec<PathBuf> = fs::read_dir(folder)?.flatten().map(|entry| entry.path()).collect();
        parts.sort();
        let texts = parts.iter().map(fs::read_to_string).collect::<std::io::Result<Vec<_>>>()?;
        // A line is: time, stream, whether it is whole, text.
        let lines = texts.iter().flat_map(|text| text.lines());
        Ok(lines.filter_map(|line| line.splitn(4, ' ').nth(3)).map(|line| format!("{line}\n")).collect())
    }

    /// Runs a command in a container; an exit code other than 0 is an error.
    pub fn exec(&self, container: &str, words: &[&str]) -> Result<Output> {
        self.try_exec(container, words)?.ok()
    }

    /// The same, where an exit code other than 0 is not an error.
    pub fn try_exec(&self, container: &str, words: &[&str]) -> Result<Output> {
        let id = self
            .container(container)?
            .with_context(|| format!("no container {container} in {}", self.name))?;
        let exec_id = test_support::leftovers::fresh_name();
        self.node.try_ctr(&[&["tasks", "exec", "--exec-id", &exec_id, &id], words].concat())
    }

    /// Deletes the pod and waits until its sandbox and network are gone.
    pub fn delete(&self, deadline: Duration) -> Result<()> {
        match (&self.manifest, self.node.api) {
            (Some(manifest), _) => fs::remove_file(manifest)?,
            (None, Some(api)) => api.delete("pod", &self.namespace, &self.name)?,
            (None, None) => anyhow::bail!("pod {} was not started with start_pod", self.name),
        }
        let mut last: Option<PathBuf> = None;
        let waited = until(&format!("pod {} to be gone", self.name), deadline, &[], || {
            // What costs least first: containerd's client takes long to start.
            if last.as_deref().is_some_and(is_namespace) || self.object()?.is_some() {
                return Ok(None);
            }
            match self.network() {
                // While containerd restarts this is unknown.
                Err(error) if format!("{error:#}").contains("failed to dial") => Ok(None),
                network => {
                    last = network?;
                    Ok(last.is_none().then_some(()))
                }
            }
        });
        waited.map_err(|error| anyhow!("{error:#}\n{}", self.node.tails()))
    }

    /// Kills what keeps the pod's sandbox: the kubelet makes another, and restarts the containers.
    pub fn kill_sandbox(&self) -> Result<()> {
        let running = self.node.ctr(&["tasks", "list", "-q"])?.stdout;
        let sandboxes = self.containers("io.cri-containerd.kind", "sandbox")?;
        let mut running = sandboxes.iter().filter(|id| running.lines().any(|line| line == *id));
        let id = running.next().with_context(|| format!("no sandbox of {} runs", self.name))?;
        self.node.ctr(&["tasks", "kill", "--signal", "SIGKILL", id]).map(drop)
    }

    /// The file of the pod's network namespace as this process can open it, if any.
    fn network(&self) -> Result<Option<PathBuf>> {
        if self.node.runtime == Runtime::Crio {
            let paths = crio::networks(self.node.folder.path(), &self.namespace, &self.name)?;
            return Ok(paths.iter().map(|path| self.on_node(path)).find(|path| is_namespace(path)));
        }
        for id in self.containers("io.cri-containerd.kind", "sandbox")? {
            let info = match self.node.ctr(&["containers", "info", &id]) {
                // It was listed, and removed since.
                Err(error) if format!("{error:#}").contains("not found") => continue,
                info => serde_json::from_str::<Value>(&info?.stdout)?,
            };
            let namespaces = info["Spec"]["linux"]["namespaces"].as_array().cloned().unwrap_or_default();
            let mut network = namespaces.iter().filter(|namespace| namespace["type"] == "network");
            let path = network.next().and_then(|namespace| namespace["path"].as_str()).unwrap_or_default();
            let path = self.on_node(path);
            if !path.ends_with("root") && is_namespace(&path) {
                return Ok(Some(path));
            }
        }
        Ok(None)
    }

    /// A file of the node below its `/run`, as this process can open it. /var/run is a link there, and an absolute one would lead to this machine's.
    fn on_node(&self, path: &str) -> PathBuf {
        self.node.file(path.strip_prefix("/var").unwrap_or(path))
    }

    fn container(&self, name: &str) -> Result<Option<String>> {
        let running = self.node.ctr(&["tasks", "list"])?.stdout;
        let ids = self.containers("io.kubernetes.container.name", name)?;
        Ok(ids
            .into_iter()
            .find(|id| running.lines().any(|line| line.starts_with(id) && line.contains("RUNNING"))))
    }

    /// Ids of the pod's containers that have a label.
    fn containers(&self, label: &str, value: &str) -> Result<Vec<String>> {
        let filter = format!(
            "labels.\"io.kubernetes.pod.name\"=={},labels.\"io.kubernetes.pod.namespace\"=={},labels.\"{label}\"=={value}",
            self.name, self.namespace
        );
        Ok(self.node.ctr(&["containers", "list", "-q", &filter])?.stdout.lines().map(str::to_owned).collect())
    }
}

fn pod_addresses(pod: &Value) -> Vec<IpAddr> {
    let addresses = pod["status"]["podIPs"].as_array().into_iter().flatten();
    addresses.filter_map(|address| address["ip"].as_str()?.parse().ok()).collect()
}

/// A file that a namespace was mounted on, and not the empty file that is left when it has been unmounted.
fn is_namespace(path: &Path) -> bool {
    nix::sys::statfs::statfs(path).is_ok_and(|found| found.filesystem_type() == nix::sys::statfs::NSFS_MAGIC)
}
