//! Which packets a verdict asks about: first packets of connections, and datagrams to servers of DNS, that a plan may capture, and those that
//! it leaves alone because they are the proxy's.

use super::{Pod, Traffic, proxy_groups, proxy_users};
use crate::{
    packets::{Field, Packets, interface, loopback, number, state},
    routes::RouteEnd,
    rules::TraceRules,
    set::Set,
    walk::{Given, Lookup, routed},
};
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use redirect_core::{
    ambient::{TUNNEL_PORT, ZTUNNEL_MARK},
    plan::{DataPlane, RulePlan},
    rule::{Match, Protocol, TcpFlags},
    settings::Key,
    values::{Family, PASSTHROUGH_V4, PASSTHROUGH_V6},
};

/// The port of DNS.
const DNS: u16 = 53;

/// Traffic to walk: its name, and all packets that may belong to it.
#[derive(Clone)]
pub(super) struct Start {
    pub(super) traffic: Traffic,
    pub(super) packets: Packets,
    pub(super) given: Given,
    /// Whether the application has marked them, which takes a capability.
    pub(super) is_marked: bool,
}

impl Start {
    fn of(traffic: Traffic, packets: Packets, given: Given) -> Self {
        Self { traffic, packets, given, is_marked: false }
    }

    fn sent(traffic: Traffic, packets: Packets) -> Self {
        Self::of(traffic, packets, Given { is_local: true, asks_route: true, ..Given::default() })
    }

    /// Whether they stay in the pod.
    pub(super) fn is_within_pod(&self) -> bool {
        self.packets.get(Field::Interface).single() == Some(interface("lo"))
    }
}

/// All that is asked about; nothing of a family that the pod has no address of.
pub(super) fn starts(plan: &RulePlan, live: &TraceRules, pod: &Pod<'_>) -> Vec<Start> {
    let ends = Ends::of(live, pod);
    if ends.own.is_empty() {
        return Vec::new();
    }
    let mut starts = ends.inbound(live);
    starts.extend(ends.outbound(plan));
    starts.extend(ends.to_itself());
    starts.extend(ends.to_resolvers());
    starts.extend(ends.to_application(plan));
    let marks = live.marks_asked();
    let by_application =
        |start: &&Start| matches!(start.traffic, Traffic::Outbound | Traffic::Dns) && !marks.is_empty();
    let marked: Vec<Start> = starts
        .iter()
        .filter(by_application)
        .map(|start| {
            let packets = start.packets.with(Field::Mark, marks.clone());
            Start { packets, is_marked: true, ..start.clone() }
        })
        .collect();
    starts.extend(marked);
    starts
}

/// The ends that connections of a pod have in one family.
struct Ends {
    family: Family,
    /// The addresses of its interfaces.
    own: Vec<IpAddr>,
    /// From where it sends: those, and what has a local route alone.
    sources: Set,
    /// The addresses of other hosts.
    far: Set,
    /// What the pod delivers to itself, where that is known.
    delivered: Option<Set>,
    /// The interfaces by which it reaches others.
    links: Set,
}

impl Ends {
    fn of(live: &TraceRules, pod: &Pod<'_>) -> Self {
        let family = live.family;
        let of_family = pod.addresses.iter().filter(|address| Family::of(address) == family);
        let passthrough = Set::one(number(passthrough(family)));
        let nobody = loopback(family).or(&passthrough).or(&multicast(family));
        let own: Vec<IpAddr> =
            of_family.filter(|address| !nobody.contains(number(**address))).copied().collect();
        let all_own = Set::of(own.iter().map(|address| (number(*address), number(*address))).collect());
        let routes = live.routes.as_ref();
        let local = routes.map_or_else(Set::empty, |routes| routes.local.without(&nobody));
        let delivered = routes.map(|routes| routes.of_nobody_else.clone());
        let nobody = nobody.or(&all_own);
        let nobody = delivered.as_ref().map_or_else(|| nobody.clone(), |delivered| nobody.or(delivered));
        Self {
            family,
            own,
            sources: all_own.or(&local),
            far: nobody.complement(Field::Destination.most(family)),
            delivered,
            links: live.links.clone(),
        }
    }

