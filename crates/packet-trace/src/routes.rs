//! Policy rules and routes of a network namespace, made ready to be walked: the rules in the order in which the kernel asks them, and the
//! routes of each table, the longest prefix first.

use super::{
    conditions::Test,
    packets::{VariedField, interface, of_net},
    set::RangeSet,
};
use netfilter_state::route_tables::{PolicyRule, Route, RouteKind, RouteTables, RuleAction};
use redirect_core::values::Family;
use std::{cmp::Reverse, collections::BTreeMap};

/// What decides where packets of a family are sent.
#[derive(Debug, Clone)]
pub(super) struct Routes {
    pub(super) rules: Vec<RouteRule>,
    tables: BTreeMap<u32, Vec<RouteStep>>,
    pub(super) loopback_is_up: bool,
    /// The addresses with a local route, and broadcast addresses: no other host has them.
    pub(super) of_nobody_else: RangeSet,
    /// The addresses that are the namespace's own by the routes to them.
    pub(super) local: RangeSet,
    /// Whether a mark may lead elsewhere than no mark, ...
    pub(super) looks_at_marks: bool,
    /// ... and whether another class of traffic may: `tos` is among what is not modelled.
    pub(super) looks_at_class: bool,
    /// Whether the kernel asks, of what arrives, where an answer would go (`fib_validate_source`): in IPv4, once a program has added
    /// a policy rule or a local route.
    pub(super) validates_sources: bool,
    /// The routes that begin a question, in words.
    of_routes: Vec<String>,
}

/// A policy rule.
#[derive(Debug, Clone)]
pub(super) struct RouteRule {
    /// The conditions, all of which a packet must fulfil; ...
    pub(super) tests: Vec<Test>,
    /// ... or not all of which, if inverted.
    pub(super) not: bool,
    pub(super) leads: RuleEnd,
    words: String,
}

/// What follows where a policy rule takes a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RuleEnd {
    /// The routes of a table with a prefix longer than this, where the rule has such a limit.
    Table(u32, Option<u32>),
    /// The rule of this number.
    Goto(usize),
    /// This, with whatever packet.
    Ends(RouteEnd),
}

/// One question of a table: a route, and those behind it that lead where it does.
#[derive(Debug, Clone)]
pub(super) struct RouteStep {
    /// The destinations.
    pub(super) to: RangeSet,
    /// The length of the prefix.
    length: u8,
    pub(super) leads: RouteEnd,
    /// The number of its words among those of routes.
    words: usize,
}

/// Where a packet is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RouteEnd {
    /// To the pod itself.
    Local,
    /// Out by this interface, if one is named.
    Out(Option<u128>),
    /// Nowhere.
    Lost,
    /// Undetermined.
    Unknown,
    /// To the next policy rule.
    Next,
}

/// The numbers of words that are about no policy rule or route.
pub(super) const LOOPBACK_IS_DOWN: usize = 0;
pub(super) const NO_ROUTE: usize = 1;
pub(super) const SOURCE_NOT_LOCAL: usize = 2;
pub(super) const NO_RECEIVER: usize = 3;
pub(super) const BOUND_TO_LINK: usize = 4;
const WORDS: [&str; 5] = [
    "the interface lo is down",
    "no route",
    "the source address has no local route",
    "REDIRECT without an address on the receiving interface",
    "the socket's interface, by which no loopback address is reached",
];

