//! Adding and removing what rules need.

use super::{LOOPBACK, Question, RouteError, RouteSocket, address_family};
use crate::socket::{Ended, code};
use netfilter_state::{
    route_tables::{PolicyRule, RouteTables, RuleAction},
    routing::{FoundRouting, RoutingChange, RoutingItem, TakingBack},
};
use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage, AddressScope},
    link::{LinkFlags, LinkMessage},
    route::{RouteAttribute, RouteMessage, RouteProtocol, RouteScope, RouteType},
    rule::{self, RuleAttribute, RuleMessage},
};
use nix::errno::Errno;
use redirect_core::{Family, ipnet::IpNet};
use std::net::IpAddr;

/// Message types of rtnetlink(7).
mod kind {
    pub(super) const NEW_ADDRESS: u16 = 20;
    pub(super) const NEW_ROUTE: u16 = 24;
    pub(super) const NEW_RULE: u16 = 32;
}

/// The kernel's errors for something that is there already, and for something that is gone.
const THERE: [Errno; 1] = [Errno::EEXIST];
const GONE: [Errno; 3] = [Errno::ENOENT, Errno::ESRCH, Errno::EADDRNOTAVAIL];
/// How often it is corrected what taking a change back has done.
const MOST_CORRECTIONS: usize = 2;
const ADD: u16 = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE;
const REMOVE: u16 = NLM_F_REQUEST | NLM_F_ACK;

impl RouteSocket {
    /// Adds an item; returns `false` if it was there already. A policy rule never is: one of the same priority may be there
    /// that does not work or is to go (fib_rules.c, `rule_exists`). Without a priority, the kernel gives it one of its own,
    /// before all others but the kernel's.
    pub(crate) fn add(&mut self, item: RoutingItem, priority: Option<u32>) -> Result<bool, RouteError> {
        let (message, flags) = match item {
            RoutingItem::Rule(family, mark, table) => {
                let marked = PolicyRule {
                    mark: Some((mark.value(), mark.mask())),
                    ..PolicyRule::lookup(family, 0, table.number())
                };
                (RouteNetlinkMessage::NewRule(rule(&marked, priority)), ADD)
            }
            RoutingItem::Route(family, table) => {
                let route = route_by_lo(family, None, table.number(), RouteType::Local);
                (RouteNetlinkMessage::NewRoute(route), ADD | NLM_F_EXCL)
            }
            RoutingItem::LoopbackAddress => {
                (RouteNetlinkMessage::NewAddress(passthrough_address()), ADD | NLM_F_EXCL)
            }
        };
        let question = self.message(&message, flags);
        self.order(&question, &THERE, format!("add {item}"))
    }

    /// Takes a change back, as far as the kernel holds something else than `before`. The kernel is asked afterwards, because it may have
    /// removed another than the one that was meant.
    pub(crate) fn take_back(
        &mut self,
        change: &RoutingChange,
        before: &[FoundRouting],
    ) -> Result<(), RouteError> {
        for correction in 0..=MOST_CORRECTIONS {
            let TakingBack { make, remove } = change.taking_back(&self.observe()?, before);
            // What is too much after the first time is another program's.
            if make.is_empty() && (remove.is_none() || correction > 0) {
                break;
            }
            for missing in &make {
                self.make(missing)?;
            }
            if let Some(extra) = &remove {
                self.remove(extra)?;
            }
        }
        Ok(())
    }

    /// Removes this very one; what is gone already is fine.
    pub(crate) fn remove(&mut self, found: &FoundRouting) -> Result<(), RouteError> {
        // The kernel's message about it is sent back. The types of messages come in threes: new, delete, get.
        let question = self.question(kind_of(found.item).saturating_add(1), REMOVE, &found.message);
        self.order(&question, &GONE, format!("remove {}", found.item)).map(drop)
    }

    /// Adds a policy rule, which has these words; that it exists is fine.
    pub(crate) fn add_rule(&mut self, of: &PolicyRule, words: &str) -> Result<(), RouteError> {
        let message = RouteNetlinkMessage::NewRule(rule(of, Some(of.priority)));
        self.ensure(&message, format!("add the policy rule {words}"))
    }

    /// Removes one; what is gone already is fine.
    pub(crate) fn remove_rule(&mut self, of: &PolicyRule, words: &str) -> Result<(), RouteError> {
        let message = RouteNetlinkMessage::DelRule(rule(of, Some(of.priority)));
        self.end(&message, format!("remove the policy rule {words}"))
    }

    /// Switches `lo` on.
    pub fn raise_loopback(&mut self) -> Result<(), RouteError> {
        let mut link = LinkMessage::default();
        link.header.index = LOOPBACK;
        link.header.flags = LinkFlags::Up;
        link.header.change_mask = LinkFlags::Up;
        let question = self.message(&RouteNetlinkMessage::SetLink(link), NLM_F_REQUEST | NLM_F_ACK);
        self.order(&question, &[], "switch lo on".to_owned()).map(drop)
    }

