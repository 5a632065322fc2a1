//! What a plan does with one packet of this process, from the socket to where it arrives.
//!
//! The packet goes the kernel's way: mangle and nat in OUTPUT; then, where it stays in the pod, mangle in PREROUTING.
//! (nat in PREROUTING is not asked again for a packet that nat in OUTPUT has seen, and raw changes no destination.)

use ipnet::IpNet;
use redirect_core::{
    Family,
    plan::FamilyRules,
    rule::{Chain, Hook, Is, Match, Protocol, Rule, Table, Target, TcpFlags},
    state::Entry,
    values::{Port, PortRange},
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// How many chains deep a plan may go; far more than any does.
const DEEPEST: usize = 16;

/// Whose packets: user and group of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// The first packet of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packet {
    pub(crate) who: Identity,
    pub(crate) protocol: Protocol,
    /// Where from; `None` where the kernel chooses.
    pub(crate) source: Option<IpAddr>,
    pub(crate) destination: SocketAddr,
    /// Whether it goes to the pod itself, over `lo`.
    pub(crate) stays: bool,
}

/// What becomes of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It arrives where it was sent.
    Untouched,
    /// It arrives at this port of the loopback address.
    Redirected(Port),
    /// It is handed to a transparent listener; where there is none, iptables drops it.
    Tproxied,
    /// It is dropped, or the rules ask for something that cannot be told beforehand.
    Unknown,
}

/// The address that REDIRECT sends packets of the pod itself to.
pub(crate) const fn loopback(family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::LOCALHOST),
        Family::V6 => IpAddr::V6(Ipv6Addr::LOCALHOST),
    }
}

/// What these rules do with a packet.
pub(crate) fn fate(rules: &FamilyRules, packet: &Packet) -> Fate {
    let mut walk = Walk { rules, packet: *packet, hook: Hook::Output, mark: 0, connection_mark: 0 };
    if walk.table(Table::Mangle) != Step::Done {
        return Fate::Unknown;
    }
    let redirected = match walk.table(Table::Nat) {
        Step::Redirect(port) => Some(port),
        Step::Done => None,
        Step::Tproxy | Step::Unknown => return Fate::Unknown,
    };
    if let Some(port) = redirected {
        let family = Family::of(&packet.destination.ip());
        walk.packet.destination = SocketAddr::new(loopback(family), port.number());
        walk.packet.stays = true;
    }
    if !walk.packet.stays {
        return Fate::Untouched;
    }
    walk.hook = Hook::Prerouting;
    match (walk.table(Table::Mangle), redirected) {
        (Step::Done, Some(port)) => Fate::Redirected(port),
        (Step::Done, None) => Fate::Untouched,
        (Step::Tproxy, None) => Fate::Tproxied,
        (Step::Tproxy | Step::Redirect(_) | Step::Unknown, _) => Fate::Unknown,
    }
}

/// Where a table ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Accepted, or nothing more said.
    Done,
    Redirect(Port),
    Tproxy,
    Unknown,
}

struct Walk<'a> {
    rules: &'a FamilyRules,
    packet: Packet,
    hook: Hook,
    mark: u32,
    connection_mark: u32,
}

