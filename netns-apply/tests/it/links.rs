//! Interfaces and addresses of real network namespaces. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use netns_apply::{facts, routes::RouteSocket};
use std::collections::BTreeSet;
use test_support::netns::{Families, Namespace};

/// Two readers of one namespace: the crate's own, and the C library's of [`facts::addresses`].
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
        let (ours, theirs, interfaces) = pod
            .enter(|| {
                let ours = RouteSocket::open(usize::MAX).unwrap().addresses().unwrap();
                (
                    ours,
                    facts::addresses().unwrap(),
                    RouteSocket::open(usize::MAX).unwrap().interfaces().unwrap(),
                )
            })
            .unwrap();
        let ours: BTreeSet<_> = ours.into_iter().map(|(_, address)| address).collect();
        assert_eq!(ours, BTreeSet::from_iter(theirs), "{change}");
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
