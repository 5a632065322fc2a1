//! What a difference means for traffic: the rule's purpose, and who asked for it.

use netfilter_state::change::{DifferenceKind, DifferingRule, RuleDifference};
use netfilter_state::differences::Difference;
use redirect_core::plan::PlannedRule;
use redirect_core::{Family, RulePlan};

/// The difference, and what it means.
#[must_use]
pub fn of(difference: &Difference, plan: &RulePlan) -> String {
    // The others say what they are for themselves.
    let planned = match difference {
        Difference::Rule { family, difference: rule } => concerned(rule, *family, plan),
        Difference::NoNativeTables
        | Difference::Native(_)
        | Difference::MissingRouting(_)
        | Difference::BrokenRouting(_) => None,
    };
    match planned {
        Some(planned) => format!("{difference}; it is there for this: {}", planned.reason()),
        None => difference.to_string(),
    }
}

/// The rule of the plan that is missing, or whose place another has taken.
fn concerned<'a>(rule: &RuleDifference, family: Family, plan: &'a RulePlan) -> Option<&'a PlannedRule> {
    let DifferenceKind::Rule(DifferingRule::Missing { number, .. } | DifferingRule::Other { number, .. }) =
        rule.kind
    else {
        return None;
    };
    let tables = plan.explained_rules(family);
    let chain = tables.get(&rule.table)?.get(&rule.chain)?;
    chain.get(number.checked_sub(1)?).copied()
}