impl Routes {
    pub(super) fn of(tables: &RouteTables, family: Family) -> Self {
        let rules: Vec<&PolicyRule> = tables.rules.iter().filter(|rule| rule.family == family).collect();
        let is_added_local = |route: &Route| {
            route.family == family && route.kind == RouteKind::Local && route.table != RouteTables::LOCAL
        };
        let mut routes = Self {
            rules: Vec::new(),
            tables: BTreeMap::new(),
            loopback_is_up: tables.loopback_is_up,
            of_nobody_else: delivered_here(tables, family),
            local: local(tables, family),
            looks_at_marks: rules.iter().any(|rule| rule.mark.is_some()),
            looks_at_class: rules.iter().any(|rule| !rule.unknown.is_empty())
                || tables.routes.iter().any(|route| route.unknown),
            validates_sources: family == Family::V4
                && (rules.iter().any(is_added) || tables.routes.iter().any(is_added_local)),
            of_routes: Vec::new(),
        };
        let mut by_table: BTreeMap<u32, Vec<&Route>> = BTreeMap::new();
        for route in tables.routes.iter().filter(|route| route.family == family) {
            by_table.entry(route.table).or_default().push(route);
        }
        for (table, mut of_table) in by_table {
            of_table.sort_by_key(|route| (Reverse(route.to.prefix_len()), route.metric));
            let steps = routes.steps(&of_table);
            routes.tables.insert(table, steps);
        }
        for (number, rule) in rules.iter().enumerate() {
            let leads = match rule.action {
                RuleAction::Lookup(table) => RuleEnd::Table(table, rule.suppress_prefix),
                // One that leads nowhere does nothing. The kernel lists rules by priority.
                RuleAction::Goto(priority) => {
                    let to = rules.partition_point(|one| one.priority < priority);
                    let leads = to > number && to < rules.len();
                    if leads { RuleEnd::Goto(to) } else { RuleEnd::Ends(RouteEnd::Next) }
                }
                RuleAction::Nop => RuleEnd::Ends(RouteEnd::Next),
                RuleAction::Blackhole | RuleAction::Unreachable | RuleAction::Prohibit => {
                    RuleEnd::Ends(RouteEnd::Lost)
                }
                RuleAction::Other => RuleEnd::Ends(RouteEnd::Unknown),
            };
            let words = format!("policy rule {rule}");
            routes.rules.push(RouteRule { tests: tests_of(rule), not: rule.not, leads, words });
        }
        routes
    }

    /// The questions of a table.
    fn steps(&mut self, of_table: &[&Route]) -> Vec<RouteStep> {
        let mut steps = Vec::new();
        let mut routes = of_table.iter().copied().peekable();
        while let Some(first) = routes.next() {
            // Neighbours with the same end are one question.
            let (leads, length) = (end_of(first), first.to.prefix_len());
            let mut to = of_net(&first.to).ranges().to_vec();
            let joins = |next: &&Route| {
                end_of(next) == leads && leads != RouteEnd::Lost && next.to.prefix_len() == length
            };
            while let Some(next) = routes.next_if(joins) {
                to.extend_from_slice(of_net(&next.to).ranges());
            }
            steps.push(RouteStep { to: RangeSet::of(to), length, leads, words: self.of_routes.len() });
            self.of_routes.push(format!("route {first}"));
        }
        steps
    }

    /// The questions of a table about prefixes longer than this.
    pub(super) fn of_table(&self, table: u32, longer_than: Option<u32>) -> impl Iterator<Item = &RouteStep> {
        let counts =
            move |step: &&RouteStep| longer_than.is_none_or(|length| u32::from(step.length) > length);
        self.tables.get(&table).map_or(&[][..], Vec::as_slice).iter().take_while(counts)
    }

    /// The number of the words for what decides: a policy rule, and a route to which it leads.
    pub(super) fn number(&self, rule: usize, route: Option<&RouteStep>) -> usize {
        let route = route.map_or(0, |route| route.words.saturating_add(1));
        let of_rule = rule.saturating_mul(self.of_routes.len().saturating_add(1));
        WORDS.len().saturating_add(of_rule).saturating_add(route)
    }
}

/// The words of a number.
pub(super) fn words_of(routes: Option<&Routes>, number: usize) -> Option<String> {
    let Some(of_rules) = number.checked_sub(WORDS.len()) else {
        return WORDS.get(number).copied().map(String::from);
    };
    let routes = routes?;
    let each = routes.of_routes.len().saturating_add(1);
    let rule = routes.rules.get(of_rules.checked_div(each)?)?;
    let route = of_rules.checked_rem(each)?.checked_sub(1).and_then(|route| routes.of_routes.get(route));
    Some(route.map_or_else(|| rule.words.clone(), |route| format!("{route}, by {}", rule.words)))
}

fn end_of(route: &Route) -> RouteEnd {
    match route.kind {
        _ if route.unknown => RouteEnd::Unknown,
        RouteKind::Local | RouteKind::Broadcast | RouteKind::Anycast => RouteEnd::Local,
        // A packet sent over lo by a route that is not local may be routed again on arrival, or not.
        RouteKind::Unicast if route.interface.as_deref() == Some("lo") => RouteEnd::Unknown,
        RouteKind::Unicast => RouteEnd::Out(route.interface.as_deref().map(interface)),
        RouteKind::Blackhole | RouteKind::Unreachable | RouteKind::Prohibit => RouteEnd::Lost,
        RouteKind::Throw => RouteEnd::Next,
        RouteKind::Multicast | RouteKind::Other => RouteEnd::Unknown,
    }
}

