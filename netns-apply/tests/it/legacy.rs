//! Tables of legacy iptables are read without its programs, and say what those print. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::dumps::kernel_dumps;
use crate::common::{namespace, observation, run};
use netfilter_state::{
    ruleset::{Condition, HookedRules},
    state::{Entry, IptablesTables},
};
use netns_apply::{ApplyError, ApplyOptions, Fingerprint, LegacyError, Live, Programs, apply, verify};
use redirect_core::{
    Family,
    options::{BackendChoice, Variant},
    rule::{Chain, Equality, Match, Table, TcpFlags},
};
use std::{fs, hash::RandomState};
use tempfile::TempDir;
use test_support::netns::{Families, Namespace};

const PROGRAMS: [(Family, [&str; 2]); 2] = [
    (Family::V4, ["iptables-legacy-restore", "iptables-legacy-save"]),
    (Family::V6, ["ip6tables-legacy-restore", "ip6tables-legacy-save"]),
];

/// Options of a machine on which no helper program is installed.
fn without_programs(empty: &TempDir) -> ApplyOptions {
    ApplyOptions::default().programs(Programs::only_in(empty.path().as_os_str()))
}

/// What is in force, in words: a line for each chain and rule. What is not understood is called by the name of its match alone,
/// which is all that the kernel's form of it has.
fn words(ruleset: &HookedRules) -> Vec<String> {
    let mut lines = Vec::new();
    for (table, state) in &ruleset.tables {
        for (name, chain) in &state.chains {
            lines.push(format!("{table} {name} {:?}", chain.base));
            lines.extend(chain.rules.iter().map(|rule| {
                let mut conditions: Vec<String> = rule.conditions.iter().map(condition).collect();
                // The kernel's form of a match is understood as a whole or not at all.
                let unknown = conditions.clone();
                conditions.retain(|one| !unknown.iter().any(|name| one != name && one.starts_with(name)));
                conditions.dedup();
                format!("{table} {name} {conditions:?} {:?} {:?}", rule.statements, rule.counter)
            }));
        }
    }
    lines
}

fn condition(condition: &Condition) -> String {
    if let Condition::Unknown(words) = condition {
        return words.split(" --").next().unwrap_or_default().to_owned();
    }
    if let Condition::TcpFlags { mask, is } = condition {
        let value = TcpFlags::new(*mask, is.value).expect("flags of the mask");
        return Condition::Plain(Match::TcpFlags(Equality { value, not: is.not })).to_string();
    }
    condition.to_string()
}

/// Puts these in force, and compares what is read of them with what the programs print.
fn compare(scripts: &[(Family, Vec<String>)]) {
    let empty = TempDir::new().unwrap();
    let (mut printed, mut state) = (HookedRules::default(), Vec::new());
    for ((family, [restore, save]), (_, scripts)) in PROGRAMS.into_iter().zip(scripts) {
        scripts.iter().for_each(|script| drop(run(restore, &["--noflush"], script)));
        let saved = run(save, &["--counters"], "");
        printed.add_saved(family, &saved).unwrap();
        state.push(IptablesTables::saved(&run(save, &[], "")).unwrap());
    }
    let options = without_programs(&empty);
    let mut read = Live::now(None, &options).unwrap().ruleset;
    read.tables.retain(|table, _| printed.tables.contains_key(table));
    // A table without anything in it is none.
    printed.tables.retain(|table, _| read.tables.contains_key(table));
    assert_same(&words(&read), &words(&printed));
    let seen = observation(&options).unwrap().legacy;
    assert_same(&understood(&seen.v4), &understood(&state[0]));
    assert_same(&understood(&seen.v6), &understood(&state[1]));
    // Where the programs are installed, those rules that no plan can have are as they print them.
    assert_eq!(observation(&ApplyOptions::default()).unwrap().legacy.v4, state[0]);
}

/// Compares line by line, and shows those that differ alone.
fn assert_same(read: &[String], printed: &[String]) {
    let differ: Vec<_> = read.iter().zip(printed).filter(|(one, other)| one != other).collect();
    assert!(differ.is_empty() && read.len() == printed.len(), "{differ:#?}");
}

