//! Bytes of inet_diag (`linux/inet_diag.h`, `sock_diag.h`) and ctnetlink (`linux/netfilter/nfnetlink_conntrack.h`).
//!
//! The library for sock_diag can list sockets but not destroy them; none for ctnetlink can delete.

use crate::socket::{attributes, message};
use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST};
use redirect_core::{Family, rule::Protocol};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const CONNTRACK: u16 = 1 << 8;
const GET_FLOWS: u16 = CONNTRACK | 1;
const DELETE_FLOW: u16 = CONNTRACK | 2;

/// States of sockets (include/net/tcp_states.h).
mod state {
    pub(super) const TIME_WAIT: u8 = 6;
    pub(super) const CLOSED: u8 = 7;
    pub(super) const LISTEN: u8 = 10;
}

pub(super) const ALL_STATES: u32 = u32::MAX;
const AF_INET6: u8 = 10;
/// Where `inet_diag_msg` has its `inet_diag_sockid`.
const ID: std::ops::Range<usize> = 4..52;
/// Where it has the user's id.
const USER: usize = 64;
/// Where it has the socket's inode.
const INODE: usize = 68;

/// A socket of TCP or UDP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Inet {
    pub(super) protocol: Protocol,
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    /// Its owner.
    pub(super) user: u32,
    /// What links of open files call it by; 0 when no process has it open.
    pub(super) inode: u32,
    state: u8,
    family: u8,
    id: [u8; 48],
}

impl Inet {
    /// What no two sockets share: it holds the kernel's cookie.
    pub(super) const fn id(&self) -> [u8; 48] {
        self.id
    }

    /// From an `inet_diag_msg`.
    pub(super) fn read(body: &[u8], protocol: Protocol) -> Option<Self> {
        let (family, state) = (*body.first()?, *body.get(1)?);
        let id: [u8; 48] = body.get(ID)?.try_into().ok()?;
        let port = |at: usize| Some(u16::from_be_bytes(array(&id, at)?));
        Some(Self {
            protocol,
            local: SocketAddr::new(address(family, &id, 4)?, port(0)?),
            remote: SocketAddr::new(address(family, &id, 20)?, port(2)?),
            user: u32::from_ne_bytes(array(body, USER)?),
            inode: u32::from_ne_bytes(array(body, INODE)?),
            state,
            family,
            id,
        })
    }

    pub(super) const fn is_listener(&self) -> bool {
        matches!(self.protocol, Protocol::Tcp) && self.state == state::LISTEN
    }

    /// Whether it has another end, and something may still be sent.
    pub(super) fn is_open(&self) -> bool {
        let is_over = if self.protocol == Protocol::Tcp {
            [state::TIME_WAIT, state::CLOSED, state::LISTEN].contains(&self.state)
        } else {
            self.remote.ip().is_unspecified()
        };
        !is_over && self.remote.port() != 0
    }
}

/// What connection tracking knows of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Flow {
    pub(super) protocol: Protocol,
    /// Of its first packet, as that was sent.
    pub(super) source: SocketAddr,
    pub(super) destination: SocketAddr,
    /// The reply direction: source and destination as the other end sees them.
    reply: (SocketAddr, SocketAddr),
    /// Whether addresses or ports are changed on the way.
    pub(super) is_translated: bool,
    /// Whether it is a TCP connection in whose handshake something is missing.
    pub(super) is_opening: bool,
    family: u8,
    /// The attributes that name it, as they came.
    name: Vec<u8>,
}

/// Types of attributes.
mod attribute {
    pub(super) const ORIGINAL: u16 = 1;
    pub(super) const REPLY: u16 = 2;
    pub(super) const STATUS: u16 = 3;
    pub(super) const PROTOCOL_STATE: u16 = 4;
    pub(super) const ZONE: u16 = 18;
    pub(super) const TCP: u16 = 1;
    pub(super) const TCP_STATE: u16 = 1;
    pub(super) const ADDRESSES: u16 = 1;
    pub(super) const PORTS: u16 = 2;
    pub(super) const PROTOCOL_NUMBER: u16 = 1;
    pub(super) const SOURCE_PORT: u16 = 2;
    pub(super) const DESTINATION_PORT: u16 = 3;
}

/// `TCP_CONNTRACK_SYN_SENT`, `TCP_CONNTRACK_SYN_RECV` and `TCP_CONNTRACK_SYN_SENT2`.
const OPENING: [u8; 3] = [1, 2, 9];
/// `IPS_SRC_NAT` and `IPS_DST_NAT`.
const TRANSLATED: u32 = 1 << 4 | 1 << 5;
/// `nfgenmsg`
const NETFILTER_HEADER: usize = 4;

impl Flow {
    /// From a `nfgenmsg` and what follows.
    pub(super) fn read(body: &[u8]) -> Option<Self> {
        let family = *body.first()?;
        let attributes = body.get(NETFILTER_HEADER..)?;
        let original = find(attributes, attribute::ORIGINAL)?;
        let (protocol, source, destination) = tuple(family, value(original)?)?;
        let (_, from, to) = tuple(family, value(find(attributes, attribute::REPLY)?)?)?;
        let status = find(attributes, attribute::STATUS).and_then(value);
        let status = status.and_then(|bytes| array(bytes, 0)).map_or(0, u32::from_be_bytes);
        let zone = find(attributes, attribute::ZONE).unwrap_or_default();
        Some(Self {
            protocol,
            source,
            destination,
            reply: (from, to),
            is_translated: status & TRANSLATED != 0,
            is_opening: tcp_state(attributes).is_some_and(|state| OPENING.contains(&state)),
            family,
            name: [original, zone].concat(),
        })
    }

