//! The traffic that a plan captures, as packets to try: some of each kind, and more of them where a rule of others names what it
//! is about.

use super::{
    Pod, Traffic,
    packet::{Act, Capture, Packet, acts},
    ruleset::{Among, Condition, Selector},
};
use crate::{
    plan::FamilyRules,
    rule::{Hook, Match, Protocol, Table},
    state::Entry,
    trace::address,
    values::{Family, PASSTHROUGH_V4, PASSTHROUGH_V6, PortRange},
};
use alloc::{string::String, vec, vec::Vec};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use ipnet::IpNet;

/// Addresses of machines far away; for documentation (RFC 5737, RFC 3849), so nobody has rules about them in particular.
const FAR_V4: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 77);
const FAR_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0x77, 0, 0, 0, 0, 0x77);
/// Ports that applications have, and one that none has.
const USUAL_PORTS: [u16; 3] = [80, 8080, 31_337];
/// Users and groups of applications.
const USUAL_OWNERS: [u32; 2] = [1000, 20_001];
const DNS: u16 = 53;
/// A port of a client.
const EPHEMERAL: u16 = 43_210;
/// How many packets of a kind are tried that no rule of others asks for.
const MOST_USUAL: usize = 32;
/// How many constants of each sort a plan's rules, or the conditions of a rule, are asked for.
const MOST_CONSTANTS: usize = 12;
/// How many of a plan's constants of each sort usual packets have.
const MOST_OF_PLAN: usize = 5;
/// How many packets are made for one rule of others.
const MOST_AIMED: usize = 3;

/// Captured traffic of one kind and family.
pub(super) struct Flow<'a> {
    pub(super) traffic: Traffic,
    /// The hook where it is captured.
    pub(super) hook: Hook,
    rules: &'a FamilyRules,
    /// Some of its packets.
    pub(super) usual: Vec<Packet>,
}

impl<'a> Flow<'a> {
    /// All kinds that a plan captures in a pod.
    pub(super) fn all(rules: &'a FamilyRules, family: Family, pod: &Pod<'_>) -> Vec<Self> {
        let constants = Constants::of_plan(rules);
        let kinds = [Traffic::Inbound, Traffic::Outbound, Traffic::ProxyToSelf, Traffic::Dns];
        let flows = kinds.into_iter().map(|traffic| {
            let hook = if traffic == Traffic::Inbound { Hook::Prerouting } else { Hook::Output };
            let flow = Self { traffic, hook, rules, usual: Vec::new() };
            let all = packets(traffic, family, pod, &constants).into_iter();
            let captured = all.filter(|packet| flow.capture(packet).is_some());
            let usual = captured.take(MOST_USUAL).collect();
            Self { usual, ..flow }
        });
        flows.filter(|flow| !flow.usual.is_empty()).collect()
    }

    /// What the plan does with a packet of this kind.
    pub(super) fn acts(&self, packet: &Packet) -> Vec<Act<'a>> {
        acts(self.rules, self.hook, packet)
    }

    /// How the plan captures a packet; `None` where it does not.
    pub(super) fn capture(&self, packet: &Packet) -> Option<(Table, Capture)> {
        self.acts(packet).iter().find_map(|act| Some((act.table, act.capture?)))
    }

    /// Packets of this kind that a rule with these conditions is about, as it sees them.
    pub(super) fn aimed(
        &self,
        conditions: &[&Condition],
        view: &dyn Fn(&Packet, Capture) -> Packet,
    ) -> Vec<Packet> {
        let constants = Constants::of_conditions(conditions);
        let mut aimed = Vec::new();
        for usual in &self.usual {
            for packet in self.variations(usual, &constants) {
                let Some((_, capture)) = self.capture(&packet) else { continue };
                let seen = view(&packet, capture);
                let met = conditions.iter().all(|condition| seen.fulfils(condition) != Some(false));
                if met && !aimed.contains(&packet) {
                    aimed.push(packet);
                }
                if aimed.len() >= MOST_AIMED {
                    return aimed;
                }
            }
        }
        aimed
    }

    /// A packet with what conditions name in the place of what it had, in all combinations.
    fn variations(&self, packet: &Packet, constants: &Constants) -> Vec<Packet> {
        let mut all = vec![packet.clone()];
        let mut vary = |change: &dyn Fn(&Packet) -> Vec<Packet>| {
            let more: Vec<Packet> = all.iter().flat_map(change).collect();
            all.extend(more);
        };
        let far = |net: &IpNet| !net.addr().is_loopback();
        match self.traffic {
            Traffic::Inbound => vary(&|packet| {
                let sources = constants.sources.iter().filter(|net| far(net)).flat_map(ends);
                sources.map(|source| Packet { source, ..packet.clone() }).collect()
            }),
            Traffic::Outbound | Traffic::Dns => vary(&|packet| {
                let destinations = constants.destinations.iter().filter(|net| far(net)).flat_map(ends);
                destinations.map(|destination| Packet { destination, ..packet.clone() }).collect()
            }),
            Traffic::ProxyToSelf => {}
        }
        if self.traffic != Traffic::Dns {
            vary(&|packet| {
                constants.ports.iter().map(|port| Packet { port: *port, ..packet.clone() }).collect()
            });
        }
        vary(&|packet| {
            let ports = constants.source_ports.iter();
            ports.map(|port| Packet { source_port: *port, ..packet.clone() }).collect()
        });
        vary(&|packet| match packet.owner {
            Some((uid, gid)) => {
                let users = constants.users.iter().map(|uid| (*uid, gid));
                let groups = constants.groups.iter().map(|gid| (uid, *gid));
                users.chain(groups).map(|owner| Packet { owner: Some(owner), ..packet.clone() }).collect()
            }
            None => Vec::new(),
        });
        let family = packet.family();
        all.retain(|one| [one.source, one.destination].iter().all(|address| Family::of(address) == family));
        all
    }
}