/// Its rules, those of others without their words.
fn understood(state: &IptablesTables) -> Vec<String> {
    let mut lines = Vec::new();
    for (table, (chain, entries)) in
        Table::ALL.iter().flat_map(|table| state.chains(*table).map(move |chain| (table, chain)))
    {
        for entry in entries {
            let text = match entry {
                Entry::Rule(_) => entry.to_string(),
                Entry::Foreign(rule) => {
                    format!("another, to {:?}", rule.jumps_to().filter(Chain::belongs_to_mesh))
                }
            };
            lines.push(format!("{table:?} {} {text}", chain.name()));
        }
    }
    lines
}

#[test]
fn rules_of_plans_are_read_as_they_are_printed() {
    for (_, plan) in kernel_dumps::plans() {
        let scripts = Family::BOTH.map(|family| (family, vec![plan.rules(family).restore_text()]));
        namespace().enter(|| compare(&scripts)).unwrap();
    }
}

#[test]
fn rules_of_others_are_read_as_they_are_printed() {
    let text = |name: &str| fs::read_to_string(kernel_dumps::file(name)).unwrap();
    let scripts = [(Family::V4, "others4.iptables"), (Family::V6, "others6.iptables")]
        .map(|(family, own)| (family, vec![text("others.iptables"), text(own)]));
    namespace().enter(|| compare(&scripts)).unwrap();
}

/// Looking at a table with iptables-legacy leaves it behind, empty.
#[test]
fn an_empty_table_is_none_and_one_that_drops_or_has_rules_is_one() {
    let empty = TempDir::new().unwrap();
    let options = without_programs(&empty);
    let plan = &kernel_dumps::plans()[0].1;
    Namespace::pod(Families::Dual)
        .unwrap()
        .enter(|| {
            for (_, [restore, _]) in PROGRAMS {
                let nothing = ["raw", "mangle", "nat", "filter"].map(|table| format!("*{table}\nCOMMIT\n"));
                run(restore, &["--noflush"], &nothing.concat());
            }
            let outcome = apply(plan, &options).unwrap();
            assert_eq!((outcome.changed, &outcome.warnings[..]), (true, &[][..]));
            assert_eq!(verify(plan, &options).unwrap(), None);
            assert!(Fingerprint::now(&RandomState::new()).is_some());
            run("iptables-legacy", &["-P", "INPUT", "DROP"], "");
            assert!(verify(plan, &options).unwrap().is_some(), "a policy drops what is captured");
            assert_eq!(Fingerprint::now(&RandomState::new()), None);
            run("iptables-legacy", &["-P", "INPUT", "ACCEPT"], "");
            run("iptables-legacy", &["-t", "nat", "-I", "OUTPUT", "-p", "tcp", "-j", "ACCEPT"], "");
            assert_eq!(Fingerprint::now(&RandomState::new()), None);
        })
        .unwrap();
}

#[test]
fn rules_of_the_mesh_in_them_are_seen_and_replaced_only_with_the_programs() {
    let empty = TempDir::new().unwrap();
    let options = without_programs(&empty);
    let legacy = ApplyOptions::default().backend(BackendChoice::Restore(Some(Variant::Legacy)));
    let [first, second, _] = kernel_dumps::plans().map(|(_, plan)| plan);
    namespace()
        .enter(|| {
            apply(&first, &legacy).unwrap();
            assert_eq!(verify(&first, &options).unwrap(), None);
            assert!(verify(&second, &options).unwrap().is_some());
            let error = apply(&second, &options).unwrap_err();
            assert!(error.to_string().contains("install it"), "{error}");
            assert_eq!(verify(&first, &options).unwrap(), None, "nothing was changed");
        })
        .unwrap();
}

#[test]
fn a_table_takes_no_more_than_may_be_read() {
    let empty = TempDir::new().unwrap();
    let options = without_programs(&empty).most_read(Some(1 << 10));
    namespace()
        .enter(|| {
            let rules = "-A OUTPUT -j RETURN\n".repeat(100);
            run("iptables-legacy-restore", &["--noflush"], &format!("*nat\n{rules}COMMIT\n"));
            let error = observation(&options).unwrap_err();
            assert!(matches!(&error, ApplyError::Legacy(LegacyError::TooMuch { most: 1024, .. })), "{error}");
        })
        .unwrap();
}
