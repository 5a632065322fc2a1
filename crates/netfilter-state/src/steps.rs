//! From the state in force to the wanted one, by steps that can be taken back.
//!
//! The order is the promise: what rules need comes before them and goes after them; where capture moves from one base
//! chain to another, the new one takes over first, then every packet on its way gets the time to finish, and only then
//! the old one lets go. A packet meets the base chains of a hook one after the other, each with the rules of the moment
//! at which it comes to it; so between the two steps both stand.

use crate::{
    change::IptablesChange,
    netlink::NativeState,
    routing::{FoundRouting, RoutingChange, RoutingItem},
    state::{IptablesTables, PerFamily},
};
use redirect_core::{
    Tproxy,
    options::{NativeForm, Variant},
    plan::{DataPlane, FamilyRules, RulePlan},
    rule::Table,
    values::{Family, Mark},
};
use std::{collections::BTreeSet, fmt};

/// What a network namespace holds, as far as it concerns the mesh.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observation {
    /// Tables of iptables-legacy.
    pub legacy: PerFamily<IptablesTables>,
    /// Tables of iptables-nft.
    pub nft: PerFamily<IptablesTables>,
    /// The mesh's native tables.
    pub native: NativeState,
    /// Policy rules, routes and addresses of the kind a plan needs, of any owner.
    pub routing: Vec<FoundRouting>,
}

impl Observation {
    /// The rules of a variant of iptables.
    #[must_use]
    pub const fn rules(&self, variant: Variant) -> &PerFamily<IptablesTables> {
        match variant {
            Variant::Legacy => &self.legacy,
            Variant::Nft => &self.nft,
        }
    }

    /// Whether a variant has rules, of any owner.
    #[must_use]
    pub fn in_use(&self, variant: Variant) -> bool {
        Family::BOTH.into_iter().any(|family| !self.rules(variant).of(family).is_empty())
    }

    /// Whether a variant has rules of the mesh.
    #[must_use]
    pub fn redirected_by(&self, variant: Variant) -> bool {
        Family::BOTH.into_iter().any(|family| self.rules(variant).of(family).is_redirected())
    }

    /// Whether any rules of the mesh exist.
    #[must_use]
    pub fn is_redirected(&self) -> bool {
        self.states().any(IptablesTables::is_redirected) || !self.native.is_empty()
    }

    /// The tables of both variants and both families.
    fn states(&self) -> impl Iterator<Item = &IptablesTables> {
        [&self.legacy, &self.nft].into_iter().flat_map(|both| [&both.v4, &both.v6])
    }

    /// The data planes that have rules here, of whatever backend.
    #[must_use]
    pub fn data_planes(&self) -> BTreeSet<DataPlane> {
        self.states().flat_map(IptablesTables::data_planes).chain(self.native.data_planes()).collect()
    }

    /// Whether rules of the mesh capture inbound connections in a table, of whatever backend.
    fn captures_inbound(&self, table: Table) -> bool {
        self.states().any(|state| state.captures_inbound(table)) || self.native.captures_inbound(table)
    }

    /// The packet marks that rules of the mesh use.
    #[must_use]
    pub fn marks(&self) -> BTreeSet<Mark> {
        self.states().flat_map(IptablesTables::marks).chain(self.native.marks()).collect()
    }

    /// What is different from `earlier`, as far as the mesh is concerned; one entry a table or item.
    #[must_use]
    pub fn differences_to(&self, earlier: &Self) -> Vec<String> {
        let nothing = IptablesChange::default();
        let mut words = Vec::new();
        for variant in Variant::ALL {
            for family in Family::BOTH {
                let (now, earlier) = (self.rules(variant).of(family), earlier.rules(variant).of(family));
                let back = IptablesChange::back(now, earlier, &nothing);
                words.extend(
                    back.tables.iter().map(|change| {
                        format!("{family} {} (iptables-{})", change.table.name(), variant.name())
                    }),
                );
            }
        }
        if self.native != earlier.native {
            words.push("native tables inet istio-*".to_string());
        }
        let added = FoundRouting::surplus(&self.routing, &earlier.routing);
        words.extend(added.into_iter().map(|found| format!("added: {}", found.item)));
        let gone = FoundRouting::surplus(&earlier.routing, &self.routing);
        words.extend(gone.into_iter().map(|found| format!("gone: {}", found.item)));
        let works = |of: &Self, item: &RoutingItem| {
            of.routing.iter().any(|found| found.item == *item && found.works())
        };
        let worked: BTreeSet<RoutingItem> =
            earlier.routing.iter().filter(|found| found.works()).map(|found| found.item).collect();
        let broken =
            self.routing.iter().filter(|found| worked.contains(&found.item) && !works(self, &found.item));
        words.extend(broken.map(|found| format!("does not work any more: {found}")));
        words
    }
}

