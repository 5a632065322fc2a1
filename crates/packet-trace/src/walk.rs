//! The walk itself: from hook to hook, from base chain to base chain, from rule to rule.
//!
//! A walk takes packets, one or many, step by step. A step first decides and then acts: where the packets of a walk differ in
//! what it asks, or where the answer is unknown, it returns a [`Split`] and has changed nothing. The walk is then copied, one
//! copy for each answer, and both take the step again. [`all`] runs until every copy has arrived, so each part of a path is
//! walked once, no matter how many paths share it.
//!
//! This module has the walk itself, from rule to rule; `hooks` goes from hook to hook. `conditions` decides which packets a rule matches, `statements` what it
//! does with them, `routes` where the kernel sends them, and `notes` records the steps.

mod conditions;
mod hooks;
mod notes;
mod routes;
mod statements;

use routes::RouteQuestion;
pub(super) use routes::{RouteLookup, Routed, routed};

use super::{
    Fate, Outcome, TraceEvent, Unknown,
    packets::{LO, MarkNow, Packets, VariedField},
    rules::{ChainRule, TraceRules, WalkedChain, WalkedRule},
    set::RangeSet,
};
use netfilter_state::ruleset::InterfaceDirection;
use redirect_core::rule::{Hook, Protocol};
use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

/// How many chains deep a ruleset is followed; the kernel allows 16.
const DEEPEST: usize = 16;

/// How many marks packets of one walk have at most that are distinguished.
pub(super) const MOST_MARKS: u128 = 16;

/// What is known of the packets beside what they differ in.
#[derive(Debug, Clone, Default)]
pub(super) struct WalkInput {
    /// Whether a socket of the pod sends them.
    pub(super) is_local: bool,
    /// Where an earlier packet of the connection was translated to.
    pub(super) translated_to: Option<SocketAddr>,
    /// The pod's address, to which REDIRECT sends packets from outside.
    pub(super) own: Option<IpAddr>,
    /// Whether to check that packets sent to other hosts have a route; otherwise assumes one.
    pub(super) asks_route: bool,
    /// Whether they are sent in the name of a client: answers find their way by the connection's mark.
    pub(super) names_client: bool,
    /// What the connection remembers of its first packet, if this one repeats it: nat has decided, and is not asked again.
    pub(super) repeats: Option<Remembered>,
}

/// One way through the rules.
#[derive(Debug)]
pub(super) struct TracePath {
    /// The packets that take it.
    pub(super) packets: Packets,
    pub(super) fate: Fate,
    /// Who has captured it, even where the kernel drops it behind that.
    pub(super) captured: Option<Fate>,
    pub(super) steps: Vec<TraceEvent>,
    /// The step that decides, where steps are recorded.
    pub(super) decided: Option<usize>,
    /// Whether no packet is sent at all, for want of a route.
    pub(super) is_unsent: bool,
    /// What is responsible for where it ends.
    pub(super) causes: Causes,
    /// The zone of connection tracking it was given.
    pub(super) zone: Option<u16>,
    /// The mark with which TPROXY's routing sees it; none where that is not known.
    pub(super) mark: Option<u32>,
    /// What the connection remembers of a packet that is lost, if its repetition may fare otherwise.
    remembered: Option<Remembered>,
}

/// What a connection remembers of its first packet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Remembered {
    mark: u32,
    /// Where nat sends it, and who has captured it by that.
    translated: Option<(SocketAddr, Option<Fate>)>,
}

/// The possible causes of a path's end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Causes {
    /// What decided last.
    pub(super) last: Option<Cause>,
    /// The first rule of other programs that ended a base chain before the mesh's rules in it.
    pub(super) left_early: Option<ChainRule>,
    /// The rule of other programs that kept connection tracking from it.
    pub(super) untracked: Option<ChainRule>,
    /// The rule of other programs that chose its zone of connection tracking.
    pub(super) zoned: Option<ChainRule>,
    /// The rule of other programs that decided that its destination stays as it is.
    pub(super) bound: Option<ChainRule>,
    /// The last rule of other programs that changed its mark or its connection's.
    pub(super) marked: Option<ChainRule>,
    /// The route that keeps in the pod what is sent to others: the number of its words.
    pub(super) kept: Option<usize>,
}

