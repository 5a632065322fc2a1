//! Everything that hangs on the hooks for one family, made ready to be walked.

use super::{
    Origin, Place,
    packets::{Field, of_interface, of_net, state},
    set::Set,
};
use crate::{
    interference::ruleset::{
        Api, Base, Condition, Ruleset, SeenRule, Statement, TableFamily, TableName, state as bits,
    },
    plan::{PlannedRule, RulePlan},
    render::{nft_chain_name, nft_table},
    routing::{self, FoundRouting, RoutingItem},
    rule::{Chain, ConnState, Direction, Hook, Is, Match, OurChain, Table, TcpFlags},
    values::{Family, PortRange},
};
use alloc::{collections::BTreeMap, string::String, vec::Vec};

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
}

/// One of the mesh's rules, as [`Rules::of_mesh`] lists them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MeshRule<'a> {
    /// Where it stands.
    pub place: Place,
    /// What it says, and what it has counted.
    pub rule: &'a SeenRule,
    /// The setting behind it; none where no plan is known, or the rule is none of its.
    pub origin: Option<Origin>,
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
    /// The chain it jumps or goes to.
    pub(super) to: Option<usize>,
    pub(super) origin: Option<Origin>,
    /// Whether it is one of the mesh's.
    pub(super) is_own: bool,
}

