//! What was programmed, read by another program: the `iptables` crate, which runs iptables' own programs. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::{all_recordings, namespace};
use iptables::IPTables;
use netns_apply::{ApplyOptions, apply, cleanup};
use redirect_core::{
    Family, RulePlan,
    options::{BackendChoice, Variant},
    rule::{Rule, Table},
};
use test_support::sample;

/// The rules of every chain that a plan has in a family, in the words of `iptables -S`.
fn wanted(plan: &RulePlan, family: Family) -> Vec<(&'static str, String, Vec<String>)> {
    let rules = plan.rules(family);
    let mut chains = Vec::new();
    for table in Table::ALL.iter().copied() {
        for (chain, rules_of_chain) in rules.chains(table) {
            let line = |rule: &Rule| format!("-A {chain} {}", rule.text());
            chains.push((table.name(), chain.name().to_owned(), rules_of_chain.iter().map(line).collect()));
        }
    }
    chains
}

fn reader(variant: Variant, family: Family) -> IPTables {
    let cmd = match (variant, family) {
        (Variant::Nft, Family::V4) => "iptables-nft",
        (Variant::Nft, Family::V6) => "ip6tables-nft",
        (Variant::Legacy, Family::V4) => "iptables-legacy",
        (Variant::Legacy, Family::V6) => "ip6tables-legacy",
    };
    IPTables { cmd, has_check: true, has_wait: true, is_numeric: false }
}

/// The order of words within a rule is the printer's own; which words there are, and the order of rules, is not. Some
/// versions say that TPROXY keeps the address, which says nothing.
fn sorted(line: &str) -> Vec<&str> {
    let silent = ["--on-ip", "0.0.0.0", "::"];
    let mut words: Vec<&str> = line.split_ascii_whitespace().filter(|word| !silent.contains(word)).collect();
    words.sort_unstable();
    words
}

#[test]
fn iptables_reads_the_rules_that_were_planned() {
    let backends = [
        (BackendChoice::Netlink, Variant::Nft),
        (BackendChoice::Restore(Some(Variant::Legacy)), Variant::Legacy),
    ];
    let some =
        sample::of(all_recordings()).into_iter().filter(|recording| !recording.is_native()).step_by(23);
    let plans: Vec<_> = some.collect();
    assert!(plans.len() > 10, "{}", plans.len());
    for recording in plans {
        for (backend, variant) in backends {
            namespace()
                .enter(|| {
                    let options = ApplyOptions::default().backend(backend);
                    apply(&recording.plan, &options).unwrap();
                    for family in recording.plan.families() {
                        let reader = reader(variant, *family);
                        for (table, chain, rules) in wanted(&recording.plan, *family) {
                            let listed = reader.list(table, &chain).unwrap();
                            let listed: Vec<&String> =
                                listed.iter().filter(|line| line.starts_with("-A ")).collect();
                            let name = format!("{} {backend:?} {family} {table} {chain}", recording.name);
                            assert_eq!(listed.len(), rules.len(), "{name}: {listed:?}");
                            for (listed, rule) in listed.iter().zip(&rules) {
                                assert_eq!(sorted(listed), sorted(rule), "{name}");
                            }
                        }
                    }
                    cleanup(&options).unwrap();
                    for family in Family::BOTH {
                        for table in ["raw", "mangle", "nat"] {
                            let left = reader(variant, family).list_table(table).unwrap();
                            assert!(
                                left.iter().all(|line| !line.contains("ISTIO")),
                                "{}: {left:?}",
                                recording.name
                            );
                        }
                    }
                })
                .unwrap();
        }
    }
}

#[test]
fn others_that_change_routing_all_the_time_interrupt_no_look() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let namespace = namespace();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            namespace
                .enter(|| {
                    crate::common::run("ip", &["rule", "add", "fwmark", "0x539", "lookup", "133"], "");
                    let mut rounds = 0;
                    while !done.load(Ordering::Relaxed) {
                        let batch: String = (0..50)
                            .map(|number| {
                                format!(
                                    "rule add fwmark {0} lookup {0}\nrule del fwmark {0} lookup {0}\n",
                                    1000 + number
                                )
                            })
                            .collect();
                        crate::common::run("ip", &["-batch", "-"], &batch);
                        rounds += 1;
                    }
                    assert!(rounds > 1);
                })
                .unwrap();
        });
        let looks = namespace.enter(|| {
            let mut socket = netns_apply::routes::RouteSocket::open(usize::MAX).unwrap();
            (0..2_000).map(|_| socket.observe().unwrap().len()).collect::<Vec<_>>()
        });
        done.store(true, Ordering::Relaxed);
        writer.join().unwrap();
        assert_eq!(looks.unwrap().len(), 2_000);
    });
}
