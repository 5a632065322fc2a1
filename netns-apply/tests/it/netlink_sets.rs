//! Sets and maps that nft has made, as rules are seen to look something up in them. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::{namespace, run, soon, sorted_words};
use netfilter_state::ruleset::{Condition, HookedRules};
use netns_apply::netlink::NftConnection;
use std::fmt::Write as _;

/// The words of every rule of chain `in`, as it is read with at most so many bytes.
fn seen(ruleset: &HookedRules) -> Vec<String> {
    let chains = ruleset.tables.values().filter_map(|table| table.chains.get("in"));
    chains.flat_map(|chain| &chain.rules).map(ToString::to_string).collect()
}

fn read(script: &str, limit: usize) -> HookedRules {
    let namespace = namespace();
    namespace
        .enter(|| {
            run("nft", &["-f", "-"], script);
            let mut connection = NftConnection::open().unwrap();
            connection.limit(limit);
            connection.ruleset(soon()).unwrap()
        })
        .unwrap()
}

/// A rule in the words of nft, and what is seen of it.
const RULES: [(&str, &str); 14] = [
    (
        "ip daddr { 10.0.0.0/8, 192.0.2.1, 255.255.255.0-255.255.255.255 } drop",
        "nfproto IPv4 ip daddr { 10.0.0.0-10.255.255.255, 192.0.2.1, 255.255.255.0-255.255.255.255 } -j DROP",
    ),
    (
        "ip6 saddr != { ::1, 2001:db8::/32 } drop",
        "nfproto IPv6 ip6 saddr != { ::1, 2001:db8::-2001:db8:ffff:ffff:ffff:ffff:ffff:ffff } -j DROP",
    ),
    ("tcp dport { 80, 443 } accept", "-p tcp -m multiport --dports 80,443 -j ACCEPT"),
    ("tcp dport { 1, 3, 5, 7-9 } accept", "-p tcp th dport { 1, 3, 5, 7-9 } -j ACCEPT"),
    ("iifname { \"lo\", \"veth*\" } accept", "iifname { lo, veth* } -j ACCEPT"),
    ("ct state { new, established } accept", "ct state { established, new } -j ACCEPT"),
    (
        "ct state vmap { established : accept, invalid : drop }",
        "ct state vmap { invalid : -j DROP, established : -j ACCEPT }",
    ),
    ("meta mark { 1, 7-9 } drop", "meta mark { 0x1, 0x7-0x9 } -j DROP"),
    ("meta skuid { 7, 1000 } drop", "meta skuid { 7, 1000 } -j DROP"),
    (
        "ip daddr . tcp dport { 192.0.2.1 . 80, 192.0.2.2 . 443 } drop",
        "nfproto IPv4 -p tcp ip daddr . th dport { 192.0.2.1 . 80, 192.0.2.2 . 443 } -j DROP",
    ),
    (
        "ip6 daddr . meta l4proto . th dport vmap { 2001:db8::/64 . tcp . 80-90 : jump other, ::1 . udp . 53 : drop }",
        "nfproto IPv6 ip6 daddr . meta l4proto . th dport vmap { 2001:db8::-2001:db8::ffff:ffff:ffff:ffff . 6 . 80-90 : -j other, ::1 . 17 . 53 : -j DROP }",
    ),
    ("ip saddr @listed drop", "nfproto IPv4 ip saddr @listed -j DROP"),
    ("tcp dport vmap { 22 : accept, * : drop }", "-p tcp th dport vmap { 22 : -j ACCEPT, * : -j DROP }"),
    (
        "fib daddr type local meta skuid 1000-1999 ip saddr 192.0.2.1-192.0.2.9 iif lo drop",
        "-i lo -m addrtype --dst-type LOCAL meta skuid { 1000-1999 } nfproto IPv4 ip saddr { 192.0.2.1-192.0.2.9 } -j DROP",
    ),
];

#[test]
fn lookups_are_seen_with_what_they_look_for() {
    let mut script = String::from(
        "table inet theirs {\n set listed { type ipv4_addr; elements = { 192.0.2.1 }; }\n chain other {}\n chain in {\n",
    );
    for (rule, _) in RULES {
        writeln!(script, "{rule}").unwrap();
    }
    script.push_str("}\n}\n");
    let seen = seen(&read(&script, usize::MAX));
    for ((rule, wanted), seen) in RULES.iter().zip(&seen) {
        assert_eq!(sorted_words(seen), sorted_words(wanted), "{rule}: {seen}");
    }
    assert_eq!(seen.len(), RULES.len());
}

#[test]
fn a_set_too_large_to_be_read_hides_nothing_else() {
    let script = |count: u32| {
        let mut script = String::from(
            "table inet theirs {\n set few { type ipv4_addr; elements = { 192.0.2.1 }; }\n set many { type ipv4_addr; elements = {\n",
        );
        for number in 0..count {
            writeln!(script, "10.{}.{}.{},", number >> 16, number >> 8 & 255, number & 255).unwrap();
        }
        script
            .push_str("}; }\n chain in { ip saddr @many drop; ip saddr @few drop; tcp dport 80 drop; }\n}\n");
        script
    };
    let values = |ruleset: &HookedRules| {
        let rules =
            ruleset.tables.values().flat_map(|table| table.chains.values()).flat_map(|chain| &chain.rules);
        let among = rules.flat_map(|rule| &rule.conditions).filter_map(|one| {
            let Condition::Among(is) = one else { return None };
            Some(is.value.values.len())
        });
        among.collect::<Vec<_>>()
    };
    // The limit is for rules: sets have one of their own.
    assert_eq!(values(&read(&script(20_000), 100_000)), [20_000, 1]);
    let limited = read(&script(250_000), usize::MAX);
    assert_eq!(values(&limited), [1]);
    let wanted = [
        "nfproto IPv4 [ip saddr in a set that was not read whole] -j DROP",
        "nfproto IPv4 ip saddr @few -j DROP",
        "-p tcp -m tcp --dport 80 -j DROP",
    ];
    assert_eq!(seen(&limited), wanted);
}
