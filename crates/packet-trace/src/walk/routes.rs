//! Where the kernel sends packets: rerouted after a change of mark or destination, and routed on arrival.

use super::{
    super::{
        Fate, PacketEdit, TraceEvent,
        conditions::Test,
        packets::{FieldMatch, LO, Packets, VariedField, link_local, loopback, number, state},
        routes::{
            BOUND_TO_LINK, LOOPBACK_IS_DOWN, NO_ROUTE, RouteEnd, RouteRule, RouteStep, Routes, RuleEnd,
            SOURCE_NOT_LOCAL, words_of,
        },
        rules::TraceRules,
        set::RangeSet,
    },
    Cause, Interface, Split, Unknown, Walk, WalkInput,
    conditions::{all_of, decided},
};
use redirect_core::{rule::Protocol, values::Family};
use std::collections::BTreeSet;

/// When the kernel asks for a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RouteLookup {
    /// A socket sends a packet.
    Sent,
    /// Its mark or destination has changed.
    Again,
    /// It arrives.
    Arrives,
    /// It arrives, and it is asked where an answer would go.
    Source,
}

/// Where routing sends some packets.
#[derive(Debug, Clone)]
pub(crate) struct Routed {
    /// Which.
    pub(crate) packets: Packets,
    /// Where to.
    pub(crate) end: RouteEnd,
    /// The number of the words for what decides, ...
    pub(crate) words: usize,
    /// ... and the number of the policy rule among those of the family.
    pub(crate) rule: Option<usize>,
    /// Whether that depends on nothing that is not modelled.
    pub(crate) is_certain: bool,
}

/// How far the policy rules and routes have been asked. A walk that splits there goes on from that one: what was answered for all its packets
/// holds for each part of them.
#[derive(Debug, Clone)]
pub(super) struct RouteQuestion {
    lookup: RouteLookup,
    /// The number of the policy rule it is at, ...
    rule: usize,
    /// ... and that of the route in its table.
    route: usize,
    /// Tables without a route for these packets: another rule that leads there finds none either.
    without: BTreeSet<(u32, Option<u32>)>,
    /// The work it took to come there: each part spends it, as if that had asked all.
    spent: usize,
}

impl RouteQuestion {
    const fn of(lookup: RouteLookup) -> Self {
        Self { lookup, rule: 0, route: 0, without: BTreeSet::new(), spent: 0 }
    }
}

/// Where policy rules and routes send packets, whatever the rules of netfilter; nothing where they are not known. What takes too much work
/// is not certain.
pub(crate) fn routed(rules: &TraceRules, packets: Packets, lookup: RouteLookup) -> Vec<Routed> {
    /// A question asked costs one.
    const MOST_WORK: usize = 200_000;
    let Some(routes) = &rules.routes else { return Vec::new() };
    let given = WalkInput { is_local: lookup != RouteLookup::Arrives, ..WalkInput::default() };
    let (mut open, mut work) = (Vec::from([Walk::new(rules, packets, &given, false)]), 0_usize);
    let mut all = Vec::new();
    while let Some(mut walk) = open.pop() {
        walk.asked = 0;
        let (end, words, rule) = match walk.route_by_rule(routes, lookup) {
            _ if work > MOST_WORK => (RouteEnd::Unknown, NO_ROUTE, None),
            Ok(decided) => decided,
            Err(split) => {
                work = work.saturating_add(std::mem::take(&mut walk.spent)).saturating_add(1);
                walk.part(split, &mut open);
                open.push(walk);
                continue;
            }
        };
        let is_certain = walk.assumed.is_empty();
        all.push(Routed { packets: walk.now.packets, end, words, rule, is_certain });
    }
    all
}

impl<'a> Walk<'a> {
    /// Asks for the first route of what a socket sends, which takes precedence over a named interface: where it
    /// ends without one.
    pub(super) fn is_sent(&mut self, over_loopback: bool) -> Result<Option<Fate>, Split> {
        let rules = self.rules;
        let asks = self.given.asks_route || over_loopback;
        let Some(routes) = rules.routes.as_ref().filter(|_| asks) else { return Ok(None) };
        let (leads, words) = self.route(routes, RouteLookup::Sent)?;
        // IPv4 sends nothing from a loopback address by another interface.
        if matches!(leads, RouteEnd::Out(_))
            && self.now.packets.family == Family::V4
            && self.ask(VariedField::Source, &loopback(Family::V4))?
        {
            return Ok(Some(self.is_lost(words)));
        }
        Ok(match leads {
            RouteEnd::Local => {
                let lost = self.goes_to_itself(routes)?;
                self.now.causes.kept = Some(words).filter(|_| !over_loopback);
                self.now.goes_out = Interface::Loopback;
                lost
            }
            // No other host has its address, but REDIRECT may still bring it back.
            RouteEnd::Out(by) if over_loopback => {
                self.now.strays = Some(words);
                self.now.goes_out = by.map_or(Interface::Own, Interface::Named);
                None
            }
            RouteEnd::Lost => {
                self.is_unsent = !over_loopback;
                Some(self.is_lost(words))
            }
            RouteEnd::Out(_) | RouteEnd::Unknown | RouteEnd::Next => None,
        })
    }

