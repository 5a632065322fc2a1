//! What others do to the same tables, and what the kernel refuses. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::{all_recordings, apply, changes, namespace, observe, run, soon};
use netfilter_state::{
    change::{EditOp, IptablesChange, TableChange},
    netlink::Extension,
    state::Entry,
    steps::Transaction,
};
use netns_apply::netlink::{NetlinkError, NftConnection};
use redirect_core::{
    Family, RulePlan,
    rule::{Chain, Hook, OurChain, Table},
};
use std::collections::BTreeMap;

fn some_plan() -> RulePlan {
    all_recordings().into_iter().find(|recording| recording.name == "defaults-empty").unwrap().plan
}

#[test]
fn rules_of_others_stay_where_they_are() {
    namespace()
        .enter(|| {
            run("iptables-nft", &["-t", "nat", "-A", "OUTPUT", "-p", "icmp", "-j", "ACCEPT"], "");
            let comment = ["-m", "comment", "--comment", "mine", "-j", "RETURN"];
            run("iptables-nft", &[&["-t", "nat", "-A", "OUTPUT"], &comment[..]].concat(), "");
            run("iptables-nft", &["-t", "nat", "-N", "DOCKER"], "");
            let before = run("iptables-nft-save", &["-t", "nat"], "");
            apply(&some_plan()).unwrap();
            let during = run("iptables-nft-save", &["-t", "nat"], "");
            assert!(during.contains("-A OUTPUT -j ISTIO_OUTPUT"), "{during}");
            apply(&RulePlan::empty()).unwrap();
            let rules = |text: &str| -> Vec<String> {
                text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
            };
            assert_eq!(rules(&before), rules(&run("iptables-nft-save", &["-t", "nat"], "")));
        })
        .unwrap();
}

#[test]
fn a_refused_part_undoes_all_and_is_named() {
    namespace()
        .enter(|| {
            let mut connection = NftConnection::open().unwrap();
            let observed = connection.observe(soon()).unwrap();
            // REDIRECT exists in nat only.
            let chain = || Chain::from(OurChain::Redirect);
            let refused = Entry::saved("-p tcp -j REDIRECT --to-ports 15001");
            let steps = vec![
                EditOp::DeclareEmpty(chain()),
                EditOp::Append(chain(), refused),
                EditOp::Append(Chain::from(Hook::Output), Entry::saved("-j ISTIO_REDIRECT")),
            ];
            let wrong = IptablesChange { tables: vec![TableChange { table: Table::Mangle, steps }] };
            let mut rules = changes(&observed, &some_plan());
            rules.push((Family::V6, wrong));
            let transaction = Transaction { iptables: rules, native: None };
            let error = connection.commit(&transaction, &observed, soon()).unwrap_err();
            let NetlinkError::Refused { part, .. } = &error else { panic!("{error}") };
            assert!(part.contains("IPv6 mangle"), "{error}");
            assert!(Family::BOTH.iter().all(|family| observe().state(*family).is_empty()));
        })
        .unwrap();
}

#[test]
fn others_may_change_other_rules_meanwhile() {
    namespace()
        .enter(|| {
            let mut connection = NftConnection::open().unwrap();
            let observed = connection.observe(soon()).unwrap();
            let rules = changes(&observed, &some_plan());
            let transaction = Transaction { iptables: rules, native: None };
            run("nft", &["add", "table", "inet", "somebody"], "");
            connection.commit(&transaction, &observed, soon()).unwrap();

            let observed = connection.observe(soon()).unwrap();
            let empty = changes(&observed, &RulePlan::empty());
            run("iptables-nft", &["-t", "nat", "-I", "OUTPUT", "1", "-j", "RETURN"], "");
            let transaction = Transaction { iptables: empty, native: None };
            let result = connection.commit(&transaction, &observed, soon());
            assert_eq!(result, Err(NetlinkError::Changed));
        })
        .unwrap();
}

#[test]
fn what_the_kernel_lacks_is_found_without_trying() {
    namespace()
        .enter(|| {
            let mut connection = NftConnection::open().unwrap();
            assert_eq!(connection.missing_for(&some_plan()), Ok(vec![]));
            let nonsense = Extension { name: "nonsense", revision: 0, is_target: false };
            let missing = connection.missing([(Family::V4, nonsense)]).unwrap();
            assert_eq!(missing.iter().map(|one| one.extension).collect::<Vec<_>>(), [nonsense]);
            assert_eq!(observe().generation(), connection.observe(soon()).unwrap().generation());
        })
        .unwrap();
}

#[test]
fn a_chain_of_an_earlier_version_is_taken_away_and_can_come_back() {
    namespace()
        .enter(|| {
            let old = "*nat\n:ISTIO_OLD - [0:0]\n-A ISTIO_OLD -p icmp -m comment --comment \"a b\" -j RETURN\n-A OUTPUT -p tcp -g ISTIO_OLD\nCOMMIT\n";
            run("iptables-nft-restore", &["--noflush"], old);
            let before = observe();
            let saved = run("iptables-nft-save", &["-t", "nat"], "");
            apply(&some_plan()).unwrap();
            assert!(!run("iptables-nft-save", &[], "").contains("ISTIO_OLD"));
            let now = observe();
            let back = Family::BOTH.map(|family| (family, IptablesChange::back(now.state(family), before.state(family), &IptablesChange::default())));
            let transaction = Transaction { iptables: back.into(), native: None };
            NftConnection::open().unwrap().commit(&transaction, &now, soon()).unwrap();
            let rules = |text: &str| -> Vec<String> {
                text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
            };
            assert_eq!(rules(&saved), rules(&run("iptables-nft-save", &["-t", "nat"], "")));
        })
        .unwrap();
}

#[test]
fn a_connection_that_has_read_too_much_can_be_asked_again() {
    namespace()
        .enter(|| {
            let rules: String =
                (1..10_000).map(|port| format!("-A OUTPUT -p tcp --dport {port}\n")).collect();
            run("iptables-nft-restore", &[], &format!("*nat\n{rules}COMMIT\n"));
            let mut connection = NftConnection::open().unwrap();
            connection.limit(100_000);
            for _ in 0..2 {
                assert_eq!(connection.observe(soon()).unwrap_err(), NetlinkError::TooMuch(100_000));
            }
            // Everything else is read all the same.
            let others = "*nat\n:SHORT -\n-A SHORT -j RETURN\nCOMMIT\n";
            run("iptables-nft-restore", &["--noflush"], others);
            let ruleset = connection.ruleset(soon()).unwrap();
            let chains = ruleset.tables.values().flat_map(|table| &table.chains);
            let read: BTreeMap<&str, _> =
                chains.map(|(name, chain)| (name.as_str(), (chain.rules.len(), chain.is_partial))).collect();
            assert_eq!((read["OUTPUT"], read["SHORT"]), ((0, true), (1, false)));
            for _ in 0..2 {
                assert_eq!(connection.observe(soon()).unwrap_err(), NetlinkError::TooMuch(100_000));
            }
            connection.limit(100_000_000);
            let observed = connection.observe(soon()).unwrap();
            assert_eq!(observed.state(Family::V4).rules(Table::Nat, &Chain::from(Hook::Output)).len(), 9_999);
        })
        .unwrap();
}
