//! Any text as iptables-save output: never a panic; what can be read can be written and read again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use netfilter_state::{change::RulesetDiff, parse::rule_state, state::RuleState};
use redirect_core::{Family, RulePlan};

fuzz_target!(|text: &str| {
    let Ok(state) = rule_state(text) else { return };
    let cleanup = RulesetDiff::between(&state, &RulePlan::empty().rules(Family::V4));
    assert_eq!(cleanup.is_empty(), state.of_mesh().is_empty());
    let ours = RulesetDiff::back(&RuleState::new(), &state.of_mesh(), &RulesetDiff::default()).restore_text();
    let again = rule_state(&ours).expect("what was written can be read");
    assert_eq!(again, state.of_mesh());
});
