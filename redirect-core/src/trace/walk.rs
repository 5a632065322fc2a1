//! The walk itself: from hook to hook, from rule to rule.
//!
//! It walks packets, one or many. Where a rule is about some of them, or nobody knows whether it is met, there are two ways to
//! go on; which one a walk takes, its [`Choices`] say. [`all`] walks until every way has been gone.

use super::{
    Change, Fate, Listener, Outcome, Place, Step,
    packets::{Field, Holds, MarkNow, Packets, interface, interface_name, state},
    rules::{Rules, TRACKING, Test, WalkedChain, WalkedRule},
    set::Set,
};
use crate::{
    interference::ruleset::{Base, Statement},
    rule::{Hook, OurChain},
    values::{Family, PASSTHROUGH_V4},
};
use alloc::{
    string::{String, ToString},
    vec::Vec,
};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// How many chains deep a ruleset is followed; the kernel allows 16.
const DEEPEST: usize = 16;
/// How many rules one walk meets at most: rulesets of others may be made to have any number.
const MOST_RULES: usize = 100_000;

/// Which way was taken at each place where there were two.
#[derive(Debug, Default)]
struct Choices {
    made: Vec<bool>,
    next: usize,
}

impl Choices {
    fn choose(&mut self) -> bool {
        let choice = self.made.get(self.next).copied().unwrap_or_else(|| {
            self.made.push(false);
            false
        });
        self.next = self.next.saturating_add(1);
        choice
    }

    /// The next ways to try; false where all have been.
    fn advance(&mut self) -> bool {
        self.next = 0;
        while self.made.last() == Some(&true) {
            self.made.pop();
        }
        self.made.last_mut().map(|last| *last = true).is_some()
    }
}

/// What is known of the packets beside what they differ in.
#[derive(Debug, Clone, Default)]
pub(super) struct Given {
    /// Whether a socket of the pod sends them.
    pub(super) is_local: bool,
    /// Where an earlier packet of the connection was translated to.
    pub(super) translated_to: Option<SocketAddr>,
    /// The pod's address, which REDIRECT sends to what comes from outside.
    pub(super) own: Option<IpAddr>,
}

/// One way through the rules.
#[derive(Debug)]
pub(super) struct Way {
    /// The packets that take it.
    pub(super) packets: Packets,
    pub(super) fate: Fate,
    pub(super) steps: Vec<Step>,
    /// The step that decides.
    pub(super) decided: Option<usize>,
}

/// Every way that packets take, up to so many. `None` where there are more.
pub(super) fn all(
    rules: &Rules,
    packets: &Packets,
    given: &Given,
    most: usize,
    records: bool,
) -> (Vec<Way>, bool) {
    let mut choices = Choices::default();
    let mut ways = Vec::new();
    loop {
        let records = records && ways.is_empty();
        ways.push(Walk::new(rules, packets.clone(), given, &mut choices, records).run());
        if !choices.advance() {
            return (ways, true);
        }
        if ways.len() >= most {
            return (ways, false);
        }
    }
}

/// By which a packet comes or goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Interface {
    None,
    Loopback,
    /// The packet's own.
    Own,
}

/// What becomes of a packet in a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// It goes to the next rule.
    Next,
    /// Back to the calling chain.
    Returned,
    /// Out of the base chain.
    Left,
    /// Nowhere else.
    At(Fate),
}

struct Walk<'a, 'c> {
    rules: &'a Rules,
    packets: Packets,
    given: &'a Given,
    choices: &'c mut Choices,
    hook: Hook,
    came_in: Interface,
    goes_out: Interface,
    has_owner: bool,
    mark: MarkNow,
    connection_mark: MarkNow,
    /// Where it was translated to.
    destination: Option<SocketAddr>,
    is_tracked: bool,
    is_untracked: bool,
    /// Whether nat has been asked about the destination.
    is_bound: bool,
    /// Who has captured it.
    captured: Option<Fate>,
    records: bool,
    steps: Vec<Step>,
    decided: Option<usize>,
    /// The steps of the jumps by which the rule at hand was reached.
    jumps: Vec<usize>,
    left: usize,
}

