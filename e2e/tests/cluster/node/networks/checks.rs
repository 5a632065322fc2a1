//! What is checked of pods on any network.

use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::Duration;

use super::Network;
use crate::agent_support::{POD, is_ready};
use anyhow::{Context, Result, ensure};
use e2e::envoy::{Envoy, Interception};
use e2e::kube::ApiServer;
use e2e::node::{APP_PORT, GREETING, Node, Pod, plain_pod, sidecar_pod};
use e2e::redirectctl;
use e2e::traffic::{Client, Outcome, PROXY_ID, TcpServer, UdpServer, as_user};
use e2e::ztunnel::Obedient;
use e2e::ztunnel::stock::{self, Access, Source, Stock};
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace};
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

/// Stand-ins for what a sidecar listens on.
struct StandIns {
    _proxy: Vec<TcpServer>,
    _dns: UdpServer,
}

impl StandIns {
    fn start(inside: &Namespace, mode: Interception) -> Result<Self> {
        let mut proxy = Vec::new();
        for any in [IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::UNSPECIFIED)] {
            proxy.push(TcpServer::start(inside, "outbound", (any, OUTBOUND))?);
            proxy.push(match mode {
                Interception::Redirect => TcpServer::start(inside, "inbound", (any, INBOUND))?,
                Interception::Tproxy => TcpServer::start_transparent(inside, "inbound", (any, INBOUND))?,
            });
        }
        let dns =
            as_user(PROXY_ID, PROXY_ID, || UdpServer::start(inside, "dns", (Ipv4Addr::LOCALHOST, DNS)))?;
        Ok(Self { _proxy: proxy, _dns: dns })
    }
}

/// A pod of the mesh with its proxy.
struct Meshed<'n, P> {
    pod: Pod<'n>,
    inside: Namespace,
    proxy: P,
}

impl<'n, P> Meshed<'n, P> {
    fn start(
        node: &'n Node<'n>,
        object: &Value,
        proxy: impl FnOnce(&Namespace) -> Result<P>,
    ) -> Result<Self> {
        let pod = node.start_pod(object)?;
        pod.wait_running(POD)?;
        let inside = pod.namespace()?;
        let proxy = proxy(&inside)?;
        Ok(Self { pod, inside, proxy })
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

/// A pod of the mesh whose port the network maps to one of the node.
fn sidecar(name: &str, mode: Interception, host_port: u16) -> Result<Value> {
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
            container["ports"] = json!([{"containerPort": APP_PORT, "hostPort": host_port}]);
        }
    }
    Ok(object)
}

/// The same pod, which the kubelet probes.
fn probed(mut pod: Value) -> Value {
    pod["spec"]["containers"][0]["readinessProbe"] =
        json!({"tcpSocket": {"port": APP_PORT}, "periodSeconds": 1});
    pod
}

/// Two pods of a node with stand-ins for the proxy, and two with Envoy.
pub struct Pods<'n> {
    node: &'n Node<'n>,
    web: Meshed<'n, StandIns>,
    other: Meshed<'n, StandIns>,
    envoys: [Meshed<'n, Envoy>; 2],
}

impl<'n> Pods<'n> {
    fn start(node: &'n Node<'n>, mode: Interception) -> Result<Self> {
        let stand_ins = |inside: &Namespace| StandIns::start(inside, mode);
        let envoy = |inside: &Namespace| Envoy::start(inside, Families::Dual, mode);
        Ok(Self {
            node,
            web: Meshed::start(node, &probed(sidecar("web", mode, HOST_PORT)?), stand_ins)?,
            other: Meshed::start(node, &sidecar("other", mode, HOST_PORT + 1)?, stand_ins)?,
            envoys: [
                Meshed::start(node, &probed(sidecar("envoy", mode, HOST_PORT + 2)?), envoy)?,
                Meshed::start(node, &sidecar("other-envoy", mode, HOST_PORT + 3)?, envoy)?,
            ],
        })
    }

    fn all(&self) -> [&Pod<'n>; 4] {
        let [envoy, other_envoy] = &self.envoys;
        [&self.web.pod, &self.other.pod, &envoy.pod, &other_envoy.pod]
    }

