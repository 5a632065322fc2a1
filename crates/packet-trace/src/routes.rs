//! Policy rules and routes of a network namespace, made ready to be walked: one list of questions in the order in which the kernel asks
//! them, and what follows where one is answered with yes.

use super::{
    packets::{Field, interface, of_net},
    set::Set,
};
use alloc::{collections::BTreeMap, format, string::String, vec::Vec};
use core::cmp::Reverse;
use netfilter_state::route_tables::{
    DEFAULT_TABLE, LOCAL_TABLE, MAIN_TABLE, PolicyRule, Route, RouteKind, RouteTables, RuleAction,
};
use redirect_core::values::Family;

/// What decides where packets of a family are sent.
#[derive(Debug, Clone)]
pub(super) struct Routes {
    pub(super) steps: Vec<RouteStep>,
    pub(super) loopback_is_up: bool,
    /// The addresses with a local route, and broadcast addresses: no other host has them.
    pub(super) of_nobody_else: Set,
    /// The addresses that are the namespace's own by the routes to them.
    pub(super) local: Set,
    /// Whether a mark may lead elsewhere than no mark, ...
    pub(super) looks_at_marks: bool,
    /// ... and whether another class of traffic may: `tos` is among what is not modelled.
    pub(super) looks_at_class: bool,
    /// Whether the kernel asks, of what arrives, where an answer would go (`fib_validate_source`): in IPv4, once a program has added
    /// a policy rule or a local route.
    pub(super) validates_sources: bool,
    /// The description of what decides, by its number.
    pub(super) words: Vec<String>,
}

/// One question: of a policy rule, and of a route if it sends packets to a table.
#[derive(Debug, Clone)]
pub(super) struct RouteStep {
    /// The conditions, all of which a packet must fulfil; ...
    pub(super) rule: Vec<RouteTest>,
    /// ... or not all of which, if inverted.
    pub(super) not: bool,
    /// The destinations of the route.
    pub(super) to: Option<Set>,
    pub(super) leads: RouteEnd,
    /// The number of its words.
    pub(super) words: usize,
    /// Which of the family's policy rules asks it.
    pub(super) asked_by: usize,
}

/// A condition of a policy rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RouteTest {
    Mark(u32, u32),
    From(Set),
    To(Set),
    /// Protocol or ports.
    Of(Field, Set),
    /// It came in by this interface; by `lo`, if the pod sends it.
    CameIn(u128),
    /// The user of its socket.
    Users(Set),
    /// A socket is bound to an interface; assumed of none.
    Bound,
    /// Undetermined.
    Unknown,
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
    /// To the question of this number.
    Next(usize),
}

/// How many questions are asked at most: rules and the routes of their tables, multiplied, may be any number.
const MOST_STEPS: usize = 1 << 15;
/// The numbers of words that are about no policy rule or route.
pub(super) const LOOPBACK_IS_DOWN: usize = 0;
pub(super) const NO_ROUTE: usize = 1;
pub(super) const SOURCE_NOT_LOCAL: usize = 2;
pub(super) const NO_RECEIVER: usize = 3;
const WORDS: [&str; 4] = [
    "the interface lo is down",
    "no route",
    "the source address has no local route",
    "REDIRECT without an address on the receiving interface",
];

