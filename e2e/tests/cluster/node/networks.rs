//! Networks of other projects under the chain, on a real node: flannel's daemon and CNI plugin, with the agent and the plugin.
//!
//! `make networks` runs this and prints the table of docs/reference/compatibility.md. The folder FLANNEL holds `flanneld` and the CNI plugin `flannel`: no registry
//! that the tests use has programs of both.

use std::fmt::Write as _;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use super::mesh_support::table::print;
use crate::agent_support::{
    LOOPBACK, POD, agent_pod, apply_manifest, exec_redirectctl, import_image, is_ready, programs, wait_loaded,
};
use crate::chart_support::rendered_without_tests;
use anyhow::{Context, Result, ensure};
use e2e::kube::ApiServer;
use e2e::node::{APP_PORT, Node, PRIMARY_CONFLIST, Pod, sidecar_pod};
use e2e::tools;
use e2e::traffic::{Client, Outcome, PROXY_ID, TcpServer, UdpServer, as_user};
use serde_json::{Value, json};
use test_support::netns::Namespace;
use test_support::process::{self, Background, until};

/// The file and the content that flannel's DaemonSet installs.
const CONFLIST: &str = "10-flannel.conflist";
const LIST: &str = r#"{
  "name": "cbr0",
  "cniVersion": "0.3.1",
  "plugins": [
    {"type": "flannel", "delegate": {"hairpinMode": true, "isDefaultGateway": true}},
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
"#;
/// Networks of all nodes, and this node's parts of them.
const NETWORKS: &str = r#"{"Network": "10.244.0.0/16", "EnableIPv6": true, "IPv6Network": "fd44::/48", "Backend": {"Type": "vxlan"}}"#;
const OF_NODE: [&str; 2] = ["10.244.7.0/24", "fd44:0:0:7::/64"];
const OF_ALL_NODES: &str = "10.244.0.0/16,fd44::/48";
/// Ports of the node. flannel's list maps the first one and the next to pods, kube-proxy the other.
const HOST_PORT: u16 = 18080;
const NODE_PORT: u16 = 30080;
const SERVICE: &str = "web";
const SERVICE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 77);
const SERVICE_PORT: u16 = 80;
const SERVICE_SOCKET: SocketAddr = SocketAddr::new(IpAddr::V4(SERVICE_ADDRESS), SERVICE_PORT);
/// Pods that start while a daemon is away.
const CROWD: usize = 5;
/// A user that is not the proxy's.
const APP: u32 = 1000;
/// Of the node.
const NODE: Ipv4Addr = Ipv4Addr::new(10, 87, 0, 2);
const OUTBOUND: u16 = 15001;
const INBOUND: u16 = 15006;
const DNS: u16 = 15053;

/// flannel on a node.
struct Flannel<'n> {
    node: &'n Node<'n>,
    api: &'n ApiServer,
    programs: PathBuf,
    daemon: Option<Background>,
}

impl<'n> Flannel<'n> {
    /// The node has no network before it.
    fn new(api: &'n ApiServer, node: &'n Node<'n>) -> Result<Self> {
        let programs = std::env::var_os("FLANNEL").context("FLANNEL names no folder: run make networks")?;
        fs::remove_file(node.conf_dir().join(PRIMARY_CONFLIST))?;
        let ranges = json!({"spec": {"podCIDR": OF_NODE[0], "podCIDRs": OF_NODE}}).to_string();
        api.kubectl(&["patch", "node", node.name(), "-p", &ranges])?;
        fs::write(node.state_dir().join("net-conf.json"), NETWORKS)?;
        Ok(Self { node, api, programs: programs.into(), daemon: None })
    }

    /// What the DaemonSet's init containers do, at each start: the plugin, then the list, whatever has become of it.
    fn install(&self) -> Result<()> {
        let program = self.programs.join("flannel");
        self.node.install_plugin(&program)?;
        // `cp -f`: the file is truncated and written, not renamed.
        Ok(fs::write(self.node.conf_dir().join(CONFLIST), LIST)?)
    }