/// Where rules are to stand. Closed on purpose, as [`Step`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RulesIn {
    /// The tables of a variant of iptables.
    Iptables(Variant),
    /// Native tables, in this form.
    Native(NativeForm),
}

/// The goal.
#[derive(Debug, Clone, Copy)]
pub struct Goal<'a> {
    /// The plan.
    pub plan: &'a RulePlan,
    /// Where its rules are to stand.
    pub rules_in: RulesIn,
    /// Whether rules are written again even where they are in force.
    pub force: bool,
    /// Routing that counts as the mesh's although no rule uses its mark: that of the settings.
    pub tproxy: Option<Tproxy>,
    /// Whether the tables of iptables-nft change within nf_tables' transactions, or through `iptables-nft-restore`.
    pub nft_in_transaction: bool,
}

impl<'a> Goal<'a> {
    /// This plan's rules there, in as few transactions as can be; nothing that is in force is written again.
    #[must_use]
    pub const fn new(plan: &'a RulePlan, rules_in: RulesIn) -> Self {
        Self { plan, rules_in, force: false, tproxy: None, nft_in_transaction: true }
    }

    /// The steps from what was observed to the goal; empty if it is in force.
    #[must_use]
    pub fn steps_from(&self, observed: &Observation) -> Vec<Step> {
        let mut steps: Vec<Step> =
            RoutingItem::missing(self.plan, &observed.routing).into_iter().map(Step::AddRouting).collect();
        let (take_over, let_go) = phases(observed, self);
        let both_stand = !let_go.is_empty() && !self.plan.families().is_empty() && observed.is_redirected();
        let rules_change = !take_over.is_empty() || !let_go.is_empty();
        let stale = FoundRouting::stale(self.plan, &observed.routing, &observed.marks(), self.tproxy);
        let is_marked = |found: &FoundRouting| {
            rules_change && !found.marked_for_removal && matches!(found.item, RoutingItem::Rule(..))
        };
        let marked = stale.iter().filter(|found| is_marked(found));
        steps.extend(marked.map(|found| Step::MarkForRemoval((*found).clone())));
        steps.extend(take_over);
        if both_stand {
            steps.push(Step::Grace);
            // While both stand, whatever comes is translated: nothing is left behind any more.
            if observed.captures_inbound(Table::Mangle) && !captures_inbound(self.plan, Table::Mangle) {
                steps.push(Step::ForgetClosed);
            }
        }
        steps.extend(let_go);
        let removed =
            |found: &FoundRouting| if is_marked(found) { found.mark_for_removal() } else { found.clone() };
        steps.extend(stale.into_iter().map(|found| Step::RemoveRouting(removed(found))));
        steps
    }
}

/// One step. It happens wholly or not at all, but for [`Step::Restore`], which happens table by table.
///
/// Exhaustive on purpose, as [`Inverse`] is: who takes steps has to take every kind of them, so a new kind is a new version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Adds what rules need.
    AddRouting(RoutingItem),
    /// Marks a policy rule as the mesh's to remove: the rules that prove it go first, and a run may end in between.
    MarkForRemoval(FoundRouting),
    /// Changes rules in one transaction of nf_tables.
    Transaction(Transaction),
    /// Changes rules through `iptables-restore` of a variant.
    Restore(Variant, Family, IptablesChange),
    /// Waits until every packet that is on its way has met all the chains it will meet.
    Grace,
    /// Makes connection tracking forget connections of before that nat has not translated, that the plan captures and that no socket has any more:
    /// what opens one in their place would be taken for theirs, and nat would not be asked.
    ForgetClosed,
    /// Removes what no rule needs.
    RemoveRouting(FoundRouting),
}

