//! Whether a network namespace is as it was at an earlier look, without reading any rule again.

use crate::{legacy, netlink::Connection, routes::RouteSocket};
use std::hash::{BuildHasher, Hash, Hasher, RandomState};

/// What [`verify`](crate::verify()) depends on in a network namespace, in a few bytes: the generation of the nf_tables ruleset, which every transaction
/// raises, and a hash of routing, addresses and interfaces. While it is the same, so is the answer, with one exception: without any transaction,
/// packets may add elements to the sets of other programs, and time may remove them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint {
    generation: u32,
    rest: u64,
}

/// How many bytes of policy rules are read. A namespace with more of them, or with more routes than are read, has no
/// fingerprint.
const MOST_READ: usize = 1 << 20;

impl Fingerprint {
    /// The fingerprint of the calling thread's network namespace. Fingerprints taken with different keys cannot be compared; keys that no one
    /// outside knows keep a container from making two states that look alike.
    ///
    /// `None` if the kernel cannot show that rules are unchanged: tables of legacy iptables are in use, whose changes it does not count, or it
    /// lacks nf_tables. Also `None` if something cannot be read.
    #[must_use]
    pub fn now(keys: &RandomState) -> Option<Self> {
        if legacy::is_in_use(MOST_READ).ok()? {
            return None;
        }
        let generation = Connection::open().ok()?.generation().ok()?;
        let mut hasher = keys.build_hasher();
        let mut routes = RouteSocket::open(MOST_READ).ok()?;
        let links = routes.links().ok()?;
        routes.tables_and_marked(&links).ok().filter(|(tables, _)| tables.complete)?.hash(&mut hasher);
        routes.addresses_and_interfaces(&links).ok()?.hash(&mut hasher);
        Some(Self { generation, rest: hasher.finish() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};
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
        assert_ne!(
            there.enter(|| Fingerprint::now(&RandomState::new())).unwrap(),
            Some(before),
            "other keys"
        );
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
}
