//! Native tables over netlink, listed by nft. Needs root.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod common;

use common::{Recording, namespace, recordings, run, soon, strict_recordings};
use e2e::netns::State;
use netns_apply::netlink::{Connection, NativeChange, Transaction};
use redirect_core::{
    RulePlan,
    netlink::{NativeForm, NativeState},
    render::nft_text,
};

fn commit(native: NativeChange<'_>) {
    let mut connection = Connection::open().unwrap();
    let observed = connection.observe().unwrap();
    connection.commit(&Transaction { rules: &[], native }, &observed, soon()).unwrap();
}

fn found() -> NativeState {
    let mut connection = Connection::open().unwrap();
    let observed = connection.observe().unwrap();
    connection.native_state(&observed).unwrap()
}

/// Plans to try native tables with: those recorded, and some of all others.
fn plans() -> Vec<Recording> {
    let all = recordings();
    let (native, others): (Vec<_>, Vec<_>) = all.into_iter().partition(Recording::is_native);
    assert!(!native.is_empty());
    native.into_iter().chain(others.into_iter().step_by(5)).chain(strict_recordings()).collect()
}

#[test]
fn nft_lists_what_was_recorded() {
    for recording in recordings().iter().filter(|recording| recording.is_native()) {
        let namespace = namespace();
        namespace.enter(|| commit(NativeChange::Write(&recording.plan, NativeForm::Plain))).unwrap();
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
                commit(NativeChange::Write(&recording.plan, NativeForm::Plain));
                list()
            })
            .unwrap();
        let theirs = namespace()
            .enter(|| {
                run("nft", &["-f", "-"], &nft_text(&recording.plan));
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
                    commit(NativeChange::Write(&recording.plan, form));
                    let wanted = NativeState::wanted(&recording.plan, form);
                    assert_eq!(found(), wanted, "{} {form:?}", recording.name);
                    assert_ne!(found(), NativeState::wanted(&RulePlan::empty(), form));
                }
                commit(NativeChange::Remove);
                assert!(found().is_empty() && run("nft", &["list", "ruleset"], "").is_empty());
            })
            .unwrap();
    }
}
