//! The node's table for probes of ambient pods: which connections get the probes' source address, and how the table is kept.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::traffic::{Client, TcpServer};
use netns_apply::{ProbeRouteError, connections, netlink::NftConnection, routes::RouteSocket};
use redirect_core::Family;
use redirect_core::ambient::ProbeSources;
use test_support::netns::{Families, Namespace, Topology, client_address, pod_address};
use test_support::process;

const PORT: u16 = 8080;
const PROBES: ProbeSources = ProbeSources::USUAL;
const FAMILIES: [bool; 2] = [false, true];
/// The program of a node whose network plugin forwards what pods send.
const HOST_ROUTING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/host-routing.pl");
/// For packets that nobody is expected to answer.
const UNANSWERED: Duration = Duration::from_millis(1500);

fn addresses() -> BTreeSet<IpAddr> {
    FAMILIES.map(pod_address).into()
}

fn source(v6: bool, sources: ProbeSources) -> IpAddr {
    sources.of(if v6 { Family::V6 } else { Family::V4 })
}

/// The address from which the pod sees a connection of the node.
fn source_seen(topology: &Topology, v6: bool) -> Result<IpAddr> {
    let address = SocketAddr::new(pod_address(v6), PORT);
    let listener = topology.pod.enter(|| TcpListener::bind(address))??;
    let mut client = topology.client.enter(|| TcpStream::connect(address))?.context("cannot connect")?;
    let (accepted, from) = listener.accept()?;
    // It works both ways.
    drop(accepted);
    ensure!(client.read(&mut [0])? == 0);
    Ok(from.ip())
}

/// The same where the answer may be lost.
fn probe(node: &Namespace, pod: &Namespace, address: IpAddr) -> Result<IpAddr> {
    let address = SocketAddr::new(address, PORT);
    let listener = pod.enter(|| TcpListener::bind(address))??;
    let _client = node.enter(|| TcpStream::connect_timeout(&address, UNANSWERED))??;
    Ok(listener.accept()?.1.ip())
}

#[test]
fn probes_of_the_node_come_from_the_address_that_pods_let_through() -> Result<()> {
    let topology = Topology::new(Families::Dual)?;
    let on_node = |work: fn() -> Result<bool>| topology.client.enter(work)?;
    for v6 in FAMILIES {
        let before = source_seen(&topology, v6)?;
        ensure!(before != source(v6, PROBES), "{before}");
    }
    ensure!(
        on_node(|| Ok(NftConnection::open()?.set_probe_addresses(&addresses(), PROBES)?))?,
        "it was there"
    );
    ensure!(
        !on_node(|| Ok(NftConnection::open()?.set_probe_addresses(&addresses(), PROBES)?))?,
        "it was changed for nothing"
    );
    for v6 in FAMILIES {
        assert_eq!(source_seen(&topology, v6)?, source(v6, PROBES));
    }
    // Another source, as the agent's settings may name.
    let other = PROBES.with(Family::V4, "169.254.8.1")?.with(Family::V6, "fd00:8::1")?;
    ensure!(
        topology.client.enter(|| NftConnection::open()?.set_probe_addresses(&addresses(), other))??,
        "the usual one stays"
    );
    ensure!(!topology.client.enter(|| NftConnection::open()?.probe_addresses(PROBES))??.works());
    for v6 in FAMILIES {
        assert_eq!(source_seen(&topology, v6)?, source(v6, other));
    }
    ensure!(on_node(|| Ok(NftConnection::open()?.set_probe_addresses(&BTreeSet::new(), PROBES)?))?);
    ensure!(source_seen(&topology, false)? != source(false, other), "of pods that left");
    ensure!(
        on_node(|| Ok(NftConnection::open()?.remove_probe_addresses()?))?
            && !on_node(|| Ok(NftConnection::open()?.remove_probe_addresses()?))?
    );
    let left = topology.client.sh("nft list ruleset")?.stdout;
    assert_eq!(left.trim(), "");
    Ok(())
}

