//! Policy routing for TPROXY and the `::6` address, over rtnetlink(7).
//!
//! Packets with the plan's mark are looked up in a table whose only route says that every destination is local, so
//! that they reach the proxy's socket although they are addressed to somebody else.

#![allow(clippy::wildcard_enum_match_arm, reason = "the enums matched here are the netlink library's")]

#[cfg(feature = "write")]
mod change;

use crate::socket::{Ended, NetlinkSocket, code};
use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage},
    route::{RouteAttribute, RouteMessage, RouteType},
    rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage},
};
use netlink_sys::protocols::NETLINK_ROUTE;
use nix::errno::Errno;
use redirect_core::{
    Family,
    netlink::Message,
    routing::{FoundRouting, RoutingItem},
    values::{Mark, PASSTHROUGH_V6, RouteTable},
};
use std::net::IpAddr;

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

    /// Whether it is certain that none of it was done.
    #[cfg(feature = "write")]
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
        Errno::EINTR => "; another program keeps changing it",
        Errno::ETIMEDOUT => "; the kernel does not answer",
        _ => "",
    }
}

/// A socket that talks about routing in the network namespace it was opened in.
pub struct RouteSocket {
    socket: NetlinkSocket,
}

/// The index of the loopback interface: it is the first of every network namespace; the kernel insists on that
/// (drivers/net/loopback.c).
const LOOPBACK: u32 = 1;
/// The protocol (`FRA_PROTOCOL`) of a policy rule that is about to be removed: a number that nobody has registered.
const CONDEMNED: u8 = 0x69;
/// The priority of the rule that looks into the table `main`: what comes behind it decides nothing (`ip rule`).
const MAIN_PRIORITY: u32 = 32766;
/// The table of the kernel's own addresses, which is always looked into first.
const LOCAL_TABLE: u32 = 255;

impl RouteSocket {
    /// Opens one in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn open() -> Result<Self, RouteError> {
        let socket = NetlinkSocket::open(NETLINK_ROUTE);
        let socket =
            socket.map_err(|cause| RouteError::refused("open a routing socket".to_owned(), cause))?;
        Ok(Self { socket })
    }

    /// What exists of the kinds a plan needs: policy rules for marked packets, tables that deliver everything locally,
    /// the `::6` address. No privilege is needed. What cannot be parsed is somebody else's.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn observe(&mut self) -> Result<Vec<FoundRouting>, RouteError> {
        let mut found = Vec::new();
        for family in Family::BOTH {
            let routes = self.dump(&route_request(family), "list routes", is_default_route)?;
            found.extend(routes.iter().filter_map(|dumped| local_default(family, dumped)));
            let rules = self.dump(&rule_request(family), "list policy rules", |_| true)?;
            let rules: Vec<PolicyRule<'_>> = rules.iter().filter_map(PolicyRule::read).collect();
            found.extend((0..rules.len()).filter_map(|index| marked_lookup(family, &rules, index)));
        }
        let addresses = self.dump(&address_request(), "list addresses", is_of_loopback)?;
        found.extend(addresses.iter().filter_map(passthrough_address));
        Ok(found)
    }

    /// The messages of an answer for which `concerns` is true; it sees what follows netlink's own header.
    fn dump(
        &mut self,
        request: &RouteNetlinkMessage,
        what: &str,
        concerns: fn(&[u8]) -> bool,
    ) -> Result<Vec<Dumped>, RouteError> {
        let failed = |cause| RouteError::refused(what.to_owned(), cause);
        for _ in 0..DUMP_ATTEMPTS {
            let mut dumped = Vec::new();
            let question = self.message(request, NLM_F_REQUEST | NLM_F_DUMP);
            let ended = self.socket.ask(&question.bytes, question.sequence, |message| {
                if concerns(message.payload()) {
                    dumped.extend(Dumped::read(message));
                }
                Ok::<(), Errno>(())
            });
            match ended.map_err(failed)? {
                Ended::Whole => return Ok(dumped),
                Ended::Interrupted => {}
                // A kernel without this family has nothing of it.
                Ended::Refused(answer)
                    if [Errno::EAFNOSUPPORT, Errno::EOPNOTSUPP].contains(&code(&answer)) =>
                {
                    return Ok(Vec::new());
                }
                Ended::Refused(answer) => return Err(failed(code(&answer))),
            }
        }
        Err(failed(Errno::EINTR))
    }

    fn message(&mut self, message: &RouteNetlinkMessage, flags: u16) -> Question {
        let sequence = self.socket.next_sequence();
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        header.sequence_number = sequence;
        let mut packet = NetlinkMessage::new(header, NetlinkPayload::from(message.clone()));
        packet.finalize();
        let mut bytes = vec![0; packet.buffer_len()];
        packet.serialize(&mut bytes);
        Question { bytes, sequence }
    }
}

