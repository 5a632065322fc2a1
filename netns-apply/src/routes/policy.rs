//! Policy rules as the kernel lists them: in their own words, and whether they do what a plan wants of them.

use super::{Dumped, found};
use netfilter_state::{
    route_tables::{PolicyRule, RouteTables, RuleAction},
    routing::{FoundRouting, RoutingItem},
};
use netlink_packet_core::{DefaultNla, Nla};
use netlink_packet_route::{
    RouteNetlinkMessage,
    rule::{self, RuleAttribute, RuleFlags, RuleHeader, RuleMessage},
};
use redirect_core::{
    Family,
    ipnet::IpNet,
    values::{MaskedMark, RouteTable},
};

/// What the kernel says of a number that is not set.
const NOT_SET: u32 = u32::MAX;

/// A policy rule, with the kernel's message about it.
pub(super) struct DumpedRule<'a> {
    dumped: &'a Dumped<'a>,
    pub(super) rule: PolicyRule,
    /// Whether a run has marked it as its own to remove.
    pub(super) marked_for_removal: bool,
}

impl<'a> DumpedRule<'a> {
    pub(super) fn read(dumped: &'a Dumped<'a>) -> Option<Self> {
        let RouteNetlinkMessage::NewRule(message) = &dumped.message else { return None };
        let is_mark = |attribute: &RuleAttribute| matches!(attribute, RuleAttribute::Protocol(protocol) if u8::from(*protocol) == FoundRouting::REMOVAL_PROTOCOL);
        let marked_for_removal = message.attributes.iter().any(is_mark);
        Some(Self { dumped, rule: policy_rule(message)?, marked_for_removal })
    }
}

/// What a message says about a policy rule; nothing where it is of neither family, or a range cannot be read.
fn policy_rule(message: &RuleMessage) -> Option<PolicyRule> {
    let header = &message.header;
    let mut rule = PolicyRule::lookup(super::family_of(header.family)?, 0, u32::from(header.table));
    rule.not = header.flags.contains(RuleFlags::Invert);
    if header.tos != 0 {
        rule.unknown.push("tos");
    }
    rule.action = match header.action {
        rule::RuleAction::ToTable => rule.action,
        // A goto without a target leads to a rule that is not there.
        rule::RuleAction::Goto | rule::RuleAction::Nop => RuleAction::Nop,
        rule::RuleAction::Blackhole => RuleAction::Blackhole,
        rule::RuleAction::Unreachable => RuleAction::Unreachable,
        rule::RuleAction::Prohibit => RuleAction::Prohibit,
        _ => RuleAction::Other,
    };
    for attribute in &message.attributes {
        take(attribute, header, &mut rule)?;
    }
    let is_whole = |range: Option<IpNet>, length| length == 0 || range.is_some();
    (is_whole(rule.from, header.src_len) && is_whole(rule.to, header.dst_len)).then_some(rule)
}

/// Adds what an attribute says; nothing if it should be a range and cannot be read.
fn take(attribute: &RuleAttribute, header: &RuleHeader, rule: &mut PolicyRule) -> Option<()> {
    match attribute {
        RuleAttribute::Priority(value) => rule.priority = *value,
        // The kernel leaves out a mark of 0, and no mask stands for all bits.
        RuleAttribute::FwMark(value) => {
            rule.mark = Some((*value, rule.mark.map_or(u32::MAX, |(_, mask)| mask)));
        }
        RuleAttribute::FwMask(mask) => rule.mark = Some((rule.mark.unwrap_or_default().0, *mask)),
        RuleAttribute::Table(value) if header.action == rule::RuleAction::ToTable => {
            rule.action = RuleAction::Lookup(*value);
        }
        RuleAttribute::Goto(value) if header.action == rule::RuleAction::Goto => {
            rule.action = RuleAction::Goto(*value);
        }
        RuleAttribute::Source(address) => rule.from = Some(IpNet::new(*address, header.src_len).ok()?),
        RuleAttribute::Destination(address) => rule.to = Some(IpNet::new(*address, header.dst_len).ok()?),
        RuleAttribute::Iifname(name) => rule.in_interface = Some(name.clone()),
        RuleAttribute::Oifname(name) => rule.out_interface = Some(name.clone()),
        RuleAttribute::UidRange(users) => rule.users = Some((users.start, users.end)),
        RuleAttribute::IpProtocol(protocol) => rule.protocol = Some(u8::from(*protocol)),
        RuleAttribute::SourcePortRange(ports) => rule.source_ports = Some((ports.start, ports.end)),
        RuleAttribute::DestinationPortRange(ports) => rule.ports = Some((ports.start, ports.end)),
        RuleAttribute::L3MDev(true) => rule.unknown.push("l3mdev"),
        RuleAttribute::SuppressPrefixLen(length) if *length != NOT_SET => {
            rule.suppress_prefix = Some(*length);
        }
        RuleAttribute::SuppressIfGroup(group) if *group != NOT_SET => rule.unknown.push("suppress_ifgroup"),
        // An unknown attribute limits the rule in an unknown way; these are known to limit nothing.
        RuleAttribute::Table(_)
        | RuleAttribute::Goto(_)
        | RuleAttribute::L3MDev(_)
        | RuleAttribute::SuppressPrefixLen(_)
        | RuleAttribute::SuppressIfGroup(_)
        | RuleAttribute::Protocol(_)
        | RuleAttribute::Realm(_) => {}
        RuleAttribute::Other(other) if is_of_all_bits(other) => {}
        _ => rule.unknown.push("an unknown condition"),
    }
    Some(())
}

/// Whether an attribute means that a port is compared as a whole, as the kernel does of each port since Linux 6.15.
fn is_of_all_bits(attribute: &DefaultNla) -> bool {
    /// `FRA_SPORT_MASK` and `FRA_DPORT_MASK`.
    const MASKS: [u16; 2] = [28, 29];
    let mut value = [0; 2];
    let is_mask = MASKS.contains(&attribute.kind()) && attribute.value_len() == value.len();
    if is_mask {
        attribute.emit_value(&mut value);
    }
    value == [u8::MAX; 2]
}

/// A rule that sends packets with a mark to a table; with the reason why it certainly does not send all of them there, if any.
pub(super) fn marked_lookup(family: Family, dumped: &DumpedRule<'_>) -> Option<FoundRouting> {
    let DumpedRule { dumped, rule, marked_for_removal } = dumped;
    let (RuleAction::Lookup(number), Some((value, mask))) = (rule.action, rule.mark) else { return None };
    let (mark, table) = (MaskedMark::new(value, mask)?, RouteTable::new(number)?);
    let item = RoutingItem::Rule(family, mark, table);
    let limits = rule.limits();
    let flaw = if !limits.is_empty() {
        Some(format!("it has another condition: {}", limits.join(", ")))
    } else if rule.priority >= RouteTables::MAIN_PRIORITY {
        Some(format!("its priority is {}, behind the table main", rule.priority))
    } else {
        None
    };
    Some(FoundRouting { flaw, marked_for_removal: *marked_for_removal, ..found(item, dumped.payload) })
}
