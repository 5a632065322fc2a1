//! From the rules in force to the rules wanted: the steps, and the differences.

use crate::{
    align::align,
    state::{self, Entry, IptablesTables},
};
use redirect_core::{
    plan::FamilyRules,
    rule::{Chain, Table},
};
use std::fmt::{self, Write as _};

/// One step within a table. Closed on purpose: who renders or sends a change has to know every kind of step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EditOp {
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
    pub steps: Vec<EditOp>,
}

/// What turns the rules in force into those wanted. Tables that are as wanted do not appear.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IptablesChange {
    /// The tables to change, in the order in which to change them.
    pub tables: Vec<TableChange>,
}

impl IptablesChange {
    /// The change from the rules in force to those wanted. Other programs' rules stay where they are.
    #[must_use]
    pub fn between(observed: &IptablesTables, wanted: &FamilyRules) -> Self {
        let state = IptablesTables::from(wanted);
        Self::tables(observed, wanted, &state, |table| differs(table, observed, &state))
    }

    /// The change that rewrites everything wanted, even rules already in force.
    #[must_use]
    pub fn rewriting(observed: &IptablesTables, wanted: &FamilyRules) -> Self {
        let state = IptablesTables::from(wanted);
        Self::tables(observed, wanted, &state, |table| {
            observed.has_mesh_chain(table) || state.has_mesh_chain(table)
        })
    }