impl<'a, 'c> Walk<'a, 'c> {
    fn new(
        rules: &'a Rules,
        packets: Packets,
        given: &'a Given,
        choices: &'c mut Choices,
        records: bool,
    ) -> Self {
        Self {
            rules,
            packets,
            given,
            choices,
            hook: Hook::Output,
            came_in: Interface::None,
            goes_out: Interface::None,
            has_owner: given.is_local,
            mark: MarkNow::of(Field::Mark),
            connection_mark: MarkNow::of(Field::ConnMark),
            destination: None,
            is_tracked: false,
            is_untracked: false,
            is_bound: false,
            captured: None,
            records,
            steps: Vec::new(),
            decided: None,
            jumps: Vec::new(),
            left: MOST_RULES,
        }
    }

    fn run(mut self) -> Way {
        let fate = self.way().unwrap_or_else(|fate| fate);
        Way {
            packets: self.packets,
            fate: if self.left == 0 { Fate::Unknown } else { fate },
            steps: self.steps,
            decided: self.decided,
        }
    }

    /// The whole way; the error is where it ends before.
    fn way(&mut self) -> Result<Fate, Fate> {
        if !self.given.is_local {
            self.came_in = Interface::Own;
            return self.arrives();
        }
        let over_loopback = self.ask(Field::Interface, &Set::one(interface("lo")));
        self.goes_out = if over_loopback { Interface::Loopback } else { Interface::Own };
        let routed = self.output()?;
        self.goes_out = routed;
        self.visit(Hook::Postrouting)?;
        if routed == Interface::Loopback {
            // A packet on lo belongs to no socket any more; mark and connection stay with it.
            (self.came_in, self.goes_out, self.has_owner) = (Interface::Loopback, Interface::None, false);
            return self.arrives();
        }
        Ok(self.captured.unwrap_or(Fate::Untouched))
    }

    fn arrives(&mut self) -> Result<Fate, Fate> {
        self.visit(Hook::Prerouting)?;
        self.visit(Hook::Input)?;
        Ok(self.captured.unwrap_or(Fate::Untouched))
    }

    /// The output hook, and by which interface the packet leaves behind it.
    fn output(&mut self) -> Result<Interface, Fate> {
        let mut routed = self.goes_out;
        self.begins(Hook::Output);
        let rules = self.rules;
        for (chain, base) in rules.hooked(Hook::Output) {
            let (mark, destination) = (self.mark, self.destination);
            self.base(chain, base)?;
            let moved = self.destination != destination;
            if moved || base.reroutes && self.mark != mark {
                let was = routed;
                routed = self.route()?;
                if routed != was {
                    self.changed(Change::Rerouted(self.name_of(routed)));
                }
            }
        }
        Ok(routed)
    }

    /// Where the kernel sends what has another mark or destination now.
    fn route(&mut self) -> Result<Interface, Fate> {
        let mark = self.mark;
        for local in self.rules.local_marks.clone() {
            let holds = mark.has(&self.packets, local, u32::MAX);
            if self.decide(holds) {
                return Ok(Interface::Loopback);
            }
        }
        Ok(match self.destination {
            Some(to) if to.ip().is_loopback() => Interface::Loopback,
            Some(_) | None => {
                if self.ask(Field::Interface, &Set::one(interface("lo"))) {
                    Interface::Loopback
                } else {
                    Interface::Own
                }
            }
        })
    }

    fn begins(&mut self, hook: Hook) {
        self.hook = hook;
        let interface = if self.came_in == Interface::None { self.goes_out } else { self.came_in };
        let interface = if self.records { self.name_of(interface) } else { None };
        self.note(|_| Step::Hook { hook, interface });
    }

    fn visit(&mut self, hook: Hook) -> Result<(), Fate> {
        self.begins(hook);
        let rules = self.rules;
        for (chain, base) in rules.hooked(hook) {
            self.base(chain, base)?;
        }
        Ok(())
    }

    fn base(&mut self, chain: &'a WalkedChain, base: Base) -> Result<(), Fate> {
        if base.priority > TRACKING {
            self.is_tracked = true;
        }
        if base.is_nat && !self.asks_nat() {
            return Ok(());
        }
        self.note(|_| Step::Chain {
            place: Place { table: chain.table.clone(), chain: chain.name.clone(), rule: None },
            priority: base.priority,
        });
        let before = self.captured;
        let end = match self.chain(chain, 0) {
            End::Next | End::Returned if base.drops => {
                self.note(|_| Step::Policy {
                    place: Place { table: chain.table.clone(), chain: chain.name.clone(), rule: None },
                });
                self.decided = self.steps.len().checked_sub(1);
                Err(Fate::Dropped)
            }
            End::Next | End::Returned | End::Left => Ok(()),
            End::At(fate) => Err(fate),
        };
        // A connection is translated once.
        if base.is_nat && self.captured != before && self.destination.is_some() {
            self.is_bound = true;
        }
        end
    }