    /// The daemon, which writes what the plugin reads.
    fn start(&mut self) -> Result<()> {
        let subnets = self.node.file("/run/flannel/subnet.env");
        let _ = fs::remove_file(&subnets);
        let mut command =
            process::command(self.programs.join("flanneld"), ["--kube-subnet-mgr", "--ip-masq"]);
        command.arg("--iface=eth0");
        command.arg(format!("--net-config-path={}", self.node.state_dir().join("net-conf.json").display()));
        command.arg(format!("--kubeconfig-file={}", self.api.admin_kubeconfig().display()));
        command.env("NODE_NAME", self.node.name());
        let log = self.node.state_dir().join("flanneld.log");
        let daemon = Background::start("flanneld", &self.node.command(&command), &log)?.killed_on_drop();
        until("flannel's subnet", POD, &[&daemon], || Ok(subnets.exists().then_some(())))?;
        self.daemon = Some(daemon);
        Ok(())
    }

    fn list(&self) -> Result<String> {
        Ok(fs::read_to_string(self.node.conf_dir().join(CONFLIST))?)
    }

    fn wait_chained(&self) -> Result<()> {
        until("our entry in flannel's list", POD, &[], || {
            Ok(self.list()?.contains("\"istio-cni\"").then_some(()))
        })
    }
}

/// What a cluster brings besides its network: kube-proxy.
fn start_kube_proxy(api: &ApiServer, node: &Node<'_>) -> Result<Background> {
    let mut command = process::command(tools::built("kube-proxy")?, ["--proxy-mode=iptables"]);
    command.arg(format!("--kubeconfig={}", api.admin_kubeconfig().display()));
    command.arg(format!("--hostname-override={}", node.name()));
    command.arg(format!("--cluster-cidr={OF_ALL_NODES}"));
    // Limits of connection tracking are the whole machine's.
    command.args(["--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0s"]);
    command.arg("--conntrack-tcp-timeout-close-wait=0s");
    let log = node.state_dir().join("kube-proxy.log");
    Ok(Background::start("kube-proxy", &node.command(&command), &log)?.killed_on_drop())
}

/// A service of one pod, which kube-proxy serves before this returns.
fn serve(api: &ApiServer, node: &Node<'_>, pod: SocketAddr) -> Result<()> {
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": SERVICE, "namespace": "default"},
        "spec": {"type": "NodePort", "clusterIP": SERVICE_ADDRESS,
            "ports": [{"port": SERVICE_PORT, "targetPort": APP_PORT, "nodePort": NODE_PORT}]},
    });
    let endpoints = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": SERVICE, "namespace": "default", "labels": {"kubernetes.io/service-name": SERVICE}},
        "endpoints": [{"addresses": [pod.ip()], "conditions": {"ready": true}, "nodeName": node.name()}],
        "ports": [{"port": APP_PORT, "protocol": "TCP", "name": ""}],
    });
    api.apply(&service.to_string())?;
    api.apply(&endpoints.to_string())?;
    let rules = process::command("iptables-save", ["-t", "nat"]);
    let translated = format!("--to-destination {pod}");
    until("kube-proxy's rules", POD, &[], || {
        Ok(node.run(&rules)?.ok()?.stdout.contains(&translated).then_some(()))
    })
}

/// How a pod is captured.
#[derive(Clone, Copy)]
enum Mode {
    Redirect,
    Tproxy,
}

impl Mode {
    const ALL: [Self; 2] = [Self::Redirect, Self::Tproxy];

    fn name(self) -> &'static str {
        match self {
            Self::Redirect => "REDIRECT",
            Self::Tproxy => "TPROXY",
        }
    }
}

/// A pod of the mesh with stand-ins for what its proxy listens on.
struct Meshed<'n> {
    pod: Pod<'n>,
    inside: Namespace,
    _proxy: Vec<TcpServer>,
    _dns: UdpServer,
}

