//! What a plan does with one segment, given what connection tracking says about it: rule by rule, as the kernel does.

use ipnet::IpNet;
use redirect_core::{
    plan::FamilyRules,
    rule::{Chain, ConnState, Direction, Equality, Hook, Match, Protocol, Rule, Table, Target},
    values::InterfaceName,
};
use std::net::SocketAddr;

/// A TCP segment at a hook.
#[derive(Debug, Clone)]
pub struct Segment {
    /// The interface it comes in or goes out by.
    pub interface: String,
    pub source: SocketAddr,
    pub destination: SocketAddr,
    pub flags: u8,
    /// User and group of the sending socket, where a process of the pod sends it.
    pub owner: Option<(u32, u32)>,
    pub mark: u32,
}

/// What connection tracking says about a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It opens an entry; nat is asked.
    New,
    /// It belongs to no entry and opens none; nat is not asked.
    Invalid,
    /// It belongs, or is related, to an entry that an earlier connection left; nat is not asked.
    Known(Direction),
}

/// How a hook's tables end for a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WalkVerdict {
    /// It goes on as it is.
    Passed,
    Dropped,
    /// To another port of the pod.
    Redirected,
    /// To the transparent listener; dropped where there is none.
    Tproxied,
}

/// A walk of one segment through the rules of its family. Marks it gets stay.
pub struct Walk<'a> {
    pub rules: &'a FamilyRules,
    pub segment: Segment,
    pub state: State,
    /// The mark of its entry.
    pub connection_mark: u32,
    /// nat is asked once for a connection, at the first hook it comes to.
    nat_was_asked: bool,
}

/// More chains than any plan nests.
const DEEPEST: usize = 8;

impl<'a> Walk<'a> {
    pub const fn new(rules: &'a FamilyRules, segment: Segment, state: State, connection_mark: u32) -> Self {
        Self { rules, segment, state, connection_mark, nat_was_asked: false }
    }

    /// The tables of a hook, in the kernel's order. raw decides about no TCP segment.
    pub fn hook(&mut self, hook: Hook) -> WalkVerdict {
        let mangled = self.chain(Table::Mangle, hook, &hook.into(), 0).unwrap_or(WalkVerdict::Passed);
        let asks_nat = self.state == State::New && !self.nat_was_asked;
        if mangled != WalkVerdict::Passed || !asks_nat {
            return mangled;
        }
        self.nat_was_asked = true;
        self.chain(Table::Nat, hook, &hook.into(), 0).unwrap_or(WalkVerdict::Passed)
    }

    /// `None` where the chain ends without a decision.
    fn chain(&mut self, table: Table, hook: Hook, chain: &Chain, depth: usize) -> Option<WalkVerdict> {
        assert!(depth < DEEPEST, "chains jump in a circle");
        for rule in self.rules.rules(table, chain) {
            if !self.matches(hook, rule) {
                continue;
            }
            match &rule.target {
                Target::Accept => return Some(WalkVerdict::Passed),
                Target::Drop => return Some(WalkVerdict::Dropped),
                Target::Return => return None,
                Target::Redirect(_) => return Some(WalkVerdict::Redirected),
                Target::Tproxy { .. } => return Some(WalkVerdict::Tproxied),
                Target::Jump(to) => {
                    if let Some(verdict) = self.chain(table, hook, to, depth + 1) {
                        return Some(verdict);
                    }
                }
                Target::SetMark(mark) => self.segment.mark = mark.value(),
                Target::SaveMark => self.connection_mark = self.segment.mark,
                Target::RestoreMark => self.segment.mark = self.connection_mark,
                Target::SetConnMark(mark) => {
                    self.connection_mark = self.connection_mark & !mark.mask() | mark.value();
                }
                Target::ConntrackZone(_) => {}
            }
        }
        None
    }

    fn matches(&self, hook: Hook, rule: &Rule) -> bool {
        rule.matches.iter().all(|condition| self.holds(hook, condition))
    }

    fn holds(&self, hook: Hook, condition: &Match) -> bool {
        let segment = &self.segment;
        let at = |wanted: Hook, is: &Equality<InterfaceName>| {
            is_so(is, |name| hook == wanted && name.covers(&segment.interface))
        };
        match condition {
            Match::Source(is) => in_net(is, segment.source),
            Match::Destination(is) => in_net(is, segment.destination),
            Match::InInterface(is) => at(Hook::Prerouting, is),
            Match::OutInterface(is) => at(Hook::Output, is),
            Match::Protocol(protocol) => *protocol == Protocol::Tcp,
            Match::SourcePort(is) => is_so(is, |ports| ports.contains(segment.source.port())),
            Match::DestinationPort(is) => is_so(is, |ports| ports.contains(segment.destination.port())),
            Match::DestinationPorts(is) => {
                is_so(is, |all| all.iter().any(|ports| ports.contains(segment.destination.port())))
            }
            Match::TcpFlags(is) => is_so(is, |flags| flags.covers(segment.flags)),
            Match::Tracked(tracked) => {
                let (is_in_state, direction) = match (tracked.state, self.state) {
                    (ConnState::Invalid, state) => (state == State::Invalid, Direction::Original),
                    (ConnState::RelatedOrEstablished, State::Known(direction)) => (true, direction),
                    (ConnState::RelatedOrEstablished, State::New | State::Invalid) => {
                        (false, Direction::Original)
                    }
                };
                is_in_state && tracked.direction.is_none_or(|wanted| wanted == direction)
            }
            Match::OwnerUid(is) => owned(is, segment.owner.map(|(user, _)| user)),
            Match::OwnerGid(is) => owned(is, segment.owner.map(|(_, group)| group)),
            Match::Mark(is) => is_so(is, |mark| mark.covers(segment.mark)),
            Match::ConnMark(is) => is_so(is, |mark| mark.covers(self.connection_mark)),
        }
    }
}

fn is_so<T>(is: &Equality<T>, holds: impl Fn(&T) -> bool) -> bool {
    holds(&is.value) != is.not
}

fn in_net(is: &Equality<IpNet>, address: SocketAddr) -> bool {
    is_so(is, |net| net.contains(&address.ip()))
}

/// What no socket of the pod has sent matches only the inverted comparison.
fn owned(is: &Equality<u32>, owner: Option<u32>) -> bool {
    owner.map_or(is.not, |owner| is_so(is, |id| *id == owner))
}
