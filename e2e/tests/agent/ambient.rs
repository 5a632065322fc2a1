//! Enrolment in ambient mode on real network namespaces, with a client that is as strict as ztunnel. Needs root.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cni_core::enablement::Enablement;
use cni_core::sandboxed::SandboxedRuntimes;
use cni_core::selection::Acceptance;
use cni_core::selection::Programming;
use e2e::ztunnel::Obedient;
use install_cni::ambient::decision::Redirection;
use install_cni::ambient::enrolment::{Enrolled, Enrolment};
use install_cni::ambient::node::{NamedNamespaces, NodePass, NodeTools, ProbePath, ZtunnelLink};
use install_cni::ambient::pod::{AmbientPod, AmbientRules};
use install_cni::ambient_rules::KEEP_CONNECTIONS;
use install_cni::settings::{AmbientDefaults, Paths};
use netns_apply::netlink::NftConnection;
use netns_apply::netns::Netns;
use redirect_core::Family;
use redirect_core::ambient::ProbeSources;
use serde_json::{Map, Value, json};
use test_support::netns::{Families, Namespace};
use test_support::process::{SHORT, until};
use zds::Newcomer;

const UIDS: [&str; 2] = ["0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0", "1f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f1"];

const PROBES: ProbePath = ProbePath { sources: ProbeSources::USUAL, routes_branches: true };

/// A node: its own network namespace, its processes, its pods, and an agent as far as enrolment is concerned.
struct Node {
    folder: tempfile::TempDir,
    host: Namespace,
    pods: Vec<Value>,
    annotations: Arc<Mutex<BTreeMap<String, Redirection>>>,
    capture_scope: bool,
    keep_connections: Duration,
    begin: Instant,
}

/// What ends when an agent is killed.
struct Agent {
    node: Option<NodeTools>,
    enrolment: Enrolment,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let ended = self.node.take().map(|node| node.ztunnel.end());
        assert!(ended.is_none_or(|ended| ended.is_ok()) || std::thread::panicking(), "the server panicked");
    }
}

impl Node {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let host = Namespace::empty(Families::Dual).expect("a namespace");
        let (pods, annotations, begin) = (Vec::new(), Arc::default(), Instant::now());
        let (capture_scope, keep_connections) = (false, Duration::ZERO);
        let node = Self { folder, host, pods, annotations, capture_scope, keep_connections, begin };
        node.add_process(1, "0::/init.scope\n", &node.host.path());
        node
    }

    fn paths(&self) -> Paths {
        let none = PathBuf::new();
        Paths {
            source_bin: none.clone(),
            bin: none.clone(),
            net: none.clone(),
            netns: self.folder.path().join("netns"),
            proc: self.folder.path().join("proc"),
            run: none.clone(),
            service_account: none,
        }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("ztunnel.sock")
    }

    fn add_process(&self, process: u32, cgroup: &str, namespace: &Path) {
        let folder = self.paths().proc.join(process.to_string());
        std::fs::create_dir_all(folder.join("ns")).expect("a folder");
        std::fs::write(folder.join("cgroup"), cgroup).expect("writes");
        let link = folder.join("ns/net");
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(namespace, link).expect("a link");
    }

    /// A pod that runs, with this process in this namespace.
    fn add_pod(&mut self, uid: &str, process: u32, namespace: &Namespace, addresses: &[&str]) {
        self.add_process(process, &format!("0::/kubepods/burstable/pod{uid}/c\n"), &namespace.path());
        let addresses: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip})).collect();
        self.pods.push(json!({
            "metadata": {"namespace": "shop", "name": format!("web-{process}"), "uid": uid,
                "labels": {"istio.io/dataplane-mode": "ambient"}, "annotations": {}},
            "spec": {"serviceAccountName": "seller"},
            "status": {"phase": "Running", "podIPs": addresses},
        }));
    }

    /// The pods as the API server has them.
    fn listed(&self) -> Vec<AmbientPod> {
        let annotations = self.annotations.lock().expect("not poisoned");
        let rules = AmbientRules {
            enablement: Enablement::usual([]),
            defaults: AmbientDefaults {
                dns_capture: true,
                ipv6: true,
                keep_connections: self.keep_connections,
                capture_scope: self.capture_scope,
                probes: ProbeSources::USUAL,
            },
            sandboxed: SandboxedRuntimes::default(),
            acceptance: Acceptance::default(),
        };
        let read = |pod: &Value| {
            let mut pod = pod.clone();
            let uid = pod["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
            if let Some(annotation) = annotations.get(&uid) {
                pod["metadata"]["annotations"][Redirection::KEY] = json!(annotation.value());
            }
            AmbientPod::read(&pod, &Map::new(), &rules)
        };
        self.pods.iter().filter_map(read).collect()
    }

    fn agent(&self) -> Agent {
        let link = ZtunnelLink::serve(&self.socket(), Newcomer::AllPods, |_| {}).expect("a socket");
        // What a new agent knows before it has examined anything.
        link.begin(self.listed().into_iter().map(|pod| (pod.workload, None)).collect());
        let node = NodeTools {
            paths: self.paths(),
            path: PROBES,
            host: Netns::open(self.host.path()).expect("a namespace"),
            ztunnel: link,
            annotations: Arc::default(),
            named: NamedNamespaces::default(),
        };
        Agent { node: Some(node), enrolment: Enrolment::default() }
    }

    fn pass(&self, agent: &mut Agent) -> Enrolled {
        let node = agent.node.as_mut().expect("it serves");
        let mut effects = NodePass::new(node, Programming::new(false, false));
        let enrolled =
            agent.enrolment.reconcile(self.begin.elapsed(), &self.listed(), |_| true, &mut effects);
        let mut all = self.annotations.lock().expect("not poisoned");
        while let Some((uid, (_, annotation))) = node.annotations.take() {
            match annotation {
                Some(annotation) => drop(all.insert(uid, annotation)),
                None => drop(all.remove(&uid)),
            }
        }
        enrolled
    }

    /// Passes until all pods are as wanted.
    fn settle(&self, agent: &mut Agent) -> Enrolled {
        let mut last = Enrolled::default();
        let settled = until("enrolment", SHORT, &[], || {
            last = self.pass(agent);
            Ok(last.pending.is_empty().then_some(()))
        });
        settled.unwrap_or_else(|error| panic!("{error:#}: {last:?}"));
        last
    }

    fn probes(&self) -> BTreeSet<IpAddr> {
        let table = self
            .host
            .enter(|| NftConnection::open()?.probe_addresses(ProbeSources::USUAL))
            .expect("enters")
            .expect("a table");
        table.addresses().clone()
    }

    /// How many routes bring answers to probes back.
    fn routes_of_probes(&self) -> usize {
        let list = "ip route show table local; ip -6 route show table local";
        let routes = self.host.sh(list).expect("lists").stdout;
        let sources = Family::BOTH.map(|family| format!("{} dev lo", ProbeSources::USUAL.of(family)));
        routes.lines().filter(|line| sources.iter().any(|source| line.starts_with(source))).count()
    }

    fn annotation(&self, uid: &str) -> Option<Redirection> {
        self.annotations.lock().expect("not poisoned").get(uid).copied()
    }
}

