//! The way of a packet, and the traffic that two plans treat differently.

use alloc::{
    borrow::ToOwned,
    string::{String, ToString},
    vec::Vec,
};
use core::net::{IpAddr, SocketAddr};
use netfilter_state::ruleset::Plain;
use redirect_core::{
    json::{Source, VERSION, setting_name},
    rule::Protocol,
    values::Family,
};
use serde::{Deserialize, Serialize};

use crate::{ConnectionState, Fate, Outcome};

/// The way of a packet: the counterpart of [`crate::Trace`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Trace {
    /// The version of the schema.
    pub version: u32,
    /// The packet.
    pub packet: Packet,
    /// Where it ends.
    pub end: Fate,
    /// Where it may end if a rule is unsupported; absent if certain.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub may: Vec<Fate>,
    /// The unknown that decides which, in words; absent if certain.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<String>,
    /// The step that decides, counted from 0; missing where no rule does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decided: Option<usize>,
    /// The steps.
    pub steps: Vec<TraceEventJson>,
    /// What sees the packet besides rules and is not examined, in words that may change. A trace does not know; who has read the network
    /// namespace adds it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unexamined: Vec<String>,
}

/// One packet: the counterpart of [`crate::Packet`]. A missing field is unknown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Packet {
    /// Who sends it.
    pub sender: Sender,
    /// The user who sends it, if a socket of the pod does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<u32>,
    /// The group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// Its protocol.
    pub protocol: Protocol,
    /// The address it comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<IpAddr>,
    /// The port it comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_port: Option<u16>,
    /// Where to.
    pub destination: SocketAddr,
    /// By which interface it comes in or goes out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// TCP's flags.
    pub flags: u8,
    /// Its mark.
    pub mark: u32,
    /// What connection tracking says about it.
    pub state: ConnectionState,
    /// The mark of its connection.
    pub connection_mark: u32,
    /// Where the first packet of its connection was translated to, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub translated_to: Option<SocketAddr>,
}

/// Who sends a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub enum Sender {
    /// A peer outside the pod.
    Outside,
    /// A socket in the pod.
    Pod,
}

/// One step of a packet's way: the counterpart of [`crate::TraceEvent`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "camelCase", rename_all_fields = "camelCase")]
#[non_exhaustive]
pub enum TraceEventJson {
    /// It comes to a hook.
    Hook {
        /// Its name in iptables.
        hook: String,
        /// By this interface; missing where it is not known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        interface: Option<String>,
    },
    /// It comes to a base chain.
    Chain {
        /// The table.
        table: String,
        /// The chain.
        chain: String,
        /// Its priority.
        priority: i32,
    },
    /// It meets a rule.
    Rule {
        /// The table.
        table: String,
        /// The chain.
        chain: String,
        /// The rule's number in it, counted from 1.
        number: usize,
        /// How many jumps led there.
        depth: usize,
        /// The rule in words.
        text: String,
        /// Whether it is about the packet, and the condition that fails, or is unsupported.
        #[serde(flatten)]
        outcome: Outcome,
        /// Whether it is one of the mesh's.
        of_mesh: bool,
        /// The name of the setting behind it, where it is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        setting: Option<String>,
        /// Who said so.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        source: Option<Source>,
        /// What it is for; the wording may change.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        purpose: Option<String>,
    },
    /// A base chain drops what its rules leave alone.
    Policy {
        /// The table.
        table: String,
        /// The chain.
        chain: String,
    },
    /// The packet gets a mark; missing where it is not known which.
    Mark {
        /// The mark.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mark: Option<u32>,
    },
    /// Its connection does.
    ConnectionMark {
        /// The mark.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mark: Option<u32>,
    },
    /// Its destination is rewritten.
    Destination {
        /// The new one.
        destination: SocketAddr,
    },
    /// It belongs to a zone of connection tracking.
    Zone {
        /// Which.
        zone: u16,
    },
    /// It leaves by another interface.
    Route {
        /// Which; missing where it is not known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        interface: Option<String>,
    },
    /// Routing ends its way.
    Unroutable {
        /// The policy rule or route that does, in words.
        text: String,
    },
}

/// All traffic that two plans treat differently: the counterpart of what [`crate::difference()`] returns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TrafficDifferences {
    /// The version of the schema.
    pub version: u32,
    /// Sets of packets that do not overlap; none where the plans mean the same.
    pub traffic: Vec<TrafficDifference>,
}

/// Packets that two plans treat differently: the counterpart of [`crate::Difference`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TrafficDifference {
    /// The packets.
    pub packets: Region,
    /// Where they end by the one plan.
    pub before: Fate,
    /// Where they end by the other.
    pub after: Fate,
    /// The same in a sentence; its wording may change.
    pub text: String,
}

