//! What a namespace holds that is not as planned: all of it, in order.

use crate::{
    change::RuleDifference,
    netlink::{NativeDifference, NativeState},
    plan::RulePlan,
    routing::{self, FoundRouting, RoutingItem},
    steps::{Observation, RulesIn},
    values::Family,
};
use alloc::{vec, vec::Vec};
use core::fmt;

/// How rules that were found line up with those wanted, from where both begin to differ.
///
/// Positions are numbered from 1, each side by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Aligned<T> {
    Missing { number: usize, wanted: T },
    Stray { number: usize, found: T },
    Other { number: usize, wanted: T, found: T },
}

/// How far ahead a rule is looked for that has moved.
const FARTHEST: usize = 1000;

/// Where two lists of rules differ. Where one list has rules that the other lacks, the first of them is reported against what
/// stands in its place, the rest as missing or stray.
pub(crate) fn align<T: Copy>(wanted: &[T], found: &[T], same: impl Fn(T, T) -> bool) -> Vec<Aligned<T>> {
    let (mut missing, mut stray) = (0, 0);
    let mut differing = Vec::new();
    loop {
        let (rest_wanted, rest_found) =
            (wanted.get(missing..).unwrap_or_default(), found.get(stray..).unwrap_or_default());
        let number = |index: usize| index.saturating_add(1);
        let (skip_wanted, skip_found) = match (rest_wanted, rest_found) {
            ([], []) => return differing,
            ([one, ..], [two, ..]) if same(*one, *two) => {
                missing = number(missing);
                stray = number(stray);
                continue;
            }
            ([one, ..], [two, ..]) => {
                differing.push(Aligned::Other { number: number(missing), wanted: *one, found: *two });
                let ahead = |list: &[T], of: &dyn Fn(T) -> bool| {
                    list.iter().take(FARTHEST).position(|candidate| of(*candidate))
                };
                match (
                    ahead(rest_wanted, &|candidate| same(candidate, *two)),
                    ahead(rest_found, &|candidate| same(*one, candidate)),
                ) {
                    (Some(wanted), None) => (wanted, 0),
                    (None, Some(found)) => (0, found),
                    (Some(wanted), Some(found)) if wanted <= found => (wanted, 0),
                    (Some(_), Some(found)) => (0, found),
                    (None, None) => (1, 1),
                }
            }
            ([..], []) => (rest_wanted.len(), 0),
            ([], [..]) => (0, rest_found.len()),
        };
        // One of each is reported already where both lists go on.
        let told = usize::from(!rest_wanted.is_empty() && !rest_found.is_empty());
        let numbered = |start: usize| number(start.saturating_add(told))..;
        let lacking = rest_wanted.iter().take(skip_wanted).skip(told);
        differing.extend(
            numbered(missing)
                .zip(lacking)
                .map(|(number, wanted)| Aligned::Missing { number, wanted: *wanted }),
        );
        let extra = rest_found.iter().take(skip_found).skip(told);
        differing.extend(
            numbered(stray).zip(extra).map(|(number, found)| Aligned::Stray { number, found: *found }),
        );
        missing = missing.saturating_add(skip_wanted);
        stray = stray.saturating_add(skip_found);
    }
}

/// One thing that is not as planned.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
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

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule { family, difference } => write!(f, "{family}: {difference}"),
            Self::NoNativeTables => f.write_str("the native tables inet istio-proxy-* are missing"),
            Self::Native(difference) => {
                write!(f, "the native tables inet istio-proxy-* hold other rules: {difference}")
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
    all: Vec<Difference>,
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
        all.extend(routing::missing(plan, &observed.routing).into_iter().map(lacking));
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
    use crate::netlink::NativeForm;

    fn report(wanted: &str, found: &str) -> Vec<alloc::string::String> {
        let letters = |text: &str| text.chars().collect::<Vec<char>>();
        let differing = align(&letters(wanted), &letters(found), |one, two| one == two);
        let words = differing.into_iter().map(|one| match one {
            Aligned::Missing { number, wanted } => alloc::format!("{number}-{wanted}"),
            Aligned::Stray { number, found } => alloc::format!("{number}+{found}"),
            Aligned::Other { number, wanted, found } => alloc::format!("{number}{wanted}/{found}"),
        });
        words.collect()
    }

    #[test]
    fn only_where_all_is_as_planned_there_is_nothing() {
        let plan = crate::Redirect::sidecar(crate::Families::V4).build().unwrap().plan();
        let of = |observed: &Observation| {
            Differences::between(observed, &plan, RulesIn::Native(NativeForm::Plain))
        };
        let nothing = of(&Observation::default());
        assert_eq!((nothing.is_empty(), nothing.len()), (false, 1));
        assert_eq!(alloc::format!("{nothing}"), "the native tables inet istio-proxy-* are missing");
        let native = NativeState::wanted(&plan, NativeForm::Plain);
        let all = of(&Observation { native, ..Observation::default() });
        assert_eq!((all.is_empty(), all.len(), all.first()), (true, 0, None));
        assert_eq!(alloc::format!("{all}"), "all is as planned");
    }

    #[test]
    fn every_rule_that_differs_is_told_once() {
        for (wanted, found, all) in [
            ("", "", &[][..]),
            ("abc", "abc", &[]),
            ("abc", "", &["1-a", "2-b", "3-c"]),
            ("", "ab", &["1+a", "2+b"]),
            ("abc", "ab", &["3-c"]),
            ("ab", "abc", &["3+c"]),
            // One that lacks is reported against what stands in its place.
            ("abc", "ac", &["2b/c"]),
            ("abcd", "ad", &["2b/d", "3-c"]),
            ("ac", "abc", &["2c/b"]),
            ("ad", "abcd", &["2d/b", "3+c"]),
            ("abc", "axc", &["2b/x"]),
            ("abc", "xbz", &["1a/x", "3c/z"]),
            ("abcdef", "bcxef", &["1a/b", "4d/x"]),
            // Of two that have moved, the one that is nearer where it belongs is met again.
            ("ab", "ba", &["1a/b", "2+a"]),
            ("cabd", "abcd", &["1c/a", "4d/c"]),
            ("abcd", "cabd", &["1a/c", "3c/d"]),
        ] {
            assert_eq!(report(wanted, found), all, "{wanted} {found}");
        }
    }
}
