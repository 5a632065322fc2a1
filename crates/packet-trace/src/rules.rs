//! Everything that hangs on the hooks for one family, made ready to be walked.

mod accepted;
mod marks;
mod planned;
mod runs;

pub(super) use accepted::Skipped;
use marks::Marks;
use planned::Planned;
use runs::{Run, find_runs};

use super::{
    RuleLocation, RuleOrigin,
    conditions::Test,
    packets::{LO, VariedField, interface, link_local, loopback, number, of_names},
    routes::Routes,
    set::RangeSet,
};
use netfilter_state::{
    route_tables::RouteTables,
    routing::{FoundRouting, RoutingItem},
    ruleset::{
        Api, Base, ChainState, Condition, HookList, HookOwner, HookedRules, InterfaceDirection, KernelRule,
        Plain, Statement, TableFamily, TableName, TableState, VerdictMap, built_in,
    },
    saved::Dump,
};
use redirect_core::{
    DnsCapture,
    accepted::AcceptedBy,
    options::BackendChoice,
    plan::{DataPlane, PlannedRule, RulePlan},
    rule::{Chain, Equality, Hook, Match, OurChain, Rule, Table},
    values::{Family, MaskedMark},
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// Where connection tracking begins (`NF_IP_PRI_CONNTRACK`).
pub(super) const TRACKING: i32 = -200;
/// Where the kernel translates destinations and sources, regardless of the priority of the nat chains
/// (`NF_IP_PRI_NAT_DST`, `NF_IP_PRI_NAT_SRC`).
const TRANSLATION: (i32, i32) = (-100, 100);

/// The rules that packets of a family meet: a plan's, or all that a network namespace holds. [`TraceRules::trace`] sends a packet
/// through them.
#[derive(Debug, Clone)]
pub struct TraceRules {
    pub(super) family: Family,
    pub(super) chains: Vec<WalkedChain>,
    /// The base chains of each hook, in the kernel's order as far as it is known.
    hooks: BTreeMap<Hook, Vec<usize>>,
    /// The hooks with base chains whose order is unknown.
    ties: BTreeSet<Hook>,
    /// Whether a rule writes the class of traffic.
    reclasses: bool,
    /// The base chains that hang on interfaces, with the names of those.
    devices: Vec<(InterfaceDirection, RangeSet, usize)>,
    /// Where connection tracking begins, if the kernel says.
    tracking: BTreeMap<Hook, usize>,
    /// Packets with these marks are delivered to the pod itself, whatever their destination.
    pub(super) local_marks: Vec<MaskedMark>,
    /// The addresses of the network namespace, where they are known.
    pub(super) addresses: Option<RangeSet>,
    /// To which address REDIRECT sends what comes in by an interface, where that is known.
    pub(super) receivers: Option<Receivers>,
    /// The interfaces by which it reaches others; all but loopback, where they are not known.
    pub(super) links: RangeSet,
    /// Its policy rules and routes, where they are known.
    pub(super) routes: Option<Routes>,
    /// The rules and policies whose effect is meant, and who accepts each.
    accepted: BTreeMap<Skipped, AcceptedBy>,
}

/// The first address of each interface, which is where REDIRECT sends what comes in by it (`nf_nat_redirect`).
#[derive(Debug, Clone, Default)]
pub(super) struct Receivers {
    /// By the interface.
    pub(super) first: BTreeMap<u128, IpAddr>,
    /// The same, of the link-local ones: for packets to such an address the kernel takes no other.
    pub(super) first_of_link: BTreeMap<u128, IpAddr>,
}

/// A rule that packets meet, as three indices: base chain, chain, rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ChainRule {
    pub(super) base: usize,
    pub(super) chain: usize,
    pub(super) rule: usize,
    /// How many rules it stands for: this one, and those behind it.
    pub(super) count: usize,
}

/// Whether it is known which of two base chains goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Known,
    Unknown,
}

/// One of the mesh's rules, as [`TraceRules::of_mesh`] lists them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MeshRule<'a> {
    /// Its position.
    pub place: RuleLocation,
    /// Its text, and its counter.
    pub rule: &'a KernelRule,
    /// The settings behind it: one rule with a set may stand for several of a plan. Empty without a plan, or if the rule is not the plan's.
    pub origins: Vec<RuleOrigin>,
}

#[derive(Debug, Clone)]
pub(super) struct WalkedChain {
    pub(super) table: TableName,
    pub(super) name: String,
    pub(super) base: Option<Base>,
    /// Its number in its table, if the kernel gives it one: what was made later has a higher one.
    handle: u64,
    /// Its place among all that hangs on its hook, where the kernel lists it.
    rank: Option<usize>,
    /// The chain of a plan it is.
    pub(super) ours: Option<OurChain>,
    pub(super) rules: Vec<WalkedRule>,
}