/// What may decide about packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Cause {
    Rule(ChainRule),
    /// A base chain's policy.
    Policy(usize),
    /// A policy rule, a route or `lo`: the number of its words.
    Route(usize),
    /// Nothing that is known.
    Nothing,
}

/// Every way that packets take.
#[derive(Debug, Default)]
pub(super) struct Ways {
    pub(super) ways: Vec<TracePath>,
    /// Whether paths overlap: which packets take which is unknown.
    pub(super) are_doubtful: bool,
    /// The unknowns on the way.
    pub(super) unknown: BTreeSet<Unknown>,
}

impl Ways {
    fn may_arrive(&self) -> bool {
        self.ways.iter().any(|way| !matches!(way.fate, Fate::Dropped | Fate::Rejected))
    }
}

/// How much work may be done: a rule met costs one, and more if it compares many ranges.
#[derive(Debug)]
pub(super) struct WorkBudget {
    pub(super) left: usize,
    /// The chain in which it came to an end: of all walks, of the first.
    pub(super) ended_in: Option<usize>,
}

impl WorkBudget {
    /// As much as this.
    pub(super) const fn of(left: usize) -> Self {
        Self { left, ended_in: None }
    }

    /// Unlimited.
    pub(super) const fn any() -> Self {
        Self::of(usize::MAX)
    }

    pub(super) const fn spend(&mut self, cost: usize) {
        self.left = self.left.saturating_sub(cost);
    }
}

/// How many ways are followed at most, each of which takes about a thousand bytes.
const MOST_WALKS: usize = 1 << 14;

/// Every path that packets take. On request, records the steps of one path: the one on which no uncertain rule matches.
pub(super) fn all(
    rules: &TraceRules,
    packets: &Packets,
    given: &WalkInput,
    work: &mut WorkBudget,
    records: bool,
) -> Ways {
    let mut found = first(rules, packets, given, work, records);
    let arriving: Vec<Ways> = found
        .ways
        .iter()
        .filter_map(|way| repeated(rules, way, given, work))
        .filter(Ways::may_arrive)
        .collect();
    for ways in arriving {
        found.ways.extend(ways.ways);
        found.are_doubtful = true;
        found.unknown.insert(Unknown::Repeated);
    }
    found
}

/// The ways of a lost packet when TCP repeats it, if they may differ. What a pod sends to itself is lost on its way in, when
/// connection tracking has kept the connection on its way out, mark and all; rules that ask for that mark then treat the
/// repetition otherwise.
fn repeated(rules: &TraceRules, way: &TracePath, given: &WalkInput, work: &mut WorkBudget) -> Option<Ways> {
    let remembered = way.remembered?;
    let packets = way.packets.clone().with(VariedField::ConnMark, RangeSet::one(remembered.mark.into()));
    let given = WalkInput { repeats: Some(remembered), ..given.clone() };
    let mut ways = first(rules, &packets, &given, work, false);
    for way_again in &mut ways.ways {
        // They are the packets that were lost, whatever the connection remembers.
        way_again.packets.set(VariedField::ConnMark, way.packets.get(VariedField::ConnMark).clone());
    }
    Some(ways)
}

