//! The commands of the documents that check a mesh: typed on a machine with pods, beside a real API server.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use e2e::guides::Block;
use e2e::guides::worlds::{blocks_for, typed};
use e2e::kube::ApiServer;
use e2e::machine::Machine;
use e2e::{program, tools};
use serde_json::{Value, json};
use test_support::process::Output;

/// Name, address and network namespace of each pod, and whether it has a proxy.
const PODS: [(&str, &str, &str, bool); 4] = [
    ("cart-0", "10.1.0.2", "cni-1234", true),
    ("checkout-1", "10.1.0.3", "cni-2345", true),
    ("web-0", "10.1.0.4", "cni-3456", true),
    ("batch-0", "10.1.0.5", "cni-4567", false),
];

/// A machine as a node's runtime, network plugin and agent leave it, before there are pods.
const NODE: &str = r#"set -e
mkdir -p /run/istio-cni /opt/cni/bin /etc/cni/net.d /var/lib/node_exporter
cp "$KUBECONFIG" /run/istio-cni/istio-cni-kubeconfig
cp "$PROGRAMS/istio-cni" /opt/cni/bin/
echo '{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "bridge"}, {"type": "istio-cni", "name": "istio-cni"}]}' >/etc/cni/net.d/10-net.conflist"#;

/// A network namespace that no pod has, redirected by hand.
const DEMO: &str = r#"set -e
ip netns add demo
ip -n demo link add eth0 type veth peer name pe0
ip -n demo address add 10.1.9.2/24 dev eth0
ip netns exec demo istio-iptables -b '*' -i '*'"#;

/// What the runtime does for a pod: a network namespace, and the plugin, which leaves alone whoever has no proxy. Then the proxy listens.
const POD: &str = r#"set -e
ip netns add "$NETNS"
ip -n "$NETNS" link add eth0 type veth peer name pe0
ip -n "$NETNS" address add "$ADDRESS/24" dev eth0
for link in lo eth0 pe0; do ip -n "$NETNS" link set $link up; done
echo '{"cniVersion": "1.0.0", "name": "istio-cni", "type": "istio-cni", "prevResult": {"cniVersion": "1.0.0",
    "interfaces": [{"name": "eth0", "sandbox": "/var/run/netns/'$NETNS'"}], "ips": [{"interface": 0, "address": "'$ADDRESS'/24"}]}}' |
    env CNI_COMMAND=ADD CNI_CONTAINERID=x CNI_IFNAME=eth0 CNI_PATH=/opt/cni/bin CNI_NETNS=/var/run/netns/$NETNS \
    CNI_ARGS="K8S_POD_NAMESPACE=shop;K8S_POD_NAME=$POD" /opt/cni/bin/istio-cni
for port in 15001 15006; do
    nsenter --net=/run/netns/$NETNS setpriv --reuid 1337 --regid 1337 --clear-groups busybox nc -ll -p $port -e true </dev/null >/dev/null 2>&1 &
done"#;

/// What others did to two of the pods; the files that the documents name; and a process of the number that they name.
const MESH: &str = r#"set -e
ip netns exec cni-1234 iptables-nft -t nat -I OUTPUT 1 -j ACCEPT
ip netns exec cni-2345 istio-iptables --cleanup-only
kubectl get pod -n shop cart-0 -o yaml >pod.yaml
kubectl get pods -A -o json >pods.json
cp pod.yaml before.yaml
sed 's,^  annotations:,&\n    traffic.sidecar.istio.io/excludeOutboundPorts: "3306",' pod.yaml >after.yaml
echo 4710 >/proc/sys/kernel/ns_last_pid
nsenter --net=/run/netns/cni-1234 sleep 1000000 </dev/null >/dev/null 2>&1 &
[ $! = 4711 ]"#;