#[test]
fn what_the_node_forwards_keeps_its_source() -> Result<()> {
    let topology = Topology::new(Families::V4)?;
    let other = Namespace::empty(Families::V4)?;
    topology.client.enter(|| NftConnection::open()?.set_probe_addresses(&addresses(), PROBES))??;
    topology.client.sh(&format!(
        "set -e; ip link add fw0 type veth peer name fw1 netns {}; ip addr add 10.9.0.1/24 dev fw0; ip link set fw0 up; \
         echo 1 > /proc/sys/net/ipv4/ip_forward",
        other.name()
    ))?.ok()?;
    other
        .sh("set -e; ip addr add 10.9.0.2/24 dev fw1; ip link set fw1 up; ip route add default via 10.9.0.1")?
        .ok()?;
    let address = SocketAddr::new(pod_address(false), PORT);
    let listener = topology.pod.enter(|| TcpListener::bind(address))??;
    let client = other.enter(|| TcpStream::connect(address))?.context("cannot connect")?;
    assert_eq!(listener.accept()?.1.ip(), IpAddr::from([10, 9, 0, 2]));
    drop(client);
    Ok(())
}

#[test]
fn nobody_reaches_a_pod_through_the_node_from_the_address_of_probes() -> Result<()> {
    let topology = Topology::new(Families::Dual)?;
    let (node, other) = (&topology.client, Namespace::empty(Families::Dual)?);
    let [v4, v6] = FAMILIES.map(|v6| source(v6, PROBES));
    node.sh(&format!(
        "set -e; ip link add fw0 type veth peer name fw1 netns {}; ip link set fw0 up; ip addr add 10.9.0.1/24 dev fw0; \
         ip addr add fd00:9::1/64 dev fw0 nodad; ip route add {v4} via 10.9.0.2; ip route add {v6} via fd00:9::2; \
         echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding; \
         for which in all default eth0 fw0; do echo 0 > /proc/sys/net/ipv4/conf/$which/rp_filter; done",
        other.name()
    ))?;
    other.sh(&format!(
        "set -e; ip link set fw1 up; ip addr add 10.9.0.2/24 dev fw1; ip addr add fd00:9::2/64 dev fw1 nodad; \
         ip addr add {v4}/32 dev lo; ip addr add {v6}/128 dev lo nodad; \
         ip route add default via 10.9.0.1; ip route add ::/0 via fd00:9::1",
    ))?;
    let _servers = FAMILIES
        .map(|v6| TcpServer::start(&topology.pod, "app", (pod_address(v6), PORT)))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    for is_kept in [false, true] {
        if is_kept {
            ensure!(
                node.enter(|| NftConnection::open()?.set_probe_addresses(&addresses(), PROBES))??,
                "it was there"
            );
        }
        for (v6, probe) in [(false, v4), (true, v6)] {
            let target = (pod_address(v6), PORT);
            let honest = if v6 { IpAddr::from([0xfd00, 9, 0, 0, 0, 0, 0, 2]) } else { [10, 9, 0, 2].into() };
            assert_eq!(Client::new(&other).from(honest).tcp(target)?.server(), Some("app"));
            let forged = Client::new(&other).from(probe);
            let forged = if is_kept { forged.patience(UNANSWERED) } else { forged };
            assert_eq!(forged.tcp(target)?.server(), (!is_kept).then_some("app"), "{probe}");
        }
    }
    Ok(())
}

#[test]
fn whatever_another_program_made_of_the_table_is_found_and_repaired() -> Result<()> {
    let topology = Topology::new(Families::V4)?;
    let node = &topology.client;
    node.enter(|| NftConnection::open()?.set_probe_addresses(&addresses(), PROBES))??;
    let table = "inet istio-ambient-probes";
    for change in [
        format!("nft delete table {table}"),
        "nft flush ruleset".to_owned(),
        format!("nft flush chain {table} postrouting"),
        format!("nft insert rule {table} postrouting accept"),
        format!("nft flush chain {table} prerouting"),
        format!("nft delete chain {table} prerouting"),
        format!("nft insert rule {table} prerouting accept"),
        format!("nft 'add chain {table} postrouting {{ policy drop; }}'"),
        format!("nft 'add chain {table} other {{ type filter hook output priority 0; }}'"),
        format!("nft flush set {table} pods-v4"),
        format!("nft add element {table} pods-v4 '{{ 10.1.0.9 }}'"),
        format!("nft 'add table {table} {{ flags dormant; }}'"),
        // One of another form: no sets, no hook.
        format!("nft delete table {table}; nft add table {table}; nft add chain {table} postrouting"),
    ] {
        node.sh(&change)?.ok().with_context(|| change.clone())?;
        let seen = node.enter(|| NftConnection::open()?.probe_addresses(PROBES))??;
        ensure!(!seen.is_for(&addresses()), "{change}: not found: {seen:?}");
        ensure!(
            node.enter(|| NftConnection::open()?.set_probe_addresses(&addresses(), PROBES))??,
            "{change}: not repaired"
        );
        ensure!(
            node.enter(|| NftConnection::open()?.probe_addresses(PROBES))??.is_for(&addresses()),
            "{change}"
        );
        assert_eq!(source_seen(&topology, false)?, source(false, PROBES), "{change}");
    }
    Ok(())
}

