//! Words for writing rule groups: short constructors of matches, and a collector that knows who asked.

use super::{PlannedRule, Position};
use crate::{
    redirect::Redirect,
    rule::{
        Chain, ConnState, Direction, Equality, Match, Protocol, Rule, Scope, Table, Target, TcpFlags, Tracked,
    },
    settings::{Key, Provenance, Source, Sources},
    values::{Family, InterfaceName, Mark, PortRange},
};
use alloc::vec::Vec;
use ipnet::IpNet;

/// More rules than most plans have without their exclusion lists.
const MANY: usize = 64;

/// Collects rules in the order of emission.
pub(super) struct RuleListBuilder<'a> {
    sources: &'a Sources,
    rules: Vec<PlannedRule>,
}

impl<'a> RuleListBuilder<'a> {
    /// None yet; who asked for each setting, and the length of the lists of which each element is a rule.
    pub(super) fn of(sources: &'a Sources, listed: usize) -> Self {
        // Long lists make long plans; a plan that grows is copied repeatedly.
        Self { sources, rules: Vec::with_capacity(listed.saturating_add(MANY)) }
    }

    /// Rules of one group: the setting that asked for them, and what for.
    pub(super) fn group(&mut self, setting: Key, purpose: &'static str) -> Group<'_> {
        let source = self.sources.of(setting);
        Group { rules: &mut self.rules, setting, source, purpose, scope: Scope::Every }
    }

    pub(super) fn into_vec(self) -> Vec<PlannedRule> {
        self.rules
    }
}

/// Adds rules that one setting asked for.
pub(super) struct Group<'a> {
    rules: &'a mut Vec<PlannedRule>,
    setting: Key,
    source: Source,
    purpose: &'static str,
    scope: Scope,
}

impl Group<'_> {
    /// The same, for these families only.
    pub(super) fn scoped(mut self, scope: Scope) -> Self {
        self.scope = scope;
        self
    }

    /// The same, asked for by this one instead.
    pub(super) const fn said_by(mut self, source: Source) -> Self {
        self.source = source;
        self
    }

    /// Adds a rule behind the last one of its chain.
    pub(super) fn append(
        &mut self,
        (table, chain): (Table, impl Into<Chain>),
        matches: impl Into<Vec<Match>>,
        target: Target,
    ) {
        self.add(table, chain.into(), Position::Last, matches.into(), target);
    }

    /// The same for each family, whose conditions are these.
    pub(super) fn append_for_each<const N: usize>(
        mut self,
        place: (Table, impl Into<Chain> + Copy),
        matches: impl Fn(Family) -> [Match; N],
        target: &Target,
    ) {
        for family in Family::BOTH {
            self.scope = Scope::Only(family);
            self.append(place, matches(family), target.clone());
        }
    }

    /// Adds a rule before the one with this number.
    pub(super) fn insert(
        &mut self,
        (table, chain): (Table, impl Into<Chain>),
        number: usize,
        matches: impl Into<Vec<Match>>,
        target: Target,
    ) {
        self.add(table, chain.into(), Position::Before(number), matches.into(), target);
    }

    fn add(&mut self, table: Table, chain: Chain, position: Position, matches: Vec<Match>, target: Target) {
        let rule = Rule { matches, target };
        let Self { setting, source, purpose, scope, .. } = *self;
        let source = Provenance(source);
        self.rules.push(PlannedRule { table, chain, position, scope, rule, setting, source, purpose });
    }
}

/// The proxy's users, and then its groups, as senders; each with the setting behind it.
pub(super) fn proxy_owners(r: &Redirect) -> impl Iterator<Item = (Key, Match)> {
    let uids = r.proxy_uids().iter().map(|uid| (Key::ProxyUid, Match::OwnerUid(Equality::equals(*uid))));
    let gids = r.proxy_gids().iter().map(|gid| (Key::ProxyGid, Match::OwnerGid(Equality::equals(*gid))));
    uids.chain(gids)
}

/// The scope of a rule that names an address.
pub(super) fn scope_of(net: &IpNet) -> Scope {
    Scope::Only(Family::of(&net.addr()))
}

pub(super) fn tcp() -> Match {
    Match::Protocol(Protocol::Tcp)
}

pub(super) fn udp() -> Match {
    Match::Protocol(Protocol::Udp)
}

pub(super) fn from(net: IpNet) -> Match {
    Match::Source(Equality::equals(net))
}

pub(super) fn to(net: IpNet) -> Match {
    Match::Destination(Equality::equals(net))
}

pub(super) fn not_to(net: IpNet) -> Match {
    Match::Destination(Equality::not_equals(net))
}

pub(super) fn coming_in(interface: &InterfaceName) -> Match {
    Match::InInterface(Equality::equals(interface.clone()))
}

pub(super) fn going_out(interface: &InterfaceName) -> Match {
    Match::OutInterface(Equality::equals(interface.clone()))
}

pub(super) fn not_in_by_loopback() -> Match {
    Match::InInterface(Equality::not_equals(InterfaceName::loopback()))
}

pub(super) fn not_out_by_loopback() -> Match {
    Match::OutInterface(Equality::not_equals(InterfaceName::loopback()))
}

pub(super) fn in_by_loopback() -> Match {
    Match::InInterface(Equality::equals(InterfaceName::loopback()))
}

pub(super) fn out_by_loopback() -> Match {
    Match::OutInterface(Equality::equals(InterfaceName::loopback()))
}

pub(super) fn to_port(port: impl Into<PortRange>) -> Match {
    Match::DestinationPort(Equality::equals(port.into()))
}

pub(super) fn not_to_port(port: impl Into<PortRange>) -> Match {
    Match::DestinationPort(Equality::not_equals(port.into()))
}

pub(super) fn from_port(port: impl Into<PortRange>) -> Match {
    Match::SourcePort(Equality::equals(port.into()))
}

pub(super) fn marked(mark: Mark) -> Match {
    Match::Mark(Equality::equals(mark.into()))
}

pub(super) fn not_marked(mark: Mark) -> Match {
    Match::Mark(Equality::not_equals(mark.into()))
}

/// An answer within a connection.
pub(super) fn reply() -> Match {
    Match::Tracked(Tracked { state: ConnState::RelatedOrEstablished, direction: Some(Direction::Reply) })
}

/// Whatever opens a connection.
pub(super) fn opening() -> Match {
    Match::TcpFlags(Equality::equals(TcpFlags::OPENING))
}

/// Whatever opens no connection.
pub(super) fn not_opening() -> Match {
    Match::TcpFlags(Equality::not_equals(TcpFlags::OPENING))
}
