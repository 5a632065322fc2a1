//! What is checked of pods on any network.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;

use super::Network;
use crate::agent_support::{POD, exec_redirectctl, is_ready};
use anyhow::{Context, Result, ensure};
use e2e::kube::ApiServer;
use e2e::node::{APP_PORT, Node, Pod, plain_pod, sidecar_pod};
use e2e::redirectctl;
use e2e::traffic::{Client, Outcome, PROXY_ID, TcpServer, UdpServer, as_user};
use e2e::ztunnel::Obedient;
use serde_json::{Value, json};
use test_support::netns::Namespace;
use test_support::process::until;

/// Ports of the node. The network maps the first one and the next to pods, kube-proxy or what replaces it the other.
const HOST_PORT: u16 = 18080;
const NODE_PORT: u16 = 30080;
/// Of the namespace `default`.
pub const SERVICE: &str = "web";
const SERVICE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 77);
const SERVICE_PORT: u16 = 80;
const SERVICE_SOCKET: SocketAddr = SocketAddr::new(IpAddr::V4(SERVICE_ADDRESS), SERVICE_PORT);
/// A user that is not the proxy's.
const APP: u32 = 1000;
/// Of the node.
const NODE: Ipv4Addr = Ipv4Addr::new(10, 87, 0, 2);
const OUTBOUND: u16 = 15001;
const INBOUND: u16 = 15006;
const DNS: u16 = 15053;

/// How a pod is captured.
#[derive(Clone, Copy)]
pub enum Mode {
    Redirect,
    Tproxy,
}

impl Mode {
    pub const ALL: [Self; 2] = [Self::Redirect, Self::Tproxy];

    fn name(self) -> &'static str {
        match self {
            Self::Redirect => "REDIRECT",
            Self::Tproxy => "TPROXY",
        }
    }
}

fn probe() -> Value {
    json!({"tcpSocket": {"port": APP_PORT}, "periodSeconds": 1})
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
                container["readinessProbe"] = probe();
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
pub struct Pair<'n> {
    node: &'n Node<'n>,
    agent: &'n Pod<'n>,
    web: Meshed<'n>,
    other: Meshed<'n>,
}

/// What is checked, and how.
pub type Check = (&'static str, fn(&Pair<'_>) -> Result<()>);

/// What is checked of pods of each mode.
pub const CHECKS: [Check; 14] = [
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
    // What is translated at connect(2) no rule of the pod sees.
    ("`redirectctl scan` finds no translation", |pair| {
        let pods = pair.node.state_dir().join("pods.json");
        fs::write(&pods, json!({"kind": "List", "items": [pair.web.pod.object()?]}).to_string())?;
        let mut scan = redirectctl::command(&["scan", "--output", "json", "--netns-dir", "/run/netns", "-f"]);
        scan.arg(&pods).arg("--cni-conf-dir").arg(pair.node.conf_dir());
        scan.env("KUBERNETES_SERVICE_HOST", SERVICE_ADDRESS.to_string());
        scan.env("KUBERNETES_SERVICE_PORT", SERVICE_PORT.to_string());
        let scan = pair.node.run(&scan)?;
        let found: Value = serde_json::from_str(&scan.stdout).with_context(|| format!("{scan:?}"))?;
        let found = found["node"].as_array().context("no node")?;
        ensure!(found.iter().all(|finding| finding["code"] != "services-translated"), "{found:#?}");
        Ok(())
    }),
    ("to itself by its service", |pair| {
        ensure!(lands(&pair.web.as_app(), SERVICE_SOCKET)? == "outbound");
        answers("inbound", &pair.web.as_proxy().tcp(SERVICE_SOCKET)?)
    }),
    ("the kubelet's probes", |pair| pair.web.pod.wait("to be ready", POD, is_ready)),
    ("the kubelet's probes of an ambient pod", |pair| {
        let _ztunnel = Obedient::start(pair.node.file("/run/ztunnel/ztunnel.sock"));
        let mut ambient = plain_pod("ambient");
        ambient["metadata"]["labels"] = json!({"istio.io/dataplane-mode": "ambient"});
        ambient["spec"]["containers"][0]["readinessProbe"] = probe();
        let ambient = pair.node.start_pod(&ambient)?;
        ambient.wait("to be ready", POD, is_ready)?;
        ensure!(!ambient.namespace()?.state_with_nft()?.is_pristine(), "it is not enrolled");
        ambient.delete(POD)
    }),
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

/// The verdicts of all checks of a mode, in their order.
pub fn verdicts(
    api: &ApiServer,
    node: &Node<'_>,
    agent: &Pod<'_>,
    network: &dyn Network,
    mode: Mode,
) -> Result<Vec<Result<()>>> {
    let web = Meshed::start(node, "web", mode, HOST_PORT)?;
    let pair = Pair { node, agent, web, other: Meshed::start(node, "other", mode, HOST_PORT + 1)? };
    serve(api, node, network, pair.web.app(false)?)?;
    let verdicts = CHECKS.iter().map(|(_, run)| run(&pair)).collect();
    for pod in [&pair.web.pod, &pair.other.pod] {
        pod.delete(POD)?;
    }
    Ok(verdicts)
}

/// A service of one pod, which is served when this returns.
fn serve(api: &ApiServer, node: &Node<'_>, network: &dyn Network, pod: SocketAddr) -> Result<()> {
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
    until("the service", POD, &[], || Ok(network.serves(pod)?.then_some(())))
}