#[test]
fn another_programs_table_of_that_name_is_not_taken_without_an_error() -> Result<()> {
    let node = Namespace::empty(Families::V4)?;
    let mut owner = test_support::process::command("nft", ["-i"]);
    owner.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::null());
    let mut owner = node.command(&owner).stdin(std::process::Stdio::piped()).spawn()?;
    let mut orders = owner.stdin.take().context("a pipe")?;
    std::io::Write::write_all(&mut orders, b"add table inet istio-ambient-probes { flags owner; }\n")?;
    std::io::Write::flush(&mut orders)?;
    let held = test_support::process::until("the table", test_support::process::SHORT, &[], || {
        Ok(node.enter(|| NftConnection::open()?.probe_addresses(PROBES))??.exists().then_some(()))
    });
    let refused =
        held.and_then(|()| node.enter(|| NftConnection::open()?.set_probe_addresses(&addresses(), PROBES)));
    drop(orders);
    owner.wait()?;
    let refused = refused?.err().context("it was taken")?.to_string();
    ensure!(refused.contains("CAP_NET_ADMIN") || refused.contains("refuses"), "{refused}");
    ensure!(
        node.enter(|| NftConnection::open()?.set_probe_addresses(&addresses(), PROBES))??,
        "its owner has ended"
    );
    Ok(())
}

/// A node as Amazon's network plugin leaves it: what a pod with a branch interface sends goes to the VPC, also what is for the node, and so does what the
/// node sends to the pod.
fn node_with_branch_interface(pod: &Namespace, vpc: &Namespace) -> Result<Namespace> {
    let node = Namespace::empty(Families::Dual)?;
    node.ip_batch(&format!(
        "link add vlan1 address 02:00:00:00:00:01 type veth peer name eth0 netns {}
         link add vpc0 type veth peer name node netns {}
         link set vlan1 up
         link set vpc0 up
         addr add 10.0.0.1/24 dev vpc0
         addr add fd00::1/64 dev vpc0 nodad
         addr add fe80::1/64 dev vlan1 nodad",
        pod.name(),
        vpc.name()
    ))?;
    vpc.ip_batch("link set node up\naddr add 10.0.0.2/24 dev node\naddr add fd00::2/64 dev node nodad")?;
    pod.ip_batch(
        "link set eth0 up
         addr add 10.0.3.7/32 dev eth0
         addr add fd00:3::7/128 dev eth0 nodad
         route add 169.254.1.1 dev eth0 scope link
         route add default via 169.254.1.1 dev eth0
         neigh add 169.254.1.1 lladdr 02:00:00:00:00:01 dev eth0
         route add ::/0 via fe80::1 dev eth0",
    )?;
    node.sh(
        "set -e; echo 0 > /proc/sys/net/ipv4/tcp_early_demux
         for all in all vlan1 vpc0; do echo 0 > /proc/sys/net/ipv4/conf/$all/rp_filter; done
         for ip in 'ip -4' 'ip -6'; do
             $ip rule add pref 20 lookup local; $ip rule del pref 0; $ip rule add pref 10 iif vlan1 lookup 101
         done
         ip route add default via 10.0.0.2; ip route add default via 10.0.0.2 table 101; ip route add 10.0.3.7 dev vlan1 table 101
         ip -6 route add default via fd00::2; ip -6 route add default via fd00::2 table 101; ip -6 route add fd00:3::7 dev vlan1 table 101",
    )?
    .ok()?;
    Ok(node)
}