impl<'n> Meshed<'n> {
    fn start(node: &'n Node<'n>, name: &str, mode: Mode, host_port: u16) -> Result<Self> {
        let mut object = sidecar_pod(name);
        object["metadata"]["annotations"]["sidecar.istio.io/interceptionMode"] = json!(mode.name());
        let containers = object["spec"]["containers"].as_array_mut().context("no containers")?;
        for container in containers {
            if container["name"] == "istio-proxy" {
                container["env"] = json!([
                    {"name": "ISTIO_META_DNS_CAPTURE", "value": "true"},
                    {"name": "ISTIO_DUAL_STACK", "value": "true"},
                ]);
            } else {
                container["readinessProbe"] = json!({"tcpSocket": {"port": APP_PORT}, "periodSeconds": 1});
                container["ports"] = json!([{"containerPort": APP_PORT, "hostPort": host_port}]);
            }
        }
        let pod = node.start_pod(&object)?;
        pod.wait_running(POD)?;
        let inside = pod.namespace()?;
        let mut proxy = Vec::new();
        for any in [IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::UNSPECIFIED)] {
            proxy.push(TcpServer::start(&inside, "outbound", (any, OUTBOUND))?);
            proxy.push(match mode {
                Mode::Redirect => TcpServer::start(&inside, "inbound", (any, INBOUND))?,
                Mode::Tproxy => TcpServer::start_transparent(&inside, "inbound", (any, INBOUND))?,
            });
        }
        let dns =
            as_user(PROXY_ID, PROXY_ID, || UdpServer::start(&inside, "dns", (Ipv4Addr::LOCALHOST, DNS)))?;
        Ok(Self { pod, inside, _proxy: proxy, _dns: dns })
    }

    fn app(&self, v6: bool) -> Result<SocketAddr> {
        Ok(SocketAddr::new(self.pod.address(v6)?, APP_PORT))
    }

    fn as_app(&self) -> Client<'_> {
        Client::new(&self.inside).user(APP, APP)
    }

    fn as_proxy(&self) -> Client<'_> {
        Client::new(&self.inside).as_proxy()
    }
}

/// Two pods of a node.
struct Pair<'n> {
    node: &'n Node<'n>,
    agent: &'n Pod<'n>,
    web: Meshed<'n>,
    other: Meshed<'n>,
}

/// What is checked, and how.
type Check = (&'static str, fn(&Pair<'_>) -> Result<()>);

/// What is checked of pods of each mode.
const CHECKS: [Check; 12] = [
    ("pods are verified", |pair| {
        let (scan, _) = exec_redirectctl(pair.agent, &["scan"])?;
        for pod in [&pair.web.pod, &pair.other.pod] {
            let subject = format!("default/{}", pod.name());
            let found = scan["pods"].as_array().into_iter().flatten().find(|pod| pod["subject"] == subject);
            ensure!(found.is_some_and(|pod| pod["state"] == "verified"), "{subject}: {scan:#}");
        }
        Ok(())
    }),
    ("outbound to a pod", |pair| both_land("outbound", |v6| lands(&pair.web.as_app(), pair.other.app(v6)?))),
    ("inbound from a pod", |pair| {
        both_land("inbound", |v6| lands(&pair.other.as_proxy(), pair.web.app(v6)?))
    }),
    ("inbound from the node", |pair| {
        both_land("inbound", |v6| lands(&Client::new(pair.node.namespace()), pair.web.app(v6)?))
    }),
    // Other rules than the pod's translate the address, before or behind the proxy.
    ("inbound by `hostPort`", |pair| {
        answers("inbound", &Client::new(pair.node.namespace()).tcp((NODE, HOST_PORT))?)
    }),
    ("inbound by NodePort", |pair| {
        answers("inbound", &Client::new(pair.node.namespace()).tcp((NODE, NODE_PORT))?)
    }),
    ("outbound to a service", |pair| {
        ensure!(lands(&pair.other.as_app(), SERVICE_SOCKET)? == "outbound");
        answers("inbound", &pair.other.as_proxy().tcp(SERVICE_SOCKET)?)
    }),
    ("to itself by its service", |pair| {
        ensure!(lands(&pair.web.as_app(), SERVICE_SOCKET)? == "outbound");
        answers("inbound", &pair.web.as_proxy().tcp(SERVICE_SOCKET)?)
    }),
    ("the kubelet's probes", |pair| pair.web.pod.wait("to be ready", POD, is_ready)),
    ("DNS", |pair| answers("dns", &pair.web.as_app().udp((Ipv4Addr::new(10, 96, 0, 10), 53))?)),
    ("the proxy's own connections", |pair| {
        let server = TcpServer::start(pair.node.namespace(), "node", (NODE, 0))?;
        answers("node", &pair.web.as_proxy().tcp(server.address())?)
    }),
    ("a sandbox dies", |pair| {
        let identity = |inside: &Namespace| Ok::<_, anyhow::Error>(fs::metadata(inside.path())?.ino());
        let before = identity(&pair.web.inside)?;
        pair.web.pod.kill_sandbox()?;
        until("another sandbox", POD, &[], || {
            // Between two sandboxes there is none.
            let Ok(inside) = pair.web.pod.namespace() else { return Ok(None) };
            Ok((identity(&inside)? != before && !inside.state_with_nft()?.is_pristine()).then_some(()))
        })
    }),
];

