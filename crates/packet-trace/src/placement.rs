//! Where a plan's policy routing has to stand so that it delivers in the pod what it is there for.
//!
//! A plan in ambient mode or with TPROXY needs that packets with its mark reach the pod itself. Policy rules of other programs may take
//! them before: [`Placement::of`] sends all of them through the policy rules and routes of a namespace, and chooses a table that no other
//! program uses, and a priority before what takes them. Packets that no route could carry anyway are not asked about.

use super::{
    Packet, Sender, TraceRules,
    interference::{example, multicast},
    packets::{Packets, VariedField, interface, link_local, loopback, number},
    routes::RouteEnd,
    set::RangeSet,
    walk::{RouteLookup, Routed, routed},
};
use netfilter_state::{
    route_tables::{PolicyRule, Route, RouteKind, RouteTables, RuleAction},
    routing::{FoundRouting, RoutingItem},
    ruleset::HookedRules,
};
use redirect_core::{
    ipnet::IpNet,
    plan::{DataPlane, PolicyRoutes, RulePlan},
    rule::{Protocol, TcpFlags},
    values::{Family, RouteTable, is_routable},
};
use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, SocketAddr},
};

/// How many priorities are tried.
const MOST_TRIES: usize = 64;
/// About how many sets of packets the kernel is asked at most.
const MOST_ASKED: usize = 16;

/// Packets that a plan's mark has to bring to the pod itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MarkedTraffic {
    /// What the application answers to the address of a client, in whose name the proxy has connected.
    Answers,
    /// What TPROXY hands over.
    Arrivals,
}

impl fmt::Display for MarkedTraffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Answers => "the application's answers to the proxy",
            Self::Arrivals => "inbound connections",
        })
    }
}

/// What keeps marked packets from the pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// Their family.
    pub family: Family,
    /// Which packets.
    pub traffic: MarkedTraffic,
    /// One of them.
    pub example: Packet,
    /// What takes them, in words.
    pub by: String,
    /// The policy rule that takes them, if one does.
    pub rule: Option<PolicyRule>,
    /// Whether it does for certain; otherwise it depends on what is not modelled.
    pub is_certain: bool,
}

impl fmt::Display for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { traffic, example, by, is_certain, .. } = self;
        let takes = if *is_certain { "takes" } else { "may take" };
        let source = example.source.zip(example.source_port).map(SocketAddr::from);
        let source = source.map(|source| format!("{source} to ")).unwrap_or_default();
        write!(f, "{by} {takes} {traffic} (such as {source}{})", example.destination)
    }
}

/// Why a plan's policy routing cannot work in a namespace, wherever it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RoutingObstacle {
    /// Another program's policy rule is about the very mark.
    MarkInUse(Box<Taken>),
    /// Something takes the packets first, whatever the priority.
    Taken(Box<Taken>),
    /// Every table that could be chosen is another program's; this is the first of them, and what it is used for.
    NoTable(RouteTable, String),
}

impl fmt::Display for RoutingObstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("does not converge: ")?;
        match self {
            Self::MarkInUse(taken) => {
                write!(
                    f,
                    "{taken}: another program uses the same mark; change that rule, or the mark of one of them"
                )
            }
            Self::Taken(taken) => {
                write!(
                    f,
                    "{taken}, and no policy rule of the mesh can stand before it; give it a later priority, or remove it"
                )
            }
            Self::NoTable(table, why) => {
                write!(f, "table {table} is another program's ({why}), and no other is free")
            }
        }
    }
}

/// A plan as it fits into a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The plan, with the table and priority of its policy routing there.
    pub plan: RulePlan,
    /// What keeps the policy routing that is there from its effect.
    pub flaws: Vec<Taken>,
    /// Why it cannot have it at all.
    pub obstacle: Option<RoutingObstacle>,
}

