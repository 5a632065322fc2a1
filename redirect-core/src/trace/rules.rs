//! Everything that hangs on the hooks for one family, made ready to be walked.

mod conditions;

pub(super) use conditions::Test;

use super::{Origin, Place, packets::number, set::Set};
use crate::{
    interference::ruleset::{Api, Base, Ruleset, SeenRule, Statement, TableFamily, TableName},
    plan::{PlannedRule, RulePlan},
    render::{nft_chain_name, nft_table},
    routing::{self, FoundRouting, RoutingItem},
    rule::{Chain, Hook, OurChain, Table},
    values::Family,
};
use alloc::{collections::BTreeMap, string::String, vec::Vec};
use core::net::IpAddr;

/// Where connection tracking begins (`NF_IP_PRI_CONNTRACK`).
pub(super) const TRACKING: i32 = -200;
/// Where the kernel translates destinations and sources, whatever the priority of the chains it asks for that
/// (`NF_IP_PRI_NAT_DST`, `NF_IP_PRI_NAT_SRC`).
const TRANSLATION: (i32, i32) = (-100, 100);

/// The rules that packets of a family meet: a plan's, or all that a network namespace holds. [`Rules::trace`] sends a packet
/// through them.
#[derive(Debug, Clone)]
pub struct Rules {
    pub(super) family: Family,
    pub(super) chains: Vec<WalkedChain>,
    /// The base chains of each hook, in the kernel's order.
    hooks: BTreeMap<Hook, Vec<usize>>,
    /// Packets with these marks are delivered to the pod itself, whatever their destination.
    pub(super) local_marks: Vec<u32>,
    /// The addresses of the network namespace, where they are known.
    pub(super) addresses: Option<Set>,
}

/// One of the mesh's rules, as [`Rules::of_mesh`] lists them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MeshRule<'a> {
    /// Where it stands.
    pub place: Place,
    /// What it says, and what it has counted.
    pub rule: &'a SeenRule,
    /// The settings behind it: one rule with a set may stand for several of a plan. None where no plan is known, or the rule is none of its.
    pub origins: Vec<Origin>,
}

#[derive(Debug, Clone)]
pub(super) struct WalkedChain {
    pub(super) table: TableName,
    pub(super) name: String,
    pub(super) base: Option<Base>,
    /// The chain of a plan it is.
    pub(super) ours: Option<OurChain>,
    pub(super) rules: Vec<WalkedRule>,
}

#[derive(Debug, Clone)]
pub(super) struct WalkedRule {
    pub(super) seen: SeenRule,
    /// One for each condition.
    pub(super) tests: Vec<Test>,
    /// One for each statement.
    pub(super) leads: Vec<Leads>,
    /// The settings behind it. One rule with a set stands for several of a plan, each of which is about the packets of its test.
    pub(super) origins: Vec<(Option<Test>, Origin)>,
    /// Whether it is one of the mesh's.
    pub(super) is_own: bool,
}

/// Where a statement leads to.
#[derive(Debug, Clone)]
pub(super) enum Leads {
    /// Nowhere, or to a chain that is not there.
    Nowhere,
    /// To a chain.
    To(usize),
    /// To what is looked up: for each element of a map its test and where its verdict leads to.
    By(Vec<(Test, Option<usize>)>),
}

impl Rules {
    /// The rules of a plan, as if nobody else had any.
    ///
    /// ```
    /// use redirect_core::{Families, Family, Redirect, trace::{Fate, Listener, Packet, Rules}};
    ///
    /// let plan = Redirect::sidecar(Families::V4).build()?.plan();
    /// let rules = Rules::of_plan(&plan, Family::V4);
    /// let packet = Packet::from_pod(1000, 1000, "10.1.0.2:40000".parse()?, "192.0.2.1:80".parse()?).by("eth0");
    /// let trace = rules.trace(&packet);
    /// assert_eq!(trace.fate(), Fate::Proxy { listener: Listener::Outbound, port: 15001, rewritten: true });
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn of_plan(plan: &RulePlan, family: Family) -> Self {
        let mut rules = Self::empty(family);
        for (table, chains) in plan.explained_rules(family) {
            let name = TableName { api: Api::NfTables, family: family.into(), name: table.name().into() };
            for (chain, planned) in chains {
                let base = if let Chain::Hook(hook) = &chain { Some(base_of(table, *hook)) } else { None };
                let ours = if let Chain::Ours(ours) = &chain { Some(*ours) } else { None };
                let rules_of_chain = planned.iter().map(|planned| {
                    let mut rule = WalkedRule::of(SeenRule::from(planned.rule()), family);
                    (rule.origins, rule.is_own) = ([(None, Origin::of(planned))].into(), true);
                    rule
                });
                let walked = WalkedChain {
                    table: name.clone(),
                    name: chain.name().into(),
                    base,
                    ours,
                    rules: rules_of_chain.collect(),
                };
                rules.chains.push(walked);
            }
        }
        rules.finish(&routing::wanted(plan))
    }

