//! What a message of a transaction is about, to say which one the kernel refused.

use crate::expressions::{seen, wire::Attribute, xt::Extension};
use crate::state::Entry;
use redirect_core::{
    rule::{Chain, Table},
    values::Family,
};
use std::fmt;

/// A chain in a table of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainRef<'a> {
    /// The family.
    pub family: Family,
    /// The table.
    pub table: Table,
    /// The chain.
    pub chain: &'a Chain,
}

impl fmt::Display for ChainRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.family, crate::state::place(self.table, self.chain))
    }
}

/// What one message of a transaction is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MessagePart<'a> {
    /// A table is created.
    Table(&'a str),
    /// A chain is created.
    Chain(ChainRef<'a>),
    /// A chain is removed.
    RemovedChain(ChainRef<'a>),
    /// One rule or all rules of a chain are removed.
    RemovedRule(ChainRef<'a>),
    /// A rule is added.
    Rule(ChainRef<'a>, &'a Entry),
    /// A rule is added to a native table.
    NativeRule {
        /// The table.
        table: &'a str,
        /// The chain.
        chain: &'a str,
        /// What the rule does, as it goes over the wire.
        expressions: &'a [u8],
    },
    /// A part of a native table: what is done there, in words.
    Native(&'a str),
}

impl MessagePart<'_> {
    /// The xt matches and targets it needs, which the kernel may not have.
    #[must_use]
    pub fn extensions(&self) -> Vec<(Family, Extension)> {
        match self {
            Self::Rule(ChainRef { family, .. }, Entry::Rule(rule)) => {
                Extension::of_rule(rule).map(|extension| (*family, extension)).collect()
            }
            Self::Rule(..)
            | Self::Table(_)
            | Self::Chain(_)
            | Self::RemovedChain(_)
            | Self::RemovedRule(_)
            | Self::NativeRule { .. }
            | Self::Native(_) => Vec::new(),
        }
    }
}

impl fmt::Display for MessagePart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Table(name) => write!(f, "table {name}"),
            Self::Chain(place) => write!(f, "chain {place}"),
            Self::RemovedChain(place) => write!(f, "removal of chain {place}"),
            Self::RemovedRule(place) => write!(f, "removal of a rule of {place}"),
            Self::Rule(place, entry) => write!(f, "{place}: rule {entry}"),
            Self::NativeRule { table, chain, expressions } => {
                let words = seen::rule(Attribute(expressions).attributes());
                write!(f, "native {table} {chain}: rule {words}")
            }
            Self::Native(words) => f.write_str(words),
        }
    }
}