#[derive(Debug, Clone)]
pub(super) struct WalkedRule {
    pub(super) seen: KernelRule,
    /// One for each condition.
    pub(super) tests: Vec<Test>,
    /// Where its statements lead, each with its number, of those that lead anywhere.
    pub(super) leads: Vec<(usize, Next)>,
    /// The settings behind it. One rule with a set stands for several of a plan, each of which is about the packets of its test.
    pub(super) origins: Vec<(Option<Test>, RuleOrigin)>,
    /// Whether it is one of the mesh's.
    pub(super) is_own: bool,
    /// The rules that begin with this one and differ in the values of one field only, if several do.
    pub(super) run: Option<Run>,
    /// The cost of evaluating it.
    pub(super) cost: usize,
    /// Whether it stands for rules that were not read, of which one may be the mesh's.
    pub(super) is_unread: bool,
}

/// Where a statement leads to.
#[derive(Debug, Clone)]
pub(super) enum Next {
    /// To a chain.
    To(usize),
    /// To the next one, for packets that fulfil this.
    If(Test),
    /// To the result of a lookup in a map.
    By(Answers),
}

/// What a map says.
#[derive(Debug, Clone)]
pub(super) enum Answers {
    /// Of the values of one field, by ranges in order and apart; of all others the last. Each is the number of a verdict, and of all verdicts that
    /// are the same, the first.
    OfField(VariedField, Vec<(u128, u128, usize)>, Option<usize>, BTreeMap<usize, Option<usize>>),
    /// Of several fields at once: its elements, in the order in which they are asked.
    Each(Vec<MapElement>),
}

/// An element of a map.
#[derive(Debug, Clone)]
pub(super) struct MapElement {
    /// Whether a packet has its values.
    pub(super) test: Test,
    /// The number of its verdict, ...
    pub(super) verdict: usize,
    /// ... and the chain that one leads to.
    pub(super) to: Option<usize>,
}

impl TraceRules {
    /// The rules of a plan, as if no other program had any.
    ///
    /// ```
    /// use packet_trace::{Fate, Listener, Packet, TraceRules};
    /// use redirect_core::{Families, Family, Redirect};
    ///
    /// let plan = Redirect::sidecar(Families::V4).build()?.plan();
    /// let rules = TraceRules::of_plan(&plan, Family::V4);
    /// let packet = Packet::from_pod(1000, 1000, "10.1.0.2:40000".parse()?, "192.0.2.1:80".parse()?).by("eth0");
    /// let trace = rules.trace(&packet);
    /// assert_eq!(trace.fate(), Fate::Proxy { listener: Listener::Outbound, port: 15001, rewritten: true });
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn of_plan(plan: &RulePlan, family: Family) -> Self {
        Self::of_chains(plan, family, chains_of_family(&plan.explained_rules(family), family))
    }

    /// The same in native tables of nftables. They are of both families, so a rule that names no address is about both, whatever
    /// families the plan is for.
    #[must_use]
    pub fn of_native_plan(plan: &RulePlan, family: Family) -> Self {
        let name = |table| TableName {
            api: Api::NfTables,
            family: TableFamily::Inet,
            name: plan.data_plane().nft_table(table).into(),
        };
        Self::of_chains(plan, family, planned_chains(&plan.merged_rules(), family, name, of_both_families))
    }

    /// Whichever of the two this backend programs.
    #[must_use]
    pub fn of_plan_in(plan: &RulePlan, family: Family, backend: BackendChoice) -> Self {
        match backend {
            BackendChoice::NativeNft => Self::of_native_plan(plan, family),
            BackendChoice::Auto | BackendChoice::Netlink | BackendChoice::Restore(_) => {
                Self::of_plan(plan, family)
            }
        }
    }

    fn of_chains(plan: &RulePlan, family: Family, chains: Vec<WalkedChain>) -> Self {
        Self { chains, ..Self::empty(family) }.finish(&RoutingItem::wanted(plan))
    }

    /// Everything that a network namespace holds: rules of the mesh by any backend, and those of other programs as far as
    /// they are supported. With a plan, its own rules know the settings behind them.
    #[must_use]
    pub fn of_ruleset(
        ruleset: &HookedRules,
        routing: &[FoundRouting],
        family: Family,
        plan: Option<&RulePlan>,
    ) -> Self {
        let planned = plan.map(|plan| match plan.explained_rules(family) {
            // Native tables have the rules of a plan for the other family, too.
            none if none.is_empty() => plan.merged_rules(),
            rules => rules,
        });
        let planned = chains_of_family(&planned.unwrap_or_default(), family);
        Self::of_ruleset_beside(ruleset, routing, family, &planned)
    }

