//! What iptables-save prints says of a namespace what reading its kernel says. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::{Recording, recordings};
use netfilter_state::saved::Dump;
use netns_apply::{ApplyOptions, Live, Mismatch, apply, verify};
use packet_trace::{Fate, Packet, TraceRules};
use redirect_core::{
    Families as PlanFamilies, Family, Redirect, RulePlan,
    options::{BackendChoice, Variant},
};
use std::net::{IpAddr, SocketAddr};
use test_support::{
    netns::{Families, Namespace, client_address, pod_address, remote_address},
    saved_rules::SavedRules,
};

/// What other programs have on nodes and in pods, in lines of iptables: their facts, none of their text.
const OTHERS: [(&str, &str); 6] = [
    ("nothing", ""),
    (
        "a service's translation, as kube-proxy makes it",
        "iptables -t nat -N SERVICES
         iptables -t nat -I OUTPUT -m comment --comment services -j SERVICES
         iptables -t nat -A SERVICES -d 10.96.0.10/32 -p tcp -m tcp --dport 443 -j DNAT --to-destination 192.0.2.9:8443",
    ),
    (
        "a firewall of the host",
        "iptables -P INPUT DROP
         iptables -A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
         iptables -A INPUT -p tcp -m multiport --dports 22,8080 -j ACCEPT
         iptables -A OUTPUT -d 198.51.100.0/24 -j REJECT",
    ),
    ("a program's exemption before the mesh", "iptables -t nat -I OUTPUT -m owner --uid-owner 1000 -j RETURN"),
    ("marks of a network plugin", "iptables -t mangle -A PREROUTING -j CONNMARK --restore-mark\n iptables -t mangle -A OUTPUT -m mark --mark 0x4000/0x4000 -j ACCEPT"),
    ("half of the mesh's rules gone", "iptables -t nat -F ISTIO_OUTPUT 2>/dev/null || iptables -t nat -F"),
];

fn packets(family: Family) -> Vec<Packet> {
    let is_v6 = family == Family::V6;
    let at = |address: IpAddr, port| SocketAddr::new(address, port);
    let (own, remote) = (pod_address(is_v6), remote_address(is_v6));
    let mut all = Vec::new();
    for port in [22, 80, 443, 8080, 15008, 15020, 15090] {
        all.push(Packet::from_outside(at(client_address(is_v6), 40_000), at(own, port)).by("eth0"));
        for user in [1000, 1337, 0] {
            all.push(Packet::from_pod(user, user, at(own, 40_000), at(remote, port)).by("eth0"));
            all.push(Packet::from_pod(user, user, at(own, 40_000), at(own, port)));
        }
    }
    if !is_v6 {
        let services = ["10.96.0.10:443", "198.51.100.7:80"];
        all.extend(
            services.map(|to| Packet::from_pod(1000, 1000, at(own, 40_000), to.parse().unwrap()).by("eth0")),
        );
    }
    all.extend(all.clone().into_iter().map(Packet::over_udp));
    all
}

/// A pod in which a plan is in force, with the rules of others: how many packets the dump knew the end of.
fn compare(
    Recording { name, plan, .. }: &Recording,
    (what, script): (&str, &str),
    variant: Variant,
) -> usize {
    let pod = Namespace::pod(Families::Dual).unwrap();
    let program = if variant == Variant::Legacy { "legacy" } else { "nft" };
    pod.enter(|| apply(plan, &options(variant))).unwrap().unwrap();
    pod.sh(&script.replace("iptables ", &format!("iptables-{program} "))).unwrap();
    compare_in(&pod, plan, variant, &format!("{name}, {what}"))
}

fn options(variant: Variant) -> ApplyOptions {
    ApplyOptions::default().backend(BackendChoice::Restore(Some(variant)))
}

/// How many packets the dumps of a namespace knew the end of; the kernel's rules say the same of all of those.
fn compare_in(pod: &Namespace, plan: &RulePlan, variant: Variant, what: &str) -> usize {
    let options = options(variant);
    let program = if variant == Variant::Legacy { "legacy" } else { "nft" };
    let mismatch = pod.enter(|| verify(plan, &options)).unwrap().unwrap();
    let live = pod.enter(|| Live::now(Some(plan), &options)).unwrap().unwrap();
    let mut known = 0;
    let mut differs = false;
    for (family, save) in [(Family::V4, "iptables"), (Family::V6, "ip6tables")] {
        let saved = pod.sh(&format!("{save}-{program}-save")).unwrap().stdout;
        let Ok(dump) = Dump::read(family, &saved) else {
            assert!(saved.trim().is_empty(), "{what}: {saved}");
            continue;
        };
        differs |= !dump.differences(plan).is_empty();
        // Routing and addresses are in no dump.
        let of_kernel = TraceRules::of_ruleset(&live.ruleset, &live.routing, family, Some(plan));
        let of_dump = TraceRules::of_dump(&dump, plan);
        for packet in packets(family) {
            let (truth, said) = (of_kernel.fate(&packet), of_dump.fate(&packet));
            assert!(said == truth || said == Fate::Unknown, "{what}: {packet}: {said}, but {truth}\n{saved}");
            known += usize::from(said != Fate::Unknown);
        }
    }
    let is_different = matches!(mismatch, Some(Mismatch::Different(_)));
    assert_eq!(differs, is_different, "{what}: {mismatch:?}");
    known
}

#[test]
fn a_dump_says_what_the_kernel_says() {
    let all: Vec<Recording> = recordings(1).into_iter().filter(|recording| !recording.is_native()).collect();
    let (mut dumps, mut known) = (0, 0);
    // Each of the others beside several plans, of which some use TPROXY.
    for (number, recording) in all.iter().step_by(3).take(24).enumerate() {
        let variant = if number.is_multiple_of(4) { Variant::Legacy } else { Variant::Nft };
        known += compare(recording, OTHERS[number % OTHERS.len()], variant);
        dumps += 1;
    }
    assert!(dumps >= 20 && known > 60 * dumps, "{dumps} dumps, {known} packets whose end is known");
}

#[test]
fn a_dump_of_a_real_node_says_what_the_kernel_says() {
    let plan = Redirect::sidecar(PlanFamilies::Both).build().unwrap().plan();
    let nodes = SavedRules::of_nodes().unwrap();
    let mut known = 0;
    for (name, saved) in &nodes {
        let pod = Namespace::pod(Families::Dual).unwrap();
        // What Istio's program does besides.
        pod.sh("ip -6 address add ::6/128 dev lo").unwrap();
        saved.iter().for_each(|rules| rules.restore(&pod).unwrap());
        let variant = if saved[0].is_nft { Variant::Nft } else { Variant::Legacy };
        known += compare_in(&pod, &plan, variant, name);
    }
    assert!(nodes.len() >= 20 && known > 60 * nodes.len(), "{} nodes, {known} packets", nodes.len());
}
