//! A rule as a value: its position, what it matches, what it does.
//!
//! Each match and target is one of netfilter's: the words are those of iptables-extensions(8).

#[cfg(feature = "serde")]
pub(crate) mod json;

use crate::values::{Family, InterfaceName, Mark, MaskedMark, Port, PortRange};
use alloc::{string::String, vec::Vec};
use core::fmt;
use ipnet::IpNet;

/// Makes an enum whose values have names in iptables, and the list of all, so that neither can lack one.
macro_rules! named {
    ($(#[$about:meta])* $enum:ident { $(#[doc = $doc:literal] $variant:ident: $name:literal,)+ }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $enum {
            $(#[doc = $doc] $variant,)+
        }

        impl $enum {
            /// All of them, in their order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Its name in iptables.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }

            /// The one of this name, if any.
            #[must_use]
            pub fn named(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|one| one.name() == name)
            }
        }
    };
}

named! {
    /// A table that a plan has rules in, in the order in which a packet meets them.
    #[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "lowercase"))]
    #[non_exhaustive]
    Table {
        /// Before connection tracking: conntrack zones.
        Raw: "raw",
        /// Packet alteration: marks, TPROXY.
        Mangle: "mangle",
        /// Address translation: REDIRECT.
        Nat: "nat",
    }
}

impl Table {
    /// The type of the base chain that iptables has for a hook in this table. Native tables have the same.
    #[must_use]
    pub const fn chain_type(self, hook: Hook) -> &'static str {
        match (self, hook) {
            (Self::Nat, _) => "nat",
            (Self::Mangle, Hook::Output) => "route",
            (
                Self::Mangle | Self::Raw,
                Hook::Prerouting | Hook::Input | Hook::Forward | Hook::Output | Hook::Postrouting,
            ) => "filter",
        }
    }

    /// The priority of the base chain that iptables has for a hook in this table. Native tables have the same.
    #[must_use]
    pub const fn priority(self, hook: Hook) -> i32 {
        match (self, hook) {
            (Self::Raw, _) => -300,
            (Self::Mangle, _) => -150,
            (Self::Nat, Hook::Prerouting | Hook::Output) => -100,
            (Self::Nat, Hook::Input | Hook::Forward | Hook::Postrouting) => 100,
        }
    }
}

named! {
    /// A built-in chain: a hook of the kernel. It has these five for packets of IP, in the order of the kernel's numbers.
    #[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "UPPERCASE"))]
    Hook {
        /// Packets that arrive.
        Prerouting: "PREROUTING",
        /// Packets for a local process.
        Input: "INPUT",
        /// Packets that are routed through.
        Forward: "FORWARD",
        /// Packets of a local process.
        Output: "OUTPUT",
        /// Packets that leave.
        Postrouting: "POSTROUTING",
    }
}

/// A chain. Each is one of these three, whatever versions to come have in them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Chain {
    /// A built-in chain.
    Hook(Hook),
    /// A chain of a plan.
    Ours(OurChain),
    /// Any other chain found in the kernel.
    Other(String),
}

/// The prefix of every chain of the mesh, of this version and others.
const PREFIX: &str = "ISTIO_";

impl Chain {
    /// The chain of this name.
    #[must_use]
    pub fn named(name: &str) -> Self {
        let ours = || OurChain::named(name).map(Self::Ours);
        Hook::named(name).map(Self::Hook).or_else(ours).unwrap_or_else(|| Self::Other(name.into()))
    }

    /// Its name in iptables.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Hook(hook) => hook.name(),
            Self::Ours(chain) => chain.name(),
            Self::Other(name) => name,
        }
    }

    /// Whether it belongs to the mesh: a chain of a plan, or of an earlier or later version's.
    #[must_use]
    pub fn belongs_to_mesh(&self) -> bool {
        match self {
            Self::Hook(_) => false,
            Self::Ours(_) => true,
            Self::Other(name) => name.starts_with(PREFIX),
        }
    }
}

