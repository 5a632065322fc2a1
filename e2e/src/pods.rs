//! Pods of a node: an API server that has them, and network namespaces as a container runtime leaves them.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash as _, Hasher as _};
use std::net::IpAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use netns_apply::ApplyOptions;
use netns_apply::facts::addresses;
use pod_netns::{Outside, suitable};
use redirect_core::RulePlan;
use redirect_core::options::{BackendChoice, NativeForm};
use redirect_core::pod::{Decision, PodFacts};
use redirect_core::settings::NamespaceFacts;
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace, NetnsDirectory, Snapshot};
use test_support::process::{Killed, until};

use crate::agent::{Node, daemon_set, get};
use crate::http::{self, HttpRequest, StandIn, failure};

/// How long anything may take on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(180);

/// An API server with pods, in pages as small as asked for, that keeps the events it is sent.
pub type PodApi = StandIn<State>;

/// What the server has, and what it was asked.
#[derive(Default)]
pub struct State {
    /// What lists say.
    pub pods: Vec<Value>,
    /// What the server says about one pod where that is not what lists say: by name.
    pub newer: BTreeMap<String, Value>,
    /// The events it was sent, in their order.
    pub events: Vec<Value>,
    /// How many lists of pods were begun.
    pub lists: usize,
    /// How many pages of such lists were requested.
    pub pages: usize,
    /// How many single pods were requested.
    pub gets: usize,
    /// The status of all answers about pods.
    pub refuse: Option<u16>,
    /// The handlers of runtime classes, by the names of these.
    pub handlers: BTreeMap<String, String>,
    /// The names of runtime classes that were requested, in their order.
    pub asked_classes: Vec<String>,
}

impl PodApi {
    /// Serves these pods to the agent of this node.
    pub fn start(node: &mut Node, pods: Vec<Value>) -> Self {
        let api = Self::of(State { pods, ..State::default() }, respond);
        node.set("KUBERNETES_SERVICE_PORT", &api.port.to_string());
        // So that all events are about pods of the node.
        node.set("PLUGIN_SERVICE_ACCOUNT", "");
        api
    }

    /// The messages of events about a pod.
    pub fn events_about(&self, pod: &str) -> Vec<Value> {
        let about = |event: &&Value| event["involvedObject"]["name"] == pod;
        self.state().events.iter().filter(about).cloned().collect()
    }
}

fn respond(request: &HttpRequest, state: &mut State) -> (u16, String) {
    let path = request.path();
    if path.contains("/daemonsets") {
        return (200, daemon_set(false));
    }
    if path.ends_with("/events") {
        state.events.extend(serde_json::from_slice::<Value>(&request.body));
        return (201, String::from_utf8_lossy(&request.body).into_owned());
    }
    if let (true, Some(status)) = (path.contains("/pods"), state.refuse) {
        return (status, failure(status));
    }
    if path == "/api/v1/pods" {
        return (200, list(request.query(), state).to_string());
    }
    if let Some((_, class)) = path.rsplit_once("/runtimeclasses/") {
        state.asked_classes.push(class.to_owned());
        return match state.handlers.get(class) {
            Some(handler) => (200, json!({"kind": "RuntimeClass", "handler": handler}).to_string()),
            None => (404, failure(404)),
        };
    }
    match path.rsplit_once("/pods/") {
        Some((_, name)) => {
            let listed = || state.pods.iter().find(|pod| pod["metadata"]["name"] == name);
            // The agent asks for one of its own, as the plugin would.
            let Some(pod) = state.newer.get(name).or_else(listed) else { return (404, failure(404)) };
            let text = versioned(pod).to_string();
            state.gets += 1;
            (200, text)
        }
        None => (404, failure(404)),
    }
}

/// A pod with a version that it has only while it is as it is.
fn versioned(pod: &Value) -> Value {
    let mut hasher = DefaultHasher::new();
    pod.to_string().hash(&mut hasher);
    let mut pod = pod.clone();
    pod["metadata"]["resourceVersion"] = json!(hasher.finish().to_string());
    pod
}

fn list(query: &str, state: &mut State) -> Value {
    let parameter = |name: &str| {
        query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('=')).map(str::to_owned)
    };
    assert_eq!(parameter("fieldSelector").as_deref(), Some("spec.nodeName%3Dnode-1"), "{query}");
    let limit: usize = parameter("limit").and_then(|text| text.parse().ok()).expect("a limit");
    assert!((1..=500).contains(&limit), "{limit}");
    let from: usize = match parameter("continue") {
        Some(text) => {
            assert_eq!(parameter("resourceVersion"), None, "a list goes on at its own version");
            text.parse().expect("what the page before said")
        }
        None => {
            state.lists += 1;
            assert_eq!(parameter("resourceVersion").as_deref(), Some("0"), "from the server's memory");
            0
        }
    };
    state.pages += 1;
    let items: Vec<Value> = state.pods.iter().skip(from).take(limit).map(versioned).collect();
    let next = from + items.len();
    let rest = if next < state.pods.len() { next.to_string() } else { String::new() };
    json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "7", "continue": rest}, "items": items})
}

