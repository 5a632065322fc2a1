//! What becomes of a packet: every rule that it meets on its way through the kernel, the one that decides, and where it ends.
//!
//! [`TraceRules`] are those of a plan, or all that a network namespace holds: the mesh's own by any backend, and those of other programs as far
//! as they are supported. [`TraceRules::trace`] sends a [`Packet`] through all hooks that it meets, in the kernel's order:
//!
//! - A packet of a local process meets `output`, is routed again where its mark or destination has changed, and meets
//!   `postrouting`; over `lo` it then arrives in the pod again, where it belongs to no process any more.
//! - A packet that arrives meets `prerouting`, and then `input`.
//! - Chains of type nat see only the first packet of a connection, once for its destination. A packet of
//!   a known connection follows its first packet ([`ConntrackEntry::translated_to`]).
//!
//! An unsupported condition or statement of another program splits one path into two. Where they end differently, the fate is
//! [`Unknown`](Fate::Unknown), and [`Trace::may`] says what it may be.
//!
//! Sets, maps and verdict maps of nf_tables are searched. Unsupported, because the outcome is unpredictable or its data is kept
//! elsewhere: limits and quotas, chance, sets of ipset, the decisions of a socket, a process behind a queue or a BPF program.
//!
//! Not followed: forwarding (a packet that arrives is taken to be for the pod), fragments, and sockets: the proxy is taken to
//! listen. While it does not, what goes to it is refused or dropped, never let through.
//!
//! [`TrafficDifference::of_plans`] compares two plans by walking all packets at once.
//!
//! In go a plan of `redirect-core`, or the ruleset, routing and policy routes that `netfilter-state` has read, and packets. Out come
//! traces, traffic differences, and findings about what keeps packets from the proxy ([`interference`]). It knows neither messages of the
//! kernel nor how rules are put in force.
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::panic
    )
)]
// What is pure, clippy.toml says; tests read recordings.
#![cfg_attr(test, allow(clippy::disallowed_methods, clippy::disallowed_types))]

mod conditions;
mod difference;
pub mod interference;
#[cfg(feature = "serde")]
pub mod json;
mod packets;
pub mod placement;
mod routes;
mod rules;
mod set;
mod text;
mod walk;

pub use difference::{Region, TrafficDifference};
pub use rules::{MeshRule, TraceRules};
pub use text::Detail;

use netfilter_state::ruleset::TableName;
use packets::{Packets, VariedField};
use redirect_core::{
    plan::PlannedRule,
    rule::{Hook, Protocol, TcpFlags},
    settings::{Key, Source},
    values::Family,
};
use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};
use walk::{WalkInput, Ways, WorkBudget};

/// Work limit of one trace: another program may craft a ruleset that takes any amount.
const MOST_WORK: usize = 1_000_000;

/// Who sends a packet. Closed on purpose: rules ask for nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "sender", rename_all = "camelCase"))]
pub enum Sender {
    /// A peer outside the pod.
    Outside,
    /// A socket in the pod, of this user and group.
    #[cfg_attr(feature = "serde", serde(rename = "pod"))]
    Local {
        /// The user.
        #[cfg_attr(feature = "serde", serde(rename = "user"))]
        uid: u32,
        /// The group.
        #[cfg_attr(feature = "serde", serde(rename = "group"))]
        gid: u32,
    },
}

/// By which interface a packet comes in, or would go out.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(untagged))]
#[non_exhaustive]
pub enum Interface {
    /// Of this name.
    Named(String),
    /// Not loopback; otherwise unknown.
    Elsewhere,
}

/// What connection tracking says about a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "camelCase"))]
pub enum ConnectionState {
    /// It is the first of a connection.
    New,
    /// The first of a connection that another connection expects.
    Related,
    /// It belongs to a connection, and travels in the first packet's direction.
    Established,
    /// It belongs to a connection, and travels in the opposite direction.
    Reply,
    /// It belongs to none, and opens none.
    Invalid,
}

impl ConnectionState {
    const ALL: [Self; 5] = [Self::New, Self::Related, Self::Established, Self::Reply, Self::Invalid];
}

/// The connection of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "camelCase"))]
pub struct ConntrackEntry {
    /// What connection tracking says.
    pub state: ConnectionState,
    /// Its mark.
    #[cfg_attr(feature = "serde", serde(rename = "connectionMark"))]
    pub mark: u32,
    /// Where its first packet was translated to, if it was.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub translated_to: Option<SocketAddr>,
}

/// A connection that the packet opens.
impl Default for ConntrackEntry {
    fn default() -> Self {
        Self { state: ConnectionState::New, mark: 0, translated_to: None }
    }
}