/// Every way that packets take, if they are sent once.
fn first(
    rules: &TraceRules,
    packets: &Packets,
    given: &WalkInput,
    work: &mut WorkBudget,
    records: bool,
) -> Ways {
    // Mostly packets part a few times, if at all.
    let mut found = Ways { ways: Vec::with_capacity(4), ..Ways::default() };
    let (mut known, mut open) = (BTreeSet::new(), Vec::with_capacity(4));
    open.push(Walk::new(rules, packets.clone(), given, records));
    while let Some(mut walk) = open.pop() {
        let fate = loop {
            if work.left == 0 {
                found.unknown.insert(Unknown::Work);
                work.ended_in =
                    work.ended_in.or(walk.now.calls.first().map(|call| call.chain)).or(walk.now.in_base);
                break Some(Fate::Unknown);
            }
            work.spend(walk.cost().saturating_add(std::mem::take(&mut walk.spent)));
            // Of some steps: a copy costs more than a step.
            #[cfg(test)]
            let before = work.left.is_multiple_of(8).then(|| walk.now.clone());
            match walk.step() {
                // Walks that have become equal, whatever their histories, continue as one.
                Ok(None) if found.are_doubtful && walk.now.point == Point::Base => {
                    work.spend(walk.now.packets.ranges());
                    if !known.insert(walk.now.clone()) {
                        break None;
                    }
                }
                Ok(None) => {}
                Ok(Some(fate)) => break Some(fate),
                Err(split) => {
                    #[cfg(test)]
                    assert!(
                        before.is_none_or(|before| before == walk.now),
                        "a step that splits has changed something"
                    );
                    found.are_doubtful |= matches!(split, Split::Unknown(_));
                    found.unknown.extend(split.unknown());
                    let (walks, cost) = walk.cost_of(&split);
                    work.spend(cost);
                    if open.len().saturating_add(found.ways.len()).saturating_add(walks) > MOST_WALKS {
                        work.left = 0;
                    } else {
                        walk.part(split, &mut open);
                    }
                }
            }
        };
        if let Some(fate) = fate {
            found.ways.push(walk.ended(fate));
        }
    }
    found
}

/// By which a packet comes or goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Interface {
    None,
    Loopback,
    /// The packet's own.
    Own,
    /// The interface of this name, chosen by routing.
    Named(u128),
}

/// What connection tracking knows of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Tracking {
    /// It has not seen it.
    NotYet,
    /// Nor this one, for which a zone was chosen: to rules it looks like a new connection without a mark.
    Template,
    /// A rule makes it skip the packet.
    Never,
    /// It has seen it, and found what is in the field `State`.
    Seen,
}

/// What a walk does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Point {
    /// A socket sends it.
    Sent,
    /// It comes to a hook.
    Hook(Hook),
    /// An interface receives or sends it.
    Device(InterfaceDirection),
    /// It comes to the next base chain of the hook or interface.
    Base,
    /// It comes to the next rule of the chain it is in.
    Rule,
    /// It fulfils the conditions of the rule it has come to, and this statement is next.
    Statement(usize),
    /// No rule of it has decided: the base chain's policy decides.
    Policy,
    /// It leaves a base chain.
    Left,
}

/// Why a walk becomes several.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Split {
    /// Its packets differ in whether they have one of these values.
    By(VariedField, RangeSet),
    /// They differ in which of these sets their values are in.
    Into(VariedField, Vec<RangeSet>),
    /// Unknown.
    Unknown(Unknown),
}

impl Split {
    fn unknown(&self) -> Option<Unknown> {
        match self {
            Self::By(VariedField::Interface, _) => Some(Unknown::Interface),
            Self::By(VariedField::Source, _) | Self::Into(VariedField::Source, _) => Some(Unknown::Source),
            Self::By(VariedField::SourcePort, _) | Self::Into(VariedField::SourcePort, _) => {
                Some(Unknown::SourcePort)
            }
            Self::By(..) | Self::Into(..) => None,
            Self::Unknown(unknown) => Some(unknown.clone()),
        }
    }
}

/// A chain that a packet is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Call {
    chain: usize,
    /// The rule it is at.
    rule: usize,
    /// How many rules that one stands for.
    count: usize,
    /// The step that led here, where steps are recorded.
    step: Option<usize>,
    /// The rule that sent it here for good (`goto`).
    gone_by: Option<ChainRule>,
}

impl Call {
    const fn to(chain: usize) -> Self {
        Self { chain, rule: 0, count: 1, step: None, gone_by: None }
    }
}