    /// What `redirectctl scan` finds on the node.
    fn scan(&self) -> Result<Value> {
        let file = self.node.state_dir().join("pods.json");
        let objects = self.all().into_iter().map(Pod::object).collect::<Result<Vec<_>>>()?;
        fs::write(&file, json!({"kind": "List", "items": objects}).to_string())?;
        let mut scan = redirectctl::command(&["scan", "--output", "json", "--netns-dir", "/run/netns", "-f"]);
        scan.arg(&file).arg("--cni-conf-dir").arg(self.node.conf_dir());
        scan.env("KUBERNETES_SERVICE_HOST", SERVICE_ADDRESS.to_string());
        scan.env("KUBERNETES_SERVICE_PORT", SERVICE_PORT.to_string());
        let scan = self.node.run(&scan)?;
        serde_json::from_str(&scan.stdout).with_context(|| format!("{scan:?}"))
    }

    /// An ambient pod that is enrolled.
    fn ambient(&self, name: &str) -> Result<Pod<'n>> {
        let mut pod = probed(plain_pod(name));
        pod["metadata"]["labels"] = json!({"istio.io/dataplane-mode": "ambient"});
        let pod = self.node.start_pod(&pod)?;
        pod.wait("to be ready", POD, is_ready)?;
        ensure!(!pod.namespace()?.state_with_nft()?.is_pristine(), "{name} is not enrolled");
        Ok(pod)
    }

    /// Where the agent serves ztunnel.
    fn ztunnels_socket(&self) -> PathBuf {
        self.node.file("/run/ztunnel/ztunnel.sock")
    }
}

/// What is checked, and how.
pub type Check = (&'static str, fn(&Pods<'_>) -> Result<()>);

