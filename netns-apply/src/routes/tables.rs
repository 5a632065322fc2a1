//! All policy rules and routes of a network namespace, of any program.

use super::{
    Dumped, Extent, Links, ListRequest, RouteError, RouteSocket, Stopped, local_default,
    policy::{DumpedRule, marked_lookup},
};
use crate::socket::number_attribute;
use netfilter_state::{
    netlink::Message,
    route_tables::{PolicyRule, Route, RouteKind, RouteTables},
    routing::FoundRouting,
};
use netlink_packet_route::{
    RouteNetlinkMessage,
    route::{RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteNextHopFlags, RouteType},
};
use redirect_core::{Family, ipnet::IpNet};
use std::net::IpAddr;

/// How many bytes are read of each list: some ten thousand routes. A container with CAP_NET_ADMIN may make as many as it likes.
const MOST_BYTES: usize = 1 << 20;
/// `RTA_TABLE` (`linux/rtnetlink.h`).
const TABLE: u16 = 15;

/// All policy rules and routes, and what they are to the mesh.
pub(crate) struct Routing {
    pub(crate) tables: RouteTables,
    /// The policy rules that a run has marked as its own to remove.
    pub(crate) marked: Vec<PolicyRule>,
    /// What exists of the kinds a plan needs.
    pub(crate) found: Vec<FoundRouting>,
}

/// What packets meet beside rules.
pub(crate) struct Survey {
    pub(crate) routing: Routing,
    pub(crate) addresses: super::Addresses,
}

impl RouteSocket {
    /// All policy rules and routes of both families. No privilege is needed.
    ///
    /// # Errors
    /// The kernel does not report it.
    pub fn tables(&mut self) -> Result<RouteTables, RouteError> {
        let links = self.links()?;
        Ok(self.routing(&links)?.tables)
    }

    /// What exists of the kinds a plan needs ([`observe`](Self::observe)), all policy rules and routes, and the addresses; each list is read once.
    pub(crate) fn survey(
        &mut self,
        links: &Links,
        assigned: &[super::Assigned],
    ) -> Result<Survey, RouteError> {
        let mut routing = self.routing(links)?;
        if routing.tables.complete {
            routing.found.extend(assigned.iter().filter_map(|one| one.of_mesh.clone()));
        } else {
            routing.found = self.observe()?;
        }
        Ok(Survey { routing, addresses: links.addresses(assigned) })
    }

    /// All policy rules and routes, and what they are to the mesh: all of it if the tables are complete.
    pub(crate) fn routing(&mut self, links: &Links) -> Result<Routing, RouteError> {
        let mut tables =
            RouteTables { loopback_is_up: links.loopback_is_up(), complete: true, ..RouteTables::default() };
        let (mut marked, mut found) = (Vec::new(), Vec::new());
        for family in Family::BOTH {
            let rules = self.list(&ListRequest::rules(family), "list policy rules", |dumped| {
                let rule = DumpedRule::read(dumped)?;
                Some((marked_lookup(family, &rule), rule.marked_for_removal, rule.rule))
            })?;
            tables.complete &= rules.is_complete();
            if rules.extent == Extent::Unsupported {
                tables.rules.extend(without_policy_routing(family));
            }
            let routes = self.routes(&ListRequest::routes(family), family, links)?;
            tables.complete &= routes.is_complete();
            let is_cut = routes.extent == Extent::Part;
            for (of_mesh, route) in routes.all {
                found.extend(of_mesh);
                tables.routes.extend(route);
            }
            for (of_mesh, is_marked, rule) in rules.all {
                found.extend(of_mesh);
                marked.extend(is_marked.then(|| rule.clone()));
                tables.rules.push(rule);
            }
            if is_cut {
                // What the namespace delivers to itself would be lost among other routes.
                let routes = |socket: &mut Self, request: &ListRequest| socket.routes(request, family, links);
                let local = self.in_local_table(family, routes)?;
                tables.routes.retain(|route| route.family != family || route.table != RouteTables::LOCAL);
                tables.routes.extend(local.all.into_iter().filter_map(|(_, route)| route));
            }
        }
        Ok(Routing { tables, marked, found })
    }

    fn routes(
        &mut self,
        request: &ListRequest,
        family: Family,
        links: &Links,
    ) -> Result<ListedRoutes, RouteError> {
        self.list(request, "list routes", |dumped| match &dumped.message {
            RouteNetlinkMessage::NewRoute(message) => {
                Some((local_default(family, dumped), route(family, message, links)?))
            }
            _ => None,
        })
    }