fn ips(addresses: &[&str]) -> BTreeSet<IpAddr> {
    addresses.iter().map(|ip| ip.parse().expect("an address")).collect()
}

/// A pod's namespace, with the addresses and routes that a network gives it.
fn sandbox(addresses: &[&str]) -> Namespace {
    let namespace = Namespace::empty(Families::Dual).expect("a namespace");
    let mut script =
        "set -e; ip link add eth0 type veth peer name pe0; ip link set pe0 up; ip link set eth0 up; "
            .to_owned();
    for address in addresses {
        let (length, flags) = if address.contains(':') { (64, "nodad") } else { (24, "") };
        script += &format!("ip addr add {address}/{length} dev eth0 {flags}; ");
    }
    script += "ip route add default dev eth0; ip -6 route add default dev eth0";
    namespace.sh(&script).expect("runs").ok().expect("a network");
    namespace
}

fn inode(namespace: &Namespace) -> u64 {
    Netns::open(namespace.path()).expect("a namespace").id().inode()
}

fn lines_of_the_mesh(namespace: &Namespace) -> String {
    let script = "{ nft list ruleset | grep -i istio; ip rule | grep 32764; } | wc -l";
    namespace.sh(script).expect("runs").stdout.trim().to_owned()
}

#[test]
fn pods_are_enrolled_healed_and_leave_without_a_trace() {
    let mut node = Node::new();
    let (first, second) = (sandbox(&["10.1.0.2", "fd00::2"]), sandbox(&["10.1.0.3"]));
    node.add_pod(UIDS[0], 101, &first, &["10.1.0.2", "fd00::2"]);
    node.add_pod(UIDS[1], 102, &second, &["10.1.0.3"]);
    let mut agent = node.agent();
    // The server of ztunnel answers on a thread of its own.
    let waits = until("ztunnel to be missed", SHORT, &[], || {
        let seen = node.pass(&mut agent);
        assert_eq!((seen.wanted, seen.enrolled), (2, 0), "{seen:?}");
        Ok(seen.pending[UIDS[0]].contains("no ztunnel is connected").then_some(()))
    });
    waits.expect("it is");
    assert!(node.probes().is_empty() && node.annotation(UIDS[0]).is_none());

    let ztunnel = Obedient::start(node.socket());
    let settled = node.settle(&mut agent);
    assert_eq!((settled.enrolled, settled.wanted), (2, 2));
    let served = [(UIDS[0].to_owned(), inode(&first)), (UIDS[1].to_owned(), inode(&second))];
    assert_eq!(ztunnel.served(), BTreeMap::from(served));
    assert_eq!(node.probes(), ips(&["10.1.0.2", "fd00::2", "10.1.0.3"]));
    assert!(UIDS.iter().all(|uid| node.annotation(uid) == Some(Redirection::Enabled)));

    assert_eq!(node.routes_of_probes(), 2);

    // Other programs remove rules, and the probes.
    first.sh("nft flush ruleset").expect("runs").ok().expect("flushes");
    node.host.sh("nft flush ruleset").expect("runs").ok().expect("flushes");
    node.settle(&mut agent);
    assert_ne!(lines_of_the_mesh(&first), "0");
    assert_eq!(node.probes().len(), 3);
    node.host.sh("ip route del 169.254.7.127 dev lo table local").expect("removes");
    node.settle(&mut agent);
    assert_eq!(node.routes_of_probes(), 2);

    // One is not to be in ambient mode any more, and the other ends.
    node.pods[0]["metadata"]["labels"] = json!({});
    node.pods.remove(1);
    let settled = node.settle(&mut agent);
    assert_eq!((settled.enrolled, settled.wanted), (0, 0));
    assert_eq!((lines_of_the_mesh(&first).as_str(), node.annotation(UIDS[0])), ("0", None));
    assert!(node.probes().is_empty() && node.routes_of_probes() == 0);
    until("ztunnel to drop both", SHORT, &[], || Ok(ztunnel.served().is_empty().then_some(())))
        .expect("it does");
}

