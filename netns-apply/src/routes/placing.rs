//! How a plan's policy routing fits beside that of other programs, and what the kernel says of single packets.

use super::{
    Ended, HEADER, RouteError, RouteSocket, Stopped, address_family, code,
    links::{Links, number},
};
use crate::socket::attributes;
use netfilter_state::{
    netlink::Message,
    route_tables::{PolicyRule, Route, RouteKind, RouteTables, RuleAction},
    routing::{FoundRouting, RoutingItem},
};
use netlink_packet_core::NLM_F_REQUEST;
use netlink_packet_route::{
    RouteNetlinkMessage,
    route::{RouteAttribute, RouteMessage},
};
use nix::errno::Errno;
use packet_trace::{Interface, Packet, Sender, placement::Placement};
use redirect_core::{
    AmbientRedirect, Family, RulePlan, Tproxy, ipnet::IpNet, plan::PolicyRoutes, values::MaskedMark,
};

/// Where `rtmsg` says what kind of route it is.
const KIND: usize = 7;
/// The kinds of routes to the namespace itself (`RTN_LOCAL`, `RTN_BROADCAST`, `RTN_ANYCAST`).
const OF_THIS: [u8; 3] = [2, 3, 4];

/// `RTA_PRIORITY`, the metric of a route (`linux/rtnetlink.h`).
const METRIC: u16 = 6;

/// A plan as it fits into a network namespace, and what of its policy routing is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// Where its policy routing has to stand.
    pub placement: Placement,
    /// What was found, with what keeps it from its effect.
    pub found: Vec<FoundRouting>,
}

/// How often rules and routes are read at most that other programs keep changing.
const MOST_TRIES: u32 = 20;

impl RouteSocket {
    /// Where a plan's policy routing has to stand in the namespace, and what the kernel has of it. No privilege is needed.
    ///
    /// # Errors
    /// The kernel does not report it.
    pub fn placed(&mut self, plan: &RulePlan) -> Result<Placed, RouteError> {
        let found = self.observe()?;
        self.place(plan, found)
    }

    /// The same for what was observed.
    pub(crate) fn place(
        &mut self,
        plan: &RulePlan,
        mut found: Vec<FoundRouting>,
    ) -> Result<Placed, RouteError> {
        let has_any = found.iter().any(|one| one.item != RoutingItem::LoopbackAddress);
        if plan.policy_routes().is_none() && !has_any {
            let placement = Placement::of(plan, &RouteTables::default(), |_| None);
            return Ok(Placed { placement, found });
        }
        let links = self.links()?;
        let (placement, tables) = self.place_among(plan, &links)?;
        found.retain(|one| !is_anothers(one, plan, &tables));
        placement.judge(&mut found);
        let wanted = RoutingItem::wanted(&placement.plan);
        for one in found.iter_mut().filter(|one| !wanted.contains(&one.item)) {
            one.flaw = one.flaw.take().or_else(|| is_shared(one.item, &tables));
        }
        Ok(Placed { placement, found })
    }

    /// The place, and the rules and routes among which it is.
    fn place_among(
        &mut self,
        plan: &RulePlan,
        links: &Links,
    ) -> Result<(Placement, RouteTables), RouteError> {
        let mut tables = self.routing(links)?.tables;
        let mut placement = Placement::of(plan, &tables, |packet| self.delivers(packet, links));
        for _ in 0..MOST_TRIES {
            if placement.obstacle.is_none() && placement.flaws.is_empty() {
                break;
            }
            // The kernel answers for the moment at which it is asked; another run may have added or removed its routing since.
            let now = self.routing(links)?.tables;
            if now == tables {
                break;
            }
            tables = now;
            placement = Placement::of(plan, &tables, |packet| self.delivers(packet, links));
        }
        Ok((placement, tables))
    }

