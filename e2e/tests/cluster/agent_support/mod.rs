//! What the tests of the agent on a real node share: the image, the manifest with a node's directories, a redirected pod.

pub mod fleet;
pub mod host_agent;

use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::agent::get;
use e2e::http;
use e2e::kube::{ApiServer, Controllers};
use e2e::node::{APP_PORT, Node, PRIMARY_CONFLIST, Pod, sidecar_pod};
use e2e::traffic::{Client, TcpServer};
use e2e::{image, program};
use serde_json::{Value, json};
use tempfile::TempDir;
use test_support::process::{self, until};

use crate::chart_support::objects;

/// How long a pod may take to come or go on a busy machine.
pub const POD: Duration = Duration::from_secs(300);
pub const IMAGE: &str = "localhost/install-cni:test";
pub const NAMESPACE: &str = "istio-system";
pub const MANIFEST: &str = include_str!("../../../../deploy/istio-cni-node.yaml");
const CHART: &str = include_str!("../../../manifests/istio-chart.yaml");
/// The API server as the node and its own processes reach it.
pub const LOOPBACK: &str = "127.0.0.1";
/// The API server as pods reach it.
pub const GATEWAY: &str = "10.88.0.1";
pub const DAEMON_SET: &str = "istio-cni-node";

pub fn programs() -> Result<PathBuf> {
    program::built()
}

/// The manifest's objects in a cluster, with the directories of a test's node and a plugin run directory of its own.
pub fn apply_manifest(api: &ApiServer, node: &Node<'_>, manifest: &str) -> Result<Value> {
    api.create_namespace(NAMESPACE)?;
    let manifest = manifest
        .replace("localhost/install-cni:latest", IMAGE)
        .replace(concat!("localhost/install-cni:", env!("CARGO_PKG_VERSION")), IMAGE)
        .replace("path: /opt/cni/bin,", &format!("path: {},", node.bin_dir().display()))
        .replace("path: /etc/cni/net.d,", &format!("path: {},", node.conf_dir().display()))
        .replace("path: /var/run/istio-cni,", &format!("path: {},", run_dir(node).display()))
        .replace("mountPath: /var/run/istio-cni}", &format!("mountPath: {}}}", run_dir(node).display()));
    api.apply(&manifest)?;
    let settings = json!({"data": {"CNI_AGENT_RUN_DIR": run_dir(node)}}).to_string();
    api.kubectl(&["-n", NAMESPACE, "patch", "configmap", "istio-cni-config", "-p", &settings])?;
    api.get("daemonset", NAMESPACE, "istio-cni-node")
}

/// A manifest's objects on an API server that others use, too: in a namespace of its own instead of the mesh's, with its name behind
/// those of all that is not in it.
pub fn apply_in(api: &ApiServer, namespace: &str, manifest: &str) -> Result<()> {
    let mut items = objects(&manifest.replace(NAMESPACE, namespace))?;
    for object in items.iter_mut().filter(|object| object["metadata"]["namespace"] != namespace) {
        for name in ["/metadata/name", "/roleRef/name"] {
            if let Some(Value::String(name)) = object.pointer_mut(name) {
                *name = format!("{name}-{namespace}");
            }
        }
    }
    api.apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string())
}

pub fn run_dir(node: &Node<'_>) -> PathBuf {
    node.state_dir().join("run")
}

/// Not one pod of namespace default failed to start, and the plugin decided to redirect each of these, whenever it was asked.
pub fn ensure_none_failed_or_bypassed(api: &ApiServer, node: &Node<'_>, names: &[String]) -> Result<()> {
    let events = api.list("events", "default")?;
    let failures: Vec<&Value> =
        events.iter().filter(|event| event["reason"] == "FailedCreatePodSandBox").collect();
    ensure!(failures.is_empty(), "{failures:#?}");
    let log = fs::read_to_string(run_dir(node).join("istio-cni.log"))?;
    for name in names {
        let about = format!("\"default/{name}\"");
        let decisions: Vec<&str> =
            log.lines().filter(|line| line.contains(&about) && line.contains("\"decision\"")).collect();
        ensure!(
            !decisions.is_empty() && decisions.iter().all(|line| line.contains("\"redirect\"")),
            "{name}: {decisions:#?}"
        );
    }
    Ok(())
}

/// What Istio's own chart starts.
pub fn chart(host_network: bool) -> String {
    let pod = "      serviceAccountName: istio-cni\n";
    CHART.replace(pod, &format!("      hostNetwork: {host_network}\n{pod}"))
}

/// A manifest whose agents reach the API server at this address: there is no service network.
pub fn with_server(manifest: &str, host: &str, port: u16) -> String {
    let env = "          env:\n";
    let server = format!(
        "{env}            - {{name: KUBERNETES_SERVICE_HOST, value: {host}}}\n            - {{name: KUBERNETES_SERVICE_PORT, value: \"{port}\"}}\n"
    );
    manifest.replace(env, &server)
}

