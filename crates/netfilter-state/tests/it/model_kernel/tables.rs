//! The tables of one variant of iptables and one family.

use super::Refused;
use netfilter_state::{
    change::{EditOp, IptablesChange, TableChange},
    state::{Entry, IptablesTables},
};
use redirect_core::rule::{Chain, Rule, Table, Target};
use std::collections::BTreeMap;

/// The tables of one variant of iptables and one family, changed as the kernel changes them.
///
/// Two are equal when they hold the same rules and chains, no matter who wrote them.
#[derive(Debug, Clone, Default)]
pub struct Tables {
    tables: BTreeMap<Table, BTreeMap<Chain, Vec<Held>>>,
}

/// A rule with what only nf_tables can keep beside it.
#[derive(Debug, Clone)]
struct Held {
    entry: Entry,
    is_signed: bool,
}

/// Who writes a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writer {
    /// A program of iptables, table by table.
    Iptables,
    /// This library's own transaction, which signs rules in built-in chains.
    Netlink,
}

/// Why a kernel refuses something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// A built-in chain is declared or removed.
    BuiltIn,
    /// The chain is not there.
    NoSuchChain,
    /// The chain has fewer rules than this number.
    NoSuchNumber,
    /// No rule reads so.
    NoSuchRule,
    /// A chain with rules is removed.
    NotEmpty,
    /// A chain is removed that a rule jumps to.
    InUse,
    /// A rule jumps to a chain that is not there.
    NoTarget,
    /// What is added is there already.
    Exists,
    /// What is removed or changed is not there.
    NotThere,
}

impl Tables {
    /// No rule and no chain but the built-in ones.
    pub fn new() -> Self {
        Self::default()
    }

    /// Tables with these rules, none of them signed.
    pub fn holding(state: &IptablesTables) -> Self {
        let held = |entry: &Entry| Held { entry: entry.clone(), is_signed: false };
        let chains = |table| {
            let all = state.chains(table);
            all.map(|(chain, rules)| (chain.clone(), rules.iter().map(held).collect())).collect()
        };
        Self { tables: Table::ALL.iter().copied().map(|table| (table, chains(table))).collect() }
    }

    /// The rules, as iptables-save, or netlink, would list them.
    pub fn observe(&self) -> IptablesTables {
        let mut state = IptablesTables::new();
        for (table, chains) in &self.tables {
            for (chain, held) in chains {
                if matches!(chain, Chain::Hook(_)) && held.is_empty() {
                    continue;
                }
                *state.declare(*table, chain.clone()) = held.iter().map(|one| one.entry.clone()).collect();
                for one in held.iter().filter(|one| one.is_signed) {
                    state.sign(*table, chain.clone(), one.entry.clone());
                }
            }
        }
        state
    }

    /// Makes a change, table by table; a table changes wholly or not at all.
    ///
    /// # Errors
    /// What the kernel refuses; the tables before that one have changed.
    pub fn apply(&mut self, change: &IptablesChange, writer: Writer) -> Result<(), Refused> {
        change.tables.iter().try_for_each(|change| self.apply_table(change, writer))
    }

    /// The rules of a chain, in order; none where no such chain.
    pub fn rules(&self, table: Table, chain: &Chain) -> impl Iterator<Item = &Entry> {
        self.tables
            .get(&table)
            .and_then(|chains| chains.get(chain))
            .into_iter()
            .flatten()
            .map(|held| &held.entry)
    }

    /// Inserts a rule as another program would, before the one with this number, counted from 1; behind the last rule
    /// if it has fewer. The chain is made where it is missing, and nothing is checked.
    pub fn insert(&mut self, table: Table, chain: impl Into<Chain>, number: usize, rule: impl Into<Entry>) {
        let rules = self.tables.entry(table).or_default().entry(chain.into()).or_default();
        let index = number.saturating_sub(1).min(rules.len());
        rules.insert(index, Held { entry: rule.into(), is_signed: false });
    }

    /// Deletes a rule by its number, counted from 1, and returns it.
    pub fn delete(&mut self, table: Table, chain: &Chain, number: usize) -> Option<Entry> {
        let rules = self.tables.get_mut(&table)?.get_mut(chain)?;
        let index = number.checked_sub(1).filter(|index| *index < rules.len())?;
        Some(rules.remove(index).entry)
    }