    /// Everything that a network namespace holds: rules of the mesh by any backend, and of others as far as they are
    /// understood. With a plan, the rules that are its own know the settings behind them.
    #[must_use]
    pub fn of_ruleset(
        ruleset: &Ruleset,
        routing: &[FoundRouting],
        family: Family,
        plan: Option<&RulePlan>,
    ) -> Self {
        let mut rules = Self::empty(family);
        let planned = plan.map(|plan| plan.explained_rules(family)).unwrap_or_default();
        for (name, table) in ruleset.tables.iter().filter(|(name, _)| name.family.covers(family)) {
            let of_plan = Table::ALL.iter().copied().find(|table| holds_plans_table(name, *table));
            for (chain_name, chain) in &table.chains {
                let ours = OurChain::ALL.iter().copied().find(|ours| {
                    of_plan.is_some()
                        && (ours.name() == chain_name || nft_chain_name(&(*ours).into()) == *chain_name)
                });
                let chain_of_plan = ours.map_or_else(
                    || chain.base.map(|base| Chain::Hook(base.hook)),
                    |ours| Some(Chain::Ours(ours)),
                );
                let candidates = of_plan
                    .and_then(|table| planned.get(&table)?.get(&chain_of_plan?))
                    .map_or(&[][..], Vec::as_slice);
                let is_own_chain = ours.is_some() || Chain::named(chain_name).belongs_to_mesh();
                let walked = chain.rules.iter().map(|seen| {
                    let mut rule = WalkedRule::of(seen.clone(), family);
                    rule.origins = origins(seen, candidates, family);
                    rule.is_own = is_own_chain || !rule.origins.is_empty();
                    rule
                });
                // A dormant table's chains hang on no hook.
                let base = chain.base.filter(|_| !table.dormant);
                let rules_of_chain = walked.collect();
                rules.chains.push(WalkedChain {
                    table: name.clone(),
                    name: chain_name.clone(),
                    base,
                    ours,
                    rules: rules_of_chain,
                });
            }
        }
        let routing: Vec<RoutingItem> =
            routing.iter().filter(|found| found.works()).map(|found| found.item).collect();
        rules.finish(&routing)
    }

    /// The same, of a network namespace with these addresses, which rules may ask for.
    #[must_use]
    pub fn with_addresses(mut self, addresses: &[IpAddr]) -> Self {
        let loopback = match self.family {
            Family::V4 => (0x7f00_0000, 0x7fff_ffff),
            Family::V6 => (1, 1),
        };
        let own = addresses.iter().filter(|address| Family::of(address) == self.family);
        let each = own.map(|address| (number(*address), number(*address)));
        self.addresses = Some(Set::of(each.chain([loopback]).collect()));
        self
    }

    const fn empty(family: Family) -> Self {
        Self { family, chains: Vec::new(), hooks: BTreeMap::new(), local_marks: Vec::new(), addresses: None }
    }

    fn finish(mut self, routing: &[RoutingItem]) -> Self {
        for (number, chain) in self.chains.iter().enumerate() {
            if let Some(base) = chain.base {
                self.hooks.entry(base.hook).or_default().push(number);
            }
        }
        for chains in self.hooks.values_mut() {
            chains.sort_by_key(|number| self.chains.get(*number).and_then(|chain| chain.base).map(order));
        }
        let names: BTreeMap<(TableName, String), usize> =
            self.chains.iter().enumerate().map(|(n, c)| ((c.table.clone(), c.name.clone()), n)).collect();
        for chain in &mut self.chains {
            let number_of = |to: &String| names.get(&(chain.table.clone(), to.clone())).copied();
            for rule in &mut chain.rules {
                rule.leads =
                    rule.seen.statements.iter().map(|one| Leads::of(one, &number_of, self.family)).collect();
            }
        }
        let has_route = |table| routing.contains(&RoutingItem::Route(self.family, table));
        self.local_marks = routing
            .iter()
            .filter_map(|item| match item {
                RoutingItem::Rule(family, mark, table) if *family == self.family && has_route(*table) => {
                    Some(mark.value())
                }
                RoutingItem::Rule(..) | RoutingItem::Route(..) | RoutingItem::LoopbackAddress => None,
            })
            .collect();
        self
    }

    /// The mesh's rules among them, chain by chain: those of its chains and native tables, and those that jump to them. With a plan,
    /// also the others that are its own.
    pub fn of_mesh(&self) -> impl Iterator<Item = MeshRule<'_>> {
        let belongs =
            |name: &str| Chain::named(&name.to_ascii_uppercase().replace('-', "_")).belongs_to_mesh();
        self.chains.iter().flat_map(move |chain| {
            let is_native = chain.table.family == TableFamily::Inet
                && Table::ALL.iter().any(|table| holds_plans_table(&chain.table, *table));
            let rules = (1_usize..).zip(&chain.rules).filter(move |(_, rule)| {
                let leads_there = rule.seen.statements.iter().any(
                    |statement| matches!(statement, Statement::Jump(to) | Statement::Goto(to) if belongs(to)),
                );
                is_native || rule.is_own || leads_there
            });
            rules.map(|(number, rule)| MeshRule {
                place: Place { table: chain.table.clone(), chain: chain.name.clone(), rule: Some(number) },
                rule: &rule.seen,
                origins: rule.origins.iter().map(|(_, origin)| *origin).collect(),
            })
        })
    }

    /// The base chains of a hook, in the kernel's order.
    pub(super) fn hooked(&self, hook: Hook) -> impl Iterator<Item = (&WalkedChain, Base)> {
        let numbers = self.hooks.get(&hook).map_or(&[][..], Vec::as_slice);
        numbers.iter().filter_map(|number| {
            let chain = self.chains.get(*number)?;
            Some((chain, chain.base?))
        })
    }
}