#[derive(Debug, Clone)]
struct Walk<'a> {
    rules: &'a TraceRules,
    given: &'a WalkInput,
    /// Kept apart, since walks are moved and a copy of it is large.
    now: Box<Now>,
    /// What it assumes at this point about the unknown, ...
    assumed: Vec<bool>,
    /// ... and how many of these assumptions the step has used.
    asked: usize,
    /// How far the step has asked routing when it split.
    question: Option<Box<RouteQuestion>>,
    /// Whether it was never sent, for want of a route.
    is_unsent: bool,
    records: bool,
    steps: Vec<TraceEvent>,
    decided: Option<usize>,
    /// The step of the rule at hand.
    rule_step: Option<usize>,
    /// Work of the last step beyond what each costs.
    spent: usize,
}

/// All that decides about the rest of a walk's way, and about what is said of its end: walks that are equal in it continue as one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Now {
    packets: Packets,
    point: Point,
    hook: Hook,
    /// Whether it is at an interface, before or behind that hook.
    device: Option<InterfaceDirection>,
    /// The base chains of the hook or interface that are to come.
    to_come: Vec<usize>,
    /// The base chain it is in, ...
    in_base: Option<usize>,
    /// ... and the chains that led here: the current one first.
    calls: Vec<Call>,
    /// The rule of the base chain by which it went deeper, or left.
    base_rule: Option<usize>,
    came_in: Interface,
    goes_out: Interface,
    /// What routing says of a packet for the pod itself that it sends out: the number of its words.
    strays: Option<usize>,
    /// By which it leaves behind the hook, where rules of the hook have had it routed again: they see the one it had before.
    routed: Option<Interface>,
    has_owner: bool,
    mark: MarkNow,
    connection_mark: MarkNow,
    /// Mark and destination when it came to the base chain: if they differ behind it, it is routed again.
    mark_before: MarkNow,
    destination_before: Option<SocketAddr>,
    /// The mark with which routing sees what arrives.
    mark_routed: Option<MarkNow>,
    /// Where it was translated to.
    destination: Option<SocketAddr>,
    /// Whether its source was translated, to an unknown address.
    is_source_translated: bool,
    /// Whether the class of its traffic was written.
    is_reclassed: bool,
    tracking: Tracking,
    zone: Option<u16>,
    /// Whether nat has been asked about the destination, and about the source.
    is_bound: bool,
    is_source_bound: bool,
    /// Who has captured it.
    captured: Option<Fate>,
    /// The rule of TPROXY that has chosen its socket.
    handed_over: Option<ChainRule>,
    causes: Causes,
}

impl Now {
    fn of(packets: Packets, is_local: bool) -> Self {
        let (mark, connection_mark) = (MarkNow::of(VariedField::Mark), MarkNow::of(VariedField::ConnMark));
        Self {
            packets,
            point: if is_local { Point::Sent } else { Point::Device(InterfaceDirection::Ingress) },
            hook: Hook::Output,
            device: None,
            to_come: Vec::new(),
            in_base: None,
            calls: Vec::new(),
            base_rule: None,
            came_in: if is_local { Interface::None } else { Interface::Own },
            goes_out: Interface::None,
            strays: None,
            routed: None,
            has_owner: is_local,
            mark,
            connection_mark,
            mark_before: mark,
            destination_before: None,
            mark_routed: None,
            destination: None,
            is_source_translated: false,
            is_reclassed: false,
            tracking: Tracking::NotYet,
            zone: None,
            is_bound: false,
            is_source_bound: false,
            captured: None,
            handed_over: None,
            causes: Causes::default(),
        }
    }

    /// It leaves the base chain: what was only said of that is forgotten.
    fn leaves_base(&mut self) {
        self.calls.clear();
        (self.in_base, self.base_rule) = (None, None);
        (self.mark_before, self.destination_before) = (self.mark, self.destination);
        self.point = Point::Base;
    }
}