/// A running pod of the mesh with these addresses, as the API server has it: with much unused data.
pub fn mesh_pod(name: &str, addresses: &[&str]) -> Value {
    let addresses: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip})).collect();
    let env: Vec<Value> =
        (0..40).map(|count| json!({"name": format!("VARIABLE_{count}"), "value": "x".repeat(60)})).collect();
    json!({
        "metadata": {
            "namespace": "shop", "name": name, "uid": format!("uid-of-{name}"),
            "labels": {"app": name, "pod-template-hash": "5d4f8c7b9"},
            "annotations": {"sidecar.istio.io/status": "{\"initContainers\":[\"istio-validation\"],\"containers\":[\"istio-proxy\"]}",
                "kubectl.kubernetes.io/last-applied-configuration": "y".repeat(4000)},
            "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {"f:conditions": {".": {}, "k": "z".repeat(4000)}}}}],
        },
        "spec": {"nodeName": "node-1", "containers": [
            {"name": "app", "image": "app", "env": env},
            {"name": "istio-proxy", "image": "proxy", "args": ["proxy", "sidecar", "--domain", "x"], "env": env,
             "securityContext": {"runAsUser": 1337, "runAsGroup": 1337}},
        ]},
        "status": {"phase": "Running", "podIP": addresses.first().map(|first| first["ip"].clone()), "podIPs": addresses,
            "containerStatuses": [{"name": "app", "ready": true, "state": {"running": {}}}]},
    })
}

/// A UID that cgroups have, by which a process of a pod is known.
pub const UID: &str = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0";

/// A pod of the mesh with this UID.
pub fn mesh_pod_of(uid: &str, name: &str, addresses: &[&str]) -> Value {
    let mut pod = mesh_pod(name, addresses);
    pod["metadata"]["uid"] = json!(uid);
    pod
}

/// The pod, held back by its validation.
pub fn held_back(mut pod: Value) -> Value {
    pod["status"]["phase"] = json!("Pending");
    let end = json!({"terminated": {"exitCode": 126, "reason": "Error", "containerID": "containerd://1", "finishedAt": "2026-11-21T00:00:00Z"}});
    pod["status"]["initContainerStatuses"] = json!([{"name": "istio-validation", "state": end}]);
    pod
}

/// A directory in which network namespaces are mounted, as a container runtime has it. The mounts go with the value.
pub struct Sandboxes(NetnsDirectory);

