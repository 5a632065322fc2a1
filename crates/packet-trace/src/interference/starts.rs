//! Which packets a verdict asks about: first packets of connections, and datagrams to servers of DNS, that a plan may capture, and those that
//! it leaves alone because they are the proxy's.

use super::{PodTraffic, Traffic};
use crate::{
    conditions::of_flags,
    packets::{LO, Packets, VariedField, localhost, loopback, number, state},
    routes::RouteEnd,
    rules::TraceRules,
    set::RangeSet,
    walk::{MOST_MARKS, RouteLookup, WalkInput, routed},
};
use redirect_core::{
    AmbientRedirect,
    plan::{DataPlane, RulePlan},
    rule::{Match, Protocol, TcpFlags},
    settings::Key,
    values::{Family, is_routable},
};
use std::net::IpAddr;

/// The port of DNS.
const DNS: u16 = 53;

/// Traffic to walk: its name, and all packets that may belong to it.
#[derive(Clone)]
pub(super) struct Start {
    pub(super) traffic: Traffic,
    pub(super) packets: Packets,
    pub(super) given: WalkInput,
    /// The marks among theirs that the application has set, which takes a capability.
    pub(super) marked: RangeSet,
}

impl Start {
    fn of(traffic: Traffic, packets: Packets, given: WalkInput) -> Self {
        Self { traffic, packets, given, marked: RangeSet::empty() }
    }

    fn sent(traffic: Traffic, packets: Packets) -> Self {
        Self::of(traffic, packets, WalkInput { is_local: true, asks_route: true, ..WalkInput::default() })
    }

    /// Whether they stay in the pod.
    pub(super) fn is_within_pod(&self) -> bool {
        self.packets.get(VariedField::Interface).single() == Some(LO)
    }
}

/// All that is asked about; nothing of a family that the pod has no address of.
pub(super) fn starts(plan: &RulePlan, live: &TraceRules, pod: &PodTraffic<'_>) -> Vec<Start> {
    let ends = Ends::of(live, pod);
    let mut starts = ends.inbound(live);
    starts.extend(ends.outbound(plan));
    starts.extend(ends.within_pod());
    starts.extend(ends.to_application(plan));
    let marks = live.marks_asked();
    let all_marks = marks.or(&RangeSet::one(0));
    // Few marks go with the rest; in ambient mode a mark says who sends a packet.
    let are_few = plan.data_plane() == DataPlane::Sidecar && all_marks.few(MOST_MARKS).is_some();
    let is_by_application = |start: &&mut Start| matches!(start.traffic, Traffic::Outbound | Traffic::Dns);
    let mut apart = Vec::new();
    for start in starts.iter_mut().filter(is_by_application) {
        if are_few {
            start.packets.set(VariedField::Mark, all_marks.clone());
            start.marked = marks.clone();
        } else {
            let packets = start.packets.with(VariedField::Mark, marks.clone());
            apart.push(Start { packets, marked: marks.clone(), ..start.clone() });
        }
    }
    starts.extend(apart);
    let is_any = |start: &Start| VariedField::ALL.iter().all(|field| !start.packets.get(*field).is_empty());
    starts.retain(|start| !ends.own.is_empty() && is_any(start));
    starts
}

/// The ends that connections of a pod have in one family.
struct Ends {
    family: Family,
    /// The addresses of its interfaces.
    own: Vec<IpAddr>,
    /// Those that have a local route alone.
    others: RangeSet,
    /// The addresses of other hosts.
    far: RangeSet,
    /// What the pod delivers to itself; all, where that is not known.
    delivered: RangeSet,
    /// The interfaces by which it reaches others.
    links: RangeSet,
    /// First packets of connections, those that another connection asked for among them: a sender that offers ECN sets two more flags,
    /// and data one.
    opening: Packets,
    /// Likewise first datagrams.
    datagrams: Packets,
}

