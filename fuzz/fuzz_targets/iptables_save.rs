//! Any text as iptables-save output: never a panic; what can be read can be written and read again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use netfilter_state::{change::IptablesChange, state::IptablesTables};
use redirect_core::{Family, RulePlan};

fuzz_target!(|text: &str| {
    let Ok(state) = IptablesTables::saved(text) else { return };
    let cleanup = IptablesChange::between(&state, &RulePlan::empty().rules(Family::V4));
    assert_eq!(cleanup.is_empty(), state.of_mesh().is_empty());
    let ours = IptablesChange::back(&IptablesTables::new(), &state.of_mesh(), &IptablesChange::default())
        .restore_text();
    let again = IptablesTables::saved(&ours).expect("what was written can be read");
    assert_eq!(again, state.of_mesh());
});