/// A condition, in terms of what packets differ in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Test {
    Always(bool),
    In(Field, Set),
    /// Likewise, of the interface it comes in by; not what it says where there is none.
    ComesIn(Set, bool),
    GoesOut(Set, bool),
    /// Only packets that a local socket sends have an owner.
    Owner(Field, Set),
    /// A mark's value, mask, and whether it is turned round.
    Bits(Field, u32, u32, bool),
    Unknown,
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
        let mut rules = Self { family, chains: Vec::new(), hooks: BTreeMap::new(), local_marks: Vec::new() };
        for (table, chains) in plan.explained_rules(family) {
            let name = TableName { api: Api::NfTables, family: family.into(), name: table.name().into() };
            for (chain, planned) in chains {
                let base = if let Chain::Hook(hook) = &chain { Some(base_of(table, *hook)) } else { None };
                let ours = if let Chain::Ours(ours) = &chain { Some(*ours) } else { None };
                let rules_of_chain = planned.iter().map(|planned| {
                    let mut rule = WalkedRule::of(SeenRule::from(planned.rule()), family);
                    (rule.origin, rule.is_own) = (Some(Origin::of(planned)), true);
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
        let mut rules = Self { family, chains: Vec::new(), hooks: BTreeMap::new(), local_marks: Vec::new() };
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
                    rule.origin = origin(seen, candidates, family);
                    rule.is_own = is_own_chain || rule.origin.is_some();
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
            for rule in &mut chain.rules {
                rule.to = rule.seen.statements.iter().find_map(|statement| {
                    let (Statement::Jump(to) | Statement::Goto(to)) = statement else { return None };
                    names.get(&(chain.table.clone(), to.clone())).copied()
                });
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
                origin: rule.origin,
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
    }
}

/// The planned rule that a rule is, if it is one.
fn origin(seen: &SeenRule, candidates: &[&PlannedRule], family: Family) -> Option<Origin> {
    let mut found = None;
    let of = Meaning::of(seen, family);
    for planned in candidates {
        if Meaning::of(&SeenRule::from(planned.rule()), family) == of {
            found = found.or_else(|| Some(Origin::of(planned)));
        }
    }
    found
}

/// What a rule means, however it is written.
#[derive(PartialEq)]
struct Meaning(Vec<String>, Vec<String>);

impl Meaning {
    fn of(seen: &SeenRule, family: Family) -> Self {
        let tests = seen.conditions.iter().map(|condition| Test::of(condition, family));
        let mut tests: Vec<String> =
            tests.filter(|test| *test != Test::Always(true)).map(|test| alloc::format!("{test:?}")).collect();
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
        Self(tests, acts)
    }
}

impl WalkedRule {
    fn of(seen: SeenRule, family: Family) -> Self {
        let tests = seen.conditions.iter().map(|condition| Test::of(condition, family)).collect();
        Self { seen, tests, to: None, origin: None, is_own: false }
    }
}

impl Test {
    fn of(condition: &Condition, family: Family) -> Self {
        match condition {
            Condition::Plain(condition) => Self::of_plain(condition, family),
            Condition::Family(is) => Self::Always((is.value == family) != is.not),
            Condition::Protocol(is) => {
                Self::is(Field::Protocol, is, |number| Set::one((*number).into()), family)
            }
            Condition::SourcePorts(is) => Self::is(Field::SourcePort, is, |ports| of_ports(ports), family),
            Condition::State(is) => Self::is(Field::State, is, |states| of_states(*states), family),
            Condition::MarkBits { mask, is } => Self::bits(Field::Mark, is.value, *mask, is.not),
            Condition::ConnMarkBits { mask, is } => Self::bits(Field::ConnMark, is.value, *mask, is.not),
            Condition::IsReply(is) => Self::is(Field::State, is, |reply| of_direction(*reply), family),
            Condition::TcpFlags { mask, is } => {
                Self::is(Field::Flags, is, |value| of_flags(|flags| flags & mask == *value), family)
            }
            Condition::Unknown(_) => Self::Unknown,
        }
    }

    fn of_plain(condition: &Match, family: Family) -> Self {
        let interface = |is: &Is<_>| (of_interface(&is.value), is.not);
        match condition {
            Match::Source(is) | Match::Destination(is) if Family::of(&is.value.addr()) != family => {
                Self::Always(is.not)
            }
            Match::Source(is) => Self::is(Field::Source, is, of_net, family),
            Match::Destination(is) => Self::is(Field::Destination, is, of_net, family),
            Match::InInterface(is) => {
                let (set, not) = interface(is);
                Self::ComesIn(set, not)
            }
            Match::OutInterface(is) => {
                let (set, not) = interface(is);
                Self::GoesOut(set, not)
            }
            Match::Protocol(protocol) => Self::In(Field::Protocol, Set::one(protocol.number().into())),
            Match::SourcePort(is) => Self::is(Field::SourcePort, is, |range| of_ports(&[*range]), family),
            Match::DestinationPort(is) => Self::is(Field::Port, is, |range| of_ports(&[*range]), family),
            Match::DestinationPorts(is) => Self::is(Field::Port, is, |ranges| of_ports(ranges), family),
            Match::TcpFlags(is) => {
                Self::is(Field::Flags, is, |flags: &TcpFlags| of_flags(|all| flags.covers(all)), family)
            }
            Match::Tracked(tracked) => {
                let states = match tracked.state {
                    ConnState::Invalid => return Self::In(Field::State, Set::one(state::INVALID)),
                    ConnState::RelatedOrEstablished => of_states(bits::RELATED | bits::ESTABLISHED),
                };
                let direction = match tracked.direction {
                    None => return Self::In(Field::State, states),
                    Some(direction) => of_direction(direction == Direction::Reply),
                };
                Self::In(Field::State, states.and(&direction))
            }
            Match::OwnerUid(is) => Self::owner(Field::User, is, family),
            Match::OwnerGid(is) => Self::owner(Field::Group, is, family),
            Match::Mark(is) => Self::bits(Field::Mark, is.value.value(), u32::MAX, is.not),
            Match::ConnMark(is) => Self::bits(Field::ConnMark, is.value.value(), is.value.mask(), is.not),
        }
    }

    fn is<T>(field: Field, is: &Is<T>, set: impl Fn(&T) -> Set, family: Family) -> Self {
        let set = set(&is.value);
        Self::In(field, if is.not { set.complement(field.most(family)) } else { set })
    }

    const fn bits(field: Field, value: u32, mask: u32, not: bool) -> Self {
        Self::Bits(field, value, mask, not)
    }

    fn owner(field: Field, is: &Is<u32>, family: Family) -> Self {
        let set = Set::one(is.value.into());
        Self::Owner(field, if is.not { set.complement(field.most(family)) } else { set })
    }
}

fn of_ports(ranges: &[PortRange]) -> Set {
    Set::of(ranges.iter().map(|range| (range.first().into(), range.last().into())).collect())
}

/// The numbers of these states of the kernel.
fn of_states(states: u32) -> Set {
    let each = [
        (bits::NEW, state::NEW, state::NEW),
        (bits::RELATED, state::RELATED, state::RELATED),
        (bits::ESTABLISHED, state::ESTABLISHED, state::REPLY),
        (bits::INVALID, state::INVALID, state::INVALID),
        (bits::UNTRACKED, state::UNTRACKED, state::UNTRACKED),
    ];
    let named = each.into_iter().filter(|(bit, ..)| states & bit != 0);
    Set::of(named.map(|(_, first, last)| (first, last)).collect())
}

fn of_direction(is_reply: bool) -> Set {
    if is_reply { Set::one(state::REPLY) } else { Set::range(state::NEW, state::ESTABLISHED) }
}

fn of_flags(covers: impl Fn(u8) -> bool) -> Set {
    Set::of((0..=u8::MAX).filter(|flags| covers(*flags)).map(|flags| (flags.into(), flags.into())).collect())
}