    /// The same with these chains of a plan.
    pub(crate) fn of_ruleset_beside(
        ruleset: &HookedRules,
        routing: &[FoundRouting],
        family: Family,
        planned: &[WalkedChain],
    ) -> Self {
        let reading = Reading { family, hooks: ruleset.hooks.as_ref(), planned };
        let mut rules = Self::empty(family);
        let tables = || ruleset.tables.iter().filter(|(name, _)| name.family.covers(family));
        rules.chains.reserve(tables().map(|(_, table)| table.chains.len()).sum());
        for (name, table) in tables() {
            let updated = updated_sets(table);
            let (begin, names) = (rules.chains.len(), table.chains.keys().collect::<Vec<_>>());
            let number_of = |to: &String| names.binary_search(&to).ok().map(|at| begin.saturating_add(at));
            for (chain_name, chain) in &table.chains {
                // A dormant table's chains hang on no hook, and on no interface.
                if let Some(device) = chain.device.as_ref().filter(|_| !table.dormant) {
                    rules.devices.push((device.direction, of_names(&device.devices), rules.chains.len()));
                }
                let base = chain.base.filter(|_| !table.dormant);
                let mut walked = reading.chain(name, (chain_name, chain), base, (&updated, &number_of));
                // The kernel has a chain for every jump: one that is missing was not read, or is another program's target.
                walked.doubt_unread(|to| !table.chains.contains_key(to));
                if chain.is_partial {
                    walked.rules.push(WalkedRule {
                        is_unread: true,
                        ..WalkedRule::unknown("more rules than are read".into(), family)
                    });
                }
                rules.chains.push(walked);
            }
        }
        if let Some(hooks) = &ruleset.hooks {
            rules.add_unread(hooks, ruleset);
        }
        let routing: Vec<RoutingItem> =
            routing.iter().filter(|found| found.works()).map(|found| found.item).collect();
        rules.finish(&routing)
    }

