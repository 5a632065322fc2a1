//! Plans of ten thousand ports and ranges: applied, verified, restored and removed, within the limits of a program that does not trust what
//! it reads. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::{observation, run};
use netns_apply::{ApplyError, ApplyOptions, Live, Mismatch, Snapshot, Verdict, apply, cleanup, verify};
use redirect_core::{
    Redirect, RulePlan,
    options::{BackendChoice, NativeForm, Variant},
    settings::{Key, NamespaceFacts, RawSettings, Source},
};
use std::time::Duration;
use test_support::{
    netns::{Families, Namespace},
    sample,
};

/// Ports, IPv4 ranges or IPv6 ranges, each once and in no order.
fn list(key: Key, count: u32, of_v6: bool) -> String {
    let mixed = (0..count).map(|at| at * 7919 % 16_381);
    let are_ranges = matches!(key, Key::OutboundRanges | Key::OutboundExcludeRanges);
    let one = |at: u32| match (are_ranges, of_v6) {
        (true, true) => format!("2001:db8:{:x}:{:x}::/64", at >> 8, at & 0xff),
        (true, false) => format!("172.{}.{}.0/25", 16 + (at >> 8), at & 0xff),
        (false, _) => (20_000 + at).to_string(),
    };
    mixed.map(one).collect::<Vec<_>>().join(",")
}

fn plan(mode: &'static str, key: Key, text: &str) -> RulePlan {
    let mut raw = RawSettings::new();
    let settings = [
        (Key::InterceptionMode, mode),
        (Key::InboundPorts, "*"),
        (Key::OutboundRanges, "*"),
        (Key::DualStack, "true"),
    ];
    settings.into_iter().for_each(|(key, text)| raw.set(key, text, Source::Flag("x")));
    raw.set(key, text.to_owned(), Source::Flag("x"));
    let addresses = ["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
    Redirect::parse(&raw, &NamespaceFacts::new(&addresses)).unwrap().plan()
}

const BACKENDS: [(BackendChoice, NativeForm); 5] = [
    (BackendChoice::Netlink, NativeForm::Plain),
    (BackendChoice::NativeNft, NativeForm::Plain),
    (BackendChoice::Restore(Some(Variant::Legacy)), NativeForm::Plain),
    (BackendChoice::NativeNft, NativeForm::Sets),
    (BackendChoice::Restore(Some(Variant::Nft)), NativeForm::Plain),
];

fn options((backend, native_form): (BackendChoice, NativeForm)) -> ApplyOptions {
    let patience = Duration::from_secs(600);
    ApplyOptions::default()
        .backend(backend)
        .native_form(native_form)
        .patience(patience)
        .most_read(Some(ApplyOptions::MOST_READ))
}

/// Flushes a chain of the mesh.
fn damage(plan: &RulePlan, options: &ApplyOptions) {
    let chain =
        if plan.policy_routes().is_some() { ("mangle", "ISTIO_INBOUND") } else { ("nat", "ISTIO_OUTPUT") };
    match options.backend {
        BackendChoice::NativeNft => {
            let table = format!("istio-proxy-{}", chain.0);
            run("nft", &["flush", "chain", "inet", &table, &chain.1.to_lowercase().replace('_', "-")], "");
        }
        BackendChoice::Restore(Some(Variant::Legacy)) => {
            run("iptables-legacy", &["-t", chain.0, "-F", chain.1], "");
        }
        BackendChoice::Auto | BackendChoice::Netlink | BackendChoice::Restore(_) => {
            run("iptables-nft", &["-t", chain.0, "-F", chain.1], "");
        }
    }
}

/// All that is done with a plan in its life.
fn lives(plan: &RulePlan, options: &ApplyOptions, what: &str) {
    assert!(apply(plan, options).unwrap_or_else(|error| panic!("{what}: {error}")).changed, "{what}");
    let verified = |when: &str| match verify(plan, options) {
        Ok(None) => {}
        other => panic!("{what}, {when}: {other:?}"),
    };
    verified("applied");
    assert!(!apply(plan, options).unwrap().changed, "{what}: all is in force");
    assert!(Live::now(Some(plan), options).is_ok(), "{what}");
    damage(plan, options);
    let snapshot = Snapshot::take(plan, options).unwrap();
    let (Verdict { mismatch, .. }, words) = snapshot.verify_in_words(plan, options).unwrap();
    assert!(matches!(mismatch, Some(Mismatch::Different(_))), "{what}: {mismatch:?}");
    assert!(words.is_some_and(|words| !words.is_empty()), "{what}");
    assert!(apply(plan, options).unwrap().changed, "{what}");
    verified("restored");
    // Whoever removes it does not know what it was.
    let without_limit = options.clone().most_read(None);
    assert!(cleanup(&without_limit).unwrap().changed, "{what}");
    assert!(!observation(options).unwrap().is_redirected(), "{what}");
}

#[test]
fn a_plan_of_ten_thousand_ports_or_ranges_is_readable_as_long_as_it_lives() {
    let kinds = [
        ("REDIRECT", Key::OutboundExcludePorts, false),
        ("TPROXY", Key::InboundPorts, false),
        ("REDIRECT", Key::InboundPorts, false),
        ("REDIRECT", Key::OutboundExcludeRanges, false),
        ("TPROXY", Key::OutboundExcludePorts, false),
        ("REDIRECT", Key::OutboundRanges, true),
        ("TPROXY", Key::InboundExcludePorts, false),
        ("TPROXY", Key::OutboundRanges, true),
    ];
    let all: Vec<_> = if sample::is_whole() {
        // Every kind of list with each backend; and of full size once.
        let every = kinds.into_iter().flat_map(|kind| BACKENDS.map(|backend| (kind, backend, 600)));
        let full = kinds.into_iter().zip(BACKENDS.into_iter().cycle());
        every.chain(full.map(|(kind, backend)| (kind, backend, 10_000))).collect()
    } else {
        // Each backend, beyond what the share of other programs would be enough for; one larger still. One of full size is healed in a test of the agent.
        let some = kinds.into_iter().zip(BACKENDS).map(|(kind, backend)| (kind, backend, 600));
        some.chain([(kinds[0], BACKENDS[3], 3_000)]).collect()
    };
    for ((mode, key, of_v6), backend, count) in all {
        // Nothing but the plan's own share.
        let (plan, options) =
            (plan(mode, key, &list(key, count, of_v6)), options(backend).most_read(Some(64 << 10)));
        let what = format!("{mode} {key:?} {count} {backend:?}");
        Namespace::pod(Families::Dual).unwrap().enter(|| lives(&plan, &options, &what)).unwrap();
    }
}

#[test]
fn what_another_plan_has_left_is_told_where_it_is_more_than_is_read() {
    let large = plan("REDIRECT", Key::OutboundExcludePorts, &list(Key::OutboundExcludePorts, 1_500, false));
    let small = plan("REDIRECT", Key::OutboundExcludePorts, "80");
    let options = options(BACKENDS[0]).most_read(Some(64 << 10));
    let scene = || {
        apply(&large, &options).unwrap();
        let error = verify(&small, &options).unwrap_err();
        assert!(matches!(error, ApplyError::Netlink(_)), "{error}");
        assert!(error.to_string().contains("or of an earlier plan"), "{error}");
    };
    Namespace::pod(Families::Dual).unwrap().enter(scene).unwrap();
}