impl Placement {
    /// Where a plan's policy routing has to stand among these policy rules and routes. `ask` asks the kernel whether it delivers a packet in the
    /// pod itself, if it can be asked: its word counts more than the model's.
    #[must_use]
    pub fn of(plan: &RulePlan, tables: &RouteTables, mut ask: impl FnMut(&Packet) -> Option<bool>) -> Self {
        let mut placement = Self { plan: plan.clone(), flaws: Vec::new(), obstacle: None };
        let Some(wanted) = plan.policy_routes() else { return placement };
        let seen = Seen { plan, wanted, tables };
        let table = match seen.table() {
            Ok(table) => table,
            Err(why) => {
                placement.obstacle = Some(RoutingObstacle::NoTable(wanted.table(), why));
                return placement;
            }
        };
        placement.plan = plan.clone().with_policy_routing(table, wanted.priority());
        let mut to_place = Vec::new();
        for family in wanted.families().iter().copied() {
            if seen.has_rule(family, table) {
                let taken = seen.taken_now(family, table, &mut ask);
                if taken.is_none() {
                    continue;
                }
                // Another place would not change what no policy rule does.
                if let Some(taken) = taken.as_ref().filter(|taken| taken.rule.is_none()) {
                    placement.obstacle = Some(RoutingObstacle::Taken(Box::new(taken.clone())));
                    return placement;
                }
                placement.flaws.extend(taken);
            }
            to_place.push(family);
        }
        if to_place.is_empty() {
            return placement;
        }
        let may_work = !placement.flaws.is_empty()
            && placement.flaws.len() == to_place.len()
            && placement.flaws.iter().all(|flaw| !flaw.is_certain);
        let chosen = match seen.priority(&to_place, table, true) {
            // Nothing would make it certain, and perhaps it works.
            Err(_) if may_work => {
                placement.flaws.clear();
                return placement;
            }
            Err(_) => seen.known_priority(&to_place, table, &placement.flaws),
            certain @ Ok(_) => certain,
        };
        match chosen {
            Ok(priority) => placement.plan = plan.clone().with_policy_routing(table, priority),
            // What works in a table that another program uses as well is not given up for what would not.
            Err(_) if seen.works_in(wanted.table(), &mut ask) => {
                return Self { plan: plan.clone(), flaws: Vec::new(), obstacle: None };
            }
            Err(obstacle) => placement.obstacle = Some(obstacle),
        }
        placement
    }

    /// Notes on policy rules that were found what keeps them from their effect.
    pub fn judge(&self, found: &mut [FoundRouting]) {
        let Some(routes) = self.plan.policy_routes() else { return };
        for taken in &self.flaws {
            let item = RoutingItem::Rule(taken.family, routes.mark(), routes.table());
            for one in found.iter_mut().filter(|one| one.item == item && one.flaw.is_none()) {
                one.flaw = Some(taken.to_string());
            }
        }
    }
}

/// What a plan's policy routing finds in a namespace.
struct Seen<'a> {
    plan: &'a RulePlan,
    wanted: &'a PolicyRoutes,
    tables: &'a RouteTables,
}