impl Ends {
    fn of(live: &TraceRules, pod: &PodTraffic<'_>) -> Self {
        let family = live.family;
        let most = VariedField::Destination.most(family);
        let nobody = loopback(family).or(&one(family.passthrough())).or(&multicast(family));
        let routes = live.routes.as_ref();
        // A link-local address has no route while the kernel looks for another host that has it.
        let is_used = |at: &IpAddr| {
            is_routable(at) || routes.is_none_or(|routes| routes.of_nobody_else.contains(number(*at)))
        };
        let is_own = |at: &&IpAddr| Family::of(at) == family && !nobody.contains(number(**at)) && is_used(at);
        let own: Vec<IpAddr> = pod.addresses.iter().filter(is_own).copied().collect();
        let nobody = nobody.or(&all(&own));
        let first = |protocol: Protocol, flags: RangeSet| {
            let mut packets = Packets::all(family);
            packets.set_one(VariedField::Protocol, protocol.number());
            packets.set(VariedField::Flags, flags);
            packets.set(VariedField::State, RangeSet::range(state::NEW, state::RELATED));
            packets.set_one(VariedField::Mark, 0_u32);
            packets.set_one(VariedField::ConnMark, 0_u32);
            packets
        };
        Self {
            family,
            own,
            others: routes.map_or_else(RangeSet::empty, |routes| routes.local.without(&nobody)),
            far: routes
                .map_or_else(|| nobody.clone(), |routes| nobody.or(&routes.of_nobody_else))
                .complement(most),
            delivered: routes
                .map_or_else(|| RangeSet::range(0, most), |routes| routes.of_nobody_else.clone()),
            links: live.links.clone(),
            opening: first(Protocol::Tcp, of_flags(|flags| TcpFlags::OPENING.covers(flags))),
            datagrams: first(Protocol::Udp, RangeSet::one(0)),
        }
    }

    /// First packets between these ends.
    fn first(&self, protocol: Protocol, from: &RangeSet, to: &RangeSet, by: &RangeSet) -> Packets {
        let mut packets = match protocol {
            Protocol::Tcp => self.opening.clone(),
            Protocol::Udp => self.datagrams.clone(),
        };
        packets.set(VariedField::Source, from.clone());
        packets.set(VariedField::Destination, to.clone());
        packets.set(VariedField::Interface, by.clone());
        packets
    }

    fn query(&self, protocol: Protocol, from: &RangeSet, to: &RangeSet, by: &RangeSet) -> Start {
        let packets = self.first(protocol, from, to, by);
        Start::sent(Traffic::Dns, packets.with(VariedField::Port, RangeSet::one(DNS.into())))
    }

    /// What others open, to the pod's addresses and to whatever else routing delivers here: not to broadcast and anycast addresses,
    /// which TCP does not use.
    fn inbound(&self, live: &TraceRules) -> Vec<Start> {
        let to = |to: &RangeSet| self.first(Protocol::Tcp, &self.far, to, &self.links);
        let own = self.own.iter().map(|at| (to(&one(*at)), Some(*at)));
        let ways = routed(live, to(&self.far.or(&self.others)), RouteLookup::Arrives).into_iter();
        let delivered = ways.filter(|way| way.end == RouteEnd::Local && way.is_certain);
        let all = own.chain(delivered.map(|way| (way.packets, None)));
        all.map(|(packets, own)| {
            Start::of(Traffic::Inbound, packets, WalkInput { own, ..WalkInput::default() })
        })
        .collect()
    }

    /// What the pod sends to others; in ambient mode the proxy marks what is its own.
    fn outbound(&self, plan: &RulePlan) -> [Start; 2] {
        let from = all(&self.own).or(&self.others);
        let sent = Start::sent(Traffic::Outbound, self.first(Protocol::Tcp, &from, &self.far, &self.links));
        let mut starts = [sent, self.query(Protocol::Udp, &from, &self.far, &self.links)];
        if plan.data_plane() == DataPlane::Ambient {
            let marks = RangeSet::one(0).or(&RangeSet::one(AmbientRedirect::ZTUNNEL_MARK.value().into()));
            starts.iter_mut().for_each(|start| start.packets.set(VariedField::Mark, marks.clone()));
        }
        starts
    }

