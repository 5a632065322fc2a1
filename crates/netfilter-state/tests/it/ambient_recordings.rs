//! Plans of ambient mode compared, rule for rule, with the kernel state recorded from the reference.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::recorded::{ambient_cases, ambient_redirect, strings};
use netfilter_state::state::IptablesTables;
use redirect_core::{Family, RulePlan, options::NativeForm, rule::Table};
use serde_json::Value;
use std::collections::BTreeMap;
use test_support::rewrites::{Printed, Rewrites, without_counts};

/// How many cases were recorded; so that a lost fixture does not look like success.
const CASES: usize = 96;
/// How many of them with iptables.
const IPTABLES_CASES: usize = 47;

/// Each case with its plan.
fn cases() -> Vec<(String, Value, RulePlan)> {
    let all = ambient_cases();
    assert_eq!(all.len(), CASES);
    let named = |case: Value| {
        let plan = ambient_redirect(&case).plan();
        (case["name"].as_str().unwrap().to_owned(), case, plan)
    };
    all.into_iter().map(named).collect()
}

fn is_native(case: &Value) -> bool {
    case["in"]["backend"] == "nft"
}

#[test]
fn every_plan_is_the_recorded_state() {
    let rewrites = Rewrites::named().unwrap();
    let mut compared = 0;
    for (name, case, plan) in cases().iter().filter(|(_, case, _)| !is_native(case)) {
        for (family, key, printed) in
            [(Family::V4, "iptables", Printed::V4), (Family::V6, "ip6tables", Printed::V6)]
        {
            let rewritten = |line: String| {
                let chain = line.split(' ').nth(1).unwrap_or_default();
                rewrites.of(printed, chain, &line)
            };
            let lines: Vec<String> = strings(&case["state"][key]).into_iter().flat_map(rewritten).collect();
            let recorded = IptablesTables::saved(&lines.join("\n")).unwrap();
            let rules = plan.rules(family);
            let state = IptablesTables::from(&rules);
            for table in Table::ALL.iter().copied() {
                let planned: Vec<_> = state.chains(table).collect();
                let recorded: Vec<_> = recorded.chains(table).collect();
                assert_eq!(planned, recorded, "{name}: {family} {}", table.name());
            }
            assert_eq!(
                IptablesTables::saved(&rules.restore_text()).unwrap(),
                state,
                "{name}: {family} read back"
            );
            compared += 1;
        }
    }
    // Both families of each case.
    assert_eq!(compared, 2 * IPTABLES_CASES);
}

/// The rules of native chains, by table and chain.
type Native = BTreeMap<(String, String), Vec<String>>;

#[test]
fn every_native_plan_is_what_is_recorded() {
    for (name, case, plan) in cases().iter().filter(|(_, case, _)| is_native(case)) {
        let (planned, recorded) =
            (written(&plan.nft_text(NativeForm::Plain)), listed(&strings(&case["state"]["nft"])));
        assert_eq!(planned, recorded, "{name}");
        assert!(planned.len() >= 8, "{name}: {planned:?}");
    }
}

/// Input for nft.
fn written(text: &str) -> Native {
    let mut native = Native::new();
    for line in text.lines() {
        let words: Vec<&str> = line.splitn(6, ' ').collect();
        match words.as_slice() {
            ["add", "chain", "inet", table, chain, ..] => {
                native.entry(((*table).into(), (*chain).into())).or_default();
            }
            ["add", "rule", "inet", table, chain, rule] => {
                native.entry(((*table).into(), (*chain).into())).or_default().push((*rule).to_owned());
            }
            _ => assert!(line.contains(" table inet istio-ambient-"), "{line}"),
        }
    }
    native
}

/// What nft lists, with the rewrites.
fn listed(lines: &[String]) -> Native {
    let rewrites = Rewrites::named().unwrap();
    let (mut native, mut table, mut chain) = (Native::new(), String::new(), String::new());
    for line in lines.iter().map(|line| line.trim()) {
        let words: Vec<&str> = line.split(' ').collect();
        match words.as_slice() {
            ["table", "inet", name, "{"] => table = (*name).into(),
            ["chain", name, "{"] => {
                chain = name.replace("istio-prerouting", "istio-prert");
                native.entry((table.clone(), chain.clone())).or_default();
            }
            ["type", ..] | ["}" | ""] => {}
            _ => {
                for rule in rewrites.of(Printed::Nft, &chain, &without_counts(line)) {
                    native.entry((table.clone(), chain.clone())).or_default().push(rule);
                }
            }
        }
    }
    native
}

#[test]
fn policy_routes_are_the_recorded_ones() {
    for (name, case, plan) in cases() {
        let routes = plan.policy_routes().unwrap();
        for (family, rule, route) in [(Family::V4, "rule4", "route4"), (Family::V6, "rule6", "route6")] {
            let is_planned = routes.families().contains(&family);
            let planned = is_planned.then(|| {
                format!(
                    "{}:\tfrom all fwmark {} lookup {}",
                    routes.priority().unwrap(),
                    routes.mark(),
                    routes.table()
                )
            });
            assert_eq!(Vec::from_iter(planned), strings(&case["state"][rule]), "{name}: {family}");
            let recorded = strings(&case["state"][route]);
            assert_eq!(recorded.len(), usize::from(is_planned), "{name}: {family}");
            assert!(recorded.iter().all(|route| route.starts_with("local default dev lo ")), "{recorded:?}");
        }
        assert_eq!(plan.loopback_address(), None);
    }
}