    /// The change that brings back exactly `before`, where `done` has changed it into `now`.
    ///
    /// Rules of the mesh go back to the very numbers they had among those of other programs. Rules that `done` added or removed
    /// count as the mesh's, whatever they look like.
    #[must_use]
    pub fn back(now: &IptablesTables, before: &IptablesTables, done: &Self) -> Self {
        let ours = |state: &IptablesTables, table, chain: &Chain, entry: &Entry| {
            state.owns(table, chain, entry) || done.names(table, chain, entry)
        };
        let differs = |table| {
            let chains = |state: &IptablesTables| -> Vec<(Chain, Vec<Entry>)> {
                let all = state.chains(table).map(|(chain, entries)| {
                    let kept = entries.iter().filter(|entry| ours(state, table, chain, entry));
                    (chain.clone(), kept.cloned().collect::<Vec<Entry>>())
                });
                all.filter(|(chain, kept)| chain.belongs_to_mesh() || !kept.is_empty()).collect()
            };
            chains(now) != chains(before)
        };
        let add = |table, steps: &mut Vec<EditOp>| {
            for (chain, entries) in before.chains(table) {
                match chain {
                    Chain::Hook(_) => {
                        let numbered = (1_usize..).zip(entries);
                        let back = numbered.filter(|(_, entry)| ours(before, table, chain, entry));
                        steps.extend(
                            back.map(|(number, entry)| EditOp::Insert(chain.clone(), number, entry.clone())),
                        );
                    }
                    Chain::Ours(_) | Chain::Other(_) if chain.belongs_to_mesh() => {
                        steps
                            .extend(entries.iter().map(|entry| EditOp::Append(chain.clone(), entry.clone())));
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
            EditOp::Append(of, one) | EditOp::Insert(of, _, one) | EditOp::Delete(of, one) => {
                of == chain && one == entry
            }
            EditOp::DeclareEmpty(_) | EditOp::Flush(_) | EditOp::RemoveChain(_) => false,
        })
    }

    /// Text for `iptables-restore --noflush`, table by table, each committed at once.
    #[must_use]
    pub fn restore_text(&self) -> String {
        let mut text = String::new();
        for table in &self.tables {
            table_text(table, &mut text);
        }
        text
    }

    /// Whether it changes nothing.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    fn tables(
        observed: &IptablesTables,
        wanted: &FamilyRules,
        state: &IptablesTables,
        changes: impl Fn(Table) -> bool,
    ) -> Self {
        let add = |table, steps: &mut Vec<EditOp>| add_wanted(table, wanted, state, steps);
        let changed = wanted.table_order().iter().copied().filter(|table| changes(*table));
        let ours = |found: &IptablesTables, table, chain: &Chain, entry: &Entry| {
            found.owns_beside(state, table, chain, entry)
        };
        Self { tables: changed.map(|table| replace(table, observed, state, &ours, add)).collect() }
    }
}

/// The steps that take away the mesh's rules of `from` and let `add` put those of `to` in their place.
fn replace(
    table: Table,
    from: &IptablesTables,
    to: &IptablesTables,
    ours: &impl Fn(&IptablesTables, Table, &Chain, &Entry) -> bool,
    add: impl Fn(Table, &mut Vec<EditOp>),
) -> TableChange {
    let mut steps = Vec::new();
    let mesh_chains = |state: &IptablesTables| -> Vec<Chain> {
        state.chains(table).map(|(chain, _)| chain.clone()).filter(Chain::belongs_to_mesh).collect()
    };
    let wanted = mesh_chains(to);
    steps.extend(wanted.iter().cloned().map(EditOp::DeclareEmpty));
    for (chain, entries) in from.chains(table).filter(|(chain, _)| !chain.belongs_to_mesh()) {
        let going = entries.iter().filter(|entry| ours(from, table, chain, entry));
        steps.extend(going.map(|entry| EditOp::Delete(chain.clone(), entry.clone())));
    }
    let stale: Vec<Chain> = mesh_chains(from).into_iter().filter(|chain| !wanted.contains(chain)).collect();
    steps.extend(stale.iter().cloned().map(EditOp::Flush));
    steps.extend(stale.into_iter().map(EditOp::RemoveChain));
    add(table, &mut steps);
    TableChange { table, steps }
}

fn add_wanted(table: Table, wanted: &FamilyRules, state: &IptablesTables, steps: &mut Vec<EditOp>) {
    for (chain, entries) in state.chains(table) {
        let leading = wanted.leading(table, chain);
        let (first, last) = entries.split_at_checked(leading).unwrap_or((entries, &[]));
        let numbered = (1_usize..).zip(first);
        steps.extend(numbered.map(|(number, entry)| EditOp::Insert(chain.clone(), number, entry.clone())));
        steps.extend(last.iter().map(|entry| EditOp::Append(chain.clone(), entry.clone())));
    }
}

fn table_text(change: &TableChange, text: &mut String) {
    line(text, format_args!("*{}", change.table.name()));
    for step in &change.steps {
        match step {
            // With --noflush, declaring a chain that is there empties it.
            EditOp::DeclareEmpty(chain) => line(text, format_args!(":{chain} - [0:0]")),
            EditOp::Append(chain, entry) => line(text, format_args!("-A {chain} {entry}")),
            EditOp::Insert(chain, number, entry) => {
                line(text, format_args!("-I {chain} {number} {entry}"));
            }
            EditOp::Delete(chain, entry) => line(text, format_args!("-D {chain} {entry}")),
            EditOp::Flush(chain) => line(text, format_args!("-F {chain}")),
            EditOp::RemoveChain(chain) => line(text, format_args!("-X {chain}")),
        }
    }
    text.push_str("COMMIT\n");
}

fn line(text: &mut String, words: fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{words}");
}

pub use crate::align::DifferingRule;

/// A place where the rules in force are not those wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RuleDifference {
    /// The table.
    pub table: Table,
    /// The chain.
    pub chain: Chain,
    /// What is different there.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub kind: DifferenceKind,
}

/// What is different in a chain. Other programs' rules are not counted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "difference", rename_all = "camelCase"))]
#[non_exhaustive]
pub enum DifferenceKind {
    /// The chain is missing.
    MissingChain,
    /// The chain should not be there.
    StrayChain,
    /// A rule of it is not as wanted.
    #[cfg_attr(feature = "serde", serde(untagged))]
    Rule(DifferingRule<Entry>),
}

