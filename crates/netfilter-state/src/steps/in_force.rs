//! What a namespace holds, for the tests of steps here and in `tests/steps.rs`.

use super::{FoundRouting, NativeState, Observation, PerFamily, RulePlan, RulesIn, Variant};

/// What a namespace holds when a plan is in force.
pub fn in_force(plan: &RulePlan, rules_in: RulesIn) -> Observation {
    let both = PerFamily::each(|family| (&plan.rules(family)).into());
    let nothing = Observation { routing: FoundRouting::all_working(plan), ..Observation::default() };
    match rules_in {
        RulesIn::Iptables(Variant::Nft) => Observation { nft: both, ..nothing },
        RulesIn::Iptables(Variant::Legacy) => Observation { legacy: both, ..nothing },
        RulesIn::Native(form) => Observation { native: NativeState::wanted(plan, form), ..nothing },
    }
}