    /// Whether nat is asked: only about the first packet of a connection, and once about its destination.
    fn asks_nat(&mut self) -> bool {
        let of_destination = matches!(self.hook, Hook::Prerouting | Hook::Output);
        if of_destination && self.is_bound || self.is_untracked {
            return false;
        }
        if of_destination && self.came_in == Interface::Loopback {
            return false;
        }
        let first = Set::range(state::NEW, state::RELATED);
        if self.ask(Field::State, &first) {
            return true;
        }
        if let (Some(to), None) = (self.given.translated_to, self.destination)
            && of_destination
        {
            self.destination = Some(to);
            self.changed(Change::Destination(to));
        }
        false
    }

    fn chain(&mut self, chain: &'a WalkedChain, depth: usize) -> End {
        for (number, rule) in (1_usize..).zip(&chain.rules) {
            self.left = self.left.saturating_sub(1);
            if self.left == 0 || depth > DEEPEST {
                return End::Next;
            }
            if !self.meets(chain, number, rule) {
                continue;
            }
            let end = self.rule(chain, rule, depth);
            if end != End::Next {
                return end;
            }
        }
        End::Next
    }

    /// Whether a rule is met. What is not understood may hold or not: both is tried, if it matters.
    fn meets(&mut self, chain: &'a WalkedChain, number: usize, rule: &'a WalkedRule) -> bool {
        let mut unknown = None;
        for (test, condition) in rule.tests.iter().zip(&rule.seen.conditions) {
            match self.holds(test) {
                Holds::Yes => {}
                Holds::Unknown => unknown = unknown.or(Some(condition)),
                holds @ (Holds::No | Holds::For(..)) => {
                    if !self.decide(holds) {
                        self.note_rule(chain, number, rule, |_| Outcome::Unmatched(condition.to_string()));
                        return false;
                    }
                }
            }
        }
        let Some(condition) = unknown else {
            self.note_rule(chain, number, rule, |_| Outcome::Matched);
            return true;
        };
        self.note_rule(chain, number, rule, |_| Outcome::Unknown(condition.to_string()));
        let matters = rule.seen.statements.iter().any(|one| !matches!(one, Statement::Harmless(_)));
        if !matters {
            return false;
        }
        self.choices.choose()
    }

    fn holds(&self, test: &Test) -> Holds {
        match test {
            Test::Always(holds) => Holds::when(*holds),
            Test::In(field, set) => match (field, self.destination) {
                (Field::Destination, Some(to)) => Holds::when(set.contains(super::packets::number(to.ip()))),
                (Field::Port, Some(to)) => Holds::when(set.contains(to.port().into())),
                (Field::State, _) if self.is_untracked => Holds::when(set.contains(state::UNTRACKED)),
                (field, _) => Holds::of(&self.packets, *field, set),
            },
            Test::ComesIn(set, not) => self.by(self.came_in, set, *not),
            Test::GoesOut(set, not) => self.by(self.goes_out, set, *not),
            Test::Owner(field, set) if self.has_owner => Holds::of(&self.packets, *field, set),
            Test::Owner(..) => Holds::No,
            Test::Bits(field, value, mask, not) => {
                let mark = if *field == Field::Mark { self.mark } else { self.connection_mark };
                let holds = mark.has(&self.packets, *value, *mask);
                if *not { holds.not(self.packets.family) } else { holds }
            }
            Test::Unknown => Holds::Unknown,
        }
    }

    fn by(&self, by: Interface, set: &Set, not: bool) -> Holds {
        let holds = match by {
            // The kernel compares with an empty name.
            Interface::None => Holds::No,
            Interface::Loopback => Holds::when(set.contains(interface("lo"))),
            Interface::Own => Holds::of(&self.packets, Field::Interface, set),
        };
        if not { holds.not(self.packets.family) } else { holds }
    }

    fn ask(&mut self, field: Field, set: &Set) -> bool {
        let holds = Holds::of(&self.packets, field, set);
        self.decide(holds)
    }

    /// Takes one of the ways, with the packets that go it.
    fn decide(&mut self, holds: Holds) -> bool {
        match holds {
            Holds::Yes => true,
            Holds::No => false,
            Holds::For(field, set) => {
                let chosen = self.choices.choose();
                let all = self.packets.get(field);
                let taken = if chosen { all.and(&set) } else { all.without(&set) };
                self.packets.set(field, taken);
                chosen
            }
            Holds::Unknown => self.choices.choose(),
        }
    }