/// What is checked of pods of each mode.
const CHECKS: [Check; 17] = [
    ("pods are verified", |pods| {
        let scan = pods.scan()?;
        for pod in pods.all() {
            let subject = format!("default/{}", pod.name());
            let found = scan["pods"].as_array().into_iter().flatten().find(|pod| pod["subject"] == subject);
            ensure!(found.is_some_and(|pod| pod["state"] == "verified"), "{subject}: {scan:#}");
        }
        Ok(())
    }),
    ("outbound to a pod", |pods| both_land("outbound", |v6| lands(&pods.web.as_app(), pods.other.app(v6)?))),
    ("inbound from a pod", |pods| {
        both_land("inbound", |v6| lands(&pods.other.as_proxy(), pods.web.app(v6)?))
    }),
    ("inbound from the node", |pods| {
        both_land("inbound", |v6| lands(&Client::new(pods.node.namespace()), pods.web.app(v6)?))
    }),
    // Other rules than the pod's translate the address, before or behind the proxy.
    ("inbound by `hostPort`", |pods| {
        answers("inbound", &Client::new(pods.node.namespace()).tcp((NODE, HOST_PORT))?)
    }),
    ("inbound by NodePort", |pods| {
        answers("inbound", &Client::new(pods.node.namespace()).tcp((NODE, NODE_PORT))?)
    }),
    ("outbound to a service", |pods| {
        ensure!(lands(&pods.other.as_app(), SERVICE_SOCKET)? == "outbound");
        answers("inbound", &pods.other.as_proxy().tcp(SERVICE_SOCKET)?)
    }),
    // What is translated at connect(2) no rule of the pod sees.
    ("`redirectctl scan` finds no translation", |pods| {
        let found = pods.scan()?;
        let found = found["node"].as_array().context("no node")?;
        ensure!(found.iter().all(|finding| finding["code"] != "services-translated"), "{found:#?}");
        Ok(())
    }),
    ("to itself by its service", |pods| {
        ensure!(lands(&pods.web.as_app(), SERVICE_SOCKET)? == "outbound");
        answers("inbound", &pods.web.as_proxy().tcp(SERVICE_SOCKET)?)
    }),
    ("the kubelet's probes", |pods| pods.web.pod.wait("to be ready", POD, is_ready)),
    ("Envoy, from pod to pod", |pods| {
        let [from, to] = &pods.envoys;
        for v6 in [false, true] {
            let app = to.app(v6)?;
            let answer = from.as_app().tcp(app)?;
            ensure!(answer == Outcome::Foreign(GREETING.to_owned()), "{answer:?}");
            from.proxy.wait_passed("outbound", app, 1)?;
            to.proxy.wait_passed("inbound", app, 1)?;
        }
        Ok(())
    }),
    ("Envoy, to a service", |pods| {
        let [from, _] = &pods.envoys;
        answers("inbound", &from.as_app().tcp(SERVICE_SOCKET)?)?;
        from.proxy.wait_passed("outbound", SERVICE_SOCKET, 1)
    }),
    ("Envoy, the kubelet's probes", |pods| pods.envoys[0].pod.wait("to be ready", POD, is_ready)),
    ("the kubelet's probes of an ambient pod", |pods| {
        let _ztunnel = Obedient::start(pods.ztunnels_socket());
        pods.ambient("ambient")?.delete(POD)
    }),
    ("DNS", |pods| answers("dns", &pods.web.as_app().udp((Ipv4Addr::new(10, 96, 0, 10), 53))?)),
    ("the proxy's own connections", |pods| {
        let server = TcpServer::start(pods.node.namespace(), "node", (NODE, 0))?;
        answers("node", &pods.web.as_proxy().tcp(server.address())?)
    }),
    ("a sandbox dies", |pods| {
        let identity = |inside: &Namespace| Ok::<_, anyhow::Error>(fs::metadata(inside.path())?.ino());
        let before = identity(&pods.web.inside)?;
        pods.web.pod.kill_sandbox()?;
        until("another sandbox", POD, &[], || {
            // Between two sandboxes there is none.
            let Ok(inside) = pods.web.pod.namespace() else { return Ok(None) };
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

/// Ambient pods reach each other through a stock ztunnel, where there is one.
pub const THROUGH_ZTUNNEL: Check = ("HBONE between ambient pods", |pods| {
    let socket = pods.ztunnels_socket();
    let ambient = {
        // ztunnel reads once which pods there are, and a pod waits for a ztunnel before it has addresses.
        let _until_then = Obedient::start(socket.clone());
        [pods.ambient("ambient-web")?, pods.ambient("ambient-db")?]
    };
    let file = pods.node.state_dir().join("workloads.yaml");
    let mut workloads = String::from("workloads:\n");
    let mut uids = BTreeSet::new();
    for pod in &ambient {
        let object = pod.object()?.context("no pod")?;
        uids.insert(object["metadata"]["uid"].as_str().context("no UID")?.to_owned());
        let addresses = [pod.address(false)?, pod.address(true)?].map(|address| address.to_string());
        workloads += &stock::workload("default", pod.name(), "default", &addresses, "services: {}");
    }
    fs::write(&file, workloads)?;
    let log = pods.node.state_dir().join("ztunnel.log");
    let ztunnel = Stock::start(&Source::File(file), &socket, &log, Duration::ZERO)?;
    until("ztunnel to serve both", POD, &[ztunnel.process()], || {
        Ok(ztunnel.served().is_ok_and(|served| served == uids).then_some(()))
    })?;
    let [web, db] = &ambient;
    for v6 in [false, true] {
        let target = SocketAddr::new(db.address(v6)?, APP_PORT);
        let answer = Client::new(&web.namespace()?).user(APP, APP).tcp(target)?;
        ensure!(answer == Outcome::Foreign(GREETING.to_owned()), "{answer:?}");
        let is_it = |access: &Access| {
            access.tunnelled == target.to_string()
                && access.error.is_empty()
                && !access.target_identity.is_empty()
        };
        until("the connection in ztunnel's log", POD, &[ztunnel.process()], || {
            Ok(stock::accesses(&log)?.iter().any(is_it).then_some(()))
        })?;
    }
    ztunnel.end()?;
    // The next one has a log of its own.
    fs::remove_file(&log)?;
    ambient.iter().try_for_each(|pod| pod.delete(POD))
});

/// All that can be checked here.
pub fn checks() -> Vec<Check> {
    let mut checks = CHECKS.to_vec();
    checks.extend(std::env::var_os("ZTUNNEL").map(|_| THROUGH_ZTUNNEL));
    checks
}

/// The verdicts of checks in a mode, in their order.
pub fn verdicts(
    api: &ApiServer,
    node: &Node<'_>,
    network: &dyn Network,
    mode: Interception,
    checks: &[Check],
) -> Result<Vec<Result<()>>> {
    let pods = Pods::start(node, mode)?;
    serve(api, node, network, pods.web.app(false)?)?;
    let verdicts = checks.iter().map(|(_, run)| run(&pods)).collect();
    pods.all().into_iter().try_for_each(|pod| pod.delete(POD))?;
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