impl RuleDifference {
    /// The differences between the rules in force and those wanted; other programs' rules are passed over. Table by table: first
    /// the chains that are wanted, then those that are not.
    #[must_use]
    pub fn all(observed: &IptablesTables, wanted: &FamilyRules) -> Vec<Self> {
        let wanted = IptablesTables::from(wanted);
        let differing = Table::ALL.iter().copied().filter(|table| differs(*table, observed, &wanted));
        differing.flat_map(|table| in_table(table, observed, &wanted)).collect()
    }
}

/// The mesh's chains of a table, and its rules in others, first those wanted, then those only found.
struct Chains<'a> {
    table: Table,
    observed: &'a IptablesTables,
    wanted: &'a IptablesTables,
}

impl<'a> Chains<'a> {
    fn found(&self, chain: &'a Chain) -> impl Iterator<Item = &'a Entry> + use<'a> {
        let Self { table, observed, wanted } = *self;
        let entries = observed.rules(table, chain).iter();
        entries.filter(move |entry| observed.owns_beside(wanted, table, chain, entry))
    }

    fn is_missing(&self, chain: &Chain) -> bool {
        chain.belongs_to_mesh() && !self.observed.has(self.table, chain)
    }

    /// Chains that nothing is wanted in.
    fn unplanned(&self) -> impl Iterator<Item = &'a Chain> + use<'a> {
        let Self { table, observed, wanted } = *self;
        observed.chains(table).map(|(chain, _)| chain).filter(move |chain| !wanted.has(table, chain))
    }
}

/// Whether anything in a table is not as wanted.
fn differs(table: Table, observed: &IptablesTables, wanted: &IptablesTables) -> bool {
    let chains = Chains { table, observed, wanted };
    let differs = |(chain, entries)| chains.is_missing(chain) || !chains.found(chain).eq(entries);
    wanted.chains(table).any(differs)
        || chains.unplanned().any(|chain| chain.belongs_to_mesh() || chains.found(chain).next().is_some())
}

fn in_table(table: Table, observed: &IptablesTables, wanted: &IptablesTables) -> Vec<RuleDifference> {
    let chains = Chains { table, observed, wanted };
    let mut all = Vec::new();
    let mut tell = |chain: &Chain, kind| all.push(RuleDifference { table, chain: chain.clone(), kind });
    for (chain, entries) in wanted.chains(table) {
        if chains.is_missing(chain) {
            tell(chain, DifferenceKind::MissingChain);
            continue;
        }
        let (wanted, found): (Vec<&Entry>, Vec<&Entry>) =
            (entries.iter().collect(), chains.found(chain).collect());
        for one in align(&wanted, &found, |one, two| one == two) {
            tell(chain, DifferenceKind::Rule(one.map(Entry::clone)));
        }
    }
    for chain in chains.unplanned() {
        if chain.belongs_to_mesh() {
            tell(chain, DifferenceKind::StrayChain);
            continue;
        }
        for (number, found) in (1_usize..).zip(chains.found(chain).cloned()) {
            tell(chain, DifferenceKind::Rule(DifferingRule::Stray { number, found }));
        }
    }
    all
}