impl Sandboxes {
    /// An empty directory, where the agent of this node looks for namespaces.
    pub fn new(node: &mut Node) -> Self {
        let sandboxes = Self(NetnsDirectory::new().expect("a folder"));
        node.set("MOUNTED_CNI_NETNS_DIR", &sandboxes.path().display().to_string());
        sandboxes
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Mounts a namespace under a name.
    pub fn mount(&mut self, name: &str, namespace: &Path) {
        self.0.mount(name, namespace).expect("mounts");
    }

    /// A new namespace with these addresses on its `eth0`, mounted under a name, without rules.
    pub fn add(&mut self, name: &str, addresses: &[&str]) -> Namespace {
        let namespace = Namespace::empty(Families::Dual).expect("a namespace");
        namespace.add_eth0(addresses).expect("addresses");
        self.mount(name, &namespace.path());
        namespace
    }

    /// What a runtime does at a pod's end: its namespace is not mounted any more, and the file is gone.
    pub fn remove(&mut self, name: &str) {
        self.0.remove(name).expect("removes");
    }
}

/// Fills a chain of a table of iptables with more rules than the agent reads.
pub fn flood(namespace: &Namespace, table: &str, chain: &str) {
    let rules = format!("seq 30000 | sed 's/.*/-A {chain} -p tcp -m tcp --dport & -j RETURN/'");
    let script = format!("{{ echo '*{table}'; {rules}; echo COMMIT; }} | iptables-nft-restore --noflush");
    namespace.sh(&script).expect("runs").ok().expect("fills it");
}

/// Does in a namespace what the plugin does there for a pod with a sidecar and no further annotations.
pub fn redirect(namespace: &Namespace) {
    redirect_with(namespace, BackendChoice::Auto);
}

/// Likewise, with this backend.
pub fn redirect_with(namespace: &Namespace, choice: BackendChoice) {
    redirect_as(namespace, &[], choice);
}

/// Likewise for a pod with more annotations.
pub fn redirect_as(namespace: &Namespace, annotations: &[(&str, &str)], choice: BackendChoice) {
    let outside = Outside::of_this_process();
    let applied = namespace.enter(|| {
        let backend = suitable(choice, outside.finds_this_foreign());
        netns_apply::apply(&plan(annotations), &ApplyOptions::default().backend(backend))
    });
    applied.expect("enters").expect("applies");
}

/// What is not as planned in the namespace of a pod with these annotations beside those of any sidecar.
pub fn mismatch(
    namespace: &Namespace,
    annotations: &[(&str, &str)],
    choice: BackendChoice,
) -> Option<String> {
    mismatch_in(namespace, annotations, choice, NativeForm::Plain)
}

/// Likewise, with native rules written in this form.
pub fn mismatch_in(
    namespace: &Namespace,
    annotations: &[(&str, &str)],
    choice: BackendChoice,
    native_form: NativeForm,
) -> Option<String> {
    let outside = Outside::of_this_process();
    let verified = namespace.enter(|| {
        let backend = suitable(choice, outside.finds_this_foreign());
        let options = ApplyOptions::default().backend(backend).native_form(native_form);
        netns_apply::verify(&plan(annotations), &options)
    });
    verified.expect("enters").expect("looks").map(|mismatch| mismatch.to_string())
}

/// In the calling thread's network namespace.
fn plan(annotations: &[(&str, &str)]) -> RulePlan {
    let addresses = addresses().expect("addresses");
    let all = [("sidecar.istio.io/status", "")].into_iter().chain(annotations.iter().copied());
    let decision = PodFacts::sidecar(all).decide(&NamespaceFacts::new(&addresses));
    let Ok(Decision::Redirect(redirect)) = decision else { panic!("{decision:?}") };
    redirect.plan()
}

/// Waits until something is so; shows the agent's log if it never is.
pub fn wait(node: &Node, what: &str, mut is_so: impl FnMut() -> bool) {
    let waited = until(what, LIMIT, &[], || Ok(is_so().then_some(())));
    waited.unwrap_or_else(|error| panic!("{error:#}\n{}", node.log()));
}

/// A metric of the agent; none while it does not answer.
pub fn metric(node: &Node, name: &str) -> Option<f64> {
    http::metric(&get(node.monitoring, "/metrics")?.1, name)
}

/// Waits for a metric to be at least so much.
pub fn wait_at_least(node: &Node, name: &str, least: f64) {
    wait(node, &format!("{name} to be {least} at least"), || {
        metric(node, name).is_some_and(|value| value >= least)
    });
}

/// How often the drift watch found a pod as planned by reading its rules, and how often without, at one moment.
pub fn read_and_unread(node: &Node) -> (f64, f64) {
    let (_, text) = get(node.monitoring, "/metrics").expect("answers");
    let value = |name: &str| http::metric(&text, name).unwrap_or_else(|| panic!("no {name}"));
    // A look that reads nothing counts as such before it counts as a look, so of one that is going on it may look as if one fewer had been read.
    let unread = value("istio_cni_drift_unread_total");
    (value(&check("verified")) - unread, unread)
}

/// Waits until a number of further rounds went round all pods.
pub fn wait_rounds(node: &Node, more: f64) {
    const ROUNDS: &str = "istio_cni_drift_rounds_total{result=\"complete\"}";
    let now = metric(node, ROUNDS).unwrap_or_default();
    wait_at_least(node, ROUNDS, now + more);
}

/// The name of the metric that counts the drift watch's checks with this result, with its label.
pub fn check(result: &str) -> String {
    format!("istio_cni_drift_checks_total{{result=\"{result}\"}}")
}

/// All addresses of a pod's object.
pub fn addresses_of(pod: &Value) -> Vec<IpAddr> {
    let listed = pod["status"]["podIPs"].as_array().into_iter().flatten();
    listed.filter_map(|item| item["ip"].as_str()?.parse().ok()).collect()
}

/// A process with a user namespace in which ids begin at 100000 outside, as a kubelet makes it for `hostUsers: false`, and a network
/// namespace that belongs to it. Ends with the value.
pub struct Foreign(Killed);

impl Foreign {
    /// Starts it, and waits until its namespaces exist and its ids are mapped.
    pub fn start() -> Self {
        let child =
            Command::new("unshare").args(["--user", "--net", "sleep", "infinity"]).spawn().expect("starts");
        let foreign = Self(Killed(child));
        let proc = |file: &str| format!("/proc/{}/{file}", foreign.0.id());
        let own = fs::read_link("/proc/self/ns/user").expect("a namespace");
        until("the user namespace to be made", LIMIT, &[], || {
            Ok((fs::read_link(proc("ns/user"))? != own).then_some(()))
        })
        .expect("is made");
        for map in ["uid_map", "gid_map"] {
            fs::write(proc(map), "0 100000 65536").expect("maps");
        }
        foreign
    }

    /// The path of its network namespace.
    pub fn network(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.0.id()).into()
    }
}