/// The pod that the DaemonSet's controller would make.
pub fn agent_pod(daemon_set: &Value, server: &str, api: &ApiServer, name: &str) -> Value {
    let mut pod = daemon_set["spec"]["template"].clone();
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    pod["metadata"]["name"] = json!(name);
    pod["metadata"]["namespace"] = json!(NAMESPACE);
    pod["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "apps/v1", "kind": "DaemonSet", "name": DAEMON_SET, "uid": daemon_set["metadata"]["uid"],
        "controller": true, "blockOwnerDeletion": true,
    }]);
    let container = &mut pod["spec"]["containers"][0];
    container["imagePullPolicy"] = json!("Never");
    // There is no service network.
    let mut env = container["env"].as_array().cloned().unwrap_or_default();
    env.push(json!({"name": "KUBERNETES_SERVICE_HOST", "value": server}));
    env.push(json!({"name": "KUBERNETES_SERVICE_PORT", "value": api.port().to_string()}));
    container["env"] = json!(env);
    pod
}

/// The pod of the DaemonSet that is there now and is not being deleted.
pub fn current_agent(api: &ApiServer) -> Result<Option<Value>> {
    let pods = api.list("pods", NAMESPACE)?;
    Ok(pods.into_iter().find(|pod| pod["metadata"]["deletionTimestamp"].is_null()))
}

/// Waits until the newest generation of the DaemonSet runs and is ready; returns its pod.
pub fn wait_rolled_out(api: &ApiServer, node: &Node<'_>, controllers: &Controllers) -> Result<Value> {
    let mut last = Value::Null;
    let waited = until("the DaemonSet to roll out", POD, &controllers.processes(), || {
        let set = api.get("daemonset", NAMESPACE, DAEMON_SET)?;
        let (status, generation) = (set["status"].clone(), &set["metadata"]["generation"]);
        let is_out = status["observedGeneration"] == *generation
            && status["desiredNumberScheduled"] == 1
            && status["updatedNumberScheduled"] == 1
            && status["numberAvailable"] == 1;
        last = current_agent(api)?.unwrap_or_default();
        Ok((is_out && is_ready(&last).is_some()).then(|| last.clone()))
    });
    waited.with_context(|| {
        let name = last["metadata"]["name"].as_str().unwrap_or_default();
        format!("{}\n{}", last["status"], node.pod(NAMESPACE, name).log("install-cni").unwrap_or_default())
    })
}

/// Gives the node the agent's image as deploy/build-images.sh makes it, of programs that are not optimized, with their libraries.
pub fn import_image(node: &Node<'_>) -> Result<()> {
    import_image_as(node, IMAGE, "")
}

/// The same under a name. The plugin is another one for every `version`: bytes after an executable's end change nothing but its content.
pub fn import_image_as(node: &Node<'_>, name: &str, version: &str) -> Result<()> {
    let programs = Linked::of(node, &["install-cni", "istio-cni", "redirectctl"])?;
    let plugin = programs.folder.path().join("istio-cni");
    fs::File::options().append(true).open(plugin)?.write_all(version.as_bytes())?;
    programs.import(node, "install-cni", name)
}

/// Programs under test for images: without what only a debugger reads, which is most of their bytes, and with their libraries.
#[derive(Debug)]
pub struct Linked {
    folder: TempDir,
}

impl Linked {
    pub fn of(node: &Node<'_>, programs: &[&str]) -> Result<Self> {
        let folder = tempfile::tempdir_in(node.state_dir())?;
        let libraries = folder.path().join(Self::LIBRARIES);
        for name in programs {
            let (built, program) = (program::under_test(name)?, folder.path().join(name));
            let mut strip = process::command("strip", ["--strip-debug", "-o"]);
            process::run(strip.args([&program, &built]), POD)?.ok()?;
            for library in image::libraries_of(&program)? {
                let copy = libraries.join(library.strip_prefix("/")?);
                fs::create_dir_all(copy.parent().context("a folder")?)?;
                fs::copy(library, copy)?;
            }
        }
        Ok(Self { folder })
    }

    const LIBRARIES: &str = "libraries";

    /// Gives the node an image of ours of them.
    pub fn import(&self, node: &Node<'_>, image: &str, name: &str) -> Result<()> {
        let folder = self.folder.path();
        let libraries = folder.join(Self::LIBRARIES);
        import_archive(node, &["--linked", &libraries.to_string_lossy(), image], name, folder)
    }
}

/// Gives the node an image of ours, of static programs in a folder.
pub fn import_packed(node: &Node<'_>, image: &str, name: &str, programs: &Path) -> Result<()> {
    import_archive(node, &["--plain", image], name, programs)
}