fn start(api: &ApiServer, programs: &Path) -> Result<Machine> {
    api.create_namespace("shop")?;
    api.create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}))?;
    let ready =
        json!({"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]}});
    api.kubectl(&["patch", "node", "n1", "--subresource=status", "-p", &ready.to_string()])?;
    let kubectl = tools::built("kubectl")?;
    let machine =
        Machine::start(&[programs, kubectl.parent().context("kubectl is in no folder")?], &[api.port()])?;
    run(&machine, api, programs, NODE, &[])?.ok()?;
    for (name, address, namespace, is_meshed) in PODS {
        api.create(&pod(name, is_meshed))?;
        let status = json!({"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}});
        api.kubectl(&[
            "patch",
            "pod",
            name,
            "-n",
            "shop",
            "--subresource=status",
            "-p",
            &status.to_string(),
        ])?;
        let variables = [("NETNS", namespace), ("ADDRESS", address), ("POD", name)];
        run(&machine, api, programs, POD, &variables)?.ok()?;
    }
    run(&machine, api, programs, MESH, &[])?.ok()?;
    Ok(machine)
}

fn pod(name: &str, is_meshed: bool) -> Value {
    let mut containers = vec![json!({"name": "app", "image": "app"})];
    if is_meshed {
        containers.push(json!({"name": "istio-proxy", "image": "proxy", "args": ["proxy", "sidecar"],
            "securityContext": {"runAsUser": 1337, "runAsGroup": 1337}}));
    }
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "shop", "annotations": {"sidecar.istio.io/status": "{}"}},
        "spec": {"nodeName": "n1", "containers": containers},
    })
}

fn run(
    machine: &Machine,
    api: &ApiServer,
    programs: &Path,
    script: &str,
    more: &[(&str, &str)],
) -> Result<Output> {
    let (kubeconfig, programs) =
        (api.admin_kubeconfig().display().to_string(), programs.display().to_string());
    let own = [("KUBECONFIG", &*kubeconfig), ("PROGRAMS", &programs), ("NODE_NAME", "n1")];
    machine.run(script, &[&own, more].concat())
}

/// What the documents leave to the reader, as it is on this machine.
fn filled_in(line: &str) -> String {
    let places = [
        ("NAMESPACE/NAME", "shop/cart-0"),
        ("netns/FILE", "netns/cni-1234"),
        ("why CODE", "why foreign-rule"),
        ("$node", "n1"),
    ];
    let line = places.iter().fold(line.to_owned(), |line, (place, value)| line.replace(place, value));
    // It goes on until somebody ends it.
    if line.starts_with("redirectctl watch ") && !line.contains("--once") {
        return format!("timeout --preserve-status --signal INT 10 {line}");
    }
    line
}

/// Each line by itself. 2 says that something is wrong, as it is here; anything else is a command that cannot be typed like this.
fn understood(block: &Block, mut run: impl FnMut(&str) -> Result<Output>) -> Result<()> {
    for line in block.commands() {
        let output = run(&filled_in(&line))?;
        ensure!(
            matches!(output.code(), Some(0 | 2 | 130)),
            "{}: {line}: {}\n{}{}",
            block.place(),
            output.status,
            output.stdout,
            output.stderr
        );
    }
    Ok(())
}

#[test]
fn what_is_typed_on_a_node_of_a_mesh_is_understood() -> Result<()> {
    let (api, programs) = (ApiServer::start()?, program::built()?);
    let machine = start(&api, &programs)?;
    let mut problems = Vec::new();
    // In the order of the documents: the first shows a machine without the namespace that others name.
    let (first, others): (Vec<_>, Vec<_>) =
        blocks_for("mesh")?.into_iter().partition(|block| block.document == "README.md");
    for block in first.iter().chain(&others) {
        if block == &others[0] {
            run(&machine, &api, &programs, DEMO, &[])?.ok()?;
        }
        let type_it = |script: &str| run(&machine, &api, &programs, script, &[]);
        let result = if block.is_console { typed(block, type_it) } else { understood(block, type_it) };
        problems.extend(result.err().map(|error| format!("{error:#}")));
    }
    ensure!(problems.is_empty(), "{}", problems.join("\n\n"));
    Ok(())
}