impl Seen<'_> {
    /// Where a policy rule leads that is as the plan has it, of any priority and to any table that it may have.
    fn leads(&self, rule: &PolicyRule) -> Option<RouteTable> {
        let mark = self.wanted.mark();
        let is_ours = rule.mark == Some((mark.value(), mark.mask())) && rule.limits().is_empty();
        let RuleAction::Lookup(table) = rule.action else { return None };
        let may_have = table == self.wanted.table().number() || RoutingItem::CHOSEN_TABLES.contains(&table);
        if is_ours && may_have { RouteTable::new(table) } else { None }
    }

    fn rules(&self, family: Family) -> impl Iterator<Item = &PolicyRule> {
        self.tables.rules.iter().filter(move |rule| rule.family == family)
    }

    fn has_rule(&self, family: Family, table: RouteTable) -> bool {
        self.rules(family)
            .any(|rule| self.leads(rule) == Some(table) && rule.priority < RouteTables::MAIN_PRIORITY)
    }

    /// The table: one that an earlier run has chosen, the plan's, or the first that is free.
    fn table(&self) -> Result<RouteTable, String> {
        let own = self.wanted.table();
        let used = self.used_by_others(own);
        if used.is_none() {
            return Ok(own);
        }
        let of_families = |rule: &&PolicyRule| self.wanted.families().contains(&rule.family);
        let known = self.tables.rules.iter().filter(of_families).filter_map(|rule| self.leads(rule));
        let all = known.chain(RoutingItem::CHOSEN_TABLES.filter_map(RouteTable::new));
        let mut free = all.filter(|table| {
            RoutingItem::CHOSEN_TABLES.contains(&table.number()) && self.used_by_others(*table).is_none()
        });
        free.next().ok_or_else(|| used.unwrap_or_default())
    }

    /// What another program uses a table for, if one does.
    fn used_by_others(&self, table: RouteTable) -> Option<String> {
        let number = table.number();
        let families = self.wanted.families();
        let value = self.wanted.mark().value();
        let leads = |rule: &&PolicyRule| {
            families.contains(&rule.family)
                && rule.action == RuleAction::Lookup(number)
                && rule.mark.is_none_or(|(other, _)| other != value)
        };
        let of_route = |route: &&Route| {
            families.contains(&route.family) && route.table == number && !is_local_default(route)
        };
        let rule = self.tables.rules.iter().find(leads).map(|rule| format!("policy rule {rule}"));
        rule.or_else(|| self.tables.routes.iter().find(of_route).map(|route| format!("route {route}")))
    }

    fn works_in(&self, table: RouteTable, ask: &mut impl FnMut(&Packet) -> Option<bool>) -> bool {
        let mut families = self.wanted.families().iter();
        families.all(|family| {
            let has_route = self.tables.routes.iter().any(|route| is_in(route, *family, table));
            has_route && self.has_rule(*family, table) && self.taken_now(*family, table, ask).is_none()
        })
    }

    /// What keeps packets from the pod as its routing is, once the plan's route is there.
    fn taken_now(
        &self,
        family: Family,
        table: RouteTable,
        ask: &mut impl FnMut(&Packet) -> Option<bool>,
    ) -> Option<Taken> {
        let has_route = self.tables.routes.iter().any(|route| is_in(route, family, table));
        let mut ask = |packet: &Packet| if has_route { ask(packet) } else { None };
        let rules: Vec<PolicyRule> = self.rules(family).cloned().collect();
        let mut worst: Option<Taken> = None;
        for (asked, way) in self.ways(family, table, rules).into_iter().enumerate() {
            let answer = if asked < MOST_ASKED { ask(&way.example) } else { None };
            let taken = match (way.taken, answer) {
                (_, Some(true)) | (None, None) => continue,
                // What takes them is among those that may.
                (None, Some(false)) if !way.is_certain => continue,
                (Some(taken), None) => taken,
                (Some(taken), Some(false)) => Taken { is_certain: true, ..taken },
                (None, Some(false)) => Taken {
                    family,
                    traffic: way.traffic,
                    example: way.example,
                    by: "the kernel's routing".to_string(),
                    rule: None,
                    is_certain: true,
                },
            };
            if worst.as_ref().is_none_or(|worst| taken.is_certain && !worst.is_certain) {
                worst = Some(taken);
            }
        }
        worst
    }

    /// The same, as far as what is modelled takes packets. What takes them now is an obstacle if that does not.
    fn known_priority(
        &self,
        families: &[Family],
        table: RouteTable,
        flaws: &[Taken],
    ) -> Result<Option<u32>, RoutingObstacle> {
        let takes = |flaw: &&Taken| {
            let rules = self.rules(flaw.family).filter(|rule| rule.unknown.is_empty()).cloned().collect();
            flaw.is_certain && self.ways(flaw.family, table, rules).iter().all(|way| way.taken.is_none())
        };
        match flaws.iter().find(takes) {
            Some(flaw) => Err(RoutingObstacle::Taken(Box::new(flaw.clone()))),
            None => self.priority(families, table, false),
        }
    }

    /// A priority at which the plan's policy rule is met before what takes its packets: as late as possible. If not `strictly`, rules whose
    /// conditions are not modelled are left out of account.
    fn priority(
        &self,
        families: &[Family],
        table: RouteTable,
        strictly: bool,
    ) -> Result<Option<u32>, RoutingObstacle> {
        // What another program does with the mark would end, wherever its rule stands.
        let in_use = families.iter().find_map(|family| {
            let others = self.rules(*family).filter(|rule| self.leads(rule).is_none()).cloned().collect();
            let mut taken = self.ways(*family, table, others).into_iter().filter_map(|way| way.taken);
            taken.find(|taken| taken.rule.as_ref().is_some_and(|rule| self.names_mark(rule)))
        });
        if let Some(taken) = in_use {
            return Err(RoutingObstacle::MarkInUse(Box::new(taken)));
        }
        let used: BTreeSet<u32> = self.tables.rules.iter().map(|rule| rule.priority).collect();
        let mut priority = self.wanted.priority();
        for _ in 0..MOST_TRIES {
            let taken = families.iter().find_map(|family| {
                let mut rules = self.rules_with(*family, table, priority);
                rules.retain(|rule| strictly || rule.unknown.is_empty());
                self.ways(*family, table, rules).into_iter().find_map(|way| way.taken)
            });
            let Some(taken) = taken else { return Ok(priority) };
            let Some(rule) = &taken.rule else { return Err(RoutingObstacle::Taken(Box::new(taken))) };
            let limit = rule.priority.min(priority.unwrap_or(u32::MAX));
            // The kernel puts a rule behind those of the same priority, and its own is at 0.
            let next = (1..limit).rev().find(|next| !used.contains(next)).or((limit > 0).then_some(0));
            let Some(next) = next else { return Err(RoutingObstacle::Taken(Box::new(taken))) };
            priority = Some(next);
        }
        Err(RoutingObstacle::NoTable(table, "too many policy rules".to_string()))
    }

    /// Whether another program's policy rule is about packets with the plan's mark, and not by chance.
    fn names_mark(&self, rule: &PolicyRule) -> bool {
        let mask = self.wanted.mark().mask();
        !rule.not && rule.mark.is_some_and(|(_, bits)| bits & mask == mask)
    }

    /// The policy rules of a family, if the plan's has this priority, or the one that the kernel would give it.
    fn rules_with(&self, family: Family, table: RouteTable, priority: Option<u32>) -> Vec<PolicyRule> {
        let others = self.rules(family).filter(|rule| self.leads(rule).is_none());
        let mut rules: Vec<PolicyRule> = others.cloned().collect();
        let second = self.rules(family).nth(1).map_or(0, |rule| rule.priority);
        let priority = priority.unwrap_or_else(|| second.saturating_sub(1));
        let mark = self.wanted.mark();
        let own = PolicyRule {
            mark: Some((mark.value(), mark.mask())),
            ..PolicyRule::lookup(family, priority, table.number())
        };
        let behind = rules.iter().position(|rule| rule.priority > priority).unwrap_or(rules.len());
        rules.insert(behind, own);
        rules
    }

    /// Every way that the plan's marked packets of a family take by these policy rules, if its route is in its table.
    fn ways(&self, family: Family, table: RouteTable, rules: Vec<PolicyRule>) -> Vec<MarkedWay> {
        // Where the plan leaves its own table, it takes its route along.
        let left = self.wanted.table();
        let goes =
            |route: &&Route| table != left && is_in(route, family, left) && self.has_rule(family, left);
        let of_family = self.tables.routes.iter().filter(|route| route.family == family);
        let mut routes: Vec<Route> = of_family.filter(|route| !goes(route)).cloned().collect();
        if !routes.iter().any(|route| is_in(route, family, table)) {
            routes.push(own_route(family, table));
        }
        let own_addresses = own_addresses(&routes);
        if own_addresses.is_empty() {
            return Vec::new();
        }
        let names = routes
            .iter()
            .filter(|route| [RouteTables::LOCAL, RouteTables::MAIN].contains(&route.table))
            .filter_map(|route| route.interface.as_deref())
            .filter(|name| *name != "lo");
        let interfaces = RangeSet::each(names.map(interface));
        let tables = RouteTables {
            rules,
            routes,
            loopback_is_up: self.tables.loopback_is_up,
            complete: self.tables.complete,
        };
        let walked = TraceRules::of_ruleset(&HookedRules::default(), &[], family, None).with_routes(&tables);
        let ends = |packets: Packets, lookup: RouteLookup| routed(&walked, packets, lookup);
        let own = RangeSet::each(own_addresses.iter().copied().map(number));
        let here =
            walked.routes.as_ref().map_or_else(RangeSet::empty, |routes| routes.of_nobody_else.clone());
        let nobody = here.or(&loopback(family)).or(&multicast(family)).or(&link_local(family));
        let far = nobody.complement(VariedField::Destination.most(family));
        let mark = self.wanted.mark().value();
        let mut first = Packets::all(family);
        first.set_one(VariedField::Protocol, Protocol::Tcp.number());
        let mut ways = Vec::new();
        let ours = tables.rules.iter().position(|rule| self.leads(rule) == Some(table));
        let mut add = |traffic: MarkedTraffic, ended: Vec<Routed>| {
            ways.extend(ended.into_iter().map(|way| MarkedWay::of(traffic, &way, &tables, ours)));
        };
        // An answer is routed without the mark first, and with it once the rules of the mesh have restored it.
        let answers = first
            .with(VariedField::Flags, RangeSet::one((TcpFlags::SYN | TcpFlags::ACK).into()))
            .with(VariedField::Source, own.clone())
            .with(VariedField::Destination, far.clone())
            .with(VariedField::Interface, interfaces.clone())
            .with(VariedField::Mark, RangeSet::one(0));
        for sent in ends(answers, RouteLookup::Sent) {
            if sent.end != RouteEnd::Lost {
                add(
                    MarkedTraffic::Answers,
                    ends(
                        sent.packets.with(VariedField::Mark, RangeSet::one(mark.into())),
                        RouteLookup::Again,
                    ),
                );
            }
        }
        if self.plan.data_plane() == DataPlane::Sidecar {
            let arrivals = first
                .with(VariedField::Flags, RangeSet::one(TcpFlags::SYN.into()))
                .with(VariedField::Source, far.clone())
                .with(VariedField::Destination, far.or(&own))
                .with(VariedField::Interface, interfaces)
                .with(VariedField::Mark, RangeSet::one(mark.into()));
            add(MarkedTraffic::Arrivals, ends(arrivals, RouteLookup::Arrives));
        }
        ways
    }
}