    fn rule(&mut self, chain: &'a WalkedChain, rule: &'a WalkedRule, depth: usize) -> End {
        let step = self.steps.len().checked_sub(1);
        for statement in &rule.seen.statements {
            let end = match statement {
                Statement::Jump(_) => self.jump(rule, step, depth),
                Statement::Goto(_) => match self.jump(rule, step, depth) {
                    End::Next => End::Returned,
                    end @ (End::Returned | End::Left | End::At(_)) => end,
                },
                Statement::Accept | Statement::Return => {
                    self.leaves_alone(rule, step);
                    if *statement == Statement::Accept { End::Left } else { End::Returned }
                }
                Statement::TranslateSource(_) => End::Left,
                Statement::Drop => self.ends(chain, step, Fate::Dropped),
                Statement::Reject => self.ends(chain, step, Fate::Rejected),
                Statement::Redirect(port) => self.redirect(chain, step, *port),
                Statement::Translate(_) if self.is_handed_over() => self.ends(chain, step, Fate::Broken),
                Statement::Translate(_) => self.ends(chain, step, Fate::Translated),
                Statement::Tproxy { port, mark, ends } => self.tproxy(chain, step, *port, *mark, *ends),
                Statement::Queue | Statement::Unknown(_) | Statement::Rewrite(_) => {
                    self.not_understood(chain, step)
                }
                Statement::Untrack => {
                    self.is_untracked |= !self.is_tracked;
                    End::Next
                }
                Statement::SetMark(Some(mark)) => self.set_mark(MarkNow::is(*mark)),
                Statement::SetMark(None) => self.set_mark(MarkNow::unknown()),
                Statement::SetMarkBits { mask, value } => self.set_mark(self.mark.changed(*mask, *value)),
                Statement::RestoreMark => self.set_mark(self.connection_mark),
                Statement::SaveMark => self.set_connection_mark(self.mark),
                Statement::SetConnMark { mask, value } => {
                    self.set_connection_mark(self.connection_mark.changed(*mask, *value))
                }
                Statement::Zone(zone) => {
                    if !self.is_tracked {
                        self.changed(Change::Zone(*zone));
                    }
                    End::Next
                }
                Statement::Harmless(_) => End::Next,
            };
            if end != End::Next {
                return end;
            }
        }
        End::Next
    }

    fn jump(&mut self, rule: &'a WalkedRule, step: Option<usize>, depth: usize) -> End {
        let Some(chain) = rule.to.and_then(|to| self.rules.chains.get(to)) else { return End::Next };
        self.jumps.extend(step);
        let end = self.chain(chain, depth.saturating_add(1));
        if step.is_some() {
            self.jumps.pop();
        }
        match end {
            End::Returned => End::Next,
            end @ (End::Next | End::Left | End::At(_)) => end,
        }
    }

    /// A rule of the mesh that ends a chain without a capture is why there is none.
    fn leaves_alone(&mut self, rule: &WalkedRule, step: Option<usize>) {
        if rule.is_own && self.captured.is_none() {
            self.decided = step;
        }
    }

    fn decides(&mut self, chain: &WalkedChain, step: Option<usize>) {
        let only_carries_out = match chain.ours {
            Some(
                OurChain::Redirect
                | OurChain::InRedirect
                | OurChain::Tproxy
                | OurChain::Divert
                | OurChain::Drop,
            ) => true,
            Some(
                OurChain::GuardIn
                | OurChain::GuardOut
                | OurChain::Inbound
                | OurChain::Output
                | OurChain::OutputDns,
            )
            | None => false,
        };
        // What sends a packet to such a chain decides, not what stands in it.
        self.decided = if only_carries_out { self.jumps.last().copied().or(step) } else { step };
    }

    fn ends(&mut self, chain: &WalkedChain, step: Option<usize>, fate: Fate) -> End {
        self.decides(chain, step);
        End::At(fate)
    }

    fn not_understood(&mut self, chain: &WalkedChain, step: Option<usize>) -> End {
        if self.choices.choose() { self.ends(chain, step, Fate::Unknown) } else { End::Next }
    }

    /// Whether TPROXY has chosen the socket already. What is translated after that comes to a connection that this socket
    /// does not have.
    const fn is_handed_over(&self) -> bool {
        matches!(self.captured, Some(Fate::Proxy { rewritten: false, .. } | Fate::Unknown))
    }