/// The first and last address of a range.
fn ends(net: &IpNet) -> [IpAddr; 2] {
    [net.network(), net.broadcast()]
}

/// What rules compare with.
#[derive(Default)]
struct Constants {
    sources: Vec<IpNet>,
    destinations: Vec<IpNet>,
    ports: Vec<u16>,
    source_ports: Vec<u16>,
    users: Vec<u32>,
    groups: Vec<u32>,
}

impl Constants {
    fn of_plan(rules: &FamilyRules) -> Self {
        let mut constants = Self::default();
        for (_, entries) in Table::ALL.iter().copied().flat_map(|table| rules.state().chains(table)) {
            for entry in entries {
                if let Entry::Rule(rule) = entry {
                    rule.matches.iter().for_each(|condition| constants.take(condition));
                }
            }
        }
        constants
    }

    fn of_conditions(conditions: &[&Condition]) -> Self {
        let mut constants = Self::default();
        for condition in conditions {
            match condition {
                Condition::Plain(condition) => constants.take(condition),
                Condition::SourcePorts(is) => {
                    is.value.iter().for_each(|range| take_ports(&mut constants.source_ports, *range));
                }
                Condition::Among(is) => constants.take_among(&is.value),
                Condition::Family(_)
                | Condition::Protocol(_)
                | Condition::State(_)
                | Condition::MarkBits { .. }
                | Condition::ConnMarkBits { .. }
                | Condition::IsReply(_)
                | Condition::TcpFlags { .. }
                | Condition::Local(_)
                | Condition::Unknown(_) => {}
            }
        }
        constants
    }

    /// The ends of as many ranges as there is room for.
    fn take_among(&mut self, among: &Among) {
        for values in among.values.iter().take(MOST_CONSTANTS) {
            for (selector, (first, last)) in among.selectors.iter().zip(values) {
                for value in [*first, *last] {
                    self.take_value(*selector, value);
                }
            }
        }
    }

    fn take_value(&mut self, selector: Selector, value: u128) {
        let (port, id) = (u16::try_from(value), u32::try_from(value));
        match selector {
            Selector::Source(of) => put(&mut self.sources, address(of, value).into()),
            Selector::Destination(of) => put(&mut self.destinations, address(of, value).into()),
            Selector::SourcePort => port.into_iter().for_each(|port| put(&mut self.source_ports, port)),
            Selector::DestinationPort => port.into_iter().for_each(|port| put(&mut self.ports, port)),
            Selector::User => id.into_iter().for_each(|id| put(&mut self.users, id)),
            Selector::Group => id.into_iter().for_each(|id| put(&mut self.groups, id)),
            Selector::Family
            | Selector::Protocol
            | Selector::InInterface
            | Selector::OutInterface
            | Selector::Mark
            | Selector::ConnMark
            | Selector::State
            | Selector::Direction
            | Selector::TcpFlags => {}
        }
    }

    fn take(&mut self, condition: &Match) {
        match condition {
            Match::Source(is) => put(&mut self.sources, is.value),
            Match::Destination(is) => put(&mut self.destinations, is.value),
            Match::SourcePort(is) => take_ports(&mut self.source_ports, is.value),
            Match::DestinationPort(is) => take_ports(&mut self.ports, is.value),
            Match::DestinationPorts(is) => {
                is.value.iter().for_each(|range| take_ports(&mut self.ports, *range));
            }
            Match::OwnerUid(is) => put(&mut self.users, is.value),
            Match::OwnerGid(is) => put(&mut self.groups, is.value),
            Match::InInterface(_)
            | Match::OutInterface(_)
            | Match::Protocol(_)
            | Match::TcpFlags(_)
            | Match::Tracked(_)
            | Match::Mark(_)
            | Match::ConnMark(_) => {}
        }
    }
}

