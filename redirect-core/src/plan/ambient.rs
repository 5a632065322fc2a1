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
/// The chains that decide about packets that arrive, and about those that the pod sends.
const NAT_PREROUTING: (Table, OurChain) = (Table::Nat, OurChain::Prerouting);
const NAT_OUTPUT: (Table, OurChain) = (Table::Nat, OurChain::Output);
/// To ztunnel's listeners.
const TO_OUTBOUND: Target = Target::Redirect(AmbientRedirect::OUTBOUND_PORT);
const TO_INBOUND: Target = Target::Redirect(AmbientRedirect::INBOUND_PORT);

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
fn hooks(table: Table, setting: Key, rules: &mut RuleListBuilder<'_>) {
    let mut group = rules.group(setting, "packets that arrive");
    group.append((table, Hook::Prerouting), [], Target::Jump(OurChain::Prerouting.into()));
    let mut group = rules.group(setting, "packets of the pod");
    group.append((table, Hook::Output), [], Target::Jump(OurChain::Output.into()));
}

/// ztunnel connects to the application with the client's address, so the application's answers must be delivered in
/// the pod: its connections are marked, and so are the answers on them, which a policy rule sends to `lo`.
fn answers(rules: &mut RuleListBuilder<'_>) {
    let mut group = rules.group(Key::Ambient, "connections that ztunnel opens to the application");
    let remember = Target::SetConnMark(AmbientRedirect::ANSWER_MARK);
    group.append((Table::Mangle, OurChain::Prerouting), [of_ztunnel()], remember);
    let mut group = rules.group(Key::Ambient, "the application's answers go to ztunnel");
    let answer = Match::ConnMark(Equality::equals(AmbientRedirect::ANSWER_MARK));
    group.append((Table::Mangle, OurChain::Output), [answer], Target::RestoreMark);
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
    /// The chain that decides about them.
    const fn place(self) -> (Table, OurChain) {
        (Table::Nat, self.chain)
    }

    /// The conditions of a rule about these connections.
    fn with<const N: usize>(self, conditions: [Match; N]) -> Vec<Match> {
        self.through.map(coming_in).into_iter().chain(conditions).collect()
    }
}

/// What comes and goes by an excluded interface is not captured.
fn excluded_interfaces(r: &AmbientRedirect, rules: &mut RuleListBuilder<'_>) {
    let mut group = rules.group(Key::AmbientExcludeInterfaces, "excluded interface");
    for interface in &r.scope().exclude_interfaces {
        group.append(NAT_PREROUTING, [coming_in(interface)], Target::Return);
        group.append(NAT_OUTPUT, [going_out(interface)], Target::Return);
    }
}

fn excluded_outbound_ports(r: &AmbientRedirect, opened: Opened<'_>, rules: &mut RuleListBuilder<'_>) {
    let mut group = rules.group(Key::AmbientOutboundExcludePorts, "excluded outbound port");
    for port in &r.scope().outbound_ports_exclude {
        for protocol in [tcp(), udp()] {
            group.append(opened.place(), opened.with([protocol, to_port(*port)]), Target::Return);
        }
    }
}

fn excluded_ranges(r: &AmbientRedirect, opened: Opened<'_>, rules: &mut RuleListBuilder<'_>) {
    for range in r.scope().outbound_exclude.iter() {
        let group = rules.group(Key::AmbientOutboundExcludeRanges, "excluded destination");
        group.scoped(scope_of(&range)).append(opened.place(), opened.with([to(range)]), Target::Return);
    }
}

/// Captured where not all destinations are: by port, whatever the destination, and by destination.
fn included(r: &AmbientRedirect, ranges: &Cidrs, opened: Opened<'_>, rules: &mut RuleListBuilder<'_>) {
    let mut group = rules.group(Key::AmbientOutboundPorts, "captured outbound, whatever the destination");
    for port in &r.scope().outbound_ports {
        group.append(opened.place(), opened.with([tcp(), to_port(*port), not_of_ztunnel()]), TO_OUTBOUND);
    }
    for range in ranges.iter() {
        let captured = opened.with([tcp(), to(range), not_of_ztunnel()]);
        let group = rules.group(Key::AmbientOutboundRanges, "captured outbound");
        group.scoped(scope_of(&range)).append(opened.place(), captured, TO_OUTBOUND);
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
                let mut group = rules.group(Key::AmbientVirtualInterfaces, purpose);
                group.append(opened.place(), opened.with([tcp()]), TO_OUTBOUND);
            }
            OutboundRanges::Only(ranges) => included(r, ranges, opened, rules),
        }
        let mut group = rules.group(Key::AmbientVirtualInterfaces, purpose);
        group.append(opened.place(), opened.with([tcp()]), Target::Return);
    }
}