fn import_archive(node: &Node<'_>, image: &[&str], name: &str, programs: &Path) -> Result<()> {
    let archive = node.state_dir().join("image.tar");
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let mut pack = process::command(program::built()?.join("image"), ["pack"]);
    pack.args(image).arg(&archive).arg(name).arg(format!("{architecture}={}", programs.display()));
    process::run(&mut pack, POD)?.ok()?;
    node.ctr(&["images", "import", &archive.to_string_lossy()])?;
    Ok(fs::remove_file(archive)?)
}

/// What `redirectctl` of the agent's image says as JSON inside of the agent's container, and its exit code.
pub fn exec_redirectctl(agent: &Pod<'_>, words: &[&str]) -> Result<(Value, i32)> {
    let output = agent.try_exec("install-cni", &[&["redirectctl"], words, &["--output", "json"]].concat())?;
    let answer = serde_json::from_str(&output.stdout).with_context(|| format!("{output:?}"))?;
    Ok((answer, output.code().context("a code")?))
}

/// Inside of the agent's container `redirectctl` finds by itself what it needs, and how these pods of namespace default stand.
pub fn ensure_redirectctl_works(agent: &Pod<'_>, pods: &[(&str, &str)]) -> Result<()> {
    let (scan, _) = exec_redirectctl(agent, &["scan"])?;
    // The agent may not read events, and on a slow machine it counts slow ADDs; everything else about the node is found and as it should be.
    let of_node = scan["node"].as_array().context("the node")?;
    let usual = ["not-told", "family-not-captured", "agent-counts"];
    let is_usual = |finding: &Value| usual.iter().any(|code| finding["code"] == *code);
    ensure!(of_node.iter().all(is_usual), "{scan:#}");
    for (name, state) in pods {
        let name = format!("default/{name}");
        let found = scan["pods"].as_array().into_iter().flatten().find(|pod| pod["subject"] == *name);
        ensure!(found.is_some_and(|pod| pod["state"] == *state), "{name}: {scan:#}");
        let (report, _) = exec_redirectctl(agent, &["pod", &name])?;
        for (at, folder) in [("/netns", "/host/var/run/netns/"), ("/plugins/file", "/host/etc/cni/net.d/")] {
            let path = report.pointer(at).and_then(Value::as_str).unwrap_or_default();
            ensure!(path.starts_with(folder), "{report:#}");
        }
    }
    Ok(())
}

pub fn is_ready(pod: &Value) -> Option<()> {
    let conditions = pod["status"]["conditions"].as_array()?;
    conditions
        .iter()
        .any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
        .then_some(())
}

/// The entry with more patience than a machine that stands still for a minute uses up, and less than a kubelet has.
pub const PATIENT_ENTRY: &str = r#"{"name":"istio-cni","type":"istio-cni","plugin_log_level":"info","cni_agent_run_dir":"__CNI_AGENT_RUN_DIR__","pod_namespace":"__POD_NAMESPACE__","add_timeout":"100s"}"#;

/// What the agent on the node's network says of itself; nothing while it does not run.
pub fn readyz(node: &Node<'_>, query: &str) -> Result<String> {
    let (page, patience) = (format!("/readyz{query}"), Duration::from_secs(5));
    let answer = node.namespace().enter(|| http::get("127.0.0.1:8000", &page, patience))?;
    Ok(answer.map(|(_, text)| text.trim().to_owned()).unwrap_or_default())
}

/// A metric of the agent on the node's network.
pub fn metric(node: &Node<'_>, name: &str) -> Result<Option<f64>> {
    let answer = node.namespace().enter(|| get(15014, "/metrics"))?;
    Ok(answer.and_then(|(_, text)| http::metric(&text, name)))
}

pub fn entries(node: &Node<'_>) -> Result<String> {
    Ok(fs::read_to_string(node.conf_dir().join(PRIMARY_CONFLIST))?)
}

/// Waits until pods are redirected: containerd takes a moment to load what the agent wrote.
pub fn wait_loaded(node: &Node<'_>) -> Result<()> {
    until("containerd to load the entry", POD, &[], || {
        let probe = node.start_pod(&sidecar_pod("probe"))?;
        probe.wait_running(POD)?;
        let redirected = !probe.namespace()?.state_with_nft()?.is_pristine();
        probe.delete(POD)?;
        Ok(redirected.then_some(()))
    })
}

/// What comes in reaches the proxy's inbound port.
pub fn assert_redirected(node: &Node<'_>, pod: &Pod<'_>) -> Result<()> {
    let inside = pod.namespace()?;
    let _inbound = TcpServer::start(&inside, "inbound", (Ipv4Addr::UNSPECIFIED, 15006))?;
    let app = SocketAddr::new(pod.address(false)?, APP_PORT);
    let report = Client::new(node.namespace()).tcp(app)?.report()?;
    assert_eq!((report.server.as_str(), report.original), ("inbound", Some(app)));
    Ok(())
}