/// One packet.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "camelCase"))]
#[non_exhaustive]
pub struct Packet {
    /// Who sends it.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub sender: Sender,
    /// Its protocol.
    pub protocol: Protocol,
    /// Where from: an address, where it is known, ...
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub source: Option<IpAddr>,
    /// ... and a port, where that is known.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub source_port: Option<u16>,
    /// Where to.
    pub destination: SocketAddr,
    /// By which interface it comes in, or goes out before any rule has rerouted it.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "json::is_elsewhere"))]
    pub interface: Interface,
    /// Its flags, if it is a segment of TCP.
    pub flags: u8,
    /// Its mark.
    pub mark: u32,
    /// Its connection.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub connection: ConntrackEntry,
}

impl Packet {
    /// The first packet of a TCP connection from outside, to the pod.
    #[must_use]
    pub fn from_outside(source: SocketAddr, destination: SocketAddr) -> Self {
        Self {
            sender: Sender::Outside,
            protocol: Protocol::Tcp,
            source: Some(source.ip()),
            source_port: Some(source.port()),
            destination,
            interface: Interface::Elsewhere,
            flags: TcpFlags::SYN,
            mark: 0,
            connection: ConntrackEntry::default(),
        }
    }

    /// The first packet of a TCP connection that a process of the pod opens. One to a loopback address, or to the address
    /// it comes from, goes over `lo`.
    #[must_use]
    pub fn from_pod(uid: u32, gid: u32, source: SocketAddr, destination: SocketAddr) -> Self {
        let stays = destination.ip().is_loopback() || destination.ip() == source.ip();
        let interface = if stays { Interface::Named("lo".into()) } else { Interface::Elsewhere };
        Self { sender: Sender::Local { uid, gid }, interface, ..Self::from_outside(source, destination) }
    }

    /// The same in a datagram.
    #[must_use]
    pub fn over_udp(self) -> Self {
        Self { protocol: Protocol::Udp, flags: 0, ..self }
    }

    /// The same by this interface.
    #[must_use]
    pub fn by(self, interface: &str) -> Self {
        Self { interface: Interface::Named(interface.into()), ..self }
    }

    /// The same with this mark.
    #[must_use]
    pub fn with_mark(self, mark: u32) -> Self {
        Self { mark, ..self }
    }

    /// Its family.
    #[must_use]
    pub const fn family(&self) -> Family {
        Family::of(&self.destination.ip())
    }

    fn packets(&self) -> Packets {
        let mut packets = Packets::all(self.family());
        packets.set_one(VariedField::Protocol, self.protocol.number());
        if let Some(source) = self.source {
            packets.set_one(VariedField::Source, packets::number(source));
        }
        if let Some(port) = self.source_port {
            packets.set_one(VariedField::SourcePort, port);
        }
        packets.set_one(VariedField::Destination, packets::number(self.destination.ip()));
        packets.set_one(VariedField::Port, self.destination.port());
        if let Sender::Local { uid, gid } = self.sender {
            packets.set_one(VariedField::User, uid);
            packets.set_one(VariedField::Group, gid);
        }
        match &self.interface {
            Interface::Named(name) => packets.set_one(VariedField::Interface, packets::interface(name)),
            Interface::Elsewhere => {
                let lo = set::RangeSet::one(packets::LO);
                packets.set(VariedField::Interface, lo.complement(u128::MAX));
            }
        }
        packets.set_one(VariedField::State, self.connection.state as u8);
        packets.set_one(VariedField::Flags, self.flags);
        packets.set_one(VariedField::Mark, self.mark);
        packets.set_one(VariedField::ConnMark, self.connection.mark);
        packets
    }

    fn given(&self) -> WalkInput {
        WalkInput {
            is_local: matches!(self.sender, Sender::Local { .. }),
            translated_to: self.connection.translated_to,
            asks_route: true,
            ..WalkInput::default()
        }
    }
}

/// A listener of the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "camelCase"))]
pub enum Listener {
    /// Of what the application sends.
    Outbound,
    /// Of what comes to the application.
    Inbound,
    /// Of DNS queries.
    Dns,
}

impl Listener {
    /// Its name in a sentence.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Outbound => "outbound",
            Self::Inbound => "inbound",
            Self::Dns => "DNS",
        }
    }
}