fn answers(wanted: &str, outcome: &Outcome) -> Result<()> {
    ensure!(outcome.server() == Some(wanted), "{outcome:?}");
    Ok(())
}

/// Which server a client comes to, and whether that one knows where it wanted to go.
fn lands(client: &Client<'_>, target: SocketAddr) -> Result<String> {
    let report = client.tcp(target)?.report()?;
    ensure!(report.original == Some(target) || report.local == target, "{target}: {report:?}");
    Ok(report.server)
}

/// In both families, clients come to this server.
fn both_land(wanted: &str, land: impl Fn(bool) -> Result<String>) -> Result<()> {
    for v6 in [false, true] {
        let server = land(v6)?;
        ensure!(server == wanted, "{}: {server}", if v6 { "IPv6" } else { "IPv4" });
    }
    Ok(())
}

/// The checks of a mode.
fn column(api: &ApiServer, node: &Node<'_>, agent: &Pod<'_>, mode: Mode) -> Result<Vec<Result<()>>> {
    let web = Meshed::start(node, "web", mode, HOST_PORT)?;
    let pair = Pair { node, agent, web, other: Meshed::start(node, "other", mode, HOST_PORT + 1)? };
    serve(api, node, pair.web.app(false)?)?;
    let verdicts = CHECKS.iter().map(|(_, run)| run(&pair)).collect();
    for pod in [&pair.web.pod, &pair.other.pod] {
        pod.delete(POD)?;
    }
    Ok(verdicts)
}

/// Pods start and are redirected.
fn ensure_pods_start_redirected(node: &Node<'_>, word: &str) -> Result<()> {
    let start = |number| node.start_pod(&sidecar_pod(&format!("{word}-{number}")));
    let pods = (0..CROWD).map(start).collect::<Result<Vec<_>>>()?;
    for pod in &pods {
        pod.wait_running(POD)?;
        ensure!(!pod.namespace()?.state_with_nft()?.is_pristine(), "{} is not redirected", pod.name());
    }
    pods.iter().try_for_each(|pod| pod.delete(POD))
}

/// A node with flannel and the agent.
struct Network<'n> {
    node: &'n Node<'n>,
    flannel: Flannel<'n>,
    agent: Pod<'n>,
}

/// What is done, and how, with what has to come of it.
type Step = (&'static str, fn(&mut Network<'_>) -> Result<()>);