impl fmt::Display for RuleDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = state::place(self.table, &self.chain);
        match &self.kind {
            DifferenceKind::MissingChain => write!(f, "chain {place} is missing"),
            DifferenceKind::StrayChain => write!(f, "unexpected chain {place}"),
            DifferenceKind::Rule(rule) => write!(f, "{place}: {rule}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redirect_core::{Families, Family, Redirect, rule::Hook};

    fn wanted() -> FamilyRules {
        Redirect::sidecar(Families::V4).build().unwrap().plan().rules(Family::V4)
    }

    /// How the rules in force differ from those wanted, when one of its lines is replaced.
    #[track_caller]
    fn assert_told(line: &str, instead: &str, all: &[&str]) {
        let text = wanted().restore_text();
        assert_eq!(text.matches(line).count(), 1, "{line}\n{text}");
        let observed = IptablesTables::saved(&text.replace(line, instead)).unwrap();
        let told = RuleDifference::all(&observed, &wanted());
        assert_eq!(told.iter().map(ToString::to_string).collect::<Vec<String>>(), all);
    }

    #[test]
    fn what_a_change_did_is_taken_back_whatever_it_looks_like_and_in_its_own_table_alone() {
        const PLAIN: &str = "-A OUTPUT -p tcp -j RETURN\n";
        let rule = || Entry::saved("-p tcp -j RETURN");
        let table = |name: &str, rules: &str| format!("*{name}\n:OUTPUT ACCEPT\n{rules}COMMIT\n");
        let state = |nat: &str, mangle: &str| {
            IptablesTables::saved(&[table("nat", nat), table("mangle", mangle)].concat()).unwrap()
        };
        let steps = |steps: &[EditOp]| TableChange { table: Table::Nat, steps: steps.to_vec() };
        let output = || Chain::Hook(Hook::Output);
        let done = IptablesChange { tables: [steps(&[EditOp::Append(output(), rule())])].into() };
        let back = IptablesChange::back(&state(PLAIN, PLAIN), &state("", PLAIN), &done);
        assert_eq!(back.tables, [steps(&[EditOp::Delete(output(), rule())])]);
        // Whatever the change did not do, another program did.
        let another = Entry::saved("-p udp -j RETURN");
        let elsewhere = EditOp::Append(Chain::Hook(Hook::Prerouting), rule());
        let others = [EditOp::Flush(output()), EditOp::Append(output(), another), elsewhere];
        let others = IptablesChange { tables: [steps(&others)].into() };
        assert_eq!(
            IptablesChange::back(&state(PLAIN, PLAIN), &state("", PLAIN), &others),
            IptablesChange::default()
        );
        assert_eq!(
            IptablesChange::back(&state(PLAIN, PLAIN), &state(PLAIN, ""), &done),
            IptablesChange::default()
        );
    }

    #[test]
    fn a_rule_that_lacks_is_too_much_or_is_another_is_told_with_its_number() {
        const LAST: &str = "-A ISTIO_OUTPUT -j ISTIO_REDIRECT\n";
        const MORE: &str = "-A ISTIO_OUTPUT -p tcp -j RETURN\n";
        assert_told(LAST, LAST, &[]);
        assert_told(LAST, "", &["nat ISTIO_OUTPUT: rule 11 is missing: -j ISTIO_REDIRECT"]);
        assert_told(
            LAST,
            &[LAST, MORE].concat(),
            &["nat ISTIO_OUTPUT: unexpected rule 12: -p tcp -j RETURN"],
        );
        assert_told(LAST, MORE, &["nat ISTIO_OUTPUT: rule 11 is -p tcp -j RETURN, not -j ISTIO_REDIRECT"]);
    }

    #[test]
    fn chains_that_lack_or_are_too_many_are_told_and_so_are_rules_of_the_mesh_where_none_is_wanted() {
        const JUMP: &str = "-A OUTPUT -j ISTIO_OUTPUT\n";
        const CHAIN: &str = ":ISTIO_OUTPUT - [0:0]\n";
        assert_told(
            CHAIN,
            &[CHAIN, ":ISTIO_OTHER - [0:0]\n"].concat(),
            &["unexpected chain nat ISTIO_OTHER"],
        );
        assert_told(
            JUMP,
            &[JUMP, "-A POSTROUTING -p tcp -j ISTIO_OUTPUT\n", "-A POSTROUTING -j ISTIO_OUTPUT\n"].concat(),
            &[
                "nat POSTROUTING: unexpected rule 1: -p tcp -j ISTIO_OUTPUT",
                "nat POSTROUTING: unexpected rule 2: -j ISTIO_OUTPUT",
            ],
        );
        let nothing = RuleDifference::all(&IptablesTables::new(), &wanted());
        assert!(
            nothing.iter().any(|one| one.to_string() == "chain nat ISTIO_OUTPUT is missing"),
            "{nothing:?}"
        );
    }
}
