//! Packets through plans in force, alone and beside each rule of other programs that a kernel dumped: where they end, and the trace of their path. With `UPDATE_DUMPS=1`
//! `tests/dumps/traces.told` and `tests/dumps/others.traced` are written again, and what changes is for the review.

// The dumps are those of a machine that puts the low byte first.
#![cfg(target_endian = "little")]

use super::{ConnectionState, ConntrackEntry, Detail, Fate, Packet, TraceRules};
use crate::{
    interference::recorded::{Others, PLACES, in_force},
    kernel::assert_recorded,
};
use netfilter_state::{
    routing::FoundRouting,
    ruleset::{HookedRules, TableFamily},
};
use redirect_core::{Family, RulePlan};
use std::{
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
};

/// What packets look like that the mesh is there for, each by a name.
fn packets(family: Family) -> Vec<(&'static str, Packet)> {
    let [own, far, resolver, loopback]: [IpAddr; 4] = match family {
        Family::V4 => ["10.1.0.2", "192.0.2.1", "10.96.0.10", "127.0.0.1"],
        Family::V6 => ["fd00::2", "2001:db8::1", "fd00:96::a", "::1"],
    }
    .map(|text| text.parse().unwrap());
    let [near, away] = [own, far].map(|address| move |port| SocketAddr::new(address, port));
    let (to_resolver, to_loopback) = (SocketAddr::new(resolver, 53), SocketAddr::new(loopback, 80));
    let arrives = Packet::from_outside(away(1000), near(80)).by("eth0");
    let answers = ConntrackEntry { state: ConnectionState::Reply, ..ConntrackEntry::default() };
    [
        ("arrives", arrives.clone()),
        ("to another port", Packet::from_outside(away(1000), near(7)).by("eth0")),
        (
            "of a connection",
            Packet {
                flags: 0x10,
                connection: ConntrackEntry {
                    state: ConnectionState::Established,
                    ..ConntrackEntry::default()
                },
                ..arrives.clone()
            },
        ),
        (
            "of none",
            Packet {
                connection: ConntrackEntry { state: ConnectionState::Invalid, ..ConntrackEntry::default() },
                ..arrives
            },
        ),
        ("application", Packet::from_pod(1000, 1000, near(1000), away(80)).by("eth0")),
        ("application to itself", Packet::from_pod(1000, 1000, near(1000), near(80))),
        ("proxy", Packet::from_pod(1337, 1337, near(1000), away(80)).by("eth0")),
        ("proxy to the application", Packet::from_pod(1337, 1337, near(1000), to_loopback)),
        (
            "proxy answers",
            Packet {
                flags: 0x10,
                mark: 0x539,
                connection: answers,
                ..Packet::from_pod(1337, 1337, near(80), away(1000)).by("eth0")
            },
        ),
        ("query", Packet::from_pod(1000, 1000, near(1000), to_resolver).over_udp().by("eth0")),
        ("query of the proxy", Packet::from_pod(1337, 1337, near(1000), to_resolver).over_udp().by("eth0")),
    ]
    .into()
}

fn rules(ruleset: &HookedRules, plan: &RulePlan, family: Family) -> TraceRules {
    let routing: Vec<_> = FoundRouting::all_working(plan);
    TraceRules::of_ruleset(ruleset, &routing, family, Some(plan))
}

#[test]
fn what_is_told_of_a_packets_way_is_what_is_recorded() {
    let mut text = String::new();
    for (name, plan, in_force) in in_force() {
        let rules = rules(&in_force, &plan, Family::V4);
        for (packet_name, packet) in packets(Family::V4) {
            writeln!(text, "{name}: {packet_name}\n{}", rules.trace(&packet).text(Detail::Every)).unwrap();
        }
    }
    assert_recorded("traces.told", &text);
}

fn written(fate: &Fate) -> String {
    if let Fate::Redirected { port } = fate { format!("Redirected({port})") } else { format!("{fate:?}") }
}

#[test]
fn packets_end_where_rules_of_others_send_them() {
    let (others, plans) = (Others::dumped(), in_force());
    let mut text = String::new();
    let alone = Family::BOTH.map(|family| {
        let fates = |(_, plan, in_force): &(&str, RulePlan, HookedRules)| {
            let alone = rules(in_force, plan, family);
            packets(family)
                .into_iter()
                .map(|(name, packet)| (name, alone.trace(&packet).may, packet))
                .collect()
        };
        plans.iter().map(fates).collect::<Vec<Vec<_>>>()
    });
    for rule in others.rules() {
        let family = if rule.0.family == TableFamily::Ip6 { Family::V6 } else { Family::V4 };
        writeln!(text, "{}", rule.1).unwrap();
        let alone = &alone[usize::from(family == Family::V6)];
        for (((plan_name, plan, in_force), alone), (place, bases)) in plans.iter().zip(alone).zip(&PLACES) {
            let both = rules(&others.beside(in_force, rule, bases), plan, family);
            for (name, before, packet) in alone {
                let now = both.trace(packet).may;
                if *before != now {
                    let fates: Vec<_> = now.iter().map(written).collect();
                    writeln!(text, "\t{plan_name} {place}: {name}: {}", fates.join(" or ")).unwrap();
                }
            }
        }
    }
    assert_recorded("others.traced", &text);
}
