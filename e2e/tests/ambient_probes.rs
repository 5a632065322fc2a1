//! The node's table for probes of ambient pods: which connections get the probes' source address, and how the table is kept.

use std::collections::BTreeSet;
use std::io::Read as _;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};

use anyhow::{Context, Result, ensure};
use e2e::netns::{Families, Namespace, Topology, pod_address};
use netns_apply::probes;
use redirect_core::ambient::{PROBE_V4, PROBE_V6};

const PORT: u16 = 8080;
const FAMILIES: [bool; 2] = [false, true];

fn addresses() -> BTreeSet<IpAddr> {
    FAMILIES.map(pod_address).into()
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

#[test]
fn probes_of_the_node_come_from_the_address_that_pods_let_through() -> Result<()> {
    let topology = Topology::new(Families::Dual)?;
    let on_node = |work: fn() -> Result<bool>| topology.client.enter(work)?;
    for v6 in FAMILIES {
        let before = source_seen(&topology, v6)?;
        ensure!(before != IpAddr::from(PROBE_V4) && before != IpAddr::from(PROBE_V6), "{before}");
    }
    ensure!(on_node(|| Ok(probes::set(&addresses())?))?, "it was there");
    ensure!(!on_node(|| Ok(probes::set(&addresses())?))?, "it was changed for nothing");
    for (v6, probe) in [(false, IpAddr::from(PROBE_V4)), (true, IpAddr::from(PROBE_V6))] {
        assert_eq!(source_seen(&topology, v6)?, probe);
    }
    ensure!(on_node(|| Ok(probes::set(&BTreeSet::new())?))?);
    ensure!(source_seen(&topology, false)? != IpAddr::from(PROBE_V4), "of pods that left");
    ensure!(on_node(|| Ok(probes::remove()?))? && !on_node(|| Ok(probes::remove()?))?);
    let left = topology.client.sh("nft list ruleset")?.stdout;
    assert_eq!(left.trim(), "");
    Ok(())
}

#[test]
fn what_the_node_forwards_keeps_its_source() -> Result<()> {
    let topology = Topology::new(Families::V4)?;
    let other = Namespace::empty(Families::V4)?;
    topology.client.enter(|| probes::set(&addresses()))??;
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
fn whatever_another_program_made_of_the_table_is_found_and_repaired() -> Result<()> {
    let topology = Topology::new(Families::V4)?;
    let node = &topology.client;
    node.enter(|| probes::set(&addresses()))??;
    let table = "inet istio-ambient-probes";
    for change in [
        format!("nft delete table {table}"),
        "nft flush ruleset".to_owned(),
        format!("nft flush chain {table} postrouting"),
        format!("nft insert rule {table} postrouting accept"),
        format!("nft 'add chain {table} postrouting {{ policy drop; }}'"),
        format!("nft 'add chain {table} other {{ type filter hook output priority 0; }}'"),
        format!("nft flush set {table} pods-v4"),
        format!("nft add element {table} pods-v4 '{{ 10.1.0.9 }}'"),
        format!("nft 'add table {table} {{ flags dormant; }}'"),
        // One of another form: no sets, no hook.
        format!("nft delete table {table}; nft add table {table}; nft add chain {table} postrouting"),
    ] {
        node.sh(&change)?.ok().with_context(|| change.clone())?;
        let seen = node.enter(probes::observe)??;
        ensure!(!seen.is_for(&addresses()), "{change}: not found: {seen:?}");
        ensure!(node.enter(|| probes::set(&addresses()))??, "{change}: not repaired");
        ensure!(node.enter(probes::observe)??.is_for(&addresses()), "{change}");
        assert_eq!(source_seen(&topology, false)?, IpAddr::from(PROBE_V4), "{change}");
    }
    Ok(())
}

#[test]
fn another_programs_table_of_that_name_is_not_taken_without_an_error() -> Result<()> {
    let node = Namespace::empty(Families::V4)?;
    let mut owner = e2e::process::command("nft", ["-i"]);
    owner.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::null());
    let mut owner = node.command(&owner).stdin(std::process::Stdio::piped()).spawn()?;
    let mut orders = owner.stdin.take().context("a pipe")?;
    std::io::Write::write_all(&mut orders, b"add table inet istio-ambient-probes { flags owner; }\n")?;
    std::io::Write::flush(&mut orders)?;
    let held = e2e::process::until("the table", e2e::process::SHORT, &[], || {
        Ok(node.enter(probes::observe)??.exists().then_some(()))
    });
    let refused = held.and_then(|()| node.enter(|| probes::set(&addresses())));
    drop(orders);
    owner.wait()?;
    let refused = refused?.err().context("it was taken")?.to_string();
    ensure!(refused.contains("CAP_NET_ADMIN") || refused.contains("refuses"), "{refused}");
    ensure!(node.enter(|| probes::set(&addresses()))??, "its owner has ended");
    Ok(())
}