    /// What iptables-save printed of a network namespace: all its rules, if no others are there. Routing, which it does not print, is taken to
    /// be as the plan wants it.
    ///
    /// ```
    /// use netfilter_state::saved::Dump;
    /// use packet_trace::{Fate, Packet, TraceRules};
    /// use redirect_core::{Families, Family, Redirect};
    ///
    /// let plan = Redirect::sidecar(Families::V4).build()?.plan();
    /// let saved = plan.rules(Family::V4).restore_text() + "*raw\n-A OUTPUT -d 192.0.2.1/32 -j DROP\nCOMMIT\n";
    /// let rules = TraceRules::of_dump(&Dump::read(Family::V4, &saved)?, &plan);
    /// let to = |address: &str| Packet::from_pod(1000, 1000, "10.1.0.2:40000".parse().unwrap(), address.parse().unwrap());
    /// assert!(matches!(rules.fate(&to("192.0.2.9:80")), Fate::Proxy { port: 15001, .. }));
    /// assert_eq!(rules.fate(&to("192.0.2.1:80")), Fate::Dropped);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn of_dump(dump: &Dump, plan: &RulePlan) -> Self {
        let routing: Vec<FoundRouting> = FoundRouting::all_working(plan);
        Self::of_ruleset(dump.ruleset(), &routing, dump.family(), Some(plan))
    }

    /// The same, of a network namespace with these addresses, which rules may ask for.
    #[must_use]
    pub fn with_addresses(mut self, addresses: &[IpAddr]) -> Self {
        let own = addresses.iter().filter(|address| Family::of(address) == self.family);
        self.addresses = Some(RangeSet::each(own.copied().map(number)).or(&loopback(self.family)));
        self
    }

    /// The same, of a network namespace whose interfaces have these addresses, in the kernel's order: what comes in by one,
    /// REDIRECT sends to its first address. Without them, REDIRECT is taken to keep a packet's destination.
    #[must_use]
    pub fn with_interfaces(mut self, addresses: &[(String, IpAddr)]) -> Self {
        let mut receivers = Receivers::default();
        for (name, address) in addresses.iter().filter(|(_, address)| Family::of(address) == self.family) {
            let by = interface(name);
            receivers.first.entry(by).or_insert(*address);
            if link_local(self.family).contains(number(*address)) {
                receivers.first_of_link.entry(by).or_insert(*address);
            }
        }
        self.receivers = Some(receivers);
        self
    }

    /// The same, of a network namespace that reaches others by these interfaces alone, if any is named.
    pub(crate) fn with_links(mut self, names: &[String]) -> Self {
        if !names.is_empty() {
            self.links = RangeSet::each(names.iter().map(|name| interface(name)));
        }
        self
    }

    /// Whether REDIRECT has an address for what comes in by some interface.
    pub(super) fn has_receiver(&self) -> bool {
        self.receivers.as_ref().is_some_and(|receivers| receivers.first.keys().any(|by| *by != LO))
    }

    /// Whether a rule of the mesh sends packets to the proxy's listener of DNS.
    pub(super) fn captures_dns(&self) -> bool {
        let of_dns = Some(DnsCapture::PORT.number());
        self.chains.iter().any(|chain| {
            let mut statements = chain.rules.iter().flat_map(|rule| &rule.seen.statements);
            chain.ours == Some(OurChain::OutputDns)
                || statements.any(|one| matches!(one, Statement::Redirect(port) | Statement::Tproxy { port, .. } if *port == of_dns))
        })
    }

    /// Marks by which rules of other programs distinguish packets.
    pub(super) fn marks_asked(&self) -> RangeSet {
        let foreign = self.chains.iter().flat_map(|chain| &chain.rules).filter(|rule| !rule.is_own);
        let mut marks = Marks::default();
        foreign.for_each(|rule| rule.each_test(&mut |test| marks.add(test)));
        marks.into_set()
    }

    /// The same, of a network namespace with these policy rules and routes. If not all of them were read, none of them
    /// counts, because any packet may go by another.
    #[must_use]
    pub fn with_routes(mut self, tables: &RouteTables) -> Self {
        self.routes = tables.complete.then(|| Routes::of(tables, self.family));
        self
    }

    fn empty(family: Family) -> Self {
        Self {
            family,
            chains: Vec::new(),
            hooks: BTreeMap::new(),
            ties: BTreeSet::new(),
            reclasses: false,
            devices: Vec::new(),
            tracking: BTreeMap::new(),
            local_marks: Vec::new(),
            addresses: None,
            receivers: None,
            links: RangeSet::one(LO).complement(u128::MAX),
            routes: None,
            accepted: BTreeMap::new(),
        }
    }

    /// What hangs on hooks and cannot be read: programs, functions of other modules, unlisted legacy tables.
    fn add_unread(&mut self, hooks: &HookList, ruleset: &HookedRules) {
        for hook in Hook::ALL.iter().copied() {
            for (rank, entry) in hooks.on(self.family, hook).iter().enumerate() {
                let (name, words) = match &entry.owner {
                    HookOwner::Tracking => {
                        self.tracking.insert(hook, rank);
                        continue;
                    }
                    HookOwner::Legacy(table) => {
                        let (api, family) = (Api::XTables, TableFamily::from(self.family));
                        let name = TableName { api, family, name: table.clone() };
                        if ruleset.tables.contains_key(&name) {
                            continue;
                        }
                        (name, format!("legacy table {table}, which could not be read"))
                    }
                    HookOwner::Unknown(function) => {
                        let (api, family) = (Api::Function, TableFamily::from(self.family));
                        (TableName { api, family, name: function.clone() }, function.clone())
                    }
                    HookOwner::Chain(name, chain) => {
                        let is_read = |table: &TableState| {
                            table.chains.get(chain).is_some_and(|chain| chain.base.is_some())
                        };
                        if ruleset.tables.get(name).is_some_and(is_read) {
                            continue;
                        }
                        (name.clone(), format!("chain {}, which could not be read", Plain(chain)))
                    }
                    HookOwner::Nat | HookOwner::Harmless(_) => continue,
                };
                let rules = [WalkedRule::unknown(words, self.family)].into();
                let priority = entry.priority;
                let base = Base { hook, priority, is_nat: false, drops: false, reroutes: false };
                let unread = WalkedChain::of(name, hook.name(), Some(base), rules);
                self.chains.push(WalkedChain { rank: Some(rank), ..unread });
            }
        }
    }

    fn finish(mut self, routing: &[RoutingItem]) -> Self {
        for (number, chain) in self.chains.iter().enumerate() {
            let is_of_device = self.devices.iter().any(|(_, _, device)| *device == number);
            if let Some(base) = chain.base.filter(|_| !is_of_device) {
                self.hooks.entry(base.hook).or_default().push(number);
            }
        }
        let key = |number: &usize| {
            let chain = self.chains.get(*number)?;
            Some((order(chain.base?), chain.rank.unwrap_or(usize::MAX), &chain.table, Reverse(chain.handle)))
        };
        for chains in self.hooks.values_mut() {
            chains.sort_by_key(key);
        }
        self.devices.sort_by_key(|(_, _, number)| self.chains.get(*number)?.base.map(order));
        for (hook, chains) in &self.hooks {
            if chains.windows(2).any(|two| matches!(two, [a, b] if self.order(*a, *b) == Order::Unknown)) {
                self.ties.insert(*hook);
            }
        }
        let mut statements =
            self.chains.iter().flat_map(|chain| &chain.rules).flat_map(|rule| &rule.seen.statements);
        self.reclasses = statements.any(|one| matches!(one, Statement::SetClass(_)));
        self.chains.iter_mut().for_each(|chain| find_runs(&mut chain.rules));
        let has_route = |table| routing.contains(&RoutingItem::Route(self.family, table));
        self.local_marks = routing
            .iter()
            .filter_map(|item| match item {
                RoutingItem::Rule(family, mark, table) if *family == self.family && has_route(*table) => {
                    Some(*mark)
                }
                RoutingItem::Rule(..) | RoutingItem::Route(..) | RoutingItem::LoopbackAddress => None,
            })
            .collect();
        self
    }

    /// The same without what no verdict needs: of the mesh's rules that are asked together with the first of them, all but that one. A plan
    /// may have any number.
    pub(crate) fn thinned(mut self) -> Self {
        for chain in &mut self.chains {
            let mut covered = 0_usize;
            for rule in &mut chain.rules {
                if covered > 0 && rule.is_own {
                    (rule.tests, rule.leads, rule.origins) = Default::default();
                    rule.seen = KernelRule::default();
                }
                let of_run = rule.run.as_ref().map_or(1, |run| run.count);
                covered = covered.max(of_run).saturating_sub(1);
            }
        }
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
                is_native || rule.is_own || leads_there || belongs(&chain.name)
            });
            rules.map(|(number, rule)| MeshRule {
                place: chain.place(Some(number)),
                rule: &rule.seen,
                origins: rule.origins.iter().map(|(_, origin)| *origin).collect(),
            })
        })
    }

    /// The base chains of a hook, in the kernel's order.
    pub(super) fn hooked(&self, hook: Hook) -> &[usize] {
        self.hooks.get(&hook).map_or(&[], Vec::as_slice)
    }

    /// The base chains of interfaces, each with the names of its own.
    pub(super) fn on_devices(
        &self,
        direction: InterfaceDirection,
    ) -> impl Iterator<Item = (&RangeSet, usize)> {
        let all = self.devices.iter().filter(move |(of, ..)| *of == direction);
        all.map(|(_, names, number)| (names, *number))
    }

    pub(super) fn base(&self, number: usize) -> Option<(&WalkedChain, Base)> {
        let chain = self.chains.get(number)?;
        Some((chain, chain.base?))
    }

    /// Whether a base chain does nothing with any packet, and what comes behind it depends on nothing that it asks.
    pub(super) fn is_idle(&self, number: usize) -> bool {
        self.base(number).is_some_and(|(chain, base)| {
            // Connections that are known find their destination there; behind it what was reclassed is routed again.
            let of_destination = base.is_nat && matches!(base.hook, Hook::Prerouting | Hook::Output);
            let has_effect = base.drops || of_destination || base.reroutes && self.reclasses;
            chain.rules.is_empty() && !has_effect && base.priority != TRACKING && !self.has_ties(base.hook)
        })
    }

    pub(super) fn base_name(&self, number: usize) -> String {
        let chain = self.chains.get(number);
        chain.map(|chain| format!("table {} chain {}", chain.table, Plain(&chain.name))).unwrap_or_default()
    }

    /// Whether it is known which of some base chains of a hook goes first.
    pub(super) fn has_ties(&self, hook: Hook) -> bool {
        self.ties.contains(&hook)
    }

    /// The order of two base chains of a hook, as listed. At equal priority, the one registered last goes first
    /// (`nf_hook_entries_grow`).
    pub(super) fn order(&self, first: usize, second: usize) -> Order {
        let (Some((one, base)), Some((two, other))) = (self.base(first), self.base(second)) else {
            return Order::Known;
        };
        let (key, other_key) = (order(base), order(other));
        let are_listed = one.rank.is_some() && two.rank.is_some();
        let are_numbered = one.table == two.table && one.handle != two.handle;
        let differ = if base.is_nat == other.is_nat { key != other_key } else { key.0 != other_key.0 };
        if differ || are_listed || are_numbered { Order::Known } else { Order::Unknown }
    }

    /// Whether connection tracking comes before a base chain at its own priority; `None` if the kernel does not report it.
    pub(super) fn is_behind_tracking(&self, chain: usize) -> Option<bool> {
        let (chain, base) = self.base(chain)?;
        Some(*self.tracking.get(&base.hook)? < chain.rank?)
    }

    pub(super) fn is_own(&self, rule: ChainRule) -> bool {
        self.rule(rule).is_some_and(|rule| rule.is_own)
    }

    pub(super) fn rule(&self, at: ChainRule) -> Option<&WalkedRule> {
        self.chains.get(at.chain)?.rules.get(at.rule)
    }
}