    /// Reads a list of what is in the table `local`; before Linux 4.20 all tables are listed, whichever is asked for.
    pub(super) fn in_local_table<T>(
        &mut self,
        family: Family,
        read: impl FnOnce(&mut Self, &ListRequest) -> Result<T, RouteError>,
    ) -> Result<T, RouteError> {
        let _ = self.socket.only_what_is_asked_for(true);
        let mut request = ListRequest::routes(family);
        request.payload.extend(number_attribute(TABLE, RouteTables::LOCAL));
        let local = read(self, &request);
        let _ = self.socket.only_what_is_asked_for(false);
        local
    }

    /// What the messages of a list say.
    pub(super) fn list<T>(
        &mut self,
        request: &ListRequest,
        what: &str,
        read: impl Fn(&Dumped<'_>) -> Option<T>,
    ) -> Result<ReadList<T>, RouteError> {
        let take = |listed: &mut ReadList<T>, message: &Message<'_>| {
            listed.bytes = listed.bytes.saturating_add(message.payload().len());
            if listed.bytes > MOST_BYTES {
                return Err(Stopped::Enough);
            }
            match Dumped::read(message).as_ref().and_then(&read) {
                Some(one) => listed.all.push(one),
                None => listed.is_understood = false,
            }
            Ok(())
        };
        let (listed, extent) = self.gather(request, what, take)?;
        Ok(ReadList { extent, ..listed })
    }
}

/// What was read of a list of routes: of each what it is to the mesh, and the route, if it is in use.
type ListedRoutes = ReadList<(Option<FoundRouting>, Option<Route>)>;

/// What was read of a list.
pub(super) struct ReadList<T> {
    pub(super) all: Vec<T>,
    bytes: usize,
    /// Whether every message was.
    is_understood: bool,
    extent: Extent,
}

impl<T> Default for ReadList<T> {
    fn default() -> Self {
        Self { all: Vec::new(), bytes: 0, is_understood: true, extent: Extent::Whole }
    }
}

impl<T> ReadList<T> {
    const fn is_complete(&self) -> bool {
        self.is_understood && !matches!(self.extent, Extent::Part)
    }
}

/// What a kernel without policy routing (`CONFIG_IP_MULTIPLE_TABLES`) asks.
fn without_policy_routing(family: Family) -> Vec<PolicyRule> {
    vec![
        PolicyRule::lookup(family, 0, RouteTables::LOCAL),
        PolicyRule::lookup(family, 32766, RouteTables::MAIN),
    ]
}

/// The route in a message; `Some(None)` if it is not in use, `None` if the message has none.
#[allow(clippy::option_option, reason = "not understood, not in use, in use")]
fn route(family: Family, message: &RouteMessage, links: &Links) -> Option<Option<Route>> {
    let header = &message.header;
    // Copies that the kernel keeps of routes that packets have taken, and routes through an interface that is down.
    if header.flags.intersects(RouteFlags::Cloned | RouteFlags::Dead) {
        return Some(None);
    }
    let mut to = family.address(0);
    let mut route = Route {
        family,
        table: u32::from(header.table),
        to: IpNet::new(to, header.destination_prefix_length).ok()?,
        kind: kind(header.kind),
        interface: None,
        metric: 0,
        unknown: header.tos != 0 || header.source_prefix_length != 0,
    };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(RouteAddress::Inet(address)) => to = IpAddr::V4(*address),
            RouteAttribute::Destination(RouteAddress::Inet6(address)) => to = IpAddr::V6(*address),
            RouteAttribute::Table(table) => route.table = *table,
            RouteAttribute::Priority(metric) => route.metric = *metric,
            RouteAttribute::Oif(index) => route.interface = links.name(*index).map(str::to_owned),
            RouteAttribute::MultiPath(hops) => {
                let mut alive = hops.iter().filter(|hop| !hop.flags.contains(RouteNextHopFlags::Dead));
                match (alive.next(), alive.next()) {
                    (None, _) => return Some(None),
                    (Some(hop), None) => route.interface = links.name(hop.interface_index).map(str::to_owned),
                    (Some(_), Some(_)) => {}
                }
            }
            _ => {}
        }
    }
    route.to = IpNet::new(to, header.destination_prefix_length).ok()?;
    Some(Some(route))
}

const fn kind(kind: RouteType) -> RouteKind {
    match kind {
        RouteType::Unicast => RouteKind::Unicast,
        RouteType::Local => RouteKind::Local,
        RouteType::Broadcast => RouteKind::Broadcast,
        RouteType::Anycast => RouteKind::Anycast,
        RouteType::Multicast => RouteKind::Multicast,
        RouteType::BlackHole => RouteKind::Blackhole,
        RouteType::Unreachable => RouteKind::Unreachable,
        RouteType::Prohibit => RouteKind::Prohibit,
        RouteType::Throw => RouteKind::Throw,
        _ => RouteKind::Other,
    }
}
