//! Plans compared, rule for rule, with the kernel state recorded from the reference.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use redirect_core::{
    Family, Redirect, RulePlan,
    parse::rule_state,
    render::restore_text,
    rule::Table,
    settings::{Kind, NameLookup, NamespaceFacts, RawSettings, SETTINGS, Setting, Source},
    state::RuleState,
};
use serde_json::Value;
use std::{collections::BTreeMap, net::IpAddr};

/// The users and groups of the machine the recordings were made on, as far as they matter.
struct Recorded;

impl NameLookup for Recorded {
    fn user(&self, name: &str) -> Option<u32> {
        (name == "root").then_some(0)
    }

    fn group(&self, name: &str) -> Option<u32> {
        (name == "root").then_some(0)
    }
}

fn fixtures(file: &str) -> Value {
    let path = format!("{}/../e2e/fixtures/{file}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().map(|item| item.as_str().unwrap().to_owned()).collect()
}

/// Reads a command line by the table, as simply as possible; `None` for one that is no use of the table.
fn flags(args: &[String], raw: &mut RawSettings) -> Option<()> {
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let by_name = |setting: &&Setting| match (arg.strip_prefix("--"), setting.flag, setting.short) {
            (Some(long), Some(flag), _) => long == flag,
            (Some(_), None, _) => false,
            (None, _, short) => short.is_some_and(|short| *arg == format!("-{short}")),
        };
        let setting = SETTINGS.iter().find(by_name)?;
        let text = if setting.kind == Kind::Bool { "true".to_owned() } else { args.next()?.clone() };
        raw.set(setting.key, text, Source::Flag(setting.flag.unwrap()));
    }
    Some(())
}

fn plan(case: &Value) -> Option<RulePlan> {
    let mut raw = RawSettings::new();
    let env: BTreeMap<String, String> = serde_json::from_value(case["env"].clone()).unwrap_or_default();
    raw.read_environment(|_| true, |name| env.get(name).cloned());
    flags(&strings(&case["args"]), &mut raw)?;
    let families = case["families"].as_str().unwrap_or("46");
    let mut addresses: Vec<IpAddr> = vec!["127.0.0.1".parse().unwrap(), "::1".parse().unwrap()];
    addresses.extend(families.contains('4').then(|| "10.1.0.2".parse::<IpAddr>().unwrap()));
    addresses.extend(families.contains('6').then(|| "fd00:10::2".parse::<IpAddr>().unwrap()));
    let nameservers: Vec<IpAddr> = match case.get("nameservers") {
        Some(list) if !list.is_null() => strings(list).iter().map(|text| text.parse().unwrap()).collect(),
        _ => vec!["10.96.0.10".parse().unwrap()],
    };
    let facts = NamespaceFacts { addresses: &addresses, nameservers: &nameservers, names: &Recorded };
    Redirect::parse(&raw, &facts).ok().map(|redirect| redirect.plan())
}

fn recorded_state(tables: &Value) -> RuleState {
    let mut text = String::new();
    for (table, lines) in tables.as_object().into_iter().flatten() {
        text += &format!("*{table}\n{}\nCOMMIT\n", strings(lines).join("\n"));
    }
    rule_state(&text).unwrap()
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
        for (family, key) in [(Family::V4, "state_v4"), (Family::V6, "state_v6")] {
            if native {
                continue;
            }
            let (planned, recorded) = (plan.rules(family), recorded_state(&case[key]));
            for table in Table::ALL {
                let planned: Vec<_> = planned.state().chains(table).collect();
                let recorded: Vec<_> = recorded.chains(table).collect();
                assert_eq!(planned, recorded, "{name}: {family} {}", table.name());
            }
            let read_back = rule_state(&restore_text(&plan.rules(family))).unwrap();
            assert_eq!(&read_back, plan.rules(family).state(), "{name}: {family} read back");
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
                .filter(|routes| routes.families.contains(&family))
                .map(|routes| {
                    format!("from all fwmark {} lookup {}", routes.tproxy.mark, routes.tproxy.table)
                })
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