#[test]
fn a_pod_that_ztunnel_refuses_holds_up_no_other() {
    let mut node = Node::new();
    let (first, second) = (sandbox(&["10.1.0.2"]), sandbox(&["10.1.0.3"]));
    node.add_pod(UIDS[0], 101, &first, &["10.1.0.2"]);
    node.add_pod(UIDS[1], 102, &second, &["10.1.0.3"]);
    let ztunnel = Obedient::start(node.socket());
    ztunnel.refuse(&UIDS[..1]);
    let mut agent = node.agent();
    let refused = until("a refusal", SHORT, &[], || {
        let seen = node.pass(&mut agent);
        let why = seen.pending.get(UIDS[0]).is_some_and(|why| why.contains("ztunnel refused the pod"));
        Ok((why && seen.enrolled == 1).then_some(seen))
    });
    assert_eq!(refused.expect("one of two").pending.len(), 1);
    assert_eq!((node.annotation(UIDS[0]), node.annotation(UIDS[1])), (None, Some(Redirection::Enabled)));
    ztunnel.refuse(&[]);
    assert_eq!(node.settle(&mut agent).enrolled, 2);
}

#[test]
fn a_pod_whose_scope_changes_stays_enrolled_and_a_wrong_one_changes_nothing() {
    const EXCLUDED: &str = "traffic.istio.io/excludeOutboundPorts";
    let mut node = Node::new();
    let pod = sandbox(&["10.1.0.2"]);
    node.add_pod(UIDS[0], 101, &pod, &["10.1.0.2"]);
    let _ztunnel = Obedient::start(node.socket());
    let mut agent = node.agent();
    assert_eq!(node.settle(&mut agent).enrolled, 1);
    let rules = || pod.sh("nft list ruleset | grep 3306 | wc -l").expect("runs").stdout.trim().to_owned();
    node.pods[0]["metadata"]["annotations"][EXCLUDED] = json!("3306");
    assert_eq!(node.settle(&mut agent).enrolled, 1);
    assert_eq!(rules(), "0", "no operator allows it");
    node.capture_scope = true;
    let seen = node.pass(&mut agent);
    assert_eq!((seen.enrolled, seen.pending), (1, BTreeMap::new()), "in one pass");
    // Over TCP and UDP, in both families.
    assert_eq!(rules(), "4");
    node.pods[0]["metadata"]["annotations"][EXCLUDED] = json!("80,mysql");
    let seen = node.pass(&mut agent);
    assert!(seen.pending[UIDS[0]].starts_with(&format!("annotation {EXCLUDED}: \"mysql\"")), "{seen:?}");
    assert_eq!((seen.enrolled, rules().as_str()), (1, "4"), "what it had stays whole");
    assert_eq!(node.annotation(UIDS[0]), Some(Redirection::Pending));
    node.pods[0]["metadata"]["annotations"] = json!({});
    assert_eq!(node.settle(&mut agent).enrolled, 1);
    assert_eq!(rules(), "0");
}