/// A set of packets: the counterpart of [`crate::Region`]. A field that is missing may have any value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Region {
    /// Their family.
    pub family: Family,
    /// Who sends them.
    pub sender: Sender,
    /// Their protocols.
    pub protocols: Vec<Protocol>,
    /// By which interfaces they come in or go out, in words: `lo`, `not lo`, `eth0`, `veth+`.
    pub interfaces: String,
    /// Where they come from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sources: Option<Vec<Range<IpAddr>>>,
    /// The ports they come from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_ports: Option<Vec<Range<u16>>>,
    /// Where they go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub destinations: Option<Vec<Range<IpAddr>>>,
    /// The ports they go to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ports: Option<Vec<Range<u16>>>,
    /// Who sends them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub users: Option<Vec<Range<u32>>>,
    /// Of which group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<Vec<Range<u32>>>,
    /// TCP's flags.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flags: Option<Vec<Range<u8>>>,
    /// Their marks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub marks: Option<Vec<Range<u32>>>,
    /// The marks of their connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connection_marks: Option<Vec<Range<u32>>>,
    /// What connection tracking says about them.
    pub states: Vec<ConnectionState>,
}

/// Values that lie next to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Range<T> {
    /// The first.
    pub first: T,
    /// The last.
    pub last: T,
}

fn ranges<T>(ranges: Vec<(T, T)>) -> Vec<Range<T>> {
    ranges.into_iter().map(|(first, last)| Range { first, last }).collect()
}

impl From<&crate::Trace> for Trace {
    fn from(trace: &crate::Trace) -> Self {
        let may = trace.may.iter().copied();
        Self {
            version: VERSION,
            packet: (&trace.packet).into(),
            end: trace.fate(),
            may: may.filter(|_| trace.may.len() > 1).collect(),
            unknown: trace.unknown.iter().map(ToString::to_string).collect(),
            decided: trace.decided,
            steps: trace.steps.iter().map(TraceEventJson::from).collect(),
            unexamined: Vec::new(),
        }
    }
}

impl From<&crate::Packet> for Packet {
    fn from(packet: &crate::Packet) -> Self {
        let (sender, user, group) = match packet.sender {
            crate::Sender::Outside => (Sender::Outside, None, None),
            crate::Sender::Local { uid, gid } => (Sender::Pod, Some(uid), Some(gid)),
        };
        Self {
            sender,
            user,
            group,
            protocol: packet.protocol,
            source: packet.source,
            source_port: packet.source_port,
            destination: packet.destination,
            interface: match &packet.interface {
                crate::Interface::Named(name) => Some(name.clone()),
                crate::Interface::Elsewhere => None,
            },
            flags: packet.flags,
            mark: packet.mark,
            state: packet.connection.state,
            connection_mark: packet.connection.mark,
            translated_to: packet.connection.translated_to,
        }
    }
}

impl From<&crate::TraceEvent> for TraceEventJson {
    fn from(step: &crate::TraceEvent) -> Self {
        match step {
            crate::TraceEvent::Hook { hook, interface } => {
                Self::Hook { hook: hook.name().to_owned(), interface: interface.clone() }
            }
            crate::TraceEvent::Chain { place, priority } => Self::Chain {
                table: place.table.to_string(),
                chain: Plain(&place.chain).to_string(),
                priority: *priority,
            },
            crate::TraceEvent::Rule { place, depth, rule, outcome, is_own, origin } => Self::Rule {
                table: place.table.to_string(),
                chain: Plain(&place.chain).to_string(),
                number: place.rule.unwrap_or_default(),
                depth: *depth,
                text: rule.clone(),
                outcome: outcome.clone(),
                of_mesh: *is_own,
                setting: origin.map(|origin| setting_name(origin.setting).to_owned()),
                source: origin.map(|origin| origin.source.into()),
                purpose: origin.map(|origin| origin.purpose.to_owned()),
            },
            crate::TraceEvent::Policy { place } => {
                Self::Policy { table: place.table.to_string(), chain: Plain(&place.chain).to_string() }
            }
            crate::TraceEvent::Changed(change) => change.into(),
            crate::TraceEvent::Route { decides } => Self::Unroutable { text: decides.clone() },
        }
    }
}

impl From<&crate::PacketEdit> for TraceEventJson {
    fn from(change: &crate::PacketEdit) -> Self {
        match change {
            crate::PacketEdit::Mark(mark) => Self::Mark { mark: *mark },
            crate::PacketEdit::ConnectionMark(mark) => Self::ConnectionMark { mark: *mark },
            crate::PacketEdit::Destination(destination) => Self::Destination { destination: *destination },
            crate::PacketEdit::Zone(zone) => Self::Zone { zone: *zone },
            crate::PacketEdit::Rerouted(interface) => Self::Route { interface: interface.clone() },
        }
    }
}

impl From<&[crate::Difference]> for TrafficDifferences {
    fn from(differences: &[crate::Difference]) -> Self {
        let traffic = differences.iter().map(|one| TrafficDifference {
            packets: (&one.region).into(),
            before: one.before,
            after: one.after,
            text: one.to_string(),
        });
        Self { version: VERSION, traffic: traffic.collect() }
    }
}

impl From<&crate::Region> for Region {
    fn from(region: &crate::Region) -> Self {
        Self {
            family: region.family(),
            sender: if region.is_local() { Sender::Pod } else { Sender::Outside },
            protocols: region.protocols(),
            interfaces: region.interfaces(),
            sources: region.sources().map(ranges),
            source_ports: region.source_ports().map(ranges),
            destinations: region.destinations().map(ranges),
            ports: region.ports().map(ranges),
            users: region.users().map(ranges),
            groups: region.groups().map(ranges),
            flags: region.flags().map(ranges),
            marks: region.marks().map(ranges),
            connection_marks: region.connection_marks().map(ranges),
            states: region.states(),
        }
    }
}
