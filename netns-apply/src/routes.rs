//! Policy routing for TPROXY and the `::6` address, over rtnetlink(7).
//!
//! Packets with the plan's mark are routed by a table whose only route makes every destination local, so
//! that they reach the proxy's socket although they are addressed to another program.

#![allow(clippy::wildcard_enum_match_arm, reason = "the enums matched here are the netlink library's")]

#[cfg(feature = "write")]
mod back;
#[cfg(feature = "write")]
mod change;
mod links;
mod placing;
mod policy;
mod tables;
#[cfg(feature = "write")]
mod unexamined;

use crate::socket::{self, Ended, NetlinkSocket, code};
pub(crate) use links::{Addresses, Assigned, Links};
use netfilter_state::{
    netlink::Message,
    routing::{FoundRouting, RoutingItem},
};
use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkSerializable,
};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAttribute, RouteType},
};
use netlink_sys::protocols::NETLINK_ROUTE;
use nix::errno::Errno;
pub use placing::Placed;
use policy::{DumpedRule, marked_lookup};
use redirect_core::{Family, values::RouteTable};
#[cfg(feature = "write")]
pub(crate) use tables::{Routing, Survey};

/// `RTM_GETROUTE` and `RTM_GETRULE`.
const GET_ROUTE: u16 = 26;
const GET_RULE: u16 = 34;
/// Size of `rtmsg`, and of `fib_rule_hdr`.
const HEADER: usize = 12;
/// How many times a dump is attempted if others disturb it.
const DUMP_ATTEMPTS: usize = 20;

/// Why routing could not be read or changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot {what}: {}{}", .cause.desc(), hint(*.cause))]
pub struct RouteError {
    what: String,
    cause: Errno,
    /// Whether it may have been done all the same: in part, or wholly with the kernel's answer lost.
    may_be_done: bool,
}

impl RouteError {
    /// None of it was done.
    const fn refused(what: String, cause: Errno) -> Self {
        Self { what, cause, may_be_done: false }
    }

    /// Whether certainly none of it was done.
    pub(crate) const fn says_that_nothing_was_done(&self) -> bool {
        !self.may_be_done
    }
}

fn hint(cause: Errno) -> &'static str {
    match cause {
        Errno::EPERM => "; CAP_NET_ADMIN is needed",
        Errno::EOPNOTSUPP | Errno::EAFNOSUPPORT => {
            "; the kernel lacks policy routing (CONFIG_IP_MULTIPLE_TABLES, CONFIG_IPV6_MULTIPLE_TABLES)"
        }
        Errno::EACCES => "; IPv6 is switched off (sysctl net.ipv6.conf.lo.disable_ipv6)",
        Errno::EFBIG => "; this network namespace has more of them than are read",
        Errno::EINTR => "; another program keeps changing it",
        Errno::ETIMEDOUT => "; the kernel does not answer",
        _ => "",
    }
}

/// A socket that talks about routing in the network namespace it was opened in.
pub struct RouteSocket {
    socket: NetlinkSocket,
    /// How many bytes an answer may have of what is kept of it.
    most: usize,
}

fn open_socket() -> Result<NetlinkSocket, RouteError> {
    NetlinkSocket::open(NETLINK_ROUTE)
        .map_err(|cause| RouteError::refused("open a routing socket".to_owned(), cause))
}

/// The index of the loopback interface: it is the first of every network namespace; the kernel insists on that
/// (drivers/net/loopback.c).
const LOOPBACK: u32 = 1;

impl RouteSocket {
    /// Opens one in the calling thread's network namespace, which keeps at most `most_read` bytes of each answer: a container with
    /// CAP_NET_ADMIN may add as many policy rules as it likes.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn open(most_read: usize) -> Result<Self, RouteError> {
        Ok(Self { socket: open_socket()?, most: most_read })
    }

    /// A new socket: unread parts of an answer would precede every other answer.
    fn reopen(&mut self) -> Result<(), RouteError> {
        self.socket = open_socket()?;
        Ok(())
    }

    /// What exists of the kinds a plan needs: policy rules for marked packets, tables that deliver everything locally,
    /// the `::6` address. No privilege is needed. What cannot be parsed is another program's.
    ///
    /// # Errors
    /// The kernel does not report it.
    pub fn observe(&mut self) -> Result<Vec<FoundRouting>, RouteError> {
        let mut found = Vec::new();
        for family in Family::BOTH {
            let route = |message: &Message<'_>| local_default(family, &Dumped::read(message)?);
            found.extend(self.kept(&ListRequest::routes(family), "list routes", is_default_route, route)?);
            let rule =
                |message: &Message<'_>| marked_lookup(family, &DumpedRule::read(&Dumped::read(message)?)?);
            found.extend(self.kept(&ListRequest::rules(family), "list policy rules", |_| true, rule)?);
        }
        let addresses = links::address_request(Family::V6.number());
        let address = |message: &Message<'_>| links::address(message.payload())?.of_mesh;
        found.extend(self.kept(&addresses, "list addresses", is_of_loopback, address)?);
        Ok(found)
    }

    /// What is found in the messages of an answer for which `concerns` is true; it sees what follows netlink's own header. They may have as
    /// many bytes as are kept of an answer.
    fn kept<T>(
        &mut self,
        request: &ListRequest,
        what: &str,
        concerns: fn(&[u8]) -> bool,
        find: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Result<Vec<T>, RouteError> {
        let most = self.most;
        let take = |(found, bytes): &mut (Vec<T>, usize), message: &Message<'_>| {
            if concerns(message.payload()) {
                *bytes = bytes.saturating_add(message.payload().len());
                if *bytes > most {
                    return Err(Stopped::Failed(Errno::EFBIG));
                }
                found.extend(find(message));
            }
            Ok(())
        };
        Ok(self.gather(request, what, take)?.0.0)
    }

    /// What is made of the messages of an answer, and how much was read. A list that changes concurrently is asked for again.
    fn gather<T: Default>(
        &mut self,
        request: &ListRequest,
        what: &str,
        mut read: impl FnMut(&mut T, &Message<'_>) -> Result<(), Stopped>,
    ) -> Result<(T, Extent), RouteError> {
        let failed = |cause| RouteError::refused(what.to_owned(), cause);
        for _ in 0..DUMP_ATTEMPTS {
            let mut gathered = T::default();
            let question = self.question(request.kind, NLM_F_REQUEST | NLM_F_DUMP, &request.payload);
            let ended =
                self.socket.ask(&question.bytes, question.sequence, |message| read(&mut gathered, message));
            match ended {
                Ok(Ended::Whole) => return Ok((gathered, Extent::Whole)),
                Ok(Ended::Interrupted) => {}
                // A kernel without this family has nothing of it.
                Ok(Ended::Refused(answer))
                    if [Errno::EAFNOSUPPORT, Errno::EOPNOTSUPP].contains(&code(&answer)) =>
                {
                    return Ok((T::default(), Extent::Unsupported));
                }
                Ok(Ended::Refused(answer)) => return Err(failed(code(&answer))),
                Err(Stopped::Failed(cause)) => {
                    self.reopen()?;
                    return Err(failed(cause));
                }
                Err(Stopped::Enough) => {
                    self.reopen()?;
                    return Ok((gathered, Extent::Part));
                }
            }
        }
        Err(failed(Errno::EINTR))
    }

    /// A message of this type: what follows netlink's own header is `payload`.
    fn question(&mut self, kind: u16, flags: u16, payload: &[u8]) -> Question {
        let sequence = self.socket.next_sequence();
        Question { bytes: socket::message(kind, flags, sequence, payload), sequence }
    }

    fn message(&mut self, message: &RouteNetlinkMessage, flags: u16) -> Question {
        let mut payload = vec![0; message.buffer_len()];
        message.serialize(&mut payload);
        self.question(message.message_type(), flags, &payload)
    }
}