impl<'a> Walk<'a> {
    fn new(rules: &'a TraceRules, packets: Packets, given: &'a WalkInput, records: bool) -> Self {
        let now = Box::new(Now::of(packets, given.is_local));
        Self {
            rules,
            given,
            now,
            assumed: Vec::new(),
            asked: 0,
            question: None,
            is_unsent: false,
            records,
            steps: Vec::new(),
            decided: None,
            rule_step: None,
            spent: 0,
        }
    }

    fn ended(self, fate: Fate) -> TracePath {
        let remembered = self.remembered(fate);
        let mark = self.now.mark_routed.unwrap_or(self.now.mark).value(&self.now.packets);
        TracePath {
            packets: self.now.packets,
            fate,
            captured: self.now.captured,
            steps: self.steps,
            decided: self.decided.filter(|_| self.records),
            is_unsent: self.is_unsent,
            causes: self.now.causes,
            zone: self.now.zone,
            mark,
            remembered,
        }
    }

    /// What connection tracking has kept of a lost connection, if rules have changed its mark.
    fn remembered(&self, fate: Fate) -> Option<Remembered> {
        let is_kept = self.has_been_sent() && self.now.tracking == Tracking::Seen;
        let is_tcp =
            self.now.packets.get(VariedField::Protocol).single() == Some(Protocol::Tcp.number().into());
        let is_marked = self.now.connection_mark != MarkNow::of(VariedField::ConnMark);
        let is_lost = matches!(fate, Fate::Dropped | Fate::Rejected);
        if !(is_lost && is_kept && is_tcp && is_marked) || self.given.repeats.is_some() {
            return None;
        }
        let mark = self.now.connection_mark.value(&self.now.packets)?;
        let translated = self.now.destination.map(|to| (to, self.now.captured));
        Some(Remembered { mark, translated })
    }

    /// How many walks a split makes of it, and how much work that is: what is copied.
    fn cost_of(&self, split: &Split) -> (usize, usize) {
        match split {
            Split::By(field, set) => {
                (2, set.ranges().len().saturating_add(self.now.packets.get(*field).ranges().len()) / 16)
            }
            Split::Into(_, sets) => (sets.len(), sets.len()),
            Split::Unknown(_) => (2, 0),
        }
    }

    /// The other walks of a split. Of two, to its question, this one answers no, the other yes.
    fn part(&mut self, split: Split, open: &mut Vec<Self>) {
        let mut other = self.clone();
        (other.records, other.steps) = (false, Vec::new());
        (other.decided, other.rule_step) = (None, None);
        match split {
            Split::By(field, set) => {
                let all = self.now.packets.get(field);
                let (inside, outside) = (all.and(&set), all.without(&set));
                other.now.packets.set(field, inside);
                self.now.packets.set(field, outside);
            }
            Split::Into(field, sets) => {
                let mut sets = sets.into_iter();
                if let Some(own) = sets.next() {
                    self.now.packets.set(field, own);
                }
                open.extend(sets.map(|set| {
                    let mut one = other.clone();
                    one.now.packets.set(field, set);
                    one
                }));
                return;
            }
            Split::Unknown(_) => {
                other.assumed.push(true);
                self.assumed.push(false);
            }
        }
        open.push(other);
    }

    /// What the next step costs.
    fn cost(&self) -> usize {
        match self.now.point {
            Point::Rule => {
                let ranges = self.now.packets.ranges().saturating_div(16);
                self.here().map_or(1, |(_, rule)| rule.cost).saturating_add(ranges)
            }
            Point::Statement(_) => 1,
            Point::Base => self.now.to_come.len().saturating_add(1),
            Point::Sent | Point::Hook(_) | Point::Device(_) | Point::Policy | Point::Left => 0,
        }
    }

    /// Takes one step; returns where the walk ends, if it does.
    fn step(&mut self) -> Result<Option<Fate>, Split> {
        self.asked = 0;
        let mut fate = None;
        match self.now.point {
            Point::Sent => fate = self.sent()?,
            Point::Hook(hook) => self.begins(hook),
            Point::Device(direction) => fate = self.begins_device(direction)?,
            Point::Base => fate = self.base()?,
            Point::Rule => self.next_rule()?,
            Point::Statement(number) => fate = self.statement_here(number)?,
            Point::Policy => fate = self.policy()?,
            Point::Left => fate = self.leaves()?,
        }
        self.assumed.clear();
        self.question = None;
        Ok(fate)
    }