/// Where a packet ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "fate", rename_all = "camelCase"))]
pub enum Fate {
    /// At its destination: no rule captures it.
    Untouched,
    /// At a listener of the proxy.
    Proxy {
        /// Which.
        listener: Listener,
        /// Its port.
        port: u16,
        /// Whether the destination is rewritten (REDIRECT); with TPROXY it is not.
        rewritten: bool,
    },
    /// At a port of the pod to which another program's rule sends it.
    Redirected {
        /// The port.
        port: u16,
    },
    /// At the destination that another program's rule translates it to. The trace ends there.
    Translated,
    /// At a listener, where its connection ends: another program's rule translates what TPROXY has handed over, or answers leave the pod.
    Broken,
    /// Nowhere.
    Dropped,
    /// Nowhere, and the kernel notifies the sender.
    Rejected,
    /// Unknown: a rule on its path is unsupported.
    Unknown,
}

/// The setting behind a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RuleOrigin {
    /// The setting.
    pub setting: Key,
    /// Its source.
    pub source: Source,
    /// What the rule is for.
    pub purpose: &'static str,
}

impl RuleOrigin {
    fn of(planned: &PlannedRule) -> Self {
        Self { setting: planned.setting(), source: planned.source(), purpose: planned.purpose() }
    }
}

/// Where a rule stands.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RuleLocation {
    /// The table.
    pub table: TableName,
    /// The chain.
    #[cfg_attr(feature = "serde", serde(serialize_with = "json::plain"))]
    pub chain: String,
    /// The rule's number in it, counted from 1; none for the chain itself.
    #[cfg_attr(feature = "serde", serde(rename = "number", skip_serializing_if = "Option::is_none"))]
    pub rule: Option<usize>,
}

/// Whether a packet fulfils a rule's conditions. Closed: no fourth exists.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize),
    serde(tag = "outcome", content = "condition", rename_all = "camelCase")
)]
pub enum Outcome {
    /// It does.
    Matched,
    /// It does not fulfil this one.
    Unmatched(String),
    /// Whether it fulfils this one is unknown.
    Unknown(String),
}

/// Something that a rule or the kernel changes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "step", rename_all = "camelCase"))]
#[non_exhaustive]
pub enum PacketEdit {
    /// The packet's mark.
    Mark {
        /// Its new value; none where it is not known.
        #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
        mark: Option<u32>,
    },
    /// The connection's mark.
    ConnectionMark {
        /// Its new value; none where it is not known.
        #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
        mark: Option<u32>,
    },
    /// The destination.
    Destination {
        /// The new one.
        destination: SocketAddr,
    },
    /// The zone of connection tracking.
    Zone {
        /// Which.
        zone: u16,
    },
    /// The interface it leaves by.
    #[cfg_attr(feature = "serde", serde(rename = "route"))]
    Rerouted {
        /// Which; none where it is not known.
        #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
        interface: Option<String>,
    },
}

/// One step of a packet's way.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "step", rename_all = "camelCase"))]
#[non_exhaustive]
pub enum TraceEvent {
    /// It comes to a hook.
    Hook {
        /// Which.
        hook: Hook,
        /// By this interface; none where it is not known.
        #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
        interface: Option<String>,
    },
    /// It comes to a base chain.
    Chain {
        /// Which.
        #[cfg_attr(feature = "serde", serde(flatten))]
        place: RuleLocation,
        /// Its priority.
        priority: i32,
    },
    /// It meets a rule.
    Rule {
        /// Its position.
        #[cfg_attr(feature = "serde", serde(flatten))]
        place: RuleLocation,
        /// How many jumps led there.
        depth: usize,
        /// The rule in words.
        #[cfg_attr(feature = "serde", serde(rename = "text"))]
        rule: String,
        /// Whether it matches the packet.
        #[cfg_attr(feature = "serde", serde(flatten))]
        outcome: Outcome,
        /// Whether it is one of the mesh's.
        #[cfg_attr(feature = "serde", serde(rename = "ofMesh"))]
        is_own: bool,
        /// The setting behind it.
        #[cfg_attr(feature = "serde", serde(flatten))]
        origin: Option<RuleOrigin>,
    },
    /// A base chain's policy drops the packet.
    Policy {
        /// Which.
        #[cfg_attr(feature = "serde", serde(flatten))]
        place: RuleLocation,
    },
    /// Routing drops it.
    #[cfg_attr(feature = "serde", serde(rename = "unroutable"))]
    Route {
        /// The policy rule or route that does, in words.
        #[cfg_attr(feature = "serde", serde(rename = "text"))]
        decides: String,
    },
    /// Something changes.
    #[cfg_attr(feature = "serde", serde(untagged))]
    Changed(PacketEdit),
}

/// An unknown that decides where a packet ends.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Unknown {
    /// By which interface it comes or goes.
    Interface,
    /// Its source address.
    Source,
    /// Its source port.
    SourcePort,
    /// A mark.
    Mark,
    /// Whether a rule or statement, in words, matches it: its conditions are unsupported, or depend on chance.
    Rule(String),
    /// Which of two base chains of one priority the kernel asks first.
    Order(String, String),
    /// Whether connection tracking comes before this base chain of its priority.
    Tracking(String),
    /// Whether a policy rule or route, in words, applies to it.
    Route(String),
    /// What becomes of a lost packet when TCP repeats it.
    Repeated,
    /// What comes after as many rules as are followed.
    Work,
}