    fn redirect(&mut self, chain: &WalkedChain, step: Option<usize>, port: u16) -> End {
        let at = match (self.hook, self.packets.family, self.given.own) {
            (Hook::Output, Family::V4, _) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            (Hook::Output, Family::V6, _) => IpAddr::V6(Ipv6Addr::LOCALHOST),
            (Hook::Prerouting | Hook::Input | Hook::Forward | Hook::Postrouting, _, Some(own)) => own,
            (Hook::Prerouting | Hook::Input | Hook::Forward | Hook::Postrouting, family, None) => {
                self.original_destination(family)
            }
        };
        let to = SocketAddr::new(at, port);
        if self.is_handed_over() {
            return self.ends(chain, step, Fate::Broken);
        }
        self.destination = Some(to);
        self.captured = Some(match listener(chain.ours) {
            Some(listener) => Fate::Proxy { listener, port, rewritten: true },
            None => Fate::Redirected(port),
        });
        self.changed(Change::Destination(to));
        self.decides(chain, step);
        End::Left
    }

    /// One of the destinations the packets have.
    fn original_destination(&self, family: Family) -> IpAddr {
        let number = self.packets.get(Field::Destination).first().unwrap_or(0);
        match family {
            Family::V4 => IpAddr::V4(u32::try_from(number).map_or(PASSTHROUGH_V4, Ipv4Addr::from)),
            Family::V6 => IpAddr::V6(number.into()),
        }
    }

    fn tproxy(
        &mut self,
        chain: &WalkedChain,
        step: Option<usize>,
        port: Option<u16>,
        mark: Option<(u32, u32)>,
        ends: bool,
    ) -> End {
        if let Some((mask, value)) = mark {
            self.set_mark(self.mark.changed(mask, value));
        }
        let port =
            port.or_else(|| self.packets.get(Field::Port).single().and_then(|port| u16::try_from(port).ok()));
        self.captured = Some(match (listener(chain.ours), port) {
            (Some(listener), Some(port)) => Fate::Proxy { listener, port, rewritten: false },
            (None, Some(port)) => Fate::Redirected(port),
            (_, None) => Fate::Unknown,
        });
        self.decides(chain, step);
        if ends { End::Left } else { End::Next }
    }

    fn set_mark(&mut self, mark: MarkNow) -> End {
        if mark != self.mark {
            self.mark = mark;
            let now = mark.value(&self.packets);
            self.changed(Change::Mark(now));
        }
        End::Next
    }

    fn set_connection_mark(&mut self, mark: MarkNow) -> End {
        if mark != self.connection_mark {
            self.connection_mark = mark;
            let now = mark.value(&self.packets);
            self.changed(Change::ConnectionMark(now));
        }
        End::Next
    }

    fn name_of(&self, by: Interface) -> Option<String> {
        match by {
            Interface::None => None,
            Interface::Loopback => Some("lo".into()),
            Interface::Own => self.packets.get(Field::Interface).single().map(interface_name),
        }
    }

    fn changed(&mut self, change: Change) {
        self.note(|_| Step::Changed(change));
    }

    fn note_rule(
        &mut self,
        chain: &WalkedChain,
        number: usize,
        rule: &WalkedRule,
        outcome: impl FnOnce(&Self) -> Outcome,
    ) {
        self.note(|walk| Step::Rule {
            place: Place { table: chain.table.clone(), chain: chain.name.clone(), rule: Some(number) },
            depth: walk.jumps.len(),
            rule: rule.seen.to_string(),
            outcome: outcome(walk),
            is_own: rule.is_own,
            origin: rule.origin,
        });
    }

    fn note(&mut self, step: impl FnOnce(&Self) -> Step) {
        if self.records {
            let step = step(self);
            self.steps.push(step);
        }
    }
}

/// Whose chain sends packets where.
const fn listener(chain: Option<OurChain>) -> Option<Listener> {
    match chain {
        Some(OurChain::Redirect) => Some(Listener::Outbound),
        Some(OurChain::InRedirect | OurChain::Tproxy) => Some(Listener::Inbound),
        Some(OurChain::OutputDns) => Some(Listener::Dns),
        Some(
            OurChain::Divert
            | OurChain::Drop
            | OurChain::GuardIn
            | OurChain::GuardOut
            | OurChain::Inbound
            | OurChain::Output,
        )
        | None => None,
    }
}
