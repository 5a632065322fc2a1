//! The tables of one variant of iptables and one family.

use super::Refused;
use crate::{
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
#[non_exhaustive]
pub enum Writer {
    /// A program of iptables, table by table.
    Iptables,
    /// This library's own transaction, which signs rules in built-in chains.
    Netlink,
}

/// Why a kernel refuses something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A built-in chain is declared or removed.
    #[error("a built-in chain can be neither declared nor removed")]
    BuiltIn,
    /// The chain is not there.
    #[error("no such chain")]
    NoSuchChain,
    /// The chain has fewer rules than this number.
    #[error("no rule with this number")]
    NoSuchNumber,
    /// No rule reads so.
    #[error("no such rule")]
    NoSuchRule,
    /// A chain with rules is removed.
    #[error("the chain is not empty")]
    NotEmpty,
    /// A chain is removed that a rule jumps to.
    #[error("a rule jumps to the chain")]
    InUse,
    /// A rule jumps to a chain that is not there.
    #[error("the rule jumps to a chain that is not there")]
    NoTarget,
    /// What is added is there already.
    #[error("it is there already")]
    Exists,
    /// What is removed or changed is not there.
    #[error("it is not there")]
    NotThere,
}

impl Tables {
    /// No rule and no chain but the built-in ones.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Tables with these rules.
    #[must_use]
    pub fn holding(state: &IptablesTables) -> Self {
        let held = |table, chain: &Chain, entry: &Entry| Held {
            entry: entry.clone(),
            is_signed: state.is_signed(table, chain, entry),
        };
        let chains = |table| {
            let all = state.chains(table);
            all.map(|(chain, rules)| {
                (chain.clone(), rules.iter().map(|rule| held(table, chain, rule)).collect())
            })
            .collect()
        };
        Self { tables: Table::ALL.iter().copied().map(|table| (table, chains(table))).collect() }
    }

    /// The rules, as iptables-save, or netlink, would list them.
    #[must_use]
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

#[cfg(test)]
mod tests {
    use super::*;
    use redirect_core::rule::Hook;

    #[test]
    fn only_a_rule_that_is_there_is_deleted() {
        let output = Chain::Hook(Hook::Output);
        let mut tables = Tables::default();
        for port in ["80", "443"] {
            let rule = Entry::saved(&format!("-p tcp -m tcp --dport {port} -j RETURN"));
            tables.insert(Table::Nat, output.clone(), 1, rule);
        }
        for number in [0, 3, 4] {
            assert_eq!(tables.delete(Table::Nat, &output, number), None, "{number}");
        }
        let deleted = tables.delete(Table::Nat, &output, 2).map(|entry| format!("{entry}"));
        assert_eq!(deleted.as_deref(), Some("-p tcp -m tcp --dport 80 -j RETURN"));
        assert_eq!(tables.delete(Table::Nat, &output, 2), None);
    }
    fn entry(text: &str) -> Entry {
        Entry::saved(text)
    }