    /// What it assumes about the unknown.
    fn assume(&mut self, unknown: impl FnOnce() -> Unknown) -> Result<bool, Split> {
        let answer = self.assumed.get(self.asked).copied();
        self.asked = self.asked.saturating_add(1);
        answer.ok_or_else(|| Split::Unknown(unknown()))
    }

    fn sent(&mut self) -> Result<Option<Fate>, Split> {
        let over_loopback = self.ask(VariedField::Interface, &RangeSet::one(LO))?;
        let fate = self.is_sent(over_loopback)?;
        if self.now.goes_out == Interface::None {
            self.now.goes_out = if over_loopback { Interface::Loopback } else { Interface::Own };
        }
        self.now.point = Point::Hook(Hook::Output);
        Ok(fate)
    }

    /// The chain it is in, and the rule it is at.
    fn here(&self) -> Option<(&'a WalkedChain, &'a WalkedRule)> {
        let call = self.now.calls.last()?;
        let chain = self.rules.chains.get(call.chain)?;
        Some((chain, chain.rules.get(call.rule)?))
    }

    fn next_rule(&mut self) -> Result<(), Split> {
        let Some((chain, rule)) = self.here() else {
            self.ends_chain();
            return Ok(());
        };
        // Rules that differ in one value and do the same are evaluated together, unless each is to be recorded.
        let run = rule.run.as_ref().filter(|_| !self.records);
        let (tests, count) = run.map_or((&rule.tests, 1), |run| (&run.tests, run.count));
        let met = self.meets(chain, rule, tests)?;
        let depth = self.now.calls.len();
        let Some(call) = self.now.calls.last_mut() else { return Ok(()) };
        call.count = count;
        if !met {
            self.goes_on();
            return Ok(());
        }
        if depth == 1 && call.gone_by.is_none() {
            self.now.base_rule = Some(call.rule);
        }
        self.rule_step = self.steps.len().checked_sub(1);
        self.now.point = Point::Statement(0);
        Ok(())
    }

    /// Whether a rule is met. An unsupported condition may hold or not: tries both if it matters.
    fn meets(
        &mut self,
        chain: &WalkedChain,
        rule: &'a WalkedRule,
        tests: &[super::conditions::Test],
    ) -> Result<bool, Split> {
        let mut unknown = None;
        for (number, test) in tests.iter().enumerate() {
            match self.evaluate(test)? {
                Some(true) => {}
                None => unknown = unknown.or(Some(number)),
                Some(false) => {
                    self.note_rule(chain, rule, |_| Outcome::Unmatched(rule.condition(number)));
                    return Ok(false);
                }
            }
        }
        let Some(number) = unknown else {
            self.note_rule(chain, rule, |_| Outcome::Matched);
            return Ok(true);
        };
        let matters = rule.seen.statements.iter().any(|one| !one.leaves_all());
        let met = matters && self.assume(|| Unknown::Rule(rule.seen.to_string()))?;
        self.note_rule(chain, rule, |_| Outcome::Unknown(rule.condition(number)));
        Ok(met)
    }

    /// Goes to the next rule, or back to the calling chain.
    fn ends_chain(&mut self) {
        let ended = self.now.calls.pop();
        if let Some(by) = ended.and_then(|call| call.gone_by).filter(|_| self.now.calls.is_empty()) {
            self.ends_early(by);
        }
        if self.now.calls.is_empty() {
            self.now.point = Point::Policy;
        } else {
            self.goes_on();
        }
    }

    /// Behind the rule it is at.
    fn goes_on(&mut self) {
        let Some(call) = self.now.calls.last_mut() else { return };
        call.rule = call.rule.saturating_add(call.count);
        self.now.point = Point::Rule;
        if self.here().is_none() {
            self.ends_chain();
        }
    }
}
