//! Recordings of the reference, programmed over netlink and read with iptables' own tools. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::collections::HashSet;

use crate::common::{
    Recording, apply, changes, is_in_force, namespace, observe, recordings, run, strict_recordings,
};
use netfilter_state::state::IptablesTables;
use redirect_core::{
    Family, RulePlan,
    rule::{Rule, Table},
};
use test_support::netns::State;

fn restore_programs(family: Family) -> (&'static str, &'static str) {
    match family {
        Family::V4 => ("iptables-nft-restore", "iptables-nft"),
        Family::V6 => ("ip6tables-nft-restore", "ip6tables-nft"),
    }
}

/// What iptables' own tools print of a recording, without what is not a rule of a table.
fn wanted(recording: &Recording) -> State {
    let recorded = State::recorded(&recording.case).unwrap();
    State { v4: recorded.v4, v6: recorded.v6, ..State::default() }
}

fn printed(namespace: &test_support::netns::Namespace) -> State {
    let state = namespace.state().unwrap();
    State { v4: state.v4, v6: state.v6, ..State::default() }
}

#[test]
fn iptables_prints_what_was_recorded() {
    for recording in recordings(0).iter().filter(|recording| !recording.is_native()) {
        let namespace = namespace();
        namespace
            .enter(|| {
                assert!(apply(&recording.plan).unwrap() || recording.plan.families().is_empty());
                assert!(is_in_force(&observe(), &recording.plan), "{} is not read back", recording.name);
                assert!(!apply(&recording.plan).unwrap(), "{} is not in force", recording.name);
            })
            .unwrap();
        let differences = printed(&namespace).differences(&wanted(recording));
        assert!(differences.is_empty(), "{}: {}", recording.name, differences.join("\n"));
        namespace
            .enter(|| {
                assert!(apply(&RulePlan::empty()).unwrap());
                assert!(Family::BOTH.iter().all(|family| observe().state(*family).is_empty()));
            })
            .unwrap();
        assert!(printed(&namespace).is_pristine(), "{} leaves something", recording.name);
    }
}

#[test]
fn one_plan_takes_the_place_of_another() {
    let namespace = namespace();
    for recording in recordings(1).iter().filter(|recording| !recording.is_native()) {
        namespace
            .enter(|| {
                apply(&recording.plan).unwrap();
                assert!(is_in_force(&observe(), &recording.plan), "{}", recording.name);
            })
            .unwrap();
        let differences = printed(&namespace).differences(&wanted(recording));
        assert!(differences.is_empty(), "{}: {}", recording.name, differences.join("\n"));
    }
}

#[test]
fn what_iptables_restore_makes_is_read_as_the_plan() {
    let all = recordings(2).into_iter().chain(strict_recordings());
    for recording in all.filter(|recording| !recording.is_native()) {
        let namespace = namespace();
        namespace
            .enter(|| {
                for family in Family::BOTH {
                    let text = recording.plan.rules(family).restore_text();
                    run(restore_programs(family).0, &["--noflush"], &text);
                }
                assert!(is_in_force(&observe(), &recording.plan), "{}", recording.name);
                assert!(changes(&observe(), &recording.plan).is_empty(), "{}", recording.name);
                // What another program has made is removed all the same.
                apply(&RulePlan::empty()).unwrap();
                assert!(Family::BOTH.iter().all(|family| observe().state(*family).is_empty()));
            })
            .unwrap();
    }
}

#[test]
fn iptables_finds_and_removes_the_rules() {
    let all = recordings(3).into_iter().step_by(2).chain(strict_recordings().into_iter().step_by(3));
    let mut found = HashSet::new();
    for recording in all.filter(|recording| !recording.is_native()) {
        let namespace = namespace();
        namespace
            .enter(|| {
                apply(&recording.plan).unwrap();
                for family in Family::BOTH {
                    find(family, &recording, &mut found);
                    remove(family, &recording);
                }
                assert!(Family::BOTH.iter().all(|family| observe().state(*family).is_empty()));
            })
            .unwrap();
    }
    assert!(found.len() > 200, "{} rules", found.len());
}

/// `iptables -C` for every rule that no recording before had.
fn find(family: Family, recording: &Recording, found: &mut HashSet<String>) {
    let (_, program) = restore_programs(family);
    for table in Table::ALL.iter().copied() {
        for (chain, entries) in recording.plan.rules(family).chains(table) {
            for text in entries.iter().map(Rule::text) {
                if found.insert(format!("{program} {} {} {text}", table.name(), chain.name())) {
                    let args = ["-t", table.name(), "-C", chain.name()];
                    run(program, &[&args, &*text.split(' ').collect::<Vec<_>>()].concat(), "");
                }
            }
        }
    }
}

/// `-D` for every rule and `-X` for every chain, by one program: starting one takes longer than removing a rule.
fn remove(family: Family, recording: &Recording) {
    let rules = recording.plan.rules(family);
    let (restore, _) = restore_programs(family);
    let mut text = String::new();
    for table in Table::ALL.iter().copied() {
        text += &format!("*{}\n", table.name());
        for (chain, entries) in rules.chains(table) {
            text.extend(entries.iter().map(|rule| format!("-D {} {}\n", chain.name(), rule.text())));
        }
        let own = rules.chains(table).filter(|(chain, _)| chain.belongs_to_mesh());
        text.extend(own.map(|(chain, _)| format!("-X {}\n", chain.name())));
        text += "COMMIT\n";
    }
    run(restore, &["--noflush"], &text);
}

#[test]
fn saved_text_and_dump_say_the_same() {
    let all = recordings(2).into_iter().chain(strict_recordings());
    for recording in all.filter(|recording| !recording.is_native()) {
        namespace()
            .enter(|| {
                apply(&recording.plan).unwrap();
                let observed = observe();
                for (family, program) in
                    [(Family::V4, "iptables-nft-save"), (Family::V6, "ip6tables-nft-save")]
                {
                    let saved = IptablesTables::saved(&run(program, &[], "")).unwrap();
                    assert_eq!(&saved, observed.state(family), "{}", recording.name);
                }
            })
            .unwrap();
    }
}