/// The rules of a plan, chain by chain.
type PlannedTables<'a> = BTreeMap<Table, BTreeMap<Chain, Vec<&'a PlannedRule>>>;

/// The chains of a plan's tables as they stand in those of one family.
fn chains_of_family(tables: &PlannedTables<'_>, family: Family) -> Vec<WalkedChain> {
    let name =
        |table: Table| TableName { api: Api::NfTables, family: family.into(), name: table.name().into() };
    planned_chains(tables, family, name, |rule| KernelRule::from(rule))
}

/// The chains of a plan's tables, each under its name.
fn planned_chains(
    tables: &PlannedTables<'_>,
    family: Family,
    name: impl Fn(Table) -> TableName,
    seen: impl Fn(&Rule) -> KernelRule,
) -> Vec<WalkedChain> {
    let mut walked: Vec<WalkedChain> = Vec::new();
    for (table, chains) in tables {
        let begin = walked.len();
        let number_of = |to: &String| {
            let at = chains.keys().position(|chain| chain.name() == to)?;
            Some(begin.saturating_add(at))
        };
        for (chain, planned) in chains {
            let base =
                if let Chain::Hook(hook) = chain { built_in(table.name(), *hook, false) } else { None };
            let ours = if let Chain::Ours(ours) = chain { Some(*ours) } else { None };
            let rules_of_chain = planned.iter().map(|planned| {
                let mut rule = WalkedRule::of(seen(planned.rule()), &number_of, family);
                (rule.origins, rule.is_own) = ([(None, RuleOrigin::of(planned))].into(), true);
                rule
            });
            let planned = WalkedChain::of(name(*table), chain.name(), base, rules_of_chain.collect());
            walked.push(WalkedChain { ours, ..planned });
        }
    }
    walked
}

