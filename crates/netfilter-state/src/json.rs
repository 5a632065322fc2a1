//! Where the rules in force differ from those wanted.

use crate::{
    change::{self, RuleDifference},
    differences,
    netlink::{NativeDifference, NativeDifferenceKind as Native},
    routing::{FoundRouting, RoutingItem},
};
use alloc::{
    borrow::ToOwned,
    string::{String, ToString},
    vec::Vec,
};
use redirect_core::json::{Family, VERSION};
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
    /// A rule is missing.
    MissingRule {
        /// Its number.
        number: usize,
        /// The rule.
        wanted: String,
    },
    /// A rule should not be there.
    StrayRule {
        /// Its number.
        number: usize,
        /// The rule.
        found: String,
    },
    /// Another rule is in its place.
    OtherRule {
        /// Its number.
        number: usize,
        /// The rule wanted.
        wanted: String,
        /// The rule found.
        found: String,
    },
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
}

impl From<&differences::Differences> for Differences {
    fn from(differences: &differences::Differences) -> Self {
        Self { version: VERSION, differences: differences.iter().map(Difference::from).collect() }
    }
}

impl From<&differences::Difference> for Difference {
    fn from(difference: &differences::Difference) -> Self {
        use differences::Difference as Of;
        let text = difference.to_string();
        match difference {
            Of::Rule { family, difference: RuleDifference { table, chain, kind } } => Self {
                family: Some((*family).into()),
                table: Some(table.name().to_owned()),
                chain: Some(chain.name().to_owned()),
                kind: kind.into(),
                text,
            },
            Of::NoNativeTables => Self::of_no_chain(None, DifferenceKind::NoNativeTables, text),
            Of::Native(NativeDifference { table, chain, kind }) => Self {
                family: None,
                table: Some((*table).to_owned()),
                chain: chain.clone(),
                kind: native(kind, chain.is_some()),
                text,
            },
            Of::MissingRouting(item) => {
                let kind = DifferenceKind::MissingRouting { wanted: item.to_string() };
                Self::of_no_chain(family(*item), kind, text)
            }
            Of::BrokenRouting(found) => {
                let FoundRouting { item, .. } = found;
                let kind = DifferenceKind::BrokenRouting { found: found.to_string() };
                Self::of_no_chain(family(*item), kind, text)
            }
        }
    }
}

impl Difference {
    const fn of_no_chain(family: Option<Family>, kind: DifferenceKind, text: String) -> Self {
        Self { family, table: None, chain: None, kind, text }
    }
}

fn family(item: RoutingItem) -> Option<Family> {
    item.family().map(Family::from)
}

fn native(kind: &Native, in_a_chain: bool) -> DifferenceKind {
    match (kind, in_a_chain) {
        (Native::Missing, true) => DifferenceKind::MissingChain,
        (Native::Missing, false) => DifferenceKind::MissingTable,
        (Native::Stray, true) => DifferenceKind::StrayChain,
        (Native::Stray, false) => DifferenceKind::StrayTable,
        (Native::Dormancy, _) => DifferenceKind::Dormancy,
        (Native::Hook, _) => DifferenceKind::Hook,
        (Native::MissingRule { number, wanted }, _) => {
            DifferenceKind::MissingRule { number: *number, wanted: wanted.clone() }
        }
        (Native::StrayRule { number, found }, _) => {
            DifferenceKind::StrayRule { number: *number, found: found.clone() }
        }
        (Native::OtherRule { number, wanted, found }, _) => {
            DifferenceKind::OtherRule { number: *number, wanted: wanted.clone(), found: found.clone() }
        }
    }
}

impl From<&change::DifferenceKind> for DifferenceKind {
    fn from(kind: &change::DifferenceKind) -> Self {
        use change::DifferenceKind as Kind;
        match kind {
            Kind::MissingChain => Self::MissingChain,
            Kind::StrayChain => Self::StrayChain,
            Kind::MissingRule { number, wanted } => {
                Self::MissingRule { number: *number, wanted: wanted.to_string() }
            }
            Kind::StrayRule { number, found } => {
                Self::StrayRule { number: *number, found: found.to_string() }
            }
            Kind::OtherRule { number, wanted, found } => {
                Self::OtherRule { number: *number, wanted: wanted.to_string(), found: found.to_string() }
            }
        }
    }
}