    /// Whether the kernel delivers a packet in the namespace itself; `None` if it cannot be asked.
    fn delivers(&mut self, packet: &Packet, links: &Links) -> Option<bool> {
        let question = self.message(&question(packet, links)?, NLM_F_REQUEST);
        self.socket.send(&question.bytes).ok()?;
        let mut kind = None;
        // The answer is one message, and nothing ends it.
        let read = |message: &Message<'_>| {
            kind = message.payload().get(KIND).copied();
            Err(Stopped::Enough)
        };
        match self.socket.answer(question.sequence, read) {
            Err(Stopped::Enough) | Ok(Ended::Whole | Ended::Interrupted) => {
                kind.map(|kind| OF_THIS.contains(&kind))
            }
            Ok(Ended::Refused(answer)) => match code(&answer) {
                // The answers of routes that refuse packets, and of a table without a route.
                Errno::ENETUNREACH | Errno::EHOSTUNREACH | Errno::EACCES => Some(false),
                // It has no words for that question.
                _ => None,
            },
            Err(Stopped::Failed(_)) => {
                let _ = self.reopen();
                None
            }
        }
    }
}

/// Whether a route belongs to another program, whose policy rule leads to its table: it is not as a plan makes it, or nothing else is there
/// that the rule could be for.
fn is_anothers(found: &FoundRouting, plan: &RulePlan, tables: &RouteTables) -> bool {
    let RoutingItem::Route(family, table) = found.item else { return false };
    let of_mesh: Vec<u32> = plan
        .policy_routes()
        .map(PolicyRoutes::mark)
        .into_iter()
        .chain([AmbientRedirect::ANSWER_MARK, Tproxy::default().mark().into()])
        .map(MaskedMark::value)
        .collect();
    let leads =
        |rule: &&PolicyRule| rule.family == family && rule.action == RuleAction::Lookup(table.number());
    let mut others = tables
        .rules
        .iter()
        .filter(leads)
        .filter(|rule| rule.mark.is_none_or(|(value, _)| !of_mesh.contains(&value)))
        .peekable();
    if others.peek().is_none()
        || RoutingItem::CHOSEN_TABLES.contains(&table.number()) && is_as_made(family, found)
    {
        return false;
    }
    let of_table =
        tables.routes.iter().filter(|route| route.family == family && route.table == table.number());
    !is_as_made(family, found) || of_table.count() == 1 && others.any(|rule| rule.mark.is_none())
}

/// Whether a route has the metric of one that a plan has made.
fn is_as_made(family: Family, found: &FoundRouting) -> bool {
    let metric = attributes(found.message.get(HEADER..).unwrap_or_default()).find(|one| one.kind() == METRIC);
    let metric = metric.and_then(|one| number(one.value(), 0));
    metric.unwrap_or_default() == if family == Family::V6 { 1024 } else { 0 }
}

/// Why a route does not make all of its table local: the table has others.
fn is_shared(item: RoutingItem, tables: &RouteTables) -> Option<String> {
    let RoutingItem::Route(family, table) = item else { return None };
    let is_another = |route: &&Route| {
        let is_local_default = route.kind == RouteKind::Local && route.to.prefix_len() == 0;
        route.family == family && route.table == table.number() && !is_local_default
    };
    tables.routes.iter().find(is_another).map(|route| format!("the table also has the route {route}"))
}

/// What asks for the route of a packet.
fn question(packet: &Packet, links: &Links) -> Option<RouteNetlinkMessage> {
    let mut request = RouteMessage::default();
    let bits = IpNet::from(packet.destination.ip()).prefix_len();
    request.header.address_family = address_family(packet.family());
    (request.header.destination_prefix_length, request.header.source_prefix_length) = (bits, bits);
    let sender = match (packet.sender, &packet.interface) {
        (Sender::Local { uid, .. }, _) => RouteAttribute::Uid(uid),
        (Sender::Outside, Interface::Named(name)) => RouteAttribute::Iif(links.index(name)?),
        (Sender::Outside, _) => return None,
    };
    request.attributes = vec![
        RouteAttribute::Destination(packet.destination.ip().into()),
        RouteAttribute::Source(packet.source?.into()),
        RouteAttribute::Mark(packet.mark),
        RouteAttribute::IpProto(packet.protocol.number()),
        RouteAttribute::Sport(packet.source_port.unwrap_or_default()),
        RouteAttribute::Dport(packet.destination.port()),
        sender,
    ];
    Some(RouteNetlinkMessage::GetRoute(request))
}