/// What is done to a node, in this order.
const STEPS: [Step; 4] = [
    ("flannel's daemon is killed", |network| {
        network.flannel.daemon.take();
        ensure_pods_start_redirected(network.node, "without-flanneld")?;
        network.flannel.start()?;
        ensure_pods_start_redirected(network.node, "with-flanneld-again")
    }),
    ("flannel writes its list again", |network| {
        network.flannel.install()?;
        network.flannel.wait_chained()?;
        wait_loaded(network.node)?;
        ensure_pods_start_redirected(network.node, "upgraded")
    }),
    ("the agent ends", |network| {
        network.agent.delete(POD)?;
        ensure_pods_start_redirected(network.node, "without-agent")
    }),
    ("`install-cni uninstall`", |network| {
        let mut uninstall = process::command(programs()?.join("install-cni"), ["uninstall"]);
        uninstall.arg("--mounted-cni-net-dir").arg(network.node.conf_dir());
        uninstall.arg("--mounted-cni-bin-dir").arg(network.node.bin_dir());
        network.node.run(&uninstall)?.ok()?;
        let list = network.flannel.list()?;
        ensure!(serde_json::from_str::<Value>(&list)? == serde_json::from_str::<Value>(LIST)?, "{list}");
        until("pods without rules", POD, &[], || {
            let pod = network.node.start_pod(&sidecar_pod("left"))?;
            pod.wait_running(POD)?;
            let is_untouched = pod.namespace()?.state_with_nft()?.is_pristine();
            pod.delete(POD)?;
            Ok(is_untouched.then_some(()))
        })
    }),
];

#[test]
#[ignore = "needs flannel: make networks"]
fn pods_of_flannels_network_are_redirected() -> Result<()> {
    let api = ApiServer::start()?;
    let node = Node::joined(&api)?;
    import_image(&node)?;
    let mut flannel = Flannel::new(&api, &node)?;
    // The agent is there before the network, as on a node that joins.
    let daemon_set = apply_manifest(&api, &node, &rendered_without_tests(&json!({}))?)?;
    let agent = node.start_pod(&agent_pod(&daemon_set, LOOPBACK, &api, "istio-cni-node-one"))?;
    flannel.start()?;
    flannel.install()?;
    flannel.wait_chained()?;
    agent.wait("ready", POD, is_ready).with_context(|| agent.log("install-cni").unwrap_or_default())?;
    wait_loaded(&node)?;
    let _kube_proxy = start_kube_proxy(&api, &node)?;
    let columns = Mode::ALL.map(|mode| column(&api, &node, &agent, mode));
    let [redirect, tproxy] = columns;
    let mut rows: Vec<(&str, Vec<Result<()>>)> = CHECKS
        .iter()
        .zip(redirect?.into_iter().zip(tproxy?))
        .map(|((name, _), (redirect, tproxy))| (*name, vec![redirect, tproxy]))
        .collect();
    let mut network = Network { node: &node, flannel, agent };
    rows.extend(STEPS.iter().map(|(name, step)| (*name, vec![step(&mut network)])));
    judge(&rows)
}

/// Prints the table; an error lists what failed.
fn judge(rows: &[(&str, Vec<Result<()>>)]) -> Result<()> {
    let mut table = String::from("\n| check, REDIRECT and TPROXY | flannel |\n|---|---|\n");
    let mut wrong = String::new();
    for (name, verdicts) in rows {
        let word = if verdicts.iter().all(Result::is_ok) { "yes" } else { "no" };
        writeln!(table, "| {name} | {word} |")?;
        for error in verdicts.iter().filter_map(|verdict| verdict.as_ref().err()) {
            writeln!(wrong, "{name}: {error:#}")?;
        }
    }
    print(&table);
    ensure!(wrong.is_empty(), "{wrong}");
    let page = include_str!("../../../../docs/reference/compatibility.md");
    for row in table.lines().filter(|row| row.starts_with("| ")) {
        ensure!(page.contains(row), "docs/reference/compatibility.md has no row {row}");
    }
    Ok(())
}