/// The network namespace that the agent runs in, which stands for the host's: process 1 of this machine may not be read.
pub fn hosts() -> PathBuf {
    format!("/proc/{}/ns/net", std::process::id()).into()
}

/// The host's processes, as the agent sees them.
pub struct Proc(pub tempfile::TempDir);

impl Proc {
    /// Of a node whose network namespace is that of [`hosts`]. Process 1 is in it.
    pub fn new(node: &mut Node) -> Self {
        Self::of(node, &hosts())
    }

    /// Of a node with this network namespace.
    pub fn of(node: &mut Node, host: &Path) -> Self {
        let proc = Self::on(host);
        node.set("MOUNTED_PROC_DIR", &proc.0.path().display().to_string());
        proc
    }

    /// Of a host with this network namespace.
    pub fn on(host: &Path) -> Self {
        let proc = Self(tempfile::tempdir().expect("a folder"));
        proc.add(1, "0::/init.scope\n", host);
        // Not a process.
        fs::write(proc.0.path().join("uptime"), "1").expect("writes");
        proc
    }

    /// A process with this text of `/proc/PID/cgroup`, in this network namespace.
    pub fn add(&self, process: u32, cgroup: &str, namespace: &Path) {
        let folder = self.0.path().join(process.to_string());
        fs::create_dir_all(folder.join("ns")).expect("a folder");
        fs::write(folder.join("cgroup"), cgroup).expect("writes");
        symlink(namespace, folder.join("ns/net")).expect("a link");
    }

    /// A process of a pod, as containerd has it.
    pub fn add_of(&self, process: u32, uid: &str, namespace: &Path) {
        let slice = uid.replace('-', "_");
        let path = format!(
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice/cri-containerd-{process}.scope\n"
        );
        self.add(process, &path, namespace);
    }
}

/// What others have in a namespace.
pub const THEIRS: &str =
    "nft 'table inet theirs { chain out { type filter hook output priority 0; tcp dport 7 counter; }; }'
iptables-nft -t filter -A FORWARD -p tcp --dport 7 -j ACCEPT
iptables-nft -t nat -N THEIRS
iptables-nft -t nat -A THEIRS -p tcp --dport 7 -j RETURN
ip rule add fwmark 0x77 lookup 77
ip route add 192.0.2.0/24 dev eth0 table 77";

/// What is in a namespace and was not before, or the other way round. Order aside, and the numbers that the kernel gives to policy rules: both
/// are compared by [`mismatch`] as far as they matter.
pub fn lost_or_added(namespace: &Namespace, before: &Snapshot) -> Vec<String> {
    let changes = namespace.snapshot().expect("a snapshot").changes_since(before);
    let is_numbered = |line: &str| line.ends_with("fwmark 0x539 lookup 133 proto unspec");
    let changes = changes.iter().filter(|change| {
        !change.line.starts_with("the same lines in another order") && !is_numbered(change.line.trim_end())
    });
    changes.map(ToString::to_string).collect()
}

/// What is deleted of a pod's redirection, where connections are redirected.
const REDIRECT: [&str; 6] = [
    "iptables-nft -t nat -D OUTPUT -j ISTIO_OUTPUT",
    "iptables-nft -t nat -D PREROUTING -p tcp -j ISTIO_INBOUND",
    "iptables-nft -t nat -D ISTIO_OUTPUT 1",
    "iptables-nft -t nat -F ISTIO_REDIRECT",
    "iptables-nft -t nat -F ISTIO_OUTPUT; iptables-nft -t nat -F OUTPUT",
    "nft flush table ip nat; iptables-nft -t nat -A THEIRS -p tcp --dport 7 -j RETURN",
];
/// Likewise, where they go to the proxy as they are.
const TPROXY: [&str; 6] = [
    "ip rule del lookup 133",
    "ip route flush table 133",
    "iptables-nft -t mangle -F ISTIO_TPROXY",
    "iptables-nft -t mangle -F",
    "iptables-nft -t mangle -D PREROUTING -p tcp -j ISTIO_INBOUND",
    "iptables-nft -t nat -D OUTPUT -j ISTIO_OUTPUT",
];
/// Likewise, in native tables.
const NATIVE: [&str; 4] = [
    "nft delete table inet istio-proxy-nat",
    "nft flush table inet istio-proxy-nat",
    "nft flush ruleset inet; nft 'table inet theirs { chain out { type filter hook output priority 0; tcp dport 7 counter; }; }'",
    "nft flush chain inet istio-proxy-nat istio-output",
];

/// Deletions of a pod's redirection.
pub fn deletions(is_native: bool, is_tproxy: bool) -> &'static [&'static str] {
    match (is_native, is_tproxy) {
        (true, _) => &NATIVE,
        (false, true) => &TPROXY,
        (false, false) => &REDIRECT,
    }
}
