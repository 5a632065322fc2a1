//! What a chain will hold once the steps of a change are done: the rules that stay, by handle, and the new ones between them.
//!
//! The kernel places a new rule before one that is there already; within one transaction nothing else is needed.

use super::{batch_error::BatchError, native_state::ChainHook, observed::Observed, part::ChainRef};
use crate::{
    change::{EditOp, TableChange},
    state::Entry,
};
use redirect_core::{
    rule::{Chain, Table},
    values::Family,
};
use std::collections::BTreeMap;

/// One rule of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Item<'a> {
    /// That of one that is there and stays; none of one that is added.
    handle: Option<u64>,
    entry: &'a Entry,
}

/// A chain before and after the steps.
#[derive(Debug, Clone)]
pub(super) struct ChainLayout<'a> {
    /// Number of rules before; `None` if the chain does not exist yet.
    before: Option<usize>,
    /// Whether the chain is there afterwards.
    present: bool,
    /// The rules afterwards, in order.
    items: Vec<Item<'a>>,
    /// The handles of the rules that go.
    pub(super) removed: Vec<u64>,
}

impl<'a> ChainLayout<'a> {
    /// The layouts of all chains that the steps touch.
    pub(super) fn of(
        observed: &'a Observed,
        family: Family,
        change: &'a TableChange,
    ) -> Result<BTreeMap<&'a Chain, Self>, BatchError> {
        let mut chains: BTreeMap<&'a Chain, Self> = BTreeMap::new();
        for step in &change.steps {
            let chain = chain_of(step);
            let place = ChainRef { family, table: change.table, chain };
            if !chains.contains_key(chain) {
                chains.insert(chain, Self::found(observed, place)?);
            }
            if let Some(layout) = chains.get_mut(chain) {
                layout.step(step, place)?;
            }
        }
        Ok(chains)
    }

    fn found(observed: &'a Observed, place: ChainRef<'a>) -> Result<Self, BatchError> {
        let ChainRef { family, table, chain } = place;
        let Some(facts) = observed.chain_facts(family, table, chain) else {
            // A built-in chain is always there for iptables; in truth it is made with its first rule.
            let present = matches!(chain, Chain::Hook(_));
            return Ok(Self { before: None, present, items: Vec::new(), removed: Vec::new() });
        };
        if !is_as_iptables_has_it(table, chain, facts) {
            return Err(BatchError::NotBuiltIn(place.to_string()));
        }
        let entries = observed.state(family).rules(table, chain);
        let items: Vec<Item<'a>> = facts
            .handles
            .iter()
            .zip(entries)
            .map(|(handle, entry)| Item { handle: Some(*handle), entry })
            .collect();
        Ok(Self { before: Some(items.len()), present: true, items, removed: Vec::new() })
    }

    fn step(&mut self, step: &'a EditOp, place: ChainRef<'a>) -> Result<(), BatchError> {
        match step {
            EditOp::DeclareEmpty(_) => {
                self.clear();
                self.present = true;
                return Ok(());
            }
            _ if !self.present => return Err(BatchError::NoSuchChain(place.to_string())),
            EditOp::Append(_, entry) => self.items.push(Item { handle: None, entry }),
            EditOp::Insert(_, number, entry) => {
                let index = number.saturating_sub(1).min(self.items.len());
                self.items.insert(index, Item { handle: None, entry });
            }
            EditOp::Delete(_, entry) => {
                let index = self.items.iter().position(|item| item.entry == entry).ok_or_else(|| {
                    BatchError::NoSuchRule { place: place.to_string(), rule: entry.to_string() }
                })?;
                self.removed.extend(self.items.remove(index).handle);
            }
            EditOp::Flush(_) => self.clear(),
            EditOp::RemoveChain(_) => {
                self.clear();
                self.present = false;
            }
        }
        Ok(())
    }

    fn clear(&mut self) {
        self.removed.extend(self.items.drain(..).filter_map(|item| item.handle));
    }

    /// Whether the chain must be created.
    pub(super) const fn is_new(&self) -> bool {
        self.before.is_none() && self.present
    }

    /// Whether the chain must be removed.
    pub(super) const fn is_removed(&self) -> bool {
        self.before.is_some() && !self.present
    }

    /// Whether the chain had rules and loses all of them.
    pub(super) fn keeps_nothing(&self) -> bool {
        self.before.is_some_and(|count| count > 0 && count == self.removed.len())
    }

    /// The rules that come, each with the handle of the next one that stays.
    pub(super) fn added(&self) -> Vec<(&'a Entry, Option<u64>)> {
        let (mut next, mut added) = (None, Vec::new());
        for item in self.items.iter().rev() {
            match item.handle {
                Some(handle) => next = Some(handle),
                None => added.push((item.entry, next)),
            }
        }
        added.reverse();
        added
    }
}

/// Whether a chain with the name of a built-in one is that, and one with another name hangs on no hook.
fn is_as_iptables_has_it(table: Table, chain: &Chain, facts: &super::observed::ChainFacts) -> bool {
    match (chain, &facts.hook) {
        (Chain::Hook(hook), Some(found)) => found.place() == ChainHook::built_in(table, *hook).place(),
        (Chain::Ours(_) | Chain::Other(_), None) => true,
        (Chain::Hook(_), None) | (Chain::Ours(_) | Chain::Other(_), Some(_)) => false,
    }
}

const fn chain_of(step: &EditOp) -> &Chain {
    match step {
        EditOp::DeclareEmpty(chain)
        | EditOp::Append(chain, _)
        | EditOp::Insert(chain, ..)
        | EditOp::Delete(chain, _)
        | EditOp::Flush(chain)
        | EditOp::RemoveChain(chain) => chain,
    }
}

#[cfg(test)]
mod tests {
    use super::{super::observed::ChainFacts, *};
    use redirect_core::rule::Hook;

    #[test]
    fn a_built_in_chain_has_the_hook_the_priority_and_the_kind_that_iptables_gives_it() {
        let of_iptables =
            ChainHook { number: 3, priority: (-100_i32).cast_unsigned(), kind: "nat".into(), policy: 1 };
        let is_built_in = |hook: &ChainHook| {
            let facts = ChainFacts { hook: Some(hook.clone()), ..ChainFacts::default() };
            is_as_iptables_has_it(Table::Nat, &Chain::Hook(Hook::Output), &facts)
        };
        assert!(is_built_in(&of_iptables));
        for other in [
            ChainHook { number: 0, ..of_iptables.clone() },
            ChainHook { priority: (-101_i32).cast_unsigned(), ..of_iptables.clone() },
            ChainHook { kind: "filter".into(), ..of_iptables.clone() },
            ChainHook { number: 0, priority: 0, ..of_iptables.clone() },
        ] {
            assert!(!is_built_in(&other), "{other:?}");
        }
    }
}