/// What it is, and how to get it.
impl std::fmt::Display for Unknown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Interface => f.write_str("which interface the packet comes in or goes out by (name it)"),
            Self::Source => f.write_str("its source address (name it)"),
            Self::SourcePort => f.write_str("its source port (name it)"),
            Self::Mark => f.write_str("its mark (name it)"),
            Self::Rule(rule) => write!(f, "whether this rule applies: {rule}"),
            Self::Order(one, other) => {
                write!(f, "which of two chains of one priority the kernel asks first: {one} or {other}")
            }
            Self::Tracking(chain) => {
                write!(f, "whether connection tracking comes before {chain}, at its own priority")
            }
            Self::Route(rule) => write!(f, "whether this applies: {rule}"),
            Self::Repeated => f.write_str(
                "what happens when TCP repeats the lost packet: its connection keeps the mark that a rule has set",
            ),
            Self::Work => f.write_str("the rules beyond the limit of those followed"),
        }
    }
}

/// The path of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Trace {
    /// The packet.
    pub packet: Packet,
    /// Its steps. If rules are unsupported, the steps taken if none of them matches.
    pub steps: Vec<TraceEvent>,
    /// The number of the step that decides, counted from 0; none where no rule does.
    pub decided: Option<usize>,
    /// Where it may end. One, unless something is unknown.
    pub may: BTreeSet<Fate>,
    /// If several, the unknowns that decide.
    pub unknown: BTreeSet<Unknown>,
}

impl Trace {
    /// Where the packet ends.
    #[must_use]
    pub fn fate(&self) -> Fate {
        fate(&self.may)
    }

    /// The rule or policy that decides.
    #[must_use]
    pub fn deciding(&self) -> Option<&TraceEvent> {
        self.decided.and_then(|step| self.steps.get(step))
    }
}

/// The only one; unknown if several.
fn fate(may: &BTreeSet<Fate>) -> Fate {
    let mut fates = may.iter();
    fates.next().copied().filter(|_| fates.next().is_none()).unwrap_or(Fate::Unknown)
}

impl TraceRules {
    /// The path of a packet through these rules. A packet of another family meets none of them.
    #[must_use]
    pub fn trace(&self, packet: &Packet) -> Trace {
        let (Ways { ways, unknown, .. }, may) = self.ways(packet, true);
        let first = ways.into_iter().next().map(|way| (way.steps, way.decided));
        let (steps, decided) = first.unwrap_or_default();
        let unknown = if may.len() > 1 { unknown } else { BTreeSet::new() };
        Trace { packet: packet.clone(), steps, decided, may, unknown }
    }

    /// Where a packet ends: the end of its [`trace`](Self::trace), at lower cost.
    #[must_use]
    pub fn fate(&self, packet: &Packet) -> Fate {
        fate(&self.ways(packet, false).1)
    }

    /// The possible paths of a packet, and where they end.
    fn ways(&self, packet: &Packet, records: bool) -> (Ways, BTreeSet<Fate>) {
        if packet.family() != self.family {
            return (Ways::default(), [Fate::Untouched].into());
        }
        let (mut work, mut packets) = (WorkBudget::of(MOST_WORK), packet.packets());
        if packet.interface == Interface::Elsewhere {
            packets.set(VariedField::Interface, self.links.clone());
        }
        let found = walk::all(self, &packets, &packet.given(), &mut work, records);
        let may = found.ways.iter().map(|way| way.fate).collect();
        (found, may)
    }
}

impl std::fmt::Display for Fate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Untouched => f.write_str("untouched, to its destination"),
            Self::Proxy { listener, port, rewritten } => {
                let how = if *rewritten { "" } else { ", destination unchanged" };
                write!(f, "proxy, {} listener (port {port}{how})", listener.name())
            }
            Self::Redirected { port } => write!(f, "redirected to port {port} by another program's rule"),
            Self::Translated => f.write_str("translated by another program's rule"),
            Self::Broken => f.write_str("broken: its connection ends after the first packet"),
            Self::Dropped => f.write_str("dropped"),
            Self::Rejected => f.write_str("rejected"),
            Self::Unknown => f.write_str("unknown: a rule on its path is unsupported"),
        }
    }
}

/// The snippets of the README, as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(test)]
mod backends;
#[cfg(test)]
mod kernel;
#[cfg(test)]
mod recorded;
#[cfg(test)]
mod tests;