/// A range's ends, and what stands beside them: the condition may be turned round.
fn take_ports(ports: &mut Vec<u16>, range: PortRange) {
    let ends = [range.first(), range.last()];
    for port in ends.into_iter().chain([range.last().wrapping_add(1), range.first().wrapping_sub(1)]) {
        put(ports, port);
    }
}

fn put<T: PartialEq>(values: &mut Vec<T>, value: T) {
    if values.len() < MOST_CONSTANTS && !values.contains(&value) {
        values.push(value);
    }
}

/// Packets of a kind that a plan with these constants may capture.
fn packets(traffic: Traffic, family: Family, pod: &Pod<'_>, constants: &Constants) -> Vec<Packet> {
    let own: Vec<IpAddr> = pod
        .addresses
        .iter()
        .copied()
        .filter(|address| Family::of(address) == family && is_the_pods(address))
        .collect();
    if own.is_empty() {
        return Vec::new();
    }
    let interfaces: Vec<String> = match pod.interfaces {
        [] => vec!["eth0".into()],
        names => names.to_vec(),
    };
    let (far, loopback, passthrough) = match family {
        Family::V4 => (IpAddr::V4(FAR_V4), IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V4(PASSTHROUGH_V4)),
        Family::V6 => (IpAddr::V6(FAR_V6), IpAddr::V6(Ipv6Addr::LOCALHOST), IpAddr::V6(PASSTHROUGH_V6)),
    };
    let [tcp, udp] = [Protocol::Tcp, Protocol::Udp].map(Protocol::number);
    let basis = |source, destination| Packet {
        source,
        destination,
        protocol: if traffic == Traffic::Dns { udp } else { tcp },
        source_port: EPHEMERAL,
        port: DNS,
        came_in: None,
        goes_out: None,
        owner: None,
        mark: Some(0),
    };
    let mut packets = Vec::new();
    match traffic {
        Traffic::Inbound => {
            for (address, interface) in pairs(&own, &interfaces) {
                packets.push(Packet { came_in: Some(interface), ..basis(far, address) });
            }
        }
        Traffic::Outbound | Traffic::Dns => {
            let named = constants.destinations.iter().filter(|net| !net.addr().is_loopback()).flat_map(ends);
            let named = named.filter(|address| Family::of(address) == family).take(MOST_OF_PLAN);
            let destinations: Vec<IpAddr> = [far].into_iter().chain(named).collect();
            let groups = constants.groups.iter().take(MOST_OF_PLAN).map(|gid| (USUAL_OWNERS[1], *gid));
            let owners: Vec<(u32, u32)> = USUAL_OWNERS.map(|id| (id, id)).into_iter().chain(groups).collect();
            for (destination, interface) in pairs(&destinations, &interfaces) {
                for (source, owner) in pairs(own.get(..1).unwrap_or_default(), &owners) {
                    let goes_out = Some(interface.clone());
                    packets.push(Packet { goes_out, owner: Some(owner), ..basis(source, destination) });
                }
            }
        }
        Traffic::ProxyToSelf => {
            let paths = own.first().map(|own| (*own, *own)).into_iter().chain([(loopback, passthrough)]);
            let users = constants.users.iter().map(|uid| (*uid, USUAL_OWNERS[1]));
            let owners: Vec<_> =
                users.chain(constants.groups.iter().map(|gid| (USUAL_OWNERS[1], *gid))).collect();
            for ((source, destination), owner) in pairs(&paths.collect::<Vec<_>>(), &owners) {
                let goes_out = Some("lo".into());
                packets.push(Packet { goes_out, owner: Some(owner), ..basis(source, destination) });
            }
        }
    }
    if traffic == Traffic::Dns {
        return packets;
    }
    let ports = USUAL_PORTS.into_iter().chain(constants.ports.iter().copied().take(MOST_OF_PLAN));
    ports.flat_map(|port| packets.iter().map(move |packet| Packet { port, ..packet.clone() })).collect()
}

fn pairs<A: Clone, B: Clone>(first: &[A], second: &[B]) -> Vec<(A, B)> {
    first.iter().flat_map(|a| second.iter().map(|b| (a.clone(), b.clone()))).collect()
}

fn is_the_pods(address: &IpAddr) -> bool {
    let link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !address.is_loopback()
        && !address.is_unspecified()
        && !link_local
        && *address != IpAddr::V6(PASSTHROUGH_V6)
}