/// A rule of a plan as it stands in a table of both families: one that names an address is about that one's family alone.
fn of_both_families(rule: &Rule) -> KernelRule {
    let mut seen = KernelRule::from(rule);
    let family = rule.matches.iter().find_map(|condition| {
        let (Match::Source(is) | Match::Destination(is)) = condition else { return None };
        Some(Family::of(&is.value.addr()))
    });
    if let Some(value) = family {
        seen.conditions.insert(0, Condition::Family(Equality { value, not: false }));
    }
    seen
}

/// The cost of evaluating these.
fn cost(tests: &[Test]) -> usize {
    tests.iter().map(Test::size).sum::<usize>().saturating_div(8).saturating_add(1)
}

const fn base_of_device(device: &netfilter_state::ruleset::DeviceBase) -> Base {
    // The nearest hook of IP stands in; the chain is not registered there.
    let hook = match device.direction {
        InterfaceDirection::Ingress => Hook::Prerouting,
        InterfaceDirection::Egress => Hook::Postrouting,
    };
    Base { hook, priority: device.priority, is_nat: false, drops: device.drops, reroutes: false }
}

/// Chains that translate are asked together, in the order of their priorities.
const fn order(base: Base) -> (i32, i32) {
    match (base.is_nat, base.hook) {
        (false, _) => (base.priority, 0),
        (true, Hook::Prerouting | Hook::Output) => (TRANSLATION.0, base.priority),
        (true, Hook::Input | Hook::Forward | Hook::Postrouting) => (TRANSLATION.1, base.priority),
    }
}

fn holds_plans_table(name: &TableName, table: Table) -> bool {
    match name.family {
        TableFamily::Inet => {
            DataPlane::BOTH.into_iter().any(|data_plane| name.name == data_plane.nft_table(table))
        }
        TableFamily::Ip | TableFamily::Ip6 => name.name == table.name(),
        TableFamily::Netdev => false,
    }
}