    /// Where a packet ends that goes over `lo`, if it does not arrive: `lo` may be down; and without a local route to
    /// its source, no host can answer it.
    fn goes_to_itself(&mut self, routes: &'a Routes) -> Result<Option<Fate>, Split> {
        if !routes.loopback_is_up {
            return Ok(Some(self.is_lost(LOOPBACK_IS_DOWN)));
        }
        // A datagram needs no answer, and IPv6 lets one from a loopback address out.
        let needs_answer = self.now.packets.family == Family::V4
            && !self.given.names_client
            && self.ask(VariedField::Protocol, &RangeSet::one(Protocol::Tcp.number().into()))?;
        if !needs_answer || self.now.is_source_translated {
            return Ok(None);
        }
        let (answer_leads, _) = self.route(routes, RouteLookup::Source)?;
        Ok(match answer_leads {
            RouteEnd::Local => None,
            // From another address than a loopback one an answer leaves, and goes nowhere: those are not on any wire.
            RouteEnd::Out(_) if !self.is_for_loopback()? => {
                self.is_lost(SOURCE_NOT_LOCAL);
                Some(Fate::Broken)
            }
            RouteEnd::Out(_) | RouteEnd::Lost => Some(self.is_lost(SOURCE_NOT_LOCAL)),
            RouteEnd::Unknown | RouteEnd::Next => Some(self.is_uncertain(SOURCE_NOT_LOCAL)),
        })
    }

    /// Whether it goes to a loopback address.
    fn is_for_loopback(&mut self) -> Result<bool, Split> {
        let holds = self.has(VariedField::Destination, &loopback(self.now.packets.family));
        self.decide(holds, || Unknown::Work)
    }

    /// Reroutes a packet of the pod whose destination or mark has changed since it was first routed; returns where it
    /// ends, if it goes no farther.
    pub(super) fn route_out(&mut self, moved: bool) -> Result<Option<Fate>, Split> {
        // A socket that sends to a link-local address is bound to an interface, by which no route leads to a loopback address
        // (`ip6_route_me_harder`).
        if moved
            && self.now.packets.family == Family::V6
            && self.is_for_loopback()?
            && self.ask(VariedField::Destination, &link_local(Family::V6))?
        {
            return Ok(Some(self.is_lost(BOUND_TO_LINK)));
        }
        let rules = self.rules;
        let Some(routes) = &rules.routes else {
            let to = self.route_by_marks(moved)?;
            self.leaves_by(to);
            return Ok(None);
        };
        if !(moved || routes.looks_at_marks || self.now.is_reclassed && routes.looks_at_class) {
            return Ok(None);
        }
        let (leads, words) = self.route(routes, RouteLookup::Again)?;
        Ok(match leads {
            RouteEnd::Local => {
                let lost = self.goes_to_itself(routes)?;
                if lost.is_none() {
                    self.leaves_by(Interface::Loopback);
                }
                lost
            }
            // Nothing goes to a loopback address by another interface.
            RouteEnd::Out(_) if self.now.destination.is_some_and(|to| to.ip().is_loopback()) => {
                Some(self.is_lost(words))
            }
            RouteEnd::Out(by) => {
                let own = self.now.packets.get(VariedField::Interface).single();
                let is_own = by.is_none() || by == own;
                self.leaves_by(by.filter(|_| !is_own).map_or(Interface::Own, Interface::Named));
                None
            }
            RouteEnd::Lost => Some(self.is_lost(words)),
            RouteEnd::Unknown | RouteEnd::Next => Some(self.is_uncertain(words)),
        })
    }

    /// Where a packet from outside is sent; where it ends, if that is not the pod.
    pub(super) fn route_in(&mut self) -> Result<Option<Fate>, Split> {
        let rules = self.rules;
        let Some(routes) = rules.routes.as_ref().filter(|_| !self.given.is_local) else { return Ok(None) };
        let (leads, words) = self.route(routes, RouteLookup::Arrives)?;
        if leads == RouteEnd::Local
            && routes.validates_sources
            && let (RouteEnd::Local, words) = self.route(routes, RouteLookup::Source)?
        {
            // The kernel drops a packet that claims to come from the pod itself.
            return Ok(Some(self.is_lost(words)));
        }
        Ok(match leads {
            RouteEnd::Local => None,
            RouteEnd::Out(_) | RouteEnd::Lost => Some(self.is_lost(words)),
            RouteEnd::Unknown | RouteEnd::Next => Some(self.is_uncertain(words)),
        })
    }

