//! Rules in force, or to be: tables of chains of rules, of one family.

use crate::rule::{Chain, Hook, Match, Rule, Table, Target};
use alloc::{collections::BTreeMap, string::String, vec::Vec};

/// A rule as found: one this library understands, or another's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Entry {
    /// Understood, in canonical form.
    Rule(Rule),
    /// Not understood; its text behind `-A CHAIN `.
    Foreign(String),
}

impl From<Rule> for Entry {
    fn from(rule: Rule) -> Self {
        Self::Rule(rule.canonical())
    }
}

/// The rules of one family, by table and chain. Chains without rules count: a declared chain is there.
///
/// Built-in chains without rules do not: they are always there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuleState {
    tables: BTreeMap<Table, BTreeMap<Chain, Vec<Entry>>>,
}

impl RuleState {
    /// No rule at all.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Declares a chain, empty unless it is there already.
    pub fn declare(&mut self, table: Table, chain: Chain) -> &mut Vec<Entry> {
        self.tables.entry(table).or_default().entry(chain).or_default()
    }

    /// The chains of a table, by name, each with its rules in order.
    pub fn chains(&self, table: Table) -> impl Iterator<Item = (&Chain, &[Entry])> {
        self.tables.get(&table).into_iter().flatten().map(|(chain, entries)| (chain, entries.as_slice()))
    }

    /// The rules of a chain; none where there is no such chain.
    #[must_use]
    pub fn rules(&self, table: Table, chain: &Chain) -> &[Entry] {
        self.tables.get(&table).and_then(|chains| chains.get(chain)).map_or(&[], Vec::as_slice)
    }

    /// Whether a chain is declared.
    #[must_use]
    pub fn has(&self, table: Table, chain: &Chain) -> bool {
        self.tables.get(&table).is_some_and(|chains| chains.contains_key(chain))
    }

    /// Whether there is no rule and no chain.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        Table::ALL
            .into_iter()
            .all(|table| self.chains(table).all(|(chain, rules)| is_built_in(chain) && rules.is_empty()))
    }

    /// Whether a table holds a chain of the mesh.
    #[must_use]
    pub fn has_mesh_chain(&self, table: Table) -> bool {
        self.chains(table).any(|(chain, _)| chain.is_the_meshs())
    }

    /// Whether any table holds a chain of the mesh.
    #[must_use]
    pub fn is_redirected(&self) -> bool {
        Table::ALL.into_iter().any(|table| self.has_mesh_chain(table))
    }

    /// The part of this state that is the mesh's: its chains, and its rules in built-in chains.
    #[must_use]
    pub fn the_meshs(&self) -> Self {
        let mut ours = Self::new();
        for table in Table::ALL {
            for (chain, entries) in self.chains(table) {
                let kept: Vec<Entry> =
                    entries.iter().filter(|entry| self.owns(table, chain, entry)).cloned().collect();
                if chain.is_the_meshs() || !kept.is_empty() {
                    *ours.declare(table, chain.clone()) = kept;
                }
            }
        }
        ours
    }

    /// Whether an entry of a chain is the mesh's.
    ///
    /// Every rule of a chain of the mesh is. In built-in chains, a jump to such a chain is; and, as long as the
    /// namespace has a chain of the mesh at all, so is a rule of one of the shapes a plan puts there.
    #[must_use]
    pub fn owns(&self, table: Table, chain: &Chain, entry: &Entry) -> bool {
        match (chain, entry) {
            (Chain::Ours(_), _) => true,
            (Chain::Other(_), _) => chain.is_the_meshs(),
            (Chain::Hook(_), Entry::Foreign(text)) => jumps_to_the_mesh(text),
            (Chain::Hook(hook), Entry::Rule(rule)) => {
                matches!(&rule.target, Target::Jump(to) if to.is_the_meshs())
                    || self.is_redirected() && has_planned_shape(table, *hook, rule)
            }
        }
    }
}

const fn is_built_in(chain: &Chain) -> bool {
    matches!(chain, Chain::Hook(_))
}

/// Whether a rule that is not understood jumps to a chain of the mesh.
fn jumps_to_the_mesh(text: &str) -> bool {
    let mut words = text.split_ascii_whitespace();
    while let Some(word) = words.next() {
        if word == "-j" || word == "-g" {
            return words.next().is_some_and(|target| Chain::named(target).is_the_meshs());
        }
    }
    false
}

/// Whether a rule that is no jump has a shape that a plan gives to rules in this built-in chain.
fn has_planned_shape(table: Table, hook: Hook, rule: &Rule) -> bool {
    let in_mangle = table == Table::Mangle;
    match (hook, rule.matches.as_slice(), &rule.target) {
        (Hook::Prerouting, [Match::InInterface(i)], Target::Return) => table != Table::Raw && !i.not,
        (Hook::Output, [Match::OutInterface(o)], Target::Return) => table != Table::Raw && !o.not,
        (Hook::Prerouting, [Match::Protocol(_), Match::Mark(m)], Target::SaveMark) => in_mangle && !m.not,
        (Hook::Prerouting, [Match::Protocol(_), Match::Mark(m)], Target::SetConnMark(set)) => {
            in_mangle && !m.not && crate::GUARD_MARK.beside(m.value) == Some(*set)
        }
        (Hook::Output, [Match::OutInterface(_), Match::Protocol(_), Match::Mark(m)], Target::Return) => {
            in_mangle && !m.not
        }
        (
            Hook::Output,
            [
                Match::Destination(d),
                Match::OutInterface(_),
                Match::Protocol(_),
                Match::OwnerUid(_) | Match::OwnerGid(_),
            ],
            Target::SetMark(mark),
        ) => in_mangle && d.not && *mark == crate::PROXY_MARK,
        (Hook::Output, [Match::Protocol(_), Match::ConnMark(m)], Target::RestoreMark) => in_mangle && !m.not,
        (Hook::Output, [Match::Protocol(_), Match::ConnMark(m)], Target::SetMark(set)) => {
            in_mangle && !m.not && crate::GUARD_MARK.beside(*set) == Some(m.value)
        }
        _ => false,
    }
}
