//! The rule groups of ambient mode, in the order in which the reference emits them; conditions are in the order of its native
//! rules.

use super::{DataPlane, PlannedRule, PolicyRoutes, RulePlan, builder::*, dns::DNS};
use crate::{
    ambient::AmbientRedirect,
    redirect::{DnsCapture, InboundPorts, OutboundRanges},
    rule::{Equality, Hook, Match, OurChain, Scope, Table, Target},
    settings::Key,
    values::{Cidrs, Family, InterfaceName, PortRange},
};
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use ipnet::IpNet;

/// The conntrack zone of queries between ztunnel and the real servers.
const ZTUNNEL_ZONE: Target = Target::ConntrackZone(1);

impl AmbientRedirect {
    /// The plan of this redirection.
    #[must_use]
    pub fn plan(&self) -> RulePlan {
        let families = self.families().list().to_vec();
        let policy_routes = PolicyRoutes {
            mark: AmbientRedirect::ANSWER_MARK,
            table: AmbientRedirect::ANSWER_TABLE,
            priority: Some(AmbientRedirect::ANSWER_PRIORITY),
            families: self.local_routes().collect(),
        };
        RulePlan {
            data_plane: DataPlane::Ambient,
            rules: rules(self),
            families,
            policy_routes: Some(policy_routes),
        }
    }
}

/// All rules of a redirection.
fn rules(r: &AmbientRedirect) -> Vec<PlannedRule> {
    let mut rules = RuleListBuilder::of(r.sources(), listed(r));
    let rules_ref = &mut rules;
    hooks(Table::Mangle, Key::Ambient, rules_ref);
    hooks(Table::Nat, Key::Ambient, rules_ref);
    answers(rules_ref);
    excluded_interfaces(r, rules_ref);
    virtual_interfaces(r, rules_ref);
    excluded_outbound_ports(r, OUTBOUND, rules_ref);
    probe_answers(r, rules_ref);
    inbound(r, rules_ref);
    dns(r, rules_ref);
    outbound(r, rules_ref);
    rules.into_vec()
}

/// The length of the lists of which each element is a rule.
fn listed(r: &AmbientRedirect) -> usize {
    let scope = r.scope();
    let of_outbound = scope.outbound_exclude.len().saturating_add(scope.outbound_ports_exclude.len());
    of_outbound.saturating_mul(r.virtual_interfaces().len().saturating_add(2))
}

/// The chains of a table, and the jumps to them.
fn hooks(table: Table, because: Key, rules: &mut RuleListBuilder<'_>) {
    let mut group = rules.group(because, "packets that arrive");
    group.append(table, Hook::Prerouting, [], Target::Jump(OurChain::Prerouting.into()));
    let mut group = rules.group(because, "packets of the pod");
    group.append(table, Hook::Output, [], Target::Jump(OurChain::Output.into()));
}

/// ztunnel connects to the application with the client's address, so the application's answers must be delivered in
/// the pod: its connections are marked, and so are the answers on them, which a policy rule sends to `lo`.
fn answers(rules: &mut RuleListBuilder<'_>) {
    rules.group(Key::Ambient, "connections that ztunnel opens to the application").append(
        Table::Mangle,
        OurChain::Prerouting,
        [of_ztunnel()],
        Target::SetConnMark(AmbientRedirect::ANSWER_MARK),
    );
    rules.group(Key::Ambient, "the application's answers go to ztunnel").append(
        Table::Mangle,
        OurChain::Output,
        [Match::ConnMark(Equality::equals(AmbientRedirect::ANSWER_MARK))],
        Target::RestoreMark,
    );
}

/// Where connections are outbound: the chain, and the interface by which they come; none if the pod itself opens them.
#[derive(Clone, Copy)]
struct Opened<'a> {
    chain: OurChain,
    through: Option<&'a InterfaceName>,
}

/// By the pod itself.
const OUTBOUND: Opened<'_> = Opened { chain: OurChain::Output, through: None };

impl Opened<'_> {
    /// The conditions of a rule about these connections.
    fn with<const N: usize>(self, conditions: [Match; N]) -> Vec<Match> {
        self.through.map(coming_in).into_iter().chain(conditions).collect()
    }
}

/// What comes and goes by an excluded interface is not captured.
fn excluded_interfaces(r: &AmbientRedirect, rules: &mut RuleListBuilder<'_>) {
    let mut group = rules.group(Key::AmbientExcludeInterfaces, "excluded interface");
    for interface in &r.scope().exclude_interfaces {
        group.append(Table::Nat, OurChain::Prerouting, [coming_in(interface)], Target::Return);
        group.append(Table::Nat, OurChain::Output, [going_out(interface)], Target::Return);
    }
}

