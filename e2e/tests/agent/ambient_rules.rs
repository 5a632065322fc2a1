//! Ambient mode's rules in real network namespaces. Needs root.

use install_cni::ambient_rules::{
    HAS_SIDECAR, are_in_force, exist, put_in_force, remove, remove_istios_of_node,
};
use netns_apply::{ApplyOptions, apply};
use redirect_core::options::BackendChoice;
use redirect_core::{AmbientRedirect, Families};
use std::time::Duration;
use test_support::netns::{Families as Addresses, Namespace};

fn options(backend: BackendChoice) -> ApplyOptions {
    ApplyOptions::default().backend(backend)
}

/// A pod with the routes that a network gives it.
fn pod(addresses: Addresses) -> Namespace {
    let pod = Namespace::pod(addresses).expect("a namespace");
    pod.sh("ip route add default dev eth0; ip -6 route add default dev eth0 || true").expect("runs");
    pod
}

#[test]
fn rules_come_are_found_changed_and_go_in_each_backend() {
    let redirect = AmbientRedirect::new(Families::Both).with_dns_capture(true);
    for backend in [BackendChoice::Netlink, BackendChoice::NativeNft] {
        let pod = pod(Addresses::Dual);
        let (of_pod, options) = (redirect.clone(), options(backend));
        let is_there = || pod.enter(|| (are_in_force(&of_pod, &options), exist(&options))).expect("enters");
        assert_eq!(is_there(), (Ok(false), Ok(false)));
        pod.enter(|| put_in_force(&of_pod, Duration::ZERO, &options)).expect("enters").expect("in force");
        assert_eq!(is_there(), (Ok(true), Ok(true)));
        pod.sh("nft flush ruleset").expect("runs").ok().expect("flushes");
        assert_eq!(is_there().0, Ok(false), "rules that are gone");
        pod.enter(|| put_in_force(&of_pod, Duration::ZERO, &options)).expect("enters").expect("in force");
        pod.enter(|| remove(&options)).expect("enters").expect("removed");
        assert_eq!(is_there(), (Ok(false), Ok(false)));
        let left = pod
            .sh("{ nft list ruleset | grep -i istio; ip rule | grep 32764; } | wc -l")
            .expect("runs")
            .stdout;
        assert_eq!(left, "0\n", "{backend:?}");
    }
}

#[test]
fn what_istios_agent_has_on_a_node_goes_and_all_else_stays() {
    let in_chain = |variant: &str| {
        let rules = |program: &str, set: &str, source: &str| {
            format!(
                "{program}-{variant} -t nat -N ISTIO_POSTRT; {program}-{variant} -t nat -I POSTROUTING 1 -j ISTIO_POSTRT; {program}-{variant} -t nat \
                 -A ISTIO_POSTRT -m owner --socket-exists -p tcp -m set --match-set {set} dst -j SNAT --to-source {source}; "
            )
        };
        "ipset create istio-inpod-probes-v4 hash:ip comment; ipset create istio-inpod-probes-v6 hash:ip family inet6 comment; \
         ipset add istio-inpod-probes-v4 10.1.0.2 comment uid; "
            .to_owned()
            + &rules("iptables", "istio-inpod-probes-v4", "169.254.7.127")
            + &rules("ip6tables", "istio-inpod-probes-v6", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff")
    };
    let native = "nft 'table inet istio-ambient-nat { set istio-inpod-probes-v4 { type ipv4_addr; elements = { 10.1.0.2 }; }; chain postrouting \
         { type nat hook postrouting priority 100; meta l4proto tcp skuid 0 ip daddr @istio-inpod-probes-v4 counter snat ip to 169.254.7.127; }; }'";
    let others = "set -e; ipset create theirs hash:ip; iptables-legacy -t nat -A POSTROUTING -p tcp --dport 7 -j MASQUERADE; iptables-nft -t nat -A POSTROUTING \
         -p tcp --dport 7 -j MASQUERADE; ip6tables-nft -t nat -A POSTROUTING -p tcp --dport 7 -j MASQUERADE; ip6tables-legacy -t nat -N THEIRS";
    let of_istio = [in_chain("nft"), in_chain("legacy"), native.to_owned()];
    for script in of_istio {
        let node = pod(Addresses::Dual);
        node.sh(others).expect("runs").ok().expect("rules of other programs");
        let state = || (node.snapshot().expect("reads"), node.sh("ipset save").expect("runs").stdout);
        let before = state();
        let options = options(BackendChoice::Auto);
        let take_over = || node.enter(|| remove_istios_of_node(&options)).expect("enters");
        assert_eq!(take_over(), Ok(false), "Istio left nothing");
        node.sh(&format!("set -e; {script}")).expect("runs").ok().expect("Istio's rules");
        assert!(state() != before, "{script}");

        assert_eq!(take_over(), Ok(true), "{script}");
        assert_eq!(state().0.changes_since(&before.0), [], "{script}");
        assert_eq!(state().1, before.1);
        assert_eq!(take_over(), Ok(false), "it is gone");

        // A machine that is a workload of the mesh itself keeps its redirection.
        node.sh(&format!("set -e; {script}")).expect("runs").ok().expect("Istio's rules");
        node.sh("iptables-nft -t nat -N ISTIO_INBOUND").expect("runs").ok().expect("a chain");
        let state = state();
        assert_eq!(take_over(), Err(HAS_SIDECAR.to_owned()));
        assert_eq!(node.snapshot().expect("reads").changes_since(&state.0), []);
    }
}

#[test]
fn a_namespace_without_ipv6_is_redirected_and_verified() {
    let redirect = AmbientRedirect::new(Families::Both);
    let pod = pod(Addresses::V4);
    let options = options(BackendChoice::Netlink);
    pod.enter(|| put_in_force(&redirect, Duration::ZERO, &options)).expect("enters").expect("in force");
    assert_eq!(pod.enter(|| are_in_force(&redirect, &options)).expect("enters"), Ok(true));
}

#[test]
fn rules_of_a_sidecar_are_neither_replaced_nor_removed() {
    let pod = pod(Addresses::V4);
    let options = options(BackendChoice::Netlink);
    let plan = redirect_core::Redirect::sidecar(Families::V4).build().expect("a redirection").plan();
    pod.enter(|| apply(&plan, &options)).expect("enters").expect("applied");
    let before = pod.state_with_nft().expect("a state");
    let redirect = AmbientRedirect::new(Families::Both);
    let refused = Err(HAS_SIDECAR.to_owned());
    assert_eq!(pod.enter(|| are_in_force(&redirect, &options)).expect("enters"), refused);
    assert_eq!(pod.enter(|| exist(&options)).expect("enters"), Ok(false));
    for done in [
        pod.enter(|| put_in_force(&redirect, Duration::ZERO, &options)).expect("enters"),
        pod.enter(|| remove(&options).map(drop)).expect("enters"),
    ] {
        assert_eq!(done, Err(HAS_SIDECAR.to_owned()));
    }
    let differences = pod.state_with_nft().expect("a state").differences(&before);
    assert!(differences.is_empty(), "{differences:?}");
}
