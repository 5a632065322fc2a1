//! Adding and removing routing.

use super::{LOOPBACK, RouteError, RouteSocket, RouteStep, address_family, errno};
use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage, AddressScope},
    route::{RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType},
    rule::{RuleAction, RuleAttribute, RuleMessage},
};
use nix::errno::Errno;
use redirect_core::{
    Family,
    values::{Mark, PASSTHROUGH_V6, RouteTable},
};
use std::net::IpAddr;

impl RouteSocket {
    /// Adds; what is there already is fine.
    pub(crate) fn add(&self, step: RouteStep) -> Result<(), RouteError> {
        let message = match step {
            RouteStep::Rule(family, mark, table) => RouteNetlinkMessage::NewRule(rule(family, mark, table)),
            RouteStep::Route(family, table) => RouteNetlinkMessage::NewRoute(route(family, table)),
            RouteStep::LoopbackAddress => RouteNetlinkMessage::NewAddress(passthrough()),
        };
        let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;
        match self.request(message, flags) {
            Err(cause) if errno(&cause) != Some(Errno::EEXIST) => {
                Err(RouteError { what: format!("add {step}"), cause })
            }
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Removes; what is gone already is fine.
    pub(crate) fn remove(&self, step: RouteStep) -> Result<(), RouteError> {
        let message = match step {
            RouteStep::Rule(family, mark, table) => RouteNetlinkMessage::DelRule(rule(family, mark, table)),
            RouteStep::Route(family, table) => RouteNetlinkMessage::DelRoute(route(family, table)),
            RouteStep::LoopbackAddress => RouteNetlinkMessage::DelAddress(passthrough()),
        };
        let gone = [Errno::ENOENT, Errno::ESRCH, Errno::EADDRNOTAVAIL].map(Some);
        match self.request(message, NLM_F_REQUEST | NLM_F_ACK) {
            Err(cause) if !gone.contains(&errno(&cause)) => {
                Err(RouteError { what: format!("remove {step}"), cause })
            }
            Ok(_) | Err(_) => Ok(()),
        }
    }
}

fn route(family: Family, table: RouteTable) -> RouteMessage {
    let mut route = RouteMessage::default();
    route.header.address_family = address_family(family);
    route.header.table = u8::try_from(table.number()).unwrap_or(RouteHeader::RT_TABLE_UNSPEC);
    route.header.protocol = RouteProtocol::Boot;
    route.header.kind = RouteType::Local;
    route.header.scope = match family {
        Family::V4 => RouteScope::Host,
        Family::V6 => RouteScope::Universe,
    };
    route.attributes = vec![RouteAttribute::Table(table.number()), RouteAttribute::Oif(LOOPBACK)];
    route
}

fn passthrough() -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = AddressFamily::Inet6;
    message.header.prefix_len = 128;
    message.header.index = LOOPBACK;
    message.header.scope = AddressScope::Universe;
    let address = IpAddr::V6(PASSTHROUGH_V6);
    message.attributes = vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
    message
}

fn rule(family: Family, mark: Mark, table: RouteTable) -> RuleMessage {
    let mut rule = RuleMessage::default();
    rule.header.family = address_family(family);
    rule.header.table = u8::try_from(table.number()).unwrap_or(RouteHeader::RT_TABLE_UNSPEC);
    rule.header.action = RuleAction::ToTable;
    rule.attributes = vec![RuleAttribute::FwMark(mark.0), RuleAttribute::Table(table.number())];
    rule
}