struct Question {
    bytes: Vec<u8>,
    sequence: u32,
}

/// A message of a dump: as it came, and what it says.
struct Dumped {
    payload: Vec<u8>,
    message: RouteNetlinkMessage,
}

impl Dumped {
    fn read(message: &Message<'_>) -> Option<Self> {
        let mut header = NetlinkHeader::default();
        header.message_type = message.kind;
        let read = RouteNetlinkMessage::deserialize(&header, message.payload());
        Some(Self { payload: message.payload().to_vec(), message: read.ok()? })
    }

    fn found(&self, item: RoutingItem, flaw: Option<String>) -> FoundRouting {
        FoundRouting { item, flaw, condemned: false, message: self.payload.clone() }
    }
}

const fn address_family(family: Family) -> AddressFamily {
    match family {
        Family::V4 => AddressFamily::Inet,
        Family::V6 => AddressFamily::Inet6,
    }
}

fn route_request(family: Family) -> RouteNetlinkMessage {
    let mut request = RouteMessage::default();
    request.header.address_family = address_family(family);
    RouteNetlinkMessage::GetRoute(request)
}

fn rule_request(family: Family) -> RouteNetlinkMessage {
    let mut request = RuleMessage::default();
    request.header.family = address_family(family);
    RouteNetlinkMessage::GetRule(request)
}

fn address_request() -> RouteNetlinkMessage {
    let mut request = AddressMessage::default();
    request.header.family = AddressFamily::Inet6;
    RouteNetlinkMessage::GetAddress(request)
}

/// Whether a message about a route (`rtmsg`) is about one without a prefix. A namespace may have any number of others, which
/// are not worth parsing.
fn is_default_route(payload: &[u8]) -> bool {
    payload.get(1).is_none_or(|prefix_length| *prefix_length == 0)
}

/// Whether a message about an address (`ifaddrmsg`) is about one of the loopback interface.
fn is_of_loopback(payload: &[u8]) -> bool {
    payload.get(4..8).is_none_or(|index| index == LOOPBACK.to_ne_bytes())
}

/// A `local default dev lo` route.
fn local_default(family: Family, dumped: &Dumped) -> Option<FoundRouting> {
    let RouteNetlinkMessage::NewRoute(route) = &dumped.message else { return None };
    let by_lo = route.attributes.contains(&RouteAttribute::Oif(LOOPBACK));
    let wide =
        route.attributes.iter().find_map(|a| if let RouteAttribute::Table(n) = a { Some(*n) } else { None });
    let table = RouteTable::new(wide.unwrap_or_else(|| u32::from(route.header.table)))?;
    let local = route.header.kind == RouteType::Local && route.header.destination_prefix_length == 0;
    (local && by_lo).then(|| dumped.found(RoutingItem::Route(family, table), None))
}

fn passthrough_address(dumped: &Dumped) -> Option<FoundRouting> {
    let RouteNetlinkMessage::NewAddress(address) = &dumped.message else { return None };
    let is_it = address.header.index == LOOPBACK
        && address.attributes.contains(&AddressAttribute::Address(IpAddr::V6(PASSTHROUGH_V6)));
    is_it.then(|| dumped.found(RoutingItem::LoopbackAddress, None))
}

/// A policy rule, as far as it decides about marked packets.
struct PolicyRule<'a> {
    dumped: &'a Dumped,
    priority: u32,
    /// The mark it compares with; 0 is that of packets without one.
    mark: Option<u32>,
    /// Which bits of the mark it compares.
    mask: u32,
    table: u32,
    looks_up: bool,
    condemned: bool,
    /// What it requires besides the mark.
    conditions: Vec<&'static str>,
}