#[test]
fn probes_reach_pods_with_branch_interfaces_and_their_answers_the_node() -> Result<()> {
    let [pod, vpc] = [Namespace::empty(Families::Dual)?, Namespace::empty(Families::Dual)?];
    let node = node_with_branch_interface(&pod, &vpc)?;
    let pods: BTreeSet<IpAddr> = ["10.0.3.7".parse()?, "fd00:3::7".parse()?].into();
    let set = |addresses: &BTreeSet<IpAddr>| -> Result<bool> {
        Ok(node.enter(|| RouteSocket::open(1 << 20)?.set_branch_rules(addresses))??)
    };
    let missing = || -> Result<BTreeSet<IpAddr>> {
        Ok(node.enter(|| RouteSocket::open(1 << 20)?.missing_branch_rules(&pods))??)
    };
    let before = node.snapshot()?;
    node.enter(|| NftConnection::open()?.set_probe_addresses(&pods, PROBES))??;
    let probe = |address: IpAddr| probe(&node, &pod, address);
    for address in &pods {
        ensure!(probe(*address).is_err(), "the VPC has no pod");
    }
    assert_eq!(missing()?, pods);

    ensure!(set(&pods)? && !set(&pods)?);
    assert_eq!(missing()?, BTreeSet::new());
    for address in &pods {
        assert_eq!(probe(*address)?, source(address.is_ipv6(), PROBES));
    }
    // One without the other is no way.
    node.sh("ip rule del pref 9")?.ok()?;
    assert_eq!(missing()?, ["10.0.3.7".parse()?].into());
    ensure!(set(&pods)?);

    // What Istio's agent has for pods that left has the same form.
    node.sh("ip rule add to 10.0.3.8 lookup 102 pref 512; ip rule add iif vlan2 lookup local pref 9")?
        .ok()?;
    ensure!(set(&BTreeSet::new())?);
    node.enter(|| NftConnection::open()?.remove_probe_addresses())??;
    let left = node.snapshot()?.changes_since(&before);
    assert_eq!(left, []);

    node.sh("echo 1 > /proc/sys/net/ipv4/tcp_early_demux")?.ok()?;
    ensure!(!set(&pods)? && missing()?.is_empty(), "such a node has no branch interfaces");
    Ok(())
}

/// A node whose `eth0` leads to the pod, and `up0` to everything else. What the pod sends, a program forwards by the node's routes. `unforwarded`: what it
/// does with packets that have none, `pass` (to the node's stack) or `drop`.
fn node_with_host_routing(topology: &Topology, network: &Namespace, unforwarded: &str) -> Result<()> {
    let node = &topology.client;
    let script = format!(
        "ip link add up0 type veth peer name up1 netns {}; ip link set up0 up
         ip addr add 10.0.0.1/24 dev up0; ip addr add fd00::1/64 dev up0 nodad
         for all in all eth0 lo; do echo 0 > /proc/sys/net/ipv4/conf/$all/rp_filter; done
         echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
         mount -t bpf bpf /sys/fs/bpf; perl {HOST_ROUTING} /sys/fs/bpf/program {unforwarded}
         tc qdisc add dev eth0 clsact; tc filter add dev eth0 ingress bpf da object-pinned /sys/fs/bpf/program",
        network.name(),
    );
    node.run(&process::command("unshare", ["--mount", "sh", "-euc", &script]))?.ok()?;
    network.ip_batch("link set up1 up\naddr add 10.0.0.2/24 dev up1\naddr add fd00::2/64 dev up1 nodad\n")?;
    node.ip_batch("route add default via 10.0.0.2\nroute add ::/0 via fd00::2\n")
}

#[test]
fn answers_to_probes_come_back_to_the_node_under_ebpf_host_routing() -> Result<()> {
    for unforwarded in ["pass", "drop"] {
        let topology = Topology::new(Families::Dual)?;
        let (node, pod, network) = (&topology.client, &topology.pod, Namespace::empty(Families::Dual)?);
        node_with_host_routing(&topology, &network, unforwarded)?;
        let before = node.snapshot()?;
        let routed = |addresses: &BTreeSet<IpAddr>| -> Result<bool> {
            Ok(node.enter(|| RouteSocket::open(1 << 20)?.set_probe_routes(addresses, PROBES))??)
        };
        let lacking = || -> Result<BTreeSet<IpAddr>> {
            Ok(node.enter(|| RouteSocket::open(1 << 20)?.missing_probe_routes(&addresses(), PROBES))??)
        };
        node.enter(|| NftConnection::open()?.set_probe_addresses(&addresses(), PROBES))??;
        assert_eq!(lacking()?, addresses());
        for v6 in FAMILIES {
            ensure!(probe(node, pod, pod_address(v6)).is_err(), "{v6}: its answers leave the node");
        }
        ensure!(routed(&addresses())? && !routed(&addresses())?);
        assert_eq!(lacking()?, BTreeSet::new());
        for v6 in FAMILIES {
            let seen = probe(node, pod, pod_address(v6)).with_context(|| format!("{unforwarded} {v6}"))?;
            assert_eq!(seen, source(v6, PROBES));
        }

        // Those of one family, those of another source, and none.
        let of_v4 = BTreeSet::from([pod_address(false)]);
        ensure!(routed(&of_v4)?);
        assert_eq!(lacking()?, BTreeSet::from([pod_address(true)]));
        let other = PROBES.with(Family::V4, "169.254.8.1")?;
        ensure!(
            node.enter(|| RouteSocket::open(1 << 20)?.set_probe_routes(&of_v4, other))??,
            "the usual one stays"
        );
        assert_eq!(lacking()?, addresses());
        for v6 in FAMILIES {
            let family = if v6 { Family::V6 } else { Family::V4 };
            let of_node = PROBES.with(family, &client_address(v6).to_string())?;
            let refused =
                node.enter(|| RouteSocket::open(1 << 20)?.set_probe_routes(&addresses(), of_node))?.err();
            ensure!(refused == Some(ProbeRouteError::OfNode(client_address(v6))), "{refused:?}");
        }
        ensure!(routed(&BTreeSet::new())?);
        node.enter(|| NftConnection::open()?.remove_probe_addresses())??;
        assert_eq!(node.snapshot()?.changes_since(&before), []);

        node.sh("echo 1 > /proc/sys/net/ipv6/conf/lo/disable_ipv6")?;
        assert_eq!(lacking()?, of_v4);
        ensure!(routed(&addresses())? && lacking()?.is_empty(), "what cannot be is not wanted");
    }
    Ok(())
}

