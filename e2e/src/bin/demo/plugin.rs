//! The second part: the plugin `istio-cni` as a container runtime runs it, through the CNI project's own client.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, Result};
use e2e::cnitool::{CniTool, addresses};
use e2e::iptables::mesh::any;
use e2e::traffic::{Client, Protocol, TcpServer};
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace};
use test_support::process::Output;

use crate::connection::{Connection, Reach};
use crate::proxy::{self, Proxy};
use crate::screen::Screen;

const NETWORK: &str = "demo";
const APPLICATION: &str = "application";
const REMOTE: &str = "remote server";
/// The port that the annotation of [`ANNOTATED`] excludes.
const EXCLUDED_PORT: u16 = 9090;
/// The node's addresses on the bridge.
const NODE_V4: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 1);
const NODE_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x88, 0, 0, 0, 0, 0, 1);

/// As the injector leaves a pod that takes part in a mesh of both address families.
const ANNOTATED: &str = "\
apiVersion: v1
kind: Pod
metadata:
  name: reviews
  namespace: default
  annotations:
    sidecar.istio.io/status: '{}'
    traffic.sidecar.istio.io/excludeInboundPorts: '9090'
spec:
  containers:
  - name: app
    image: example.com/reviews
  - name: istio-proxy
    image: example.com/proxy
    args: [proxy, sidecar]
    env:
    - name: ISTIO_DUAL_STACK
      value: 'true'
";

/// As most pods are.
const PLAIN: &str = "\
apiVersion: v1
kind: Pod
metadata:
  name: ratings
  namespace: default
spec:
  containers:
  - name: app
    image: example.com/ratings
";

/// Shows an annotated pod redirected and a plain one unchanged.
pub(crate) fn show(screen: &mut Screen) -> Result<()> {
    screen.part("istio-cni: the same for every pod of a node")?;
    let mut node = Node::new()?;
    node.introduce(screen)?;

    let reviews = PodStage::new("reviews")?;
    screen
        .step("An annotated pod starts: the plugin programs its namespace before its first container runs")?;
    let pod = node.add(screen, &reviews)?;
    pod.show_redirected(screen)?;
    node.show_check(screen, &reviews)?;

    let ratings = PodStage::new("ratings")?;
    screen.step("A plain pod starts: the plugin leaves it alone, and says why")?;
    let pod = node.add(screen, &ratings)?;
    pod.show_untouched(screen)?;

    screen.step("Both pods end")?;
    node.delete(screen, &reviews)?;
    node.delete(screen, &ratings)
}

/// A stand-in for a node: a namespace with a bridge, the plugins and `cnitool`.
struct Node {
    _remote: [TcpServer; 2],
    tool: CniTool,
}

impl Node {
    fn new() -> Result<Self> {
        let mut tool = CniTool::new()?;
        let folder = crate::program("istio-cni")?;
        tool.add_plugin_dir(folder.parent().context("the plugin has no folder")?);
        use_addresses_at_once(tool.node())?;
        let (manifests, run) = (tool.state_dir().join("manifests"), tool.state_dir().join("run"));
        fs::create_dir(&manifests)?;
        fs::create_dir(&run)?;
        fs::write(manifests.join("reviews.yaml"), ANNOTATED)?;
        fs::write(manifests.join("ratings.yaml"), PLAIN)?;
        let bridge = json!({
            "type": "bridge", "bridge": "br0", "isGateway": true, "isDefaultGateway": true,
            "ipam": {
                "type": "host-local", "dataDir": tool.state_dir(),
                "ranges": [[{"subnet": "10.88.0.0/24"}], [{"subnet": "fd00:88::/64"}]],
            },
        });
        let mesh = json!({"type": "istio-cni", "cni_agent_run_dir": run, "pod_manifest_dir": manifests});
        let conflist = json!({"cniVersion": "1.0.0", "name": NETWORK, "plugins": [bridge, mesh]});
        tool.configure("10-demo.conflist", &conflist)?;
        let remote = [
            TcpServer::start(tool.node(), REMOTE, (Ipv4Addr::UNSPECIFIED, 80))?,
            TcpServer::start(tool.node(), REMOTE, (Ipv6Addr::UNSPECIFIED, 80))?,
        ];
        Ok(Self { _remote: remote, tool })
    }

    fn introduce(&self, screen: &mut Screen) -> Result<()> {
        screen
            .step("A node: its plugins in a chain, bridge then istio-cni, and a folder of pod manifests")?;
        let conflist = fs::read_to_string(self.tool.conf_dir().join("10-demo.conflist"))?;
        let conflist: Value = serde_json::from_str(&conflist)?;
        for plugin in conflist["plugins"].as_array().into_iter().flatten() {
            screen.note(&plugin.to_string())?;
        }
        for (file, text) in [("reviews.yaml", ANNOTATED), ("ratings.yaml", PLAIN)] {
            screen.note(&format!("\n{file}:"))?;
            screen.note(text)?;
        }
        Ok(())
    }

    /// Has `cnitool` run the chain, as a runtime does for a new pod.
    fn add<'a>(&'a mut self, screen: &mut Screen, stage: &'a PodStage) -> Result<Pod<'a>> {
        self.tool.set_pod("default", stage.name, "0");
        let output = self.tool.add(NETWORK, &stage.namespace)?;
        show_run(screen, "add", stage, &output)?;
        let result: Value = serde_json::from_str(&output.ok()?.stdout).context("no CNI result")?;
        let addresses = addresses(&result);
        screen.note(&format!("result: {}", addresses.join(" and ")))?;
        let addresses: Vec<IpAddr> = addresses.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
        Ok(Pod { node: self.tool.node(), stage, addresses })
    }