impl From<Hook> for Chain {
    fn from(hook: Hook) -> Self {
        Self::Hook(hook)
    }
}

impl From<OurChain> for Chain {
    fn from(chain: OurChain) -> Self {
        Self::Ours(chain)
    }
}

impl fmt::Display for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

named! {
    /// A chain of a plan. The names are the reference's; in native nftables they are written in small letters, with dashes.
    OurChain {
        /// Marks answers to connections that the proxy opens in a client's name (TPROXY).
        Divert: "ISTIO_DIVERT",
        /// Drops.
        Drop: "ISTIO_DROP",
        /// Drops what would come in on a connection that was not captured (strict capture).
        GuardIn: "ISTIO_GUARD_IN",
        /// Marks connections that are not captured, and drops what others would send on them (strict capture).
        GuardOut: "ISTIO_GUARD_OUT",
        /// Decides about inbound packets.
        Inbound: "ISTIO_INBOUND",
        /// Sends to the inbound listener.
        InRedirect: "ISTIO_IN_REDIRECT",
        /// Decides about outbound packets.
        Output: "ISTIO_OUTPUT",
        /// Decides about DNS queries.
        OutputDns: "ISTIO_OUTPUT_DNS",
        /// Decides about packets that arrive (ambient mode).
        Prerouting: "ISTIO_PRERT",
        /// Sends to the outbound listener.
        Redirect: "ISTIO_REDIRECT",
        /// Hands to the inbound listener as it is (TPROXY).
        Tproxy: "ISTIO_TPROXY",
    }
}

named! {
    /// A transport protocol. Closed, as [`Match`] is.
    #[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "lowercase"))]
    Protocol {
        /// TCP, protocol number 6.
        Tcp: "tcp",
        /// UDP, protocol number 17.
        Udp: "udp",
    }
}

impl Protocol {
    /// Its number (IANA).
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }
}

/// A comparison with a value: equal, or with `!` in front, not equal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Equality<T> {
    /// What is compared with.
    pub value: T,
    /// Whether the rule matches when it is *not* so.
    pub not: bool,
}

impl<T> Equality<T> {
    /// Matches what equals the value, or lies in it.
    pub const fn equals(value: T) -> Self {
        Self { value, not: false }
    }

    /// Matches everything else.
    pub const fn not_equals(value: T) -> Self {
        Self { value, not: true }
    }
}

/// A state of connection tracking. Closed, as [`Match`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "camelCase"))]
pub enum ConnState {
    /// Belongs to no connection.
    Invalid,
    /// Belongs to a connection, or is related to one.
    RelatedOrEstablished,
}

named! {
    /// Which way a packet of a connection goes. Closed: only two exist.
    #[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "camelCase"))]
    Direction {
        /// The way of the connection's first packet.
        Original: "ORIGINAL",
        /// The other way.
        Reply: "REPLY",
    }
}

/// What connection tracking says about a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Tracked {
    /// The packet's state.
    pub state: ConnState,
    /// Which way it goes; either where `None`.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub direction: Option<Direction>,
}

impl From<ConnState> for Tracked {
    fn from(state: ConnState) -> Self {
        Self { state, direction: None }
    }
}

/// Flags of a TCP segment: which are checked, and which of those are set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct TcpFlags {
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::flag_names"))]
    mask: u8,
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::flag_names"))]
    set: u8,
}

