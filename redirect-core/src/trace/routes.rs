//! Policy rules and routes of a network namespace, made ready to be walked: one list of questions in the order in which the kernel asks
//! them, and what follows where one is answered with yes.

use super::{
    packets::{Field, interface, of_net},
    rules::Test,
    set::Set,
};
use crate::{
    route_tables::{LOCAL_TABLE, PolicyRule, Route, RouteKind, RouteTables, RuleAction},
    values::Family,
};
use alloc::{
    format,
    string::{String, ToString},
    vec::Vec,
};

/// What decides where packets of a family are sent.
#[derive(Debug, Clone)]
pub(super) struct Routes {
    pub(super) steps: Vec<RouteStep>,
    pub(super) loopback_is_up: bool,
    /// The addresses with a local route.
    pub(super) local: Set,
    /// Whether a mark may lead elsewhere than no mark.
    pub(super) looks_at_marks: bool,
    /// What is told of what decides, by its number.
    pub(super) words: Vec<String>,
}

/// One question.
#[derive(Debug, Clone)]
pub(super) struct RouteStep {
    /// What a packet has to fulfil, all of it.
    pub(super) tests: Vec<RouteTest>,
    /// Whether it is about packets that do not, of the first tests as many as this says.
    pub(super) turned: usize,
    pub(super) leads: RouteEnd,
    /// The number of its words.
    pub(super) words: usize,
}

/// A condition of a policy rule or route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RouteTest {
    Of(Test),
    /// It came in by this interface; by `lo`, if the pod sends it.
    CameIn(u128),
    /// It cannot be told.
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
    /// It cannot be told.
    Unknown,
    /// To the question of this number.
    Next(usize),
}

/// The numbers of words that are about no policy rule or route.
pub(super) const LOOPBACK_IS_DOWN: usize = 0;
pub(super) const NO_ROUTE: usize = 1;
pub(super) const SOURCE_NOT_LOCAL: usize = 2;
const WORDS: [&str; 3] =
    ["the interface lo is down", "there is no route", "the source address has no local route (table local)"];

