//! Where native tables are not as wanted.

use super::native_state::{NativeChain, NativeRule, NativeState, NativeTable};
use crate::align::{DifferingRule, align};
use crate::expressions::{seen, wire::Attribute};
use redirect_core::plan::DataPlane;
use std::fmt;

/// A place where the native tables are not those wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct NativeDifference {
    /// The table, of family inet.
    pub table: &'static str,
    /// The chain, where it is about one.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub chain: Option<String>,
    /// What is different there.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub kind: NativeDifferenceKind,
}

/// What is different. Rules are described in words.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "difference", rename_all = "camelCase"))]
#[non_exhaustive]
pub enum NativeDifferenceKind {
    /// The table is missing.
    MissingTable,
    /// The table should not be there.
    StrayTable,
    /// The chain is missing.
    MissingChain,
    /// The chain should not be there.
    StrayChain,
    /// The table is dormant, or should be.
    Dormancy,
    /// The chain hangs on another hook, or has another policy.
    Hook,
    /// A rule of the chain is not as wanted.
    #[cfg_attr(feature = "serde", serde(untagged))]
    Rule(DifferingRule<String>),
}

impl NativeState {
    /// What is not as `wanted`, in order.
    #[must_use]
    pub fn differences_to(&self, wanted: &Self) -> Vec<NativeDifference> {
        let in_table = |table: &'static str| match (self.tables.get(table), wanted.tables.get(table)) {
            (Some(found), Some(wanted)) => Tables { table, found, wanted }.differences(),
            (None, Some(_)) => [whole(table, None, NativeDifferenceKind::MissingTable)].into(),
            (Some(_), None) => [whole(table, None, NativeDifferenceKind::StrayTable)].into(),
            (None, None) => Vec::new(),
        };
        DataPlane::NFT_TABLES.into_iter().flat_map(in_table).collect()
    }
}

fn whole(table: &'static str, chain: Option<&str>, kind: NativeDifferenceKind) -> NativeDifference {
    NativeDifference { table, chain: chain.map(String::from), kind }
}

/// One table, as it is and as it should be.
struct Tables<'a> {
    table: &'static str,
    found: &'a NativeTable,
    wanted: &'a NativeTable,
}

impl Tables<'_> {
    fn differences(&self) -> Vec<NativeDifference> {
        let mut all = Vec::new();
        if self.found.is_dormant() != self.wanted.is_dormant() {
            all.push(whole(self.table, None, NativeDifferenceKind::Dormancy));
        }
        for (name, wanted) in &self.wanted.chains {
            match self.found.chains.get(name) {
                Some(found) => all.extend(self.in_chain(name, found, wanted)),
                None => all.push(whole(self.table, Some(name), NativeDifferenceKind::MissingChain)),
            }
        }
        let stray = self.found.chains.keys().filter(|name| !self.wanted.chains.contains_key(*name));
        all.extend(stray.map(|name| whole(self.table, Some(name), NativeDifferenceKind::StrayChain)));
        all
    }

    fn in_chain(&self, name: &str, found: &NativeChain, wanted: &NativeChain) -> Vec<NativeDifference> {
        let hook = (found.hook != wanted.hook).then_some(NativeDifferenceKind::Hook);
        let (of_wanted, of_found): (Vec<&NativeRule>, Vec<&NativeRule>) =
            (wanted.rules.iter().collect(), found.rules.iter().collect());
        let same = |wanted: &NativeRule, found: &NativeRule| self.found.same_rule(found, self.wanted, wanted);
        let words = |rule: &NativeRule| seen::rule(Attribute(&rule.expressions).attributes()).to_string();
        let rules = align(&of_wanted, &of_found, same).into_iter();
        let rules = rules.map(|rule| NativeDifferenceKind::Rule(rule.map(words)));
        hook.into_iter().chain(rules).map(|kind| whole(self.table, Some(name), kind)).collect()
    }
}

impl fmt::Display for NativeDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match &self.chain {
            Some(chain) => format!("inet {} chain {chain}", self.table),
            None => format!("table inet {}", self.table),
        };
        match &self.kind {
            NativeDifferenceKind::MissingTable | NativeDifferenceKind::MissingChain => {
                write!(f, "{place} is missing")
            }
            NativeDifferenceKind::StrayTable | NativeDifferenceKind::StrayChain => {
                write!(f, "{place} should not be there")
            }
            NativeDifferenceKind::Dormancy => {
                write!(f, "{place} is dormant, so the kernel ignores its rules")
            }
            NativeDifferenceKind::Hook => write!(f, "{place} has a different hook or policy"),
            NativeDifferenceKind::Rule(rule) => write!(f, "{place}: {rule}"),
        }
    }
}