impl Routes {
    pub(super) fn of(tables: &RouteTables, family: Family) -> Self {
        let rules: Vec<&PolicyRule> = tables.rules.iter().filter(|rule| rule.family == family).collect();
        let mut routes = Self {
            steps: Vec::new(),
            loopback_is_up: tables.loopback_is_up,
            of_nobody_else: delivered_here(tables, family),
            local: local(tables, family),
            looks_at_marks: rules.iter().any(|rule| rule.mark.is_some()),
            looks_at_class: rules.iter().any(|rule| !rule.unknown.is_empty())
                || tables.routes.iter().any(|route| route.unknown),
            validates_sources: family == Family::V4
                && (rules.iter().any(is_added) || has_local_of_others(tables)),
            words: WORDS.map(String::from).into(),
        };
        let mut by_table: BTreeMap<u32, Vec<&Route>> = BTreeMap::new();
        for route in tables.routes.iter().filter(|route| route.family == family) {
            by_table.entry(route.table).or_default().push(route);
        }
        for routes in by_table.values_mut() {
            routes.sort_by_key(|route| (Reverse(route.to.prefix_len()), route.metric));
        }
        // Where the questions of each rule begin.
        let mut begins: Vec<(u32, usize)> = Vec::new();
        let mut jumps: Vec<(usize, u32)> = Vec::new();
        for asker in rules.into_iter().enumerate() {
            let (_, rule) = asker;
            begins.push((rule.priority, routes.steps.len()));
            let words = || format!("policy rule {rule}");
            match rule.action {
                RuleAction::Lookup(table) => {
                    let of_table = by_table.get(&table).map_or(&[][..], Vec::as_slice);
                    routes.table(of_table, asker, table);
                }
                RuleAction::Goto(priority) => {
                    jumps.push((routes.steps.len(), priority));
                    routes.ask(asker, None, RouteEnd::Next(usize::MAX), words());
                }
                RuleAction::Nop => {}
                RuleAction::Blackhole | RuleAction::Unreachable | RuleAction::Prohibit => {
                    routes.ask(asker, None, RouteEnd::Lost, words());
                }
                RuleAction::Other => routes.ask(asker, None, RouteEnd::Unknown, words()),
            }
        }
        for (step, priority) in jumps {
            // One that leads nowhere does nothing.
            let own = step.saturating_add(1);
            let to = begins.iter().find(|(of, begin)| *of >= priority && *begin > step);
            if let Some(step) = routes.steps.get_mut(step) {
                step.leads = RouteEnd::Next(to.map_or(own, |(_, begin)| *begin));
            }
        }
        routes
    }

    /// Adds a question of a policy rule, which has this number.
    fn ask(
        &mut self,
        (asked_by, rule): (usize, &PolicyRule),
        to: Option<Set>,
        leads: RouteEnd,
        decides: String,
    ) {
        let words = self.words.len();
        self.words.push(decides);
        self.steps.push(RouteStep { rule: tests_of(rule), not: rule.not, to, leads, words, asked_by });
    }

    /// The routes of a table, the longest prefix first. Of more than are followed nothing is known.
    fn table(&mut self, of_table: &[&Route], asker: (usize, &PolicyRule), table: u32) {
        let (_, rule) = asker;
        let counts = |route: &&&Route| {
            rule.suppress_prefix.is_none_or(|length| u32::from(route.to.prefix_len()) > length)
        };
        let begin = self.steps.len();
        let mut routes = of_table.iter().filter(counts).copied().peekable();
        while let Some(first) = routes.next() {
            if self.steps.len() >= MOST_STEPS {
                self.steps.truncate(begin);
                let words = format!("more routes than are followed in table {table}, by policy rule {rule}");
                self.ask(asker, None, RouteEnd::Unknown, words);
                break;
            }
            // Neighbours with the same end are one question.
            let leads = end_of(first);
            let mut to = of_net(&first.to).ranges().to_vec();
            let joins = |next: &&Route| end_of(next) == leads && leads != RouteEnd::Lost;
            while let Some(next) = routes.next_if(joins) {
                to.extend_from_slice(of_net(&next.to).ranges());
            }
            self.ask(asker, Some(Set::of(to)), leads, format!("route {first}, by policy rule {rule}"));
        }
        // A route that throws packets out of its table skips to the end of that table.
        let behind = self.steps.len();
        for step in self.steps.iter_mut().skip(begin).filter(|step| step.leads == RouteEnd::Next(usize::MAX))
        {
            step.leads = RouteEnd::Next(behind);
        }
    }
}

fn end_of(route: &Route) -> RouteEnd {
    match route.kind {
        _ if route.unknown => RouteEnd::Unknown,
        RouteKind::Local | RouteKind::Broadcast | RouteKind::Anycast => RouteEnd::Local,
        // A packet sent over lo by a route that is not local may be routed again on arrival, or not.
        RouteKind::Unicast if route.interface.as_deref() == Some("lo") => RouteEnd::Unknown,
        RouteKind::Unicast => RouteEnd::Out(route.interface.as_deref().map(interface)),
        RouteKind::Blackhole | RouteKind::Unreachable | RouteKind::Prohibit => RouteEnd::Lost,
        RouteKind::Throw => RouteEnd::Next(usize::MAX),
        RouteKind::Multicast | RouteKind::Other => RouteEnd::Unknown,
    }
}