/// What answers the kubelet's probes does not go to ztunnel.
fn probe_answers(r: &AmbientRedirect, rules: &mut RuleListBuilder<'_>) {
    for family in Family::BOTH {
        let group = rules.group(probe_key(family), "answers to the kubelet's probes");
        let answers = [tcp(), to(probe_source(r, family))];
        group.scoped(Scope::Only(family)).append(NAT_OUTPUT, answers, Target::Accept);
    }
}

fn inbound(r: &AmbientRedirect, rules: &mut RuleListBuilder<'_>) {
    if !r.captures_inbound() || r.scope().inbound == InboundPorts::None {
        return;
    }
    for family in Family::BOTH {
        let group = rules.group(probe_key(family), "the kubelet's probes");
        let probes = [tcp(), from(probe_source(r, family))];
        group.scoped(Scope::Only(family)).append(NAT_PREROUTING, probes, Target::Accept);
    }
    match &r.scope().inbound {
        InboundPorts::None => {}
        InboundPorts::AllExcept(ports) => {
            let mut group = rules.group(Key::AmbientInboundExcludePorts, "excluded inbound port");
            for port in ports {
                group.append(NAT_PREROUTING, [tcp(), to_port(*port)], Target::Return);
            }
            all_inbound(rules);
        }
        InboundPorts::Only(ports) => included_inbound_ports(ports, rules),
    }
}

fn all_inbound(rules: &mut RuleListBuilder<'_>) {
    let captured =
        |family| [not_to(itself(family)), tcp(), not_to_port(AmbientRedirect::TUNNEL_PORT), not_of_ztunnel()];
    let purpose = "inbound connections; tunnelled ones reach ztunnel by themselves";
    rules.group(Key::AmbientIngress, purpose).append_for_each(NAT_PREROUTING, captured, &TO_INBOUND);
}

fn included_inbound_ports(ports: &[PortRange], rules: &mut RuleListBuilder<'_>) {
    let mut group = rules.group(Key::AmbientIngress, "tunnelled connections reach ztunnel by themselves");
    group.append(NAT_PREROUTING, [tcp(), to_port(AmbientRedirect::TUNNEL_PORT)], Target::Return);
    for family in Family::BOTH {
        let mut group = rules.group(Key::AmbientInboundPorts, "captured inbound").scoped(Scope::Only(family));
        for port in ports {
            let captured = [not_to(itself(family)), tcp(), to_port(*port), not_of_ztunnel()];
            group.append(NAT_PREROUTING, captured, TO_INBOUND);
        }
    }
}

/// DNS queries go to ztunnel; conntrack zones keep its own ones apart.
fn dns(r: &AmbientRedirect, rules: &mut RuleListBuilder<'_>) {
    if !r.captures_dns() {
        return;
    }
    let setting = r.dns_key();
    hooks(Table::Raw, setting, rules);
    let to_ztunnel = Target::Redirect(DnsCapture::PORT);
    let over_udp = [not_out_by_loopback(), not_of_ztunnel(), udp(), to_port(DNS)];
    rules.group(setting, "DNS queries over UDP").append(NAT_OUTPUT, over_udp, to_ztunnel.clone());
    let over_tcp = |family| [not_to(itself(family)), tcp(), to_port(DNS), not_of_ztunnel()];
    rules.group(setting, "DNS queries over TCP").append_for_each(NAT_OUTPUT, over_tcp, &to_ztunnel);
    let mut group = rules.group(setting, "ztunnel's queries and their answers, kept apart by conntrack zone");
    group.append((Table::Raw, OurChain::Output), [udp(), to_port(DNS), of_ztunnel()], ZTUNNEL_ZONE);
    let answers = [udp(), from_port(DNS), not_of_ztunnel()];
    group.append((Table::Raw, OurChain::Prerouting), answers, ZTUNNEL_ZONE);
}

fn outbound(r: &AmbientRedirect, rules: &mut RuleListBuilder<'_>) {
    let mut group = rules.group(Key::Ambient, "the application's answers, already on their way to ztunnel");
    let answers = [tcp(), Match::Mark(Equality::equals(AmbientRedirect::ANSWER_MARK))];
    group.append(NAT_OUTPUT, answers, Target::Accept);
    let group = rules.group(Key::Ambient, "the pod calling itself by its own address");
    group.append_for_each(NAT_OUTPUT, |family| [out_by_loopback(), not_to(itself(family))], &Target::Accept);
    excluded_ranges(r, OUTBOUND, rules);
    match &r.scope().outbound {
        OutboundRanges::All => {
            let captured = |family| [tcp(), not_to(itself(family)), not_of_ztunnel()];
            let group = rules.group(Key::Ambient, "outbound connections");
            group.append_for_each(NAT_OUTPUT, captured, &TO_OUTBOUND);
        }
        OutboundRanges::Only(ranges) => {
            let group = rules.group(Key::Ambient, "the pod calling itself by its loopback address");
            group.append_for_each(NAT_OUTPUT, |family| [to(itself(family))], &Target::Return);
            included(r, ranges, OUTBOUND, rules);
        }
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
