//! The agent in ambient mode, as a process: a real API server, the plugin, network namespaces with real rules, and a client that is as strict as ztunnel.
//! Needs root.

pub mod stock_ztunnel;

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use e2e::agent::{Agent, CALICO, Node, get, memory_kib};
use e2e::kube::{ApiServer, Sending, fresh};
use e2e::pods::{self, Proc, Sandboxes, metric};
use e2e::privileges::{needs, one_fewer, only};
use e2e::ztunnel::Obedient;
use netns_apply::netlink::NftConnection;
use netns_apply::netns::Netns;
use serde_json::{Value, json};
use test_support::netns::Namespace;
use test_support::process::Background;
use test_support::project;
use test_support::sample;

const SYSTEM: &str = "istio-system";
const REDIRECTION: &str = "ambient.istio.io/redirection";
const ENROLLED: &str = "istio_cni_ambient_pods{state=\"enrolled\"}";

/// What the agent's account needs in ambient mode; SYSTEM is its namespace.
const RIGHTS: &str = r#"
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: agent-SYSTEM}
rules:
- {apiGroups: [""], resources: [pods, namespaces], verbs: [get, list, watch]}
- {apiGroups: [""], resources: [pods/status], verbs: [patch]}
- {apiGroups: ["", "events.k8s.io"], resources: [events], verbs: [create, patch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: agent-SYSTEM}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: agent-SYSTEM}
subjects: [{kind: ServiceAccount, name: agent, namespace: SYSTEM}]
"#;

/// A node of a cluster, and its container runtime.
struct World {
    api: Arc<ApiServer>,
    /// The namespace of pods, and the node's name.
    shop: String,
    node_name: String,
    node: Node,
    proc: Proc,
    sandboxes: Mutex<Sandboxes>,
    /// The node's own network namespace.
    host: Namespace,
    processes: AtomicU32,
}

impl World {
    /// With names of its own on a server that others use, too.
    fn new() -> Self {
        let api = ApiServer::shared().expect("an API server");
        Self::on(api, [SYSTEM, "shop", "node-1"].map(fresh))
    }

    /// With an API server of its own, and well-known names.
    fn alone() -> Self {
        let api = ApiServer::start().expect("an API server");
        Self::on(api, [SYSTEM, "shop", "node-1"].map(str::to_owned))
    }

    fn on(api: ApiServer, [system, shop, node_name]: [String; 3]) -> Self {
        for namespace in [&system, &shop] {
            api.create_namespace(namespace).expect("a namespace");
        }
        let ambient = "istio.io/dataplane-mode=ambient";
        api.kubectl(&["label", "namespace", &shop, ambient]).expect("labels");
        api.create_service_account(&system, "agent").expect("an account");
        api.apply(&RIGHTS.replace("SYSTEM", &system)).expect("rights");
        Self::node(Arc::new(api), &system, shop, node_name)
    }

    /// Another node of the same cluster.
    fn beside(&self, node_name: &str) -> Self {
        let system = &self.node.env["POD_NAMESPACE"];
        Self::node(self.api.clone(), system, self.shop.clone(), node_name.to_owned())
    }

    fn node(api: Arc<ApiServer>, system: &str, shop: String, node_name: String) -> Self {
        let mut node = Node::new(&[("10-calico.conflist", CALICO)]);
        node.use_real_plugin();
        fs::copy(api.ca_path(), node.path("account/ca.crt")).expect("copies");
        fs::write(node.path("account/token"), api.token(system, "agent").expect("a token")).expect("writes");
        let ztunnel = node.path("ztunnel/ztunnel.sock").display().to_string();
        let port = api.port().to_string();
        for (name, value) in [
            ("KUBERNETES_SERVICE_PORT", port.as_str()),
            ("KUBERNETES_SERVICE_PROTOCOL", "https"),
            ("POD_NAMESPACE", system),
            ("NODE_NAME", &node_name),
            ("SKIP_TLS_VERIFY", "false"),
            ("PLUGIN_SERVICE_ACCOUNT", ""),
            ("AMBIENT_ENABLED", "true"),
            ("ZTUNNEL_UDS_ADDRESS", &ztunnel),
        ] {
            node.set(name, value);
        }
        let host = Namespace::empty(test_support::netns::Families::Dual).expect("a namespace");
        let proc = Proc::of(&mut node, &host.path());
        let sandboxes = Sandboxes::new(&mut node);
        let (sandboxes, processes) = (Mutex::new(sandboxes), AtomicU32::new(100));
        Self { api, shop, node_name, node, proc, sandboxes, host, processes }
    }