impl<'a> PolicyRule<'a> {
    fn read(dumped: &'a Dumped) -> Option<Self> {
        let RouteNetlinkMessage::NewRule(rule) = &dumped.message else { return None };
        let mut read = Self {
            dumped,
            priority: 0,
            mark: None,
            mask: u32::MAX,
            table: u32::from(rule.header.table),
            looks_up: rule.header.action == RuleAction::ToTable,
            condemned: false,
            conditions: Vec::new(),
        };
        let header = [
            (rule.header.src_len != 0, "from"),
            (rule.header.dst_len != 0, "to"),
            (rule.header.tos != 0, "tos"),
            (rule.header.flags.contains(RuleFlags::Invert), "not"),
        ];
        read.conditions.extend(header.into_iter().filter_map(|(is_there, name)| is_there.then_some(name)));
        for attribute in &rule.attributes {
            read.attribute(attribute);
        }
        Some(read)
    }

    fn attribute(&mut self, attribute: &RuleAttribute) {
        match attribute {
            RuleAttribute::Priority(value) => self.priority = *value,
            RuleAttribute::FwMark(value) => self.mark = Some(*value),
            RuleAttribute::FwMask(mask) => self.mask = *mask,
            RuleAttribute::Table(value) => self.table = *value,
            RuleAttribute::Iifname(_) => self.conditions.push("iif"),
            RuleAttribute::Oifname(_) => self.conditions.push("oif"),
            RuleAttribute::UidRange(_) => self.conditions.push("uidrange"),
            RuleAttribute::IpProtocol(_) => self.conditions.push("ipproto"),
            RuleAttribute::SourcePortRange(_) => self.conditions.push("sport"),
            RuleAttribute::DestinationPortRange(_) => self.conditions.push("dport"),
            RuleAttribute::L3MDev(set) if *set => self.conditions.push("l3mdev"),
            RuleAttribute::SuppressPrefixLen(length) if *length != u32::MAX => {
                self.conditions.push("suppress_prefixlength");
            }
            RuleAttribute::SuppressIfGroup(group) if *group != u32::MAX => {
                self.conditions.push("suppress_ifgroup");
            }
            RuleAttribute::Protocol(protocol) => self.condemned = u8::from(*protocol) == CONDEMNED,
            // An unknown attribute limits the rule in an unknown way; these are known to say nothing else.
            RuleAttribute::L3MDev(_)
            | RuleAttribute::SuppressPrefixLen(_)
            | RuleAttribute::SuppressIfGroup(_)
            | RuleAttribute::Source(_)
            | RuleAttribute::Destination(_)
            | RuleAttribute::Realm(_) => {}
            _ => self.conditions.push("an unknown condition"),
        }
    }

    /// Whether it sends packets with this mark, all of them or those of an interface, anywhere but to the kernel's table
    /// of local addresses.
    fn takes_all(&self, mark: Mark) -> bool {
        let fits = self.mark.is_none_or(|own| own & self.mask == mark.value() & self.mask);
        // Marked packets come in through some interface, or are on their way to one.
        let limits = self.conditions.iter().any(|condition| !["iif", "oif"].contains(condition));
        fits && !limits && !(self.looks_up && self.table == LOCAL_TABLE)
    }
}

/// A rule that sends packets with a mark to a table, with the reason why it does not, if there is one.
fn marked_lookup(family: Family, rules: &[PolicyRule<'_>], index: usize) -> Option<FoundRouting> {
    let rule = rules.get(index)?;
    let mark = rule.mark.and_then(Mark::new).filter(|_| rule.looks_up && rule.mask == u32::MAX)?;
    let table = RouteTable::new(rule.table)?;
    let item = RoutingItem::Rule(family, mark, table);
    let earlier = rules.get(..index)?.iter().find(|other| {
        let is_same = other.looks_up && other.table == rule.table;
        !is_same && other.takes_all(mark)
    });
    let flaw = if !rule.conditions.is_empty() {
        Some(format!("it has another condition: {}", rule.conditions.join(", ")))
    } else if rule.priority >= MAIN_PRIORITY {
        Some(format!("its priority is {}, behind the table main", rule.priority))
    } else {
        earlier.map(|other| format!("the rule of priority {} takes its packets", other.priority))
    };
    Some(FoundRouting { condemned: rule.condemned, ..rule.dumped.found(item, flaw) })
}
