//! Any text as iptables-save output: never a panic; what can be read can be written and read again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use netfilter_state::{
    change::RulesetDiff,
    parse::{add_saved, rule_state},
    ruleset::Ruleset,
    state::RuleState,
};
use redirect_core::{Family, RulePlan};

fuzz_target!(|text: &str| {
    for family in Family::BOTH {
        let _ = add_saved(&mut Ruleset::default(), family, text);
    }
    let Ok(state) = rule_state(text) else { return };
    let cleanup = RulesetDiff::between(&state, &RulePlan::empty().rules(Family::V4));
    assert_eq!(cleanup.is_empty(), state.of_mesh().is_empty());
    let ours = RulesetDiff::back(&RuleState::new(), &state.of_mesh(), &RulesetDiff::default()).restore_text();
    let again = rule_state(&ours).expect("what was written can be read");
    assert_eq!(again, state.of_mesh());
});