fn excluded_outbound_ports(r: &AmbientRedirect, opened: Opened<'_>, rules: &mut RuleListBuilder<'_>) {
    let mut group = rules.group(Key::AmbientOutboundExcludePorts, "excluded outbound port");
    for port in &r.scope().outbound_ports_exclude {
        for protocol in [tcp(), udp()] {
            let matches = opened.with([protocol, to_port(*port)]);
            group.append_all(Table::Nat, opened.chain, matches, Target::Return);
        }
    }
}

fn excluded_ranges(r: &AmbientRedirect, opened: Opened<'_>, rules: &mut RuleListBuilder<'_>) {
    for range in Family::BOTH.into_iter().flat_map(|family| r.scope().outbound_exclude.of(family)) {
        rules
            .group(Key::AmbientOutboundExcludeRanges, "excluded destination")
            .scoped(scope_of(&range))
            .append_all(Table::Nat, opened.chain, opened.with([to(range)]), Target::Return);
    }
}

/// Captured where not all destinations are: by port, whatever the destination, and by destination.
fn included(r: &AmbientRedirect, ranges: &Cidrs, opened: Opened<'_>, rules: &mut RuleListBuilder<'_>) {
    let mut group = rules.group(Key::AmbientOutboundPorts, "captured outbound, whatever the destination");
    for port in &r.scope().outbound_ports {
        let matches = opened.with([tcp(), to_port(*port), not_of_ztunnel()]);
        group.append_all(Table::Nat, opened.chain, matches, Target::Redirect(AmbientRedirect::OUTBOUND_PORT));
    }
    for range in Family::BOTH.into_iter().flat_map(|family| ranges.of(family)) {
        let matches = opened.with([tcp(), to(range), not_of_ztunnel()]);
        rules.group(Key::AmbientOutboundRanges, "captured outbound").scoped(scope_of(&range)).append_all(
            Table::Nat,
            opened.chain,
            matches,
            Target::Redirect(AmbientRedirect::OUTBOUND_PORT),
        );
    }
}

/// What comes from inside the pod is outbound, and exclusions from that hold for inbound as well.
fn virtual_interfaces(r: &AmbientRedirect, rules: &mut RuleListBuilder<'_>) {
    for interface in r.virtual_interfaces() {
        let opened = Opened { chain: OurChain::Prerouting, through: Some(interface) };
        excluded_outbound_ports(r, opened, rules);
        excluded_ranges(r, opened, rules);
        let purpose = "outbound: it comes from inside the pod";
        match &r.scope().outbound {
            OutboundRanges::All => {
                rules.group(Key::AmbientVirtualInterfaces, purpose).append(
                    Table::Nat,
                    OurChain::Prerouting,
                    [coming_in(interface), tcp()],
                    Target::Redirect(AmbientRedirect::OUTBOUND_PORT),
                );
            }
            OutboundRanges::Only(ranges) => included(r, ranges, opened, rules),
        }
        rules.group(Key::AmbientVirtualInterfaces, purpose).append(
            Table::Nat,
            OurChain::Prerouting,
            [coming_in(interface), tcp()],
            Target::Return,
        );
    }
}

/// What answers the kubelet's probes does not go to ztunnel.
fn probe_answers(r: &AmbientRedirect, rules: &mut RuleListBuilder<'_>) {
    for family in Family::BOTH {
        rules.group(probe_key(family), "answers to the kubelet's probes").scoped(Scope::Only(family)).append(
            Table::Nat,
            OurChain::Output,
            [tcp(), to(probe_source(r, family))],
            Target::Accept,
        );
    }
}

fn inbound(r: &AmbientRedirect, rules: &mut RuleListBuilder<'_>) {
    if !r.captures_inbound() || r.scope().inbound == InboundPorts::None {
        return;
    }
    for family in Family::BOTH {
        rules.group(probe_key(family), "the kubelet's probes").scoped(Scope::Only(family)).append(
            Table::Nat,
            OurChain::Prerouting,
            [tcp(), from(probe_source(r, family))],
            Target::Accept,
        );
    }
    match &r.scope().inbound {
        InboundPorts::None => {}
        InboundPorts::AllExcept(ports) => {
            let mut group = rules.group(Key::AmbientInboundExcludePorts, "excluded inbound port");
            for port in ports {
                group.append(Table::Nat, OurChain::Prerouting, [tcp(), to_port(*port)], Target::Return);
            }
            all_inbound(rules);
        }
        InboundPorts::Only(ports) => included_inbound_ports(ports, rules),
    }
}

fn all_inbound(rules: &mut RuleListBuilder<'_>) {
    for family in Family::BOTH {
        let captured =
            [not_to(itself(family)), tcp(), not_to_port(AmbientRedirect::TUNNEL_PORT), not_of_ztunnel()];
        rules
            .group(Key::AmbientIngress, "inbound connections; tunnelled ones reach ztunnel by themselves")
            .scoped(Scope::Only(family))
            .append(
                Table::Nat,
                OurChain::Prerouting,
                captured,
                Target::Redirect(AmbientRedirect::INBOUND_PORT),
            );
    }
}