impl TcpFlags {
    /// FIN, in the place it has in a segment (RFC 9293, section 3.1).
    pub const FIN: u8 = 0x01;
    /// SYN.
    pub const SYN: u8 = 0x02;
    /// RST.
    pub const RST: u8 = 0x04;
    /// PSH.
    pub const PSH: u8 = 0x08;
    /// ACK.
    pub const ACK: u8 = 0x10;
    /// URG.
    pub const URG: u8 = 0x20;
    /// The flags iptables has names for, in the order it prints them.
    pub const NAMED: &'static [(u8, &'static str)] = &[
        (Self::FIN, "FIN"),
        (Self::SYN, "SYN"),
        (Self::RST, "RST"),
        (Self::PSH, "PSH"),
        (Self::ACK, "ACK"),
        (Self::URG, "URG"),
    ];
    /// What opens a connection: SYN without FIN, RST or ACK, `--syn` in iptables.
    pub const OPENING: Self = Self { mask: Self::FIN | Self::SYN | Self::RST | Self::ACK, set: Self::SYN };
    /// SYN and ACK, whatever else: the answer to what opens a connection.
    pub const ANSWERING: Self = Self { mask: Self::SYN | Self::ACK, set: Self::SYN | Self::ACK };
    /// SYN, whatever else: what opens a connection, and its answer.
    pub const SYNCHRONIZING: Self = Self { mask: Self::SYN, set: Self::SYN };

    /// Of the flags of `mask`, exactly those of `set`; `None` where `set` has others, `mask` none, or either one
    /// without a name.
    #[must_use]
    pub const fn new(mask: u8, set: u8) -> Option<Self> {
        if mask != 0 && mask & !0x3f == 0 && set & !mask == 0 { Some(Self { mask, set }) } else { None }
    }

    /// The flags checked.
    #[must_use]
    pub const fn mask(self) -> u8 {
        self.mask
    }

    /// Those of them that are set.
    #[must_use]
    pub const fn set(self) -> u8 {
        self.set
    }

    /// The names of flags, in the order in which iptables prints them.
    pub(crate) fn names(flags: u8) -> impl Iterator<Item = &'static str> {
        Self::NAMED.iter().filter(move |(flag, _)| flags & flag != 0).map(|(_, name)| *name)
    }

    /// Whether a segment with these flags is meant.
    #[must_use]
    pub const fn covers(self, flags: u8) -> bool {
        flags & self.mask == self.set
    }
}

/// One condition of a rule. All conditions of a rule must hold. Closed: who writes rules, in whatever form, has to know every kind.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "match", rename_all = "camelCase"))]
pub enum Match {
    /// `-s`: the source address.
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::is_range"))]
    Source(Equality<IpNet>),
    /// `-d`: the destination address.
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::is_range"))]
    Destination(Equality<IpNet>),
    /// `-i`: the interface a packet came in by.
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::is_interface"))]
    InInterface(Equality<InterfaceName>),
    /// `-o`: the interface a packet goes out by.
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::is_interface"))]
    OutInterface(Equality<InterfaceName>),
    /// `-p`: the protocol.
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::protocol"))]
    Protocol(Protocol),
    /// `--sport`, of the rule's protocol.
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::is_port"))]
    SourcePort(Equality<PortRange>),
    /// `--dport`, of the rule's protocol.
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::is_port"))]
    DestinationPort(Equality<PortRange>),
    /// `-m multiport --dports`, of the rule's protocol.
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::is_ports"))]
    DestinationPorts(Equality<Vec<PortRange>>),
    /// `-m tcp --tcp-flags`, of a rule for TCP.
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::is"))]
    TcpFlags(Equality<TcpFlags>),
    /// `-m conntrack --ctstate`, perhaps with `--ctdir`.
    #[cfg_attr(feature = "serde", serde(rename = "connectionTracking"))]
    Tracked(Tracked),
    /// `-m owner --uid-owner`: the user of the sending socket.
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::is_uid"))]
    OwnerUid(Equality<u32>),
    /// `-m owner --gid-owner`: the group of the sending socket.
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::is_gid"))]
    OwnerGid(Equality<u32>),
    /// `-m mark --mark`: the packet's mark.
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::is_mark"))]
    Mark(Equality<MaskedMark>),
    /// `-m connmark --mark`: the connection's mark.
    #[cfg_attr(feature = "serde", serde(rename = "connectionMark", serialize_with = "json::is"))]
    ConnMark(Equality<MaskedMark>),
}

