//! What each rule of others does to plans that are in force: the rules that a kernel dumped (`tests/dumps`), one at a time, on every hook that captured packets
//! meet. `tests/dumps/others.found` says what was found. With `UPDATE_DUMPS=1` it is written anew, and what changes is for the review.

// The dumps are those of a machine that puts the low byte first.
#![cfg(target_endian = "little")]

use super::{
    Finding, Pod, Traffic, find,
    ruleset::{Api, Base, Ruleset, SeenRule, Statement, TableFamily, TableName, TableState},
};
use crate::{
    Family, RulePlan,
    netlink::recorded::{dumps, read_saved},
    rule::Hook,
};
use std::{collections::BTreeSet, format, fs, net::IpAddr, string::String, vec::Vec};

const fn base(hook: Hook, priority: i32, is_nat: bool) -> Base {
    Base { hook, priority, is_nat, drops: false, reroutes: false }
}

/// Where rules hang: address translation beside a plan's own, for one that redirects, and all else before and behind one that hands over to TPROXY.
pub(crate) const PLACES: [(&str, [Base; 3]); 2] = [
    (
        "nat",
        [
            base(Hook::Prerouting, -110, true),
            base(Hook::Output, -110, true),
            base(Hook::Postrouting, 10, false),
        ],
    ),
    (
        "first",
        [base(Hook::Prerouting, -310, false), base(Hook::Output, -310, false), base(Hook::Input, 10, false)],
    ),
];

/// The rules in force with one of others in these places, in a table with everything it may lead to.
pub(crate) fn beside(
    in_force: &Ruleset,
    theirs: &TableName,
    others: &Ruleset,
    rule: &SeenRule,
    bases: &[Base],
) -> Ruleset {
    let mut ruleset = in_force.clone();
    let name = TableName { api: Api::NfTables, family: theirs.family, name: "theirs".into() };
    let table = ruleset.table(name);
    *table = others.tables[theirs].clone();
    for chain in table.chains.values_mut() {
        chain.base = None;
    }
    for base in bases {
        let chain = table.chains.entry(format!("{:?}", base.hook)).or_default();
        (chain.base, chain.rules) = (Some(*base), [rule.clone()].into());
    }
    ruleset
}

/// Such as `Output Does Drops [OutboundV4]`.
fn words(finding: &Finding) -> String {
    let traffic = |(family, traffic): &(Family, Traffic)| format!("{traffic:?}{family:?}");
    let traffic: Vec<_> = finding.traffic.iter().map(traffic).collect();
    format!(
        "{} {:?} {:?} [{}]",
        finding.place.base_chain,
        finding.severity,
        finding.effect,
        traffic.join(" ")
    )
}

#[test]
fn each_rule_of_others_is_found_to_do_what_it_does() {
    let others = dumps::dumped(&fs::read(dumps::file("others.dump")).unwrap());
    let addresses: [IpAddr; 2] = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
    let interfaces = ["eth0".into()];
    let pod = Pod { addresses: &addresses, interfaces: &interfaces };
    let (mut seen, mut text) = (BTreeSet::new(), String::new());
    let plans: Vec<(&str, RulePlan, Ruleset)> = dumps::plans()
        .into_iter()
        .map(|(name, plan)| (name, plan, read_saved(name)))
        .filter(|(name, ..)| *name != "strict")
        .collect();
    for (theirs, table) in &others.tables {
        for rule in table.chains.values().flat_map(|chain| &chain.rules) {
            if !seen.insert((theirs.family == TableFamily::Ip6, format!("{rule}"))) {
                continue;
            }
            text.push_str(&format!("{rule}\n"));
            for ((plan_name, plan, in_force), (place, bases)) in plans.iter().zip(&PLACES) {
                let findings = find(&beside(in_force, theirs, &others, rule, bases), plan, &pod);
                for finding in findings.iter().filter(|finding| finding.place.table.name == "theirs") {
                    text.push_str(&format!("\t{plan_name} {place}: {}\n", words(finding)));
                }
            }
        }
    }
    dumps::assert_recorded("others.found", &text);
}

/// Connections to other addresses than those the pod is known by are not what the mesh is there for.
#[test]
fn addresses_that_every_pod_has_are_not_judged() {
    let [(name, plan), ..] = dumps::plans();
    let (in_force, theirs) = (read_saved(name), TableFamily::Inet);
    let theirs = TableName { api: Api::NfTables, family: theirs, name: "others".into() };
    let others = Ruleset { tables: [(theirs.clone(), TableState::default())].into(), ..Ruleset::default() };
    let drop = SeenRule { statements: [Statement::Drop].into(), ..SeenRule::default() };
    let ruleset = beside(&in_force, &theirs, &others, &drop, &PLACES[1].1);
    let found = |address: &str| {
        let findings =
            find(&ruleset, &plan, &Pod { addresses: &[address.parse().unwrap()], interfaces: &[] });
        findings.iter().filter(|finding| finding.place.table.name == "theirs").count()
    };
    assert_eq!(["10.1.0.2", "fd00::2"].map(found), [2, 2]);
    let everywhere = ["127.0.0.1", "0.0.0.0", "169.254.7.7", "::1", "::", "fe80::7", "::6"];
    assert_eq!(everywhere.map(found), [0; 7]);
}
