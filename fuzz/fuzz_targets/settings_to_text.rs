//! Any settings: either errors, or a plan whose text reads back as the plan.
//!
//! The input is lines: a letter that chooses a setting, then its value.

#![no_main]

use libfuzzer_sys::fuzz_target;
use redirect_core::{
    Family, Redirect,
    change::{Change, RuleDifference},
    parse::rule_state,
    render,
    settings::{NamespaceFacts, RawSettings, SETTINGS, Source},
    state::RuleState,
};

fuzz_target!(|text: &str| {
    let mut lines = text.lines();
    let pod = lines.next().is_some_and(|line| line.starts_with('p'));
    let mut raw = if pod { RawSettings::for_pod() } else { RawSettings::new() };
    for line in lines {
        let mut letters = line.chars();
        let Some(choice) = letters.next() else { continue };
        let Some(setting) = SETTINGS.get(choice as usize % SETTINGS.len()) else { continue };
        let source = if pod { Source::Annotation("a") } else { Source::Flag("f") };
        raw.set(setting.key, letters.as_str().to_owned(), source);
    }
    let addresses = ["10.1.0.2".parse().expect("an address"), "fd00::2".parse().expect("an address")];
    let facts = NamespaceFacts::new(&addresses).with_nameservers(&addresses);
    match Redirect::parse(&raw, &facts) {
        Err(errors) => assert!(!errors.to_string().contains('\n'), "an error is one line"),
        Ok(redirect) => check(&redirect),
    }
});

fn check(redirect: &Redirect) {
    let plan = redirect.plan();
    let _ = (render::explain(&plan), render::nft_text(&plan));
    for family in Family::BOTH {
        let rules = plan.rules(family);
        let read = rule_state(&render::restore_text(&rules)).expect("a rendered plan can be read");
        assert_eq!(&read, rules.state());
        assert_eq!(RuleDifference::first(&read, &rules), None);
        assert!(Change::between(&read, &rules).is_empty());
        assert_eq!(Change::between(&RuleState::new(), &rules).is_empty(), rules.state().is_empty());
    }
}