    fn ztunnel(&self) -> Obedient {
        Obedient::start(self.socket())
    }

    fn socket(&self) -> PathBuf {
        self.node.path("ztunnel/ztunnel.sock")
    }

    /// The agent, under its seccomp profile as it ships: a call that is not in it ends the agent.
    fn start(&self) -> Agent<'_> {
        let helper = e2e::program::built().expect("the programs are built").join("e2e-helper");
        let profile = project::file("deploy/seccomp/install-cni.json");
        let (helper, profile) = (helper.display().to_string(), profile.display().to_string());
        let agent = self.node.start_as(&[&helper, "confined-or-killed", &profile]);
        agent.wait_ready();
        agent
    }

    /// A pod of this name, on the node.
    fn pod(&self, name: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": self.shop},
            "spec": {"nodeName": self.node_name, "automountServiceAccountToken": false, "serviceAccountName": "default",
                "containers": [{"name": "app", "image": "app"}]}})
    }

    /// The request by which the kubelet says that a pod's containers run.
    fn status(&self, name: &str, addresses: &[&str]) -> Sending {
        let ips: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip})).collect();
        let status = json!({"status": {"phase": "Running", "podIP": addresses[0], "podIPs": ips}});
        Sending::merge(&format!("/api/v1/namespaces/{}/pods/{name}/status", self.shop), &status)
    }

    /// A pod that the scheduler has put on the node.
    fn create(&self, name: &str) -> String {
        let made = self.api.create(&self.pod(name)).expect("a pod");
        made["metadata"]["uid"].as_str().expect("a UID").to_owned()
    }

    /// Its network namespace, as a runtime and a network plugin make it.
    fn sandbox(&self, name: &str, addresses: &[&str]) -> Namespace {
        let namespace = self.sandboxes.lock().expect("not poisoned").add(&format!("cni-{name}"), addresses);
        namespace.sh("ip route add default dev eth0; ip -6 route add default dev eth0").expect("routes");
        namespace
    }

    /// What the kubelet says when its containers run.
    fn run(&self, name: &str, uid: &str, namespace: &Namespace, addresses: &[&str]) {
        let run = self.run_later(name, uid, namespace, addresses);
        self.api.send_all(&[run]).expect("it runs");
    }

    fn post(&self, name: &str) -> Sending {
        Sending::post(&format!("/api/v1/namespaces/{}/pods", self.shop), &self.pod(name))
    }

    /// The request by which the kubelet says that.
    fn run_later(&self, name: &str, uid: &str, namespace: &Namespace, addresses: &[&str]) -> Sending {
        self.proc.add_of(self.processes.fetch_add(1, Ordering::Relaxed), uid, &namespace.path());
        self.status(name, addresses)
    }

    /// A pod that runs, of which the agent finds a real process, with a user of its own.
    fn running_as_another_user(&self, name: &str, addresses: &[&str]) -> (Namespace, Background) {
        let uid = self.create(name);
        let namespace = self.sandbox(name, addresses);
        let mut command = Command::new("setpriv");
        command.args(["--reuid=1337", "--regid=1337", "--clear-groups", "sleep", "infinity"]);
        let log = self.node.path("process.log");
        let process = Background::start("sleep", &namespace.command(&command), &log).expect("starts");
        let process = process.killed_on_drop();
        let folder = format!("/proc/{}", process.id());
        self.wait("the process to have another user", || {
            fs::metadata(&folder).is_ok_and(|folder| folder.uid() == 1337)
        });
        self.proc.add_of(process.id(), &uid, format!("{folder}/ns/net").as_ref());
        self.api.send_all(&[self.status(name, addresses)]).expect("it runs");
        (namespace, process)
    }

    /// A pod that runs.
    fn running(&self, name: &str, addresses: &[&str]) -> (String, Namespace) {
        let uid = self.create(name);
        let namespace = self.sandbox(name, addresses);
        self.run(name, &uid, &namespace, addresses);
        (uid, namespace)
    }

    /// The plugin's ADD, as the runtime calls it.
    fn add(&self, name: &str, addresses: &[&str]) -> Output {
        let conf = self.node.conf("10-calico.conflist").expect("a conflist");
        let conf: Value = serde_json::from_str(&conf).expect("JSON");
        let entry =
            conf["plugins"].as_array().expect("plugins").iter().find(|one| one["type"] == "istio-cni");
        let mut entry = entry.expect("our entry").clone();
        let network =
            |ip: &&str| json!({"address": format!("{ip}/{}", if ip.contains(':') { 64 } else { 24 })});
        let ips: Vec<Value> = addresses.iter().map(network).collect();
        entry["cniVersion"] = json!("1.0.0");
        entry["name"] = json!("net");
        entry["prevResult"] = json!({"cniVersion": "1.0.0", "ips": ips});
        let file = self.node.path(&format!("conf-of-{name}"));
        fs::write(&file, entry.to_string()).expect("writes");
        Command::new(self.node.path("bin/istio-cni"))
            .env_clear()
            .envs([
                ("CNI_COMMAND", "ADD"),
                ("CNI_CONTAINERID", "c1"),
                ("CNI_IFNAME", "eth0"),
                ("CNI_PATH", "/bin"),
            ])
            .env("CNI_NETNS", self.sandboxes.lock().expect("not poisoned").path().join(format!("cni-{name}")))
            .env("CNI_ARGS", format!("K8S_POD_NAMESPACE={};K8S_POD_NAME={name}", self.shop))
            .stdin(Stdio::from(fs::File::open(file).expect("a file")))
            .output()
            .expect("runs")
    }

    fn annotation(&self, name: &str) -> Option<String> {
        let pod = self.api.get("pod", &self.shop, name).expect("a pod");
        pod["metadata"]["annotations"][REDIRECTION].as_str().map(str::to_owned)
    }

    fn wait(&self, what: &str, is_so: impl FnMut() -> bool) {
        pods::wait(&self.node, what, is_so);
    }

    fn wait_enrolled(&self, count: f64) {
        self.wait(&format!("{count} enrolled pods"), || metric(&self.node, ENROLLED) == Some(count));
    }

    fn wait_annotation(&self, name: &str, wanted: Option<&str>) {
        self.wait(&format!("the annotation of {name} to be {wanted:?}"), || {
            self.annotation(name).as_deref() == wanted
        });
    }

    fn verbose(&self) -> String {
        get(self.node.health, "/readyz?verbose").expect("answers").1
    }

    fn probes(&self) -> Vec<IpAddr> {
        self.host
            .enter(|| NftConnection::open()?.probe_addresses(redirect_core::ambient::ProbeSources::USUAL))
            .expect("enters")
            .expect("reads")
            .addresses()
            .iter()
            .copied()
            .collect()
    }
}