/// What changes in nf_tables at one instant.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transaction {
    /// Changes to the tables of iptables-nft.
    pub iptables: Vec<(Family, IptablesChange)>,
    /// What the native tables become; `None` where they stay.
    pub native: Option<NativeState>,
}

impl Transaction {
    /// Whether nothing changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.native.is_none() && self.iptables.iter().all(|(_, change)| change.is_empty())
    }
}

/// What takes a step back. It names a state, so that it does nothing where the step did nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inverse {
    /// Brings policy rules, routes or addresses to what they were ([`RoutingChange::taking_back`]).
    Routing {
        /// What was done to them.
        change: RoutingChange,
        /// Those of the same kind before that.
        before: Vec<FoundRouting>,
    },
    /// Brings these tables of iptables, and the native ones, to what they were.
    Rules {
        /// Tables of iptables by variant and family: what was done to them, and the rules they held before.
        iptables: Vec<(Variant, Family, IptablesChange, IptablesTables)>,
        /// The native tables as they were.
        native: Option<NativeState>,
    },
    /// Waits, as the step did.
    Grace,
    /// Nothing: what the step did is of no consequence to any rules.
    Nothing,
}

impl Step {
    /// What takes this step back, if it is taken after `before` was seen.
    #[must_use]
    pub fn inverse(self, before: &Observation, native_before: &NativeState) -> Inverse {
        let rules = |variant, family, change: IptablesChange| {
            (variant, family, change, before.rules(variant).of(family).clone())
        };
        let routing = |change: RoutingChange| {
            let concerned = before.routing.iter().filter(|one| one.item == change.item());
            Inverse::Routing { before: concerned.cloned().collect(), change }
        };
        match self {
            Self::AddRouting(item) => routing(RoutingChange::Added(item)),
            Self::RemoveRouting(found) => routing(RoutingChange::Removed(found)),
            Self::MarkForRemoval(found) => routing(RoutingChange::Marked(found)),
            Self::Grace => Inverse::Grace,
            Self::ForgetClosed => Inverse::Nothing,
            Self::Restore(variant, family, change) => {
                Inverse::Rules { iptables: [rules(variant, family, change)].into(), native: None }
            }
            Self::Transaction(Transaction { iptables, native }) => Inverse::Rules {
                iptables: iptables
                    .into_iter()
                    .map(|(family, change)| rules(Variant::Nft, family, change))
                    .collect(),
                native: native.map(|_| native_before.clone()),
            },
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddRouting(item) => write!(f, "add {item}"),
            Self::RemoveRouting(found) => write!(f, "remove {found}"),
            Self::MarkForRemoval(found) => write!(f, "mark for removal: {found}"),
            Self::Grace => f.write_str("wait for packets on their way"),
            Self::ForgetClosed => f.write_str("forget tracked connections that are over"),
            Self::Restore(variant, family, change) => {
                write!(f, "{family} {} (iptables-{})", tables(change), variant.name())
            }
            Self::Transaction(transaction) => transaction.fmt(f),
        }
    }
}

impl fmt::Display for Transaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let changed = self.iptables.iter().filter(|(_, change)| !change.is_empty());
        let mut words: Vec<String> =
            changed.map(|(family, change)| format!("{family} {} (iptables-nft)", tables(change))).collect();
        words.extend(self.native.as_ref().map(|_| "native tables inet istio-*".to_string()));
        f.write_str(&words.join(", "))
    }
}

fn tables(change: &IptablesChange) -> String {
    change.tables.iter().map(|table| table.table.name()).collect::<Vec<_>>().join(", ")
}

fn captures_inbound(plan: &RulePlan, table: Table) -> bool {
    Family::BOTH.into_iter().any(|family| IptablesTables::from(&plan.rules(family)).captures_inbound(table))
}

