//! Routes by which answers to the node's probes come back to its own stack.
//!
//! Where eBPF programs forward what pods send (eBPF host routing), an answer to the probes' source address meets no rule of the node that would give
//! it the node's own address: the program asks the kernel for a route, and follows the default route, or drops the answer. A route through `lo` leads it
//! into the node's stack. No policy rule of another program precedes the table `local`, which has it. Its type is unicast: such programs follow no route
//! of the type `local`, and with one of them the kernel checks the source of each packet.

use super::{Dumped, RouteError, RouteSocket, change::route_by_lo};
use netfilter_state::route_tables::RouteTables;
use netlink_packet_route::{
    RouteNetlinkMessage,
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteType},
};
use redirect_core::Family;
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
        self.ensure(&RouteNetlinkMessage::NewRoute(route_back(to)), format!("add the route {to} {PLACE}"))
    }

    /// Removes one; what is gone already is fine.
    pub(crate) fn remove_route_back(&mut self, to: IpAddr) -> Result<(), RouteError> {
        self.end(&RouteNetlinkMessage::DelRoute(route_back(to)), format!("remove the route {to} {PLACE}"))
    }
}

fn route_back(to: IpAddr) -> RouteMessage {
    route_by_lo(Family::of(&to), Some(to), RouteTables::LOCAL, RouteType::Unicast)
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
    let back = route_back(to);
    let is_whole = found.header.destination_prefix_length == back.header.destination_prefix_length;
    let is_in_table = found.attributes.contains(&RouteAttribute::Table(RouteTables::LOCAL));
    let is_back = found.header.kind == back.header.kind
        && back.attributes.iter().all(|attribute| found.attributes.contains(attribute));
    let is_own = found.header.kind == RouteType::Local;
    (is_whole && is_in_table && (is_own || is_back)).then_some((to, is_own))
}
