//! Where what is in force is not what is wanted.

use super::VERSION;
use crate::{change, render::rule_text, state::Entry};
use alloc::{
    borrow::ToOwned,
    string::{String, ToString},
    vec::Vec,
};
use serde::{Deserialize, Serialize};

/// Differences between what is in force and what is wanted, in order; none where it is as wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Differences {
    /// The version of the schema.
    pub version: u32,
    /// The differences.
    pub differences: Vec<Difference>,
}

/// One difference: the counterpart of [`change::Difference`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Difference {
    /// The table, by its name in iptables.
    pub table: String,
    /// The chain, by its name in iptables.
    pub chain: String,
    /// What is different.
    #[serde(flatten)]
    pub kind: DifferenceKind,
    /// The same in a sentence; its wording may change.
    pub text: String,
}

/// What is different in a chain. Rules are numbered from 1, those of others not counted, and written in the words of
/// iptables-save.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "difference", rename_all = "camelCase")]
#[non_exhaustive]
pub enum DifferenceKind {
    /// The chain is missing.
    MissingChain,
    /// The chain should not be there.
    StrayChain,
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
    /// There is another rule in its place.
    OtherRule {
        /// Its number.
        number: usize,
        /// The rule wanted.
        wanted: String,
        /// The rule found.
        found: String,
    },
}

impl Differences {
    /// The document for these differences.
    pub fn new<'a>(differences: impl IntoIterator<Item = &'a change::Difference>) -> Self {
        Self { version: VERSION, differences: differences.into_iter().map(Difference::from).collect() }
    }
}

impl From<&change::Difference> for Difference {
    fn from(difference: &change::Difference) -> Self {
        use change::DifferenceKind as Kind;
        let kind = match &difference.kind {
            Kind::MissingChain => DifferenceKind::MissingChain,
            Kind::StrayChain => DifferenceKind::StrayChain,
            Kind::MissingRule { number, wanted } => {
                DifferenceKind::MissingRule { number: *number, wanted: text(wanted) }
            }
            Kind::StrayRule { number, found } => {
                DifferenceKind::StrayRule { number: *number, found: text(found) }
            }
            Kind::OtherRule { number, wanted, found } => {
                DifferenceKind::OtherRule { number: *number, wanted: text(wanted), found: text(found) }
            }
        };
        Self {
            table: difference.table.name().to_owned(),
            chain: difference.chain.name().to_owned(),
            kind,
            text: difference.to_string(),
        }
    }
}

fn text(entry: &Entry) -> String {
    match entry {
        Entry::Rule(rule) => rule_text(rule),
        Entry::Foreign(text) => text.clone(),
    }
}
