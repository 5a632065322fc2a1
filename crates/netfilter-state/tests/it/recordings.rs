//! Plans compared, rule for rule, with the kernel state recorded from the reference.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::recorded::{fixtures, plan, strings};
use netfilter_state::state::IptablesTables;
use redirect_core::{Family, rule::Table};
use serde_json::Value;
use std::collections::BTreeMap;
use test_support::rewrites::{Printed, Rewrites};

fn recorded_state(tables: &Value, printed: Printed) -> IptablesTables {
    let rewrites = Rewrites::named().unwrap();
    let mut text = String::new();
    for (table, lines) in tables.as_object().into_iter().flatten() {
        let rewritten = |line: String| {
            let chain = line.split(' ').nth(1).unwrap_or_default();
            rewrites.of(printed, chain, &line)
        };
        let lines: Vec<String> = strings(lines).into_iter().flat_map(rewritten).collect();
        text += &format!("*{table}\n{}\nCOMMIT\n", lines.join("\n"));
    }
    IptablesTables::saved(&text).unwrap()
}

/// The cases whose expectation is not the recording's, by what is expected instead.
fn divergences(kind: &str) -> BTreeMap<String, String> {
    let list = fixtures("divergences.json")[kind].take();
    let entry =
        |d: &Value| (d["case"].as_str().unwrap().to_owned(), d["expect"].as_str().unwrap().to_owned());
    list.as_array().unwrap().iter().map(entry).collect()
}

#[test]
fn every_plan_is_the_recorded_state() {
    let divergences = divergences("rules");
    let (mut compared, mut rejected) = (0, 0);
    for case in fixtures("rules.json").as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let expected = match divergences.get(name).map(String::as_str) {
            Some("free") => continue,
            Some("reject") => false,
            _ => case["exit"] == 0,
        };
        let plan = plan(case);
        assert_eq!(
            plan.is_some(),
            expected,
            "{name}: {} is expected",
            if expected { "a plan" } else { "an error" }
        );
        let Some(plan) = plan else {
            rejected += 1;
            continue;
        };
        let native = case.get("nft").is_some();
        for (family, key, printed) in
            [(Family::V4, "state_v4", Printed::V4), (Family::V6, "state_v6", Printed::V6)]
        {
            if native {
                continue;
            }
            let (state, recorded) =
                (IptablesTables::from(&plan.rules(family)), recorded_state(&case[key], printed));
            for table in Table::ALL.iter().copied() {
                let planned: Vec<_> = state.chains(table).collect();
                let recorded: Vec<_> = recorded.chains(table).collect();
                assert_eq!(planned, recorded, "{name}: {family} {}", table.name());
            }
            let read_back = IptablesTables::saved(&plan.rules(family).restore_text()).unwrap();
            assert_eq!(read_back, state, "{name}: {family} read back");
        }
        compared += 1;
    }
    assert!(compared >= 300 && rejected >= 20, "{compared} compared, {rejected} rejected");
}

#[test]
fn policy_routes_are_the_recorded_ones() {
    for case in fixtures("rules.json").as_array().unwrap() {
        let Some(plan) = plan(case).filter(|_| case["exit"] == 0) else { continue };
        for (family, key) in [(Family::V4, "ip_rule_v4"), (Family::V6, "ip_rule_v6")] {
            let planned: Vec<String> = plan
                .policy_routes()
                .filter(|routes| routes.families().contains(&family))
                .map(|routes| format!("from all fwmark {} lookup {}", routes.mark(), routes.table()))
                .into_iter()
                .collect();
            let recorded: Vec<String> = strings(&case[key])
                .iter()
                .map(|line| line.split('\t').next_back().unwrap().to_owned())
                .collect();
            assert_eq!(planned, recorded, "{}: {family}", case["name"]);
        }
        let alias = strings(&case["lo_addrs"]).contains(&"::6/128".to_owned());
        assert_eq!(plan.loopback_address().is_some(), alias, "{}: ::6", case["name"]);
    }
}
