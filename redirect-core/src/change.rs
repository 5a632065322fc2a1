//! From the rules in force to the rules wanted: the steps, and the differences.

use crate::{
    plan::FamilyRules,
    render,
    rule::{Chain, Hook, Table},
    state::{Entry, RuleState},
};
use alloc::{string::String, vec::Vec};
use core::fmt;

/// One step within a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Create the chain; empty it if it is there.
    DeclareEmpty(Chain),
    /// Add a rule behind the last one.
    Append(Chain, Entry),
    /// Add a rule before the one with this number, counted from 1.
    Insert(Chain, usize, Entry),
    /// Remove the first rule that reads so.
    Delete(Chain, Entry),
    /// Empty a chain.
    Flush(Chain),
    /// Remove an empty chain that nothing jumps to.
    RemoveChain(Chain),
}

/// The steps within one table; they come into force together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableChange {
    /// The table.
    pub table: Table,
    /// The steps, in order.
    pub steps: Vec<Step>,
}

/// What turns the rules in force into those wanted. Tables that are as wanted do not appear.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    /// The tables to change, in the order in which to change them.
    pub tables: Vec<TableChange>,
}

impl Change {
    /// The change from what is in force to what is wanted. Rules of others stay where they are.
    #[must_use]
    pub fn between(observed: &RuleState, wanted: &FamilyRules) -> Self {
        Self::tables(observed, wanted, |table| Difference::find_in(table, observed, wanted).is_some())
    }

    /// The change that writes what is wanted anew even where it is in force.
    #[must_use]
    pub fn rewriting(observed: &RuleState, wanted: &FamilyRules) -> Self {
        Self::tables(observed, wanted, |table| {
            observed.has_mesh_chain(table) || wanted.state().has_mesh_chain(table)
        })
    }

    /// The change that brings back exactly `before`, where `done` has changed it into `now`.
    ///
    /// Rules of the mesh go back to the very numbers they had among those of others. Rules that `done` added or removed
    /// count as the mesh's, whatever they look like.
    #[must_use]
    pub fn back(now: &RuleState, before: &RuleState, done: &Self) -> Self {
        let ours = |state: &RuleState, table, chain: &Chain, entry: &Entry| {
            state.owns(table, chain, entry) || done.names(table, chain, entry)
        };
        let differs = |table| {
            let chains = |state: &RuleState| -> Vec<(Chain, Vec<Entry>)> {
                let all = state.chains(table).map(|(chain, entries)| {
                    let kept = entries.iter().filter(|entry| ours(state, table, chain, entry));
                    (chain.clone(), kept.cloned().collect::<Vec<Entry>>())
                });
                all.filter(|(chain, kept)| chain.is_the_meshs() || !kept.is_empty()).collect()
            };
            chains(now) != chains(before)
        };
        let add = |table, steps: &mut Vec<Step>| {
            for (chain, entries) in before.chains(table) {
                match chain {
                    Chain::Hook(_) => {
                        let numbered = (1_usize..).zip(entries);
                        let back = numbered.filter(|(_, entry)| ours(before, table, chain, entry));
                        steps.extend(
                            back.map(|(number, entry)| Step::Insert(chain.clone(), number, entry.clone())),
                        );
                    }
                    Chain::Ours(_) | Chain::Other(_) if chain.is_the_meshs() => {
                        steps.extend(entries.iter().map(|entry| Step::Append(chain.clone(), entry.clone())));
                    }
                    Chain::Ours(_) | Chain::Other(_) => {}
                }
            }
        };
        let tables = Table::ALL.iter().copied().filter(|table| differs(*table));
        Self { tables: tables.map(|table| replace(table, now, before, &ours, add)).collect() }
    }

    /// Whether a step adds or removes this rule of a built-in chain.
    fn names(&self, table: Table, chain: &Chain, entry: &Entry) -> bool {
        let mut steps =
            self.tables.iter().filter(|change| change.table == table).flat_map(|change| &change.steps);
        steps.any(|step| match step {
            Step::Append(of, one) | Step::Insert(of, _, one) | Step::Delete(of, one) => {
                of == chain && one == entry
            }
            Step::DeclareEmpty(_) | Step::Flush(_) | Step::RemoveChain(_) => false,
        })
    }

    /// Whether there is nothing to do.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    fn tables(observed: &RuleState, wanted: &FamilyRules, changes: impl Fn(Table) -> bool) -> Self {
        let add = |table, steps: &mut Vec<Step>| add_wanted(table, wanted, steps);
        let mut tables = Table::ALL;
        if captures_inbound(Table::Nat, wanted.state()) {
            // The table that takes over inbound capture goes first, so that there is no moment without it.
            tables = &[Table::Raw, Table::Nat, Table::Mangle];
        }
        let changed = tables.iter().copied().filter(|table| changes(*table));
        let to = wanted.state();
        let ours = |state: &RuleState, table, chain: &Chain, entry: &Entry| {
            state.owns_beside(to, table, chain, entry)
        };
        Self { tables: changed.map(|table| replace(table, observed, to, &ours, add)).collect() }
    }
}

fn captures_inbound(table: Table, state: &RuleState) -> bool {
    !state.rules(table, &Chain::Hook(Hook::Prerouting)).is_empty()
}