    /// Duplicates a rule right behind itself, by number; returns whether it existed.
    pub fn duplicate(&mut self, table: Table, chain: &Chain, number: usize) -> bool {
        let rules = self.tables.get_mut(&table).and_then(|chains| chains.get_mut(chain));
        let Some(rules) = rules else { return false };
        let copy = number.checked_sub(1).and_then(|index| rules.get(index)).cloned();
        copy.map(|copy| rules.insert(number, copy)).is_some()
    }

    /// Empties a chain.
    pub fn flush(&mut self, table: Table, chain: &Chain) {
        if let Some(rules) = self.tables.get_mut(&table).and_then(|chains| chains.get_mut(chain)) {
            rules.clear();
        }
    }

    fn apply_table(&mut self, change: &TableChange, writer: Writer) -> Result<(), Refused> {
        let chains = self.tables.entry(change.table).or_default();
        let mut changed = chains.clone();
        for step in &change.steps {
            take(&mut changed, step, writer)
                .map_err(|why| Refused { what: format!("{}: {step:?}", change.table.name()), why })?;
        }
        *chains = changed;
        Ok(())
    }
}

impl PartialEq for Tables {
    fn eq(&self, other: &Self) -> bool {
        self.observe() == other.observe()
    }
}

impl Eq for Tables {}

type Chains = BTreeMap<Chain, Vec<Held>>;

fn take(chains: &mut Chains, step: &EditOp, writer: Writer) -> Result<(), Refusal> {
    match step {
        EditOp::DeclareEmpty(Chain::Hook(_)) | EditOp::RemoveChain(Chain::Hook(_)) => {
            return Err(Refusal::BuiltIn);
        }
        EditOp::DeclareEmpty(chain) => drop(chains.insert(chain.clone(), Vec::new())),
        EditOp::Append(chain, entry) => {
            let held = held(chains, chain, entry, writer)?;
            rules(chains, chain)?.push(held);
        }
        EditOp::Insert(chain, number, entry) => {
            let held = held(chains, chain, entry, writer)?;
            let rules = rules(chains, chain)?;
            let index = number.checked_sub(1).filter(|index| *index <= rules.len());
            rules.insert(index.ok_or(Refusal::NoSuchNumber)?, held);
        }
        EditOp::Delete(chain, entry) => {
            let rules = rules(chains, chain)?;
            let index = rules.iter().position(|held| held.entry == *entry).ok_or(Refusal::NoSuchRule)?;
            rules.remove(index);
        }
        EditOp::Flush(chain) => rules(chains, chain)?.clear(),
        EditOp::RemoveChain(chain) => {
            if !rules(chains, chain)?.is_empty() {
                return Err(Refusal::NotEmpty);
            }
            if chains.values().flatten().any(|held| jumps_to(&held.entry, chain)) {
                return Err(Refusal::InUse);
            }
            chains.remove(chain);
        }
    }
    Ok(())
}

fn rules<'a>(chains: &'a mut Chains, chain: &Chain) -> Result<&'a mut Vec<Held>, Refusal> {
    if matches!(chain, Chain::Hook(_)) {
        return Ok(chains.entry(chain.clone()).or_default());
    }
    chains.get_mut(chain).ok_or(Refusal::NoSuchChain)
}

/// A rule that may stand in a chain.
fn held(chains: &Chains, chain: &Chain, entry: &Entry, writer: Writer) -> Result<Held, Refusal> {
    // What a rule that is not understood jumps to may be an extension that is not known here.
    if let Some(Rule { target: Target::Jump(to), .. }) = entry.understood()
        && !chains.contains_key(to)
    {
        return Err(Refusal::NoTarget);
    }
    let is_signed = writer == Writer::Netlink && matches!(chain, Chain::Hook(_));
    Ok(Held { entry: entry.clone(), is_signed })
}

fn jumps_to(entry: &Entry, chain: &Chain) -> bool {
    match entry {
        Entry::Rule(rule) => rule.target == Target::Jump(chain.clone()),
        Entry::Foreign(rule) => rule.jumps_to().as_ref() == Some(chain),
    }
}