fn has_rules(namespace: &Namespace) -> bool {
    let script = "nft list ruleset | grep -ci istio || true";
    namespace.sh(script).expect("runs").stdout.trim() != "0"
}

fn inode(namespace: &Namespace) -> u64 {
    Netns::open(namespace.path()).expect("a namespace").id().inode()
}

fn label(world: &World, value: &str) {
    let label = format!("istio.io/dataplane-mode{value}");
    world.api.kubectl(&["label", "namespace", &world.shop, &label, "--overwrite"]).expect("labels");
}

#[test]
fn running_pods_are_enrolled_healed_and_leave_as_their_namespace_says() {
    let world = World::new();
    let (first, web) = world.running("web", &["10.1.0.2", "fd00::2"]);
    let (second, db) = world.running("db", &["10.1.0.3"]);
    let istios = || {
        let listing =
            world.host.sh("iptables-nft -t nat -S POSTROUTING; ipset list -n").expect("lists").stdout;
        listing.lines().filter(|line| line.to_ascii_lowercase().contains("istio")).count()
    };
    let left = "set -e; ipset create istio-inpod-probes-v4 hash:ip; iptables-nft -t nat -N ISTIO_POSTRT; iptables-nft -t nat -I POSTROUTING 1 -j ISTIO_POSTRT";
    world.host.sh(left).expect("runs").ok().expect("what Istio's agent left");
    // As if the pod had a branch interface in Amazon's VPC.
    let branch = "set -e; echo 0 > /proc/sys/net/ipv4/tcp_early_demux; ip route add 10.1.0.2 dev lo table 101; ip rule add pref 10 iif lo lookup 101";
    world.host.sh(branch).expect("runs").ok().expect("a branch interface");
    let branch_rules = || {
        world
            .host
            .sh("ip rule | grep -c -e 'to 10.1.0.2 lookup 101' -e '^9:.*iif lo lookup local' || true")
            .expect("lists")
            .stdout
    };
    let agent = world.start();
    world.wait("pods to be pending", || {
        metric(&world.node, "istio_cni_ambient_pods{state=\"pending\"}") == Some(2.0)
    });
    assert_eq!(istios(), 2, "it went before all pods were enrolled");
    let ztunnel = world.ztunnel();
    world.wait_enrolled(2.0);
    world.wait("Istio's rules to go", || istios() == 0);
    assert_eq!(branch_rules(), "2\n");
    for name in ["web", "db"] {
        world.wait_annotation(name, Some("enabled"));
    }
    let served = [(first, inode(&web)), (second, inode(&db))];
    assert_eq!(ztunnel.served(), served.into());
    assert_eq!(world.probes().len(), 3);
    assert!(world.verbose().contains("2 of 2 ambient pods enrolled, verified"), "{}", world.verbose());
    assert_eq!(metric(&world.node, "ztunnel_connected"), Some(1.0));

    // The kernel reports it: nobody waits for the next full pass.
    let deleted = Instant::now();
    web.sh("nft flush ruleset").expect("runs").ok().expect("flushes");
    world.wait("rules to be back", || has_rules(&web));
    assert!(deleted.elapsed() < Duration::from_secs(30), "it took {:?}", deleted.elapsed());

    label(&world, "-");
    world.wait_enrolled(0.0);
    world.wait("rules to be gone", || !has_rules(&web) && !has_rules(&db));
    world.wait_annotation("web", None);
    world.wait("ztunnel to drop both", || ztunnel.served().is_empty());
    assert!(world.probes().is_empty());
    assert_eq!(branch_rules(), "0\n");
    label(&world, "=ambient");
    world.wait_enrolled(2.0);

    // It runs on, until it is gone.
    world
        .api
        .kubectl(&["delete", "pod", "web", "-n", &world.shop, "--force", "--grace-period=0"])
        .expect("deletes");
    world.wait("ztunnel to drop it", || ztunnel.served().len() == 1);
    world.wait("probes of one", || world.probes().len() == 1);
    assert_eq!(agent.end(), Some(0));
    assert!(has_rules(&db), "what runs stays redirected");
}