impl Routes {
    pub(super) fn of(tables: &RouteTables, family: Family) -> Self {
        let rules: Vec<&PolicyRule> = tables.rules.iter().filter(|rule| rule.family == family).collect();
        let mut routes = Self {
            steps: Vec::new(),
            loopback_is_up: tables.loopback_is_up,
            looks_at_marks: rules.iter().any(|rule| rule.mark.is_some()),
            local: locals(tables, family),
            words: WORDS.map(String::from).into(),
        };
        // Where the questions of each rule begin.
        let mut begins: Vec<(u32, usize)> = Vec::new();
        let mut jumps: Vec<(usize, u32)> = Vec::new();
        for rule in rules {
            begins.push((rule.priority, routes.steps.len()));
            match rule.action {
                RuleAction::Lookup(table) => routes.table(tables, rule, table),
                RuleAction::Goto(priority) => {
                    jumps.push((routes.steps.len(), priority));
                    routes.rule(rule, RouteEnd::Next(usize::MAX));
                }
                RuleAction::Nop => {}
                RuleAction::Blackhole | RuleAction::Unreachable | RuleAction::Prohibit => {
                    routes.rule(rule, RouteEnd::Lost);
                }
                RuleAction::Other => routes.rule(rule, RouteEnd::Unknown),
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

    fn rule(&mut self, rule: &PolicyRule, leads: RouteEnd) {
        let tests = tests_of(rule);
        let turned = if rule.not { tests.len() } else { 0 };
        let words = self.words.len();
        self.words.push(format!("policy rule {rule}"));
        self.steps.push(RouteStep { tests, turned, leads, words });
    }

    /// The routes of a table, the longest prefix first.
    fn table(&mut self, tables: &RouteTables, rule: &PolicyRule, table: u32) {
        let counts = |route: &&Route| {
            let suppressed =
                rule.suppress_prefix.is_some_and(|length| u32::from(route.to.prefix_len()) <= length);
            route.family == rule.family && route.table == table && !suppressed
        };
        let mut routes: Vec<&Route> = tables.routes.iter().filter(counts).collect();
        routes.sort_by_key(|route| (core::cmp::Reverse(route.to.prefix_len()), route.metric));
        let of_rule = tests_of(rule);
        let turned = if rule.not { of_rule.len() } else { 0 };
        let mut throws: Vec<usize> = Vec::new();
        let mut last: Option<(RouteEnd, Set)> = None;
        for route in routes {
            let leads = match route.kind {
                _ if route.unknown => RouteEnd::Unknown,
                RouteKind::Local | RouteKind::Broadcast | RouteKind::Anycast => RouteEnd::Local,
                RouteKind::Unicast => RouteEnd::Out(route.interface.as_deref().map(interface)),
                RouteKind::Blackhole | RouteKind::Unreachable | RouteKind::Prohibit => RouteEnd::Lost,
                RouteKind::Throw => RouteEnd::Next(usize::MAX),
                RouteKind::Multicast | RouteKind::Other => RouteEnd::Unknown,
            };
            let to = of_net(&route.to);
            // Neighbours with the same end are one question.
            if let (Some((end, set)), Some(step)) = (&mut last, self.steps.last_mut())
                && *end == leads
                && leads != RouteEnd::Lost
            {
                *set = set.or(&to);
                step.tests.pop();
                step.tests.push(RouteTest::Of(Test::In(Field::Destination, set.clone())));
                continue;
            }
            if leads == RouteEnd::Next(usize::MAX) {
                throws.push(self.steps.len());
            }
            let mut tests = of_rule.clone();
            tests.push(RouteTest::Of(Test::In(Field::Destination, to.clone())));
            let words = self.words.len();
            self.words.push(format!("route {route}, by policy rule {rule}"));
            self.steps.push(RouteStep { tests, turned, leads, words });
            last = Some((leads, to));
        }
        let behind = self.steps.len();
        for step in throws {
            if let Some(step) = self.steps.get_mut(step) {
                step.leads = RouteEnd::Next(behind);
            }
        }
    }
}

/// The addresses with a local route in the table of such routes.
fn locals(tables: &RouteTables, family: Family) -> Set {
    let is_local = |route: &&Route| {
        route.family == family
            && route.table == LOCAL_TABLE
            && route.kind == RouteKind::Local
            && !route.unknown
    };
    Set::of(
        tables.routes.iter().filter(is_local).flat_map(|route| of_net(&route.to).ranges().to_vec()).collect(),
    )
}

fn tests_of(rule: &PolicyRule) -> Vec<RouteTest> {
    let mut tests = Vec::new();
    let mut of = |test: Test| tests.push(RouteTest::Of(test));
    let range = |(first, last): (u16, u16)| Set::range(first.into(), last.into());
    if let Some((value, mask)) = rule.mark {
        of(Test::Bits(Field::Mark, value & mask, mask, false));
    }
    if let Some(from) = &rule.from {
        of(Test::In(Field::Source, of_net(from)));
    }
    if let Some(to) = &rule.to {
        of(Test::In(Field::Destination, of_net(to)));
    }
    if let Some(protocol) = rule.protocol {
        of(Test::In(Field::Protocol, Set::one(protocol.into())));
    }
    if let Some(ports) = rule.source_ports {
        of(Test::In(Field::SourcePort, range(ports)));
    }
    if let Some(ports) = rule.ports {
        of(Test::In(Field::Port, range(ports)));
    }
    if rule.out_interface.is_some() {
        // Of a socket that is bound to an interface, which none is taken to be.
        of(Test::Always(false));
    }
    if let Some(name) = &rule.in_interface {
        tests.push(RouteTest::CameIn(interface(name)));
    }
    if rule.users.is_some() || !rule.unknown.is_empty() {
        tests.push(RouteTest::Unknown);
    }
    tests
}

impl RouteStep {
    /// What is told of it where it cannot be told whether it holds.
    pub(super) fn unknown(&self, routes: &Routes) -> String {
        routes.words.get(self.words).map(ToString::to_string).unwrap_or_default()
    }
}