    /// Where answers to it are sent.
    pub(super) const fn answered_to(&self) -> SocketAddr {
        self.reply.1
    }

    /// What the sockets at its two ends may take to be their own address and their peer's.
    pub(super) fn ends_seen(&self) -> [(Protocol, SocketAddr, SocketAddr); 4] {
        let (from, to) = self.reply;
        [(self.source, self.destination), (self.destination, self.source), (from, to), (to, from)]
            .map(|(local, remote)| (self.protocol, local, remote))
    }
}

/// The states of sockets that wait for a peer to send first. The kernel keeps TCP listeners apart, and does not walk through all the
/// machine's connections to find them.
pub(super) const fn waiting(protocol: Protocol) -> u32 {
    match protocol {
        Protocol::Tcp => 1 << state::LISTEN,
        Protocol::Udp => 1 << state::CLOSED,
    }
}

/// The sockets of a protocol in these states, a bit for each.
pub(super) fn list_sockets(sequence: u32, of: Family, protocol: Protocol, states: u32) -> Vec<u8> {
    let question = diag(of.number(), protocol, states, &[0; 48]);
    message(SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, sequence, &question)
}

/// Ends a socket's connection.
pub(super) fn abort(sequence: u32, socket: &Inet) -> Vec<u8> {
    let question = diag(socket.family, socket.protocol, ALL_STATES, &socket.id);
    message(SOCK_DESTROY, NLM_F_REQUEST | NLM_F_ACK, sequence, &question)
}

/// All that is tracked.
pub(super) fn list_flows(sequence: u32, of: Family) -> Vec<u8> {
    message(GET_FLOWS, NLM_F_REQUEST | NLM_F_DUMP, sequence, &[of.number(), 0, 0, 0])
}

/// Forgets a tracked connection.
pub(super) fn forget(sequence: u32, flow: &Flow) -> Vec<u8> {
    message(
        DELETE_FLOW,
        NLM_F_REQUEST | NLM_F_ACK,
        sequence,
        &[&[flow.family, 0, 0, 0], flow.name.as_slice()].concat(),
    )
}

/// `inet_diag_req_v2`
fn diag(family: u8, protocol: Protocol, states: u32, id: &[u8; 48]) -> Vec<u8> {
    [[family, protocol.number(), 0, 0].as_slice(), &states.to_ne_bytes(), id].concat()
}

/// `CTA_TUPLE_*`: protocol, source and destination.
fn tuple(family: u8, attributes: &[u8]) -> Option<(Protocol, SocketAddr, SocketAddr)> {
    let of = |kind| value(find(attributes, kind)?);
    let (addresses, ports) = (of(attribute::ADDRESSES)?, of(attribute::PORTS)?);
    let protocol = match value(find(ports, attribute::PROTOCOL_NUMBER)?)?.first()? {
        6 => Protocol::Tcp,
        17 => Protocol::Udp,
        _ => return None,
    };
    let port = |kind| Some(u16::from_be_bytes(array(value(find(ports, kind)?)?, 0)?));
    // CTA_IP_V4_SRC and _DST are 1 and 2, those of IPv6 3 and 4.
    let first = if family == AF_INET6 { 3 } else { 1 };
    let end = |kind, port| Some(SocketAddr::new(address(family, value(find(addresses, kind)?)?, 0)?, port));
    let source = end(first, port(attribute::SOURCE_PORT)?)?;
    Some((protocol, source, end(first + 1, port(attribute::DESTINATION_PORT)?)?))
}

/// `CTA_PROTOINFO_TCP_STATE`.
fn tcp_state(attributes: &[u8]) -> Option<u8> {
    let tcp = value(find(value(find(attributes, attribute::PROTOCOL_STATE)?)?, attribute::TCP)?)?;
    value(find(tcp, attribute::TCP_STATE)?)?.first().copied()
}

/// The first attribute of a type, with its header and padding.
fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    let found = attributes(bytes).find(|one| one.kind() == kind)?;
    let padded = usize::from(found.length()).next_multiple_of(4);
    let bytes = found.into_inner();
    Some(bytes.get(..padded).unwrap_or(bytes))
}

/// What an attribute holds.
fn value(attribute: &[u8]) -> Option<&[u8]> {
    attribute.get(4..usize::from(u16::from_ne_bytes(array(attribute, 0)?)))
}

/// An address at an offset. An IPv4-mapped IPv6 address is read as IPv4, because its packets are IPv4.
fn address(family: u8, bytes: &[u8], at: usize) -> Option<IpAddr> {
    if family == AF_INET6 {
        let address = IpAddr::V6(Ipv6Addr::from(array::<16>(bytes, at)?));
        Some(address.to_canonical())
    } else {
        Some(IpAddr::V4(Ipv4Addr::from(array::<4>(bytes, at)?)))
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_are_read_or_passed_over(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (Inet::read(&bytes, Protocol::Tcp), Flow::read(&bytes));
        }
    }
}