#[test]
fn connections_are_kept_when_a_pod_is_enrolled_and_not_when_its_rules_are_repaired() {
    let mut node = Node::new();
    let pods = [sandbox(&["10.1.0.2"]), sandbox(&["10.1.0.3"])];
    node.add_pod(UIDS[0], 101, &pods[0], &["10.1.0.2"]);
    node.add_pod(UIDS[1], 102, &pods[1], &["10.1.0.3"]);
    node.pods[0]["metadata"]["annotations"][KEEP_CONNECTIONS] = json!("10m");
    let open = |pod: &Namespace, address: &str| {
        let open = || {
            let listener = TcpListener::bind((address, 8080))?;
            Ok::<_, io::Error>((TcpStream::connect((address, 8080))?, listener))
        };
        pod.enter(open).expect("enters").expect("a connection")
    };
    let _open = [open(&pods[0], "10.1.0.2"), open(&pods[1], "10.1.0.3")];
    let kept = || {
        pods.each_ref().map(|pod| {
            pod.enter(|| NftConnection::open()?.kept_connections()).expect("enters").expect("reads").exists()
        })
    };
    let _ztunnel = Obedient::start(node.socket());
    let mut agent = node.agent();
    assert_eq!(node.settle(&mut agent).enrolled, 2);
    assert_eq!(kept(), [false, false], "no operator allows it");

    let labels = std::mem::take(&mut node.pods[0]["metadata"]["labels"]);
    node.settle(&mut agent);
    node.keep_connections = Duration::from_secs(3600);
    node.pods[0]["metadata"]["labels"] = labels;
    assert_eq!(node.settle(&mut agent).enrolled, 2);
    assert_eq!(kept(), [true, false]);

    pods[0].sh("nft flush ruleset").expect("runs").ok().expect("flushes");
    assert_eq!(node.settle(&mut agent).enrolled, 2);
    assert_eq!(kept(), [false, false], "what bypassed ztunnel meanwhile is not kept");
}

#[test]
fn the_next_agent_goes_on_where_a_killed_one_was_and_ztunnel_keeps_its_pods() {
    let mut node = Node::new();
    let pod = sandbox(&["10.1.0.2"]);
    node.add_pod(UIDS[0], 101, &pod, &["10.1.0.2"]);
    let ztunnel = Obedient::start(node.socket());
    // Killed after each number of passes, from before anything was done to when all is.
    for passes in 0..4 {
        let mut agent = node.agent();
        for _ in 0..passes {
            node.pass(&mut agent);
        }
        drop(agent);
        let served = ztunnel.served();
        let mut next = node.agent();
        assert_eq!(node.settle(&mut next).enrolled, 1);
        assert_eq!(ztunnel.served(), BTreeMap::from([(UIDS[0].to_owned(), inode(&pod))]), "was {served:?}");
    }
}

#[test]
fn after_a_reboot_nothing_counts_until_it_is_verified() {
    let mut node = Node::new();
    let pod = sandbox(&["10.1.0.2"]);
    node.add_pod(UIDS[0], 101, &pod, &["10.1.0.2"]);
    node.annotations.lock().expect("not poisoned").insert(UIDS[0].to_owned(), Redirection::Enabled);
    let mut agent = node.agent();
    let seen = node.pass(&mut agent);
    assert_eq!((seen.wanted, seen.enrolled), (1, 0), "{seen:?}");
    let ztunnel = Obedient::start(node.socket());
    assert_eq!(node.settle(&mut agent).enrolled, 1);

    // Its sandbox is made again, with the same addresses.
    let again = sandbox(&["10.1.0.2"]);
    node.add_process(101, &format!("0::/kubepods/burstable/pod{}/c\n", UIDS[0]), &again.path());
    assert_eq!(node.settle(&mut agent).enrolled, 1);
    assert_eq!(ztunnel.served().get(UIDS[0]), Some(&inode(&again)));
    assert_ne!(lines_of_the_mesh(&again), "0");
}

#[test]
fn another_pods_namespace_is_not_taken() {
    let mut node = Node::new();
    let other = sandbox(&["10.1.0.9"]);
    node.add_pod(UIDS[0], 101, &other, &["10.1.0.2"]);
    let unaddressed = sandbox(&["10.1.0.3"]);
    node.add_pod(UIDS[1], 102, &unaddressed, &[]);
    let ztunnel = Obedient::start(node.socket());
    let mut agent = node.agent();
    let seen = node.pass(&mut agent);
    assert!(seen.pending[UIDS[0]].contains("none of the pod's processes"), "{seen:?}");
    assert!(seen.pending[UIDS[1]].contains("no address"), "{seen:?}");
    assert_eq!(lines_of_the_mesh(&other), "0");
    assert!(ztunnel.served().is_empty() && node.probes().is_empty());
    assert!(UIDS.iter().all(|uid| node.annotation(uid) != Some(Redirection::Enabled)));
}