/// The steps that take away the mesh's rules of `from` and let `add` put those of `to` in their place.
fn replace(
    table: Table,
    from: &RuleState,
    to: &RuleState,
    ours: &impl Fn(&RuleState, Table, &Chain, &Entry) -> bool,
    add: impl Fn(Table, &mut Vec<Step>),
) -> TableChange {
    let mut steps = Vec::new();
    let mesh_chains = |state: &RuleState| -> Vec<Chain> {
        state.chains(table).map(|(chain, _)| chain.clone()).filter(Chain::is_the_meshs).collect()
    };
    let wanted = mesh_chains(to);
    steps.extend(wanted.iter().cloned().map(Step::DeclareEmpty));
    for (chain, entries) in from.chains(table).filter(|(chain, _)| !chain.is_the_meshs()) {
        let going = entries.iter().filter(|entry| ours(from, table, chain, entry));
        steps.extend(going.map(|entry| Step::Delete(chain.clone(), entry.clone())));
    }
    let stale: Vec<Chain> = mesh_chains(from).into_iter().filter(|chain| !wanted.contains(chain)).collect();
    steps.extend(stale.iter().cloned().map(Step::Flush));
    steps.extend(stale.into_iter().map(Step::RemoveChain));
    add(table, &mut steps);
    TableChange { table, steps }
}

fn add_wanted(table: Table, wanted: &FamilyRules, steps: &mut Vec<Step>) {
    for (chain, entries) in wanted.state().chains(table) {
        let leading = match chain {
            Chain::Hook(hook) => wanted.leading(table, *hook),
            Chain::Ours(_) | Chain::Other(_) => 0,
        };
        let (first, last) = entries.split_at_checked(leading).unwrap_or((entries, &[]));
        let numbered = (1_usize..).zip(first);
        steps.extend(numbered.map(|(number, entry)| Step::Insert(chain.clone(), number, entry.clone())));
        steps.extend(last.iter().map(|entry| Step::Append(chain.clone(), entry.clone())));
    }
}

/// The first place where the rules in force are not those wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The table.
    pub table: Table,
    /// The chain.
    pub chain: Chain,
    /// What is different there.
    pub kind: DifferenceKind,
}

/// What is different in a chain. Rules are numbered from 1, those of others not counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DifferenceKind {
    /// The chain is missing.
    MissingChain,
    /// The chain should not be there.
    StrayChain,
    /// This rule is missing.
    MissingRule {
        /// Its number.
        number: usize,
        /// The rule.
        wanted: Entry,
    },
    /// This rule should not be there.
    StrayRule {
        /// Its number.
        number: usize,
        /// The rule.
        found: Entry,
    },
    /// There is another rule in its place.
    OtherRule {
        /// Its number.
        number: usize,
        /// The rule wanted.
        wanted: Entry,
        /// The rule found.
        found: Entry,
    },
}

impl Difference {
    /// The first difference between the rules in force and those wanted, comparing in order; rules of others are
    /// passed over.
    #[must_use]
    pub fn find(observed: &RuleState, wanted: &FamilyRules) -> Option<Self> {
        Table::ALL.iter().copied().find_map(|table| Self::find_in(table, observed, wanted))
    }

    fn find_in(table: Table, observed: &RuleState, wanted: &FamilyRules) -> Option<Self> {
        let wanted = wanted.state();
        for (chain, entries) in wanted.chains(table) {
            let found = observed
                .rules(table, chain)
                .iter()
                .filter(|entry| observed.owns_beside(wanted, table, chain, entry));
            let kind = if chain.is_the_meshs() && !observed.has(table, chain) {
                Some(DifferenceKind::MissingChain)
            } else {
                first_difference(entries.iter(), found)
            };
            if let Some(kind) = kind {
                return Some(Self { table, chain: chain.clone(), kind });
            }
        }
        let unplanned = observed.chains(table).filter(|(chain, _)| !wanted.has(table, chain));
        for (chain, entries) in unplanned {
            let found = entries.iter().filter(|entry| observed.owns_beside(wanted, table, chain, entry));
            let kind = if chain.is_the_meshs() {
                Some(DifferenceKind::StrayChain)
            } else {
                first_difference([].iter(), found)
            };
            if let Some(kind) = kind {
                return Some(Self { table, chain: chain.clone(), kind });
            }
        }
        None
    }
}

fn first_difference<'a>(
    mut wanted: impl Iterator<Item = &'a Entry>,
    mut found: impl Iterator<Item = &'a Entry>,
) -> Option<DifferenceKind> {
    for number in 1_usize.. {
        match (wanted.next().cloned(), found.next().cloned()) {
            (None, None) => return None,
            (Some(wanted), Some(found)) if wanted == found => {}
            (Some(wanted), Some(found)) => return Some(DifferenceKind::OtherRule { number, wanted, found }),
            (Some(wanted), None) => return Some(DifferenceKind::MissingRule { number, wanted }),
            (None, Some(found)) => return Some(DifferenceKind::StrayRule { number, found }),
        }
    }
    None
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = render::place(self.table, &self.chain);
        match &self.kind {
            DifferenceKind::MissingChain => write!(f, "chain {place} is missing"),
            DifferenceKind::StrayChain => write!(f, "chain {place} should not be there"),
            DifferenceKind::MissingRule { number, wanted } => {
                write!(f, "{place}: rule {number} is missing: {}", text(wanted))
            }
            DifferenceKind::StrayRule { number, found } => {
                write!(f, "{place}: rule {number} should not be there: {}", text(found))
            }
            DifferenceKind::OtherRule { number, wanted, found } => {
                write!(f, "{place}: rule {number} is {}, not {}", text(found), text(wanted))
            }
        }
    }
}

fn text(entry: &Entry) -> String {
    match entry {
        Entry::Rule(rule) => render::rule_text(rule),
        Entry::Foreign(text) => text.clone(),
    }
}
