//! What a kernel answered, read again without one: `tests/dumps` holds dumps as Linux 6.18 gives them. That a kernel answers so today is what
//! `netns-apply/tests/dumps.rs` looks at.

pub(crate) mod dumps;

use super::{Batch, Messages, NativeForm, NativeState, Observed, abi::kind, ruleset::tests::packets};
use crate::{
    Family, Redirect, RulePlan,
    interference::{add_saved, ruleset::Ruleset},
    render,
    routing::{self, FoundRouting},
    settings::{Key, NamespaceFacts, RawSettings, Source},
    trace::{Detail, Rules},
};
use std::{fs, string::String, vec::Vec};

fn dump(name: &str) -> Vec<u8> {
    let file = dumps::file(&std::format!("{name}.dump"));
    fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

fn observed(dump: &[u8]) -> Observed {
    let mut observed = Observed::at(1);
    Messages::new(dump).for_each(|message| observed.take(&message));
    observed
}

fn text(name: &str) -> String {
    fs::read_to_string(dumps::file(name)).unwrap()
}

fn assert_same(seen: &str, wanted: &str) {
    let differing: Vec<_> =
        seen.lines().zip(wanted.lines()).filter(|(seen, wanted)| seen != wanted).collect();
    assert!(differing.is_empty() && seen.lines().count() == wanted.lines().count(), "{differing:#?}");
}

#[test]
fn of_rules_of_others_is_seen_what_they_say() {
    assert_same(&dumps::seen(&dumps::dumped(&dump(dumps::OF_OTHERS))), &text(dumps::SEEN));
}

#[test]
fn of_rules_that_iptables_legacy_saves_is_seen_what_they_say() {
    assert_same(&dumps::seen(&dumps::read_saved(dumps::OF_OTHERS)), &text(dumps::SEEN_OF_SAVED));
}

#[test]
fn what_iptables_made_of_a_plan_is_read_as_that_plan() {
    for (name, plan) in dumps::plans() {
        let observed = observed(&dump(&dumps::of_iptables(name)));
        assert_eq!(observed.obstacles().count(), 0, "{name}");
        for family in Family::BOTH {
            assert_eq!(observed.state(family), plan.rules(family).state(), "{name} {family}");
        }
    }
}

#[test]
fn a_native_table_is_read_as_the_plan_it_was_made_of() {
    for (name, plan) in dumps::plans() {
        for form in [NativeForm::Plain, NativeForm::Sets] {
            let name = dumps::of_native(name, form);
            assert_eq!(observed(&dump(&name)).native(), &NativeState::wanted(&plan, form), "{name}");
        }
    }
}

/// What the native tables are after a change, as far as that needs no kernel.
fn changed(now: &Observed, to: &NativeState) -> (Vec<u8>, Observed) {
    let mut batch = Batch::new(now);
    batch.native_change(now.native(), to);
    let sent = batch.finish().unwrap().bytes().to_vec();
    let after = observed(&sent);
    (sent, after)
}

#[test]
fn native_tables_that_somebody_extended_are_put_back_as_they_were() {
    let found = observed(&dump(dumps::EXTENDED));
    let (_, again) = changed(&Observed::at(1), found.native());
    assert_eq!(again.native(), found.native());
    let (nothing_to_do, _) = changed(&found, found.native());
    assert!(
        Messages::new(&nothing_to_do)
            .all(|message| matches!(message.kind, kind::BATCH_BEGIN | kind::BATCH_END))
    );
}

#[test]
fn nft_is_told_what_it_understood() {
    for (name, plan) in dumps::plans() {
        assert_same(&render::nft_text(&plan), &text(&dumps::script(name)));
    }
}

/// A plan in force, as every backend leaves it.
fn in_force(name: &str) -> [(&'static str, Ruleset); 4] {
    let dumped = |name: String| dumps::dumped(&dump(&name));
    [
        ("iptables-nft", dumped(dumps::of_iptables(name))),
        ("iptables-legacy", dumps::read_saved(name)),
        ("native", dumped(dumps::of_native(name, NativeForm::Plain))),
        ("native with sets", dumped(dumps::of_native(name, NativeForm::Sets))),
    ]
}

#[test]
fn nothing_of_a_plan_is_seen_that_is_not_understood() {
    for (name, _) in dumps::plans() {
        for (backend, ruleset) in in_force(name) {
            let seen = dumps::seen(&ruleset);
            let rules = seen.lines().filter(|line| line.starts_with('\t'));
            let strange: Vec<_> = rules.clone().filter(|rule| rule.contains('[')).collect();
            assert!(strange.is_empty() && rules.count() > 30, "{name} {backend} {strange:#?}");
        }
    }
}

#[test]
fn a_packet_is_traced_through_a_plan_in_force_as_through_the_plan() {
    for (name, plan) in dumps::plans() {
        let routing: Vec<_> = routing::wanted(&plan).into_iter().map(FoundRouting::working).collect();
        for ((backend, ruleset), family) in
            in_force(name).iter().flat_map(|one| Family::BOTH.map(|family| (one, family)))
        {
            let planned = Rules::of_plan(&plan, family);
            let live = Rules::of_ruleset(ruleset, &routing, family, Some(&plan));
            // Enough to meet every rule; all of them are traced elsewhere.
            for packet in packets().iter().filter(|packet| packet.family() == family).step_by(11) {
                let (wanted, trace) = (planned.trace(packet), live.trace(packet));
                let text = || [&trace, &wanted].map(|trace| trace.text(Detail::Every)).concat();
                assert_eq!(trace.may, wanted.may, "{name} {backend}\n{}", text());
            }
        }
    }
}