/// What becomes of some of the packets with a plan's mark.
struct MarkedWay {
    traffic: MarkedTraffic,
    example: Packet,
    /// Whether that is certain.
    is_certain: bool,
    /// What takes them, if they do not reach the pod.
    taken: Option<Taken>,
}

impl MarkedWay {
    /// `ours` is the number of the plan's policy rule.
    fn of(traffic: MarkedTraffic, way: &Routed, tables: &RouteTables, ours: Option<usize>) -> Self {
        let is_sent = traffic == MarkedTraffic::Answers;
        let mut example = example(is_sent, &way.packets);
        if is_sent && way.packets.family == Family::V4 {
            // Of a packet that is routed again, IPv4 forgets the user.
            example.sender = Sender::Local { uid: 0, gid: 0 };
        }
        let deciding = way.rule.and_then(|number| tables.rules.get(number));
        // What decides behind the plan's rule does so because another leads past it.
        let is_past = |rule: &&PolicyRule| matches!(rule.action, RuleAction::Goto(to) if deciding.is_none_or(|deciding| to <= deciding.priority));
        let is_behind = ours.filter(|ours| way.rule.is_none_or(|number| number > *ours));
        let leads_past = is_behind.and_then(|ours| tables.rules.iter().take(ours).rev().find(is_past));
        let rule = leads_past.or(deciding).cloned();
        let taken = (way.end != RouteEnd::Local).then(|| Taken {
            family: way.packets.family,
            traffic,
            example: example.clone(),
            by: rule.as_ref().map_or_else(|| "the lack of a route".into(), PolicyRule::named),
            rule,
            is_certain: way.is_certain && way.end != RouteEnd::Unknown,
        });
        Self { traffic, example, is_certain: way.is_certain, taken }
    }
}

fn is_local_default(route: &Route) -> bool {
    route.kind == RouteKind::Local && route.to.prefix_len() == 0 && route.interface.as_deref() == Some("lo")
}

fn is_in(route: &Route, family: Family, table: RouteTable) -> bool {
    is_local_default(route) && (route.family, route.table) == (family, table.number())
}

fn own_route(family: Family, table: RouteTable) -> Route {
    let everything = family.address(0);
    Route {
        family,
        table: table.number(),
        to: IpNet::new(everything, 0).unwrap_or_else(|_| everything.into()),
        kind: RouteKind::Local,
        interface: Some("lo".into()),
        metric: 0,
        unknown: false,
    }
}

/// The addresses by which other hosts reach the namespace.
fn own_addresses(routes: &[Route]) -> Vec<IpAddr> {
    let is_own = |route: &&Route| {
        route.table == RouteTables::LOCAL
            && route.kind == RouteKind::Local
            && route.to.prefix_len() == route.to.max_prefix_len()
            && is_routable(&route.to.addr())
            && route.to.addr() != IpAddr::V6(Family::PASSTHROUGH_V6)
    };
    routes.iter().filter(is_own).map(|route| route.to.addr()).collect()
}

#[cfg(test)]
mod tests;
