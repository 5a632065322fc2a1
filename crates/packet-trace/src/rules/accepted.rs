//! Rules whose effect is meant, and what is in force without them.

use super::{Base, Test, TraceRules, WalkedChain, WalkedRule, find_runs};
use crate::{packets::VariedField, packets::loopback, set::RangeSet};
use netfilter_state::ruleset::{Api, Statement, TableName};
use redirect_core::{
    accepted::{AcceptedBy, AcceptedRules, RuleName},
    rule::{Hook, Protocol},
};
use std::collections::{BTreeMap, BTreeSet};

/// A rule of a chain, or a chain's policy: the numbers of both.
pub(in super::super) type Skipped = (usize, Option<usize>);

/// KubeVirt's chains in a table `nat`. Both are there wherever its masquerade binding has rules.
const INBOUND: &str = "KUBEVIRT_PREINBOUND";
const OUTBOUND: &str = "KUBEVIRT_POSTINBOUND";
/// The port that goes to a virtual machine beside the proxy: that of SSH.
const BESIDE_PROXY: u128 = 22;
/// The ports that stay those of the pod: the proxy's, and those by which machines migrate.
const OF_POD: [u128; 13] =
    [15000, 15001, 15004, 15006, 15008, 15009, 15020, 15021, 15053, 15090, 22222, 49152, 49153];

impl TraceRules {
    /// The same where the effect of some rules is meant.
    pub(crate) fn with_accepted(mut self, accepted: &AcceptedRules) -> Self {
        let has = |table: &TableName, chain: &str| {
            self.chains.iter().any(|one| one.table == *table && one.name == chain)
        };
        let is_kubevirts = |table: &TableName| {
            table.name == "nat" && table.api != Api::Function && has(table, INBOUND) && has(table, OUTBOUND)
        };
        let of_kubevirt: BTreeSet<TableName> = self
            .chains
            .iter()
            .map(|chain| &chain.table)
            .filter(|table| is_kubevirts(table))
            .cloned()
            .collect();
        let mut own = loopback(self.family);
        if let Some(addresses) = &self.addresses {
            own = own.or(addresses);
        }
        let mut found = BTreeMap::new();
        for (number, chain) in self.chains.iter().enumerate() {
            if let Some(by) = by_chain(accepted, chain) {
                found.insert((number, None), by);
            }
            for (index, rule) in chain.rules.iter().enumerate().filter(|(_, rule)| !rule.is_own) {
                let kubevirt = || {
                    let is_its = of_kubevirt.contains(&chain.table)
                        && is_of_kubevirt(chain, rule, &own, &loopback(self.family));
                    is_its.then_some(AcceptedBy::KubeVirt)
                };
                if let Some(by) = by_rule(accepted, chain, rule).or_else(kubevirt) {
                    found.insert((number, Some(index)), by);
                }
            }
        }
        self.accepted = found;
        self
    }

    /// Whether any rule's effect is meant.
    pub(in super::super) fn accepts_any(&self) -> bool {
        !self.accepted.is_empty()
    }

    /// Who accepts the effect of a rule, or that of a chain's policy.
    pub(in super::super) fn accepts(&self, what: Skipped) -> Option<AcceptedBy> {
        self.accepted.get(&what).copied()
    }

    /// What would be in force without the effect of these rules and policies.
    pub(in super::super) fn without(&self, skipped: &BTreeSet<Skipped>) -> Self {
        let mut rules = self.clone();
        for (chain, rule) in skipped {
            let Some(chain) = rules.chains.get_mut(*chain) else { continue };
            let Some(rule) = rule else {
                chain.base = chain.base.map(|base| Base { drops: false, ..base });
                continue;
            };
            if let Some(skipped) = chain.rules.get_mut(*rule) {
                skipped.seen.statements.clear();
                skipped.leads.clear();
            }
            // Those of other programs around it, which may be asked together with it. The mesh's never are.
            let is_own = |rule: &WalkedRule| rule.is_own;
            let begin =
                chain.rules.iter().take(*rule).rposition(is_own).map_or(0, |own| own.saturating_add(1));
            let others = chain.rules.get_mut(begin..).unwrap_or_default();
            let end = others.iter().position(is_own).unwrap_or(others.len());
            let others = others.get_mut(..end).unwrap_or_default();
            others.iter_mut().for_each(|rule| rule.run = None);
            find_runs(others);
        }
        rules
    }
}

fn by_chain(accepted: &AcceptedRules, chain: &WalkedChain) -> Option<AcceptedBy> {
    let names_it = |name: &RuleName| match name {
        RuleName::Chain { table, chain: named } => {
            chain.name == *named && table.as_ref().is_none_or(|table| chain.table.name == *table)
        }
        RuleName::Table(table) => chain.table.name == *table,
        RuleName::Comment(_) => false,
    };
    accepted.names().iter().find(|(name, _)| names_it(name)).map(|(_, by)| *by)
}

fn by_rule(accepted: &AcceptedRules, chain: &WalkedChain, rule: &WalkedRule) -> Option<AcceptedBy> {
    let names_it = |name: &RuleName| matches!(name, RuleName::Comment(text) if rule.seen.comment == *text);
    let by_comment = accepted.names().iter().find(|(name, _)| names_it(name)).map(|(_, by)| *by);
    by_comment.or_else(|| by_chain(accepted, chain))
}

/// Whether a rule in a table of KubeVirt's is one that it makes for a virtual machine with a proxy: it sends SSH to the machine, and
/// what the pod sends to itself, but for some ports.
fn is_of_kubevirt(chain: &WalkedChain, rule: &WalkedRule, own: &RangeSet, localhost: &RangeSet) -> bool {
    let is_within = |field: VariedField, set: &RangeSet| {
        let of_field = |test: &Test| matches!(test, Test::In(of, has) if *of == field && !has.is_empty() && has.without(set).is_empty());
        rule.tests.iter().any(of_field)
    };
    let tcp = || is_within(VariedField::Protocol, &RangeSet::one(Protocol::Tcp.number().into()));
    let ports = |all: &[u128]| RangeSet::each(all.iter().copied());
    let is_output = chain.base.is_some_and(|base| base.hook == Hook::Output && base.is_nat);
    match rule.seen.statements.as_slice() {
        [Statement::Translate(_)] if chain.name == INBOUND => {
            tcp() && is_within(VariedField::Port, &RangeSet::one(BESIDE_PROXY))
        }
        [Statement::Translate(_)] if is_output => is_within(VariedField::Destination, own),
        [Statement::Return] if is_output => {
            tcp()
                && is_within(VariedField::Source, localhost)
                && is_within(VariedField::Port, &ports(&OF_POD))
        }
        _ => false,
    }
}