    /// Has the namespace deliver to itself what is for an address, from now on. With the address itself, the kernel would begin with that some time after
    /// its answer, if it is of IPv6 (addrconf.c, `addrconf_dad_work`).
    pub fn add_local_route(&mut self, to: IpAddr) -> Result<(), RouteError> {
        let route = route_by_lo(Family::of(&to), Some(to), RouteTables::LOCAL, RouteType::Local);
        self.ensure(&RouteNetlinkMessage::NewRoute(route), format!("add the route local {to} dev lo"))
    }

    /// Makes what a message describes; that it exists is fine.
    pub(super) fn ensure(&mut self, message: &RouteNetlinkMessage, what: String) -> Result<(), RouteError> {
        let question = self.message(message, ADD | NLM_F_EXCL);
        self.order(&question, &THERE, what).map(drop)
    }

    /// Removes what a message describes; what is gone already is fine.
    pub(super) fn end(&mut self, message: &RouteNetlinkMessage, what: String) -> Result<(), RouteError> {
        let question = self.message(message, REMOVE);
        self.order(&question, &GONE, what).map(drop)
    }

    /// Replaces this policy rule with one that is marked for removal.
    pub(crate) fn mark_for_removal(&mut self, found: &FoundRouting) -> Result<(), RouteError> {
        let marked = found.mark_for_removal();
        if marked.message == found.message {
            // A kernel whose policy rules have no protocol.
            return Ok(());
        }
        self.make(&marked)?;
        self.remove(found).map_err(|error| RouteError { may_be_done: true, ..error })
    }

    fn make(&mut self, found: &FoundRouting) -> Result<(), RouteError> {
        let question = self.question(kind_of(found.item), ADD, &found.message);
        self.order(&question, &THERE, format!("put back {}", found.item)).map(drop)
    }

    /// Has the kernel make a change; false if it refuses for one of these reasons, which are fine.
    fn order(&mut self, question: &Question, fine: &[Errno], what: String) -> Result<bool, RouteError> {
        if let Err(cause) = self.socket.send(&question.bytes) {
            return Err(RouteError::refused(what, cause));
        }
        match self.socket.answer(question.sequence, |_| Ok::<(), Errno>(())) {
            Ok(Ended::Whole | Ended::Interrupted) => Ok(true),
            Ok(Ended::Refused(answer)) if fine.contains(&code(&answer)) => Ok(false),
            Ok(Ended::Refused(answer)) => Err(RouteError::refused(what, code(&answer))),
            // It may have been made.
            Err(cause) => Err(RouteError { what, cause, may_be_done: true }),
        }
    }
}

const fn kind_of(item: RoutingItem) -> u16 {
    match item {
        RoutingItem::Rule(..) => kind::NEW_RULE,
        RoutingItem::Route(..) => kind::NEW_ROUTE,
        RoutingItem::LoopbackAddress => kind::NEW_ADDRESS,
    }
}

/// A route through `lo`, to one address or to all. The attribute names its table.
pub(super) fn route_by_lo(family: Family, to: Option<IpAddr>, table: u32, kind: RouteType) -> RouteMessage {
    let mut route = RouteMessage::default();
    route.header.address_family = address_family(family);
    route.header.protocol = RouteProtocol::Boot;
    route.header.kind = kind;
    route.header.scope = match (family, kind) {
        (Family::V4, RouteType::Local) => RouteScope::Host,
        (Family::V4, _) => RouteScope::Link,
        (Family::V6, _) => RouteScope::Universe,
    };
    route.header.destination_prefix_length = to.map_or(0, |to| IpNet::from(to).prefix_len());
    route.attributes.extend(to.map(|to| RouteAttribute::Destination(to.into())));
    route.attributes.extend([RouteAttribute::Table(table), RouteAttribute::Oif(LOOPBACK)]);
    route
}

fn passthrough_address() -> AddressMessage {
    let address = Family::PASSTHROUGH_V6.into();
    let mut message = AddressMessage::default();
    message.header.family = AddressFamily::Inet6;
    message.header.prefix_len = IpNet::from(address).prefix_len();
    message.header.index = LOOPBACK;
    message.header.scope = AddressScope::Universe;
    message.attributes = vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
    message
}

/// A rule that looks into a table. Of its conditions, those that rules of ours have: a mark, a destination, an interface.
fn rule(of: &PolicyRule, priority: Option<u32>) -> RuleMessage {
    let mut rule = RuleMessage::default();
    rule.header.family = address_family(of.family);
    rule.header.dst_len = of.to.map_or(0, |to| to.prefix_len());
    rule.header.action = rule::RuleAction::ToTable;
    let table = if let RuleAction::Lookup(table) = of.action { Some(table) } else { None };
    let (mark, mask) = of.mark.unzip();
    let attributes = [
        table.map(RuleAttribute::Table),
        priority.map(RuleAttribute::Priority),
        mark.map(RuleAttribute::FwMark),
        mask.map(RuleAttribute::FwMask),
        of.to.map(|to| RuleAttribute::Destination(to.addr())),
        of.in_interface.clone().map(RuleAttribute::Iifname),
    ];
    rule.attributes = attributes.into_iter().flatten().collect();
    rule
}