/// The sets of a table that packets change: what is in one by the time when a packet asks is not known.
fn updated_sets(table: &TableState) -> BTreeSet<&str> {
    let statements = table.chains.values().flat_map(|chain| &chain.rules).flat_map(|rule| &rule.statements);
    statements
        .filter_map(|one| if let Statement::Updates(set) = one { Some(set.as_str()) } else { None })
        .collect()
}

/// Whether a condition asks for one of these sets.
fn asks_one_of(condition: &Condition, sets: &BTreeSet<&str>) -> bool {
    matches!(condition, Condition::Among(is) if is.value.name.as_deref().is_some_and(|name| sets.contains(name)))
}

/// How a ruleset is made ready to be walked.
struct Reading<'a> {
    family: Family,
    hooks: Option<&'a HookList>,
    planned: &'a [WalkedChain],
}

impl Reading<'_> {
    fn chain(
        &self,
        table: &TableName,
        (name, chain): (&str, &ChainState),
        base: Option<Base>,
        (updated, number_of): (&BTreeSet<&str>, &impl Fn(&String) -> Option<usize>),
    ) -> WalkedChain {
        let of_plan = Table::ALL.iter().copied().find(|one| holds_plans_table(table, *one));
        // Of the names of a plan's chains, in either form.
        let is_its_name = |ours: &&OurChain| {
            let is_lower = name.starts_with(|first: char| first.is_ascii_lowercase());
            ours.name() == name || is_lower && Chain::from(**ours).nft_name() == name
        };
        let ours = of_plan.and_then(|_| OurChain::ALL.iter().find(is_its_name).copied());
        let hook = |base: Base| base.hook;
        let is_it = |one: &&WalkedChain| {
            let is_same = one.ours == ours && (ours.is_some() || one.base.map(hook) == chain.base.map(hook));
            is_same && of_plan.is_some_and(|table| one.table.name == table.name())
        };
        let candidates = self.planned.iter().find(is_it).map_or(&[][..], |chain| &chain.rules);
        // Without a plan, what its chains hold is taken to be the mesh's.
        let is_own_chain = ours.is_some() && self.planned.is_empty();
        let mut planned = Planned::of(candidates);
        let walked = chain.rules.iter().map(|seen| {
            let mut rule = WalkedRule::of(seen.clone(), number_of, self.family);
            rule.doubt(updated);
            let (origins, is_in_place) = planned.find(seen, self.family);
            (rule.origins, rule.is_own) = (origins, is_own_chain || is_in_place);
            rule
        });
        let rank = base.and_then(|base| self.rank(table, name, base.hook));
        let base = base.or_else(|| chain.device.as_ref().map(base_of_device));
        let handle = chain.handle;
        WalkedChain { handle, rank, ours, ..WalkedChain::of(table.clone(), name, base, walked.collect()) }
    }

    /// The place of a base chain among all that hangs on its hook.
    fn rank(&self, table: &TableName, chain: &str, hook: Hook) -> Option<usize> {
        let is_it = |owner: &HookOwner| match table.api {
            Api::XTables => *owner == HookOwner::Legacy(table.name.clone()),
            Api::NfTables | Api::Function => {
                matches!(owner, HookOwner::Chain(of, name) if of == table && name == chain)
            }
        };
        self.hooks?.on(self.family, hook).iter().position(|entry| is_it(&entry.owner))
    }
}

impl Next {
    /// None where it leads nowhere, or to a chain that is missing.
    fn of(
        statement: &Statement,
        number_of: &impl Fn(&String) -> Option<usize>,
        family: Family,
    ) -> Option<Self> {
        let chain = |statement: &Statement| {
            let (Statement::Jump(to) | Statement::Goto(to)) = statement else { return None };
            number_of(to)
        };
        if let Statement::Map(map) = statement {
            return Some(Self::By(Answers::of(map, &chain, family)));
        }
        if let Statement::If(condition) = statement {
            return Some(Self::If(Test::of(condition, family)));
        }
        chain(statement).map(Self::To)
    }
}

impl Answers {
    fn of(map: &VerdictMap, chain: &impl Fn(&Statement) -> Option<usize>, family: Family) -> Self {
        Self::of_field(map, chain, family).unwrap_or_else(|| {
            let element = |verdict: usize| {
                let values = map.among.values.get(verdict)?;
                let test = Test::of_values(&map.among.selectors, values, family);
                Some(MapElement { test, verdict, to: map.verdicts.get(verdict).and_then(chain) })
            };
            Self::Each(map.asked().filter_map(element).collect())
        })
    }

