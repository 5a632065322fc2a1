//! The CNI project's own client and plugins: a chain of `bridge` and `istio-cni`, added, checked and deleted.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use e2e::cnitool::{self, CniTool, addresses};
use e2e::plugin::{RunDir, istio_cni, sidecar};
use e2e::traffic::{Client, TcpServer};
use serde_json::{Value, json};
use test_support::netns::{Families, Namespace};
use test_support::process::Output;

const NETWORK: &str = "podnet";

struct Chain {
    tool: CniTool,
    run_dir: RunDir,
}

impl Chain {
    fn new(version: &str, more: &[(&str, Value)]) -> Result<Self> {
        let (mut tool, run_dir) = (CniTool::new()?, RunDir::new()?);
        tool.add_plugin_dir(istio_cni().parent().context("the plugin has a folder")?);
        // Debian's plugins stop at 1.0.0.
        tool.add_plugin_dir(&cnitool::current_plugins()?);
        let mut ours = run_dir.manifest_conf();
        let ours_fields = ours.as_object_mut().context("an object")?;
        ours_fields.retain(|key, _| key != "cniVersion" && key != "name");
        for (key, value) in more {
            ours[key] = value.clone();
        }
        // A program under test may have any name; the chain needs this one.
        ours["type"] = json!(istio_cni().file_name().and_then(|name| name.to_str()).context("a name")?);
        let bridge = json!({"type": "bridge", "bridge": "br0", "isGateway": true, "ipam": {
            "type": "host-local", "dataDir": tool.state_dir(), "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
            "ranges": [[{"subnet": "10.89.0.0/24"}], [{"subnet": "fd89::/64"}]]}});
        tool.configure(
            "10-podnet.conflist",
            &json!({"cniVersion": version, "name": NETWORK, "plugins": [bridge, ours]}),
        )?;
        run_dir.write_manifest("web.json", &sidecar("web", &[("istio.io/comment", version)]))?;
        tool.set_pod("default", "web", "u-1");
        Ok(Self { tool, run_dir })
    }
}

fn text(output: &Output) -> String {
    format!("{}{}", output.stdout, output.stderr)
}

#[test]
fn a_chain_is_added_checked_and_deleted_at_every_version() -> Result<()> {
    for version in ["0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        let chain = Chain::new(version, &[])?;
        let pod = Namespace::empty(Families::Dual)?;
        let result = chain.tool.added(NETWORK, &pod)?;
        assert_eq!(result["cniVersion"], version);
        assert_eq!(result["interfaces"].as_array().map(Vec::len), Some(3), "{result}");
        assert_eq!(addresses(&result).len(), 2, "{result}");
        let state = pod.state()?;
        assert!(state.v4["nat"].contains_key("ISTIO_OUTPUT"), "{version}: {state:?}");

        let check = chain.tool.check(NETWORK, &pod)?;
        if version == "0.3.1" {
            // The version has no CHECK: the client refuses before it asks anybody.
            assert!(!check.status.success(), "{}", text(&check));
        } else {
            check.ok().with_context(|| format!("CHECK at {version}"))?;
        }
        chain.tool.del(NETWORK, &pod)?.ok()?;
        assert!(!pod.sh("ip -o link")?.stdout.contains("eth0"));
        // Once more: DEL of what is gone.
        chain.tool.del(NETWORK, &pod)?.ok()?;
    }
    Ok(())
}

#[test]
fn traffic_of_an_added_pod_goes_through_its_proxy() -> Result<()> {
    let chain = Chain::new("1.0.0", &[])?;
    let pod = Namespace::empty(Families::Dual)?;
    let result = chain.tool.added(NETWORK, &pod)?;
    let address = addresses(&result)[0].parse()?;
    let _inbound = TcpServer::start(&pod, "inbound", ([0, 0, 0, 0], 15006))?;
    let _outbound = TcpServer::start(&pod, "outbound", ([0, 0, 0, 0], 15001))?;
    let asked = SocketAddr::new(address, 8080);
    let report = Client::new(chain.tool.node()).tcp(asked)?.report()?;
    assert_eq!((report.server.as_str(), report.original), ("inbound", Some(asked)));
    let far: SocketAddr = "198.51.100.9:80".parse()?;
    let report = Client::new(&pod).user(1000, 1000).tcp(far)?.report()?;
    assert_eq!((report.server.as_str(), report.original), ("outbound", Some(far)));
    Ok(())
}

/// What somebody does behind our back, and what CHECK says about it.
const TAMPERED: [(&str, &str); 5] = [
    ("iptables-nft -t nat -D ISTIO_INBOUND -p tcp --dport 15008 -j RETURN", "ISTIO_INBOUND"),
    ("iptables-nft -t nat -I ISTIO_OUTPUT 1 -p tcp --dport 25 -j RETURN", "--dport 25 -j RETURN"),
    ("iptables-nft -t nat -F ISTIO_REDIRECT", "ISTIO_REDIRECT"),
    ("iptables-nft -t nat -D PREROUTING -p tcp -j ISTIO_INBOUND", "PREROUTING"),
    ("iptables-nft -t nat -A ISTIO_INBOUND -p tcp --dport 99 -j RETURN", "--dport 99 -j RETURN"),
];

#[test]
fn check_names_the_rule_that_was_changed() -> Result<()> {
    let chain = Chain::new("1.0.0", &[])?;
    for (tampering, named) in TAMPERED {
        let pod = Namespace::empty(Families::Dual)?;
        chain.tool.added(NETWORK, &pod)?;
        // Other programs' rules that keep nothing from the proxy are none of our business.
        pod.sh("iptables-nft -t nat -I OUTPUT 1 -p udp --dport 7 -j ACCEPT")?;
        chain.tool.check(NETWORK, &pod)?.ok()?;
        pod.sh(tampering)?;
        let check = chain.tool.check(NETWORK, &pod)?;
        assert!(!check.status.success(), "CHECK passes after {tampering}");
        let text = text(&check);
        assert!(text.contains("not redirected as planned") && text.contains(named), "{tampering}: {text}");
        chain.tool.del(NETWORK, &pod)?.ok()?;
    }
    Ok(())
}