    #[test]
    fn a_step_does_what_it_says_or_is_refused_as_the_kernel_refuses_it() {
        let (hook, own, other) = (
            || Chain::Hook(Hook::Output),
            || Chain::named("ISTIO_OUTPUT"),
            || Chain::named("ISTIO_REDIRECT"),
        );
        let rule = |port: u16| entry(&format!("-p tcp -m tcp --dport {port} -j RETURN"));
        let jump = || entry("-j ISTIO_OUTPUT");
        let before = || {
            let mut tables = Tables::new();
            let steps = [
                EditOp::DeclareEmpty(own()),
                EditOp::DeclareEmpty(other()),
                EditOp::Append(own(), rule(1)),
                EditOp::Append(own(), rule(2)),
                EditOp::Append(hook(), jump()),
            ];
            take_all(&mut tables, &steps).unwrap();
            tables
        };
        let held =
            |tables: &Tables, chain: &Chain| tables.rules(Table::Nat, chain).cloned().collect::<Vec<_>>();
        assert_eq!(held(&before(), &own()), [rule(1), rule(2)]);
        for (step, chain, rules) in [
            (EditOp::DeclareEmpty(own()), own(), &[][..]),
            (EditOp::Append(own(), rule(3)), own(), &[rule(1), rule(2), rule(3)]),
            (EditOp::Insert(own(), 1, rule(3)), own(), &[rule(3), rule(1), rule(2)]),
            (EditOp::Insert(own(), 3, rule(3)), own(), &[rule(1), rule(2), rule(3)]),
            (EditOp::Insert(Chain::Hook(Hook::Input), 1, rule(3)), Chain::Hook(Hook::Input), &[rule(3)]),
            (EditOp::Delete(own(), rule(2)), own(), &[rule(1)]),
            (EditOp::Flush(own()), own(), &[]),
            (EditOp::RemoveChain(other()), other(), &[]),
        ] {
            let mut after = before();
            take_all(&mut after, std::slice::from_ref(&step)).unwrap();
            assert_eq!(held(&after, &chain), rules, "{step:?}");
            let gone = after.observe().chains(Table::Nat).all(|(name, _)| *name != other());
            assert_eq!(gone, matches!(step, EditOp::RemoveChain(_)), "{step:?}");
            // A chain that is declared again is the same one, empty; every other step makes a difference.
            assert_ne!(after, before(), "{step:?}");
        }
        let mut free = before();
        take_all(
            &mut free,
            &[EditOp::Flush(own()), EditOp::Delete(hook(), jump()), EditOp::RemoveChain(own())],
        )
        .unwrap();
        let nowhere = || Chain::named("ISTIO_INBOUND");
        for (step, why) in [
            (EditOp::DeclareEmpty(hook()), Refusal::BuiltIn),
            (EditOp::RemoveChain(hook()), Refusal::BuiltIn),
            (EditOp::Append(nowhere(), rule(1)), Refusal::NoSuchChain),
            (EditOp::Flush(nowhere()), Refusal::NoSuchChain),
            (EditOp::RemoveChain(nowhere()), Refusal::NoSuchChain),
            (EditOp::Append(own(), entry("-j ISTIO_INBOUND")), Refusal::NoTarget),
            (EditOp::Insert(own(), 0, rule(3)), Refusal::NoSuchNumber),
            (EditOp::Insert(own(), 4, rule(3)), Refusal::NoSuchNumber),
            (EditOp::Delete(own(), rule(3)), Refusal::NoSuchRule),
            (EditOp::RemoveChain(own()), Refusal::NotEmpty),
        ] {
            let mut after = before();
            assert_eq!(take_all(&mut after, std::slice::from_ref(&step)), Err(why), "{step:?}");
            assert_eq!(after, before(), "{step:?}");
        }
        let mut after = before();
        assert_eq!(
            take_all(&mut after, &[EditOp::Flush(own()), EditOp::RemoveChain(own())]),
            Err(Refusal::InUse)
        );
        assert_eq!(after, before(), "wholly or not at all");
    }

    fn take_all(tables: &mut Tables, steps: &[EditOp]) -> Result<(), Refusal> {
        let change =
            IptablesChange { tables: [TableChange { table: Table::Nat, steps: steps.into() }].into() };
        tables.apply(&change, Writer::Iptables).map_err(|refused| refused.why)
    }

    #[test]
    fn what_another_program_does_is_done() {
        let own = Chain::named("ISTIO_OUTPUT");
        let mut tables = Tables::new();
        assert!(!tables.duplicate(Table::Nat, &own, 1));
        tables.flush(Table::Nat, &own);
        for (number, text) in [(1, "-j RETURN"), (9, "-j ACCEPT"), (0, "-j DROP")] {
            tables.insert(Table::Nat, own.clone(), number, entry(text));
        }
        let texts =
            |tables: &Tables| tables.rules(Table::Nat, &own).map(|one| format!("{one}")).collect::<Vec<_>>();
        assert_eq!(texts(&tables), ["-j DROP", "-j RETURN", "-j ACCEPT"]);
        assert!(!tables.duplicate(Table::Nat, &own, 0) && !tables.duplicate(Table::Nat, &own, 4));
        assert!(tables.duplicate(Table::Nat, &own, 2));
        assert_eq!(texts(&tables), ["-j DROP", "-j RETURN", "-j RETURN", "-j ACCEPT"]);
        tables.flush(Table::Nat, &own);
        assert!(texts(&tables).is_empty() && tables.observe().chains(Table::Nat).count() == 1);
    }

    #[test]
    fn only_netlink_signs_rules_and_only_those_of_built_in_chains() {
        let (hook, own) = (Chain::Hook(Hook::Output), Chain::named("ISTIO_OUTPUT"));
        let steps = [EditOp::DeclareEmpty(own.clone()), EditOp::Append(own.clone(), entry("-j RETURN"))];
        let steps = [&steps[..], &[EditOp::Append(hook.clone(), entry("-p tcp -j RETURN"))]].concat();
        let change = IptablesChange { tables: [TableChange { table: Table::Nat, steps }].into() };
        for (writer, is_signed) in [(Writer::Netlink, true), (Writer::Iptables, false)] {
            let mut tables = Tables::new();
            tables.apply(&change, writer).unwrap();
            for tables in [&tables, &Tables::holding(&tables.observe())] {
                let state = tables.observe();
                assert_eq!(state.is_signed(Table::Nat, &hook, &entry("-p tcp -j RETURN")), is_signed);
                assert!(!state.is_signed(Table::Nat, &own, &entry("-j RETURN")));
            }
        }
    }
}
