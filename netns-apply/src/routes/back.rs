//! Routes by which answers to the node's probes come back to its own stack.
//!
//! Where eBPF programs forward what pods send (eBPF host routing), an answer to the probes' source address meets no rule of the node that would give
//! it the node's own address: the program asks the kernel for a route, and follows the default route, or drops the answer. A route through `lo` leads it
//! into the node's stack. No policy rule of another program precedes the table `local`, which has it. Its type is unicast: such programs follow no route
//! of the type `local`, and with one of them the kernel checks the source of each packet.

use super::{Dumped, LOOPBACK, RouteError, RouteSocket, address_family};
use netfilter_state::route_tables::RouteTables;
use netlink_packet_route::{
    RouteNetlinkMessage,
    route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType},
};
use redirect_core::{Family, ipnet::IpNet};
use std::{collections::BTreeSet, net::IpAddr};

/// Where such a route is, in the words of `ip route`.
const PLACE: &str = "dev lo table local";

/// What the table `local` has of single addresses.
#[derive(Debug, Default)]
pub(crate) struct LocalTable {
    /// The namespace's own addresses.
    pub(crate) own: BTreeSet<IpAddr>,
    /// Those that have a route back.
    pub(crate) back: BTreeSet<IpAddr>,
}

impl RouteSocket {
    /// What that table has.
    pub(crate) fn local_addresses(&mut self) -> Result<LocalTable, RouteError> {
        let mut table = LocalTable::default();
        for family in Family::BOTH {
            let listed = self.in_local_table(family, |socket, request| {
                socket.list(request, "list routes", |dumped| Some(host_route(dumped)))
            })?;
            for (to, is_own) in listed.all.into_iter().flatten() {
                if is_own { &mut table.own } else { &mut table.back }.insert(to);
            }
        }
        Ok(table)
    }

    /// Makes one; that it exists is fine.
    pub(crate) fn add_route_back(&mut self, to: IpAddr) -> Result<(), RouteError> {
        self.ensure(&RouteNetlinkMessage::NewRoute(route(to)), || format!("add the route {to} {PLACE}"))
    }

    /// Removes one; what is gone already is fine.
    pub(crate) fn remove_route_back(&mut self, to: IpAddr) -> Result<(), RouteError> {
        self.end(&RouteNetlinkMessage::DelRoute(route(to)), || format!("remove the route {to} {PLACE}"))
    }
}

/// To one address.
pub(super) fn route(to: IpAddr) -> RouteMessage {
    let family = Family::of(&to);
    let mut route = RouteMessage::default();
    route.header.address_family = address_family(family);
    // The attribute names it.
    route.header.table = RouteHeader::RT_TABLE_UNSPEC;
    route.header.protocol = RouteProtocol::Boot;
    route.header.kind = RouteType::Unicast;
    route.header.scope = match family {
        Family::V4 => RouteScope::Link,
        Family::V6 => RouteScope::Universe,
    };
    route.header.destination_prefix_length = IpNet::from(to).prefix_len();
    route.attributes = vec![
        RouteAttribute::Destination(to.into()),
        RouteAttribute::Table(RouteTables::LOCAL),
        RouteAttribute::Oif(LOOPBACK),
    ];
    route
}

/// The address of a route in this table, and whether the namespace has this address. Another one has a route back: neither the kernel nor network
/// plugins make any of that kind.
fn host_route(dumped: &Dumped<'_>) -> Option<(IpAddr, bool)> {
    let RouteNetlinkMessage::NewRoute(found) = &dumped.message else { return None };
    let to = found.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(to)) => Some(IpAddr::V4(*to)),
        RouteAttribute::Destination(RouteAddress::Inet6(to)) => Some(IpAddr::V6(*to)),
        _ => None,
    })?;
    let back = route(to);
    let is_whole = found.header.destination_prefix_length == back.header.destination_prefix_length;
    let is_in_table = found.attributes.contains(&RouteAttribute::Table(RouteTables::LOCAL));
    let is_back = found.header.kind == back.header.kind
        && back.attributes.iter().all(|attribute| found.attributes.contains(attribute));
    let is_own = found.header.kind == RouteType::Local;
    (is_whole && is_in_table && (is_own || is_back)).then_some((to, is_own))
}