#[test]
fn check_names_the_routing_that_was_changed() -> Result<()> {
    let chain = Chain::new("1.0.0", &[])?;
    let tproxy = [("sidecar.istio.io/interceptionMode", "TPROXY")];
    chain.run_dir.write_manifest("web.json", &sidecar("web", &tproxy))?;
    for (tampering, named) in [
        ("ip rule del fwmark 1337 lookup 133", "IPv4 policy rule: fwmark 0x539"),
        ("ip route del local default dev lo table 133", "133"),
        ("ip -6 rule del fwmark 1337 lookup 133", "IPv6 policy rule: fwmark 0x539"),
    ] {
        let pod = Namespace::empty(Families::Dual)?;
        let dual = json!([{"name": "ISTIO_DUAL_STACK", "value": "true"}]);
        let mut manifest = sidecar("web", &tproxy);
        manifest["spec"]["containers"][1]["env"] = dual;
        chain.run_dir.write_manifest("web.json", &manifest)?;
        chain.tool.added(NETWORK, &pod)?;
        chain.tool.check(NETWORK, &pod)?.ok()?;
        pod.sh(tampering)?;
        let text = text(&chain.tool.check(NETWORK, &pod)?);
        assert!(text.contains("not redirected as planned") && text.contains(named), "{tampering}: {text}");
        chain.tool.del(NETWORK, &pod)?.ok()?;
    }
    Ok(())
}

#[test]
fn check_of_a_pod_that_is_left_alone_passes() -> Result<()> {
    let chain = Chain::new("0.4.0", &[("exclude_namespaces", json!(["default"]))])?;
    let pod = Namespace::empty(Families::Dual)?;
    chain.tool.added(NETWORK, &pod)?;
    ensure!(pod.state_with_nft()?.is_pristine(), "a pod that is left alone was programmed");
    chain.tool.check(NETWORK, &pod)?.ok()?;
    Ok(())
}

#[test]
fn native_tables_are_added_and_checked() -> Result<()> {
    let chain = Chain::new("1.1.0", &[("native_nftables", json!(true))])?;
    let pod = Namespace::empty(Families::Dual)?;
    chain.tool.added(NETWORK, &pod)?;
    assert!(!pod.state_with_nft()?.nft.is_empty());
    chain.tool.check(NETWORK, &pod)?.ok()?;
    pod.sh("for t in $(nft list tables | grep istio | cut -d' ' -f3); do nft delete table inet $t; done")?;
    let check = chain.tool.check(NETWORK, &pod)?;
    assert!(text(&check).contains("not redirected as planned"), "{}", text(&check));
    Ok(())
}

#[test]
fn native_tables_gather_lists_in_sets_where_asked_for() -> Result<()> {
    let chain = Chain::new("1.1.0", &[("native_nftables", json!(true)), ("nft_sets", json!(true))])?;
    let exclude = |ports: &str| {
        let annotation = ("traffic.sidecar.istio.io/excludeOutboundPorts", ports);
        chain.run_dir.write_manifest("web.json", &sidecar("web", &[annotation]))
    };
    exclude("3306,5432,6379,9092")?;
    let pod = Namespace::empty(Families::Dual)?;
    chain.tool.added(NETWORK, &pod)?;
    let rules = pod.sh("nft list ruleset")?.stdout;
    assert!(rules.contains("tcp dport { 3306, 5432, 6379, 9092 }"), "{rules}");
    chain.tool.check(NETWORK, &pod)?.ok()?;
    exclude("3306,5432,6379,9093")?;
    let check = chain.tool.check(NETWORK, &pod)?;
    assert!(text(&check).contains("not redirected as planned"), "{}", text(&check));
    Ok(())
}

#[test]
fn strict_capture_is_the_configurations_unless_the_pod_says_otherwise() -> Result<()> {
    let chain = Chain::new("1.1.0", &[("strict_capture", json!(true))])?;
    for (said, guarded) in [(None, true), (Some("false"), false)] {
        let annotations: Vec<(&str, &str)> =
            said.map(|text| ("traffic.sidecar.istio.io/strictCapture", text)).into_iter().collect();
        chain.run_dir.write_manifest("web.json", &sidecar("web", &annotations))?;
        let pod = Namespace::empty(Families::Dual)?;
        chain.tool.added(NETWORK, &pod)?;
        let rules = pod.sh("iptables-nft-save -t mangle")?.stdout;
        assert_eq!(rules.contains("-A ISTIO_GUARD_OUT"), guarded, "{said:?}: {rules}");
        chain.tool.check(NETWORK, &pod)?.ok()?;
        chain.tool.del(NETWORK, &pod)?.ok()?;
    }
    Ok(())
}

#[test]
fn a_pod_that_cannot_be_redirected_fails_with_its_reason() -> Result<()> {
    let chain = Chain::new("1.0.0", &[])?;
    let annotation = "traffic.sidecar.istio.io/excludeOutboundPorts";
    chain.run_dir.write_manifest("web.json", &sidecar("web", &[(annotation, "5432,none")]))?;
    let pod = Namespace::empty(Families::Dual)?;
    let add = chain.tool.add(NETWORK, &pod)?;
    assert!(!add.status.success());
    assert!(text(&add).contains(annotation) && text(&add).contains("none"), "{}", text(&add));
    ensure!(pod.state_with_nft()?.is_pristine(), "it failed and programmed the pod");
    Ok(())
}