/// Chains that translate are asked together, in the order of their priorities.
const fn order(base: Base) -> (i32, i32) {
    match (base.is_nat, base.hook) {
        (false, _) => (base.priority, 0),
        (true, Hook::Prerouting | Hook::Output) => (TRANSLATION.0, base.priority),
        (true, Hook::Input | Hook::Forward | Hook::Postrouting) => (TRANSLATION.1, base.priority),
    }
}

fn base_of(table: Table, hook: Hook) -> Base {
    let kind = table.chain_type(hook);
    Base {
        hook,
        priority: table.priority(hook),
        is_nat: kind == "nat",
        drops: false,
        reroutes: kind == "route",
    }
}

fn holds_plans_table(name: &TableName, table: Table) -> bool {
    match name.family {
        TableFamily::Inet => name.name == nft_table(table),
        TableFamily::Ip | TableFamily::Ip6 => name.name == table.name(),
        TableFamily::Netdev => false,
    }
}

/// The planned rules that a rule is, or stands for.
fn origins(seen: &SeenRule, candidates: &[&PlannedRule], family: Family) -> Vec<(Option<Test>, Origin)> {
    let of = Meaning::of(seen, family);
    let meanings = candidates.iter().map(|planned| {
        let rule = SeenRule::from(planned.rule());
        (Meaning::of(&rule, family), Origin::of(planned))
    });
    let meanings: Vec<(Meaning, Origin)> = meanings.collect();
    if let Some((_, origin)) = meanings.iter().find(|(meaning, _)| *meaning == of) {
        return [(None, *origin)].into();
    }
    meanings.iter().filter_map(|(meaning, origin)| Some((Some(of.extends(meaning)?), *origin))).collect()
}

/// What a rule means, however it is written.
#[derive(PartialEq)]
struct Meaning {
    tests: Vec<Test>,
    acts: Vec<String>,
}

impl Meaning {
    fn of(seen: &SeenRule, family: Family) -> Self {
        let tests = seen.conditions.iter().map(|condition| Test::of(condition, family));
        let mut tests: Vec<Test> = tests.filter(|test| *test != Test::Always(true)).collect();
        tests.sort();
        tests.dedup();
        let mut acts: Vec<String> = Vec::new();
        for statement in &seen.statements {
            if let Statement::Jump(to) | Statement::Goto(to) = statement {
                acts.push(to.to_ascii_uppercase().replace('-', "_"));
            } else if let Statement::Tproxy { port, .. } = statement {
                // In native tables the mark and the end are statements of their own.
                acts.push(alloc::format!("tproxy {port:?}"));
                break;
            } else {
                acts.push(alloc::format!("{statement:?}"));
            }
        }
        Self { tests, acts }
    }

    /// The test of a rule that it also holds for where it stands for several that differ in one test; none where it does not.
    fn extends(&self, one: &Self) -> Option<Test> {
        let mut others = one.tests.iter().filter(|test| !self.tests.contains(test));
        let mut ours = self.tests.iter().filter(|test| !one.tests.contains(test));
        let (Some(narrow), None, Some(wide), None) = (others.next(), others.next(), ours.next(), ours.next())
        else {
            return None;
        };
        let (Test::In(field, narrow_set), Test::In(wide_field, wide_set)) = (narrow, wide) else {
            return None;
        };
        let is_within = field == wide_field && narrow_set.without(wide_set).is_empty();
        (is_within && self.acts == one.acts).then(|| narrow.clone())
    }
}

impl Leads {
    fn of(statement: &Statement, number_of: &impl Fn(&String) -> Option<usize>, family: Family) -> Self {
        let chain = |statement: &Statement| {
            let (Statement::Jump(to) | Statement::Goto(to)) = statement else { return None };
            number_of(to)
        };
        if let Statement::Map(map) = statement {
            let tests =
                map.among.values.iter().map(|values| Test::of_values(&map.among.selectors, values, family));
            return Self::By(tests.zip(map.verdicts.iter().map(chain)).collect());
        }
        chain(statement).map_or(Self::Nowhere, Self::To)
    }
}

impl WalkedRule {
    fn of(seen: SeenRule, family: Family) -> Self {
        let tests = seen.conditions.iter().map(|condition| Test::of(condition, family)).collect();
        Self { seen, tests, leads: Vec::new(), origins: Vec::new(), is_own: false }
    }
}