/// Changes of rules: those that let the new ones capture, and those that take the old ones away.
fn phases(observed: &Observation, goal: &Goal<'_>) -> (Vec<Step>, Vec<Step>) {
    let (mut first, mut second) = (RulesStep::default(), RulesStep::default());
    for variant in Variant::ALL {
        for family in Family::BOTH {
            let found = observed.rules(variant).of(family);
            let (takes_over, lets_go) = if goal.rules_in == RulesIn::Iptables(variant) {
                iptables(found, goal, family)
            } else {
                (IptablesChange::default(), IptablesChange::between(found, &FamilyRules::default()))
            };
            first.iptables.push((variant, family, takes_over));
            second.iptables.push((variant, family, lets_go));
        }
    }
    (first.native, second.native) = native(&observed.native, goal);
    (first.steps(goal), second.steps(goal))
}

/// A variant's change in two parts: tables that lose inbound capture to another one change last.
fn iptables(observed: &IptablesTables, goal: &Goal<'_>, family: Family) -> (IptablesChange, IptablesChange) {
    let wanted = goal.plan.rules(family);
    let change = if goal.force { IptablesChange::rewriting } else { IptablesChange::between };
    let change = change(observed, &wanted);
    let wanted = IptablesTables::from(&wanted);
    let moves = Table::ALL.iter().copied().any(|table| wanted.captures_inbound(table));
    let loses = |table| moves && observed.captures_inbound(table) && !wanted.captures_inbound(table);
    let (second, first) = change.tables.into_iter().partition(|change| loses(change.table));
    (IptablesChange { tables: first }, IptablesChange { tables: second })
}

/// What the native tables become first, and in the end; `None` where they stay.
///
/// In the first step a table that loses inbound capture stays as it is. If rules use sets, the new ones are
/// put before the old ones: a removed set loses its elements at once, even for a lookup in progress, and a new set may
/// receive its elements a moment after the rule that searches it.
fn native(observed: &NativeState, goal: &Goal<'_>) -> (Option<NativeState>, Option<NativeState>) {
    let wanted = match goal.rules_in {
        RulesIn::Native(form) => NativeState::wanted(goal.plan, form),
        RulesIn::Iptables(_) => NativeState::default(),
    };
    let is_rewritten = goal.force && !wanted.is_empty();
    if *observed == wanted && !is_rewritten {
        return (None, None);
    }
    if wanted.is_empty() {
        return (None, Some(wanted));
    }
    let moves = Table::ALL.iter().copied().any(|table| wanted.captures_inbound(table));
    let uses_sets = |table| observed.looks_up(table) || wanted.looks_up(table);
    let mut first = wanted.clone();
    let mut is_last = true;
    for table in DataPlane::NFT_TABLES {
        if moves && observed.captures_inbound_in(table) && !wanted.captures_inbound_in(table) {
            first = first.with_table_of(observed, table);
            is_last = false;
        } else if goal.force || uses_sets(table) && !observed.agrees_in(&wanted, table) {
            first = first.before_rules_of(observed, table);
            is_last = false;
        }
    }
    (Some(first), (!is_last).then_some(wanted))
}

/// Changes of rules that belong together.
#[derive(Default)]
struct RulesStep {
    iptables: Vec<(Variant, Family, IptablesChange)>,
    native: Option<NativeState>,
}

impl RulesStep {
    /// As few steps as can be: one transaction for all of nf_tables, and one for each run of a helper program.
    fn steps(self, goal: &Goal<'_>) -> Vec<Step> {
        let mut transaction = Transaction { iptables: Vec::new(), native: self.native };
        let mut by_programs = Vec::new();
        for (variant, family, change) in self.iptables.into_iter().filter(|(_, _, change)| !change.is_empty())
        {
            match variant {
                Variant::Nft if goal.nft_in_transaction => transaction.iptables.push((family, change)),
                Variant::Nft | Variant::Legacy => by_programs.push(Step::Restore(variant, family, change)),
            }
        }
        let transaction = (!transaction.is_empty()).then_some(Step::Transaction(transaction));
        // A helper program may fail where a transaction cannot be half done: it goes first.
        by_programs.into_iter().chain(transaction).collect()
    }
}

#[cfg(test)]
mod in_force;
#[cfg(test)]
mod recorded;