#[test]
fn probes_whose_answers_do_not_come_back_are_seen() -> Result<()> {
    let topology = Topology::new(Families::Dual)?;
    let (node, pod, network) = (&topology.client, &topology.pod, Namespace::empty(Families::Dual)?);
    node_with_host_routing(&topology, &network, "pass")?;
    let unanswered = || -> Result<Vec<IpAddr>> {
        let seen: BTreeMap<IpAddr, usize> = node.enter(|| connections::unanswered_probes(PROBES))??;
        ensure!(seen.values().all(|count| *count > 0), "{seen:?}");
        Ok(seen.into_keys().collect())
    };
    node.enter(|| NftConnection::open()?.set_probe_addresses(&addresses(), PROBES))??;
    assert_eq!(unanswered()?, [] as [IpAddr; 0]);
    for v6 in FAMILIES {
        ensure!(probe(node, pod, pod_address(v6)).is_err());
    }
    assert_eq!(unanswered()?, FAMILIES.map(pod_address));
    node.enter(|| RouteSocket::open(1 << 20)?.set_probe_routes(&addresses(), PROBES))??;
    // The check of sources that some distributions switch on.
    node.sh("echo 1 > /proc/sys/net/ipv4/conf/lo/rp_filter")?;
    for v6 in FAMILIES {
        assert_eq!(probe(node, pod, pod_address(v6)).is_ok(), v6);
    }
    assert_eq!(unanswered()?, [pod_address(false)]);
    node.sh("echo 2 > /proc/sys/net/ipv4/conf/lo/rp_filter")?;
    probe(node, pod, pod_address(false))?;
    assert_eq!(unanswered()?, [] as [IpAddr; 0]);
    Ok(())
}

#[test]
fn what_is_for_the_source_of_probes_and_answers_none_does_not_circulate() -> Result<()> {
    let topology = Topology::new(Families::Dual)?;
    let (node, network) = (&topology.client, Namespace::empty(Families::Dual)?);
    node_with_host_routing(&topology, &network, "pass")?;
    node.enter(|| RouteSocket::open(1 << 20)?.set_probe_routes(&addresses(), PROBES))??;
    let passes_lo = || -> Result<u64> {
        let text = node.sh("awk '$1 == \"lo:\" { print $3 }' /proc/net/dev")?.stdout;
        Ok(text.trim().parse()?)
    };
    let loops = |v6: bool| -> Result<u64> {
        let before = passes_lo()?;
        let reached = Client::new(&topology.pod).patience(UNANSWERED).tcp((source(v6, PROBES), PORT))?;
        ensure!(reached.server().is_none());
        Ok(passes_lo()?.saturating_sub(before))
    };
    ensure!(loops(false)? > 20, "it does not circulate without the rule");
    node.enter(|| NftConnection::open()?.set_probe_addresses(&addresses(), PROBES))??;
    for v6 in FAMILIES {
        // A SYN is sent again after a second.
        let loops = loops(v6)?;
        ensure!(loops <= 4, "{v6}: {loops}");
    }
    Ok(())
}