/// How much of an answer was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// All of it.
    Whole,
    /// As much as was wanted.
    Part,
    /// The kernel does not know what was asked for.
    Unsupported,
}

/// Why an answer was not read to its end.
enum Stopped {
    /// The socket failed.
    Failed(Errno),
    /// More is not wanted.
    Enough,
}

impl From<Errno> for Stopped {
    fn from(cause: Errno) -> Self {
        Self::Failed(cause)
    }
}

struct Question {
    bytes: Vec<u8>,
    sequence: u32,
}

/// A message of a dump: as it came, and what it says.
struct Dumped<'a> {
    payload: &'a [u8],
    message: RouteNetlinkMessage,
}

impl<'a> Dumped<'a> {
    fn read(message: &Message<'a>) -> Option<Self> {
        let (mut header, payload) = (NetlinkHeader::default(), message.payload());
        header.message_type = message.kind;
        Some(Self { payload, message: RouteNetlinkMessage::deserialize(&header, payload).ok()? })
    }
}

/// What is found in a message.
fn found(item: RoutingItem, payload: &[u8]) -> FoundRouting {
    FoundRouting { item, flaw: None, marked_for_removal: false, message: payload.to_vec() }
}

const fn family_of(family: AddressFamily) -> Option<Family> {
    match family {
        AddressFamily::Inet => Some(Family::V4),
        AddressFamily::Inet6 => Some(Family::V6),
        _ => None,
    }
}

const fn address_family(family: Family) -> AddressFamily {
    match family {
        Family::V4 => AddressFamily::Inet,
        Family::V6 => AddressFamily::Inet6,
    }
}

/// What asks for a list: the type of the message, and what follows netlink's own header.
struct ListRequest {
    kind: u16,
    payload: Vec<u8>,
}

impl ListRequest {
    /// The routes of all tables.
    fn routes(family: Family) -> Self {
        Self::of(GET_ROUTE, family.number(), HEADER)
    }

    /// The policy rules.
    fn rules(family: Family) -> Self {
        Self::of(GET_RULE, family.number(), HEADER)
    }

    /// The kernel's structure of this size, which begins with the number of a family (0 for all), and is zero otherwise.
    fn of(kind: u16, family: u8, size: usize) -> Self {
        let mut payload = vec![family];
        payload.resize(size, 0);
        Self { kind, payload }
    }
}

/// Whether a message about a route (`rtmsg`) is about one without a prefix. A namespace may have any number of other routes, which
/// are not worth parsing.
fn is_default_route(payload: &[u8]) -> bool {
    payload.get(1).is_none_or(|prefix_length| *prefix_length == 0)
}

/// Whether a message about an address (`ifaddrmsg`) is about one of the loopback interface.
fn is_of_loopback(payload: &[u8]) -> bool {
    payload.get(4..8).is_none_or(|index| index == LOOPBACK.to_ne_bytes())
}

/// A `local default dev lo` route.
fn local_default(family: Family, dumped: &Dumped<'_>) -> Option<FoundRouting> {
    let RouteNetlinkMessage::NewRoute(route) = &dumped.message else { return None };
    let by_lo = route.attributes.contains(&RouteAttribute::Oif(LOOPBACK));
    let wide =
        route.attributes.iter().find_map(|a| if let RouteAttribute::Table(n) = a { Some(*n) } else { None });
    let table = RouteTable::new(wide.unwrap_or_else(|| u32::from(route.header.table)))?;
    let local = route.header.kind == RouteType::Local && route.header.destination_prefix_length == 0;
    (local && by_lo).then(|| found(RoutingItem::Route(family, table), dumped.payload))
}