impl Match {
    /// Whether every packet of the rule's family fulfils it: `-d 0.0.0.0/0`, which iptables leaves away.
    #[must_use]
    pub fn is_always_true(&self) -> bool {
        match self {
            Self::Source(is) | Self::Destination(is) => !is.not && is.value.prefix_len() == 0,
            Self::InInterface(_)
            | Self::OutInterface(_)
            | Self::Protocol(_)
            | Self::SourcePort(_)
            | Self::DestinationPort(_)
            | Self::DestinationPorts(_)
            | Self::TcpFlags(_)
            | Self::Tracked(_)
            | Self::OwnerUid(_)
            | Self::OwnerGid(_)
            | Self::Mark(_)
            | Self::ConnMark(_) => false,
        }
    }

    /// Whether it compares ports.
    #[must_use]
    pub const fn compares_ports(&self) -> bool {
        matches!(self, Self::SourcePort(_) | Self::DestinationPort(_) | Self::DestinationPorts(_))
    }

    /// Whether it is about a field of the rule's protocol: it means nothing without one.
    #[must_use]
    pub const fn is_of_protocol(&self) -> bool {
        matches!(
            self,
            Self::SourcePort(_) | Self::DestinationPort(_) | Self::DestinationPorts(_) | Self::TcpFlags(_)
        )
    }

    /// The place of this condition in what iptables-save prints. Equal places keep the order they were written in.
    const fn place(&self) -> u8 {
        match self {
            Self::Source(_) => 0,
            Self::Destination(_) => 1,
            Self::InInterface(_) => 2,
            Self::OutInterface(_) => 3,
            Self::Protocol(_) => 4,
            Self::SourcePort(_) => 5,
            Self::DestinationPort(_) => 6,
            Self::TcpFlags(_) => 7,
            Self::DestinationPorts(_)
            | Self::Tracked(_)
            | Self::OwnerUid(_)
            | Self::OwnerGid(_)
            | Self::Mark(_)
            | Self::ConnMark(_) => 8,
        }
    }

    /// A comparison with all ports. Where something else in the rule names the port's module, iptables-save prints
    /// nothing of it.
    fn is_any_port(&self) -> bool {
        matches!(self, Self::SourcePort(is) | Self::DestinationPort(is) if !is.not && is.value == PortRange::ALL)
    }
}

/// What a rule does with a packet that fulfils its conditions. Closed, as [`Match`] is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "action", rename_all = "camelCase"))]
pub enum Target {
    /// `-j ACCEPT`: done with this table.
    Accept,
    /// `-j DROP`.
    Drop,
    /// `-j RETURN`: back to the calling chain.
    Return,
    /// `-j CHAIN`.
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::chain"))]
    Jump(Chain),
    /// `-j REDIRECT --to-ports`: to this port of the local host.
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::port"))]
    Redirect(Port),
    /// `-j TPROXY`: to the listener on this port, unchanged, with this mark; dropped while nothing listens there.
    Tproxy {
        /// The listener's port.
        port: Port,
        /// The mark the packet gets.
        mark: Mark,
    },
    /// `-j MARK --set-mark`.
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::mark"))]
    SetMark(Mark),
    /// `-j CONNMARK --save-mark`: packet's mark to connection.
    SaveMark,
    /// `-j CONNMARK --restore-mark`: connection's mark to packet.
    RestoreMark,
    /// `-j CONNMARK --set-xmark`: the connection's mark, in these bits.
    #[cfg_attr(feature = "serde", serde(rename = "setConnectionMark"))]
    SetConnMark(MaskedMark),
    /// `-j CT --zone`: the conntrack zone.
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::zone"))]
    ConntrackZone(u16),
}

/// Conditions and what to do when all hold.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rule {
    /// The conditions.
    pub matches: Vec<Match>,
    /// What to do.
    pub target: Target,
}