    /// Where it ends that has come as far as a socket of the pod.
    pub(super) fn arrives(&mut self) -> Result<Fate, Split> {
        if let Some(fate) = self.now.captured {
            return Ok(fate);
        }
        // A mark keeps in the pod what is for an address that the pod does not have: any listener on that port, on
        // any address, gets it, unless it belongs to a connection of a transparent socket.
        let rules = self.rules;
        if self.has_been_sent()
            && let Some(own) = &rules.addresses
            && self.ask(VariedField::State, &RangeSet::range(state::NEW, state::RELATED))?
        {
            let is_own = match self.now.destination {
                Some(to) => FieldMatch::when(own.contains(number(to.ip()))),
                None => FieldMatch::of(&self.now.packets, VariedField::Destination, own),
            };
            if !self.decide(is_own, || Unknown::Work)? {
                self.now.causes.last = None;
                return Ok(self.port().map_or(Fate::Translated, |port| Fate::Redirected { port }));
            }
        }
        Ok(Fate::Untouched)
    }

    /// What is known without the namespace's routes: which marks lead to the pod itself.
    fn route_by_marks(&mut self, moved: bool) -> Result<Interface, Split> {
        let rules = self.rules;
        for local in &rules.local_marks {
            let holds = self.now.mark.has(&self.now.packets, local.value(), local.mask());
            if self.decide(holds, || Unknown::Mark)? {
                return Ok(Interface::Loopback);
            }
        }
        // Where packets go out, they are redirected to the loopback address.
        if moved || self.now.destination.is_some() || self.ask(VariedField::Interface, &RangeSet::one(LO))? {
            return Ok(Interface::Loopback);
        }
        Ok(Interface::Own)
    }

    fn leaves_by(&mut self, to: Interface) {
        if to != self.now.routed.unwrap_or(self.now.goes_out) {
            self.note(|walk| TraceEvent::Changed(PacketEdit::Rerouted { interface: walk.name_of(to) }));
        }
        self.now.routed = Some(to);
    }

    /// What the policy rules and routes say, and the number of the words for what decides.
    fn route(&mut self, routes: &'a Routes, lookup: RouteLookup) -> Result<(RouteEnd, usize), Split> {
        let (end, words, _) = self.route_by_rule(routes, lookup)?;
        Ok((end, words))
    }

    /// The same, and which policy rule decides, if one does.
    fn route_by_rule(
        &mut self,
        routes: &'a Routes,
        lookup: RouteLookup,
    ) -> Result<(RouteEnd, usize, Option<usize>), Split> {
        let begun = self.question.take_if(|question| question.lookup == lookup);
        let mut question = begun.map_or_else(|| RouteQuestion::of(lookup), |begun| *begun);
        let asked = self.asked;
        self.spent = self.spent.saturating_add(question.spent);
        let found = self.answer(routes, &mut question);
        // What was assumed is asked from the beginning.
        if found.is_err() && self.asked == asked {
            self.question = Some(Box::new(question));
        }
        found
    }

    fn answer(
        &mut self,
        routes: &'a Routes,
        question: &mut RouteQuestion,
    ) -> Result<(RouteEnd, usize, Option<usize>), Split> {
        while let Some(rule) = routes.rules.get(question.rule) {
            self.spent = self.spent.saturating_add(1);
            let (number, found) = (question.rule, self.by_rule(routes, rule, question)?);
            question.spent = question.spent.saturating_add(1);
            (question.rule, question.route) = (number.saturating_add(1), 0);
            match (found, rule.leads) {
                (Some((RouteEnd::Next, _)), RuleEnd::Goto(to)) => question.rule = to.max(question.rule),
                (Some((RouteEnd::Next, _)), RuleEnd::Table(..) | RuleEnd::Ends(_)) | (None, _) => {}
                (Some((end, words)), _) => return Ok((end, words, Some(number))),
            }
        }
        Ok((RouteEnd::Lost, NO_ROUTE, None))
    }