#[test]
fn a_pod_that_is_created_starts_only_behind_ztunnel() {
    let world = World::new();
    let _agent = world.start();
    let uid = world.create("web");
    let web = world.sandbox("web", &["10.1.0.2"]);
    let start = Instant::now();
    let refused = world.add("web", &["10.1.0.2"]);
    let said = String::from_utf8_lossy(&refused.stdout).into_owned();
    assert!(
        !refused.status.success() && said.contains("no ztunnel is connected"),
        "{said}\n{}",
        world.node.log()
    );
    assert!(start.elapsed() > Duration::from_secs(4), "it has time to come: {:?}", start.elapsed());
    // Its addresses are not in its status yet, and it is reported by its name all the same.
    world.wait("the event", || {
        let events = world.api.list("events", &world.shop).expect("events");
        events.iter().any(|event| {
            event["reason"] == "AmbientPending"
                && event["involvedObject"]["name"] == "web"
                && event["involvedObject"]["uid"] == json!(uid)
                && event["message"].as_str().is_some_and(|why| why.contains("no ztunnel is connected"))
        })
    });

    let ztunnel = world.ztunnel();
    world.wait("ztunnel", || metric(&world.node, "ztunnel_connected") == Some(1.0));
    let wrong = world.add("web", &["10.1.0.9"]);
    let said = String::from_utf8_lossy(&wrong.stdout).into_owned();
    assert!(!wrong.status.success() && said.contains("does not have the pod's address 10.1.0.9"), "{said}");

    let added = world.add("web", &["10.1.0.2"]);
    let said = String::from_utf8_lossy(&added.stdout).into_owned();
    assert!(added.status.success(), "{said}\n{}", world.node.log());
    assert_eq!(ztunnel.served(), [(uid.clone(), inode(&web))].into());
    assert!(has_rules(&web) && world.probes() == ["10.1.0.2".parse::<IpAddr>().expect("one")]);
    world.wait_annotation("web", Some("enabled"));
    for (code, least) in [(200, 1.0), (500, 2.0)] {
        let name = format!("istio_cni_plugin_requests_total{{response_code=\"{code}\"}}");
        assert!(metric(&world.node, &name).is_some_and(|count| count >= least), "{name}");
    }

    // What the kubelet writes then changes nothing.
    world.run("web", &uid, &web, &["10.1.0.2"]);
    world.wait_enrolled(1.0);
    assert_eq!(ztunnel.served(), [(uid, inode(&web))].into());
}