/// Whether a rule is not one of the three that every namespace has.
fn is_added(rule: &&PolicyRule) -> bool {
    let usual = [(0, RouteTables::LOCAL), (32_766, RouteTables::MAIN), (32_767, RouteTables::DEFAULT)];
    !usual.iter().any(|(priority, table)| **rule == PolicyRule::lookup(rule.family, *priority, *table))
}

/// The addresses with routes of these kinds in the table of the namespace's own addresses.
fn delivered_here(tables: &RouteTables, family: Family) -> RangeSet {
    let is_kind = |kind| matches!(kind, RouteKind::Local | RouteKind::Broadcast | RouteKind::Anycast);
    let is_local = |route: &&Route| {
        route.family == family && route.table == RouteTables::LOCAL && is_kind(route.kind) && !route.unknown
    };
    let ranges = tables.routes.iter().filter(is_local).flat_map(|route| of_net(&route.to).ranges().to_vec());
    RangeSet::of(ranges.collect())
}

/// The addresses that the most specific route in that table calls local.
fn local(tables: &RouteTables, family: Family) -> RangeSet {
    let of_table = |route: &&Route| route.family == family && route.table == RouteTables::LOCAL;
    let mut routes: Vec<&Route> = tables.routes.iter().filter(of_table).collect();
    routes.sort_by_key(|route| (route.to.prefix_len(), Reverse(route.metric)));
    routes.into_iter().fold(RangeSet::empty(), |all, route| {
        let to = of_net(&route.to);
        if route.kind == RouteKind::Local { all.or(&to) } else { all.without(&to) }
    })
}

fn tests_of(rule: &PolicyRule) -> Vec<Test> {
    let mut tests = Vec::new();
    let range = |(first, last): (u16, u16)| RangeSet::range(first.into(), last.into());
    let users = |(first, last): (u32, u32)| RangeSet::range(first.into(), last.into());
    tests.extend(rule.mark.map(|(value, mask)| Test::Bits(VariedField::Mark, value & mask, mask, false)));
    tests.extend(rule.from.as_ref().map(|net| Test::In(VariedField::Source, of_net(net))));
    tests.extend(rule.to.as_ref().map(|net| Test::In(VariedField::Destination, of_net(net))));
    tests.extend(rule.protocol.map(|one| Test::In(VariedField::Protocol, RangeSet::one(one.into()))));
    tests.extend(rule.source_ports.map(|ports| Test::In(VariedField::SourcePort, range(ports))));
    tests.extend(rule.ports.map(|ports| Test::In(VariedField::Port, range(ports))));
    // That a socket is bound to an interface is assumed of none.
    tests.extend(rule.out_interface.as_ref().map(|_| Test::Always(false)));
    tests.extend(rule.in_interface.as_deref().map(|name| Test::ComesIn(RangeSet::one(interface(name)))));
    tests.extend(rule.users.map(|ids| Test::Owner(VariedField::User, users(ids))));
    tests.extend(rule.unknown.first().map(|_| Test::Unknown));
    tests
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_and_routes_are_kept_apart_and_named_together() {
        let mut tables = RouteTables::default();
        for number in 0..1000_u32 {
            tables.rules.push(PolicyRule::lookup(Family::V4, 100 + number, 7));
            let to = format!("10.{}.{}.0/24", number / 250, number % 250).parse().unwrap();
            let interface = Some(format!("eth{}", number % 2));
            let (family, kind, metric) = (Family::V4, RouteKind::Unicast, 0);
            tables.routes.push(Route { family, table: 7, to, kind, interface, metric, unknown: false });
        }
        let routes = Routes::of(&tables, Family::V4);
        assert_eq!(
            (routes.rules.len(), routes.of_table(7, None).count(), routes.of_routes.len()),
            (1000, 1000, 1000)
        );
        assert_eq!((routes.of_table(7, Some(24)).count(), routes.of_table(7, Some(23)).count()), (0, 1000));
        let second = routes.of_table(7, None).nth(1);
        let named = [(999, None), (999, second), (0, second)]
            .map(|(rule, route)| words_of(Some(&routes), routes.number(rule, route)).unwrap());
        let policy = |number: usize| format!("policy rule {}", tables.rules[number]);
        let route = format!("route {}", tables.routes[1]);
        assert_eq!(
            named,
            [policy(999), format!("{route}, by {}", policy(999)), format!("{route}, by {}", policy(0))]
        );
        assert_eq!(words_of(None, NO_ROUTE).as_deref(), Some("no route"));
    }
}