/// Whether a rule is not one of the three that every namespace has.
fn is_added(rule: &&PolicyRule) -> bool {
    let usual = [(0, LOCAL_TABLE), (32_766, MAIN_TABLE), (32_767, DEFAULT_TABLE)];
    !usual.iter().any(|(priority, table)| **rule == PolicyRule::lookup(rule.family, *priority, *table))
}

/// Whether a local route was added.
fn has_local_of_others(tables: &RouteTables) -> bool {
    let is_others = |route: &Route| {
        route.family == Family::V4 && route.kind == RouteKind::Local && route.table != LOCAL_TABLE
    };
    tables.routes.iter().any(is_others)
}

/// The addresses with routes of these kinds in the table of the namespace's own addresses.
fn delivered_here(tables: &RouteTables, family: Family) -> Set {
    let is_kind = |kind| matches!(kind, RouteKind::Local | RouteKind::Broadcast | RouteKind::Anycast);
    let is_local = |route: &&Route| {
        route.family == family && route.table == LOCAL_TABLE && is_kind(route.kind) && !route.unknown
    };
    let ranges = tables.routes.iter().filter(is_local).flat_map(|route| of_net(&route.to).ranges().to_vec());
    Set::of(ranges.collect())
}

/// The addresses that the most specific route in that table calls local.
fn local(tables: &RouteTables, family: Family) -> Set {
    let of_table = |route: &&Route| route.family == family && route.table == LOCAL_TABLE;
    let mut routes: Vec<&Route> = tables.routes.iter().filter(of_table).collect();
    routes.sort_by_key(|route| (route.to.prefix_len(), Reverse(route.metric)));
    routes.into_iter().fold(Set::empty(), |all, route| {
        let to = of_net(&route.to);
        if route.kind == RouteKind::Local { all.or(&to) } else { all.without(&to) }
    })
}

fn tests_of(rule: &PolicyRule) -> Vec<RouteTest> {
    let mut tests = Vec::new();
    let range = |(first, last): (u16, u16)| Set::range(first.into(), last.into());
    tests.extend(rule.mark.map(|(value, mask)| RouteTest::Mark(value & mask, mask)));
    tests.extend(rule.from.as_ref().map(|net| RouteTest::From(of_net(net))));
    tests.extend(rule.to.as_ref().map(|net| RouteTest::To(of_net(net))));
    tests.extend(rule.protocol.map(|one| RouteTest::Of(Field::Protocol, Set::one(one.into()))));
    tests.extend(rule.source_ports.map(|ports| RouteTest::Of(Field::SourcePort, range(ports))));
    tests.extend(rule.ports.map(|ports| RouteTest::Of(Field::Port, range(ports))));
    tests.extend(rule.out_interface.as_ref().map(|_| RouteTest::Bound));
    tests.extend(rule.in_interface.as_deref().map(|name| RouteTest::CameIn(interface(name))));
    tests.extend(rule.users.map(|(first, last)| RouteTest::Users(Set::range(first.into(), last.into()))));
    tests.extend(rule.unknown.first().map(|_| RouteTest::Unknown));
    tests
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_and_routes_multiplied_are_bounded() {
        let mut tables = RouteTables::default();
        for number in 0..1000_u32 {
            tables.rules.push(PolicyRule::lookup(Family::V4, 100 + number, 7));
            let to = format!("10.{}.{}.0/24", number / 250, number % 250).parse().unwrap();
            let interface = Some(format!("eth{}", number % 2));
            let (family, kind, metric) = (Family::V4, RouteKind::Unicast, 0);
            tables.routes.push(Route { family, table: 7, to, kind, interface, metric, unknown: false });
        }
        let routes = Routes::of(&tables, Family::V4);
        assert!(routes.steps.len() <= MOST_STEPS + tables.rules.len(), "{}", routes.steps.len());
        let last = routes.steps.last().unwrap();
        assert_eq!(last.leads, RouteEnd::Unknown);
        assert!(routes.words[last.words].contains("in table 7"), "{}", routes.words[last.words]);
    }
}