/// As docs/reference/privileges.md has it. With one fewer the pod's reason names that, and nothing is changed.
#[test]
fn enrolment_needs_the_documented_capabilities() {
    let needed = needs("install-cni", "enrols pods in ambient mode").expect("a row");
    assert!(!needed.is_empty(), "the page lists nothing");
    let world = World::new();
    let (web, _process) = world.running_as_another_user("web", &["10.1.0.2"]);
    let ztunnel = world.ztunnel();
    let before = web.snapshot().expect("a snapshot");
    let start = |capabilities: &[String]| {
        let words = only(capabilities);
        world.node.start_as(&words.iter().map(String::as_str).collect::<Vec<_>>())
    };
    for (some, missing) in one_fewer(&needed) {
        let _agent = start(&some);
        let name = missing.trim_start_matches("CAP_");
        let says =
            || get(world.node.health, "/readyz?verbose").is_some_and(|(_, words)| words.contains(name));
        world.wait(&format!("the agent to name {missing}"), says);
        let changes = web.snapshot().expect("a snapshot").changes_since(&before);
        assert!(changes.is_empty(), "without {missing}: {changes:?}");
        assert!(ztunnel.served().is_empty() && world.probes().is_empty(), "without {missing}");
        assert_ne!(world.annotation("web").as_deref(), Some("enabled"), "without {missing}");
    }
    let _agent = start(&needed);
    world.wait_enrolled(1.0);
    assert!(has_rules(&web));
}

#[test]
fn pods_stay_enrolled_while_the_agent_is_killed_and_the_api_server_is_gone() {
    let world = World::alone();
    let (uid, web) = world.running("web", &["10.1.0.2"]);
    let ztunnel = world.ztunnel();
    let agent = world.start();
    world.wait_annotation("web", Some("enabled"));
    agent.kill();
    assert_eq!(ztunnel.served(), [(uid.clone(), inode(&web))].into());
    web.sh("nft flush ruleset").expect("runs").ok().expect("flushes");
    let agent = world.start();
    world.wait_enrolled(1.0);
    assert!(has_rules(&web));
    assert_eq!(ztunnel.served(), [(uid.clone(), inode(&web))].into());

    // The API server goes; the node goes on.
    world.api.stop();
    web.sh("nft flush ruleset").expect("runs").ok().expect("flushes");
    world.wait("rules to be back", || has_rules(&web));
    assert_eq!(ztunnel.served(), [(uid, inode(&web))].into());
    agent.kill();
}