    /// First packets of connections: those that another connection asked for, too.
    fn first(&self, protocol: Protocol, from: &Set, to: &Set, by: &Set) -> Packets {
        let mut packets = Packets::all(self.family);
        packets.set_one(Field::Protocol, protocol.number());
        packets.set(Field::Flags, if protocol == Protocol::Tcp { opening_flags() } else { Set::one(0) });
        packets.set(Field::State, Set::range(state::NEW, state::RELATED));
        packets.set_one(Field::Mark, 0_u32);
        packets.set_one(Field::ConnMark, 0_u32);
        packets.set(Field::Source, from.clone());
        packets.set(Field::Destination, to.clone());
        packets.set(Field::Interface, by.clone());
        packets
    }

    /// What others open, to the pod's addresses and to whatever else routing delivers here.
    fn inbound(&self, live: &TraceRules) -> Vec<Start> {
        let to = |to: &Set| self.first(Protocol::Tcp, &self.far, to, &self.links);
        let of_address = |address: &IpAddr| {
            let given = Given { own: Some(*address), ..Given::default() };
            Start::of(Traffic::Inbound, to(&one(*address)), given)
        };
        // Broadcast and anycast addresses, which TCP does not use, are delivered as well.
        let routes = live.routes.as_ref();
        let others = routes
            .map_or_else(Set::empty, |routes| self.far.or(&routes.local).without(&self.never_inbound()));
        let delivered = routed(live, to(&others), Lookup::Arrives).into_iter();
        let delivered = delivered.filter(|way| way.end == RouteEnd::Local && way.is_certain);
        let delivered = delivered.map(|way| Start::of(Traffic::Inbound, way.packets, Given::default()));
        self.own.iter().map(of_address).chain(delivered).collect()
    }

    /// The pod's addresses, each of which is asked about, and those that nothing comes to from outside.
    fn never_inbound(&self) -> Set {
        let own = Set::of(self.own.iter().map(|address| (number(*address), number(*address))).collect());
        own.or(&loopback(self.family)).or(&one(passthrough(self.family)))
    }

    /// What the pod sends to others; in ambient mode the proxy marks what is its own.
    fn outbound(&self, plan: &RulePlan) -> [Start; 2] {
        let marks = match plan.data_plane() {
            DataPlane::Sidecar => Set::one(0),
            DataPlane::Ambient => Set::one(0).or(&Set::one(ZTUNNEL_MARK.value().into())),
        };
        let sent = |protocol| {
            self.first(protocol, &self.sources, &self.far, &self.links).with(Field::Mark, marks.clone())
        };
        [
            Start::sent(Traffic::Outbound, sent(Protocol::Tcp)),
            Start::sent(Traffic::Dns, sent(Protocol::Udp).with(Field::Port, Set::one(DNS.into()))),
        ]
    }

    /// What the pod sends to itself, which the plan captures if it is the proxy's.
    fn to_itself(&self) -> Vec<Start> {
        let within = |from: &Set, to: &Set| {
            Start::sent(Traffic::ProxyToSelf, self.first(Protocol::Tcp, from, to, &lo()))
        };
        let own = self.own.iter().map(|address| within(&one(*address), &one(*address)));
        let to_passthrough = self.delivered_of(&one(passthrough(self.family)));
        own.chain(to_passthrough.map(|to| within(&one(localhost(self.family)), &to))).collect()
    }

    /// Queries to a resolver in the pod, such as one at 127.0.0.53. What goes elsewhere over TCP is asked about as all else.
    fn to_resolvers(&self) -> Vec<Start> {
        let query = |protocol: Protocol, from: IpAddr, to: &Set| {
            let packets = self.first(protocol, &one(from), to, &lo());
            Start::sent(Traffic::Dns, packets.with(Field::Port, Set::one(DNS.into())))
        };
        let mut starts = Vec::new();
        if let Some(to) = self.delivered_of(&loopback(self.family)) {
            starts.extend([Protocol::Tcp, Protocol::Udp].map(|one| query(one, localhost(self.family), &to)));
        }
        let own = self.own.iter().filter_map(|address| Some((*address, self.delivered_of(&one(*address))?)));
        starts.extend(own.map(|(from, to)| query(Protocol::Udp, from, &to)));
        starts
    }

