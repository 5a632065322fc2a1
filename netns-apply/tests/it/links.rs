//! Interfaces and addresses of real network namespaces. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails
#![allow(clippy::disallowed_methods)] // the C library is the second reader

use netns_apply::{facts, routes::RouteSocket};
use nix::ifaddrs::getifaddrs;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};
use test_support::netns::{Families, Namespace};

/// The addresses as the C library lists them, each interface's IPv4 addresses first.
fn listed_by_the_c_library() -> Vec<IpAddr> {
    let mut by_interface: BTreeMap<usize, Vec<IpAddr>> = BTreeMap::new();
    let mut names: Vec<String> = Vec::new();
    for entry in getifaddrs().unwrap() {
        // Every interface appears first with its link-layer address, in the kernel's order. The C library gives an IPv4 address' label
        // (`eth0:1`) for its interface, and no name has a colon.
        let interface = entry.interface_name.split(':').next().unwrap_or_default();
        let index = names.iter().position(|name| name == interface).unwrap_or_else(|| {
            names.push(interface.to_owned());
            names.len() - 1
        });
        let Some(address) = entry.address else { continue };
        let ip = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        let ip = ip.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())));
        by_interface.entry(index).or_default().extend(ip);
    }
    by_interface.into_values().flatten().collect()
}

#[test]
fn addresses_are_those_that_the_c_library_lists_and_interfaces_all_that_may_reach_others() {
    let pod = Namespace::pod(Families::Dual).unwrap();
    // The other end of eth0 is in the same namespace. What has an address and is no tunnel comes first.
    for (change, wanted) in [
        ("ip link set lo up; ip addr flush dev pe0", "eth0 pe0"),
        (
            "ip addr add 192.0.2.1 peer 192.0.2.2/32 dev eth0; ip addr add 192.0.2.3/24 dev eth0 label eth0:1",
            "eth0 pe0",
        ),
        ("ip tuntap add dev t0 mode tun; ip link set t0 up; ip addr add 192.0.2.9/32 dev t0", "eth0 pe0 t0"),
        ("ip addr flush dev eth0; ip addr add 192.0.2.5/32 dev pe0", "pe0 eth0 t0"),
        ("ip addr flush dev t0; ip link set pe0 down", "eth0 t0"),
        ("ip link set t0 down", "eth0"),
    ] {
        pod.sh(change).unwrap();
        let look = || {
            let mut routes = RouteSocket::open(usize::MAX).unwrap();
            let addresses = [listed_by_the_c_library(), facts::addresses().unwrap()];
            (addresses, routes.addresses().unwrap(), routes.interfaces().unwrap())
        };
        let ([theirs, ours], unordered, interfaces) = pod.enter(look).unwrap();
        assert_eq!(ours, theirs, "{change}");
        assert_eq!(BTreeSet::from_iter(unordered), BTreeSet::from_iter(theirs), "{change}");
        assert_eq!(interfaces.join(" "), wanted, "{change}");
    }
}

#[test]
fn no_more_interfaces_and_addresses_are_kept_than_wanted() {
    let pod = Namespace::pod(Families::Dual).unwrap();
    let errors = pod.enter(|| {
        let mut routes = RouteSocket::open(64).unwrap();
        // Routes are told with the names of their interfaces, which are listed first.
        [routes.tables().unwrap_err(), routes.addresses().unwrap_err()].map(|error| error.to_string())
    });
    for (error, what) in errors.unwrap().iter().zip(["list interfaces", "list addresses"]) {
        assert!(error.contains(what) && error.contains("more of them than are read"), "{error}");
    }
}