/// How many pods run when their namespace becomes ambient; `PODS` plays more.
fn running() -> u16 {
    sample::number("PODS", 20)
}

#[test]
fn all_pods_of_a_namespace_are_enrolled_at_once() {
    let world = World::new();
    label(&world, "-");
    let numbers: Vec<u16> = (0..running()).collect();
    let name = |number: u16| format!("web-{number}");
    let address = |number: u16| format!("10.1.{}.{}", 1 + number / 250, 1 + number % 250);
    let posts: Vec<Sending> = numbers.iter().map(|number| world.post(&name(*number))).collect();
    world.api.send_all(&posts).expect("pods");
    let made = world.api.list("pod", &world.shop).expect("pods");
    let uid = |pod: &Value| pod["metadata"]["uid"].as_str().expect("a UID").to_owned();
    let uids: BTreeMap<String, String> = made
        .iter()
        .map(|pod| (pod["metadata"]["name"].as_str().expect("a name").to_owned(), uid(pod)))
        .collect();
    let mut sandboxes = Vec::new();
    let mut runs = Vec::new();
    for number in &numbers {
        let (name, address) = (name(*number), address(*number));
        let sandbox = world.sandbox(&name, &[&address]);
        runs.push(world.run_later(&name, &uids[&name], &sandbox, &[&address]));
        sandboxes.push(sandbox);
    }
    world.api.send_all(&runs).expect("they run");
    let ztunnel = world.ztunnel();
    let agent = world.start();
    let before = memory_kib(agent.id(), "VmRSS:");
    label(&world, "=ambient");
    let start = Instant::now();
    world.wait_enrolled(f64::from(running()));
    let took = start.elapsed();
    assert_eq!(ztunnel.served().len(), sandboxes.len());
    assert_eq!(world.probes().len(), sandboxes.len());
    // Full passes, and monitors.
    std::thread::sleep(Duration::from_secs(3));
    let after = memory_kib(agent.id(), "VmRSS:");
    eprintln!(
        "{} running pods were enrolled in {took:?}; the agent had {before} KiB before, {after} now, {} at most",
        sandboxes.len(),
        memory_kib(agent.id(), "VmHWM:")
    );
}

/// How many pods are created one after the other; `ADDS` plays more.
fn adds() -> u16 {
    sample::number("ADDS", 24)
}

#[test]
fn pods_that_are_created_in_a_crowd_are_all_enrolled() {
    let world = World::new();
    let ztunnel = world.ztunnel();
    let _agent = world.start();
    let mut sandboxes = Vec::new();
    for number in 0..adds() {
        let name = format!("web-{number}");
        let uid = world.create(&name);
        let address = format!("10.1.{}.{}", 1 + number / 250, 1 + number % 250);
        sandboxes.push((name.clone(), uid, world.sandbox(&name, &[&address]), address));
    }
    let start = Instant::now();
    std::thread::scope(|scope| {
        for crowd in sandboxes.chunks(sandboxes.len().div_ceil(8)) {
            let world = &world;
            scope.spawn(move || {
                for (name, _, _, address) in crowd {
                    let added = world.add(name, &[address]);
                    assert!(added.status.success(), "{}", String::from_utf8_lossy(&added.stdout));
                }
            });
        }
    });
    eprintln!("{} pods were created and enrolled in {:?}", sandboxes.len(), start.elapsed());
    let wanted = sandboxes.iter().map(|(_, uid, namespace, _)| (uid.clone(), inode(namespace))).collect();
    assert_eq!(ztunnel.served(), wanted);
    assert_eq!(world.probes().len(), sandboxes.len());
}