    /// None where it is about more than one field, or about more than the packet's own.
    fn of_field(
        map: &VerdictMap,
        chain: &impl Fn(&Statement) -> Option<usize>,
        family: Family,
    ) -> Option<Self> {
        let [selector] = map.among.selectors.as_slice() else { return None };
        let field = Test::field_of(*selector, family)?;
        // The first of those that say the same; a handful, whatever the number of elements.
        let mut firsts: Vec<usize> = Vec::new();
        let mut first_like = |verdict: usize| -> Option<usize> {
            let says = map.verdicts.get(verdict)?;
            let known =
                firsts.iter().rev().take(MOST_ALIKE).find(|one| map.verdicts.get(**one) == Some(says));
            let first = known.copied().unwrap_or(verdict);
            if known.is_none() {
                firsts.push(verdict);
            }
            Some(first)
        };
        let (mut ranges, mut rest, mut to) = (Vec::new(), None, BTreeMap::new());
        for verdict in map.asked() {
            let first = first_like(verdict)?;
            to.entry(first).or_insert_with(|| map.verdicts.get(first).and_then(chain));
            match map.among.values.get(verdict)?.as_slice() {
                [range] if map.among.is_every(verdict) => rest = rest.or(Some((*range, first))),
                [(begin, end)] => ranges.push((*begin, *end, first)),
                _ => return None,
            }
        }
        ranges.sort_unstable();
        let are_apart = ranges.windows(2).all(|two| matches!(two, [(_, end, _), (begin, ..)] if end < begin));
        are_apart.then(|| Self::OfField(field, ranges, rest.map(|(_, first)| first), to))
    }
}

impl WalkedChain {
    /// One of no plan, without a handle, at an unknown place.
    fn of(table: TableName, name: &str, base: Option<Base>, rules: Vec<WalkedRule>) -> Self {
        Self { table, name: name.into(), base, handle: 0, rank: None, ours: None, rules }
    }

    /// Its position, or that of one of its rules.
    pub(super) fn place(&self, rule: Option<usize>) -> RuleLocation {
        RuleLocation { table: self.table.clone(), chain: self.name.clone(), rule }
    }

    /// Where its rules lead to chains that were not read is not known.
    fn doubt_unread(&mut self, is_unread: impl Fn(&str) -> bool) {
        let doubt = |statement: &mut Statement| {
            if let Statement::Jump(to) | Statement::Goto(to) = statement
                && is_unread(to)
            {
                *statement = Statement::Unknown(format!("chain {}, which could not be read", Plain(to)));
            }
        };
        for statement in self.rules.iter_mut().flat_map(|rule| &mut rule.seen.statements) {
            if let Statement::Map(map) = statement {
                map.verdicts.iter_mut().for_each(doubt);
            } else {
                doubt(statement);
            }
        }
    }
}

/// Among how many different verdicts of a map the same one is looked for.
const MOST_ALIKE: usize = 16;

impl WalkedRule {
    /// One that leads to the chains of these numbers.
    fn of(seen: KernelRule, number_of: &impl Fn(&String) -> Option<usize>, family: Family) -> Self {
        let tests: Vec<Test> = seen.conditions.iter().map(|condition| Test::of(condition, family)).collect();
        let statements = seen.statements.iter().enumerate();
        let leads =
            statements.filter_map(|(at, one)| Some((at, Next::of(one, number_of, family)?))).collect();
        let cost = cost(&tests);
        Self { seen, tests, leads, origins: Vec::new(), is_own: false, run: None, cost, is_unread: false }
    }

    /// One that may do anything.
    fn unknown(words: String, family: Family) -> Self {
        let statements = [Statement::Unknown(words)].into();
        Self::of(KernelRule { statements, ..KernelRule::default() }, &|_| None, family)
    }

    /// What it asks of these sets is not known.
    fn doubt(&mut self, sets: &BTreeSet<&str>) {
        if sets.is_empty() {
            return;
        }
        for (test, condition) in self.tests.iter_mut().zip(&self.seen.conditions) {
            if asks_one_of(condition, sets) {
                *test = Test::Unknown;
            }
        }
        for (number, leads) in &mut self.leads {
            if let Some(Statement::If(condition)) = self.seen.statements.get_mut(*number)
                && asks_one_of(condition, sets)
            {
                *condition = Condition::Unknown(condition.to_string());
                *leads = Next::If(Test::Unknown);
            }
        }
    }

    /// A condition in words.
    pub(super) fn condition(&self, number: usize) -> String {
        self.seen.conditions.get(number).map(ToString::to_string).unwrap_or_default()
    }
}