    /// Where the policy rule that a question is at sends the packet, if it does, and the number of the words for it.
    fn by_rule(
        &mut self,
        routes: &'a Routes,
        rule: &RouteRule,
        question: &mut RouteQuestion,
    ) -> Result<Option<(RouteEnd, usize)>, Split> {
        let number = question.rule;
        if let RuleEnd::Table(table, longer_than) = rule.leads
            && question.without.contains(&(table, longer_than))
        {
            return Ok(None);
        }
        let takes = self.takes(rule, question.lookup)?;
        if takes == Some(false) {
            return Ok(None);
        }
        let (leads, words) = match rule.leads {
            RuleEnd::Table(table, longer_than) => {
                let Some(step) = self.of_table(routes, (table, longer_than), question)? else {
                    question.without.insert((table, longer_than));
                    return Ok(None);
                };
                (step.leads, routes.number(number, Some(step)))
            }
            RuleEnd::Ends(end) => (end, routes.number(number, None)),
            RuleEnd::Goto(_) => (RouteEnd::Next, routes.number(number, None)),
        };
        let unknown = || Unknown::Route(words_of(Some(routes), words).unwrap_or_default());
        let is_taken = takes.is_some() || self.assume(unknown)?;
        Ok(is_taken.then_some((leads, words)))
    }

    /// The first route of a table that is about the packet.
    fn of_table(
        &mut self,
        routes: &'a Routes,
        (table, longer_than): (u32, Option<u32>),
        question: &mut RouteQuestion,
    ) -> Result<Option<&'a RouteStep>, Split> {
        for step in routes.of_table(table, longer_than).skip(question.route) {
            self.spent = self.spent.saturating_add(1);
            let words =
                || words_of(Some(routes), routes.number(question.rule, Some(step))).unwrap_or_default();
            if self.decide(self.is_bound_for(&step.to, question.lookup), || Unknown::Route(words()))? {
                return Ok(Some(step));
            }
            question.route = question.route.saturating_add(1);
            question.spent = question.spent.saturating_add(1);
        }
        Ok(None)
    }

    /// Whether a policy rule takes the packet; none where that is not known.
    fn takes(&self, rule: &RouteRule, lookup: RouteLookup) -> Result<Option<bool>, Split> {
        let all = all_of(rule.tests.iter().map(|test| self.fulfils(test, lookup)))?;
        Ok(all.map(|all| all != rule.not))
    }

    /// Whether the packet fulfils a condition of a policy rule, or an answer to it would, which has no mark.
    fn fulfils(&self, test: &Test, lookup: RouteLookup) -> Result<Option<bool>, Split> {
        decided(match (test, lookup) {
            (Test::Bits(_, value, ..), RouteLookup::Source) => FieldMatch::when(*value == 0),
            (Test::In(VariedField::Source, set), RouteLookup::Source) => {
                self.has(VariedField::Destination, set)
            }
            (Test::In(VariedField::Destination, set), _) => self.is_bound_for(set, lookup),
            (Test::In(..), RouteLookup::Source) => FieldMatch::Unknown,
            (Test::ComesIn(set), RouteLookup::Arrives) => {
                FieldMatch::of(&self.now.packets, VariedField::Interface, set)
            }
            // What the pod sends comes from lo, and so would an answer.
            (Test::ComesIn(set), _) => FieldMatch::when(set.contains(LO)),
            // IPv4 forgets the user when it routes again (`ip_route_me_harder`).
            (Test::Owner(_, set), RouteLookup::Again) if self.now.packets.family == Family::V4 => {
                FieldMatch::when(set.contains(0))
            }
            (Test::Owner(field, set), RouteLookup::Sent | RouteLookup::Again) => {
                FieldMatch::of(&self.now.packets, *field, set)
            }
            // What has no socket is root's.
            (Test::Owner(_, set), RouteLookup::Arrives | RouteLookup::Source) => {
                FieldMatch::when(set.contains(0))
            }
            (test, _) => self.holds(test),
        })
    }

    /// Whether it goes to one of these addresses, or an answer to it would.
    fn is_bound_for(&self, set: &RangeSet, lookup: RouteLookup) -> FieldMatch {
        self.has(
            if lookup == RouteLookup::Source { VariedField::Source } else { VariedField::Destination },
            set,
        )
    }

    /// Where it goes is not known, for the reason in these words.
    const fn is_uncertain(&mut self, words: usize) -> Fate {
        self.now.causes.last = Some(Cause::Route(words));
        Fate::Unknown
    }

    /// It goes no farther, for the reason in these words.
    pub(super) fn is_lost(&mut self, words: usize) -> Fate {
        self.now.causes.last = Some(Cause::Route(words));
        self.note(|walk| {
            let text = words_of(walk.rules.routes.as_ref(), words);
            TraceEvent::Route { decides: text.unwrap_or_default() }
        });
        if self.records {
            self.decided = self.steps.len().checked_sub(1);
        }
        Fate::Dropped
    }
}
