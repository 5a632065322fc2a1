//! The walk itself: from hook to hook, from rule to rule.
//!
//! Here is the way from hook to hook and from rule to rule; `conditions` says which packets a rule is about, `statements` what it does
//! with them, `notes` what is told of it.
//!
//! It walks packets, one or many. Where a rule is about some of them, or nobody knows whether it is met, there are two ways to
//! go on; which one a walk takes, its [`Choices`] say. [`all`] walks until every way has been gone.

mod conditions;
mod notes;
mod statements;

use super::{
    Change, Fate, Outcome, Place, Step,
    packets::{Field, MarkNow, Packets, interface, state},
    rules::{Rules, TRACKING, WalkedChain, WalkedRule},
    set::Set,
};
use crate::{
    interference::ruleset::{Base, Statement},
    rule::Hook,
};
use alloc::{string::ToString, vec::Vec};
use core::net::{IpAddr, SocketAddr};

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

/// Every way that packets take, up to so many, and whether those are all. The steps of the first are recorded, if they are asked for.
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
    /// The base chain that the packet is in, and the number of its rule there.
    at: Option<(&'a WalkedChain, usize)>,
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
            at: None,
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
            // Where packets go out, they are redirected to the loopback address.
            Some(_) => Interface::Loopback,
            None => {
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
            if depth == 0 {
                self.at = Some((chain, number));
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
            match self.asked(test) {
                Some(true) => {}
                None => unknown = unknown.or(Some(condition)),
                Some(false) => {
                    self.note_rule(chain, number, rule, |_| Outcome::Unmatched(condition.to_string()));
                    return false;
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
}