    fn show_check(&mut self, screen: &mut Screen, stage: &PodStage) -> Result<()> {
        self.tool.set_pod("default", stage.name, "0");
        let intact = self.tool.check(NETWORK, &stage.namespace)?;
        show_run(screen, "check", stage, &intact)?;
        show_success(screen, "CHECK of the pod as it is", &intact)?;

        screen.note("# iptables-nft -t nat -F ISTIO_REDIRECT    (in the pod, behind the plugin's back)")?;
        stage.namespace.sh("iptables-nft -t nat -F ISTIO_REDIRECT")?;
        let broken = self.tool.check(NETWORK, &stage.namespace)?;
        show_run(screen, "check", stage, &broken)?;
        let names_it = !broken.status.success() && broken.stderr.contains("ISTIO_REDIRECT");
        let found = if names_it { "fails, and names the rule" } else { "does not notice" };
        screen.check("CHECK of the pod without that rule", found, names_it, "a failure that names the rule")
    }

    fn delete(&mut self, screen: &mut Screen, stage: &PodStage) -> Result<()> {
        self.tool.set_pod("default", stage.name, "0");
        let output = self.tool.del(NETWORK, &stage.namespace)?;
        show_run(screen, "del", stage, &output)?;
        show_success(screen, "DEL", &output)
    }
}

/// What a person would type, and what came back on standard error: the plugin's log, and `cnitool`'s own words.
fn show_run(screen: &mut Screen, verb: &str, stage: &PodStage, output: &Output) -> Result<()> {
    let args = format!("CNI_ARGS='K8S_POD_NAMESPACE=default;K8S_POD_NAME={}'", stage.name);
    screen.command(&format!("{args} cnitool {verb} {NETWORK} {}", stage.namespace.path().display()), output)
}

fn show_success(screen: &mut Screen, what: &str, output: &Output) -> Result<()> {
    let succeeds = output.status.success();
    screen.check(what, if succeeds { "succeeds" } else { "fails" }, succeeds, "success")
}

/// A pod's namespace and everybody in it, before it has a network.
struct PodStage {
    name: &'static str,
    _application: Vec<TcpServer>,
    _proxy: Proxy,
    // Last, because it is dropped last.
    namespace: Namespace,
}

impl PodStage {
    fn new(name: &'static str) -> Result<Self> {
        let namespace = Namespace::empty(Families::Dual)?;
        use_addresses_at_once(&namespace)?;
        let mut application = Vec::new();
        for port in [8080, EXCLUDED_PORT] {
            for any in [false, true].map(any) {
                application.push(TcpServer::start(&namespace, APPLICATION, (any, port))?);
            }
        }
        Ok(Self { name, _application: application, _proxy: Proxy::start(&namespace)?, namespace })
    }
}

/// These networks have no other hosts, so duplicate address detection is unnecessary.
fn use_addresses_at_once(namespace: &Namespace) -> Result<()> {
    let switches = ["all", "default"].map(|which| format!("/proc/sys/net/ipv6/conf/{which}/accept_dad"));
    namespace.enter(|| switches.iter().try_for_each(|switch| fs::write(switch, "0")))??;
    Ok(())
}

/// A pod with a network.
struct Pod<'a> {
    node: &'a Namespace,
    stage: &'a PodStage,
    addresses: Vec<IpAddr>,
}

impl Pod<'_> {
    fn show_redirected(&self, screen: &mut Screen) -> Result<()> {
        for address in &self.addresses {
            self.inbound(*address, 8080).show(screen, Reach::Redirected(proxy::INBOUND))?;
            self.inbound(*address, EXCLUDED_PORT).show(screen, Reach::Directly(APPLICATION))?;
            self.outbound(*address).show(screen, Reach::Redirected(proxy::OUTBOUND))?;
        }
        Ok(())
    }

    fn show_untouched(&self, screen: &mut Screen) -> Result<()> {
        for address in &self.addresses {
            self.inbound(*address, 8080).show(screen, Reach::Directly(APPLICATION))?;
            self.outbound(*address).show(screen, Reach::Directly(REMOTE))?;
        }
        let has_none = self.stage.namespace.state_with_nft()?.is_pristine();
        let found = if has_none { "none" } else { "some" };
        screen.check("rules, ip rules and routes in the pod", found, has_none, "none")
    }

    fn inbound(&self, address: IpAddr, port: u16) -> Connection<'_> {
        Connection {
            from: "node",
            source: node_address(address.is_ipv6()),
            client: Client::new(self.node),
            to: self.stage.name,
            target: SocketAddr::new(address, port),
            protocol: Protocol::Tcp,
        }
    }

    fn outbound(&self, address: IpAddr) -> Connection<'_> {
        Connection {
            from: self.stage.name,
            source: address,
            client: Client::new(&self.stage.namespace),
            to: "remote",
            target: SocketAddr::new(node_address(address.is_ipv6()), 80),
            protocol: Protocol::Tcp,
        }
    }
}

fn node_address(v6: bool) -> IpAddr {
    if v6 { NODE_V6.into() } else { NODE_V4.into() }
}
