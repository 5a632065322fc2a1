//! Native tables over netlink, listed by nft. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::{Recording, all_recordings, namespace, observe, run, soon, strict_recordings};
use netfilter_state::netlink::NativeState;
use netfilter_state::steps::Transaction;
use netns_apply::netlink::NftConnection;
use redirect_core::{RulePlan, options::NativeForm, plan::DataPlane};
use test_support::netns::State;
use test_support::sample;

fn commit(native: NativeState) {
    let mut connection = NftConnection::open().unwrap();
    let observed = connection.observe(soon()).unwrap();
    let transaction = Transaction { iptables: Vec::new(), native: Some(native) };
    connection.commit(&transaction, &observed, soon()).unwrap();
}

fn found() -> NativeState {
    observe().native().clone()
}

/// Plans to try native tables with: those recorded, and some of all others.
fn plans() -> Vec<Recording> {
    let all = sample::of(all_recordings());
    let (native, others): (Vec<_>, Vec<_>) = all.into_iter().partition(Recording::is_native);
    native.into_iter().chain(others.into_iter().step_by(20)).chain(strict_recordings()).collect()
}

#[test]
fn nft_lists_what_was_recorded() {
    for recording in sample::of(all_recordings()).iter().filter(|recording| recording.is_native()) {
        let namespace = namespace();
        namespace.enter(|| commit(NativeState::wanted(&recording.plan, NativeForm::Plain))).unwrap();
        let found = State { nft: namespace.state_with_nft().unwrap().nft, ..State::default() };
        let wanted = State { nft: State::recorded(&recording.case).unwrap().nft, ..State::default() };
        let differences = found.differences(&wanted);
        assert!(differences.is_empty(), "{}: {}", recording.name, differences.join("\n"));
    }
}

#[test]
fn nft_lists_the_same_whoever_sent_it() {
    for recording in plans() {
        let list = || run("nft", &["-s", "list", "ruleset"], "");
        let ours = namespace()
            .enter(|| {
                commit(NativeState::wanted(&recording.plan, NativeForm::Plain));
                list()
            })
            .unwrap();
        let theirs = namespace()
            .enter(|| {
                run("nft", &["-f", "-"], &recording.plan.nft_text(NativeForm::Plain));
                list()
            })
            .unwrap();
        assert_eq!(ours, theirs, "{}", recording.name);
    }
}

#[test]
fn native_tables_are_recognised_and_removed() {
    for recording in plans() {
        namespace()
            .enter(|| {
                for form in [NativeForm::Plain, NativeForm::Sets] {
                    let wanted = NativeState::wanted(&recording.plan, form);
                    commit(wanted.clone());
                    assert_eq!(found(), wanted, "{} {form:?}", recording.name);
                    assert_ne!(found(), NativeState::wanted(&RulePlan::empty(), form));
                }
                commit(NativeState::default());
                assert!(found().is_empty() && run("nft", &["list", "ruleset"], "").is_empty());
            })
            .unwrap();
    }
}

/// Every plan after every other, the new rules put before the old ones first, and back again: what the kernel holds is
/// what was asked for, also where rules of another program's are among ours.
#[test]
fn native_tables_change_rule_by_rule_and_back() {
    let plans = plans();
    for (recording, next) in plans.iter().zip(plans.iter().skip(1)).step_by(3) {
        for form in [NativeForm::Plain, NativeForm::Sets] {
            namespace()
                .enter(|| {
                    commit(NativeState::wanted(&recording.plan, form));
                    run("nft", &["-f", "-"], SOMEBODY_ELSES);
                    let (before, text) = (found(), lines());
                    let wanted = NativeState::wanted(&next.plan, form);
                    let both = DataPlane::NFT_TABLES
                        .into_iter()
                        .fold(wanted.clone(), |state, table| state.before_rules_of(&before, table));
                    for state in [&both, &wanted] {
                        commit(state.clone());
                        assert_eq!(found(), *state, "{} to {} {form:?}", recording.name, next.name);
                    }
                    commit(before.clone());
                    assert_eq!(found(), before, "{} to {} {form:?}", recording.name, next.name);
                    assert_eq!(lines(), text, "{} to {} {form:?}", recording.name, next.name);
                })
                .unwrap();
        }
    }
}

/// What nft lists, sorted: a chain that was gone for a while is listed last, which means nothing.
fn lines() -> Vec<String> {
    let mut lines: Vec<String> =
        run("nft", &["-s", "list", "ruleset"], "").lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// Rules with expressions, sets, maps and objects that no plan has.
const SOMEBODY_ELSES: &str = "
add set inet istio-proxy-nat theirs { type ipv4_addr; flags interval; elements = { 10.0.0.0/8, 192.168.1.1 } }
add counter inet istio-proxy-nat hits
add chain inet istio-proxy-nat theirs
add rule inet istio-proxy-nat theirs limit rate 5/second accept comment \"mine\"
add rule inet istio-proxy-nat theirs ip saddr @theirs tcp dport { 80, 443, 8000-8100 } counter name hits accept
add rule inet istio-proxy-nat theirs tcp dport vmap { 22 : accept, 23 : drop }
insert rule inet istio-proxy-nat output meta l4proto icmp jump theirs
";
