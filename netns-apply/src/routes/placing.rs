//! How a plan's policy routing fits beside that of other programs, and what the kernel says of single packets.

use super::{
    Ended, RouteError, RouteSocket, Stopped, code,
    links::{Links, number},
};
use crate::socket::attributes;
use netfilter_state::{
    netlink::Message,
    route_tables::{PolicyRule, Route, RouteKind, RouteTables, RuleAction},
    routing::{self, CHOSEN_TABLES, FoundRouting, RoutingItem},
};
use netlink_packet_core::NLM_F_REQUEST;
use nix::errno::Errno;
use packet_trace::{
    Interface, Packet, Sender,
    placement::{Placement, place},
};
use redirect_core::{Family, RulePlan, Tproxy, ambient::ANSWER_MARK, plan::PolicyRoutes, values::MaskedMark};
use std::net::IpAddr;

/// `RTM_GETROUTE`.
const GET_ROUTE: u16 = 26;
/// Size of `rtmsg`, and where it says what kind of route it is.
const HEADER: usize = 12;
const KIND: usize = 7;
/// The kinds of routes to the namespace itself (`RTN_LOCAL`, `RTN_BROADCAST`, `RTN_ANYCAST`).
const OF_THIS: [u8; 3] = [2, 3, 4];

/// What a route is asked for, and has (`linux/rtnetlink.h`).
mod attribute {
    pub(super) const DESTINATION: u16 = 1;
    pub(super) const SOURCE: u16 = 2;
    pub(super) const CAME_IN_BY: u16 = 3;
    pub(super) const METRIC: u16 = 6;
    pub(super) const MARK: u16 = 16;
    pub(super) const USER: u16 = 25;
    pub(super) const PROTOCOL: u16 = 27;
    pub(super) const SOURCE_PORT: u16 = 28;
    pub(super) const DESTINATION_PORT: u16 = 29;
}

/// A plan as it fits into a network namespace, and what of its policy routing is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// Where its policy routing has to stand.
    pub placement: Placement,
    /// What was found, with what keeps it from its effect.
    pub found: Vec<FoundRouting>,
}

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
            let placement = place(plan, &RouteTables::default(), |_| None);
            return Ok(Placed { placement, found });
        }
        let links = self.links()?;
        let tables = self.tables_with(&links)?;
        found.retain(|one| !is_anothers(one, plan, &tables));
        let placement = place(plan, &tables, |packet| self.delivers(packet, &links));
        placement.judge(&mut found);
        let wanted = routing::wanted(&placement.plan);
        for one in found.iter_mut().filter(|one| !wanted.contains(&one.item)) {
            one.flaw = one.flaw.take().or_else(|| is_shared(one.item, &tables));
        }
        Ok(Placed { placement, found })
    }

    /// Whether the kernel delivers a packet in the namespace itself; `None` if it cannot be asked.
    fn delivers(&mut self, packet: &Packet, links: &Links) -> Option<bool> {
        let question = question(packet, links)?;
        let question = self.question(GET_ROUTE, NLM_F_REQUEST, &question);
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
        .chain([ANSWER_MARK, Tproxy::default().mark().into()])
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
    if others.peek().is_none() || CHOSEN_TABLES.contains(&table.number()) && is_as_made(family, found) {
        return false;
    }
    let of_table =
        tables.routes.iter().filter(|route| route.family == family && route.table == table.number());
    !is_as_made(family, found) || of_table.count() == 1 && others.any(|rule| rule.mark.is_none())
}

/// Whether a route has the metric of one that a plan has made.
fn is_as_made(family: Family, found: &FoundRouting) -> bool {
    let attributes = found.message.get(HEADER..).map(attributes);
    let metric = attributes
        .into_iter()
        .flatten()
        .find(|one| one.kind() == attribute::METRIC)
        .and_then(|one| number(one.value(), 0));
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
fn question(packet: &Packet, links: &Links) -> Option<Vec<u8>> {
    let (to, from) = (packet.destination.ip(), packet.source?);
    let (family, bits) = match packet.family() {
        Family::V4 => (libc_family::INET, 32),
        Family::V6 => (libc_family::INET6, 128),
    };
    let mut payload = vec![0; HEADER];
    for (field, value) in payload.iter_mut().zip([family, bits, bits]) {
        *field = value;
    }
    let mut add = |kind: u16, value: &[u8]| {
        let length = u16::try_from(value.len().saturating_add(4)).unwrap_or(u16::MAX);
        payload.extend(length.to_ne_bytes());
        payload.extend(kind.to_ne_bytes());
        payload.extend(value);
        payload.resize(payload.len().next_multiple_of(4), 0);
    };
    add(attribute::DESTINATION, &bytes(to));
    add(attribute::SOURCE, &bytes(from));
    add(attribute::MARK, &packet.mark.to_ne_bytes());
    add(attribute::PROTOCOL, &[packet.protocol.number()]);
    add(attribute::SOURCE_PORT, &packet.source_port.unwrap_or_default().to_be_bytes());
    add(attribute::DESTINATION_PORT, &packet.destination.port().to_be_bytes());
    match (packet.sender, &packet.interface) {
        (Sender::Local { uid, .. }, _) => add(attribute::USER, &uid.to_ne_bytes()),
        (Sender::Outside, Interface::Named(name)) => {
            add(attribute::CAME_IN_BY, &links.index(name)?.to_ne_bytes());
        }
        (Sender::Outside, _) => return None,
    }
    Some(payload)
}

/// Numbers of address families.
mod libc_family {
    pub(super) const INET: u8 = 2;
    pub(super) const INET6: u8 = 10;
}

fn bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().into(),
        IpAddr::V6(address) => address.octets().into(),
    }
}
