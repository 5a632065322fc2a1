//! Policy routing for TPROXY and the `::6` address, over rtnetlink(7).
//!
//! Packets with the plan's mark are looked up in a table whose only route says that every destination is local, so
//! that they reach the proxy's socket although they are addressed to somebody else.

#![allow(clippy::wildcard_enum_match_arm, reason = "the enums matched here are the netlink library's")]

#[cfg(feature = "write")]
mod change;

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage},
    route::{RouteAttribute, RouteMessage, RouteType},
    rule::{RuleAction, RuleAttribute, RuleMessage},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use nix::errno::Errno;
use redirect_core::{
    Family, RulePlan, Tproxy,
    values::{Mark, PASSTHROUGH_V6, RouteTable},
};
use std::{collections::BTreeSet, io, net::IpAddr};

/// What the mesh needs, or has, besides rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Routing {
    /// `ip rule`: packets with this mark are looked up in this table.
    pub rules: BTreeSet<(Family, Mark, RouteTable)>,
    /// `local default dev lo` in this table.
    pub routes: BTreeSet<(Family, RouteTable)>,
    /// `::6/128` on the loopback interface.
    pub loopback_address: bool,
}

/// One thing to do, or to undo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteStep {
    /// Add, or remove, the policy rule.
    Rule(Family, Mark, RouteTable),
    /// Add, or remove, the local default route.
    Route(Family, RouteTable),
    /// Add, or remove, `::6/128`.
    LoopbackAddress,
}

/// Why routing could not be read or changed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}: {cause}{}", hint(.cause))]
pub struct RouteError {
    what: String,
    cause: io::Error,
}

fn hint(cause: &io::Error) -> &'static str {
    match errno(cause) {
        Some(Errno::EPERM) => "; CAP_NET_ADMIN is needed",
        Some(Errno::EOPNOTSUPP | Errno::EAFNOSUPPORT) => {
            "; the kernel lacks policy routing (CONFIG_IP_MULTIPLE_TABLES, CONFIG_IPV6_MULTIPLE_TABLES)"
        }
        Some(Errno::EACCES) => "; IPv6 is switched off (sysctl net.ipv6.conf.lo.disable_ipv6)",
        _ => "",
    }
}

/// What the kernel refused with.
fn errno(error: &io::Error) -> Option<Errno> {
    error.raw_os_error().map(Errno::from_raw)
}

impl Routing {
    /// What a plan needs.
    #[must_use]
    pub fn of(plan: &RulePlan) -> Self {
        let mut routing = Self { loopback_address: plan.loopback_address().is_some(), ..Self::default() };
        for (family, Tproxy { mark, table }) in
            plan.policy_routes().into_iter().flat_map(|p| p.families.iter().map(|family| (*family, p.tproxy)))
        {
            routing.rules.insert((family, mark, table));
            routing.routes.insert((family, table));
        }
        routing
    }

    /// The steps that add what `self` has and `other` lacks: routes before the rules that use them.
    #[must_use]
    pub fn beyond(&self, other: &Self) -> Vec<RouteStep> {
        let address =
            (self.loopback_address && !other.loopback_address).then_some(RouteStep::LoopbackAddress);
        let routes =
            self.routes.difference(&other.routes).map(|(family, table)| RouteStep::Route(*family, *table));
        let rules = self
            .rules
            .difference(&other.rules)
            .map(|(family, mark, table)| RouteStep::Rule(*family, *mark, *table));
        address.into_iter().chain(routes).chain(rules).collect()
    }
}

impl RouteStep {
    /// The family whose policy routing it concerns; the address is no routing.
    #[must_use]
    pub const fn family(self) -> Option<Family> {
        match self {
            Self::Rule(family, ..) | Self::Route(family, _) => Some(family),
            Self::LoopbackAddress => None,
        }
    }
}

impl std::fmt::Display for RouteStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Rule(family, mark, table) => {
                write!(f, "{family} policy rule: fwmark {mark} lookup {table}")
            }
            Self::Route(family, table) => write!(f, "{family} route: local default dev lo table {table}"),
            Self::LoopbackAddress => write!(f, "address {PASSTHROUGH_V6}/128 on lo"),
        }
    }
}

/// A socket that talks about routing in the network namespace it was opened in.
pub struct RouteSocket {
    socket: Socket,
}

/// The index of the loopback interface: the first of every network namespace, which the kernel insists on
/// (drivers/net/loopback.c).
const LOOPBACK: u32 = 1;
/// The kernel sends at most 32 KiB at once.
const RECEIVE_BUFFER: usize = 32 * 1024;

