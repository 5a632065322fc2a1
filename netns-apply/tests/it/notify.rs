//! What the kernel reports of changes that programs make. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use netns_apply::notify::{Notification, Subscription};
use test_support::netns::{Families, Namespace};

const MANY: usize = 1 << 20;
/// How many writers are named at most.
const MOST_NAMED: usize = 3;

fn subscribed(namespace: &Namespace) -> [Subscription; 2] {
    let open = || [Subscription::to_rules().unwrap(), Subscription::to_routing().unwrap()];
    namespace.enter(open).unwrap()
}

fn heard(subscription: &Subscription) -> Notification {
    let mut heard = Notification::default();
    assert!(subscription.drain(&mut heard, MANY).unwrap());
    heard
}

/// The kernel sends the notification before the command that caused it exits.
#[test]
fn every_change_that_matters_is_told_and_reading_is_not() {
    let there = Namespace::pod(Families::Dual).unwrap();
    let elsewhere = Namespace::pod(Families::Dual).unwrap();
    let [rules, routing] = subscribed(&there);
    for change in [
        "nft add table ip web",
        "iptables-nft -t nat -A OUTPUT -j RETURN",
        "ip6tables-nft -t nat -A OUTPUT -j RETURN",
        "nft flush ruleset",
    ] {
        there.sh(change).unwrap();
        let told = heard(&rules);
        assert!(!told.is_nothing() && !told.lost, "{change}: {told:?}");
        let program = change.split(' ').next().unwrap();
        assert!(
            told.writers.iter().any(|(_, name)| program.starts_with(name.as_str())),
            "{change}: {told:?}"
        );
    }
    for change in [
        "ip -4 rule add fwmark 0x539 lookup 133",
        "ip -4 rule del fwmark 0x539 lookup 133",
        "ip -6 rule add fwmark 0x539 lookup 133",
        "ip -4 route add local default dev lo table 133",
        "ip -4 route flush table 133",
        "ip -6 route add local default dev lo table 133",
        "ip -6 addr add ::6/128 dev lo",
        "ip -6 addr del ::6/128 dev lo",
        "ip -4 addr add 127.0.0.6/32 dev lo",
    ] {
        there.sh(change).unwrap();
        assert!(!heard(&routing).is_nothing(), "{change}");
    }
    assert!(heard(&rules).is_nothing(), "routing is not a rule");
    there.sh("nft list ruleset; iptables-nft-save; ip rule; ip -6 route show table all; ip addr").unwrap();
    elsewhere.sh("nft add table ip web; ip rule add fwmark 7 lookup 7").unwrap();
    assert!(heard(&rules).is_nothing() && heard(&routing).is_nothing());
}

#[test]
fn more_than_fits_is_a_loss_and_listening_goes_on() {
    let there = Namespace::pod(Families::V4).unwrap();
    let [rules, routing] = subscribed(&there);
    let lines: String =
        (0..2000).map(|number| format!("rule add fwmark 7 lookup {}\n", 1000 + number)).collect();
    there.ip_batch(&lines).unwrap();
    assert!(heard(&routing).lost);
    there.sh("ip rule add fwmark 8 lookup 8").unwrap();
    let told = heard(&routing);
    assert!(!told.lost && told.messages == 1, "{told:?}");
    for _ in 0..3 {
        there.sh("nft add table ip web; nft delete table ip web").unwrap();
    }
    let mut some = Notification::default();
    assert!(!rules.drain(&mut some, 1).unwrap(), "more waits");
    assert!(rules.drain(&mut some, MANY).unwrap() && some.writers.len() <= MOST_NAMED);
}
