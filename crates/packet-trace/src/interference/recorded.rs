//! What each rule of other programs does to plans that are in force: the rules that a kernel dumped (`tests/dumps`), one at a time, on every hook that captured packets
//! meet. `tests/dumps/others.found` says what was found. With `UPDATE_DUMPS=1` it is written again, and what changes is for the review.

// The dumps are those of a machine that puts the low byte first.
#![cfg(target_endian = "little")]

use super::{Finding, PodTraffic, Traffic};
use crate::kernel::dumps::{self, read_saved};
use netfilter_state::ruleset::{
    Api, Base, HookedRules, KernelRule, Statement, TableFamily, TableName, TableState,
};
use redirect_core::{Family, RulePlan, options::NativeForm, rule::Hook};
use std::{collections::BTreeSet, fmt::Write as _, net::IpAddr};

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

/// Plans in force, as iptables-legacy saved them.
pub(crate) fn in_force() -> Vec<(&'static str, RulePlan, HookedRules)> {
    dumps::plans().into_iter().map(|(name, plan)| (name, plan, read_saved(name))).collect()
}

/// The tables of other programs.
pub(crate) struct Others {
    all: HookedRules,
    /// What a rule may lead to: no base chain.
    led_to: HookedRules,
}

impl Others {
    /// Those that a kernel dumped.
    pub(crate) fn dumped() -> Self {
        Self::of(dumps::dumped(&dumps::dump(dumps::OF_OTHERS)))
    }

    fn of(all: HookedRules) -> Self {
        let mut led_to = all.clone();
        for table in led_to.tables.values_mut() {
            table.chains.retain(|_, chain| chain.base.is_none());
        }
        Self { all, led_to }
    }

    /// Each rule, with its table; one that both IPv4's tables and those of both families have, once.
    pub(crate) fn rules(&self) -> impl Iterator<Item = (&TableName, &KernelRule)> {
        let mut met = BTreeSet::new();
        let of_table = |(name, table)| {
            let TableState { chains, .. }: &TableState = table;
            chains.values().flat_map(|chain| &chain.rules).map(move |rule| (name, rule))
        };
        let all = self.all.tables.iter().flat_map(of_table);
        all.filter(move |(name, rule): &(&TableName, &KernelRule)| {
            met.insert((name.family == TableFamily::Ip6, rule.to_string()))
        })
    }

    /// The rules in force with one of other programs in these places, in a table with everything it may lead to.
    pub(crate) fn beside(
        &self,
        in_force: &HookedRules,
        (of, rule): (&TableName, &KernelRule),
        bases: &[Base],
    ) -> HookedRules {
        let mut ruleset = in_force.clone();
        let name = TableName { api: Api::NfTables, family: of.family, name: "theirs".into() };
        let table = ruleset.table(name);
        *table = self.led_to.tables[of].clone();
        for base in bases {
            let chain = table.chains.entry(format!("{:?}", base.hook)).or_default();
            (chain.base, chain.rules) = (Some(*base), [rule.clone()].into());
        }
        ruleset
    }
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
    let (others, plans) = (Others::dumped(), in_force());
    let addresses: [IpAddr; 2] = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
    let interfaces = ["eth0".into()];
    let pod = PodTraffic { addresses: &addresses, interfaces: &interfaces, ..PodTraffic::default() };
    let mut text = String::new();
    for rule in others.rules() {
        writeln!(text, "{}", rule.1).unwrap();
        for ((plan_name, plan, in_force), (place, bases)) in plans.iter().zip(&PLACES) {
            let findings = pod.judge(&others.beside(in_force, rule, bases), plan).findings;
            for finding in findings.iter().filter(|finding| finding.place.table.name == "theirs") {
                writeln!(text, "\t{plan_name} {place}: {}", words(finding)).unwrap();
            }
        }
    }
    crate::kernel::assert_recorded("others.found", &text);
}

/// Every pod has addresses that no other host reaches.
#[test]
fn addresses_that_every_pod_has_are_not_judged() {
    let [(name, plan), ..] = dumps::plans();
    let theirs = TableName { api: Api::NfTables, family: TableFamily::Inet, name: "others".into() };
    let mut others = HookedRules::default();
    others.table(theirs.clone());
    let others = Others::of(others);
    let drop = KernelRule { statements: [Statement::Drop].into(), ..KernelRule::default() };
    let ruleset = others.beside(&read_saved(name), (&theirs, &drop), &PLACES[1].1);
    let found = |address: &str| {
        let findings =
            PodTraffic { addresses: &[address.parse().unwrap()], interfaces: &[], ..PodTraffic::default() }
                .judge(&ruleset, &plan)
                .findings;
        findings.iter().filter(|finding| finding.place.table.name == "theirs").count()
    };
    assert_eq!(["10.1.0.2", "fd00::2", "169.254.7.7", "fe80::7"].map(found), [2; 4]);
    assert_eq!(["127.0.0.1", "0.0.0.0", "::1", "::", "::6"].map(found), [0; 5]);
}

#[test]
fn wherever_a_plans_rules_are_what_is_in_their_way_is_found() {
    let theirs = TableName { api: Api::NfTables, family: TableFamily::Inet, name: "theirs".into() };
    let mut others = HookedRules::default();
    others.table(theirs.clone());
    let others = Others::of(others);
    let addresses: [IpAddr; 2] = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
    let pod = PodTraffic { addresses: &addresses, interfaces: &["eth0".into()], ..PodTraffic::default() };
    for statement in [Statement::Drop, Statement::Accept, Statement::Redirect(Some(7)), Statement::Untrack] {
        let rule = KernelRule { statements: [statement].into(), ..KernelRule::default() };
        for ((name, plan), (_, bases)) in dumps::plans().iter().zip(&PLACES) {
            let found = |in_force: &HookedRules| {
                let findings = pod.judge(&others.beside(in_force, (&theirs, &rule), bases), plan).findings;
                findings.iter().map(words).collect::<BTreeSet<_>>()
            };
            let saved = found(&read_saved(name));
            assert!(!saved.is_empty() || rule.statements != [Statement::Drop], "{name}");
            for dump in [
                dumps::of_iptables(name),
                dumps::of_native(name, NativeForm::Plain),
                dumps::of_native(name, NativeForm::Sets),
            ] {
                assert_eq!(found(&dumps::dumped(&dumps::dump(&dump))), saved, "{dump} {rule}");
            }
        }
    }
}
