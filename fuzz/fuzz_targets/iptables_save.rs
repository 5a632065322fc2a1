//! Any text as iptables-save output: never a panic; what can be read can be written and read again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use netfilter_state::{change::IptablesChange, state::IptablesTables};
use redirect_core::{Family, RulePlan};
use redirect_core_fuzz::of_mesh::of_mesh;

fuzz_target!(|text: &str| {
    let Ok(state) = IptablesTables::saved(text) else { return };
    let cleanup = IptablesChange::between(&state, &RulePlan::empty().rules(Family::V4));
    let of_mesh = of_mesh(&state, &IptablesTables::new());
    assert_eq!(cleanup.is_empty(), of_mesh.is_empty());
    let ours =
        IptablesChange::back(&IptablesTables::new(), &of_mesh, &IptablesChange::default()).restore_text();
    let again = IptablesTables::saved(&ours).expect("what was written can be read");
    assert_eq!(again, of_mesh);
});
