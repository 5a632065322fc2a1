//! Where the rules in force differ from those wanted.

use crate::{
    change::{DifferenceKind as Kind, DifferingRule, RuleDifference},
    differences,
    netlink::{NativeDifference, NativeDifferenceKind as Native},
};
use alloc::{
    borrow::ToOwned,
    string::{String, ToString},
    vec::Vec,
};
use redirect_core::{json::VERSION, values::Family};
use serde::{Deserialize, Serialize};

/// Everything that is not as planned, in order: the counterpart of [`differences::Differences`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Differences {
    /// The version of the schema.
    pub version: u32,
    /// The differences; none where all is as planned.
    pub differences: Vec<Difference>,
}

/// One difference: the counterpart of [`differences::Difference`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Difference {
    /// The family; missing where both are concerned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub family: Option<Family>,
    /// The table: `nat` of iptables, or `istio-proxy-nat` of family inet. Missing where none is concerned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<String>,
    /// The chain; missing where none is concerned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chain: Option<String>,
    /// What is different.
    #[serde(flatten)]
    pub kind: DifferenceKind,
    /// The same in a sentence; its wording may change.
    pub text: String,
}

/// What is different. Rules are numbered from 1, those of other programs not counted. Rules of iptables' tables are written in the
/// words of iptables-save, others for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "difference", rename_all = "camelCase")]
#[non_exhaustive]
pub enum DifferenceKind {
    /// None of the native tables is there.
    NoNativeTables,
    /// The table is missing.
    MissingTable,
    /// The table should not be there.
    StrayTable,
    /// The table is dormant, or should be.
    Dormancy,
    /// The chain is missing.
    MissingChain,
    /// The chain should not be there.
    StrayChain,
    /// The chain hangs on another hook, or has another policy.
    Hook,
    /// A policy rule, route or address is missing.
    MissingRouting {
        /// The missing element.
        wanted: String,
    },
    /// A policy rule, route or address is there and does not do what the plan wants of it.
    BrokenRouting {
        /// What was found, with what is wrong with it.
        found: String,
    },
    /// A rule is not as planned.
    #[serde(untagged)]
    Rule(DifferingRule<String>),
}

impl From<&differences::Differences> for Differences {
    fn from(differences: &differences::Differences) -> Self {
        Self { version: VERSION, differences: differences.iter().map(Difference::from).collect() }
    }
}

impl From<&differences::Difference> for Difference {
    fn from(difference: &differences::Difference) -> Self {
        use differences::Difference as Of;
        let (family, table, chain, kind) = match difference {
            Of::Rule { family, difference: RuleDifference { table, chain, kind } } => {
                let kind = match kind {
                    Kind::MissingChain => DifferenceKind::MissingChain,
                    Kind::StrayChain => DifferenceKind::StrayChain,
                    Kind::Rule(rule) => DifferenceKind::Rule(rule.clone().map(|rule| rule.to_string())),
                };
                (Some(*family), Some(table.name()), Some(chain.name()), kind)
            }
            Of::NoNativeTables => (None, None, None, DifferenceKind::NoNativeTables),
            Of::Native(NativeDifference { table, chain, kind }) => {
                (None, Some(*table), chain.as_deref(), native(kind, chain.is_some()))
            }
            Of::MissingRouting(item) => {
                let kind = DifferenceKind::MissingRouting { wanted: item.to_string() };
                (item.family(), None, None, kind)
            }
            Of::BrokenRouting(found) => {
                let kind = DifferenceKind::BrokenRouting { found: found.to_string() };
                (found.item.family(), None, None, kind)
            }
        };
        Self {
            family,
            table: table.map(str::to_owned),
            chain: chain.map(str::to_owned),
            kind,
            text: difference.to_string(),
        }
    }
}

fn native(kind: &Native, in_a_chain: bool) -> DifferenceKind {
    match (kind, in_a_chain) {
        (Native::Missing, true) => DifferenceKind::MissingChain,
        (Native::Missing, false) => DifferenceKind::MissingTable,
        (Native::Stray, true) => DifferenceKind::StrayChain,
        (Native::Stray, false) => DifferenceKind::StrayTable,
        (Native::Dormancy, _) => DifferenceKind::Dormancy,
        (Native::Hook, _) => DifferenceKind::Hook,
        (Native::Rule(rule), _) => DifferenceKind::Rule(rule.clone()),
    }
}