impl Walk<'_> {
    fn table(&mut self, table: Table) -> Step {
        self.chain(table, &Chain::Hook(self.hook), 0).unwrap_or(Step::Done)
    }

    /// `None` when the chain ends without a decision, or returns.
    fn chain(&mut self, table: Table, chain: &Chain, depth: usize) -> Option<Step> {
        if depth > DEEPEST {
            return Some(Step::Unknown);
        }
        for entry in self.rules.state().rules(table, chain) {
            let Entry::Rule(rule) = entry else { return Some(Step::Unknown) };
            match self.matches(rule) {
                Some(true) => {}
                Some(false) => continue,
                None => return Some(Step::Unknown),
            }
            match &rule.target {
                Target::Accept => return Some(Step::Done),
                Target::Drop => return Some(Step::Unknown),
                Target::Return => return None,
                Target::Jump(to) => {
                    if let Some(step) = self.chain(table, to, depth + 1) {
                        return Some(step);
                    }
                }
                Target::Redirect(port) => return Some(Step::Redirect(*port)),
                Target::Tproxy { .. } => return Some(Step::Tproxy),
                Target::SetMark(mark) => self.mark = mark.value(),
                Target::SaveMark => self.connection_mark = self.mark,
                Target::RestoreMark => self.mark = self.connection_mark,
                Target::SetConnMark(mark) => self.connection_mark = mark.put_into(self.connection_mark),
                // Zones change nothing about where packets go.
                Target::ConntrackZone(_) => {}
                _ => return Some(Step::Unknown),
            }
        }
        None
    }

    /// Whether all conditions hold; `None` where that cannot be told.
    fn matches(&self, rule: &Rule) -> Option<bool> {
        let mut all = Some(true);
        for condition in &rule.matches {
            match self.holds(condition) {
                Some(true) => {}
                Some(false) => return Some(false),
                None => all = None,
            }
        }
        all
    }

    fn holds(&self, condition: &Match) -> Option<bool> {
        let packet = &self.packet;
        let port = packet.destination.port();
        match condition {
            Match::Source(net) => packet.source.map(|source| is(net, |net| covers(net, source))),
            Match::Destination(net) => Some(is(net, |net| covers(net, packet.destination.ip()))),
            Match::InInterface(name) | Match::OutInterface(name) => {
                match (packet.stays, name.value.covers("lo")) {
                    (true, lo) => Some(lo != name.not),
                    // The other interface's name is not known, but it is not lo's.
                    (false, true) if !name.value.is_prefix() => Some(name.not),
                    (false, _) => None,
                }
            }
            Match::Protocol(protocol) => Some(*protocol == packet.protocol),
            Match::SourcePort(_) => None,
            Match::DestinationPort(range) => Some(is(range, |range| range.contains(port))),
            Match::DestinationPorts(ranges) => Some(is(ranges, |ranges| any(ranges, port))),
            Match::TcpFlags(flags) => {
                Some(packet.protocol == Protocol::Tcp && is(flags, |flags| flags.covers(TcpFlags::SYN)))
            }
            // The packet opens a connection.
            Match::Tracked(_) => Some(false),
            Match::OwnerUid(uid) => self.owner(uid, packet.who.uid),
            Match::OwnerGid(gid) => self.owner(gid, packet.who.gid),
            Match::Mark(mark) => Some(is(mark, |mark| mark.value() == self.mark)),
            Match::ConnMark(mark) => Some(is(mark, |mark| mark.covers(self.connection_mark))),
            _ => None,
        }
    }

    /// Only packets that leave a socket have an owner.
    fn owner(&self, wanted: &Is<u32>, own: u32) -> Option<bool> {
        (self.hook == Hook::Output).then(|| is(wanted, |id| *id == own))
    }
}

fn is<T>(condition: &Is<T>, holds: impl Fn(&T) -> bool) -> bool {
    holds(&condition.value) != condition.not
}

fn any(ranges: &[PortRange], port: u16) -> bool {
    ranges.iter().any(|range| range.contains(port))
}