impl Rule {
    /// The same rule as iptables-save prints it: conditions in its order, those that are always true left away.
    #[must_use]
    pub fn canonical(&self) -> Self {
        let mut matches = Vec::with_capacity(self.matches.len());
        matches.extend(self.effective_matches().cloned());
        matches.sort_by_key(Match::place);
        Self { matches, target: self.target.clone() }
    }

    /// The conditions that can be false.
    pub fn effective_matches(&self) -> impl Iterator<Item = &Match> {
        let has_flags = self.matches.iter().any(|m| matches!(m, Match::TcpFlags(_)));
        self.matches.iter().filter(move |m| !(m.is_always_true() || has_flags && m.is_any_port()))
    }

    /// The rule's protocol, if it has one.
    #[must_use]
    pub fn protocol(&self) -> Option<Protocol> {
        self.matches
            .iter()
            .find_map(|m| if let Match::Protocol(protocol) = m { Some(*protocol) } else { None })
    }

    /// Whether it says the protocol whose ports or flags it compares: ports are those of either, flags are TCP's.
    #[must_use]
    pub fn says_its_protocol(&self) -> bool {
        match self.protocol() {
            Some(Protocol::Tcp) => true,
            Some(Protocol::Udp) => !self.matches.iter().any(|m| matches!(m, Match::TcpFlags(_))),
            None => !self.matches.iter().any(Match::is_of_protocol),
        }
    }
}

/// The families a planned rule is for. Closed: no third exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// Every family of the plan.
    Every,
    /// This one only.
    Only(Family),
}

impl Scope {
    /// Whether a family is meant.
    #[must_use]
    pub fn covers(self, family: Family) -> bool {
        match self {
            Self::Every => true,
            Self::Only(one) => one == family,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_are_not_looked_at_make_no_difference() {
        let opening = TcpFlags::OPENING;
        for meant in [TcpFlags::SYN, TcpFlags::SYN | TcpFlags::PSH] {
            assert!(opening.covers(meant), "{meant:#x}");
        }
        for other in [0, TcpFlags::ACK, TcpFlags::SYN | TcpFlags::ACK, TcpFlags::SYN | TcpFlags::FIN, 0xff] {
            assert!(!opening.covers(other), "{other:#x}");
        }
    }

    #[test]
    fn what_every_packet_fulfils_is_left_away() {
        let net = |text: &str| text.parse::<ipnet::IpNet>().unwrap();
        let ports = |first| PortRange::new(first, u16::MAX).unwrap();
        let all = [
            Match::Protocol(Protocol::Tcp),
            Match::TcpFlags(Equality::equals(TcpFlags::OPENING)),
            Match::DestinationPort(Equality::equals(ports(1))),
            Match::Source(Equality::equals(net("10.0.0.0/8"))),
            Match::Source(Equality::not_equals(net("0.0.0.0/0"))),
        ];
        let fulfilled = [
            Match::Destination(Equality::equals(net("0.0.0.0/0"))),
            Match::Source(Equality::equals(net("::/0"))),
            Match::SourcePort(Equality::equals(ports(0))),
        ];
        let target = Target::Return;
        let rule = Rule { matches: [&fulfilled[..], &all].concat(), target };
        assert_eq!(rule.effective_matches().cloned().collect::<Vec<_>>(), all);
        assert!(fulfilled[..2].iter().all(Match::is_always_true) && !fulfilled[2].is_always_true());
        assert!(!all.iter().any(Match::is_always_true));
    }

    #[test]
    fn flags_have_names_and_those_set_are_among_those_looked_at() {
        assert!(TcpFlags::new(TcpFlags::SYN | TcpFlags::ACK, TcpFlags::SYN).is_some());
        for (mask, set) in [(0, 0), (TcpFlags::SYN, TcpFlags::ACK), (0x40, 0), (0xff, 0x40)] {
            assert_eq!(TcpFlags::new(mask, set), None, "{mask:#x} {set:#x}");
        }
    }
}