impl RouteSocket {
    /// Opens one in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn open() -> Result<Self, RouteError> {
        let open = || {
            let mut socket = Socket::new(NETLINK_ROUTE)?;
            socket.bind_auto()?;
            socket.connect(&SocketAddr::new(0, 0))?;
            Ok(socket)
        };
        let socket =
            open().map_err(|cause| RouteError { what: "open a routing socket".to_owned(), cause })?;
        Ok(Self { socket })
    }

    /// What of the mesh's kind there is: rules that send marked packets to a table of their own, tables that deliver
    /// everything locally, the `::6` address. Anybody may look.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn observe(&self) -> Result<Routing, RouteError> {
        let mut routing = Routing::default();
        for family in Family::BOTH {
            let routes = self.dump(route_request(family), "list routes")?;
            routing.routes.extend(routes.iter().filter_map(local_default).map(|table| (family, table)));
            let rules = self.dump(rule_request(family), "list policy rules")?;
            routing
                .rules
                .extend(rules.iter().filter_map(marked_lookup).map(|(mark, table)| (family, mark, table)));
        }
        let addresses = self.dump(address_request(), "list addresses")?;
        routing.loopback_address = addresses.iter().any(is_passthrough);
        // A rule that leads anywhere else is somebody else's.
        let routes = routing.routes.clone();
        routing.rules.retain(|(family, _, table)| routes.contains(&(*family, *table)));
        Ok(routing)
    }

    fn dump(&self, request: RouteNetlinkMessage, what: &str) -> Result<Vec<RouteNetlinkMessage>, RouteError> {
        match self.request(request, NLM_F_REQUEST | NLM_F_DUMP) {
            Ok(messages) => Ok(messages),
            // A kernel without this family has nothing of it.
            Err(error) if matches!(errno(&error), Some(Errno::EAFNOSUPPORT | Errno::EOPNOTSUPP)) => {
                Ok(Vec::new())
            }
            Err(cause) => Err(RouteError { what: what.to_owned(), cause }),
        }
    }

    /// Sends a request and collects the answers up to the end of the dump, or the acknowledgement.
    fn request(&self, message: RouteNetlinkMessage, flags: u16) -> io::Result<Vec<RouteNetlinkMessage>> {
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        header.sequence_number = 1;
        let mut packet = NetlinkMessage::new(header, NetlinkPayload::from(message));
        packet.finalize();
        let mut bytes = vec![0; packet.buffer_len()];
        packet.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;
        let mut answers = Vec::new();
        let mut bytes = Vec::with_capacity(RECEIVE_BUFFER);
        loop {
            bytes.clear();
            self.socket.recv(&mut bytes, 0)?;
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let packet =
                    NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest).map_err(io::Error::other)?;
                match packet.payload {
                    NetlinkPayload::InnerMessage(message) => answers.push(message),
                    NetlinkPayload::Done(_) => return Ok(answers),
                    NetlinkPayload::Error(error) if error.code.is_none() => return Ok(answers),
                    NetlinkPayload::Error(error) => return Err(error.to_io()),
                    _ => {}
                }
                // Messages are padded to four bytes.
                let length = (packet.header.length as usize).next_multiple_of(4).max(4).min(rest.len());
                rest = rest.get(length..).unwrap_or_default();
            }
        }
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

/// The table of a `local default dev lo` route.
fn local_default(message: &RouteNetlinkMessage) -> Option<RouteTable> {
    let RouteNetlinkMessage::NewRoute(route) = message else { return None };
    let by_lo = route.attributes.contains(&RouteAttribute::Oif(LOOPBACK));
    let wide =
        route.attributes.iter().find_map(|a| if let RouteAttribute::Table(n) = a { Some(*n) } else { None });
    let table = wide.unwrap_or_else(|| u32::from(route.header.table));
    let local = route.header.kind == RouteType::Local && route.header.destination_prefix_length == 0;
    if local && by_lo { RouteTable::new(table) } else { None }
}

fn is_passthrough(message: &RouteNetlinkMessage) -> bool {
    let RouteNetlinkMessage::NewAddress(address) = message else { return false };
    address.header.index == LOOPBACK
        && address.attributes.contains(&AddressAttribute::Address(IpAddr::V6(PASSTHROUGH_V6)))
}

/// Mark and table of a rule that looks at the whole mark and at nothing else.
fn marked_lookup(message: &RouteNetlinkMessage) -> Option<(Mark, RouteTable)> {
    let RouteNetlinkMessage::NewRule(rule) = message else { return None };
    if rule.header.action != RuleAction::ToTable || rule.header.src_len != 0 || rule.header.dst_len != 0 {
        return None;
    }
    let (mut mark, mut table) = (None, u32::from(rule.header.table));
    for attribute in &rule.attributes {
        match attribute {
            RuleAttribute::FwMark(value) => mark = Some(Mark(*value)),
            RuleAttribute::Table(value) => table = *value,
            RuleAttribute::FwMask(mask) if *mask != u32::MAX => return None,
            RuleAttribute::Iifname(_)
            | RuleAttribute::Oifname(_)
            | RuleAttribute::UidRange(_)
            | RuleAttribute::IpProtocol(_)
            | RuleAttribute::SourcePortRange(_)
            | RuleAttribute::DestinationPortRange(_) => return None,
            _ => {}
        }
    }
    Some((mark?, RouteTable::new(table)?))
}
