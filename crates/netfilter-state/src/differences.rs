//! What a namespace holds that is not as planned: all of it, in order.

use crate::{
    change::RuleDifference,
    netlink::{NativeDifference, NativeState},
    routing::{FoundRouting, RoutingItem},
    steps::{Observation, RulesIn},
};
use redirect_core::{plan::RulePlan, values::Family};
use std::fmt;

/// One thing that is not as planned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    /// A rule or chain of iptables' tables.
    Rule {
        /// Of this family.
        family: Family,
        /// What is different.
        difference: RuleDifference,
    },
    /// All native tables are missing.
    NoNativeTables,
    /// Something in a native table.
    Native(NativeDifference),
    /// A policy rule, route or address is missing.
    MissingRouting(RoutingItem),
    /// A policy rule, route or address is there and does not do what the plan wants of it.
    BrokenRouting(FoundRouting),
}

impl Difference {
    /// Whether it is about routing, and not about rules.
    #[must_use]
    pub const fn is_routing(&self) -> bool {
        match self {
            Self::MissingRouting(_) | Self::BrokenRouting(_) => true,
            Self::Rule { .. } | Self::NoNativeTables | Self::Native(_) => false,
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule { family, difference } => write!(f, "{family}: {difference}"),
            Self::NoNativeTables => f.write_str("the native tables inet istio-* are missing"),
            Self::Native(difference) => {
                write!(f, "the native tables inet istio-* hold other rules: {difference}")
            }
            Self::MissingRouting(item) => write!(f, "missing: {item}"),
            Self::BrokenRouting(found) => write!(f, "does not work: {found}"),
        }
    }
}

/// Everything that is not as planned, in order: rules table by table and chain by chain, native tables, routing.
///
/// Printed, it shows the first and the number of the others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Differences {
    pub(crate) all: Vec<Difference>,
}

impl Differences {
    /// What of `observed` is not as a plan wants it whose rules stand there. What else may hold rules of the mesh is not
    /// checked.
    #[must_use]
    pub fn between(observed: &Observation, plan: &RulePlan, rules_in: RulesIn) -> Self {
        let mut all = match rules_in {
            RulesIn::Iptables(variant) => {
                let of = |family: Family| {
                    let differences =
                        RuleDifference::all(observed.rules(variant).of(family), &plan.rules(family));
                    differences.into_iter().map(move |difference| Difference::Rule { family, difference })
                };
                Family::BOTH.into_iter().flat_map(of).collect()
            }
            RulesIn::Native(form) => {
                let wanted = NativeState::wanted(plan, form);
                if observed.native.is_empty() && !wanted.is_empty() {
                    vec![Difference::NoNativeTables]
                } else {
                    let differences = observed.native.differences_to(&wanted).into_iter();
                    differences.map(Difference::Native).collect()
                }
            }
        };
        let lacking = |item: RoutingItem| {
            let broken = observed.routing.iter().find(|found| found.item == item);
            broken.cloned().map_or(Difference::MissingRouting(item), Difference::BrokenRouting)
        };
        all.extend(RoutingItem::missing(plan, &observed.routing).into_iter().map(lacking));
        Self { all }
    }

    /// The first, if any.
    #[must_use]
    pub fn first(&self) -> Option<&Difference> {
        self.all.first()
    }

    /// All, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Difference> {
        self.all.iter()
    }

    /// Their number.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether all is as planned.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}

impl fmt::Display for Differences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(first) = self.first() else { return f.write_str("all is as planned") };
        first.fmt(f)?;
        match self.len().saturating_sub(1) {
            0 => Ok(()),
            1 => f.write_str(" (and 1 more difference)"),
            more => write!(f, " (and {more} more differences)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redirect_core::options::NativeForm;

    #[test]
    fn only_where_all_is_as_planned_there_is_nothing() {
        let plan = redirect_core::Redirect::sidecar(redirect_core::Families::V4).build().unwrap().plan();
        let of = |observed: &Observation| {
            Differences::between(observed, &plan, RulesIn::Native(NativeForm::Plain))
        };
        let nothing = of(&Observation::default());
        assert_eq!((nothing.is_empty(), nothing.len()), (false, 1));
        assert_eq!(format!("{nothing}"), "the native tables inet istio-* are missing");
        let native = NativeState::wanted(&plan, NativeForm::Plain);
        let all = of(&Observation { native, ..Observation::default() });
        assert_eq!((all.is_empty(), all.len(), all.first()), (true, 0, None));
        assert_eq!(format!("{all}"), "all is as planned");
    }
}
