//! Rules: conditions and what to do when all hold.

use crate::{
    rule::{ConnState, Direction, Equality, Match, Protocol, Target, TcpFlags, Tracked},
    values::MaskedMark,
};
use alloc::{
    borrow::ToOwned,
    string::{String, ToString},
    vec::Vec,
};
use serde::{Deserialize, Serialize};

/// One condition of a rule. All conditions of a rule must hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Condition {
    /// What is tested.
    #[serde(flatten)]
    pub test: Test,
    /// Whether the condition holds when the test fails (`!` in iptables). Written only where it does.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub not: bool,
}

/// What a condition tests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "match", rename_all = "camelCase")]
#[non_exhaustive]
pub enum Test {
    /// The source address is in this range.
    Source {
        /// The range, with its prefix length.
        range: String,
    },
    /// The destination address is in this range.
    Destination {
        /// The range, with its prefix length.
        range: String,
    },
    /// The packet came in by this interface.
    InInterface {
        /// Its name; `+` at the end stands for any ending.
        interface: String,
    },
    /// The packet goes out by this interface.
    OutInterface {
        /// Its name; `+` at the end stands for any ending.
        interface: String,
    },
    /// The protocol.
    Protocol {
        /// Its name.
        protocol: Protocol,
    },
    /// The source port.
    SourcePort {
        /// `80`, or `8000:8099`.
        port: String,
    },
    /// The destination port.
    DestinationPort {
        /// `80`, or `8000:8099`.
        port: String,
    },
    /// The destination port is one of these.
    DestinationPorts {
        /// Each `80`, or `8000:8099`.
        ports: Vec<String>,
    },
    /// Of these TCP flags, exactly some are set.
    TcpFlags {
        /// The flags checked.
        mask: Vec<String>,
        /// Those of them that are set.
        set: Vec<String>,
    },
    /// What connection tracking says.
    ConnectionTracking {
        /// The packet's state.
        state: ConnState,
        /// Which way it goes; either way where missing.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        direction: Option<Direction>,
    },
    /// The user of the sending socket.
    OwnerUid {
        /// The id.
        uid: u32,
    },
    /// The group of the sending socket.
    OwnerGid {
        /// The id.
        gid: u32,
    },
    /// The packet's mark.
    Mark {
        /// Its bits.
        mark: u32,
        /// Those of them that count; all where missing.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mask: Option<u32>,
    },
    /// The connection's mark.
    ConnectionMark {
        /// The bits that are set.
        value: u32,
        /// The bits that count.
        mask: u32,
    },
}

/// What a rule does with a packet that fulfils its conditions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "camelCase")]
#[non_exhaustive]
pub enum Action {
    /// The packet is done with this table.
    Accept,
    /// The packet is dropped.
    Drop,
    /// The packet goes back to the calling chain.
    Return,
    /// The packet goes to another chain.
    Jump {
        /// Its name.
        chain: String,
    },
    /// The packet goes to this port of the local host.
    Redirect {
        /// The port.
        port: u16,
    },
    /// The packet goes to the listener on this port as it is.
    Tproxy {
        /// The port.
        port: u16,
        /// The mark the packet gets.
        mark: u32,
    },
    /// The packet gets this mark.
    SetMark {
        /// The mark.
        mark: u32,
    },
    /// The connection gets the packet's mark.
    SaveMark,
    /// The packet gets the connection's mark.
    RestoreMark,
    /// The connection gets these bits of a mark.
    SetConnectionMark {
        /// The bits that are set.
        value: u32,
        /// The bits that count.
        mask: u32,
    },
    /// The packet belongs to this zone of connection tracking.
    ConntrackZone {
        /// The zone.
        zone: u16,
    },
}

/// The bits of a mark that count, where not all do.
pub(super) fn mask_of(mark: MaskedMark) -> Option<u32> {
    mark.whole().is_none().then_some(mark.mask())
}

impl From<&Match> for Condition {
    fn from(condition: &Match) -> Self {
        match condition {
            Match::Source(is) => Self::of(is, |net| Test::Source { range: net.to_string() }),
            Match::Destination(is) => Self::of(is, |net| Test::Destination { range: net.to_string() }),
            Match::InInterface(is) => Self::of(is, |name| Test::InInterface { interface: name.to_string() }),
            Match::OutInterface(is) => {
                Self::of(is, |name| Test::OutInterface { interface: name.to_string() })
            }
            Match::Protocol(protocol) => Self::plain(Test::Protocol { protocol: *protocol }),
            Match::SourcePort(is) => Self::of(is, |range| Test::SourcePort { port: range.to_string() }),
            Match::DestinationPort(is) => {
                Self::of(is, |range| Test::DestinationPort { port: range.to_string() })
            }
            Match::DestinationPorts(is) => Self::of(is, |ranges| Test::DestinationPorts {
                ports: ranges.iter().map(ToString::to_string).collect(),
            }),
            Match::TcpFlags(is) => Self::of(is, |tcp| Test::TcpFlags {
                mask: flag_names(tcp.mask()),
                set: flag_names(tcp.set()),
            }),
            Match::Tracked(Tracked { state, direction }) => {
                Self::plain(Test::ConnectionTracking { state: *state, direction: *direction })
            }
            Match::OwnerUid(is) => Self::of(is, |uid| Test::OwnerUid { uid: *uid }),
            Match::OwnerGid(is) => Self::of(is, |gid| Test::OwnerGid { gid: *gid }),
            Match::Mark(is) => Self::of(is, |mark| Test::Mark { mark: mark.value(), mask: mask_of(*mark) }),
            Match::ConnMark(is) => {
                Self::of(is, |mark| Test::ConnectionMark { value: mark.value(), mask: mark.mask() })
            }
        }
    }
}

impl Condition {
    fn of<T>(is: &Equality<T>, test: impl FnOnce(&T) -> Test) -> Self {
        Self { test: test(&is.value), not: is.not }
    }

    const fn plain(test: Test) -> Self {
        Self { test, not: false }
    }
}

fn flag_names(flags: u8) -> Vec<String> {
    let named = TcpFlags::NAMED.iter().copied().filter(|(flag, _)| flags & flag != 0);
    named.map(|(_, name)| name.to_owned()).collect()
}

impl From<&Target> for Action {
    fn from(target: &Target) -> Self {
        match target {
            Target::Accept => Self::Accept,
            Target::Drop => Self::Drop,
            Target::Return => Self::Return,
            Target::Jump(chain) => Self::Jump { chain: chain.name().to_owned() },
            Target::Redirect(port) => Self::Redirect { port: port.number() },
            Target::Tproxy { port, mark } => Self::Tproxy { port: port.number(), mark: mark.value() },
            Target::SetMark(mark) => Self::SetMark { mark: mark.value() },
            Target::SaveMark => Self::SaveMark,
            Target::RestoreMark => Self::RestoreMark,
            Target::SetConnMark(mark) => Self::SetConnectionMark { value: mark.value(), mask: mark.mask() },
            Target::ConntrackZone(zone) => Self::ConntrackZone { zone: *zone },
        }
    }
}