    /// The proxy's connections to the application: from the address that is kept for that or, where the plan marks packets, in the
    /// name of the client.
    fn to_application(&self, plan: &RulePlan) -> Vec<Start> {
        let (from, mark) = match (plan.policy_routes(), plan.data_plane()) {
            (None, _) => (one(passthrough(self.family)), 0),
            (Some(routes), DataPlane::Sidecar) => (self.far.clone(), routes.mark().value()),
            (Some(_), DataPlane::Ambient) => (self.far.clone(), ZTUNNEL_MARK.value()),
        };
        let names_client = plan.policy_routes().is_some();
        // The proxy's own ports are no application's.
        let ports = exempt_ports(plan).complement(u16::MAX.into());
        let to = |address: &IpAddr| {
            let packets = self.first(Protocol::Tcp, &from, &one(*address), &lo());
            let packets = packets.with(Field::Mark, Set::one(mark.into()));
            let packets = packets.with(Field::User, ids(proxy_users(plan))).with(Field::Port, ports.clone());
            let mut start =
                Start::sent(Traffic::ToApplication, packets.with(Field::Group, ids(proxy_groups(plan))));
            start.given.names_client = names_client;
            start
        };
        self.own.iter().map(to).collect()
    }

    /// Those that the pod delivers to itself, as far as that is known.
    fn delivered_of(&self, to: &Set) -> Option<Set> {
        let delivered = self.delivered.as_ref().map_or_else(|| to.clone(), |delivered| to.and(delivered));
        (!delivered.is_empty()).then_some(delivered)
    }
}

/// The ports to which a plan leaves connections from outside alone: those that it names, the proxy's own among them.
pub(super) fn exempt_ports(plan: &RulePlan) -> Set {
    let is_exempt = |because: Key| matches!(because, Key::InboundExcludePorts | Key::InboundTunnelPort);
    let exempt = plan.planned_rules().iter().filter(|planned| is_exempt(planned.because()));
    let ports = exempt.flat_map(|planned| &planned.rule().matches).filter_map(|condition| match condition {
        Match::DestinationPort(is) if !is.not => Some((is.value.first().into(), is.value.last().into())),
        _ => None,
    });
    let tunnel = u128::from(TUNNEL_PORT.number());
    let of_ztunnel = (plan.data_plane() == DataPlane::Ambient).then_some((tunnel, tunnel));
    Set::of(ports.chain(of_ztunnel).collect())
}

/// These users or groups; any, if none is named.
fn ids(named: impl Iterator<Item = u32>) -> Set {
    match Set::of(named.map(|id| (id.into(), id.into())).collect()) {
        none if none.is_empty() => Set::range(0, u32::MAX.into()),
        some => some,
    }
}

fn one(address: IpAddr) -> Set {
    Set::one(number(address))
}

fn lo() -> Set {
    Set::one(interface("lo"))
}

const fn passthrough(family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(PASSTHROUGH_V4),
        Family::V6 => IpAddr::V6(PASSTHROUGH_V6),
    }
}

const fn localhost(family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::LOCALHOST),
        Family::V6 => IpAddr::V6(Ipv6Addr::LOCALHOST),
    }
}

/// The sets of flags of a segment that opens a connection: a sender that offers ECN sets two more, and data one.
fn opening_flags() -> Set {
    let opens = (0..=u8::MAX).filter(|flags| TcpFlags::OPENING.covers(*flags));
    Set::of(opens.map(|flags| (flags.into(), flags.into())).collect())
}

/// Addresses of many hosts, and of none.
pub(crate) fn multicast(family: Family) -> Set {
    match family {
        // 0.0.0.0, 224.0.0.0/4 and beyond.
        Family::V4 => Set::of([(0, 0), (0xe000_0000, 0xffff_ffff)].into()),
        // ::, ff00::/8.
        Family::V6 => Set::of([(0, 0), (0xff << 120, u128::MAX)].into()),
    }
}