fn covers(net: &IpNet, address: IpAddr) -> bool {
    net.contains(&address)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a panic is how a test fails
    use super::*;
    use redirect_core::{
        Redirect,
        settings::{Key, NamespaceFacts, RawSettings, Source},
    };

    const PROXY: Identity = Identity { uid: 1337, gid: 1337 };
    const APP: Identity = Identity { uid: 1000, gid: 1000 };

    fn rules(flags: &[(Key, &'static str)]) -> FamilyRules {
        let mut raw = RawSettings::new();
        raw.set(Key::InboundPorts, "*", Source::Flag("b"));
        raw.set(Key::OutboundRanges, "*", Source::Flag("i"));
        for (key, text) in flags {
            raw.set(*key, *text, Source::Flag("x"));
        }
        let addresses = ["10.1.0.2".parse().unwrap()];
        Redirect::parse(&raw, &NamespaceFacts::new(&addresses)).unwrap().plan().rules(Family::V4)
    }

    fn packet(who: Identity, source: Option<&str>, destination: &str, stays: bool) -> Packet {
        let source = source.map(|source| source.parse().unwrap());
        Packet { who, protocol: Protocol::Tcp, source, destination: destination.parse().unwrap(), stays }
    }

    fn redirected(port: u16) -> Fate {
        Fate::Redirected(Port::new(port).unwrap())
    }

    #[test]
    fn the_proxys_own_paths() {
        let rules = rules(&[]);
        let fate = |source, to, stays| fate(&rules, &packet(PROXY, source, to, stays));
        assert_eq!(fate(Some("127.0.0.1"), "127.0.0.6:15002", true), redirected(15006));
        assert_eq!(fate(Some("10.1.0.2"), "10.1.0.2:15002", true), redirected(15006));
        assert_eq!(fate(Some("127.0.0.6"), "10.1.0.2:8080", true), Fate::Untouched);
        assert_eq!(fate(Some("127.0.0.1"), "127.0.0.1:8080", true), Fate::Untouched);
        assert_eq!(fate(None, "192.0.2.1:80", false), Fate::Untouched);
    }

    #[test]
    fn the_applications_paths() {
        let rules = rules(&[(Key::RedirectDns, "true"), (Key::CaptureAllDns, "true")]);
        let fate = |to, stays| fate(&rules, &packet(APP, None, to, stays));
        assert_eq!(fate("192.0.2.1:80", false), redirected(15001));
        assert_eq!(fate("192.0.2.1:53", false), redirected(15053));
        assert_eq!(fate("127.0.0.1:8080", true), Fate::Unknown, "its source is not known");
    }

    #[test]
    fn tproxy_takes_what_redirect_leaves() {
        let rules = rules(&[(Key::InterceptionMode, "TPROXY")]);
        let fate = |source, to| fate(&rules, &packet(PROXY, Some(source), to, true));
        assert_eq!(fate("10.1.0.2", "10.1.0.2:15008"), Fate::Tproxied);
        assert_eq!(fate("127.0.0.1", "127.0.0.6:15002"), redirected(15006));
        assert_eq!(fate("127.0.0.6", "10.1.0.2:8080"), Fate::Untouched);
        assert_eq!(fate("127.0.0.1", "127.0.0.1:15008"), Fate::Untouched);
    }

    #[test]
    fn strict_capture_changes_nothing_for_a_first_packet() {
        for mode in ["REDIRECT", "TPROXY"] {
            let [usual, strict] = ["false", "true"]
                .map(|strict| rules(&[(Key::InterceptionMode, mode), (Key::StrictCapture, strict)]));
            for who in [PROXY, APP] {
                for (source, to, stays) in [
                    (Some("10.1.0.2"), "10.1.0.2:15008", true),
                    (Some("127.0.0.1"), "127.0.0.6:15002", true),
                    (Some("127.0.0.6"), "10.1.0.2:8080", true),
                    (None, "192.0.2.1:80", false),
                ] {
                    let packet = packet(who, source, to, stays);
                    assert_eq!(fate(&strict, &packet), fate(&usual, &packet), "{mode} {packet:?}");
                }
            }
        }
    }

    #[test]
    fn an_interface_that_may_be_meant_makes_it_unknown() {
        let rules = rules(&[(Key::ExcludeInterfaces, "eth1")]);
        assert_eq!(fate(&rules, &packet(APP, None, "192.0.2.1:80", false)), Fate::Unknown);
        assert_eq!(fate(&rules, &packet(PROXY, Some("127.0.0.1"), "127.0.0.6:1", true)), redirected(15006));
    }
}