    /// What the pod sends to itself, which the plan captures if it is the proxy's; and queries to a resolver in it, such as one at
    /// 127.0.0.53. What goes to another one over TCP is asked about as all else.
    fn within_pod(&self) -> Vec<Start> {
        let (localhost, lo) = (one(localhost(self.family)), RangeSet::one(LO));
        let to_itself = |from: &RangeSet, to: &RangeSet| {
            Start::sent(Traffic::ProxyToSelf, self.first(Protocol::Tcp, from, to, &lo))
        };
        let delivered = |to: RangeSet| to.and(&self.delivered);
        let resolvers = delivered(loopback(self.family));
        let mut starts = Vec::from([
            to_itself(&localhost, &delivered(one(self.family.passthrough()))),
            self.query(Protocol::Tcp, &localhost, &resolvers, &lo),
            self.query(Protocol::Udp, &localhost, &resolvers, &lo),
        ]);
        for own in self.own.iter().map(|at| one(*at)) {
            starts.push(to_itself(&own, &own));
            starts.push(self.query(Protocol::Udp, &own, &delivered(own.clone()), &lo));
        }
        starts
    }

    /// The proxy's connections to the application: from the address that is kept for that or, where the plan marks packets, in the
    /// name of the client.
    fn to_application(&self, plan: &RulePlan) -> Vec<Start> {
        let (from, mark) = match (plan.policy_routes(), plan.data_plane()) {
            (None, _) => (one(self.family.passthrough()), 0),
            (Some(routes), DataPlane::Sidecar) => (self.far.clone(), routes.mark().value()),
            (Some(_), DataPlane::Ambient) => (self.far.clone(), AmbientRedirect::ZTUNNEL_MARK.value()),
        };
        let to = |at: &IpAddr| {
            let mut packets = self.first(Protocol::Tcp, &from, &one(*at), &RangeSet::one(LO));
            packets.set_one(VariedField::Mark, mark);
            packets.set(VariedField::User, ids(plan.proxy_users()));
            packets.set(VariedField::Group, ids(plan.proxy_groups()));
            // The application does not have the proxy's own ports.
            packets.set(VariedField::Port, exempt_ports(plan).complement(u16::MAX.into()));
            let mut start = Start::sent(Traffic::ToApplication, packets);
            start.given.names_client = plan.policy_routes().is_some();
            start
        };
        self.own.iter().map(to).collect()
    }
}

/// The ports to which a plan leaves connections from outside alone: those that it names, the proxy's own among them.
pub(super) fn exempt_ports(plan: &RulePlan) -> RangeSet {
    let is_exempt = |setting: Key| {
        let excluded = [Key::InboundExcludePorts, Key::AmbientInboundExcludePorts, Key::InboundTunnelPort];
        excluded.contains(&setting)
    };
    let exempt = plan.planned_rules().iter().filter(|planned| is_exempt(planned.setting()));
    let range = |condition: &Match| {
        let Match::DestinationPort(is) = condition else { return None };
        (!is.not).then(|| (is.value.first().into(), is.value.last().into()))
    };
    let ports = exempt.flat_map(|planned| &planned.rule().matches).filter_map(range);
    let tunnel = u128::from(AmbientRedirect::TUNNEL_PORT.number());
    let of_ztunnel = (plan.data_plane() == DataPlane::Ambient).then_some((tunnel, tunnel));
    RangeSet::of(ports.chain(of_ztunnel).collect())
}

/// These users or groups; any, if none is named.
fn ids(named: impl Iterator<Item = u32>) -> RangeSet {
    match RangeSet::each(named) {
        none if none.is_empty() => RangeSet::range(0, u32::MAX.into()),
        some => some,
    }
}

fn one(address: IpAddr) -> RangeSet {
    RangeSet::one(number(address))
}

fn all(addresses: &[IpAddr]) -> RangeSet {
    RangeSet::each(addresses.iter().copied().map(number))
}

/// Addresses of many hosts, and of none.
pub(crate) fn multicast(family: Family) -> RangeSet {
    match family {
        // 0.0.0.0, 224.0.0.0/4 and beyond.
        Family::V4 => RangeSet::of([(0, 0), (0xe000_0000, 0xffff_ffff)].into()),
        // ::, ff00::/8.
        Family::V6 => RangeSet::of([(0, 0), (0xff << 120, u128::MAX)].into()),
    }
}
