//! Fingerprints of real network namespaces. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use netns_apply::Fingerprint;
use std::{
    hash::RandomState,
    time::{Duration, Instant},
};
use test_support::netns::{Families, Namespace};

#[test]
fn whatever_a_verdict_depends_on_changes_it_and_reading_does_not() {
    let keys = RandomState::new();
    let there = Namespace::pod(Families::Dual).unwrap();
    let take = || there.enter(|| Fingerprint::now(&keys)).unwrap();
    // Reading changes nothing. The kernel's work queue may: it adds the local route of an IPv6 address a moment later.
    let reading = "nft list ruleset; iptables-nft-save; ip rule; ip -6 route show table all; ip addr";
    let settled = || {
        let give_up = Instant::now() + Duration::from_secs(60);
        loop {
            let one = take().expect("a fingerprint");
            there.sh(reading).unwrap();
            if take() == Some(one) {
                return one;
            }
            assert!(Instant::now() < give_up, "reading changes it");
        }
    };
    let mut before = settled();
    for change in [
        "nft add table ip web",
        "iptables-nft -t nat -A OUTPUT -j RETURN",
        "ip6tables-nft -t nat -A OUTPUT -j RETURN",
        "iptables-nft -t nat -D OUTPUT -j RETURN",
        "nft flush ruleset",
        "ip -4 rule add fwmark 0x539 lookup 133",
        "ip -4 rule del fwmark 0x539 lookup 133; ip -4 rule add fwmark 0x539 lookup 133 protocol 105",
        "ip -4 route add local default dev lo table 133",
        "ip -6 rule add fwmark 0x539 lookup 133",
        "ip -6 route add local default dev lo table 133",
        // Takes the IPv6 route with it.
        "ip link set lo down",
        "ip link set lo up",
        "ip -6 addr add ::6/128 dev lo",
        "ip -4 addr add 192.0.2.7/32 dev lo",
        "ip link add other type veth peer name end; ip link set other up; ip addr add 192.0.2.8/32 dev other",
        "ip link set other name renamed; ip link set renamed up",
        "ip link set renamed down",
        "ip rule add pref 50 iif lo prohibit",
        "ip -6 rule add pref 50 uidrange 1000-1000 blackhole",
        "ip route add blackhole 198.51.100.1/32",
        "ip route del local 192.0.2.7 table local",
    ] {
        there.sh(change).unwrap();
        let after = settled();
        assert_ne!(after, before, "{change}");
        before = after;
    }
    assert_ne!(there.enter(|| Fingerprint::now(&RandomState::new())).unwrap(), Some(before), "other keys");
}

/// The kernel counts no changes of those.
#[test]
fn where_legacy_tables_are_in_use_there_is_none() {
    let there = Namespace::pod(Families::V4).unwrap();
    let take = || there.enter(|| Fingerprint::now(&RandomState::new())).unwrap();
    there.sh("iptables-legacy -t nat -L").unwrap();
    assert!(take().is_some(), "an empty table does not count");
    there.sh("iptables-legacy -t nat -A OUTPUT -j RETURN").unwrap();
    assert_eq!(take(), None);
}
