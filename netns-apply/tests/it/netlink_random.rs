//! Plans of random settings, sent by netlink and by iptables-restore: the same rules, in the same words. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::{apply, is_in_force, namespace, observe, run};
use proptest::{prelude::*, sample::select, test_runner::TestRunner};
use redirect_core::{
    Family, Redirect, RulePlan,
    settings::{Key, NamespaceFacts, RawSettings, Source},
};

/// Texts that a setting may have.
fn choices() -> Vec<(Key, Vec<&'static str>)> {
    vec![
        (Key::InterceptionMode, vec!["REDIRECT", "TPROXY"]),
        (Key::InboundPorts, vec!["", "*", "80", "80,8080,9000:9100"]),
        (Key::InboundExcludePorts, vec!["", "15020", "22,15090,100:200"]),
        (Key::OutboundRanges, vec!["", "*", "10.0.0.0/8", "172.16.0.0/12,fd00::/7,1.2.3.4/32"]),
        (Key::OutboundExcludeRanges, vec!["", "10.1.0.0/16,192.168.0.0/17", "fd00::/33,::1/128"]),
        (Key::OutboundPorts, vec!["", "443", "1:65535"]),
        (Key::OutboundExcludePorts, vec!["", "3306,6379", "53:60"]),
        (Key::VirtualInterfaces, vec!["", "eth7", "tap+,veth1"]),
        (Key::ExcludeInterfaces, vec!["", "eth8", "k6t+"]),
        (Key::OwnerGroups, vec!["*", "7", "7,8,9"]),
        (Key::OwnerGroupsExclude, vec!["", "5,6"]),
        (Key::ProxyUid, vec!["1337", "0,4294967294"]),
        (Key::ProxyGid, vec!["1337", "1,2"]),
        (Key::TproxyMark, vec!["1337", "0xffffffff"]),
        (Key::RedirectDns, vec!["false", "true"]),
        (Key::CaptureAllDns, vec!["false", "true"]),
        (Key::DropInvalid, vec!["false", "true"]),
        (Key::DualStack, vec!["false", "true"]),
        (Key::LoopbackRange, vec!["127.0.0.1/32", "127.0.0.0/8", "127.0.0.0/9"]),
    ]
}

fn plan(picks: &[(Key, &'static str)]) -> Option<RulePlan> {
    let mut raw = RawSettings::new();
    for (key, text) in picks {
        raw.set(*key, *text, Source::Flag("test"));
    }
    let addresses = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
    let nameservers = ["10.96.0.10".parse().unwrap(), "fd00:96::a".parse().unwrap()];
    let facts = NamespaceFacts::new(&addresses).with_nameservers(&nameservers);
    Redirect::parse(&raw, &facts).ok().map(|redirect| redirect.plan())
}

fn saved(family: Family) -> Vec<String> {
    let program = match family {
        Family::V4 => "iptables-nft-save",
        Family::V6 => "ip6tables-nft-save",
    };
    let rule = |line: &&str| line.starts_with("-A") || line.starts_with('*') || line.starts_with(":ISTIO");
    let mut lines: Vec<String> = run(program, &[], "").lines().filter(rule).map(str::to_owned).collect();
    // Tables stand in the order they were made in; what is in them matters.
    let mut tables: Vec<Vec<String>> = Vec::new();
    for line in lines.drain(..) {
        if line.starts_with('*') {
            tables.push(Vec::new());
        }
        tables.last_mut().unwrap().push(line);
    }
    for table in &mut tables {
        // The order of rules matters within a chain only.
        table.sort_by_key(|line| line.split(' ').take(2).map(str::to_owned).collect::<Vec<_>>());
    }
    tables.retain(|table| table.len() > 1);
    tables.sort();
    tables.concat()
}

fn by_restore(plan: &RulePlan) {
    for (family, program) in [(Family::V4, "iptables-nft-restore"), (Family::V6, "ip6tables-nft-restore")] {
        run(program, &["--noflush"], &plan.rules(family).restore_text());
    }
}

#[test]
fn netlink_and_iptables_restore_make_the_same() {
    let picks: Vec<_> =
        choices().into_iter().map(|(key, texts)| select(texts).prop_map(move |text| (key, text))).collect();
    let mut runner = TestRunner::new(ProptestConfig::with_cases(96));
    runner
        .run(&picks, |picks| {
            let Some(plan) = plan(&picks) else { return Ok(()) };
            let ours = namespace()
                .enter(|| {
                    apply(&plan).unwrap();
                    assert!(is_in_force(&observe(), &plan), "{picks:?}");
                    Family::BOTH.map(saved)
                })
                .unwrap();
            let theirs = namespace()
                .enter(|| {
                    by_restore(&plan);
                    assert!(is_in_force(&observe(), &plan), "{picks:?}");
                    Family::BOTH.map(saved)
                })
                .unwrap();
            prop_assert_eq!(ours, theirs);
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_plan_of_thousands_of_rules_fits_one_transaction() {
    let list = |text: fn(u16) -> String| (1..3_000).map(text).collect::<Vec<_>>().join(",");
    let mut raw = RawSettings::new();
    raw.set(Key::DualStack, "true", Source::Flag("test"));
    raw.set(Key::OutboundExcludePorts, list(|port| port.to_string()), Source::Flag("test"));
    let range = |n: u16| format!("10.{}.{}.0/24,fd00:{n:x}::/32", n / 256, n % 256);
    raw.set(Key::OutboundExcludeRanges, list(range), Source::Flag("test"));
    let addresses = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
    let plan = Redirect::parse(&raw, &NamespaceFacts::new(&addresses)).unwrap().plan();
    namespace()
        .enter(|| {
            apply(&plan).unwrap();
            assert!(is_in_force(&observe(), &plan));
            apply(&RulePlan::empty()).unwrap();
            assert!(Family::BOTH.iter().all(|family| observe().state(*family).is_empty()));
        })
        .unwrap();
}
