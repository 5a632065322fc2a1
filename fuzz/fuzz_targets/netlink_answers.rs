//! Any bytes as the kernel's answer: never a panic; what was seen can be asked to be cleaned up; and native tables can be put back as
//! they were seen, which is what undoing does.

#![no_main]

use libfuzzer_sys::fuzz_target;
use netfilter_state::{
    change::IptablesChange,
    netlink::{Batch, Messages, NativeState, Observed},
    ruleset::{HookList, HookedRules},
};
use packet_trace::interference::PodTraffic;
use redirect_core::{Family, RulePlan};
use redirect_core_fuzz::kernel::dumped;

fuzz_target!(|bytes: &[u8]| {
    let (mut observed, mut native) = (Observed::at(1), NativeState::default());
    let (mut ruleset, mut hooks) = (HookedRules::default(), HookList::default());
    for message in Messages::new(bytes) {
        let _ = message.answer();
        observed.take(&message);
        native.take(&message);
        ruleset.take(&message);
        hooks.take(&message);
    }
    ruleset.hooks = Some(hooks);
    let _ = native.sets();
    put_back(&native);
    let _ = PodTraffic::default().judge(&ruleset, &RulePlan::empty());
    let cleanup = Family::BOTH.map(|family| {
        (family, IptablesChange::between(observed.state(family), &RulePlan::empty().rules(family)))
    });
    let mut batch = Batch::new(&observed);
    for (family, change) in &cleanup {
        // Chains that are not iptables' are refused, and that is all that may be.
        let _ = batch.change(*family, change);
    }
    let _ = batch.finish();
});

/// What is made of a state is that state.
fn put_back(native: &NativeState) {
    let nothing = Observed::at(1);
    let mut batch = Batch::new(&nothing);
    batch.native_change(nothing.native(), native);
    let Ok(finished) = batch.finish() else { return };
    let dump = dumped(finished.bytes());
    let mut again = NativeState::default();
    Messages::new(&dump).for_each(|message| again.take(&message));
    assert_eq!(&again, native);
}