fn included_inbound_ports(ports: &[PortRange], rules: &mut RuleListBuilder<'_>) {
    rules.group(Key::AmbientIngress, "tunnelled connections reach ztunnel by themselves").append(
        Table::Nat,
        OurChain::Prerouting,
        [tcp(), to_port(AmbientRedirect::TUNNEL_PORT)],
        Target::Return,
    );
    for (family, port) in
        Family::BOTH.into_iter().flat_map(|family| ports.iter().map(move |port| (family, port)))
    {
        let captured = [not_to(itself(family)), tcp(), to_port(*port), not_of_ztunnel()];
        rules.group(Key::AmbientInboundPorts, "captured inbound").scoped(Scope::Only(family)).append(
            Table::Nat,
            OurChain::Prerouting,
            captured,
            Target::Redirect(AmbientRedirect::INBOUND_PORT),
        );
    }
}

/// DNS queries go to ztunnel; conntrack zones keep its own ones apart.
fn dns(r: &AmbientRedirect, rules: &mut RuleListBuilder<'_>) {
    if !r.captures_dns() {
        return;
    }
    let because = r.dns_key();
    hooks(Table::Raw, because, rules);
    let over_udp = [not_out_by_loopback(), not_of_ztunnel(), udp(), to_port(DNS)];
    rules.group(because, "DNS queries over UDP").append(
        Table::Nat,
        OurChain::Output,
        over_udp,
        Target::Redirect(DnsCapture::PORT),
    );
    for family in Family::BOTH {
        let over_tcp = [not_to(itself(family)), tcp(), to_port(DNS), not_of_ztunnel()];
        rules.group(because, "DNS queries over TCP").scoped(Scope::Only(family)).append(
            Table::Nat,
            OurChain::Output,
            over_tcp,
            Target::Redirect(DnsCapture::PORT),
        );
    }
    let mut group = rules.group(because, "ztunnel's queries and their answers, kept apart by conntrack zone");
    group.append(Table::Raw, OurChain::Output, [udp(), to_port(DNS), of_ztunnel()], ZTUNNEL_ZONE);
    group.append(Table::Raw, OurChain::Prerouting, [udp(), from_port(DNS), not_of_ztunnel()], ZTUNNEL_ZONE);
}

fn outbound(r: &AmbientRedirect, rules: &mut RuleListBuilder<'_>) {
    rules.group(Key::Ambient, "the application's answers, already on their way to ztunnel").append(
        Table::Nat,
        OurChain::Output,
        [tcp(), Match::Mark(Equality::equals(AmbientRedirect::ANSWER_MARK))],
        Target::Accept,
    );
    for family in Family::BOTH {
        rules
            .group(Key::Ambient, "the pod calling itself by its own address")
            .scoped(Scope::Only(family))
            .append(
                Table::Nat,
                OurChain::Output,
                [out_by_loopback(), not_to(itself(family))],
                Target::Accept,
            );
    }
    excluded_ranges(r, OUTBOUND, rules);
    match &r.scope().outbound {
        OutboundRanges::All => all_outbound(rules),
        OutboundRanges::Only(ranges) => {
            for family in Family::BOTH {
                rules
                    .group(Key::Ambient, "the pod calling itself by its loopback address")
                    .scoped(Scope::Only(family))
                    .append(Table::Nat, OurChain::Output, [to(itself(family))], Target::Return);
            }
            included(r, ranges, OUTBOUND, rules);
        }
    }
}

fn all_outbound(rules: &mut RuleListBuilder<'_>) {
    for family in Family::BOTH {
        rules.group(Key::Ambient, "outbound connections").scoped(Scope::Only(family)).append(
            Table::Nat,
            OurChain::Output,
            [tcp(), not_to(itself(family)), not_of_ztunnel()],
            Target::Redirect(AmbientRedirect::OUTBOUND_PORT),
        );
    }
}

/// The address that the node gives to the kubelet's probes.
fn probe_source(r: &AmbientRedirect, family: Family) -> IpNet {
    IpNet::from(r.probe_sources().of(family))
}

const fn probe_key(family: Family) -> Key {
    match family {
        Family::V4 => Key::AmbientProbeV4,
        Family::V6 => Key::AmbientProbeV6,
    }
}

/// The loopback address, by which the pod calls itself.
fn itself(family: Family) -> IpNet {
    IpNet::from(match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::LOCALHOST),
        Family::V6 => IpAddr::V6(Ipv6Addr::LOCALHOST),
    })
}

fn of_ztunnel() -> Match {
    Match::Mark(Equality::equals(AmbientRedirect::ZTUNNEL_MARK))
}

fn not_of_ztunnel() -> Match {
    Match::Mark(Equality::not_equals(AmbientRedirect::ZTUNNEL_MARK))
}
